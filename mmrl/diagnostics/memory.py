"""What a run needs of each device's memory, before it starts: arithmetic on shapes, no weights.

    estimate(config, processes=8, kind="cuda").line(80 * 2**30)
    -> 'needs about 61.0 GiB of 80.0 per process (weights 13.2, gradients ..; the largest part: optimizer)'

Weights, gradients, optimizer and reference are exact: the model is made on torch's meta device, and frozen, adapted and stored by
the functions that load it. Activations and KV cache follow mmrl/diagnostics/memory_activations.py for a micro-batch of equal
groups: prompts of one picture or clip at the largest size that `data` allows plus 128 tokens of text, completions of
rollout.max_new_tokens. Phases that exclude each other are not added: the larger of update, rollout and optimizer step counts (all
of them where they overlap).

AdamW holds two moments per trained number (Kingma and Ba 2015; Loshchilov and Hutter 2019). Sharing out over processes: Rajbhandari
et al. 2020, ZeRO: stage 2 gradients and moments, stage 3 and FSDP2 parameters too; DeepSpeed also keeps a master copy of its share.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from mmrl.config import (
    AlgorithmConfig,
    KLConfig,
    ModelConfig,
    RunConfig,
    rollout_engine,
    with_choice,
)
from mmrl.diagnostics.memory_activations import (
    Micro,
    Precision,
    cache_bytes,
    logits_bytes,
    rollout_work_bytes,
    update_bytes,
    vision_update_bytes,
)
from mmrl.errors import ConfigError

__all__ = [
    "MemoryEstimate",
    "ParameterBytes",
    "announce_memory",
    "device_memory",
    "estimate",
    "parameter_bytes",
]

_GIB = 2**30
_TEXT_TOKENS = 128  # of a prompt beside its picture: system text, question, markup
_PICTURE_TOKENS = 1280  # where data.max_pixels is not set
# a process without a model: interpreter or GPU context, kernels, buffers; assumed, not measured
_LIBRARIES = 1 * _GIB
# gradients that DeepSpeed reduces at a time (mmrl/distributed/engines/deepspeed.py)
_BUCKET = 4 * (1 << 27)


@dataclass(frozen=True)
class ParameterBytes:
    """Bytes of parameters by what becomes of them; `gradients` also is half of AdamW's state.

    weights: all; tower: a vision tower in which nothing is trained; block: the largest decoder layer or vision block; root: what is
    in neither; head: (bytes per number, trained) of the output layer.
    """

    weights: int
    gradients: int
    reference: int
    tower: int
    block: int
    root: int
    head: tuple[int, bool]
    trained_vision: bool
    trained_language: bool
    adapted: frozenset[str]


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes per device: `parts` are held throughout, `phases` for a while.

    host: in host memory: what is offloaded, per process, and `saved`, the main process's copy to save where vLLM samples.
    """

    parts: dict[str, float]
    phases: dict[str, dict[str, float]]
    overlap: bool
    processes: int
    engine: str
    prompt_tokens: int
    micro_tokens: float
    host: float = 0.0
    saved: float = 0.0

    @property
    def peak(self) -> dict[str, float]:
        """The parts of the phase that needs most, of all phases where they overlap."""
        if not self.overlap:
            return max(self.phases.values(), key=lambda phase: sum(phase.values()))
        return {name: size for phase in self.phases.values() for name, size in phase.items()}

    @property
    def total(self) -> float:
        """Bytes at the peak."""
        return sum(self.parts.values()) + sum(self.peak.values())

    def line(self, available: float | None = None) -> str:
        """One line for people, in GiB."""
        found = {n: b for n, b in {**self.parts, **self.peak}.items() if b >= 0.005 * self.total}
        largest = max(found, key=lambda n: found[n])
        digits = 1 if self.total >= _GIB else 3
        sizes = ", ".join(f"{name} {size / _GIB:.{digits}f}" for name, size in found.items())
        of = f" of {available / _GIB:.{digits}f}" if available is not None else ""
        each = (
            f" in each of {self.processes} processes ({self.engine})" if self.processes > 1 else ""
        )
        host = f", and {self.host / _GIB:.{digits}f} GiB of host memory" if self.host else ""
        if self.saved:
            host += f" in the main process ({self.saved / _GIB:.{digits}f} of it the copy that is saved)"
        return (
            f"needs about {self.total / _GIB:.{digits}f} GiB{of}{each}{host} ({sizes}; the largest part: {largest}); assumed: "
            f"micro-batches of {self.micro_tokens:,.0f} tokens, prompts of {self.prompt_tokens:,}"
        )

    def warning(self, available: float | None) -> str | None:
        """What to say when it does not fit."""
        if available is None or self.total <= available:
            return None
        largest = max({**self.parts, **self.peak}.items(), key=lambda item: item[1])[0]
        return (
            f"about {self.total / _GIB:.1f} GiB needed, {available / _GIB:.1f} there: the run will probably end out of memory. "
            f"{_ADVICE.get(largest, _ADVICE['activations'])} `mmrl memory` shows the estimate of other settings"
        )


