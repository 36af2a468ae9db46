"""Rows of any JSON Lines, JSON or parquet file, or data set of the hub, by the names of its columns.

    reader: {columns: {image: img, question: prompt, answer: label}}
    reader: {columns: {image: image, question: conversations.0.value, answer: conversations.1.value}}        LLaVA
    reader: {columns: {image: images, question: messages.0.content, answer: messages.1.content}}             TRL, ms-swift
    mmrl tasks check ocr --data rows.parquet --param "reader={columns: {image: img, question: prompt, answer: text}}"

A name may be a path: keys and places of lists (from 0, from the end with -1) between dots; a column that has the whole name goes
first. Fields: question and answer (needed), image, video and audio (one or a list; pictures also as bytes or {"bytes",
"path"}), id, task (for mixed), source, options, and params.NAME for anything a task reads in params; params.video.start goes into
the object params.video, as deep as there are dots. A message's content may be a
list of parts (TRL): its texts are joined. Placeholders <image>, <video> and <audio> in the question must be as many as the
media, or none.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from mmrl.errors import ConfigError, did_you_mean
from mmrl.tasks.readers.answers import listed, options_in, split_options
from mmrl.tasks.readers.audios import audio_names, resolve_audio, without_audio_marks
from mmrl.tasks.readers.common import (
    Check,
    Readout,
    RowError,
    SizeOf,
    check_frame,
    collect,
    text_of,
)
from mmrl.tasks.readers.problem_types import Routes, check_by_task
from mmrl.tasks.readers.tables import (
    data_files,
    media_folder,
    picture,
    read_files,
    row_id,
    rows_of,
    words_of,
)
from mmrl.tasks.readers.video_rows import ask, load_media, marked, read_truth, videos_of
from mmrl.tasks.readers.videos import Clips
from mmrl.types import Sample

__all__ = ["FIELDS", "read_mapped"]

FIELDS = ("id", "task", "image", "video", "audio", "question", "answer", "source", "options")
"""What a column may be mapped to, beside params.NAME."""

_MISSING = object()


def _check_columns(columns: Any) -> dict[str, str]:
    """`columns` as {field: column}. Raises ConfigError."""
    if (
        not isinstance(columns, Mapping)
        or not columns
        or not all(isinstance(v, str) and v for v in columns.values())
    ):
        raise ConfigError(
            f"expected reader.columns as a mapping of fields to columns, found {columns!r:.80}; for example "
            "{image: img, question: prompt, answer: label}"
        )
    for field in columns:
        if field not in FIELDS and not str(field).startswith("params."):
            raise ConfigError(
                f"unknown field {field!r} in reader.columns; expected {', '.join(FIELDS)} or params.NAME."
                f"{did_you_mean(str(field), FIELDS)}"
            )
    missing = [field for field in ("question", "answer") if field not in columns]
    if missing:
        raise ConfigError(
            f"expected reader.columns with {' and '.join(missing)}, found {', '.join(columns)}; name the column"
        )
    fields = {str(field): column for field, column in columns.items()}
    for field in fields:
        within = next((other for other in fields if other.startswith(f"{field}.")), None)
        if within or not all(field.split(".")):
            raise ConfigError(
                f"expected params.NAME or its parts params.NAME.PART in reader.columns, found {field!r}"
                + (f" and {within!r}; map one of them" if within else "; name what is meant")
            )
    return fields


def _at(row: Any, path: str) -> Any:
    """The value under `path` in a row, _MISSING where there is none."""
    if isinstance(row, Mapping) and path in row:
        return row[path]
    key, _, rest = path.partition(".")
    if isinstance(row, Mapping):
        row = row.get(key, _MISSING)
    elif isinstance(row, list) and key.lstrip("-").isdecimal():
        place = int(key)
        row = row[place] if -len(row) <= place < len(row) else _MISSING
    else:
        return _MISSING
    return _at(row, rest) if rest and row is not _MISSING else row


def _nearest(row: Mapping[str, Any], path: str) -> str:
    """Where a path leaves a row, in words: what stands at the last part of it that is there."""
    reached, left = "", path
    while left:
        key, _, rest = left.partition(".")
        whole = f"{reached}.{key}" if reached else key
        if _at(row, whole) is _MISSING:
            break
        reached, left = whole, rest
    if not reached:
        return ""
    value = _at(row, reached)
    inside = (
        f"a list of {len(value)}"
        if isinstance(value, list)
        else f"an object with {', '.join(map(str, value))}"
        if isinstance(value, Mapping)
        else f"{type(value).__name__} {value!r:.40}"
    )
    return f"; {reached!r} is {inside}"


def _column(row: Mapping[str, Any], columns: Mapping[str, str], field: str) -> Any:
    """The row's value for `field`, None where the field has no column. Raises RowError for a column that the row lacks."""
    if field not in columns:
        return None
    value = _at(row, columns[field])
    if value is _MISSING:
        there = _nearest(row, columns[field])
        hint = "" if there else did_you_mean(columns[field].partition(".")[0], list(row))
        raise RowError(
            f"a column {columns[field]!r} for {field}",
            f"columns {', '.join(map(str, row))}{there}",
            f"correct reader.columns.{field}.{hint}",
        )
    return value


