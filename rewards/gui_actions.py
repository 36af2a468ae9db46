"""One step of a GUI agent: the action in an answer text, and whether it is the right one.

An action is a JSON object, {"action": "click", "point": [x, y]}, or a list of exactly one; it is read as data, never run.
Which actions and arguments exist is a table per action space (mobile, desktop, web) with the spellings in use. What counts
as the right place and the right text is a `MatchRule`; published ones have names:

    strict      the type, a point in the element's box, and the text itself: the default
    ui_r1       UI-R1's reward: 1 for the type, 1 for the place (inside the box; every other action has it for free)
    gui_r1      GUI-R1's reward: type, then strictly inside the box (or 140 px of the shown picture around a point), or half the
                words of the text
    os_atlas    14 % around the target, on both axes; texts by their first word
    odyssey     GUI-Odyssey: in the box or within 14 %; texts that contain each other or are half alike

    python -c "from mmrl.rewards.gui_actions import parse_action as p; \
      print(p('{\"action\": \"tap\", \"point\": [3, 4]}', 'mobile'))"
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from mmrl.errors import ConfigError, did_you_mean
from mmrl.rewards.gui import Point, centre, in_box, place_of
from mmrl.rewards.parsing import MAX_ANSWER_CHARS, Box, json_once, strip_fence

__all__ = [
    "ARGUMENTS",
    "Action",
    "ActionParse",
    "Match",
    "MatchRule",
    "PLACED",
    "RULES",
    "SPACES",
    "TYPED",
    "action_from",
    "action_name",
    "make_action_reward",
    "make_rule",
    "match_action",
    "parse_action",
    "same_text",
    "text_kind",
]

Table = Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]]

_KEYS = ("enter", "tab", "space", "esc", "up", "down", "left", "right", "pgup", "pgdn")
_SPACES: Mapping[str, Table] = {
    "mobile": {
        "click": (("point",), ("tap", "touch", "press", "left_click")),
        "long_press": (("point",), ("long_click", "hold")),
        "type": (("text",), ("input_text", "input", "type_text", "enter_text")),
        "scroll": (("direction",), ()),
        "swipe": (("direction",), ()),
        "open_app": (("app",), ("open", "launch", "launch_app", "start_app")),
        "navigate_back": ((), ("press_back", "back", "key_back", "go_back")),
        "navigate_home": ((), ("press_home", "home", "key_home", "go_home")),
        "recent_apps": ((), ("press_recent", "key_appselect", "app_switch")),
        "enter": ((), ("press_enter", "key_enter")),
        "wait": ((), ("sleep", "no_op")),
        "complete": ((), ("finish", "finished", "done", "terminate", "status_task_complete")),
        "impossible": ((), ("incomplete", "infeasible", "status_task_impossible")),
    },
    "desktop": {
        "click": (("point",), ("left_click", "tap")),
        "double_click": (("point",), ("left_double", "doubleclick")),
        "right_click": (("point",), ("right_single", "rightclick")),
        "middle_click": (("point",), ()),
        "move": (("point",), ("hover", "mouse_move", "moveto", "move_to")),
        "drag": (("point", "end"), ("left_click_drag", "drag_to")),
        "type": (("text",), ("input_text", "write", "type_text")),
        "hotkey": (("keys",), ("key", "press", "press_key")),
        "scroll": (("direction",), ()),
        "wait": ((), ("sleep", "no_op")),
        "complete": ((), ("finish", "finished", "done", "terminate")),
        "impossible": ((), ("fail", "infeasible")),
        **{f"press_{key}": ((), (f"press{key}",)) for key in _KEYS},
        "press_enter": ((), ("pressenter", "enter", "key_enter")),
    },
    "web": {
        "click": (("point",), ("left_click", "tap")),
        "hover": (("point",), ("move", "mouse_move")),
        "type": (("text",), ("input_text", "fill", "type_text")),
        "select": (("text",), ("select_option", "choose")),
        "hotkey": (("keys",), ("key", "press", "press_key")),
        "enter": ((), ("press_enter",)),
        "scroll": (("direction",), ()),
        "goto": (("text",), ("navigate", "open_url", "goto_url")),
        "navigate_back": ((), ("go_back", "back", "press_back")),
        "wait": ((), ("sleep", "no_op")),
        "complete": ((), ("finish", "finished", "done", "terminate", "answer", "stop")),
    },
}
_IN_ANY = {"press_enter": "enter", "hover": "move"}
"""Names of one action in two spaces: in `any` it has the second."""


def _all(tables: Mapping[str, Table]) -> Table:
    """The actions of all spaces, each with its names in all of them; a name of two (press) is that of the later space."""
    arguments: dict[str, tuple[str, ...]] = {}
    owners: dict[str, str] = {}
    for table in tables.values():
        for name, (wanted, others) in table.items():
            own = _IN_ANY.get(name, name)
            arguments[own] = wanted
            owners.update(dict.fromkeys((own, name, *others), own))
    return {
        own: (wanted, tuple(name for name, owner in owners.items() if owner == own != name))
        for own, wanted in arguments.items()
    }


SPACES: Mapping[str, Table] = {**_SPACES, "any": _all(_SPACES)}
"""Action space -> action -> (its arguments, other names for it). `any` holds the actions of all, for mixed data."""
_KEY_NAMES = {"return": "enter", "escape": "esc", "control": "ctrl", "del": "delete"}
_PAGE_KEY = re.compile(r"\bpage[ _-]?(?:up|(down))\b")
_ARROW_KEY = re.compile(r"\barrow[ _-]?(up|down|left|right)\b")
_PLUS_KEY = re.compile(r"(?:^|(?<=[\s+]))\+$")
_BETWEEN_KEYS = re.compile(r"[\s+]+|(?<=[a-z0-9])-(?=[a-z0-9])")

TYPED = ("type", "select")
"""Actions whose text may have a place."""
PLACED = ("web",)
"""Spaces whose prompts ask for that place, as Mind2Web does; elsewhere, and in `any`, whose rows of phones have no such place, text
goes to the field that has the focus."""
ARGUMENTS: Mapping[str, tuple[str, ...]] = {
    "point": (
        "point",
        "coordinate",
        "coordinates",
        "point_2d",
        "position",
        "start_point",
        "start_coordinate",
        "bbox",
        "bbox_2d",
        "box_2d",
        "box",
    ),
    "end": ("end", "end_point", "end_coordinate", "coordinate2", "to"),
    "text": ("text", "content", "value", "input_text", "url", "option"),
    "app": ("app", "app_name", "text", "input_text", "name"),
    "direction": ("direction", "text", "input_text"),
    "keys": ("keys", "key", "hotkey", "text", "input_text"),
}
"""Argument -> names it is written under; several of them in one action must agree."""
NAMES = ("action", "action_type", "type", "name")
"""Keys that hold the action's name; the first that is present counts, and no other may name another action."""
DIRECTIONS = ("up", "down", "left", "right")
_EMPTY = ("no input text", "")
_BRACKETS = str.maketrans("", "", "[]")
_ALIASES = {
    space: {
        **{alias: name for name, (_, others) in table.items() for alias in others},
        **{name: name for name in table},
    }
    for space, table in SPACES.items()
}


