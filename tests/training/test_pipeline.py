"""The executor: pipelined equals serial, async keeps its bound and favours nobody, errors and interrupts end it cleanly.

pytest tests/training/test_pipeline.py
"""

from __future__ import annotations

import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmrl.diagnostics.timeline import Timeline
from mmrl.errors import ConfigError, MMRLError
from mmrl.training.pipeline import ClosedGroup, IteratorSource, Outcome, Pipeline, PipelineSettings
from tests.training.pipeline_kit import Arena, Episode, SmallLearner

STEPS = 5
LIMIT_S = 20.0  # for events that must come: a failure, never a hang


def train(
    options: PipelineSettings, *, steps: int = STEPS, **arena: Any
) -> tuple[SmallLearner, Arena, list[Outcome[float]]]:
    """A whole run."""
    learner = SmallLearner()
    source = Arena(learner, **arena)
    with Pipeline(source, learner, options, last_step=steps) as pipeline:
        outcomes = [pipeline.step(step) for step in range(1, steps + 1)]
    return learner, source, outcomes


def trained_keys(learner: SmallLearner) -> list[tuple[int, int]]:
    """(step, place) of all groups added, in order."""
    return [(g[0].job.step, g[0].job.place) for g in learner.trained]


def threads() -> list[threading.Thread]:
    """Training threads that still live."""
    return [t for t in threading.enumerate() if t.name == "mmrl-train"]


# the result


@pytest.mark.parametrize("speed_seed", range(4))
def test_pipelined_in_key_order_equals_serial_bit_for_bit(speed_seed: int) -> None:
    serial, _, first = train(PipelineSettings(), stages=1)
    other, source, outcomes = train(
        PipelineSettings(schedule="pipelined", order="key"), speed_seed=speed_seed
    )
    assert (
        trained_keys(other)
        == trained_keys(serial)
        == [(s, p) for s in range(1, STEPS + 1) for p in range(6)]
    )
    assert torch.equal(other.layer.weight, serial.layer.weight) and torch.equal(
        other.layer.bias, serial.layer.bias
    )
    assert [o.result for o in outcomes] == [o.result for o in first]
    assert [t.value for t in source.told if t.name == "publish"] == list(range(1, STEPS + 1))


def test_pipelined_in_order_of_arrival_equals_serial_to_rounding() -> None:
    serial, _, _ = train(PipelineSettings())
    orders = set()
    for speed_seed in range(4):
        other, _, _ = train(PipelineSettings(schedule="pipelined"), speed_seed=speed_seed)
        orders.add(tuple(trained_keys(other)))
        torch.testing.assert_close(other.layer.weight, serial.layer.weight, rtol=1e-4, atol=1e-5)
    assert len(orders) > 1, (
        "the speeds must make groups arrive in different orders, or the test shows nothing"
    )


def test_all_decisions_of_a_pipelined_step_use_the_step_before() -> None:
    learner, _, outcomes = train(PipelineSettings(schedule="pipelined"))
    assert {v - e.job.step for g in learner.trained for e in g for v in e.versions} == {-1}
    assert [o.staleness for o in outcomes] == [0] * STEPS


def test_empty_places_are_counted_and_hold_nobody_up() -> None:
    empty = [(1, 0), (2, 3), *((3, p) for p in range(6))]
    for options in (
        PipelineSettings(),
        PipelineSettings(schedule="pipelined", order="key"),
        PipelineSettings(schedule="async", staleness=1),
    ):
        learner, _, outcomes = train(options, empty=empty)
        assert [(o.added, o.empty) for o in outcomes] == [(5, 1), (5, 1), (0, 6), (6, 0), (6, 0)]
        assert sorted(trained_keys(learner)) == sorted(
            {(s, p) for s in range(1, 6) for p in range(6)} - set(empty)
        )


