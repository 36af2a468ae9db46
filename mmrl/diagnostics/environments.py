"""Does an environment keep its contract? Played before any policy learns in it.

    mmrl env check browser --data val.jsonl
    mmrl env check my_env.py:MyEnv                   # an Environment, or the Task around it
    mmrl env check my-package/my_env                 # an entry point of the group mmrl.tasks

A scripted player (where the environment has one), a random one and one that writes junk play episodes of the first samples
through the model's own chat template, without its weights. The checks are listed in mmrl/diagnostics/_environment_checks.py; what
fails is reported as expected, found and how to fix it. What was seen is drawn: one filmstrip per episode, the turns' clicks and
crops on the pictures.
"""

from __future__ import annotations

import itertools
import statistics
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mmrl.diagnostics._environment_checks import CHECKS, JUNK, Check, Table
from mmrl.diagnostics._environment_play import Played, Player, Stage
from mmrl.diagnostics._environment_strips import draw_played
from mmrl.diagnostics.conformance import Finding, load_encoder, settings_of
from mmrl.environment import Environment
from mmrl.errors import ConfigError
from mmrl.registry import task_from_spec
from mmrl.task import Task
from mmrl.types import Sample

if TYPE_CHECKING:
    from mmrl.config import RunConfig

__all__ = ["EnvironmentReport", "check_environment"]

_SHOWN = 3  # problems quoted per check


@dataclass
class EnvironmentReport:
    """What `mmrl env check` found. `players` has what each of them earned; `speed`: resets and steps per second of one environment
    after the other, and the slowest call in seconds; `tokens`: of the first prompts and of whole rollouts (min, median, max)."""

    task: str
    data: str
    model: str
    samples: int = 0
    findings: list[Finding] = field(default_factory=list)
    players: dict[str, dict[str, float]] = field(default_factory=dict)
    speed: dict[str, float] = field(default_factory=dict)
    tokens: dict[str, dict[str, float]] = field(default_factory=dict)
    pictures: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """True when every check passed."""
        return all(finding.ok for finding in self.findings)


def check_environment(
    spec: str,
    data: str | Path | None = None,
    *,
    model: str | None = None,
    params: Mapping[str, Any] | None = None,
    out: str | Path = "runs/env-check",
    episodes: int = 4,
    timeout_s: float = 30.0,
    seed: int = 0,
    config: RunConfig | None = None,
) -> EnvironmentReport:
    """Play the first `episodes` samples of `data` (default: the task's own examples) with each player, and check the contract.

    With `config` prompts, parameters and data are those of that run's source with this task. A call of more than `timeout_s`
    seconds is a finding. Writes environment.json and a filmstrip per episode into `out`. Raises RegistryError or ConfigError for a
    name, model or parameter that does not exist; everything the environment itself does wrong is a finding.
    """
    from mmrl.training.runlog import write_json

    folder = Path(out)
    settings, data = settings_of(config, spec, data, params)
    task = task_from_spec(spec, settings)
    folder.mkdir(parents=True, exist_ok=True)
    path = str(data) if data is not None else task.example_data(str(folder / "examples"))
    if path is None:
        raise ConfigError(f"task '{spec}' has no examples of its own: give --data FILE")
    with tempfile.TemporaryDirectory() as scratch:
        encoder, name = load_encoder(model, Path(scratch), config)
        stage, report = Stage(encoder), EnvironmentReport(spec, path, name)
        samples = list(itertools.islice(task.load(path), episodes))
        _expect_environment(task, spec, samples, stage, path)
        table = Table(spec, settings, path, episodes, task, samples, stage, timeout_s, seed)
        report.samples = len(samples)
        _play_all(table)
        report.findings = [_run(check, table) for check in CHECKS]
        _summarise(table, report)
        report.pictures = draw_played(table.played, folder)
    write_json(folder / "environment.json", {**asdict(report), "ok": report.ok})
    return report


