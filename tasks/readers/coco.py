"""COCO instances json -> one detection sample per picture (or per picture and category).

    annotations/instances_val2017.json  val2017/000000000139.jpg ...
    python -c "from tasks.readers.coco import read_coco as r; print(len(r('annotations/instances_val2017.json')))"

Boxes [x, y, width, height] become corners; categories keep their names and their ids, which have gaps. Crowd regions are
no truth: they go to params.crowd, so that scorers ignore boxes over them. Pictures without annotations stay, answer [].
Truth beside the answer, for the official scorers: params.image_id, categories and category_ids (asked, aligned), areas
(of the masks, aligned with the answer), crowd.
"""
from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from mmrl.coords import CoordFrame
from mmrl.errors import ConfigError, DataError, did_you_mean
from mmrl.types import Sample
from tasks.metrics.boxes import label_key
from tasks.readers.common import Check, Readout, RowError, SizeOf, check_box, collect, resolve_image, text_of
from tasks.readers.problem_types import check_by_task, fixed_task
from tasks.readers.tables import read_json

__all__ = [
    "ASK", "CocoFile", "Truth", "check_ask", "groups_of", "image_entry", "load_coco", "picture_samples", "picture_size",
    "read_coco", "truth_of",
]

ASK = ("all", "present", "each")
"""Which categories a sample asks for: all of the file; those in the picture; or one category per sample."""


@dataclass
class CocoFile:
    """A COCO-like json: images as they stand, labels by category id, annotations by image id, annotations of no image.

    `aliases` sends the id of a category whose name came before to the first id of that name (only where merged).
    """

    images: list[Any]
    labels: dict[int, str] = field(default_factory=dict)
    categories: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    by_image: dict[Any, list[tuple[int, Mapping[str, Any]]]] = field(default_factory=dict)
    strays: list[tuple[int, RowError]] = field(default_factory=list)
    aliases: dict[int, int] = field(default_factory=dict)

    def rows(self) -> Iterator[tuple[int, Any]]:
        """(number of the image from 1, image), then the annotations that belong to no image, numbered on their own."""
        yield from enumerate(self.images, 1)
        yield from self.strays


class Truth(NamedTuple):
    """One object or crowd region: category id, corners in pixels, area in px^2."""

    category: int
    box: list[float]
    area: float


def _is_id(value: Any) -> bool:
    return type(value) is int


def _categories(file: CocoFile, entries: list[Any], path: Path, clean: Callable[[str], str], merge: bool) -> None:
    """Fill in labels, categories and aliases. Raises DataError."""
    names: dict[str, int] = {}
    for number, entry in enumerate(entries, 1):
        where = f"{path}: categories[{number - 1}]"
        if not isinstance(entry, dict) or not _is_id(entry.get("id")) or not isinstance(entry.get("name"), str) or not (
                clean(entry["name"])):
            raise DataError(f"{where}: expected {{'id': whole number, 'name': text}}, found {entry!r:.80}; correct it")
        label = clean(entry["name"])
        first = names.setdefault(label_key(label), entry["id"])
        if entry["id"] in file.labels or entry["id"] in file.aliases or (first != entry["id"] and not merge):
            raise DataError(f"{where}: expected categories with ids and names of their own, found id {entry['id']} "
                            f"{entry['name']!r} again; rename or remove one")
        if first != entry["id"]:
            file.aliases[entry["id"]] = first
        else:
            file.labels[entry["id"]], file.categories[entry["id"]] = label, entry


def load_coco(path: Path, clean: Callable[[str], str] = str.strip, merge: bool = False) -> CocoFile:
    """The file with its annotations sorted by image; `clean` makes a label of a category name; with `merge` categories of
    one name are one category (else an error).

    Raises DataError when it is no COCO json at all; an annotation that belongs to no image becomes a stray.
    """
    content = read_json(path)
    if not isinstance(content, dict):
        raise DataError(f"{path}: expected a COCO json object, found {type(content).__name__}; is it a results file? "
                        "give the annotations")
    for key in ("images", "annotations", "categories"):
        if not isinstance(content.get(key), list):
            raise DataError(f"{path}: expected '{key}' as a list, found "
                            f"{type(content[key]).__name__ if key in content else 'keys ' + ', '.join(content)}; "
                            f"give a COCO annotations file.{did_you_mean(key, content)}")
    file = CocoFile(content["images"])
    _categories(file, content["categories"], path, clean, merge)
    known = {image["id"] for image in file.images if isinstance(image, dict) and _is_id(image.get("id"))}
    for number, entry in enumerate(content["annotations"], 1):
        if not isinstance(entry, dict):
            error = RowError(f"annotations[{number - 1}] as an object", f"{entry!r:.60}", "correct or remove it")
        elif not _is_id(entry.get("image_id")) or entry["image_id"] not in known:
            error = RowError(f"annotations[{number - 1}] with the image_id of one of 'images'",
                             repr(entry.get("image_id", "none"))[:60], "correct or remove it")
        else:
            file.by_image.setdefault(entry["image_id"], []).append((number, entry))
            continue
        file.strays.append((number, error))
    return file


