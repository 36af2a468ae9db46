"""One growing mp4 file of a camera, many episodes after another; each begins with a keyframe.

Small pictures suffer from video coding: at 64 x 64 pixels yuv420p with crf 18 is off by 4.8 of 255 on average, yuv444p with
crf 8 by 1.8, lossless yuv444p by 0.4 (rounding of the colour transform); libx264rgb with qp 0 is exact, needs some 6 kB per
picture with camera noise and less without, and is read by PyAV, torchcodec and ffmpeg. So "lossless" is the default; larger
pictures may use "high" or "small", which browsers can play.

    python -c "from mmrl.robotics.datasets.mp4 import VIDEO_SETTINGS; print(list(VIDEO_SETTINGS))"
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from mmrl.errors import ConfigError, did_you_mean, install_command
from mmrl.robotics.datasets.demonstration import import_or_say

__all__ = ["VIDEO_SETTINGS", "Mp4File", "VideoSettings", "video_settings"]


@dataclass(frozen=True)
class VideoSettings:
    """How pictures are coded. quality: qp 0 is lossless for libx264rgb, else crf. keyframe_every: pictures."""

    codec: str
    pix_fmt: str
    quality: tuple[str, int]
    keyframe_every: int = 10
    preset: str = "fast"

    @property
    def lossless(self) -> bool:
        """Whether pixels come back exactly."""
        return self.codec == "libx264rgb" and self.quality == ("qp", 0)


VIDEO_SETTINGS = {
    "lossless": VideoSettings("libx264rgb", "rgb24", ("qp", 0)),
    "high": VideoSettings("libx264", "yuv444p", ("crf", 8)),
    "small": VideoSettings("libx264", "yuv420p", ("crf", 18)),
}


def video_settings(name: str | VideoSettings) -> VideoSettings:
    """By name. Raises ConfigError."""
    if isinstance(name, VideoSettings):
        return name
    if name not in VIDEO_SETTINGS:
        raise ConfigError(
            f"expected video as one of {', '.join(VIDEO_SETTINGS)}, found {name!r}."
            f"{did_you_mean(name, VIDEO_SETTINGS)}"
        )
    return VIDEO_SETTINGS[name]


class Mp4File:
    """Appends pictures of one size; `seconds` is where the next one will be shown, `bytes` what was coded so far."""

    def __init__(
        self, path: str, fps: int, height: int, width: int, settings: VideoSettings
    ) -> None:
        av = import_or_say("av", install_command("video"))
        if settings.pix_fmt == "yuv420p" and (height % 2 or width % 2):
            raise ConfigError(
                f"video small (yuv420p) expects even sides, found {width} x {height}; use lossless or high"
            )
        os.makedirs(os.path.dirname(path), exist_ok=True)
        self.fps, self.count, self.bytes, self.height, self.width = fps, 0, 0, height, width
        self._av = av
        self._container = av.open(path, "w")
        options = {
            settings.quality[0]: str(settings.quality[1]),
            "preset": settings.preset,
            "g": str(settings.keyframe_every),
            "bf": "0",
            "forced-idr": "1",
        }
        self._stream = self._container.add_stream(settings.codec, rate=fps, options=options)
        self._stream.width, self._stream.height, self._stream.pix_fmt = (
            width,
            height,
            settings.pix_fmt,
        )
        self._stream.codec_context.thread_count = 1  # the same bytes on every machine
        self._stream.codec_context.time_base = Fraction(1, fps)

    @property
    def seconds(self) -> float:
        """Length so far."""
        return self.count / self.fps

    def add(self, frame_HWC: np.ndarray, first: bool) -> None:
        """Append a picture; `first` of an episode makes it a keyframe."""
        frame = self._av.VideoFrame.from_ndarray(np.ascontiguousarray(frame_HWC), format="rgb24")
        frame.pts, frame.time_base = self.count, Fraction(1, self.fps)
        if first:
            frame.pict_type = self._av.video.frame.PictureType.I
        self._mux(self._stream.encode(frame))
        self.count += 1

    def _mux(self, packets: list) -> None:
        for packet in packets:
            self.bytes += packet.size
            self._container.mux(packet)

    def close(self) -> None:
        """Write what the encoder holds and the index."""
        if self._container is not None:
            if self.count:
                self._mux(self._stream.encode())
            self._container.close()
            self._container = None
