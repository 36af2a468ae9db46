"""Embodied runs whose stages cost a set time of sleep, for scripts/bench_schedule.py: `mmrl train`'s own trainer, driver,
learner and executor on a configuration file's settings.

`CostedRollouts` are mmrl.robotics.episodes.EpisodeRollouts with a pause behind each observation the policy decided for and behind
each group's gradient; a picture of the tiny simulator costs its option `render_s`. So any ratio of stages can be had on any
machine, and how the run is scheduled is the run's own business: whether inference and training take turns, how many stages of
environments there are, what a step may overlap with.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mmrl.distributed.world import World
from mmrl.evaluation.result import Evaluation
from mmrl.policy.storage import Stored
from mmrl.policy.tiny import TinySpec, build_tiny
from mmrl.robotics.acting import ActingPolicy
from mmrl.robotics.config import EmbodiedConfig, load_embodied
from mmrl.robotics.contract import make_simulator
from mmrl.robotics.episodes import EpisodeRollouts
from mmrl.robotics.generated import HostedEpisodes
from mmrl.robotics.load import load_vla
from mmrl.robotics.source import env_specs
from mmrl.training.learner import Learner
from mmrl.training.pipeline import PipelineSettings
from mmrl.training.trainer import Trainer

__all__ = ["QUIET", "CostedRollouts", "Costs", "config_of", "run", "saved_vla"]

QUIET = (
    "train.save_every=0",
    "train.log_rollouts=0",
    "train.token_budget=100000",
    "eval.every=0",
    "eval.samples=0",
    "eval.gallery=0",
    "eval_states=1",
    "eval.best_metric=greedy/success_once",
    "algorithm.dynamic_sampling=false",
    "optim.lr=1e-9",
    "model.device=cpu",
    "threads=1",
    "model.system=''",
)
"""Overrides of a run that is made for its timeline: every group is trained on, next to nothing is evaluated or written."""

_COMMON = (
    "env.suite=tiny",
    "env.tasks=[push]",
    "env.image_size=16",
    "action.bins=9",
    "action.chunk=1",
    "action.repeat=1",
    *QUIET,
)


@dataclass(frozen=True)
class Costs:
    """A step's work: `groups` of `members` episodes with `decisions` each, and what each stage costs in all, in seconds per step
    when it works alone on all its workers. An episode has one picture more than decisions: the reset's."""

    render: float
    infer: float
    train: float
    groups: int = 32
    members: int = 8
    decisions: int = 3
    slots: int = 16
    workers: int = 4

    @property
    def render_s(self) -> float:
        """Per picture."""
        return self.render * self.workers / (self.groups * self.members * (self.decisions + 1))

    @property
    def infer_s(self) -> float:
        """Per observation."""
        return self.infer / (self.groups * self.members * self.decisions)

    @property
    def train_s(self) -> float:
        """Per group."""
        return self.train / self.groups

    @property
    def turn_s(self) -> float:
        """The gradient of one decision, all passes over it together."""
        return self.train_s / (self.members * self.decisions)


def saved_vla(folder: Path, spec: TinySpec, overrides: Sequence[str]) -> Path:
    """A fresh policy as `mmrl sft` would leave it in `folder`, for the actions of the configuration's simulator."""
    if not (folder / "vla").is_dir():
        build_tiny(spec, folder / "backbone")
        config = load_embodied(None, [*overrides, f"model.path={folder / 'backbone'}"])
        simulator = make_simulator(env_specs(config)[0])
        torch.manual_seed(0)
        load_vla(config, space=simulator.action_space).save(folder / "vla")
        simulator.close()
    return folder / "vla"


