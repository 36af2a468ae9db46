"""GUI actions: read as data in many spellings, and right by each published rule exactly where its paper says so."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmrl.errors import ConfigError
from mmrl.rewards.gui_actions import (
    RULES,
    SPACES,
    Action,
    action_from,
    action_name,
    make_action_reward,
    make_rule,
    match_action,
    parse_action,
    same_text,
)
from mmrl.rewards.parsing import MAX_ANSWER_CHARS, json_once
from tests.kits.clock_kit import takes_less

SIZE = (1080, 2400)
CLICK = Action("click", (200.0, 300.0), (150.0, 250.0, 250.0, 350.0))


def parsed(text: str, space: str = "mobile") -> Action:
    found = parse_action(text, space)
    assert found.action is not None, found.reason
    return found.action


@pytest.mark.parametrize(
    ("text", "space", "action"),
    [
        ('{"action": "click", "point": [3, 4]}', "mobile", Action("click", (3, 4))),
        ("[{'action': 'click', 'coordinate': (3, 4)}]", "web", Action("click", (3, 4))),
        ('{"action_type": "Click", "x": 3, "y": 4}', "mobile", Action("click", (3, 4))),
        (
            '{"action": "tap", "bbox": [1, 2, 5, 6]}',
            "mobile",
            Action("click", (3, 4), (1, 2, 5, 6)),
        ),
        (
            '[{"action": "click", "point": [3, 4], "input_text": "no input text"}]',
            "mobile",
            Action("click", (3, 4)),
        ),
        (
            '{"name": "computer_use", "arguments": {"action": "left_click", "coordinate": [3, 4]}}',
            "desktop",
            Action("click", (3, 4)),
        ),
        (
            '{"action": "input_text", "text": "it\'s (fine) \\"so\\""}',
            "mobile",
            Action("type", text='it\'s (fine) "so"'),
        ),
        (
            "{'action': 'type', 'text': 'say (hello) [now]'}",
            "web",
            Action("type", text="say (hello) [now]"),
        ),
        ('{"action": "type", "content": 42}', "desktop", Action("type", text="42")),
        ('{"action": "scroll", "input_text": "UP"}', "mobile", Action("scroll", direction="up")),
        ('{"action": "swipe", "direction": "up"}', "mobile", Action("scroll", direction="down")),
        ('{"action": "open_app", "app_name": "Clock"}', "mobile", Action("open_app", text="Clock")),
        ('{"action": "PRESS_BACK"}', "mobile", Action("navigate_back")),
        ('{"action": "go back"}', "web", Action("navigate_back")),
        ('{"action": "hotkey", "keys": ["Ctrl", "C"]}', "desktop", Action("hotkey", text="ctrl+c")),
        ('{"action": "key", "text": "ctrl c"}', "desktop", Action("hotkey", text="ctrl+c")),
        (
            '{"action": "drag", "point": [1, 2], "end": [3, 4]}',
            "desktop",
            Action("drag", (1, 2), end=(3, 4)),
        ),
        (
            '{"action": "select", "value": "Blue", "point": [3, 4]}',
            "web",
            Action("select", (3, 4), text="Blue"),
        ),
        ('{"action": "goto", "url": "example.org"}', "web", Action("goto", text="example.org")),
        (
            '{"action": "click", "x": 3, "y": 4, "coordinate": [3.0, 4]}',
            "mobile",
            Action("click", (3, 4)),
        ),
        (
            '{"action": "click", "point": [3, 4], "bbox": [1, 2, 5, 6]}',
            "mobile",
            Action("click", (3, 4), (1, 2, 5, 6)),
        ),
        (
            '{"action": "open_app", "app": "Clock", "text": "no input text", "name": "Clock"}',
            "mobile",
            Action("open_app", text="Clock"),
        ),
        (
            '{"action": "click", "type": "button", "point": [3, 4]}',
            "mobile",
            Action("click", (3, 4)),
        ),
        ('{"action": "click"}', "mobile", Action("click")),
        ('```json\n{"action": "wait"}\n```', "mobile", Action("wait")),
    ],
)
def test_spellings(text: str, space: str, action: Action) -> None:
    assert parsed(text, space) == action


@pytest.mark.parametrize(
    ("text", "space", "action"),
    [
        *(
            (text, space, Action(enter))
            for space, enter in (("desktop", "press_enter"), ("web", "enter"), ("any", "enter"))
            for text in (
                '{"action": "press_enter"}',
                '{"action": "PRESS_ENTER"}',
                '{"action": "enter"}',
                '{"action": "hotkey", "keys": "enter"}',
                '{"action": "key", "keys": ["Enter"]}',
                '{"action": "key", "text": "Return"}',
            )
        ),
        ('{"action": "hotkey", "keys": "esc"}', "desktop", Action("press_esc")),
        ('{"action": "key", "text": "Escape"}', "any", Action("press_esc")),
        ('{"action": "key", "text": "ArrowUp"}', "desktop", Action("press_up")),
        *(
            (json.dumps({"action": "press", "key": key}), "desktop", Action("press_pgdn"))
            for key in ("pagedown", "page_down", "Page_Down", "Page Down", "pgdn", "PageDown")
        ),
        ('{"action": "hotkey", "keys": "tab"}', "web", Action("hotkey", text="tab")),
        ('{"action": "hotkey", "keys": "home"}', "any", Action("hotkey", text="home")),
        ('{"action": "hotkey", "keys": "Ctrl-C"}', "web", Action("hotkey", text="ctrl+c")),
        (
            '{"action": "hotkey", "keys": ["Control", "shift", "PageUp"]}',
            "web",
            Action("hotkey", text="ctrl+shift+pgup"),
        ),
        ('{"action": "hotkey", "keys": "ctrl+-"}', "web", Action("hotkey", text="ctrl+-")),
        *(
            (
                json.dumps({"action": "hotkey", "keys": keys}),
                "web",
                Action("hotkey", text="ctrl+plus"),
            )
            for keys in ("ctrl++", "Ctrl + +", ["ctrl", "+"], "ctrl-plus")
        ),
        ('{"action": "hotkey", "keys": "+"}', "desktop", Action("hotkey", text="plus")),
        ('{"action": "hotkey", "keys": "ctrl+"}', "web", Action("hotkey", text="ctrl")),
        ('{"action": "hotkey", "keys": "ctrl+enter"}', "web", Action("hotkey", text="ctrl+enter")),
    ],
)
def test_a_key_is_one_action_however_it_is_written(text: str, space: str, action: Action) -> None:
    found, other = parsed(text, space), Action("hotkey", text="ctrl+alt+f7")
    for rule in RULES.values():
        assert (
            match_action(found, action, rule, SIZE).step
            and match_action(action, found, rule, SIZE).step
        )
    assert not match_action(other, action, RULES["strict"], SIZE).step


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('[{"action": "wait"}, {"action": "wait"}]', "several_actions"),
        ('{"action": "wait"} {"action": "wait"}', "not_an_action"),
        ('{"action": "click", "point": [[1, 2], [3, 4]]}', "several_points"),
        ('{"action": "click", "action": "wait"}', "duplicate_keys"),
        ('{"action": "click", "point": [1, 2], "point": [3, 4]}', "duplicate_keys"),
        ("{'action': 'click', 'point': [1, 2], 'point': [1, 2]}", "duplicate_keys"),
        ('{"arguments": {"action": "click", "x": 1, "x": 2, "y": 1}}', "duplicate_keys"),
        ('{"action": "click", "point": [1, 2], "coordinate": [3, 4]}', "conflicting_arguments"),
        ('{"action": "click", "x": 1, "y": 2, "point": [3, 4]}', "conflicting_arguments"),
        (
            '{"action": "click", "point": [1, 2], "bbox": [100, 100, 200, 200]}',
            "conflicting_arguments",
        ),
        ('{"action": "type", "text": "a", "content": "b"}', "conflicting_arguments"),
        ('{"action": "scroll", "direction": "up", "text": "down"}', "conflicting_arguments"),
        (
            '{"action": "click", "action_type": "long_press", "point": [1, 2]}',
            "conflicting_arguments",
        ),
        ('{"action": "wait", "type": "click"}', "conflicting_arguments"),
        ('{"action": "click", "point": "here"}', "bad_point"),
        ('{"action": "click", "point": [1]}', "bad_point"),
        ('{"action": "click", "point": [NaN, 1]}', "not_finite"),
        ('{"action": "click", "point": [1e999, 1]}', "bad_point"),
        ('{"action": "type", "text": ["a"]}', "bad_text"),
        ('{"action": "type", "text": true}', "bad_text"),
        ('{"action": "scroll", "direction": "sideways"}', "bad_direction"),
        ('{"action": "fly"}', "unknown_action"),
        ('{"action": 7}', "unknown_action"),
        ('{"action": null}', "unknown_action"),
        ('{"point": [1, 2]}', "no_action"),
        ("[]", "no_action"),
        ("{}", "no_action"),
        ("click [1, 2]", "not_an_action"),
        ("", "not_an_action"),
        ("7", "not_an_action"),
        ('{"action": "double_click", "point": [1, 2]}', "unknown_action"),
        ("[" * 3000, "not_an_action"),
        ("x" * (MAX_ANSWER_CHARS + 1), "answer_too_long"),
    ],
)
def test_anything_else_fails_with_a_reason(text: str, reason: str) -> None:
    found = parse_action(text, "mobile")
    assert (found.action, found.reason) == (None, reason)


def test_texts_are_data_and_never_run(tmp_path: Path) -> None:
    target = tmp_path / "ran"
    code = f"__import__('pathlib').Path({str(target)!r}).touch()"
    for text in (
        code,
        f"[{code}]",
        f"{{'action': {code}}}",
        json.dumps({"action": "type", "text": code}),
    ):
        parse_action(text, "mobile")
    assert parsed(json.dumps({"action": "type", "text": code})).text == code and not target.exists()


def test_lone_surrogates_never_reach_a_file() -> None:
    text = parsed('{"action": "type", "text": "a\\ud800b"}').text
    assert text is not None and text.encode("utf-8")


@settings(max_examples=150, deadline=None)
@given(
    st.text(max_size=150) | st.text(alphabet="{}[]():,'\"\\ actionclkpe0123", max_size=150),
    st.sampled_from(sorted(SPACES)),
)
def test_any_text_parses_or_fails(text: str, space: str) -> None:
    found = parse_action(text, space)
    assert (found.action is None) == (found.reason is not None)


@settings(max_examples=100, deadline=None)
@given(
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats()
        | st.text(max_size=6)
        | st.sampled_from(["click", "type", "drag"]),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(
                    ["action", "point", "text", "x", "y", "bbox", "end", "direction", "arguments"]
                ),
                inner,
                max_size=4,
            )
        ),
        max_leaves=9,
    )
)
def test_any_json_value_gives_an_action_or_a_reason(value: Any) -> None:
    for space in SPACES:
        try:
            assert action_from(value, space).action in SPACES[space]
        except ValueError as err:
            assert str(err).replace("_", "").isalpha()


@pytest.mark.parametrize(
    "text",
    [
        "'" * 3999,
        "{'" * 1300,
        '{"action": "type", "text": "' + "a " * 1900 + '"}',
        "[{" * 1900,
        '{"a":' * 700,
        '{"action": "type", "text": "' + "\\ud800" * 600 + '"}',
        '{"action": ' + '"' * 3000,
    ],
)
def test_hostile_texts_take_milliseconds(text: str) -> None:
    true = Action("type", text="b " * 1900)

    def match() -> None:
        json_once.cache_clear()  # or the second run asks its memory
        found = parse_action(text, "mobile").action
        for rule in RULES.values():
            match_action(found, true, rule, SIZE)

    takes_less(0.02, match)


def test_every_name_and_alias_belongs_to_one_action() -> None:
    for space, table in SPACES.items():
        for name, (arguments, aliases) in table.items():
            assert (
                action_name(name, space) == name
                and action_name(f" {name.upper().replace('_', ' ')} ", space) == name
            )
            assert set(arguments) <= {"point", "end", "text", "app", "direction", "keys"}
            assert all(action_name(alias, space) == name for alias in aliases), (space, name)


def test_any_has_every_name_of_every_space() -> None:
    for space, table in SPACES.items():
        for name, (arguments, others) in table.items():
            own = {"press_enter": "enter", "hover": "move"}.get(name, name)
            assert SPACES["any"][own][0] == arguments
            # pyautogui.press is of keys, a phone's press a click
            assert {action_name(other, "any") for other in (name, *others) if other != "press"} == {
                own
            }, (space, name)


# rules


@pytest.mark.parametrize(
    ("point", "right"),
    [
        # box 150..250, 250..350 on 1080 x 2400: 14 % are 151.2 px across and 336 px down
        ((200, 300), "strict ui_r1 gui_r1 os_atlas odyssey"),
        ((150, 250), "strict ui_r1 os_atlas odyssey"),
        ((250, 350), "strict ui_r1 os_atlas odyssey"),
        ((251, 300), "os_atlas odyssey"),
        ((351, 300), "os_atlas odyssey"),
        ((352, 300), ""),
        ((200, 636), "os_atlas odyssey"),
        ((200, 637), ""),
        ((305, 540), "os_atlas odyssey"),
        ((307, 540), ""),
    ],
)
def test_where_each_rule_draws_the_line(point: tuple[float, float], right: str) -> None:
    for name in ("strict", "ui_r1", "gui_r1", "os_atlas", "odyssey"):
        match = match_action(Action("click", point), CLICK, RULES[name], SIZE)
        assert match.place is (name in right.split()), name
        assert match.type and match.step is match.place


def test_gui_r1_takes_140_pixels_around_a_point_exclusively() -> None:
    true = Action("click", (500.0, 500.0))
    for point, right in (
        ((640, 500), False),
        ((639.9, 500), True),
        ((599, 597), True),
        ((599, 600), False),
    ):
        assert match_action(Action("click", point), true, RULES["gui_r1"], SIZE).place is right
    corner = match_action(
        Action("click", (150.0, 250.0)), CLICK, RULES["gui_r1_benchmark"], (100, 100)
    )
    assert corner.place, "its benchmark measures from the box's first corner"
    assert not match_action(
        Action("click", (165.0, 250.0)), CLICK, RULES["gui_r1_benchmark"], (100, 100)
    ).place


def test_a_large_element_is_right_anywhere_for_rules_that_know_boxes() -> None:
    true = Action("click", (540.0, 1200.0), (0.0, 0.0, 1080.0, 2400.0))
    found = Action("click", (20.0, 20.0))
    assert {
        name: match_action(found, true, RULES[name], SIZE).place
        for name in ("strict", "odyssey", "os_atlas")
    } == {"strict": True, "odyssey": True, "os_atlas": False}


@pytest.mark.parametrize(
    ("found", "exact", "f1", "first_word", "containment"),
    [
        ("new york", 1, 1, 1, 1),
        (" new  york ", 1, 1, 1, 1),
        ("New York", 0, 1, 1, 1),
        ("new jersey", 0, 1, 1, 1),
        ("york new", 0, 1, 0, 0),
        ("in new york now", 0, 1, 0, 1),
        ("new", 0, 1, 0, 1),
        ("news", 0, 0, 0, 0),
        ("old", 0, 0, 0, 0),
        ("__import__('os')", 0, 0, 0, 0),
    ],
)
def test_text_rules(found: str, exact: int, f1: int, first_word: int, containment: int) -> None:
    rules = ("exact", "f1", "first_word", "containment")
    assert [same_text(found, "new york", rule) for rule in rules] == list(
        map(bool, (exact, f1, first_word, containment))
    )


def test_single_words_agree_by_containment_for_f1() -> None:
    assert (
        same_text("news", "new", "f1")
        and same_text("new", "NEWS", "f1")
        and not same_text("news", "new", "first_word")
    )


def test_nothing_is_never_the_right_text() -> None:
    """GUI-Odyssey's script counts an empty text as contained in every other."""
    for rule in ("exact", "f1", "first_word", "containment"):
        assert not same_text("", "words", rule) and not same_text(None, "words", rule)


