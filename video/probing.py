"""What a video file holds, read from its packets: every frame's presentation time, keyframes, rotation, displayed size.

Only packets are read, and one frame decoded; so a long clip costs reading its bytes, not decoding it. The index made here is
the one truth about "frame number i" for all four decoders. Broken files are told apart: MediaError kinds missing, empty,
truncated (the end is not there), corrupt (the middle is wrong), no_video, unsupported.
"""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import numpy as np

from mmrl.errors import MediaError, MissingExtraError, install_command
from mmrl.video.bounds import (
    bounds,
    check_declared_frames,
    check_frame_count,
    check_stream_size,
    container_options,
)
from mmrl.video.containers import is_cut, looks_like_video
from mmrl.video.sampling import constant_fps, is_variable

__all__ = [
    "ClipIndex",
    "VideoInfo",
    "first_bytes",
    "forget",
    "import_library",
    "open_container",
    "scan",
    "stream_at",
    "upright",
]

_LISTS_BOXES = {"mov", "mp4"}
_TELLS_LENGTH = {"matroska,webm"}  # duration in the header, none of the frames
_SETTLED_NS = 2_000_000_000  # as for digests of contents: see mmrl.video.file_identity
_MOST_KEPT = 128
_LOCK = threading.Lock()
_kept: dict[str, tuple[tuple[int, int, int, int], ClipIndex]] = {}  # the latest last


@dataclass(frozen=True, eq=False)
class VideoInfo:
    """Facts of a video file or a folder of numbered frames.

    duration_s: from the first frame until the last one ends. fps: mean frames per second. width, height: displayed pixels,
    after rotation and sample aspect ratio. rotation: degrees counter-clockwise (0, 90, 180, 270) that turn the stored frame
    upright. timestamps_s: float64, when each frame is first shown, ascending, the first 0. keyframes: their indices.
    """

    path: str
    frames: int
    duration_s: float
    fps: float
    width: int
    height: int
    rotation: int
    codec: str
    timestamps_s: np.ndarray
    keyframes: tuple[int, ...]
    variable_rate: bool
    has_audio: bool


@dataclass(frozen=True, eq=False)
class ClipIndex:
    """A VideoInfo and what decoders need to find its frames: presentation times in units of `time_base`, where keyframes are
    in the file, the display matrix as (a, b, c, d), the stored size, and what the colours are.

    pts None: the file has no usable presentation times (old AVI, raw streams); frames are then counted from its beginning.
    closed: no frame that comes after a keyframe in the file is shown before it, so decoding may start at any. deep: more than 8
    bits a channel. odd_chroma: an odd side whose colours are stored at half size. pictures: the files of a folder of frames; then
    nothing else is needed.
    """

    info: VideoInfo
    pts: np.ndarray | None = None
    time_base: Fraction = Fraction(1)
    keyframe_dts: tuple[int, ...] = ()
    stream: int = 0
    first_stream: bool = True
    matrix: tuple[int, int, int, int] = (1, 0, 0, 1)
    stored_wh: tuple[int, int] = (0, 0)
    colorspace: int = 2
    pix_fmt: str = ""
    container: str = ""
    closed: bool = True
    deep: bool = False
    odd_chroma: bool = False
    pictures: tuple[str, ...] = field(default=())


def import_library(name: str) -> Any:
    """The module `name`; raises MissingExtraError naming the extra, also when it is there but cannot be loaded."""
    import importlib

    try:
        return importlib.import_module(name)
    except (ImportError, OSError, RuntimeError) as err:
        command = (
            "pip install --no-deps torchcodec==0.13.0"
            if name.startswith("torchcodec")
            else install_command("video")
        )
        raise MissingExtraError(
            f"expected the library {name.partition('.')[0]} to read a video, but it cannot be imported "
            f"({err}); run: {command}"
        ) from err


