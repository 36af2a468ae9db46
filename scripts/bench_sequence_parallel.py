"""A clip of 16,384 tokens with four answers behind it, forward and backward: one process against several that compute it together.

    python -m scripts.bench_sequence_parallel           # about 10 minutes, writes assets/results/bench_sequence_parallel.json
    python -m scripts.bench_sequence_parallel --smoke   # a clip of 128 tokens

A Qwen2.5-VL of 3 decoder layers with random weights and a frozen tower; a real clip, decoded and encoded. Memory is resident memory
of each process (VmHWM after a reset, less VmRSS before): what the forward and backward add to weights and libraries. Log-probs, and
gradients added up over processes, are compared with those of one process. On CPUs several processes gain no time here.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from scripts import _bench as bench

SHAPE: dict[str, Any] = {"arch": "qwen2_5_vl", "hidden": 512, "layers": 3, "heads": 8, "kv": 2}
ANSWERS, WRITTEN = 4, 32


def _memory(name: str) -> float:
    """MiB of a line of /proc/self/status."""
    text = Path("/proc/self/status").read_text(encoding="utf-8")
    return next(int(row.split()[1]) for row in text.splitlines() if row.startswith(name)) / 2**10


def make(folder: Path, frames: int, side: tuple[int, int]) -> None:
    """The model and a clip of moving noise."""
    import numpy as np

    from mmrl.policy.tiny import TinySpec, build_tiny
    from mmrl.video.encode import write_video

    build_tiny(TinySpec(**SHAPE), folder / "model")
    noise = np.random.default_rng(0).integers(0, 256, (frames, side[1] // 14, side[0] // 14, 3))
    write_video(folder / "clip.mp4", np.kron(noise, np.ones((1, 14, 14, 1))).astype("uint8"), 4)


def child(folder: Path, frames: int, side: tuple[int, int], checkpointing: bool) -> None:
    """One process of a run; the first writes what they found."""
    import torch
    import torch.distributed as dist

    from mmrl.config import DataConfig, ModelConfig, VideoConfig
    from mmrl.policy.loading import load_policy
    from mmrl.policy.pack import PackItem, pack
    from mmrl.policy.sequence_parallel import SequenceGroup
    from mmrl.registry import task_from_spec
    from mmrl.types import Sample

    size, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    if size > 1:
        dist.init_process_group("gloo")
    pixels = side[0] * side[1]
    policy = load_policy(
        ModelConfig(
            path=str(folder / "model"),
            device="cpu",
            freeze=["vision", "projector"],
            max_prompt_tokens=1 << 15,
            gradient_checkpointing=checkpointing,
        ),
        DataConfig(
            video=VideoConfig(
                kind="all", min_pixels=pixels, max_pixels=pixels, total_pixels=frames * pixels
            )
        ),
    )
    sample = Sample("1", "open_text", "s", "What moves?", "a", videos=(str(folder / "clip.mp4"),))
    prompt = policy.encoder(sample, task_from_spec("open_text"))
    texts = tuple(tuple(range(40 + i, 40 + i + WRITTEN)) for i in range(ANSWERS))
    batch = pack([PackItem(prompt, texts)])
    if size > 1:
        group = SequenceGroup.of(size, rank, size)
        group.owners.update({v.identity: 0 for v in prompt.visuals})
        batch = batch.in_slices(group)
    if rank == 0:  # once for the group: the others get what their slices show
        policy.encoder.visuals.features(prompt.visuals, policy.tower(), policy.device)
    if size > 1:
        dist.barrier()
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    before, began = _memory("VmRSS"), time.perf_counter()
    out = policy.logp(batch, entropy_gradient=True)
    weight_N = torch.sin(torch.arange(len(out.logp_N)) * 1.3)
    ((out.logp_N + 0.1 * out.entropy_N) * weight_N).sum().backward()
    seconds, grown = time.perf_counter() - began, _memory("VmHWM") - before
    gradients = {
        n: p.grad if p.grad is not None else torch.zeros_like(p) for n, p in policy.trainable()
    }
    peaks: list[Any] = [grown]
    if size > 1:
        for gradient in gradients.values():
            dist.all_reduce(gradient)
        peaks = [None] * size
        dist.all_gather_object(peaks, grown)
    if rank == 0:
        found = {"logp": out.logp_N.detach(), "gradients": gradients, "prompt": prompt.length}
        torch.save({**found, "peaks": peaks, "seconds": seconds}, folder / f"found_{size}.pt")
    if size > 1:
        dist.destroy_process_group()


def compare(folder: Path, sizes: list[int]) -> None:
    """Hand over what the runs found, beside the first one."""
    import torch

    runs = {n: torch.load(folder / f"found_{n}.pt", weights_only=True) for n in sizes}
    one = runs[sizes[0]]
    rows = []
    for n, run in runs.items():
        difference = [run["gradients"][k] - g for k, g in one["gradients"].items()]
        norms = [
            torch.stack([g.double().norm() for g in gradients]).norm()
            for gradients in (difference, one["gradients"].values())
        ]
        rows.append(
            {
                "processes": n,
                "peak_mib": [round(p, 1) for p in run["peaks"]],
                "share_of_one": round(max(run["peaks"]) / max(one["peaks"]), 3),
                "logp_apart": float((run["logp"] - one["logp"]).abs().max()),
                "gradient_apart": float(norms[0] / norms[1]),
                "seconds": round(run["seconds"], 1),
            }
        )
    bench.finish_child({"prompt_tokens": one["prompt"], "rows": rows})


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def _start(processes: int, arguments: list[str]) -> None:
    module = ["-m", "scripts.bench_sequence_parallel", "--child", *arguments]
    head = [] if processes == 1 else ["-m", "torch.distributed.run", "--nproc_per_node"]
    if processes > 1:
        head += [str(processes), "--master_addr", "127.0.0.1", "--master_port", str(_free_port())]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    # what is freed leaves the process, so that its peak is that of live tensors
    environment |= {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    subprocess.run([sys.executable, *head, *module], cwd=bench.ROOT, env=environment, check=True)


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--processes", type=int, nargs="+", default=[2], help="beside one")
    parser.add_argument("--smoke", action="store_true", help="a clip of 128 tokens")
    parser.add_argument("--child", metavar="FOLDER", help=argparse.SUPPRESS)
    parser.add_argument("--checkpointing", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--task", choices=("make", "run", "compare"), help=argparse.SUPPRESS)
    options = bench.parse(parser)
    frames, side = (8, (112, 56 * 2)) if options.smoke else (64, (896, 448))
    sizes = [1, *options.processes]
    if options.child:
        folder = Path(options.child)
        if options.task == "make":
            make(folder, frames, side)
            bench.finish_child({})
        elif options.task == "compare":
            compare(folder, sizes)
        else:
            child(folder, frames, side, options.checkpointing)
        return 0
    smoke = ["--smoke"] * options.smoke
    found: dict[str, Any] = {"settings": {**SHAPE, "answers": ANSWERS, "written": WRITTEN}}
    with tempfile.TemporaryDirectory(prefix="mmrl-bench-") as made:
        known = [made, "--processes", *map(str, options.processes), *smoke, "--task"]
        module = "scripts.bench_sequence_parallel"
        bench.run_child(module, ["--child", *known, "make"])
        for name, extra in (("plain", []), ("checkpointing", ["--checkpointing"])):
            for size in sizes:
                _start(size, [*known, "run", *extra])
            found[name] = bench.run_child(module, ["--child", *known, "compare"])
            bench.print_table(
                ["processes", "MiB of each", "share", "log-probs apart", "gradients apart", "s"],
                [list(row.values()) for row in found[name]["rows"]],
            )
    print(bench.write_results("bench_sequence_parallel", found, "mmrl", "torch", "transformers"))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
