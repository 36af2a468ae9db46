"""Calls of tools in the spellings of released models, beside the parsers that vLLM serves these models with."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mmrl.tasks.tool_calls import BadCall, ToolCall, read_call, read_calls
from mmrl.tasks.visual_tools import function
from tests.kits.engine_kit import tiny_folder

TOOLS = [
    function("zoom", "Look closer.", {"bbox_2d": {"type": "array"}, "label": {"type": "string"}}),
    function(
        "press",
        "Press a key.",
        {
            "key": {"type": "string"},
            "times": {"type": "integer"},
            "hold": {"type": "boolean"},
            "seconds": {"type": "number"},
            "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "where": {"type": "object"},
        },
    ),
]
ARGUMENTS: list[dict[str, Any]] = [
    {"bbox_2d": [10, 20, 60, 70], "label": "12"},
    {"label": "a dog's\n  ear"},
    {"key": "1", "times": 3, "hold": True, "seconds": 0.5},
    {"key": "true", "hold": False, "where": {"x": [1, 2], "é": "ü"}},
    {},
]


def qwen(name: str, arguments: dict[str, Any]) -> str:
    """As Qwen3.5's template writes it."""
    lines = [
        f"<parameter={k}>\n{v if isinstance(v, str) else json.dumps(v, ensure_ascii=False)}\n</parameter>\n"
        for k, v in arguments.items()
    ]
    return f"<tool_call>\n<function={name}>\n{''.join(lines)}</function>\n</tool_call>"


def glm(name: str, arguments: dict[str, Any]) -> str:
    """As GLM-4.5V's template writes it."""
    lines = [
        f"<arg_key>{k}</arg_key>\n<arg_value>{v if isinstance(v, str) else json.dumps(v, ensure_ascii=False)}</arg_value>\n"
        for k, v in arguments.items()
    ]
    return f"<tool_call>{name}\n{''.join(lines)}</tool_call>"


def hermes(name: str, arguments: dict[str, Any]) -> str:
    """As the templates of Qwen2.5 and Qwen3 write it."""
    call = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{call}\n</tool_call>"


SPELLINGS = {"qwen3_coder": qwen, "glm45": glm, "hermes": hermes}


def named(arguments: dict[str, Any]) -> str:
    return "zoom" if {"bbox_2d", "label"} & {*arguments} else "press"


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("arguments", ARGUMENTS, ids=str)
def test_a_call_is_read_in_every_spelling(spelling: str, arguments: dict[str, Any]) -> None:
    name = named(arguments)
    text = SPELLINGS[spelling](name, arguments)
    assert read_call(f"I look.\n{text}", TOOLS) == ToolCall(name, arguments)
    before, calls = read_calls(f"<think>{text}</think>I look.\n{text}{text}", TOOLS)
    assert before.endswith("I look.\n") and calls == [ToolCall(name, arguments)] * 2
    with pytest.raises(BadCall, match="expected one tool call in a turn, found 2"):
        read_call(text + text, TOOLS)


@pytest.mark.slow
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_vllms_parser_of_the_model_reads_the_same(spelling: str) -> None:
    from transformers import AutoTokenizer
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.tool_parsers import ToolParserManager

    request = ChatCompletionRequest(
        model="m", messages=[{"role": "user", "content": "?"}], tools=TOOLS, tool_choice="auto"
    )
    tokenizer = AutoTokenizer.from_pretrained(tiny_folder("qwen2_5_vl"))
    make = ToolParserManager.get_tool_parser(spelling)
    for arguments in ARGUMENTS:
        for repeated in (1, 2):
            text = "I look.\n" + SPELLINGS[spelling](named(arguments), arguments) * repeated
            theirs = make(tokenizer, request.tools).extract_tool_calls(text, request)
            _, ours = read_calls(text, TOOLS)
            assert [(c.name, c.arguments) for c in ours] == [
                (c.function.name, json.loads(c.function.arguments)) for c in theirs.tool_calls
            ]
            assert len(ours) == repeated


def test_without_a_schema_what_reads_as_json_is_a_value() -> None:
    told = {"a": "12", "b": "x y", "c": "None"}
    assert read_call(qwen("f", told)) == ToolCall("f", {"a": 12, "b": "x y", "c": None})
    note = "<function=press>\n<parameter=note>\n{}\n</parameter>\n</function>"
    for said, value in (("12", "12"), ("null", None), ("None", None), ("", "")):
        assert read_call(note.replace("{}", said), TOOLS) == ToolCall("press", {"note": value})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<tool_call></tool_call>", "as JSON"),
        ("<tool_call>{'name': 1}</tool_call>", "as JSON"),
        ('<tool_call>{"name": "f", "arguments": []}</tool_call>', "as JSON"),
        ("<tool_call>zoom in please</tool_call>", "as JSON"),
        ("<tool_call>\n<function=></function></tool_call>", "one function with its parameters"),
        (
            "<tool_call><function=f>hello</function></tool_call>",
            "parameters alone in the call of f",
        ),
        (
            "<function=f><parameter=a>1</parameter></function> <function=g></function>",
            "one tool call",
        ),
        (
            "<function=f><parameter=a>1</parameter><parameter=a>2</parameter></function>",
            "a once in",
        ),
        ("<function=f><parameter=a>1</function>", "parameters alone"),
        ("<tool_call>f<arg_key>a</arg_key></tool_call>", "parameters alone"),
        (
            "<tool_call><function=f></function><function=g></function></tool_call>",
            "one function|parameters alone",
        ),
        ("<tool_call>" + "<function=f>" * 2000, "as JSON"),
    ],
)
def test_what_is_broken_is_said(text: str, expected: str) -> None:
    with pytest.raises(BadCall, match=expected):
        read_call(text, TOOLS)
