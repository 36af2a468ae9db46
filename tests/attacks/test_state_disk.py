"""A disk that is full, or read-only, at any write: a message with its fix, a truthful run.json, nothing torn; what is
optional goes on."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import mmrl.files
from mmrl.cli.main import main
from mmrl.config import load_config
from mmrl.errors import CheckpointError, StorageError
from mmrl.files import append, optional, write_text, writing
from mmrl.report import build_report
from mmrl.training.trackers import Trackers
from mmrl.training.trainer import Trainer
from scripts._torture_trust_state import file_size_limit, leaving, small_disk, torn
from scripts.torture_resume import differences
from tests.kits.engine_kit import album_data, config_file, picture, read_jsonl, small_run


@pytest.fixture(autouse=True)
def nothing_was_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mmrl.files, "_said", set())


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A folder on a file system of 16 MiB of its own, where mounting is allowed."""
    with small_disk(tmp_path / "disk", 16) as folder:
        yield folder


def settings(tmp_path: Path, where: Path, *overrides: str) -> Any:
    rows = [[picture((56, 56), i)] for i in range(8)]
    data, held = (
        album_data(tmp_path / "data", rows[:6]),
        album_data(tmp_path / "data", rows[6:], "held"),
    )
    tree = small_run(
        where, data, held, train={"steps": 3, "keep_last": 9}, schedule={"timeline": 1}
    )
    return load_config(config_file(tmp_path / "c.yaml", tree), list(overrides))


@pytest.mark.slow
def test_a_disk_that_fills_up_under_a_run(tmp_path: Path, disk: Path) -> None:
    """At two places: room for a line, room for some files of a checkpoint (scripts/torture_trust.py: at every page)."""
    Trainer(settings(tmp_path, tmp_path / "calm")).fit()
    calm = tmp_path / "calm" / "run"
    for room in (4096, 150_000):
        config = settings(tmp_path, disk / f"runs{room}")
        stack = ExitStack()

        def fills(kind: str, payload: Any, room: int = room, stack: ExitStack = stack) -> None:
            if kind == "step" and payload["step"] == 1:
                stack.enter_context(leaving(disk, room))

        said = r"cannot write .*(MiB|GiB) free.*continue with --resume"
        with stack, pytest.raises((StorageError, CheckpointError), match=said):
            Trainer(config, on_event=fills).fit()
        run = disk / f"runs{room}" / "run"
        info = json.loads((run / "run.json").read_text())
        assert info["status"] == "failed" and "cannot write" in info["error"] and not torn(run)
        resumed = Trainer(config, resume=True)
        resumed.fit()
        assert (
            all(differences(calm, run).values())
            and json.loads((run / "run.json").read_text())["status"] == "finished"
        )
        assert "error" not in json.loads((run / "run.json").read_text())
        subprocess.run(["rm", "-rf", str(run)], check=True)


@pytest.mark.slow
def test_a_disk_that_becomes_read_only(
    tmp_path: Path, disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if not os.path.ismount(disk):
        return  # another user's folder is refused below, by the same words
    config = settings(tmp_path, disk / "runs")

    def locks(kind: str, payload: Any) -> None:
        if kind == "step" and payload["step"] == 1:
            subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)

    with pytest.raises(
        StorageError, match=r"cannot write .*Read-only file system.*mount it writable"
    ):
        Trainer(config, on_event=locks).fit()
    assert "still says what it said before, the run's status is 'failed'" in capsys.readouterr().err
    run = disk / "runs" / "run"
    assert json.loads((run / "run.json").read_text())["status"] == "running" and not torn(run), (
        "nothing could be written"
    )
    with pytest.raises(StorageError, match="mount it writable"):
        Trainer(config, resume=True).fit()
    with pytest.raises(StorageError, match="mount it writable"):
        build_report(run)
    subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)
    Trainer(config, resume=True).fit()
    assert json.loads((run / "run.json").read_text())["status"] == "finished"


def files_of(folder: Path) -> dict[Path, int]:
    """Sizes of the files with something in them."""
    return {p: size for p in folder.rglob("*") if p.is_file() and (size := p.stat().st_size)}


