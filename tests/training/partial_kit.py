"""Rollouts that do in the generator process what its tests look for: `PatientRollouts` waits within answers for the weights that
are on their way, `WeighedRollouts` writes beside the run what its copy of the weights takes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from mmrl.policy.policy import Policy
from mmrl.policy.storage import Stored
from mmrl.rollout import PrefillOnceEngine, Request, SamplingSettings
from mmrl.training.prompts import PromptRollouts
from mmrl.types import Turn

__all__ = ["WEIGHED", "PatientRollouts", "WeighedRollouts"]

WEIGHED = "weights.txt"
_WAIT_S = 20.0


class _Patient(PrefillOnceEngine):
    """After the first token of all but the first wave a sync must come: the trainer has the groups of the step before."""

    waves = 0

    def generate(self, requests: Sequence[Request], settings: SamplingSettings) -> list[list[Turn]]:
        renew, looks = self.renew, 0
        self.waves += 1

        def waiting() -> bool:
            nonlocal looks
            looks += 1
            assert renew is not None
            end = time.monotonic() + (_WAIT_S if self.waves > 1 and looks == 1 else 0.0)
            while not (found := renew()) and time.monotonic() < end:
                time.sleep(0.01)
            return found

        self.renew = waiting
        try:
            return super().generate(requests, settings)
        finally:
            self.renew = renew


class PatientRollouts(PromptRollouts):
    """See the module."""

    def build(self, policy: Policy, actor: Policy) -> None:
        super().build(policy, actor)
        if self.config.engine.generator.kind == "inline":  # in the generator process
            self.engine = _Patient(actor)


class WeighedRollouts(PromptRollouts):
    """Each process that loads a policy adds a line: kind of its generator, and bytes of its parameters."""

    def load_policy(self, weights: Path | None, stored: Stored = "masters") -> Policy:
        policy = super().load_policy(weights, stored)
        size = sum(p.numel() * p.element_size() for p in policy.model.parameters())
        with (Path(self.config.dir) / WEIGHED).open("a", encoding="utf-8") as file:
            file.write(f"{self.config.engine.generator.kind} {size}\n")
        return policy
