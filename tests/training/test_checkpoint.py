"""Checkpoints appear whole or not at all, survive full disks and kills, and name what is wrong when unreadable."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from mmrl.config import load_config
from mmrl.errors import CheckpointError
from mmrl.training.checkpoint import Checkpoints
from mmrl.training.optim import build_optimizer
from mmrl.training.trainer import Trainer
from scripts._torture_trust_state import file_size_limit
from tests.kits.engine_kit import (
    ENVIRONMENT,
    REPO,
    album_data,
    config_file,
    fresh_policy,
    picture,
    read_jsonl,
    small_run,
    tiny_folder,
)
from tests.kits.fast_kit import first_fast

STATE = {"step": 1, "note": "any JSON"}


def saver(folder: Path, keep_last: int = 2) -> tuple[Checkpoints, Any, torch.optim.AdamW]:
    p = fresh_policy()
    return Checkpoints(folder, keep_last), p, build_optimizer(p.trainable(), load_config().optim)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A folder on a file system of 3 MiB of its own, where mounting is allowed."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = (
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(folder)], capture_output=True
        ).returncode
        == 0
    )
    yield folder
    if mounted:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@contextlib.contextmanager
def full(disk: Path) -> Iterator[None]:
    """Leaves room for 300 kB: a really full disk where `disk` could be mounted, else a limit on file sizes."""
    if not os.path.ismount(disk):
        with file_size_limit(300_000):
            yield
        return
    filler = disk / "filler"
    filler.write_bytes(b"x" * (shutil.disk_usage(disk).free - 300_000))
    try:
        yield
    finally:
        filler.unlink()


def test_keeps_the_last_and_the_best(tmp_path: Path) -> None:
    checkpoints, p, optimizer = saver(tmp_path / "c")
    assert checkpoints.steps() == []
    for step in range(1, 6):
        assert checkpoints.save(step, p, optimizer.state_dict(), STATE) == checkpoints.path(step)
        if step == 2:
            checkpoints.mark_best(step)
    assert checkpoints.steps() == [2, 4, 5], "the best outlives newer ones"
    assert (tmp_path / "c" / "best").resolve() == checkpoints.path(2)
    checkpoints.mark_best(5)
    assert (
        checkpoints.steps() == [4, 5] and os.readlink(tmp_path / "c" / "best") == "step_000005"
    ), "a relative link"
    assert sorted(x.name for x in (tmp_path / "c").iterdir()) == [
        "best",
        "step_000004",
        "step_000005",
    ], "no litter"
    checkpoints.save(5, p, optimizer.state_dict(), {**STATE, "note": "again"})
    assert checkpoints.load_state(5, optimizer.load_state_dict)["note"] == "again"


def test_optimizer_comes_back_exactly(tmp_path: Path) -> None:
    checkpoints, p, optimizer = saver(tmp_path / "c")
    for _, parameter in p.trainable():
        parameter.grad = torch.sin(torch.arange(parameter.numel())).view_as(parameter)
    optimizer.step()
    checkpoints.save(7, p, optimizer.state_dict(), STATE)
    _, _, second = saver(tmp_path / "c")
    assert checkpoints.load_state(7, second.load_state_dict) == STATE
    first_state, second_state = optimizer.state_dict(), second.state_dict()
    assert first_state["param_groups"] == second_state["param_groups"]
    for key, entry in first_state["state"].items():
        assert all(torch.equal(entry[n], second_state["state"][key][n]) for n in entry)


@pytest.mark.parametrize(
    "damage",
    first_fast(
        [
            "truncated",
            "garbage",
            "emptied",
            "removed",
            "another model's",
            "state cut",
            "state removed",
        ]
    ),
)
def test_damaged_checkpoints_are_named(damage: str, tmp_path: Path) -> None:
    checkpoints, p, optimizer = saver(tmp_path / "c", keep_last=3)
    for step in (1, 2):
        checkpoints.save(step, p, optimizer.state_dict(), STATE)
    for _, parameter in p.trainable():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    checkpoints.save(3, p, optimizer.state_dict(), STATE)
    trainer = checkpoints.path(3) / "trainer"
    file = trainer / ("state.json" if "state" in damage else "optimizer.pt")
    data = file.read_bytes()
    if damage == "truncated" or damage == "state cut":
        file.write_bytes(data[: len(data) // 2])
    elif damage == "garbage":
        file.write_bytes(bytes(range(256)) * 40)
    elif damage == "emptied":
        file.write_bytes(b"")
    elif damage == "another model's":
        torch.save(torch.optim.AdamW([torch.nn.Parameter(torch.zeros(2))]).state_dict(), file)
    else:
        file.unlink()
    with pytest.raises(CheckpointError) as caught:
        checkpoints.load_state(3, optimizer.load_state_dict)
    message = str(caught.value)
    assert (
        str(checkpoints.path(3)) in message
        and "remove that folder" in message
        and "1, 2" in message
    )


def test_malicious_optimizer_file_is_not_executed(tmp_path: Path) -> None:
    """A checkpoint may come from someone else: unpickling must run nothing."""
    import pickle

    class Payload:
        def __reduce__(self) -> Any:
            return Path.touch, (tmp_path / "executed",)

    checkpoints, p, optimizer = saver(tmp_path / "c")
    checkpoints.save(1, p, optimizer.state_dict(), STATE)
    file = checkpoints.path(1) / "trainer" / "optimizer.pt"
    for write in (
        lambda: file.write_bytes(pickle.dumps(Payload())),
        lambda: torch.save(Payload(), file),
    ):
        write()
        with pytest.raises(CheckpointError):
            checkpoints.load_state(1, optimizer.load_state_dict)
    assert not (tmp_path / "executed").exists()


def test_a_write_that_fails_leaves_earlier_checkpoints_alone(tmp_path: Path) -> None:
    checkpoints, p, optimizer = saver(tmp_path / "c", keep_last=1)
    checkpoints.save(1, p, optimizer.state_dict(), STATE)
    before = {f: f.read_bytes() for f in checkpoints.path(1).rglob("*") if f.is_file()}
    for limit in (1000, 200_000):  # in the first small file; in the middle of the weights
        with file_size_limit(limit), pytest.raises(CheckpointError) as caught:
            checkpoints.save(2, p, optimizer.state_dict(), STATE)
        message = str(caught.value)
        assert str(tmp_path / "c") in message and "GiB free" in message and "--resume" in message
        assert checkpoints.steps() == [1] and [f.name for f in (tmp_path / "c").iterdir()] == [
            "step_000001"
        ]
    assert {f: f.read_bytes() for f in checkpoints.path(1).rglob("*") if f.is_file()} == before
    checkpoints.save(2, p, optimizer.state_dict(), STATE)
    assert checkpoints.steps() == [2]


def test_full_disk(small_disk: Path) -> None:
    checkpoints, p, optimizer = saver(small_disk / "c")
    checkpoints.save(1, p, optimizer.state_dict(), STATE)
    with (
        full(small_disk),
        pytest.raises(
            CheckpointError, match=r"small/c .*GiB free.*Earlier checkpoints \(1\) are untouched"
        ),
    ):
        checkpoints.save(2, p, optimizer.state_dict(), STATE)
    assert (
        checkpoints.steps() == [1] and checkpoints.load_state(1, optimizer.load_state_dict) == STATE
    )
    checkpoints.save(2, p, optimizer.state_dict(), STATE)
    assert checkpoints.steps() == [1, 2]


SAVE_FOREVER = """
import os
import sys
import threading
from pathlib import Path
from tqdm import tqdm
# before any bar is made: its own lock and its thread do not survive a fork, or a kill of who holds it
tqdm.set_lock(threading.RLock())
tqdm.monitor_interval = 0
from mmrl.training.checkpoint import Checkpoints
from mmrl.config import ModelConfig, load_config
from mmrl.training.optim import build_optimizer
from mmrl.policy.loading import load_policy

