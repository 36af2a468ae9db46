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
from mmrl.robotics.maniskill_scene import Scene, build_scene
from mmrl.robotics.maniskill_vector import ManiSkillVector
from mmrl.robotics.pool import VectorEnv
from mmrl.robotics.vector import SerialVector, check_playing, make_vector

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
        for row in rows:
            self.envs[row].reset(seed=seed)
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
    # a group starts from one state: each row was reset by itself
    assert three.scene.env.resets[-3:] == [([jobs[row].seed], [row]) for row in range(3)]


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
    with pytest.raises(ConfigError, match="Take one such as pd_ee_delta_pose"):
        ManiSkillVector(spec_of(sim_backend="gpu", control_mode="pd_ee_target_delta_pose"), 2)
    with pytest.raises(ConfigError, match="played by itself"):
        make_simulator(spec_of(sim_backend="gpu"))


@pytest.mark.slow
def test_a_missing_gpu_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(MissingExtraError, match=r"sim_backend gpu needs an NVIDIA GPU .* set it"):
        ManiSkillVector(spec_of(sim_backend="gpu"), 2).reset({0: STATES[0]})


@pytest.mark.slow
def test_a_mistake_in_a_batch_is_said_in_its_own_words() -> None:
    spec = spec_of(sim_backend="gpu", control_mode="pd_ee_target_delta_pose", **BLIND)
    with VectorEnv(2, 1, batched=True) as pool:
        with pool.together():
            for slot in (0, 1):
                pool.reset(slot, spec, STATES[0])
        replies = []
        while len(replies) < 2:
            replies += pool.ready(120.0)
    assert all(r.cause == "setup" and "without a target" in str(r.error) for r in replies)


@pytest.mark.slow
@pytest.mark.parametrize(
    "task",
    ["PegInsertionSide-v1", "RotateValveLevel0-v1", "DrawTriangle-v1", "FMBAssembly1Easy-v1"],
)
def test_a_task_whose_rows_are_not_apart_is_refused(task: str) -> None:
    options = ManiSkillVector(spec_of(sim_backend="gpu"), 2).options
    with pytest.raises(ConfigError, match="whose environments are reset one by one"):
        build_scene(spec_of(task, sim_backend="gpu"), options, 2)
    with pytest.raises(ConfigError, match=r"expected one task .* found PushCube-v1, PullCube-v1"):
        both = [spec_of(t, sim_backend="gpu") for t in ("PushCube-v1", "PullCube-v1")]
        check_playing(both, 2)


@pytest.mark.slow
@pytest.mark.render("libvulkan.so.1")
def test_pictures_come_from_the_gpu_of_the_physics(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    spec = spec_of(sim_backend="gpu", render_backend="cpu")
    with pytest.raises(MissingExtraError, match="NVIDIA_DRIVER_CAPABILITIES"):
        ManiSkillVector(spec, 2).reset({0: STATES[0]})


@pytest.mark.slow
def test_a_row_draws_its_own_streams_and_leaves_the_others() -> None:
    """Of three rows, ManiSkill's own seeding of one environment is what each has; running rows go on in theirs."""
    scene = build_scene(spec_of(**BLIND), ManiSkillVector(spec_of(**BLIND), 1).options)
    env = scene.env
    env._set_episode_rng([5], torch.tensor([0]))
    wanted, main = env._batched_episode_rng[0].randint(1000, size=4), env._episode_seed.copy()
    rngs = maniskill_vector._streams([1, 2, 3])
    rows = SimpleNamespace(num_envs=3, _batched_episode_rng=rngs)
    maniskill_vector._seed_row_by_row(rows)
    untouched = rngs.rngs[0]
    rows._set_main_rng([5])
    rows._set_episode_rng([5], torch.tensor([2]))
    assert np.array_equal(rows._batched_episode_rng[2].randint(1000, size=4), wanted)
    assert rows._episode_rng is rows._batched_episode_rng[2] and rngs.rngs[0] is untouched
    assert rows._episode_seed[0] == main[0] == 5
    env.close()


@pytest.mark.gpu
@pytest.mark.slow
def test_a_batch_on_the_gpu() -> None:
    """Equal states start alike in every row, beside any others, and look alike; rows that do not move stay."""
    spec = spec_of("PushCube-v1", sim_backend="gpu", reward="normalized_dense")
    vector = ManiSkillVector(spec, 16)
    found = episode(vector, {row: STATES[row % 4] for row in range(16)})
    cubes = vector.scene.env.obj.pose.p
    for row in range(4, 16):
        (first, then, *_), (other, later, *_) = found[row % 4], found[row]
        assert np.abs(first.proprio - other.proprio).max() < 1e-5
        drawn = first.images["base"].astype(int) - other.images["base"]
        assert np.abs(drawn).mean() < 1.0 and first.images["base"].std() > 5
        assert np.abs(then.observation.proprio - later.observation.proprio).max() < 1e-3
        assert np.abs(then.rewards_C - later.rewards_C).max() < 1e-2
    assert cubes.is_cuda and len({tuple(c) for c in cubes[:4].round(decimals=2).tolist()}) > 1
    vector.reset({row: STATES[3] for row in range(8)})
    alike = vector.observe(list(range(8))).apart()
    assert all(np.abs(o.proprio - alike[0].proprio).max() < 1e-5 for o in alike.values())
    assert np.abs(alike[0].proprio - found[3][0].proprio).max() < 1e-5
    places = vector.scene.env.obj.pose.p[:8]
    assert (places - places[0]).abs().max() < 1e-5
    vector.step_chunk({row: chunk_of(STATES[3], 0) for row in range(4)})
    still = vector.observe(list(range(4, 8))).apart()
    assert all(np.abs(o.proprio - alike[0].proprio).max() < 1e-4 for o in still.values())
    seen = vector.observe([0, 5])
    assert seen.proprio.is_cuda and seen.images["base"].shape == (2, 64, 64, 3)
    vector.close()
