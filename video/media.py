"""Pictures on disk -> RGB pictures in memory, with every way of failing named.

One place opens pictures, so that rewards, readers, the policy and the report agree on what a picture is and how large
it is: *as displayed*, after the rotation that its EXIF orientation tag asks for, or as stored where the data count pixels of
the file (data.image.orientation). Nothing is repaired or replaced silently: what cannot be shown raises MediaError with a
kind: missing, empty, truncated, unsupported, too_large.

    python -c "from mmrl.video.media import image_size; print(image_size('photo.jpg'))"
"""

from __future__ import annotations

import hashlib
import os
import stat
import struct
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from mmrl.errors import MediaError

if TYPE_CHECKING:
    from PIL.Image import Image

    from mmrl.types import ImageSize, Sample, VideoSize

__all__ = [
    "FORMATS",
    "ImageFacts",
    "MAX_ASPECT_RATIO",
    "MAX_PIXELS",
    "ORIENTATION_PARAM",
    "Orientation",
    "image_facts",
    "image_overrides",
    "image_size",
    "open_image",
    "orientation_of",
    "sizes_on_disk",
    "store_bytes",
]

Orientation = Literal["displayed", "stored"]
"""How a picture with an EXIF orientation tag is read: turned as viewers show it, or with its rows and columns as in the file."""

ORIENTATION_PARAM = "image_orientation"
"""Key of Sample.params, 'stored' where a picture with such a tag is to be read as stored; readers set it."""

MAX_PIXELS = 89_478_485
"""Default limit on width * height: a quarter of a GiB of RGB, the bound at which Pillow itself suspects a bomb."""

MAX_ASPECT_RATIO = 200.0
"""Qwen2-VL, Qwen2.5-VL and Qwen3-VL processors refuse a picture whose long side exceeds 200 short sides."""

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
"""Formats that are opened, by Pillow's names. Its others are never tried: some start programs (EPS: Ghostscript), and the readers
of rare ones are the least tested code that a stranger's bytes can reach."""

_ORIENTATION_TAG = 0x0112
_STRIP = 1 << 18  # deep pixels converted at a time
_MOST_SCANS = 100  # of a progressive JPEG; encoders write some 10. Each is a pass over the whole picture and may have 20 bytes
_SIGNATURES = {
    b"\x89PNG\r\n\x1a\n": ".png",
    b"\xff\xd8\xff": ".jpg",
    b"GIF87a": ".gif",
    b"GIF89a": ".gif",
    b"BM": ".bmp",
    b"II*\x00": ".tif",
    b"MM\x00*": ".tif",
    b"RIFF": ".webp",
}


def _suffix(data: bytes) -> str:
    """File ending for the leading bytes of a picture, '' when they belong to no known format."""
    return next((end for magic, end in _SIGNATURES.items() if data.startswith(magic)), "")


def _read_head(path: str) -> bytes:
    """First bytes of the file; raises MediaError when there is none to read."""
    try:
        # opening a pipe may wait for ever
        if not (stat.S_ISREG(kind := os.stat(path).st_mode) or stat.S_ISDIR(kind)):
            raise MediaError(
                f"expected a picture file, found a pipe or device: {path}; give the file itself",
                kind="unsupported",
                path=path,
            )
        with open(path, "rb") as handle:
            head = handle.read(16)
    except MediaError:
        raise
    except IsADirectoryError as err:
        raise MediaError(
            f"expected a picture file, found a folder: {path}; give the file inside it",
            kind="unsupported",
            path=path,
        ) from err
    except (OSError, ValueError) as err:
        hint = "download it first, addresses are not fetched" if "://" in path else "check the path"
        raise MediaError(
            f"expected a readable picture file, found none at {path} ({err}); {hint}",
            kind="missing",
            path=path,
        ) from err
    if not head:
        raise MediaError(
            f"expected a picture, found an empty file: {path}; copy or download it again",
            kind="empty",
            path=path,
        )
    return head


def _open_lazily(path: str) -> Image:
    """Header only; the caller closes it. Raises MediaError."""
    from PIL import Image, UnidentifiedImageError

    head = _read_head(path)
    try:
        return Image.open(path, formats=FORMATS)
    except Image.DecompressionBombError as err:
        raise MediaError(
            f"picture too large to open: {path} ({err}); shrink it first",
            kind="too_large",
            path=path,
        ) from err
    except (
        UnidentifiedImageError,
        OSError,
        SyntaxError,
        ValueError,
        EOFError,
        struct.error,
    ) as err:
        if _suffix(head):
            raise MediaError(
                f"expected a complete picture, found a broken header in {path} ({err}); copy it again",
                kind="truncated",
                path=path,
            ) from err
        raise MediaError(
            f"expected a picture (png, jpeg, webp, gif, bmp, tiff), found unknown content in {path}; "
            "convert it to png or jpeg",
            kind="unsupported",
            path=path,
        ) from err


