"""One launch per run folder: a lock file beside it that says which process on which host trains there.

    lock = RunLock(Path("runs/grounding"))      # runs/.grounding.lock
    lock.acquire()                              # raises ConfigError naming host and pid when another launch holds it
    lock.release()

The holder touches the file every few seconds. A lock whose process is gone is taken over: on the same host (same kernel, same
process namespace) as soon as that process has ended, from other hosts when it was not touched for `STALE_S` seconds. Ages are
measured with the clock of the file server, so clocks that differ between hosts do no harm. What takes a lock over holds a flock
meanwhile, which keeps two launches of one host apart; launches of two hosts are kept apart by the atomic creation of the file, and
by a look at what was renamed out of the way: a lock that is not the one judged stale is put back.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import sys
import tempfile
import threading
import time
import uuid
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from mmrl.errors import ConfigError

__all__ = ["BEAT_S", "STALE_S", "RunLock", "lock_file"]

BEAT_S = 15.0
STALE_S = 180.0
_HELD: set[str] = set()  # tokens of the locks that this process holds
_GONE_S = 1.0  # a launch that looks at the lock may have it under another name for a moment
# of os.link, on file systems without hard links
_NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS}


def lock_file(run: Path) -> Path:
    """Where the lock of a run folder lies: beside it."""
    return run.absolute().with_name(f".{run.name}.lock")


class RunLock:
    """The lock of the run folder `run`. It ends with `release`, with the object, or with the process."""

    def __init__(self, run: Path, *, beat_s: float = BEAT_S, stale_s: float = STALE_S) -> None:
        self.run, self.beat_s, self.stale_s = run, beat_s, stale_s
        self.path = lock_file(run)
        self._token = ""  # in the file, while this object holds it
        self._end: Any = None  # of this hold, once
        self._warned = False

    def acquire(self) -> None:
        """Hold the lock. Waits for a dead host's lock of the same launch to become stale; else raises ConfigError at once."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        deadline, waits = time.monotonic() + self.stale_s + 2 * self.beat_s, False
        while not self._try():
            holder = _read(self.path)
            if holder is None:
                continue  # let go in this moment
            if (
                _mine(holder)
                or _launch() is None
                or holder.get("launch") != _launch()
                or time.monotonic() > deadline
            ):
                raise ConfigError(self._in_use(holder))
            if not waits:
                waits = True
                print(
                    f"waiting for {_who(holder)} of this launch ({_launch()}) to let go of {self.run}, or to show no sign of "
                    f"life for {self.stale_s:g} s",
                    file=sys.stderr,
                    flush=True,
                )
            time.sleep(min(1.0, self.beat_s))

    def release(self) -> None:
        """Let go; nothing happens when it is not held."""
        if self._end is not None:
            self._end()
            self._end, self._token = None, ""

    def check(self) -> None:
        """Raise ConfigError when another launch took the lock over, thinking this process dead (it was stopped for long).

        A file server that does not answer proves nothing: that is said once, and the run goes on.
        """
        try:
            holder = _read(self.path)
            if holder is None and self._token:
                time.sleep(_GONE_S)
                holder = _read(self.path)
        except OSError as error:
            if not self._warned:
                self._warned = True
                print(
                    f"warning: cannot read the run's lock {self.path} ({error}); the run goes on without looking at it until it "
                    "can be read",
                    file=sys.stderr,
                    flush=True,
                )
            return
        if self._token and (holder is None or holder.get("token") != self._token):
            raise ConfigError(
                f"expected to hold {self.path} alone, found that another launch ({_who(holder)}) took it over while "
                f"this process (pid {os.getpid()}) gave no sign of life for more than {self.stale_s:g} s; two must "
                f"not write {self.run}: let one of them run"
            )

    def _try(self) -> bool:
        """Create the lock file, in place of one of a dead process; whether this object holds it now."""
        with _guard(self.path):
            holder, token = _read(self.path), uuid.uuid4().hex
            if holder is not None and not (
                self._stale(holder) and _take_away(self.path, holder, token)
            ):
                return False
            if not _create(self.path, {**_identity(), "token": token}):
                return False
            self._token = token
            _HELD.add(token)
        stop = threading.Event()
        threading.Thread(
            target=_beat,
            args=(self.path, token, self.beat_s, stop),
            name="mmrl-run-lock",
            daemon=True,
        ).start()
        # also runs at the end of the process
        self._end = weakref.finalize(self, _release, self.path, token, stop)
        return True

    def _stale(self, holder: dict[str, Any]) -> bool:
        if _mine(holder):  # let go, on a disk that was read-only at that moment
            return holder.get("token") not in _HELD
        if _same(holder, "host", "boot", "namespace"):
            return not _alive(holder)
        return _age(self.path) > self.stale_s

    def _in_use(self, holder: dict[str, Any]) -> str:
        here = holder.get("host") == socket.gethostname()
        if _mine(holder):
            return (
                f"expected {self.run} to be free, found that this very process uses it; wait for it, or choose another "
                "name= or --out"
            )
        return (
            f"expected {self.run} to be free, found that {_who(holder)} uses it (last sign of life "
            f"{max(0.0, _age(self.path)):.0f} s ago). Wait for it, end it (kill -TERM {holder.get('pid')}"
            f"{'' if here else ' on that host'}: a run leaves a checkpoint), or choose another name= or --out. A lock from another "
            f"host ends {self.stale_s:g} s after its last sign of life; if you know that process to be gone: rm {self.path}"
        )


