"""Image classification over a closed set of labels: the answer is one label, or one of its synonyms, and nothing else.

Labels come from the sample (params.labels, params.synonyms) or from the task's parameters of the same names. Compared
are whole words after normalisation (case, Unicode form, white space, underscores and hyphens as spaces, a final full
stop): 'cat' is not found in 'category', and an answer that names two labels is no answer.

    mmrl tasks check classification
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from mmrl.coords import CoordFrame
from mmrl.errors import ConfigError, did_you_mean
from mmrl.registry import register
from mmrl.rewards.reading.words import DOUBTS
from mmrl.rewards.router import Part, PartFactory
from mmrl.rewards.text import unicode_form
from mmrl.task import Template
from mmrl.tasks.base import FRAME_WORDS, AnswerError, AnswerTask
from mmrl.types import RewardContext, Sample, Score

__all__ = ["MODES", "Classification", "LabelSet", "label_form"]

MODES = ("exact", "mention")
_MAX_CHARS = 1_000
_LISTED = 200  # labels spelled out in a prompt at most
_SLOT = re.compile(r"\{(question|labels|frame)\}")
_QUOTES, _PUNCTUATION = "\"'`* ", ".,;:!?()[]{}\"'`*"
_GAPS = re.compile(r"[\s_-]+")


def label_form(text: str) -> str:
    """What is compared: NFKC, case folded, white space, '_' and '-' as one space, quotes and a final full stop off."""
    folded = unicode_form(text, "NFKC").casefold().strip()
    return _GAPS.sub(" ", folded.strip(_QUOTES).removesuffix(".").strip(_QUOTES)).strip()


def _words(form: str) -> list[str]:
    """Words of a compared form without the punctuation around them."""
    return [word for raw in form.split() if (word := raw.strip(_PUNCTUATION))]


class LabelSet:
    """Labels and synonyms by their compared form. Raises ValueError for a form that is empty or means two labels, and for
    a label that is listed twice."""

    def __init__(self, labels: Sequence[str], synonyms: Mapping[str, Sequence[str]]) -> None:
        self.labels = list(labels)
        twice = [label for label, count in Counter(labels).items() if count > 1]
        if twice:
            raise ValueError(f"label {twice[0]!r} twice")
        self.by_form: dict[str, str] = {}
        self.by_words: dict[str, str] = {}
        for label in labels:
            for name in (label, *synonyms.get(label, ())):
                form = label_form(name)
                spelled = " ".join(_words(form))
                if not spelled:
                    raise ValueError(f"{name!r} of label {label!r}, which holds nothing to compare")
                other = self.by_form.setdefault(form, self.by_words.setdefault(spelled, label))
                if other != label or self.by_words[spelled] != label:
                    raise ValueError(f"{name!r} of label {label!r}, which also means {other!r}")
        self.longest = max((len(spelled.split()) for spelled in self.by_words), default=0)

    def exact(self, answer: str) -> list[str]:
        """[label] when the answer is one label or synonym, else []."""
        found = self.by_form.get(label_form(answer))
        return [] if found is None else [found]

    def mentioned(self, answer: str) -> list[str]:
        """Labels named in the answer as whole words, the longest name at each place, each label once. Linear time."""
        words = _words(label_form(answer))
        found: list[str] = []
        start = 0
        while start < len(words):
            for length in range(min(self.longest, len(words) - start), 0, -1):
                label = self.by_words.get(" ".join(words[start : start + length]))
                if label is not None:
                    found.append(label)
                    start += length - 1
                    break
            start += 1
        return list(dict.fromkeys(found))


@functools.lru_cache(maxsize=256)
def _label_set(
    labels: tuple[str, ...], synonyms: tuple[tuple[str, tuple[str, ...]], ...]
) -> LabelSet:
    return LabelSet(labels, dict(synonyms))


def _accuracy_part(mode: str, read_as: str = "") -> Part:
    """1 for the right label. The mode is how answers are read, hence one for all sources and samples of a task."""
    if mode not in MODES:
        raise ConfigError(
            f"unknown classification mode {mode!r}; expected one of {', '.join(MODES)}."
            f"{did_you_mean(str(mode), MODES)}"
        )
    if mode != read_as:
        raise ConfigError(
            f"expected one mode for all sources and samples of a classification task, found {mode!r} next to "
            f"{read_as or 'another'!r}; set the task's own parameter mode"
        )
    return lambda predicted, sample, ctx: float(predicted.correct)


@register("classification")
class Classification(AnswerTask):
    """Name what the picture shows. Beside the parameters of AnswerTask:

    mode      exact (default): the answer is one label or synonym; mention: it names exactly one label, words around it
              are allowed ("a photo of a cat"; "not a cat" names it as well)
    labels    the label set of samples without params.labels
    synonyms  {label: [other names]} of samples without params.synonyms

    The prompt may hold {labels}: the set in the order of the data, up to 200 labels.
    """

    ask: ClassVar[str] = "{question} Choose one of: {labels}."
    shape: ClassVar[str] = "label"
    own_params: ClassVar[Mapping[str, Any]] = {"labels": [], "synonyms": {}}
    metric_names: ClassVar[tuple[str, ...]] = ("correct",)

    def __init__(self, **params: Any) -> None:
        super().__init__(**params)
        labels, synonyms = self.settings["labels"], self.settings["synonyms"]
        try:
            self._default = self._label_set(labels, synonyms)
        except ValueError as err:
            raise ConfigError(f"classification: {err}") from err

    @staticmethod
    def _label_set(labels: Any, synonyms: Any) -> LabelSet:
        if not isinstance(labels, (list, tuple)) or not all(
            isinstance(label, str) for label in labels
        ):
            raise ValueError(f"expected labels as a list of texts, found {labels!r:.80}")
        if not isinstance(synonyms, Mapping) or not all(
            isinstance(names, (list, tuple)) and all(isinstance(n, str) for n in names)
            for names in synonyms.values()
        ):
            raise ValueError(f"expected synonyms as {{label: [names]}}, found {synonyms!r:.80}")
        strangers = [label for label in synonyms if label not in labels]
        if strangers:
            raise ValueError(
                f"expected synonyms of known labels, found {strangers[0]!r}.{did_you_mean(strangers[0], labels)}"
            )
        try:
            return _label_set(
                tuple(labels), tuple((label, tuple(names)) for label, names in synonyms.items())
            )
        except ValueError as err:
            raise ValueError(f"expected names that mean one label each, found {err}") from None

    def label_set(self, params: Mapping[str, Any]) -> LabelSet:
        """The labels of a sample with these params. Raises ValueError for a set that is ambiguous."""
        if "labels" not in params and "synonyms" not in params:
            return self._default
        labels = params.get("labels", self.settings["labels"])
        default = {} if "labels" in params else self.settings["synonyms"]
        return self._label_set(labels, params.get("synonyms", default))

    def _accuracy_settings(self, settings: Mapping[str, Any]) -> Mapping[str, Any]:
        return {**settings["accuracy"], "mode": settings["mode"], "read_as": settings["mode"]}

    def factories(self) -> Mapping[str, PartFactory]:
        """accuracy and format."""
        return {"accuracy": _accuracy_part, "format": self.format_factory()}

    def check_answer(
        self,
        value: Any,
        frame: CoordFrame,
        sizes: Sequence[tuple[int, int]],
        params: Mapping[str, Any],
    ) -> str:
        """A label of the set, or a synonym, as the set spells it."""
        from mmrl.tasks.readers.common import RowError, text_of

        label = text_of(value, "answer")
        try:
            known = self.label_set(params)
        except ValueError as err:
            raise RowError(
                "a label set without doubt", str(err), "correct params.labels and params.synonyms"
            ) from err
        if len(known.labels) < 2:
            raise RowError(
                "at least two labels in params.labels, or the task's parameter labels",
                repr(known.labels)[:80],
                "list all labels the answer is chosen from",
            )
        found = known.exact(label)
        if not found:
            raise RowError(
                "an answer from the label set",
                repr(label)[:80],
                "add it to params.labels." + did_you_mean(label, known.labels),
            )
        return found[0]

    def parse(self, answer: str, sample: Sample, ctx: RewardContext) -> str:
        """The label the answer names. Reasons: answer_too_long, not_a_label, several_labels."""
        if len(answer) > _MAX_CHARS:
            raise AnswerError("answer_too_long")
        known = self.label_set(sample.params)
        found = known.exact(answer)
        if not found:
            mentioned = known.mentioned(answer)
            if len(mentioned) > 1:
                raise AnswerError("several_labels")
            found = mentioned if self.settings["mode"] == "mention" else []
        if not found:
            raise AnswerError("not_a_label")
        return found[0]

    def native(self, answer: str, sample: Sample, ctx: RewardContext) -> str | None:
        """The only label that a sentence names, where nothing doubts it."""
        labels = (
            self.label_set(sample.params).mentioned(answer) if len(answer) <= _MAX_CHARS else []
        )
        return labels[0] if len(labels) == 1 and not DOUBTS.search(answer) else None

    def measure(self, value: str, sample: Sample, ctx: RewardContext) -> Mapping[str, float]:
        """correct."""
        return {"correct": float(value == sample.answer)}

    def fill_prompt(self, prompt: str, sample: Sample, template: Template) -> str:
        """{question}, {labels} and {frame} filled in at once, so that braces in the data stay as they are."""
        labels = self.label_set(sample.params).labels
        shown = ", ".join(labels[:_LISTED]) + (", ..." if len(labels) > _LISTED else "")
        texts = {
            "question": sample.question,
            "labels": shown,
            "frame": FRAME_WORDS[CoordFrame(template.frame)],
        }
        return _SLOT.sub(lambda slot: texts[slot[1]], prompt)

    def gold_answer(self, sample: Sample, ctx: RewardContext) -> str:
        """The label."""
        return str(sample.answer)

    def wrong_answer(self, sample: Sample, ctx: RewardContext) -> str:
        """Another label of the set."""
        return next(
            label for label in self.label_set(sample.params).labels if label != sample.answer
        )

    def example_data(self, folder: str) -> str:
        """16 pictures with one shape in one of four colours, to be named by the colour."""
        from PIL import Image, ImageDraw

        from mmrl.tasks.examples import write_rows

        colours = {
            "red": (225, 35, 35),
            "green": (30, 165, 50),
            "blue": (40, 70, 225),
            "yellow": (240, 215, 30),
        }
        target = Path(folder)
        target.mkdir(parents=True, exist_ok=True)
        rows = []
        for number in range(16):
            label, left = list(colours)[number % 4], 8 + 9 * (number // 4)
            picture = Image.new("RGB", (112, 112), (235, 235, 235))
            draw = ImageDraw.Draw(picture)
            shape = draw.ellipse if number % 3 else draw.rectangle
            shape((left, left, left + 60, left + 60), fill=colours[label])
            picture.save(target / f"{number}.png")
            rows.append(
                {
                    "id": f"classification-{number}",
                    "image": f"{number}.png",
                    "question": "Which colour is the shape?",
                    "answer": label,
                    "params": {"labels": list(colours), "synonyms": {"red": ["scarlet"]}},
                }
            )
        return write_rows(folder, rows)

    def summarize(self, rows: Sequence[Score]) -> Mapping[str, float]:
        """accuracy over all rows, and macro_recall: its mean over the true labels, each counting the same."""
        if not rows:
            return {}
        seen: Counter[str] = Counter()
        right: Counter[str] = Counter()
        for row in rows:
            label = str(row.detail.get("gold_text", ""))
            seen[label] += 1
            right[label] += row.metrics.get("correct", 0.0) >= 0.5
        return {
            "accuracy": right.total() / len(rows),
            "macro_recall": sum(right[k] / seen[k] for k in seen) / len(seen),
            **super().summarize(rows),
        }
