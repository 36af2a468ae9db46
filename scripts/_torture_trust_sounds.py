"""Sounds that claim, or unpack to, far more than they weigh, sent to a model that hears. See scripts/torture_trust.py."""

from __future__ import annotations

import contextlib
import io
import struct
import tempfile
from collections.abc import Iterator
from typing import Any

import numpy as np

from scripts._serve_kit import ask
from scripts._torture_trust_serve import TEXT, data_url, stalling

__all__ = ["ATTACKS", "endless_flac", "wav"]

_HOUR_S = 3600
_MOST_S = 30  # that the tiny model hears
# four bodies of 195 MiB are held, and who reads one has it as bytes, as text, as the part of it that is base64, and as a file, with
# the next one's at its heels
_HELD_MIB = 2300.0
_UNTOLD = 0xFFFFFFFF  # what a program that writes into a pipe puts for a length


@contextlib.contextmanager
def hearing() -> Iterator[str]:
    """The folder of a tiny model that hears."""
    from mmrl.policy.tiny import TinySpec, build_tiny

    spec = TinySpec(arch="qwen2_5_omni", hidden=64, heads=2, kv=1, vision_hidden=32, vision_heads=2)
    with tempfile.TemporaryDirectory() as folder:
        for part in build_tiny(spec):
            part.save_pretrained(folder)
        yield folder


def wav(claimed: int, held: int, rate: int = 16000) -> bytes:
    """A WAV file of silence, mono in 16 bits, whose header claims `claimed` bytes of samples and that holds `held`."""
    whole = _UNTOLD if claimed == _UNTOLD else claimed + 36
    form = struct.pack("<HHIIHH", 1, 1, rate, 2 * rate, 2, 16)
    head = b"RIFF" + struct.pack("<I", whole) + b"WAVEfmt " + struct.pack("<I", len(form)) + form
    return head + b"data" + struct.pack("<I", claimed) + bytes(held)


def endless_flac(seconds: float, rate: int, channels: int, told: bool = False) -> bytes:
    """FLAC of silence, some ten bytes for thousands of samples, which says how long it is only where it is `told`."""
    import av

    stream, layout = io.BytesIO(), {1: "mono", 2: "stereo", 8: "7.1"}[channels]
    with av.open(stream, "w", format="flac") as container:
        out = container.add_stream("flac", rate=rate, layout=layout)
        out.codec_context.format, out.codec_context.options = "s16", {"compression_level": "0"}
        size, done = 1 << 16, 0
        resampler = av.AudioResampler("s16", layout, rate, out.codec_context.frame_size or None)
        silence = np.zeros((1, size * channels), np.int16)
        while done < seconds * rate:
            frame = av.AudioFrame.from_ndarray(silence, format="s16", layout=layout)
            frame.sample_rate, frame.pts = rate, done
            done += size
            for piece in resampler.resample(frame):
                container.mux(out.encode(piece))
        container.mux(out.encode(None))
    data = bytearray(stream.getvalue())
    if not told:
        data[21] &= 0xF0  # 36 bits, the number of samples: none told
        data[22:26] = bytes(4)
    return bytes(data)


def _said(data: bytes, kind: str) -> bytes:
    part: dict[str, Any] = {"type": "audio_url", "audio_url": {"url": data_url(kind, data)}}
    return ask([part, TEXT], max_tokens=1)


ATTACKS = [
    stalling(
        "serve_sound_claims",
        "a WAV of a second whose header claims ten hours",
        lambda: _said(wav(10 * _HOUR_S * 32000, 32000), "audio/wav"),
        model=hearing,
    ),
    stalling(
        "serve_sound_hours",
        "a WAV of 80 minutes whose header tells no length",
        lambda: _said(wav(_UNTOLD, 4800 * 32000), "audio/wav"),
        model=hearing,
        growth_mib=_HELD_MIB,
    ),
    stalling(
        "serve_sound_endless",
        "ten hours of compressed silence that tell no length",
        lambda: _said(endless_flac(10 * _HOUR_S, 16000, 1), "audio/flac"),
        model=hearing,
    ),
    stalling(
        "serve_sound_dense",
        "compressed silence as long as the model hears, 655,350 samples per second in 8 channels",
        lambda: _said(endless_flac(_MOST_S - 1, 655350, 8), "audio/flac"),
        statuses=(200,),
        model=hearing,
    ),
]
