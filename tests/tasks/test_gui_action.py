"""GUI actions as a task: every action of every space, in every frame; data checked; lenient rules only by name."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmrl.coords import CoordFrame
from mmrl.errors import ConfigError, DataError
from mmrl.registry import task_from_spec
from mmrl.rewards.gui_actions import SPACES
from mmrl.task import Template
from mmrl.tasks.gui_action import GuiAction, action_words
from mmrl.tasks.metrics.gui import true_action
from mmrl.tasks.readers.common import RowError
from mmrl.types import ImageSize, RewardContext, Sample, Score

SIZE = (1080, 2400)
FRAMES = list(CoordFrame)
PRESETS = [None, *GuiAction.presets]
CLICK = {"action": "click", "bbox": [150, 250, 250, 350]}


def sample(answer: dict[str, Any], **params: Any) -> Sample:
    task = GuiAction(space=params.get("space", "mobile"))
    return Sample(
        "1",
        "gui_action",
        "steps",
        "open the clock",
        task.check_answer(answer, CoordFrame.ABS_ORIG, [SIZE], params),
        ("a.png",),
        params={"width": SIZE[0], "height": SIZE[1], **params},
    )


def context(
    frame: CoordFrame = CoordFrame.ABS_ORIG, resized: tuple[int, int] = (540, 1204)
) -> RewardContext:
    return RewardContext(1, 1, frame, (ImageSize(SIZE, resized),))


def score(
    text: str,
    answer: dict[str, Any],
    frame: CoordFrame = CoordFrame.ABS_ORIG,
    task: GuiAction | None = None,
    **params: Any,
) -> Score:
    return (task or GuiAction()).score(
        sample(answer, **params), f"<answer>{text}</answer>", context(frame)
    )


def answers(space: str) -> list[dict[str, Any]]:
    values: dict[str, Any] = {
        "point": {"bbox": [10, 20, 90, 44]},
        "end": {"end": [500, 900]},
        "text": {"text": 'it\'s "5" (ok)'},
        "app": {"app": "Clock"},
        "direction": {"direction": "left"},
        "keys": {"keys": "ctrl+c"},
    }
    made = []
    for name, (arguments, _) in SPACES[space].items():
        if name != "swipe":
            made.append({"action": name, **{k: v for a in arguments for k, v in values[a].items()}})
    return made


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("space", sorted(SPACES))
def test_gold_earns_everything_and_wrong_nothing(space: str, preset: str | None) -> None:
    task = GuiAction(preset=preset, space=space)
    for answer in answers(space):
        row = sample(answer, space=space)
        for frame in FRAMES:
            ctx = context(frame)
            gold, wrong = (
                task.score(row, task.gold(row, ctx), ctx),
                task.score(row, task.wrong(row, ctx), ctx),
            )
            assert gold.value == pytest.approx(task.value_range[1]) and set(
                gold.metrics.values()
            ) == {1.0}, (answer, frame)
            assert (
                wrong.parsed
                and wrong.parts["accuracy"] == 0
                and set(wrong.metrics.values()) == {0.0}
            ), (answer, frame)
            assert json.dumps(gold.detail)


@pytest.mark.parametrize(
    ("text", "frame", "metrics"),
    [
        ('{"action": "click", "point": [200, 300]}', CoordFrame.ABS_ORIG, (1, 1, 1, 1)),
        ('{"action": "click", "point": [150, 350]}', CoordFrame.ABS_ORIG, (1, 1, 1, 1)),
        ('{"action": "click", "point": [149, 350]}', CoordFrame.ABS_ORIG, (1, 0, 1, 0)),
        ('{"action": "click", "point": [185, 125]}', CoordFrame.REL1000, (1, 1, 1, 1)),
        ('{"action": "click", "point": [0.185, 0.125]}', CoordFrame.REL1, (1, 1, 1, 1)),
        ('{"action": "click", "point": [100, 150]}', CoordFrame.ABS_RESIZED, (1, 1, 1, 1)),
        ('{"action": "click", "bbox": [100, 200, 300, 400]}', CoordFrame.ABS_ORIG, (1, 1, 1, 1)),
        ('{"action": "click"}', CoordFrame.ABS_ORIG, (1, 0, 1, 0)),
        ('{"action": "long_press", "point": [200, 300]}', CoordFrame.ABS_ORIG, (0, 0, 0, 0)),
        ('{"action": "wait"}', CoordFrame.ABS_ORIG, (0, 0, 0, 0)),
    ],
)
def test_clicks(text: str, frame: CoordFrame, metrics: tuple[int, ...]) -> None:
    assert tuple(score(text, CLICK, frame).metrics.values()) == metrics


def test_one_step_that_the_lenient_rule_accepts_and_the_strict_one_does_not() -> None:
    near = '{"action": "click", "point": [300, 500]}'
    assert score(near, CLICK).value == pytest.approx(0.1), "the format only"
    assert score(near, CLICK, task=GuiAction(preset="os_atlas")).value == 1
    typed = '{"action": "type", "text": "alarm at seven"}'
    truth = {"action": "type", "text": "alarm at eight"}
    assert score(typed, truth).metrics["correct"] == 0
    assert score(typed, truth, task=GuiAction(mode="os_atlas")).metrics["correct"] == 1
    assert (
        score(typed, truth, task=GuiAction(mode="os_atlas", accuracy={"text": "exact"})).metrics[
            "correct"
        ]
        == 0
    )


def test_the_papers_rewards_add_up() -> None:
    ui = GuiAction(preset="ui_r1", frame=None)
    ctx, row = context(), sample(CLICK)
    totals = [
        ui.score(row, f"<think>x</think><answer>{text}</answer>", ctx).value
        for text in (
            '{"action": "click", "coordinate": [200, 300]}',
            '{"action": "click", "coordinate": [2, 3]}',
            '{"action": "wait"}',
            "?",
        )
    ]
    assert totals == [3, 2, 1, 1], (
        "type + place + format, the form being judged apart from the answer"
    )
    gui = GuiAction(preset="gui_r1", frame=None)
    text = "<think>x</think><answer>[{'action': 'click', 'point': [200, 300], 'input_text': 'no input text'}]</answer>"
    assert gui.score(row, text, ctx).value == pytest.approx(1)


@pytest.mark.parametrize("preset", ["gui_r1", "ui_r1"])
@pytest.mark.parametrize("space", ["desktop", "web", "any"])
def test_keys_earn_what_the_peers_programs_give(preset: str, space: str) -> None:
    """GUI-R1's r1gui_accuracy_reward compares texts of click, type, select and scroll; any other action is right by its name
    (`else: return 1.0`). Its prompt puts the keys into 'input_text'."""
    task = GuiAction(preset=preset, space=space, frame=None)
    keys = ("enter", "tab", "esc", "down", "ctrl+c")
    for true in keys:
        row = sample({"action": "hotkey", "keys": true}, space=space)
        for name, said in [*(("hotkey", key) for key in keys), ("wait", "no input text")]:
            text = f"[{{'action': '{name}', 'point': [-100, -100], 'input_text': '{said}'}}]"
            found = task.score(row, f"<think>x</think><answer>{text}</answer>", context())
            assert found.metrics["correct"] == float(name == "hotkey"), (true, text, found.reason)
            if said == true:
                assert found.value == pytest.approx(task.value_range[1])
    if "press_esc" in SPACES[space]:
        row = sample({"action": "press_esc"}, space=space)
        for said in ("esc", "tab"):
            text = f"<think>x</think><answer>[{{'action': 'press_{said}'}}]</answer>"
            found = task.score(row, text, context())
            assert found.metrics["correct"] == float(said == "esc"), "names are compared"


def _gui_r1(said: list[int], share: tuple[float, float], shown: tuple[int, int]) -> float:
    """Their dataset.py scales the truth to the picture that the model gets; r1gui.py compares there."""
    gt_bbox = (share[0] * shown[0], share[1] * shown[1])
    return float((said[0] - gt_bbox[0]) ** 2 + (said[1] - gt_bbox[1]) ** 2 < 140**2)


@pytest.mark.parametrize("shown", [(1080, 2400), (672, 1456), (1512, 3360)])
def test_gui_r1_measures_its_140_pixels_in_the_picture_that_the_model_sees(
    shown: tuple[int, int],
) -> None:
    row = sample({"action": "click", "point": [540, 1200]})
    task, ctx = GuiAction(preset="gui_r1"), context(CoordFrame.ABS_RESIZED, shown)
    right = set()
    for dx, dy in ((0, 0), (130, 0), (139, 0), (141, 0), (0, -139), (0, 141), (99, 98), (99, 100)):
        said = [shown[0] // 2 + dx, shown[1] // 2 + dy]
        text = f"[{{'action': 'click', 'point': {said}, 'input_text': 'no input text'}}]"
        found = task.score(row, f"<think>x</think><answer>{text}</answer>", ctx)
        theirs = _gui_r1(said, (0.5, 0.5), shown)
        assert (found.parts["accuracy"], found.metrics["correct"]) == (theirs, theirs), said
        right.add(theirs)
    assert right == {0.0, 1.0}


def test_a_radius_in_pixels_may_be_of_either_picture() -> None:
    row, ctx = sample({"action": "click", "point": [540, 1200]}), context()
    near = '<answer>{"action": "click", "point": [640, 1200]}</answer>'
    rule = {"place": "radius", "radius": 60}
    for scale, right in (("shown", 1), (None, 0)):  # 100 px are 50 px of the picture of 540 px
        task = GuiAction(accuracy={**rule, "scale": scale})
        assert task.score(row, near, ctx).metrics["correct"] == right, scale


@pytest.mark.parametrize(
    "text",
    [
        '[{"action": "click", "point": [200, 300]}, {"action": "wait"}]',
        "click(200, 300)",
        "{}",
        '{"action": "click", "point": [[200, 300], [9, 9]]}',
        "__import__('os').getcwd()",
    ],
)
def test_hedging_and_code_earn_nothing(text: str) -> None:
    found = score(text, CLICK)
    assert (
        not found.parsed
        and found.value == 0
        and set(found.metrics.values()) == {0.0}
        and found.detail["gold_boxes"]
    )


@settings(max_examples=80, deadline=None)
@given(
    st.text(max_size=120) | st.text(alphabet='{}[]":, actionclkpe0123', max_size=120),
    st.sampled_from(PRESETS),
)
def test_any_text_gets_a_bounded_score(text: str, preset: str | None) -> None:
    task, row = GuiAction(preset=preset), sample(CLICK)
    for body in (
        text,
        f"<answer>{text}</answer>",
        f'<answer>{{"action": "type", "text": {json.dumps(text)}}}</answer>',
    ):
        found = task.score(row, body, context())
        assert task.value_range[0] <= found.value <= task.value_range[1] and (
            found.parsed or found.reason
        )
        json.dumps(found.detail, ensure_ascii=False).encode("utf-8")


# data


@pytest.mark.parametrize(
    ("answer", "frame", "stored"),
    [
        (
            {"action": "tap", "point": [100, 500]},
            "rel1000",
            {"action": "click", "point": [108, 1200]},
        ),
        (
            {"action": "click", "bbox": [0.1, 0.1, 0.2, 0.2]},
            "rel1",
            {"action": "click", "bbox": [108, 240, 216, 480]},
        ),
        (
            {"action": "click", "point": [5, 6], "bbox": [1, 2, 9, 9]},
            "abs_orig",
            {"action": "click", "point": [5, 6], "bbox": [1, 2, 9, 9]},
        ),
        (
            {"action": "open_app", "app_name": "Clock", "text": None},
            "abs_orig",
            {"action": "open_app", "app": "Clock"},
        ),
        ({"action": "press_home"}, "rel1000", {"action": "navigate_home"}),
        ({"action": "input_text", "text": "x"}, "rel1000", {"action": "type", "text": "x"}),
        (
            {"action": "scroll", "direction": "down"},
            "abs_orig",
            {"action": "scroll", "direction": "down"},
        ),
    ],
)
def test_steps_are_stored_in_one_spelling_and_in_pixels(
    answer: dict[str, Any], frame: str, stored: dict[str, Any]
) -> None:
    found = GuiAction().check_answer(answer, CoordFrame(frame), [SIZE], {})
    assert found.keys() == stored.keys()
    assert {k: v if isinstance(v, str) else pytest.approx(v) for k, v in stored.items()} == found


@pytest.mark.parametrize(
    ("answer", "params", "message"),
    [
        ("click", {}, "an action such as"),
        ({"action": "fly"}, {}, "unknown_action"),
        ({"action": "click"}, {}, "no point; add it"),
        ({"action": "type"}, {}, "no text; add it"),
        ({"action": "scroll"}, {}, "no direction"),
        ({"action": "click", "point": [2000, 5]}, {}, "inside the picture"),
        ({"action": "click", "bbox": [9, 9, 2, 2]}, {}, "x1 < x2"),
        ({"action": "double_click", "point": [1, 1]}, {}, "the mobile space"),
        ({"action": "wait"}, {"space": "car"}, "params.space"),
        ({"action": "click", "point": ["a", 1]}, {}, "bad_point"),
        ({"action": "wait"}, {"image_index": 4}, "image_index"),
    ],
)
def test_broken_steps_say_what_to_fix(answer: Any, params: dict[str, Any], message: str) -> None:
    with pytest.raises(RowError, match=message):
        GuiAction().check_answer(answer, CoordFrame.ABS_ORIG, [SIZE], params)


def test_the_space_comes_from_the_row_its_platform_or_the_task() -> None:
    task = GuiAction()
    assert [
        task.space_of(p)
        for p in (
            {},
            {"platform": "web"},
            {"platform": "ios"},
            {"space": "desktop", "platform": "web"},
        )
    ] == ["mobile", "web", "mobile", "desktop"]
    assert (
        score(
            '{"action": "double_click", "point": [20, 30]}',
            {"action": "double_click", "bbox": [10, 20, 90, 44]},
            space="desktop",
        ).metrics["correct"]
        == 1
    )


@pytest.mark.parametrize(
    "truth",
    [{"action": "press_enter"}, {"action": "hotkey", "keys": "enter"}, {"action": "enter"}],
)
@pytest.mark.parametrize("space", ["desktop", "web", "any"])
def test_enter_is_enter_in_truth_and_answer(truth: dict[str, Any], space: str) -> None:
    task = GuiAction(space=space, answers="native", answer_format="bare")
    right = (
        "pyautogui.press('enter')",
        "pyautogui.press(keys=['enter'])",
        "Action: hotkey(key='enter')",
        '{"action": "key", "keys": ["enter"]}',
        "PRESS_ENTER",
        '{"action": "press_enter"}',
    )
    wrong = ("pyautogui.press('tab')", '{"action": "hotkey", "keys": "ctrl+enter"}')
    row = sample(truth, space=space)
    for text in (*right, *wrong):
        assert task.score(row, text, context()).metrics["correct"] == float(text in right), text


TYPED = {"action": "type", "text": "abc", "bbox": [10, 20, 60, 60]}


def _prompted(space: str, **said: Any) -> str:
    """The action as the prompt of the space shows it, filled in."""
    [shown] = [
        json.loads(part.replace("[x, y]", "[0, 0]"))
        for part in action_words(space).split("; ")
        if '"type"' in part
    ]
    return json.dumps({key: said.get(key, value) for key, value in shown.items()})


@pytest.mark.parametrize("space", ["mobile", "desktop", "any"])
def test_gold_without_a_place_has_what_the_prompt_shows(space: str) -> None:
    row = sample({"action": "type", "text": "abc"}, space=space)
    assert GuiAction(space=space).gold_answer(row, context()) == _prompted(space, text="abc")


@pytest.mark.parametrize("space", sorted(SPACES))
@pytest.mark.parametrize("preset", PRESETS)
def test_what_the_prompt_asks_of_a_text_is_enough(space: str, preset: str | None) -> None:
    task = GuiAction(preset=preset, space=space, answer_format="answer", frame=None)
    for text, point, right in (
        ("abc", [30, 40], True),
        ("xyz", [30, 40], preset == "ui_r1"),
    ):
        said = _prompted(space, text=text, point=point)
        assert score(said, TYPED, task=task, space=space).metrics["correct"] == right, said


@pytest.mark.parametrize(
    ("space", "place", "right"),
    [
        ("web", {}, False),
        ("any", {}, True),
        ("mobile", {}, True),
        ("desktop", {}, True),
        *((space, {"point": [30, 40]}, True) for space in sorted(SPACES)),
        *((space, {"point": [300, 400]}, False) for space in sorted(SPACES)),
    ],
)
def test_where_a_text_goes_counts_as_in_mind2web_where_it_is_asked_for_or_said(
    space: str, place: dict[str, Any], right: bool
) -> None:
    """Mind2Web's step is right with the element and the text; GUI-R1's and OS-Atlas's programs compare the text alone."""
    text = json.dumps({"action": "type", "text": "abc", **place})
    assert score(text, TYPED, task=GuiAction(space=space), space=space).metrics["correct"] == right
    for mode in ("gui_r1", "os_atlas", "ui_r1", "odyssey"):
        lenient = GuiAction(mode=mode, space=space)
        assert score(text, TYPED, task=lenient, space=space).metrics["correct"] == 1, mode
    missed = json.dumps({"action": "wait", **place})
    assert score(missed, TYPED, task=GuiAction(space=space), space=space).metrics["correct"] == 0


