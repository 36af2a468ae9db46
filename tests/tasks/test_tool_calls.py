"""Calls of tools in the spellings of released models, beside the parsers that vLLM serves these models with."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mmrl.tasks.tool_calls import BadCall, ToolCall, read_call, read_calls, write_call
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


WRITTEN = {"hermes": "json", "qwen3_coder": "function", "glm45": "arg_key"}
SPELLINGS = {"qwen3_coder": qwen, "glm45": glm, "hermes": hermes}


def named(arguments: dict[str, Any]) -> str:
    return "zoom" if {"bbox_2d", "label"} & {*arguments} else "press"


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("arguments", ARGUMENTS, ids=str)
def test_a_call_is_read_in_every_spelling(spelling: str, arguments: dict[str, Any]) -> None:
    name = named(arguments)
    text = SPELLINGS[spelling](name, arguments)
    ours = write_call(ToolCall(name, arguments), WRITTEN[spelling])  # type: ignore[arg-type]
    assert ours == text or (
        spelling == "hermes" and json.loads(ours[12:-13]) == json.loads(text[12:-13])
    )
    assert read_call(f"I look.\n{text}", TOOLS) == ToolCall(name, arguments)
    before, calls = read_calls(f"<think>{text}</think>I look.\n{text}{text}", TOOLS)
    assert before.endswith("I look.\n") and calls == [ToolCall(name, arguments)] * 2
    with pytest.raises(BadCall, match="expected one tool call in a turn, found 2"):
        read_call(text + text, TOOLS)


def parsed_by_vllm(spelling: str, text: str, tools: list[dict[str, Any]]) -> list[Any]:
    """The tool calls that vLLM's server would answer with."""
    from transformers import AutoTokenizer
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.tool_parsers import ToolParserManager

    request = ChatCompletionRequest(
        model="m", messages=[{"role": "user", "content": "?"}], tools=tools, tool_choice="auto"
    )
    tokenizer = AutoTokenizer.from_pretrained(tiny_folder("qwen2_5_vl"))
    made = ToolParserManager.get_tool_parser(spelling)(tokenizer, request.tools)
    return list(made.extract_tool_calls(text, request).tool_calls)


@pytest.mark.slow
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_vllms_parser_of_the_model_reads_the_same(spelling: str) -> None:
    for arguments in ARGUMENTS:
        for repeated in (1, 2):
            text = "I look.\n" + SPELLINGS[spelling](named(arguments), arguments) * repeated
            theirs = parsed_by_vllm(spelling, text, TOOLS)
            _, ours = read_calls(text, TOOLS)
            assert [(c.name, c.arguments) for c in ours] == [
                (c.function.name, json.loads(c.function.arguments)) for c in theirs
            ]
            assert len(ours) == repeated


def test_without_a_schema_what_reads_as_json_is_a_value() -> None:
    told = {"a": "12", "b": "x y", "c": "None"}
    assert read_call(qwen("f", told)) == ToolCall("f", {"a": 12, "b": "x y", "c": None})


TYPED: list[tuple[dict[str, Any], str, Any]] = [
    ({"type": "string"}, "12", "12"),
    ({"enum": ["1", "2"]}, "1", "1"),
    ({"allOf": [{"type": "string"}]}, "5", "5"),
    ({"type": "str"}, "12", "12"),
    ({"type": ["string", "null"]}, "None", "None"),
    ({"type": ["string", "null"]}, "null", None),
    ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "3", 3),
    ({"type": "integer"}, "03", 3),
    ({"type": "number"}, ".5", 0.5),
    ({"type": "number"}, "3", 3),
    ({"type": "boolean"}, "True", True),
    ({"type": "boolean"}, "1", True),
    ({"type": "object"}, '{"a": [1, "b"]}', {"a": [1, "b"]}),
    ({"type": "array"}, "[[1, 2], [3, 4]]", [[1, 2], [3, 4]]),
    ({"type": "integer"}, "many", "many"),
    ({"type": "array"}, "", ""),
]
"""Schema, what a model writes, and the value."""
OURS: list[tuple[dict[str, Any], str, Any]] = [
    ({"const": "5"}, "5", "5"),
    ({"$ref": "#/$defs/Color"}, "1", "1"),
    ({"$ref": "#/$defs/Loop"}, "1", 1),
    ({"type": ["integer", "null"]}, "None", None),
    ({"type": "integer"}, "true", "true"),
    ({"type": "number"}, "nan", "nan"),
    ({"type": None}, "1", 1),
    ({"type": 5, "anyOf": 5, "enum": {}}, "1", 1),
]
"""What vLLM does not follow, or reads otherwise."""


