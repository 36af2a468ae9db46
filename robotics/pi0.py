"""pi0 (arXiv 2410.24164) and pi0.5 (arXiv 2504.16054): PaliGemma and a Gemma action expert, loaded by the originals' names.

    model = Pi0(Pi0Shape.read(folder), paligemma_config)
    seen = model.see(pixels, ids, words, state)               # the prefix, once: keys and values of every layer
    v = model.velocity(seen, x, time)                         # the suffix, once per denoising step

The prefix is [pictures, instruction], each token of which sees all of it. The suffix of pi0 is [state, actions]: the state does not
see the actions, which see everything. pi0.5 has the state in its instruction, as numbers of 0 to 255, and the time in the scale,
shift and gate of its expert's norms. Actions see one another, so that all chunk_size of them are computed, also where fewer are
executed.
Files are those of lerobot (type pi0 or pi05) and of openpi's convert_jax_model_to_pytorch.py; layers are transformers' modules.

Legend: D observations, I pictures of one, P prefix tokens, L words, K action steps, S numbers of a state, H width of PaliGemma's
language model, E of the expert.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.functional import silu

from mmrl.errors import CheckpointError, ConfigError
from mmrl.robotics.flow_model import (
    FlowModel,
    Seen,
    attended,
    heads,
    resized,
    rotated,
    time_embedding,
)

__all__ = ["Pi0", "Pi0Shape", "paligemma_config"]

TOKENIZER = "google/paligemma-3b-pt-224"
_EXPERTS = {"gemma_300m": (1024, 4096), "gemma_2b": (2048, 16384)}  # width, width of the MLP


@dataclass(frozen=True)
class Pi0Shape:
    """What config.json says of a policy's shape. `file_prefix`: of its tensors' names; `pads_state`: pi0.5 writes the state with
    its padding, as lerobot (openpi without)."""

    chunk_size: int = 50
    max_state_dim: int = 32
    max_action_dim: int = 32
    expert_width: int = 1024
    expert_mlp_width: int = 4096
    min_period: float = 4e-3
    max_period: float = 4.0
    pi05: bool = False
    file_prefix: str = "model."
    pads_state: bool = True

    @classmethod
    def read(cls, folder: str | Path) -> Pi0Shape:
        """Of a folder that lerobot, openpi or mmrl saved. Raises CheckpointError for one that is damaged, ConfigError for a variant
        that is not supported."""
        file = Path(folder) / "config.json"
        try:
            known = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"{file}: expected the settings of a pi0, found: {error}"
            ) from error
        if known.get("paligemma_variant", "gemma_2b") not in ("gemma_2b", "own"):
            raise ConfigError(
                f"{file}: expected paligemma_variant gemma_2b, found {known['paligemma_variant']!r}: LoRA variants of openpi and "
                "others are not supported; merge them first"
            )
        variant = known.get("action_expert_variant", "gemma_300m")
        if variant not in (*_EXPERTS, "own"):
            raise ConfigError(
                f"{file}: expected action_expert_variant {' or '.join(_EXPERTS)}, found {variant!r}: merge a LoRA first"
            )
        width, mlp = _EXPERTS.get(variant, (0, 0))
        values: dict[str, Any] = {
            "expert_width": known.get("expert_width", width),
            "expert_mlp_width": known.get("expert_mlp_width", mlp),
        }
        for name in ("chunk_size", "max_state_dim", "max_action_dim", "min_period", "max_period"):
            if name in known:
                values[name] = known[name]
        if known.get("type") in ("pi0", "pi05"):
            return cls(**values, pi05=known["type"] == "pi05")
        # openpi's file does not say which it is
        values |= {
            "chunk_size": known["action_horizon"],
            "max_state_dim": known["action_dim"],
            "max_action_dim": known["action_dim"],
        }
        return cls(**values, pi05=_adaptive(Path(folder)), file_prefix="", pads_state=False)


def _adaptive(folder: Path) -> bool:
    """Whether weights of openpi are pi0.5's."""
    from safetensors import safe_open

    file = folder / "model.safetensors"
    try:
        with safe_open(str(file), "pt") as weights:
            return "time_mlp_in.weight" in weights.keys()  # noqa: SIM118 (no mapping)
    except Exception as error:
        raise CheckpointError(f"{file}: expected the weights of a pi0, found: {error}") from error


def paligemma_config() -> Any:
    """Of the PaliGemma that the released policies have, 224 x 224 pixels."""
    from transformers import PaliGemmaConfig

    vision = {
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "image_size": 224,
        "patch_size": 14,
        "vision_use_head": False,
    }
    text = {
        "hidden_size": 2048,
        "intermediate_size": 16384,
        "num_hidden_layers": 18,
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "vocab_size": 257152,
    }
    return PaliGemmaConfig(vision_config=vision, text_config=text, projection_dim=2048)


