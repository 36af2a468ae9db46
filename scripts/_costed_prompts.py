"""Runs on prompts whose stages cost a set time of sleep, for scripts/bench_decoupled.py: as scripts/_costed.py for robots."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mmrl.config import RunConfig
from mmrl.distributed.world import World
from mmrl.training.learner import Learner
from mmrl.training.prompts import PromptRollouts

__all__ = ["CostedPrompts", "PromptCosts"]


@dataclass(frozen=True)
class PromptCosts:
    """Seconds of sleep behind each group's generation and behind each group's gradient."""

    generate_s: float
    train_s: float


class CostedPrompts(PromptRollouts):
    """See the module."""

    def __init__(self, config: RunConfig, world: World, costs: PromptCosts) -> None:
        super().__init__(config, world)
        self.costs = costs

    @property
    def maker(self) -> Callable[[Any, World], PromptRollouts]:
        return functools.partial(type(self), costs=self.costs)

    def build(self, policy: Any, actor: Any) -> None:
        super().build(policy, actor)
        if self.config.engine.generator.kind == "process":
            return
        generate = self.engine.generate

        def slower(requests: Any, settings: Any) -> Any:
            found = generate(requests, settings)
            time.sleep(self.costs.generate_s * len(requests))
            return found

        self.engine.generate = slower  # type: ignore[method-assign]

    def learner(self) -> Learner:
        learner = super().learner()
        add = learner.add

        def slower(group: Any) -> None:
            add(group)
            time.sleep(self.costs.train_s)

        learner.add = slower  # type: ignore[method-assign]
        return learner
