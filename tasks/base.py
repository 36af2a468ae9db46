"""AnswerTask: prompt, one answer in an envelope, parsed, scored by a rubric. What one task adds is one readable file.

A task names its question (`ask`, `shape`), its parser, its accuracy modes and its metrics:

    class Counting(AnswerTask):
        ask, shape = "How many {question} are there?", "a number"
        def parse(self, answer, sample, ctx): ...          # text -> value, or AnswerError(reason)
        def accuracy_part(mode, **params): ...             # the reward, a factory of the rubric
        def measure(self, value, sample, ctx): ...         # metrics, higher is better, 0 for a failure

Everything else (envelope, thoughts, truncation, presets, per-source and per-sample settings, readers) is shared.
"""

from __future__ import annotations

import abc
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple

from mmrl.coords import CoordFrame
from mmrl.errors import ConfigError, DataError, did_you_mean
from mmrl.rewards.format import check_answer_format, wrap_answer
from mmrl.rewards.format_rules import PAYS_UNREAD, make_format_rule
from mmrl.rewards.official import EXTRACTORS, check_extractor
from mmrl.rewards.parsing import Extraction, extract_answer
from mmrl.rewards.reading import check_level
from mmrl.rewards.router import Part, PartFactory, Rubric
from mmrl.task import Template, sample_chat
from mmrl.tasks.levels import AnswerError, ReadingTask
from mmrl.types import ImageSize, RewardContext, Sample, Score, StopReason

__all__ = [
    "AnswerError",
    "AnswerTask",
    "ENVELOPES",
    "EXPLAINED",
    "FRAME_WORDS",
    "Prediction",
    "picture_size",
]

FRAME_WORDS: Mapping[CoordFrame, str] = {
    CoordFrame.ABS_ORIG: "in pixels of the image",
    CoordFrame.ABS_RESIZED: "in pixels of the image",
    CoordFrame.REL1000: "scaled to 0-1000 of the image width and height",
    CoordFrame.REL1: "as fractions from 0 to 1 of the image width and height",
}
ENVELOPES = {
    "answer": "Reply with nothing but <answer>{shape}</answer>.",
    "think": "First think inside <think> </think>, then reply with <answer>{shape}</answer>.",
    "think_lines": "First think, then answer, with every tag on a line of its own:\n<think>\n...\n</think>\n<answer>\n{shape}\n"
    "</answer>",
    "bare": "Reply with nothing but {shape}.",
}
"""How each answer_format is asked for, behind the task's own `ask`."""
EXPLAINED = "First explain briefly what you see, then reply with <answer>{shape}</answer>."
"""A `request` for a few words of reasoning, not in tags of their own, before the answer, as EasyVideoR1's prompts ask for them."""

_COMMON: Mapping[str, Any] = {
    "preset": None,
    "prompt": None,
    "answer_format": "answer",
    "answers": "strict",
    "extractor": None,
    "mode": None,
    "accuracy": {},
    "weights": {"accuracy": 0.9, "format": 0.1},
    "normalise": True,
    "parts": {},
    "per_source": {},
    "reader": {},
    "format_rule": "envelope",
    "frame": None,
    "request": None,
}
_CUT_SHORT = ("empty", "no_answer", "unclosed_answer", "unclosed_think")


class Prediction(NamedTuple):
    """What reward parts see: the parsed value, the whole text, the text inside the answer, the task's own verdict."""

    value: Any
    text: str
    answer: str
    correct: bool


def picture_size(sample: Sample, ctx: RewardContext, index: int = 0) -> ImageSize:
    """Sizes of picture `index`; raises DataError when the frame needs them and they are unknown."""
    if index < len(ctx.images):
        return ctx.images[index]
    width, height = sample.params.get("width"), sample.params.get("height")
    if ctx.frame is CoordFrame.ABS_RESIZED or not width or not height:
        raise DataError(
            f"expected ctx.images with the sizes of picture {index} of sample {sample.id!r} to read frame "
            f"{ctx.frame.value}, found {len(ctx.images)} sizes; pass them"
        )
    return ImageSize((width, height), (width, height))