def test_what_a_rule_checks() -> None:
    app, wrong = Action("open_app", text="Clock"), Action("open_app", text="Camera Roll")
    said = {name: match_action(wrong, app, rule, SIZE).text for name, rule in RULES.items()}
    assert said == {
        "strict": False,
        "os_atlas": False,
        "ui_r1": None,
        "gui_r1": None,
        "odyssey": None,
        "gui_r1_benchmark": False,
        "ui_r1_benchmark": None,
    }
    assert match_action(replace(app, text="clock"), app, RULES["strict"], SIZE).step, (
        "case of an app's name"
    )
    down, up = Action("scroll", direction="down"), Action("scroll", direction="up")
    assert {
        name: match_action(up, down, rule, SIZE).step
        for name, rule in RULES.items()
        if "benchmark" not in name
    } == {"strict": False, "os_atlas": False, "odyssey": False, "gui_r1": False, "ui_r1": True}
    back = match_action(Action("navigate_back"), Action("navigate_back"), RULES["strict"], SIZE)
    assert (back.type, back.place, back.text, back.step) == (True, None, None, True)


def test_both_ends_of_a_drag_count() -> None:
    true = Action("drag", (100.0, 100.0), end=(900.0, 900.0))
    for rule in ("strict", "os_atlas"):
        assert match_action(true, true, RULES[rule], SIZE).step
        assert not match_action(replace(true, end=(100.0, 1800.0)), true, RULES[rule], SIZE).step
        assert not match_action(replace(true, end=None), true, RULES[rule], SIZE).step


