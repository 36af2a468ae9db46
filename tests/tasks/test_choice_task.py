"""Multiple choice: options in the prompt, letters in files, shuffles, presets, rules with a name."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmrl.coords import CoordFrame
from mmrl.errors import ConfigError, DataError
from mmrl.registry import task_from_spec
from mmrl.task import Template
from mmrl.tasks.choice import Choice, options_of, read_letter
from mmrl.types import RewardContext, Sample

PETS = ["dog", "red cat", "bird", "cow", "horse", "ant"]
CTX = RewardContext(1, 1, CoordFrame.ABS_ORIG)
TEMPLATE = Template("qwen", CoordFrame.ABS_ORIG)


def _sample(answer: str = "B", **params: Any) -> Sample:
    return Sample(
        params.pop("id", "1"),
        "choice",
        "s",
        "Which animal?",
        answer,
        params={"options": PETS, **params},
    )


def _prompt(task: Choice, sample: Sample) -> str:
    return str(task.messages(sample, TEMPLATE)[-1]["content"][-1]["text"])


def test_the_prompt_lists_the_options_behind_the_question() -> None:
    text = _prompt(Choice(), _sample())
    assert text == (
        "Which animal?\nA. dog\nB. red cat\nC. bird\nD. cow\nE. horse\nF. ant\n"
        "Reply with nothing but <answer>the letter of the right option</answer>."
    )
    assert _prompt(Choice(prompt="{question} Answer."), _sample()).startswith(
        "Which animal?\nA. dog\n"
    )
    assert _prompt(Choice(prompt="Choose:\n{options}\n{question}"), _sample()).endswith(
        "F. ant\nWhich animal?"
    )
    bare = Sample("1", "choice", "s", "Which? A. dog B. cat", "A")
    assert _prompt(Choice(), bare).startswith("Which? A. dog B. cat Reply with nothing")


def test_braces_in_question_and_options_stay_as_they_are() -> None:
    sample = Sample(
        "1", "choice", "s", "What is {options}?", "A", params={"options": ["{question}", "{frame}"]}
    )
    assert _prompt(Choice(), sample).startswith("What is {options}?\nA. {question}\nB. {frame}\n")


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from("ABCDEF"),
    st.booleans(),
    st.sampled_from(["exact", "literal"]),
    st.text(max_size=10),
)
def test_gold_scores_one_and_wrong_zero(letter: str, shuffle: bool, mode: str, key: str) -> None:
    task, sample = Choice(shuffle_options=shuffle, mode=mode), _sample(letter, id=key)
    assert task.score(sample, task.gold(sample, CTX), CTX).value == 1
    wrong = task.score(sample, task.wrong(sample, CTX), CTX)
    assert wrong.parsed and wrong.parts["accuracy"] == 0 and wrong.metrics["correct"] == 0


def test_a_shuffle_moves_letters_but_not_the_truth() -> None:
    task = Choice(shuffle_options=True)
    seen = set()
    for number in range(30):
        sample = _sample("B", id=str(number))
        letter = task.gold_answer(sample, CTX)
        assert f"{letter}. red cat" in _prompt(task, sample), (
            "the prompt and the reward share one order"
        )
        score = task.score(sample, f"<answer>{letter}</answer>", CTX)
        assert (
            score.value == 1
            and score.detail["pred_text"] == score.detail["gold_text"] == "B. red cat"
        )
        assert task.score(sample, "<answer>red cat</answer>", CTX).value == 1
        seen.add(letter)
    assert len(seen) >= 4, "positions vary between samples"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("<answer>A or B</answer>", "several_letters"),
        ("<answer>The red cat is B</answer>", "not_a_choice"),
        ("<answer>B. dog</answer>", "letter_and_text_disagree"),
        ("<answer>G</answer>", "letter_out_of_range"),
        ("B", "no_answer"),
        ("<think>B</think>", "empty"),
        ("<answer>A</answer><answer>B</answer>", "several_answers"),
        ("<answer>" + "B" * 390_000 + "</answer>", "answer_too_long"),
    ],
)
def test_failures_are_recorded_zeros(text: str, reason: str) -> None:
    score = Choice().score(_sample(), text, CTX)
    assert (score.value, score.parsed, score.reason, score.metrics["correct"]) == (
        0,
        False,
        reason,
        0,
    )
    assert score.detail["gold_text"] == "B. red cat"


def test_literal_mode_reproduces_the_exact_string_of_video_r1() -> None:
    task = Choice(preset="video_r1")
    for text, value in (("B", 2), ("(B)", 1), ("b", 1), ("red cat", 1), ("A", 1)):
        assert task.score(_sample(), f"<think>x</think><answer>{text}</answer>", CTX).value == value
    assert task.value_range == (0, 2)


def test_garbage_behind_the_answer_never_raises_the_reward() -> None:
    task = Choice()
    for answer in ("A", "B", "dog", "red cat", "x"):
        clean = task.score(_sample(), f"<answer>{answer}</answer>", CTX).value
        for tail in (" B", ". B", "\nred cat", " or B", "!", "**", "(B)", " 🙂"):
            inside = task.score(_sample(), f"<answer>{answer}{tail}</answer>", CTX).value
            after = task.score(_sample(), f"<answer>{answer}</answer>{tail}", CTX).value
            assert inside <= max(clean, 0.1 if clean else 0) and after <= clean


@pytest.mark.parametrize("value", ["B", "b", "(B)", "B. red cat", "red cat", "Red cat."])
def test_files_may_spell_the_truth_as_letter_or_text(value: str) -> None:
    assert read_letter(value, {"options": PETS}) == "B"
    assert (
        read_letter(
            value,
            {"options": [f"{letter}. {pet}" for letter, pet in zip("ABCDEF", PETS, strict=True)]},
        )
        == "B"
    )


@pytest.mark.parametrize(
    ("value", "params", "words"),
    [
        ("G", {"options": PETS}, "letter_out_of_range"),
        ("mouse", {"options": PETS}, "not_a_choice"),
        (1, {"options": PETS}, "an index may count from 0 or 1"),
        ("B. dog", {"options": PETS}, "letter_and_text_disagree"),
        ("A", {"options": "dog, cat"}, "a list of texts"),
        ("A", {"options": ["dog"]}, "2 to 26 options"),
        ("A", {"options": ["dog", 3]}, "a list of texts"),
        ("A", {"options": ["x"] * 27}, "2 to 26 options"),
        ("A", {"num_options": 1}, "num_options from 2 to 26"),
        ("E", {"num_options": 4}, "letters A to D"),
    ],
)
def test_unusable_rows_say_what_to_fix(
    tmp_path: Path, value: Any, params: dict[str, Any], words: str
) -> None:
    file = tmp_path / "data.jsonl"
    file.write_text(
        json.dumps({"id": "1", "question": "Which?", "answer": value, "params": params}) + "\n"
    )
    with pytest.raises(DataError, match="row 1: expected") as error:
        Choice().load(str(file))
    assert words in str(error.value)
    task = Choice(reader={"on_error": "record"})
    assert list(task.load(str(file))) == [] and len(task.rejected) == 1


def test_rows_without_options_take_letters_only() -> None:
    sample = Sample("1", "choice", "s", "Which? A. dog B. cat", "B", params={"num_options": 2})
    assert Choice().score(sample, "<answer>(B)</answer>", CTX).value == 1
    assert Choice().score(sample, "<answer>C</answer>", CTX).reason == "letter_out_of_range"
    assert Choice().wrong_answer(sample, CTX) == "A"
    assert options_of({}) == []


def test_named_rules_for_texts_that_name_no_option() -> None:
    sample = Sample("1", "choice", "s", "Angle?", "A", params={"options": ["145°", "35°"]})
    text = "<answer>145 °</answer>"
    strict, nearest = Choice(), Choice(preset="mathvista_rule")
    assert strict.score(sample, text, CTX).reason == "not_a_choice"
    near, far = (
        nearest.score(sample, text, CTX),
        nearest.score(sample, "<answer>45 °</answer>", CTX),
    )
    assert (near.value, near.parsed, near.metrics) == (
        0,
        False,
        {"correct": 0, "mathvista_rule": 1},
    ), "never a reward"
    assert (
        far.metrics["mathvista_rule"] == 0
        and "mathvista_rule" not in strict.score(sample, text, CTX).metrics
    )
    assert nearest.score(sample, "<answer>A or B</answer>", CTX).metrics["mathvista_rule"] == 0, (
        "hedging is no near miss"
    )
    right, failed = strict.score(sample, "<answer>A</answer>", CTX), strict.score(sample, text, CTX)
    assert strict.summarize([right, failed]) == {
        "mmmu_rule": 0.5,
        "parse_failure_rate": 0.5,
        "truncated_rate": 0.0,
    }
    rows = [near, far, nearest.score(sample, "<answer>A</answer>", CTX)]
    assert nearest.summarize(rows)["mathvista_rule"] == pytest.approx(2 / 3)
    assert nearest.summarize(rows)["mmmu_rule"] == pytest.approx(1 / 3)
    assert strict.summarize([]) == {}


def test_examples_load_and_wrong_parameters_are_refused(tmp_path: Path) -> None:
    task = task_from_spec("choice", {})
    samples = list(task.load(task.example_data(str(tmp_path))))  # type: ignore[arg-type]
    assert len(samples) == 12 and {len(s.params["options"]) for s in samples} == {3, 4, 5, 6}
    assert {s.answer for s in samples} & {"E", "F"} or len({s.answer for s in samples}) > 2
    for params, words in (
        ({"mode": "fuzzy"}, "exact, literal"),
        ({"shuffle_options": "yes"}, "true or false"),
        ({"shufle_options": True}, "Did you mean 'shuffle_options'"),
        ({"preset": "video_r2"}, "video_r1"),
    ):
        with pytest.raises(ConfigError, match=words):
            Choice(**params)


def test_scores_in_threads_equal_scores_in_line() -> None:
    task, texts = (
        Choice(shuffle_options=True),
        [f"<answer>{letter}</answer>" for letter in "ABCDEFG"] * 20,
    )
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda t: task.score(_sample(), t, CTX), texts)) == [
            task.score(_sample(), t, CTX) for t in texts
        ]
