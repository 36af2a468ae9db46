"""GUI grounding: a screenshot and an instruction, one point to click. In the element's box is right, beside it is wrong.

The default reward is the benchmark's own rule (ScreenSpot: inside the box, edges included): where in a button one clicks
makes no difference to the button, so nothing else is paid. `gaussian` (GUI-G2) and `distance` give denser signals. A box
in place of a point is reduced to its centre. With `label_free: true` the truth is not paid at all: the answers of a group
vote (GUI-RCPO).

    python -m mmrl.tasks.pages runs/pages --count 200 && mmrl tasks check gui_grounding --data runs/pages
"""

from __future__ import annotations

import functools
import json
import math
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from mmrl.coords import CoordFrame, to_orig
from mmrl.errors import ConfigError, DataError, did_you_mean
from mmrl.registry import register
from mmrl.rewards.format import wrap_answer
from mmrl.rewards.format_rules import make_format_rule
from mmrl.rewards.gui import Point, centre, in_box, make_point_reward, parse_point, region_votes
from mmrl.rewards.official import Asked
from mmrl.rewards.parsing import Box
from mmrl.rewards.reading.calls import call_place
from mmrl.rewards.reading.places import one_place
from mmrl.rewards.router import Part, PartFactory
from mmrl.tasks.base import AnswerError, AnswerTask, Prediction, picture_size
from mmrl.tasks.boxes import beside, format_box, from_picture, grid_step, rounded_box
from mmrl.tasks.truths import of_sample
from mmrl.types import ImageSize, RewardContext, Sample, Score

__all__ = ["GuiGrounding", "Pointing", "Window", "draw_window", "make_windows", "spell_inside"]

REPLIES = {
    "point": ("the point to click", "[x, y]"),
    "box": ("its bounding box", "[x1, y1, x2, y2]"),
}
"""What is asked for, in words and as the answer's shape."""
CLICKS = {
    "ui_r1": "[{'action': 'click', 'coordinate': [x, y]}]",
    "gui_r1": "[{'action': 'click', 'point': [x, y], 'input_text': 'no input text'}]",
}
"""A click at a point as UI-R1 and GUI-R1 ask for it."""
_PLAIN = {
    False: re.compile(r"\[ ?-?\d+(?:, ?-?\d+){1,3} ?\]"),
    True: re.compile(r"\[ ?-?[\d.]+(?:, ?-?[\d.]+){1,3} ?\]"),
}
_MOST_DECIMALS = 6


class Pointing(NamedTuple):
    """The point that was answered and, when a box was, the box; in pixels of the original picture."""

    point: Point
    box: Box | None = None


def _size(sample: Sample, ctx: RewardContext) -> ImageSize:
    return picture_size(sample, ctx, sample.params.get("image_index", 0))


def spell_inside(
    box: Sequence[float], frame: CoordFrame, size: ImageSize, *, strict: bool = False
) -> str:
    """The text '[x, y]' nearest to the middle of `box` (original pixels) that is read back as a point inside it.

    Whole units of the frame (3 decimals for rel1) where one lies in the box; an element thinner than that grid gets the
    decimals it needs. `strict`: not on the edges.
    """
    middle, text = centre(from_picture(box, frame, size)), ""
    for digits in range(_MOST_DECIMALS + 1):
        grid = grid_step(frame) / 10**digits
        # the nearest is in the box if any is
        ticks = [math.floor(value / grid + 0.5) for value in middle]
        places = digits + (3 if frame is CoordFrame.REL1 else 0)
        text = f"[{ticks[0] * grid:.{places}f}, {ticks[1] * grid:.{places}f}]"
        if in_box(
            to_orig(json.loads(text), frame, size.resized_wh, size.orig_wh), box, strict=strict
        ):
            break
    return text


