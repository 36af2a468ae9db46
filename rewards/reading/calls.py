"""Actions as released GUI models write them -> {"action": ..., ...} as mmrl.rewards.gui_actions reads it; nothing is ever run.

    Qwen2.5-VL, Qwen3-VL  <tool_call>{"name": "mobile_use", "arguments": {"action": "system_button", "button": "Back"}}</tool_call>
    Qwen3.5               <tool_call><function=computer_use><parameter=action>wait</parameter></function></tool_call>
    UI-TARS 1.0           Thought: ... Action: click(start_box='<|box_start|>(500,500)<|box_end|>')
    UI-TARS 1.5 and later Action: click(start_box='(500,500)')   click(point='<point>500 500</point>')   press_back()
    Aguvis, Kimi-VL       pyautogui.click(x=0.5, y=0.3)   mobile.swipe(from_coord=[0.5, 0.8], to_coord=[0.5, 0.2])
    OS-Atlas              actions: CLICK <point>[[101, 872]]</point>   TYPE [red shoes]   SCROLL [DOWN]   PRESS_BACK
    CogAgent              Grounded Operation: CLICK(box=[[054,348,156,420]], element_info='Search')
    UI-Venus, AutoGLM     <action>Click(box=(500, 400))</action>   do(action="Tap", element=[500, 400])

One call is an action; two are several actions, whichever was meant.

    python -c "from mmrl.rewards.reading.calls import one_call; print(one_call('Action: press_back()'))"
"""

from __future__ import annotations

import json
import re
from typing import Any

from mmrl.rewards.gui_actions import DIRECTIONS, NAMES, SPACES, action_name
from mmrl.rewards.parsing import load_json
from mmrl.rewards.reading.blocks import blocks, json_block
from mmrl.rewards.reading.places import one_place, strip_box_tokens
from mmrl.rewards.reading.scanner import marks
from mmrl.rewards.reading.words import Unread

__all__ = ["call_place", "one_call"]

