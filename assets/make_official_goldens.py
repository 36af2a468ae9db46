"""Input files on which the official evaluation programs were run once, and where the golden numbers beside them come from.

    python -m assets.make_official_goldens                (re)writes assets/fixtures/official/*.json, never *.golden.json
    python -m assets.make_official_goldens runs/inputs    the same somewhere else

Everything is seeded: right, near, wrong, missing and malformed answers on made-up truths; no row of any data set. For each
NAME.json there is a NAME.golden.json: `numbers`, what the official program gave for that input, and `source`, how it was
obtained. The programs are not part of this project; they were saved elsewhere, run and left there. Each whole file was
compared with the length its repository reports, so it is the program and not a retelling. Only numbers were kept: printed
ones, or the unrounded values of the same variables when the program was about to print (a profiler hook on `return`).
To renew one: get the file named in `source`, write the input in the program's own form (every input row carries it, or the
test of that name shows the conversion), run the command, and write the numbers down. A change of the inputs here makes the
goldens void: tests/tasks/metrics/test_official_inputs.py compares their digests.

    ovdeval         om-ai-lab/OVDEval eval.py at 40c12fe, whole: python eval.py --gt-path --result-path --output-path
    screenspot      njucckevin/SeeClick pretrain/screenspot_test.py and process_utils.py at 661ff1b, whole, --task all; the model is
                    a stand-in that answers `response`
    screenspot_pro  likaixin2000/ScreenSpot-Pro-GUI-Grounding eval_screenspot_pro.py at 588f1f2, its functions
                    eval_sample_positive_gt, evaluate_overall, evaluate_leaderboard_simple_style and what they call
    os_atlas        OS-Copilot/OS-Atlas eval/eval_scripts/android_control/evaluation_unify.py, whole, in the copy
                    averychen35/OS-Atlas at 1fa4fb3 (the original's file was not to be had)
    gui_r1          ritzz-ai/GUI-R1 guir1/eval/eval_omni.py, whole, in the copy icey-zhang/GUI-R1 at 049a461, whose one change is an
                    option for 0-1000 coordinates (not used); YangRui2015/GUI-R1 at 131ae9a has the same rule
    ui_r1           lll6gg/UI-R1 evaluation/eval_ac.py, whole, in the copy terrance74liang/UI-R1 at 554d73c
    odyssey         OpenGVLab/GUI-Odyssey src/eval_mm/GUIOdyssey_action_matching.py (whole) and action_matching_evaluation,
                    stat_result, check_SR, simple_decode of evaluate_GUIOdyssey.py at e12788f, metric 'macro'
    ocrbench        Yuliang-Liu/MultimodalOCR OCRBench/example.py at f5cbec6, whole; the place left for a model ("TODO Generation")
                    answers with the row's own prediction; 125 rows, 8 times over, are the 1000 it wants
    docvqa          docvqa.org's program as QwenLM/Qwen-VL eval_mm/infographicsvqa_eval.py at aa00ed0 keeps it, whole:
                    python infographicsvqa_eval.py -g GT -s SUBMISSION -o OUT
    vsibench        vision-x-nyu/thinking-in-space lmms_eval/tasks/vsibench/utils.py at e6a72f3: vsibench_process_results,
                    vsibench_aggregate_results and what they call
    chartqa         google-research/pix2struct pix2struct/metrics.py at 5b086ef: relaxed_correctness, aggregate_metrics; and
                    the package lmms-eval 0.7.3, tasks/chartqa/utils.py
    mathvista       lupantech/MathVista evaluation/calculate_score.py at 2a249bb: get_most_similar, normalize_extracted_answer
    charades        EvolvingLMMs-Lab/lmms-eval tasks/charades_sta/utils.py at 75571cf, on the texts; and huangb23/VTimeLLM
                    vtimellm/eval/{eval,metric}.py at c34ae56: iou, grounding_metrics
    choices         the package lmms-eval 0.7.3, tasks/{mlvu,mvbench,videomme}/utils.py: process_results and aggregate_results
    qvhighlights    jayleicn/moment_detr standalone_eval/{eval,utils}.py at b7e553a, whole: python -m standalone_eval.eval
    nextgqa         doc-doc/NExT-GQA code/TempGQA/eval_ground.py at 63772e0, whole: eval_ground
    lvis_truth      lvis-dataset/lvis-api lvis/{lvis,results,eval}.py at 7d7f07d: what LVISEval(truth, a box per image and category,
                    'bbox') holds after _prepare: the categories that count in an image, its truths, frequencies
    got10k          the package got10k 0.1.3: ExperimentGOT10k(root, 'val').report on folders written from the input

Run on 2026-11-21 (charades, docvqa, lvis_truth, nextgqa, qvhighlights on 2026-11-23) with Python 3.11, numpy 2.4.6, pandas 3.1.1,
scikit-learn 1.9.1, pycocotools 2.0.11, Levenshtein 0.27.5.
Not to be had: the evaluation of AndroidControl's own paper (no program of theirs compares predictions); EasyVideoR1's and
VideoChat-R1's tracking and spatio-temporal protocols are papers' protocols, not a benchmark's program.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from assets.official_image_inputs import IMAGE_INPUTS
from assets.official_video_inputs import VIDEO_INPUTS

__all__ = ["FOLDER", "INPUTS", "load", "make_all"]

FOLDER = Path(__file__).parent / "fixtures" / "official"
Row = dict[str, Any]


def _box(rng: random.Random, width: float, height: float) -> list[float]:
    """[x, y, w, h] with quarters of pixels, inside the picture."""
    w, h = rng.uniform(8, width / 2), rng.uniform(8, height / 2)
    return [round(v * 4) / 4 for v in (rng.uniform(0, width - w), rng.uniform(0, height - h), w, h)]


def _moved(rng: random.Random, box: Sequence[float], by: float) -> list[float]:
    x, y, w, h = box
    return [
        round((x + rng.uniform(-by, by) * w) * 4) / 4,
        round((y + rng.uniform(-by, by) * h) * 4) / 4,
        w,
        h,
    ]


def ovdeval() -> Row:
    """Two detection sets: `scored` with a score per box, `ties` with 1.0 for every box. Result rows carry their number."""
    cases: Row = {}
    for case, seed in (("scored", 11), ("ties", 12)):
        rng = random.Random(seed)
        names = ["red car", "blue car", "open door", "closed door", "cup", "not a cup"]
        truth: Row = {
            "categories": [{"id": i + 1, "name": name} for i, name in enumerate(names)],
            "images": [],
            "annotations": [],
        }
        results: list[Row] = []
        for image in range(1, 15):
            truth["images"].append(
                {"id": image, "file_name": f"{image:04d}.jpg", "width": 640, "height": 480}
            )
            box = _box(rng, 640, 480)
            # some objects cover each other, so that a box may be near two of them
            for _ in range(rng.randrange(0, 5)):
                box, label = (
                    _moved(rng, box, 0.15) if rng.random() < 0.4 else _box(rng, 640, 480),
                    rng.randrange(1, 7),
                )
                truth["annotations"].append(
                    {
                        "id": len(truth["annotations"]) + 1,
                        "image_id": image,
                        "category_id": label,
                        "bbox": box,
                        "area": box[2] * box[3],
                        "iscrowd": int(rng.random() < 0.05),
                    }
                )
                for _ in range(rng.randrange(0, 5)):
                    said = label if rng.random() < 0.6 else rng.randrange(1, 7)
                    moved = _moved(rng, box, rng.choice([0, 0.05, 0.2, 0.5]))
                    results.append({"image_id": image, "category_id": said, "bbox": moved})
            for _ in range(rng.randrange(0, 3)):
                results.append(
                    {
                        "image_id": image,
                        "category_id": rng.randrange(1, 7),
                        "bbox": _box(rng, 640, 480),
                    }
                )
        results.append({"image_id": 1, "category_id": 1, "bbox": [20.0, 20.0, 0.0, 0.0]})
        results = [row for row in results if row["image_id"] != 5]
        rng.shuffle(results)
        for number, row in enumerate(results):
            row.update(score=1.0 if case == "ties" else (number * 37 % 1009) / 1009, n=number)
        cases[case] = {"truth": truth, "results": results}
    return cases


def _point(rng: random.Random, box: Sequence[float], kind: str) -> list[float] | None:
    """A point in pixels: inside, on a corner, just outside, anywhere, or none."""
    x1, y1, x2, y2 = box
    if kind == "inside":
        return [rng.uniform(x1, x2), rng.uniform(y1, y2)]
    if kind == "edge":
        return [rng.choice([x1, x2]), rng.choice([y1, y2])]
    if kind == "beside":
        return [x2 + rng.choice([0.25, 1.0]), (y1 + y2) / 2]
    return [rng.uniform(0, 1024), rng.uniform(0, 512)] if kind == "anywhere" else None


_KINDS = ("inside", "inside", "inside", "edge", "beside", "anywhere", "none")


def screenspot() -> Row:
    """Per platform SeeClick's rows, the answer text, and the point it holds as shares of the picture of 1024 x 512 (or null)."""
    rng, files = random.Random(21), {}
    for platform, sources in (
        ("mobile", ("ios", "android")),
        ("desktop", ("windows", "macos")),
        ("web", ("gitlab", "shop")),
    ):
        rows = []
        for number in range(24):
            x, y, w, h = _box(rng, 1024, 512)
            found = _point(rng, (x, y, x + w, y + h), rng.choice(_KINDS))
            point = [found[0] / 1024, found[1] / 512] if found else None
            text = rng.choice(["", "I cannot see it", "(0.5", "(0.1,0.2,0.3)"])
            if point and number % 5 == 0:  # a box of which the middle counts
                half = 1 / 64
                text = f"({point[0] - half!r},{point[1] - half!r},{point[0] + half!r},{point[1] + half!r})"
                point = [
                    (point[0] - half + (point[0] + half)) / 2,
                    (point[1] - half + (point[1] + half)) / 2,
                ]
            elif point:
                text = f"({point[0]!r},{point[1]!r})"
            rows.append(
                {
                    "img_filename": "blank.png",
                    "bbox": [x, y, w, h],
                    "instruction": f"element {number}",
                    "data_type": rng.choice(["text", "icon"]),
                    "data_source": rng.choice(sources),
                    "response": text,
                    "point": point if "e-" not in text else None,
                }
            )
        files[platform] = rows
    return {"image_size": [1024, 512], "files": files}