@dataclass(frozen=True)
class Action:
    """One action with its arguments in one spelling. `point` and `box` are of the target, `end` of a drag; `text` is what is
    typed, selected or opened, the keys ('ctrl+c') or the address; `direction` is where the view moves."""

    action: str
    point: Point | None = None
    box: Box | None = None
    end: Point | None = None
    text: str | None = None
    direction: str | None = None

    def moved(self, to: Callable[[Sequence[float]], tuple[float, ...]]) -> Action:
        """The same action with its coordinates converted by `to`."""
        point, box, end = (
            tuple(to(v)) if v is not None else None for v in (self.point, self.box, self.end)
        )
        return replace(self, point=point, box=box, end=end)  # type: ignore[arg-type]  # 2, 4 and 2 numbers as before


@dataclass(frozen=True)
class ActionParse:
    """The action of a text, or None with the `reason`."""

    action: Action | None
    reason: str | None = None


class _Refused(ValueError):
    pass


def action_name(name: Any, space: str) -> str | None:
    """The table's name of an action as it is written (case, spaces and hyphens do not matter); None when it is unknown."""
    if not isinstance(name, str) or len(name) > 40:
        return None
    return _ALIASES[space].get(
        "_".join(name.strip().lower().replace("-", " ").replace("_", " ").split())
    )


