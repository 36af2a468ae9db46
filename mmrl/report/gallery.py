"""The same held-out pictures through training with a slider over the evaluations, and the worst cases of the last."""
from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from mmrl.report.load import EvalStep, Run
from mmrl.report.pictures import Pictures, box_group
from mmrl.report.rows import boxes_of, metric_of, score_of, unit_of
from mmrl.report.text import cut_text, esc, metric_name, plural

__all__ = ["gallery", "parse_failures", "worst_cases"]

MAX_STEPS = 40  # positions of the slider
GALLERY_TEXT, CASE_TEXT = 1200, 4000  # characters of model text shown
Row = dict[str, Any]
Shots = dict[tuple[str, str], dict[str, list[Row]]]
"""prompt -> mode -> its rows in one evaluation."""


def _thinned(evals: Sequence[EvalStep]) -> list[EvalStep]:
    """At most MAX_STEPS evaluations, evenly spread, with the first and the last."""
    if len(evals) <= MAX_STEPS:
        return list(evals)
    return [evals[round(i * (len(evals) - 1) / (MAX_STEPS - 1))] for i in range(MAX_STEPS)]


def _ids(run: Run) -> list[str]:
    if run.gallery_ids:
        return list(dict.fromkeys(run.gallery_ids))[:48]
    seen: dict[str, None] = {}
    for row in run.evals[0].rows() if run.evals else ():
        seen.setdefault(str(row.get("id")))
        if len(seen) == 12:
            break
    return list(seen)


def _shots(evaluation: EvalStep, ids: set[str]) -> Shots:
    out: Shots = defaultdict(lambda: defaultdict(list))
    for row in evaluation.rows(lambda r: str(r.get("id")) in ids):
        out[unit_of(row)][str(row.get("mode", ""))].append(row)
    return out


def _badge(row: Row, metric: str) -> str:
    score = score_of(row)
    if not score.get("parsed"):
        return f'<span class="badge bad">not parsed: {esc(str(score.get("reason") or "no reason")[:80])}</span>'
    words = f'<span class="badge">{esc(metric_name(metric).removeprefix("m"))} {metric_of(row, metric):.2f}</span>'
    return words + ('<span class="badge bad">cut by length</span>' if row.get("stop") == "length" else "")


def _state(number: int, last: int, shot: Mapping[str, list[Row]] | None, metric: str) -> tuple[str, str, str]:
    """(sampled boxes, greedy boxes, HTML below) of one prompt at one evaluation; hidden unless it is the last."""
    attrs = f'class="state" data-step="{number}"{"" if number == last else " hidden"}'
    if not shot:
        return "", "", f'<div {attrs}><p class="dim">not among the prompts of this evaluation</p></div>'
    greedy, sampled = shot.get("greedy", []), shot.get("sampled", [])
    row = (greedy or sampled)[0]
    below, above = (box_group([b for r in rows for b in boxes_of(r, "pred_boxes")], kind)
                    for rows, kind in ((sampled, "sampled"), (greedy, "greedy")))
    mean = sum(metric_of(r, metric) for r in sampled) / len(sampled) if sampled else None
    samples = f'<span class="badge soft">mean of {len(sampled)} samples {mean:.2f}</span>' if mean is not None else ""
    text = row.get("text") or ""
    body = f"<pre dir=auto>{cut_text(text, GALLERY_TEXT)}</pre>" if text else '<p class="dim">empty answer</p>'
    words = f'<div {attrs}><p class="badges">{_badge(row, metric)}{samples}</p>{body}</div>'
    return f"<g {attrs}>{below}</g>", f"<g {attrs}>{above}</g>", words


def gallery(run: Run, pictures: Pictures, metric: str) -> str:
    """Cards with a picture, its boxes and the model's text; the slider shows one evaluation at a time."""
    evals, ids = _thinned(run.evals), _ids(run)
    shots = [_shots(e, set(ids)) for e in evals]
    units = sorted({u for s in shots for u in s}, key=lambda u: (ids.index(u[1]), u))
    if not units:
        return '<p class="missing">No predictions of gallery pictures in eval/*/predictions.jsonl.</p>'
    cards, last = [], len(evals) - 1
    for unit in units:
        rows = next(s[unit] for s in reversed(shots) if unit in s)
        row = (rows.get("greedy") or rows.get("sampled") or [{}])[0]
        states = [_state(i, last, s.get(unit), metric) for i, s in enumerate(shots)]
        below, above, texts = ("".join(part) for part in zip(*states, strict=True))
        cards.append(f'<article class="card pic">{pictures.drawing(row, below, above)}'
                     f'<h4 dir=auto>{cut_text(row.get("question", ""), 300)}</h4>{texts}</article>')
    steps = " ".join(str(e.step) for e in evals)
    thinned = f" Shown: {len(evals)} of {len(run.evals)} evaluations." if len(evals) < len(run.evals) else ""
    control = f'<p class="note">step {evals[-1].step:,}</p>'
    if last > 0:
        control = ('<div class="slider"><button type="button" class="play" aria-label="play through training">▶'
                   '</button>'
                   f'<input type="range" min="0" max="{last}" value="{last}" step="1" data-steps="{steps}" '
                   f'aria-label="evaluation step"><output>step {evals[-1].step:,}</output></div>')
    legend = ('<span class="key box gold"></span> gold <span class="key box greedy"></span> greedy answer '
              '<label><input type="checkbox" class="samples" checked><span class="key box sampled"></span> '
              'sampled answers</label>')
    return (f'<div class="gallery">{control}<p class="note">{legend}{esc(thinned)}</p>'
            f'<div class="pics">{"".join(cards)}</div></div>')


