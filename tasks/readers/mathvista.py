"""MathVista-style rows: pid, question, choices, answer, question_type, answer_type, precision, unit, metadata, image.

multi_choice rows become `choice` (the answer, which is a choice's text, becomes its letter), free_form rows of answer_type
integer or float become `numeric` with params.precision and params.unit, text and list become `open_text`. Read from
parquet (picture in `decoded_image` or `image`), JSON Lines, a JSON list or the official {pid: row}.

    python -c "from mmrl.tasks.readers.mathvista import read_mathvista as r; print(len(r('testmini.json')))"
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from mmrl.coords import CoordFrame
from mmrl.tasks.readers.common import Check, Readout, RowError, SizeOf, collect, text_of
from mmrl.tasks.readers.problem_types import Routes, check_by_task
from mmrl.tasks.readers.tables import (
    data_files,
    media_folder,
    picture,
    question_of,
    read_files,
    read_json,
    row_id,
    rows_of,
    size_params,
)
from mmrl.types import Sample

__all__ = ["read_mathvista"]


def _rows(file: Path) -> Iterator[tuple[int, Any]]:
    """Rows of the file; those of the official {pid: row} get their pid."""
    if file.suffix == ".json":
        value = read_json(file)
        if isinstance(value, dict):
            for number, (pid, row) in enumerate(value.items(), 1):
                yield (
                    number,
                    (
                        {"pid": pid, **row}
                        if isinstance(row, dict)
                        else RowError(
                            "a JSON object", f"{type(row).__name__} {row!r:.60}", "wrap it in {...}"
                        )
                    ),
                )
            return
    yield from rows_of(file, ("question", "answer", "question_type", "answer_type"))


def _kind(row: Mapping[str, Any]) -> Any:
    kind = row.get("question_type")
    if kind not in ("multi_choice", "free_form"):
        raise RowError(
            "question_type multi_choice or free_form", repr(kind)[:60], "correct the row"
        )
    return kind if kind == "multi_choice" else text_of(row.get("answer_type"), "answer_type")


def _letter(row: Mapping[str, Any]) -> tuple[str, list[str]]:
    """(letter of the right choice, choices). The answer is the text of exactly one choice."""
    from mmrl.rewards.choice import LETTERS

    choices, answer = row.get("choices"), row["answer"]
    if not isinstance(choices, list) or not all(isinstance(c, str) and c.strip() for c in choices):
        raise RowError("'choices' as a list of texts", repr(choices)[:80], "add them")
    found = [i for i, choice in enumerate(choices) if choice.strip() == str(answer).strip()]
    if len(found) != 1 or len(choices) > len(LETTERS):
        raise RowError(
            "an answer that is one of the choices",
            f"{answer!r:.40}, {len(found)} times in {choices!r:.80}",
            "correct 'answer' or 'choices'",
        )
    return LETTERS[found[0]], [choice.strip() for choice in choices]


def _number_params(row: Mapping[str, Any]) -> dict[str, Any]:
    """precision (decimals, a whole number >= 0) and unit, where the row has them."""
    precision, unit = row.get("precision"), row.get("unit")
    params: dict[str, Any] = {}
    if precision is not None and not (isinstance(precision, float) and math.isnan(precision)):
        # a float such as 2.0 is in it
        if type(precision) not in (int, float) or precision not in range(16):
            raise RowError(
                "'precision' as a number of decimals, 0 to 15",
                repr(precision)[:40],
                "correct it or leave it out",
            )
        params["precision"] = int(precision)
    if unit not in (None, ""):
        params["unit"] = text_of(unit, "unit")
    return params


def _truth(own: str, row: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """(answer for the task's check, params) of a row."""
    answer = row.get("answer")
    if answer is None or answer == "":
        raise RowError("'answer'", repr(answer), "the test split has no answers: take testmini")
    if own in ("choice", "spatial"):
        letter, choices = _letter(row)
        return letter, {"options": choices}
    return answer, _number_params(row) if own == "numeric" else {}


def read_mathvista(
    path: str | Path,
    *,
    image_root: str | None = None,
    media_dir: str | None = None,
    task: str = "mixed",
    types: Mapping[str, str] | None = None,
    only_mine: bool = False,
    on_error: str = "raise",
    check: Check = check_by_task,
) -> Readout:
    """Read MathVista rows. The types are multi_choice, integer, float, text and list; `types` and `only_mine`: see
    mmrl.tasks.readers.problem_types. Picture paths are relative to `image_root` (default: the file's folder)."""
    routes = Routes("mathvista", task, types, only_mine)

    def read_one(file: Path) -> Readout:
        root, media = Path(image_root) if image_root else file.parent, media_folder(file, media_dir)

        def convert(number: int, row: dict[str, Any], size_of: SizeOf) -> Iterable[Sample]:
            own = routes.task_of(_kind(row))
            answer, extra = _truth(own, row)
            image = picture(row.get("decoded_image") or row.get("image"), root, media)
            size = size_of(image)
            params = {**size_params([size]), **extra, "answer_type": row.get("answer_type")}
            subject = row.get("metadata") if isinstance(row.get("metadata"), dict) else {}
            yield Sample(
                id=row_id(row.get("pid"), f"{file.stem}-{number}"),
                task=own,
                source=str((subject or {}).get("source") or "MathVista"),
                question=question_of(row.get("question"), 1, "question", exact=False),
                answer=check(own, answer, CoordFrame.ABS_ORIG, [size], params),
                images=(image,),
                params=params,
            )

        return collect(file, _rows(file), convert, on_error)

    return read_files(data_files(Path(path), "*.parquet", "data/*.parquet"), read_one, on_error)
