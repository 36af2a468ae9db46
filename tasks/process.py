"""Process rewards by a judge: a task of several turns, whose turns are paid for what they bring.

    data:
      train:
        - path: rows.jsonl
          task: process
          params:
            task: zoom                            # any task with an environment: what is shown, and what the outcome pays
            weight: 0.3
            judge: {url: http://127.0.0.1:8000/v1, model: qwen}

When a rollout is over, a judge is shown the task, what was written and what was answered up to each turn, all turns at once. Two
ways to pay:

    progress   it says how far the task is done after each turn, p in [0, 1]: a turn earns weight * (p - p before it).
               These are the differences of potential-based shaping (Ng, Harada & Russell 1999, without discount), but the end
               keeps its potential: the sum is weight * the last p, however many turns there are, which pays for the outcome, too
    turns      it grades each turn by itself, g in [0, 1]: a turn earns weight * g / max_turns, as step rewards of process reward
               models do. Longer rollouts may earn more; where that is no wish, take progress

A turn that the environment could not read is not asked about: it brings nothing. Each verdict is accounted for, as those of the
task `judged`: `judge_asked`, `judge_failed`, `judge_kept`, `judge_tokens`, `judge_cost`, and `process`, what all turns earned.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from mmrl.environment import Environment, Observation, Outcome, TurnRewards
from mmrl.errors import ConfigError
from mmrl.judges import Verdict, counted, judge_from
from mmrl.registry import task_from_spec
from mmrl.task import Template
from mmrl.tasks.around import AroundTask
from mmrl.tasks.parameters import check_mapping
from mmrl.types import ImageSize, RewardContext, Sample, Score, Turn, VideoSize

__all__ = ["Process"]

_RUBRICS = {"progress": "progress", "turns": "turn"}


class Process(AroundTask):
    """See the module.

    task, params   the task with the environment
    judge          settings of mmrl.judges.Judge; its rubric is by default `progress` or `turn`, as `pay` asks; with images: true it
                   is shown the picture before the turn and the one that answered it
    pay            progress (default) or turns
    weight         of what the judge says against what the environment pays (default 0.5)
    on_failure     what a verdict that there is none of does: fail (default), the rollout is recorded and not learned from; skip,
                   the turn brings nothing
    """

    part_names = ("reward",)
    metric_names: ClassVar[tuple[str, ...]] = ()
    has_rule = True
    show, shows_gold = "text", False

    def __init__(
        self,
        *,
        task: str = "",
        params: Mapping[str, Any] | None = None,
        judge: Any = None,
        pay: str = "progress",
        weight: float = 0.5,
        on_failure: str = "fail",
    ) -> None:
        super().__init__(
            task=task, params=params, judge=judge, pay=pay, weight=weight, on_failure=on_failure
        )
        for name, value, known in (
            ("pay", pay, tuple(_RUBRICS)),
            ("on_failure", on_failure, ("fail", "skip")),
        ):
            if value not in known:
                raise ConfigError(f"process.{name}: expected {' or '.join(known)}, found {value!r}")
        number = isinstance(weight, (int, float)) and not isinstance(weight, bool)
        if not number or not 0 < weight <= 10:
            raise ConfigError(
                f"process.weight: expected a number above 0 and at most 10, found {weight!r}"
            )
        check_mapping("process.params", params or {})
        if not task or task == "process":
            raise ConfigError(
                f"process.task: expected a task with an environment, such as zoom or browser, found {task!r}"
            )
        settings = {"rubric": _RUBRICS[pay], **(judge if isinstance(judge, Mapping) else {})}
        self.judge = judge_from(settings, "process.judge")
        if self.judge.template.compares:
            raise ConfigError(
                "process.judge.rubric: expected one that grades one text, found one that compares two"
            )
        self.pay, self.weight, self.on_failure = pay, float(weight), on_failure
        self.inner = task_from_spec(task, dict(params or {}))
        low, high = self.inner.value_range
        self.value_range = low, high + self.weight
        self.headline = self.inner.headline  # type: ignore[misc]  # a class attribute of other tasks
        self.metric_names = self.inner.metric_names  # type: ignore[misc]

    def environment(self, template: Template) -> Environment:
        """The other task's, with the judge. Raises ConfigError where it has none."""
        inner = self.inner.environment(template)
        if inner is None:
            raise ConfigError(
                f"process.task: expected a task with an environment, found '{self.inner.name}', whose answers end after one turn; "
                "the task judged lets a judge grade those"
            )
        return _Watched(inner, self)

    def score(self, sample: Sample, text: str, ctx: RewardContext) -> Score:
        """The other task's: rollouts are judged by the environment."""
        return self.inner.score(sample, text, ctx)

    def example_data(self, folder: str) -> str | None:
        """The other task's."""
        return self.inner.example_data(folder)

    async def rewards(self, seen: _Seen, turns: Sequence[Turn]) -> TurnRewards:
        """What each turn of a rollout earns by the verdicts; a failure where one is missing (on_failure fail)."""
        asked = [n for n, turn in enumerate(turns) if turn.parsed]
        found = await asyncio.gather(*(self._verdict(seen, turns, n) for n in asked))
        verdicts = dict(zip(asked, found, strict=True))
        lost = [v.reason for v in verdicts.values() if v.value is None]
        if lost and self.on_failure == "fail":
            why = (
                f"{len(lost)} of {len(asked)} turns have no verdict, the first for {lost[0]}; process.on_failure: skip pays "
                "nothing for such a turn instead"
            )
            return TurnRewards([0.0] * len(turns), counted(found), why)
        rewards, before = [], 0.0
        for number in range(len(turns)):
            verdict = verdicts.get(number)
            value = None if verdict is None else verdict.value
            if self.pay == "turns":
                rewards.append(self.weight * (value or 0.0) / seen.max_turns)
            else:
                now = before if value is None else value
                rewards.append(self.weight * (now - before))
                before = now
        return TurnRewards(rewards, {"process": math.fsum(rewards), **counted(found)})

    async def _verdict(self, seen: _Seen, turns: Sequence[Turn], number: int) -> Verdict:
        """On turn `number`. What was said is one JSON text, in which nobody can write a line of somebody else's."""
        said = [{"environment": seen.texts[0]}]
        for n in range(number):
            said += [{"player": turns[n].text}, {"environment": seen.texts[n + 1]}]
        said.append({"player": "(the turn to grade)"})
        said.append({"environment": seen.texts[number + 1]})
        before, after = seen.before(number), seen.before(number + 1)
        shown = [p for p in (before, None if after is before else after) if p is not None]
        return await self.judge.grade(
            json.dumps(said, ensure_ascii=False, indent=0), turns[number].text, images=shown
        )


