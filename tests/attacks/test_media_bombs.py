"""Pictures and clips that say one thing and are another, or cost far more than their bytes: refused by their headers."""

from __future__ import annotations

import os
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mmrl.errors import MediaError
from mmrl.video import file_identity
from mmrl.video.bounds import ClipBounds, bounds, set_bounds
from mmrl.video.decode import probe, read_clip
from mmrl.video.media import open_image
from mmrl.video.probing import forget
from mmrl.video.sampling import FrameSampling
from scripts._torture_trust_pictures import progressive_jpeg
from tests.kits.clip_kit import make_clip


@pytest.fixture(autouse=True)
def _own_bounds() -> object:
    before = bounds()
    forget()
    yield before
    set_bounds(before)
    forget()


EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 40 40\n%%EndComments\nshowpage\n%%EOF\n"


def test_postscript_starts_no_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Ghostscript that would say so stands ready; Pillow's reader of EPS runs the first one it finds."""
    from PIL import EpsImagePlugin

    program, ran = tmp_path / "gs", tmp_path / "ran"
    program.write_text(f"#!/bin/sh\ntouch {ran}\n", encoding="utf-8")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    for name in ("gs_binary", "gs_windows_binary"):
        monkeypatch.setattr(EpsImagePlugin, name, None)
    (tmp_path / "a.png").write_bytes(EPS)
    with pytest.raises(MediaError, match="unknown content"):
        open_image(tmp_path / "a.png")
    assert not ran.exists()


@pytest.mark.parametrize("name", ["ppm", "ico", "tga", "pcx", "dds", "sgi", "icns"])
def test_formats_that_are_not_listed_are_refused(name: str, tmp_path: Path) -> None:
    path = tmp_path / f"a.{name}"
    Image.new("RGB", (32, 32)).save(path)
    with pytest.raises(MediaError, match="unknown content"):
        open_image(path)


@pytest.mark.parametrize("name", ["png", "jpg", "webp", "gif", "bmp", "tif"])
def test_listed_formats_are_opened(name: str, tmp_path: Path) -> None:
    path = tmp_path / f"a.{name}"
    Image.new("RGB", (32, 24), (10, 20, 30)).save(path)
    assert open_image(path).size == (32, 24)


def with_scans(folder: Path, count: int) -> Path:
    path = folder / f"{count}.jpg"
    path.write_bytes(progressive_jpeg(64, count))
    return path


def test_a_progressive_picture_of_thousands_of_scans_is_refused(tmp_path: Path) -> None:
    """Each scan is a pass over all pixels and has 20 bytes here: 250 kB hold 10,000 of them."""
    plain = open_image(with_scans(tmp_path, 0))
    assert np.array_equal(np.asarray(open_image(with_scans(tmp_path, 60))), np.asarray(plain)), (
        "the passes change nothing"
    )
    for count in (100, 5000):
        with pytest.raises(MediaError, match="at most 100 scans") as caught:
            open_image(with_scans(tmp_path, count))
        assert caught.value.kind == "unsupported"


def test_deep_grey_takes_little_more_memory_than_it_has(tmp_path: Path) -> None:
    """Two copies as float64, 16 bytes a pixel, before."""
    path, side = tmp_path / "deep.png", 1500
    values = (np.arange(side * side, dtype=np.uint32) % 65536).astype(np.uint16).reshape(side, side)
    Image.fromarray(values).save(path)
    tracemalloc.start()
    picture = open_image(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 10 * side * side
    grey = np.asarray(picture)[..., 0]
    assert np.array_equal(grey, np.rint(values * (255.0 / 65535.0)).astype(np.uint8))


def lying_clip(folder: Path, side: int, claimed: int) -> Path:
    """A QuickTime file of PNG frames of side x side whose header says claimed x claimed."""
    import av

    path = folder / f"lies-{side}-{claimed}.mov"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("png", rate=2)
        stream.width = stream.height = side
        stream.pix_fmt = "rgb24"
        frame = av.VideoFrame.from_ndarray(np.zeros((side, side, 3), np.uint8), format="rgb24")
        for packet in [p for _ in range(3) for p in stream.encode(frame)] + stream.encode(None):
            container.mux(packet)
    data = bytearray(path.read_bytes())
    entry = data.index(b"png ", data.index(b"stsd"))
    assert int.from_bytes(data[entry + 28 : entry + 30], "big") == side
    data[entry + 28 : entry + 32] = claimed.to_bytes(2, "big") * 2
    path.write_bytes(data)
    return path


def test_frames_too_large_are_refused_before_they_are_decoded(tmp_path: Path) -> None:
    path = lying_clip(tmp_path, 128, 128)
    assert probe(path).width == 128
    forget()
    set_bounds(ClipBounds(pixels=128 * 128 - 1))
    with pytest.raises(MediaError, match=r"(more than|at most) 16,383 pixels"):
        probe(path)


def test_what_the_stream_says_counts_too(tmp_path: Path) -> None:
    """A header of 16 x 16 over frames of 640 x 640: FFmpeg's decoder itself is bounded."""
    path = lying_clip(tmp_path, 640, 16)
    set_bounds(ClipBounds(pixels=100_000))
    with pytest.raises(MediaError):
        read_clip(path, FrameSampling(kind="uniform", num_frames=2))


def test_frames_are_counted_while_the_index_is_read(tmp_path: Path) -> None:
    path = make_clip(tmp_path, "many")
    frames = probe(path).frames
    forget()
    set_bounds(ClipBounds(frames=frames - 1))
    with pytest.raises(MediaError, match=f"at most {frames - 1} frames") as caught:
        probe(path)
    assert caught.value.kind == "too_large"


def test_digests_of_files_that_are_gone_are_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server sees a new path per request; they were all remembered."""
    monkeypatch.setattr(file_identity, "_MOST_REMEMBERED", 10)
    monkeypatch.setattr(file_identity, "_SETTLED_NS", -(10**18))
    monkeypatch.setattr(file_identity, "_remembered", {})
    for n in range(40):
        (tmp_path / f"{n}").write_bytes(b"%d" % n)
        file_identity.digest_of_content(tmp_path / f"{n}")
    assert list(file_identity._remembered) == [str(tmp_path / f"{n}") for n in range(30, 40)]
