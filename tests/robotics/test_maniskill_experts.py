"""Scripted experts of ManiSkill's table-top tasks: what the tables promise, and real episodes of new plans."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mmrl.errors import ConfigError, MissingExtraError
from mmrl.evaluation.suite_book import load_suites
from mmrl.robotics.contract import EnvSpec, initial_states, make_simulator
from mmrl.robotics.maniskill import ManiSkillSimulator
from mmrl.robotics.maniskill_build import check_horizon, fixed_robot
from mmrl.robotics.maniskill_plans import PLANS, TURNING
from mmrl.robotics.maniskill_scene import _INSTRUCTIONS
from mmrl.robotics.maniskill_skills import angle_between, turn_between
from scripts.check_experts import expert_specs

REPO = Path(__file__).parents[2]
STATES = initial_states("eval", 3)
needs_it = pytest.mark.skipif(
    importlib.util.find_spec("mani_skill") is None,
    reason="ManiSkill is not installed (it needs Python 3.10 to 3.12): pip install -e '.[robotics]'",
)


def real(test: Any) -> Any:
    return pytest.mark.slow(needs_it(test))


def make(task: str, horizon: int = 80, **options: Any) -> ManiSkillSimulator:
    spec = EnvSpec("maniskill", task, horizon, 64, options={"render_backend": "none", **options})
    simulator = make_simulator(spec)
    assert isinstance(simulator, ManiSkillSimulator)
    return simulator


def steps_of(simulator: ManiSkillSimulator, index: int, noise: float = 0.0) -> int | None:
    """Control steps until the expert has solved an evaluation state; None when it has not."""
    simulator.reset(STATES[index])
    expert = simulator.expert(np.random.default_rng(index), noise)
    for step in range(1, simulator.spec.horizon + 1):
        if simulator.step(expert()[0]).success:
            return step
    return None


def test_every_plan_has_words_a_suite_and_a_measured_row() -> None:
    """The measured rows are of the suites' own horizons, with nine of ten states solved or more."""
    suites = load_suites(REPO / "configs" / "robot_suites.yaml").select("maniskill_tabletop")
    horizons = {task: suite.horizon for suite in suites.values() for task in suite.tasks}
    assert len(PLANS) >= 12 and set(horizons) == set(PLANS) and set(PLANS) > TURNING
    assert set(PLANS) < set(_INSTRUCTIONS)
    assert {spec.task: spec.horizon for spec in expert_specs("maniskill")} == horizons
    file = REPO / "assets" / "results" / "experts_maniskill.json"
    rows = {row["task"]: row for row in json.loads(file.read_text(encoding="utf-8"))["tasks"]}
    assert set(rows) == set(PLANS)
    for task, row in rows.items():
        assert row["horizon"] == horizons[task] and row["episodes"] == 10 and row["solved"] >= 9
        assert row["states"].startswith("held out")


def test_turns_are_those_of_rotations() -> None:
    """Against scipy; the short way round, whichever sign a quaternion has."""
    from scipy.spatial.transform import Rotation

    some, other = Rotation.random(20, random_state=0), Rotation.random(20, random_state=1)
    for a, b in zip(some, other, strict=True):
        now, wanted = (r.as_quat()[[3, 0, 1, 2]] for r in (a, b))
        for sign in (1, -1):
            turn = turn_between(sign * now, wanted)
            assert (Rotation.from_rotvec(turn) * a * b.inv()).magnitude() < 1e-6
            assert np.linalg.norm(turn) <= math.pi + 1e-9
        assert angle_between(now, wanted) == pytest.approx((b * a.inv()).magnitude())


def test_a_horizon_beyond_the_dots_and_another_robot_are_refused() -> None:
    class Draws:
        MAX_DOTS = 300

    check_horizon("DrawTriangle-v1", Draws, 300)
    check_horizon("PushCube-v1", object, 5000)
    with pytest.raises(
        ConfigError, match=r"at most 300 control steps .* found 301: set env\.horizon"
    ):
        check_horizon("DrawTriangle-v1", Draws, 301)
    assert (fixed_robot("PickCube-v1", "fetch"), fixed_robot("PickCubeSO100-v1", "")) == (
        "",
        "so100",
    )
    with pytest.raises(ConfigError, match="its own robot, so100, found 'panda'"):
        fixed_robot("PickCubeSO100-v1", "panda")


