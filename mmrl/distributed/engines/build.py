"""From `engine.train` to a training engine.

world = World(device, **accelerator_options(config))
actor = build_actor(config, world, policy)           # what samples
saved = build_saved(config, world, policy, actor)           # what is saved
engine = build_train_engine(config, world, policy, optimizer)
engine.gather_into(actor)                                   # where it is not the policy itself; the same for `saved`
"""

from __future__ import annotations

import os
from typing import Any, Protocol, TypeVar

import torch

from mmrl.config import RunConfig
from mmrl.distributed.engines.base import Named, TrainEngine
from mmrl.distributed.engines.local import LocalEngine
from mmrl.distributed.world import World
from mmrl.errors import ConfigError
from mmrl.policy.loading import Hold
from mmrl.policy.sequence_parallel import SequenceGroup, check_heads
from mmrl.policy.storage import Stored

__all__ = [
    "accelerator_options",
    "build_actor",
    "build_saved",
    "build_train_engine",
    "held_back",
    "stored_to_sample",
    "train_engine_name",
]


class Copied(Named, Protocol):
    """A Policy, or a policy made of one."""

    @property
    def device(self) -> torch.device:
        """Where it computes."""

    def full_replica(self: P, device: torch.device | None = None, stored: Stored = "masters") -> P:
        """See Policy.full_replica."""


P = TypeVar("P", bound=Copied)

# what accelerate does in training loops that ask it to -> (its value for nothing, the option, what to do instead)
_ACCELERATES = {
    "ACCELERATE_MIXED_PRECISION": (
        "no",
        "--mixed_precision",
        "and set model.dtype: auto computes in bf16 on a GPU that has it",
    ),
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": (
        "1",
        "--gradient_accumulation_steps",
        "and set train.token_budget: a step is split into micro-batches of so many tokens",
    ),
    "ACCELERATE_DYNAMO_BACKEND": (
        "no",
        "--dynamo_backend",
        "and leave model.fused_layers on: kernels compiled for a GPU",
    ),
}


def accelerator_options(config: RunConfig) -> dict[str, Any]:
    """What accelerate.Accelerator is to be made with.

    Raises MissingExtraError without the engine's library, ConfigError where `accelerate launch` was told of another engine, or of
    what mmrl decides by itself.
    """
    for name, (neutral, option, instead) in _ACCELERATES.items():
        if (found := os.environ.get(name) or neutral).lower() != neutral:
            raise ConfigError(
                f"expected accelerate launch with {option} {neutral}, found {found} ({name}), which would change nothing; "
                f"launch without it (see accelerate config), {instead}"
            )
    if (
        os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true"
        and config.engine.train != "fsdp2"
    ):
        raise ConfigError(
            f"expected engine.train fsdp2 under accelerate launch --use_fsdp, found {config.engine.train}; set "
            "engine.train: fsdp2, or launch without --use_fsdp (see accelerate config)"
        )
    deepspeed = config.engine.train.startswith("deepspeed")
    if os.environ.get("ACCELERATE_USE_DEEPSPEED", "").lower() == "true" and not deepspeed:
        raise ConfigError(
            "expected engine.train deepspeed_zero2 or deepspeed_zero3 under accelerate launch --use_deepspeed, found "
            f"{config.engine.train}; set one of them, or launch without --use_deepspeed (see accelerate config)"
        )
    if not deepspeed:
        return {}
    from mmrl.distributed.engines.deepspeed import plugin

    return plugin(config)


def train_engine_name(config: RunConfig, processes: int) -> str:
    """The engine that `engine.train` means in so many processes. Raises ConfigError where they do not go together."""
    chosen, kind = config.engine.train, config.schedule.kind
    if chosen == "auto":
        chosen = "single" if processes == 1 else "ddp"
    if chosen == "single" and processes > 1:
        raise ConfigError(
            f"expected engine.train auto, ddp, fsdp2 or deepspeed_* in a run of {processes} processes, found single; "
            "set engine.train: auto, or start one process"
        )
    if (parts := config.engine.sequence_parallel) > 1:
        _check_sequence_parallel(parts, processes, config)
    if config.engine.generator.kind == "process":
        if kind == "pipelined" and (processes > 1 or chosen not in ("single", "ddp")):
            raise ConfigError(
                f"expected schedule.kind async or serial with engine.generator process in {processes} process(es) of "
                f"engine.train {chosen}, found pipelined: groups are dealt to them when all have closed, so that nothing would "
                "overlap; set schedule.kind: async"
            )
        return chosen
    if kind != "serial" and processes > 1 and not config.overlaps_in_processes:
        raise ConfigError(
            f"expected schedule.kind serial in a run of {processes} processes, found {kind}: it overlaps "
            "rollout and training within one process; set engine.generator.kind: process and schedule.kind: async, or "
            "start one process, or set schedule.kind: serial"
        )
    if kind != "serial" and chosen not in ("single", "ddp"):
        raise ConfigError(
            f"expected schedule.kind serial with engine.train {chosen}, found {kind}: its forwards wait for other "
            "processes in a fixed order, groups close in any; set engine.generator.kind: process and schedule.kind: async, "
            "or schedule.kind: serial, or engine.train: auto"
        )
    return chosen


