"""ManiSkill as a simulator of the bridge: resets, chunks, pictures, options, errors and experts, on the real simulator."""

from __future__ import annotations

import importlib.util
import math
import multiprocessing
import os
import queue
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from mmrl.errors import ConfigError, MissingExtraError
from mmrl.robotics import maniskill_scene
from mmrl.robotics.contract import (
    ActionError,
    ActionSpace,
    ChunkResult,
    EnvSpec,
    InitialState,
    Observation,
    Simulator,
    initial_states,
    make_simulator,
    run_chunk,
)
from mmrl.robotics.maniskill import ManiSkillOptions, ManiSkillSimulator, instruction_of
from mmrl.robotics.maniskill_vector import from_down

needs_it = pytest.mark.skipif(
    importlib.util.find_spec("mani_skill") is None,
    reason="ManiSkill is not installed (it needs Python 3.10 to 3.12): pip install -e '.[robotics]'",
)


def real(test: Any) -> Any:
    return pytest.mark.slow(needs_it(test))


render = pytest.mark.render("libvulkan.so.1")
BLIND = {"render_backend": "none"}
STATES = initial_states("eval", 8)


def make(
    task: str = "PushCube-v1",
    horizon: int = 50,
    cameras: tuple[str, ...] = ("base",),
    **options: Any,
) -> ManiSkillSimulator:
    simulator = make_simulator(EnvSpec("maniskill", task, horizon, 64, cameras, options))
    assert isinstance(simulator, ManiSkillSimulator)
    return simulator


@pytest.fixture(scope="module")
def seeing() -> Iterator[ManiSkillSimulator]:
    """One simulator with both cameras, shared: what ran on it before must not matter."""
    simulator = make(cameras=("base", "wrist"))
    yield simulator
    simulator.close()


@pytest.fixture(scope="module")
def blind() -> Iterator[ManiSkillSimulator]:
    simulator = make(**BLIND)
    yield simulator
    simulator.close()


def play(
    simulator: Simulator, state: InitialState, noise: float = 0.2
) -> tuple[Observation, list[ChunkResult]]:
    """The first observation and the chunks of an episode of the noisy expert, who pushes the cube about."""
    simulator.reset(state)
    first, expert, chunks = (
        simulator.observe(),
        simulator.expert(np.random.default_rng(state.seed), noise),
        [],
    )
    for _ in range(3):
        rows = [expert()[0]]
        chunks.append(run_chunk(simulator, rows * 4))
        if chunks[-1].done:
            break
    return first, chunks


def assert_same(
    one: tuple[Observation, list[ChunkResult]], other: tuple[Observation, list[ChunkResult]]
) -> None:
    assert len(one[1]) == len(other[1])
    for a, b in zip(
        [one[0], *(c.observation for c in one[1])],
        [other[0], *(c.observation for c in other[1])],
        strict=True,
    ):
        assert np.array_equal(a.proprio, b.proprio) and a.images.keys() == b.images.keys()
        assert all(np.array_equal(a.images[camera], b.images[camera]) for camera in a.images)
    for x, y in zip(one[1], other[1], strict=True):
        assert np.array_equal(x.rewards_C, y.rewards_C) and np.array_equal(x.valid_C, y.valid_C)


# --- without a simulator -------------------------------------------------------------------------------------------


def test_making_one_opens_nothing() -> None:
    code = (
        "import sys; from mmrl.robotics.contract import EnvSpec, make_simulator; "
        "s = make_simulator(EnvSpec('maniskill', 'x', 5)); s.close(); "
        "print(sorted({'sapien', 'mani_skill', 'torch', 'gymnasium'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"controlmode": "x"}, "Did you mean 'control_mode'"),
        ({"reward": "spares"}, "Did you mean 'sparse'"),
        ({"dims": 5}, "dims as 4 or 7 or null, found 5"),
        ({"dims": True}, "dims as 4 or 7 or null, found True"),
        ({"stop_at_success": "false"}, "true or false, found 'false'"),
        ({"show_goal": 1}, "true or false, found 1"),
        ({"camera_fov": "wide"}, "camera_fov as a number or null, found 'wide'"),
        ({"camera_target": None}, "camera_target as three finite numbers, found None"),
        ({"render_backend": 0}, "render_backend as text, found 0"),
        ({"proprio": "tpc"}, "Did you mean 'tcp'"),
        ({"camera_eye": (1.0, 2.0)}, "three finite numbers"),
        ({"camera_eye": (1.0, 2.0, math.nan)}, "three finite numbers or null"),
    ],
)
def test_an_option_or_value_there_is_not_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make(**options)


