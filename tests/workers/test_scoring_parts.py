"""What a score may hold and when scores are sent: the parts of mmrl.workers.scoring that need no process."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import FrozenInstanceError
from types import SimpleNamespace
from typing import Any

import pytest

import mmrl.workers.scoring as scoring
from mmrl.registry import carried
from mmrl.task import Task
from mmrl.types import Score
from mmrl.workers.scorer import Scorer
from mmrl.workers.scoring import ScoreJob, is_reward_failure, score_one
from tests.workers.scoring_kit import Told, ending, jobs, scorer


@pytest.fixture(autouse=True)
def ends() -> Iterator[None]:
    with ending():
        yield


def scored(result: Any) -> Score:
    return score_one(Told(result), jobs("1")[0])


# what a score may hold


def test_a_reason_is_cut_to_500_characters_and_says_so() -> None:
    whole, cut = scored(Score(0.5, True, "r" * 500)), scored(Score(0.5, True, "r" * 501))
    assert whole.reason == "r" * 500
    assert cut.reason == "r" * 478 + " [cut, 501 characters]" and len(cut.reason) == 500
    assert scored(Score(0.5, True)).reason is None
    assert scored(Score(0.5, True, 404)).reason == "404"  # type: ignore[arg-type]


def test_a_detail_of_65536_characters_is_kept_and_a_longer_one_left_out() -> None:
    room = 65_536 - len('{"x": ""}')
    assert dict(scored(Score(0.5, True, detail={"x": "y" * room})).detail) == {"x": "y" * room}
    assert dict(scored(Score(0.5, True, detail={"x": "y" * (room + 1)})).detail) == {
        "left_out": "65,537 characters as JSON, at most 65,536 are kept"
    }
    assert dict(scored(Score(0.5, True)).detail) == {}
    assert dict(scored(Score(0.5, True, detail={"of": {1, 2}})).detail) == {"of": {1, 2}}, (
        "what is no JSON is written as text"
    )
    assert (
        scored(Score(0.5, True, detail={(1, 2): 3}))
        .detail["left_out"]
        .startswith("it cannot be written as JSON: TypeError")
    )


@pytest.mark.parametrize("table", ["metrics", "parts", "weights"])
def test_a_score_has_at_most_256_numbers_with_names_of_200_characters(table: str) -> None:
    def holding(numbers: dict[str, Any]) -> Score:
        plain = dict.fromkeys(numbers, 0.0)
        return scored(
            Score(
                0.5,
                True,
                **(
                    {"metrics": numbers}
                    if table == "metrics"
                    else {"parts": plain, "weights": plain, table: numbers}
                ),
            )
        )

    def first(words: str) -> str:
        # they have the same names, and parts come first
        return words if table != "weights" else words.replace("weights", "parts")

    many = {f"m{i}": 0.25 for i in range(257)}
    assert dict(getattr(holding(dict(list(many.items())[:256])), table)) == dict(
        list(many.items())[:256]
    )
    assert first(
        f"at most 256 {table} with names of at most 200 characters, found 257, the longest name of 4"
    ) in (holding(many).reason or "")
    assert dict(getattr(holding({"n" * 200: 0.25}), table)) == {"n" * 200: 0.25}
    assert "found 1, the longest name of 201" in (holding({"n" * 201: 0.25}).reason or "")
    for broken in (math.nan, math.inf):
        assert holding({"good": 0.5, "bad": broken}).reason == (
            f"reward_error: ValueError: expected finite {table}, found {{'bad': {broken}}}"
        )


@pytest.mark.parametrize(
    ("value", "kept"),
    [
        (0.0, 0.0),
        (1.0, 1.0),
        (0.5, 0.5),
        (-0.9e-9, 0.0),
        (1 + 0.9e-9, 1.0),
        (-1.1e-9, None),
        (1 + 1.1e-9, None),
    ],
)
def test_a_value_leaves_its_range_by_rounding_only(value: float, kept: float | None) -> None:
    score = scored(Score(value, True))
    if kept is None:
        assert (
            score.reason == f"reward_error: ValueError: expected a value in [0, 1], found {value}"
            and not score.parsed
        )
        assert is_reward_failure(score) and dict(score.parts) == {"accuracy": 0.0}
    else:
        assert score == Score(kept, True) and not is_reward_failure(score)


def test_only_reasons_of_the_reward_itself_are_failures_of_it() -> None:
    assert is_reward_failure(Score.failure("reward_timeout: x"))
    assert not is_reward_failure(Score.failure("no_answer")) and not is_reward_failure(
        Score(0.5, True)
    )
    assert not is_reward_failure(Score.failure("no reward_error"))


class Mute(ValueError):
    def __str__(self) -> str:
        raise RuntimeError("no words")


@pytest.mark.parametrize(
    ("result", "said"),
    [
        (KeyError("box"), "reward_error: KeyError: 'box'"),
        (SystemExit(3), "reward_error: SystemExit: 3"),
        ("0.5", "reward_error: TypeError: expected a mmrl.Score, found str"),
        (Mute(), "reward_error: Mute: (its text cannot be made: RuntimeError)"),
    ],
)
def test_what_a_reward_raises_is_its_score(result: Any, said: str) -> None:
    assert scored(result) == Score.failure(said, ("accuracy",))


def test_an_interrupt_is_no_score() -> None:
    with pytest.raises(KeyboardInterrupt):
        scored(KeyboardInterrupt())


def test_a_job_cannot_be_changed_and_stands_alone_unless_told() -> None:
    [job] = jobs("1")
    assert (job.peers, job.place) == (None, 0)
    with pytest.raises(FrozenInstanceError):
        job.text = "2"  # type: ignore[misc]


# the reward process's side


class Script:
    """A connection that receives lists of jobs and then the end, or an error."""

    def __init__(self, *received: Any) -> None:
        self.received, self.sent = [*received, None], list[Any]()

    def recv(self) -> Any:
        return self.received.pop(0)

    def send(self, value: Any) -> None:
        self.sent.append(value)


class Notes:
    """A ScoreWriter that notes what it is asked for."""

    made: list[Notes]

    def __init__(self, connection: Any, token: bytes) -> None:
        self.told: list[Any] = [token]
        Notes.made.append(self)

    def check(self) -> None:
        self.told.append("check")

    def add(self, job: int, score: Score, part_names: Sequence[str]) -> None:
        self.told.append((job, score.value, tuple(part_names)))

    def flush(self) -> None:
        self.told.append("flush")


def served(
    monkeypatch: pytest.MonkeyPatch, ticks: Sequence[float], *batches: list[tuple[int, ScoreJob]]
) -> tuple[Any, Any, Any]:
    """(what the pipe was told, what the writer was told, the progress after each score) of a reward process with this clock."""
    Notes.made, clock, seen, adopted = [], iter(ticks), [], list[bytes]()

    class Progress(list[float]):
        def __setitem__(self, where: Any, value: Any) -> None:
            seen.append(value)
            super().__setitem__(where, value)

    monkeypatch.setattr(scoring, "ScoreWriter", Notes)
    monkeypatch.setattr(scoring, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    monkeypatch.setattr(scoring, "task_from_spec", lambda spec, params: Told(**params))
    monkeypatch.setattr(scoring, "adopt", adopted.append)
    connection, progress = Script(*batches), Progress([0.0, 0.0])
    scoring._serve(
        connection, progress, [("told", {}), ("told", {"factor": 0.5})], b"token", b"theirs"
    )  # type: ignore[arg-type]
    assert adopted == [b"theirs"], "tasks of the parent's own, before any is made"
    assert next(clock, None) is None, (
        "the clock is read once when a list came, for each job, and after each job"
    )
    return connection.sent, Notes.made[0].told, seen


def test_scores_travel_together_for_five_milliseconds(monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = jobs("1")[0], jobs("0.5", key=1)[0]
    #        list  job     after   job     after   flushed  job     after   | list  job   after
    ticks = [10.0, 10.001, 10.004, 10.004, 10.006, 10.006, 10.007, 10.0105, 20.0, 20.0, 20.004]
    told, writer, progress = served(monkeypatch, ticks, [(3, one), (4, two), (9, one)], [(11, two)])
    name = ("accuracy",)
    assert told == [None], "it is ready"
    assert writer == [
        b"token",
        "check",
        (3, 1.0, name),
        "check",
        (4, 0.25, name),
        "flush",
        "check",
        (9, 1.0, name),
        "flush",
        "check",
        (11, 0.25, name),
        "flush",
    ]
    assert progress == [(3, 10.001), (4, 10.004), (9, 10.007), (11, 20.0)]


def test_a_task_that_cannot_be_made_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(spec: str, params: Any) -> Task:
        raise SystemExit("no licence")

    monkeypatch.setattr(scoring, "task_from_spec", refuses)
    connection = Script()
    with pytest.raises(SystemExit, match="no licence"):
        scoring._serve(connection, [0.0, 0.0], [("told", {})], b"token", carried())  # type: ignore[arg-type]
    assert connection.sent == ["SystemExit: no licence"]


# without processes


def test_tasks_are_told_apart_by_their_key() -> None:
    tasks = [Told(), Told(factor=0.5)]
    here = Scorer([("told", {}), ("told", {"factor": 0.5})], tasks, workers=0)
    assert here.timeout_s == 10.0
    assert [s.value for s in here.score([*jobs("1"), *jobs("1", key=1)])] == [1.0, 0.5]
    assert len(Scorer([("told", {})], [Told()], workers=0)._workers) == 0
    with pytest.raises(TypeError, match="positional"):
        Scorer([("told", {})], [Told()], 0)  # type: ignore[misc]


def test_groups_are_scored_alone_and_then_together() -> None:
    here = scorer(0)
    rows = [jobs("0.1", "0.9", "0.5"), [], jobs("0.3", "broken", "0.2")]
    found = here.score_groups(rows)
    assert [[round(x.value, 6) for x in row] for row in found] == [
        [0.0, 0.666667, 0.333333],
        [],
        [0.666667, 0.0, 0.333333],
    ]
    assert is_reward_failure(found[2][1]) and "could not convert string to float" in (
        found[2][1].reason or ""
    )
    alone = Told()
    alone.in_group = False
    [kept] = Scorer([("told", {})], [alone], workers=0).score_groups(rows[:1])
    assert [x.value for x in kept] == [0.1, 0.9, 0.5]
