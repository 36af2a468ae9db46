"""ScreenSpot v1, v2 and Pro, and the hub's copy: a screenshot, an instruction, the box of the element meant.

The frame and the form of `bbox` follow from the format's name, never from the size of its numbers:

    screenspot      screenspot_{mobile,desktop,web}.json, ..._v2.json   pixels [x, y, width, height]
    screenspot_hf   parquet or JSON of rootsautomation/ScreenSpot       shares 0..1 [x1, y1, x2, y2]
    screenspot_pro  annotations/*.json with img_size                    pixels [x1, y1, x2, y2]

params: platform (of v1 and v2 from the file's name), ui_type (text or icon), data_source; of Pro also application, group. The
number is a mean over cells (platform x ui_type): another ui_type, and a data_source that stands for no platform where the file's
name holds none either, would be cells of their own and are errors.

    python -c "from mmrl.tasks.readers.screenspot import read_screenspot as r; print(len(r('screenspot_mobile_v2.json')))"
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from mmrl.coords import CoordFrame
from mmrl.errors import DataError, did_you_mean
from mmrl.tasks.readers.common import (
    Check,
    GeometryError,
    Readout,
    RowError,
    SizeOf,
    collect,
    text_of,
)
from mmrl.tasks.readers.gui_steps import number_list
from mmrl.tasks.readers.problem_types import check_by_task, fixed_task
from mmrl.tasks.readers.tables import (
    data_files,
    media_folder,
    picture,
    read_files,
    row_id,
    rows_of,
    size_params,
)
from mmrl.types import Sample

__all__ = ["read_screenspot", "read_screenspot_hf", "read_screenspot_pro"]

_PLATFORMS = ("mobile", "desktop", "web")
_KINDS = ("text", "icon")
Place = Callable[[list[float], tuple[int, int]], list[float]]


def _corners_of_xywh(values: list[float], size: tuple[int, int]) -> list[float]:
    """Pixels [x, y, width, height] -> corners. Raises RowError where the corners would leave the picture."""
    x, y, w, h = values
    if x + w > size[0] + 1 or y + h > size[1] + 1:
        raise GeometryError(
            "a box [x, y, width, height] inside the picture",
            f"{values} in a picture of {size[0]} x {size[1]}",
            "are these corners? then it is format screenspot_pro or ui_r1; else correct it",
        )
    return [x, y, x + w, y + h]


def _check_cell(row: Mapping[str, Any], columns: Mapping[str, str], platform: str | None) -> None:
    """Raises RowError for a row that would make a cell of its own, see the module."""
    from mmrl.tasks.metrics.gui import PLATFORM_OF

    kind = next(key for key, name in columns.items() if name == "ui_type")
    found, source = row.get(kind), row.get("data_source")
    if found is not None and found not in _KINDS:
        raise RowError(
            f"'{kind}' text or icon",
            repr(found)[:40],
            f"correct the row.{did_you_mean(str(found), _KINDS)}",
        )
    named = platform is not None or "platform" in columns
    if not named and source is not None and str(source).lower() not in PLATFORM_OF:
        raise RowError(
            f"'data_source' as one of {', '.join(PLATFORM_OF)}, because the file's name holds none of "
            f"{', '.join(_PLATFORMS)}",
            repr(source)[:40],
            f"correct the row or name the file after its platform.{did_you_mean(str(source), PLATFORM_OF)}",
        )


def _kept(row: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, str]:
    """{params name: text} of the row's columns that have one."""
    return {
        name: row[key] for key, name in names.items() if isinstance(row.get(key), str) and row[key]
    }


def _read(
    files: Iterable[Path],
    own: str,
    *,
    image_of: Callable[[Mapping[str, Any]], Any],
    roots: Callable[[Path], Path],
    media_dir: str | None,
    frame: CoordFrame,
    corners: Place | None,
    columns: Mapping[str, str],
    source: str,
    on_error: str,
    check: Check,
) -> Readout:
    """The loop of the three formats; `columns` are {column: name in params}."""

    def read_one(file: Path) -> Readout:
        root, media = roots(file), media_folder(file, media_dir)
        platform = next((name for name in _PLATFORMS if name in file.stem), None)

        def convert(number: int, row: dict[str, Any], size_of: SizeOf) -> Iterable[Sample]:
            image = picture(image_of(row), root, media)
            size = size_of(image)
            if row.get("img_size") is not None and list(
                number_list(row["img_size"], "img_size", (2,))
            ) != list(size):
                raise GeometryError(
                    f"img_size as the picture has it, {list(size)}",
                    repr(row["img_size"]),
                    "is it the right picture?",
                )
            _check_cell(row, columns, platform)
            params: dict[str, Any] = {
                **size_params([size]),
                **({"platform": platform} if platform else {}),
                **_kept(row, columns),
            }
            values = number_list(row.get("bbox"), "bbox", (4,))
            box = corners(values, size) if corners else values
            yield Sample(
                id=row_id(row.get("id"), f"{file.stem}-{number}"),
                task=own,
                source=f"{source}/{params['platform']}"
                if "platform" in params and source != "ScreenSpot-Pro"
                else source,
                question=text_of(row.get("instruction"), "instruction"),
                answer=check(own, box, frame, [size], params),
                images=(image,),
                params=params,
            )

        return collect(file, rows_of(file, ("bbox", "instruction")), convert, on_error)

    return read_files(files, read_one, on_error)


