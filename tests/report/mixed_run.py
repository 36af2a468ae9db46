"""A synthetic mixed run: six sources with boxes, labelled boxes, points, clicks, texts and letters, one without pictures.

One source holds two tasks, and one gets worse on purpose. Metrics follow from the drawn answers, tables from the rows.
"""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw

from mmrl.evaluation.stats import describe

Row = dict[str, Any]
COLORS = {
    "red": (206, 62, 50),
    "blue": (52, 98, 190),
    "green": (60, 150, 80),
    "yellow": (232, 190, 60),
}
SIZES = ((640, 480), (480, 640), (800, 450))
HEADLINES = {
    "grounding": "iou",
    "detection": "f1@0.5",
    "counting": "correct",
    "gui_grounding": "hit",
    "ocr": "similarity",
    "choice": "correct",
    "math": "correct",
}
SOURCES = {
    "refcoco-mini": ("grounding",),
    "coco-mini": ("detection",),
    "pixmo-mini": ("counting",),
    "screens": ("gui_grounding",),
    "pages": ("ocr", "choice"),
    "sums": ("math",),
}
FALLING = "pixmo-mini"
STEPS = (0, 20, 40)
WORDS = (
    "INVOICE 2041",
    "Total: 18.40 EUR",
    "Fragile – this side up",
    "Gate B12 <boarding>",
    "مرحبا بالعالم",
)


def skill(source: str, step: int) -> float:
    """0.35 to 0.95 over the run; the falling source goes the other way."""
    share = step / STEPS[-1]
    return 0.95 - 0.6 * share if source == FALLING else 0.35 + 0.6 * share


def _picture(path: Path, rng: random.Random, number: int) -> list[tuple[str, list[float]]]:
    """Draw a few shapes; returns their (label, box)."""
    width, height = SIZES[number % len(SIZES)]
    picture = Image.new("RGB", (width, height), (236, 233, 226))
    draw = ImageDraw.Draw(picture)
    shapes = []
    for place in range(3):
        color, side = rng.choice(list(COLORS)), 0.2 * min(width, height)
        left = place * width / 3 + rng.uniform(0, width / 3 - side)
        top = rng.uniform(0, height - side)
        box = [round(v) for v in (left, top, left + side, top + side)]
        draw.ellipse(box, fill=COLORS[color], outline=(40, 40, 40))
        shapes.append((f"{color} circle", [float(v) for v in box]))
    picture.save(path)
    return shapes


def _moved(rng: random.Random, box: Sequence[float], good: bool) -> list[float]:
    shift = (box[2] - box[0]) * (rng.uniform(-0.06, 0.06) if good else rng.uniform(0.5, 0.9))
    return [round(v + shift, 1) for v in box]


