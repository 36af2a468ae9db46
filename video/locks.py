"""File locks that die with their process: `flock` on an open file, released by the kernel even after kill -9.

Two uses. A *name lock* (`exclusive`) is a file that exists only while somebody holds or waits for it: whoever gets the lock
checks that the file it locked still has its name, and the holder removes the name before letting go. A *use lock* is a
shared lock on a data file itself: readers and the writer hold it as long as they need the file (`open_shared`,
`create_shared`), so `remove_unused`, which asks for an exclusive lock and never waits, cannot take it from under them.

    with exclusive(folder / "name.lock", wait_s=600) as held: ...

Works on local file systems and NFS 4; Linux and macOS.
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

__all__ = [
    "create_shared",
    "exclusive",
    "open_quietly",
    "open_shared",
    "remove_unused",
    "still_named",
    "sweep",
    "write_small",
]

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.1
_serial = itertools.count()


def _lock(fd: int, kind: int) -> bool:
    """Whether the lock was granted; never waits."""
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return False
        raise
    return True


def still_named(fd: int, path: Path) -> bool:
    """Whether `path` names the very file that is open as `fd`."""
    try:
        named = os.stat(path)
    except FileNotFoundError:
        return False
    opened = os.fstat(fd)
    return (named.st_dev, named.st_ino) == (opened.st_dev, opened.st_ino)


def _acquire(path: Path) -> int | None:
    """The descriptor that holds the name lock `path`, or None while another holds it."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        if _lock(fd, fcntl.LOCK_EX) and still_named(fd, path):
            return fd
    except BaseException:
        os.close(fd)
        raise
    os.close(fd)
    return None


@contextmanager
def exclusive(
    path: Path, *, wait_s: float, on_wait: Callable[[], None] | None = None
) -> Iterator[bool]:
    """Hold the name lock `path`; yields False when another still held it after `wait_s` seconds.

    `on_wait` is called once when the lock is not free at once. A holder that dies frees it. Not reentrant.
    """
    deadline, pause, fd = time.monotonic() + wait_s, _FIRST_PAUSE_S, _acquire(path)
    if fd is None and on_wait is not None:
        on_wait()
    while fd is None and time.monotonic() < deadline:
        time.sleep(pause)
        pause, fd = min(2 * pause, _LONGEST_PAUSE_S), _acquire(path)
    try:
        yield fd is not None
    finally:
        if fd is not None:
            with suppress(OSError):
                os.unlink(path)
            # also frees it where a forked child inherited the descriptor
            fcntl.flock(fd, fcntl.LOCK_UN)
            os.close(fd)


def open_quietly(path: Path) -> int:
    """Open for reading without changing the file's time of last access (which needs to be its owner; else it changes)."""
    flags = os.O_RDONLY | os.O_CLOEXEC
    try:
        return os.open(path, flags | getattr(os, "O_NOATIME", 0))
    except PermissionError:
        return os.open(path, flags)


def open_shared(path: Path) -> int | None:
    """Open `path` for reading with a use lock; None when it is missing or just being removed.

    Every duplicate of the descriptor, that of a memory map included, keeps the lock until the last one is closed.
    """
    while True:
        try:
            fd = open_quietly(path)
        except FileNotFoundError:
            return None
        try:
            locked = _lock(fd, fcntl.LOCK_SH)
            if locked and os.fstat(fd).st_nlink > 0:
                return fd
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)
        if not locked:
            return None


def create_shared(folder: Path) -> tuple[int, Path]:
    """A new temporary file in `folder`, open for reading and writing, with a use lock that keeps `sweep` away."""
    while True:
        path = folder / f"{os.getpid()}-{next(_serial)}-{time.time_ns():x}.tmp"
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        except FileExistsError:
            continue
        try:
            if _lock(fd, fcntl.LOCK_SH) and still_named(fd, path):
                return fd, path
        except BaseException:
            os.close(fd)
            with suppress(OSError):
                os.unlink(path)
            raise
        os.close(fd)  # a sweep came between creation and lock, and removes it


def remove_unused(path: Path, unless: Callable[[os.stat_result], bool] | None = None) -> int | None:
    """Remove `path` if nobody uses it and `unless(stat)` is false; its bytes, or None when it stayed or was gone."""
    try:
        fd = open_quietly(path)
    except FileNotFoundError:
        return None
    try:
        if not (_lock(fd, fcntl.LOCK_EX) and still_named(fd, path)):
            return None
        facts = os.fstat(fd)
        if unless is not None and unless(facts):
            return None
        try:
            os.unlink(path)
        except FileNotFoundError:
            # its writer gave up, closed it and removed it itself, after we had looked
            return None
        return facts.st_size
    finally:
        os.close(fd)


def sweep(folder: Path) -> int:
    """Remove the files of `folder` that dead processes left: those nobody holds a lock on. Returns how many."""
    removed = 0
    try:
        names = sorted(os.listdir(folder))
    except FileNotFoundError:
        return 0
    for name in names:
        with suppress(PermissionError):
            removed += remove_unused(folder / name) is not None
    return removed


def write_small(target: Path, text: bytes, temporaries: Path) -> None:
    """Give `target` the content `text`, all of it or none. OSError when it cannot be written."""
    fd, temporary = create_shared(temporaries)
    try:
        if os.write(fd, text) != len(text):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(target))
        os.replace(temporary, target)
    finally:
        os.close(fd)
        with suppress(FileNotFoundError):
            os.unlink(temporary)
