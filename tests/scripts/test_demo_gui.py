"""The GUI demo: its settings fit the recipe and the tiny model, a short run gives the facts that the README's line is made of."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mmrl.config import load_config
from scripts import update_readme
from scripts.demo_gui import SETTINGS, make_data, results
from tests.kits.engine_kit import REPO


def test_the_demo_is_the_recipe_with_the_tiny_model_and_its_own_wording() -> None:
    config, recipe = (
        load_config(REPO / "configs" / "gui.yaml", list(SETTINGS)),
        load_config(REPO / "configs" / "gui.yaml"),
    )
    assert (
        config.model.path == "assets/tiny_vlm_mixed"
        and (REPO / config.model.path / "model.safetensors").is_file()
    )
    assert [s.task for s in (*config.data.train, *config.data.eval)] == ["gui_grounding"] * 2
    assert (
        config.eval.best_metric == recipe.eval.best_metric
        and config.rollout.group_size == recipe.rollout.group_size
    )
    warm = load_config(REPO / "configs" / "mixed_warmstart.yaml")
    assert "gui_grounding" in [s.task for s in warm.data.train], (
        "the model has learnt to click before"
    )


@pytest.mark.slow
def test_a_short_run_gives_what_the_readme_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mmrl.cli.run import train_command

    monkeypatch.chdir(REPO)
    make_data(tmp_path / "data", train=6, held_out=4)
    made = (tmp_path / "data" / "train" / "screenspot_web.json").read_bytes()
    make_data(tmp_path / "data", train=99)
    assert (tmp_path / "data" / "train" / "screenspot_web.json").read_bytes() == made, "made once"
    run = train_command(
        REPO / "configs" / "gui.yaml",
        [
            *SETTINGS,
            f"dir={tmp_path}",
            f"data.train.0.path={tmp_path}/data/train",
            f"data.eval.0.path={tmp_path}/data/eval",
            "train.steps=1",
            "train.prompts_per_step=2",
            "eval.samples=2",
        ],
        resume=False,
        overwrite=True,
        quiet=True,
    )
    facts = results(run, 0, 61.0)
    assert (facts["steps"], facts["samples"], set(facts["held_out"])) == (
        1,
        2,
        {"sampled", "greedy"},
    )
    for row in facts["held_out"].values():
        assert (
            row["metric"] == "inside"
            and row["samples"] == 4
            and row["low"] <= row["gain"] <= row["high"]
        )
    folder = tmp_path / "assets" / "results"
    folder.mkdir(parents=True)
    monkeypatch.setattr(update_readme, "ROOT", tmp_path)
    assert "no number has been recorded" in update_readme.gui()
    (folder / "demo_gui.json").write_text(
        json.dumps({**facts, "machine": {"cpu": "a CPU"}}), encoding="utf-8"
    )
    line = update_readme.gui()
    sampled = facts["held_out"]["sampled"]
    assert (
        f"{sampled['before']:.2f} to {sampled['after']:.2f} sampled, avg@2" in line
        and "1 steps of 2 prompts x 8" in line
    )
