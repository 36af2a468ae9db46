"""Rows of benchmarks in the form of their releases, each with a reply, for scripts.record_suites.

    python -c "from scripts._suite_rows import mmmu; print(mmmu()[0])"

Made up and seeded: no row of any data set. A row is {"row": as the release has it, "reply": text}; what every row of a file holds
beside (pictures, clips) is put there by tests/evaluation/suite_kit.py.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from scripts._extractor_cases import CHOICES, MATHVISTA_NUMBERS, OPEN, OPTIONS
from scripts._suite_texts import LETTERS, choice_replies, number_replies, plain, truth_near

__all__ = ["Case", "choices", "mathvista", "mmmu", "vsibench"]

Case = Mapping[str, Any]
_WORDS: Sequence[Sequence[str]] = (
    ("a chair", "a table"),
    ("red", "green", "dark green"),
    ("12 cm", "14 cm", "2 cm", "20 cm"),
    OPTIONS,
    ("north", "south", "east", "west", "north east"),
    ("0.5", "0.05", "5", "50", "500", "5000", "0"),
)


_SOME = 16  # of a bad student's replies to each set of options


def choices(seed: int) -> list[tuple[list[str], str, str]]:
    """(options, letter of the right one, reply): those of scripts._extractor_cases, and a bad student's on other options."""
    rng = random.Random(seed)
    found = [(list(OPTIONS), truth_near(rng, reply, LETTERS[:4]), reply) for reply in CHOICES]
    for options in _WORDS:
        letters = LETTERS[: len(options)]
        right, other = rng.sample(letters, 2)
        replies = rng.sample(choice_replies(right, other, options), _SOME)
        found += [
            (list(options), rng.choice([right, right, right, other]), reply) for reply in replies
        ]
    return [case for case in found if plain(case[2])]


def mmmu() -> list[Case]:
    """Questions of MMMU's validation split: one subject of each domain, with two to seven options, and open ones."""
    subjects = (
        "Accounting",
        "Art_Theory",
        "Biology",
        "Clinical_Medicine",
        "Psychology",
        "Computer_Science",
        "Math",
    )
    rows: list[dict[str, Any]] = [
        {
            "question": "Which one is it? <image 1>",
            "options": repr(options),
            "answer": right,
            "question_type": "multiple-choice",
            "reply": reply,
        }
        for options, right, reply in choices(71)
    ]
    rows += [
        {
            "question": "Which one is it? <image 1>",
            "options": "[]",
            "question_type": "open",
            "reply": reply,
            "answer": repr(truth) if isinstance(truth, list) else truth,
        }
        for reply, truth in OPEN
        if plain(reply) and truth != "[1, 2, 3]"
    ]  # MMMU's texts of lists are lists of texts
    cases: list[Case] = []
    for number, row in enumerate(rows):
        reply = row.pop("reply")
        cases.append(
            {
                "row": {"id": f"validation_{subjects[number % len(subjects)]}_{number + 1}", **row},
                "reply": reply,
            }
        )
    return cases


def mathvista() -> list[Case]:
    """Problems of MathVista's testmini: choices (texts and numbers), whole numbers, decimals and lists."""
    rows: list[dict[str, Any]] = []
    for options, right, reply in choices(72):
        kind = "integer" if options[2:3] == ["5"] else "text"
        rows.append(
            {
                "question_type": "multi_choice",
                "answer_type": kind,
                "choices": options,
                "precision": None,
                "answer": options[LETTERS.index(right)],
                "reply": reply,
            }
        )
    for reply, truth, params in MATHVISTA_NUMBERS:
        rows.append(
            {
                "question_type": "free_form",
                "choices": None,
                "precision": None,
                "answer": truth,
                "reply": reply,
                **params,
            }
        )
    for truth, reply in (
        ("[1, 2, 3]", "[1, 2, 3]"),
        ("[1, 2, 3]", "[1,2,3]"),
        ("[1, 2, 3]", 'The answer is "[1, 2, 3]".'),
        ("[1, 2, 3]", "[3, 2, 1]"),
        ("[1, 2, 3]", ""),
        ("[1, 2, 3]", "1, 2, 3"),
    ):
        rows.append(
            {
                "question_type": "free_form",
                "answer_type": "list",
                "choices": None,
                "precision": None,
                "answer": truth,
                "reply": reply,
            }
        )
    cases: list[Case] = []
    for number, row in enumerate(row for row in rows if plain(row["reply"])):
        reply = row.pop("reply")
        metadata = {
            "task": ("geometry problem solving", "math word problem")[number % 2],
            "skills": ["arithmetic reasoning"],
            "source": ("GEOS", "IconQA")[number % 2],
            "category": "general-vqa",
            "context": "bar chart",
            "grade": "daily life",
            "language": "english",
        }
        cases.append(
            {
                "row": {
                    "pid": str(number + 1),
                    "question": "How much is it?",
                    "unit": None,
                    **row,
                    "metadata": metadata,
                },
                "reply": reply,
            }
        )
    return cases


_DIRECTIONS = (
    "object_rel_direction_easy",
    "object_rel_direction_medium",
    "object_rel_direction_hard",
)
_VSI_CHOICES = (*_DIRECTIONS, "object_rel_distance", "route_planning", "obj_appearance_order")
_VSI_NUMBERS = (
    "object_abs_distance",
    "object_counting",
    "object_size_estimation",
    "room_size_estimation",
)


def vsibench() -> list[Case]:
    """Questions of VSI-Bench: six types with options, four with a number."""
    rng = random.Random(73)
    cases: list[dict[str, Any]] = []
    for options, right, reply in choices(74):
        kind = rng.choice(_VSI_CHOICES)
        shown = [f"{letter}. {option}" for letter, option in zip(LETTERS, options, strict=False)]
        cases.append(
            {
                "row": {"question_type": kind, "ground_truth": right, "options": shown},
                "reply": reply,
            }
        )
    for kind in _VSI_NUMBERS:
        truth = (
            rng.randrange(2, 12) if kind == "object_counting" else round(rng.uniform(0.5, 30), 1)
        )
        cases += [
            {
                "row": {"question_type": kind, "ground_truth": str(truth), "options": None},
                "reply": reply,
            }
            for reply in number_replies(truth)
            if plain(reply)
        ]
    sets = ("arkitscenes", "scannet", "scannetpp")
    return [
        {
            "row": {
                "id": number,
                "dataset": sets[number % 3],
                "scene_name": f"scene{number % 3}",
                "question": "Where is it?",
                **case["row"],
            },
            "reply": case["reply"],
        }
        for number, case in enumerate(cases)
    ]
