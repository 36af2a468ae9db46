"""Scores of an evaluation -> what detection scorers read, and the numbers that do not depend on any order.

`gather` groups (sample, score) pairs into pictures. Truth is Sample.answer; predictions are detail.pred_boxes and
detail.pred_labels, all in pixels of the original picture. A failed sample is a picture without predictions: it stays.

Sample.params used, all optional: image_id, categories and category_ids (asked, aligned), areas (aligned with the answer),
crowd ([{"bbox", "label", "area"}]), rects ({place in the answer: [x, y, w, h] of the file, where the box was cut}), lost ([{"rect",
"label", "area"}], annotations that are no objects; official scorers count both as the file has them), frequency,
neg_category_ids, not_exhaustive_category_ids.

    python -c "from mmrl.tasks.metrics.boxes import label_key; print(label_key(' Traffic_Light '))"
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from mmrl.errors import DataError
from mmrl.rewards.iou import pairwise_iou
from mmrl.rewards.objects import normalise_label
from mmrl.types import Sample, Score

__all__ = [
    "Evaluation",
    "Item",
    "Pair",
    "Picture",
    "gather",
    "label_key",
    "order_free",
    "per_source",
]

Pair = tuple[Sample, Score]
Box = tuple[float, float, float, float]


class Item(NamedTuple):
    """A box (x1, y1, x2, y2) in original pixels, None when it is none, with its label key; `area` of the object in px^2; `rect`
    (x, y, w, h) of the file where the box is another."""

    box: Box | None
    label: str
    area: float = 0.0
    rect: Box | None = None


@dataclass
class Picture:
    """One picture: truth, crowd regions, predictions in the order emitted, and the labels that were asked."""

    official_id: Any
    truth: list[Item] = field(default_factory=list)
    crowd: list[Item] = field(default_factory=list)
    # annotated, but no objects: official scorers count them as missed
    lost: list[Item] = field(default_factory=list)
    predicted: list[Item] = field(default_factory=list)
    asked: set[str] = field(default_factory=set)
    negative_ids: list[int] | None = None  # LVIS: categories verified to be absent
    open_ids: list[int] = field(default_factory=list)  # LVIS: categories not annotated exhaustively


@dataclass
class Evaluation:
    """Pictures in the scorer's order and the categories: label key -> {"id", "name", "frequency"?}."""

    pictures: list[Picture]
    categories: dict[str, dict[str, Any]]

    def truth(self) -> dict[str, Any]:
        """A COCO ground truth. Ids of pictures and annotations count from 1: id 0 would never match in pycocotools."""
        images: list[dict[str, Any]] = []
        annotations: list[dict[str, Any]] = []
        for number, picture in enumerate(self.pictures, 1):
            images.append(
                {
                    "id": number,
                    "neg_category_ids": picture.negative_ids or [],
                    "not_exhaustive_category_ids": picture.open_ids,
                }
            )
            for item, crowd in [
                *((t, 0) for t in (*picture.truth, *picture.lost)),
                *((c, 1) for c in picture.crowd),
            ]:
                annotations.append(
                    {
                        "id": len(annotations) + 1,
                        "image_id": number,
                        "category_id": self.categories[item.label]["id"],
                        "bbox": list(item.rect) if item.rect else _xywh(item.box),
                        "area": item.area,
                        "iscrowd": crowd,
                    }
                )
        return {
            "info": {},
            "images": images,
            "annotations": annotations,
            "categories": list(self.categories.values()),
        }

    def results(self, official: bool = False) -> list[dict[str, Any]]:
        """COCO results with score 1.0, pictures in order, boxes as emitted; labels nobody asked for are left out.

        With `official` the image ids are the data set's own, for a submission file.
        """
        return [
            {
                "image_id": picture.official_id if official else number,
                "category_id": self.categories[item.label]["id"],
                "bbox": _xywh(item.box),
                "score": 1.0,
            }
            for number, picture in enumerate(self.pictures, 1)
            for item in picture.predicted
            if item.box is not None and item.label in picture.asked
        ]

    def unknown_label_rate(self) -> float:
        """Share of predictions whose label was not asked for or whose box is none: AP does not see them, F1 does."""
        total = sum(len(picture.predicted) for picture in self.pictures)
        unknown = sum(
            item.box is None or item.label not in picture.asked
            for picture in self.pictures
            for item in picture.predicted
        )
        return unknown / total if total else 0.0

    def write(self, path: Path) -> None:
        """The official results file."""
        path.write_text(json.dumps(self.results(official=True)), encoding="utf-8")


def _xywh(box: Box | None) -> list[float]:
    assert box is not None
    return [box[0], box[1], box[2] - box[0], box[3] - box[1]]


def label_key(label: Any) -> str:
    """The label as it is compared, see mmrl.rewards.objects.normalise_label. Not text -> ''."""
    return normalise_label(label) if isinstance(label, str) else ""


def _box(values: Any) -> Box | None:
    """Four finite numbers as a box, else None."""
    try:
        x1, y1, x2, y2 = (float(v) for v in values)
    except (TypeError, ValueError, OverflowError):
        return None
    return (x1, y1, x2, y2) if all(map(math.isfinite, (x1, y1, x2, y2))) else None


