"""Runs that are asked to end, killed and restarted: what comes out equals the run that nobody disturbed."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file

from mmrl.config import load_config
from mmrl.errors import ConfigError
from mmrl.operations.interrupts import Interrupted
from mmrl.training.trainer import Trainer
from scripts.torture_resume import differences
from tests.distributed.test_distributed import compare, free_port
from tests.kits.engine_kit import (
    ENVIRONMENT,
    REPO,
    album_data,
    config_file,
    picture,
    read_jsonl,
    small_run,
    start_cli,
)
from tests.kits.robot_kit import config_of, saved_vla

pytestmark = pytest.mark.slow
PATIENCE_S = 300


def make(folder: Path, name: str, **sections: Any) -> str:
    """A run of six steps that saves every fourth; the evaluations pick the best checkpoint."""
    rows = [[picture((112, 84), i)] * (i % 3) for i in range(7)]
    held = album_data(folder / "data", rows[:3], "held")
    tree = small_run(
        folder / "runs",
        album_data(folder / "data", rows),
        held,
        **{
            "name": name,
            "train": {"steps": 6, "save_every": 4, "keep_last": 9},
            "eval": {"every": 3},
            "optim": {"lr": 0.005},
            **sections,
        },
    )
    return config_file(folder / f"{name}.yaml", tree)


def ask_to_end(after: int, number: signal.Signals = signal.SIGTERM) -> Callable[[str, Any], None]:
    """A listener that signals this very process when step `after` was written."""

    def listen(kind: str, payload: Any) -> None:
        if kind == "step" and payload["step"] == after:
            os.kill(os.getpid(), number)

    return listen


def waited(condition: Callable[[], Any], process: subprocess.Popen[str]) -> None:
    """Until `condition` holds; the process must not end before."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert process.poll() is None and time.monotonic() < deadline, process.communicate(
            timeout=60
        )
        time.sleep(0.005)


def rows_of(run: Path) -> int:
    file = run / "metrics.jsonl"
    return file.read_bytes().count(b"\n") if file.exists() else 0


@pytest.mark.parametrize(
    "schedule", [{}, {"kind": "pipelined", "order": "key"}], ids=["serial", "pipelined"]
)
def test_a_run_that_was_asked_to_end_and_resumed_equals_the_undisturbed_one(
    schedule: dict[str, Any], tmp_path: Path
) -> None:
    runs = tmp_path / "runs"
    Trainer(load_config(make(tmp_path, "calm", schedule=schedule))).fit()
    config = load_config(make(tmp_path, "cut", schedule=schedule))
    with pytest.raises(
        Interrupted,
        match=r"SIGUSR1: ended after step 3; its checkpoint is written; continue with "
        r"`mmrl resume .*/cut --trust-code`",
    ):
        Trainer(config, on_event=ask_to_end(3, signal.SIGUSR1)).fit()
    info = json.loads((runs / "cut" / "run.json").read_text())
    assert (info["status"], info["signal"]) == ("interrupted", "SIGUSR1") and not (
        runs / ".cut.lock"
    ).exists()
    Trainer(config, resume="auto").fit()
    verdicts = differences(runs / "calm", runs / "cut")
    assert all(verdicts.values()), verdicts
    assert json.loads((runs / "cut" / "run.json").read_text())["resumed_at"] == 3


def test_an_asynchronous_run_ends_and_goes_on(tmp_path: Path) -> None:
    config = load_config(make(tmp_path, "cut", schedule={"kind": "async", "staleness": 1}))
    idle = Trainer(config)
    asked = ask_to_end(2)

    def told(kind: str, payload: Any) -> None:
        asked(kind, payload)
        if kind == "start":
            with pytest.raises(
                ConfigError, match=r"cut to be free, found that this very process uses it"
            ):
                idle.fit()

    with pytest.raises(Interrupted):
        Trainer(config, on_event=told).fit()
    with pytest.raises(ConfigError, match="already holds a run"):
        idle.fit()
    idle = Trainer(config, resume=True)
    Trainer(config, resume=True).fit()
    with pytest.raises(
        ConfigError,
        match=r"with its last checkpoint of step 2, found one of step 6; make a new trainer",
    ):
        idle.fit()
    rows = read_jsonl(tmp_path / "runs" / "cut" / "metrics.jsonl")
    assert [r["step"] for r in rows] == [1, 2, 3, 4, 5, 6]
    assert all(r["train/staleness"] <= 1 for r in rows)