def test_no_answer_and_missing_arguments_are_wrong() -> None:
    for rule in RULES.values():
        assert (
            not match_action(None, CLICK, rule, SIZE).step
            and not match_action(None, Action("wait"), rule, SIZE).step
        )
        match = match_action(Action("click"), CLICK, rule, SIZE)
        assert match.type and match.place is False


def test_rewards_of_the_papers() -> None:
    ui = make_action_reward("ui_r1")
    assert ui(CLICK, CLICK, SIZE) == 1 and ui(Action("click", (0.0, 0.0)), CLICK, SIZE) == 0.5
    assert ui(Action("wait"), CLICK, SIZE) == 0
    assert ui(Action("scroll", direction="up"), Action("scroll", direction="down"), SIZE) == 1
    assert ui(Action("long_press", CLICK.point), CLICK, SIZE) == 0, (
        "the place is paid with the right type only"
    )
    gui = make_action_reward("gui_r1")
    true = Action("type", text="buy two red apples")
    assert [gui(Action("type", text=t), true, SIZE) for t in ("red apples", "apples", "pears")] == [
        1,
        0,
        0,
    ]
    assert make_action_reward("strict")(Action("type", text="red apples"), true, SIZE) == 0


points = st.tuples(st.floats(0, 1080), st.floats(0, 2400))


