"""Score logged completions again, offline: what would this reward have said?

    mmrl score runs/demo/rollouts/step_000010.jsonl --param mode=dynamic --out new.jsonl

Reads rollouts/step_*.jsonl and eval predictions.jsonl of a run. Every line carries its sample, its coordinate frame,
the picture sizes and its task as configured, so that the same parameters give exactly the logged scores. The lines of a group
of rollouts are scored together, as in training, and so are the sampled predictions of one prompt, as in evaluations. Lines
that cannot be read are kept with their number and reason, never dropped, and so are rollouts in an environment, whose reward is not
that of a text. Rewards run in a worker process, as in training.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmrl.config import merge
from mmrl.config.trust import no_new_code, params_found
from mmrl.coords import CoordFrame
from mmrl.data.bounds import lines_bounded
from mmrl.errors import ConfigError, DataError, MMRLError, RegistryError
from mmrl.files import json_line, write_text
from mmrl.registry import resolve_task, task_from_spec
from mmrl.task import Task
from mmrl.types import AudioSize, ImageSize, RewardContext, Sample, Score, StopReason, VideoSize
from mmrl.workers.scorer import Scorer
from mmrl.workers.scoring import ScoreJob

__all__ = [
    "BrokenLine",
    "Rescored",
    "RescoredRow",
    "logged_context",
    "logged_sample",
    "logged_score",
    "rescore",
    "summary_rows",
    "write_rescored",
]

_PLAYED = (
    "expected an answer that its task scores by the text, found a rollout in an environment, which paid its reward turn by turn; "
    "it is not played again: evaluate a checkpoint (mmrl eval) with the other reward"
)
_PARTS = ("value", "parsed", "reason", "parts", "weights", "metrics", "detail")


@dataclass(frozen=True)
class BrokenLine:
    """A line (number from 1) that cannot be scored, why, and its text."""

    line: int
    reason: str
    text: str


@dataclass(frozen=True)
class RescoredRow:
    """One logged completion with its score then (`old`) and now (`new`); `row` is the line as logged."""

    line: int
    row: Mapping[str, Any]
    source: str
    old: Score
    new: Score

    @property
    def changed(self) -> bool:
        """True when the value, whether it parsed, or why it did not, differs at all."""
        return (self.old.value, self.old.parsed, self.old.reason) != (
            self.new.value,
            self.new.parsed,
            self.new.reason,
        )


@dataclass(frozen=True)
class Rescored:
    """Rows in order of the file, and the lines that could not be scored."""

    rows: tuple[RescoredRow, ...]
    broken: tuple[BrokenLine, ...]


@dataclass(frozen=True)
class _Logged:
    line: int
    row: Mapping[str, Any]
    spec: str
    params: dict[str, Any]
    sample: Sample
    ctx: RewardContext
    old: Score

    @property
    def group(self) -> str | None:
        """What the lines of one group of rollouts, or the samples of one prompt of an evaluation, share; else None.

        `key` is the group's own where the log holds it; else the prompt stands for it.
        """
        if "step" not in self.row and self.row.get("mode") != "sampled":
            return None
        sample, key = self.sample, self.row.get("key")
        # answers to a changed input are a group of their own
        changed = bool(self.row.get("contrast"))
        return json.dumps(
            [self.row.get("step"), key, sample.source, sample.id, self.spec, changed], default=str
        )

    @property
    def played(self) -> bool:
        """Whether an environment gave the score; logs that do not say so have the turns."""
        return bool(self.row.get("environment") or self.row.get("turns"))

    @property
    def was_never_rolled_out(self) -> bool:
        """The picture could not be read, so there was no completion: no reward can change that."""
        return self.ctx.stop is StopReason.ERROR


def _of(kind: type | tuple[type, ...], values: Mapping[str, Any], key: str) -> Any:
    """`values[key]`, which must be of `kind`. Raises KeyError, TypeError."""
    value = values[key]
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        names = " or ".join(k.__name__ for k in (kind if isinstance(kind, tuple) else (kind,)))
        raise TypeError(f"expected {names} in '{key}', found {value!r:.80}")
    return value


def _number(values: Mapping[str, Any], key: str) -> Any:
    """A finite number as it was logged: whole or not."""
    value = _of((int, float), values, key)
    if not math.isfinite(value):  # of a whole number beyond any float: OverflowError
        raise ValueError(f"expected a finite number in '{key}', found {value!r}")
    return value


def logged_sample(values: Mapping[str, Any]) -> Sample:
    """The sample of a logged completion, from its row's 'sample'. Raises KeyError, TypeError."""
    # rows of before there were sounds have none
    known = {"audios": [], **values}
    texts = {key: tuple(_of(list, known, key)) for key in ("images", "videos", "audios")}
    if not all(isinstance(path, str) for paths in texts.values() for path in paths):
        raise TypeError(f"expected paths in 'images', 'videos' and 'audios', found {texts!r:.80}")
    return Sample(
        _of(str, values, "id"),
        _of(str, values, "task"),
        _of(str, values, "source"),
        _of(str, values, "question"),
        values["answer"],
        texts["images"],
        texts["videos"],
        _of(dict, values, "params"),
        texts["audios"],
    )


