"""Offline pass-rate filter: leave out samples that a policy always or never solves, by its logged completions.

    data.train[].pass_rate: {file: runs/base/eval/step_000000/predictions.jsonl, metric: correct, min: 0.1, max: 0.9}

A sample's rate is the mean of one metric over its completions; those that failed count as 0. EasyVideoR1 keeps
0 < pass@8 < 1, SimpleVLA-RL [0.1, 0.9] while training (algorithm.dynamic_sampling is the online counterpart).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mmrl.config import PassRateConfig
from mmrl.data.json_lines import json_rows
from mmrl.errors import ConfigError, DataError, did_you_mean
from mmrl.types import Sample

__all__ = ["filter_by_rate", "read_pass_rates"]

Name = tuple[str, str]  # (source, sample id)


def read_pass_rates(config: PassRateConfig) -> dict[Name, float]:
    """Mean of `config.metric` per (source, sample id) over the completions of `config.mode`.

    Raises DataError for a file or line that cannot be read, ConfigError when nothing in it has that metric or mode.
    """
    values: dict[Name, list[float]] = {}
    known: set[str] = {"reward", "parse_rate"}
    modes: Counter[str] = Counter()
    for number, row in _rows(config.file):
        name, mode, score = _read(row, f"{config.file}:{number}")
        modes[mode] += 1
        if mode not in ("offline", "contrast") and config.mode in ("all", mode):
            table = _values(score)
            known.update(table)
            value = table.get(config.metric, 0.0)
            if type(value) not in (bool, int, float) or not math.isfinite(value):
                raise DataError(
                    f"{config.file}:{number}: expected a finite number for '{config.metric}' (pass_rate.metric), found "
                    f"{value!r:.60}; choose another metric, or remove the line"
                )
            values.setdefault(name, []).append(float(value))
    if not values:
        raise ConfigError(
            f"{config.file}: expected completions of mode '{config.mode}' (pass_rate.mode), found "
            f"{', '.join(f'{n} {mode}' for mode, n in sorted(modes.items())) or 'no lines'}"
        )
    if config.metric not in known:
        raise ConfigError(
            f"{config.file}: expected completions with the metric '{config.metric}' (pass_rate.metric), found "
            f"{', '.join(sorted(known))}.{did_you_mean(config.metric, sorted(known))}"
        )
    return {name: math.fsum(column) / len(column) for name, column in values.items()}


def _rows(file: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    try:
        yield from json_rows(Path(file))
    except DataError as error:
        raise DataError(
            f"{error}; data.train[].pass_rate.file names logged completions (predictions.jsonl)"
        ) from error


def _read(row: Mapping[str, Any], where: str) -> tuple[Name, str, Mapping[str, Any]]:
    """(source, id), mode and score of one logged completion; rollouts have no mode and were sampled, but for demonstrations
    ('offline') and answers to a changed input ('contrast'), which say nothing of the policy on the input."""
    try:
        sample = row.get("sample", row)
        score = row["score"]
        float(score["value"])
        return (str(sample["source"]), str(sample["id"])), _mode(row), score
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(
            f"{where}: expected a logged completion with sample and score, found something else ({error!r}); use a "
            "predictions.jsonl or rollouts/step_*.jsonl of a run"
        ) from error


def _mode(row: Mapping[str, Any]) -> str:
    return next(
        (name for name in ("offline", "contrast") if row.get(name)), str(row.get("mode", "sampled"))
    )


def _values(score: Mapping[str, Any]) -> dict[str, float]:
    """Everything a completion can be rated by; metrics win over reward parts of the same name."""
    return {
        **score.get("parts", {}),
        **score.get("metrics", {}),
        "reward": score["value"],
        "parse_rate": float(bool(score.get("parsed", True))),
    }


def filter_by_rate(
    samples: Sequence[Sample], rates: Mapping[Name, float], config: PassRateConfig
) -> tuple[tuple[Sample, ...], Counter[str]]:
    """Samples within the bounds, in order, and how many were left out by reason.

    Raises DataError for samples without a record unless `config.missing` says otherwise.
    """
    kept: list[Sample] = []
    dropped: Counter[str] = Counter()
    for sample in samples:
        rate = rates.get((sample.source, sample.id))
        if rate is None:
            if config.missing == "error":
                lacking = sum((s.source, s.id) not in rates for s in samples)
                raise DataError(
                    f"expected logged completions of every sample in {config.file}, found none of {lacking} of "
                    f"{len(samples)} samples, first '{sample.id}' of source '{sample.source}'; log them, or set "
                    "pass_rate.missing to keep or drop"
                )
            if config.missing == "drop":
                dropped["pass_rate_missing"] += 1
                continue
        elif rate < config.min - 1e-9 or rate > config.max + 1e-9:
            dropped["pass_rate_low" if rate < config.min else "pass_rate_high"] += 1
            continue
        kept.append(sample)
    return tuple(kept), dropped
