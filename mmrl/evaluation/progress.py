"""What an evaluation has judged so far, written as it goes, so that one that is cut off goes on where it was.

    progress = Progress(folder, asked, total=len(samples), resume=True)
    if (entries := progress.kept((0, 64, 127))) is None:       # a unit: a chunk of samples, or the episodes of an initial state
        progress.keep((0, 64, 127), [...], count=64)
    progress.remove()                                          # once results.json is written

FOLDER/partial.jsonl begins with what was asked for (model, data, settings, versions: all that changes a number) and then has a line
for each unit that is judged whole. A resume asks the same of the same units, so its numbers are those of an evaluation that was
never cut off; one that asks for anything else is refused.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mmrl.errors import ConfigError, MMRLError
from mmrl.evaluation.rescore import logged_score
from mmrl.evaluation.tables import Judged
from mmrl.files import append, json_line, write_text, writing
from mmrl.operations.lock import RunLock
from mmrl.policy.manifest import MANIFEST
from mmrl.training.identity import changes
from mmrl.types import Sample

__all__ = [
    "PARTIAL",
    "Progress",
    "checkpoint_mark",
    "cut_off",
    "entries_of",
    "evaluating",
    "judged_of",
    "samples_mark",
]

PARTIAL = "partial.jsonl"


@dataclass
class Progress:
    """The partial.jsonl of `folder`, of an evaluation that was asked for `asked`, of `total` samples (or initial states).

    With `resume`, and where the file is there, what it holds is kept. Raises ConfigError where that evaluation was asked for
    anything else, and StorageError.
    """

    folder: Path
    asked: Mapping[str, Any]
    total: int
    resume: bool = False
    _kept: dict[str, Any] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        path = self.folder / PARTIAL
        asked = json.loads(json_line(dict(self.asked)))  # as a file has it
        if not (self.resume and path.is_file()):
            write_text(path, json_line({"asked": asked, "total": self.total}) + "\n")
            return
        found, units, whole = _read(path)
        _same(path, found.get("asked"), asked)
        with writing(path):  # the line that was being written when it ended
            os.truncate(path, whole)
        self._kept = {_key(unit["unit"]): unit["kept"] for unit in units}

    def kept(self, unit: Sequence[Any]) -> Any:
        """What `keep` was given for this unit, as JSON has it; None for one that was not judged."""
        return self._kept.get(_key(unit))

    def keep(self, unit: Sequence[Any], kept: Any, count: int) -> None:
        """`unit`, `count` of the samples, is judged whole. A second time: in place of the first. Raises StorageError."""
        append(
            self.folder / PARTIAL, [json_line({"unit": list(unit), "count": count, "kept": kept})]
        )

    def remove(self) -> None:
        """The evaluation is complete: results.json holds all."""
        with writing(self.folder / PARTIAL):
            (self.folder / PARTIAL).unlink(missing_ok=True)


def entries_of(rows: Iterable[Judged]) -> list[dict[str, Any]]:
    """For Progress.keep."""
    return [{"place": j.place, "number": j.number, "row": j.row} for j in rows]


def judged_of(
    entries: Iterable[Mapping[str, Any]], source: int, samples: Mapping[int, Sample]
) -> list[Judged]:
    """From what Progress.kept gives; `samples`: those of the unit, by their place."""
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


def checkpoint_mark(model: str) -> str:
    """What tells the weights of a model folder from others: its manifest's, else names, sizes and times of its files; of a hub name
    nothing is known here."""
    folder = Path(model)
    if not folder.is_dir():
        return ""
    if (folder / MANIFEST).is_file():
        return _mark([(folder / MANIFEST).read_bytes()])
    files = sorted(path for path in folder.iterdir() if path.is_file())
    return _mark(f"{p.name} {p.stat().st_size} {p.stat().st_mtime_ns}".encode() for p in files)


def samples_mark(samples: Iterable[Sample]) -> str:
    """What tells these samples, in this order, from others."""
    # an object's own text may hold its address in memory
    texts = (
        json.dumps(asdict(sample), default=lambda value: type(value).__name__) for sample in samples
    )
    return _mark(text.encode() for text in texts)


def _mark(parts: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()[:16]


def _key(unit: Sequence[Any]) -> str:
    return json.dumps(list(unit))


def _read(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]], int]:
    """The first line, the whole lines after it, and the bytes up to their end. Raises ConfigError for another kind of file."""
    with writing(path):
        content = path.read_bytes()
    whole = content.rfind(b"\n") + 1
    try:
        header, *units = [json.loads(line) for line in content[:whole].splitlines()]
        for unit in units:
            _key(unit["unit"]), unit["kept"], int(unit["count"])
        return dict(header), units, whole
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"expected {path} as an evaluation that was cut off left it, found {type(error).__name__}: {error}; remove "
            f"{path.parent} and evaluate again"
        ) from error


def _same(path: Path, old: Any, new: Mapping[str, Any]) -> None:
    """Raise ConfigError where the evaluation in `path` was asked for anything else than this one."""
    changed = changes(dict(_leaves(old)), dict(_leaves(new)), ())
    if changed:
        raise ConfigError(
            f"expected what the evaluation that was cut off in {path.parent} was asked for, found another: {'; '.join(changed)}; "
            "give the same command, or for a new evaluation leave --resume out (and name another --out)"
        )


def _leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """{"video": {"fps": 2}, "data": ["a"]} -> ("video.fps", 2), ("data.0", "a")."""
    inner: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, Mapping):
        inner = value.items()
    elif isinstance(value, list):
        inner = enumerate(value)
    else:
        yield name, value
    for key, part in inner:
        yield from _leaves(part, f"{name}.{key}" if name else str(key))


def cut_off(folder: Path) -> list[Path]:
    """The partial.jsonl files of the evaluation in `folder`: its own, or those of its suites."""
    found = (folder / PARTIAL, *sorted(folder.glob(f"*/{PARTIAL}")))
    return [path for path in found if path.is_file()]


@contextmanager
def evaluating(folder: Path, again: str = "the same command with --resume") -> Iterator[None]:
    """One evaluation at a time writes into `folder`. What ends it early leaves there what was judged, which standard error says
    with `again`, the way to go on; an empty folder is removed. Raises ConfigError while another one writes there."""
    lock = RunLock(folder)
    lock.acquire()
    try:
        yield
        parts = cut_off(folder)
        # of several suites none counts as done before all are: their table is one
        if all((path.parent / "results.json").is_file() for path in parts):
            for path in parts:
                path.unlink()
    except BaseException:
        _tell(folder, again)
        raise
    finally:
        with suppress(OSError):  # not empty, or not there
            folder.rmdir()
        lock.release()


def _tell(folder: Path, again: str) -> None:
    """Say what is kept; where that is nothing, remove what was begun."""
    kept = []
    for path in cut_off(folder):
        try:
            header, units, _ = _read(path)
        except MMRLError:  # its error is on its way
            continue
        done = sum({_key(u["unit"]): u["count"] for u in units}.values())
        kept += [
            f"{done:,} of {header['total']:,}"
            + (f" ({path.parent.name})" if path.parent != folder else "")
        ] * bool(done)
        if not done and not (path.parent / "results.json").exists():
            path.unlink()
            with suppress(OSError):
                path.parent.rmdir()
    if kept:
        print(
            f"judged so far, and kept in {folder}: {', '.join(kept)}; {again} goes on there",
            file=sys.stderr,
        )
