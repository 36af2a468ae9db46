"""Sounds: an audio file, or the sound of a clip, as the samples and frames that a model hears.

    samples_N = read_audio("speech.mp3", rate=16000, max_seconds=300.0)      # float32, mono
    frames_nD = MelReader(processor.feature_extractor).read(samples_N)       # log-mel, exactly what the processor makes

PyAV decodes. Channels are averaged and the result is resampled (FFmpeg's swresample) to the rate that the processor wants; nothing
is cut, padded with silence or repaired: every failure is a MediaError whose kind says what is wrong (missing, empty, truncated,
corrupt, no_audio, unsupported, too_short, too_long). How long a file says that it is, is compared with the limit before anything is
decoded, and what comes out of it while it is decoded; sound that is missing by the times of its frames or by the length that the
file declares is an error, too.

    python -c "from mmrl.video.audio import probe_audio; print(probe_audio('speech.mp3'))"

Legend: N samples, n frames, D mel bins.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from mmrl.errors import MediaError
from mmrl.video.bounds import check_declared_frames
from mmrl.video.containers import is_cut, mp3_frames
from mmrl.video.probing import first_bytes, import_library, open_with_av

if TYPE_CHECKING:
    import torch

__all__ = [
    "AudioInfo",
    "AudioReader",
    "MelReader",
    "SoundCodec",
    "probe_audio",
    "read_audio",
    "tokens_of",
    "too_long",
]

_SILENCE = -1.5  # log-mel of no sound at all: (log10(1e-10) + 4) / 4
_LEAST_FRAMES = 100
_RATES = (
    1000,
    768_000,
)  # samples per second; another rate would ask the resampler for a filter without bound
_MOST_CHANNELS = 64
_LEAST_SLACK_S, _SLACK_FRAMES = 0.1, 2  # by which what a header declares may exceed what is heard
_CLOCK = re.compile(r"(\d+):(\d\d):(\d\d(?:\.\d+)?)")
_SIGNATURES = (b"fLaC", b"RIFF", b"OggS", b"ID3")
_UNTOLD = 0x7FFFF000  # a WAV written into a pipe declares no length, or one from here on
_EXACT = {"mov", "matroska", "ogg", "flac", "mp3"}
"""Containers that say how long their sound is: Ogg by its last page, MP3 where it has a header of its own. Of others
FFmpeg guesses by bytes per second, or is_cut has looked at them."""


@dataclass(frozen=True)
class AudioInfo:
    """What an audio file's header says: seconds (None where it does not tell), samples per second, channels, name of the codec."""

    path: str
    duration_s: float | None
    rate: int
    channels: int
    codec: str


def _head(path: str) -> bytes:
    """First bytes of the file. Raises MediaError where there is none to read."""
    if not os.path.exists(path):
        hint = "download it first, addresses are not fetched" if "://" in path else "check the path"
        raise MediaError(
            f"expected an audio file, found none at {path}; {hint}", kind="missing", path=path
        )
    if not os.path.isfile(path):  # opening a pipe may wait for ever
        what = "a folder" if os.path.isdir(path) else "a pipe or device"
        raise MediaError(
            f"expected an audio file, found {what}: {path}; give the file itself",
            kind="unsupported",
            path=path,
        )
    return first_bytes(path, "an", "audio file")


def _is_cut(path: str, head: bytes) -> bool:
    return not _is_untold(head) and is_cut(path, head)


def _is_untold(head: bytes) -> bool:
    told = int.from_bytes(head[4:8].ljust(4, b"\0"), "little")
    return head.startswith(b"RIFF") and (told == 0 or told >= _UNTOLD)


def _truncated(path: str, why: object) -> MediaError:
    return MediaError(
        f"expected a complete audio file, found one that ends too early: {path} ({why}); copy or download it again",
        kind="truncated",
        path=path,
    )


def _corrupt(path: str, why: object) -> MediaError:
    return MediaError(
        f"expected sound samples, found damage in {path} ({why}); copy it again, or convert it with ffmpeg",
        kind="corrupt",
        path=path,
    )


