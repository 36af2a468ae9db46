"""A task for the engine's own tests: any number of clips, pictures and sounds per question, a reward that random text
sometimes earns.

A randomly initialised model never writes a box, so tasks with sparse rewards would leave every group without signal.
The reward is the share of characters in the first half of the alphabet: dense, deterministic and learnable.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar

from mmrl.task import Task, Template
from mmrl.types import RewardContext, Sample, Score


class Album(Task):
    """`value` fixes every reward (0 gives groups without signal); `raises` makes the reward fail."""

    name: ClassVar[str] = "album"
    part_names: ClassVar[tuple[str, ...]] = ("accuracy",)

    def load(self, path: str) -> Iterable[Sample]:
        rows = [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]
        return [
            Sample(
                r["id"],
                self.name,
                r.get("source", Path(path).stem),
                r["question"],
                None,
                tuple(r["images"]),
                tuple(r.get("videos", ())),
                audios=tuple(r.get("audios", ())),
            )
            for r in rows
        ]

    def messages(self, sample: Sample, template: Template) -> list[dict[str, Any]]:
        media = [
            *({"type": "video"} for _ in sample.videos),
            *({"type": "image"} for _ in sample.images),
            *({"type": "audio"} for _ in sample.audios),
        ]
        content = [*media, {"type": "text", "text": sample.question}]
        user = {"role": "user", "content": content}
        return [{"role": "system", "content": template.system}, user] if template.system else [user]

    def score(self, sample: Sample, text: str, ctx: RewardContext) -> Score:
        if self.params.get("raises"):
            raise RuntimeError("this reward is broken")
        share = sum("a" <= c <= "m" for c in text.lower()) / max(1, len(text))
        value = float(self.params.get("value", share))
        return Score.combine(
            {"accuracy": value}, {"accuracy": 1.0}, parsed=True, metrics={"iou": share}
        )

    def gold(self, sample: Sample, ctx: RewardContext) -> str:
        return "abc"

    def wrong(self, sample: Sample, ctx: RewardContext) -> str:
        return "xyz"
