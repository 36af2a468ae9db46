"""Four decoders with one meaning: PyAV, torchcodec, decord and OpenCV give the same frames for the same indices.

The index (mmrl.video.probing) says what frame number i is; each decoder must give just that frame, upright, or raise. PyAV decodes
from the keyframe before, takes frames by their presentation time and sees every damage that libavcodec reports. The others
conceal damage or repeat neighbours, so the same stretch is first decoded by PyAV without making pictures (`check_intact`).
Where one of them would give other frames or colours it is led around the trap (open groups of pictures: torchcodec gets our
index, decord reads from the beginning) or refused (`refusal`).
"""

from __future__ import annotations

import bisect
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from mmrl.errors import MediaError
from mmrl.video.folders import read_picture
from mmrl.video.probing import ClipIndex, import_library, open_container, stream_at, upright

__all__ = ["DECODERS", "check_intact", "decode_frames", "refusal"]

_SECONDS_BEFORE = (0.0, 4.0)  # where to look for a keyframe again when a seek landed after it
_BT601 = {2, 5, 6}  # unspecified, BT.470BG, SMPTE 170M: what swscale takes when it is told nothing
# containers where torchcodec and decord find a frame again
_SEEKABLE = {"mov,mp4,m4a,3gp,3g2,mj2", "matroska,webm"}


def _damaged(index: ClipIndex, what: str) -> MediaError:
    return MediaError(
        f"found damage in {index.info.path}: {what}; copy or download it again",
        kind="corrupt",
        path=index.info.path,
    )


def _keyframe_before(index: ClipIndex, number: int) -> int:
    """The last keyframe at or before frame `number`, -1 where it lies in a part that an edit list hides."""
    position = bisect.bisect_right(index.info.keyframes, number)
    return index.info.keyframes[position - 1] if position else -1


class _Walker:
    """Decodes forward with PyAV and knows the number of each frame; seeks only where that saves decoding."""

    def __init__(self, index: ClipIndex, threads: int) -> None:
        self.index, self.threads = index, threads
        self.container: Any = None
        self.frames: Iterator[Any] = iter(())
        self.at = -1  # number of the frame decoded last
        self.numbers = {} if index.pts is None else {int(pts): n for n, pts in enumerate(index.pts)}
        self.can_seek = index.pts is not None

    def __enter__(self) -> _Walker:
        return self

    def __exit__(self, *_: object) -> None:
        if self.container is not None:
            self.container.close()

    def _open(self) -> Any:
        if self.container is not None:
            self.container.close()
        self.container = open_container(self.index.info.path)
        stream = stream_at(self.container, self.index.stream, self.index.info.path)
        stream.codec_context.thread_count = self.threads
        stream.codec_context.thread_type = "AUTO" if self.threads > 1 else "NONE"
        return stream

    def _restart(self) -> None:
        stream = self._open()
        self.frames, self.at = self.container.decode(stream), -1

    def _seek(self, key: int) -> Any:
        """Go to keyframe number `key` of the index; returns that frame, or None after going back to the beginning."""
        index = self.index
        assert index.pts is not None
        order = bisect.bisect_left(index.info.keyframes, key)
        for before in _SECONDS_BEFORE:
            stream = (
                self._open()
                if self.container is None
                else stream_at(self.container, index.stream, index.info.path)
            )
            self.container.seek(
                index.keyframe_dts[order] - int(before / index.time_base),
                stream=stream,
                backward=True,
            )
            self.frames = self.container.decode(stream)
            for frame in self.frames:
                number = self.numbers.get(frame.pts)
                if number is not None and number >= key:
                    if number == key:
                        self.at = key
                        return self._sound(frame, key)
                    break
        self.can_seek = False
        self._restart()
        return None

    def _sound(self, frame: Any, number: int) -> Any:
        if frame.is_corrupt:
            raise _damaged(
                self.index, f"the frame at {self.index.info.timestamps_s[number]:.3f} s is broken"
            )
        if (
            frame.width,
            frame.height,
        ) != self.index.stored_wh or frame.format.name != self.index.pix_fmt:
            raise MediaError(
                f"the pictures change within {self.index.info.path}, from {self.index.stored_wh} {self.index.pix_fmt} "
                f"to {(frame.width, frame.height)} {frame.format.name}; convert it with ffmpeg",
                kind="unsupported",
                path=self.index.info.path,
            )
        return frame

    def _next(self) -> Any:
        """The next frame in order, checked: none skipped, none broken. None at the end."""
        for frame in self.frames:
            number = self.at + 1 if self.index.pts is None else self.numbers.get(frame.pts)
            if number is None or number <= self.at:
                continue  # before the first keyframe, or cut away by an edit list
            if number != self.at + 1:
                raise _damaged(
                    self.index,
                    f"no frame comes out at {self.index.info.timestamps_s[self.at + 1]:.3f} s",
                )
            self.at = number
            return self._sound(frame, number)
        return None

    def frame(self, number: int) -> Any:
        """Frame `number`, which must come after the one asked for before. Raises MediaError (corrupt)."""
        av = import_library("av")
        try:
            key = _keyframe_before(self.index, number)
            if self.container is None and (not self.can_seek or key <= 0):
                self._restart()
            elif self.can_seek and key > self.at + 1:
                found = self._seek(key)
                if found is not None and key == number:
                    return found
            found = None
            while self.at < number:
                found = self._next()
                if found is None:
                    raise _damaged(
                        self.index,
                        f"it ends after {self.at + 1} of {self.index.info.frames} frames",
                    )
            return found
        except (av.error.FFmpegError, IndexError) as err:
            # IndexError: PyAV, when a stream appears in the middle
            raise _damaged(
                self.index, f"after {self.index.info.timestamps_s[max(self.at, 0)]:.3f} s ({err})"
            ) from err


