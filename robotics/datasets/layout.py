"""Names and shapes of a LeRobot data set: paths, feature descriptions, the tasks table, statistics.

v3.0 (huggingface/lerobot, src/lerobot/datasets: utils.py, dataset_metadata.py, dataset_writer.py) keeps many episodes in a
file and finds them by meta/episodes; v2.x keeps one file per episode and camera. Templates in info.json say where.

    python -c "from mmrl.robotics.datasets.layout import fill; \
      print(fill('data/chunk-{chunk_index:03d}/x', {'chunk_index': 4}, 'info'))"
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mmrl.errors import DataError
from mmrl.robotics.datasets.demonstration import import_or_say

__all__ = [
    "DATA_PATH",
    "DEFAULT_FEATURES",
    "EPISODES_PATH",
    "PREFIX",
    "VERSION",
    "VIDEO_PATH",
    "Histogram",
    "column_stats",
    "fill",
    "tasks_table",
    "vector",
]

VERSION = "v3.0"
PREFIX = "observation.images."
_FILE = "chunk-{chunk_index:03d}/file-{file_index:03d}"
DATA_PATH = f"data/{_FILE}.parquet"
VIDEO_PATH = "videos/{video_key}/" + _FILE + ".mp4"
EPISODES_PATH = f"meta/episodes/{_FILE}.parquet"
_QUANTILES = {"q01": 0.01, "q10": 0.10, "q50": 0.50, "q90": 0.90, "q99": 0.99}
_TEMPLATE = re.compile(r"(?:[\w./ -]|\{\w{1,40}(?::0?\d{1,2}d)?\})+")

DEFAULT_FEATURES: dict[str, dict[str, Any]] = {
    name: {"dtype": kind, "shape": [1], "names": None}
    for name, kind in (
        ("timestamp", "float32"),
        ("frame_index", "int64"),
        ("episode_index", "int64"),
        ("index", "int64"),
        ("task_index", "int64"),
    )
}


def fill(template: Any, values: Mapping[str, Any], where: str) -> str:
    """A path from a template of info.json. Raises DataError for a template that is none, or leads out of the data set."""
    if (
        not isinstance(template, str)
        or not _TEMPLATE.fullmatch(template)
        or template.startswith("/")
        or ".." in template
    ):
        raise DataError(
            f"{where}: expected a path template inside the data set such as {DATA_PATH}, found {str(template)[:100]!r}"
        )
    try:
        path = template.format(**values)
    except (KeyError, ValueError) as error:
        raise DataError(
            f"{where}: expected a path template of {', '.join(values)}, found {template[:100]!r} ({error})"
        ) from error
    if ".." in path or path.startswith("/"):
        raise DataError(f"{where}: expected a path inside the data set, found {path[:100]!r}")
    return path


def vector(dim: int, names: Sequence[str] | None = None) -> dict[str, Any]:
    """Feature of `dim` float32 values."""
    return {"dtype": "float32", "shape": [dim], "names": list(names) if names else None}


def tasks_table(tasks: Sequence[str]) -> Any:
    """tasks.parquet as pandas writes it: column task_index, the instruction as index `task` (lerobot looks tasks up by it)."""
    pa = import_or_say("pyarrow", "pip install pyarrow")
    describe = {
        "index_columns": ["task"],
        "column_indexes": [
            {
                "name": None,
                "field_name": None,
                "pandas_type": "unicode",
                "numpy_type": "object",
                "metadata": {"encoding": "UTF-8"},
            }
        ],
        "columns": [
            {
                "name": "task_index",
                "field_name": "task_index",
                "pandas_type": "int64",
                "numpy_type": "int64",
                "metadata": None,
            },
            {
                "name": "task",
                "field_name": "task",
                "pandas_type": "unicode",
                "numpy_type": "object",
                "metadata": None,
            },
        ],
        "creator": {"library": "pyarrow", "version": pa.__version__},
        "pandas_version": "2.0.0",
    }
    table = pa.table(
        {
            "task_index": pa.array(range(len(tasks)), pa.int64()),
            "task": pa.array(list(tasks), pa.string()),
        }
    )
    return table.replace_schema_metadata({"pandas": json.dumps(describe)})


def column_stats(values_TD: np.ndarray) -> dict[str, Any]:
    """min, max, mean, std, count and five quantiles over T of a feature with D values, as lists (D,); count (1,)."""
    values = np.asarray(values_TD, np.float64).reshape(len(values_TD), -1)
    numbers = {
        "min": values.min(axis=0),
        "max": values.max(axis=0),
        "mean": values.mean(axis=0),
        "std": values.std(axis=0),
        **dict(
            zip(_QUANTILES, np.quantile(values, list(_QUANTILES.values()), axis=0), strict=True)
        ),
    }
    return {**{name: number.tolist() for name, number in numbers.items()}, "count": [len(values)]}


class Histogram:
    """Exact statistics of 8-bit pictures, whatever their number: how often each value occurs in each channel."""

    def __init__(self) -> None:
        self.counts_CV = np.zeros((3, 256), np.int64)
        self.pictures = 0

    def add(self, frames_THWC: np.ndarray, weights_T: np.ndarray | None = None) -> None:
        """Count pictures; weights_T: how often each is shown."""
        weights = (
            np.ones(len(frames_THWC), np.int64)
            if weights_T is None
            else np.asarray(weights_T, np.int64)
        )
        for frame, weight in zip(frames_THWC, weights, strict=True):
            for channel in range(3):
                self.counts_CV[channel] += weight * np.bincount(
                    frame[..., channel].reshape(-1), minlength=256
                )
        self.pictures += int(weights.sum())

    def merge(self, other: Histogram) -> None:
        """Take over what another one counted."""
        self.counts_CV += other.counts_CV
        self.pictures += other.pictures

    def stats(self) -> dict[str, Any]:
        """LeRobot's layout for pictures: values in [0, 1], shape (3, 1, 1); count is the number of pictures."""
        values = np.arange(256) / 255.0
        total = self.counts_CV.sum(axis=1)
        mean = self.counts_CV @ values / total
        cumulated = np.cumsum(self.counts_CV, axis=1)
        found = {
            "min": values[np.argmax(self.counts_CV > 0, axis=1)],
            "max": values[255 - np.argmax(self.counts_CV[:, ::-1] > 0, axis=1)],
            "mean": mean,
            "std": np.sqrt(np.maximum(self.counts_CV @ values**2 / total - mean**2, 0.0)),
        }
        for name, share in _QUANTILES.items():
            found[name] = values[np.argmax(cumulated >= share * total[:, None], axis=1)]
        return {
            **{name: number.reshape(3, 1, 1).tolist() for name, number in found.items()},
            "count": [self.pictures],
        }
