"""The same held-out pictures through training with a slider over the evaluations, and the worst cases of the last."""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from mmrl.report.filmstrip import Figures, Layer, has_film
from mmrl.report.load import EvalStep, Run
from mmrl.report.rows import headline_of, is_right, metric_of, score_of, task_of, text_of, unit_of
from mmrl.report.text import cut_text, esc, metric_name, plural
from mmrl.report.turns import TurnStrips, has_turns

__all__ = ["answer_texts", "card_class", "gallery", "parse_failures", "worst_cases"]

MAX_STEPS = 40  # positions of the slider
MAX_PICTURES = 48
GALLERY_TEXT, CASE_TEXT, SHORT_TEXT = 1200, 4000, 400  # characters of model text shown
Row = dict[str, Any]
Unit = tuple[str, str]
Shots = dict[Unit, dict[str, list[Row]]]
"""prompt -> mode -> its rows in one evaluation."""


def _thinned(evals: Sequence[EvalStep]) -> list[EvalStep]:
    """At most MAX_STEPS evaluations, evenly spread, with the first and the last."""
    if len(evals) <= MAX_STEPS:
        return list(evals)
    return [evals[round(i * (len(evals) - 1) / (MAX_STEPS - 1))] for i in range(MAX_STEPS)]


def _units(run: Run) -> list[Unit]:
    """Prompts of the gallery: those of gallery.json first, taken in turns from every source and task.

    Where gallery.json leaves a source or task out, prompts of the evaluation are added, so that each has some.
    """
    groups: dict[tuple[str, str], dict[Unit, None]] = defaultdict(dict)
    for evaluation in run.evals:
        for row in evaluation.rows():
            groups[str(row.get("source", "")), task_of(row)].setdefault(unit_of(row))
        if groups:
            break
    named = {prompt: number for number, prompt in enumerate(run.gallery)}
    place = {u: named.get(u, named.get((None, u[1]))) for units in groups.values() for u in units}
    listed = {
        key: sorted((u for u in units if place[u] is not None), key=lambda u: place[u] or 0)
        for key, units in groups.items()
    }
    if not named or not all(listed.values()):
        others = {key: [u for u in units if u not in listed[key]] for key, units in groups.items()}
        listed = {key: [*listed[key], *others[key]] for key in groups}
        most = max(len(named) or 12, 2 * len(groups))
    else:
        most = MAX_PICTURES
    turns = [
        (turn, number, unit)
        for number, units in enumerate(listed.values())
        for turn, unit in enumerate(units)
    ]
    return [unit for _, _, unit in sorted(turns, key=lambda t: t[:2])][: min(most, MAX_PICTURES)]


def _shots(evaluation: EvalStep, units: set[Unit]) -> Shots:
    out: Shots = defaultdict(lambda: defaultdict(list))
    for row in evaluation.rows(lambda r: unit_of(r) in units):
        out[unit_of(row)][str(row.get("mode", ""))].append(row)
    return out


def _title(name: str) -> str:
    return esc(
        metric_name(name).removeprefix("m") if name in ("iou", "giou") else metric_name(name)
    )


def _badge(row: Row, metric: str) -> str:
    score = score_of(row)
    if not score.get("parsed"):
        return f'<span class="badge bad">not parsed: {esc(str(score.get("reason") or "no reason")[:80])}</span>'
    name = headline_of(row) if metric == "headline" else metric
    words = f'<span class="badge">{_title(name)} {metric_of(row, metric):.2f}</span>'
    return words + (
        '<span class="badge bad">cut by length</span>' if row.get("stop") == "length" else ""
    )


def answer_texts(row: Row, sampled: Sequence[Row] = ()) -> str:
    """Gold and predicted text side by side, a mark for right or wrong, and what the samples said; '' without texts."""
    gold, predicted = text_of(row, "gold_text"), text_of(row, "pred_text")
    counts = Counter(t for r in sampled if (t := text_of(r, "pred_text")) is not None)
    if gold is None or (predicted is None and not counts):
        return "" if gold is None else f'<div class="texts">{_answer("gold", gold)}</div>'
    right = is_right(row)
    mark = (
        ""
        if right is None or predicted is None
        else (' <b class="yes">right</b>' if right else ' <b class="no">wrong</b>')
    )
    out = _answer("gold", gold) + (
        _answer("greedy" if row.get("mode") == "greedy" else "sampled", predicted, mark)
        if predicted is not None
        else ""
    )
    if row.get("mode") == "greedy" and counts:
        shown = ", ".join(f"{cut_text(t, 60)} ×{n}" for t, n in counts.most_common(4))
        left_out = len(counts) - 4
        out += (
            f'<div class="of-samples"><i class="key box sampled"></i><span dir=auto>{shown}'
            f"{f' and {left_out} others' if left_out > 0 else ''}</span></div>"
        )
    return f'<div class="texts">{out}</div>'


def _answer(kind: str, text: str, mark: str = "") -> str:
    return f'<div><i class="key box {kind}"></i><span dir=auto>{cut_text(text, SHORT_TEXT) or "(empty)"}</span>{mark}</div>'


