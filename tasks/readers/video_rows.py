"""Rows of training formats that may show videos: their media, placeholders, and truths of tasks about time.

{"time": [2.5, 7]}                                 ->  [[2.5, 7]]             temporal_grounding; also [2.5, 7], `2.5 to 7`
{"time": [17.0, 18.5], "boxes": {"18": [...]}}     ->  as it is               st_grounding, keys are seconds
{"boxes": {"0": [...], "1": [...]}}                ->  as it is               tracking, keys are seconds
{"answer": "B", "time": [2.5, 7]}                  ->  {"choice", "spans"}    grounded_qa

What qwen-vl-utils reads beside a video (video_start, video_end, fps, nframes, min_frames, max_frames) becomes params.video; truths
about time count from the beginning of the part. fps and nframes at the top of a row, or both beside a path, are left aside with a
note: they may be those of its file; so are keys that say nothing of how it is shown.

python -c "from mmrl.tasks.readers.video_rows import read_truth; print(read_truth('temporal_grounding', '2.5 to 7'))"
"""

from __future__ import annotations

import difflib
import math
import os
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from mmrl.errors import did_you_mean
from mmrl.tasks.readers.answers import answer_in_tags, listed, parse_literal, read_answer
from mmrl.tasks.readers.common import RowError, SizeOf, text_of
from mmrl.tasks.readers.problem_types import refuse_sounds, refuse_video
from mmrl.tasks.readers.tables import LEADING, question_of, size_params
from mmrl.tasks.readers.videos import SAMPLING, Clips, resolve_video

__all__ = [
    "Media",
    "TIMED",
    "Videos",
    "ask",
    "column_of",
    "empty",
    "leave_sounds",
    "load_media",
    "marked",
    "null",
    "one_of",
    "read_truth",
    "refuse_sizes",
    "videos_of",
]

TIMED = ("temporal_grounding", "st_grounding", "tracking", "grounded_qa")
"""Tasks whose truths are times of a video, and the only ones a picture cannot be asked about."""
_RANGE = re.compile(
    r"([0-9]{1,9}(?:\.[0-9]{1,9})?)(?: (?:to|-|and) | ?- ?)([0-9]{1,9}(?:\.[0-9]{1,9})?)(?: ?s(?:econds)?)?\.?"
)
_LEADING = re.compile(r"(?:\s*<video>)+\s*")
_ALSO = {name: (name, name.removesuffix("s")) for name in ("images", "videos", "audios")}
"""Columns that data have under either name; ms-swift takes both."""
_QWEN = {"video_start": "start", "video_end": "end", "nframes": "num_frames"}
"""Keys of qwen-vl-utils that params.video calls otherwise."""
_HOW = (*_QWEN, *SAMPLING)
_SIZES = ("min_pixels", "max_pixels", "total_pixels", "resized_height", "resized_width")
_OF_A_FILE = ("fps", "nframes")
_ASIDE = "{} of a row left aside: it may be that of its file, and counts beside the path alone"
_OF_A_ROW = ("video_start", "video_end", "min_frames", "max_frames", *_SIZES)
_A_VIDEO = ("path", "video", "bytes", "type")
"""Keys of an entry that name it; bytes beside a path are those of the file."""
_COUNTS = ("num_frames", "min_frames", "max_frames", "factor")


class Videos(NamedTuple):
    """The videos of a row: names as they stand, what the row says of how they are shown, as params.video has it, and notes of what
    was done to the row for them (params.adjusted)."""

    names: list[str]
    shown: dict[str, Any]
    notes: tuple[str, ...] = ()


class Media(NamedTuple):
    """What a row shows: paths, (width, height) per picture, or per video where it has videos, and the params they give."""

    videos: tuple[str, ...]
    images: tuple[str, ...]
    sizes: list[tuple[int, int]]
    params: dict[str, Any]


def column_of(row: Mapping[str, Any], *names: str, notes: list[str]) -> Any:
    """What a row holds under one of `names`, or under `image`, `video` or `audio` for their plurals; None for nothing. Of several
    see `one_of`, which may add to `notes`."""
    keys = dict.fromkeys(key for name in names for key in _ALSO.get(name, (name,)))
    there = {key: row[key] for key in keys if key in row and not empty(row[key], words=False)}
    # an empty name is its reader's to judge, unless another column has one
    filled = {key: value for key, value in there.items() if not empty(value)}
    return one_of(filled or there, notes)


