"""A process that trains on a device which is not the CPU (fake_device.py): `python -m tests.policy.device_worker ARCH ...`.

For precisions and choices of frozen parts (CASES) it takes what a run hands to its model and to its rollout engines, compares it
with what a run on the CPU hands over, samples, scores, differentiates; with an ARCH like `qwen2_5_vl+vllm` a real vLLM (on the CPU)
answers the runs with frozen towers. Prints one line per combination: "ok ARCH-CASE", or "failed ARCH-CASE: why".
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from mmrl.config import DataConfig, ModelConfig, VLLMConfig
from mmrl.distributed.world import World
from mmrl.policy.loading import build_visuals, load_policy
from mmrl.policy.pack import PackItem, pack
from mmrl.policy.policy import Policy
from mmrl.rollout import PrefillOnceEngine, Request
from mmrl.rollout.probe import choose_prompts, trainer_scores
from mmrl.rollout.vllm_backend import VLLMBackend, VLLMSettings
from mmrl.rollout.vllm_engine import VLLMEngine
from mmrl.rollout.vllm_inputs import WirePrompt, wire_prompt
from mmrl.rollout.vllm_wire import dump, dump_prompts, load, load_prompts
from mmrl.rollout.weights import SyncPlan
from tests.kits.clip_kit import ALL, TASK, loaded
from tests.kits.engine_kit import ARCHITECTURES, tiny_folder
from tests.kits.pairwise_kit import pairwise
from tests.policy.fake_device import toy_device
from tests.rollout.vllm_kit import VLLM, samples_of, settings_of, training_of

FROZEN: dict[str, Any] = {"freeze": ["vision", "projector"]}
PARTS: dict[str, dict[str, Any]] = {
    "full": {},
    "frozen": FROZEN,
    "vision": {"freeze": ["vision"]},
    "lora": {"lora": {"r": 4, "alpha": 8, "target_modules": ["q_proj", "down_proj"]}},
}
# every two of family, precision and parts meet; the family that vLLM answers for is asked in both precisions
CASES = pairwise(
    ARCHITECTURES,
    ("fp32", "bf16"),
    tuple(PARTS),
    keep=[("qwen2_5_vl", "fp32", "frozen"), ("qwen2_5_vl", "bf16", "frozen")],
)
LIMIT = {"fp32": 1e-5, "bf16": 0.05}  # 80 and 6 times the rounding of the type
_CPU = torch.device("cpu")


def policy_on(device: torch.device, arch: str, dtype: str, parts: dict[str, Any]) -> Policy:
    return load_policy(
        ModelConfig(path=tiny_folder(arch), dtype=dtype, **parts),
        DataConfig(video=ALL),
        device=device,
    )


def tensors_of(wires: Sequence[WirePrompt]) -> list[torch.Tensor]:
    return [m.tensor for w in wires for m in w.media if m.tensor is not None]


def handed_over(policy: Policy, folder: Path) -> tuple[list[Any], list[WirePrompt]]:
    """The prompts of every kind, and what a rollout engine is sent of them: on the CPU, the same whoever asks."""
    prompts = [policy.encoder(s, TASK) for s in samples_of(folder)]
    wires = [wire_prompt(policy, p) for p in prompts]
    tower = policy.tower()
    if tower is not None:  # the same in the middle of a forward pass, of the other precision too
        for dtype in (torch.bfloat16, torch.float16):
            fresh = build_visuals(policy.processor, DataConfig(video=ALL))
            with torch.autocast(policy.device.type, dtype):
                (found,) = fresh.features([prompts[0].visuals[0]], tower)
            assert torch.equal(
                torch.cat([found.main, *found.deep], -1).cpu(), tensors_of(wires)[0]
            ), "depends on the caller"
    assert all(t.device == _CPU for t in tensors_of(wires)) and all(
        w.positions_3P.device == _CPU for w in wires
    )
    return prompts, wires


def said_by(wire: WirePrompt) -> tuple[Any, ...]:
    """A prompt without its names: a server makes its own hashes and fingerprints of what came."""
    return (
        wire.ids,
        wire.kinds,
        [(m.kind, m.form, m.grid_thw, m.offset, m.length) for m in wire.media],
    )


def server(wires: Sequence[WirePrompt], policy: Policy, training: Any) -> None:
    """What a rollout server is posted comes back whole: prompts with their media, and weights."""
    tensors: dict[str, torch.Tensor] = {}
    document, came = load(dump({"prompts": dump_prompts(wires, tensors)}, tensors))
    back, missing = load_prompts(document["prompts"], came, lambda name: None)
    assert not missing and [said_by(w) for w in back] == [said_by(w) for w in wires]
    assert all(
        torch.equal(a.positions_3P, b.positions_3P) for a, b in zip(back, wires, strict=True)
    )
    assert all(torch.equal(a, b) for a, b in zip(tensors_of(back), tensors_of(wires), strict=True))
    plan = SyncPlan(policy)
    sent = dict(plan.weights(training, everything=True))
    assert set(load(dump({}, sent))[1]) == set(sent) == plan.expected and plan.held


def own_engine(policy: Policy, prompts: Sequence[Any]) -> None:
    """Samples, scores and differentiates; the log-probs of both are the same."""
    asked = [Request(p, 2, (1, n)) for n, p in enumerate(prompts)]
    groups = PrefillOnceEngine(policy).generate(asked, settings_of(4))
    logprobs = policy.logp(
        pack(
            [
                PackItem(p, tuple(c.token_ids for c in g))
                for p, g in zip(prompts, groups, strict=True)
            ]
        )
    ).logp_N
    sampled = torch.tensor([x for g in groups for c in g for x in c.logprobs])
    limit = 1e-4 if policy.autocast_dtype is None else 0.3
    assert (logprobs.detach().cpu() - sampled).abs().max() < limit, (
        (logprobs.detach().cpu() - sampled).abs().max()
    )
    assert logprobs.device == policy.device
    logprobs.mean().backward()
    missing = [n for n, p in policy.trainable() if p.grad is None]
    assert all(p.grad is None or p.grad.device == policy.device for _, p in policy.trainable())
    assert not missing, missing[:3]


def vllm(
    backends: dict[str, VLLMBackend],
    arch: str,
    dtype: str,
    policy: Policy,
    training: Any,
    folder: Path,
) -> None:
    """A vLLM in this process takes over the weights, agrees in the probe, and samples."""
    if dtype not in backends:
        for old in backends.values():
            old.close()
        backends.clear()
        wide = {"fp32": "float32", "bf16": "bfloat16"}[dtype]
        backends[dtype] = VLLMBackend(
            VLLMSettings(tiny_folder(arch), wide, 1024, kv_cache_gib=0.125)
        )
    engine = VLLMEngine(
        VLLMConfig(**VLLM, probe_prompts=3),
        policy,
        policy,
        World(policy.device),
        backends[dtype],
        [loaded(*samples_of(folder))],
    )
    engine.publish(training)
    asked = [Request(policy.encoder(s, TASK), 2, (1, n)) for n, s in enumerate(samples_of(folder))]
    assert all(len(c.token_ids) for g in engine.generate(asked, settings_of(4)) for c in g)


def check(
    arch: str,
    dtype: str,
    parts: dict[str, Any],
    folder: Path,
    backends: dict[str, VLLMBackend] | None,
) -> None:
    _, expected = handed_over(policy_on(_CPU, arch, dtype, parts), folder)
    with toy_device() as device:
        policy = policy_on(device, arch, dtype, parts)
        prompts, wires = handed_over(policy, folder)
        for ours, theirs in zip(tensors_of(wires), tensors_of(expected), strict=True):
            # pixels to the last bit; features are computed by other kernels (attention in parts), within their rounding
            gap = (ours.float() - theirs.float()).abs().max() / theirs.float().abs().max()
            limit = 0 if policy.tower() is None else LIMIT[dtype]
            assert ours.dtype == theirs.dtype and gap <= limit, f"features differ by {gap}"
        training = training_of(policy, World(device), folder)
        server(wires, policy, training)
        probes = choose_prompts(policy, [loaded(*samples_of(folder))], 3)
        assert len(trainer_scores(policy, training, [(p, (5, 6, 7)) for p in probes])) == 3
        own_engine(policy, prompts)
        if backends is not None and parts == FROZEN:
            vllm(backends, arch, dtype, policy, training, folder)


def run(arch: str, backends: dict[str, VLLMBackend] | None, trace: bool) -> None:
    """Every case of an architecture."""
    with tempfile.TemporaryDirectory() as folder:
        tiny_folder(arch)
        samples_of(Path(folder))
        for dtype, name in [(dtype, name) for family, dtype, name in CASES if family == arch]:
            try:
                check(arch, dtype, PARTS[name], Path(folder), backends)
                print(f"ok {arch}-{dtype}-{name}", flush=True)
            except Exception as error:
                print(
                    f"failed {arch}-{dtype}-{name}: {type(error).__name__}: {str(error)[:400]!r}",
                    flush=True,
                )
                if trace:
                    raise


def main(*asked: str) -> None:
    for name in asked:
        arch, _, vllm = name.partition("+")
        if arch != "trace":
            run(arch, {} if vllm else None, "trace" in asked)


if __name__ == "__main__":
    main(*sys.argv[1:])
