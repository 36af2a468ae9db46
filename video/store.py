"""The visual tensor cache on disk: processed pixels and vision-tower features, made once, mapped by every process.

    store = TensorStore("cache", limit_bytes=200 << 30)
    key = make_key(video=store.content_digest("clip.mp4"), fps=2.0)
    entry = store.get_or_build(key, lambda: ({"pixels": decode()}, {"kind": "pixels"}))

One safetensors file per entry, named by its key. A file appears complete or not at all; a damaged one is noticed, removed and
built again; a full disk costs the cache, not the training. Nothing is ever unpickled. The folder may be deleted at any time.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from mmrl.errors import CacheError, ConfigError, did_you_mean
from mmrl.video.file_identity import digest_of_content, make_key
from mmrl.video.locks import create_shared, exclusive, open_quietly, open_shared, still_named, sweep
from mmrl.video.store_space import SUFFIX, Counts, File, Space, Stats, Stored, Verified, files
from mmrl.video.tensor_file import DamagedError, Entry, Packed, load, pack, read_header, write

if TYPE_CHECKING:
    import torch

__all__ = [
    "Entry",
    "Stats",
    "Stored",
    "TensorStore",
    "Verified",
    "Verify",
    "content_digest",
    "make_key",
]

Verify = Literal["first", "always", "never"]
"""When files are checked against their digests: as a process first reads them, at every read, or not at all."""
Built = tuple[Mapping[str, "torch.Tensor"], Mapping[str, Any]]
Progress = Callable[[int, int, float], None]
COUNTS = ("hits", "misses", "builds", "rebuilt", "evicted", "waited", "uncached", "damaged")
_KEY = re.compile(r"[0-9a-f]{16,128}\Z")
_FOLDER = "tensors-v1"
_STAMP_EVERY_S = 60.0
_LOG = logging.getLogger(__name__)


class TensorStore:
    """A content-addressed store of tensors under `root`, shared by any number of processes.

    `limit_bytes` bounds the disk space: the least recently used entries go first, never one in use; what then finds no room
    is not cached. `verify` says when a checksum is compared: "first" (the first time this process reads a file, and again
    when it was changed), "always", or "never". `wait_s`: how long get_or_build waits for another process before it builds
    by itself. `fsync`: force every entry to the disk; not needed, since what a power cut damages is built again.
    Can be pickled (spawned workers open it again). Raises CacheError when the folder cannot be made.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        limit_bytes: int | None = None,
        verify: Verify = "first",
        wait_s: float = 600.0,
        fsync: bool = False,
    ) -> None:
        if verify not in ("first", "always", "never"):
            raise ConfigError(
                f"verify: expected 'first', 'always' or 'never', found {verify!r}."
                f"{did_you_mean(str(verify), ('first', 'always', 'never'))}"
            )
        if limit_bytes is not None and (type(limit_bytes) is not int or limit_bytes <= 0):
            raise ConfigError(
                f"limit_bytes: expected a positive whole number or None, found {limit_bytes!r}"
            )
        self.root, self.limit_bytes, self.check, self.wait_s, self.fsync = (
            Path(root).absolute(),
            limit_bytes,
            verify,
            wait_s,
            fsync,
        )
        self.folder = self.root / _FOLDER
        self._locks, self._temporary, self._notes = (
            self.folder / n for n in ("locks", "tmp", "files")
        )
        self._space = Space(self.folder, self._locks, self._temporary, limit_bytes)
        # key -> inode, size, mtime of the file whose checksum was right
        self._seen: dict[str, tuple[int, int, int]] = {}
        self._condemned: set[str] = set()
        self._building = threading.local()
        self._warned = False
        self._make_folders()
        self._counts = Counts(self.folder, self._locks, self._temporary)
        weakref.finalize(self, self._counts.flush, 1.0)  # at the end of the process, too
        self._sweep()

    @classmethod
    def existing(cls, root: str | os.PathLike[str]) -> TensorStore:
        """The store at `root`; CacheError when there is none (nothing is created)."""
        if not (Path(root) / _FOLDER).is_dir():
            raise CacheError(
                f"expected a tensor cache, found no folder '{_FOLDER}' in {root}; give the folder that training "
                "was given as its cache"
            )
        return cls(root)

    def __reduce__(self) -> tuple:
        return _reopen, (str(self.root), self.limit_bytes, self.check, self.wait_s, self.fsync)

    # ------------------------------------------------------------------------------------------------ reading and writing

    def get(self, key: str) -> Entry | None:
        """The entry of `key` as read-only memory maps, or None when there is none (or only a damaged one, which is removed)."""
        entry = self._open(key)
        self._count("misses" if entry is None else "hits")
        return entry

    def put(
        self, key: str, tensors: Mapping[str, torch.Tensor], meta: Mapping[str, Any] | None = None
    ) -> Entry:
        """Write an entry (replacing one of the same key) and return it, mapped. `meta`: JSON values; meta["kind"] groups stats.

        Raises ConfigError for what cannot be kept and CacheError when it cannot be written (disk full, bound, permissions).
        """
        return self._write(pack(self._key(key), tensors, meta or {}))

    def get_or_build(
        self, key: str, build: Callable[[], Built], *, sources: Mapping[str, str] | None = None
    ) -> Entry:
        """The entry of `key`; if there is none, the one that `build() -> (tensors, meta)` makes.

        Of all processes and threads that ask at once one builds and the others wait. If it dies, the next one builds. What
        cannot be written is returned uncached, with one warning. What `build` raises is passed on and nothing is kept.
        `sources` maps each file that `build` reads to the content_digest in the key: if one was edited in between, what was
        built belongs to another key, so nothing is kept and CacheError is raised; ask again with the new digest.
        """
        entry = self._open(key)
        if entry is not None:
            self._count("hits")
            return entry
        self._count("misses")
        building: set[str] = self._building.__dict__.setdefault("keys", set())
        if key in building:
            raise CacheError(
                f"expected a build that needs other entries only, found that the build of {key} asks for itself"
            )
        building.add(key)
        try:
            with ExitStack() as stack:
                held = True
                # no room or no right to make a lock file: build here, and find out when writing
                with suppress(OSError):
                    held = stack.enter_context(
                        exclusive(
                            self._locks / key,
                            wait_s=self.wait_s,
                            on_wait=lambda: self._count("waited"),
                        )
                    )
                if not held:
                    _LOG.warning(
                        "waited %.0f s for another process to build %s; building it here",
                        self.wait_s,
                        key,
                    )
                return self._open(key) or self._build(key, build, sources or {})
        finally:
            building.discard(key)

    def content_digest(self, path: str | os.PathLike[str]) -> str:
        """content_digest(path, self)."""
        return digest_of_content(path, self._notes)

    # ------------------------------------------------------------------------------------------------------- housekeeping

    def entries(self) -> Iterator[Stored]:
        """What lies in the store, in the order of keys; files that are no entries are left out (see verify)."""
        for file in files(self.folder):
            with suppress(DamagedError):
                meta = self._meta(file)
                if meta is not None:
                    yield Stored(file.key, file.nbytes, file.used_at, meta)

    def stats(self) -> Stats:
        """Counts and sizes; reads the header of every entry (about 20 microseconds each on a local disk)."""
        entries = nbytes = 0
        kinds: dict[str, tuple[int, int]] = {}
        for file in files(self.folder):
            try:
                meta = self._meta(file)
            except DamagedError:
                meta = {"kind": "damaged"}
            if meta is not None:
                kind = str(meta.get("kind", "other"))
                n, size = kinds.get(kind, (0, 0))
                kinds[kind] = n + 1, size + file.nbytes
                entries, nbytes = entries + 1, nbytes + file.nbytes
        totals = self.flush(wait_s=5.0)
        counts = {name: self.counts[name] for name in COUNTS}
        return Stats(
            entries,
            nbytes,
            dict(sorted(kinds.items())),
            counts,
            {name: totals[name] for name in COUNTS},
        )

    def verify(self, *, delete: bool = False, progress: Progress | None = None) -> Verified:
        """Read every entry and compare its checksum; `delete` removes the damaged ones (those in use too: their maps stay
        valid). `progress(bytes done, bytes in all, seconds left)` is called after each entry. Order of eviction is kept."""
        began, done, checked = time.monotonic(), 0, 0
        todo = list(files(self.folder))
        total, damaged, removed = sum(f.nbytes for f in todo), [], 0
        for file in todo:
            wrong, gone = self._verify_one(file, delete)
            checked += wrong != "gone"
            if wrong not in ("", "gone"):
                damaged.append((file.key, wrong))
                removed += gone
            done += file.nbytes
            spent = time.monotonic() - began
            if progress is not None:
                progress(done, total, spent * (total - done) / max(done, 1))
        return Verified(checked, done, tuple(damaged), removed, time.monotonic() - began)

    def prune(
        self, max_bytes: int | None = None, unused_for_s: float | None = None
    ) -> tuple[int, int]:
        """Remove entries unused for `unused_for_s` seconds, then the least recently used down to `max_bytes`; never one in use.

        Also removes what killed processes left. Returns (entries removed, bytes left).
        """
        for name, value in (("max_bytes", max_bytes), ("unused_for_s", unused_for_s)):
            if value is not None and not value >= 0:
                raise ConfigError(f"{name}: expected a number of at least 0, found {value!r}")
        self._sweep()
        evicted, left = self._space.prune(max_bytes, unused_for_s)
        self._count("evicted", evicted)
        return evicted, left

    def flush(self, *, wait_s: float = 0.0) -> Counter[str]:
        """Add this process's counts to those kept in the store; returns the sum over all processes. Never raises OSError."""
        return self._counts.flush(wait_s)

    @property
    def counts(self) -> Counter[str]:
        """What this process counted in this store (see COUNTS)."""
        return self._counts.own

    # ---------------------------------------------------------------------------------------------------------- internals

    def _key(self, key: str) -> str:
        if not (type(key) is str and _KEY.match(key)):
            raise ConfigError(
                f"key: expected 16 to 128 lower-case hexadecimal digits (see make_key), found {key!r:.80}"
            )
        return key

    def _path(self, key: str) -> Path:
        return self.folder / self._key(key)[:2] / f"{key}{SUFFIX}"

    def _make_folders(self) -> None:
        try:
            for folder in (self._locks, self._temporary, self._notes):
                folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            if not self.folder.is_dir():
                # a read-only store that exists can still be read
                raise self._failed(error, 0) from error

    def _sweep(self) -> None:
        for folder in (self._temporary, self._locks, self._notes / "tmp"):
            sweep(folder)

    def _count(self, name: str, n: int = 1) -> None:
        self._counts.add(name, n)

    def _open(self, key: str) -> Entry | None:
        path = self._path(key)
        try:
            fd = open_shared(path)
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                raise CacheError(
                    f"expected a free file descriptor, found none ({error.strerror}); close entries or raise "
                    "the limit with `ulimit -n`"
                ) from error
            self._warn(f"cannot read {path}: {error.strerror}")
            return None
        if fd is None:
            return None
        try:
            facts = os.fstat(fd)
            identity = facts.st_ino, facts.st_size, facts.st_mtime_ns
            check = self.check == "always" or (
                self.check == "first" and self._seen.get(key) != identity
            )
            entry = load(fd, key, check=check)
            if check:
                self._seen[key] = identity
            if abs(time.time() - facts.st_atime) > _STAMP_EVERY_S:  # or of a clock that was wrong
                with suppress(OSError):  # a file of another user
                    os.utime(fd, ns=(time.time_ns(), facts.st_mtime_ns))
            return entry
        except DamagedError as wrong:
            self._discard(fd, path, key, str(wrong))
            return None
        except OSError as error:  # the disk cannot read it
            self._warn(f"cannot read {path}: {error.strerror}")
            return None
        finally:
            os.close(fd)

    def _discard(self, fd: int, path: Path, key: str, why: str) -> bool:
        """Remove the damaged file open as `fd`, unless a new one has its name already."""
        self._count("damaged")
        self._condemned.add(key)
        _LOG.warning("cache entry %s is damaged (%s); it is removed", key, why)
        with suppress(OSError):
            if still_named(fd, path):
                os.unlink(path)
                return True
        return False

    def _build(self, key: str, build: Callable[[], Built], sources: Mapping[str, str]) -> Entry:
        tensors, meta = build()
        for path, digest in sources.items():
            if self.content_digest(path) != digest:
                raise CacheError(
                    f"expected {path} unchanged while it was read, found other contents; read it again"
                )
        packed = pack(key, tensors, meta)
        self._count("builds")
        try:
            return self._write(packed)
        except CacheError as error:
            self._count("uncached")
            self._warn(f"{error}. Tensors stay in memory, uncached")
            return Entry(
                key, packed.tensors, packed.meta, packed.digest, packed.nbytes, cached=False
            )

    def _write(self, packed: Packed) -> Entry:
        path = self._path(packed.key)
        try:
            if not self._temporary.is_dir():  # somebody deleted the folder while we ran
                self._make_folders()
            path.parent.mkdir(exist_ok=True)
            fd, temporary = create_shared(self._temporary)
        except OSError as error:
            raise self._failed(error, packed.nbytes) from error
        try:
            self._count("evicted", self._space.reserve(packed.nbytes, fd))
            write(fd, packed)
            if self.fsync:
                os.fsync(fd)
            os.replace(temporary, path)
            facts = os.fstat(fd)
            self._seen[packed.key] = facts.st_ino, facts.st_size, facts.st_mtime_ns
            if packed.key in self._condemned:
                self._condemned.discard(packed.key)
                self._count("rebuilt")
            return load(fd, packed.key, check=False)
        except CacheError:
            raise
        except OSError as error:
            raise self._failed(error, packed.nbytes) from error
        finally:
            os.close(fd)
            with suppress(OSError):
                os.unlink(temporary)

    def _failed(self, error: OSError, nbytes: int) -> CacheError:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            return CacheError(
                f"expected room for {nbytes:,} bytes in {self.root}, found '{error.strerror}'; free space, set "
                "limit_bytes, or run `mmrl cache prune`"
            )
        return CacheError(
            f"expected to write in {self.root}, found '{error.strerror}'; give a folder this user may write to"
        )

    def _warn(self, text: str) -> None:
        if not self._warned:
            self._warned = True
            _LOG.warning("tensor cache: %s (shown once)", text)

    def _meta(self, file: File) -> Mapping[str, Any] | None:
        """Metadata of one file, None when it was removed meanwhile; DamagedError."""
        try:
            fd = open_quietly(file.path)
        except FileNotFoundError:
            return None
        try:
            header, _ = read_header(fd, os.fstat(fd).st_size)
            return dict(header["__metadata__"]["parsed"]["meta"])
        except OSError as error:
            raise DamagedError(f"it cannot be read: {error.strerror}") from error
        finally:
            os.close(fd)

    def _verify_one(self, file: File, delete: bool) -> tuple[str, bool]:
        """(what is wrong, whether it was removed); 'gone' when the file was removed meanwhile."""
        fd = open_shared(file.path)
        if fd is None:
            return "gone", False
        try:
            load(fd, file.key, check=True).close()
            return "", False
        except DamagedError as wrong:
            return str(wrong), delete and self._discard(fd, file.path, file.key, str(wrong))
        except OSError as error:
            return f"it cannot be read: {error.strerror}", False
        finally:
            os.close(fd)


def content_digest(path: str | os.PathLike[str], store: TensorStore | None = None) -> str:
    """40 hexadecimal digits that name the bytes of a file, or the names and bytes of all files of a folder of frames.

    Remembered by path, size, times and inode in this process, and with `store` in it, for later runs. Raises MediaError
    (missing, empty folder, unsupported kind of file) and CacheError when the file keeps changing while it is read.
    """
    return digest_of_content(path, None if store is None else store._notes)


def _reopen(
    root: str,
    limit: int | None,
    check: Verify,
    wait_s: float,
    fsync: bool,
) -> TensorStore:
    return TensorStore(root, limit_bytes=limit, verify=check, wait_s=wait_s, fsync=fsync)
