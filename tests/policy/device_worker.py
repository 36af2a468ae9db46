"""A process that trains on a device which is not the CPU (fake_device.py): `python -m tests.policy.device_worker ARCH ...`.

For precisions and choices of frozen parts (CASES; all of them with `grid`) it takes what a run hands to its model and to its
rollout engines, compares it with what a run on the CPU hands over, samples, scores, differentiates; with an ARCH like
`qwen2_5_vl+vllm` a real vLLM (on the CPU) answers, too: the runs with frozen towers, with `grid` all. One line per hand-over:
"ok ARCH-PRECISION-PARTS HANDOVER", or "failed ARCH-PRECISION-PARTS HANDOVER: why". scripts/device_matrix.py makes a table of them.
With `cuda` the device is a GPU.
"""

from __future__ import annotations

import functools
import gc
import importlib
import itertools
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
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
        needs_reference=True,
        device=device,
    )


def tensors_of(wires: Sequence[WirePrompt]) -> list[torch.Tensor]:
    return [m.tensor for w in wires for m in w.media if m.tensor is not None]


def handed_over(policy: Policy, folder: Path) -> tuple[list[Any], list[WirePrompt]]:
    """The prompts of every kind, and what a rollout engine is sent of them: on the CPU."""
    prompts = [policy.encoder(s, TASK) for s in samples_of(folder)]
    wires = [wire_prompt(policy, p) for p in prompts]
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


@dataclass
class Case:
    """A policy on the device, with what hand-overs share."""

    arch: str
    dtype: str
    parts: dict[str, Any]
    folder: Path
    policy: Policy
    backends: dict[str, VLLMBackend]

    @functools.cached_property
    def prompts(self) -> list[Any]:
        return [self.policy.encoder(s, TASK) for s in samples_of(self.folder)]

    @functools.cached_property
    def training(self) -> Any:
        return training_of(self.policy, World(self.policy.device), self.folder)

    def packed(self) -> Any:
        return pack([PackItem(p, ((5, 6, 7), (8, 9))) for p in self.prompts])


def media(case: Case) -> None:
    """Features or pixels with their positions, as a rollout engine and a rollout server get them."""
    _, expected = handed_over(policy_on(_CPU, case.arch, case.dtype, case.parts), case.folder)
    policy = case.policy
    _, wires = handed_over(policy, case.folder)
    for ours, theirs in zip(tensors_of(wires), tensors_of(expected), strict=True):
        # pixels to the last bit; features are computed by other kernels (attention in parts), within their rounding
        gap = (ours.float() - theirs.float()).abs().max() / theirs.float().abs().max()
        limit = 0 if policy.tower() is None else LIMIT[case.dtype]
        assert ours.dtype == theirs.dtype and gap <= limit, f"features differ by {gap}"
    tensors: dict[str, torch.Tensor] = {}
    document, came = load(dump({"prompts": dump_prompts(wires, tensors)}, tensors))
    back, missing = load_prompts(document["prompts"], came, lambda name: None)
    assert not missing and [said_by(w) for w in back] == [said_by(w) for w in wires]
    assert all(
        torch.equal(a.positions_3P, b.positions_3P) for a, b in zip(back, wires, strict=True)
    )
    assert all(torch.equal(a, b) for a, b in zip(tensors_of(back), tensors_of(wires), strict=True))


def caller(case: Case) -> None:
    """A frozen tower's features are the same whoever asks: in the middle of a forward pass, of another precision, too."""
    policy, tower = case.policy, case.policy.tower()
    prompts, wires = handed_over(policy, case.folder)
    for dtype in (torch.bfloat16, torch.float16) if tower is not None else ():
        fresh = build_visuals(policy.processor, DataConfig(video=ALL))
        with torch.autocast(policy.device.type, dtype):
            (found,) = fresh.features([prompts[0].visuals[0]], tower)
        same = torch.cat([found.main, *found.deep], -1).cpu()
        assert torch.equal(same, tensors_of(wires)[0]), "depends on the caller"


def weights(case: Case) -> None:
    """What a rollout server is posted of weights comes back whole."""
    plan = SyncPlan(case.policy)
    sent = dict(plan.weights(case.training, everything=True))
    assert set(load(dump({}, sent))[1]) == set(sent) == plan.expected and plan.held


def probe(case: Case) -> None:
    """The trainer's side of the probe."""
    probes = choose_prompts(case.policy, [loaded(*samples_of(case.folder))], 3)
    found = trainer_scores(case.policy, case.training, [(p, (5, 6, 7)) for p in probes])
    assert len(found) == 3


