"""Held-out evaluation: greedy and sampled (avg@k), confidence intervals, every completion written down.

    mmrl eval runs/demo/checkpoints/best --task grounding --data eval.jsonl

One evaluation may hold several data sources, and one source several tasks: a metric is averaged over the rows of those
tasks that measure it, where a failure counts as 0, also the sample whose picture cannot be read. Group rewards
(`Task.in_group`) judge the k sampled completions of a prompt as one group, as in training, and the greedy one by itself.
`macro` is the mean over sources of each source's headline metric. Intervals: cluster bootstrap over samples at 95 % (k
completions of one sample are not independent).
"""
from __future__ import annotations

import dataclasses
import itertools
import json
import math
import re
import zlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mmrl.config import RunConfig
from mmrl.data import LoadedSource
from mmrl.errors import DataError, MediaError
from mmrl.policy.encode import Prompt
from mmrl.policy.policy import Policy
from mmrl.rollout import Request, RolloutEngine, SamplingSettings
from mmrl.runlog import write_json
from mmrl.schedule import score_origin
from mmrl.scoring import ScoreJob, Scorer
from mmrl.stats import Estimate, describe, macro_estimate
from mmrl.task import Task
from mmrl.types import RewardContext, Sample, Score, StopReason
from mmrl.versions import versions
from mmrl.world import World

__all__ = ["EvalSettings", "Evaluation", "evaluate", "protocol_of", "run_benchmarks",
           "write_evaluation"]

_CHUNK = 64  # samples encoded at a time: a benchmark's pixels do not fit in memory together
Group = tuple[int, str]
"""(number of the data source, task of the sample): the rows that share their metrics."""


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
    """results.json (`results`) and predictions.jsonl (`predictions`) in memory; all lists run along the predictions."""

    results: dict[str, Any]
    predictions: list[dict[str, Any]]
    places: list[int]  # of each prediction's sample in its source
    groups: list[Group] = dataclasses.field(default_factory=list)
    measured: Mapping[Group, frozenset[str]] = dataclasses.field(default_factory=dict)
    pairs: list[tuple[Sample, Score]] = dataclasses.field(default_factory=list)

    def metric(self, name: str, limit: int | None = None) -> float | None:
        """'sampled/iou' -> its mean over the first `limit` samples of each source; None when it was not measured.

        Comparing checkpoints needs the same samples each time, whether or not this evaluation had more of them.
        'greedy/macro' is the mean over sources of each one's headline metric.
        """
        mode, _, metric = name.partition("/")
        if metric not in self.results.get(mode, {}):
            return None
        if limit is None or all(place < limit for place in self.places):
            return self.results[mode][metric]["mean"]
        columns: dict[str, list[float]] = defaultdict(list)
        for row, place, group in zip(self.predictions, self.places, self.groups, strict=True):
            if row["mode"] == mode and place < limit and (metric in _ALWAYS or metric in self.measured[group]):
                wanted = row["headline"] if metric == "macro" else metric
                columns[row["source"] if metric == "macro" else ""].append(_value(row["score"], wanted))
        means = [math.fsum(values) / len(values) for values in columns.values()]
        return math.fsum(means) / len(means) if means else None


_ALWAYS = ("reward", "parse_rate", "macro")


def _value(score: Mapping[str, Any], name: str) -> float:
    """'reward', 'parse_rate' or a metric of a score as a dictionary; what a failure lacks is 0."""
    if name == "reward":
        return float(score["value"])
    return float(score["parsed"]) if name == "parse_rate" else float(score["metrics"].get(name, 0.0))


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
    measured = _measured(rows, sources, first_key)
    return Evaluation(_summarize(rows, sources, settings, policy, step, first_key, measured), [_public(r) for r in rows],
                      [r["_order"][1] for r in rows], [_group(r) for r in rows], measured,
                      [(r["_sample"], r["_score"]) for r in rows])


def _evaluate_chunk(policy: Policy, engine: RolloutEngine, scorer: Scorer, key: int, source: LoadedSource,
                    samples: Sequence[tuple[int, Sample]], settings: EvalSettings) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    plan: list[tuple[int, Sample, str, Prompt]] = []
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
            plan.append((order, sample, "greedy", prompt))
        if settings.samples:
            noise_key = (settings.seed, 5, zlib.crc32(f"{sample.source}/{sample.id}".encode()))
            requests.append(Request(prompt, settings.samples, noise_key))
            plan.append((order, sample, "sampled", prompt))
    completions = engine.generate(requests, settings.sampling) if requests else []
    jobs = [[ScoreJob(key, sample, completion.text, RewardContext(
                1, 1, policy.template.frame, prompt.images, completion.stop, len(completion.token_ids),
                settings.sampling.max_new_tokens, prompt.videos)) for completion in group]
            for (_, sample, _, prompt), group in zip(plan, completions, strict=True)]
    for (order, _, mode, _), group, scores in zip(plan, jobs, _scores(scorer, jobs), strict=True):
        rows += [_row(source, job, score, order, mode, number)
                 for number, (job, score) in enumerate(zip(group, scores, strict=True))]
    return rows


