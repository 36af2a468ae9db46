"""Make assets/tiny_vlm_mixed: assets/tiny_vlm taught seven more kinds of questions, still answering loosely.

    python -m assets.make_tiny_vlm_mixed            (about an hour on one CPU core; seeded)

Three runs of `mmrl sft` on generated pictures (mmrl.tasks.playground): all tasks, then more of those whose answers are one or
two tokens among many of boxes, then more of those that ask for two facts at once. Boxes are drawn with a margin and a
shaky hand and clicks
miss the middle, as in assets/make_tiny_vlm.py: that looseness is what the mixed run removes. Weights are kept in bf16.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from mmrl.tasks.playground import KINDS, make_playground

ROOT = Path(__file__).resolve().parent.parent
STAGES: tuple[tuple[int, int, dict[str, float]], ...] = (
    (1200, 32, {"counting": 1.2, "ocr": 1.5}),
    (
        1800,
        40,
        {
            "grounding": 0.7,
            "detection": 0.6,
            "gui_grounding": 0.6,
            "counting": 2.0,
            "choice": 3.0,
            "boolean": 2.0,
            "ocr": 2.0,
            "classification": 2.0,
        },
    ),
    (
        1200,
        40,
        {
            "grounding": 0.8,
            "detection": 0.6,
            "gui_grounding": 0.8,
            "counting": 2.0,
            "choice": 4.0,
            "boolean": 2.4,
        },
    ),
)
"""Steps, prompts per step and weights (default 1) of each stage."""
TWICE = ("choice", "boolean", "counting")  # tasks that need more pictures


def loose_box(
    box: list[int], rng: np.random.Generator, margin: float, jitter: float, limit: int
) -> list[int]:
    """Each edge moved outward by Normal(margin, jitter) sides of the object, inside the picture, at least 1 px wide."""
    side = max(box[2] - box[0], box[3] - box[1])
    moved = np.rint(np.array(box) + rng.normal(margin, jitter, 4) * side * np.array([-1, -1, 1, 1]))
    left, right = sorted(int(v) for v in np.clip(moved[[0, 2]], 0, limit))
    top, bottom = sorted(int(v) for v in np.clip(moved[[1, 3]], 0, limit))
    return [min(left, limit - 1), min(top, limit - 1), max(right, left + 1), max(bottom, top + 1)]


def loose_click(box: list[int], rng: np.random.Generator, jitter: float, limit: int) -> list[int]:
    """A 2 x 2 px target whose centre misses the object's centre by Normal(0, 2 * jitter) sides."""
    side = max(box[2] - box[0], box[3] - box[1])
    centre = (
        np.array([(box[0] + box[2]) / 2, (box[1] + box[3]) / 2])
        + rng.normal(0, 2 * jitter, 2) * side
    )
    x, y = (int(v) for v in np.clip(np.rint(centre), 1, limit - 1))
    return [x - 1, y - 1, x + 1, y + 1]


def loosen(
    row: dict[str, Any], seed: int, margin: float, jitter: float, size: int
) -> dict[str, Any]:
    """A row with the shaky answers of a base model; tasks without coordinates stay as they are."""
    rng = np.random.default_rng([seed, zlib.crc32(row["id"].encode())])
    answer = row["answer"]
    if row["task"] == "grounding":
        answer = loose_box(answer, rng, margin, jitter, size)
    elif row["task"] == "detection":
        answer = [
            {**found, "bbox": loose_box(found["bbox"], rng, margin, jitter, size)}
            for found in answer
        ]
    elif row["task"] == "gui_grounding":
        answer = loose_click(answer, rng, jitter, size)
    return {**row, "answer": answer}


def shrink(folder: Path) -> int:
    """Store the weights in bf16; returns the bytes of the folder."""
    import torch
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(folder).to(torch.bfloat16)
    model.save_pretrained(folder)
    return sum(f.stat().st_size for f in folder.rglob("*") if f.is_file())


def main() -> None:
    """Generate, teach, shrink, copy to --out."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=ROOT / "assets" / "tiny_vlm_mixed")
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / "tiny_vlm_mixed")
    parser.add_argument("--count", type=int, default=2500, help="pictures per task")
    parser.add_argument(
        "--margin", type=float, default=0.10, help="mean outward error of an edge, in object sides"
    )
    parser.add_argument("--jitter", type=float, default=0.12, help="its standard deviation")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--steps-share",
        type=float,
        default=1.0,
        help="of the steps of every stage, for a quick try",
    )
    options = parser.parse_args()
    shutil.rmtree(options.work, ignore_errors=True)
    size = 112
    for task in KINDS:
        count = options.count * (2 if task in TWICE else 1)
        data = Path(
            make_playground(
                options.work / task, task, count, options.seed + 2001, size, f"warm-{task}-"
            )
        )
        rows = [json.loads(line) for line in data.read_text(encoding="utf-8").splitlines()]
        loose = (
            json.dumps(loosen(row, options.seed, options.margin, options.jitter, size))
            for row in rows
        )
        (data.parent / "loose.jsonl").write_text("\n".join(loose) + "\n", encoding="utf-8")
    taught, seconds = ROOT / "assets" / "tiny_vlm", []
    for number, (steps, prompts, weights) in enumerate(STAGES):
        began, start, taught = time.time(), taught, options.work / f"stage_{number + 1}"
        sources = [
            f"data.train.{i}.{key}"
            for i, task in enumerate(KINDS)
            for key in (
                f"path={options.work / task / 'loose.jsonl'}",
                f"weight={weights.get(task, 1.0)}",
            )
        ]
        command = [
            sys.executable,
            "-m",
            "mmrl.cli.main",
            "sft",
            "--overwrite",
            "configs/mixed_warmstart.yaml",
            f"model.path={start}",
            f"seed={options.seed + number}",
            f"train.steps={max(1, round(steps * options.steps_share))}",
            f"train.prompts_per_step={prompts}",
            *sources,
            "--out",
            str(taught),
        ]
        subprocess.run(command, check=True, cwd=ROOT)
        seconds.append(round(time.time() - began))
    size_bytes = shrink(taught)
    shutil.rmtree(options.out, ignore_errors=True)
    shutil.copytree(taught, options.out)
    facts = {
        "seconds_per_stage": seconds,
        "bytes": size_bytes,
        "seed": options.seed,
        "pictures_per_task": options.count,
        "margin": options.margin,
        "jitter": options.jitter,
        "stages": STAGES,
        "steps_share": options.steps_share,
    }
    results = ROOT / "assets" / "results" / "tiny_vlm_mixed.json"
    results.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    print(f"{options.out}: {size_bytes / 2**20:.1f} MiB; stages took {seconds} s")


if __name__ == "__main__":
    main()
