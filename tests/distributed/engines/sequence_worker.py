"""What processes find when they compute packed rows together; a job of tests/kits/process_worker.py."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from mmrl.config import ModelConfig
from mmrl.distributed.world import World
from mmrl.policy.loading import load_policy
from mmrl.policy.pack import PackItem, idle_item, pack
from mmrl.policy.sequence_parallel import SequenceGroup
from tests.kits.engine_kit import Album, picture, sample_with
from tests.policy.test_shared_prefix import relative_error

__all__ = ["split", "split_routing"]

TEXTS = ((5, 6, 7), (8, 9, 10, 11, 12), (200,), (3, 4))


def split(folder: str, options: dict[str, Any], dtype: str | None = None) -> dict[str, Any]:
    """Rows of pictures in both halves, of text alone and of two tokens: how far log-probs, entropies and gradients of two processes
    are from those of one, and which weights only one of them moves."""
    world = World(torch.device("cpu"))
    group = SequenceGroup.of(world.size, world.rank, world.size)
    policy = load_policy(ModelConfig(path=folder, device="cpu", dtype=dtype or "auto", **options))
    samples = [
        sample_with([picture((112, 84)), picture((56, 56), 1)]),
        sample_with([], number=1),
        sample_with([picture((84, 112), 2)], number=2),
    ]
    items = [PackItem(policy.encoder(s, Album()), TEXTS) for s in samples]
    found: dict[str, Any] = {"logp": 0.0, "entropy": 0.0, "gradient": 0.0, "encoded": []}
    for row in (items, items[1:2], items[2:], [idle_item(policy.eos_ids[0])]):
        visuals = [v for i in row for v in i.prompt.visuals]
        results = []
        for batch in (pack(row), pack(row).in_slices(group)):
            group.owners.update({v.identity: n % group.size for n, v in enumerate(visuals)})
            policy.model.zero_grad(set_to_none=True)
            before = policy.encoder.visuals.stats.encoded
            out = policy.logp(batch, 0.8, entropy_gradient=True)
            weight_N = torch.sin(torch.arange(len(out.logp_N)) * 1.3)
            (out.logp_N * weight_N + 0.3 * out.entropy_N * weight_N.flip(0)).sum().backward()
            gradients = {
                name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
                for name, p in policy.trainable()
            }
            results.append((out.logp_N.detach(), out.entropy_N.detach(), gradients))
        found["encoded"].append(policy.encoder.visuals.stats.encoded - before)
        (logp, entropy, whole), (other_logp, other_entropy, shares) = results
        for gradient in shares.values():
            torch.distributed.all_reduce(gradient)
        found["logp"] = max(found["logp"], float((logp - other_logp).abs().max()))
        found["entropy"] = max(found["entropy"], float((entropy - other_entropy).abs().max()))
        found["gradient"] = max(found["gradient"], relative_error(shares, whole))
    return found


def split_routing(folder: str) -> dict[str, Any]:
    """A mixture of experts, as turns: whether two processes note the experts that one notes, how far their replay with other
    weights is from its, and what both tell of the routers."""
    world = World(torch.device("cpu"))
    group = SequenceGroup.of(world.size, world.rank, world.size)
    policy = load_policy(ModelConfig(path=folder, device="cpu"))
    prompts = [policy.encoder(sample_with([picture((112, 84))]), Album())] * 3
    prompts += [policy.encoder(sample_with([], number=1), Album())] * 2
    # five turns, and a row that two processes cannot share evenly
    tokens = [*TEXTS[:3], TEXTS[2], TEXTS[2]]
    group.owners.update({v.identity: 1 for v in prompts[0].visuals})
    with torch.no_grad():
        noted = [
            policy.evaluate(prompts, tokens, sequence=s, note_experts=True) for s in (None, group)
        ]
        for name, weight in policy.model.named_parameters():
            if name.endswith("mlp.gate.weight"):
                weight.add_(weight.roll(1, 0), alpha=0.5)
        again = [
            policy.evaluate(prompts, tokens, sequence=s, experts=noted[0].experts)
            for s in (None, group)
        ]
    same = [
        (a.prompt_PLk == b.prompt_PLk).all() and (a.written_NLk == b.written_NLk).all()
        for a, b in zip(noted[0].experts, noted[1].experts, strict=True)
    ]
    return {
        "same": [bool(s) for s in same],
        "uneven": noted[0].num_tokens % 2 == 1,
        "logp": float((again[0].logp_N - again[1].logp_N).abs().max()),
        "rerouted": [dataclasses.asdict(a.rerouted) for a in again],
    }