@of_sample
def _best(sample: Sample, frame: CoordFrame, size: ImageSize, reply: str) -> Pointing:
    """What the best answer stands for once its coordinates are rounded to the grid of `frame`."""
    if reply == "box":
        box = rounded_box(sample.answer, frame, size)
        return Pointing(centre(box), box)
    x, y = to_orig(
        json.loads(spell_inside(sample.answer, frame, size)), frame, size.resized_wh, size.orig_wh
    )
    return Pointing((x, y))


def _accuracy_part(mode: str, reply: str = "point", reachable: bool = True, **params: Any) -> Part:
    """A point reward of mmrl.rewards.gui; a gaussian of point replies pays no coverage unless told so."""
    if mode == "gaussian" and reply == "point":
        params = {"coverage": 0.0, **params}
    reward = make_point_reward(mode, **params)

    def accuracy(predicted: Prediction, sample: Sample, ctx: RewardContext) -> float:
        if sample.answer is None:
            return 0.0  # the group's votes take its place
        found, size, best = predicted.value, _size(sample, ctx), 1.0
        if reachable and mode == "gaussian":
            best = (
                reward(*_best(sample, ctx.frame, size, reply), sample.answer, size.orig_wh) or 1.0
            )
        return min(1.0, reward(found.point, found.box, sample.answer, size.orig_wh) / best)

    return accuracy


def _format_part(
    answer_format: str,
    plain: bool = False,
    reply: str = "point",
    rule: str = "envelope",
    kind: str = "",
) -> Part:
    """The format rule; a box where a box was asked for; with `plain` also a bare list of whole numbers inside (decimals only
    in frame rel1)."""

    value = make_format_rule(rule, answer_format, kind)

    def form(predicted: Prediction, sample: Sample, ctx: RewardContext) -> float:
        if reply == "box" and predicted.value.box is None:
            return 0.0
        if plain and not _PLAIN[ctx.frame is CoordFrame.REL1].fullmatch(predicted.answer):
            return 0.0
        return value(predicted.text)

    return form


class Window(NamedTuple):
    """A drawn screen: where it was saved, its size, and its buttons as (name, box in pixels)."""

    name: str
    size: tuple[int, int]
    buttons: tuple[tuple[str, list[int]], ...]


