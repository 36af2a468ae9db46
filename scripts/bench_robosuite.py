"""What robosuite's tasks and LIBERO cost in mmrl, and as robosuite runs them: a scene is kept from reset to reset
(mmrl.robotics.kept_scene), and what a physics step needs is computed once (mmrl.robotics.forward_once).

    OMP_NUM_THREADS=1 python -m scripts.bench_robosuite     (some minutes, writes assets/results/bench_robosuite.json)

Processor seconds, alternating in one process: a reset with its first picture, a control step without a picture, and an episode of
280 control steps in chunks of 8 with two pictures each. A digest of all pictures and states says that both ways play the same
episodes.
"""

from __future__ import annotations

import argparse
import hashlib
import time
from typing import Any
from unittest.mock import patch

from scripts import _bench as bench

STEPS, CHUNK = 280, 8
SPECS: dict[str, dict[str, Any]] = {
    "libero_object/2": {"suite": "libero", "options": {"assets": "stand-in"}},
    "libero_goal/7": {"suite": "libero", "options": {"assets": "stand-in"}},
    "libero_10/0": {"suite": "libero", "options": {"assets": "stand-in"}},
    "Door": {"suite": "robosuite"},
}
"""Task -> where it is. robosuite's Lift is left out: its cube has a size of chance, so nothing is kept."""
MODES = ("mmrl", "robosuite")


class _Left:
    """In the place of KeptScene: leaves robosuite as it is."""

    def __init__(self, env: Any) -> None:
        del env

    def close(self) -> None:
        """Nothing is kept."""


def measure(task: str, rounds: int, chunks: int) -> dict[str, Any]:
    """Processor seconds per reset and per episode of each mode, a round being an episode."""
    import numpy as np

    from mmrl.robotics import robosuite
    from mmrl.robotics.contract import EnvSpec, initial_states, make_simulator
    from mmrl.robotics.source import states_of

    spec = EnvSpec(
        task=task, horizon=STEPS + 1, image_size=128, cameras=("base", "wrist"), **SPECS[task]
    )
    simulators = {mode: make_simulator(spec) for mode in MODES}
    states = states_of(spec, "train") or initial_states("train", rounds + 1)
    reset: dict[str, list[float]] = {mode: [] for mode in MODES}
    stepped: dict[str, list[float]] = {mode: [] for mode in MODES}
    played: dict[str, list[float]] = {mode: [] for mode in MODES}
    digests = {mode: hashlib.sha256() for mode in MODES}
    try:
        with patch.object(robosuite, "KeptScene", _Left):
            simulators["robosuite"].reset(states[0])
        simulators["mmrl"].reset(states[0])
        for number, order in enumerate(bench.alternation(MODES, rounds + 1)):
            for mode in order:
                simulator, digest = simulators[mode], digests[mode]
                actions = np.random.default_rng(number).uniform(-1, 1, (chunks, CHUNK, 7)) / 4
                began = time.process_time()
                simulator.reset(states[number % len(states)])
                seen = [simulator.observe()]
                there = time.process_time()
                moving = 0.0
                for chunk in actions:
                    moved = time.process_time()
                    for action in chunk:
                        simulator.step(action)
                    moving += time.process_time() - moved
                    seen.append(simulator.observe())
                ended = time.process_time()
                for observation in seen:
                    digest.update(observation.images["base"].tobytes())
                    digest.update(observation.images["wrist"].tobytes())
                    digest.update(observation.proprio.tobytes())
                if number:  # the first round warms up
                    reset[mode].append(there - began)
                    stepped[mode].append(1e3 * moving / (chunks * CHUNK))
                    played[mode].append(ended - began)
        versions = simulators["mmrl"].versions()
    finally:
        for simulator in simulators.values():
            simulator.close()
    steps = chunks * CHUNK
    steps_ms = {mode: bench.spread(values, 1) for mode, values in stepped.items()}
    seconds = {mode: bench.spread(values, 3) for mode, values in reset.items()}
    rates = {mode: bench.spread([steps / s for s in v], 1) for mode, v in played.items()}
    return {
        "reset_cpu_s": seconds,
        "ratio": round(seconds["robosuite"]["median"] / seconds["mmrl"]["median"], 2),
        "step_cpu_ms": steps_ms,
        "step_ratio": round(steps_ms["robosuite"]["median"] / steps_ms["mmrl"]["median"], 2),
        "steps_per_cpu_s": rates,
        "equal": digests["mmrl"].digest() == digests["robosuite"].digest(),
        "simulator": versions,
        **SPECS[task],
    }


def main() -> int:
    """Command line; exit status 1 where the two play other episodes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--chunks", type=int, default=STEPS // CHUNK, help="of an episode")
    parser.add_argument("--only", nargs="+", default=list(SPECS), choices=list(SPECS))
    options = bench.parse(parser, least=("chunks",))
    found = {}
    for task in options.only:
        row = found[task] = measure(task, options.rounds, options.chunks)
        reset = {mode: row["reset_cpu_s"][mode]["median"] for mode in MODES}
        step = {mode: row["step_cpu_ms"][mode]["median"] for mode in MODES}
        print(
            f"{task}: a reset {reset['robosuite']} s and {reset['mmrl']} s, a step {step['robosuite']} ms and {step['mmrl']} ms; "
            f"{'equal' if row['equal'] else 'DIFFERENT'} episodes",
            flush=True,
        )
    if set(found) == set(SPECS):
        facts = {"chunk": CHUNK, "steps": options.chunks * CHUNK, "tasks": found}
        print(bench.write_results("bench_robosuite", facts, "hf-libero", "robosuite", "mujoco"))
    return int(not all(row["equal"] for row in found.values()))


if __name__ == "__main__":
    raise SystemExit(main())
