"""LLaMA-Factory sharegpt data: dataset_info.json says which file, which columns and which tags; all are honoured.

    {"my_set": {"file_name": "my.json", "formatting": "sharegpt",
                "columns": {"messages": "conversations", "images": "images"},
                "tags": {"role_tag": "from", "content_tag": "value", "user_tag": "human", "assistant_tag": "gpt"}}}

Each row is one question: an optional system message (kept in params.system), a user turn and an assistant turn whose text,
inside <answer> where there are such tags, is the truth. The number of <image> placeholders must equal that of the pictures, that
of <video> placeholders that of the videos. Rows with `audios` are errors, or left out with `images_only`; `audio`
beside a picture or a video is left aside and counted.
A data file without dataset_info.json beside it has LLaMA-Factory's default columns and tags; or `messages` with role and
content, as ms-swift, TRL and OpenAI write them. The truth of `messages` is in `solution`
where that is an answer of the task, whatever the assistant says (an old answer: ms-swift's rewards read `solution` alone); of
`conversations`, where no assistant speaks. Media are in `images` or
`image`, `videos` or `video`, with placeholders or, as in ms-swift, without. A row's `problem_type` (or the column `type_key`) names
its task; without it the task asked for holds.

    python -c "from mmrl.tasks.readers.llama_factory import read_llama_factory as r; print(len(r('data', dataset='my_set')))"
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from mmrl.errors import ConfigError, DataError, did_you_mean
from mmrl.tasks.readers.answers import listed, options_in, split_options
from mmrl.tasks.readers.common import (
    Check,
    Readout,
    RowError,
    SizeOf,
    check_frame,
    collect,
    text_of,
)
from mmrl.tasks.readers.problem_types import (
    Routes,
    check_by_task,
    refuse_sounds,
    refuse_video,
    type_params,
)
from mmrl.tasks.readers.tables import (
    media_folder,
    picture,
    read_files,
    read_json,
    row_id,
    rows_of,
    words_of,
)
from mmrl.tasks.readers.video_rows import (
    Media,
    Videos,
    ask,
    column_of,
    empty,
    leave_sounds,
    load_media,
    marked,
    null,
    one_of,
    read_truth,
    refuse_sizes,
    videos_of,
)
from mmrl.tasks.readers.videos import Clips
from mmrl.types import Sample

__all__ = ["read_llama_factory"]

_TAGS = {
    "role_tag": "from",
    "content_tag": "value",
    "user_tag": "human",
    "assistant_tag": "gpt",
    "observation_tag": "observation",
    "function_tag": "function_call",
    "system_tag": "system",
}
_OPENAI = {
    **_TAGS,
    "role_tag": "role",
    "content_tag": "content",
    "user_tag": "user",
    "assistant_tag": "assistant",
}
"""Tags of `messages`, the column of ms-swift, TRL and OpenAI."""
_PART = ("type", "text", "image", "video", "image_url", "video_url", "path", "url")
"""Keys of a part of a message that say what it is; others beside a video say how it is shown."""
_COLUMNS = {
    "messages": "conversations",
    "system": None,
    "tools": None,
    "images": None,
    "videos": None,
    "audios": None,
}


class _Set(NamedTuple):
    """One entry of dataset_info.json, resolved: its files, the names of its columns, its tags."""

    name: str
    files: list[Path]
    columns: dict[str, Any]
    tags: dict[str, str]
    described: bool = True  # by dataset_info.json, not by default


def _names(
    entry: Mapping[str, Any], key: str, defaults: Mapping[str, Any], where: str
) -> dict[str, Any]:
    """`defaults` overlaid with the entry's own columns or tags. Raises DataError for a value that is no text."""
    given = entry.get(key) or {}
    if not isinstance(given, dict) or not all(
        v is None or isinstance(v, str) for v in given.values()
    ):
        raise DataError(
            f"{where}: expected '{key}' as an object of names, found {given!r:.80}; correct it"
        )
    return {**defaults, **given}


