"""Seconds per step of each family beside TRL's GRPOTrainer, on the same tiny model of the family: where TRL runs it.

    python -m scripts.bench_families_trl            (half an hour on a calm machine; writes assets/results/bench_families_trl.json)
    python -m scripts.bench_families_trl --only gemma3             (this one anew, the others as they are recorded)
    python -m scripts.bench_families_trl --quick --only gemma3     (a minute; writes nothing into assets/results)

Everything is as in scripts/bench_vs_trl.py, setting a (small pictures, short questions, 8 prompts of 8 rollouts of 24 tokens): both
real trainers, in processes of their own that alternate, one thread, fp32. Where a trainer fails, the end of its error is the row.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from mmrl.policy.families import BUILT_IN
from mmrl.tasks.scenes import make_scenes
from scripts import _bench as bench
from scripts.bench_vs_trl import LIBRARIES, MODEL, SETTINGS, child_mmrl, child_trl

NAMES = tuple(f.name for f in BUILT_IN)
SYSTEMS = ("mmrl", "trl")


def child_model(family: str, folder: Path) -> None:
    """Writes the family's model, which both load."""
    from mmrl.policy.tiny import TinySpec, build_tiny

    options = {**MODEL, "window_vision": False, "max_patches": 16}
    model, _ = build_tiny(TinySpec(arch=family, **options), folder / "model")  # type: ignore[arg-type]
    bench.finish_child({"parameters": model.num_parameters()})


def compare(family: str, rounds: int, steps: int) -> dict[str, Any]:
    """Medians of both on one family, and TRL / mmrl of the same round; or what failed."""
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in SYSTEMS}
    failed: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="mmrl-families-") as place:
        folder = Path(place)
        common = ["--folder", str(folder), "--steps", str(steps)]
        bench.run_child("scripts.bench_families_trl", ["--child", "model", family, *common])
        setting = SETTINGS["a"]
        count = steps * setting.prompts_per_step
        make_scenes(folder / setting.name, count, 3, setting.size, 1, f"bench-{family}-")
        for order in bench.alternation(SYSTEMS, rounds):
            for system in order:
                if system in failed:
                    continue
                try:
                    row = bench.run_child(
                        "scripts.bench_families_trl", ["--child", system, family, *common]
                    )
                except RuntimeError as error:
                    failed[system] = str(error).strip().splitlines()[-1]
                    continue
                found[system].append(row)
                print(f"  {family} {system:4} {row['step_s']:.3f} s/step", flush=True)
    pairs = [] if failed else list(zip(found["mmrl"], found["trl"], strict=True))
    ratios = [t["step_s"] / m["step_s"] for m, t in pairs]
    return {
        "family": family,
        "speed_ratio": bench.spread(ratios, 2) if ratios else None,
        "failed": failed,
        "rounds": found,
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one round of three steps")
    parser.add_argument(
        "--only", nargs="*", choices=NAMES, help="these anew, the others as recorded"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--child", nargs=2, metavar=("WHAT", "FAMILY"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = bench.parse(parser)
    if options.child:
        what, family = options.child
        if what == "model":
            return child_model(family, options.folder)
        train = {"mmrl": child_mmrl, "trl": child_trl}[what]
        return train(replace(SETTINGS["a"]), options.folder, options.steps)
    rounds, steps = (1, 3) if options.quick else (options.rounds, options.steps)
    rows = [compare(name, rounds, steps) for name in options.only or NAMES]
    bench.print_table(
        ("family", "mmrl s", "TRL s", "speed"),
        [
            (
                r["family"],
                *(
                    f"{min(x['step_s'] for x in r['rounds'][s]):.3f}"
                    if r["rounds"][s]
                    else r["failed"].get(s, "-")
                    for s in SYSTEMS
                ),
                f"{r['speed_ratio']['median']:.2f}x" if r["speed_ratio"] else "-",
            )
            for r in rows
        ],
    )
    found = {
        row["family"]: row
        for row in [*bench.recorded_rows("bench_families_trl", "families"), *rows]
    }
    families = [found[name] for name in NAMES if name in found]
    print(bench.write_results("bench_families_trl", {"families": families}, *LIBRARIES))


if __name__ == "__main__":
    main()
