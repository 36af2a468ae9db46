"""Presets: each loads with every recipe it names, fits its GPU by estimate, and gives way to the user's own overrides."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mmrl.cli.run import run_config
from mmrl.config import load_config
from mmrl.config.presets import preset_names, read_preset
from mmrl.diagnostics.memory import estimate
from mmrl.errors import ConfigError
from scripts.estimate_presets import rows_of
from tests.kits.engine_kit import REPO


@pytest.mark.slow
def test_every_preset_fits_with_every_recipe_and_is_the_recorded_one() -> None:
    recorded = json.loads((REPO / "assets" / "results" / "presets.json").read_text())["presets"]
    found = [row for name in preset_names() for row in rows_of(name)]
    assert all(row["fits"] for row in found) and {row["preset"] for row in found} == set(
        preset_names()
    ) >= {"gpu_24g", "gpu_48g"}
    assert found == recorded, "python -m scripts.estimate_presets writes them anew"


def test_presets_are_needed() -> None:
    """Without its preset, a recipe does not fit the smaller GPUs: the estimate tells them apart."""
    assert estimate(load_config(REPO / "configs" / "grounding.yaml")).total > 44 * 2**30


def test_overrides_go_over_a_preset_and_below_it() -> None:
    recipe = REPO / "configs" / "gui.yaml"
    plain = run_config(recipe, [])
    run = run_config(recipe, ["model.lora.r=4", "train.token_budget=100"], "gpu_24g")
    assert run.model.lora is not None and (run.model.lora.r, run.model.lora.alpha) == (4, 32)
    assert run.train.token_budget == 100 and run.rollout.batch_tokens == 16384
    assert run.algorithm == plain.algorithm and run.data == plain.data, (
        "what a preset does not name is the recipe's"
    )
    whole = run_config(recipe, ["model.lora=null"], "gpu_24g")
    assert whole.model.lora is None


def test_a_preset_of_ones_own(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(
        "preset: {gpu_gib: 10, gpus: 1, models: [], recipes: []}\ntrain: {token_budget: 77}\n"
    )
    assert run_config(REPO / "configs" / "gui.yaml", [], str(file)).train.token_budget == 77
    file.write_text("train: {token_budget: 77}\n")
    with pytest.raises(ConfigError, match="a section 'preset' with gpu_gib, gpus, models, recipes"):
        read_preset(str(file))
    file.write_text("preset: [\n")
    with pytest.raises(ConfigError, match="not valid YAML"):
        read_preset(str(file))
    with pytest.raises(
        ConfigError,
        match=r"expected a preset of gpu_24g, .* found 'gpu_24'. Did you mean 'gpu_24g'",
    ):
        read_preset("gpu_24")
