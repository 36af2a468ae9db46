"""Supervised fine-tuning before RL: right answers, or demonstrations, with the encoder, packing and optimizer of RL.

    mmrl sft configs/tiny_warmstart.yaml
    torchrun --nproc_per_node 8 -m mmrl.cli.main sft configs/grounding.yaml engine.train=fsdp2

RL sharpens what a policy already does now and then; this teaches it to do so. Loss: mean negative log-likelihood of the target
tokens. What is learned from is said by a `SupervisedSource`: the gold answers of data sets (mmrl.training.gold_answers) or recorded
episodes (mmrl.robotics.sft); `RunConfig.supervised_source` names the one of a configuration.

Several processes make the steps of one: each takes its share of a step's examples, on any engine of mmrl.distributed.engines; the
loss is summed and divided once by the tokens of all, and failures are counted over all.
"""

from __future__ import annotations

import pkgutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch

from mmrl.config import RunConfig
from mmrl.distributed.engines import (
    TrainEngine,
    accelerator_options,
    build_actor,
    build_train_engine,
    train_engine_name,
)
from mmrl.distributed.engines.lockstep import agree
from mmrl.distributed.world import World
from mmrl.errors import DataError
from mmrl.operations.startup import loaded
from mmrl.policy.pack import within_budget
from mmrl.training.optim import build_optimizer
from mmrl.training.preflight import check_model_folder, check_training_packages
from mmrl.training.supervised_checkpoints import SupervisedCheckpoints

__all__ = ["Failed", "SupervisedSource", "run_sft", "supervised_source", "supervised_world"]

Example = TypeVar("Example")

_MAX_FAILURE_SHARE = 0.2  # of a step's examples


@dataclass(frozen=True)
class Failed:
    """An example that could not be made: its place among those of the step, over all processes, and the row that says why (step,
    source, id, reason)."""

    place: int
    row: Mapping[str, Any]


class SupervisedSource(Protocol[Example]):
    """What a supervised run learns from. Made of its configuration and the processes it runs in, before a model is loaded: what
    cannot work (a data set that is missing) raises ConfigError or DataError then.

    Calls come in this order: `load_policy`, unless there is a policy already; `open`, and inside it `skip` where a run goes on, for
    each step `draw`, and `loss` for each of its micro-batches; `save`, in the main process alone. An Example is whatever these make
    of it.
    """

    steps: int
    """Optimizer steps."""

    batch: int
    """Examples of a step, over all processes."""

    lr_key: str
    """The learning rate's name in the configuration, for messages."""

    save_every: int
    """Steps between checkpoints; 0: none."""

    measures: Sequence[str]
    """Names of what `loss` sums beside the loss; each is reported per target token."""

    def load_policy(self, say: Callable[[str], None], weights: Path | None = None) -> Any:
        """The policy that is to learn, with the weights of a checkpoint where one is given; `say` is told what takes long.
        Collective."""

    def open(self, policy: Any, engine: TrainEngine) -> AbstractContextManager[None]:
        """Workers are up while it is open; `engine` runs the forwards of `policy`."""

    def skip(self, steps: int) -> None:
        """The first `steps` steps were drawn before the run was interrupted."""

    def draw(self, step: int) -> tuple[list[Example], list[Failed]]:
        """This process's share of the examples of step `step` (from 1), and those of it that failed."""

    def size(self, example: Example) -> tuple[int, int]:
        """Tokens that the example has in a micro-batch, and its target tokens."""

    def idle(self) -> Example:
        """The smallest example there is, for forwards that count for nothing (mmrl.distributed.engines.lockstep)."""

    def loss(self, examples: Sequence[Example]) -> tuple[torch.Tensor, Sequence[float]]:
        """The negative log-likelihood of a micro-batch, summed over its target tokens, and the sums of `measures`."""

    def save(self, policy: Any, folder: Path) -> None:
        """Write the policy that was trained, as `mmrl train` loads it."""


def supervised_world(config: RunConfig) -> World:
    """The processes of the launcher. Raises ConfigError where engine.train does not go with their number."""
    asked = config.supervised()
    device = torch.device(asked.model.device) if asked.model.device else None
    world = World(device, **accelerator_options(asked))
    train_engine_name(asked, world.size)
    return world


def supervised_source(config: RunConfig, world: World) -> SupervisedSource[Any]:
    """What `config` learns from, once what training it needs is found to be there (mmrl.training.preflight). Raises
    MissingExtraError, ConfigError and DataError in all processes together."""
    make: Callable[[RunConfig, World], SupervisedSource[Any]]
    make = pkgutil.resolve_name(config.supervised_source)
    with world.raise_on_all_ranks():
        check_training_packages(config)
        check_model_folder(config.model.path)
        return make(config, world)