def test_an_embodied_run_ends_and_goes_on_bit_for_bit(tmp_path: Path) -> None:
    policy = saved_vla(tmp_path)
    options = (
        f"dir={tmp_path}",
        "train.steps=3",
        "train.save_every=9",
        "schedule.kind=pipelined",
        "schedule.order=key",
    )
    Trainer(config_of(policy, "name=calm", *options)).fit()
    cut = config_of(policy, "name=cut", *options)
    with pytest.raises(Interrupted, match="ended after step 2; its checkpoint is written"):
        Trainer(cut, on_event=ask_to_end(2)).fit()
    Trainer(cut, resume="auto").fit()
    calm, other = (
        load_file(str(tmp_path / n / "checkpoints/step_000003/model.safetensors"))
        for n in ("calm", "cut")
    )
    assert calm.keys() == other.keys() and all(torch.equal(calm[k], other[k]) for k in calm)


def scrape(address: str) -> dict[str, float]:
    """Metric and labels -> value, as Prometheus' own parser reads them."""
    from prometheus_client.parser import text_string_to_metric_families

    with urllib.request.urlopen(address, timeout=60) as answer:
        text = answer.read().decode()
    return {
        f"{s.name}/{s.labels.get('key', '')}": s.value
        for f in text_string_to_metric_families(text)
        for s in f.samples
    }


def test_a_scraped_command_with_workers_ends_by_a_signal_to_its_group_and_goes_on(
    tmp_path: Path,
) -> None:
    """Schedulers signal workers too: they must leave the end to the run, or rewards of its last step would fail."""
    sections = {
        "data": {"cache": {"dir": str(tmp_path / "cache")}},
        "train": {"steps": 12, "save_every": 50, "keep_last": 9},
        "eval": {"every": 0},
    }
    runs, cut = tmp_path / "runs", make(tmp_path, "cut", **sections)
    Trainer(load_config(make(tmp_path, "calm", **sections))).fit()
    process = start_cli(
        "train",
        cut,
        "reward.workers=1",
        "data.workers=1",
        "operations.metrics_port=0",
        start_new_session=True,
    )
    try:
        assert process.stderr is not None
        address = ""
        while not address:
            line = process.stderr.readline()
            assert line, "the process ended"
            address = "".join(re.findall(r"metrics: (http://\S+)", line))
        waited(lambda: rows_of(runs / "cut") >= 2, process)
        found = scrape(address)
        assert (
            found["mmrl_steps_total/"] >= 1
            and found["mmrl_up/"] == 1
            and found["mmrl_total_steps/"] == 12
        )
        assert found["mmrl_step/step"] == found["mmrl_steps_total/"]
        assert 0 <= found["mmrl_train_reward_mean/train/reward/mean"] <= 1
        with pytest.raises(
            ConfigError,
            match=rf"process {process.pid} on {os.uname().nodename}, started .* uses it",
        ):
            Trainer(load_config(cut), resume="auto")
        children = psutil.Process(process.pid).children(recursive=True)
        assert len(children) >= 2
        for _ in range(2):  # as where the manager and torchrun's agent both signal
            os.killpg(process.pid, signal.SIGTERM)
        _, err = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 143, err
        assert (
            "SIGTERM: ended after step" in err
            and "its checkpoint is written; continue with `mmrl resume " in err
        )
        assert not psutil.wait_procs(children, timeout=60)[1]
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    Trainer(load_config(cut), resume="auto").fit()
    verdicts = differences(runs / "calm", runs / "cut")
    assert all(verdicts.values()), verdicts


AUDIT = """
import os, sys
if os.environ.get("RANK", "0") != "0":
    folder, log = os.environ["AUDIT_FOLDER"], open(os.environ["AUDIT_LOG"], "a")
    def hook(event, args):
        writes = event == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        changes = event in ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "os.symlink", "os.utime", "shutil.rmtree")
        if (writes or changes) and str(args[0]).startswith(folder):
            print(event, args[0], file=log, flush=True)
    sys.addaudithook(hook)
"""


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    """The run that two processes repeat, made by one."""
    folder = tmp_path_factory.mktemp("two")
    trainer = Trainer(
        load_config(make(folder, "one", train={"steps": 8, "save_every": 2, "keep_last": 9}))
    )
    trainer.fit()
    return trainer


