"""Metrics of a step, overall and per data source, from the closed groups of all processes. Names are flat with slashes.

Every mean keeps failures in its denominator: a completion that could not be parsed counts as 0.
"""
from __future__ import annotations

import resource
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

from mmrl.schedule import StepTally, score_of
from mmrl.scoring import is_reward_failure
from mmrl.types import Group, StopReason
from mmrl.update import UpdateResult

__all__ = ["completion_records", "peak_memory_gib", "step_metrics"]


def completion_records(groups: Iterable[Group]) -> list[dict[str, Any]]:
    """One small picklable record per completion, in order of group key."""
    records = []
    for group in sorted(groups, key=lambda g: g.key):
        for trajectory in group.trajectories:
            score, turn = score_of(trajectory), trajectory.turns[-1]
            records.append({
                "key": group.key, "source": group.sample.source, "id": group.sample.id, "value": score.value,
                "parts": dict(score.parts),
                "metrics": dict(score.metrics), "parsed": score.parsed, "reason": score.reason,
                "broken": is_reward_failure(score),
                "length": trajectory.num_tokens, "clipped": turn.stop is StopReason.LENGTH})
    return records


def _mean(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if len(values) else None


def _one_source(records: Sequence[dict[str, Any]]) -> dict[str, float | None]:
    out: dict[str, float | None] = {
        "reward/mean": _mean([r["value"] for r in records]), "reward/std": float(np.std([r["value"] for r in records])),
        "parse_rate": _mean([r["parsed"] for r in records]), "length/mean": _mean([r["length"] for r in records]),
        "length/right": _mean([r["length"] for r in records if r["value"] > 0.5]),
        "length/wrong": _mean([r["length"] for r in records if r["value"] <= 0.5]),
        "length/clipped": _mean([r["length"] for r in records if r["clipped"]]),
        "clipped_share": _mean([r["clipped"] for r in records])}
    out.update(_detection(records))
    names = {(kind, name) for r in records for kind in ("parts", "metrics") for name in r[kind]}
    for kind, name in sorted(names):
        label = f"reward/part/{name}" if kind == "parts" else name
        out[label] = _mean([r[kind].get(name, 0.0) for r in records])
    reasons: dict[str, int] = defaultdict(int)
    for record in records:
        if record["reason"]:
            reasons[record["reason"].partition(":")[0]] += 1
    out.update({f"failed/{reason}": n / len(records) for reason, n in sorted(reasons.items())})
    return out


def _detection(records: Sequence[dict[str, Any]]) -> dict[str, float | None]:
    """precision@0.5 = right / parsed and recall@0.5 = right / all, where right means IoU >= 0.5 (one object per picture).

    Over the sources that measure acc@0.5; a completion of theirs whose reward failed has no metrics and counts as missed.
    Precision is None when nothing was parsed.
    """
    sources = {r["source"] for r in records if "acc@0.5" in r["metrics"]}
    rows = [r for r in records if r["source"] in sources]
    if not rows:
        return {}
    right, parsed = sum(r["metrics"].get("acc@0.5", 0.0) for r in rows), sum(r["parsed"] for r in rows)
    return {"precision@0.5": right / parsed if parsed else None, "recall@0.5": right / len(rows)}


def step_metrics(records: Sequence[dict[str, Any]], tally: StepTally, update: UpdateResult,
                 seconds: dict[str, float]) -> dict[str, Any]:
    """The row of metrics.jsonl for one step; `records` and `update` cover all processes."""
    row: dict[str, Any] = {}
    by_source: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for record in records:
        by_source[record["source"]].append(record)
    if records:
        row.update({f"train/{k}": v for k, v in _one_source(records).items()})
        for source, rows in sorted(by_source.items()):
            row.update({f"train/{source}/{k}": v for k, v in _one_source(rows).items()})
    for source, (total, tokens) in sorted(update.entropy.items()):
        row[f"train/{source}/entropy"] = total / max(1.0, tokens)
    entropy_tokens = sum(t for _, t in update.entropy.values())
    row["train/entropy"] = sum(e for e, _ in update.entropy.values()) / entropy_tokens if entropy_tokens else None
    means = update.stats.means()
    row.update({"train/kl": means["kl_ref"], "train/kl_step": means["approx_kl"], "train/ratio": means["ratio"],
                "train/clip/low": means["clip_low"], "train/clip/high": means["clip_high"],
                "train/clip/dual": means["dual_clip"], "train/clip/clamped": means["clamped"],
                "train/loss": update.stats.policy_loss / update.denominator if update.denominator else None,
                "train/grad_norm": _mean(update.grad_norms), "train/lr": update.lr,
                "train/logprob_gap/mean": update.gap_sum / update.gap_tokens if update.gap_tokens else None,
                "train/logprob_gap/max": update.gap_max if update.gap_tokens else None})
    if tally.report is not None:
        row.update({f"train/groups/{name}": count for name, count in tally.report.counts.items()})
        row["train/groups/unfilled"], row["train/groups/waiting"] = tally.report.unfilled, tally.report.queue
        for source, counts in tally.report.by_source.items():
            row.update({f"train/{source}/groups/{name}": counts[name]
                        for name in ("asked", "kept", "no_signal", "failed")})
    tokens = tally.rollout_tokens + tally.prompt_tokens
    row.update({f"time/{name}": value for name, value in seconds.items()})
    row["speed/tokens_per_s"] = tokens / seconds["total"] if seconds.get("total") else None
    row["train/tokens/packed"] = update.packed_tokens
    row["memory/peak_gib"] = peak_memory_gib()
    return row


def peak_memory_gib() -> float:
    """Peak memory of this process: on the GPU if there is one, else resident memory, in GiB."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
