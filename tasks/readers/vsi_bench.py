"""VSI-Bench: 5130 questions about indoor scans -> choice (options) and numeric (scored by mean relative accuracy).

    test.jsonl or test-00000-of-00001.parquet   id, dataset, scene_name, question_type, question, ground_truth, options
    arkitscenes/<scene>.mp4, scannet/..., scannetpp/...

Six types have options ("A. left"), four ask for a number. The official number is the mean over eight types, where
object_rel_direction_easy, _medium and _hard are averaged into one first: task mixed, suite metric benchmark/vsibench/macro.
The debiased and pruned lists are files of their own and give other numbers. Official runs allow 16 new tokens and read the
first word; here a reasoning model's <answer> is read.

    python -c "from mmrl.tasks.readers.vsi_bench import read_vsibench as r; print(len(r('VSI-Bench/test.jsonl')))"
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from mmrl.tasks.readers.answers import listed, options_in
from mmrl.tasks.readers.common import Check, Readout, RowError, SizeOf, collect, text_of
from mmrl.tasks.readers.problem_types import Routes, check_by_task
from mmrl.tasks.readers.tables import data_files, read_files, row_id, rows_of
from mmrl.tasks.readers.videos import Clips, video_sample
from mmrl.types import Sample

__all__ = ["TYPES", "read_vsibench"]

TYPES: Mapping[str, str] = {
    **dict.fromkeys(
        (
            "object_rel_direction_easy",
            "object_rel_direction_medium",
            "object_rel_direction_hard",
            "object_rel_distance",
            "route_planning",
            "obj_appearance_order",
        ),
        "choice",
    ),
    **dict.fromkeys(
        (
            "object_abs_distance",
            "object_counting",
            "object_size_estimation",
            "room_size_estimation",
        ),
        "numeric",
    ),
}
"""question_type -> task."""
_MRA = {"reward": {"accuracy": {"mode": "mra"}}}


def read_vsibench(
    path: str | Path,
    *,
    video_root: str | None = None,
    video: Mapping[str, Any] | None = None,
    probe: bool = True,
    task: str = "mixed",
    types: Mapping[str, str] | None = None,
    only_mine: bool = False,
    on_error: str = "raise",
    check: Check = check_by_task,
) -> Readout:
    """Read VSI-Bench: its JSON Lines or parquet file, or a folder of parquet files.

    Videos are <video_root>/<dataset>/<scene_name>.mp4 (default: the file's folder); `types` (by question_type) and `only_mine`:
    see mmrl.tasks.readers.problem_types. params: category (question_type). Raises ConfigError, DataError.
    """
    routes = Routes("vsibench", task, types, only_mine, table=TYPES)

    def read_one(file: Path) -> Readout:
        clips = Clips(video_root or file.parent, video, probe)

        def convert(number: int, row: dict[str, Any], size_of: SizeOf) -> Iterable[Sample]:
            kind = text_of(row.get("question_type"), "question_type")
            own = routes.task_of(kind)
            dataset, truth = text_of(row.get("dataset"), "dataset"), row.get("ground_truth")
            if truth is None or isinstance(truth, bool) or not isinstance(truth, (str, int, float)):
                raise RowError(
                    "'ground_truth' as a letter or a number", repr(truth)[:60], "correct the row"
                )
            options = options_in(listed(row.get("options")))
            if own == "choice" and not options:
                raise RowError(
                    f"'options' for a question of type {kind}",
                    repr(row.get("options"))[:60],
                    "add them",
                )
            clip = clips.find(row.get("scene_name"), (dataset, f"videos/{dataset}"))
            params = clips.facts(
                clip,
                {
                    "suite": "vsibench",
                    "category": kind,
                    **({"options": options} if options else {}),
                    **(_MRA if own == "numeric" else {}),
                },
            )
            yield video_sample(
                check,
                own,
                name=row_id(row.get("id"), f"{file.stem}-{number}"),
                source=f"VSI-Bench/{dataset}",
                question=text_of(row.get("question"), "question"),
                video=clip,
                params=params,
                truth=truth.strip() if isinstance(truth, str) else truth,
            )

        return collect(
            file,
            rows_of(file, ("scene_name", "question_type", "question", "ground_truth")),
            convert,
            on_error,
        )

    return read_files(data_files(Path(path), "*.parquet", "*.jsonl"), read_one, on_error)
