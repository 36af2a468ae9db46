"""What the phases of a run need of a device beside what is held throughout. Part of mmrl.diagnostics.memory."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from mmrl.config import RunConfig
from mmrl.diagnostics.memory_activations import (
    Micro,
    Precision,
    cache_bytes,
    expanded_bytes,
    logits_bytes,
    rollout_work_bytes,
    update_bytes,
    vision_update_bytes,
)
from mmrl.diagnostics.memory_parameters import ParameterBytes, storage
from mmrl.diagnostics.memory_sharded import Passing, fsdp2_update
from mmrl.diagnostics.memory_wake import sleeps, wake_parts
from mmrl.policy.families import family_of

__all__ = ["Held", "held_by", "micro_batch", "phases_of", "prompt_tokens_of", "samples_apart"]

_GIB = 2**30
_TEXT_TOKENS = 128  # of a prompt beside its picture: system text, question, markup
_PICTURE_TOKENS = 1280  # where data.max_pixels is not set
# gradients that DeepSpeed reduces at a time (mmrl/distributed/engines/deepspeed.py)
_BUCKET = 4 * (1 << 27)
_CHUNK = 1 << 26  # logits at a time (Policy)
_SHARED_OUT = ("fsdp2", "deepspeed_zero2", "deepspeed_zero3")  # the optimizer's state, or more
_SHARDED = ("fsdp2", "deepspeed_zero3")  # the weights, too


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


def held_by(p: ParameterBytes, config: RunConfig, engine: str, n: int, kind: str) -> Held:
    """What n processes under a training engine hold each."""
    from mmrl.distributed.engines.build import stored_to_sample

    offload = config.engine.deepspeed.offload if engine.startswith("deepspeed") else "none"
    # two moments, and DeepSpeed's master copy of its share; of 8 bits with a scale per 256 of them
    copies = 3 if engine.startswith("deepspeed") else 2.0 * _moment_bytes(config) / 4
    share, saved, gathered = n if engine in _SHARED_OUT else 1, 0.0, 0.0
    parts = {
        "weights": float(p.weights),
        "optimizer": copies * p.gradients / share,
        "reference": float(p.reference),
    }
    gradients = p.gradients / share
    if engine in _SHARDED:
        split = p.weights - p.tower
        parts["weights"] = p.tower + split / n
        if engine == "fsdp2":
            parts["reference"] = p.reference_tower + (p.reference - p.reference_tower) / n
        else:
            gathered = min(4 * config.engine.deepspeed.max_live, split)
        # vLLM or a generator process samples: the copy, to be saved, lies in host memory (engines/build.py)
        elsewhere = config.engine.rollout == "vllm" or samples_apart(config)
        if not elsewhere:
            parts["rollout copy"] = float(p.copies[stored_to_sample(config)])
        # rounded it cannot be saved (build_saved of engines/build.py)
        if elsewhere or (parts["rollout copy"] < split and config.train.checkpoint == "whole"):
            if kind == "cpu":
                parts["saved copy"] = float(split)
            else:
                saved = float(split)
    if engine.startswith("deepspeed"):
        gradients += min(_BUCKET, p.gradients)
    fused = config.optim.fused if config.optim.fused is not None else kind == "cuda"
    # torch's other kernels: on a GPU the square roots of all second moments, on a CPU two copies of the largest tensor
    step = 0.0 if fused else gradients if kind == "cuda" else 2 * p.largest / share
    if config.optim.states == "int8":
        # compiled on a GPU; on a CPU its weight, moments and what is computed of them in fp32, a tensor at a time
        step = 0.0 if kind == "cuda" else 6 * p.largest / share
    if engine == "deepspeed_zero3":
        # a sub-group's weights, moments and a copy of its gradients are one flat tensor each; 1e9 numbers are DeepSpeed's default
        step = min(4e9, p.gradients / share) * (1 if fused else 3)
    host = 0.0
    if offload != "none":
        host = parts.pop("optimizer") + p.gradients / share
        gradients, step = float(min(_BUCKET, p.gradients)), 0.0
    if offload == "all":
        host += parts["weights"] - p.tower
        parts["weights"] = float(p.tower)
    if engine == "deepspeed_zero3":  # they stay from step to step
        parts["gradient buffers"], gradients = gradients, 0.0
    return Held(parts, gradients, gathered, step, host + saved, saved)


def _moment_bytes(config: RunConfig) -> float:
    """Of one number of one of AdamW's moments, while it is kept."""
    return 4.0 if config.optim.states == "fp32" else 1.0 + 4.0 / 256


