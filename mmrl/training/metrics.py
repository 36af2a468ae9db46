"""Metrics of a step, overall and per data source, from the closed groups of all processes. Names are flat with slashes.

Every mean keeps failures in its denominator: a completion that could not be parsed counts as 0.
"""

from __future__ import annotations

import re
import resource
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

from mmrl.algorithms import has_signal
from mmrl.algorithms.group_rewards import accuracies, score_of
from mmrl.data.demonstrations import is_right, on_policy
from mmrl.rollout.group_generator import StepTally
from mmrl.training.collapse import answer_key, sameness
from mmrl.training.update_result import SourceStats, UpdateResult
from mmrl.types import RolloutGroup, StopReason
from mmrl.workers.scoring import is_reward_failure

__all__ = [
    "REFLECTION_WORDS",
    "completion_records",
    "peak_memory_gib",
    "step_metrics",
    "update_metrics",
]


REFLECTION_WORDS = (
    "re-check",
    "re-evaluate",
    "re-examine",
    "re-think",
    "recheck",
    "reevaluate",
    "reexamine",
    "reevaluation",
    "rethink",
    "check again",
    "think again",
    "try again",
    "verify",
    "wait",
    "yet",
)
"""The 15 words by which V-Triune counts completions that reflect on their own answer."""
_REFLECTION = re.compile(
    r"\b(?:" + "|".join(map(re.escape, REFLECTION_WORDS)) + r")\b", re.IGNORECASE
)


def completion_records(
    groups: Iterable[RolloutGroup], *, reflection: bool = False
) -> list[dict[str, Any]]:
    """One small picklable record per completion, in order of group key; `reflection` searches it for reflection words.

    Demonstrations are marked `offline`, past successes `replayed`, rollouts whose places they took are records like any other.
    """
    records = []
    for group in sorted(groups, key=lambda g: g.key):
        view, truth = _view(group), group.sample.answer
        asked = {
            "source": group.sample.source,
            "task": group.sample.task,
            "id": group.sample.id,
            "truth": None if truth is None else answer_key(str(truth)),
        }
        for trajectory in (*group.rollouts, *group.replaced):
            score, turn = score_of(trajectory), trajectory.turns[-1]
            records.append(
                {
                    "key": group.key,
                    **asked,
                    "answer": answer_key(turn.text),
                    "value": score.value,
                    "parts": dict(score.parts),
                    "metrics": dict(score.metrics),
                    "parsed": score.parsed,
                    "reason": score.reason,
                    "broken": is_reward_failure(score),
                    "right": is_right(score),
                    "offline": trajectory.offline,
                    "replayed": trajectory.replayed,
                    **view,
                    "length": trajectory.num_tokens,
                    "clipped": turn.stop is StopReason.LENGTH,
                    **(
                        {"reflects": _REFLECTION.search(turn.text) is not None}
                        if reflection
                        else {}
                    ),
                }
            )
    return records


def _view(group: RolloutGroup) -> dict[str, Any]:
    """Of a group whose input has a changed view: that view, and p, p~ where it was rolled out."""
    if not group.view:
        return {}
    changed, plain = accuracies(group.contrast), accuracies(on_policy(group.rollouts))
    both = (
        {"plain": float(np.mean(plain)), "changed": float(np.mean(changed))}
        if group.probe and plain and changed
        else {}
    )
    return {"view": group.view, "rolled_out": bool(group.contrast), **both}


def _contrast(records: Sequence[dict[str, Any]]) -> dict[str, float | None]:
    """Contrast groups: share rolled out; of those rolled out by lot, the accuracy on plain and on changed input and the gap
    between them: how much of the accuracy hangs on what the view changes."""
    groups = {r["key"]: r for r in records if "view" in r}
    measured = [r for r in groups.values() if "changed" in r]
    if not groups:
        return {}
    plain, changed = _mean([r["plain"] for r in measured]), _mean([r["changed"] for r in measured])
    return {
        "contrast/rolled_out": _mean([r["rolled_out"] for r in groups.values()]),
        "contrast/plain": plain,
        "contrast/changed": changed,
        "contrast/gap": None if plain is None or changed is None else plain - changed,
    }