def test_serial_starts_no_thread_and_training_stays_in_one() -> None:
    me = threading.get_ident()
    learner, _, _ = train(PipelineSettings())
    assert {t for _, _, t in learner.calls} == {me}
    other, _, _ = train(PipelineSettings(schedule="pipelined"))
    assert len({t for _, _, t in other.calls}) == 1 and me not in {t for _, _, t in other.calls}
    assert [name for name, _, _ in other.calls] == (["begin"] + ["add"] * 6 + ["finish"]) * STEPS


def test_between_two_steps_the_learner_rests_also_in_async() -> None:
    learner = SmallLearner()
    source = Arena(learner)
    with Pipeline(
        source, learner, PipelineSettings(schedule="async", staleness=2), last_step=STEPS
    ) as pipeline:
        for step in range(1, STEPS + 1):
            pipeline.step(step)
            assert learner.calls[-1][0] == "finish" and learner.version == step == pipeline.version


# what overlaps


class Holds(Arena):
    """Environments that answer no more, from a moment on, until something has happened in the learner's thread or in inference.

    What is held up is never a call of the learner or of inference: these exclude each other.
    """

    def __init__(self, learner: SmallLearner, holds: Callable[[Holds], bool], **arena: Any) -> None:
        super().__init__(learner, **arena)
        self.holds, self.closed, self.held = holds, 0, 0.0

    def poll(self, timeout_s: float) -> list[ClosedGroup[list[Episode]]]:
        if self.holds(self):
            self.held = self.held or time.monotonic()
            assert time.monotonic() < self.held + LIMIT_S, (
                "what they wait for does not come while they are under way"
            )
            time.sleep(0.001)
            return []
        found = super().poll(timeout_s)
        self.closed += len(found)
        return found


def called(learner: SmallLearner, name: str) -> int:
    return sum(call[0] == name for call in learner.calls)


def test_a_group_is_trained_on_while_others_are_still_rolled_out() -> None:
    learner = SmallLearner()
    source = Holds(learner, lambda arena: bool(arena.closed) and not called(learner, "add"))
    with Pipeline(source, learner, PipelineSettings(schedule="pipelined"), last_step=1) as pipeline:
        assert pipeline.step(1).added == 6
    assert source.held and source.closed == 6


class Ahead(Arena):
    """Keeps a group of step 1 back until another one of it was added and a decision of step 2 was made."""

    kept: tuple[ClosedGroup[list[Episode]], ...] = ()
    since = 0.0

    def _end(self, episode: Episode) -> list[ClosedGroup[list[Episode]]]:
        found = super()._end(episode)
        if (episode.job.step, episode.job.place) != (1, 3):
            return found
        self.kept, self.since = tuple(found), time.monotonic()
        return []

    def poll(self, timeout_s: float) -> list[ClosedGroup[list[Episode]]]:
        found = super().poll(timeout_s)
        if (
            self.kept
            and called(self.learner, "add")
            and any(
                job.step == 2 for told in self.told if told.name == "infer" for job in told.value
            )
        ):
            found, self.kept = [*found, *self.kept], ()
        assert not self.kept or time.monotonic() < self.since + LIMIT_S, (
            "nothing of step 2 while step 1 is trained"
        )
        return found

    @property
    def running(self) -> int:
        return super().running + len(self.kept)


def test_async_rolls_out_the_next_step_while_this_one_is_trained() -> None:
    learner = SmallLearner()
    source = Ahead(learner)
    with Pipeline(
        source, learner, PipelineSettings(schedule="async", staleness=1), last_step=2
    ) as pipeline:
        first, second = pipeline.step(1), pipeline.step(2)
    assert source.since and (first.added, second.added) == (6, 6)
    assert (first.staleness, second.staleness) == (0, 1)