def _tag(row: Row, many: bool) -> str:
    """Which source and task a card is of; only where there are several."""
    if not many:
        return ""
    source, task = str(row.get("source", "")), task_of(row)
    return f'<p class="tag">{esc(source)}{f" · {esc(task)}" if task and task != source else ""}</p>'


def _state(
    number: int,
    last: int,
    shot: Mapping[str, list[Row]] | None,
    metric: str,
    strip: Callable[[Row], str],
) -> tuple[Layer, str]:
    """(answers to draw, HTML below) of one prompt at one evaluation; hidden unless it is the last. `strip` draws a row's
    turns."""
    attrs = f'class="state" data-step="{number}"{"" if number == last else " hidden"}'
    if not shot or not any(shot.get(kind) for kind in ("greedy", "sampled")):
        return (
            attrs,
            [],
        ), f'<div {attrs}><p class="dim">not among the prompts of this evaluation</p></div>'
    greedy, sampled = shot.get("greedy", []), shot.get("sampled", [])
    row = (greedy or sampled)[0]
    drawn = [(r, kind) for rows, kind in ((sampled, "sampled"), (greedy, "greedy")) for r in rows]
    mean = sum(metric_of(r, metric) for r in sampled) / len(sampled) if sampled else None
    samples = (
        f'<span class="badge soft">mean of {len(sampled)} samples {mean:.2f}</span>'
        if mean is not None
        else ""
    )
    text = row.get("text") or ""
    body = (
        f"<pre dir=auto>{cut_text(text, GALLERY_TEXT)}</pre>"
        if text
        else '<p class="dim">empty answer</p>'
    )
    words = f'<div {attrs}>{strip(row)}{answer_texts(row, sampled)}<p class="badges">{_badge(row, metric)}{samples}</p>{body}</div>'
    return (attrs, drawn), words


def _media(row: Row, figures: Figures, layers: Sequence[Layer]) -> str:
    """The row's picture or clip; '' where it has none of its own, and what was seen is that of its turns."""
    own = row.get("images") or row.get("videos")
    return "" if has_turns(row) and not own else figures.drawing(row, layers)


def _turns(strips: TurnStrips, evaluation: EvalStep, drawn: bool, row: Row) -> str:
    """The row's filmstrip, of the first and the last evaluation: a page with all of them would be large."""
    if not has_turns(row):
        return ""
    if not drawn:
        return '<p class="note">the turns of this evaluation are shown by mmrl view</p>'
    return strips.strip(row, evaluation.folder / "pictures")


def card_class(row: Row) -> str:
    """A clip's card, and that of a rollout of several turns, is twice as wide as a picture's."""
    return "card pic wide" if has_film(row) or has_turns(row) else "card pic"


def gallery(run: Run, figures: Figures, metric: str) -> str:
    """Cards with a picture or filmstrip, the gold and the model's answers over it, and texts; the slider shows one evaluation."""
    evals, units = _thinned(run.evals), _units(run)
    shots = [_shots(e, set(units)) for e in evals]
    units = [u for u in units if any(u in s for s in shots)]
    if not units:
        return (
            '<p class="missing">No predictions of gallery pictures in eval/*/predictions.jsonl.</p>'
        )
    found = [(u, next(s[u] for s in reversed(shots) if u in s)) for u in units]
    rows = [(u, (modes.get("greedy") or modes.get("sampled") or [{}])[0]) for u, modes in found]
    many = len({(u[0], task_of(row)) for u, row in rows}) > 1
    cards, last, strips = [], len(evals) - 1, TurnStrips(run.folder)
    for unit, row in rows:
        layers, texts = zip(
            *(
                _state(
                    i, last, s.get(unit), metric, partial(_turns, strips, evals[i], i in (0, last))
                )
                for i, s in enumerate(shots)
            ),
            strict=True,
        )
        cards.append(
            f'<article class="{card_class(row)}">{_tag(row, many)}{_media(row, figures, layers)}'
            f"<h4 dir=auto>{cut_text(row.get('question', ''), 300)}</h4>{''.join(texts)}</article>"
        )
    steps = " ".join(str(e.step) for e in evals)
    thinned = (
        f" Shown: {len(evals)} of {len(run.evals)} evaluations."
        if len(evals) < len(run.evals)
        else ""
    )
    control = f'<p class="note">step {evals[-1].step:,}</p>'
    if last > 0:
        control = (
            '<div class="slider"><button type="button" class="play" aria-label="play through training">▶'
            "</button>"
            f'<input type="range" min="0" max="{last}" value="{last}" step="1" data-steps="{steps}" '
            f'aria-label="evaluation step"><output>step {evals[-1].step:,}</output></div>'
        )
    legend = (
        '<span class="key box gold"></span> gold <span class="key box greedy"></span> greedy answer '
        '<label><input type="checkbox" class="samples" checked><span class="key box sampled"></span> '
        "sampled answers</label>"
    )
    return (
        f'<div class="gallery">{control}<p class="note">{legend}{esc(thinned)}</p>'
        f'<div class="pics">{"".join(cards)}</div></div>'
    )


