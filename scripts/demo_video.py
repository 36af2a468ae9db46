"""When and where: temporal grounding and tracking learn on generated clips.

    python -m scripts.demo_video [--seed 1] [section.key=value ...]          (two CPU cores, some minutes)

Generates H.264 clips, trains from assets/tiny_video with configs/video_tiny.yaml, prints both tasks' held-out score before and
after with intervals (paired, 95 %) and the path of the report, whose filmstrips show gold and predicted spans and boxes.
`--record` also writes assets/results/demo_video.json, which the README quotes. Exit status 1 when a task fell significantly.
"""
from __future__ import annotations

from pathlib import Path

from assets.make_tiny_video import CROWDED, clips
from scripts.demo_mixed import ROOT, run_demo

FOLDER = ROOT / "runs" / "video_data"


USED = {task: CROWDED[task] for task in ("appear", "track", "direction")}
"""What is trained on: as at the end of the warm start."""


def make_data(folder: Path = FOLDER, *, train: int = 600, held_out: int = 80) -> None:
    """Training and held-out clips of every task; generated from seeds, so they are the same everywhere."""
    for name, count, seed in (("train", train, 41), ("eval", held_out, 42)):
        for task, settings in USED.items():
            if not (folder / name / task / "data.jsonl").exists():
                clips(folder / name / task, task, count, seed, f"video-{name}-{task}-", settings)


def main() -> int:
    """Command line."""
    return run_demo("video", __doc__, make_data, "av")


if __name__ == "__main__":
    raise SystemExit(main())