def _check_sequence_parallel(parts: int, processes: int, config: RunConfig) -> None:
    """Raises ConfigError where so many processes cannot compute rows `parts` at a time."""
    if processes % parts:
        raise ConfigError(
            f"expected a number of processes that engine.sequence_parallel {parts} divides, found {processes}; start "
            f"{parts} processes or a multiple of them, or set engine.sequence_parallel: 1"
        )
    if config.train.forward != "shared":
        raise ConfigError(
            f"expected train.forward shared with engine.sequence_parallel {parts}, found {config.train.forward}: only "
            "packed rows are split; set train.forward: shared, or engine.sequence_parallel: 1"
        )
    if config.schedule.kind != "serial" and config.engine.generator.kind != "process":
        raise ConfigError(
            f"expected schedule.kind serial with engine.sequence_parallel {parts}, found {config.schedule.kind}: "
            "processes that compute a row together need all groups of the step; set schedule.kind: serial"
        )


def held_back(config: RunConfig, processes: int) -> dict[str, Hold]:
    """What load_policy is to leave in its file, so that neither a device nor a process's own memory ever holds the model whole.
    ZeRO-3 leaves the reference alone."""
    held: dict[str, dict[str, Hold]] = {
        "fsdp2": {"model": "file", "reference": "file"},
        "deepspeed_zero3": {"model": "file"},
    }
    # neither is what `auto` means; whether the schedule goes with it is not asked here: a supervised run has none
    return held.get(config.engine.train, {}) if processes > 1 else {}


def stored_to_sample(config: RunConfig) -> Stored:
    """How a copy of the weights that only samples is stored: as the training engine's own forward has them, so that the log-probs
    of the two are the same ones. FSDP2 gathers every weight in the type of the forward; other engines leave that to autocast."""
    return "all" if config.engine.train == "fsdp2" else "products"


def build_actor(config: RunConfig, world: World, policy: P, *, samples: bool = True) -> P:
    """What samples and is evaluated: `policy`, or its full replica where its parameters are about to be sharded, in the type that
    the forward computes with (mmrl.policy.storage).

    With engine.rollout vllm, and without `samples`, nobody runs the copy: it is there to be saved, see `build_saved`.
    """
    if train_engine_name(config, world.size) not in ("fsdp2", "deepspeed_zero3"):
        return policy
    if samples and config.engine.rollout != "vllm":
        return policy.full_replica(policy.device, stored_to_sample(config))
    return _replica_to_save(world, policy)


def build_saved(config: RunConfig, world: World, policy: P, actor: P) -> P:
    """What the main process saves: `actor`, but where it holds weights in another type than those that train a replica that has
    theirs. It has to be made before they are sharded. With train.checkpoint sharded the weights that train are saved."""
    types = {name: p.dtype for name, p in policy.named_parameters()}
    same = all(p.dtype == types[name] for name, p in actor.named_parameters())
    if same or config.train.checkpoint == "sharded":
        return actor
    return _replica_to_save(world, policy)


def _replica_to_save(world: World, policy: P) -> P:
    """In the main process's host memory; without values in the others."""
    return policy.full_replica(torch.device("cpu" if world.is_main else "meta"))


def build_train_engine(
    config: RunConfig, world: World, policy: Any, optimizer: torch.optim.Optimizer
) -> TrainEngine:
    """The engine that trains `policy`; a sharded one shards its model and switches `optimizer` to the shards, in place.

    Raises ConfigError and MissingExtraError.
    """
    sequence = None
    if (parts := config.engine.sequence_parallel) > 1:
        shape = policy.base.config.text_config
        check_heads(shape.num_attention_heads, shape.num_key_value_heads, parts)
        sequence = SequenceGroup.of(world.size, world.rank, parts)
    engine = _engine(config, world, policy, optimizer)
    engine.sequence = sequence
    return engine


def _engine(
    config: RunConfig, world: World, policy: Any, optimizer: torch.optim.Optimizer
) -> TrainEngine:
    name = train_engine_name(config, world.size)
    if name in ("single", "ddp"):
        together = config.engine.sequence_parallel > 1
        return LocalEngine(config.optim, world, policy, optimizer, lockstep=together)
    if name == "fsdp2":
        from mmrl.distributed.engines.fsdp import FSDPEngine

        return FSDPEngine(config, world, policy, optimizer)
    from mmrl.distributed.engines.deepspeed import DeepSpeedEngine

    return DeepSpeedEngine(config, world, policy, optimizer)
