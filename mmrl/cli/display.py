"""The progress of a run: one live line on a terminal, and in a log a line for the first step and at least one every minute.

    with Display(total=500, quiet=False) as display:
        display.step(12, step_parts(row, "iou"))

Every part has a priority. Where the line is too narrow, parts are left out from the least important one on; step, elapsed time and
estimated time to the end are always there.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

from rich.progress import Progress, ProgressColumn, Task
from rich.text import Text

from mmrl.diagnostics.diagnosis import signal_share
from mmrl.operations.console import Console

__all__ = ["LINE_S", "Display", "Part", "clock", "fit_parts", "step_parts"]

LINE_S = 60.0
"""Longest silence in a log, in seconds."""
_RECENT = 20  # steps whose mean time gives the estimate of the end

Part = tuple[int, str]
"""(priority, text): 0 is never left out, larger numbers are left out first."""


def clock(seconds: float) -> str:
    """'0:07', '12:05', '3:12:05', '2d 3:12'."""
    minutes, left = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 24:
        return f"{hours // 24}d {hours % 24}:{minutes:02d}"
    return f"{hours}:{minutes:02d}:{left:02d}" if hours else f"{minutes}:{left:02d}"


def fit_parts(parts: Sequence[Part], width: int | None) -> str:
    """The parts in their order, two spaces apart, without the least important ones where that is wider than `width`."""
    kept = list(parts)
    while width is not None and len("  ".join(text for _, text in kept)) > width:
        worst = max(range(len(kept)), key=lambda i: (kept[i][0], i))
        if kept[worst][0] == 0:
            break
        del kept[worst]
    return "  ".join(text for _, text in kept)


def _number(row: Mapping[str, Any], key: str, form: str = ".3f") -> str:
    value = row.get(key)
    return "-" if value is None else format(value, form)


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def step_parts(row: Mapping[str, Any], watched: str) -> list[Part]:
    """Reward, share of answers that keep the format, share of groups with signal, seconds; then the metric that picks the best
    checkpoint (else the first of the usual ones that training measures), entropy and the gap between sampler and trainer."""
    if "train/success_once" in row:
        return _embodied_parts(row)
    usual = ("correct", "iou") if watched == "macro" else ("iou", "correct")
    shown = next((n for n in (watched, *usual) if n != "reward" and f"train/{n}" in row), None)
    return [
        (3, f"reward {_number(row, 'train/reward/mean')}"),
        (1, f"parsed {_share(row.get('train/parse_rate'))}"),
        (2, f"signal {_share(signal_share(row))}"),
        (4, f"{_number(row, 'time/total', '.1f')} s/step"),
        *([(5, f"{shown} {_number(row, f'train/{shown}')}")] if shown else []),
        (6, f"entropy {_number(row, 'train/entropy')}"),
        (7, f"gap {_number(row, 'train/logprob_gap/mean', '.1e')}"),
    ]


def _embodied_parts(row: Mapping[str, Any]) -> list[Part]:
    """Success rate, groups trained on of those played, failed attempts, seconds, entropy, gap."""
    failed = row.get("train/failed_attempts") or 0
    return [
        (1, f"success rate {_number(row, 'train/success_once', '.0%')}"),
        (2, f"signal {_share(signal_share(row))}"),
        (
            5,
            f"groups {_number(row, 'train/groups/trained', '.0f')}/{_number(row, 'train/groups/asked', '.0f')}",
        ),
        *([(3, f"failed attempts {failed:.0f}")] if failed else []),
        (4, f"{_number(row, 'time/total', '.1f')} s/step"),
        (6, f"entropy {_number(row, 'train/entropy')}"),
        (7, f"gap {_number(row, 'train/logprob_gap/mean', '.1e')}"),
    ]


class _Line(ProgressColumn):
    """The whole line; rich would cut step and times first where it is too narrow."""

    def __init__(self, text: Callable[[], str]) -> None:
        super().__init__()
        self.text = text

    def render(self, task: Task) -> Text:
        return Text(self.text(), no_wrap=True, overflow="ellipsis")


class Display:
    """Says where a run is. `total` steps; `now` is a clock in seconds."""

    def __init__(
        self,
        total: int,
        quiet: bool,
        *,
        console: Console | None = None,
        now: Callable[[], float] = time.monotonic,
        line_s: float = LINE_S,
    ) -> None:
        self.total, self.quiet, self.now, self.line_s = total, quiet, now, line_s
        self.console = console or Console(stderr=True)
        self.live = self.console.is_terminal and not quiet
        self.progress = Progress(
            _Line(lambda: self.line(self.console.width)),
            console=self.console,
            disable=not self.live,
        )
        self.progress.add_task("training", total=total)
        self._lock = threading.Lock()
        self._began = self._said = self._stepped = now()
        self._done, self._parts = 0, list[Part]()
        self._times: deque[float] = deque(maxlen=_RECENT)
        self._end = threading.Event()

    def __enter__(self) -> Display:
        self.progress.start()
        if not self.live and not self.quiet:
            threading.Thread(target=self._watch, name="mmrl-display", daemon=True).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end.set()
        self.progress.stop()

    def begin(self, step: int) -> None:
        """Training begins after `step`: what came before (loading, the first evaluation) says nothing about the time of a step."""
        self._done, self._stepped = step, self.now()

    def step(self, step: int, parts: Sequence[Part]) -> None:
        """`step` has been taken; `parts` of its line."""
        with self._lock:
            first, now = not self._parts, self.now()
            self._times.append((now - self._stepped) / max(1, step - self._done))
            self._done, self._stepped, self._parts = step, now, list(parts)
            due = first or step == self.total or now - self._said >= self.line_s / 2
        if due and not self.live:
            self._print(self.line(None))

    def line(self, width: int | None) -> str:
        """Step, elapsed time, estimated time to the end, and what of the last step's parts fits into `width` columns."""
        left = (
            sum(self._times) / len(self._times) * (self.total - self._done) if self._times else None
        )
        times = [
            (0, f"step {self._done}/{self.total}"),
            (0, clock(self.now() - self._began)),
            (0, f"ETA {'-' if left is None else clock(left)}"),
        ]
        return fit_parts([*times, *self._parts], width)

    def tick(self) -> None:
        """In a log: a line where nothing was said for `line_s` seconds, because a step or an evaluation takes longer."""
        if self.now() - self._said >= self.line_s:
            under_way = clock(self.now() - self._stepped)
            self._print(
                f"{self.line(None)}  (at step {min(self._done + 1, self.total)} for {under_way})"
            )

    def say(self, text: str, style: str = "") -> None:
        """A line of its own; with a `style` also when the display is quiet."""
        if not self.quiet or style:
            self.progress.console.print(
                text, style=style, highlight=False, markup=False, soft_wrap=not self.live
            )
            self._said = self.now()

    def _print(self, text: str) -> None:
        if not self.quiet:
            self.console.print(text, highlight=False, soft_wrap=True, markup=False)
            self._said = self.now()

    def _watch(self) -> None:
        while not self._end.wait(self.line_s / 10):
            self.tick()
