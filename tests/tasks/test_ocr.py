"""OCR: the text itself is the answer; gold 1, wrong 0 in every mode; nothing gained by guessing; PageOCR's and OCRBench's files.

Run: pytest tests/tasks/test_ocr.py
"""

from __future__ import annotations

import itertools
import json
import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmrl.coords import CoordFrame
from mmrl.errors import ConfigError, DataError
from mmrl.registry import task_from_spec
from mmrl.rewards.text import MODES, _unicode_form, normalised_edit_distance
from mmrl.tasks.ocr import OCR
from mmrl.tasks.texts import foreign_text
from mmrl.types import RewardContext, Sample, Score, StopReason
from tests.kits.clock_kit import takes_less

CTX = RewardContext(1, 1, CoordFrame.REL1000, num_tokens=9, max_tokens=100)


def _sample(answer: Any = "OPEN CAFE 24", **options: Any) -> Sample:
    return Sample("1", "ocr", options.pop("source", "s"), "Read the text.", answer, **options)


def _said(text: str) -> str:
    return f"<answer>{text}</answer>"


plain = st.text(
    st.characters(exclude_categories=("C", "Z"), exclude_characters="<>|[]"),
    min_size=1,
    max_size=30,
)


@settings(deadline=None, max_examples=80)
@given(
    plain,
    st.sampled_from(sorted(MODES)),
    st.sampled_from(["answer", "think", "bare"]),
    st.booleans(),
)
def test_gold_scores_one_and_wrong_zero_in_every_mode(
    text: str, mode: str, answer_format: str, several: bool
) -> None:
    task, sample = (
        OCR(mode=mode, answer_format=answer_format),
        _sample([text, text + " b"] if several else text),
    )
    if mode == "rouge" and not any(c.isalnum() for c in text):
        return  # a truth without words
    gold, wrong = (
        task.score(sample, answer, CTX)
        for answer in (task.gold(sample, CTX), task.wrong(sample, CTX))
    )
    assert gold.value == pytest.approx(1) and gold.metrics == pytest.approx(
        {"ned": 1, "wer": 1, "correct": 1}
    )
    assert (
        wrong.parsed
        and wrong.parts == {"accuracy": 0, "format": 1}
        and wrong.metrics["correct"] == 0
    )


def test_the_default_is_right_minus_wrong_characters() -> None:
    task = OCR()
    score = task.score(_sample(), _said("OPEN CAFE 25"), CTX)
    assert score.parts["accuracy"] == pytest.approx((11 - 1) / 12) and score.metrics[
        "ned"
    ] == pytest.approx(11 / 12)
    assert score.metrics["wer"] == pytest.approx(2 / 3) and score.metrics["correct"] == 0
    assert task.score(_sample(), _said("OPEN\nCAFE  24"), CTX).metrics["correct"] == 1
    assert task.score(_sample(), _said("open cafe 24"), CTX).metrics["correct"] == 0, (
        "case is part of a text"
    )
    assert (
        OCR(normalise_text=["lower"])
        .score(_sample(), _said("open cafe 24"), CTX)
        .metrics["correct"]
        == 1
    )


def test_code_keeps_its_spaces() -> None:
    sample = _sample("if x:\n    return a / b")
    task = OCR(normalise_text=[], mode="exact")
    assert task.score(sample, _said("if x:\n    return a / b"), CTX).value == pytest.approx(1)
    assert task.score(sample, _said("if x:\n return a / b"), CTX).parts["accuracy"] == 0
    assert task.score(sample, _said("if x:\n    return a/b"), CTX).metrics["correct"] == 0


def test_the_best_accepted_text_counts() -> None:
    sample = _sample(["24 hours", "24h"])
    score = OCR().score(sample, _said("24h"), CTX)
    assert score.value == pytest.approx(1) and score.detail["gold_text"] == "24 hours | 24h"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "empty"),
        ("OPEN", "no_answer"),
        (_said(""), "empty"),
        (_said("[1, 2, 3, 4]"), "not_text"),
        (_said("[NaN, NaN]"), "not_text"),
        (_said("a" * 8_193), "answer_too_long"),
        (_said("OPEN") * 2, "several_answers"),
        ("<answer>OPEN", "unclosed_answer"),
        ("<think>OPEN CAFE 24</think>", "empty"),
    ],
)
def test_failures_are_zeros_that_stay(text: str, reason: str) -> None:
    task = OCR()
    score = task.score(_sample(), text, CTX)
    assert (score.value, score.parsed, score.reason) == (0, False, reason)
    assert score.metrics == {"ned": 0, "wer": 0, "correct": 0}
    assert score.detail == {"gold_text": "OPEN CAFE 24"}
    right = task.score(_sample(), task.gold(_sample(), CTX), CTX)
    assert (
        task.summarize([score, right])["edit_distance"]
        == 0.5
        == task.summarize([score, right])["parse_failure_rate"]
    )


