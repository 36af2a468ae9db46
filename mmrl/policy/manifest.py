"""The manifest of a checkpoint: the size and a digest of every file, so that damage is noticed before anything is loaded.

    write_manifest(folder, step)             # FOLDER/trainer/manifest.json, the last file of a checkpoint
    problems(folder, step=4)                 # [] where every byte is the one that was saved, else a line for each fault
    check_loadable("runs/a/checkpoints/best")    # raises CheckpointError; a folder that mmrl did not save passes

Digests are XXH3 of 128 bits (xxhash, https://github.com/Cyan4973/xxHash), a checksum rather than a signature: it runs at the speed
of memory where SHA-256 would take longer than reading the disk, and finds every accident (a flipped bit, a file of another step, a
write cut short) but for one in 2^128. It does not stop somebody who may write the folder: they could write the manifest as well.

The manifest is one line of canonical JSON that ends with a digest of itself. It names the folder and its step, so that neither a
file nor a whole trainer/ folder of another step passes. Files that were added are refused where something would load them.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import xxhash

from mmrl.errors import CheckpointError
from mmrl.files import usual_mode

__all__ = [
    "MANIFEST",
    "check_loadable",
    "file_digest",
    "has_manifest",
    "loaded_files",
    "problems",
    "write_manifest",
]

MANIFEST = "trainer/manifest.json"
FORMAT = 1
_CHUNK = 8 << 20
_STEP = re.compile(r"step_(\d{6,})")
# what transformers, peft and mmrl look for by name: one that was added would be loaded beside or instead of what was saved
_LOADED = {
    ".safetensors",
    ".bin",
    ".pt",
    ".pth",
    ".json",
    ".jsonl",
    ".yaml",
    ".py",
    ".jinja",
    ".model",
    ".txt",
}
# results of `mmrl eval` may lie in others
_OWN_FOLDERS = ("", "adapter", "trainer", "additional_chat_templates")
# (folder, digest of its manifest) found whole by this process: checked once
_verified: set[tuple[str, str]] = set()


def file_digest(path: Path) -> tuple[int, str]:
    """(bytes, digest) of a file, as the manifest has them. Raises OSError."""
    size = os.path.getsize(path)
    return size, _digest(path, size)


def write_manifest(
    folder: Path, step: int, known: Mapping[str, tuple[int, str]] | None = None
) -> None:
    """Write the manifest of all files in `folder`, a checkpoint which will be renamed to that of `step`, or a model that `mmrl sft`
    made in so many steps; those in `known` (name in the folder -> bytes, digest) are not read again. All get the usual mode:
    safetensors keeps weights to their owner. Raises OSError."""
    given = known or {}
    files = {
        name: list(given[name] if name in given else file_digest(folder / name))
        for name in _files(folder)
        if name != MANIFEST
    }
    for name in files:
        usual_mode(folder / name)
    content = {
        "format": FORMAT,
        "algorithm": "xxh3_128",
        "name": f"step_{step:06d}",
        "step": step,
        "files": files,
    }
    (folder / MANIFEST).parent.mkdir(exist_ok=True)
    (folder / MANIFEST).write_text(_sealed(content), encoding="ascii")


def has_manifest(folder: Path) -> bool:
    """Whether the checkpoint was saved with one: by this version of mmrl or a later one."""
    return (folder / MANIFEST).is_file() or _promised(folder)


def problems(
    folder: Path, *, step: int | None = None, share: tuple[int, int] = (0, 1)
) -> list[str]:
    """What is wrong with the checkpoint in `folder`, one line per fault; [] for a whole one.

    `step`: the one it must be of; None where the folder may have been copied to any other name. `share` (number, count): look at
    this part of the files only, where several processes share the work. A checkpoint of a version without manifests has no
    faults that can be seen here. Never raises for what it finds.
    """
    if not has_manifest(folder):
        return [] if folder.is_dir() else [f"{folder} is gone"]
    try:
        content = _read(folder)
    except (OSError, ValueError) as error:
        return [f"{MANIFEST}: {error}"]
    try:
        return _compared(folder, content["name"], content["files"], step, share)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        # sealed, but not by this module
        return [
            f"{MANIFEST}: expected names, sizes and digests, found {type(error).__name__}: {error}"
        ]


def _compared(
    folder: Path, name: str, files: dict[str, Any], step: int | None, share: tuple[int, int]
) -> list[str]:
    wanted = (
        f"step_{step:06d}"
        if step is not None
        else folder.name
        if _STEP.fullmatch(folder.name)
        else name
    )
    found = (
        [] if name == wanted else [f"{MANIFEST}: expected that of {wanted}, found that of {name}"]
    )
    number, count = share
    if number == 0:
        found += [
            f"{other}: expected no such file, found one that was added"
            for other in _files(folder)
            if other not in files and other != MANIFEST and _would_load(other)
        ]
    for file in sorted(files, key=lambda n: (-files[n][0], n))[number::count]:
        found += _fault(folder / file, file, *files[file])
    return found


def check_loadable(path: str | os.PathLike[str], say: Any = None) -> None:
    """Raise CheckpointError when `path` is a checkpoint of mmrl that is not as it was saved.

    Hub names and folders that mmrl did not save pass. `say(text)` is told of a checkpoint of an older version, which has no
    manifest and cannot be checked. A checkpoint found whole is not read again by this process.
    """
    folder = Path(path)
    if not (folder / "trainer").is_dir():
        return
    if not has_manifest(folder):
        if say is not None:
            say(
                f"note: {folder} was saved by an older version of mmrl, without {MANIFEST}: damage to its files cannot be noticed"
            )
        return
    folder = folder.resolve()  # `best` is a link
    try:
        mark = (str(folder), (folder / MANIFEST).read_text(encoding="utf-8", errors="replace"))
    except OSError:
        mark = ("", "")
    if mark in _verified:
        return
    if faults := problems(folder):
        others = sorted(
            p.name for p in folder.parent.glob("step_*") if p != folder and _STEP.fullmatch(p.name)
        )
        raise CheckpointError(
            f"expected the checkpoint {folder} as it was saved, found {len(faults)} fault{'s' * (len(faults) > 1)}: "
            f"{'; '.join(faults[:3])}; take another one ({', '.join(others) or 'there is none next to it'}), or copy it again from "
            f"where it came from. If it was changed on purpose, remove {MANIFEST} and state.json next to it"
        )
    _verified.add(mark)


def _fault(path: Path, name: str, size: int, digest: str) -> list[str]:
    if os.path.isabs(name) or ".." in Path(name).parts:
        return [f"{MANIFEST}: expected files of this folder, found {name!r}"]
    try:
        facts = os.stat(path)
        if not stat.S_ISREG(facts.st_mode):  # reading a pipe or a device may not end
            return [f"{name}: expected a file, found something else"]
        if facts.st_size != size:
            return [f"{name}: expected {size:,} bytes, found {facts.st_size:,}"]
        return (
            []
            if _digest(path, size) == digest
            else [f"{name}: its bytes are not those that were saved"]
        )
    except OSError as error:
        return [f"{name}: cannot be read ({error.strerror or error})"]


def _files(folder: Path) -> Iterator[str]:
    """All files below `folder`, as relative names with '/', in order."""
    return iter(
        sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if not p.is_dir())
    )


def loaded_files(folder: Path) -> list[str]:
    """Names of those files in a model's folder that something would load."""
    return [name for name in _files(folder) if _would_load(name)]


