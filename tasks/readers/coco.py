"""COCO instances json -> one detection sample per picture (or per picture and category), or grounding samples.

    annotations/instances_val2017.json  val2017/000000000139.jpg ...
    python -c "from mmrl.tasks.readers.coco import read_coco as r; print(len(r('annotations/instances_val2017.json')))"
    mmrl tasks check grounding --data instances_val2017.json --param "reader={types: {detection: grounding}}"

Boxes [x, y, width, height] become corners; categories keep their names and their ids, which have gaps. Crowd regions are
no truth: they go to params.crowd, so that scorers ignore boxes over them. Pictures without annotations stay, answer [].
Truth beside the answer, for the official scorers: params.image_id, categories and category_ids (asked, aligned), areas
(of the masks, aligned with the answer), crowd; rects and lost, boxes as the file has them (mmrl.tasks.metrics.boxes).

The releases hold annotations that are no objects; they are left out or cut one by one, never their picture, and counted
(params.adjusted, skipped.json): boxes without width or height (train2017 has two, ids 918 and 2206849), boxes outside their
picture or across its edge (Objects365) where the file states the picture's size, and categories with more objects than an
answer may hold, which are then not asked for in that picture (LVIS). Any other wrong annotation is an error of its picture.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from mmrl.coords import CoordFrame
from mmrl.errors import ConfigError, DataError, did_you_mean
from mmrl.rewards.objects import MAX_OBJECTS
from mmrl.tasks.metrics.boxes import label_key
from mmrl.tasks.readers.common import (
    Check,
    GeometryError,
    Readout,
    RowError,
    SizeOf,
    SkipRow,
    check_box,
    collect,
    resolve_image,
    text_of,
)
from mmrl.tasks.readers.problem_types import check_by_task, fixed_task
from mmrl.tasks.readers.tables import read_json
from mmrl.types import Sample

__all__ = [
    "ASK",
    "CocoFile",
    "ImageTruth",
    "Truth",
    "check_ask",
    "groups_of",
    "image_entry",
    "load_coco",
    "picture_path",
    "picture_samples",
    "picture_size",
    "read_coco",
    "single_samples",
    "truth_of",
    "with_several",
]

ASK = ("all", "present", "each")
"""Which categories a sample asks for: all of the file; those in the picture; or one category per sample."""

_NOT_RELEASED = (
    "objects365_v2_00908726.jpg",
    "objects365_v1_00320532.jpg",
    "objects365_v1_00320534.jpg",
)
"""Entries of Objects365 v2 whose pictures are in none of its archives (mmdetection lists the same three)."""


@dataclass
class CocoFile:
    """A COCO-like json: images as they stand, labels by category id, annotations by image id, annotations of no image.

    `aliases` sends the id of a category whose name came before to the first id of that name (only where merged). `several`
    counts the categories that grounding cannot ask for in a picture.
    """

    images: list[Any]
    labels: dict[int, str] = field(default_factory=dict)
    categories: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    by_image: dict[Any, list[tuple[int, Mapping[str, Any]]]] = field(default_factory=dict)
    strays: list[tuple[int, RowError]] = field(default_factory=list)
    aliases: dict[int, int] = field(default_factory=dict)
    several: int = 0

    def rows(self) -> Iterator[tuple[int, Any]]:
        """(number of the image from 1, image), then the annotations that belong to no image, numbered on their own."""
        yield from enumerate(self.images, 1)
        yield from self.strays


class Truth(NamedTuple):
    """One object or crowd region: category id, corners in pixels, area in px^2; [x, y, w, h] of the file where that is another."""

    category: int
    box: list[float]
    area: float
    rect: list[float] | None = None


@dataclass
class ImageTruth:
    """Objects and crowd regions of an image in file order; what was adjusted in its annotations, in words; `uncertain`: categories
    of annotations that were left out (`lost`), which are neither surely there nor surely absent."""

    objects: list[Truth] = field(default_factory=list)
    crowds: list[Truth] = field(default_factory=list)
    adjusted: list[str] = field(default_factory=list)
    uncertain: set[int] = field(default_factory=set)
    lost: list[Truth] = field(default_factory=list)


class _NoObject(Exception):
    """An annotation whose box holds nothing of the picture; the text says why."""


def _is_id(value: Any) -> bool:
    return type(value) is int


def _categories(
    file: CocoFile, entries: list[Any], path: Path, clean: Callable[[str], str], merge: bool
) -> None:
    """Fill in labels, categories and aliases. Raises DataError."""
    names: dict[str, int] = {}
    for number, entry in enumerate(entries, 1):
        where = f"{path}: categories[{number - 1}]"
        if (
            not isinstance(entry, dict)
            or not _is_id(entry.get("id"))
            or not isinstance(entry.get("name"), str)
            or not (clean(entry["name"]))
        ):
            raise DataError(
                f"{where}: expected {{'id': whole number, 'name': text}}, found {entry!r:.80}; correct it"
            )
        label = clean(entry["name"])
        first = names.setdefault(label_key(label), entry["id"])
        if (
            entry["id"] in file.labels
            or entry["id"] in file.aliases
            or (first != entry["id"] and not merge)
        ):
            raise DataError(
                f"{where}: expected categories with ids and names of their own, found id {entry['id']} "
                f"{entry['name']!r} again; rename or remove one"
            )
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
        raise DataError(
            f"{path}: expected a COCO json object, found {type(content).__name__}; is it a results file? "
            "give the annotations"
        )
    for key in ("images", "annotations", "categories"):
        if not isinstance(content.get(key), list):
            raise DataError(
                f"{path}: expected '{key}' as a list, found "
                f"{type(content[key]).__name__ if key in content else 'keys ' + ', '.join(content)}; "
                f"give a COCO annotations file.{did_you_mean(key, content)}"
            )
    file = CocoFile(content["images"])
    _categories(file, content["categories"], path, clean, merge)
    known = {
        image["id"] for image in file.images if isinstance(image, dict) and _is_id(image.get("id"))
    }
    for number, entry in enumerate(content["annotations"], 1):
        if not isinstance(entry, dict):
            error = RowError(
                f"annotations[{number - 1}] as an object", f"{entry!r:.60}", "correct or remove it"
            )
        elif not _is_id(entry.get("image_id")) or entry["image_id"] not in known:
            error = RowError(
                f"annotations[{number - 1}] with the image_id of one of 'images'",
                repr(entry.get("image_id", "none"))[:60],
                "correct or remove it",
            )
        else:
            file.by_image.setdefault(entry["image_id"], []).append((number, entry))
            continue
        file.strays.append((number, error))
    return file


def image_entry(image: Any, seen: dict[int, int], number: int) -> int:
    """The id of an entry of 'images'; raises RowError for a wrong or repeated one."""
    if not isinstance(image, dict) or not _is_id(image.get("id")):
        raise RowError(
            "an image {'id': whole number, 'file_name': ...}",
            f"{image!r:.80}",
            "correct the entry of 'images'",
        )
    if seen.setdefault(image["id"], number) != number:
        raise RowError(
            "unique image ids",
            f"id {image['id']} again, first in row {seen[image['id']]}",
            "rename or remove one of the images",
        )
    return int(image["id"])


def _number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _category(entry: Mapping[str, Any], file: CocoFile) -> int:
    """The category of an annotation. Raises RowError."""
    category: Any = entry.get("category_id")
    category = file.aliases.get(category, category) if _is_id(category) else None
    if category is None or category not in file.labels:
        raise RowError(
            "category_id of one of 'categories'",
            repr(entry.get("category_id", "none"))[:40],
            "take images and categories of the same file",
        )
    return int(category)


def _corners(xywh: Any, size: tuple[int, int], stated: bool) -> tuple[list[float], bool]:
    """([x1, y1, x2, y2] in pixels, whether it was cut at the picture's edge). Up to 1 px beyond it is rounding and stays.

    Raises RowError, _NoObject; without a `stated` size the picture may be a wrong one, then boxes beyond it are errors.
    """
    if not isinstance(xywh, list) or len(xywh) != 4 or not all(map(_number, xywh)):
        raise RowError(
            "bbox as [x, y, width, height]", f"{xywh!r:.80}", "correct or remove the annotation"
        )
    x, y, w, h = xywh
    if w <= 0 or h <= 0:
        raise _NoObject("a box without width or height")
    corners = [x, y, x + w, y + h]
    if stated and (min(x, y) < -1 or x + w > size[0] + 1 or y + h > size[1] + 1):
        inside = [max(x, 0.0), max(y, 0.0), min(x + w, size[0]), min(y + h, size[1])]
        if inside[0] >= inside[2] or inside[1] >= inside[3]:
            raise _NoObject("a box outside the picture")
        return list(check_box(inside, CoordFrame.ABS_ORIG, size)), True
    return list(check_box(corners, CoordFrame.ABS_ORIG, size)), False


def _truth(
    entry: Mapping[str, Any], category: int, size: tuple[int, int], stated: bool
) -> tuple[Truth, bool, bool]:
    """(object, whether it is a crowd, whether it was cut) of one annotation. Raises RowError, _NoObject."""
    box, cut = _corners(entry.get("bbox"), size, stated)
    crowd, area = entry.get("iscrowd", 0), entry.get("area", (box[2] - box[0]) * (box[3] - box[1]))
    if crowd not in (0, 1) or not _number(area) or area < 0:
        raise RowError(
            "iscrowd 0 or 1 and area >= 0",
            f"iscrowd {crowd!r:.20}, area {area!r:.20}",
            "correct the annotation",
        )
    return Truth(category, box, float(area), entry["bbox"] if cut else None), bool(crowd), cut


def truth_of(
    file: CocoFile, image: Mapping[str, Any], size: tuple[int, int], seen: dict[Any, int]
) -> ImageTruth:
    """What an image shows. Annotations that are no objects are left out or cut, as the module says; any other wrong one spoils
    the image, its truth is not whole.

    `seen` holds the annotation ids met so far. Raises DataError that names the annotation.
    """
    whole, stated = ImageTruth(), {"width", "height"} <= set(image)
    for number, entry in file.by_image.get(image["id"], ()):
        name = f"annotations[{number - 1}] (id {entry.get('id', 'none')!r:.20})"
        try:
            if not _is_id(entry.get("id")) or seen.setdefault(entry["id"], number) != number:
                raise RowError(
                    "a whole-number id of its own",
                    f"{entry.get('id', 'none')!r:.20}",
                    "renumber the annotations",
                )
            category = _category(entry, file)
            try:
                truth, crowd, cut = _truth(entry, category, size, stated)
            except _NoObject as why:
                whole.adjusted.append(f"annotation left out: {why}")
                whole.uncertain.add(category)
                if not entry.get("iscrowd"):
                    area = entry["area"] if _number(entry.get("area")) else 0.0
                    whole.lost.append(Truth(category, [], float(area), entry["bbox"]))
                continue
        except RowError as err:
            raise DataError(f"{name}: {err}") from err
        (whole.crowds if crowd else whole.objects).append(truth)
        if cut:
            whole.adjusted.append("annotation cut at the edge of its picture")
    return whole


def check_ask(ask: Any, negatives: Any, choices: Sequence[str] = ASK) -> None:
    """Raise ConfigError for an unknown `ask` or a wrong number of `negatives`."""
    if ask not in choices:
        raise ConfigError(
            f"unknown ask {ask!r}; expected one of {', '.join(choices)}.{did_you_mean(str(ask), choices)}"
        )
    if type(negatives) is not int or negatives < 0:
        raise ConfigError(f"expected negatives as a whole number >= 0, found {negatives!r}")


def picture_size(image: Mapping[str, Any], path: str, size_of: SizeOf) -> tuple[int, int]:
    """(width, height) of the picture, which must be those of its entry. Raises RowError, MediaError."""
    size = size_of(path)
    stated = (image.get("width", size[0]), image.get("height", size[1]))
    if stated != size:
        raise GeometryError(
            f"width and height of the picture, {size[0]} x {size[1]}",
            f"{stated[0]!r:.20} x {stated[1]!r:.20}",
            f"is {path} the right picture?",
        )
    return size


def picture_path(name: Any, root: Path) -> str:
    """The picture `name` below `root`: with all of its folders, the last one (Objects365: images/v1/patch8/X.jpg lies in
    patch8), or none; the first that exists. Raises RowError, and SkipRow for the entries of Objects365 without a picture."""
    words = text_of(name, "file_name")
    parts = Path(words).parts
    places = [resolve_image(place, root) for place in (words, str(Path(*parts[-2:])), parts[-1])]
    found = next((place for place in places if "://" not in words and Path(place).is_file()), None)
    if found is None and parts[-1] in _NOT_RELEASED:
        raise SkipRow("picture that the release of Objects365 does not have")
    return found or places[0]


def groups_of(
    ask: str,
    negatives: int,
    seed: int,
    image_id: int,
    labels: Mapping[int, str],
    truth: ImageTruth,
    absent: Sequence[int] | None = None,
) -> list[list[int]]:
    """The category ids each sample of an image asks for. `absent`: those that may serve as negatives (default all others).

    A category that is there only as a crowd, or only in annotations that were left out, is neither present nor absent. An
    image with nothing to ask for gets one negative, so that it stays.
    """
    present = sorted({one.category for one in truth.objects})
    if ask == "all":
        return [list(labels)]
    taken = {*present, *(one.category for one in truth.crowds), *truth.uncertain}
    free = [number for number in (labels if absent is None else absent) if number not in taken]
    count = min(len(free), negatives if present else max(1, negatives))
    drawn = sorted(random.Random(f"{seed} {image_id}").sample(free, count))
    return [[number] for number in [*present, *drawn]] if ask == "each" else [[*present, *drawn]]


def _answerable(group: Sequence[int], objects: Sequence[Truth]) -> tuple[list[int], list[str]]:
    """(the categories of `group` without those of most objects, until an answer may hold them all; a note for each left out)."""
    counts = Counter(truth.category for truth in objects)
    kept = list(group)
    while kept and sum(counts[category] for category in kept) > MAX_OBJECTS:
        kept.remove(max(kept, key=lambda category: (counts[category], category)))
    return kept, [f"category not asked for: more than {MAX_OBJECTS} objects in one answer"] * (
        len(group) - len(kept)
    )


def picture_samples(
    file: CocoFile,
    image_id: int,
    path: str,
    size: tuple[int, int],
    truth: ImageTruth,
    groups: Sequence[Sequence[int]],
    *,
    stem: str,
    source: str,
    task: str,
    check: Check,
    split: bool,
    extra: Callable[[Sequence[int]], Mapping[str, Any]] | None = None,
) -> list[Sample]:
    """One sample per group of category ids; with `split` the ids of the samples end in the category's id. `extra` gives further
    params for the categories asked. SkipRow where every category has more objects than an answer may hold."""
    if not all(groups):
        raise RowError("at least one category to ask for", "none", "add categories to the file")
    answerable = [_answerable(group, truth.objects) for group in groups]
    samples, adjusted = (
        list[Sample](),
        [*truth.adjusted, *(note for _, notes in answerable for note in notes)],
    )
    for group in (group for group, _ in answerable if group):
        asked = set(group)
        mine = [one for one in truth.objects if one.category in asked]
        params: dict[str, Any] = {
            "image_id": image_id,
            "categories": [file.labels[number] for number in group],
            "category_ids": list(group),
            "areas": [one.area for one in mine],
            "width": size[0],
            "height": size[1],
            **(extra(group) if extra else {}),
        }
        crowd = [
            {"bbox": one.box, "label": file.labels[one.category], "area": one.area}
            for one in truth.crowds
            if one.category in asked
        ]
        if crowd:
            params["crowd"] = crowd
        params |= {
            key: value
            for key, value in (  # as the file has them, for the official scorers
                ("rects", {str(place): one.rect for place, one in enumerate(mine) if one.rect}),
                (
                    "lost",
                    [
                        {"rect": one.rect, "label": file.labels[one.category], "area": one.area}
                        for one in truth.lost
                        if one.category in asked
                    ],
                ),
            )
            if value
        }
        if adjusted:  # of the whole image: with its first sample
            params["adjusted"], adjusted = adjusted, []
        value = [{"bbox": list(one.box), "label": file.labels[one.category]} for one in mine]
        samples.append(
            Sample(
                id=f"{stem}-{image_id}-{group[0]}" if split else f"{stem}-{image_id}",
                task=task,
                source=source,
                question=", ".join(params["categories"]),
                answer=check(task, value, CoordFrame.ABS_ORIG, [size], params),
                images=(path,),
                params=params,
            )
        )
    if not samples:
        raise SkipRow(f"every category has more than {MAX_OBJECTS} objects")
    return samples


def single_samples(
    file: CocoFile,
    image_id: int,
    path: str,
    size: tuple[int, int],
    truth: ImageTruth,
    *,
    stem: str,
    task: str,
    check: Check,
    open_ended: Collection[int] = (),
) -> list[Sample]:
    """Grounding: one sample per category of which the image shows exactly one object, and surely no other (no crowd, nothing left
    out, not in `open_ended`); the others are counted in file.several. Raises SkipRow for an image without such a category."""
    counts = Counter(one.category for one in truth.objects)
    several = {*truth.uncertain, *open_ended, *(one.category for one in truth.crowds)}
    single = [
        one for one in truth.objects if counts[one.category] == 1 and one.category not in several
    ]
    file.several += len(counts) - len(single)
    if not single:
        raise SkipRow("picture without a category of exactly one object")
    samples = []
    for place, one in enumerate(single):
        params: dict[str, Any] = {
            "image_id": image_id,
            "category_id": one.category,
            "area": one.area,
            "width": size[0],
            "height": size[1],
            **({"adjusted": truth.adjusted} if truth.adjusted and not place else {}),
        }
        answer = check(task, list(one.box), CoordFrame.ABS_ORIG, [size], params)
        samples.append(
            Sample(
                id=f"{stem}-{image_id}-{one.category}",
                task=task,
                source=stem,
                question=file.labels[one.category],
                answer=answer,
                images=(path,),
                params=params,
            )
        )
    return samples


def default_root(path: Path) -> Path:
    """Where the official download puts the pictures of annotations/instances_X.json: X beside it, else the file's folder."""
    split = path.stem.rpartition("_")[2]
    places = (
        path.parent.parent / split,
        path.parent.parent / "images" / split,
        path.parent / split,
        path.parent / "images",
    )
    return next((place for place in places if place.is_dir()), path.parent)


def read_coco(
    path: str | Path,
    *,
    image_root: str | None = None,
    task: str = "detection",
    ask: str = "all",
    negatives: int = 1,
    seed: int = 0,
    types: Mapping[str, str] | None = None,
    on_error: str = "raise",
    check: Check = check_by_task,
) -> Readout:
    """Read instances_*.json. Ids are '<file>-<image id>', sources the file's name, questions the categories asked for.

    `ask`: 'all' categories of the file (closed vocabulary, the official protocol), 'present' ones and `negatives` absent
    ones, or 'each': a sample per category that is present and for `negatives` absent ones (answer []). Negatives are drawn
    by `seed` and image id; pictures without objects get at least one. `image_root` holds the pictures. `types` as in
    mmrl.tasks.readers.problem_types; {'detection': 'grounding'} makes grounding samples of the categories with one object in their
    picture (see `single_samples`; `ask` does not matter). Row numbers in errors count images; an annotation is named by its place.
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
        picture = picture_path(image.get("file_name"), root)
        size = picture_size(image, picture, size_of)
        truth = truth_of(file, image, size, annotations_seen)
        if own == "grounding":
            return single_samples(
                file, image_id, picture, size, truth, stem=where.stem, task=own, check=check
            )
        groups = groups_of(ask, negatives, seed, image_id, file.labels, truth)
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
        )

    return with_several(collect(where, file.rows(), convert, on_error), file)


def with_several(readout: Readout, file: CocoFile) -> Readout:
    """The readout, with the categories that grounding could not ask for among what was left out."""
    if file.several:
        readout.skipped["category of several objects or a crowd in its picture"] += file.several
    return readout