def _entry(info: Path, dataset: str | None, file_name: str | None) -> tuple[str, dict[str, Any]]:
    """(name, entry) of dataset_info.json: the one called `dataset`, the one of `file_name`, or the only one."""
    entries = read_json(info)
    if (
        not isinstance(entries, dict)
        or not entries
        or not all(isinstance(e, dict) for e in entries.values())
    ):
        raise DataError(
            f"{info}: expected an object {{name: {{file_name, ...}}}}, found {entries!r:.80}; see LLaMA-Factory's "
            "data/README.md"
        )
    if dataset is None and file_name is not None:
        mine = [name for name, e in entries.items() if e.get("file_name") == file_name]
    else:
        mine = [name for name in entries if dataset in (None, name)]
    if dataset is not None and not mine:
        raise ConfigError(
            f"unknown dataset {dataset!r}; {info} has {', '.join(entries)}.{did_you_mean(dataset, entries)}"
        )
    if len(mine) != 1:
        raise ConfigError(
            f"expected reader.dataset, because {info} holds {len(entries)} data sets ({', '.join(entries)})"
            + (f" and {len(mine)} of them name {file_name}" if file_name else "")
            + "; name one of them"
        )
    return mine[0], entries[mine[0]]


def _resolve(path: Path, dataset: str | None) -> _Set:
    """What to read: `path` is dataset_info.json, its folder, or a data file."""
    info = (
        path / "dataset_info.json"
        if path.is_dir()
        else path
        if path.name == "dataset_info.json"
        else None
    )
    data_file = None if info else path
    if data_file is not None and (data_file.parent / "dataset_info.json").is_file():
        info = data_file.parent / "dataset_info.json"
    if info is None:
        return _Set(
            path.stem,
            [path],
            {**_COLUMNS, "images": "images", "videos": "videos", "audios": "audios"},
            dict(_TAGS),
            described=False,
        )
    name, entry = _entry(info, dataset, data_file.name if data_file else None)
    where = f"{info}: data set {name!r}"
    if entry.get("formatting", "alpaca") != "sharegpt":
        raise DataError(
            f"{where}: expected formatting sharegpt, found {entry.get('formatting', 'alpaca')!r}; convert it"
        )
    if entry.get("ranking"):
        raise DataError(
            f"{where}: expected questions with one answer, found preference pairs (ranking); take another set"
        )
    if not isinstance(entry.get("file_name"), str) or not entry["file_name"].isprintable():
        raise DataError(
            f"{where}: expected 'file_name', found {entry.get('file_name')!r:.60} and keys {sorted(entry)}; "
            "addresses are not fetched: download the data and name its file"
        )
    target = info.parent / entry["file_name"]
    is_folder = os.path.isdir(target)  # False, not an error, for a name no file can have
    files = sorted(f for f in target.iterdir() if f.is_file()) if is_folder else [target]
    return _Set(
        name, files, _names(entry, "columns", _COLUMNS, where), _names(entry, "tags", _TAGS, where)
    )


class _Asked(NamedTuple):
    """A row's words, and the media that its question names itself (see _shown)."""

    question: str
    said: str | None  # by the assistant
    solution: Any
    system: str | None
    shown: dict[str, list[Any]]


def _conversation(row: Mapping[str, Any], chosen: _Set) -> _Asked:
    """What a row asks and answers. Raises RowError for anything but one question and one answer."""
    column, tags = chosen.columns["messages"], chosen.tags
    mend = "in dataset_info.json"
    if not chosen.described:
        mend = "in a dataset_info.json, or map the columns that there are (reader.columns)"
        if column not in row and "messages" in row:
            column, tags = "messages", _OPENAI
    turns = row.get(column)
    if not isinstance(turns, list) or not all(isinstance(t, dict) for t in turns):
        raise RowError(
            f"a list of messages in '{column}'",
            repr(turns)[:80],
            f"correct columns.messages {mend}",
        )
    for turn in turns:
        for tag in ("role_tag", "content_tag"):
            if tags[tag] not in turn:
                raise RowError(
                    f"'{tags[tag]}' in every message",
                    f"keys {sorted(turn)}",
                    f"correct tags.{tag} {mend}",
                )
    system = row.get(chosen.columns["system"]) if chosen.columns["system"] else None
    if turns and turns[0][tags["role_tag"]] == tags["system_tag"]:
        system, turns = turns[0][tags["content_tag"]], turns[1:]
    roles = [turn[tags["role_tag"]] for turn in turns]
    content = tags["content_tag"]
    # of rows for reinforcement learning; beside an assistant of `conversations` it is some other column
    solution = None
    if not chosen.described and (tags is _OPENAI or roles == [tags["user_tag"]]):
        solution = _solution(row.get("solution"))
    if solution is not None and roles == [tags["user_tag"]]:
        roles.append(tags["assistant_tag"])
    if roles != [tags["user_tag"], tags["assistant_tag"]]:
        known = [
            tags[tag] for tag in ("user_tag", "assistant_tag", "observation_tag", "function_tag")
        ]
        fix = (
            "split it into one row per question"
            if all(role in known for role in roles)
            else f"correct tags.user_tag and tags.assistant_tag {mend}"
        )
        raise RowError(
            f"one turn of '{tags['user_tag']}' and one of '{tags['assistant_tag']}'",
            f"{roles!r:.80}",
            fix,
        )
    question, shown = _shown(turns[0][content])
    said = words_of(turns[1][content]) if len(turns) > 1 else None
    if solution is None or (isinstance(said, str) and said.strip()):
        said = text_of(said, content)
    else:  # nothing
        said = None
    return _Asked(
        text_of(question, content),
        said,
        solution,
        text_of(words_of(system), "system") if system else None,
        shown,
    )


