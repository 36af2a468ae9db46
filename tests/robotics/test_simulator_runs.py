"""Demonstrations, cloning, reinforcement learning and evaluation through the command line on real simulators."""
from __future__ import annotations

import json
from pathlib import Path

import pytest

from mmrl.cli.run import sft_command, train_command
from tests.robot_kit import BASE, make_model

pytestmark = pytest.mark.slow

SMALL = [*BASE, "env.slots=2", "env.workers=1", "rollout.group_size=2", "train.prompts_per_step=1", "train.steps=1",
         "algorithm.dynamic_sampling=false", "action.chunk=4", "action.repeat=2", "demos.steps=2", "demos.batch=4",
         "demos.noise=0.1", "eval_states=1", "eval.samples=0", "eval.best_metric=greedy/success_once", "schedule.kind=pipelined",
         "schedule.timeline=1"]


def through_the_command_line(folder: Path, settings: list[str], horizon: int) -> dict[str, object]:
    """Record and clone with long episodes, train with short ones; the last evaluation's results."""
    file = folder / "run.yaml"
    file.write_text("env: {suite: tiny}\n", encoding="utf-8")
    model = make_model(folder / "model")
    common = [*SMALL, *settings, f"dir={folder}", "name=run"]
    sft_command(file, [*common, f"model.path={model}"], folder / "policy", quiet=True)
    run = train_command(file, [*common, f"model.path={folder / 'policy'}", f"env.horizon={horizon}", "eval.gallery=1"],
                        resume=False, overwrite=False, quiet=True)
    row = json.loads((run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[-1])
    assert row["train/episodes"] == 2 and row["train/failed_attempts"] == 0 and row["train/logprob_gap/max"] < 1e-4
    assert row["schedule/busy/render"] > 0 and (run / "report.html").exists()
    return json.loads((run / "eval" / "step_000001" / "results.json").read_text(encoding="utf-8"))


@pytest.mark.render("libvulkan.so.1")
def test_maniskill(tmp_path: Path) -> None:
    results = through_the_command_line(tmp_path, [
        "env.suite=maniskill", "env.tasks=[PushCube-v1]", "env.horizon=48", "env.options={dims: 4}", "env.image_size=32",
        "demos.episodes=2"], horizon=16)
    assert results["protocol"]["max_steps"] == 16 and results["greedy"]["success_once"]["n"] == 1  # type: ignore[index]


@pytest.mark.render("libOSMesa.so.8")
def test_libero_on_stand_ins_says_so(tmp_path: Path) -> None:
    results = through_the_command_line(tmp_path, [
        "env.suite=libero", "env.tasks=[libero_object/2]", "env.horizon=160", "env.options={assets: stand-in}",
        "env.cameras=[base, wrist]", "vla.cameras=[base, wrist]", "env.image_size=32", "demos.episodes=1",
        "demos.every=8"], horizon=16)
    assert "stand-in" in json.dumps(results["protocol"])