@pytest.mark.parametrize("frame", [CoordFrame.ABS_ORIG, CoordFrame.REL1000])
def test_gui_r1s_point_of_no_place_is_none(frame: CoordFrame) -> None:
    task = GuiAction(spelling="gui_r1")
    assert "'point' is [-100, -100] where there is none" in task._words(sample(TYPED))
    for point, right in (([-100, -100], 1), ([-90, -100], 0)):
        text = f"[{{'action': 'type', 'point': {point}, 'input_text': 'abc'}}]"
        assert score(text, TYPED, frame, task=task).metrics["correct"] == right
    text = "[{'action': 'click', 'point': [-100, -100], 'input_text': 'no input text'}]"
    assert score(text, CLICK, frame, task=task).metrics["correct"] == 0
    other = '{"action": "type", "point": [-100, -100], "text": "abc"}'
    assert score(other, TYPED, frame).metrics["correct"] == 0, "in JSON a place is left out"


def test_a_click_takes_the_box_that_its_parameters_name() -> None:
    row = sample({"action": "click", "point": [200, 300]}, sam2_bbox=[150, 250, 450, 550])
    assert true_action(row).box == (150, 250, 450, 550)
    assert (
        GuiAction()
        .score(row, '<answer>{"action": "click", "point": [440, 540]}</answer>', context())
        .metrics["correct"]
        == 1
    )


