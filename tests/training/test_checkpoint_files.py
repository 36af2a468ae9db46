"""What a checkpoint folder holds before, while and after one is written: order, disk, links, what counts as complete."""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

from mmrl.errors import CheckpointError
from mmrl.policy.policy import Policy
from mmrl.training.checkpoint import Checkpoints
from tests.kits.engine_kit import policy


@pytest.fixture
def kept(tmp_path: Path) -> Checkpoints:
    return Checkpoints(tmp_path / "checkpoints", keep_last=2)


def save(kept: Checkpoints, step: int, **options: Any) -> Path:
    return kept.save(step, policy(), {"state": {}, "param_groups": []}, {"step": step}, **options)


def test_settings_and_texts_lie_beside_the_state(kept: Checkpoints) -> None:
    folder = save(
        kept,
        3,
        settings={"name": "run", "dir": "runs", "algorithm": {"b": 1, "a": 2}},
        extra={"media.jsonl": "row\n"},
    )
    text = (folder / "trainer" / "config.yaml").read_text()
    assert yaml.safe_load(text)["algorithm"] == {"b": 1, "a": 2} and text.index(
        "name"
    ) < text.index("dir"), "in the order given"
    assert (folder / "trainer" / "media.jsonl").read_text() == "row\n"
    assert kept.load_state(3, lambda state: None) == {"step": 3}
    assert not (save(kept, 4) / "trainer" / "config.yaml").exists()


def test_everything_is_on_disk_before_it_counts(
    kept: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    real = os.fsync

    def fsync(descriptor: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    folder = save(kept, 7)
    partial = str(folder.with_name(".partial-step_000007"))
    files = {str(p).replace(str(folder), partial) for p in folder.rglob("*")}
    assert files <= set(synced[:-1]) and synced[-1] == str(kept.folder), (
        "the files, then the folder that names them"
    )


@pytest.mark.parametrize("mask", [0o022, 0o077, 0o007])
def test_weights_may_be_read_by_those_who_may_read_the_rest(mask: int, kept: Checkpoints) -> None:
    before = os.umask(mask)
    try:
        folder = save(kept, 1)
    finally:
        os.umask(before)
    modes = {p.name: stat.S_IMODE(p.stat().st_mode) for p in folder.rglob("*") if p.is_file()}
    assert "model.safetensors" in modes and set(modes.values()) == {0o666 & ~mask}, modes


def test_only_folders_of_that_name_are_checkpoints(kept: Checkpoints, tmp_path: Path) -> None:
    assert kept.steps() == []
    save(kept, 5)
    (kept.folder / "step_000008").write_text("a file")
    (kept.folder / "step_9").mkdir()
    (kept.folder / "step_000006").symlink_to(tmp_path)
    assert kept.steps() == [5]


@pytest.mark.parametrize("gone", [False, True])
def test_a_failed_save_says_how_much_room_there_is(
    kept: Checkpoints, gone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(kept, 1)

    def full(self: Policy, folder: Path) -> None:
        shutil.rmtree(folder.parent if gone else folder)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Policy, "save", full)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=3 * 2**30 + 2**29))
    with pytest.raises(CheckpointError) as found:
        save(kept, 2)
    said = "(0.00 GiB free)" if gone else "(3.50 GiB free)"
    assert said in str(
        found.value
    ) and f"Earlier checkpoints ({'none' if gone else '1'}) are untouched" in str(found.value)
    assert kept.steps() == ([] if gone else [1])


def test_the_best_one_is_marked_kept_and_forgotten_when_it_is_damaged(kept: Checkpoints) -> None:
    for step in (1, 2, 3):
        save(kept, step)
        if step == 1:
            kept.mark_best(1)
    assert kept.steps() == [1, 2, 3] and os.readlink(kept.folder / "best") == "step_000001", (
        "the best is kept beside the last two"
    )
    assert kept.set_aside(3) == kept.folder / "damaged_step_000003"
    assert kept.steps() == [1, 2] and os.readlink(kept.folder / "best") == "step_000001"
    kept.set_aside(1)
    assert not (kept.folder / "best").is_symlink() and kept.steps() == [2]
    assert kept.set_aside(2).is_dir(), "without a best one, too"


def test_a_best_that_cannot_be_replaced_is_an_error_in_words(kept: Checkpoints) -> None:
    save(kept, 1)
    (kept.folder / "best" / "of a person").mkdir(parents=True)
    with pytest.raises(
        CheckpointError, match=r"step 1 cannot be marked as the best one in .*; make room there"
    ):
        kept.mark_best(1)


def test_what_a_killed_process_left_is_removed(kept: Checkpoints) -> None:
    kept.clean()
    save(kept, 1)
    (kept.folder / ".partial-step_000002" / "trainer").mkdir(parents=True)
    (kept.folder / ".partial-note").write_text("a file, which no process of ours leaves")
    (kept.folder / ".best-123").symlink_to("step_000001")
    kept.clean()
    assert sorted(p.name for p in kept.folder.iterdir()) == [".partial-note", "step_000001"]
    assert torch.load(kept.path(1) / "trainer" / "optimizer.pt", weights_only=True) == {
        "state": {},
        "param_groups": [],
    }
