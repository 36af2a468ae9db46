"""Videos of data rows: where they are, and the facts every video row carries (width, height, duration of the shown part).

A video is a file or a folder of numbered frames. Files are probed only where a row does not tell the facts itself, and once
per path. What a reader had to change in a truth (a box cut to the picture) stands in the sample's params.adjusted;
`adjusted` counts it.

    python -c "from mmrl.tasks.readers.videos import clip_facts; print(clip_facts('a.mp4', {'video': {'start': 2, 'end': 6}}))"
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mmrl.coords import CoordFrame
from mmrl.errors import ConfigError, DataError, MediaError, did_you_mean
from mmrl.tasks.readers.common import Check, RowError, SkipRow, path_below
from mmrl.types import Sample
from mmrl.video.sampling import FrameSampling

__all__ = [
    "Clips",
    "ENDINGS",
    "SAMPLING",
    "adjusted",
    "check_sampling",
    "clip_facts",
    "find_video",
    "folder_seconds",
    "letter_of",
    "number_of",
    "resolve_video",
    "spans_of",
    "video_sample",
]

ENDINGS = (".mp4", ".mkv", ".webm", ".avi", ".MP4", ".mov")
"""Endings tried for sets that name a video by its id, in this order; a folder of frames has none."""
_FACTS = frozenset({"width", "height", "duration"})
_OF_THE_ROWS = ("start", "end", "timestamps")
SAMPLING = (
    "kind",
    "fps",
    "num_frames",
    "min_frames",
    "max_frames",
    "factor",
    "folder_fps",
    *_OF_THE_ROWS,
)
"""Keys of params.video."""
# bounds so wide that only a row itself can be at fault, not what data.video of a run adds
_ANY_RUN = FrameSampling("keyframes", num_frames=1, min_frames=1, max_frames=2**31)


def resolve_video(name: Any, root: Path) -> str:
    """Path of a video file or a folder of frames, relative names below `root`. Raises RowError, MediaError (missing)."""
    path = path_below(name, root, "a video", "video")
    if not os.path.exists(path):
        fix = (
            "download it first, addresses are not fetched"
            if "://" in path
            else ("check the path, or say where the videos are: params.reader.image_root=FOLDER")
        )
        raise MediaError(
            f"expected a video file or a folder of frames, found none at {path}; {fix}",
            kind="missing",
            path=path,
        )
    return path


def find_video(
    name: Any, root: Path, folders: Sequence[str] = ("",), endings: Sequence[str] = ENDINGS
) -> str:
    """Path of the video called `name`, with or without its ending, in one of `folders` below `root`.

    The first that exists wins: folders in their order, the name as it is (a file with an ending, or a folder of frames), then
    the name with each of `endings`. Raises RowError.
    """
    if not isinstance(name, str) or not name.strip():
        raise RowError("the name of a video", repr(name)[:80], "write it as a string")
    for folder in folders:
        for ending in ("", *endings):
            path = os.path.normpath(root / folder / f"{name}{ending}")
            if os.path.exists(path):
                return path
    where = ", ".join(str(root / folder) for folder in folders[:4])
    raise RowError(
        f"the video {name!r:.80} in {where}",
        "none there",
        "check the download, or say where the videos are: params.reader.video_root=FOLDER",
    )


def number_of(value: Any, name: str, least: float | None = 0.0) -> float:
    """`value` as a finite number of at least `least` (None: any). Raises RowError; true and false are no numbers."""
    if (
        isinstance(value, bool)
        or not isinstance(value, (int, float))
        or not math.isfinite(value)
        or (least is not None and value < least)
    ):
        raise RowError(
            f"'{name}' in seconds" + (f", at least {least:g}" if least is not None else ""),
            repr(value)[:40],
            "write a number",
        )
    return float(value)


def _probe(path: str) -> Any:
    """mmrl.video.decode.VideoInfo of a file or folder. Raises MediaError, MissingExtraError."""
    from mmrl.video.decode import probe

    return probe(path)


def check_sampling(params: Mapping[str, Any]) -> FrameSampling:
    """params.video with bounds of no run. Raises DataError for what no run can show, and for a clip's own sound."""
    given = params.get("video", {})
    if given == {}:  # most rows
        return _ANY_RUN
    if not isinstance(given, Mapping):
        raise RowError(
            "params.video as an object", repr(given)[:80], 'write {"start": 2.0, "end": 6.5}'
        )
    if given.get("use_audio_in_video"):
        from mmrl.video.processing import CLIP_SOUND

        raise DataError(CLIP_SOUND)
    try:
        return FrameSampling.from_mapping(given, _ANY_RUN)
    except ConfigError as err:
        raise DataError(str(err)) from err


