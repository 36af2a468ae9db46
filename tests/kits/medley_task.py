"""A task for the engine's own tests: rows of several tasks in one file, two reward parts, difficulties, scores in groups.

The rewards are dense in random text: share of letters a-m (accuracy) and of vowels (style).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import ClassVar

from mmrl.types import RewardContext, Sample, Score
from tests.kits.album_task import Album


class Medley(Album):
    """Rows may name their task ('share' or 'binary': reward 0 or 1), source and params. `peers`: scores need the group.

    `bonus` widens the rewards to [0, 1 + bonus]; `skip` leaves out that many rows and counts them; `solved` fixes both parts
    as a share of what they can be.
    """

    name: ClassVar[str] = "medley"
    headline: ClassVar[str] = "correct"
    part_names: tuple[str, ...] = ("accuracy", "style")

    def __init__(
        self, peers: bool = False, bonus: float = 0.0, skip: int = 0, solved: float | None = None
    ) -> None:
        super().__init__(peers=peers, bonus=bonus)
        self.in_group = peers  # type: ignore[misc]
        self.bonus, self.skip, self.solved = bonus, skip, solved
        self.value_range = (0.0, 1.0 + bonus)
        self.part_ranges = dict.fromkeys(self.part_names, self.value_range)
        self.skipped: Mapping[str, int] = MappingProxyType({})

    def load(self, path: str) -> Iterable[Sample]:
        rows = [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]
        self.skipped = {"on_request": self.skip} if self.skip else {}
        return [
            Sample(
                r["id"],
                r.get("task", "share"),
                r.get("source", Path(path).stem),
                r["question"],
                None,
                tuple(r.get("images", ())),
                params=r.get("params", {}),
            )
            for r in rows[self.skip :]
        ]

    def score(self, sample: Sample, text: str, ctx: RewardContext) -> Score:
        low, vowels = ({c for c in "abcdefghijklm"}, {c for c in "aeiou"})
        share, style = (
            sum(c in chosen for c in text.lower()) / max(1, len(text)) for chosen in (low, vowels)
        )
        accuracy = float(share > 0.45) if sample.task == "binary" else share
        accuracy = accuracy if self.solved is None else self.solved
        style = style if self.solved is None else self.solved
        parts = {"accuracy": accuracy * (1 + self.bonus), "style": style * (1 + self.bonus)}
        return Score.combine(
            parts,
            {"accuracy": 0.9, "style": 0.1},
            parsed=True,
            metrics={"correct": float(accuracy > 0.4), f"{sample.task}_share": share},
        )

    def score_in_group(self, sample: Sample, scores: Sequence[Score], index: int) -> Score:
        """The accuracy becomes the share of completions of the group that it reaches (its rank)."""
        own = scores[index].parts["accuracy"]
        rank = sum(s.parts["accuracy"] <= own for s in scores) / len(scores)
        parts = {**scores[index].parts, "accuracy": rank}
        return replace(scores[index], value=0.9 * rank + 0.1 * parts["style"], parts=parts)
