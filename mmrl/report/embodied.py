"""The page of an embodied run: success rates in words, tiles and curves, episodes, failures, who was busy, the protocol.

    mmrl report runs/robot        # a run whose configuration has an env section

Numbers measured on stand-in assets carry a mark wherever they stand: they are no score of the benchmark.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import yaml

from mmrl.evaluation.stats import Estimate
from mmrl.report.charts import Line, line_chart, smoothing_note, track
from mmrl.report.clips import episodes
from mmrl.report.curves import MODES, UPDATE_CURVES, Curve, draw_curves, other_metrics
from mmrl.report.gantt import schedule_section
from mmrl.report.load import Run, Series, number
from mmrl.report.robot_work import failed_attempts, results_of, stage_times, streaming
from mmrl.report.rows import gains, part_gains, task_of
from mmrl.report.sections import alarms, configuration
from mmrl.report.sources import verdict_of
from mmrl.report.text import cut_text, esc, metric_name, plural, short
from mmrl.report.verdict import Outcome, mode_label

__all__ = [
    "HEADLINE",
    "embodied_curves",
    "embodied_outcome",
    "embodied_sections",
    "embodied_verdict",
    "is_embodied",
    "rate",
    "stand_in",
]

HEADLINE = "success_once"
_METRICS = (HEADLINE, "success_at_end", "return", "steps")
_RATES = (HEADLINE, "success_at_end")
_STAND_IN = "stand-in assets"
_RANGE = (0.0, 1.0)
_CURVES = (
    Curve(
        "Success in training",
        {"train/success_once": "ever", "train/success_at_end": "at the end"},
        "share of episodes",
        percent=True,
        bounds=_RANGE,
    ),
    *UPDATE_CURVES,
    Curve(
        "Groups",
        {
            "train/groups/asked": "asked",
            "train/groups/trained": "trained",
            "train/groups/no_signal": "without signal",
            "train/groups/failed": "failed",
            "train/groups/stale": "too old",
        },
        "per step",
        zero=True,
    ),
    Curve("Length of episodes", {"train/episode_steps": "mean"}, "control steps", zero=True),
    Curve(
        "Failed attempts", {"train/failed_attempts": "attempts"}, "per step", zero=True, noisy=False
    ),
    Curve("Age of the weights", {"train/staleness": "staleness"}, "versions", zero=True),
)
_MAY_BE_ZERO = ("Failed attempts", "Age of the weights")  # not drawn where nothing of it happened
# the success again, and its rest
_DRAWN = ("train/reward", "train/accuracy", "train/parse_rate", "train/streamed")


def is_embodied(run: Run) -> bool:
    """Whether the run acted in simulators: its configuration has an env section, or its evaluations have control steps."""
    try:
        tree = yaml.safe_load(run.config_text)
    except (yaml.YAMLError, ValueError, RecursionError):
        tree = None
    return (isinstance(tree, dict) and isinstance(tree.get("env"), dict)) or any(
        "max_steps" in e.protocol for e in run.evals
    )


def stand_in(run: Run) -> bool:
    """Whether any evaluation ran on stand-in assets."""
    return any("stand-in" in str(e.protocol.get("assets")) for e in run.evals)


def embodied_outcome(run: Run) -> Outcome:
    """First and last evaluation by success rate, sampled where there were samples."""
    first, last = (run.evals[0], run.evals[-1]) if run.evals else (None, None)
    last = last if len(run.evals) > 1 else None
    mode = next((m for m in MODES if first and HEADLINE in first.estimates.get(m, {})), "greedy")
    return Outcome(
        HEADLINE, mode, first, last, gains(first, last, _METRICS) if first and last else {}
    )


def rate(
    estimate: Mapping[str, float | None] | None, metric: str = HEADLINE, *, signed: bool = False
) -> tuple[str, str]:
    """('55 %', '[41, 68]') for shares, plain numbers for the rest; the second is '' without an interval."""
    mean = number((estimate or {}).get("mean"))
    if mean is None:
        return "–", ""
    low, high = (number((estimate or {}).get(k)) for k in ("low", "high"))
    scale, unit = (100.0, " points" if signed else " %") if metric in _RATES else (1.0, "")
    narrow = metric not in _RATES or (
        low is not None and high is not None and 0 < high - low < 0.04
    )
    form = f"{'+' if signed else ''}.{1 if narrow else 0}f"
    edges = (
        ""
        if low is None or high is None
        else f"[{format(scale * low, form)}, {format(scale * high, form)}]"
    )
    return (format(scale * mean, form) + unit).replace("-", "−"), edges.replace("-", "−")


def _strong(estimate: Any, metric: str = HEADLINE, *, signed: bool = False) -> str:
    mean, edges = rate(
        asdict(estimate) if isinstance(estimate, Estimate) else estimate, metric, signed=signed
    )
    return f"<b>{mean}</b>{f' <span class=ci>{edges}</span>' if edges else ''}"


def embodied_verdict(run: Run, found: Outcome) -> str:
    """What the success rate did, sampled and greedy, in words."""
    if found.first is None:
        return "There is no held-out evaluation yet."
    parts = [
        _said(found, mode)
        for mode in dict.fromkeys((found.mode, *MODES))
        if HEADLINE in found.first.estimates.get(mode, {})
    ]
    far = (
        f"after {found.last.step:,} steps"
        if run.info.get("status") == "finished" and found.last
        else (
            f"by step {found.last.step:,}"
            if found.last
            else f"at step {found.first.step:,}; there is no later evaluation yet"
        )
    )
    count = (found.last or found.first).estimates[found.mode][HEADLINE].get("n") if parts else None
    states = f", on {short(count)} held-out initial states" if count else ""
    text = (
        f"Held-out success rate {far}{states}: {'; '.join(parts)}."
        if parts
        else "The evaluation holds no numbers."
    )
    note = (
        " <b>Measured on stand-in assets: not a score of the benchmark.</b>"
        if stand_in(run)
        else ""
    )
    return text + note


def _said(found: Outcome, mode: str) -> str:
    assert found.first is not None
    before, after = (
        e.estimates.get(mode, {}).get(HEADLINE) if e else None for e in (found.first, found.last)
    )
    words, _, samples = mode_label(found.first, mode).partition(", ")
    name = esc(f"{words} ({samples})" if samples else words)
    if after is None:
        return f"{name} {_strong(before)}"
    gain = found.gains.get((mode, HEADLINE))
    verb = (
        ""
        if gain is None
        else "rose "
        if gain.low > 0
        else "fell "
        if gain.high < 0
        else "shows no certain change, "
    )
    change = (
        "" if gain is None else f" ({_strong(gain, signed=True)} on the same {gain.n:,} states)"
    )
    return f"{name} {verb}from {_strong(before)} to {_strong(after)}{change}"


def _mark(run: Run) -> str:
    return f'<span class="badge bad">{_STAND_IN}</span>' if stand_in(run) else ""


def _tile(found: Outcome, metric: str, mark: str) -> str:
    rows = []
    for mode, color in MODES.items():
        ends = [
            e.estimates.get(mode, {}).get(metric) if e else None for e in (found.first, found.last)
        ]
        known = [e for e in ends if e]
        if not known:
            continue
        values = [v for e in known for v in e.values() if v is not None]
        top = (
            1.0
            if metric in _RATES
            else max([e.get(k) or 0.0 for e in known for k in ("mean", "high")] + [1e-9])
        )
        low = 0.0 if metric in _RATES else min(0.0, *values)
        marks = [
            (kind, e.get("mean") or 0.0, e.get("low"), e.get("high"))
            for kind, e in zip(("before", "after"), ends, strict=True)
            if e
        ]
        old = (
            f'<span class="old">{rate(ends[0], metric)[0]}</span><span class="arrow">→</span>'
            if all(ends)
            else ""
        )
        gain = found.gains.get((mode, metric))
        change = f'<span class="gain">{_strong(gain, metric, signed=True)}</span>' if gain else ""
        mean, edges = rate(known[-1], metric)
        rows.append(
            f'<div class="tile-row" style="--c:var(--{color})"><div class="mode">{esc(mode_label(found.first, mode))}</div>'
            f'<div class="figures">{old}<span class="new">{mean}</span><span class="ci">{edges}</span></div>'
            f"{track(marks, low, top)}{change}</div>"
        )
    return (
        f'<div class="card tile"><h3>{esc(metric_name(metric))} {mark}</h3>{"".join(rows)}</div>'
        if rows
        else ""
    )


def _results(run: Run, found: Outcome) -> str:
    if found.first is None:
        return '<p class="missing">No finished evaluation in eval/: nothing to compare yet.</p>'
    mark = _mark(run)
    stops = _stops(run)
    tiles_ = "".join(
        _tile(found, m, mark if m != "steps" else "")
        for m in (HEADLINE, *([] if stops else ["success_at_end"]), "steps", "return")
    )
    gained = (
        "Gains: the same initial states before and after, paired, 95 % bootstrap over states. "
        if found.gains
        else ""
    )
    edges = str(found.first.protocol.get("interval") or "")
    end = (
        ", and stops there: success at end is the same"
        if stops
        else " or is there after its last one (success at end)"
    )
    note = (
        f"{f'Brackets: {edges}. ' if edges else ''}{gained}An episode counts once it reached success at any step (success "
        f"rate){end}. Dots: hollow before, full after."
    )
    return f'<div class="tiles">{tiles_}</div><p class="note">{esc(note)}</p>{_unfinished(found)}'


def _stops(run: Run) -> bool:
    """Whether episodes stop at success, so that success at the end is success once by construction (mmrl.robotics.evaluate)."""
    return bool(run.evals) and all(
        str(e.protocol.get("success_at_end", "")).startswith("the same") for e in run.evals
    )


def _unfinished(found: Outcome) -> str:
    """Episodes of the evaluations that could not be finished, whatever the reason: every failure of an episode is one (older runs
    call it `error`, later ones `simulator_error`)."""
    out = []
    for evaluation in (found.first, found.last):
        failures = results_of(evaluation).get("failures") if evaluation else None
        lost = (
            sum(
                int(number(count) or 0)
                for reasons in (failures or {}).values()
                if isinstance(reasons, Mapping)
                for count in reasons.values()
            )
            if isinstance(failures, Mapping)
            else 0
        )
        if lost and evaluation:
            out.append(f"{plural(lost, 'episode')} at step {evaluation.step:,}")
    return (
        f'<p class="missing">Not finished, counted as failures: {esc(", ".join(out))}.</p>'
        if out
        else ""
    )


# curves


def _held_out_chart(run: Run, metric: str, mark: str) -> str:
    lines = []
    for mode, color in MODES.items():
        known = [
            (float(e.step), e.estimates[mode][metric])
            for e in run.evals
            if metric in e.estimates.get(mode, {})
        ]
        if known:
            series: dict[str, Series] = {
                k: [(s, e[k]) for s, e in known] for k in ("mean", "low", "high")
            }
            lines.append(
                Line(
                    mode,
                    series["mean"],
                    color,
                    series["low"],
                    series["high"],
                    dots=True,
                    extra=[f"n = {e['n']:.0f}" if e.get("n") is not None else "" for _, e in known],
                )
            )
    share = metric in _RATES
    return line_chart(
        metric_name(metric) + mark,
        lines,
        unit="held-out",
        percent=share,
        bounds=_RANGE if share else None,
        zero=share,
        x_range=(0.0, float(max(1, run.last_step))),
    )


def _curves(run: Run) -> str:
    mark = f" ({_STAND_IN})" if stand_in(run) else ""
    stops = _stops(run)
    front = [c for m in ((HEADLINE,) if stops else _RATES) if (c := _held_out_chart(run, m, mark))]
    more = [c for m in ("steps", "return") if (c := _held_out_chart(run, m, mark))]
    curves = embodied_curves(run)
    train = draw_curves(run, curves)
    note = smoothing_note(len(run.metrics))
    drawn = [n for c in curves for n in c.names]
    timed = [n for n in run.names() if n.startswith(("schedule/", "perf/"))]
    return "".join(
        (
            "<h3>Held-out</h3>",
            _cards(front, "wide")
            if front
            else '<p class="missing">No finished evaluation in eval/.</p>',
            f"<details><summary>Steps and return</summary>{_cards(more)}</details>" if more else "",
            f"<h3>Training{f' <small>{note}</small>' if note and train else ''}</h3>",
            _cards(train) if train else '<p class="missing">metrics.jsonl holds no steps yet.</p>',
            other_metrics(run, (*drawn, *timed, *_DRAWN, *_CURVES[0].names)),
        )
    )


def embodied_curves(run: Run) -> list[Curve]:
    """What training in simulators logged, as charts in reading order; some of their metrics may have no value in this run."""
    return _training(run, f" ({_STAND_IN})" if stand_in(run) else "", _stops(run))


def _training(run: Run, mark: str, stops: bool) -> list[Curve]:
    """`stops`: see _stops; success at the end is then no curve of its own."""
    first, *rest = _CURVES
    names = {"train/success_once": "success"} if stops else first.names
    tasks = {
        n: n.removeprefix("train/").removesuffix("/success_once")
        for n in run.names()
        if n.startswith("train/") and n.endswith("/success_once") and n != "train/success_once"
    }
    critic = {
        n: n.removeprefix("train/critic/").replace("_", " ")
        for n in run.names()
        if n.startswith("train/critic/")
    }
    curves = [Curve(first.title + mark, names, first.unit, percent=True, zero=True, bounds=_RANGE)]
    if tasks:
        curves.append(
            Curve(
                "Success by task" + mark,
                tasks,
                "training, share of episodes",
                percent=True,
                zero=True,
                bounds=_RANGE,
            )
        )
    return [
        *curves,
        *(
            c
            for c in rest
            if c.title not in _MAY_BE_ZERO or any(v for n in c.names for _, v in run.series(n))
        ),
        *([Curve("Critic", critic)] if critic else []),
    ]


def _cards(charts: Sequence[str], kind: str = "") -> str:
    return (
        f'<div class="charts {kind}">{"".join(f"<div class=card>{c}</div>" for c in charts)}</div>'
    )


# tasks


def _tasks(run: Run, found: Outcome) -> str:
    """One row per task; '' for one task."""
    names = list(dict.fromkeys(name for e in run.evals for name in e.per_task))
    if len(names) < 2 or found.first is None:
        return ""
    mark = _mark(run)
    paired = part_gains(found.first, found.last, task_of, HEADLINE) if found.last else {}
    rows = []
    for name in names:
        for mode in MODES:
            key = HEADLINE if mode == "greedy" else f"{mode}/{HEADLINE}"
            ends = [
                e.per_task.get(name, {}).get(key) if e else None for e in (found.first, found.last)
            ]
            if not any(ends):
                continue
            gain = paired.get((mode, name))
            words, tone = verdict_of(gain) if found.last else ("", "")
            cells = "".join(f'<td class="num">{_strong(e)}</td>' for e in ends)
            count = next((e["n"] for e in reversed(ends) if e), None)
            rows.append(
                f'<tr><td>{esc(name)}</td><td>{mode}</td>{cells}<td class="num">'
                f'{_strong(gain, signed=True) if gain else "–"}</td><td><span class="chip in-table {tone}">{words}</span>'
                f'</td><td class="num">{short(count)}</td></tr>'
            )
    after = f"step {found.last.step:,}" if found.last else "later"
    return (
        f'<div class="scroll card"><h3>Success rate {mark}</h3><table><thead><tr><th>task</th><th>mode</th>'
        f'<th class="num">step {found.first.step:,}</th>'
        f'<th class="num">{after}</th><th class="num">gain, points</th><th></th><th class="num">states</th></tr></thead><tbody>'
        f"{''.join(rows)}</tbody></table></div>"
    )


# protocol


_WORDS = {
    "name": "protocol",
    "max_steps": "control steps at most",
    "states": "initial states",
    "states_per_task": "states per task",
    "samples_per_prompt": "samples per state",
    "render": "GL backend",
    "image_size": "pixels",
}
_ORDER = (
    "name",
    "suite",
    "tasks",
    "assets",
    "render",
    "states",
    "states_per_task",
    "samples_per_prompt",
    "temperature",
    "max_steps",
    "chunk",
    "repeat",
    "bins",
    "decode",
    "image_size",
    "cameras",
    "options",
)


def _protocol(run: Run) -> str:
    """What the numbers were measured with."""
    if not run.evals:
        return '<p class="missing">No finished evaluation names a protocol yet.</p>'
    found = run.evals[-1].protocol
    rest = [k for k in found if k not in (*_ORDER, "simulator", "versions")]
    rows = "".join(
        _pair(_WORDS.get(k, k.replace("_", " ")), found[k])
        for k in (*(k for k in _ORDER if k in found), *rest)
    )
    simulator, packages = (found.get(k) for k in ("simulator", "versions"))
    more = "".join(
        f'<div class="card"><h3>{title}</h3><table class="pairs"><tbody>'
        f"{''.join(_pair(str(k), v) for k, v in t.items())}</tbody></table></div>"
        for title, t in (("Simulator", simulator), ("Versions", packages))
        if isinstance(t, Mapping) and t
    )
    note = (
        '<p class="stand-in"><b>Stand-in assets.</b> Meshes and textures of ours take the place of the official ones: what is '
        "measured here says whether training works, and is not a score of the benchmark.</p>"
        if stand_in(run)
        else ""
    )
    return (
        f'{note}<div class="charts"><div class="card"><h3>Evaluation</h3><table class="pairs"><tbody>{rows}</tbody></table>'
        f"</div>{more}</div>"
    )


def _pair(name: str, value: Any) -> str:
    if isinstance(value, Mapping):
        value = ", ".join(f"{k} {v}" for k, v in value.items()) or "none"
    elif isinstance(value, list):
        value = ", ".join(map(str, value)) or "none"
    mark = (
        f' <span class="badge bad">{_STAND_IN}</span>'
        if name == "assets" and "stand-in" in str(value)
        else ""
    )
    return f"<tr><td>{esc(name)}</td><td>{'' if mark else cut_text(value, 600)}{mark}</td></tr>"


def embodied_sections(run: Run, found: Outcome, notes: str) -> list[tuple[str, str, str]]:
    """(key, title, HTML) of the page's sections; those without content are left out."""
    makers: list[tuple[str, str, Callable[[], str]]] = [
        ("results", "Results", lambda: _results(run, found)),
        ("curves", "Curves", lambda: _curves(run)),
        ("tasks", "Tasks", lambda: _tasks(run, found)),
        ("episodes", "Episodes", lambda: episodes(run, _mark(run))),
        ("failures", "Failed attempts", lambda: failed_attempts(run)),
        ("alarms", "Alarms", lambda: alarms(run)),
        ("timing", "Timing", lambda: stage_times(run)),
        ("schedule", "Schedule", lambda: streaming(run) + schedule_section(run)),
        ("protocol", "Protocol", lambda: _protocol(run)),
        ("configuration", "Configuration", lambda: configuration(run) + notes),
    ]
    return [(key, title, content) for key, title, make in makers if (content := make())]
