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

import contextlib
import copy
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mmrl.algorithms import token_mask
from mmrl.errors import ConfigError
from mmrl.policy.encode import Prompt
from mmrl.policy.policy import Evaluated
from mmrl.policy.value_head import ValueHead
from mmrl.robotics import flow
from mmrl.robotics.acting import ActingPolicy, ActionOutput, Cloned
from mmrl.robotics.actions import ActionCodec
from mmrl.robotics.config import VLAConfig
from mmrl.robotics.contract import Observation
from mmrl.robotics.flow_model import FlowModel, Seen
from mmrl.types import Turn

__all__ = ["FlowPolicy", "FlowPrompt"]


@dataclass(frozen=True)
class FlowPrompt(Prompt):
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


class FlowPolicy:
    """An ActingPolicy with a flow-matching head. `files`: what is saved beside the weights, by name."""

    def __init__(
        self,
        model: FlowModel,
        tokenizer: Any,
        codec: ActionCodec,
        settings: VLAConfig,
        value_head: ValueHead | None = None,
        *,
        device: torch.device,
        autocast: torch.dtype | None = None,
        reference: FlowModel | None = None,
        files: Mapping[str, Any] | None = None,
    ) -> None:
        self._model, self.tokenizer, self.codec, self.settings = model, tokenizer, codec, settings
        self.value_head, self._reference, self._files = value_head, reference, dict(files or {})
        self._device, self._autocast = device, autocast
        self.tokens_per_decision = codec.tokens
        self.version, self.lockstep = 0, False
        self._words: dict[str, torch.Tensor] = {}
        self._rows = codec.chunk if model.causal else model.shape.chunk_size
        executed_R1 = torch.arange(self._rows, device=device)[:, None] < codec.chunk
        self._free_RW = executed_R1 & (
            torch.arange(model.shape.max_action_dim, device=device) < codec.dim
        )

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

    def full_replica(self, device: torch.device | None = None) -> FlowPolicy:
        """See Policy."""
        other = copy.copy(self)
        other._model, other.value_head, other._reference = (
            copy.deepcopy(self._model),
            copy.deepcopy(self.value_head),
            None,
        )
        return other

    def adopt_replica(self, replica: FlowPolicy) -> None:
        """See Policy."""
        self._model, self.value_head, self.lockstep = replica._model, replica.value_head, False

    @contextlib.contextmanager
    def reference(self) -> Iterator[FlowPolicy]:
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

    # observations

    def prompt(self, observation: Observation) -> FlowPrompt:
        """See ActingPolicy."""
        s = self.settings
        if lacking := [c for c in s.cameras if c not in observation.images]:
            raise ConfigError(
                f"expected pictures of cameras {', '.join(s.cameras)}, found {', '.join(observation.images)}; add "
                f"{', '.join(lacking)} to env.cameras or drop it from vla.cameras"
            )
        state = self._state(observation.proprio)
        text = self._model.text(s.prompt.replace("{instruction}", observation.instruction), state)
        pictures = tuple(observation.images[c] for c in s.cameras)
        return self._prompt_of(self._ids(text), pictures, state)

    def _ids(self, text: str) -> torch.Tensor:
        """Its tokens."""
        known = self._words.get(text)
        if known is None:
            known = torch.tensor(self.tokenizer(text, add_special_tokens=True)["input_ids"])
            if not self._model.state_is_text:  # else hardly any comes again
                self._words[text] = known
        return known

    def _prompt_of(
        self, ids_L: torch.Tensor, pictures: tuple[np.ndarray, ...], state: tuple[float, ...]
    ) -> FlowPrompt:
        model = self._model
        prefix = len(pictures) * model.picture_tokens + len(ids_L) + model.state_tokens
        nothing = torch.zeros_like(ids_L)
        return FlowPrompt(
            ids_L, nothing, nothing.expand(3, -1), len(ids_L), (), pictures, state, prefix
        )

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

    def _see(self, prompts: Sequence[FlowPrompt]) -> tuple[Seen, torch.Tensor]:
        """The different ones among `prompts`, encoded, and which of them each prompt is."""
        known: dict[str, tuple[int, FlowPrompt]] = {}
        owner = [known.setdefault(p.fingerprint, (len(known), p))[0] for p in prompts]
        chosen = [p for _, p in known.values()]
        longest = max(len(p.ids_P) for p in chosen)
        ids = torch.zeros(len(chosen), longest, dtype=torch.long)
        words, state = torch.zeros(len(chosen), longest, dtype=torch.bool), []
        for n, p in enumerate(chosen):
            ids[n, : len(p.ids_P)], words[n, : len(p.ids_P)] = p.ids_P, True
            state.append([*p.state, *[0.0] * (self._model.shape.max_state_dim - len(p.state))])
        pixels = torch.stack(
            [torch.stack([self._model.pixels(x) for x in p.pictures]) for p in chosen]
        )
        context = (
            contextlib.nullcontext()
            if self._autocast is None
            else torch.autocast(self._device.type, self._autocast, cache_enabled=False)
        )
        with context:
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

    def _values(self, read_UC: torch.Tensor) -> torch.Tensor:
        if self.value_head is None:
            return read_UC.new_zeros(len(read_UC), 1)
        return self.value_head(read_UC)

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

    def token_mask(self, turn: Turn) -> np.ndarray:
        """See ActingPolicy."""
        return np.array(token_mask(turn.valid, len(turn.token_ids), self.codec.dim))

    def idle_turn(self) -> tuple[FlowPrompt, flow.FlowDecision]:
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
        from safetensors.torch import save_file

        folder = Path(folder)
        (folder / "vlm").mkdir(parents=True, exist_ok=True)
        weights = {n: t.contiguous().cpu() for n, t in self._model.to_files().items()}
        shared = {t.data_ptr(): n for n, t in reversed(weights.items())}
        kept = {n: t if shared[t.data_ptr()] == n else t.clone() for n, t in weights.items()}
        save_file(kept, str(folder / "model.safetensors"), metadata={"format": "pt"})
        (folder / "config.json").write_text(
            json.dumps(self._files, indent=1) + "\n", encoding="utf-8"
        )
        self._model.config.save_pretrained(folder / "vlm")
        self.tokenizer.save_pretrained(folder / "vlm")
        described = {
            "format": 1,
            "vla": self.settings.model_dump(mode="json"),
            "action": self.codec.to_dict(),
        }
        (folder / "vla.json").write_text(json.dumps(described, indent=1) + "\n", encoding="utf-8")
        if self.value_head is not None:
            self.value_head.save(folder)


# for type checkers
_CHECKED: type[ActingPolicy] = FlowPolicy
