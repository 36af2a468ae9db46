"""The top of the page: what the run is, what it achieved in one sentence, and tiles before and after with intervals."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from mmrl.evaluation.stats import Estimate
from mmrl.report.charts import track
from mmrl.report.curves import MODES, metric_names
from mmrl.report.load import EvalStep, Run
from mmrl.report.rows import gains, part_gains, unit_of
from mmrl.report.text import esc, interval, metric_name, short

__all__ = ["Outcome", "choose_headline", "header", "mode_label", "outcome", "tiles", "verdict"]

Numbers = Mapping[str, float | None]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """First and last evaluation with the paired gains between them. `headline` is the metric the sentence is about."""

    headline: str
    mode: str
    first: EvalStep | None
    last: EvalStep | None
    gains: Mapping[tuple[str, str], Estimate]


def choose_headline(run: Run) -> tuple[str, str]:
    """(mode, metric) that a run is judged by.

    It is the metric that picked checkpoints/best (run.json, or eval.best_metric of the configuration), else the mean over sources
    where there are several, else the source's own headline, IoU, 'correct' or the reward."""
    first = run.evals[0] if run.evals else None
    names = _measured(run)
    mode, _, metric = str(run.info.get("best_metric") or _best_metric(run.config_text)).partition(
        "/"
    )
    many = len(first.per_source) > 1 if first else False
    own = (
        [first.headlines["per_source"][s] for s in first.headlines.get("per_source", {})]
        if first and not many
        else []
    )
    usual = [*(["macro"] if many else []), *own, "iou", "correct", "reward"]
    wishes = [(mode, metric), *((m, n) for n in usual for m in MODES), *names]
    return next((w for w in wishes if w in names), ("sampled", "reward"))


def _measured(run: Run) -> list[tuple[str, str]]:
    """(mode, metric) of the first evaluation."""
    return [(m, n) for e in run.evals[:1] for m in MODES for n in e.estimates.get(m, {})]


def outcome(run: Run) -> Outcome:
    """Choose the headline and compare first with last."""
    first = run.evals[0] if run.evals else None
    last = run.evals[-1] if len(run.evals) > 1 else None
    mode, headline = choose_headline(run)
    many = len(first.per_source) > 1 if first else False
    wanted = [n for _, n in _measured(run) if many or n != "macro"]
    pairs = gains(first, last, wanted) if first and last else {}
    return Outcome(headline, mode, first, last, pairs)


def _best_metric(text: str) -> str:
    import yaml

    try:
        value: Any = yaml.safe_load(text) or {}
        return str(value["eval"]["best_metric"])
    except (yaml.YAMLError, KeyError, TypeError, ValueError, RecursionError):
        return ""


def mode_label(evaluation: EvalStep | None, mode: str) -> str:
    """'sampled, avg@8', or 'greedy'."""
    k = evaluation.protocol.get("samples_per_prompt") if evaluation else None
    return f"sampled, avg@{k}" if mode == "sampled" and k else mode


def _with_interval(estimate: Numbers) -> str:
    mean, spread = interval(estimate)
    return f"<b>{mean}</b>{f' <span class=ci>{spread}</span>' if spread else ''}"


def verdict(run: Run, found: Outcome) -> str:
    """One sentence, only from the run's files."""
    if found.first is None:
        return "There is no held-out evaluation yet."
    what = (
        metric_name(found.headline)
        if found.headline != "macro"
        else f"mean of {len(found.first.per_source)} sources"
    )
    name = f"Held-out {what} ({mode_label(found.first, found.mode)})"
    before = found.first.estimates[found.mode].get(found.headline)
    after = found.last.estimates[found.mode].get(found.headline) if found.last else None
    if before is None:
        return "The evaluation holds no numbers."
    if after is None or found.last is None:
        count = f" over {short(before.get('n'))} prompts" if before.get("n") else ""
        return (
            f"{name} was {_with_interval(before)}{count} at step {found.first.step}; "
            "there is no later evaluation yet."
        )
    far = (
        f"by step {found.last.step:,}"
        if run.info.get("status") != "finished"
        else f"after {found.last.step:,} steps"
    )
    gain = found.gains.get((found.mode, found.headline))
    ends = f"{_with_interval(before)} to {_with_interval(after)} {far}"
    if gain is None:
        return f"{name} went from {ends}."
    verb = "rose" if gain.low > 0 else "fell" if gain.high < 0 else "shows no certain change,"
    return f"{name} {verb} from {ends}: {_signed(gain)} on the same {gain.n:,} prompts.{_by_source(found)}"


def _by_source(found: Outcome) -> str:
    """A sentence about which sources rose and fell by their own headline; '' for one source."""
    if (
        found.first is None
        or found.last is None
        or len(found.last.per_source) < 2
        or not found.last.headlines
    ):
        return ""
    parts = {
        name: gain
        for (mode, name), gain in part_gains(
            found.first, found.last, lambda row: unit_of(row)[0]
        ).items()
        if mode == found.mode
    }
    rose, fell = (
        sorted(n for n, g in parts.items() if ok(g))
        for ok in (lambda g: g.low > 0, lambda g: g.high < 0)
    )
    fallen = f"<b>{esc(', '.join(fell))}</b> fell" if fell else "none fell"
    return f" Of {len(parts)} sources {len(rose) or 'none'} rose and {fallen} for certain."


def _signed(gain: Estimate) -> str:
    mean, spread = interval(dataclasses.asdict(gain), signed=True)
    return f"<b>{mean}</b>{f' <span class=ci>{spread}</span>' if spread else ''}"


