"""Sets of sentences with their times in a video -> temporal grounding: Charades-STA, ActivityNet Captions, QVHighlights.

charades_sta   txt, one query per line: `3MSZA 24.3 30.4##person turn a light on.` The official test file has 3720 queries over
               1334 videos; 562 ends lie behind the video's end, by up to 1.5 s, and stay as they are (TALL, VTimeLLM and
               VideoChat-R1 compare with them, 2D-TAN clips them). Durations come from Charades_v1_{train,test}.csv (columns id
               and length) beside the file or in `durations`, else from the videos. EasyVideoR1's charades_sta.json has no readable
               truths: read this txt.
activitynet    {vid: {"duration": 82.7, "timestamps": [[s, e]], "sentences": [" He ..."]}}: ActivityNet Captions, VTimeLLM,
               VideoChat-R1 (also for Charades). What papers call ActivityNet's test split for grounding is val_2.json.
qvhighlights   JSON Lines: qid, query, duration, vid, relevant_windows (several spans), relevant_clip_ids, saliency_scores. The
               test file of the release has no windows (its truth is in the moment_detr repository): those rows are errors.

A query that ends before it starts, or lies outside its video, is left out and counted: 7 of Charades-STA's 12408 training
queries, 4 of ActivityNet's 37421, none of their test queries.

R1@m and mIoU count every row: a text that names no span is 0. Numbers on val, on re-encoded videos or on JSON variants with
other roundings are not comparable with those on the official test file.

    python -c "from mmrl.tasks.readers.temporal import read_charades_sta as r; print(len(r('charades_sta_test.txt')))"
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from mmrl.data.bounds import read_bounded
from mmrl.errors import DataError
from mmrl.tasks.readers.common import Check, Readout, RowError, SizeOf, collect, text_of
from mmrl.tasks.readers.problem_types import check_by_task, fixed_task
from mmrl.tasks.readers.tables import json_rows, read_json, row_id
from mmrl.tasks.readers.videos import Clips, number_of, spans_of, video_sample
from mmrl.types import Sample

__all__ = ["read_activitynet", "read_charades_sta", "read_qvhighlights"]

_TASK = "temporal_grounding"
_FOLDERS = ("", "videos", "Charades_v1_480", "Charades_v1")


def text_lines(path: Path) -> Iterator[tuple[int, Any]]:
    """(line number from 1, text) of a UTF-8 file; a line of other bytes is its RowError, blank lines are left out.

    Raises DataError when the file cannot be read.
    """
    try:
        lines = read_bounded(path).removeprefix(b"\xef\xbb\xbf").splitlines()
    except OSError as err:
        raise DataError(
            f"expected a data file, found none to read at {path} ({err.strerror}); check the path"
        ) from err
    for number, line in enumerate(lines, 1):
        try:
            if line.strip():
                yield number, line.decode("utf-8").strip()
        except UnicodeDecodeError as err:
            yield (
                number,
                RowError("UTF-8 text", f"{line[:40]!r} ({err.reason})", "convert the line"),
            )


def csv_rows(path: Path, needed: Iterable[str]) -> list[dict[str, str]]:
    """Rows of a CSV file with a header, quotes and line ends inside cells understood. Raises DataError."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as handle:
            reader = csv.DictReader(handle, strict=True)
            names = reader.fieldnames or []
            for key in needed:
                if key not in names:
                    raise DataError(
                        f"{path}: expected a column '{key}', found {', '.join(names)[:200] or 'an empty file'}; is it "
                        "another file?"
                    )
            return list(reader)
    except OSError as err:
        raise DataError(
            f"expected a data file, found none to read at {path} ({err.strerror}); check the path"
        ) from err
    except (UnicodeDecodeError, csv.Error) as err:
        raise DataError(
            f"{path}: expected a CSV file in UTF-8, found {err}; copy it again"
        ) from err


def _lengths(file: Path, durations: str | None) -> dict[str, float]:
    """{video: seconds} of Charades' csv; {} where there is none. Raises DataError."""
    names = (
        [Path(durations)]
        if durations
        else [file.with_name(f"Charades_v1_{part}.csv") for part in ("train", "test")]
    )
    found: dict[str, float] = {}
    for path in names:
        if not durations and not path.is_file():
            continue
        for number, row in enumerate(csv_rows(path, ("id", "length")), 2):
            try:
                found[row["id"]] = number_of(float(row["length"]), "length", 1e-6)
            except (TypeError, ValueError, RowError) as err:
                raise DataError(
                    f"{path}: row {number}: expected seconds in 'length', found {row['length']!r:.40}; "
                    "correct it"
                ) from err
    return found


def _charades_line(line: str) -> tuple[str, list[float], str]:
    """(video, [start, end], sentence) of `VIDEO START END##SENTENCE`; the sentence may hold ## itself. Raises RowError."""
    head, mark, sentence = line.partition("##")
    parts = head.split()
    if not mark or len(parts) != 3:
        raise RowError("VIDEO START END##SENTENCE", repr(line)[:80], "correct the line")
    try:
        times = [float(parts[1]), float(parts[2])]
    except ValueError:
        raise RowError("START and END as numbers", repr(head)[:60], "correct the line") from None
    return parts[0], times, text_of(sentence, "sentence")


