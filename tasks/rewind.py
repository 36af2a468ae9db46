"""The task `rewind`: questions about clips, with tools to look again at moments that the first frames do not show.

    {"id": "7", "video": "a.mp4", "question": "color of the sign", "answer": "red", "options": ["red", "blue"], "span": [6.5, 7]}

    python -m mmrl.tasks.rewind_clips runs/rewind/train --count 500 --seed 1
    mmrl env check rewind

The policy is shown a few frames, evenly spaced over the clip (`frames`), as pictures with their times before them, and may call
tools or answer between <answer> and </answer>:

    frames    {"times": [6.2, 6.8]}                         the frames on screen at these seconds
    watch     {"start": 6, "end": 8, "count": 6}            frames evenly spaced from one second to another

Pictures with times go with every family, those without clips included. A frame is labelled with the second at which it begins,
rounded up to a millisecond: asked for by that number, the same frame comes again.

The moments are tokens of the policy's turns, so that which frames are looked at is learned in the same groups and by the same
reward as the answer: key frames as actions of the policy, the idea of TSPO (Tang et al. 2025, arXiv:2508.04369). TSPO has a network
of its own for them, and a reward for where it looks; here the policy writes them, and the reward is 1 for the right answer, whether
tools were used or not. We claim none of its numbers.

A call that cannot be followed is told why, and takes its turn; a turn that is neither a call nor an answer ends the rollout with 0.
`options` (what can be answered) and `span` (seconds in which the answer is to be seen) may be left out: they serve the metric
`found` and the scripted player of `mmrl sft`. A clip that cannot be read fails its sample (data.on_error), one that breaks where
it is looked at again its rollout. PyAV decodes frames in this process, in threads for rollouts side by side
(mmrl.tasks.clip_frames).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from mmrl.environment import Environment, Observation, Outcome
from mmrl.errors import ConfigError, DataError, did_you_mean
from mmrl.registry import register
from mmrl.task import Template, sample_chat
from mmrl.tasks.clip_frames import ClipFrames, select
from mmrl.tasks.look_again import LookAgain, answered, asked, check_prompt, judged, told
from mmrl.tasks.parameters import check_known, check_number, check_whole
from mmrl.tasks.rewind_clips import GRID_S, make_rewind_clips
from mmrl.tasks.tool_calls import BadCall, ToolCall, plain_name, read_call, write_call
from mmrl.tasks.visual_tools import function
from mmrl.types import Sample, Turn
from mmrl.video.decode import VideoInfo
from mmrl.video.sampling import FrameSampling

__all__ = ["TOOLS", "Rewind", "RewindEnvironment", "first_frames", "label"]

TOOLS = ("frames", "watch")
_LOOK = "{question}\nLook again with a tool where these frames do not show it. "
_PROMPT = _LOOK + "Write the answer, one of: {options}, between <answer> and </answer>."
_FREE_PROMPT = _LOOK + "Write the answer between <answer> and </answer>."
_DEFAULTS: Mapping[str, Any] = {
    "prompt": None,
    "tools": list(TOOLS),
    "max_turns": 4,
    "frames": 4,
    "most_times": 4,
    "most_frames": 8,
    "view": None,
    "at_once": 0.0,
    "astray": 0.0,
}
_EPS = 1e-6  # seconds: rounding of times written in decimals
_MILLISECOND = 1e-3  # by which a time, written in three decimals, may lie beyond the end
_FRAMES = ClipFrames()


def first_frames(info: VideoInfo, count: int) -> list[int]:
    """Numbers of the frames that are shown at first: `count` evenly spaced ones, the first and the last among them; fewer of a clip
    that has no more, or whose rate varies so much that one frame stays for two of them."""
    return select(info, FrameSampling(kind="uniform", num_frames=count, factor=1))


def label(second: float) -> str:
    """'t = 3.0 s'; rounded up to a millisecond, so that the number is a moment at which this frame is on screen."""
    return f"t = {math.ceil(second * 1000 - 1e-3) / 1000} s"


class RewindEnvironment(Environment):
    """One rollout; see the module."""

    # decoders wait for files and work outside of Python's lock
    concurrent: ClassVar[bool] = True

    def __init__(self, template: Template, settings: Mapping[str, Any]) -> None:
        self.template, self.settings = template, settings
        self.max_turns = settings["max_turns"]  # type: ignore[misc]  # the task's setting
        self.info: VideoInfo | None = None
        self.looked: list[int] = []  # frames that tools have shown
        self.looks = self.bad = 0

    def reset(self, sample: Sample, seed: int) -> Observation:
        """The first frames and the question. Raises MediaError for a clip that cannot be read."""
        self.sample = sample
        self.info = _FRAMES.facts(sample.videos[0])
        content, pictures = self._shown(first_frames(self.info, self.settings["frames"]))
        system = (
            [{"role": "system", "content": self.template.system}] if self.template.system else []
        )
        seconds = f"These are frames of a video of {_end(self.info.duration_s)} seconds.\n"
        text = {"type": "text", "text": seconds + _asked(sample, self.settings)}
        return Observation(
            [*system, {"role": "user", "content": [*content, text]}],
            pictures,
            _described(self.settings, self.info.duration_s),
        )

    def _shown(self, numbers: Sequence[int]) -> tuple[list[dict[str, Any]], list[np.ndarray]]:
        """A label and a picture of each frame, and the pictures. Raises MediaError."""
        assert self.info is not None, "a rollout begins with reset"
        pictures = _FRAMES.read(self.sample.videos[0], numbers, self.settings["view"])
        content: list[dict[str, Any]] = []
        for number in numbers:
            words = f"{label(float(self.info.timestamps_s[number]))}\n"
            content += [{"type": "text", "text": words}, {"type": "image"}]
        return content, pictures

    def step(self, turn: Turn) -> Outcome:
        """Follow a call, or judge the answer. Raises MediaError for a clip that breaks where it is looked at."""
        assert self.info is not None, "a rollout begins with reset"
        try:
            call = read_call(turn.text, _described(self.settings, self.info.duration_s))
            numbers = None if call is None else chosen(call, self.info, self.settings)
        except BadCall as bad:
            self.bad += 1
            return Outcome(told(f"Error: {bad}."), info=self._info(0.0), parsed=False)
        if numbers is not None:
            content, pictures = self._shown(numbers)
            self.looks += 1
            self.looked += numbers
            return Outcome(answered(content, pictures), info=self._info(0.0))
        right, reason = judged(self.sample, turn.text)
        return Outcome(reward=right, terminated=True, info=self._info(right), parsed=reason is None)

    def _info(self, right: float) -> dict[str, float]:
        found = {
            "correct": right,
            "looked": float(self.looks > 0),
            "frames_looked_at": float(len(self.looked)),
            "bad_calls": float(self.bad),
        }
        if self.sample.params.get("span") is not None:
            found["found"] = float(self._found())
        return found

    def _found(self) -> bool:
        """Whether a tool has shown a frame that is on screen within the span."""
        assert self.info is not None
        t0, t1 = self.sample.params["span"]
        begins = self.info.timestamps_s
        ends = [*begins[1:], self.info.duration_s]
        return any(begins[n] < t1 - _EPS and ends[n] > t0 + _EPS for n in self.looked)

    def scripted(self, rng: np.random.Generator) -> str | None:
        """Looks at the steps of the grid (GRID_S) around the span, with any of the tools, then answers what is to be seen there. Of
        its rollouts the share `at_once` answers without a look, and `astray` of the others look anywhere; both guess."""
        span, truth = self.sample.params.get("span"), str(self.sample.answer)
        if span is None or self.info is None:
            return None
        options = self.sample.params.get("options") or [truth]
        tools = self.settings["tools"]
        if self.looks or not tools or rng.random() < self.settings["at_once"]:
            return f"<answer>{truth if self._found() else rng.choice(options)}</answer>"
        if rng.random() < self.settings["astray"]:
            return self._call(*self._anywhere(rng), rng)
        return self._call(*self._around(span), rng)

    def random(self, rng: np.random.Generator) -> str | None:
        """Looks anywhere, or guesses."""
        if self.info is None:
            return None
        if self.settings["tools"] and rng.random() < 0.5:
            return self._call(*self._anywhere(rng), rng)
        options = self.sample.params.get("options") or [str(self.sample.answer)]
        return f"<answer>{rng.choice(options)}</answer>"

    def _around(self, span: Sequence[float]) -> tuple[float, float]:
        """The steps of the grid that hold the span; the span itself where a look could step over it then."""
        assert self.info is not None
        whole = self.info.duration_s
        t0, t1 = (min(max(float(t), 0.0), whole) for t in span)
        low = math.floor(t0 / GRID_S + _EPS) * GRID_S
        high = min(math.ceil(t1 / GRID_S - _EPS) * GRID_S, whole)
        fewest = min(self.settings["most_times"], self.settings["most_frames"])
        return (low, high) if (high - low) / fewest <= t1 - t0 + _EPS else (t0, t1)

    def _anywhere(self, rng: np.random.Generator) -> tuple[float, float]:
        """A step of the grid."""
        assert self.info is not None
        steps = max(1, math.ceil(self.info.duration_s / GRID_S - _EPS))
        low = int(rng.integers(steps)) * GRID_S
        return low, min(low + GRID_S, self.info.duration_s)

    def _call(self, low: float, high: float, rng: np.random.Generator) -> str:
        """A turn that looks from one second to another with any of the tools."""
        name = str(rng.choice(self.settings["tools"]))
        if name == "watch" and round(low, 3) < round(high, 3):
            arguments: dict[str, Any] = {"start": round(low, 3), "end": round(high, 3)}
        else:
            name, count = "frames", self.settings["most_times"]
            middles = low + (np.arange(count) + 0.5) / count * (high - low)
            arguments = {"times": [round(float(t), 3) for t in middles]}
        return write_call(ToolCall(name, arguments), self.template.calls)


def chosen(call: ToolCall, info: VideoInfo, settings: Mapping[str, Any]) -> list[int]:
    """Numbers of the frames that a call asks for, ascending, each once. Raises BadCall."""
    if call.name not in settings["tools"]:
        raise BadCall(
            f"expected a call of {', '.join(settings['tools'])}, found {plain_name(call.name)}"
        )
    whole = info.duration_s
    if call.name == "frames":
        most, times = settings["most_times"], call.arguments.get("times")
        if not isinstance(times, (list, tuple)) or not 1 <= len(times) <= most:
            raise BadCall(
                f"expected times as a list of 1 to {most} seconds such as {_example(whole)}, found {_kind(times)}"
            )
        moments = sorted(_second("times", t, whole) for t in times)
        return select(info, FrameSampling(kind="timestamps", timestamps=tuple(moments)))
    start, end = (_second(key, call.arguments.get(key), whole) for key in ("start", "end"))
    if start >= end:
        raise BadCall(f"expected start before end, found {start:g} and {end:g}")
    most, count = settings["most_frames"], call.arguments.get("count")
    if count is None:
        count = most
    elif type(count) is not int or not 1 <= count <= most:
        raise BadCall(f"expected count as a whole number from 1 to {most}, found {_kind(count)}")
    return select(
        info, FrameSampling(kind="uniform", num_frames=count, start=start, end=end, factor=1)
    )


def _second(name: str, value: Any, whole: float) -> float:
    """A moment of the clip. Raises BadCall."""
    number = type(value) in (int, float) and abs(value) < 1e7  # NaN is not
    if not number or not 0 <= value <= whole + _MILLISECOND:
        raise BadCall(
            f"expected {name} in seconds from 0 to {_end(whole)}, the end of the video, found {_kind(value)}"
        )
    return min(float(value), whole)


def _end(whole: float) -> str:
    """The end of a clip, rounded down to a millisecond."""
    return f"{math.floor(whole * 1000 + 1e-3) / 1000:.12g}"


def _kind(value: Any) -> str:
    """What a value of a call is, without words of its own: they may be the model's special tokens."""
    if value is None:
        return "nothing"
    if type(value) in (int, float):
        return f"{value:g}" if abs(value) < 1e7 else "no such number"
    if isinstance(value, (list, tuple)):
        return f"a list of {len(value)}"
    return "a text" if isinstance(value, str) else f"a {type(value).__name__}"


