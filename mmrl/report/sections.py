"""The tables of the page: alarms, timing, configuration and versions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mmrl.config import AlarmConfig
from mmrl.diagnostics.diagnosis import signal_share
from mmrl.report.charts import Line, bar_chart, line_chart, share_bar
from mmrl.report.load import Run, Series, number
from mmrl.report.text import esc, plural, short, span

__all__ = ["alarms", "configuration", "dead_note", "timing"]

PHASES = {"rollout": "c1", "environment": "c7", "reward": "c3", "logprobs": "c6", "update": "c2"}
BESIDE = {"eval": "c5", "checkpoint": "c4"}


_COUNTED_STEPS = AlarmConfig().steps
"""A shorter run cannot raise the alarms that count steps in a row (unless it set alarms.steps lower)."""


def dead_note(run: Run) -> str:
    """In red: that nothing was trained in any step of the run, with the numbers that say why; '' where something was."""
    norms = [number(row.get("train/grad_norm")) for row in run.metrics]
    if not norms or any(norms) or not any("train/grad_norm" in row for row in run.metrics):
        return ""
    count, facts = len(norms), []
    for label, name in (
        ("of answers kept the format", "train/parse_rate"),
        ("were cut at the length limit", "train/clipped_share"),
        ("of groups had signal", ""),
    ):
        values = [
            v
            for row in run.metrics
            if (v := number(row.get(name)) if name else _signal(row)) is not None
        ]
        if values and not (name == "train/parse_rate" and "train/episodes" in run.metrics[0]):
            facts.append(f"{100 * sum(values) / len(values):.1f} % {label}")
    return (
        f'<p class="dead">Nothing was trained in {"any of the" if count > 1 else "the"} {plural(count, "step")}'
        f"{': ' + esc(', '.join(facts)) if facts else ''}. The weights are those the run began with.</p>"
    )


def _signal(row: Mapping[str, Any]) -> float | None:
    return signal_share({name: number(value) for name, value in row.items() if "/groups/" in name})


def alarms(run: Run) -> str:
    """What the alarm board raised, in order of step. That it raised none is only said of a run that was trained and long enough."""
    dead = dead_note(run)
    if not run.alarms:
        if "alarms.jsonl is missing" in run.notes:
            return f'{dead}<p class="missing">alarms.jsonl is missing.</p>'
        if not run.metrics:
            return '<p class="missing">No step has been taken yet: no alarm could be raised.</p>'
        if dead or len(run.metrics) < _COUNTED_STEPS:
            return (
                f'{dead}<p class="missing">No alarm was raised in {plural(len(run.metrics), "step")}; most count '
                f"{_COUNTED_STEPS} steps in a row.</p>"
            )
        return f'<p class="calm">No alarm was raised in {plural(len(run.metrics), "step")}.</p>'
    shown = run.alarms[:100]
    items = "".join(
        f'<li class="{"error" if a.get("severity") == "error" else "warning"}"><span class="step">'
        f"step {esc(a['step'])}</span>"
        f"<b>{esc(str(a.get('name', 'alarm')).replace('_', ' '))}</b><span "
        f'class="sev">{esc(a.get("severity") or "warning")}</span>'
        f"<p>{esc(str(a.get('message', ''))[:2000])}</p></li>"
        for a in shown
    )
    hidden = len(run.alarms) - len(shown)
    more = f'<p class="note">{hidden:,} more in alarms.jsonl</p>' if hidden else ""
    return f'{dead}<ul class="alarms">{items}</ul>{more}'


def _seconds(run: Run) -> tuple[dict[str, Series], dict[str, Series]]:
    """Per step: phases within time/total (with what they leave over), and phases beside it."""
    inside = {p: run.series(f"time/{p}") for p in PHASES}
    beside = {p: run.series(f"time/{p}") for p in BESIDE}
    inside = {p: s for p, s in inside.items() if s}
    rest: Series = []
    for i, (step, total) in enumerate(run.series("time/total")):
        known = sum(s[i][1] or 0.0 for s in inside.values())
        rest.append((step, max(0.0, total - known) if total is not None else None))
    if sum(v or 0.0 for _, v in rest) > 0:
        inside["other"] = rest
    return inside, {p: s for p, s in beside.items() if s}


def timing(run: Run) -> str:
    """Seconds per phase stacked per step, shares of the whole, throughput and memory."""
    inside, beside = _seconds(run)
    if not inside and not beside:
        return '<p class="missing">metrics.jsonl holds no time/* yet.</p>'
    colors = {**PHASES, **BESIDE, "other": "gray"}
    totals = {p: sum(v or 0.0 for _, v in s) for p, s in {**inside, **beside}.items()}
    whole = sum(totals.values())
    counts = {p: sum(v is not None for _, v in s) for p, s in {**inside, **beside}.items()}
    rows = "".join(
        f'<tr><td><i class="swatch" style="--c:var(--{colors[p]})"></i>{p}</td><td class="num">{span(t)}</td>'
        f'<td class="num">{100 * t / whole if whole else 0:.1f} %</td><td class="num">{short(t / counts[p])} s</td>'
        f"</tr>"
        for p, t in totals.items()
        if counts[p]
    )
    table = (
        f'<div class="card"><h3>Where the time went <small>{span(whole)} in all</small></h3>'
        f"{share_bar([(p, t, colors[p]) for p, t in totals.items()])}<table><thead><tr><th>phase</th><th "
        f'class="num">time</th>'
        f'<th class="num">share</th><th class="num">each time</th></tr></thead><tbody>{rows}</tbody></table>'
        f"</div>"
    )
    x_range = (0.0, float(max(1, run.last_step)))
    charts = [
        bar_chart("Each step", [Line(p, s, colors[p]) for p, s in inside.items()], unit="seconds"),
        _event_chart("Evaluation and checkpoints", beside, colors),
        line_chart(
            "Speed",
            [Line("tokens", run.series("speed/tokens_per_s"), "c1", noisy=True)],
            unit="tokens per second",
            zero=True,
            x_range=x_range,
        ),
        line_chart(
            "Peak memory",
            [Line("memory", run.series("memory/peak_gib"), "c1")],
            unit="GiB",
            zero=True,
            x_range=x_range,
        ),
    ]
    return f'<div class="charts timing">{table}{"".join(f"<div class=card>{c}</div>" for c in charts if c)}</div>'


def _event_chart(title: str, beside: Mapping[str, Series], colors: Mapping[str, str]) -> str:
    """Phases that happen now and then: bars only at their steps."""
    steps = sorted({s for points in beside.values() for s, v in points if v is not None})
    lines = [
        Line(p, [(s, dict(points).get(s)) for s in steps], colors[p])
        for p, points in beside.items()
    ]
    return bar_chart(title, lines, unit="seconds")


def _pairs(title: str, values: Any) -> str:
    if not isinstance(values, Mapping) or not values:
        return ""
    rows = "".join(f"<tr><td>{esc(k)}</td><td>{esc(v)}</td></tr>" for k, v in values.items())
    return f'<div class="card"><h3>{esc(title)}</h3><table class="pairs"><tbody>{rows}</tbody></table></div>'


def configuration(run: Run) -> str:
    """Command, configuration, versions, machine and evaluation protocol, folded."""
    line = run.info.get("command")
    command = f'<p class="note">Command</p><pre class="code">{esc(line)}</pre>' if line else ""
    text = (
        f"<details><summary>config.yaml <small>{plural(run.config_text.count(chr(10)), 'line')}</small></summary>"
        f'<pre class="code">{esc(run.config_text[:200_000])}</pre></details>'
        if run.config_text
        else '<p class="missing">config.yaml is missing.</p>'
    )
    protocol = (
        {k: v for k, v in run.evals[-1].protocol.items() if k != "versions"} if run.evals else {}
    )
    tables = (
        _pairs("Versions", run.info.get("versions"))
        + _pairs("Machine", run.info.get("machine"))
        + _pairs("Evaluation protocol", protocol)
    )
    folded = (
        f'<details><summary>Versions, machine, protocol</summary><div class="charts">{tables}</div></details>'
        if tables
        else '<p class="missing">run.json names no versions.</p>'
    )
    return command + text + folded