def _clean(text: str) -> str:
    """Text that any file can hold: lone surrogates, which JSON escapes can spell, are replaced."""
    return text.encode("utf-8", "replace").decode("utf-8").strip()


def _keys(text: str) -> str:
    """Keys in one spelling: Ctrl-C is ctrl+c, Page Down and pagedown are pgdn."""
    text = _PAGE_KEY.sub(lambda found: "pgdn" if found[1] else "pgup", text.lower())
    text = _PLUS_KEY.sub("plus", _ARROW_KEY.sub(r"\1", text))
    parts = _BETWEEN_KEYS.split(text)
    return "+".join(_KEY_NAMES.get(part, part) for part in parts if part)


def _words(argument: str, value: Any) -> str | None:
    """A text argument; lists are joined (keys), numbers spelled. None when it is said to be empty."""
    if isinstance(value, list) and argument == "keys" and all(isinstance(v, str) for v in value):
        value = "+".join(value)
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        value = str(value) if abs(value) < 1e15 else ""
    if not isinstance(value, str):
        raise _Refused(f"bad_{argument}")
    text = _clean(value)
    if argument == "keys":
        text = _keys(text)
    return None if text.lower() in _EMPTY else text


def _one_argument(argument: str, value: Any) -> dict[str, Any]:
    """Fields of Action that `argument` fills from one value."""
    if argument not in ("point", "end"):
        text = _words(argument, value)
        if argument != "direction":
            return {"text": text}
        text = text.lower() if text else None
        if text is not None and text not in DIRECTIONS:
            raise _Refused("bad_direction")
        return {"direction": text}
    found = place_of(value)
    if found.point is None:
        raise _Refused(found.reason if found.reason == "several_points" else f"bad_{argument}")
    return {"end": found.point} if argument == "end" else {"point": found.point, "box": found.box}


def _argument(argument: str, table: Mapping[str, Any], name_key: str) -> dict[str, Any]:
    """Fields of Action that `argument` fills from the keys of one action object; {} when it is not there.

    Written under several names, it must be the same each time (a text that is said to be empty is none).
    """
    values = [
        table[k]
        for k in ARGUMENTS[argument]
        if k in table and k != name_key and table[k] is not None
    ]
    if (
        argument == "point"
        and type(table.get("x")) in (int, float)
        and type(table.get("y")) in (int, float)
    ):
        values.insert(0, [table["x"], table["y"]])
    found = [_one_argument(argument, value) for value in values]
    found = [fields for fields in found if next(iter(fields.values())) is not None] or found[:1]
    if len({next(iter(fields.values())) for fields in found}) > 1:
        raise _Refused("conflicting_arguments")
    return max(found, key=lambda fields: fields.get("box") is not None, default={})


def _finger(fields: Mapping[str, Any]) -> str:
    """Where a finger goes that is said to move from fields['point'] to fields['end']; '' where it is not said."""
    start, end = fields.get("point"), fields.get("end")
    if start is None or end is None or start == end:
        return ""
    dx, dy = end[0] - start[0], end[1] - start[1]
    if abs(dx) > abs(dy):
        return "right" if dx > 0 else "left"
    return "down" if dy > 0 else "up"


