"""PixMo-Count parquet: how many of a named thing are in a picture, for training with a point on each.

    data/train-00000-of-00001.parquet   pictures/<image_sha256>.jpg
    python -c "from mmrl.tasks.readers.pixmo import read_pixmo_count as r; print(len(r('train.parquet', image_root='pictures')))"

Columns: image_url, image_sha256, count, label, points. The files hold addresses, not pictures: download them yourself,
name each by its image_sha256 (with any ending) and give the folder as image_root. Nothing is fetched here. A file whose
hash differs is another picture (the address changed) and an error of its row. Copies with an `image` column are read too.
Points are pixels of the original picture; validation and test have none.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from mmrl.coords import CoordFrame
from mmrl.errors import ConfigError, DataError
from mmrl.tasks.readers.common import (
    Check,
    GeometryError,
    Readout,
    RowError,
    SizeOf,
    collect,
    text_of,
)
from mmrl.tasks.readers.problem_types import check_by_task, fixed_task
from mmrl.tasks.readers.tables import data_files, media_folder, parquet_rows, picture, read_files
from mmrl.types import Sample

__all__ = ["read_pixmo_count"]

_HASH = re.compile(r"[0-9a-f]{64}")
_ENDINGS = ("", ".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".img")


def _downloaded(row: dict[str, Any], root: Path, checked: set[str], verify: bool) -> str:
    """The picture named by the row's hash, after a look at its content. Raises RowError."""
    name = row.get("image_sha256")
    if not isinstance(name, str) or not _HASH.fullmatch(name.lower()):
        raise RowError("image_sha256 as 64 hexadecimal digits", repr(name)[:80], "correct the row")
    path = next(
        (p for ending in _ENDINGS if (p := root / f"{name.lower()}{ending}").is_file()), None
    )
    if path is None:
        url = row.get("image_url")
        where = f"from {url} " if isinstance(url, str) and url else ""
        raise RowError(
            f"a picture named {name} in {root}",
            "none",
            f"download it {where}(pictures are not fetched) and name it by its image_sha256, or set image_root",
        )
    if verify and str(path) not in checked:
        try:
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
        except OSError as err:
            raise RowError(
                "a readable picture", f"{path} ({err.strerror})", "check its permissions"
            ) from err
        if digest != name.lower():
            raise RowError(
                f"the picture with SHA-256 {name}",
                f"{digest} in {path}",
                "the address shows another picture now: remove the row, or find the original",
            )
        checked.add(str(path))
    return str(path)


def _points(value: Any, count: int, size: tuple[int, int]) -> list[list[float]]:
    """[[x, y], ...] from {"x": [...], "y": [...]} or [{"x", "y"}, ...]; [] for none. Raises RowError."""
    if isinstance(value, dict):
        xs, ys = value.get("x") or [], value.get("y") or []
        if not isinstance(xs, list) or not isinstance(ys, list) or len(xs) != len(ys):
            raise RowError("points with as many x as y", f"{value!r:.80}", "correct the row")
        pairs = list(zip(xs, ys, strict=True))
    elif value is None or (
        isinstance(value, list) and all(isinstance(point, dict) for point in value)
    ):
        pairs = [(point.get("x"), point.get("y")) for point in value or []]
    else:
        raise RowError("points as {x, y}", f"{value!r:.80}", "correct the row")
    for point in pairs:
        if not all(type(v) in (int, float) and math.isfinite(v) for v in point) or not (
            -1 <= point[0] <= size[0] + 1 and -1 <= point[1] <= size[1] + 1
        ):
            raise GeometryError(
                f"points in pixels of the picture, {size[0]} x {size[1]}",
                f"{point}",
                "correct the row",
            )
    if pairs and len(pairs) != count:
        raise RowError(
            "as many points as 'count'", f"{len(pairs)} points, count {count}", "correct the row"
        )
    return [[float(x), float(y)] for x, y in pairs]


def read_pixmo_count(
    path: str | Path,
    *,
    image_root: str | None = None,
    media_dir: str | None = None,
    split: str | None = None,
    verify: bool = True,
    task: str = "counting",
    types: Mapping[str, str] | None = None,
    on_error: str = "raise",
    check: Check = check_by_task,
) -> Readout:
    """Read one parquet file, or the files of a folder (or its data/ folder), of `split` where one is given.

    Answer: the count; params.points where the row has points; the question is the label. Ids are '<file>-<row>', sources
    'pixmo_count/<split>'. `verify: false` takes pictures by name without hashing them. Raises ConfigError, DataError.
    """
    where = Path(path)
    if split is not None and (not isinstance(split, str) or not re.fullmatch(r"[A-Za-z]+", split)):
        raise ConfigError(f"expected split 'train', 'validation' or 'test', found {split!r}")
    if where.is_dir():
        pattern = f"{split}-*.parquet" if split else "*.parquet"
        files = data_files(where, pattern, f"data/{pattern}")
    elif split is not None and not where.name.startswith(f"{split}-"):
        raise DataError(
            f"expected a file of split {split!r} ({split}-*.parquet), found {where}; give its folder"
        )
    else:
        files = [where]
    own = fixed_task("pixmo_count", "counting", task, types)

    def read_one(file: Path) -> Readout:
        root, media = Path(image_root) if image_root else file.parent, media_folder(file, media_dir)
        checked: set[str] = set()

        def convert(number: int, row: dict[str, Any], size_of: SizeOf) -> Iterable[Sample]:
            count = row.get("count")
            if type(count) is not int or count < 0:
                raise RowError("count as a whole number >= 0", repr(count)[:40], "correct the row")
            image = (
                picture(row["image"], root, media)
                if row.get("image")
                else _downloaded(row, root, checked, verify)
            )
            size = size_of(image)
            points = _points(row.get("points"), count, size)
            params: dict[str, Any] = {
                "width": size[0],
                "height": size[1],
                **({"points": points} if points else {}),
            }
            yield Sample(
                id=f"{file.stem}-{number}",
                task=own,
                source=f"pixmo_count/{file.stem.split('-')[0]}",
                question=text_of(row.get("label"), "label"),
                answer=check(own, count, CoordFrame.ABS_ORIG, [size], params),
                images=(image,),
                params=params,
            )

        return collect(
            file,
            parquet_rows(file, ("count", "label"), "is it a PixMo-Count file?"),
            convert,
            on_error,
        )

    return read_files(files, read_one, on_error)