class _AdaptiveNorm(nn.Module):
    """RMS norm whose scale, shift and gate follow from a condition (D, E)."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.dense = nn.Linear(width, 3 * width)
        self.eps = eps
        nn.init.zeros_(self.dense.weight)
        nn.init.zeros_(self.dense.bias)

    def forward(
        self, x: torch.Tensor, condition: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The normed x (D, T, E) and the gate of what follows."""
        scale, shift, gate = self.dense(condition)[:, None].chunk(3, -1)
        normed = x * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + self.eps)
        return (normed * (1 + scale) + shift).to(x), gate


def _normed(
    norm: Any, x: torch.Tensor, condition: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | float]:
    return (norm(x), 1.0) if condition is None else norm(x, condition)


class _WithExpert(nn.Module):
    """PaliGemma and its action expert, under the originals' names."""

    def __init__(self, shape: Pi0Shape, config: Any) -> None:
        super().__init__()
        from transformers import GemmaConfig, GemmaModel, PaliGemmaModel

        text = config.text_config
        own = GemmaConfig(
            hidden_size=shape.expert_width,
            intermediate_size=shape.expert_mlp_width,
            num_hidden_layers=text.num_hidden_layers,
            num_attention_heads=text.num_attention_heads,
            num_key_value_heads=text.num_key_value_heads,
            head_dim=text.head_dim,
            vocab_size=1,
            pad_token_id=None,
        )
        self.paligemma = nn.ModuleDict({"model": PaliGemmaModel(config)})
        expert: Any = GemmaModel(own)
        expert.embed_tokens = None
        if shape.pi05:
            width, eps = own.hidden_size, own.rms_norm_eps
            for layer in expert.layers:
                layer.input_layernorm = _AdaptiveNorm(width, eps)
                layer.post_attention_layernorm = _AdaptiveNorm(width, eps)
            expert.norm = _AdaptiveNorm(width, eps)
        self.gemma_expert = nn.ModuleDict({"model": expert})


