"""Pictures and clips of a request -> files that the encoder can open, within limits; nothing is opened that was not allowed.

data: addresses are always taken, file:// (or a bare path) only below --media-root, http(s) only with --allow-remote-media.
Everything else is refused with the mend.
"""
from __future__ import annotations

import base64
import binascii
import hashlib
import http.client
import time
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from mmrl.errors import MediaError
from mmrl.media import MAX_PIXELS, image_size
from mmrl.serve.errors import RequestError
from mmrl.serve.protocol import Media

__all__ = ["MediaRules", "file_of"]

_CLIPS = {"mp4": ".mp4", "webm": ".webm", "quicktime": ".mov", "x-matroska": ".mkv", "matroska": ".mkv", "x-msvideo": ".avi",
          "avi": ".avi", "mpeg": ".mpg", "ogg": ".ogv", "x-m4v": ".m4v"}
_CHUNK = 1 << 20


@dataclass(frozen=True)
class MediaRules:
    """What a request may refer to, and how large it may be."""

    root: Path | None = None  # file:// below here
    remote: bool = False  # http(s) is fetched
    max_bytes: int = 256 << 20  # of one fetched picture or clip
    max_pixels: int = MAX_PIXELS  # of one picture as it is on disk
    timeout_s: float = 60.0  # of one fetched picture or clip


def file_of(media: Media, folder: Path, rules: MediaRules) -> str:
    """Path of the picture or clip, written into `folder` where the request carries it. Raises RequestError."""
    scheme = urllib.parse.urlsplit(media.url[:64]).scheme.lower() if ":" in media.url[:64] else ""
    if scheme == "data":
        path = _store(*_data(media), media, folder)
    elif scheme in ("http", "https"):
        path = _store(*_fetch(media, rules), media, folder)
    elif scheme in ("file", ""):
        path = _local(media, rules)
    else:
        raise RequestError(f"expected {media.where} as a data:, file: or http(s) address, found scheme '{scheme}'", media.where)
    if media.kind == "image":
        _check_picture(path, media, rules)
    return path


def _check_picture(path: str, media: Media, rules: MediaRules) -> None:
    """From its header: whatever is not a picture, and bombs, are refused before anything is decoded."""
    try:
        width, height = image_size(path)
    except MediaError as error:
        raise RequestError(f"{media.where}: {error}".replace(path, "the picture sent"), media.where, code=error.kind) from error
    if width * height > rules.max_pixels:
        raise RequestError(f"expected {media.where} of at most {rules.max_pixels:,} pixels, found {width} x {height} = "
                           f"{width * height:,}; shrink it", media.where, code="too_large")


def _data(media: Media) -> tuple[bytes, str]:
    head, comma, text = media.url.partition(",")
    kind, *options = head.removeprefix(head[:5]).lower().split(";")
    expected = f"data:{media.kind}/{'png' if media.kind == 'image' else 'mp4'};base64,..."
    if not comma or "base64" not in [o.strip() for o in options]:
        raise RequestError(f"expected {media.where} as {expected}, found {media.url[:48]!r}; encode it as base64", media.where)
    if kind and not kind.startswith((f"{media.kind}/", "application/octet-stream")):
        raise RequestError(f"expected {media.where} as {expected}, found {kind[:48]!r}; a {media.kind} part holds one {media.kind}",
                           media.where)
    try:
        return base64.b64decode("".join(text.split()), validate=True), kind
    except (binascii.Error, ValueError) as error:
        raise RequestError(f"expected base64 after the comma of {media.where}, found something else ({error})",
                           media.where) from error


def _store(data: bytes, kind: str, media: Media, folder: Path) -> str:
    if not data:
        raise RequestError(f"expected {media.where} with the bytes of a {media.kind}, found none", media.where, code="empty")
    suffix = _CLIPS.get(kind.partition("/")[2], ".mp4") if media.kind == "video" else ".img"
    path = folder / (hashlib.sha256(data).hexdigest()[:40] + suffix)
    if not path.exists():
        path.write_bytes(data)
    return str(path)


def _local(media: Media, rules: MediaRules) -> str:
    if rules.root is None:
        raise RequestError(f"expected {media.where} as a data: address, found a file address; start the server with --media-root "
                           "FOLDER to allow files below it", media.where, code="not_allowed")
    parts = urllib.parse.urlsplit(media.url) if media.url.lower().startswith("file:") else None
    if parts is not None and parts.netloc not in ("", "localhost"):
        raise RequestError(f"expected {media.where} as file:///PATH, found the machine {parts.netloc[:60]!r}", media.where)
    named = media.url if parts is None else urllib.parse.unquote(parts.path)
    root = rules.root.resolve()
    try:
        path = (root / named).resolve()
        inside = path.is_relative_to(root) and path.exists()
    except (OSError, ValueError, RuntimeError):  # no path at all: a zero byte, too long, a circle of links
        inside = False
    if not inside:  # one text for outside and missing: what else is on this machine is nobody's business
        raise RequestError(f"expected {media.where} as a file below the folder of --media-root, found none at {named[:200]!r}",
                           media.where, code="missing")
    return str(path)


def _fetch(media: Media, rules: MediaRules) -> tuple[bytes, str]:
    if not rules.remote:
        raise RequestError(f"expected {media.where} as a data: address, found an address to fetch; start the server with "
                           "--allow-remote-media to let clients make it fetch, or send the bytes", media.where, code="not_allowed")
    ends = time.monotonic() + rules.timeout_s
    data = bytearray()
    try:
        with urllib.request.urlopen(media.url, timeout=rules.timeout_s) as answer:  # http(s): checked, also after redirections
            if urllib.parse.urlsplit(answer.url).scheme not in ("http", "https"):
                raise RequestError(f"expected {media.where} to stay at http(s), found a redirection to {answer.url[:60]!r}",
                                   media.where)
            while chunk := answer.read(_CHUNK):
                data += chunk
                if len(data) > rules.max_bytes or time.monotonic() > ends:
                    raise RequestError(f"expected {media.where} of at most {rules.max_bytes:,} bytes within {rules.timeout_s:g} s, "
                                       f"found more", media.where, code="too_large")
            return bytes(data), answer.headers.get_content_type()
    except (urllib.error.URLError, http.client.HTTPException, OSError, ValueError) as error:
        if isinstance(error, RequestError):
            raise
        raise RequestError(f"{media.where}: could not fetch {media.url[:200]!r} ({error}); check the address, or send the bytes",
                           media.where, code="missing") from error
