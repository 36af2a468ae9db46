"""What policies have in common whose model is a module of mmrl.robotics and not a language model of mmrl.policy: the flow heads and
OpenVLA-OFT. Weights, a critic beside them, a reference, replicas, observations as prompts.

Legend: D decisions, U different prompts, L words, N numbers of a decision, C what a critic reads.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from mmrl.algorithms import token_mask
from mmrl.errors import ConfigError
from mmrl.policy.encode import Prompt
from mmrl.policy.storage import Stored
from mmrl.policy.value_head import ValueHead
from mmrl.robotics.actions import ActionCodec
from mmrl.robotics.config import VLAConfig
from mmrl.robotics.contract import Observation
from mmrl.types import Turn

if TYPE_CHECKING:
    from typing import Self  # from Python 3.11 on

__all__ = ["ModulePolicy", "SeenPrompt"]

_MOST_WORDS = 10_000  # prompts whose tokens are kept


@dataclass(frozen=True)
class SeenPrompt(Prompt):
    """An observation as the model sees it: word ids, uint8 pictures (H, W, 3), the state in units of its bounds, the length of the
    encoded prefix."""

    pictures: tuple[np.ndarray, ...] = ()
    state: tuple[float, ...] = ()
    prefix: int = 0

    @property
    def length(self) -> int:
        """Tokens of the prefix."""
        return self.prefix

    @cached_property
    def fingerprint(self) -> str:
        """BLAKE2b hash of words, pictures and state."""
        digest = hashlib.blake2b(repr((self.ids_P.tolist(), self.state)).encode(), digest_size=16)
        for picture in self.pictures:
            digest.update(repr(picture.shape).encode() + np.ascontiguousarray(picture).tobytes())
        return digest.hexdigest()


class ModulePolicy:
    """`model` with everything a learner asks of it. `files`: what is saved beside the weights, by name."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        codec: ActionCodec,
        settings: VLAConfig,
        value_head: ValueHead | None = None,
        *,
        device: torch.device,
        autocast: torch.dtype | None = None,
        reference: Any = None,
        files: Mapping[str, Any] | None = None,
    ) -> None:
        self._model, self.tokenizer, self.codec, self.settings = model, tokenizer, codec, settings
        self.value_head, self._reference, self._files = value_head, reference, dict(files or {})
        self._device, self._autocast = device, autocast
        self.tokens_per_decision = codec.tokens
        self.version, self.lockstep = 0, False
        self._words: dict[str, torch.Tensor] = {}

    # what a training engine asks for: mmrl.distributed.engines.base.Trained

    @property
    def model(self) -> Any:
        """See Trained."""
        return self._model

    @property
    def reference_model(self) -> Any:
        """See Trained."""
        return self._reference

    @property
    def heads(self) -> Mapping[str, torch.nn.Module]:
        """See Trained."""
        return {} if self.value_head is None else {"value_head": self.value_head}

    @property
    def device(self) -> torch.device:
        """See Trained."""
        return self._device

    @property
    def autocast_dtype(self) -> torch.dtype | None:
        """See Trained."""
        return self._autocast

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """See Trained."""
        yield from self._model.named_parameters()
        for name, head in self.heads.items():
            yield from ((f"{name}.{n}", p) for n, p in head.named_parameters())

    def trainable(self) -> list[tuple[str, torch.nn.Parameter]]:
        """See Trained."""
        return [(n, p) for n, p in self.named_parameters() if p.requires_grad]

    def publish(self) -> int:
        """See ActingPolicy."""
        self.version += 1
        return self.version

    def copied_types(self, stored: Stored) -> dict[str, torch.dtype]:
        """See Policy: none, as in full_replica."""
        return {}

    def full_replica(self, device: torch.device | None = None, stored: Stored = "masters") -> Self:
        """See Policy. It is stored as this one is: engines that shard do not train such a policy."""
        other = copy.copy(self)
        other._model, other.value_head, other._reference = (
            copy.deepcopy(self._model),
            copy.deepcopy(self.value_head),
            None,
        )
        return other

    def adopt_replica(self, replica: Self) -> None:
        """See Policy."""
        self._model, self.value_head, self.lockstep = replica._model, replica.value_head, False

    @contextlib.contextmanager
    def reference(self) -> Iterator[Self]:
        """The policy before training, without its critic."""
        if self._reference is None:
            raise ConfigError(
                "expected a reference model for the KL term, found none; set algorithm.kl.coef > 0 before loading the policy"
            )
        current, head = self._model, self.value_head
        self._model, self.value_head = self._reference, None
        try:
            yield self
        finally:
            self._model, self.value_head = current, head

    def _autocasting(self) -> contextlib.AbstractContextManager[Any]:
        if self._autocast is None:
            return contextlib.nullcontext()
        return torch.autocast(self._device.type, self._autocast, cache_enabled=False)

    def _values(self, read_UC: torch.Tensor) -> torch.Tensor:
        if self.value_head is None:
            return read_UC.new_zeros((len(read_UC), 1), dtype=torch.float32)
        return self.value_head(read_UC)

    def token_mask(self, turn: Turn) -> np.ndarray:
        """See ActingPolicy."""
        return np.array(token_mask(turn.valid, len(turn.token_ids), self.codec.dim))

    # observations

    def _known_words(self, words: str, ids_L: torch.Tensor) -> torch.Tensor:
        """`ids_L`, kept for when the same words come again; of a server's clients any number of words may come."""
        if len(self._words) >= _MOST_WORDS:
            self._words.clear()
        self._words[words] = ids_L
        return ids_L

    def _shown(self, observation: Observation) -> tuple[np.ndarray, ...]:
        """The cameras' pictures. Raises ConfigError where one is lacking."""
        wanted = self.settings.cameras
        if lacking := [c for c in wanted if c not in observation.images]:
            raise ConfigError(
                f"expected pictures of cameras {', '.join(wanted)}, found {', '.join(observation.images)}; add "
                f"{', '.join(lacking)} to env.cameras or drop it from vla.cameras"
            )
        return tuple(observation.images[c] for c in wanted)

    def _state(self, proprio_S: np.ndarray) -> tuple[float, ...]:
        """Proprioception in units of its bounds, -1 to 1, none without vla.proprio."""
        s = self.settings
        if not s.proprio:
            return ()
        if len(proprio_S) != s.proprio_dim:
            raise ConfigError(
                f"expected {s.proprio_dim} proprioception values, found {len(proprio_S)}; the policy was made for "
                "another robot or suite"
            )
        low, high = np.asarray(s.proprio_low), np.asarray(s.proprio_high)
        unit_S = 2 * (np.asarray(proprio_S, np.float64) - low) / np.maximum(high - low, 1e-9) - 1
        return tuple(unit_S.tolist())

    @staticmethod
    def _distinct(prompts: Sequence[Any]) -> tuple[list[Any], list[int]]:
        """The different ones among `prompts`, and which of them each prompt is."""
        known: dict[str, tuple[int, Any]] = {}
        owner = [known.setdefault(p.fingerprint, (len(known), p))[0] for p in prompts]
        return [p for _, p in known.values()], owner

    @staticmethod
    def _padded(prompts: Sequence[Any]) -> tuple[torch.Tensor, torch.Tensor]:
        """Their words (U, L), filled up at the end, and which are there."""
        longest = max(len(p.ids_P) for p in prompts)
        ids = torch.zeros(len(prompts), longest, dtype=torch.long)
        words = torch.zeros(len(prompts), longest, dtype=torch.bool)
        for n, p in enumerate(prompts):
            ids[n, : len(p.ids_P)], words[n, : len(p.ids_P)] = p.ids_P, True
        return ids, words

    # files

    def _save(self, folder: str | Path, tensors: Mapping[str, torch.Tensor]) -> Path:
        """model.safetensors, config.json, vla.json and a critic's file; returns the folder."""
        from safetensors.torch import save_file

        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        weights = {n: t.contiguous().cpu() for n, t in tensors.items()}
        shared = {t.data_ptr(): n for n, t in reversed(weights.items())}
        kept = {n: t if shared[t.data_ptr()] == n else t.clone() for n, t in weights.items()}
        save_file(kept, str(folder / "model.safetensors"), metadata={"format": "pt"})
        (folder / "config.json").write_text(
            json.dumps(self._files, indent=1) + "\n", encoding="utf-8"
        )
        described = {
            "format": 1,
            "vla": self.settings.model_dump(mode="json"),
            "action": self.codec.to_dict(),
        }
        (folder / "vla.json").write_text(json.dumps(described, indent=1) + "\n", encoding="utf-8")
        if self.value_head is not None:
            self.value_head.save(folder)
        return folder
