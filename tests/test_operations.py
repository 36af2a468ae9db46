"""Locks of run folders, signals, restarts and metrics, each with real processes, signals and scrapes."""
from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from mmrl.config_engine import OperationsConfig
from mmrl.errors import ConfigError, MissingExtraError
from mmrl.operations.interrupts import Interrupted, Interrupts
from mmrl.operations.lock import RunLock
from mmrl.operations.prometheus import metric_name, metrics_endpoint
from mmrl.operations.restart import resumes
from mmrl.world import World
from tests.engine_kit import ENVIRONMENT, REPO

HOLD = """
import sys, time
from pathlib import Path
from mmrl.errors import ConfigError
from mmrl.operations.lock import RunLock
lock = RunLock(Path(sys.argv[1]), beat_s=float(sys.argv[2]), stale_s=float(sys.argv[3]))
try:
    lock.acquire()
except ConfigError as error:
    print("refused", error, flush=True)
else:
    print("held", flush=True)
    sys.stdin.readline()
    {end}
"""


def holder(run: Path, *, end: str = "lock.release()", beat_s: float = 0.05, stale_s: float = 60.0,
           **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", HOLD.format(end=end), str(run), str(beat_s), str(stale_s)], cwd=REPO, text=True,
                            env={**ENVIRONMENT, **environment}, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def end(*processes: subprocess.Popen[str]) -> None:
    for process in processes:
        process.kill()
        process.communicate()


def foreign(run: Path, age_s: float, **facts: Any) -> Path:
    """A lock file as another host leaves it, last touched `age_s` seconds ago."""
    path = run.with_name(f".{run.name}.lock")
    path.write_text(json.dumps({"host": "node17", "boot": "b", "namespace": "n", "pid": 4242, "born": 1.0, "token": "t",
                                "since": "2026-01-01", **facts}))
    os.utime(path, (time.time() - age_s,) * 2)
    return path


def test_a_second_launch_is_refused_by_host_and_pid_until_the_first_lets_go(tmp_path: Path) -> None:
    run, first = tmp_path / "runs" / "one", holder(tmp_path / "runs" / "one")
    try:
        assert said(first) == "held\n"
        with pytest.raises(ConfigError, match=rf"process {first.pid} on {os.uname().nodename}.*kill -TERM {first.pid}"):
            RunLock(run).acquire()
        first.communicate("go\n", timeout=60)
        lock = RunLock(run)
        lock.acquire()
        RunLock(run).acquire()  # the same process may
        other = holder(run)
        assert said(other) == "held\n", "an object that is gone lets go"
        end(other)
    finally:
        end(first)


def test_a_killed_holder_is_recognised_at_once_and_another_host_by_its_age(tmp_path: Path) -> None:
    run, first = tmp_path / "one", holder(tmp_path / "one")
    try:
        assert said(first) == "held\n"
        first.kill()
        first.wait()
        lock = RunLock(run)
        lock.acquire()
        assert json.loads(lock.path.read_text())["pid"] == os.getpid()
        lock.release()
        assert list(tmp_path.iterdir()) == []
    finally:
        end(first)
    path = foreign(run, 100)
    with pytest.raises(ConfigError, match=r"process 4242 on node17.*10[0-9] s ago.*on that host"):
        RunLock(run).acquire()
    os.utime(path, (time.time() - 181,) * 2)
    lock = RunLock(run)
    lock.acquire()
    lock.release()


def test_a_restart_of_the_same_launch_waits_for_a_dead_hosts_lock(tmp_path: Path, capfd: pytest.CaptureFixture[str],
                                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job7")
    foreign(tmp_path / "one", 0.0, launch="job7")
    lock = RunLock(tmp_path / "one", beat_s=0.1, stale_s=0.5)
    lock.acquire()
    assert "waiting for process 4242 on node17" in capfd.readouterr().err
    lock.release()


def test_of_many_launches_at_once_exactly_one_takes_over_a_stale_lock(tmp_path: Path) -> None:
    foreign(tmp_path / "one", 1000)
    many = [holder(tmp_path / "one") for _ in range(4)]
    try:
        assert sorted(said(p).split()[0] for p in many) == ["held", "refused", "refused", "refused"]
    finally:
        end(*many)


def test_a_holder_that_was_taken_over_is_told_and_does_not_remove_the_new_lock(tmp_path: Path) -> None:
    lock = RunLock(tmp_path / "one", beat_s=0.01)
    lock.acquire()
    lock.check()
    path = foreign(tmp_path / "one", 0)
    with pytest.raises(ConfigError, match="process 4242 on node17"):
        lock.check()
    lock.release()
    assert path.exists()


def test_beats_show_life(tmp_path: Path) -> None:
    lock = RunLock(tmp_path / "one", beat_s=0.01)
    lock.acquire()
    os.utime(lock.path, (0, 0))
    deadline = time.monotonic() + 60
    while lock.path.stat().st_mtime < 1e9 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert lock.path.stat().st_mtime > 1e9
    lock.release()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_ends_the_run_after_a_whole_step_with_its_checkpoint(number: signal.Signals) -> None:
    before, saved, world = signal.getsignal(number), [], World()
    with pytest.raises(Interrupted, match=f"{number.name}: ended after step 3; its checkpoint is written") as stopped, \
            Interrupts(60) as interrupts:
        interrupts.stop_if_asked(world, 2, lambda: 0, lambda: saved.append(2))
        os.kill(os.getpid(), number)
        interrupts.stop_if_asked(world, 3, lambda: saved[-1], lambda: saved.append(3))
    assert saved == [3] and stopped.value.status == 128 + number and stopped.value.signal == number.name
    assert signal.getsignal(number) == before


STUCK = """
import ctypes, subprocess, sys
from mmrl.operations.interrupts import Interrupts
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
with Interrupts(float(sys.argv[1]), lambda name: print("abandoned", name, flush=True)):
    print(child.pid, flush=True)
    mutex, lock = ctypes.create_string_buffer(256), ctypes.CDLL(None).pthread_mutex_lock
    lock(mutex), lock(mutex)      # for ever inside C, as in a collective whose peer is gone: no signal handler runs
"""


@pytest.mark.parametrize("second", [False, True], ids=["the grace period ends", "a second signal comes"])
def test_a_step_that_hangs_is_given_up_with_its_children(second: bool) -> None:
    import psutil

    process = subprocess.Popen([sys.executable, "-c", STUCK, "600" if second else "0.3"], cwd=REPO, env=ENVIRONMENT, text=True,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        child = int(said(process))
        process.send_signal(signal.SIGTERM)
        if second:
            time.sleep(0.3)
            process.send_signal(signal.SIGUSR1)
        out, err = process.communicate(timeout=300)
        assert process.returncode == 143 and out == "abandoned SIGTERM\n"
        assert ("a second signal (SIGUSR1)" if second else "operations.grace_s = 0.3") in err and "--resume" in err
        assert not psutil.pid_exists(child)
    finally:
        end(process)


def test_only_what_this_launch_began_is_resumed_unasked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import psutil

    world, run = World(), tmp_path / "run"
    parent = psutil.Process(os.getppid()).create_time()
    assert [resumes(asked, run, world) for asked in (False, True, "auto")] == [False, True, False]
    run.mkdir()

    def started(offset: float) -> None:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime(parent + offset))
        (run / "run.json").write_text(json.dumps({"started": stamp}))

    started(60)
    assert [resumes(asked, run, world) for asked in (False, True, "auto")] == [False, True, True]
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert resumes(False, run, world) is True
    started(-60)  # an earlier launch's: it still needs --resume or --overwrite
    assert resumes(False, run, world) is False
    (run / "run.json").write_text("{")
    assert resumes(False, run, world) is False


def test_names_of_metrics() -> None:
    assert metric_name("train/logprob_gap/mean") == "mmrl_train_logprob_gap_mean"
    assert metric_name("eval/sampled/acc@0.5") == "mmrl_eval_sampled_acc_0_5"


def test_a_port_that_is_taken_and_a_missing_package_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[Any] = []

    def listener(kind: str, payload: Any) -> None:
        heard.append((kind, payload))

    with metrics_endpoint(OperationsConfig(metrics_port=None), "r", 0, listener) as same:
        assert same is listener
    with metrics_endpoint(OperationsConfig(metrics_port=0), "r", 0, listener) as hear:
        hear("start", {"step": 0, "notes": ["a note"], "config": type("C", (), {"train": type("T", (), {"steps": 5})})})
        port = int(heard[0][1]["notes"][1].rsplit(":", 1)[1].split("/")[0])
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port}.*operations.metrics_port"), \
                metrics_endpoint(OperationsConfig(metrics_port=port), "r", 0, listener):
            pass
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(MissingExtraError, match=r"mmrl\[metrics\]"), \
            metrics_endpoint(OperationsConfig(metrics_port=0), "r", 0, listener):
        pass
