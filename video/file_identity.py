"""What a cached tensor was made from: keys of exact values, and digests of file contents.

    make_key(video=digest_of_content("clip.mp4"), fps=2.0, processor="qwen2.5-vl")

A digest is remembered by path, size, times and inode, in this process and, if wanted, in small files, so that a second run
does not read terabytes again; an edited file of the same name has other times or another inode and gets another digest.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import stat
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from mmrl.errors import CacheError, ConfigError, MediaError
from mmrl.video.locks import write_small

__all__ = ["canonical_json", "digest_of_content", "make_key", "settled_stamp", "stamp_of"]

_SIZE = 20  # bytes of a digest
_CHUNK = 4 << 20
# a file changed this recently could change again within one tick of its clock
_SETTLED_NS = 2_000_000_000
_TRIES = 3
# files; the latest stay, so that a server which sees a new path per request does not grow
_MOST_REMEMBERED = 1 << 16
_LOCK = threading.Lock()
_remembered: dict[str, tuple[list[int], str]] = {}  # the latest last


def canonical_json(value: Any, where: str = "value") -> str:
    """One text per value: sorted keys, no spaces, ASCII. 1, 1.0, True and "1" differ; a tuple equals a list.

    Only None, bool, int, finite float, str, list, tuple and dict with text keys, and exactly these types: a NumPy number,
    an enum, a path or a set raises ConfigError, since its text could differ between versions or runs.
    """
    _check(value, where)
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _check(value: Any, where: str) -> None:
    if value is None or type(value) in (bool, int, str):
        return
    if type(value) is float:
        if not math.isfinite(value):
            raise ConfigError(f"{where}: expected a finite number, found {value}")
    elif type(value) in (list, tuple):
        for i, item in enumerate(value):
            _check(item, f"{where}[{i}]")
    elif type(value) is dict:
        for name, item in value.items():
            if type(name) is not str:
                raise ConfigError(
                    f"{where}: expected text keys, found {name!r} of type {type(name).__name__}"
                )
            _check(item, f"{where}.{name}")
    else:
        raise ConfigError(
            f"{where}: expected None, bool, int, float, str, list, tuple or dict, found {value!r} of type "
            f"{type(value).__name__}; convert it, for example with float(), str() or .tolist()"
        )


def make_key(**fields: Any) -> str:
    """A key of 40 hexadecimal digits: the BLAKE2b digest of the fields as canonical JSON. Order does not matter, types do.

    Raises ConfigError for values without one exact text (see canonical_json) and for no fields.
    """
    if not fields:
        raise ConfigError("expected at least one field to make a key of, found none")
    return hashlib.blake2b(
        canonical_json(fields, "key").encode(), digest_size=_SIZE, person=b"mmrl-key-1"
    ).hexdigest()


def digest_of_content(path: str | os.PathLike[str], memory: Path | None = None) -> str:
    """40 hexadecimal digits that name the bytes of a file, or the names and bytes of all files of a folder of frames.

    `memory` is a folder of small files that keep digests between runs. Raises MediaError (missing, empty folder,
    unsupported kind of file) and CacheError when the file keeps changing while it is read.
    """
    name = os.path.abspath(os.fspath(path))
    for _ in range(_TRIES):
        before = _stamp(name)
        known = _known_digest(name, before, memory)
        if known is not None:
            return known
        digest = _read_folder(name) if os.path.isdir(name) else _read_file(name)
        if _stamp(name) == before:
            _remember(name, before, digest, memory)
            return digest
    raise CacheError(
        f"expected a file at rest, found that {name} changes while it is read; wait until it is complete"
    )


def stamp_of(path: str | os.PathLike[str]) -> list[int]:
    """Size, mtime, ctime and inode of a file (of a folder: of all its files). As long as they stay, so do the bytes: ctime is set
    by the kernel at every write. Raises MediaError where there is none."""
    return _stamp(os.path.abspath(os.fspath(path)))


def settled_stamp(path: str | os.PathLike[str]) -> list[int] | None:
    """The `stamp_of` the file whose bytes this process has digested; None where it was written so shortly before that another write
    may have left the same times."""
    known = _remembered.get(os.path.abspath(os.fspath(path)))
    return None if known is None else list(known[0])


def _times(path: str) -> list[int]:
    try:
        facts = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        raise MediaError(
            f"expected a file or a folder of frames, found nothing at {path}",
            kind="missing",
            path=path,
        ) from None
    if not (stat.S_ISREG(facts.st_mode) or stat.S_ISDIR(facts.st_mode)):
        raise MediaError(
            f"expected a file or a folder of frames, found a device, pipe or socket at {path}",
            kind="unsupported",
            path=path,
        )
    return [facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns, facts.st_ino]


def _files(folder: str) -> list[str]:
    found = [
        os.path.relpath(os.path.join(at, name), folder)
        for at, _, names in os.walk(folder)
        for name in names
    ]
    if not found:
        raise MediaError(
            f"expected a file or a folder of frames, found an empty folder at {folder}",
            kind="empty",
            path=folder,
        )
    return sorted(found)


def _stamp(path: str) -> list[int]:
    """Size, mtime, ctime and inode; of a folder the newest times, the total size and a digest of all of them."""
    own = _times(path)
    if not os.path.isdir(path):
        return own
    listed = {name: _times(os.path.join(path, name)) for name in _files(path)}
    whole = hashlib.blake2b(json.dumps(listed, sort_keys=True).encode(), digest_size=8).digest()
    newest = [max(times[i] for times in (own, *listed.values())) for i in (1, 2)]
    return [sum(times[0] for times in listed.values()), *newest, int.from_bytes(whole, "big")]


def _read_file(path: str) -> str:
    digest, buffer = hashlib.blake2b(digest_size=_SIZE, person=b"mmrl-file-1"), bytearray(_CHUNK)
    view = memoryview(buffer)
    try:
        with open(path, "rb", buffering=0) as file:
            while n := file.readinto(buffer):
                digest.update(view[:n])
    except FileNotFoundError:
        raise MediaError(
            f"expected a file, found nothing at {path}", kind="missing", path=path
        ) from None
    except OSError as error:
        raise MediaError(
            f"expected a readable file, found '{error.strerror}' at {path}",
            kind="unsupported",
            path=path,
        ) from error
    return digest.hexdigest()


def _read_folder(folder: str) -> str:
    digest = hashlib.blake2b(digest_size=_SIZE, person=b"mmrl-folder-1")
    for name in _files(folder):
        raw = os.fsencode(name)
        digest.update(
            len(raw).to_bytes(4, "big")
            + raw
            + bytes.fromhex(_read_file(os.path.join(folder, name)))
        )
    return digest.hexdigest()


def _note(name: str, memory: Path) -> Path:
    digest = hashlib.blake2b(os.fsencode(name), digest_size=16).hexdigest()
    return memory / digest[:2] / f"{digest}.json"


def _known_digest(name: str, stamp: list[int], memory: Path | None) -> str | None:
    known = _remembered.get(name)
    if known is not None and known[0] == stamp:
        _hold(name, stamp, known[1])
        return known[1]
    if memory is None:
        return None
    try:
        note = json.loads(_note(name, memory).read_text(encoding="utf-8"))
        if (
            note["path"] == name
            and note["stamp"] == stamp
            and len(bytes.fromhex(note["digest"])) == _SIZE
        ):
            _hold(name, stamp, note["digest"])
            return str(note["digest"])
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return None  # no note, or a damaged one: the file is read again and the note rewritten
    return None


def _hold(name: str, stamp: list[int], digest: str) -> None:
    with _LOCK:
        _remembered.pop(name, None)
        _remembered[name] = (stamp, digest)
        while len(_remembered) > _MOST_REMEMBERED:
            del _remembered[next(iter(_remembered))]


def _remember(name: str, stamp: list[int], digest: str, memory: Path | None) -> None:
    if max(stamp[1:3]) > time.time_ns() - _SETTLED_NS:
        return
    _hold(name, stamp, digest)
    if memory is None:
        return
    text = json.dumps({"path": name, "stamp": stamp, "digest": digest}).encode()
    with suppress(OSError):  # a full or read-only disk costs only that the file is read again
        target = _note(name, memory)
        target.parent.mkdir(parents=True, exist_ok=True)
        (memory / "tmp").mkdir(exist_ok=True)
        write_small(target, text, memory / "tmp")
