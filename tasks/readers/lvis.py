"""LVIS json -> detection samples, with what its federated scoring needs.

    lvis_v1_val.json  train2017/000000000139.jpg  val2017/...   (LVIS takes its pictures from both COCO folders)
    python -c "from mmrl.tasks.readers.lvis import read_lvis as r; print(len(r('lvis_v1_val.json', image_root='coco')))"

In an LVIS picture the truth is known only for the categories annotated in it and for its neg_category_ids; those of
not_exhaustive_category_ids may have more objects than are marked. So by default a sample asks for the categories whose
truth is known. Underscores in names become spaces. Params beside those of mmrl.tasks.readers.coco: neg_category_ids,
not_exhaustive_category_ids, frequency (r, c or f, aligned with categories).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mmrl.errors import DataError
from mmrl.tasks.readers.coco import (
    CocoFile,
    check_ask,
    groups_of,
    image_entry,
    load_coco,
    picture_samples,
    picture_size,
    single_samples,
    truth_of,
    with_several,
)
from mmrl.tasks.readers.common import (
    Check,
    Readout,
    RowError,
    SizeOf,
    SkipRow,
    collect,
    resolve_image,
    text_of,
)
from mmrl.tasks.readers.problem_types import check_by_task, fixed_task
from mmrl.types import Sample

__all__ = ["read_lvis"]

_ASK = ("verified", "present", "each", "all")


def _clean(name: str) -> str:
    return " ".join(name.replace("_", " ").split())


def _ids(image: dict[str, Any], key: str, file: CocoFile) -> tuple[list[int], list[str]]:
    """(ids of an image's list that are in 'categories', a note for each other one). Raises RowError."""
    values = image.get(key)
    if not isinstance(values, list) or not all(type(v) is int for v in values):
        raise RowError(
            f"'{key}' as a list of ids of 'categories'",
            f"{values!r:.80}",
            "give an LVIS file, not a COCO one",
        )
    known = [value for value in dict.fromkeys(values) if value in file.labels]
    return known, [f"{key} of a category that the file does not have, left out"] * (
        len(set(values)) - len(known)
    )


def _path(image: dict[str, Any], root: Path) -> str:
    """The picture: file_name (v0.5), or the last two parts of coco_url (v1), below `root` with or without its folder."""
    if image.get("file_name"):
        name = text_of(image["file_name"], "file_name")
    else:
        url = text_of(image.get("coco_url"), "coco_url")
        name = "/".join(url.split("?")[0].rstrip("/").split("/")[-2:])
    places = [resolve_image(name, root), resolve_image(os.path.basename(name) or name, root)]
    return next((place for place in places if os.path.isfile(place)), places[0])


def read_lvis(
    path: str | Path,
    *,
    image_root: str | None = None,
    task: str = "detection",
    ask: str = "verified",
    negatives: int = 1,
    seed: int = 0,
    types: Mapping[str, str] | None = None,
    on_error: str = "raise",
    check: Check = check_by_task,
) -> Readout:
    """Read lvis_v1_*.json (and v0.5). `image_root` holds train2017/ and val2017/, or the pictures (default: the file's folder).

    `ask`: 'verified' categories (annotated or listed as negative; default), 'present' ones and `negatives` of the
    negatives, 'each' (one category per sample, negatives among neg_category_ids), or 'all' of the file. See read_coco.
    An image without annotations and negatives is counted in `skipped`: the official scorer looks at nothing in it.
    """
    where = Path(path)
    check_ask(ask, negatives, _ASK)
    own = fixed_task("lvis", "detection", task, types)
    file = load_coco(where, _clean)
    for entry in file.categories.values():
        if entry.get("frequency") not in ("r", "c", "f"):
            raise DataError(
                f"{where}: expected categories with frequency r, c or f, found {entry!r:.80}; "
                "give an LVIS file, or read it as coco"
            )
    root = Path(image_root) if image_root else where.parent
    images_seen: dict[int, int] = {}
    annotations_seen: dict[Any, int] = {}

    def convert(number: int, image: Any, size_of: SizeOf) -> Iterable[Sample]:
        image_id = image_entry(image, images_seen, number)
        absent, strange = _ids(image, "neg_category_ids", file)
        partial, stranger = _ids(image, "not_exhaustive_category_ids", file)
        picture = _path(image, root)
        size = picture_size(image, picture, size_of)
        truth = truth_of(file, image, size, annotations_seen)
        truth.adjusted += [*strange, *stranger]
        if own == "grounding":
            return single_samples(
                file,
                image_id,
                picture,
                size,
                truth,
                stem=where.stem,
                task=own,
                check=check,
                open_ended=partial,
            )
        present = {one.category for one in truth.objects}
        # the official scorer goes by the annotations
        if both := [category for category in absent if category in present]:
            absent = [category for category in absent if category not in present]
            truth.adjusted += ["category taken as present: annotated, and listed as absent"] * len(
                both
            )
        if not present and not absent and ask != "all":
            raise SkipRow("no category whose truth is known")
        groups = (
            [sorted(present | set(absent))]
            if ask == "verified"
            else groups_of(ask, negatives, seed, image_id, file.labels, truth, absent)
        )

        def extra(group: Sequence[int]) -> dict[str, Any]:
            return {
                "neg_category_ids": absent,
                "not_exhaustive_category_ids": partial,
                "frequency": [file.categories[category]["frequency"] for category in group],
            }

        return picture_samples(
            file,
            image_id,
            picture,
            size,
            truth,
            groups,
            stem=where.stem,
            source=where.stem,
            task=own,
            check=check,
            split=ask == "each",
            extra=extra,
        )

    return with_several(collect(where, file.rows(), convert, on_error), file)
