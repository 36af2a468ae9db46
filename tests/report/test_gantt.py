"""The schedule's section: bars are where the spans were, words say the measured numbers, damaged files are told.

pytest tests/report/test_gantt.py
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmrl.diagnostics.timeline import Timeline
from mmrl.report import build_report
from mmrl.report.gantt import StepTimes, gantt, read_timeline, words
from mmrl.report.load import Run

SPANS = st.lists(
    st.tuples(
        st.sampled_from(["render", "train", "what <is> this"]),
        st.sampled_from(["w0", "w1", "<b>&"]),
        st.integers(0, 90),
        st.integers(1, 10),
    ),
    min_size=1,
    max_size=15,
)


def pipelined_step(timeline: Timeline, step: int, begin: float) -> None:
    """Two workers render in turns with inference; each group trains when it closes: what a step looks like."""
    timeline.begin_step(step, begin)
    for wave in range(8):
        at = begin + wave
        for worker in range(2):
            timeline.add("render", f"worker {worker}", at, at + 0.85 - 0.1 * worker)
        timeline.add("infer", "infer", at + 0.1, at + 0.5)
        if wave:
            timeline.add("train", "train", at, at + 0.6)
        timeline.count("train queue", wave % 3, at)
    timeline.add("train", "train", begin + 8, begin + 8.6)
    timeline.end_step(step, begin + 8.7)


def run_with_timeline(folder: Path) -> Path:
    """Adds timeline files to a run's folder."""
    timeline = Timeline({"render": 2, "infer": 1, "train": 1})
    for number in range(3):
        pipelined_step(timeline, 10 * (number + 1), 20.0 * number)
        timeline.write_step(folder / "timeline", 10 * (number + 1))
    return folder


def bars(figure: str) -> list[tuple[str, float, float, float]]:
    """(color, top, begin, end) of every bar."""
    found = []
    for color, d in re.findall(r'<path class="bar" style="--c:var\(--(\w+)\)" d="([^"]*)"', figure):
        found += [
            (color, float(top), float(a), float(b))
            for a, top, b in re.findall(r"M([\d.]+) ([\d.]+)H([\d.]+)V", d)
        ]
    return found


@given(SPANS)
def test_every_span_is_a_bar_where_it_was(rows: list[tuple[str, str, int, int]]) -> None:
    times = StepTimes(
        3, 100.0, {}, [(s, lane, float(a), float(a + n)) for s, lane, a, n in rows], {}, None, None
    )
    figure = gantt(times)
    ElementTree.fromstring(figure)  # well formed, whatever the names are
    drawn = bars(figure)
    assert sorted((round(a), round(b)) for _, _, a, b in drawn) == sorted(
        (10 * a, 10 * (a + n)) for _, _, a, n in rows
    )
    assert len({top for _, top, _, _ in drawn}) == len({lane for _, lane, _, _ in rows})
    assert len({color for color, *_ in drawn}) == len({stage for stage, *_ in rows})


def test_the_section_shows_the_last_step_and_says_its_numbers(new_run: Callable[..., Path]) -> None:
    page = build_report(run_with_timeline(new_run())).read_text(encoding="utf-8")
    section = page[
        page.index('<section id="schedule">') : page.index('<section id="configuration">')
    ]
    assert (
        '<a href="#schedule">Schedule</a>' in page and section.count('<figure class="gantt"') == 3
    )
    assert (
        section.index("Step 30 ")
        < section.index("Earlier steps")
        < section.index("Step 20 ")
        < section.index("Step 10 ")
    )
    # render (8 * 0.85 + 8 * 0.75) of 2 * 8.7 s; infer 3.2 and train 4.8 of 8.7 s; 6.4 + 3.2 + 4.8 = 14.4 s one after the other
    assert (
        "<b>render</b> idle <b>26 %</b> of 2 workers, <b>infer</b> idle <b>63 %</b>, <b>train</b> idle <b>45 %</b>."
        in section
    )
    assert (
        "would have taken 14 s; the step took 60 % of that; perfect overlap would take 44 % (the busiest workers)"
        in section
    )
    assert "<td>train queue</td>" in section and "Idle share" in section


def test_a_run_without_timeline_has_no_section(new_run: Callable[..., Path]) -> None:
    assert "schedule" not in re.findall(
        r'<section id="(\w+)">', build_report(new_run()).read_text(encoding="utf-8")
    )


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        '{"step": 1}',
        '{"step": 1, "wall_s": 0}',
        '{"step": "x", "wall_s": 2}',
        '{"step": 1, "wall_s": NaN}',
    ],
)
def test_a_damaged_file_is_told(tmp_path: Path, text: str) -> None:
    (tmp_path / "timeline").mkdir()
    (tmp_path / "timeline" / "step_000001.json").write_text(text, encoding="utf-8")
    run = Run(tmp_path)
    assert read_timeline(run) == [] and run.notes == [
        "timeline/step_000001.json is not a complete timeline"
    ]


def test_damaged_parts_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "timeline").mkdir()
    (tmp_path / "timeline" / "step_000001.json").write_text(
        json.dumps(
            {
                "step": 1,
                "wall_s": 2.0,
                "bound": "high",
                "ratio": None,
                "queues": [1],
                "stages": {
                    "train": {"busy_s": 1.0, "workers": 1, "bubble": 0.5},
                    "infer": {"busy_s": None},
                    "render": 3,
                },
                "spans": [
                    ["train", "t", 0, 1000],
                    ["train", "t", 5],
                    7,
                    ["train", "t", 9, 3],
                    ["train", "t", -50, 9e9],
                ],
            }
        ),
        "utf-8",
    )
    (times,) = read_timeline(Run(tmp_path))
    assert times.spans == [("train", "t", 0.0, 1.0), ("train", "t", 0.0, 2.0)] and set(
        times.stages
    ) == {"train"}
    assert (
        words(times) == "<b>train</b> idle <b>50 %</b>."
        and times.bound is None
        and times.queues == {}
    )


def test_stages_that_share_workers_are_named_together() -> None:
    stages = {"render": (12.0, 2.0, 0.2), "reset": (4.0, 2.0, 0.2), "train": (4.0, 1.0, 0.6)}
    times = StepTimes(
        1,
        10.0,
        stages,
        [],
        {},
        None,
        None,
        {"render": ("render", "reset"), "reset": ("render", "reset")},
    )
    assert words(times, html=False) == "reset + render idle 20 % of 2 workers, train idle 60 %."


def test_many_lanes_are_counted_not_drawn() -> None:
    times = StepTimes(
        1, 1.0, {}, [("render", f"worker {i:02d}", 0.0, 1.0) for i in range(40)], {}, None, None
    )
    assert len(bars(gantt(times))) == 24 and "16 lanes not shown" in gantt(times)
