"""Pictures, clips and episodes that rows name: what may be shown, where it lies, and its bytes.

Pictures and frames are decoded before anything of them is sent, so that the bytes of other files never are; an episode's clip is
sent as it is, and must lie in the run's folder.
"""

from __future__ import annotations

import io
import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmrl.errors import MediaError
from mmrl.video.media import Orientation, open_image

__all__ = ["MediaPolicy", "Thumbs", "picture_bytes", "texts_of"]

THUMB = 144  # pixels of its long side
_LOSSLESS = 2_000_000  # pixels up to which a whole picture is sent as PNG
_MOST_MEDIA = 64  # of a row


def texts_of(row: Mapping[str, Any], key: str) -> list[str]:
    """The row's paths under 'images' or 'videos'."""
    found = row.get(key)
    return [str(p) for p in found[:_MOST_MEDIA]] if isinstance(found, (list, tuple)) else []


@dataclass(frozen=True)
class MediaPolicy:
    """Where pictures and clips may lie besides the run's folder: below `roots`, or anywhere this user can read (None)."""

    roots: tuple[Path, ...] | None = None

    def find(self, path: str, folder: Path, cwd: str) -> Path | None:
        """The file that a row of the run in `folder` names: there, where the run was started (`cwd`), or here. None where it is
        not, or may not be shown."""
        if "://" in path or "\0" in path or len(path) > 4096:
            return None
        for base in (folder, *([Path(cwd)] if cwd else []), Path()):
            try:
                found = (base / path).resolve()
                if found.exists() and self._allowed(found, folder):
                    return found
            except (OSError, ValueError, RuntimeError):  # too long a name, links in a circle
                continue
        return None

    def place(self, path: str, folder: Path, cwd: str) -> str:
        """As `find`, for drawings: for what may not be shown a name that no file can have, so that it stands there as missing."""
        return str(self.find(path, folder, cwd) or f"/dev/null/{path}")

    def _allowed(self, path: Path, folder: Path) -> bool:
        return self.roots is None or any(
            path.is_relative_to(root) for root in (folder.resolve(), *self.roots)
        )

    def shown(self, row: dict[str, Any], folder: Path, cwd: str) -> dict[str, Any]:
        """The row with the places of its media instead of their names; what may not be shown stands for itself as missing."""
        out = dict(row)
        for key in ("images", "videos"):
            if paths := texts_of(row, key):
                out[key] = [self.place(p, folder, cwd) for p in paths]
        sample = out.get("sample")
        if isinstance(sample, dict):
            out["sample"] = {**sample, **{k: out[k] for k in ("images", "videos") if k in out}}
        return out


def picture_bytes(path: Path, orientation: Orientation, long_side: int | None) -> tuple[bytes, str]:
    """(bytes, content type) of a picture, decoded and encoded anew, shrunk to `long_side` pixels. Raises MediaError."""
    picture = open_image(path, orientation=orientation)
    if long_side is not None:
        picture.thumbnail((long_side, long_side))
    out = io.BytesIO()
    if picture.size[0] * picture.size[1] <= (_LOSSLESS if long_side is None else 128 * 128):
        picture.save(out, "PNG")
        return out.getvalue(), "image/png"
    picture.save(out, "JPEG", quality=92 if long_side is None else 82)
    return out.getvalue(), "image/jpeg"


class Thumbs:
    """Small pictures, the last ones kept."""

    def __init__(self, most_bytes: int = 32 << 20) -> None:
        self._kept: OrderedDict[tuple[Any, ...], tuple[bytes, str]] = OrderedDict()
        self._lock, self._bytes, self._most = threading.Lock(), 0, most_bytes

    def get(self, path: Path, orientation: Orientation) -> tuple[bytes, str]:
        """(bytes, content type). Raises MediaError."""
        key = path, path.stat().st_mtime_ns, orientation
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
        made = picture_bytes(path, orientation, THUMB)
        with self._lock:
            if key not in self._kept:
                self._kept[key] = made
                self._bytes += len(made[0])
            while self._bytes > self._most:
                self._bytes -= len(self._kept.popitem(last=False)[1][0])
        return made


def frame_bytes(path: Path, row: Mapping[str, Any], second: float) -> tuple[bytes, str]:
    """(bytes, content type) of the frame of a row's clip shown at `second`, whole size. Raises MediaError."""
    from PIL import Image

    from mmrl.report.stills import clip_of
    from mmrl.video.decode import read_clip
    from mmrl.video.sampling import FrameSampling

    clip = clip_of(row)
    if clip is None:
        raise MediaError("expected a row with a clip, found none", kind="missing")
    moment = max(0.0, clip.start + second)
    found = read_clip(
        path,
        FrameSampling(kind="timestamps", timestamps=(moment,), folder_fps=clip.folder_fps),
        size=lambda count, height, width: (height, width),
    )
    out = io.BytesIO()
    Image.fromarray(found.rgb_THWC[0]).save(out, "JPEG", quality=90)
    return out.getvalue(), "image/jpeg"