def test_a_cut_page_is_named_truncated() -> None:
    ctx = RewardContext(1, 1, CoordFrame.REL1000, stop=StopReason.LENGTH)
    assert OCR().score(_sample(), "<answer>OPEN CA", ctx).reason == "truncated"


def test_numbers_in_brackets_are_text_where_the_truth_is_one() -> None:
    assert OCR().score(_sample("[12, 13]"), _said("[12, 13]"), CTX).value == pytest.approx(1)


@settings(deadline=None, max_examples=80)
@given(
    st.text("OPENCAF 24", min_size=1, max_size=14),
    st.sampled_from(["☃☃☃", " zzz qqq zzz", "☃" * 300, " I am sure of it"]),
)
def test_junk_inside_or_behind_the_answer_never_pays(said: str, junk: str) -> None:
    task = OCR()
    value = task.score(_sample(), _said(said), CTX).value
    assert task.score(_sample(), _said(said) + junk, CTX).value <= value
    assert (
        task.score(_sample(), _said(said + junk), CTX).value <= value
        or not task.score(_sample(), _said(said), CTX).parsed
    )


@settings(deadline=None, max_examples=80)
@given(st.text(max_size=200))
def test_any_text_gets_a_bounded_score(text: str) -> None:
    for mode in ("indel", "ned", "wer"):
        for body in (text, _said(text)):
            score = OCR(mode=mode).score(_sample(), body, CTX)
            assert 0 <= score.value <= 1 and (score.parsed or score.reason)


@pytest.mark.parametrize(
    ("preset", "text", "accuracy", "value"),
    [
        ("video_r1", "OPEN CAFE 25", 2 / 3, 2 / 3 + 1),
        ("video_r1", "open cafe 24", 1 / 3, 1 / 3 + 1),
        ("video_r1", "a b c d e f", 0, 1),
        ("easyvideo_r1", "open cafe 24", 1, 1),
    ],
)
def test_presets_follow_their_papers(preset: str, text: str, accuracy: float, value: float) -> None:
    score = OCR(preset=preset).score(_sample(), f"<think>t</think><answer>{text}</answer>", CTX)
    assert score.parts["accuracy"] == pytest.approx(accuracy) and score.value == pytest.approx(
        value
    )


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"mode": "rogue"}, "Did you mean 'rouge'"),
        ({"normalise_text": ["lowr"]}, "Did you mean 'lower'"),
        ({"max_chars": 0}, "max_chars"),
        ({"accuracy": {"treshold": 1}, "mode": "anls"}, "Did you mean 'threshold'"),
        ({"max_char": 3}, "Did you mean 'max_chars'"),
        ({"preset": "videor1"}, "Did you mean 'video_r1'"),
    ],
)
def test_wrong_parameters_are_named(params: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        OCR(**params)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ("", "text in 'answer'"),
        (3, "text in 'answer'"),
        ([], "at least one accepted text"),
        (["a", " "], "text in 'answer'"),
        ("a" * 8_193, "up to 8192 characters"),
        ("x <answer>", "without <think>, <answer>"),
        ("x</s>", "end-of-turn"),
    ],
)
def test_unusable_truths_are_refused_with_their_line(
    tmp_path: Path, answer: Any, message: str
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps({"question": "q", "answer": a}) for a in ("fine", answer)))
    with pytest.raises(DataError, match=r"rows\.jsonl: row 2: ") as caught:
        list(OCR().load(str(path)))
    assert message in str(caught.value)
    task = OCR(reader={"on_error": "record"})
    assert [s.answer for s in task.load(str(path))] == ["fine"] and len(task.rejected) == 1