class _ToRgb:
    """Frames to 8-bit RGB by libavfilter's scale, as the ffmpeg program does it: colour space, range and chroma position of
    each frame count (a direct conversion places the chroma of 10-bit and odd-sized pictures elsewhere)."""

    def __init__(self, stream: Any) -> None:
        av = import_library("av")
        self.graph = av.filter.Graph()
        self.graph.threads = 1
        steps = [
            self.graph.add_buffer(template=stream, time_base=stream.time_base),
            self.graph.add("scale", "flags=bicubic"),
            self.graph.add("format", "rgb24"),
            self.graph.add("buffersink"),
        ]
        for before, after in itertools.pairwise(steps):
            before.link_to(after)
        self.graph.configure()

    def __call__(self, frame: Any) -> np.ndarray:
        self.graph.push(frame)
        return np.asarray(self.graph.pull().to_ndarray())


def _with_pyav(index: ClipIndex, wanted: Sequence[int], threads: int) -> Iterator[np.ndarray]:
    to_rgb = None
    with _Walker(index, threads) as walker:
        for number in wanted:
            frame = walker.frame(number)
            to_rgb = to_rgb or _ToRgb(stream_at(walker.container, index.stream, index.info.path))
            yield upright(to_rgb(frame), index.matrix)


def check_intact(index: ClipIndex, wanted: Sequence[int], threads: int = 1) -> None:
    """Decode every frame that the wanted ones are predicted from, without making pictures. Raises MediaError (corrupt)."""
    with _Walker(index, threads) as walker:
        for number in wanted:
            walker.frame(number)


def _wrong_frame(index: ClipIndex, decoder: str, number: int, found: object) -> MediaError:
    return MediaError(
        f"{decoder} gave another frame than number {number} of {index.info.path} ({found}); use decoder: pyav",
        kind="unsupported",
        path=index.info.path,
    )


