"""What it saves to render the last control step of an action chunk only, on the real simulators.

    python -m scripts.bench_render             (a few minutes, writes assets/results/bench_render.json)

One simulator in this process, a chunk of eight zero actions, executed with a picture at its end (what training does) and with one
after every control step (what recording a video does), alternating. Milliseconds per chunk; resets are outside the timing.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

from scripts import _bench as bench

CHUNK = 8
SPECS: dict[str, dict[str, Any]] = {
    "maniskill": {
        "suite": "maniskill",
        "task": "PushCube-v1",
        "image_size": 84,
        "options": {"dims": 4},
    },
    "libero": {
        "suite": "libero",
        "task": "libero_object/0",
        "image_size": 128,
        "cameras": ("base", "wrist"),
        "options": {"assets": "stand-in"},
    },
    "tiny": {"suite": "tiny", "task": "push", "image_size": 84},
}
MODES = ("last step", "every step")


def measure(name: str, rounds: int, chunks: int) -> dict[str, Any]:
    """Milliseconds per chunk of each mode, a round being `chunks` chunks of a fresh episode."""
    import numpy as np

    from mmrl.robotics.contract import EnvSpec, initial_states, make_simulator, run_chunk

    spec = EnvSpec(horizon=CHUNK * chunks + 1, **SPECS[name])
    simulator = make_simulator(spec)
    actions = np.zeros((CHUNK, simulator.action_space.dim))
    if spec.suite == "libero":
        from mmrl.robotics.libero import libero_states

        state = libero_states(spec.task, "train")[0]
    else:
        state = initial_states("train", 1)[0]
    found: dict[str, list[float]] = {mode: [] for mode in MODES}
    try:
        for number, order in enumerate(bench.alternation(MODES, rounds + 1)):
            for mode in order:
                simulator.reset(state)
                simulator.observe()
                began = time.perf_counter()
                for _ in range(chunks):
                    run_chunk(simulator, actions, frames=mode == "every step")
                if number:  # the first round warms up
                    found[mode].append((time.perf_counter() - began) * 1000 / chunks)
        versions = simulator.versions()
    finally:
        simulator.close()
    rows = {mode: bench.spread(values, 1) for mode, values in found.items()}
    return {
        "ms_per_chunk": rows,
        "ratio": round(rows["every step"]["median"] / rows["last step"]["median"], 2),
        "simulator": versions,
        "options": {},
        **SPECS[name],
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--chunks", type=int, default=3, help="per round")
    parser.add_argument("--only", nargs="+", default=list(SPECS), choices=list(SPECS))
    options = bench.parse(parser)
    found = {}
    for name in options.only:
        found[name] = measure(name, options.rounds, options.chunks)
        row = found[name]["ms_per_chunk"]
        print(
            f"{name}: {row['last step']['median']} ms with one picture, {row['every step']['median']} ms with {CHUNK}, "
            f"{found[name]['ratio']} times",
            flush=True,
        )
    if set(found) == set(SPECS):
        print(bench.write_results("bench_render", {"chunk": CHUNK, "simulators": found}))


if __name__ == "__main__":
    main()
