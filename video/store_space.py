"""Room on the disk for a tensor store: what lies there, the size bound, and which entries go first.

The size in use is kept in one small file that every writer adds to before it writes, under a name lock. A process that is
killed in between leaves the number too high, never too low; as soon as it passes the bound the folder is measured again.
"""

from __future__ import annotations

import json
import os
import threading
import time
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mmrl.errors import CacheError
from mmrl.video.locks import exclusive, remove_unused, sweep, write_small

__all__ = ["SUFFIX", "Counts", "File", "Space", "Stats", "Stored", "Verified", "files"]

SUFFIX = ".safetensors"
# eviction goes below the bound by this much, so that not every write has to measure
_LOW_WATER = 0.95
_REFUSE_S = 5.0
_MEASURE_S = 600.0
_FLUSH_EVERY_S = 30.0
_WAIT_S = 600.0


@dataclass(frozen=True)
class File:
    """One entry on the disk: bytes, and when it was last used (seconds since 1970, to about a minute)."""

    path: Path
    nbytes: int
    used_at: float

    @property
    def key(self) -> str:
        """The key it belongs to."""
        return self.path.name.removesuffix(SUFFIX)


def files(folder: Path) -> Iterator[File]:
    """All entries under `folder`, in the order of their keys; those removed meanwhile are left out."""
    with os.scandir(folder) as shards:
        names = sorted(s.name for s in shards if len(s.name) == 2 and s.is_dir())
    for name in names:
        with suppress(FileNotFoundError), os.scandir(folder / name) as found:
            for item in sorted((f for f in found if f.name.endswith(SUFFIX)), key=lambda f: f.name):
                with suppress(FileNotFoundError):
                    facts = item.stat(follow_symlinks=False)
                    yield File(Path(item.path), facts.st_size, facts.st_atime)


@dataclass(frozen=True)
class Stored:
    """One entry as its header tells, without its tensors: bytes of the file, seconds since 1970 of its last use."""

    key: str
    nbytes: int
    used_at: float
    meta: Mapping[str, Any]

    @property
    def kind(self) -> str:
        """meta["kind"], or 'other'."""
        return str(self.meta.get("kind", "other"))


@dataclass(frozen=True)
class Stats:
    """What lies in the store and what happened: `counts` of this process, `totals` of all processes ever (but for the last
    half minute of killed ones). `kinds` maps a kind to (entries, bytes)."""

    entries: int
    nbytes: int
    kinds: Mapping[str, tuple[int, int]]
    counts: Mapping[str, int]
    totals: Mapping[str, int]


@dataclass(frozen=True)
class Verified:
    """Result of a check of the whole store: entries and bytes read, and (key, what is wrong) of the damaged ones."""

    entries: int
    nbytes: int
    damaged: tuple[tuple[str, str], ...]
    removed: int
    seconds: float = field(compare=False)


