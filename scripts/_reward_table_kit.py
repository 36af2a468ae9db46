"""Rows of the reward table: what a peer's rule gives, what mmrl gives on the same input, and what the difference means.

`score` runs a task the way a user configures it and `call` a public function; both return a Run, which names what was
really run, so that the table cannot name one reward and show another.
"""
from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from mmrl.coords import CoordFrame
from mmrl.registry import task_from_spec
from mmrl.types import ImageSize, RewardContext, Sample, Score, StopReason
from rewards.format import wrap_answer

__all__ = ["Case", "DEFECTS", "Run", "TOLERANCE", "Table", "call", "objects_text", "run_task", "score"]

TOLERANCE = 1e-6

DEFECTS: Mapping[str, str] = {
    "1": "averages over the keys both sides share: what was left out costs nothing",
    "2": "greedy matching overwrites its indices, or takes a box a later truth needs",
    "3": "a keyword is found inside other words",
    "4": "the bars of a special token are not escaped in a pattern",
    "5": "the accuracy is overwritten, so every length takes the branch of right answers",
    "6": "failures leave the denominator",
    "7": "model text is run as Python",
    "14": "an exception becomes a silent zero",
    "15": "a timeout by alarm signal fails outside the main thread",
    "16": "boxes with a wrong label cost nothing",
    "17": "every text is normalised alike, code included",
    "19": "empty or degenerate input divides by zero, or a right empty answer earns nothing",
    "A": "right answers are lost: a one-pixel overlap, decimals, a true 0, options E and F",
    "B": "a repeated object fills up the number or is free",
    "C": "boxes without confidences count in the order they were written",
    "D": "a letter or number from a sentence counts as the answer",
    "E": "a weak similarity counts as correct",
    "F": "the coordinate frame is guessed from the numbers",
    "G": "a failure is answered at random",
    "H": "an empty or endless text matches",
    "I": "an unknown task type falls back to another scorer",
}
"""Defects of the peers: numbers are those of our list of defects, letters are smaller ones of single rules."""


_ABOUT_THE_INPUT = {"about", "size", "frame", "progress", "tokens", "pictures", "stop", "raw", "deadline_s"}
_NOT_SHOWN = ("answer_format", "weights", "normalise", "deadline_s")  # deadline_s: the machine's patience, not the rule


class Run(NamedTuple):
    """What was run ('task:preset [part]' or a function's name), its value, and 'task:preset' for a preset as it is."""

    name: str
    value: float
    preset: str = ""


@dataclass(frozen=True)
class Case:
    """One row. `expected`: the peer's value, None where its code fails; `rule`: ours by our own documentation where the
    two differ; `verdict`: 'equal', 'defect N' or 'differs by design', with one sentence `why` for the last two."""

    family: str
    reward: str
    peer: str
    source: str
    what: str
    expected: float | None
    ours: float
    verdict: str
    rule: float | None = None
    why: str = ""
    preset: str = ""

    @property
    def holds(self) -> bool:
        """Equal where it should be; else ours is our rule, and really differs from the peer's value."""
        if self.verdict == "equal":
            return self.expected is not None and abs(self.ours - self.expected) <= TOLERANCE
        if self.rule is None or abs(self.ours - self.rule) > TOLERANCE:
            return False
        return self.expected is None or abs(self.expected - self.rule) > TOLERANCE


class Table:
    """Collects the rows of one family, in order."""

    def __init__(self, family: str) -> None:
        self.family = family
        self.cases: list[Case] = []

    def equal(self, run: Run, peer: str, source: str, what: str, expected: float) -> None:
        """The peer is right: ours must give the same number."""
        self._add(run, peer, source, what, expected, "equal")

    def defect(self, number: str, run: Run, peer: str, source: str, what: str, expected: float | None, rule: float) -> None:
        """The peer's value is a listed defect (None: its code fails): ours must be `rule`."""
        self._add(run, peer, source, what, expected, f"defect {number}", rule, DEFECTS[number])

    def design(self, run: Run, peer: str, source: str, what: str, expected: float, rule: float, why: str) -> None:
        """We chose otherwise: ours must be `rule`."""
        self._add(run, peer, source, what, expected, "differs by design", rule, why)

    def _add(self, run: Run, peer: str, source: str, what: str, expected: float | None, verdict: str,
             rule: float | None = None, why: str = "") -> None:
        self.cases.append(Case(self.family, run.name, peer, source, what, expected, run.value, verdict, rule, why, run.preset))


def call(function: Callable[..., Any], *args: Any, label: str = "", **kwargs: Any) -> Run:
    """The value of a public function or reward object; `label` names what has no name of its own."""
    name = label or f"{function.__module__}.{function.__qualname__}"
    return Run(name, float(function(*args, **kwargs)))


def objects_text(items: Sequence[tuple[str, Sequence[float]]]) -> str:
    """(label, box) pairs as the JSON a model writes."""
    return json.dumps([{"bbox_2d": list(box), "label": label} for label, box in items])


def run_task(task: str, text: str, answer: Any, *, preset: str | None = None, about: Mapping[str, Any] | None = None,
             size: tuple[int, int] = (1000, 1000), frame: str = "abs_orig", progress: tuple[int, int] = (1, 1),
             tokens: int = 24, pictures: int = 1, stop: StopReason = StopReason.EOS, raw: bool = False,
             **params: Any) -> tuple[str, Score]:
    """(name, score) of `text`, put into the envelope of the task's answer format unless `raw`; `about` is sample.params.

    Pictures have `size`, also as the model saw them.
    """
    made: Any = task_from_spec(task, {**({} if preset is None else {"preset": preset}), **params})
    sample = Sample("case", task, "table", "?", answer, tuple(f"{i}.png" for i in range(pictures)), params=dict(about or {}))
    ctx = RewardContext(*progress, CoordFrame(frame), (ImageSize(size, size),) * pictures, stop, tokens, 1024)
    shown = [f"{k}={_short(v)}" for k, v in params.items() if k not in _NOT_SHOWN]
    name = ":".join([task, *([preset] if preset else [])]) + "".join(f" {s}" for s in shown)
    return name, made.score(sample, text if raw else wrap_answer(text, made.answer_format), ctx)


def score(task: str, text: str, answer: Any, part: str = "accuracy", *, preset: str | None = None, **settings: Any) -> Run:
    """What a task gives, see `run_task`. `part`: a reward part, 'total', a metric as 'metric:NAME', or 'recorded' (1 when
    the reason says that the reward itself failed)."""
    name, found = run_task(task, text, answer, preset=preset, **settings)
    if part == "total":
        value = found.value
    elif part == "recorded":
        value = float((found.reason or "").startswith("reward_error"))
    else:
        value = found.metrics[part[7:]] if part.startswith("metric:") else found.parts[part]
    kept = preset and not settings.keys() - _ABOUT_THE_INPUT  # with settings changed it is not the preset any more
    return Run(f"{name} [{part.removeprefix('metric:')}]", value, f"{task}:{preset}" if kept else "")


def _short(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{k}: {_short(v)}" for k, v in value.items()) + "}"
    return str(value)