def action_from(value: Any, space: str) -> Action:
    """The action a JSON value stands for, in the table of `space`. Raises ValueError with the reason, see `parse_action`."""
    if isinstance(value, list):
        if len(value) != 1:
            raise _Refused("several_actions" if value else "no_action")
        value = value[0]
    if not isinstance(value, dict):
        raise _Refused("not_an_action")
    # a tool call: {"name": "computer_use", "arguments": {...}}
    if isinstance(value.get("arguments"), dict):
        value = (
            value["arguments"]
            if "action" in value["arguments"]
            else {**value["arguments"], "action": value.get("name")}
        )
    key = next((k for k in NAMES if k in value), None)
    if key is None:
        raise _Refused("no_action")
    name = action_name(value[key], space)
    if name is None:
        raise _Refused("unknown_action")
    wanted = SPACES[space][name][0]
    # an app may be called "Wait"
    others = [other for other in NAMES if other != "name" or "app" not in wanted]
    if any(action_name(value.get(other), space) not in (None, name) for other in others):
        raise _Refused("conflicting_arguments")
    fields: dict[str, Any] = {}
    for argument in wanted:
        fields.update(_argument(argument, value, key))
    if name in TYPED:
        fields.update(_argument("point", value, key))  # where to type, if it is said
    if name == "swipe":  # the finger moves up, the view down
        if fields.get("direction") is None:
            fields = {
                "direction": _finger(
                    {**_argument("point", value, key), **_argument("end", value, key)}
                )
            }
        opposite = {"up": "down", "down": "up", "left": "right", "right": "left"}
        name, fields = "scroll", {"direction": opposite.get(fields.get("direction", ""))}
    return Action(name, **fields)


def parse_action(answer: str, space: str) -> ActionParse:
    """The one action of an answer text; it must be the action and nothing else (a ``` fence is fine).

    A missing argument is no failure: the type may be right all the same. Coordinates keep the text's frame. Reasons:
    answer_too_long, not_an_action, no_action, unknown_action, several_actions, several_points, duplicate_keys, not_finite,
    conflicting_arguments (a point and another coordinate, two actions), bad_point, bad_end, bad_text, bad_app, bad_direction,
    bad_keys. Never raises on any text.
    """
    if len(answer) > MAX_ANSWER_CHARS:
        return ActionParse(None, "answer_too_long")
    try:
        value = json_once(strip_fence(answer))
    except (ValueError, RecursionError) as err:
        if str(err) == "duplicate keys":
            return ActionParse(None, "duplicate_keys")
        return ActionParse(
            None, "not_finite" if str(err).startswith("not a number") else "not_an_action"
        )
    try:
        return ActionParse(action_from(value, space))
    except _Refused as err:
        return ActionParse(None, str(err))


# is it the right action?


@dataclass(frozen=True)
class MatchRule:
    """What is right enough.

    place       inside (the box, edges included), strictly_inside, radius, or inside_or_radius; a truth without a box is a
                point, and `radius` holds for it
    radius      of the circle around the target, in the units of `scale`
    scale       (sx, sy): the picture is sx units wide and sy high; null: pixels of the picture; shown: pixels of the picture as
                the model sees it
    inclusive   a distance equal to the radius counts
    around      centre or corner: where the circle lies when the truth is a box
    text        exact (of an app's name case does not matter), f1 (words as sets without [ and ], F1 >= 0.5, single words by
                containment), first_word (in any case; a text of one word only equals texts of one word), or containment
    checked     arguments that are compared at all: of text, app, keys and direction
    typed       the place of a text to type or select counts, as in Mind2Web: needed in spaces whose prompt asks for it (PLACED),
                elsewhere only judged where the answer says one. GUI-R1, OS-Atlas, UI-R1 and GUI-Odyssey compare the text alone
    """

    place: str = "inside"
    radius: float = 0.04
    scale: tuple[float, float] | Literal["shown"] | None = (1.0, 1.0)
    inclusive: bool = True
    around: str = "centre"
    text: str = "exact"
    checked: tuple[str, ...] = ("text", "app", "keys", "direction")
    typed: bool = True


