"""What a training engine holds of weights, gradients and moments, throughout and for a while. Part of mmrl.diagnostics.memory."""

from __future__ import annotations

from dataclasses import dataclass

from mmrl.config import RunConfig
from mmrl.diagnostics.memory_run import PlannedRun, samples_apart

__all__ = ["Held", "held_by"]

# gradients that DeepSpeed reduces at a time (mmrl/distributed/engines/deepspeed.py)
_BUCKET = 4 * (1 << 27)


@dataclass(frozen=True)
class Held:
    """Bytes under a training engine: `parts` throughout; gradients and what ZeRO-3 gathers of weights in an update; the optimizer
    step's own; on the host, of them the main process's copy."""

    parts: dict[str, float]
    gradients: float
    gathered: float
    step: float
    host: float
    saved: float


def held_by(run: PlannedRun) -> Held:
    """What each process of a run holds."""
    p, config = run.parameters, run.config
    # two moments, and DeepSpeed's master copy of its share; of 8 bits with a scale per 256 of them
    copies = 3 if run.by_deepspeed else 2.0 * _moment_bytes(config) / 4
    share, saved, gathered = run.processes if run.shares_out else 1, 0.0, 0.0
    parts = {
        "weights": float(p.weights),
        "optimizer": copies * p.gradients / share,
        "reference": float(p.reference),
    }
    if run.sharded:
        gathered = _share_out(run, parts)
        saved = _copy_to_save(run, parts)
    gradients = p.gradients / share + (min(_BUCKET, p.gradients) if run.by_deepspeed else 0.0)
    step, host = _step_bytes(run, share, gradients), 0.0
    offload = config.engine.deepspeed.offload if run.by_deepspeed else "none"
    if offload != "none":
        host = parts.pop("optimizer") + p.gradients / share
        gradients, step = float(min(_BUCKET, p.gradients)), 0.0
    if offload == "all":
        host += parts["weights"] - p.tower
        parts["weights"] = float(p.tower)
    if run.engine == "deepspeed_zero3":  # they stay from step to step
        parts["gradient buffers"], gradients = gradients, 0.0
    return Held(parts, gradients, gathered, step, host + saved, saved)


def _share_out(run: PlannedRun, parts: dict[str, float]) -> float:
    """Leave a share of the weights in `parts`; how much of them is gathered at a time in an update."""
    p = run.parameters
    split = p.weights - p.tower
    parts["weights"] = p.tower + split / run.processes
    if run.engine == "fsdp2":
        parts["reference"] = p.reference_tower + (p.reference - p.reference_tower) / run.processes
        return 0.0
    return min(4 * run.config.engine.deepspeed.max_live, split)


def _copy_to_save(run: PlannedRun, parts: dict[str, float]) -> float:
    """Add the whole copy that samples to `parts`, and the one that is saved where that is another one (build_saved of
    engines/build.py); what of it lies in host memory."""
    from mmrl.distributed.engines.build import stored_to_sample

    p, config = run.parameters, run.config
    split = float(p.weights - p.tower)
    # vLLM or a generator process samples: the copy, to be saved, lies in host memory
    elsewhere = config.engine.rollout == "vllm" or samples_apart(config)
    if not elsewhere:
        parts["rollout copy"] = float(p.copies[stored_to_sample(config)])
        # rounded it cannot be saved
        if parts["rollout copy"] >= split or config.train.checkpoint != "whole":
            return 0.0
    if run.kind == "cpu":
        parts["saved copy"] = split
        return 0.0
    return split


def _step_bytes(run: PlannedRun, share: int, gradients: float) -> float:
    """What AdamW's step needs beside weights, gradients and moments."""
    p, on_gpu = run.parameters, run.kind == "cuda"
    if run.engine == "deepspeed_zero3":
        # a sub-group's weights, moments and a copy of its gradients are one flat tensor each; 1e9 numbers are DeepSpeed's default
        return min(4e9, p.gradients / share) * (1 if run.fused_optimizer else 3)
    if run.config.optim.states == "int8":
        # compiled on a GPU; on a CPU its weight, moments and what is computed of them in fp32, a tensor at a time
        return 0.0 if on_gpu else 6 * p.largest / share
    if run.fused_optimizer:
        return 0.0
    # torch's other kernels: on a GPU the square roots of all second moments, on a CPU two copies of the largest tensor
    return gradients if on_gpu else 2 * p.largest / share


def _moment_bytes(config: RunConfig) -> float:
    """Of one number of one of AdamW's moments, while it is kept."""
    return 4.0 if config.optim.states == "fp32" else 1.0 + 4.0 / 256