def too_long(path: str, found: str, most: float) -> MediaError:
    """The error of a sound that lasts longer than `most` seconds."""
    return MediaError(
        f"expected at most {most:g} s of sound, found {found} in {path}; cut it, or raise data.audio.max_seconds as far as the "
        "model's processor goes",
        kind="too_long",
        path=path,
    )


class _Opened:
    """An open file with the audio stream that is heard; a context manager."""

    def __init__(self, path: str) -> None:
        self.path, self.av = path, import_library("av")
        self.head = _head(path)
        check_declared_frames(path, self.head)
        try:
            self.container = open_with_av(self.av, path)
        except (self.av.error.FFmpegError, ValueError, OSError) as err:
            if _is_cut(path, self.head):
                raise _truncated(path, err) from err
            if self.head.startswith(_SIGNATURES):
                raise _corrupt(path, f"its header is broken: {err}") from err
            raise MediaError(
                f"expected an audio file (wav, flac, mp3, ogg, m4a, ...), found unknown content in {path} ({err}); convert it "
                "with ffmpeg",
                kind="unsupported",
                path=path,
            ) from err

    def __enter__(self) -> _Opened:
        return self

    def __exit__(self, *_: object) -> None:
        self.container.close()

    @property
    def stream(self) -> Any:
        """The stream that is heard. Raises MediaError."""
        found = self.container.streams.best("audio")
        if found is None and _is_cut(self.path, self.head):
            raise _truncated(self.path, "its list of streams is incomplete")
        if found is None:
            raise MediaError(
                f"expected a file with sound, found no audio stream in {self.path}; leave the row out or give another file",
                kind="no_audio",
                path=self.path,
            )
        if found.codec_context is None or not found.codec_context.sample_rate:
            raise MediaError(
                f"expected sound that FFmpeg decodes, found a codec it does not know in {self.path}; convert it to flac",
                kind="unsupported",
                path=self.path,
            )
        rate, channels = found.codec_context.sample_rate, found.codec_context.channels
        if not _RATES[0] <= rate <= _RATES[1] or not 1 <= channels <= _MOST_CHANNELS:
            raise MediaError(
                f"expected {_RATES[0]} to {_RATES[1]} samples per second in 1 to {_MOST_CHANNELS} channels, found {rate} in "
                f"{channels}: {self.path}; convert it with ffmpeg",
                kind="unsupported",
                path=self.path,
            )
        return found

    def seconds(self, stream: Any) -> float | None:
        """How long the file says that it is."""
        if _is_untold(self.head):
            return None
        if stream.duration is not None and stream.time_base is not None:
            return float(stream.duration * stream.time_base)
        whole = self.container.duration
        return None if whole is None else whole / float(self.av.time_base)

    def declared(self, stream: Any) -> float | None:
        """How long the sound must be by what its file says exactly; None where it says nothing."""
        name = self.container.format.name.split(",")[0]
        if name not in _EXACT or (name == "mp3" and mp3_frames(self.path) is None):
            return None
        if name != "matroska":
            told = stream.duration
            return None if told is None else float(told * stream.time_base)
        if found := _CLOCK.fullmatch(stream.metadata.get("DURATION", "")):
            return int(found[1]) * 3600 + int(found[2]) * 60 + float(found[3])
        # of all its streams, of which a sound may be the shortest
        return self.seconds(stream) if len(self.container.streams) == 1 else None


def probe_audio(path: str | os.PathLike[str]) -> AudioInfo:
    """Facts of an audio file, or of a clip's sound, from its header. Raises MediaError; MissingExtraError without PyAV."""
    name = os.fspath(path)
    with _Opened(name) as opened:
        stream = opened.stream
        context = stream.codec_context
        return AudioInfo(
            name, opened.seconds(stream), context.sample_rate, context.channels, context.name
        )


