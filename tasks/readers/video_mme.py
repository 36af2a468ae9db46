"""Video-MME: 2700 four-way questions about 900 videos, 900 questions each of short, medium and long ones -> choice.

    videomme/test-00000-of-00001.parquet   video_id, duration (short, medium, long), domain, sub_category, url, videoID,
                                           question_id, task_type, question, options ("A. ..."), answer (letter)
    data/<videoID>.mp4                     subtitle/<videoID>.srt (not every video has one)

Options lose the "A. " they carry in the file, the prompt puts letters again. Numbers are accuracy over all questions and by
duration, with and without subtitles: two protocols that are never mixed. Official input with subtitles are the lines that
cover a sampled frame, here all lines stand in the question with their seconds, so numbers with `subtitles` are not the
official ones. A video without a file of subtitles says so in the prompt, as officially.

    python -c "from mmrl.tasks.readers.video_mme import read_videomme as r; print(len(r('Video-MME/videomme')))"
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from mmrl.errors import ConfigError
from mmrl.tasks.readers.answers import listed, options_in
from mmrl.tasks.readers.common import Check, Readout, RowError, SizeOf, collect, text_of
from mmrl.tasks.readers.problem_types import check_by_task, fixed_task
from mmrl.tasks.readers.subtitles import read_file, shown_lines, with_subtitles
from mmrl.tasks.readers.tables import data_files, read_files, row_id, rows_of
from mmrl.tasks.readers.videos import Clips, video_sample
from mmrl.types import Sample

__all__ = ["read_videomme"]

_DURATIONS = ("short", "medium", "long")


def true_or_false(value: Any, name: str) -> bool:
    """`value`, which must be true or false. Raises ConfigError."""
    if not isinstance(value, bool):
        raise ConfigError(f"expected reader.{name} true or false, found {value!r}")
    return value


def release_root(file: Path, *marks: str) -> Path:
    """The folder of a release: the nearest one above `file`, itself up to two levels up, that has one of `marks` in it."""
    return next(
        (
            folder
            for folder in list(file.parents)[:3]
            if any((folder / mark).is_dir() for mark in marks)
        ),
        file.parent,
    )


def read_videomme(
    path: str | Path,
    *,
    video_root: str | None = None,
    subtitle_root: str | None = None,
    subtitles: bool = False,
    video: Mapping[str, Any] | None = None,
    probe: bool = True,
    task: str = "choice",
    types: Mapping[str, str] | None = None,
    on_error: str = "raise",
    check: Check = check_by_task,
) -> Readout:
    """Read Video-MME: its parquet file, JSON of the same rows, or the folder with it.

    `video_root` holds the videos and `subtitle_root` the .srt files (defaults: data/ and subtitle/ of the release, which is the
    nearest folder above that has data/). params: category (task_type), duration_group, domain, sub_category.
    Raises ConfigError, DataError.
    """
    own, texts = (
        fixed_task("videomme", "choice", task, types),
        true_or_false(subtitles, "subtitles"),
    )

    def read_one(file: Path) -> Readout:
        release = release_root(file, "data", "subtitle")
        clips = Clips(video_root or release, video, probe)
        srt = Path(subtitle_root) if subtitle_root else release / "subtitle"

        def convert(number: int, row: dict[str, Any], size_of: SizeOf) -> Iterable[Sample]:
            name = text_of(row.get("videoID"), "videoID")
            group = row.get("duration")
            if group not in _DURATIONS:
                raise RowError(
                    "duration short, medium or long", repr(group)[:40], "correct the row"
                )
            clip = clips.find(name, ("", "data", "videos"))
            params = clips.facts(
                clip,
                {
                    "options": options_in(listed(row.get("options"))),
                    "suite": "videomme",
                    "category": text_of(row.get("task_type"), "task_type"),
                    "duration_group": group,
                    **{
                        k: row[k] for k in ("domain", "sub_category") if isinstance(row.get(k), str)
                    },
                },
            )
            question = text_of(row.get("question"), "question")
            if texts:
                lines = read_file(srt / f"{name}.srt") if (srt / f"{name}.srt").is_file() else []
                question = with_subtitles(question, shown_lines(lines, clips.seconds(clip, params)))
            yield video_sample(
                check,
                own,
                name=row_id(row.get("question_id"), f"{file.stem}-{number}"),
                source=f"Video-MME/{group}",
                question=question,
                truth=row.get("answer"),
                video=clip,
                params=params,
            )

        return collect(
            file, rows_of(file, ("videoID", "question", "options", "answer")), convert, on_error
        )

    return read_files(data_files(Path(path), "*.parquet", "videomme/*.parquet"), read_one, on_error)
