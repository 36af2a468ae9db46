"""Every preset beside the peer it is named after, on completions in the peer's own form: equal, a defect of theirs, or by design.

    python -m scripts.reward_table            # prints it, writes assets/results/reward_table.json and .md
    python -m scripts.reward_table --check    # compares with the committed files instead; exit 1 when they are out of date

The peers' values were computed by their own code (`scripts.record_peers`) and lie in assets/fixtures/peers with repository, commit,
file and function. A row is `equal` when mmrl's preset gives the same total and the same format reward for the same text to 1e-6;
else `scripts._peer_verdicts` says why. Exit 1 when a difference has no reason, or a preset no row.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mmrl.registry import BUILT_IN, resolve_task
from scripts._parity import TOLERANCE, Fixture, Value, fixtures, values
from scripts._peer_verdicts import DEFECT, DESIGN, verdict

__all__ = ["WITHOUT_PEER", "Block", "as_json", "as_markdown", "blocks", "main", "problems"]

RESULTS = Path(__file__).resolve().parent.parent / "assets" / "results"

WITHOUT_PEER: Mapping[str, str] = {
    "gui_grounding:gui_rcpo": "judged over the group of a prompt's answers, no completion by itself",
    "gui_action:os_atlas": "a rule of evaluation; tests/tasks/test_gui_metrics.py has it",
    "gui_action:odyssey": "a rule of evaluation; tests/tasks/test_gui_metrics.py has it",
    "gui_action:strict": "mmrl's own rule",
    "chart:chartqa": "a rule of evaluation; tests/tasks/test_chart.py has it",
    "choice:mathvista_rule": "a rule of evaluation; tests/tasks/test_choice_task.py has it",
    "numeric:mathvista_rule": "a rule of evaluation; tests/tasks/test_numeric_task.py has it",
    "numeric:vsi_bench": "a rule of evaluation; tests/tasks/metrics/test_official_video.py has it",
}
"""Presets without recorded completions, and why."""


class Block(NamedTuple):
    """One preset: where the peer's values come from, and every completion with both values."""

    fixture: Fixture
    values: tuple[Value, ...]

    @property
    def counts(self) -> Counter[str]:
        """Completions by verdict; 'unnamed' for differences without a reason."""
        return Counter(_verdict(self.fixture.name, value)[0] for value in self.values)


def _verdict(preset: str, value: Value) -> tuple[str, str]:
    return ("equal", "") if value.equal else verdict(preset, value.what) or ("unnamed", "")


def blocks(only: str = "") -> list[Block]:
    """The recorded presets whose name starts with `only`, scored."""
    return [
        Block(fixture, tuple(values(fixture)))
        for fixture in fixtures()
        if fixture.name.startswith(only)
    ]


def presets() -> set[str]:
    """'task:preset' of every built-in task."""
    return {
        f"{task}:{preset}"
        for task in BUILT_IN
        for preset in getattr(resolve_task(task), "presets", {})
    }


def problems(found: Sequence[Block]) -> list[str]:
    """Differences without a reason, presets without a row, reasons for presets that do not exist."""
    wrong = [
        f"{block.fixture.name} | {value.what}: peer {value.peer}, mmrl {value.ours} ({value.reason}) has no verdict"
        for block in found
        for value in block.values
        if _verdict(block.fixture.name, value)[0] == "unnamed"
    ]
    known = {block.fixture.name.partition(" ")[0] for block in found} | set(WITHOUT_PEER)
    return [
        *wrong,
        *(f"preset without a row: {name}" for name in sorted(presets() - known)),
        *(f"no such preset: {name}" for name in sorted(known - presets())),
    ]


def totals(found: Sequence[Block]) -> dict[str, Any]:
    """Counts over all presets; `equal_share` is of the completions on which the peer has no defect."""
    counts = sum((block.counts for block in found), Counter[str]())
    sound = sum(counts.values()) - counts[DEFECT]
    return {
        "completions": sum(counts.values()),
        "presets": len(found),
        **{k: counts[k] for k in ("equal", DEFECT, DESIGN)},
        "equal_share": round(counts["equal"] / sound, 4) if sound else 0.0,
    }


