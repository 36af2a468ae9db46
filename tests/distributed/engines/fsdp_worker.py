"""What two processes find when they drive FSDPEngine themselves; a job of tests/kits/process_worker.py."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from transformers import AutoModelForImageTextToText

from mmrl.config import ModelConfig, RunConfig
from mmrl.distributed.engines import build_train_engine
from mmrl.distributed.world import World
from mmrl.errors import NonFiniteError
from mmrl.policy.loading import load_policy
from mmrl.policy.pack import PackItem, idle_item, pack
from mmrl.training.optim import build_optimizer

__all__ = ["drive", "held", "int8"]


def drive(folder: str) -> dict[str, Any]:
    """Gradients, norms, weights and optimizer state of the engine alone, whose blocks stay in place from forward to backward."""
    os.environ["FSDP_RESHARD_AFTER_FORWARD"] = "false"
    world = World(torch.device("cpu"))
    config = RunConfig.model_validate({"engine": {"train": "fsdp2"}, "optim": {"lr": 0.01}})
    policy = load_policy(ModelConfig(path=folder, device="cpu"))
    optimizer = build_optimizer(policy.trainable(), config.optim)
    batch = pack([idle_item(policy.eos_ids[0])])
    policy.logp(batch).logp_N.sum().backward()
    plain = policy.base.lm_head.weight.grad.clone()
    policy.model.zero_grad(set_to_none=True)
    before = {name: p.detach().clone() for name, p in policy.model.named_parameters()}
    engine = build_train_engine(config, world, policy, optimizer)
    numel = sum(p.numel() for p in before.values())
    found: dict[str, Any] = {
        "share": sum(p.to_local().numel() for _, p in policy.trainable() if isinstance(p, DTensor))
        / numel,
        "whole": all(
            torch.equal(t, before.pop(name)) for name, t in engine.parameters(trainable=False)
        )
        and not before,
    }

    def loss(factor: float) -> torch.Tensor:
        (logp_N,) = engine.run(lambda: (policy.logp(batch).logp_N,))
        return logp_N.sum() * factor

    with torch.no_grad():
        loss(1.0)
    found["given back"] = world.gather(
        [all(isinstance(p, DTensor) for p in policy.model.parameters())]
    )

    def gradient(*factors: float) -> torch.Tensor:
        engine.begin(1.0)
        for factor in factors:
            engine.backward(loss(factor))
        return policy.base.lm_head.weight.grad.full_tensor().clone()

    one = gradient(1.0 if world.is_main else 0.0)
    found["sums"] = {
        "of one process": float((one - plain).norm() / plain.norm()),
        "over processes": float((gradient(1.0) - 2 * one).norm() / one.norm()),
        "over micro-batches": float((gradient(1.0, 0.5) - 3 * one).norm() / one.norm()),
    }
    norms = [
        engine.step(2.0, n, 10, str)[0] for n in range(2) if n == 0 or gradient(1.0) is not None
    ]
    found["norms"] = world.gather(norms)
    state = engine.optimizer_state()
    found["main holds the state"] = world.gather([state is not None])
    steps = [float(s["step"]) for s in (state or {"state": {}})["state"].values()]
    engine.begin(1.0)
    engine.backward(loss(1.0 if world.is_main else float("inf")))
    try:
        engine.step(1.0, 2, 10, lambda norm: f"norm {norm}")
        found["non-finite"] = world.gather(["no error"])
    except NonFiniteError as error:
        found["non-finite"] = world.gather([str(error)])
    found["steps"] = sorted(set(steps))
    return found


def int8(folder: str) -> dict[str, Any]:
    """Moments of 8 bits in shards: their share of the bytes of moments in fp32, and whether a state that was saved whole and
    loaded again is the same, byte by byte, and leads to the same weights."""
    world = World(torch.device("cpu"))
    run = {"engine": {"train": "fsdp2"}, "optim": {"lr": 0.01, "states": "int8"}}
    config = RunConfig.model_validate(run)
    policy = load_policy(ModelConfig(path=folder, device="cpu"))
    optimizer = build_optimizer(policy.trainable(), config.optim)
    engine = build_train_engine(config, world, policy, optimizer)
    batch = pack([idle_item(policy.eos_ids[0])])

    def step(update: int) -> None:
        engine.begin(1.0)
        (logp_N,) = engine.run(lambda: (policy.logp(batch).logp_N,))
        engine.backward(logp_N.sum(), last=True)
        engine.step(1.0, update, 10, str)

    def local() -> list[torch.Tensor]:
        found = []
        for entries in optimizer.state.values():
            for name in ("exp_avg", "exp_avg_sq"):
                moment = entries[name].to_local()
                found += [moment.codes, moment.scale] if hasattr(moment, "codes") else [moment]
        return [t.clone() for t in found]

    def weights() -> list[torch.Tensor]:
        return [p.to_local().clone() for _, p in policy.trainable()]

    step(0)
    step(1)
    before, kept = local(), weights()
    state = engine.optimizer_state(lambda number: True)
    assert state is not None
    types = {type(v).__name__ for e in state["state"].values() for v in e.values()}
    step(2)
    straight = weights()
    engine.load_optimizer_state(state)
    with torch.no_grad():
        for (_, parameter), old in zip(policy.trainable(), kept, strict=True):
            parameter.to_local().copy_(old)
    again = local()
    step(2)
    return {
        "share": sum(t.nbytes for t in before) / (8 * sum(t.numel() for t in kept)),
        "types": sorted(types),
        "same": len(before) == len(again)
        and all(torch.equal(a, b) for a, b in zip(before, again, strict=True)),
        "goes on": all(torch.equal(a, b) for a, b in zip(straight, weights(), strict=True)),
        "moved": not all(torch.equal(a, b) for a, b in zip(kept, straight, strict=True)),
    }


def _resident() -> int:
    """Bytes of this process that lie in memory."""
    pages = Path("/proc/self/statm").read_text(encoding="utf-8").split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def held(folder: str) -> dict[str, Any]:
    """What a forward and a backward in bf16 hold of weights: resident bytes after each decoder layer of the forward, without
    gradients and with them (checkpointed); and the log-probs, beside those of transformers' own model in bf16."""
    os.environ["FSDP_RESHARD_AFTER_FORWARD"] = "true"
    # glibc: M_MMAP_THRESHOLD; what is freed leaves the process at once
    ctypes.CDLL(None).mallopt(-3, 1 << 16)
    world = World(torch.device("cpu"))
    config = RunConfig.model_validate({"engine": {"train": "fsdp2"}, "optim": {"lr": 0.01}})
    settings = ModelConfig(path=folder, device="cpu", dtype="bf16", gradient_checkpointing=True)
    policy = load_policy(settings)
    item = PackItem(idle_item(policy.eos_ids[0]).prompt, (tuple(range(5, 25)),))
    ids = torch.tensor([[*item.prompt.ids_P.tolist(), *item.completions[0]]])
    theirs = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.bfloat16)
    with torch.no_grad():
        logits = theirs(input_ids=ids).logits[0, -len(item.completions[0]) - 1 : -1].float()
    del theirs
    logits = policy.adjust(logits, 1.0)
    expected = logits.log_softmax(-1).gather(-1, ids[0, -len(item.completions[0]) :, None])[:, 0]
    engine = build_train_engine(
        config, world, policy, build_optimizer(policy.trainable(), config.optim)
    )
    layers = list(policy.base.model.language_model.layers)
    seen: list[int] = []
    for layer in layers:
        layer.register_forward_hook(lambda *_: seen.append(_resident()))
    batch = pack([item])

    def passes(*, grad: bool) -> tuple[torch.Tensor, list[int]]:
        seen.clear()
        with torch.set_grad_enabled(grad):
            (logp_N,) = engine.run(lambda: (policy.logp(batch).logp_N,))
        found = [each - seen[0] for each in seen]
        if grad:
            engine.backward(logp_N.sum(), last=True)
        return logp_N.detach(), found

    engine.begin(1.0)
    passes(grad=True)  # gradients have their place, and the allocator its arenas
    # the least of three passes: a block that is on its way back to Linux at that moment only adds to one
    told = {
        name: min((passes(grad=grad) for _ in range(3)), key=lambda pass_: max(pass_[1][-2:]))
        for name, grad in (("bare", False), ("differentiated", True))
    }
    gradient = policy.base.lm_head.weight.grad
    return {
        "block": sum(p.numel() for p in layers[0].parameters()),
        "layers": len(layers),
        "growth": {name: max(found[-2:]) for name, (_, found) in told.items()},
        "apart": {
            name: float((logp_N - expected).abs().max()) for name, (logp_N, _) in told.items()
        },
        "types": sorted({str(t.dtype) for t in (gradient, *(p for _, p in policy.trainable()))}),
    }
