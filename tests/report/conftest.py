"""A realistic run folder made from nothing: drawn pictures, boxes that tighten over training, plausible curves.

IoUs are computed from the boxes and intervals by mmrl.evaluation.stats, so the folder agrees with itself like a trainer's.
"""

from __future__ import annotations

import dataclasses
import json
import math
import random
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
from PIL import Image, ImageDraw

from mmrl.evaluation.stats import describe

Box = tuple[float, float, float, float]
SIZES = ((640, 480), (480, 640), (112, 112), (960, 540), (500, 500))
COLORS = {
    "red": (206, 62, 50),
    "blue": (52, 98, 190),
    "green": (60, 150, 80),
    "yellow": (232, 190, 60),
}
SOURCES = ("refcoco-mini", "screens")
LEVELS = (0.3, 0.5, 0.75)


@dataclasses.dataclass(frozen=True)
class Plan:
    """How large a run to make; `done` < `steps` leaves it running."""

    steps: int = 30
    done: int = 30
    every: int = 10
    pictures: int = 10
    samples: int = 2
    final_skill: float = 0.85
    seed: int = 0
    name: str = "grounding-tiny"


def iou(a: Box, b: Box) -> float:
    """Intersection over union of two boxes."""
    width, height = min(a[2], b[2]) - max(a[0], b[0]), min(a[3], b[3]) - max(a[1], b[1])
    inside = max(0.0, width) * max(0.0, height)
    return inside / ((a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - inside)


def write_jsonl(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """One JSON object per line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8"
    )


def draw_scene(path: Path, rng: random.Random, number: int) -> tuple[str, Box]:
    """A picture with a few shapes; returns the question and the box of the shape asked for."""
    width, height = SIZES[number % len(SIZES)]
    picture = Image.new("RGB", (width, height), (236, 233, 226))
    draw = ImageDraw.Draw(picture)
    for y in range(height):
        tone = int(18 * y / height)
        draw.line([(0, y), (width, y)], fill=(232 - tone, 229 - tone, 222 - tone // 2))
    question, box = "", (0.0, 0.0, 1.0, 1.0)
    for _ in range(4):
        color, shape = rng.choice(list(COLORS)), rng.choice(["circle", "square"])
        side = rng.uniform(0.18, 0.36) * min(width, height)
        left, top = rng.uniform(0, width - side), rng.uniform(0, height - side)
        box = (round(left), round(top), round(left + side), round(top + side))
        (draw.ellipse if shape == "circle" else draw.rectangle)(
            box, fill=COLORS[color], outline=(40, 40, 40)
        )
        question = f"the {color} {shape}"
    picture.save(path)
    return question, box


def answer(rng: random.Random, gold: Box, skill: float, greedy: bool) -> dict[str, Any]:
    """text, stop and score of one completion; errors shrink as skill goes to 1."""
    side = gold[2] - gold[0]
    spread = (1.05 - skill) * (0.35 if greedy else 0.55) * side
    box = [c + rng.gauss(0, spread) for c in gold]
    pred = (
        min(box[0], box[2] - 4),
        min(box[1], box[3] - 4),
        max(box[2], box[0] + 4),
        max(box[3], box[1] + 4),
    )
    gold_boxes = [list(gold)]
    names = ["iou", *(f"acc@{level:g}" for level in LEVELS)]
    if rng.random() < 0.12 * (1.1 - skill):
        text, reason = rng.choice(
            [
                ("The object is on the left <think>", "unclosed_think"),
                ("", "empty"),
                ("<answer>[12, 30]</answer>", "wrong_count: 2 numbers"),
            ]
        )
        return {
            "text": text,
            "stop": "length" if reason == "unclosed_think" else "eos",
            "score": {
                "value": 0.0,
                "parsed": False,
                "reason": reason,
                "parts": {"accuracy": 0.0, "format": 0.0},
                "weights": {"accuracy": 0.9, "format": 0.1},
                "metrics": dict.fromkeys(names, 0.0),
                "detail": {"pred_boxes": [], "gold_boxes": gold_boxes, "frame": "abs_orig"},
            },
        }
    value = iou(pred, gold)
    metrics = {"iou": value, **{f"acc@{level:g}": float(value >= level) for level in LEVELS}}
    text = (
        f"<think>I look for the shape and its edges. It is {'small' if side < 90 else 'large'}.</think>"
        f"<answer>[{', '.join(f'{v:.0f}' for v in pred)}]</answer>"
    )
    return {
        "text": text,
        "stop": "eos",
        "score": {
            "value": 0.9 * value + 0.1,
            "parsed": True,
            "reason": None,
            "parts": {"accuracy": value, "format": 1.0},
            "weights": {"accuracy": 0.9, "format": 0.1},
            "metrics": metrics,
            "detail": {"pred_boxes": [list(pred)], "gold_boxes": gold_boxes, "frame": "abs_orig"},
        },
    }


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Estimates of every metric, as in results.json."""
    clusters = [r["id"] for r in rows]
    columns = {
        "reward": [r["score"]["value"] for r in rows],
        "parse_rate": [float(r["score"]["parsed"]) for r in rows],
    }
    for name in rows[0]["score"]["metrics"]:
        columns[name] = [r["score"]["metrics"][name] for r in rows]
    return {k: dataclasses.asdict(describe(v, clusters)) for k, v in columns.items()}


def skill_at(plan: Plan, step: int) -> float:
    """0.35 at the start, rising towards final_skill."""
    return plan.final_skill - (plan.final_skill - 0.35) * math.exp(-2.5 * step / plan.steps)


def write_evaluation(run: Path, plan: Plan, step: int, scenes: list[tuple[str, str, Box]]) -> None:
    """eval/step_*: results and predictions of all scenes."""
    rows = []
    for number, (path, question, gold) in enumerate(scenes):
        rng = random.Random(plan.seed * 1000 + number)  # the same mistakes each time, smaller
        for mode, count in (("greedy", 1), ("sampled", plan.samples)):
            for _ in range(count):
                rows.append(
                    {
                        "id": f"scene-{number:03d}",
                        "source": SOURCES[number % 2],
                        "task": "grounding",
                        "question": question,
                        "images": [path],
                        "mode": mode,
                        **answer(rng, gold, skill_at(plan, step), mode == "greedy"),
                    }
                )
    results: dict[str, Any] = {
        "step": step,
        "task": "grounding",
        "per_source": {},
        "protocol": {
            "samples_per_prompt": plan.samples,
            "temperature": 1.0,
            "interval": "95 % cluster bootstrap over samples",
        },
    }
    for mode in ("greedy", "sampled"):
        chosen = [r for r in rows if r["mode"] == mode]
        results[mode] = summary(chosen)
        for source in SOURCES:
            part = summary([r for r in chosen if r["source"] == source])
            results["per_source"].setdefault(source, {}).update(
                {(k if mode == "greedy" else f"sampled/{k}"): v for k, v in part.items()}
            )
    folder = run / "eval" / f"step_{step:06d}"
    write_jsonl(folder / "predictions.jsonl", rows)
    (folder / "results.json").write_text(json.dumps(results), encoding="utf-8")


def step_row(plan: Plan, step: int, rng: random.Random) -> dict[str, Any]:
    """One row of metrics.jsonl."""
    skill, noise = skill_at(plan, step), rng.gauss(0, 0.035)
    mean_iou, parsed = 0.9 * skill - 0.2 + noise, min(1.0, 0.9 + 0.1 * skill + rng.gauss(0, 0.01))
    length = 46 - 14 * skill + rng.gauss(0, 1.5)
    rollout, update = 2.1 + rng.gauss(0, 0.15), 1.3 + rng.gauss(0, 0.08)
    row: dict[str, Any] = {
        "step": step,
        "train/reward/mean": 0.9 * mean_iou + 0.1 * parsed,
        "train/reward/std": 0.2,
        "train/reward/part/accuracy": mean_iou,
        "train/reward/part/format": parsed,
        "train/iou": mean_iou,
        "train/acc@0.5": min(1.0, max(0.0, 1.4 * mean_iou - 0.15)),
        "train/parse_rate": parsed,
        "train/failed/unclosed_think": 0.7 * (1 - parsed),
        "train/failed/wrong_count": 0.3 * (1 - parsed),
        "train/length/mean": length,
        "train/length/right": length - 3,
        "train/length/wrong": length + 5,
        "train/length/clipped": 64.0,
        "train/clipped_share": max(0.0, rng.gauss(0.02, 0.01)),
        "train/entropy": 0.9 * math.exp(-step / plan.steps) + 0.1,
        "train/kl": 0.0004 * step + abs(rng.gauss(0, 0.001)),
        "train/kl_step": abs(rng.gauss(0, 0.0004)) + 1e-5,
        "train/clip/low": abs(rng.gauss(0, 0.002)),
        "train/clip/high": abs(rng.gauss(0.004, 0.002)),
        "train/clip/dual": 0.0,
        "train/grad_norm": abs(rng.gauss(0.6, 0.15)) + (4 if step == plan.steps // 2 else 0),
        "train/lr": 1e-5,
        "train/loss": rng.gauss(0, 0.02),
        "train/logprob_gap/mean": abs(rng.gauss(2e-6, 5e-7)),
        "train/logprob_gap/max": abs(rng.gauss(4e-5, 2e-5)) + 1e-5,
        "train/groups/no_signal": rng.randrange(0, 5),
        "train/groups/all_zero": rng.randrange(0, 3),
        "train/groups/all_one": rng.randrange(0, 2),
        "train/groups/asked": 18,
        "time/rollout": rollout,
        "time/reward": 0.12,
        "time/logprobs": 0.4,
        "time/update": update,
        "time/total": rollout + update + 0.6,
        "speed/tokens_per_s": 2300 + rng.gauss(0, 90),
        "memory/peak_gib": 3.1 + 0.2 * min(1.0, step / 20),
        "train/odd_number": rng.random(),
    }
    for i, source in enumerate(SOURCES):
        row |= {
            f"train/{source}/reward/mean": row["train/reward/mean"]
            + 0.05 * (1 - 2 * i)
            + rng.gauss(0, 0.03),
            f"train/{source}/iou": mean_iou + 0.05 * (1 - 2 * i),
        }
    if step == 3:
        row["train/kl"] = None
    if step % plan.every == 0 or step == plan.steps:
        row |= {"time/eval": 9.0 + rng.random(), "time/checkpoint": 1.2}
    return row


def data_records(plan: Plan) -> list[dict[str, Any]]:
    """skipped.json: a training file with notes and rows left out, and the held-out pictures as they are."""
    return [
        {
            "path": "coco/annotations/instances_train2017.json",
            "task": "grounding",
            "use": "train",
            "kept": 1200,
            "pictures": 840,
            "clips": 0,
            "by_source": {name: 600 for name in SOURCES},
            "skipped": {"category of several objects or a crowd in its picture": 3411},
            "notes": {
                "annotation left out: a box without width or height": 2,
                "pictures with an EXIF orientation, taken as displayed (data.image.orientation)": 17,
            },
            "rejected": 3,
        },
        {
            "path": "held_out.jsonl",
            "task": "grounding",
            "use": "eval",
            "kept": plan.pictures,
            "pictures": plan.pictures,
            "clips": 0,
            "by_source": {name: plan.pictures // 2 for name in SOURCES},
            "skipped": {},
            "notes": {},
            "rejected": 0,
        },
    ]


def make_run(folder: Path, plan: Plan | None = None) -> Path:
    """Write a whole run folder."""
    plan, pictures = plan or Plan(), folder / "pictures"
    pictures.mkdir(parents=True)
    rng = random.Random(plan.seed)
    scenes = []
    for number in range(plan.pictures):
        question, gold = draw_scene(pictures / f"{number:03d}.png", rng, number)
        scenes.append((f"pictures/{number:03d}.png", question, gold))
    for step in range(0, plan.done + 1, plan.every):
        write_evaluation(folder, plan, step, scenes)
    write_jsonl(folder / "metrics.jsonl", [step_row(plan, s, rng) for s in range(1, plan.done + 1)])
    write_jsonl(
        folder / "alarms.jsonl",
        [
            {
                "step": 4,
                "name": "logprob_gap",
                "message": "sampler and trainer log-probs differ by 0.071 per token on "
                "average (limit 0.05): weights not in sync, or different precision or kernels",
                "severity": "error",
            },
            {
                "step": 17,
                "name": "entropy_collapse",
                "message": "entropy 0.004 nats per token is below 0.005: the policy "
                "hardly explores",
                "severity": "warning",
            },
        ],
    )
    (folder / "gallery.json").write_text(
        json.dumps({"ids": [f"scene-{i:03d}" for i in range(min(8, plan.pictures))]})
    )
    (folder / "config.yaml").write_text(
        "name: grounding-tiny\nmodel:\n  path: Qwen/Qwen2.5-VL-3B-Instruct\neval:\n  best_metric: sampled/iou\n"
    )
    (folder / "skipped.json").write_text(json.dumps(data_records(plan)))
    (folder / "run.json").write_text(
        json.dumps(
            {
                "name": plan.name,
                "command": "mmrl train configs/grounding.yaml",
                "started": "2026-11-20T14:10:22+00:00",
                "versions": {"python": "3.11.7", "torch": "2.13.0"},
                "machine": {"cpu": "x86_64", "cores": 2},
                "model": "Qwen/Qwen2.5-VL-3B-Instruct",
                "task": "grounding",
                "total_steps": plan.steps,
                "status": "finished" if plan.done == plan.steps else "running",
            }
        )
    )
    return folder


@pytest.fixture
def new_run(tmp_path: Path) -> Callable[..., Path]:
    """new_run(folder, **plan) makes a run folder."""
    return lambda folder="run", **plan: make_run(tmp_path / folder, Plan(**plan))


@pytest.fixture
def mixed_run(tmp_path: Path) -> Callable[..., Path]:
    """mixed_run(folder, **options) makes a run of six sources and seven tasks."""
    from tests.report.mixed_run import make_mixed_run

    return lambda folder="mixed", **options: make_mixed_run(tmp_path / folder, **options)
