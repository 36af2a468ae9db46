"""PageOCR (the Fox benchmark): {en,cn}_page_ocr.json, pages in {en,cn}_pdf_png/ -> one page, all of its text.

    [{"image": "en_1.png", "len": 826, "conversations": [{"from": "human", "value": "<image>\\nOCR this image: "},
                                                         {"from": "gpt", "value": "FREEDOM OF ..."}]}]

The truth is the text as it stands, line breaks included. params.language is en or cn, from the file's name.

    python -c "from mmrl.tasks.readers.pageocr import read_pageocr as r; print(len(r('focus_benchmark_test')))"
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from mmrl.coords import CoordFrame
from mmrl.errors import ConfigError
from mmrl.tasks.readers.common import (
    Check,
    Readout,
    RowError,
    SizeOf,
    SkipRow,
    collect,
    resolve_image,
    text_of,
)
from mmrl.tasks.readers.problem_types import check_by_task, fixed_task
from mmrl.tasks.readers.tables import (
    data_files,
    json_rows,
    question_of,
    read_files,
    row_id,
    size_params,
)
from mmrl.types import Sample

__all__ = ["read_pageocr"]

_LANGUAGES = ("en", "cn")


def _page_text(row: Mapping[str, Any]) -> tuple[str, str]:
    """(question, text of the page) of a row."""
    turns = row.get("conversations")
    if (
        not isinstance(turns, list)
        or len(turns) != 2
        or not all(isinstance(t, dict) for t in turns)
    ):
        raise RowError(
            "'conversations' of two turns", repr(turns)[:80], "download the official file again"
        )
    if turns[0].get("from") not in ("human", "user") or turns[1].get("from") not in (
        "gpt",
        "assistant",
    ):
        raise RowError(
            "turns from 'human' and then 'gpt'",
            f"{turns[0].get('from')!r}, {turns[1].get('from')!r}",
            "reorder",
        )
    page = turns[1].get("value")
    text_of(page, "value")
    return question_of(turns[0].get("value"), 1, "value", exact=False), str(page)


def read_pageocr(
    path: str | Path,
    *,
    image_root: str | None = None,
    language: str | None = None,
    task: str = "ocr",
    types: Mapping[str, str] | None = None,
    on_error: str = "raise",
    check: Check = check_by_task,
) -> Readout:
    """Read a Fox page file, or the benchmark's folder with both. `language` keeps en or cn; the pictures are looked for in
    `image_root`, by default {en,cn}_pdf_png beside the file."""
    if language not in (None, *_LANGUAGES):
        raise ConfigError(f"expected reader.language en or cn, found {language!r}")
    own = fixed_task("pageocr", "ocr", task, types)

    def read_one(file: Path) -> Readout:
        spoken = next((name for name in _LANGUAGES if file.name.startswith(name)), None)
        beside = file.parent / f"{spoken}_pdf_png"
        root = (
            Path(image_root)
            if image_root
            else beside
            if spoken and beside.is_dir()
            else file.parent
        )

        def convert(number: int, row: dict[str, Any], size_of: SizeOf) -> Iterable[Sample]:
            if language is not None and spoken != language:
                raise SkipRow(f"language {spoken}")
            image = resolve_image(row.get("image"), root)
            question, page = _page_text(row)
            size = size_of(image)
            params = {**size_params([size]), **({"language": spoken} if spoken else {})}
            yield Sample(
                id=row_id(row.get("id"), f"{file.stem}-{number}"),
                task=own,
                source=file.stem,
                question=question,
                answer=check(own, page, CoordFrame.ABS_ORIG, [size], params),
                images=(image,),
                params=params,
            )

        return collect(file, json_rows(file), convert, on_error)

    return read_files(data_files(Path(path), "*_page_ocr.json"), read_one, on_error)
