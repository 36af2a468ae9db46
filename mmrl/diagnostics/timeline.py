"""Who was busy when: spans and queue depths of a step, idle shares ("bubbles") per stage, and a Chrome trace of them.

    timeline = Timeline({"render": 2, "infer": 1, "train": 1})
    timeline.begin_step(1)
    with timeline.span("train", "train thread", group=3):
        ...
    timeline.end_step(1)
    print(timeline.summary(1)["stages"]["train"]["bubble"])
    timeline.write_chrome_trace(Path("trace.json"))        # opens in chrome://tracing and ui.perfetto.dev

All times are `time.monotonic()` seconds. On Linux and macOS that clock is the same in all processes since the machine
started, so worker processes report their own spans and `add` takes them as they are. The bubble of a stage is
1 - busy / (wall * workers); stages seen on the same lanes (reset and render) share their workers, which are busy with either.
With stages that never overlap a step takes the sum of their times, with stages that overlap perfectly the time of the busiest
workers: `bound` is that / sum, `ratio` what was measured, wall / sum. Only the last `keep` steps are held.
"""

from __future__ import annotations

import bisect
import json
import math
import os
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from mmrl.errors import ConfigError

__all__ = ["Span", "Timeline", "merged"]

_PIECES = 600  # of one lane in a step's file: more than a screen has pixels only make it large


@dataclass(frozen=True)
class Span:
    """`stage` was at work on `lane` (a worker or thread) from `start` to `end`, in seconds of time.monotonic()."""

    stage: str
    lane: str
    start: float
    end: float
    args: Mapping[str, Any] = field(default_factory=dict)


def merged(intervals: Iterable[tuple[float, float]], gap: float = 0.0) -> list[tuple[float, float]]:
    """Union of intervals, in order; those at most `gap` apart become one."""
    out: list[tuple[float, float]] = []
    for start, end in sorted(intervals):
        if out and start <= out[-1][1] + gap:
            out[-1] = (out[-1][0], max(out[-1][1], end))
        else:
            out.append((start, end))
    return out


