"""A small synthetic run about real H.264 clips: spans, tracks, both, grounded questions and letters, scored by the real tasks.

Answers come nearer to the truth from evaluation to evaluation; one source has contrast groups in its logged rollouts.
"""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mmrl.coords import CoordFrame
from mmrl.evaluation.stats import describe
from mmrl.registry import task_from_spec
from mmrl.task import Task
from mmrl.tasks.clips import make_clips
from mmrl.types import RewardContext, Sample, VideoSize

Row = dict[str, Any]
STEPS = (0, 20, 40)
SECONDS, FPS, SIZE = 4.0, 4.0, 112
SOURCES = {
    "repeat": "temporal_grounding",
    "st": "st_grounding",
    "track": "tracking",
    "gqa": "grounded_qa",
    "order": "choice",
}
TASKS = tuple(SOURCES.values())
SEEN = tuple(k / FPS for k in range(int(SECONDS * FPS)))


def context(sample: Sample) -> RewardContext:
    """What the reward of a finished run knows of the clip."""
    clip = VideoSize((SIZE, SIZE), (SIZE, SIZE), SECONDS, SEEN)
    return RewardContext(1, 1, CoordFrame.ABS_ORIG, videos=(clip,) * len(sample.videos))


def _span(rng: random.Random, span: Sequence[float], error: float) -> list[float]:
    low, high = sorted(min(SECONDS, max(0.0, t + rng.gauss(0, error))) for t in span)
    return [round(low, 2), round(high, 2)]


def _boxes(
    rng: random.Random, boxes: dict[str, list[float]], error: float
) -> dict[str, list[float]]:
    dx, dy = rng.gauss(0, 20 * error), rng.gauss(0, 20 * error)
    return {
        k: [round(b[0] + dx), round(b[1] + dy), round(b[2] + dx), round(b[3] + dy)]
        for k, b in boxes.items()
    }


def said(sample: Sample, rng: random.Random, error: float) -> str:
    """An answer of about that error in seconds."""
    a: Any = sample.answer
    if rng.random() < 0.05:
        return "I cannot tell"
    if sample.task == "temporal_grounding":
        return f"<answer>{json.dumps([_span(rng, s, error) for s in a])}</answer>"
    if sample.task == "st_grounding":
        found = {"time": _span(rng, a["time"], error), "boxes": _boxes(rng, a["boxes"], error)}
        return f"<think>It comes and goes.</think><answer>{json.dumps(found)}</answer>"
    if sample.task == "tracking":
        return f"<answer>{json.dumps({'boxes': _boxes(rng, a['boxes'], error)})}</answer>"
    letter = (
        rng.choice("AB") if rng.random() < error else (a if isinstance(a, str) else a["choice"])
    )
    if sample.task == "choice":
        return f"<answer>{letter}</answer>"
    return f"<answer>{json.dumps({'answer': letter, 'time': _span(rng, a['spans'][0], error)})}</answer>"


def _rows(task: Task, sample: Sample, step: int, mode: str, count: int) -> list[Row]:
    """Rows as an evaluation logs them."""
    ctx, out = context(sample), []
    for n in range(count):
        text = said(sample, random.Random(f"{sample.id}/{mode}/{n}"), 1.0 - 0.9 * step / STEPS[-1])
        score = task.score(sample, text, ctx)
        out.append(
            {
                "id": sample.id,
                "source": sample.source,
                "task": sample.task,
                "question": sample.question,
                "images": [],
                "videos": list(sample.videos),
                "mode": mode,
                "text": text,
                "stop": "eos",
                "headline": task.headline,
                "video_sizes": [dataclasses.asdict(s) for s in ctx.videos],
                "sample": dataclasses.asdict(sample),
                "score": dataclasses.asdict(score),
            }
        )
    return out


def _table(rows: Sequence[Row]) -> Row:
    clusters = [r["id"] for r in rows]
    columns = {
        "reward": [r["score"]["value"] for r in rows],
        "parse_rate": [float(r["score"]["parsed"]) for r in rows],
        "headline": [r["score"]["metrics"].get(r["headline"], 0.0) for r in rows],
    }
    return {
        name: dataclasses.asdict(describe(values, clusters)) for name, values in columns.items()
    }