def _case(
    row: Row,
    figures: Figures,
    metric: str,
    many: bool,
    strip: Callable[[Row], str],
    extra: str = "",
) -> str:
    kind = "greedy" if row.get("mode") == "greedy" else "sampled"
    text = row.get("text") or ""
    body = (
        f"<pre dir=auto>{cut_text(text, CASE_TEXT)}</pre>"
        if text
        else '<p class="dim">empty answer</p>'
    )
    return (
        f'<article class="{card_class(row)}">{_tag(row, many)}{_media(row, figures, [("", [(row, kind)])])}<h4 '
        f"dir=auto>{cut_text(row.get('question', ''), 300)}</h4>"
        f'{strip(row)}{answer_texts(row)}<p class="badges">{_badge(row, metric)}{extra}</p>{body}</article>'
    )


def _mode(evaluation: EvalStep) -> str:
    return "greedy" if evaluation.estimates.get("greedy") else "sampled"


def _lowest(rows: Iterable[Row], metric: str, count: int) -> list[Row]:
    """The lowest of each source in turns, so that one hard source does not hide the others."""
    by_source: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        by_source[unit_of(row)[0]].append(row)
    each = [
        heapq.nsmallest(count, part, key=lambda r: metric_of(r, metric))
        for _, part in sorted(by_source.items())
    ]
    turns = [
        (turn, number, row) for number, part in enumerate(each) for turn, row in enumerate(part)
    ]
    return [row for _, _, row in sorted(turns, key=lambda t: t[:2])][: max(count, len(each))]


def worst_cases(run: Run, figures: Figures, metric: str, count: int = 8) -> str:
    """Lowest scores among parsed answers of the last evaluation, and what got worse most since the first."""
    if not run.evals:
        return '<p class="missing">No finished evaluation in eval/.</p>'
    first, last = run.evals[0], run.evals[-1]
    mode = _mode(last)
    chosen: dict[Unit, Row] = {}
    for row in last.rows(lambda r: r.get("mode") == mode and bool(score_of(r).get("parsed"))):
        old = chosen.get(unit_of(row))
        if old is None or metric_of(row, metric) < metric_of(old, metric):
            chosen[unit_of(row)] = row
    lowest = _lowest(chosen.values(), metric, count)
    if not lowest:
        return f'<p class="missing">No parsed {mode} answers at step {last.step:,}.</p>'
    many = len({(u[0], task_of(r)) for u, r in chosen.items()}) > 1
    each = " of each source" if len({u[0] for u in chosen}) > 1 else ""
    name = "scores" if metric == "headline" else _title(metric)
    strip = partial(_turns, TurnStrips(run.folder), last, True)
    out = [
        f"<h3>Lowest {name}{each} among parsed {mode} answers, step {last.step:,}</h3>",
        f'<div class="pics">{"".join(_case(r, figures, metric, many, strip) for r in lowest)}</div>',
    ]
    if last is not first and mode == _mode(first) == "greedy":
        before = {
            unit_of(r): metric_of(r, metric) for r in first.rows(lambda r: r.get("mode") == mode)
        }
        drops = [(metric_of(r, metric) - before[u], r) for u, r in chosen.items() if u in before]
        worse = [d for d in heapq.nsmallest(4, drops, key=lambda d: d[0]) if d[0] < -0.05]
        if worse:
            cards = "".join(
                _case(
                    r,
                    figures,
                    metric,
                    many,
                    strip,
                    f'<span class="badge soft">was {metric_of(r, metric) - d:.2f}</span>',
                )
                for d, r in worse
            )
            out.append(
                f'<h3>Fell most since step {first.step:,}</h3><div class="pics">{cards}</div>'
            )
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
    turns = [
        (i, -reasons[reason], row) for reason, rows in kept.items() for i, row in enumerate(rows)
    ]
    rows = [row for _, _, row in sorted(turns, key=lambda t: t[:2])[:count]]
    failed = sum(reasons.values())
    shown = f" Shown: {len(rows)}." if len(rows) < failed else ""
    return (
        f'<h3>Parse failures, step {last.step:,}</h3><p class="note">{failed:,} of {plural(total, "answer")}: '
        f'{words}.{shown}</p><div class="fails">{"".join(map(_failure, rows))}</div>'
    )


def _failure(row: Row) -> str:
    reason = esc(str(score_of(row).get("reason") or "no reason")[:120])
    return (
        f'<div class="card fail"><p class="badges"><span class="badge bad">{reason}</span>'
        f'<span class="badge soft">{esc(row.get("mode", ""))}, ended by {esc(row.get("stop", "?"))}, '
        f"{esc(row.get('source', ''))}</span></p>"
        f"<h4 dir=auto>{cut_text(row.get('question', ''), 300)}</h4>"
        f"<pre dir=auto>{cut_text(row.get('text') or '', CASE_TEXT) or '(empty)'}</pre></div>"
    )