def _first_folder(file: Path, names: Iterable[str]) -> Path:
    """The first of the folders `names` (relative to the file's) that exists, else the file's folder."""
    return next((place for name in names if (place := file.parent / name).is_dir()), file.parent)


def read_screenspot(
    path: str | Path,
    *,
    image_root: str | None = None,
    task: str = "gui_grounding",
    types: Mapping[str, str] | None = None,
    on_error: str = "raise",
    check: Check = check_by_task,
) -> Readout:
    """Read ScreenSpot v1 or v2: one file, or the folder with screenspot*.json of one of them. Pictures are in `image_root`, by
    default screenspot_imgs (v1), screenspotv2_image (v2), the other's or images beside the file. Raises DataError for a folder
    with both: their numbers are two."""
    own, where = fixed_task("screenspot", "gui_grounding", task, types), Path(path)
    files = data_files(where, "screenspot*.json", "*.json")
    v2 = [file for file in files if file.stem.endswith("_v2")]
    if v2 and len(v2) < len(files):
        first = next(file for file in files if file not in v2)
        raise DataError(
            f"expected ScreenSpot v1 or v2 in {where}, found both ({first.name}, {v2[0].name}); give one file such as "
            f"{v2[0]}, or move the files of one set into a folder of its own"
        )
    folders = ("screenspot_imgs", "screenspotv2_image")
    return _read(
        files,
        own,
        image_of=lambda row: row.get("img_filename"),
        media_dir=None,
        frame=CoordFrame.ABS_ORIG,
        roots=lambda file: (
            Path(image_root)
            if image_root
            else _first_folder(file, (*(folders[::-1] if v2 else folders), "images"))
        ),
        corners=_corners_of_xywh,
        columns={"data_type": "ui_type", "data_source": "data_source"},
        source="ScreenSpot-v2" if v2 else "ScreenSpot",
        on_error=on_error,
        check=check,
    )


def read_screenspot_hf(
    path: str | Path,
    *,
    image_root: str | None = None,
    media_dir: str | None = None,
    task: str = "gui_grounding",
    types: Mapping[str, str] | None = None,
    on_error: str = "raise",
    check: Check = check_by_task,
) -> Readout:
    """Read the hub's ScreenSpot: parquet with embedded pictures, or JSON with file_name. Boxes are shares 0..1, corners."""
    own = fixed_task("screenspot_hf", "gui_grounding", task, types)
    return _read(
        data_files(Path(path), "*.parquet", "data/*.parquet"),
        own,
        media_dir=media_dir,
        frame=CoordFrame.REL1,
        image_of=lambda row: row.get("image") or row.get("file_name"),
        roots=lambda file: Path(image_root) if image_root else file.parent,
        corners=None,
        columns={"data_type": "ui_type", "data_source": "data_source"},
        source="ScreenSpot",
        on_error=on_error,
        check=check,
    )


def read_screenspot_pro(
    path: str | Path,
    *,
    image_root: str | None = None,
    task: str = "gui_grounding",
    types: Mapping[str, str] | None = None,
    on_error: str = "raise",
    check: Check = check_by_task,
) -> Readout:
    """Read ScreenSpot-Pro: an annotation file, the folder of them, or the folder above it. Pictures are in `image_root`,
    by default images beside the file or beside its folder. img_size must be the picture's."""
    own = fixed_task("screenspot_pro", "gui_grounding", task, types)
    return _read(
        data_files(Path(path), "annotations/*.json", "*.json"),
        own,
        image_of=lambda row: row.get("img_filename"),
        roots=lambda file: (
            Path(image_root) if image_root else _first_folder(file, ("images", "../images"))
        ),
        media_dir=None,
        frame=CoordFrame.ABS_ORIG,
        corners=None,
        source="ScreenSpot-Pro",
        on_error=on_error,
        columns={
            "platform": "platform",
            "ui_type": "ui_type",
            "application": "application",
            "group": "group",
            "data_source": "data_source",
        },
        check=check,
    )
