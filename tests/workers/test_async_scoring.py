"""Rewards that are an `async def` wait together, and one that hangs, blocks, dies or cancels itself costs only itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from mmrl import reward
from mmrl.coords import CoordFrame
from mmrl.library import _named
from mmrl.registry import resolve_task, task_from_spec
from mmrl.types import RewardContext, Sample, Score
from mmrl.workers.scorer import Scorer
from mmrl.workers.scoring import ScoreJob, is_reward_failure

WAITING = '''
"""A task whose reward waits, or does what the completion says."""
import asyncio, os, sys, time
from mmrl import Score, Task

together = 0


class Waiting(Task):
    part_names = ("accuracy",)
    in_group = True

    def load(self, path): return []
    def messages(self, sample, template): return []
    def gold(self, sample, ctx): return "right"
    def wrong(self, sample, ctx): return "wrong"

    async def score(self, sample, text, ctx):
        global together
        if text == "raise": raise KeyError("no such judge")
        if text == "exit": sys.exit(3)
        if text == "hang": await asyncio.sleep(1000)
        if text == "deaf":
            while True:
                try: await asyncio.sleep(1000)
                except asyncio.CancelledError: pass
        if text == "block": time.sleep(1000)
        if text == "block below": await asyncio.gather(asyncio.create_task(self.blocks()), asyncio.sleep(1000))
        if text == "die": os._exit(7)
        if text == "die below": await asyncio.create_task(self.dies())
        if text == "cancel": raise asyncio.CancelledError
        if text == "text": return "0.5"
        if text == "count":
            together += 1
            most = together
            for _ in range(50):  # until nobody joins any more
                await asyncio.sleep(0.01)
                most = max(most, together)
            together -= 1
            return Score(0.5, True, metrics={"together": most})
        await asyncio.sleep(0.001)
        return Score.combine({"accuracy": float(text)}, {"accuracy": 1.0}, parsed=True)

    async def score_in_group(self, sample, scores, index):
        await asyncio.sleep(0)
        mean = sum(s.value for s in scores) / len(scores)
        return Score.combine({"accuracy": mean}, {"accuracy": 1.0}, parsed=True)

    async def blocks(self): time.sleep(1000)
    async def dies(self): os._exit(7)
'''
CONTEXT = RewardContext(1, 1, CoordFrame.ABS_ORIG)


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("waiting") / "waiting.py"
    path.write_text(WAITING, encoding="utf-8")
    return f"{path}:Waiting"


def jobs(texts: list[str]) -> list[ScoreJob]:
    return [
        ScoreJob(0, Sample(f"{i}", "waiting", "s", "q", None), text, CONTEXT)
        for i, text in enumerate(texts)
    ]


def scorer(spec: str, workers: int, timeout_s: float = 1.0, concurrency: int = 64) -> Scorer:
    tasks = [task_from_spec(spec)]
    return Scorer(
        [(spec, {})], tasks, workers=workers, timeout_s=timeout_s, concurrency=concurrency
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ("raise", "reward_error: KeyError"),
        ("exit", "reward_error: SystemExit"),
        ("cancel", "reward_error: CancelledError"),
        ("text", "reward_error: TypeError"),
        ("hang", "reward_timeout"),
        ("deaf", "reward_timeout"),
        ("block", "reward_timeout"),
        ("block below", "reward_timeout"),
        ("die", "reward_crash: the process died (exit code 7)"),
        ("die below", "reward_crash: the process died (exit code 7)"),
    ],
)
def test_what_a_waiting_reward_does_is_its_own_score(spec: str, bad: str, said: str) -> None:
    with scorer(spec, 1) as s:
        found = s.score(jobs(["0.25", bad, "0.5", "0.75"]))
        assert [x.value for x in s.score(jobs(["0.125"]))] == [0.125], "and it goes on"
    assert found[1].reason is not None and found[1].reason.startswith(said)
    assert is_reward_failure(found[1]) and found[1].value == 0.0
    assert [(x.value, x.reason) for i, x in enumerate(found) if i != 1] == [
        (0.25, None),
        (0.5, None),
        (0.75, None),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1])
def test_as_many_wait_together_as_allowed(spec: str, workers: int) -> None:
    with scorer(spec, workers, timeout_s=30, concurrency=8) as s:
        found = s.score(jobs(["count"] * 16))
    assert max(x.metrics["together"] for x in found) == 8


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1])
def test_groups_are_scored_by_a_coroutine_too(spec: str, workers: int) -> None:
    with scorer(spec, workers) as s:
        [first, second] = s.score_groups([jobs(["0.5", "1"]), jobs(["0", "raise", "0.5"])])
    assert [x.value for x in first] == [0.75, 0.75]
    assert second[0].value == second[2].value == pytest.approx(0.5 / 3)
    assert is_reward_failure(second[1])


@pytest.mark.slow
def test_an_async_function_is_a_reward_and_waits_beside_plain_ones() -> None:
    @reward
    async def later(completion: str, sample: Sample) -> dict[str, float]:
        import asyncio

        await asyncio.sleep(0)
        return {"reward": 0.25, "length": len(completion)}

    @reward
    def now(completion: str, sample: Sample) -> float:
        return 0.75

    named = [_named(None, f, None) for f in (later, now)]
    tasks = [resolve_task(name)(**params) for name, params in named]
    asked = [ScoreJob(i % 2, Sample(f"{i}", "t", "s", "q", None), "abc", CONTEXT) for i in range(6)]
    with Scorer(named, tasks, workers=1) as s:
        found = s.score(asked)
    assert [x.value for x in found] == [0.25, 0.75] * 3
    assert found[0].metrics == {"length": 3.0}


def test_a_mixed_source_scores_members_of_both_kinds(spec: str, tmp_path: Path) -> None:
    mixed = task_from_spec("mixed", {"tasks": {spec: {}, "boolean": {}}})
    samples = [
        Sample("1", spec, "s", "q", None),
        Sample("2", "boolean", "s", "q", True),
    ]
    asked = [
        ScoreJob(0, sample, text, CONTEXT)
        for sample, text in zip(samples, ["0.5", "<answer>yes</answer>"], strict=True)
    ]
    with Scorer([], [mixed], workers=0) as s:
        found: list[Score] = s.score(asked)
    assert [x.value for x in found] == [0.5, 1.0]
    assert [x.detail["task"] for x in found] == [spec, "boolean"]
