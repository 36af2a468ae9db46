"""Where a run's rollouts come from, as the trainer sees it: the prompts of data sets, or the episodes of simulators.

The trainer (mmrl.training.trainer) holds what every run has: the folder, the policy and its optimizer, the engine that trains, the
loop with its metrics, alarms, evaluations and checkpoints. What differs is said here, and nowhere else: `PromptRollouts`
(mmrl.training.prompts) and `mmrl.robotics.episodes.EpisodeRollouts` implement it, and `RunConfig.rollout_source` names the one of a
run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from mmrl.data.sources import LoadedSource
from mmrl.diagnostics.timeline import Timeline
from mmrl.distributed.engines import TrainEngine
from mmrl.evaluation.result import Evaluation
from mmrl.policy.storage import Stored
from mmrl.training.learner import Learner
from mmrl.training.media_record import MediaRecord
from mmrl.training.pipeline import ClosedGroup, GroupSource, Outcome
from mmrl.training.preflight import Measured
from mmrl.training.update_result import UpdateResult

__all__ = ["HostableRollouts", "HostedWork", "Ledger", "RolloutSource", "RunContext"]


@dataclass(frozen=True)
class RunContext:
    """What the trainer has when rollouts begin. `actor` samples: the policy itself, or a full replica of it where the training
    engine shards its weights; `saved` is what the main process saves: the actor, or a replica with the types of what trains."""

    policy: Any
    actor: Any
    saved: Any
    training: TrainEngine
    media: MediaRecord


class HostedWork(Protocol):
    """A RolloutSource in a generator process (mmrl.training.generator_host), while it is open."""

    def resume(self, point: Any) -> None:
        """Go on where the trainer's ledger says that rollouts had come to: `Ledger.resume_point`."""

    def act_with(self, version: int) -> None:
        """The policy has the weights of `version` (steps trained) now: name them, and hand them to an engine with a copy of its
        own."""

    def evaluate(self, step: int, *, full: bool, folder: Path) -> Evaluation | None:
        """See RolloutSource."""

    def take(self) -> Any:
        """What happened since it was last asked, for `Ledger.add`; something false where nothing did. Picklable."""

    def portable(self, closed: ClosedGroup[Any]) -> ClosedGroup[Any]:
        """What is sent of a closed place together with what `take` returned."""


class Ledger(Protocol):
    """What the trainer knows of the rollouts of a generator process (mmrl.training.generator)."""

    def add(self, work: Any) -> None:
        """What `HostedWork.take` returned."""

    def whole(self, closed: ClosedGroup[Any]) -> ClosedGroup[Any]:
        """The closed place of which `HostedWork.portable` was sent, after the work sent with it was added."""

    def resume_point(self) -> Any:
        """For `HostedWork.resume` of another process, which takes the place of a lost one: nothing that is known here is made
        again."""

    def ended(self, step: int) -> bool:
        """Whether `resume_point` lies behind the step: it is not opened again."""


class RolloutSource(Protocol):
    """The rollouts of a run. Made of its configuration and the processes it runs in, before a model is loaded: what cannot work
    (a data set that is missing, a suite that does not exist) raises ConfigError or DataError then.

    Calls come in this order: `load_policy`; `build`; `open`, and inside it `learner`, `share_policy`, and for each step
    `begin`, (the groups are rolled out and trained on), `row`, `failures`, `logged`. All come from the main thread of every
    process; only what `learner` gives as on_weights runs in the thread that trains. `logged`, `notes` and `state_dict` are asked of
    the main process alone: no collective operation may be in them.
    """

    @property
    def train_sources(self) -> Sequence[LoadedSource]:
        """The data sets trained on, for what is said and kept of them; empty where rollouts need none."""

    @property
    def eval_sources(self) -> Sequence[LoadedSource]:
        """The held-out data sets; empty where rollouts need none."""

    @property
    def groups(self) -> GroupSource[Any]:
        """Closed groups, while open."""

    @property
    def timeline(self) -> Timeline:
        """When what worked, while open."""

    @property
    def cluster(self) -> Any:
        """The mmrl.distributed.cluster.session.Cluster while open; None without Ray."""

    @property
    def measured(self) -> Measured:
        """What held-out rollouts are judged by."""

    def load_policy(self, weights: Path | None, stored: Stored = "masters") -> Any:
        """The policy of model.path, or of the checkpoint folder `weights`; `stored`: see mmrl.policy.loading.load_policy."""

    def build(self, policy: Any, actor: Any) -> None:
        """What samples, before `training` shards the policy's weights. May be collective."""

    def open(self, context: RunContext) -> AbstractContextManager[None]:
        """Workers, simulators and engines are up while it is open."""

    def learner(self) -> Learner:
        """What trains on the groups."""

    def share_policy(
        self,
        exclusive: Callable[[], AbstractContextManager[Any]],
        make_way: Callable[[], None],
    ) -> None:
        """`exclusive` holds the policy for this thread, for rollouts that use it outside of GroupSource.infer; `make_way` is for a
        learner whose rollouts may infer between two of its micro-batches."""

    def sync(self) -> None:
        """Give whatever samples with a copy of the weights those of now. Collective."""

    def begin(self, step: int) -> None:
        """Step `step` begins; nothing trains."""

    def row(self, step: int, outcome: Outcome[UpdateResult], seconds: float) -> dict[str, Any]:
        """The step's metrics over all processes; `seconds` it took in this one. Collective."""

    def failures(self) -> list[dict[str, Any]]:
        """Rows of failures.jsonl of the step just trained, or of one that failed, on this process."""

    def logged(self, limit: int, pictures: Path) -> list[dict[str, Any]]:
        """Rows of rollouts/step_*.jsonl of the step just trained: those of its first `limit` groups. What their turns were shown,
        where that was kept, is written to the folder `pictures`. Raises StorageError."""

    def evaluate(self, step: int, *, full: bool, folder: Path) -> Evaluation | None:
        """Roll out the held-out samples: all of them, with clips below `folder`, or with `full` False the first eval.limit. None
        without any. Collective."""

    def notes(self) -> list[str]:
        """Lines to say when the run starts."""

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint of the step just trained keeps, as JSON values."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict`."""


class HostableRollouts(RolloutSource, Protocol):
    """Rollouts that a generator process can make, too."""

    def hosted(self) -> HostedWork:
        """Itself as a generator process drives it, while open."""