def image_entry(image: Any, seen: dict[int, int], number: int) -> int:
    """The id of an entry of 'images'; raises RowError for a wrong or repeated one."""
    if not isinstance(image, dict) or not _is_id(image.get("id")):
        raise RowError("an image {'id': whole number, 'file_name': ...}", f"{image!r:.80}", "correct the entry of 'images'")
    if seen.setdefault(image["id"], number) != number:
        raise RowError("unique image ids", f"id {image['id']} again, first in row {seen[image['id']]}",
                       "rename or remove one of the images")
    return int(image["id"])


def _number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _truth(entry: Mapping[str, Any], file: CocoFile, size: tuple[int, int]) -> tuple[Truth, bool]:
    """(object, whether it is a crowd) of one annotation. Raises RowError."""
    category: Any = entry.get("category_id")
    category = file.aliases.get(category, category) if _is_id(category) else None
    if category is None or category not in file.labels:
        raise RowError("category_id of one of 'categories'", repr(entry.get("category_id", "none"))[:40],
                       "take images and categories of the same file")
    xywh = entry.get("bbox")
    if not isinstance(xywh, list) or len(xywh) != 4 or not all(map(_number, xywh)):
        raise RowError("bbox as [x, y, width, height]", f"{xywh!r:.80}", "correct or remove the annotation")
    x, y, w, h = xywh
    if w <= 0 or h <= 0:
        raise RowError("bbox [x, y, width, height] with width and height above 0", f"{xywh}", "correct or remove the annotation")
    crowd, area = entry.get("iscrowd", 0), entry.get("area", w * h)
    if crowd not in (0, 1) or not _number(area) or area < 0:
        raise RowError("iscrowd 0 or 1 and area >= 0", f"iscrowd {crowd!r:.20}, area {area!r:.20}", "correct the annotation")
    box = check_box([x, y, x + w, y + h], CoordFrame.ABS_ORIG, size)
    return Truth(category, list(box), float(area)), bool(crowd)


def truth_of(file: CocoFile, image_id: int, size: tuple[int, int],
             seen: dict[Any, int]) -> tuple[list[Truth], list[Truth]]:
    """(objects, crowd regions) of an image, in file order; any wrong annotation spoils the image, its truth is not whole.

    `seen` holds the annotation ids met so far. Raises DataError that names the annotation.
    """
    objects: list[Truth] = []
    crowds: list[Truth] = []
    for number, entry in file.by_image.get(image_id, ()):
        name = f"annotations[{number - 1}] (id {entry.get('id', 'none')!r:.20})"
        try:
            if not _is_id(entry.get("id")) or seen.setdefault(entry["id"], number) != number:
                raise RowError("a whole-number id of its own", f"{entry.get('id', 'none')!r:.20}", "renumber the annotations")
            truth, crowd = _truth(entry, file, size)
        except RowError as err:
            raise DataError(f"{name}: {err}") from err
        (crowds if crowd else objects).append(truth)
    return objects, crowds


def check_ask(ask: Any, negatives: Any, choices: Sequence[str] = ASK) -> None:
    """Raise ConfigError for an unknown `ask` or a wrong number of `negatives`."""
    if ask not in choices:
        raise ConfigError(f"unknown ask {ask!r}; expected one of {', '.join(choices)}.{did_you_mean(str(ask), choices)}")
    if type(negatives) is not int or negatives < 0:
        raise ConfigError(f"expected negatives as a whole number >= 0, found {negatives!r}")


def picture_size(image: Mapping[str, Any], path: str, size_of: SizeOf) -> tuple[int, int]:
    """(width, height) of the picture, which must be those of its entry. Raises RowError, MediaError."""
    size = size_of(path)
    stated = (image.get("width", size[0]), image.get("height", size[1]))
    if stated != size:
        raise RowError(f"width and height of the picture, {size[0]} x {size[1]}", f"{stated[0]!r:.20} x {stated[1]!r:.20}",
                       f"is {path} the right picture?")
    return size


