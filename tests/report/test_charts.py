"""Drawing: ticks, gaps, thinning, and that a chart's embedded numbers are the run's."""

from __future__ import annotations

import json
import math
import re
from itertools import pairwise
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmrl.report.charts import (
    MAX_POINTS,
    Line,
    bar_chart,
    bucketed,
    line_chart,
    nice_ticks,
    smoothing_note,
    sparkline,
    trailing_mean,
)
from mmrl.report.text import cut_text, esc, interval, short, span

FINITE = st.floats(-1e9, 1e9, allow_nan=False)


def data_of(figure: str) -> dict:
    """The numbers a figure carries for its read-out."""
    found = re.search(r'<script type="application/json">(.*?)</script>', figure, re.S)
    assert found
    return json.loads(found.group(1))


def paths(figure: str, kind: str) -> list[str]:
    """The `d` of all paths of a class."""
    return re.findall(rf'<path class="{kind}"[^>]* d="([^"]*)"', figure)


@given(st.floats(-1e6, 1e6), st.floats(1e-6, 1e6))
def test_ticks_are_few_round_and_inside(low: float, width: float) -> None:
    high = low + width
    ticks = nice_ticks(low, high)
    slack = 1e-6 * width + 1e-9 * abs(low)
    assert len(ticks) <= 6 and all(low - slack <= t <= high + slack for t in ticks)
    steps = {round(math.log10(b - a), 6) % 1 for a, b in pairwise(ticks) if b > a}
    allowed = [math.log10(f) % 1 for f in (1, 2, 2.5, 5)] + [1.0]
    assert all(min(abs(s - a) for a in allowed) < 0.01 for s in steps) or width < 1e-6 * abs(low)


@given(st.lists(st.one_of(st.none(), FINITE), min_size=1, max_size=1500))
def test_thinning_keeps_the_mean_and_the_last_step(values: list[float | None]) -> None:
    points = [(float(i), v) for i, v in enumerate(values)]
    thin, size = bucketed(points)
    assert len(thin) <= MAX_POINTS and thin[-1][0] == points[-1][0]
    assert size == max(1, math.ceil(len(values) / MAX_POINTS)) and (size > 1 or thin == points)


@given(
    st.lists(st.tuples(st.one_of(st.none(), FINITE)), min_size=1, max_size=60),
    st.booleans(),
    st.booleans(),
)
def test_any_series_draws_well_formed_markup_inside_the_plot(
    rows: list[tuple], log: bool, zero: bool
) -> None:
    points = [(float(i), v) for i, (v,) in enumerate(rows)]
    figure = line_chart("t", [Line("a", points, noisy=True, dots=True)], log=log, zero=zero)
    assert bool(figure) == any(v is not None for _, v in points)
    if figure:
        ElementTree.fromstring(figure.replace(" hidden>", ' hidden="">'))
        for d in paths(figure, "line"):
            ys = [float(y) for y in re.findall(r"[ML][-\d.]+ ([-\d.]+)", d)]
            assert all(-0.1 <= y <= 400.1 for y in ys)


def test_ticks_of_tiny_values_stay_apart() -> None:
    assert nice_ticks(0, 3.1e-13) == [0.0, 1e-13, 2e-13, 3e-13]


def test_gaps_break_the_line_and_are_not_invented() -> None:
    figure = line_chart("t", [Line("a", [(1, 0.1), (2, None), (3, 0.3), (4, 0.4)])])
    [d] = paths(figure, "line")
    assert d.count("M") == 2 and d.count("L") == 1
    assert data_of(figure)["s"][0]["v"] == [0.1, None, 0.3, 0.4]


def test_axis_is_logarithmic_only_for_wide_positive_ranges() -> None:
    wide, zero = [(0, 1e-5), (1, 1.0)], [(0, 0.0), (1, 1.0)]
    assert "log scale" in line_chart("t", [Line("a", wide)], log=True)
    assert "log scale" not in line_chart("t", [Line("a", zero)], log=True)
    assert "log scale" not in line_chart("t", [Line("a", wide)])


def test_a_line_of_zeros_has_no_negative_half() -> None:
    """A KL of 0 in every step was drawn between -0.05 and 0.05."""
    assert "−" not in line_chart("t", [Line("a", [(1, 0.0), (2, 0.0)])]), (
        "labels have a minus of their own"
    )
    assert "−" in line_chart("t", [Line("a", [(1, -1.0), (2, 0.0)])])


def test_bars_stack_to_their_sum() -> None:
    figure = bar_chart("t", [Line("a", [(1, 1.0), (2, 2.0)]), Line("b", [(1, 3.0), (2, None)])])
    low, high = (re.findall(r"M[\d.]+ ([\d.]+)H[\d.]+V([\d.]+)", d) for d in paths(figure, "bar"))
    assert low[0][0] == high[0][1]  # b starts where a ends
    assert float(high[0][0]) < float(low[1][0]) < float(low[0][0])  # 1 + 3 above 2 above 1
    assert len(high) == 1


def test_nothing_to_draw_is_nothing() -> None:
    assert (
        line_chart("t", [])
        == line_chart("t", [Line("a", [(1, None)])])
        == bar_chart("t", [])
        == sparkline([])
        == ""
    )


def test_hostile_names_stay_text() -> None:
    name = "</script><script>alert(1)</script>"
    figure = line_chart("<b>t", [Line(name, [(1, 0.1), (2, 0.2)]), Line("b", [(1, 1.0)])])
    assert figure.count("<script") == figure.count("</script") == 1 and "<b>t" not in figure
    assert data_of(figure)["s"][0]["n"] == name


def test_trailing_mean_and_its_note() -> None:
    assert trailing_mean([(1, 1.0), (2, None), (3, 3.0), (4, 5.0)], 3) == [
        (1, 1.0),
        (2, None),
        (3, 2.0),
        (4, 4.0),
    ]
    assert smoothing_note(29) == "" and "each step, bold: mean of 10 steps" in smoothing_note(200)
    assert "mean of 4 steps" in smoothing_note(1000)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (0.04213, "0.0421"),
        (3.14159, "3.14"),
        (1234.5, "1,234"),
        (12, "12"),
        (1e-6, "1e−6"),
        (-0.5, "−0.5"),
        (None, "–"),
        (math.nan, "–"),
        (2.5e9, "2.5e9"),
        (999.7, "1,000"),
        (0.1, "0.1"),
    ],
)
def test_numbers_have_about_three_digits(value: float | None, text: str) -> None:
    assert short(value) == text


def test_intervals_and_spans_read_well() -> None:
    e = {"mean": 0.58312, "low": 0.5514, "high": 0.6129, "n": 120}
    assert interval(e) == ("0.583", "[0.551, 0.613]")
    assert interval({"mean": -0.01, "low": -0.03, "high": 0.01}, signed=True) == (
        "−0.010",
        "[−0.030, +0.010]",
    )
    assert interval({"mean": 1.0, "low": math.nan, "high": math.nan}) == ("1.000", "")
    assert interval({}) == ("–", "")
    assert (span(4.25), span(100), span(600), span(11100)) == (
        "4.25 s",
        "100 s",
        "10 min",
        "3 h 05 min",
    )


def test_text_is_escaped_and_cut() -> None:
    assert esc("<script>&\"'") == "&lt;script&gt;&amp;&quot;&#x27;"
    assert esc("a\x00b\x1b[31m\r") == "a␀b␛[31m␍"
    assert esc("\ud83d") == "?" and esc("🙂") == "🙂"
    cut = cut_text("x" * 100_000, 50)
    assert cut.startswith("x" * 50 + "<span") and "100,000 characters" in cut and len(cut) < 200
