"""OVDEval subsets -> open-vocabulary detection samples: each picture asks for its own texts and hard negatives.

    ovdeval/color.json  ovdeval/color/<file_name> ...
    python -c "from mmrl.tasks.readers.ovdeval import read_ovdeval as r; print(len(r('ovdeval/color.json')))"

COCO json with boxes [x, y, width, height]; every image lists `text` (what is there) and `neg_text` (hard negatives).
Params beside those of mmrl.tasks.readers.coco: text, neg_text. A text that 'categories' lacks gets the next free id;
categories of one name are one category, because a prediction names them by text.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from mmrl.errors import DataError
from mmrl.tasks.metrics.boxes import label_key
from mmrl.tasks.readers.coco import (
    check_ask,
    image_entry,
    load_coco,
    picture_samples,
    picture_size,
    truth_of,
)
from mmrl.tasks.readers.common import (
    Check,
    Readout,
    RowError,
    SizeOf,
    collect,
    resolve_image,
    text_of,
)
from mmrl.tasks.readers.problem_types import check_by_task, fixed_task
from mmrl.tasks.readers.tables import read_files
from mmrl.types import Sample

__all__ = ["SUBSETS", "read_ovdeval"]

SUBSETS = (
    "celebrity",
    "color",
    "landmark",
    "logo",
    "material",
    "negation",
    "position",
    "relationship",
)

_ASK = ("all", "present", "each")


def _texts(image: dict[str, Any], key: str) -> list[str]:
    """The texts of an image without repetition. Raises RowError."""
    values = image.get(key, [])
    values = [values] if isinstance(values, str) else values
    if not isinstance(values, list) or not all(label_key(v) for v in values):
        raise RowError(f"'{key}' as a list of texts", f"{values!r:.80}", "correct the image")
    return list(dict.fromkeys(value.strip() for value in values))


def _root(file: Path, image_root: str | None) -> Path:
    base = Path(image_root) if image_root else file.parent
    places = (base / file.stem / "images", base / file.stem, base / "images")
    return next((place for place in places if place.is_dir()), base)


def _read_one(
    where: Path, image_root: str | None, task: str, ask: str, on_error: str, check: Check
) -> Readout:
    file, root = load_coco(where, merge=True), _root(where, image_root)
    numbers = {label_key(label): number for number, label in file.labels.items()}
    images_seen: dict[int, int] = {}
    annotations_seen: dict[Any, int] = {}

    def number_of(text: str) -> int:
        number = numbers.setdefault(label_key(text), max(numbers.values(), default=-1) + 1)
        file.labels.setdefault(number, text)
        return number

    def convert(number: int, image: Any, size_of: SizeOf) -> Iterable[Sample]:
        image_id = image_entry(image, images_seen, number)
        texts, negatives = _texts(image, "text"), _texts(image, "neg_text")
        picture = resolve_image(text_of(image.get("file_name"), "file_name"), root)
        size = picture_size(image, picture, size_of)
        truth = truth_of(file, image, size, annotations_seen)
        present = list(
            dict.fromkeys([*map(number_of, texts), *(one.category for one in truth.objects)])
        )
        absent = [
            category
            for category in dict.fromkeys(map(number_of, negatives))
            if category not in present
        ]
        asked = present or absent if ask == "present" else [*present, *absent]
        if not asked:
            raise RowError(
                "'text', 'neg_text' or an annotation", "none of them", "correct the image"
            )
        groups = [[category] for category in asked] if ask == "each" else [asked]
        return picture_samples(
            file,
            image_id,
            picture,
            size,
            truth,
            groups,
            stem=where.stem,
            source=f"ovdeval/{where.stem}",
            task=task,
            check=check,
            split=ask == "each",
            extra=lambda group: {"text": texts, "neg_text": negatives},
        )

    return collect(where, file.rows(), convert, on_error)


def read_ovdeval(
    path: str | Path,
    *,
    image_root: str | None = None,
    task: str = "detection",
    ask: str = "all",
    types: Mapping[str, str] | None = None,
    on_error: str = "raise",
    check: Check = check_by_task,
) -> Readout:
    """Read one subset (<subset>.json), or every subset of a folder. Sources are 'ovdeval/<subset>'.

    `ask`: 'all' texts of the picture, negatives too (the official protocol), only those 'present', or 'each': one sample
    per text. Pictures are looked for in <image_root>/<subset>/images, <image_root>/<subset>, <image_root>/images, then
    <image_root> (default: the file's folder). Row numbers in errors count images.
    """
    where = Path(path)
    check_ask(ask, 0, _ASK)
    own = fixed_task("ovdeval", "detection", task, types)
    files = (
        [file for subset in SUBSETS if (file := where / f"{subset}.json").is_file()]
        if where.is_dir()
        else [where]
    )
    if not files:
        raise DataError(
            f"expected subsets such as color.json in {where}, found "
            f"{sorted(entry.name for entry in where.iterdir())[:8]}; give the file itself"
        )
    return read_files(
        files, lambda file: _read_one(file, image_root, own, ask, on_error, check), on_error
    )
