"""What mmrl.robotics.flow_policy needs of an architecture with a flow head, and the parts that several have in common.

    seen = model.see(pixels, ids, words, state)            # observations, once
    v = model.velocity(seen, x, time)                      # once per denoising step

SmolVLA, pi0 and pi0.5 are a VLM and an action expert with as many layers: the observation is the VLM's prefix, the chunk of noisy
actions the expert's suffix, which attends to the VLM's keys and values layer by layer.

Legend: D observations, I pictures of one, P prefix tokens, L words, K action steps, S numbers of a state, W of an action, E width
of the expert.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from torch import nn
from torch.nn.functional import interpolate, pad, scaled_dot_product_attention

__all__ = [
    "FlowModel",
    "FlowShape",
    "Seen",
    "attended",
    "heads",
    "resized",
    "rotated",
    "time_embedding",
]


class FlowShape(Protocol):
    """What config.json of a policy with a flow head says of its shape."""

    @property
    def chunk_size(self) -> int:
        """Action steps of a decision, as the weights were trained."""

    @property
    def max_state_dim(self) -> int:
        """S."""

    @property
    def max_action_dim(self) -> int:
        """W."""


@dataclass(frozen=True)
class Seen:
    """Encoded observations: of each layer keys (rotated) and values (D, P, heads, width); which of the P tokens are there, (D, P)
    bool; what a critic reads (D, C); the suffix's own first tokens (D, 0 or 1, E)."""

    keys: tuple[torch.Tensor, ...]
    values: tuple[torch.Tensor, ...]
    there_DP: torch.Tensor
    critic_DC: torch.Tensor
    first: torch.Tensor

    def at(self, rows: torch.Tensor) -> Seen:
        """Those of these observations, repeated where a number is."""
        return Seen(
            tuple(k[rows] for k in self.keys),
            tuple(v[rows] for v in self.values),
            self.there_DP[rows],
            self.critic_DC[rows],
            self.first[rows],
        )

    def float(self) -> Seen:
        """The same in fp32."""
        return Seen(
            tuple(k.float() for k in self.keys),
            tuple(v.float() for v in self.values),
            self.there_DP,
            self.critic_DC.float(),
            self.first.float(),
        )


