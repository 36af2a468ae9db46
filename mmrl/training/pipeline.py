"""Environments, inference and training at the same time: the executor behind `schedule: serial | pipelined | async`.

    with Pipeline(source, learner, PipelineSettings(schedule="pipelined"), last_step=100) as pipeline:
        for step in range(1, 101):
            outcome = pipeline.step(step)              # outcome.result is what learner.finish() returned

A `GroupSource` (simulators, prompts) closes groups; a `Learner` adds each group's gradient and takes one optimizer step
per `finish`. Three kinds of resources work at once: environments (the source's own worker processes), inference (the
caller's thread, inside `step`) and training (one thread of ours).

    serial      all groups close, then all are added, in order of their places, in the caller's thread; no other thread
    pipelined   a group is added as soon as it closes; weights change only in finish(), after the last group, so the step is
                the serial one up to the order of summation, and with order="key" (a group waits for its turn) bit for bit
    async       the same, and groups of up to `staleness` later steps are rolled out meanwhile

Version v is the weights after step v; step t trains version t - 1, so a group of step t with decisions as old as version
v is t - 1 - v stale. Three rules keep that within the bound without favouring short episodes: a step is opened only when
the version is at least t - 1 - staleness (the rollout pauses instead of producing what would be too old); a place belongs
to its step from its start, so step t trains on the episodes that started for it, however long they take; and a group
that is too old all the same (an actor that fell behind) is not admitted, counted, and its place asked again. At most
(staleness + 1) steps of groups exist at a time, which bounds every queue here.

Threads and locks. The driver (the caller's thread) alone calls the source; the training thread alone calls the learner,
and only while `step` is running: between two calls of `step` it is idle, so evaluating and saving a checkpoint need no
lock. One lock exists: inference and training use the same torch modules, so one inference batch and one learner call exclude
each other, because train() / eval() switch a whole module for everybody and because finish() changes weights in place; it is
first come, first served, else a training thread with a full queue would hold it for good. Rendering overlaps with both.

With several passes over a step finish() takes as long as the step's training, and soon every environment waits for an answer. So a
learner may call `make_way` between two micro-batches, and the inference batch that waits is answered there: by weights that may
have taken some of a step's optimizer steps. Such decisions count as the older version's, are stale when they are trained on, and
are corrected as stale ones are, by the log-probs they were drawn with.

A source that rolls out in a process of its own, with a copy of the weights (`PipelineSettings.apart`, mmrl.training.generator),
needs neither thread nor lock: the caller's thread adds groups as they arrive, and inference overlaps with training, too.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, Protocol, TypeVar, get_args

from mmrl.diagnostics.timeline import Timeline
from mmrl.errors import ConfigError, MMRLError, did_you_mean
from mmrl.training.training_thread import FairLock, TrainingThread

__all__ = [
    "ClosedGroup",
    "GroupSource",
    "IteratorSource",
    "Learner",
    "Outcome",
    "Pipeline",
    "PipelineSettings",
    "Schedule",
]

Schedule = Literal["serial", "pipelined", "async"]
G = TypeVar("G")
G_in = TypeVar("G_in", contravariant=True)
R_co = TypeVar("R_co", covariant=True)
R = TypeVar("R")

_LOG = logging.getLogger(__name__)
_POLL_S = 0.02  # how long the driver sleeps on environments before it looks at the training thread
# refused groups per place and step until the run stops: the actor never gets fresh weights
_MAX_STALE = 10


@dataclass(frozen=True)
class ClosedGroup(Generic[G]):
    """The end of one place of `step` (numbered from 0): its group, or None when nothing came of it (attempts used up).

    `version` is the oldest version that any decision in the group was made with (`infer` was told each).
    """

    step: int
    place: int
    group: G | None
    version: int


class GroupSource(Protocol[G]):
    """Where groups come from. Only the driver's thread calls it; it may raise, which ends the run.

    It prefers earlier steps and places when both could go on. Groups that are not to be trained on (no signal, a crash) and
    the attempts that replace them are its own business; each place of a step ends once, as a `ClosedGroup`, unless `again` asks.
    A run resumed after step t starts with start(t + 1): save what the source was before that call, which async makes early.
    """

    def start(self, step: int) -> int:
        """Open the places of `step` (0 to n - 1): roll them out from now on, in that order. Returns n."""

    def poll(self, timeout_s: float) -> Sequence[ClosedGroup[G]]:
        """Take in what environments answered, waiting at most so long for the first answer; what closed by that."""

    def ready(self) -> Any:
        """The next inference batch (a stage whose environments have all answered), or None while there is none."""

    def infer(self, batch: Any, version: int) -> Sequence[ClosedGroup[G]]:
        """Answer that batch with the policy and send the answers on their way; what closed by that."""

    def again(self, closed: ClosedGroup[G]) -> None:
        """The place is to be rolled out once more: its group was made by weights too old."""

    def publish(self, version: int) -> None:
        """The weights of `version` are there: called between two steps, when nothing trains."""

    @property
    def running(self) -> int:
        """Environments at work, which `poll` would wait for."""


class Learner(Protocol[G_in, R_co]):
    """Turns groups into one optimizer step. With several epochs or minibatches per step, `add` collects and `finish` trains.

    All three run in the training thread, where autocast, grad mode and the like have to be set anew: they belong to a thread.
    """

    def begin(self, step: int) -> None:
        """A step begins: no gradient yet."""

    def add(self, group: G_in) -> None:
        """Forward and backward of one group; gradients accumulate, weights stay."""

    def finish(self) -> R_co:
        """Scale by the denominator, clip, one optimizer step. Called once per step, also when no group was kept."""


@dataclass(frozen=True, kw_only=True)
class PipelineSettings:
    """See the module. `staleness` is for async only, at least 1; order "key" adds groups in the order of their places; `apart`: the
    source infers elsewhere, with weights of its own."""

    schedule: Schedule = "serial"
    order: Literal["arrival", "key"] = "arrival"
    staleness: int = 0
    apart: bool = False

    def __post_init__(self) -> None:
        for name, known in (("schedule", get_args(Schedule)), ("order", ("arrival", "key"))):
            if (found := getattr(self, name)) not in known:
                raise ConfigError(
                    f"expected {name} to be one of {', '.join(known)}, found {found!r}.{did_you_mean(found, known)}"
                )
        if (self.staleness < 1) if self.schedule == "async" else (self.staleness != 0):
            raise ConfigError(
                f"expected staleness {'at least 1 with' if self.schedule == 'async' else '0 without'} schedule "
                f"async, found {self.staleness} with {self.schedule}"
            )


@dataclass(frozen=True)
class Outcome(Generic[R]):
    """One step: what finish() returned, groups added, places that stayed empty, groups refused as too old, wall seconds,
    seconds that only the drain took (everything had closed, training was not done), the largest staleness trained on."""

    step: int
    result: R
    added: int
    empty: int
    stale: int
    wall_s: float
    drain_s: float
    staleness: int


class IteratorSource(Generic[G]):
    """A GroupSource from a function that rolls out one step by itself: `groups(step)` yields closed groups.

    It may yield None now and then to let the executor look at the training thread; where inference shares modules with
    training it wraps its inference in `pipeline.exclusive()`. `describe(group)` gives (place, oldest version); places of the
    `places` that the iterator never names stay empty. Later steps begin when the iterators of earlier ones have ended.
    Its groups cannot be asked again: `describe` must not give versions older than the bound.
    """

    def __init__(
        self,
        groups: Callable[[int], Iterator[G | None]],
        places: int,
        describe: Callable[[G], tuple[int, int]],
    ) -> None:
        self.groups, self.places, self.describe = groups, places, describe
        self._steps: deque[tuple[int, Iterator[G | None]]] = deque()
        self._seen: set[int] = set()

    def start(self, step: int) -> int:
        """See GroupSource."""
        self._steps.append((step, self.groups(step)))
        return self.places

    def poll(self, timeout_s: float) -> list[ClosedGroup[G]]:
        """The next group, or what its end leaves empty."""
        step, iterator = self._steps[0]
        try:
            group = next(iterator)
        except StopIteration:
            self._steps.popleft()
            empty = sorted(set(range(self.places)) - self._seen)
            self._seen = set()
            return [ClosedGroup(step, place, None, step - 1) for place in empty]
        if group is None:
            return []
        place, version = self.describe(group)
        self._seen.add(place)
        # nothing more can come: let it end now, with whatever it counts at its end
        if len(self._seen) == self.places:
            # apart from the check, which python -O leaves out
            rest = [group for group in iterator if group is not None]
            assert not rest, f"step {step} yields more than {self.places} places"
            self._steps.popleft()
            self._seen = set()
        return [ClosedGroup(step, place, group, version)]

    @property
    def running(self) -> int:
        """Steps that still yield."""
        return len(self._steps)

    def ready(self) -> None:
        """Nothing: the iterator infers by itself."""

    def infer(self, batch: Any, version: int) -> list[ClosedGroup[G]]:
        """Never called."""
        raise AssertionError("ready() never asks for it")

    def again(self, closed: ClosedGroup[G]) -> None:
        """Raises MMRLError."""
        raise MMRLError(
            f"step {closed.step}: the group of place {closed.place} was made by version {closed.version}, older than "
            "schedule.staleness allows, and cannot be rolled out again; raise schedule.staleness"
        )

    def publish(self, version: int) -> None:
        """Nothing to do."""


@dataclass
class _Step(Generic[G]):
    """The places of an open step, and which of their groups may be added by now. Groups that were handed on are not kept: they
    hold prompts with their pictures."""

    places: int
    hold: Literal["nothing", "turn", "all"]
    # of every place that closed; None: without a group
    versions: dict[int, int | None] = field(default_factory=dict)
    # not handed on yet, in order of arrival
    waiting: dict[int, ClosedGroup[G]] = field(default_factory=dict)
    stale: int = 0
    drained_at: float | None = None

    def close(self, closed: ClosedGroup[G]) -> None:
        place = closed.place
        assert 0 <= place < self.places and place not in self.versions, (
            f"{closed} closed twice or never opened"
        )
        self.versions[place] = None if closed.group is None else closed.version
        self.waiting[place] = closed

    @property
    def complete(self) -> bool:
        return len(self.versions) == self.places

    def take(self) -> list[ClosedGroup[G]]:
        """Places to hand on now, each once."""
        due = list(self.waiting)
        if self.hold != "nothing":
            due.sort()
            gap = next((p for p in range(self.places) if p not in self.versions), self.places)
            done = self.places if self.hold == "all" else gap
            due = [p for p in due if p < done] if self.hold == "turn" or self.complete else []
        return [self.waiting.pop(p) for p in due]


class Pipeline(Generic[G, R]):
    """Runs steps `version` + 1 to `last_step`; see the module. A context manager: leaving it ends the training thread.

    The first error of either thread comes out of `step`, with its own traceback; after it the pipeline is closed. The
    training thread cannot be interrupted inside a learner call: `close` waits for that call at most `patience_s`.
    """

    def __init__(
        self,
        source: GroupSource[G],
        learner: Learner[G, R],
        settings: PipelineSettings,
        *,
        last_step: int,
        version: int = 0,
        timeline: Timeline | None = None,
        patience_s: float = 60.0,
    ) -> None:
        self.source, self.learner, self.settings, self.last_step = (
            source,
            learner,
            settings,
            last_step,
        )
        self.timeline = timeline or Timeline()
        self.version, self.patience_s = version, patience_s
        self._opened = version  # the last step whose places were opened
        self._open: dict[int, _Step[G]] = {}
        threaded = settings.schedule != "serial" and not settings.apart
        self._lock: Any = FairLock() if threaded else nullcontext()
        self._closed = False
        self._trainer: TrainingThread[R] | None = None
        if threaded:
            self._trainer = TrainingThread(
                self.exclusive, self.timeline, lambda: self._lock.contended
            )

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Hold the policy alone: inference and training wait. For whoever else uses shared modules inside a step."""
        with self._lock:
            yield

    def make_way(self) -> None:
        """Of a learner, inside of a call: inference may use the policy now, one batch if one waits. See the module."""
        if self._trainer is not None:
            self._trainer.make_way()

    def __enter__(self) -> Pipeline[G, R]:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def at_rest(self) -> bool:
        """Whether nothing trains in another thread, once it is closed."""
        return self._trainer is None or self._trainer.ended

    def close(self) -> None:
        """End the training thread; groups not added yet are dropped. May be called more than once."""
        self._closed = True
        if self._trainer is not None and not self._trainer.close(self.patience_s):
            _LOG.warning(
                "the training thread is still inside a call after %g s and is left behind",
                self.patience_s,
            )

    def step(self, step: int) -> Outcome[R]:
        """Roll out and train `step` (steps follow each other). Raises whatever the source or the learner raised first."""
        assert step == self.version + 1 and step <= self.last_step, (
            f"step {step} after version {self.version}"
        )
        if self._closed:
            raise MMRLError(
                "this pipeline was closed, or an earlier step failed; resume with a new one"
            )
        began = time.monotonic()
        self.timeline.begin_step(step, began)
        try:
            if self.settings.apart:
                outcome = self._train_as_they_come(step, began)
            elif self._trainer:
                outcome = self._train_apart(step, began)
            else:
                outcome = self._train_here(step, began)
            self.version = step
            del self._open[step]
            self.source.publish(step)
        except BaseException as error:
            first = self._trainer.error if self._trainer is not None else None
            self.close()
            if first is not None and first is not error and isinstance(error, Exception):
                raise first from error  # training failed before the rollout did
            raise
        finally:
            self.timeline.end_step(step)
        return outcome

    def _train_here(self, step: int, began: float) -> Outcome[R]:
        """Serial: roll out, then train, in this thread."""
        self._open_up_to(step)
        state = self._open[step]
        while not state.complete:
            self._advance(step)
        due = state.take()
        with self.timeline.span("train", "train", step=step):
            self.learner.begin(step)
            while due:
                if (group := due.pop(0).group) is not None:
                    self.learner.add(group)
            group = None
            result = self.learner.finish()
        return self._outcome(step, result, began)

    def _train_as_they_come(self, step: int, began: float) -> Outcome[R]:
        """The source works elsewhere: add what it closes, in this thread, while it goes on."""
        self.learner.begin(step)
        self._open_up_to(min(step + self.settings.staleness, self.last_step))
        state = self._open[step]
        while True:
            for closed in state.take():
                if closed.group is not None:
                    with self.timeline.span(
                        "train", "train", kind="add", step=step, place=closed.place
                    ):
                        self.learner.add(closed.group)
            if state.complete:
                break
            self._advance(step)
        state.drained_at = time.monotonic()
        with self.timeline.span("train", "train", kind="finish", step=step):
            result = self.learner.finish()
        return self._outcome(step, result, began)

    def _train_apart(self, step: int, began: float) -> Outcome[R]:
        """Pipelined and async: hand groups on as they close, roll out on until the step is trained."""
        trainer = self._trainer
        assert trainer is not None
        trainer.put(lambda: self.learner.begin(step), "begin", step)
        asked = False
        while True:
            trainer.check()
            self._open_up_to(min(step + self.settings.staleness, self.last_step))
            state = self._open[step]
            self._hand_on(trainer, state, step)
            if state.complete and not asked:
                asked, state.drained_at = True, time.monotonic()
                trainer.put(self.learner.finish, "finish", step)
            if asked and trainer.done(step):
                return self._outcome(step, trainer.result, began)
            if all(s.complete for s in self._open.values()):
                trainer.wait(step)
            else:
                self._advance(step)

    def _hand_on(self, trainer: TrainingThread[R], state: _Step[G], step: int) -> None:
        for closed in state.take():
            if closed.group is not None:
                trainer.put(_call(self.learner.add, closed.group), "add", step, closed.place)

    def _open_up_to(self, step: int) -> None:
        while self._opened < step:
            self._opened += 1
            places = self.source.start(self._opened)
            serial, keyed = self.settings.schedule == "serial", self.settings.order == "key"
            self._open[self._opened] = _Step(
                places, "all" if serial else "turn" if keyed else "nothing"
            )

    def _advance(self, step: int) -> None:
        """One round of the rollout: an inference batch if one is due, and whatever environments have answered."""
        batch = self.source.ready()
        if batch is not None:
            with self.exclusive():
                version = self._acting_version()
                with self.timeline.span("infer", "infer", step=step, version=version):
                    closed = self.source.infer(batch, version)
            self._take(closed)
        if running := self.source.running:
            self.timeline.count("environments at work", running)
            self._take(self.source.poll(0.0 if batch is not None else _POLL_S))
        elif batch is None:
            missing = {
                s: state.places - len(state.versions)
                for s, state in self._open.items()
                if not state.complete
            }
            raise MMRLError(
                f"the source of groups has nothing under way, but places are open ({missing} by step): it lost them; "
                "this is a defect of the source"
            )

    def _acting_version(self) -> int:
        """Of the weights that inference uses, which are a step's as soon as finish() returned."""
        return self.version if self._trainer is None else max(self.version, self._trainer.finished)

    def _take(self, found: Sequence[ClosedGroup[G]]) -> None:
        for closed in found:
            state = self._open[closed.step]
            if (
                closed.group is not None
                and closed.step - 1 - closed.version > self.settings.staleness
            ):
                state.stale += 1
                if state.stale > _MAX_STALE * state.places:
                    raise MMRLError(
                        f"step {closed.step}: {state.stale} groups were older than staleness {self.settings.staleness} "
                        f"allows (the last: version {closed.version}); the actor does not take over new weights"
                    )
                self.source.again(closed)
            else:
                state.close(closed)
        if found:
            self.timeline.count(
                "groups closed, not handed on", sum(len(s.waiting) for s in self._open.values())
            )

    def _outcome(self, step: int, result: R, began: float) -> Outcome[R]:
        state, now = self._open[step], time.monotonic()
        kept = [version for version in state.versions.values() if version is not None]
        return Outcome(
            step,
            result,
            len(kept),
            state.places - len(kept),
            state.stale,
            now - began,
            now - state.drained_at if state.drained_at else 0.0,
            max((step - 1 - v for v in kept), default=0),
        )


def _call(function: Callable[[G], None], group: G) -> Callable[[], None]:
    return lambda: function(group)
