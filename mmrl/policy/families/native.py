"""How released checkpoints of a family spell answers with places, each with its coordinate frame and who says so.

    family_of(model.config).answers["gui"].frame          # of clicks; NativeAnswer.missing says where no source was found

Three kinds of answers: "grounding" is a box for a phrase, "pointing" a point for a phrase, "gui" a click on a screenshot. Examples
are read by the tasks `grounding` and, of the last two, `gui_grounding` at `answers: native`; tests hold each to its value.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from mmrl.coords import CoordFrame
from mmrl.errors import ConfigError

__all__ = ["KINDS", "NativeAnswer", "native_answers", "no_source"]

KINDS = ("grounding", "pointing", "gui")


@dataclass(frozen=True)
class NativeAnswer:
    """One kind of answer: an `example` in the checkpoints' own spelling, the `frame` of its numbers and the `source`, a URL.

    `of` names whose answers the source speaks of, where they are not the family's own checkpoints' (a fine-tune, an older release).
    Where nobody says how answers are spelled there is no example: `missing` says where one looked. Raises ConfigError for anything
    between the two.
    """

    example: str = ""
    frame: CoordFrame | None = None
    source: str = ""
    of: str = ""
    missing: str = ""

    def __post_init__(self) -> None:
        told = (bool(self.example), self.frame is not None, self.source.startswith("https://"))
        if told != (not self.missing,) * 3:
            raise ConfigError(
                "expected a NativeAnswer with example, frame and the URL of their source, or with `missing` alone, found "
                f"{self}; give the three, or say where you looked"
            )


def no_source(looked: str) -> NativeAnswer:
    """An answer of which no source says how it is spelled; `looked` says where one was sought."""
    return NativeAnswer(missing=looked)


def native_answers(
    *, grounding: NativeAnswer, pointing: NativeAnswer, gui: NativeAnswer
) -> Mapping[str, NativeAnswer]:
    """All of KINDS, not to be changed."""
    return MappingProxyType({"grounding": grounding, "pointing": pointing, "gui": gui})