def screenspot_pro() -> Row:
    """Samples with the official fields, and the point as shares of the picture (or null)."""
    rng, rows = random.Random(22), []
    for number in range(60):
        size = rng.choice([[4096, 2048], [2048, 1024]])
        x, y, w, h = _box(rng, 1024, 512)
        found = _point(rng, (x, y, x + w, y + h), rng.choice(_KINDS))
        rows.append(
            {
                "id": str(number),
                "group": rng.choice(["CAD", "Dev", "OS", "Office"]),
                "platform": "linux",
                "application": "any",
                "ui_type": rng.choice(["text", "icon"]),
                "img_size": size,
                "bbox": [x, y, x + w, y + h],
                "point": [found[0] / size[0], found[1] / size[1]] if found else None,
            }
        )
    return {"rows": rows}


_TEXTS = (
    "hello world",
    "hello",
    "Clock",
    "play some music now",
    "hello there",
    "play",
    "clock",
    "new york",
    "New York city",
    "milk",
)
_SCROLLS = ("up", "down", "left", "right")


def _true_action(rng: random.Random, names: Sequence[str], size: Sequence[int]) -> Row:
    """One action in mmrl's form; points on whole pixels."""
    name = rng.choice(names)
    if name in ("click", "long_press"):
        return {"action": name, "point": [rng.randrange(1, size[0]), rng.randrange(1, size[1])]}
    if name in ("type", "select", "open_app"):
        return {"action": name, "app" if name == "open_app" else "text": rng.choice(_TEXTS)}
    return (
        {"action": name, "direction": rng.choice(_SCROLLS)}
        if name == "scroll"
        else {"action": name}
    )


