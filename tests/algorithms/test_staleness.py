"""Admission by order of start keeps the mean episode length; by order of completion, or with discarding, it does not.

Run: pytest tests/algorithms/test_staleness.py
"""
from __future__ import annotations

import heapq
import math
import random
import statistics
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mmrl.algorithms import CorrectionSettings, admit, behave_weights, next_batch, start_capacity, truncated_importance
from mmrl.errors import ConfigError

LONG, SHORT = 50, 5  # control steps; an even mixture, mean 27.5


def _length(rng: random.Random) -> int:
    return LONG if rng.random() < 0.5 else SHORT


def _simulate(slots: int, batch: int, bound: int, steps: int, rng: random.Random, length: Callable[[random.Random], int],
              train_time: int = 3) -> tuple[list[list[int]], int]:
    """Event by event: slots roll out, one trainer; lengths of each step's batch and the largest staleness, by the rules."""
    clock, version, started, trained, worst = 0, 0, 0, 0, 0
    running: list[tuple[int, int]] = []  # (end, number)
    lengths: dict[int, int] = {}
    born: dict[int, int] = {}
    finished: set[int] = set()
    busy_until, batches = 0, []
    while len(batches) < steps:
        while len(running) < slots and start_capacity(started, version, batch, bound):
            lengths[started], born[started] = length(rng), version
            heapq.heappush(running, (clock + lengths[started], started))
            started += 1
        numbers = next_batch(trained, finished, batch) if clock >= busy_until else None
        if numbers is not None:
            assert admit([born[n] for n in numbers], version, bound)
            worst = max(worst, *(version - born[n] for n in numbers))
            batches.append([lengths[n] for n in numbers])
            trained, version, busy_until = trained + batch, version + 1, clock + train_time
            continue
        times = [end for end, _ in running[:1]] + ([busy_until] if busy_until > clock else [])
        assert times, "nobody runs and nothing can be trained: the rules have blocked each other"
        clock = min(times)
        while running and running[0][0] <= clock:
            finished.add(heapq.heappop(running)[1])
    return batches, worst


@pytest.mark.parametrize("bound", [0, 1, 4])
def test_start_order_is_unbiased_in_every_step_and_staleness_stays_within_the_bound(bound) -> None:
    first, all_means = [], []
    for seed in range(60):
        batches, worst = _simulate(slots=12, batch=8, bound=bound, steps=25, rng=random.Random(seed), length=_length)
        assert worst <= bound
        first += batches[0]
        all_means.append(statistics.mean(x for b in batches for x in b))
    error = 22.5 / math.sqrt(len(first))
    assert abs(statistics.mean(first) - 27.5) < 3.5 * error  # the first step too, where completion order fails most
    assert abs(statistics.mean(all_means) - 27.5) < 3.5 * 22.5 / math.sqrt(60 * 25 * 8)


def test_completion_order_and_discarding_prefer_short_episodes() -> None:
    """The same slots and lengths, but a step takes what finished first, and stale rollouts are thrown away."""
    taken = []
    for seed in range(40):
        rng, clock, version = random.Random(seed), 0, 0
        running = [(_length(rng), 0, n) for n in range(12)]  # (end, version at its start, number)
        spans = {n: end for end, _, n in running}
        number, store = 12, []
        while version < 25:
            running.sort()
            clock, born, n = running.pop(0)
            if admit(born, version, 1):
                store.append(spans[n])
            spans[number] = _length(rng)
            running.append((clock + spans[number], version, number))
            number += 1
            if len(store) == 8:
                taken += store
                store, version = [], version + 1
    assert statistics.mean(taken) < 20  # far from 27.5


@given(st.integers(1, 9), st.integers(1, 6), st.integers(0, 3), st.integers(0, 10**6), st.integers(0, 7))
def test_never_blocks_and_every_rollout_is_trained_once(slots, batch, bound, seed, train_time) -> None:
    batches, worst = _simulate(slots, batch, bound, 6, random.Random(seed), lambda r: r.randint(1, 30), train_time)
    assert worst <= bound and [len(b) for b in batches] == [batch] * 6


def test_capacity_by_hand() -> None:
    assert start_capacity(0, version=0, batch=8, bound=0) == 8  # synchronous: one batch per version
    assert start_capacity(8, version=0, batch=8, bound=0) == 0
    assert start_capacity(8, version=1, batch=8, bound=0) == 8
    assert start_capacity(20, version=0, batch=8, bound=2) == 4
    assert start_capacity(99, version=0, batch=8, bound=2) == 0
    with pytest.raises(ConfigError, match="found 0 and 1"):
        start_capacity(0, 0, 0, 1)
    assert next_batch(4, {0, 4, 5, 7}, 2) == range(4, 6)
    assert next_batch(6, {0, 4, 5, 7}, 2) is None  # 6 is late: 7 waits for it


def test_admit_uses_the_oldest_version() -> None:
    assert admit([3, 5], 5, 2) and not admit([2, 5], 5, 2) and admit(5, 5, 0)
    for wrong in ([6], []):
        with pytest.raises(ConfigError, match="up to the current one, 5"):
            admit(wrong, 5, 2)


def test_weights_truncate_or_mask_above_the_threshold() -> None:
    behaviour = torch.zeros(4)
    proximal = torch.tensor([0.5, 1.0, 1.99, 3.0]).log().requires_grad_()
    weights, masked = behave_weights(CorrectionSettings(), proximal, behaviour)
    assert weights.tolist() == pytest.approx([0.5, 1, 1.99, 2]) and not masked.any() and not weights.requires_grad
    assert torch.equal(weights, truncated_importance(proximal, behaviour, 2.0))
    weights, masked = behave_weights(CorrectionSettings(mode="mask"), proximal, behaviour)
    assert weights.tolist() == pytest.approx([0.5, 1, 1.99, 0]) and masked.tolist() == [False, False, False, True]
    weights, masked = behave_weights(CorrectionSettings(mode="none"), proximal, behaviour)
    assert weights.tolist() == [1] * 4 and not masked.any()
    assert behave_weights(CorrectionSettings(mode="mask"), torch.tensor([900.0]), torch.tensor([0.0]))[0].tolist() == [0.0]
    with pytest.raises(ConfigError, match=r"none, truncate or mask, found 'masked'.*mask"):
        CorrectionSettings(mode="masked")
    with pytest.raises(ConfigError, match="threshold above 0"):
        CorrectionSettings(threshold=0)
