"""Which curves the page shows, in which order and unit; whatever the run logged beyond them goes into one table."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mmrl.report.charts import Line, line_chart, sparkline
from mmrl.report.load import EvalStep, Run, Series
from mmrl.report.text import esc, metric_name, plural, short

__all__ = [
    "Curve",
    "MODES",
    "UPDATE_CURVES",
    "curves_of",
    "draw_curves",
    "eval_chart",
    "held_out_curves",
    "metric_names",
    "metric_order",
    "other_metrics",
    "per_source",
    "source_curves",
    "training_curves",
]

MODES = {"sampled": "c1", "greedy": "c2"}
_BOUNDED = ("iou", "reward", "parse_rate", "giou", "correct", "macro", "headline")
_FRONT = ("iou", "acc@0.5", "correct", "macro", "reward", "parse_rate")
_COLORS = ("c1", "c2", "c3", "c5", "c4", "c6")


@dataclass(frozen=True)
class Curve:
    """One chart of training metrics; `names` maps a metric of metrics.jsonl to its words in the legend."""

    title: str
    names: dict[str, str]
    unit: str = ""
    percent: bool = False
    zero: bool = False
    bounds: tuple[float, float] | None = None
    log: bool = False
    noisy: bool = True  # False where single steps matter: spikes must not be averaged away


_UNIT_RANGE = (0.0, 1.0)
UPDATE_CURVES = (
    Curve("Entropy", {"train/entropy": "entropy"}, "nats per token", zero=True),
    Curve(
        "KL",
        {"train/kl": "to the reference", "train/kl_step": "within a step"},
        "nats per token",
        log=True,
    ),
    Curve(
        "Log-prob gap",
        {"train/logprob_gap/mean": "mean", "train/logprob_gap/max": "max"},
        "sampler to trainer, nats per token",
        log=True,
        zero=True,
        noisy=False,
    ),
    Curve(
        "Clipped tokens",
        {"train/clip/low": "low", "train/clip/high": "high", "train/clip/dual": "dual"},
        "share",
        percent=True,
        zero=True,
    ),
    Curve(
        "Gradient norm",
        {"train/grad_norm": "norm"},
        "before clipping",
        zero=True,
        log=True,
        noisy=False,
    ),
)
"""What an update measures, of answers and of episodes (mmrl.training.metrics.update_metrics)."""
_CURVES = (
    Curve("Training reward", {"train/reward/mean": "mean"}, "0 to 1", bounds=_UNIT_RANGE),
    Curve(
        "Training IoU",
        {"train/iou": "mIoU", "train/acc@0.5": "Acc@0.5"},
        "sampled",
        bounds=_UNIT_RANGE,
    ),
    Curve(
        "Right answers", {"train/correct": "correct"}, "share of completions", bounds=_UNIT_RANGE
    ),
    Curve("Parse rate", {"train/parse_rate": "parsed"}, "share of completions", bounds=_UNIT_RANGE),
    *UPDATE_CURVES,
    Curve(
        "Completion length",
        {
            "train/length/mean": "all",
            "train/length/right": "right",
            "train/length/wrong": "wrong",
            "train/length/clipped": "cut by the limit",
        },
        "tokens",
    ),
    Curve(
        "Cut by the length limit",
        {"train/clipped_share": "clipped"},
        "completions",
        percent=True,
        zero=True,
        bounds=_UNIT_RANGE,
    ),
    Curve(
        "Groups without signal",
        {
            "train/groups/no_signal": "all rewards equal",
            "train/groups/all_zero": "all 0",
            "train/groups/all_one": "all 1",
        },
        "groups per step",
        zero=True,
    ),
)


def metric_order(names: Sequence[str], headline: str) -> list[str]:
    """Headline first, then the common names, then the rest by name."""
    known = [
        headline,
        "macro",
        "iou",
        "acc@0.5",
        "correct",
        "acc",
        "accuracy",
        "success",
        "reward",
        "parse_rate",
    ]
    return sorted(
        dict.fromkeys(names), key=lambda n: (known.index(n) if n in known else len(known), n)
    )


def metric_names(evals: Sequence[EvalStep], headline: str) -> list[str]:
    """Held-out metrics in reading order; the mean over sources is left out where there is only one."""
    names = [n for e in evals for m in MODES for n in e.estimates.get(m, {})]
    many = any(len(e.per_source) > 1 for e in evals)
    return metric_order([n for n in names if many or n != "macro"], headline)


def eval_chart(evals: Sequence[EvalStep], metric: str, x_range: tuple[float, float]) -> str:
    """One held-out metric over training, greedy and sampled, with interval bands."""
    lines = []
    for mode, color in MODES.items():
        found = [
            (e.step, e.estimates[mode][metric])
            for e in evals
            if metric in e.estimates.get(mode, {})
        ]
        if found:
            series: dict[str, Series] = {
                k: [(float(s), e[k]) for s, e in found] for k in ("mean", "low", "high")
            }
            words = [f"n = {e['n']:.0f}" if e.get("n") is not None else "" for _, e in found]
            lines.append(
                Line(
                    mode,
                    series["mean"],
                    color,
                    series["low"],
                    series["high"],
                    dots=True,
                    extra=words,
                )
            )
    return line_chart(
        metric_name(metric),
        lines,
        unit="held-out",
        bounds=_UNIT_RANGE if _is_bounded(metric) else None,
        x_range=x_range,
    )


def held_out_curves(run: Run, headline: str) -> tuple[list[str], list[str]]:
    """(important charts, further charts) of the held-out metrics."""
    names = metric_names(run.evals, headline)
    x_range = (0.0, float(max(1, run.last_step)))
    charts = [(n, eval_chart(run.evals, n, x_range)) for n in names]
    hidden = ("iou", "acc@0.5") if "macro" in names else ("correct",) if "acc@0.5" in names else ()
    front = [n for n in names if n == headline or (n in _FRONT and n not in hidden)]
    return [c for n, c in charts if n in front], [c for n, c in charts if n not in front]


def _source_line(run: Run, source: str, mode: str, color: str) -> Line | None:
    """A source's held-out headline in one mode, with its interval."""
    found = []
    for e in run.evals:
        plain = mode == "greedy" or not e.estimates.get("greedy")
        row = e.per_source.get(source, {}) if mode != "greedy" or e.estimates.get("greedy") else {}
        if (estimate := row.get("headline" if plain else f"{mode}/headline")) is not None:
            found.append((float(e.step), estimate))
    if not found:
        return None
    series: dict[str, Series] = {k: [(s, e[k]) for s, e in found] for k in ("mean", "low", "high")}
    words = [f"n = {e['n']:.0f}" if e.get("n") is not None else "" for _, e in found]
    return Line(mode, series["mean"], color, series["low"], series["high"], dots=True, extra=words)


