"""takes_less: the quickest run counts, one that is slow every time fails, nothing is collected meanwhile."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from functools import partial

import pytest

from tests.kits.clock_kit import takes_less


@pytest.fixture(params=[True, False], ids=["collects", "collects not"])
def collects(request: pytest.FixtureRequest) -> Iterator[bool]:
    before = gc.isenabled()
    (gc.enable if request.param else gc.disable)()
    yield request.param
    (gc.enable if before else gc.disable)()


def _work(seconds: float) -> None:
    began = time.thread_time()
    while time.thread_time() - began < seconds:
        pass


def test_a_call_that_is_slow_once_passes(collects: bool) -> None:
    runs: list[bool] = []

    def call() -> int:
        runs.append(gc.isenabled())
        _work(0.03 if len(runs) == 1 else 0)
        return len(runs)

    assert takes_less(0.02, call) == 2
    assert runs == [False, False] and gc.isenabled() == collects


def test_a_call_that_is_always_slow_fails_with_its_times(collects: bool) -> None:
    said = r"less than 0\.01 s of processor time, found [\d.]+, [\d.]+, [\d.]+ s: .*partial.*_work"
    with pytest.raises(AssertionError, match=said):
        takes_less(0.01, partial(_work, 0.015))
    assert gc.isenabled() == collects


def test_what_a_call_raises_is_raised_at_once(collects: bool) -> None:
    with pytest.raises(ZeroDivisionError):
        takes_less(1, lambda: 1 // 0)
    assert gc.isenabled() == collects


def test_waiting_is_no_work() -> None:
    takes_less(0.02, lambda: time.sleep(0.03), tries=1)
