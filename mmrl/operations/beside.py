"""What goes on around and beside a trainer's loop: the lock of its folder, signals, metrics."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from mmrl.errors import ConfigError
from mmrl.operations.interrupts import Interrupts
from mmrl.operations.prometheus import metrics_endpoint
from mmrl.operations.restart import resume_command_of

__all__ = ["holding", "operating", "stop_if_asked"]


@contextmanager
def holding(trainer: Any) -> Iterator[None]:
    """The run's folder is this launch's alone, as it was when the trainer was made. Collective.

    Raises ConfigError where another launch trains there, or has trained there since.
    """
    with ExitStack() as stack:
        with trainer.world.raise_on_all_ranks():
            if trainer.world.is_main:
                stack.enter_context(
                    trainer.folder.held(resume=trainer.resume, overwrite=trainer.overwrite)
                )
                newest = max(trainer.checkpoints.steps(), default=0)
                if trainer.resume and newest != trainer.start.newest:
                    raise ConfigError(
                        f"expected {trainer.folder.path} as it was when this trainer was made, with its last checkpoint of step "
                        f"{trainer.start.newest}, found one of step {newest}; make a new trainer with resume=True"
                    )
            trainer.world.barrier()
        yield


@contextmanager
def operating(trainer: Any) -> Iterator[Interrupts]:
    """What goes on beside a trainer's loop while it is open: signals are taken in, metrics are served.

    Enter it when everything that the run starts is up: Ray and others set signal handlers of their own, which these replace.
    """
    main = trainer.world.is_main

    def abandoned(name: str) -> None:
        if main:
            trainer.folder.finish("interrupted", signal=name)

    settings, told = trainer.config.operations, trainer.on_event
    with (
        metrics_endpoint(settings, trainer.config.name, trainer.world.rank, told)
        if main
        else _as_is(told) as trainer.on_event
    ):
        try:
            with Interrupts(
                settings.grace_s, abandoned, go_on=resume_command_of(trainer.config)
            ) as interrupts:
                yield interrupts
        finally:
            trainer.on_event = told


def stop_if_asked(trainer: Any, step: int, *, saved: bool) -> None:
    """End the run after `step`, with its checkpoint, if a signal asked for it (raises Interrupted); check the folder's lock.

    All processes call it after the same steps. `saved`: the checkpoint of `step` is written already, or there is nothing to save.
    """
    if trainer.world.is_main:
        trainer.folder.lock.check()

    # without metrics: no candidate for the best checkpoint, as the undisturbed run has none here
    def save() -> None:
        trainer._checkpoint(step, {})

    trainer.interrupts.stop_if_asked(
        trainer.world,
        step,
        lambda: max(trainer.checkpoints.steps(), default=0),
        None if saved else save,
    )


@contextmanager
def _as_is(told: Any) -> Iterator[Any]:
    yield told
