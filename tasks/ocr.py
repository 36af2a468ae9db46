"""OCR: read a line or a page. The answer is the text itself; of several accepted texts the best one counts.

The default reward is mode `indel`, right characters minus wrong ones as a share of the truth: 1 for the whole text, and
filling up what was not read with likely characters does not pay (mmrl.rewards.text). The metrics are ned (1 - normalised edit
distance), wer (1 - word error rate, at least 0), both on the text as it is, and correct (equal after `normalise_text`).
`edit_distance` in the summary is PageOCR's number (Fox), mean edit distance / length of the longer text: lower is better,
a failure counts as 1, where the official script leaves it out.

    mmrl tasks check ocr
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from mmrl.registry import register
from mmrl.rewards.text import (
    MAX_CHARS,
    check_steps,
    normalise,
    normalised_edit_distance,
    word_error_rate,
)
from mmrl.tasks.base import EXPLAINED
from mmrl.tasks.examples import draw_text, write_rows
from mmrl.tasks.texts import TextTask, accepted_texts
from mmrl.types import RewardContext, Sample, Score

__all__ = ["OCR"]

_WORDS = (
    "OPEN",
    "CAFE",
    "ROOM",
    "EXIT",
    "TAXI",
    "MENU",
    "SALE",
    "PARK",
    "BUS",
    "STOP",
    "LINE",
    "GATE",
    "HOTEL",
    "BANK",
)


@register("ocr")
class OCR(TextTask):
    """Read text. Beside the parameters of AnswerTask:

    mode            indel (default), ned, wer, cer, ratio, rouge, exact, anls, token_f1 or contains, see mmrl.rewards.text;
                    `contains` is OCRBench's rule for evaluation, no training reward
    normalise_text  steps of mmrl.rewards.text.STEPS for the reward and for `correct` (default nfkc, collapse, strip); [] for
                    texts whose spaces matter, such as code
    max_chars       longer answers are failures, longer truths errors (default 8192)
    """

    headline: ClassVar[str] = "ned"
    shape: ClassVar[str] = "the text"
    default_mode: ClassVar[str] = "indel"
    own_params: ClassVar[Mapping[str, Any]] = {
        "normalise_text": ["nfkc", "collapse", "strip"],
        "max_chars": MAX_CHARS,
    }
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "video_r1": {
            "mode": "wer",
            "normalise_text": [],
            "answer_format": "think",
            "format_rule": "tags",
            "weights": {"accuracy": 1.0, "format": 1.0},
            "normalise": False,
        },
        # its unified_rl recipe; video_rl has no rule for OCR and compares the texts as mathematics
        "easyvideo_r1": {
            "request": EXPLAINED,
            "mode": "wer",
            "normalise_text": ["lower"],
            "answers": "native",
            "format_rule": "easyvideo_r1_unified",
        },
    }
    metric_names: ClassVar[tuple[str, ...]] = ("ned", "wer", "correct")

    def __init__(self, **params: Any) -> None:
        super().__init__(**params)
        self.steps = check_steps(self.settings["normalise_text"])

    def measure(self, value: str, sample: Sample, ctx: RewardContext) -> Mapping[str, float]:
        """ned, wer, correct: the best accepted text counts in each."""
        truths = accepted_texts(sample)
        said = normalise(value, self.steps)
        return {
            "ned": max(1.0 - normalised_edit_distance(value, truth) for truth in truths),
            "wer": max(max(0.0, 1.0 - word_error_rate(value, truth)) for truth in truths),
            "correct": float(any(said == normalise(truth, self.steps) for truth in truths)),
        }

    def example_data(self, folder: str) -> str:
        """16 pictures with one to three lines of words and numbers."""
        rng, rows = random.Random(5), []
        for number in range(16):
            lines = [
                f"{rng.choice(_WORDS)} {rng.choice(_WORDS)} {rng.randrange(100)}"
                for _ in range(1 + number % 3)
            ]
            draw_text(Path(folder) / f"{number}.png", lines)
            text = "\n".join(lines)
            rows.append(
                {
                    "id": f"ocr-{number}",
                    "image": f"{number}.png",
                    "question": "Read the text in the image.",
                    "answer": text if number % 4 else [text, " ".join(lines)],
                }
            )
        return write_rows(folder, rows)

    def summarize(self, rows: Sequence[Score]) -> Mapping[str, float]:
        """edit_distance (PageOCR's mean, lower is better, failures count as 1), mean_length, and the shared rates."""
        if not rows:
            return {}
        return {
            "edit_distance": sum(1.0 - row.metrics.get("ned", 0.0) for row in rows) / len(rows),
            **super().summarize(rows),
        }

    def benchmark(self, pairs: Sequence[tuple[Sample, Score]], folder: Path) -> Mapping[str, float]:
        """OCRBench's scores for samples with params.ocrbench_type (and ocrbench.json); pageocr.json for the others.

        params.dataset (or the source) names OCRBench's subset; pageocr.json is Fox's result file: label and answer.
        """
        from mmrl.tasks.metrics.ocrbench import Item, ocrbench_scores, write_ocrbench

        items, pages = [], []
        for sample, score in pairs:
            predict = str(score.detail.get("pred_text", ""))
            if "ocrbench_type" in sample.params:
                items.append(
                    Item(
                        sample.id,
                        str(sample.params["ocrbench_type"]),
                        str(sample.params.get("dataset", sample.source)),
                        sample.question,
                        tuple(accepted_texts(sample)),
                        predict,
                    )
                )
            else:
                image = Path(sample.images[0]).name if sample.images else ""
                pages.append(
                    {
                        "image": image,
                        "question": sample.question,
                        "label": accepted_texts(sample)[0],
                        "answer": predict,
                    }
                )
        if items:
            write_ocrbench(items, folder / "ocrbench.json")
        if pages:
            (folder / "pageocr.json").write_text(
                json.dumps(pages, ensure_ascii=False, indent=1), encoding="utf-8"
            )
        return ocrbench_scores(items)
