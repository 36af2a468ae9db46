"""Charts as inline SVG without any library: lines with interval bands, stacked bars, intervals on a track, sparklines.

The drawing stretches to the width of its card (strokes keep their width), while axis labels are HTML at percent
positions, so text has the same size on a phone and on a wide screen. Each figure carries its numbers as JSON for the
read-out under the pointer.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from mmrl.report.load import Series
from mmrl.report.text import esc, short

__all__ = [
    "Line",
    "bar_chart",
    "bucketed",
    "line_chart",
    "nice_ticks",
    "share_bar",
    "smoothing_note",
    "sparkline",
    "track",
    "trailing_mean",
]

NOISY = 30  # from this many points on a trailing mean is drawn over noisy ones
MAX_POINTS = 300  # more points than pixels of a card only make the file large
W, H = 1000.0, 400.0  # drawing units of a plot


@dataclass(frozen=True)
class Line:
    """One curve. `color` names a CSS variable (c1 ... c7, gray); `low` and `high` draw a band.

    `noisy` draws each point faintly and a trailing mean over them boldly; `dots` marks the points.
    """

    name: str
    points: Series
    color: str = "c1"
    low: Series | None = None
    high: Series | None = None
    noisy: bool = False
    dots: bool = False
    extra: Sequence[str] = ()  # words for the read-out, one per point


def nice_ticks(low: float, high: float, count: int = 4) -> list[float]:
    """About `count` round numbers (1, 2, 2.5 or 5 times a power of ten) within [low, high]."""
    if not high > low:
        return [low]
    raw = (high - low) / max(1, count)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * f for f in (1, 2, 2.5, 5, 10) if power * f >= raw * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [float(f"{i * step:.12g}") for i in range(first, last + 1)]


def bucketed(points: Series, limit: int = MAX_POINTS) -> tuple[Series, int]:
    """At most `limit` points: means of runs of neighbours (gaps stay gaps), and how many each stands for."""
    size = max(1, math.ceil(len(points) / limit))
    if size == 1:
        return list(points), 1
    out: Series = []
    for start in range(0, len(points), size):
        part = points[start : start + size]
        values = [v for _, v in part if v is not None]
        out.append((part[-1][0], sum(values) / len(values) if values else None))
    return out, size


def trailing_mean(points: Series, window: int) -> Series:
    """Mean of each point and the `window` - 1 before it; gaps stay gaps and are left out of means."""
    out: Series = []
    for i, (x, v) in enumerate(points):
        values = [w for _, w in points[max(0, i - window + 1) : i + 1] if w is not None]
        out.append((x, sum(values) / len(values) if v is not None else None))
    return out


@dataclass(frozen=True)
class _Axis:
    """Maps a value to [0, 1]; logarithmic when the values span more than two decades."""

    low: float
    high: float
    log: bool = False

    def at(self, v: float) -> float:
        if self.log:
            return math.log10(max(v, self.low) / self.low) / math.log10(self.high / self.low)
        return (v - self.low) / (self.high - self.low)

    def ticks(self) -> list[float]:
        if not self.log:
            return nice_ticks(self.low, self.high)
        powers = range(
            math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high) + 1e-9) + 1
        )
        every = max(1, math.ceil(len(powers) / 5))
        return [10.0**p for p in list(powers)[::every]]


def _y_axis(
    values: Sequence[float], zero: bool, bounds: tuple[float, float] | None, log: bool
) -> _Axis:
    low, high = min(values), max(values)
    if log and low > 1e-300 and high / low > 100:  # smaller ones have no power of ten below them
        return _Axis(10.0 ** math.floor(math.log10(low)), 10.0 ** math.ceil(math.log10(high)), True)
    if zero:
        low, high = min(0.0, low), max(0.0, high)
    pad = 0.08 * (high - low) or 0.1 * abs(high) or 0.05
    # a line of zeros stands on its axis
    low, high = low - (0 if low == 0 and (zero or high == 0) else pad), high + pad
    if bounds:
        room = 0.02 * (high - low)  # a line at exactly 0 or 1 keeps its full width
        low, high = max(low, bounds[0] - room), min(high, bounds[1] + room)
    return _Axis(low, high) if high > low else _Axis(low, low + 1)


def _path(points: Series, x: _Axis, y: _Axis) -> str:
    """SVG path with a new piece after each gap; a lonely point becomes a zero-length piece, drawn as a dot."""
    out, pen = [], False
    for step, v in points:
        if v is not None:
            out.append(f"{'L' if pen else 'M'}{x.at(step) * W:.1f} {(1 - y.at(v)) * H:.1f}")
            if not pen:
                out.append("h0")
        pen = v is not None
    return "".join(out)


def _band(low: Series, high: Series, x: _Axis, y: _Axis) -> str:
    """Closed outlines between two curves, one per stretch where both exist."""
    pieces: list[list[tuple[float, float, float]]] = [[]]
    for (step, a), (_, b) in zip(low, high, strict=True):
        if a is not None and b is not None:
            pieces[-1].append((step, a, b))
        elif pieces[-1]:
            pieces.append([])
    out = []
    for piece in pieces:
        if len(piece) == 1:  # one evaluation: a bar a little wider than a hair
            (step, a, b), width = piece[0], 0.004 * (x.high - x.low)
            piece = [(step - width, a, b), (step + width, a, b)]
        if piece:
            corners = [(s, b) for s, _, b in piece] + [(s, a) for s, a, _ in reversed(piece)]
            out.append(
                "M"
                + "L".join(f"{x.at(s) * W:.1f} {(1 - y.at(v)) * H:.1f}" for s, v in corners)
                + "Z"
            )
    return "".join(out)


def _draw(line: Line, x: _Axis, y: _Axis) -> str:
    style = f'style="--c:var(--{line.color})"'
    out = []
    if line.low and line.high:
        out.append(f'<path class="band" {style} d="{_band(line.low, line.high, x, y)}"/>')
    points, _ = bucketed(line.points)
    if line.noisy and len(points) >= NOISY:
        out.append(f'<path class="faint" {style} d="{_path(points, x, y)}"/>')
        points = trailing_mean(points, _window(len(points)))
    out.append(f'<path class="line" {style} d="{_path(points, x, y)}"/>')
    if line.dots and len(points) <= 60:
        dots = "".join(
            f"M{x.at(s) * W:.1f} {(1 - y.at(v)) * H:.1f}h0" for s, v in points if v is not None
        )
        out.append(f'<path class="dots" {style} d="{dots}"/>')
    return "".join(out)


def _window(n: int) -> int:
    return max(5, n // 20)


def smoothing_note(num_steps: int) -> str:
    """How noisy curves of that many points are drawn, in words; '' when they are drawn as they are."""
    points, size = bucketed([(0.0, 0.0)] * num_steps)
    if len(points) < NOISY:
        return ""
    return (
        f"faint: {'mean of ' + str(size) if size > 1 else 'each'} step{'s' if size > 1 else ''}, bold: mean of "
        f"{size * _window(len(points))} steps"
    )


def _caption(title: str, unit: str, lines: Sequence[Line], note: str) -> str:
    legend = (
        "".join(
            f'<span class="key"><i style="--c:var(--{line.color})"></i>{esc(line.name)}</span>'
            for line in lines
        )
        if len(lines) > 1
        else ""
    )
    return (
        f'<figcaption><div class="title">{esc(title)}{f" <small>{esc(unit)}</small>" if unit else ""}</div>'
        f'<div class="legend">{legend}{f"<small>{esc(note)}</small>" if note else ""}</div></figcaption>'
    )


def _frame(
    caption: str,
    drawing: str,
    x: _Axis,
    y: _Axis,
    label: Callable[[float], str],
    x_unit: str,
    data: object,
    about: str,
) -> str:
    """The figure around a drawing: grid, labels, read-out and its data."""
    y_ticks = [t for t in y.ticks() if -0.001 <= y.at(t) <= 1.001]
    grid = "".join(
        f'<path class="grid{" zero" if t == 0 else ""}" d="M0 {(1 - y.at(t)) * H:.1f}H{W:g}"/>'
        for t in y_ticks
    )
    names = "".join(
        f'<span style="top:{100 * (1 - y.at(t)):.2f}%">{esc(label(t))}</span>' for t in y_ticks
    )
    x_ticks = [t for t in nice_ticks(x.low, x.high, 5) if x_unit != "step" or float(t).is_integer()]
    steps = "".join(f'<span style="left:{100 * x.at(t):.2f}%">{short(t)}</span>' for t in x_ticks)
    text = json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    widest = max((len(label(t)) for t in y_ticks), default=1)
    return (
        f'<figure class="chart" tabindex="0" aria-label="{esc(about)}">{caption}'
        f'<div class="plot" style="--gutter:{max(widest + 1, 5)}ch"><div class="ylab" aria-hidden="true">{names}'
        f"</div>"
        f'<div class="canvas"><svg viewBox="0 0 {W:g} {H:g}" preserveAspectRatio="none" '
        f'aria-hidden="true">{grid}{drawing}</svg>'
        f'<div class="cross" hidden></div><div class="readout" hidden></div></div>'
        f'<em aria-hidden="true">{esc(x_unit)}</em><div class="xlab" aria-hidden="true">{steps}</div></div>'
        f'<script type="application/json">{text}</script></figure>'
    )


def _compact(v: float | None) -> float | None:
    return None if v is None else float(f"{v:.5g}")


def _data(line: Line) -> dict[str, object]:
    points, size = bucketed(line.points)
    out: dict[str, object] = {
        "n": line.name,
        "c": line.color,
        "x": [_compact(s) for s, _ in points],
        "v": [_compact(v) for _, v in points],
    }
    if line.low and line.high and size == 1:
        out["lo"], out["hi"] = (
            [_compact(v) for _, v in line.low],
            [_compact(v) for _, v in line.high],
        )
    if line.extra and size == 1:
        out["e"] = list(line.extra)
    return out


def line_chart(
    title: str,
    lines: Sequence[Line],
    *,
    unit: str = "",
    percent: bool = False,
    zero: bool = False,
    bounds: tuple[float, float] | None = None,
    log: bool = False,
    x_range: tuple[float, float] | None = None,
    x_unit: str = "step",
    note: str = "",
) -> str:
    """A figure with curves, or '' when none of them has a point.

    `percent` labels 0..1 as 0..100 %; `zero` keeps zero in sight; `bounds` are limits a value cannot pass; `log` allows
    a logarithmic axis when the values span more than two decades.
    """
    lines = [line for line in lines if any(v is not None for _, v in line.points)]
    if not lines:
        return ""
    shown = [bucketed(line.points)[0] for line in lines]
    edges = [band for line in lines for band in (line.low, line.high) if band]
    values = [v for points in (*shown, *edges) for _, v in points if v is not None]
    steps = [s for points in shown for s, _ in points]
    low_x, high_x = x_range or (min(steps), max(steps))
    x, y = _Axis(low_x, high_x if high_x > low_x else low_x + 1), _y_axis(values, zero, bounds, log)
    size = max(bucketed(line.points)[1] for line in lines)
    notes = [
        n
        for n in (
            note,
            f"each point: mean of {size} steps" if size > 1 else "",
            "log scale" if y.log else "",
        )
        if n
    ]
    known = [v for _, v in lines[0].points if v is not None]
    about = f"{title}: {lines[0].name} from {short(known[0])} to {short(known[-1])}"
    data = {
        "x0": x.low,
        "x1": x.high,
        "unit": x_unit,
        "pct": percent,
        "s": [_data(line) for line in lines],
    }
    return _frame(
        _caption(title, unit, lines, " · ".join(notes)),
        "".join(_draw(line, x, y) for line in lines),
        x,
        y,
        _percent if percent else short,
        x_unit,
        data,
        about,
    )


def _percent(v: float) -> str:
    return f"{short(100 * v)} %"


def bar_chart(title: str, layers: Sequence[Line], *, unit: str = "", note: str = "") -> str:
    """Bars stacked per step, one layer per line (all with the same steps), or '' when there is nothing to stack."""
    layers = [line for line in layers if any(v for _, v in line.points)]
    if not layers:
        return ""
    shown = [Line(line.name, bucketed(line.points, 120)[0], line.color) for line in layers]
    steps = [s for s, _ in shown[0].points]
    size = bucketed(layers[0].points, 120)[1]
    gap = min((b - a for a, b in pairwise(steps)), default=1.0)
    totals = [sum(line.points[i][1] or 0.0 for line in shown) for i in range(len(steps))]
    x, y = _Axis(steps[0] - 0.6 * gap, steps[-1] + 0.6 * gap), _Axis(0.0, max(totals) * 1.08)
    width = 0.8 * gap / (x.high - x.low) * W
    base, drawing = [0.0] * len(steps), []
    for line in shown:
        rects = []
        for i, (s, v) in enumerate(line.points):
            if v:
                top = (1 - y.at(base[i] + v)) * H
                left, right = x.at(s) * W - width / 2, x.at(s) * W + width / 2
                rects.append(
                    f"M{left:.1f} {top:.2f}H{right:.1f}V{(1 - y.at(base[i])) * H:.2f}H{left:.1f}Z"
                )
                base[i] += v
        drawing.append(f'<path class="bar" style="--c:var(--{line.color})" d="{"".join(rects)}"/>')
    notes = " · ".join(
        n for n in (note, f"each bar: mean of {size} steps" if size > 1 else "") if n
    )
    data = {
        "x0": x.low,
        "x1": x.high,
        "unit": "step",
        "pct": False,
        "sum": len(shown) > 1,
        "s": [_data(line) for line in shown],
    }
    return _frame(
        _caption(title, unit, shown, notes),
        "".join(drawing),
        x,
        y,
        short,
        "step",
        data,
        f"{title}, stacked bars",
    )


def share_bar(parts: Sequence[tuple[str, float, str]]) -> str:
    """One bar of the whole, split into (name, amount, color)."""
    total = sum(amount for _, amount, _ in parts)
    if total <= 0:
        return ""
    return (
        '<div class="share" aria-hidden="true">'
        + "".join(
            f'<span style="--c:var(--{color});flex-grow:{amount / total:.5f}" '
            f'title="{esc(name)} {100 * amount / total:.1f} %"></span>'
            for name, amount, color in parts
            if amount > 0
        )
        + "</div>"
    )


def sparkline(points: Series) -> str:
    """A small curve without axes."""
    points, _ = bucketed(points, 100)
    values = [v for _, v in points if v is not None]
    if not values:
        return ""
    x, y = (
        _Axis(points[0][0], max(points[-1][0], points[0][0] + 1)),
        _y_axis(values, False, None, False),
    )
    return (
        f'<svg class="spark" viewBox="0 0 {W:g} {H:g}" preserveAspectRatio="none" aria-hidden="true">'
        f'<path class="line" style="--c:var(--c1)" d="{_path(points, x, y)}"/></svg>'
    )


def track(
    marks: Sequence[tuple[str, float, float | None, float | None]], low: float, high: float
) -> str:
    """Intervals on a track from `low` to `high`: (css class, mean, low, high) each, as a bar with a dot at the mean."""

    def at(v: float) -> str:
        return f"{100 * min(1.0, max(0.0, (v - low) / (high - low))):.2f}%"

    out = []
    for name, mean, a, b in marks:
        if a is not None and b is not None:
            out.append(
                f'<i class="{name} bar" style="left:{at(a)};right:calc(100% - {at(b)})"></i>'
            )
        out.append(f'<i class="{name} dot" style="left:{at(mean)}"></i>')
    return f'<div class="track" aria-hidden="true">{"".join(out)}</div>'