def upright(rgb: np.ndarray, matrix: tuple[int, int, int, int]) -> np.ndarray:
    """A stored frame [H, W, 3] turned and mirrored as its display matrix (a, b, c, d) says: x' = a x + c y, y' = b x + d y."""
    a, b, c, d = matrix
    if a == 0:
        rgb, flip_y, flip_x = rgb.transpose(1, 0, 2), b < 0, c < 0
    else:
        flip_y, flip_x = d < 0, a < 0
    return rgb[:: -1 if flip_y else 1, :: -1 if flip_x else 1]


def _rotation(matrix: tuple[int, int, int, int]) -> int:
    """Degrees counter-clockwise of a display matrix, mirroring left aside."""
    a, b, _, _ = matrix
    return {(1, 0): 0, (0, -1): 90, (-1, 0): 180, (0, 1): 270}[(a, b)]


def _head(path: str) -> bytes:
    if not os.path.exists(path):
        hint = "download it first, addresses are not fetched" if "://" in path else "check the path"
        raise MediaError(
            f"expected a video file or a folder of frames, found none at {path}; {hint}",
            kind="missing",
            path=path,
        )
    if not os.path.isfile(path):  # opening a pipe may wait for ever
        raise MediaError(
            f"expected a video, found a pipe or device: {path}; give the file",
            kind="unsupported",
            path=path,
        )
    return first_bytes(path, "a", "video")


def first_bytes(path: str, article: str, noun: str) -> bytes:
    """The first 16 bytes of a file that is `article` `noun`. Raises MediaError where there is none to read."""
    try:
        with open(path, "rb") as handle:
            head = handle.read(16)
    except OSError as err:
        raise MediaError(
            f"expected a readable {noun} at {path} ({err}); check its permissions",
            kind="missing",
            path=path,
        ) from err
    if not head:
        raise MediaError(
            f"expected {article} {noun}, found an empty file: {path}; copy or download it again",
            kind="empty",
            path=path,
        )
    return head


def _cut(path: str, why: object) -> MediaError:
    return MediaError(
        f"expected a complete video, found a file that ends too early: {path} ({why}); copy or download it again",
        kind="truncated",
        path=path,
    )


def _open_error(path: str, head: bytes, err: Exception) -> MediaError:
    """What an unreadable file is: cut, damaged, or no video at all."""
    if is_cut(path, head):
        return _cut(path, err)
    if looks_like_video(head):
        return MediaError(
            f"expected a video, found a damaged header in {path} ({err}); copy it again",
            kind="corrupt",
            path=path,
        )
    return MediaError(
        f"expected a video (mp4, webm, mkv, avi, mov, ...), found unknown content in {path} ({err}); convert it with "
        "ffmpeg",
        kind="unsupported",
        path=path,
    )


def open_with_av(av: Any, path: str) -> Any:
    """PyAV's container of this one file; what is no text in its metadata is no error. PyAV 19 sees to that by itself."""
    own = {} if int(av.__version__.partition(".")[0]) >= 19 else {"metadata_errors": "replace"}
    return av.open("file:" + os.path.abspath(path), options=container_options(), **own)


def open_container(path: str) -> Any:
    """The opened PyAV container. Only this file is ever read: playlists and addresses are refused. Raises MediaError."""
    av = import_library("av")
    head = _head(path)
    check_declared_frames(path, head)
    try:
        container = open_with_av(av, path)
    except (av.error.FFmpegError, ValueError, OSError) as err:
        raise _open_error(path, head, err) from err
    for stream in container.streams.video:
        if stream.codec_context is not None:  # opened later, without the container's options
            stream.codec_context.options = {"max_pixels": str(bounds().pixels)}
    return container


def stream_at(container: Any, number: int, path: str) -> Any:
    """Stream `number` of a container opened again. Raises MediaError: damage can make a stream come and go."""
    if number >= len(container.streams):
        raise MediaError(
            f"found damage in {path}: its streams differ from one reading to the next; copy it again",
            kind="corrupt",
            path=path,
        )
    return container.streams[number]


