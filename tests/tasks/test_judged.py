"""A task with a judge: the rule decides where it can, the judge else, in groups as SophiaVL-R1's program does; what the judge does
not say is counted, and an audit shows a judge that pays for what is wrong."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mmrl.config import AlarmConfig
from mmrl.coords import CoordFrame
from mmrl.diagnostics.diagnosis import diagnose
from mmrl.errors import ConfigError
from mmrl.judges.store import current, keep_in
from mmrl.registry import task_from_spec
from mmrl.rewards.thinking import is_uniform, trust, weight
from mmrl.types import RewardContext, Sample, Score
from mmrl.workers.scorer import Scorer
from mmrl.workers.scoring import ScoreJob, is_reward_failure
from scripts._judge_server import judge_server

# (step, T, outcomes, thinking rewards, rewards), the last as SophiaVL-R1's own program gave them at a818494
PROGRAM: list[tuple[int, float, list[float], list[float], list[float]]] = [
    (0, 500, [0.5, 0.5, 0.1, 0.3], [0.9, 0.7, 1.0, 0.9], [0.77, 0.71, 0.1, 0.57]),
    (0, 500, [0.5, 0.0, 1.0, 0.45], [0.4, 0.8, 0.3, 0.3], [0.62, 0.0, 1.09, 0.54]),
    (
        250,
        500,
        [0.45, 0.5, 1.0, 0.45, 1.0, 1.0],
        [0.6, 0.6, 0.9, 0.7, 0.2, 0.5],
        [0.548786, 0.598786, 1.148179, 0.56525, 1.032929, 1.082322],
    ),
    (250, 500, [0.0, 0.1, 0.45, 0.1], [0.4, 1.0, 0.6, 1.0], [0.0, 0.1, 0.559175, 0.1]),
    (
        100,
        12000,
        [0.45, 1.0, 0.5, 0.3],
        [0.8, 0.4, 0.8, 0.3],
        [0.688008, 1.119004, 0.738008, 0.389253],
    ),
    (50, 500, [1, 1, 1, 0.95], [0.1, 0.2, 0.3, 0.4], [1.0, 1.0, 1.0, 0.95]),
    (50, 500, [0, 0, 0.1, 0], [0.5, 0.5, 0.5, 0.5], [0.0, 0.0, 0.1, 0.0]),
    (50, 500, [0.3, 0.4, 0.2, 0.3], [0.9] * 4, [0.544306, 0.644306, 0.444306, 0.544306]),
    (50, 500, [1, 0.3, 0.3, 0.3], [0.1, 0.9, 0.8, 1.0], [1.012197, 0.409774, 0.397577, 0.421971]),
]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with judge_server() as found:
        yield found


@pytest.fixture(autouse=True)
def kept(tmp_path: Path) -> Iterator[None]:
    keep_in(tmp_path / "verdicts")
    yield
    current().close()


def judged(url: str, **params: Any) -> Any:
    judge = {"url": url, "model": "m", "deadline_s": 2, "timeout_s": 0.5}
    return task_from_spec("judged", {"judge": judge, "task": "open_text", **params})


def jobs(*texts: str, step: int = 1, **sample: Any) -> list[ScoreJob]:
    ctx = RewardContext(step, 1000, CoordFrame.ABS_ORIG)
    asked = Sample(
        **{
            "id": "1",
            "task": "open_text",
            "source": "s",
            "question": "Which?",
            "answer": "red cup",
            **sample,
        }
    )
    return [ScoreJob(0, asked, text, ctx) for text in texts]


def scored(task: Any, *texts: str, **sample: Any) -> list[Score]:
    with Scorer([], [task], workers=0) as scorer:
        return scorer.score(jobs(*texts, **sample))


def wrapped(*texts: str) -> list[str]:
    return [f"<answer>{text}</answer>" for text in texts]


@pytest.mark.parametrize(("step", "decay", "outcomes", "thoughts", "rewards"), PROGRAM)
def test_thinking_rewards_are_those_of_the_authors_program(
    step: int, decay: float, outcomes: list[float], thoughts: list[float], rewards: list[float]
) -> None:
    if is_uniform(outcomes):
        assert rewards == outcomes
        return
    counted = [t if o >= 0.2 else 0.0 for o, t in zip(outcomes, thoughts, strict=True)]
    paid = weight(step, trusted=trust(outcomes, counted), decay_steps=decay)
    found = [o + paid * t for o, t in zip(outcomes, counted, strict=True)]
    assert found == pytest.approx(rewards, abs=1e-6)


@pytest.mark.slow
def test_a_group_is_paid_for_its_thinking_by_the_judge(url: str) -> None:
    """The rule of open_text with mode exact and weight 1 on accuracy gives outcomes 0 and 1."""
    task = judged(
        url,
        params={"mode": "exact", "weights": {"accuracy": 1.0}, "answer_format": "think"},
        use="thinking",
        judge={
            "url": url,
            "model": "m",
            "rubric": {"prompt": "{answer}"},
            "timeout_s": 0.5,
            "attempts": 1,
        },
    )
    texts = [
        f"<think>{t}</think><answer>{a}</answer>"
        for t, a in (("one", "red cup"), ("two", "red cup"), ("three", "blue"))
    ]
    with Scorer([], [task], workers=0) as scorer:
        [found] = scorer.score_groups([jobs(*texts, step=250)])
    assert [s.parts["rule"] for s in found] == [1.0, 1.0, 0.0]
    assert [s.metrics["judge_asked"] for s in found] == [1.0, 1.0, 0.0], "below 0.2 it is not asked"
    assert all(
        s.metrics["judge_trust"] == 1.0 and "text" not in s.detail.get("judge", {}) for s in found
    )
    assert found[0].weights["thinking"] == pytest.approx(0.3 * 2.718281828**-0.5)
    assert task.value_range == (0.0, 1.3)


@pytest.mark.slow
def test_a_hybrid_asks_only_where_the_rule_cannot_tell(url: str) -> None:
    task = judged(url, use="hybrid")
    right, other, junk, unread = scored(
        task, *wrapped("red cup", "score 8", "reply no"), "no answer"
    )
    assert (right.value, right.metrics["judge_asked"], right.metrics["correct"]) == (1.0, 0.0, 1.0)
    assert (other.value, other.metrics["judge_asked"]) == (0.8, 1.0)
    assert other.detail["judge"]["value"] == 0.8 and other.metrics["judge_tokens"] == 110
    assert is_reward_failure(junk) and junk.reason is not None
    assert junk.reason.startswith("reward_judge_junk") and junk.metrics["judge_failed"] == 1.0
    assert (unread.value, unread.parsed, unread.metrics["judge_asked"]) == (0.0, False, 0.0)
    [fallen] = scored(judged(url, use="hybrid", on_failure="rule"), *wrapped("reply no"))
    assert not is_reward_failure(fallen) and fallen.metrics["judge_failed"] == 1.0
    assert fallen.value == fallen.parts["rule"] and "junk" in fallen.detail["judge"]["reason"]
    rows = judged(url, use="hybrid", ask="rows")
    [by_rule] = scored(rows, *wrapped("score 8"))
    [by_judge] = scored(rows, *wrapped("score 8"), params={"verifiable": False})
    assert (by_rule.metrics["judge_asked"], by_judge.value) == (0.0, 0.8)


@pytest.mark.slow
def test_a_judge_alone_and_rows_without_a_rule(url: str) -> None:
    half = judged(url, weights={"judge": 3, "rule": 1})
    [found] = scored(half, *wrapped("score 8"))
    assert found.value == pytest.approx(0.75 * 0.8 + 0.25 * found.parts["rule"])
    [free] = scored(judged(url, task=None), "score 6", answer=None)
    assert free.value == 0.6 and free.parsed


@pytest.mark.slow
def test_a_group_is_compared_in_both_orders(url: str) -> None:
    task = judged(url, use="pairwise")
    texts = wrapped("long answer", "short", "partial", "long answer")
    with Scorer([], [task], workers=0) as scorer:
        [found] = scorer.score_groups([jobs(*texts)])
        again = scorer.score_groups([jobs(*texts)])[0]
        [alone] = scorer.score_groups([jobs(*wrapped("short"))])
        [lost] = scorer.score_groups([jobs(*wrapped("junk", "x"))])
    # a ring: long beats short, short and long meet partial (a tie by swap), long meets itself
    assert [s.value for s in found] == [0.75, 0.25, 0.5, 0.5]
    assert [s.metrics["judge_swap_agreed"] for s in found] == [1.0, 0.5, 0.0, 0.0]
    assert sum(s.metrics["judge_calls"] for s in found) == 6, "three pairs in two orders"
    assert [s.value for s in again] == [s.value for s in found]
    assert sum(s.metrics["judge_kept"] for s in again) == 6
    assert alone[0].value == 0.5
    assert all((s.reason or "").startswith("reward_judge_junk") for s in lost)


@pytest.mark.slow
def test_an_audit_shows_a_judge_that_pays_for_what_is_wrong(url: str) -> None:
    task = judged(url, audit=1.0)
    found = scored(task, *wrapped("red cup", "score 9", "score 1", "reply no"))
    assert [s.value for s in found] == [s.parts["rule"] for s in found], "held out: the rule's"
    # the judge of the tests gives 0 to what is no command, the right answer among it
    assert [s.metrics.get("judge_agreed") for s in found] == [0.0, 0.0, 1.0, None]
    row = {
        f"train/{n}": sum(s.metrics.get(n, 0.0) for s in found) / len(found)
        for n in ("judge_audited", "judge_agreed", "judge_too_kind")
    }
    [alarm] = [f for f in diagnose(row, AlarmConfig()) if f.name == "judge"]
    assert (
        "agrees with the rule on 33%" in alarm.message
        and "calls 33% of them right" in alarm.message
    )
    assert not [f for f in diagnose(row, AlarmConfig(judge=0.3)) if f.name == "judge"]
    swaps = {"train/judge_swapped": 0.5, "train/judge_swap_agreed": 0.2}
    assert any("swapped" in f.message for f in diagnose(swaps, AlarmConfig()) if f.name == "judge")
    shares = [
        judged(url, audit=0.25)._is_audited(jobs("x", id=str(n))[0].sample) for n in range(2000)
    ]
    assert 400 < sum(shares) < 600


@pytest.mark.slow
def test_it_is_made_in_the_worker_and_its_verdicts_are_kept(url: str, tmp_path: Path) -> None:
    params = {"task": "open_text", "judge": {"url": url, "model": "m", "version": "w"}}
    folder = tmp_path / "own"
    for _ in range(2):
        with Scorer(
            [("judged", params)],
            [task_from_spec("judged", params)],
            workers=1,
            verdicts=str(folder),
        ) as s:
            found = s.score(jobs(*wrapped("score 3", "score 4")))
        assert [x.value for x in found] == [0.3, 0.4]
    assert [x.metrics["judge_kept"] for x in found] == [1.0, 1.0]
    [file] = folder.glob("*.jsonl")
    # asked side by side: the line of the quicker answer comes first
    assert sorted(json.loads(line)["value"] for line in file.read_text().splitlines()) == [0.3, 0.4]


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"use": "votes"}, "judged.use"),
        ({"task": "judged"}, "itself"),
        ({"use": "thinking", "task": None}, "judged.task"),
        ({"use": "thinking", "audit": 0.1}, "judge_trust"),
        ({"use": "hybrid", "weights": {"judge": 1}}, "judged.weights"),
        ({"weights": {"judge": 0}}, "judged.weights"),
        ({"judge": {"model": "m"}}, "give it yourself"),
        ({"judge": {"url": "http://h/v1", "model": "m", "rubric": "preference"}}, "grades one"),
        (
            {"use": "pairwise", "judge": {"url": "http://h/v1", "model": "m", "rubric": "quality"}},
            "compares two",
        ),
    ],
)
def test_settings_that_cannot_be_are_named(params: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        judged("http://127.0.0.1:1/v1", **params)
