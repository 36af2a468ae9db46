"""mmrl's own rows, one JSON object per line (or a .json file that is one list of them):

    {"id": "7", "image": "images/7.png", "question": "red circle", "answer": [10, 12, 60, 61], "frame": "abs_orig"}

<image>, <video> and <audio> in a question stand for its media, as many as those or none.
What an answer is belongs to the task (see its check_answer). `images` (a list) may stand for `image`; `task` names the
row's task where one file mixes several; `video` or `videos` name clips (files, or folders of frames), `audio` or `audios` sounds
(wav, flac, mp3 ..., or a clip whose sound is meant); `frame` (abs_orig, rel1000 or rel1; default abs_orig), `source` and
`params` are optional; a missing id becomes '<file name>-<line>'. Paths are relative to the file, or to `image_root` (clips:
`video_root`, sounds: `audio_root`).

    python -c "from mmrl.tasks.readers.own import read_own; print(len(read_own('data.jsonl')))"
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from mmrl.data.bounds import read_bounded
from mmrl.data.json_lines import RowError, TwiceError, json_lines, keys_once
from mmrl.errors import ConfigError, DataError, did_you_mean
from mmrl.registry import BUILT_IN
from mmrl.tasks.readers.audios import resolve_audio, without_audio_marks
from mmrl.tasks.readers.common import (
    MAP_COLUMNS,
    Check,
    GeometryError,
    Readout,
    SizeOf,
    SkipRow,
    check_answer_box,
    check_frame,
    collect,
    resolve_image,
    text_of,
)
from mmrl.tasks.readers.video_rows import Media, ask
from mmrl.tasks.readers.videos import check_sampling, clip_facts, resolve_video
from mmrl.types import Sample

__all__ = ["read_own", "sample_from_row"]

_HEAD = 4096  # bytes of a .json file that are looked at for its first character
_KEYS = (
    "id",
    "task",
    "image",
    "images",
    "video",
    "videos",
    "audio",
    "audios",
    "question",
    "answer",
    "frame",
    "source",
    "params",
)


def _listed(path: Path) -> bool:
    """Whether a .json file begins as a list: its rows are the list's, not the lines."""
    if path.suffix != ".json":
        return False
    try:
        with path.open("rb") as handle:
            return handle.read(_HEAD).removeprefix(codecs.BOM_UTF8).lstrip()[:1] == b"["
    except OSError:
        return False  # json_lines says so


def _rows(path: Path) -> Iterator[tuple[int, Any]]:
    """(number from 1, row) of JSON Lines, or of a .json file that is one list of rows. Raises DataError for a broken list."""
    if not _listed(path):
        yield from json_lines(path)
        return
    try:
        rows = json.loads(read_bounded(path).decode("utf-8-sig"), object_pairs_hook=keys_once)
    except DataError:
        raise
    except TwiceError as err:
        raise DataError(
            f"{path}: expected every key once, found {err.args[0]!r:.60} twice in one object; keep the one that is "
            "meant"
        ) from err
    except (ValueError, RecursionError) as err:
        raise DataError(
            f"{path}: expected a list of rows as JSON, found {err}; fix it, or write one object per line and name it "
            ".jsonl"
        ) from err
    for number, row in enumerate(rows, 1):
        yield (
            number,
            row
            if isinstance(row, dict)
            else RowError("a JSON object", f"{type(row).__name__} {row!r:.60}", "wrap it in {...}"),
        )


