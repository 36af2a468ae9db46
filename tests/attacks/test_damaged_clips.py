"""Clips with flipped bits, cut or lying headers, lengths without end: frames or a MediaError of a kind, in bounded memory."""

from __future__ import annotations

import resource
import struct
from pathlib import Path

import numpy as np
import pytest

from mmrl.errors import MediaError
from mmrl.video.decode import probe, read_clip
from mmrl.video.sampling import FrameSampling

CLIP = Path(__file__).resolve().parents[2] / "assets" / "fixtures" / "video" / "counter.mp4"
FRAMES = 100
KINDS = {
    "missing",
    "empty",
    "truncated",
    "corrupt",
    "no_video",
    "unsupported",
    "too_short",
    "too_large",
}


def outcome(path: Path) -> str:
    """'frames' or the kind of the error; anything else that is raised fails the test."""
    try:
        info = probe(path)
        clip = read_clip(path, FrameSampling(kind="uniform", num_frames=4))
    except MediaError as error:
        assert error.kind in KINDS
        return error.kind
    assert (
        0 < info.frames <= FRAMES
        and np.isfinite([info.duration_s, info.fps]).all()
        and info.duration_s > 0
    )
    assert np.isfinite(info.timestamps_s).all() and (np.diff(info.timestamps_s) > 0).all()
    assert clip.rgb_THWC.dtype == np.uint8 and len(clip.rgb_THWC) == len(clip.indices)
    return "frames"


def box(data: bytearray, name: bytes) -> int:
    return data.index(name)


@pytest.mark.parametrize("part", ["pictures", "index"])
def test_flipped_bits(part: str, tmp_path: Path) -> None:
    """In the middle of H.264 and in the moov box. A flip may be without effect; it must not crash, hang or give a frame twice."""
    data, rng, found = CLIP.read_bytes(), np.random.default_rng(7), set()
    moov = data.index(b"moov") - 4
    size = struct.unpack(">I", data[moov : moov + 4])[0]
    low, high = (moov + 8, moov + size) if part == "index" else (moov + size, len(data))
    for number in range(30):
        damaged = bytearray(data)
        for _ in range(1 if number % 2 else 12):
            damaged[int(rng.integers(low, high))] ^= 1 << int(rng.integers(8))
        path = tmp_path / f"{number}.mp4"
        path.write_bytes(damaged)
        found.add(outcome(path))
    assert "corrupt" in found


def test_a_clip_that_ends_anywhere(tmp_path: Path) -> None:
    data = CLIP.read_bytes()
    for length in range(0, len(data) - 1, 800):
        (tmp_path / f"{length}.mp4").write_bytes(data[:length])
        assert outcome(tmp_path / f"{length}.mp4") in ("truncated", "empty")


def _set(data: bytearray, name: bytes, offset: int, *values: int) -> None:
    place = box(data, name) + offset
    data[place : place + 4 * len(values)] = struct.pack(f">{len(values)}I", *values)


LIES = {
    "2^31 frames in the table of times": [(b"stts", 12, 2**31 - 1)],
    "2^31 frames of a byte": [(b"stsz", 8, 1, 2**31 - 1)],
    "2^32 frames": [(b"stsz", 12, 2**32 - 1)],
    "no time base": [(b"mdhd", 16, 0)],
    "a time base of 2^32": [(b"mdhd", 16, 2**32 - 1)],
    "a film's time base of 0": [(b"mvhd", 16, 0)],
    "no duration": [(b"mdhd", 20, 0), (b"mvhd", 20, 0)],
    "a duration of 2^32": [
        (b"mdhd", 20, 2**32 - 1),
        (b"mvhd", 20, 2**32 - 1),
        (b"tkhd", 24, 2**32 - 1),
    ],
    "frames of 2^31 ticks": [(b"stts", 16, 2**31 - 1)],
    "frames of no time": [(b"stts", 16, 0)],
    "50 million frames of a byte": [
        (b"stsz", 8, 1, 50_000_000),
        (b"stts", 12, 50_000_000),
        (b"stsc", 16, 50_000_000),
    ],
}


@pytest.mark.parametrize("lie", LIES)
def test_a_header_that_lies(lie: str, tmp_path: Path) -> None:
    data = bytearray(CLIP.read_bytes())
    for name, offset, *values in LIES[lie]:
        _set(data, name, offset, *values)
    (tmp_path / "x.mp4").write_bytes(data)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    outcome(tmp_path / "x.mp4")
    grown_gib = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2**20
    assert grown_gib < 1.0, f"{len(data):,} bytes took {grown_gib:.1f} GiB"