def test_tasks_say_what_to_do_in_words() -> None:
    assert instruction_of("PushCube-v1") == "push the cube to the goal"
    assert instruction_of("TurnFaucet-v1") == "turn faucet"
    assert instruction_of("MS-AntRun-v1") == "ms ant run"
    assert all(
        text == text.lower() or text == "push the T onto its outline"
        for text in maniskill_scene._INSTRUCTIONS.values()
    )


@pytest.mark.parametrize("angle", [0.0, 0.3, -0.3, 3.0])
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_rotations_are_measured_from_straight_down(axis: int, angle: float) -> None:
    """Against scipy's rotations; a quaternion and its negative are one rotation."""
    from scipy.spatial.transform import Rotation

    vector = np.eye(3)[axis] * angle
    x, y, z, w = (Rotation.from_quat([1, 0, 0, 0]) * Rotation.from_rotvec(vector)).as_quat()
    for sign in (1, -1):
        quaternion = torch.tensor([[w, x, y, z]]) * sign
        assert np.allclose(from_down(quaternion)[0].numpy(), vector, atol=1e-6)


@pytest.mark.parametrize("yaw", [0.0, 0.5, -0.7, 1.5, -1.6, 3.0])
def test_the_experts_turn_leads_straight_down_at_the_nearest_quarter(yaw: float) -> None:
    from scipy.spatial.transform import Rotation

    from mmrl.robotics.maniskill_skills import turn_to_down

    now = (
        Rotation.from_rotvec([0.1, -0.2, 0])
        * Rotation.from_rotvec([0, 0, yaw])
        * Rotation.from_quat([1, 0, 0, 0])
    )
    x, y, z, w = now.as_quat()
    turn = turn_to_down((w, x, y, z))
    there = Rotation.from_rotvec(turn) * now
    assert np.allclose(there.apply([0, 0, 1]), [0, 0, -1], atol=1e-6)
    assert np.allclose(np.abs(there.apply([1, 0, 0])).max(), 1, atol=1e-6)
    assert np.linalg.norm(turn) < math.pi / 4 + 0.3


def test_a_step_before_the_first_reset_is_refused() -> None:
    with pytest.raises(ActionError, match="expected a reset"):
        make().step(np.zeros(7))


def test_without_maniskill_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mani_skill", None)
    monkeypatch.setitem(sys.modules, "mani_skill.envs", None)
    with pytest.raises(MissingExtraError, match=r"pip install -e '.*\[robotics\]'"):
        make().reset(STATES[0])


# --- resets and steps, without pictures ----------------------------------------------------------------------------


@real
def test_reset_is_bit_equal_whatever_ran_between(blind: ManiSkillSimulator) -> None:
    a, b = play(blind, STATES[0]), play(blind, STATES[1])
    run_chunk(blind, [[1.0] * 7])  # an episode left in the middle
    assert_same(a, play(blind, STATES[0]))
    assert_same(b, play(blind, STATES[1]))
    assert not np.array_equal(a[1][-1].observation.proprio, b[1][-1].observation.proprio)


@real
def test_actions_that_must_not_reach_it_are_refused_and_the_rest_is_clipped(
    blind: ManiSkillSimulator,
) -> None:
    blind.reset(STATES[0])
    for wrong in (
        np.full(7, np.nan),
        np.full(7, np.inf),
        np.zeros(6),
        np.zeros(0),
        np.zeros((1, 7)),
    ):
        with pytest.raises(ActionError):
            blind.step(wrong)
    blind.step(np.array([9.0, 0, 0, 0, 0, 0, 9.0]))
    wild = blind.observe().proprio
    blind.reset(STATES[0])
    blind.step(np.array([1.0, 0, 0, 0, 0, 0, 1.0]))
    assert np.array_equal(wild, blind.observe().proprio)