RULES: Mapping[str, MatchRule] = {
    "strict": MatchRule(),
    "ui_r1": MatchRule(checked=(), typed=False),
    "gui_r1": MatchRule(
        "strictly_inside",
        140.0,
        "shown",
        False,
        text="f1",
        checked=("text", "direction"),
        typed=False,
    ),
    "os_atlas": MatchRule("radius", 140.0, (1000.0, 1000.0), text="first_word", typed=False),
    "odyssey": MatchRule(
        "inside_or_radius", 0.14, text="containment", checked=("text", "direction"), typed=False
    ),
    # rules of the papers' evaluation scripts, used by mmrl.tasks.metrics.gui
    "gui_r1_benchmark": MatchRule(
        "radius",
        0.14,
        inclusive=False,
        around="corner",
        text="f1",
        checked=("text", "app", "direction"),
        typed=False,
    ),
    "ui_r1_benchmark": MatchRule(
        "radius", 0.14 * 1080, (1080.0, 2400.0), False, checked=(), typed=False
    ),
}
_PLACES = ("inside", "strictly_inside", "radius", "inside_or_radius")
_TEXTS = ("exact", "f1", "first_word", "containment")
_CHECKED = ("text", "app", "keys", "direction")


@dataclass(frozen=True)
class Match:
    """What agrees. `place` and `text` are None when the right action has none; they are judged whatever the type."""

    type: bool
    place: bool | None
    text: bool | None

    @property
    def step(self) -> bool:
        """Everything that was asked for is right."""
        return self.type and self.place is not False and self.text is not False


def text_kind(action: str) -> str:
    """What Action.text is for an action: text, app or keys."""
    return {"open_app": "app", "hotkey": "keys"}.get(action, "text")


def make_rule(name: str, **changes: Any) -> MatchRule:
    """The rule called `name` with some settings changed. Raises ConfigError for unknown names and impossible values."""
    if name not in RULES:
        raise ConfigError(
            f"unknown accuracy mode {name!r}; expected {', '.join(RULES)}.{did_you_mean(str(name), RULES)}"
        )
    known = list(MatchRule.__dataclass_fields__)
    for key in changes:
        if key not in known:
            raise ConfigError(
                f"unknown parameter {key!r} of mode {name}; expected {', '.join(known)}.{did_you_mean(key, known)}"
            )
    for key, choices in (
        ("place", _PLACES),
        ("text", _TEXTS),
        ("around", ("centre", "corner")),
        ("inclusive", (True, False)),
        ("typed", (True, False)),
    ):
        if key in changes and changes[key] not in choices:
            raise ConfigError(
                f"unknown {key} {changes[key]!r}; expected {', '.join(map(str, choices))}."
                f"{did_you_mean(str(changes[key]), map(str, choices))}"
            )
    radius = changes.get("radius", 0)
    if (
        isinstance(radius, bool)
        or not isinstance(radius, (int, float))
        or not 0 <= radius <= 10_000
    ):
        raise ConfigError(f"expected radius as a number in 0..10000, found {radius!r}")
    scale = changes.get("scale")
    if scale is not None and scale != "shown":
        if (
            not isinstance(scale, (list, tuple))
            or len(scale) != 2
            or not all(type(v) in (int, float) and 0 < v <= 1e6 for v in scale)
        ):
            raise ConfigError(
                f"expected scale as [width, height] of the picture in the radius' units, shown (pixels of the picture as "
                f"the model sees it) or null (pixels of the picture), found {scale!r}"
            )
        changes = {**changes, "scale": (float(scale[0]), float(scale[1]))}
    checked = changes.get("checked", ())
    if not isinstance(checked, (list, tuple)) or not set(map(str, checked)) <= set(_CHECKED):
        raise ConfigError(f"expected checked as a list of {', '.join(_CHECKED)}, found {checked!r}")
    return replace(
        RULES[name], **({**changes, "checked": tuple(checked)} if "checked" in changes else changes)
    )


def _overlap(a: str, b: str) -> float:
    """F1 of the two sets of words."""
    first, second = set(a.lower().split()), set(b.lower().split())
    common = len(first & second)
    return 2 * common / (len(first) + len(second)) if common else 0.0


def _alike(a: str, b: str) -> float:
    """1 - edit distance / length of the longer text."""
    from rapidfuzz.distance import Levenshtein

    return float(Levenshtein.normalized_similarity(a, b))