@given(points, points, st.sampled_from(sorted(RULES)))
def test_moving_towards_the_target_never_turns_right_into_wrong(
    start: tuple[float, float], end: tuple[float, float], name: str
) -> None:
    true = Action("click", end)
    track = [tuple(a + (b - a) * k / 6 for a, b in zip(start, end, strict=True)) for k in range(7)]
    hits = [
        match_action(Action("click", (p[0], p[1])), true, RULES[name], SIZE).place for p in track
    ]
    assert all(not a or b for a, b in itertools.pairwise(hits)) and hits[-1]


def test_rules_can_be_changed_by_name() -> None:
    rule = make_rule("os_atlas", radius=50, scale=[1000, 1000], inclusive=False, checked=["text"])
    assert (rule.radius, rule.scale, rule.inclusive, rule.checked) == (
        50,
        (1000, 1000),
        False,
        ("text",),
    )
    assert make_rule("strict", scale=None, radius=10).scale is None


@pytest.mark.parametrize(
    ("mode", "params", "message"),
    [
        ("strickt", {}, "Did you mean 'strict'"),
        ("strict", {"raduis": 1}, "Did you mean 'radius'"),
        ("strict", {"radius": -1}, "radius as a number"),
        ("strict", {"place": "insde"}, "Did you mean 'inside'"),
        ("strict", {"text": "exakt"}, "Did you mean 'exact'"),
        ("strict", {"scale": [0, 1]}, "expected scale"),
        ("strict", {"scale": 3}, "expected scale"),
        ("strict", {"checked": ["words"]}, "expected checked"),
        ("strict", {"inclusive": "yes"}, "inclusive"),
        ("strict", {"typed": "yes"}, "unknown typed"),
        ("strict", {"around": "edge"}, "around"),
    ],
)
def test_wrong_settings_are_named(mode: str, params: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_action_reward(mode, **params)