def _video_stream(container: Any, path: str) -> Any:
    """The stream to show; cover pictures of music files do not count. Raises MediaError (no_video, unsupported)."""
    av = import_library("av")
    streams = [
        s
        for s in container.streams.video
        if not (s.disposition & av.stream.Disposition.attached_pic)
    ]
    if not streams and is_cut(path, _head(path)):
        raise _cut(path, "its list of streams is incomplete")
    if not streams:
        what = "only sound" if container.streams.audio else "no picture stream"
        raise MediaError(
            f"expected a video, found {what} in {path}; leave the row out or give the video",
            kind="no_video",
            path=path,
        )
    best = container.streams.best("video")
    stream = best if best in streams else streams[0]
    if stream.codec_context is None:
        raise MediaError(
            f"no decoder for the pictures in {path}; convert it to H.264 with ffmpeg",
            kind="unsupported",
            path=path,
        )
    check_stream_size(stream.codec_context.width, stream.codec_context.height, path)
    return stream


def _is_shown(packet: Any, codec: str) -> bool:
    """Whether a packet gives a frame: not cut away by an edit list, not VP8's hidden reference frame."""
    if packet.is_discard:
        return False
    return codec != "vp8" or bool(bytes(memoryview(packet)[:1])[0] & 0x10)


@dataclass(frozen=True)
class _Row:
    """One packet: presentation and decoding time and duration in units of the stream, keyframe, whether it gives a frame."""

    pts: int | None
    dts: int | None
    duration: int
    key: bool
    shown: bool


def _packets(container: Any, stream: Any, path: str) -> tuple[list[_Row], float]:
    """Every packet of the stream in file order, and the end of the last packet in seconds (Matroska: of any stream).

    Raises MediaError truncated or corrupt.
    """
    av = import_library("av")
    rows: list[_Row] = []
    end, codec, cut = 0.0, stream.codec_context.name, False
    try:
        everything = container.format.name in _TELLS_LENGTH
        for packet in container.demux() if everything else container.demux(stream):
            if not packet.size:
                continue
            if packet.pts is not None:
                end = max(end, float((packet.pts + (packet.duration or 0)) * packet.time_base))
            if packet.stream_index == stream.index:
                cut = cut or packet.is_corrupt
                check_frame_count(len(rows) + 1, path)
                rows.append(
                    _Row(
                        packet.pts,
                        packet.dts,
                        packet.duration or 0,
                        packet.is_keyframe,
                        _is_shown(packet, codec),
                    )
                )
    except (av.error.FFmpegError, IndexError) as err:
        # IndexError: PyAV, when a stream appears in the middle
        if _index_end(stream) > os.path.getsize(path):
            raise _cut(path, f"after {len(rows)} frames") from err
        raise MediaError(
            f"found damage after {len(rows)} frames of {path} ({err}); copy it again",
            kind="corrupt",
            path=path,
        ) from err
    if _ends_early(container, stream, path, end):
        raise _cut(path, f"it holds {end:.6g} s and {len(rows)} frames, its header declares more")
    if cut:
        raise MediaError(
            f"found damaged packets in {path}; copy or download it again", kind="corrupt", path=path
        )
    if not any(row.shown for row in rows):
        if is_cut(path, _head(path)):
            raise _cut(path, "no frame is left")
        raise MediaError(
            f"expected frames, found none in {path}; leave the row out", kind="empty", path=path
        )
    return rows, end


def _index_end(stream: Any) -> int:
    """Where the last frame ends in the file, as its own index says; 0 where there is none."""
    return max((entry.pos + entry.size for entry in stream.index_entries), default=0)


def _ends_early(container: Any, stream: Any, path: str, end: float) -> bool:
    """Whether the file declares more than it holds: frames beyond its last byte, or a longer duration."""
    if _index_end(stream) > os.path.getsize(path):
        return True
    if set(container.format.name.split(",")) & _LISTS_BOXES:
        return False  # its boxes may hold more than the index needs; the index decides
    longer = (
        container.duration / 1e6 - end
        if container.format.name in _TELLS_LENGTH and container.duration
        else 0.0
    )
    return longer > 0.5 or is_cut(path, _head(path))


