"""The loop of examples/rl_loop.py and the trainer are two programs for one algorithm: their numbers are the same, bit for bit."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from mmrl.config import load_config
from mmrl.tasks.scenes import make_scenes
from mmrl.training.trainer import Trainer
from tests.kits.engine_kit import REPO


def example() -> Any:
    spec = importlib.util.spec_from_file_location("rl_loop", REPO / "examples" / "rl_loop.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_its_numbers_are_the_trainers(tmp_path: Path) -> None:
    make_scenes(tmp_path / "scenes", 16, seed=3, background="graded")
    rows = tmp_path / "scenes" / "data.jsonl"
    data = f'data.train=[{{task: grounding, path: {rows}, params: {{prompt: "{{question}}", mode: iou}}}}]'
    config = load_config(
        None,
        [
            f"model.path={REPO / 'assets' / 'tiny_vlm'}",
            'model.system=""',
            "model.device=cpu",
            data,
            "train.steps=3",
            "train.prompts_per_step=4",
            "rollout.group_size=4",
            "rollout.max_new_tokens=24",
            "optim.lr=1e-4",
            "eval.samples=0",
            "optim.warmup_steps=2",
            "train.token_budget=700",
            "algorithm.dynamic_sampling=false",
            "reward.workers=0",
            f"dir={tmp_path}",
        ],
    )
    own = list(example().train(config))
    Trainer(config).fit()
    theirs = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    assert [(row["grad_norm"], row["lr"]) for row in own] == [
        (row["train/grad_norm"], row["train/lr"]) for row in theirs
    ]
    assert [row["reward"] for row in own] == pytest.approx(
        [row["train/reward/mean"] for row in theirs], rel=1e-12
    )
    assert [row["loss"] for row in own] == pytest.approx(
        [row["train/loss"] for row in theirs], rel=1e-5, abs=1e-7
    )
    assert own[-1]["grad_norm"] > 0 and own[0]["lr"] == 5e-5 and 0.3 < own[0]["reward"] < 1


def test_it_is_one_page() -> None:
    assert len((REPO / "examples" / "rl_loop.py").read_text().splitlines()) <= 300
