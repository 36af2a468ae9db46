"""What an evaluation leaves, of completions and of episodes alike: rows, tables with intervals, and the number that checkpoints are
compared by.

    found = evaluation_of(judged, measured, step=0, task="grounding", protocol={...}, seed=0)
    found.metric("greedy/iou"); write_evaluation(found, Path("runs/demo/eval/step_000000"))

mmrl.evaluation.evaluate asks a model and mmrl.robotics.evaluate plays in simulators; what they judged comes here.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mmrl.distributed.world import World
from mmrl.errors import ConfigError, did_you_mean
from mmrl.evaluation.tables import ALWAYS, Group, Judged, summarize, value_of
from mmrl.files import json_line, write_text
from mmrl.training.runlog import write_json
from mmrl.types import Sample, Score, StopReason
from mmrl.workers.scoring import is_reward_failure

__all__ = [
    "Evaluation",
    "evaluation_of",
    "flat_metrics",
    "gathered",
    "input_error",
    "judged",
    "unread_words",
    "write_evaluation",
]


@dataclasses.dataclass
class Evaluation:
    """results.json (`results`), predictions.jsonl (`predictions`) and views.jsonl (`view_answers`) in memory."""

    results: dict[str, Any]
    judged: Sequence[Judged]
    measured: Mapping[Group, frozenset[str]] = dataclasses.field(default_factory=dict)
    view_answers: Sequence[dict[str, Any]] = ()

    @property
    def predictions(self) -> list[dict[str, Any]]:
        """The rows of predictions.jsonl: a completion, or an episode, each."""
        return [j.row for j in self.judged]

    def metric(self, name: str, limit: int | None = None) -> float | None:
        """'sampled/iou' -> its mean over the first `limit` samples of each source; None when it was not measured.

        Comparing checkpoints needs the same samples each time, whether or not this evaluation had more of them.
        'greedy/macro' is the mean over sources of each one's headline metric.
        """
        mode, _, metric = name.partition("/")
        if metric not in self.results.get(mode, {}):
            return None
        if limit is None or all(j.place < limit for j in self.judged):
            return self.results[mode][metric]["mean"]
        columns: dict[str, list[float]] = defaultdict(list)
        for j in self.judged:
            known = metric in ALWAYS or metric in self.measured[j.group]
            if j.row["mode"] == mode and j.place < limit and known:
                wanted = j.row["headline"] if metric == "macro" else metric
                columns[j.row["source"] if metric == "macro" else ""].append(
                    value_of(j.row["score"], wanted)
                )
        means = [math.fsum(values) / len(values) for values in columns.values()]
        return math.fsum(means) / len(means) if means else None

    @property
    def unjudged(self) -> tuple[int, str]:
        """How many completions have no judgement, since the reward or the environment failed, and the first reason."""
        lost = [str(j.score.reason) for j in self.judged if is_reward_failure(j.score)]
        return len(lost), lost[0] if lost else ""

    @property
    def scorer_failed(self) -> bool:
        """Whether an official scorer (mmrl.evaluation.official) failed."""
        return any("error" in numbers for numbers in self.results.get("benchmark", {}).values())

    @property
    def unread(self) -> str:
        """What to say of samples whose pictures, clips or sounds could not be read, with the first reason; '' without any."""
        samples = {(j.source, j.place): j.score for j in self.judged}
        lost = [why for score in samples.values() if (why := input_error(score.reason))]
        return f"{unread_words(len(lost), len(samples))}; first: {lost[0]}" if lost else ""

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


def input_error(reason: str | None) -> str:
    """Why a sample could not be read; '' where it was."""
    kind, _, why = (reason or "").partition(": ")
    return why if kind == "input_error" else ""


def unread_words(lost: int, samples: int) -> str:
    """What to say of `lost` of so many samples that could not be read."""
    return f"{lost:,} of {samples:,} held-out samples could not be read and count as 0"


def judged(
    sample: Sample,
    score: Score,
    /,
    *,
    place: tuple[int, int],
    number: int,
    mode: str,
    text: str,
    stop: StopReason,
    num_tokens: int,
    headline: str,
    source: str | None = None,
    **more: Any,
) -> Judged:
    """A completion, or an episode, as a row of predictions.jsonl with `more` entries. `place`: numbers of the data source (or task)
    and of the sample (or initial state) in it; `number`: which of the sample's in its mode; `source`: default: the sample's."""
    row = {
        "id": sample.id,
        "source": sample.source if source is None else source,
        "task": sample.task,
        "question": sample.question,
        "images": list(sample.images),
        "videos": list(sample.videos),
        **({"audios": list(sample.audios)} if sample.audios else {}),
        "mode": mode,
        "text": text,
        "stop": stop.value,
        "num_tokens": num_tokens,
        **more,
        "score": dataclasses.asdict(score),
        "headline": headline,
    }
    return Judged(row, sample, score, *place, number)


def gathered(rows: Iterable[Judged], world: World | None) -> list[Judged]:
    """Those of all processes, in order of source, sample, mode and number. Collective."""
    found = list(rows) if world is None else world.gather(list(rows))
    return sorted(found, key=lambda j: (j.source, j.place, j.row["mode"], j.number))


def evaluation_of(
    rows: Sequence[Judged],
    measured: Mapping[Group, frozenset[str]],
    *,
    step: int,
    task: str,
    protocol: Mapping[str, Any],
    seed: int,
    summary: Callable[[Sequence[Judged]], Mapping[str, Any]] | None = None,
    more: Mapping[str, Any] | None = None,
    view_answers: Sequence[dict[str, Any]] = (),
) -> Evaluation:
    """The evaluation of these rows: means with intervals per mode, source and task. `measured`: the metrics of each group of rows;
    `summary`: further numbers of a mode's rows; `more`: further entries of results.json."""
    results = {
        "step": step,
        "task": task,
        "protocol": dict(protocol),
        **summarize(rows, seed, measured, summary),
        **(more or {}),
    }
    return Evaluation(results, rows, measured, view_answers)


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
