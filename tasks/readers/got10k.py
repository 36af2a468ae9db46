"""GOT-10k sequences, and VideoChat-R1's questions on them -> tracking.

    got10k          val/list.txt, val/<sequence>/00000001.jpg ..., groundtruth.txt (x,y,w,h per frame), meta_info.ini,
                    absence.label (1: not there), cover.label (0..8, 0: not visible), cut_by_image.label
    videochat_got   got_val.json: [{"path": "GOT-10k/val/...", "object": "duck", "gt": [[x1, y1, x2, y2], ... 8]}], shares 0..1

got10k shows `frames` pictures of a sequence, evenly spaced, and asks for the box at each of their times; frames in which the
object is absent or wholly covered have no truth. Boxes are cut to the picture, which is what can be seen of them; the official
scorer bounds both sides in its own way (it moves the corner of a box that begins outside and keeps its width), so params.rects
keeps the annotation's own x, y, width, height of every such box for the metric. The first box is given (params.first_box) and
the official AO leaves the first frame out; AO is over all frames of a tracker that sees each one, so a number on `frames`
pictures is never GOT-10k's AO. The test split publishes first boxes only: its rows are errors.

videochat_got keeps that protocol as it is: 7 frames are shown (the first, five between, the last), 8 boxes are asked for and
counted (params.keys 'frames', "0" to "7"), the first is given, so 1/8 of the score is free: report it with and without frame 0.
Which moment each of the 8 boxes belongs to is not documented.

    python -c "from mmrl.tasks.readers.got10k import read_got10k as r; print(len(r('GOT-10k/val')))"
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from mmrl.coords import CoordFrame, to_orig
from mmrl.data.bounds import read_bounded
from mmrl.errors import ConfigError, DataError
from mmrl.tasks.readers.common import Check, Readout, RowError, SizeOf, check_box, collect, text_of
from mmrl.tasks.readers.problem_types import check_by_task, fixed_task
from mmrl.tasks.readers.tables import json_rows
from mmrl.tasks.readers.temporal import text_lines
from mmrl.tasks.readers.videos import Clips, video_sample
from mmrl.types import Sample

__all__ = ["read_got10k", "read_videochat_got", "seconds_key"]

_MAX_BYTES = 64 << 20  # of a sequence's small files
_RATE = 10.0  # frames per second of GOT-10k's annotation
_FPS = re.compile(r"[0-9]{1,4}(?:\.[0-9]{1,3})?")
_SHOWN, _BOXES = 7, 8  # of VideoChat-R1's protocol


def seconds_key(seconds: float) -> str:
    """Seconds as a key of a track: milliseconds, without closing zeros ('0', '2.5')."""
    return f"{seconds:.3f}".rstrip("0").rstrip(".")


def _spread(count: int, shown: int) -> list[int]:
    """`shown` indices from 0 to count - 1, evenly spaced and rounded down, each once."""
    if count <= shown:
        return list(range(count))
    return sorted({index * (count - 1) // (shown - 1) for index in range(shown)})


def _boxes(file: Path) -> list[tuple[float, float, float, float]]:
    """[x, y, width, height] per line of groundtruth.txt. Raises RowError."""
    boxes = []
    try:
        lines = read_bounded(file, _MAX_BYTES).decode("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as err:
        raise RowError(
            f"boxes in {file}", f"{type(err).__name__}: {err}"[:80], "copy the sequence again"
        ) from err
    for number, line in enumerate(lines, 1):
        parts = line.replace(",", " ").split()
        try:
            x, y, width, height = (float(part) for part in parts)
        except ValueError:
            raise RowError(
                "x,y,width,height",
                f"{line[:60]!r} in line {number} of {file.name}",
                "correct the line",
            ) from None
        boxes.append((x, y, width, height))
    return boxes


def _labels(file: Path, count: int) -> list[int] | None:
    """One whole number per frame, None where the file is not there. Raises RowError."""
    if not file.is_file():
        return None
    try:
        values = [int(word) for word in read_bounded(file, _MAX_BYTES).decode("utf-8").split()]
    except (OSError, ValueError) as err:
        raise RowError(
            f"whole numbers in {file}", str(err)[:80], "copy the sequence again"
        ) from err
    if len(values) != count:
        raise RowError(
            f"{count} numbers in {file}, one per frame", f"{len(values)}", "copy the sequence again"
        )
    return values


def _meta(folder: Path) -> tuple[str, float]:
    """(object class, frames per second) of meta_info.ini; 'object' and 10 where it does not tell."""
    path = folder / "meta_info.ini"
    lines = (
        read_bounded(path, _MAX_BYTES).decode("utf-8", "replace").splitlines()
        if path.is_file()
        else []
    )
    found = {
        key.strip(): value.strip()
        for key, _, value in (line.replace("=", ":", 1).partition(":") for line in lines)
    }
    rate = _FPS.match(found.get("anno_fps", ""))
    return found.get("object_class") or "object", float(rate.group()) if rate and float(
        rate.group()
    ) > 0 else _RATE


def _cut(box: tuple[float, float, float, float], size: tuple[int, int]) -> list[float] | None:
    """(x, y, width, height) as corners inside the picture; None when nothing is left."""
    x, y, width, height = box
    x1, y1, x2, y2 = (
        max(0.0, x),
        max(0.0, y),
        min(float(size[0]), x + width),
        min(float(size[1]), y + height),
    )
    return [x1, y1, x2, y2] if x1 < x2 and y1 < y2 else None


def _whole_box(box: tuple[float, float, float, float]) -> list[float]:
    x, y, width, height = box
    return [x, y, x + width, y + height]


def _list_file(path: Path, split: str | None) -> Path:
    """list.txt of a split's folder, of the release with `split`, or itself. Raises DataError."""
    if path.is_file():
        return path
    folders = [split] if split else ["", "val", "test", "train"]
    places = [path / folder / "list.txt" for folder in folders]
    found = next((place for place in places if place.is_file()), None)
    if found is None:
        raise DataError(
            f"expected {' or '.join(str(p.relative_to(path)) for p in places)} in {path}, found none; give the folder "
            "of a split"
        )
    return found


