"""OCRBench rows: dataset, question, question_type, answer (a list: any of them counts), image.

Parquet with embedded pictures, JSON or JSON Lines, and the original file's names for the same columns (dataset_name, type,
answers, image_path). params.dataset and params.ocrbench_type (the question_type) say what the row is: the official rule
reads HME100k differently, and counts per type.

    python -c "from mmrl.tasks.readers.ocrbench import read_ocrbench as r; print(len(r('OCRBench.json', image_root='images')))"
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from mmrl.coords import CoordFrame
from mmrl.tasks.readers.answers import listed
from mmrl.tasks.readers.common import Check, Readout, RowError, SizeOf, collect, text_of
from mmrl.tasks.readers.problem_types import check_by_task, fixed_task
from mmrl.tasks.readers.tables import (
    data_files,
    media_folder,
    picture,
    question_of,
    read_files,
    row_id,
    rows_of,
    size_params,
)
from mmrl.types import Sample

__all__ = ["read_ocrbench"]

_ORIGINAL = {
    "dataset": "dataset_name",
    "question_type": "type",
    "answer": "answers",
    "image": "image_path",
}


def _get(row: Mapping[str, Any], key: str) -> Any:
    """Column `key`, under its own or its original name."""
    value = row.get(key, row.get(_ORIGINAL[key]))
    if value is None:
        raise RowError(f"'{key}' or '{_ORIGINAL[key]}'", f"keys {sorted(row)}", "add it")
    return value


def read_ocrbench(
    path: str | Path,
    *,
    image_root: str | None = None,
    media_dir: str | None = None,
    task: str = "ocr",
    types: Mapping[str, str] | None = None,
    on_error: str = "raise",
    check: Check = check_by_task,
) -> Readout:
    """Read OCRBench: a parquet, JSON or JSON Lines file, or a folder of parquet files. Picture paths are relative to
    `image_root` (default: the file's folder); embedded pictures go to `media_dir` (default '<file>.media')."""
    own = fixed_task("ocrbench", "ocr", task, types)

    def read_one(file: Path) -> Readout:
        root, media = Path(image_root) if image_root else file.parent, media_folder(file, media_dir)

        def convert(number: int, row: dict[str, Any], size_of: SizeOf) -> Iterable[Sample]:
            answers = [
                str(a) if type(a) in (int, float) else a for a in listed(_get(row, "answer"))
            ]
            if not answers or not all(isinstance(a, str) and a.strip() for a in answers):
                raise RowError(
                    "'answer' as a list of texts", repr(answers)[:80], "write the accepted answers"
                )
            image = picture(_get(row, "image"), root, media)
            size = size_of(image)
            params = {
                **size_params([size]),
                "dataset": text_of(_get(row, "dataset"), "dataset"),
                "ocrbench_type": text_of(_get(row, "question_type"), "question_type"),
            }
            yield Sample(
                id=row_id(row.get("id"), f"{file.stem}-{number}"),
                task=own,
                source=f"OCRBench/{params['ocrbench_type']}",
                question=question_of(row.get("question"), 1, "question", exact=False),
                answer=check(own, answers, CoordFrame.ABS_ORIG, [size], params),
                images=(image,),
                params=params,
            )

        return collect(file, rows_of(file, ("question",)), convert, on_error)

    return read_files(data_files(Path(path), "*.parquet", "data/*.parquet"), read_one, on_error)
