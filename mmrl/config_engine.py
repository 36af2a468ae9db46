"""The engine section of a run's configuration: which existing engines roll out, train and hold the workers. Part of mmrl.config.

    engine:
      rollout: vllm              # pip install 'mmrl[vllm]'
      train: fsdp2               # torchrun --nproc_per_node 8 -m mmrl.cli.main train run.yaml
      workers: ray               # pip install 'mmrl[ray]'

The defaults need none of them. A checkpoint of any engine resumes under any other, and with another number of processes.
"""
from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field, model_validator

from mmrl.config_data import Section

__all__ = ["DeepSpeedConfig", "EngineConfig", "RayConfig", "VLLMConfig"]


class _Section(Section, BaseModel):
    """The sections of this file (BaseModel is named so that linters know what their defaults are)."""


class VLLMConfig(_Section):
    """Rollouts by vLLM (engine.rollout vllm)."""

    mode: Literal["colocated", "server"] = "colocated"  # in the training process, or a server of its own (`mmrl rollout-server`)
    url: str | None = None  # of the server, e.g. http://10.0.0.2:8100
    memory: float = Field(0.45, gt=0, lt=1)  # share of the GPU that vLLM may hold (colocated)
    kv_cache_gib: float = Field(1.0, gt=0)  # on a CPU: room for keys and values
    max_model_len: int | None = Field(None, ge=16)  # null: model.max_prompt_tokens + rollout.max_new_tokens
    sleep: bool = True  # colocated on a GPU: weights and keys leave it while training runs
    probe_prompts: int = Field(2, ge=1)  # prompts whose log-probs are compared after every sync of the weights
    tolerance: float | None = Field(None, gt=0)  # largest mean |vLLM - trainer| log-prob per token of the probe; beyond it the
    # ^ run stops. null: 1e-3 in fp32, 0.05 in bf16
    correction: Literal["none", "truncate", "mask"] = "truncate"  # of the gap that rounding leaves: tokens count
    # ^ w = trainer / sampler (their probabilities), at most threshold times, or not at all beyond it (mmrl/algorithms/staleness.py)
    threshold: float = Field(2.0, gt=1)

    @model_validator(mode="after")
    def _placed(self) -> VLLMConfig:
        if (self.mode == "server") != (self.url is not None):
            needs = "needs" if self.mode == "server" else "has no"
            raise ValueError(f"engine.vllm.mode {self.mode} {needs} engine.vllm.url, found {self.url!r}; set mode: server and url: "
                             "http://host:port, or neither")
        return self


class DeepSpeedConfig(_Section):
    """engine.train deepspeed_zero2 and deepspeed_zero3."""

    offload: Literal["none", "optimizer", "all"] = "none"  # what lives in host memory; all: parameters too (zero3 only)


class RayConfig(_Section):
    """engine.workers ray: where simulators, reward workers and rollout engines run."""

    address: str | None = None  # of a cluster that runs already: host:port, ray://.. or auto; null: one of this machine alone
    placement: Literal["collocated", "disaggregated", "hybrid"] = "collocated"
    # ^ collocated: on the trainer's node; disaggregated: on other nodes; hybrid: wherever there is room
    cpus_per_worker: float = Field(1.0, ge=0)
    gpus_per_worker: float = Field(0.0, ge=0)  # of simulators that render or step on a GPU
    start_s: float = Field(120.0, gt=0)  # for the placement to be granted


class EngineConfig(_Section):
    """Which engines a run uses; the defaults need nothing beside torch and transformers."""

    rollout: Literal["own", "vllm"] = "own"
    train: Literal["auto", "single", "ddp", "deepspeed_zero2", "deepspeed_zero3", "fsdp2"] = "auto"
    # ^ auto: single in one process, ddp in several
    workers: Literal["local", "ray"] = "local"
    vllm: VLLMConfig = VLLMConfig()
    deepspeed: DeepSpeedConfig = DeepSpeedConfig()
    ray: RayConfig = RayConfig()

    @model_validator(mode="after")
    def _consistent(self) -> EngineConfig:
        if self.deepspeed.offload == "all" and self.train == "deepspeed_zero2":
            raise ValueError("engine.deepspeed.offload all moves parameters, which deepspeed_zero2 keeps whole on every GPU; use "
                             "deepspeed_zero3, or offload: optimizer")
        return self
