"""What the explorer shows: lines of the list, and one row whole with its drawing, its group and its past."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from mmrl.report.clips import episode_clip, episode_strip
from mmrl.report.filmstrip import Figures
from mmrl.report.gallery import answer_texts
from mmrl.report.load import number
from mmrl.report.rows import headline_of, metric_of, score_of
from mmrl.report.stills import clip_of
from mmrl.report.text import metric_name, plural
from mmrl.report.turns import TurnStrips
from mmrl.viewer.index import NAMED, Table, flat_row
from mmrl.viewer.media import MediaPolicy, texts_of

__all__ = ["clean", "detail", "facets", "lines"]

_EXCERPT = 240
_MOST_RAW = 1 << 20  # characters of a row that are sent as they are
_MOST_GROUP = 64
_MOST_PAST = 400


def clean(value: Any) -> Any:
    """`value` as strict JSON can hold it: numbers that are not finite become null."""
    if isinstance(value, float):
        return value if value == value and abs(value) != float("inf") else None
    if isinstance(value, Mapping):
        return {str(k): clean(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [clean(v) for v in value]
    return value


def facets(table: Table) -> dict[str, Any]:
    """Filters and how often each of their values occurs, and the range of steps."""
    return {
        **{
            name: sorted(
                ([t, n] for t, n in zip(found.texts, found.counts, strict=False)),
                key=lambda pair: -pair[1],
            )
            for name in NAMED
            if (found := table.texts[name])
        },
        "steps": [min(table.steps, default=None), max(table.steps, default=None)],
        "contrast": any(f & 2 for f in table.flags),
    }


def lines(table: Table, rows: Sequence[int]) -> list[dict[str, Any]]:
    """The list's lines of those rows."""
    out = []
    for number_, line in zip(rows, table.lines(list(rows)), strict=True):
        row, facts = flat_row(line), table.facts(number_)
        out.append(
            {
                "row": number_,
                "step": facts.step,
                "reward": facts.reward,
                "parsed": facts.parsed,
                "contrast": facts.contrast,
                **facts.named,
                **({"gone": True} if row is None else _line(row)),
            }
        )
    return out


def _line(row: Mapping[str, Any]) -> dict[str, Any]:
    images, videos = texts_of(row, "images"), texts_of(row, "videos")
    name = headline_of(row)
    return {
        "id": str(row.get("id", ""))[:200],
        "question": str(row.get("question", ""))[:_EXCERPT],
        "text": str(row.get("text") or "")[:_EXCERPT],
        "said": _deeds(row),
        "turns": len(row["turns"]) if isinstance(row.get("turns"), list) else 1,
        "metric": [metric_name(name), clean(metric_of(row, name))] if name != "reward" else None,
        "media": "clip"
        if videos
        else "picture"
        if images
        else "episode"
        if row.get("video")
        else "",
    }


def _deeds(row: Mapping[str, Any]) -> str:
    """What an episode of a robot came to, in words; '' for an answer."""
    metrics = score_of(row).get("metrics")
    if not isinstance(metrics, Mapping) or "success_once" not in metrics:
        return ""
    ended = "not finished" if row.get("stop") == "error" else ""
    won = "success" if metric_of(row, "success_once") >= 0.5 else "failure"
    steps = f" after {plural(int(metric_of(row, 'steps')), 'control step')}"
    return (ended or won) + (steps if "steps" in metrics else "")


def detail(
    table: Table, row_number: int, policy: MediaPolicy, cwd: str, *, group: bool = True
) -> dict[str, Any] | None:
    """One row: its texts, every turn, its score, the drawing of its media with all answers of its group, the group's members,
    and the same prompt in other steps. None where the file is no longer what it was."""
    row = table.row(row_number)
    if row is None:
        return None
    facts, folder = table.facts(row_number), table.folder
    members = _members(table, row_number) if group else [row_number]
    others = [
        (r, "sampled")
        for n in members
        if n != row_number and (r := table.row(n)) is not None and not table.flags[n] & 2
    ]
    shown = policy.shown(row, folder, cwd)
    figures = Figures(folder)
    drawn = figures.drawing(shown, [("", [*others, (row, "greedy")])])
    raw = json.dumps(row, indent=1, ensure_ascii=False, default=str)
    sample = row.get("sample") if isinstance(row.get("sample"), Mapping) else {}
    turns = row.get("turns")
    clip = episode_clip(row, table.folder_of(row_number) / "videos", folder)
    return {
        "row": row_number,
        **_line(row),
        "question": str(row.get("question", "")),
        "text": str(row.get("text") or ""),
        "turn_texts": [str(t) for t in turns] if isinstance(turns, list) else [],
        "step": facts.step,
        "parsed": facts.parsed,
        "contrast": facts.contrast,
        "view": str(row.get("view") or ""),
        "offline": bool(row.get("offline")),
        **facts.named,
        "unit": str(facts.unit),
        "reason_words": str(score_of(row).get("reason") or ""),
        "tokens": clean(number(row.get("num_tokens"))),
        "score": clean(score_of(row)),
        "reward": facts.reward,
        "answer": clean(sample.get("answer")) if isinstance(sample, Mapping) else None,
        "params": clean(sample.get("params")) if isinstance(sample, Mapping) else None,
        "prompt": _prompt(row),
        "figure": drawn,
        "texts": answer_texts({**row, "mode": "greedy"}),
        "images": len(texts_of(row, "images")),
        "clip": clip_of(row) is not None,
        "episode": clip is not None,
        "strip": episode_strip(clip, row, str(row.get("id", "")))[0]
        if clip is not None
        else TurnStrips(folder).strip(row, table.folder_of(row_number) / "pictures"),
        "group": [_member(table, n) for n in members],
        "past": _past(table, facts.unit, facts.named["mode"]),
        "raw": raw[:_MOST_RAW],
        "raw_cut": len(raw) > _MOST_RAW,
    }


def _prompt(row: Mapping[str, Any]) -> str:
    """The template that the question was put into, where the row names it."""
    params = row.get("task_params")
    found = params.get("prompt") if isinstance(params, Mapping) else None
    return str(found) if isinstance(found, str) else ""


def _members(table: Table, row: int) -> list[int]:
    """Rows of the same group: answers to the same prompt in the same step."""
    groups, group = table.groups, table.groups[row]
    found = [r for r in range(len(table)) if groups[r] == group]
    place = max(0, min(found.index(row) - _MOST_GROUP // 2, len(found) - _MOST_GROUP))
    return found[place : place + _MOST_GROUP]


def _member(table: Table, row: int) -> dict[str, Any]:
    facts = table.facts(row)
    return {
        "row": row,
        "reward": facts.reward,
        "parsed": facts.parsed,
        "contrast": facts.contrast,
        "mode": facts.named["mode"],
    }


def _past(table: Table, unit: int, mode: str) -> list[list[float]]:
    """[step, mean reward, first row] of the same prompt in every step, answers of one mode only."""
    code, sums = table.texts["mode"].find(mode), dict[int, list[float]]()
    units, modes = table.units, table.columns["mode"]
    for row in range(len(table)):
        if units[row] == unit and modes[row] == code and not table.flags[row] & 2:
            found = sums.setdefault(table.steps[row], [0.0, 0, row])
            found[0] += table.rewards[row]
            found[1] += 1
    out = [[step, total / count, row] for step, (total, count, row) in sorted(sums.items())]
    return out[-_MOST_PAST:]