def test_shared_modules_are_never_used_by_both_at_once() -> None:
    inside: list[str] = []
    together = []

    def enter(name: str) -> None:
        inside.append(name)
        if len(inside) > 1:
            together.append(list(inside))

    class Learner(SmallLearner):
        def add(self, group: list[Episode]) -> None:
            enter("add")
            super().add(group)
            inside.remove("add")

    class Source(Arena):
        def infer(self, batch: list[int], version: int) -> list[ClosedGroup[list[Episode]]]:
            enter("infer")
            assert version == self.learner.version, (
                "tagged with other weights than those that answered"
            )
            out = super().infer(batch, version)
            inside.remove("infer")
            return out

    learner = Learner()
    with Pipeline(
        Source(learner, places=20),
        learner,
        PipelineSettings(schedule="async", staleness=2),
        last_step=4,
    ) as pipeline:
        for step in range(1, 5):
            pipeline.step(step)
    assert not together and not inside


def test_a_long_finish_lets_waiting_inference_in_between_its_parts() -> None:
    """As a learner with several passes over a step asks for: one batch each time, as the older version, and on the timeline the two
    take turns."""
    let_in: list[list[int]] = []  # by step and part: batches answered meanwhile
    answered: list[int] = []  # versions

    class Learner(SmallLearner):
        def finish(self) -> float:
            parts = []
            for _ in range(3):
                if self.version < last - 1:  # with the last step nothing is left to roll out
                    limit = time.monotonic() + LIMIT_S
                    while not pipeline._lock.contended and time.monotonic() < limit:
                        time.sleep(0.001)
                before = len(answered)
                time.sleep(0.01)
                assert len(answered) == before, "answered while training held the policy"
                pipeline.make_way()
                parts.append(len(answered) - before)
                assert set(answered[before:]) <= {self.version}
            let_in.append(parts)
            return super().finish()

    class Source(Arena):
        def infer(self, batch: list[int], version: int) -> list[ClosedGroup[list[Episode]]]:
            answered.append(version)
            return super().infer(batch, version)

    last, learner, timeline = 4, Learner(), Timeline({"infer": 1, "train": 1})
    with Pipeline(
        Source(learner, places=20, slots=4),
        learner,
        PipelineSettings(schedule="async", staleness=1),
        last_step=last,
        timeline=timeline,
    ) as pipeline:
        for step in range(1, last + 1):
            pipeline.step(step)
    assert let_in == [[1, 1, 1]] * (last - 1) + [[0, 0, 0]]
    spans = sorted(timeline.take(), key=lambda s: s.start)
    assert all(a.end <= b.start for a, b in pairwise(spans) if a.stage != b.stage)


# async: bound, no starvation, no bias


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(
    bound=st.integers(1, 3),
    speed_seed=st.integers(0, 10**6),
    slots=st.integers(2, 12),
    stages=st.integers(1, 2),
    places=st.integers(1, 7),
    members=st.integers(1, 4),
)
def test_async_keeps_the_bound_trains_all_places_once_and_favours_no_length(
    bound: int, speed_seed: int, slots: int, stages: int, places: int, members: int
) -> None:
    learner, source, outcomes = train(
        PipelineSettings(schedule="async", staleness=bound),
        speed_seed=speed_seed,
        slots=slots,
        stages=stages,
        places=places,
        members=members,
    )
    for group in learner.trained:
        for episode in group:
            assert all(
                episode.job.step - 1 - bound <= v <= episode.job.step - 1 for v in episode.versions
            )
            assert (
                len(episode.answers)
                == episode.job.length
                == source.lengths[episode.job.step, episode.job.place, episode.job.member]
            )
    assert Counter(trained_keys(learner)) == Counter(
        (s, p) for s in range(1, STEPS + 1) for p in range(places)
    )
    assert [s for s, _ in trained_keys(learner)] == sorted(s for s, _ in trained_keys(learner)), (
        "a step trains on its own groups"
    )
    lengths = sorted(e.job.length for g in learner.trained for e in g)
    assert lengths == sorted(source.lengths.values()), (
        "the episodes trained on are those that were started, long ones too"
    )
    assert [(o.added, o.empty, o.stale) for o in outcomes] == [(places, 0, 0)] * STEPS
    assert max(o.staleness for o in outcomes) <= bound
    began: dict[int, int] = {}  # step opened -> weights there were then
    version = 0
    for told in source.told:
        if told.name == "publish":
            version = told.value
        elif told.name == "start":
            began[told.value] = version
    assert all(version >= step - 1 - bound for step, version in began.items()), (
        "the rollout must pause"
    )


