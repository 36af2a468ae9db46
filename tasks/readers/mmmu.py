"""MMMU-style rows: id, question, options (a list as text), answer, question_type, image_1 ... image_7.

multiple-choice rows become `choice`, open rows `open_text` (their answer may be a list of accepted texts). Placeholders
<image 1> in question and options become "(image 1)", the number being the picture's place in the sample; every one must
have its picture. Options such as "['a', \\"b's\\"]" are read by a parser of literals, nothing is evaluated. Ids say a row's split
(validation_Accounting_1); the test split's answers are not published ("?"), so its rows are errors unless `split` leaves them out.

    python -c "from mmrl.tasks.readers.mmmu import read_mmmu as r; print(len(r('MMMU/Accounting')))"
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from mmrl.coords import CoordFrame
from mmrl.errors import ConfigError, did_you_mean
from mmrl.tasks.readers.answers import options_in, parse_literal
from mmrl.tasks.readers.common import Check, Readout, RowError, SizeOf, SkipRow, collect, text_of
from mmrl.tasks.readers.problem_types import Routes, check_by_task
from mmrl.tasks.readers.tables import (
    data_files,
    media_folder,
    picture,
    read_files,
    row_id,
    rows_of,
    size_params,
)
from mmrl.types import Sample

__all__ = ["read_mmmu"]

_PLACEHOLDER = re.compile(r"<image ([0-9]{1,2})>")
_MOST = 7
_SPLITS = ("dev", "validation", "test")


def _listed(value: Any, name: str) -> Any:
    """A list, also where it is written as text; other text stays as it is."""
    if not isinstance(value, str) or not value.lstrip().startswith("["):
        return value
    try:
        return parse_literal(value)
    except ValueError as err:
        raise RowError(
            f"'{name}' as a list, or the text of one", f"{value[:80]!r} ({err})", "correct it"
        ) from err


def _options(row: Mapping[str, Any]) -> list[str]:
    options = _listed(row.get("options"), "options")
    if not isinstance(options, list):
        raise RowError("'options' as a list, or the text of one", repr(options)[:80], "correct it")
    options = [str(option) if type(option) in (int, float) else option for option in options]
    return options_in(options)


def _numbered(text: str, places: Mapping[int, int]) -> str:
    """`text` with <image k> as "(image p)", p the picture's place from 1; the only picture of a row needs no name at the
    question's start or end. Raises RowError for a picture that is missing."""

    def spell(found: re.Match[str]) -> str:
        number = int(found[1])
        if number not in places:
            raise RowError(
                f"a picture in 'image_{number}' for <image {number}>",
                f"pictures {sorted(places)}",
                "add it or remove the placeholder",
            )
        return f"(image {places[number]})"

    named = _PLACEHOLDER.sub(spell, text).strip()
    if len(places) == 1 and named != "(image 1)":
        named = named.removeprefix("(image 1)").removesuffix("(image 1)").strip()
    return text_of(named, "question")


def _given(value: Any) -> bool:
    """False for a picture that is not there: null, or a struct of nulls."""
    return value is not None and not (isinstance(value, Mapping) and not any(value.values()))


def _truth(own: str, row: Mapping[str, Any]) -> Any:
    answer = (
        _listed(row.get("answer"), "answer")
        if own not in ("choice", "spatial")
        else row.get("answer")
    )
    if answer in (None, "", "?", []):
        raise RowError(
            "'answer'",
            repr(answer),
            "the test split's answers are not published: set reader.split=validation (or dev)",
        )
    return (
        [str(a) if type(a) in (int, float) else a for a in answer]
        if isinstance(answer, list)
        else answer
    )


def _keep(row: Mapping[str, Any], split: str | None) -> None:
    """Raises SkipRow for a row of another split, RowError where the id names none."""
    name = row.get("id")
    own = name.partition("_")[0] if isinstance(name, str) else None
    if split is not None and own != split:
        if own not in _SPLITS:
            raise RowError(
                "an id such as validation_Accounting_1, which says the row's split",
                repr(name)[:60],
                "correct it, or leave reader.split out",
            )
        raise SkipRow(f"split {own}")


def read_mmmu(
    path: str | Path,
    *,
    image_root: str | None = None,
    media_dir: str | None = None,
    split: str | None = None,
    task: str = "mixed",
    types: Mapping[str, str] | None = None,
    only_mine: bool = False,
    on_error: str = "raise",
    check: Check = check_by_task,
) -> Readout:
    """Read MMMU rows: a parquet, JSON or JSON Lines file, or a folder of parquet files (also one level down, a folder per
    subject). The types are multiple-choice and open; `types` and `only_mine`: see mmrl.tasks.readers.problem_types.

    `split` (dev, validation, test) keeps its rows, by their ids, and counts the others; of a folder with files named after
    the split ("validation-*.parquet") only those are read. Raises ConfigError, DataError.
    """
    if split is not None and split not in _SPLITS:
        raise ConfigError(
            f"unknown split {split!r}; expected one of {', '.join(_SPLITS)}.{did_you_mean(str(split), _SPLITS)}"
        )
    routes = Routes("mmmu", task, types, only_mine)
    named = (f"{split}-*.parquet", f"*/{split}-*.parquet") if split else ()

    def read_one(file: Path) -> Readout:
        root, media = Path(image_root) if image_root else file.parent, media_folder(file, media_dir)

        def convert(number: int, row: dict[str, Any], size_of: SizeOf) -> Iterable[Sample]:
            _keep(row, split)
            own = routes.task_of(text_of(row.get("question_type"), "question_type"))
            found = [k for k in range(1, _MOST + 1) if _given(row.get(f"image_{k}"))]
            places = {k: place for place, k in enumerate(found, 1)}
            question = _numbered(text_of(row.get("question"), "question"), places)
            params: dict[str, Any] = {
                k: row[k] for k in ("subfield", "topic_difficulty") if isinstance(row.get(k), str)
            }
            if own in ("choice", "spatial"):
                params["options"] = [_numbered(option, places) for option in _options(row)]
            images = tuple(picture(row[f"image_{k}"], root, media) for k in found)
            sizes = [size_of(image) for image in images]
            params |= size_params(sizes)
            name = row_id(row.get("id"), f"{file.stem}-{number}")
            subject = re.sub(r"^(?:dev|validation|test)_|_[0-9]+$", "", name)
            yield Sample(
                id=name,
                task=own,
                source=f"MMMU/{subject}" if subject != name else "MMMU",
                question=question,
                answer=check(own, _truth(own, row), CoordFrame.ABS_ORIG, sizes, params),
                images=images,
                params=params,
            )

        return collect(
            file, rows_of(file, ("question", "answer", "question_type")), convert, on_error
        )

    return read_files(
        data_files(Path(path), *named, "*.parquet", "*/*.parquet"), read_one, on_error
    )
