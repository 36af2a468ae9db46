"""Control steps per second of simulators in a batch, and of as many one after the other, in one process.

    python -m scripts.bench_batched      (a minute, writes assets/results/bench_batched.json; with an NVIDIA GPU also PhysX on it)

An action chunk of eight zero actions with a picture at its end, in every row, on fresh episodes; resets are outside the timing. On
the CPU a batch is the same simulators, so that the ratio is what the batch itself costs; ManiSkill batches on a GPU.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from typing import Any

from scripts import _bench as bench

CHUNK = 8
CASES: dict[str, dict[str, Any]] = {
    "tiny": {"rows": 16, "suite": "tiny", "task": "push", "image_size": 84},
    "maniskill": {"rows": 1, "suite": "maniskill", "task": "PushCube-v1", "image_size": 84},
}
ON_GPU = {
    f"maniskill, {rows} rows on the GPU": {
        **CASES["maniskill"],
        "rows": rows,
        "options": {"sim_backend": "gpu"},
    }
    for rows in (16, 64, 256)
}
SYSTEMS = ("one by one", "batch")


def measure(case: dict[str, Any], rounds: int, chunks: int) -> dict[str, Any]:
    """Control steps per second of each system; one by one there are at most 16 rows, on the CPU."""
    import numpy as np

    from mmrl.robotics.contract import EnvSpec, initial_states, make_simulator, run_chunk
    from mmrl.robotics.maniskill_vector import ManiSkillVector
    from mmrl.robotics.vector import make_vector

    rows = case["rows"]
    spec = EnvSpec(horizon=CHUNK * chunks + 1, **{k: v for k, v in case.items() if k != "rows"})
    # of maniskill its own batch, on the CPU as well
    vector = ManiSkillVector(spec, rows) if spec.suite == "maniskill" else make_vector(spec, rows)
    few = [make_simulator(replace(spec, options={})) for _ in range(min(rows, 16))]
    states = initial_states("train", rows)
    actions = np.zeros((CHUNK, few[0].action_space.dim))

    def one_by_one() -> float:
        for simulator, state in zip(few, states, strict=False):
            simulator.reset(state)
            simulator.observe()
        began = time.perf_counter()
        for _ in range(chunks):
            for simulator in few:
                run_chunk(simulator, actions)
        return len(few) / (time.perf_counter() - began)

    def batch() -> float:
        vector.reset(dict(enumerate(states)))
        vector.observe(range(rows))
        began = time.perf_counter()
        for _ in range(chunks):
            vector.step_chunk(dict.fromkeys(range(rows), actions))
        return rows / (time.perf_counter() - began)

    runs = dict(zip(SYSTEMS, (one_by_one, batch), strict=True))
    found: dict[str, list[float]] = {name: [] for name in SYSTEMS}
    try:
        for number, order in enumerate(bench.alternation(SYSTEMS, rounds + 1)):
            for name in order:
                rate = runs[name]() * CHUNK * chunks
                if number:  # the first round warms up
                    found[name].append(rate)
        versions = vector.versions()
    finally:
        vector.close()
        for simulator in few:
            simulator.close()
    rates = {name: bench.spread(values, 1) for name, values in found.items()}
    return {
        "control_steps_per_s": rates,
        "ratio": round(rates["batch"]["median"] / rates["one by one"]["median"], 2),
        "simulator": versions,
        **case,
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--chunks", type=int, default=4, help="per round")
    options = bench.parse(parser)
    import torch

    found = {}
    for name, case in (CASES | (ON_GPU if torch.cuda.is_available() else {})).items():
        found[name] = measure(case, options.rounds, options.chunks)
        rates = found[name]["control_steps_per_s"]
        print(
            f"{name}: {rates['one by one']['median']:.0f} control steps/s one by one, {rates['batch']['median']:.0f} in a batch of "
            f"{case['rows']}, {found[name]['ratio']} times",
            flush=True,
        )
    print(bench.write_results("bench_batched", {"chunk": CHUNK, "cases": found}))


if __name__ == "__main__":
    main()
