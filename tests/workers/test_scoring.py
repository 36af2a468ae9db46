"""Rewards that raise, hang, die or lie cost their own completion a recorded zero, and no other anything."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from mmrl.coords import CoordFrame
from mmrl.errors import RewardError
from mmrl.registry import task_from_spec
from mmrl.types import RewardContext, Sample, Score
from mmrl.workers.scorer import Scorer
from mmrl.workers.scoring import ScoreJob, is_reward_failure
from tests.kits.fast_kit import first_fast

HOSTILE = '''
"""A task whose reward does what the completion says."""
import multiprocessing, os, re, sys, time
import numpy as np
from mmrl import Score, Task


class Hostile(Task):
    part_names = ("accuracy",)

    def __init__(self, refuse_in_worker=False):
        super().__init__()
        if refuse_in_worker and multiprocessing.parent_process() is not None:
            raise OSError("no licence on this machine")

    def load(self, path): return []
    def messages(self, sample, template): return []
    def gold(self, sample, ctx): return "right"
    def wrong(self, sample, ctx): return "wrong"

    def score(self, sample, text, ctx):
        def made(value): return Score.combine({"accuracy": value}, {"accuracy": 1.0}, parsed=True)
        if text == "raise": raise KeyError("no such box")
        if text == "exit": sys.exit(3)
        if text == "sleep": time.sleep(1000)
        if text == "loop":
            while True: pass
        if text == "regex": re.match(r"(a+)+$", "a" * 60 + "b")  # holds the GIL for ever
        if text == "die": os._exit(7)
        if text == "nan": return made(float("nan"))
        if text == "two": return made(2.0)
        if text == "negative": return made(-0.5)
        if text == "text": return "0.5"
        if text == "nothing": return None
        if text == "nan metric": return Score(0.5, True, metrics={"iou": float("nan")})
        if text == "unsendable": return Score(0.5, True, detail={"f": lambda: 0})
        if text == "numpy": return Score(np.float32(0.5), np.bool_(True), metrics={"iou": np.float32(0.25)})
        if text == "rounding": return Score(1.0 + 2e-16, True)
        return made(float(text))
'''
CONTEXT = RewardContext(1, 1, CoordFrame.ABS_ORIG)
GOOD = [f"{i / 64}" for i in range(24)]


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("hostile") / "hostile.py"
    path.write_text(HOSTILE, encoding="utf-8")
    return f"{path}:Hostile"


def scorer(spec: str, workers: int, timeout_s: float = 3.0) -> Scorer:
    return Scorer([(spec, {})], [task_from_spec(spec)], workers=workers, timeout_s=timeout_s)


def jobs(texts: list[str]) -> list[ScoreJob]:
    return [
        ScoreJob(0, Sample(f"{i}", "hostile", "s", "q", None), text, CONTEXT)
        for i, text in enumerate(texts)
    ]


def among_good(bad: list[str]) -> list[str]:
    """The bad texts spread over the good ones, one at the start and one at the end."""
    texts = list(GOOD)
    for number, text in enumerate(bad):
        texts.insert(round(number * (len(GOOD) + len(bad) - 1) / max(1, len(bad) - 1)), text)
    return texts


def check(texts: list[str], scores: list[Score], reasons: dict[str, str]) -> None:
    assert len(scores) == len(texts)
    for text, score in zip(texts, scores, strict=True):
        if text in reasons:
            assert score.value == 0 and not score.parsed and is_reward_failure(score)
            assert reasons[text] in (score.reason or ""), (text, score.reason)
            assert dict(score.parts) == {"accuracy": 0.0}
        else:
            assert score.value == float(text) and score.reason is None


WRONG = {
    "raise": "reward_error: KeyError: 'no such box'",
    "nan": "reward_error",
    "two": "found 2.0",
    "exit": "SystemExit",
    "negative": "found -0.5",
    "text": "expected a mmrl.Score, found str",
    "nothing": "found NoneType",
    "nan metric": "expected finite metrics",
}


@pytest.mark.check_takes(2)
@pytest.mark.parametrize("workers", [0, 1, 2])
def test_rewards_that_raise_or_lie_are_recorded_and_harm_no_other(spec: str, workers: int) -> None:
    texts = among_good(list(WRONG))
    with scorer(spec, workers) as s:
        check(texts, s.score(jobs(texts)), WRONG)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_rewards_that_hang_or_die_are_recorded_and_harm_no_other(spec: str, workers: int) -> None:
    reasons = {
        "sleep": "reward_timeout: no answer within 3 s",
        "regex": "reward_timeout",
        "die": "exit code 7",
    }
    texts = among_good(["die", "sleep", "die", "regex", "die"])
    with scorer(spec, workers) as s:
        began = time.monotonic()
        check(texts, s.score(jobs(texts)), reasons)
        assert time.monotonic() - began < 60
        check(GOOD, s.score(jobs(GOOD)), {})  # and it goes on working


@pytest.mark.slow
def test_a_busy_loop_alone_in_a_batch_is_ended(spec: str) -> None:
    with scorer(spec, 1, timeout_s=1.0) as s:
        check(["loop"], s.score(jobs(["loop"])), {"loop": "reward_timeout"})


@pytest.mark.slow
def test_every_worker_count_gives_the_same_scores(spec: str) -> None:
    texts = [*GOOD, "raise", "0.3"]
    results = []
    for workers in (0, 1, 3):
        with scorer(spec, workers) as s:
            results.append(s.score(jobs(texts)))
    assert results[0] == results[1] == results[2]


@pytest.mark.slow
def test_no_jobs_and_fewer_jobs_than_workers(spec: str) -> None:
    with scorer(spec, 3) as s:
        assert s.score([]) == []
        check(["0.5"], s.score(jobs(["0.5"])), {})


def test_scores_are_plain_numbers_whatever_the_reward_computes_with(spec: str) -> None:
    for workers in (0, 1):
        with scorer(spec, workers) as s:
            score, rounded = s.score(jobs(["numpy", "rounding"]))
        assert (
            type(score.value) is float
            and type(score.metrics["iou"]) is float
            and type(score.parsed) is bool
        )
        assert rounded.value == 1.0


def test_a_score_that_cannot_be_sent_is_a_recorded_failure(spec: str) -> None:
    with scorer(spec, 1) as s:
        bad, good = s.score(jobs(["unsendable", "0.5"]))
    assert "cannot be sent between processes" in (bad.reason or "") and good.value == 0.5


@pytest.mark.slow
def test_a_worker_that_died_while_idle_is_replaced(spec: str) -> None:
    with scorer(spec, 1) as s:
        check(GOOD, s.score(jobs(GOOD)), {})
        process = s._workers[0].process
        os.kill(process.pid or 0, signal.SIGKILL)
        process.join()
        check(GOOD, s.score(jobs(GOOD)), {})


def test_a_task_that_does_not_start_in_a_worker_stops_the_run_with_its_own_words(spec: str) -> None:
    task = task_from_spec(spec, {"refuse_in_worker": True})
    with (
        Scorer([(spec, {"refuse_in_worker": True})], [task], workers=1) as s,
        pytest.raises(RewardError, match="OSError: no licence on this machine"),
    ):
        s.score(jobs(["0.5"]))


@pytest.mark.slow
def test_closing_ends_every_process(spec: str, tmp_path: Path) -> None:
    s = scorer(spec, 2)
    s.score(jobs(GOOD))
    processes = [w.process for w in s._workers]
    s.close()
    assert not any(process.is_alive() for process in processes)


GROUPED = '''
"""Scores that need the whole group; the text says what goes wrong, and where."""
import os, time
from dataclasses import replace
from mmrl import Score, Task


class Grouped(Task):
    part_names = ("accuracy",)

    def __init__(self, grouped=True):
        super().__init__()
        self.in_group = grouped

    def load(self, path): return []
    def messages(self, sample, template): return []
    def gold(self, sample, ctx): return "1"
    def wrong(self, sample, ctx): return "0"

    def score(self, sample, text, ctx):
        if text == "raise alone": raise KeyError("alone")
        value = 0.5 if " " in text else float(text)
        return Score.combine({"accuracy": value}, {"accuracy": 1.0}, parsed=True, detail={"text": text})

    def score_in_group(self, sample, scores, index):
        text = scores[index].detail["text"]
        if text == "raise together": raise KeyError("together")
        if text == "hang together": time.sleep(1000)
        if text == "die together": os._exit(9)
        if text == "leave range": return replace(scores[index], value=7.0)
        below = sum(s.value < scores[index].value for s in scores)
        parts = {"accuracy": below / len(scores)}
        return replace(scores[index], value=parts["accuracy"], parts=parts)
'''


@pytest.fixture(scope="module")
def grouped(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("grouped") / "grouped.py"
    path.write_text(GROUPED, encoding="utf-8")
    return f"{path}:Grouped"


def groups(*texts: list[str]) -> list[list[ScoreJob]]:
    return [
        [ScoreJob(0, Sample(f"g{g}", "grouped", "s", "q", None), t, CONTEXT) for t in row]
        for g, row in enumerate(texts)
    ]


@pytest.mark.parametrize("workers", first_fast([1, 0, 2]))
def test_scores_in_a_group_see_all_of_their_own_group_and_no_other(
    grouped: str, workers: int
) -> None:
    with scorer(grouped, workers) as s:
        found = s.score_groups(
            groups(["0.1", "0.9", "0.5", "0.9"], ["0.3"], [], ["0.2", "raise alone", "0.0"])
        )
    assert [[x.value for x in row] for row in found] == [
        [0.0, 0.5, 0.25, 0.5],
        [0.0],
        [],
        [2 / 3, 0.0, 0.0],
    ]
    assert "alone" in (found[3][1].reason or "") and is_reward_failure(found[3][1]), (
        "what failed alone stays failed"
    )


def test_a_task_that_needs_no_group_is_not_asked(grouped: str) -> None:
    with Scorer(
        [(grouped, {"grouped": False})], [task_from_spec(grouped, {"grouped": False})], workers=1
    ) as s:
        jobs_of_groups = groups(["0.1", "raise together"], ["1"])
        assert [[x.value for x in row] for row in s.score_groups(jobs_of_groups)] == [
            [0.1, 0.5],
            [1.0],
        ]


@pytest.mark.parametrize("workers", first_fast([0, 1]))
def test_failures_in_a_group_are_recorded_and_harm_no_other(grouped: str, workers: int) -> None:
    texts = ["0.1", "raise together", "leave range", "0.9"] + (
        ["hang together", "die together"] if workers else []
    )
    reasons = {
        "raise together": "KeyError: 'together'",
        "leave range": "found 7.0",
        "hang together": "reward_timeout",
        "die together": "exit code 9",
    }
    with scorer(grouped, workers, timeout_s=2.0) as s:
        [found] = s.score_groups(groups(texts))
    for text, score in zip(texts, found, strict=True):
        if text in reasons:
            assert is_reward_failure(score) and reasons[text] in (score.reason or ""), (
                text,
                score.reason,
            )
            assert score.value == 0 and dict(score.parts) == {"accuracy": 0.0}
        else:
            assert score.reason is None and score.value == sum(
                t != text and text == "0.9" for t in texts
            ) / len(texts)