class _Heard:
    """How much of a stream was decoded, and how much of it is missing by the times of its frames."""

    def __init__(self) -> None:
        self.longest = 0  # samples of a codec frame
        self.until: float | None = None
        self.lost = 0.0

    def hear(self, frame: Any) -> None:
        """Count a decoded frame."""
        length, self.longest = frame.samples / frame.sample_rate, max(self.longest, frame.samples)
        begin = self.until
        if frame.pts is not None and frame.time_base is not None:
            begin = float(frame.pts * frame.time_base)
        # times of many containers are rounded, and those of cameras drift
        if begin is not None and self.until is not None:
            gap = begin - self.until
            self.lost += gap if gap > self.longest / frame.sample_rate / 2 else 0.0
        self.until = None if begin is None else begin + length


def _check_whole(opened: _Opened, stream: Any, heard: _Heard, seconds: float) -> None:
    """Raises MediaError for fewer seconds of sound than the file says that it holds. What an encoder put before and behind it may
    be counted there: two codec frames."""
    told, frame_s = opened.declared(stream), heard.longest / stream.codec_context.sample_rate
    if told is None:
        return
    slack = 0.5 / stream.codec_context.sample_rate
    if opened.container.format.name != "flac":
        slack = max(_LEAST_SLACK_S, _SLACK_FRAMES * frame_s)
    if max(seconds, heard.until or 0.0) < told - slack:
        raise _truncated(opened.path, f"{seconds:.3f} s of {told:.3f}")


def _decoded(opened: _Opened, stream: Any, max_seconds: float) -> Iterator[np.ndarray]:
    """Mono float32 pieces at the file's own rate. Raises MediaError, also for sound that is missing in the middle or at the end."""
    av, path = opened.av, opened.path
    stream.codec_context.thread_count = 1
    # packed, not planar: of planar sound in 8 channels or more PyAV reads beyond the list of planes, and ends the process
    to_float, count, rate = av.AudioResampler(format="flt"), 0, stream.codec_context.sample_rate
    heard = _Heard()

    def mono(frame: Any) -> Iterator[np.ndarray]:
        nonlocal count
        for whole in to_float.resample(frame):
            packed_NC = whole.to_ndarray().reshape(-1, whole.layout.nb_channels)
            # in the order in which planes were added up: a sound's mean is the same to the last bit
            values_CN = np.ascontiguousarray(packed_NC.T)
            if not np.isfinite(values_CN).all():
                raise _corrupt(path, "samples that are not finite numbers")
            count += values_CN.shape[1]
            if count > max_seconds * rate:
                raise too_long(path, "more", max_seconds)
            yield values_CN.mean(0, dtype=np.float32)

    try:
        for frame in opened.container.decode(stream):
            if frame.is_corrupt or frame.sample_rate != rate:
                raise _corrupt(path, f"after {count / rate:.3f} s")
            heard.hear(frame)
            if heard.lost > heard.longest / rate:
                raise _corrupt(
                    path, f"after {count / rate:.3f} s {heard.lost:.3f} s of it are missing"
                )
            yield from mono(frame)
        yield from mono(None)
    except (av.error.FFmpegError, ValueError, IndexError) as err:
        if isinstance(err, MediaError):
            raise
        raise _corrupt(path, f"after {count / rate:.3f} s: {err}") from err
    _check_whole(opened, stream, heard, count / rate)


def _resampled(av: Any, pieces: Iterator[np.ndarray], rate: int, wanted: int) -> np.ndarray:
    if rate == wanted:
        return np.concatenate([np.zeros(0, np.float32), *pieces])
    resampler, found, count = av.AudioResampler("flt", "mono", wanted), [], 0
    for piece in pieces:
        frame = av.AudioFrame.from_ndarray(piece[None], format="flt", layout="mono")
        frame.sample_rate, frame.pts = rate, count
        count += len(piece)
        found += [f.to_ndarray()[0] for f in resampler.resample(frame)]
    found += [f.to_ndarray()[0] for f in resampler.resample(None)] if count else []
    return np.concatenate([np.zeros(0, np.float32), *found])


