"""Each data source and each task before and after: intervals, the paired gain on the same prompts, what rose and what fell."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

from mmrl.evaluation.stats import Estimate
from mmrl.report.load import EvalStep, Run
from mmrl.report.rows import part_gains, task_of, unit_of
from mmrl.report.text import esc, interval, metric_name, short
from mmrl.report.verdict import Outcome, mode_label

__all__ = ["source_tables", "verdict_of"]

Numbers = Mapping[str, float | None]
PartOf = Callable[[dict[str, Any]], str]
_PARTS: Mapping[str, tuple[str, PartOf]] = {
    "per_source": ("source", lambda row: unit_of(row)[0]),
    "per_task": ("task", task_of),
}


def verdict_of(gain: Estimate | None) -> tuple[str, str]:
    """(words, tone) of a paired gain: it rose or fell when its 95 % interval leaves out zero."""
    if gain is None:
        return "no pairs", ""
    if math.isnan(gain.low) or math.isnan(gain.high):
        return "too few prompts", ""
    if gain.low > 0:
        return "rose", "good"
    return ("fell", "bad") if gain.high < 0 else ("no certain change", "")


def _estimate(
    evaluation: EvalStep | None, table: str, part: str, mode: str, metric: str
) -> Numbers | None:
    """Tables name sampled metrics 'sampled/iou' when there are greedy ones too, plainly otherwise."""
    if evaluation is None:
        return None
    greedy = bool(evaluation.estimates.get("greedy"))
    if mode == "greedy" and not greedy:
        return None
    rows = evaluation.per_source if table == "per_source" else evaluation.per_task
    return rows.get(part, {}).get(metric if mode == "greedy" or not greedy else f"{mode}/{metric}")


def _cell(estimate: Numbers | None) -> str:
    if estimate is None:
        return '<td class="num dim">–</td>'
    mean, spread = interval(estimate)
    return f'<td class="num"><b>{mean}</b><br><span class="ci">{spread}</span></td>'


def _gain_cells(gain: Estimate | None) -> str:
    words, tone = verdict_of(gain)
    mean, spread = interval(dataclasses.asdict(gain), signed=True) if gain else ("–", "")
    return (
        f'<td><span class="chip in-table {tone}">{words}</span></td>'
        f'<td class="num">{mean}<br><span class="ci">{spread}</span></td>'
    )


def _training(run: Run, source: str) -> str:
    values = [v for _, v in run.series(f"train/{source}/reward/mean") if v is not None]
    tenth = max(1, len(values) // 10)
    if not values:
        return '<td class="num dim">–</td>'
    return (
        f'<td class="num"><span class="dim">{short(sum(values[:tenth]) / tenth)} → </span>'
        f"<b>{short(sum(values[-tenth:]) / tenth)}</b></td>"
    )


def _parts(run: Run, table: str) -> list[str]:
    if table == "per_source":
        return run.sources()
    return list(dict.fromkeys(name for e in run.evals for name in e.per_task))


def _metric(run: Run, found: Outcome, table: str, part: str) -> tuple[str, str]:
    """(metric of the table, its name for people): a part's own headline where the evaluation names it."""
    named = next(
        (
            e.headlines[table][part]
            for e in reversed(run.evals)
            if part in e.headlines.get(table, {})
        ),
        None,
    )
    if named is None:
        metric = found.headline if found.headline != "macro" else "reward"
        return metric, metric_name(metric)
    return "headline", " / ".join(metric_name(name) for name in named.split(", "))


def _table(run: Run, found: Outcome, table: str, mode: str) -> str:
    kind, part_of = _PARTS[table]
    default = found.headline if found.headline != "macro" else "reward"
    gains = (
        part_gains(found.first, found.last, part_of, default) if found.first and found.last else {}
    )
    after = f"step {found.last.step:,}" if found.last else "later"
    rows = []
    for part in _parts(run, table):
        metric, name = _metric(run, found, table, part)
        ends = [_estimate(e, table, part, mode, metric) for e in (found.first, found.last)]
        count = next((e["n"] for e in reversed(ends) if e and e.get("n") is not None), None)
        parsed = [_estimate(e, table, part, mode, "parse_rate") for e in (found.first, found.last)]
        share = " → ".join(interval(e)[0] for e in parsed if e) or "–"
        train = _training(run, part) if table == "per_source" else ""
        rows.append(
            f"<tr><td>{esc(part)}<br><small>{esc(name)}</small></td>{_gain_cells(gains.get((mode, part)))}"
            f'{"".join(map(_cell, ends))}<td class="num">{short(count)}</td><td class="num">{share}</td>{train}</tr>'
        )
    extra = (
        '<th class="num">training reward<br><small>first → last tenth</small></th>'
        if table == "per_source"
        else ""
    )
    return (
        f'<div class="scroll card"><table class="parts"><thead><tr><th>{kind}<br><small>metric</small></th><th></th>'
        f'<th class="num">paired gain</th><th class="num">step {found.first.step if found.first else 0:,}</th>'
        f'<th class="num">{after}</th><th class="num">n</th><th class="num">parse rate</th>{extra}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def source_tables(run: Run, found: Outcome) -> str:
    """One row per data source, then one per task where tasks and sources differ; the other mode folded."""
    sources = run.sources()
    if not sources:
        return '<p class="missing">No data source is named in metrics.jsonl or eval/*/results.json.</p>'
    tasks = _parts(run, "per_task")
    tables = [
        "per_source",
        *(["per_task"] if len(tasks) > 1 and set(tasks) != set(sources) else []),
    ]
    modes = [
        found.mode,
        *(
            m
            for m in ("sampled", "greedy")
            if m != found.mode and found.first and found.first.estimates.get(m)
        ),
    ]
    pages = []
    for mode in modes:
        title = (
            f"<h3>{esc(mode_label(found.first, mode))}</h3>"
            if len(modes) > 1 and mode == found.mode
            else ""
        )
        pages.append(title + "".join(_table(run, found, table, mode) for table in tables))
    folded = "".join(
        f"<details><summary>{esc(mode_label(found.first, mode))}</summary>{page}</details>"
        for mode, page in zip(modes[1:], pages[1:], strict=True)
    )
    note = (
        '<p class="note">Gains: the same prompts before and after, paired, 95 % bootstrap over prompts, not corrected for '
        "the number of rows. Rose or fell: the interval leaves out zero.</p>"
        if found.last
        else ""
    )
    return pages[0] + note + folded