def _first_frame(container: Any, stream: Any, path: str) -> Any:
    """The first frame that decodes. Raises MediaError."""
    av = import_library("av")
    try:
        container.seek(0) if container.start_time is None else container.seek(container.start_time)
        for frame in container.decode(stream):
            return frame
    except av.error.FFmpegError as err:
        large = (
            ""
            if stream.codec_context.width
            else f", or it has more than {bounds().pixels:,} pixels"
        )
        raise MediaError(
            f"the first frame of {path} cannot be decoded ({err}){large}; copy it again or convert it with ffmpeg",
            kind="corrupt",
            path=path,
        ) from err
    raise MediaError(
        f"expected frames, found none that decodes in {path}; copy it again",
        kind="corrupt",
        path=path,
    )


def _matrix(frame: Any, path: str) -> tuple[int, int, int, int]:
    """Signs (a, b, c, d) of the frame's display matrix. Raises MediaError for angles that are no quarter turns."""
    item = frame.side_data.get("DISPLAYMATRIX")
    if item is None:
        return 1, 0, 0, 1
    raw = np.frombuffer(bytes(item), dtype=np.int32)
    entries = raw[[0, 1, 3, 4]].astype(np.float64)
    signs = np.where(np.abs(entries) > 0.02 * np.abs(entries).max(), np.sign(entries), 0).astype(
        int
    )
    a, b, c, d = (int(v) for v in signs)
    if ((a, d) == (0, 0) and b and c) or ((b, c) == (0, 0) and a and d):
        return a, b, c, d
    raise MediaError(
        f"expected a rotation by quarter turns, found the display matrix {raw.tolist()} in {path}; turn the "
        "video with ffmpeg",
        kind="unsupported",
        path=path,
    )


@dataclass(frozen=True)
class _Times:
    """What packets tell of frames in order of presentation."""

    pts: np.ndarray
    keys: tuple[int, ...]
    key_dts: tuple[int, ...]
    closed: bool
    last: int  # duration of the last frame


def _index_by_time(rows: list[_Row]) -> _Times | None:
    """The frames in order of presentation; None where times cannot tell them apart (none, or two alike).

    Packets before the first keyframe, and those shown before it, cannot be decoded: they do not count.
    """
    first = next((n for n, row in enumerate(rows) if row.key), None)
    if first is None or any(row.pts is None for row in rows):
        return None
    timed = [(row.pts, row) for row in rows[first:] if row.pts is not None]
    lead = key_at = timed[0][0]
    closed = True
    for shown_at, row in timed:
        key_at = shown_at if row.key else key_at
        closed = closed and shown_at >= key_at
    frames = sorted(
        ((time, row) for time, row in timed if row.shown and time >= lead), key=lambda item: item[0]
    )
    pts = np.array([time for time, _ in frames], dtype=np.int64)
    if not len(pts) or len(np.unique(pts)) != len(pts):
        return None
    keys = [n for n, (_, row) in enumerate(frames) if row.key]
    dts = [time if row.dts is None else row.dts for time, row in frames]
    return _Times(pts, tuple(keys), tuple(dts[n] for n in keys), closed, frames[-1][1].duration)


def _index_by_decoding(
    path: str, stream_index: int, fps: float
) -> tuple[np.ndarray, tuple[int, ...]]:
    """(timestamps_s, keyframe indices) of every frame, found by decoding all of them; for files without usable times."""
    av = import_library("av")
    times: list[float | None] = []
    keys: list[int] = []
    with open_container(path) as container:
        try:
            for frame in container.decode(stream_at(container, stream_index, path)):
                if frame.is_corrupt:
                    raise MediaError(
                        f"found damage after {len(times)} frames of {path}; copy it again",
                        kind="corrupt",
                        path=path,
                    )
                if frame.key_frame:
                    keys.append(len(times))
                times.append(None if frame.pts is None else float(frame.pts * frame.time_base))
        except av.error.FFmpegError as err:
            raise MediaError(
                f"found damage after {len(times)} frames of {path} ({err}); copy it again",
                kind="corrupt",
                path=path,
            ) from err
    known = np.array([t for t in times if t is not None], dtype=np.float64)
    if len(known) == len(times) and (np.diff(known) > 0).all():
        return known - known[0], tuple(keys)
    return np.arange(len(times)) / fps, tuple(keys)


