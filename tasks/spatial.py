"""Spatial questions: a letter, yes or no, or a relation word, with mirrored views that tell looking from guessing.

    {"id": "7", "image": "7.png", "question": "Where is the cat, seen from the dog?", "answer": "left"}
    {"id": "8", "image": "8.png", "question": "Is the cat left of the dog?", "answer": true}
    {"id": "9", "image": "9.png", "question": "What is right of the dog?", "answer": "B", "params": {"options": ["cat", "cow"]}}

A mirrored view is a further sample with params.mirror_of = the other one's id. Files may hold them; with `mirror: true` they
are made: the picture is flipped and written as a file, and left and right are exchanged in question, relation words and
options, which is right for every question (where the options stay the same, the letter moves). params.mirror false keeps a
row out (pictures with writing). How often the answers to two views agree is `view_consistency` (mmrl.rewards.views), over the
pairs of an evaluation; it is measured, not rewarded, because the two views are answered in different groups.

    mmrl tasks check spatial --data my.jsonl
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from mmrl.coords import CoordFrame
from mmrl.errors import ConfigError, DataError, MediaError
from mmrl.registry import register
from mmrl.rewards.choice import LETTERS, normalise_text, parse_boolean
from mmrl.rewards.parsing import MAX_ANSWER_CHARS
from mmrl.rewards.reading.choices import yes_or_no
from mmrl.rewards.reading.words import DOUBTS
from mmrl.rewards.views import is_consistent, swap_sides
from mmrl.task import Template
from mmrl.tasks.base import AnswerError, AnswerTask
from mmrl.tasks.boolean import read_truth
from mmrl.tasks.choice import Choice, options_of
from mmrl.tasks.examples import write_rows
from mmrl.types import RewardContext, Sample, Score

__all__ = ["RELATIONS", "Spatial", "mirror_sample", "parse_relation"]

RELATIONS: Mapping[str, tuple[str, ...]] = {
    "left": (
        "left",
        "left of",
        "to the left",
        "to the left of",
        "on the left",
        "on the left of",
        "at the left of",
    ),
    "right": (
        "right",
        "right of",
        "to the right",
        "to the right of",
        "on the right",
        "on the right of",
        "at the right of",
    ),
    "above": ("above", "over", "on top of", "higher than"),
    "below": ("below", "under", "underneath", "beneath", "lower than"),
    "in front": ("in front", "in front of"),
    "behind": ("behind", "at the back of"),
    "inside": ("inside", "in", "within"),
    "outside": ("outside", "outside of"),
    "near": ("near", "close to", "next to", "beside"),
    "far": ("far", "far from"),
}
"""Relation -> its spellings; other words stand for themselves."""

_CANONICAL = {spelling: name for name, spellings in RELATIONS.items() for spelling in spellings}
_OPPOSITE = {
    "left": "right",
    "above": "below",
    "in front": "behind",
    "inside": "outside",
    "near": "far",
}
_OPPOSITE = {**_OPPOSITE, **{b: a for a, b in _OPPOSITE.items()}}
_RELATION_WORD = re.compile(
    r"(?<![\w])(left|right|above|below|over|under|front|behind|inside|outside|near|far)(?![\w])"
)
_KINDS = {
    "choice": "the letter of the right option",
    "boolean": "yes or no",
    "relation": "the relation as one word, such as left, right, above or below",
}
_WORDS = {True: "yes", False: "no"}


def parse_relation(answer: str, known: Sequence[str] = (), listed: Sequence[str] = ()) -> str:
    """The relation an answer text is, in its canonical word; `known` are further words the row allows.

    Where the row lists its relations (`listed`), they are told apart as they are written, also where they mean nearly the
    same ("over", "on top of"); another spelling stands for a listed one only if it can mean no other. Raises AnswerError:
    answer_too_long, several_relations ("left or right"), ambiguous_relation, not_a_relation.
    """
    if len(answer) > MAX_ANSWER_CHARS:
        raise AnswerError("answer_too_long")
    text = normalise_text(answer)
    options = [normalise_text(word) for word in listed]
    if text in options:
        return text
    if text in _CANONICAL:
        meant = {word for word in options if _CANONICAL.get(word) == _CANONICAL[text]}
        if len(meant) > 1:
            raise AnswerError("ambiguous_relation")
        return meant.pop() if meant else _CANONICAL[text]
    if text in [normalise_text(word) for word in known]:
        return text
    raise AnswerError(
        "several_relations" if len(set(_RELATION_WORD.findall(text))) > 1 else "not_a_relation"
    )


def _kind(sample: Sample) -> str:
    if isinstance(sample.answer, bool):
        return "boolean"
    return (
        "choice" if sample.params.get("options") or sample.params.get("num_options") else "relation"
    )


@register("spatial")
class Spatial(Choice):
    """Where things are. Beside the parameters of the choice task:

    mirror         add a mirrored view of every sample that has pictures and none yet (default false)
    mirror_folder  where flipped pictures are written (default: the folder `mirrored` beside each picture)
    """

    shape: ClassVar[str] = "{kind}"
    shapes: ClassVar[str] = "a letter, yes or no, or a relation word"
    own_params: ClassVar[Mapping[str, Any]] = {
        **Choice.own_params,
        "mirror": False,
        "mirror_folder": None,
    }
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {}

    def __init__(self, **params: Any) -> None:
        super().__init__(**params)
        if not isinstance(self.settings["mirror"], bool):
            raise ConfigError(
                f"expected spatial.mirror true or false, found {self.settings['mirror']!r}"
            )
        if not isinstance(self.settings["mirror_folder"], (str, os.PathLike, type(None))):
            raise ConfigError(
                f"expected spatial.mirror_folder as a path, found {self.settings['mirror_folder']!r}"
            )

    def check_answer(
        self,
        value: Any,
        frame: CoordFrame,
        sizes: Sequence[tuple[int, int]],
        params: Mapping[str, Any],
    ) -> Any:
        """A letter where the row has options, a boolean, or a relation word: as params.relations spells it, else in its
        canonical form."""
        from mmrl.tasks.readers.common import RowError

        if not isinstance(params.get("mirror", False), bool) or not isinstance(
            params.get("mirror_of", ""), str
        ):
            raise RowError(
                "params.mirror as true or false and params.mirror_of as an id",
                f"{params.get('mirror')!r} and {params.get('mirror_of')!r}",
                "correct them",
            )
        if params.get("options") or params.get("num_options"):
            return super().check_answer(value, frame, sizes, params)
        if isinstance(value, bool) or (
            isinstance(value, str) and parse_boolean(value).value is not None
        ):
            return read_truth(value)
        if not isinstance(value, str) or not value.strip() or len(value) > 80:
            raise RowError(
                "a relation word, yes or no, or a letter with params.options",
                repr(value)[:80],
                "correct 'answer'",
            )
        word = normalise_text(value)
        listed = params.get("relations")
        if listed is None:
            return _CANONICAL.get(word, word)
        if (
            not isinstance(listed, list)
            or len(listed) < 2
            or not all(isinstance(r, str) and r.strip() for r in listed)
        ):
            raise RowError(
                "params.relations as a list of at least two relation words",
                repr(listed)[:80],
                "correct it",
            )
        try:
            return parse_relation(word, (), listed)
        except AnswerError as err:
            raise RowError(
                f"one of params.relations: {', '.join(listed)}",
                f"{value!r:.80} ({err.reason})",
                "correct 'answer' or add it to the list",
            ) from err

    def load(self, path: str) -> Iterable[Sample]:
        """Samples of a file, each followed by its mirrored view with `mirror: true`. Raises DataError for a mirror_of that
        names no sample of the file."""
        samples = list(super().load(path))
        ids = {sample.id for sample in samples}
        lost = [s for s in samples if s.params.get("mirror_of", s.id) not in ids]
        # with rejected rows a partner may be missing: its view is then a sample of its own
        if lost and not self.rejected:
            raise DataError(
                f"{path}: expected params.mirror_of to be the id of another row, found "
                f"{lost[0].params['mirror_of']!r} in sample {lost[0].id!r}; correct or remove it"
            )
        if not self.settings["mirror"]:
            return samples
        done = {s.params["mirror_of"] for s in samples if "mirror_of" in s.params}
        both: list[Sample] = []
        for sample in samples:
            both.append(sample)
            if (
                sample.images
                and "mirror_of" not in sample.params
                and sample.id not in done
                and sample.params.get("mirror", True)
            ):
                both += self._mirrored(sample)
        return both

    def _mirrored(self, sample: Sample) -> list[Sample]:
        """The mirrored view, none where the picture cannot be read and on_error is 'record': the sample itself reports it."""
        try:
            return [mirror_sample(sample, self.settings["mirror_folder"])]
        except MediaError as error:
            if self.on_error == "record":
                return []
            file, row = self.places[sample.id]
            raise DataError(
                f"{file}: row {row}: no mirrored view of sample {sample.id!r}: {error}"
            ) from error

    def fill_prompt(self, prompt: str, sample: Sample, template: Template) -> str:
        """{kind} becomes what this sample asks for; options as in the choice task."""
        kind = _KINDS[_kind(sample)]
        known = sample.params.get("relations")
        if known and _kind(sample) == "relation":
            kind = f"one of: {', '.join(known)}"
        return super().fill_prompt(prompt.replace("{kind}", kind), sample, template)

    def parse(self, answer: str, sample: Sample, ctx: RewardContext) -> Any:
        """A letter, a boolean or a relation, as the truth is. Reasons: those of choice, boolean and parse_relation."""
        kind = _kind(sample)
        if kind == "choice":
            return super().parse(answer, sample, ctx)
        if kind == "relation":
            return parse_relation(answer, [sample.answer], sample.params.get("relations") or [])
        found = parse_boolean(answer)
        if found.value is None:
            raise AnswerError(found.reason or "not_yes_or_no")
        return found.value

    def native(self, answer: str, sample: Sample, ctx: RewardContext) -> str | None:
        """As parse: the option, the yes or no, or the relation that a sentence names."""
        kind = _kind(sample)
        if kind == "choice":
            return super().native(answer, sample, ctx)
        if kind == "boolean":
            return yes_or_no(answer)
        words = {found[1] for found in _RELATION_WORD.finditer(answer.lower())}
        return (
            words.pop()
            if len(words) == 1 and len(answer) <= MAX_ANSWER_CHARS and not DOUBTS.search(answer)
            else None
        )

    def describe(self, value: Any, sample: Sample, ctx: RewardContext) -> Mapping[str, Any]:
        """pred_text and gold_text; view (id of the unmirrored sample) and mirrored, which pair views in `summarize`."""
        shown = {} if value is None else {"pred_text": self._text(value, sample)}
        return {
            **shown,
            "gold_text": self._text(sample.answer, sample),
            "view": sample.params.get("mirror_of", sample.id),
            "mirrored": "mirror_of" in sample.params,
        }

    def _text(self, value: Any, sample: Sample) -> str:
        """What an answer says, in words that a mirror can swap: the option's text rather than its letter."""
        if isinstance(value, bool):
            return _WORDS[value]
        options = options_of(sample.params) if _kind(sample) == "choice" else []
        return normalise_text(options[LETTERS.index(value)]) if options else str(value)

    def gold_answer(self, sample: Sample, ctx: RewardContext) -> str:
        """A letter, `yes` or `no`, or the relation word."""
        return (
            super().gold_answer(sample, ctx)
            if _kind(sample) == "choice"
            else self._text(sample.answer, sample)
        )

    def wrong_answer(self, sample: Sample, ctx: RewardContext) -> str:
        """Another letter, the other word or the opposite relation."""
        kind = _kind(sample)
        if kind == "choice":
            return super().wrong_answer(sample, ctx)
        if kind == "boolean":
            return _WORDS[not sample.answer]
        listed = [normalise_text(word) for word in sample.params.get("relations") or ()]
        opposite = _OPPOSITE.get(_CANONICAL.get(sample.answer, sample.answer), "left")
        return next((word for word in listed if word != sample.answer), opposite)

    def summarize(self, rows: Sequence[Score]) -> Mapping[str, float]:
        """accuracy, view_consistency and pair_accuracy (both views right) over pairs of views, mirrored_accuracy, rates.

        Without mirrored views there are no pairs and none of their numbers.
        """
        if not rows:
            return {}
        accuracy = sum(row.metrics.get("correct", 0.0) for row in rows) / len(rows)
        return {"accuracy": accuracy, **_pair_numbers(rows), **AnswerTask.summarize(self, rows)}

    def example_data(self, folder: str) -> str:
        """12 scenes with a relation: relation words, yes/no and letters; returns their data.jsonl."""
        from mmrl.tasks.scenes import example_scenes

        rows: list[dict[str, Any]] = []
        for index, row in enumerate(example_scenes(folder, 40, difficulty=1)):
            (a, b), names = (
                row["params"]["objects"],
                ["{color} {shape}".format(**thing) for thing in row["params"]["objects"]],
            )
            if len(rows) == 12 or names[0] == names[1]:
                continue
            apart = (
                "left"
                if a["box"][2] <= b["box"][0]
                else "right"
                if b["box"][2] <= a["box"][0]
                else None
            )
            if apart is None:
                continue
            question, answer, params = [
                (
                    f"Where is the {names[0]}, seen from the {names[1]}: left or right?",
                    apart,
                    {"relations": ["left", "right"]},
                ),
                (f"Is the {names[0]} left of the {names[1]}?", apart == "left", {}),
                (
                    f"Which object is on the {apart}?",
                    "AB"[index % 2],
                    {"options": names[::-1] if index % 2 else names},
                ),
            ][index % 3]
            rows.append({**row, "question": question, "answer": answer, "params": params})
        return write_rows(folder, rows)


