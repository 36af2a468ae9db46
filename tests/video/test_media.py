"""Pictures: every way of failing has its kind, every mode becomes upright RGB, sizes are those displayed."""

from __future__ import annotations

import io
import pickle
import struct
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mmrl.errors import MediaError
from mmrl.video.media import image_size, open_image, store_bytes


def _kind(path: Path | str, **options: int) -> str:
    with pytest.raises(MediaError) as caught:
        open_image(path, **options)
    assert str(path) in str(caught.value)
    assert pickle.loads(pickle.dumps(caught.value)).kind == caught.value.kind
    return caught.value.kind


def _corners(path: Path) -> Path:
    """64 x 32, left half red, right half blue, lower half darker: every rotation looks different."""
    pixels = np.zeros((32, 64, 3), np.uint8)
    pixels[:, :32, 0], pixels[:, 32:, 2] = 240, 240
    pixels[16:] //= 3
    Image.fromarray(pixels).save(path)
    return path


def test_failures_are_classified(tmp_path: Path) -> None:
    good = _corners(tmp_path / "good.png")
    (tmp_path / "empty.png").write_bytes(b"")
    (tmp_path / "text.png").write_text("no picture at all")
    (tmp_path / "half.png").write_bytes(good.read_bytes()[:-40])
    (tmp_path / "head.png").write_bytes(good.read_bytes()[:12])
    assert _kind(tmp_path / "none.png") == "missing"
    assert _kind("https://example.org/a.png") == "missing"
    assert _kind(tmp_path) == "unsupported"
    assert _kind(tmp_path / "empty.png") == "empty"
    assert _kind(tmp_path / "text.png") == "unsupported"
    assert _kind(tmp_path / "half.png") == "truncated"
    assert _kind(tmp_path / "head.png") == "truncated"
    assert _kind(good, max_pixels=64 * 32 - 1) == "too_large"
    assert open_image(good, max_pixels=64 * 32).size == (64, 32)


