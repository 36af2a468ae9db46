"""Which frames of a clip are shown: by rate, by count, keyframes, or at given moments. Pure: no file is opened here.

Times are seconds from the first frame of the file. A moment shows the frame on screen at that moment, by presentation time,
never by index / fps. Kinds "fps" and "uniform" follow qwen-vl-utils (`smart_nframes`, `calculate_video_frame_range`,
`linspace(first, last, n).round()`): at a constant frame rate the indices are equal to its. They differ on purpose where
qwen-vl-utils raises or drifts: a clip of one frame gives one frame (the processor pads), a part shorter than two frames gives
one, and with a variable frame rate the number of frames comes from the seconds of the part and the n moments are spread over
time, not over indices.

The frame on screen at a moment may have begun before it. So the first frame of a part may begin before `start`: in a part
in which no frame begins, with kind "timestamps", and where times are rounded. Times relative to the part count it as shown from
the beginning of the part: max(0, timestamp - start).

    python -c "from mmrl.video.sampling import *; print(select_frames([k / 25 for k in range(100)], FrameSampling(fps=1)))"
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from mmrl.errors import ConfigError, MediaError, did_you_mean

__all__ = ["KINDS", "FrameSampling", "constant_fps", "is_variable", "sample_rate", "select_frames"]

KINDS = ("fps", "uniform", "keyframes", "timestamps", "all")
_EPS = 1e-6  # seconds: rounding of times written in decimals
_IMPLIES = {"num_frames": "uniform", "timestamps": "timestamps", "fps": "fps"}


def _number(name: str, value: Any, *, least: float, strictly: bool = False) -> float:
    """`value` as a float of at least (or above) `least`. Raises ConfigError."""
    good = (
        isinstance(value, (int, float, np.integer, np.floating))
        and not isinstance(value, bool)
        and math.isfinite(value)
    )
    if not good or value < least or (strictly and value == least):
        raise ConfigError(
            f"expected video.{name} as a number {'above' if strictly else 'of at least'} {least:g}, found "
            f"{str(value)[:60]!r}; correct it"
        )
    return float(value)


def _count(name: str, value: Any, *, least: int) -> int:
    """`value` as a whole number of at least `least`. Raises ConfigError."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least:
        raise ConfigError(
            f"expected video.{name} as a whole number of at least {least}, found {str(value)[:60]!r}; correct it"
        )
    return int(value)