def _pair_numbers(rows: Sequence[Score]) -> dict[str, float]:
    """Consistency over views of one sample; several answers per view are paired in their order."""
    views: dict[tuple[Any, bool], list[Score]] = {}
    for row in rows:
        if "view" in row.detail:
            views.setdefault((row.detail["view"], bool(row.detail["mirrored"])), []).append(row)
    pairs = [
        (a, b)
        for (view, mirrored), scores in views.items()
        if not mirrored
        for a, b in zip(scores, views.get((view, True), []), strict=False)
    ]
    if not pairs:
        return {}
    agree = sum(
        is_consistent(
            a.detail.get("pred_text"),
            b.detail.get("pred_text"),
            a.detail["gold_text"],
            b.detail["gold_text"],
        )
        for a, b in pairs
    )
    right = [(a.metrics.get("correct", 0.0), b.metrics.get("correct", 0.0)) for a, b in pairs]
    return {
        "view_consistency": agree / len(pairs),
        "pair_accuracy": sum(a * b for a, b in right) / len(pairs),
        "mirrored_accuracy": sum(b for _, b in right) / len(pairs),
    }


def mirror_sample(sample: Sample, folder: str | os.PathLike[str] | None = None) -> Sample:
    """The mirrored view of `sample`: flipped pictures as files, left and right exchanged in all words.

    Raises MediaError for a picture that cannot be read and ConfigError when `folder` cannot be written.
    """
    images = tuple(_flipped(Path(image), folder) for image in sample.images)
    answer, params = sample.answer, dict(sample.params)
    params.pop("mirror", None)
    if _kind(sample) == "relation":
        answer = swap_sides(answer)
        if params.get("relations"):
            params["relations"] = [swap_sides(word) for word in params["relations"]]
    elif params.get("options"):
        options = options_of(params)
        swapped = [swap_sides(option) for option in options]
        # the same options: then the letter moves, and a habit of letters shows
        if sorted(swapped) == sorted(options):
            answer = LETTERS[options.index(swapped[LETTERS.index(answer)])]
        else:
            params["options"] = swapped
    return replace(
        sample,
        id=f"{sample.id}-mirrored",
        question=swap_sides(sample.question),
        answer=answer,
        images=images,
        params={**params, "mirror_of": sample.id},
    )


def _flipped(picture: Path, folder: str | os.PathLike[str] | None) -> str:
    """Path of the flipped picture, written as PNG unless it is there and not older than its original."""
    from PIL import ImageOps

    from mmrl.video.media import open_image

    key = hashlib.blake2b(os.fsencode(os.path.abspath(picture)), digest_size=4).hexdigest()
    target = (
        Path(folder) if folder is not None else picture.parent / "mirrored"
    ) / f"{picture.stem}-{key}.png"
    if target.is_file() and target.stat().st_mtime >= picture.stat().st_mtime:
        return str(target)
    flipped = ImageOps.mirror(open_image(str(picture)))
    partial = target.with_name(f"{target.name}.{os.getpid()}.partial")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        flipped.save(partial, format="PNG")
        os.replace(partial, target)
    except OSError as err:
        raise ConfigError(
            f"expected to write mirrored pictures into {target.parent}, found: {err.strerror or err}; name "
            "another folder: spatial's mirror_folder"
        ) from err
    return str(target)