@pytest.mark.parametrize("keep", [0.2, 0.6, 0.95])
def test_a_truncated_jpeg_is_never_a_grey_picture(tmp_path: Path, keep: float) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (80, 80, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(noise).save(buffer, "JPEG")
    path = tmp_path / "cut.jpg"
    path.write_bytes(buffer.getvalue()[: int(len(buffer.getvalue()) * keep)])
    assert _kind(path) == "truncated"


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_a_bomb_is_refused_by_its_header(tmp_path: Path) -> None:
    def chunk(name: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        )

    for side in (12_000, 60_000):  # one that Pillow opens, one that Pillow refuses itself
        header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
        pixels = chunk(b"IDAT", zlib.compress(b"\0" * 99))
        bomb = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + pixels + chunk(b"IEND", b"")
        (tmp_path / "bomb.png").write_bytes(bomb)
        assert _kind(tmp_path / "bomb.png") == "too_large"


@pytest.mark.parametrize("size", [(1, 1), (1, 200), (200, 1), (20_000, 100)])
def test_extreme_but_usable_shapes_open(tmp_path: Path, size: tuple[int, int]) -> None:
    Image.new("RGB", size).save(tmp_path / "a.png")
    assert open_image(tmp_path / "a.png").size == size == image_size(tmp_path / "a.png")


@pytest.mark.parametrize("size", [(1, 201), (20_000, 99)])
def test_shapes_that_processors_refuse_are_refused_with_both_sides_named(
    tmp_path: Path, size: tuple[int, int]
) -> None:
    Image.new("RGB", size).save(tmp_path / "a.png")
    assert _kind(tmp_path / "a.png") == "unsupported"
    with pytest.raises(MediaError, match=f"{size[0]} x {size[1]}"):
        open_image(tmp_path / "a.png")


@pytest.mark.parametrize("suffix", ["jpg", "png", "tif", "webp"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_rotation_shows_the_same_scene_and_size(
    tmp_path: Path, suffix: str, orientation: int
) -> None:
    upright = Image.open(_corners(tmp_path / "upright.png")).convert("RGB")
    # Image.Transpose values that store the upright scene rotated
    undo = {2: 0, 3: 3, 4: 1, 5: 5, 6: 2, 7: 6, 8: 4}
    stored = upright.transpose(Image.Transpose(undo[orientation])) if orientation > 1 else upright
    exif = Image.Exif()
    exif[0x0112] = orientation
    options = {"jpg": {"quality": 95, "subsampling": 0}, "webp": {"lossless": True}}.get(suffix, {})
    stored.save(tmp_path / f"turned.{suffix}", exif=exif, **options)
    shown = open_image(tmp_path / f"turned.{suffix}")
    assert image_size(tmp_path / f"turned.{suffix}") == shown.size == (64, 32)
    assert np.abs(np.asarray(shown, int) - np.asarray(upright, int)).mean() < 4
    shown.save(tmp_path / "again.png")
    assert open_image(tmp_path / "again.png").size == (64, 32)


def test_sixteen_bits_are_scaled_not_clipped(tmp_path: Path) -> None:
    ramp = np.linspace(0, 65535, 256).astype(np.uint16)[None, :].repeat(4, 0)
    for name in ("deep.png", "deep.tif"):
        Image.fromarray(ramp).save(tmp_path / name)
        shown = np.asarray(open_image(tmp_path / name))
        assert shown.shape == (4, 256, 3) and (shown[0, :, 0] == np.arange(256)).all()


def test_floats_in_unit_range_are_scaled_and_others_refused(tmp_path: Path) -> None:
    Image.fromarray(np.full((2, 3), 0.5, np.float32)).save(tmp_path / "unit.tif")
    Image.fromarray(np.full((2, 3), 700.0, np.float32)).save(tmp_path / "wild.tif")
    assert open_image(tmp_path / "unit.tif").getpixel((0, 0)) == (128, 128, 128)
    assert _kind(tmp_path / "wild.tif") == "unsupported"


def test_alpha_and_palette_go_onto_white(tmp_path: Path) -> None:
    rgba = Image.new("RGBA", (4, 2), (255, 0, 0, 0))
    rgba.putpixel((0, 0), (255, 0, 0, 255))
    rgba.save(tmp_path / "rgba.png")
    rgba.save(tmp_path / "palette.gif")
    Image.new("LA", (4, 2), (0, 0)).save(tmp_path / "la.png")
    for name in ("rgba.png", "palette.gif"):
        shown = open_image(tmp_path / name)
        assert shown.mode == "RGB" and shown.getpixel((3, 1)) == (255, 255, 255)
        assert shown.getpixel((0, 0)) == (255, 0, 0)
    assert open_image(tmp_path / "la.png").getpixel((0, 0)) == (255, 255, 255)


def test_cmyk_bilevel_and_animation(tmp_path: Path) -> None:
    Image.new("CMYK", (8, 8), (0, 255, 255, 0)).save(tmp_path / "ink.jpg")
    red = open_image(tmp_path / "ink.jpg").getpixel((4, 4))
    assert red[0] > 200 and max(red[1:]) < 40
    Image.new("1", (8, 8), 1).save(tmp_path / "bits.png")
    assert open_image(tmp_path / "bits.png").getpixel((0, 0)) == (255, 255, 255)
    frames = [Image.new("RGB", (8, 8), color) for color in ("red", "blue")]
    frames[0].save(tmp_path / "film.gif", save_all=True, append_images=frames[1:])
    assert open_image(tmp_path / "film.gif").getpixel((0, 0)) == (255, 0, 0)


def test_stored_bytes_are_named_by_content_and_written_once(tmp_path: Path) -> None:
    data = _corners(tmp_path / "a.png").read_bytes()
    with ThreadPoolExecutor(8) as pool:
        paths = set(pool.map(lambda _: store_bytes(data, tmp_path / "store"), range(32)))
    path = paths.pop()
    assert not paths and Path(path).read_bytes() == data and path.endswith(".png")
    assert [p.name for p in (tmp_path / "store").iterdir()] == [Path(path).name]
    Path(path).write_bytes(data[:10])  # what a crash or a full disk leaves behind
    assert Path(store_bytes(data, tmp_path / "store")).read_bytes() == data
    assert store_bytes(data + b"x", tmp_path / "store") != path
    with pytest.raises(MediaError, match="found none"):
        store_bytes(b"", tmp_path)
