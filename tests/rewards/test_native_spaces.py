"""Actions as the prompts of released agents spell them, in every action space: a table by hand, so that a name lost is seen.

Each row: the text, its arguments, and the action that it is in the spaces mobile, desktop, web and any (- where it is none, ? where
a finger's path is a drag in one space and a scroll in another).
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from mmrl.rewards.gui_actions import Action, parse_action
from mmrl.rewards.reading.calls import one_call

SPACES = ("mobile", "desktop", "web", "any")
AT: dict[str, Any] = {"point": (10.0, 20.0)}
TO: dict[str, Any] = {**AT, "end": (30.0, 40.0)}
HELLO, CLOCK, COPY, TAB = ({"text": text} for text in ("hello", "Clock", "ctrl+c", "tab"))
DOWN, RIGHT = ({"direction": way} for way in ("down", "right"))
NONE: dict[str, Any] = {}
Row = tuple[str, dict[str, Any], str]


def tool(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


AGUVIS: list[
    Row
] = [  # https://github.com/xlang-ai/aguvis, its plugin prompts; pyautogui's own positional forms
    ("pyautogui.click(x=10, y=20)", AT, "click click click click"),
    ("pyautogui.doubleClick(x=10, y=20)", AT, "- double_click - double_click"),
    ("pyautogui.rightClick(x=10, y=20)", AT, "- right_click - right_click"),
    ("pyautogui.moveTo(x=10, y=20)", AT, "- move hover move"),
    ("pyautogui.write(message='hello')", HELLO, "type type type type"),
    ("pyautogui.write('hello')", HELLO, "type type type type"),
    ("pyautogui.typewrite('hello')", HELLO, "type type type type"),
    ("pyautogui.press('tab')", TAB, "- hotkey hotkey hotkey"),
    ("pyautogui.press(keys=['tab'])", TAB, "- hotkey hotkey hotkey"),
    ("pyautogui.hotkey(keys=['ctrl', 'c'])", COPY, "- hotkey hotkey hotkey"),
    ("pyautogui.hotkey('ctrl', 'c')", COPY, "- hotkey hotkey hotkey"),
    ("pyautogui.scroll(page=-0.5)", DOWN, "scroll scroll scroll scroll"),
    ("pyautogui.hscroll(page=0.5)", RIGHT, "scroll scroll scroll scroll"),
    ("mobile.swipe(from_coord=[10, 80], to_coord=[10, 20])", DOWN, "scroll - - ?"),
    ("mobile.home()", NONE, "navigate_home - - navigate_home"),
    ("mobile.back()", NONE, "navigate_back - navigate_back navigate_back"),
    ("mobile.long_press(x=10, y=20)", AT, "long_press - - long_press"),
    ("mobile.open_app(app_name='Clock')", CLOCK, "open_app - - open_app"),
    ("browser.select_option(x=10, y=20, value='hello')", {**AT, **HELLO}, "- - select select"),
    ("terminate(status='success')", NONE, "complete complete complete complete"),
    ("answer('hello')", NONE, "- - complete complete"),
]
QWEN: list[
    Row
] = [  # https://github.com/QwenLM/Qwen3-VL, computer_use and mobile_use in cookbooks/utils/agent_function_call.py
    (tool("computer_use", action="left_click", coordinate=[10, 20]), AT, "click click click click"),
    (
        tool("computer_use", action="double_click", coordinate=[10, 20]),
        AT,
        "- double_click - double_click",
    ),
    (
        tool("computer_use", action="right_click", coordinate=[10, 20]),
        AT,
        "- right_click - right_click",
    ),
    (
        tool("computer_use", action="middle_click", coordinate=[10, 20]),
        AT,
        "- middle_click - middle_click",
    ),
    (tool("computer_use", action="mouse_move", coordinate=[10, 20]), AT, "- move hover move"),
    (tool("computer_use", action="key", keys=["ctrl", "c"]), COPY, "- hotkey hotkey hotkey"),
    (tool("computer_use", action="type", text="hello"), HELLO, "type type type type"),
    (tool("computer_use", action="write", text="hello"), HELLO, "type type type type"),
    (tool("computer_use", action="scroll", pixels=-300), DOWN, "scroll scroll scroll scroll"),
    (tool("computer_use", action="wait", time=2), NONE, "wait wait wait wait"),
    (
        tool("mobile_use", action="long_press", coordinate=[10, 20], time=2),
        AT,
        "long_press - - long_press",
    ),
    (tool("mobile_use", action="open", text="Clock"), CLOCK, "open_app - - open_app"),
    (
        tool("mobile_use", action="system_button", button="Home"),
        NONE,
        "navigate_home - - navigate_home",
    ),
    (
        tool("mobile_use", action="system_button", button="Back"),
        NONE,
        "navigate_back - navigate_back navigate_back",
    ),
    (
        tool("mobile_use", action="system_button", button="Enter"),
        NONE,
        "enter press_enter enter enter",
    ),
    (
        tool("mobile_use", action="system_button", button="Menu"),
        NONE,
        "recent_apps - - recent_apps",
    ),
    (
        tool("mobile_use", action="terminate", status="failure"),
        NONE,
        "impossible impossible - impossible",
    ),
    (tool("mobile_use", action="answer", text="hello"), NONE, "- - complete complete"),
]
UI_TARS: list[Row] = [  # https://github.com/bytedance/UI-TARS, codes/ui_tars/prompt.py
    ("Action: click(start_box='(10,20)')", AT, "click click click click"),
    ("Action: left_double(start_box='(10,20)')", AT, "- double_click - double_click"),
    ("Action: right_single(start_box='(10,20)')", AT, "- right_click - right_click"),
    ("Action: hover(start_box='(10,20)')", AT, "- move hover move"),
    ("Action: hotkey(key='ctrl c')", COPY, "- hotkey hotkey hotkey"),
    ("Action: type(content='hello')", HELLO, "type type type type"),
    ("Action: scroll(start_box='(10,20)', direction='down')", DOWN, "scroll scroll scroll scroll"),
    ("Action: wait()", NONE, "wait wait wait wait"),
    ("Action: finished(content='hello')", NONE, "complete complete complete complete"),
    ("Action: long_press(start_box='(10,20)')", AT, "long_press - - long_press"),
    ("Action: press_home()", NONE, "navigate_home - - navigate_home"),
    ("Action: press_back()", NONE, "navigate_back - navigate_back navigate_back"),
    ("Action: open_app(app_name='Clock')", CLOCK, "open_app - - open_app"),
    ("Action: drag(start_box='(10,20)', end_box='(30,40)')", TO, "? drag - drag"),
]
OS_ATLAS: list[
    Row
] = [  # https://huggingface.co/OS-Copilot/OS-Atlas-Pro-7B, its basic and custom actions
    ("CLICK <point>[[10, 20]]</point>", AT, "click click click click"),
    ("TYPE [hello]", HELLO, "type type type type"),
    ("WRITE [hello]", HELLO, "type type type type"),
    ("SCROLL [DOWN]", DOWN, "scroll scroll scroll scroll"),
    ("LONG_PRESS <point>[[10, 20]]</point>", AT, "long_press - - long_press"),
    ("OPEN_APP [Clock]", CLOCK, "open_app - - open_app"),
    ("PRESS_BACK", NONE, "navigate_back - navigate_back navigate_back"),
    ("PRESS_HOME", NONE, "navigate_home - - navigate_home"),
    ("PRESS_RECENT", NONE, "recent_apps - - recent_apps"),
    ("ENTER", NONE, "enter press_enter enter enter"),
    ("WAIT", NONE, "wait wait wait wait"),
    ("COMPLETE", NONE, "complete complete complete complete"),
]
ANDROID_WORLD: list[
    Row
] = [  # https://github.com/google-research/android_world, android_world/agents/m3a.py
    ('{"action_type": "click", "x": 10, "y": 20}', AT, "click click click click"),
    ('{"action_type": "long_press", "x": 10, "y": 20}', AT, "long_press - - long_press"),
    ('{"action_type": "input_text", "text": "hello"}', HELLO, "type type type type"),
    ('{"action_type": "keyboard_enter"}', NONE, "enter press_enter enter enter"),
    ('{"action_type": "navigate_home"}', NONE, "navigate_home - - navigate_home"),
    ('{"action_type": "navigate_back"}', NONE, "navigate_back - navigate_back navigate_back"),
    ('{"action_type": "scroll", "direction": "down"}', DOWN, "scroll scroll scroll scroll"),
    ('{"action_type": "open_app", "app_name": "Clock"}', CLOCK, "open_app - - open_app"),
    ('{"action_type": "wait"}', NONE, "wait wait wait wait"),
    (
        '{"action_type": "status", "goal_status": "complete"}',
        NONE,
        "complete complete complete complete",
    ),
    (
        '{"action_type": "status", "goal_status": "infeasible"}',
        NONE,
        "impossible impossible - impossible",
    ),
    ('{"action_type": "answer", "text": "hello"}', NONE, "- - complete complete"),
]
AUTO_GLM: list[Row] = [  # https://github.com/zai-org/Open-AutoGLM, phone_agent/config/prompts_en.py
    ('do(action="Tap", element=[10, 20])', AT, "click click click click"),
    ('do(action="Type", text="hello")', HELLO, "type type type type"),
    ('do(action="Launch", app="Clock")', CLOCK, "open_app - - open_app"),
    ('do(action="Long Press", element=[10, 20])', AT, "long_press - - long_press"),
    ('do(action="Double Tap", element=[10, 20])', AT, "- double_click - double_click"),
    ('do(action="Back")', NONE, "navigate_back - navigate_back navigate_back"),
    ('do(action="Home")', NONE, "navigate_home - - navigate_home"),
    ('finish(message="hello")', NONE, "complete complete complete complete"),
]
ROWS = [*AGUVIS, *QWEN, *UI_TARS, *OS_ATLAS, *ANDROID_WORLD, *AUTO_GLM]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0][:70])
def test_a_spelling_is_its_action_in_every_space(row: Row) -> None:
    text, arguments, names = row
    for space, name in zip(SPACES, names.split(), strict=True):
        read = one_call(text, space)
        found = None if read is None else parse_action(read, space).action
        if name != "?":
            assert found == (None if name == "-" else Action(name, **arguments)), (space, read)
