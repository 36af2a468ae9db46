"""OCRBench: equal to the official script's loop on the same items, with its corner cases.

Run: pytest tests/tasks/test_ocrbench.py
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmrl.tasks.metrics.ocrbench import (
    FORMULAS,
    MAX_CHARS,
    RECOGNITION,
    TYPES,
    Item,
    is_hit,
    ocrbench_scores,
    write_ocrbench,
)

text = st.text("aB 1\n^x", max_size=12)
items = st.builds(
    Item,
    st.text("id", max_size=3),
    st.sampled_from(TYPES),
    st.sampled_from(["IIIT5K", "docVQA", "HME100k"]),
    st.just("q"),
    st.lists(text.filter(str.strip), min_size=1, max_size=3).map(tuple),
    text,
)


def _rule(prediction: str, answers: tuple[str, ...], keeps_case: bool) -> bool:
    """The published rule, written down once more: predictions and answers are normalised the same way."""
    if keeps_case:
        said = "".join(prediction.strip().replace("\n", " ").split(" "))
        return any("".join(a.strip().replace("\n", " ").split(" ")) in said for a in answers)
    said = prediction.lower().strip().replace("\n", " ")
    return any(said.find(a.lower().strip().replace("\n", " ")) >= 0 for a in answers)


@settings(deadline=None)
@given(st.lists(items, min_size=1, max_size=8))
def test_scores_are_the_published_rule_s(rows: list[Item]) -> None:
    hits = [
        _rule(item.predict, item.answers, item.dataset_name == "HME100k" or item.type == FORMULAS)
        for item in rows
    ]
    scores = ocrbench_scores(rows)
    assert scores["ocrbench/final_score"] == sum(hits) and scores["ocrbench/items"] == len(rows)
    assert scores["ocrbench/accuracy"] == pytest.approx(sum(hits) / len(rows))
    for name in TYPES:
        mine = [hit for hit, item in zip(hits, rows, strict=True) if item.type == name]
        assert scores.get(f"ocrbench/{name}") == (sum(mine) if mine else None)
    if any(item.type in RECOGNITION for item in rows):
        assert scores["ocrbench/Text Recognition"] == sum(
            hit for hit, item in zip(hits, rows, strict=True) if item.type in RECOGNITION
        )


@pytest.mark.parametrize(
    ("prediction", "answers", "formula", "hit"),
    [
        ("The sign says STOP.", ["stop"], False, True),
        ("st\nop", ["st op"], False, True),
        ("stp", ["stop"], False, False),
        ("a b", ["ab"], False, False),
        ("x ^ 2 + 1", ["x^2+1"], True, True),
        ("X^2", ["x^2"], True, False),
        ("", ["a"], False, False),
        ("no", ["yes", "No"], False, True),
        (" a ", ["a\n"], False, True),
    ],
)
def test_corner_cases(prediction: str, answers: list[str], formula: bool, hit: bool) -> None:
    assert is_hit(prediction, answers, formula) is hit


def test_long_predictions_are_cut_and_counted() -> None:
    flood = Item("1", TYPES[0], "svt", "q", ("stop",), "go " * MAX_CHARS + "stop")
    fair = Item("2", TYPES[0], "svt", "q", ("stop",), "stop")
    scores = ocrbench_scores([flood, fair])
    assert scores["ocrbench/final_score"] == 1 and scores["ocrbench/cut"] == 1
    assert scores["ocrbench/mean_length"] == (len(flood.predict) + 4) / 2
    assert ocrbench_scores([flood, fair], max_chars=10**6)["ocrbench/final_score"] == 2, (
        "without the cap: the official number"
    )
    assert ocrbench_scores([]) == {}


def test_a_type_the_benchmark_does_not_know_is_listed_by_its_name() -> None:
    scores = ocrbench_scores([Item("1", "Poster", "own", "q", ("a",), "A")])
    assert (
        scores["ocrbench/Poster"] == 1 == scores["ocrbench/final_score"]
        and "ocrbench/Text Recognition" not in scores
    )


def test_the_result_file_has_the_official_keys(tmp_path: Path) -> None:
    write_ocrbench([Item("1", TYPES[0], "svt", "what?", ("é",), "É")], tmp_path / "r.json")
    assert json.loads((tmp_path / "r.json").read_text(encoding="utf-8")) == [
        {
            "id": "1",
            "type": TYPES[0],
            "dataset_name": "svt",
            "question": "what?",
            "answers": ["é"],
            "predict": "É",
            "result": 1,
        }
    ]