def clip_facts(
    path: str, params: Mapping[str, Any], info_of: Callable[[str], Any] | None = None
) -> dict[str, Any]:
    """`params` with width, height (displayed pixels) and duration (seconds of the shown part).

    The shown part is params.video.start .. end of the file; a folder of frames lasts as long as params.video.folder_fps says.
    `info_of` (default mmrl.video.decode.probe) is asked only where one of the facts is missing. Raises DataError for a params.video
    that cannot be shown, MediaError for a file that cannot be read.
    """
    shown, facts = check_sampling(params), dict(params)
    start, end = shown.start or 0.0, shown.end
    if not set(facts) >= _FACTS:
        info = (info_of or _probe)(path)
        whole = folder_seconds(path, info, params.get("video", {}).get("folder_fps"))
        if start >= whole:
            raise RowError(
                f"params.video.start inside the video of {whole:g} s",
                f"{start:g}",
                "correct the row",
            )
        facts.setdefault("width", info.width)
        facts.setdefault("height", info.height)
        facts.setdefault("duration", (whole if end is None else min(end, whole)) - start)
    if number_of(facts["duration"], "params.duration") <= 0:
        raise RowError(
            "params.duration above 0 seconds", repr(facts["duration"]), "correct the row"
        )
    return facts


def folder_seconds(path: str, info: Any, folder_fps: Any = None) -> float:
    """Seconds of a whole video: its own for a file, frames / `folder_fps` for a folder of frames where that is given."""
    if folder_fps is None or not os.path.isdir(path):
        return float(info.duration_s)
    return float(info.frames / number_of(folder_fps, "params.video.folder_fps", 1e-3))


def _check_sampling(video: Any) -> dict[str, Any]:
    """reader.video as a dict. Raises ConfigError."""
    if video is None:
        return {}
    if not isinstance(video, Mapping):
        raise ConfigError(
            f"expected reader.video as a mapping of sampling settings, found {video!r}; for example "
            "{fps: 1, max_frames: 64}"
        )
    for key in video:
        if key not in SAMPLING:
            raise ConfigError(
                f"unknown setting {key!r} in reader.video; expected {', '.join(SAMPLING)}."
                f"{did_you_mean(str(key), SAMPLING)}"
            )
        if key in _OF_THE_ROWS:
            raise ConfigError(
                f"expected no {key!r} in reader.video, because the rows say what is shown; remove it"
            )
    FrameSampling.from_mapping(video, _ANY_RUN)
    return dict(video)


