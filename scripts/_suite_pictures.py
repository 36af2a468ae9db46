"""Rows and programs of PixMo-Count, PageOCR, RefCOCO, ScreenSpot-v2 and TempCompass' caption matching, for scripts.record_suites.

python -c "from scripts._suite_pictures import pageocr_rows; print(pageocr_rows()[0])"
"""

from __future__ import annotations

import json
import random
import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scripts._extractor_cases import BOXES, COUNTS, POINTS
from scripts._extractor_runs import point_count_eval
from scripts._peer_code import load
from scripts._suite_clips import tempcompass_judged
from scripts._suite_programs import whole
from scripts._suite_rows import Case
from scripts._suite_texts import plain

__all__ = [
    "PICTURE",
    "matching",
    "matching_rows",
    "pageocr",
    "pageocr_rows",
    "pixmo_count",
    "pixmo_count_rows",
    "refcoco",
    "refcoco_rows",
    "screenspot_v2",
    "screenspot_v2_rows",
]

PICTURE = (400, 300)


def pixmo_count_rows() -> list[Case]:
    """Things to be counted, three truths to each reply."""
    rng = random.Random(101)
    cases: list[Case] = []
    for reply in (reply for reply in COUNTS if plain(reply)):
        said = [int(number) for number in re.findall(r"\b\d{1,2}\b", reply) if number.isascii()]
        for count in (rng.choice(said or [3]), rng.choice([0, 3, 4]), rng.randrange(0, 21)):
            row = {
                "label": rng.choice(["cats", "chairs"]),
                "count": count,
                "picture": len(cases) % 5,
            }
            cases.append({"row": row, "reply": reply})
    return cases


def pixmo_count(code: Path, cases: Sequence[Case]) -> dict[str, Any]:
    """PointCountEval on all replies, and on each for its verdict."""
    numbers = point_count_eval(code)
    replies, counts = [case["reply"] for case in cases], [case["row"]["count"] for case in cases]
    return {
        "values": [
            numbers([reply], [count])["correct"]
            for reply, count in zip(replies, counts, strict=True)
        ],
        "numbers": {str(name): float(value) for name, value in numbers(replies, counts).items()},
    }


_PAGES = (
    "A SMALL PAGE\nof two lines",
    "The quick brown fox jumps over the lazy dog, twice: once at 3.50, once at 12:00.",
    "1  INTRODUCTION\n\nSpaces   count here.\n\n2  METHOD\nNone.",
    "na\u00efve Stra\u00dfe \u2014 \u00a9 2024",
    "x",
)


def pageocr_rows() -> list[Case]:
    """Pages, read well and badly: whole, cut, doubled, reversed, in other letters, with other spaces, not at all."""
    cases: list[Case] = []
    for page in _PAGES:
        lines = page.split("\n")
        replies = [
            page,
            page[: len(page) // 2],
            f"{page}\n{page}",
            "\n".join(reversed(lines)),
            page[::-1],
            page.upper(),
            " ".join(page.split()),
            f"Sure! Here is the text:\n{page}",
            "",
            "I cannot read it.",
            page.replace("o", "0"),
            page * 5,
            lines[0],
            page.replace("\n", " "),
            "0",
        ]
        cases += [
            {
                "row": {
                    "image": f"en_{len(cases) + place}.png",
                    "len": len(page),
                    "conversations": [
                        {"from": "human", "value": "<image>\nOCR this image: "},
                        {"from": "gpt", "value": page},
                    ],
                },
                "reply": reply,
            }
            for place, reply in enumerate(reply for reply in replies if plain(reply))
        ]
    return cases


_FOX = """
stand_in("jieba", lcut=str.split)
import nltk.translate.meteor_score
nltk.translate.meteor_score.meteor_score = lambda *a: 0.0  # needs a dictionary of synonyms
import importlib
metrics = importlib.import_module("nltk.metrics")
for name in ("precision", "recall", "f_measure"):  # None of an empty answer, on which the script ends
    setattr(metrics, name, lambda *a, measure=getattr(metrics, name): measure(*a) or 0.0)
"""


def pageocr(code: Path, cases: Sequence[Case]) -> dict[str, Any]:
    """eval_ocr_test.py, whole, on the file that it asks for, and on each page alone for its distance."""
    pages = [
        {
            "image": case["row"]["image"],
            "label": case["row"]["conversations"][1]["value"],
            "answer": case["reply"],
        }
        for case in cases
    ]
    import nltk

    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "pages.json").write_text(json.dumps(pages), encoding="utf-8")
        printed = whole(
            code / "eval_tools" / "eval_ocr_test.py", ["--out_file", "pages.json"], Path(name), _FOX
        )
    values = [
        nltk.edit_distance(page["label"], page["answer"])
        / max(len(page["label"]), len(page["answer"]))
        for page in pages
    ]
    numbers = json.loads(printed[printed.index("{") :])
    return {
        "values": values,
        "numbers": {name: numbers[name] for name in ("eval question num", "edit_dist")},
    }


