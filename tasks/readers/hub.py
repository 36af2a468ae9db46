"""Data sets of the Hugging Face hub, read through `datasets` and kept as parquet files that every reader takes.

    data.train: [{task: ocr, path: "hf://owner/name:train", params: {reader: {columns: {...}}}}]
    python -c "from mmrl.tasks.readers.hub import hub_file; print(hub_file('hf://owner/name/subset:train'))"

hf://owner/name[/subset][:split], split 'train' where none is named. Embedded pictures stay encoded bytes. The parquet file lies in
datasets' own cache, named by the fingerprint of what was loaded: another revision is another file. No code of a data set is run.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from mmrl.errors import DataError, MissingExtraError, did_you_mean, install_command

__all__ = ["hub_file", "is_hub_name"]

_NAME = re.compile(r"hf:/{1,2}([\w.-]+/[\w.-]+)(?:/([\w.-]+))?(?::([\w.+\[\]%-]+))?")


def is_hub_name(path: str | os.PathLike[str]) -> bool:
    """Whether `path` names a data set of the hub: hf://..., also as a file path that lost one of its slashes."""
    return os.fspath(path).startswith("hf:/")


def hub_file(path: str | os.PathLike[str]) -> Path:
    """The parquet file of a data set of the hub, made where it is not there yet.

    Raises DataError for a name that is none, and for a data set, subset or split that is neither on the hub nor in the cache;
    MissingExtraError without `datasets`.
    """
    found = _NAME.fullmatch(os.fspath(path))
    if not found:
        raise DataError(
            f"expected hf://owner/name, hf://owner/name/subset or either with :split behind it, found "
            f"{os.fspath(path)!r}; write the name as the hub shows it"
        )
    name, subset, split = found[1], found[2], found[3] or "train"
    try:
        import datasets
    except ImportError as error:
        raise MissingExtraError(
            f"hf:// data sets are read through datasets ({error}): {install_command('hub')}"
        ) from error
    table = _load(datasets, name, subset, split)
    folder = (
        Path(datasets.config.HF_DATASETS_CACHE)
        / "mmrl"
        / "--".join(filter(None, (*name.split("/"), subset)))
    )
    target = (
        folder
        / table._fingerprint
        / f"{name.partition('/')[2]}-{re.sub(r'[^A-Za-z0-9]+', '-', split).strip('-')}.parquet"
    )
    if not target.is_file():
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(f".partial-{os.getpid()}-{target.name}")
        try:
            table.to_parquet(str(partial))
            os.replace(partial, target)  # whole or not at all, also with several processes
        finally:
            partial.unlink(missing_ok=True)
    return target


def _load(datasets: Any, name: str, subset: str | None, split: str) -> Any:
    """The rows, media columns undecoded. Raises DataError."""
    try:
        table = datasets.load_dataset(name, subset, split=split)
    except (OSError, ValueError, LookupError, datasets.exceptions.DatasetsError) as error:
        words = " ".join(str(error).split())[:300]
        split_known = re.search(r"Should be one of \[(.*?)\]", words) or re.search(
            r"Available splits?: \[?(.*?)\]?\.?$", words
        )
        hint = did_you_mean(split, re.findall(r"[\w-]+", split_known[1])) if split_known else ""
        raise DataError(
            f"hf://{name}{'/' + subset if subset else ''}:{split}: expected a data set of the hub, or one in the local "
            f"cache, found {type(error).__name__}: {words}; check the name, the split and the network "
            f"(HF_HUB_OFFLINE=1 uses the cache alone), or download it and give its folder.{hint}"
        ) from error
    for column, feature in table.features.items():
        if isinstance(feature, (datasets.Image, datasets.Audio, datasets.Video)):
            table = table.cast_column(column, type(feature)(decode=False))
        elif isinstance(inner := getattr(feature, "feature", None), datasets.Image):
            table = table.cast_column(column, type(feature)(type(inner)(decode=False)))
    return table
