"""What a run says while it trains: on a terminal of 80 columns, and in a log."""

from __future__ import annotations

import io
from itertools import pairwise
from typing import Any

import pytest
from rich.console import Console

from mmrl.cli.display import Display, clock, fit_parts, step_parts

ROW = {
    "step": 12,
    "train/reward/mean": 0.123456,
    "train/parse_rate": 0.97,
    "train/groups/asked": 96.0,
    "train/groups/failed": 0.0,
    "train/groups/kept": 60.0,
    "train/iou": 0.333,
    "train/entropy": 0.81,
    "train/logprob_gap/mean": 2.3e-7,
    "time/total": 52.13,
}


class Clock:
    """A clock that stands still until it is set on."""

    seconds = 1000.0

    def __call__(self) -> float:
        return self.seconds


def display(
    width: int, *, terminal: bool, total: int = 500, **options: Any
) -> tuple[Display, io.StringIO, Clock]:
    text, now = io.StringIO(), Clock()
    console = Console(
        file=text, width=width, force_terminal=terminal, color_system=None, legacy_windows=False
    )
    return Display(total, False, console=console, now=now, **options), text, now


def shown(text: io.StringIO) -> str:
    """The last line that a terminal shows."""
    return [line for line in text.getvalue().replace("\r", "\n").split("\n") if "step" in line][-1]


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_a_terminal_keeps_step_elapsed_and_end_whatever_its_width(width: int) -> None:
    shows, text, now = display(width, terminal=True)
    with shows:
        shows.begin(0)
        for step in range(1, 13):
            now.seconds += 50.0
            shows.step(step, step_parts(ROW, "iou"))
    line = shown(text)
    assert "step 12/500" in line and " 10:00 " in line and "ETA 6:46:40" in line, line
    assert "parsed 97%" in line and "signal 62%" in line
    assert ("reward 0.123" in line) == (width >= 80) and ("gap 2.3e-07" in line) == (width > 120)
    assert len(line.rstrip().split("\x1b[2K")[-1]) <= width


def test_long_runs_fit_into_80_columns_too() -> None:
    shows, text, now = display(80, terminal=True, total=100_000)
    with shows:
        shows.begin(98_000)
        now.seconds += 100_000.0
        shows.step(
            98_001,
            step_parts({**ROW, "train/reward/mean": -123.456, "time/total": 99_999.9}, "iou"),
        )
    line = shown(text)
    assert all(
        words in line
        for words in ("step 98001/100000", "1d 3:46", "ETA 2313d", "parsed 97%", "signal 62%")
    ), line


def test_a_log_has_the_first_step_a_line_at_least_every_minute_and_the_last_step() -> None:
    shows, text, now = display(80, terminal=False, total=1000)
    shows.begin(0)
    for step in range(1, 1001):
        now.seconds += 1.0
        shows.step(step, step_parts(ROW, "iou"))
        shows.tick()
    lines = text.getvalue().splitlines()
    steps = [int(line.split()[1].split("/")[0]) for line in lines]
    assert steps[0] == 1 and steps[-1] == 1000 and max(b - a for a, b in pairwise(steps)) <= 60
    assert len(lines) < 40, "and not one for every step of a fast run"
    assert "ETA 16:39" in lines[0] and all(
        f in lines[0] for f in ("reward 0.123", "parsed 97%", "signal 62%", "52.1 s/step")
    )


def test_a_step_that_takes_long_is_told_of_every_minute() -> None:
    shows, text, now = display(80, terminal=False)
    shows.begin(0)
    for _ in range(20):
        now.seconds += 15.0
        shows.tick()
    assert text.getvalue().splitlines() == [
        f"step 0/500  {m}:00  ETA -  (at step 1 for {m}:00)" for m in range(1, 6)
    ]
    shows.step(1, step_parts(ROW, "iou"))
    assert text.getvalue().splitlines()[-1].startswith("step 1/500  5:00  ETA 1d 17:35  reward")


def test_the_first_evaluation_does_not_count_as_a_step() -> None:
    shows, _, now = display(80, terminal=False, total=10)
    now.seconds += 3600.0
    shows.begin(0)
    now.seconds += 2.0
    shows.step(1, [])
    assert shows.line(None) == "step 1/10  1:00:02  ETA 0:18"


def test_a_quiet_display_says_only_what_has_a_style() -> None:
    text = io.StringIO()
    shows = Display(5, True, console=Console(file=text, force_terminal=True), now=Clock())
    with shows:
        shows.step(1, step_parts(ROW, "iou"))
        shows.say("never mind")
        shows.say("alarm [/red] of [1, 2]", "bold red")
    assert (
        "step" not in text.getvalue()
        and "never" not in text.getvalue()
        and "alarm [/red] of [1, 2]" in text.getvalue()
    )


def test_robots_show_success_and_signal() -> None:
    row = {
        "train/success_once": 0.25,
        "train/groups/asked": 8.0,
        "train/groups/trained": 2.0,
        "train/groups/failed": 0.0,
    }
    assert fit_parts(step_parts(row, ""), 40) == "success rate 25%  signal 25%  - s/step"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0:00"), (59.6, "1:00"), (3599, "59:59"), (3600, "1:00:00"), (90_061, "1d 1:01")],
)
def test_times_are_short(seconds: float, text: str) -> None:
    assert clock(seconds) == text
