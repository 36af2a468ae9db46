"""What it takes that vLLM, asleep while training ran on its GPU, wakes up. Part of mmrl.diagnostics.memory.

The order is that of mmrl/rollout/vllm_backend.py: memory for vLLM's weights is taken first, while moments and weights of training
are where they are. Then the new weights pass, module by module: gathered where they are shared out, merged where they have an
adapter, as vLLM's numbers, and once more where vLLM lays a module out before it copies it to its place. Keys and values come
after that, when nothing of the sync is left: the trainer scores the probe's completions beside them (mmrl/rollout/probe.py), then
rollouts begin (the phase "rollout").
"""

from __future__ import annotations

from mmrl.config import RunConfig
from mmrl.diagnostics.memory_parameters import ParameterBytes

__all__ = ["carried_bytes", "sleeps", "wake_parts"]


def sleeps(config: RunConfig, kind: str) -> bool:
    """Whether vLLM samples on the training process's GPU and sleeps meanwhile: in serial runs alone, see PromptRollouts."""
    vllm = config.engine.vllm
    return (
        config.engine.rollout == "vllm"
        and kind == "cuda"
        and vllm.sleep
        and vllm.mode != "server"
        and not config.engine.ray.rollout_actors
        and config.engine.generator.kind != "process"
        and config.schedule.kind == "serial"
    )


def carried_bytes(p: ParameterBytes, wide: int, *, sharded: bool, compared: bool) -> float:
    """Most bytes beside both sides' weights while a module's new weights pass. `wide`: of a number in vLLM; `sharded`: training
    holds them in shards; `compared`: digests of both sides are taken (engine.vllm.compare_weights)."""

    from mmrl.rollout.digest import PIECE_ON_GPU

    def passing(numbers: int, stored: int, *, new: bool) -> float:
        # a gathered tensor and its copy, vLLM's numbers where those are not themselves, the module as vLLM lays it out
        each = (2.0 * stored if sharded else 0.0) + (wide if new or stored != wide else 0.0) + wide
        # whose digest is taken before it goes to its place
        return each * numbers + (2 * 8.0 * min(numbers, PIECE_ON_GPU) if compared else 0.0)

    plain = passing(p.module, p.module_stored, new=False)
    if not p.adapted_weight:
        return plain
    # product, its multiple and the sum in fp32, the base too where it is stored otherwise (SyncPlan), beside what has been merged
    # for the same module
    merging = 4.0 * (3 if wide == 4 else 4) + (2.0 * wide if sharded else 0.0)
    before = float(wide * (p.adapted_module - p.adapted_weight))
    return max(
        plain,
        passing(p.adapted_module, wide, new=True),
        merging * p.adapted_weight + before,
    )


def wake_parts(
    config: RunConfig, p: ParameterBytes, wide: int, share: float, *, sharded: bool
) -> dict[str, float]:
    """The parts of the phase "wake". `wide`: bytes of a number in vLLM, which computes in the type of the trainer's forward;
    `share`: what it may hold, and does not start with more than."""
    compared = config.engine.vllm.compare_weights
    return {
        "vLLM weights": min(float(wide * p.numbers), share),
        "weights on their way": carried_bytes(p, wide, sharded=sharded, compared=compared),
    }
