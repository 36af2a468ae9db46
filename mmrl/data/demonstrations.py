"""Demonstrations in a group of rollouts: where they come from, how they are checked, and when they are added.

A data row carries them in its params, as whole completions without the end-of-turn token, or `algorithm.offline.gold` takes
the task's own gold answer where a row has none:

    {"id": "7", ..., "params": {"offline": [{"text": "<think>..</think> 4", "logprobs": [-0.1, ..]}, {"text": "4"}]}}

`logprobs` (optional) are the natural log-probs under whoever wrote the text, one per token of the policy's tokenizer and one
for the end of the turn; they are used with `behaviour: given`. A demonstration is scored by the task like any completion;
its loss is in mmrl/algorithms/offline.py. One that does not fit rollout.max_new_tokens is left out and recorded, never cut.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mmrl.data.json_lines import json_lines
from mmrl.errors import ConfigError, DataError, did_you_mean
from mmrl.files import check_text
from mmrl.types import RewardContext, Rollout, RolloutGroup, Sample, Score, StopReason, Turn

if TYPE_CHECKING:
    from mmrl.config import RunConfig
    from mmrl.data.sources import LoadedSource
    from mmrl.policy.policy import Policy
    from mmrl.task import Task

__all__ = [
    "Demonstration",
    "Demonstrations",
    "RefusedRow",
    "check_demonstrations",
    "demonstrations",
    "is_right",
    "on_policy",
]

_KEYS = ("text", "logprobs")
_SALT = 23  # tells the choice of demonstrations from other random numbers of a group


class Demonstration(NamedTuple):
    """A whole completion by somebody else: its text and, where known, the log-prob of each token (end of turn included)."""

    text: str
    logprobs: tuple[float, ...] | None = None


@dataclass(frozen=True)
class RefusedRow:
    """A row whose demonstrations cannot be used: file, line (None where the file has no lines), reason."""

    file: str
    row: int | None
    reason: str

    def __str__(self) -> str:
        return f"{self.file}: {'' if self.row is None else f'row {self.row}: '}{self.reason}"


def on_policy(trajectories: Sequence[Rollout]) -> list[Rollout]:
    """Those the policy of the step wrote."""
    return [t for t in trajectories if not (t.offline or t.replayed)]


def is_right(score: Score) -> bool:
    """The task's own verdict (metric 'correct') when it has one, else a value above 0.5."""
    return score.metrics["correct"] >= 0.5 if "correct" in score.metrics else score.value > 0.5


def demonstrations(sample: Sample) -> tuple[Demonstration, ...]:
    """The demonstrations of a sample's params. Raises DataError saying what is expected and how to fix it."""
    given = sample.params.get("offline", ())
    if not isinstance(given, (list, tuple)):
        raise DataError(
            f'params.offline: expected a list of {{"text": ..}}, found {given!r:.80}; write [{{"text": ".."}}]'
        )
    return tuple(
        _demonstration(entry, f"params.offline[{number}]") for number, entry in enumerate(given)
    )


def _demonstration(entry: Any, where: str) -> Demonstration:
    if not isinstance(entry, Mapping):
        raise DataError(
            f"{where}: expected {{\"text\": ..}}, found {entry!r:.80}; put the completion into 'text'"
        )
    if "logps" in entry and "logprobs" not in entry:
        warnings.warn(
            f"{where}.logps is called logprobs now; the old name goes with the next release",
            FutureWarning,
            stacklevel=2,
        )
        entry = {"logprobs" if key == "logps" else key: value for key, value in entry.items()}
    for key in entry:
        if key not in _KEYS:
            raise DataError(
                f"{where}: expected the keys {', '.join(_KEYS)}, found {key!r:.60}.{did_you_mean(key, _KEYS)}"
            )
    text, logprobs = entry.get("text"), entry.get("logprobs")
    if not isinstance(text, str) or not text.strip():
        raise DataError(
            f"{where}: expected a whole completion as 'text', found {text!r:.80}; write it, or remove the entry"
        )
    if logprobs is None:
        return Demonstration(text)
    if not isinstance(logprobs, (list, tuple)) or not logprobs:
        raise DataError(
            f"{where}.logprobs: expected a list with one log-prob per token, found {logprobs!r:.80}; leave it out if unknown"
        )
    for place, value in enumerate(logprobs):
        if type(value) not in (int, float) or not math.isfinite(value) or value > 1e-4:
            raise DataError(
                f"{where}.logprobs[{place}]: expected a finite natural log-probability of at most 0, found "
                f"{value!r:.40}; are these probabilities, or in another base?"
            )
    return Demonstration(text, tuple(min(0.0, float(v)) for v in logprobs))