def _shown_width(stream: Any, width: int) -> int:
    """Displayed width of a stored row: the sample aspect ratio makes pixels square."""
    aspect = stream.sample_aspect_ratio or Fraction(1)
    return max(1, round(width * aspect)) if aspect > 0 else width


def _build(container: Any, path: str) -> ClipIndex:
    stream = _video_stream(container, path)
    rows, _ = _packets(container, stream, path)
    frame = _first_frame(container, stream, path)
    matrix, base = _matrix(frame, path), stream.time_base
    declared = float(stream.average_rate or 0)
    index = _index_by_time(rows)
    if index is None:
        times, keys = _index_by_decoding(path, stream.index, declared or 25.0)
        last_s = 0.0
    else:
        times, keys = (
            (index.pts - index.pts[0]).astype(np.float64) * base.numerator / base.denominator,
            index.keys,
        )
        last_s = float(index.last * base)
    measured = (
        constant_fps(times) if len(times) > 1 else (1 / last_s if last_s > 0 else declared or 25.0)
    )
    fps = declared if declared > 0 and abs(declared - measured) <= 0.01 * measured else measured
    variable = is_variable(times)
    tail = last_s if last_s > 0 and (variable or abs(last_s * fps - 1) < 0.5) else 1.0 / fps
    width, height = frame.width, frame.height
    shown_w, turned = _shown_width(stream, width), matrix[0] == 0
    times.flags.writeable = False
    info = VideoInfo(
        path=path,
        frames=len(times),
        duration_s=float(times[-1]) + tail,
        fps=fps,
        width=height if turned else shown_w,
        height=shown_w if turned else height,
        rotation=_rotation(matrix),
        codec=stream.codec_context.codec.canonical_name,
        timestamps_s=times,
        keyframes=keys,
        variable_rate=variable,
        has_audio=bool(container.streams.audio),
    )
    pixels = frame.format
    return ClipIndex(
        info,
        None if index is None else index.pts,
        base,
        () if index is None else index.key_dts,
        stream.index,
        stream is container.streams.video[0],
        matrix,
        (width, height),
        int(frame.colorspace),
        pixels.name,
        container.format.name,
        index is not None and index.closed,
        any(c.bits > 8 for c in pixels.components),
        (pixels.chroma_height(height) * 2 - height) == 1
        or (pixels.chroma_width(width) * 2 - width) == 1,
    )


def scan(path: str | os.PathLike[str]) -> ClipIndex:
    """The index of a video file; kept while its size, inode and times (of content and of any change) stay the same, and not
    kept for a file that changed in the last 2 seconds: it could change again within one tick. Raises MediaError."""
    name = os.fspath(path)
    _head(name)
    facts = os.stat(name)
    identity = facts.st_size, facts.st_ino, facts.st_mtime_ns, facts.st_ctime_ns
    with _LOCK:
        known = _kept.pop(name, None)
        if known is not None and known[0] == identity:
            _kept[name] = known  # now the newest
            return known[1]
    with open_container(name) as container:
        index = _build(container, name)
    if max(facts.st_mtime_ns, facts.st_ctime_ns) <= time.time_ns() - _SETTLED_NS:
        with _LOCK:
            _kept[name] = identity, index
            while len(_kept) > _MOST_KEPT:
                del _kept[next(iter(_kept))]
    return index


def forget() -> None:
    """Forget all indices kept by `scan`."""
    with _LOCK:
        _kept.clear()
