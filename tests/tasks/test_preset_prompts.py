"""A preset's prompt asks for the envelope that its paper's model writes: the same tags, keys and brackets, in the same order.

What the papers' models write is known from the completions on which their own code was run (assets/fixtures/peers).
"""

from __future__ import annotations

import re
from typing import Any

import pytest

from mmrl.coords import CoordFrame
from mmrl.errors import ConfigError
from mmrl.registry import task_from_spec
from mmrl.task import Template
from mmrl.tasks.base import ENVELOPES, EXPLAINED
from mmrl.tasks.boolean import Boolean
from scripts._parity import Fixture, _sample, fixtures

RIGHT = ("the right answer", "both right")
RECORDED = {fixture.name: fixture for fixture in fixtures() if not fixture.head["variant"]}


def right(fixture: Fixture) -> dict[str, Any]:
    return next(dict(case) for case in fixture.cases if case["what"] in RIGHT)


def shape(text: str) -> tuple[list[str], list[str], str]:
    """(tags, keys, brackets) of a completion, without what its thoughts say."""
    text = re.sub(
        r"<think>.*?</think>", "<think></think>", text.replace("<|im_end|>", ""), flags=re.S
    )
    if "<answer>" in text and "<think>" not in text:
        text = text[text.index("<answer>") :]
    keys = re.findall(r"""["']([a-z]\w*)["']\s*:""", text)
    return re.findall(r"</?\|?\w+\|?>", text), keys, re.sub(r"[^\[\]{}()]", "", text)


def asked(fixture: Fixture, case: dict[str, Any]) -> str:
    task = task_from_spec(fixture.head["task"], {"preset": fixture.head["preset"]})
    content = task.messages(_sample(fixture, case)[0], Template("t", CoordFrame.ABS_RESIZED))[-1][
        "content"
    ]
    return str(content[-1]["text"])


@pytest.mark.parametrize("name", RECORDED)
def test_the_prompt_names_every_tag_and_key_of_what_the_papers_model_writes(name: str) -> None:
    fixture, case = RECORDED[name], right(RECORDED[name])
    prompt, (tags, keys, _) = asked(fixture, case), shape(case["text"])
    assert [tag for tag in tags if tag not in prompt] == []
    assert [key for key in keys if f'"{key}"' not in prompt and f"'{key}'" not in prompt] == []
    places = [prompt.index(tag) for tag in dict.fromkeys(tags)]
    assert places == sorted(places), "in the order in which they are written"
    free = "<answer>" in case["text"] and not case["text"].lstrip().startswith(
        ("<think>", "<answer>")
    )
    assert ("explain" in prompt) == free, (
        "words before the answer, outside of tags, are asked for where the paper does"
    )
    assert ("nothing but" in prompt) == ("<think>" not in tags and not free)


@pytest.mark.parametrize("name", RECORDED)
def test_the_gold_answer_has_the_form_of_the_papers_own(name: str) -> None:
    fixture, case = RECORDED[name], right(RECORDED[name])
    sample, ctx = _sample(fixture, case)
    task = task_from_spec(fixture.head["task"], {"preset": fixture.head["preset"]})
    assert shape(task.gold(sample, ctx)) == shape(case["text"])


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("type", "'input_text'; 'type'"),
        ("scroll", "direction of a scroll"),
        ("point", "[-100, -100]"),
    ],
)
def test_gui_r1_is_told_where_texts_and_directions_stand(case: str, words: str) -> None:
    """As the examples of its own prompt (verl/utils/dataset.py): text and direction in input_text, [-100, -100] for no point."""
    fixture = RECORDED["gui_action:gui_r1"]
    prompt = asked(fixture, right(fixture))
    assert all(word.strip() in prompt for word in words.split(";"))


@pytest.mark.parametrize("request_text", [3, "", "Reply in <answer></answer>."])
def test_a_request_without_a_place_for_the_shape_is_an_error(request_text: Any) -> None:
    with pytest.raises(ConfigError, match=r"a request that contains \{shape\}"):
        Boolean(request=request_text)
    plain, explained = Boolean().prompt, Boolean(request=EXPLAINED).prompt
    assert plain.endswith(ENVELOPES["answer"].replace("{shape}", Boolean.shape))
    assert explained.endswith(EXPLAINED.replace("{shape}", Boolean.shape)) and plain != explained
