"""`mmrl try`: one small training step of a run, thrown away: would it learn anything, and how long would its steps take?

    run = load_config("configs/grounding.yaml")
    small = load_config("configs/grounding.yaml", trial_overrides(run, 8, 8, Path("runs/try/x")))
    trial = try_out(Trainer(small, overwrite=True), run)
    trial.dead          # what would keep the run from learning: findings of mmrl.diagnostics.diagnosis

It is the trainer's own step, so data, prompts, rollout engine, reward workers, filter of groups and update are those of the run.
The weights it changes are never saved.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mmrl.algorithms.group_rewards import accuracies, score_of
from mmrl.config import RunConfig
from mmrl.data.sources import LoadedSource
from mmrl.diagnostics.diagnosis import Finding, diagnose, signal_share
from mmrl.errors import ConfigError
from mmrl.evaluation.rescore import logged_context, logged_sample
from mmrl.evaluation.stats import Estimate, wilson
from mmrl.types import RolloutGroup

__all__ = [
    "BINS",
    "Timing",
    "Trial",
    "expected_time",
    "rollout_seconds",
    "rounds_per_place",
    "trial_overrides",
    "try_out",
]

BINS = ("0", "0 - 1/4", "1/4 - 1/2", "1/2 - 3/4", "3/4 - 1", "1")
"""Pass rates of a prompt: none right, the quarters between, all right."""


def trial_overrides(run: RunConfig, prompts: int, samples: int, out: Path) -> list[str]:
    """What makes a trial's configuration of a run's: a step of `prompts` groups of `samples`, each prompt asked once.

    Raises ConfigError where `out` is the folder of a run.
    """
    if (out / "run.json").exists():
        raise ConfigError(
            f"expected --out to be a folder for a trial, found a run in {out}; choose another"
        )
    return [
        f"dir={json.dumps(str(out.parent))}",
        f"name={json.dumps(out.name)}",
        f"train.prompts_per_step={prompts}",
        f"rollout.group_size={samples}",
        "algorithm.max_rounds=1",
        f"algorithm.minibatches={min(run.algorithm.minibatches, prompts)}",
        "schedule.kind=serial",
        "schedule.timeline=0",
        # of prompts: a trial says what failed, and how often
        *(["reward.max_failure_share=1.0"] if run.data.train else []),
        "train.trackio=false",
        "train.wandb=false",
        "train.tensorboard=false",
        "operations.metrics_port=null",
    ]


@dataclass(frozen=True)
class Timing:
    """Seconds of a step of the run, (at least, at most), by what was measured on the trial's smaller step; None: not measured.

    At most: time grows with the number of answers. At least: it does not, as on a device that the trial left mostly idle.
    """

    rollout: tuple[float, float]
    update: tuple[float, float] | None
    steps: int

    @property
    def step(self) -> tuple[float, float]:
        """Both together; without the update where that was not measured."""
        update = self.update or (0.0, 0.0)
        return self.rollout[0] + update[0], self.rollout[1] + update[1]

    @property
    def run(self) -> tuple[float, float]:
        """All steps; evaluations and checkpoints are not counted."""
        return self.step[0] * self.steps, self.step[1] * self.steps


@dataclass
class Trial:
    """What one small step showed. `row`: its metrics, as metrics.jsonl has them; `examples`: texts that failed, by reason."""

    row: dict[str, Any]
    prompts: int
    samples: int
    findings: list[Finding]
    timing: Timing
    seconds: float
    histogram: Counter[str] = field(default_factory=Counter)
    longest: int = 0
    examples: dict[str, list[str]] = field(default_factory=dict)
    # by what reads them: "read", "native" (would at that level), "unread"
    answers: Counter[str] = field(default_factory=Counter)
    max_failure_share: float = 1.0

    @property
    def signal(self) -> Estimate | None:
        """Share of groups with signal with its 95 % interval; None where no group could be judged."""
        share, judged = (
            signal_share(self.row),
            self.row.get("train/groups/asked", 0) - (self.row.get("train/groups/failed") or 0),
        )
        return None if share is None else wilson(round(share * judged), int(judged))

    @property
    def dead(self) -> list[Finding]:
        """Why the run would learn nothing; [] where it would."""
        if self.signal is None:
            return [f for f in self.findings if f.name == "reward_failures"] or [
                Finding(
                    "prompts_failed",
                    "none of the prompts could be used: failures.jsonl says why; check paths and files",
                )
            ]
        return [
            f
            for f in self.findings
            if (not f.source and f.severity == "error")
            or (
                f.name == "reward_failures"
                and self.row["train/parse_rate"] is not None
                and self._failed > self.max_failure_share
            )
        ]

    @property
    def _failed(self) -> float:
        return sum(v for k, v in self.row.items() if k.startswith("train/failed/reward_"))


def try_out(trainer: Any, run: RunConfig) -> Trial:
    """Take one step with `trainer`, which is made of `trial_overrides`, and compare with what `run` asks for.

    Writes rollouts/step_000001.jsonl and failures.jsonl of the trainer's folder. One process only.
    """
    if trainer.world.size > 1:
        raise ConfigError(
            f"expected `mmrl try` in one process, found {trainer.world.size}; start it without torchrun"
        )
    folder: Path = trainer.folder.path
    (folder / "rollouts").mkdir(parents=True, exist_ok=True)
    for name in ("rollouts/step_000001.jsonl", "failures.jsonl"):
        (folder / name).unlink(missing_ok=True)
    with trainer.open_runtime():
        trainer.rollouts.sync()
        began = time.perf_counter()
        row = trainer._train_step(1)
        seconds = time.perf_counter() - began
        trainer.folder.append("failures.jsonl", trainer.rollouts.failures())
        small: RunConfig = trainer.config
        timing = expected_time(row, small, run, linear=trainer.world.device.type == "cpu")
        trial = Trial(
            row,
            small.train.prompts_per_step,
            small.rollout.group_size,
            diagnose(row, run.alarms),
            timing,
            seconds,
            max_failure_share=run.reward.max_failure_share,
        )
        if (rollouts := trainer.rollouts).train_sources:
            _observe(trial, groups := rollouts.answered())
            rows = rollouts.rows_of(groups, run.train.steps, run.rollout.max_new_tokens)
            trial.answers = _levels(rows, rollouts.train_sources)
            trainer.folder.append("rollouts/step_000001.jsonl", rows)
        else:
            trainer._log_rollouts(1)
    return trial


def _observe(trial: Trial, groups: Sequence[RolloutGroup]) -> None:
    """Histogram of pass rates, the longest answer, examples of failures."""
    for group in groups:
        if values := accuracies(group.rollouts):
            trial.histogram[_bin(sum(values) / len(values))] += 1
        for trajectory in group.rollouts:
            score = score_of(trajectory)
            trial.longest = max(trial.longest, trajectory.num_tokens)
            texts = trial.examples.setdefault((score.reason or "").partition(":")[0], [])
            if score.reason and len(texts) < 3 and trajectory.turns[-1].text not in texts:
                texts.append(trajectory.turns[-1].text)
    trial.examples.pop("", None)


def _levels(rows: Sequence[dict[str, Any]], sources: Sequence[LoadedSource]) -> Counter[str]:
    """Answers by what reads them: "read" by the run's task, "native" (or "official") where its parameter answers: native would,
    "unread"."""
    tasks = {
        (sample.source, sample.id): source.task for source in sources for sample in source.samples
    }
    found: Counter[str] = Counter()
    for row in rows:
        if row["score"]["parsed"]:
            found["read"] += 1
            continue
        row = json.loads(json.dumps(row, default=str))  # as a log holds it
        sample = logged_sample(row["sample"])
        task = tasks.get((sample.source, sample.id))
        reads = getattr(task.member(sample.task), "readable_at", None) if task is not None else None
        told = reads(sample, row["text"], logged_context(row)) if reads is not None else None
        found["unread" if told is None else "native" if told == "strict" else told] += 1
    return found


def _bin(rate: float) -> str:
    if rate <= 1e-6 or rate >= 1 - 1e-6:
        return BINS[0] if rate <= 1e-6 else BINS[-1]
    return BINS[1 + min(3, int(rate * 4))]


def rounds_per_place(signal: float | None, max_rounds: int) -> float:
    """Groups asked for each place of a step where a group has signal with this probability: 1 + q + .. + q^(max_rounds - 1), with
    q = 1 - signal (dynamic sampling asks again until a group has signal)."""
    again = 1.0 - (signal or 0.0)
    return float(sum(again**n for n in range(max_rounds)))


def rollout_seconds(row: dict[str, Any]) -> float:
    """Seconds of a step before its update: answers with their environments and rewards, or episodes with their simulators."""
    if "train/episodes" in row:  # time/rollout counts the policy's decisions alone
        return row["time/total"] - row["time/update"]
    return row["time/rollout"] + environment_seconds(row) + row["time/reward"]


def environment_seconds(row: dict[str, Any]) -> float:
    """Those of the environments of prompts: no device takes more of them at once."""
    return row.get("time/environment", 0.0)


def expected_time(row: dict[str, Any], small: RunConfig, run: RunConfig, *, linear: bool) -> Timing:
    """Seconds of a step of `run` by those of the trial's step, for one process with a device like this one. `linear`: of a device
    that a small batch keeps busy already (a CPU)."""
    signal = signal_share(row)
    rounds = (
        rounds_per_place(signal, run.algorithm.max_rounds)
        if run.algorithm.dynamic_sampling
        else 1.0
    )
    asked = small.train.prompts_per_step * small.rollout.group_size
    answers = run.train.prompts_per_step * run.rollout.group_size * rounds / asked
    played = environment_seconds(row) * answers
    measured = rollout_seconds(row) - environment_seconds(row)
    rollout = (
        measured * (answers if linear else min(1.0, answers)) + played,
        measured * answers + played,
    )
    kept = row.get("train/groups/kept", row.get("train/groups/trained")) or 0.0
    if not kept:
        return Timing(rollout, None, run.train.steps)
    groups = run.train.prompts_per_step * (
        1.0 - (1.0 - (signal or 0.0)) ** run.algorithm.max_rounds
    )
    grown = groups * run.rollout.group_size / (kept * small.rollout.group_size)
    update = row["time/update"] + row.get("time/logprobs", 0.0)
    return Timing(
        rollout, (update * (grown if linear else min(1.0, grown)), update * grown), run.train.steps
    )