@pytest.mark.slow
def test_the_commands_end_with_words_and_status_2(
    tmp_path: Path, disk: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that cannot begin, and an evaluation, scores, a report, a warm start and a cache that cannot be written."""
    trainer = Trainer(settings(tmp_path, tmp_path / "runs"))
    trainer.fit()
    run = trainer.folder.path
    checkpoint, held = run / "checkpoints" / "best", tmp_path / "data" / "held.jsonl"
    task = trainer.config.data.train[0].task
    commands = [
        ("train", str(tmp_path / "c.yaml"), f"dir={disk / 'runs'}", "--quiet"),
        ("eval", str(checkpoint), "--task", task, "--data", str(held), "--out", str(disk / "out")),
        (
            "score",
            str(run / "rollouts" / "step_000001.jsonl"),
            "--out",
            str(disk / "scores.jsonl"),
            "--trust-code",
        ),
        ("report", str(disk / "copy")),
        ("sft", str(tmp_path / "c.yaml"), "--out", str(disk / "sft"), "--quiet"),
        (
            "cache",
            "build",
            str(tmp_path / "c.yaml"),
            f"data.cache.dir={disk / 'cache'}",
            "--workers=0",
            "--quiet",
        ),
    ]
    shutil.copytree(run, disk / "copy", ignore=shutil.ignore_patterns("checkpoints"))
    before = files_of(disk)
    with leaving(disk, 0):
        for command in commands:
            monkeypatch.setattr("sys.argv", ["mmrl", *command])
            with pytest.raises(SystemExit) as end:
                main()
            err = capsys.readouterr().err
            assert (
                end.value.code == 2
                and "error: cannot write" in err
                and "make room on that disk" in err
            ), (command, err)
    assert files_of(disk) == before, "nothing half-written is left"


@pytest.mark.slow
# TensorBoard's own thread says it too
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_what_is_optional_goes_on(
    tmp_path: Path, disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The timeline, TensorBoard and the cache on a disk without room, the run on another one."""
    run = tmp_path / "runs" / "run"
    run.mkdir(parents=True)
    for name in ("timeline", "tensorboard"):
        (disk / name).mkdir()
        (run / name).symlink_to(disk / name)
    config = settings(
        tmp_path, tmp_path / "runs", "train.tensorboard=true", f"data.cache.dir={disk / 'cache'}"
    )
    with leaving(disk, 0):
        Trainer(config).fit()
    said = capsys.readouterr().err
    assert json.loads((run / "run.json").read_text())["status"] == "finished" and not torn(run)
    assert said.count("warning: the timeline could not be written") == 1
    calm = settings(tmp_path, tmp_path / "calm")
    Trainer(calm).fit()
    assert all(differences(tmp_path / "calm" / "run", run).values())


def test_a_tracker_that_breaks_costs_its_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trackers = Trackers(
        settings(tmp_path, tmp_path / "runs", "train.tensorboard=true"), tmp_path / "tb"
    )

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    [tracker] = trackers.open
    tracker.scalars = full
    trackers.log(1, {"step": 1, "train/m\ud800": 0.5})
    trackers.close()
    assert (
        "the log for TensorBoard could not be written: No space left on device"
        in capsys.readouterr().err
    )


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    file, lines = (
        tmp_path / "log.jsonl",
        [json.dumps({"row": n, "text": "x" * 300}) for n in range(100)],
    )
    append(file, lines[:3])
    before = file.read_bytes()
    with (
        file_size_limit(len(before) + 10_000),
        pytest.raises(StorageError, match=r"log.jsonl.*File too large.*make room"),
    ):
        append(file, lines)
    assert file.read_bytes() == before, "none of the lines, not a part of one"
    append(file, lines[3:])
    assert [row["row"] for row in read_jsonl(file)] == list(range(100))
    document = tmp_path / "deep" / "a.json"
    write_text(document, "first")
    with file_size_limit(1000), pytest.raises(StorageError):
        write_text(document, "x" * 5000)
    assert document.read_text() == "first" and list(document.parent.iterdir()) == [document], (
        "the old one, no half of the new"
    )


def test_what_is_said_names_the_fix(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number, fix in (
        (errno.ENOSPC, "make room"),
        (errno.EDQUOT, "raise the quota"),
        (errno.EROFS, "mount it writable"),
        (errno.EACCES, "let this user write there"),
        (errno.EIO, "fix the disk"),
    ):
        said = rf"{tmp_path}/no/such: expected a folder .*{os.strerror(number)}.*MiB free.*{fix}"
        with pytest.raises(StorageError, match=said), writing(tmp_path / "no" / "such"):
            raise OSError(number, os.strerror(number))
    for _ in range(3):
        with optional("the thing of this test"):
            raise OSError(errno.ENOSPC, "full")
    assert capsys.readouterr().err.count("the thing of this test could not be written: full") == 1
