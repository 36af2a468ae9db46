"""The pictures and clips that a run has read, by the digest of their bytes: a resumed run must find the same ones.

    record = MediaRecord()
    encoder.visuals.witness = record.note      # told of every file that is read, with the digest that is its cache key
    checkpoints.save(..., extra=record.files())
    restore_media(record, checkpoint, sources, world)      # raises DataError where a file is another one now

What it costs. While the run goes on: nothing but memory, some 500 bytes per file, since the digest of its bytes is the key of
the visual cache. In a checkpoint: some 150 bytes per file read so far (40 MB for 260,000). When the run is resumed: one look at
each file (os.stat, eight at a time); a file whose size, times and inode are the recorded ones was not written to since and is
not read. One with others, copied or restored or replaced, is read and its bytes are compared. Files that were not read yet are
not looked at: the run has learned nothing from them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from mmrl.errors import DataError, MismatchError, MMRLError
from mmrl.video import file_identity

if TYPE_CHECKING:
    from mmrl.data.sources import LoadedSource
    from mmrl.distributed.world import World

__all__ = ["MediaRecord", "restore_media"]

MEDIA = "media.json"
_THREADS = 8

# digest of the bytes; size, times and inode, None where the file was too new to go by them
Entry = tuple[str, list[int] | None]


class MediaRecord:
    """By path as the data name it. `note` may be called from any thread."""

    def __init__(self) -> None:
        self._seen: dict[str, Entry] = {}
        self._new: dict[str, Entry] = {}

    def note(self, path: str, digest: str) -> None:
        """The file at `path` was read and has this digest. Raises MismatchError when it had another one earlier in the run."""
        known = self._seen.get(path)
        if known is None:
            self._seen[path] = self._new[path] = (digest, file_identity.settled_stamp(path))
        elif known[0] != digest:
            raise MismatchError(
                f"{path}: expected the picture or clip that this run has read before, found other bytes: the file "
                "was changed during the run; restore it and resume, or start a new run"
            )

    def take_new(self) -> list[tuple[str, Entry]]:
        """What was noted since it was last asked, to be told to the other processes."""
        new, self._new = self._new, {}
        return list(new.items())

    def learn(self, entries: Iterable[tuple[str, Entry]]) -> None:
        """What other processes have read."""
        for path, entry in entries:
            self._seen.setdefault(path, entry)

    def files(self) -> dict[str, str]:
        """What a checkpoint keeps: one JSON object, path -> entry; nothing where nothing was read (simulators)."""
        return {MEDIA: json.dumps(self._seen, sort_keys=True)} if self._seen else {}

    def read(self, file: Path) -> None:
        """Go on from the record of a checkpoint, where it has one."""
        if file.is_file():
            self._seen = {
                path: (digest, stamp)
                for path, (digest, stamp) in json.loads(file.read_bytes()).items()
            }

    def changes(self, paths: Iterable[str]) -> str:
        """What is other now about those of the files that were read, in words; '' where nothing is."""
        wanted = sorted(set(paths) & self._seen.keys())
        with ThreadPoolExecutor(_THREADS) as pool:
            found = [
                f"{path} ({why})"
                for path, why in zip(wanted, pool.map(self._changed, wanted), strict=True)
                if why
            ]
        more = ", ..." if len(found) > 3 else ""
        return f"{len(found)} of {len(wanted)}: {', '.join(found[:3])}{more}" if found else ""

    def _changed(self, path: str) -> str:
        """What is other about the file than it was; '' where nothing is."""
        digest, stamp = self._seen[path]
        try:
            if stamp is not None and file_identity.stamp_of(path) == stamp:
                return ""
            return "" if file_identity.digest_of_content(path) == digest else "other bytes"
        except MMRLError:
            return "it is gone, or cannot be read"


def restore_media(
    record: MediaRecord, checkpoint: Path, sources: Sequence[LoadedSource], world: World
) -> None:
    """Go on from the record in `checkpoint`, after comparing it with the files the data name now: those only, since data.eval
    may be another. Collective; raises DataError, on all processes, where a picture or clip is not the one that was read."""
    record.read(checkpoint / "trainer" / MEDIA)
    paths = {
        path
        for source in sources
        for sample in source.samples
        for path in (*sample.images, *sample.videos, *sample.audios)
    }
    if why := world.gather([record.changes(paths) if world.is_main else ""])[0]:
        raise DataError(
            f"cannot resume: pictures or clips that the run had read when {checkpoint.name} was written are not the "
            f"same any more: {why}; restore the files or start a new run"
        )
