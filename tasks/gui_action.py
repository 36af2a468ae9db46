"""GUI actions: a screenshot, a goal and what was done so far; the next action as JSON. Right needs type, place and text.

The answer is {"action": "click", "point": [x, y]}, {"action": "type", "text": "..."} and so on, from the table of the action
space (mmrl.rewards.gui_actions.SPACES); it is read as data. The default reward is the strict rule; what papers count as right is
far more lenient (a circle of 14 % of the screen) and has names: see `mode`. Actions without arguments stay in every
denominator.

    python -c "from mmrl.tasks.gui_action import GuiAction; print(GuiAction(space='web').prompt)"
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from mmrl.coords import CoordFrame, to_orig
from mmrl.errors import ConfigError, did_you_mean
from mmrl.registry import register
from mmrl.rewards.gui_actions import (
    PLACED,
    SPACES,
    TYPED,
    Action,
    action_from,
    make_action_reward,
    make_rule,
    match_action,
    parse_action,
    text_kind,
)
from mmrl.rewards.reading.calls import one_call
from mmrl.rewards.router import Part, PartFactory
from mmrl.task import Template
from mmrl.tasks.base import FRAME_WORDS, AnswerError, AnswerTask, Prediction, picture_size
from mmrl.tasks.boxes import format_point, from_picture
from mmrl.tasks.gui_grounding import draw_window, spell_inside
from mmrl.tasks.metrics.gui import true_action, write_actions
from mmrl.tasks.truths import of_sample
from mmrl.types import ImageSize, RewardContext, Sample, Score

__all__ = ["GuiAction", "action_words"]

_EXAMPLES = {
    "point": '"point": [x, y]',
    "end": '"end": [x, y]',
    "text": '"text": "..."',
    "app": '"app": "..."',
    "direction": '"direction": "up|down|left|right"',
    "keys": '"keys": "ctrl+c"',
}
_SPELLINGS = ("json", "ui_r1", "gui_r1")
_PEER_NAMES = {
    ("ui_r1", "type"): "input_text",
    ("gui_r1", "navigate_back"): "press_back",
    ("gui_r1", "navigate_home"): "press_home",
}
_NO_POINT: tuple[float, float] = (-100, -100)  # GUI-R1's, whatever the frame
_MOST_HISTORY = 2000  # characters of history in a prompt; the newest are kept


def action_words(space: str) -> str:
    """The actions of a space as a prompt shows them, one JSON object each."""
    return "; ".join(
        "{"
        + ", ".join(
            [
                f'"action": "{name}"',
                *(_EXAMPLES[a] for a in arguments),
                *([_EXAMPLES["point"]] if name in TYPED and space in PLACED else []),
            ]
        )
        + "}"
        for name, (arguments, _) in SPACES[space].items()
        if name != "swipe"
    )


def _peer_words(space: str, spelling: str) -> str:
    """What ui_r1 or gui_r1 ask for: one dict in a list, every key present."""
    names = ", ".join(
        repr(_PEER_NAMES.get((spelling, name), name)) for name in SPACES[space] if name != "swipe"
    )
    if spelling == "ui_r1":
        return f"one of {names}, written as [{{'action': 'click', 'coordinate': [x, y]}}]"
    return (
        f"one of {names}, written as [{{'action': 'click', 'point': [x, y], 'input_text': 'no input text'}}]; a text to type, "
        "an app to open, keys to press or the direction of a scroll (up, down, left, right) stands in 'input_text', and "
        f"'point' is {list(_NO_POINT)} where there is none"
    )


def _peer_spelling(table: Mapping[str, Any], spelling: str) -> str:
    """An action in plain data as UI-R1 or GUI-R1 write it: single quotes, every key present, [-100, -100] for no point."""
    name = _PEER_NAMES.get((spelling, table["action"]), table["action"])
    point = table.get("point", [0, 0] if spelling == "ui_r1" else list(_NO_POINT))
    end = {"end": table["end"]} if "end" in table else {}  # of a drag, which they do not have
    if spelling == "ui_r1":
        return repr([{"action": name, "coordinate": point, **end}])
    text = next(
        (table[key] for key in ("text", "app", "keys", "direction") if table.get(key)),
        "no input text",
    )
    return repr([{"action": name, "point": point, "input_text": text, **end}])


def _spell(action: Action) -> dict[str, Any]:
    """An Action as plain data, the form of Sample.answer."""
    table = {
        "action": action.action,
        "point": action.point,
        "bbox": action.box,
        "end": action.end,
        text_kind(action.action): action.text,
        "direction": action.direction,
    }
    return {
        key: list(value) if isinstance(value, tuple) else value
        for key, value in table.items()
        if value is not None
    }


@of_sample
def _true_text(sample: Sample) -> str:
    """The true action as JSON."""
    return json.dumps(_spell(true_action(sample)))


def _size(sample: Sample, ctx: RewardContext) -> ImageSize:
    return picture_size(sample, ctx, sample.params.get("image_index", 0))


def _accuracy_part(mode: str, asked: Callable[[Mapping[str, Any]], bool], **params: Any) -> Part:
    reward = make_action_reward(mode, **params)

    def accuracy(predicted: Prediction, sample: Sample, ctx: RewardContext) -> float:
        size = _size(sample, ctx)
        return reward(
            predicted.value,
            true_action(sample),
            size.orig_wh,
            size.resized_wh,
            asked(sample.params),
        )

    return accuracy


@register("gui_action")
class GuiAction(AnswerTask):
    """Predict the next action. Beside the parameters of AnswerTask:

    mode      strict (default), ui_r1, gui_r1, os_atlas or odyssey: the reward, and what the metrics count as right; settings
              of mmrl.rewards.gui_actions.MatchRule (place, radius, scale, inclusive, around, text, checked, typed) in `accuracy`
    space     mobile (default), desktop, web or any (all of their actions); per sample in params.space, or params.platform
              where that is one of these names
    spelling  how the prompt asks for the action: json (default), ui_r1 or gui_r1 (a Python list of one dict with their keys)
    """

    headline: ClassVar[str] = "correct"
    ask: ClassVar[str] = (
        "Goal: {question}\n{history}What is the next action on this screen? Points are {frame}. "
        "Actions: {actions}."
    )
    shape: ClassVar[str] = "one action as JSON"
    default_mode: ClassVar[str] = "strict"
    own_params: ClassVar[Mapping[str, Any]] = {"space": "mobile", "spelling": "json"}
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        # type + place + format, each 0 or 1; accuracy is the mean of the first two
        "ui_r1": {
            "mode": "ui_r1",
            "answer_format": "think",
            "spelling": "ui_r1",
            "format_rule": "tags",
            "frame": "abs_resized",
            "weights": {"accuracy": 2.0, "format": 1.0},
            "normalise": False,
        },
        "gui_r1": {
            "mode": "gui_r1",
            "answer_format": "think",
            "spelling": "gui_r1",
            "format_rule": "gui_r1",
            "frame": "abs_resized",
            "weights": {"accuracy": 0.8, "format": 0.2},
        },
        "os_atlas": {"mode": "os_atlas"},
        "odyssey": {"mode": "odyssey"},
        "strict": {"mode": "strict"},
    }
    metric_names: ClassVar[tuple[str, ...]] = (
        "type_correct",
        "grounding_correct",
        "text_correct",
        "correct",
    )

    def __init__(self, **params: Any) -> None:
        super().__init__(**params)
        if self.settings["prompt"] is None and self.settings["spelling"] != "json":
            self.prompt = self.prompt.replace(self.shape, "that list")

    def factories(self) -> Mapping[str, PartFactory]:
        """accuracy and format."""
        space = self.settings["space"]
        if space not in SPACES:
            raise ConfigError(
                f"unknown space {space!r} of gui_action; expected {', '.join(SPACES)}."
                f"{did_you_mean(str(space), SPACES)}"
            )
        if self.settings["spelling"] not in _SPELLINGS:
            raise ConfigError(
                f"unknown spelling {self.settings['spelling']!r} of gui_action; expected {', '.join(_SPELLINGS)}."
                f"{did_you_mean(str(self.settings['spelling']), _SPELLINGS)}"
            )
        self.rule = make_rule(self.settings["mode"], **self.settings["accuracy"])
        return {
            "accuracy": functools.partial(_accuracy_part, asked=self._asks_place),
            "format": self.format_factory(),
        }

    def space_of(self, params: Mapping[str, Any]) -> str:
        """The action space of a sample: params.space, else params.platform where it names one, else the task's."""
        platform = params.get("platform")
        return str(
            params.get("space") or (platform if platform in SPACES else self.settings["space"])
        )

    def _asks_place(self, params: Mapping[str, Any]) -> bool:
        """Whether a sample's prompt asks where to type and select."""
        return self.settings["spelling"] == "json" and self.space_of(params) in PLACED

    def fill_prompt(self, prompt: str, sample: Sample, template: Template) -> str:
        """{frame}, {actions}, {history} (params.history: a text, or a list of steps) and {question} filled in."""
        steps = sample.params.get("history") or []
        history = (
            "; ".join(f"{i}. {step}" for i, step in enumerate(steps, 1))
            if isinstance(steps, list)
            else str(steps)
        )
        told = f"Done so far: {history[-_MOST_HISTORY:]}\n" if history else ""
        text = prompt.replace("{frame}", FRAME_WORDS[CoordFrame(template.frame)])
        head, asked, tail = text.replace("{actions}", self._words(sample)).partition("{question}")
        head, tail = (part.replace("{history}", told) for part in (head, tail))
        return head + (sample.question if asked else "") + tail

    def _words(self, sample: Sample) -> str:
        space, spelling = self.space_of(sample.params), self.settings["spelling"]
        return action_words(space) if spelling == "json" else _peer_words(space, spelling)

    def _text(self, table: Mapping[str, Any]) -> str:
        """An action in plain data as the prompt asks for it."""
        spelling = self.settings["spelling"]
        return (
            json.dumps(table, ensure_ascii=False)
            if spelling == "json"
            else _peer_spelling(table, spelling)
        )

    def check_answer(
        self,
        value: Any,
        frame: CoordFrame,
        sizes: Sequence[tuple[int, int]],
        params: Mapping[str, Any],
    ) -> dict[str, Any]:
        """{"action", "point" and / or "bbox", "end", "text", "app", "keys", "direction"} in one spelling, in original pixels."""
        from mmrl.tasks.readers.common import GeometryError, RowError, check_box

        space, index = self.space_of(params), params.get("image_index", 0)
        if space not in SPACES:
            raise RowError(
                f"params.space as one of {', '.join(SPACES)}", repr(space)[:40], "correct it"
            )
        if not isinstance(value, Mapping):
            raise RowError(
                'an action such as {"action": "click", "bbox": [x1, y1, x2, y2]}',
                repr(value)[:80],
                "write an object",
            )
        if type(index) is not int or not 0 <= index < len(sizes):
            raise RowError(
                "a screenshot, and params.image_index within the pictures",
                f"{len(sizes)} pictures, index {index!r:.20}",
                "name it as 'image'",
            )
        table = {key: entry for key, entry in value.items() if entry is not None}
        boxes = [table.pop(key) for key in ("bbox", "bbox_2d", "box") if key in table]
        try:
            action = action_from(table, space)
        except ValueError as err:
            raise RowError(
                f"an action of the {space} space: {', '.join(SPACES[space])}",
                f"{err}: {dict(value)!r:.120}",
                "correct the row, or set 'space'",
            ) from err
        (width, height), wanted = sizes[index], SPACES[space][action.action][0]
        spelled = _spell(action.moved(lambda v: to_orig(v, frame, sizes[index], sizes[index])))
        if boxes and ("point" in wanted or action.action in TYPED):
            spelled["bbox"] = list(check_box(boxes[0], frame, sizes[index]))
        missing = [
            a for a in wanted if a not in spelled and not (a == "point" and "bbox" in spelled)
        ]
        if missing:
            raise RowError(
                f"{', '.join(wanted)} with action {action.action}",
                f"no {', '.join(missing)}",
                "add it",
            )
        for key in ("point", "end"):
            x, y = spelled.get(key, (0, 0))
            if not (-1 <= x <= width + 1 and -1 <= y <= height + 1):
                raise GeometryError(
                    f"a {key} inside the picture of {width} x {height}",
                    f"{table!r:.120} in frame {frame.value}",
                    "correct it, or declare the frame of the numbers",
                )
        return spelled

    def parse(self, answer: str, sample: Sample, ctx: RewardContext) -> Action:
        """Exactly one action of the sample's space, its points in original pixels. Reasons: mmrl.rewards.gui_actions."""
        parsed = parse_action(answer, self.space_of(sample.params))
        if parsed.action is None:
            raise AnswerError(parsed.reason or "not_an_action")
        action, size = parsed.action, _size(sample, ctx)
        if self.settings["spelling"] == "gui_r1" and action.point == _NO_POINT:
            action = replace(action, point=None)
        return action.moved(lambda v: to_orig(v, ctx.frame, size.resized_wh, size.orig_wh))

    def native(self, answer: str, sample: Sample, ctx: RewardContext) -> str | None:
        """The one action of a released model, see mmrl.rewards.reading.calls."""
        return one_call(answer, self.space_of(sample.params))

    def measure(self, value: Action, sample: Sample, ctx: RewardContext) -> Mapping[str, float]:
        """By the task's rule: type_correct; grounding_correct and text_correct (with the right type, and the place and text
        right or not asked for); correct = all of them, the step's success."""
        size = _size(sample, ctx)
        match = match_action(
            value,
            true_action(sample),
            self.rule,
            size.orig_wh,
            size.resized_wh,
            self._asks_place(sample.params),
        )
        return {
            "type_correct": float(match.type),
            "grounding_correct": float(match.type and match.place is not False),
            "text_correct": float(match.type and match.text is not False),
            "correct": float(match.step),
        }

    def describe(
        self, value: Action | None, sample: Sample, ctx: RewardContext
    ) -> Mapping[str, Any]:
        """Points and boxes in original pixels, both actions as JSON text, pred_action as data for submission files."""
        true = true_action(sample)
        told: dict[str, Any] = {}
        if value is not None:
            plain = _spell(value)
            told = {"pred_action": plain, "pred_text": json.dumps(plain)}
        return {
            **told,
            "gold_text": _true_text(sample),
            "frame": CoordFrame.ABS_ORIG.value,
            "pred_points": [list(value.point)] if value is not None and value.point else [],
            "gold_points": [list(true.point)] if true.point else [],
            "gold_boxes": [list(true.box)] if true.box else [],
            "size": list(_size(sample, ctx).orig_wh),
            "place_asked": self._asks_place(sample.params),
        }

    def _written(self, sample: Sample, ctx: RewardContext, action: Action) -> dict[str, Any]:
        """Plain data of an action with points on the grid of ctx.frame."""
        size = _size(sample, ctx)
        table = {**_spell(action)}
        for key in ("point", "end"):
            if key in table:
                table[key] = json.loads(
                    format_point(from_picture(table[key], ctx.frame, size), ctx.frame)
                )
        return table

    def gold_answer(self, sample: Sample, ctx: RewardContext) -> str:
        """The right action as JSON; a point inside the element's box."""
        true = true_action(sample)
        table = self._written(sample, ctx, true)
        box = table.pop("bbox", None)
        if box is not None:
            table["point"] = json.loads(
                spell_inside(
                    box, ctx.frame, _size(sample, ctx), strict=self.rule.place == "strictly_inside"
                )
            )
        return self._text(table)

    def wrong_answer(self, sample: Sample, ctx: RewardContext) -> str:
        """Another action of the space: its type is wrong, so nothing is earned."""
        space = SPACES[self.space_of(sample.params)]
        other = next(
            name
            for name in ("wait", "complete")
            if name in space and name != sample.answer["action"]
        )
        return self._text({"action": other})

    def benchmark(self, pairs: Sequence[tuple[Sample, Score]], folder: Path) -> Mapping[str, float]:
        """AndroidControl's numbers under every published rule, and gui_actions.jsonl; see mmrl.tasks.metrics.gui."""
        return write_actions(pairs, folder)

    def example_data(self, folder: str) -> str:
        """12 drawn windows, each with one step of the task's action space; returns their data.jsonl."""
        space = self.settings["space"]
        names = [name for name in SPACES[space] if name != "swipe"]
        rows = []
        for index in range(12):
            window, name = draw_window(Path(folder), index), names[index % len(names)]
            label, box = window.buttons[0]
            values: dict[str, dict[str, Any]] = {
                "point": {"bbox": box},
                "end": {"end": [window.size[0] // 2, window.size[1] - 4]},
                "app": {"app": "Clock"},
                "text": {"text": "two words"},
                "direction": {"direction": "down"},
                "keys": {"keys": "ctrl+s"},
            }
            answer: dict[str, Any] = {"action": name}
            for argument in SPACES[space][name][0]:
                answer.update(values[argument])
            rows.append(
                {
                    "id": f"step-{index:03d}",
                    "image": window.name,
                    "question": f"{name.replace('_', ' ')}, {label}",
                    "answer": answer,
                    "source": "steps",
                    "params": {"history": ["open the app"] * (index % 3)},
                }
            )
        path = Path(folder) / "data.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return str(path)

    def summarize(self, rows: Sequence[Score]) -> Mapping[str, float]:
        """type_accuracy and step_accuracy over all rows, by the task's rule; parse_failure_rate, truncated_rate."""
        if not rows:
            return {}
        shares = {
            out: sum(row.metrics.get(name, 0.0) for row in rows) / len(rows)
            for out, name in (("type_accuracy", "type_correct"), ("step_accuracy", "correct"))
        }
        return {**shares, **super().summarize(rows)}
