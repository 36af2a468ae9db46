"""The embodied trainer: mmrl's loop (metrics, alarms, evaluation, checkpoints, resume) over groups of episodes.

    EmbodiedTrainer(load_embodied("configs/robot_tiny.yaml")).fit()

The schedule (serial, pipelined, async) is mmrl.pipeline's; what it rolls out is robotics.source, what trains mmrl.training.learner.

Under torchrun or accelerate launch every process plays its share of a step's places with simulators and a policy of its own
(env.slots and env.workers are of each process); gradients are summed once per optimizer step. Collective operations run in the
thread that trains inside updater.finish(), and in the main thread between two steps: never in two threads at once, and in the
same order in all processes. An error in one of them is told to the others where they would wait for it (World.stop): all end
with its message, unless it arises inside of a pass through a model that is sharded.

With engine.train fsdp2 or deepspeed_zero3 a whole copy of the policy acts, is evaluated and saved; schedule.kind is serial then.
"""
from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mmrl.cluster.run import run_cluster, simulator_demand
from mmrl.engines import build_actor, build_train_engine, train_engine_name
from mmrl.evaluation.evaluate import Evaluation
from mmrl.metrics import peak_memory_gib
from mmrl.optim import build_policy_optimizer
from mmrl.pipeline import Outcome, Pipeline
from mmrl.preflight import ALWAYS_MEASURED, Measured
from mmrl.timeline import Timeline
from mmrl.trainer import Trainer
from mmrl.training.learner import Learner, UpdateResult
from mmrl.types import RolloutGroup
from robotics.config import EmbodiedConfig, EnvConfig
from robotics.contract import make_simulator
from robotics.evaluate import HEADLINE, METRICS, evaluate_policy
from robotics.learning import robot_learner
from robotics.load import load_vla
from robotics.pool import EnvPool
from robotics.pool_types import PoolSettings
from robotics.ray_pool import RayWorkers
from robotics.rollout import Driver, Failure
from robotics.source import EpisodeSource, Played, StepRecord, env_specs

__all__ = ["EmbodiedTrainer", "own_gpu", "pool_settings"]

_PATIENCE_S = 7200.0  # as long as a collective operation may take (mmrl.world)


def pool_settings(env: EnvConfig) -> PoolSettings:
    """The env section as the pool wants it."""
    return PoolSettings(handshake_s=env.start_s, reset_s=env.reset_s, step_s=env.step_s, respawns=env.respawns,
                        restart_after_resets=env.restart_after_resets, memory_gib=env.memory_gib or 0.0)


def own_gpu(device: torch.device) -> dict[str, str]:
    """Environment of a process's simulators, where several processes share a machine's GPUs: they render on that of their process,
    not all on the first one. robosuite takes the number for that of an EGL device, unless $MUJOCO_EGL_DEVICE_ID says which."""
    if device.type != "cuda" or int(os.environ.get("LOCAL_WORLD_SIZE", "1")) == 1:
        return {}
    number = torch.cuda.current_device() if device.index is None else device.index
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return {"CUDA_VISIBLE_DEVICES": visible.split(",")[number].strip() if visible else str(number)}


