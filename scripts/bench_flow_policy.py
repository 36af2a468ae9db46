"""A VLA's architecture learns from success alone: SmolVLA, pi0 or OpenVLA-OFT, tiny, cloned and then trained.

    python -m scripts.bench_flow_policy                               # Flow-SDE with GRPO, one seed: a quarter of an hour
    python -m scripts.bench_flow_policy --kinds sde_grpo noise_ppo --seeds 3 --record
    python -m scripts.bench_flow_policy --policy oft --kinds grpo ppo  # action tokens: their noise is the choice among them
    python -m scripts.bench_flow_policy --suite maniskill             # PushCube-v1 instead of the tiny simulator

Each seed trains the same cloned policy (configs/robot_flow.yaml, configs/maniskill_flow.yaml). Success on 100 fresh initial states
before and after, sampled (with the noise) and greedy (the ODE), with 95 % intervals. `--record` writes
assets/results/bench_flow_policy_KIND.json (of pi0: bench_flow_policy_pi0_KIND.json; of ManiSkill: ..._maniskill_pi0_KIND.json).
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from scripts._bench import ROOT, parse, print_table, write_results
from scripts.demo_robot import outcome, steps_of

CONFIGS = {
    "tiny": ROOT / "configs" / "robot_flow.yaml",
    "maniskill": ROOT / "configs" / "maniskill_flow.yaml",
}
_PPO = ("algorithm.advantage=gae", "vla.value_head=true", "algorithm.critic.warmup=5")
_NOISE = ("vla.flow.noise=learned", "vla.flow.logprob=mean", "vla.flow.noisy_steps=all")
KINDS: dict[str, tuple[str, ...]] = {
    "sde_grpo": (),
    "sde_ppo": _PPO,
    "noise_grpo": _NOISE,
    "noise_ppo": (*_NOISE, *_PPO),
    "grpo": (),
    "ppo": _PPO,
}
"""Noise and algorithm (of action tokens: algorithm) -> what is changed in the recipe."""
WHEN = ("before", "after")
CHUNKS = {"tiny": "5", "maniskill": "4"}
"""Suite -> action.chunk of its recipe, which a flow head has to be made for."""
PROPRIO = {"tiny": "2", "maniskill": "8"}
"""Suite -> numbers of proprioception, which OpenVLA-OFT's projector has to be made for."""
POLICIES: dict[str, tuple[str, list[str | dict[str, str]]]] = {
    "smolvla": ("mmrl.robotics.tiny_smolvla", ["--chunk", CHUNKS]),
    "pi0": ("mmrl.robotics.tiny_pi0", ["--chunk", CHUNKS]),
    "pi05": ("mmrl.robotics.tiny_pi0", ["--pi05", "--chunk", CHUNKS]),
    # with 256 bins a tiny policy's choice among neighbours is mostly noise
    "oft": ("mmrl.robotics.tiny_oft", ["--bins", "17", "--proprio", PROPRIO]),
}
"""Policy -> the module that builds it, and its options."""
CLONING = {"oft": ("demos.steps=2500",)}
"""Policy -> what is changed in the recipe to clone it: a chunk of tokens takes longer to learn than a flow."""
LEARNING = {
    "oft": (
        "rollout.temperature=1.6",  # as SimpleVLA-RL samples
        "algorithm.importance_sampling_level=token",
        "algorithm.max_rounds=4",
        "optim.lr=2e-4",
        "train.steps=90",
    )
}
"""Policy -> what is changed in the recipe to train it."""


def named(suite: str, policy: str, name: str) -> str:
    """`name` with the suite's and the policy's before it; the tiny simulator and SmolVLA have none."""
    before = [n for n, plain in ((suite, "tiny"), (policy, "smolvla")) if n != plain]
    return "_".join([*before, name])


