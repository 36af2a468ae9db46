"""Observations of a simulator as prompts: pictures of the cameras, the instruction, proprioception as action tokens.

    encode = ObservationEncoder(core, bins=256, settings=config.vla, action_ids=ids)
    prompt = encode(observation)

Legend: S proprioception values, P tokens of the prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from mmrl.errors import ConfigError
from mmrl.policy.encode import Prompt
from mmrl.policy.policy import Policy
from mmrl.robotics.config import VLAConfig
from mmrl.robotics.contract import Observation

__all__ = ["ObservationEncoder", "action_token"]

_MOST_TEMPLATES = 10_000


def action_token(index: int) -> str:
    """The vocabulary's name of bin `index`."""
    return f"<|action_{index:03d}|>"


class ObservationEncoder:
    """Observation -> Prompt. Texts are tokenised once per instruction and shape of the pictures.

    `action_ids`: ids of the `bins` action tokens, which also stand for proprioception values between settings.proprio_low and
    proprio_high.
    """

    def __init__(
        self, core: Policy, bins: int, settings: VLAConfig, action_ids: torch.Tensor
    ) -> None:
        self._core, self._bins, self._settings, self._action_ids = core, bins, settings, action_ids
        self._templates: dict[Any, Prompt] = {}

    def __call__(self, observation: Observation) -> Prompt:
        """The encoded prompt of an observation. Raises ConfigError for a camera or proprioception it lacks."""
        lacking = [c for c in self._settings.cameras if c not in observation.images]
        if lacking:
            raise ConfigError(
                f"expected pictures of cameras {', '.join(self._settings.cameras)}, found "
                f"{', '.join(observation.images)}; add them to env.cameras or drop them from vla.cameras"
            )
        visuals = tuple(
            self._core.encoder.visuals.frame(observation.images[c]) for c in self._settings.cameras
        )
        key = (observation.instruction, tuple(v.grid_thw for v in visuals))
        if key not in self._templates:
            if len(self._templates) >= _MOST_TEMPLATES:
                self._templates.clear()  # of a server's clients any number of instructions may come
            self._templates[key] = self._template(observation.instruction, visuals)
        template = self._templates[key]
        prompt = replace(template, visuals=visuals)
        if self._settings.proprio:
            prompt = replace(prompt, ids_P=self._with_proprio(template.ids_P, observation.proprio))
        return prompt

    def _template(self, instruction: str, visuals: Sequence[Any]) -> Prompt:
        text = self._settings.prompt.replace("{instruction}", instruction)
        if self._settings.proprio:
            text += " " + action_token(0) * self._settings.proprio_dim
        content = [{"type": "image"} for _ in visuals] + [{"type": "text", "text": text}]
        return self._core.encoder.prompt_of(
            [{"role": "user", "content": content}], visuals, f"instruction {instruction!r}"
        )

    def _with_proprio(self, ids_P: torch.Tensor, proprio_S: np.ndarray) -> torch.Tensor:
        s = self._settings
        if len(proprio_S) != s.proprio_dim:
            raise ConfigError(
                f"expected {s.proprio_dim} proprioception values, found {len(proprio_S)}; the policy was made for "
                "another robot or suite"
            )
        low, high = np.asarray(s.proprio_low), np.asarray(s.proprio_high)
        share = (np.asarray(proprio_S, np.float64) - low) / np.maximum(high - low, 1e-9)
        index_S = np.clip((share * self._bins).astype(int), 0, self._bins - 1)
        places = (ids_P == self._action_ids[0].cpu()).nonzero()[:, 0]
        assert len(places) == s.proprio_dim, "the instruction holds no action tokens"
        return ids_P.index_copy(0, places, self._action_ids.cpu()[torch.from_numpy(index_S)])
