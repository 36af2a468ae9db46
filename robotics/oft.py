"""OpenVLA-OFT (arXiv 2502.19645): Prismatic vision towers and Llama 2, which answers with a whole chunk of action tokens at once.

    model = OpenVLAOFT(OFTShape.read(folder))
    hidden = model(pixels, ids, words, proprio)               # (D, N, H): what predicts each of the N action tokens
    logits = model.logits(hidden)                             # (D, N, bins), in order of the actions

A sequence is [first token, patches, proprioception, rest of the prompt, N zero embeddings, end of text]; attention goes both ways
over all of it, as in the fork of transformers that OpenVLA-OFT was trained with (its causal mask is given up), so no cache is of
use. Logits are those of the position before. Vision towers are timm's ViTs (DINOv2 with registers, SigLIP), of which the last
block but one is read, without a norm; modules of our own under its names load the weights. The language model is transformers'.
The action tokens are the last n_action_bins of the vocabulary before its padding, the last id the lowest action.

Legend: D decisions, I pictures of one, P patches of one, L words, N tokens of a chunk, S numbers of proprioception, H hidden width.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import gelu, scaled_dot_product_attention

from mmrl.errors import CheckpointError, ConfigError

__all__ = ["OFTShape", "OpenVLAOFT", "TowerShape"]

END_OF_TEXT = 2  # Llama's </s>; it stands behind the chunk, as in training


@dataclass(frozen=True)
class TowerShape:
    """A ViT of timm. `registers`: 4 with a class token (DINOv2), 0 without one (SigLIP, which pools by attention)."""

    width: int
    depth: int
    heads: int
    mlp_width: int
    registers: int
    side: int = 224
    patch: int = 14


_TOWERS = {
    "dinosiglip-vit-so-224px": (
        TowerShape(1024, 24, 16, 4096, 4),
        TowerShape(1152, 27, 16, 4304, 0),
    )
}


@dataclass(frozen=True)
class OFTShape:
    """What config.json of an OpenVLA-OFT checkpoint says. `proprio_dim`: 0 without a projector."""

    towers: tuple[TowerShape, TowerShape]
    text: dict[str, Any] = field(hash=False)
    bins: int = 256
    padding: int = 64
    proprio_dim: int = 0

    @classmethod
    def read(cls, folder: str | Path, *, proprio_dim: int = 0) -> OFTShape:
        """Of a folder. Raises CheckpointError for one that is damaged, ConfigError for a variant that is not supported."""
        file = Path(folder) / "config.json"
        try:
            known = json.loads(file.read_text(encoding="utf-8"))
            backbone = known["vision_backbone_id"]
            text = dict(known["text_config"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"{file}: expected the settings of an OpenVLA-OFT, found: {error}"
            ) from error
        own = known.get("towers")
        if own is None and backbone not in _TOWERS:
            raise ConfigError(
                f"{file}: expected vision_backbone_id {', '.join(_TOWERS)}, found {backbone!r}: other Prismatic models are not "
                "supported"
            )
        if text.get("model_type", "llama") != "llama":
            raise ConfigError(
                f"{file}: expected a Llama as text_config, found {text['model_type']!r}: other Prismatic models are not supported"
            )
        towers = _TOWERS[backbone] if own is None else (TowerShape(**own[0]), TowerShape(**own[1]))
        # what Hugging Face's file leaves at LlamaConfig's own values is Llama 2 7B's
        return cls(
            towers,
            {**text, "pad_token_id": known.get("pad_token_id", 32000)},
            known.get("n_action_bins", 256),
            known.get("pad_to_multiple_of", 64),
            proprio_dim,
        )


class _Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return self.proj(scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class _MLP(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(gelu(self.fc1(x)))


class _Scale(nn.Module):
    """LayerScale, under the name that Prismatic gives its parameter."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale_factor = nn.Parameter(torch.full((width,), 1e-5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale_factor


class _Block(nn.Module):
    def __init__(self, shape: TowerShape) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(shape.width, eps=1e-6)
        self.attn = _Attention(shape.width, shape.heads)
        self.ls1 = _Scale(shape.width) if shape.registers else nn.Identity()
        self.norm2 = nn.LayerNorm(shape.width, eps=1e-6)
        self.mlp = _MLP(shape.width, shape.mlp_width)
        self.ls2 = _Scale(shape.width) if shape.registers else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.ls1(self.attn(self.norm1(x)))
        return x + self.ls2(self.mlp(self.norm2(x)))


