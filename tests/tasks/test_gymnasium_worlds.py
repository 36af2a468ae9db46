"""The task `gymnasium` against Gymnasium itself: what is shown, what is done, what it pays, and what is refused."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

import mmrl
from mmrl.errors import ConfigError, DataError, MissingExtraError
from mmrl.registry import task_from_spec
from mmrl.rollout import PrefillOnceEngine, SamplingSettings
from mmrl.rollout.episodes import begin, play
from mmrl.tasks.gymnasium_worlds import GymnasiumEnvironment
from mmrl.types import Sample, StopReason, Turn
from tests.kits.engine_kit import cli_here, policy

LAKE = ["left", "down", "right", "up"]
PATH = ["down", "down", "right", "right", "down", "right"]  # of the 4 x 4 lake, to its goal
CALM = {"is_slippery": False}


def lake(**options: Any) -> GymnasiumEnvironment:
    options = {"actions": LAKE, "show": "text", "env_kwargs": CALM, **options}
    return GymnasiumEnvironment("FrozenLake-v1", **options)


def row(seed: int | None = 3, question: str = "") -> Sample:
    params = {} if seed is None else {"seed": seed}
    return Sample("1", "gymnasium", "worlds", question, None, params=params)


def said(text: str) -> Turn:
    return Turn((1,), text, (0.0,), StopReason.EOS)


def words(observation: mmrl.Observation | None) -> str:
    assert observation is not None
    return str(observation.messages[-1]["content"][-1]["text"])


def test_an_episode_is_the_one_that_gymnasium_plays() -> None:
    world, plain = lake(), gymnasium.make("FrozenLake-v1", render_mode="ansi", **CALM)
    plain.reset(seed=3)
    first = words(world.reset(row(), 0))
    assert first.startswith("Reach the goal.\nReply with one of: left, down, right, up.\n")
    paid = 0.0
    for number, action in enumerate(PATH):
        *_, reward, terminated, _, _ = plain.step(LAKE.index(action))
        outcome = world.step(said(action))
        paid += outcome.reward
        assert paid == reward and outcome.terminated == terminated and not outcome.truncated
        if not terminated:
            drawn = str(plain.render())
            letter = drawn[drawn.index("m") + 1]  # of the place, which terminals colour
            assert f"[{letter}]" in words(outcome.observation)
            assert f"You chose {action}." in words(outcome.observation)
        assert (
            outcome.info["success"] == float(terminated) and outcome.info["actions"] == number + 1
        )
    assert terminated and paid == 1.0
    world.close()


def test_a_hole_ends_an_episode_without_success() -> None:
    world = lake()
    world.reset(row(), 0)
    world.step(said("down"))
    outcome = world.step(said("right"))
    assert outcome.terminated and outcome.reward == 0 and outcome.info["success"] == 0


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("down", 1),
        ("Down.", 1),
        ("<think>left or right?</think>\n'up'", 3),
        ("<think>left</think><answer> right </answer>", 2),
        ("<answer>left</answer> no: <answer>up</answer>", 3),
        ("I go down", None),
        ("", None),
        ("<answer></answer>", None),
        ("leftright", None),
    ],
)
def test_a_turn_names_one_action(text: str, number: int | None) -> None:
    assert lake()._named(text) == number


def test_what_is_no_action_changes_nothing_and_counts() -> None:
    world = lake()
    world.reset(row(), 0)
    outcome = world.step(said("fly"))
    assert not outcome.parsed and not outcome.ended and outcome.reward == 0
    assert (
        words(outcome.observation)
        == "That was no action. Reply with one of: left, down, right, up."
    )
    assert outcome.info == {"success": 0.0, "return": 0.0, "actions": 1.0, "bad_actions": 1.0}
    assert "[S]" not in words(world.step(said("down")).observation), "it stands where it stood"


def test_rewards_below_zero_are_mapped_and_add_up() -> None:
    world = GymnasiumEnvironment(
        "CliffWalking-v1",
        actions=["up", "right", "down", "left"],
        show="text",
        rewards=(-26, 0),
        success_at=-20,
    )
    world.reset(row(), 0)
    outcomes = [world.step(said(a)) for a in ["up", *["right"] * 11, "down"]]
    assert outcomes[-1].terminated and outcomes[-1].info["return"] == -13
    assert sum(o.reward for o in outcomes) == pytest.approx(0.5)
    assert outcomes[-1].info["success"] == 1 and outcomes[-2].info["success"] == 0


def test_seeds_are_the_rows_own_or_the_groups() -> None:
    taxi = max(name for name in gymnasium.registry if name.startswith("Taxi-v"))

    def began(sample: Sample, seed: int) -> str:
        world = GymnasiumEnvironment(
            taxi, actions=["south", "north", "east", "west", "pick", "drop"], show="text"
        )
        return words(world.reset(sample, seed))

    assert began(row(3), 0) == began(row(3), 1) != began(row(4), 0)
    assert began(row(None), 5) == began(row(None), 5) != began(row(None), 7)
    with pytest.raises(DataError, match="expected seed as a whole number from 0, found -1"):
        began(row(-1), 0)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"env_id": "os:FrozenLake-v1"}, "which names a module to import"),
        ({"actions": ["left", "left"]}, "as different names"),
        ({"actions": ["left", " "]}, "as different names"),
        ({"show": "sound"}, "expected gymnasium.show picture or text, found 'sound'"),
        ({"prompt": "go"}, "contains {actions}"),
        ({"max_turns": 0}, "as a whole number from 1, found 0"),
        ({"rewards": (1, 1)}, "expected gymnasium.rewards as (lowest, highest)"),
        ({"rewards": 5}, "expected gymnasium.rewards as (lowest, highest)"),
        ({"success_at": "x"}, "expected gymnasium.success_at as the sum"),
        ({"env_kwargs": [1]}, "expected gymnasium.env_kwargs as a mapping"),
        ({"actions": "left"}, "expected gymnasium.actions as a list of names"),
        ({"actions": [True, False, "up", "down"]}, "YAML reads yes, no, on and off"),
        ({"prompt": 3}, "contains {actions}"),
        ({"rewards": (0, float("inf"))}, "expected gymnasium.rewards as (lowest, highest)"),
    ],
)
def test_parameters_that_make_no_environment_are_refused(options: Any, why: str) -> None:
    with pytest.raises(ConfigError) as refused:
        GymnasiumEnvironment(**{"env_id": "FrozenLake-v1", "actions": LAKE, **options})
    assert why in str(refused.value)


def test_numbers_may_be_names() -> None:
    assert GymnasiumEnvironment("FrozenLake-v1", actions=range(4)).actions == ["0", "1", "2", "3"]  # type: ignore[arg-type]


def test_names_that_gymnasium_does_not_know_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"found 'FrozenLak-v1'\. Did you mean 'FrozenLake-v1'"):
        GymnasiumEnvironment("FrozenLak-v1", actions=LAKE).reset(row(), 0)
    with pytest.raises(ConfigError, match=r"expected gymnasium\.env_id, such as FrozenLake-v1"):
        GymnasiumEnvironment(actions=LAKE).reset(row(), 0)
    with pytest.raises(ConfigError, match=r"found 3 for Discrete\(4\)"):
        lake(actions=LAKE[:3]).reset(row(), 0)


def test_without_gymnasium_it_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    with pytest.raises(
        MissingExtraError, match=r"needs Gymnasium; install it with: .*\[gymnasium\]"
    ):
        lake().reset(row(), 0)


WORLD = '''
import gymnasium
import numpy as np
from mmrl.tasks.gymnasium_worlds import GymnasiumEnvironment


class Corridor(gymnasium.Env):
    """Go right three times."""

    action_space, render_mode = gymnasium.spaces.Discrete(2), "rgb_array"
    observation_space = gymnasium.spaces.Discrete(4)

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.place = 0
        return 0, {}

    def step(self, action):
        self.place = max(0, self.place + (1 if action else -1))
        return self.place, float(self.place == 3), self.place == 3, False, {}

    def render(self):
        picture = np.zeros((56, 112, 3), np.uint8)
        picture[:, 28 * self.place : 28 * self.place + 28] = 255
        return picture


class Walk(GymnasiumEnvironment):
    def make(self):
        return Corridor()
'''


def test_a_world_of_ones_own_shows_pictures(tmp_path: Path) -> None:
    (tmp_path / "walk.py").write_text(WORLD)
    task = task_from_spec(f"{tmp_path / 'walk.py'}:Walk", {"actions": ["left", "right"]})
    world: Any = task.environment(mmrl.Template("", mmrl.CoordFrame.ABS_ORIG))
    first = world.reset(row(), 0)
    assert [c["type"] for c in first.messages[-1]["content"]] == ["image", "text"]
    outcomes = [world.step(said("right")) for _ in range(3)]
    assert outcomes[0].observation.images[0][0, 28:56].min() == 255
    assert outcomes[-1].terminated and outcomes[-1].info["success"] == 1


@pytest.mark.slow
def test_the_check_of_environments_passes(tmp_path: Path) -> None:
    (tmp_path / "walk.py").write_text(WORLD)
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps({"id": str(n), "seed": n}) + "\n" for n in range(2))
    )
    cli_here(
        "env",
        "check",
        f"{tmp_path / 'walk.py'}:Walk",
        "--data",
        str(tmp_path / "rows.jsonl"),
        "--param",
        "actions=[left, right]",
        "--out",
        str(tmp_path / "check"),
    )


def test_a_policy_plays_it() -> None:
    p = policy()
    task = task_from_spec(
        "gymnasium", {"env_id": "FrozenLake-v1", "actions": LAKE, "show": "text", "max_turns": 3}
    )
    assert task.name == "gymnasium" and task.headline == "success"
    episodes = begin(p, row(), task, 3, (1, 2))
    (rollouts,) = play(p, PrefillOnceEngine(p), [episodes], SamplingSettings(max_new_tokens=4))
    for rollout in rollouts:
        assert rollout.error is None and len(rollout.turns) == 3 and rollout.truncated
        assert rollout.info["bad_actions"] == 3.0 and rollout.score is not None
        assert rollout.score.value == 0 and not rollout.score.parsed
    assert np.isfinite([x for r in rollouts for t in r.turns for x in t.logprobs]).all()
