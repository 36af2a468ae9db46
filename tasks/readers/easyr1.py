"""EasyR1 / verl files: parquet (or JSON, JSON Lines) with `problem`, `answer` and `images`; EasyVideoR1 adds types.

`images` holds paths, {"bytes", "path"} structs or bytes; embedded pictures are written once to `media_dir`, named by
their content. `videos` holds paths, or {"video", "fps" ...} (mmrl.tasks.readers.video_rows); `image` and `video` stand for them
where they are absent. The number of <image> placeholders in `problem` must equal the number of pictures, that of <video> the number
of videos. Rows with `problem_type` go to the task of that type (mmrl.tasks.readers.problem_types); in rows without it the task
asked for says how `answer` is read: a box in the text for grounding, else the text itself, inside <answer> where there are such
tags.

    python -c "from mmrl.tasks.readers.easyr1 import read_easyr1 as r; print(len(r('train.parquet')))"
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from mmrl.errors import ConfigError
from mmrl.tasks.readers.answers import listed, options_in, split_options
from mmrl.tasks.readers.common import (
    MAP_COLUMNS,
    Check,
    Readout,
    RowError,
    SizeOf,
    check_frame,
    collect,
)
from mmrl.tasks.readers.problem_types import Routes, check_by_task, refuse_video, type_params
from mmrl.tasks.readers.tables import data_files, media_folder, picture, read_files, row_id, rows_of
from mmrl.tasks.readers.video_rows import (
    Media,
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

__all__ = ["read_easyr1"]

_BOX_TASKS = ("grounding", "gui_grounding", "detection")


def _question_and_params(
    row: Mapping[str, Any], task: str, question: str, media: Media
) -> tuple[str, dict[str, Any]]:
    """(question without the options listed behind it, params)."""
    params = {**media.params, **type_params(task, row.get("problem_type"))}
    if task in ("choice", "spatial"):
        question, behind = split_options(question)
        options = options_in(row.get("options")) or options_in(behind)
        params |= {"options": options} if options else {}
    if row.get("problem_type"):
        params["problem_type"] = row["problem_type"]
    return question, params


def read_easyr1(
    path: str | Path,
    *,
    image_root: str | None = None,
    media_dir: str | None = None,
    frame: str = "abs_orig",
    problem_key: str = "problem",
    answer_key: str = "answer",
    images_key: str = "images",
    videos_key: str = "videos",
    video_root: str | None = None,
    video: Mapping[str, Any] | None = None,
    probe: bool = True,
    task: str = "grounding",
    types: Mapping[str, str] | None = None,
    only_mine: bool = False,
    images_only: bool = False,
    on_error: str = "raise",
    check: Check = check_by_task,
) -> Readout:
    """Read EasyR1 data: a parquet, JSON or JSON Lines file, or a folder of parquet files.

    `frame` is the frame of the boxes in `answer`; `media_dir` receives embedded pictures (default '<file>.media' beside
    the file). Videos are relative to `video_root` (default: `image_root`, else the file's folder); `video` (frame sampling) and
    `probe`: see mmrl.tasks.readers.videos.Clips; `images_only` leaves rows with videos out. `types` and `only_mine`: see
    mmrl.tasks.readers.problem_types. Rows are numbered per file.
    """
    keys = (problem_key, answer_key, images_key, videos_key)
    if len(set(keys)) != 4:
        raise ConfigError(f"expected four different column names, found {', '.join(keys)}")
    box_frame, routes = check_frame(frame), Routes("easyr1", task, types, only_mine)

    def read_one(file: Path) -> Readout:
        root, folder = (
            Path(image_root) if image_root else file.parent,
            media_folder(file, media_dir),
        )
        clips = Clips(video_root or root, video, probe)

        def convert(number: int, row: dict[str, Any], size_of: SizeOf) -> Iterable[Sample]:
            own = routes.task_of(row.get("problem_type"))
            notes = list[str]()
            values = listed(column_of(row, images_key, notes=notes))
            clips_there = column_of(row, videos_key, notes=notes)
            shown_there = values or not empty(clips_there)
            leave_sounds(row, row.get(problem_key), shown_there, images_only, notes)
            videos = videos_of(clips_there, row, notes=notes)
            if images_only and (videos.names or row.get("data_type") == "video"):
                refuse_video("a row with a video", True)
            if row.get("data_type") == "video" and not videos.names:
                raise RowError(
                    f"a path in '{videos_key}', because data_type is video",
                    f"keys {sorted(row)}",
                    "add it, or set videos_key",
                )
            if own in _BOX_TASKS and not values and not videos.names:
                raise RowError(
                    f"at least one picture in '{images_key}'", "none", "add it, or set images_key"
                )
            # their numbers, before anything is opened
            shown = Media(tuple(videos.names), ("",) * len(values), [], {})
            question = ask(row.get(problem_key), shown, problem_key)
            answer = row.get(answer_key)
            if answer is None:
                raise RowError(
                    f"'{answer_key}' with the truth",
                    f"keys {sorted(row)}",
                    "add it or set answer_key",
                )
            media = load_media(
                videos, [picture(value, root, folder) for value in values], clips, size_of
            )
            question, params = _question_and_params(row, own, question, media)
            yield Sample(
                id=row_id(row.get("id", row.get("problem_id")), f"{file.stem}-{number}"),
                task=own,
                source=str(row.get("data_source") or file.stem),
                question=question,
                answer=check(own, read_truth(own, answer), box_frame, media.sizes, params),
                images=media.images,
                videos=media.videos,
                params=params,
            )

        return collect(
            file,
            rows_of(file, keys[:2], f"set problem_key or answer_key, or {MAP_COLUMNS}"),
            convert,
            on_error,
        )

    return read_files(data_files(Path(path), "*.parquet"), read_one, on_error)