def read_audio(path: str | os.PathLike[str], *, rate: int, max_seconds: float) -> np.ndarray:
    """The sound of a file as float32 samples (N,), mono, `rate` of them per second; at most `max_seconds` of it.

    Channels are averaged. Raises MediaError: missing, empty, truncated, corrupt, no_audio, unsupported, too_long; MissingExtraError
    without PyAV.
    """
    name = os.fspath(path)
    with _Opened(name) as opened:
        stream = opened.stream
        if _is_cut(name, opened.head):
            raise _truncated(name, "its header declares more")
        told = opened.seconds(stream)
        if told is not None and told > max_seconds + 0.1:  # times in a header are rounded
            raise too_long(name, f"{told:.1f} s", max_seconds)
        own = stream.codec_context.sample_rate
        samples_N = _resampled(opened.av, _decoded(opened, stream, max_seconds), own, rate)
    if not len(samples_N):
        raise MediaError(
            f"expected sound, found no sample in {name}; leave the row out or give another file",
            kind="empty",
            path=name,
        )
    return samples_N


def tokens_of(frames: int) -> int:
    """Tokens that the language model hears of so many frames, which the audio tower halves twice (Qwen2.5-Omni's)."""
    return ((frames - 1) // 2 + 1 - 2) // 2 + 1


class AudioReader(Protocol):
    """What the visual cache asks of a family's feature extractor. Picklable: media workers have one of their own."""

    @property
    def part(self) -> Any:
        """The processor's feature extractor."""

    @property
    def rate(self) -> int:
        """Samples per second that it wants."""

    @property
    def most_seconds(self) -> float:
        """The longest sound that it takes whole."""

    def read(self, samples_N: np.ndarray) -> torch.Tensor:
        """float32 frames (n, D) of mono samples at that rate. Raises MediaError for too few of them."""

    def frames(self, samples: int) -> int:
        """How many frames so many samples become, about."""

    def tokens(self, frames: int) -> int:
        """How many tokens so many frames become."""


class MelReader:
    """A feature extractor that makes log-mel frames, 100 a second, as Whisper's and Qwen2.5-Omni's do."""

    def __init__(self, part: Any) -> None:
        self.part = part
        self.rate = int(part.sampling_rate)
        self.most_seconds = part.n_samples / part.sampling_rate

    def read(self, samples_N: np.ndarray) -> torch.Tensor:
        """See AudioReader. The frames are those of the processor's call, which pads with silence up to the longest sound: here only
        so far that all frames in which there is sound are made, whose loudest counts for each. Frames of padding are left out
        again."""
        hop = self.part.hop_length
        whole = -(-len(samples_N) // hop) + -(-self.part.n_fft // hop) + 1
        # products of fewer or odd columns may be rounded otherwise than those of long ones
        whole = -(-max(whole, _LEAST_FRAMES) // 16) * 16
        out = self.part(
            samples_N,
            sampling_rate=self.rate,
            padding="max_length",
            max_length=min(whole * hop, self.part.n_samples),
            return_attention_mask=True,
            return_tensors="pt",
        )
        frames = int(out["attention_mask"][0].sum())
        if self.tokens(frames) < 1:
            raise MediaError(
                f"expected sound of at least one token (more than 20 ms), found {len(samples_N) / self.rate:.3f} s; "
                "leave the row out",
                kind="too_short",
            )
        return out["input_features"][0, :, :frames].T.contiguous()

    def frames(self, samples: int) -> int:
        """See AudioReader."""
        return samples // int(self.part.hop_length)

    def tokens(self, frames: int) -> int:
        """See AudioReader."""
        return tokens_of(frames)


class SoundCodec:
    """Frames of sounds in the visual cache: kept as the extractor made them. The grid is (frames, 1, 1)."""

    def __init__(self, reader: AudioReader) -> None:
        self._reader = reader

    @property
    def layout(self) -> SoundCodec:
        """Counts tokens, as a PatchLayout does."""
        return self

    def tokens(self, grid_thw: tuple[int, int, int]) -> int:
        """How many tokens the language model hears."""
        return self._reader.tokens(grid_thw[0])

    def pack(self, frames_nD: torch.Tensor) -> torch.Tensor:
        """As they are."""
        return frames_nD

    def unpack(self, frames_nD: torch.Tensor) -> torch.Tensor:
        """As they are."""
        return frames_nD

    def grey(self, frames_nD: torch.Tensor) -> torch.Tensor:
        """As many frames of silence."""
        import torch

        return torch.full_like(frames_nD, _SILENCE)