def leave_sounds(
    row: Mapping[str, Any], question: Any, shown: Any, images_only: bool, notes: list[str]
) -> None:
    """Leaves the sounds of a row that shows something aside, with a note in `notes`. Raises RowError, or SkipRow, for one that
    shows nothing or asks about them: it would be another question."""
    sounds = column_of(row, "audios", notes=[])
    if empty(sounds) or sounds is False:
        return
    if not shown or "<audio>" in str(question):
        refuse_sounds(images_only)
    notes.append(
        "sounds of a row with pictures or videos left aside: its format does not read them"
    )


def empty(value: Any, words: bool = True) -> bool:
    """Whether a column holds nothing: null, NaN or, with `words`, blank text; also a list or an object of nothing else."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return all(empty(part, words) for part in value)
    return null(value) or (words and isinstance(value, str) and not value.strip())


def one_of(there: Mapping[str, Any], notes: list[str]) -> Any:
    """The media of the one of several places that names all media of the others (a preview beside a list), else of the first,
    with a note; None without places. Raises RowError where others name more than the first, or say how theirs are shown."""
    if len(there) < 2:
        return next(iter(there.values()), None)
    names = {place: [_name(item) for item in listed(value)] for place, value in there.items()}
    said = {place: _said(value) for place, value in there.items()}
    every = [name for found in names.values() for name in found]
    whole = [place for place, found in names.items() if all(name in found for name in every)]
    first = max(whole, key=lambda place: len(said[place])) if whole else next(iter(there))
    others = [place for place in there if place != first]
    if any(len(names[place]) > len(names[first]) or said[place] - said[first] for place in others):
        raise RowError(
            f"the row's media in one of {', '.join(there)}",
            f"{' and '.join(there)}, which differ",
            "remove one of them, or map the columns that are meant (reader.columns)",
        )
    if not whole:
        notes.append(f"{' and '.join(others)} left aside: other media than in {first}")
    return there[first]


def _name(item: Any) -> Any:
    """A medium's name, in one spelling; the bytes of one without a name."""
    if isinstance(item, Mapping):
        keys = ("path", "video", "image", "url", "bytes")
        item = next((item[key] for key in keys if not empty(item.get(key))), None)
    return os.path.normpath(item) if isinstance(item, str) else item


def _said(value: Any) -> set[tuple[str, str]]:
    """What entries of a column say of how their media are shown."""
    entries = [item for item in listed(value) if isinstance(item, Mapping)]
    return {
        (key, repr(v))
        for entry in entries
        for key, v in entry.items()
        if key in (*_HOW, *_SIZES) and not null(v)
    }


def refuse_sizes(entry: Mapping[str, Any], setting: str) -> None:
    """Raises RowError for a size in pixels that `entry` gives: a run shows all of its media by `setting`."""
    for key in _SIZES:
        if not null(entry.get(key)):
            raise RowError(
                "no size in pixels in a row",
                f"{key!r} {entry[key]!r:.40}",
                f"remove it, and set {setting} for the run",
            )


def null(value: Any) -> bool:
    """None, or NaN, as pandas writes it."""
    return value is None or (isinstance(value, float) and math.isnan(value))


def _plain(given: Mapping[str, Any]) -> dict[str, Any]:
    """Keys of params.video without nulls; whole numbers that parquet made floats, beside nulls, are whole again."""
    return {
        key: int(value)
        if key in _COUNTS and isinstance(value, float) and value.is_integer()
        else value
        for key, value in given.items()
        if not null(value)
    }


@lru_cache(maxsize=256)
def _nearly(key: str) -> bool:
    """Whether a key is a misspelt one; nearer than did_you_mean asks for: "name" is no nframes."""
    return bool(difflib.get_close_matches(key.lower(), _HOW, cutoff=0.85))


def _sampling(entry: Mapping[str, Any], notes: list[str]) -> dict[str, Any]:
    """Keys of qwen-vl-utils, or of params.video, as params.video has them; what is left aside of others goes into `notes`. Raises
    RowError for a key that is nearly one of them."""
    refuse_sizes(entry, "data.video.max_pixels")
    given = {key: value for key, value in entry.items() if not null(value)}
    rate = given.get("fps")
    # processors of Qwen2.5-VL have one per video
    if isinstance(rate, (list, tuple)) and len(rate) == 1:
        given["fps"] = rate[0]
    for key in [key for key in given if key not in _HOW]:
        if _nearly(str(key)):
            raise RowError(
                f"a path and, for how the video is shown, {', '.join(_HOW)}",
                repr(key)[:60],
                f"correct the key, or remove it.{did_you_mean(str(key), _HOW)}",
            )
        del given[key]
        notes.append(f"{key!r:.60} of a video left aside: it says nothing of how that is shown")
    # qwen-vl-utils takes either: both are those of the file
    if set(_OF_A_FILE) <= set(given):
        for key in _OF_A_FILE:
            del given[key]
        notes.append(
            "fps and nframes of a video left aside: together they may be those of its file"
        )
    return _one([_plain({_QWEN.get(key, key): value}) for key, value in given.items()])


