"""What the GUI formats share: one vocabulary of actions, and steps checked before they go to the task.

python -c "from mmrl.tasks.readers.gui_steps import step_answer; print(step_answer('navigate_home'))"
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mmrl.tasks.readers.common import RowError, text_of

__all__ = ["ACTIONS", "POINTED", "direction_of", "number_list", "step_answer"]

ACTIONS = {
    "tap": "click",
    "long_click": "long_press",
    "input_text": "type",
    "text": "type",
    "press_home": "navigate_home",
    "press_back": "navigate_back",
    "home": "navigate_home",
    "back": "navigate_back",
    "key_home": "navigate_home",
    "key_back": "navigate_back",
    "key_appselect": "recent_apps",
    "press_recent": "recent_apps",
    "press_enter": "enter",
    "incomplete": "impossible",
    "terminate": "complete",
    "finish": "complete",
    "doubleclick": "double_click",
    "rightclick": "right_click",
    "moveto": "move",
}
"""Spellings of the formats (lower case) -> the name in mmrl.rewards.gui_actions.SPACES; every other name stays as it is."""
POINTED = ("click", "long_press", "double_click", "right_click", "middle_click", "move", "hover")
"""Actions at a place: they need a point or the box of their element."""
_WORDED = {
    "type": "text",
    "select": "text",
    "open_app": "app",
    "scroll": "direction",
    "swipe": "direction",
}
_DIRECTIONS = ("up", "down", "left", "right")


def direction_of(start: Sequence[float], end: Sequence[float]) -> str:
    """Where the finger goes from `start` to `end`: the larger of the two movements, vertical when equal (GUI-Odyssey)."""
    dx, dy = end[0] - start[0], end[1] - start[1]
    if dx == dy == 0:
        raise RowError(
            "a scroll between two different points", f"{list(start)} twice", "correct the step"
        )
    if abs(dx) > abs(dy):
        return "left" if dx < 0 else "right"
    return "up" if dy < 0 else "down"


def number_list(value: Any, name: str, counts: tuple[int, ...]) -> list[float]:
    """`value` as a list of numbers, as many as one of `counts`. Raises RowError."""
    if (
        not isinstance(value, (list, tuple))
        or len(value) not in counts
        or not all(type(v) in (int, float) for v in value)
    ):
        raise RowError(
            f"'{name}' as {' or '.join(map(str, counts))} numbers", repr(value)[:80], "correct it"
        )
    return list(value)


def step_answer(
    action: Any, *, place: Sequence[float] | None = None, words: Any = None
) -> dict[str, Any]:
    """{"action", and what it needs: "point" or "bbox", "text", "app" or "direction"}; `place` is in the file's frame.

    `place` has two numbers (a point) or four (the element's box); `words` is the text, the app or the direction. Raises
    RowError where an action lacks what it needs. What an action does not need is left out. `scroll` says where the view
    moves, `swipe` where the finger moves.
    """
    name = text_of(action, "action").lower().replace(" ", "_").replace("-", "_")
    name = ACTIONS.get(name, name)
    answer: dict[str, Any] = {"action": name}
    if name in POINTED:
        if place is None:
            raise RowError(f"a point or a box for action {name}", "none", "add it")
        answer["point" if len(place) == 2 else "bbox"] = list(place)
    key = _WORDED.get(name)
    if key == "direction":
        answer[key] = text_of(words, "direction").lower()
        if answer[key] not in _DIRECTIONS:
            raise RowError(
                f"a direction of {', '.join(_DIRECTIONS)}", repr(words)[:60], "correct the step"
            )
    elif key:
        if not isinstance(words, str) or not words:
            raise RowError(f"the {key} of action {name}", repr(words)[:60], "add it")
        answer[key] = words
    return answer
