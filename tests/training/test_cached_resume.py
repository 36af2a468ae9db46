"""A run on clips with a frozen tower, stopped and resumed, equals the run in one go, bit for bit: with a fresh cache, a warm one,
and none."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from mmrl.config import load_config
from mmrl.training.trainer import Trainer
from tests.kits.engine_kit import config_file, small_run
from tests.training.test_contrast_run import VIDEO, mixed_file


def trainer(
    folder: Path,
    data: str,
    cache: str | None,
    *,
    resume: bool = False,
    stop_after: int | None = None,
) -> Trainer:
    tree = small_run(
        folder,
        data,
        train={"steps": 3, "prompts_per_step": 4, "save_every": 1},
        algorithm={"contrast": {"kind": "shuffle", "skip": False}, "dynamic_sampling": False},
    )
    tree["model"]["freeze"] = ["vision", "projector"]
    tree["data"].update(video=VIDEO, cache={"dir": cache})

    def on_event(kind: str, payload: Any) -> None:
        if kind == "checkpoint" and payload["step"] == stop_after:
            raise KeyboardInterrupt

    made = Trainer(
        load_config(config_file(folder / "c.yaml", tree)), resume=resume, on_event=on_event
    )
    if stop_after is None:
        made.fit()
    else:
        with pytest.raises(KeyboardInterrupt):
            made.fit()
    return made


@pytest.mark.slow
def test_resuming_with_cached_features_changes_no_bit(tmp_path: Path) -> None:
    data, weights = mixed_file(tmp_path / "data"), []
    whole = trainer(tmp_path / "whole", data, str(tmp_path / "cache_whole"))
    weights.append([p.detach().clone() for _, p in whole.policy.trainable()])
    for name, cache in (("cold", str(tmp_path / "cache_cold")), ("none", None)):
        trainer(tmp_path / name, data, cache, stop_after=1)
        if name == "cold":
            shutil.rmtree(tmp_path / "cache_cold")  # the resumed run makes every entry again
        resumed = trainer(tmp_path / name, data, cache, resume=True)
        weights.append([p.detach().clone() for _, p in resumed.policy.trainable()])
    for other in weights[1:]:
        assert all(torch.equal(a, b) for a, b in zip(weights[0], other, strict=True))
    first = whole.policy.encoder.visuals.stats
    assert first.encoded > 0
    again = trainer(tmp_path / "again", data, str(tmp_path / "cache_whole"))
    assert again.policy.encoder.visuals.stats.built == 0, (
        "a second run on the same cache decodes nothing"
    )
    assert all(
        torch.equal(a.detach(), b)
        for (_, a), b in zip(again.policy.trainable(), weights[0], strict=True)
    )
