"""What is written of a step's episodes: its row of metrics and the rows of rollouts/."""

from __future__ import annotations

from typing import Any

import numpy as np

from mmrl.robotics.config import EmbodiedConfig
from mmrl.robotics.source import Played, StepRecord
from mmrl.training.metrics import update_metrics
from mmrl.training.update_result import UpdateResult

__all__ = ["episode_row", "step_row"]


def episode_row(e: Played) -> dict[str, Any]:
    """One line of rollouts/: what the policy chose and what it earned."""
    return {
        "step": e.key[0],
        "key": list(e.key),
        "task": e.task,
        "state": e.state,
        "seed": e.seed,
        "member": e.member,
        "success_once": e.success_once,
        "success_at_end": e.success_at_end,
        "steps": e.steps,
        "return": e.reward,
        "error": e.error,
        "tokens": [list(chosen) for chosen in e.tokens],
    }


def step_row(
    config: EmbodiedConfig, record: StepRecord, update: UpdateResult, work: dict[str, float]
) -> dict[str, Any]:
    """The metrics of a step, overall and by task.

    An episode that kept failing (a simulator that crashes or hangs, `error`) counts as one without success and without reward in
    train/success_once, success_at_end, reward and accuracy: what the run got out of what it asked for; its share is
    1 - train/parse_rate. By task the two are apart: train/TASK/failed is the share of episodes that failed, train/TASK/success_once
    the success of those that finished, None where none did. A task that a step did not play has None for both.
    """
    episodes = [e for g in record.groups for e in g]
    done = [e for e in episodes if e.error is None]
    row: dict[str, Any] = {
        "train/success_once": _mean([e.success_once for e in episodes]),
        "train/success_at_end": _mean([e.success_at_end for e in episodes]),
        "train/reward": _mean([e.reward for e in episodes]),
        "train/episode_steps": _mean([e.steps for e in done]),
        "train/accuracy": _mean([e.success_once for e in episodes]),
        "train/parse_rate": _mean([e.error is None for e in episodes]),
        "train/groups/asked": float(len(record.groups)),
        "train/groups/trained": float(record.kept),
        "train/groups/no_signal": float(record.no_signal),
        "train/groups/failed": float(record.failed),
        "train/groups/empty": float(record.empty),
        "train/episodes": float(len(episodes)),
        "train/failed_attempts": work["failed_attempts"],
        "train/decisions": float(update.turns),
        **update_metrics(update),
    }
    if len(config.env.tasks) > 1:
        for task in config.env.tasks:
            mine = [e for e in episodes if e.task == task]
            row[f"train/{task}/success_once"] = _mean(
                [e.success_once for e in mine if e.error is None]
            )
            row[f"train/{task}/failed"] = _mean([e.error is not None for e in mine])
    return row


def _mean(values: list[Any]) -> float | None:
    return float(np.mean(values)) if values else None