def _who(holder: dict[str, Any] | None) -> str:
    if holder is None:
        return "unknown: the lock file is gone"
    return f"process {holder.get('pid')} on {holder.get('host')}, started {holder.get('since')}"


def _launch() -> str | None:
    """What the processes of one launch and its restarts share, where a launcher says so."""
    run_id = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    job = os.environ.get("SLURM_JOB_ID")
    return run_id if run_id != "none" else f"slurm-{job}" if job else None


def _identity() -> dict[str, Any]:
    return {
        "host": socket.gethostname(),
        "boot": _text("/proc/sys/kernel/random/boot_id"),
        "namespace": _link("/proc/self/ns/pid"),
        "pid": os.getpid(),
        "born": _born(os.getpid()),
        "launch": _launch(),
        "since": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def _same(holder: dict[str, Any], *facts: str) -> bool:
    me = _identity()
    return all(holder.get(fact) == me[fact] for fact in facts)


def _mine(holder: dict[str, Any]) -> bool:
    return _same(holder, "host", "boot", "namespace", "pid")


def _text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="ascii").strip()
    except OSError:
        return ""  # not Linux: hosts are told apart by their names


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""


def _born(pid: int) -> float | None:
    """When the process was created, so that a number used again is not taken for it; None when there is none.

    In seconds since the machine was booted: psutil's create_time() is of the wall clock, and a clock that is set (by NTP, after a
    suspend) would make every process another one, and every run in use look abandoned.
    """
    if os.path.exists("/proc/self/stat"):  # Linux
        try:
            state, *rest = (
                Path(f"/proc/{pid}/stat")
                .read_text(encoding="utf-8", errors="replace")
                .rpartition(")")[2]
                .split()
            )
            # field 22 of proc(5), starttime
            return None if state in "ZXx" else int(rest[18]) / os.sysconf("SC_CLK_TCK")
        except (OSError, ValueError, IndexError):
            return None
    import psutil

    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else process.create_time()
    except psutil.Error:
        return None


def _alive(holder: dict[str, Any]) -> bool:
    born = _born(int(holder["pid"]))
    return born is not None and abs(born - float(holder["born"] or born)) < 1.0


def _read(path: Path) -> dict[str, Any] | None:
    """What the lock file says; None when there is none."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError:
        return {"host": "unknown", "pid": 0, "since": "an unknown time"}  # it goes by its age


def _age(path: Path) -> float:
    """Seconds since the file was touched, by the clock of its file server."""
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f"{path.name}.clock-") as probe:
            return os.fstat(probe.fileno()).st_mtime - path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _take_away(path: Path, judged: dict[str, Any], token: str) -> bool:
    """Remove the lock that says `judged`; whether that was it. Between the look and this a launch of another host may have
    replaced it by its own, which is put back: over what a third one may have created meanwhile, whom `check` then tells."""
    aside = path.with_name(f"{path.name}.stale-{token}")
    try:
        os.rename(path, aside)
    except FileNotFoundError:
        return True
    found = _read(aside)
    if found is not None and found.get("token") != judged.get("token"):
        os.rename(aside, path)
        return False
    with suppress(FileNotFoundError):
        os.unlink(aside)
    return True


def _create(path: Path, content: dict[str, Any]) -> bool:
    """Give `path` the content if nobody has that name; atomic on NFS too, where O_EXCL alone may not show the content.

    A file system without hard links gets O_EXCL: whoever reads it too early finds a fresh lock of someone unknown.
    """
    partial = path.with_name(f"{path.name}.{content['token']}")
    partial.write_text(json.dumps(content), encoding="utf-8")
    try:
        os.link(partial, path)
        return True
    except FileExistsError:
        return False
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        return _create_without_links(path, json.dumps(content))
    finally:
        partial.unlink()


def _create_without_links(path: Path, text: str) -> bool:
    try:
        with open(path, "x", encoding="utf-8") as file:
            file.write(text)
        return True
    except FileExistsError:
        return False


@contextmanager
def _guard(path: Path) -> Iterator[None]:
    """Launches of this host look at and replace the lock file one after the other."""
    descriptor = os.open(path.parent, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with suppress(OSError):  # a file system that locks no folders: the atomic creation remains
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _beat(path: Path, token: str, every_s: float, stop: threading.Event) -> None:
    while not stop.wait(every_s):
        with suppress(OSError):  # a file server that is away: the next beat may reach it
            # else taken over, which `check` says, or being looked at
            if (_read(path) or {}).get("token") == token:
                os.utime(path)


def _release(path: Path, token: str, stop: threading.Event) -> None:
    stop.set()
    _HELD.discard(token)
    with suppress(OSError), _guard(path):
        if (_read(path) or {}).get("token") == token:
            os.unlink(path)