def _solution(value: Any) -> Any:
    """A row's solution: numbers as text, None for nothing."""
    if null(value):
        return None
    if isinstance(value, str):
        return value.strip() or None
    if isinstance(value, float) and value.is_integer():  # parquet's, beside nulls
        value = int(value)
    return json.dumps(value) if isinstance(value, (bool, int, float)) else value


def _truth(asked: _Asked, read: Callable[[Any], Any]) -> tuple[Any, list[str]]:
    """(the truth of a row as `read` has it, notes): its solution, unless that is no answer of the task and the assistant's is (a
    worked solution). Raises RowError."""
    if asked.solution is None or asked.said is None:
        return read(asked.said if asked.solution is None else asked.solution), []
    said, wrong = None, None
    try:
        said = read(asked.said)
    except RowError as err:
        wrong = err
    try:
        truth = read(asked.solution)
    except RowError:
        if wrong:
            raise
        return said, ["truth of the assistant, 'solution' is no answer of the task"]
    return truth, [] if truth == said else ["truth of 'solution', not what the assistant says"]


def _shown(content: Any) -> tuple[Any, dict[str, list[Any]]]:
    """A message with a mark where it shows something, and what it names itself, {"images": [...], "videos": [...]}. Also of a
    list of parts, {"type": "text", "text"}, {"type": "image", "image"} (also without a name: of the row's column) or OpenAI's
    {"type": "image_url", "image_url": {"url"}}; how a video is shown stays beside it. Raises RowError where only some are named."""
    found: dict[str, list[Any]] = {"images": [], "videos": []}
    if not isinstance(content, list) or not all(isinstance(p, Mapping) for p in content):
        return content, found
    words = []
    for part in content:
        kind = str(part.get("type"))
        medium = kind.removesuffix("_url")
        if medium not in ("image", "video"):
            words.append(str(part.get("text", "")))
            continue
        value = part.get(kind, part.get(medium, part.get("path", part.get("url"))))
        beside = {key: v for key, v in part.items() if key not in _PART and v is not None}
        if isinstance(value, Mapping) and kind != medium:
            beside, value = {**value, **beside}, value.get("url")
            beside.pop("url", None)
        if medium == "image":
            refuse_sizes(beside, "data.max_pixels")
        elif beside:
            # where the row's column names it, a part's keys have nowhere to go
            if value is None:
                raise RowError(
                    f"the name of a video beside {', '.join(beside)} in its message",
                    "none",
                    "name it there, or write such keys beside its name in the row's column",
                )
            value = {**(value if isinstance(value, Mapping) else {"video": value}), **beside}
        found[f"{medium}s"].append(value)
        words.append(f"<{medium}>")
    for medium, values in found.items():
        named = [value for value in values if value is not None]
        if named and len(named) < len(values):
            raise RowError(
                f"all {medium} of a message named in it, or none (then by the column '{medium}')",
                f"{len(named)} of {len(values)}",
                "name them in one place",
            )
        found[medium] = named
    return "\n".join(words), found


