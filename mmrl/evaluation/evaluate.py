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
import zlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from mmrl.algorithms.group_rewards import score_origin
from mmrl.config import RunConfig
from mmrl.data.sources import LoadedSource, stop_at_broken_media, write_rejected
from mmrl.distributed.world import World
from mmrl.errors import ConfigError, DataError, MediaError
from mmrl.evaluation.official import run_benchmarks
from mmrl.evaluation.progress import (
    Asked,
    Part,
    asked_of,
    entries_of,
    judged_of,
    samples_mark,
    weights_mark,
)
from mmrl.evaluation.result import Evaluation, evaluation_of, gathered, judged, write_evaluation
from mmrl.evaluation.settings import EvalSettings, eval_settings
from mmrl.evaluation.tables import Group, Judged
from mmrl.evaluation.views import MODE, view_gaps
from mmrl.operations.versions import versions
from mmrl.policy.encode import Prompt
from mmrl.policy.manifest import file_digest
from mmrl.policy.policy import Policy
from mmrl.rollout import PrefillOnceEngine, Request, RolloutEngine
from mmrl.rollout.episodes import Beginning, Episode, begin_groups, play, turns_of
from mmrl.rollout.views import changed_prompt
from mmrl.task import Task
from mmrl.types import RewardContext, Sample, Score, StopReason
from mmrl.workers.scorer import Scorer
from mmrl.workers.scoring import ScoreJob, is_reward_failure

__all__ = ["asked_of_model", "evaluate", "evaluate_model"]

_CHUNK = 64  # samples encoded at a time: a benchmark's pixels do not fit in memory together
# in environments that are open together: each may be a process with a display of its own
_EPISODES = 64
_FIRST_CHUNK = 16  # and at first: the model answers these while workers decode the next ones


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
    pictures: Path | None = None,
    part: Part | None = None,
) -> Evaluation:
    """Score the policy on all samples of `sources` (the first `limit` of each). The same on every process.

    `first_key` is the number of the first source among the scorer's tasks. What the first `gallery` samples of each source were
    shown in an environment is kept in the folder `pictures`, where one is given. `part` (of one process) keeps each chunk that is
    judged; those that it has are not asked again.
    """
    rows: list[Judged] = []
    chunks = list(_chunks(sources, settings, world))
    judged_before = [None if part is None else part.judged(chunk.unit) for chunk in chunks]
    if policy.encoder.ahead is not None:
        policy.encoder.ahead.expect(
            sample
            for chunk, entries in zip(chunks, judged_before, strict=True)
            if entries is None
            for _, sample in chunk.samples
        )
    for chunk, entries in zip(chunks, judged_before, strict=True):
        key, source = first_key + chunk.number, sources[chunk.number]
        if entries is not None:
            rows += judged_of(entries, key, dict(chunk.samples))
            continue
        with ExitStack() as begun:  # whatever ends the evaluation, no environment stays open
            found = _evaluate_chunk(
                policy, engine, scorer, key, source, chunk.samples, settings, begun, pictures
            )
        # what failed for want of a judge or a reward that works is asked again
        if part is not None and not any(is_reward_failure(j.score) for j in found):
            part.keep(chunk.unit, entries_of(found), len(chunk.samples))
        rows += found
    rows = gathered(rows, world)
    plain, changed = (
        [j for j in rows if j.row["mode"].startswith(MODE) is wanted] for wanted in (False, True)
    )
    known = dict(enumerate(sources, first_key))
    answers, in_views = [j.row for j in plain], [j.row for j in changed]
    return evaluation_of(
        plain,
        _measured(plain, known),
        step=step,
        task=", ".join(sorted({s.task.name for s in sources})),
        protocol=_protocol(sources, settings, policy),
        seed=settings.seed,
        summary=partial(_summaries, known),
        more={"views": view_gaps(answers, in_views, settings.views, settings.seed)}
        if settings.views
        else None,
        view_answers=in_views,
    )


class _Chunk(NamedTuple):
    """Samples of a source, by their place there, that are encoded and asked together."""

    number: int  # of the source
    samples: Sequence[tuple[int, Sample]]

    @property
    def unit(self) -> tuple[int, int, int]:
        """See Part.keep."""
        return self.number, self.samples[0][0], self.samples[-1][0]


