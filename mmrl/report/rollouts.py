"""What training wrote: some logged groups from the start to the end of the run, answers on changed input told apart.

Rows of rollouts/step_*.jsonl hold the sample, the text and the score. A row of a contrast group (T-GRPO's shuffled frames and
its relatives) carries `view`, the name of the change, and `contrast` true where the text was written on the changed input.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mmrl.report.contrast import view_name
from mmrl.report.filmstrip import Figures
from mmrl.report.gallery import answer_texts, card_class
from mmrl.report.load import Run, own_file, parse_line
from mmrl.report.rows import metric_of, score_of
from mmrl.report.text import cut_text, esc, plural
from mmrl.report.turns import TurnStrips, has_turns

__all__ = ["rollouts"]

MAX_STEPS, MAX_GROUPS, MAX_ANSWERS = 4, 2, 8  # steps shown, groups of each, answers of a group
_MAX_LINES = 512  # of a file that are read
_TEXT = 400
Row = dict[str, Any]
Strip = Callable[[Row], str]


def _files(folder: Path) -> list[tuple[int, Path]]:
    """(step, file) of at most MAX_STEPS logged steps, evenly spread, with the first and the last: of those with pictures of turns
    where there are any."""
    found = sorted(
        (int(m.group(1)), path)
        for path in folder.glob("step_*.jsonl")
        if (m := re.fullmatch(r"step_(\d+)\.jsonl", path.name)) and own_file(path, folder.parent)
    )
    kept = {path.name.partition("_")[0] for path in folder.glob("pictures/*_*.*")}
    found = [(step, path) for step, path in found if str(step) in kept] or found
    if len(found) <= MAX_STEPS:
        return found
    return [found[round(i * (len(found) - 1) / (MAX_STEPS - 1))] for i in range(MAX_STEPS)]


def _groups(path: Path, max_groups: int) -> list[list[Row]]:
    """The first groups of a step: rows with the sample's fields beside their own, as predictions have them."""
    groups: dict[str, list[Row]] = {}
    with path.open(encoding="utf-8", errors="replace") as file:
        for _, line in zip(range(_MAX_LINES), file, strict=False):
            row = parse_line(line)
            if not isinstance(row, dict) or not isinstance(row.get("sample"), dict):
                continue
            sample = row["sample"]
            key = str(row.get("key") or (sample.get("source"), sample.get("id")))
            if key in groups or len(groups) < max_groups:
                shared = {
                    k: sample[k]
                    for k in ("id", "source", "task", "question", "images", "videos")
                    if k in sample
                }
                groups.setdefault(key, []).append({**row, **shared, "mode": "sampled"})
    return list(groups.values())


def _mean(rows: Sequence[Mapping[str, Any]]) -> str:
    return f"{sum(metric_of(r, 'reward') for r in rows) / len(rows):.2f}"


def _answer(row: Row) -> str:
    score, text = score_of(row), row.get("text") or ""
    badge = (
        f'<span class="badge">Reward {metric_of(row, "reward"):.2f}</span>'
        if score.get("parsed")
        else f'<span class="badge bad">not parsed: {esc(str(score.get("reason") or "no reason")[:80])}</span>'
    )
    cut = '<span class="badge bad">cut by length</span>' if row.get("stop") == "length" else ""
    said = (
        f"<pre dir=auto>{cut_text(text, _TEXT)}</pre>"
        if text
        else '<p class="dim">empty answer</p>'
    )
    return f'<li><p class="badges">{badge}{cut}</p>{said}</li>'


def _answers(rows: Sequence[Row]) -> str:
    left_out = (
        f'<li class="dim">{len(rows) - MAX_ANSWERS} more</li>' if len(rows) > MAX_ANSWERS else ""
    )
    return f'<ul class="answers">{"".join(_answer(r) for r in rows[:MAX_ANSWERS])}{left_out}</ul>'


def _group(step: int, rows: Sequence[Row], figures: Figures, strip: Strip) -> str:
    """One card: the media with all answers on the plain input, texts, and the contrast group below."""
    plain, changed = (
        [r for r in rows if (r.get("contrast") is True) is side] for side in (False, True)
    )
    first = (plain or changed)[0]
    view = next((str(r["view"]) for r in rows if r.get("view")), "")
    name = view_name(view)
    source, task = str(first.get("source", "")), str(first.get("task", ""))
    tag = " · ".join(dict.fromkeys(t for t in (f"step {step:,}", source, task) if t))
    means = [f"mean reward {_mean(plain)} of {plural(len(plain), 'answer')}"] if plain else []
    means += [f"{_mean(changed)} on {name}"] if changed else []
    means += (
        ["contrast not rolled out: it could not change an advantage"]
        if view and not changed
        else []
    )
    filmed = next((r for r in plain if has_turns(r)), None)
    drawn = (
        figures.drawing(first, [("", [(r, "sampled") for r in plain])])
        if filmed is None
        else f"{strip(filmed)}{_which(plain.index(filmed), len(plain))}"
    )
    below = f"<h5>On {esc(name)}, never trained on</h5>{_answers(changed)}" if changed else ""
    gold = answer_texts(
        {**first, "score": {**score_of(first), "parsed": False, "detail": _gold(first)}}
    )
    return (
        f'<article class="{card_class(filmed or first)}"><p class="tag">{esc(tag)}</p>{drawn}'
        f'<h4 dir=auto>{cut_text(first.get("question", ""), 300)}</h4>{gold}<p class="note">{esc("; ".join(means))}</p>'
        f"{_answers(plain) if plain else ''}{below}</article>"
    )


def _gold(row: Row) -> dict[str, Any]:
    """The truth of a row's detail alone."""
    detail = score_of(row).get("detail")
    return (
        {k: v for k, v in detail.items() if k.startswith("gold_")}
        if isinstance(detail, Mapping)
        else {}
    )


def _which(place: int, count: int) -> str:
    return f'<p class="note">turns of answer {place + 1} of {count}</p>'


def rollouts(run: Run, figures: Figures, max_groups: int = MAX_GROUPS) -> str:
    """Groups of a few steps of the run; '' when none were logged."""
    strips, pictures = TurnStrips(run.folder), run.folder / "rollouts" / "pictures"
    cards = [
        _group(step, rows, figures, lambda row: strips.strip(row, pictures))
        for step, path in _files(run.folder / "rollouts")
        for rows in _groups(path, max_groups)
        if rows
    ]
    if not cards:
        return ""
    legend = '<span class="key box gold"></span> gold <span class="key box sampled"></span> answers of the group'
    return f'<p class="note">{legend}</p><div class="pics">{"".join(cards)}</div>'