def _params(row: Mapping[str, Any], columns: Mapping[str, str]) -> dict[str, Any]:
    """What the columns mapped to params.NAME hold, those of params.NAME.PART in an object. Raises RowError."""
    params: dict[str, Any] = {}
    for field in columns:
        if field.startswith("params."):
            *above, last = field.split(".")[1:]
            place = params
            for key in above:
                place = place.setdefault(key, {})
            place[last] = _column(row, columns, field)
    return params


def _pictures(value: Any) -> list[Any]:
    """Pictures of a column: one or a list of them; {"image": ...} parts give what they hold."""
    found = [
        part["image"] if isinstance(part, Mapping) and "image" in part else part
        for part in listed(value)
    ]
    return [part for part in found if part is not None and part != ""]


def read_mapped(
    path: str | Path,
    *,
    columns: Mapping[str, str] | None = None,
    image_root: str | None = None,
    media_dir: str | None = None,
    video_root: str | None = None,
    audio_root: str | None = None,
    video: Mapping[str, Any] | None = None,
    probe: bool = True,
    frame: str = "abs_orig",
    task: str = "open_text",
    types: Mapping[str, str] | None = None,
    only_mine: bool = False,
    on_error: str = "raise",
    check: Check = check_by_task,
) -> Readout:
    """Read a file, or the parquet (else .jsonl, .json) files of a folder, by `columns`, as the module says.

    `frame` is that of boxes and points in answers; `media_dir` receives embedded pictures (default '<file>.media' beside the
    file); `types` and `only_mine` as in mmrl.tasks.readers.problem_types, for the column mapped to `task`; `video` and `probe` as
    in mmrl.tasks.readers.videos.Clips. Raises ConfigError for an unknown field; a column that a row lacks is an error of the row.
    """
    names, box_frame = _check_columns(columns), check_frame(frame)
    routes = Routes("mapped", task, types, only_mine, table={name: name for name in _tasks()})

    def read_one(file: Path) -> Readout:
        root, folder = (
            Path(image_root) if image_root else file.parent,
            media_folder(file, media_dir),
        )
        clips = Clips(video_root or root, video, probe)

        def convert(number: int, row: dict[str, Any], size_of: SizeOf) -> Iterable[Sample]:
            own = routes.task_of(_column(row, names, "task"))
            values, given = _pictures(_column(row, names, "image")), _params(row, names)
            videos = videos_of(_column(row, names, "video"), {}, given.pop("video", None))
            hears = Path(audio_root) if audio_root else root
            sounds = audio_names(_column(row, names, "audio"))
            words = text_of(words_of(_column(row, names, "question")), names["question"])
            words = without_audio_marks(words, len(sounds), names["question"])
            words, videos = marked(words, videos, len(values))
            media = load_media(
                videos, [picture(value, root, folder) for value in values], clips, size_of
            )
            question = ask(words, media, names["question"], exact=False)
            params = {**media.params, **given}
            options = options_in(_column(row, names, "options"))
            if own in ("choice", "spatial") and not options:
                question, behind = split_options(question)
                options = options_in(behind)
            params |= {"options": options} if options else {}
            answer = words_of(_column(row, names, "answer"))
            if answer is None:
                raise RowError(
                    f"the truth in {names['answer']!r}",
                    "null",
                    "remove the row or correct reader.columns.answer",
                )
            source = _column(row, names, "source")
            yield Sample(
                id=row_id(_column(row, names, "id"), f"{file.stem}-{number}"),
                task=own,
                source=text_of(source, names["source"]) if source is not None else file.stem,
                question=question,
                answer=check(own, read_truth(own, answer), box_frame, media.sizes, params),
                images=media.images,
                videos=media.videos,
                params=params,
                audios=tuple(resolve_audio(name, hears) for name in sounds),
            )

        return collect(file, rows_of(file), convert, on_error)

    return read_files(
        data_files(Path(path), "*.parquet", "*.jsonl", "*.json", "*/*.parquet"), read_one, on_error
    )


def _tasks() -> list[str]:
    from mmrl.registry import BUILT_IN

    return [name for name in BUILT_IN if name != "mixed"]
