"""Rollouts of several turns in one packed sequence against other ways: CPU seconds and memory of forward and backward.

    python -m scripts.bench_turns             (one thread, a quarter of an hour, writes assets/results/bench_turns.json)
    python -m scripts.bench_turns --trees     (groups of rollout.tree, writes assets/results/bench_trees.json)
    python -m scripts.bench_turns --quick     (one setting)

A group of G rollouts of T turns: a question with a picture, then an answer and an observation with a picture of its own, turn after
turn. Four ways to the same log-probs, alternating in one process: `packed` (mmrl.policy.pack: question and history once),
`rollouts` (a row per rollout as TRL trains it: each its own copy of the question), `turns` (a packed prompt of its own for every
later turn; first turns share theirs) and `rows` (the usual padded batch, a row per turn). With a frozen vision tower its features
are kept, so that pictures cost their tokens alone; with a trained one every copy of a picture is encoded. The times are of this
process on the CPU, which other work on the machine blurs less than the clock on the wall. Memory is what forward and backward add
to the resident memory at their peak, in a process of its own for each way.

In a group grown as trees (two roots, three branches each), `packed` also computes once what a branch shares with its root, and
`branches` is the same row in which each branch has a copy of that.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import tempfile
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from scripts import _bench as bench

MODEL: dict[str, Any] = {
    "hidden": 256,
    "layers": 4,
    "heads": 8,
    "kv": 4,
    "vision_hidden": 128,
    "vision_layers": 2,
    "vision_heads": 4,
    "max_patches": 64,
}
WAYS = ("packed", "rollouts", "turns", "rows")
ROOTS = 2
# tokens of an answer, rollouts, pixels of the question's and of later pictures
ANSWER, GROUP, SIDE, SEEN = 24, 8, 224, 112
Turn = tuple[Any, tuple[int, ...]]  # the prompt, and what was written after it
SETTINGS = [(turns, frozen) for frozen in (True, False) for turns in (2, 3, 4, 6, 8)]


def group_of(policy: Any, turns: int, trees: bool) -> list[list[Turn]]:
    """The rollouts of a group of `turns` turns; of those of trees, all but ROOTS begin at a turn of a root, drawn with equal
    chances."""
    import numpy as np

    rng = np.random.default_rng(turns)
    frame = policy.encoder.visuals.frame

    def picture(side: int) -> Any:
        return frame(rng.integers(0, 256, (side, side, 3), dtype=np.uint8))

    def chat(words: str) -> list[dict[str, Any]]:
        return [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": words}]}]

    root = policy.encoder.prompt_of(
        chat("Where is the red circle? Look closer where you must."), [picture(SIDE)]
    )
    found: list[list[Turn]] = []
    played: list[Turn]
    for number in range(GROUP):
        played, prompt = [], root
        if trees and number >= ROOTS:
            source = found[number % ROOTS]
            begin = int(rng.integers(turns))
            played, prompt = source[:begin], source[begin][0]
        while True:
            written = (*(int(x) for x in rng.integers(30, 250, ANSWER)), policy.eos_ids[0])
            played = [*played, (prompt, written)]
            if len(played) == turns:
                break
            prompt = policy.encoder.extended(
                prompt, written, chat("seen from close by"), [picture(SEEN)]
            )
        found.append(played)
    return found


def batches(group: list[list[Turn]], trees: bool) -> dict[str, tuple[Any, list[int]]]:
    """Way -> its batch, and which turn each of its sequences is."""
    from mmrl.policy.pack import PackItem, pack, pack_padded, pack_turns

    prompts = [prompt for played in group for prompt, _ in played]
    tokens = [written for played in group for _, written in played]
    first = [i for i, p in enumerate(prompts) if p is prompts[0]]
    later = [i for i, p in enumerate(prompts) if p is not prompts[0]]
    alone = [
        PackItem(prompts[0], tuple(tokens[i] for i in first)),
        *(PackItem(prompts[i], (tokens[i],)) for i in later),
    ]
    rows = [PackItem(p, (t,)) for p, t in zip(prompts, tokens, strict=True)]
    order = list(range(len(prompts)))
    apart = [
        item
        for begin, end in pairwise([*first, len(prompts)])
        for item in pack_turns(prompts[begin:end], tokens[begin:end])
    ]
    # where a later turn's prompt is an object of its own, nothing but the question is shared
    own = [p if p is prompts[0] else replace(p) for p in prompts]
    branches = {"branches": (pack(pack_turns(own, tokens)), order)} if trees else {}
    return {
        "packed": (pack(pack_turns(prompts, tokens)), order),
        **branches,
        "rollouts": (pack(apart), order),
        "turns": (pack(alone), first + later),
        "rows": (pack_padded(rows), order),
    }


def _policy(folder: str, frozen: bool) -> Any:
    from mmrl.config import ModelConfig
    from mmrl.policy.loading import load_policy

    return load_policy(
        ModelConfig(path=folder, device="cpu", freeze=["vision", "projector"] if frozen else [])
    )


def peak_of(folder: str, turns: int, frozen: bool, trees: bool, way: str) -> dict[str, float]:
    """MiB that forward and backward of one way add at their peak: of the second, when kernels and libraries' buffers are there."""
    import psutil

    policy = _policy(folder, frozen)
    batch, _ = batches(group_of(policy, turns, trees), trees)[way]
    process, status = psutil.Process(), Path("/proc/self/status")

    def once() -> None:
        policy.model.zero_grad(set_to_none=True)
        policy.logp(batch).logp_N.sum().backward()

    once()
    policy.model.zero_grad(set_to_none=True)
    # what the first has freed goes back to the system, so that it is not used again unseen
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    before = process.memory_info().rss
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak begins anew
    once()
    peak = next(x for x in status.read_text().splitlines() if x.startswith("VmHWM"))
    return {"peak_mib": round(int(peak.split()[1]) / 1024 - before / 2**20, 1)}


