"""A task for benchmarks of engines: random text earns different rewards, so that groups of an untrained model have signal."""

from __future__ import annotations

from typing import Any

from mmrl.task import Task, Template
from mmrl.tasks.grounding import Grounding
from mmrl.types import RewardContext, Sample, Score

__all__ = ["Letters"]


class Letters(Task):
    """The reward is the share of letters from a to m; pictures and questions are those of a grounding file."""

    name = "letters"
    part_names = ("accuracy",)

    def load(self, path: str) -> list[Sample]:
        """Rows of a grounding file."""
        return list(Grounding(prompt="{question}").load(path))

    def messages(self, sample: Sample, template: Template) -> list[dict[str, Any]]:
        """The pictures, then the question."""
        pictures = [{"type": "image"} for _ in sample.images]
        return [{"role": "user", "content": [*pictures, {"type": "text", "text": sample.question}]}]

    def score(self, sample: Sample, text: str, ctx: RewardContext) -> Score:
        """Share of letters from a to m."""
        share = sum("a" <= c <= "m" for c in text.lower()) / max(1, len(text))
        return Score.combine({"accuracy": share}, {"accuracy": 1.0}, parsed=True)

    def gold(self, sample: Sample, ctx: RewardContext) -> str:
        """A text with the full reward."""
        return "abc"

    def wrong(self, sample: Sample, ctx: RewardContext) -> str:
        """A text without any."""
        return "xyz"