def _found_action(
    rng: random.Random, true: Row, names: Sequence[str], size: Sequence[int], radius: float
) -> Row | None:
    """The true action, slightly or badly changed, another one, or None."""
    kind = rng.choice(["same", "same", "near", "edge", "argument", "other", "none"])
    if kind == "none":
        return None
    if kind == "other":
        return _true_action(rng, names, size)
    found = dict(true)
    if "point" in true and kind != "same":
        x, y = true["point"]
        step = {
            "near": rng.randrange(1, int(radius)),
            "edge": int(radius),
            "argument": int(radius) + 1,
        }[kind]
        axis, sign = rng.randrange(2), rng.choice([-1, 1])
        found["point"] = [
            max(1, x + (sign * step if axis == 0 else 0)),
            max(1, y + (sign * step if axis == 1 else 0)),
        ]
    for key, values in (("text", _TEXTS), ("app", _TEXTS), ("direction", _SCROLLS)):
        if key in true and kind in ("argument", "near"):
            found[key] = rng.choice(values)
    return found


def _steps(
    seed: int, count: int, names: Sequence[str], size: Sequence[int], radius: float
) -> list[Row]:
    rng = random.Random(seed)
    rows = []
    for _ in range(count):
        true = _true_action(rng, names, size)
        rows.append({"true": true, "found": _found_action(rng, true, names, size, radius)})
    return rows


