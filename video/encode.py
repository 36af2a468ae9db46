"""Writing videos: RGB frames in memory -> a small H.264 file, the same bytes for the same frames.

One encoder thread, a fixed quantiser and no dates or program names in the header: bytes depend on the frames, the settings
and the version of the encoder only. With `keyframe_every=1` every frame is coded alone, so that equal frames stay equal after
decoding wherever they stand in the clip: nothing about the order of frames hides in the coding noise.

    python -c "import numpy as np; from mmrl.video.encode import write_video; \
      write_video('a.mp4', np.zeros((8, 64, 64, 3), 'uint8'), 4)"
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mmrl.errors import ConfigError, MissingExtraError, did_you_mean, install_command

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["CODECS", "write_video"]

# T frames, H height, W width, C = 3 channels

CODECS = {"h264": "libx264", "hevc": "libx265", "mpeg4": "mpeg4"}
"""Name of a codec -> its encoder in FFmpeg."""
CONTAINERS = {".mp4": "mp4", ".mov": "mov", ".mkv": "matroska"}
_TICKS = 60_000  # per second, for frames at explicit times; MPEG-4 part 2 allows no more than 65535


def _require_av() -> Any:
    try:
        import av
    except ImportError as err:
        raise MissingExtraError(
            f"writing videos needs PyAV; install it with: {install_command('video')}"
        ) from err
    return av


def _checked_frames(rgb_THWC: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    frames = np.asarray(rgb_THWC)
    if frames.dtype != np.uint8 or frames.ndim != 4 or frames.shape[3] != 3 or 0 in frames.shape:
        raise ConfigError(
            f"expected frames as a uint8 array of shape (T, H, W, 3) with T >= 1, found {frames.dtype} "
            f"{frames.shape}; stack RGB pictures of one size"
        )
    if frames.shape[1] % 2 or frames.shape[2] % 2:
        raise ConfigError(
            f"expected an even height and width (colour is stored at half size), found {frames.shape[1]} x "
            f"{frames.shape[2]}; crop or pad one row or column"
        )
    return frames


def _clock(
    count: int, fps: float | Fraction | None, times: Sequence[float] | None, duration: float | None
) -> tuple[Fraction, list[int], int, Fraction]:
    """(seconds per tick, tick of every frame, ticks of the last frame, nominal frame rate)."""
    if (fps is None) == (times is None):
        raise ConfigError(
            "expected either fps or times of the frames, found "
            + ("both" if times is not None else "neither")
            + "; give exactly one"
        )
    if times is None:
        if (
            not isinstance(fps, (int, float, Fraction))
            or isinstance(fps, bool)
            or not 0 < fps <= 1000
        ):
            raise ConfigError(
                f"expected fps above 0 and at most 1000, found {fps!r}; for example fps=4"
            )
        if duration is not None:
            raise ConfigError(
                "expected no duration together with fps, found one; it is frames / fps"
            )
        rate = Fraction(fps).limit_denominator(1001)
        if not rate:
            raise ConfigError(f"expected fps of at least 1/1001, found {fps!r}; give times instead")
        return 1 / rate, list(range(count)), 1, rate
    seconds = [float(t) for t in times]
    if len(seconds) != count or not all(map(math.isfinite, seconds)) or seconds[0] != 0.0:
        raise ConfigError(
            f"expected {count} times in seconds, one per frame, the first 0, found {len(seconds)}: "
            f"{seconds[:4]!r}; subtract the first time from all"
        )
    ticks = [round(t * _TICKS) for t in seconds]
    if any(a >= b for a, b in pairwise(ticks)):
        raise ConfigError(
            f"expected times that rise by at least 1/{_TICKS} s, found {seconds[:8]!r}; sort them and remove "
            "repeated ones"
        )
    gaps = [b - a for a, b in pairwise(ticks)]
    end = (
        ticks[-1] + (gaps[-1] if gaps else _TICKS) if duration is None else round(duration * _TICKS)
    )
    if end <= ticks[-1]:
        raise ConfigError(
            f"expected a duration after the last frame at {seconds[-1]:g} s, found {duration!r}; enlarge it"
        )
    mean = Fraction(_TICKS * count, end).limit_denominator(1001)
    return Fraction(1, _TICKS), ticks, end - ticks[-1], mean or Fraction(1, 1001)


def _options(codec: str, quality: int, keyframe_every: int, b_frames: int) -> dict[str, str]:
    """Encoder options for a fixed quantiser, one thread and key frames at fixed places."""
    if codec == "mpeg4":
        return {"g": str(keyframe_every), "bf": str(b_frames), "threads": "1"}
    if codec == "h264":
        return {
            "preset": "veryfast",
            "qp": str(quality),
            "g": str(keyframe_every),
            "keyint_min": str(keyframe_every),
            "bf": str(b_frames),
            "threads": "1",
            "sc_threshold": "0",
        }
    lines = {
        "qp": quality,
        "keyint": keyframe_every,
        "min-keyint": keyframe_every,
        "bframes": b_frames,
        "scenecut": 0,
        "pools": "none",
        "frame-threads": 1,
        "log-level": "none",
        "info": 0,
    }
    return {"preset": "veryfast", "x265-params": ":".join(f"{k}={v}" for k, v in lines.items())}


def _add_stream(
    container: Any,
    codec: str,
    rate: Fraction,
    tick: Fraction,
    size_wh: tuple[int, int],
    quality: int,
    options: dict[str, str],
) -> Any:
    stream = container.add_stream(CODECS[codec], rate=rate, options=options)
    stream.width, stream.height = size_wh
    stream.pix_fmt = "yuv420p"
    context = stream.codec_context
    context.time_base, context.thread_count = tick, 1
    context.flags |= 0x800000  # AV_CODEC_FLAG_BITEXACT: no version in the stream
    # BT.601 625 lines, limited range: what decoders assume for small pictures
    context.colorspace, context.color_range = 5, 1
    # its quantiser runs from 1 to 31 and is a flag with a value in lambda units
    if codec == "mpeg4":
        context.flags |= 0x2
        context.global_quality = 118 * max(1, min(31, quality // 2))
    if codec == "hevc":
        stream.codec_tag = "hvc1"
    return stream


def write_video(
    path: str | os.PathLike[str],
    rgb_THWC: npt.NDArray[np.uint8],
    fps: float | Fraction | None = None,
    *,
    times: Sequence[float] | None = None,
    duration: float | None = None,
    codec: str = "h264",
    quality: int = 23,
    keyframe_every: int = 250,
    b_frames: int = 0,
) -> str:
    """Write frames (T, H, W, 3) uint8 to `path` (.mp4, .mov or .mkv) and return it; the file appears when it is complete.

    fps             constant frame rate; or
    times           seconds of every frame (variable rate), the first 0; the file ends at `duration` (default: the last
                    frame is shown as long as the one before it, a single frame for 1 s)
    codec           h264 (default), hevc or mpeg4
    quality         quantiser 0 (best) to 51, the same for every frame (default 23)
    keyframe_every  frames from one key frame to the next (default 250); 1 codes every frame alone
    b_frames        most B frames in a row (default 0): with them the order of packets is not that of frames; beside fps only

    Same arguments, same bytes, with the same FFmpeg on the same kind of processor. Raises ConfigError for impossible
    arguments, MissingExtraError without PyAV.
    """
    target = Path(path)
    if codec not in CODECS:
        raise ConfigError(
            f"expected a codec of {', '.join(CODECS)}, found {codec!r}.{did_you_mean(codec, CODECS)}"
        )
    if target.suffix.lower() not in CONTAINERS:
        raise ConfigError(
            f"expected a file name that ends in {', '.join(CONTAINERS)}, found {target.name!r}; rename it"
        )
    for name, value, low, high in (
        ("quality", quality, 0, 51),
        ("keyframe_every", keyframe_every, 1, 10_000),
        ("b_frames", b_frames, 0, 16),
    ):
        if type(value) is not int or not low <= value <= high:
            raise ConfigError(
                f"expected {name} as a whole number in {low}..{high}, found {value!r}; correct it"
            )
    if b_frames and times is not None:
        raise ConfigError(
            "expected no b_frames together with times (an MP4 file would not end at its duration), found both; drop one"
        )
    frames = _checked_frames(rgb_THWC)
    tick, starts, last, rate = _clock(len(frames), fps, times, duration)
    av = _require_av()
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    kind = CONTAINERS[target.suffix.lower()]
    flags = {"fflags": "+bitexact", **({} if kind == "matroska" else {"movflags": "+faststart"})}
    try:
        with av.open(str(partial), "w", format=kind, options=flags) as container:
            stream = _add_stream(
                container,
                codec,
                rate,
                tick,
                (frames.shape[2], frames.shape[1]),
                quality,
                _options(codec, quality, keyframe_every, b_frames),
            )
            packets = []
            for start, picture in zip(starts, frames, strict=True):
                frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(picture), format="rgb24")
                frame = frame.reformat(
                    format="yuv420p", dst_colorspace=5, src_color_range=2, dst_color_range=1
                )
                frame.pts, frame.time_base = start, tick
                packets += stream.encode(frame)
            _mux(container, [*packets, *stream.encode(None)], starts, starts[-1] + last, tick)
        os.replace(partial, target)
    finally:
        partial.unlink(missing_ok=True)
    return str(target)


def _mux(
    container: Any, packets: Sequence[Any], starts: Sequence[int], end: int, tick: Fraction
) -> None:
    """Write packets with the durations their frames have; without them the last frame's would be a guess."""
    lengths = {a: b - a for a, b in zip(starts, [*starts[1:], end], strict=True)}
    for packet in packets:
        unit = packet.time_base / tick
        packet.duration = round(lengths[round(packet.pts * unit)] / unit)
        container.mux(packet)
