"""Recording: the same data whatever the number of workers, clean labels, episodes that fail, hang or die are counted."""

from __future__ import annotations

import json
import math
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mmrl.errors import ConfigError, DataError
from mmrl.robotics.actions import ActionCodec
from mmrl.robotics.contract import (
    EnvSpec,
    InitialState,
    StepResult,
    initial_states,
    make_simulator,
)
from mmrl.robotics.datasets.lerobot import LeRobotDataset
from mmrl.robotics.datasets.record import play_expert, record
from mmrl.robotics.tiny import TinySimulator

PUSH = EnvSpec("tiny", "push", 48, image_size=32)


class Troubled(TinySimulator):
    """A tiny simulator that misbehaves at states named in its options: die, hang, raise_at, nan, silent (expert stands still)."""

    def __init__(self, spec: EnvSpec) -> None:
        trouble = dict(spec.options)
        super().__init__(
            EnvSpec(spec.suite, spec.task, spec.horizon, spec.image_size, spec.cameras)
        )
        self.spec, self.trouble, self.at = spec, trouble, -1

    def reset(self, state: InitialState) -> None:
        self.at = state.index
        if self.at in self.trouble.get("die", ()):
            os._exit(3)
        if self.at in self.trouble.get("hang", ()):
            time.sleep(600)
        if self.at in self.trouble.get("raise_at", ()):
            raise RuntimeError("the renderer lost its context")
        super().reset(state)

    def step(self, action_A: np.ndarray) -> StepResult:
        result = super().step(action_A)
        broken = self.at in self.trouble.get("nan_reward", ()) and self.steps == 3
        return replace(result, reward=math.nan) if broken else result

    def expert(self, rng: np.random.Generator, noise: float = 0.0) -> Any:
        act = super().expert(rng, noise)
        if self.at in self.trouble.get("nan", ()):
            return lambda: (np.full(2, np.nan), np.zeros(2))
        if self.at in self.trouble.get("silent", ()):
            return lambda: (np.zeros(2), np.zeros(2))
        return act


def troubled(**options: Any) -> EnvSpec:
    return EnvSpec(f"{__name__}:Troubled", "push", 48, image_size=32, options=options)


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()
    }


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("record") / "set"
    summary = record(PUSH, initial_states("train", 4), out, workers=0, noise=0.3, seed=5)
    assert (
        summary.attempted == summary.succeeded == summary.episodes == 4
        and summary.failed == summary.unsolved == 0
    )
    return out


def test_recorded_episodes_replay_to_success(recorded: Path) -> None:
    """The executed actions, from the same state, give the same pictures and rewards again."""
    simulator = make_simulator(PUSH)
    for demo, state in zip(LeRobotDataset(recorded), initial_states("train", 4), strict=True):
        assert demo.state == f"push/{state.name}" and demo.success
        simulator.reset(state)
        assert demo.executed_TA is not None
        for t, action in enumerate(demo.executed_TA):
            observation = simulator.observe()
            if t in (0, len(demo) - 1):
                np.testing.assert_array_equal(
                    demo.pictures("base", [t])[0], observation.images["base"]
                )
                assert observation.instruction == demo.instruction
            result = simulator.step(action.astype(np.float64))
        assert result.success


def test_labels_are_clean_and_executed_actions_noisy(recorded: Path) -> None:
    demos = list(LeRobotDataset(recorded))
    difference = np.concatenate(
        [d.executed_TA - d.actions_TA for d in demos if d.executed_TA is not None]
    )
    assert 0.1 < difference.std() < 0.4 and abs(difference.mean()) < 0.1
    first = demos[0]
    simulator = make_simulator(PUSH)
    simulator.reset(initial_states("train", 1)[0])
    _, label = simulator.expert(np.random.default_rng(0))()
    np.testing.assert_allclose(first.actions_TA[0], label, atol=1e-6)


def test_the_same_seed_gives_the_same_episode_and_another_seed_another() -> None:
    simulator, state = make_simulator(PUSH), initial_states("train", 1)[0]
    a, b, c = (play_expert(simulator, state, noise=0.3, seed=seed) for seed in (1, 1, 2))
    np.testing.assert_array_equal(a.executed_TA, b.executed_TA)
    np.testing.assert_array_equal(a.images["base"], b.images["base"])
    assert not np.array_equal(a.executed_TA[:3], c.executed_TA[:3])


def test_a_state_given_twice_gets_other_noise(tmp_path: Path) -> None:
    record(PUSH, initial_states("train", 1) * 2, tmp_path / "s", workers=0, noise=0.3)
    a, b = LeRobotDataset(tmp_path / "s")
    assert a.state == b.state and a.executed_TA is not None and b.executed_TA is not None
    np.testing.assert_array_equal(a.pictures("base", [0]), b.pictures("base", [0]))
    assert not np.array_equal(a.executed_TA[:3], b.executed_TA[:3])


@pytest.mark.slow
def test_the_data_set_does_not_depend_on_the_number_of_workers(
    recorded: Path, tmp_path: Path
) -> None:
    seen: list[tuple[int, int]] = []
    record(
        PUSH,
        initial_states("train", 4),
        tmp_path / "two",
        workers=2,
        noise=0.3,
        seed=5,
        on_episode=lambda *n: seen.append(n),
    )
    assert contents(tmp_path / "two") == contents(recorded)
    assert seen == [(1, 4), (2, 4), (3, 4), (4, 4)]


