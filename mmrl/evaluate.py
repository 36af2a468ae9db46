"""Held-out evaluation: greedy and sampled (avg@k), confidence intervals, every completion written down.

    mmrl eval runs/demo/checkpoints/best --task grounding --data eval.jsonl

Intervals: cluster bootstrap over samples at 95 % (k completions of one sample are not independent). A sample whose
picture cannot be read counts as a failure, in every denominator.
"""
from __future__ import annotations

import dataclasses
import json
import math
import zlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mmrl.config import RunConfig
from mmrl.data import LoadedSource
from mmrl.errors import DataError, MediaError
from mmrl.policy.policy import Policy
from mmrl.rollout import Request, RolloutEngine, SamplingSettings
from mmrl.runlog import versions, write_json
from mmrl.schedule import score_origin
from mmrl.scoring import ScoreJob, Scorer
from mmrl.stats import describe
from mmrl.types import RewardContext, Sample, Score, StopReason
from mmrl.world import World

__all__ = ["EvalSettings", "Evaluation", "evaluate", "protocol_of", "write_evaluation"]

_CHUNK = 64  # samples encoded at a time: a benchmark's pixels do not fit in memory together


@dataclasses.dataclass(frozen=True)
class EvalSettings:
    """How to evaluate; `samples` completions per prompt at the sampling temperature, beside one greedy answer."""

    sampling: SamplingSettings
    samples: int = 8
    seed: int = 0
    limit: int | None = None
    greedy: bool = True
    protocol: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # what else can change the numbers


@dataclasses.dataclass
class Evaluation:
    """results.json (`results`) and predictions.jsonl (`predictions`) in memory."""

    results: dict[str, Any]
    predictions: list[dict[str, Any]]
    places: list[int]  # of each prediction's sample in its source

    def metric(self, name: str, limit: int | None = None) -> float | None:
        """'sampled/iou' -> its mean over the first `limit` samples of each source; None when it was not measured.

        Comparing checkpoints needs the same samples each time, whether or not this evaluation had more of them.
        """
        mode, _, metric = name.partition("/")
        if metric not in self.results.get(mode, {}):
            return None
        if limit is None or all(place < limit for place in self.places):
            return self.results[mode][metric]["mean"]
        scores = [p["score"] for p, place in zip(self.predictions, self.places, strict=True)
                  if p["mode"] == mode and (limit is None or place < limit)]
        special = {"reward": lambda s: s["value"], "parse_rate": lambda s: float(s["parsed"])}
        value = special.get(metric, lambda s: s["metrics"].get(metric, 0.0))
        return math.fsum(value(s) for s in scores) / len(scores) if scores else None


def evaluate(policy: Policy, engine: RolloutEngine, scorer: Scorer, sources: Sequence[LoadedSource],
             settings: EvalSettings, *, step: int = 0, world: World | None = None, first_key: int = 0) -> Evaluation:
    """Score the policy on all samples of `sources` (the first `limit` of each). The same on every process.

    `first_key` is the number of the first source among the scorer's tasks.
    """
    rank, size = (world.rank, world.size) if world else (0, 1)
    rows: list[dict[str, Any]] = []
    for key, source in enumerate(sources, first_key):
        mine = list(enumerate(source.samples[: settings.limit]))[rank::size]
        for start in range(0, len(mine), _CHUNK):
            rows += _evaluate_chunk(policy, engine, scorer, key, source, mine[start:start + _CHUNK], settings)
    if world is not None:
        rows = world.gather(rows)
    rows.sort(key=lambda r: (r["_order"], r["mode"], r["_number"]))
    return Evaluation(_summarize(rows, sources, settings, policy, step, first_key), [_public(r) for r in rows],
                      [r["_order"][1] for r in rows])


def _evaluate_chunk(policy: Policy, engine: RolloutEngine, scorer: Scorer, key: int, source: LoadedSource,
                    samples: Sequence[tuple[int, Sample]], settings: EvalSettings) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    plan: list[tuple[int, Sample, str, tuple]] = []
    requests: list[Request] = []
    for order, sample in samples:
        try:
            prompt = policy.encoder(sample, source.task)
        except (MediaError, DataError) as error:
            modes = [("greedy", 1 if settings.greedy else 0), ("sampled", settings.samples)]
            failure = Score.failure(f"input_error: {error}", source.task.part_names)
            unseen = RewardContext(1, 1, policy.template.frame, stop=StopReason.ERROR,
                                   max_tokens=settings.sampling.max_new_tokens)
            rows += [_row(source, ScoreJob(key, sample, "", unseen), failure, order, mode, n)
                     for mode, count in modes for n in range(count)]
            continue
        if settings.greedy:
            requests.append(Request(prompt, 1, greedy=True))
            plan.append((order, sample, "greedy", prompt.images))
        if settings.samples:
            noise_key = (settings.seed, 5, zlib.crc32(f"{sample.source}/{sample.id}".encode()))
            requests.append(Request(prompt, settings.samples, noise_key))
            plan.append((order, sample, "sampled", prompt.images))
    completions = engine.generate(requests, settings.sampling) if requests else []
    flat = [(order, sample, mode, number, completion, images)
            for (order, sample, mode, images), group in zip(plan, completions, strict=True)
            for number, completion in enumerate(group)]
    jobs = [ScoreJob(key, sample, completion.text, RewardContext(
                1, 1, policy.template.frame, images, completion.stop, len(completion.token_ids),
                settings.sampling.max_new_tokens)) for _, sample, _, _, completion, images in flat]
    for (order, _, mode, number, _, _), job, score in zip(flat, jobs, scorer.score(jobs), strict=True):
        rows.append(_row(source, job, score, order, mode, number))
    return rows


