"""How large the clips may be that this process opens: checked by their headers, before any frame is decoded.

    set_bounds(ClipBounds(pixels=50_000_000, frames=250_000))     # a server's; those of training are generous

Containers are of a list: FFmpeg's playlists and lists of parts make it open other files and addresses.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from mmrl.errors import MediaError
from mmrl.video.containers import most_frames
from mmrl.video.media import MAX_PIXELS

__all__ = [
    "ClipBounds",
    "bounds",
    "check_declared_frames",
    "check_frame_count",
    "check_stream_size",
    "container_options",
    "set_bounds",
]

_CONTAINERS = (
    "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,mpeg,mpegts,mpegvideo,m4v,h264,hevc,av1,obu,ivf,ogg,flv,asf,wtv,mxf,nut,"
    "dv,rm,mjpeg,gif,apng,mp3,wav,flac,aac"
)  # each holds its own pictures; sound is told apart


@dataclass(frozen=True)
class ClipBounds:
    """Pixels of one frame as it is stored, frames that a clip lists."""

    pixels: int = MAX_PIXELS
    frames: int = 10_000_000


_now = ClipBounds()


def bounds() -> ClipBounds:
    """Those that hold in this process."""
    return _now


def set_bounds(new: ClipBounds) -> None:
    """Let `new` hold in this process, for clips opened from now on."""
    global _now
    _now = new


def container_options() -> dict[str, str]:
    """Options of FFmpeg, for the container and every decoder in it: `max_pixels` holds for what the stream says, too."""
    return {
        "protocol_whitelist": "file",
        "format_whitelist": _CONTAINERS,
        "max_pixels": str(_now.pixels),
    }


def check_stream_size(width: int, height: int, path: str) -> None:
    """Raises MediaError for a stream whose declared size is too large. FFmpeg may report it as none, and then decodes nothing."""
    if width * height > _now.pixels:
        raise MediaError(
            f"expected a video whose frames have at most {_now.pixels:,} pixels, found {width} x {height} in {path}; "
            "scale it down with ffmpeg",
            kind="too_large",
            path=path,
        )


def check_declared_frames(path: str, head: bytes) -> None:
    """Raises MediaError for an MP4 that declares more frames than it has bytes, before FFmpeg makes room for them. `head`: its
    first 16 bytes."""
    declared, size = most_frames(path, head), os.path.getsize(path)
    if declared > size:
        raise MediaError(
            f"expected a video, found one that declares {declared:,} frames in {size:,} bytes: {path}; copy it again",
            kind="corrupt",
            path=path,
        )


def check_frame_count(frames: int, path: str) -> None:
    """Raises MediaError for a clip of more frames than may be listed."""
    if frames > _now.frames:
        raise MediaError(
            f"expected a video of at most {_now.frames:,} frames, found more in {path}; cut it",
            kind="too_large",
            path=path,
        )
