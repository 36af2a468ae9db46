"""Several runs on one page: last held-out numbers in a table, curves over steps and minutes laid over each other."""

from __future__ import annotations

from collections.abc import Sequence

from mmrl.errors import DataError
from mmrl.report.charts import Line, line_chart, smoothing_note
from mmrl.report.curves import MODES, metric_names
from mmrl.report.load import EvalStep, Run, Series
from mmrl.report.text import esc, interval, metric_name, plural, span

__all__ = ["comparison_body"]

_RATES = ("success_once", "success_at_end")
_COLORS = ("c1", "c2", "c3", "c5", "c4", "c6", "gray")
_TRAINING = (
    ("Training reward", "train/reward/mean", ""),
    ("Training success", "train/success_once", "share of episodes"),
    ("Training IoU", "train/iou", ""),
    ("Right answers", "train/correct", "share of completions"),
    ("Entropy", "train/entropy", "nats per token"),
    ("Completion length", "train/length/mean", "tokens"),
    ("Gradient norm", "train/grad_norm", ""),
    ("Seconds per step", "time/total", "seconds"),
    ("Speed", "speed/tokens_per_s", "tokens per second"),
    ("Speed in simulators", "perf/control_steps_per_s", "control steps per second"),
    ("Peak memory", "memory/peak_gib", "GiB"),
)


def _names(runs: Sequence[Run]) -> list[str]:
    """One distinct name per run: its own, with the folder where two share one."""
    names = [r.name for r in runs]
    return [
        n if names.count(n) == 1 else f"{n} ({r.folder})" for n, r in zip(names, runs, strict=True)
    ]


def _metrics(evals: Sequence[EvalStep]) -> list[str]:
    """Held-out metrics in reading order. Where all runs acted, reward and parse rate only repeat the success rate."""
    found = metric_names(evals, "macro")
    acted = bool(evals) and all("max_steps" in e.protocol for e in evals)
    return [n for n in found if not acted or n not in ("reward", "parse_rate", "macro")]


def _held_out(runs: Sequence[Run], names: Sequence[str]) -> list[str]:
    found = _metrics([e for r in runs for e in r.evals])
    charts = []
    for metric in [
        n for n in found if n in ("macro", *_RATES, "iou", "acc@0.5", "correct", "reward")
    ][:3] or found[:2]:
        for mode in MODES:
            lines = []
            for i, (run, name) in enumerate(zip(runs, names, strict=True)):
                part: dict[str, Series] = {
                    k: [
                        (float(e.step), e.estimates[mode][metric][k])
                        for e in run.evals
                        if metric in e.estimates.get(mode, {})
                    ]
                    for k in ("mean", "low", "high")
                }
                lines.append(
                    Line(name, part["mean"], _COLORS[i], part["low"], part["high"], dots=True)
                )
            charts.append(line_chart(metric_name(metric), lines, unit=f"held-out, {mode}"))
    return charts


def _over_time(run: Run) -> Series:
    """Training reward against minutes of training (time/total summed)."""
    minutes, out = 0.0, []
    times = dict(run.series("time/total"))
    for step, value in run.series("train/reward/mean") or run.series("train/success_once"):
        minutes += (times.get(step) or 0.0) / 60
        out.append((minutes, value))
    return out if minutes > 0 else []


def _table(runs: Sequence[Run], names: Sequence[str]) -> str:
    found = _metrics([e for r in runs for e in r.evals[-1:]])
    front = [
        n
        for n in found
        if n in ("macro", *_RATES, "iou", "acc@0.5", "correct", "reward", "parse_rate")
    ]
    columns = [
        (m, n)
        for n in [n for n in front if n != "correct" or "acc@0.5" not in front]
        for m in MODES
    ]
    rows = []
    for run, name, color in zip(runs, names, _COLORS, strict=False):
        cells = []
        for mode, metric in columns:
            estimate = run.evals[-1].estimates.get(mode, {}).get(metric) if run.evals else None
            mean, spread = interval(estimate or {})
            cells.append(f'<td class="num"><b>{mean}</b><br><span class="ci">{spread}</span></td>')
        seconds = sum(v or 0.0 for _, v in run.series("time/total"))
        rows.append(
            f'<tr><td><i class="swatch" style="--c:var(--{color})"></i>{esc(name)}</td><td '
            f'class="num">{run.last_step:,}</td>'
            f'<td class="num">{span(seconds) if seconds else "–"}</td>{"".join(cells)}</tr>'
        )
    head = "".join(
        f'<th class="num">{esc(metric_name(n))}<br><small>{m}</small></th>' for m, n in columns
    )
    return (
        '<div class="scroll card"><table><thead><tr><th>run</th><th class="num">steps</th><th class="num">'
        "training time</th>"
        f"{head}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
    )


def comparison_body(runs: Sequence[Run]) -> str:
    """The page's body. Raises DataError for no run or more runs than there are colours to tell apart."""
    if not 1 <= len(runs) <= len(_COLORS):
        raise DataError(
            f"expected 1 to {len(_COLORS)} runs to compare, found {len(runs)}; give fewer folders"
        )
    names = _names(runs)
    charts = _held_out(runs, names)
    for title, metric, unit in _TRAINING:
        noisy = metric != "train/grad_norm"  # its spikes must not be averaged away
        lines = [
            Line(n, r.series(metric), c, noisy=noisy)
            for r, n, c in zip(runs, names, _COLORS, strict=False)
        ]
        charts.append(
            line_chart(title, lines, unit=unit, zero=metric.startswith(("time", "speed", "memory")))
        )
    timed = [
        Line(n, _over_time(r), c, noisy=True) for r, n, c in zip(runs, names, _COLORS, strict=False)
    ]
    charts.append(
        line_chart(
            "Training reward or success over time"
            if any(r.series("train/success_once") for r in runs)
            else "Training reward over time",
            timed,
            x_unit="minutes",
        )
    )
    note = (
        "faint: each step, bold: trailing mean"
        if any(smoothing_note(len(r.metrics)) for r in runs)
        else ""
    )
    cards = "".join(f'<div class="card">{c}</div>' for c in charts if c)
    tasks = ", ".join(
        dict.fromkeys(short_text for r in runs if (short_text := str(r.info.get("task") or "")))
    )
    tasks = (
        f"{tasks} (stand-in assets: no benchmark score)"
        if any("stand-in" in str(e.protocol.get("assets")) for r in runs for e in r.evals)
        else tasks
    )
    notes = "".join(
        f"<li>{esc(n)}: {esc(note)}</li>"
        for n, r in zip(names, runs, strict=True)
        for note in r.notes
    )
    missing = (
        f'<details class="notes"><summary>Missing or unreadable</summary><ul>{notes}</ul></details>'
        if notes
        else ""
    )
    body = cards or '<p class="missing">No curves yet.</p>'
    return (
        f'<header class="top"><p class="kicker">mmrl comparison</p><h1>{plural(len(runs), "run")}</h1>'
        f'<p class="verdict">{esc(tasks)}</p></header><nav><div class="links"></div>'
        '<button type="button" class="theme" aria-label="switch between light and dark">◐</button></nav>'
        f"<main><h2>Last evaluation</h2>{_table(runs, names)}<h2>Curves <small>{note}</small></h2>"
        f'<div class="charts">{body}</div>{missing}</main>'
    )