class EmbodiedTrainer(Trainer):
    """One embodied run; see mmrl.trainer.Trainer for the events."""

    config: EmbodiedConfig
    updater: Learner
    pipeline: Pipeline[RolloutGroup, UpdateResult]

    def fit(self) -> dict[str, Any]:
        """See Trainer.fit."""
        self._lost: list[dict[str, Any]] = []  # rows for failures.jsonl that the main process does not have
        try:
            return super().fit()
        except Exception:
            if self.world.stopping and (lost := self.world.gather(self._lost)) and self.world.is_main:
                self.folder.append("failures.jsonl", lost)
            raise

    def _run(self) -> dict[str, Any]:
        try:
            return super()._run()
        except Exception as error:
            if self.training.lockstep and not self.training.engaged:
                self.world.stop(error)
            raise

    def _load_data(self) -> None:
        train_engine_name(self.config, self.world.size)
        if self.config.engine.workers == "ray":
            simulator_demand(self.config, self.config.env.workers)  # what an embodied run does not take from Ray
        self.train_sources, self.eval_sources = [], []
        for spec in env_specs(self.config):
            make_simulator(spec)  # cheap: names a suite that does not exist before a model is loaded

    def _measured(self) -> Measured:
        return Measured(HEADLINE, frozenset((*METRICS, *ALWAYS_MEASURED)))

    def _read_policy(self, weights: Path | None) -> Any:
        return load_vla(self.config, needs_reference=self.config.algorithm.kl.coef > 0, device=self.world.device, weights=weights)

    def _build_optimizer(self) -> torch.optim.AdamW:
        return build_policy_optimizer(self.policy, self.config.optim, self.config.algorithm.critic.lr)

    def _build_engines(self) -> None:
        with self.world.telling():
            self.actor = build_actor(self.config, self.world, self.policy)
        self.training = build_train_engine(self.config, self.world, self.policy, self.optimizer)

    def _fill_actor(self, *, save: bool = False) -> None:
        self.policy.version = self.actor.version  # robotics.source counts that of what acts
        super()._fill_actor(save=save)

    @contextmanager
    def _working(self) -> Iterator[None]:
        c = self.config
        workers = min(c.env.workers, c.env.slots)
        self.timeline = Timeline({"render": workers, "infer": 1, "train": 1})
        limits = dataclasses.replace(pool_settings(c.env), environment=own_gpu(self.world.device))
        with run_cluster(c, self.world.size, [simulator_demand(c, workers)]) as self.cluster, EnvPool(
                c.env.slots, workers, pool_settings(c.env) if self.cluster else limits,  # Ray chooses the GPUs of its actors
                RayWorkers(self.cluster) if self.cluster else None) as self.pool:
            stages = 1 if c.schedule.kind == "serial" else c.schedule.stages
            self.driver = Driver(self.pool, self.actor, seed=c.seed, stages=stages, temperature=c.rollout.temperature,
                                 retries=c.env.retries, timeline=self.timeline, bootstrap=c.algorithm.critic.bootstrap)
            self.source = EpisodeSource(c, self.driver, rank=self.world.rank, size=self.world.size)
            self._ahead: list[Failure] = []  # attempts of the next steps that failed during an evaluation
            self.updater = self._learner()
            with self._pipeline(self.source) as self.pipeline:
                if self.world.size > 1:  # a thread that waits for other processes may not be left behind: see World.stop
                    self.pipeline.patience_s = _PATIENCE_S
                yield

    def _learner(self) -> Learner:
        return robot_learner(self.config, self.policy, self.training, self.world, self.actor)

    @property
    def collected(self) -> str:
        """Why the groups of a step are trained on together, after the last has closed; '' where each is as it closes."""
        kind = self.config.schedule.kind
        return f"schedule.kind {kind}" if kind == "serial" else self.updater.collects

    def _started(self) -> list[str]:
        why, places, size = self.collected, self.config.train.prompts_per_step, self.world.size
        notes = [f"groups are collected, not streamed: {why}" if why else "groups are streamed: trained on as they close"]
        if size > 1:
            notes.append(f"{size} processes, each with {self.config.env.slots} simulators for its share of {places} groups"
                         + (": train.prompts_per_step is no multiple of the processes, some wait for others"
                            if places % size else ""))
        return notes

    def _state(self) -> dict[str, Any]:
        return {"updates": self.updater.updates, "version": self.actor.version, "entropy": self.updater.entropy.state_dict(),
                "credit": self.updater.advantages.state_dict()}

    def _load_state(self, state: dict[str, Any]) -> None:
        self.updater.updates, self.actor.version = state["updates"], state["version"]
        if "credit" in state:  # not in checkpoints from before robots could have either
            self.updater.entropy.load_state_dict(state["entropy"])
            self.updater.advantages.load_state_dict(state["credit"])

    def _train_step(self, step: int) -> dict[str, Any]:
        began = time.perf_counter()
        self._fill_actor()
        before, failed = dict(self.driver.counters), len(self.driver.failures)
        try:
            with self._alarmed(step):
                outcome = self.pipeline.step(step)
                self._failed = self._ahead + self.driver.failures[failed:]
                own = {k: v - before[k] for k, v in self.driver.counters.items()} | {"failed_attempts": float(len(self._failed))}
                self._record, work, outcome, memory = self._whole(self.source.records.pop(step), own, outcome)
        except Exception:  # a step that is never finished: what failed in it is the reason
            self._failed = self._ahead + self.driver.failures[failed:]
            if self.world.is_main:
                self.folder.append("failures.jsonl", self._failures())
            else:
                self._lost = self._failures()
            raise
        self._ahead = []
        total = time.perf_counter() - began
        return {
            "step": step, **step_row(self.config, self._record, outcome.result, work), "train/streamed": float(not self.collected),
            "train/staleness": float(outcome.staleness), "train/groups/stale": float(outcome.stale),
            **self._times(step), "time/rollout": own["infer_s"], "time/update": outcome.result.update_s,
            **({"time/wait": outcome.result.wait_s / self.world.size} if self.world.size > 1 else {}),
            "time/total": total, "perf/control_steps_per_s": work["control_steps"] / total,
            "perf/episodes_per_s": work["episodes"] / total, "perf/peak_memory_gib": memory}

    def _whole(self, record: StepRecord, work: dict[str, float], outcome: Outcome[UpdateResult]
               ) -> tuple[StepRecord, dict[str, float], Outcome[UpdateResult], float]:
        """What happened in a step in all processes: records and counts added, of staleness and memory the most. Collective.

        An episode's tokens are kept where `_log_rollouts` may show it.
        """
        record.groups.sort(key=lambda group: group[0].key)  # they closed in any order
        shown = self.config.train.log_rollouts
        record.groups[shown:] = [tuple(dataclasses.replace(e, tokens=()) for e in g) for g in record.groups[shown:]]
        parts = self.world.gather([(record, work, outcome.staleness, outcome.stale, peak_memory_gib())])
        whole = StepRecord()
        for part, *_ in parts:
            whole.add(part)
        whole.groups.sort(key=lambda group: group[0].key)
        _, works, staleness, stale, memory = zip(*parts, strict=True)
        return (whole, {k: float(sum(w[k] for w in works)) for k in work},
                dataclasses.replace(outcome, staleness=max(staleness), stale=sum(stale)), max(memory))

    def _failures(self) -> list[dict[str, Any]]:
        return [{"step": f.key[0], "source": f.task, "id": f.state, "member": f.member, "attempt": f.attempt, "reason": f.reason}
                for f in self._failed]

    def _log_rollouts(self, step: int) -> None:
        shown = self._record.groups[: self.config.train.log_rollouts]
        self.folder.append(f"rollouts/step_{step:06d}.jsonl", [episode_row(e) for g in shown for e in g])

    def _evaluation(self, step: int, *, full: bool) -> Evaluation | None:
        videos = self.folder.path / "eval" / f"step_{step:06d}" / "videos" if full and self.config.eval.gallery else None
        self._fill_actor()
        before = len(self.driver.failures)
        found = evaluate_policy(self.config, self.driver, step, limit=None if full else self.config.eval.limit, videos=videos,
                                world=self.world)
        own = found.results["failed_attempts"]
        self._ahead += [f for f in self.driver.failures[before:] if dataclasses.asdict(f) not in own]  # steps under way (async)
        return found


