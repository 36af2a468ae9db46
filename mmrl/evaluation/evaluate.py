"""Held-out evaluation: greedy and sampled (avg@k), confidence intervals, every completion written down.

    mmrl eval runs/demo/checkpoints/best --task grounding --data eval.jsonl

One evaluation may hold several data sources, and one source several tasks: a metric is averaged over the rows of those
tasks that measure it, where a failure counts as 0, also the sample whose picture cannot be read. Group rewards
(`Task.in_group`) judge the k sampled completions of a prompt as one group, as in training, and the greedy one by itself.
`macro` is the mean over sources of each source's headline metric. Intervals: cluster bootstrap over samples at 95 % (k
completions of one sample are not independent). Settings.views asks again without the video's order, sides or pixels, or
without the video (mmrl.evaluation.views). With data.workers, media of the next samples are decoded while these are answered.
"""

from __future__ import annotations

import dataclasses
import math
import zlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from mmrl.algorithms.group_rewards import score_origin
from mmrl.config import RunConfig
from mmrl.data.sources import LoadedSource, stop_at_broken_media
from mmrl.distributed.world import World
from mmrl.errors import ConfigError, DataError, MediaError, did_you_mean
from mmrl.evaluation.official import run_benchmarks
from mmrl.evaluation.tables import ALWAYS, Group, group_of, measured_metrics, summarize, value_of
from mmrl.evaluation.views import MODE, view_gaps
from mmrl.files import json_line, write_text
from mmrl.operations.versions import versions
from mmrl.policy.encode import Prompt
from mmrl.policy.policy import Policy
from mmrl.rollout import Request, RolloutEngine, SamplingSettings
from mmrl.rollout.episodes import Episode, begin, play, turns_of
from mmrl.rollout.views import changed_prompt
from mmrl.task import Task
from mmrl.training.runlog import write_json
from mmrl.types import RewardContext, Sample, Score, StopReason
from mmrl.workers.scoring import ScoreJob, Scorer, is_reward_failure

__all__ = [
    "EvalSettings",
    "Evaluation",
    "evaluate",
    "flat_metrics",
    "protocol_of",
    "run_benchmarks",
    "write_evaluation",
]

_CHUNK = 64  # samples encoded at a time: a benchmark's pixels do not fit in memory together
# in environments that are open together: each may be a process with a display of its own
_EPISODES = 64
_FIRST_CHUNK = 16  # and at first: the model answers these while workers decode the next ones


@dataclasses.dataclass(frozen=True)
class EvalSettings:
    """How to evaluate; `samples` completions per prompt at the sampling temperature, beside one greedy answer."""

    sampling: SamplingSettings
    samples: int = 8
    seed: int = 0
    limit: int | None = None
    greedy: bool = True
    # what else can change the numbers
    protocol: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    on_error: str = "record"  # 'raise': a picture or clip that cannot be read ends the evaluation; else it scores 0
    # of mmrl.rollout.views.VIEWS, each asked of every sample that it changes
    views: Sequence[str] = ()


@dataclasses.dataclass
class Evaluation:
    """results.json (`results`), predictions.jsonl (`predictions`) and views.jsonl (`view_answers`) in memory; the lists run
    along the predictions."""

    results: dict[str, Any]
    predictions: list[dict[str, Any]]
    places: list[int]  # of each prediction's sample in its source
    groups: list[Group] = dataclasses.field(default_factory=list)
    measured: Mapping[Group, frozenset[str]] = dataclasses.field(default_factory=dict)
    pairs: list[tuple[Sample, Score]] = dataclasses.field(default_factory=list)
    view_answers: list[dict[str, Any]] = dataclasses.field(default_factory=list)

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
            if (
                row["mode"] == mode
                and place < limit
                and (metric in ALWAYS or metric in self.measured[group])
            ):
                wanted = row["headline"] if metric == "macro" else metric
                columns[row["source"] if metric == "macro" else ""].append(
                    value_of(row["score"], wanted)
                )
        means = [math.fsum(values) / len(values) for values in columns.values()]
        return math.fsum(means) / len(means) if means else None

    @property
    def unjudged(self) -> tuple[int, str]:
        """How many completions have no judgement, since the reward or the environment failed, and the first reason."""
        lost = [str(score.reason) for _, score in self.pairs if is_reward_failure(score)]
        return len(lost), lost[0] if lost else ""

    def selection(self, name: str, limit: int | None) -> float:
        """`metric`, by which checkpoints are compared (eval.best_metric). Raises ConfigError where it was not measured."""
        found = self.metric(name, limit)
        if found is None:
            measured = [
                f"{mode}/{metric}"
                for mode in ("greedy", "sampled")
                for metric in self.results.get(mode, {})
            ]
            raise ConfigError(
                f"expected eval.best_metric to be one of {', '.join(measured)}, found '{name}'."
                f"{did_you_mean(name, measured)}"
            )
        return found


