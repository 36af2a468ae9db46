"""Parts of the executor: the lock that is granted in order, and stages of slots that take turns.

pytest tests/rollout/test_stages.py
"""

from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmrl.errors import ConfigError
from mmrl.rollout.stages import Stages
from mmrl.training.training_thread import FairLock

LIMIT_S = 20.0  # for what must come: a failure, never a hang


def test_the_lock_is_granted_in_order_of_asking() -> None:
    lock, order, workers = FairLock(), [], []
    lock.__enter__()
    for number in range(6):

        def ask(number: int = number) -> None:
            with lock:
                order.append(number)

        workers.append(threading.Thread(target=ask))
        workers[-1].start()
        deadline = threading.Event()
        while len(lock._waiting) <= number:
            deadline.wait(0.001)
    lock.__exit__()
    for worker in workers:
        worker.join(LIMIT_S)
    assert order == list(range(6))
    with lock, lock:  # by the same thread again
        assert order == list(range(6))
    taken = threading.Event()
    other = threading.Thread(target=lambda: (lock.__enter__(), taken.set(), lock.__exit__()))
    other.start()
    assert taken.wait(LIMIT_S), "it was left for good"
    other.join(LIMIT_S)


@given(st.integers(1, 9), st.integers(1, 4), st.lists(st.integers(0, 2**31), max_size=60))
def test_a_stage_is_due_only_when_all_of_it_has_answered(
    slots: int, count: int, moves: list[int]
) -> None:
    count = min(count, slots)
    stages = Stages(slots, count)
    assert (
        sorted(s for block in stages.blocks for s in block) == list(range(slots))
        and min(map(len, stages.blocks)) > 0
    )
    state = dict.fromkeys(range(slots), "free")
    for move in moves:
        slot = move % slots
        if state[slot] == "work":
            stages.answered(slot)
            state[slot] = "answered"
        elif state[slot] == "answered" and move // slots % 3 == 0:
            stages.release(slot)
            state[slot] = "free"
        else:
            stages.sent(slot)
            state[slot] = "work"
        assert stages.at_work == sum(v == "work" for v in state.values())
        whole = [
            [s for s in block if state[s] == "answered"]
            for block in stages.blocks
            if any(state[s] == "answered" for s in block) and all(state[s] != "work" for s in block)
        ]
        due = list(stages.due())
        assert due in whole if whole else due == []
        assert [s for i in range(count) for s in stages.free(i)] == [
            s for s in range(slots) if state[s] == "free"
        ]
    with pytest.raises(ConfigError, match="expected 1 <= stages <= slots"):
        Stages(slots, slots + 1)


def test_stages_take_turns() -> None:
    stages = Stages(4, 2)
    for slot in range(4):
        stages.sent(slot)
        stages.answered(slot)
    served = []
    for _ in range(6):
        due = list(stages.due())
        served.append(due[0])
        for slot in due:
            stages.sent(slot)
            stages.answered(slot)
    assert served == [0, 2, 0, 2, 0, 2]


def test_the_stage_of_the_earliest_group_goes_first_and_equal_ones_take_turns() -> None:
    stages = Stages(6, 3)
    group = {0: (1, 2), 1: (1, 1), 2: (1, 1), 3: (1, 0), 4: (2, 0), 5: (2, 0)}
    for slot in (4, 5, 1, 0, 3, 2):  # the last stage has waited longest, and works for a later step
        stages.sent(slot)
        stages.answered(slot)
    assert list(stages.due()) == [4, 5]
    assert list(stages.due(group.__getitem__)) == [2, 3]
    for slot in (2, 3):
        stages.sent(slot)
    assert list(stages.due(group.__getitem__)) == [0, 1]
    assert list(stages.due(lambda slot: 0)) == [4, 5]
