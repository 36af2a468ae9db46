"""A folder of numbered pictures as a video: 1.jpg, 2.jpg ... or img_00001.png ..., a fixed number per second.

Pictures go by the last number in their names, not by the alphabet (2 before 10). The numbers must advance in equal steps: a
missing picture is an error, never a frame that is quietly shown longer. Other files (annotations) are ignored.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import numpy as np

from mmrl.errors import MediaError
from mmrl.video.media import image_size, open_image
from mmrl.video.probing import ClipIndex, VideoInfo

__all__ = ["index_folder", "read_picture"]

_ENDINGS = {".jpg", ".jpeg", ".png", ".webp", ".bmp"}


def _numbered(folder: Path) -> list[tuple[int, str]]:
    """(number, path) of the pictures of a folder, ascending. Raises MediaError."""
    names = [
        p
        for p in folder.iterdir()
        if p.suffix.lower() in _ENDINGS and not p.name.startswith(".") and p.is_file()
    ]
    if not names:
        raise MediaError(
            f"expected a folder of numbered pictures ({', '.join(sorted(_ENDINGS))}), found none in {folder}; give "
            "the folder that holds them",
            kind="empty",
            path=str(folder),
        )
    rows: list[tuple[int, str]] = []
    for path in names:
        digits = re.findall(r"[0-9]{1,18}", path.stem)
        if not digits:
            raise MediaError(
                f"expected a number in the name of every frame, found {path.name!r} in {folder}; name them 1.jpg, "
                "2.jpg ...",
                kind="unsupported",
                path=str(folder),
            )
        rows.append((int(digits[-1]), str(path)))
    return sorted(rows)


def index_folder(path: str, fps: float) -> ClipIndex:
    """The index of a folder of frames shown at `fps`. The size is the first picture's, as displayed (EXIF).

    Raises MediaError: empty (no picture), unsupported (a name without a number, two of the same number), truncated (a number
    is missing), and those of mmrl.video.media.
    """
    rows = _numbered(Path(path))
    numbers = np.array([number for number, _ in rows])
    gaps = np.diff(numbers)
    if len(gaps) and gaps.min() == 0:
        twice = int(np.argmin(gaps))
        raise MediaError(
            f"found two frames of number {numbers[twice]} in {path}: {os.path.basename(rows[twice][1])} and "
            f"{os.path.basename(rows[twice + 1][1])}; remove one",
            kind="unsupported",
            path=path,
        )
    if len(gaps) and gaps.min() != gaps.max():
        hole = int(np.argmax(gaps))
        raise MediaError(
            f"expected frame numbers in equal steps, found {numbers[hole + 1]} after {numbers[hole]} in {path} with "
            f"steps of {gaps.min()} elsewhere; a frame is missing",
            kind="truncated",
            path=path,
        )
    width, height = image_size(rows[0][1])
    times = np.arange(len(rows)) / fps
    times.flags.writeable = False
    info = VideoInfo(
        path=path,
        frames=len(rows),
        duration_s=len(rows) / fps,
        fps=fps,
        width=width,
        height=height,
        rotation=0,
        codec="pictures",
        timestamps_s=times,
        keyframes=tuple(range(len(rows))),
        variable_rate=False,
        has_audio=False,
    )
    return ClipIndex(
        info, pictures=tuple(picture for _, picture in rows), stored_wh=(width, height)
    )


def read_picture(index: ClipIndex, number: int) -> np.ndarray:
    """Frame `number` as uint8 [H, W, 3]. Raises MediaError, also when its size differs from the first frame's."""
    picture = open_image(index.pictures[number])
    if picture.size != index.stored_wh:
        raise MediaError(
            f"expected frames of one size, found {picture.size[0]} x {picture.size[1]} in {index.pictures[number]} "
            f"and {index.stored_wh[0]} x {index.stored_wh[1]} in the first",
            kind="unsupported",
            path=index.info.path,
        )
    return np.asarray(picture)