def test_groups_of_an_actor_that_fell_behind_are_refused_counted_and_asked_again() -> None:
    learner = SmallLearner()

    class Late(Arena):
        def infer(self, batch: list[int], version: int) -> list[ClosedGroup[list[Episode]]]:
            self.lag = (
                1
                if any(
                    self.playing[s].job.attempt == 0 and self.playing[s].job.place == 2
                    for s in batch
                )
                else 0
            )
            return super().infer(batch, version)

    source = Late(learner, slots=1, stages=1, places=4)
    with Pipeline(source, learner, PipelineSettings(schedule="pipelined"), last_step=3) as pipeline:
        outcomes = [pipeline.step(step) for step in (1, 2, 3)]
    assert [(o.added, o.empty, o.stale) for o in outcomes] == [(4, 0, 1)] * 3
    assert [(t.value.step, t.value.place) for t in source.told if t.name == "again"] == [
        (1, 2),
        (2, 2),
        (3, 2),
    ]
    assert all(v == e.job.step - 1 for g in learner.trained for e in g for v in e.versions)


def test_an_actor_that_never_gets_weights_stops_the_run_with_the_reason() -> None:
    with pytest.raises(
        MMRLError,
        match=r"step 1: 21 groups were older than staleness 0 allows \(the last: version -3\)",
    ):
        train(PipelineSettings(schedule="pipelined"), lag=3, places=2)
    assert not threads()


# errors


class Broken(RuntimeError):
    """What the tests raise."""


