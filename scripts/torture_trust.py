"""Attacks of strangers, each tried for real; writes a table attack / expected / result.

    python scripts/torture_trust.py                        # all of them: about an hour
    python scripts/torture_trust.py --only serve_bodies serve_drip
    python scripts/torture_trust.py --list

Attacks lie in scripts/_torture_trust_*.py: each module lists its own in ATTACKS, made with `attack` from
scripts/_torture_trust.py. Traffic stays on this machine. Results: assets/results/torture_trust.json and .md; attacks that were not
tried again keep their rows; a shorter soak is written to runs/results. The fast ones are tests (tests/attacks): `--only tests` runs
them with pytest, and its report makes a table of its own.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from scripts._bench import parse, results_folder  # noqa: E402
from scripts._torture_trust import Attack, Outcome, record  # noqa: E402


def attacks() -> list[Attack]:
    """Of all modules, by name of the module."""
    names = sorted(p.stem for p in Path(__file__).parent.glob("_torture_trust_*.py"))
    return [
        attack for name in names for attack in importlib.import_module(f"scripts.{name}").ATTACKS
    ]


def main() -> int:
    """Returns the exit status: 1 when an attack got through."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--only", nargs="*", default=[], metavar="NAME", help="names, or beginnings of names"
    )
    parser.add_argument("--list", action="store_true", help="print the names and stop")
    parser.add_argument("--minutes", type=float, default=10.0, help="length of the soak")
    options = parse(parser)
    chosen = [a for a in attacks() if not options.only or a.name.startswith(tuple(options.only))]
    if options.list:
        print("\n".join(f"{a.name:<28} {a.what}" for a in chosen))
        return 0
    if not chosen:
        parser.error(
            f"expected --only of {', '.join(a.name for a in attacks())}, found {options.only}"
        )
    table, through = results_folder() / "torture_trust.json", 0
    for attack in chosen:
        print(f"{attack.name}: {attack.what}", flush=True)
        try:
            outcome = attack.run(options)
        except Exception as error:  # an attack that could not be tried is no attack withstood
            outcome = Outcome(False, f"the attack failed itself: {type(error).__name__}: {error}")
        print(f"  {'held' if outcome.held else 'GOT THROUGH'}: {outcome.result}", flush=True)
        through += not outcome.held
        record(table, attack, outcome)
    print(f"{len(chosen)} attacks, {through} got through")
    return int(through > 0)


if __name__ == "__main__":
    sys.exit(main())