@real
def test_the_episode_ends_with_the_horizon_and_stays_ended(blind: ManiSkillSimulator) -> None:
    blind.reset(STATES[0])
    result = run_chunk(blind, np.zeros((60, 7)))
    assert (
        result.valid_C.sum() == 50
        and result.truncated_C.nonzero()[0].tolist() == [49]
        and not result.terminated_C.any()
    )
    with pytest.raises(ActionError, match="over"):
        blind.step(np.zeros(7))


@real
def test_success_ends_the_episode_unless_it_shall_run_to_the_horizon(
    blind: ManiSkillSimulator,
) -> None:
    _, chunks = play(blind, STATES[0], noise=0.0)
    rewards = np.concatenate([c.rewards_C[c.valid_C] for c in chunks])
    expert_steps = _steps_to_success(blind, STATES[0])
    assert expert_steps < 50 and set(rewards) <= {0.0, 1.0}
    fixed = make(horizon=50, stop_at_success=False, **BLIND)
    fixed.reset(STATES[0])
    expert = fixed.expert(np.random.default_rng(0))
    results = [fixed.step(expert()[0]) for _ in range(50)]
    fixed.close()
    assert [r.success for r in results].index(True) + 1 == expert_steps
    assert not any(r.terminated for r in results) and [r.truncated for r in results] == [
        False
    ] * 49 + [True]


def _steps_to_success(simulator: Simulator, state: InitialState, noise: float = 0.0) -> int:
    """Steps the expert needs; the horizon + 1 when it fails."""
    simulator.reset(state)
    expert = simulator.expert(np.random.default_rng(state.index), noise)
    for step in range(1, simulator.spec.horizon + 1):
        action, label = expert()
        assert np.abs(action).max() <= 1 and np.abs(label).max() <= 1
        if simulator.step(action).success:
            return step
    return simulator.spec.horizon + 1


@real
@pytest.mark.parametrize(
    ("task", "dims"),
    [("PushCube-v1", 4), ("PullCube-v1", 7), ("PickCube-v1", 4), ("StackCube-v1", 7)],
)
def test_experts_succeed_also_with_noise(task: str, dims: int) -> None:
    simulator = make(task, horizon=80, dims=dims, **BLIND)
    steps = [_steps_to_success(simulator, state, noise=0.1) for state in STATES]
    assert simulator.proprio_dim == 8 and simulator.action_space.dim == dims
    simulator.close()
    assert sum(step <= 80 for step in steps) >= 7, steps


@real
def test_noise_changes_what_is_executed_and_never_the_gripper(blind: ManiSkillSimulator) -> None:
    blind.reset(STATES[0])
    clean, noisy = (
        blind.expert(np.random.default_rng(0)),
        blind.expert(np.random.default_rng(0), 0.3),
    )
    for executed, label in (clean() for _ in range(3)):
        assert np.array_equal(executed, label)
    executed, label = noisy()
    assert (executed[:6] != label[:6]).sum() >= 3 and executed[6] == label[6]


@real
def test_four_dimensions_leave_the_rotation_alone() -> None:
    short, full = make(dims=4, **BLIND), make(**BLIND)
    ends = []
    for simulator, action in (
        (short, [0.5, -0.3, -0.2, -1]),
        (full, [0.5, -0.3, -0.2, 0, 0, 0, -1]),
    ):
        simulator.reset(STATES[2])
        ends.append(run_chunk(simulator, [action] * 5).observation.proprio)
    assert short.action_space == ActionSpace(
        (-1.0,) * 4, (1.0,) * 4, ("x", "y", "z", "gripper"), 3, 1.0
    )
    assert (
        full.action_space.names == ("x", "y", "z", "rx", "ry", "rz", "gripper")
        and full.action_space.gripper == 6
    )
    assert np.array_equal(*ends) and np.abs(ends[0][3:6]).max() < 0.2
    short.close()
    full.close()


@real
def test_the_gripper_opens_at_the_value_that_opens_it(blind: ManiSkillSimulator) -> None:
    blind.reset(STATES[0])
    low = run_chunk(blind, [[0, 0, 0, 0, 0, 0, -1.0]] * 8).observation.proprio[6:]
    high = run_chunk(
        blind, [[0, 0, 0, 0, 0, 0, blind.action_space.gripper_open]] * 8
    ).observation.proprio[6:]
    assert (low < 0.005).all() and (high > 0.035).all()


