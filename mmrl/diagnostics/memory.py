"""What a run needs of each device's memory, before it starts: arithmetic on shapes, no weights.

    estimate(config, processes=8, kind="cuda").line(80 * 2**30)
    -> 'needs about 61.0 GiB of 80.0 per process (weights 13.2, gradients ..; the largest part: optimizer)'

Weights, gradients, optimizer and reference are exact: the model is made on torch's meta device, and frozen, adapted and stored by
the functions that load it. Activations and KV cache follow mmrl/diagnostics/memory_activations.py for a micro-batch of equal
groups: prompts of one picture or clip at the largest size that `data` allows plus 128 tokens of text, completions of
rollout.max_new_tokens. Of a robot policy they are decisions, each with the pictures of its cameras (RunConfig.rollout_shape).
Phases that exclude each other are not added, the largest counts: start-up, gather (of sharded weights for what samples), wake and
probe (of a vLLM that slept while training ran: mmrl/diagnostics/memory_wake.py), rollout, update, optimizer step, checkpoint. Where
a schedule overlaps rollout, update and step, these three are added.
scripts/bench_memory.py compares every phase with measured memory.

AdamW holds two moments per trained number (Kingma and Ba 2015; Loshchilov and Hutter 2019). Sharing out over processes: Rajbhandari
et al. 2020, ZeRO: stage 2 gradients and moments, stage 3 and FSDP2 parameters too; DeepSpeed also keeps a master copy of its share.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from mmrl.config import (
    RunConfig,
    rollout_engine,
    with_choice,
)
from mmrl.diagnostics.memory_held import held_by
from mmrl.diagnostics.memory_parameters import (
    ParameterBytes,
    parameter_bytes,
    parameters_of,
    storage,
)
from mmrl.diagnostics.memory_phases import phases_of
from mmrl.diagnostics.memory_run import PlannedRun, micro_batch, prompt_tokens_of, samples_apart
from mmrl.errors import ConfigError

__all__ = [
    "MemoryEstimate",
    "ParameterBytes",
    "announce_memory",
    "device_memory",
    "estimate",
    "micro_batch",
    "parameter_bytes",
    "prompt_tokens_of",
]

_GIB = 2**30
# a process without a model: on a CPU interpreter and libraries (measured), on a GPU context, kernels, buffers (assumed)
_LIBRARIES = {"cpu": 0.5 * _GIB, "cuda": 1.0 * _GIB}
_LATER = ("optimizer", "gradient buffers", "output layer")  # parts that are made after the start
_OVERLAPPING = ("rollout", "update", "optimizer step")


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes per device: `parts` are held throughout, `phases` for a while.

    host: in host memory: what is offloaded, per process, and `saved`, the main process's copy to save where vLLM or a generator
    process samples. generator: of a generator process, on the device `generator_device`, null: the main process's.
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
    generator: dict[str, float] = field(default_factory=dict)
    generator_device: str | None = None

    @property
    def peak(self) -> dict[str, float]:
        """The parts of the phase that needs most, of all phases where they overlap."""
        if self.overlap:
            together = [self.phases[n] for n in _OVERLAPPING if n in self.phases]
            return {name: size for phase in together for name, size in phase.items()}
        return self.phases[max(self.phases, key=self.during)]

    @property
    def total(self) -> float:
        """Bytes at the peak, of a training process."""
        return sum(self.parts.values()) + sum(self.peak.values())

    @property
    def together(self) -> float:
        """Bytes at the peak of the device that needs most: a generator process on the main process's device comes on top."""
        generator = sum(self.generator.values())
        return (
            self.total + generator if self.generator_device is None else max(self.total, generator)
        )

    def during(self, phase: str) -> float:
        """Bytes in a phase."""
        absent = _LATER if phase == "start-up" else ()
        held = sum(size for name, size in self.parts.items() if name not in absent)
        return held + sum(self.phases[phase].values())

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
            f"micro-batches of {self.micro_tokens:,.0f} tokens, prompts of {self.prompt_tokens:,}{self._generator_words()}"
        )

    def _generator_words(self) -> str:
        if not self.generator:
            return ""
        size = sum(self.generator.values())
        parts = ", ".join(f"{name} {bytes_ / _GIB:.1f}" for name, bytes_ in self.generator.items())
        where = self.generator_device or "the main training process's device, on top"
        return f"; the generator process about {size / _GIB:.1f} GiB on {where} ({parts})"

    def warning(self, available: float | None) -> str | None:
        """What to say when it does not fit."""
        if available is None or self.together <= available:
            return None
        largest = max({**self.parts, **self.peak}.items(), key=lambda item: item[1])[0]
        return (
            f"about {self.together / _GIB:.1f} GiB needed, {available / _GIB:.1f} there: the run will probably end out of memory. "
            f"{_ADVICE.get(largest, _ADVICE['activations'])} `mmrl memory` shows the estimate of other settings"
        )


