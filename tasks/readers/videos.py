"""Videos of data rows: where they are, and the facts every video row carries (width, height, duration of the shown part).

A video is a file or a folder of numbered frames. Files are probed only where a row does not tell the facts itself.

    python -c "from tasks.readers.videos import clip_facts; print(clip_facts('a.mp4', {'video': {'start': 2, 'end': 6}}))"
"""
from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mmrl.errors import MediaError
from tasks.readers.common import RowError

__all__ = ["clip_facts", "resolve_video"]


def resolve_video(name: Any, root: Path) -> str:
    """Path of a video file or a folder of frames, relative names below `root`. Raises RowError, MediaError (missing)."""
    if not isinstance(name, (str, os.PathLike)) or not os.fspath(name):
        raise RowError("a path to a video", repr(name)[:80], "give 'video' as a string")
    text = os.fspath(name)
    path = text if "://" in text else os.path.normpath(root / text)
    if not os.path.exists(path):
        mend = "download it first, addresses are not fetched" if "://" in text else (
            "check the path, or say where the videos are: params.reader.image_root=FOLDER")
        raise MediaError(f"expected a video file or a folder of frames, found none at {path}; {mend}", kind="missing", path=path)
    return path


def _seconds(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value < 0:
        raise RowError(f"'{name}' in seconds, at least 0", repr(value)[:40], "write a number")
    return float(value)


def clip_facts(path: str, params: Mapping[str, Any], info_of: Callable[[str], Any] | None = None) -> dict[str, Any]:
    """`params` with width, height (displayed pixels) and duration (seconds of the shown part).

    The shown part is params.video.start .. end of the file. `info_of` (default video.decode.probe) is asked only where one
    of the facts is missing. Raises RowError for a start that is not before the end, MediaError for a file that cannot be read.
    """
    sampling = params.get("video", {})
    if not isinstance(sampling, Mapping):
        raise RowError("params.video as an object", repr(sampling)[:60], "write {\"start\": 2.0, \"end\": 6.5}")
    facts = dict(params)
    start = _seconds(sampling["start"], "params.video.start") if sampling.get("start") is not None else 0.0
    end = _seconds(sampling["end"], "params.video.end") if sampling.get("end") is not None else None
    if end is not None and start >= end:
        raise RowError("params.video.start before params.video.end", f"{start:g} and {end:g}", "correct the row")
    if not {"width", "height", "duration"} <= set(facts):
        if info_of is None:
            from video.decode import probe as info_of
        info = info_of(path)
        if start >= info.duration_s:
            raise RowError(f"params.video.start inside the video of {info.duration_s:g} s", f"{start:g}", "correct the row")
        facts.setdefault("width", info.width)
        facts.setdefault("height", info.height)
        facts.setdefault("duration", (info.duration_s if end is None else min(end, info.duration_s)) - start)
    if _seconds(facts["duration"], "params.duration") <= 0:
        raise RowError("params.duration above 0 seconds", repr(facts["duration"]), "correct the row")
    return facts