_ADVICE = {
    **dict.fromkeys(
        ("weights", "gradients", "optimizer", "optimizer step"),
        "Largest: what is trained. Train a LoRA adapter (model.lora), freeze parts (model.freeze), or share it out "
        "(engine.train fsdp2 or deepspeed_zero3, engine.deepspeed.offload).",
    ),
    "reference": "Largest: the reference copy. Set algorithm.kl.coef to 0, or train a LoRA adapter, whose reference costs nothing.",
    "rollout copy": "Largest: the full replica that samples next to sharded weights. Train a LoRA adapter, or use larger devices.",
    "activations": "Largest: activations. Lower train.token_budget or data.max_pixels, or set model.gradient_checkpointing: true.",
    "logits": "Largest: logits. Lower train.token_budget.",
    "KV cache": "Largest: the KV cache. Lower rollout.batch_tokens.",
    "vLLM": "Largest: vLLM's share. Lower engine.vllm.memory.",
}


def _storage(config: RunConfig, kind: str) -> tuple[Any, Any]:
    """(type that weights are loaded in, autocast's type or None), see load_policy."""
    import torch

    from mmrl.policy.loading import storage_types

    choice = (
        config.model.dtype
        if config.model.dtype != "auto"
        else ("bf16" if kind == "cuda" else "fp32")
    )
    return (torch.float32, None) if choice == "fp32" else storage_types(config.model)


def _size(parameters: Any) -> int:
    return sum(p.numel() * p.element_size() for p in {id(p): p for p in parameters}.values())


def parameter_bytes(config: RunConfig, shape: Any, kind: str) -> ParameterBytes:
    """Bytes of the run's parameters on a device of `kind`, as load_policy would store them. `shape`: the model's configuration."""
    from mmrl.diagnostics.shapes import meta_model
    from mmrl.policy.loading import add_adapter, freeze_parts, store_frozen

    dtype, autocast = _storage(config, kind)
    model = meta_model(shape, dtype)
    freeze_parts(model, config.model.freeze)
    reference, lora = 0, config.model.lora
    if lora is None and config.algorithm.kl.coef > 0:
        other = meta_model(shape, dtype).requires_grad_(False)
        if autocast is not None:
            store_frozen(other, autocast)
        reference = _size(other.parameters())
    if lora is not None:
        model = add_adapter(model, config.model, None, ())
    elif autocast is not None:
        store_frozen(model, autocast)
    base = model.get_base_model() if lora is not None else model
    visual, layers = base.model.visual, list(base.model.language_model.layers)
    trained_vision = any(p.requires_grad for p in visual.parameters())
    blocks = [*layers, *(visual.blocks if trained_vision else [])]
    weights, tower = _size(model.parameters()), 0 if trained_vision else _size(visual.parameters())
    adapted = {
        name.rsplit(".", 1)[-1] for name, m in layers[0].named_modules() if hasattr(m, "lora_A")
    }
    return ParameterBytes(
        weights,
        _size(p for p in model.parameters() if p.requires_grad),
        reference,
        tower,
        max(_size(b.parameters()) for b in blocks),
        weights - tower - sum(_size(b.parameters()) for b in blocks),
        (base.lm_head.weight.element_size(), base.lm_head.weight.requires_grad),
        any(p.requires_grad for p in visual.blocks.parameters()),
        any(p.requires_grad for n, p in layers[0].named_parameters() if "lora_" not in n),
        frozenset(adapted),
    )