def audited(one: Trainer, tmp_path: Path) -> tuple[str, dict[str, str]]:
    """The configuration, and an environment in which every write of a process other than the first below runs/ is logged."""
    runs, site = one.folder.path.parent, tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(AUDIT)
    return str(runs.parent / "one.yaml"), {
        **ENVIRONMENT,
        "GLOO_SOCKET_IFNAME": "lo",
        "AUDIT_FOLDER": str(runs),
        "AUDIT_LOG": str(tmp_path / "audit.log"),
        "PYTHONPATH": f"{site}:{REPO}",
        "MMRL_PYTHON": sys.executable,
    }


def stop_all(process: subprocess.Popen[str]) -> None:
    """Kill what `process` started; the ranks are in sessions of their own."""
    family: list[Any] = [process]
    with suppress(psutil.Error):
        family += psutil.Process(process.pid).children(recursive=True)
    for member in family:
        with suppress(psutil.Error):
            member.kill()
    process.communicate()


def test_a_killed_process_is_restarted_with_the_others_and_the_run_completes(
    one: Trainer, tmp_path: Path
) -> None:
    config, environment = audited(one, tmp_path)
    two = one.folder.path.parent / "two"
    process = subprocess.Popen(
        [
            "bash",
            str(REPO / "scripts/launch_torchrun.sh"),
            "--gpus",
            "2",
            "--restarts",
            "1",
            "--",
            config,
            "name=two",
        ],
        cwd=REPO,
        text=True,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    try:
        waited(lambda: rows_of(two) >= 3, process)
        ranks = psutil.Process(process.pid).children()
        victim = max(ranks, key=lambda p: int(p.environ()["RANK"]))
        victim.kill()
        out, _ = process.communicate(timeout=PATIENCE_S)
    finally:
        stop_all(process)
    assert process.returncode == 0, out
    info = json.loads((two / "run.json").read_text())
    assert info["status"] == "finished" and info["resumed_at"] >= 2
    compare(one, two)
    assert (tmp_path / "audit.log").read_text() == "", (
        "only the main process writes to the run's folder"
    )


SRUN = """#!/usr/bin/env bash
# Like srun with one task per node of 127.0.0.1's two: runs the command for each, remembers them for scancel, fails if one fails.
while [[ "$1" == --* ]]; do shift; done
export SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=2
for node in 0 1; do SLURM_NODEID=$node SLURM_PROCID=$node setsid "$@" & echo $! >> "$FAKE/tasks"; done
status=0
for task in $(jobs -p); do wait "$task" || status=$?; done
exit "$status"
"""
SCANCEL = """#!/usr/bin/env bash
for task in $(cat "$FAKE/tasks"); do kill "-${1#--signal=}" "$task"; done
"""
SCONTROL = """#!/usr/bin/env bash
case "$1" in
  show) echo 127.0.0.1; echo 127.0.0.1 ;;
  requeue) echo "$2" > "$FAKE/requeued" ;;
esac
"""


def test_two_nodes_under_slurm_save_themselves_are_queued_again_and_complete(
    one: Trainer, tmp_path: Path
) -> None:
    """The batch script and the launch script as they are; srun, scancel and scontrol do on this machine what Slurm's do."""
    config, environment = audited(one, tmp_path)
    fake, two = tmp_path / "fake", one.folder.path.parent / "nodes"
    fake.mkdir()
    for name, text in (("srun", SRUN), ("scancel", SCANCEL), ("scontrol", SCONTROL)):
        (fake / name).write_text(text)
        (fake / name).chmod(0o755)
    job = str(free_port() - 20000)  # the port is made of it
    environment |= {
        "PATH": f"{fake}:{os.environ['PATH']}",
        "FAKE": str(fake),
        "SLURM_SUBMIT_DIR": str(REPO),
        "SLURM_JOB_ID": job,
        "SLURM_NNODES": "2",
        "SLURM_GPUS_ON_NODE": "1",
        "SLURM_JOB_NODELIST": "local[0-1]",
    }

    def submit(asked_to_end: bool) -> tuple[int, str]:
        (fake / "tasks").unlink(missing_ok=True)
        process = subprocess.Popen(
            ["bash", str(REPO / "scripts/slurm_train.sbatch"), config, "name=nodes"],
            cwd=REPO,
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        try:
            if asked_to_end:
                waited(lambda: rows_of(two) >= 3, process)
                process.send_signal(signal.SIGUSR1)
            return process.wait(timeout=PATIENCE_S), process.communicate(timeout=60)[0]
        finally:
            stop_all(process)

    status, out = submit(asked_to_end=True)
    assert status != 0 and "its checkpoint is written" in out, out
    assert (fake / "requeued").read_text() == f"{job}\n"
    assert json.loads((two / "run.json").read_text())["signal"] == "SIGTERM" and rows_of(two) < 8
    (fake / "requeued").unlink()
    status, out = submit(asked_to_end=False)
    assert status == 0 and not (fake / "requeued").exists(), out
    compare(one, two)
    assert (tmp_path / "audit.log").read_text() == ""


TASKS = """#!/usr/bin/env bash
echo "$*" > "$FAKE/asked"
trap 'exit 143' TERM
echo $$ > "$FAKE/tasks.new"; mv "$FAKE/tasks.new" "$FAKE/tasks"
while true; do sleep 0.1; done
"""


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_the_batch_script_queues_again_what_slurm_ends_and_not_what_is_cancelled(
    number: signal.Signals, tmp_path: Path
) -> None:
    for name, text in (("srun", TASKS), ("scancel", SCANCEL), ("scontrol", SCONTROL)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "FAKE": str(tmp_path),
        "SLURM_SUBMIT_DIR": str(REPO),
        "SLURM_JOB_ID": "77",
        "SLURM_NNODES": "2",
        "SLURM_JOB_NODELIST": "local[0-1]",
        "SLURM_CPUS_PER_TASK": "6",
    }
    process = subprocess.Popen(
        ["bash", str(REPO / "scripts/slurm_train.sbatch"), "c.yaml"],
        cwd=REPO,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    try:
        waited((tmp_path / "tasks").exists, process)
        process.send_signal(number)
        out, _ = process.communicate(timeout=PATIENCE_S)
    finally:
        stop_all(process)
    assert process.returncode == 143 and (tmp_path / "requeued").exists() == (
        number == signal.SIGUSR1
    ), out
    asked = (tmp_path / "asked").read_text()
    assert (
        asked.startswith("--kill-on-bad-exit=0 --cpus-per-task=6 bash ")
        and "--grace 120 -- c.yaml" in asked
    )


def test_wrong_arguments_of_the_launch_script_are_named() -> None:
    def launch(*arguments: str) -> tuple[int, str]:
        done = subprocess.run(
            ["bash", str(REPO / "scripts/launch_torchrun.sh"), *arguments],
            capture_output=True,
            text=True,
            env={**os.environ, "MMRL_PYTHON": "python3"},
            timeout=60,
        )
        return done.returncode, done.stdout + done.stderr

    assert "--nodes 2" in launch("--nodes", "2", "--", "c.yaml")[1]
    assert (
        launch("c.yaml")[0]
        == launch("--nodes", "two", "--", "c.yaml")[0]
        == launch("--rank")[0]
        == 2
    )
    status, out = launch(
        "--dry-run",
        "--nodes",
        "1:4",
        "--gpus",
        "8",
        "--rdzv",
        "n0:29500",
        "--",
        "c.yaml",
        "name=a b",
    )
    assert status == 0 and "--nnodes 1:4 --nproc-per-node 8" in out
    assert r"train c.yaml name=a\ b operations.grace_s=100 --auto-resume" in out


def test_the_launch_script_gives_the_step_up_before_torchrun_kills_and_names_launches_apart(
    tmp_path: Path,
) -> None:
    recipe = tmp_path / "own.yaml"
    recipe.write_text("operations:\n  grace_s: 40\n")

    def command(*arguments: str) -> str:
        return subprocess.run(
            [
                "bash",
                str(REPO / "scripts/launch_torchrun.sh"),
                "--dry-run",
                "--rdzv",
                "h:1",
                *arguments,
            ],
            text=True,
            capture_output=True,
            check=True,
            timeout=60,
            env={**os.environ, "MMRL_PYTHON": "python3"},
        ).stdout

    def rdzv_id(*arguments: str) -> str:
        return command(*arguments).split("--rdzv-id ")[1].split()[0]

    for grace, expected in (("600", "580"), ("60", "40"), ("30", "15")):
        assert f"operations.grace_s={expected} --auto-resume" in command(
            "--grace", grace, "--", "c.yaml"
        )
    given = command("--grace", "600", "--", "c.yaml", "operations.grace_s=7")
    assert given.count("grace_s") == 1 and "grace_s" not in command("--", str(recipe))
    assert (
        rdzv_id("--", "c.yaml")
        == rdzv_id("--address", "node7", "--", "c.yaml")
        != rdzv_id("--", "c.yaml", "name=b")
    )
    assert rdzv_id("--id", "x", "--", "c.yaml") == "x"
