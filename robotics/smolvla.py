"""SmolVLA (arXiv 2506.01844): a small VLM and an action expert beside it, as modules of our own that load its checkpoints by name.

    model = SmolVLA(SmolVLAShape.read(folder), vlm_config)
    seen = model.see(pixels, ids, mask, state)                # the prefix, once: keys and values of every layer
    v = model.velocity(seen, x, time)                         # the suffix, once per denoising step

The prefix is [pictures, instruction, state]; pictures and words see each other, the state sees all of them. The suffix is the chunk
of noisy actions, each of which sees the prefix and the actions before it. Layers alternate: in every `self_every`-th the suffix
attends to prefix and suffix in one attention, in the others to the prefix alone, through key and value layers of its own. Rotary
positions go to 10,000 whatever the VLM's own. Vision tower, connector and the layers' weights are transformers' modules, under
lerobot's names, so that model.safetensors of lerobot's policy is this module's state dict under "model.".

Legend: D observations, I pictures of one, P prefix tokens, L words, K action steps, H width of the VLM, E of the expert.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
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

__all__ = ["SmolVLA", "SmolVLAShape"]


@dataclass(frozen=True)
class SmolVLAShape:
    """What lerobot's config.json of a SmolVLA says of its shape."""

    chunk_size: int = 50
    max_state_dim: int = 32
    max_action_dim: int = 32
    resize_imgs_with_padding: tuple[int, int] = (512, 512)
    num_vlm_layers: int = 16
    self_attn_every_n_layers: int = 2
    expert_width_multiplier: float = 0.75
    min_period: float = 4e-3
    max_period: float = 4.0
    vlm_model_name: str = "HuggingFaceTB/SmolVLM2-500M-Video-Instruct"

    @classmethod
    def read(cls, folder: str | Path) -> SmolVLAShape:
        """Of a folder that lerobot or mmrl saved. Raises CheckpointError for one that is damaged, ConfigError for a variant that
        is not supported."""
        file = Path(folder) / "config.json"
        try:
            known = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"{file}: expected the settings of a SmolVLA, found: {error}"
            ) from error
        for name, wanted, why in (
            ("attention_mode", ("cross_attn",), "the layout that was released"),
            ("num_expert_layers", (-1, 0, None), "one layer of the expert beside each of the VLM"),
            ("add_image_special_tokens", (False, None), "pictures without markers"),
            ("adapt_to_pi_aloha", (False, None), "actions in the robot's own units"),
        ):
            if known.get(name, wanted[0]) not in wanted:
                raise ConfigError(
                    f"{file}: expected {name} {wanted[0]} ({why}), found {known[name]!r}: this variant of SmolVLA is not supported"
                )
        values = {f.name: known[f.name] for f in fields(cls) if f.name in known}
        if "resize_imgs_with_padding" in values:
            values["resize_imgs_with_padding"] = tuple(values["resize_imgs_with_padding"])
        return cls(**values)


