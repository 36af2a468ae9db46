"""What an OpenEnv environment shows, as text and pictures for a policy.

    text, pictures = seen({"board": "X..", "screenshot": "iVBORw0K..."})      # "X..", [uint8 (H, W, 3)]

An observation is an object of the environment's own fields. Pictures are base64 of PNG, JPEG, WebP or GIF, with or without
`data:image/..;base64,` before it, alone or in a list, MCP's contents of the type image, and numbers (H, W, 3) or (H, W) in 0..255
in fields that `pictures` names (a flat list goes with FIELD_shape). Everything else is text: one field by its value alone, several
as "name: value", what is no text as JSON.

What a server shows is foreign: pictures are decoded by the readers that training's own files have (mmrl.video.media, with their
bounds), and their number and the length of the text are bounded.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mmrl.errors import MediaError
from mmrl.tasks.openenv_client import ServerError
from mmrl.video.media import MAX_PIXELS, open_image

__all__ = ["picture_of_text", "seen"]

_MAGIC = ("iVBORw0KGgo", "/9j/", "UklGR", "R0lGOD")
"""How the base64 of PNG, JPEG, WebP (RIFF) and GIF begins."""
_LEAST_CHARS = 64  # of a picture's base64: a word that begins like one is none
_HIDDEN = ("done", "reward", "metadata")


def seen(
    observation: Mapping[str, Any],
    *,
    fields: Sequence[str] | None = None,
    pictures: Sequence[str] = (),
    most_chars: int = 20_000,
    most_pictures: int = 16,
) -> tuple[str, list[np.ndarray]]:
    """The text and the pictures, uint8 (H, W, 3), in order. fields: those to show; None: all that are not null. pictures: fields of
    numbers that are pixels. A longer text is cut in its middle, and says so.

    Raises ServerError for a field that is not there, a picture that cannot be read, and for more than most_pictures.
    """
    looked = _Looked(most_pictures)
    names = [n for n in observation if n not in _HIDDEN] if fields is None else list(fields)
    for name in [*names, *pictures]:
        if name not in observation:
            raise ServerError(
                f"expected the field {name!r} of an observation, found {', '.join(map(str, observation))[:200] or 'none'}; "
                "mend openenv.fields or openenv.pictures"
            )
    parts = []
    if fields is None and isinstance(observation.get("tool_name"), str):
        parts.append(("", _tool_result(observation, looked)))
        names = []
    shapes = {f"{name}_shape" for name in pictures}
    for name in names:
        value = observation[name]
        if value is None or name in pictures or name in shapes:
            continue
        left = looked.without(value)
        if left is not None:
            parts.append((str(name), left if isinstance(left, str) else _json(left)))
    for name in pictures:
        if observation[name] is not None:
            shape = observation.get(f"{name}_shape")
            looked.add(_of_numbers(str(name), observation[name], shape))
    text = parts[0][1] if len(parts) == 1 else "\n".join(f"{n}: {v}" for n, v in parts)
    if len(text) > most_chars:
        half, out = most_chars // 2, len(text) - most_chars
        text = f"{text[:half]}\n[... {out} characters left out ...]\n{text[len(text) - half :]}"
    return text, looked.pictures


def _json(value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except (ValueError, RecursionError) as error:
        raise ServerError(f"expected an observation of plain JSON, found {error}") from error


class _Looked:
    """The pictures that were found on the way."""

    def __init__(self, most: int) -> None:
        self.most, self.pictures = most, list[np.ndarray]()

    def add(self, picture: np.ndarray) -> None:
        """Keep one. Raises ServerError for too many."""
        if len(self.pictures) >= self.most:
            raise ServerError(
                f"expected at most {self.most} pictures in an observation, found more; raise openenv.most_pictures, or name "
                "the fields to show (openenv.fields)"
            )
        self.pictures.append(picture)

    def without(self, value: Any, depth: int = 0) -> Any:
        """`value` without its pictures, which are kept; None where nothing else is left."""
        if isinstance(value, str):
            if (picture := picture_of_text(value)) is None:
                return value
            self.add(picture)
            return None
        if depth > 32 or not isinstance(value, (list, dict)):
            return value
        items = value.items() if isinstance(value, dict) else enumerate(value)
        known = len(self.pictures)
        left = {k: self.without(v, depth + 1) for k, v in items}
        if len(self.pictures) == known:
            return value
        if isinstance(value, dict):
            return {k: v for k, v in left.items() if v is not None or value[k] is None} or None
        return [v for k, v in left.items() if v is not None or value[k] is None] or None


def picture_of_text(text: str) -> np.ndarray | None:
    """The picture, uint8 (H, W, 3), that a text is the base64 of; None for another text. Raises ServerError for a broken one."""
    head, comma, body = text.partition(",") if text[:11] == "data:image/" else ("", "", text)
    if comma and "base64" not in head:
        return None
    if not comma and (len(body) < _LEAST_CHARS or not body.startswith(_MAGIC)):
        return None
    try:
        data = base64.b64decode("".join(body.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        if not comma:
            return None  # a text that begins like one
        raise ServerError(
            f"expected base64 of a picture, found something else ({error})"
        ) from error
    with tempfile.NamedTemporaryFile(prefix="mmrl-picture-") as file:
        file.write(data)
        file.flush()
        try:
            return np.array(open_image(file.name))
        except MediaError as error:
            # a MediaError would say that the sample's own picture is broken, and leave the sample out
            raise ServerError(
                f"expected a picture in the observation: {str(error).replace(file.name, 'it')}"
            ) from error


def _of_numbers(name: str, value: Any, shape: Any) -> np.ndarray:
    """Pixels given as numbers."""
    if isinstance(value, str):
        if (picture := picture_of_text(value)) is not None:
            return picture
        raise ServerError(f"expected a picture in the field {name!r}, found a text")
    try:
        pixels = np.asarray(value)
        if pixels.dtype.kind not in "iuf" or not pixels.size:
            raise ValueError(f"{pixels.dtype} {pixels.shape}")
        if shape is not None:
            sides = [int(v) for v in shape]
            if math.prod(sides) != pixels.size:
                raise ValueError(f"{pixels.size} numbers for {sides}")
            pixels = pixels.reshape(sides)
        if pixels.ndim == 3 and pixels.shape[2] == 1:
            pixels = pixels[:, :, 0]
        if pixels.ndim == 2:
            pixels = np.repeat(pixels[:, :, None], 3, 2)
        if (
            pixels.ndim != 3
            or pixels.shape[2] != 3
            or pixels.shape[0] * pixels.shape[1] > MAX_PIXELS
        ):
            raise ValueError(f"{pixels.dtype} {pixels.shape}")
        if not (pixels.min() >= 0 and pixels.max() <= 255):
            raise ValueError(f"values {pixels.min()}..{pixels.max()}")
    except (ValueError, TypeError, OverflowError) as error:
        raise ServerError(
            f"expected numbers 0..255 of (H, W, 3) or (H, W) in the field {name!r}, or flat ones with {name}_shape, found "
            f"{str(error)[:120]}"
        ) from error
    return pixels.astype(np.uint8)


def _tool_result(observation: Mapping[str, Any], looked: _Looked) -> str:
    """What a tool of MCP answered: its contents, texts and pictures, or why it failed."""
    error, result = observation.get("error"), observation.get("result")
    if error is not None:
        said = error.get("message") if isinstance(error, Mapping) else error
        return f"Error: {said}"
    contents = result.get("content") if isinstance(result, Mapping) else None
    if not isinstance(contents, list):
        left = looked.without(result)
        return "" if left is None else left if isinstance(left, str) else _json(left)
    lines = []
    for one in contents:
        if isinstance(one, Mapping) and isinstance(one.get("text"), str):
            lines.append(one["text"])
        elif isinstance(one, Mapping) and one.get("type") == "image":
            picture = picture_of_text(f"data:image/x;base64,{one.get('data')}")
            assert picture is not None, "a data address is a picture or an error"
            looked.add(picture)
    return "\n".join(lines)
