"""MVBench: 20 files of 200 questions each -> choice. The answer is a text, its letter is the place among the candidates.

    json/action_sequence.json   [{"video": "ZS9XR.mp4", "question", "candidates": [...], "answer": "...", "start": 11.1, "end": 19}]
    video/star/Charades_v1_480/ZS9XR.mp4, video/tvqa/frames_fps3_hq/<clip>/00001.jpg ...

Where the videos of a task lie is the table `TASKS`, as the official loader has it. Only five tasks show a part of their video
(start and end); in releases with the parts already cut (Charades_segment, sta_video_segment, video_fps3_hq_segment) the whole
file is shown. TVQA clips are folders of 3 frames per second; some of their times lie outside the clip, then the end is cut
or, where nothing would be left, the whole clip is shown (params.adjusted). NTU RGB+D videos are not in the release.

The number is the mean over the 20 tasks (4000 questions). A copy without some tasks (EasyVideoR1's has 3586 rows, no TVQA
and no NTU) gives another mean: do not compare. An answer that names no option is wrong here; lmms-eval leaves empty answers out.

    python -c "from mmrl.tasks.readers.mvbench import read_mvbench as r; print(len(r('MVBench')))"
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from mmrl.errors import ConfigError, DataError, did_you_mean
from mmrl.tasks.readers.common import Check, Readout, RowError, SizeOf, collect, text_of
from mmrl.tasks.readers.problem_types import check_by_task, fixed_task
from mmrl.tasks.readers.tables import data_files, json_rows, read_files
from mmrl.tasks.readers.videos import Clips, folder_seconds, letter_of, number_of, video_sample
from mmrl.types import Sample

__all__ = ["TASKS", "read_mvbench"]


class Place(NamedTuple):
    """A folder of videos below the video root, and whether the rows' start and end say which part is shown."""

    folder: str
    bounded: bool = False


_STAR = (
    Place("star/Charades_v1_480", True),
    Place("data0613/star/Charades_v1_480", True),
    Place("star/Charades_segment"),
    Place("data0613/star/Charades_segment"),
)
_CLEVRER = (Place("clevrer/video_validation"), Place("data0613/clevrer/video_validation"))
_PERCEPTION = (Place("perception/videos"),)
TASKS: Mapping[str, tuple[Place, ...]] = {
    "action_sequence": _STAR,
    "action_prediction": _STAR,
    "object_interaction": _STAR,
    "action_antonym": (Place("ssv2_video"), Place("ssv2_video_mp4")),
    "fine_grained_action": (Place("Moments_in_Time_Raw/videos"),),
    "unexpected_action": (Place("FunQA_test/test"),),
    "object_existence": _CLEVRER,
    "moving_direction": _CLEVRER,
    "moving_count": _CLEVRER,
    "moving_attribute": _CLEVRER,
    "counterfactual_inference": _CLEVRER,
    "object_shuffle": _PERCEPTION,
    "action_count": _PERCEPTION,
    "state_change": _PERCEPTION,
    "character_order": _PERCEPTION,
    "action_localization": (Place("sta/sta_video", True), Place("sta/sta_video_segment")),
    "scene_transition": (Place("scene_qa/video"),),
    "fine_grained_pose": (Place("nturgbd"), Place("nturgbd_convert")),
    "egocentric_navigation": (Place("vlnqa"),),
    "episodic_reasoning": (Place("tvqa/frames_fps3_hq", True), Place("tvqa/video_fps3_hq_segment")),
}
"""Task (name of its JSON file) -> where its videos may lie; the first folder that has the video counts."""
FRAMES_PER_SECOND = 3.0
"""Rate of TVQA's folders of frames."""


def _place(clips: Clips, task: str, name: Any) -> tuple[str, bool]:
    """(path of the row's video, whether its start and end count). Raises RowError naming the first folder."""
    for place in TASKS[task]:
        try:
            return clips.find(name, (place.folder,)), place.bounded
        except RowError:
            continue
    return clips.find(name, (TASKS[task][0].folder,)), False


def _part(
    clips: Clips, path: str, row: Mapping[str, Any], bounded: bool
) -> tuple[dict[str, float], list[str]]:
    """(sampling of the row: start and end of the shown part, the rate of a folder; what was adjusted). Raises RowError."""
    rate = {"folder_fps": FRAMES_PER_SECOND} if Path(path).is_dir() else {}
    if not bounded or (row.get("start") is None and row.get("end") is None):
        return rate, []
    start, end = number_of(row.get("start"), "start"), number_of(row.get("end"), "end")
    if start >= end:
        raise RowError("start before end", f"{start:g} and {end:g}", "correct the row")
    seconds = folder_seconds(path, clips.info(path), rate.get("folder_fps"))
    if start >= seconds:
        return rate, ["part outside the clip, all of it is shown"]
    return {**rate, "start": start, "end": min(end, seconds)}, [
        "end cut to the duration"
    ] if end > seconds else []


def read_mvbench(
    path: str | Path,
    *,
    video_root: str | None = None,
    tasks: list[str] | None = None,
    video: Mapping[str, Any] | None = None,
    probe: bool = True,
    task: str = "choice",
    types: Mapping[str, str] | None = None,
    on_error: str = "raise",
    check: Check = check_by_task,
) -> Readout:
    """Read MVBench: the release's folder (json/ and video/), its json folder, or one task's file, which carries the task's name.

    `video_root` is the folder with star/, clevrer/ ... (default: video/ beside json/); `tasks` names those to read (default: all
    files). params.category is the task. Raises ConfigError, DataError.
    """
    own = fixed_task("mvbench", "choice", task, types)
    for name in tasks or ():
        if name not in TASKS:
            raise ConfigError(
                f"unknown MVBench task {name!r}; expected {', '.join(TASKS)}.{did_you_mean(str(name), TASKS)}"
            )
    where = Path(path)
    files = [
        f
        for f in data_files(where, "json/*.json", "*.json")
        if where.is_file() or not tasks or f.stem in tasks
    ]

    def read_one(file: Path) -> Readout:
        if file.stem not in TASKS:
            raise DataError(
                f"expected a file named after its task, for example action_sequence.json, found {file}."
                f"{did_you_mean(file.stem, TASKS)} Tasks: {', '.join(TASKS)}; rename it"
            )
        release = file.parent.parent if file.parent.name == "json" else file.parent
        clips = Clips(video_root or release / "video", video, probe)

        def convert(number: int, row: dict[str, Any], size_of: SizeOf) -> Iterable[Sample]:
            candidates = row.get("candidates")
            if not isinstance(candidates, list):
                raise RowError("'candidates' as a list of texts", repr(candidates)[:80], "add them")
            options = [
                text_of(str(c) if type(c) in (int, float) else c, "candidates") for c in candidates
            ]
            letter, notes = letter_of(row.get("answer"), options)
            clip, bounded = _place(clips, file.stem, row.get("video"))
            part, cut = _part(clips, clip, row, bounded)
            params = clips.facts(
                clip, {"options": options, "suite": "mvbench", "category": file.stem}, **part
            )
            yield video_sample(
                check,
                own,
                name=f"{file.stem}-{number}",
                source=f"MVBench/{file.stem}",
                question=text_of(row.get("question"), "question"),
                truth=letter,
                video=clip,
                params=params,
                notes=notes + cut,
            )

        return collect(file, json_rows(file), convert, on_error)

    if not files:
        raise DataError(
            f"expected the files of {', '.join(tasks or TASKS)} in {where}, found none; check the path"
        )
    return read_files(files, read_one, on_error)
