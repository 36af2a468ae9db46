"""Alarms: what an attentive person would notice in the curves, noticed at once.

non_finite, entropy_collapse, reward_stuck (parsing works but nothing is ever right, in the whole step or in one data source:
usually a wrong coordinate frame), logprob_gap (sampler and trainer disagree), prompts_failed (no prompt of a step could be
read), task_failed (simulators: no episode of a task has finished for alarms.zero_reward_steps steps), checkpoint_failed; those of
mmrl.diagnostics.diagnosis where they last for alarms.steps steps: parse_rate, no_signal, zero_gradient, truncated, reward_failures,
same_answer (one answer to nearly every prompt, and it pays), critic (PPO's values predict nothing), judge
(it parts from the rule, or from itself); and never_trained: no gradient
in any step since the run began. Each fires once until it has cleared again; reward_stuck, parse_rate and same_answer once per
source, task_failed once per task.
weight_sync (a rollout engine with a copy of the weights did not get those of now) and a non-finite loss stop the run where they
happen: the trainer writes these two itself.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mmrl.config import AlarmConfig
from mmrl.diagnostics.diagnosis import diagnose, trained

__all__ = ["Alarm", "AlarmBoard"]


# the metric without which a step says nothing of a source; else its parse_rate
_MEASURED_BY = {"same_answer": "same_answer"}


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
        self._zero_by_source: dict[str, int] = {}
        self._active: set[str] = set()
        self._stuck: set[str] = set()  # sources whose alarm has been raised
        # steps in a row in which no episode of it finished
        self._failed_by_task: dict[str, int] = {}
        self._dead: set[str] = set()  # tasks whose alarm has been raised
        self._lasting: dict[str, int] = {}  # steps in a row of a finding, by 'name/source'
        # of these, those that have lasted for alarms.steps: no alarm is left to raise
        self._lasted: set[str] = set()
        # steps since the run began; None from the first gradient or the alarm on
        self._untrained: int | None = 0

    def check(self, step: int, row: Mapping[str, Any]) -> list[Alarm]:
        """Alarms newly raised by this step's metrics."""
        found: dict[str, Alarm] = {}
        broken = [
            f"{name} is {v}"
            for name, v in row.items()
            if isinstance(v, float) and not math.isfinite(v)
        ]
        if broken:
            found["non_finite"] = Alarm(step, "non_finite", ", ".join(broken[:5]), "error")
        gap = row.get("train/logprob_gap/mean")
        if gap is not None and gap > self.config.logprob_gap:
            found["logprob_gap"] = Alarm(
                step,
                "logprob_gap",
                f"sampler and trainer log-probs differ by {gap:.3g} per token on average (limit "
                f"{self.config.logprob_gap}): weights not in sync, or different precision or kernels",
                "error",
            )
        entropy = row.get("train/entropy")
        # that of numbers (actions of a flow) may be negative by more than rounding
        if entropy is not None and -1e-3 < entropy < self.config.entropy_floor:
            found["entropy_collapse"] = Alarm(
                step,
                "entropy_collapse",
                f"entropy {entropy:.2g} nats per token is below {self.config.entropy_floor}: the "
                "policy hardly explores; lower optim.lr, raise clip_high or add a KL term",
            )
        stuck = self._count_zero_steps(row)
        if self._zero_steps >= self.config.zero_reward_steps:
            found["reward_stuck"] = Alarm(
                step, "reward_stuck", _stuck_message(row, "train", stuck, self._zero_steps)
            )
        asked = row.get("train/groups/asked")
        if asked and row.get("train/groups/failed") == asked:
            found["prompts_failed"] = Alarm(
                step,
                "prompts_failed",
                f"none of the {asked:g} prompts or initial states of this step could be used, nothing was "
                "trained: failures.jsonl says why; check paths (image_root) and files, or the simulators",
                "error",
            )
        new = [alarm for name, alarm in found.items() if name not in self._active]
        # the whole step's alarm has just named its sources
        if not any(alarm.name == "reward_stuck" for alarm in new):
            new += [
                Alarm(
                    step,
                    "reward_stuck",
                    _stuck_message(row, f"train/{s}", [s], self._zero_by_source[s]),
                )
                for s in stuck
                if s not in self._stuck
            ]
        self._active, self._stuck = set(found), set(stuck)
        return [
            *new,
            *self._dead_tasks(step, row),
            *self._diagnosed(step, row),
            *self._never_trained(step, row),
        ]

    def _diagnosed(self, step: int, row: Mapping[str, Any]) -> list[Alarm]:
        """Count this step for what is wrong in it; an alarm for what has lasted for alarms.steps steps and has none yet.

        A step that holds nothing of a source says nothing about it: its count stays. Counts are compared by size, not looked at in
        passing: a run resumed with a smaller alarms.steps may be beyond it already.
        """
        findings = {f"{f.name}/{f.source}": f for f in diagnose(row, self.config)}
        absent = {
            key: n
            for key, n in self._lasting.items()
            if (source := key.partition("/")[2])
            and f"train/{source}/{_MEASURED_BY.get(key.partition('/')[0], 'parse_rate')}" not in row
        }
        counts = {key: self._lasting.get(key, 0) + 1 for key in findings}
        for name in ("parse_rate", "same_answer"):
            # of every source: their own counts go on, and the one alarm is enough
            if f"{name}/" in findings:
                counts |= {
                    key: n + 1
                    for key, n in self._lasting.items()
                    if key.startswith(f"{name}/") and key not in findings
                }
        self._lasting = {**absent, **counts}
        before, self._lasted = (
            self._lasted,
            {key for key, n in self._lasting.items() if n >= self.config.steps},
        )
        return [
            Alarm(
                step,
                f.name,
                f"{self._lasting[key]} step{'s' * (self._lasting[key] > 1)} in a row: {f.message}",
                f.severity,
            )
            for key, f in findings.items()
            if key in self._lasted - before
        ]

    def _never_trained(self, step: int, row: Mapping[str, Any]) -> list[Alarm]:
        """An alarm, once, when the run has taken alarms.untrained_steps steps or more without a gradient in any of them."""
        if self._untrained is None or "train/grad_norm" not in row:
            return []
        steps = self._untrained + 1
        self._untrained = None if trained(row) or steps >= self.config.untrained_steps else steps
        if trained(row) or steps < self.config.untrained_steps:
            return []
        causes = diagnose(row, self.config)  # the first is the cause of the others
        why = causes[0].message if causes else "the steps had nothing in their loss"
        return [
            Alarm(
                step,
                "never_trained",
                f"in none of the first {steps} steps was anything trained: {why}. "
                "`mmrl try CONFIG` asks the model before a run",
                "error",
            )
        ]

    def _dead_tasks(self, step: int, row: Mapping[str, Any]) -> list[Alarm]:
        """Count this step for each task of which it played episodes; an alarm for those that fail for too long, once."""
        before, raised = self._dead, []
        for name, share in row.items():
            if (
                not name.startswith("train/")
                or not name.endswith("/failed")
                or name == "train/groups/failed"
                or share is None
            ):
                continue
            task = name[len("train/") : -len("/failed")]
            steps = self._failed_by_task[task] = (
                self._failed_by_task.get(task, 0) + 1 if share >= 1 else 0
            )
            self._dead = (
                self._dead | {task}
                if steps >= self.config.zero_reward_steps
                else self._dead - {task}
            )
            if task in self._dead - before:
                raised.append(
                    Alarm(
                        step,
                        "task_failed",
                        f"no episode of task '{task}' has finished for {steps} steps, each was tried as often as "
                        "env.retries allows: nothing is learned of it and its retries cost time; failures.jsonl says why; fix its "
                        "simulator, or take it out of env.tasks",
                        "error",
                    )
                )
        return raised

    def _count_zero_steps(self, row: Mapping[str, Any]) -> list[str]:
        """Count this step for the whole run and for each source in it; returns the sources that are stuck.

        A step that holds nothing of a source says nothing about it: its count stays.
        """
        self._zero_steps = self._zero_steps + 1 if _scores_nothing(row, "train") else 0
        for name in row:
            source = name[len("train/") : -len("/parse_rate")]
            if name == f"train/{source}/parse_rate":
                zero = _scores_nothing(row, f"train/{source}")
                self._zero_by_source[source] = (
                    self._zero_by_source.get(source, 0) + 1 if zero else 0
                )
        return [
            s
            for s, count in sorted(self._zero_by_source.items())
            if count >= self.config.zero_reward_steps
        ]

    def must_stop(self, alarms: list[Alarm]) -> Alarm | None:
        """The first alarm that the configuration lets end the run."""
        return next((a for a in alarms if a.name in self.config.stop), None)

    def state_dict(self) -> dict[str, Any]:
        """JSON values."""
        return {
            "zero_steps": self._zero_steps,
            "zero_by_source": dict(self._zero_by_source),
            "active": sorted(self._active),
            "stuck": sorted(self._stuck),
            "failed_by_task": dict(self._failed_by_task),
            "dead": sorted(self._dead),
            "lasting": dict(self._lasting),
            "lasted": sorted(self._lasted),
            "untrained": self._untrained,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict`; checkpoints written before sources were counted start those counts at 0, and one that does
        not say which alarms were raised has those of what still lasts raised again: better than never."""
        self._zero_steps, self._active = state["zero_steps"], set(state["active"])
        self._zero_by_source, self._stuck = (
            dict(state.get("zero_by_source", {})),
            set(state.get("stuck", ())),
        )
        self._failed_by_task, self._lasting = (
            dict(state.get("failed_by_task", {})),
            dict(state.get("lasting", {})),
        )
        self._dead, self._lasted = set(state.get("dead", ())), set(state.get("lasted", ()))
        # an older checkpoint does not say: taken for trained
        self._untrained = state.get("untrained")


def _scores_nothing(row: Mapping[str, Any], where: str) -> bool:
    """Answers parse but are all wrong, among the metrics below `where` ('train' or 'train/SOURCE')."""
    parse = row.get(f"{where}/parse_rate")
    # the last: episodes of a robot that succeeded
    names = ("reward/part/accuracy", "reward/mean", "accuracy")
    accuracy = next(
        (row[f"{where}/{name}"] for name in names if row.get(f"{where}/{name}") is not None), None
    )
    return parse is not None and accuracy is not None and parse > 0.8 and accuracy < 0.01


def _stuck_message(row: Mapping[str, Any], where: str, sources: Sequence[str], steps: int) -> str:
    """What is stuck, for how long, and where to look."""
    if f"{where}/episodes" in row:
        return (
            f"episodes finish, but none has succeeded for {steps} steps: GRPO learns nothing from that. Judge the warm start "
            "with `mmrl eval`, give it more time (env.horizon), or rewards on the way (rl.reward: shaped)"
        )
    shown = ", ".join(f"'{s}'" for s in sources[:5]) + (
        f" and {len(sources) - 5} more" if len(sources) > 5 else ""
    )
    whose = f" of source{'s' if len(sources) > 1 else ''} {shown}" if sources else ""
    parse, outside = row.get(f"{where}/parse_rate"), row.get(f"{where}/outside_image")
    rate = f" ({parse:.0%})" if parse is not None else ""
    share = (
        f"; {outside:.0%} of predicted box area lies outside the picture"
        if outside is not None
        else ""
    )
    return (
        f"answers{whose} parse{rate} but have scored ~0 for {steps} steps{share}: check the coordinate frame (model.frame) "
        "and the answers of the data with `mmrl tasks check`"
    )