@pytest.mark.parametrize("schedule", ["serial", "pipelined", "async"])
@pytest.mark.parametrize(
    ("where", "name"),
    [
        ("learner", "begin"),
        ("learner", "add"),
        ("learner", "finish"),
        ("source", "start"),
        ("source", "poll"),
        ("source", "infer"),
        ("source", "publish"),
    ],
)
def test_an_error_surfaces_with_its_traceback_and_nothing_hangs(
    schedule: Any, where: str, name: str
) -> None:
    def fails(called: str, _: Any) -> None:
        if called == name and learner.version >= 1:
            raise Broken(f"{where} {name}")

    learner = SmallLearner(fails if where == "learner" else None)
    source = Arena(learner, hook=fails if where == "source" else None)
    options = PipelineSettings(schedule=schedule, staleness=1 if schedule == "async" else 0)
    with (
        pytest.raises(Broken, match=f"{where} {name}") as caught,
        Pipeline(source, learner, options, last_step=9) as pipeline,
    ):
        for step in range(1, 10):
            pipeline.step(step)
    assert "fails" in [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert not threads()
    if pipeline.version < 9 and pipeline.version + 1 <= 9:
        with pytest.raises(MMRLError, match="was closed, or an earlier step failed"):
            pipeline.step(pipeline.version + 1)


def test_the_first_of_two_errors_is_the_one_that_surfaces() -> None:
    failed = threading.Event()

    def in_learner(name: str, _: Any) -> None:
        if name == "add":
            failed.set()
            raise Broken("training, first")

    def in_source(name: str, _: Any) -> None:
        if (
            failed.is_set()
            and pipeline._trainer is not None
            and pipeline._trainer.error is not None
        ):
            raise Broken("rollout, second")

    learner = SmallLearner(in_learner)
    with (
        pytest.raises(Broken, match="training, first"),
        Pipeline(
            Arena(learner, hook=in_source),
            learner,
            PipelineSettings(schedule="pipelined"),
            last_step=1,
        ) as pipeline,
    ):
        pipeline.step(1)
    assert not threads()


def test_an_interrupt_ends_the_thread_and_drops_what_waits() -> None:
    def interrupts(arena: Holds) -> bool:
        if called(learner, "add"):
            raise KeyboardInterrupt
        return arena.closed > 0

    learner = SmallLearner()
    with (
        pytest.raises(KeyboardInterrupt),
        Pipeline(
            Holds(learner, interrupts), learner, PipelineSettings(schedule="pipelined"), last_step=1
        ) as pipeline,
    ):
        pipeline.step(1)
    assert not threads() and called(learner, "add") >= 1 and not called(learner, "finish")


def test_a_source_that_loses_places_is_an_error_not_a_hang() -> None:
    class Loses(Arena):
        def _end(self, episode: Episode) -> list[ClosedGroup[list[Episode]]]:
            return [] if episode.job.place == 1 else super()._end(episode)

    learner = SmallLearner()
    with (
        pytest.raises(
            MMRLError, match=r"nothing under way, but places are open \(\{1: 1\} by step\)"
        ),
        Pipeline(
            Loses(learner), learner, PipelineSettings(schedule="pipelined"), last_step=1
        ) as pipeline,
    ):
        pipeline.step(1)
    assert not threads()


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (
            {"schedule": "pipeline"},
            "to be one of serial, pipelined, async, found 'pipeline'. Did you mean 'pipelined'",
        ),
        (
            {"order": "keys"},
            "expected order to be one of arrival, key, found 'keys'. Did you mean 'key'",
        ),
        ({"schedule": "async"}, "expected staleness at least 1 with schedule async, found 0"),
        (
            {"schedule": "pipelined", "staleness": 1},
            "expected staleness 0 without schedule async, found 1 with pipelined",
        ),
    ],
)
def test_wrong_settings_say_what_is_meant(options: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        PipelineSettings(**options)


# a source that rolls out by itself


@pytest.mark.parametrize(
    "options",
    [
        PipelineSettings(),
        PipelineSettings(schedule="pipelined", order="key"),
        PipelineSettings(schedule="async", staleness=1),
    ],
)
def test_an_iterator_of_groups_is_a_source(options: PipelineSettings) -> None:
    ended: list[int] = []

    def groups(step: int) -> Iterator[tuple[int, int] | None]:
        for place in (2, 0, 3):  # place 1 stays empty, but for the last step
            yield None
            yield (step, place)
        if step == 3:
            yield (step, 1)
        ended.append(step)

    class Sums:
        def begin(self, step: int) -> None:
            self.got: list[tuple[int, int]] = []

        def add(self, group: tuple[int, int]) -> None:
            self.got.append(group)

        def finish(self) -> list[tuple[int, int]]:
            return self.got

    source = IteratorSource(groups, 4, lambda group: (group[1], group[0] - 1))
    with Pipeline(source, Sums(), options, last_step=3) as pipeline:
        for step in (1, 2, 3):
            outcome = pipeline.step(step)
            assert step in ended, (
                "what the iterator does at its end is done before the step returns"
            )
            assert sorted(outcome.result) == [
                (step, p) for p in (0, 1, 2, 3) if p != 1 or step == 3
            ]
            assert outcome.empty == (step != 3)


# what is measured


def test_the_timeline_of_a_run_names_its_stages() -> None:
    learner, timeline = SmallLearner(), Timeline()
    with Pipeline(
        Arena(learner),
        learner,
        PipelineSettings(schedule="pipelined"),
        last_step=2,
        timeline=timeline,
    ) as pipeline:
        for step in (1, 2):
            pipeline.step(step)
            found = timeline.summary(step)
            assert set(found["stages"]) == {"infer", "train"} and {
                "train queue",
                "environments at work",
            } <= set(found["queues"])
            assert all(0 <= s["bubble"] <= 1 and s["busy_s"] > 0 for s in found["stages"].values())
