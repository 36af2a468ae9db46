"""LongVideoBench: questions about videos of up to an hour that refer to moments in them -> choice.

    lvb_val.json (1337 rows; lvb_test_wo_gt.json has no answers)
        id, video_path, question, candidates or option0 ... option4 ("N/A" pads), correct_choice (counted from 0), duration,
        duration_group (15, 60, 600, 3600), question_category, subtitle_path, starting_timestamp_for_subtitles
    videos/<video_path>   subtitles/<subtitle_path>

Subtitles between the frames are part of the official input. Here they stand before the question as text with seconds (`subtitles`,
on by default): the same words, another order, so numbers are near the official ones but not the same. A video is a part of a
longer one, its subtitles are not: their clock begins at starting_timestamp_for_subtitles, which is taken off, and lines outside
the part are left out. Rows whose subtitles cannot be read are errors; set subtitles to false for the setting without them.
Numbers are accuracy over all rows and by duration_group.

    python -c "from mmrl.tasks.readers.long_video_bench import read_longvideobench as r; \
      print(len(r('LongVideoBench/lvb_val.json')))"
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from mmrl.rewards.choice import LETTERS
from mmrl.tasks.readers.common import Check, Readout, RowError, SizeOf, collect, text_of
from mmrl.tasks.readers.problem_types import check_by_task, fixed_task
from mmrl.tasks.readers.subtitles import read_file, shown_lines, with_subtitles
from mmrl.tasks.readers.tables import data_files, read_files, row_id, rows_of
from mmrl.tasks.readers.video_mme import release_root, true_or_false
from mmrl.tasks.readers.videos import Clips, number_of, video_sample
from mmrl.types import Sample

__all__ = ["read_longvideobench"]

_PAD = "N/A"


def _options(row: Mapping[str, Any]) -> list[str]:
    """The row's options without pads. Raises RowError; a pad between options would move their letters."""
    found = row.get("candidates")
    if found is None:
        found = [row[key] for key in (f"option{i}" for i in range(5)) if row.get(key) is not None]
    if not isinstance(found, list) or not all(
        isinstance(option, str) and option.strip() for option in found
    ):
        raise RowError("'candidates' or option0 ... option4 as texts", repr(found)[:80], "add them")
    options = [option.strip() for option in found]
    while options and options[-1] == _PAD:
        options.pop()
    if _PAD in options:
        raise RowError(
            f"{_PAD!r} only behind the last option", repr(options)[:80], "correct the row"
        )
    return options


def _truth(row: Mapping[str, Any], count: int) -> str:
    """The letter of correct_choice, which counts from 0. Raises RowError."""
    choice = row.get("correct_choice")
    if choice is None or choice == -1:
        raise RowError(
            "'correct_choice'", repr(choice), "the test file has no answers: take lvb_val.json"
        )
    if type(choice) is not int or not 0 <= choice < min(count, len(LETTERS)):
        raise RowError(
            f"'correct_choice' from 0 to {count - 1}", repr(choice)[:40], "correct the row"
        )
    return LETTERS[choice]


def _inside(folder: Path, name: Any) -> Path:
    """The subtitle file called `name` in `folder`, and nowhere else: its text goes into the prompt. Raises RowError."""
    path = Path(text_of(name, "subtitle_path"))
    if path.is_absolute() or ".." in path.parts:
        raise RowError(
            "a subtitle_path inside the folder of subtitles", repr(name)[:80], "correct the row"
        )
    return folder / path


def read_longvideobench(
    path: str | Path,
    *,
    video_root: str | None = None,
    subtitle_root: str | None = None,
    subtitles: bool = True,
    video: Mapping[str, Any] | None = None,
    probe: bool = True,
    task: str = "choice",
    types: Mapping[str, str] | None = None,
    on_error: str = "raise",
    check: Check = check_by_task,
) -> Readout:
    """Read LongVideoBench: lvb_val.json, the parquet with the same rows, or a folder of parquet files.

    `video_root` and `subtitle_root` default to videos/ and subtitles/ of the release. params: category (question_category),
    duration_group (seconds, as text). Raises ConfigError, DataError.
    """
    own, texts = (
        fixed_task("longvideobench", "choice", task, types),
        true_or_false(subtitles, "subtitles"),
    )

    def read_one(file: Path) -> Readout:
        release = release_root(file, "videos", "subtitles")
        clips, said = (
            Clips(video_root or release, video, probe),
            Path(subtitle_root) if subtitle_root else release / "subtitles",
        )

        def convert(number: int, row: dict[str, Any], size_of: SizeOf) -> Iterable[Sample]:
            options = _options(row)
            letter, duration = (
                _truth(row, len(options)),
                number_of(row.get("duration"), "duration", 1e-6),
            )
            question = text_of(row.get("question"), "question")
            if texts:
                offset = number_of(
                    row.get("starting_timestamp_for_subtitles"), "starting_timestamp_for_subtitles"
                )
                lines = read_file(_inside(said, row.get("subtitle_path")))
                question = with_subtitles(question, shown_lines(lines, duration, offset))
            clip = clips.find(row.get("video_path"), ("", "videos"), ())
            params = clips.facts(
                clip,
                {
                    "options": options,
                    "suite": "longvideobench",
                    "duration": duration,
                    "category": text_of(
                        str(row.get("question_category") or "unknown"), "question_category"
                    ),
                    "duration_group": str(row.get("duration_group") or "unknown"),
                },
            )
            yield video_sample(
                check,
                own,
                name=row_id(row.get("id"), f"{file.stem}-{number}"),
                source="LongVideoBench",
                question=question,
                truth=letter,
                video=clip,
                params=params,
            )

        return collect(
            file, rows_of(file, ("video_path", "question", "correct_choice")), convert, on_error
        )

    patterns = ("lvb_val.json", "validation-*.parquet", "*/validation-*.parquet", "*.parquet")
    return read_files(data_files(Path(path), *patterns), read_one, on_error)