def _lines(path: str | Path) -> dict[tuple[str, str], int]:
    """(source, id) -> line of a JSON Lines file (mmrl's own defaults for rows without them); empty for other files."""
    file = Path(path)
    found: dict[tuple[str, str], int] = {}
    if not file.is_file():
        return {}
    for number, row in json_lines(file):
        if isinstance(row, dict):
            name = (str(row.get("source", file.stem)), str(row.get("id", f"{file.stem}-{number}")))
            found.setdefault(name, number)
    return found


def check_demonstrations(
    path: str | Path, samples: Sequence[Sample], on_error: str = "raise"
) -> tuple[tuple[Sample, ...], tuple[RefusedRow, ...]]:
    """Samples whose params.offline can be used, and the others. Raises DataError for the first unless on_error is 'record'."""
    kept: list[Sample] = []
    refused: list[RefusedRow] = []
    lines: dict[tuple[str, str], int] | None = None
    for sample in samples:
        try:
            demonstrations(sample)
            kept.append(sample)
        except DataError as error:
            lines = _lines(path) if lines is None else lines
            refused.append(
                RefusedRow(
                    str(path),
                    lines.get((sample.source, sample.id)),
                    f"sample {sample.id!r}: {error}",
                )
            )
            if on_error == "raise":
                raise DataError(str(refused[-1])) from error
    return tuple(kept), tuple(refused)


