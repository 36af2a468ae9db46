"""LIBERO's resets are deterministic: on stand-ins, in the pool's worker processes, pictures and whole physics state bit for bit."""
from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from robotics.contract import EnvSpec, InitialState, Observation
from robotics.pool import EnvPool, PoolSettings

if importlib.util.find_spec("libero") is None or importlib.util.find_spec("robosuite") is None:
    pytest.skip("needs LIBERO: see robotics.libero_assets.INSTALL", allow_module_level=True)

from robotics.libero import libero_states

pytestmark = [pytest.mark.slow, pytest.mark.render("libOSMesa.so.8")]

_STEPS = 12
_CAMERAS = ("base", "wrist")


def _spec(task: str) -> EnvSpec:
    return EnvSpec("tests.robotics.whole_state:WholeState", task, 280, 64, _CAMERAS, {"assets": "stand-in", "gl": "osmesa"})


def _actions(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).uniform(-1, 1, (_STEPS, 7))


def _seen(observation: Observation) -> tuple[bytes, ...]:
    """Both pictures and the whole state."""
    return (*(observation.images[camera].tobytes() for camera in _CAMERAS), observation.proprio.tobytes())


def _play(pool: EnvPool, jobs: Mapping[int, InitialState], spec: EnvSpec, seed: int) -> dict[int, list[tuple[bytes, ...]]]:
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
                pool.step(reply.slot, _actions(seed)[len(rows) - 1:len(rows)])
    return found


@pytest.mark.parametrize("number", [0, 4, 9])
def test_the_same_state_and_actions_repeat_in_a_fresh_worker_and_after_other_episodes(
        number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MMRL_CACHE", str(tmp_path / "cache"))
    spec, elsewhere = _spec(f"libero_object/{number}"), _spec(f"libero_object/{(number + 1) % 10}")
    first, other = libero_states(spec.task, "eval", count=2)
    settings = PoolSettings(handshake_s=120.0, reset_s=240.0, step_s=120.0)
    with EnvPool(1, 1, settings) as pool:  # a process that has done nothing else
        fresh = _play(pool, {0: first}, spec, seed=1)[0]
    with EnvPool(2, 1, settings) as pool:  # one process, two simulators
        before = _play(pool, {0: other}, spec, seed=2)[0]
        _play(pool, {1: replace(first, row=7)}, elsewhere, seed=3)
        after = _play(pool, {0: first}, spec, seed=1)[0]
        group = _play(pool, {0: first, 1: first}, spec, seed=1)  # interleaved; slot 1 has a simulator made just now
    assert after == fresh and group[0] == fresh and group[1] == fresh
    assert len(set(fresh)) == _STEPS + 1, "something must move in pictures and state"
    assert all(a[2] != b[2] for a, b in zip(fresh, before, strict=True)), "another row is another state"
    assert fresh[0][:2] != before[0][:2], "another row is another picture"