def same_text(found: str | None, true: str, rule: str) -> bool:
    """Is `found` the text `true` under `rule` (see MatchRule.text)? An empty text is never the right one."""
    found, true = " ".join((found or "").split()), " ".join(true.split())
    if not found:
        return False
    if rule == "exact":
        return found == true
    if rule == "f1":
        said, meant = (
            " ".join({*text.lower().translate(_BRACKETS).split()}) for text in (found, true)
        )
        if said and meant and " " not in said + meant and (said in meant or meant in said):
            return True
        return _overlap(said, meant) >= 0.5
    # OS-Atlas compares "[new" of "[new york]": of a single word, "[new]", the bracket belongs to it
    if rule == "first_word":
        return f"[{found}]".lower().split()[0] == f"[{true}]".lower().split()[0]
    return found in true or true in found or _alike(found, true) >= 0.5


def _same_place(
    found: Point | None,
    true: Action,
    rule: MatchRule,
    size: Sequence[float],
    shown: Sequence[float],
) -> bool:
    if found is None:
        return False
    if true.box is not None and rule.place != "radius":
        if in_box(found, true.box, strict=rule.place == "strictly_inside"):
            return True
        if rule.place != "inside_or_radius":
            return False
    target = true.point
    if true.box is not None and (target is None or rule.around == "corner"):
        target = (true.box[0], true.box[1]) if rule.around == "corner" else centre(true.box)
    assert target is not None, "a place to compare with"
    units = shown if rule.scale == "shown" else size if rule.scale is None else rule.scale
    sx, sy = float(units[0]), float(units[1])
    far = math.hypot((found[0] - target[0]) / size[0] * sx, (found[1] - target[1]) / size[1] * sy)
    return far <= rule.radius + 1e-9 * max(sx, sy) if rule.inclusive else far < rule.radius


def _pressed(action: Action) -> Action:
    """One key in one spelling: the hotkey tab is press_tab, enter is press_enter."""
    if action.action == "enter" or (action.action == "hotkey" and action.text in _KEYS):
        return Action(f"press_{action.text or 'enter'}")
    return action


def match_action(
    found: Action | None,
    true: Action,
    rule: MatchRule,
    size: Sequence[float],
    shown: Sequence[float] | None = None,
    asked: bool = False,
) -> Match:
    """Compare an action with the right one; coordinates in pixels of the original picture of `size` = (width, height), which the
    model sees as one of size `shown` (default: the same). `asked`: the prompt asks where to type and select.

    One key is one action, as a hotkey or by its own name; rules that do not check keys take any two hotkeys for the same."""
    if found is not None and _pressed(found) == _pressed(true):
        found = true
    place = text = None
    shown = size if shown is None else shown
    placed = true.point is not None or true.box is not None
    if placed and true.action in TYPED:
        unsaid = found is not None and found.action == true.action and found.point is None
        placed = rule.typed and (asked or not unsaid)
    if placed:
        place = found is not None and _same_place(found.point, true, rule, size, shown)
        if place and true.end is not None:
            ends = replace(true, point=true.end, box=None)
            place = found is not None and _same_place(found.end, ends, rule, size, shown)
    if true.direction is not None and "direction" in rule.checked:
        text = found is not None and found.direction == true.direction
    elif true.text is not None and (kind := text_kind(true.action)) in rule.checked:
        said, right = (found.text if found is not None else None), true.text
        if rule.text == "exact" and kind == "app":
            said, right = (said or "").casefold(), right.casefold()
        text = same_text(said, right, rule.text)
    return Match(found is not None and found.action == true.action, place, text)


ActionReward = Callable[..., float]
"""reward(action, right action, (width, height), (width, height) as shown, asked) in [0, 1]; see `match_action`."""


def make_action_reward(mode: str, **params: Any) -> ActionReward:
    """The reward called `mode`, one of RULES; `params` change its MatchRule. Raises ConfigError.

    1 when the step is right by the rule, else 0. Only ui_r1 pays in halves: (type + place) / 2, the place only with the
    right type.
    """
    rule = make_rule(mode, **params)

    def reward(
        found: Action,
        true: Action,
        size: Sequence[float],
        shown: Sequence[float] | None = None,
        asked: bool = False,
    ) -> float:
        match = match_action(found, true, rule, size, shown, asked)
        if mode == "ui_r1":
            return (1.0 + (match.place is not False)) / 2 if match.type else 0.0
        return float(match.step)

    return reward