def _row(source: LoadedSource, job: ScoreJob, score: Score, order: int, mode: str, number: int) -> dict[str, Any]:
    """One line of predictions.jsonl, with all that `mmrl score` needs to score it again."""
    sample, ctx = job.sample, job.ctx
    return {
        "id": sample.id, "source": sample.source, "task": sample.task, "question": sample.question,
        "images": list(sample.images), "mode": mode, "text": job.text, "stop": ctx.stop.value,
        "num_tokens": ctx.num_tokens, "max_tokens": ctx.max_tokens, "frame": ctx.frame.value,
        **score_origin(source.config, ctx.images), "sample": dataclasses.asdict(sample),
        "score": dataclasses.asdict(score), "_order": (job.key, order), "_number": number, "_score": score}


def _public(row: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in row.items() if not k.startswith("_")}


def _measured(rows: Sequence[Mapping[str, Any]], sources: Sequence[LoadedSource],
              first_key: int) -> dict[int, set[str]]:
    """Metrics per data source: what any of its scores has, and its headline even when every answer failed."""
    names = {key: {s.task.headline} - {"reward"} for key, s in enumerate(sources, first_key)}
    for row in rows:
        names[row["_order"][0]].update(row["_score"].metrics)
    return names


def _estimates(rows: Sequence[Mapping[str, Any]], seed: int, measured: Mapping[int, set[str]]) -> dict[str, Any]:
    """Mean with interval of the reward and of every metric, clustered by sample.

    A metric is averaged over all rows of the data sources that measure it: a failure counts as 0, other tasks do not.
    """
    columns: dict[str, list[tuple[str, float]]] = defaultdict(list)
    for row in rows:
        unit, score = f"{row['source']}/{row['id']}", row["_score"]
        columns["reward"].append((unit, score.value))
        columns["parse_rate"].append((unit, float(score.parsed)))
        for name in sorted(measured[row["_order"][0]]):
            columns[name].append((unit, float(score.metrics.get(name, 0.0))))
    return {name: dataclasses.asdict(describe([value for _, value in column], clusters=[unit for unit, _ in column],
                                              level=0.95, seed=seed)) for name, column in columns.items()}


def _summarize(rows: Sequence[Mapping[str, Any]], sources: Sequence[LoadedSource], settings: EvalSettings,
               policy: Policy, step: int, first_key: int) -> dict[str, Any]:
    results: dict[str, Any] = {
        "step": step, "task": ", ".join(sorted({s.task.name for s in sources})),
        "protocol": {
            **settings.protocol,
            "data": [{"path": s.config.path, "task": s.config.task, "params": s.config.params,
                      "samples": len(s.samples[: settings.limit]), "rejected": len(s.rejected)} for s in sources],
            "template": policy.template.name, "frame": policy.template.frame.value, "samples_per_prompt": settings.samples,
            "seed": settings.seed, **dataclasses.asdict(settings.sampling),
            "interval": "95 % cluster bootstrap over samples", "versions": versions()},
        "per_source": {}}
    measured = _measured(rows, sources, first_key)
    for mode in ("greedy", "sampled"):
        chosen = [r for r in rows if r["mode"] == mode]
        if not chosen:
            continue
        results[mode] = _estimates(chosen, settings.seed, measured)
        reasons: dict[str, int] = defaultdict(int)
        for r in chosen:
            if r["_score"].reason:
                reasons[r["_score"].reason.partition(":")[0]] += 1
        results.setdefault("failures", {})[mode] = dict(reasons)
        for key, source in enumerate(sources, first_key):
            summary = source.task.summarize([r["_score"] for r in chosen if r["_order"][0] == key])
            results.setdefault("summary", {}).setdefault(mode, {})[source.config.path] = dict(summary)
        for name in sorted({r["source"] for r in chosen}):
            part = _estimates([r for r in chosen if r["source"] == name], settings.seed, measured)
            prefix = "" if mode == "greedy" or "greedy" not in results else "sampled/"
            results["per_source"].setdefault(name, {}).update({f"{prefix}{k}": v for k, v in part.items()})
    return results


def protocol_of(config: RunConfig) -> dict[str, Any]:
    """The settings of a run that change what is measured: model, prompt frame, pixel budget, precision."""
    m, d = config.model, config.data
    return {"model": m.path, "system": m.system, "dtype": m.dtype, "attn": m.attn, "max_prompt_tokens": m.max_prompt_tokens,
            "min_pixels": d.min_pixels, "max_pixels": d.max_pixels}


def write_evaluation(evaluation: Evaluation, folder: Path) -> None:
    """Write predictions.jsonl, then results.json: its existence means that the evaluation is complete."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "predictions.jsonl").open("w", encoding="utf-8") as file:
        for row in evaluation.predictions:
            file.write(json.dumps(row, ensure_ascii=False, default=str) + "\n")
    write_json(folder / "results.json", evaluation.results)