def _scores(scorer: Scorer, groups: Sequence[Sequence[ScoreJob]]) -> list[list[Score]]:
    """Scores of the completions of each request: several samples as a group, a single one (greedy) by itself."""
    alone = iter(scorer.score([group[0] for group in groups if len(group) == 1]))
    together = iter(scorer.score_groups([group for group in groups if len(group) != 1]))
    return [[next(alone)] if len(group) == 1 else next(together) for group in groups]


def _row(source: LoadedSource, job: ScoreJob, score: Score, order: int, mode: str, number: int) -> dict[str, Any]:
    """One line of predictions.jsonl, with all that `mmrl score` needs to score it again."""
    sample, ctx = job.sample, job.ctx
    return {
        "id": sample.id, "source": sample.source, "task": sample.task, "question": sample.question,
        "images": list(sample.images), "videos": list(sample.videos), "mode": mode, "text": job.text, "stop": ctx.stop.value,
        "num_tokens": ctx.num_tokens, "max_tokens": ctx.max_tokens, "frame": ctx.frame.value,
        **score_origin(source.config, ctx.images, ctx.videos), "sample": dataclasses.asdict(sample),
        "score": dataclasses.asdict(score), "headline": source.task.member(sample.task).headline,
        "_order": (job.key, order), "_number": number, "_score": score, "_sample": sample}


def _public(row: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in row.items() if not k.startswith("_")}


def _group(row: Mapping[str, Any]) -> Group:
    return row["_order"][0], row["task"]


def _measured(rows: Sequence[Mapping[str, Any]], sources: Sequence[LoadedSource],
              first_key: int) -> dict[Group, frozenset[str]]:
    """Metrics per (data source, task): what the task says it measures, what any score has, and its headline.

    A set of which every answer failed, or no picture could be read, still has its columns, full of zeros.
    """
    names: dict[Group, set[str]] = defaultdict(set)
    for row in rows:
        group = _group(row)
        if group not in names:
            task = sources[group[0] - first_key].task.member(group[1])
            names[group].update(task.metric_names, {task.headline} - {"reward"})
        names[group].update(row["_score"].metrics)
    return {group: frozenset(found) for group, found in names.items()}


class _Tables:
    """Estimates of sets of rows; a set asked for twice (one source is one task) is resampled once."""

    def __init__(self, seed: int, measured: Mapping[Group, frozenset[str]]) -> None:
        self.seed, self.measured = seed, measured
        self._known: dict[tuple[int, ...], dict[str, Estimate]] = {}

    def of(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Estimate]:
        """Mean with interval, clustered by sample, of the reward, of every metric and of each row's own headline."""
        key = tuple(map(id, rows))
        if key not in self._known:
            columns: dict[str, list[tuple[str, float]]] = defaultdict(list)
            for row in rows:
                unit, score = f"{row['source']}/{row['id']}", row["score"]
                for name in ("reward", "parse_rate", *sorted(self.measured[_group(row)])):
                    columns[name].append((unit, _value(score, name)))
                columns["headline"].append((unit, _value(score, row["headline"])))
            self._known[key] = {
                name: describe([v for _, v in column], clusters=[u for u, _ in column], level=0.95, seed=self.seed)
                for name, column in columns.items()}
        return self._known[key]


def _parts(rows: Sequence[Mapping[str, Any]], key: str) -> dict[str, list[Mapping[str, Any]]]:
    parts: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for row in rows:
        parts[row[key]].append(row)
    return dict(sorted(parts.items()))


def _headlines(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, str]]:
    """What the column 'headline' of each table row is: one metric, or several where tasks differ."""
    return {table: {name: ", ".join(sorted({r["headline"] for r in part})) for name, part in _parts(rows, key).items()}
            for table, key in (("per_source", "source"), ("per_task", "task"))}


def _summaries(rows: Sequence[Mapping[str, Any]], sources: Sequence[LoadedSource], first_key: int) -> dict[str, Any]:
    """Task.summarize per data source; where a source holds several tasks, each under 'task/'."""
    out: dict[str, Any] = {}
    for key, source in enumerate(sources, first_key):
        parts = _parts([r for r in rows if r["_order"][0] == key], "task")
        for name, part in parts.items():
            summary = source.task.member(name).summarize([r["_score"] for r in part])
            prefix = f"{name}/" if len(parts) > 1 else ""
            out.setdefault(source.config.path, {}).update({f"{prefix}{k}": v for k, v in summary.items()})
    return out


