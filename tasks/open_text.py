"""Open-ended text: short answers and sentences, scored by their words; of several accepted answers the best one counts.

The default reward is the mean F1 of ROUGE-1, ROUGE-2 and ROUGE-L. A ROUGE score says little about truth, so `correct` is
declared apart: an answer is correct when `correct_by` (token_f1) is at least `correct_from` (0.8). Video-R1 calls an answer
correct from ROUGE 0.1 on, which any text about the same subject reaches.

    mmrl tasks check open_text
"""

from __future__ import annotations

import functools
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from mmrl.registry import register
from mmrl.rewards.text import MAX_CHARS, TextReward, check_number, docvqa_anls, make_text_reward
from mmrl.tasks.base import EXPLAINED
from mmrl.tasks.examples import write_rows
from mmrl.tasks.texts import TextTask, accepted_texts
from mmrl.types import RewardContext, Sample

__all__ = ["OpenText"]

_PACKAGE = {"ascii_words": True, "skip_short": False, "stem": True}
"""ROUGE as the rouge-score package computes it with use_stemmer=True."""
_COLOURS = {
    "red": (225, 35, 35),
    "green": (30, 165, 50),
    "blue": (40, 70, 225),
    "yellow": (240, 215, 30),
}


@functools.lru_cache(maxsize=64)  # made once, not for each answer
def _metric(mode: str, max_chars: int) -> TextReward:
    return make_text_reward(mode, max_chars=max_chars)


@register("open_text")
class OpenText(TextTask):
    """Answer in words. Beside the parameters of AnswerTask:

    mode            rouge (default), token_f1, exact, anls, ned, indel, wer, cer, ratio or contains, see mmrl.rewards.text
    normalise_text  steps of mmrl.rewards.text.STEPS for the reward; default (null): the mode's own; [] keeps code as it is
    correct_by      mode of mmrl.rewards.text that decides `correct` (default token_f1), with its own normalisation
    correct_from    its least value for a correct answer (default 0.8)
    max_chars       longer answers are failures, longer truths errors (default 8192)
    """

    headline: ClassVar[str] = "token_f1"
    shape: ClassVar[str] = "your answer"
    default_mode: ClassVar[str] = "rouge"
    own_params: ClassVar[Mapping[str, Any]] = {
        "normalise_text": None,
        "correct_by": "token_f1",
        "correct_from": 0.8,
        "max_chars": MAX_CHARS,
    }
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "video_r1": {
            "mode": "rouge",
            "accuracy": _PACKAGE,
            "answer_format": "think",
            "format_rule": "tags",
            "weights": {"accuracy": 1.0, "format": 1.0},
            "normalise": False,
            "normalise_text": [],
        },
        "easyvideo_r1": {
            "request": EXPLAINED,
            "mode": "rouge",
            "accuracy": _PACKAGE,
            "answers": "native",
            "format_rule": "easyvideo_r1",
            "normalise_text": [],
        },
        "easyvideo_r1_unified": {
            "request": EXPLAINED,
            "mode": "rouge",
            "accuracy": {**_PACKAGE, "short": 10},
            "answers": "native",
            "format_rule": "easyvideo_r1_unified",
            "normalise_text": [],
        },
    }
    metric_names: ClassVar[tuple[str, ...]] = ("rouge", "token_f1", "anls", "correct")

    def __init__(self, **params: Any) -> None:
        super().__init__(**params)
        self.correct_from = check_number("correct_from", self.settings["correct_from"], 0.01, 1)
        make_text_reward(self.settings["correct_by"])  # its ConfigError names the modes

    def measure(self, value: str, sample: Sample, ctx: RewardContext) -> Mapping[str, float]:
        """rouge and token_f1 with their default settings, anls as DocVQA's program has it, and correct as declared."""
        truths = accepted_texts(sample)
        rouge, token_f1 = (
            _metric(mode, self.max_chars)(value, truths) for mode in ("rouge", "token_f1")
        )
        mode = self.settings["correct_by"]
        by = token_f1 if mode == "token_f1" else _metric(mode, self.max_chars)(value, truths)
        return {
            "rouge": rouge,
            "token_f1": token_f1,
            "anls": max(docvqa_anls(value, truth) for truth in truths),
            "correct": float(by >= self.correct_from),
        }

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
            rows.append(
                {
                    "id": f"open-{number}",
                    "image": f"{number}.png",
                    "question": "What do you see, from left to right?",
                    "answer": [
                        f"a {left} circle and a {right} square",
                        f"{left} circle, {right} square",
                    ],
                }
            )
        return write_rows(folder, rows)
