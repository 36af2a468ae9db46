"""Open-ended text: short answers and sentences, scored by their words; of several accepted answers the best one counts.

The default reward is the mean F1 of ROUGE-1, ROUGE-2 and ROUGE-L. A ROUGE score says little about truth, so `correct` is
declared apart: an answer is correct when `correct_by` (token_f1) is at least `correct_from` (0.8). Video-R1 calls an answer
correct from ROUGE 0.1 on, which any text about the same subject reaches.

    mmrl tasks check open_text
"""
from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from mmrl.coords import CoordFrame
from mmrl.registry import register
from mmrl.types import RewardContext, Sample, Score
from rewards.router import PartFactory
from rewards.text import MAX_CHARS, check_number, make_text_reward
from tasks.base import AnswerTask
from tasks.ocr import accepted_texts, check_texts, foreign_text, read_text, text_part, write_rows

__all__ = ["OpenText"]

_COLOURS = {"red": (225, 35, 35), "green": (30, 165, 50), "blue": (40, 70, 225), "yellow": (240, 215, 30)}


@register("open_text")
class OpenText(AnswerTask):
    """Answer in words. Beside the parameters of AnswerTask:

    mode            rouge (default), token_f1, exact, anls, ned, indel, wer, cer, ratio or contains, see rewards.text
    normalise_text  steps of rewards.text.STEPS for the reward; default (null): the mode's own; [] keeps code as it is
    correct_by      mode of rewards.text that decides `correct` (default token_f1), with its own normalisation
    correct_from    its least value for a correct answer (default 0.8)
    max_chars       longer answers are failures, longer truths errors (default 8192)
    """

    headline: ClassVar[str] = "token_f1"
    shape: ClassVar[str] = "your answer"
    default_mode: ClassVar[str] = "rouge"
    own_params: ClassVar[Mapping[str, Any]] = {
        "normalise_text": None, "correct_by": "token_f1", "correct_from": 0.8, "max_chars": MAX_CHARS}
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "video_r1": {"mode": "rouge", "accuracy": {"ascii_words": True, "skip_short": False}, "answer_format": "think",
                     "weights": {"accuracy": 1.0, "format": 1.0}, "normalise": False, "normalise_text": []},
        "easyvideo_r1": {"mode": "rouge", "accuracy": {"ascii_words": True, "skip_short": False}, "answer_format": "think",
                         "normalise_text": []},
    }
    metric_names: ClassVar[tuple[str, ...]] = ("rouge", "token_f1", "correct")

    def __init__(self, **params: Any) -> None:
        super().__init__(**params)
        self.max_chars = int(check_number("max_chars", self.settings["max_chars"], 1, 65_536))
        self.correct_from = check_number("correct_from", self.settings["correct_from"], 0.01, 1)
        make_text_reward(self.settings["correct_by"])  # its ConfigError names the modes

    def _accuracy_settings(self, settings: Mapping[str, Any]) -> Mapping[str, Any]:
        return {"normalise": settings["normalise_text"], "max_chars": settings["max_chars"], **settings["accuracy"],
                "mode": settings["mode"]}

    def factories(self) -> Mapping[str, PartFactory]:
        """accuracy (a text reward) and format."""
        return {"accuracy": text_part, "format": self.format_factory()}

    def check_answer(self, value: Any, frame: CoordFrame, sizes: Sequence[tuple[int, int]],
                     params: Mapping[str, Any]) -> str | list[str]:
        """A text, or a list of accepted texts."""
        return check_texts(value, "answer", self.max_chars)

    def parse(self, answer: str, sample: Sample, ctx: RewardContext) -> str:
        """The text as it stands. Reasons: empty, answer_too_long, not_text."""
        return read_text(answer, accepted_texts(sample), self.max_chars)

    def measure(self, value: str, sample: Sample, ctx: RewardContext) -> Mapping[str, float]:
        """rouge and token_f1 with their default settings, and correct as declared."""
        truths = accepted_texts(sample)
        rouge, token_f1, by = (make_text_reward(mode, max_chars=self.max_chars)(value, truths)
                               for mode in ("rouge", "token_f1", self.settings["correct_by"]))
        return {"rouge": rouge, "token_f1": token_f1, "correct": float(by >= self.correct_from)}

    def describe(self, value: str | None, sample: Sample, ctx: RewardContext) -> Mapping[str, Any]:
        """pred_text and gold_text, accepted texts joined by ' | '."""
        shown = {} if value is None else {"pred_text": value}
        return {**shown, "gold_text": " | ".join(accepted_texts(sample))}

    def gold_answer(self, sample: Sample, ctx: RewardContext) -> str:
        """The first accepted text."""
        return accepted_texts(sample)[0]

    def wrong_answer(self, sample: Sample, ctx: RewardContext) -> str:
        """A word of letters that stand in no accepted text."""
        return foreign_text(accepted_texts(sample))

    def example_data(self, folder: str) -> str:
        """16 pictures of two coloured shapes, to be described in words."""
        from PIL import Image, ImageDraw

        target = Path(folder)
        target.mkdir(parents=True, exist_ok=True)
        rng, rows = random.Random(11), []
        for number in range(16):
            left, right = rng.sample(list(_COLOURS), 2)
            picture = Image.new("RGB", (112, 112), (235, 235, 235))
            draw = ImageDraw.Draw(picture)
            draw.ellipse((8, 36, 48, 76), fill=_COLOURS[left])
            draw.rectangle((62, 36, 102, 76), fill=_COLOURS[right])
            picture.save(target / f"{number}.png")
            rows.append({"id": f"open-{number}", "image": f"{number}.png", "question": "What do you see, from left to right?",
                         "answer": [f"a {left} circle and a {right} square", f"{left} circle, {right} square"]})
        return write_rows(folder, rows)

    def summarize(self, rows: Sequence[Score]) -> Mapping[str, float]:
        """mean_length of the answers in characters, beside the shared rates."""
        if not rows:
            return {}
        return {"mean_length": sum(len(str(row.detail.get("pred_text", ""))) for row in rows) / len(rows),
                **super().summarize(rows)}
