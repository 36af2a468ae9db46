"""GUI-R1 sets and UI-R1 rows.

GUI-R1 parquet: image, instruction, history, task_type, gt_action, gt_bbox, gt_input_text, group, ui_type. gt_bbox holds
shares 0..1 of the picture, [x, y] or [x1, y1, x2, y2] (GUI-R1 multiplies it by the picture's size); it counts only for
actions at a place. Asked for gui_grounding, clicks on a box are grounding rows, and other rows are errors, or left out
with `only_mine`.

UI-R1 JSON: img_filename, instruction, bbox in pixels [x1, y1, x2, y2] -> gui_grounding; rows with `gt_action` (and
gt_bbox in pixels, gt_input_text) -> gui_action.

    python -c "from mmrl.tasks.readers.gui_r1 import read_gui_r1 as r; print(len(r('train.parquet')))"
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from mmrl.tasks.readers.common import (
    Check,
    Readout,
    RowError,
    SizeOf,
    SkipRow,
    check_frame,
    collect,
    text_of,
)
from mmrl.tasks.readers.gui_steps import ACTIONS, POINTED, number_list, step_answer
from mmrl.tasks.readers.problem_types import Routes, check_by_task, fixed_task
from mmrl.tasks.readers.tables import (
    data_files,
    media_folder,
    picture,
    question_of,
    read_files,
    row_id,
    rows_of,
    size_params,
)
from mmrl.types import Sample

__all__ = ["read_gui_r1", "read_ui_r1"]

_NO_TEXT = "no input text"


def _action(row: Mapping[str, Any]) -> dict[str, Any]:
    """The step of a row with gt_action, gt_bbox, gt_input_text; its place in the file's frame."""
    name = text_of(row.get("gt_action"), "gt_action").lower()
    pointed = ACTIONS.get(name, name) in POINTED
    place = number_list(row.get("gt_bbox"), "gt_bbox", (2, 4)) if pointed else None
    words = row.get("gt_input_text")
    return step_answer(name, place=place, words=None if words == _NO_TEXT else words)


def _params(row: Mapping[str, Any], size: tuple[int, int], space: str | None) -> dict[str, Any]:
    params: dict[str, Any] = {**size_params([size]), **({"space": space} if space else {})}
    for key in ("history", "task_type", "group", "ui_type", "platform", "data_source"):
        if isinstance(row.get(key), (str, list)) and row[key] not in ("", "None", []):
            params[key] = row[key]
    return params


def _target(answer: Mapping[str, Any], only_mine: bool) -> list[float]:
    """The box of a click, for gui_grounding. Raises RowError, or SkipRow with `only_mine`."""
    if answer["action"] == "click" and "bbox" in answer:
        return list(answer["bbox"])
    if only_mine:
        raise SkipRow(f"action {answer['action']} without an element's box")
    raise RowError(
        "a click on an element's box",
        f"{dict(answer)!r:.80}",
        "use task gui_action, or set reader.only_mine=true to leave such rows out",
    )


def read_gui_r1(
    path: str | Path,
    *,
    image_root: str | None = None,
    media_dir: str | None = None,
    frame: str = "rel1",
    space: str | None = None,
    task: str = "gui_action",
    types: Mapping[str, str] | None = None,
    only_mine: bool = False,
    on_error: str = "raise",
    check: Check = check_by_task,
) -> Readout:
    """Read GUI-R1 parquet (or JSON) files. `frame` is that of gt_bbox: rel1 in the released sets; `space` (mobile, desktop,
    web) is the action space of the rows where it is not the task's own."""
    box_frame = check_frame(frame)
    own = task if task == "gui_grounding" else fixed_task("gui_r1", "gui_action", task, types)

    def read_one(file: Path) -> Readout:
        root, media = Path(image_root) if image_root else file.parent, media_folder(file, media_dir)

        def convert(number: int, row: dict[str, Any], size_of: SizeOf) -> Iterable[Sample]:
            answer: Any = _action(row)
            if own == "gui_grounding":
                answer = _target(answer, only_mine)
            image = picture(row.get("image"), root, media)
            size = size_of(image)
            params = _params(row, size, space)
            yield Sample(
                id=row_id(row.get("id"), f"{file.stem}-{number}"),
                task=own,
                source=str(row.get("group") or file.stem),
                question=question_of(row.get("instruction"), 1, "instruction", exact=False),
                answer=check(own, answer, box_frame, [size], params),
                images=(image,),
                params=params,
            )

        return collect(
            file, rows_of(file, ("image", "instruction", "gt_action", "gt_bbox")), convert, on_error
        )

    return read_files(data_files(Path(path), "*.parquet"), read_one, on_error)


def read_ui_r1(
    path: str | Path,
    *,
    image_root: str | None = None,
    frame: str = "abs_orig",
    space: str | None = None,
    task: str = "mixed",
    types: Mapping[str, str] | None = None,
    only_mine: bool = False,
    on_error: str = "raise",
    check: Check = check_by_task,
) -> Readout:
    """Read UI-R1 rows. `frame` is that of the boxes; types are grounding and action (see mmrl.tasks.readers.problem_types).
    Pictures are in `image_root`, by default images beside the file, else the file's folder."""
    file, box_frame, routes = (
        Path(path),
        check_frame(frame),
        Routes("ui_r1", task, types, only_mine),
    )
    beside = file.parent / "images"
    root = Path(image_root) if image_root else beside if beside.is_dir() else file.parent

    def convert(number: int, row: dict[str, Any], size_of: SizeOf) -> Iterable[Sample]:
        acts = row.get("gt_action") is not None
        own = routes.task_of("action" if acts else "grounding")
        answer = (
            _action({"gt_bbox": row.get("bbox"), **row})
            if acts
            else number_list(row.get("bbox"), "bbox", (4,))
        )
        image = picture(row.get("img_filename", row.get("image")), root, media_folder(file, None))
        size = size_of(image)
        params = _params(row, size, space)
        yield Sample(
            id=row_id(row.get("id"), f"{file.stem}-{number}"),
            task=own,
            source=str(row.get("source") or file.stem),
            question=question_of(row.get("instruction"), 1, "instruction", exact=False),
            answer=check(own, answer, box_frame, [size], params),
            images=(image,),
            params=params,
        )

    return collect(file, rows_of(file, ("instruction",)), convert, on_error)
