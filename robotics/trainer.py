"""The embodied trainer: mmrl's loop (metrics, alarms, evaluation, checkpoints, resume) over groups of episodes.

    EmbodiedTrainer(load_embodied("configs/robot_tiny.yaml")).fit()

The schedule (serial, pipelined, async) is mmrl.pipeline's; what it rolls out is robotics.source, what it trains robotics.update.
"""
from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mmrl.errors import ConfigError
from mmrl.evaluate import Evaluation
from mmrl.metrics import peak_memory_gib
from mmrl.pipeline import Pipeline
from mmrl.timeline import Timeline
from mmrl.trainer import Trainer
from robotics.config import EmbodiedConfig, EnvConfig
from robotics.contract import make_simulator
from robotics.evaluate import evaluate_policy
from robotics.load import load_vla
from robotics.pool import EnvPool
from robotics.pool_types import PoolSettings
from robotics.rollout import Driver, EpisodeGroup, Failure
from robotics.source import EpisodeSource, Played, StepRecord, env_specs
from robotics.update import EmbodiedUpdate, EmbodiedUpdater

__all__ = ["EmbodiedTrainer", "pool_settings"]


def pool_settings(env: EnvConfig) -> PoolSettings:
    """The env section as the pool wants it."""
    return PoolSettings(handshake_s=env.start_s, reset_s=env.reset_s, step_s=env.step_s, respawns=env.respawns,
                        restart_after_resets=env.restart_after_resets, memory_gib=env.memory_gib or 0.0)


class EmbodiedTrainer(Trainer):
    """One embodied run; see mmrl.trainer.Trainer for the events."""

    config: EmbodiedConfig
    updater: EmbodiedUpdater
    pipeline: Pipeline[EpisodeGroup, EmbodiedUpdate]

    def _load_data(self) -> None:
        if self.world.size > 1:
            raise ConfigError(f"expected one process for an embodied run, found {self.world.size}; start it without a launcher "
                              "(env.workers are processes of their own)")
        self.train_sources, self.eval_sources = [], []
        for spec in env_specs(self.config):
            make_simulator(spec)  # cheap: names a suite that does not exist before a model is loaded

    def _read_policy(self, weights: Path | None) -> Any:
        return load_vla(self.config, needs_reference=self.config.algorithm.kl.coef > 0, device=self.world.device, weights=weights)

    def _build_optimizer(self) -> torch.optim.AdamW:
        """The value head may learn at a rate of its own."""
        optimizer = super()._build_optimizer()
        wanted, head = self.config.rl.value_lr, self.policy.value_head
        if head is not None and wanted is not None:
            mine = {id(p) for p in head.parameters()}
            moved = [p for g in optimizer.param_groups for p in g["params"] if id(p) in mine]
            for group in optimizer.param_groups:
                group["params"] = [p for p in group["params"] if id(p) not in mine]
            optimizer.add_param_group({"params": moved, "weight_decay": 0.0, "lr_scale": wanted / self.config.optim.lr})
        return optimizer

    @contextmanager
    def _working(self) -> Iterator[None]:
        c = self.config
        workers = min(c.env.workers, c.env.slots)
        self.timeline = Timeline({"render": workers, "infer": 1, "train": 1})
        with EnvPool(c.env.slots, workers, pool_settings(c.env)) as self.pool:
            stages = 1 if c.schedule.kind == "serial" else c.schedule.stages
            self.driver = Driver(self.pool, self.policy, seed=c.seed, stages=stages, temperature=c.rollout.temperature,
                                 retries=c.env.retries, timeline=self.timeline, bootstrap=c.rl.bootstrap)
            self.source = EpisodeSource(c, self.driver)
            self._ahead: list[Failure] = []  # attempts of the next steps that failed during an evaluation
            self.updater = EmbodiedUpdater(c, self.policy, self.optimizer)
            with self._pipeline(self.source) as self.pipeline:
                yield

    @property
    def collected(self) -> str:
        """Why the groups of a step are trained on together, after the last has closed; '' where each is as it closes."""
        kind = self.config.schedule.kind
        return f"schedule.kind {kind}" if kind == "serial" else self.updater.collects

    def _started(self) -> list[str]:
        why = self.collected
        return [f"groups are collected, not streamed: {why}" if why else "groups are streamed: trained on as they close"]

    def _state(self) -> dict[str, Any]:
        return {"updates": self.updater.updates, "version": self.policy.version}

    def _load_state(self, state: dict[str, Any]) -> None:
        self.updater.updates, self.policy.core.version = state["updates"], state["version"]

    def _train_step(self, step: int) -> dict[str, Any]:
        began = time.perf_counter()
        before, failed = dict(self.driver.counters), len(self.driver.failures)
        try:
            with self._alarmed(step):
                outcome = self.pipeline.step(step)
        except Exception:  # a step that is never finished: what failed in it is the reason
            self._failed = self._ahead + self.driver.failures[failed:]
            self.folder.append("failures.jsonl", self._failures())
            raise
        self._record, self._failed = self.source.records.pop(step), self._ahead + self.driver.failures[failed:]
        self._ahead = []
        self._record.groups.sort(key=lambda group: group[0].key)  # they closed in any order
        work = {k: v - before[k] for k, v in self.driver.counters.items()} | {"failed_attempts": float(len(self._failed))}
        total = time.perf_counter() - began
        return {
            "step": step, **step_row(self.config, self._record, outcome.result, work), "train/streamed": float(not self.collected),
            "train/staleness": float(outcome.staleness), "train/groups/stale": float(outcome.stale),
            **self._times(step), "time/rollout": work["infer_s"], "time/update": outcome.result.update_s,
            "time/total": total, "perf/control_steps_per_s": work["control_steps"] / total,
            "perf/episodes_per_s": work["episodes"] / total, "perf/peak_memory_gib": peak_memory_gib()}

    def _failures(self) -> list[dict[str, Any]]:
        return [{"step": f.key[0], "source": f.task, "id": f.state, "member": f.member, "attempt": f.attempt, "reason": f.reason}
                for f in self._failed]

    def _log_rollouts(self, step: int) -> None:
        shown = self._record.groups[: self.config.train.log_rollouts]
        self.folder.append(f"rollouts/step_{step:06d}.jsonl", [episode_row(e) for g in shown for e in g])

    def _evaluation(self, step: int, *, full: bool) -> Evaluation | None:
        videos = self.folder.path / "eval" / f"step_{step:06d}" / "videos" if full and self.config.eval.gallery else None
        before = len(self.driver.failures)
        found = evaluate_policy(self.config, self.driver, step, limit=None if full else self.config.eval.limit, videos=videos)
        own = found.results["failed_attempts"]
        self._ahead += [f for f in self.driver.failures[before:] if dataclasses.asdict(f) not in own]  # steps under way (async)
        return found