def _media(
    row: Mapping[str, Any], chosen: _Set, asked: _Asked, images_only: bool
) -> tuple[Videos, list[Any]]:
    """(videos, pictures as they stand) of a row. Raises RowError, SkipRow."""

    notes = list[str]()

    def column(medium: str) -> Any:
        name = chosen.columns[medium]
        if chosen.described:
            return row.get(name) if name else None
        return column_of(row, name, notes=notes)

    sounds = chosen.columns["audios"]
    if (sounds and not empty(row.get(sounds))) or "<audio>" in asked.question:
        refuse_sounds(images_only)
    for medium, placeholder in (("images", "<image>"), ("videos", "<video>")):
        if chosen.columns[medium] is None and placeholder in asked.question:
            raise RowError(
                f"columns.{medium} in dataset_info.json, because the text has {placeholder}",
                "none",
                "name the pictures' column" if medium == "images" else "name the videos' column",
            )

    def media(medium: str) -> Any:
        places = {f"{medium} of the message": asked.shown[medium], medium: column(medium)}
        named = {place: value for place, value in places.items() if not empty(value)}
        return one_of(named, notes) if asked.shown[medium] else places[medium]

    images, videos = media("images"), media("videos")
    if not chosen.described:
        shown = not empty(images) or not empty(videos)
        leave_sounds(row, asked.question, shown, images_only, notes)
    clips = videos_of(videos, row, notes=notes)
    if clips.names and images_only:
        refuse_video("a row with videos", True)
    return clips, listed(images)


def read_llama_factory(
    path: str | Path,
    *,
    dataset: str | None = None,
    image_root: str | None = None,
    media_dir: str | None = None,
    frame: str = "abs_orig",
    task: str = "open_text",
    type_key: str = "problem_type",
    types: Mapping[str, str] | None = None,
    only_mine: bool = False,
    images_only: bool = False,
    video_root: str | None = None,
    video: Mapping[str, Any] | None = None,
    probe: bool = True,
    on_error: str = "raise",
    check: Check = check_by_task,
) -> Readout:
    """Read one sharegpt data set of a LLaMA-Factory data folder.

    `path` is the folder, its dataset_info.json or a data file; `dataset` names the entry where there are several.
    Pictures are relative to `image_root` (default: the folder of the data), videos to `video_root` (default: `image_root`);
    `frame` is that of boxes in answers. `types` and `only_mine`: see mmrl.tasks.readers.problem_types; `images_only` leaves rows
    with video or audio out; `video` (frame sampling) and `probe`: see mmrl.tasks.readers.videos.Clips.
    """
    chosen, box_frame = _resolve(Path(path), dataset), check_frame(frame)
    routes = Routes("llama_factory", task, types, only_mine)
    folder = Path(path) if Path(path).is_dir() else Path(path).parent

    def read_one(file: Path) -> Readout:
        root, store = Path(image_root) if image_root else folder, media_folder(file, media_dir)
        clips = Clips(video_root or root, video, probe)

        def convert(number: int, row: dict[str, Any], size_of: SizeOf) -> Iterable[Sample]:
            kind = row.get(type_key)
            own = routes.task_of(kind)
            asked = _conversation(row, chosen)
            text, system = asked.question, asked.system
            videos, values = _media(row, chosen, asked, images_only)
            text, videos = marked(text, videos, len(values))
            question = ask(
                text,
                Media(tuple(videos.names), ("",) * len(values), [], {}),
                chosen.tags["content_tag"],
                exact=chosen.described,
            )
            media = load_media(
                videos, [picture(value, root, store) for value in values], clips, size_of
            )
            params = {
                **media.params,
                **type_params(own, kind),
                **({"system": system} if system else {}),
            }
            if own in ("choice", "spatial"):
                question, behind = split_options(question)
                options = options_in(row.get("options") or behind)
                params |= {"options": options} if options else {}

            def read(answer: Any) -> Any:
                return check(own, read_truth(own, answer), box_frame, media.sizes, params)

            truth, notes = _truth(asked, read)
            if notes:
                params["adjusted"] = [*params.get("adjusted", ()), *notes]
            yield Sample(
                id=row_id(row.get("id"), f"{file.stem}-{number}"),
                task=own,
                source=chosen.name,
                question=question,
                answer=truth,
                images=media.images,
                videos=media.videos,
                params=params,
            )

        return collect(file, rows_of(file), convert, on_error)

    return read_files(chosen.files, read_one, on_error)