def evaluate(
    policy: Policy,
    engine: RolloutEngine,
    scorer: Scorer,
    sources: Sequence[LoadedSource],
    settings: EvalSettings,
    *,
    step: int = 0,
    world: World | None = None,
    first_key: int = 0,
) -> Evaluation:
    """Score the policy on all samples of `sources` (the first `limit` of each). The same on every process.

    `first_key` is the number of the first source among the scorer's tasks.
    """
    rank, size = (world.rank, world.size) if world else (0, 1)
    rows: list[dict[str, Any]] = []
    mine = [list(enumerate(source.samples[: settings.limit]))[rank::size] for source in sources]
    if policy.encoder.ahead is not None:
        policy.encoder.ahead.expect(sample for part in mine for _, sample in part)
    for key, (source, part) in enumerate(zip(sources, mine, strict=True), first_key):
        for start, end in pairwise(
            [0, *range(min(_FIRST_CHUNK, _CHUNK), len(part), _CHUNK), len(part)]
        ):
            with ExitStack() as begun:  # whatever ends the evaluation, no environment stays open
                rows += _evaluate_chunk(
                    policy, engine, scorer, key, source, part[start:end], settings, begun
                )
    if world is not None:
        rows = world.gather(rows)
    rows.sort(key=lambda r: (r["_order"], r["mode"], r["_number"]))
    plain, changed = (
        [r for r in rows if r["mode"].startswith(MODE) is wanted] for wanted in (False, True)
    )
    measured = measured_metrics(plain, sources, first_key)
    results = {
        "step": step,
        "task": ", ".join(sorted({s.task.name for s in sources})),
        "protocol": _protocol(sources, settings, policy),
        **summarize(plain, sources, settings.seed, first_key, measured),
    }
    if settings.views:
        results["views"] = view_gaps(plain, changed, settings.views, settings.seed)
    return Evaluation(
        results,
        [_public(r) for r in plain],
        [r["_order"][1] for r in plain],
        [group_of(r) for r in plain],
        measured,
        [(r["_sample"], r["_score"]) for r in plain],
        [_public(r) for r in changed],
    )


class _Asked(NamedTuple):
    """One request: which sample, in which mode, and the prompt whose sizes and times the answer is judged by."""

    order: int
    sample: Sample
    mode: str
    prompt: Prompt
    request: Request


def _evaluate_chunk(
    policy: Policy,
    engine: RolloutEngine,
    scorer: Scorer,
    key: int,
    source: LoadedSource,
    samples: Sequence[tuple[int, Sample]],
    settings: EvalSettings,
    begun: ExitStack,
) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    plain: list[_Asked] = []
    changed: list[_Asked] = []
    played: list[tuple[int, str, list[Episode]]] = []
    wanted = sum(count for _, count in _modes(settings))
    for order, sample in samples:
        if played and sum(len(episodes) for _, _, episodes in played) + wanted > _EPISODES:
            rows += _played(policy, engine, key, source, played, settings)
            played.clear()
        try:
            if opened := _begun(policy, sample, source.task, settings, begun):
                played += [(order, mode, episodes) for mode, episodes in opened]
                continue
            prompt = policy.encoder(sample, source.task)
        except (MediaError, DataError) as error:
            stop_at_broken_media(error, sample, settings.on_error)
            failure = Score.failure(f"input_error: {error}", source.task.part_names)
            unseen = RewardContext(
                1,
                1,
                policy.template.frame,
                stop=StopReason.ERROR,
                max_tokens=settings.sampling.max_new_tokens,
            )
            rows += [
                _row(source, ScoreJob(key, sample, "", unseen), failure, order, mode, n)
                for mode, count in _modes(settings)
                for n in range(count)
            ]
            continue
        noise_key = _noise_key(sample, settings)
        if settings.greedy:
            plain.append(_Asked(order, sample, "greedy", prompt, Request(prompt, 1, greedy=True)))
        if settings.samples:
            plain.append(
                _Asked(
                    order, sample, "sampled", prompt, Request(prompt, settings.samples, noise_key)
                )
            )
        for view in settings.views:
            other = changed_prompt(
                policy.encoder,
                sample,
                source.task,
                prompt,
                view,
                (settings.seed, 23, *noise_key[2:]),
            )
            if other is not None:  # sampled with the same noise: what differs is the input
                request = (
                    Request(other, 1, greedy=True)
                    if settings.greedy
                    else Request(other, settings.samples, noise_key)
                )
                changed.append(_Asked(order, sample, f"{MODE}{view}", prompt, request))
    # one after the other: the plain answers are those of an evaluation without views
    for asked in (plain, changed):
        rows += _answers(policy, engine, scorer, key, source, asked, settings)
    return rows + _played(policy, engine, key, source, played, settings)


