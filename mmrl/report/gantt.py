"""Who was busy when in a step, as a picture, and what the idle shares mean in words; from timeline/step_*.json of a run.

    mmrl report runs/embodied        # the section appears where the run's folder holds timeline files

A lane is a worker or thread, a bar is a stage at work. Written by mmrl.diagnostics.timeline; broken files are told, not fatal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mmrl.report.charts import Line, line_chart, nice_ticks
from mmrl.report.load import Run, Series, number, parse_line
from mmrl.report.text import cut_text, esc, plural, short, span

__all__ = ["StepTimes", "gantt", "read_timeline", "schedule_section"]

# in the order of a step
STAGES = {"reset": "c4", "render": "c1", "infer": "c2", "reward": "c5", "train": "c3"}
_SPARE = ("c6", "gray")
_LANE, _GAP, _W = 20.0, 6.0, 1000.0  # drawing units
_MAX_LANES, _MAX_SHOWN = 24, 3


@dataclass(frozen=True)
class StepTimes:
    """One timeline file: wall seconds, per stage (busy seconds summed over workers, workers, idle share of those), spans (stage,
    lane, begin, end) in seconds of the step, queues (mean, max) by name, stages that share their workers."""

    step: int
    wall_s: float
    stages: Mapping[str, tuple[float, float, float]]
    spans: Sequence[tuple[str, str, float, float]]
    queues: Mapping[str, tuple[float, float]]
    bound: float | None
    ratio: float | None
    teams: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def idle(self) -> dict[str, tuple[float, float]]:
        """(workers, idle share) by team: 'reset + render', 'infer', 'train'."""
        names = {
            s: " + ".join(sorted(self.teams.get(s, (s,)), key=_order))
            for s in sorted(self.stages, key=_order)
        }
        return {names[s]: self.stages[s][1:] for s in names}


def _numbers(value: Any, names: Sequence[str]) -> tuple[float, ...] | None:
    """Those entries of an object, or None when one is missing or no number."""
    found = [number(value.get(n)) for n in names] if isinstance(value, Mapping) else [None]
    return tuple(v for v in found if v is not None) if None not in found else None


def _table(value: Any, names: Sequence[str]) -> dict[str, Any]:
    rows = value.items() if isinstance(value, Mapping) else ()
    return {str(k): row for k, v in rows if (row := _numbers(v, names)) is not None}


def _span(row: Any, wall_s: float) -> tuple[str, str, float, float] | None:
    if not isinstance(row, list) or len(row) != 4:
        return None
    begin, end = number(row[2]), number(row[3])
    if begin is None or end is None or end < begin:
        return None
    return (
        str(row[0]),
        str(row[1]),
        min(max(begin / 1000, 0.0), wall_s),
        min(max(end / 1000, 0.0), wall_s),
    )


def read_timeline(run: Run) -> list[StepTimes]:
    """All steps with a timeline file, in order; files that cannot be read become notes of the run."""
    out = []
    for path in sorted((run.folder / "timeline").glob("step_*.json")):
        data = parse_line(path.read_text(encoding="utf-8", errors="replace"))
        head = _numbers(data, ("step", "wall_s"))
        if head is None or head[1] <= 0:
            run.notes.append(f"timeline/{path.name} is not a complete timeline")
            continue
        rows = data.get("spans")
        spans = [_span(row, head[1]) for row in rows] if isinstance(rows, list) else []
        stages = data.get("stages")
        teams = {
            str(k): tuple(map(str, v["team"]))
            for k, v in (stages.items() if isinstance(stages, dict) else ())
            if isinstance(v, dict) and isinstance(v.get("team"), list)
        }
        out.append(
            StepTimes(
                int(head[0]),
                head[1],
                _table(stages, ("busy_s", "workers", "bubble")),
                [s for s in spans if s is not None],
                _table(data.get("queues"), ("mean", "max")),
                number(data.get("bound")),
                number(data.get("ratio")),
                teams,
            )
        )
    return sorted(out, key=lambda t: t.step)


def _order(stage: str) -> tuple[int, str]:
    return (list(STAGES).index(stage) if stage in STAGES else len(STAGES), stage)


def colors(stages: Sequence[str]) -> dict[str, str]:
    """A CSS variable for each stage."""
    other = [s for s in sorted(set(stages)) if s not in STAGES]
    return {
        **{s: STAGES[s] for s in stages if s in STAGES},
        **{s: _SPARE[min(i, len(_SPARE) - 1)] for i, s in enumerate(other)},
    }


def gantt(times: StepTimes) -> str:
    """The lanes of one step as a figure, or '' without spans."""
    if not times.spans:
        return ""
    first = {
        lane: min((_order(s), lane) for s, name, _, _ in times.spans if name == lane)
        for lane in {s[1] for s in times.spans}
    }
    lanes = sorted(first, key=lambda lane: first[lane])
    hidden, lanes = lanes[_MAX_LANES:], lanes[:_MAX_LANES]
    color = colors([s for s, *_ in times.spans])
    height = len(lanes) * (_LANE + _GAP) + _GAP
    ticks = [t for t in nice_ticks(0.0, times.wall_s, 6) if t <= times.wall_s]
    drawing = [f'<path class="grid" d="M{_W * t / times.wall_s:.1f} 0V{height:g}"/>' for t in ticks]
    labels = []
    for number_, lane in enumerate(lanes):
        top = _GAP + number_ * (_LANE + _GAP)
        labels.append(
            f'<span style="top:{100 * (top + _LANE / 2) / height:.2f}%" title="{esc(lane)}">{cut_text(lane, 22)}</span>'
        )
        for stage in sorted({s for s, name, _, _ in times.spans if name == lane}, key=_order):
            bars = "".join(
                f"M{_W * a / times.wall_s:.1f} {top:g}H{max(_W * b / times.wall_s, _W * a / times.wall_s + 0.6):.1f}"
                f"V{top + _LANE:g}H{_W * a / times.wall_s:.1f}Z"
                for s, name, a, b in times.spans
                if s == stage and name == lane
            )
            drawing.append(f'<path class="bar" style="--c:var(--{color[stage]})" d="{bars}"/>')
    legend = "".join(
        f'<span class="key"><i style="--c:var(--{color[s]})"></i>{esc(s)}</span>'
        for s in sorted(color, key=_order)
    )
    seconds = "".join(
        f'<span style="left:{100 * t / times.wall_s:.2f}%">{short(t)}</span>' for t in ticks
    )
    more = f" · {plural(len(hidden), 'lane')} not shown" if hidden else ""
    widest = max(min(len(lane), 22) for lane in lanes)
    return (
        f'<figure class="gantt" style="margin:0" aria-label="step {times.step}: {esc(words(times, html=False))}"><figcaption>'
        f'<div class="title">Step {times.step:,} <small>{span(times.wall_s)}{more}</small></div>'
        f'<div class="legend">{legend}</div></figcaption><div class="plot" style="--gutter:{widest + 2}ch">'
        f'<div class="ylab" aria-hidden="true">{"".join(labels)}</div>'
        f'<div class="canvas" style="--plot:{height:g}px;cursor:default"><svg viewBox="0 0 {_W:g} {height:g}" '
        f'preserveAspectRatio="none" aria-hidden="true">{"".join(drawing)}</svg></div>'
        f'<em aria-hidden="true">s</em><div class="xlab" aria-hidden="true">{seconds}</div></div></figure>'
    )


def words(times: StepTimes, *, html: bool = True) -> str:
    """Idle shares and the bound in a sentence or two."""

    def strong(text: str) -> str:
        return f"<b>{text}</b>" if html else text

    parts = [
        f"{strong(esc(team) if html else team)} idle {strong(f'{100 * bubble:.0f} %')}"
        f"{f' of {workers:g} workers' if workers > 1 else ''}"
        for team, (workers, bubble) in times.idle().items()
    ]
    text = ", ".join(parts) + "." if parts else ""
    if times.bound is not None and times.ratio is not None:
        text += (
            f" The stages one after the other would have taken {span(times.wall_s / times.ratio)}; the step took "
            f"{100 * times.ratio:.0f} % of that; perfect overlap would take {100 * times.bound:.0f} % (the busiest workers)."
        )
    return text


def _stage_table(times: StepTimes) -> str:
    color = colors(list(times.stages))
    rows = "".join(
        f'<tr><td><i class="swatch" style="--c:var(--{color[stage]})"></i>{esc(stage)}</td><td class="num">{workers:g}</td>'
        f'<td class="num">{span(busy / workers) if workers else "–"}</td>'
        f'<td class="num">{100 * busy / (workers * times.wall_s) if workers else 0:.1f} %</td>'
        f'<td class="num">{100 * bubble:.1f} %</td></tr>'
        for stage, (busy, workers, bubble) in sorted(
            times.stages.items(), key=lambda kv: _order(kv[0])
        )
    )
    queues = "".join(
        f'<tr><td>{esc(name)}</td><td class="num">{short(mean)}</td><td class="num">{short(top)}</td></tr>'
        for name, (mean, top) in sorted(times.queues.items())
    )
    depth = (
        f'<table><thead><tr><th>queue</th><th class="num">mean</th><th class="num">most</th></tr></thead><tbody>{queues}'
        "</tbody></table>"
        if queues
        else ""
    )
    return (
        f'<div class="card"><h3>Step {times.step:,}</h3><table><thead><tr><th>stage</th><th class="num">workers</th>'
        '<th class="num">busy, each</th><th class="num">busy</th><th class="num">idle</th></tr></thead>'
        f"<tbody>{rows}</tbody></table>{depth}</div>"
    )


def _over_steps(found: Sequence[StepTimes]) -> list[str]:
    """Idle shares and the share of the bound over the steps that have a timeline."""
    if len(found) < 2:
        return []
    shares = [t.idle() for t in found]
    names = list(dict.fromkeys(team for share in shares for team in share))
    color = {team: colors(team.split(" + "))[team.split(" + ")[-1]] for team in names}

    def idle(team: str) -> Series:
        return [
            (float(t.step), share[team][1] if team in share else None)
            for t, share in zip(found, shares, strict=True)
        ]

    reached: Series = [
        (float(t.step), t.bound / t.ratio if t.bound and t.ratio else None) for t in found
    ]
    return [
        chart
        for chart in (
            line_chart(
                "Idle share",
                [Line(n, idle(n), color[n], dots=True) for n in names],
                percent=True,
                zero=True,
                bounds=(0.0, 1.0),
            ),
            line_chart(
                "Busiest workers / step",
                [Line("busiest workers / step", reached, "c1", dots=True)],
                percent=True,
                zero=True,
                bounds=(0.0, 1.0),
                note="100 %: perfect overlap",
            ),
        )
        if chart
    ]


def schedule_section(run: Run) -> str:
    """The section, '' for a run without timeline files: the last step drawn, its table, earlier ones folded, curves."""
    found = read_timeline(run)
    if not found:
        return ""
    shown = found[-1:] + [t for t in found[:-1] if t.spans][-(_MAX_SHOWN - 1) :][::-1]
    picture, *earlier = [
        f'<div class="card">{drawn}<p class="note">{words(t)}</p></div>'
        for t in shown
        if (drawn := gantt(t))
    ] or [""]
    rest = (
        f'<details><summary>Earlier steps <small>{len(earlier)}</small></summary><div class="charts wide">{"".join(earlier)}'
        "</div></details>"
        if earlier
        else ""
    )
    cards = "".join(
        [_stage_table(found[-1]), *(f'<div class="card">{c}</div>' for c in _over_steps(found))]
    )
    return f'{picture}<div class="charts" style="margin-top:16px">{cards}</div>{rest}'
