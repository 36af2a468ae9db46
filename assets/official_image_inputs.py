"""The part of assets.make_official_goldens about annotation files: made-up LVIS annotations with what its releases hold.

python -c "from assets.official_image_inputs import IMAGE_INPUTS; print(IMAGE_INPUTS[0]())"
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

__all__ = ["IMAGE_INPUTS", "LVIS_SIZE", "lvis_truth"]

Row = dict[str, Any]
LVIS_SIZE = (120, 90)
"""(width, height) of every picture of `lvis_truth`."""
_LVIS_NAMES = (
    "aerosol_can",
    "bow_(weapon)",
    "dog",
    "hot_sauce",
    "person",
    "ski_boot",
    "traffic_light",
    "zebra",
)


def lvis_truth() -> Row:
    """14 images with ids in no order: verified negatives (some twice, some of no category, one annotated as well), categories whose
    objects are not all marked, an image of which nothing is known, and boxes that are no objects."""
    rng = random.Random(83)
    ids = dict(zip(_LVIS_NAMES, (7, 3, 12, 5, 1, 40, 9, 22), strict=True))
    images, annotations = list[Row](), list[Row]()
    for number in rng.sample(range(100, 900), 14):
        present = rng.sample(list(ids.values()), rng.choice((0, 1, 2, 3, 4)))
        absent = rng.sample([i for i in ids.values() if i not in present], rng.choice((0, 1, 3)))
        for category in present:
            for _ in range(rng.choice((1, 1, 2, 5))):
                w, h = rng.randint(30, 500) / 10, rng.randint(30, 400) / 10
                x, y = rng.uniform(0, LVIS_SIZE[0] - w), rng.uniform(0, LVIS_SIZE[1] - h)
                annotations.append(
                    {
                        "id": 1000 - len(annotations),
                        "image_id": number,
                        "category_id": category,
                        "bbox": [round(x, 2), round(y, 2), w, h],
                        "area": round(0.7 * w * h, 2),
                        "segmentation": [],
                    }
                )
        images.append(
            {
                "id": number,
                "width": LVIS_SIZE[0],
                "height": LVIS_SIZE[1],
                "neg_category_ids": sorted(absent),
                "not_exhaustive_category_ids": sorted(rng.sample(present, len(present) // 2)),
                "coco_url": f"http://images.cocodataset.org/val2017/{number:012d}.jpg",
            }
        )
    annotated = [
        image for image in images if any(a["image_id"] == image["id"] for a in annotations)
    ]
    annotated[0]["neg_category_ids"] += [999, *annotated[0]["neg_category_ids"][:1]]
    annotated[1]["neg_category_ids"].append(
        next(a["category_id"] for a in annotations if a["image_id"] == annotated[1]["id"])
    )
    unseen = next(
        i
        for i in ids.values()
        if i not in annotated[2]["neg_category_ids"]
        and all(a["category_id"] != i for a in annotations if a["image_id"] == annotated[2]["id"])
    )
    # of a category of which the image shows nothing else
    for box in ([10.5, 20, 0, 14], [30, 40, 12, 0]):
        annotations.append(
            {
                "id": 1000 - len(annotations),
                "image_id": annotated[2]["id"],
                "category_id": unseen,
                "bbox": box,
                "area": 0.0,
                "segmentation": [],
            }
        )
    rng.shuffle(annotations)
    categories = [
        {"id": i, "name": name, "frequency": "rcf"[i % 3], "synset": f"{name}.n.01"}
        for name, i in ids.items()
    ]
    return {"images": images, "annotations": annotations, "categories": categories}


IMAGE_INPUTS: tuple[Callable[[], Row], ...] = (lvis_truth,)
