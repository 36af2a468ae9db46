"""What a rollout in an environment was shown and where its turns acted: kept of a few rollouts, for people to look at.

(episode,) = begin(policy, sample, task, 1, key, filmed=1)
play(policy, engine, [[episode]], sampling)
row["film"] = episode.film.write(folder, "0_3")     # FOLDER/0_3_00.png ..., and what mmrl.report.turns draws over them
"""

from __future__ import annotations

import io
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from mmrl.environment import Mark, Observation, Outcome
from mmrl.errors import MediaError
from mmrl.files import writing
from mmrl.types import Sample
from mmrl.video.media import open_image, orientation_of

__all__ = ["Film"]

_LONG_SIDE = 640  # pixels of a kept picture
_MOST_PICTURES = 64  # of one rollout
_MOST_WORDS = 300  # characters of an observation's text
_LOSSLESS = 65_536  # pixels up to which a picture is kept as PNG, whatever that takes


@dataclass
class _Kept:
    """A picture: its bytes, made small, their kind, and its (width, height) as the observation gave it."""

    data: bytes
    kind: str
    size: tuple[int, int]


@dataclass
class Film:
    """The pictures of a rollout in the order in which they were shown, and of each turn what it saw, did and earned."""

    sample: Sample
    pictures: list[_Kept | None] = field(default_factory=list)
    turns: list[dict[str, Any]] = field(default_factory=list)
    _words: str = ""
    _fresh: bool = False  # whether the last observation had a picture

    def show(self, observation: Observation) -> None:
        """What the next turn is shown. Pictures are copied: an environment may draw the next one into the same array."""
        for image in observation.images:  # what is not kept has its place: marks count all pictures
            room = len(self.pictures) < _MOST_PICTURES
            self.pictures.append(_kept(image, self.sample) if room else None)
        self._fresh, self._words = bool(observation.images), _words_of(observation.messages)

    def act(self, outcome: Outcome) -> None:
        """What the turn did. Its picture is the one that its first mark is on, else the one that it was shown."""
        marks = [m for m in outcome.marks if isinstance(m, Mark)]
        count = len(self.pictures)
        places = {id(m): m.image + count if m.image < 0 else m.image for m in marks}
        place = places[id(marks[0])] if marks else count - 1 if self._fresh else -1
        known = 0 <= place < count and self.pictures[place] is not None
        self.turns.append(
            {
                "picture": place if known else None,
                "marks": [
                    {"kind": m.kind, "at": list(m.at)} for m in marks if places[id(m)] == place
                ],
                "words": self._words,
                "reward": float(outcome.reward),
            }
        )

    def write(self, folder: Path, name: str) -> dict[str, Any]:
        """Write the pictures as FOLDER/NAME_00.png and so on, and return the row's entry: their files and sizes, and the turns.
        Raises StorageError."""
        pictures: list[dict[str, Any] | None] = []
        for number, kept in enumerate(self.pictures):
            if kept is None:
                pictures.append(None)
                continue
            file = f"{name}_{number:02d}.{kept.kind}"
            with writing(folder / file):
                folder.mkdir(parents=True, exist_ok=True)
                (folder / file).write_bytes(kept.data)
            pictures.append({"file": file, "size": list(kept.size)})
        return {"pictures": pictures, "turns": self.turns}


def _kept(image: Any, sample: Sample) -> _Kept | None:
    """None for what is no picture: the rollout itself says that."""
    try:
        if isinstance(image, (str, os.PathLike)):
            picture = open_image(os.fspath(image), orientation=orientation_of(sample))
        else:
            picture = Image.fromarray(np.asarray(image))
    except (MediaError, TypeError, ValueError):
        return None
    picture, size = picture.convert("RGB"), picture.size
    picture.thumbnail((_LONG_SIDE, _LONG_SIDE))
    exact, small = io.BytesIO(), io.BytesIO()
    picture.save(exact, "PNG")
    if picture.size[0] * picture.size[1] > _LOSSLESS:
        picture.save(small, "JPEG", quality=88)
        if exact.tell() >= 2 * small.tell():
            return _Kept(small.getvalue(), "jpeg", size)
    return _Kept(exact.getvalue(), "png", size)


def _words_of(messages: Sequence[Mapping[str, Any]]) -> str:
    """The texts of the messages, without the system's."""
    found: list[str] = []
    for message in messages:
        content = message.get("content", "")
        items = [{"text": content}] if isinstance(content, str) else list(content or ())
        if message.get("role") != "system":
            found += [str(item.get("text", "")) for item in items if isinstance(item, Mapping)]
    return " ".join(filter(None, found))[:_MOST_WORDS]
