"""Presets: each loads with every recipe it names, fits its GPU by estimate, and gives way to the user's own overrides."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from mmrl.cli.run import run_config
from mmrl.config import load_config
from mmrl.config.presets import preset_names, read_preset
from mmrl.diagnostics.memory import estimate
from mmrl.distributed.engines import train_engine_name
from mmrl.errors import ConfigError
from scripts.estimate_presets import rows_of
from tests.kits.engine_kit import REPO, cli_here


@pytest.mark.slow
def test_every_preset_fits_with_every_recipe_and_is_the_recorded_one() -> None:
    recorded = json.loads((REPO / "assets" / "results" / "presets.json").read_text())["presets"]
    found = [row for name in preset_names() for row in rows_of(name)]
    assert all(row["fits"] for row in found) and {row["preset"] for row in found} == set(
        preset_names()
    ) >= {"gpu_24g", "gpu_48g"}
    assert found == recorded, "python -m scripts.estimate_presets writes them anew"


RUNS = [(name, recipe) for name in preset_names() for recipe in read_preset(name).recipes]


@pytest.mark.parametrize(("name", "recipe"), RUNS)
def test_a_preset_is_read_as_a_run_reads_it_with_every_recipe_it_is_for(
    name: str, recipe: str
) -> None:
    """All keys are known, the engines go with the processes, and vLLM's share of a GPU is one of the preset's own."""
    preset = read_preset(name)
    config = run_config(REPO / "configs" / f"{recipe}.yaml", [], name)
    expected = {"auto": "single" if preset.gpus == 1 else "ddp"}.get(
        config.engine.train, config.engine.train
    )
    assert train_engine_name(config, preset.gpus) == expected
    assert config.model.dtype == "bf16" and config.model.freeze == ["vision", "projector"]
    written = yaml.safe_load((REPO / "configs" / "presets" / f"{name}.yaml").read_text())
    assert written["engine"]["vllm"]["memory"] == config.engine.vllm.memory


def test_every_preset_is_for_all_shipped_recipes_of_one_kind_that_fit() -> None:
    """Those left out on 40 GB do not fit there, with one model at least: a KL term keeps a reference copy."""
    every, small = set(read_preset("gpu_24g").recipes), ("gpu_40g", "gpu_40g_x8")
    assert {set(read_preset(n).recipes) == every for n in preset_names() if n not in small} == {
        True
    }
    for name in small:
        preset = read_preset(name)
        assert every - set(preset.recipes) == {"gui", "video_qa"}
        for recipe in every - set(preset.recipes):
            overrides = [f"model.path={preset.models[-1]}"]
            config = run_config(REPO / "configs" / f"{recipe}.yaml", overrides, name)
            found = estimate(config, processes=preset.gpus, available=39 * 2**30)
            assert found.warning(39 * 2**30) is not None and found.parts["reference"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", preset_names())
def test_mmrl_memory_says_what_each_preset_claims(name: str) -> None:
    preset = read_preset(name)
    model = [f"model.path={preset.models[0]}"]
    out = cli_here("memory", str(REPO / "configs" / "grounding.yaml"), *model, "--preset", name)
    assert f"GiB of {preset.gpu_gib:.1f}" in out and "will probably end out of memory" not in out
    assert preset.gpus == 1 or f"in each of {preset.gpus} processes" in out
    if name == "gpu_40g":
        # the sizes of docs/results.md: what makes it fit are moments of 8 bits
        file = str(REPO / "configs" / "grounding.yaml")
        whole = cli_here("memory", file, *model, "optim.states=fp32", "--preset", name)
        assert "will probably end out of memory" in whole


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
