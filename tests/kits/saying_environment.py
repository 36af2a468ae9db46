"""An environment that answers every turn by its number, until a turn says "done": for judges of turns."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from mmrl import Environment, Observation, Outcome, Sample, Turn


class Saying(Environment):
    """`pictures`: whether observations have one, of a grey of its own. `turns`: after so many it ends by itself."""

    max_turns: ClassVar[int] = 4

    def __init__(self, pictures: bool = False, turns: int = 4) -> None:
        self.pictures, self.turns, self.number = pictures, turns, 0

    def reset(self, sample: Sample, seed: int) -> Observation:
        self.number = 0
        return self._seen(sample.question or "Say something.")

    def step(self, turn: Turn) -> Outcome:
        self.number += 1
        if turn.text.startswith("unread"):
            return Outcome(self._seen("What?"), parsed=False)
        if "done" in turn.text or self.number >= self.turns:
            return Outcome(
                reward=0.5, terminated=True, info={"success": float("done" in turn.text)}
            )
        return Outcome(self._seen(f"heard {self.number}"))

    def _seen(self, words: str) -> Observation:
        content: list[dict[str, Any]] = [{"type": "image"}] if self.pictures else []
        message = {"role": "user", "content": [*content, {"type": "text", "text": words}]}
        grey = np.full((28, 28, 3), 40 * self.number, np.uint8)
        return Observation([message], [grey] if self.pictures else [])
