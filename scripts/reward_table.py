"""Every reward beside the documented rule of the project it comes from, on shared inputs; equal, or a reason why not.

    python -m scripts.reward_table            # prints the table, writes assets/results/reward_table.json and .md
    python -m scripts.reward_table --check    # compares with the committed file instead; exit 1 when it is out of date

The peers' values come from `scripts._peer_rules` and `_peer_rules_video`, formulas written down again from what the projects
document; ours from the tasks with their presets and from public functions. A row is `equal` (to 1e-6), a `defect` of the peer
(ours then is our rule, written down again as well) or `differs by design`. Exit 1 when a row does not hold or a preset has no
row.
"""
from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mmrl.registry import BUILT_IN, resolve_task
from scripts._reward_table_boxes import box_cases
from scripts._reward_table_kit import DEFECTS, TOLERANCE, Case
from scripts._reward_table_texts import text_cases
from scripts._reward_table_video import video_cases

__all__ = ["NO_PEER", "all_cases", "as_json", "as_markdown", "main", "presets", "problems"]

RESULTS = Path(__file__).resolve().parent.parent / "assets" / "results"

NO_PEER: Mapping[str, str] = {
    "grounding mode=smooth, static": "our soft Dynamic IoU, and a fixed threshold",
    "detection mode=f1": "our default, the soft F1 of boxes",
    "scene_graph mode=f1": "our default, the mean of soft node F1 and edge F1",
    "ocr mode=indel, cer; open_text mode=token_f1": "our default for pages, and standard measures no listed paper pays",
    "gui_grounding mode=distance": "our denser signal beside the box",
    "jigsaw, maze": "exact solutions, checked by the puzzle itself",
    "classification": "one label of a closed set, compared as whole words",
    "spatial view_consistency": "measured over mirrored views, not rewarded",
    "temporal_grounding mode=matched, near; anchors": "one-to-one spans, spans that do not meet, and our rule for timestamps in "
                                                      "thoughts (the idea is TAR-TVG's; its constants could not be checked)",
    "grounded_qa mode=mean, gated": "our shares of choice and span",
}
"""Rewards without a documented peer; the property tests in tests/rewards and tests/tasks stand for them."""


def all_cases() -> list[Case]:
    """Every row of the table, in its order."""
    return [*box_cases(), *text_cases(), *video_cases()]


def presets() -> set[str]:
    """'task:preset' of every built-in task."""
    return {f"{task}:{preset}" for task in BUILT_IN for preset in getattr(resolve_task(task), "presets", {})}


def problems(cases: Sequence[Case]) -> list[str]:
    """What is wrong with the table: rows that do not hold, presets and defects without a row, and rows that appear twice."""
    found = [f"{c.family} | {c.reward} | {c.what}: {c.peer} {_number(c.expected)}, our rule {_number(c.rule)}, ours "
             f"{_number(c.ours)}, said to be {c.verdict}" for c in cases if not c.holds]
    found += [f"preset without a row: {name}" for name in sorted(presets() - {c.preset for c in cases})]
    used = {c.verdict.removeprefix("defect ") for c in cases}
    found += [f"defect without a row: {number}, {text}" for number, text in DEFECTS.items() if number not in used]
    keys = Counter((c.reward, c.peer, c.source, c.what) for c in cases)
    return found + [f"row given {count} times: {' | '.join(key)}" for key, count in keys.items() if count > 1]


def _number(value: float | None) -> str:
    return "fails" if value is None else f"{round(value, 6) + 0.0:g}"


def _families(cases: Iterable[Case]) -> dict[str, list[Case]]:
    table: dict[str, list[Case]] = {}
    for case in cases:
        table.setdefault(case.family, []).append(case)
    return table


def counts(cases: Iterable[Case]) -> dict[str, int]:
    """Rows by kind of verdict."""
    return dict(Counter(c.verdict.split(" ")[0].replace("differs", "differs by design") for c in cases))


