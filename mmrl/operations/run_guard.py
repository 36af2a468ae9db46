"""Guards of a trainer's loop: the lock of its folder, signals that end it, and the metrics endpoint."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from mmrl.errors import ConfigError
from mmrl.operations.interrupts import Interrupts
from mmrl.operations.prometheus import metrics_endpoint
from mmrl.operations.restart import resume_command_of

__all__ = ["run_lock", "run_signals", "stop_if_requested"]


@contextmanager
def run_lock(trainer: Any) -> Iterator[None]:
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
def run_signals(trainer: Any) -> Iterator[Interrupts]:
    """While a trainer's loop is open: signals are handled, metrics are served.

    Enter it when everything that the run starts is up: Ray and others set signal handlers of their own, which these replace.
    """
    main = trainer.world.is_main

    def abandoned(name: str) -> None:
        if main:
            trainer.folder.finish("interrupted", signal=name)

    settings, on_event = trainer.config.operations, trainer.on_event
    with (
        metrics_endpoint(settings, trainer.config.name, trainer.world.rank, on_event)
        if main
        else _unchanged(on_event) as trainer.on_event
    ):
        try:
            with Interrupts(
                settings.grace_s, abandoned, go_on=resume_command_of(trainer.config)
            ) as interrupts:
                yield interrupts
        finally:
            trainer.on_event = on_event


def stop_if_requested(trainer: Any, step: int, *, saved: bool) -> None:
    """End the run after `step`, with its checkpoint, if a signal asked for it (raises Interrupted); check the folder's lock.

    All processes call it after the same steps. `saved`: the checkpoint of `step` is written already, or there is nothing to save.
    """
    if trainer.world.is_main:
        trainer.folder.lock.check()

    # without metrics: no candidate for the best checkpoint, as the undisturbed run has none here
    def save() -> None:
        trainer.save_checkpoint(step)
        trainer.saver.settle()

    def last_saved() -> int:
        trainer.saver.settle()
        return max(trainer.checkpoints.steps(), default=0)

    trainer.interrupts.stop_if_requested(
        trainer.world,
        step,
        last_saved,
        None if saved else save,
    )


@contextmanager
def _unchanged(on_event: Any) -> Iterator[Any]:
    yield on_event
