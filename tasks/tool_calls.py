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

Arguments without quotes are of the types that the tools' schemas say: 12 is a text where a text is wanted, and a number where no
schema says anything. What a model wrote is data: anything broken is a BadCall, whose text says what was expected and what was found
without the model's words, which may be its own signs for pictures, but for plain names.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mmrl.rewards.parsing import load_json
from mmrl.task import CallSpelling

__all__ = ["BadCall", "ToolCall", "plain_name", "read_call", "read_calls", "write_call"]

# Qwen3.5 sometimes leaves the tags around a function out; within a line it is only spoken of
_CALL = re.compile(
    r"<tool_call>(?P<tagged>.*?)(?:</tool_call>|\Z)|^[ \t]*(?P<bare><function=.*?(?:</function>|\Z))",
    re.DOTALL | re.MULTILINE,
)
_FUNCTION = re.compile(r"<function=([^<>]{1,200})>(.*?)(?:</function>\s*|\Z)", re.DOTALL)
# one line break at either end of a value is the template's
_PARAMETER = re.compile(
    r"\s*<parameter=([^<>]{1,200})>\n?((?:(?!<parameter=).)*?)\n?</parameter>\s*", re.DOTALL
)
_GLM = re.compile(r"([^\s<>{}]{1,200})\s*((?:<arg_key>.*)?)", re.DOTALL)
_GLM_PAIR = re.compile(
    r"\s*<arg_key>([^<>]{1,200})</arg_key>\s*<arg_value>((?:(?!<arg_key>).)*?)</arg_value>\s*",
    re.DOTALL,
)
_MOST_CHARS = 4_000


class BadCall(ValueError):
    """A call that cannot be followed; the text says why, for the policy."""


@dataclass(frozen=True)
class ToolCall:
    """A tool's name and arguments as the model wrote them."""

    name: str
    arguments: Mapping[str, Any]


def plain_name(text: str) -> str:
    """A word of the model for a message to it: as it is where it is a name, which no model's sign for a picture is."""
    return repr(text) if re.fullmatch(r"[\w.-]{1,40}", text) else "something else"


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


def write_call(call: ToolCall, spelling: CallSpelling = "json") -> str:
    """A call as a model writes it whose chat template asks for this spelling (Template.calls)."""
    if spelling == "json":
        said = json.dumps({"name": call.name, "arguments": dict(call.arguments)})
        return f"<tool_call>\n{said}\n</tool_call>"
    told = {
        key: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        for key, value in call.arguments.items()
    }
    if spelling == "function":
        lines = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in told.items())
        return f"<tool_call>\n<function={call.name}>\n{lines}</function>\n</tool_call>"
    lines = "".join(
        f"<arg_key>{k}</arg_key>\n<arg_value>{v}</arg_value>\n" for k, v in told.items()
    )
    return f"<tool_call>{call.name}\n{lines}</tool_call>"


def _written(said: str) -> tuple[str, list[str]]:
    """The text before the first call, and what the calls say."""
    found = list(_CALL.finditer(said))
    before = said[: found[0].start()] if found else said
    return before, [match["tagged"] if match["bare"] is None else match["bare"] for match in found]


def _call(found: str, tools: Sequence[Mapping[str, Any]]) -> ToolCall:
    """A call of what it says. Raises BadCall."""
    if len(found) > _MOST_CHARS:
        raise BadCall(
            f"expected a tool call of at most {_MOST_CHARS} characters, found {len(found)}"
        )
    text = found.strip()
    if text.startswith("{"):
        return _from_json(text)
    if "<function=" in text:
        named = _FUNCTION.fullmatch(text)
        return _from_tags(named, _PARAMETER, tools, "<function=NAME> with <parameter=NAME> tags")
    if named := _GLM.fullmatch(text):
        return _from_tags(named, _GLM_PAIR, tools, "a name with <arg_key> and <arg_value> tags")
    return _from_json(text)


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
    named: re.Match[str] | None,
    pair: re.Pattern[str],
    tools: Sequence[Mapping[str, Any]],
    form: str,
) -> ToolCall:
    """A call of a name and the tags of its arguments, between which nothing else stands. Raises BadCall."""
    if named is None:
        raise BadCall(f"expected {form} in the tool call, found something else")
    name, rest = named[1].strip(), named[2].rstrip()
    schemas, root = _schemas(name, tools)
    arguments: dict[str, Any] = {}
    place = 0
    while place < len(rest):
        found = pair.match(rest, place)
        if found is None:
            raise BadCall(
                f"expected {form} in the tool call, found something else behind {len(arguments)} arguments"
            )
        key = found[1].strip()
        if key in arguments:
            raise BadCall(
                f"expected each argument once in the tool call, found {plain_name(key)} twice"
            )
        arguments[key] = _typed(found[2], _kinds(schemas.get(key), root))
        place = found.end()
    return ToolCall(name, arguments)


