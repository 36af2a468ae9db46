"""Which turns of a step are trained on: those of high entropy (algorithm.turns.keep_entropy), group by group.

    samples, selection = select_turns(samples, config.algorithm, longest)       # of turns that know their entropy

A turn that is left out stays where it is, for those after it are packed behind it; it counts neither in the loss nor in a
denominator.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from mmrl.algorithms import highest_entropy
from mmrl.config import AlgorithmConfig
from mmrl.training.sequences import TrainingSample, token_weight

__all__ = ["Selection", "select_turns"]


@dataclass(frozen=True)
class Selection:
    """Turns that were in the loss, those `kept`, the `groups` that had turns to choose among, and the sum of their thresholds."""

    turns: int = 0
    kept: int = 0
    groups: int = 0
    threshold: float = 0.0

    def __add__(self, other: Selection) -> Selection:
        return Selection(
            self.turns + other.turns,
            self.kept + other.kept,
            self.groups + other.groups,
            self.threshold + other.threshold,
        )

    @property
    def metrics(self) -> dict[str, float]:
        """The share of turns that was kept, and the mean over groups of the lowest entropy kept (nats); none where nothing was
        chosen."""
        found = {"train/turns/kept": self.kept / self.turns} if self.turns else {}
        if self.groups:
            found["train/turns/entropy_threshold"] = self.threshold / self.groups
        return found


def select_turns(
    samples: Sequence[TrainingSample], algorithm: AlgorithmConfig, longest: int
) -> tuple[list[TrainingSample], Selection]:
    """The samples, those of a group's turns with less entropy than `algorithm.turns.keep_entropy` admits out of the loss, in their
    order. Weights of tokens and shares of the denominator are those of the turns that are left, as `loss_aggregation` says.
    `longest`: see `token_weight`. A sample that keeps all of its turns is the same object. Raises NonFiniteError."""
    groups: dict[tuple[int, int, int], list[int]] = defaultdict(list)
    for number, sample in enumerate(samples):
        groups[sample.place[0]].append(number)
    found, told = list(samples), Selection()
    for numbers in groups.values():
        kept, threshold = highest_entropy(
            [[t.entropy if t.in_loss else None for t in samples[n].turns] for n in numbers],
            algorithm.turns.keep_entropy,
        )
        for number, keeps in zip(numbers, kept, strict=True):
            found[number] = _without(samples[number], keeps, algorithm, longest)
        there = [
            t for n in numbers for t in samples[n].turns if t.in_loss and t.entropy is not None
        ]
        told += Selection(
            len(there),
            sum(map(sum, kept)),
            int(threshold is not None),
            threshold or 0.0,
        )
    return found, told


def _without(
    sample: TrainingSample, keeps: Sequence[bool], algorithm: AlgorithmConfig, longest: int
) -> TrainingSample:
    turns = [
        replace(t, in_loss=False) if t.in_loss and t.entropy is not None and not keep else t
        for t, keep in zip(sample.turns, keeps, strict=True)
    ]
    if all(new is old for new, old in zip(turns, sample.turns, strict=True)):
        return sample
    tokens = sum(int(t.mask_N.sum()) for t in turns if t.in_loss)
    scale, denominator = token_weight(tokens, algorithm.loss_aggregation, longest)
    return replace(
        sample, turns=tuple(replace(t, scale=scale) for t in turns), denominator=denominator
    )