def cloned(suite: str, policy: str, folder: Path) -> Path:
    """The cloned policy, made where it is not there yet."""
    clone = folder / named(suite, policy, "flow_clone")
    if (clone / "vla.json").is_file():
        print(f"trains the policy that was cloned earlier into {clone}; remove it to clone it anew")
    else:
        tiny = str(folder / f"{suite}_{policy}")
        module, options = POLICIES[policy]
        told = [o if isinstance(o, str) else o[suite] for o in options]
        subprocess.run([sys.executable, "-m", module, tiny, *told], check=True)
        command = ["sft", str(CONFIGS[suite]), "--overwrite", "--out", str(clone)]
        command += [f"model.path={tiny}"]
        command += [f"name={clone.name}", f"dir={folder}", *CLONING.get(policy, ())]
        subprocess.run([sys.executable, "-m", "mmrl.cli.main", *command], check=True)
    return clone


def run(
    suite: str,
    kind: str,
    seed: int,
    clone: Path,
    folder: Path,
    overrides: list[str],
    *,
    again: bool,
) -> dict[str, Any]:
    """One training run, in this process; with `again` the run of an earlier call that is there."""
    from mmrl.cli.run import train_command

    began = time.time()
    name = clone.name.removesuffix("clone") + f"{kind}_{seed}"
    if again and len(list((folder / name / "eval").glob("step_*/results.json"))) > 1:
        return outcome(folder / name, sum(row["time/total"] for row in steps_of(folder / name)))
    changes = [f"model.path={clone}", f"seed={seed}", f"name={name}", f"dir={folder}"]
    done = train_command(
        CONFIGS[suite],
        [*KINDS[kind], *changes, *overrides],
        resume=False,
        overwrite=True,
        quiet=False,
    )
    return outcome(done, time.time() - began)


def main() -> int:
    """Command line; exit status 1 when a run's sampled success fell."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kinds", nargs="+", default=["sde_grpo"], choices=tuple(KINDS))
    parser.add_argument("--policy", default="smolvla", choices=tuple(POLICIES))
    parser.add_argument("--suite", default="tiny", choices=tuple(CONFIGS))
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--folder", type=Path, default=Path("runs"), help="of models and runs")
    parser.add_argument("--record", action="store_true")
    parser.add_argument(
        "--again", action="store_true", help="take runs of earlier calls as they are"
    )
    parser.add_argument("overrides", nargs="*", help="configuration overrides")
    options = parse(parser)
    if options.again and options.overrides:
        parser.error("--again takes runs as they are: give no overrides with it")
    if wrong := [k for k in options.kinds if (k in ("grpo", "ppo")) != (options.policy == "oft")]:
        parser.error(
            f"{', '.join(wrong)}: grpo and ppo are of --policy oft, the others of policies with a flow head"
        )
    suite, policy = options.suite, options.policy
    clone, fell = cloned(suite, policy, options.folder), False
    changes = [*LEARNING.get(policy, ()), *options.overrides]
    for kind in options.kinds:
        runs = [
            run(suite, kind, seed, clone, options.folder, changes, again=options.again)
            for seed in range(options.seeds)
        ]
        rows = [
            (
                named(suite, policy, kind),
                r["seed"],
                mode,
                *(f"{table['success_once'][when]['mean']:.2f}" for when in WHEN),
            )
            for r in runs
            for mode, table in r["held_out"].items()
        ]
        print_table(("kind", "seed", "mode", *WHEN), rows)
        if options.record:
            facts = {
                "cloning": list(CLONING.get(policy, ())),
                "overrides": [*KINDS[kind], *changes],
                "runs": runs,
            }
            name = f"bench_flow_policy_{named(suite, policy, kind)}"
            packages = ("mani_skill", "sapien") if suite == "maniskill" else ()
            print(write_results(name, facts, "torch", "transformers", *packages))
        sampled = [r["held_out"]["sampled"]["success_once"] for r in runs]
        fell |= any(s["after"]["mean"] < s["before"]["mean"] for s in sampled)
    return int(fell)


if __name__ == "__main__":
    raise SystemExit(main())
