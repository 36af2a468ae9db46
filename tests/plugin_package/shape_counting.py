"""How many circles are in the picture? A whole mmrl task in one file, with its own generated pictures.

mmrl tasks check shape_counting.py:CountCircles
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar

from mmrl import DataError, RewardContext, Sample, Score, Task, Template, register

ANSWER = re.compile(r"\s*<answer>([0-9]{1,3})</answer>\s*")


@register("count_circles")
class CountCircles(Task):
    """Reward: 0.9 for the right number, 0.1 for the form. Parameter: question, the text asked under each picture."""

    headline: ClassVar[str] = "exact"
    part_names: ClassVar[tuple[str, ...]] = ("accuracy", "format")

    def __init__(self, question: str = "How many circles?") -> None:
        super().__init__(question=question)
        self.question = question

    def load(self, path: str) -> Iterable[Sample]:
        """Rows {"image": file name, "circles": number}, one JSON object per line."""
        samples = []
        for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), 1):
            row = json.loads(line)
            if not isinstance(row.get("circles"), int):
                raise DataError(
                    f"{path}, line {number}: expected a whole number under 'circles', found "
                    f"{row.get('circles')!r}; count them"
                )
            image = str(Path(path).parent / row["image"])
            samples.append(
                Sample(row["image"], self.name, "circles", self.question, row["circles"], (image,))
            )
        return samples

    def messages(self, sample: Sample, template: Template) -> list[dict[str, Any]]:
        """One user turn: the picture, then the question."""
        return [
            {
                "role": "user",
                "content": [{"type": "image"}, {"type": "text", "text": sample.question}],
            }
        ]

    def score(self, sample: Sample, text: str, ctx: RewardContext) -> Score:
        """1 for the right number in the right form, 0.1 for a wrong number, 0 without exactly one number."""
        match = ANSWER.fullmatch(text)
        weights = {"accuracy": 0.9, "format": 0.1}
        if match is None:
            return Score.failure("no_number", self.part_names, weights)
        right = float(int(match.group(1)) == sample.answer)
        return Score.combine(
            {"accuracy": right, "format": 1.0}, weights, parsed=True, metrics={"exact": right}
        )

    def gold(self, sample: Sample, ctx: RewardContext) -> str:
        """The right number."""
        return f"<answer>{sample.answer}</answer>"

    def wrong(self, sample: Sample, ctx: RewardContext) -> str:
        """One too many."""
        return f"<answer>{sample.answer + 1}</answer>"

    def example_data(self, folder: str) -> str:
        """12 pictures with one to three circles among squares."""
        from PIL import Image, ImageDraw

        Path(folder).mkdir(parents=True, exist_ok=True)
        generator, rows = random.Random(0), []
        for number in range(12):
            picture = Image.new("RGB", (112, 112), "white")
            draw, circles = ImageDraw.Draw(picture), 1 + number % 3
            cells = generator.sample(range(9), 4)
            for index, cell in enumerate(cells):
                x, y = 37 * (cell % 3) + 5, 37 * (cell // 3) + 5
                shape = draw.ellipse if index < circles else draw.rectangle
                shape((x, y, x + 26, y + 26), fill=generator.choice(["red", "green", "blue"]))
            picture.save(Path(folder) / f"{number:02d}.png")
            rows.append({"image": f"{number:02d}.png", "circles": circles})
        path = Path(folder) / "circles.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return str(path)