class _Seen:
    """What was shown, for the judge: a text for each observation, the first and those that answered, and its last picture."""

    def __init__(self, max_turns: int) -> None:
        self.max_turns = max_turns
        self.texts: list[str] = []
        self._pictures: list[Any] = []

    def add(self, observation: Observation | None, end: str = "") -> None:
        """One more; `end`: what is said in place of words that do not follow."""
        self.texts.append(end if observation is None else _text_of(observation))
        images = [] if observation is None else list(observation.images)
        self._pictures.append(images[-1] if images else None)

    def before(self, number: int) -> Any:
        """The picture shown last before turn `number` (that of an earlier observation, where its own has none); None: there was
        none."""
        known = [p for p in self._pictures[: number + 1] if p is not None]
        return known[-1] if known else None


def _text_of(observation: Observation) -> str:
    """The words of an observation; where pictures stand among them, and the system's, which is the same for all, left out."""
    found: list[str] = []
    for message in observation.messages:
        content = message.get("content") or ""
        if message.get("role") == "system":
            continue
        for item in [{"type": "text", "text": content}] if isinstance(content, str) else content:
            kind = item.get("type")
            found.append(str(item.get("text", "")) if kind == "text" else f"[{kind}]")
    return "\n".join(found)


class _Watched(Environment):
    """Another environment, whose observations are kept until the end."""

    # the other environment keeps its own; a judge has a deadline for each request from when its turn has come, which is late where
    # `per_minute` lets few begin
    process_limit_s: ClassVar[float] = math.inf

    def __init__(self, inner: Environment, task: Process) -> None:
        self.inner, self.task = inner, task
        self.max_turns = inner.max_turns  # type: ignore[misc]
        self.concurrent = inner.concurrent  # type: ignore[misc]
        self.headline = inner.headline  # type: ignore[misc]
        self.value_range = task.value_range  # type: ignore[misc]
        self.seen = _Seen(inner.max_turns)

    def reset(self, sample: Sample, seed: int) -> Observation:
        first = self.inner.reset(sample, seed)
        self.seen = _Seen(self.inner.max_turns)
        self.seen.add(first)
        return first

    def shown(self, sizes: Sequence[ImageSize | VideoSize]) -> None:
        self.inner.shown(sizes)

    def step(self, turn: Turn) -> Outcome:
        outcome = self.inner.step(turn)
        self.seen.add(outcome.observation, _end_of(outcome))
        return outcome

    def scripted(self, rng: np.random.Generator) -> str | None:
        return self.inner.scripted(rng)

    def random(self, rng: np.random.Generator) -> str | None:
        return self.inner.random(rng)

    async def process_rewards(self, turns: Sequence[Turn]) -> TurnRewards | None:
        from mmrl.rollout.process_rewards import asked  # of a run, which has torch

        own = await asked(self.inner, turns)
        judged = await self.task.rewards(self.seen, turns)
        if own is None:
            return judged
        both = [a + b for a, b in zip(own.rewards, judged.rewards, strict=True)]
        return TurnRewards(both, {**own.info, **judged.info}, own.failure or judged.failure)

    def close(self) -> None:
        self.inner.close()


def _end_of(outcome: Outcome) -> str:
    """The end of an episode in words: what it came to is the environment's own measure, which the judge may know."""
    measured = ", ".join(f"{name} {value:g}" for name, value in outcome.info.items())
    return f"(the end{': ' + measured if measured else ''})"