def os_atlas() -> Row:
    """Steps of AndroidControl in OS-Atlas' 0-1000 frame; `split` is the test subsplit of the step's episode. `texts` are
    [true, typed] of further steps, each judged by itself."""
    names = (
        "click",
        "click",
        "long_press",
        "type",
        "open_app",
        "scroll",
        "press_back",
        "press_home",
        "wait",
    )
    rows = _steps(31, 120, names, (1000, 1000), 140.0)
    splits = ("IDD", "app_unseen", "task_unseen", "category_unseen")
    return {
        "steps": [{**row, "split": splits[number % 4]} for number, row in enumerate(rows)],
        "texts": [
            [true, found] for true in (*_TEXTS, "new") for found in (*_TEXTS, "new", "New", "newer")
        ],
    }


def gui_r1() -> Row:
    """Steps with `group`; `hitless` is a small set in which two kinds of action are never right; `texts` are [true, said]."""
    names = ("click", "click", "type", "select", "open_app", "scroll", "press_back", "complete")
    rows = [
        {**row, "group": ("android", "web")[number % 2]}
        for number, row in enumerate(_steps(32, 160, names, (1080, 2400), 140.0))
    ]
    click = {"action": "click", "point": [500, 500]}
    up, down = ({"action": "scroll", "direction": way} for way in ("up", "down"))
    hitless = [
        {"true": true, "found": found, "group": "android"}
        for true, found in ((click, click), (up, down), ({"action": "press_back"}, click))
    ]
    return {
        "size": [1080, 2400],
        "steps": rows,
        "hitless": hitless,
        "texts": [
            [a, b]
            for a in (*_TEXTS, "[new york]", "ab ab")
            for b in (*_TEXTS, "", "[new york]", "abc")
        ],
    }


def ui_r1() -> Row:
    """Steps; the answer's points are of the 644 x 1484 picture the model sees, the truth's of 1080 x 2400."""
    names = ("click", "click", "click", "type", "open_app", "scroll", "navigate_back")
    rows = _steps(33, 120, names, (1080, 2400), 151.0)
    for row in rows:
        found = row["found"]
        if found and "point" in found:
            x, y = found["point"]
            found = {
                **found,
                "point": [max(1, round(x * 644 / 1080)), max(1, round(y * 1484 / 2400))],
            }
        row["found"] = found
    tap = {"action": "click", "point": [540, 1200]}
    return {
        "steps": [
            *rows,
            *(
                {"true": tap, "found": {"action": "open_app", "point": [322, 742 + by]}}
                for by in (0, 8)
            ),
        ]
    }


def odyssey() -> Row:
    """Episodes of GUI-Odyssey in 0-1000; some clicks have the element's box."""
    names = (
        "click",
        "click",
        "long_press",
        "type",
        "scroll",
        "press_back",
        "press_home",
        "complete",
    )
    rng, steps = random.Random(34), []
    for episode in range(24):
        length = rng.randrange(1, 5)
        rows = _steps(340 + episode, length, names, (1000, 1000), 140.0)
        for number, row in enumerate(rows):
            if rng.random() < 0.45:
                row["found"] = dict(row["true"])
            x, y = row["true"].get("point", (0, 0))
            box = (
                [x - 30, y - 200, x + 40, y + 200]
                if "point" in row["true"] and rng.random() < 0.5
                else None
            )
            if box and rng.random() < 0.5 and row["found"] and "point" in row["found"]:
                row["found"] = {**row["found"], "point": [x + 40, y + 200]}
            steps.append(
                {
                    **row,
                    "episode": f"ep{episode:02d}",
                    "step": number,
                    "length": length,
                    "sam2_bbox": box,
                }
            )
    return {"steps": steps}