_MOST_CHARS = 4_000
_TOOL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|$)", re.DOTALL)
_FUNCTION = re.compile(r"<function=[A-Za-z_0-9]{1,40}>(.*?)(?:</function>|$)", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([A-Za-z_0-9]{1,40})>(.*?)</parameter>", re.DOTALL)
_ACTION_TAG = re.compile(r"<action>(.*?)</action>", re.DOTALL)
_MARK = re.compile(
    r"(?:^|\n)\s*(?:Action|Actions|actions|Grounded Operation|grounded operation|ACTION)\s?:\s*"
)
_DIALECTS = {
    "double_tap": "double_click",
    "triple_click": "double_click",
    "typewrite": "type",
    "input": "type",
    "key_press": "hotkey",
    "hscroll": "scroll",
    "end": "complete",
    "quote_text": "wait",
    "keyboard_enter": "press_enter",
}
"""Names that the tables of mmrl.rewards.gui_actions do not have -> one that they have."""
_STEMS = ("do", "call_user", "scroll_up", "scroll_down", "scroll_left", "scroll_right")
_SPELT = {
    name.replace("_", ""): name
    for name in sorted(
        {
            *_DIALECTS,
            *_STEMS,
            *(
                name
                for table in SPACES.values()
                for own, (_, others) in table.items()
                for name in (own, *others)
            ),
        },
        key=len,
    )
}
"""Names of calls without underscores (PressBack) -> with them, where both are in use."""
_CALL = re.compile(
    r"(?<![\w.])(?:(?:pyautogui|mobile|browser|computer|agent)\.)?"
    rf"({'|'.join(name.replace('_', '_?') for name in sorted(_SPELT.values(), key=len, reverse=True))})\(",
    re.IGNORECASE,
)
_LINE = re.compile(
    r"(?P<name>[A-Z][A-Z_]{2,20})"
    r"(?:\s*<point>\s*\[{1,2}\s*(?P<x>[0-9.]{1,12})\s*,\s*(?P<y>[0-9.]{1,12})\s*\]{1,2}\s*</point>"
    r"|\s*\[(?P<text>[^\[\]\n]{0,1000})\])?"
)
_POSITIONAL = {"point": ("x", "y"), "text": ("text",), "app": ("app",), "direction": ("amount",)}
_POINTS = (
    "start_box",
    "start_point",
    "point",
    "box",
    "coordinate",
    "element",
    "position",
    "start",
    "from_coord",
    "box_2d",
    "bbox",
    "bbox_2d",
    "point_2d",
    "coordinates",
)
_ENDS = ("end_box", "end_point", "coordinate2", "coordinates2", "end", "to_coord", "end_coordinate")
_TEXTS = ("content", "text", "message", "value", "input_text")
_AMOUNTS = ("pixels", "amount", "clicks", "page")
_BUTTONS = {
    "back": "press_back",
    "home": "press_home",
    "menu": "press_recent",
    "recent": "press_recent",
    "enter": "press_enter",
    "return": "press_enter",
}


def _arguments(text: str) -> tuple[list[str], str] | None:
    """The arguments of a call whose bracket was opened before `text`, cut at its commas, and what follows; None for no end."""
    parts, start = [], 0
    for place, char, depth in marks(text, inside=")"):
        if not depth or (depth == 1 and char == ","):
            parts.append(text[start:place].strip())
            start = place + 1
        if not depth:
            return [part for part in parts if part], text[start:]
    return None


def _value(text: str) -> Any:
    """A literal argument: a number, a list, a quoted or a bare text."""
    text = text.strip()
    if len(text) > 1 and text[0] in "'\"" and text[-1] == text[0]:
        return text[1:-1].replace("\\n", "\n").replace("\\'", "'").replace('\\"', '"')
    try:
        return load_json(text)
    except (ValueError, RecursionError):
        return text


def _plain(name: str) -> str:
    """A name in lower case with underscores."""
    name = "_".join(name.strip().lower().replace("-", " ").replace("_", " ").split())
    return _SPELT.get(name.replace("_", ""), name)


def _known(name: str, space: str) -> tuple[str, tuple[str, ...]]:
    """The action of the space that a plain name stands for, else that of another space, and its arguments."""
    name = _DIALECTS.get(name, name)
    # an answer ends a task on the web; AndroidWorld's and Qwen's is another action than their end
    for table in (space,) if name == "answer" else (space, "any"):
        if (known := action_name(name, table)) is not None:
            return known, SPACES[table][known][0]
    return name, ()


def _table(name: str, parts: list[str], space: str) -> dict[str, Any]:
    table: dict[str, Any] = {}
    # of pyautogui, also where a screen is touched
    wanted = ("keys",) if name == "press" else _known(name, space)[1]
    names = iter(_POSITIONAL.get(wanted[0], ()) if len(wanted) == 1 else ())
    bare: list[Any] = []
    for part in parts:
        key, equals, value = part.partition("=")
        if equals and re.fullmatch(r"[A-Za-z_0-9]{1,30}", key.strip()):
            if key.strip().lower() in table:
                raise Unread("several_actions")
            table[key.strip().lower()] = _value(value)
        else:
            bare.append(_value(part))
    if wanted == ("keys",) and bare:
        table["keys"] = bare[0] if len(bare) == 1 else bare
    else:
        for value in bare:
            table[next(names, f"argument{len(table)}")] = value
    return table


def _point(value: Any) -> list[float] | None:
    """A point or the box of one, from numbers in any of the spellings of mmrl.rewards.reading.places."""
    text = value if isinstance(value, str) else json.dumps(value)
    try:
        found = one_place(text)
    except Unread:
        raise Unread("several_points") from None
    return None if found is None else [float(v) for v in json.loads(found)]


def _direction(start: list[float], end: list[float]) -> str | None:
    """Where a finger goes from one point to another."""
    (x1, y1), (x2, y2) = start[:2], end[:2]
    if x1 == x2 and y1 == y2:
        return None
    if abs(x2 - x1) > abs(y2 - y1):
        return "right" if x2 > x1 else "left"
    return "down" if y2 > y1 else "up"


def _canonical(name: str, table: dict[str, Any], space: str) -> dict[str, Any]:
    """An action object in the canonical keys."""
    name = _plain(name)
    if name == "do":
        name = _plain(str(table.pop("action", "")))
    if name == "system_button":
        name = _BUTTONS.get(str(table.pop("button", "")).lower(), "system_button")
    if name in ("terminate", "status"):
        ended = str(table.get("status", table.get("goal_status", ""))).lower()
        name = "impossible" if ended in ("failure", "fail", "infeasible") else "finished"
    point = next((table[key] for key in _POINTS if table.get(key) is not None), None)
    end = next((table[key] for key in _ENDS if table.get(key) is not None), None)
    start, stop = (None if value is None else _point(value) for value in (point, end))
    if (
        start is None
        and isinstance(table.get("x"), (int, float))
        and isinstance(table.get("y"), (int, float))
    ):
        start = [float(table["x"]), float(table["y"])]
    # pyautogui's signs, also for Aguvis's pages
    up, down = ("right", "left") if name == "hscroll" else ("up", "down")
    direction = table.get("direction")
    if name.startswith("scroll_"):
        name, direction = "scroll", name.removeprefix("scroll_")
    if name == "press" and start is None:
        name = "hotkey"  # where a screen is touched, a press of a place is a click
    name, wanted = _known(name, space)
    if wanted == ("direction",) and direction is None:
        direction = _said_direction(table)
    amount = next(
        (table[key] for key in _AMOUNTS if isinstance(table.get(key), (int, float))), None
    )
    if name == "scroll" and direction is None and amount:
        direction = up if amount > 0 else down
    if (
        space == "mobile"
        and name in ("drag", "swipe", "scroll")
        and start is not None
        and stop is not None
        and direction is None
    ):
        name, direction = "swipe", _direction(start, stop)
    if name in ("scroll", "swipe"):
        return {"action": name, "direction": direction}
    if wanted == ("keys",):
        return {"action": name, "keys": _keys(table)}
    out: dict[str, Any] = {"action": name}
    if start is not None:
        out["point"] = start
    if "end" in wanted and stop is not None:
        out["end"] = stop
    if "app" in wanted:
        out["app"] = next(
            (table[key] for key in ("app", "app_name", "name", *_TEXTS) if table.get(key)), None
        )
    elif "text" in wanted:
        out["text"] = next(
            (table[key] for key in (*_TEXTS, "url", "option") if table.get(key) is not None), None
        )
    return out


def _said_direction(table: dict[str, Any]) -> str | None:
    """The direction of a scroll that is written where the text of other actions stands (GUI-R1)."""
    said = (str(table[key]).strip().lower() for key in _TEXTS if table.get(key) is not None)
    return next((text for text in said if text in DIRECTIONS), None)


def _keys(table: dict[str, Any]) -> Any:
    keys = next(
        (table[key] for key in ("keys", "key", "hotkey", *_TEXTS) if table.get(key) is not None),
        None,
    )
    return [str(key) for key in keys] if isinstance(keys, list) else keys


def _from_json(text: str, space: str) -> dict[str, Any] | None:
    """A JSON action or tool call in the canonical keys; None for any other value."""
    try:
        value = load_json(text)
    except (ValueError, RecursionError):
        return None
    if isinstance(value, list):
        if len(value) > 1:
            raise Unread("several_actions")
        value = value[0] if value else None
    if not isinstance(value, dict):
        return None
    inner = value.get("arguments", value)
    if not isinstance(inner, dict):
        return None
    named = next((key for key in NAMES if isinstance(inner.get(key), str)), None)
    name = value.get("name") if named is None else inner[named]
    rest = {key: entry for key, entry in inner.items() if key != named}
    return _canonical(name, rest, space) if isinstance(name, str) else None


def _from_xml(text: str, space: str) -> dict[str, Any] | None:
    """A tool call in Qwen3.5's tags in the canonical keys; None for none, or one without an action. What is to be typed stands
    there without quotes, and is not read any further."""
    if text.count("<function=") > 1:
        raise Unread("several_actions")
    function = _FUNCTION.search(text)
    table: dict[str, Any] = {}
    for found in _PARAMETER.finditer(function[1] if function else ""):
        if found[1] in table:
            raise Unread("several_actions")
        table[found[1]] = found[2].strip() if found[1] in _TEXTS else _value(found[2])
    name = table.pop("action", None)
    return _canonical(name, table, space) if isinstance(name, str) else None


def _calls(text: str, space: str) -> list[dict[str, Any]]:
    """All function calls of a text, each once."""
    found: list[dict[str, Any]] = []
    while "(" in text and (call := _CALL.search(text)):
        parsed = _arguments(text[call.end() :])
        if parsed is None:
            break
        parts, text = parsed
        name = _plain(call[1])
        action = _canonical(name, _table(name, parts, space), space)
        if action not in found:
            found.append(action)
    return found


def _line(text: str, space: str) -> dict[str, Any] | None:
    """OS-Atlas's line: a name in capitals, with a point or a text in brackets."""
    found = _LINE.fullmatch(text.strip().strip("`").strip())
    if not found or found["name"].lower().replace("_", "") not in _SPELT:
        return None
    name, said = found["name"].lower(), found["text"]
    table: dict[str, Any] = (
        {} if found["x"] is None else {"point": [float(found["x"]), float(found["y"])]}
    )
    if said is not None:
        table["direction" if name == "scroll" else "text"] = (
            said.lower() if name == "scroll" else said
        )
    return _canonical(name, table, space)


def _region(text: str) -> str:
    """What stands behind the only `Action:` of a text, or the whole text."""
    if ":" not in text:
        return text
    marks = list(_MARK.finditer(text))
    if len(marks) != 1:
        return text
    head, behind = text[: marks[0].start()], text[marks[0].end() :]
    if _CALL.search(head) or blocks(head):
        return text  # another call in front of it
    return behind if _CALL.search(behind) or _LINE.match(behind.strip()) else text


def _one(text: str, space: str) -> dict[str, Any] | None:
    if len(text) > _MOST_CHARS:
        return None
    text = strip_box_tokens(text)
    tools = {found[1].strip() for found in _TOOL.finditer(text)} if "<tool_call>" in text else set()
    if len(tools) > 1:
        raise Unread("several_actions")
    if tools:
        tool = tools.pop()
        return _from_xml(tool, space) if "<function=" in tool else _from_json(tool, space)
    if text.count("<action>") > 1:
        raise Unread("several_actions")
    tag = _ACTION_TAG.search(text) if "<action>" in text else None
    region = tag[1] if tag else _region(text)
    found = _calls(region, space)
    if len(found) > 1:
        raise Unread("several_actions")
    if found:
        return found[0]
    line = _line(region, space)
    if line is not None:
        return line
    try:
        block = json_block(region)
    except Unread as err:
        raise Unread("several_actions" if err.reason == "several_values" else err.reason) from None
    return None if block is None else _from_json(block, space)


def one_call(text: str, space: str = "any") -> str | None:
    """The one action of a text as JSON in the canonical keys, for an action space of mmrl.rewards.gui_actions; None without any.

    Raises Unread: several_actions, several_points, hedged.
    """
    found = _one(text, space)
    return None if found is None else json.dumps(found)


def call_place(text: str) -> str | None:
    """The point (or box) of the one action of a text as JSON; None without an action, or one without a place. Raises Unread."""
    found = _one(text, "desktop")
    return (
        json.dumps(found["point"]) if found is not None and found.get("point") is not None else None
    )