def test_the_registered_task_loads_its_examples(tmp_path: Path) -> None:
    task = task_from_spec("ocr", {})
    path = task.example_data(str(tmp_path))
    first, again = list(task.load(str(path))), list(task.load(str(path)))
    assert len(first) == 16 and first == again and any(isinstance(s.answer, list) for s in first)
    rows = [task.score(s, task.gold(s, CTX), CTX) for s in first]
    assert (
        {r.value for r in rows} == {1}
        and task.headline in rows[0].metrics
        and task.summarize([]) == {}
    )
    assert task.summarize(rows)["edit_distance"] == 0 and task.summarize(rows)["mean_length"] > 5


def test_foreign_text_shares_nothing_in_any_case_or_form() -> None:
    assert foreign_text(["zqxj"]) == "k" and foreign_text(["ＺＱＸ"], 3) == "jjj"
    assert foreign_text(["zqxjkvw08ΩжאกツÀ龘麤靐齉"]) not in "zqxjkvw08ΩжאกツÀ龘麤靐齉"


def test_benchmark_writes_the_official_files(tmp_path: Path) -> None:
    task = OCR()
    typed = [
        _sample(
            ["Stop", "halt"], params={"ocrbench_type": "Regular Text Recognition"}, source="IIIT5K"
        ),
        _sample(
            "X^2",
            params={"ocrbench_type": "Handwritten Mathematical Expression Recognition"},
            source="HME100k",
        ),
    ]
    page = _sample("page", images=("a/b.png",))
    texts = ["the sign says STOP", "x ^ 2", "pags"]
    pairs = [(s, task.score(s, _said(t), CTX)) for s, t in zip([*typed, page], texts, strict=True)]
    scores = task.benchmark(pairs, tmp_path)
    assert (
        scores["ocrbench/final_score"] == 1
        and scores["ocrbench/items"] == 2
        and scores["ocrbench/cut"] == 0
    )
    assert [row["result"] for row in json.loads((tmp_path / "ocrbench.json").read_text())] == [1, 0]
    rows = json.loads((tmp_path / "pageocr.json").read_text())
    assert rows == [
        {"image": "b.png", "question": "Read the text.", "label": "page", "answer": "pags"}
    ]
    assert (
        normalised_edit_distance(rows[0]["answer"], rows[0]["label"])
        == task.summarize([pairs[2][1]])["edit_distance"]
    )
    assert task.benchmark([], tmp_path) == {}


def test_scoring_works_in_threads_and_after_pickling() -> None:
    task, sample = OCR(), _sample("the cat sat on the mat " * 20)
    texts = [_said(f"the cat {i} sat on the mat " * 15) for i in range(300)]
    serial = [task.score(sample, text, CTX) for text in texts]
    copy = pickle.loads(pickle.dumps(task))
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda text: copy.score(sample, text, CTX), texts)) == serial


@pytest.mark.parametrize(
    "text",
    [
        "a" * 400_000,
        "🙂" * 9_000,
        "((((a+)+)+)+)" * 600,
        "\ufdfa" * 8_000,
        "[1, " * 90_000,
        "\x00" * 8_192,
    ],
)
def test_hostile_answers_take_milliseconds(text: str) -> None:
    def score() -> Score:
        _unicode_form.cache_clear()  # or the second run asks its memory
        return OCR().score(_sample("OPEN CAFE 24 " * 30), _said(text), CTX)

    assert takes_less(0.3, score).value <= 0.1


def test_runs_of_combining_marks_take_milliseconds() -> None:
    turns = itertools.count()

    def score() -> Score:
        said = _said(f"{next(turns)}a" + "\u0301\u0323" * 4_090)
        return OCR().score(_sample("OPEN CAFE 24"), said, CTX)

    assert takes_less(0.3, score).parts["accuracy"] == 0


def test_accents_piled_up_are_no_text_and_ordinary_ones_are() -> None:
    sample = _sample("cafe\u0301 \u0e01\u0e34\u0e48")
    assert OCR().score(
        sample, "<answer>cafe\u0301 \u0e01\u0e34\u0e48</answer>", CTX
    ).value == pytest.approx(1)
    piled = OCR().score(sample, "<answer>cafe" + "\u0301\u0323" * 40 + "</answer>", CTX)
    assert (piled.value, piled.reason) == (0, "not_text")
