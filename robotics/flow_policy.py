"""A policy that acts by flow matching: SmolVLA, pi0 or pi0.5 with the noise that gives its decisions log-probs.

    policy = load_vla(config)                       # model.path: a policy of lerobot, openpi or mmrl
    outputs = policy.act(observations, keys)        # chains from noise to actions, with the log-probs of their noisy steps

What a decision is, and its log-prob, is mmrl.robotics.flow's; vla.flow of the configuration says which noise. Where actions are
causal (SmolVLA), the action.chunk steps that are executed do not depend on the rest of chunk_size, which is not computed; else all
are. Steps that are not executed, and numbers that only fill up max_action_dim, are never noisy and count in no log-prob. Greedy:
the ODE, from noise that belongs to the key.

Legend: D decisions, U different prompts, S denoising steps, K action steps that are executed, R that are computed, A action
dimensions, W max_action_dim, N = K * A.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mmrl.errors import ConfigError
from mmrl.policy.policy import Evaluated
from mmrl.robotics import flow
from mmrl.robotics.acting import ActingPolicy, ActionOutput, Cloned
from mmrl.robotics.contract import Observation
from mmrl.robotics.flow_model import FlowModel, Seen
from mmrl.robotics.module_policy import ModulePolicy, SeenPrompt

__all__ = ["FlowPolicy"]


class FlowPolicy(ModulePolicy):
    """An ActingPolicy with a flow-matching head."""

    _model: FlowModel

    def __init__(self, model: FlowModel, *arguments: Any, **options: Any) -> None:
        super().__init__(model, *arguments, **options)
        codec, device = self.codec, self._device
        self._rows = codec.chunk if model.causal else model.shape.chunk_size
        executed_R1 = torch.arange(self._rows, device=device)[:, None] < codec.chunk
        self._free_RW = executed_R1 & (
            torch.arange(model.shape.max_action_dim, device=device) < codec.dim
        )

    # observations

    def prompt(self, observation: Observation) -> SeenPrompt:
        """See ActingPolicy."""
        pictures = self._shown(observation)
        state = self._state(observation.proprio)
        words = self.settings.prompt.replace("{instruction}", observation.instruction)
        text = self._model.text(words, state)
        return self._prompt_of(self._ids(text), pictures, state)

    def _ids(self, text: str) -> torch.Tensor:
        """Its tokens."""
        known = self._words.get(text)
        if known is None:
            known = torch.tensor(self.tokenizer(text, add_special_tokens=True)["input_ids"])
            if not self._model.state_is_text:  # else hardly any comes again
                self._known_words(text, known)
        return known

    def _prompt_of(
        self, ids_L: torch.Tensor, pictures: tuple[np.ndarray, ...], state: tuple[float, ...]
    ) -> SeenPrompt:
        model = self._model
        prefix = len(pictures) * model.picture_tokens + len(ids_L) + model.state_tokens
        nothing = torch.zeros_like(ids_L)
        return SeenPrompt(
            ids_L, nothing, nothing.expand(3, -1), len(ids_L), (), pictures, state, prefix
        )

    def _see(self, prompts: Sequence[SeenPrompt]) -> tuple[Seen, torch.Tensor]:
        """The different ones among `prompts`, encoded, and which of them each prompt is."""
        chosen, owner = self._distinct(prompts)
        ids, words = self._padded(chosen)
        wide = self._model.shape.max_state_dim
        state = [[*p.state, *[0.0] * (wide - len(p.state))] for p in chosen]
        pixels = torch.stack(
            [torch.stack([self._model.pixels(x) for x in p.pictures]) for p in chosen]
        )
        with self._autocasting():
            seen = self._model.see(
                *(x.to(self._device) for x in (pixels, ids, words, torch.tensor(state)))
            )
        # the suffix is computed in fp32: rounded to 16 bits, log-ratios of a chunk move by hundredths
        return seen.float(), torch.tensor(owner, device=self._device)

    # decisions

    def _velocity(
        self, seen: Seen, x: torch.Tensor, time: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """v(x, t), and with vla.flow.noise learned the standard deviations of the step."""
        hidden = self._model.suffix(seen, x, time).float()
        return self._model.action_out_proj(hidden), self._spread(hidden)

    def _spread(self, hidden: torch.Tensor) -> torch.Tensor | None:
        f = self.settings.flow
        if f.noise != "learned":
            return None
        assert self._model.noise_head is not None, "made with the policy"
        share = (self._model.noise_head(hidden).tanh() + 1) / 2
        # between the logarithms of the variances (ReinFlow)
        low, high = np.log(f.noise_low), np.log(f.noise_high)
        return (low + share * (high - low)).exp()

    def evaluate(
        self,
        prompts: Sequence[Any],
        decisions: Sequence[Any],
        temperature: float = 1.0,
        *,
        entropy_gradient: bool = False,
        detach_values: bool = False,
    ) -> Evaluated:
        """See ActingPolicy; `decisions` are FlowDecision. There is no temperature but 1."""
        seen, owner_D = self._see(prompts)
        logp_DN, entropy_DN = self._scores(seen, owner_D, decisions)
        read_UC = seen.critic_DC.detach() if detach_values else seen.critic_DC
        values_D = self._values(read_UC)[owner_D]
        if not entropy_gradient:
            entropy_DN = entropy_DN.detach()
        return Evaluated(
            logp_DN.flatten(),
            entropy_DN.flatten(),
            values_D.flatten(),
            sum(p.length for p in prompts),
        )

    def _scores(
        self, seen: Seen, owner_D: torch.Tensor, decisions: Sequence[flow.FlowDecision]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probs and entropies of the numbers of decisions (D, N): over noisy steps their sum, or with vla.flow.logprob mean
        their mean."""
        f, steps = self.settings.flow, self.settings.flow.denoising_steps
        rows = [(d, s) for d, decision in enumerate(decisions) for s in decision.noisy]
        of = torch.tensor([d for d, _ in rows], dtype=torch.long, device=self._device)
        points = np.stack([decisions[d].chain[s : s + 2] for d, s in rows])
        before, after = torch.from_numpy(points).to(self._device).unbind(1)
        time = torch.tensor([1.0 - s / steps for _, s in rows], device=self._device)
        v, spread = self._velocity(seen.at(owner_D[of]), before, time)
        found = flow.transition(
            before, v, time, steps, level=f.noise_level if f.noise == "sde" else 0.0, spread=spread
        )
        share = 1.0 / len(decisions[0].noisy) if f.logprob == "mean" else 1.0
        logp, entropy = (
            x[:, : self.codec.chunk, : self.codec.dim].flatten(1) * share
            for x in (flow.log_density(found, after), flow.gaussian_entropy(found))
        )
        empty = logp.new_zeros(len(decisions), self.tokens_per_decision)
        return empty.index_add(0, of, logp), empty.index_add(0, of, entropy)

    @torch.no_grad()
    def values(self, prompts: Sequence[Any]) -> list[float]:
        """See ActingPolicy."""
        if self.value_head is None or not prompts:
            return [0.0] * len(prompts)
        seen, owner_D = self._see(prompts)
        return self._values(seen.critic_DC)[owner_D][:, 0].tolist()

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
        f, shape = self.settings.flow, self._model.shape
        prompts = [self.prompt(o) for o in observations]
        seen, owner_D = self._see(prompts)
        rngs = [np.random.default_rng([abs(int(k)) for k in key]) for key in keys]
        noisy = [() if greedy else flow.noisy_steps(f, rng) for rng in rngs]
        size = (f.denoising_steps + 1, self._rows, shape.max_action_dim)
        noise = torch.from_numpy(np.stack([r.standard_normal(size, np.float32) for r in rngs]))
        steps_DS = torch.tensor([[s in n for s in range(f.denoising_steps)] for n in noisy])
        mine = seen.at(owner_D)
        chain = flow.draw(
            lambda x, time: self._velocity(mine, x, time),
            noise.to(self._device),
            steps_DS.to(self._device),
            f,
            self._free_RW,
        ).cpu()
        decisions = [flow.FlowDecision(c, n) for c, n in zip(chain.numpy(), noisy, strict=True)]
        unit_DKA = chain[:, -1, : self.codec.chunk, : self.codec.dim]
        # times 0: NaN stays NaN, for those who check
        logp_DN = 0.0 * unit_DKA.flatten(1) if greedy else self._scores(seen, owner_D, decisions)[0]
        values = self._values(seen.critic_DC)[owner_D].tolist()
        return [
            ActionOutput(self._bins(u), tuple(lp), tuple(v), p, d)
            for u, lp, v, p, d in zip(
                unit_DKA.double().numpy(), logp_DN.tolist(), values, prompts, decisions, strict=True
            )
        ]

    def _bins(self, unit_KA: np.ndarray) -> tuple[int, ...]:
        """The nearest bins, for people who read rollouts."""
        low, high = self.codec.bounds()
        values = np.nan_to_num(0.5 * (unit_KA + 1) * (high - low) + low)
        return tuple(self.codec.encode(values, executed=False).flatten().tolist())

    def actions(self, output: ActionOutput) -> np.ndarray:
        """See ActingPolicy."""
        chain: np.ndarray = output.decision.chain
        executed = chain[-1, : self.codec.chunk, : self.codec.dim]
        return self.codec.from_unit(executed.astype(np.float64))

    def idle_turn(self) -> tuple[SeenPrompt, flow.FlowDecision]:
        """See ActingPolicy."""
        width, height = self._model.picture_size
        pictures = (np.zeros((height, width, 3), np.uint8),) * len(self.settings.cameras)
        prompt = self._prompt_of(torch.zeros(1, dtype=torch.long), pictures, ())
        size = (
            self.settings.flow.denoising_steps + 1,
            self._rows,
            self._model.shape.max_action_dim,
        )
        chain = np.zeros(size)
        return prompt, flow.FlowDecision(chain.astype(np.float32), (0,))

    # cloning

    def targets(self, actions_TA: np.ndarray, start: int) -> tuple[np.ndarray, np.ndarray]:
        """See ActingPolicy: numbers in units of the action's bounds."""
        unit_KA, valid_K = self.codec.unit_targets(actions_TA, start)
        return unit_KA.reshape(-1), np.repeat(valid_K, self.codec.dim)

    def clone(
        self, prompts: Sequence[Any], targets_DN: Sequence[Any], keys: Sequence[tuple[int, ...]]
    ) -> Cloned:
        """See ActingPolicy: flow matching at a time drawn from Beta(1.5, 1), as these models were trained. Raises ConfigError where
        not all actions that are computed are known."""
        if self._rows != self.codec.chunk:
            raise ConfigError(
                f"{self._model.name} sees all of its chunk_size {self._rows} actions, a demonstrated decision has action.chunk "
                f"{self.codec.chunk}: make them equal (chunk_size in config.json; no weight depends on it)"
            )
        seen, owner_D = self._see(prompts)
        shape, dim = (self.codec.chunk, self._model.shape.max_action_dim), self.codec.dim
        rngs = [np.random.default_rng([abs(int(k)) for k in key]) for key in keys]
        time_D = torch.tensor([r.beta(1.5, 1.0) * 0.999 + 0.001 for r in rngs]).float()
        noise = torch.from_numpy(np.stack([r.standard_normal(shape, np.float32) for r in rngs]))
        action = torch.zeros_like(noise)
        action[..., :dim] = torch.tensor(np.array(targets_DN), dtype=torch.float32).view(
            -1, self.codec.chunk, dim
        )
        noise, action, time_D = (x.to(self._device) for x in (noise, action, time_D))
        t = time_D[:, None, None]
        v, _ = self._velocity(seen.at(owner_D), t * noise + (1 - t) * action, time_D)
        loss_N = (noise - action - v)[..., :dim].square().flatten()
        return Cloned(
            loss_N, loss_N.detach() < 0.25, self._values(seen.critic_DC)[owner_D].flatten()
        )

    # files

    def save(self, folder: str | Path) -> None:
        """The original's files (config.json, model.safetensors), vlm/ (configuration and tokenizer), vla.json, a critic's."""
        (Path(folder) / "vlm").mkdir(parents=True, exist_ok=True)
        folder = self._save(folder, self._model.to_files())
        self._model.config.save_pretrained(folder / "vlm")
        self.tokenizer.save_pretrained(folder / "vlm")


# for type checkers
_CHECKED: type[ActingPolicy] = FlowPolicy