def _orientation(picture: Image) -> int:
    """EXIF orientation 1..8 read from the header alone; unreadable or absent EXIF counts as upright (1)."""
    if picture.format == "PNG" and not {"exif", "Raw profile type exif"} & set(picture.info):
        return 1  # getexif() would decode the whole PNG to look for a trailing chunk
    try:
        value = picture.getexif().get(_ORIENTATION_TAG, 1)
    except (OSError, SyntaxError, ValueError, KeyError, TypeError, EOFError, struct.error):
        return 1
    return value if value in range(1, 9) else 1


class ImageFacts(NamedTuple):
    """What a picture's header says: (width, height) in pixels as stored, and its EXIF orientation, 1 (upright) to 8."""

    stored: tuple[int, int]
    tag: int

    def size(self, orientation: Orientation = "displayed") -> tuple[int, int]:
        """(width, height) in pixels; tags 5 to 8 exchange the sides of a displayed picture."""
        return self.stored[::-1] if self.tag >= 5 and orientation == "displayed" else self.stored


def image_facts(path: str | os.PathLike[str]) -> ImageFacts:
    """Size and EXIF orientation from the header alone. Raises MediaError (missing, empty, truncated, unsupported, too_large)."""
    with _open_lazily(os.fspath(path)) as picture:
        width, height = picture.size
        # releases of Pillow differ in whether `size` is turned already
        if picture.format == "TIFF":
            tags: Any = getattr(picture, "tag_v2", {})
            width, height = int(tags.get(256, width)), int(tags.get(257, height))
        return ImageFacts((width, height), _orientation(picture))


def image_size(
    path: str | os.PathLike[str], orientation: Orientation = "displayed"
) -> tuple[int, int]:
    """(width, height) in pixels as displayed, after EXIF rotation, or as stored. Reads only the header.

    Raises MediaError (missing, empty, truncated, unsupported, too_large).
    """
    return image_facts(path).size(orientation)


def orientation_of(sample: Sample) -> Orientation:
    """How the pictures of a sample are read: as displayed, unless its reader was told that its data count stored pixels."""
    return "stored" if sample.params.get(ORIENTATION_PARAM) == "stored" else "displayed"


def _check_shape(size: tuple[int, int], max_pixels: int, path: str) -> None:
    width, height = size
    if width * height > max_pixels:
        raise MediaError(
            f"picture too large: {path} has {width} x {height} = {width * height} pixels, expected at "
            f"most {max_pixels}; shrink it or raise max_pixels",
            kind="too_large",
            path=path,
        )
    if min(width, height) < 1 or max(width, height) / min(width, height) > MAX_ASPECT_RATIO:
        raise MediaError(
            f"expected a picture whose sides differ by at most {MAX_ASPECT_RATIO:.0f} times, found "
            f"{width} x {height} in {path}; crop it or pad it",
            kind="unsupported",
            path=path,
        )


def _check_scans(picture: Image, path: str) -> None:
    """Raises MediaError for a progressive JPEG of more scans than anyone writes: 250 kB of them take two minutes to decode."""
    if not picture.info.get("progressive"):
        return
    scans, last = 0, b""
    with open(path, "rb") as file:
        while (block := file.read(1 << 20)) and scans <= _MOST_SCANS:
            # the marker that begins one; in pixels FF is followed by 00
            scans += (last + block).count(b"\xff\xda")
            last = block[-1:]
    if scans > _MOST_SCANS:
        raise MediaError(
            f"expected a progressive JPEG of at most {_MOST_SCANS} scans, found more in {path}; save it again as a "
            "baseline JPEG or PNG",
            kind="unsupported",
            path=path,
        )


