"""ManiSkill's batches: one row on the CPU is ManiSkillSimulator, and several rows are as many of them.

PhysX batches on a GPU only. Without one, `Stacked` stands for a batch: real ManiSkill environments, one for each row, behind the
batched interface of one BaseEnv, all of which a control step moves, as PhysX does. What it cannot show is PhysX itself on a GPU:
the last test is for that, where there is one.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from mmrl.errors import ConfigError, MissingExtraError
from mmrl.robotics import maniskill_vector
from mmrl.robotics.contract import (
    ActionError,
    ChunkResult,
    EnvSpec,
    InitialState,
    Observation,
    initial_states,
    make_simulator,
    run_chunk,
)
from mmrl.robotics.maniskill import ManiSkillSimulator
from mmrl.robotics.maniskill_build import registered_tasks
from mmrl.robotics.maniskill_scene import Scene, build_scene
from mmrl.robotics.maniskill_vector import ManiSkillVector
from mmrl.robotics.vector import SerialVector, make_vector

STATES = initial_states("eval", 4)
BLIND = {"render_backend": "none"}


def spec_of(task: str = "PushCube-v1", horizon: int = 12, **options: Any) -> EnvSpec:
    return EnvSpec("maniskill", task, horizon, 64, ("base",), options)


def chunk_of(state: InitialState, number: int, dim: int = 7) -> np.ndarray:
    """Downwards and forwards at random: towards the cube."""
    rng = np.random.default_rng([state.seed, number])
    actions = rng.uniform(-0.3, 0.9, (4, dim))
    actions[:, 2] = -0.5
    return actions


def alone(spec: EnvSpec, state: InitialState, chunks: int = 3) -> list[Observation | ChunkResult]:
    simulator = make_simulator(spec)
    try:
        simulator.reset(state)
        found: list[Observation | ChunkResult] = [simulator.observe()]
        for number in range(chunks):
            found.append(run_chunk(simulator, chunk_of(state, number, simulator.action_space.dim)))
        return found
    finally:
        simulator.close()


def assert_close(found: list[Any], wanted: list[Any], bound: float = 1e-5) -> None:
    """Rewards, ends and pictures equal; proprioception as near as float32 is where the order of operations differs."""
    assert len(found) == len(wanted)
    for a, b in zip(found, wanted, strict=True):
        if isinstance(b, ChunkResult):
            for name in ("terminated_C", "truncated_C", "success_C", "valid_C"):
                assert np.array_equal(getattr(a, name), getattr(b, name)), name
            assert np.allclose(a.rewards_C, b.rewards_C, atol=bound)
            a, b = a.observation, b.observation
        assert a.proprio.shape == b.proprio.shape and a.proprio.dtype == b.proprio.dtype
        assert np.abs(a.proprio - b.proprio).max() < bound and a.instruction == b.instruction
        assert a.images.keys() == b.images.keys()
        assert all(np.array_equal(a.images[c], b.images[c]) for c in b.images)


def episode(vector: ManiSkillVector, states: dict[int, InitialState]) -> dict[int, list[Any]]:
    assert vector.reset(states) == {}
    found: dict[int, list[Any]] = {r: [o] for r, o in vector.observe(list(states)).apart().items()}
    for number in range(3):
        dim = vector.action_space.dim
        chunks = {row: chunk_of(states[row], number, dim) for row in states}
        for row, result in vector.step_chunk(chunks).items():
            found[row].append(result)
    return found


# one row on the CPU


@pytest.mark.slow
@pytest.mark.render("libvulkan.so.1")
@pytest.mark.parametrize(
    ("task", "options"),
    [
        ("PushCube-v1", {"reward": "normalized_dense", "dims": 4}),
        ("PickCube-v1", {"show_goal": False, "proprio": "qpos"}),
        ("RollBall-v1", {}),
    ],
)
def test_one_row_is_the_simulator(task: str, options: dict[str, Any]) -> None:
    spec = spec_of(task, **options)
    vector, simulator = ManiSkillVector(spec, 1), make_simulator(spec)
    for state in STATES[:2]:
        assert_close(episode(vector, {0: state})[0], alone(spec, state))
    simulator.reset(STATES[0])
    assert vector.action_space == simulator.action_space
    assert vector.proprio_dim == simulator.proprio_dim and vector.versions() == simulator.versions()
    seen = vector.observe([0])
    assert seen.images["base"].shape == (1, 64, 64, 3) and seen.images["base"].dtype == torch.uint8
    simulator.close()
    vector.close()


# several rows


class Stacked:
    """Real ManiSkill environments of one row each as one of several; all step when it steps."""

    def __init__(self, scenes: list[Scene]) -> None:
        self.scenes, self.envs = scenes, [scene.env for scene in scenes]
        self.num_envs, self.device = len(scenes), torch.device("cpu")
        self.single_action_space = self.envs[0].single_action_space
        self._elapsed_steps = torch.zeros(self.num_envs, dtype=torch.int32)
        self.resets: list[tuple[list[int], list[int]]] = []

    @property
    def agent(self) -> Any:
        agents = [env.agent for env in self.envs]
        return SimpleNamespace(
            uid=agents[0].uid,
            controller=agents[0].controller,
            robot=SimpleNamespace(
                get_qpos=lambda: torch.cat([a.robot.get_qpos() for a in agents]),
                pose=_poses([a.robot.pose for a in agents]),
            ),
            tcp=SimpleNamespace(pose=_poses([a.tcp.pose for a in agents])),
        )

    def reset(self, seed: list[int], options: dict[str, Any]) -> None:
        rows = options["env_idx"].tolist()
        self.resets.append((list(seed), rows))
        assert len(seed) == self.num_envs
        for row in rows:
            self.envs[row].reset(seed=[seed[row]])
            self._elapsed_steps[row] = 0

    def step(self, actions: torch.Tensor) -> tuple[Any, ...]:
        found = [env.step(actions[row : row + 1]) for row, env in enumerate(self.envs)]
        self._elapsed_steps += 1
        infos = [f[4] for f in found]
        info = {name: torch.cat([i[name] for i in infos]) for name in ("success",)}
        return None, torch.cat([f[1] for f in found]), None, None, info

    def evaluate(self) -> dict[str, Any]:
        return self.envs[0].evaluate()

    def get_state_dict(self) -> dict[str, Any]:
        states = [env.get_state_dict() for env in self.envs]
        return {
            kind: {name: torch.cat([s[kind][name] for s in states]) for name in states[0][kind]}
            for kind in ("actors", "articulations")
        }

    def set_state_dict(self, state: dict[str, Any], env_idx: torch.Tensor) -> None:
        for place, row in enumerate(env_idx.tolist()):
            self.envs[row].set_state_dict(
                {
                    kind: {name: v[place : place + 1] for name, v in parts.items()}
                    for kind, parts in state.items()
                }
            )

    def close(self) -> None:
        for env in self.envs:
            env.close()


def _poses(poses: list[Any]) -> Any:
    from mani_skill.utils.structs.pose import Pose

    return Pose.create(torch.cat([pose.raw_pose for pose in poses]))


class StackedScene(Scene):
    def pictures(self, show_goal: bool) -> dict[str, Any]:
        seen = [scene.pictures(show_goal) for scene in self.env.scenes]
        return {camera: torch.cat([s[camera] for s in seen]) for camera in seen[0]}


@pytest.fixture(scope="module")
def three() -> Iterator[ManiSkillVector]:
    spec = spec_of(reward="normalized_dense", **BLIND)
    vector = ManiSkillVector(spec, 1)
    vector.rows = 3
    vector._steps_N, vector._running_N = np.zeros(3, np.int64), np.zeros(3, bool)
    scenes = [build_scene(spec, vector.options) for _ in range(3)]
    vector._scene = StackedScene(
        Stacked(scenes), scenes[0].render, scenes[0].sensors, scenes[0].fingers
    )
    yield vector
    vector.close()


@pytest.mark.slow
def test_rows_play_what_simulators_play_alone(three: ManiSkillVector) -> None:
    jobs = {0: STATES[0], 1: STATES[1], 2: STATES[0]}
    found = episode(three, jobs)
    for row, state in jobs.items():
        assert_close(found[row], alone(three.spec, state))
    # a group starts from one state: each row was reset by itself, with its seed for all
    resets = three.scene.env.resets[-3:]
    assert resets == [([jobs[row].seed] * 3, [row]) for row in range(3)]


@pytest.mark.slow
def test_a_row_stays_where_it_is_while_others_move_or_start(three: ManiSkillVector) -> None:
    """PhysX moved it: it was put back, to rounding and what contacts remember."""
    three.reset({0: STATES[0], 1: STATES[1]})
    before = three.observe([1]).apart()[1].proprio
    clock = int(three.scene.env._elapsed_steps[1])
    first = three.step_chunk({0: chunk_of(STATES[0], 0)})[0]
    three.reset({2: STATES[2]})
    assert isinstance(first, ChunkResult)
    assert np.abs(three.observe([1]).apart()[1].proprio - before).max() < 1e-5
    assert int(three.scene.env._elapsed_steps[1]) == clock
    late = three.step_chunk({1: chunk_of(STATES[1], 0), 2: chunk_of(STATES[2], 0)})
    for row in (1, 2):
        wanted, result = alone(three.spec, STATES[row], 1)[-1], late[row]
        assert isinstance(wanted, ChunkResult) and isinstance(result, ChunkResult)
        assert np.abs(result.observation.proprio - wanted.observation.proprio).max() < 5e-3
        assert np.allclose(result.rewards_C, wanted.rewards_C, atol=5e-3)


@pytest.mark.slow
def test_an_episode_that_is_over_is_not_stepped(three: ManiSkillVector) -> None:
    found = episode(three, {0: STATES[0], 1: STATES[1]})
    assert all(rows[-1].done for rows in found.values())
    three.reset({1: STATES[1]})
    late = three.step_chunk({row: chunk_of(STATES[1], 0) for row in (0, 1)})
    assert isinstance(late[0], ActionError) and "expected a reset before" in str(late[0])
    assert_close([late[1]], alone(three.spec, STATES[1])[1:2])


@pytest.mark.slow
def test_a_row_whose_action_is_not_finite_costs_itself(three: ManiSkillVector) -> None:
    three.reset({0: STATES[0], 1: STATES[1]})
    bad = np.full((4, 7), np.nan)
    found = three.step_chunk({0: bad, 1: chunk_of(STATES[1], 0)})
    assert isinstance(found[0], ActionError)
    wanted, result = alone(three.spec, STATES[1], 1)[-1], found[1]
    assert isinstance(wanted, ChunkResult) and isinstance(result, ChunkResult)
    assert np.abs(result.observation.proprio - wanted.observation.proprio).max() < 1e-5


# what is refused


def test_only_a_gpu_batches() -> None:
    assert not ManiSkillSimulator.batches({}) and ManiSkillSimulator.batches({"sim_backend": "gpu"})
    assert isinstance(make_vector(spec_of(), 2), SerialVector)
    assert isinstance(make_vector(spec_of(sim_backend="gpu"), 2), ManiSkillVector)
    with pytest.raises(ConfigError, match=r"expected one row with env\.options\.sim_backend cpu"):
        ManiSkillVector(spec_of(), 2)
    with pytest.raises(ConfigError, match="Take pd_ee_delta_pose, or set"):
        ManiSkillVector(spec_of(sim_backend="gpu", control_mode="pd_ee_target_delta_pose"), 2)
    with pytest.raises(ConfigError, match="played by itself"):
        make_simulator(spec_of(sim_backend="gpu"))


@pytest.mark.slow
def test_a_missing_gpu_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(MissingExtraError, match=r"sim_backend gpu needs an NVIDIA GPU .* set it"):
        ManiSkillVector(spec_of(sim_backend="gpu"), 2).reset({0: STATES[0]})


@pytest.mark.slow
def test_a_task_that_draws_its_objects_when_it_is_built_is_refused() -> None:
    """Its rows would keep their objects: ManiSkill builds such a scene anew for each episode, which it can do with one row only."""
    from mmrl.robotics.maniskill_build import drawn_when_built

    tasks = registered_tasks()
    found = {name for name, entry in tasks.items() if drawn_when_built(entry.cls)}
    assert {"PickSingleYCB-v1", "PegInsertionSide-v1", "TurnFaucet-v1"} <= found
    assert not {"PushCube-v1", "PickCube-v1", "StackCube-v1", "PlaceSphere-v1"} & found
    options = ManiSkillVector(spec_of("PegInsertionSide-v1", sim_backend="gpu"), 2).options
    with pytest.raises(ConfigError, match="draws its objects when the scene is built"):
        build_scene(spec_of("PegInsertionSide-v1", sim_backend="gpu"), options, 2)


def test_rotations_are_those_of_the_simulator() -> None:
    from mmrl.robotics.maniskill import _from_down

    rng = np.random.default_rng(0)
    quaternions = rng.normal(size=(50, 4))
    quaternions /= np.linalg.norm(quaternions, axis=1, keepdims=True)
    quaternions[0] = (0, 1, 0, 0)
    found = maniskill_vector._from_down(torch.from_numpy(quaternions))
    assert np.allclose(found.numpy(), np.stack([_from_down(q) for q in quaternions]), atol=1e-12)


@pytest.mark.gpu
@pytest.mark.slow
def test_a_batch_on_the_gpu() -> None:
    """Equal states start alike in every row and beside any others; rows that do not move stay."""
    spec = spec_of("PushCube-v1", sim_backend="gpu", reward="normalized_dense", **BLIND)
    vector = ManiSkillVector(spec, 16)
    jobs = {row: STATES[row % 4] for row in range(16)}
    found = episode(vector, jobs)
    for row in range(4, 16):
        assert np.abs(found[row][0].proprio - found[row % 4][0].proprio).max() < 1e-5
        assert (
            np.abs(found[row][1].observation.proprio - found[row % 4][1].observation.proprio).max()
            < 1e-3
        )
    vector.reset({row: STATES[3] for row in range(8)})
    alike = vector.observe(list(range(8))).apart()
    assert all(np.abs(o.proprio - alike[0].proprio).max() < 1e-5 for o in alike.values())
    assert np.abs(alike[0].proprio - found[3][0].proprio).max() < 1e-5
    vector.step_chunk({row: chunk_of(STATES[3], 0) for row in range(4)})
    still = vector.observe(list(range(4, 8))).apart()
    assert all(np.abs(o.proprio - alike[0].proprio).max() < 1e-4 for o in still.values())
    assert vector.observe([0]).proprio.is_cuda
    vector.close()