def _area(box: Box | None) -> float:
    return 0.0 if box is None else max(0.0, box[2] - box[0]) * max(0.0, box[3] - box[1])


def _objects(objects: Any, areas: Any = None) -> list[Item]:
    """Truth or crowd entries {"bbox", "label", "area"?} as items."""
    known = (
        areas
        if isinstance(areas, (list, tuple)) and len(areas) == len(objects)
        else [None] * len(objects)
    )
    items = []
    for entry, area in zip(objects, known, strict=True):
        box = _box(entry["bbox"])
        area = entry.get("area") if area is None else area
        items.append(
            Item(box, label_key(entry["label"]), _area(box) if area is None else float(area))
        )
    return items


def _predictions(sample: Sample, score: Score) -> list[Item]:
    boxes = score.detail.get("pred_boxes") or []
    labels = list(score.detail.get("pred_labels") or [])
    asked = sample.params.get("categories") or []
    # a bare list of boxes answers the only category asked
    default = asked[0] if len(asked) == 1 else ""
    labels += [default] * (len(boxes) - len(labels))
    return [Item(_box(box), label_key(label)) for box, label in zip(boxes, labels, strict=False)]


def _categories(samples: Iterable[Sample]) -> dict[str, dict[str, Any]]:
    """Label key -> COCO category; ids as declared, the next free ones for labels without. Raises DataError."""
    table: dict[str, dict[str, Any]] = {}
    names: dict[int, str] = {}
    undeclared: dict[str, str] = {}
    for sample in samples:
        asked = sample.params.get("categories") or []
        ids = sample.params.get("category_ids") or []
        frequency = sample.params.get("frequency") or [None] * len(asked)
        if ids and (len(ids) != len(asked) or len(frequency) != len(asked)):
            raise DataError(
                f"expected params.category_ids and params.frequency as long as params.categories in sample "
                f"{sample.id!r}, found {len(ids)} and {len(frequency)} for {len(asked)}; align them"
            )
        for name, number, often in zip(asked, ids, frequency, strict=False):
            key = label_key(name)
            if (
                table.setdefault(key, {"id": number, "name": name})["id"] != number
                or names.setdefault(number, key) != key
            ):
                raise DataError(
                    f"expected one id for each category, found {name!r} with id {number} and another in sample "
                    f"{sample.id!r}; keep data sets with different categories in sources of their own"
                )
            if often is not None:
                table[key]["frequency"] = often
        for name in [*asked, *(entry["label"] for entry in sample.answer)]:
            undeclared.setdefault(label_key(name), name)
    free = max(names, default=0) + 1
    for key, name in undeclared.items():
        if key not in table:
            table[key] = {"id": free, "name": name}
            free += 1
    return table


def gather(pairs: Sequence[Pair]) -> Evaluation:
    """Pairs of one source -> Evaluation. Samples with one image_id and different categories share a picture.

    Order of pictures, which breaks the ties of constant scores: ascending image_id when every sample has a whole number,
    as the official scorers sort; else the order of samples.
    """
    pictures: list[Picture] = []
    latest: dict[Any, Picture] = {}
    for sample, score in pairs:
        rects = sample.params.get("rects") or {}
        truth = [
            item._replace(rect=_box(rects.get(str(place))))
            for place, item in enumerate(_objects(sample.answer, sample.params.get("areas")))
        ]
        asked = {label_key(name) for name in sample.params.get("categories") or []} | {
            item.label for item in truth
        }
        known = sample.params.get("image_id")
        picture = latest.get(known) if known is not None else None
        if picture is None or picture.asked & asked:
            picture = Picture(sample.id if known is None else known)
            pictures.append(picture)
            latest[known] = picture
        picture.truth += truth
        picture.crowd += _objects(sample.params.get("crowd") or [])
        picture.lost += [
            Item(None, label_key(one["label"]), float(one["area"]), _box(one["rect"]))
            for one in sample.params.get("lost") or []
            if label_key(one["label"]) in asked
        ]
        # a label this sample did not ask for must not answer another sample's question
        mine = _predictions(sample, score)
        picture.predicted += [
            item if item.label in asked else item._replace(label="") for item in mine
        ]
        picture.asked |= asked
        if "neg_category_ids" in sample.params:
            picture.negative_ids = list(sample.params["neg_category_ids"])
            picture.open_ids = list(sample.params.get("not_exhaustive_category_ids") or [])
    if all(type(picture.official_id) is int for picture in pictures):
        pictures.sort(key=lambda picture: picture.official_id)
    categories = _categories(sample for sample, _ in pairs)
    for picture in pictures:
        picture.crowd = [item for item in picture.crowd if item.label in categories]
    return Evaluation(pictures, categories)