def _expect_environment(
    task: Task, spec: str, samples: list[Sample], stage: Stage, path: str
) -> None:
    if not samples:
        raise ConfigError(f"expected samples in {path}, found none; give --data FILE")
    for sample in samples:
        made = task.member(sample.task).environment(stage.template)
        if made is None:
            raise ConfigError(
                f"expected a task with an environment, found '{spec}', whose rollouts end after one answer; check it with "
                f"`mmrl tasks check {spec}`"
            )
        made.close()


def _play_all(table: Table) -> None:
    """Episodes of each player. One that fails in the same way everywhere costs a few calls, no more."""
    for number, sample in enumerate(table.samples):
        for name, player in _players(number, table.seed).items():
            if name == "scripted" and not _has(table, sample):
                continue
            played = table.play(name, sample, player)
            if name == "scripted" and played.failure is None and not played.steps:
                # an environment around another one says only when it is asked that there is no such player
                table.played.remove(played)
    left = iter(JUNK)
    for _ in JUNK:
        word = next(left, None)
        if word is None:
            break
        played = table.play("junk", table.samples[0], _junk_player(word, left))
        if played.failure is not None and not played.steps:  # it cannot even begin
            break


def _has(table: Table, sample: Sample) -> bool:
    """Whether the environment has a scripted player: its class says so."""
    made = table.new(sample)
    made.close()
    return type(made).scripted is not Environment.scripted


def _players(number: int, seed: int) -> dict[str, Player]:
    rngs = {
        name: np.random.default_rng([seed, number, place])
        for place, name in enumerate(("scripted", "random"))
    }

    def scripted(environment: Environment, turns: int) -> str | None:
        return environment.scripted(rngs["scripted"])

    def random(environment: Environment, turns: int) -> str | None:
        said = environment.random(rngs["random"])
        return said if said is not None else str(rngs["random"].choice(_WORDS))

    return {"scripted": scripted, "random": random}


_WORDS = ("A", "B", "C", "D", "yes", "no", "1", "[1, 1]", "left", "wait")


def _junk_player(first: str, others: Iterator[str]) -> Player:
    def junk(environment: Environment, turns: int) -> str | None:
        return first if turns == 0 else next(others, None)

    return junk


def _run(check: Check, table: Table) -> Finding:
    problems: list[str] = []
    try:
        problems.extend(check.run(table))
    except Exception as error:  # the environment's own code: whatever it raises is the finding
        problems.append(f"raised {type(error).__name__}: {error}")
    return Finding(
        check.name,
        not problems,
        check.expected,
        check.fix,
        tuple(p[:500] for p in problems[:_SHOWN]),
        len(problems),
    )


def _summarise(table: Table, report: EnvironmentReport) -> None:
    whole = table.whole()
    for name in ("scripted", "random", "junk"):
        own = [p for p in whole if p.player == name and p.rollout is not None]
        if own:
            report.players[name] = _earned(own, table.task)
    if whole:
        resets, steps = (
            [p.reset_s for p in whole],
            [s.seconds for p in whole for s in p.steps] or [0.0],
        )
        report.speed = {
            "resets_per_s": len(resets) / max(sum(resets), 1e-9),
            "steps_per_s": len(steps) / max(sum(steps), 1e-9),
            "slowest_s": max(*resets, *steps),
        }
        for place, what in enumerate(("first prompt", "last prompt")):
            lengths = [p.tokens[place] for p in whole]
            report.tokens[what] = {
                "min": min(lengths),
                "median": statistics.median(lengths),
                "max": max(lengths),
            }


def _earned(own: list[Played], task: Task) -> dict[str, float]:
    """Means over a player's episodes."""
    rollouts = [p.rollout for p in own if p.rollout is not None]
    out = {
        "episodes": float(len(own)),
        "reward": statistics.fmean(r.reward for r in rollouts),
        "turns": statistics.fmean(len(p.steps) for p in own),
        "truncated": statistics.fmean(r.truncated for r in rollouts),
    }
    headline = task.member(own[0].sample.task).headline
    if headline != "reward":
        out[headline] = statistics.fmean(
            r.score.metrics.get(headline, 0.0) if r.score else 0.0 for r in rollouts
        )
    return out