def _modes(settings: EvalSettings) -> list[tuple[str, int]]:
    """Modes with their numbers of answers."""
    return [("greedy", int(settings.greedy)), ("sampled", settings.samples)]


def _noise_key(sample: Sample, settings: EvalSettings) -> tuple[int, int, int]:
    return (
        settings.seed,
        5,
        zlib.crc32(f"{sample.source}/{sample.id}".encode("utf-8", "surrogatepass")),
    )


def _begun(
    policy: Policy, sample: Sample, task: Task, settings: EvalSettings, begun: ExitStack
) -> list[tuple[str, list[Episode]]]:
    """The rollouts of each mode in the task's environment, closed by the end of `begun`; [] where it has none. Raises MediaError,
    DataError, and ConfigError for views, which are about one prompt."""
    if settings.views and turns_of(task, sample.task, policy.template) is not None:
        raise ConfigError(
            f"expected no views with task '{task.name}', whose rollouts take several turns in an environment, found "
            f"{', '.join(settings.views)}; leave them out"
        )
    key = _noise_key(sample, settings)
    found = [
        (mode, begin(policy, sample, task, count, key, greedy=mode == "greedy", begun=begun))
        for mode, count in _modes(settings)
    ]
    return [(mode, episodes) for mode, episodes in found if episodes]


def _played(
    policy: Policy,
    engine: RolloutEngine,
    key: int,
    source: LoadedSource,
    opened: Sequence[tuple[int, str, list[Episode]]],
    settings: EvalSettings,
) -> list[dict[str, Any]]:
    """Rows of the rollouts in environments; their text is the last turn's."""
    rows: list[dict[str, Any]] = []
    found = play(policy, engine, [episodes for _, _, episodes in opened], settings.sampling)
    for (order, mode, episodes), rollouts in zip(opened, found, strict=True):
        for number, (episode, rollout) in enumerate(zip(episodes, rollouts, strict=True)):
            last, score = rollout.turns[-1], rollout.score
            assert score is not None
            images, videos = (
                ((), ()) if last.prompt is None else (last.prompt.images, last.prompt.videos)
            )
            ctx = RewardContext(
                1,
                1,
                policy.template.frame,
                images,
                last.stop,
                rollout.num_tokens,
                settings.sampling.max_new_tokens,
                videos,
            )
            row = _row(
                source, ScoreJob(key, episode.sample, last.text, ctx), score, order, mode, number
            )
            rows.append({**row, "environment": True, "turns": [t.text for t in rollout.turns]})
    return rows


def _answers(
    policy: Policy,
    engine: RolloutEngine,
    scorer: Scorer,
    key: int,
    source: LoadedSource,
    asked: Sequence[_Asked],
    settings: EvalSettings,
) -> list[dict[str, Any]]:
    """Rows of the scored completions of all requests."""
    completions = engine.generate([a.request for a in asked], settings.sampling) if asked else []
    jobs = [
        [
            ScoreJob(
                key,
                a.sample,
                completion.text,
                RewardContext(
                    1,
                    1,
                    policy.template.frame,
                    a.prompt.images,
                    completion.stop,
                    len(completion.token_ids),
                    settings.sampling.max_new_tokens,
                    a.prompt.videos,
                ),
            )
            for completion in group
        ]
        for a, group in zip(asked, completions, strict=True)
    ]
    return [
        _row(source, job, score, a.order, a.mode, number)
        for a, group, scores in zip(asked, jobs, _scores(scorer, jobs), strict=True)
        for number, (job, score) in enumerate(zip(group, scores, strict=True))
    ]


