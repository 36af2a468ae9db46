"""What tests of sounds share: tones, and files of them in any format that FFmpeg writes."""

from __future__ import annotations

from pathlib import Path

import numpy as np

__all__ = ["tone", "write_sound"]

_CODECS = {
    ".wav": ("pcm_s16le", "s16"),
    ".flac": ("flac", "s16"),
    ".mp3": ("libmp3lame", "fltp"),
    ".ogg": ("libopus", "flt"),
    ".m4a": ("aac", "fltp"),
    ".aac": ("aac", "fltp"),
    ".mka": ("aac", "fltp"),
    ".ts": ("aac", "fltp"),
    ".webm": ("libopus", "flt"),
}


def tone(seconds: float, rate: int = 16000, hertz: float = 440.0, channels: int = 1) -> np.ndarray:
    """A rising tone, (channels, N) float32 in -0.5..0.5; each channel begins elsewhere."""
    times = np.arange(round(seconds * rate)) / rate
    phases = np.arange(channels)[:, None]
    swept = 2 * np.pi * hertz * (times + 0.1 * times**2)
    return (0.5 * np.sin(swept + phases)).astype(np.float32)


def write_sound(
    path: Path,
    samples_CN: np.ndarray,
    rate: int = 16000,
    codec: tuple[str, str] | None = None,
    options: dict[str, str] | None = None,
) -> str:
    """Write samples (channels, N) to `path` by its ending, or with `codec` (FFmpeg's encoder, sample format) and the encoder's
    `options`; returns the path."""
    import av

    encoder, form = codec or _CODECS[path.suffix]
    layout = {1: "mono", 2: "stereo"}[len(samples_CN)]
    with av.open(str(path), "w") as container:
        stream = container.add_stream(encoder, rate=rate, layout=layout)
        stream.codec_context.format = form
        stream.codec_context.options = options or {}
        frame = av.AudioFrame.from_ndarray(
            np.ascontiguousarray(samples_CN, dtype=np.float32), format="fltp", layout=layout
        )
        frame.sample_rate, frame.pts = rate, 0
        resampler = av.AudioResampler(form, layout, rate, stream.codec_context.frame_size or None)
        for piece in [*resampler.resample(frame), *resampler.resample(None)]:
            container.mux(stream.encode(piece))
        container.mux(stream.encode(None))
    return str(path)
