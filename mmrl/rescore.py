"""Score logged completions again, offline: what would this reward have said?

    mmrl score runs/demo/rollouts/step_000010.jsonl --param mode=dynamic --out new.jsonl

Reads rollouts/step_*.jsonl and eval predictions.jsonl of a run. Every line carries its sample, its coordinate frame,
the picture sizes and its task as configured, so that the same parameters give exactly the logged scores. The lines of a group
of rollouts are scored together, as in training, and so are the sampled predictions of one prompt, as in evaluations. Lines
that cannot be read are kept with their number and reason, never dropped. Rewards run in a worker process, as in training.
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
from mmrl.coords import CoordFrame
from mmrl.errors import DataError
from mmrl.files import json_line, write_text
from mmrl.registry import resolve_task, task_from_spec
from mmrl.scoring import ScoreJob, Scorer
from mmrl.trust import no_new_code, params_found
from mmrl.types import ImageSize, RewardContext, Sample, Score, StopReason, VideoSize

__all__ = ["BrokenLine", "Rescored", "RescoredRow", "rescore", "summary_rows", "write_rescored"]

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
        return (self.old.value, self.old.parsed, self.old.reason) != (self.new.value, self.new.parsed, self.new.reason)


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
        changed = bool(self.row.get("contrast"))  # answers to a changed input are a group of their own
        return json.dumps([self.row.get("step"), key, sample.source, sample.id, self.spec, changed], default=str)

    @property
    def was_never_rolled_out(self) -> bool:
        """The picture could not be read, so there was no completion: no reward can change that."""
        return self.ctx.stop is StopReason.ERROR


def _sample(values: Mapping[str, Any]) -> Sample:
    return Sample(values["id"], values["task"], values["source"], values["question"], values["answer"],
                  tuple(values["images"]), tuple(values["videos"]), values["params"])


def _context(row: Mapping[str, Any]) -> RewardContext:
    """As it was in the run; predictions (no step) were scored at the end of training, as every evaluation is."""
    step, total = (row["step"], row["total_steps"]) if "step" in row else (1, 1)
    sizes = tuple(ImageSize(tuple(s["orig_wh"]), tuple(s["resized_wh"])) for s in row["image_sizes"])
    return RewardContext(step, total, CoordFrame(row["frame"]), sizes, StopReason(row["stop"]), row["num_tokens"],
                         row["max_tokens"], tuple(_video_size(s) for s in row.get("video_sizes", ())))


def _video_size(values: Mapping[str, Any]) -> VideoSize:
    return VideoSize(tuple(values["orig_wh"]), tuple(values["resized_wh"]), values["duration_s"], tuple(values["timestamps_s"]))


def _read_line(number: int, raw: bytes) -> _Logged:
    """Raises ValueError, KeyError or TypeError for a line that is not a logged completion."""
    row = json.loads(raw.decode("utf-8"))
    if not isinstance(row, dict):
        raise TypeError(f"expected a JSON object, found {type(row).__name__}")
    if not isinstance(row["text"], str):
        raise TypeError(f"expected text, found {type(row['text']).__name__}")
    old = Score(**{name: row["score"][name] for name in _PARTS})
    return _Logged(number, row, row["task_spec"], row["task_params"], _sample(row["sample"]), _context(row), old)


def _read(path: Path) -> tuple[list[_Logged], list[BrokenLine]]:
    try:
        lines = path.read_bytes().split(b"\n")  # not splitlines: completions may hold other line separators
    except OSError as error:
        raise DataError(f"expected rollouts/step_*.jsonl or predictions.jsonl of a run, found '{path}': "
                        f"{error.strerror}") from error
    logged, broken = [], []
    for number, raw in enumerate(lines, 1):
        if not raw.strip():
            continue
        try:
            logged.append(_read_line(number, raw))
        except KeyError as error:
            broken.append(BrokenLine(number, f"expected the key {error}, found none", raw.decode("utf-8", "replace")))
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            broken.append(BrokenLine(number, f"{type(error).__name__}: {error}", raw.decode("utf-8", "replace")))
    return logged, broken


def _scores(scorer: Scorer, groups: Collection[Sequence[tuple[_Logged, ScoreJob]]]) -> dict[int, Score]:
    """Scores by line: groups together; a greedy prediction, or the only sample of a prompt, by itself."""
    together = [group for group in groups if "step" in group[0][0].row or len(group) > 1]
    alone = [group[0] for group in groups if "step" not in group[0][0].row and len(group) == 1]
    new = dict(zip((entry.line for entry, _ in alone), scorer.score([job for _, job in alone]), strict=True))
    scored = scorer.score_groups([[job for _, job in group] for group in together])
    for group, scores in zip(together, scored, strict=True):
        new.update(zip((entry.line for entry, _ in group), scores, strict=True))
    return new


def rescore(path: str | Path, task: str | None = None, params: Mapping[str, Any] | None = None, *,
            timeout_s: float = 10.0, trust_code: bool = False) -> Rescored:
    """Score every completion of a log again.

    Without `task` each line's own task is used with its logged parameters, over which `params` are merged. With `task`
    all lines are scored by that task with `params` alone, unless it is the line's own. A reward that raises, hangs for
    `timeout_s` or dies gives a recorded failure, as in training. Raises DataError when no line can be scored, and
    RegistryError or ConfigError for a task that does not exist or refuses its parameters.

    A log may come from a stranger: its lines name tasks that are built in, installed, or given as `task`, and parameters that
    are no folders or hosts (mmrl.trust); with `trust_code` they name any.
    """
    logged, broken = _read(Path(path))
    if not logged:
        first = f"; first: line {broken[0].line}: {broken[0].reason}" if broken else ""
        raise DataError(f"{path}: expected logged completions (rollouts/step_*.jsonl, predictions.jsonl), found none "
                        f"in {len(broken)} lines{first}")
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
        place = (entry.group or f"line {entry.line}", numbers[key])
        groups.setdefault(place, []).append((entry, ScoreJob(numbers[key], entry.sample, entry.row["text"], entry.ctx)))
    if task is not None:
        resolve_task(task)  # the user's own word, before the log has one
    with no_new_code(str(path), trust_code=trust_code):
        tasks = [task_from_spec(spec, merged) for spec, merged in specs]
    with Scorer(specs, tasks, workers=1, timeout_s=timeout_s) as scorer:
        new = _scores(scorer, groups.values())
    rows = tuple(RescoredRow(e.line, e.row, e.sample.source, e.old, new.get(e.line, e.old)) for e in logged)
    return Rescored(rows, tuple(broken))


def summary_rows(rows: Sequence[RescoredRow]) -> list[dict[str, Any]]:
    """Old and new means of reward, parse rate and every part, per source and (with several sources) over all.

    Each entry: source ('(all)' for the sum), measure ('reward', 'parse_rate', 'part/NAME'), old, new, changed
    (completions whose value of this measure differs), n. A part that a score lacks counts as 0.
    """
    sources = sorted({row.source for row in rows})
    table = []
    for source in [*sources, *(["(all)"] if len(sources) > 1 else [])]:
        chosen = [r for r in rows if source in (r.source, "(all)")]
        parts = sorted({f"part/{name}" for r in chosen for score in (r.old, r.new) for name in score.parts})
        for measure in ("reward", "parse_rate", *parts):
            pairs = [(_measured(r.old, measure), _measured(r.new, measure)) for r in chosen]
            table.append({"source": source, "measure": measure, "old": math.fsum(a for a, _ in pairs) / len(pairs),
                          "new": math.fsum(b for _, b in pairs) / len(pairs), "changed": sum(a != b for a, b in pairs),
                          "n": len(pairs)})
    return table


def _measured(score: Score, measure: str) -> float:
    if measure == "reward":
        return score.value
    if measure == "parse_rate":
        return float(score.parsed)
    return float(score.parts.get(measure.removeprefix("part/"), 0.0))


def _out_rows(rescored: Rescored) -> Iterable[dict[str, Any]]:
    rows: dict[int, dict[str, Any]] = {
        r.line: {**r.row, "score": dataclasses.asdict(r.new), "old_score": dataclasses.asdict(r.old)}
        for r in rescored.rows}
    rows.update({b.line: {"line": b.line, "broken": b.reason, "text": b.text} for b in rescored.broken})
    return (rows[number] for number in sorted(rows))


def write_rescored(rescored: Rescored, path: Path) -> None:
    """Write the rows with their new `score` and the `old_score`; a broken line becomes {line, broken, text}."""
    write_text(path, "".join(json_line(row) + "\n" for row in _out_rows(rescored)))
