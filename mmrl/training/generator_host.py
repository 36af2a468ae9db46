"""The generator process: it rolls out, scores and evaluates with a copy of the weights (engine.generator.kind process).

`serve` is what the process runs; mmrl.training.generator starts it and talks to it. It holds the same RolloutSource as an inline
run, made of the same configuration, and drives it as mmrl.training.pipeline does, without a learner.

Between two pieces of work (a wave of answers with all their turns; a batch of decisions) it takes the newest weights, if there are
newer ones, so that no answer and no decision mixes two versions; with schedule.partial_rollouts also between two tokens of a wave
(PrefillOnceEngine.renew), each of which names its version. What it made is sent by a thread of its own: a busy trainer holds
nobody up, and how far ahead this gets is bounded by the steps that the trainer has opened.
"""

from __future__ import annotations

import os
import pickle
import queue
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import torch

from mmrl.config import RunConfig, effective_threads
from mmrl.config.engine import GeneratorConfig
from mmrl.diagnostics.timeline import Span
from mmrl.distributed.engines.build import stored_to_sample
from mmrl.distributed.engines.local import LocalEngine
from mmrl.distributed.launch import VARIABLES
from mmrl.distributed.world import World
from mmrl.errors import MMRLError
from mmrl.operations.startup import loaded, loading
from mmrl.registry import adopt
from mmrl.rollout import PrefillOnceEngine
from mmrl.rollout.shared_weights import SharedWeights
from mmrl.training.media_record import MediaRecord
from mmrl.training.pipeline import ClosedGroup
from mmrl.training.rollouts import HostableRollouts, RunContext

__all__ = ["Evaluated", "Failed", "Made", "Order", "Start", "own_config", "serve"]

_POLL_S = 0.02  # waiting for environments before it looks for orders


@dataclass(frozen=True)
class Start:
    """What a generator process is made of. `tasks`: mmrl.registry.carried; `resume`: Ledger.resume_point."""

    make: Callable[[Any, World], HostableRollouts]
    config: RunConfig
    weights: SharedWeights
    tasks: bytes
    resume: Any


@dataclass(frozen=True)
class Order:
    """What the trainer wants: roll out `step` ('open'); weights of version `step` are there ('weights'); evaluate them."""

    kind: Literal["open", "weights", "evaluate"]
    step: int
    full: bool = False
    folder: Path | None = None


@dataclass(frozen=True)
class Made:
    """Places that closed and what happened meanwhile (HostedWork.take), with `spans` of its timeline and the files that
    were read (MediaRecord)."""

    closed: list[ClosedGroup[Any]]
    work: Any
    spans: list[Span]
    media: list[Any]


@dataclass(frozen=True)
class Evaluated:
    """The answer to an order to evaluate."""

    evaluation: Any


@dataclass(frozen=True)
class Failed:
    """It ends with an error, which another process would meet again."""

    error: MMRLError


def own_config(config: RunConfig, device: str) -> RunConfig:
    """The run's configuration as the generator process has it: one process that does not train, on `device`."""
    alone = {"generator": GeneratorConfig(), "train": "auto", "sequence_parallel": 1}
    engine = config.engine.model_copy(update=alone)
    kl = config.algorithm.kl.model_copy(update={"coef": 0.0})  # no reference model
    return config.model_copy(
        update={
            "engine": engine,
            "model": config.model.model_copy(update={"device": device}),
            "algorithm": config.algorithm.model_copy(update={"kl": kl}),
        }
    )


def _settle(config: RunConfig, device: str) -> RunConfig:
    """Make this process one by itself, whatever launched its parent, and a GPU of its own the only one that it sees: engines that
    take the first one take the right one."""
    for name in VARIABLES:
        os.environ.pop(name, None)
    if device.startswith("cuda:"):
        number = int(device.removeprefix("cuda:"))
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        os.environ["CUDA_VISIBLE_DEVICES"] = visible.split(",")[number] if visible else str(number)
        device = "cuda:0"
    config = own_config(config, device)
    if (threads := effective_threads(config)) is not None:
        torch.set_num_threads(threads)
    torch.manual_seed(config.seed)
    return config


def serve(connection: Connection, progress: Any, start: Start, device: str) -> None:
    """Roll out as ordered until None comes; see the module."""
    outbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
    sender = threading.Thread(
        target=_send, args=(connection, outbox), daemon=True, name="mmrl-send"
    )
    loading()
    try:
        with ExitStack() as stack:
            try:
                adopt(start.tasks)
                host = _Host(start, _settle(start.config, device), connection, outbox, stack)
            except Exception as error:
                connection.send(f"{type(error).__name__}: {error}")
                raise
            loaded()
            connection.send(None)
            sender.start()
            host.run()
    except (EOFError, ConnectionResetError, BrokenPipeError):
        raise  # the trainer is gone
    except Exception as error:
        if not sender.is_alive():
            raise
        outbox.put(Failed(_portable(error)))
    outbox.put(None)
    if sender.is_alive():
        sender.join()