@real
def test_dense_rewards_where_the_task_has_them() -> None:
    simulator = make(reward="normalized_dense", **BLIND)
    simulator.reset(STATES[0])
    rewards = run_chunk(simulator, np.zeros((3, 7))).rewards_C
    simulator.close()
    assert ((rewards > 0) & (rewards < 1)).all()
    with pytest.raises(ConfigError, match="expected reward among sparse"):
        make("PlugCharger-v1", reward="dense", **BLIND).reset(STATES[0])


@real
@pytest.mark.parametrize(
    ("task", "options", "error", "words"),
    [
        ("PushCub-v1", {}, ConfigError, "Did you mean 'PushCube-v1'"),
        (
            "PickSingleYCB-v1",
            {},
            MissingExtraError,
            "python -m mani_skill.utils.download_asset ycb",
        ),
        ("TwoRobotPickCube-v1", {}, ConfigError, "a task with one robot"),
        ("PushCube-v1", {"robot": "pandas"}, ConfigError, "Did you mean 'panda'"),
        ("PushCube-v1", {"control_mode": "pd_ee_delta"}, ConfigError, "control_mode pd_ee_delta"),
        (
            "PushCube-v1",
            {"control_mode": "pd_joint_delta_pos", "dims": 4},
            ConfigError,
            "expected dims 8",
        ),
    ],
)
def test_what_cannot_be_built_says_why(
    task: str,
    options: dict[str, Any],
    error: type[Exception],
    words: str,
    tmp_path: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(error, match=words):
        simulator = make(task, **BLIND, **options)
        simulator.reset(STATES[0])
        _ = simulator.action_space


@real
def test_a_task_without_an_expert_and_a_mode_without_one_say_so(blind: ManiSkillSimulator) -> None:
    with pytest.raises(ConfigError, match="expected a task with a scripted expert"):
        make("FMBAssembly1Easy-v1", **BLIND).expert(np.random.default_rng(0))
    with pytest.raises(ConfigError, match="expected control_mode pd_ee_delta_pose"):
        make(control_mode="pd_joint_delta_pos", **BLIND).expert(np.random.default_rng(0))


@real
def test_an_environment_that_says_what_to_do_is_heard() -> None:
    """As ManiSkill's bridge tasks do: a list with the words of each environment, drawn with the episode."""
    from mani_skill.envs.tasks import PushCubeEnv
    from mani_skill.utils.registration import REGISTERED_ENVS, register_env

    class Says(PushCubeEnv):  # type: ignore[misc]
        def get_language_instruction(self, **_: Any) -> list[str]:
            left = bool(self.obj.pose.p[0, 1] > 0)
            return [f"push the {'left' if left else 'right'} cube"] * self.num_envs

    register_env("SaysCube-v1", max_episode_steps=50)(Says)
    try:
        simulator = make("SaysCube-v1", **BLIND)
        heard = set()
        for state in STATES:
            simulator.reset(state)
            heard.add(simulator.observe().instruction)
        assert heard == {"push the left cube", "push the right cube"}
        simulator.close()
        told = make("SaysCube-v1", **BLIND, instruction="go")
        told.reset(STATES[0])
        assert told.observe().instruction == "go"
        told.close()
    finally:
        REGISTERED_ENVS.pop("SaysCube-v1", None)


# --- pictures ------------------------------------------------------------------------------------------------------


@real
@render
def test_pictures_and_proprioception_have_the_promised_shapes(seeing: ManiSkillSimulator) -> None:
    seeing.reset(STATES[0])
    seen = seeing.observe()
    assert (
        list(seen.images) == ["base", "wrist"] and seen.instruction == "push the cube to the goal"
    )
    for picture in seen.images.values():
        assert picture.shape == (64, 64, 3) and picture.dtype == np.uint8 and picture.std() > 5
    assert not np.array_equal(seen.images["base"], seen.images["wrist"])
    assert seen.proprio.shape == (seeing.proprio_dim,) == (8,) and seen.proprio.dtype == np.float32
    versions = seeing.versions()
    assert (
        versions["mani_skill"][0] == "3"
        and versions["robot"] == "panda_wristcam"
        and versions["render"][:4] in ("cpu:", "gpu:")
    )


@real
@render
def test_pictures_after_a_reset_are_bit_equal_and_show_what_happened(
    seeing: ManiSkillSimulator,
) -> None:
    a = play(seeing, STATES[3])
    play(seeing, STATES[4])
    assert_same(a, play(seeing, STATES[3]))
    assert not np.array_equal(a[0].images["base"], a[1][-1].observation.images["base"])


@real
@render
def test_a_chunk_takes_one_picture_unless_frames_are_wanted(
    seeing: ManiSkillSimulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = []
    picture = maniskill_scene._picture
    monkeypatch.setattr(
        maniskill_scene, "_picture", lambda sensor: (taken.append(1), picture(sensor))[1]
    )
    seeing.reset(STATES[0])
    assert not taken
    run_chunk(seeing, np.zeros((6, 7)))
    assert len(taken) == 2  # one per camera
    frames = run_chunk(seeing, [[1.0, 0, 0, 0, 0, 0, -1]] * 3, frames=True).frames
    assert len(taken) == 8 and len(frames) == 3 and not np.array_equal(frames[0], frames[2])


@real
@render
def test_a_camera_there_is_not_is_named_with_those_there_are() -> None:
    with pytest.raises(
        ConfigError, match=r"among base, base_camera, found 'bse'\. Did you mean 'base'"
    ):
        make(cameras=("bse",)).reset(STATES[0])


@real
@render
def test_goal_markers_are_seen_unless_hidden_and_the_view_can_be_chosen() -> None:
    pictures = []
    for options in ({}, {"show_goal": False}, {"camera_eye": (0.6, 0.7, 0.6)}):
        simulator = make("PickCube-v1", **options)
        simulator.reset(STATES[2])
        pictures.append(simulator.observe().images["base"].astype(int))
        simulator.close()
    green = [
        int(((p[..., 1] > 100) & (p[..., 1] > p[..., 0] + 50) & (p[..., 1] > p[..., 2] + 50)).sum())
        for p in pictures
    ]
    assert green[0] >= 1 and green[1] == 0 and not np.array_equal(pictures[0], pictures[1])
    assert np.abs(pictures[2] - pictures[0]).mean() > 5


def _observe(seed: int, found: Any) -> None:
    simulator = make()
    first, chunks = play(simulator, STATES[seed])
    found.put(
        (
            first.images["base"],
            chunks[-1].observation.images["base"],
            chunks[-1].observation.proprio,
        )
    )


@real
@render
def test_another_process_starts_and_plays_the_same() -> None:
    context = multiprocessing.get_context("spawn")
    there, here = context.Queue(), queue.Queue[Any]()
    worker = context.Process(target=_observe, args=(5, there))
    worker.start()
    _observe(5, here)
    assert all(
        np.array_equal(x, y) for x, y in zip(there.get(timeout=240), here.get(), strict=True)
    )
    worker.join(60)


@real
@render
@pytest.mark.parametrize(
    "variables", [{"VK_DRIVER_FILES": "/no/such.json", "VK_ICD_FILENAMES": "/no/such.json"}]
)
def test_broken_vulkan_is_an_error_with_a_fix_and_never_an_abort(
    variables: dict[str, str],
) -> None:
    code = (
        "from mmrl.robotics.contract import EnvSpec, initial_states, make_simulator\n"
        "from mmrl.errors import MissingExtraError\n"
        "s = make_simulator(EnvSpec('maniskill', 'PushCube-v1', 5))\n"
        "try: s.reset(initial_states('eval', 1)[0])\n"
        "except MissingExtraError as e: print('SAID', e)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, **variables},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "SAID pictures from ManiSkill" in done.stdout and "mesa-vulkan-drivers" in done.stdout


def test_options_have_the_defaults_the_documentation_names() -> None:
    options = ManiSkillOptions.read(EnvSpec("maniskill", "PushCube-v1", 5))
    assert (options.control_mode, options.reward, options.stop_at_success) == (
        "pd_ee_delta_pose",
        "sparse",
        True,
    )
