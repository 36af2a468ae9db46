"""The data of a run: what each file gave, and what was left out, adjusted or could not be read, counted by kind.

The counts are those that the run printed when it started (skipped.json); rows that could not be read stand one by one in
rejected.jsonl, samples whose picture or clip failed while it ran in failures.jsonl.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from mmrl.report.load import Run, number
from mmrl.report.text import esc, plural

__all__ = ["data_section"]

_USES = {"train": "training", "eval": "held out"}
# kinds per file; the others are counted, and all of them stand in the file that is named
_SHOWN = 12


def _counts(value: Any) -> list[tuple[int, str]]:
    """(count, kind) of a mapping, the most frequent first; what is no count is left out."""
    pairs = value.items() if isinstance(value, Mapping) else ()
    found = [
        (int(count), str(kind))
        for kind, given in pairs
        if (count := number(given)) is not None and count > 0
    ]
    return sorted(found, key=lambda pair: (-pair[0], pair[1]))


def _lines(title: str, counts: list[tuple[int, str]], file: str, times: str = " ×") -> str:
    if not counts:
        return ""
    items = "".join(
        f"<li><b>{count:,}</b>{times} {esc(kind[:300])}</li>" for count, kind in counts[:_SHOWN]
    )
    hidden = len(counts) - _SHOWN
    more = f"<li>{plural(hidden, 'further kind')}</li>" if hidden > 0 else ""
    return f'<div class="counts"><small>{title} (<code>{file}</code>)</small><ul>{items}{more}</ul></div>'


def _gave(record: Mapping[str, Any]) -> str:
    """Samples, and the pictures, clips and sounds in them."""
    kept = int(number(record.get("kept")) or 0)
    media = [
        plural(int(count), noun)
        for noun, key in (("picture", "pictures"), ("clip", "clips"), ("sound", "sounds"))
        if (count := number(record.get(key)))
    ]
    return (
        f"{plural(kept, 'sample')}{'<br><small>' + ', '.join(media) + '</small>' if media else ''}"
    )


def _sources(record: Mapping[str, Any]) -> list[str]:
    return (
        [str(name) for name in record["by_source"]]
        if isinstance(record.get("by_source"), Mapping)
        else []
    )


def _number_of(count: int, noun: str) -> list[tuple[int, str]]:
    return [(count, noun if count == 1 else f"{noun}s")] if count else []


def _row(record: Mapping[str, Any], failed: int) -> str:
    sources = _sources(record)
    names = ", ".join(sources[:6]) + (" ..." if len(sources) > 6 else "")
    rejected = int(number(record.get("rejected")) or 0)
    told = (
        _lines("used, with these notes", _counts(record.get("notes")), "skipped.json")
        + _lines("left out", _counts(record.get("skipped")), "skipped.json")
        + _lines("could not be read", _number_of(rejected, "row"), "rejected.jsonl", "")
        + _lines("failed while it ran", _number_of(failed, "draw"), "failures.jsonl", "")
    )
    use = _USES.get(str(record.get("use")), "")
    return (
        f'<tr><td class="path">{esc(record.get("path", "?"))}<br><small>{esc(names)}</small></td>'
        f"<td>{esc(record.get('task', ''))}{f'<br><small>{use}</small>' if use else ''}</td>"
        f'<td class="num">{_gave(record)}</td><td>{told or "<span class=dim>every row is used as it is</span>"}</td></tr>'
    )


def data_section(run: Run) -> str:
    """One row per data file, training first; '' where the run has no skipped.json."""
    if not run.data:
        return ""
    failures = Counter(str(row.get("source")) for row in run.failures)
    # a source named in two files counts with the first: failures name no file
    rows = "".join(
        _row(record, sum(failures.pop(name, 0) for name in _sources(record))) for record in run.data
    )
    return (
        '<div class="scroll card"><table class="data"><thead><tr><th>data<br><small>sources</small></th><th>task</th>'
        f'<th class="num">used</th><th>what was done to it</th></tr></thead><tbody>{rows}</tbody></table></div>'
    )