class _Tower(nn.Module):
    """Pictures (D, 3, side, side) to the patches (D, P, width) of the last block but one. The last is not there."""

    def __init__(self, shape: TowerShape) -> None:
        super().__init__()
        width = shape.width
        self.registers = shape.registers
        self.patch_embed = nn.ModuleDict(
            {"proj": nn.Conv2d(3, width, shape.patch, stride=shape.patch)}
        )
        self.pos_embed = nn.Parameter(
            torch.randn(1, (shape.side // shape.patch) ** 2, width) * 0.02
        )
        if shape.registers:
            self.cls_token = nn.Parameter(torch.zeros(1, 1, width))
            self.reg_token = nn.Parameter(torch.zeros(1, shape.registers, width))
        self.blocks = nn.ModuleList(_Block(shape) for _ in range(shape.depth - 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.patch_embed["proj"](x).flatten(2).transpose(1, 2) + self.pos_embed
        first = 0
        if self.registers:
            extra = torch.cat((self.cls_token, self.reg_token), 1)
            first = extra.shape[1]
            x = torch.cat((extra.expand(len(x), -1, -1), x), 1)
        for block in self.blocks:
            x = block(x)
        return x[:, first:]


class _Backbone(nn.Module):
    def __init__(self, towers: tuple[TowerShape, TowerShape]) -> None:
        super().__init__()
        self.featurizer, self.fused_featurizer = _Tower(towers[0]), _Tower(towers[1])

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        """(D, I, 6, side, side), three channels for each tower, to (D, I * P, width)."""
        flat = pixels.flatten(0, 1)
        both = (self.featurizer(flat[:, :3]), self.fused_featurizer(flat[:, 3:]))
        return torch.cat(both, -1).unflatten(0, pixels.shape[:2]).flatten(1, 2)


class _Projector(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, 4 * width)
        self.fc2 = nn.Linear(4 * width, hidden)
        self.fc3 = nn.Linear(hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc3(gelu(self.fc2(gelu(self.fc1(x)))))


class _ProprioProjector(nn.Module):
    def __init__(self, numbers: int, hidden: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(numbers, hidden), nn.Linear(hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(gelu(self.fc1(x)))


class OpenVLAOFT(nn.Module):
    """See the module."""

    def __init__(self, shape: OFTShape) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM

        self.shape = shape
        given = {k: v for k, v in shape.text.items() if k not in ("model_type", "torch_dtype")}
        self.config = LlamaConfig(**{"vocab_size": 32064, **given})
        self.config._attn_implementation = "sdpa"
        self.vision_backbone = _Backbone(shape.towers)
        hidden = int(self.config.hidden_size)
        self.projector = _Projector(sum(t.width for t in shape.towers), hidden)
        self.language_model: Any = LlamaForCausalLM(self.config)
        self.proprio_projector = (
            _ProprioProjector(shape.proprio_dim, hidden) if shape.proprio_dim else None
        )
        self.eval()

    @property
    def hidden_width(self) -> int:
        """H."""
        return int(self.config.hidden_size)

    @property
    def is_llama2(self) -> bool:
        """Whether its words are Llama 2's."""
        return int(self.config.vocab_size) - self.shape.padding == 32000

    @property
    def patches(self) -> int:
        """P."""
        tower = self.shape.towers[0]
        return (tower.side // tower.patch) ** 2

    @property
    def action_columns(self) -> torch.Tensor:
        """Ids of the action tokens, lowest action first (bins,)."""
        end = int(self.config.vocab_size) - self.shape.padding
        return torch.arange(end - 1, end - 1 - self.shape.bins, -1)

    def forward(
        self,
        pixels: torch.Tensor,
        ids_DL: torch.Tensor,
        words_DL: torch.Tensor,
        count: int,
        proprio_DS: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """What predicts each of `count` action tokens, (D, count, H): pixels (D, I, 6, side, side), words filled up at their end
        and their mask, proprioception in [-1, 1]."""
        embed = self.language_model.model.embed_tokens
        seen = self.projector(self.vision_backbone(pixels))
        if self.proprio_projector is not None:
            assert proprio_DS is not None, "the model has a projector for it"
            seen = torch.cat((seen, self.proprio_projector(proprio_DS)[:, None]), 1)
        before, widest = seen.shape[1], ids_DL.shape[1]
        length_D = words_DL.sum(1)
        words = embed(ids_DL) * words_DL[..., None]  # what fills up is as zero as the chunk
        end = embed(ids_DL.new_full((1, 1), END_OF_TEXT))
        chunk = words.new_zeros(len(words), count + 1, words.shape[-1])
        x = torch.cat((words[:, :1], seen.to(words), words[:, 1:], chunk), 1)
        place = torch.arange(before + widest + count + 1, device=x.device)
        last_D = before + length_D + count
        x = torch.where((place == last_D[:, None])[..., None], end, x)
        there = place <= last_D[:, None]
        mask = there[:, None, None, :].expand(-1, 1, len(place), -1)
        hidden = self.language_model.model(
            inputs_embeds=x, attention_mask=mask, use_cache=False
        ).last_hidden_state
        # the position before an action token predicts it: the first is predicted by the prompt's last
        wanted = (before + length_D - 1)[:, None] + torch.arange(count, device=x.device)
        return hidden.gather(1, wanted[..., None].expand(-1, -1, hidden.shape[-1]))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """fp32 logits over the bins, lowest action first, of hidden states (..., H)."""
        weight = self.language_model.lm_head.weight
        with torch.autocast(hidden.device.type, enabled=False):
            chosen = weight[self.action_columns.to(weight.device)].float()
            return torch.nn.functional.linear(hidden.float(), chosen)

    def parts(self) -> dict[str, nn.Module]:
        """What model.freeze names."""
        return {
            "vision": self.vision_backbone,
            "projector": self.projector,
            "language": self.language_model,
        }

    def from_files(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """A state dict of tensors by the checkpoint's names. What no output depends on (the towers' last blocks, norms and
        pooling) is left out."""
        wanted, known = self.state_dict(), {}
        for name, tensor in tensors.items():
            tower, _, rest = name.removeprefix("vision_backbone.").partition(".")
            if tower in ("featurizer", "fused_featurizer") and name not in wanted:
                last = self.shape.towers[tower != "featurizer"].depth - 1
                if rest.startswith(("norm.", "attn_pool.", f"blocks.{last}.")):
                    continue
            known[name] = tensor
        return known