@functools.lru_cache(maxsize=16)
def _parameters(model: str, reference: bool, kind: str) -> ParameterBytes:
    """`parameter_bytes` of a model section: everything else in a configuration leaves them alone."""
    from mmrl.diagnostics.shapes import config_of

    section = ModelConfig.model_validate_json(model)
    run = RunConfig(
        model=section, algorithm=AlgorithmConfig(kl=KLConfig(coef=1.0 if reference else 0.0))
    )
    return parameter_bytes(run, config_of(section.path), kind)


def _held(
    p: ParameterBytes, config: RunConfig, engine: str, n: int, kind: str
) -> tuple[dict[str, float], float, float, float]:
    """(parts held throughout, the optimizer step's own, bytes in host memory, of them the main process's copy) under a training
    engine of n processes."""
    offload = config.engine.deepspeed.offload if engine.startswith("deepspeed") else "none"
    # two moments, and DeepSpeed's master copy of its share
    copies = 3 if engine.startswith("deepspeed") else 2
    share, saved = n if engine in ("fsdp2", "deepspeed_zero2", "deepspeed_zero3") else 1, 0.0
    parts = {
        "weights": float(p.weights),
        "gradients": p.gradients / share,
        "optimizer": copies * p.gradients / share,
        "reference": float(p.reference),
    }
    if engine in ("fsdp2", "deepspeed_zero3"):
        split = p.weights - p.tower
        live = (
            2 * p.block + p.root
            if engine == "fsdp2"
            else min(4 * config.engine.deepspeed.max_live, split)
        )
        parts["weights"] = p.tower + split / n
        # FSDP2: a block's whole gradients, too
        parts["gathered weights"] = live + (p.block if engine == "fsdp2" else 0)
        # vLLM samples: the copy lies in host memory (engines/build.py)
        if config.engine.rollout != "vllm" or kind == "cpu":
            parts["rollout copy"] = float(split)
        else:
            saved = float(split)
        if engine == "fsdp2":
            parts["reference"] = p.reference / n
    if engine.startswith("deepspeed"):
        parts["gradients"] += min(_BUCKET, p.gradients)
    # AdamW's foreach kernels hold the square roots of all second moments
    step = p.gradients / share if kind == "cuda" else 0.0
    host = 0.0
    if offload != "none":
        host = parts.pop("optimizer") + p.gradients / share
        parts["gradients"], step = float(min(_BUCKET, p.gradients)), 0.0
    if offload == "all":
        host += parts["weights"] - p.tower
        parts["weights"] = float(p.tower)
    return parts, step, host + saved, saved


def prompt_tokens_of(config: RunConfig, shape: Any) -> int:
    """Tokens of the longest prompt that `data` leads to: a picture or clip at its largest, and text."""
    area = (shape.vision_config.patch_size * shape.vision_config.spatial_merge_size) ** 2
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
            / shape.vision_config.temporal_patch_size
        )
    return int(min(max(picture, clip) + _TEXT_TOKENS, config.model.max_prompt_tokens))


def micro_batch(config: RunConfig, prompt: int) -> Micro:
    """The largest micro-batch of the update: train.token_budget tokens, or one group where that is longer."""
    size, new = config.rollout.group_size, config.rollout.max_new_tokens
    if config.train.forward == "padded":  # each row with its own copy of the prompt
        return Micro(
            max(size, config.train.token_budget / (prompt + size * new) * size), prompt, new, 1
        )
    return Micro(max(1.0, config.train.token_budget / (prompt + size * new)), prompt, new, size)