def header(run: Run, found: Outcome, sentence: str) -> str:
    """Name, facts, the sentence (HTML)."""
    info = run.info
    total = info.get("total_steps")
    progress = f"step {run.last_step:,}" + (f" of {total:,}" if isinstance(total, int) else "")
    status = str(info.get("status") or "status unknown")
    facts = [
        ("model", info.get("model")),
        ("task", info.get("task") or _tasks(found)),
        ("progress", progress),
        ("started", str(info.get("started") or "").replace("T", " ")[:16] or None),
    ]
    items = "".join(f"<div><dt>{esc(k)}</dt><dd>{esc(v)}</dd></div>" for k, v in facts if v)
    tone = {"finished": "good", "running": "busy"}.get(
        status, "bad" if status in ("failed", "interrupted") else "busy"
    )
    return (
        f'<header class="top"><p class="kicker">mmrl run <span class="chip {tone}">{esc(status)}</span></p>'
        f'<h1>{esc(run.name)}</h1><p class="verdict">{sentence}</p><dl class="facts">{items}</dl>'
        f"</header>"
    )


def _tasks(found: Outcome) -> str:
    """Suite and tasks of an evaluation in simulators."""
    protocol = found.first.protocol if found.first else {}
    tasks = protocol.get("tasks")
    return (
        f"{protocol.get('suite')}: {', '.join(map(str, tasks[:12]))}"
        if isinstance(tasks, list)
        else ""
    )


def _tile_row(found: Outcome, mode: str, metric: str) -> str:
    ends = [e.estimates.get(mode, {}).get(metric) if e else None for e in (found.first, found.last)]
    before, after = ends
    if before is None and after is None:
        return ""
    shown = [e for e in ends if e]
    numbers = [
        v for e in shown for v in (e.get("mean"), e.get("low"), e.get("high")) if v is not None
    ]
    low, high = (
        (0.0, 1.0)
        if min(numbers) >= 0 and max(numbers) <= 1
        else (min(0.0, *numbers), max(numbers))
    )
    marks = [
        (kind, e.get("mean") or 0.0, e.get("low"), e.get("high"))
        for kind, e in zip(("before", "after"), ends, strict=True)
        if e
    ]
    gain = found.gains.get((mode, metric))
    old = (
        f'<span class="old">{interval(before)[0]}</span><span class="arrow">→</span>'
        if before and after
        else ""
    )
    new = after or before or {}
    spread = interval(new)[1] or f"no interval (n = {short(new.get('n'))})"
    change = f'<span class="gain">{_signed(gain)}</span>' if gain else ""
    if not after:
        change = '<span class="gain dim">no later evaluation</span>'
    return (
        f'<div class="tile-row" style="--c:var(--{MODES[mode]})"><div '
        f'class="mode">{esc(mode_label(found.first, mode))}</div>'
        f'<div class="figures">{old}<span class="new">{interval(new)[0]}</span><span class="ci">{spread}</span>'
        f"</div>"
        f"{track(marks, low, high if high > low else low + 1)}{change}</div>"
    )


def tiles(found: Outcome) -> str:
    """A card per important metric, sampled above greedy: before, after, interval, paired gain; all numbers folded."""
    if found.first is None:
        return '<p class="missing">No finished evaluation in eval/: nothing to compare yet.</p>'
    names = metric_names([found.first], found.headline)
    usual = [
        found.headline,
        *(["macro", "correct"] if "macro" in names else ["iou", "acc@0.5"]),
        "reward",
        "parse_rate",
    ]
    front = [n for n in names if n in usual][:4]
    front = front if len(front) > 2 else list(dict.fromkeys([*front, *names]))[:4]
    cards = "".join(
        f'<div class="card tile"><h3>{esc(metric_name(n))}'
        f"</h3>{''.join(_tile_row(found, m, n) for m in MODES)}</div>"
        for n in front
    )
    return f'<div class="tiles">{cards}</div>{_notes(found)}{_full_table(found, names)}'


def _notes(found: Outcome) -> str:
    assert found.first is not None
    words = []
    if found.first.protocol.get("interval"):
        words.append(f"Brackets: {found.first.protocol['interval']}.")
    if found.gains:
        words.append(
            "Gains: the same prompts before and after, paired, 95 % bootstrap over prompts."
        )
    if found.last is not None:
        counts = {
            n: {e.estimates.get(found.mode, {}).get(found.headline, {}).get("n")}
            for n, e in (("first", found.first), ("last", found.last))
        }
        if counts["first"] != counts["last"]:
            words.append(
                f"The first evaluation has n = {short(next(iter(counts['first'])))}, the last n = "
                f"{short(next(iter(counts['last'])))}: compare them by the paired gains."
            )
    words.append("Dots: hollow before, full after.")
    return f'<p class="note">{esc(" ".join(words))}</p>'


def _full_table(found: Outcome, names: list[str]) -> str:
    rows = []
    for name in names:
        for mode in MODES:
            ends = [
                e.estimates.get(mode, {}).get(name) if e else None
                for e in (found.first, found.last)
            ]
            if ends[0] is None and ends[1] is None:
                continue
            gain = found.gains.get((mode, name))
            cells = "".join(f'<td class="num">{_with_interval(e) if e else "–"}</td>' for e in ends)
            rows.append(
                f"<tr><td>{esc(metric_name(name))}</td><td>{mode}</td>{cells}"
                f'<td class="num">{_signed(gain) if gain else "–"}</td></tr>'
            )
    after = f"step {found.last.step:,}" if found.last else "later"
    return (
        '<details><summary>All held-out numbers</summary><div class="scroll"><table><thead><tr><th>metric</th><th>'
        "mode</th>"
        f'<th class="num">step {found.first.step if found.first else 0:,}</th><th class="num">{after}</th>'
        f'<th class="num">paired gain</th></tr></thead><tbody>{"".join(rows)}</tbody></table></div></details>'
    )
