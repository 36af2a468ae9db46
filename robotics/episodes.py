"""Rollouts of an embodied run: episodes in simulators, played by the policy that is trained.

    Trainer(load_embodied("configs/robot_tiny.yaml")).fit()          # mmrl.training.trainer's, as for prompts

The schedule (serial, pipelined, async) is mmrl.training.pipeline's; what it rolls out is mmrl.robotics.source, what trains
mmrl.training.learner.

Under torchrun or accelerate launch every process plays its share of a step's places with simulators and a policy of its own
(env.slots and env.workers are of each process); gradients are summed once per optimizer step. Collective operations run in the
thread that trains inside Learner.finish(), and in the main thread between two steps: never in two threads at once, and in the
same order in all processes.

With engine.train fsdp2 or deepspeed_zero3 a full replica of the policy acts, is evaluated and saved; schedule.kind is serial then.

With engine.generator process simulators and an acting copy of the policy are in a process of their own (mmrl.training.generator).
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, cast

import torch

from mmrl.data.sources import LoadedSource
from mmrl.diagnostics.timeline import Timeline
from mmrl.distributed.cluster.run import run_cluster, simulator_demand
from mmrl.distributed.engines import held_back, train_engine_name
from mmrl.distributed.world import World
from mmrl.evaluation.result import Evaluation
from mmrl.policy.storage import Stored
from mmrl.robotics.acting import ActingPolicy
from mmrl.robotics.config import EmbodiedConfig, EnvConfig
from mmrl.robotics.episode_rows import episode_row, step_row
from mmrl.robotics.evaluate import HEADLINE, METRICS, evaluate_policy
from mmrl.robotics.generated import EpisodeLedger, HostedEpisodes
from mmrl.robotics.learning import robot_learner
from mmrl.robotics.load import load_vla
from mmrl.robotics.pool import VectorEnv
from mmrl.robotics.pool_types import PoolSettings
from mmrl.robotics.ray_pool import RayWorkers
from mmrl.robotics.rollout import COUNTERS, Driver, Failure
from mmrl.robotics.source import EpisodeSource, StepRecord, env_specs
from mmrl.robotics.vector import check_playing
from mmrl.training.generator import GeneratedGroups, Generator, weights_room
from mmrl.training.learner import Learner
from mmrl.training.metrics import peak_memory_gib
from mmrl.training.pipeline import GroupSource, Outcome
from mmrl.training.preflight import ALWAYS_MEASURED, Measured
from mmrl.training.rollouts import HostableRollouts, RunContext
from mmrl.training.update_result import UpdateResult
from mmrl.types import RolloutGroup

__all__ = ["EpisodeRollouts", "own_gpu", "pool_settings"]


def pool_settings(env: EnvConfig) -> PoolSettings:
    """The env section as the pool wants it."""
    return PoolSettings(
        handshake_s=env.start_s,
        reset_s=env.reset_s,
        step_s=env.step_s,
        respawns=env.respawns,
        group_respawns=1 + env.retries,
        restart_after_resets=env.restart_after_resets,
        memory_gib=env.memory_gib or 0.0,
    )


def own_gpu(device: torch.device) -> dict[str, str]:
    """Environment of a process's simulators, where several processes share a machine's GPUs: they render on that of their process,
    not all on the first one. robosuite takes the number for that of an EGL device, unless $MUJOCO_EGL_DEVICE_ID says which."""
    if device.type != "cuda" or int(os.environ.get("LOCAL_WORLD_SIZE", "1")) == 1:
        return {}
    number = torch.cuda.current_device() if device.index is None else device.index
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return {"CUDA_VISIBLE_DEVICES": visible.split(",")[number].strip() if visible else str(number)}


class EpisodeRollouts:
    """A mmrl.training.rollouts.RolloutSource. `pool`, `driver` and `groups` are there while it is open."""

    train_sources: Sequence[LoadedSource] = ()
    eval_sources: Sequence[LoadedSource] = ()
    cluster: Any = None
    groups: GroupSource[RolloutGroup]
    timeline: Timeline
    # what counts episodes and failed attempts
    driver: Driver | EpisodeLedger
    # of a run whose episodes are played in a process of their own
    generator: Generator | None = None

    def __init__(self, config: EmbodiedConfig, world: World) -> None:
        self.config, self.world = config, world
        train_engine_name(config, world.size)
        if config.engine.workers == "ray":
            # what an embodied run does not take from Ray
            simulator_demand(config, config.env.workers)
        # before a model is loaded
        check_playing(
            env_specs(config),
            -(-config.env.slots // config.env.workers),
            here=config.engine.workers != "ray",
        )
        self._record = StepRecord()
        self._failed: list[Failure] = []  # attempts of the step that failed
        # attempts of the next steps that failed during an evaluation
        self._ahead: list[Failure] = []
        self._sent: dict[str, float] = {}  # what giving away the weights measured

    @property
    def measured(self) -> Measured:
        """See RolloutSource."""
        return Measured(HEADLINE, frozenset((*METRICS, *ALWAYS_MEASURED)))

    def load_policy(self, weights: Path | None, stored: Stored = "masters") -> ActingPolicy:
        """See RolloutSource."""
        return load_vla(
            self.config,
            needs_reference=self.config.algorithm.kl.coef > 0,
            device=self.world.device,
            weights=weights,
            stored=stored,
            hold=held_back(self.config, self.world.size),
        )

    def build(self, policy: ActingPolicy, actor: ActingPolicy) -> None:
        """See RolloutSource: the policy decides by its own forward, or a copy of it in a generator process."""
        self._room = weights_room(policy, self.config, self.world) if self._apart else None

    @property
    def _apart(self) -> bool:
        return self.config.engine.generator.kind == "process"

    @contextmanager
    def open(self, context: RunContext) -> Iterator[None]:
        """See RolloutSource."""
        c, self.context = self.config, context
        workers = min(c.env.workers, c.env.slots)
        self.timeline = Timeline({"render": workers, "infer": 1, "train": 1})
        if self._apart:
            with self._open_apart(context):
                yield
            return
        limits = dataclasses.replace(pool_settings(c.env), environment=own_gpu(self.world.device))
        with (
            run_cluster(c, self.world.size, [simulator_demand(c, workers)]) as self.cluster,
            VectorEnv(
                c.env.slots,
                workers,
                # Ray chooses the GPUs of its actors
                pool_settings(c.env) if self.cluster else limits,
                RayWorkers(self.cluster) if self.cluster else None,
                batched=c.env.batched,
            ) as self.pool,
        ):
            stages = 1 if c.schedule.kind == "serial" else c.schedule.stages
            driver = self.driver = Driver(
                self.pool,
                context.actor,
                seed=c.seed,
                stages=stages,
                temperature=c.rollout.temperature,
                retries=c.env.retries,
                timeline=self.timeline,
                bootstrap=c.algorithm.critic.bootstrap,
            )
            source = EpisodeSource(
                c, driver, rank=self.world.rank, size=self.world.size, policy=context.policy
            )
            self.groups, self._records = source, source.records
            yield

    @contextmanager
    def _open_apart(self, context: RunContext) -> Iterator[None]:
        """Episodes are played elsewhere: what remains here is to train on them."""
        ledger = self.driver = EpisodeLedger(dict.fromkeys(COUNTERS, 0.0))
        self._records = ledger.records
        with Generator(
            self.config,
            self.world,
            self.maker,
            ledger,
            self._room,
            media=context.media,
            timeline=self.timeline,
        ) as self.generator:
            groups = self.groups = GeneratedGroups(
                self.generator, self.config.train.prompts_per_step
            )
            groups.on_publish = self._name_weights
            yield

    def _name_weights(self, version: int) -> None:
        self.context.policy.version = self.context.actor.version = version

    @property
    def maker(self) -> Callable[[Any, World], HostableRollouts]:
        """What makes the rollouts in a generator process; picklable."""
        return type(self)

    def hosted(self) -> HostedEpisodes:
        """See HostableRollouts."""
        return HostedEpisodes(self)

    def learner(self) -> Learner:
        """See RolloutSource."""
        self._learner = robot_learner(
            self.config, self.context.policy, self.context.training, self.world, self.context.actor
        )
        if self._apart:
            self._learner.on_weights = lambda: self._give_weights(self._learner.step)
        return self._learner

    def share_policy(
        self,
        exclusive: Callable[[], AbstractContextManager[Any]],
        make_way: Callable[[], None],
    ) -> None:
        """See RolloutSource: all that these use the policy for is in GroupSource.infer. Each decision is whole, keeps its own
        log-probs and nothing of the policy's, so it may be made between two micro-batches."""
        self._learner.steps.make_way = make_way

    def sync(self) -> None:
        """See RolloutSource: the policy that is trained acts, or a copy that the trainer fills, or one in a generator process."""
        if self._apart:
            self._give_weights(self.context.actor.version)

    def _give_weights(self, version: int) -> None:
        assert self.generator is not None
        with self.context.training.collective_section():  # sharded weights are gathered on the way
            self._sent = self.generator.publish(self.context.training, version)

    @property
    def collected(self) -> str:
        """Why the groups of a step are trained on together, after the last has closed; '' where each is as it closes."""
        kind = self.config.schedule.kind
        return f"schedule.kind {kind}" if kind == "serial" else self._learner.collects

    def notes(self) -> list[str]:
        """See RolloutSource."""
        why, places, size = self.collected, self.config.train.prompts_per_step, self.world.size
        notes = [
            f"groups are collected, not streamed: {why}"
            if why
            else "groups are streamed: trained on as they close"
        ]
        if size > 1:
            notes.append(
                f"{size} processes, each with {self.config.env.slots} simulators for its share of {places} groups"
                + (
                    ": train.prompts_per_step is no multiple of the processes, some wait for others"
                    if places % size
                    else ""
                )
            )
        return notes

    def begin(self, step: int) -> None:
        """See RolloutSource."""
        self._step, self._before, self._failures_before = (
            step,
            dict(self.driver.counters),
            len(self.driver.failures),
        )
        if isinstance(self.driver, EpisodeLedger):
            self.driver.forget(step)

    def row(self, step: int, outcome: Outcome[UpdateResult], seconds: float) -> dict[str, Any]:
        """See RolloutSource."""
        own = {k: v - self._before[k] for k, v in self.driver.counters.items()}
        self._failed = self._ahead + self.driver.failures[self._failures_before :]
        own["failed_attempts"] = float(len(self._failed))
        self._record, work, outcome, memory = self._whole(
            # of a generator process the main process has it all
            self._records.pop(step, StepRecord()),
            own,
            outcome,
        )
        self._ahead = []
        return {
            **step_row(self.config, self._record, outcome.result, work),
            "train/streamed": float(not self.collected),
            "train/staleness": float(outcome.staleness),
            "train/groups/stale": float(outcome.stale),
            "time/rollout": own["infer_s"],
            "time/update": outcome.result.update_s,
            **(
                {"time/wait": outcome.result.wait_s / self.world.size}
                if self.world.size > 1
                else {}
            ),
            "time/total": seconds,
            "perf/control_steps_per_s": work["control_steps"] / seconds,
            "perf/episodes_per_s": work["episodes"] / seconds,
            "memory/peak_gib": memory,
            **self._sent,
            **(
                {"train/generator/restarts": float(self.generator.restarts)}
                if self.generator is not None
                else {}
            ),
        }

    def _whole(
        self, record: StepRecord, work: dict[str, float], outcome: Outcome[UpdateResult]
    ) -> tuple[StepRecord, dict[str, float], Outcome[UpdateResult], float]:
        """What happened in a step in all processes: records and counts added, of staleness and memory the most. Collective.

        An episode's tokens are kept where `logged` may show it.
        """
        record.groups.sort(key=lambda group: group[0].key)  # they closed in any order
        shown = self.config.train.log_rollouts
        record.groups[shown:] = [
            tuple(dataclasses.replace(e, tokens=()) for e in g) for g in record.groups[shown:]
        ]
        parts = self.world.gather(
            [(record, work, outcome.staleness, outcome.stale, peak_memory_gib())]
        )
        whole = StepRecord()
        for part, *_ in parts:
            whole.add(part)
        whole.groups.sort(key=lambda group: group[0].key)
        _, works, staleness, stale, memory = zip(*parts, strict=True)
        return (
            whole,
            {k: float(sum(w[k] for w in works)) for k in work},
            dataclasses.replace(outcome, staleness=max(staleness), stale=sum(stale)),
            max(memory),
        )

    def failures(self) -> list[dict[str, Any]]:
        """See RolloutSource."""
        failed = (
            self._failed
            if self._step not in self._records
            # a step that never ended
            else (self._ahead + self.driver.failures[self._failures_before :])
        )
        return [
            {
                "step": f.key[0],
                "source": f.task,
                "id": f.state,
                "member": f.member,
                "attempt": f.attempt,
                "reason": f.reason,
            }
            for f in failed
        ]

    def logged(self, limit: int, pictures: Path) -> list[dict[str, Any]]:
        """See RolloutSource."""
        return [episode_row(e) for g in self._record.groups[:limit] for e in g]

    def evaluate(self, step: int, *, full: bool, folder: Path) -> Evaluation:
        """See RolloutSource."""
        if self.generator is not None:
            return cast(Evaluation, self.generator.evaluate(step, full=full, folder=folder))
        assert isinstance(self.driver, Driver)
        e = self.config.eval
        videos = folder / "videos" if full and e.gallery else None
        limit = None if full else e.limit
        before = len(self.driver.failures)
        found = evaluate_policy(
            self.config, self.driver, step, limit=limit, videos=videos, world=self.world
        )
        own = found.results["failed_attempts"]
        self._ahead += [
            f for f in self.driver.failures[before:] if dataclasses.asdict(f) not in own
        ]  # steps under way (async)
        return found

    def take_ahead(self) -> list[Failure]:
        """Attempts of the next steps that failed during an evaluation, which are forgotten here."""
        ahead, self._ahead = self._ahead, []
        return ahead

    def state_dict(self) -> dict[str, Any]:
        """See RolloutSource: which states a step gets depends on its number alone."""
        return {"version": self.context.actor.version}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See RolloutSource."""
        self.context.actor.version = self.context.policy.version = state["version"]


# for type checkers: a run's configuration names this class by its text
_CHECKED: type[HostableRollouts] = EpisodeRollouts