class Demonstrations:
    """The demonstrations of a run (`algorithm.offline`): ready to be trained on, chosen by the group's key alone.

    Raises ConfigError when there are none at all or a task cannot judge them, DataError for log-probs of another length.
    """

    def __init__(self, config: RunConfig, policy: Policy, sources: Sequence[LoadedSource]) -> None:
        self.settings, self.config, self.policy = config.algorithm.offline, config, policy
        self._forbidden = frozenset((*policy.eos_ids, *policy.banned.tolist()))
        if self.settings.per_group:
            self._check(sources)

    def _check(self, sources: Sequence[LoadedSource]) -> None:
        found = False
        for source in sources:
            for sample in source.samples:
                told = demonstrations(sample)
                found = found or bool(told) or self.settings.gold
                if (told or self.settings.gold) and source.task.member(sample.task).in_group:
                    raise ConfigError(
                        f"algorithm.offline: the reward of task '{sample.task}' looks at the policy's whole group, "
                        "so demonstrations have no place in it: remove params.offline (sample "
                        f"{sample.id!r}) or gold"
                    )
                if self.settings.behaviour == "given":
                    self._check_lengths(source, sample, told)
        if not found:
            raise ConfigError(
                f"algorithm.offline.per_group is {self.settings.per_group}: expected demonstrations in "
                "params.offline of the data.train rows, found none; add them, or set algorithm.offline.gold true"
            )

    def _check_lengths(
        self, source: LoadedSource, sample: Sample, told: Sequence[Demonstration]
    ) -> None:
        for number, one in enumerate(told):
            tokens = len(self._tokens(one.text))
            if one.logprobs is not None and len(one.logprobs) != tokens:
                row = RefusedRow(
                    source.config.path,
                    _lines(source.config.path).get((sample.source, sample.id)),
                    f"sample {sample.id!r}: params.offline[{number}].logprobs: expected {tokens} log-probs (one per "
                    f"token and one for the end of the turn), found {len(one.logprobs)}; log-probs of another tokenizer "
                    "do not fit: leave them out, or set algorithm.offline.behaviour one",
                )
                raise DataError(str(row))

    def _tokens(self, text: str) -> tuple[int, ...]:
        """Token ids of a completion, ended by the model's end-of-turn token. Raises DataError for what is no text."""
        check_text(text, "a demonstration")
        return (
            *self.policy.processor.tokenizer(text, add_special_tokens=False)["input_ids"],
            self.policy.eos_ids[0],
        )

    def active(self, step: int) -> bool:
        """Whether groups of `step` (from 1) get demonstrations: until a share of the steps is done."""
        return (
            self.settings.per_group > 0
            and (step - 1) / self.config.train.steps < self.settings.until - 1e-12
        )

    def choose(
        self, sample: Sample, task: Task, key: tuple[int, int, int], ctx: RewardContext
    ) -> tuple[tuple[Turn, ...], tuple[str, ...]]:
        """At most per_group demonstrations as completions, and why others of this row could not be used.

        `Turn.logprobs` are the behaviour's: 0 (probability 1) where it is unknown or `behaviour` is 'one'.
        """
        told, skipped = demonstrations(sample), []
        if not told and self.settings.gold:
            try:
                told = (Demonstration(task.gold(sample, ctx)),)
            except Exception as error:  # user code: recorded, the group goes without
                return (), (
                    f"demonstration: the task's gold answer failed: {type(error).__name__}: {error}"[
                        :500
                    ],
                )
        usable: list[Turn] = []
        for number, one in enumerate(told):
            limit = self.config.rollout.max_new_tokens
            try:
                ids = self._tokens(one.text)
            except DataError as error:
                skipped.append(str(error))
                continue
            if len(ids) > limit:
                skipped.append(
                    f"demonstration {number}: expected at most rollout.max_new_tokens = {limit} tokens, found "
                    f"{len(ids)}"
                )
            elif self._forbidden.intersection(ids[:-1]):
                skipped.append(
                    f"demonstration {number}: expected text, found end-of-turn or media tokens in it"
                )
            else:
                given = (
                    one.logprobs
                    if self.settings.behaviour == "given" and one.logprobs is not None
                    else (0.0,) * len(ids)
                )
                usable.append(Turn(ids, one.text, given, StopReason.EOS, self.policy.version))
        if len(usable) > self.settings.per_group:
            rng = np.random.default_rng((self.config.seed, _SALT, *key))
            usable = [
                usable[i] for i in sorted(rng.permutation(len(usable))[: self.settings.per_group])
            ]
        return tuple(usable), tuple(skipped)

    def rollouts(self, demonstrations: int) -> int:
        """Rollouts of a group with so many demonstrations: fewer by those they replace, unless they may not be needed."""
        o, size = self.settings, self.config.rollout.group_size
        return size - demonstrations if o.replace and not o.only_when_failing else size

    def wanted(self, group: RolloutGroup) -> bool:
        """Whether a group that has its rollouts still gets its demonstrations."""
        return not self.settings.only_when_failing or not any(
            t.score and is_right(t.score) for t in group.rollouts
        )

    def mix(
        self, group: RolloutGroup, completions: Sequence[Turn], scores: Sequence[Score]
    ) -> RolloutGroup:
        """`group` with its scored demonstrations behind the rollouts; the last rollouts make room where they were one too many."""
        told = tuple(
            Rollout((c,), s, offline=True) for c, s in zip(completions, scores, strict=True)
        )
        own = group.rollouts
        room = self.config.rollout.group_size - len(told) if self.settings.replace else len(own)
        return replace(group, rollouts=(*own[:room], *told), replaced=own[room:])
