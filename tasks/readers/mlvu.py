"""MLVU: tasks on videos of 3 minutes to 2 hours -> choice. Dev and test are two benchmarks.

    dev    json/1_plotQA.json ... 7_topic_reasoning.json   [{"video", "duration", "question", "candidates", "answer" (a text),
           video/1_plotQA/<video>                            "question_type"}], 2174 questions of seven tasks, 4 options
           or the copy MLVU_dev (parquet): video_name, duration, question with its options, answer (letter), task_type
    test   test_question.json with its answers: the same keys and question_id, video/<video>; 502 questions of nine tasks, all
           with 6 options, 164 of the answers are E or F

M-Avg is the mean of the tasks' accuracies (7 on dev, 9 on test), not the accuracy over questions; numbers on dev and test are
not comparable. Scorers that know only A to D cannot score the test set. sub_scene and summary (8_, 9_) ask for texts that a
language model judges: their rows are left out and counted. The test file without answers is an error on every row.
Not verified: the name of the file that holds the test answers.

    python -c "from mmrl.tasks.readers.mlvu import read_mlvu as r; print(len(r('MLVU')))"
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from mmrl.tasks.readers.answers import options_in, split_options
from mmrl.tasks.readers.common import Check, Readout, RowError, SizeOf, SkipRow, collect, text_of
from mmrl.tasks.readers.problem_types import check_by_task, fixed_task
from mmrl.tasks.readers.tables import data_files, read_files, row_id, rows_of
from mmrl.tasks.readers.video_mme import release_root
from mmrl.tasks.readers.videos import Clips, letter_of, number_of, video_sample
from mmrl.types import Sample

__all__ = ["read_mlvu"]

_GENERATION = ("subPlot", "sub_scene", "summary", "8_sub_scene", "9_summary")
_TASKS = (
    "1_plotQA",
    "2_needle",
    "3_ego",
    "4_count",
    "5_order",
    "6_anomaly_reco",
    "7_topic_reasoning",
)


def _question(row: Mapping[str, Any]) -> tuple[str, list[str], str, list[str]]:
    """(question, options, letter of the right one or the answer as it stands, what was adjusted). Raises RowError."""
    question, answer = text_of(row.get("question"), "question"), row.get("answer")
    if answer in (None, ""):
        raise RowError(
            "'answer'",
            repr(answer),
            "the question-only test file has no answers: take the file with the truth",
        )
    if isinstance(answer, (int, float)) and not isinstance(answer, bool):
        answer = str(answer)
    candidates = row.get("candidates")
    if candidates is None:
        question, listed = split_options(_without_tail(question))
        if not listed:
            raise RowError(
                "'candidates', or lines '(A) ...' behind the question",
                f"keys {sorted(row)}",
                "add the options",
            )
        return question, options_in(listed), answer, []
    if not isinstance(candidates, list):
        raise RowError("'candidates' as a list of texts", repr(candidates)[:80], "correct the row")
    options = options_in([str(c) if type(c) in (int, float) else c for c in candidates])
    if answer in options or not isinstance(answer, str) or len(answer) != 1:
        letter, notes = letter_of(answer, options if answer in options else candidates)
        return question, options, letter, notes
    return question, options, answer, []


def _without_tail(question: str) -> str:
    """The question without the closing request some copies carry behind the options."""
    lines = question.rstrip().splitlines()
    while lines and lines[-1].strip().casefold().startswith(
        ("only give the best option", "best option", "answer with")
    ):
        lines.pop()
    return "\n".join(lines)


def read_mlvu(
    path: str | Path,
    *,
    video_root: str | None = None,
    split: str | None = None,
    video: Mapping[str, Any] | None = None,
    probe: bool = True,
    task: str = "choice",
    types: Mapping[str, str] | None = None,
    on_error: str = "raise",
    check: Check = check_by_task,
) -> Readout:
    """Read MLVU: the release's folder (json/ and video/), one JSON file, or the parquet copy of dev.

    `split` is a name for the rows ('dev' or 'test'), kept in params.split. Videos lie in <video_root>, or in its folder of the
    task (default: video/ of the release). params: category (question_type or task_type). Raises ConfigError, DataError.
    """
    own = fixed_task("mlvu", "choice", task, types)

    def read_one(file: Path) -> Readout:
        clips = Clips(video_root or release_root(file, "video"), video, probe)

        def convert(number: int, row: dict[str, Any], size_of: SizeOf) -> Iterable[Sample]:
            kind = text_of(row.get("question_type", row.get("task_type")), "question_type")
            if kind in _GENERATION or file.stem in _GENERATION:
                raise SkipRow(f"generation task {kind}")
            question, options, truth, notes = _question(row)
            seconds = row.get("duration")
            own_facts = (
                {"duration": number_of(seconds, "duration", 1e-6)}
                if isinstance(seconds, (int, float))
                else {}
            )
            folders = [
                f"{root}{name}"
                for name in (file.stem, kind)
                for root in ("video/", "", "MLVU/video/")
            ]
            clip = clips.find(
                row.get("video", row.get("video_name")),
                ("", "video", *folders, *(f"video/{t}" for t in _TASKS)),
            )
            params = clips.facts(
                clip,
                {
                    "options": options,
                    "suite": "mlvu",
                    "category": kind,
                    **own_facts,
                    **({"split": split} if split else {}),
                },
            )
            yield video_sample(
                check,
                own,
                name=row_id(row.get("question_id"), f"{file.stem}-{number}"),
                source="MLVU",
                question=question,
                truth=truth,
                video=clip,
                params=params,
                notes=notes,
            )

        return collect(file, rows_of(file, ("question", "answer")), convert, on_error)

    return read_files(
        data_files(Path(path), "json/*.json", "MLVU/json/*.json", "*.parquet", "*.json"),
        read_one,
        on_error,
    )