@dataclass(frozen=True)
class FrameSampling:
    """How frames are chosen; every field is checked when it is made (ConfigError). Seconds count from the first frame.

    kind: "fps" (so many per second, bounded by min_frames and max_frames), "uniform" (num_frames, evenly; max_frames does not
    bound it), "keyframes" (those of the file, evenly thinned to num_frames or max_frames), "timestamps" (the frame on screen
    at each moment, repeats kept), "all" (every frame; more than max_frames raises). start, end: only this part is shown.
    factor: counts of "fps", "uniform" and "keyframes" are multiples of it when the part has enough frames. folder_fps: frames
    per second of a folder of numbered frames, which cannot tell itself; 2 is qwen-vl-utils' convention.
    """

    kind: str = "fps"
    fps: float = 2.0
    num_frames: int | None = None
    min_frames: int = 4
    max_frames: int = 768
    timestamps: tuple[float, ...] = ()
    start: float | None = None
    end: float | None = None
    factor: int = 2
    folder_fps: float = 2.0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigError(
                f"expected video.kind as one of {', '.join(KINDS)}, found {str(self.kind)[:40]!r}."
                f"{did_you_mean(str(self.kind), KINDS)}"
            )
        clean: dict[str, Any] = {
            "fps": _number("fps", self.fps, least=0, strictly=True),
            "factor": _count("factor", self.factor, least=1),
            "folder_fps": _number("folder_fps", self.folder_fps, least=0, strictly=True),
            "min_frames": _count("min_frames", self.min_frames, least=1),
            "max_frames": _count("max_frames", self.max_frames, least=1),
            "start": None if self.start is None else _number("start", self.start, least=0),
            "end": None if self.end is None else _number("end", self.end, least=0, strictly=True),
            "num_frames": None
            if self.num_frames is None
            else _count("num_frames", self.num_frames, least=1),
            "timestamps": self._moments(),
        }
        for name, value in clean.items():
            object.__setattr__(self, name, value)
        self._check_together()

    def _moments(self) -> tuple[float, ...]:
        given: Any = self.timestamps
        if isinstance(given, (str, bytes)) or not isinstance(given, (Sequence, np.ndarray)):
            raise ConfigError(
                f"expected video.timestamps as a list of seconds, found {str(given)[:60]!r}; write [0.5, 2.0]"
            )
        return tuple(_number("timestamps", value, least=0) for value in given)

    def _check_together(self) -> None:
        if self.start is not None and self.end is not None and self.start >= self.end:
            raise ConfigError(
                f"expected video.start before video.end, found {self.start:g} and {self.end:g}; swap them"
            )
        if self.min_frames > self.max_frames:
            raise ConfigError(
                f"expected video.min_frames of at most max_frames, found {self.min_frames} and {self.max_frames}"
            )
        if self.kind in ("fps", "uniform", "keyframes") and self.max_frames < self.factor:
            raise ConfigError(
                f"expected video.max_frames of at least factor {self.factor}, found {self.max_frames}"
            )
        if self.num_frames is not None and self.kind not in ("uniform", "keyframes"):
            raise ConfigError(
                f"video.num_frames belongs to kind uniform or keyframes, found it with kind {self.kind}; "
                "write kind: uniform or leave it out"
            )
        if self.num_frames is None and self.kind == "uniform":
            raise ConfigError(
                "expected video.num_frames with kind uniform, found none; write num_frames: 16"
            )
        if bool(self.timestamps) != (self.kind == "timestamps"):
            raise ConfigError(
                f"video.timestamps belongs to kind timestamps, which needs it: found kind {self.kind} with "
                f"{len(self.timestamps)} timestamps"
            )
        if any(b < a for a, b in itertools.pairwise(self.timestamps)):
            raise ConfigError("expected video.timestamps in ascending order; sort them")
        low, high = self.start or 0.0, math.inf if self.end is None else self.end
        outside = [t for t in self.timestamps if not low - _EPS <= t <= high + _EPS]
        if outside:
            raise ConfigError(
                f"expected video.timestamps between start and end ({low:g} to {high:g} s), found {outside[0]:g}; "
                "timestamps are seconds of the file, not of the shown part"
            )

    @classmethod
    def from_mapping(
        cls, mapping: Mapping[str, Any], base: FrameSampling | None = None
    ) -> FrameSampling:
        """`base` (default FrameSampling()) with the fields of `mapping`, as a row's params.video gives them.

        Without "kind" the field given implies it: num_frames -> uniform, timestamps -> timestamps, fps -> fps. A field of
        `base` that does not belong to the new kind is dropped, and a bound of `base` gives way to the other one in `mapping`.
        Raises ConfigError: unknown keys, contradictions, bad values.
        """
        if not isinstance(mapping, Mapping):
            raise ConfigError(
                f'expected params.video as a mapping such as {{"fps": 2}}, found {str(mapping)[:60]!r}'
            )
        base = cls() if base is None else base
        known = [field.name for field in dataclasses.fields(cls)]
        for key in mapping:
            if key not in known:
                raise ConfigError(
                    f"unknown key {str(key)[:40]!r} in params.video; known are {', '.join(known)}."
                    f"{did_you_mean(str(key), known)}"
                )
        given = {key: value for key, value in mapping.items() if value is not None}
        implied = [kind for key, kind in _IMPLIES.items() if key in given]
        if "kind" in given:
            kind = given["kind"]
        elif len(implied) > 1:
            raise ConfigError(
                f"params.video has {' and '.join(k for k in _IMPLIES if k in given)}, which contradict each other; "
                "keep one, or write kind"
            )
        else:
            kind = implied[0] if implied else base.kind
            if implied == ["uniform"] and base.kind == "keyframes":
                kind = "keyframes"  # num_frames thins the keyframes already asked for
        fields = {name: getattr(base, name) for name in known}
        if kind not in ("uniform", "keyframes"):
            fields["num_frames"] = None
        if kind != "timestamps":
            fields["timestamps"] = ()
        # the other bound is of a run, which knows nothing of this row
        for own, other, nearer in (
            ("max_frames", "min_frames", min),
            ("min_frames", "max_frames", max),
        ):
            if own in given and other not in given:
                fields[other] = nearer(fields[other], _count(own, given[own], least=1))
        cleared = {key: None for key in ("start", "end", "num_frames") if key in mapping}
        return cls(**{**fields, **cleared, **given, "kind": kind})

    def key(self) -> str:
        """A stable text with just the fields that decide which frames are chosen; equal texts mean equal choices."""
        fields: dict[str, Any] = {
            "start": self.start,
            "end": self.end,
            "folder_fps": self.folder_fps,
        }
        if self.kind in ("fps", "uniform", "keyframes"):
            fields["factor"] = self.factor
        if self.kind == "fps":
            fields |= {
                "fps": self.fps,
                "min_frames": self.min_frames,
                "max_frames": self.max_frames,
            }
        if self.kind in ("uniform", "keyframes"):
            fields["num_frames"] = self.num_frames
        if self.kind in ("keyframes", "all"):
            fields["max_frames"] = self.max_frames
        if self.kind == "timestamps":
            fields["timestamps"] = "/".join(repr(t) for t in self.timestamps)
        return f"{self.kind}:" + ",".join(
            f"{name}={fields[name]}" for name in sorted(fields) if fields[name] is not None
        )


