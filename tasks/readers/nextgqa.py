"""NExT-GQA: questions with five options and the times that show the answer -> grounded_qa.

    test.csv               video_id, frame_count, width, height, question, answer (a text), qid, type, a0 ... a4
    gsub_test.json         {video_id: {"duration": 34, "location": {qid: [[1.2, 5.8], ...]}, "fps": 29.97}}
    map_vid_vidorID.json   {video_id: "0001/3238737531"}, the path of its video in VidOR without ending; optional

The official test split has 5553 questions with spans (val: 3358). A question without spans is left out and counted.
Acc@GQA = right option and IoP >= 0.5, over all questions with spans; the official script skips questions without a prediction,
here they count as wrong. VideoChat-R1's accuracy and IoU of merged spans on its own JSON (`glue`) are not comparable. The sizes
of the csv are those of the release's videos; the video itself is only opened where they are missing.
Not verified against the official files: the spelling of map_vid_vidorID.json, which is not in the repository's public copy.

    python -c "from mmrl.tasks.readers.nextgqa import read_nextgqa as r; print(len(r('nextgqa', video_root='NExTVideo')))"
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from mmrl.errors import ConfigError, DataError, did_you_mean
from mmrl.tasks.readers.common import Check, Readout, RowError, SizeOf, SkipRow, collect, text_of
from mmrl.tasks.readers.problem_types import check_by_task, fixed_task
from mmrl.tasks.readers.tables import read_json
from mmrl.tasks.readers.temporal import csv_rows
from mmrl.tasks.readers.videos import Clips, letter_of, number_of, spans_of, video_sample
from mmrl.types import Sample

__all__ = ["read_nextgqa"]

_SPLITS = ("test", "val")
_OPTIONS = ("a0", "a1", "a2", "a3", "a4")


def _files(path: Path, split: str | None) -> tuple[Path, Path, Path]:
    """(csv, spans, map) of a folder, or beside a csv or gsub file. Raises ConfigError, DataError."""
    if split is not None and split not in _SPLITS:
        raise ConfigError(
            f"unknown split {split!r} of NExT-GQA; expected test or val (train has no spans)."
            f"{did_you_mean(str(split), _SPLITS)}"
        )
    folder = path if path.is_dir() else path.parent
    stem = "test" if path.is_dir() else path.stem.removeprefix("gsub_")
    name = split or stem
    table = folder / f"{name}.csv" if path.is_dir() or path.suffix == ".json" or split else path
    spans = folder / f"gsub_{name}.json"
    for needed in (table, spans):
        if not needed.is_file():
            raise DataError(
                f"expected {table.name} and {spans.name} in {folder}, found no {needed.name}; both are in "
                "datasets/nextgqa of the NExT-GQA repository"
            )
    return table, spans, folder / "map_vid_vidorID.json"


def _object(path: Path) -> dict[str, Any]:
    value = read_json(path)
    if not isinstance(value, dict):
        raise DataError(
            f"{path}: expected an object by video, found {type(value).__name__}; give the official file"
        )
    return value


def _whole(row: Mapping[str, Any], key: str) -> int:
    try:
        value = int(row.get(key) or "")
    except (TypeError, ValueError):
        value = 0
    if value < 1:
        raise RowError(f"'{key}' in pixels", repr(row.get(key))[:40], "correct the cell")
    return value


def read_nextgqa(
    path: str | Path,
    *,
    video_root: str | None = None,
    split: str | None = None,
    video: Mapping[str, Any] | None = None,
    probe: bool = True,
    task: str = "grounded_qa",
    types: Mapping[str, str] | None = None,
    on_error: str = "raise",
    check: Check = check_by_task,
) -> Readout:
    """Read NExT-GQA: the folder datasets/nextgqa, its test.csv or its gsub_test.json; `split` is test or val.

    Videos are <video_root>/<path of the map>.mp4 or <video_root>/<video_id>.mp4 (default: the file's folder, or videos/ or
    NExTVideo/ in it). Rows are numbered as the csv's lines, its header being line 1. Raises ConfigError, DataError.
    """
    table, spans_file, map_file = _files(Path(path), split)
    own = fixed_task("nextgqa", "grounded_qa", task, types)
    entries, places = _object(spans_file), _object(map_file) if map_file.is_file() else {}
    clips = Clips(video_root or table.parent, video, probe)

    def convert(number: int, row: dict[str, Any], size_of: SizeOf) -> Iterable[Sample]:
        vid, qid = text_of(row["video_id"], "video_id"), text_of(row["qid"], "qid")
        entry = entries.get(vid)
        if not isinstance(entry, dict) or not isinstance(entry.get("location"), dict):
            raise RowError(
                f"video {vid!r:.40} with 'duration' and 'location' in {spans_file.name}",
                repr(entry)[:60],
                "are both files of one split?",
            )
        if qid not in entry["location"]:
            raise SkipRow("question without spans")
        options = [text_of(row.get(key), key) for key in _OPTIONS]
        letter, notes = letter_of(row["answer"], options)
        duration = number_of(entry.get("duration"), "duration", 1e-6)
        spans = spans_of(entry["location"][qid], duration, "location")
        place = places.get(vid)
        names = [f"{place}"] if isinstance(place, str) and place else []
        clip = _clip(clips, [*names, vid])
        params = clips.facts(
            clip,
            {
                "options": options,
                "vid": vid,
                "qid": qid,
                "type": row.get("type"),
                "category": row.get("type"),
                "duration": duration,
                "width": _whole(row, "width"),
                "height": _whole(row, "height"),
            },
        )
        yield video_sample(
            check,
            own,
            name=f"{vid}-{qid}",
            source=f"NExT-GQA/{table.stem}",
            question=text_of(row["question"], "question"),
            truth={"choice": letter, "spans": spans},
            video=clip,
            params=params,
            notes=notes,
        )

    rows = csv_rows(table, ("video_id", "question", "answer", "qid", *_OPTIONS))
    return collect(table, enumerate(rows, 2), convert, on_error)


def _clip(clips: Clips, names: list[str]) -> str:
    """The video under the first of its names that exists. Raises RowError about the last."""
    for name in names[:-1]:
        try:
            return clips.find(name, ("", "videos", "NExTVideo"))
        except RowError:
            continue
    return clips.find(names[-1], ("", "videos", "NExTVideo"))
