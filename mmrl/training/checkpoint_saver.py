"""Which checkpoints a run writes, and what becomes of one that cannot be written.

    saver = CheckpointSaver(config, world, checkpoints, context, tell=on_event, alarm=board)
    saver.save(step, metric, state)      # collective; with train.checkpoint sharded it goes on in the background
    saver.settle()                       # says how that ended; with wait=False only if it has

The checkpoint with the largest metric so far is marked as the best. One that cannot be written is an alarm, and the run goes on:
the next may succeed. The last one raises.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from mmrl.config import RunConfig
from mmrl.distributed.world import World
from mmrl.errors import CheckpointError
from mmrl.training.alarms import Alarm
from mmrl.training.checkpoint import Checkpoints
from mmrl.training.identity import run_identity
from mmrl.training.rollouts import RunContext
from mmrl.training.sharded_checkpoint import ShardedSaver

__all__ = ["CheckpointSaver"]


class CheckpointSaver:
    """Saves the checkpoints of one run.

    Args:
        config: the run's; `train.checkpoint` says whether the main process writes all of it or every process its share.
        context: what trains, and what is saved.
        tell: called with ("checkpoint", {step, path, seconds}) for each that has its name, in the main process.
        alarm: called with what could not be written, in the main process.
    """

    def __init__(
        self,
        config: RunConfig,
        world: World,
        checkpoints: Checkpoints,
        context: RunContext,
        *,
        tell: Callable[[str, Any], None],
        alarm: Callable[[Alarm], None],
    ) -> None:
        self.config, self.world, self.checkpoints = config, world, checkpoints
        self._context, self._tell, self._alarm = context, tell, alarm
        self._in_background = ShardedSaver(checkpoints, world)
        # the largest metric of a checkpoint so far, and its step
        self.best: float | None = None
        self.best_step = 0
        # the same without the one that is being written in the background
        self._before: tuple[float | None, int] = (None, 0)

    @property
    def sharded(self) -> bool:
        """Whether every process writes its share, from the weights that train."""
        return self.config.train.checkpoint == "sharded"

    def save(self, step: int, metric: float | None, state: Mapping[str, Any]) -> None:
        """Write the checkpoint of `step`. Collective; without `sharded` the context's `saved` has the weights of now.

        Args:
            metric: what the best one is chosen by; None: it is no candidate.
            state: what a resumed run needs beside weights and optimizer; the main process's is written.
        Raises NonFiniteError for weights that are not finite, CheckpointError when the last one cannot be written.
        """
        if self.sharded:
            self.settle()  # else it is compared with one that may not come to be
        media = self._context.media
        media.learn(self.world.gather(media.take_new()))
        better = metric is not None and (self.best is None or metric > self.best)
        best, best_step = (metric, step) if better else (self.best, self.best_step)
        settings = self.config.model_dump(mode="json") if self.world.is_main else {}
        whole: dict[str, Any] = {}
        if self.world.is_main:
            identity = run_identity(settings)
            whole = {"step": step, "identity": identity, "best": best, "best_step": best_step}
            whole |= state
        write = self._begin if self.sharded else self._write
        try:
            write(step, whole, settings, better)
            self._before = self.best, self.best_step
            self.best, self.best_step = best, best_step
        except CheckpointError as error:
            self._failed(step, error)
        if not self.sharded:
            self.world.barrier()
        elif step == self.config.train.steps:
            self.settle()
            # where others hear of an error of the main process
            self.world.barrier()

    def _write(
        self, step: int, state: dict[str, Any], settings: dict[str, Any], better: bool
    ) -> None:
        """All of it, by the main process."""
        began, training = time.perf_counter(), self._context.training
        with training.collective_section():
            optimizer = training.optimizer_state()
        if optimizer is None:  # another process
            return
        path = self.checkpoints.save(
            step, self._context.saved, optimizer, state, settings, self._context.media.files()
        )
        if better:
            self.checkpoints.mark_best(step)
        seconds = time.perf_counter() - began
        self._tell("checkpoint", {"step": step, "path": path, "seconds": seconds})

    def _begin(
        self, step: int, state: dict[str, Any], settings: dict[str, Any], better: bool
    ) -> None:
        """In the background, by each process its share."""
        context = self._context
        files = context.media.files() if self.world.is_main else {}
        self._in_background.begin(
            step, context.policy, context.training, state, settings, files, best=better
        )

    def settle(self, *, wait: bool = True) -> None:
        """Say how the checkpoint that is being written in the background ended, if it has (with `wait`, as soon as it has)."""
        step = self._in_background.step
        try:
            done = self._in_background.finish(wait=wait)
        except CheckpointError as error:
            self.best, self.best_step = self._before
            self._failed(step, error)
        else:
            if done and self.world.is_main:
                path, seconds = self.checkpoints.path(step), self._in_background.seconds
                self._tell("checkpoint", {"step": step, "path": path, "seconds": seconds})

    def close(self) -> None:
        """Wait for what is being written; what becomes of it is not said: the run has its own end."""
        self._in_background.finish(failing=True)

    def _failed(self, step: int, error: CheckpointError) -> None:
        if step == self.config.train.steps:
            raise error
        if self.world.is_main:
            self._alarm(Alarm(step, "checkpoint_failed", str(error), "error"))