def source_curves(run: Run) -> list[str]:
    """One held-out chart per data source, of the metric it is judged by; [] with fewer than two sources."""
    sources = list(dict.fromkeys(s for e in run.evals for s in e.per_source))
    x_range, charts = (0.0, float(max(1, run.last_step))), []
    for source in sources if len(sources) > 1 else []:
        lines = [
            line
            for mode, color in MODES.items()
            if (line := _source_line(run, source, mode, color))
        ]
        name = run.headline(source)
        charts.append(
            line_chart(
                source,
                lines,
                unit=metric_name(name) if name else "headline of each task",
                bounds=_UNIT_RANGE if name is None or _is_bounded(name) else None,
                x_range=x_range,
            )
        )
    return [c for c in charts if c]


def _is_bounded(metric: str) -> bool:
    return metric in _BOUNDED or metric.startswith("acc")


def _lines(run: Run, names: dict[str, str], noisy: bool) -> list[Line]:
    series = [(words, _series(run, name)) for name, words in names.items()]
    return [
        Line(words, points, _COLORS[i % len(_COLORS)], noisy=noisy, dots=len(points) < 30)
        for i, (words, points) in enumerate(series)
        if points
    ]


def _series(run: Run, name: str) -> Series:
    """The metric; a reason of failure is logged only in steps where it occurred, so elsewhere its share is 0."""
    points = run.series(name)
    if not name.startswith("train/failed/"):
        return points
    logged = {step for step, v in run.series("train/parse_rate") if v is not None}
    return [(step, 0.0 if v is None and step in logged else v) for step, v in points]


def _by_name(run: Run, pattern: str) -> dict[str, str]:
    return {n: m.group(1).replace("_", " ") for n in run.names() if (m := re.fullmatch(pattern, n))}


