"""Where a supervised run stands, so that it can be continued: weights, optimizer and step, beside the folder of its model.

    checkpoints = SupervisedCheckpoints(Path("runs/sft/model"), config, world, resume=True)
    policy = source.load_policy(say, checkpoints.weights)
    run_sft(policy, config, on_step, world, source, checkpoints)
    checkpoints.remove()                                          # when the model is saved

OUT_checkpoints/step_000500/ is a checkpoint as one of `mmrl train` is. One is kept, and none of a run that has ended.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from mmrl.config import RunConfig
from mmrl.distributed.engines import TrainEngine
from mmrl.distributed.world import World
from mmrl.errors import CheckpointError, ConfigError
from mmrl.operations.interrupts import Interrupts
from mmrl.operations.restart import find_start
from mmrl.training.checkpoint import Checkpoints
from mmrl.training.identity import changes, run_identity

__all__ = ["GO_ON", "SupervisedCheckpoints"]

_BOTH = ("model.", "optim.", "seed", "train.forward", "train.token_budget")
_ANSWERS = (*_BOTH, "data.", "train.steps", "train.prompts_per_step", "rollout.max_new_tokens")
_DEMOS = (*_BOTH, "demos.", "env.", "vla.", "action.", "algorithm.critic.level")

GO_ON = "the same command and --resume"
"""What continues such a run, for messages."""


class SupervisedCheckpoints:
    """The checkpoints of one supervised run.

    Args:
        out: the folder that its model goes to.
        resume: go on from the newest of them; where there is none, the run begins. Without it, and without `overwrite`, there must
            be none.
        say: is told where the run begins or goes on, and of a checkpoint that cannot be written; the run goes on then.
    Raises, in all processes, ConfigError for an unfinished run that is neither to be continued nor replaced, or has other settings,
    and CheckpointError for one that is not as it was saved.
    """

    def __init__(
        self,
        out: Path,
        config: RunConfig,
        world: World,
        *,
        resume: bool = False,
        overwrite: bool = False,
        say: Callable[[str], None] = lambda words: None,
    ) -> None:
        self.folder = out.with_name(f"{out.name}_checkpoints")
        self.config, self.world, self._say = config, world, say
        self._checkpoints = Checkpoints(self.folder, keep_last=1)
        self._interrupts: Interrupts | None = None
        self.step = find_start(self._checkpoints, resume, world).step
        """The one that the run continues from; 0: it begins."""
        with world.raise_on_all_ranks():
            found = max(self._checkpoints.steps(), default=0)
            if found and not (resume or overwrite):
                raise ConfigError(
                    f"expected no unfinished run beside {out}, found one at step {found} in {self.folder}; go on with --resume, or "
                    "begin anew with --overwrite"
                )
            if self.step:
                self._check_same()
        if resume and world.is_main:
            say(
                f"continues after step {self.step} ({self.weights})"
                if self.step
                else f"no checkpoint to continue from in {self.folder}: the run begins"
            )
        if overwrite and not resume and world.is_main:
            self.remove()

    @property
    def weights(self) -> Path | None:
        """The checkpoint's folder, which the policy is loaded from; None where the run begins."""
        return self._checkpoints.path(self.step) if self.step else None

    def reading(self) -> AbstractContextManager[None]:
        """What fails while its weights are read is a CheckpointError."""
        return self._checkpoints.reading(self.step)

    def restore(self, engine: TrainEngine) -> list[Mapping[str, Any]]:
        """Give the optimizer what it had; the rows of what had failed. Raises CheckpointError."""
        if not self.step:
            return []
        state = self._checkpoints.load_state(self.step, engine.load_optimizer_state)
        return list(state["failures"])

    @contextmanager
    def open(self) -> Iterator[None]:
        """SIGTERM and SIGUSR1 let the step at hand finish while it is open."""
        with Interrupts(self.config.operations.grace_s, go_on=GO_ON) as self._interrupts:
            yield
        self._interrupts = None

    def after(
        self,
        step: int,
        every: int,
        policy: Any,
        engine: TrainEngine,
        failures: Sequence[Mapping[str, Any]],
    ) -> None:
        """Write the checkpoint of `step` where it is due, or where a signal asked for the end; `policy` is a whole one in the main
        process. Collective. Raises Interrupted, and NonFiniteError for weights that are not finite."""
        due = bool(every) and step % every == 0

        def save() -> None:
            self._save(step, policy, engine, failures)

        if due:
            save()
        assert self._interrupts is not None, "inside `open`"
        self._interrupts.stop_if_requested(
            self.world,
            step,
            lambda: max(self._checkpoints.steps(), default=0),
            None if due else save,
        )

    def remove(self) -> None:
        """The model is saved: nothing is left to continue."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _save(
        self, step: int, policy: Any, engine: TrainEngine, failures: Sequence[Mapping[str, Any]]
    ) -> None:
        if policy is not engine.policy:
            engine.gather_into(policy)
        with engine.collective_section():
            optimizer = engine.optimizer_state()
        with self.world.raise_on_all_ranks():
            if optimizer is None:  # another process than the main one
                return
            state = {"step": step, "identity": self._identity(), "failures": list(failures)}
            settings = self.config.model_dump(mode="json")
            try:
                self._checkpoints.save(step, policy, optimizer, state, settings)
            except CheckpointError as error:
                self._say(f"warning: {error}")

    def _check_same(self) -> None:
        """Raises ConfigError where the checkpoint is of a run with other settings; more steps are the same one where the learning
        rate does not depend on their number."""
        folder = self._checkpoints.path(self.step)
        with self.reading():
            text = (folder / "trainer" / "state.json").read_text(encoding="utf-8")
            found = json.loads(text)["identity"]
        constant = self.config.supervised().optim.schedule == "constant"
        grows = ("train.steps", "demos.steps") if constant else ()
        if changed := changes(found, self._identity(), may_grow=grows):
            raise ConfigError(
                f"cannot go on from {folder}: it would no longer be the same run. Changed since: {'; '.join(changed)}. "
                "Restore them, or begin anew with --overwrite"
            )

    def _identity(self) -> dict[str, Any]:
        """What would make it another run, of the sections that a supervised one reads."""
        tree = self.config.model_dump(mode="json")
        demos = {k: v for k, v in tree.get("demos", {}).items() if k != "save_every"}
        known = {**run_identity(tree), **{f"demos.{key}": value for key, value in demos.items()}}
        used = _DEMOS if demos else _ANSWERS
        return {key: value for key, value in known.items() if key.startswith(used)}