def read_charades_sta(
    path: str | Path,
    *,
    video_root: str | None = None,
    durations: str | None = None,
    video: Mapping[str, Any] | None = None,
    probe: bool = True,
    task: str = _TASK,
    types: Mapping[str, str] | None = None,
    on_error: str = "raise",
    check: Check = check_by_task,
) -> Readout:
    """Read charades_sta_train.txt or charades_sta_test.txt.

    Videos are <video_root>/<vid>.mp4 (default: the file's folder, or videos/, Charades_v1_480/ or Charades_v1/ in it);
    `durations` is the csv with their lengths; `video`: frame sampling for all rows. Raises ConfigError, DataError.
    """
    file, own = Path(path), fixed_task("charades_sta", _TASK, task, types)
    clips = Clips(video_root or file.parent, video, probe)
    lengths = _lengths(file, durations)

    def convert(number: int, line: str, size_of: SizeOf) -> Iterable[Sample]:
        name, times, sentence = _charades_line(line)
        clip = clips.find(name, _FOLDERS)
        params = clips.facts(
            clip, {"vid": name, **({"duration": lengths[name]} if name in lengths else {})}
        )
        seconds = clips.seconds(clip, params)
        yield video_sample(
            check,
            own,
            name=f"{file.stem}-{number}",
            source="Charades-STA",
            question=sentence,
            video=clip,
            truth=spans_of([times], seconds, "START END", skip=True),
            params={**params, "duration": seconds},
        )

    return collect(file, text_lines(file), convert, on_error)


def _queries(file: Path) -> Iterator[tuple[int, Any]]:
    """(number of the query from 1, (video, number in it, entry)) of {vid: {duration, timestamps, sentences}}; a video whose
    lists do not fit is one RowError."""
    entries = read_json(file)
    if not isinstance(entries, dict):
        raise DataError(
            f"{file}: expected {{video: {{duration, timestamps, sentences}}}}, found {type(entries).__name__}; give "
            "the file with the captions"
        )
    number = 0
    for vid, entry in entries.items():
        times = entry.get("timestamps") if isinstance(entry, dict) else None
        words = entry.get("sentences") if isinstance(entry, dict) else None
        if not isinstance(times, list) or not isinstance(words, list) or len(times) != len(words):
            number += 1
            yield (
                number,
                RowError(
                    f"'timestamps' and 'sentences' of equal length for video {vid!r:.60}",
                    repr(entry)[:80],
                    "correct the entry",
                ),
            )
            continue
        for place, (pair, sentence) in enumerate(zip(times, words, strict=True)):
            number += 1
            yield number, (vid, place, entry.get("duration"), pair, sentence)


def read_activitynet(
    path: str | Path,
    *,
    video_root: str | None = None,
    video: Mapping[str, Any] | None = None,
    probe: bool = True,
    source: str = "ActivityNet",
    task: str = _TASK,
    types: Mapping[str, str] | None = None,
    on_error: str = "raise",
    check: Check = check_by_task,
) -> Readout:
    """Read {vid: {duration, timestamps, sentences}}: ActivityNet Captions, VTimeLLM, VideoChat-R1.

    Rows are the sentences, numbered from 1 over the file. Videos are <video_root>/<vid>.mp4, .mkv or .webm (default: the
    file's folder or videos/ in it); `source` names the set. Raises ConfigError, DataError.
    """
    file, own = Path(path), fixed_task("activitynet", _TASK, task, types)
    clips = Clips(video_root or file.parent, video, probe)

    def convert(
        number: int, row: tuple[str, int, Any, Any, Any], size_of: SizeOf
    ) -> Iterable[Sample]:
        vid, place, duration, pair, sentence = row
        question, seconds = text_of(sentence, "sentence"), number_of(duration, "duration", 1e-6)
        clip = clips.find(vid, _FOLDERS)
        yield video_sample(
            check,
            own,
            name=f"{vid}-{place}",
            source=source,
            question=question,
            video=clip,
            truth=spans_of([pair], seconds, skip=True),
            params=clips.facts(clip, {"vid": vid, "duration": seconds}),
        )

    return collect(file, _queries(file), convert, on_error)


def read_qvhighlights(
    path: str | Path,
    *,
    video_root: str | None = None,
    video: Mapping[str, Any] | None = None,
    probe: bool = True,
    task: str = _TASK,
    types: Mapping[str, str] | None = None,
    on_error: str = "raise",
    check: Check = check_by_task,
) -> Readout:
    """Read QVHighlights JSON Lines. params keep qid, vid, relevant_clip_ids (2 s clips) and saliency_scores for submissions and
    for highlight metrics; videos are <video_root>/<vid>.mp4 (default: the file's folder). Raises ConfigError, DataError."""
    file, own = Path(path), fixed_task("qvhighlights", _TASK, task, types)
    clips = Clips(video_root or file.parent, video, probe)

    def convert(number: int, row: dict[str, Any], size_of: SizeOf) -> Iterable[Sample]:
        if "relevant_windows" not in row:
            raise RowError(
                "'relevant_windows'",
                f"keys {sorted(row)}",
                "the released test file has no truth: take train or "
                "val, or the test file of the moment_detr repository",
            )
        seconds = number_of(row.get("duration"), "duration", 1e-6)
        spans = spans_of(row["relevant_windows"], seconds, "relevant_windows")
        clip = clips.find(row.get("vid"), _FOLDERS)
        own_params: dict[str, Any] = {
            k: row[k] for k in ("qid", "vid", "relevant_clip_ids", "saliency_scores") if k in row
        }
        yield video_sample(
            check,
            own,
            name=row_id(row.get("qid"), f"{file.stem}-{number}"),
            source="QVHighlights",
            question=text_of(row.get("query"), "query"),
            truth=spans,
            video=clip,
            params=clips.facts(clip, {**own_params, "duration": seconds}),
        )

    return collect(file, json_rows(file), convert, on_error)
