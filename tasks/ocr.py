"""OCR: read a line or a page. The answer is the text itself; of several accepted texts the best one counts.

The default reward is mode `indel`, right characters minus wrong ones as a share of the truth: 1 for the whole text, and
filling up what was not read with likely characters does not pay (rewards.text). The metrics are ned (1 - normalised edit
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

from mmrl.coords import CoordFrame
from mmrl.registry import register
from mmrl.types import RewardContext, Sample, Score
from rewards.parsing import strip_end_tokens
from rewards.router import Part, PartFactory
from rewards.text import (
    MAX_CHARS,
    check_number,
    check_steps,
    is_coordinates,
    make_text_reward,
    normalise,
    normalised_edit_distance,
    word_error_rate,
)
from tasks.base import AnswerError, AnswerTask

__all__ = ["OCR", "accepted_texts", "check_texts", "draw_text", "foreign_text", "read_text", "text_part", "write_rows"]

_TAGS = ("<think>", "</think>", "<answer>", "</answer>")
_FOREIGN = "zqxjkvw08 \u03a9\u0416\u05d0\u0e01\u30c4\u9f98\u9ea4\u9750\u9f49"
_WORDS = ("OPEN", "CAFE", "ROOM", "EXIT", "TAXI", "MENU", "SALE", "PARK", "BUS", "STOP", "LINE", "GATE", "HOTEL", "BANK")


def accepted_texts(sample: Sample) -> list[str]:
    """The accepted answers of a sample as a list."""
    return [sample.answer] if isinstance(sample.answer, str) else [str(text) for text in sample.answer]


def check_texts(value: Any, name: str, max_chars: int) -> str | list[str]:
    """A truth as text, or as a list of accepted texts, stripped at both ends. Raises RowError.

    Empty texts, texts over `max_chars`, and texts that hold the answer envelope's own tags cannot be answered.
    """
    from tasks.readers.common import RowError, text_of

    if isinstance(value, list):
        if not value:
            raise RowError(f"at least one accepted text in '{name}'", "[]", "add one or remove the row")
        return [str(check_texts(text_of(item, name), name, max_chars)) for item in value]
    text = text_of(value, name)
    if len(text) > max_chars:
        raise RowError(f"a text of up to {max_chars} characters in '{name}'", f"{len(text)}",
                       "raise max_chars (up to 65536) or split the picture")
    if any(tag in text for tag in _TAGS) or strip_end_tokens(text) != text:
        raise RowError(f"'{name}' without <think>, <answer> and end-of-turn tokens", repr(text)[:80],
                       "such a text cannot stand inside an answer: remove the row")
    return text


def read_text(answer: str, truths: Sequence[str], max_chars: int) -> str:
    """The answer as text. Raises AnswerError: empty, answer_too_long, not_text (numbers in brackets, a box for instance,
    where no accepted text is one)."""
    if not answer:
        raise AnswerError("empty")
    if len(answer) > max_chars:
        raise AnswerError("answer_too_long")
    if is_coordinates(answer) and not any(is_coordinates(truth) for truth in truths):
        raise AnswerError("not_text")
    return answer


def foreign_text(truths: Sequence[str], length: int = 1) -> str:
    """A text of `length` equal characters none of which stands in a truth, in either case or compatible form."""
    joined = "".join(truths)
    known = {char for text in (joined, normalise(joined, ("nfkc",))) for case in (text, text.lower(), text.upper())
             for char in case}
    letter = next((c for c in _FOREIGN if c not in known and not c.isspace()), None)
    if letter is None:
        letter = next(chr(code) for code in range(0x4E00, 0x9FFF) if chr(code) not in known)
    return letter * length


def text_part(mode: str, **params: Any) -> Part:
    """The text reward `mode` of rewards.text against all accepted answers."""
    reward = make_text_reward(mode, **params)
    return lambda predicted, sample, ctx: reward(predicted.value, accepted_texts(sample))


def draw_text(path: Path, lines: Sequence[str], size: tuple[int, int] = (224, 112), height: int = 20) -> None:
    """A PNG with black lines of text on white, in Pillow's own font (no system font is needed)."""
    from PIL import Image, ImageDraw, ImageFont

    picture = Image.new("RGB", size, (255, 255, 255))
    draw, font = ImageDraw.Draw(picture), ImageFont.load_default(height)
    for number, line in enumerate(lines):
        draw.text((8, 8 + number * (height + 6)), line, fill=(0, 0, 0), font=font)
    path.parent.mkdir(parents=True, exist_ok=True)
    picture.save(path)


