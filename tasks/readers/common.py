"""What every reader shares: box checks, row errors that say file, row, expected, found and fix, and their collection.

A broken row either raises DataError (on_error='raise', the default) or is kept in `Readout.rejected` with its reason
(on_error='record'). No row is lost, repaired or replaced silently.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, get_args

from mmrl.coords import CoordFrame, to_orig
from mmrl.data.json_lines import RowError
from mmrl.errors import ConfigError, DataError, MediaError, did_you_mean
from mmrl.types import Sample
from mmrl.video.media import ORIENTATION_PARAM, ImageFacts, Orientation, image_facts

__all__ = [
    "Check",
    "GeometryError",
    "MAP_COLUMNS",
    "Readout",
    "Rejected",
    "RowError",
    "SizeOf",
    "SkipRow",
    "check_answer_box",
    "check_box",
    "check_frame",
    "collect",
    "path_below",
    "read_pictures_as",
    "resolve_image",
    "text_of",
]

Box = tuple[float, float, float, float]
SizeOf = Callable[[str], tuple[int, int]]
Check = Callable[[str, Any, CoordFrame, Sequence[tuple[int, int]], Mapping[str, Any]], Any]
"""check(task name, answer as the file has it, its frame, sizes of the row's pictures, params) -> Sample.answer, or RowError."""


MAP_COLUMNS = (
    "map the columns that there are: reader.columns={image: ..., question: ..., answer: ...}"
)
"""The fix for rows of nobody's format, see mmrl.tasks.readers.mapped."""


class GeometryError(RowError):
    """A box, point or size that does not fit its picture; `collect` adds what an EXIF orientation of the picture has to do
    with it."""


class SkipRow(Exception):
    """A row the user asked to leave out (reader.only_mine, a split, a language ...): counted by reason, no error."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True)
class Rejected:
    """A row that was not used: where it stands (1-based row or line) and why."""

    file: str
    row: int
    reason: str

    def __str__(self) -> str:
        return f"{self.file}: row {self.row}: {self.reason}"


@dataclass
class Readout:
    """What a reader found: usable samples in file order, and rejected rows (only with on_error='record')."""

    samples: list[Sample] = field(default_factory=list)
    rejected: list[Rejected] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)  # row or line of each sample
    files: list[str] = field(default_factory=list)  # in which of the files that is
    skipped: Counter[str] = field(default_factory=Counter)  # rows left out on request, by reason
    # what was done to rows that are used: params.adjusted, EXIF
    notes: Counter[str] = field(default_factory=Counter)

    def verify(
        self, check: Callable[[Sample], None], file: str | os.PathLike[str], on_error: str = "raise"
    ) -> None:
        """Run `check` on every sample; one it refuses (DataError, ConfigError) raises or moves to `rejected`."""
        kept: list[tuple[Sample, int, str]] = []
        for sample, row, name in zip(self.samples, self.rows, self.files, strict=True):
            try:
                check(sample)
                kept.append((sample, row, name))
            except (DataError, ConfigError) as err:
                rejected = Rejected(
                    os.fspath(file), row, f"sample {sample.id!r}: params.reward: {err}"
                )
                if on_error == "raise":
                    raise DataError(str(rejected)) from err
                self.rejected.append(rejected)
        self.samples, self.rows, self.files = (
            [s for s, _, _ in kept],
            [r for _, r, _ in kept],
            [f for _, _, f in kept],
        )

    @property
    def places(self) -> dict[str, tuple[str, int]]:
        """Where each sample stands: its id -> (file, row or line)."""
        return {
            s.id: (file, row)
            for s, file, row in zip(self.samples, self.files, self.rows, strict=True)
        }

    def __iter__(self) -> Iterator[Sample]:
        return iter(self.samples)

    def __len__(self) -> int:
        return len(self.samples)


def check_frame(frame: Any) -> CoordFrame:
    """The CoordFrame called `frame`; raises ConfigError with a suggestion."""
    try:
        return CoordFrame(frame)
    except ValueError:
        names = [f.value for f in CoordFrame]
        raise ConfigError(
            f"unknown coordinate frame {frame!r}; expected one of {', '.join(names)}."
            f"{did_you_mean(str(frame), names)}"
        ) from None


def text_of(value: Any, name: str) -> str:
    """`value` when it is text with content; raises RowError."""
    if not isinstance(value, str) or not value.strip():
        raise RowError(
            f"text in '{name}'", repr(value)[:80], f"write the words of '{name}' as a string"
        )
    return value.strip()


def resolve_image(name: Any, root: Path) -> str:
    """Path of a picture, relative names below `root`; existence is checked when its size is read."""
    return path_below(name, root, "a picture", "image")


def path_below(name: Any, root: Path, what: str, key: str) -> str:
    """Path of `what` (a picture, a video, an audio file), which a row names under `key`, relative names below `root`; nothing is
    opened. Raises RowError."""
    if not isinstance(name, (str, os.PathLike)) or not os.fspath(name):
        raise RowError(f"a path to {what}", repr(name)[:80], f"give '{key}' as a string")
    if "://" in os.fspath(name):
        return os.fspath(name)  # as it is, so that its error says that addresses are not fetched
    return os.path.normpath(root / os.fspath(name))


def _four_numbers(values: Any) -> Box:
    if not isinstance(values, (list, tuple)) or not all(type(v) in (int, float) for v in values):
        raise RowError(
            "a box as four numbers [x1, y1, x2, y2]", repr(values)[:80], "write a list of numbers"
        )
    if len(values) != 4:
        raise RowError(
            "a box of 4 coordinates [x1, y1, x2, y2]",
            f"{len(values)}: {list(values)!r:.80}",
            "one box per row, corners as x1, y1, x2, y2",
        )
    x1, y1, x2, y2 = (float(v) if abs(v) < 1e9 else math.inf for v in values)
    if not all(map(math.isfinite, (x1, y1, x2, y2))):
        raise RowError(
            "finite box coordinates", repr(list(values))[:80], "remove or correct the row"
        )
    return x1, y1, x2, y2


def check_box(values: Any, frame: CoordFrame, orig_wh: tuple[int, int]) -> Box:
    """`values` as (x1, y1, x2, y2) in pixels of the original picture; up to 1 px outside is rounding and kept as it is.

    Raises RowError for a wrong count, x2 <= x1, y2 <= y1, values that contradict the declared frame, or a box outside
    the picture. The frame is never guessed; the message only says which other frame would fit.
    """
    box, (width, height) = _four_numbers(values), orig_wh
    if frame is CoordFrame.ABS_RESIZED:
        raise RowError(
            "data in frame abs_orig, rel1000 or rel1",
            "abs_resized",
            "the resize belongs to one model's processor: store pixels of the original picture",
        )
    x1, y1, x2, y2 = (float(v) for v in to_orig(box, frame, orig_wh, orig_wh))
    shown = f"{list(values)} in frame {frame.value} for a picture of {width} x {height}"
    if x2 <= x1 or y2 <= y1:
        raise RowError(
            "x1 < x2 and y1 < y2",
            shown,
            "is it [x, y, width, height]? write corners, x1, y1, x2, y2",
        )
    if frame is CoordFrame.ABS_ORIG and max(box) <= 1.0 and max(width, height) > 2:
        raise RowError(
            "pixels of the original picture",
            shown,
            "the values look like shares: declare frame rel1",
        )
    if min(x1, y1) < -1 or x2 > width + 1 or y2 > height + 1:
        if frame is CoordFrame.ABS_ORIG:
            thousandths = min(box) >= 0 and max(box) <= 1000
            fix = "declare frame rel1000 if these are thousandths" if thousandths else "correct it"
        else:
            fix = "declare frame abs_orig if these are pixels"
        raise GeometryError("a box inside the picture", shown, fix)
    return x1, y1, x2, y2


def check_answer_box(
    task: str,
    value: Any,
    frame: CoordFrame,
    sizes: Sequence[tuple[int, int]],
    params: Mapping[str, Any],
) -> list[float]:
    """The check of tasks whose answer is one box, in picture params.image_index (default the first)."""
    index = params.get("image_index", 0)
    if not isinstance(index, int) or not 0 <= index < len(sizes):
        raise RowError(
            f"image_index from 0 to {len(sizes) - 1}", repr(index)[:40], "count pictures from 0"
        )
    return list(check_box(value, frame, sizes[index]))


def _where_pictures_are(error: Exception) -> str:
    """For a picture that is not there: the key that says where the pictures are; '' for every other error."""
    if not isinstance(error, MediaError) or error.kind != "missing" or "://" in str(error.path):
        return ""
    if "reader.audio_root" in str(error):  # said already, of sounds
        return ""
    return (
        ", or say where the pictures are: data.train[].params.reader.image_root=FOLDER "
        "(data.eval[].params.reader.image_root for held-out data)"
    )


_orientation: ContextVar[Orientation] = ContextVar("orientation", default="displayed")


@contextmanager
def read_pictures_as(orientation: Any) -> Iterator[None]:
    """Inside, `collect` takes pictures as displayed, or as stored (reader.orientation). Raises ConfigError for another word."""
    if orientation not in get_args(Orientation):
        raise ConfigError(
            f"expected orientation 'displayed' or 'stored', found {orientation!r}."
            f"{did_you_mean(str(orientation), get_args(Orientation))}"
        )
    token = _orientation.set(orientation)
    try:
        yield
    finally:
        _orientation.reset(token)


def _exif_words(error: BaseException | None, facts: Mapping[str, ImageFacts]) -> str:
    """For coordinates or sizes that do not fit: what EXIF orientations of the row's pictures have to do with it, else ''."""
    while error is not None and not isinstance(error, GeometryError):
        error = error.__cause__
    turned = [(path, fact) for path, fact in facts.items() if fact.tag != 1]
    if error is None or not turned:
        return ""
    path, fact = turned[0]
    stored, shown = (f"{w} x {h}" for w, h in (fact.stored, fact.size("displayed")))
    now = _orientation.get()
    words = (
        f"; its EXIF orientation is {fact.tag}: {os.path.basename(path)} is stored as {stored} and displayed as {shown}, and "
        f"coordinates are taken in the {now} picture"
    )
    other = "stored" if now == "displayed" else "displayed"
    return (
        words
        + f" (if they count pixels of the {other} one: reader.orientation={other}, or data.image.orientation={other})"
    )


def _exif_note(facts: Mapping[str, ImageFacts]) -> Counter[str]:
    """How many pictures have an EXIF orientation other than upright."""
    count = sum(fact.tag != 1 for fact in facts.values())
    words = (
        f"pictures with an EXIF orientation, taken as {_orientation.get()} (data.image.orientation)"
    )
    return Counter({words: count} if count else {})


def _marked(sample: Sample, facts: Mapping[str, ImageFacts]) -> Sample:
    """The sample, with the orientation of its pictures where that makes a difference."""
    if _orientation.get() == "displayed" or all(
        facts[p].tag == 1 for p in sample.images if p in facts
    ):
        return sample
    return replace(sample, params={**sample.params, ORIENTATION_PARAM: _orientation.get()})


def collect(
    file: str | os.PathLike[str],
    rows: Iterable[tuple[int, Any]],
    convert: Callable[[int, Any, SizeOf], Iterable[Sample]],
    on_error: str = "raise",
) -> Readout:
    """Run `convert(row number, row, size_of)` over all rows and gather samples, or rejected rows with their reasons.

    A row may itself be an exception (a line that is no JSON): it is reported like one raised by `convert`. Sizes of
    pictures are read once per path, as displayed or as stored (`read_pictures_as`). Duplicate ids are errors of the second
    row. What rows say was adjusted in them (params.adjusted) is counted in `notes`.
    """
    if on_error not in ("raise", "record"):
        raise ConfigError(f"expected on_error 'raise' or 'record', found {on_error!r}.")
    facts: dict[str, ImageFacts] = {}
    of_row: dict[str, ImageFacts] = {}

    def size_of(path: str) -> tuple[int, int]:
        if path not in facts:
            facts[path] = image_facts(path)
        of_row[path] = facts[path]
        return facts[path].size(_orientation.get())

    first_row: dict[str, int] = {}
    readout, name = Readout(), os.fspath(file)
    for number, row in rows:
        of_row.clear()
        try:
            if isinstance(row, Exception):
                raise row
            samples = [_marked(sample, of_row) for sample in convert(number, row, size_of)]
            for sample in samples:
                if sample.id in first_row:
                    raise RowError(
                        "unique ids",
                        f"id {sample.id!r} again, first in row {first_row[sample.id]}",
                        "rename or remove one of the rows",
                    )
            first_row.update({sample.id: number for sample in samples})
            readout.samples += samples
            readout.notes.update(
                note for sample in samples for note in sample.params.get("adjusted", ())
            )
            readout.rows += [number] * len(samples)
            readout.files += [name] * len(samples)
        except SkipRow as skip:
            readout.skipped[skip.reason] += 1
        except (DataError, MediaError) as err:
            rejected = Rejected(
                name, number, f"{err}{_where_pictures_are(err)}{_exif_words(err, of_row)}"
            )
            if on_error == "raise":
                raise DataError(str(rejected)) from err
            readout.rejected.append(rejected)
    readout.notes += _exif_note(facts)
    return readout