def config_of(costs: Costs, folder: Path, *schedule: str) -> EmbodiedConfig:
    """The run's configuration, as `mmrl train` would load it; `schedule` holds overrides. The model is made in `folder`."""
    spec = TinySpec(
        hidden=32,
        layers=1,
        heads=2,
        kv=1,
        vision_hidden=16,
        vision_layers=1,
        vision_heads=1,
        patch_size=8,
        min_patches=1,
        max_patches=1,
    )
    return load_embodied(
        None,
        [
            *_COMMON,
            f"model.path={saved_vla(folder, spec, _COMMON)}",
            f"dir={folder}",
            f"train.prompts_per_step={costs.groups}",
            f"rollout.group_size={costs.members}",
            f"env.horizon={costs.decisions}",
            f"env.slots={costs.slots}",
            f"env.workers={costs.workers}",
            f"env.options={{render_s: {costs.render_s!r}, stop_at_success: false}}",
            *schedule,
        ],
    )


def _and_sleep(work: Callable[..., Any], seconds: Callable[..., float]) -> Callable[..., Any]:
    def slower(*args: Any, **kwargs: Any) -> Any:
        found = work(*args, **kwargs)
        time.sleep(seconds(*args))
        return found

    return slower


class CostedRollouts(EpisodeRollouts):
    """See the module. They sleep from the second step on: the first starts processes and warms caches."""

    def __init__(self, config: EmbodiedConfig, world: World, costs: Costs) -> None:
        super().__init__(config, world)
        self.costs, self.sleeping = costs, False

    @property
    def maker(self) -> Callable[..., Any]:
        return functools.partial(type(self), costs=self.costs)

    def hosted(self) -> HostedEpisodes:
        self.sleeping = True  # the trainer's `begin` is not called in a generator process
        return super().hosted()

    def load_policy(self, weights: Path | None, stored: Stored = "masters") -> ActingPolicy:
        vla = super().load_policy(weights, stored)
        act = _and_sleep(
            vla.act,
            lambda observations, *rest: self.sleeping * self.costs.infer_s * len(observations),
        )
        vla.act = act  # type: ignore[method-assign]
        return vla

    def learner(self) -> Learner:
        learner = super().learner()
        if learner.collects:  # groups are trained on in finish, in every pass
            a_turn = self.costs.turn_s / self.config.algorithm.epochs
            loss = _and_sleep(
                learner.loss.of, lambda turns, *_: self.sleeping * a_turn * len(turns)
            )
            learner.loss.of = loss  # type: ignore[method-assign]
        else:
            add = _and_sleep(learner.add, lambda group: self.sleeping * self.costs.train_s)
            learner.add = add  # type: ignore[method-assign]
        return learner

    def begin(self, step: int) -> None:
        self.sleeping = step > 1
        super().begin(step)

    def evaluate(self, step: int, *, full: bool, folder: Path) -> Evaluation:
        before, self.sleeping = self.sleeping, False
        found = super().evaluate(step, full=full, folder=folder)
        self.sleeping = before
        return found


def run(
    config: EmbodiedConfig, steps: int, rollouts: Callable[..., Any] | None = None
) -> tuple[list[dict[str, Any]], PipelineSettings]:
    """Timeline summaries of `steps` steps of a run behind its first, which warms it up, and what its executor was made of. An async
    run takes one step more, so that each of them has a next one to roll out."""
    last = 1 + steps + (config.schedule.kind == "async")
    config = config.model_copy(update={"train": config.train.model_copy(update={"steps": last})})
    summaries: dict[int, dict[str, Any]] = {}
    made: list[PipelineSettings] = []

    def note(kind: str, row: Any) -> None:
        if kind == "step":
            assert (
                row["train/groups/trained"] == config.train.prompts_per_step
                and row["train/failed_attempts"] == 0
            ), row
            summaries[row["step"]] = trainer.rollouts.timeline.summary(row["step"])
            made[:] = [trainer.pipeline.settings]

    trainer = Trainer(config, overwrite=True, on_event=note, rollouts=rollouts)
    trainer.fit()
    return [summaries[step] for step in range(2, 2 + steps)], made[0]