def _mean(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if len(values) else None


def _one_source(records: Sequence[dict[str, Any]]) -> dict[str, float | None]:
    right, wrong = ([r for r in records if r["right"] is verdict] for verdict in (True, False))
    out: dict[str, float | None] = {
        "reward/mean": _mean([r["value"] for r in records]),
        "reward/std": float(np.std([r["value"] for r in records])),
        "parse_rate": _mean([r["parsed"] for r in records]),
        "length/mean": _mean([r["length"] for r in records]),
        "length/right": _mean([r["length"] for r in right]),
        "length/wrong": _mean([r["length"] for r in wrong]),
        "length/clipped": _mean([r["length"] for r in records if r["clipped"]]),
        "clipped_share": _mean([r["clipped"] for r in records]),
        "clipped_share/right": _mean([r["clipped"] for r in right]),
        "clipped_share/wrong": _mean([r["clipped"] for r in wrong]),
        "zero_variance_share": _zero_variance(records),
    }
    out.update(sameness(records))
    out.update(_reflection(records))
    out.update(_contrast(records))
    out.update(_detection(records))
    out.update(_measured(records))
    reasons: dict[str, int] = defaultdict(int)
    for record in records:
        if record["reason"]:
            reasons[record["reason"].partition(":")[0]] += 1
    out.update({f"failed/{reason}": n / len(records) for reason, n in sorted(reasons.items())})
    return out


def _kind(record: dict[str, Any]) -> tuple[str, str]:
    """Source and task: one source may hold samples of several tasks, each with metrics of its own."""
    return record["source"], record["task"]


def _measured(records: Sequence[dict[str, Any]]) -> dict[str, float | None]:
    """Mean of each reward part and metric over the completions of the sources and tasks that measure it.

    A failure without it counts as 0 there; other tasks neither have it nor dilute it.
    """
    owners: dict[tuple[str, str], set[tuple[str, str]]] = defaultdict(set)
    for record in records:
        for kind in ("parts", "metrics"):
            for name in record[kind]:
                owners[kind, name].add(_kind(record))
    return {
        f"reward/part/{name}" if kind == "parts" else name: _mean(
            [r[kind].get(name, 0.0) for r in records if _kind(r) in owners[kind, name]]
        )
        for kind, name in sorted(owners)
    }


def _zero_variance(records: Sequence[dict[str, Any]]) -> float | None:
    """Share of groups whose rewards are all equal."""
    groups: dict[Any, list[float]] = defaultdict(list)
    for record in records:
        groups[record["key"]].append(record["value"])
    return _mean([not has_signal(values) for values in groups.values()])


def _reflection(records: Sequence[dict[str, Any]]) -> dict[str, float | None]:
    """Shares of completions with reflection words (all, right, wrong), and shares of right ones with and without them."""
    if not records or "reflects" not in records[0]:
        return {}

    def share(name: str, of: str, value: bool) -> float | None:
        return _mean([r[name] for r in records if r[of] is value])

    return {
        "reflection/share": _mean([r["reflects"] for r in records]),
        "reflection/share/right": share("reflects", "right", True),
        "reflection/share/wrong": share("reflects", "right", False),
        "reflection/right/with": share("right", "reflects", True),
        "reflection/right/without": share("right", "reflects", False),
    }


def _detection(records: Sequence[dict[str, Any]]) -> dict[str, float | None]:
    """precision@0.5 = right / parsed and recall@0.5 = right / all, where right means IoU >= 0.5 (one object per picture).

    Over the sources and tasks that measure acc@0.5; a completion of theirs whose reward failed has no metrics and counts
    as missed. Precision is None when nothing was parsed.
    """
    kinds = {_kind(r) for r in records if "acc@0.5" in r["metrics"]}
    rows = [r for r in records if _kind(r) in kinds]
    if not rows:
        return {}
    right, parsed = (
        sum(r["metrics"].get("acc@0.5", 0.0) for r in rows),
        sum(r["parsed"] for r in rows),
    )
    return {"precision@0.5": right / parsed if parsed else None, "recall@0.5": right / len(rows)}


def _trained(stats: SourceStats) -> dict[str, float | None]:
    """What the update measured on the tokens it trained on: KL, clip fractions, sampler-trainer gap, entropy."""
    means = stats.stats.means()
    return {
        "kl": means["kl_ref"],
        "kl_step": means["approx_kl"],
        "ratio": means["ratio"],
        "clip/low": means["clip_low"],
        "clip/high": means["clip_high"],
        "clip/dual": means["dual_clip"],
        "clip/clamped": means["clamped"],
        "logprob_gap/mean": stats.gap_sum / stats.gap_tokens if stats.gap_tokens else None,
        "logprob_gap/max": stats.gap_max if stats.gap_tokens else None,
        "entropy": stats.entropy / stats.entropy_tokens if stats.entropy_tokens else None,
    }


def _offline(
    records: Sequence[dict[str, Any]], demonstrations: Sequence[dict[str, Any]], stats: SourceStats
) -> dict[str, float | None]:
    """Demonstrations: how many of all completions, their mean reward, their mean log-prob per trained token."""
    tokens = stats.stats.offline_tokens
    return {
        "offline/share": len(demonstrations) / (len(records) + len(demonstrations)),
        "offline/reward": _mean([r["value"] for r in demonstrations]),
        "offline/logp": stats.stats.offline_logp / tokens if tokens else None,
        "offline/capped": stats.stats.offline_capped / tokens if tokens else None,
    }


def update_metrics(update: UpdateResult) -> dict[str, float | None]:
    """What the optimizer steps of a training step measured, for rollouts of any kind: None where nothing was trained on."""
    total, n = update.total, update.denominator
    own = {
        **_trained(total),
        "loss": total.stats.policy_loss / n if n else None,
        "grad_norm": _mean(update.grad_norms),
        "lr": update.lr,
        "tokens/packed": update.packed_tokens,
    }
    return {
        **{f"train/{k}": v for k, v in own.items()},
        **update.advantage_metrics,
        **update.critic,
        **update.rerouted.metrics,
        **update.selected.metrics,
    }


def step_metrics(
    records: Sequence[dict[str, Any]],
    tally: StepTally,
    update: UpdateResult,
    seconds: dict[str, float],
) -> dict[str, Any]:
    """The row of metrics.jsonl for one step; `records` and `update` cover all processes. Demonstrations have metrics of their
    own (offline/..) and count in no other."""
    row: dict[str, Any] = {}
    told, records = (
        [r for r in records if r.get("offline")],
        [r for r in records if not (r.get("offline") or r.get("replayed"))],
    )
    by_source: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for record in records:
        by_source[record["source"]].append(record)
    if records:
        row.update({f"train/{k}": v for k, v in _one_source(records).items()})
        for source, rows in sorted(by_source.items()):
            row.update({f"train/{source}/{k}": v for k, v in _one_source(rows).items()})
    for source, stats in sorted(update.sources.items()):
        row.update({f"train/{source}/{k}": v for k, v in _trained(stats).items()})
    total = update.total
    row.update(update_metrics(update))
    if told:
        row.update({f"train/{k}": v for k, v in _offline(records, told, total).items()})
        for source in sorted({r["source"] for r in told}):
            mine = [r for r in told if r["source"] == source]
            row.update(
                {
                    f"train/{source}/{k}": v
                    for k, v in _offline(by_source[source], mine, update.sources[source]).items()
                }
            )
    row.update(tally.notes)
    if tally.report is not None:
        row.update({f"train/groups/{name}": count for name, count in tally.report.counts.items()})
        row["train/groups/unfilled"], row["train/groups/waiting"] = (
            tally.report.unfilled,
            tally.report.queue,
        )
        for source, counts in tally.report.by_source.items():
            row.update({f"train/{source}/groups/{name}": count for name, count in counts.items()})
    tokens = tally.rollout_tokens + tally.prompt_tokens
    row.update({f"time/{name}": value for name, value in seconds.items()})
    row["speed/tokens_per_s"] = tokens / seconds["total"] if seconds.get("total") else None
    row["memory/peak_gib"] = peak_memory_gib()
    return row


def peak_memory_gib() -> float:
    """Peak memory of this process: on the GPU if there is one, else resident memory, in GiB."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