_SETS = (
    "IIIT5K",
    "svt",
    "IC13_857",
    "IC15_1811",
    "svtp",
    "ct80",
    "cocotext",
    "ctw",
    "totaltext",
    "HOST",
    "WOST",
    "WordArt",
    "IAM",
    "ReCTS",
    "ORAND",
    "NonSemanticText",
    "SemanticText",
    "STVQA",
    "textVQA",
    "ocrVQA",
    "ESTVQA",
    "ESTVQA_cn",
    "docVQA",
    "infographicVQA",
    "ChartQA",
    "ChartQA_Human",
    "FUNSD",
    "SROIE",
    "POIE",
    "HME100k",
)
_TYPES = (
    "Regular Text Recognition",
    "Irregular Text Recognition",
    "Artistic Text Recognition",
    "Handwriting Recognition",
    "Digit String Recognition",
    "Non-Semantic Text Recognition",
    "Scene Text-centric VQA",
    "Doc-oriented VQA",
    "Key Information Extraction",
    "Handwritten Mathematical Expression Recognition",
)
_ANSWERS = (
    "STOP",
    "Coca Cola",
    "12,345.67",
    "\\frac { a } { b }",
    "Straße",
    "İstanbul",
    "line one\nline two",
    "  padded ",
    "x ^ { 2 }",
    "中文",
)


def ocrbench() -> Row:
    """Rows of OCRBench with a prediction each; the last one is right only after its first 1,024 characters."""
    rng, rows = random.Random(41), []
    for number in range(125):
        name = _SETS[number % len(_SETS)]
        kind = _TYPES[-1] if name == "HME100k" else _TYPES[number % 9]
        answers = rng.sample(_ANSWERS, rng.randrange(1, 4))
        right = rng.choice(answers)
        said = rng.choice(
            [
                right,
                f"The text says {right}.",
                right.upper(),
                right.lower(),
                right.replace(" ", ""),
                right[:-1],
                right.replace("\n", " "),
                "",
                "no idea",
                f"{right[:3]} {right[3:]}",
            ]
        )
        rows.append(
            {
                "id": number,
                "type": kind,
                "dataset_name": name,
                "question": "what is written?",
                "answers": answers,
                "image_path": "none.png",
                "predict": said,
            }
        )
    rows[-1].update(answers=["needle"], predict="a " * 600 + "needle")
    return {"rows": rows, "times": 8}


_SAID = (
    "Denver  Broncos",
    "denver broncos",
    "Denver\tBroncos ",
    "Denver Bronco",
    "12/15/88",
    "12/15/89",
    "Stra\u00dfe",
    "STRASSE",
    "\u0149a",
    "na",
    "x" + " " * 40 + "y",
    "a  b   c",
    "a b c",
    "",
    " ",
    "hello",
    "help",
    "heXXX",
    "\uff11\uff12",
    "12",
)


def docvqa() -> Row:
    """Every answer against lists of accepted answers: runs of white space, case, letters that grow in upper case, empty texts."""
    truths = [[text] for text in _SAID] + [
        ["Denver Broncos", "Denver R. Broncos"],
        ["12", "twelve", ""],
    ]
    rows = [{"answer": said, "answers": accepted} for said in _SAID for accepted in truths]
    return {"rows": [{"questionId": number, **row} for number, row in enumerate(rows, 1)]}


def vsibench() -> Row:
    """Number questions and choice questions with answer texts. Truths are positive: the official rule divides by them."""
    rng, rows = random.Random(51), []
    kinds = (
        "object_abs_distance",
        "object_counting",
        "object_size_estimation",
        "room_size_estimation",
    )
    for number in range(80):
        kind = kinds[number % 4]
        truth = (
            rng.randrange(1, 12)
            if kind == "object_counting"
            else round(rng.uniform(0.2, 40), rng.choice([0, 1, 2]))
        )
        near = truth * rng.choice(
            [1, 1, 0.5, 0.55, 0.75, 0.9, 0.95, 1.05, 1.1, 1.3, 1.45, 1.5, 1.51, 3, -1]
        )
        near = round(near, 3)
        said = rng.choice(
            [
                f"{near}",
                f"{near}",
                f"{near}.",
                f"{near} meters",
                f"{near} m.",
                f"about {near}",
                "",
                "three",
                "nan",
                f"+{near}" if near > 0 else f"{near}",
                f"{near:.2e}",
            ]
        )
        rows.append({"question_type": kind, "prediction": said, "ground_truth": str(truth)})
    choices = (
        "object_rel_direction_easy",
        "object_rel_direction_medium",
        "object_rel_direction_hard",
        "object_rel_distance",
        "route_planning",
        "obj_appearance_order",
    )
    for number in range(60):
        right = rng.choice("ABCD")
        said = rng.choice(
            [
                right,
                right.lower(),
                f"{right}.",
                f"{right}. the chair",
                rng.choice("ABCD"),
                "",
                f"({right})",
            ]
        )
        rows.append(
            {"question_type": choices[number % 6], "prediction": said, "ground_truth": right}
        )
    unlike = [
        {"prediction": said, "ground_truth": truth}
        for said, truth in (("5", "-4"), ("1_0", "10"), ("٣", "3"))
    ]
    return {"rows": rows, "unlike": unlike}


