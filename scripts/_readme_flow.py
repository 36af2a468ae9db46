"""The pages' table of tiny policies in the published architectures; scripts/update_readme.py puts it in its place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from scripts.bench_flow_policy import named

__all__ = ["flow_policies"]

_RESULTS = Path(__file__).resolve().parent.parent / "assets" / "results"
_NOISE = {"sde": "Flow-SDE", "noise": "Flow-Noise", "": "action tokens"}
_POLICIES = {"smolvla": "SmolVLA", "pi0": "pi0", "pi05": "pi0.5", "oft": "OpenVLA-OFT"}
_SUITES = {"tiny": "tiny reach, 10 steps", "maniskill": "ManiSkill PushCube-v1, 14 steps"}


def _rows(found: dict[str, Any], world: str, policy: str, kind: str) -> list[str]:
    noise, _, algorithm = kind.rpartition("_")
    rows = []
    for run in found["runs"]:
        cells = [
            "{mean:.2f} [{low:.2f}, {high:.2f}]".format(
                **run["held_out"][mode]["success_once"][when]
            )
            for mode in ("sampled", "greedy")
            for when in ("before", "after")
        ]
        what = f"{_POLICIES[policy]}, {_NOISE[noise]}, {algorithm.upper()}"
        rows.append(f"| {world} | {what} | {run['steps']} | {run['seed']} | {' | '.join(cells)} |")
    return rows


def flow_policies() -> str:
    """What success alone taught cloned policies, one row for each seed."""
    rows, loads = [], []
    for suite, world in _SUITES.items():
        for policy in _POLICIES:
            for kind in ("sde_grpo", "noise_grpo", "sde_ppo", "noise_ppo", "grpo", "ppo"):
                name = named(suite, policy, kind)
                file = _RESULTS / f"bench_flow_policy_{name}.json"
                if file.exists():
                    found = json.loads(file.read_text(encoding="utf-8"))
                    rows += _rows(found, world, policy, kind)
                    loads.append(found["machine"]["load_1min"])
    if not rows:
        return "No number has been recorded yet; `python -m scripts.bench_flow_policy --record` measures."
    return "\n".join(
        [
            "| simulator | policy, noise, algorithm | steps | seed | sampled, before | after | greedy, before | after |",
            "|---|---|---|---|---|---|---|---|",
            *rows,
            f"\n100 held-out states, on two CPU cores beside other work (load {min(loads):.0f} to {max(loads):.0f}). All seeds of "
            "a policy train one and the same clone.",
        ]
    )