def _portable(error: Exception) -> MMRLError:
    """The error as the trainer can read and raise it."""
    if isinstance(error, MMRLError):
        with suppress(Exception):  # whatever a class of somebody's does when it is copied
            copied = pickle.loads(pickle.dumps(error))
            if type(copied) is type(error):
                return error
        return MMRLError(str(error))
    return MMRLError(
        f"generator process: {type(error).__name__}: {error}\n{''.join(traceback.format_exception(error))}"
    )


def _send(connection: Connection, outbox: queue.SimpleQueue[Any]) -> None:
    """Send what is put into the outbox, in order, until None comes."""
    while (message := outbox.get()) is not None:
        try:
            connection.send(message)
        except (BrokenPipeError, ConnectionResetError):
            os._exit(1)  # the trainer is gone: nobody to roll out for
        except Exception as error:  # what cannot be pickled, such as an object in a reward's detail
            with suppress(OSError):
                connection.send(Failed(_portable(error)))
            os._exit(1)


class _Host:
    """The rollouts of one process, and the loop that drives them."""

    def __init__(
        self,
        start: Start,
        config: RunConfig,
        connection: Connection,
        outbox: queue.SimpleQueue[Any],
        stack: ExitStack,
    ) -> None:
        self._connection, self._outbox, self._shared = connection, outbox, start.weights
        self._bound = config.schedule.staleness if config.schedule.kind == "async" else 0
        world = World(torch.device(config.model.device) if config.model.device else None)
        self.source = start.make(config, world)
        policy = self.source.load_policy(None, stored_to_sample(start.config))
        self._weights = [(name, p.detach()) for name, p in policy.trainable()]
        self._media = MediaRecord()
        # what a rollout engine with another copy of the weights takes them from
        engine = LocalEngine(config.optim, world, policy, None)  # type: ignore[arg-type]
        self.source.build(policy, policy)
        stack.enter_context(
            self.source.open(RunContext(policy, policy, policy, engine, self._media))
        )
        self.work = self.source.hosted()
        self.work.resume(start.resume)
        self._open: dict[int, int] = {}  # places that are open, by step
        self._newest = self._version = -1
        self._ended = self._evaluates = False
        if config.schedule.partial_rollouts:
            sampler = getattr(self.source, "engine", None)
            assert isinstance(sampler, PrefillOnceEngine), "the configuration allows no other"
            sampler.renew = self._renew

    def run(self) -> None:
        """Until None comes."""
        while True:
            self._obey()
            if self._ended:
                return
            self._take_weights()
            self._advance()

    def _obey(self) -> None:
        """Read the orders that are there; wait for one where nothing is to be done."""
        while not self._ended and (not self._open or self._connection.poll()):
            order = self._connection.recv()
            if order is None:
                self._ended = True
            elif order.kind == "open":
                self._open[order.step] = self.source.groups.start(order.step)
            elif order.kind == "weights":
                self._newest = order.step
            else:
                assert order.folder is not None
                self._tell([])
                self._take_weights()
                self._evaluates = True
                found = self.work.evaluate(order.step, full=order.full, folder=order.folder)
                self._evaluates = False
                self._tell([])
                self._outbox.put(Evaluated(found))

    def _take_weights(self) -> None:
        """Act with the newest weights. While still newer ones are being written go on with those there are, if that is allowed."""
        if self._newest <= self._version:
            return
        least = max(self._open, default=self._newest) - 1 - self._bound
        if self._shared.version < 0 and self._version >= max(least, 0) and self._open:
            return
        self._read()

    def _read(self) -> None:
        while (found := self._shared.read(self._weights)) is None:
            time.sleep(0.001)
        self._version = self._newest = found
        self.work.act_with(found)

    def _renew(self) -> bool:
        """Partial rollouts, between two tokens: take newer weights that are whole. An evaluation is of one version."""
        if self._evaluates or self._shared.version <= self._version:
            return False
        self._read()
        return True

    def _advance(self) -> None:
        """One piece of work."""
        groups = self.source.groups
        batch = groups.ready()
        closed = [] if batch is None else list(groups.infer(batch, self._version))
        if groups.running:
            closed += groups.poll(0.0 if batch is not None else _POLL_S)
        elif batch is None:
            raise MMRLError(
                f"the source of groups has nothing under way, but places are open ({self._open} by step): it lost them; "
                "this is a defect of the source"
            )
        for one in closed:
            self._open[one.step] -= 1
            if not self._open[one.step]:
                del self._open[one.step]
        self._tell(closed)

    def _tell(self, closed: list[ClosedGroup[Any]]) -> None:
        work = self.work.take()
        if closed or work:
            told = [self.work.portable(c) for c in closed]
            spans = self.source.timeline.take()
            self._outbox.put(Made(told, work, spans, self._media.take_new()))