def sample_from_row(
    number: int,
    row: dict[str, Any],
    size_of: SizeOf,
    *,
    root: Path,
    task: str,
    stem: str,
    default_frame: str = "abs_orig",
    check: Check = check_answer_box,
    only_mine: bool = False,
    video_root: Path | None = None,
    audio_root: Path | None = None,
) -> Sample:
    """One own-format row -> Sample, its answer as `check` gives it. Raises RowError, MediaError, SkipRow.

    `task` 'mixed' takes each row's task from its own 'task'; a row that names another built-in task is refused, or left out
    with `only_mine`. A row without pictures is a text question.
    """
    own = row.get("task")
    if task == "mixed":
        task = text_of(own, "task")
    elif own is not None and own != task and task in BUILT_IN:
        # a task that is not built in knows what it asked for
        if only_mine:
            raise SkipRow(f"task {own}")
        raise RowError(
            f"rows of task {task}",
            f"a row of task {own!r:.60}",
            "use task mixed, or set reader.only_mine=true to leave rows of other tasks out",
        )
    for key in row:
        if key not in _KEYS:
            raise RowError(
                f"the keys {', '.join(_KEYS)}",
                f"{key!r}",
                f"move extra fields into 'params', or {MAP_COLUMNS}." + did_you_mean(key, _KEYS),
            )
    images = tuple(resolve_image(name, root) for name in _paths(row, "image"))
    videos = tuple(resolve_video(name, video_root or root) for name in _paths(row, "video"))
    audios = tuple(resolve_audio(name, audio_root or root) for name in _paths(row, "audio"))
    params = row.get("params", {})
    if not isinstance(params, dict):
        raise RowError("'params' as an object", repr(params)[:80], "write {...} or leave it out")
    index = params.get("image_index", 0)
    if images and (type(index) is not int or not 0 <= index < len(images)):
        raise RowError(
            f"params.image_index in 0..{len(images) - 1}",
            repr(index),
            "name the picture of the answer",
        )
    if "answer" not in row:
        raise RowError(f"'answer' with the truth of task {task}", "no answer", "add it")
    try:
        frame = check_frame(row.get("frame", default_frame))
    except ConfigError as err:
        raise RowError("a known coordinate frame", str(err), "correct 'frame'") from err
    # all of them: a missing second picture is an error as well
    sizes = [size_of(image) for image in images]
    if images:
        width, height = sizes[index]
        if (params.get("width", width), params.get("height", height)) != (width, height):
            raise GeometryError(
                f"params.width and params.height as the picture has them, {width} x {height}",
                f"{params.get('width')} x {params.get('height')}",
                "is it the right picture? else remove them",
            )
        params = {**params, "width": width, "height": height}
        if videos:
            check_sampling(params)
    elif videos:
        params = clip_facts(videos[0], params)
        sizes = [(params["width"], params["height"])] * len(videos)
    return Sample(
        id=str(row.get("id", f"{stem}-{number}")),
        task=task,
        source=str(row.get("source", stem)),
        question=_question(row, Media(videos, images, sizes, params), len(audios)),
        answer=check(task, row["answer"], frame, sizes, params),
        images=images,
        videos=videos,
        params=params,
        audios=audios,
    )


def _question(row: dict[str, Any], media: Media, sounds: int) -> str:
    """Without the placeholders of its media, as every reader has it: none of them is a text of the model's own. Where a row has
    no picture, say, "<image>" is a word as any other."""
    words = text_of(row.get("question"), "question")
    if sounds:
        words = without_audio_marks(words, sounds, "question")
    for mark, shown in (("<image>", media.images), ("<video>", media.videos)):
        if not shown:
            words = words.replace(mark, f"<\0{mark[1:]}")
    return ask(words, media, "question", exact=False).replace("<\0", "<")


def _paths(row: dict[str, Any], key: str) -> list[Any]:
    """The row's media named by `key` or its plural."""
    if key in row and f"{key}s" in row:
        raise RowError(f"either '{key}' or '{key}s'", "both", "keep exactly one")
    names = [row[key]] if key in row else row.get(f"{key}s", [])
    if not isinstance(names, list):
        raise RowError(f"'{key}s' as a list of paths", repr(names)[:80], 'write ["FILE", ...]')
    return names


def read_own(
    path: str | Path,
    *,
    image_root: str | None = None,
    video_root: str | None = None,
    audio_root: str | None = None,
    task: str = "grounding",
    frame: str = "abs_orig",
    only_mine: bool = False,
    on_error: str = "raise",
    check: Check = check_answer_box,
) -> Readout:
    """Read own-format JSON Lines, or a .json list of such rows. `frame` holds for rows that declare none; `only_mine` leaves rows
    of other tasks out and counts them. Raises DataError, or records (on_error)."""
    file = Path(path)
    check_frame(frame)
    root = Path(image_root) if image_root else file.parent
    clips = Path(video_root) if video_root else root
    sounds = Path(audio_root) if audio_root else root

    def convert(number: int, row: dict[str, Any], size_of: SizeOf) -> Iterable[Sample]:
        return [
            sample_from_row(
                number,
                row,
                size_of,
                root=root,
                task=task,
                stem=file.stem,
                default_frame=frame,
                check=check,
                only_mine=only_mine,
                video_root=clips,
                audio_root=sounds,
            )
        ]

    return collect(file, _rows(file), convert, on_error)
