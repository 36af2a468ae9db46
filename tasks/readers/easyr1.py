"""EasyR1 / verl files: parquet (or JSON, JSON Lines) with `problem`, `answer` and `images`.

`images` holds paths, {"bytes", "path"} structs or bytes; embedded pictures are written once to `media_dir`, named by
their content. The number of <image> placeholders in `problem` must equal the number of pictures.

    python -c "from tasks.readers.easyr1 import read_easyr1 as r; print(len(r('train.parquet')))"
"""
from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from mmrl.errors import ConfigError, DataError, did_you_mean
from mmrl.media import store_bytes
from mmrl.types import Sample
from tasks.readers.common import Readout, RowError, SizeOf, check_box, check_frame, collect, resolve_image, text_of
from tasks.readers.vlm_r1 import box_in_text, json_rows

__all__ = ["read_easyr1"]


def _parquet_rows(path: Path, needed: tuple[str, ...]) -> Iterator[tuple[int, Any]]:
    """(row number from 1, row) of one parquet file, read batch by batch."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.ParquetFile(path)
        names = table.schema_arrow.names
        for key in needed:
            if key not in names:
                raise DataError(f"{path}: expected a column '{key}', found {', '.join(names)}; set problem_key, "
                                f"answer_key or images_key.{did_you_mean(key, names)}")
        number = 0
        for batch in table.iter_batches(batch_size=256):
            for row in batch.to_pylist():
                number += 1
                yield number, row
    except (pa.ArrowException, OSError) as err:
        raise DataError(f"{path}: expected a readable parquet file, found {err}; copy it again") from err


def _image_path(value: Any, root: Path, media_dir: Path) -> str:
    if isinstance(value, dict):
        if value.get("bytes"):
            return store_bytes(value["bytes"], media_dir)
        return resolve_image(value.get("path"), root)
    if isinstance(value, bytes):
        return store_bytes(value, media_dir)
    return resolve_image(value, root)


def read_easyr1(path: str | Path, *, image_root: str | None = None, media_dir: str | None = None,
                frame: str = "abs_orig", problem_key: str = "problem", answer_key: str = "answer",
                images_key: str = "images", task: str = "grounding", on_error: str = "raise") -> Readout:
    """Read EasyR1 data: a parquet, JSON or JSON Lines file, or a folder of parquet files.

    `frame` is the frame of the boxes in `answer` (a list of four numbers or text); `media_dir` receives embedded
    pictures (default '<file>.media' beside the file). Rows are numbered per file.
    """
    where = Path(path)
    files = sorted(where.glob("*.parquet")) if where.is_dir() else [where]
    if not files:
        raise DataError(f"expected parquet files in {where}, found none; give the data file itself")
    keys = (problem_key, answer_key, images_key)
    if len(set(keys)) != 3:
        raise ConfigError(f"expected three different column names, found {', '.join(keys)}")
    readout, box_frame = Readout(), check_frame(frame)
    for file in files:
        root = Path(image_root) if image_root else file.parent
        media = Path(media_dir) if media_dir else file.with_name(file.name + ".media")

        def convert(number: int, row: dict[str, Any], size_of: SizeOf, *, stem: str = file.stem, root: Path = root,
                    media: Path = media) -> Iterable[Sample]:
            values = row.get(images_key)
            values = values if isinstance(values, list) else ([values] if values is not None else [])
            problem = text_of(row.get(problem_key), problem_key)
            placeholders = problem.count("<image>")
            if placeholders != len(values) or not values:
                raise RowError("as many <image> placeholders as pictures, at least one",
                               f"{placeholders} placeholders and {len(values)} pictures", "add or remove <image> in it")
            answer = row.get(answer_key)
            if answer is None:
                raise RowError(f"'{answer_key}' with a box", f"keys {sorted(row)}", "add it or set answer_key")
            images = tuple(_image_path(value, root, media) for value in values)
            sizes = [size_of(image) for image in images]  # all of them: a missing second picture is an error as well
            width, height = sizes[0]
            box = check_box(box_in_text(answer) if isinstance(answer, str) else answer, box_frame, (width, height))
            yield Sample(
                id=str(row.get("id") or f"{stem}-{number}"), task=task, source=str(row.get("data_source") or stem),
                question=text_of(problem.replace("<image>", " ").strip(), problem_key), answer=list(box), images=images,
                params={"width": width, "height": height})

        rows = _parquet_rows(file, keys) if file.suffix == ".parquet" else json_rows(file)
        part = collect(file, rows, convert, on_error)
        readout.samples += part.samples
        readout.rejected += part.rejected
    return readout
