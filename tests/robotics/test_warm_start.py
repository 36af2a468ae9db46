"""Warm start and command line: demonstrations recorded, cloned, the policy trained by RL, all through `mmrl`."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from safetensors.torch import load_file

from mmrl.cli.display import Display
from mmrl.cli.run import is_embodied, run_config, sft_command, train_command
from mmrl.errors import ConfigError, DataError
from mmrl.robotics.config import EmbodiedConfig
from mmrl.robotics.contract import EnvSpec
from mmrl.robotics.datasets.lerobot import LeRobotDataset
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
        ConfigError, match="expected demonstrations of 3 action dimensions, as tiny has, found 2"
    ):
        supervised_source(config, supervised_world(config)).load_policy(print)


@pytest.mark.slow
def test_a_recording_of_other_states_is_not_taken_for_these(model: Path, demos: Path) -> None:
    same = (f"dir={demos.parent}", "name=clone", "env.workers=1", "env.options={discs: 1}")
    assert record_demos(config_of(model, *same, "demos.episodes=12")) == demos
    for changed in (("demos.episodes=30",), ("demos.episodes=12", "demos.first_state=7")):
        with pytest.raises(
            ConfigError,
            match=r"states was 12 from train-500000, now (30 from train-500000|12 from train-7)",
        ):
            record_demos(config_of(model, *same, *changed))


def renamed(demos: Path, out: Path, image_size: int = 32, state: int = 2) -> Path:
    """The set with the columns of openpi's LIBERO data, and pictures in its parquet."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    (out / "meta/episodes").mkdir(parents=True)
    (out / "data/chunk-000").mkdir(parents=True)
    info = json.loads((demos / "meta/info.json").read_text())
    features = info["features"]
    columns = {"actions": features["action"], "state": {"dtype": "float32", "shape": [state]}}
    info["features"] = {
        **columns,
        "image": {"dtype": "image", "shape": [image_size, image_size, 3]},
    }
    (out / "meta/info.json").write_text(json.dumps(info))
    shutil.copy(demos / "meta/tasks.parquet", out / "meta/tasks.parquet")
    shutil.copytree(demos / "meta/episodes", out / "meta/episodes", dirs_exist_ok=True)
    table = pq.read_table(demos / "data/chunk-000/file-000.parquet")
    whole = LeRobotDataset(demos)
    cells = []
    for demo in whole:
        for step in range(len(demo)):
            shown = demo.pictures("base", [step])[0]
            data = io.BytesIO()
            Image.fromarray(shown).resize((image_size, image_size)).save(data, "png")
            cells.append({"bytes": data.getvalue(), "path": None})
    states = np.tile(np.stack(table["observation.state"].to_pylist()), state)[:, :state]
    made = pa.table(
        {
            "actions": table["action"],
            "state": pa.array(states.astype(np.float32).tolist()),
            "image": pa.array(cells),
            **{n: table[n] for n in ("timestamp", "episode_index", "task_index")},
        }
    )
    lengths = [len(demo) for demo in whole]
    with pq.ParquetWriter(out / "data/chunk-000/file-000.parquet", made.schema) as writer:
        for begin, length in zip(np.cumsum([0, *lengths]), lengths, strict=False):
            writer.write_table(made.slice(int(begin), length))
    return out


OTHER = ("demos.cameras={base: image}", "demos.action_key=actions", "demos.state_key=state")


@pytest.mark.slow
def test_a_set_with_other_names_is_the_same_demonstrations(
    model: Path, demos: Path, tmp_path: Path
) -> None:
    theirs = renamed(demos, tmp_path / "set")
    names = {"names": {"base": "image"}, "action_key": "actions", "state_key": "state"}
    found, own = load_demos(theirs, ["base"], **names), load_demos(demos, ["base"])
    assert len(found) == len(own) == 12
    for a, b in zip(found, own, strict=True):
        np.testing.assert_array_equal(a.actions, b.actions)
        np.testing.assert_array_equal(a.images["base"][b.steps], b.images["base"])
        np.testing.assert_array_equal(a.proprio[b.steps], b.proprio)
    for given, words in (
        ({}, r"expected a column action, found actions.*demos\.action_key"),
        ({"action_key": "actions", "state_key": "stat"}, r"column stat, .*demos\.state_key.*state"),
        (
            {"action_key": "actions"},
            r"a camera base, found image; .*demos\.cameras=\{base: image\}",
        ),
    ):
        with pytest.raises((ConfigError, DataError), match=words):
            load_demos(theirs, ["base"], **given)


@pytest.mark.slow
def test_pictures_of_an_episode_are_read_from_its_own_rows_alone(
    demos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import pyarrow.parquet as pq

    theirs = LeRobotDataset(renamed(demos, tmp_path / "set"), action_key="actions")
    asked: list[list[int]] = []
    read = pq.ParquetFile.read_row_groups
    monkeypatch.setattr(
        pq.ParquetFile,
        "read_row_groups",
        lambda self, groups, **k: asked.append(groups) or read(self, groups, **k),
    )
    monkeypatch.setattr(pq.ParquetFile, "read", None)
    for demo in theirs:
        demo.pictures("image", [0])
    assert asked == [[number] for number in range(12) for _ in ("numbers", "pictures")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("made", "words"),
    [
        ({"state": 5}, r"of 2 proprioception values, as tiny has, found 5 .*demos\.state_key"),
        (
            {"image_size": 48},
            r"of 32 pixels of height \(camera base\), as tiny has, found 48 .*env\.image_size",
        ),
    ],
)
def test_demonstrations_of_another_robot_or_size_are_refused_before_training(
    model: Path, demos: Path, tmp_path: Path, made: dict[str, int], words: str
) -> None:
    theirs = renamed(demos, tmp_path / "set", **made)
    config = config_of(model, f"demos.path={theirs}", "vla.proprio=true", *OTHER)
    with pytest.raises(ConfigError, match=words):
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


@pytest.mark.slow
@pytest.mark.parametrize("lora", ["null", "{r: 4}"])
def test_cloning_that_was_interrupted_goes_on_bit_for_bit(
    model: Path, demos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lora: str
) -> None:
    file = tmp_path / "robot.yaml"
    file.write_text("env: {suite: tiny}\n", encoding="utf-8")
    settings = [
        *BASE,
        f"model.path={model}",
        f"demos.path={demos}",
        "demos.steps=9",
        "demos.batch=8",
        "demos.save_every=4",
        f"model.lora={lora}",
        "demos.optim.lr=3e-3",
        "vla.proprio=true",
    ]
    sft_command(file, settings, tmp_path / "whole", quiet=True)
    with monkeypatch.context() as m:
        step = Display.step

        def dies(self: Display, done: int, *rest: Any) -> None:
            assert done < 6, "killed"
            step(self, done, *rest)

        m.setattr(Display, "step", dies)
        with pytest.raises(AssertionError, match="killed"):
            sft_command(file, settings, tmp_path / "cut", quiet=True)
    with pytest.raises(ConfigError, match=r"demos\.batch was 8, now 16"):
        sft_command(file, [*settings, "demos.batch=16"], tmp_path / "cut", resume=True, quiet=True)
    sft_command(file, settings, tmp_path / "cut", resume=True, quiet=True)
    whole, cut = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "cut"))
    assert [n for n, weight in whole.items() if not torch.equal(weight, cut[n])] == []
    assert json.loads((tmp_path / "cut" / "vla.json").read_text()) == json.loads(
        (tmp_path / "whole" / "vla.json").read_text()
    )
    assert json.loads((tmp_path / "cut" / "vla.json").read_text())["vla"]["image_size"] == 32
