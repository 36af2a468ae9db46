"""Make assets/tiny_video: assets/tiny_vlm taught to watch clips of 16 frames, still answering loosely.

    python -m assets.make_tiny_video            (about half an hour on one CPU core; seeded)

One run of `mmrl sft` (configs/video_warmstart.yaml) on generated clips (tasks.clips): which way a shape moves, what comes after
what, when a shape is there, where it is. The ends of spans are off by a second now and then, and boxes are drawn with a margin
and a shaky hand, as in assets/make_tiny_vlm_mixed.py. Weights are kept in bf16.
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

from assets.make_tiny_vlm_mixed import loose_box, shrink
from tasks.clips import make_clips

ROOT = Path(__file__).resolve().parent.parent
SIZE, FPS, SECONDS = 56, 2, 8.0
TASKS: dict[str, dict[str, Any]] = {"direction": {}, "order": {}, "appear": {"grid": 1}, "track": {"grid": 2}}
"""Clips of each task: events on whole seconds, a box every two seconds."""


def clips(folder: Path, task: str, count: int, seed: int, prefix: str) -> str:
    """The clips of tiny_video's kind: `count` of `task` in `folder`; returns the path of data.jsonl."""
    return make_clips(str(folder), task, count, seed, size=SIZE, fps=FPS, seconds=SECONDS, prefix=prefix, **TASKS[task])


def loosen(row: dict[str, Any], seed: int, margin: float, jitter: float, slip: float) -> dict[str, Any]:
    """A row with the shaky answers of a base model; letters stay as they are."""
    rng = np.random.default_rng([seed, zlib.crc32(row["id"].encode())])
    if row["task"] == "temporal_grounding":
        spans = []
        for start, end in row["answer"]:
            start, end = (round(t + rng.choice([-1, 0, 1], p=[slip, 1 - 2 * slip, slip])) for t in (start, end))
            start = min(max(0, start), int(SECONDS) - 1)
            spans.append([start, max(start + 1, min(end, int(SECONDS)))])
        return {**row, "answer": spans}
    if row["task"] == "tracking":
        boxes = {t: loose_box([round(v) for v in box], rng, margin, jitter, SIZE) for t, box in row["answer"]["boxes"].items()}
        return {**row, "answer": {**row["answer"], "boxes": boxes}}
    return row


def main() -> None:
    """Generate, teach, shrink, copy to --out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "assets" / "tiny_video")
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / "tiny_video")
    parser.add_argument("--count", type=int, default=4000, help="clips per task")
    parser.add_argument("--steps", type=int, default=1100)
    parser.add_argument("--margin", type=float, default=0.10, help="mean outward error of an edge, in object sides")
    parser.add_argument("--jitter", type=float, default=0.12, help="its standard deviation")
    parser.add_argument("--slip", type=float, default=0.15, help="probability that the end of a span is a second early, or late")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    sources = []
    for number, task in enumerate(TASKS):
        data = options.work / task / "data.jsonl"  # the rows are written last: clips that are there are complete
        if not data.exists() or len(data.read_text(encoding="utf-8").splitlines()) != options.count:
            data = Path(clips(options.work / task, task, options.count, options.seed + 3001, f"warm-{task}-"))
        rows = [json.loads(line) for line in data.read_text(encoding="utf-8").splitlines()]
        loose = (json.dumps(loosen(row, options.seed, options.margin, options.jitter, options.slip)) for row in rows)
        (data.parent / "loose.jsonl").write_text("\n".join(loose) + "\n", encoding="utf-8")
        sources.append(f"data.train.{number}.path={data.parent / 'loose.jsonl'}")
    began, taught = time.time(), options.work / "taught"
    command = [sys.executable, "-m", "mmrl.cli.main", "sft", "configs/video_warmstart.yaml", f"seed={options.seed}",
               f"train.steps={options.steps}", *sources, "--out", str(taught)]
    subprocess.run(command, check=True, cwd=ROOT)
    size_bytes = shrink(taught)
    shutil.rmtree(options.out, ignore_errors=True)
    shutil.copytree(taught, options.out)
    facts = {"seconds": round(time.time() - began), "bytes": size_bytes, "seed": options.seed, "clips_per_task": options.count,
             "steps": options.steps, "margin": options.margin, "jitter": options.jitter, "slip": options.slip}
    results = ROOT / "assets" / "results" / "tiny_video.json"
    results.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    print(f"{options.out}: {size_bytes / 2**20:.1f} MiB; taught in {facts['seconds']} s")


if __name__ == "__main__":
    main()