def as_json(cases: Sequence[Case]) -> dict[str, Any]:
    """The table as data: floats to 6 decimals, nothing that depends on the machine or the day."""

    def rounded(value: float | None) -> float | None:
        return None if value is None else round(value, 6) + 0.0

    rows = [{"family": c.family, "reward": c.reward, "peer": c.peer, "source": c.source, "input": c.what,
             "peer_value": rounded(c.expected), "our_rule": rounded(c.rule if c.verdict != "equal" else c.expected),
             "ours": rounded(c.ours), "verdict": c.verdict, "why": c.why, "holds": c.holds} for c in cases]
    return {"command": "python -m scripts.reward_table", "tolerance": TOLERANCE, "rows": len(rows), "verdicts": counts(cases),
            "presets": sorted({c.preset for c in cases} & presets()), "defects": dict(DEFECTS), "without_peer": dict(NO_PEER),
            "table": rows}


def as_markdown(cases: Sequence[Case]) -> str:
    """The table for people, one section per family."""

    def cell(text: str) -> str:
        return text.replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")

    found = counts(cases)
    lines = ["# Rewards beside the rules they come from", "",
             f"Written by `python -m scripts.reward_table`: {len(cases)} rows, all {len(presets())} presets of the built-in tasks. "
             f"{found['equal']} values equal the peer's documented rule to {TOLERANCE:g}, {found['defect']} rows show a defect "
             f"of a peer and give the value of our rule instead, {found['differs by design']} differ by design.",
             "", "The peers' values are computed from their formulas, written down again in `scripts/_peer_rules*.py` (where a row "
             "is about a defect, as their code runs), or are the values they document. `fails`: their code raises.",
             "Names read `task:preset [part]`; `total` is the weighted sum.", ""]
    for family, rows in _families(cases).items():
        lines += [f"## {family[0].upper()}{family[1:]}", "", "| mmrl | peer | input | peer's value | ours | verdict |",
                  "|---|---|---|---|---|---|"]
        for c in rows:
            verdict = f"{c.verdict}: {c.why}" if c.verdict.startswith("differs") else c.verdict
            lines.append("| " + " | ".join(cell(text) for text in (
                c.reward, f"{c.peer} ({c.source})", c.what, _number(c.expected), _number(c.ours), verdict)) + " |")
        lines.append("")
    lines += ["## Defects", "", "Numbers that are missing here belong to training and caches, not to rewards.", "",
              "| defect | what |", "|---|---|", *(f"| {n} | {cell(text)} |" for n, text in DEFECTS.items()), "",
              "## Rewards without a peer", "", "| mmrl | what |", "|---|---|",
              *(f"| {cell(name)} | {cell(text)} |" for name, text in NO_PEER.items()), ""]
    return "\n".join(lines)


def _print(cases: Sequence[Case]) -> None:
    for family, rows in _families(cases).items():
        table = [("reward", "peer", "input", "peer's", "ours", "verdict")]
        table += [(c.reward, c.peer, c.what, _number(c.expected), _number(c.ours), ("" if c.holds else "WRONG: ") + c.verdict)
                  for c in rows]
        widths = [min(64, max(len(row[k]) for row in table)) for k in range(6)]
        print(f"\n{family}")
        for row in table:
            print("  " + "  ".join(text[:width].ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())


def main(argv: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m scripts.reward_table", description="Compare rewards with their sources.")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder to write to (default: assets/results)")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when the files are out of date")
    args = parser.parse_args(argv)
    cases = all_cases()
    wrong = problems(cases)
    _print(cases)
    files = {"reward_table.json": json.dumps(as_json(cases), indent=1, ensure_ascii=False) + "\n",
             "reward_table.md": as_markdown(cases)}
    if args.check:
        wrong += [f"{name} is out of date; run python -m scripts.reward_table" for name, text in files.items()
                  if not (args.out / name).exists() or (args.out / name).read_text(encoding="utf-8") != text]
    else:
        args.out.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (args.out / name).write_text(text, encoding="utf-8")
    print(f"\n{len(cases)} rows: " + ", ".join(f"{count} {kind}" for kind, count in counts(cases).items()))
    for line in wrong:
        print(f"WRONG  {line}", file=sys.stderr)
    return int(bool(wrong))


if __name__ == "__main__":
    raise SystemExit(main())
