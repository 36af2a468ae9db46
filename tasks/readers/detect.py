"""Which format a file or folder is: by names, endings and the keys of its first row, never by the size of its numbers.

python -c "from mmrl.tasks.readers import detect_format; print(detect_format('screenspot_mobile_v2.json'))"
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mmrl.data.bounds import lines_bounded, read_bounded
from mmrl.errors import DataError
from mmrl.tasks.readers.tables import refuse_saved_to_disk

__all__ = ["detect_format"]

_RULES: tuple[tuple[str, frozenset[str]], ...] = tuple(
    (name, frozenset(keys.split()))
    for name, keys in (
        ("orsta", "prompt reward_model"),
        ("videomme", "videoID question options"),
        ("vsibench", "scene_name question_type ground_truth"),
        ("longvideobench", "video_path subtitle_path question"),
        ("qvhighlights", "qid query vid"),
        ("videommmu", "link_selected question_type"),
        ("videochat_got", "path object gt"),
        ("mlvu", "video question candidates question_type"),
        ("mlvu", "video_name question task_type"),
        ("mvbench", "video question candidates answer"),
        ("tempcompass", "video_id dim question answer"),
        ("activitynet", "timestamps sentences"),
        ("nextgqa", "location duration fps"),
        ("gui_odyssey", "episode_id steps"),
        ("gui_r1", "gt_action gt_bbox"),
        ("pixmo_count", "image_url count"),
        ("pixmo_count", "image_sha256 count"),
        ("pixmo_count", "count points"),
        ("mathvista", "question_type answer_type"),
        ("mmmu", "options image_1"),
        ("ocrbench", "dataset question_type question answer"),
        ("ocrbench", "dataset_name type question answers"),
        ("screenspot_pro", "img_filename img_size bbox"),
        ("screenspot", "img_filename data_type bbox"),
        ("screenspot_hf", "file_name instruction bbox data_type"),
        ("screenspot_hf", "image instruction bbox data_type"),
        ("ui_r1", "img_filename bbox instruction"),
        ("video_r1", "problem_type solution path"),
        ("video_r1", "problem_type solution data_type"),
        ("vlm_r1", "conversations"),
        ("vlm_r1", "problem solution"),
        ("vlm_r1", "normal_caption solution"),
        ("vlm_r1", "normalized_solution"),
        ("easyr1", "problem"),
    )
)
"""(format, keys that all of its rows have); the first that fits wins."""
_TEXT_ONLY = frozenset(
    (
        "vlm_r1",
        "video_r1",
        "mvbench",
        "activitynet",
        "qvhighlights",
        "nextgqa",
        "videochat_got",
        "gui_odyssey",
    )
)
"""Formats that are JSON (or CSV) files: a parquet file with their columns is none of them."""
_HEAD = 1 << 20  # bytes of a JSON list that are looked at for its first row


def _by_keys(keys: Iterable[str], but: frozenset[str] = frozenset()) -> str | None:
    have = set(keys)
    return next((name for name, needed in _RULES if needed <= have and name not in but), None)


def _of_object(value: dict[str, Any]) -> str | None:
    """Formats whose file is one JSON object: COCO and its kin, an episode, MathVista's {pid: row}, dataset_info.json."""
    if "images" in value and ("annotations" in value or "categories" in value):
        images = (
            [i for i in value["images"][:50] if isinstance(i, dict)]
            if isinstance(value["images"], list)
            else []
        )
        if any("text" in i and "neg_text" in i for i in images):
            return "ovdeval"
        federated = any(
            "neg_category_ids" in i or "not_exhaustive_category_ids" in i for i in images
        )
        return "lvis" if federated else "coco"
    first = next((entry for entry in value.values() if isinstance(entry, dict)), {})
    if {"file_name", "hf_hub_url", "script_url"} & set(first):
        return "llama_factory"
    items = [rows[0] for rows in first.values() if isinstance(rows, list) and rows]
    if items and all(
        isinstance(item, dict) and {"question", "answer"} <= set(item) for item in items
    ):
        return "tempcompass"  # {video: {aspect: [question]}}
    return _by_keys(value) or _by_keys(first)


def _listed_in_dataset_info(path: Path) -> bool:
    """True when a LLaMA-Factory dataset_info.json beside the file names it."""
    info = path.parent / "dataset_info.json"
    try:
        entries = json.loads(read_bounded(info).decode("utf-8-sig")) if info.is_file() else {}
    except (ValueError, RecursionError):
        return False  # the reader says what is wrong with it, once it is asked for
    return isinstance(entries, dict) and any(
        isinstance(e, dict) and e.get("file_name") == path.name for e in entries.values()
    )


def _first_of_list(path: Path) -> Any:
    """The first row of a JSON list, read from the file's head only; None when it is no list or its first row is longer."""
    with path.open("rb") as handle:
        head = handle.read(_HEAD).decode("utf-8-sig", "replace").lstrip()
    if not head.startswith("["):
        return None
    try:
        return json.JSONDecoder().raw_decode(head[1:].lstrip())[0]
    except (ValueError, RecursionError):
        return None


