"""A task whose answers a judge grades as well: what is asked, and the rule, are another task's.

    data:
      train:
        - path: rows.jsonl
          task: judged
          params:
            task: open_text                       # its prompt, its rule, its gold answers
            use: hybrid                           # the rule where it can tell, the judge else
            judge: {url: http://127.0.0.1:8000/v1, model: qwen}

Four uses of a judge:

    judge      it grades every answer that the rule can read (a format is the rule's affair)
    hybrid     rule and model (WeThink, arXiv 2506.07905; Omni-Thinker, arXiv 2507.14783): `ask: wrong` (default) asks where the
               rule finds an answer wrong, which may be right in other words; `ask: rows` for the rows that say
               `params: {verifiable: false}`
    thinking   SophiaVL-R1: what the rule says, and reasoning paid by Trust-GRPO's weight (mmrl.rewards.thinking), for whole groups
    pairwise   each answer of a group is compared with `opponents` others on either side, in both orders

A verdict that there is none of is a recorded failure of its reward (reason reward_judge_..), which nothing is learned from, or with
`on_failure: rule` the rule's score. `judge_failed`, `judge_asked`, `judge_tokens`, `judge_cost` and `judge_kept` count them. With
`audit` a share of the prompts is held out: there the reward is the rule's, and the judge is asked only to be compared with it; the
alarm `judge` says when they part.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar
from zlib import crc32

from mmrl.errors import ConfigError
from mmrl.judges import Comparison, Verdict, counted, judge_from
from mmrl.registry import task_from_spec
from mmrl.rewards import thinking
from mmrl.tasks.around import AroundTask
from mmrl.tasks.function import function_task
from mmrl.types import RewardContext, Sample, Score

__all__ = ["Judged"]

_USES = {
    "judge": "correctness",
    "hybrid": "correctness",
    "thinking": "thinking",
    "pairwise": "preference",
}
_KEY = "judge"
_RIGHT = 0.5


def _no_rule(completion: str, sample: Sample) -> float:
    """Rows without a rule: the judge alone says."""
    return 0.0


def _whole(name: str, value: Any, low: float, high: float) -> float:
    good = isinstance(value, (int, float)) and not isinstance(value, bool) and low <= value <= high
    if not good:
        raise ConfigError(
            f"judged.{name}: expected a number in [{low:g}, {high:g}], found {value!r}"
        )
    return float(value)


class Judged(AroundTask):
    """Another task's questions, graded by its rule and by a judge. Parameters:

    task, params  the task with the prompt and the rule; null: rows of question (and answer, the judge's reference) without a rule
    judge         settings of mmrl.judges.Judge: url, model, rubric, read, key_env, limits ...
    use           judge (default), hybrid, thinking or pairwise
    ask           of hybrid: wrong (default) or rows
    weights       of judge and pairwise: {judge: 1.0, rule: 0.0}, which are normalised to sum 1
    on_failure    fail (default) or rule, where the judge gives no verdict; of thinking always rule
    audit         of judge and hybrid: share of the prompts held out to compare the judge with the rule (default 0)
    show          what the judge sees: answer (default) or text, the whole completion; of thinking always text
    reference     the judge is shown the gold answer (default true)
    opponents     of pairwise: on either side (default 1)
    alpha, decay_steps   of thinking (default 0.3, 500)
    """

    part_names: tuple[str, ...] = ("rule", "judge")
    deadline_s: float | None = (
        math.inf
    )  # each verdict has judge.deadline_s from when its turn has come
    metric_names: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self,
        *,
        judge: Any = None,
        task: str | None = None,
        params: Mapping[str, Any] | None = None,
        use: str = "judge",
        ask: str = "wrong",
        weights: Mapping[str, float] | None = None,
        on_failure: str = "fail",
        audit: float = 0.0,
        show: str = "answer",
        reference: bool = True,
        opponents: int = 1,
        alpha: float = thinking.ALPHA,
        decay_steps: float = thinking.DECAY_STEPS,
    ) -> None:
        given = {
            name: value for name, value in locals().items() if name not in ("self", "__class__")
        }
        super().__init__(**given)
        for name, value, known in (
            ("use", use, tuple(_USES)),
            ("ask", ask, ("wrong", "rows")),
            ("on_failure", on_failure, ("fail", "rule")),
            ("show", show, ("answer", "text")),
        ):
            if value not in known:
                raise ConfigError(f"judged.{name}: expected {' or '.join(known)}, found {value!r}")
        if task == "judged":
            raise ConfigError("judged.task: expected another task, found judged itself")
        self.use, self.ask, self.on_failure = use, ask, on_failure
        self.show, self.shows_gold = "text" if use == "thinking" else show, bool(reference)
        settings = {"rubric": _USES[use], **(judge if isinstance(judge, Mapping) else {})}
        self.judge = judge_from(settings, "judged.judge")
        if self.judge.template.compares != (use == "pairwise"):
            raise ConfigError(
                f"judged.judge.rubric: expected one that {'compares two answers' if use == 'pairwise' else 'grades one answer'} "
                f"for use {use}, found the other kind"
            )
        self.alpha = _whole("alpha", alpha, 0, 10)
        self.decay_steps = _whole("decay_steps", decay_steps, 1e-3, 1e12)
        self.opponents = int(_whole("opponents", opponents, 1, 64))
        self.audit = _whole("audit", audit, 0, 1)
        if self.audit and use not in ("judge", "hybrid"):
            raise ConfigError(
                f"judged.audit: expected 0 with use {use}, which grades no answer by itself, found {audit}; judge_trust "
                "(thinking) and judge_swap_agreed (pairwise) tell how far it is to be believed"
            )
        self.weights = self._weights(weights)
        self.inner = (
            function_task(_no_rule)(**(params or {}))
            if task is None
            else task_from_spec(task, dict(params or {}))
        )
        self.has_rule = task is not None
        if not self.has_rule and (self.audit or use in ("hybrid", "thinking")):
            raise ConfigError(
                f"judged.task: expected a task with a rule for {'audit' if self.audit else f'use {use}'}, found none; name one, "
                "for example open_text"
            )
        low, high = self.inner.value_range
        most = high + self.alpha if use == "thinking" else max(1.0, high)
        self.value_range = min(0.0, low), most
        self.part_ranges = {"rule": (low, high)}
        self.in_group = use in ("thinking", "pairwise")  # type: ignore[misc]  # a class attribute of other tasks
        self.headline = self.inner.headline  # type: ignore[misc]
        self.metric_names = self.inner.metric_names  # type: ignore[misc]
        if use == "thinking":
            self.part_names = ("rule", "thinking")

    def _weights(self, given: Any) -> dict[str, float]:
        if given is not None and self.use not in ("judge", "pairwise"):
            raise ConfigError(
                f"judged.weights: expected none with use {self.use}, which weighs by itself, found {given!r}"
            )
        found = {"judge": 1.0, "rule": 0.0} if given is None else dict(given)
        good = set(found) <= {"judge", "rule"} and all(
            isinstance(w, (int, float)) and not isinstance(w, bool) and w >= 0
            for w in found.values()
        )
        if not good or not math.isfinite(total := math.fsum(found.values())) or total <= 0:
            raise ConfigError(
                f"judged.weights: expected judge and rule with weights of at least 0, one of them above, found {given!r}"
            )
        return {name: found.get(name, 0.0) / total for name in ("rule", "judge")}

    # the reward

    async def score(self, sample: Sample, text: str, ctx: RewardContext) -> Score:  # type: ignore[override]  # awaited
        """The rule's score with the judge's part; of thinking and pairwise the rule's alone, until the group is there."""
        found: Any = self.inner.score(sample, text, ctx)
        rule: Score = await found if inspect.isawaitable(found) else found
        if self.in_group:
            memo = {
                "text": text,
                "step": ctx.step,
                "question": self.question(sample, ctx),
                "reference": self.reference(sample, ctx),
            }
            alone = "rule" if self.use == "thinking" or not self.weights["judge"] else "judge"
            return self._score(rule, {"judge": 0.5} if alone == "judge" else {}, alone, memo=memo)
        audited = self._is_audited(sample)
        right = self._right(rule)
        if self.has_rule and not (rule.parsed or self.is_open(sample)):
            return self._score(rule, {}, "rule")
        if not audited and not self._asks(sample, right):
            return self._score(rule, {}, "rule")
        verdict = await self.judge.grade(
            self.question(sample, ctx),
            self.shown(text),
            reference=self.reference(sample, ctx),
            images=sample.images,
        )
        metrics = counted([verdict])
        if audited:
            if verdict.value is not None:
                says = verdict.value >= _RIGHT
                metrics |= {
                    "judge_audited": 1.0,
                    "judge_agreed": float(says == right),
                    "judge_too_kind": float(says and not right),
                }
            return self._score(rule, {}, "rule", metrics, verdict)
        if verdict.value is None:
            return self._failed(rule, verdict.reason, metrics, verdict)
        return self._score(rule, {"judge": verdict.value}, "judge", metrics, verdict)

    async def score_in_group(self, sample: Sample, scores: Sequence[Score], index: int) -> Score:  # type: ignore[override]
        """Thinking rewards with the group's trust, or the mean of the comparisons with others of the group."""
        if self.use == "thinking":
            return await self._thinking(sample, scores, index)
        return await self._compared(sample, scores, index)

    async def _thinking(self, sample: Sample, scores: Sequence[Score], index: int) -> Score:
        own = scores[index]
        places = [i for i, s in enumerate(scores) if _memo(s) is not None]
        outcomes = [scores[i].parts["rule"] for i in places]
        if thinking.is_uniform(outcomes):
            return self._score(own, {}, "rule")

        async def think(i: int) -> Verdict | None:
            memo = _memo(scores[i]) or {}
            if scores[i].parts["rule"] < thinking.ASKED_FROM:
                return None  # not asked: it counts with 0
            return await self.judge.grade(
                memo["question"], self.shown(memo["text"]), images=sample.images
            )

        verdicts = await asyncio.gather(*(think(i) for i in places))
        values = [0.0 if v is None else v.value for v in verdicts]
        trusted = thinking.trust(outcomes, values)
        mine = verdicts[places.index(index)]
        metrics = {**({} if mine is None else counted([mine])), "judge_trust": trusted}
        value = 0.0 if mine is None else mine.value
        if value is None:
            assert mine is not None
            return self._score(own, {}, "rule", metrics, mine)
        step = int((_memo(own) or {})["step"])
        paid = thinking.weight(
            step, trusted=trusted, alpha=self.alpha, decay_steps=self.decay_steps
        )
        weights = {"rule": 1.0, "thinking": paid}
        return self._score(own, {"thinking": value}, weights, metrics, mine)

    async def _compared(self, sample: Sample, scores: Sequence[Score], index: int) -> Score:
        own = scores[index]
        readable = [
            i
            for i, s in enumerate(scores)
            if _memo(s) is not None and (s.parsed or not self.has_rule)
        ]
        if index not in readable:
            return self._score(own, {}, "rule")
        place, count = readable.index(index), len(readable)
        steps = [d for k in range(1, self.opponents + 1) for d in (k, -k)]
        others = list(dict.fromkeys(readable[(place + d) % count] for d in steps))
        others = [i for i in others if i != index]
        if not others:
            return self._score(own, {"judge": 0.5}, "judge")
        found = await asyncio.gather(*(self._against(sample, scores, index, i) for i in others))
        # each comparison is of two answers: the one that stands first in the group counts it
        verdicts = [v for i, c in zip(others, found, strict=True) if index < i for v in c.verdicts]
        metrics = counted(verdicts)
        asked_twice = [c.agreed for c in found if c.agreed is not None]
        metrics |= {
            "judge_swapped": float(bool(asked_twice)),
            "judge_swap_agreed": sum(asked_twice) / len(asked_twice) if asked_twice else 0.0,
        }
        values = [c.value for c in found if c.value is not None]
        if not values:
            reason = next(v.reason for c in found for v in c.verdicts if v.reason is not None)
            return self._failed(own, reason, metrics | {"judge_failed": 1.0}, None)
        return self._score(own, {"judge": math.fsum(values) / len(values)}, "judge", metrics)

    async def _against(
        self, sample: Sample, scores: Sequence[Score], index: int, other: int
    ) -> Comparison:
        """`index` against `other`, asked as the pair in order of the group, so that both ask the same."""
        first, second = sorted((index, other))
        a, b = (_memo(scores[i]) or {} for i in (first, second))
        texts = self.shown(a["text"]), self.shown(b["text"])
        if texts[0] == texts[1]:
            return Comparison(0.5, None, ())
        found = await self.judge.compare(
            a["question"], *texts, reference=a["reference"], images=sample.images
        )
        if index == first or found.value is None:
            return found
        return replace(found, value=1.0 - found.value)

    # its pieces

    def _asks(self, sample: Sample, right: bool) -> bool:
        if self.use == "judge":
            return True
        return self.is_open(sample) if self.ask == "rows" else not right

    def is_open(self, sample: Sample) -> bool:
        """A row that says that no rule can tell."""
        return (
            self.use == "hybrid"
            and self.ask == "rows"
            and sample.params.get("verifiable", True) is False
        )

    def _is_audited(self, sample: Sample) -> bool:
        share = crc32(f"audit {sample.source} {sample.id}".encode("utf-8", "replace")) / 2**32
        return self.has_rule and share < self.audit and not self.is_open(sample)

    @staticmethod
    def _right(rule: Score) -> bool:
        return rule.metrics.get("correct", rule.parts.get("accuracy", rule.value)) >= _RIGHT

    def _score(
        self,
        rule: Score,
        parts: Mapping[str, float],
        by: str | Mapping[str, float],
        metrics: Mapping[str, float] | None = None,
        verdict: Verdict | None = None,
        memo: Mapping[str, Any] | None = None,
    ) -> Score:
        """The score of both; `by`: who decides, or the weights. A `rule` that is of the group's first round is taken apart."""
        value = rule.parts["rule"] if _memo(rule) is not None else rule.value
        second = self.part_names[1]
        found = {"rule": value, second: 0.0, **parts}
        if isinstance(by, Mapping):
            weights = dict(by)
        elif by == "rule":
            weights = {"rule": 1.0, second: 0.0}
        else:
            weights = {"rule": 0.0, "judge": 1.0} if self.use == "hybrid" else dict(self.weights)
        known = {**counted([]), **(metrics or {})}
        detail = {k: v for k, v in rule.detail.items() if k != _KEY}
        if memo is not None:
            detail[_KEY] = dict(memo)
        elif verdict is not None:
            detail[_KEY] = {"value": verdict.value, "reason": verdict.reason, "said": verdict.text}
        return Score.combine(
            found,
            weights,
            parsed=rule.parsed,
            reason=rule.reason,
            metrics={**rule.metrics, **known},
            detail=detail,
        )

    def _failed(
        self, rule: Score, reason: str | None, metrics: Mapping[str, float], verdict: Verdict | None
    ) -> Score:
        if self.on_failure == "rule" and self.has_rule:
            return self._score(rule, {}, "rule", metrics, verdict)
        lost = self._score(rule, {}, "rule", metrics, verdict)
        failure = Score.failure(f"reward_{reason}", self.part_names)
        return replace(failure, metrics=lost.metrics, detail=lost.detail)


def _memo(score: Score) -> Mapping[str, Any] | None:
    """What the first round kept of a completion for the second; None of one whose reward failed, or that was too long to keep."""
    found = score.detail.get(_KEY)
    return found if isinstance(found, Mapping) and "text" in found else None
