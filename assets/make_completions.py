"""Collect what a real policy wrote, as raw material for the reward fuzzer: assets/fixtures/completions.jsonl.

    python -m assets.make_completions runs/mixed_tiny [--count 400]

Takes sampled completions of the first evaluation of a run (before training, when a policy errs most), different texts only.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

TARGET = Path(__file__).resolve().parent / "fixtures" / "completions.jsonl"


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path)
    parser.add_argument("--count", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    first = sorted((options.run / "eval").glob("step_*"))[0] / "predictions.jsonl"
    with first.open(encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    texts = list(
        dict.fromkeys((row["task"], row["text"]) for row in rows if row["mode"] == "sampled")
    )
    random.Random(options.seed).shuffle(texts)
    chosen = [{"task": task, "text": text} for task, text in texts[: options.count]]
    TARGET.write_text(
        "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in chosen), encoding="utf-8"
    )
    print(f"{TARGET}: {len(chosen)} texts of {len(texts)}")


if __name__ == "__main__":
    main()