def draw_window(folder: Path, index: int) -> Window:
    """Example `index`: one to three coloured, named buttons on a grey window, saved as folder/images/window-INDEX.png."""
    from PIL import Image, ImageDraw

    from mmrl.tasks.scenes import COLORS

    rng = random.Random(index)
    width, height = ((448, 280), (196, 392), (336, 336))[index % 3]
    picture = Image.new("RGB", (width, height), (232, 232, 236))
    draw = ImageDraw.Draw(picture)
    draw.rectangle((0, 0, width, 20), fill=(70, 74, 84))
    count = 1 + index % 3
    buttons = []
    for place, color in enumerate(rng.sample(list(COLORS), count)):
        wide, high = rng.randrange(width // 3, width // 2, 2), rng.randrange(24, 60, 2)
        x, y = rng.randrange(4, width - wide - 4), 28 + place * (height - 32) // count
        draw.rounded_rectangle((x, y, x + wide - 1, y + high - 1), 6, fill=COLORS[color])
        draw.text((x + wide / 2, y + high / 2), color, fill="black", anchor="mm")
        buttons.append((f"{color} button", [x, y, x + wide, y + high]))
    name = f"images/window-{index:03d}.png"
    (folder / "images").mkdir(parents=True, exist_ok=True)
    picture.save(folder / name)
    return Window(name, (width, height), tuple(buttons))


def make_windows(folder: str, count: int = 12) -> str:
    """Write `count` windows with one question each into `folder`; returns their data.jsonl."""
    platforms = ("desktop", "mobile", "web")
    rows = []
    for index in range(count):
        window = draw_window(Path(folder), index)
        label, box = window.buttons[0]
        rows.append(
            {
                "id": f"window-{index:03d}",
                "image": window.name,
                "question": f"click the {label}",
                "answer": box,
                "source": "windows",
                "params": {"platform": platforms[index % 3], "ui_type": "text"},
            }
        )
    path = Path(folder) / "data.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


@register("gui_grounding")
class GuiGrounding(AnswerTask):
    """Point at one element of a screenshot. Beside the parameters of AnswerTask:

    mode        inside (default), gaussian, distance, ui_r1 or gui_r1; their parameters in `accuracy`, see mmrl.rewards.gui
    reply       point (default) or box: what the prompt asks for; `gaussian` pays coverage for boxes, and the format of a box
                is four numbers: a point earns none of it
    label_free  pay the agreement of a group's answers instead of the truth (default false). Rows may then hold
                "answer": null; their metrics are 0, and `mmrl tasks check` needs rows with a truth
    expand      pixels a point grows to each side when a group votes (default 50)
    plain       the format also asks for a bare list of whole numbers (default false)
    spelling    how the prompt asks for a point: plain (default), ui_r1 or gui_r1 (a Python list of one click)
    reachable   the gaussian is divided by what the truth earns once it is rounded to the answer's grid (default true)
    """

    headline: ClassVar[str] = "inside"
    ask: ClassVar[str] = (
        'Find the element of the screenshot for "{question}" and give {what}, coordinates {frame}.'
    )
    shape: ClassVar[str] = REPLIES["point"][1]
    default_mode: ClassVar[str] = "inside"
    own_params: ClassVar[Mapping[str, Any]] = {
        "reply": "point",
        "label_free": False,
        "expand": 50.0,
        "plain": False,
        "reachable": True,
        "spelling": "plain",
    }
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        # point + coverage + format, each counting 1; accuracy is the mean of the first two
        "gui_g2": {
            "mode": "gaussian",
            "accuracy": {"coverage": 0.5, "decimals": 3},
            "reply": "box",
            "plain": True,
            "reachable": False,
            "answer_format": "bare",
            "answers": "native",
            "format_rule": "gui_g2",
            "frame": "abs_resized",
            "weights": {"accuracy": 2.0, "format": 1.0},
            "normalise": False,
        },
        # UI-R1's third part, the action type, is always right here
        "ui_r1": {
            "mode": "ui_r1",
            "answer_format": "think",
            "spelling": "ui_r1",
            "format_rule": "tags",
            "frame": "abs_resized",
            "weights": {"accuracy": 1.0, "format": 1.0},
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
        "gui_rcpo": {
            "label_free": True,
            "answer_format": "bare",
            "weights": {"accuracy": 1.0, "format": 0.0},
        },
    }
    metric_names: ClassVar[tuple[str, ...]] = ("inside", "closeness", "correct")

    def __init__(self, **params: Any) -> None:
        super().__init__(**params)
        spelling = self.settings["spelling"]
        if self.settings["prompt"] is None:
            what, shape = REPLIES[self.settings["reply"]]
            if spelling != "plain":
                what, shape = "the point to click", CLICKS[spelling]
            self.prompt = self.prompt.replace("{what}", what).replace(self.shape, shape)
        self.in_group = self.settings["label_free"]  # type: ignore[misc]  # of this task as it is set up

    def factories(self) -> Mapping[str, PartFactory]:
        """accuracy and format."""
        settings = self.settings
        if settings["reply"] not in REPLIES:
            raise ConfigError(
                f"unknown reply {settings['reply']!r} of gui_grounding; expected {', '.join(REPLIES)}."
                f"{did_you_mean(str(settings['reply']), REPLIES)}"
            )
        for name in ("label_free", "plain", "reachable"):
            if not isinstance(settings[name], bool):
                raise ConfigError(
                    f"expected gui_grounding.{name} to be true or false, found {settings[name]!r}"
                )
        if settings["spelling"] != "plain" and (
            settings["spelling"] not in CLICKS or settings["reply"] != "point"
        ):
            raise ConfigError(
                f"expected gui_grounding.spelling as plain or, for points, {' or '.join(CLICKS)}, found "
                f"{settings['spelling']!r}.{did_you_mean(str(settings['spelling']), CLICKS)}"
            )
        expand = settings["expand"]
        if (
            isinstance(expand, bool)
            or not isinstance(expand, (int, float))
            or not 1 <= expand <= 10_000
        ):
            raise ConfigError(
                f"expected gui_grounding.expand in pixels, 1..10000, found {expand!r}"
            )
        return {
            "accuracy": functools.partial(
                _accuracy_part, reply=settings["reply"], reachable=settings["reachable"]
            ),
            "format": functools.partial(
                _format_part, plain=settings["plain"], reply=settings["reply"]
            ),
        }

    def check_answer(
        self,
        value: Any,
        frame: CoordFrame,
        sizes: Sequence[tuple[int, int]],
        params: Mapping[str, Any],
    ) -> list[float] | None:
        """The element's box in picture params.image_index; with `label_free` also null, a row without a truth."""
        from mmrl.tasks.readers.common import RowError, check_answer_box

        if value is None:
            if self.settings["label_free"]:
                return None
            raise RowError(
                "the element's box as 'answer'",
                "null",
                "add it; rows without a truth need label_free: true",
            )
        return check_answer_box(self.name, value, frame, sizes, params)

    def parse(self, answer: str, sample: Sample, ctx: RewardContext) -> Pointing:
        """Exactly one point, or one box with its centre, in original pixels. Reasons: those of mmrl.rewards.gui.parse_point."""
        parsed = parse_point(answer)
        if parsed.point is None:
            raise AnswerError(parsed.reason or "not_a_point")
        size = _size(sample, ctx)
        x, y = to_orig(parsed.point, ctx.frame, size.resized_wh, size.orig_wh)
        if parsed.box is None:
            return Pointing((x, y))
        x1, y1, x2, y2 = to_orig(parsed.box, ctx.frame, size.resized_wh, size.orig_wh)
        return Pointing((x, y), (x1, y1, x2, y2))

    def asked(self, sample: Sample, ctx: RewardContext) -> Asked:
        """With the size of the frame, in which shares of the picture are to be told."""
        size = _size(sample, ctx)
        return Asked(
            str(self.name),
            sample.answer,
            params=sample.params,
            extent=ctx.frame.extent(size.resized_wh, size.orig_wh),
        )

    def native(self, answer: str, sample: Sample, ctx: RewardContext) -> str | None:
        """The place of one call, or the one point or box of a released model, see mmrl.rewards.reading."""
        size = _size(sample, ctx)
        called = call_place(answer)
        return (
            called
            if called is not None
            else one_place(answer, ctx.frame.extent(size.resized_wh, size.orig_wh))
        )

    def measure(self, value: Pointing, sample: Sample, ctx: RewardContext) -> Mapping[str, float]:
        """inside (the benchmark's hit), closeness (1 - distance to the middle in picture sizes, not below 0), correct.

        All are 0 for a row without a truth."""
        if sample.answer is None:
            return dict.fromkeys(self.metric_names, 0.0)
        (width, height), (x, y) = _size(sample, ctx).orig_wh, centre(sample.answer)
        far = math.hypot((value.point[0] - x) / width, (value.point[1] - y) / height)
        hit = float(in_box(value.point, sample.answer))
        return {"inside": hit, "closeness": max(0.0, 1.0 - far), "correct": hit}

    def describe(
        self, value: Pointing | None, sample: Sample, ctx: RewardContext
    ) -> Mapping[str, Any]:
        """pred_points, pred_boxes (of a box answer), gold_boxes and gold_points, in pixels of the original picture."""
        gold = [list(sample.answer)] if isinstance(sample.answer, (list, tuple)) else []
        return {
            "pred_points": [] if value is None else [list(value.point)],
            "gold_boxes": gold,
            "pred_boxes": [list(value.box)] if value is not None and value.box is not None else [],
            "gold_points": [list(centre(box)) for box in gold],
            "frame": CoordFrame.ABS_ORIG.value,
        }

    def score_in_group(self, sample: Sample, scores: Sequence[Score], index: int) -> Score:
        """With `label_free`, accuracy becomes what the group's answers say about this one (mmrl.rewards.gui.region_votes)."""
        own = scores[index]
        if not self.in_group or not own.parsed:
            return own
        places = [
            next(
                iter([*(s.detail.get("pred_boxes") or []), *(s.detail.get("pred_points") or [])]),
                None,
            )
            if s.parsed
            else None
            for s in scores
        ]
        width, height = sample.params.get("width"), sample.params.get("height")
        votes = region_votes(
            places, (width, height) if width and height else None, float(self.settings["expand"])
        )
        parts = {**own.parts, "accuracy": votes[index]}
        return replace(
            own,
            parts=parts,
            value=math.fsum(own.weights[name] * part for name, part in parts.items()),
        )

    def gold_answer(self, sample: Sample, ctx: RewardContext) -> str:
        """The middle of the element as '[x, y]', always a point inside it; the box itself for replies that are boxes.

        Raises DataError for a row without a truth."""
        self._need_truth(sample)
        size = _size(sample, ctx)
        if self.settings["reply"] == "box":
            return format_box(from_picture(sample.answer, ctx.frame, size), ctx.frame)
        return self._click(
            spell_inside(sample.answer, ctx.frame, size, strict=self.settings["mode"] == "gui_r1")
        )

    def _click(self, point: str) -> str:
        """'[x, y]' as the prompt asks for it."""
        spelling = self.settings["spelling"]
        return point if spelling == "plain" else CLICKS[spelling].replace("[x, y]", point)

    @staticmethod
    def _need_truth(sample: Sample) -> None:
        if sample.answer is None:
            raise DataError(
                f"expected a truth to spell an answer of sample {sample.id!r}, found null; check label-free data on "
                "rows with a box"
            )

    def wrong_answer(self, sample: Sample, ctx: RewardContext) -> str:
        """A point beside the element; where even that earns something (gaussian), one far outside the picture."""
        self._need_truth(sample)
        size = _size(sample, ctx)
        extent = ctx.frame.extent(size.resized_wh, size.orig_wh)
        box = beside(from_picture(sample.answer, ctx.frame, size), extent, grid_step(ctx.frame))
        far = (100 * extent[0], 100 * extent[1], 101 * extent[0], 101 * extent[1])
        texts = [format_box(b, ctx.frame) for b in (box, far)]
        if self.settings["reply"] == "point":
            places = 3 if ctx.frame is CoordFrame.REL1 else 0
            texts = [
                self._click(f"[{x:.{places}f}, {y:.{places}f}]")
                for x, y in (centre(box), centre(far))
            ]
        earned = self.score(sample, wrap_answer(texts[0], self.answer_format), ctx).parts[
            "accuracy"
        ]
        return texts[1] if earned > 0 else texts[0]

    def benchmark(self, pairs: Sequence[tuple[Sample, Score]], folder: Path) -> Mapping[str, float]:
        """ScreenSpot numbers (per cell, mean of cells, micro) and prediction files of the rows with a truth; see
        mmrl.tasks.metrics.gui."""
        from mmrl.tasks.metrics.gui import write_grounding

        return write_grounding([pair for pair in pairs if pair[0].answer is not None], folder)

    def example_data(self, folder: str) -> str:
        """12 drawn windows with coloured buttons of many sizes, on screens of several shapes; returns their data.jsonl."""
        return make_windows(folder)

    def summarize(self, rows: Sequence[Score]) -> Mapping[str, float]:
        """click_accuracy = hits / all rows; parse_failure_rate, truncated_rate."""
        if not rows:
            return {}
        return {
            "click_accuracy": sum(row.metrics.get("inside", 0.0) for row in rows) / len(rows),
            **super().summarize(rows),
        }