def test_examples_load_in_every_space_and_broken_rows_name_their_line(tmp_path: Path) -> None:
    for space in SPACES:
        task = task_from_spec("gui_action", {"space": space})
        rows = list(task.load(task.example_data(str(tmp_path / space)) or ""))
        assert len(rows) == 12 and len({r.answer["action"] for r in rows}) > 5
    path = tmp_path / "mobile" / "data.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], lines[1].replace('"long_press"', '"long_prs"')]))
    with pytest.raises(DataError, match=r"row 2: .*unknown_action"):
        list(GuiAction().load(str(path)))


@pytest.mark.parametrize("name", ["android_control", "gui_odyssey", "gui_r1"])
def test_published_formats_give_steps_whose_gold_is_right_by_every_rule(
    name: str, tmp_path: Path
) -> None:
    fixture = Path(__file__).resolve().parents[2] / "assets" / "fixtures" / name
    shutil.copytree(fixture, tmp_path / name)  # a reader may unpack pictures beside its file
    rows = list(GuiAction().load(str(tmp_path / name)))
    assert rows
    for preset in ("strict", "os_atlas", "odyssey"):
        task = GuiAction(preset=preset)
        for row in rows:
            wh = (row.params["width"], row.params["height"])
            ctx = RewardContext(1, 1, CoordFrame.REL1000, (ImageSize(wh, wh),))
            assert task.score(row, task.gold(row, ctx), ctx).value == pytest.approx(1), row.answer


