"""Whole suites about pictures from replies to numbers, against the benchmarks' own programs; see test_suite_goldens.py."""

from __future__ import annotations

import hashlib
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from mmrl.coords import CoordFrame
from mmrl.types import StopReason
from scripts._suite_pictures import PICTURE
from tests.evaluation.suite_kit import (
    agree,
    evaluate_suite,
    golden,
    put,
    put_parquet,
    put_picture,
    told,
)

pytestmark = pytest.mark.slow


def close(value: float) -> Any:
    return pytest.approx(value, abs=1e-6)


def test_pixmo_count(tmp_path: Path) -> None:
    """Molmo's PointCountEval; pictures lie under their hashes as the release asks for it."""
    found, names = golden("pixmo_count"), []
    for number in range(5):
        path = put_picture(tmp_path / "picture.png", (30 + number, 20))
        names.append(hashlib.sha256(path.read_bytes()).hexdigest())
        put(tmp_path / "pixmo-count" / "images" / names[-1], path.read_bytes())
    put_parquet(
        tmp_path / "pixmo-count" / "data" / "test-00000-of-00001.parquet",
        [
            {
                "image_url": "https://example.org/a.png",
                "image_sha256": names[row["picture"]],
                "count": row["count"],
                "label": row["label"],
            }
            for row in found.rows
        ],
    )
    ids = [f"test-00000-of-00001-{number}" for number in range(1, len(found.rows) + 1)]
    outcome = evaluate_suite("pixmo_count", tmp_path, told(found, ids), tmp_path / "out")
    agree(found, ids, outcome.values("correct"))
    assert (
        outcome.line.value == close(found.official["numbers"]["correct"])
        and outcome.line.extractor == "pixmo_count"
    )


@pytest.mark.parametrize("stop", [StopReason.EOS, StopReason.LENGTH])
def test_pageocr(stop: StopReason, tmp_path: Path) -> None:
    """Also of pages that the length limit cut. Distances of the pages, their mean, and the file that Fox' script asks for."""
    found = golden("pageocr")
    put(tmp_path / "Fox" / "en_page_ocr.json", found.rows)
    for row in found.rows:
        put_picture(tmp_path / "Fox" / "en_pdf_png" / row["image"])
    ids = [f"en_page_ocr-{number}" for number in range(1, len(found.rows) + 1)]
    outcome = evaluate_suite("pageocr_en", tmp_path, told(found, ids), tmp_path / "out", stop=stop)
    agree(found, ids, {name: 1 - value for name, value in outcome.values("ned").items()})
    numbers = found.official["numbers"]
    assert (
        outcome.line.value == close(numbers["edit_dist"])
        and outcome.line.n == numbers["eval question num"]
    )
    [path] = (outcome.folder / "submissions").rglob("pageocr.json")
    assert [
        (page["label"], page["answer"]) for page in json.loads(path.read_text(encoding="utf-8"))
    ] == [
        (row["conversations"][1]["value"], reply)
        for row, reply in zip(found.rows, found.replies, strict=True)
    ]


