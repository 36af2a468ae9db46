"""Wrappers: the same table around every kind of answer, nothing else removed, linear, total."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmrl.coords import CoordFrame
from mmrl.errors import ConfigError
from mmrl.registry import BUILT_IN, task_from_spec
from mmrl.rewards.reading import LEVELS, check_level, unwrap, unwrap_text
from mmrl.types import ImageSize, RewardContext, Sample
from tests.kits.clock_kit import takes_less

WRAPPERS = [
    "{}",
    "```\n{}\n```",
    "```json\n{}\n```",
    "```python\n{}\n```",
    "\\boxed{{{}}}",
    "${}$",
    "\\({}\\)",
    "'{}'",
    '"{}"',
    "“{}”",
    "`{}`",
    "**{}**",
    "*{}*",
    "Answer: {}",
    "Final answer: {}",
    "**Answer:** {}",
    "答案：{}",
    "{}.",
    "{}!",
    "{},",
    "{};",
    "\u00a0{}\u3000",
    "\ufeff{}",
    "**Answer: \\boxed{{{}}}**.",
    "\\boxed{{\\text{{{}}}}}",
]
SIZE = ImageSize((1000, 1000), (1000, 1000))
CTX = RewardContext(1, 1, CoordFrame.ABS_ORIG, (SIZE,))
KINDS = [  # task, the right answer's text, truth, params of the row
    ("counting", "7", 7, {}),
    ("numeric", "4.5", 4.5, {}),
    ("choice", "B", "B", {"options": ["dog", "cat"]}),
    ("boolean", "yes", True, {}),
    ("grounding", "[10, 20, 300, 400]", [10, 20, 300, 400], {}),
    ("gui_grounding", "[15, 30]", [10, 20, 300, 400], {}),
    (
        "detection",
        "[[10, 20, 300, 400]]",
        [{"bbox": [10, 20, 300, 400], "label": "cat"}],
        {"categories": ["cat"]},
    ),
    (
        "gui_action",
        '{"action": "click", "point": [15, 30]}',
        {"action": "click", "point": [15.0, 30.0]},
        {},
    ),
    ("temporal_grounding", "[[2.5, 7]]", [[2.5, 7.0]], {"duration": 10}),
    (
        "tracking",
        '{"boxes": {"0": [10, 20, 300, 400]}}',
        {"boxes": {"0": [10, 20, 300, 400]}},
        {"duration": 2},
    ),
    (
        "st_grounding",
        '{"time": [0, 2], "boxes": {"0": [10, 20, 300, 400], "1": [10, 20, 300, 400]}}',
        {"time": [0, 2], "boxes": {"0": [10, 20, 300, 400], "1": [10, 20, 300, 400]}},
        {"duration": 2},
    ),
    ("chart", "25", "25", {}),
    ("spatial", "left", "left", {}),
    ("classification", "cat", "cat", {"labels": ["cat", "dog"]}),
    ("jigsaw", "[2, 1]", [2, 1], {"width": 1000, "height": 1000}),
]


@pytest.mark.parametrize("kind", KINDS, ids=[kind[0] for kind in KINDS])
def test_a_wrapper_means_the_same_around_every_kind_of_answer(
    kind: tuple[str, str, object, dict[str, object]],
) -> None:
    name, text, truth, params = kind
    task = task_from_spec(name, {"answer_format": "bare"})
    sample = Sample(
        "1", name, "s", "q", truth, ("a.png",), params={"width": 1000, "height": 1000, **params}
    )
    plain = task.score(sample, text, CTX)
    assert plain.parsed and plain.parts["accuracy"] == pytest.approx(1), plain.reason
    for wrapper in WRAPPERS:
        score = task.score(sample, wrapper.format(text), CTX)
        assert score.parsed and score.parts["accuracy"] == pytest.approx(1), (
            wrapper.format(text),
            score.reason,
        )


@pytest.mark.parametrize(
    "text",
    [
        '"a" or "b"',
        "*a* and *b*",
        "$5",
        "5...",
        "5?",
        "answer",
        "Answer:",
        "```a```\n```b```",
        "\\boxed{1} \\boxed{2}",
        "\\boxed{1",
        "'",
        "``",
        "[1, 2]",
        "The answer may be 5",
    ],
)
def test_what_is_no_wrapper_around_the_whole_stays(text: str) -> None:
    assert unwrap(text) == text


def test_texts_whose_truth_wears_the_wrapper_stay_as_they_are() -> None:
    assert unwrap_text("```\n**Stop!**\n```", ["Stop"]) == "**Stop!**", (
        "quotes, emphasis and marks belong to a text"
    )
    assert unwrap_text("Answer: \\boxed{Stop}", ["Stop"]) == "Stop"
    assert unwrap_text("Answer: Stop", ["Stop", "Answer: 5"]) == "Answer: Stop"


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=60) | st.text("`*_$\"'\\boxed{}.!,: aA\n\u00a0", max_size=60))
def test_unwrapping_is_total_and_only_removes(text: str) -> None:
    inner = unwrap(text)
    assert len(inner) <= len(text) and unwrap(text) == inner
    assert not inner or inner.strip() == inner


@pytest.mark.parametrize(
    "text",
    [
        "*" * 400_000,
        "\\boxed{" * 60_000,
        "`" * 400_000,
        "." * 400_000,
        '"' * 400_000,
        "Answer:" * 60_000,
        "\u3000" * 400_000,
    ],
)
def test_hostile_texts_take_no_time(text: str) -> None:
    takes_less(1, lambda: unwrap(text))


def test_levels_are_named_and_every_task_has_the_parameter() -> None:
    assert [check_level(level) for level in LEVELS] == ["strict", "native", "official"]
    with pytest.raises(
        ConfigError,
        match=r"unknown answers 'natve'; expected one of strict, native, official\. Did you mean",
    ):
        task_from_spec("counting", {"answers": "natve"})
    for name in BUILT_IN:
        if name not in ("mixed", "playground"):
            assert task_from_spec(name, {"answers": "native"}).answers == "native", name  # type: ignore[attr-defined]


def test_only_strict_asks_for_the_envelope() -> None:
    sample = Sample("1", "counting", "s", "q", 7, ("a.png",), params={"width": 10, "height": 10})
    assert task_from_spec("counting", {}).score(sample, "7", CTX).reason == "no_answer"
    native = task_from_spec("counting", {"answers": "native"})
    bare, wrapped = native.score(sample, "7", CTX), native.score(sample, "<answer>7</answer>", CTX)
    assert bare.parts["accuracy"] == 1 == wrapped.parts["accuracy"]
    assert bare.parts["format"] == 0 < wrapped.parts["format"], (
        "the format reward still asks for it"
    )
    for hedge in ("<answer>7</answer><answer>8</answer>", "<think>7", "<answer>7"):
        assert not native.score(sample, hedge, CTX).parsed