def chartqa() -> Row:
    """[prediction, truth] pairs."""
    values = (
        "5",
        "5.0",
        "5.25",
        "4.75",
        "5.26",
        "4.74",
        "5%",
        "0.05",
        "0.0525",
        "1,234",
        "1234",
        "0",
        "0.0",
        "nan",
        "inf",
        "Yes",
        "yes",
        "no",
        "2017",
        "1950",
        "-3",
        "-3.1",
        "",
        "%",
        "12 %",
        " 5",
        "$5",
        "Blue ",
        "blue",
        "1e3",
        "1000",
    )
    return {"pairs": [[a, b] for a in values for b in values]}


def mathvista() -> Row:
    """Extractions with their problems' types."""
    rng = random.Random(61)
    rows: list[Row] = []
    options = (
        ["red", "green", "dark green"],
        ["12 cm", "14 cm", "2 cm", "20 cm"],
        ["Yes", "No"],
        ["Alpha", "Beta", "Gamma"],
    )
    for _ in range(60):
        choices = rng.choice(options)
        right = rng.choice(choices)
        letter = "ABCD"[choices.index(right)]
        said = rng.choice(
            [
                right,
                right.upper(),
                f"({letter}) {right}",
                letter,
                right[1:],
                f"{right}.",
                f"is {right}",
                "zzzz",
                "",
                "The answer is (B)",
            ]
        )
        rows.append(
            {
                "extraction": said,
                "choices": choices,
                "question_type": "multi_choice",
                "answer_type": "text",
                "precision": None,
                "answer": right,
            }
        )
    for kind, truth, precision in (
        ("integer", "12", None),
        ("float", "3.14", 2),
        ("float", "0.5", 1),
        ("integer", "-3", None),
    ):
        near = (f"{float(truth)}", f"{float(truth) + 0.004}", f"{float(truth) + 0.06}")
        for said in (truth, f"{truth}0", *near, "twelve", "", f" {truth} "):
            rows.append(
                {
                    "extraction": said,
                    "choices": None,
                    "question_type": "free_form",
                    "answer_type": kind,
                    "precision": precision,
                    "answer": truth,
                }
            )
    return {"rows": rows}


INPUTS: Mapping[str, Callable[[], Row]] = {
    make.__name__: make
    for make in (
        ovdeval,
        screenspot,
        screenspot_pro,
        os_atlas,
        gui_r1,
        ui_r1,
        odyssey,
        ocrbench,
        docvqa,
        vsibench,
        chartqa,
        mathvista,
        *IMAGE_INPUTS,
        *VIDEO_INPUTS,
    )
}
"""Name of an input file -> its content."""


def make_all(folder: str | Path = FOLDER) -> list[Path]:
    """Write every input file into `folder`; the same bytes each time."""
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, make in INPUTS.items():
        path = target / f"{name}.json"
        path.write_text(
            json.dumps(make(), ensure_ascii=False, separators=(",", ":")) + "\n", encoding="utf-8"
        )
        paths.append(path)
    return paths


def load(name: str) -> tuple[Any, Any]:
    """(input, golden numbers) of one official program."""
    given, golden = (
        json.loads((FOLDER / f"{name}{kind}.json").read_text(encoding="utf-8"))
        for kind in ("", ".golden")
    )
    return given, golden["numbers"]


if __name__ == "__main__":
    for written in make_all(*sys.argv[1:2]):
        print(written)
