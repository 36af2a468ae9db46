"""Generation that overlaps training: a process with a copy of the weights rolls out while the training processes train.

    with Generator(config, world, make, ledger, SharedWeights(policy.trainable()), ...) as generator:
        generator.publish(engine, version=0)                  # collective; later after every optimizer step
        groups = GeneratedGroups(generator, places)             # a mmrl.training.pipeline.GroupSource
        evaluation = generator.evaluate(0, full=True, folder=folder)

    training processes                                        generator process (mmrl.training.generator_host)
      learner: gradients of the groups as they come     <--     engine with weights of its own, encoder, rewards or simulators
      weights into shared memory, never waiting         -->     newest weights between two pieces of work, never in one

Who owns what. The main training process owns the generator and its pipe; the others get their groups from it when a step's have all
closed, dealt by their tokens (`_deal`). Weights are gathered once, collectively, by whoever trains, and written to shared memory
by the main process (mmrl.rollout.shared_weights). Steps are opened as for threads (mmrl.training.pipeline): step t + staleness when
t begins, so that a group is at most `staleness` versions old, and a slow or long one keeps its place in its step.

What is lost when a process dies. The generator: what it was just making. Another one is started with the weights of now and told
what had arrived (`Ledger.resume_point`); it makes the rest, so that every place of every step is trained on exactly once. The
trainer: what any run loses, the steps since its last checkpoint; the generator ends with it, and a resumed run starts one that goes
on behind the last trained step.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from mmrl.config import RunConfig
from mmrl.diagnostics.timeline import Timeline
from mmrl.distributed.engines import TrainEngine
from mmrl.distributed.engines.build import stored_to_sample
from mmrl.distributed.world import World
from mmrl.errors import RolloutError
from mmrl.registry import carried
from mmrl.rollout.shared_weights import SharedWeights
from mmrl.training.generator_host import Evaluated, Failed, Made, Order, Start, serve
from mmrl.training.media_record import MediaRecord
from mmrl.training.pipeline import ClosedGroup
from mmrl.training.rollouts import HostableRollouts, Ledger
from mmrl.types import RolloutGroup
from mmrl.workers.process import ChildError, Losses
from mmrl.workers.spawned import Worker

__all__ = ["GeneratedGroups", "Generator", "weights_room"]

_LOG = logging.getLogger(__name__)
_WAIT_S = 1.0


def weights_room(policy: Any, config: RunConfig, world: World) -> SharedWeights | None:
    """Room for what is trained of `policy`, in the types that the generator process samples from: in the main process."""
    if not world.is_main:
        return None
    return SharedWeights(policy.trainable(), policy.copied_types(stored_to_sample(config)))


class _Process(Worker):
    """It starts processes itself: rewards, media, simulators. They end with it."""

    daemon = False


class Generator:
    """The generator process of a run, as its training processes see it; only the main one has a `worker`. See the module.

    `make`: (config, world) -> the rollouts, as mmrl.training.trainer makes them; picklable. `weights`: room for what is trained,
    on the main process. Raises what the process raised,
    RolloutError when it could not start or was lost too often.
    """

    def __init__(
        self,
        config: RunConfig,
        world: World,
        make: Callable[[Any, World], HostableRollouts],
        ledger: Ledger,
        weights: SharedWeights | None,
        *,
        media: MediaRecord,
        timeline: Timeline,
    ) -> None:
        self.config, self.world, self.ledger = config, world, ledger
        self.media, self.timeline = media, timeline
        self._settings = config.engine.generator
        self._losses = Losses(self._settings.restarts)
        self.version = -1
        self.restarts = 0
        self.opened: list[int] = []  # steps with places that have not closed
        self._evaluation: Order | None = None
        self._kept: list[ClosedGroup[Any]] = []  # arrived, not polled yet
        self.worker: _Process | None = None
        self._tasks = b""
        if world.is_main:
            self._make = make
            specs = {s.task for s in (*config.data.train, *config.data.eval)}
            self._tasks = carried(specs)
            assert weights is not None, "the main process has room for them"
            self.weights = weights

    def __enter__(self) -> Generator:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """End the process. May be called more than once."""
        worker, self.worker = self.worker, None
        if worker is None:
            return
        self.weights.close()
        # at work it would end only after that
        if self.opened or not worker.ready:
            worker.kill()
        else:
            worker.close()

    # orders

    def publish(self, source: TrainEngine, version: int) -> dict[str, float]:
        """Give away the weights of `version` (steps trained); metrics of that. Collective. The first time it starts the process."""
        began = time.perf_counter()
        named = source.parameters(trainable=True)
        self.version = version
        if not self.world.is_main:
            for _ in named:
                pass
            return {}
        self.weights.write(version, named)
        if self.worker is None:
            self._start()
        self._tell(Order("weights", version))
        return {"time/sync": time.perf_counter() - began}

    def open(self, step: int) -> None:
        """Roll out the places of `step`."""
        self.opened.append(step)
        self._tell(Order("open", step))

    def evaluate(self, step: int, *, full: bool, folder: Path) -> Any:
        """What RolloutSource.evaluate returns there, on all processes. Groups that close meanwhile are kept. Collective."""
        found: Any = None
        with self.world.raise_on_all_ranks():
            if self.world.is_main:
                self._evaluation = Order("evaluate", step, full, folder.absolute())
                self._tell(self._evaluation)
                while not isinstance(found := self._receive(_WAIT_S), Evaluated):
                    self._keep(found)
                self._evaluation, found = None, found.evaluation
        return self.world.gather([found])[0]

    def poll(self, timeout_s: float) -> list[ClosedGroup[Any]]:
        """Places that have closed, waiting at most so long for the first."""
        self._keep(self._receive(timeout_s))
        closed, self._kept = self._kept, []
        return closed

    def _keep(self, message: Made | Evaluated | None) -> None:
        if isinstance(message, Made):
            self.ledger.add(message.work)
            self.timeline.extend(message.spans)
            self.media.learn(message.media)
            self._kept += map(self.ledger.whole, message.closed)

    def _tell(self, order: Order) -> None:
        assert self.worker is not None, "weights are published before anything else is asked for"
        with suppress(OSError):  # a process that is gone is noticed when its answer is read
            self.worker.connection.send(order)
        if self.worker.ready:
            self.worker.begin(self._settings.timeout_s)

    # messages, and the process's life

    def _start(self) -> None:
        # the device as torch names it; of a launched process its own
        device = self._settings.device or str(self.world.device)
        start = Start(
            self._make, self.config, self.weights, self._tasks, self.ledger.resume_point()
        )
        if self.worker is None:
            self.worker = _Process(serve, (start, device), "mmrl-generator")
        else:
            self.worker.args = (start, device)
            self.worker.restart()
        self.worker.begin(self._settings.start_s)

    def _receive(self, timeout_s: float) -> Made | Evaluated | None:
        """The next message, waiting at most so long; None without one. Raises what the process said it ended with."""
        worker = self.worker
        assert worker is not None
        try:
            if not worker.connection.poll(timeout_s):
                if worker.late:
                    raise worker.error("timeout", f"gave no sign of life in {worker.limit_s:g} s")
                return None
            if not worker.ready:
                worker.await_ready(0.0)
                worker.begin(self._settings.timeout_s)
                return None
            message = worker.receive()
        except ChildError as error:
            self._lost(error)
            return None
        if isinstance(message, Failed):
            raise message.error
        worker.begin(self._settings.timeout_s)
        return message

    def _lost(self, error: ChildError) -> None:
        """Start another process, which goes on with what has not arrived. Raises RolloutError."""
        assert self.worker is not None
        if error.death.cause == "refused":
            raise RolloutError(
                f"the generator process could not start: {error.death.said}"
            ) from error
        if self._losses.lost():
            raise RolloutError(
                f"expected the generator process to be lost at most {self._losses.limit} times (engine.generator.restarts), "
                f"found once more: {error}. A process that is killed by SIGKILL usually met the end of memory"
            ) from error
        self.restarts += 1
        _LOG.warning("%s; another one is started (%d)", error, self.restarts)
        self._start()
        self._tell(Order("weights", self.version))
        for step in self.opened:
            # what arrived during an evaluation may be a whole step that was not polled yet
            if not self.ledger.ended(step):
                self._tell(Order("open", step))
        if self._evaluation is not None:
            self._tell(self._evaluation)


class GeneratedGroups:
    """The groups of a generator process as a mmrl.training.pipeline.GroupSource of each training process.

    With one training process a group is handed on when it arrives. Several get theirs when the step's have all closed: places of
    others stay empty.
    """

    def __init__(self, generator: Generator, places: int) -> None:
        self.generator, self.world, self.places = generator, generator.world, places
        self._left: dict[int, set[int]] = {}  # places that have not closed, by step
        self._closed: dict[int, list[ClosedGroup[RolloutGroup]]] = {}  # of several processes
        self.on_publish: Callable[[int], None] = lambda version: None

    def start(self, step: int) -> int:
        """See GroupSource."""
        self._left[step] = set(range(self.places))
        if self.world.is_main:
            self.generator.open(step)
        return self.places

    def poll(self, timeout_s: float) -> list[ClosedGroup[RolloutGroup]]:
        """See GroupSource. With several processes it waits for the oldest open step to close. Collective then."""
        if self.world.size == 1:
            return list(self._fresh(timeout_s))
        step = min(self._left)
        if self.world.is_main:
            while self._left[step]:
                for closed in self._fresh(_WAIT_S):
                    self._closed.setdefault(closed.step, []).append(closed)
        shares = _deal(self._closed.pop(step), self.world.size) if self.world.is_main else None
        mine = self.world.deal(shares)
        del self._left[step]
        empty = set(range(self.places)) - {c.place for c in mine}
        return mine + [ClosedGroup(step, place, None, step - 1) for place in sorted(empty)]

    def _fresh(self, timeout_s: float) -> Iterator[ClosedGroup[RolloutGroup]]:
        """Places that closed for the first time: after a loss some are named again."""
        for closed in self.generator.poll(timeout_s):
            left = self._left.get(closed.step, set())
            if closed.place not in left:
                continue
            left.discard(closed.place)
            if not left:
                self.generator.opened.remove(closed.step)
                if self.world.size == 1:
                    del self._left[closed.step]
            yield closed

    @property
    def running(self) -> int:
        """See GroupSource."""
        return len(self._left)

    def ready(self) -> None:
        """See GroupSource: nothing, the process infers by itself."""

    def infer(self, batch: Any, version: int) -> list[ClosedGroup[RolloutGroup]]:
        """Never called."""
        raise AssertionError("ready() never asks for it")

    def again(self, closed: ClosedGroup[RolloutGroup]) -> None:
        """Never called: a step is opened only once the process has weights that are new enough for it."""
        raise AssertionError(f"{closed.step}: place {closed.place} has version {closed.version}")

    def publish(self, version: int) -> None:
        """See GroupSource: the weights were given away when they were made."""
        self.on_publish(version)


def _deal(
    closed: Sequence[ClosedGroup[RolloutGroup]], parts: int
) -> list[list[ClosedGroup[RolloutGroup]]]:
    """A step's groups for so many processes, longest first, each to the one with the fewest tokens so far; in order of their
    places."""
    shares: list[list[ClosedGroup[RolloutGroup]]] = [[] for _ in range(parts)]
    loads = [0] * parts
    for one in sorted(
        (c for c in closed if c.group is not None), key=lambda c: (-_cost(c), c.place)
    ):
        least = loads.index(min(loads))
        shares[least].append(one)
        loads[least] += _cost(one)
    return [sorted(share, key=lambda c: c.place) for share in shares]


def _cost(closed: ClosedGroup[RolloutGroup]) -> int:
    """Tokens that the group's rollouts wrote, with the prompts of their turns where they are known."""
    assert closed.group is not None
    return sum(
        len(t.token_ids) + (t.prompt.length if t.prompt is not None else 0)
        for r in closed.group.rollouts
        for t in r.turns
    )