def logged_context(row: Mapping[str, Any]) -> RewardContext:
    """The context of a logged completion as it was in the run; predictions (no step) were scored at the end of training, as every
    evaluation is. Raises KeyError, TypeError, ValueError."""
    step, total = (_of(int, row, "step"), _of(int, row, "total_steps")) if "step" in row else (1, 1)
    sizes = tuple(
        ImageSize(_pair(s, "orig_wh"), _pair(s, "resized_wh"))
        for s in _of(list, row, "image_sizes")
    )
    return RewardContext(
        step,
        total,
        CoordFrame(row["frame"]),
        sizes,
        StopReason(row["stop"]),
        _of(int, row, "num_tokens"),
        _of(int, row, "max_tokens"),
        tuple(_video_size(s) for s in row.get("video_sizes", ())),
        tuple(AudioSize(_number(s, "duration_s")) for s in row.get("audio_sizes", ())),
    )


def _pair(values: Mapping[str, Any], key: str) -> tuple[int, int]:
    """Width and height in pixels. Raises TypeError, ValueError."""
    width, height = _of(list, values, key)
    if not all(type(n) is int and 0 < n < 1 << 24 for n in (width, height)):
        raise ValueError(
            f"expected width and height in pixels in '{key}', found {values[key]!r:.80}"
        )
    return width, height


def _video_size(values: Mapping[str, Any]) -> VideoSize:
    stamps = _of(list, values, "timestamps_s")
    return VideoSize(
        _pair(values, "orig_wh"),
        _pair(values, "resized_wh"),
        _number(values, "duration_s"),
        tuple(_number({"timestamps_s": stamp}, "timestamps_s") for stamp in stamps),
    )


def logged_score(values: Mapping[str, Any]) -> Score:
    """As it was logged, from a row's 'score'. Raises KeyError, TypeError, ValueError for values that are no numbers: means over
    them would mean nothing."""
    for table in ("parts", "weights", "metrics"):
        for name in _of(dict, values, table):
            _number(values[table], name)
    (
        _of((str, type(None)), values, "reason"),
        _number(values, "value"),
        _of(bool, values, "parsed"),
        _of(dict, values, "detail"),
    )
    return Score(**{name: values[name] for name in _PARTS})


def _read_line(number: int, raw: bytes) -> _Logged:
    """Raises ValueError, KeyError or TypeError for a line that is not a logged completion."""
    row = json.loads(raw.decode("utf-8"))
    if not isinstance(row, dict):
        raise TypeError(f"expected a JSON object, found {type(row).__name__}")
    _of(str, row, "text")
    return _Logged(
        number,
        row,
        _of(str, row, "task_spec"),
        _of(dict, row, "task_params"),
        logged_sample(_of(dict, row, "sample")),
        logged_context(row),
        logged_score(_of(dict, row, "score")),
    )