def _of_json(path: Path) -> str:
    """Format of a .json file."""
    if path.name.endswith("_page_ocr.json"):
        return "pageocr"
    first = _first_of_list(path)
    if first is not None:
        return _of_row(first, path)
    try:
        # the reader judges the encoding
        value = json.loads(read_bounded(path).decode("utf-8-sig", "replace"))
    except DataError:
        raise
    except (ValueError, RecursionError) as err:
        raise DataError(
            f"{path}: expected JSON, found {err}; is it JSON Lines? then name it .jsonl"
        ) from err
    if isinstance(value, dict) and value:
        found = _of_object(value)
        if found:
            return found
    elif isinstance(value, list) and value:
        return _of_row(value[0], path)
    raise DataError(
        f"{path}: expected a list of rows with at least one row, or an object of a known format, found "
        f"{type(value).__name__} {str(value)[:60]}; give the file with the rows, or name its format"
    )


def _of_row(row: Any, path: Path) -> str:
    if not isinstance(row, dict):
        raise DataError(
            f"{path}: expected rows that are JSON objects, found {type(row).__name__}; give format=... if it is "
            "one of mmrl's formats"
        )
    if "messages" in row or _listed_in_dataset_info(path):
        return "llama_factory"
    return _by_keys(row) or "own"  # its reader says which keys are missing


def _of_lines(path: Path) -> str:
    """Format of a JSON Lines file, by its first line that is an object."""
    with path.open("rb") as handle:
        for _, line in lines_bounded(handle):
            try:
                row = None if isinstance(line, DataError) else json.loads(line.decode("utf-8-sig"))
            except (ValueError, RecursionError):
                continue
            if isinstance(row, dict):
                return _of_row(row, path)
    return "own"


def _of_parquet(path: Path) -> str:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        names = pq.ParquetFile(path).schema_arrow.names
    except (pa.ArrowException, OSError):
        return "easyr1"  # its reader says that the file is broken
    if _listed_in_dataset_info(path):
        return "llama_factory"
    # its reader says what to do about columns that are nobody's
    return _by_keys(names, _TEXT_ONLY) or ("llama_factory" if "messages" in names else "easyr1")


def _of_text(path: Path) -> str | None:
    """Format of a .txt file by its first line that is not blank: Charades-STA's, or GOT-10k's list of folders."""
    with path.open("rb") as handle:
        lines = (
            line for _, line in lines_bounded(handle) if isinstance(line, bytes) and line.strip()
        )
        first = next(lines, b"").decode("utf-8-sig", "replace")
    if "##" in first:
        return "charades_sta"
    return (
        "got10k"
        if path.name == "list.txt" and (path.parent / first.strip() / "groundtruth.txt").is_file()
        else None
    )


def _is_gzip(path: Path) -> bool:
    with path.open("rb") as handle:
        return handle.read(2) == b"\x1f\x8b"


def _of_folder(where: Path) -> str:
    refuse_saved_to_disk(where)
    if any(where.glob("refs(*).p")):
        return "refer"
    if (where / "dataset_info.json").is_file():
        return "llama_factory"
    if any(where.glob("android_control*")):
        return "android_control"
    if (where / "gsub_test.json").is_file() or (where / "gsub_val.json").is_file():
        return "nextgqa"
    lists = next(
        (f for f in (where / "list.txt", *sorted(where.glob("*/list.txt"))) if f.is_file()), None
    )
    if lists and _of_text(lists):
        return "got10k"
    parquet = next(iter(sorted(where.glob("*.parquet"))), None)
    if parquet:
        return _of_parquet(parquet)
    if (where / "data.jsonl").is_file():
        return _of_lines(where / "data.jsonl")
    for pattern in (
        "*_page_ocr.json",
        "screenspot*.json",
        "annotations/*.json",
        "json/*.json",
        "questions/*.json",
        "lvb_val.json",
        "multi-choice.json",
        "yes_no.json",
        "caption_matching.json",
        "captioning.json",
        "*/*.parquet",
    ):
        first = next(iter(sorted(where.glob(pattern))), None)
        if first:
            return _of_parquet(first) if first.suffix == ".parquet" else _of_json(first)
    raise DataError(
        f"expected a folder with refs(*).p, dataset_info.json, annotations/, *.parquet or data.jsonl, found "
        f"{sorted(p.name for p in where.iterdir())[:8]} in {where}; give the data file itself"
    )


def detect_format(path: str | Path) -> str:
    """Name of the reader for a file or folder, by its names, endings and the keys of its first row. Raises DataError."""
    where = Path(path)
    if not where.exists():
        raise DataError(f"expected a data file or folder, found nothing at {where}; check the path")
    if where.is_dir():
        return _of_folder(where)
    if where.suffix in (".p", ".pkl", ".pickle"):
        return "refer"
    if where.suffix == ".parquet":
        return _of_parquet(where)
    if where.suffix == ".json":
        return _of_json(where)
    if where.suffix in (".jsonl", ".ndjson"):
        return _of_lines(where)
    text = _of_text(where) if where.suffix == ".txt" else None
    if text:
        return text
    if where.suffix == ".csv" and where.with_name(f"gsub_{where.stem}.json").is_file():
        return "nextgqa"
    if "android_control" in where.name or "tfrecord" in where.name or _is_gzip(where):
        return "android_control"
    raise DataError(
        f"expected a .jsonl, .json, .parquet, refs(*).p or TFRecord file, found {where}; rename it or give format="
    )