def _chunks(
    sources: Sequence[LoadedSource], settings: EvalSettings, world: World | None
) -> Iterator[_Chunk]:
    """Those of this process."""
    rank, size = (world.rank, world.size) if world else (0, 1)
    for number, source in enumerate(sources):
        part = list(enumerate(source.samples[: settings.limit]))[rank::size]
        bounds = [0, *range(min(_FIRST_CHUNK, _CHUNK), len(part), _CHUNK), len(part)]
        for start, end in pairwise(bounds):
            if start < end:
                yield _Chunk(number, part[start:end])


def _measured(
    rows: Sequence[Judged], sources: Mapping[int, LoadedSource]
) -> dict[Group, frozenset[str]]:
    """Metrics per (data source, task): what the task says it measures, what any score has, and its headline.

    A set of which every answer failed, or no picture could be read, still has its columns, full of zeros.
    """
    names: dict[Group, set[str]] = defaultdict(set)
    for j in rows:
        if j.group not in names:
            task = sources[j.source].task.member(j.sample.task)
            names[j.group].update(task.metric_names, {task.headline} - {"reward"})
        names[j.group].update(j.score.metrics)
    return {group: frozenset(found) for group, found in names.items()}


def _summaries(sources: Mapping[int, LoadedSource], rows: Sequence[Judged]) -> dict[str, Any]:
    """Task.summarize per data source; where a source holds several tasks, each under 'task/'."""
    out: dict[str, Any] = {}
    for key, source in sources.items():
        scores: dict[str, list[Score]] = defaultdict(list)
        for j in rows:
            if j.source == key:
                scores[j.sample.task].append(j.score)
        for name in sorted(scores):
            summary = source.task.member(name).summarize(scores[name])
            prefix = f"{name}/" if len(scores) > 1 else ""
            out.setdefault(source.config.path, {}).update(
                {f"{prefix}{k}": v for k, v in summary.items()}
            )
    return out


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
    pictures: Path | None,
) -> list[Judged]:
    rows: list[Judged] = []
    plain: list[_Asked] = []
    changed: list[_Asked] = []
    most = max(1, _EPISODES // max(1, sum(count for _, count in _modes(settings))))
    acting = _acting(policy, source.task, samples, settings)
    for first in range(0, len(acting), most):
        part = acting[first : first + most]
        played: list[tuple[int, str, list[Episode]]] = []
        for (order, sample), opened in zip(
            part, _begun(policy, part, source.task, settings, begun, pictures), strict=True
        ):
            if isinstance(opened, Exception):
                stop_at_broken_media(opened, sample, settings.on_error)
                rows += _unseen(policy, key, source, order, sample, settings, opened)
            else:
                played += [(order, mode, episodes) for mode, episodes in opened]
        rows += _played(policy, engine, key, source, played, settings, pictures)
    turned = {order for order, _ in acting}
    for order, sample in samples:
        if order in turned:
            continue
        try:
            prompt = policy.encoder(sample, source.task)
        except (MediaError, DataError) as error:
            stop_at_broken_media(error, sample, settings.on_error)
            rows += _unseen(policy, key, source, order, sample, settings, error)
            continue
        plain += _plain(order, sample, prompt, settings)
        changed += _changed(policy, source.task, order, sample, prompt, settings)
    # one after the other: the plain answers are those of an evaluation without views
    for asked in (plain, changed):
        rows += _answers(policy, engine, scorer, key, source, asked, settings)
    return rows


def _unseen(
    policy: Policy,
    key: int,
    source: LoadedSource,
    order: int,
    sample: Sample,
    settings: EvalSettings,
    error: MediaError | DataError,
) -> list[Judged]:
    """Rows of a sample that cannot be shown: zeros in each mode."""
    failure = Score.failure(f"input_error: {error}", source.task.part_names)
    unseen = RewardContext(
        1,
        1,
        policy.template.frame,
        stop=StopReason.ERROR,
        max_tokens=settings.sampling.max_new_tokens,
    )
    return [
        _row(source, ScoreJob(key, sample, "", unseen), failure, order, mode, n)
        for mode, count in _modes(settings)
        for n in range(count)
    ]


def _plain(order: int, sample: Sample, prompt: Prompt, settings: EvalSettings) -> list[_Asked]:
    """The requests of each mode."""
    greedy = Request(prompt, 1, greedy=True)
    sampled = Request(prompt, settings.samples, _noise_key(sample, settings))
    asked = [("greedy", greedy, settings.greedy), ("sampled", sampled, settings.samples)]
    return [_Asked(order, sample, mode, prompt, one) for mode, one, wanted in asked if wanted]


def _changed(
    policy: Policy, task: Task, order: int, sample: Sample, prompt: Prompt, settings: EvalSettings
) -> list[_Asked]:
    """The requests of each view that the prompt has, sampled with the same noise: what differs is the input."""
    found, noise_key = [], _noise_key(sample, settings)
    for view in settings.views:
        key = (settings.seed, 23, *noise_key[2:])
        other = changed_prompt(policy.encoder, sample, task, prompt, view, key)
        if other is not None:
            request = (
                Request(other, 1, greedy=True)
                if settings.greedy
                else Request(other, settings.samples, noise_key)
            )
            found.append(_Asked(order, sample, f"{MODE}{view}", prompt, request))
    return found


def _modes(settings: EvalSettings) -> list[tuple[str, int]]:
    """Modes with their numbers of answers."""
    return [("greedy", int(settings.greedy)), ("sampled", settings.samples)]


def _noise_key(sample: Sample, settings: EvalSettings) -> tuple[int, int, int]:
    return (
        settings.seed,
        5,
        zlib.crc32(f"{sample.source}/{sample.id}".encode("utf-8", "surrogatepass")),
    )


def _acting(
    policy: Policy, task: Task, samples: Sequence[tuple[int, Sample]], settings: EvalSettings
) -> list[tuple[int, Sample]]:
    """The samples whose rollouts take turns in an environment. Raises ConfigError for views, which are about one prompt."""
    plays: dict[str, bool] = {}
    for _, sample in samples:
        if sample.task not in plays:
            try:
                turns = turns_of(task, sample.task, policy.template)
                plays[sample.task] = turns is not None
            except (MediaError, DataError):  # each sample's own failure
                plays[sample.task] = True
    found = [(order, sample) for order, sample in samples if plays[sample.task]]
    if found and settings.views:
        raise ConfigError(
            f"expected no views with task '{task.name}', whose rollouts take several turns in an environment, found "
            f"{', '.join(settings.views)}; leave them out"
        )
    return found


def _begun(
    policy: Policy,
    samples: Sequence[tuple[int, Sample]],
    task: Task,
    settings: EvalSettings,
    begun: ExitStack,
    pictures: Path | None,
) -> list[list[tuple[str, list[Episode]]] | MediaError | DataError]:
    """For each sample the rollouts of each mode in the task's environment, closed by the end of `begun`, or the error where it
    cannot be used. Where pictures are kept, the greedy rollout of each of the gallery's samples, or without such a mode the first
    sampled one, keeps what it is shown."""
    kept = "greedy" if settings.greedy else "sampled"
    modes = [(mode, count) for mode, count in _modes(settings) if count]
    asked = [
        Beginning(
            sample,
            task,
            count,
            _noise_key(sample, settings),
            greedy=mode == "greedy",
            filmed=int(pictures is not None and order < settings.gallery and mode == kept),
        )
        for order, sample in samples
        for mode, count in modes
    ]
    groups = iter(begin_groups(policy, asked, begun=begun))
    return [_of_sample([(mode, next(groups)) for mode, _ in modes]) for _ in samples]


def _of_sample(
    found: Sequence[tuple[str, list[Episode] | MediaError | DataError]],
) -> list[tuple[str, list[Episode]]] | MediaError | DataError:
    """The groups of a sample's modes, or the first error, with the others closed."""
    error = next((group for _, group in found if isinstance(group, Exception)), None)
    groups = [(mode, group) for mode, group in found if not isinstance(group, Exception) and group]
    if error is None:
        return groups
    for episode in (e for _, group in groups for e in group):
        episode.close()
    return error


def _played(
    policy: Policy,
    engine: RolloutEngine,
    key: int,
    source: LoadedSource,
    opened: Sequence[tuple[int, str, list[Episode]]],
    settings: EvalSettings,
    pictures: Path | None,
) -> list[Judged]:
    """Rows of the rollouts in environments; their text is the last turn's."""
    rows: list[Judged] = []
    found = play(policy, engine, [episodes for _, _, episodes in opened], settings.sampling)
    for (order, mode, episodes), rollouts in zip(opened, found, strict=True):
        for number, (episode, rollout) in enumerate(zip(episodes, rollouts, strict=True)):
            last, score = rollout.turns[-1], rollout.score
            assert score is not None
            images, videos, audios = (
                ((), (), ())
                if last.prompt is None
                else (last.prompt.images, last.prompt.videos, last.prompt.audios)
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
                audios,
            )
            job = ScoreJob(key, episode.sample, last.text, ctx)
            turns = [t.text for t in rollout.turns]
            more: dict[str, Any] = {"environment": True, "turns": turns}
            if pictures is not None and episode.film is not None and episode.film.pictures:
                more["film"] = episode.film.write(pictures, f"{key}_{order}")
            rows.append(_row(source, job, score, order, mode, number, **more))
    return rows


def _answers(
    policy: Policy,
    engine: RolloutEngine,
    scorer: Scorer,
    key: int,
    source: LoadedSource,
    asked: Sequence[_Asked],
    settings: EvalSettings,
) -> list[Judged]:
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
                    a.prompt.audios,
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
    source: LoadedSource,
    job: ScoreJob,
    score: Score,
    order: int,
    mode: str,
    number: int,
    **more: Any,
) -> Judged:
    """One line of predictions.jsonl, with all that `mmrl score` needs to score it again."""
    sample, ctx = job.sample, job.ctx
    return judged(
        sample,
        score,
        place=(job.key, order),
        number=number,
        mode=mode,
        text=job.text,
        stop=ctx.stop,
        num_tokens=ctx.num_tokens,
        headline=source.task.member(sample.task).headline,
        max_tokens=ctx.max_tokens,
        frame=ctx.frame.value,
        **score_origin(source.config, ctx.images, ctx.videos, ctx.audios),
        sample=dataclasses.asdict(sample),
        **more,
    )


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
        "interval": "95 %: Wilson for 0/1 outcomes, else cluster bootstrap over samples",
        "versions": versions(),
    }


