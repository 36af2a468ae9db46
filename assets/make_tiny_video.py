"""Make assets/tiny_video: assets/tiny_vlm taught to watch clips of 16 frames, still answering loosely.

    python -m assets.make_tiny_video [--resume]            (about half an hour on one CPU core; seeded)

Three runs of `mmrl sft` (configs/video_warmstart.yaml) on generated clips (mmrl.tasks.clips): which way a shape moves, what comes
after what, when a shape is there, where it is. The first draws motions that go out at one edge and in at the other, so that not
even a frame of known place tells the answer; at this size it learns times and boxes, and no direction. The second draws motions
inside the picture: the order of the frames tells the answer, one frame of unknown place does not. The third, a short one, asks
for one of four moving shapes and leaves the model unsure. The ends of spans are off by a
second now and then, and boxes are drawn with a margin and a shaky hand, as in assets/make_tiny_vlm_mixed.py. Weights are kept
in bf16. `--resume` keeps finished stages and clips of an earlier run.
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
from mmrl.tasks.clips import make_clips

ROOT = Path(__file__).resolve().parent.parent
SIZE, FPS, SECONDS = 56, 2, 8.0
TASKS: dict[str, dict[str, Any]] = {
    "direction": {"kinds": ("horizontal_inside", "vertical_inside")},
    "order": {"kinds": ("turn",)},
    "appear": {"grid": 1},
    "track": {"grid": 2},
}
"""Clips of each task: events on whole seconds, a box every two seconds."""
STRICT: dict[str, dict[str, Any]] = {**TASKS, "direction": {}, "order": {}}
CROWDED: dict[str, dict[str, Any]] = {
    **TASKS,
    "direction": {**TASKS["direction"], "distractors": 3},
}
STAGES: tuple[tuple[int, dict[str, dict[str, Any]], dict[str, float]], ...] = (
    (1100, STRICT, {"direction": 2.0, "order": 2.0, "appear": 1.0, "track": 0.6}),
    (700, TASKS, {"direction": 2.0, "order": 2.0, "appear": 0.4, "track": 1.0}),
    (250, CROWDED, {"direction": 3.0, "order": 0.1, "appear": 0.4, "track": 1.0}),
)
"""Steps, clips and weights of each stage."""


def clips(
    folder: Path,
    task: str,
    count: int,
    seed: int,
    prefix: str,
    settings: dict[str, Any] | None = None,
) -> str:
    """The clips of tiny_video's kind: `count` of `task` in `folder`; returns the path of data.jsonl."""
    chosen = TASKS[task] if settings is None else settings
    return make_clips(
        str(folder), task, count, seed, size=SIZE, fps=FPS, seconds=SECONDS, prefix=prefix, **chosen
    )


def loosen(
    row: dict[str, Any], seed: int, margin: float, jitter: float, slip: float
) -> dict[str, Any]:
    """A row with the shaky answers of a base model; letters stay as they are."""
    rng = np.random.default_rng([seed, zlib.crc32(row["id"].encode())])
    if row["task"] == "temporal_grounding":
        spans = []
        for start, end in row["answer"]:
            start, end = (
                round(t + rng.choice([-1, 0, 1], p=[slip, 1 - 2 * slip, slip]))
                for t in (start, end)
            )
            start = min(max(0, start), int(SECONDS) - 1)
            spans.append([start, max(start + 1, min(end, int(SECONDS)))])
        return {**row, "answer": spans}
    if row["task"] == "tracking":
        boxes = {
            t: loose_box([round(v) for v in box], rng, margin, jitter, SIZE)
            for t, box in row["answer"]["boxes"].items()
        }
        return {**row, "answer": {**row["answer"], "boxes": boxes}}
    return row


def loose_clips(
    folder: Path, task: str, settings: dict[str, Any], options: argparse.Namespace, seed: int
) -> Path:
    """The clips of one task and stage with loosened answers, made unless they are there; returns their data file."""
    # the rows are written last: clips that are there are complete
    data, loose = folder / "data.jsonl", folder / "loose.jsonl"
    if not data.exists() or len(data.read_text(encoding="utf-8").splitlines()) != options.count:
        data = Path(clips(folder, task, options.count, seed, f"warm-{task}-", settings))
    rows = (json.loads(line) for line in data.read_text(encoding="utf-8").splitlines())
    told = (
        json.dumps(loosen(row, options.seed, options.margin, options.jitter, options.slip))
        for row in rows
    )
    loose.write_text("\n".join(told) + "\n", encoding="utf-8")
    return loose


def main() -> None:
    """Generate, teach, shrink, copy to --out."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=ROOT / "assets" / "tiny_video")
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / "tiny_video")
    parser.add_argument(
        "--resume", action="store_true", help="keep finished stages and clips in --work"
    )
    parser.add_argument("--count", type=int, default=4000, help="clips per task and stage")
    parser.add_argument(
        "--margin", type=float, default=0.10, help="mean outward error of an edge, in object sides"
    )
    parser.add_argument("--jitter", type=float, default=0.12, help="its standard deviation")
    parser.add_argument(
        "--slip",
        type=float,
        default=0.15,
        help="probability that the end of a span is a second early, or late",
    )
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if not options.resume:
        shutil.rmtree(options.work, ignore_errors=True)
    taught, seconds, size_bytes = ROOT / "assets" / "tiny_vlm", [], 0
    for number, (steps, settings, weights) in enumerate(STAGES):
        began, start, taught = time.time(), taught, options.work / f"stage_{number + 1}"
        if (taught / "seconds.json").exists():
            seconds.append(json.loads((taught / "seconds.json").read_text(encoding="utf-8")))
            continue
        sources = []
        for place, task in enumerate(TASKS):
            first = next(
                i for i, (_, earlier, _) in enumerate(STAGES, 1) if earlier[task] == settings[task]
            )
            folder = options.work / f"clips_{first}" / task
            loose = loose_clips(folder, task, settings[task], options, options.seed + 3001)
            sources += [
                f"data.train.{place}.path={loose}",
                f"data.train.{place}.weight={weights[task]}",
            ]
        subprocess.run(
            [
                sys.executable,
                "-m",
                "mmrl.cli.main",
                "sft",
                "configs/video_warmstart.yaml",
                f"model.path={start}",
                f"seed={options.seed + number}",
                f"train.steps={steps}",
                *sources,
                "--overwrite",
                "--out",
                str(taught),
            ],
            check=True,
            cwd=ROOT,
        )
        seconds.append(round(time.time() - began))
        size_bytes = shrink(taught)
        (taught / "seconds.json").write_text(json.dumps(seconds[-1]), encoding="utf-8")
    shutil.rmtree(options.out, ignore_errors=True)
    shutil.copytree(taught, options.out, ignore=shutil.ignore_patterns("seconds.json"))
    facts = {
        "seconds_per_stage": seconds,
        "bytes": size_bytes,
        "seed": options.seed,
        "clips_per_task": options.count,
        "margin": options.margin,
        "jitter": options.jitter,
        "slip": options.slip,
        "stages": STAGES,
    }
    results = ROOT / "assets" / "results" / "tiny_video.json"
    results.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    print(f"{options.out}: {size_bytes / 2**20:.1f} MiB; stages took {seconds} s")


if __name__ == "__main__":
    main()