def constant_fps(timestamps_s: Sequence[float] | np.ndarray) -> float:
    """Mean frames per second of ascending timestamps, as the nearest ratio with a denominator up to 1001 (30000/1001 stays
    exact, 29.999999 becomes 30). One frame alone counts as 1 per second."""
    times = np.asarray(timestamps_s, dtype=np.float64)
    if len(times) < 2 or times[-1] <= times[0]:
        return 1.0
    rate = (len(times) - 1) / float(times[-1] - times[0])
    simple = float(Fraction(rate).limit_denominator(1001))
    return simple if simple > 0 and abs(simple - rate) <= 1e-4 * rate else rate


def is_variable(timestamps_s: Sequence[float] | np.ndarray) -> bool:
    """Whether some frame is shown for a time that differs from the mean by more than a quarter of it and 2 ms (containers
    that store milliseconds round by one)."""
    gaps = np.diff(np.asarray(timestamps_s, dtype=np.float64))
    return bool(len(gaps)) and bool(np.abs(gaps - gaps.mean()).max() > 0.25 * gaps.mean() + 0.002)


def _shown_at(times: np.ndarray, moments: np.ndarray) -> np.ndarray:
    """Index of the frame on screen at each moment: the last one that begins at or before it."""
    return np.clip(np.searchsorted(times, moments + _EPS, side="right") - 1, 0, len(times) - 1)


def _part(
    times: np.ndarray, duration: float, fps: float | None, sampling: FrameSampling
) -> tuple[int, int]:
    """First and last index of the shown part. `fps` None: by presentation time."""
    start = sampling.start or 0.0
    if start >= duration:
        raise MediaError(
            f"expected a clip longer than video.start {start:g} s, found {duration:.6g} s; correct the row",
            kind="too_short",
        )
    end = duration if sampling.end is None else min(sampling.end, duration)
    last = len(times) - 1
    if fps is not None:  # qwen-vl-utils' arithmetic, to the bit
        first = 0 if sampling.start is None else math.ceil(min(start, len(times) / fps) * fps)
        final = (
            last
            if sampling.end is None
            else min(math.floor(min(end, len(times) / fps) * fps), last)
        )
    else:
        first = int(np.searchsorted(times, start - _EPS, side="left"))
        final = (
            last
            if sampling.end is None
            else int(np.searchsorted(times, end + _EPS, side="right")) - 1
        )
    if first > final:  # no frame begins inside: the one on screen at the start
        first = final = int(_shown_at(times, np.array([start]))[0])
    return first, final