# schemas, which may be a stranger's: whatever is no schema says nothing


def _table(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _schemas(
    name: str, tools: Sequence[Mapping[str, Any]]
) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """The schemas of a tool's arguments by their names, and that of all of them, in which references lead."""
    for tool in tools:
        function = _table(_table(tool).get("function", tool))
        if function.get("name") == name:
            root = _table(function.get("parameters"))
            return _table(root.get("properties")), root
    return {}, {}


_KINDS: Mapping[type, str] = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    list: "array",
    dict: "object",
    type(None): "null",
}


def _kinds(schema: Any, root: Mapping[str, Any], deep: int = 0) -> set[str]:
    """The types that a schema allows, in JSON schema's words; none where it does not say."""
    schema = _table(schema)
    said = schema.get("type")
    kinds = {k for k in (said if isinstance(said, list) else [said]) if isinstance(k, str)}
    values = [*_listed(schema.get("enum")), *([schema["const"]] if "const" in schema else [])]
    kinds |= {_KINDS[type(value)] for value in values if type(value) in _KINDS}
    parts = [p for key in ("anyOf", "oneOf", "allOf") for p in _listed(schema.get(key))]
    parts += [_referred(schema.get("$ref"), root)]
    if deep < 4:  # a reference may lead to itself
        for part in parts:
            kinds |= _kinds(part, root, deep + 1)
    return {kind if kind in _KINDS.values() else "string" for kind in kinds}


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _referred(where: Any, root: Mapping[str, Any]) -> Any:
    """What a reference such as #/$defs/Color leads to."""
    found: Any = root
    if not isinstance(where, str) or not where.startswith("#/"):
        return None
    for name in where[2:].split("/"):
        found = _table(found).get(name)
    return found


# values


def _typed(text: str, kinds: set[str]) -> Any:
    """An argument without quotes as a value of one of these types; where none fits, the text, which the tool refuses."""
    if kinds == {"string"}:
        return text
    if not kinds:
        return _any(text)
    for kind, read in _READ.items():
        if kind in kinds:
            try:
                return read(text.strip())
            except (ValueError, RecursionError):
                continue
    # templates write earlier calls' values as Python does
    return None if "null" in kinds and "string" not in kinds and text.strip() == "None" else text


def _any(text: str) -> Any:
    """Of an argument that nobody says anything of: what it reads as."""
    words = {"True": True, "False": False, "None": None}
    if text.strip() in words:
        return words[text.strip()]
    try:
        return load_json(text.strip())
    except (ValueError, RecursionError):
        return text


def _null(text: str) -> None:
    if text != "null":
        raise ValueError


def _number(text: str) -> int | float:
    try:
        return int(text)
    except ValueError:
        value = float(text)
    if not math.isfinite(value):
        raise ValueError
    return value


def _boolean(text: str) -> bool:
    value = {"true": True, "1": True, "false": False, "0": False}.get(text.lower())
    if value is None:
        raise ValueError
    return value


def _of(wanted: type) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        value = load_json(text)
        if not isinstance(value, wanted):
            raise ValueError
        return value

    return read


_READ: Mapping[str, Callable[[str], Any]] = {
    "null": _null,
    "integer": int,
    "number": _number,
    "boolean": _boolean,
    "array": _of(list),
    "object": _of(dict),
}
