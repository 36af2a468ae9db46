"""LIBERO's resets are deterministic: on stand-ins, in the pool's worker processes, pictures and whole physics state bit for bit."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mmrl.robotics.contract import EnvSpec, InitialState, Observation
from mmrl.robotics.pool import PoolSettings, VectorEnv

if importlib.util.find_spec("libero") is None or importlib.util.find_spec("robosuite") is None:
    pytest.skip("needs LIBERO: see mmrl.robotics.libero_assets.INSTALL", allow_module_level=True)

from mmrl.robotics.libero import libero_states

pytestmark = [pytest.mark.slow, pytest.mark.render("libOSMesa.so.8")]

_STEPS = 12
_CAMERAS = ("base", "wrist")


def _spec(task: str) -> EnvSpec:
    return EnvSpec(
        "tests.robotics.whole_state:WholeState",
        task,
        280,
        64,
        _CAMERAS,
        {"assets": "stand-in", "gl": "osmesa"},
    )


def _actions(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).uniform(-1, 1, (_STEPS, 7))


def _seen(observation: Observation) -> tuple[bytes, ...]:
    """Both pictures and the whole state."""
    return (
        *(observation.images[camera].tobytes() for camera in _CAMERAS),
        observation.proprio.tobytes(),
    )


def _play(
    pool: VectorEnv, jobs: Mapping[int, InitialState], spec: EnvSpec, seed: int
) -> dict[int, list[tuple[bytes, ...]]]:
    """What is seen from the first picture on, in every slot, step by step, all slots with the same actions."""
    found: dict[int, list[tuple[bytes, ...]]] = {slot: [] for slot in jobs}
    for slot, state in jobs.items():
        pool.reset(slot, spec, state)
    while any(len(rows) < _STEPS + 1 for rows in found.values()):
        for reply in pool.ready(300.0):
            assert reply.error is None, reply.error
            observation = reply.chunk.observation if reply.chunk is not None else reply.observation
            assert observation is not None
            rows = found[reply.slot]
            rows.append(_seen(observation))
            if len(rows) <= _STEPS:
                pool.step(reply.slot, _actions(seed)[len(rows) - 1 : len(rows)])
    return found


def test_the_same_state_and_actions_repeat_in_a_fresh_worker_and_after_other_episodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MMRL_CACHE", str(tmp_path / "cache"))
    specs = [_spec(f"libero_object/{number}") for number in (4, 9)]
    states = [libero_states(spec.task, "eval", count=2) for spec in specs]
    settings = PoolSettings(handshake_s=120.0, reset_s=240.0, step_s=120.0)
    # processes that have done nothing else, one for each task
    with VectorEnv(2, 2, settings) as pool:
        fresh = [
            _play(pool, {slot: states[slot][0]}, specs[slot], seed=1)[slot] for slot in range(2)
        ]
    with VectorEnv(2, 1, settings) as pool:  # one process, two simulators
        before = _play(pool, {0: states[0][1]}, specs[0], seed=2)[0]
        _play(pool, {1: replace(states[1][0], row=7)}, specs[1], seed=3)
        after = _play(pool, {0: states[0][0]}, specs[0], seed=1)[0]
        other = _play(pool, {1: states[1][0]}, specs[1], seed=1)[1]
        # interleaved; slot 1's simulator is new
        group = _play(pool, {0: states[0][0], 1: states[0][0]}, specs[0], seed=1)
    assert after == fresh[0] and other == fresh[1] and group[0] == fresh[0] and group[1] == fresh[0]
    assert all(len(set(rows)) == _STEPS + 1 for rows in fresh), (
        "something must move in pictures and state"
    )
    assert all(a[2] != b[2] for a, b in zip(fresh[0], before, strict=True)), (
        "another row is another state"
    )
    assert fresh[0][0][:2] != before[0][:2], "another row is another picture"