def _whole(count: float, factor: int, total: int) -> int:
    """`count` rounded down to a multiple of `factor`, at least one factor, at most what `total` frames allow."""
    rounded = max(math.floor(count / factor), 1) * factor
    return rounded if rounded <= total else max(total // factor * factor, min(total, factor))


def _part_seconds(duration: float, sampling: FrameSampling) -> float:
    """Length of the shown part."""
    return (duration if sampling.end is None else min(sampling.end, duration)) - (
        sampling.start or 0.0
    )


def _frame_count(total: int, seconds: float, sampling: FrameSampling) -> int:
    """Frames to take of `total` that last `seconds`, for kinds "fps" and "uniform", as `smart_nframes` of qwen-vl-utils."""
    factor = sampling.factor
    if sampling.kind == "uniform":
        assert sampling.num_frames is not None
        return _whole(round(sampling.num_frames / factor) * factor, factor, total)
    least = math.ceil(sampling.min_frames / factor) * factor
    most = math.floor(min(sampling.max_frames, max(total, factor)) / factor) * factor
    return _whole(min(max(seconds * sampling.fps, least), most, total), factor, total)


def _linspace(first: int, last: int, count: int) -> np.ndarray:
    """torch.linspace(first, last, count).round(), in float32 as qwen-vl-utils has it."""
    import torch

    return torch.linspace(first, last, count).round().long().numpy()


def _spread(times: np.ndarray, first: int, last: int, count: int, variable: bool) -> np.ndarray:
    if not variable:
        return _linspace(first, last, count)
    return _shown_at(times, np.linspace(times[first], times[last], count))


def select_frames(
    timestamps_s: Sequence[float] | np.ndarray,
    sampling: FrameSampling,
    keyframes: Sequence[int] = (),
    *,
    fps: float | None = None,
    duration_s: float | None = None,
) -> tuple[int, ...]:
    """Indices of the frames to show, ascending (strictly, except moments and variable frame rates, where a frame that stays
    on screen may be shown twice).

    timestamps_s: when each frame of the file is first shown, ascending, first = 0. keyframes: their indices. fps: the file's
    mean rate and duration_s its length, where known better than from the timestamps.
    Raises MediaError: empty (no frames), too_short (start or a moment after the end), unsupported (no keyframe in the part),
    too_large (kind "all" beyond max_frames).
    """
    times = np.asarray(timestamps_s, dtype=np.float64)
    if times.ndim != 1 or not len(times):
        raise MediaError("expected a clip with frames, found none", kind="empty")
    rate = constant_fps(times) if fps is None else fps
    duration = float(times[-1]) + 1.0 / rate if duration_s is None else duration_s
    variable = is_variable(times)
    if sampling.kind == "timestamps":
        late = [t for t in sampling.timestamps if t > duration + _EPS]
        if late:
            raise MediaError(
                f"expected video.timestamps within the {duration:.6g} s of the clip, found {late[0]:g}; correct the "
                "row",
                kind="too_short",
            )
        return tuple(int(i) for i in _shown_at(times, np.asarray(sampling.timestamps)))
    first, last = _part(times, duration, None if variable else rate, sampling)
    total = last - first + 1
    if sampling.kind == "all":
        if total > sampling.max_frames:
            raise MediaError(
                f"video.kind all would show {total} frames, expected at most max_frames {sampling.max_frames}; raise "
                "it, or sample by fps",
                kind="too_large",
            )
        return tuple(range(first, last + 1))
    if sampling.kind == "keyframes":
        inside = [k for k in keyframes if first <= k <= last]
        if not inside:
            raise MediaError(
                f"found no keyframe between frames {first} and {last}; take kind fps or uniform, or a longer part",
                kind="unsupported",
            )
        count = _whole(
            min(len(inside), sampling.num_frames or len(inside), sampling.max_frames),
            sampling.factor,
            len(inside),
        )
        return tuple(inside[int(i)] for i in _linspace(0, len(inside) - 1, count))
    seconds = _part_seconds(duration, sampling) + _EPS if variable else total / rate
    count = _frame_count(total, seconds, sampling)
    return tuple(int(i) for i in _spread(times, first, last, count, variable))


def sample_rate(
    timestamps_s: Sequence[float] | np.ndarray,
    sampling: FrameSampling,
    indices: Sequence[int],
    fps: float | None = None,
    duration_s: float | None = None,
) -> float:
    """Shown frames per second of clip, from which processors derive the seconds per temporal patch.

    `indices` are those that `select_frames` chose with the same arguments. Kinds "fps" and "uniform" of a constant rate:
    qwen-vl-utils' sample_fps, shown frames / frames of the part * fps. Else one over the mean time between shown frames; where
    that is 0 (one frame, one frame repeated), shown frames / seconds of the part. Raises MediaError: empty, too_short.
    """
    times = np.asarray(timestamps_s, dtype=np.float64)
    if not len(times) or not len(indices):
        raise MediaError("expected a clip with frames, found none", kind="empty")
    rate = constant_fps(times) if fps is None else fps
    duration = float(times[-1]) + 1.0 / rate if duration_s is None else duration_s
    if sampling.kind in ("fps", "uniform") and not is_variable(times):
        first, last = _part(times, duration, rate, sampling)
        return len(indices) / (last - first + 1) * rate
    spread = float(times[indices[-1]] - times[indices[0]])
    return (
        (len(indices) - 1) / spread
        if spread > 0
        else len(indices) / max(_part_seconds(duration, sampling), _EPS)
    )