def _under(video: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """A reader's settings under a row's own, as params.video: without those that a row's take the place of (a rate of the reader
    where the row has a number of frames). Raises DataError."""
    if not video or not own:
        return {**video, **own}
    try:
        both = FrameSampling.from_mapping(own, FrameSampling.from_mapping(video, _ANY_RUN))
    except ConfigError as err:
        raise DataError(str(err)) from err
    # as `both` has it: fps only with kind fps, num_frames and the kind as they are now, bounds that do not contradict
    kept = {
        key: value if value == getattr(both, key) else getattr(both, key)
        for key, value in video.items()
        if key != "fps" or both.kind == "fps"
    }
    return {**{key: value for key, value in kept.items() if value is not None}, **own}


class Clips:
    """The videos of one data set: found below `root`, probed once each, with sampling settings for all of them.

    `video` are overrides of the frame sampling (fps, num_frames, max_frames ...) that go into every sample's params.video.
    Probing reads a whole file once, which takes long for many hours of video; with `probe` false, params hold what the rows
    tell, and a broken file is found when it is shown.
    """

    def __init__(
        self,
        root: str | Path,
        video: Mapping[str, Any] | None = None,
        probe: bool = True,
        info_of: Callable[[str], Any] | None = None,
    ) -> None:
        if not isinstance(probe, bool):
            raise ConfigError(f"expected reader.probe true or false, found {probe!r}")
        self.root, self.video, self.probe = Path(root), _check_sampling(video), probe
        self._info_of, self._infos = info_of or _probe, dict[str, Any]()

    def info(self, path: str) -> Any:
        """mmrl.video.decode.VideoInfo of a file or folder, read once. Raises MediaError."""
        if path not in self._infos:
            self._infos[path] = self._info_of(path)
        return self._infos[path]

    def find(
        self, name: Any, folders: Sequence[str] = ("",), endings: Sequence[str] = ENDINGS
    ) -> str:
        """Path of the video called `name`. Raises RowError."""
        return find_video(name, self.root, folders, endings)

    def facts(self, path: str, params: Mapping[str, Any], /, **sampling: Any) -> dict[str, Any]:
        """`params` with width, height, duration and, unless empty, video: the set's sampling under this row's own.

        Without probing the three facts are those of `params`. Raises DataError, MediaError.
        """
        merged = _under(self.video, sampling)
        known = {**params, **({"video": merged} if merged else {})}
        if self.probe or set(params) >= _FACTS:
            return clip_facts(path, known, self.info)
        check_sampling(known)
        return known

    def seconds(self, path: str, params: Mapping[str, Any]) -> float:
        """Seconds of the whole clip: params.duration, else asked of the file, also without probing. Raises MediaError."""
        return (
            params["duration"]
            if "duration" in params
            else folder_seconds(path, self.info(path), self.video.get("folder_fps"))
        )


def spans_of(
    value: Any, duration: float, name: str = "timestamps", skip: bool = False
) -> list[list[float]]:
    """[[start, end], ...] in seconds, as they are. A time behind `duration` or before 0 stays (NExT-GQA's test has starts at
    -0.1 s, 562 of the 3720 queries of Charades-STA's end behind their video), because the official programs compare with it.

    A span that ends before it starts, has no length or lies wholly outside is a RowError; with `skip` a SkipRow, for the few such
    queries of official training files (Charades-STA 7, ActivityNet 4; none in their test files). Anything else raises RowError.
    """
    if not isinstance(value, (list, tuple)) or not value:
        raise RowError(f"'{name}' as a list of [start, end]", repr(value)[:80], "add the spans")
    spans = []
    for pair in value:
        if not isinstance(pair, (list, tuple)) or len(pair) != 2:
            raise RowError(f"[start, end] in '{name}'", repr(pair)[:80], "write two numbers")
        start, end = (number_of(v, name, None) for v in pair)
        if skip and start >= end:
            raise SkipRow("query that ends before it starts, or at once")
        if skip and (start >= duration or end <= 0):
            raise SkipRow("query outside its video")
        if start >= end:
            raise RowError(
                f"a start before its end in '{name}'",
                f"{start:g} and {end:g}",
                "swap them or remove the row",
            )
        if start >= duration or end <= 0:
            raise RowError(
                f"a span inside the video of {duration:g} s",
                f"{start:g} to {end:g}",
                "is it the right video?",
            )
        spans.append([start, end])
    return spans


def letter_of(answer: Any, options: Sequence[str]) -> tuple[str, list[str]]:
    """(letter of the option whose text is `answer`, what was adjusted). Of equal options the first counts. Raises RowError.

    Compared is the text as it stands, so that an option that is itself a letter is no trap.
    """
    from mmrl.rewards.choice import LETTERS

    found = [i for i, option in enumerate(options) if option.strip() == str(answer).strip()]
    if not found or found[0] >= len(LETTERS):
        raise RowError(
            "an answer that is one of the options",
            f"{answer!r:.60} for {list(options)!r:.100}",
            "correct the answer or the options",
        )
    return LETTERS[found[0]], ["equal options, the first counts"] if len(found) > 1 else []


def adjusted(samples: Iterable[Sample]) -> Counter[str]:
    """How often readers had to change a truth, by what was done: Counter({'end cut to the duration': 12})."""
    return Counter(note for sample in samples for note in sample.params.get("adjusted", ()))


def video_sample(
    check: Check,
    task: str,
    *,
    name: str,
    source: str,
    question: str,
    truth: Any,
    video: str,
    params: Mapping[str, Any],
    notes: Sequence[str] = (),
    images: Sequence[str] = (),
    frame: CoordFrame = CoordFrame.ABS_ORIG,
) -> Sample:
    """One sample about one video; its truth as `check` gives it, with the clip's size. `params` come from Clips.facts."""
    full = {**params, **({"adjusted": list(notes)} if notes else {})}
    sizes = [(full["width"], full["height"])] if {"width", "height"} <= set(full) else []
    return Sample(
        id=name,
        task=task,
        source=source,
        question=question,
        images=tuple(images),
        videos=(video,),
        params=full,
        answer=check(task, truth, frame, sizes, full),
    )