def test_the_prompt_shows_goal_history_and_the_actions_of_the_space() -> None:
    row = sample(CLICK, history=["open settings", "scroll down"])
    [message] = GuiAction().messages(row, Template("t", CoordFrame.REL1000))
    text = message["content"][-1]["text"]
    assert (
        "Goal: open the clock" in text
        and "1. open settings; 2. scroll down" in text
        and "0-1000" in text
    )
    assert '{"action": "click", "point": [x, y]}' in text and "swipe" not in text
    sly = Sample(
        "2",
        "gui_action",
        "s",
        "type {history} and {actions}",
        row.answer,
        ("a.png",),
        params={"history": "earlier {question}"},
    )
    [message] = GuiAction().messages(sly, Template("t", CoordFrame.REL1000))
    assert "Goal: type {history} and {actions}" in message["content"][-1]["text"], (
        "braces of a question stay as they are"
    )
    assert "earlier {question}" in message["content"][-1]["text"]
    long = sample(CLICK, history=["x" * 100] * 1000)
    [message] = GuiAction().messages(long, Template("t", CoordFrame.REL1000))
    assert len(message["content"][-1]["text"]) < 5000
    assert all(
        json.loads(part)["action"]
        for part in action_words("desktop").replace("[x, y]", "[1, 2]").split("; ")
    )


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"space": "mobil"}, "Did you mean 'mobile'"),
        ({"mode": "os_atls"}, "Did you mean 'os_atlas'"),
        ({"accuracy": {"raduis": 3}}, "Did you mean 'radius'"),
        ({"preset": "odysey"}, "Did you mean 'odyssey'"),
    ],
)
def test_wrong_parameters_are_named(params: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        GuiAction(**params)


def test_a_pickled_task_scores_the_same() -> None:
    task = GuiAction(preset="gui_r1")
    copy = pickle.loads(pickle.dumps(task))
    text = '<think></think><answer>{"action": "click", "point": [200, 300]}</answer>'
    assert copy.score(sample(CLICK), text, context()) == task.score(sample(CLICK), text, context())
