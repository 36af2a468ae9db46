"""Several runs beside each other: paired gains of their last evaluations, and what their configurations do not share."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from mmrl.config.renamed import flat_with_new_names
from mmrl.evaluation.stats import Estimate
from mmrl.report.embodied import is_embodied
from mmrl.report.load import Run
from mmrl.report.rows import paired as paired_rows
from mmrl.report.rows import part_gains, unit_of
from mmrl.report.text import metric_name
from mmrl.report.verdict import choose_headline
from mmrl.viewer.samples import clean

__all__ = ["config_table", "flat_config", "paired"]

_MOST_KEYS = 20_000
_MOST_TEXT = 2000
_MOST_CONFIG = 1 << 18  # characters
_METRICS = 12
_MOST_GROUP = 1024  # a group size that is looked at when old bounds are read


def flat_config(text: str) -> dict[str, str]:
    """{'optim.lr': '1e-06', ...} of a config.yaml; lists count their items. Keys that have another name now stand
    under it, so that runs of before compare by what they mean. At most 20,000 keys; {} for what is no mapping."""
    return {key: _word(value) for key, value in _with_new_names(_leaves(text)).items()}


def _with_new_names(leaves: dict[str, Any]) -> dict[str, Any]:
    """Leaves under the names of today (mmrl/config/renamed.py); as they are where a section is none that could be read so."""
    size = leaves.get("rollout.group_size")
    # a file is a stranger's: old bounds are read by counting up to the group size, and lists have no place in a section
    known = {
        key: value
        for key, value in leaves.items()
        if key.partition(".")[0] in ("rl", "algorithm")
        and isinstance(value, (str, int, float, type(None)))
    }
    bounded = min(size, _MOST_GROUP) if isinstance(size, int) else 8
    try:
        found = flat_with_new_names({"rollout.group_size": bounded, **known}, _flat)
    # old and new keys that contradict each other, or hostile ones: they are shown as they were written
    except (ValueError, TypeError, AttributeError, ArithmeticError):
        return leaves
    if found.keys() == {"rollout.group_size", *known}:
        return leaves
    del found["rollout.group_size"]
    return {key: value for key, value in leaves.items() if key not in known} | found


def _leaves(text: str) -> dict[str, Any]:
    """The values of a config.yaml by their dotted keys."""
    try:
        tree = yaml.safe_load(text[:_MOST_CONFIG])
    except (yaml.YAMLError, RecursionError, ValueError):
        return {}
    return _flat(tree) if isinstance(tree, Mapping) else {}


def _flat(tree: Mapping[Any, Any]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    waiting: list[tuple[str, Any]] = [("", tree)]
    while waiting and len(out) + len(waiting) <= _MOST_KEYS:
        path, value = waiting.pop()
        parts: list[tuple[Any, Any]] = []
        if isinstance(value, Mapping):
            parts = list(value.items())
        elif isinstance(value, list) and any(isinstance(v, (Mapping, list)) for v in value):
            parts = list(enumerate(value))
        if parts:
            parts = parts[: _MOST_KEYS - len(waiting)]
            waiting += [(f"{path}.{k}" if path else str(k), v) for k, v in reversed(parts)]
        else:
            out[path] = value
    return out


def _word(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):  # without lists and mappings in it: cannot grow by aliases
        return f"[{', '.join(map(_word, value[:200]))}]"[:_MOST_TEXT]
    return str(value)[:_MOST_TEXT]


def config_table(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """One entry per key that any of the runs has: its value in each (null where it has none), and whether they differ."""
    trees = [flat_config(run.config_text) for run in runs]
    keys = list(dict.fromkeys(k for tree in trees for k in tree))
    out = []
    for key in keys:
        values = [tree.get(key) for tree in trees]
        out.append({"key": key, "values": values, "differs": len(set(values)) > 1})
    return out


def _estimate(found: Estimate) -> dict[str, Any]:
    numbers: dict[str, Any] = clean(dataclasses.asdict(found))
    return numbers


def paired(before: Run, after: Run) -> dict[str, Any]:
    """What the last evaluation of `after` gained over that of `before`, on the prompts that both answered: per metric, and per
    source by its own metric, with 95 % bootstrap intervals over prompts (as the report's gains between steps)."""
    if not before.evals or not after.evals:
        return {"why": "one of the runs has no finished evaluation", "gains": [], "sources": []}
    old, new = before.evals[-1], after.evals[-1]
    names = [
        n
        for mode in ("sampled", "greedy")
        for n in new.estimates.get(mode, {})
        if n in old.estimates.get(mode, {})
    ]
    first = choose_headline(after)[1]
    order = sorted(dict.fromkeys(names), key=lambda n: (n != first, n != "reward", n))[:_METRICS]
    many = len(new.per_source) > 1
    found = paired_rows(old, new, [n for n in order if many or n != "macro"])
    parts = part_gains(old, new, lambda row: unit_of(row)[0]) if many else {}
    out = [
        {
            "mode": mode,
            "metric": metric,
            "name": "Mean of sources" if metric == "macro" else metric_name(metric),
            "before": _estimate(pair.before),
            "after": _estimate(pair.after),
            "gain": _estimate(pair.gain),
        }
        for (mode, metric), pair in found.items()
    ]
    rank = {name: i for i, name in enumerate(order)}
    return {
        "why": ""
        if out
        else "the last evaluations of the two runs share no prompt (source and id) in the same mode",
        "robot": is_embodied(after),
        "steps": [old.step, new.step],
        "gains": sorted(
            out, key=lambda g: (rank.get(str(g["metric"]), 99), g["mode"] != "sampled")
        ),
        "sources": [
            {"mode": mode, "source": source, "gain": _estimate(gain)}
            for (mode, source), gain in sorted(parts.items())
        ],
    }
