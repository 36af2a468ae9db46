"""What an evaluation has judged so far, written as it goes, so that one that is cut off goes on where it was.

    with Progress(folder, {"": Asked(settings, total=90)}) as progress:    # or Progress.resumed([folder], ...)
        part = progress.part("")                                          # of several suites one each
        if (entries := part.judged((0, 64, 79))) is None:                 # a unit: a chunk of samples, or an initial state
            part.keep((0, 64, 79), [...], samples=16)
        progress.complete = True                                          # results.json holds all

FOLDER/partial.jsonl begins with what was asked for (weights, data, settings, versions) and then has a line for each unit that is
judged whole. A resume asks the same of the other units, so its numbers are those of an evaluation that was never cut off; one that
asks for anything else is refused before it begins. A unit in which a reward, a judge or a simulator failed is not kept.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from mmrl.errors import ConfigError, MMRLError
from mmrl.evaluation.rescore import logged_score
from mmrl.evaluation.tables import Judged
from mmrl.files import append, json_line, write_text, writing
from mmrl.operations.lock import RunLock
from mmrl.operations.versions import versions
from mmrl.policy.manifest import MANIFEST, loaded_files
from mmrl.training.identity import changes, run_identity
from mmrl.types import Sample

__all__ = [
    "PARTIAL",
    "Asked",
    "Part",
    "Progress",
    "asked_of",
    "entries_of",
    "judged_of",
    "samples_mark",
    "weights_mark",
]

PARTIAL = "partial.jsonl"
# what an evaluation reads of a configuration; data.train and whatever may change in a resumed run is not among it
_SECTIONS = ("model", "data", "rollout", "env", "vla", "action", "seed")
_BLOCK = 1 << 20
_BLOCKS = 16


class Asked(NamedTuple):
    """What one evaluation, or one suite of several, is asked for: all that changes its numbers, and of how many samples (or initial
    states)."""

    settings: Mapping[str, Any]
    total: int


class Part:
    """One evaluation, or one suite of several, in a partial.jsonl."""

    def __init__(self, path: Path, name: str, known: Mapping[str, Any]) -> None:
        self._path, self._name, self._known = path, name, known

    def judged(self, unit: Sequence[Any]) -> Any:
        """What `keep` was given for this unit by an earlier start, as JSON has it; None for one that is to be asked."""
        return self._known.get(json.dumps(list(unit)))

    def keep(self, unit: Sequence[Any], judged: Any, samples: int) -> None:
        """The whole unit, of so many samples, is judged. A second call replaces the first. Raises StorageError."""
        line = {"part": self._name, "unit": list(unit), "samples": samples, "judged": judged}
        append(self._path, [json_line(line)])


class Progress:
    """The partial.jsonl of the evaluation in `folder`, which one process at a time may write; a context manager.

    `asked`: of each suite by its name, or of the one evaluation under "". When the block ends and `complete` is not set, standard
    error says what is kept and that `again` goes on there; a folder in which nothing was judged is removed. Raises ConfigError
    where another process evaluates into it, and StorageError.
    """

    def __init__(
        self,
        folder: Path,
        asked: Mapping[str, Asked],
        again: str = "the same command with --resume",
    ) -> None:
        self.folder, self.complete = folder, False
        self._asked, self._again, self._resumed = asked, again, False
        self._path = folder.resolve() / PARTIAL
        self._units: dict[str, dict[str, Any]] = {name: {} for name in asked}
        self._header = json.loads(json_line({name: dict(a.settings) for name, a in asked.items()}))
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
        # in the folder: what lies beside it may be somebody else's
        self._lock = RunLock(self._path)

    @classmethod
    def resumed(cls, folders: Sequence[Path], asked: Mapping[str, Asked], again: str) -> Progress:
        """That of the first of `folders` that was asked for the same. Raises ConfigError with what differs from the first."""
        refused: list[ConfigError] = []
        for folder in folders:
            progress = cls(folder, asked, again)
            try:
                progress._read_same()
            except ConfigError as error:
                refused.append(error)
                continue
            progress._resumed = True
            return progress
        raise refused[0]

    def part(self, name: str) -> Part:
        """One of those asked for."""
        return Part(self._path, name, self._units[name])

    def __enter__(self) -> Progress:
        self._lock.acquire()
        if not self._resumed:
            write_text(self._path, json_line({"asked": self._header}) + "\n")
            return self
        units, whole = self._read_same()  # again: until now another process may have held it
        for line in units:
            self._units[line["part"]][json.dumps(line["unit"])] = line["judged"]
        with writing(self._path):  # without the line that was being written when it ended
            os.truncate(self._path, whole)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if self.complete:
                self._path.unlink(missing_ok=True)
            else:
                with suppress(MMRLError, OSError):  # what ended it is on its way
                    self._tell()
        finally:
            self._lock.release()
        with suppress(OSError):  # something is in it
            self.folder.rmdir()

    def _read_same(self) -> tuple[list[dict[str, Any]], int]:
        """Lines of the units, and the bytes up to their end. Raises ConfigError where anything else was asked for, or another kind
        of file is there."""
        header, units, whole = _read(self._path)
        _same(self.folder, header, self._header)
        return units, whole

    def _tell(self) -> None:
        """Say what is kept; where that is nothing, remove what was begun."""
        _, units, _ = _read(self._path)
        counts = {name: dict[str, int]() for name in self._asked}
        for line in units:
            counts[line["part"]][json.dumps(line["unit"])] = line["samples"]
        done = [
            f"{sum(found.values()):,} of {self._asked[name].total:,}"
            + (f" ({name})" if name else "")
            for name, found in counts.items()
            if found
        ]
        if done:
            said = f"kept in {self.folder}: {', '.join(done)}; {self._again} goes on there"
            print(said, file=sys.stderr)
        else:
            self._path.unlink()


def entries_of(rows: Iterable[Judged]) -> list[dict[str, Any]]:
    """For Part.keep."""
    # each row by itself: what has no JSON costs a row its odd field
    return [
        {"place": j.place, "number": j.number, "row": json.loads(json_line(j.row))} for j in rows
    ]


def judged_of(
    entries: Iterable[Mapping[str, Any]], source: int, samples: Mapping[int, Sample]
) -> list[Judged]:
    """From what Part.judged gives; `samples`: those of the unit, by their place. Raises ConfigError."""
    try:
        return [
            Judged(
                e["row"],
                samples[e["place"]],
                logged_score(e["row"]["score"]),
                source,
                e["place"],
                e["number"],
            )
            for e in entries
        ]
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(_OTHER.format(PARTIAL, type(error).__name__, error)) from error


def asked_of(config: Mapping[str, Any], weights: str, more: Mapping[str, Any], total: int) -> Asked:
    """`config`: as JSON has it; `weights`: see weights_mark; `more`: what is asked, in which modes."""
    identity = run_identity(dict(config))
    read = {
        key: value
        for key, value in identity.items()
        if key.partition(".")[0] in _SECTIONS
        and key != "model.path"
        and not key.startswith("data.train")
    }
    return Asked({**read, "weights": weights, "versions": versions(), **more}, total)


def weights_mark(model: str, commit: str | None = None) -> str:
    """What tells the weights of a model from others: of a checkpoint its manifest's; of another folder a digest of the files that
    would be loaded (of large ones, of blocks spread over them); of a hub name also `commit`."""
    folder = Path(model)
    if not folder.is_dir():
        return f"{model}@{commit}" if commit else model
    if (folder / MANIFEST).is_file():
        return _mark([(folder / MANIFEST).read_bytes()])
    return _mark(
        part for name in loaded_files(folder) for part in (name.encode(), *_blocks(folder / name))
    )


def _blocks(path: Path) -> Iterator[bytes]:
    """The size and the bytes of a small file, or blocks of a large one: weights that were trained differ in each of them."""
    size = path.stat().st_size
    yield str(size).encode()
    step = max(_BLOCK, (size - _BLOCK) // (_BLOCKS - 1))
    with path.open("rb") as file:
        for start in range(0, size, step):
            file.seek(start)
            yield file.read(_BLOCK)


def samples_mark(samples: Iterable[Sample]) -> str:
    """What tells these samples, in this order, from others; media by their paths."""
    return _mark(_sample_text(sample).encode() for sample in samples)


def _sample_text(sample: Sample) -> str:
    values = asdict(sample)
    for kind in ("images", "videos", "audios"):
        values[kind] = [os.path.abspath(path) for path in values[kind]]
    # an object's own text may hold its address in memory
    return json_line(_told(values))


def _told(value: Any) -> Any:
    """`value` in what JSON has, the same in every process."""
    if isinstance(value, Mapping):
        return [[_told(key), _told(part)] for key, part in value.items()]
    if isinstance(value, (list, tuple)):
        return [_told(part) for part in value]
    if isinstance(value, (set, frozenset)):
        return sorted(map(repr, value))
    if value is None or isinstance(value, (str, int, float)):
        return value
    return value.tolist() if hasattr(value, "tolist") else type(value).__name__


def _mark(parts: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()[:16]


_OTHER = "expected {} as an evaluation that was cut off left it, found {}: {}; remove its folder and evaluate again"


def _read(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]], int]:
    """What was asked for, the whole lines after it, and the bytes up to their end. Raises ConfigError for another kind of file."""
    with writing(path):
        content = path.read_bytes()
    whole = content.rfind(b"\n") + 1
    try:
        header, *units = [json.loads(line) for line in content[:whole].splitlines()]
        asked = {name: dict(one) for name, one in header["asked"].items()}
        for line in units:
            asked[line["part"]], line["judged"], int(line["samples"]), list(line["unit"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(_OTHER.format(path, type(error).__name__, error)) from error
    return asked, units, whole


def _same(folder: Path, old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    """Raise ConfigError where the evaluation in `folder` was asked for anything else than this one."""
    changed = changes(dict(_leaves(old)), dict(_leaves(new)), ())
    if changed:
        raise ConfigError(
            f"expected what the evaluation that was cut off in {folder} was asked for, found another: {'; '.join(changed)}; give "
            "the same, or begin a new evaluation in another folder, without resuming"
        )


def _leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """{"video": {"fps": 2}, "data": ["a"]} -> ("video.fps", 2), ("data.0", "a")."""
    parts: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, Mapping) and value:
        parts = value.items()
    elif isinstance(value, list) and value:
        parts = enumerate(value)
    else:
        yield name, value
    for key, part in parts:
        yield from _leaves(part, f"{name}.{key}".strip("."))