def _read(path: Path) -> tuple[list[_Logged], list[BrokenLine]]:
    try:
        handle = path.open("rb")
    except OSError as error:
        raise DataError(
            f"expected rollouts/step_*.jsonl or predictions.jsonl of a run, found '{path}': "
            f"{error.strerror}"
        ) from error
    with handle:  # by its line feeds only: completions may hold other line separators
        return _read_lines(lines_bounded(handle))


def _read_lines(
    lines: Iterable[tuple[int, bytes | DataError]],
) -> tuple[list[_Logged], list[BrokenLine]]:
    logged, broken = [], []
    for number, raw in lines:
        if isinstance(raw, DataError):
            broken.append(BrokenLine(number, str(raw), ""))
            continue
        if not raw.strip():
            continue
        raw = raw.removesuffix(b"\n")
        try:
            logged.append(_read_line(number, raw))
        except KeyError as error:
            broken.append(
                BrokenLine(
                    number, f"expected the key {error}, found none", raw.decode("utf-8", "replace")
                )
            )
        except (ValueError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
            broken.append(
                BrokenLine(
                    number, f"{type(error).__name__}: {error}", raw.decode("utf-8", "replace")
                )
            )
    return logged, broken


def _scores(
    scorer: Scorer, groups: Collection[Sequence[tuple[_Logged, ScoreJob]]]
) -> dict[int, Score]:
    """Scores by line: groups together; a greedy prediction, or the only sample of a prompt, by itself."""
    together = [group for group in groups if "step" in group[0][0].row or len(group) > 1]
    alone = [group[0] for group in groups if "step" not in group[0][0].row and len(group) == 1]
    new = dict(
        zip(
            (entry.line for entry, _ in alone), scorer.score([job for _, job in alone]), strict=True
        )
    )
    scored = scorer.score_groups([[job for _, job in group] for group in together])
    for group, scores in zip(together, scored, strict=True):
        new.update(zip((entry.line for entry, _ in group), scores, strict=True))
    return new


def rescore(
    path: str | Path,
    task: str | None = None,
    params: Mapping[str, Any] | None = None,
    *,
    timeout_s: float = 10.0,
    trust_code: bool = False,
) -> Rescored:
    """Score every completion of a log again.

    Without `task` each line's own task is used with its logged parameters, over which `params` are merged. With `task`
    all lines are scored by that task with `params` alone, unless it is the line's own. A reward that raises, hangs for
    `timeout_s` or dies gives a recorded failure, as in training; lines whose task does not exist or refuses its parameters are
    among the broken ones, unless `task` or `params` were given. Raises DataError when no line can be read, and RegistryError or
    ConfigError when no line's task can be made, or one refuses what was given.

    A log may come from a stranger: its lines name tasks that are built in, installed, or given as `task`, and parameters that
    are no folders or hosts (mmrl.config.trust); with `trust_code` they name any.
    """
    found, broken = _read(Path(path))
    broken += [BrokenLine(e.line, _PLAYED, json.dumps(e.row)) for e in found if e.played]
    logged = [e for e in found if not e.played]
    if not logged:
        first = f"; first: line {broken[0].line}: {broken[0].reason}" if broken else ""
        raise DataError(
            f"{path}: expected logged completions (rollouts/step_*.jsonl, predictions.jsonl), found none "
            f"in {len(broken)} lines{first}"
        )
    numbers: dict[str, int] = {}
    specs: list[tuple[str, dict[str, Any]]] = []
    groups: dict[tuple[str, int], list[tuple[_Logged, ScoreJob]]] = {}
    for entry in logged:
        if entry.was_never_rolled_out:
            continue
        spec = task or entry.spec
        logged_params = entry.params if trust_code else params_found(entry.params).kept
        merged = merge(logged_params if spec == entry.spec else {}, dict(params or {}))
        key = json.dumps([spec, merged], sort_keys=True, default=str)
        if key not in numbers:
            numbers[key] = len(specs)
            specs.append((spec, merged))
        spot = (entry.group or f"line {entry.line}", numbers[key])
        groups.setdefault(spot, []).append(
            (entry, ScoreJob(numbers[key], entry.sample, entry.row["text"], entry.ctx))
        )
    if task is not None:
        resolve_task(task)  # the user's own word, before the log has one
    with no_new_code(str(path), trust_code=trust_code):
        tasks, refused = _tasks(specs)
    # what the user asked for does not fit
    if refused and (task is not None or params or len(refused) == len(specs)):
        raise next(iter(refused.values()))
    for name, number in list(groups):
        if number in refused:
            broken += [
                BrokenLine(e.line, str(refused[number]), json.dumps(e.row))
                for e, _ in groups.pop((name, number))
            ]
    lost = {b.line for b in broken}
    kept = [number for number in range(len(specs)) if number not in refused]
    place = {number: i for i, number in enumerate(kept)}
    chosen = [
        [(e, dataclasses.replace(job, key=place[job.key])) for e, job in group]
        for group in groups.values()
    ]
    with Scorer([specs[n] for n in kept], tasks, workers=1, timeout_s=timeout_s) as scorer:
        new = _scores(scorer, chosen)
    rows = tuple(
        RescoredRow(e.line, e.row, e.sample.source, e.old, new.get(e.line, e.old))
        for e in logged
        if e.line not in lost
    )
    return Rescored(rows, tuple(sorted(broken, key=lambda b: b.line)))


def _tasks(specs: Sequence[tuple[str, dict[str, Any]]]) -> tuple[list[Task], dict[int, MMRLError]]:
    """The tasks that can be made, in order, and what is wrong with the others, by place."""
    tasks: list[Task] = []
    refused: dict[int, MMRLError] = {}
    for number, (spec, params) in enumerate(specs):
        try:
            tasks.append(task_from_spec(spec, params))
        except (ConfigError, RegistryError) as error:
            refused[number] = error
    return tasks, refused


def summary_rows(rows: Sequence[RescoredRow]) -> list[dict[str, Any]]:
    """Old and new means of reward, parse rate and every part, per source and (with several sources) over all.

    Each entry: source ('(all)' for the sum), measure ('reward', 'parse_rate', 'part/NAME'), old, new, changed
    (completions whose value of this measure differs), n. A part that a score lacks counts as 0.
    """
    sources = sorted({row.source for row in rows})
    table = []
    for source in [*sources, *(["(all)"] if len(sources) > 1 else [])]:
        chosen = [r for r in rows if source in (r.source, "(all)")]
        parts = sorted(
            {f"part/{name}" for r in chosen for score in (r.old, r.new) for name in score.parts}
        )
        for measure in ("reward", "parse_rate", *parts):
            pairs = [(_measured(r.old, measure), _measured(r.new, measure)) for r in chosen]
            table.append(
                {
                    "source": source,
                    "measure": measure,
                    "old": math.fsum(a for a, _ in pairs) / len(pairs),
                    "new": math.fsum(b for _, b in pairs) / len(pairs),
                    "changed": sum(a != b for a, b in pairs),
                    "n": len(pairs),
                }
            )
    return table


def _measured(score: Score, measure: str) -> float:
    if measure == "reward":
        return score.value
    if measure == "parse_rate":
        return float(score.parsed)
    return float(score.parts.get(measure.removeprefix("part/"), 0.0))


def _out_rows(rescored: Rescored) -> Iterable[dict[str, Any]]:
    rows: dict[int, dict[str, Any]] = {
        r.line: {
            **r.row,
            "score": dataclasses.asdict(r.new),
            "old_score": dataclasses.asdict(r.old),
        }
        for r in rescored.rows
    }
    rows.update(
        {b.line: {"line": b.line, "broken": b.reason, "text": b.text} for b in rescored.broken}
    )
    return (rows[number] for number in sorted(rows))


def write_rescored(rescored: Rescored, path: Path) -> None:
    """Write the rows with their new `score` and the `old_score`; a broken line becomes {line, broken, text}."""
    write_text(path, "".join(json_line(row) + "\n" for row in _out_rows(rescored)))