class Pi0(FlowModel):
    """See the module. `config`: transformers' PaliGemmaConfig."""

    causal = False
    shape: Pi0Shape

    def __init__(self, shape: Pi0Shape, config: Any) -> None:
        super().__init__()
        self.shape, self.config = shape, config
        self.paligemma_with_expert = _WithExpert(shape, config)
        width = shape.expert_width
        self.action_in_proj = nn.Linear(shape.max_action_dim, width)
        self.action_out_proj = nn.Linear(width, shape.max_action_dim)
        if shape.pi05:
            self.time_mlp_in = nn.Linear(width, width)
            self.time_mlp_out = nn.Linear(width, width)
        else:
            self.state_proj = nn.Linear(shape.max_state_dim, width)
            self.action_time_mlp_in = nn.Linear(2 * width, width)
            self.action_time_mlp_out = nn.Linear(width, width)
        self.noise_head: nn.Linear | None = None
        self.eval()

    @property
    def name(self) -> str:  # type: ignore[override]
        """See FlowModel."""
        return "pi0.5" if self.shape.pi05 else "pi0"

    @property
    def state_is_text(self) -> bool:  # type: ignore[override]
        """See FlowModel."""
        return self.shape.pi05

    @property
    def expert_width(self) -> int:
        """See FlowModel."""
        return self.shape.expert_width

    @property
    def critic_width(self) -> int:
        """See FlowModel: of the mean of the prefix, and of the state where the prefix does not hold it."""
        state = 0 if self.shape.pi05 else self.shape.max_state_dim
        return int(self.config.text_config.hidden_size) + state

    @property
    def picture_size(self) -> tuple[int, int]:
        """See FlowModel."""
        side = int(self.config.vision_config.image_size)
        return side, side

    @property
    def picture_tokens(self) -> int:
        """See FlowModel."""
        vision = self.config.vision_config
        return int(vision.image_size // vision.patch_size) ** 2

    @property
    def state_tokens(self) -> int:
        """See FlowModel: the state is in the suffix, or among the words."""
        return 0

    def text(self, instruction: str, state: Sequence[float]) -> str:
        """See FlowModel: openpi's prompts."""
        words = instruction.strip().replace("_", " ").replace("\n", " ")
        if not (self.shape.pi05 and state):  # openpi's pi05_libero is without a state
            return words + "\n"
        filled = [0.0] * (self.shape.max_state_dim - len(state) if self.shape.pads_state else 0)
        bins = np.digitize([*state, *filled], np.linspace(-1, 1, 257)[:-1]) - 1
        return f"Task: {words}, State: {' '.join(map(str, bins))};\nAction: "

    def pixels(self, picture: np.ndarray) -> torch.Tensor:
        """See FlowModel."""
        return resized(picture, self.picture_size, centred=True)

    def to_files(self) -> dict[str, torch.Tensor]:
        """See FlowModel."""
        prefix = self.shape.file_prefix
        return {
            prefix + n.replace("vision_tower.", "vision_tower.vision_model."): t
            for n, t in self.state_dict().items()
        }

    def from_files(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """See FlowModel: output layers are of words that are never written; PaliGemma's is tied to its embedding."""
        named = {
            n.removeprefix("model.").replace("vision_tower.vision_model.", "vision_tower."): t
            for n, t in tensors.items()
        }
        tied = named.pop("paligemma_with_expert.paligemma.lm_head.weight", None)
        embedding = "paligemma_with_expert.paligemma.model.language_model.embed_tokens.weight"
        if tied is not None:
            named.setdefault(embedding, tied)
        named.pop("paligemma_with_expert.gemma_expert.lm_head.weight", None)
        return named

    def parts(self) -> dict[str, Any]:
        """See FlowModel."""
        model: Any = self.paligemma_with_expert.paligemma["model"]
        return {
            "vision": model.vision_tower,
            "projector": model.multi_modal_projector,
            "language": model.language_model,
        }

    def idle(self, *, critic: bool) -> list[nn.Module]:
        """See FlowModel."""
        if critic:
            return []
        # the last layer's keys and values are all that the expert reads of it
        text = self.parts()["language"]
        last = text.layers[-1]
        attention = last.self_attn
        return [
            attention.q_proj,
            attention.o_proj,
            last.mlp,
            last.post_attention_layernorm,
            text.norm,
        ]

    def see(
        self,
        pixels: torch.Tensor,
        ids_DL: torch.Tensor,
        words_DL: torch.Tensor,
        state_DS: torch.Tensor,
    ) -> Seen:
        """See FlowModel."""
        parts = self.parts()
        text = parts["language"]
        features = parts["projector"](parts["vision"](pixels.flatten(0, 1)).last_hidden_state)
        pictures = features.unflatten(0, pixels.shape[:2]).flatten(1, 2)
        x = torch.cat((pictures, text.embed_tokens(ids_DL)), 1)
        one = words_DL.new_ones(len(x), 1)
        there = torch.cat((one.expand(-1, pictures.shape[1]), words_DL), 1).bool()
        position = there.long().cumsum(1) - 1
        # nothing sees a word that is not there, and what that word sees counts for nothing
        mask = there[:, None, :].expand(-1, there.shape[1], -1)
        keys, values = [], []
        for layer in text.layers:
            a, normed = layer.self_attn, layer.input_layernorm(x)
            key = rotated(heads(a, a.k_proj(normed)), position)
            value = heads(a, a.v_proj(normed))
            query = rotated(heads(a, a.q_proj(normed)), position)
            x = x + a.o_proj(attended(query, key, value, mask))
            x = x + layer.mlp(layer.post_attention_layernorm(x))
            keys.append(key)
            values.append(value)
        share = there[..., None] / there.sum(1)[:, None, None]
        critic = (text.norm(x) * share).sum(1)
        first = x.new_zeros(len(x), 0, self.expert_width)
        if not self.shape.pi05:
            critic = torch.cat((critic, state_DS.to(critic)), 1)
            first = self.state_proj(state_DS)[:, None]
        return Seen(tuple(keys), tuple(values), there, critic, first)

    def suffix(self, seen: Seen, x_DKW: torch.Tensor, time_D: torch.Tensor) -> torch.Tensor:
        """See FlowModel."""
        expert: Any = self.paligemma_with_expert.gemma_expert["model"]
        h, condition = self._embedded(x_DKW, time_D)
        alone = seen.first.shape[1]
        h = torch.cat((seen.first.to(h), h), 1)
        count, there = h.shape[1], seen.there_DP
        position = there.sum(1, keepdim=True) + torch.arange(count, device=h.device)
        own = torch.ones(count, count, dtype=torch.bool, device=h.device)
        own[:alone, alone:] = False
        prefix = there[:, None, :].expand(-1, count, -1)
        mask = torch.cat((prefix, own.expand(len(h), -1, -1)), 2)
        for layer, key, value in zip(expert.layers, seen.keys, seen.values, strict=True):
            a = layer.self_attn
            normed, gate = _normed(layer.input_layernorm, h, condition)
            query = rotated(heads(a, a.q_proj(normed)), position)
            key = torch.cat((key, rotated(heads(a, a.k_proj(normed)), position)), 1)
            value = torch.cat((value, heads(a, a.v_proj(normed))), 1)
            h = h + a.o_proj(attended(query, key, value, mask)) * gate
            normed, gate = _normed(layer.post_attention_layernorm, h, condition)
            h = h + layer.mlp(normed) * gate
        return _normed(expert.norm, h, condition)[0][:, alone:]

    def _embedded(
        self, x_DKW: torch.Tensor, time_D: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Noisy actions (D, K, E) with their time, or with the condition that holds it."""
        s, action = self.shape, self.action_in_proj(x_DKW)
        time = time_embedding(time_D, s.expert_width, s.min_period, s.max_period).to(action)
        if s.pi05:
            return action, silu(self.time_mlp_out(silu(self.time_mlp_in(time))))
        both = torch.cat((action, time[:, None].expand_as(action)), -1)
        return self.action_time_mlp_out(silu(self.action_time_mlp_in(both))), None
