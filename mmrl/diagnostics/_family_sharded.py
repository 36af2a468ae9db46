"""A family's models in two processes that share their weights out (FSDP2 over gloo), against transformers alone in this one.

    torchrun --standalone --nproc-per-node 2 -m mmrl.diagnostics._family_sharded OUT FOLDER..     # a model of a family in each

One process has a group behind a picture, the other one behind text alone, whose share of the tower must be gathered all the same.
Part of mmrl.diagnostics.families.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from transformers import AutoConfig

from mmrl.config import RunConfig
from mmrl.diagnostics._family_subject import LOGP, Subject, gradients_near, group, weighed
from mmrl.distributed.engines import build_train_engine
from mmrl.distributed.world import World
from mmrl.policy.families import family_of
from mmrl.policy.pack import PackItem, pack
from mmrl.policy.policy import Policy
from mmrl.training.optim import build_optimizer

__all__ = ["check_sharded", "compare_sharded", "main"]

_FROZEN: dict[str, tuple[str, ...]] = {"all trained": (), "towers frozen": ("vision", "projector")}
_PICTURES = (1, 0)  # of the prompt, by process
_RUN = RunConfig.model_validate({"engine": {"train": "fsdp2"}, "optim": {"lr": 1e-3}})


def main(arguments: list[str]) -> None:
    """What this process does for the models in all folders; OUT/NUMBER.pt holds what the first one found."""
    out, world = Path(arguments[0]), World(torch.device("cpu"))
    for number, folder in enumerate(arguments[1:]):
        family = family_of(AutoConfig.from_pretrained(folder, trust_remote_code=False))
        s = Subject(family, folder, out)
        found = {
            what: _updated(s, world, freeze)
            for what, freeze in _FROZEN.items()
            if not _outside(s, freeze)
        }
        if world.is_main:
            torch.save(found, out / f"{number}.pt")
    world.barrier()
    world.close()


def _outside(s: Subject, freeze: tuple[str, ...]) -> bool:
    """Whether something is trained that lies in no part: engines that shard refuse that."""
    return bool(s.family.parts.loose) and "projector" not in freeze


def _updated(s: Subject, world: World, freeze: tuple[str, ...]) -> dict[str, Any]:
    """Gradients of one update over both processes, the weights after it, and log-probs of both prompts with those."""
    policy = s.policy(freeze=list(freeze))
    engine = build_train_engine(
        _RUN, world, policy, build_optimizer(policy.trainable(), _RUN.optim)
    )
    prompt = s.prompt(policy, _PICTURES[world.rank])
    batch = pack([PackItem(prompt, tuple(s.answers(policy)))])

    def logp() -> torch.Tensor:
        (logp_N,) = engine.run(lambda: (policy.logp(batch).logp_N,))
        return logp_N

    engine.begin(1.0)
    engine.backward(weighed(logp()), last=True)
    gradients = {
        name: _whole(torch.zeros_like(p) if p.grad is None else p.grad)
        for name, p in policy.trainable()
    }
    engine.step(1.0, 0, 10, str)
    with torch.no_grad():
        after = world.gather([logp().tolist()])
    weights = {name: tensor.clone() for name, tensor in engine.parameters(trainable=False)}
    return {"gradients": gradients, "weights": weights, "logp": after}


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def compare_sharded(s: Subject, found: Mapping[str, Any]) -> str:
    """What two processes found, against rows by transformers in this one. Raises AssertionError."""
    told = []
    for what, freeze in _FROZEN.items():
        if _outside(s, freeze):
            told.append(f"{what}: refused, {', '.join(s.family.parts.loose)} lies in no part")
            continue
        policy, two = s.policy(freeze=list(freeze)), found[what]
        torch.stack([weighed(_rows(s, policy, count)) for count in _PICTURES]).sum().backward()
        one = {n: p.grad for n, p in policy.trainable() if p.grad is not None}
        extra = {n for n, g in two["gradients"].items() if g.any()} ^ {
            n for n, g in one.items() if g.any()
        }
        assert not extra, f"{what}: other weights learn: {sorted(extra)[:3]}"
        gradient = gradients_near(two["gradients"], one, what)
        with torch.no_grad():
            for name, parameter in policy.model.named_parameters():
                parameter.copy_(two["weights"][name])
            alone = torch.cat([_rows(s, policy, count) for count in _PICTURES])
        logp = float((torch.tensor([x for logp in two["logp"] for x in logp]) - alone).abs().max())
        assert logp <= LOGP, (
            f"{what}: expected log-probs of the gathered weights at most {LOGP:g} apart, found {logp:.2g}"
        )
        told.append(
            f"{what}: gradients {gradient:.1g} of the norm apart, after a step log-probs {logp:.1g}"
        )
    return "; ".join(told)


def _rows(s: Subject, policy: Policy, count: int) -> torch.Tensor:
    return group(s, policy, s.prompt(policy, count), s.processed(policy, count))[1]


def check_sharded(s: Subject) -> str:
    """Two processes that share the weights out, one with a picture and one without, against transformers in one."""
    launch = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", __name__)
    done = subprocess.run(
        [sys.executable, "-m", *launch, str(s.folder), s.path],
        env=os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
        capture_output=True,
        text=True,
        check=False,
    )
    errors = [
        line for line in done.stderr.splitlines() if re.match(r"(\[rank\d\]: )?\w+Error: ", line)
    ]
    said = errors[0] if errors else done.stderr.strip()[-500:]
    assert done.returncode == 0, f"two processes: exit status {done.returncode}, {said}"
    return compare_sharded(s, torch.load(s.folder / "0.pt"))


if __name__ == "__main__":
    main(sys.argv[1:])
