"""MetaWorld as a simulator: the real package, compared with its own environments stepped directly.

MUJOCO_GL=osmesa pytest tests/robotics/test_metaworld.py
"""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
from typing import Any

import numpy as np
import pytest

from mmrl.errors import ConfigError, MissingExtraError
from mmrl.evaluation.suite_book import load_suites
from mmrl.robotics.config import EnvConfig
from mmrl.robotics.contract import EnvSpec, initial_states, make_simulator, run_chunk
from mmrl.robotics.metaworld import MetaWorldSimulator
from mmrl.robotics.metaworld_tasks import GROUPS, INSTRUCTIONS
from mmrl.robotics.pool import VectorEnv
from tests.kits.pool_kit import one, same, seen

if importlib.util.find_spec("metaworld") is None:
    pytest.skip("needs MetaWorld: pip install 'metaworld>=3'", allow_module_level=True)

STATES = initial_states("eval", 4)
ACTIONS = np.random.default_rng(0).uniform(-1, 1, (8, 4))


def spec(
    task: str = "reach-v3", horizon: int = 500, image_size: int = 64, **changes: Any
) -> EnvSpec:
    options = {"gl": "osmesa", **changes.pop("options", {})}
    return EnvSpec("metaworld", task, horizon, image_size, options=options, **changes)


def made(task: str = "reach-v3", **changes: Any) -> MetaWorldSimulator:
    simulator = make_simulator(spec(task, **changes))
    assert isinstance(simulator, MetaWorldSimulator)
    return simulator


def official(simulator: MetaWorldSimulator, **settings: Any) -> Any:
    """MetaWorld's own environment, made and set as its benchmarks do, at the start of the simulator's episode."""
    import metaworld

    env = metaworld.ALL_V3_ENVIRONMENTS[simulator.spec.task](**settings)
    env.set_task(simulator.task)
    return env


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"task": "reach-v2"}, "Did you mean 'reach-v3'?"),
        ({"task": "MT10"}, "expected one task, found the group MT10; name it in env.tasks"),
        ({"cameras": ("corner2",)}, "expected cameras base, wrist,"),
        ({"horizon": 501}, "set env.horizon=500"),
        ({"options": {"rewards": "dense"}}, "Did you mean 'reward'?"),
        ({"options": {"reward": "densee"}}, "Did you mean 'dense'?"),
        ({"options": {"base_position": [1, 2]}}, "three finite numbers or null, found"),
        ({"options": {"base_position": "abc"}}, "three finite numbers or null, found 'abc'"),
        ({"options": {"base_position": 5}}, "three finite numbers or null, found 5"),
        ({"options": {"stop_at_success": "false"}}, "true or false, found 'false'"),
        (
            {"options": {"instructions": {"reach-v3": 5}}},
            "options.instructions.reach-v3 as text, found 5",
        ),
        (
            {"options": {"instructions": "go"}},
            "options.instructions as names and values, found 'go'",
        ),
        ({"options": {"instructions": {"reach": "go"}}}, "Did you mean 'reach-v3'?"),
    ],
)
def test_what_does_not_exist(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        made(**changes)
    assert words in str(caught.value)


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in [name for name in sys.modules if name.partition(".")[0] == "metaworld"]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "metaworld", None)
    with pytest.raises(MissingExtraError, match=r"Install it with: pip install 'metaworld>=3'"):
        made().reset(STATES[0])


def test_groups_of_tasks_in_configurations_and_suites() -> None:
    assert EnvConfig(suite="metaworld", tasks=["drawer-open-v3", "MT10"]).tasks == [
        "drawer-open-v3",
        *(task for task in GROUPS["MT10"] if task != "drawer-open-v3"),
    ]
    assert EnvConfig(suite="tiny", tasks=["MT10"]).tasks == ["MT10"], "another suite's own name"
    suites = load_suites().suites
    assert suites["metaworld_mt10"].tasks == GROUPS["MT10"]
    assert suites["metaworld_mt10"].horizon == 500
    difficulties = [suites[f"metaworld_{n}"].tasks for n in ("easy", "medium", "hard", "very_hard")]
    assert [len(tasks) for tasks in difficulties] == [28, 11, 6, 5]
    assert sorted(task for tasks in difficulties for task in tasks) == sorted(INSTRUCTIONS)
    assert len(set(INSTRUCTIONS.values())) == 50, "each task in words of its own"


@pytest.mark.slow
def test_groups_are_metaworlds_own() -> None:
    from metaworld import env_dict
    from metaworld.policies import ENV_POLICY_MAP

    assert set(INSTRUCTIONS) == set(env_dict.ALL_V3_ENVIRONMENTS) == set(ENV_POLICY_MAP)
    assert GROUPS["MT10"] == list(env_dict.MT10_V3)
    for name, own in (("ML10", env_dict.ML10_V3), ("ML45", env_dict.ML45_V3)):
        for split in ("train", "test"):
            assert sorted(GROUPS[f"{name}-{split}"]) == sorted(own[split]), (name, split)


@pytest.mark.slow
@pytest.mark.parametrize("task", GROUPS["MT10"])
def test_the_scripted_policy_solves_it_and_metaworld_stepped_directly_agrees(task: str) -> None:
    """MetaWorld's environment, set to the same task and given the same actions: equal observations, rewards and successes."""
    simulator = made(task, options={"gl": "none", "reward": "dense"})
    simulator.reset(STATES[1])
    expert, own = simulator.expert(np.random.default_rng(0)), official(simulator)
    assert np.array_equal(own.reset()[0], simulator.state)
    for _ in range(simulator.spec.horizon):
        action, label = expert()
        assert np.array_equal(action, label) and np.abs(action).max() <= 1
        result = simulator.step(action)
        state, reward, _, _, info = own.step(action.astype(np.float32))
        assert np.array_equal(state, simulator.state)
        assert (result.reward, result.success) == (reward, bool(info["success"]))
        if result.terminated:
            break
    assert result.success and not result.truncated
    own.close()
    simulator.close()


