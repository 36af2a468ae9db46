"""Reading clips: the chosen frames of a video file or a folder of frames, upright, in order, exactly those or an error.

    info = probe("a.mp4")                                          # size, length, times of all frames; decodes one frame
    clip = read_clip("a.mp4", FrameSampling(fps=2, end=30.0))      # clip.rgb_THWC, clip.indices, clip.timestamps_s

    python -c "from mmrl.video.decode import probe; print(probe('assets/fixtures/video/counter.mp4'))"

Indices, times and pixels (to rounding) do not depend on the decoder. Nothing is replaced or repeated in silence: every
failure is a MediaError whose kind says what is wrong (missing, empty, truncated, corrupt, no_video, unsupported, too_short,
too_large).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from mmrl.errors import ConfigError, MediaError, did_you_mean
from mmrl.video.budget import resize_frames
from mmrl.video.decoders import DECODERS, decode_frames
from mmrl.video.folders import index_folder
from mmrl.video.probing import ClipIndex, VideoInfo, scan
from mmrl.video.sampling import FrameSampling, select_frames

__all__ = ["Clip", "VideoInfo", "choose_decoder", "measure", "probe", "read_clip"]

_CHUNK_BYTES = 64 << 20  # frames of this many bytes are resized together
MAX_BYTES = 8 << 30


@dataclass(frozen=True, eq=False)
class Clip:
    """Frames as shown. rgb_THWC: uint8; T equals len(indices). timestamps_s: seconds from the first frame of the file, one per
    frame. decoder: which one read them ("pictures" for a folder)."""

    rgb_THWC: np.ndarray
    indices: tuple[int, ...]
    timestamps_s: tuple[float, ...]
    info: VideoInfo
    decoder: str


def _index(path: str | os.PathLike[str], folder_fps: float) -> ClipIndex:
    name = os.fspath(path)
    return index_folder(name, folder_fps) if os.path.isdir(name) else scan(name)


def probe(path: str | os.PathLike[str], *, folder_fps: float = 2.0) -> VideoInfo:
    """Facts of a video file or a folder of numbered frames (shown at `folder_fps`). Reads packets, decodes one frame.

    Raises MediaError: missing, empty, truncated, corrupt, no_video, unsupported; MissingExtraError without PyAV.
    """
    return _index(path, folder_fps).info


def _chosen(
    path: str | os.PathLike[str], sampling: FrameSampling
) -> tuple[ClipIndex, tuple[int, ...]]:
    """The index of a clip and the numbers of the frames that `sampling` takes. Raises MediaError."""
    index = _index(path, sampling.folder_fps)
    info = index.info
    try:
        return index, tuple(
            select_frames(
                info.timestamps_s,
                sampling,
                info.keyframes,
                fps=info.fps,
                duration_s=info.duration_s,
            )
        )
    except MediaError as err:
        raise MediaError(f"{err} ({info.path})", kind=err.kind, path=info.path) from err


def measure(path: str | os.PathLike[str], sampling: FrameSampling) -> tuple[int, VideoInfo]:
    """How many frames `sampling` takes of a clip, and the facts of it; reads packets, decodes one frame. Raises MediaError."""
    index, indices = _chosen(path, sampling)
    return len(indices), index.info


def choose_decoder(decoder: str = "auto") -> str:
    """The decoder "auto" stands for: PyAV. It is needed for the index anyway, is as fast as the others, the only one that
    reports damage, and reads every file. Any other name is checked. Raises ConfigError."""
    if decoder == "auto":
        return next(iter(DECODERS))
    if decoder not in DECODERS:
        raise ConfigError(
            f"expected decoder as one of auto, {', '.join(DECODERS)}, found {str(decoder)[:40]!r}."
            f"{did_you_mean(str(decoder), ['auto', *DECODERS])}"
        )
    return decoder


def _target(
    index: ClipIndex, count: int, size: Callable[[int, int, int], tuple[int, int]] | None
) -> tuple[int, int]:
    """(height, width) of the frames to give."""
    info = index.info
    return (info.height, info.width) if size is None else size(count, info.height, info.width)


def _chunks(frames: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
    """Frames stacked to [n, H, W, 3] pieces of bounded size."""
    held: list[np.ndarray] = []
    held_bytes = 0
    for frame in frames:
        held.append(frame)
        held_bytes += frame.nbytes
        if held_bytes >= _CHUNK_BYTES:
            yield np.stack(held)
            held, held_bytes = [], 0
    if held:
        yield np.stack(held)


def _collect(
    index: ClipIndex, wanted: Sequence[int], height: int, width: int, decoder: str, threads: int
) -> np.ndarray:
    """Frames `wanted` (ascending, unrepeated) resized to height x width. Raises MediaError when some do not come."""
    out = np.empty((len(wanted), height, width, 3), dtype=np.uint8)
    filled = 0
    for chunk in _chunks(decode_frames(index, wanted, decoder, threads)):
        out[filled : filled + len(chunk)] = resize_frames(chunk, height, width)
        filled += len(chunk)
    if filled != len(wanted):
        raise MediaError(
            f"expected {len(wanted)} frames of {index.info.path}, {decoder} gave {filled}",
            kind="corrupt",
            path=index.info.path,
        )
    return out


def read_clip(
    path: str | os.PathLike[str],
    sampling: FrameSampling,
    *,
    decoder: str = "auto",
    threads: int = 1,
    size: Callable[[int, int, int], tuple[int, int]] | None = None,
    max_bytes: int = MAX_BYTES,
) -> Clip:
    """The frames of a clip that `sampling` chooses, upright, with square pixels, uint8 RGB.

    decoder: "auto" (PyAV), "pyav", "torchcodec", "decord" or "opencv": the same frames, or an error that says why this one
    cannot. threads: of the decoder. size: (number of frames, displayed height, displayed width) -> (height, width) to resize to
    while decoding (bicubic, antialiased), so that memory holds the small frames only. max_bytes: limit on the result.
    Raises MediaError (see the module), ConfigError, MissingExtraError.
    """
    name = choose_decoder(decoder)
    index, indices = _chosen(path, sampling)
    info = index.info
    height, width = _target(index, len(indices), size)
    unique = sorted(set(indices))
    if len(indices) * height * width * 3 > max_bytes:
        raise MediaError(
            f"{len(indices)} frames of {width} x {height} of {info.path} take more than {max_bytes / 2**30:.3g} GiB; "
            "take fewer, smaller ones (size), or raise max_bytes",
            kind="too_large",
            path=info.path,
        )
    rgb_THWC = _collect(index, unique, height, width, name, threads)
    if len(unique) != len(indices):
        rgb_THWC = rgb_THWC[np.searchsorted(unique, indices)]
    return Clip(
        rgb_THWC,
        indices,
        tuple(float(info.timestamps_s[i]) for i in indices),
        info,
        "pictures" if index.pictures else name,
    )
