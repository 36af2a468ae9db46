"""An environment that keeps its contract, or breaks it in one way that is named."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np

from mmrl import Environment, Mark, Observation, Outcome, Sample, Turn

_calls = itertools.count()


class Light(Environment):
    """Which quarter is lit? Two looks at pictures of the seed's own; a named quarter is looked at first, then answered."""

    max_turns: ClassVar[int] = 3
    headline: ClassVar[str] = "correct"
    place: ClassVar[int] = 0  # of the fault 'shared'

    def __init__(self, fault: str = "") -> None:
        self.fault, self.turns = fault, 0

    def reset(self, sample: Sample, seed: int) -> Observation:
        rng = np.random.default_rng([seed, int(sample.params.get("seed", 0))])
        self.lit = int(rng.integers(4))
        self.picture = np.full((56, 56, 3), 40, np.uint8)
        row, column = divmod(self.lit, 2)
        self.picture[row * 28 : row * 28 + 28, column * 28 : column * 28 + 28] = 220
        if self.fault == "chance":
            self.picture[0, 0] = next(_calls) % 250
        if self.fault == "hash":
            self.picture[0, 0] = hash(sample.id) % 250
        if self.fault == "shared":
            Light.place = 0
        if self.fault == "thread":
            threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
        pictures = 2 if self.fault == "pictures" else 1
        return Observation(_said("which", pictures), [self.picture])

    def step(self, turn: Turn) -> Outcome:
        self.turns += 1
        Light.place += 1
        said = turn.text.strip()
        if self.fault == "junk":
            said = "ABCD"[int("ABCD".index(said))]
        if self.fault == "slow" and said in tuple("ABCD"):
            time.sleep(30)
        if said not in tuple("ABCD"):
            return Outcome(Observation(_said("A, B, C or D?")), parsed=False, info={"correct": 0.0})
        quarter = "ABCD".index(said)
        right = quarter == self.lit
        box = (
            28 * (quarter % 2),
            28 * (quarter // 2),
            28 * (quarter % 2) + 28,
            28 * (quarter // 2) + 28,
        )
        marks = [Mark("box", box, 7 if self.fault == "mark" else -1)]
        if self.turns == 1:
            shift = Light.place if self.fault == "shared" else 1
            words = f"look {shift}"
            return Outcome(Observation(_said(words, 1), [self.picture // 2]), marks=marks)
        info = {} if self.fault == "headline" else {"correct": float(right)}
        pays = {"range": 2.0, "worse": 0.0}.get(self.fault, 1.0) * right
        return Outcome(reward=pays, terminated=True, info=info, marks=marks)

    async def process_rewards(self, turns: Any) -> None:
        if self.fault == "unpaid":
            await asyncio.sleep(15)

    def scripted(self, rng: np.random.Generator) -> str:
        return "ABCD"[self.lit]

    def random(self, rng: np.random.Generator) -> str:
        return "ABCD"[(self.lit + 1 + int(rng.integers(3))) % 4]


def _said(words: str, pictures: int = 0) -> list[dict[str, Any]]:
    items = [{"type": "image"}] * pictures
    return [{"role": "user", "content": [*items, {"type": "text", "text": words}]}]


class Unfinished(Environment):
    """Lacks `step`."""

    reset: Callable[..., Any] = Light.reset