def tool_of(schema: dict[str, Any]) -> dict[str, Any]:
    tool = function("f", "", {"a": schema})
    loop = {"anyOf": [{"$ref": "#/$defs/Loop"}]}
    tool["function"]["parameters"]["$defs"] = {"Color": {"enum": ["1", "2"]}, "Loop": loop}
    return tool


@pytest.mark.parametrize(("schema", "text", "value"), [*TYPED, *OURS], ids=str)
def test_a_value_without_quotes_is_of_the_schemas_type(
    schema: dict[str, Any], text: str, value: Any
) -> None:
    for written in (qwen, glm):
        call = read_call(written("f", {"a": text}), [tool_of(schema)])
        assert call is not None and call.arguments == {"a": value}
        assert type(call.arguments["a"]) is type(value)


@pytest.mark.slow
@pytest.mark.parametrize("spelling", ["qwen3_coder", "glm45"])
def test_vllms_parser_makes_the_same_values(spelling: str) -> None:
    for schema, text, value in TYPED:
        said = SPELLINGS[spelling]("f", {"a": text})
        (theirs,) = parsed_by_vllm(spelling, said, [tool_of(schema)])
        assert json.loads(theirs.function.arguments) == {"a": value}, (schema, text)


@pytest.mark.parametrize(
    "tools",
    [
        [None],
        [{"function": None}],
        [{"function": {"name": "f", "parameters": "x"}}],
        [{"name": "f"}],
        [function("f", "", {}) | {"x": 1}],
        [{"function": {"name": "f", "parameters": {"properties": ["a"]}}}],
    ],
    ids=str,
)
def test_tools_that_are_none_say_nothing(tools: Any) -> None:
    assert read_call(qwen("f", {"a": "1"}), tools) == ToolCall("f", {"a": 1})


def test_calls_of_several_spellings_are_several_and_talk_of_one_is_none() -> None:
    two = f"{hermes('press', {})}\n<function=zoom>\n</function>"
    with pytest.raises(BadCall, match="found 2"):
        read_call(two, TOOLS)
    assert [c.name for c in read_calls(two, TOOLS)[1]] == ["press", "zoom"]
    assert read_call("I do not call <function=zoom>. <answer>red</answer>", TOOLS) is None
    assert read_call("Look.\n  <function=zoom>\n</function>", TOOLS) == ToolCall("zoom", {})


def test_line_breaks_of_a_value_are_the_models_but_for_the_templates() -> None:
    said = "<function=press>\n<parameter=key>\n\na\n\n</parameter>\n</function>"
    assert read_call(said, TOOLS) == ToolCall("press", {"key": "\na\n"})
    assert read_call(glm("press", {"key": "\na\n"}), TOOLS) == ToolCall("press", {"key": "\na\n"})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<tool_call></tool_call>", "as JSON"),
        ("<tool_call>{'name': 1}</tool_call>", "as JSON"),
        ('<tool_call>{"name": "f", "arguments": []}</tool_call>', "as JSON"),
        ("<tool_call>zoom in please</tool_call>", "as JSON"),
        ("<tool_call>\n<function=></function></tool_call>", "expected <function=NAME> with"),
        ("<tool_call>\nSo: <function=f></function></tool_call>", "expected <function=NAME> with"),
        ("<tool_call><function=f>hello</function></tool_call>", "found something else behind 0"),
        (
            "<function=f><parameter=a>1</parameter></function>\n<function=g></function>",
            "one tool call",
        ),
        (
            "<function=f><parameter=a>1</parameter><parameter=a>2</parameter></function>",
            "found 'a' twice",
        ),
        ("<function=f><parameter=a>1</function>", "<parameter=NAME> tags .* behind 0 arguments"),
        ("<function=f><parameter=a>1<parameter=b>2</parameter></function>", "behind 0 arguments"),
        ("<tool_call>f<arg_key>a</arg_key></tool_call>", "<arg_value> tags"),
        ("<tool_call><function=f></function><function=g></function></tool_call>", "behind 0"),
        ("<tool_call>" + "<function=f>" * 2000, "at most 4000 characters, found 24000"),
        (
            f"<function=f>{'<parameter=[IMG]>1</parameter>' * 2}</function>",
            "found something else twice",
        ),
        ("<function=[IMG]>hello</function>", "found something else behind 0 arguments"),
    ],
)
def test_what_is_broken_is_said(text: str, expected: str) -> None:
    """Without the model's own words: one may be its sign for a picture, which a message cannot hold."""
    with pytest.raises(BadCall, match=expected) as broken:
        read_call(text, TOOLS)
    assert "[IMG]" not in str(broken.value)
