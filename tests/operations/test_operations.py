"""Locks of run folders, signals, restarts and metrics, each with real processes, signals and scrapes."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from mmrl.config import OperationsConfig
from mmrl.distributed.world import World
from mmrl.errors import ConfigError, MissingExtraError
from mmrl.operations import lock as lock_module
from mmrl.operations.interrupts import Interrupted, Interrupts
from mmrl.operations.lock import RunLock
from mmrl.operations.prometheus import ALARMS, RunCollector, metric_name, metrics_endpoint
from mmrl.operations.restart import resumes
from mmrl.training.alarms import Alarm
from tests.kits.engine_kit import ENVIRONMENT, REPO
from tests.kits.fast_kit import first_fast

HOLD = """
import sys, time
from pathlib import Path
from mmrl.errors import ConfigError
from mmrl.operations import lock as lock_module
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


def holder(
    run: Path,
    *,
    end: str = "lock.release()",
    beat_s: float = 0.05,
    stale_s: float = 60.0,
    **environment: str,
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", HOLD.format(end=end), str(run), str(beat_s), str(stale_s)],
        cwd=REPO,
        text=True,
        env={**ENVIRONMENT, **environment},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )


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
    path.write_text(
        json.dumps(
            {
                "host": "node17",
                "boot": "b",
                "namespace": "n",
                "pid": 4242,
                "born": 1.0,
                "token": "t",
                "since": "2026-01-01",
                **facts,
            }
        )
    )
    os.utime(path, (time.time() - age_s,) * 2)
    return path


def test_a_second_launch_is_refused_by_host_and_pid_until_the_first_lets_go(tmp_path: Path) -> None:
    run, first = tmp_path / "runs" / "one", holder(tmp_path / "runs" / "one")
    try:
        assert said(first) == "held\n"
        with pytest.raises(
            ConfigError,
            match=rf"process {first.pid} on {os.uname().nodename}.*kill -TERM {first.pid}",
        ):
            RunLock(run).acquire()
        first.communicate("go\n", timeout=60)
        lock = RunLock(run)
        lock.acquire()
        with pytest.raises(ConfigError, match="this very process uses it"):
            RunLock(run).acquire()
        del lock
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


def test_a_process_is_told_by_when_it_was_started(tmp_path: Path) -> None:
    """By the kernel's own clock since boot, however its program is called: the name stands in the same line as the time."""
    program = tmp_path / "a) R 1 2 (b"
    program.symlink_to("/bin/sh")
    ticks = 2 / os.sysconf("SC_CLK_TCK")
    before = time.clock_gettime(time.CLOCK_BOOTTIME)
    process = subprocess.Popen([program, "-c", "read line"], stdin=subprocess.PIPE)
    try:
        after = time.clock_gettime(time.CLOCK_BOOTTIME)
        born = lock_module._born(process.pid)
        assert born is not None and before - ticks <= born <= after + ticks
        assert Path(f"/proc/{process.pid}/comm").read_text().strip() == program.name
        time.sleep(3 * ticks)
        assert lock_module._born(process.pid) == born, "no time it has used, and nothing that grows"
    finally:
        process.kill()
        process.stdin.close()  # type: ignore[union-attr]
    while Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
        time.sleep(0.01)
    assert lock_module._born(process.pid) is None, (
        "nobody has waited for it yet, and it holds nothing"
    )
    process.wait()
    assert lock_module._born(process.pid) is None


