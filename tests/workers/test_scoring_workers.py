"""Which worker gets which job, and what becomes of jobs whose worker hangs, dies or babbles: mmrl.workers.scorer's loop over
threads that stand for its processes (tests/workers/scoring_kit.py)."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

import mmrl.workers.scorer as scorer_module
from mmrl.errors import RewardError
from mmrl.types import Score
from mmrl.workers.reward_pipe import GarbledError
from mmrl.workers.scorer import Scorer
from mmrl.workers.scoring import is_reward_failure
from tests.workers.scoring_kit import PATIENCE_S, Told, ending, in_threads, jobs, scorer


@pytest.fixture(autouse=True)
def ends() -> Iterator[None]:
    with ending():
        yield


@pytest.fixture()
def sent(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, list[int]]]:
    """(number of the worker, indices of its jobs) of all that is sent."""
    return in_threads(monkeypatch)


def test_jobs_are_shared_out_in_order(sent: list[tuple[int, list[int]]]) -> None:
    with scorer(3) as s:
        for count, shares in (
            (7, [[0, 1, 2], [3, 4, 5], [6]]),
            (6, [[0, 1], [2, 3], [4, 5]]),
            (4, [[0, 1], [2, 3], []]),
            (2, [[0], [1], []]),
            (0, [[], [], []]),
        ):
            texts = [f"{i / 8}" for i in range(count)]
            assert [x.value for x in s.score(jobs(*texts))] == [float(t) for t in texts]
            assert sorted(sent) == [(n, share) for n, share in enumerate(shares)], count
            sent.clear()
        assert s.unclaimed == 0
        workers = s._workers
        assert [w.began > 0 for w in workers] == [True] * 3 and not any(w.pending for w in workers)


def test_one_worker_is_the_default(sent: Any) -> None:
    with Scorer([("told", {})], [Told()]) as s:
        assert len(s._workers) == 1
        [worker] = s._workers
        assert (worker.name, worker.ready, worker.pending, worker.later) == (
            "mmrl-reward",
            False,
            {},
            [],
        )
        s.score(jobs("1"))
        assert worker.ready
    assert s._workers == []


def test_ids_are_never_used_twice(sent: Any) -> None:
    ids: list[int] = []
    with scorer(2) as s:
        for _ in range(2):
            for worker, share in zip(s._workers, ([0, 1], [2]), strict=True):
                worker.send(dict(enumerate(jobs("1", "1", "1"))), share)
                ids += worker.pending
                assert list(worker.pending.values()) == share
                while len(worker.inbox.read()) == 0:
                    pass
                worker.pending = {}
    assert ids == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ("hang", "reward_timeout: no answer within 0.4 s"),
        ("0 half", "reward_timeout: no answer within 0.4 s"),
        ("die", "reward_crash: the process died (exit code 7)"),
        (
            "0 babble",
            "reward_crash: what came from its process could not be read (expected a score, found other bytes)",
        ),
    ],
)
def test_what_a_job_does_to_its_worker_is_its_own_score(
    sent: Any, bad: str, said: str, workers: int
) -> None:
    texts = ["0.1", "0.2", bad, "0.4", "0.5", "0.6"]
    with scorer(workers, timeout_s=0.4) as s:
        found = s.score(jobs(*texts))
        assert [x.value for x in s.score(jobs("0.7", "0.8"))] == [0.7, 0.8], "and it goes on"
        assert all(w.later == [] for w in s._workers)
    assert found[2] == Score.failure(said, ("accuracy",))
    assert [(x.value, x.reason) for x in (*found[:2], *found[3:])] == [
        (float(t), None) for t in (*texts[:2], *texts[3:])
    ]


def test_jobs_of_a_pipe_that_holds_rubbish_are_sent_one_by_one(
    sent: list[tuple[int, list[int]]],
) -> None:
    with scorer(1) as s:
        found = s.score(jobs("0.1", "0 babble", "0.3", "0 babble", "0.5"))
    assert [x.value for x in found] == [0.1, 0.0, 0.3, 0.0, 0.5] and [
        is_reward_failure(x) for x in found
    ] == [False, True, False, True, False]
    assert sent[0] == (0, [0, 1, 2, 3, 4]) and [indices for _, indices in sent[1:]] == [
        [0],
        [1],
        [2],
        [3],
        [4],
    ]


def test_what_was_scored_and_not_sent_is_scored_again(sent: list[tuple[int, list[int]]]) -> None:
    """The first two may have been scored before the third one killed its process: nobody can know."""
    with scorer(1) as s:
        found = s.score(jobs("0.1", "0.2", "die", "0.4"))
    assert [x.value for x in found] == [0.1, 0.2, 0.0, 0.4]
    assert sent == [(0, [0, 1, 2, 3]), (0, [0, 1, 3])]


def test_who_is_to_blame(sent: Any) -> None:
    with scorer(1) as s:
        [worker] = s._workers
        worker.pending = {5: 0, 6: 1, 7: 2}
        worker.progress[:] = 6.0, 123.5
        assert (worker.culprit(), worker.began) == (6, 123.5)
        worker.progress[:] = 4.0, 0.0  # of an earlier list: it had not begun with this one
        assert worker.culprit() == 5
        worker.pending = {}


def test_scores_that_nobody_waits_for_are_counted_and_dropped(sent: Any) -> None:
    with scorer(1) as s:
        [worker] = s._workers
        worker.send(dict(enumerate(jobs("0.9", "0.9"))), [0, 1])
        worker.pending = {}  # as if given up
        assert [x.value for x in s.score(jobs("0.1", "0.2"))] == [0.1, 0.2]
        assert s.unclaimed == 2


def test_a_worker_that_is_dead_before_it_is_asked_costs_nobody_anything(sent: Any) -> None:
    with scorer(1) as s:
        s.score(jobs("1"))
        first = s._workers[0].process
        s._workers[0].ask_to_end()
        first.join(PATIENCE_S)
        s._workers[0].send({}, [])
        assert s._workers[0].process is first, "nothing to do: nothing is started"
        assert [x.value for x in s.score(jobs("0.5"))] == [0.5] and s._workers[
            0
        ].process is not first


class Silent:
    """A connection whose other end says `word`, after any time, or closes."""

    def __init__(self, word: Any) -> None:
        self.word, self.polled = word, list[float]()

    def poll(self, timeout: float) -> bool:
        self.polled.append(timeout)
        return self.word != "nothing"

    def recv_bytes(self, most: int) -> bytes:
        if isinstance(self.word, Exception):
            raise self.word
        return pickle.dumps(self.word)


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("nothing", "no answer"),
        (EOFError(), "the process died"),
        ("OSError: no licence", "OSError: no licence"),
    ],
)
def test_a_worker_that_does_not_start_says_why(sent: Any, word: Any, said: str) -> None:
    with scorer(1) as s:
        [worker] = s._workers
        real, worker.connection = worker.connection, Silent(word)
        with pytest.raises(
            RewardError, match=rf"did not start \({said}\); set reward.workers=0 to see where"
        ):
            worker.wait_ready()
        assert not worker.ready and worker.connection.polled == [300.0]
        worker.connection.word = None
        worker.wait_ready()
        worker.wait_ready()
        assert worker.ready and worker.connection.polled == [300.0, 300.0], "asked once"
        worker.connection = real


def test_how_long_the_loop_waits(sent: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the earliest deadline: a job that hangs ends then, not before and not after twice of it."""
    waits: list[float | None] = []
    real = scorer_module.wait

    def noted(sources: Any, timeout: float | None = None) -> Any:
        waits.append(timeout)
        return real(sources, timeout)

    monkeypatch.setattr(scorer_module, "wait", noted)
    with scorer(2, timeout_s=0.5) as s:
        hung, good = s.score(jobs("hang", "0.5"))
    assert is_reward_failure(hung) and good.value == 0.5
    assert (
        2 <= len(waits) <= 8
        and all(w is not None and 0 <= w <= 0.5 for w in waits)
        and max(waits) > 0.3
    )