class FlowModel(nn.Module, ABC):
    """A VLM with an action expert that predicts velocities. Parameters have the names of the original's files."""

    name: ClassVar[str]
    """For messages."""
    causal: ClassVar[bool]
    """An action sees only those before it: fewer than chunk_size of them can be computed, with the same result."""
    state_is_text: ClassVar[bool] = False
    """The state is written into the prompt."""

    shape: FlowShape
    config: Any
    """Of the VLM, transformers' (saved as vlm/config.json)."""
    action_out_proj: nn.Linear
    noise_head: nn.Linear | None

    @property
    @abstractmethod
    def expert_width(self) -> int:
        """E."""

    @property
    @abstractmethod
    def critic_width(self) -> int:
        """C."""

    @property
    @abstractmethod
    def picture_size(self) -> tuple[int, int]:
        """Width and height that pictures are brought to."""

    @property
    @abstractmethod
    def picture_tokens(self) -> int:
        """Prefix tokens of one picture."""

    @property
    @abstractmethod
    def state_tokens(self) -> int:
        """Prefix tokens of a state."""

    @abstractmethod
    def text(self, instruction: str, state: Sequence[float]) -> str:
        """What is tokenised."""

    @abstractmethod
    def pixels(self, picture: np.ndarray) -> torch.Tensor:
        """A uint8 picture (H, W, 3) as (3, height, width) in [-1, 1]."""

    @abstractmethod
    def parts(self) -> dict[str, Any]:
        """What model.freeze names."""

    @abstractmethod
    def idle(self, *, critic: bool) -> list[nn.Module]:
        """Modules that no output depends on."""

    @abstractmethod
    def see(
        self,
        pixels: torch.Tensor,
        ids_DL: torch.Tensor,
        words_DL: torch.Tensor,
        state_DS: torch.Tensor,
    ) -> Seen:
        """Encode observations: pixels (D, I, 3, height, width) in [-1, 1], words with their mask, states padded with zeros."""

    @abstractmethod
    def suffix(self, seen: Seen, x_DKW: torch.Tensor, time_D: torch.Tensor) -> torch.Tensor:
        """The expert's last hidden states (D, K, E) of noisy actions at these times."""

    @abstractmethod
    def to_files(self) -> dict[str, torch.Tensor]:
        """The tensors of model.safetensors, by the original's names."""

    @abstractmethod
    def from_files(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """A state dict of tensors by the original's names. Those that are not used are left out."""

    def may_lack(self, name: str) -> bool:
        """Whether weights need not have this name: tied, or new."""
        return name.startswith("noise_head.")

    def velocity(self, seen: Seen, x_DKW: torch.Tensor, time_D: torch.Tensor) -> torch.Tensor:
        """v(x, t), the predicted noise - action, (D, K, W)."""
        return self.action_out_proj(self.suffix(seen, x_DKW, time_D).float())

    def add_noise_head(self) -> None:
        """A head for the noise of denoising steps (mmrl.robotics.flow). It begins at 0: the middle of its range."""
        self.noise_head = nn.Linear(self.expert_width, self.shape.max_action_dim)
        nn.init.zeros_(self.noise_head.weight)
        nn.init.zeros_(self.noise_head.bias)


def rotated(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """(D, T, heads, width) rotated by positions (D, T), in fp32: halves are the pairs' first and second numbers."""
    half = x.shape[-1] // 2
    frequency = 10_000.0 ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angle = positions[:, :, None, None].float() * frequency
    sine, cosine = angle.sin(), angle.cos()
    first, second = x.float().split(half, -1)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), -1).to(
        x.dtype
    )


def attended(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """Attention of (D, T, heads, width) over (D, U, kv heads, width) where `mask` (D, T, U) holds; (D, T, heads * width)."""
    groups = query.shape[2] // key.shape[2]
    key, value = (x.repeat_interleave(groups, 2).transpose(1, 2) for x in (key, value))
    found = scaled_dot_product_attention(
        query.transpose(1, 2), key.to(query), value.to(query), attn_mask=mask[:, None]
    )
    return found.transpose(1, 2).flatten(2)


def heads(layer: Any, x: torch.Tensor) -> torch.Tensor:
    """(D, T, heads * width) as (D, T, heads, width)."""
    return x.unflatten(-1, (-1, layer.head_dim))


def time_embedding(
    time_D: torch.Tensor, width: int, shortest: float, longest: float
) -> torch.Tensor:
    """Sines and cosines of times, whose periods lie between these; (D, width) fp32."""
    share = torch.linspace(0, 1, width // 2, dtype=torch.float64, device=time_D.device)
    period = shortest * (longest / shortest) ** share
    angle = (2 * math.pi / period) * time_D[:, None].double()
    return torch.cat((angle.sin(), angle.cos()), 1).float()


def resized(picture: np.ndarray, size: tuple[int, int], *, centred: bool) -> torch.Tensor:
    """(3, height, width) in [-1, 1] of a uint8 picture (H, W, 3), resized without distortion to `size` (width, height); black is
    around it (`centred`), or to the left and above."""
    width, height = size
    x = torch.from_numpy(np.ascontiguousarray(picture)).permute(2, 0, 1)[None].float() / 255
    ratio = max(x.shape[3] / width, x.shape[2] / height)
    rows, columns = int(x.shape[2] / ratio), int(x.shape[3] / ratio)
    x = interpolate(x, size=(rows, columns), mode="bilinear", align_corners=False)
    left, above = width - columns, height - rows
    if centred:
        left, above = left // 2, above // 2
    x = pad(x, (left, width - columns - left, above, height - rows - above))
    return x[0] * 2 - 1
