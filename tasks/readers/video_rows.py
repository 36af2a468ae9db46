"""Rows of training formats that may show videos: their media, placeholders, and truths of tasks about time.

{"time": [2.5, 7]}                                 ->  [[2.5, 7]]             temporal_grounding; also [2.5, 7], `2.5 to 7`
{"time": [17.0, 18.5], "boxes": {"18": [...]}}     ->  as it is               st_grounding, keys are seconds
{"boxes": {"0": [...], "1": [...]}}                ->  as it is               tracking, keys are seconds
{"answer": "B", "time": [2.5, 7]}                  ->  {"choice", "spans"}    grounded_qa

python -c "from mmrl.tasks.readers.video_rows import read_truth; print(read_truth('temporal_grounding', '2.5 to 7'))"
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from mmrl.tasks.readers.answers import answer_in_tags, listed, parse_literal, read_answer
from mmrl.tasks.readers.common import RowError, SizeOf, text_of
from mmrl.tasks.readers.problem_types import refuse_video
from mmrl.tasks.readers.tables import question_of, size_params
from mmrl.tasks.readers.videos import Clips, resolve_video

__all__ = ["Media", "TIMED", "ask", "column_of", "load_media", "read_truth", "video_names"]

TIMED = ("temporal_grounding", "st_grounding", "tracking", "grounded_qa")
"""Tasks whose truths are times of a video, and the only ones a picture cannot be asked about."""
_RANGE = re.compile(
    r"([0-9]{1,9}(?:\.[0-9]{1,9})?)(?: (?:to|-|and) | ?- ?)([0-9]{1,9}(?:\.[0-9]{1,9})?)(?: ?s(?:econds)?)?\.?"
)
_LEADING = re.compile(r"(?:\s*<video>)+\s*")
_ALSO = {name: (name, name.removesuffix("s")) for name in ("images", "videos", "audios")}
"""Columns that data have under either name; ms-swift takes both."""


class Media(NamedTuple):
    """What a row shows: paths, (width, height) per picture, or per video where it has videos, and the params they give."""

    videos: tuple[str, ...]
    images: tuple[str, ...]
    sizes: list[tuple[int, int]]
    params: dict[str, Any]


def column_of(row: Mapping[str, Any], *names: str) -> Any:
    """What a row holds under one of `names`, or under `image`, `video` or `audio` for their plurals; None for nothing. Raises
    RowError where two of them hold different media: one would not be shown."""
    keys = [key for name in names for key in _ALSO.get(name, (name,))]
    there = {key: row[key] for key in keys if row.get(key) is not None}
    # an empty name is its reader's to judge, unless another column has one
    filled = {key: value for key, value in there.items() if value not in ("", [])}
    media = next(iter((filled or there).values()), None)
    if any(listed(value) != listed(media) for value in filled.values()):
        raise RowError(
            f"the row's media under one of {', '.join(keys)}",
            f"{' and '.join(filled)}, which differ",
            "remove one of them, or map the columns that are meant (reader.columns)",
        )
    return media


def video_names(value: Any) -> list[str]:
    """Names of a column with one video or a list of them; a video may be a path or {"path"} or {"video"}. Raises RowError."""
    names = []
    for item in (
        [] if value in (None, "", []) else value if isinstance(value, (list, tuple)) else [value]
    ):
        name = item.get("path", item.get("video")) if isinstance(item, Mapping) else item
        if not isinstance(name, str) or not name.strip():
            raise RowError(
                "a path to a video",
                repr(item)[:80],
                "frames and bytes inside rows are not read: store the video in a file",
            )
        names.append(name)
    return names


def load_media(
    videos: Sequence[str],
    images: Sequence[str],
    clips: Clips,
    size_of: SizeOf,
    images_only: bool = False,
) -> Media:
    """The media of a row; `images` are paths already, `videos` names below the root of `clips`.

    params are the facts of the first video, else the size of the first picture. Raises RowError, MediaError, and SkipRow
    for a row with videos under `images_only`.
    """
    if videos and images_only:
        refuse_video("a row with a video", True)
    # all of them: a missing second picture is an error as well
    sizes = [size_of(image) for image in images]
    paths = tuple(resolve_video(name, clips.root) for name in videos)
    if not paths:
        return Media((), tuple(images), sizes, size_params(sizes))
    facts = [clips.facts(path, {}) for path in paths]
    known = [(f["width"], f["height"]) for f in facts if "width" in f]
    return Media(paths, tuple(images), known, facts[0])


def ask(text: Any, media: Media, name: str, *, exact: bool = True) -> str:
    """The question without <video> and <image> placeholders. Their numbers must be those of the media or, not `exact`, zero.

    Videos stand before the text, so placeholders at its start vanish; one inside becomes "(video 2)" when there are several.
    Raises RowError.
    """
    words = text_of(text, name)
    found = words.count("<video>")
    if found != len(media.videos) and (exact or found):
        raise RowError(
            f"{len(media.videos)} <video> placeholders, one per video",
            f"{found} placeholders and {len(media.videos)} videos",
            f"add or remove <video> in '{name}'",
        )
    lead = _LEADING.match(words)
    number = lead.group().count("<video>") if lead else 0
    parts = (words[lead.end() :] if lead else words).split("<video>")
    joined = parts[0]
    for part in parts[1:]:
        number += 1
        joined = (
            joined.rstrip()
            + (f" (video {number}) " if len(media.videos) > 1 else " ")
            + part.lstrip()
        )
    return question_of(joined, len(media.images), name, exact=exact)


def _value(task: str, text: str) -> Any:
    """The JSON or Python literal of an answer, or a range of seconds as [[start, end]]. Raises RowError."""
    found = _RANGE.fullmatch(" ".join(text.split()))
    if found and task == "temporal_grounding":
        return [[float(found[1]), float(found[2])]]
    try:
        return parse_literal(text)
    except ValueError as err:
        raise RowError(
            f"the truth of task {task} as JSON, for example {_EXAMPLES[task]}",
            f"{text[:80]!r} ({err})",
            "correct the row's answer",
        ) from err


_EXAMPLES = {
    "temporal_grounding": '{"time": [2.5, 7]}',
    "st_grounding": '{"time": [2, 4], "boxes": {"2": [10, 20, 30, 40]}}',
    "tracking": '{"boxes": {"0": [10, 20, 30, 40]}}',
    "grounded_qa": '{"answer": "B", "time": [2.5, 7]}',
}


def _nested(value: Any) -> Any:
    """One pair [s, e] as [[s, e]]; anything else as it is."""
    pair = (
        isinstance(value, list) and len(value) == 2 and all(type(v) in (int, float) for v in value)
    )
    return [value] if pair else value


def read_truth(task: str, value: Any) -> Any:
    """What a row's answer means for `task`, for the task's own check; other tasks: mmrl.tasks.readers.answers.read_answer.

    <answer> tags are taken off. Raises RowError for a text that is no truth of a task about time.
    """
    if task not in TIMED:
        return read_answer(task, value)
    found = _value(task, answer_in_tags(value)) if isinstance(value, str) else value
    keys = {
        "temporal_grounding": ("time",),
        "st_grounding": ("time", "boxes"),
        "tracking": ("boxes",),
    }.get(task, ())
    if task == "temporal_grounding" and isinstance(found, list):
        return _nested(found)
    if task == "grounded_qa" and isinstance(found, Mapping):
        choice, spans = (
            found.get("choice", found.get("answer")),
            found.get("spans", found.get("time", found.get("glue"))),
        )
        if choice is not None and spans is not None:
            return {"choice": choice, "spans": _nested(spans)}
    elif isinstance(found, Mapping) and keys and all(key in found for key in keys):
        return (
            _nested(found["time"])
            if task == "temporal_grounding"
            else {key: found[key] for key in keys}
        )
    raise RowError(
        f"the truth of task {task}, for example {_EXAMPLES[task]}",
        repr(found)[:80],
        "correct the row's answer",
    )
