"""Alarms: what an attentive person would notice in the curves, noticed at once.

non_finite, entropy_collapse, reward_stuck (parsing works but nothing is ever right: usually a wrong coordinate frame),
logprob_gap (sampler and trainer disagree), prompts_failed (no prompt of a step could be read), checkpoint_failed.
Each fires once until it has cleared again.
"""
from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mmrl.config import AlarmConfig

__all__ = ["Alarm", "AlarmBoard"]


@dataclass(frozen=True)
class Alarm:
    """One alarm of one step; severity 'warning' or 'error'."""

    step: int
    name: str
    message: str
    severity: str = "warning"


class AlarmBoard:
    """Looks at each step's metrics; state survives a resume."""

    def __init__(self, config: AlarmConfig) -> None:
        self.config = config
        self._zero_steps = 0
        self._active: set[str] = set()

    def check(self, step: int, row: Mapping[str, Any]) -> list[Alarm]:
        """Alarms newly raised by this step's metrics."""
        found: dict[str, Alarm] = {}
        broken = [f"{name} is {v}" for name, v in row.items() if isinstance(v, float) and not math.isfinite(v)]
        if broken:
            found["non_finite"] = Alarm(step, "non_finite", ", ".join(broken[:5]), "error")
        gap = row.get("train/logprob_gap/mean")
        if gap is not None and gap > self.config.logprob_gap:
            found["logprob_gap"] = Alarm(
                step, "logprob_gap", f"sampler and trainer log-probs differ by {gap:.3g} per token on average (limit "
                f"{self.config.logprob_gap}): weights not in sync, or different precision or kernels", "error")
        entropy = row.get("train/entropy")
        if entropy is not None and entropy < self.config.entropy_floor:
            found["entropy_collapse"] = Alarm(
                step, "entropy_collapse", f"entropy {entropy:.2g} nats per token is below {self.config.entropy_floor}: the "
                "policy hardly explores; lower optim.lr, raise clip_high or add a KL term")
        parse, accuracy = row.get("train/parse_rate"), row.get("train/reward/part/accuracy", row.get("train/reward/mean"))
        stuck = parse is not None and accuracy is not None and parse > 0.8 and accuracy < 0.01
        self._zero_steps = self._zero_steps + 1 if stuck else 0
        if self._zero_steps >= self.config.zero_reward_steps:
            outside = row.get("train/outside_image")
            share = f"; {outside:.0%} of predicted box area lies outside the picture" if outside is not None else ""
            found["reward_stuck"] = Alarm(
                step, "reward_stuck", f"answers parse ({parse:.0%}) but have scored ~0 for {self._zero_steps} steps{share}: "
                "check the coordinate frame (model.frame) with `mmrl tasks check`")
        asked = row.get("train/groups/asked")
        if asked and row.get("train/groups/failed") == asked:
            found["prompts_failed"] = Alarm(
                step, "prompts_failed", f"none of the {asked} prompts of this step could be read, nothing was trained: "
                "failures.jsonl says why; check paths (image_root) and files", "error")
        new = [alarm for name, alarm in found.items() if name not in self._active]
        self._active = set(found)
        return new

    def must_stop(self, alarms: list[Alarm]) -> Alarm | None:
        """The first alarm that the configuration lets end the run."""
        return next((a for a in alarms if a.name in self.config.stop), None)

    def state_dict(self) -> dict[str, Any]:
        """JSON values."""
        return {"zero_steps": self._zero_steps, "active": sorted(self._active)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict`."""
        self._zero_steps, self._active = state["zero_steps"], set(state["active"])
