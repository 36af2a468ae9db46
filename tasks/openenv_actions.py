"""What a policy writes, as the action of an OpenEnv environment, by the JSON schema that its server tells.

    form = ActionForm.of(schema)                       # {"properties": {"message": {"type": "string"}}, ...}
    form.words                                         # how the policy is told to answer
    form.action("<answer>hello</answer>")              # {"message": "hello"}; NoAction says why there is none

Four forms, of which one is chosen by the schema or by the task's parameters:

    names   `actions`: names, each the value of the only field (of a list its number, or the name where the field is a text) or a
            whole action
    field   one field: the answer itself, as text, or as the number or truth value that the schema asks for
    object  several fields: a JSON object
    tools   the server's MCP tools, called in the format of the model's chat template

What a model wrote is data: parsed, and judged by the server's own schema.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mmrl.errors import ConfigError, did_you_mean
from mmrl.rewards.parsing import load_json, strip_fence
from mmrl.tasks.tool_calls import BadCall, plain_name, read_call

__all__ = ["ActionForm", "NoAction", "tools_described"]

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL | re.IGNORECASE)
_MOST_CHARS = 100_000
_MOST_TOOLS, _MOST_WORDS = 64, 2_000
_NUMBERS = ("integer", "number")
_MOST_DRAWN = 2**53  # beyond it not each whole number is a float


class NoAction(ValueError):
    """A turn that names no action; the text says why, for the policy."""


def _fields(schema: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """The schema's own properties; `metadata` is every action's, and no part of what is done."""
    found = schema.get("properties")
    named = found.items() if isinstance(found, Mapping) else ()
    return {str(n): p for n, p in named if n != "metadata" and isinstance(p, Mapping)}


def _resolved(one: Mapping[str, Any], whole: Mapping[str, Any]) -> Mapping[str, Any]:
    """A property with its `$ref` followed once, and Optional[X] taken as X; of several types it has none."""
    ref = one.get("$ref")
    if isinstance(ref, str) and ref.startswith("#/$defs/"):
        defined = whole.get("$defs")
        target = defined.get(ref[8:]) if isinstance(defined, Mapping) else None
        one = {**target, **one} if isinstance(target, Mapping) else one
    choices = one.get("anyOf")
    if isinstance(choices, list):
        real = [c for c in choices if isinstance(c, Mapping) and c.get("type") != "null"]
        if len(real) == 1:
            one = {**one, **real[0]}
    if isinstance(kinds := one.get("type"), list):
        known = [kind for kind in kinds if kind != "null"]
        one = {name: value for name, value in one.items() if name != "type"}
        if len(known) == 1 and isinstance(known[0], str):
            one["type"] = known[0]
    return one


def _told(name: str, one: Mapping[str, Any], *, needed: bool) -> str:
    """A field for the policy: its name, kind and description."""
    values = one.get("enum")
    if "const" in one:
        kind = json.dumps(one["const"])
    elif isinstance(values, list):
        kind = "one of " + ", ".join(json.dumps(v, ensure_ascii=False) for v in values[:100])
        kind += f" and {len(values) - 100} more" if len(values) > 100 else ""
    else:
        kind = str(one.get("type", "any"))
    bounds = [
        f"{words} {one[key]}"
        for key, words in (("minimum", "at least"), ("maximum", "at most"))
        if key in one
    ]
    about = _shortened(one.get("description", ""))
    kind = ", ".join([kind, *bounds, *([] if needed else ["optional"])])
    return f"{name} ({kind}){f': {about}' if about else ''}"


def _measured(end: Any) -> float | None:
    return float(end) if type(end) in (int, float) and abs(end) <= _MOST_DRAWN else None


def _bounds(one: Mapping[str, Any]) -> tuple[float, float]:
    """Least and largest number to draw for a property: its own bounds, at most 9 apart."""
    low, high = (_measured(one.get(key)) for key in ("minimum", "maximum"))
    if low is None:
        low = 0.0 if high is None else min(0.0, high)
    return low, low + 9.0 if high is None else max(low, min(high, low + 9.0))


def _drawn(one: Mapping[str, Any], rng: np.random.Generator) -> Any:
    """A value of a property, for checks."""
    if "const" in one:
        return one["const"]
    values = one.get("enum")
    if isinstance(values, list) and values:
        return values[int(rng.integers(len(values)))]
    kind = one.get("type")
    if kind in _NUMBERS:
        low, high = _bounds(one)
        if kind == "integer" and math.ceil(low) <= math.floor(high):
            return int(rng.integers(math.ceil(low), math.floor(high) + 1))
        return low + (high - low) * float(rng.random())
    if kind == "boolean":
        return bool(rng.integers(2))
    if kind in ("array", "object"):
        return [] if kind == "array" else {}
    return ("hello", "yes", "1")[int(rng.integers(3))]


def _shortened(said: Any) -> str:
    """A description of at most so many characters; a longer one says that it was cut."""
    text = str(said)
    return text if len(text) <= _MOST_WORDS else f"{text[:_MOST_WORDS]} [cut]"


@dataclass(frozen=True)
class ActionForm:
    """How turns become actions; see the module. `needed`: names of the fields that have no default."""

    kind: str
    fields: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    names: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    tools: Sequence[Mapping[str, Any]] = ()
    needed: frozenset[str] = frozenset()

    @classmethod
    def of(
        cls,
        schema: Mapping[str, Any],
        *,
        actions: Sequence[Any] | Mapping[str, Any] = (),
        only: str | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> ActionForm:
        """The form of a schema. actions: names, or name -> value or whole action. only: the field that the whole answer is. tools:
        what the server offers. Raises ConfigError where the parameters do not fit the schema."""
        if len(tools) > _MOST_TOOLS:
            raise ConfigError(
                f"expected at most {_MOST_TOOLS} tools of an OpenEnv environment, found {len(tools)}; offer fewer, or set "
                "openenv.tools: false and name its openenv.actions"
            )
        if tools:
            return cls("tools", tools=tuple(tools))
        named = {name: _resolved(one, schema) for name, one in _fields(schema).items()}
        required = schema.get("required")
        needed = frozenset(map(str, required if isinstance(required, list) else ()))
        if only is not None and only not in named:
            raise ConfigError(
                f"expected openenv.field as a field of the environment's actions ({', '.join(named) or 'none'}), found "
                f"{only!r}.{did_you_mean(only, named)}"
            )
        free = [name for name in named if "const" not in named[name]]
        asked = [name for name in free if name in needed]
        single = only or (free[0] if len(free) == 1 else asked[0] if len(asked) == 1 else None)
        constant = {name: one["const"] for name, one in named.items() if "const" in one}
        if actions:
            return cls("names", named, cls._named(actions, single, constant, named), needed=needed)
        if single is not None and (only or len(free) == 1):
            return cls("field", {single: named[single]}, {"": constant}, needed=needed)
        return cls("object", named, {"": constant}, needed=needed)

    @staticmethod
    def _named(
        actions: Sequence[Any] | Mapping[str, Any],
        single: str | None,
        constant: Mapping[str, Any],
        fields: Mapping[str, Mapping[str, Any]],
    ) -> dict[str, Mapping[str, Any]]:
        text = single is not None and fields[single].get("type") == "string"
        pairs = (
            list(actions.items())
            if isinstance(actions, Mapping)
            else [(name, str(name) if text else number) for number, name in enumerate(actions)]
        )
        found: dict[str, Mapping[str, Any]] = {}
        for name, value in pairs:
            if isinstance(value, Mapping):
                whole: Mapping[str, Any] = value
            elif single is None:
                raise ConfigError(
                    "expected openenv.actions as name: {field: value, ...} for an environment whose actions have several "
                    f"fields or none, found {value!r} for {name!r}; give whole actions, or openenv.field"
                )
            else:
                whole = {single: value}
            found[str(name).strip().casefold()] = {**constant, **whole}
        return found

    @property
    def words(self) -> str:
        """How the policy is told to answer; '' of tools, which the chat template describes."""
        if self.kind == "names":
            return f"Reply with one of: {', '.join(self.names)}."
        if self.kind == "field":
            ((name, one),) = self.fields.items()
            return f"Reply with the action's {_told(name, one, needed=True)}"
        if self.kind == "object":
            lines = [_told(n, one, needed=n in self.needed) for n, one in self.fields.items()]
            return "\n- ".join(["Reply with a JSON object of these fields:", *lines])
        return ""

    @property
    def again(self) -> str:
        """The same in short, behind what was wrong."""
        return "Call one tool." if self.kind == "tools" else self.words.partition("\n")[0]

    def action(self, text: str) -> dict[str, Any]:
        """The action that a turn names: within <answer></answer> where there are such marks, else what stands behind its thoughts.
        Raises NoAction."""
        if len(text) > _MOST_CHARS:
            raise NoAction(f"expected at most {_MOST_CHARS} characters")
        if self.kind == "tools":
            return self._call(text)
        said = text.rpartition("</think>")[2]
        found = _ANSWER.findall(said)
        said = (found[-1] if found else said).strip()
        if self.kind == "names":
            name = said.casefold()
            if name not in self.names:  # as it is told comes first: names may have such marks
                name = name.strip(".!'\"` ")
            if name not in self.names:
                raise NoAction("that was no action")
            return dict(self.names[name])
        if self.kind == "field":
            ((name, one),) = self.fields.items()
            return {**self.names[""], name: _read(said, one)}
        try:
            value = load_json(strip_fence(said))
        except (ValueError, RecursionError):
            value = None
        if not isinstance(value, dict):
            raise NoAction("expected a JSON object")
        return {**self.names[""], **{str(k): v for k, v in value.items()}}

    def _call(self, text: str) -> dict[str, Any]:
        try:
            call = read_call(text, tools_described(self.tools))
        except BadCall as bad:
            raise NoAction(str(bad)) from bad
        known = [t["name"] for t in self.tools]
        if call is None:
            raise NoAction("expected a tool call")
        if call.name not in known:
            raise NoAction(f"expected a call of {', '.join(known)}, found {plain_name(call.name)}")
        return {"type": "call_tool", "tool_name": call.name, "arguments": dict(call.arguments)}

    def random(self, rng: np.random.Generator) -> str:
        """A turn that names some action."""
        if self.kind == "names":
            return list(self.names)[int(rng.integers(len(self.names)))]
        if self.kind == "field":
            value = _drawn(next(iter(self.fields.values())), rng)
            return value if isinstance(value, str) else json.dumps(value)
        if self.kind == "object":
            return json.dumps({name: _drawn(one, rng) for name, one in self.fields.items()})
        tool = self.tools[int(rng.integers(len(self.tools)))]
        schema = _parameters(tool)
        drawn = {n: _drawn(_resolved(p, schema), rng) for n, p in _fields(schema).items()}
        call = json.dumps({"name": tool["name"], "arguments": drawn})
        return f"<tool_call>\n{call}\n</tool_call>"


def _read(said: str, one: Mapping[str, Any]) -> Any:
    """The answer as the value of a field of one schema. Raises NoAction."""
    values, kind = one.get("enum"), one.get("type")
    if isinstance(values, list) and said in values:
        return said
    if kind == "string" or (kind is None and not isinstance(values, list)):
        return said  # a text stays as it is written, also one that reads like a number
    try:
        value = load_json(strip_fence(said))
    except (ValueError, RecursionError) as error:
        if isinstance(values, list):
            raise NoAction("that was none of them") from error
        raise NoAction(f"expected {kind}") from error
    if kind in _NUMBERS and (isinstance(value, bool) or not isinstance(value, (int, float))):
        raise NoAction(f"expected {kind}")
    if kind == "boolean" and not isinstance(value, bool):
        raise NoAction("expected true or false")
    return value


def _parameters(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """The JSON schema of a tool's arguments; servers write it in either spelling."""
    for key in ("inputSchema", "input_schema"):
        if isinstance(found := tool.get(key), Mapping):
            return found
    return {"type": "object", "properties": {}}


def tools_described(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """MCP tools as transformers' `apply_chat_template(tools=...)` takes them."""
    return [
        {
            "type": "function",
            "function": {
                "name": tool["name"],
                "description": _shortened(tool.get("description") or ""),
                "parameters": dict(_parameters(tool)),
            },
        }
        for tool in tools
    ]