def run_sft(
    policy: Any,
    config: RunConfig,
    on_step: Callable[[int, dict[str, Any]], None] | None = None,
    world: World | None = None,
    source: SupervisedSource[Any] | None = None,
    checkpoints: SupervisedCheckpoints | None = None,
) -> dict[str, Any]:
    """Train for source.steps steps; the main process calls on_step(step, metrics) after each.

    An example that cannot be made (its media cannot be read, its prompt is too long) is left out of the loss: metrics["failed"]
    counts those of the step, metrics["failures"] lists all so far (step, source, id, reason). Metrics are those of all processes
    together, "seconds" apart, and returned in each.

    `world`: the processes of the run, by default `supervised_world(config)`; `source`: by default the configuration's. Where
    engine.train shards the weights (fsdp2, deepspeed_zero3), `policy` holds whole trained ones afterwards in the main process
    alone, in host memory: ready to be saved. `checkpoints`: where the run stands is written there, and it goes on from there, with
    `policy` loaded from `checkpoints.weights`; a signal ends it after a step (Interrupted).

    Raises ConfigError for an engine that does not go with the number of processes, DataError when more than one example and more
    than 20 % of a step fail, or all of it, and NonFiniteError when the loss stops being finite: all processes together.
    """
    world = world or World(policy.device, **accelerator_options(config.supervised()))
    source = source or supervised_source(config, world)
    config = config.supervised()
    with world.raise_on_all_ranks():
        kept = build_actor(config, world, policy, samples=False)
    loaded()
    world.barrier()
    engine = build_train_engine(
        config,
        world,
        policy,
        build_optimizer(policy.trainable(), config.optim, policy.device),
    )
    metrics: dict[str, Any] = {}
    failures: list[Mapping[str, Any]] = []
    with ExitStack() as stack:
        start = 0
        with world.raise_on_all_ranks():
            stack.enter_context(source.open(policy, engine))
            if checkpoints is not None:
                start, failures = checkpoints.step, checkpoints.restore(engine)
                stack.enter_context(checkpoints.open())
            source.skip(start)
        for step in range(start + 1, source.steps + 1):
            began = time.perf_counter()
            with world.raise_on_all_ranks():
                examples, mine = source.draw(step)
            found = world.gather([(f.place, world.rank, f.row) for f in mine])
            failed = [row for _, _, row in sorted(found, key=lambda f: f[:2])]
            failures += failed
            _check_failures(failed, source.batch)
            metrics = {
                **_update(engine, source, examples, config, step, world),
                "failed": len(failed),
                "failures": failures,
                "seconds": time.perf_counter() - began,
            }
            if on_step is not None and world.is_main:
                with world.raise_on_all_ranks():
                    on_step(step, metrics)
            if checkpoints is not None and step < source.steps:
                checkpoints.after(step, source.save_every, kept, engine, failures)
    world.barrier()
    if kept is not policy:
        engine.gather_into(kept)
        policy.adopt_replica(kept)
    return metrics


def _check_failures(failed: Sequence[Mapping[str, Any]], drawn: int) -> None:
    if len(failed) == drawn or len(failed) > max(1, _MAX_FAILURE_SHARE * drawn):
        raise DataError(
            f"step {failed[0]['step']}: expected samples that can be read, found {len(failed)} of {drawn} that cannot "
            f"(limit {_MAX_FAILURE_SHARE:.0%}); fix or remove them; first: {failed[0]['source']}/{failed[0]['id']}: "
            f"{failed[0]['reason']}"
        )


def _visuals(example: Any) -> Sequence[Any]:
    """Pictures and clips of an example of a policy that writes text (no other is computed by several processes)."""
    found: Sequence[Any] = example.prompt.visuals
    return found


def _update(
    engine: TrainEngine,
    source: SupervisedSource[Example],
    examples: Sequence[Example],
    config: RunConfig,
    step: int,
    world: World,
) -> dict[str, float]:
    """One optimizer step on this process's examples; loss and measures per token, gradient norm and tokens, of all processes."""
    share = float(sum(source.size(example)[1] for example in examples))
    if (sequence := engine.sequence) is not None:  # examples of all that compute rows together
        world.barrier()
        examples = sequence.share(examples, _visuals)
    sizes = [source.size(example) for example in examples]
    plan = [
        [examples[i] for i in part]
        for part in within_budget([length for length, _ in sizes], config.train.token_budget)
    ]
    count, total = agree(world, len(plan), share)
    parts = [*plan, *[[]] * (count - len(plan))] if engine.lockstep else plan
    engine.begin(total)
    sums = [0.0] * (1 + len(source.measures))
    # where lockstep, the others are about to run collectives of the engine's own
    with nullcontext() if engine.lockstep else world.raise_on_all_ranks():
        for number, part in enumerate(parts, 1):
            loss, measured = source.loss(part or [source.idle()])
            engine.backward(loss if part else loss * 0.0, last=number == len(parts))
            if part and (sequence is None or sequence.rank == 0):
                found = (float(loss.detach()), *measured)
                sums = [a + b for a, b in zip(sums, found, strict=True)]
    # also where the error of another process is heard of, before gradients are reduced
    sums = world.sum(sums)
    norm, _ = engine.step(
        total,
        step - 1,
        source.steps,
        lambda norm: (
            f"step {step}: the gradient norm is {norm}; lower {source.lr_key} (now {config.optim.lr})"
        ),
    )
    tokens = int(total)
    means = {
        name: value / tokens for name, value in zip(("loss", *source.measures), sums, strict=True)
    }
    return {**means, "grad_norm": norm, "tokens": tokens}
