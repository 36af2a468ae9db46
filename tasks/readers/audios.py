"""Audio files of data rows: where they are. They are opened when they are heard (mmrl.video.audio).

python -c "from pathlib import Path; from mmrl.tasks.readers.audios import resolve_audio; print(resolve_audio('a.wav', Path()))"
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mmrl.errors import MediaError
from mmrl.tasks.readers.common import RowError, path_below

__all__ = ["audio_names", "resolve_audio", "without_audio_marks"]

_MARK = "<audio>"
_LEADING = re.compile(r"(?:\s*<(?:audio|image|video)>)+\s*")
_OTHERS = re.compile(r"<(?:image|video)>")


def audio_names(value: Any) -> list[str]:
    """Names of a column with one sound or a list of them; a sound may be a path, {"path"} or {"audio"}. Raises RowError."""
    if value in (None, "", []):
        return []
    names = []
    for item in value if isinstance(value, (list, tuple)) else [value]:
        name = item.get("path", item.get("audio")) if isinstance(item, Mapping) else item
        held = isinstance(item, Mapping) and item.get("bytes") is not None
        if held or not isinstance(name, str) or not name.strip():
            raise RowError(
                "a path to an audio file",
                repr(item)[:80],
                "bytes inside rows are not read: store the sound in a file",
            )
        names.append(name)
    return names


def without_audio_marks(text: str, sounds: int, name: str) -> str:
    """A question without its <audio> placeholders, which must be as many as the sounds, or none.

    Sounds stand before the text, so placeholders at its start vanish; one inside becomes "(sound 2)" when there are several.
    Raises RowError.
    """
    found = text.count(_MARK)
    if found not in (0, sounds):
        raise RowError(
            f"{sounds} {_MARK} placeholders, one per sound, or none",
            f"{found} placeholders and {sounds} sounds",
            f"add or remove {_MARK} in '{name}'",
        )
    if not found:
        return text
    match = _LEADING.match(text)
    lead = match.group() if match else ""
    number = lead.count(_MARK)
    # those of pictures and clips among them are others' to take away
    rest = "".join(_OTHERS.findall(lead)) + text[len(lead) :] if number else text
    joined, *parts = rest.split(_MARK)
    for part in parts:
        number += 1
        shown = f"(sound {number})" if sounds > 1 else ""
        joined = _joined(_joined(joined, shown), part)
    return joined.rstrip()


def _joined(before: str, after: str) -> str:
    """One text behind the other: spaces between them become one, or none before a sign; line ends are kept."""
    left, right = before.rstrip(" "), after.lstrip(" ")
    if not left or not right or left[-1] == "\n" or right[0] in "\n.,;:!?)":
        return left + right
    return f"{left} {right}"


def resolve_audio(name: Any, root: Path) -> str:
    """Path of an audio file, relative names below `root`. Raises RowError, MediaError (missing)."""
    path = path_below(name, root, "an audio file", "audio")
    if not os.path.isfile(path):
        fix = (
            "download it first, addresses are not fetched"
            if "://" in path
            else "check the path, or say where the sounds are: data.train[].params.reader.audio_root=FOLDER"
        )
        raise MediaError(
            f"expected an audio file, found none at {path}; {fix}", kind="missing", path=path
        )
    return path