p = load_policy(ModelConfig(path=sys.argv[1], device="cpu"))
optimizer = build_optimizer(p.trainable(), load_config().optim)
for _, parameter in p.trainable():
    parameter.grad = parameter.detach().clone()
optimizer.step()
for _ in sys.stdin:  # a process for every line: importing takes longer than all that is killed
    if (child := os.fork()) == 0:
        checkpoints = Checkpoints(Path(sys.argv[2]), keep_last=2)
        for step in range(1, 10 ** 6):
            checkpoints.save(step, p, optimizer.state_dict(), {"step": step})
            checkpoints.mark_best(step)
            print("saved", step, os.getpid(), flush=True)
    os.waitpid(child, 0)
    print("gone", flush=True)
"""


@pytest.mark.slow
def test_killed_while_saving(tmp_path: Path) -> None:
    """kill -9 at moments of a process that does nothing but save: whatever counts as a checkpoint is whole.

    Four kills, and more until one has hit the middle of a save.
    """
    folder = tmp_path / "c"
    leftovers = 0
    p = fresh_policy()
    optimizer = build_optimizer(p.trainable(), load_config().optim)
    with subprocess.Popen(
        [sys.executable, "-c", SAVE_FOREVER, tiny_folder(), str(folder)],
        cwd=REPO,
        env=ENVIRONMENT,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        for attempt in range(20):
            if attempt >= 4 and leftovers:
                break
            print(file=process.stdin, flush=True)
            # libraries may print before it
            saved = next(line.split() for line in process.stdout if line.startswith("saved "))
            time.sleep(0.05 + 0.0137 * attempt)
            os.kill(int(saved[2]), signal.SIGKILL)
            assert "gone\n" in process.stdout
            checkpoints = Checkpoints(folder, 2)
            leftovers += len([f for f in folder.iterdir() if f.name.startswith(".")])
            checkpoints.clean()
            assert checkpoints.steps() and not [
                f for f in folder.iterdir() if f.name.startswith(".")
            ]
            for step in checkpoints.steps():
                assert checkpoints.load_state(step, optimizer.load_state_dict) == {"step": step}
                fresh_policy(path=str(checkpoints.path(step)))
            assert (folder / "best").resolve().is_dir(), "the best link never dangles"
        process.stdin.close()
    assert leftovers, "at least one kill hit the middle of a save, or this test shows nothing"


def small(tmp_path: Path, **sections: Any) -> Any:
    train_file = album_data(tmp_path / "data", [[picture((56, 56), i)] for i in range(8)])
    return load_config(
        config_file(tmp_path / "c.yaml", small_run(tmp_path / "runs", train_file, **sections))
    )


@pytest.mark.slow
def test_training_goes_on_with_an_alarm_and_the_last_save_fails_loudly(tmp_path: Path) -> None:
    settings = small(tmp_path, train={"steps": 3, "save_every": 1, "keep_last": 5})
    events: list[Any] = []
    trainer = Trainer(settings, on_event=lambda kind, payload: events.append((kind, payload)))
    with contextlib.ExitStack() as stack:
        trainer.on_event = lambda kind, payload: (
            stack.enter_context(file_size_limit(200_000))
            if kind == "step" and payload["step"] == 2
            else None,
            events.append((kind, payload)),
        )[1]
        with pytest.raises(CheckpointError, match=r"step 3 .*GiB free.*Earlier checkpoints \(1\)"):
            trainer.fit()
    run = trainer.folder.path
    assert trainer.checkpoints.steps() == [1] and [
        r["step"] for r in read_jsonl(run / "metrics.jsonl")
    ] == [1, 2, 3]
    alarms = read_jsonl(run / "alarms.jsonl")
    assert [(a["step"], a["name"], a["severity"]) for a in alarms] == [
        (2, "checkpoint_failed", "error")
    ]
    assert [p.name for kind, p in events if kind == "alarm"] == ["checkpoint_failed"]
    assert json.loads((run / "run.json").read_text())["status"] == "failed"
    resumed = Trainer(settings, resume=True)
    assert resumed.start_step == 1
    resumed.fit()
    assert resumed.checkpoints.steps() == [1, 2, 3] and read_jsonl(run / "alarms.jsonl") == []


def test_run_whose_checkpoints_disk_is_full(tmp_path: Path, small_disk: Path) -> None:
    settings = small(tmp_path, train={"steps": 2, "save_every": 1})
    run = tmp_path / "runs" / "run"
    run.mkdir(parents=True)
    (run / "checkpoints").symlink_to(small_disk)
    with (
        full(small_disk),
        pytest.raises(CheckpointError, match=r"GiB free.*Earlier checkpoints \(none\)"),
    ):
        Trainer(settings).fit()
    assert [a["name"] for a in read_jsonl(run / "alarms.jsonl")] == ["checkpoint_failed"]
    assert len(read_jsonl(run / "metrics.jsonl")) == 2 and not list(small_disk.iterdir())


@pytest.mark.parametrize(
    "file", first_fast(["model.safetensors", "config.json", "trainer/optimizer.pt"])
)
def test_resume_from_a_damaged_checkpoint_of_an_older_version_names_the_fix_that_works(
    file: str, tmp_path: Path
) -> None:
    """One without a manifest: nothing tells what it should be, so nothing is put in its place unasked."""
    settings = small(tmp_path, train={"steps": 2, "save_every": 1})
    trainer = Trainer(settings)
    trainer.fit()
    rows = read_jsonl(trainer.folder.path / "metrics.jsonl")
    folder = trainer.checkpoints.path(2)
    (folder / "trainer" / "manifest.json").unlink()
    state = json.loads((folder / "trainer" / "state.json").read_text())
    (folder / "trainer" / "state.json").write_text(
        json.dumps({k: v for k, v in state.items() if k != "manifest"})
    )
    damaged = folder / file
    damaged.write_bytes(damaged.read_bytes()[:100])
    with pytest.raises(
        CheckpointError, match=r"step_000002.*remove that folder.*earlier complete checkpoints: 1"
    ):
        Trainer(settings, resume=True).fit()
    shutil.rmtree(trainer.checkpoints.path(2))
    Trainer(settings, resume=True).fit()
    again = read_jsonl(trainer.folder.path / "metrics.jsonl")
    assert [r["step"] for r in again] == [1, 2] and again[1]["train/loss"] == rows[1]["train/loss"]


@pytest.mark.slow
def test_best_is_marked_again_when_the_kill_came_before_marking(tmp_path: Path) -> None:
    train_file = album_data(tmp_path / "data", [[picture((56, 56), i)] for i in range(8)])
    held = album_data(tmp_path / "data", [[picture((56, 56), i)] for i in range(9, 12)], "held")
    tree = small_run(tmp_path / "runs", train_file, held, train={"steps": 1})
    settings = load_config(config_file(tmp_path / "c.yaml", tree))
    trainer = Trainer(settings)
    trainer.fit()
    link = trainer.checkpoints.folder / "best"
    link.unlink()  # as if killed after the rename of step_000001
    Trainer(settings, resume=True).fit()
    assert link.resolve() == trainer.checkpoints.path(1)
