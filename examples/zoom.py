"""An environment of two turns in one file: look at a picture too coarse to read, name a quarter, read it from close by.

    python -m scripts.demo_turns                                    # a tiny model learns it on a CPU in a minute
    mmrl train grounding data.train='[{task: examples/zoom.py:Zoom, path: ROWS}]' data.eval='[]' model.path=MODEL

One quarter of a picture of 224 x 224 pixels holds fine stripes of two colours, of which there are four pairs. The pairs mix to the
same grey: in the overview of 56 x 56 pixels, which averages 4 x 4 pixels, it can be seen where the stripes are, and by no means
which they are. The first answer names a quarter (A B / C D), the second observation shows it, shrunk half as much; the second
answer names the stripes. At the end 0.3 is paid for the right quarter and 0.7 for the right name; a first answer that is no quarter
ends the rollout with 0.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from mmrl import (
    Environment,
    Mark,
    Observation,
    Outcome,
    RewardContext,
    Sample,
    Score,
    Task,
    Template,
    Turn,
)

QUARTERS = "ABCD"
STRIPES = {
    "red": (232, 64, 64),
    "green": (64, 232, 64),
    "blue": (64, 64, 232),
    "yellow": (232, 232, 64),
}
"""Name of a pair -> its first colour; the second is what makes both mix to `_GREY`."""
SIDE = 224
_GREY = 148
_FLOOR = ((96, 0, 0), (0, 96, 0), (0, 0, 96), (96, 96, 0))  # of the quarters without stripes


def paint(quarter: int, name: str) -> np.ndarray:
    """The picture, uint8 (224, 224, 3)."""
    picture = np.zeros((SIDE, SIDE, 3), np.uint8)
    half = SIDE // 2
    for number, colour in enumerate(_FLOOR):
        top, left = (number // 2) * half, (number % 2) * half
        picture[top : top + half, left : left + half] = colour
        if number == quarter:
            first = np.array(STRIPES[name])
            second = 2 * _GREY - first
            columns = np.where((np.arange(half) % 4 < 2)[:, None], first, second)
            picture[top : top + half, left : left + half] = columns
    return picture


def shrink(picture: np.ndarray, factor: int) -> np.ndarray:
    """Means of factor x factor pixels, uint8."""
    height, width = (n // factor for n in picture.shape[:2])
    return picture.reshape(height, factor, width, factor, 3).mean((1, 3)).round().astype(np.uint8)


def make_rows(folder: Path, count: int, seed: int) -> Path:
    """`count` rows: where the stripes are and which."""
    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    rows = [
        {"id": str(i), "quarter": int(rng.integers(4)), "answer": str(rng.choice(list(STRIPES)))}
        for i in range(count)
    ]
    path = folder / "zoom.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


class ZoomEnvironment(Environment):
    """See the module."""

    max_turns: ClassVar[int] = 2

    def reset(self, sample: Sample, seed: int) -> Observation:
        """The overview and the question."""
        self.sample, self.looked = sample, ""
        self.picture = paint(sample.params["quarter"], sample.answer)
        return Observation(_asked(sample.question), [shrink(self.picture, 4)])

    def step(self, turn: Turn) -> Outcome:
        """A quarter from close by, then the end."""
        if self.looked:
            right = named(turn.text) == self.sample.answer
            found = QUARTERS.index(self.looked) == self.sample.params["quarter"]
            return Outcome(
                reward=0.7 * right + 0.3 * found,
                terminated=True,
                info={"correct": float(right), "found": float(found)},
            )
        said = re.fullmatch(rf"\s*([{QUARTERS}])\s*", turn.text)
        if said is None:
            return Outcome(terminated=True, info={"correct": 0.0, "found": 0.0})
        self.looked = said[1]
        number, half = QUARTERS.index(said[1]), SIDE // 2
        top, left = (number // 2) * half, (number % 2) * half
        return Outcome(
            Observation(
                _asked("which"), [shrink(self.picture[top : top + half, left : left + half], 2)]
            ),
            # where it looked, on the overview
            marks=[Mark("box", tuple(v / 4 for v in (left, top, left + half, top + half)))],
        )

    def random(self, rng: np.random.Generator) -> str:
        """Some quarter, some stripes."""
        return str(rng.choice(list(STRIPES) if self.looked else list(QUARTERS)))


def named(text: str) -> str | None:
    """The stripes that a text names, and nothing else."""
    return text.strip() if text.strip() in STRIPES else None


def _asked(words: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": words}]}]


class Zoom(Task):
    """The task around it: its rows, and what tools need that look at one answer."""

    name = "zoom"
    headline = "correct"
    part_names = ("reward",)
    metric_names = ("correct", "found")

    def environment(self, template: Template) -> Environment:
        """One for each rollout."""
        return ZoomEnvironment()

    def load(self, path: str) -> Iterable[Sample]:
        """Rows of `make_rows`."""
        for line in Path(path).read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            yield Sample(
                row["id"],
                "zoom",
                "zoom",
                "where",
                row["answer"],
                params={"quarter": row["quarter"]},
            )

    def messages(self, sample: Sample, template: Template) -> list[dict[str, Any]]:
        """The question alone: the pictures are the environment's."""
        return [{"role": "user", "content": [{"type": "text", "text": sample.question}]}]

    def score(self, sample: Sample, text: str, ctx: RewardContext) -> Score:
        """Of the last answer."""
        right = float(named(text) == sample.answer)
        return Score.combine(
            {"reward": right},
            {"reward": 1.0},
            parsed=named(text) is not None,
            metrics={"correct": right},
        )

    def gold(self, sample: Sample, ctx: RewardContext) -> str:
        """The right stripes."""
        return str(sample.answer)

    def wrong(self, sample: Sample, ctx: RewardContext) -> str:
        """Other stripes."""
        return next(name for name in STRIPES if name != sample.answer)
