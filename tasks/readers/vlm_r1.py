"""VLM-R1 files: rec_jsons_processed/*.json (image, problem, normal_caption, solution, normalized_solution) and training
JSON Lines (id, image, conversations).

`solution` is a box in pixels of the original picture, `normalized_solution` in 0..1000; the first is used when both are
present. Boxes in conversations stand in the text, in `frame` (default abs_orig). Perception-R1's JSON is the same, and
R1-V's rows (image, problem, solution). For other tasks than grounding the answer is the text itself, inside <answer>
where there are such tags. A row's `problem_type`, else its `accu_reward_method` (mcq, yes_no, odLength ...), names its
task; rows without either belong to the task asked for.

    python -c "from mmrl.tasks.readers.vlm_r1 import read_vlm_r1 as r; print(len(r('rec.json', image_root='coco')))"
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from mmrl.coords import CoordFrame
from mmrl.tasks.readers.answers import box_in_text, listed, options_in, split_options
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
from mmrl.tasks.readers.problem_types import Routes, check_by_task, type_params
from mmrl.tasks.readers.tables import json_rows, row_id
from mmrl.tasks.readers.video_rows import (
    ask,
    column_of,
    empty,
    leave_sounds,
    load_media,
    marked,
    read_truth,
    videos_of,
)
from mmrl.tasks.readers.videos import Clips
from mmrl.types import Sample

__all__ = ["box_in_text", "json_rows", "read_vlm_r1"]

_ASKING = re.compile(
    r"Please provide the bounding box coordinates? of the region this sentence describes:", re.I
)
_BOX_TASKS = ("grounding", "gui_grounding")


def _turns(conversations: Any) -> tuple[str, str]:
    """(question, answer) of a two-turn conversation."""
    if (
        not isinstance(conversations, list)
        or len(conversations) != 2
        or not all(isinstance(turn, dict) for turn in conversations)
    ):
        raise RowError(
            "a conversation of two turns",
            f"{conversations!r:.80}",
            "split it into one row per question",
        )
    human, model = conversations
    if human.get("from") not in ("human", "user") or model.get("from") not in ("gpt", "assistant"):
        raise RowError(
            "turns from 'human' and then 'gpt'",
            f"{human.get('from')!r}, {model.get('from')!r}",
            "reorder",
        )
    return text_of(human.get("value"), "value"), text_of(model.get("value"), "value")


def _kind(row: Mapping[str, Any]) -> Any:
    """The row's problem type; accu_reward_method 'default' and 'llm' say nothing about it."""
    method = row.get("accu_reward_method")
    return row.get("problem_type") or (None if method in (None, "", "default", "llm") else method)


def _question_and_answer(
    row: Mapping[str, Any], frame: CoordFrame, task: str
) -> tuple[str, Any, CoordFrame]:
    if "conversations" in row:
        text, answer = _turns(row["conversations"])
        return text, answer, frame
    if "solution" not in row and "normalized_solution" not in row:
        raise RowError(
            "'solution' or 'normalized_solution'", f"keys {sorted(row)}", "add the truth"
        )
    caption = row.get("normal_caption") if task in _BOX_TASKS else None
    text = text_of(caption or row.get("problem"), "problem")
    if "solution" in row:
        return text, row["solution"], frame
    return text, row["normalized_solution"], CoordFrame.REL1000


def read_vlm_r1(
    path: str | Path,
    *,
    image_root: str | None = None,
    video_root: str | None = None,
    frame: str = "abs_orig",
    task: str = "grounding",
    types: Mapping[str, str] | None = None,
    only_mine: bool = False,
    images_only: bool = False,
    video: Mapping[str, Any] | None = None,
    probe: bool = True,
    encoding: str = "utf-8",
    on_error: str = "raise",
    check: Check = check_by_task,
) -> Readout:
    """Read VLM-R1 JSON or JSON Lines. `frame` is that of `solution` and of boxes in text. Picture paths are relative to
    `image_root` (default: the file's folder), paths in `video` to `video_root` (default: `image_root`). A box belongs to the
    first picture. `encoding` is that of a .json file; `types`, `only_mine`: see mmrl.tasks.readers.problem_types; `images_only`
    leaves rows with a video out; `video` (frame sampling) and `probe`: see mmrl.tasks.readers.videos.Clips."""
    file = Path(path)
    text_frame, root = check_frame(frame), Path(image_root) if image_root else file.parent
    routes, clips = (
        Routes("vlm_r1", task, types, only_mine),
        Clips(video_root or root, video, probe),
    )

    def convert(number: int, row: dict[str, Any], size_of: SizeOf) -> Iterable[Sample]:
        own = routes.task_of(_kind(row))
        notes = list[str]()
        pictures = listed(column_of(row, "image", "images", notes=notes))
        images = [resolve_image(name, root) for name in pictures]
        named = column_of(row, "video", "videos", notes=notes)
        asked = (row.get("problem"), row.get("conversations"))
        leave_sounds(row, asked, images or not empty(named), images_only, notes)
        videos = videos_of(named, row, notes=notes)
        if not images and not videos.names and own in (*_BOX_TASKS, "detection"):
            raise RowError("at least one picture in 'image'", "none", "name the picture")
        text, value, box_frame = _question_and_answer(row, text_frame, own)
        text, videos = marked(text, videos, len(images))
        media = load_media(videos, images, clips, size_of, images_only)
        params = {**media.params, **type_params(own, row.get("problem_type"))}
        question = ask(
            _ASKING.sub("", text) if own in _BOX_TASKS else text, media, "the question", exact=False
        )
        if own in ("choice", "spatial"):
            question, behind = split_options(question)
            options = options_in(row.get("options") or behind)
            params |= {"options": options} if options else {}
        yield Sample(
            id=row_id(row.get("id"), f"{file.stem}-{number}"),
            task=own,
            source=str(row.get("dataset") or file.stem),
            question=question,
            answer=check(own, read_truth(own, value), box_frame, media.sizes, params),
            images=media.images,
            videos=media.videos,
            params=params,
        )

    return collect(file, json_rows(file, encoding), convert, on_error)