def _protocol(sources: Sequence[LoadedSource], settings: EvalSettings, policy: Policy) -> dict[str, Any]:
    return {
        **settings.protocol,
        "data": [{"path": s.config.path, "task": s.config.task, "params": s.config.params,
                  "samples": len(s.samples[: settings.limit]), "rejected": len(s.rejected),
                  "skipped": dict(s.skipped)} for s in sources],
        "template": policy.template.name, "frame": policy.template.frame.value, "samples_per_prompt": settings.samples,
        "seed": settings.seed, **dataclasses.asdict(settings.sampling),
        "interval": "95 % cluster bootstrap over samples", "versions": versions()}


def _summarize(rows: Sequence[Mapping[str, Any]], sources: Sequence[LoadedSource], settings: EvalSettings, policy: Policy,
               step: int, first_key: int, measured: Mapping[Group, frozenset[str]]) -> dict[str, Any]:
    results: dict[str, Any] = {
        "step": step, "task": ", ".join(sorted({s.task.name for s in sources})),
        "protocol": _protocol(sources, settings, policy), "headlines": _headlines(rows), "per_source": {}, "per_task": {}}
    tables = _Tables(settings.seed, measured)
    for mode in ("greedy", "sampled"):
        chosen = [r for r in rows if r["mode"] == mode]
        if not chosen:
            continue
        by_source = _parts(chosen, "source")
        whole = {name: e for name, e in tables.of(chosen).items() if name != "headline"}
        whole["macro"] = macro_estimate([tables.of(part)["headline"] for part in by_source.values()])
        results[mode] = {name: dataclasses.asdict(e) for name, e in whole.items()}
        reasons: dict[str, int] = defaultdict(int)
        for r in chosen:
            if r["_score"].reason:
                reasons[r["_score"].reason.partition(":")[0]] += 1
        results.setdefault("failures", {})[mode] = dict(reasons)
        results.setdefault("summary", {})[mode] = _summaries(chosen, sources, first_key)
        prefix = "" if mode == "greedy" or "greedy" not in results else "sampled/"
        for table, parts in (("per_source", by_source), ("per_task", _parts(chosen, "task"))):
            for name, part in parts.items():
                results[table].setdefault(name, {}).update(
                    {f"{prefix}{k}": dataclasses.asdict(e) for k, e in tables.of(part).items()})
    return results


def run_benchmarks(evaluation: Evaluation, sources: Sequence[LoadedSource], folder: Path, *,
                   first_key: int = 0) -> dict[str, dict[str, Any]]:
    """Official numbers of the greedy answers by `Task.benchmark`; also put into results['benchmark'].

    One call per data source and task, with all of its samples: a benchmark's parts (platforms, subsets) belong together.
    The entry, and the folder of its submission files in `folder`, is named by what the samples' sources share
    ('ScreenSpot-v2' of 'ScreenSpot-v2/web' and 'ScreenSpot-v2/mobile'), else by the data file. An official scorer that
    fails gives {'error': why}: what it wrote stays, and the caller must tell the user.
    """
    groups: dict[Group, list[tuple[Sample, Score]]] = defaultdict(list)
    for row, group, pair in zip(evaluation.predictions, evaluation.groups, evaluation.pairs, strict=True):
        if row["mode"] == "greedy":
            groups[group].append(pair)
    names = {(key, task): _shared_name([s.source for s, _ in pairs], sources[key - first_key].config.path)
             for (key, task), pairs in groups.items()}
    found: dict[str, dict[str, Any]] = {}
    taken: set[str] = set()
    for (key, task), pairs in groups.items():
        title = names[key, task]
        title = f"{title} {task}" if list(names.values()).count(title) > 1 else title
        place = re.sub(r"[^\w.+-]+", "_", title).strip(".") or "source"
        while title in found or place in taken:
            title, place = f"{title}'", f"{place}_"
        taken.add(place)
        (folder / place).mkdir(parents=True, exist_ok=True)
        numbers = _official(sources[key - first_key].task.member(task), pairs, folder / place)
        if numbers:
            found[title] = numbers
        if not any((folder / place).iterdir()):
            (folder / place).rmdir()
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()
    evaluation.results["benchmark"] = found
    return found


def _shared_name(names: Sequence[str], path: str) -> str:
    """The one source, else the whole folders that all sources begin with, else the data file's name without ending."""
    distinct = sorted(set(names))
    if len(distinct) == 1:
        return distinct[0]
    first, last = distinct[0].split("/"), distinct[-1].split("/")  # sorted: what these two share, all share
    shared = [a for a, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(first, last, strict=False))]
    return "/".join(shared) or Path(path).stem


def _official(task: Task, pairs: Sequence[tuple[Sample, Score]], folder: Path) -> dict[str, Any]:
    try:
        numbers = {str(k): float(v) for k, v in task.benchmark(pairs, folder).items()}
    except Exception as error:  # the official scorer's own: shown to the user, who must not lose the evaluation for it
        return {"error": f"{type(error).__name__}: {error}"[:2000]}
    broken = {k: v for k, v in numbers.items() if not math.isfinite(v)}
    sound = {k: v for k, v in numbers.items() if k not in broken}
    return {**sound, "error": f"expected finite numbers, found {broken}"} if broken else sound


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
