"""Manifests that a stranger wrote: sealed as ours are, they name what must not be read, or what has no end."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import xxhash

from mmrl.errors import CheckpointError
from mmrl.policy.manifest import MANIFEST, check_loadable, problems, write_manifest

EMPTY = xxhash.xxh3_128_hexdigest(b"")


def checkpoint(folder: Path) -> Path:
    """A whole checkpoint of two small files and its manifest."""
    target = folder / "step_000004"
    (target / "trainer").mkdir(parents=True)
    (target / "config.json").write_text("{}", encoding="utf-8")
    (target / "trainer" / "state.json").write_text(json.dumps({"manifest": True}), encoding="utf-8")
    write_manifest(target, 4)
    assert problems(target, step=4) == []
    return target


def forge(folder: Path, **files: Any) -> None:
    """Add `files` to the manifest and seal it, by its description: canonical JSON that ends with a digest of itself."""
    content = json.loads((folder / MANIFEST).read_bytes())
    del content["seal"]
    content["files"] |= files

    def line(value: dict[str, Any]) -> str:
        return json.dumps(value, sort_keys=True, separators=(",", ":"))

    seal = xxhash.xxh3_128_hexdigest(line(content).encode("ascii"))
    (folder / MANIFEST).write_text(line({**content, "seal": seal}) + "\n", encoding="ascii")


@pytest.mark.parametrize(
    "name", ["/dev/zero", "../outside", "trainer/../../outside", "/etc/hostname"]
)
def test_files_outside_the_checkpoint_are_not_read(name: str, tmp_path: Path) -> None:
    """/dev/zero has no bytes by its size and no end when it is read."""
    folder = checkpoint(tmp_path)
    (tmp_path / "outside").write_bytes(b"")
    forge(folder, **{name: [0, EMPTY]})
    assert problems(folder, step=4) == [
        f"{MANIFEST}: expected files of this folder, found {name!r}"
    ]
    with pytest.raises(CheckpointError, match="expected files of this folder"):
        check_loadable(folder)


def test_pipes_and_devices_are_not_opened(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path)
    os.mkfifo(folder / "pipe.bin")
    (folder / "zero.bin").symlink_to("/dev/zero")
    (folder / "trainer" / "state.json").unlink()
    (folder / "trainer" / "state.json").symlink_to("/dev/full")
    forge(
        folder, **{"pipe.bin": [0, EMPTY], "zero.bin": [0, EMPTY], "trainer/state.json": [0, EMPTY]}
    )
    assert sorted(problems(folder, step=4)) == [
        f"{name}: expected a file, found something else"
        for name in ("pipe.bin", "trainer/state.json", "zero.bin")
    ]


@pytest.mark.parametrize("entry", [["9", EMPTY], [0], 7, [None, None], [-1, EMPTY], {"size": 1}])
def test_entries_that_make_no_sense_are_faults(entry: Any, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path)
    forge(folder, **{"config.json": entry})
    assert problems(folder, step=4)


def test_files_that_grow_while_they_are_read_are_faults(tmp_path: Path) -> None:
    """No more than the bytes that were saved are read, and links to whole files still pass."""
    folder = checkpoint(tmp_path)
    (folder / "config.json").rename(tmp_path / "blob")
    (folder / "config.json").symlink_to(tmp_path / "blob")
    assert problems(folder, step=4) == []
    with (tmp_path / "blob").open("ab") as file:
        file.write(b" ")
    assert problems(folder, step=4) == ["config.json: expected 2 bytes, found 3"]
