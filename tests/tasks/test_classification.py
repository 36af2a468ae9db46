"""Classification: one label of a closed set; two labels are no answer, words end at their boundaries, synonyms count.

Run: pytest tests/tasks/test_classification.py
"""

from __future__ import annotations

import itertools
import json
import pickle
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmrl.coords import CoordFrame
from mmrl.errors import ConfigError, DataError
from mmrl.registry import task_from_spec
from mmrl.task import Template
from mmrl.tasks.classification import Classification, LabelSet, label_form
from mmrl.types import RewardContext, Sample
from tests.kits.clock_kit import takes_less

CTX = RewardContext(1, 1, CoordFrame.ABS_ORIG, num_tokens=9, max_tokens=100)
PARAMS = {
    "labels": ["cat", "dog", "hot dog", "category"],
    "synonyms": {"cat": ["kitty", "house-cat"], "dog": ["Hound"]},
}


def _sample(answer: str = "cat", params: dict[str, Any] | None = None) -> Sample:
    return Sample(
        "1",
        "classification",
        "s",
        "What is it?",
        answer,
        params=PARAMS if params is None else params,
    )


def _score(text: str, answer: str = "cat", **params: Any) -> Any:
    return Classification(**params).score(_sample(answer), f"<answer>{text}</answer>", CTX)


@pytest.mark.parametrize(
    ("text", "label"),
    [
        ("cat", "cat"),
        ("Cat.", "cat"),
        ("  CAT ", "cat"),
        ("'cat'", "cat"),
        ("**cat**", "cat"),
        ("kitty", "cat"),
        ("House cat", "cat"),
        ("house_cat", "cat"),
        ("ｃａｔ", "cat"),
        ("hot dog", "hot dog"),
        ("Hot-Dog", "hot dog"),
        ("category", "category"),
        ("hound", "dog"),
    ],
)
def test_labels_and_synonyms_in_any_spelling(text: str, label: str) -> None:
    for mode in ("exact", "mention"):
        score = _score(text, label, mode=mode)
        assert score.value == pytest.approx(1) and score.detail["pred_text"] == label
    other = "dog" if label != "dog" else "cat"
    assert _score(text, other).parts["accuracy"] == 0 and _score(text, other).parsed


@pytest.mark.parametrize(
    ("text", "exact", "mention"),
    [
        ("cat dog", "several_labels", "several_labels"),
        ("cat or dog", "several_labels", "several_labels"),
        ("kitty and hound", "several_labels", "several_labels"),
        ("a photo of a cat", "not_a_label", None),
        ("cats", "not_a_label", "not_a_label"),
        ("categories", "not_a_label", "not_a_label"),
        ("concat", "not_a_label", "not_a_label"),
        ("the cat, a cat!", "not_a_label", None),
        ("I do not know", "not_a_label", "not_a_label"),
        ("", "not_a_label", "not_a_label"),
        ("[NaN, NaN]", "not_a_label", "not_a_label"),
        ("cat" * 400, "answer_too_long", "answer_too_long"),
        ("cat, kitty", "not_a_label", None),
        ("a hot dog", "not_a_label", None),
    ],
)
def test_anything_else_is_no_answer(text: str, exact: str, mention: str | None) -> None:
    answer = "hot dog" if "hot dog" in text else "cat"
    for mode, reason in (("exact", exact), ("mention", mention)):
        score = _score(text, answer, mode=mode)
        assert (score.reason, score.value) == (reason, pytest.approx(0 if reason else 1))
        assert score.metrics == {"correct": float(not reason)}


label = st.text(st.characters(exclude_categories=("C",)), min_size=1, max_size=12)


@settings(deadline=None, max_examples=80)
@given(st.lists(label, min_size=2, max_size=6), st.data())
def test_gold_scores_one_and_every_other_label_zero(labels: list[str], data: Any) -> None:
    try:
        LabelSet(labels, {})
    except ValueError:
        with pytest.raises(ConfigError, match="one label each"):
            Classification(labels=labels)
        return
    if any(mark in text for text in labels for mark in ("<", ">")) or any(
        text.strip() != text for text in labels
    ):
        return
    task = Classification(labels=labels)
    truth = data.draw(st.sampled_from(labels))
    sample = _sample(truth, {})
    for text in labels:
        score = task.score(sample, f"<answer>{text}</answer>", CTX)
        assert score.parsed and score.parts["accuracy"] == float(text == truth)
    assert task.score(sample, task.gold(sample, CTX), CTX).value == pytest.approx(1)
    assert task.score(sample, task.wrong(sample, CTX), CTX).parts == {"accuracy": 0, "format": 1}


@settings(deadline=None, max_examples=80)
@given(
    st.one_of(
        st.text(max_size=60),
        st.lists(st.sampled_from(["cat", "dog", "hot", "a", "kitty", "."]), max_size=6).map(
            " ".join
        ),
    ),
    st.sampled_from(["exact", "mention"]),
    st.sampled_from([" dog", "☃☃☃", " zzz", ". Or a hot dog"]),
)
def test_junk_and_further_labels_never_pay(text: str, mode: str, junk: str) -> None:
    plain, more = _score(text, mode=mode), _score(text + junk, mode=mode)
    assert 0 <= plain.value <= 1 and (plain.parsed or plain.reason)
    if plain.parsed:
        assert more.value <= plain.value


