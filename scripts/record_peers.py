"""Run the peers' own reward code on completions in their own form and write what it gives to assets/fixtures/peers.

    git clone https://github.com/om-ai-lab/VLM-R1 peers/VLM-R1     # and the others of scripts._peer_code.REPOSITORIES
    pip install --target peers/libs mathruler
    python -m scripts.record_peers --peers peers --libs peers/libs

One JSON file per preset: repository, commit, file and functions of the peer, and for every completion its text, the truth, and
the peer's format reward and total; null where its code fails. `python -m scripts.reward_table` compares mmrl's presets with these.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scripts._peer_cases import Case
from scripts._peer_code import REPOSITORIES, quiet
from scripts._peer_judges import Judge
from scripts._peer_runs import RUNS, Run

__all__ = ["FIXTURES", "main"]

FIXTURES = Path(__file__).resolve().parent.parent / "assets" / "fixtures" / "peers"


def _row(case: Case, judge: Judge) -> dict[str, Any]:
    row: dict[str, Any] = {"what": case.what, "text": case.text, "truth": case.truth}
    for name, default in (
        ("params", {}),
        ("size", (1000, 1000)),
        ("resized", (1000, 1000)),
        ("progress", (100, 100)),
    ):
        value = getattr(case, name)
        if value != default:
            row[name] = value
    try:
        with quiet():
            form, total = judge(case)
        row["peer"] = {"format": round(float(form), 9), "total": round(float(total), 9)}
    except Exception as err:
        row["peer"], row["fails"] = None, f"{type(err).__name__}: {err}"[:120]
    return row


def record(run: Run, peers: Path) -> dict[str, Any]:
    """The fixture of one preset."""
    repository, commit = REPOSITORIES[run.repository]
    with quiet():
        judge = run.judge(peers / run.repository)
    return {
        "task": run.task,
        "preset": run.preset,
        "repository": repository,
        "commit": commit,
        "file": run.file,
        "functions": list(run.functions),
        "note": run.note,
        "variant": run.variant,
        "settings": dict(run.settings),
        "published": dict(run.published),
        "cases": [_row(case, judge) for case in run.cases()],
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.record_peers", description="Run the peers' own rewards."
    )
    parser.add_argument(
        "--peers", type=Path, required=True, help="folder with the peers' checkouts"
    )
    parser.add_argument(
        "--libs",
        type=Path,
        nargs="*",
        default=[],
        help="folders or wheels for sys.path (mathruler)",
    )
    parser.add_argument("--only", default="", help="presets whose task:preset starts with this")
    args = parser.parse_args(argv)
    sys.path[:0] = [str(path) for path in args.libs]
    FIXTURES.mkdir(parents=True, exist_ok=True)
    for run in RUNS:
        if run.name.startswith(args.only):
            found = record(run, args.peers)
            head = {key: value for key, value in found.items() if key != "cases"}
            rows = ",\n".join("  " + json.dumps(row, ensure_ascii=False) for row in found["cases"])
            text = (
                json.dumps(head, indent=1, ensure_ascii=False)[:-2]
                + f',\n "cases": [\n{rows}\n ]\n}}\n'
            )
            name = run.name.replace(":", ".").replace(" ", ".")
            (FIXTURES / f"{name}.json").write_text(text, encoding="utf-8")
            failed = [row["fails"] for row in found["cases"] if row["peer"] is None]
            print(
                f"{run.name:40} {len(found['cases'])} completions, {len(failed)} fail {sorted(set(failed))[:3]}"
            )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