def _phases(
    config: RunConfig,
    shape: Any,
    p: ParameterBytes,
    kind: str,
    n: int,
    prompt: int,
    step: float,
    available: float | None,
) -> tuple[dict[str, dict[str, float]], Micro]:
    text, (dtype, autocast) = shape.text_config, _storage(config, kind)
    precision = Precision(2 if autocast is not None else 4, dtype.itemsize)
    micro = micro_batch(config, prompt)
    checkpointing = (
        config.model.gradient_checkpointing
        if config.model.gradient_checkpointing is not None
        else kind == "cuda"
    )
    kept, passing = update_bytes(
        text,
        precision,
        micro,
        # auto: flash attention needs no more than flex
        ("flex" if autocast is not None and kind == "cuda" else "sdpa")
        if config.model.attn == "auto"
        else config.model.attn,
        trained=p.trained_language,
        adapted=p.adapted,
        checkpointing=checkpointing,
    )
    if p.trained_vision:
        patches = micro.groups * (prompt - _TEXT_TOKENS) * shape.vision_config.spatial_merge_size**2
        kept += vision_update_bytes(
            shape.vision_config, precision, patches, checkpointing=checkpointing
        )
    logits = logits_bytes(
        text, micro.completion_tokens, 1 << 26, head_bytes=p.head[0], head_trained=p.head[1]
    )
    # they do not pass at the same time
    update = {"activations": kept + max(0.0, passing - logits), "logits": logits}
    length, per_process = (
        prompt + config.rollout.max_new_tokens,
        -(-config.train.prompts_per_step // n),
    )
    slots = max(
        length, min(config.rollout.batch_tokens, per_process * config.rollout.group_size * length)
    )
    rollout = {
        "KV cache": cache_bytes(text, precision, slots),
        "prefill and sampling": rollout_work_bytes(
            text,
            precision,
            rows=slots / length,
            prompt=prompt,
            group_size=config.rollout.group_size,
        ),
    }
    phases = {"update": update, "rollout": rollout, "optimizer step": {"optimizer step": step}}
    if config.engine.rollout == "vllm":
        phases["rollout"] = {"vLLM": _vllm(config, p, kind, available)}
    return phases, micro


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


def estimate(
    config: RunConfig,
    *,
    processes: int = 1,
    kind: Literal["cuda", "cpu"] = "cuda",
    prompt_tokens: int | None = None,
    available: float | None = None,
) -> MemoryEstimate:
    """The estimate of a run in `processes` processes with a device of `kind` each. `available`: its bytes (vLLM takes a share).

    Raises ConfigError where the model's configuration cannot be read, or the training engine does not go with the run.
    """
    from mmrl.diagnostics.shapes import config_of
    from mmrl.distributed.engines.build import train_engine_name

    config = with_choice(config, rollout_engine(config, kind))
    shape = config_of(config.model.path)
    engine = train_engine_name(config, processes)
    p = _parameters(
        config.model.model_dump_json(),
        config.algorithm.kl.coef > 0 and config.model.lora is None,
        kind,
    )
    parts, step, host, saved = _held(p, config, engine, processes, kind)
    prompt = prompt_tokens or prompt_tokens_of(config, shape)
    phases, micro = _phases(config, shape, p, kind, processes, prompt, step, available)
    if config.engine.rollout == "vllm" and not (config.engine.vllm.sleep and kind == "cuda"):
        parts |= phases.pop("rollout")
    parts["libraries"] = float(_LIBRARIES)
    return MemoryEstimate(
        {k: v for k, v in parts.items() if v},
        phases,
        config.schedule.kind != "serial",
        processes,
        engine,
        prompt,
        micro.tokens,
        host,
        saved,
    )


def device_memory(config: RunConfig) -> tuple[Literal["cuda", "cpu"], float]:
    """Kind of the run's device and the bytes that are free there: of the GPU, or of main memory per process of this machine."""
    import psutil
    import torch

    device = torch.device(config.model.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cuda":
        local = int(os.environ.get("LOCAL_RANK", 0))
        return "cuda", float(
            torch.cuda.mem_get_info(device.index if device.index is not None else local)[0]
        )
    return "cpu", psutil.virtual_memory().available / int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def announce_memory(config: RunConfig, say: Callable[[str, str], None]) -> None:
    """Say what the run that is about to start needs, and warn (yellow) where it does not fit; on the main process."""
    if int(os.environ.get("RANK", 0)):
        return
    kind, available = device_memory(config)
    try:
        found = estimate(
            config, processes=int(os.environ.get("WORLD_SIZE", 1)), kind=kind, available=available
        )
    except ConfigError as error:  # the run itself says the same, and stops
        say(f"no memory estimate: {error}", "yellow")
        return
    say(found.line(available), "")
    if warning := found.warning(available):
        say(f"memory: {warning}", "yellow")
