"""Warm start and command line: demonstrations recorded, cloned, the policy trained by RL, all through `mmrl`."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from mmrl.cli.run import is_embodied, run_config, sft_command, train_command
from mmrl.errors import ConfigError
from mmrl.robotics.config import EmbodiedConfig
from mmrl.robotics.contract import EnvSpec
from mmrl.robotics.demonstrations import demo_states, load_demos, record_demos
from mmrl.robotics.sft import DemoSteps
from mmrl.training.sft import run_sft, supervised_source, supervised_world
from tests.kits.robot_kit import BASE, config_of, make_model, make_vla


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def demos(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    return record_demos(
        config_of(
            model,
            f"dir={folder}",
            "name=clone",
            "demos.episodes=12",
            "env.workers=1",
            "env.options={discs: 1}",
        )
    )


@pytest.mark.slow
def test_cloning_lowers_the_loss_and_masks_what_was_never_executed(
    model: Path, demos: Path
) -> None:
    config = config_of(
        model,
        f"demos.path={demos}",
        "demos.steps=60",
        "demos.batch=16",
        "demos.optim.lr=3e-3",
    )
    vla = make_vla(model)
    steps = DemoSteps(load_demos(demos, ["base"]), vla)
    episode = steps.episodes[0]
    last = steps.index.index((0, len(episode.steps) - 1))
    _, bins, valid = steps.example(last)
    # one action left of the chunk's two
    assert bins.shape == valid.shape == (4,) and valid.tolist() == [True, True, False, False]
    losses: list[float] = []
    run_sft(vla, config, lambda step, metrics: losses.append(metrics["loss"]))
    assert len(losses) == 60 and sum(losses[-10:]) < 0.95 * sum(losses[:10])


def test_recorded_states_are_training_states_that_rl_does_not_begin_with(model: Path) -> None:
    config = config_of(model, "demos.episodes=5")
    states = demo_states(config, EnvSpec("tiny", "reach", 12))
    assert all(s.split == "train" for s in states) and min(s.index for s in states) >= 500_000


@pytest.mark.slow
def test_wrong_demonstrations_are_named(model: Path, demos: Path, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"expected demonstrations at demos\.path, found nothing at"
    ):
        record_demos(config_of(model, f"demos.path={tmp_path / 'nowhere'}"))
    config = config_of(
        model, f"demos.path={demos}", "env.tasks=[pick]", "env.options={}", "demos.steps=1"
    )
    with pytest.raises(
        ConfigError, match="expected demonstrations of 3 action dimensions, found 2"
    ):
        supervised_source(config, supervised_world(config)).load_policy(print)


def test_a_configuration_with_env_is_embodied(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "robot.yaml"
    file.write_text(
        yaml.safe_dump({"env": {"suite": "tiny"}, "model": {"path": str(model)}}), encoding="utf-8"
    )
    assert is_embodied(file) and isinstance(run_config(file, []), EmbodiedConfig)
    assert not is_embodied(Path("configs/demo.yaml")) and not is_embodied(tmp_path / "missing.yaml")
    for recipe in ("maniskill", "libero", "maniskill_tiny", "robot_tiny"):
        assert isinstance(run_config(Path("configs") / f"{recipe}.yaml", []), EmbodiedConfig)


@pytest.mark.slow
def test_sft_then_rl_from_the_command_line(model: Path, demos: Path, tmp_path: Path) -> None:
    file = tmp_path / "robot.yaml"
    file.write_text("env: {suite: tiny}\n", encoding="utf-8")
    settings = [
        *BASE,
        f"model.path={model}",
        f"demos.path={demos}",
        "demos.steps=5",
        f"dir={tmp_path}",
        "name=run",
    ]
    sft_command(file, settings, tmp_path / "policy", quiet=True)
    assert (tmp_path / "policy" / "vla.json").exists()
    run = train_command(
        file,
        [
            *settings,
            f"model.path={tmp_path / 'policy'}",
            "schedule.kind=pipelined",
            "eval.gallery=1",
        ],
        resume=False,
        overwrite=False,
        quiet=True,
    )
    assert (run / "report.html").exists() and list(
        (run / "eval" / "step_000000" / "videos").glob("*.mp4")
    )


@pytest.mark.slow
def test_a_cautious_and_shaky_demonstrator(model: Path, tmp_path: Path) -> None:
    config = config_of(
        model,
        f"dir={tmp_path}",
        "name=shaky",
        "demos.episodes=4",
        "demos.speed=0.5",
        "demos.noise=0.6",
        "demos.horizon=40",
        "env.workers=1",
        "env.options={discs: 1}",
    )
    folder = record_demos(config)
    clean, done = load_demos(folder, ["base"]), load_demos(folder, ["base"], executed=True)
    assert max(abs(e.actions).max() for e in clean) <= 0.5 + 1e-6  # half the speed
    # what was done was shaky
    assert all((a.actions != b.actions).any() for a, b in zip(clean, done, strict=True))
    assert max(len(e.actions) for e in clean) > 12  # longer than env.horizon
    with pytest.raises(
        ConfigError,
        match=r"demonstrations of other settings: speed was 0\.5, now 1\.0\. Remove the folder",
    ):
        record_demos(
            config.model_copy(update={"demos": config.demos.model_copy(update={"speed": 1.0})})
        )