def test_a_worker_that_ends_between_two_looks_still_gives_what_it_wrote(sent: Any) -> None:
    """Alive is asked before the pipe is read: the other way round its last scores would be lost."""
    with scorer(1) as s:
        [worker] = s._workers
        order: list[str] = []
        inbox, process = worker.inbox, worker.process

        class Looked:
            def read(self) -> Any:
                order.append("read")
                return inbox.read()

        worker.inbox = Looked()
        process.is_alive = lambda: order.append("alive") or True
        s.score(jobs("0.5"))
        at = order.index("read")
        assert order[at - 1] == "alive"
        del process.is_alive
        worker.inbox = inbox


def test_a_pipe_that_breaks_while_it_is_read_is_a_death(sent: Any) -> None:
    class Broken:
        def read(self) -> Any:
            raise OSError(5, "input/output error")

    with scorer(1) as s:
        [worker] = s._workers
        worker.inbox, first, waited = Broken(), worker.process, list[float]()
        first.join = waited.append
        [found] = s.score(jobs("0.5"))
    assert found.reason == "reward_crash: the process died (exit code None)" and waited[0] == 5, (
        "it is given time to be gone"
    )
    assert first.killed.is_set()


def test_rubbish_from_the_only_job_is_told_at_once(sent: list[tuple[int, list[int]]]) -> None:
    class Garbled:
        def read(self) -> Any:
            raise GarbledError("odd bytes")

    with scorer(1) as s:
        s._workers[0].inbox = Garbled()
        [found] = s.score(jobs("0.5"))
    assert found.reason == "reward_crash: what came from its process could not be read (odd bytes)"
    assert sent == [(0, [0]), (0, [])], "it is not asked again"


def test_scores_that_a_dead_process_left_in_its_pipe_are_read_to_the_last(
    sent: list[tuple[int, list[int]]],
) -> None:
    with scorer(1) as s:
        [worker] = s._workers
        inbox, found = worker.inbox, list[Any]()

        class OneByOne:
            def read(self) -> list[Any]:
                while len(found) < 2:
                    found.extend(inbox.read())
                os.write(worker.process.descriptor, b"x")  # the pipe stays readable
                return [found[left.pop()]]

        left, worker.inbox = [1, 0], OneByOne()
        worker.process.is_alive = lambda: not found
        assert [x.value for x in s.score(jobs("0.1", "0.2"))] == [0.1, 0.2]
        assert sent == [(0, [0, 1])], "nothing is scored again"
        del worker.process.is_alive
        worker.inbox = inbox


def test_half_a_score_is_given_up_at_the_deadline_and_not_after_it(
    sent: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with scorer(1, timeout_s=5.0) as s:
        [worker] = s._workers
        [job], scores = jobs("hang"), dict[int, Score]()
        worker.send({0: job}, [0])
        # it has written when it began, which may not come behind what is written here
        assert worker.process.hangs.wait(PATIENCE_S)
        worker.progress[:] = next(iter(worker.pending)), 100.0
        for now, given_up in ((104.9, False), (105.0, True)):
            monkeypatch.setattr(
                scorer_module, "time", SimpleNamespace(monotonic=lambda now=now: now)
            )
            s._receive(worker, {0: job}, scores)
            assert bool(scores) == given_up, now
    assert "reward_timeout" in (scores[0].reason or "")