def test_pictures_every_few_steps(tmp_path: Path) -> None:
    codec = ActionCodec.from_space(make_simulator(PUSH).action_space, chunk=4, repeat=2)
    summary = record(
        PUSH, initial_states("train", 2), tmp_path / "s", workers=0, every=4, codec=codec
    )
    demos = list(LeRobotDataset(tmp_path / "s"))
    assert summary.pictures == sum(len(d.steps_P) for d in demos) and summary.frames == sum(
        map(len, demos)
    )
    for demo in demos:
        np.testing.assert_array_equal(demo.steps_P, np.arange(0, len(demo), 4))
        assert set(range(0, len(demo), codec.steps)) <= set(demo.steps_P.tolist())
    with pytest.raises(ConfigError, match="divide the 8 control steps"):
        record(PUSH, initial_states("train", 2), tmp_path / "t", every=3, codec=codec)


def test_failed_episodes_are_counted_and_left_out(tmp_path: Path) -> None:
    summary = record(
        troubled(raise_at=[0], nan=[2], silent=[3]),
        initial_states("train", 5),
        tmp_path / "s",
        workers=0,
    )
    assert (
        summary.attempted,
        summary.succeeded,
        summary.unsolved,
        summary.failed,
        summary.episodes,
    ) == (5, 2, 1, 2, 2)
    assert (
        "renderer lost its context" in summary.errors[0] and "finite actions" in summary.errors[1]
    )
    assert [demo.state for demo in LeRobotDataset(tmp_path / "s")] == [
        "push/train-1",
        "push/train-4",
    ]
    # a reward between two pictures is looked at, too
    broken = record(
        troubled(nan_reward=[1]), initial_states("train", 2), tmp_path / "n", workers=0, every=16
    )
    assert broken.episodes == 1 and "expected finite rewards" in broken.errors[0]
    counts = json.loads((tmp_path / "s/meta/info.json").read_text())["mmrl"]["counts"]
    assert counts == {"attempted": 5, "succeeded": 2, "unsolved": 1, "failed": 2}
    kept = record(
        troubled(silent=[1]), initial_states("train", 2), tmp_path / "all", workers=0, keep="all"
    )
    assert kept.episodes == 2 and [d.success for d in LeRobotDataset(tmp_path / "all")] == [
        True,
        False,
    ]


@pytest.mark.slow
def test_workers_that_die_or_hang_are_replaced(tmp_path: Path) -> None:
    summary = record(
        troubled(die=[1], hang=[3]),
        initial_states("train", 5),
        tmp_path / "s",
        workers=2,
        episode_s=15.0,
    )
    assert (summary.succeeded, summary.failed, summary.episodes) == (3, 2, 3)
    assert "ended with code 3" in summary.errors[0] and "longer than 15 s" in summary.errors[1]
    assert [demo.state for demo in LeRobotDataset(tmp_path / "s")] == [
        "push/train-0",
        "push/train-2",
        "push/train-4",
    ]
    with pytest.raises(ConfigError, match="ended too often"):
        record(troubled(die=[0]), initial_states("train", 1), tmp_path / "t", workers=1, respawns=0)
    assert [p.name for p in tmp_path.iterdir()] == ["s"]


def test_a_suite_of_the_script_itself_is_refused_where_workers_would_need_it(
    tmp_path: Path,
) -> None:
    with pytest.raises(
        ConfigError, match="suite that worker processes can import, found __main__:Mine"
    ):
        record(EnvSpec("__main__:Mine", "push", 48), initial_states("train", 1), tmp_path / "s")


def test_several_tasks_in_one_data_set(tmp_path: Path) -> None:
    specs = [PUSH, EnvSpec("tiny", "reach", 40, image_size=32)]
    record(specs, initial_states("train", 2), tmp_path / "s", workers=0)
    demos = list(LeRobotDataset(tmp_path / "s"))
    assert [d.state.split("/")[0] for d in demos] == ["push", "push", "reach", "reach"] and len(
        {d.instruction for d in demos}
    ) >= 2


def test_nothing_to_keep_is_an_error_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"found none of 2 \(0 failed, 2 unsolved\); the expert solved none"
    ):
        record(troubled(silent=[0, 1]), initial_states("train", 2), tmp_path / "s", workers=0)
    with pytest.raises(DataError, match="lost its context"):
        record(troubled(raise_at=[0]), initial_states("train", 1), tmp_path / "s", workers=0)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "change, text",
    [
        ({"keep": "none"}, "success or all"),
        ({"noise": -1.0}, "noise >= 0"),
        ({"noise": float("nan")}, "noise >= 0"),
        ({"every": 0}, "every >= 1"),
        ({"workers": -1}, "workers >= 0"),
        ({"states": []}, "at least one"),
        ({"fps": 0}, "whole number"),
        (
            {"spec": [PUSH, EnvSpec("tiny", "reach", 40, image_size=64)]},
            "same cameras and image_size",
        ),
        ({"spec": EnvSpec("tiny", "pusch", 40)}, "Did you mean 'push'"),
        ({"spec": EnvSpec("tinny", "push", 40)}, "Did you mean 'tiny'"),
    ],
)
def test_wrong_settings(tmp_path: Path, change: dict, text: str) -> None:
    settings = {
        "spec": PUSH,
        "states": initial_states("train", 1),
        "out": tmp_path / "s",
        "workers": 0,
        **change,
    }
    with pytest.raises(ConfigError, match=text):
        record(**settings)
    assert list(tmp_path.iterdir()) == []
