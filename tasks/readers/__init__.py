"""Public grounding formats -> samples. `read_any` looks at the file (never at the coordinates) and dispatches.

    own      mmrl's JSON Lines: question, answer, image            tasks.readers.own
    refer    RefCOCO / + / g release folder: refs(unc).p           tasks.readers.refer
    vlm_r1   JSON list or JSON Lines with solution/conversations   tasks.readers.vlm_r1
    easyr1   parquet or JSON with problem, answer, images          tasks.readers.easyr1

    python -c "from tasks.readers import read_any; print(len(read_any('data.jsonl')))"
"""
from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mmrl.errors import ConfigError, DataError, did_you_mean
from tasks.readers.common import Readout, Rejected, RowError
from tasks.readers.easyr1 import read_easyr1
from tasks.readers.own import json_lines, read_own
from tasks.readers.refer import read_refer
from tasks.readers.vlm_r1 import read_vlm_r1

__all__ = [
    "READERS", "Readout", "Rejected", "RowError", "detect_format", "read_any", "read_easyr1", "read_own", "read_refer",
    "read_vlm_r1",
]

READERS: dict[str, Callable[..., Readout]] = {
    "own": read_own, "refer": read_refer, "vlm_r1": read_vlm_r1, "easyr1": read_easyr1,
}


def _by_keys(row: Any, path: Path) -> str:
    if isinstance(row, dict):
        if "conversations" in row or "solution" in row or "normalized_solution" in row:
            return "vlm_r1"
        if "problem" in row:
            return "easyr1"
        return "own"  # its reader says which keys are missing
    raise DataError(f"{path}: expected rows that are JSON objects, found {type(row).__name__}; give format=... if this "
                    f"is one of {', '.join(READERS)}")


def _first_row(path: Path) -> Any:
    """First readable row of a .json or .jsonl file, {} when there is none."""
    if path.suffix == ".json":
        try:
            value = json.loads(path.read_text(encoding="utf-8-sig"))
        except (ValueError, RecursionError) as err:
            raise DataError(f"{path}: expected JSON, found {err}; is it JSON Lines? then name it .jsonl") from err
        if not isinstance(value, list) or not value:
            raise DataError(f"{path}: expected a list of rows with at least one row, found {type(value).__name__}; "
                            "give the file with the rows")
        return value[0]
    return next((row for _, row in json_lines(path) if isinstance(row, dict)), {})


def detect_format(path: str | Path) -> str:
    """Name of the reader for a file or folder, by its ending and the keys of its first row. Raises DataError."""
    where = Path(path)
    if not where.exists():
        raise DataError(f"expected a data file or folder, found nothing at {where}; check the path")
    if where.is_dir():
        if any(where.glob("refs(*).p")):
            return "refer"
        if any(where.glob("*.parquet")):
            return "easyr1"
        if (where / "data.jsonl").is_file():
            return _by_keys(_first_row(where / "data.jsonl"), where / "data.jsonl")
        raise DataError(f"expected a folder with refs(*).p, *.parquet or data.jsonl, found "
                        f"{sorted(p.name for p in where.iterdir())[:8]} in {where}; give the data file itself")
    if where.suffix in (".p", ".pkl", ".pickle"):
        return "refer"
    if where.suffix == ".parquet":
        return "easyr1"
    if where.suffix in (".json", ".jsonl", ".ndjson"):
        return _by_keys(_first_row(where), where)
    raise DataError(f"expected a .jsonl, .json, .parquet or refs(*).p file, found {where}; rename it or give format=")


def read_any(path: str | Path, format: str | None = None, **options: Any) -> Readout:
    """Read any supported file or folder into a Readout (samples, rejected).

    `format` names a reader of READERS instead of detecting it; `options` are the reader's own (image_root, split,
    frame, on_error ...). Raises ConfigError for an unknown format or option and DataError for unusable data.
    """
    name = format if format is not None else detect_format(path)
    if name not in READERS:
        raise ConfigError(f"unknown format {name!r}; expected {', '.join(READERS)}.{did_you_mean(name, READERS)}")
    reader, where = READERS[name], Path(path)
    known = [p for p in inspect.signature(reader).parameters if p != "path"]
    if "check" not in known:
        options.pop("check", None)  # a reader of one fixed kind of answer, which it checks by itself
    for option in options:
        if option not in known:
            raise ConfigError(f"unknown option {option!r} of the {name} reader; expected {', '.join(known)}."
                              f"{did_you_mean(option, known)}")
    if where.is_dir() and name in ("own", "vlm_r1"):
        where = where / "data.jsonl"
    return reader(where, **options)
