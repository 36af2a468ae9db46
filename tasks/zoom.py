"""The task `zoom`: questions about large pictures, with tools to look closer before the answer.

    {"id": "7", "image": "a.png", "question": "red sign", "answer": "cyan", "options": ["cyan", "white"], "region": [8, 16, 80, 88]}

    python -m mmrl.tasks.zoom_pictures runs/zoom/train --count 2000 --seed 1
    mmrl train zoom

The policy is shown the picture as small as `view` says (or as its pixel budget makes it) and may call tools
(mmrl.tasks.visual_tools), which cut from and read in the whole file, or answer between <answer> and </answer>. The reward is 1 for
the right answer, whether tools were used or not: where to look, and that it pays, is learned from the answer alone. A call that
cannot be followed is told why; a turn that is neither a call nor an answer ends the rollout with 0. `options` (what can be
answered) and `region` (where the answer is to be seen, in pixels of the file) may be left out: they serve the metric `found` and
the scripted player of `mmrl sft`.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from mmrl.coords import from_orig
from mmrl.environment import Environment, Mark, Observation, Outcome
from mmrl.errors import ConfigError, DataError
from mmrl.registry import register
from mmrl.task import Template
from mmrl.tasks.look_again import LookAgain, answered, asked, check_prompt, judged, told
from mmrl.tasks.parameters import check_known, check_number, check_whole
from mmrl.tasks.tool_calls import BadCall, ToolCall, read_call, write_call
from mmrl.tasks.visual_tools import PictureTools, check_tools, described, fitted
from mmrl.types import ImageSize, Sample, Turn
from mmrl.video.media import ORIENTATION_PARAM, Orientation, open_image, orientation_of

__all__ = ["Zoom", "ZoomEnvironment"]

_LOOK = "{question}\nLook closer with a tool where the picture does not show it. "
_PROMPT = _LOOK + "Write the answer, one of: {options}, between <answer> and </answer>."
_FREE_PROMPT = _LOOK + "Write the answer between <answer> and </answer>."
_DEFAULTS: Mapping[str, Any] = {
    "prompt": None,
    "tools": ["zoom"],
    "max_turns": 4,
    "view": None,
    "read_limit_s": 20.0,
    "at_once": 0.0,
    "astray": 0.0,
}


class ZoomEnvironment(Environment):
    """One rollout; see the module."""

    def __init__(self, template: Template, settings: Mapping[str, Any]) -> None:
        self.template, self.settings = template, settings
        self.max_turns = settings["max_turns"]  # type: ignore[misc]  # the task's setting
        # a reading waits for a process
        self.concurrent = "read" in settings["tools"]  # type: ignore[misc]
        self.size: ImageSize | None = None
        self.bad = 0

    def reset(self, sample: Sample, seed: int) -> Observation:
        """The whole picture and the question."""
        self.sample = sample
        pixels = _pixels(sample.images[0], orientation_of(sample))
        view = self.settings["view"]
        self.tools = PictureTools(
            pixels, self.settings["tools"], view, self.settings["read_limit_s"]
        )
        system = (
            [{"role": "system", "content": self.template.system}] if self.template.system else []
        )
        content = [{"type": "image"}, {"type": "text", "text": _asked(sample, self.settings)}]
        self.whole = whole = fitted(pixels, view) if view and view < max(pixels.shape) else pixels
        return Observation(
            [*system, {"role": "user", "content": content}], [whole], described(self.tools.names)
        )

    def shown(self, sizes: Any) -> None:
        """See Environment.shown: places are those of the first picture."""
        if self.size is None:
            self.size = next(s for s in sizes if isinstance(s, ImageSize))

    def step(self, turn: Turn) -> Outcome:
        """Follow a call, or judge the answer."""
        assert self.size is not None, "a rollout begins with reset and shown"
        try:
            call = read_call(turn.text, described(self.tools.names))
            if call is not None:
                known = len(self.tools.regions)
                found = self.tools.use(call, self.template.frame, self.size)
                scale = self.whole.shape[1] / self.tools.pixels.shape[1]
                return Outcome(
                    told(found)
                    if isinstance(found, str)
                    else answered([{"type": "image"}], [found]),
                    info=self._info(0.0),
                    marks=[
                        Mark("box", tuple(v * scale for v in region), 0)
                        for region in self.tools.regions[known:]
                    ],
                )
        except BadCall as bad:
            self.bad += 1
            return Outcome(told(f"Error: {bad}."), info=self._info(0.0), parsed=False)
        right, reason = judged(self.sample, turn.text)
        return Outcome(reward=right, terminated=True, info=self._info(right), parsed=reason is None)

    def _info(self, right: float) -> dict[str, float]:
        found = {
            "correct": right,
            "looked": float(bool(self.tools.regions)),
            "bad_calls": float(self.bad),
        }
        if "read" in self.tools.names:
            found["out_of_time"] = float(self.tools.out_of_time)
        if (region := self.sample.params.get("region")) is not None:
            found["found"] = float(
                any(_inside(region, seen) >= 0.75 for seen in self.tools.regions)
            )
        return found

    def scripted(self, rng: np.random.Generator) -> str | None:
        """Looks at the region, then answers what is written there. Of its rollouts the share `at_once` answers without a look, and
        `astray` of the others look anywhere; both guess."""
        region, truth = self.sample.params.get("region"), str(self.sample.answer)
        options = self.sample.params.get("options") or [truth]
        size = self.size
        if region is None or size is None:
            return None
        looked = bool(self.tools.regions)
        if looked or self._looks is None or rng.random() < self.settings["at_once"]:
            seen = looked and _inside(region, self.tools.regions[-1]) >= 0.75
            return f"<answer>{truth if seen else rng.choice(options)}</answer>"
        if rng.random() < self.settings["astray"]:
            region = _elsewhere(rng, self.tools.pixels.shape)
        return self._call(region, size)

    def random(self, rng: np.random.Generator) -> str | None:
        """Looks anywhere, or guesses."""
        if self.size is None:
            return None
        if self._looks is not None and rng.random() < 0.5:
            return self._call(_elsewhere(rng, self.tools.pixels.shape), self.size)
        options = self.sample.params.get("options") or [str(self.sample.answer)]
        return f"<answer>{rng.choice(options)}</answer>"

    @property
    def _looks(self) -> str | None:
        """The tool that the players look with."""
        return next((name for name in ("zoom", "read") if name in self.tools.names), None)

    def _call(self, region: Any, size: ImageSize) -> str:
        """A turn that looks at the cells around a region of the file."""
        height, width = self.tools.pixels.shape[:2]
        box = from_orig(
            _whole_cells(region, self.tools.pixels.shape),
            self.template.frame,
            size.resized_wh,
            (width, height),
        )
        arguments = {"bbox_2d": [round(v) for v in box]}
        return write_call(ToolCall(str(self._looks), arguments), self.template.calls)


_CELLS = 4  # of a side: where the scripted player looks


def _whole_cells(region: Any, shape: Any) -> list[float]:
    """The region rounded outward to quarters of the sides: what is looked at is larger than the thing itself."""
    height, width = shape[:2]
    x1, y1, x2, y2 = region
    w, h = width / _CELLS, height / _CELLS
    left, top = int(x1 // w), int(y1 // h)
    right, bottom = max(left + 1, -int(-x2 // w)), max(top + 1, -int(-y2 // h))
    return [left * w, top * h, right * w, bottom * h]


def _elsewhere(rng: np.random.Generator, shape: Any) -> list[float]:
    """A quarter of the sides, anywhere."""
    height, width = shape[:2]
    w, h = width / _CELLS, height / _CELLS
    column, row = (int(rng.integers(_CELLS)) for _ in range(2))
    return [column * w, row * h, (column + 1) * w, (row + 1) * h]


def _inside(box: Any, seen: Any) -> float:
    """Share of `box` that `seen` shows."""
    w = min(box[2], seen[2]) - max(box[0], seen[0])
    h = min(box[3], seen[3]) - max(box[1], seen[1])
    return max(w, 0) * max(h, 0) / ((box[2] - box[0]) * (box[3] - box[1]))


def _asked(sample: Sample, settings: Mapping[str, Any]) -> str:
    free = not sample.params.get("options")
    return asked(sample, str(settings["prompt"] or (_FREE_PROMPT if free else _PROMPT)))


@functools.lru_cache(maxsize=64)
def _pixels(path: str, orientation: Orientation) -> np.ndarray:
    """The file's picture, uint8 (H, W, 3): all rollouts of a group read it. Raises MediaError."""
    return np.array(open_image(path, orientation=orientation))


