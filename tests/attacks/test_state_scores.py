"""Whatever a reward does to its process, its pipe and its log: a score belongs to its own completion, and nothing grows
without bound."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

import mmrl.workers.scorer
from mmrl.coords import CoordFrame
from mmrl.registry import task_from_spec
from mmrl.types import RewardContext, Sample, Score
from mmrl.workers.scorer import Scorer
from mmrl.workers.scoring import (
    LARGEST_DETAIL,
    LONGEST_REASON,
    MOST_NUMBERS,
    ScoreJob,
    is_reward_failure,
)
from mmrl.workers.spawned import MOST_OUTPUT

ATTACKS = '''
"""A reward that does to its process what the completion says: "0.25", or "0.25 fork" and so on."""
import ctypes, os, socket, stat, sys, threading, time
from mmrl import Score, Task


def pipes():
    """Descriptors of this process that are sockets: among them the one to the run."""
    return [n for n in map(int, os.listdir("/proc/self/fd")) if _is_socket(n)]


def _is_socket(n):
    try:
        return stat.S_ISSOCK(os.fstat(n).st_mode)
    except OSError:
        return False


class Loop(dict):
    pass


class Silent:
    def __str__(self):
        raise RuntimeError("no words")


class Attacks(Task):
    part_names = ("accuracy",)

    def load(self, path): return []
    def messages(self, sample, template): return []
    def gold(self, sample, ctx): return "1"
    def wrong(self, sample, ctx): return "0"

    def score(self, sample, text, ctx):
        value, _, what = text.partition(" ")
        detail, reason, metrics = {}, None, {}
        if what == "fork": os.fork()
        if what == "c fork": ctypes.CDLL(None).fork()
        if what == "fork and sleep":
            if os.fork() == 0: time.sleep(3)
        if what == "fork and die":
            if os.fork() == 0: time.sleep(5); os._exit(0)
            os._exit(5)
        if what == "thread fork": threading.Thread(target=os.fork).start(); time.sleep(0.05)
        if what == "rubbish":
            for n in pipes(): os.write(n, b"\\x80\\x04N." * 50)
        if what == "half":
            for n in pipes(): os.write(n, b"\\x00" * 7)
            time.sleep(1000)
        if what == "long":
            for n in pipes(): os.write(n, b"\\xff" * 12)
            time.sleep(1000)
        if what == "close":
            for n in pipes(): os.close(n)
        if what == "print":
            for _ in range(4096): print("x" * 2048)
            os.system("yes | head -c 3000000"); os.write(2, b"y" * 1_000_000)
        if what == "print on": print("these are my last words")
        if what == "detail": detail = {"boxes": "b" * 5_000_000}
        if what == "cycle": detail = Loop(); detail["me"] = detail
        if what == "keys": detail = {(1, 2): 3}
        if what == "silent": detail = {"x": Silent()}
        if what == "reason": reason = "because " * 100_000
        if what == "raises": raise ValueError("v" * 1_000_000)
        if what == "metrics": metrics = {f"m{i}": 0.0 for i in range(10_000)}
        if what == "name": metrics = {"m" * 100_000: 0.0}
        return Score.combine({"accuracy": float(value)}, {"accuracy": 1.0}, parsed=True, reason=reason, detail=detail,
                             metrics=metrics)
'''
CONTEXT = RewardContext(1, 1, CoordFrame.ABS_ORIG)


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("attacks") / "attacks.py"
    path.write_text(ATTACKS, encoding="utf-8")
    return f"{path}:Attacks"


def scorer(spec: str, workers: int = 1, timeout_s: float = 2.0) -> Scorer:
    return Scorer([(spec, {})], [task_from_spec(spec)], workers=workers, timeout_s=timeout_s)


def jobs(texts: Sequence[str]) -> list[ScoreJob]:
    return [
        ScoreJob(0, Sample(f"{i}", "attacks", "s", "q", None), text, CONTEXT)
        for i, text in enumerate(texts)
    ]


def batch(first: float, *bad: str) -> list[str]:
    """Twelve completions of different worth, some of which attack."""
    texts = [f"{first + i / 100:.2f}" for i in range(12)]
    for place, what in enumerate(bad):
        texts[2 + 3 * place] += f" {what}"
    return texts


def values(texts: Sequence[str]) -> list[float]:
    return [float(text.split()[0]) for text in texts]


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 3])
def test_a_reward_that_forks_gives_no_score_to_another_completion(spec: str, workers: int) -> None:
    with scorer(spec, workers) as s:
        for first, bad in (
            (0.1, ("fork", "c fork")),
            (0.3, ("fork", "thread fork", "fork and sleep")),
            (0.5, ()),
            (0.7, ("c fork",)),
        ):
            texts = batch(first, *bad)
            assert [score.value for score in s.score(jobs(texts))] == values(texts), (first, bad)


@pytest.mark.slow
@pytest.mark.parametrize(
    "bad",
    [("rubbish", "close"), ("half", "long", "fork and die")],
)
def test_a_reward_that_breaks_its_pipe_costs_its_own_completion(
    spec: str, bad: tuple[str, ...]
) -> None:
    with scorer(spec) as s:
        texts = batch(0.1, *bad)
        found = s.score(jobs(texts))
        for text, score, value in zip(texts, found, values(texts), strict=True):
            if any(what in text for what in bad):
                assert score.value == 0 and is_reward_failure(score), score
            else:
                assert score.value == value and score.reason is None, (text, score)
        calm = batch(0.5)
        assert [score.value for score in s.score(jobs(calm))] == values(calm), (
            "and the next batch is its own"
        )


def test_a_score_that_nobody_waits_for_is_dropped(spec: str) -> None:
    """What a process sends late, twice or unasked finds no completion."""
    with scorer(spec) as s:
        s.score(jobs(["0.5"]))
        (worker,) = s._workers
        worker.send({0: jobs(["0.9"])[0]}, [0])
        stolen, worker.pending = dict(worker.pending), {}  # as if its completion had been given up
        assert [score.value for score in s.score(jobs(["0.1", "0.2"]))] == [0.1, 0.2]
        assert s.unclaimed == len(stolen) == 1


@pytest.mark.parametrize("workers", [0, 1])
def test_what_a_score_says_is_bounded(spec: str, workers: int) -> None:
    texts = [
        "0.1 detail",
        "0.2 reason",
        "0.3 cycle",
        "0.4 keys",
        "0.5 raises",
        "0.6 metrics",
        "0.7 name",
        "0.8 silent",
        "0.9",
    ]
    with scorer(spec, workers) as s:
        detail, reason, cycle, keys, raises, metrics, name, silent, good = s.score(jobs(texts))
    counted = [x.value for x in (detail, reason, cycle, keys, silent, good)]
    assert counted == [0.1, 0.2, 0.3, 0.4, 0.8, 0.9], "the score itself counts"
    assert dict(detail.detail) == {
        "left_out": f"5,000,013 characters as JSON, at most {LARGEST_DETAIL:,} are kept"
    }
    assert reason.reason is not None and len(reason.reason) == LONGEST_REASON
    assert reason.reason.endswith("[cut, 800,000 characters]")
    assert (
        "Circular reference" in cycle.detail["left_out"]
        and "keys must be str" in keys.detail["left_out"]
    )
    assert "no words" in silent.detail["left_out"]
    assert (
        is_reward_failure(raises)
        and len(raises.reason or "") == LONGEST_REASON
        and "[cut, " in (raises.reason or "")
    )
    assert is_reward_failure(metrics) and f"at most {MOST_NUMBERS} metrics" in (
        metrics.reason or ""
    )
    assert is_reward_failure(name) and "the longest name of 100000" in (name.reason or "")
    assert all(
        len(json.dumps(vars(x), default=str)) < LARGEST_DETAIL + 2000
        for x in (detail, reason, cycle, keys, raises, metrics, name, silent)
    )


def test_what_a_reward_prints_is_bounded_and_its_score_counts(
    spec: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """More than 12 MB of lines without and with an end, of a child process too."""
    with scorer(spec, timeout_s=60.0) as s:
        first = s.score(jobs(["0.25 print on"]))
        assert [score.value for score in (*first, *s.score(jobs(["0.5 print", "0.75"])))] == [
            0.25,
            0.5,
            0.75,
        ]
        printed = s._workers[0]
    assert printed.printed > 4096 * 2049 + 3_000_000 and printed.process.exitcode is not None
    _, err = capfd.readouterr()
    assert "these are my last words" in err
    assert (
        MOST_OUTPUT < len(err) < MOST_OUTPUT + 500
        and err.count("used up; what it prints from here on is dropped") == 1
    )


@pytest.mark.slow
def test_waiting_for_a_reward_that_hangs_is_waiting(
    spec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real loop sleeps until the earliest deadline: a handful of waits, none past it."""
    waits: list[float] = []

    def noted(sources: Any, timeout: float | None = None) -> Any:
        assert timeout is not None
        waits.append(timeout)
        return wait(sources, timeout)

    wait = mmrl.workers.scorer.wait
    with scorer(spec, 2, timeout_s=1.0) as s:
        s.score(jobs(["0.1", "0.2"]))
        monkeypatch.setattr(mmrl.workers.scorer, "wait", noted)
        hung, good = s.score(jobs(["0.1 half", "0.2"]))
    assert "reward_timeout" in (hung.reason or "") and good.value == 0.2
    assert 2 <= len(waits) <= 40 and max(waits) <= 1.0 and max(waits) > 0.1, waits


@pytest.mark.slow
def test_scores_are_whatever_the_number_of_processes_under_attack(spec: str) -> None:
    texts = batch(0.2, "detail", "reason", "cycle")
    found = []
    for workers in (0, 2):
        with scorer(spec, workers, timeout_s=30.0) as s:
            found.append(s.score(jobs(texts)))
    assert found[0] == found[1] and isinstance(found[0][0], Score)
