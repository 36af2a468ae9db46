"""A run with a cache of visual tensors, and what that cache did; a job of tests/kits/process_worker.py."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from mmrl.config import load_config
from mmrl.training.trainer import Trainer
from tests.kits.clip_kit import mixed_file
from tests.kits.engine_kit import config_file, small_run

__all__ = ["cached_run", "look", "train_and_look"]


def cached_run(folder: Path) -> str:
    """The configuration of a run about clips and pictures whose frozen tower's features are kept in FOLDER/shared."""
    return config_file(
        folder / "c.yaml",
        small_run(
            folder / "runs",
            mixed_file(folder / "data"),
            model={"freeze": ["vision", "projector"]},
            data={
                "video": {"kind": "all", "min_pixels": 28 * 28, "max_pixels": 28 * 28 * 6},
                "cache": {"dir": str(folder / "shared")},
            },
            train={"steps": 2, "prompts_per_step": 6},
            optim={"lr": 0.001},
        ),
    )


def look(trainer: Trainer) -> dict[str, Any]:
    """What the visual cache of a run did (stats) and hands out afterwards (SHA-256 of pixels and features by path)."""
    encoder, tower = trainer.policy.encoder, trainer.policy.tower()
    visuals = encoder.visuals
    seen: dict[str, Any] = {
        "rank": trainer.world.rank,
        "size": trainer.world.size,
        "built": visuals.stats.built,
        "encoded": visuals.stats.encoded,
        "tensors": {},
    }
    assert tower is not None
    for sample in trainer.rollouts.train_sources[0].samples:
        for visual in encoder.references(sample):
            (features,) = visuals.features([visual], tower)
            parts = [visuals.pixels(visual), features.main, *features.deep]
            seen["tensors"][visual.path] = [
                hashlib.sha256(x.detach().contiguous().numpy().tobytes()).hexdigest() for x in parts
            ]
    return seen


def train_and_look(config: str, overrides: list[str]) -> dict[str, Any]:
    """A whole run; see `look`."""
    trainer = Trainer(load_config(config, overrides))
    trainer.fit()
    return look(trainer)
