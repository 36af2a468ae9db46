"""What one GPU does with public model shapes and random weights: update MFU, rollout tokens/s, cache levels, peak memory.

    python -m scripts.bench_gpu                              (a long run; writes assets/results/bench_gpu.json)
    python -m scripts.bench_gpu --shapes Qwen2.5-VL-3B-Instruct --attn sdpa flex
    python -m scripts.bench_gpu --smoke --out FILE           (the whole path on the CPU with a tiny model: no figures of interest)

Needs an NVIDIA GPU with bf16. Every row is measured in a process of its own; one that runs out of memory, or whose estimate exceeds
the GPU, says so in its row. Groups share a prompt of one 1280-token picture and have completions of 128 tokens.

    update   forward and backward of a step, shared prefix and usual padded batch with equally long micro-batches; MFU counts the
             FLOPs that the system's own tokens need, without recomputation, over the maker's dense bf16 figure; completion tokens/s
             compares the systems; `step` is the peak of whole optimizer steps, beside the estimate; with the first attention also
             with plain layers (model.fused_layers false)
    train    `mmrl train` from a checkpoint of random weights: seconds of whole steps, sampler-trainer gap, peak memory
    rollout  sampled tokens per second of mmrl's engine, with an adapter and with full weights
    vllm     of vLLM, where it is installed, and the seconds of giving it the weights, awake and behind a sleep
    plan     of each model, the shares of peak and of bandwidth that scripts/plan_scale.py plans with (scripts/_gpu_plan.py)
    cache    seconds until a 16-frame 720p clip's features are there, by what is kept
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from mmrl.errors import MMRLError
from mmrl.operations.versions import versions
from scripts import _bench as bench
from scripts._gpu_kit import SMOKE, Setting, gpu_name, memory_tb_s, peak_tflops, run_of
from scripts._gpu_plan import plan_shares

__all__ = ["main", "plan"]

DEFAULT_SHAPES = (
    "Qwen2.5-VL-3B-Instruct",
    "Qwen2.5-VL-7B-Instruct",
    "Qwen3-VL-4B-Instruct",
    "Qwen3-VL-8B-Instruct",
)
ATTENTIONS = ("sdpa", "flex", "flash_attention_2")
MODES = ("lora", "full")
PARTS = ("update", "train", "rollout", "vllm", "cache")
_LIBRARIES = ("torch", "transformers", "flash-attn", "vllm", "peft")


def plan(
    shapes: list[str],
    attentions: list[str],
    parts: list[str],
    base: Setting,
    modes: Sequence[str] = MODES,
) -> list[tuple[str, Setting]]:
    """What to measure, in order: per shape and mode the updates by attention, a run, rollouts, vLLM and the cache."""
    work: list[tuple[str, Setting]] = []
    for shape in shapes:
        for mode in modes:
            setting = replace(base, shape=shape, mode=mode)
            every = {
                "update": [
                    *(replace(setting, attn=attn) for attn in attentions),
                    # what the fused layers save, beside the first attention
                    replace(setting, attn=attentions[0], fused=False),
                ],
                # a run chooses its attention by itself
                "train": [replace(setting, attn="auto")],
                "rollout": [setting],
                # the same for both modes
                "vllm": [setting] if mode == modes[0] else [],
                "cache": [setting] if mode == modes[0] else [],
            }
            work += [(part, one) for part, found in every.items() if part in parts for one in found]
    return work


def _too_large(setting: Setting, part: str, memory_gib: float) -> dict[str, Any] | None:
    """A row in place of a measurement whose estimate is far beyond the GPU. The estimate is checked, so near ones are tried."""
    from mmrl.diagnostics.memory import estimate

    found = estimate(run_of(setting), kind="cuda")
    needed = found.total if part in ("update", "train") else found.parts["weights"]
    return (
        {"does_not_fit": {"estimate_gib": round(needed / 2**30, 1)}}
        if needed > 1.15 * memory_gib * 2**30
        else None
    )


def _child(part: str, setting: Setting, timeout: float) -> dict[str, Any]:
    """A measurement in a process of its own; what ends it is its result."""
    try:
        return bench.run_child(
            "scripts.bench_gpu", ["--child", part, json.dumps(asdict(setting))], timeout=timeout
        )
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        return {"failed": str(error)[-2000:]}


def measure(
    work: list[tuple[str, Setting]],
    memory_gib: float | None,
    peak: float | None,
    timeout: float,
    keep: Callable[[list[dict[str, Any]]], Any] = lambda rows: None,
) -> list[dict[str, Any]]:
    """Rows of everything in `work`, given to `keep` after each; on a CPU (memory_gib None) in this process."""
    rows = []
    for part, setting in work:
        row = _too_large(setting, part, memory_gib) if memory_gib is not None else None
        if row is None and memory_gib is None:
            row = _here(part, setting)
        row = row or _child(part, setting, timeout)
        for update in row.get("updates", ()):
            update["mfu"] = (
                round(update["tflops"] / peak, 4) if peak and "tflops" in update else None
            )
        rows.append(
            {
                "part": part,
                "shape": setting.shape,
                "mode": setting.mode,
                "attn": setting.attn,
                "dtype": setting.precision,
                "fused": setting.fused,
                **row,
            }
        )
        keep(rows)
        print(f"{part:8} {setting.label:45} {_short(row)}", flush=True)
    return rows


def _here(part: str, setting: Setting) -> dict[str, Any]:
    from scripts._gpu_work import WORK

    return WORK[part](setting)


def _short(row: dict[str, Any]) -> str:
    """A row in a few words."""
    for bad in ("does_not_fit", "out_of_memory", "missing", "failed"):
        if bad in row:
            return f"{bad}: {str(row[bad]).strip().splitlines()[-1][:100]}"
    if "updates" in row:
        return "; ".join(
            f"{u['forward']} "
            + (
                f"{u['completion_tokens_per_s']} tokens/s, MFU {u['mfu']}, peak {u.get('peak_gib')} GiB"
                if "seconds" in u
                else u["out_of_memory"]
            )
            for u in row["updates"]
        )
    return f"{row['tokens_per_s']} tokens/s" if "tokens_per_s" in row else str(row.get("seconds"))


def _write(out: Path | None, found: dict[str, Any]) -> Path:
    if out is None:
        return bench.write_results("bench_gpu", found, *_LIBRARIES)
    head = {
        "date": datetime.now(timezone.utc).date().isoformat(),
        "command": f"python -m scripts.bench_gpu {' '.join(sys.argv[1:])}",
        "machine": bench.machine(),
        "versions": versions(_LIBRARIES),
    }
    out.write_text(json.dumps({**head, **found}, indent=1) + "\n", encoding="utf-8")
    return out


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--shapes", nargs="+", default=list(DEFAULT_SHAPES), help="of mmrl.diagnostics.shapes"
    )
    parser.add_argument(
        "--attn",
        nargs="+",
        choices=ATTENTIONS,
        default=None,
        help="default: all that are installed",
    )
    parser.add_argument(
        "--parts",
        nargs="+",
        choices=PARTS,
        default=list(PARTS),
    )
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--warm-up", type=int, default=2, help="runs before those that count")
    parser.add_argument(
        "--peak-tflops",
        type=float,
        help="dense bf16 figure of a GPU that is not listed in scripts/_gpu_kit.py",
    )
    parser.add_argument("--memory-tb-s", type=float, help="bandwidth of its memory, TB/s")
    parser.add_argument("--timeout", type=float, default=1200, help="seconds of one row")
    parser.add_argument("--out", type=Path, help="default: assets/results/bench_gpu.json")
    parser.add_argument("--smoke", action="store_true", help="tiny shape on the CPU; needs --out")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    arguments = bench.parse(parser)
    if arguments.smoke and arguments.out is None:
        parser.error("--smoke needs --out FILE: what it writes is no result")
    return arguments


def _smoke(out: Path) -> int:
    tiny = Setting(
        SMOKE,
        device="cpu",
        groups=2,
        group_size=2,
        new_tokens=4,
        pixels=20000,
        token_budget=128,
        repeats=1,
        warm_up=0,
    )
    # flash attention alone needs a GPU; what vLLM and the cache do is the same in both precisions
    attentions, narrow = ["flex", "sdpa"], replace(tiny, dtype="bf16")
    work = plan([SMOKE], attentions, list(PARTS), tiny)
    work += plan([SMOKE], attentions, ["update", "train", "rollout"], narrow)
    rows = measure(work, None, None, 0)
    print(_write(out, {"smoke": True, "plan": plan_shares(rows, tiny, None, None), "rows": rows}))
    return 0


def main() -> int:
    """Command line."""
    arguments = _arguments()
    if arguments.smoke:
        return _smoke(arguments.out)
    import torch

    if arguments.child:
        from scripts._gpu_work import WORK

        part, setting = arguments.child
        try:
            bench.finish_child(
                gpu_name() if part == "gpu" else WORK[part](Setting(**json.loads(setting)))
            )
        except torch.OutOfMemoryError as error:  # of the weights
            bench.finish_child({"out_of_memory": str(error).splitlines()[0][:200]})
        return 0
    if not torch.cuda.is_available():
        print(
            f"bench_gpu needs an NVIDIA GPU that torch can use; found torch {torch.__version__} without one. Install a CUDA "
            "build of torch on a machine with a GPU (nvidia-smi lists it), or run the code path on the CPU: --smoke --out FILE",
            file=sys.stderr,
        )
        return 2
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    # a context of this process would take the rows' memory
    gpu = bench.run_child("scripts.bench_gpu", ["--child", "gpu", "{}"])
    peak = arguments.peak_tflops or peak_tflops(gpu["name"])
    installed = [
        a for a in ATTENTIONS if a != "flash_attention_2" or importlib.util.find_spec("flash_attn")
    ]
    setting = replace(Setting(""), repeats=arguments.repeats, warm_up=arguments.warm_up)
    bandwidth = arguments.memory_tb_s or memory_tb_s(gpu["name"])

    def keep(rows: list[dict[str, Any]]) -> Path:
        return _write(
            arguments.out,
            {
                "gpu": gpu,
                "peak_tflops_bf16": peak,
                "memory_tb_s": bandwidth,
                "setting": asdict(setting),
                "plan": plan_shares(rows, setting, peak, bandwidth),
                "rows": rows,
            },
        )

    try:
        work = plan(
            arguments.shapes,
            arguments.attn or installed,
            arguments.parts,
            setting,
            arguments.modes,
        )
        # a long run that is ended keeps what it has measured
        rows = measure(work, gpu["memory_gib"], peak, arguments.timeout, keep)
    except MMRLError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(keep(rows))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