def groups_of(ask: str, negatives: int, seed: int, image_id: int, labels: Mapping[int, str],
              objects: Sequence[Truth], crowds: Sequence[Truth], absent: Sequence[int] | None = None) -> list[list[int]]:
    """The category ids each sample of an image asks for. `absent`: those that may serve as negatives (default all others).

    A category that is there only as a crowd is neither present nor absent. An image with nothing to ask for gets one
    negative, so that it stays.
    """
    present = sorted({truth.category for truth in objects})
    if ask == "all":
        return [list(labels)]
    taken = {*present, *(truth.category for truth in crowds)}
    free = [number for number in (labels if absent is None else absent) if number not in taken]
    count = min(len(free), negatives if present else max(1, negatives))
    drawn = sorted(random.Random(f"{seed} {image_id}").sample(free, count))
    return [[number] for number in [*present, *drawn]] if ask == "each" else [[*present, *drawn]]


def picture_samples(file: CocoFile, image_id: int, path: str, size: tuple[int, int], objects: Sequence[Truth],
                    crowds: Sequence[Truth], groups: Sequence[Sequence[int]], *, stem: str, source: str, task: str,
                    check: Check, split: bool, extra: Mapping[str, Any] | None = None) -> list[Sample]:
    """One sample per group of category ids; with `split` the ids of the samples end in the category's id."""
    samples = []
    for group in groups:
        if not group:
            raise RowError("at least one category to ask for", "none", "add categories to the file")
        asked = set(group)
        mine = [truth for truth in objects if truth.category in asked]
        params: dict[str, Any] = {
            "image_id": image_id, "categories": [file.labels[number] for number in group], "category_ids": list(group),
            "areas": [truth.area for truth in mine], "width": size[0], "height": size[1], **(extra or {})}
        crowd = [{"bbox": truth.box, "label": file.labels[truth.category], "area": truth.area}
                 for truth in crowds if truth.category in asked]
        if crowd:
            params["crowd"] = crowd
        value = [{"bbox": list(truth.box), "label": file.labels[truth.category]} for truth in mine]
        samples.append(Sample(
            id=f"{stem}-{image_id}-{group[0]}" if split else f"{stem}-{image_id}", task=task, source=source,
            question=", ".join(params["categories"]), answer=check(task, value, CoordFrame.ABS_ORIG, [size], params),
            images=(path,), params=params))
    return samples


def default_root(path: Path) -> Path:
    """Where the official download puts the pictures of annotations/instances_X.json: X beside it, else the file's folder."""
    split = path.stem.rpartition("_")[2]
    places = (path.parent.parent / split, path.parent.parent / "images" / split, path.parent / split, path.parent / "images")
    return next((place for place in places if place.is_dir()), path.parent)


def read_coco(path: str | Path, *, image_root: str | None = None, task: str = "detection", ask: str = "all",
              negatives: int = 1, seed: int = 0, types: Mapping[str, str] | None = None, on_error: str = "raise",
              check: Check = check_by_task) -> Readout:
    """Read instances_*.json. Ids are '<file>-<image id>', sources the file's name, questions the categories asked for.

    `ask`: 'all' categories of the file (closed vocabulary, the official protocol), 'present' ones and `negatives` absent
    ones, or 'each': a sample per category that is present and for `negatives` absent ones (answer []). Negatives are drawn
    by `seed` and image id; pictures without objects get at least one. `image_root` holds the pictures. `types` as in
    tasks.readers.problem_types. Row numbers in errors count images; an annotation is named by its place.
    """
    where = Path(path)
    check_ask(ask, negatives)
    own = fixed_task("coco", "detection", task, types)
    file = load_coco(where)
    root = Path(image_root) if image_root else default_root(where)
    images_seen: dict[int, int] = {}
    annotations_seen: dict[Any, int] = {}

    def convert(number: int, image: Any, size_of: SizeOf) -> Iterable[Sample]:
        image_id = image_entry(image, images_seen, number)
        picture = resolve_image(text_of(image.get("file_name"), "file_name"), root)
        size = picture_size(image, picture, size_of)
        objects, crowds = truth_of(file, image_id, size, annotations_seen)
        groups = groups_of(ask, negatives, seed, image_id, file.labels, objects, crowds)
        return picture_samples(file, image_id, picture, size, objects, crowds, groups, stem=where.stem, source=where.stem,
                               task=own, check=check, split=ask == "each")

    return collect(where, file.rows(), convert, on_error)