_ADVICE = {
    **dict.fromkeys(
        (
            "weights",
            "gradients",
            "gradient buffers",
            "master copy and gradients",
            "optimizer",
            "optimizer step",
        ),
        "Largest: what is trained. Train a LoRA adapter (model.lora), freeze parts (model.freeze), or share it out "
        "(engine.train fsdp2 or deepspeed_zero3, engine.deepspeed.offload).",
    ),
    "weights' file": "Largest: the model's files while they are read; the system takes such pages back when it needs them.",
    "reference": "Largest: the reference copy. Set algorithm.kl.coef to 0, or train a LoRA adapter, whose reference costs nothing.",
    "rollout copy": "Largest: the full replica that samples next to sharded weights. Train a LoRA adapter, or use larger devices.",
    "activations": "Largest: activations. Lower train.token_budget or data.max_pixels, or set model.gradient_checkpointing: true.",
    "logits": "Largest: logits. Lower train.token_budget.",
    "KV cache": "Largest: the KV cache. Lower rollout.batch_tokens.",
    "vLLM": "Largest: vLLM's share. Lower engine.vllm.memory.",
    **dict.fromkeys(
        ("vLLM weights", "weights on their way"),
        "Largest: vLLM's weights, which come back while training's are there. Give vLLM a GPU of its own "
        "(engine.vllm.mode: server, engine.ray.rollout_actors), or train a LoRA adapter.",
    ),
    **dict.fromkeys(
        ("gathered weights", "whole gradients"),
        "Largest: what FSDP2 gathers of embeddings and output layer. Train a LoRA adapter (model.lora).",
    ),
}


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
    from mmrl.distributed.engines.build import held_back, train_engine_name

    shape = config_of(config.model.path)
    # told what the model is: a hub that does not answer would be asked six times
    config = with_choice(config, rollout_engine(config, kind, shape.model_type))
    engine = train_engine_name(config, processes)
    p = parameters_of(
        config.model.model_dump_json(),
        config.algorithm.kl.coef > 0 and config.model.lora is None,
        kind,
    )
    prompt = prompt_tokens or prompt_tokens_of(config, shape)
    run = PlannedRun(config, shape, p, engine, processes, kind, prompt, available)
    held = held_by(run)
    phases = phases_of(run, held)
    parts = dict(held.parts)
    generator: dict[str, float] = {}
    if config.engine.generator.kind == "process":
        generator = _generator(p, config, kind, phases["rollout"])
        if samples_apart(config):
            del phases["rollout"]
    elif config.engine.rollout == "vllm" and not (config.engine.vllm.sleep and kind == "cuda"):
        parts |= phases.pop("rollout")
    if not p.head[1]:
        # mmrl/policy/output_layer.py keeps the output layer in the type it multiplies in
        wide = 2 if kind == "cuda" and storage(config, kind)[1] is not None else 4
        if wide != p.head[0]:
            numbers = shape.text_config.hidden_size * shape.text_config.vocab_size
            parts["output layer"] = float(wide * numbers)
    if config.rollout.merge_adapter:
        # a copy of the adapted layers, where the own engine samples
        (generator or parts)["merged layers"] = float(p.merged)
    host = held.host
    if generator:
        from mmrl.distributed.engines.build import stored_to_sample

        generator |= {k: v for k, v in parts.items() if k == "output layer"}
        # the weights on their way, in shared memory
        way = float(p.gradients - p.copies["masters"] + p.copies[stored_to_sample(config)])
        if kind == "cpu":
            generator["weights on their way"] = way
        else:
            host += way
    # given back with the last whole weight where they are shared out
    if kind == "cpu" and not held_back(config, processes):
        parts["weights' file"] = 4.0 * p.stored
    parts["libraries"] = _LIBRARIES[kind]
    return MemoryEstimate(
        {k: v for k, v in parts.items() if v},
        phases,
        config.schedule.kind != "serial" and not generator,
        processes,
        engine,
        prompt,
        run.micro.tokens,
        host,
        held.saved,
        generator,
        config.engine.generator.device,
    )


def _generator(
    p: ParameterBytes, config: RunConfig, kind: Literal["cuda", "cpu"], rollout: dict[str, float]
) -> dict[str, float]:
    """What a generator process holds of its own, without a reference: weights as they are sampled with, and what that takes."""
    from mmrl.distributed.engines.build import stored_to_sample

    weights = float(p.tower + p.copies[stored_to_sample(config)])
    return {"weights": weights, "libraries": _LIBRARIES[kind], **rollout}


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