def _over_crowd(predicted: list[Box], crowd: list[Box], threshold: float) -> list[bool]:
    """Whether a crowd covers at least `threshold` of the box's own area (COCO's rule for iscrowd), per box."""
    import numpy as np

    if not predicted or not crowd:
        return [False] * len(predicted)
    a, b = np.asarray(predicted)[:, None, :], np.asarray(crowd)[None, :, :]
    sides = np.clip(
        np.minimum(a[..., 2:], b[..., 2:]) - np.maximum(a[..., :2], b[..., :2]), 0, None
    )
    area = np.clip(a[..., 2:] - a[..., :2], 0, None).prod(-1)
    covered: list[bool] = ((area > 0) & (sides.prod(-1) >= threshold * area)).any(1).tolist()
    return covered


def _match(
    predicted: list[Box], truth: list[Box], covered: list[bool], threshold: float
) -> set[int]:
    """Predictions of the largest one-to-one matching with IoU >= threshold (Hungarian).

    Among the largest, the one that leaves out predictions over crowds, then the one with the highest IoU: so the counts
    do not depend on the order of the boxes.
    """
    import numpy as np
    from scipy.optimize import linear_sum_assignment

    if not predicted or not truth:
        return set()
    ious = pairwise_iou(predicted, truth)
    base = min(ious.shape) + 1.0
    gain = np.where(
        ious >= threshold, base * base + base * ~np.asarray(covered)[:, None] + ious, 0.0
    )
    rows, columns = linear_sum_assignment(gain, maximize=True)
    return {int(i) for i, j in zip(rows, columns, strict=True) if gain[i, j] > 0}


def _counts(
    picture: Picture, categories: Mapping[str, Mapping[str, Any]], threshold: float
) -> tuple[int, int, int]:
    """(true positives, false positives, false negatives) of a picture, class by class."""
    hits = extra = missed = 0
    labels = {item.label for item in [*picture.truth, *picture.predicted]}
    for label in labels:
        truth = [item.box for item in picture.truth if item.label == label and item.box is not None]
        predicted = [
            item.box for item in picture.predicted if item.label == label and item.box is not None
        ]
        broken = sum(item.label == label and item.box is None for item in picture.predicted)
        crowd = [item.box for item in picture.crowd if item.label == label and item.box is not None]
        covered = _over_crowd(predicted, crowd, threshold)
        matched = _match(predicted, truth, covered, threshold)
        left = sum(i not in matched and not covered[i] for i in range(len(predicted))) + broken
        # LVIS: absence is known for some labels only
        if label in picture.asked and picture.negative_ids is not None:
            number = categories[label]["id"]
            if number in picture.open_ids or (number not in picture.negative_ids and not truth):
                left = broken
        hits, extra, missed = hits + len(matched), extra + left, missed + len(truth) - len(matched)
    return hits, extra, missed


def order_free(evaluation: Evaluation, threshold: float = 0.5) -> dict[str, float]:
    """precision@t, recall@t and F1@t over all boxes, from a per-class Hungarian matching with IoU >= t.

    They depend neither on the order of pictures nor on that of boxes. A wrong or unknown label and a second box on one
    object are false positives; boxes over crowds (and, for LVIS, of categories without exhaustive truth) are neither
    right nor wrong. Nothing there and nothing predicted = 1.
    """
    counts = [_counts(picture, evaluation.categories, threshold) for picture in evaluation.pictures]
    hits, extra, missed = (
        (sum(column) for column in zip(*counts, strict=True)) if counts else (0, 0, 0)
    )
    nothing = 1.0 if not hits + extra + missed else 0.0
    return {
        f"precision@{threshold:g}": hits / (hits + extra) if hits + extra else nothing,
        f"recall@{threshold:g}": hits / (hits + missed) if hits + missed else nothing,
        f"F1@{threshold:g}": 2 * hits / (2 * hits + extra + missed)
        if hits + extra + missed
        else nothing,
    }


def per_source(
    pairs: Sequence[Pair],
    folder: Path,
    stem: str,
    compute: Callable[[Sequence[Pair], Path], Mapping[str, float]],
) -> dict[str, float]:
    """`compute(pairs, results file)` for each Sample.source: <stem>.json of the only one, or <stem>.<source>.json each.

    With several sources every number is given as '<source>/<name>' and, without prefix, as the mean over the sources
    that have it (how ODinW and OVDEval are reported).
    """
    groups: dict[str, list[Pair]] = {}
    for pair in pairs:
        groups.setdefault(pair[0].source, []).append(pair)
    if not groups:
        return {}
    if len(groups) == 1:
        return dict(compute(pairs, folder / f"{stem}.json"))
    each: dict[str, Mapping[str, float]] = {}
    taken: set[str] = set()
    for source, group in groups.items():
        slug = re.sub(r"[^A-Za-z0-9]+", "_", source).strip("_") or "source"
        while slug in taken:
            slug += "_"
        taken.add(slug)
        each[source] = compute(group, folder / f"{stem}.{slug}.json")
    names = dict.fromkeys(name for numbers in each.values() for name in numbers)
    means = {
        name: math.fsum(found) / len(found)
        for name in names
        if (found := [numbers[name] for numbers in each.values() if name in numbers])
    }
    return {
        **means,
        **{
            f"{source}/{name}": value
            for source, numbers in each.items()
            for name, value in numbers.items()
        },
    }