def refcoco_rows() -> list[Case]:
    """Expressions of RefCOCO's val split with boxes as shares of the picture: on it, near, twice, beyond, swapped, none."""
    rng = random.Random(102)
    cases: list[Case] = []
    for number in range(60):
        x, y = round(rng.uniform(0, 250), 2), round(rng.uniform(0, 180), 2)
        w, h = round(rng.uniform(20, 140), 2), round(rng.uniform(20, 110), 2)
        near = [x / 400, y / 300, (x + w) / 400, (y + h) / 300]
        moved = [round(v + rng.choice([0, 0, 0.02, -0.03, 0.1]), 3) for v in near]
        shown = f"[{', '.join(map(str, moved))}]"
        reply = rng.choice(
            [
                shown,
                shown,
                shown,
                f"The box is {shown}.",
                f"{shown} or [0.1, 0.1, 0.2, 0.2]",
                f"[0.1, 0.1, 0.2, 0.2] {shown}",
                f'{{"bbox_2d": {shown}}}',
                f"```json\n{shown}\n```",
                f"[{moved[2]}, {moved[3]}, {moved[0]}, {moved[1]}]",
                f"[{moved[0]}, {moved[1]}, 7.5, 9.5]",
                shown.strip("[]"),
                shown[:-4],
                "",
                "I cannot see it.",
            ]
        )
        cases.append(
            {
                "row": {"ref_id": number, "bbox": [x, y, w, h], "sentence": f"the thing {number}"},
                "reply": reply,
            }
        )
    return cases + [
        {
            "row": {
                "ref_id": 60 + place,
                "bbox": [40.0, 60.0, 160.0, 120.0],
                "sentence": f"it {place}",
            },
            "reply": reply,
        }
        for place, reply in enumerate(reply for reply in BOXES if plain(reply))
    ]


def refcoco(code: Path, cases: Sequence[Case]) -> dict[str, Any]:
    """refcoco_bbox_rec_process_result on each reply and refcoco_bbox_rec_aggregation_result on all, by metric."""
    space = load(code / "lmms_eval" / "tasks" / "refcoco" / "utils_rec.py", Dataset=object)
    found = []
    for case in cases:
        x, y, w, h = case["row"]["bbox"]
        doc = {
            "answer": case["row"]["sentence"],
            "question_id": case["row"]["ref_id"],
            "bbox": [x / PICTURE[0], y / PICTURE[1], (x + w) / PICTURE[0], (y + h) / PICTURE[1]],
        }
        found.append(space["refcoco_bbox_rec_process_result"](doc, [case["reply"]])["refcoco_IoU"])
    return {
        "values": [float(space["compute_iou"](row["bbox"], row["pred"])) for row in found],
        "numbers": {
            metric: float(space["refcoco_bbox_rec_aggregation_result"](found, metric))
            for metric in ("IoU", "ACC@0.3", "ACC@0.5", "ACC@0.7")
        },
    }


def screenspot_v2_rows() -> list[Case]:
    """Instructions of ScreenSpot-v2 with clicks as shares of the picture, as pixels, as boxes, in words."""
    rng = random.Random(103)
    cases: list[Case] = []
    for number, reply in enumerate(reply for reply in (*POINTS, *POINTS) if plain(reply)):
        x, y = rng.choice([0.0, 100.0, 190.0, 150.0]), rng.choice([0.0, 60.0, 70.0, 150.0])
        cases.append(
            {
                "row": {
                    "platform": ("mobile", "desktop", "web")[number % 3],
                    "data_type": rng.choice(["text", "icon"]),
                    "data_source": ("ios", "windows", "shop")[number % 3],
                    "instruction": f"press {number}",
                    "bbox": [x, y, 120.0, 90.0],
                },
                "reply": reply,
            }
        )
    return cases


def screenspot_v2(code: Path, cases: Sequence[Case]) -> dict[str, Any]:
    """screenspot_v2_process_results on each reply, and the three means."""
    space = load(code / "lmms_eval" / "tasks" / "screenspot_v2" / "utils.py")
    found = []
    for case in cases:
        x, y, w, h = case["row"]["bbox"]
        doc = {
            "bbox": [x / PICTURE[0], y / PICTURE[1], (x + w) / PICTURE[0], (y + h) / PICTURE[1]],
            "data_type": case["row"]["data_type"],
            "image_width": PICTURE[0],
            "image_height": PICTURE[1],
        }
        found.append(
            space["screenspot_v2_process_results"](doc, [case["reply"]])["screenspot_v2_action_acc"]
        )
    return {
        "values": [float(row["correct"]) for row in found],
        "numbers": {
            kind: float(space[f"screenspot_v2_{kind}_acc"](found))
            for kind in ("action", "text", "icon")
        },
    }


def matching_rows() -> list[Case]:
    """Caption matching of TempCompass, with captions named by letters, as they are shown here too."""
    captions = ("The man is dribbling a ball.", "The man is dunking a ball.", "A ball lies there.")
    cases: list[Case] = []
    for name in ("Sentence", "Caption"):
        for right in (0, 1):
            shown = [
                f"{name} {letter}: {text}" for letter, text in zip("AB", captions, strict=False)
            ]
            for reply in (
                "A",
                "B",
                "A.",
                "B.",
                f"{name} A",
                f"{name} B.",
                *shown,
                *captions,
                "A) The man is dribbling a ball.",
                "",
                "C",
                "A and B",
                "I do not know",
            ):
                cases.append(
                    {
                        "row": {
                            "video": f"clip{len(cases) % 4}",
                            "dim": ("action", "direction", "speed", "order", "attribute_change")[
                                len(cases) % 5
                            ],
                            "question": "\n".join(["Which one fits the video better?", *shown]),
                            "answer": shown[right],
                        },
                        "reply": reply,
                    }
                )
    return cases


def matching(code: Path, cases: Sequence[Case]) -> dict[str, Any]:
    """eval_caption_matching.py. A reply that its rules cannot match is judged by a language model: it has no value here."""

    def value(verdict: Mapping[str, Any]) -> float | None:
        return float(verdict["rating"]) if verdict["match_success"] else None

    return tempcompass_judged(code, cases, "caption_matching", value)