def _frame_table(index: ClipIndex) -> str:
    """Our index as torchcodec reads one (JSON as by ffprobe): it then neither scans the file nor starts decoding where frames
    would be lost."""
    assert index.pts is not None
    lengths = np.append(np.diff(index.pts), max(1, round(1 / (index.info.fps * index.time_base))))
    keys = {0, *index.info.keyframes} if index.closed else {0}
    return json.dumps(
        {
            "frames": [
                {"pts": int(pts), "duration": int(length), "key_frame": int(n in keys)}
                for n, (pts, length) in enumerate(zip(index.pts, lengths, strict=True))
            ]
        }
    )


def _with_torchcodec(index: ClipIndex, wanted: Sequence[int], threads: int) -> Iterator[np.ndarray]:
    decoders = import_library("torchcodec.decoders")
    assert index.pts is not None
    reader = decoders.VideoDecoder(
        index.info.path,
        stream_index=index.stream,
        dimension_order="NHWC",
        num_ffmpeg_threads=threads,
        custom_frame_mappings=_frame_table(index),
    )
    for number in wanted:
        frame = reader.get_frame_at(number)
        if abs(frame.pts_seconds - int(index.pts[number]) * index.time_base) > 1e-6:
            raise _wrong_frame(index, "torchcodec", number, f"at {frame.pts_seconds} s")
        yield frame.data.numpy()


def _with_decord(index: ClipIndex, wanted: Sequence[int], threads: int) -> Iterator[np.ndarray]:
    decord = import_library("decord")
    reader = decord.VideoReader(index.info.path, ctx=decord.cpu(0), num_threads=threads)
    if len(reader) != index.info.frames:
        raise _wrong_frame(
            index, "decord", 0, f"it counts {len(reader)} frames instead of {index.info.frames}"
        )
    times = reader.get_frame_timestamp([0, *wanted])[:, 0]
    late = np.abs(times[1:] - times[0] - index.info.timestamps_s[list(wanted)]) > 1e-3
    if late.any():
        raise _wrong_frame(index, "decord", wanted[int(np.argmax(late))], "its times differ")
    at = 0
    for number in wanted:
        if index.closed:
            yield reader[number].asnumpy()
            continue
        while at < number:  # seeking loses frames in open groups of pictures
            reader.next()
            at += 1
        yield reader.next().asnumpy()
        at += 1


def _with_opencv(index: ClipIndex, wanted: Sequence[int], threads: int) -> Iterator[np.ndarray]:
    cv2 = import_library("cv2")
    reader = _CvReader(cv2, index, threads)
    try:
        for number in wanted:
            yield upright(reader.frame(number)[..., ::-1], index.matrix)
    finally:
        reader.close()


class _CvReader:
    """OpenCV read forward, each grabbed frame recognised by its time; a seek is kept only if it lands on a known frame."""

    def __init__(self, cv2: Any, index: ClipIndex, threads: int) -> None:
        self.cv2, self.index, self.threads = cv2, index, threads
        self.capture: Any = None
        self.at, self.offset = -1, 0.0
        self._open()

    def _open(self) -> None:
        self.close()
        cv2 = self.cv2
        self.capture = cv2.VideoCapture(
            self.index.info.path, cv2.CAP_FFMPEG, [cv2.CAP_PROP_N_THREADS, self.threads]
        )
        self.capture.set(cv2.CAP_PROP_ORIENTATION_AUTO, 0)
        if not self.capture.isOpened() or not self.capture.grab():
            raise MediaError(
                f"OpenCV cannot open {self.index.info.path}; use decoder: pyav",
                kind="unsupported",
                path=self.index.info.path,
            )
        self.at, self.offset = 0, self.capture.get(cv2.CAP_PROP_POS_MSEC) / 1e3

    def close(self) -> None:
        if self.capture is not None:
            self.capture.release()

    def _number(self) -> int:
        """Number of the frame grabbed last, by its time. Raises MediaError when no frame has that time."""
        times = self.index.info.timestamps_s
        time = self.capture.get(self.cv2.CAP_PROP_POS_MSEC) / 1e3 - self.offset
        nearest = int(np.clip(np.searchsorted(times, time), 1, max(len(times) - 1, 1)))
        nearest -= int(
            nearest >= len(times) or abs(times[nearest - 1] - time) <= abs(times[nearest] - time)
        )
        return nearest if abs(times[nearest] - time) <= 1e-3 else -1

    def frame(self, number: int) -> np.ndarray:
        key = _keyframe_before(self.index, number)
        if key > self.at + 1:
            self.capture.set(
                self.cv2.CAP_PROP_POS_MSEC, (self.index.info.timestamps_s[key] + self.offset) * 1e3
            )
            landed = self._number() if self.capture.grab() else -1
            if landed < 0 or landed > number:
                self._open()
            else:
                self.at = landed
        while self.at < number:
            if not self.capture.grab() or self._number() != self.at + 1:
                raise _wrong_frame(
                    self.index,
                    "OpenCV",
                    self.at + 1,
                    f"at {self.capture.get(self.cv2.CAP_PROP_POS_MSEC) / 1e3} s",
                )
            self.at += 1
        good, bgr = self.capture.retrieve()
        if not good:
            raise _wrong_frame(self.index, "OpenCV", number, "none at all")
        return np.asarray(bgr)


