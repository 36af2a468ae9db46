"""Video-R1 and EasyVideoR1 JSON: one row per question, each with its problem type.

    {"problem_id": 1, "problem": "Which animal?", "data_type": "image", "problem_type": "multiple choice",
     "options": ["A. dog", "B. cat"], "solution": "<answer>B</answer>", "path": "./a.png", "data_source": "x"}

Types and their tasks: multiple choice -> choice, numerical -> numeric, regression -> numeric scored by MRA, OCR -> ocr,
free-form and open-ended -> open_text, math, boolean, spatial grounding (a box in `frame`). Options lose their letters and
go to params.options; a list of options behind the question ("Options:" and lines "A. dog") is taken from there where
`options` is empty. Paths are relative to the data root. Rows with videos are errors, or left out with `images_only`.

    python -c "from tasks.readers.video_r1 import read_video_r1 as r; print(len(r('Video-R1-260k.json', images_only=True)))"
"""
from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from mmrl.types import Sample
from tasks.readers.answers import answer_in_tags, listed, options_in, parse_literal, read_answer, split_options
from tasks.readers.common import Check, Readout, RowError, SizeOf, check_frame, collect, resolve_image, text_of
from tasks.readers.problem_types import Routes, check_by_task, refuse_video, type_params
from tasks.readers.tables import json_rows, question_of, row_id, size_params

__all__ = ["read_video_r1"]

def _pictures(row: Mapping[str, Any], images_only: bool) -> list[Any]:
    """Picture names of a row; [] for a text question. Raises RowError or SkipRow for anything but pictures."""
    kind = row.get("data_type")
    if kind == "video" or (kind is None and row.get("videos")):
        refuse_video("a row with a video", images_only)
    if kind not in ("image", "text", "image-text", None):
        raise RowError("data_type image, text or video", repr(kind)[:60], "correct the row")
    names = listed(row.get("path") if row.get("path") not in (None, "", []) else row.get("image_path"))
    if kind == "image" and not names:
        raise RowError("'path' with the row's picture", repr(row.get("path"))[:60], "add it")
    return names


def _options(row: Mapping[str, Any], question: str) -> tuple[str, list[str]]:
    """(question without its options, options without letters) of a multiple-choice row."""
    text, behind = split_options(question)
    options = options_in(row.get("options"))
    if options and behind and options_in(behind) == options:
        return text, options  # listed twice: in the question and in `options`
    if options:
        return question, options
    if not behind:
        raise RowError("'options', or lines 'A. ...' behind the question", f"keys {sorted(row)}", "add the options")
    return text, options_in(behind)


def _truth(own: str, row: Mapping[str, Any]) -> Any:
    solution = row.get("solution")
    if solution is None:
        raise RowError("'solution' with <answer>...</answer>", f"keys {sorted(row)}", "add it")
    text = answer_in_tags(text_of(solution, "solution"), required=True)
    if own == "grounding":  # EasyVideoR1: {"boxes": [x1, y1, x2, y2]}
        try:
            value = parse_literal(text)
        except ValueError:
            value = None
        if isinstance(value, dict) and isinstance(value.get("boxes"), list):
            return read_answer(own, json.dumps(value["boxes"]))
    return read_answer(own, text)


def read_video_r1(path: str | Path, *, image_root: str | None = None, frame: str = "abs_orig", task: str = "mixed",
                  types: Mapping[str, str] | None = None, only_mine: bool = False, images_only: bool = False,
                  encoding: str = "utf-8", on_error: str = "raise", check: Check = check_by_task) -> Readout:
    """Read Video-R1 / EasyVideoR1 JSON (or JSON Lines). Paths are relative to `image_root` (default: the file's folder).

    `frame` is that of boxes; `types` and `only_mine`: see tasks.readers.problem_types; `images_only` leaves videos out.
    """
    file = Path(path)
    box_frame, root = check_frame(frame), Path(image_root) if image_root else file.parent
    routes = Routes("video_r1", task, types, only_mine)

    def convert(number: int, row: dict[str, Any], size_of: SizeOf) -> Iterable[Sample]:
        kind = row.get("problem_type")
        own = routes.task_of(kind)
        images = tuple(resolve_image(name, root) for name in _pictures(row, images_only))
        question = question_of(row.get("problem"), len(images), "problem", exact=False)
        sizes = [size_of(image) for image in images]
        params = {**size_params(sizes), **type_params(own, kind), "problem_type": kind}
        if own in ("choice", "spatial"):
            question, params["options"] = _options(row, question)
        yield Sample(
            id=row_id(row.get("problem_id"), f"{file.stem}-{number}"), task=own,
            source=str(row.get("data_source") or file.stem), question=question,
            answer=check(own, _truth(own, row), box_frame, sizes, params), images=images, params=params)

    return collect(file, json_rows(file, encoding), convert, on_error)