def _samples_from_a_copy(config: RunConfig, held: Held) -> bool:
    """Whether what samples is stored in the type of the forward; adapters are not (mmrl.policy.storage)."""
    copied = "rollout copy" in held.parts or config.engine.generator.kind == "process"
    return copied and config.model.lora is None


def samples_apart(config: RunConfig) -> bool:
    """Whether training processes neither sample nor value what was sampled, see Trainer."""
    return config.engine.generator.kind == "process" and config.algorithm.advantage != "gae"


def prompt_tokens_of(config: RunConfig, shape: Any) -> int:
    """Tokens of the longest prompt that `data` leads to: a picture or clip at its largest, and text."""
    patch, merge = family_of(shape).patches(shape)
    area = (patch * merge) ** 2
    picture = config.data.max_pixels / area if config.data.max_pixels else _PICTURE_TOKENS
    video = config.data.video
    clip = 0.0
    if video.total_pixels:
        clip = video.total_pixels / area
    elif video.max_pixels:
        clip = (
            video.max_pixels
            / area
            * (video.num_frames or video.max_frames)
            / getattr(shape.vision_config, "temporal_patch_size", 1)
        )
    return int(min(max(picture, clip) + _TEXT_TOKENS, config.model.max_prompt_tokens))


def micro_batch(config: RunConfig, prompt: int) -> Micro:
    """The largest micro-batch of the update: train.token_budget tokens; of a longer group as many rollouts as fit, at least one."""
    size, new = config.rollout.group_size, config.rollout.max_new_tokens
    if config.train.forward == "padded":  # each row with its own copy of the prompt
        return Micro(
            max(size, config.train.token_budget / (prompt + size * new) * size), prompt, new, 1
        )
    budget = config.train.token_budget
    if budget < prompt + size * new:
        return Micro(1.0, prompt, new, int(min(max((budget - prompt) // new, 1), size)))
    return Micro(budget / (prompt + size * new), prompt, new, size)


_FUSED = re.compile(r"qwen2(_vl|_5_vl)?(_text)?|qwen3(_vl)?(_text)?")
"""Language models whose norms and gated layers are those of mmrl.policy.fused_layers."""


def _fused(config: RunConfig, model_type: str, kind: str, half: bool) -> bool:
    """Whether model.fused_layers spares the update memory: where it is compiled, of models of which most is fused."""
    wanted = half if config.model.fused_layers is None else config.model.fused_layers
    return wanted and kind == "cuda" and _FUSED.fullmatch(model_type) is not None


def _update(
    config: RunConfig,
    shape: Any,
    p: ParameterBytes,
    held: Held,
    engine: str,
    kind: str,
    n: int,
    prompt: int,
) -> tuple[dict[str, float], Micro]:
    """What a micro-batch of the update needs beside what is held throughout, and the micro-batch."""
    text, (dtype, autocast) = shape.text_config, storage(config, kind)
    precision = Precision(2 if autocast is not None else 4, dtype.itemsize)
    micro, family = micro_batch(config, prompt), family_of(shape)
    checkpointing = (
        config.model.gradient_checkpointing
        if config.model.gradient_checkpointing is not None
        else kind == "cuda"
    )
    kept, passing = update_bytes(
        text,
        family.layers(text),
        precision,
        micro,
        # auto: flash attention needs no more than flex
        ("flex" if autocast is not None and kind == "cuda" else "sdpa")
        if config.model.attn == "auto"
        else config.model.attn,
        trained=p.trained_language,
        adapted=p.adapted,
        checkpointing=checkpointing,
        fused=_fused(config, text.model_type, kind, autocast is not None),
    )
    # the gradient of the weights with B A added has their size
    passing += max(p.experts, default=0)
    if p.trained_vision:
        tower, (patch, _) = family.tower_of(shape), family.patches(shape)
        rows = micro.groups * max(0, prompt - _TEXT_TOKENS) * tower.tokens
        # in RGB; clips have as many frames in a row
        pixels = 3 * patch**2 * getattr(shape.vision_config, "temporal_patch_size", 1)
        kept += vision_update_bytes(
            tower,
            precision,
            rows,
            pixels,
            pictures=micro.groups,
            checkpointing=checkpointing,
        )
    half, parallel = kind == "cuda" and autocast is not None, config.engine.sequence_parallel
    scored = micro.completion_tokens / parallel
    if engine == "fsdp2":
        rows = -(-config.train.prompts_per_step // n) * config.rollout.group_size
        passed = Passing(
            kept / parallel,
            passing / parallel,
            logits_bytes(text, scored, _CHUNK, head_bytes=4, head_trained=False),
            chunks=scored * text.vocab_size > _CHUNK,
            again=rows > micro.groups * micro.group_size,
        )
        return fsdp2_update(p, passed, n, precision.half, half=half), micro
    logits = logits_bytes(
        text,
        scored,
        _CHUNK,
        head_bytes=p.head[0],
        head_trained=p.head[1],
        tied=p.tied,
        half=half,
    )
    found = {
        "gradients": held.gradients,
        "gathered weights": held.gathered,
        # they do not pass at the same time
        "activations": kept / parallel + max(0.0, passing / parallel - logits),
        "logits": logits,
        # of one block where it is computed again, else autograd keeps them all
        "weights cast": (
            0.0
            if autocast is None
            else (min(p.block, p.products) if checkpointing else p.products) / 2
        ),
    }
    return found, micro


def phases_of(
    config: RunConfig,
    shape: Any,
    p: ParameterBytes,
    held: Held,
    engine: str,
    kind: str,
    n: int,
    prompt: int,
    available: float | None,
) -> tuple[dict[str, dict[str, float]], Micro]:
    """The parts of each phase, and the micro-batch of the update."""
    text, (dtype, autocast) = shape.text_config, storage(config, kind)
    precision = Precision(2 if autocast is not None else 4, dtype.itemsize)
    update, micro = _update(config, shape, p, held, engine, kind, n, prompt)
    length, per_process = (
        prompt + config.rollout.max_new_tokens,
        -(-config.train.prompts_per_step // n),
    )
    slots = max(
        length, min(config.rollout.batch_tokens, per_process * config.rollout.group_size * length)
    )
    rollout = {
        "KV cache": cache_bytes(text, precision, slots) + expanded_bytes(text, precision, slots),
        "prefill and sampling": rollout_work_bytes(
            text,
            precision,
            rows=slots / length,
            prompt=prompt,
            group_size=config.rollout.group_size,
        ),
        # autocast keeps them from token to token; a copy is stored so
        "weights cast": 0.0
        if autocast is None or _samples_from_a_copy(config, held)
        else p.products / 2,
        # of one layer at a time
        "adapted experts": 0.0
        if config.rollout.merge_adapter
        else float(max(p.experts, default=0)),
    }
    if config.engine.rollout == "vllm":
        rollout = {"vLLM": _vllm(config, p, kind, available)}
    phases: dict[str, dict[str, float]] = {
        "start-up": {},
        "rollout": rollout,
        "update": update,
        "optimizer step": {"gradients": held.gradients, "optimizer step": held.step},
        # on a CPU as they were, and once more while they are merged and written (measured); of a GPU's they lie in host memory
        "checkpoint": {"merged weights": 2.0 * p.merged if kind == "cpu" else 0.0},
    }
    if sleeps(config, kind):
        sharded = engine in _SHARDED
        share = rollout["vLLM"]
        phases["wake"] = wake_parts(config, p, precision.half, share, sharded=sharded)
        # one completion at a time
        scored = {
            "prefill": rollout_work_bytes(text, precision, rows=1.0, prompt=prompt, group_size=1)
        }
        if sharded:
            blocks = precision.half * (p.root_numbers + 2.0 * p.block_numbers)
            scored["gathered weights"] = blocks if engine == "fsdp2" else held.gathered
        elif autocast is not None:
            scored["weights cast"] = p.products / 2
        phases["probe"] = {**rollout, **scored}
    if engine in _SHARDED:
        phases["start-up"] = _sharing_out(shape, p, engine, kind, n)
        gathered = {"gathered tensor": 2.0 * max(p.largest, p.root)}
        if engine == "deepspeed_zero3":
            gathered = {"gathered tensors": p.largest + max(4.0 * (1 << 26), p.largest)}
        if "rollout copy" in held.parts and not samples_apart(config):
            phases["gather"] = gathered
        # the main process's; on a GPU it collects them in host memory
        moments = {"whole optimizer": 2.0 * p.gradients if kind == "cpu" else 0.0}
        if engine == "deepspeed_zero3" and kind == "cpu":  # beside one's shards on their way
            moments["shards of moments"] = p.gradients / n
        # one after the other
        larger = max(gathered, moments, key=lambda parts: sum(parts.values()))
        phases["checkpoint"] |= larger
    if kind == "cpu" and engine not in _SHARDED and _file_bytes(shape) != dtype.itemsize:
        # a file read as another type is mapped meanwhile; one of the same type stays so, with what was cast since
        phases["start-up"]["weights' file"] = float(_file_bytes(shape) * p.numbers)
    return {
        title: {name: size for name, size in phase.items() if size}
        for title, phase in phases.items()
    }, micro


def _file_bytes(shape: Any) -> int:
    """Of one number in the model's files."""
    import torch

    return int((getattr(shape, "dtype", None) or torch.float32).itemsize)


def _sharing_out(shape: Any, p: ParameterBytes, engine: str, kind: str, n: int) -> dict[str, float]:
    """What a process holds beside its share of the weights until they have been shared out (held_back of engines/build.py)."""
    if engine == "fsdp2":
        if kind == "cuda":
            return {"being shared out": max(p.largest, p.root) / n}
        # the pages that it read: of a tower in which nothing is trained all, of the rest its own rows
        whole = p.vision if p.tower else 0
        read = whole + (p.numbers - whole) / n
        if p.reference:
            read += p.vision + (p.numbers - p.vision) / n
        return {"weights' file": _file_bytes(shape) * read}
    if kind == "cuda":  # tensor by tensor
        return {"being shared out": 2.0 * max(p.block, p.root)}
    # of the main process, given back with the last shard. Then DeepSpeed, which has its master copy and room for gradients, gathers
    # every trained tensor once to find its hooks' place (measured)
    loading = {"weights' file": float(_file_bytes(shape) * p.numbers)}
    made = {
        "master copy and gradients": 2.0 * p.gradients / n,
        "gathered tensor": 2.0 * p.largest,
    }
    return max(loading, made, key=lambda parts: sum(parts.values()))


def _vllm(config: RunConfig, p: ParameterBytes, kind: str, available: float | None) -> float:
    """Of vLLM in the training process: its share of a GPU; on a CPU its weights and KV cache."""
    v = config.engine.vllm
    if v.mode == "server" or config.engine.ray.rollout_actors:
        return 0.0
    return (
        v.memory * available
        if kind == "cuda" and available is not None
        else p.weights + v.kv_cache_gib * _GIB
    )