def as_json(found: Sequence[Block]) -> dict[str, Any]:
    """The table as data: floats to 6 decimals, nothing that depends on the machine or the day."""

    def pair(numbers: tuple[float, float] | None) -> list[float] | None:
        return None if numbers is None else [round(v, 6) + 0.0 for v in numbers]

    table = []
    for block in found:
        rows = [
            {
                "what": v.what,
                "peer": pair(v.peer),
                "ours": pair(v.ours),
                "verdict": kind,
                "why": why,
                "reason": v.reason,
                **({"published_setting_gives_it": True} if v.switch_gives_it else {}),
            }
            for v in block.values
            for kind, why in [_verdict(block.fixture.name, v)]
            if kind != "equal"
        ]
        head = block.fixture.head
        table.append(
            {
                "preset": block.fixture.name,
                "peer": head["repository"],
                "commit": head["commit"],
                "file": head["file"],
                "functions": head["functions"],
                "note": head["note"],
                "completions": len(block.values),
                "counts": dict(sorted(block.counts.items())),
                "differences": rows,
            }
        )
    return {
        "command": "python -m scripts.reward_table",
        "tolerance": TOLERANCE,
        **totals(found),
        "without_peer": dict(WITHOUT_PEER),
        "table": table,
    }


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")


def _numbers(pair: tuple[float, float] | None) -> str:
    return "fails" if pair is None else f"{round(pair[1], 4):g} (form {round(pair[0], 4):g})"


def as_markdown(found: Sequence[Block]) -> str:
    """The table for people: a line per preset, then every difference."""
    all_of = totals(found)
    lines = [
        "# Presets beside the code of their papers",
        "",
        f"Written by `python -m scripts.reward_table`: {all_of['completions']} completions in the peers' own form (their "
        "tags, keys and order), scored by the peers' own code at the commits below and, as the same text, by mmrl's presets. "
        f"{all_of['equal']} have the same total and format reward to {TOLERANCE:g}; on {all_of[DEFECT]} the peer's value is a "
        f"defect; {all_of[DESIGN]} differ by design. Where the peer has no defect, {100 * all_of['equal_share']:.1f} % are "
        "equal.",
        "",
        "| preset | peer | file | completions | equal | defect | by design |",
        "|---|---|---|---|---|---|---|",
    ]
    for block in found:
        head, counts = block.fixture.head, block.counts
        lines.append(
            "| "
            + " | ".join(
                map(
                    _cell,
                    (
                        block.fixture.name,
                        f"{head['repository']} @{head['commit'][:7]}",
                        f"{head['file']}: {', '.join(head['functions'])}",
                        str(len(block.values)),
                        str(counts["equal"]),
                        str(counts[DEFECT]),
                        str(counts[DESIGN]),
                    ),
                )
            )
            + " |"
        )
    lines += [
        "",
        "Values are totals, with the format reward in brackets. `published`: the preset with its published settings "
        "gives the peer's value.",
        "",
    ]
    for block in found:
        rows = [(v, *_verdict(block.fixture.name, v)) for v in block.values if not v.equal]
        if not rows:
            continue
        lines += [
            f"## {block.fixture.name}",
            "",
            *([block.fixture.head["note"], ""] if block.fixture.head["note"] else []),
            "| completion | peer | mmrl | verdict |",
            "|---|---|---|---|",
        ]
        lines += [
            f"| {_cell(v.what)} | {_numbers(v.peer)} | {_numbers(v.ours)} | {kind}: {_cell(why)}"
            f"{' (published)' if v.switch_gives_it else ''} |"
            for v, kind, why in rows
        ]
        lines.append("")
    lines += [
        "## Presets without recorded completions",
        "",
        "| preset | why |",
        "|---|---|",
        *(f"| {name} | {_cell(why)} |" for name, why in WITHOUT_PEER.items()),
        "",
    ]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.reward_table",
        description="Compare presets with their papers' code.",
    )
    parser.add_argument(
        "--out", type=Path, default=RESULTS, help="folder to write to (default: assets/results)"
    )
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit 1 when the files are out of date"
    )
    args = parser.parse_args(argv)
    found = blocks()
    wrong = problems(found)
    files = {
        "reward_table.json": json.dumps(as_json(found), indent=1, ensure_ascii=False) + "\n",
        "reward_table.md": as_markdown(found),
    }
    for block in found:
        print(
            f"{block.fixture.name:44} {len(block.values):4} completions  "
            + "  ".join(f"{count} {kind}" for kind, count in sorted(block.counts.items()))
        )
    for name, text in files.items():
        if not args.check:
            args.out.mkdir(parents=True, exist_ok=True)
            (args.out / name).write_text(text, encoding="utf-8")
        elif (
            not (args.out / name).exists() or (args.out / name).read_text(encoding="utf-8") != text
        ):
            wrong.append(f"{name} is out of date; run python -m scripts.reward_table")
    print(json.dumps(totals(found)))
    for line in wrong:
        print(f"WRONG  {line}", file=sys.stderr)
    return int(bool(wrong))


if __name__ == "__main__":
    raise SystemExit(main())
