"""Single frames of clips by their number, decoded once for all who ask: what a policy that looks again at its video is shown.

    frames = ClipFrames()
    info = frames.facts("a.mp4")                                   # size, length, times of all frames; decodes one frame
    shown = frames.read("a.mp4", [0, 31, 62], side=448)            # uint8 (h, w, 3), the longer side at most 448 pixels

The rollouts of a group begin with the same frames of the same clip, and often look at the same moments: a frame that was decoded is
kept (by the file's content, its number and its size) within a bound of bytes, least recently used first out. What is handed out is
the same array each time: the visual cache knows an equal picture again by its pixels. Threads may ask at the same time; one clip is
decoded by one of them at a time, and the others find what it decoded.

    python -c "from mmrl.tasks.clip_frames import *; print(len(ClipFrames().read('assets/fixtures/video/counter.mp4', [0, 2])))"
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Sequence

import numpy as np

from mmrl.errors import MediaError
from mmrl.video.decode import VideoInfo, probe, read_clip
from mmrl.video.file_identity import digest_of_content
from mmrl.video.memory import Memory
from mmrl.video.sampling import FrameSampling, select_frames

__all__ = ["ClipFrames", "select"]

_LOCKS = 32


class ClipFrames:
    """A memory of decoded frames; see the module. `most_bytes`: of all that are kept. `decoded` counts frames that were decoded."""

    def __init__(self, most_bytes: int = 512 << 20) -> None:
        self.decoded = 0
        self._kept = Memory(most_bytes)
        self._lock = threading.Lock()
        self._clips = tuple(threading.Lock() for _ in range(_LOCKS))

    def facts(self, path: str) -> VideoInfo:
        """What the file says of itself. Raises MediaError."""
        return probe(path)

    def read(self, path: str, numbers: Sequence[int], side: int | None = None) -> list[np.ndarray]:
        """The frames with these numbers, in the order asked for, uint8 (h, w, 3), upright; with `side` a longer side of more pixels
        is shrunk to it. Nobody may change them. Raises MediaError for a clip that is missing or damaged, or has no such frame."""
        content = digest_of_content(path)
        keys = {number: (content, number, side) for number in numbers}
        with self._clips[zlib.crc32(content.encode()) % _LOCKS]:
            with self._lock:
                found = {number: self._kept.get(key) for number, key in keys.items()}
            missing = sorted(number for number, frame in found.items() if frame is None)
            if missing:
                for number, frame in zip(missing, _decoded(path, missing, side), strict=True):
                    found[number] = frame
                    with self._lock:
                        self.decoded += 1
                        self._kept.put(keys[number], frame, frame.nbytes, False)
        return [found[number] for number in numbers]


def _decoded(path: str, numbers: Sequence[int], side: int | None) -> list[np.ndarray]:
    """Frames by ascending number. Raises MediaError."""
    times = probe(path).timestamps_s
    if not 0 <= numbers[0] <= numbers[-1] < len(times):
        raise MediaError(
            f"expected frames 0 to {len(times) - 1} of {path}, found {numbers[0]} to {numbers[-1]} asked for; the file has "
            "changed, or its index is damaged",
            kind="too_short",
            path=path,
        )
    sampling = FrameSampling(kind="timestamps", timestamps=tuple(float(times[n]) for n in numbers))
    clip = read_clip(
        path, sampling, size=None if side is None else lambda _, h, w: _within(h, w, side)
    )
    # each an array of its own: one that is kept must not keep the others
    return [frame.copy() for frame in clip.rgb_THWC]


def _within(height: int, width: int, side: int) -> tuple[int, int]:
    """(height, width) with a longer side of at most `side`."""
    scale = min(1.0, side / max(height, width))
    return max(1, round(height * scale)), max(1, round(width * scale))


def select(info: VideoInfo, sampling: FrameSampling) -> list[int]:
    """Numbers of the frames that `sampling` takes of a clip, ascending, each once. Raises MediaError."""
    chosen = select_frames(
        info.timestamps_s, sampling, info.keyframes, fps=info.fps, duration_s=info.duration_s
    )
    return sorted(set(chosen))
