r"""Tool calls as chat templates of released models ask for them -> a name and its arguments.

<tool_call>{"name": "zoom", "arguments": {"bbox_2d": [10, 20, 60, 70]}}</tool_call>        Qwen2.5, Qwen3, InternVL 3.5

<tool_call>                             Qwen3.5 (and Qwen3-Coder), MiniCPM-V 4.6: each argument as it is, without quotes
<function=zoom>
<parameter=bbox_2d>
[10, 20, 60, 70]
</parameter>
</function>
</tool_call>

<tool_call>zoom                         GLM-4.5V
<arg_key>bbox_2d</arg_key>
<arg_value>[10, 20, 60, 70]</arg_value>
</tool_call>

    call = read_call(text, tools)          # ToolCall("zoom", {"bbox_2d": [10, 20, 60, 70]}); None without one

Arguments without quotes are of the types that the tools' schemas say: 12 is a text where a text is wanted. What a model wrote is
data: anything broken is a BadCall, whose text says what was expected.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mmrl.rewards.parsing import load_json

__all__ = ["BadCall", "ToolCall", "read_call", "read_calls"]

_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|$)", re.DOTALL)
# Qwen3.5 sometimes leaves the tags around it out
_BARE = re.compile(r"(<function=.*?(?:</function>|$))", re.DOTALL)
_FUNCTION = re.compile(r"<function=([^<>]{1,200})>(.*?)(?:</function>\s*|$)", re.DOTALL)
_PARAMETER = re.compile(r"\s*<parameter=([^<>]{1,200})>(.*?)</parameter>\s*", re.DOTALL)
_GLM = re.compile(r"([^\s<>{}]{1,200})\s*((?:<arg_key>.*)?)", re.DOTALL)
_GLM_PAIR = re.compile(
    r"\s*<arg_key>([^<>]{1,200})</arg_key>\s*<arg_value>(.*?)</arg_value>\s*", re.DOTALL
)
_MOST_CHARS = 4_000
_PYTHON = {"True": True, "False": False, "None": None}  # templates write earlier calls' values so
_TYPES: dict[str, type | tuple[type, ...]] = {
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "array": list,
    "object": dict,
    "null": type(None),
}


class BadCall(ValueError):
    """A call that cannot be followed; the text says why, for the policy."""


@dataclass(frozen=True)
class ToolCall:
    """A tool's name and arguments as the model wrote them."""

    name: str
    arguments: Mapping[str, Any]


def read_call(text: str, tools: Sequence[Mapping[str, Any]] = ()) -> ToolCall | None:
    """The one tool call of a turn, None where there is none; thoughts do not count. `tools`: those that were offered, as
    `apply_chat_template(tools=...)` takes them. Raises BadCall for several or a broken one."""
    _, found = _written(text.rpartition("</think>")[2])
    if len(found) > 1:
        raise BadCall(f"expected one tool call in a turn, found {len(found)}")
    return _call(found[0], tools) if found else None


def read_calls(text: str, tools: Sequence[Mapping[str, Any]] = ()) -> tuple[str, list[ToolCall]]:
    """What a turn says before its tool calls, and the calls in order; thoughts do not count. Raises BadCall where one of them is
    broken."""
    thoughts, mark, said = text.rpartition("</think>")
    before, found = _written(said)
    return f"{thoughts}{mark}{before}", [_call(one, tools) for one in found]


def _written(said: str) -> tuple[str, list[str]]:
    """The text before the first call, and what stands within the calls' tags."""
    pattern = _CALL if "<tool_call>" in said else _BARE
    first = pattern.search(said)
    return (said, []) if first is None else (said[: first.start()], pattern.findall(said))


def _call(found: str, tools: Sequence[Mapping[str, Any]]) -> ToolCall:
    """A call of what stands within its tags. Raises BadCall."""
    text = found.strip() if len(found) <= _MOST_CHARS else ""
    if text.startswith("<function="):
        return _from_tags(_FUNCTION.fullmatch(text), _PARAMETER, tools)
    if text.startswith("{") or not (named := _GLM.fullmatch(text)):
        return _from_json(text)
    return _from_tags(named, _GLM_PAIR, tools)


def _from_json(text: str) -> ToolCall:
    try:
        value = load_json(text)
    except (ValueError, RecursionError):
        value = None
    if (
        not isinstance(value, dict)
        or not isinstance(value.get("name"), str)
        or not isinstance(value.get("arguments"), dict)
    ):
        raise BadCall('expected {"name": ..., "arguments": {...}} as JSON in the tool call')
    return ToolCall(value["name"], value["arguments"])


def _from_tags(
    named: re.Match[str] | None, pair: re.Pattern[str], tools: Sequence[Mapping[str, Any]]
) -> ToolCall:
    """A call of a name and the tags of its arguments, between which nothing else stands. Raises BadCall."""
    if named is None:
        raise BadCall("expected one function with its parameters in the tool call")
    name, rest = named[1].strip(), named[2]
    schemas = _schemas(name, tools)
    arguments: dict[str, Any] = {}
    place = 0
    while place < len(rest.rstrip()):
        found = pair.match(rest, place)
        if found is None:
            raise BadCall(f"expected parameters alone in the call of {name[:40]}")
        key = found[1].strip()
        if key in arguments:
            raise BadCall(f"expected {key[:40]} once in the call of {name[:40]}")
        arguments[key] = _typed(found[2], schemas.get(key))
        place = found.end()
    return ToolCall(name, arguments)


def _schemas(name: str, tools: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The schemas of a tool's arguments by their names."""
    for tool in tools:
        function = tool.get("function", tool)
        if function.get("name") == name:
            return dict((function.get("parameters") or {}).get("properties") or {})
    return {}


def _kinds(schema: Any) -> set[str]:
    """The types that a schema allows, none where it does not say."""
    if not isinstance(schema, Mapping):
        return set()
    said = schema.get("type", [])
    found = {said} if isinstance(said, str) else {k for k in said if isinstance(k, str)}
    for key in ("anyOf", "oneOf"):
        found |= {kind for part in schema.get(key) or () for kind in _kinds(part)}
    return found


def _typed(text: str, schema: Any) -> Any:
    """An argument without quotes as a value of a type that its schema allows; where none fits, the text, which the tool refuses.
    One line break at either end is the tags'."""
    text = text.removeprefix("\n").removesuffix("\n")
    kinds = _kinds(schema)
    if kinds == {"string"}:
        return text
    try:
        value = _PYTHON.get(text.strip(), ...)
        value = load_json(text.strip()) if value is ... else value
    except (ValueError, RecursionError):
        return text
    if not kinds:
        return value
    fits = any(
        isinstance(value, _TYPES.get(kind, object))
        and (kind == "boolean") == isinstance(value, bool)
        for kind in kinds
    )
    return value if fits or "string" not in kinds else text
