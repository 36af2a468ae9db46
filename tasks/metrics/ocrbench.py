"""OCRBench (Liu et al., arXiv 2305.07895): the official substring rule over its ten types, 1000 items, one point each.

An item is a hit when any accepted answer is part of the prediction, both in lower case, with line ends as spaces;
handwritten formulas (HME100k) keep their case and lose all spaces instead. Long predictions hit by accident, so only the
first `MAX_CHARS` characters count here, and how many were longer is reported: where that is 0 the numbers are the
official script's.

    python -c "from mmrl.tasks.metrics.ocrbench import is_hit; print(is_hit('The sign says STOP.', ['stop']))"
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

__all__ = [
    "FORMULAS",
    "MAX_CHARS",
    "RECOGNITION",
    "TYPES",
    "Item",
    "is_hit",
    "ocrbench_scores",
    "write_ocrbench",
]

MAX_CHARS = 1_024
RECOGNITION = (
    "Regular Text Recognition",
    "Irregular Text Recognition",
    "Artistic Text Recognition",
    "Handwriting Recognition",
    "Digit String Recognition",
    "Non-Semantic Text Recognition",
)
"""The six types of 50 items that make up 'Text Recognition'."""
FORMULAS = "Handwritten Mathematical Expression Recognition"
TYPES = (
    *RECOGNITION,
    "Scene Text-centric VQA",
    "Doc-oriented VQA",
    "Key Information Extraction",
    FORMULAS,
)


@dataclass(frozen=True)
class Item:
    """One question with its prediction ('' when there was no readable answer)."""

    id: str
    type: str
    dataset_name: str
    question: str
    answers: tuple[str, ...]
    predict: str

    @property
    def is_formula(self) -> bool:
        """True for items compared with case and without spaces: HME100k, the only set of its type."""
        return self.dataset_name == "HME100k" or self.type == FORMULAS

    def hit(self, max_chars: int = MAX_CHARS) -> bool:
        """The official rule on the first `max_chars` characters of the prediction."""
        return is_hit(self.predict[:max_chars], self.answers, self.is_formula)


def is_hit(prediction: str, answers: Sequence[str], formula: bool = False) -> bool:
    """True when any of `answers` is part of `prediction`, by the official script's normalisation."""

    def form(text: str) -> str:
        text = text.strip().replace("\n", " ")
        return text.replace(" ", "") if formula else text.lower()

    said = form(prediction)
    return any(form(answer) in said for answer in answers)


def ocrbench_scores(items: Sequence[Item], max_chars: int = MAX_CHARS) -> dict[str, float]:
    """Hits per type and in total (of 1000 on the full set), share of hits, mean length and number of cut predictions.

    A type without items is left out. {} without items.
    """
    if not items:
        return {}
    hits = {
        name: 0.0
        for name in dict.fromkeys((*TYPES, *(item.type for item in items)))
        if any(item.type == name for item in items)
    }
    for item in items:
        hits[item.type] += item.hit(max_chars)
    scores = {f"ocrbench/{name}": value for name, value in hits.items()}
    if any(name in hits for name in RECOGNITION):
        scores["ocrbench/Text Recognition"] = sum(hits.get(name, 0.0) for name in RECOGNITION)
    total = sum(hits.values())
    return {
        **scores,
        "ocrbench/final_score": total,
        "ocrbench/items": float(len(items)),
        "ocrbench/accuracy": total / len(items),
        "ocrbench/mean_length": sum(len(item.predict) for item in items) / len(items),
        "ocrbench/cut": float(sum(len(item.predict) > max_chars for item in items)),
    }


def write_ocrbench(items: Sequence[Item], path: Path, max_chars: int = MAX_CHARS) -> None:
    """The official result file: a JSON list with dataset_name, type, question, answers, predict and result (0 or 1)."""
    rows = [
        {**asdict(item), "answers": list(item.answers), "result": int(item.hit(max_chars))}
        for item in items
    ]
    path.write_text(json.dumps(rows, ensure_ascii=False, indent=1), encoding="utf-8")