def test_refcoco(tmp_path: Path) -> None:
    """lmms-eval's rule (--answers official), whose replies are shares of the picture: IoU of each, mean IoU and accuracies."""
    found = golden("refcoco")
    pictures = tmp_path / "images/mscoco/images/train2014"
    pictures.mkdir(parents=True)
    Image.new("RGB", PICTURE).save(pictures / "COCO_train2014_000000000009.jpg")
    refs = [
        {
            "ref_id": row["ref_id"],
            "ann_id": row["ref_id"] + 1,
            "category_id": 1,
            "image_id": 9,
            "split": "val",
            "file_name": f"COCO_train2014_000000000009_{row['ref_id']}.jpg",
            "sent_ids": [row["ref_id"]],
            "sentences": [
                {
                    "sent_id": row["ref_id"],
                    "sent": row["sentence"],
                    "raw": row["sentence"],
                    "tokens": [],
                }
            ],
        }
        for row in found.rows
    ]
    put(tmp_path / "refcoco" / "refs(unc).p", pickle.dumps(refs, protocol=2))
    put(
        tmp_path / "refcoco" / "instances.json",
        {
            "images": [
                {
                    "id": 9,
                    "file_name": "COCO_train2014_000000000009.jpg",
                    "width": PICTURE[0],
                    "height": PICTURE[1],
                }
            ],
            "annotations": [
                {"id": row["ref_id"] + 1, "image_id": 9, "category_id": 1, "bbox": row["bbox"]}
                for row in found.rows
            ],
        },
    )
    replies = {row["sentence"]: reply for row, reply in zip(found.rows, found.replies, strict=True)}
    outcome = evaluate_suite(
        "refcoco_val",
        tmp_path,
        lambda sample: replies[sample.question],
        tmp_path / "out",
        answers="official",
        frame=CoordFrame.REL1,
    )
    ids = {row["question"]: row["id"] for row in outcome.predictions}
    agree(found, [ids[row["sentence"]] for row in found.rows], outcome.values("iou"))
    numbers = found.official["numbers"]
    assert outcome.line.value == close(numbers["ACC@0.5"]) and outcome.line.metric == "acc@0.5"
    assert outcome.results["greedy"]["iou"]["mean"] == close(numbers["IoU"])


def test_screenspot_v2(tmp_path: Path) -> None:
    """lmms-eval's rule (--answers official): clicks as shares of the picture or as pixels; all, texts and icons."""
    found, root = golden("screenspot_v2"), tmp_path / "ScreenSpot-v2"
    put_picture(root / "screenspotv2_image" / "a.png", PICTURE)
    ids, files = [], {name: [] for name in ("mobile", "desktop", "web")}  # type: dict[str, list[Any]]
    for row in found.rows:
        listed = files[row["platform"]]
        listed.append(
            {
                "img_filename": "a.png",
                **{key: value for key, value in row.items() if key != "platform"},
            }
        )
        ids.append(f"screenspot_{row['platform']}_v2-{len(listed)}")
    for name, listed in files.items():
        put(root / f"screenspot_{name}_v2.json", listed)
    outcome = evaluate_suite(
        "screenspot_v2",
        tmp_path,
        told(found, ids),
        tmp_path / "out",
        answers="official",
        frame=CoordFrame.REL1,
    )
    agree(found, ids, outcome.values("inside"))
    numbers, mine = found.official["numbers"], outcome.values("inside")
    assert outcome.line.value == close(numbers["action"]) and outcome.line.metric == "inside"
    for kind in ("text", "icon"):
        values = [
            mine[name]
            for name, row in zip(ids, found.rows, strict=True)
            if row["data_type"] == kind
        ]
        assert sum(values) / len(values) == close(numbers[kind])


def test_tempcompass_matching(tmp_path: Path) -> None:
    """Replies that the script's rules match, captions named by letters; others go to a language model there."""
    found = golden("tempcompass_matching")
    questions: dict[str, dict[str, list[Any]]] = {}
    for number, row in enumerate(found.rows):
        questions.setdefault(row["video"], {}).setdefault(row["dim"], []).append(
            {"question": row["question"], "answer": row["answer"], "number": number}
        )
    order = [
        row.pop("number")
        for aspects in questions.values()
        for rows in aspects.values()
        for row in rows
    ]
    put(tmp_path / "TempCompass" / "questions" / "caption_matching.json", questions)
    for name in questions:
        put(tmp_path / "TempCompass" / "videos" / f"{name}.mp4", b"no video: replies need none")
    ids = [""] * len(order)
    for place, number in enumerate(order, 1):
        ids[number] = f"caption_matching-{place}"
    outcome = evaluate_suite("tempcompass_matching", tmp_path, told(found, ids), tmp_path / "out")
    agree(found, ids, outcome.values("correct"))
    assert outcome.line.value == close(sum(found.values) / len(ids)) and 0 < outcome.line.value < 1