def episode_row(e: Played) -> dict[str, Any]:
    """One line of rollouts/: what the policy chose and what it earned."""
    return {"step": e.key[0], "key": list(e.key), "task": e.task, "state": e.state, "seed": e.seed, "member": e.member,
            "success_once": e.success_once, "success_at_end": e.success_at_end, "steps": e.steps,
            "return": e.reward, "error": e.error, "tokens": [list(chosen) for chosen in e.tokens]}


def step_row(config: EmbodiedConfig, record: StepRecord, update: UpdateResult, work: dict[str, float]) -> dict[str, Any]:
    """The metrics of a step, overall and by task.

    An episode that kept failing (a simulator that crashes or hangs, `error`) counts as one without success and without reward in
    train/success_once, success_at_end, reward and accuracy: what the run got out of what it asked for; its share is
    1 - train/parse_rate. By task the two are apart: train/TASK/failed is the share of episodes that failed, train/TASK/success_once
    the success of those that finished, None where none did. A task that a step did not play has None for both.
    """
    episodes = [e for g in record.groups for e in g]
    done = [e for e in episodes if e.error is None]
    total = update.total
    own = total.stats.means()
    row: dict[str, Any] = {
        "train/success_once": _mean([e.success_once for e in episodes]),
        "train/success_at_end": _mean([e.success_at_end for e in episodes]),
        "train/reward": _mean([e.reward for e in episodes]), "train/episode_steps": _mean([e.steps for e in done]),
        "train/accuracy": _mean([e.success_once for e in episodes]), "train/parse_rate": _mean([e.error is None for e in episodes]),
        "train/groups/asked": float(len(record.groups)), "train/groups/trained": float(record.kept),
        "train/groups/no_signal": float(record.no_signal), "train/groups/failed": float(record.failed),
        "train/groups/empty": float(record.empty), "train/episodes": float(len(episodes)),
        "train/failed_attempts": work["failed_attempts"], "train/decisions": float(update.turns),
        "train/entropy": total.entropy / total.entropy_tokens if total.entropy_tokens else None,  # nothing was trained on
        "train/logprob_gap/mean": total.gap_sum / max(total.gap_tokens, 1.0), "train/logprob_gap/max": total.gap_max,
        "train/clip_low": own["clip_low"], "train/clip_high": own["clip_high"], "train/approx_kl": own["approx_kl"],
        "train/kl_ref": own["kl_ref"], "train/policy_loss": total.stats.policy_loss / max(update.denominator, 1.0),
        "train/grad_norm": float(np.mean(update.grad_norms)) if update.grad_norms else 0.0, "train/lr": update.lr,
        **update.credit}
    if config.algorithm.advantage == "gae":
        found = update.value_stats
        row.update({"train/critic/loss": found.loss / max(update.denominator, 1.0),
                    "train/critic/clipped": found.clipped / max(found.count, 1.0)})
    if len(config.env.tasks) > 1:
        for task in config.env.tasks:
            mine = [e for e in episodes if e.task == task]
            row[f"train/{task}/success_once"] = _mean([e.success_once for e in mine if e.error is None])
            row[f"train/{task}/failed"] = _mean([e.error is not None for e in mine])
    return row


def _mean(values: list[Any]) -> float | None:
    return float(np.mean(values)) if values else None
