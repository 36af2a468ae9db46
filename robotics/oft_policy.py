"""A policy that acts as OpenVLA-OFT: action tokens of a whole chunk, from one forward pass without a mask of what comes later.

    policy = load_vla(config)                       # model.path: OpenVLA-OFT in its authors' files, or mmrl's
    outputs = policy.act(observations, keys)

Log-probs are over the action tokens alone (SimpleVLA-RL, RLinf); a critic reads the hidden state that predicts the first of them.

Legend: D decisions, U different prompts, N tokens of a decision, L words, H hidden width; third axis of logits: bins.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mmrl.policy.policy import Evaluated
from mmrl.robotics.acting import ActingPolicy, ActionOutput, Cloned
from mmrl.robotics.contract import Observation
from mmrl.robotics.module_policy import ModulePolicy, SeenPrompt
from mmrl.robotics.oft import OpenVLAOFT
from mmrl.robotics.openvla_server import picture, prompt_of
from mmrl.rollout.sampling import choose, row_noise

__all__ = ["OFTPolicy"]

_EMPTY = 29871  # Llama's token for nothing, which stands behind every prompt of OpenVLA
# means and standard deviations of preprocessor_config.json: ImageNet's in 16 bits for DINOv2, halves for SigLIP
_MEAN = torch.tensor([0.484375, 0.455078125, 0.40625, 0.5, 0.5, 0.5])[:, None, None]
_STD = torch.tensor([0.228515625, 0.2236328125, 0.224609375, 0.5, 0.5, 0.5])[:, None, None]


class OFTPolicy(ModulePolicy):
    """An ActingPolicy with OpenVLA-OFT's discrete head."""

    _model: OpenVLAOFT

    # observations

    def prompt(self, observation: Observation) -> SeenPrompt:
        """See ActingPolicy."""
        pictures = self._shown(observation)
        state = tuple(np.clip(self._state(observation.proprio), -1, 1).tolist())
        words = self.settings.prompt.replace("{instruction}", observation.instruction)
        return self._prompt_of(self._ids(words), pictures, state)

    def _ids(self, words: str) -> torch.Tensor:
        """The prompt's tokens."""
        if words not in self._words:
            ids = self.tokenizer(prompt_of(words), add_special_tokens=True)["input_ids"]
            if ids[-1] != _EMPTY and len(self.tokenizer) > _EMPTY and self._model.is_llama2:
                ids = [*ids, _EMPTY]
            return self._known_words(words, torch.tensor(ids))
        return self._words[words]

    def _prompt_of(
        self, ids_L: torch.Tensor, pictures: tuple[np.ndarray, ...], state: tuple[float, ...]
    ) -> SeenPrompt:
        tokens = len(pictures) * self._model.patches + len(ids_L) + bool(state)
        nothing = torch.zeros_like(ids_L)
        return SeenPrompt(
            ids_L, nothing, nothing.expand(3, -1), len(ids_L), (), pictures, state, tokens
        )

    def _pixels(self, shown: np.ndarray) -> torch.Tensor:
        """(6, side, side): one picture for both towers, as OpenVLA-OFT's evaluation prepares it."""
        x = torch.from_numpy(picture(shown, self._model.shape.towers[0].side))
        x = x.permute(2, 0, 1).float() / 255
        return (torch.cat((x, x)) - _MEAN) / _STD

    def _hidden(self, prompts: Sequence[SeenPrompt]) -> torch.Tensor:
        """(U, N, H)."""
        ids, words = (x.to(self._device) for x in self._padded(prompts))
        pixels = torch.stack([torch.stack([self._pixels(x) for x in p.pictures]) for p in prompts])
        state = None
        if self._model.proprio_projector is not None:
            numbers = self._model.shape.proprio_dim
            state = torch.tensor([p.state or (0.0,) * numbers for p in prompts]).to(self._device)
        with self._autocasting():
            return self._model(pixels.to(self._device), ids, words, self.tokens_per_decision, state)

    # decisions

    def evaluate(
        self,
        prompts: Sequence[Any],
        decisions: Sequence[Any],
        temperature: float = 1.0,
        *,
        entropy_gradient: bool = False,
        detach_values: bool = False,
    ) -> Evaluated:
        """See ActingPolicy; `decisions` are bins (N,)."""
        chosen, owner_D = self._distinct(prompts)
        owner = torch.tensor(owner_D, device=self._device)
        hidden_UNH = self._hidden(chosen)
        first_UH = hidden_UNH[:, 0].detach() if detach_values else hidden_UNH[:, 0]
        logps_DNV = (self._model.logits(hidden_UNH) / temperature).log_softmax(-1)[owner]
        tokens = torch.tensor([list(t) for t in decisions], device=self._device)
        logp_DN = logps_DNV.gather(-1, tokens[..., None])[..., 0]
        with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
            entropy_DN = -(logps_DNV.exp() * logps_DNV).sum(-1)
        values_DV = self._values(first_UH)[owner]
        packed = sum(p.length + self.tokens_per_decision for p in chosen)
        return Evaluated(logp_DN.flatten(), entropy_DN.flatten(), values_DV.flatten(), packed)

    @torch.no_grad()
    def values(self, prompts: Sequence[Any]) -> list[float]:
        """See ActingPolicy."""
        if self.value_head is None or not prompts:
            return [0.0] * len(prompts)
        chosen, owner = self._distinct(prompts)
        return self._values(self._hidden(chosen)[:, 0])[owner][:, 0].tolist()

    @torch.no_grad()
    def act(
        self,
        observations: Sequence[Observation],
        keys: Sequence[tuple[int, ...]],
        *,
        greedy: bool = False,
        temperature: float = 1.0,
    ) -> list[ActionOutput]:
        """See ActingPolicy."""
        if not observations:
            return []
        prompts = [self.prompt(o) for o in observations]
        chosen, owner = self._distinct(prompts)
        hidden_UNH = self._hidden(chosen)
        logits_UNV = self._model.logits(hidden_UNH) / temperature
        logps_UNV = logits_UNV.log_softmax(-1)
        values_UV = self._values(hidden_UNH[:, 0]).tolist()
        outputs = []
        for prompt, u, key in zip(prompts, owner, keys, strict=True):
            noise = None
            if not greedy:
                noise = row_noise(key, 1, self.tokens_per_decision)[0].to(self._device)
            token_N = choose(logits_UNV[u], noise)
            logp_N = logps_UNV[u].gather(-1, token_N[:, None])[:, 0]
            found = tuple(token_N.tolist()), tuple(logp_N.tolist()), tuple(values_UV[u])
            outputs.append(ActionOutput(*found, prompt))
        return outputs

    def actions(self, output: ActionOutput) -> np.ndarray:
        """See ActingPolicy."""
        bins = np.asarray(output.tokens).reshape(self.codec.chunk, self.codec.dim)
        return self.codec.decode(bins)

    def idle_turn(self) -> tuple[SeenPrompt, tuple[int, ...]]:
        """See ActingPolicy."""
        side = self._model.shape.towers[0].side
        pictures = (np.zeros((side, side, 3), np.uint8),) * len(self.settings.cameras)
        prompt = self._prompt_of(torch.zeros(1, dtype=torch.long), pictures, ())
        return prompt, (0,) * self.tokens_per_decision

    # cloning

    def targets(self, actions_TA: np.ndarray, start: int) -> tuple[np.ndarray, np.ndarray]:
        """See ActingPolicy: bins."""
        bins_KA, valid_K = self.codec.targets(actions_TA, start)
        return bins_KA.reshape(-1), np.repeat(valid_K, self.codec.dim)

    def clone(
        self, prompts: Sequence[Any], targets_DN: Sequence[Any], keys: Sequence[tuple[int, ...]]
    ) -> Cloned:
        """See ActingPolicy: the negative log-likelihood; nothing is drawn."""
        found = self.evaluate(prompts, targets_DN)
        return Cloned(-found.logp_N, found.logp_N.detach() > np.log(0.5), found.values_M)

    # files

    def save(self, folder: str | Path) -> None:
        """config.json, model.safetensors by the original's names (without what no output depends on; the proprioception projector
        among them), the tokenizer, vla.json, a critic's."""
        folder = self._save(folder, self._model.state_dict())
        self.tokenizer.save_pretrained(folder)


# for type checkers
_CHECKED: type[ActingPolicy] = OFTPolicy
