"""When and where: temporal grounding and tracking learn on generated clips.

    python -m scripts.demo_video [--seed 1] [section.key=value ...]          (two CPU cores, some minutes)

Generates H.264 clips, trains from assets/tiny_video with configs/video_tiny.yaml, prints both tasks' held-out score before and
after with intervals (paired, 95 %) and the path of the report, whose filmstrips show gold and predicted spans and boxes.
`--record` also writes assets/results/demo_video.json, which docs/results.md quotes. Exit status 1 when a task fell significantly.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from assets.make_tiny_video import CROWDED, clips
from scripts.demo_mixed import ROOT, run_demo

FOLDER = ROOT / "runs" / "video_data"
HELD_OUT = 80


USED = {task: CROWDED[task] for task in ("appear", "track", "direction")}
"""What is trained on: as at the end of the warm start."""


def make_data(
    folder: Path = FOLDER, *, train: int = 600, held_out: Mapping[str, int] = MappingProxyType({})
) -> None:
    """Training and held-out clips of every task (80 of each held out, or as many as `held_out` says for a task); generated
    from seeds, so they are the same everywhere."""
    for name, seed in (("train", 41), ("eval", 42)):
        for task, settings in USED.items():
            data, count = (
                folder / name / task / "data.jsonl",
                train if name == "train" else held_out.get(task, HELD_OUT),
            )
            if not data.exists() or len(data.read_text(encoding="utf-8").splitlines()) != count:
                clips(data.parent, task, count, seed, f"video-{name}-{task}-", settings)


def main() -> int:
    """Command line."""
    return run_demo("video", __doc__, make_data, "av")


if __name__ == "__main__":
    raise SystemExit(main())