@pytest.mark.slow
def test_a_restart_of_the_same_launch_waits_for_a_dead_hosts_lock(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job7")
    foreign(tmp_path / "one", 0.0, launch="job7")
    lock = RunLock(tmp_path / "one", beat_s=0.1, stale_s=0.5)
    lock.acquire()
    assert "waiting for process 4242 on node17" in capfd.readouterr().err
    lock.release()


@pytest.mark.slow
def test_of_many_launches_at_once_exactly_one_takes_over_a_stale_lock(tmp_path: Path) -> None:
    foreign(tmp_path / "one", 1000)
    many = [holder(tmp_path / "one") for _ in range(4)]
    try:
        assert sorted(said(p).split()[0] for p in many) == ["held", "refused", "refused", "refused"]
    finally:
        end(*many)


def test_a_holder_that_was_taken_over_is_told_and_does_not_remove_the_new_lock(
    tmp_path: Path,
) -> None:
    lock = RunLock(tmp_path / "one", beat_s=0.01)
    lock.acquire()
    lock.check()
    path = foreign(tmp_path / "one", 0)
    with pytest.raises(ConfigError, match="process 4242 on node17"):
        lock.check()
    lock.release()
    assert path.exists()


def test_a_lock_that_was_replaced_after_it_was_judged_stale_stays(tmp_path: Path) -> None:
    class Late(RunLock):
        def _stale(self, holder: dict[str, Any]) -> bool:
            verdict = super()._stale(holder)
            foreign(tmp_path / "one", 0, host="node18", token="new")  # another host was faster
            return verdict

    path = foreign(tmp_path / "one", 1000)
    with pytest.raises(ConfigError, match="process 4242 on node18"):
        Late(tmp_path / "one").acquire()
    assert json.loads(path.read_text())["token"] == "new" and list(tmp_path.iterdir()) == [path]


def test_a_lock_that_cannot_be_read_for_a_while_ends_neither_the_run_nor_its_beats(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    lock = RunLock(tmp_path / "one", beat_s=0.01)
    lock.acquire()
    aside = lock.path.rename(tmp_path / "aside")
    lock.path.mkdir()  # reading it raises an OSError
    lock.check()
    lock.check()
    assert capfd.readouterr().err.count("warning: cannot read the run's lock") == 1
    time.sleep(0.1)
    lock.path.rmdir()
    aside.rename(lock.path)
    os.utime(lock.path, (0, 0))
    deadline = time.monotonic() + 60
    while lock.path.stat().st_mtime < 1e9 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert lock.path.stat().st_mtime > 1e9
    lock.check()
    lock.release()
    assert not lock.path.exists()


@pytest.mark.parametrize("number", [errno.EPERM, errno.EOPNOTSUPP])
def test_a_file_system_without_hard_links_locks_too(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def link(source: Path, target: Path) -> None:
        raise OSError(number, os.strerror(number), str(target))

    monkeypatch.setattr(os, "link", link)
    lock = RunLock(tmp_path / "one")
    foreign(tmp_path / "one", 1000)
    lock.acquire()
    lock.check()
    assert json.loads(lock.path.read_text())["pid"] == os.getpid() and list(tmp_path.iterdir()) == [
        lock.path
    ]
    lock.release()
    path = foreign(tmp_path / "one", 0)
    with pytest.raises(ConfigError, match="node17"):
        lock.acquire()
    assert json.loads(path.read_text())["token"] == "t"


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
def test_a_signal_ends_the_run_after_a_whole_step_with_its_checkpoint(
    number: signal.Signals,
) -> None:
    before, saved, world = signal.getsignal(number), [], World()
    with (
        pytest.raises(
            Interrupted, match=f"{number.name}: ended after step 3; its checkpoint is written"
        ) as stopped,
        Interrupts(60) as interrupts,
    ):
        interrupts.stop_if_requested(world, 2, lambda: 0, lambda: saved.append(2))
        os.kill(os.getpid(), number)
        interrupts.stop_if_requested(world, 3, lambda: saved[-1], lambda: saved.append(3))
    assert (
        saved == [3]
        and stopped.value.status == 128 + number
        and stopped.value.signal == number.name
    )
    assert signal.getsignal(number) == before


TWICE = """
import sys
from mmrl.operations.interrupts import Interrupted, Interrupts
from mmrl.distributed.world import World
try:
    with Interrupts(600) as interrupts:
        print("step", flush=True)
        sys.stdin.readline()
        interrupts.stop_if_requested(World(), 5, lambda: 5, lambda: print("saved", flush=True))
except Interrupted as stop:
    print(stop, flush=True)
    raise SystemExit(stop.status)
"""


@pytest.mark.slow
def test_a_signal_that_is_delivered_twice_is_one_request() -> None:
    """As under torchrun where the manager signals the whole tree."""
    process = subprocess.Popen(
        [sys.executable, "-c", TWICE],
        cwd=REPO,
        env=ENVIRONMENT,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert said(process) == "step\n"
        for _ in range(3):
            process.send_signal(signal.SIGTERM)
            time.sleep(0.3)  # two that are pending at a time are one
        out, _ = process.communicate("the step ends\n", timeout=300)
        assert (
            process.returncode == 143
            and "saved" in out
            and "SIGTERM: ended after step 5; its checkpoint is written" in out
        )
    finally:
        end(process)


STUCK = """
import ctypes, signal, subprocess, sys
from mmrl.operations.interrupts import Interrupts
signal.signal(signal.SIGINT, signal.default_int_handler)      # a shell may have started all this with SIGINT ignored
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
with Interrupts(float(sys.argv[1]), lambda name: print("abandoned", name, flush=True), repeat_s=float(sys.argv[2])):
    print(child.pid, flush=True)
    mutex, lock = ctypes.create_string_buffer(256), ctypes.CDLL(None).pthread_mutex_lock
    lock(mutex), lock(mutex)      # for ever inside C, as in a collective whose peer is gone: no signal handler runs
"""


@pytest.mark.parametrize(
    ("second", "repeat_s"),
    first_fast([(None, 10), (signal.SIGINT, 600), (signal.SIGUSR1, 0.1)]),
    ids=["the grace period ends", "SIGINT comes", "a second request comes later"],
)
def test_a_step_that_hangs_is_given_up_with_its_children(
    second: signal.Signals | None, repeat_s: float
) -> None:
    import psutil

    process = subprocess.Popen(
        [sys.executable, "-c", STUCK, "600" if second else "0.3", str(repeat_s)],
        cwd=REPO,
        env=ENVIRONMENT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        child = int(said(process))
        process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + 60
        while second and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.3)
            process.send_signal(second)
        out, err = process.communicate(timeout=300)
        assert process.returncode == 143 and out == "abandoned SIGTERM\n"
        assert (
            f"a second signal ({second.name})" if second else "operations.grace_s = 0.3"
        ) in err and "--resume" in err
        assert not psutil.pid_exists(child)
    finally:
        end(process)


def test_only_what_this_launch_began_is_resumed_unasked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import psutil

    world, run = World(), tmp_path / "run"
    parent = psutil.Process(os.getppid()).create_time()
    assert [resumes(asked, run, world) for asked in (False, "auto")] == [False, False]
    with pytest.raises(ConfigError, match=r"expected a run to continue in .*--auto-resume"):
        resumes(True, run, world)
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


def test_every_alarm_is_a_series_from_the_start() -> None:
    files = ("training/alarms.py", "training/trainer.py", "errors.py")
    written = "".join((REPO / "mmrl" / name).read_text(encoding="utf-8") for name in files)
    names = set(re.findall(r'Alarm\(\s*step,\s*"(\w+)"', written)) | set(
        re.findall(r'^    alarm = "(\w+)"', written, re.MULTILINE)
    )
    assert len(names) > 5 and names <= set(ALARMS)
    collector = RunCollector("r", 0)

    def counts() -> dict[str, float]:
        return {
            s.labels["name"]: s.value
            for f in collector.collect()
            for s in f.samples
            if s.name == "mmrl_alarms_total"
        }

    assert counts() == dict.fromkeys(ALARMS, 0.0)
    collector.hear("alarm", Alarm(3, "logprob_gap", "far"))
    assert counts() == {**dict.fromkeys(ALARMS, 0.0), "logprob_gap": 1.0}


@pytest.mark.slow
def test_a_port_that_is_taken_and_a_missing_package_are_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    heard: list[Any] = []

    def listener(kind: str, payload: Any) -> None:
        heard.append((kind, payload))

    with metrics_endpoint(OperationsConfig(metrics_port=None), "r", 0, listener) as same:
        assert same is listener
    with metrics_endpoint(OperationsConfig(metrics_port=0), "r", 0, listener) as hear:
        hear(
            "start",
            {
                "step": 0,
                "notes": ["a note"],
                "config": type("C", (), {"train": type("T", (), {"steps": 5})}),
            },
        )
        port = int(heard[0][1]["notes"][1].rsplit(":", 1)[1].split("/")[0])
        with (
            pytest.raises(ConfigError, match=f"127.0.0.1:{port}.*operations.metrics_port"),
            metrics_endpoint(OperationsConfig(metrics_port=port), "r", 0, listener),
        ):
            pass
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with (
        pytest.raises(MissingExtraError, match=r"\[metrics\]"),
        metrics_endpoint(OperationsConfig(metrics_port=0), "r", 0, listener),
    ):
        pass
