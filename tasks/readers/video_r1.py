"""Video-R1 and EasyVideoR1 JSON: one row per question, each with its problem type.

    {"problem_id": 1, "problem": "Which animal?", "data_type": "image", "problem_type": "multiple choice",
     "options": ["A. dog", "B. cat"], "solution": "<answer>B</answer>", "path": "./a.png", "data_source": "x"}

Types and their tasks: multiple choice -> choice, numerical -> numeric, regression -> numeric scored by MRA, OCR -> ocr,
free-form and open-ended -> open_text, math, boolean, spatial grounding (a box in `frame`), temporal grounding
{"time": [s, e]}, spatial-temporal grounding {"time", "boxes"} and tracking {"boxes"} -> the tasks of these names, keys of
boxes are seconds. Options lose their letters and go to params.options; a list of options behind the question ("Options:" and
lines "A. dog") is taken from there where `options` is empty. Paths are relative to the data root; data_type says whether
`path` is a picture or a video, `image_path` is a picture beside a video; `videos` or `video`, `images` or `image` may stand for
them. `images_only` leaves rows with videos out.

EasyVideoR1's evaluation files are of this form. Its charades_sta.json has no readable truth (an error on every row), its
mvbench.json lacks tasks: numbers on these copies are not those of the benchmarks.

    python -c "from mmrl.tasks.readers.video_r1 import read_video_r1 as r; print(len(r('Video-R1-260k.json', probe=False)))"
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from mmrl.tasks.readers.answers import (
    answer_in_tags,
    listed,
    options_in,
    parse_literal,
    read_answer,
    split_options,
)
from mmrl.tasks.readers.common import (
    Check,
    Readout,
    RowError,
    SizeOf,
    check_frame,
    collect,
    resolve_image,
    text_of,
)
from mmrl.tasks.readers.problem_types import Routes, check_by_task, refuse_video, type_params
from mmrl.tasks.readers.tables import json_rows, row_id
from mmrl.tasks.readers.video_rows import (
    TIMED,
    Videos,
    ask,
    column_of,
    empty,
    leave_sounds,
    load_media,
    read_truth,
    videos_of,
)
from mmrl.tasks.readers.videos import Clips
from mmrl.types import Sample

__all__ = ["read_video_r1"]


_SHOWN = ("path", "image_path", "images", "image")


def _names(row: Mapping[str, Any], images_only: bool) -> tuple[Videos, list[Any]]:
    """(videos, names of pictures) of a row; none for a text question. Raises RowError, SkipRow."""
    notes = list[str]()
    kind, clips = row.get("data_type"), not empty(column_of(row, "videos", notes=[]))
    shown = kind in ("image", "video") or clips or not empty([row.get(key) for key in _SHOWN])
    leave_sounds(row, row.get("problem"), shown, images_only, notes)
    if kind == "video" or (kind is None and clips):
        if images_only:
            refuse_video("a row with a video", True)
        pictures = listed(column_of(row, "image_path", "images", notes=notes) or None)
        videos = videos_of(column_of(row, "path", "videos", notes=notes), row, notes=notes)
        if not videos.names:
            raise RowError("'path' with the row's video", repr(row.get("path"))[:60], "add it")
        return videos, pictures
    if kind not in ("image", "text", "image-text", None):
        raise RowError("data_type image, text or video", repr(kind)[:60], "correct the row")
    if clips:
        raise RowError(
            "data_type video, because the row names a video", repr(kind), "correct the row"
        )
    names = listed(column_of(row, "path", "image_path", "images", notes=notes) or None)
    if kind == "image" and not names:
        raise RowError("'path' with the row's picture", repr(row.get("path"))[:60], "add it")
    return Videos([], {}, tuple(notes)), names


def _options(row: Mapping[str, Any], question: str) -> tuple[str, list[str]]:
    """(question without its options, options without letters) of a multiple-choice row."""
    text, behind = split_options(question)
    options = options_in(row.get("options"))
    if options and behind and options_in(behind) == options:
        return text, options  # listed twice: in the question and in `options`
    if options:
        return question, options
    if not behind:
        raise RowError(
            "'options', or lines 'A. ...' behind the question",
            f"keys {sorted(row)}",
            "add the options",
        )
    return text, options_in(behind)


def _truth(own: str, row: Mapping[str, Any]) -> Any:
    solution = row.get("solution")
    if solution is None:
        raise RowError("'solution' with <answer>...</answer>", f"keys {sorted(row)}", "add it")
    try:
        text = answer_in_tags(text_of(solution, "solution"), required=True)
    except RowError:
        if own in TIMED and isinstance(solution, str) and solution.startswith("<think>"):
            raise RowError(
                "one answer, <answer>...</answer>",
                f"only thoughts in {solution[:80]!r}",
                "EasyVideoR1's charades_sta.json is broken like this: read the official charades_sta_test.txt",
            ) from None
        raise
    if own in TIMED:
        return read_truth(own, text)
    if own == "grounding":  # EasyVideoR1: {"boxes": [x1, y1, x2, y2]}
        try:
            value = parse_literal(text)
        except ValueError:
            value = None
        if isinstance(value, dict) and isinstance(value.get("boxes"), list):
            return read_answer(own, json.dumps(value["boxes"]))
    return read_answer(own, text)


def read_video_r1(
    path: str | Path,
    *,
    image_root: str | None = None,
    video_root: str | None = None,
    frame: str = "abs_orig",
    task: str = "mixed",
    types: Mapping[str, str] | None = None,
    only_mine: bool = False,
    images_only: bool = False,
    video: Mapping[str, Any] | None = None,
    probe: bool = True,
    encoding: str = "utf-8",
    on_error: str = "raise",
    check: Check = check_by_task,
) -> Readout:
    """Read Video-R1 / EasyVideoR1 JSON (or JSON Lines). Paths are relative to `image_root` (default: the file's folder), those of
    videos to `video_root` (default: `image_root`).

    `frame` is that of boxes; `types` and `only_mine`: see mmrl.tasks.readers.problem_types; `images_only` leaves videos out;
    `video` (frame sampling) and `probe`: see mmrl.tasks.readers.videos.Clips.
    """
    file = Path(path)
    box_frame, root = check_frame(frame), Path(image_root) if image_root else file.parent
    routes, clips = (
        Routes("video_r1", task, types, only_mine),
        Clips(video_root or root, video, probe),
    )

    def convert(number: int, row: dict[str, Any], size_of: SizeOf) -> Iterable[Sample]:
        kind = row.get("problem_type")
        own = routes.task_of(kind)
        videos, pictures = _names(row, images_only)
        media = load_media(videos, [resolve_image(name, root) for name in pictures], clips, size_of)
        question = ask(row.get("problem"), media, "problem", exact=False)
        params = {**media.params, **type_params(own, kind), "problem_type": kind}
        if own in ("choice", "spatial"):
            question, params["options"] = _options(row, question)
        yield Sample(
            id=row_id(row.get("problem_id"), f"{file.stem}-{number}"),
            task=own,
            source=str(row.get("data_source") or file.stem),
            question=question,
            answer=check(own, _truth(own, row), box_frame, media.sizes, params),
            images=media.images,
            videos=media.videos,
            params=params,
        )

    return collect(file, json_rows(file, encoding), convert, on_error)