def _scores(scorer: Scorer, groups: Sequence[Sequence[ScoreJob]]) -> list[list[Score]]:
    """Scores of the completions of each request: several samples as a group, a single one (greedy) by itself."""
    alone = iter(scorer.score([group[0] for group in groups if len(group) == 1]))
    together = iter(scorer.score_groups([group for group in groups if len(group) != 1]))
    return [[next(alone)] if len(group) == 1 else next(together) for group in groups]


def _row(
    source: LoadedSource, job: ScoreJob, score: Score, order: int, mode: str, number: int
) -> dict[str, Any]:
    """One line of predictions.jsonl, with all that `mmrl score` needs to score it again."""
    sample, ctx = job.sample, job.ctx
    return {
        "id": sample.id,
        "source": sample.source,
        "task": sample.task,
        "question": sample.question,
        "images": list(sample.images),
        "videos": list(sample.videos),
        "mode": mode,
        "text": job.text,
        "stop": ctx.stop.value,
        "num_tokens": ctx.num_tokens,
        "max_tokens": ctx.max_tokens,
        "frame": ctx.frame.value,
        **score_origin(source.config, ctx.images, ctx.videos),
        "sample": dataclasses.asdict(sample),
        "score": dataclasses.asdict(score),
        "headline": source.task.member(sample.task).headline,
        "_order": (job.key, order),
        "_number": number,
        "_score": score,
        "_sample": sample,
    }


def _public(row: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in row.items() if not k.startswith("_")}


def _protocol(
    sources: Sequence[LoadedSource], settings: EvalSettings, policy: Policy
) -> dict[str, Any]:
    return {
        **settings.protocol,
        "data": [
            {
                "path": s.config.path,
                "task": s.config.task,
                "params": s.config.params,
                "samples": len(s.samples[: settings.limit]),
                "rejected": len(s.rejected),
                "skipped": dict(s.skipped),
                "notes": dict(s.notes),
            }
            for s in sources
        ],
        "template": policy.template.name,
        "frame": policy.template.frame.value,
        "samples_per_prompt": settings.samples,
        "seed": settings.seed,
        "views": list(settings.views),
        **dataclasses.asdict(settings.sampling),
        "interval": "95 % cluster bootstrap over samples",
        "versions": versions(),
    }


def protocol_of(config: RunConfig) -> dict[str, Any]:
    """The settings of a run that change what is measured: model, prompt frame, pixel budget, precision."""
    m, d = config.model, config.data
    return {
        "model": m.path,
        "system": m.system,
        "dtype": m.dtype,
        "attn": m.attn,
        "max_prompt_tokens": m.max_prompt_tokens,
        "min_pixels": d.min_pixels,
        "max_pixels": d.max_pixels,
        "image": d.image.model_dump(),
        "video": d.video.model_dump(),
    }


def flat_metrics(evaluation: Evaluation) -> dict[str, float]:
    """What goes into a step's row: eval/greedy/NAME, eval/sampled/NAME, and eval/view/VIEW/changed, plain and gap."""
    results = evaluation.results
    flat = {
        f"eval/{mode}/{name}": estimate["mean"]
        for mode in ("greedy", "sampled")
        for name, estimate in results.get(mode, {}).items()
    }
    return flat | {
        f"eval/view/{view}/{name}": table[name]["mean"]
        for view, table in results.get("views", {}).items()
        for name in ("changed", "plain", "gap")
        if name in table
    }


def write_evaluation(evaluation: Evaluation, folder: Path) -> None:
    """Write predictions.jsonl (and views.jsonl), then results.json: its existence means that the evaluation is complete."""
    write_text(
        folder / "predictions.jsonl",
        "".join(json_line(row) + "\n" for row in evaluation.predictions),
    )
    if evaluation.view_answers:
        write_text(
            folder / "views.jsonl",
            "".join(json_line(row) + "\n" for row in evaluation.view_answers),
        )
    write_json(folder / "results.json", evaluation.results)