def _deep_to_8bit(picture: Image, path: str) -> Image:
    """16-bit grey, or float grey in 0..1, scaled to 8 bits: 65535 -> 255, with rounding (Pillow's convert clips)."""
    import numpy as np
    from PIL import Image

    values = np.asarray(picture)
    top = 1.0 if picture.mode == "F" else 65535.0
    if not values.min() >= 0 or not values.max() <= top:  # written so that NaN does not pass
        raise MediaError(
            f"expected {picture.mode} grey values in 0..{top:g} in {path}, found {values.min():g}.."
            f"{values.max():g}; convert it to 8 or 16 bits",
            kind="unsupported",
            path=path,
        )
    out = np.empty(values.shape, np.uint8)
    # float64 of the whole would be 8 times as large
    for first in range(0, len(values), rows := max(1, _STRIP // values.shape[1])):
        out[first : first + rows] = np.rint(
            values[first : first + rows].astype(np.float64) * (255.0 / top)
        )
    return Image.fromarray(out)


def _to_rgb(picture: Image, path: str) -> Image:
    """RGB on white: alpha and transparent palette entries are composited, 16 bits scaled, CMYK converted."""
    from PIL import Image

    if picture.mode == "F" or picture.mode.startswith("I"):
        picture = _deep_to_8bit(picture, path)
    has_alpha = picture.mode in ("RGBA", "LA", "PA", "La", "RGBa")
    if has_alpha or ("transparency" in picture.info and picture.mode in ("P", "L", "RGB")):
        rgba = picture.convert("RGBA")
        white = Image.new("RGBA", rgba.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, rgba).convert("RGB")
    return picture.convert("RGB")


def image_overrides(sample: Sample) -> dict[str, Any] | None:
    """What a sample asks of its pictures beyond the defaults, as mmrl.video.visuals takes it; None for nothing."""
    return {"orientation": "stored"} if orientation_of(sample) == "stored" else None


def open_image(
    path: str | os.PathLike[str],
    max_pixels: int = MAX_PIXELS,
    orientation: Orientation = "displayed",
) -> Image:
    """The picture at `path` as an 8-bit RGB PIL image, fully loaded, its file closed.

    EXIF rotation is applied (not with `orientation` 'stored'), alpha goes onto white, 16-bit grey is scaled (not clipped), an
    animation gives its first frame. Raises MediaError of kind missing, empty, truncated, unsupported (no picture, or sides that
    differ more than 200 times, which Qwen processors refuse) or too_large (more than `max_pixels`).
    """
    from PIL import Image

    name = os.fspath(path)
    with _open_lazily(name) as picture:
        # before decoding: a bomb is refused by its header
        _check_shape(picture.size, max_pixels, name)
        _check_scans(picture, name)
        tag = left = _orientation(picture)
        try:
            picture.load()
            if picture.format == "TIFF":
                left = _orientation(picture)  # Pillow turns TIFFs itself while it loads them
        except (OSError, SyntaxError, ValueError, EOFError, IndexError, struct.error) as err:
            raise MediaError(
                f"expected a complete picture, found broken or missing pixels in {name} ({err}); "
                "copy or download it again",
                kind="truncated",
                path=name,
            ) from err
        except Image.DecompressionBombError as err:
            raise MediaError(
                f"picture too large to decode: {name} ({err})", kind="too_large", path=name
            ) from err
        try:
            rgb = _to_rgb(picture, name)
        except (OSError, ValueError) as err:
            if isinstance(err, MediaError):
                raise
            raise MediaError(
                f"cannot convert mode {picture.mode} of {name} to RGB ({err}); convert it to png",
                kind="unsupported",
                path=name,
            ) from err
    turns = {
        2: Image.Transpose.FLIP_LEFT_RIGHT,
        3: Image.Transpose.ROTATE_180,
        4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE,
        6: Image.Transpose.ROTATE_270,
        7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_90,
    }
    if orientation == "displayed":
        turn = left
    else:  # what Pillow has turned while loading is turned back: 6 and 8 undo each other, the others themselves
        turn = 1 if left == tag else {6: 8, 8: 6}.get(tag, tag)
    turned = rgb.transpose(turns[turn]) if turn in turns else rgb
    # the rotation is done or not wanted: a copy of the picture must not ask for it
    turned.info.pop("exif", None)
    return turned


def store_bytes(data: bytes, folder: str | os.PathLike[str]) -> str:
    """Write the encoded picture `data` under `folder`, named by its SHA-256; returns the path.

    For pictures embedded in parquet rows. Atomic (write, then rename), so equal pictures are stored once and readers
    never see half a file, also with several processes. Raises MediaError (empty) for no data.
    """
    if not data:
        raise MediaError(
            "expected the bytes of a picture, found none; check the images column", kind="empty"
        )
    target = Path(folder) / (hashlib.sha256(data).hexdigest()[:40] + (_suffix(data[:16]) or ".img"))
    if target.is_file() and target.stat().st_size == len(data):
        return str(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, partial = tempfile.mkstemp(dir=target.parent, prefix=".partial-")
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(data)
        os.chmod(partial, 0o644)  # mkstemp makes files private
        os.replace(partial, target)
    except BaseException:
        os.unlink(partial)
        raise
    return str(target)


def sizes_on_disk(sample: Sample) -> tuple[ImageSize | VideoSize, ...] | None:
    """Sizes of a sample's media without a model's resize, so that a text can be scored without one; those of clips as the row
    tells them. None where a file or a number is missing."""
    from mmrl.types import ImageSize, VideoSize

    try:
        sizes = [image_size(path, orientation_of(sample)) for path in sample.images]
        facts = sample.params
        clips = [
            VideoSize((wh := (facts["width"], facts["height"])), wh, facts["duration"])
            for _ in sample.videos
        ]
    except (MediaError, TypeError, AttributeError, KeyError):
        return None
    return (*(ImageSize(size, size) for size in sizes), *clips)