def test_combining_marks_cost_linear_time() -> None:
    turns = itertools.count()

    def label(text: str) -> str | None:
        fresh = f"{next(turns)}{text[:100_000]}"  # what was normalised before is remembered
        return LabelSet(["cat", "dog"], {}).by_form.get(label_form(fresh))

    for text in ("a" + "\u0301\u0323" * 490, "cat" + "\uff9e\u0323" * 400_000):
        assert takes_less(0.2, partial(label, text)) is None


def test_labels_with_signs_are_whole_words() -> None:
    task = Classification(mode="mention", labels=["C", "C++", "St. Bernard"])
    for text, truth in (("it is C++.", "C++"), ("C", "C"), ("a St Bernard!", "St. Bernard")):
        assert task.score(
            _sample(truth, {}), f"<answer>{text}</answer>", CTX
        ).value == pytest.approx(1)


def test_the_prompt_lists_the_labels_and_leaves_braces_of_the_data_alone() -> None:
    sample = Sample(
        "1",
        "classification",
        "s",
        "Is {labels} {question}?",
        "a",
        params={"labels": ["a", "{question}"]},
    )
    text = Classification().messages(sample, Template("t", CoordFrame.ABS_ORIG))[-1]["content"][-1][
        "text"
    ]
    assert text.startswith("Is {labels} {question}? Choose one of: a, {question}. Reply")
    many = Classification(labels=[f"l{i}" for i in range(500)])
    shown = many.messages(_sample("l1", {}), Template("t", CoordFrame.ABS_ORIG))[-1]["content"][-1][
        "text"
    ]
    assert "l199, ..." in shown and "l200" not in shown


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"mode": "mentoin"}, "Did you mean 'mention'"),
        ({"labels": "cat"}, "labels as a list"),
        ({"labels": ["cat", "Cat."]}, "'Cat.' of label 'Cat.', which also means 'cat'"),
        ({"labels": ["a", "--"]}, "nothing to compare"),
        ({"labels": ["cat", "dog"], "synonyms": {"cta": ["x"]}}, "Did you mean 'cat'"),
        ({"labels": ["cat", "dog"], "synonyms": {"cat": "dog"}}, "synonyms as"),
        ({"labels": ["cat", "dog"], "synonyms": {"cat": ["DOG"]}}, "also means"),
        ({"per_source": {"s": {"accuracy": {"mode": "mention"}}}}, "one mode for all sources"),
        ({"labels": ["cat", "dog", "cat"]}, "label 'cat' twice"),
        ({"label": []}, "Did you mean 'labels'"),
    ],
)
def test_wrong_parameters_are_named(params: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Classification(**params)


@pytest.mark.parametrize(
    ("answer", "params", "message"),
    [
        (
            "cta",
            PARAMS,
            "an answer from the label set, found 'cta'; add it to params.labels. Did you mean 'cat'",
        ),
        ("cat", {}, "at least two labels"),
        ("cat", {"labels": ["cat"]}, "at least two labels"),
        (3, PARAMS, "text in 'answer'"),
        ("cat", {"labels": ["cat", "CAT"]}, "a label set without doubt"),
        ("cat", {"labels": "cat"}, "labels as a list"),
    ],
)
def test_unusable_rows_are_refused_with_their_line(
    tmp_path: Path, answer: Any, params: dict[str, Any], message: str
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"question": "q", "answer": answer, "params": params}))
    with pytest.raises(DataError, match=r"rows\.jsonl: row 1: ") as caught:
        list(Classification().load(str(path)))
    assert message in str(caught.value)


def test_synonyms_as_truth_become_labels_and_the_task_s_labels_serve_rows_without(
    tmp_path: Path,
) -> None:
    path = tmp_path / "rows.jsonl"
    rows = [
        {"question": "q", "answer": "Kitty", "params": PARAMS},
        {"question": "q", "answer": "B"},
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    assert [s.answer for s in Classification(labels=["a", "b"]).load(str(path))] == ["cat", "b"]


def test_examples_load_and_the_summary_weighs_labels_equally(tmp_path: Path) -> None:
    task = task_from_spec("classification", {})
    samples = list(task.load(str(task.example_data(str(tmp_path)))))
    assert len(samples) == 16 and {s.answer for s in samples} == {"red", "green", "blue", "yellow"}
    rows = [task.score(s, task.gold(s, CTX), CTX) for s in samples]
    assert {r.value for r in rows} == {1} and task.summarize([]) == {}
    right, wrong, failed = rows[0], _score("dog"), _score("nothing")
    summary = task.summarize([right, right, right, wrong, failed])
    assert (
        summary["accuracy"] == 0.6
        and summary["macro_recall"] == 0.5
        and summary["parse_failure_rate"] == 0.2
    )


def test_thousand_labels_are_scored_fast_in_threads_and_after_pickling() -> None:
    names = [f"class {i} of things" for i in range(1000)]
    task = pickle.loads(pickle.dumps(Classification(mode="mention")))
    sample = _sample(names[7], {"labels": names})
    texts = [f"<answer>I see class {i} of things</answer>" for i in range(100)]
    assert task.score(sample, texts[7], CTX).value == pytest.approx(1)
    serial = takes_less(
        0.05 * len(texts), lambda: [task.score(sample, text, CTX).value for text in texts]
    )
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda text: task.score(sample, text, CTX).value, texts)) == serial


@settings(deadline=None)
@given(st.text(max_size=40))
def test_the_compared_form_is_stable(text: str) -> None:
    assert (
        label_form(label_form(text)) == label_form(text)
        or text.count(".")
        or set(text) & set("\"'`* ")
    )