@pytest.mark.slow
def test_states_differ_and_those_held_out_are_others() -> None:
    simulator, places = made("pick-place-v3", options={"gl": "none"}), set()
    for state in (*STATES, *initial_states("train", 4)):
        simulator.reset(state)
        places.add(simulator.state.tobytes())
    assert len(places) == 8


@pytest.mark.slow
def test_an_episode_ends_with_its_success_unless_told_otherwise_and_at_the_horizon() -> None:
    ends = []
    for options in ({}, {"stop_at_success": False}):
        simulator = made(horizon=80, options={"gl": "none", **options})
        simulator.reset(STATES[0])
        act, results = simulator.expert(np.random.default_rng(0), noise=0.2), []
        while not results or not (results[-1].terminated or results[-1].truncated):
            executed, label = act()
            assert executed[3] == label[3] and not np.array_equal(executed, label)
            results.append(simulator.step(executed))
        assert [r.reward for r in results] == [float(r.success) for r in results]
        ends.append((len(results), results[-1].terminated, results[-1].truncated))
        with pytest.raises(AssertionError, match="reset first"):
            simulator.step(np.zeros(4))
        with pytest.raises(ConfigError, match="expected a render backend"):
            simulator.observe()
    assert ends[0][0] < 80 and ends[0][1:] == (True, False) and ends[1] == (80, False, True)


@pytest.mark.slow
@pytest.mark.render("libOSMesa.so.8")
class TestPictures:
    @pytest.mark.parametrize("task", ["push-v3", "window-close-v3", "assembly-v3"])
    def test_a_state_starts_the_same_way_every_time(self, task: str) -> None:
        simulator = made(task, cameras=("base", "wrist"))
        played = []
        for state in (STATES[0], STATES[1], STATES[0]):
            simulator.reset(state)
            first = simulator.observe()
            played.append((first, run_chunk(simulator, ACTIONS)))
        simulator.close()
        fresh = made(task, cameras=("base", "wrist"))
        fresh.reset(STATES[0])
        assert seen(played[0][0], played[2][0]) and seen(fresh.observe(), played[0][0])
        assert same(played[0][1], played[2][1]) and same(run_chunk(fresh, ACTIONS), played[0][1])
        assert not seen(played[0][0], played[1][0]), "another state looks otherwise"
        fresh.close()

    def test_pictures_are_metaworlds_own_as_the_field_turns_them(self) -> None:
        """corner2 moved and turned as lerobot's evaluation does it; corner4, where this MetaWorld has it, is the same place."""
        simulator = made("drawer-open-v3", cameras=("base", "corner3"))
        simulator.reset(STATES[2])
        ours = [simulator.observe(), run_chunk(simulator, ACTIONS).observation]
        for camera in ("corner2", "corner3"):
            own = official(
                simulator, render_mode="rgb_array", camera_name=camera, width=64, height=64
            )
            own.model.cam_pos[2] = [0.75, 0.075, 0.7]
            states = [own.reset()[0]]
            pictures = [own.render()]
            for action in ACTIONS:
                states[1:] = [own.step(action.astype(np.float32))[0]]
            pictures.append(own.render())
            for found, state, picture in zip(ours, states, pictures, strict=True):
                flipped = np.flip(picture, (0, 1)) if camera == "corner2" else picture
                name = "base" if camera == "corner2" else camera
                assert np.array_equal(found.images[name], flipped)
                assert np.array_equal(found.proprio, state[:4].astype(np.float32))
            own.close()
        assert ours[0].instruction == "open the drawer" and ours[0].images["base"].std() > 20
        versions = simulator.versions()
        simulator.close()
        assert versions["metaworld"][0] == "3" and versions["render"] == "osmesa"
        assert versions["renderer"]

    def test_other_words_another_place_of_the_camera_and_two_in_one_process(self) -> None:
        plain = made()
        other = made(
            image_size=48,
            options={"base_position": None, "instructions": {"reach-v3": "Reach a goal position"}},
        )
        for simulator in (plain, other):
            simulator.reset(STATES[0])
        first, here, again = plain.observe(), other.observe(), plain.observe()
        assert seen(first, again), "each draws in its own context"
        assert here.instruction == "Reach a goal position" and here.images["base"].shape[0] == 48
        other.close()
        assert seen(first, plain.observe()), "closing one leaves the other's pictures alone"
        plain.close()

    def test_a_killed_worker_costs_its_slot_only(self) -> None:
        direct = made("push-v3")
        direct.reset(STATES[1])
        begun, expected = direct.observe(), run_chunk(direct, ACTIONS)
        direct.close()
        with VectorEnv(2, 2) as pool:
            for slot in (0, 1):
                pool.reset(slot, spec("push-v3"), STATES[slot])
            replies = {}
            while len(replies) < 2:
                replies |= {reply.slot: reply for reply in pool.ready(120.0)}
            assert seen(replies[1].observation, begun)
            os.kill(pool.pids()[0], signal.SIGKILL)
            pool.step(1, ACTIONS)
            found = {}
            while len(found) < 2:
                found |= {reply.slot: reply for reply in pool.ready(120.0)}
            assert found[0].error is not None and found[1].error is None
            assert same(found[1].chunk, expected)
            # the slot is usable again, from the same state
            pool.reset(0, spec("push-v3"), STATES[1])
            assert seen(one(pool).observation, begun)