def read_got10k(
    path: str | Path,
    *,
    video_root: str | None = None,
    split: str | None = None,
    frames: int = 8,
    task: str = "tracking",
    types: Mapping[str, str] | None = None,
    on_error: str = "raise",
    check: Check = check_by_task,
) -> Readout:
    """Read GOT-10k: list.txt, the folder of a split, or the release's folder with `split` (train or val; default val).

    Sequences are folders in `video_root` (default: beside list.txt). `frames` pictures of each are shown, evenly spaced, at the
    rate of meta_info.ini (10 per second); truth keys are their seconds. Raises ConfigError, DataError.
    """
    if type(frames) is not int or not 2 <= frames <= 768:
        raise ConfigError(
            f"expected reader.frames as a whole number from 2 to 768, found {frames!r}"
        )
    own, file = fixed_task("got10k", "tracking", task, types), _list_file(Path(path), split)
    clips = Clips(video_root or file.parent)

    def convert(number: int, name: str, size_of: SizeOf) -> Iterable[Sample]:
        clip = clips.find(name, ("",), ())
        folder, info = Path(clip), clips.info(clip)
        boxes, (label, rate) = _boxes(folder / "groundtruth.txt"), _meta(folder)
        if len(boxes) == 1 and info.frames > 1:
            raise RowError(
                f"{info.frames} boxes in groundtruth.txt, one per frame",
                "the first one only",
                "the test split's boxes are not published: take val",
            )
        if len(boxes) != info.frames:
            raise RowError(
                f"{info.frames} boxes in groundtruth.txt, one per frame",
                f"{len(boxes)}",
                "copy the sequence again",
            )
        absent, cover = (
            _labels(folder / f"{kind}.label", len(boxes)) for kind in ("absence", "cover")
        )
        shown, size = _spread(len(boxes), frames), (info.width, info.height)
        corners = {
            i: _cut(boxes[i], size)
            for i in shown
            if not (absent and absent[i]) and not (cover and cover[i] == 0)
        }
        track = {seconds_key(i / rate): box for i, box in corners.items() if box}
        first = corners.get(0)
        if first is None or len(track) < 2:
            raise RowError(
                "a visible object in the first frame and in one more",
                f"{len(track)} boxes in {len(shown)} frames",
                "show more frames with reader.frames, or leave the sequence out",
            )
        params = clips.facts(
            clip,
            {"first_box": first, "object": label, "frames_in_file": len(boxes), "suite": "got10k"},
            kind="timestamps",
            timestamps=[i / rate for i in shown],
            folder_fps=rate,
        )
        rects = {
            seconds_key(i / rate): list(boxes[i])
            for i, box in corners.items()
            if box and box != _whole_box(boxes[i])
        }
        yield video_sample(
            check,
            own,
            name=name,
            source="GOT-10k",
            question=f"the {label}",
            truth={"boxes": track},
            video=clip,
            params={**params, **({"rects": rects} if rects else {})},
            notes=["box cut to the picture"] if rects else [],
        )

    return collect(file, text_lines(file), convert, on_error)


def read_videochat_got(
    path: str | Path,
    *,
    video_root: str | None = None,
    task: str = "tracking",
    types: Mapping[str, str] | None = None,
    on_error: str = "raise",
    check: Check = check_by_task,
) -> Readout:
    """Read VideoChat-R1's got_train.json or got_val.json: path, object, gt (8 boxes as shares 0..1).

    Sequences are folders of frames, relative to `video_root` (default: the file's folder). Raises ConfigError, DataError.
    """
    file, own = Path(path), fixed_task("videochat_got", "tracking", task, types)
    clips = Clips(video_root or file.parent)

    def convert(number: int, row: dict[str, Any], size_of: SizeOf) -> Iterable[Sample]:
        boxes, label = row.get("gt"), text_of(row.get("object"), "object")
        if not isinstance(boxes, list) or len(boxes) != _BOXES:
            found = f"{len(boxes)}" if isinstance(boxes, list) else repr(boxes)[:60]
            raise RowError(f"'gt' as {_BOXES} boxes", found, "correct the row")
        clip = clips.find(row.get("path"), ("",), ())
        info = clips.info(clip)
        size = (info.width, info.height)
        for box in boxes:
            check_box(box, CoordFrame.REL1, size)
        step = (info.frames - 1) / (_SHOWN - 1)
        shown = [int(i * step) for i in range(_SHOWN - 1)] + [info.frames - 1]
        params = clips.facts(
            clip,
            {
                "keys": "frames",
                "object": label,
                "suite": "videochat_got",
                "first_box": [
                    float(v) for v in to_orig(tuple(boxes[0]), CoordFrame.REL1, size, size)
                ],
            },
            kind="timestamps",
            timestamps=[i / _RATE for i in shown],
            folder_fps=_RATE,
        )
        yield video_sample(
            check,
            own,
            name=f"{file.stem}-{number}",
            source="VideoChat-R1/GOT",
            question=f"the {label}",
            truth={"boxes": {str(i): list(box) for i, box in enumerate(boxes)}},
            video=clip,
            params=params,
            frame=CoordFrame.REL1,
        )

    return collect(file, json_rows(file), convert, on_error)
