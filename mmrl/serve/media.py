"""Media of a request (pictures, clips, sounds) -> files that the encoder can open, within limits; nothing else is opened.

data: addresses are always taken, file:// (or a bare path) only below --media-root; http(s) is fetched by mmrl/serve/fetch.py, where
the server was told to. Everything else is refused with the fix.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import urllib.parse
from dataclasses import dataclass
from pathlib import Path

from mmrl.errors import MediaError
from mmrl.serve.errors import RequestError
from mmrl.serve.protocol import Media
from mmrl.video.media import image_size

__all__ = ["MediaRules", "check_picture", "file_of", "is_remote", "store"]

_CLIPS = {
    "mp4": ".mp4",
    "webm": ".webm",
    "quicktime": ".mov",
    "x-matroska": ".mkv",
    "matroska": ".mkv",
    "x-msvideo": ".avi",
    "avi": ".avi",
    "mpeg": ".mpg",
    "ogg": ".ogv",
    "x-m4v": ".m4v",
}


@dataclass(frozen=True)
class MediaRules:
    """What a request may refer to."""

    root: Path | None = None  # file:// below here
    remote: bool = False  # http(s) is fetched from public addresses
    # HOST or HOST:PORT that are fetched from wherever they are; without `remote`, these only
    hosts: tuple[str, ...] = ()

    def check_remote(self, media: Media) -> None:
        """Raises RequestError where nothing is fetched."""
        if not self.remote and not self.hosts:
            raise RequestError(
                f"expected {media.where} as a data: address, found an address to fetch; start the server with "
                "--allow-remote-media to let clients make it fetch, or send the bytes",
                media.where,
                code="not_allowed",
            )


def is_remote(media: Media) -> bool:
    """Whether it has to be fetched."""
    return _scheme(media) in ("http", "https")


def _scheme(media: Media) -> str:
    head = media.url[:64]
    return head.partition(":")[0].strip().lower() if ":" in head else ""


def file_of(media: Media, folder: Path, rules: MediaRules) -> str:
    """Path of the picture, clip or sound, written into `folder` where the request carries it. Raises RequestError."""
    scheme = _scheme(media)
    if scheme == "data":
        return store(*_data(media), media, folder)
    if scheme in ("file", ""):
        return _local(media, rules)
    raise RequestError(
        f"expected {media.where} as a data:, file: or http(s) address, found scheme {scheme[:40]!r}",
        media.where,
    )


def check_picture(path: str, media: Media, most: int) -> int:
    """Its pixels, by its header: whatever is not a picture, and bombs, are refused before anything is decoded."""
    try:
        width, height = image_size(path)
    except MediaError as error:
        raise RequestError(
            f"{media.where}: {error}".replace(path, "the picture sent"),
            media.where,
            code=error.kind,
        ) from error
    if width * height > most:
        raise RequestError(
            f"expected {media.where} of at most {most:,} pixels, found {width} x {height} = {width * height:,}; "
            "shrink it, or start the server with a larger --max-megapixels",
            media.where,
            code="too_large",
        )
    return width * height


def _data(media: Media) -> tuple[bytes, str]:
    head, comma, text = media.url.partition(",")
    kind, *options = head.removeprefix(head[:5]).lower().split(";")
    example = {"image": "png", "video": "mp4", "audio": "wav"}[media.kind]
    expected = f"data:{media.kind}/{example};base64,..."
    if not comma or "base64" not in [o.strip() for o in options]:
        raise RequestError(
            f"expected {media.where} as {expected}, found {media.url[:48]!r}; encode it as base64",
            media.where,
        )
    if kind and not kind.startswith((f"{media.kind}/", "application/octet-stream")):
        raise RequestError(
            f"expected {media.where} as {expected}, found {kind[:48]!r}; a {media.kind} part holds one {media.kind}",
            media.where,
        )
    try:
        return base64.b64decode("".join(text.split()), validate=True), kind
    except (binascii.Error, ValueError) as error:
        raise RequestError(
            f"expected base64 after the comma of {media.where}, found something else ({error})",
            media.where,
        ) from error


def store(data: bytes, kind: str, media: Media, folder: Path) -> str:
    """Path of the bytes of a medium, written into `folder`; `kind` is their media type. Raises RequestError for none."""
    if not data:
        raise RequestError(
            f"expected {media.where} with the bytes of a {media.kind}, found none",
            media.where,
            code="empty",
        )
    suffix = {
        "video": _CLIPS.get(kind.partition("/")[2], ".mp4"),
        "image": ".img",
        "audio": ".sound",  # told by its bytes, as pictures are
    }[media.kind]
    path = folder / (hashlib.sha256(data).hexdigest()[:40] + suffix)
    if not path.exists():
        path.write_bytes(data)
    return str(path)


def _local(media: Media, rules: MediaRules) -> str:
    if rules.root is None:
        raise RequestError(
            f"expected {media.where} as a data: address, found a file address; start the server with --media-root "
            "FOLDER to allow files below it",
            media.where,
            code="not_allowed",
        )
    parts = urllib.parse.urlsplit(media.url) if media.url.lower().startswith("file:") else None
    if parts is not None and parts.netloc not in ("", "localhost"):
        raise RequestError(
            f"expected {media.where} as file:///PATH, found the machine {parts.netloc[:60]!r}",
            media.where,
        )
    named = media.url if parts is None else urllib.parse.unquote(parts.path)
    root = rules.root.resolve()
    try:
        path = (root / named).resolve()
        # a pipe would be waited for, a device has no end
        inside = path.is_relative_to(root) and (path.is_file() or path.is_dir())
    except (OSError, ValueError, RuntimeError):
        # no path at all: a zero byte, too long, a circle of links
        inside = False
    # one text for outside and missing: what else is on this machine is nobody's business
    if not inside:
        raise RequestError(
            f"expected {media.where} as a file below the folder of --media-root, found none at {named[:200]!r}",
            media.where,
            code="missing",
        )
    return str(path)
