"""Video-MMMU: 300 lecture videos, three tracks of 300 questions (Perception, Comprehension, Adaptation) -> choice, open_text.

    Adaptation/test-00000-of-00001.parquet   id, question ("<image 1> ..."), options, answer, question_type, (image), link_selected
    Science/dev_Biology_3.mp4                videos by discipline: Art, Business, Engineering, Humanities, Medicine, Science

Adaptation asks about a picture, which the benchmark shows at the end of the video. Here the row's picture is kept as a picture
behind the video, and <image 1> inside the text becomes "the image"; for rows without one (JSON copies) the question says that
the image is at the end of the video. `picture_in_video` leaves the picture out for videos that end in it. So the input differs
from the official one. Accuracy is counted per track; knowledge gain compares Adaptation with the same questions asked without
the video, which is a second run. Open questions of Adaptation have a number or a word, officially found anywhere in the reply;
here the whole answer counts. Not verified: whether the parquet of every track has link_selected, which the format is known by.

    python -c "from mmrl.tasks.readers.video_mmmu import read_videommmu as r; print(len(r('VideoMMMU')))"
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from mmrl.tasks.readers.answers import listed, options_in, parse_literal
from mmrl.tasks.readers.common import Check, Readout, RowError, SizeOf, collect, text_of
from mmrl.tasks.readers.problem_types import Routes, check_by_task
from mmrl.tasks.readers.tables import data_files, media_folder, picture, read_files, row_id, rows_of
from mmrl.tasks.readers.video_mme import release_root, true_or_false
from mmrl.tasks.readers.videos import Clips, video_sample
from mmrl.types import Sample

__all__ = ["TRACKS", "read_videommmu"]

TRACKS = ("Perception", "Comprehension", "Adaptation")
_TYPES = {"multiple choice": "choice", "perception": "choice", "open": "open_text"}
_DISCIPLINES = ("Art", "Business", "Engineering", "Humanities", "Medicine", "Science")
_FOLDERS = ("", *_DISCIPLINES, *(f"videos/{name}" for name in _DISCIPLINES), "videos")
_IMAGE = re.compile(r"<image [0-9]{1,2}>")


def _track(file: Path) -> str:
    """The track a file belongs to, by its name or its folder's; '' for none."""
    names = (file.stem.casefold(), file.parent.name.casefold())
    return next((track for track in TRACKS if track.casefold() in names), "")


def _image(row: Mapping[str, Any]) -> Any:
    """The row's picture, None without one (null, or a struct of nulls)."""
    value = row.get("image", row.get("image_1"))
    return (
        None if value is None or (isinstance(value, Mapping) and not any(value.values())) else value
    )


def _question(text: Any, shown: bool) -> str:
    """The question without <image 1> at its ends, "the image" for one inside; says where a picture is that is not `shown`."""
    words = whole = text_of(text, "question")
    if first := _IMAGE.match(words):
        words = words[first.end() :].lstrip()
    last = words.rfind("<image ")
    if last >= 0 and _IMAGE.fullmatch(words, last):
        words = words[:last].rstrip()
    plain = text_of(_IMAGE.sub("the image", words), "question")
    return (
        plain
        if shown or not _IMAGE.search(whole)
        else f"{plain} (The image is at the end of the video.)"
    )


def _answers(value: Any) -> Any:
    """An open answer: a text, or the list of accepted texts that stands as text ("['24/7', '3.43']"). Broken lists stay text."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str) or not value.lstrip().startswith("["):
        return value
    try:
        found = parse_literal(value)
    except ValueError:
        return value
    return [str(item) for item in found] if isinstance(found, list) and found else value


def read_videommmu(
    path: str | Path,
    *,
    video_root: str | None = None,
    image_root: str | None = None,
    media_dir: str | None = None,
    picture_in_video: bool = False,
    video: Mapping[str, Any] | None = None,
    probe: bool = True,
    task: str = "mixed",
    types: Mapping[str, str] | None = None,
    only_mine: bool = False,
    on_error: str = "raise",
    check: Check = check_by_task,
) -> Readout:
    """Read Video-MMMU: the folder with its three tracks, one track's folder, or a parquet or JSON file.

    Videos are <video_root>/<discipline>/<id>.mp4 (default: the release's folder). `picture_in_video`: the videos end in the
    row's picture, so it is not shown again. Embedded pictures go to `media_dir`, paths are relative to `image_root`. The types
    are multiple-choice, perception and open. params: category (the track), subject. Raises ConfigError, DataError.
    """
    routes, inside = (
        Routes("videommmu", task, types, only_mine, table=_TYPES),
        true_or_false(picture_in_video, "picture_in_video"),
    )

    def read_one(file: Path) -> Readout:
        track, media = _track(file), media_folder(file, media_dir)
        root = Path(image_root) if image_root else file.parent
        clips = Clips(video_root or release_root(file, *_DISCIPLINES, "videos"), video, probe)

        def convert(number: int, row: dict[str, Any], size_of: SizeOf) -> Iterable[Sample]:
            own = routes.task_of(text_of(row.get("question_type"), "question_type"))
            name = row_id(row.get("id"), f"{file.stem}-{number}")
            image = None if inside else _image(row)
            images = () if image is None else (picture(image, root, media),)
            for shown in images:
                size_of(shown)
            options = [
                _IMAGE.sub("the image", option) for option in options_in(listed(row.get("options")))
            ]
            clip = clips.find(name, _FOLDERS)
            params = clips.facts(
                clip,
                {
                    "suite": "videommmu",
                    "category": track or "unknown",
                    "subject": "_".join(name.split("_")[1:-1]),
                    **({"options": options} if options else {}),
                },
            )
            answer = row.get("answer") if own == "choice" else _answers(row.get("answer"))
            if answer in (None, "", "?"):
                raise RowError("'answer'", repr(answer), "take the split with answers")
            yield video_sample(
                check,
                own,
                name=f"{track}-{name}" if track else name,
                source=f"VideoMMMU/{track}".rstrip("/"),
                question=_question(row.get("question"), bool(images)),
                truth=answer,
                video=clip,
                params=params,
                images=images,
            )

        return collect(
            file, rows_of(file, ("id", "question", "answer", "question_type")), convert, on_error
        )

    return read_files(
        data_files(Path(path), "*.parquet", "*/*.parquet", "*.json"), read_one, on_error
    )