@register("zoom")
class Zoom(LookAgain):
    """Questions about what a look at the whole picture does not show. Parameters, all optional:

    prompt      text with {question}, and {options} for the answers there are
    tools       what is offered: of zoom, rotate, mark, read, measure (default [zoom]; [] for none: the same questions at one look);
                read needs the extra `ocr` and the program tesseract
    max_turns   turns at most, the answer's included (default 4)
    view        pixels of the longer side of each picture shown; null: the whole as the model's pixel budget makes it, and what the
                tools show as large
    read_limit_s  seconds that a reading may take; a policy is told when one took longer (default 20)
    at_once     share of the scripted player's rollouts that guess without a look (default 0)
    astray      share of its looks that go anywhere (default 0)
    """

    medium = "image"
    row_example = '{"image": "a.png", "question": "...", "answer": "..."}'

    def __init__(self, **params: Any) -> None:
        check_known("zoom", params, _DEFAULTS)
        super().__init__(**params)
        self.settings = given = {**_DEFAULTS, **params}
        for name, least in (("max_turns", 1), ("view", 28)):
            if given[name] is not None:
                check_whole(f"zoom.{name}", given[name], least)
        check_number("zoom.read_limit_s", given["read_limit_s"], 0.1, 600)
        for name in ("at_once", "astray"):
            check_number(f"zoom.{name}", given[name], 0, 1)
        if not isinstance(given["tools"], (list, tuple)):
            raise ConfigError(
                f"expected zoom.tools as a list such as [zoom], found {given['tools']!r}"
            )
        check_tools(given["tools"])
        check_prompt("zoom", given["prompt"])

    def environment(self, template: Template) -> Environment:
        """A rollout; the picture is read when it is reset."""
        return ZoomEnvironment(template, self.settings)

    def sample_of(self, row: Mapping[str, Any], file: str, where: str) -> Sample:
        """See LookAgain. A `region` is in pixels of the picture."""
        options, region = row.get("options"), row.get("region")
        if region is not None and (
            not isinstance(region, list)
            or len(region) != 4
            or not all(type(v) in (int, float) for v in region)
            or region[0] >= region[2]
            or region[1] >= region[3]
        ):
            raise DataError(
                f"{where}: expected region as [x1, y1, x2, y2] in pixels of the picture, found {region!r:.80}"
            )
        sample = Sample(
            str(row["id"]),
            "zoom",
            str(row["source"]),
            row["question"],
            row["answer"],
            images=(file,),
            params={k: v for k, v in (("options", options), ("region", region)) if v is not None},
        )
        return _read_as(sample, self.orientation)

    def messages(self, sample: Sample, template: Template) -> list[dict[str, Any]]:
        """How the chat begins, without the tools."""
        content = [{"type": "image"}, {"type": "text", "text": _asked(sample, self.settings)}]
        system = [{"role": "system", "content": template.system}] if template.system else []
        return [*system, {"role": "user", "content": content}]

    def example_data(self, folder: str) -> str:
        """Four pictures."""
        from mmrl.tasks.zoom_pictures import make_zoom_pictures

        return make_zoom_pictures(folder, 4, 0)


def _read_as(sample: Sample, orientation: Orientation) -> Sample:
    """The sample, noted with how its picture is read."""
    if orientation == "displayed":
        return sample
    return replace(sample, params={**sample.params, ORIENTATION_PARAM: orientation})