def videos_of(
    value: Any, row: Mapping[str, Any], shown: Any = None, notes: Sequence[str] = ()
) -> Videos:
    """The videos of a column with one or a list of them; a video may be a path, or {"path"} or {"video"} with keys of
    qwen-vl-utils or of params.video beside it. Keys of qwen-vl-utils at the top of `row` count as well, and `shown`, the row's own
    params.video; `notes` are of what was done to the row before. Raises RowError."""
    names, parts, aside = [], [], list(notes)
    for item in [] if value == "" or empty(value, words=False) else listed(value):
        entry = item if isinstance(item, Mapping) else {"path": item}
        # parquet gives every entry the keys of all
        name = entry.get("video") if null(entry.get("path")) else entry["path"]
        if not isinstance(name, str) or not name.strip():
            raise RowError(
                "a path to a video",
                repr(item)[:80],
                "frames and bytes inside rows are not read: store the video in a file",
            )
        names.append(name)
        parts.append(_sampling({k: v for k, v in entry.items() if k not in _A_VIDEO}, aside))
    if shown is not None and not isinstance(shown, Mapping):
        raise RowError(
            "params.video as an object", repr(shown)[:80], 'write {"start": 2.0, "end": 6.5}'
        )
    own = _plain(shown or {})
    if not names:  # a column of starts has 0 for pictures
        own = {key: value for key, value in own.items() if value}
    if own and not names:
        raise RowError(
            "a video, because params.video says how it is shown", "none", "name it, or remove them"
        )
    parts.append(own)
    if names:
        parts.append(_sampling({key: row[key] for key in _OF_A_ROW if key in row}, aside))
        aside += [_ASIDE.format(key) for key in _OF_A_FILE if not null(row.get(key))]
    if any(part != parts[0] for part in parts[1 : len(names)]):
        raise RowError(
            "all videos of a row shown alike, because params.video holds for all of them",
            repr(parts[: len(names)])[:120],
            "give them the same keys, or cut them into files of their own",
        )
    return Videos(names, _one(parts), tuple(dict.fromkeys(aside)))


def _one(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What several places of a row say of how its videos are shown. Raises RowError where they differ."""
    whole: dict[str, Any] = {}
    for part in parts:
        for key, value in part.items():
            if whole.setdefault(key, value) != value:
                raise RowError(
                    f"one {key!r} of the row's videos",
                    f"{whole[key]!r:.40} and {value!r:.40}",
                    "keep the one that is meant",
                )
    return whole


def load_media(
    videos: Videos,
    images: Sequence[str],
    clips: Clips,
    size_of: SizeOf,
    images_only: bool = False,
) -> Media:
    """The media of a row; `images` are paths already, names of `videos` below the root of `clips`.

    params are the facts of the first video, how all are shown and what was done to the row, else the size of the first picture.
    Raises RowError, MediaError, and SkipRow for a row with videos under `images_only`.
    """
    if videos.names and images_only:
        refuse_video("a row with a video", True)
    # all of them: a missing second picture is an error as well
    sizes = [size_of(image) for image in images]
    paths = tuple(resolve_video(name, clips.root) for name in videos.names)
    noted = {"adjusted": list(videos.notes)} if videos.notes else {}
    if not paths:
        return Media((), tuple(images), sizes, {**size_params(sizes), **noted})
    facts = [clips.facts(path, {}, **videos.shown) for path in paths]
    known = [(f["width"], f["height"]) for f in facts if "width" in f]
    return Media(paths, tuple(images), known, {**facts[0], **noted})


def marked(text: Any, videos: Videos, pictures: int) -> tuple[Any, Videos]:
    """The question, its <image> made <video> where they stand for the videos: LLaVA-Video's rows have no other placeholder. Only
    at its start, as many as videos, and in a row without pictures."""
    number = len(videos.names)
    lead = LEADING.match(text) if isinstance(text, str) and number and not pictures else None
    if lead is None or "<video>" in text or lead.group().count("<image>") != number:
        return text, videos
    note = "<image> at the start of a question about videos alone, taken for <video>"
    return "<video>" * number + text[lead.end() :], videos._replace(notes=(*videos.notes, note))


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