def _peak_in_a_child(*asked_of: Any) -> float:
    asked = json.dumps(asked_of)
    found = bench.run_child("scripts.bench_turns", ["--child", asked])
    return float(found["peak_mib"])


def measure(folder: str, turns: int, frozen: bool, trees: bool, rounds: int) -> dict[str, Any]:
    """One setting."""
    import torch

    policy = _policy(folder, frozen)
    made = batches(group_of(policy, turns, trees), trees)
    ways = tuple(made)
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    logprobs: dict[str, torch.Tensor] = {}
    for number, order in enumerate(bench.alternation(ways, rounds + 1)):
        for way in order:
            batch, places = made[way]
            policy.model.zero_grad(set_to_none=True)
            began = time.process_time()
            logp_N = policy.logp(batch).logp_N
            logp_N.sum().backward()
            if number:  # the first round warms up
                seconds[way].append(time.process_time() - began)
            pieces = dict(zip(places, logp_N.detach().split(ANSWER + 1), strict=True))
            logprobs[way] = torch.cat([pieces[i] for i in range(len(pieces))])
    apart = max(float((logprobs[way] - logprobs["packed"]).abs().max()) for way in ways)
    assert apart < 1e-4, f"the ways differ by {apart}"
    medians = {way: bench.spread(values) for way, values in seconds.items()}
    return {
        "turns": turns,
        "vision": "frozen" if frozen else "trained",
        "cpu_s": medians,
        "tokens": {way: made[way][0].num_tokens for way in ways},
        "pictures": {way: len(made[way][0].visuals) for way in ways},
        "peak_mib": {way: _peak_in_a_child(folder, turns, frozen, trees, way) for way in ways},
        "largest_difference": float(f"{apart:.1e}"),
        "ratio": {
            way: round(medians[way]["median"] / medians["packed"]["median"], 2) for way in ways[1:]
        },
    }


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trees", action="store_true", help="groups that are grown as trees")
    parser.add_argument("--quick", action="store_true", help="one setting, one round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = bench.parse(parser)
    import torch

    from mmrl.policy.tiny import TinySpec, build_tiny

    torch.set_num_threads(1)
    if options.child:
        bench.finish_child(peak_of(*json.loads(options.child)))
        return 0
    with tempfile.TemporaryDirectory(prefix="mmrl-turns-") as folder:
        build_tiny(TinySpec(**MODEL), folder)
        found = [
            measure(folder, turns, frozen, options.trees, 1 if options.quick else options.rounds)
            for turns, frozen in (SETTINGS[:1] if options.quick else SETTINGS)
        ]
    ways = tuple(found[0]["tokens"])
    bench.print_table(
        (
            "turns, tower",
            *(f"{way}, CPU s" for way in ways),
            *(f"{way} / packed" for way in ways[1:]),
            "MiB",
            "tokens",
        ),
        [
            (
                f"{r['turns']}, {r['vision']}",
                *(r["cpu_s"][way]["median"] for way in ways),
                *(r["ratio"][way] for way in ways[1:]),
                " : ".join(f"{r['peak_mib'][way]:.0f}" for way in ways),
                " : ".join(str(r["tokens"][way]) for way in ways),
            )
            for r in found
        ],
    )
    settings = {
        "model": MODEL,
        "group_size": GROUP,
        "answer_tokens": ANSWER,
        "threads": 1,
        "rounds": options.rounds,
        **({"roots": ROOTS} if options.trees else {}),
    }
    name = "bench_trees" if options.trees else "bench_turns"
    file = bench.write_results(name, {"settings": settings, "rows": found}, "torch", "transformers")
    print(f"recorded in {file}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
