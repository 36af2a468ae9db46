"""Which frames of a clip stand for it, and their pixels: what the policy saw where that was logged, else spread evenly.

Frames that boxes belong to are preferred, so that a track can be seen. The video package is imported when a clip
is opened: a report without one does without.

    python -c "from mmrl.report.stills import choose; print(choose([k / 2 for k in range(40)], keys=[5, 5.5], limit=6))"
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from mmrl.report.load import logged_path, number

if TYPE_CHECKING:
    import numpy as np

__all__ = ["MAX_FRAMES", "Box", "ClipRef", "Stills", "boxes_at", "choose", "clip_of", "read_stills"]

MAX_FRAMES = 8
_MAX_SEEN = 4096  # logged times looked at
_EPS = 1e-6  # seconds
Box = tuple[float, ...]


@dataclass(frozen=True)
class ClipRef:
    """A logged sample's (first) clip. Seconds count from the beginning of the shown part, which is at `start` in the file.

    `seen` are the times of the frames the policy saw, () when they were not logged; `duration` None when unknown.
    """

    path: str
    start: float = 0.0
    duration: float | None = None
    seen: tuple[float, ...] = ()
    folder_fps: float = 2.0
    videos: int = 1
    images: int = 0


@dataclass(frozen=True, eq=False)
class Stills:
    """Decoded frames rgb_HWC (uint8, shrunk), their seconds, pixels (width, height) of a displayed frame, seconds of the shown
    part, and how far in seconds from a frame a moment may be to belong to it."""

    frames: tuple[np.ndarray, ...]
    seconds: tuple[float, ...]
    size: tuple[int, int]
    duration: float
    reach: float


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _texts(value: Any) -> list[str]:
    return [str(item) for item in value] if isinstance(value, (list, tuple)) else []


def clip_of(row: Mapping[str, Any]) -> ClipRef | None:
    """The clip of a logged row (of predictions.jsonl or rollouts/*.jsonl); None for a row without one."""
    sample = _mapping(row.get("sample"))
    videos = _texts(row.get("videos")) or _texts(sample.get("videos"))
    if not videos:
        return None
    params = _mapping(sample.get("params"))
    sampling, sizes = _mapping(params.get("video")), row.get("video_sizes")
    size = _mapping(sizes[0]) if isinstance(sizes, (list, tuple)) and sizes else {}
    stamps = size.get("timestamps_s")
    seen = [number(t) for t in stamps[:_MAX_SEEN]] if isinstance(stamps, (list, tuple)) else []
    durations = (number(d) for d in (size.get("duration_s"), params.get("duration")))
    return ClipRef(
        videos[0],
        max(0.0, number(sampling.get("start")) or 0.0),
        next((d for d in durations if d and d > 0), None),
        tuple(t for t in seen if t is not None),
        number(sampling.get("folder_fps")) or 2.0,
        len(videos),
        len(_texts(row.get("images")) or _texts(sample.get("images"))),
    )


def _even(items: Sequence[float], count: int) -> list[float]:
    """`count` of the items, evenly spread, with the first and the last."""
    if len(items) <= count or count < 2:
        return list(items[:count]) if count < len(items) else list(items)
    return [items[round(i * (len(items) - 1) / (count - 1))] for i in range(count)]


def _nearest(times: Sequence[float], moment: float) -> float:
    """The entry of ascending `times` nearest to `moment`; the earlier one of two equally near."""
    place = bisect_left(times, moment)
    return min(times[max(0, place - 1) : place + 1], key=lambda t: (abs(t - moment), t))


def _reach(times: Sequence[float], duration: float | None) -> float:
    """Half the usual distance between frames."""
    gaps = [b - a for a, b in pairwise(times)]
    return (median(gaps) if gaps else duration or 1.0) / 2 + _EPS


def choose(
    candidates: Iterable[float], keys: Sequence[float] = (), limit: int = MAX_FRAMES
) -> list[float]:
    """At most `limit` of the times, ascending: spread evenly, but up to limit - 2 of those nearest to `keys` first."""
    times = sorted(set(candidates))
    if len(times) <= limit:
        return times
    reach = _reach(times, None)
    near = sorted({found for key in keys if abs((found := _nearest(times, key)) - key) <= reach})
    if not near:
        return _even(times, limit)
    kept = set(_even(near, max(1, limit - 2)))
    while len(kept) < limit:  # the time farthest from what is there
        kept.add(
            max(
                (t for t in times if t not in kept),
                key=lambda t: (min(abs(t - k) for k in kept), -t),
            )
        )
    return sorted(kept)


def boxes_at(
    track: Mapping[float, Box], seconds: Sequence[float], reach: float
) -> list[Box | None]:
    """For each frame time the box that belongs to it: that of the nearest key within `reach` seconds."""
    keys, out = sorted(track), []
    for second in seconds:
        key = _nearest(keys, second) if keys else None
        out.append(track[key] if key is not None and abs(key - second) <= reach else None)
    return out


def read_stills(
    clip: ClipRef,
    folder: Path | None = None,
    *,
    keys: Sequence[float] = (),
    limit: int = MAX_FRAMES,
    long_side: int = 208,
) -> Stills:
    """Decode the frames that stand for `clip`, shrunk to `long_side`; a relative path is looked for in `folder` first.

    Raises MediaError or whatever the video package raises, ImportError without it.
    """
    from mmrl.video.decode import probe, read_clip
    from mmrl.video.sampling import FrameSampling

    path = logged_path(clip.path, folder)
    duration, seen = clip.duration, sorted(clip.seen)
    if not seen:
        length = probe(path, folder_fps=clip.folder_fps).duration_s - clip.start
        duration = max(min(duration or length, length), _EPS)
        seen = sorted(
            {duration * (i + 0.5) / limit for i in range(limit)}
            | {k for k in keys if 0 <= k < length}
        )
    seconds = choose(seen, keys, limit)

    def size(count: int, height: int, width: int) -> tuple[int, int]:
        scale = min(1.0, long_side / max(height, width))
        return max(1, round(height * scale)), max(1, round(width * scale))

    moments = tuple(max(0.0, clip.start + second) for second in seconds)
    found = read_clip(
        path,
        FrameSampling(kind="timestamps", timestamps=moments, folder_fps=clip.folder_fps),
        size=size,
    )
    length = duration or max(found.info.duration_s - clip.start, _EPS)
    return Stills(
        tuple(found.rgb_THWC),
        tuple(seconds),
        (found.info.width, found.info.height),
        length,
        _reach(seen, length),
    )