def own_engine(case: Case) -> None:
    """Samples, scores and differentiates; the log-probs of both are the same."""
    policy, prompts = case.policy, case.prompts
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
    gap = (logprobs.detach().cpu() - sampled).abs().max()
    assert gap < limit, gap
    assert logprobs.device == policy.device
    logprobs.mean().backward()
    differentiated(policy, policy.trainable())


def differentiated(policy: Policy, named: Sequence[tuple[str, torch.nn.Parameter]]) -> None:
    missing = [n for n, p in named if p.grad is None]
    assert not missing, missing[:3]
    assert all(p.grad.device == policy.device for _, p in named if p.grad is not None)
    for _, parameter in named:
        parameter.grad = None


def reference(case: Case) -> None:
    """The reference of the KL term scores: before any step it is the policy itself."""
    packed = case.packed()
    with torch.no_grad():
        ours = case.policy.logp(packed).logp_N
        with case.policy.reference() as other:
            theirs = other.logp(packed).logp_N
    assert theirs.device == case.policy.device
    # a bf16 reference stores all that is frozen in bf16, the policy what is frozen there
    limit = 1e-4 if case.policy.autocast_dtype is None else 0.3
    assert (ours - theirs).abs().max() < limit, (ours - theirs).abs().max()


def values(case: Case) -> None:
    """A critic's values of the same prompts, with their gradients."""
    loading = importlib.import_module("mmrl.policy.loading")
    loading.add_value_head(case.policy, hidden=8, tokens=True, seed=0)
    found = case.policy.logp(case.packed(), detach_values=True).values_M
    assert found.device == case.policy.device and len(found) == 5 * len(case.prompts)
    found.mean().backward()
    differentiated(case.policy, list(case.policy.heads["value_head"].named_parameters()))
    predicted = case.policy.predict_values(case.prompts[:1], [(5, 6)])
    assert predicted.values_M.device == case.policy.device


def vllm(case: Case) -> None:
    """A vLLM in this process takes over the weights, agrees in the probe, and samples."""
    arch, dtype, policy, backends = case.arch, case.dtype, case.policy, case.backends
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
        [loaded(*samples_of(case.folder))],
    )
    engine.publish(case.training)
    asked = [Request(p, 2, (1, n)) for n, p in enumerate(case.prompts)]
    assert all(len(c.token_ids) for g in engine.generate(asked, settings_of(4)) for c in g)


HANDOVERS: dict[str, Callable[[Case], None]] = {
    "media": media,
    "caller": caller,
    "weights": weights,
    "probe": probe,
    "own": own_engine,
    "reference": reference,
    "values": values,
    "vllm": vllm,
}


def run(
    arch: str,
    backends: dict[str, VLLMBackend] | None,
    *,
    trace: bool,
    grid: bool,
    device_of: Callable[[], AbstractContextManager[torch.device]] = toy_device,
) -> None:
    """Every case of an architecture."""
    every = [(arch, *rest) for rest in itertools.product(("fp32", "bf16"), PARTS)]
    with tempfile.TemporaryDirectory() as folder:
        tiny_folder(arch)
        samples_of(Path(folder))
        for _, dtype, name in every if grid else [c for c in CASES if c[0] == arch]:
            for what, hand_over in HANDOVERS.items():
                if what == "vllm" and (backends is None or not (grid or name == "frozen")):
                    continue
                label = f"{arch}-{dtype}-{name} {what}"
                gc.freeze()  # what is imported by now is looked through no more
                try:
                    with device_of() as device:
                        # each with a model and a cache of its own: features of an earlier one would hide who asks for them
                        policy = policy_on(device, arch, dtype, PARTS[name])
                        known = {} if backends is None else backends
                        hand_over(Case(arch, dtype, PARTS[name], Path(folder), policy, known))
                    print(f"ok {label}", flush=True)
                except Exception as error:
                    said = f"{type(error).__name__}: {str(error)[:400]!r}"
                    print(f"failed {label}: {said}", flush=True)
                    if trace:
                        raise


def _gpu() -> AbstractContextManager[torch.device]:
    return nullcontext(torch.device("cuda", 0))


def main(*asked: str) -> None:
    for name in asked:
        arch, _, vllm = name.partition("+")
        if arch not in ("trace", "grid", "cuda"):
            run(
                arch,
                {} if vllm else None,
                trace="trace" in asked,
                grid="grid" in asked,
                device_of=_gpu if "cuda" in asked else toy_device,
            )


if __name__ == "__main__":
    main(*sys.argv[1:])
