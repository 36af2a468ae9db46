"""TempCompass: 410 videos, five temporal aspects, four forms of question.

    questions/multi-choice.json       {video: {aspect: [{"question": "...\\nA. up\\nB. down", "answer": "B. down"}]}} -> choice
    questions/yes_no.json             the same with yes or no                                                       -> boolean
    questions/caption_matching.json   "...\\nOption 1: ...\\nOption 2: ...", answer "Option 2: ..."                   -> choice
    questions/captioning.json         write a caption from one of several pieces of information                     -> open_text

Or the hub's parquet, one folder per form, with columns video_id, question, answer, dim and, for captioning, mc_question and
mc_answer. Names of captions ("Sentence B:", "Caption 1:") become letters. Officially rules match an answer first and a language
model judges what they cannot match; offline what names no option is wrong, so numbers are lower bounds (report the parse
failures). Captions are always judged by a language model: here the truth is the right information's text, which compares
methods, not papers. Accuracy is over all questions of a form, and by aspect (action, direction, speed, order, attribute_change).

    python -c "from mmrl.tasks.readers.tempcompass import read_tempcompass as r; print(len(r('TempCompass/questions')))"
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from mmrl.errors import ConfigError, DataError, did_you_mean
from mmrl.tasks.readers.answers import options_in, split_options
from mmrl.tasks.readers.common import Check, Readout, RowError, SizeOf, collect, text_of
from mmrl.tasks.readers.problem_types import Routes, check_by_task
from mmrl.tasks.readers.tables import data_files, read_files, read_json, rows_of
from mmrl.tasks.readers.video_mme import release_root
from mmrl.tasks.readers.videos import Clips, letter_of, video_sample
from mmrl.types import Sample

__all__ = ["FORMS", "read_tempcompass"]

FORMS: Mapping[str, str] = {
    "multi-choice": "choice",
    "yes_no": "boolean",
    "caption_matching": "choice",
    "captioning": "open_text",
}
"""Form, as its file or folder is called -> task."""
_CAPTION = re.compile(
    r"((?:Caption|Sentence|Option|Description|Statement)\s*(?:[A-Z]|[1-9]))\s*:\s*(\S.*)",
    re.IGNORECASE,
)


def _captions(question: str, answer: str) -> tuple[str, list[str], str]:
    """(question, captions, letter of the right one) of "...\\nOption 1: x\\nOption 2: y". Raises RowError."""
    head, names, texts = [], [], []
    for line in question.splitlines():
        found = _CAPTION.fullmatch(line.strip())
        if found:
            names.append(found[1].casefold())
            texts.append(found[2].strip())
        elif not texts:
            head.append(line)
        else:
            raise RowError(
                "captions at the end of the question", repr(line)[:60], "correct the row"
            )
    right = _CAPTION.fullmatch(answer.strip())
    if len(texts) < 2 or not right or right[1].casefold() not in names:
        raise RowError(
            "captions such as 'Option 1: ...' and one of them as the answer",
            f"{names} and {answer[:40]!r}",
            "correct the row",
        )
    return (
        text_of("\n".join(head), "question"),
        texts,
        "ABCDEFGHI"[names.index(right[1].casefold())],
    )


def _ask(form: str, row: Mapping[str, Any]) -> tuple[str, dict[str, Any], Any, list[str]]:
    """(question, params, truth, what was adjusted) of a row. Raises RowError."""
    question, answer = (
        text_of(row.get("question"), "question"),
        text_of(row.get("answer"), "answer"),
    )
    if form == "multi-choice":
        text, listed = split_options(question)
        options = options_in(listed)
        if not options:
            raise RowError(
                "lines 'A. ...' behind the question", repr(question)[-80:], "correct the row"
            )
        letter, notes = letter_of(answer, listed) if answer in listed else (answer, [])
        return text, {"options": options}, letter, notes
    if form == "caption_matching":
        text, captions, letter = _captions(question, answer)
        return text, {"options": captions}, letter, []
    if form == "captioning":
        return (
            question,
            {},
            re.sub(r"^[A-Z][.)]\s+", "", text_of(row.get("mc_answer") or answer, "mc_answer")),
            [],
        )
    return question, {}, answer, []


def _form(file: Path) -> str:
    """The form a file holds, by its name or its folder's. Raises DataError."""
    for name in (file.stem, file.parent.name):
        if name in FORMS:
            return name
    raise DataError(
        f"expected a file or folder named {', '.join(FORMS)}, found {file}; name it as the release does, or set "
        "reader.form"
    )


def _rows(file: Path) -> Iterator[tuple[int, Any]]:
    """Rows of a parquet or JSON list, or of {video: {aspect: [question]}}, numbered from 1 over the file."""
    value = read_json(file) if file.suffix == ".json" else None
    if not isinstance(value, dict):
        yield from rows_of(file, ("video_id", "question", "answer", "dim"))
        return
    number = 0
    for vid, aspects in value.items():
        items = [
            (dim, row)
            for dim, rows in (aspects.items() if isinstance(aspects, dict) else [("", None)])
            for row in (rows if isinstance(rows, list) else [None])
        ]
        for dim, row in items:
            number += 1
            yield (
                number,
                (
                    {**row, "video_id": vid, "dim": dim}
                    if isinstance(row, dict)
                    else RowError(
                        f"{{aspect: [{{question, answer}}]}} for video {vid!r:.40}",
                        repr(row)[:60],
                        "correct the entry",
                    )
                ),
            )


def read_tempcompass(
    path: str | Path,
    *,
    video_root: str | None = None,
    form: str | None = None,
    video: Mapping[str, Any] | None = None,
    probe: bool = True,
    task: str = "mixed",
    types: Mapping[str, str] | None = None,
    only_mine: bool = False,
    on_error: str = "raise",
    check: Check = check_by_task,
) -> Readout:
    """Read TempCompass: one form's file, or the folder questions/ (or the hub's copy) with several.

    `form` names the form of a file, or picks one of a folder; `types` (by form) and `only_mine`: see
    mmrl.tasks.readers.problem_types. Videos are <video_root>/<video>.mp4 (default: videos/ of the release). params: category (the
    aspect), form. Raises ConfigError, DataError.
    """
    if form is not None and form not in FORMS:
        raise ConfigError(
            f"unknown form {form!r} of TempCompass; expected {', '.join(FORMS)}.{did_you_mean(str(form), FORMS)}"
        )
    routes, where = Routes("tempcompass", task, types, only_mine, table=FORMS), Path(path)
    files = data_files(where, "questions/*.json", "*.json", "*.parquet", "*/*.parquet")
    files = [f for f in files if where.is_file() or (form or _form(f)) in (f.stem, f.parent.name)]

    def read_one(file: Path) -> Readout:
        kind = form or _form(file)
        clips = Clips(video_root or release_root(file, "videos"), video, probe)

        def convert(number: int, row: dict[str, Any], size_of: SizeOf) -> Iterable[Sample]:
            own = routes.task_of(kind)
            vid, aspect = text_of(row.get("video_id"), "video_id"), text_of(row.get("dim"), "dim")
            question, extra, truth, notes = _ask(kind, row)
            clip = clips.find(vid, ("", "videos"))
            params = clips.facts(
                clip, {**extra, "suite": "tempcompass", "category": aspect, "form": kind}
            )
            yield video_sample(
                check,
                own,
                name=f"{kind}-{number}",
                source=f"TempCompass/{kind}",
                question=question,
                truth=truth,
                video=clip,
                params=params,
                notes=notes,
            )

        return collect(file, _rows(file), convert, on_error)

    return read_files(files, read_one, on_error)