def _format_part(answer_format: str, rule: str = "envelope", kind: str = "") -> Part:
    """A rule of mmrl.rewards.format_rules over the whole text; here of texts whose answer was parsed, see AnswerTask._failure."""
    value = make_format_rule(rule, answer_format, kind)
    return lambda predicted, sample, ctx: value(predicted.text)


def _frame_of(name: str, value: Any) -> CoordFrame | None:
    known = [frame.value for frame in CoordFrame]
    if value is not None and value not in known:
        raise ConfigError(
            f"expected {name}.frame as one of {', '.join(known)} or null, the model family's own, found {value!r}."
            f"{did_you_mean(str(value), known)}"
        )
    return None if value is None else CoordFrame(value)


def _settle(
    name: str,
    own: Mapping[str, Any],
    presets: Mapping[str, Mapping[str, Any]],
    params: Mapping[str, Any],
) -> dict[str, Any]:
    """Defaults, then the preset, then what the user gave. Raises ConfigError for unknown names."""
    defaults = {**_COMMON, **own}
    for key in params:
        if key not in defaults:
            raise ConfigError(
                f"unknown parameter {key!r} of task {name}; expected {', '.join(defaults)}."
                f"{did_you_mean(key, defaults)}"
            )
    preset = params.get("preset")
    if preset is not None and preset not in presets:
        raise ConfigError(
            f"unknown preset {preset!r} of task {name}; expected one of {', '.join(presets) or 'none'}."
            f"{did_you_mean(str(preset), presets)}"
        )
    chosen = presets[preset] if preset is not None else {}
    settings = {**defaults, **chosen, **params}
    if (
        "accuracy" in params
        and isinstance(params["accuracy"], Mapping)
        and settings["mode"] == chosen.get("mode")
    ):
        settings["accuracy"] = {**chosen.get("accuracy", {}), **params["accuracy"]}
    elif settings["mode"] != chosen.get("mode", settings["mode"]) and "accuracy" not in params:
        settings["accuracy"] = defaults["accuracy"]  # the parameters of two modes differ
    for key in ("accuracy", "weights", "parts", "per_source", "reader"):
        if not isinstance(settings[key], Mapping):
            raise ConfigError(f"expected {name}.{key} as a mapping, found {settings[key]!r}")
    return settings


def _texts_in(truth: Any) -> Iterator[str]:
    if isinstance(truth, str):
        yield truth
    elif isinstance(truth, (list, tuple, Mapping)):
        for value in truth.values() if isinstance(truth, Mapping) else truth:
            yield from _texts_in(value)


def _check_answerable(truth: Any, answer_format: str) -> None:
    """Raise RowError for a truth that no completion can give, because its own words end or repeat the answer's envelope.

    Of several accepted texts one is enough.
    """
    from mmrl.tasks.readers.common import RowError

    lost = [
        (text, reason)
        for text in _texts_in(truth)
        if (reason := extract_answer(wrap_answer(text, answer_format), answer_format).reason)
        not in (None, "empty")
    ]
    several = isinstance(truth, list) and all(isinstance(text, str) for text in truth)
    if lost and not (several and len(lost) < len(truth)):
        text, reason = lost[0]
        raise RowError(
            "a truth without the tags <answer> and <think>, which no completion could repeat inside its own",
            f"{text!r:.80} ({reason})",
            "write those tags in other words, or set answer_format: bare",
        )


