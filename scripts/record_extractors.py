"""Run the benchmarks' own extractors on replies and write what they make of them to assets/fixtures/extractors.

    git clone https://github.com/MMMU-Benchmark/MMMU code/MMMU     # and the others of REPOSITORIES, at their commits
    python -m scripts.record_extractors --code code

One JSON file per extractor of mmrl.rewards.official: repository, commit, file and functions of the program, and for every reply the
truths for which the program calls it right ("chance" where it draws one), or the box or point that it reads.
tests/rewards/test_official_extractors.py compares mmrl with them. No line of the programs is kept in this project.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scripts._extractor_runs import REPOSITORIES, RUNS, Run
from scripts._peer_code import quiet

__all__ = ["FIXTURES", "main", "record"]

FIXTURES = Path(__file__).resolve().parent.parent / "assets" / "fixtures" / "extractors"


def record(run: Run, code: Path) -> dict[str, Any]:
    """The fixture of one extractor."""
    repository, commit = REPOSITORIES[run.folder]
    with quiet():
        judge = run.make(code / run.folder)
        rows = [{**case, "official": judge(case)} for case in run.cases]
    return {
        "extractor": run.extractor,
        "task": run.task,
        "repository": repository,
        "commit": commit,
        "file": run.file,
        "functions": list(run.functions),
        "note": run.note,
        "cases": rows,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.record_extractors",
        description="Run the benchmarks' own extractors.",
    )
    parser.add_argument("--code", type=Path, required=True, help="folder with the checkouts")
    parser.add_argument("--out", type=Path, default=FIXTURES)
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    for run in RUNS:
        found = record(run, args.code)
        head = {key: value for key, value in found.items() if key != "cases"}
        rows = ",\n".join("  " + json.dumps(row) for row in found["cases"])
        text = json.dumps(head, indent=1)[:-2] + f',\n "cases": [\n{rows}\n ]\n}}\n'
        (args.out / f"{run.extractor}.{run.task}.json").write_text(text, encoding="utf-8")
        print(f"{run.extractor:20} {run.task:14} {len(found['cases'])} replies")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