def _example(whole: float) -> str:
    return f"[{whole / 4:.3g}, {whole / 2:.3g}]"


def _described(settings: Mapping[str, Any], whole: float) -> list[dict[str, Any]]:
    """The tools, as `apply_chat_template` takes them."""
    second = {"type": "number", "minimum": 0}
    times = {
        "type": "array",
        "items": second,
        "minItems": 1,
        "maxItems": settings["most_times"],
        "description": f"Seconds from 0 to {_end(whole)}, at most {settings['most_times']}.",
    }
    count = {
        "type": "integer",
        "minimum": 1,
        "maximum": settings["most_frames"],
        "description": f"How many frames (default {settings['most_frames']}).",
    }
    tools = {
        "frames": ("Look at the frames of the video at these times.", {"times": times}, None),
        "watch": (
            "Look at frames of the video from one time to another.",
            {"start": second, "end": second, "count": count},
            ("start", "end"),
        ),
    }
    return [function(name, *tools[name]) for name in settings["tools"]]


def _asked(sample: Sample, settings: Mapping[str, Any]) -> str:
    free = not sample.params.get("options")
    return asked(sample, str(settings["prompt"] or (_FREE_PROMPT if free else _PROMPT)))


@register("rewind")
class Rewind(LookAgain):
    """Questions about what the first frames of a clip do not show. Parameters, all optional:

    prompt       text with {question}, and {options} for the answers there are
    tools        what is offered: of frames, watch (default both; [] for none: the same questions at one look)
    max_turns    turns at most, the answer's included (default 4)
    frames       frames shown at first, evenly spaced (default 4)
    most_times   moments of a call of `frames` at most (default 4)
    most_frames  frames of a call of `watch` at most, and where it does not say how many (default 8)
    view         pixels of the longer side of each frame at most; null: as large as in the file. The pixel budget of pictures
                 (data.max_pixels) holds beside it
    at_once      share of the scripted player's rollouts that guess without a look (default 0)
    astray       share of its looks that go anywhere (default 0)
    """

    medium = "video"
    row_example = '{"video": "a.mp4", "question": "...", "answer": "..."}'

    def __init__(self, **params: Any) -> None:
        check_known("rewind", params, _DEFAULTS)
        super().__init__(**params)
        self.settings = given = {**_DEFAULTS, **params}
        for name in ("max_turns", "frames", "most_times", "most_frames"):
            check_whole(f"rewind.{name}", given[name], 1)
        if given["view"] is not None:
            check_whole("rewind.view", given["view"], 28)
        for name in ("at_once", "astray"):
            check_number(f"rewind.{name}", given[name], 0, 1)
        if not isinstance(given["tools"], (list, tuple)):
            raise ConfigError(
                f"expected rewind.tools as a list such as [frames], found {given['tools']!r}"
            )
        for name in given["tools"]:
            if name not in TOOLS:
                raise ConfigError(
                    f"expected rewind.tools of {', '.join(TOOLS)}, found {name!r}.{did_you_mean(str(name), TOOLS)}"
                )
        if len(set(given["tools"])) < len(given["tools"]):
            raise ConfigError(f"expected each of rewind.tools once, found {given['tools']!r}")
        check_prompt("rewind", given["prompt"])

    def environment(self, template: Template) -> Environment:
        """A rollout; frames are decoded when they are shown."""
        return RewindEnvironment(template, self.settings)

    def sample_of(self, row: Mapping[str, Any], file: str, where: str) -> Sample:
        """See LookAgain. A `span` is in seconds of the video."""
        options, span = row.get("options"), row.get("span")
        if span is not None and (
            not isinstance(span, list)
            or len(span) != 2
            or not all(type(v) in (int, float) and abs(v) < 1e9 for v in span)
            or not 0 <= span[0] < span[1]
        ):
            raise DataError(
                f"{where}: expected span as [t0, t1] in seconds of the video, t0 before t1, found {span!r:.80}"
            )
        given = {k: v for k, v in (("options", options), ("span", span)) if v is not None}
        # which frames `messages` shows, and what media workers prepare
        shown = {"kind": "uniform", "num_frames": self.settings["frames"], "factor": 1}
        return Sample(
            str(row["id"]),
            "rewind",
            str(row["source"]),
            row["question"],
            row["answer"],
            videos=(file,),
            params={**given, "video": shown},
        )

    def messages(self, sample: Sample, template: Template) -> list[dict[str, Any]]:
        """The same question about the same frames as one clip, without the tools: for what looks at one answer."""
        return sample_chat(sample, template, _asked(sample, self.settings))

    def example_data(self, folder: str) -> str:
        """Four clips."""
        return make_rewind_clips(folder, 4, 0)