def evaluate_model(
    policy: Policy,
    config: RunConfig,
    sources: Sequence[LoadedSource],
    *,
    samples: int,
    folder: Path | None = None,
    protocol: Mapping[str, Any] | None = None,
    part: Part | None = None,
) -> Evaluation:
    """`evaluate` with an engine and reward workers of its own. With `folder`, also official scorers, and results, predictions,
    submissions and rejected rows are written there; `part`: see evaluate."""
    settings = eval_settings(config, samples=samples, protocol=protocol)
    with Scorer(
        [(s.config.task, dict(s.config.params)) for s in sources],
        [s.task for s in sources],
        workers=config.reward.workers,
        timeout_s=config.reward.timeout_s,
        concurrency=config.reward.concurrency,
        verdicts=config.reward.verdicts,
    ) as scorer:
        found = evaluate(
            policy,
            PrefillOnceEngine(policy),
            scorer,
            sources,
            settings,
            pictures=None if folder is None else folder / "pictures",
            part=part,
        )
    if folder is not None:
        run_benchmarks(found, sources, folder / "submissions")
        write_evaluation(found, folder)
        write_rejected(sources, folder / "rejected.jsonl")
    return found


def asked_of_model(
    policy: Policy, config: RunConfig, sources: Sequence[LoadedSource], samples: int
) -> Asked:
    """What `evaluate_model` is asked for by these: what a resume compares (mmrl.evaluation.progress). The files behind the paths of
    media are taken to be the same."""
    asked = [sample for source in sources for sample in source.samples]
    more = {
        "tasks": [[s.config.task, s.config.params, _code(s.config.task)] for s in sources],
        "samples": samples_mark(asked),
        "sampled": samples,
        "views": list(config.eval.views),
        "template": policy.template.name,
    }
    commit = getattr(policy.body.config, "_commit_hash", None)
    weights = weights_mark(config.model.path, commit)
    return asked_of(config.model_dump(mode="json"), weights, more, len(asked))


def _code(task: str) -> str:
    """What tells the file of a task file.py:Name from what it was."""
    file = Path(task.rpartition(":")[0])
    return file_digest(file)[1] if file.suffix == ".py" and file.is_file() else ""