def _results(rows: Sequence[Row], step: int) -> Row:
    out: Row = {
        "step": step,
        "task": "mixed",
        "per_source": {},
        "protocol": {"samples_per_prompt": 2, "temperature": 1.0},
        "headlines": {"per_source": {r["source"]: r["headline"] for r in rows}},
    }
    for mode, prefix in (("greedy", ""), ("sampled", "sampled/")):
        chosen = [r for r in rows if r["mode"] == mode]
        out[mode] = {k: v for k, v in _table(chosen).items() if k != "headline"}
        for source in dict.fromkeys(r["source"] for r in rows):
            part = _table([r for r in chosen if r["source"] == source])
            out["per_source"].setdefault(source, {}).update(
                {f"{prefix}{k}": v for k, v in part.items()}
            )
    return out


def _rollouts(task: Task, sample: Sample, step: int) -> list[Row]:
    """A group of four, with two answers on shuffled frames when the question is about order."""
    asked = sample.task == "choice"
    rows = _rows(task, sample, step, "sampled", 6 if asked else 4)
    keep = ("sample", "text", "stop", "video_sizes", "score")
    return [
        {
            "step": step,
            "key": [step, TASKS.index(sample.task), 0],
            **{k: r[k] for k in keep},
            **({"view": "shuffle", "contrast": n >= 4} if asked else {}),
        }
        for n, r in enumerate(rows)
    ]


def _metrics(step: int, rng: random.Random) -> Row:
    row: Row = {
        "step": step,
        "train/reward/mean": 0.3 + 0.01 * step,
        "time/total": 1.0,
        "train/contrast/rolled_out": 0.8,
    }
    for source, gap in (("", 0.2), ("clips-order/", 0.35), ("clips-st/", 0.05)):
        plain = 0.5 + 0.01 * step + rng.gauss(0, 0.03)
        skipped = step % 7 == 0
        row |= {
            f"train/{source}contrast/plain": None if skipped else plain,
            f"train/{source}contrast/changed": None if skipped else plain - gap * step / STEPS[-1],
            f"train/{source}contrast/gap": None if skipped else gap * step / STEPS[-1],
        }
    return row


def make_video_run(folder: Path, prompts: int = 2) -> Path:
    """Write the run with its clips in folder/clips."""
    tasks = {name: task_from_spec(name) for name in SOURCES.values()}
    samples: list[tuple[Task, Sample]] = []
    for kind, name in SOURCES.items():
        data = make_clips(folder / "clips" / kind, kind, prompts, 0, SIZE, FPS, SECONDS)
        samples += [(tasks[name], s) for s in tasks[name].load(data)]
    for step in STEPS:
        rows = [
            row
            for task, s in samples
            for mode, count in (("greedy", 1), ("sampled", 2))
            for row in _rows(task, s, step, mode, count)
        ]
        write_lines(folder / f"eval/step_{step:06d}/predictions.jsonl", rows)
        (folder / f"eval/step_{step:06d}/results.json").write_text(
            json.dumps(_results(rows, step)), "utf-8"
        )
    for step in (10, 40):
        chosen = [samples[0], samples[-1]]
        write_lines(
            folder / f"rollouts/step_{step:06d}.jsonl",
            [r for task, s in chosen for r in _rollouts(task, s, step)],
        )
    rng = random.Random(0)
    write_lines(folder / "metrics.jsonl", [_metrics(s, rng) for s in range(1, STEPS[-1] + 1)])
    write_lines(folder / "alarms.jsonl", [])
    listed = [{"source": s.source, "id": s.id} for _, s in samples]
    (folder / "gallery.json").write_text(json.dumps({"prompts": listed}), "utf-8")
    (folder / "config.yaml").write_text(
        "name: clips\nalgorithm:\n  contrast: {kind: shuffle}\n", "utf-8"
    )
    (folder / "run.json").write_text(
        json.dumps(
            {
                "name": "clips",
                "model": "assets/tiny_vlm",
                "task": "mixed",
                "status": "finished",
                "total_steps": STEPS[-1],
            }
        ),
        "utf-8",
    )
    return folder


def write_lines(path: Path, rows: Sequence[Row]) -> None:
    """One JSON object per line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in rows), "utf-8")
