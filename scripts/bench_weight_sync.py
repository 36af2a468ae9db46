"""What giving weights to a rollout server costs: processor seconds and seconds per GB, by each way of engine.vllm.transfer.

    python -m scripts.bench_weight_sync                    (minutes; writes assets/results/weight_sync.json)
    python -m scripts.bench_weight_sync --quick            (one round, a tenth of the weights)

A run's client and a rollout server as two processes of one machine, one thread each. The server is `mmrl rollout-server`'s own
(mmrl.rollout.vllm_server), with a model in vLLM's place that copies every tensor into one of its own, which vLLM's loaders do at
the least: what differs between the rows is the way between the two processes. Weights have the sizes of Qwen2.5-VL-3B's language
model (hidden 2,048, vocabulary 151,936) in bf16, tied output layer included. Ways alternate; the first sync of each warms up.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import time
from types import SimpleNamespace
from typing import Any

from scripts import _bench as bench

WAYS = ("http", "shared_memory", "gloo")
_LAYERS = 2
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def weights_of(share: float) -> list[tuple[str, Any]]:
    """Names and tensors, about 1 GB of them; of `share` of the rows."""
    import torch

    hidden, wide, kv, rows = 2048, 11008, 256, int(151936 * share)
    found = [("embed", torch.randn(rows, hidden).bfloat16())]
    for n in range(max(1, int(_LAYERS * share))):
        for name, shape in (
            ("q", (hidden, hidden)),
            ("k", (kv, hidden)),
            ("v", (kv, hidden)),
            ("o", (hidden, hidden)),
            ("gate", (wide, hidden)),
            ("up", (wide, hidden)),
            ("down", (hidden, wide)),
        ):
            found.append((f"layers.{n}.{name}", torch.randn(*shape).bfloat16()))
    return [*found, ("head", found[0][1])]


class Copies:
    """In place of vLLM: keeps a copy of every tensor."""

    settings = SimpleNamespace(model="model", dtype="bfloat16", max_model_len=64)

    def __init__(self) -> None:
        self.held: dict[str, Any] = {}

    def load(self, weights: Any) -> list[dict[str, int]]:
        """See VLLMBackend.load."""
        import torch

        for name, tensor in weights:
            if name not in self.held:
                self.held[name] = torch.empty_like(tensor)
            self.held[name].copy_(tensor)
        return [{name: int(t.view(-1).view(torch.int64).sum()) for name, t in self.held.items()}]

    def close(self) -> None:
        """Nothing is open."""


def serve_copies(port: int) -> None:
    """A server until a signal ends it."""
    import torch

    from mmrl.rollout.vllm_server import RolloutServer, serve

    torch.set_num_threads(1)
    sock = socket.socket()
    sock.bind(("127.0.0.1", port))
    serve(RolloutServer(Copies()), sock, lambda: None)  # type: ignore[arg-type]


def measure(way: str, share: float, syncs: int) -> dict[str, float]:
    """Processor seconds of both sides and seconds per GB: medians over the syncs behind the first."""
    import psutil
    import torch

    from mmrl.config import VLLMConfig
    from mmrl.rollout.vllm_client import VLLMClient

    torch.set_num_threads(1)
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    server = subprocess.Popen(
        [sys.executable, "-m", "scripts.bench_weight_sync", "--serve", str(port)],
        env={**os.environ, **_ENVIRONMENT},
    )
    try:
        settings = VLLMConfig(mode="server", url=f"http://127.0.0.1:{port}", transfer=way)
        client = VLLMClient(settings, "model", "bfloat16")
        weights = weights_of(share)
        size = sum(t.numel() * t.element_size() for _, t in weights[:-1]) / 1e9
        expected = {name: int(t.view(-1).view(torch.int64).sum()) for name, t in weights}
        rows = []
        for number in range(syncs + 1):
            there = sum(psutil.Process(server.pid).cpu_times()[:2])
            here, began = time.process_time(), time.perf_counter()
            assert client.load(iter(weights)) == [expected], "other weights arrived"
            row = (
                time.process_time() - here,
                sum(psutil.Process(server.pid).cpu_times()[:2]) - there,
                time.perf_counter() - began,
            )
            if number:
                rows.append([value / size for value in row])
        client.close()
        middle = [sorted(column)[len(rows) // 2] for column in zip(*rows, strict=True)]
        names = ("run_cpu_s_per_gb", "server_cpu_s_per_gb", "seconds_per_gb")
        return {"gb": size, **dict(zip(names, middle, strict=True))}
    finally:
        server.terminate()
        server.wait(60)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--syncs", type=int, default=2, help="measured in each round")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    options = bench.parse(parser, least=("syncs",))
    if options.serve is not None:
        serve_copies(options.serve)
        return
    if options.child is not None:
        way, share, syncs = options.child
        bench.finish_child(measure(way, float(share), int(syncs)))
        return
    share, rounds, syncs = (0.1, 1, 1) if options.quick else (1.0, options.rounds, options.syncs)
    found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    for order in bench.alternation(WAYS, rounds):
        for way in order:
            row = bench.run_child(
                "scripts.bench_weight_sync", ["--child", way, str(share), str(syncs)]
            )
            found[way].append(row)
            print(way, json.dumps(row), flush=True)
    keys = ("run_cpu_s_per_gb", "server_cpu_s_per_gb", "seconds_per_gb")
    ways = {
        way: {
            **{key: bench.spread([row[key] for row in rows]) for key in keys},
            "cpu_s_per_gb": bench.spread([row[keys[0]] + row[keys[1]] for row in rows]),
        }
        for way, rows in found.items()
    }
    path = bench.write_results(
        "weight_sync",
        {"gb": round(found["http"][0]["gb"], 3), "ways": ways},
        "torch",
        "safetensors",
    )
    bench.print_table(
        ("way", "CPU s per GB", "of the run", "of the server", "s per GB"),
        [
            (way, *(row[key]["median"] for key in ("cpu_s_per_gb", *keys)))
            for way, row in ways.items()
        ],
    )
    print(path)


if __name__ == "__main__":
    main()