def refusal(index: ClipIndex, decoder: str) -> str:
    """Why `decoder` cannot give this clip's frames exactly; '' where it can."""
    if decoder == "pyav":
        return ""
    if index.pts is None:
        return "the file has no usable presentation times"
    if decoder != "torchcodec" and index.deep:
        return "it converts more than 8 bits a channel differently"
    if decoder == "opencv":
        if (
            index.colorspace not in _BT601
            and int(import_library("cv2").__version__.partition(".")[0]) < 5
        ):
            return "OpenCV before 5 converts every file as BT.601 and this one has another colour space"
        return "" if index.first_stream else "OpenCV shows another of the file's picture streams"
    if index.container not in _SEEKABLE:
        return f"it does not find frames again in this container ({index.container})"
    a, b, c, d = index.matrix
    if a * d - b * c < 0:
        return "the frames are stored mirrored"
    return "it converts odd sizes differently" if decoder == "decord" and index.odd_chroma else ""


DECODERS: dict[str, Callable[[ClipIndex, Sequence[int], int], Iterator[np.ndarray]]] = {
    "pyav": _with_pyav,
    "torchcodec": _with_torchcodec,
    "decord": _with_decord,
    "opencv": _with_opencv,
}
"""In the order in which "auto" takes them. Each yields upright uint8 frames [H, W, 3] for ascending, unrepeated numbers."""


def _failures(decoder: str) -> tuple[type[Exception], ...]:
    """What `decoder` raises when it cannot go on."""
    own = {"decord": ("decord", "DECORDError"), "opencv": ("cv2", "error")}.get(decoder)
    return (RuntimeError, IndexError, *((getattr(import_library(own[0]), own[1]),) if own else ()))


def decode_frames(
    index: ClipIndex, wanted: Sequence[int], decoder: str, threads: int = 1
) -> Iterator[np.ndarray]:
    """The frames `wanted` (ascending numbers, no repeats), upright, as uint8 [H, W, 3], one at a time.

    Raises MediaError: corrupt, unsupported (this decoder cannot give exactly these frames).
    """
    if index.pictures:
        yield from (read_picture(index, number) for number in wanted)
        return
    if decoder != "pyav":
        import_library({"opencv": "cv2", "torchcodec": "torchcodec.decoders"}.get(decoder, decoder))
    why = refusal(index, decoder)
    if why:
        raise MediaError(
            f"decoder {decoder} cannot read {index.info.path} exactly: {why}; use decoder: pyav",
            kind="unsupported",
            path=index.info.path,
        )
    if decoder == "pyav":
        yield from _with_pyav(index, wanted, threads)
        return
    check_intact(index, wanted, threads)
    try:
        yield from DECODERS[decoder](index, wanted, threads)
    except _failures(decoder) as err:
        raise MediaError(
            f"decoder {decoder} fails on {index.info.path} ({str(err)[-300:]}), which PyAV reads; use decoder: pyav",
            kind="unsupported",
            path=index.info.path,
        ) from err