def curves_of(run: Run) -> list[Curve]:
    """What training logged, as charts in reading order; some of their metrics may have no value in this run."""
    parts = _by_name(run, r"train/reward/part/(.+)")
    reasons = _by_name(run, r"train/failed/(.+)")
    curves = list(_CURVES)
    curves.insert(1, Curve("Parts of the reward", parts, "mean, before weights"))
    curves.insert(5, Curve("Why parsing failed", reasons, "completions", percent=True, zero=True))
    if critic := _by_name(run, r"train/critic/(.+)"):
        curves.append(Curve("Critic", critic))
    sources = [s for s in run.sources() if run.series(f"train/{s}/reward/mean")]
    if len(sources) > 1:
        curves += per_source(
            "Reward per source", {f"train/{s}/reward/mean": s for s in sources}, "training"
        )
        metrics = {s: _train_metric(run, s) for s in sources}
        curves += per_source(
            "Metric per source",
            {f"train/{s}/{m}": f"{s}: {metric_name(m)}" for s, m in metrics.items() if m},
            "training",
        )
    return curves


def _train_metric(run: Run, source: str) -> str | None:
    """The metric a source is judged by, else the first usual one, that training logged for it."""
    wishes = (run.headline(source), "correct", "iou")
    return next(
        (m for m in wishes if m and m != "reward" and run.series(f"train/{source}/{m}")), None
    )


def per_source(title: str, names: dict[str, str], unit: str) -> list[Curve]:
    """As many charts as colours can tell the sources apart."""
    items, size = list(names.items()), len(_COLORS)
    parts = [dict(items[i : i + size]) for i in range(0, len(items), size)]
    return [
        Curve(title if len(parts) == 1 else f"{title} ({i} of {len(parts)})", part, unit)
        for i, part in enumerate(parts, 1)
    ]


def training_curves(run: Run) -> list[str]:
    """The charts of what training logged, in reading order."""
    return draw_curves(run, curves_of(run))


def draw_curves(run: Run, curves: Sequence[Curve]) -> list[str]:
    """The charts of those curves that have a point."""
    x_range = (0.0, float(max(1, run.last_step)))
    charts = []
    for c in curves:
        many = sorted(
            c.names, key=lambda n: -max((v or 0.0 for _, v in run.series(n)), default=0.0)
        )[: len(_COLORS)]
        lines = _lines(run, {n: w for n, w in c.names.items() if n in many}, c.noisy)
        left_out = (
            f"{len(c.names) - len(many)} smaller ones not drawn" if len(c.names) > len(many) else ""
        )
        charts.append(
            line_chart(
                c.title,
                lines,
                unit=c.unit,
                percent=c.percent,
                zero=c.zero,
                bounds=c.bounds,
                log=c.log,
                x_range=x_range,
                note=left_out,
            )
        )
    return [c for c in charts if c]


def other_metrics(run: Run, beside: Iterable[str] = ()) -> str:
    """Every logged metric without a chart of its own: first, last, lowest and highest value and a small curve.

    `beside` are metrics drawn elsewhere."""
    drawn = {*beside, *(n for c in curves_of(run) for n in c.names)}
    rows = []
    for name in run.names():
        points = run.series(name)
        if (
            name in drawn
            or name.startswith(("eval/", "time/"))
            or name in ("speed/tokens_per_s", "memory/peak_gib")
        ):
            continue
        values = [v for _, v in points if v is not None]
        if not values:
            rows.append(
                f'<tr><td>{esc(name)}</td><td colspan="5" class="dim">no finite value</td></tr>'
            )
            continue
        rows.append(
            f"<tr><td>{esc(name)}</td><td>{sparkline(points)}</td>"
            + "".join(
                f'<td class="num">{short(v)}</td>'
                for v in (values[0], values[-1], min(values), max(values))
            )
            + "</tr>"
        )
    if not rows:
        return ""
    return (
        f"<details><summary>Other metrics <small>{plural(len(rows), 'name')}</small></summary>"
        '<div class="scroll"><table><thead><tr><th>name</th><th></th><th class="num">first</th><th class="num">'
        "last</th>"
        f'<th class="num">lowest</th><th class="num">highest</th></tr></thead><tbody>{"".join(rows)}</tbody>'
        f"</table></div></details>"
    )
