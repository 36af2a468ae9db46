"""Demonstrations, cloning, reinforcement learning and evaluation through the command line on real simulators."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from mmrl.cli.main import app
from mmrl.cli.run import sft_command, train_command
from tests.kits.robot_kit import BASE, make_model

pytestmark = pytest.mark.slow

SMALL = [
    *BASE,
    "env.slots=2",
    "env.workers=1",
    "rollout.group_size=2",
    "train.prompts_per_step=1",
    "train.steps=1",
    "algorithm.dynamic_sampling=false",
    "action.chunk=4",
    "action.repeat=2",
    "demos.steps=2",
    "demos.batch=4",
    "demos.noise=0.1",
    "eval_states=1",
    "eval.samples=0",
    "eval.best_metric=greedy/success_once",
    "schedule.kind=pipelined",
    "schedule.timeline=1",
]


def through_the_command_line(folder: Path, settings: list[str], horizon: int) -> dict[str, Any]:
    """Record and clone with long episodes, train with short ones; the last evaluation's results."""
    file = folder / "run.yaml"
    file.write_text("env: {suite: tiny}\n", encoding="utf-8")
    model = make_model(folder / "model")
    common = [*SMALL, *settings, f"dir={folder}", "name=run"]
    sft_command(file, [*common, f"model.path={model}"], folder / "policy", quiet=True)
    run = train_command(
        file,
        [*common, f"model.path={folder / 'policy'}", f"env.horizon={horizon}", "eval.gallery=1"],
        resume=False,
        overwrite=False,
        quiet=True,
    )
    row = json.loads((run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[-1])
    assert (
        row["train/episodes"] == 2
        and row["train/failed_attempts"] == 0
        and row["train/logprob_gap/max"] < 1e-4
    )
    assert row["schedule/busy/render"] > 0 and (run / "report.html").exists()
    return json.loads((run / "eval" / "step_000001" / "results.json").read_text(encoding="utf-8"))


def through_eval(checkpoint: Path, out: Path, *arguments: str) -> tuple[dict[str, Any], str]:
    """`mmrl eval` of a run's checkpoint: the one suite's row of suites.json, and what was printed."""
    done = CliRunner().invoke(
        app, ["eval", str(checkpoint), *arguments, "--out", str(out)], catch_exceptions=False
    )
    assert done.exit_code == 0, done.output
    (row,) = json.loads((out / "suites.json").read_text(encoding="utf-8"))["suites"]
    assert not row["error"] and row["failed_attempts"] == row["unfinished"] == 0
    return row, done.stdout


def clip_of(folder: Path, name: str) -> list[np.ndarray]:
    """Pictures of a clip of an evaluated suite."""
    import av

    with av.open(str(folder / "videos" / name)) as clip:
        return [frame.to_ndarray(format="rgb24") for frame in clip.decode(video=0)]


@pytest.mark.render("libvulkan.so.1")
@pytest.mark.usefixtures("maniskill_workers")
def test_maniskill(tmp_path: Path) -> None:
    results = through_the_command_line(
        tmp_path,
        [
            "env.suite=maniskill",
            "env.tasks=[PushCube-v1]",
            "env.horizon=48",
            "env.options={dims: 4}",
            "env.image_size=32",
            "demos.episodes=2",
        ],
        horizon=16,
    )
    assert results["protocol"]["max_steps"] == 16 and results["greedy"]["success_once"]["n"] == 1
    out = tmp_path / "suites"
    row, printed = through_eval(
        tmp_path / "run" / "checkpoints" / "best",
        out,
        "--suite",
        "maniskill_pull",
        "--protocol",
        "rlinf",
        "env.horizon=16",
        "--limit",
        "2",
    )
    assert (row["suite"], row["mode"], row["n"], row["official"]) == (
        "maniskill_pull",
        "sampled",
        2,
        False,
    )
    assert (
        row["render"] not in ("unknown", "none")
        and row["simulator"]["mani_skill"]
        and not row["stand_in"]
    )
    assert row["protocol"] == "own, temperature and seed of rlinf" and "own, temperature" in printed
    rows = [
        json.loads(line)
        for line in (out / "maniskill_pull" / "predictions.jsonl")
        .read_text(encoding="utf-8")
        .splitlines()
    ]
    assert [(r["mode"], r["seed"]) for r in rows] == [
        (m, (1 << 30) + n) for n in range(2) for m in ("greedy", "sampled")
    ]
    assert ["video" in r for r in rows] == [False, True] * 2, "clips show the mode that is measured"
    pictures = clip_of(out / "maniskill_pull", rows[1]["video"])
    assert len(pictures) == 1 + rows[1]["score"]["metrics"]["steps"] and pictures[0].shape == (
        32,
        32,
        3,
    )
    assert (pictures[0] != pictures[-1]).any()


@pytest.mark.render("libOSMesa.so.8")
def test_metaworld(tmp_path: Path) -> None:
    results = through_the_command_line(
        tmp_path,
        [
            "env.suite=metaworld",
            "env.tasks=[reach-v3]",
            "env.horizon=120",
            "env.options={gl: osmesa}",
            "env.image_size=32",
            "demos.episodes=2",
            "demos.every=8",
        ],
        horizon=16,
    )
    assert results["protocol"]["max_steps"] == 16 and results["greedy"]["success_once"]["n"] == 1
    row, _ = through_eval(
        tmp_path / "run" / "checkpoints" / "best",
        tmp_path / "suites",
        "--suite",
        "metaworld_mt10",
        "env.tasks=[drawer-close-v3, push-v3]",
        "env.horizon=16",
        "--limit",
        "1",
    )
    assert (row["tasks"], row["n"], row["render"]) == (2, 2, "osmesa")
    assert row["simulator"]["metaworld"][0] == "3" and not row["stand_in"]


@pytest.mark.render("libOSMesa.so.8")
def test_libero_on_stand_ins_says_so(tmp_path: Path) -> None:
    results = through_the_command_line(
        tmp_path,
        [
            "env.suite=libero",
            "env.tasks=[libero_object/2]",
            "env.horizon=160",
            "env.options={assets: stand-in}",
            "env.cameras=[base, wrist]",
            "vla.cameras=[base, wrist]",
            "env.image_size=32",
            "demos.episodes=1",
            "demos.every=8",
        ],
        horizon=16,
    )
    assert "stand-in" in json.dumps(results["protocol"])
    out = tmp_path / "suites"
    row, printed = through_eval(
        tmp_path / "run" / "checkpoints" / "best",
        out,
        "--suite",
        "libero_object",
        "--protocol",
        "openpi",
        "env.tasks=[libero_object/2, libero_object/7]",
        "env.horizon=10",
        "--limit",
        "1",
    )
    assert (row["protocol"], row["tasks"], row["n"], row["states"]) == (
        "openpi",
        2,
        2,
        "row 0, 1 of 1 are training rows",
    )
    assert row["stand_in"] and not row["official"] and row["render"] == "osmesa"
    assert {"env.horizon 10 instead of 280", "every action executed 2 times"} <= set(
        row["deviations"]
    )
    assert not any("options" in d for d in row["deviations"]), "assets are no matter of a protocol"
    assert (
        "measured on stand-in assets: not a score of the benchmark" in printed
        and printed.count("(stand-in assets)") == 4
    )
    results = json.loads((out / "libero_object" / "results.json").read_text(encoding="utf-8"))
    assert results["protocol"]["options"] == {
        "assets": "stand-in",
        "wait_steps": 10,
        "settle_gripper": -1.0,
        "env_seed": 7,
        "env_draws": "in-turn",
    }
    for line in (
        (out / "libero_object" / "predictions.jsonl").read_text(encoding="utf-8").splitlines()
    ):
        pictures = clip_of(out / "libero_object", json.loads(line)["video"])
        assert (
            len(pictures) == 11
            and pictures[0].shape == (256, 256, 3)
            and (pictures[0] != pictures[-1]).any()
        )
