"""Every error of every row of a data set at once: rows that cannot be read, pictures and clips that cannot be decoded, prompts that
do not fit.

    mmrl tasks check grounding --all --data train.jsonl --model Qwen/Qwen2.5-VL-3B-Instruct --out runs/check

Rows are read as a run with data.on_error 'record' reads them; every sample is then encoded by the model's own processor (its
weights are not loaded), so that every pixel is decoded once. What is wrong is written to errors.jsonl, one line each.
"""

from __future__ import annotations

import re
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmrl.data.sources import data_name
from mmrl.diagnostics.conformance import load_encoder, settings_of
from mmrl.errors import ConfigError, DataError, MediaError
from mmrl.files import json_line, write_text
from mmrl.registry import task_from_spec

if TYPE_CHECKING:
    from mmrl.config import RunConfig

__all__ = ["RowErrors", "check_rows"]

ERRORS = "errors.jsonl"
_EXPECTED = re.compile(r"expected (.+?), found")


@dataclass
class RowErrors:
    """What `check_rows` found: errors as {kind, file, row, id, reason}, rows left out on request and notes, counted.

    `row` counts rows or lines of `file` from 1 (pictures, in COCO's annotations), also where a picture or prompt is wrong; `file`
    is that of a data set of the hub in datasets' own cache."""

    task: str
    data: str
    samples: int = 0
    errors: list[dict[str, Any]] = field(default_factory=list)
    skipped: dict[str, int] = field(default_factory=dict)
    notes: dict[str, int] = field(default_factory=dict)

    @property
    def kinds(self) -> dict[str, list[dict[str, Any]]]:
        """The errors by kind, the most frequent kind first."""
        counts = Counter(error["kind"] for error in self.errors)
        return {
            kind: [e for e in self.errors if e["kind"] == kind] for kind, _ in counts.most_common()
        }


def _kind(reason: str) -> str:
    """What was expected, which names the kind of an error: numbers in it are of its row."""
    found = _EXPECTED.search(reason)
    return re.sub(r"[0-9]+(?:\.[0-9]+)?", "N", found[1])[:100] if found else reason[:60]


def check_rows(
    spec: str,
    data: str | Path | None = None,
    *,
    model: str | None = None,
    params: Mapping[str, Any] | None = None,
    out: str | Path = "runs/check",
    config: RunConfig | None = None,
) -> RowErrors:
    """Read and encode all of `data` (default: that of `config`) for the task `spec`; writes `out`/errors.jsonl.

    `model`, `params` and `config` as in mmrl.diagnostics.conformance.check_task. Raises ConfigError or RegistryError for a task,
    model or parameter that does not exist, DataError for a file that cannot be read at all.
    """

    folder = Path(out)
    settings, data = settings_of(config, spec, data, params)
    if data is None:
        raise ConfigError(
            "expected --data FILE or a --config with data for --all, found neither; give one of them"
        )
    if isinstance(settings.get("reader"), Mapping):
        settings["reader"] = {
            key: value for key, value in settings["reader"].items() if key != "on_error"
        }
    task = task_from_spec(spec, settings)
    task.on_error = "record"
    if config is not None:
        task.orientation = config.data.image.orientation
    result = RowErrors(spec, data_name(data))
    samples = list(task.load(result.data))
    result.samples, result.skipped, result.notes = (
        len(samples),
        dict(task.skipped),
        dict(task.notes),
    )
    for rejected in task.rejected:
        reason = str(getattr(rejected, "reason", rejected))
        result.errors.append(
            {
                "kind": _kind(reason),
                "file": str(getattr(rejected, "file", result.data)),
                "row": getattr(rejected, "row", None),
                "id": None,
                "reason": reason,
            }
        )
    with tempfile.TemporaryDirectory() as scratch:
        encoder, _ = load_encoder(model, Path(scratch), config)
        for sample in samples:
            try:
                encoder(sample, task)
            except (MediaError, DataError) as error:
                kind = (
                    f"media: {error.kind}" if isinstance(error, MediaError) else _kind(str(error))
                )
                # a view that the task made of a row stands where that row does
                place = task.places.get(sample.id) or task.places.get(
                    str(sample.params.get("mirror_of"))
                )
                file, row = place or (result.data, None)
                result.errors.append(
                    {"kind": kind, "file": file, "row": row, "id": sample.id, "reason": str(error)}
                )
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / ERRORS, "".join(json_line(error) + "\n" for error in result.errors))
    return result