class Space:
    """The size bound of one store folder. `limit` None: no bound, nothing is measured."""

    def __init__(self, folder: Path, locks: Path, temporaries: Path, limit: int | None) -> None:
        self.folder, self.limit, self._temporaries = folder, limit, temporaries
        self._lock, self._size = locks / "space", folder / "size.txt"
        self._measured_at = -_MEASURE_S
        self._refused_until = 0.0

    def reserve(self, nbytes: int, fd: int) -> int:
        """Make room for the `nbytes` of the temporary file `fd`, which takes this size: whoever measures the folder before the file
        has its name counts it. Returns how many entries were evicted. CacheError when the bound leaves no room."""
        if self.limit is None:
            return 0
        if nbytes > self.limit:
            raise CacheError(
                f"expected an entry within the cache's bound of {self.limit:,} bytes, found {nbytes:,}; "
                "raise limit_bytes, or lower the pixel budget or the number of frames"
            )
        if time.monotonic() < self._refused_until:
            raise self._full(nbytes)
        with self._alone():
            total, evicted = self._known(), 0
            if total is None or total + nbytes > self.limit:
                total, evicted = self._evict(
                    max(0, int(_LOW_WATER * self.limit) - nbytes), self.limit - nbytes, None
                )
            if total + nbytes > self.limit:
                self._write(total)
                self._refused_until = time.monotonic() + _REFUSE_S
                raise self._full(nbytes)
            with suppress(OSError):  # no room for a hole: the write will say so
                os.ftruncate(fd, nbytes)
            self._write(total + nbytes)
        return evicted

    def prune(self, max_bytes: int | None, unused_for_s: float | None) -> tuple[int, int]:
        """Evict what was not used for `unused_for_s`, then the least recently used down to `max_bytes`.

        Returns (entries evicted, bytes left).
        """
        before = None if unused_for_s is None else time.time() - unused_for_s
        with self._alone():
            total, evicted = self._evict(max_bytes, max_bytes, before)
            if self.limit is not None or self._size.exists():
                self._write(total)
        return evicted, total

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Hold the lock of this folder's size; a disk too full for a lock file must not keep anyone from making room."""
        with ExitStack() as stack:
            held = True
            with suppress(OSError):
                held = stack.enter_context(exclusive(self._lock, wait_s=_WAIT_S))
            if not held:
                raise CacheError(
                    f"expected {self._lock} to become free, found it held for {_WAIT_S:.0f} s; is its holder stopped?"
                )
            yield

    def _full(self, nbytes: int) -> CacheError:
        return CacheError(
            f"expected room for {nbytes:,} bytes within the cache's bound of {self.limit:,}, found that what lies "
            f"there is in use; raise limit_bytes or close entries"
        )

    def _known(self) -> int | None:
        # other processes may have written without a bound
        if time.monotonic() - self._measured_at >= _MEASURE_S:
            return None
        try:
            total = int(self._size.read_text(encoding="ascii"))
        except (OSError, ValueError):
            return None
        return total if total >= 0 else None

    def _write(self, total: int) -> None:
        with suppress(OSError):  # a full disk: the folder is measured again
            fd = os.open(self._size, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                os.pwrite(fd, f"{total:020d}\n".encode(), 0)
            finally:
                os.close(fd)

    def _coming(self) -> int:
        """Bytes that living writers have reserved and that have no name yet."""
        sweep(self._temporaries)
        total = 0
        with suppress(FileNotFoundError), os.scandir(self._temporaries) as found:
            for item in found:
                with suppress(FileNotFoundError):
                    total += item.stat(follow_symlinks=False).st_size
        return total

    def _evict(self, goal: int | None, bound: int | None, before: float | None) -> tuple[int, int]:
        """Evict those unused since `before`; if more than `bound` is left, the oldest down to `goal`; (bytes left, evicted)."""
        # looked at first: what gets its name meanwhile is counted twice, not missed
        coming = self._coming()
        found = sorted(files(self.folder), key=lambda f: f.used_at)
        self._measured_at = time.monotonic()
        total, evicted = coming + sum(f.nbytes for f in found), 0
        over = bound is not None and total > bound
        for file in found:
            old = before is not None and file.used_at < before
            if not old and not (over and goal is not None and total > goal):
                continue
            freed, seen = None, file.used_at
            with suppress(OSError):  # another user's file
                freed = remove_unused(file.path, unless=lambda now: now.st_atime > seen)  # noqa: B023 - asked at once
            if freed is not None:
                total, evicted = total - freed, evicted + 1
                over = over and goal is not None and total > goal
        return total, evicted


class Counts:
    """What one process counted in one store, added now and then to what all of them did."""

    def __init__(self, folder: Path, locks: Path, temporaries: Path) -> None:
        self._file, self._lock_file, self._temporaries = (
            folder / "counts.json",
            locks / "counts",
            temporaries,
        )
        self.restart()
        _counts.add(self)

    def restart(self) -> None:
        """Count from zero, as a forked child does: its parent adds its own."""
        self._lock, self._flushed_at = threading.Lock(), time.monotonic()
        self.own: Counter[str] = Counter()
        self._pending: Counter[str] = Counter()

    def add(self, name: str, n: int = 1) -> None:
        """Count; every half minute this process's counts are added to those in the store."""
        if n:
            with self._lock:
                self.own[name] += n
                self._pending[name] += n
        if time.monotonic() - self._flushed_at > _FLUSH_EVERY_S:
            self.flush()

    def flush(self, wait_s: float = 0.0) -> Counter[str]:
        """Add what is pending to the file; the sum over all processes. What cannot be written now stays pending."""
        with self._lock:
            pending = self._pending.copy()
            self._pending.clear()
            self._flushed_at = time.monotonic()
        total, written = pending, False
        with suppress(OSError), exclusive(self._lock_file, wait_s=wait_s) as held:
            total = self._known() + pending
            if held and pending:
                write_small(
                    self._file, json.dumps(dict(sorted(total.items()))).encode(), self._temporaries
                )
            written = held
        if not written:
            with self._lock:
                self._pending.update(pending)
        return total

    def _known(self) -> Counter[str]:
        try:
            return Counter(
                {
                    str(k): int(v)
                    for k, v in json.loads(self._file.read_text(encoding="utf-8")).items()
                }
            )
        except (OSError, ValueError, TypeError, AttributeError):
            return Counter()  # none yet, or damaged: start again from zero


_counts: weakref.WeakSet[Counts] = weakref.WeakSet()


def _forked() -> None:
    for counts in list(_counts):
        counts.restart()


os.register_at_fork(after_in_child=_forked)