def _case(row: Row, pictures: Pictures, metric: str, extra: str = "") -> str:
    overlay = box_group(boxes_of(row, "pred_boxes"), "greedy" if row.get("mode") == "greedy" else "sampled")
    text = row.get("text") or ""
    body = f"<pre dir=auto>{cut_text(text, CASE_TEXT)}</pre>" if text else '<p class="dim">empty answer</p>'
    return (f'<article class="card pic">{pictures.drawing(row, "", overlay)}<h4 '
            f'dir=auto>{cut_text(row.get("question", ""), 300)}</h4>'
            f'<p class="badges">{_badge(row, metric)}{extra}</p>{body}</article>')


def _mode(evaluation: EvalStep) -> str:
    return "greedy" if evaluation.estimates.get("greedy") else "sampled"


def worst_cases(run: Run, pictures: Pictures, metric: str, count: int = 8) -> str:
    """Lowest scores among parsed answers of the last evaluation, and what got worse most since the first."""
    if not run.evals:
        return '<p class="missing">No finished evaluation in eval/.</p>'
    first, last = run.evals[0], run.evals[-1]
    mode = _mode(last)
    chosen: dict[tuple[str, str], Row] = {}
    for row in last.rows(lambda r: r.get("mode") == mode and bool(score_of(r).get("parsed"))):
        old = chosen.get(unit_of(row))
        if old is None or metric_of(row, metric) < metric_of(old, metric):
            chosen[unit_of(row)] = row
    lowest = heapq.nsmallest(count, chosen.values(), key=lambda r: metric_of(r, metric))
    if not lowest:
        return f'<p class="missing">No parsed {mode} answers at step {last.step:,}.</p>'
    name = esc(metric_name(metric).removeprefix("m"))
    out = [f"<h3>Lowest {name} among parsed {mode} answers, step {last.step:,}</h3>",
           f'<div class="pics">{"".join(_case(r, pictures, metric) for r in lowest)}</div>']
    if last is not first and mode == _mode(first) == "greedy":
        before = {unit_of(r): metric_of(r, metric) for r in first.rows(lambda r: r.get("mode") == mode)}
        drops = [(metric_of(r, metric) - before[u], r) for u, r in chosen.items() if u in before]
        worse = [d for d in heapq.nsmallest(4, drops, key=lambda d: d[0]) if d[0] < -0.05]
        if worse:
            cards = "".join(_case(r, pictures, metric, f'<span class="badge soft">was {metric_of(r, metric) - d:.2f}'
                                                       f'</span>')
                            for d, r in worse)
            out.append(f'<h3>Fell most since step {first.step:,}</h3><div class="pics">{cards}</div>')
    return "".join(out)


def parse_failures(run: Run, count: int = 10) -> str:
    """Counts of reasons at the last evaluation, and raw texts: greedy first, different reasons before repeats."""
    if not run.evals:
        return ""
    last = run.evals[-1]
    total, reasons, kept = 0, Counter[str](), defaultdict[str, list[Row]](list)
    for row in last.rows():
        total += 1
        if not score_of(row).get("parsed"):
            reason = str(score_of(row).get("reason") or "no reason").partition(":")[0]
            reasons[reason] += 1
            kept[reason].append(row)
            kept[reason].sort(key=lambda r: r.get("mode") != "greedy")
            del kept[reason][count:]
    if not reasons:
        words = f'<p class="note">None among {plural(total, "answer")}.</p>'
        return f"<h3>Parse failures, step {last.step:,}</h3>{words}" if total else ""
    words = ", ".join(f"{esc(reason)} {n:,}" for reason, n in reasons.most_common())
    turns = [(i, -reasons[reason], row) for reason, rows in kept.items() for i, row in enumerate(rows)]
    rows = [row for _, _, row in sorted(turns, key=lambda t: t[:2])[:count]]
    failed = sum(reasons.values())
    shown = f" Shown: {len(rows)}." if len(rows) < failed else ""
    return (f'<h3>Parse failures, step {last.step:,}</h3><p class="note">{failed:,} of {plural(total, "answer")}: '
            f'{words}.{shown}</p><div class="fails">{"".join(map(_failure, rows))}</div>')


def _failure(row: Row) -> str:
    reason = esc(str(score_of(row).get("reason") or "no reason")[:120])
    return (f'<div class="card fail"><p class="badges"><span class="badge bad">{reason}</span>'
            f'<span class="badge soft">{esc(row.get("mode", ""))}, ended by {esc(row.get("stop", "?"))}</span></p>'
            f'<h4 dir=auto>{cut_text(row.get("question", ""), 300)}</h4>'
            f'<pre dir=auto>{cut_text(row.get("text") or "", CASE_TEXT) or "(empty)"}</pre></div>')