class Timeline:
    """Records spans and counters from any thread; holds the last `keep` steps.

    `workers` gives how many workers a stage has; for a stage without an entry it is the number of lanes seen, which
    counts a worker that never did anything as absent. `limit` bounds what is held when steps are long, the oldest goes first
    (`dropped` counts). Spans given late still belong to the step in which they lie.
    """

    def __init__(
        self, workers: Mapping[str, int] | None = None, *, keep: int = 3, limit: int = 200_000
    ) -> None:
        self.workers = dict(workers or {})
        if keep < 1 or limit < 1 or any(n < 1 for n in self.workers.values()):
            raise ConfigError(
                f"expected at least one step and span to keep and one worker per stage, found keep {keep}, limit "
                f"{limit}, workers {self.workers}"
            )
        self.keep, self.limit, self.dropped = keep, limit, 0
        self._lock = threading.Lock()
        self._spans: list[Span] = []
        self._counters: dict[str, list[tuple[float, float]]] = defaultdict(list)
        self._steps: dict[int, tuple[float, float | None]] = {}
        self._origin = time.monotonic()

    # recording

    def add(self, stage: str, lane: str, start: float, end: float, **args: Any) -> None:
        """A span that was measured elsewhere, for example by a worker process."""
        self.extend([Span(stage, lane, start, max(start, end), args)])

    def extend(self, spans: Iterable[Span]) -> None:
        """Many spans, for example another process's."""
        with self._lock:
            self._spans += spans
            if len(self._spans) > self.limit:
                self.dropped += len(self._spans) - self.limit
                del self._spans[: -self.limit]

    def take(self) -> list[Span]:
        """All spans held, which are forgotten here: for the timeline of another process."""
        with self._lock:
            spans, self._spans = self._spans, []
            return spans

    @contextmanager
    def span(self, stage: str, lane: str, **args: Any) -> Iterator[None]:
        """Record the with block, also when it raises."""
        start = time.monotonic()
        try:
            yield
        finally:
            self.add(stage, lane, start, time.monotonic(), **args)

    def count(self, name: str, value: float, at: float | None = None) -> None:
        """The counter `name` (a queue's depth) is `value` from now on."""
        assert math.isfinite(value), f"counter {name}: {value}"
        with self._lock:
            points = self._counters[name]
            bisect.insort_right(
                points, (time.monotonic() if at is None else at, float(value)), key=lambda p: p[0]
            )
            if len(points) > self.limit:
                del points[: -self.limit]

    def begin_step(self, step: int, at: float | None = None) -> None:
        """A step begins; what lies before the last `keep` steps is forgotten."""
        with self._lock:
            self._steps[step] = (time.monotonic() if at is None else at, None)
            for old in list(self._steps)[: -self.keep]:
                del self._steps[old]
            first = next(iter(self._steps.values()))[0]
            self._spans = [s for s in self._spans if s.end > first]
            for name, points in self._counters.items():
                # its value when the window begins stays
                since = max(0, bisect.bisect_right(points, first, key=lambda p: p[0]) - 1)
                self._counters[name] = points[since:]

    def end_step(self, step: int, at: float | None = None) -> None:
        """It ends; asked about before, a step reaches until now."""
        with self._lock:
            self._steps[step] = (self._steps[step][0], time.monotonic() if at is None else at)

    # what it shows

    @property
    def steps(self) -> tuple[int, ...]:
        """Steps that are held."""
        return tuple(self._steps)

    def _window(self, step: int) -> tuple[float, float, list[Span]]:
        """Begin, end and spans of a step, cut to it. Raises ConfigError for a step that is not held."""
        with self._lock:
            if step not in self._steps:
                raise ConfigError(
                    f"expected one of the steps held ({', '.join(map(str, self._steps)) or 'none'}), found {step}"
                )
            begin, end = self._steps[step]
            end = time.monotonic() if end is None else end
            return (
                begin,
                end,
                [
                    Span(s.stage, s.lane, max(s.start, begin), min(s.end, end), s.args)
                    for s in self._spans
                    if s.end > begin and s.start < end
                ],
            )

    def summary(self, step: int) -> dict[str, Any]:
        """wall_s; by stage busy_s (summed over workers), workers, bubble, and which stages are done by the same workers; bound and
        ratio (see the module; None while nothing was recorded); by counter mean (over time), max. Spans on one lane count once
        where they overlap."""
        begin, end, spans = self._window(step)
        wall = max(end - begin, 1e-9)
        teams = _teams(dict.fromkeys((*self.workers, *sorted({s.stage for s in spans}))), spans)
        stages: dict[str, dict[str, Any]] = {}
        longest = whole = 0.0
        for team in teams:
            mine = [s for s in spans if s.stage in team]
            workers = max(
                self.workers.get(stage, len({s.lane for s in mine if s.stage == stage}))
                for stage in team
            )
            busy = _busy(mine)
            longest, whole = max(longest, busy / workers), whole + busy / workers
            for stage in team:
                stages[stage] = {
                    "busy_s": _busy(s for s in mine if s.stage == stage),
                    "workers": workers,
                    "bubble": max(0.0, 1 - busy / (wall * workers)),
                    "team": list(team),
                }
        return {
            "step": step,
            "wall_s": wall,
            "stages": stages,
            "bound": longest / whole if whole else None,
            "ratio": wall / whole if whole else None,
            "queues": self._queues(begin, end),
        }

    def _queues(self, begin: float, end: float) -> dict[str, dict[str, float]]:
        with self._lock:
            counters = {name: list(points) for name, points in self._counters.items()}
        out = {}
        for name, points in sorted(counters.items()):
            inside = [(max(begin, t), v) for t, v in points if t < end]
            area = sum(v * (b - a) for (a, v), (b, _) in pairwise([*inside, (end, 0.0)]))
            known = [v for (_, v), (b, _) in pairwise([*inside, (end, 0.0)]) if b > begin]
            if known and end > begin:
                out[name] = {"mean": area / (end - begin), "max": max(known)}
        return out

    def metrics(self, step: int) -> dict[str, float]:
        """The summary as flat metrics: schedule/busy/STAGE (s), schedule/bubble/STAGE, schedule/queue/NAME/mean, .../max,
        schedule/bound, schedule/ratio."""
        found = self.summary(step)
        out = {
            f"schedule/{key}": found[key] for key in ("bound", "ratio") if found[key] is not None
        }
        for stage, s in found["stages"].items():
            out |= {f"schedule/busy/{stage}": s["busy_s"], f"schedule/bubble/{stage}": s["bubble"]}
        for name, q in found["queues"].items():
            out |= {f"schedule/queue/{name}/{kind}": value for kind, value in q.items()}
        return out

    # files

    def write_step(self, folder: Path, step: int) -> Path:
        """FOLDER/step_000012.json for the report: the summary, and spans as [stage, lane, begin, end] in milliseconds of the step.

        Neighbours closer than a pixel are joined there (the summary is exact), so the file stays small.
        """
        begin, end, spans = self._window(step)
        pieces: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
        for s in spans:
            pieces[s.stage, s.lane].append((s.start, s.end))
        rows = [
            [stage, lane, round(1000 * (a - begin), 2), round(1000 * (b - begin), 2)]
            for (stage, lane), found in sorted(pieces.items())
            for a, b in merged(found, (end - begin) / _PIECES)
        ]
        path = folder / f"step_{step:06d}.json"
        _replace(path, [json.dumps({**self.summary(step), "spans": rows}, allow_nan=False)])
        return path

    def write_chrome_trace(self, path: Path) -> Path:
        """The steps held as a Chrome trace: a thread per lane, a complete event per span, counter tracks, a marker per step."""
        with self._lock:
            spans, counters = (
                list(self._spans),
                {name: list(points) for name, points in self._counters.items()},
            )
            steps = dict(self._steps)
        _replace(path, self._trace(spans, counters, steps))
        return path

    def _trace(
        self,
        spans: Sequence[Span],
        counters: Mapping[str, Sequence[tuple[float, float]]],
        steps: Mapping[int, tuple[float, float | None]],
    ) -> Iterator[str]:
        """The file piece by piece: it is never in memory as a whole."""

        def us(t: float) -> float:
            return round(1e6 * (t - self._origin), 1)

        lanes = {
            lane: number for number, lane in enumerate(dict.fromkeys(s.lane for s in spans), 1)
        }
        yield '{"displayTimeUnit":"ms","traceEvents":[\n'
        yield json.dumps(
            {"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "args": {"name": "mmrl"}}
        )
        for lane, number in lanes.items():
            yield ",\n" + json.dumps(
                {"ph": "M", "name": "thread_name", "pid": 1, "tid": number, "args": {"name": lane}}
            )
        for step, (begin, end) in steps.items():
            yield ",\n" + json.dumps(
                {
                    "ph": "X",
                    "name": f"step {step}",
                    "cat": "step",
                    "pid": 1,
                    "tid": 0,
                    "ts": us(begin),
                    "dur": us(time.monotonic() if end is None else end) - us(begin),
                }
            )
        for s in spans:
            yield ",\n" + json.dumps(
                {
                    "ph": "X",
                    "name": s.stage,
                    "cat": s.stage,
                    "pid": 1,
                    "tid": lanes[s.lane],
                    "ts": us(s.start),
                    "dur": round(1e6 * (s.end - s.start), 1),
                    "args": {k: _plain(v) for k, v in s.args.items()},
                }
            )
        for name, points in counters.items():
            for t, value in points:
                yield ",\n" + json.dumps(
                    {
                        "ph": "C",
                        "name": name,
                        "pid": 1,
                        "tid": 0,
                        "ts": us(t),
                        "args": {"value": value},
                    }
                )
        yield "\n]}\n"


def _busy(spans: Iterable[Span]) -> float:
    """Seconds of work, summed over lanes."""
    lanes: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for s in spans:
        lanes[s.lane].append((s.start, s.end))
    return sum(b - a for pieces in lanes.values() for a, b in merged(pieces))


def _teams(stages: Iterable[str], spans: Iterable[Span]) -> list[tuple[str, ...]]:
    """Stages by who does them: those that share a lane are one team."""
    lanes: dict[str, set[str]] = {stage: set() for stage in stages}
    for s in spans:
        lanes[s.stage].add(s.lane)
    teams: list[tuple[tuple[str, ...], set[str]]] = []
    for stage, mine in lanes.items():
        same = [team for team in teams if team[1] & mine]
        teams = [team for team in teams if team not in same]
        teams.append(
            (
                (*(name for names, _ in same for name in names), stage),
                mine.union(*(theirs for _, theirs in same)),
            )
        )
    return [names for names, _ in teams]


def _plain(value: Any) -> Any:
    """`value` where JSON has it, else in words."""
    return (
        value
        if isinstance(value, (str, int)) or (isinstance(value, float) and math.isfinite(value))
        else str(value)
    )


def _replace(path: Path, pieces: Iterable[str]) -> None:
    """Write a file atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("w", encoding="utf-8") as file:
        file.writelines(pieces)
    os.replace(partial, path)