def _would_load(name: str) -> bool:
    parent, _, leaf = name.rpartition("/")
    return (
        parent in _OWN_FOLDERS and not leaf.startswith(".") and os.path.splitext(leaf)[1] in _LOADED
    )


def _digest(path: Path, size: int) -> str:
    """Of the first `size` bytes."""
    check, view, left = xxhash.xxh3_128(), memoryview(bytearray(_CHUNK)), size
    with path.open("rb", buffering=0) as file:
        while left and (n := file.readinto(view[:left])):
            check.update(view[:n])
            left -= n
    return check.hexdigest()


def _sealed(content: dict[str, Any]) -> str:
    """One line: `content` and a digest of its canonical JSON."""

    def line(value: dict[str, Any]) -> str:
        return json.dumps(value, sort_keys=True, separators=(",", ":"))

    return (
        line({**content, "seal": xxhash.xxh3_128_hexdigest(line(content).encode("ascii"))}) + "\n"
    )


def _read(folder: Path) -> dict[str, Any]:
    """The manifest. Raises OSError, and ValueError for one that is not exactly as it was written."""
    try:
        text = (folder / MANIFEST).read_bytes().decode("ascii")
        content = json.loads(text)
        if not isinstance(content, dict):
            raise ValueError("not an object")
        del content["seal"]
        intact = _sealed(content) == text
    except FileNotFoundError:
        raise ValueError("expected it next to the state that names it, found none") from None
    except (ValueError, KeyError, RecursionError):
        intact = False
    if not intact:
        raise ValueError("expected it as it was written, found other bytes")
    if content.get("format") != FORMAT:
        raise ValueError(
            f"expected format {FORMAT}, found {content.get('format')!r}; it needs another version of mmrl"
        )
    return content


def _promised(folder: Path) -> bool:
    """Whether the state says that there is a manifest, or cannot be read although it is there."""
    try:
        return bool(json.loads((folder / "trainer" / "state.json").read_bytes()).get("manifest"))
    except FileNotFoundError:
        return False
    except (OSError, ValueError, AttributeError, RecursionError):
        return True
