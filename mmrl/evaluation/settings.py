"""How held-out data are asked, and which settings of a run change what is measured."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from mmrl.config import RunConfig
from mmrl.errors import ConfigError
from mmrl.policy.attention import choose_attention
from mmrl.policy.loading import device_and_precision, family_at
from mmrl.rollout import SamplingSettings
from mmrl.rollout.group_generator import sampling_settings

__all__ = ["EvalSettings", "eval_settings", "protocol_of", "taught_params"]


@dataclasses.dataclass(frozen=True)
class EvalSettings:
    """How to evaluate; `samples` completions per prompt at the sampling temperature, beside one greedy answer."""

    sampling: SamplingSettings
    samples: int = 8
    seed: int = 0
    limit: int | None = None
    greedy: bool = True
    # what else can change the numbers
    protocol: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    on_error: str = "record"  # 'raise': a picture or clip that cannot be read ends the evaluation; else it scores 0
    # of mmrl.rollout.views.VIEWS, each asked of every sample that it changes
    views: Sequence[str] = ()
    gallery: int = 0  # samples of each source whose turns in an environment are kept as pictures


def protocol_of(config: RunConfig) -> dict[str, Any]:
    """The settings of a run that change what is measured: model, prompt frame, pixel budget, precision."""
    m, d = config.model, config.data
    device, _, autocast = device_and_precision(m, None)
    # only auto depends on the family, and only on a GPU
    family = family_at(m.path) if m.attn == "auto" and device.type == "cuda" else None
    return {
        "model": m.path,
        "system": m.system,
        "dtype": m.dtype,
        "attn": choose_attention(m.attn, device, autocast, family),
        "max_prompt_tokens": m.max_prompt_tokens,
        "min_pixels": d.min_pixels,
        "max_pixels": d.max_pixels,
        "image": d.image.model_dump(),
        "video": d.video.model_dump(),
    }


def eval_settings(
    config: RunConfig,
    *,
    samples: int | None = None,
    limit: int | None = None,
    protocol: Mapping[str, Any] | None = None,
) -> EvalSettings:
    """Those of a run: `samples` (default: eval.samples) completions per prompt, the first `limit` samples of each source, and
    further entries of the protocol."""
    return EvalSettings(
        # nothing is trained on what is measured: experts would be kept for nobody, and vLLM has none to give
        dataclasses.replace(sampling_settings(config), routed_experts=False),
        config.eval.samples if samples is None else samples,
        config.seed,
        limit,
        protocol={**protocol_of(config), **(protocol or {})},
        on_error=config.data.on_error,
        views=tuple(config.eval.views),
        gallery=config.eval.gallery,
    )


def taught_params(base: RunConfig, task: str) -> dict[str, Any]:
    """Parameters that a run gave this task: of its own source, or as a member of a mixed one; a task that is a Python object, by
    its name. Raises ConfigError."""
    sources = (*base.data.eval, *base.data.train)
    known = next((s for s in sources if s.task == task), None)
    if known is not None:
        return dict(known.params)
    mixed = next((s for s in sources if s.task == "mixed"), None)
    if mixed is None:
        return {}
    members = _mapping(mixed.params, "tasks")
    return {**_mapping(mixed.params, "shared"), **_mapping(members, task)}


def _mapping(params: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Of the parameters that a checkpoint has for task mixed. Raises ConfigError."""
    found = params.get(name) or {}
    if not isinstance(found, Mapping):
        raise ConfigError(
            f"expected parameters of task mixed in the checkpoint's settings, found {name}: {str(found)[:80]}; give "
            "the run's configuration with --config"
        )
    return found