def write_rows(folder: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows as data.jsonl in `folder`; returns its path."""
    path = Path(folder) / "data.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return str(path)


@register("ocr")
class OCR(AnswerTask):
    """Read text. Beside the parameters of AnswerTask:

    mode            indel (default), ned, wer, cer, ratio, rouge, exact, anls, token_f1 or contains, see rewards.text;
                    `contains` is OCRBench's rule for evaluation, no training reward
    normalise_text  steps of rewards.text.STEPS for the reward and for `correct` (default nfkc, collapse, strip); [] for
                    texts whose spaces matter, such as code
    max_chars       longer answers are failures, longer truths errors (default 8192)
    """

    headline: ClassVar[str] = "ned"
    shape: ClassVar[str] = "the text"
    default_mode: ClassVar[str] = "indel"
    own_params: ClassVar[Mapping[str, Any]] = {"normalise_text": ["nfkc", "collapse", "strip"], "max_chars": MAX_CHARS}
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "video_r1": {"mode": "wer", "normalise_text": [], "answer_format": "think",
                     "weights": {"accuracy": 1.0, "format": 1.0}, "normalise": False},
        "easyvideo_r1": {"mode": "wer", "normalise_text": ["lower"], "answer_format": "think"},
    }
    metric_names: ClassVar[tuple[str, ...]] = ("ned", "wer", "correct")

    def __init__(self, **params: Any) -> None:
        super().__init__(**params)
        self.steps = check_steps(self.settings["normalise_text"])
        self.max_chars = int(check_number("max_chars", self.settings["max_chars"], 1, 65_536))

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
        """ned, wer, correct: the best accepted text counts in each."""
        truths = accepted_texts(sample)
        said = normalise(value, self.steps)
        return {"ned": max(1.0 - normalised_edit_distance(value, truth) for truth in truths),
                "wer": max(max(0.0, 1.0 - word_error_rate(value, truth)) for truth in truths),
                "correct": float(any(said == normalise(truth, self.steps) for truth in truths))}

    def describe(self, value: str | None, sample: Sample, ctx: RewardContext) -> Mapping[str, Any]:
        """pred_text and gold_text, accepted texts joined by ' | '."""
        shown = {} if value is None else {"pred_text": value}
        return {**shown, "gold_text": " | ".join(accepted_texts(sample))}

    def gold_answer(self, sample: Sample, ctx: RewardContext) -> str:
        """The text itself."""
        return accepted_texts(sample)[0]

    def wrong_answer(self, sample: Sample, ctx: RewardContext) -> str:
        """One character that stands in no accepted text."""
        return foreign_text(accepted_texts(sample))

    def example_data(self, folder: str) -> str:
        """16 pictures with one to three lines of words and numbers."""
        rng, rows = random.Random(5), []
        for number in range(16):
            lines = [f"{rng.choice(_WORDS)} {rng.choice(_WORDS)} {rng.randrange(100)}" for _ in range(1 + number % 3)]
            draw_text(Path(folder) / f"{number}.png", lines)
            text = "\n".join(lines)
            rows.append({"id": f"ocr-{number}", "image": f"{number}.png", "question": "Read the text in the image.",
                         "answer": text if number % 4 else [text, " ".join(lines)]})
        return write_rows(folder, rows)

    def summarize(self, rows: Sequence[Score]) -> Mapping[str, float]:
        """edit_distance (PageOCR's mean, lower is better, failures count as 1), mean_length of the answers in characters."""
        if not rows:
            return {}
        return {"edit_distance": sum(1.0 - row.metrics.get("ned", 0.0) for row in rows) / len(rows),
                "mean_length": sum(len(str(row.detail.get("pred_text", ""))) for row in rows) / len(rows),
                **super().summarize(rows)}

    def benchmark(self, pairs: Sequence[tuple[Sample, Score]], folder: Path) -> Mapping[str, float]:
        """OCRBench's scores for samples with params.ocrbench_type (and ocrbench.json); pageocr.json for the others.

        params.dataset (or the source) names OCRBench's subset; pageocr.json is Fox's result file: label and answer.
        """
        from tasks.metrics.ocrbench import Item, ocrbench_scores, write_ocrbench

        items, pages = [], []
        for sample, score in pairs:
            predict = str(score.detail.get("pred_text", ""))
            if "ocrbench_type" in sample.params:
                items.append(Item(sample.id, str(sample.params["ocrbench_type"]),
                                  str(sample.params.get("dataset", sample.source)), sample.question,
                                  tuple(accepted_texts(sample)), predict))
            else:
                image = Path(sample.images[0]).name if sample.images else ""
                pages.append({"image": image, "question": sample.question, "label": accepted_texts(sample)[0],
                              "answer": predict})
        if items:
            write_ocrbench(items, folder / "ocrbench.json")
        if pages:
            (folder / "pageocr.json").write_text(json.dumps(pages, ensure_ascii=False, indent=1), encoding="utf-8")
        return ocrbench_scores(items)
