"""Format rules: the papers' own examples of right and wrong form, unread answers, pickles, and no text that breaks or slows one."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmrl.coords import CoordFrame
from mmrl.errors import ConfigError
from mmrl.registry import BUILT_IN, resolve_task, task_from_spec
from mmrl.rewards.format_rules import FORMAT_RULES, PAYS_UNREAD, make_format_rule
from mmrl.types import ImageSize, RewardContext, Sample
from tests.kits.clock_kit import takes_less

LINES = "<think>\nhm\n</think>\n<answer>\n{}\n</answer>"
THINK = "<think>hm</think> <answer>{}</answer>"
CASES = [
    ("v_triune_tags", "", LINES.format("x"), 1.0),
    ("v_triune_tags", "", THINK.format("x"), 0.0),
    ("v_triune_tags", "", LINES.format("x").replace("<think>\n", ""), 0.75),
    ("v_triune_boxes", "", LINES.format("[{'bbox_2d': [1, 2, 3, 4], 'label': 'dog'}]"), 1.0),
    ("v_triune_boxes", "", LINES.format("[{'bbox_2d': [3, 2, 1, 4], 'label': 'dog'}]"), 0.0),
    ("v_triune_boxes", "", LINES.format("a dog"), 0.0),
    ("vlm_r1_rec", "", THINK.format('```json\n{"bbox_2d": [1, 2, 3, 4]}\n```'), 1.0),
    ("videochat_r1_boxes", "", THINK.format("[[0.1, 0.2, 0.3, 0.4]]"), 1.0),
    ("videochat_r1_boxes", "", THINK.format("[0.1]"), 0.0),
    ("vlm_r1_rec", "", THINK.format("[1, 2, 3, 4]"), 0.0),
    (
        "perception_r1",
        "",
        "<|object_ref_start|>the dog<|object_ref_end|><|box_start|>(1,2),(3,4)<|box_end|><|im_end|>",
        1.0,
    ),
    ("perception_r1", "", "<garbage", 0.0),
    ("perception_r1_counting", "", "[]", 1.0),
    ("perception_r1_counting", "", "", 0.0),
    (
        "perception_r1_counting",
        "",
        "<|object_ref_start|>cat<|object_ref_end|><|box_start|>(1,2),(3,4)<|box_end|><|im_end|>",
        1.0,
    ),
    (
        "perception_r1_counting",
        "",
        "<|object_ref_start|>cat<|object_ref_end|>" + "<|box_start|>(1,2),(3,4)<|box_end|>" * 3,
        1.0,
    ),
    (
        "perception_r1_counting",
        "",
        "<|object_ref_start|>cat<|object_ref_end|><|box_start|>(1,2),(3,4)<|box_end|>" * 2,
        0.0,
    ),
    ("temporal_r1", "", THINK.format('{"start_time": "1.5", "end_time": "3"}'), 1.0),
    ("temporal_r1", "", THINK.format('{"start_time": 1.5, "end_time": 3}'), 0.0),
    (
        "gui_r1",
        "",
        THINK.format("[{'action': 'click', 'point': [1, 2], 'input_text': 'no input text'}]"),
        1.0,
    ),
    (
        "gui_r1",
        "",
        THINK.format("[{'action': 'type', 'point': [1, 2], 'input_text': 'no input text'}]"),
        0.0,
    ),
    (
        "gui_r1",
        "",
        THINK.format("[{'action': 'click', 'point': [1.5, 2], 'input_text': 'no input text'}]"),
        0.0,
    ),
    (
        "r1_sgg",
        "",
        THINK.format('{"objects": [{"id": "a.1", "bbox": [1, 2, 3, 4]}], "relationships": []}'),
        1.0,
    ),
    (
        "r1_sgg",
        "",
        THINK.format(
            '{"objects": [], "relationships": [{"subject": "a", "predicate": "on", "object": "b"}]}'
        ),
        0.0,
    ),
    ("videochat_r1_glue", "", "<think>x</think><answer>A</answer><glue>[(5.2, 10.4)]</glue>", 1.0),
    ("videochat_r1_glue", "", "<think>x</think><answer>A</answer><glue>[(10.4, 5.2)]</glue>", 0.0),
    ("easyvideo_r1", "choice", "I see it. <answer>B</answer>", 1.0),
    ("easyvideo_r1", "choice", "<answer>the red one</answer>", 0.5),
    ("easyvideo_r1", "choice", "B", 0.0),
    ("easyvideo_r1", "numeric", "<answer>about seven</answer>", 1.0),
    ("easyvideo_r1_unified", "numeric", "<answer>about 7</answer>", 0.5),
    ("easyvideo_r1_unified", "boolean", "<answer>Yes</answer>", 1.0),
    ("easyvideo_r1_unified", "boolean", "<answer>Yes, it is</answer>", 0.5),
    ("easyvideo_r1", "grounding", '<answer>{"boxes": [1, 2, 3, 4]}</answer>', 1.0),
    ("easyvideo_r1", "grounding", "<answer>[1, 2, 3, 4]</answer>", 0.5),
    ("tags", "", THINK.format("anything"), 1.0),
]


@pytest.mark.parametrize(("rule", "kind", "text", "value"), CASES)
def test_the_papers_examples(rule: str, kind: str, text: str, value: float) -> None:
    assert make_format_rule(rule, "think", kind)(text) == value


def test_each_rule_has_cases_and_unknown_ones_are_refused() -> None:
    assert set(FORMAT_RULES) - {"envelope", "gui_g2"} <= {rule for rule, *_ in CASES}
    with pytest.raises(ConfigError, match=r"Did you mean 'easyvideo_r1'"):
        make_format_rule("easyvideo_r")
    with pytest.raises(ConfigError, match=r"expected grounding\.frame as one of"):
        task_from_spec("grounding", {"frame": "rel100"})


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=80) | st.text(alphabet='<>/answerthik[]{}",:0123 \n', max_size=120))
def test_any_text_has_a_value(text: str) -> None:
    for rule in FORMAT_RULES:
        for kind in ("choice", "numeric", "grounding", ""):
            for body in (text, LINES.format(text), THINK.format(text)):
                assert 0 <= make_format_rule(rule, "think", kind)(body) <= 1


@pytest.mark.parametrize(
    "piece",
    ["<answer>", "</answer>", "<think>", "\n<answer>\n", "[1, ", "{[", "[11111", "A ", "<glue>"],
)
def test_rules_are_linear_in_the_length(piece: str) -> None:
    text = THINK.format(piece * 3000)
    # quadratic rules take minutes
    takes_less(
        2.0, lambda: [make_format_rule(rule, "think", "choice")(text) for rule in FORMAT_RULES]
    )


def test_the_form_of_an_unreadable_answer_is_paid_where_the_paper_pays_it() -> None:
    ctx = RewardContext(1, 1, CoordFrame.ABS_ORIG, (ImageSize((100, 100), (100, 100)),))
    row = Sample("1", "grounding", "s", "dog", [10.0, 10.0, 50.0, 50.0], ("a.png",))
    task = pickle.loads(pickle.dumps(task_from_spec("grounding", {"preset": "easyvideo_r1"})))
    paid = task.score(row, "<answer>no</answer>", ctx)
    assert (paid.value, paid.parsed, dict(paid.parts)) == (
        0.05,
        False,
        {"accuracy": 0.0, "format": 0.5},
    )
    assert task_from_spec("grounding").score(row, "<answer>no</answer>", ctx).value == 0


def test_a_frame_of_the_task_goes_over_the_models() -> None:
    ctx = RewardContext(1, 1, CoordFrame.ABS_ORIG, (ImageSize((200, 100), (200, 100)),))
    row = Sample("1", "grounding", "s", "dog", [20.0, 10.0, 100.0, 50.0], ("a.png",))
    task = task_from_spec("grounding", {"frame": "rel1000"})
    assert task.score(row, "<answer>[100, 100, 500, 500]</answer>", ctx).parts["accuracy"] == 1
    assert task.gold(row, ctx) == "<answer>[100, 100, 500, 500]</answer>"


def test_presets_name_rules_that_exist_and_most_pay_the_form_apart() -> None:
    presets = [
        preset
        for task in BUILT_IN
        for preset in getattr(resolve_task(task), "presets", {}).values()
    ]
    named = [preset["format_rule"] for preset in presets if "format_rule" in preset]
    assert len(named) > 25 and set(named) <= PAYS_UNREAD
