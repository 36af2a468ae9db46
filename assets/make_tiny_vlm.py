"""Make assets/tiny_vlm: a tiny Qwen2.5-VL that sees and follows the answer format but answers loosely.

    python -m assets.make_tiny_vlm            (35 minutes on one busy CPU core; seeded)

Four runs of `mmrl sft`: one object; one or two objects; mostly two, so that the words matter; then boxes drawn with a
margin and a shaky hand, so that the policy knows where things are but not exactly, as a base VLM does. That looseness
is what reinforcement learning removes in `make demo`.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from mmrl.tasks.scenes import make_scenes

ROOT = Path(__file__).resolve().parent.parent
MIX = {0: 0.5, 1: 0.5}
PAIRS = {0: 0.2, 1: 0.8}
SPEC: dict[str, Any] = {
    "hidden": 192,
    "layers": 3,
    "heads": 6,
    "kv": 2,
    "vision_hidden": 192,
    "vision_layers": 2,
    "vision_heads": 6,
}


def loosen(path: str, out: Path, margin: float, jitter: float, seed: int) -> None:
    """Copy a scene set's rows with loose boxes: each edge moves outward by Normal(margin, jitter) object sides."""
    rng = np.random.default_rng(seed)
    rows = []
    for line in Path(path).read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        x1, y1, x2, y2 = row["answer"]
        side, limit = max(x2 - x1, y2 - y1), row["params"]["width"]
        outward = rng.normal(margin, jitter, 4) * side * np.array([-1, -1, 1, 1])
        edges = np.clip(np.rint(np.array([x1, y1, x2, y2]) + outward), 0, limit).astype(int)
        left, right = sorted((int(edges[0]), int(edges[2])))
        top, bottom = sorted((int(edges[1]), int(edges[3])))
        row["answer"] = [
            min(left, limit - 1),
            min(top, limit - 1),
            max(right, left + 1),
            max(bottom, top + 1),
        ]
        rows.append(json.dumps(row))
    out.write_text("\n".join(rows) + "\n", encoding="utf-8")


def sft(model: Path, data: str, out: Path, *overrides: str) -> None:
    """One `mmrl sft` run, unless its result is already there."""
    if (out / "config.json").exists():
        print(f"{out}: already made, kept")
        return
    began = time.time()
    command = [
        sys.executable,
        "-m",
        "mmrl.cli.main",
        "sft",
        "configs/tiny_warmstart.yaml",
        f"model.path={model}",
        f"data.train.0.path={data}",
        *overrides,
        "--overwrite",  # what an earlier call left unfinished
        "--out",
        str(out),
    ]
    subprocess.run(command, check=True, cwd=ROOT)
    out.with_suffix(".seconds").write_text(f"{time.time() - began:.0f}\n", encoding="utf-8")


def main() -> None:
    """Build, teach in three stages, copy to --out."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=ROOT / "assets" / "tiny_vlm")
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / "tiny_vlm")
    parser.add_argument(
        "--steps", type=int, nargs=4, default=(500, 900, 800, 150), help="of the four stages"
    )
    parser.add_argument(
        "--margin", type=float, default=0.10, help="mean outward error of an edge, in object sides"
    )
    parser.add_argument("--jitter", type=float, default=0.12, help="its standard deviation")
    parser.add_argument("--scenes", type=int, default=6000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--keep",
        action="store_true",
        help="keep finished stages in --work instead of starting anew",
    )
    options = parser.parse_args()
    work = options.work
    if not options.keep:
        shutil.rmtree(work, ignore_errors=True)
    from mmrl.policy.tiny import TinySpec, build_tiny

    build_tiny(TinySpec(**SPEC, seed=options.seed), work / "stage_0")
    easy = make_scenes(
        work / "easy",
        options.scenes,
        options.seed + 1001,
        112,
        0,
        "warm-easy-",
        background="graded",
    )
    mixed = make_scenes(
        work / "mixed",
        options.scenes,
        options.seed + 1002,
        112,
        MIX,
        "warm-mixed-",
        background="graded",
    )
    pairs = make_scenes(
        work / "pairs",
        options.scenes,
        options.seed + 1004,
        112,
        PAIRS,
        "warm-pairs-",
        background="graded",
    )
    loose = work / "pairs" / "loose.jsonl"
    loosen(pairs, loose, options.margin, options.jitter, options.seed + 1003)
    steps = options.steps
    sft(work / "stage_0", easy, work / "stage_1", f"train.steps={steps[0]}")
    sft(
        work / "stage_1",
        mixed,
        work / "stage_2",
        f"train.steps={steps[1]}",
        "optim.schedule=cosine",
        "optim.min_lr_ratio=0.02",
    )
    sft(
        work / "stage_2",
        pairs,
        work / "stage_3",
        f"train.steps={steps[2]}",
        "optim.schedule=cosine",
        "optim.min_lr_ratio=0.02",
    )
    sft(
        work / "stage_3",
        str(loose),
        work / "stage_4",
        f"train.steps={steps[3]}",
        "optim.lr=2e-4",
        "optim.schedule=linear",
        "optim.warmup_steps=10",
    )
    shutil.rmtree(options.out, ignore_errors=True)
    shutil.copytree(work / "stage_4", options.out)
    size = sum(f.stat().st_size for f in options.out.rglob("*") if f.is_file())
    seconds = [int((work / f"stage_{k}.seconds").read_text(encoding="utf-8")) for k in (1, 2, 3, 4)]
    facts = {
        "seconds_per_stage": seconds,
        "bytes": size,
        "seed": options.seed,
        "steps": list(steps),
        "margin": options.margin,
        "jitter": options.jitter,
        "scenes": options.scenes,
        "spec": SPEC,
    }
    results = ROOT / "assets" / "results" / "tiny_vlm.json"
    results.parent.mkdir(parents=True, exist_ok=True)
    results.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    print(f"{options.out}: {size / 2**20:.1f} MiB; stages took {seconds} s")


if __name__ == "__main__":
    main()