@real
@pytest.mark.parametrize(
    ("task", "noise"),
    # a ball that was pushed askew is out of reach, so noise is no help there
    [("PegInsertionSide-v1", 0.1), ("StackPyramid-v1", 0.1), ("RollBall-v1", 0.0)],
)
def test_new_plans_solve_their_tasks(task: str, noise: float) -> None:
    simulator = make(task, horizon=160)
    steps = [steps_of(simulator, 0), steps_of(simulator, 1, noise)]
    simulator.close()
    assert all(steps), steps


@real
def test_a_stick_draws_without_a_gripper_and_noise_reaches_all_of_its_axes() -> None:
    simulator = make("DrawTriangle-v1")
    assert simulator.action_space.dim == 6 and simulator.action_space.gripper is None
    assert steps_of(simulator, 0) is not None
    simulator.reset(STATES[0])
    executed, label = simulator.expert(np.random.default_rng(0), 0.3)()
    simulator.close()
    assert (executed != label).sum() >= 4


@real
def test_the_first_action_does_not_depend_on_what_was_held_before() -> None:
    """A reset leaves the contacts of the episode before, in which the peg was held."""
    simulator = make("LiftPegUpright-v1")
    simulator.reset(STATES[1])
    fresh = simulator.expert(np.random.default_rng(0))()[1]
    first = _state(simulator)
    expert = simulator.expert(np.random.default_rng(0))
    for _ in range(12):
        simulator.step(expert()[0])
    env = simulator.env
    assert bool(env.agent.is_grasping(env.peg)[0])
    simulator.reset(STATES[1])
    again = _state(simulator)
    assert first.keys() == again.keys() and all(np.array_equal(first[k], again[k]) for k in first)
    assert np.array_equal(simulator.expert(np.random.default_rng(0))()[1], fresh)
    simulator.close()


def _state(simulator: ManiSkillSimulator) -> dict[str, np.ndarray]:
    """Poses and velocities of everything, joints included."""
    groups = simulator.env.get_state_dict().values()
    return {name: np.asarray(value) for group in groups for name, value in group.items()}


@real
@pytest.mark.parametrize(
    ("task", "options", "error", "words"),
    [
        ("PickCubeWidowXAI-v1", {}, MissingExtraError, "download_asset widowxai"),
        (
            "PickCubeSO100-v1",
            {},
            ConfigError,
            "robot so100.*pd_ee_delta_pose not in supported modes",
        ),
        ("DrawSVG-v1", {}, MissingExtraError, "pip install svgpathtools"),
        ("PushT-v1", {}, ConfigError, "need a renderer even where no picture is taken"),
    ],
)
def test_tasks_without_an_expert_say_what_they_lack(
    task: str,
    options: dict[str, Any],
    error: type[Exception],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "svgpathtools", None)  # not installed
    with pytest.raises(error, match=words):
        make(task, **options).reset(STATES[0])


@real
def test_a_task_that_tells_no_success_is_refused() -> None:
    """As TableTopFreeDraw-v1, which takes long to build."""
    from mani_skill.envs.tasks import PushCubeEnv
    from mani_skill.utils.registration import REGISTERED_ENVS, register_env

    class Silent(PushCubeEnv):  # type: ignore[misc]
        def evaluate(self) -> dict[str, Any]:
            return {}

    register_env("SilentCube-v1", max_episode_steps=50)(Silent)
    try:
        simulator = make("SilentCube-v1")
        with pytest.raises(ConfigError, match="expected a task that tells success"):
            simulator.reset(STATES[0])
        simulator.close()
    finally:
        REGISTERED_ENVS.pop("SilentCube-v1", None)


@real
def test_an_expert_that_turns_the_gripper_needs_the_rotation() -> None:
    simulator = make("PegInsertionSide-v1", dims=4)
    with pytest.raises(ConfigError, match="expected dims 7 for the scripted expert"):
        simulator.expert(np.random.default_rng(0))
    simulator.close()
