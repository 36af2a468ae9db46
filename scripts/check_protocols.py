"""Compare the constants of mmrl's evaluation protocols with the lines of the projects they are of.

    python -m scripts.check_protocols --checkouts FOLDER            (clones, named NAME or OWNER+NAME; prints a table)
    python -m scripts.check_protocols --checkouts FOLDER --record   (and writes assets/results/protocol_sources.json)

Lines are read from the commits that mmrl.robotics.protocol_sources names, whatever is checked out, so a clone needs its history
(git clone --filter=blob:none https://github.com/OWNER/NAME). Without --checkouts the recorded lines are compared. Exit status 1
where a constant differs.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from mmrl.robotics.protocol_sources import COMMITS, SOURCES, Source
from scripts._bench import RESULTS, parse, print_table, write_results

RECORD = RESULTS / "protocol_sources.json"


def of_checkouts(folder: Path) -> Callable[[Source], str]:
    """Reads a source's line from clones in `folder`. Raises SystemExit where a clone, a commit or a file is missing."""

    def clone(repository: str) -> Path:
        owner, name = repository.split("/")
        places = [folder / name, folder / f"{owner}+{name}", folder / f"{owner}+{name}" / "repo"]
        found = [p for p in places if (p / ".git").exists() or (p / "HEAD").exists()]
        if not found:
            sys.exit(
                f"expected a clone of {repository} as one of {', '.join(map(str, places[:2]))}, found none: "
                f"git clone --filter=blob:none https://github.com/{repository} {places[0]}"
            )
        return found[-1]

    @cache
    def lines(repository: str, file: str) -> list[str]:
        shown = subprocess.run(
            ["git", "-C", str(clone(repository)), "show", f"{COMMITS[repository]}:{file}"],
            capture_output=True,
            text=True,
            check=False,
        )
        if shown.returncode:
            sys.exit(f"{repository}: {shown.stderr.strip()}; expected a clone with its history")
        return shown.stdout.splitlines()

    def line(source: Source) -> str:
        whole = lines(source.repository, source.file)
        if source.line > len(whole):
            sys.exit(
                f"{source.repository} {source.file}: expected line {source.line}, found {len(whole)} lines"
            )
        return whole[source.line - 1].strip()

    return line


def recorded() -> Callable[[Source], str]:
    """Reads a source's line from the record. Raises SystemExit for one that it does not have."""
    rows = json.loads(RECORD.read_text(encoding="utf-8"))["rows"]
    known = {(r["repository"], r["commit"], r["file"], r["line"]): r["text"] for r in rows}

    def line(source: Source) -> str:
        key = (source.repository, COMMITS[source.repository], source.file, source.line)
        if key not in known:
            sys.exit(
                f"{source.protocol} {source.field}: expected a recorded line {source.line} of {source.file} at {key[1]}, "
                "found none; record it: python -m scripts.check_protocols --checkouts FOLDER --record"
            )
        return str(known[key])

    return line


def compare(line_of: Callable[[Source], str]) -> list[dict[str, Any]]:
    """A row per source: the project's line, what it says, what is here, and whether they are equal."""
    rows = []
    for source in SOURCES:
        text, ours = line_of(source), source.ours()
        try:
            theirs = source.read(text)
        except ValueError as error:
            theirs = str(error)
        rows.append(
            {
                "protocol": source.protocol,
                "field": source.field,
                "ours": ours,
                "theirs": theirs,
                "equal": bool(ours == theirs),
                "repository": source.repository,
                "commit": COMMITS[source.repository],
                "file": source.file,
                "line": source.line,
                "text": text,
            }
        )
    return rows


def main() -> int:
    """Command line; exit status 1 where a constant differs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--checkouts", type=Path, help="folder of clones; default: the record")
    parser.add_argument("--record", action="store_true", help="write the lines that were read")
    options = parse(parser)
    if options.record and options.checkouts is None:
        parser.error(
            "expected --checkouts with --record, found none; only lines of clones are recorded"
        )
    rows = compare(recorded() if options.checkouts is None else of_checkouts(options.checkouts))
    print_table(
        ("protocol", "constant", "here", "there", "line"),
        [
            (
                r["protocol"],
                r["field"],
                str(r["ours"]),
                str(r["theirs"]),
                f"{r['file']}:{r['line']}",
            )
            for r in rows
        ],
    )
    wrong = [r for r in rows if not r["equal"]]
    for r in wrong:
        print(f"{r['protocol']} {r['field']}: {r['ours']} here, {r['theirs']} there: {r['text']}")
    print(f"{len(rows) - len(wrong)} of {len(rows)} constants equal their project's line")
    if options.record and not wrong:
        print(write_results("protocol_sources", {"commits": COMMITS, "rows": rows}))
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
