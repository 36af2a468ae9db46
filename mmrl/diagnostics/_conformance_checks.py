"""The checks behind `mmrl tasks check`: each yields one line per problem it finds, and nothing when all is well.

A check may assume nothing about the task: what a task raises is caught by the runner and reported as a problem.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import pickle
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from mmrl.coords import CoordFrame
from mmrl.diagnostics._conformance_rounding import HALF, only_rounded, too_thin
from mmrl.errors import RewardError
from mmrl.policy.encode import Encoder
from mmrl.registry import task_from_spec
from mmrl.task import Task, Template
from mmrl.types import ImageSize, RewardContext, Sample, Score, VideoSize
from mmrl.workers.scorer import Scorer
from mmrl.workers.scoring import ScoreJob, is_reward_failure, score_one

__all__ = ["CHECKS", "Bench", "Check", "GARBAGE"]

_GOLD = 0.999  # lowest score of a gold answer whose coordinates needed no rounding
_TOUCHES = 1e-9  # a wrong box that only touches the right one overlaps it by the rounding of its coordinates
_GARBAGE_SAMPLES = 4
_MOST_HANGS = 3  # each costs the full timeout

GARBAGE: dict[str, str] = {
    "empty text": "",
    "'hello'": "hello",
    "emoji": "\U0001f642\U0001f680\U0001f642",
    "100 kB": "x1[<" * 25_000,
    "100 kB in an answer": f"<answer>{'[1, ' * 25_000}</answer>",
    "unclosed <answer>": "<answer>",
    "unclosed <answer> with text": "<answer>[1, 2, 3, 4]",
    "unclosed <think>": "<think>it goes on and on",
    "nested answers": "<answer><answer></answer>",
    "NaN boxes": "<answer>[NaN, NaN, NaN, NaN]</answer>",
    "bare NaN boxes": "[nan, nan, nan, nan]",
    "infinite boxes": "<answer>[-Infinity, 0, 1e999, 5]</answer>",
    "deep nesting": f"<answer>{'[' * 5000}</answer>",
    "control characters": "\x00\x1b[0m\u202e\u2028",
}


Sizes = tuple[ImageSize | VideoSize, ...]
"""Of the pictures and clips of one sample."""


@dataclass
class Bench:
    """What the checks look at; `sizes` (per sample, None when its picture cannot be read) come from the encoder.

    The scoring checks leave what they computed in `scored`, `differing` (here and in the worker) and `lowest_gold` for
    later checks and the summary.
    """

    spec: str
    params: dict[str, Any]
    path: str
    limit: int
    task: Task
    samples: list[Sample]
    encoder: Encoder
    scorer: Scorer
    sizes: list[Sizes | None] = field(default_factory=list)
    encode_errors: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    scored: list[tuple[str, ScoreJob, Score]] = field(default_factory=list)
    lowest_gold: dict[str, float] = field(default_factory=dict)
    differing: list[str] = field(default_factory=list)
    # some gold answer differs from the truth by no more than rounding of coordinates
    rounds: bool = False
    # frame -> ids of samples whose boxes its grid cannot spell
    thin: dict[str, dict[str, None]] = field(default_factory=dict)
    hangs: int = 0

    @property
    def usable(self) -> list[tuple[Sample, Sizes]]:
        """Samples whose media could be read, with the sizes."""
        return [(x, s) for x, s in zip(self.samples, self.sizes, strict=True) if s is not None]

    def context(
        self, sizes: Sizes, frame: CoordFrame | None = None, progress: float = 1.0
    ) -> RewardContext:
        """Context of a complete answer in `frame` (default: the one the model emits) at `progress` of the training."""
        images = tuple(s for s in sizes if isinstance(s, ImageSize))
        videos = tuple(s for s in sizes if isinstance(s, VideoSize))
        return RewardContext(
            round(100 * progress),
            100,
            frame or self.encoder.template.frame,
            images,
            num_tokens=16,
            max_tokens=1024,
            videos=videos,
        )

    def score(self, label: str, sample: Sample, text: str, ctx: RewardContext) -> Score:
        """Score in the worker, where a hang does no harm, then here; keep the result.

        Raises RewardError after a few hangs or crashes, so that a check ends within a minute.
        """
        job = ScoreJob(0, sample, text, ctx)
        score = there = self.scorer.score([job])[0]
        if _survived(there):
            score = score_one(self.task, job)
            if score != there:
                self.differing.append(
                    f"{label} of sample {sample.id}, frame {ctx.frame.value}: {score.value:.4g} "
                    f"here, {there.value:.4g} in a worker ({there.reason})"
                )
        self.scored.append((label, job, score))
        self.hangs += not _survived(there)
        if self.hangs >= _MOST_HANGS:
            raise RewardError(
                f"stopped after {self.hangs} texts that hung or killed the reward; the last: "
                f"{there.reason}"
            )
        return score


def _survived(score: Score) -> bool:
    """False when the text hung or killed the worker, so that it must not be tried in this process."""
    return not is_reward_failure(score) or (score.reason or "").startswith("reward_error")


@dataclass(frozen=True)
class Check:
    """`run` yields one line per problem; `expected` and `fix` are printed when there is one."""

    name: str
    expected: str
    fix: str
    run: Callable[[Bench], Iterator[str]]


def _texts(samples: list[Sample]) -> list[str]:
    """Samples as text, to compare them whatever their answers are made of."""
    return [repr(dataclasses.asdict(sample)) for sample in samples]


def _ids(bench: Bench) -> Iterator[str]:
    counts = Counter((s.source, s.id) for s in bench.samples)
    yield from (
        f"id {i!r} of source {source!r} is used {n} times"
        for (source, i), n in counts.items()
        if n > 1
    )
    yield from (
        f"id {s.id!r} is not a text with something in it"
        for s in bench.samples
        if not isinstance(s.id, str) or not s.id
    )


def _frozen(bench: Bench) -> Iterator[str]:
    loaded: list[Any] = list(bench.samples)  # a task may give anything
    strangers = [x for x in loaded if not isinstance(x, Sample)]
    yield from (f"load gave a {type(x).__name__}: {str(x)[:80]}" for x in strangers[:1])
    for sample in [] if strangers else loaded:
        if not _is_frozen(sample):
            yield f"sample {sample.id} can be changed ({type(sample).__name__})"
        if not isinstance(sample.question, str) or not isinstance(sample.images, tuple):
            yield f"sample {sample.id}: question {sample.question!r:.60} or images {sample.images!r:.60}"
        # our own bytes, made a moment ago
        if _texts([pickle.loads(pickle.dumps(sample))]) != _texts([sample]):
            yield f"sample {sample.id} differs after pickling"


def _is_frozen(value: Any) -> bool:
    try:
        value.id = value.id
    except dataclasses.FrozenInstanceError:
        return True
    return False


def _loading(bench: Bench) -> Iterator[str]:
    first = _texts(bench.samples)
    fresh = task_from_spec(bench.spec, bench.params)
    fresh.on_error, fresh.orientation = bench.task.on_error, bench.task.orientation
    for label, task in (("the second time", bench.task), ("by a new instance", fresh)):
        again = _texts(list(itertools.islice(task.load(bench.path), bench.limit)))
        if len(again) != len(first):
            yield f"{len(first)} samples first, {len(again)} {label}"
        differing = [
            number for number, (a, b) in enumerate(zip(first, again, strict=False)) if a != b
        ]
        if differing:
            yield f"{len(differing)} samples differ {label}, the first is number {differing[0]}"


def _messages(bench: Bench) -> Iterator[str]:
    base = bench.encoder.template
    for sample, frame in itertools.product(bench.samples, CoordFrame):
        messages = bench.task.messages(sample, Template(base.name, frame, base.system))
        items = [
            item for m in messages if not isinstance(m["content"], str) for item in m["content"]
        ]
        for kind, media in (
            ("image", sample.images),
            ("video", sample.videos),
            ("audio", sample.audios),
        ):
            found = sum(item["type"] == kind for item in items)
            if found != len(media):
                yield f"sample {sample.id}: {found} {kind} items for {len(media)} {'pictures' if kind == 'image' else f'{kind}s'}"
        if not messages or messages[-1]["role"] != "user":
            yield f"sample {sample.id}: the last message is not the user's"
        if messages != bench.task.messages(sample, Template(base.name, frame, base.system)):
            yield f"sample {sample.id}: other messages the second time"


def _encoding(bench: Bench) -> Iterator[str]:
    yield from bench.encode_errors


def _top(task: Task, score: Score) -> float:
    """What a gold answer should reach: 1, or more where a preset adds parts up without normalising their weights."""
    return min(task.value_range[1], max(1.0, math.fsum(score.weights.values())))


def _gold(bench: Bench) -> Iterator[str]:
    cases = [(frame, 1.0) for frame in CoordFrame] + [
        (bench.encoder.template.frame, p) for p in (0.0, 0.5)
    ]
    doubted: dict[str, None] = {}  # samples too thin for the frame that the model would answer in
    for (sample, sizes), (frame, progress) in itertools.product(bench.usable, cases):
        ctx = bench.context(sizes, frame, progress)
        text = bench.task.gold(sample, ctx)
        score = bench.score("gold", sample, text, ctx)
        bench.lowest_gold[frame.value] = min(
            score.value, bench.lowest_gold.get(frame.value, math.inf)
        )
        # a paper's preset answers in its own frame always
        fixed = getattr(bench.task.member(sample.task), "frame", None)
        rounded = only_rounded(score, dataclasses.replace(ctx, frame=fixed or frame))
        bench.rounds |= rounded
        least = (HALF if rounded else _GOLD) * _top(bench.task, score)
        if score.parsed and score.value >= least:
            continue
        if rounded and too_thin(score):
            bench.thin.setdefault((fixed or frame).value, {})[sample.id] = None
            if fixed or frame is bench.encoder.template.frame:
                doubted[sample.id] = None
        else:
            yield (
                f"sample {sample.id}, frame {frame.value}, progress {progress:g}: {text[:80]!r} scores "
                f"{score.value:.4g} (parts {dict(score.parts)}, reason {score.reason})"
            )
    # shares of the picture that are read as pixels look like this
    if 2 * len(doubted) > len(bench.usable):
        yield (
            f"the boxes of {len(doubted)} of {len(bench.usable)} samples are thinner than the grid of the answers, those of "
            f"sample {next(iter(doubted))} first; is the frame of the data declared right?"
        )


def _accuracy(score: Score) -> dict[str, float]:
    """The parts that say whether the answer is right: 'accuracy', else all but format parts, else the value."""
    if "accuracy" in score.parts:
        return {"accuracy": score.parts["accuracy"]}
    return {k: v for k, v in score.parts.items() if not k.startswith("format")} or {
        "value": score.value
    }


def _wrong(bench: Bench) -> Iterator[str]:
    for (sample, sizes), frame in itertools.product(bench.usable, CoordFrame):
        ctx = bench.context(sizes, frame)
        text = bench.task.wrong(sample, ctx)
        score = bench.score("wrong", sample, text, ctx)
        if not score.parsed or any(v > _TOUCHES for v in _accuracy(score).values()):
            yield (
                f"sample {sample.id}, frame {frame.value}: {text[:80]!r} has parts {dict(score.parts)}, "
                f"parsed {score.parsed}, reason {score.reason}"
            )


def _grouped(bench: Bench) -> Iterator[str]:
    """Only for tasks whose reward needs the whole group."""
    low, high = bench.task.value_range
    for sample, sizes in bench.usable if bench.task.in_group else []:
        ctx = bench.context(sizes)
        texts = {
            "gold": bench.task.gold(sample, ctx),
            "gold again": bench.task.gold(sample, ctx),
            "wrong": bench.task.wrong(sample, ctx),
            "failure": "",
        }
        single = [score_one(bench.task, ScoreJob(0, sample, text, ctx)) for text in texts.values()]
        for place, label in enumerate(texts):
            score = bench.task.score_in_group(sample, single, place)
            if not isinstance(score, Score) or not low - 1e-9 <= score.value <= high + 1e-9:
                yield f"sample {sample.id}, {label}: {score!r:.120}"
            elif label == "failure" and score.value != 0:
                yield f"sample {sample.id}: a text that could not be parsed scores {score.value:.4g} in its group"
            elif score != bench.task.score_in_group(sample, single, place):
                yield f"sample {sample.id}, {label}: another score the second time"


def _garbage_texts(bench: Bench) -> Iterator[tuple[str, Sample, str, RewardContext]]:
    task = bench.task
    # native finds the one box of a text; without an envelope a stray tag is text around it
    prose = (
        getattr(task, "answer_format", "answer") == "bare"
        and getattr(task, "answers", "strict") != "strict"
    )
    for sample, sizes in bench.usable[:_GARBAGE_SAMPLES]:
        ctx = bench.context(sizes)
        gold, wrong = bench.task.gold(sample, ctx), bench.task.wrong(sample, ctx)
        texts = {
            **GARBAGE,
            "two answers, right and wrong": f"{gold}\n{wrong}",
            "two answers, wrong and right": f"{wrong}\n{gold}",
        }
        yield from (
            (label, sample, text, ctx)
            for label, text in texts.items()
            if not (prose and label == "unclosed <answer> with text")
        )


def _garbage(bench: Bench) -> Iterator[str]:
    for label, sample, text, ctx in _garbage_texts(bench):
        score = bench.score(label, sample, text, ctx)
        paid = score.value
        if getattr(bench.task, "pays_unread", False) and "format" in score.parts:
            # a paper's form, which it judges apart from the answer
            paid -= score.weights["format"] * score.parts["format"]
        if abs(paid) > 1e-9 or score.parsed or not score.reason or is_reward_failure(score):
            yield f"{label}: value {score.value:.4g}, parsed {score.parsed}, reason {score.reason}"


def _weighted_sum(bench: Bench) -> Iterator[str]:
    for label, job, score in bench.scored:
        total = math.fsum(score.weights[k] * v for k, v in score.parts.items())
        if score.parts and abs(total - score.value) > 1e-6:
            yield f"{label} of sample {job.sample.id}: value {score.value:.6g}, sum of the parts {total:.6g}"
        names = bench.task.part_names
        if names and set(score.parts) != set(names):
            yield f"{label} of sample {job.sample.id}: parts {sorted(score.parts)}, part_names {sorted(names)}"


def _bounded(bench: Bench) -> Iterator[str]:
    for label, job, score in bench.scored:
        if is_reward_failure(score):
            yield f"{label} of sample {job.sample.id}: {score.reason}"


def _repeatable(bench: Bench) -> Iterator[str]:
    for label, job, score in reversed(bench.scored):
        if _survived(score) and score_one(bench.task, job) != score:
            yield f"{label} of sample {job.sample.id}: another score the second time"


def _worker(bench: Bench) -> Iterator[str]:
    yield from bench.differing


def _logging(bench: Bench) -> Iterator[str]:
    for sample, sizes in bench.usable:
        try:
            values = json.loads(json.dumps(dataclasses.asdict(sample)))
        except (TypeError, ValueError) as error:
            yield f"sample {sample.id}: {error}"
            continue
        logged = Sample(
            **{**values, **{k: tuple(values[k]) for k in ("images", "videos", "audios")}}
        )
        ctx = bench.context(sizes)
        text = bench.task.gold(sample, ctx)
        before, after = (score_one(bench.task, ScoreJob(0, x, text, ctx)) for x in (sample, logged))
        if before.value != after.value:
            yield f"sample {sample.id}: gold scores {before.value:.4g}, read back from a log {after.value:.4g}"
        json.dumps(dataclasses.asdict(after))  # raises TypeError for a detail that is no JSON


def _summary(bench: Bench) -> Iterator[str]:
    failed = [Score.failure("no_answer", bench.task.part_names)] * 3
    real = [score for label, _, score in bench.scored if label in ("gold", "wrong")]
    for label, rows in (
        ("no rows", []),
        ("only failures", failed),
        ("gold and wrong answers", real),
    ):
        summary: Any = bench.task.summarize(rows)
        if not isinstance(summary, Mapping):
            yield f"{label}: {type(summary).__name__}"
        else:
            yield from (
                f"{label}: {k} is {v!r}"
                for k, v in summary.items()
                if not isinstance(v, (int, float)) or not math.isfinite(v)
            )


def _headline(bench: Bench) -> Iterator[str]:
    name = bench.task.headline
    known = {k for label, _, score in bench.scored if label == "gold" for k in score.metrics}
    if name != "reward" and name not in known:
        yield f"headline {name!r}; metrics of the scores: {', '.join(sorted(known)) or 'none'}"


CHECKS: tuple[Check, ...] = (
    Check(
        "ids are unique",
        "one id per sample and source",
        "give every row its own id in load()",
        _ids,
    ),
    Check(
        "samples are frozen and picklable",
        "mmrl.Sample with text, a tuple of picture paths and a picklable answer",
        "build Sample(id=..., images=(path,), answer=plain numbers, texts, lists)",
        _frozen,
    ),
    Check(
        "loading is deterministic",
        "the same samples every time, in the same order",
        "sort file listings, seed what is random, keep no state between loads",
        _loading,
    ),
    Check(
        "one image item per picture",
        "messages() that end with the user's turn and hold one image item per picture",
        "add one {'type': 'image'} per entry of sample.images, in order, before the text",
        _messages,
    ),
    Check(
        "prompts encode and fit",
        "every picture opens and every prompt fits the model's limit",
        "fix or remove those rows; lower data.max_pixels where a prompt is too long",
        _encoding,
    ),
    Check(
        "gold scores 1",
        f"{_GOLD} or more in every coordinate frame ({HALF} where its grid rounds boxes or "
        "points), times the sum of the weights where a preset does not normalise them",
        "let gold() write what score() reads, converted by mmrl.coords.from_orig; set thresholds in reach",
        _gold,
    ),
    Check(
        "wrong scores 0",
        "a well-formed answer whose accuracy parts are 0, in every frame",
        "let wrong() give a far answer in the right form, and give partial credit to nothing that is wrong",
        _wrong,
    ),
    Check(
        "garbage scores 0 with a reason",
        "value 0, parsed False and a reason; nothing raised, nothing that hangs",
        "return Score.failure(reason, ...) unless there is exactly one well-formed answer; never eval",
        _garbage,
    ),
    Check(
        "value in [0, 1], nothing raised",
        "every score finite and in [0, 1] (or Task.value_range, which only "
        "a paper's preset widens), from every text",
        "normalise the weights; catch what parsing can raise",
        _bounded,
    ),
    Check(
        "groups are scored alike",
        "score_in_group gives a Score in range, 0 for a failure, the same twice",
        "count votes without state; leave failures at 0",
        _grouped,
    ),
    Check(
        "value is the weighted sum",
        "value == sum of weight * part, with the parts named in part_names",
        "build scores with Score.combine and Score.failure(reason, self.part_names)",
        _weighted_sum,
    ),
    Check(
        "scores are repeatable",
        "the same text gives the same score, whatever was scored before",
        "keep no state in score(); seed what is random from the sample",
        _repeatable,
    ),
    Check(
        "a worker scores the same",
        "a task rebuilt from its name in another process gives the same scores",
        "let everything score() needs come from the parameters and the sample, not from load()",
        _worker,
    ),
    Check(
        "samples survive the log",
        "sample and score are JSON, and gold scores the same on what is read back",
        "use lists, numbers and texts as answer, params and detail, not sets, arrays or objects",
        _logging,
    ),
    Check(
        "summarize takes anything",
        "finite numbers for no rows, for failures only, and for real scores",
        "guard divisions by len(rows); use score.metrics.get(name, 0.0)",
        _summary,
    ),
    Check(
        "headline is measured",
        "'reward' or a key of Score.metrics",
        "set headline to a metric that score() returns",
        _headline,
    ),
)
