"""What went wrong in an embodied run's simulators, and who was busy when: failed attempts by reason, seconds by stage.

mmrl report runs/robot        # two sections of its page
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from mmrl.report.charts import Line, bar_chart, line_chart, share_bar
from mmrl.report.gantt import STAGES
from mmrl.report.load import EvalStep, Run, Series, parse_line
from mmrl.report.text import cut_text, esc, short, span

__all__ = ["failed_attempts", "results_of", "stage_times", "streaming"]


def results_of(evaluation: EvalStep) -> Mapping[str, Any]:
    """results.json of an evaluation, {} where it is not readable."""
    path = evaluation.folder / "results.json"
    value = (
        parse_line(path.read_text(encoding="utf-8", errors="replace")) if path.is_file() else None
    )
    return value if isinstance(value, Mapping) else {}


def _reason(text: str) -> str:
    """A traceback's last line, else the first of the text."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return (lines[-1] if "Traceback" in text else lines[0])[:200] if lines else "no reason given"


def _attempts(run: Run) -> list[tuple[str, str, str]]:
    """(training or held-out step, task, text) of every failed attempt."""
    out = [
        (f"held-out, step {e.step:,}", str(a.get("task", "")), str(a.get("reason", "")))
        for e in run.evals
        if isinstance(found := results_of(e).get("failed_attempts"), list)
        for a in found
        if isinstance(a, Mapping)
    ]
    path = run.folder / "failures.jsonl"
    for line in (
        path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else []
    ):
        row = parse_line(line)
        if isinstance(row, Mapping):
            out.append(("training", str(row.get("source", "")), str(row.get("reason", ""))))
    return out


def failed_attempts(run: Run) -> str:
    """Failed attempts at episodes by reason, of training and of evaluations."""
    found = _attempts(run)
    if not found:
        return '<p class="calm">No episode failed to run.</p>'
    groups: dict[str, list[tuple[str, str, str]]] = defaultdict(list)
    for attempt in found:
        groups[_reason(attempt[2])].append(attempt)
    ordered = sorted(groups.items(), key=lambda kv: -len(kv[1]))
    rows = "".join(
        f"<tr><td>{esc(reason)}<details><summary>first in full</summary><pre>{cut_text(part[0][2], 4000)}</pre></details></td>"
        f'<td class="num">{len(part):,}</td><td>{esc(", ".join(dict.fromkeys(p[0] for p in part)))}</td>'
        f"<td>{esc(', '.join(dict.fromkeys(p[1] for p in part)))}</td></tr>"
        for reason, part in ordered[:20]
    )
    left = (
        f'<p class="note">{len(ordered) - 20} further reasons in failures.jsonl</p>'
        if len(ordered) > 20
        else ""
    )
    return (
        '<p class="note">Attempts that crashed, hung or were refused. Each was played again from the same state; an episode '
        'whose retries all failed counts as a failure.</p><div class="scroll card"><table class="reasons"><thead><tr>'
        '<th>reason</th><th class="num">attempts</th><th>where</th><th>task</th></tr></thead><tbody>'
        f"{rows}</tbody></table></div>{left}"
    )


def stage_times(run: Run) -> str:
    """Busy worker-seconds and idle shares by stage, speeds, and what lies beside the steps."""
    busy = {s: run.series(f"schedule/busy/{s}") for s in STAGES}
    busy = {s: p for s, p in busy.items() if p}
    idle = {s: p for s in busy if (p := run.series(f"schedule/bubble/{s}"))}
    beside = {
        name: p
        for name, key in (
            ("steps", "time/total"),
            ("evaluation", "time/eval"),
            ("checkpoints", "time/checkpoint"),
        )
        if (p := run.series(key))
    }
    if not busy and not beside:
        return '<p class="missing">metrics.jsonl holds no times yet.</p>'
    whole = {name: sum(v or 0.0 for _, v in p) for name, p in beside.items()}
    colors = {"steps": "c1", "evaluation": "c5", "checkpoints": "c4"}
    rows = "".join(
        f'<tr><td><i class="swatch" style="--c:var(--{colors[n]})"></i>{n}</td><td class="num">{span(t)}</td></tr>'
        for n, t in whole.items()
    )
    cards = [
        f"<h3>Where the time went <small>{span(sum(whole.values()))} in all</small></h3>"
        f"{share_bar([(n, t, colors[n]) for n, t in whole.items()])}<table><tbody>{rows}</tbody></table>"
        if whole
        else "",
        _stages(busy, idle),
        bar_chart(
            "Busy in each step",
            [Line(s, p, STAGES[s]) for s, p in busy.items()],
            unit="worker seconds",
        ),
        line_chart(
            "Idle workers",
            [Line(s, p, STAGES[s], noisy=True, dots=len(p) < 30) for s, p in idle.items()],
            unit="share (the bubble)",
            percent=True,
            zero=True,
            bounds=(0.0, 1.0),
        ),
    ]
    for title, key, unit in (
        ("Control steps", "perf/control_steps_per_s", "per second"),
        ("Episodes", "perf/episodes_per_s", "per second"),
        ("Peak memory", "memory/peak_gib", "GiB"),
    ):
        cards.append(
            line_chart(
                title,
                [Line(title.lower(), run.series(key), "c1", noisy=True)],
                unit=unit,
                zero=True,
            )
        )
    return f'<div class="charts timing">{"".join(f"<div class=card>{c}</div>" for c in cards if c)}</div>'


def streaming(run: Run) -> str:
    """Whether groups were trained on as they closed, in words; '' where metrics.jsonl does not say."""
    known = [v for _, v in run.series("train/streamed") if v is not None]
    if not known:
        return ""
    if min(known) > 0:
        return '<p class="note">Groups were streamed: each was trained on as soon as it closed, while others still ran.</p>'
    return (
        '<p class="note">Groups were collected, not streamed: training began when the last group of a step had closed. '
        "Streaming needs a schedule other than serial, advantages of a group by itself (algorithm.advantage grpo, rloo, opo or "
        "pass_k, advantage_scale std or none, reward_aggregation plain), algorithm.epochs 1 and algorithm.minibatches 1.</p>"
    )


def _stages(busy: Mapping[str, Series], idle: Mapping[str, Series]) -> str:
    if not busy:
        return ""
    rows = "".join(
        f'<tr><td><i class="swatch" style="--c:var(--{STAGES[s]})"></i>{s}</td><td class="num">'
        f'{span(sum(v or 0.0 for _, v in p))}</td><td class="num">{short(_mean(p))} s</td><td class="num">'
        f"{_share(_mean(idle.get(s, [])))}</td></tr>"
        for s, p in busy.items()
    )
    return (
        '<h3>Stages</h3><table><thead><tr><th>stage</th><th class="num">busy</th><th class="num">each step</th>'
        f'<th class="num">workers idle</th></tr></thead><tbody>{rows}</tbody></table><p class="note">render: control steps and '
        "pictures, in the simulators' processes. Busy seconds are summed over workers.</p>"
    )


def _share(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.0f} %"


def _mean(points: Series) -> float | None:
    values = [v for _, v in points if v is not None]
    return sum(values) / len(values) if values else None