def _iou(a: Sequence[float], b: Sequence[float]) -> float:
    width, height = min(a[2], b[2]) - max(a[0], b[0]), min(a[3], b[3]) - max(a[1], b[1])
    inside = max(0.0, width) * max(0.0, height)
    return inside / ((a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - inside)


def _middle(box: Sequence[float]) -> list[float]:
    return [(box[0] + box[2]) / 2, (box[1] + box[3]) / 2]


def answer(
    task: str, rng: random.Random, shapes: list[tuple[str, list[float]]], number: int, good: bool
) -> tuple[str, str, dict[str, float], Row]:
    """(question, text, metrics, detail) of one completion."""
    boxes, labels = [b for _, b in shapes], [x for x, _ in shapes]
    if task == "grounding":
        box = _moved(rng, boxes[0], good)
        value = _iou(box, boxes[0])
        return (
            labels[0],
            str(box),
            {"iou": value, "acc@0.5": float(value >= 0.5), "correct": float(value >= 0.5)},
            {"pred_boxes": [box], "gold_boxes": [boxes[0]], "frame": "abs_orig"},
        )
    if task == "detection":
        found = [_moved(rng, b, good or i == 0) for i, b in enumerate(boxes)]
        share = sum(_iou(a, b) >= 0.5 for a, b in zip(found, boxes, strict=True)) / len(boxes)
        return (
            "all circles",
            json.dumps(found),
            {"f1@0.5": share, "correct": float(share == 1)},
            {
                "pred_boxes": found,
                "gold_boxes": boxes,
                "pred_labels": labels,
                "gold_labels": labels,
            },
        )
    if task == "counting":
        points = [
            [v + rng.uniform(-9, 9) for v in _middle(b)] for b in (boxes if good else boxes[:1])
        ]
        right = float(len(points) == len(boxes))
        return (
            "How many circles?",
            f"{len(points)}",
            {"correct": right, "count_error": 1 - right},
            {
                "pred_points": points,
                "gold_points": [_middle(b) for b in boxes],
                "pred_text": str(len(points)),
                "gold_text": str(len(boxes)),
            },
        )
    if task == "gui_grounding":
        point = _middle(_moved(rng, boxes[1], good))
        hit = float(
            boxes[1][0] <= point[0] <= boxes[1][2] and boxes[1][1] <= point[1] <= boxes[1][3]
        )
        return (
            f"Press the {labels[1]}",
            str(point),
            {"hit": hit, "correct": hit},
            {"pred_points": [point], "gold_boxes": [boxes[1]], "gold_points": [_middle(boxes[1])]},
        )
    gold = {"ocr": WORDS[number % len(WORDS)], "choice": "B", "math": r"\frac{3}{4}"}[task]
    said = gold if good else {"ocr": gold[: len(gold) // 2], "choice": "C", "math": "0.7"}[task]
    metrics = {"correct": float(said == gold)} | (
        {"similarity": len(said) / len(gold)} if task == "ocr" else {}
    )
    return (
        {
            "ocr": "What does it say?",
            "choice": "Which shape is largest? A: none, B: the left, C: the right",
            "math": "1/2 + 1/4 = ?",
        }[task],
        said,
        metrics,
        {"pred_text": said, "gold_text": gold},
    )


def _row(
    source: str, task: str, number: int, step: int, mode: str, n: int, picture: tuple[str, list]
) -> Row:
    rng = random.Random(f"{source}/{number}/{mode}/{n}")  # luck stays, skill changes
    luck, parsed = rng.random(), rng.random() > 0.04
    question, text, metrics, detail = answer(
        task, rng, picture[1], number, luck < skill(source, step)
    )
    value = metrics[HEADLINES[task]]
    score: Row = {
        "value": 0.9 * value + 0.1,
        "parsed": True,
        "reason": None,
        "parts": {"accuracy": value, "format": 1.0},
        "weights": {"accuracy": 0.9, "format": 0.1},
        "metrics": metrics,
        "detail": detail,
    }
    if not parsed:
        text = "I am not sure"
        gold = {k: v for k, v in detail.items() if k.startswith("gold")}
        score = {
            **score,
            "value": 0.0,
            "parsed": False,
            "reason": "no_answer",
            "parts": {"accuracy": 0.0, "format": 0.0},
            "metrics": {} if number % 2 else dict.fromkeys(metrics, 0.0),
            "detail": gold,
        }
    return {
        "id": f"{task}-{number}",
        "source": source,
        "task": task,
        "question": question,
        "mode": mode,
        "stop": "eos",
        "images": [picture[0]] if task != "math" else [],
        "text": f"<answer>{text}</answer>" if parsed else text,
        "headline": HEADLINES[task],
        "score": score,
    }


def _value(row: Row, name: str) -> float:
    score = row["score"]
    if name in ("reward", "parse_rate"):
        return float(score["value"] if name == "reward" else score["parsed"])
    return float(score["metrics"].get(row["headline"] if name == "headline" else name, 0.0))


def table(rows: Sequence[Row]) -> dict[str, Any]:
    """Every metric over the rows whose task measures it, with the rows' own headline."""
    names = {
        t: {k for r in rows if r["task"] == t for k in r["score"]["metrics"]} | {HEADLINES[t]}
        for t in HEADLINES
    }
    out = {}
    for name in ("reward", "parse_rate", "headline", *sorted(set().union(*names.values()))):
        chosen = [
            r
            for r in rows
            if name in ("reward", "parse_rate", "headline") or name in names[r["task"]]
        ]
        if chosen:
            out[name] = dataclasses.asdict(
                describe([_value(r, name) for r in chosen], [r["id"] for r in chosen])
            )
    return out


def results_of(rows: Sequence[Row], step: int, k: int) -> dict[str, Any]:
    """results.json as an evaluation of several sources writes it."""
    out: dict[str, Any] = {
        "step": step,
        "task": "mixed",
        "per_source": {},
        "per_task": {},
        "headlines": {
            "per_source": {
                s: ", ".join(sorted({HEADLINES[t] for t in ts})) for s, ts in SOURCES.items()
            },
            "per_task": HEADLINES,
        },
        "protocol": {
            "samples_per_prompt": k,
            "temperature": 1.0,
            "interval": "95 % cluster bootstrap over samples",
        },
    }
    for mode, prefix in (("greedy", ""), ("sampled", "sampled/")):
        chosen = [r for r in rows if r["mode"] == mode]
        out[mode] = table(chosen)
        parts = {s: table([r for r in chosen if r["source"] == s]) for s in SOURCES}
        means = [p["headline"] for p in parts.values()]
        mean = sum(m["mean"] for m in means) / len(means)
        out[mode]["macro"] = {"mean": mean, "low": mean - 0.05, "high": mean + 0.05, "n": len(rows)}
        del out[mode]["headline"]
        for name, part in parts.items():
            out["per_source"].setdefault(name, {}).update(
                {f"{prefix}{k}": v for k, v in part.items()}
            )
        for task in HEADLINES:
            part = table([r for r in chosen if r["task"] == task])
            out["per_task"].setdefault(task, {}).update(
                {f"{prefix}{k}": v for k, v in part.items()}
            )
    return out


def _metrics_row(step: int, rng: random.Random) -> Row:
    row: Row = {
        "step": step,
        "time/total": 2.0,
        "time/rollout": 1.2,
        "train/entropy": 1.0 / (1 + step / 10),
    }
    for source, tasks in SOURCES.items():
        level = min(1.0, max(0.0, skill(source, step) + rng.gauss(0, 0.04)))
        row |= {
            f"train/{source}/reward/mean": 0.9 * level + 0.1,
            f"train/{source}/correct": level,
            f"train/{source}/{HEADLINES[tasks[0]]}": level,
            f"train/{source}/parse_rate": 0.96,
        }
    row["train/reward/mean"] = sum(row[f"train/{s}/reward/mean"] for s in SOURCES) / len(SOURCES)
    row["train/correct"], row["train/parse_rate"] = 0.5 + 0.01 * step, 0.96
    return row


def make_mixed_run(
    folder: Path, *, prompts: int = 24, k: int = 2, gallery: Sequence[str] | None = None
) -> Path:
    """Write the run. gallery.json has the first 12 prompts, which are all of one source, or in `gallery` ids as older runs."""
    pictures = folder / "pictures"
    pictures.mkdir(parents=True)
    rng = random.Random(0)
    scenes = [(f"pictures/{n}.png", _picture(pictures / f"{n}.png", rng, n)) for n in range(6)]
    prompts_of: list[tuple[str, str, int]] = [
        (s, t, n) for s, ts in SOURCES.items() for t in ts for n in range(prompts)
    ]
    for step in STEPS:
        rows = [
            _row(s, t, n, step, mode, i, scenes[n % 6])
            for s, t, n in prompts_of
            for mode, count in (("greedy", 1), ("sampled", k))
            for i in range(count)
        ]
        place = folder / "eval" / f"step_{step:06d}"
        place.mkdir(parents=True)
        (place / "predictions.jsonl").write_text(
            "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in rows), "utf-8"
        )
        (place / "results.json").write_text(json.dumps(results_of(rows, step, k)), "utf-8")
    (folder / "metrics.jsonl").write_text(
        "".join(json.dumps(_metrics_row(s, rng)) + "\n" for s in range(1, STEPS[-1] + 1)), "utf-8"
    )
    (folder / "alarms.jsonl").write_text("", "utf-8")
    listed = (
        {"ids": list(gallery)}
        if gallery is not None
        else {"prompts": [{"source": "refcoco-mini", "id": f"grounding-{n}"} for n in range(12)]}
    )
    (folder / "gallery.json").write_text(json.dumps(listed), "utf-8")
    (folder / "config.yaml").write_text(
        "name: one-for-all\neval:\n  best_metric: sampled/macro\n", "utf-8"
    )
    (folder / "run.json").write_text(
        json.dumps(
            {
                "name": "one-for-all",
                "model": "assets/tiny_vlm",
                "task": "mixed",
                "total_steps": STEPS[-1],
                "status": "finished",
            }
        )
    )
    return folder