class AnswerTask(ReadingTask):
    """A task whose completion holds exactly one answer. Parameters, all optional:

    preset         a named set of the parameters below that reproduces a paper (the class's `presets`)
    prompt         text with {question} and, if the frame matters, {frame}; default: `ask` and the envelope's request
    request        how the envelope is asked for behind `ask`, text with {shape}; null (default): in the words of answer_format
    answer_format  'answer' (default), 'think', 'think_lines' or 'bare'
    format_rule    what the part `format` pays: 'envelope' (default: the whole text is the envelope and holds an answer), or a
                   paper's rule, see mmrl.rewards.format_rules; most of these pay a right envelope around an unreadable answer, too
    frame          the frame of the answers' coordinates, for example rel1000; null (default): that of the model's family
    answers        how freely an answer's spelling is read: 'strict' (default), 'native' or 'official', see mmrl.rewards.reading
    extractor      the benchmark whose own extractor reads at 'official', see mmrl.rewards.official.EXTRACTORS; suites name theirs
    mode           accuracy mode; `accuracy: {...}` holds the mode's parameters
    weights        {accuracy: 0.9, format: 0.1}, normalised to sum 1 unless `normalise: false` (papers that add parts up)
    parts          settings of further parts named in weights, see mmrl.rewards.lengths.PARTS (repetition, cosine_length ...)
    per_source     {source: {weights: {...}, accuracy: {mode: ..., ...}}}; per sample the same in params.reward
    reader         options of mmrl.tasks.readers.read_any (image_root, split, frame, on_error, ...)
    """

    headline: ClassVar[str] = "correct"
    ask: ClassVar[str] = "{question}"
    shape: ClassVar[str] = "the answer"
    # for a list of tasks, where `shape` depends on the sample
    shapes: ClassVar[str] = ""
    default_mode: ClassVar[str] = "exact"
    own_params: ClassVar[Mapping[str, Any]] = {}
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    metric_names: ClassVar[tuple[str, ...]] = ()

    def __init__(self, **params: Any) -> None:
        super().__init__(**params)
        name = self.name or type(self).__name__.lower()
        self.settings = settings = _settle(
            name, {"mode": self.default_mode, **self.own_params}, self.presets, params
        )
        self.answer_format = check_answer_format(settings["answer_format"])
        self.frame = _frame_of(name, settings["frame"])
        self._form: Callable[[str], float] | None = None
        if settings["format_rule"] in PAYS_UNREAD:
            self._form = make_format_rule(settings["format_rule"], self.answer_format, name)
        self.answers = check_level(settings["answers"])
        self.extractor = (
            None if settings["extractor"] is None else check_extractor(settings["extractor"], name)
        )
        if self.answers == "official" and self.extractor is None:
            raise ConfigError(
                f"expected {name}.extractor with answers: official, the benchmark's own, found none; name one of "
                f"{', '.join(EXTRACTORS)}, or set answers: native"
            )
        self.request: str = (
            ENVELOPES[self.answer_format] if settings["request"] is None else settings["request"]
        )
        if not isinstance(self.request, str) or "{shape}" not in self.request:
            raise ConfigError(
                f"expected a request that contains {{shape}}, found {self.request!r}; for example "
                f"{ENVELOPES[self.answer_format]!r}"
            )
        self.prompt: str = (
            settings["prompt"]
            if settings["prompt"] is not None
            else (f"{self.ask} {self.request}".replace("{shape}", self.shape))
        )
        if not isinstance(self.prompt, str) or "{question}" not in self.prompt:
            raise ConfigError(
                f"expected a prompt that contains {{question}}, found {self.prompt!r}; "
                "for example 'Find {question}.'"
            )
        self.reader_options = dict(settings["reader"])
        self.rejected: list[Any] = []
        self.skipped: Counter[str] = Counter()
        self.notes: Counter[str] = Counter()
        self.places: dict[str, tuple[str, int]] = {}
        self.rubric = self._build_rubric(settings)
        self.part_names = self.rubric.part_names
        self.value_range, self.part_ranges = self.rubric.value_range, self.rubric.part_ranges

    def _build_rubric(self, settings: Mapping[str, Any]) -> Rubric:
        from mmrl.rewards.lengths import PARTS

        extra = {part: PARTS[part] for part in settings["weights"] if part in PARTS}
        for part in settings["parts"]:
            if part not in extra:
                raise ConfigError(
                    f"settings for part {part!r}, which has no weight; expected one of "
                    f"{', '.join(extra) or 'none'} (give it a weight first).{did_you_mean(part, PARTS)}"
                )
        return Rubric(
            {**self.factories(), **extra},
            settings["weights"],
            {
                "accuracy": self._accuracy_settings(settings),
                "format": self._format_settings(settings),
                **settings["parts"],
            },
            settings["per_source"],
            normalise=settings["normalise"],
        )

    def _accuracy_settings(self, settings: Mapping[str, Any]) -> Mapping[str, Any]:
        return {**settings["accuracy"], "mode": settings["mode"]}

    def _format_settings(self, settings: Mapping[str, Any]) -> Mapping[str, Any]:
        return {
            "answer_format": self.answer_format,
            "rule": settings["format_rule"],
            "kind": self.name or "",
        }

    @property
    def pays_unread(self) -> bool:
        """True where the format rule may pay a text whose answer cannot be read, as most papers' rules do."""
        return self._form is not None

    # what a task is made of

    @abc.abstractmethod
    def factories(self) -> Mapping[str, PartFactory]:
        """Reward parts by name: at least 'accuracy'; add `self.format_factory()` under 'format'."""

    @staticmethod
    def format_factory() -> PartFactory:
        """The envelope's reward."""
        return _format_part

    @abc.abstractmethod
    def check_answer(
        self,
        value: Any,
        frame: CoordFrame,
        sizes: Sequence[tuple[int, int]],
        params: Mapping[str, Any],
    ) -> Any:
        """The truth as samples hold it, from what a file holds; coordinates become pixels of the original picture.

        `frame` is the file's, `sizes` the pictures' (width, height), `params` the row's. Raises mmrl.tasks.readers.RowError.
        """

    @abc.abstractmethod
    def measure(self, value: Any, sample: Sample, ctx: RewardContext) -> Mapping[str, float]:
        """All of `metric_names` for a parsed value; higher is better, and a failure counts as 0 in each."""

    @abc.abstractmethod
    def gold_answer(self, sample: Sample, ctx: RewardContext) -> str:
        """Text inside the envelope that must score 1 (to rounding of coordinates)."""

    @abc.abstractmethod
    def wrong_answer(self, sample: Sample, ctx: RewardContext) -> str:
        """Well-formed text inside the envelope whose accuracy is 0."""

    def is_correct(
        self, value: Any, sample: Sample, ctx: RewardContext, metrics: Mapping[str, float]
    ) -> bool:
        """The task's own verdict, used by cosine length and contrast groups; default: metric 'correct' or headline."""
        return metrics.get("correct", metrics.get(self.headline, 0.0)) >= 0.5

    def describe(self, value: Any | None, sample: Sample, ctx: RewardContext) -> Mapping[str, Any]:
        """What people and submission files want to see: gold and, unless `value` is None, prediction.

        Keys the report draws: pred_boxes, gold_boxes, pred_labels, gold_labels, pred_points, gold_points (all in pixels
        of the original picture), pred_spans, gold_spans ([[start, end], ...] in seconds), pred_tracks, gold_tracks ({seconds
        as text: box}), pred_text, gold_text.
        """
        shown = {} if value is None else {"pred_text": str(value)}
        return {**shown, "gold_text": str(sample.answer)}

    def fill_prompt(self, prompt: str, sample: Sample, template: Template) -> str:
        """The user's text: {frame} and {question} filled in; override to add options and the like."""
        text = prompt.replace("{frame}", FRAME_WORDS[CoordFrame(template.frame)])
        # last, so braces in the question stay as they are
        return text.replace("{question}", sample.question)

    # shared

    def load(self, path: str) -> Iterable[Sample]:
        """Samples of a data file or folder. With on_error 'record', unusable rows are left in `self.rejected`.

        `reader.on_error` wins over the run's `self.on_error`. Rows that belong to other tasks are errors, or, with
        reader.only_mine, counted by reason in `self.skipped`.
        """
        from mmrl.tasks.readers import read_any

        options = {
            "on_error": self.on_error,
            "orientation": self.orientation,
            **self.reader_options,
        }
        readout = read_any(path, task=self.name, check=self._check_row, **options)
        readout.verify(self.rubric.check, path, options["on_error"])
        self.rejected, self.skipped, self.notes = readout.rejected, readout.skipped, readout.notes
        self.places = readout.places
        return readout.samples

    def _check_row(
        self,
        task: str,
        value: Any,
        frame: CoordFrame,
        sizes: Sequence[tuple[int, int]],
        params: Mapping[str, Any],
    ) -> Any:
        truth = self.check_answer(value, frame, sizes, params)
        _check_answerable(truth, self.answer_format)
        return truth

    def messages(self, sample: Sample, template: Template) -> list[dict[str, Any]]:
        """[system, if the template has one], then the user's turn: videos, pictures, sounds, then the text."""
        template = template if self.frame is None else replace(template, frame=self.frame)
        return sample_chat(sample, template, self.fill_prompt(self.prompt, sample, template))

    def score(self, sample: Sample, text: str, ctx: RewardContext) -> Score:
        """Weighted parts of the one answer in `text`, with the task's metrics.

        Reasons of failure: those of mmrl.rewards.parsing.extract_answer and of `parse`, truncated (the length limit cut the
        text before its answer was closed), reward_error (sizes or truth unusable).
        """
        ctx = self._in_frame(ctx)
        try:
            answer, value = self.read(sample, text, ctx)
            metrics = self.verdict(answer, sample, ctx, dict(self.measure(value, sample, ctx)))
            correct = self.is_correct(value, sample, ctx, metrics)
            detail = self.describe(value, sample, ctx)
        except AnswerError as err:
            may_be_cut = err.reason in _CUT_SHORT if err.envelope else self.answer_format == "bare"
            cut = may_be_cut and ctx.stop is StopReason.LENGTH
            return self._failure(sample, "truncated" if cut else err.reason, ctx, text)
        except (ValueError, TypeError, KeyError, ArithmeticError) as err:
            return self._failure(sample, f"reward_error: {err}", ctx)
        return self.rubric.score(
            Prediction(value, text, answer, correct), sample, ctx, metrics=metrics, detail=detail
        )

    def extract(self, text: str) -> Extraction:
        """The one answer of a completion; override where a paper's answer stands in more than one block.

        Under a paper's format rule the one answer behind thoughts that were not closed counts, as it does there.
        """
        found = extract_answer(text, self.answer_format)
        if found.reason == "unclosed_think" and self.pays_unread and "<answer>" in text:
            return extract_answer(text.replace("<think>", "", 1), self.answer_format)
        return found

    def _in_frame(self, ctx: RewardContext) -> RewardContext:
        return ctx if self.frame is None or self.frame is ctx.frame else ctx.in_frame(self.frame)

    def _failure(self, sample: Sample, reason: str, ctx: RewardContext, text: str = "") -> Score:
        try:
            detail = dict(self.describe(None, sample, ctx))
        except (ValueError, TypeError, KeyError, ArithmeticError):
            detail = {}  # the truth itself is unusable: the reason says so
        form = self._form(text) if self._form is not None else 0.0
        earned = {"format": form} if form and math.isfinite(form) else None
        return self.rubric.failure(
            reason,
            sample,
            metrics=dict.fromkeys(self.metric_names, 0.0),
            detail=detail,
            earned=earned,
        )

    def gold(self, sample: Sample, ctx: RewardContext) -> str:
        """`gold_answer` in the envelope of `answer_format`."""
        return wrap_answer(self.gold_answer(sample, self._in_frame(ctx)), self.answer_format)

    def wrong(self, sample: Sample, ctx: RewardContext) -> str:
        """`wrong_answer` in the envelope of `answer_format`."""
        return wrap_answer(self.wrong_answer(sample, self._in_frame(ctx)), self.answer_format)

    def summarize(self, rows: Sequence[Score]) -> Mapping[str, float]:
        """parse_failure_rate and truncated_rate; subclasses add their benchmark's numbers."""
        if not rows:
            return {}
        return {
            "parse_failure_rate": sum(not row.parsed for row in rows) / len(rows),
            "truncated_rate": sum(row.reason == "truncated" for row in rows) / len(rows),
        }