def _completed(layer: Any, residual: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
    """The rest of a Llama layer behind its attention."""
    x = residual + layer.self_attn.o_proj(found)
    return x + layer.mlp(layer.post_attention_layernorm(x))


def expert_config(text: Any, multiplier: float, layers: int) -> Any:
    """The action expert's Llama configuration beside the VLM's text model: narrower, with heads of the same width."""
    config = copy.deepcopy(text)
    config.hidden_size = int(text.hidden_size * multiplier)
    wide = 4 * int(2 * config.hidden_size / 3)
    config.intermediate_size = 256 * math.ceil(wide / 256)
    config.num_hidden_layers = layers
    return config


class _WithExpert(nn.Module):
    """The VLM and its action expert, under lerobot's names."""

    def __init__(self, shape: SmolVLAShape, vlm_config: Any) -> None:
        super().__init__()
        from transformers import AutoModel, SmolVLMForConditionalGeneration

        self.vlm = SmolVLMForConditionalGeneration(vlm_config)
        text = self.vlm.model.text_model
        if shape.num_vlm_layers > 0:
            text.layers = text.layers[: shape.num_vlm_layers]
        c, count = vlm_config.text_config, len(text.layers)
        config = expert_config(c, shape.expert_width_multiplier, count)
        self.lm_expert = AutoModel.from_config(config)
        self.lm_expert.embed_tokens = None
        every, width = shape.self_attn_every_n_layers, c.num_key_value_heads * c.head_dim
        for number, layer in enumerate(self.lm_expert.layers):
            if every <= 0 or number % every:
                for name in ("k_proj", "v_proj"):
                    setattr(layer.self_attn, name, nn.Linear(width, width, bias=c.attention_bias))


class SmolVLA(FlowModel):
    """See the module. `vlm_config`: transformers' SmolVLMConfig."""

    name = "SmolVLA"
    causal = True
    shape: SmolVLAShape

    def __init__(self, shape: SmolVLAShape, vlm_config: Any) -> None:
        super().__init__()
        self.shape, self.config = shape, vlm_config
        self.vlm_with_expert = _WithExpert(shape, vlm_config)
        width = self.vlm_with_expert.lm_expert.config.hidden_size
        self.state_proj = nn.Linear(shape.max_state_dim, vlm_config.text_config.hidden_size)
        self.action_in_proj = nn.Linear(shape.max_action_dim, width)
        self.action_out_proj = nn.Linear(width, shape.max_action_dim)
        self.action_time_mlp_in = nn.Linear(2 * width, width)
        self.action_time_mlp_out = nn.Linear(width, width)
        self.noise_head: nn.Linear | None = None
        self.eval()

    @property
    def expert_width(self) -> int:
        """See FlowModel."""
        return int(self.vlm_with_expert.lm_expert.config.hidden_size)

    @property
    def critic_width(self) -> int:
        """See FlowModel: of the VLM's last hidden state of the state token, which has seen everything."""
        return int(self.config.text_config.hidden_size)

    @property
    def picture_size(self) -> tuple[int, int]:
        """See FlowModel."""
        return self.shape.resize_imgs_with_padding

    @property
    def picture_tokens(self) -> int:
        """See FlowModel."""
        side = self.config.vision_config.patch_size * self.config.scale_factor
        width, height = self.picture_size
        return int((width // side) * (height // side))

    @property
    def state_tokens(self) -> int:
        """See FlowModel."""
        return 1

    def text(self, instruction: str, state: Sequence[float]) -> str:
        """See FlowModel: lerobot ends every instruction with a line break."""
        return instruction + "\n"

    def pixels(self, picture: np.ndarray) -> torch.Tensor:
        """See FlowModel."""
        return resized(picture, self.picture_size, centred=False)

    def to_files(self) -> dict[str, torch.Tensor]:
        """See FlowModel."""
        return {f"model.{n}": t for n, t in self.state_dict().items()}

    def from_files(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """See FlowModel."""
        return {n.removeprefix("model."): t for n, t in tensors.items()}

    def may_lack(self, name: str) -> bool:
        """See FlowModel: also an output layer of words that are never written."""
        return super().may_lack(name) or name.startswith("vlm_with_expert.vlm.lm_head.")

    def parts(self) -> dict[str, Any]:
        """See FlowModel."""
        vlm = self.vlm_with_expert.vlm
        return {
            "vision": vlm.model.vision_model,
            "projector": vlm.model.connector,
            "language": vlm.model.text_model,
        }

    def idle(self, *, critic: bool) -> list[nn.Module]:
        """See FlowModel."""
        vlm = self.vlm_with_expert.vlm
        if critic:
            return [vlm.lm_head]
        # the last layer's keys and values are all that the expert reads of it
        text = vlm.model.text_model
        last = text.layers[-1]
        attention = last.self_attn
        unused = [attention.q_proj, attention.o_proj, last.mlp, last.post_attention_layernorm]
        return [vlm.lm_head, *unused, text.norm]

    def see(
        self,
        pixels: torch.Tensor,
        ids_DL: torch.Tensor,
        words_DL: torch.Tensor,
        state_DS: torch.Tensor,
    ) -> Seen:
        """See FlowModel."""
        x, there = self._prefix(pixels, ids_DL, words_DL, state_DS)
        text = self.vlm_with_expert.vlm.model.text_model
        position = there.long().cumsum(1) - 1
        mask = there[:, None, :] & there[:, :, None]
        mask[:, :-1, -1] = False  # nothing but the state sees the state
        # a word that is not there sees itself, for a softmax over nothing is NaN
        mask = mask | torch.eye(mask.shape[-1], dtype=torch.bool, device=mask.device)
        keys, values = [], []
        for layer in text.layers:
            a, normed = layer.self_attn, layer.input_layernorm(x)
            key = rotated(heads(a, a.k_proj(normed)), position)
            value = heads(a, a.v_proj(normed))
            query = rotated(heads(a, a.q_proj(normed)), position)
            x = _completed(layer, x, attended(query, key, value, mask))
            keys.append(key)
            values.append(value)
        first = x.new_zeros(len(x), 0, self.expert_width)
        return Seen(tuple(keys), tuple(values), there, text.norm(x[:, -1]), first)

    def _prefix(
        self,
        pixels: torch.Tensor,
        ids_DL: torch.Tensor,
        words_DL: torch.Tensor,
        state_DS: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        vlm = self.vlm_with_expert.vlm.model
        features = vlm.connector(
            vlm.vision_model(pixel_values=pixels.flatten(0, 1)).last_hidden_state
        )
        pictures = features.unflatten(0, pixels.shape[:2]).flatten(1, 2)
        words = vlm.text_model.embed_tokens(ids_DL)
        scale = math.sqrt(words.shape[-1])
        x = torch.cat((pictures * scale, words * scale, self.state_proj(state_DS)[:, None]), 1)
        one = words_DL.new_ones(len(x), 1)
        there = torch.cat((one.expand(-1, pictures.shape[1]), words_DL, one), 1).bool()
        return x, there

    def suffix(self, seen: Seen, x_DKA: torch.Tensor, time_D: torch.Tensor) -> torch.Tensor:
        """See FlowModel."""
        expert, every = self.vlm_with_expert.lm_expert, self.shape.self_attn_every_n_layers
        h = self._embedded(x_DKA, time_D)
        count, there = h.shape[1], seen.there_DP
        place = torch.arange(count, device=h.device).expand(len(h), -1)
        position = there.sum(1, keepdim=True) + place
        prefix = there[:, None, :].expand(-1, count, -1)
        causal = torch.ones(count, count, dtype=torch.bool, device=h.device).tril()
        whole = torch.cat((prefix, causal.expand(len(h), -1, -1)), 2)
        for number, (layer, key, value) in enumerate(
            zip(expert.layers, seen.keys, seen.values, strict=True)
        ):
            a, normed = layer.self_attn, layer.input_layernorm(h)
            query = heads(a, a.q_proj(normed))
            if every > 0 and number % every == 0:
                own = rotated(heads(a, a.k_proj(normed)), position)
                value = torch.cat((value, heads(a, a.v_proj(normed))), 1)
                key, mask, query = torch.cat((key, own), 1), whole, rotated(query, position)
            else:
                key, value = (
                    heads(a, project(kept.flatten(2).to(project.weight.dtype)))
                    for project, kept in ((a.k_proj, key), (a.v_proj, value))
                )
                mask, query = prefix, rotated(query, place)
            h = _completed(layer, h, attended(query, key, value, mask))
        return expert.norm(h)

    def _embedded(self, x_DKA: torch.Tensor, time_D: torch.Tensor) -> torch.Tensor:
        """Noisy actions with their time, whose periods lie between min_period and max_period."""
        s = self.shape
        time = time_embedding(time_D, self.expert_width, s.min_period, s.max_period).to(x_DKA)
        action = self.action_in_proj(x_DKA)
        both = torch.cat((action, time[:, None].expand_as(action)), -1)
        return self.action_time_mlp_out(silu(self.action_time_mlp_in(both)))
