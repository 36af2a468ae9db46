"""What a model may do on a page, in the words of its prompt, and the reading of it.

    read_action('<answer>{"action": "click", "point": [3, 4]}</answer>', "json")
    read_action("click(start_box='(120,300)')", "native")      # dialects of released models, see mmrl.rewards.reading.calls
    read_action("[3, 4]", "point")                             # a point is a click: for models that know nothing else

The text is a stranger's: it is read as data. Exactly one action counts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from mmrl.coords import CoordFrame, from_orig, to_orig
from mmrl.rewards.gui import parse_point
from mmrl.rewards.gui_actions import Action, parse_action
from mmrl.rewards.reading.calls import one_call
from mmrl.rewards.reading.words import Unread
from mmrl.tasks.browser.chromium import Command

__all__ = ["SPELLINGS", "BadAction", "command_of", "read_action", "words_for", "written"]

SPELLINGS = ("json", "native", "point")
"""How actions may be written: as the prompt asks for them, also as released models write them, or as a bare point."""
_MOST_TYPED = 500  # letters of one action
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_POINTED = {
    "click": "click",
    "double_click": "double_click",
    "right_click": "right_click",
    "hover": "hover",
    "move": "hover",
    "long_press": "click",
}
_ENDS = ("complete", "impossible")
_KEYS = {
    "ctrl": "Control",
    "control": "Control",
    "alt": "Alt",
    "shift": "Shift",
    "meta": "Meta",
    "cmd": "Meta",
    "enter": "Enter",
    "return": "Enter",
    "tab": "Tab",
    "space": "Space",
    "esc": "Escape",
    "escape": "Escape",
    "up": "ArrowUp",
    "down": "ArrowDown",
    "left": "ArrowLeft",
    "right": "ArrowRight",
    "pgup": "PageUp",
    "pageup": "PageUp",
    "pgdn": "PageDown",
    "pagedown": "PageDown",
    "backspace": "Backspace",
    "delete": "Delete",
    "home": "Home",
    "end": "End",
}
_WORDS = (
    '{"action": "click", "point": [x, y]}; {"action": "double_click", "point": [x, y]}; '
    '{"action": "right_click", "point": [x, y]}; {"action": "hover", "point": [x, y]}; '
    '{"action": "drag", "point": [x, y], "end": [x, y]}; '
    '{"action": "type", "text": "...", "point": [x, y]}; {"action": "select", "text": "...", "point": [x, y]}; '
    '{"action": "hotkey", "keys": "ctrl+a"}; {"action": "enter"}; {"action": "scroll", "direction": "up|down|left|right"}; '
    '{"action": "wait"}; {"action": "complete"}'
)


class BadAction(ValueError):
    """No action, several of them, or one that no page takes; the text says which."""


def words_for(spelling: str) -> str:
    """The actions as a prompt shows them."""
    return "[x, y], the point to click" if spelling == "point" else _WORDS


def read_action(text: str, spelling: str) -> Action:
    """The one action of an answer. Raises BadAction."""
    said = _ANSWER.findall(text)
    if len(said) > 1:
        raise BadAction("several_answers")
    answer = said[0] if said else text
    if spelling == "point":
        point = parse_point(answer)
        if point.point is None:
            raise BadAction(point.reason or "no_point")
        return Action("click", point=point.point)
    if spelling == "native":
        try:
            found = one_call(text, "any")
        except Unread as error:
            raise BadAction(error.reason) from None
        answer = answer if found is None else found
    parsed = parse_action(answer.strip(), "any")
    if parsed.action is None:
        raise BadAction(parsed.reason or "no_action")
    return parsed.action


def command_of(
    action: Action, frame: CoordFrame, resized_wh: Sequence[float], orig_wh: Sequence[float]
) -> Command | None:
    """What the browser does of it, with places in pixels of the page; None for the end of the episode. Raises BadAction."""
    moved = action.moved(lambda place: to_orig(place, frame, resized_wh, orig_wh))
    kind, point, text = moved.action, moved.point, moved.text or ""
    if kind in _ENDS:
        return None
    if kind in _POINTED or kind in ("drag", "select"):
        if point is None or (kind == "drag" and moved.end is None):
            raise BadAction("no_point")
        if kind == "select" and not text:
            raise BadAction("no_text")
        if kind == "drag":
            assert moved.end is not None
            return Command(kind, point, moved.end)
        return Command(_POINTED.get(kind, kind), point, text=text)
    if kind == "type":
        if not 0 < len(text) <= _MOST_TYPED:
            raise BadAction("text_too_long" if text else "no_text")
        return Command("type", text=text) if point is None else Command("type", point, text=text)
    if kind == "scroll":
        if moved.direction is None:
            raise BadAction("no_direction")
        return Command("scroll", text=moved.direction)
    if kind == "wait":
        return Command("wait")
    if kind in ("hotkey", "enter") or kind.startswith("press_"):
        return Command(
            "press", text=_keys(text if kind == "hotkey" else kind.removeprefix("press_"))
        )
    raise BadAction(f"not_on_a_page: {kind}")


def written(
    command: Command,
    spelling: str,
    frame: CoordFrame,
    resized_wh: Sequence[float],
    orig_wh: Sequence[float],
) -> str | None:
    """A click, a typed text or a choice as a model writes it; None where the spelling has no words for it."""

    def place(point: tuple[float, float]) -> list[int]:
        return [round(v) for v in from_orig(point, frame, resized_wh, orig_wh)]

    if spelling == "point":
        return str(place(command.point)) if command.kind == "click" else None
    told: dict[str, Any] = {"action": command.kind}
    if command.placed:
        told["point"] = place(command.point)
    if command.text:
        told["text"] = command.text
    return json.dumps(told)


def _keys(said: str) -> str:
    """'Control+a' of 'ctrl+a'. Raises BadAction."""
    parts = [_KEYS.get(key, key if len(key) == 1 else "") for key in said.split("+")]
    if not all(parts):
        raise BadAction("unknown_key")
    return "+".join(parts)