def episode_row(e: Played) -> dict[str, Any]:
    """One line of rollouts/: what the policy chose and what it earned."""
    return {"step": e.key[0], "key": list(e.key), "task": e.task, "state": e.state, "seed": e.seed, "member": e.member,
            "success_once": e.success_once, "success_at_end": e.success_at_end, "steps": e.steps,
            "return": e.reward, "error": e.error, "tokens": [list(chosen) for chosen in e.tokens]}


def step_row(config: EmbodiedConfig, record: StepRecord, update: EmbodiedUpdate, work: dict[str, float]) -> dict[str, Any]:
    """The metrics of a step, overall and by task.

    An episode that kept failing (a simulator that crashes or hangs, `error`) counts as one without success and without reward in
    train/success_once, success_at_end, reward and accuracy: what the run got out of what it asked for; its share is
    1 - train/parse_rate. By task the two are apart: train/TASK/failed is the share of episodes that failed, train/TASK/success_once
    the success of those that finished, None where none did. A task that a step did not play has None for both.
    """
    episodes = [e for g in record.groups for e in g]
    done = [e for e in episodes if e.error is None]
    own = update.stats.means()
    row: dict[str, Any] = {
        "train/success_once": _mean([e.success_once for e in episodes]),
        "train/success_at_end": _mean([e.success_at_end for e in episodes]),
        "train/reward": _mean([e.reward for e in episodes]), "train/episode_steps": _mean([e.steps for e in done]),
        "train/accuracy": _mean([e.success_once for e in episodes]), "train/parse_rate": _mean([e.error is None for e in episodes]),
        "train/groups/asked": float(len(record.groups)), "train/groups/trained": float(record.kept),
        "train/groups/no_signal": float(record.no_signal), "train/groups/failed": float(record.failed),
        "train/groups/empty": float(record.empty), "train/episodes": float(len(episodes)),
        "train/failed_attempts": work["failed_attempts"], "train/decisions": float(update.decisions),
        "train/entropy": update.entropy / update.entropy_tokens if update.entropy_tokens else None,  # nothing was trained on
        "train/logprob_gap/mean": update.gap_sum / max(update.gap_tokens, 1.0), "train/logprob_gap/max": update.gap_max,
        "train/clip_low": own["clip_low"], "train/clip_high": own["clip_high"], "train/approx_kl": own["approx_kl"],
        "train/kl_ref": own["kl_ref"], "train/policy_loss": update.stats.policy_loss / max(update.denominator, 1.0),
        "train/grad_norm": float(np.mean(update.grad_norms)) if update.grad_norms else 0.0, "train/lr": update.lr,
        **{f"train/{k}": v for k, v in update.critic.items()}}
    if config.rl.kind == "ppo":
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
