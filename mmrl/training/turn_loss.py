"""The loss of a micro-batch of turns: what the policy, its reference and its critic say of them, and what each token weighs.

    losses = TurnLoss(config, policy, engine, critic)
    loss = losses.of(turns, result, first_pass=True, fresh=True)     # summed over tokens, not yet divided

Where the engine's forwards are collective, `idle` runs those of a micro-batch for a process that has no turns left.

Legend: N tokens of all turns of a micro-batch, M values of them (mmrl.policy.policy.Evaluated), D turns.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from mmrl.algorithms import (
    EntropyBonus,
    EntropySettings,
    ObjectiveSettings,
    policy_loss,
)
from mmrl.algorithms.offpolicy import OffPolicy
from mmrl.config import RunConfig
from mmrl.distributed.engines.base import TrainEngine
from mmrl.policy.encode import Prompt
from mmrl.policy.policy import Evaluated
from mmrl.training.critic import CriticLoss
from mmrl.training.sequences import TrainingTurn
from mmrl.training.update_result import UpdateResult

__all__ = ["TurnLoss", "objective_settings"]


def objective_settings(config: RunConfig) -> ObjectiveSettings:
    """The algorithm section as the loss wants it. Lengths are normalised by `token_weight`, over all turns of a rollout, whose
    turns may lie in several micro-batches."""
    a = config.algorithm
    return ObjectiveSettings(
        clip_low=a.clip_low,
        clip_high=a.clip_high,
        dual_clip=a.dual_clip,
        importance_sampling_level=a.importance_sampling_level,
        loss_aggregation="token_mean",
        kl_coef=a.kl.coef,
        kl_estimator=a.kl.estimator,
        offline=a.offline,
    )


class TurnLoss:
    """See the module. `step` (from 1) and what `entropy` adapts to are the learner's to keep."""

    def __init__(
        self, config: RunConfig, policy: Any, engine: TrainEngine, critic: CriticLoss | None
    ) -> None:
        self.config, self.policy, self.engine, self.critic = config, policy, engine, critic
        self.settings, self.offpolicy = objective_settings(config), OffPolicy(config)
        self.step = 0
        self._mixes = config.algorithm.offline.per_group > 0
        e = config.algorithm.entropy
        self.entropy = EntropyBonus(
            EntropySettings(
                coef=e.coef, target=e.target, delta=e.delta, low=e.coef_min, high=e.coef_max
            )
        )
        self._entropy_seen = [0.0, 0.0]  # sum and tokens of the optimizer step, this process

    @property
    def one_pass(self) -> bool:
        """Whether a step is one optimizer step."""
        return self.config.algorithm.epochs == self.config.algorithm.minibatches == 1

    def take_entropy(self) -> list[float]:
        """Sum of the entropies (nats) and number of the tokens since the last call, of this process."""
        seen, self._entropy_seen = self._entropy_seen, [0.0, 0.0]
        return seen

    @property
    def warming(self) -> bool:
        """Whether this step trains the critic alone."""
        return self.critic is not None and self.critic.warming_up(self.step)

    def of(
        self, turns: Sequence[TrainingTurn], result: UpdateResult, first_pass: bool, fresh: bool
    ) -> torch.Tensor:
        """The summed loss; what it counts goes into `result`."""
        reference_N, out = self._forward(
            [t.prompt for t in turns], [t.chosen for t in turns], result, experts=_experts(turns)
        )
        result.rerouted += out.rerouted
        columns = Columns.of(turns, out.logp_N.device)
        old_N, weight_N = self._old(turns, columns, out.logp_N.detach(), first_pass)
        total = torch.zeros((), device=out.logp_N.device)
        # left out, not multiplied by 0: 0 * inf is NaN, and a gradient of 0 still moves AdamW
        if not self.warming:
            names = sorted({t.source for t in turns})
            label_N = columns.per_turn([names.index(t.source) for t in turns])
            loss = policy_loss(
                self.settings,
                out.logp_N,
                old_N,
                columns.advantage_N,
                columns.turn_N,
                columns.in_loss_N,
                ref_logp_N=reference_N,
                weight_N=weight_N,
                scale_N=columns.scale_N,
                label_N=label_N,
                num_labels=len(names),
                unit_N=self._units(columns),
                offline_N=columns.offline_N if self._mixes else None,
                entropy_N=out.entropy_N,
                entropy_coef=self.entropy.coefficient,
            )
            total = loss.loss
            for name, stats in zip(names, loss.by_label, strict=True):
                result.sources[name].stats += stats
        if self.critic is not None:
            value = self.critic.loss(turns, out.values_M)
            total, result.value_stats = total + value.loss, result.value_stats + value.stats
        if self.entropy.adaptive and not self.warming:
            seen_M = out.entropy_N.detach()[columns.in_loss_N & ~columns.offline_N].double()
            self._entropy_seen = [
                self._entropy_seen[0] + float(seen_M.sum()),
                self._entropy_seen[1] + seen_M.numel(),
            ]
        if first_pass:
            self._observe(turns, columns, out, result, fresh)
        return total

    def _units(self, columns: Columns) -> torch.Tensor | None:
        """Which numbers of decisions have one ratio, (N,), where importance_sampling_level names such a level of policies that
        act."""
        level = self.settings.importance_sampling_level
        if level == "chunk":
            return columns.turn_N
        return columns.parts(self.policy.codec.dim) if level == "action" else None

    def _old(
        self, turns: Sequence[TrainingTurn], columns: Columns, logp_N: torch.Tensor, count: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Log-probs of the policy at the bottom of the ratio, and weights of tokens of other policies
        (mmrl.algorithms.offpolicy)."""
        if count:
            self.offpolicy.observe(columns.stale_N, columns.in_loss_N)
        if not self.offpolicy.corrects(any(t.stale for t in turns)):
            return columns.behaviour_N, None
        proximal_N = logp_N
        if not self.one_pass:
            proximal_N = columns.floats([t.proximal_N or () for t in turns])
        return self.offpolicy.correct(
            proximal_N,
            columns.behaviour_N,
            columns.stale_N,
            ~columns.offline_N,
            columns.in_loss_N,
            turn_N=columns.turn_N,
            count=count,
        )

    def idle(self, result: UpdateResult) -> torch.Tensor:
        """A loss of 0 by the forwards that `of` runs, for another process that has turns left. Its gradient, zeros, is of the
        same parameters."""
        prompt, tokens = self.policy.idle_turn()
        packed = result.packed_tokens
        _, out = self._forward([prompt], [tokens], result)
        result.packed_tokens = packed  # of turns alone
        parts = [] if self.warming else [out.logp_N.sum(), out.entropy_N.sum()]
        return torch.stack(parts + [out.values_M.sum()] * (self.critic is not None)).sum() * 0.0

    def _forward(
        self,
        prompts: Sequence[Prompt],
        chosen: Sequence[Any],
        result: UpdateResult,
        experts: dict[str, Any] | None = None,
    ) -> tuple[torch.Tensor | None, Evaluated]:
        """Log-probs of the reference, where there is a KL term, and what the policy and its critic say. `experts` (see `_experts`)
        are the policy's alone."""
        reference_N, warming = None, self.warming
        if self.settings.kl_coef > 0 and not warming:
            began = time.perf_counter()
            with torch.no_grad(), self.policy.reference() as reference:
                reference_N = self._evaluate(reference, prompts, chosen).logp_N
            result.logprobs_s += time.perf_counter() - began
        detached = warming or (self.critic is not None and self.critic.detached)
        out = self._evaluate(
            self.policy,
            prompts,
            chosen,
            detach_values=detached,
            entropy_gradient=self.entropy.coefficient > 0 and not warming,
            **(experts or {}),
        )
        result.packed_tokens += out.num_tokens
        return reference_N, out

    def _evaluate(
        self,
        policy: Any,
        prompts: Sequence[Prompt],
        chosen: Sequence[Any],
        **options: Any,
    ) -> Evaluated:
        found: Evaluated | None = None
        if self.engine.sequence is not None:
            options["sequence"] = self.engine.sequence

        def forward() -> tuple[torch.Tensor, ...]:
            nonlocal found
            out = policy.evaluate(prompts, chosen, self.config.rollout.temperature, **options)
            found = out
            return out.logp_N, out.entropy_N, out.values_M

        logp_N, entropy_N, values_M = self.engine.run(forward)
        assert found is not None, "the engine runs what it is given"
        return replace(found, logp_N=logp_N, entropy_N=entropy_N, values_M=values_M)

    def before_update(self, turns: Sequence[TrainingTurn]) -> list[TrainingTurn]:
        """The turns with their log-probs by the weights of now, their mean entropies, where turns are chosen by them
        (algorithm.turns.keep_entropy), and where algorithm.router_replay is R2, the experts that these weights choose; an idle
        micro-batch has none."""
        prompt, written = self.policy.idle_turn()
        notes = self.config.algorithm.router_replay.mode == "R2"
        with torch.no_grad():
            out = self._evaluate(
                self.policy,
                [t.prompt for t in turns] or [prompt],
                [t.chosen for t in turns] or [written],
                **({"note_experts": True} if notes else _experts(turns)),
            )
        if not turns:
            return []
        pieces = out.logp_N.split([len(t.tokens) for t in turns])
        experts = out.experts if notes else [t.experts for t in turns]
        entropies: list[float | None] = [None] * len(turns)
        if self.config.algorithm.turns.keep_entropy < 1:
            parts = out.entropy_N.double().cpu().split([len(t.tokens) for t in turns])
            entropies = [
                float(part[torch.from_numpy(np.asarray(t.mask_N, bool))].mean())
                if np.any(t.mask_N)
                else None
                for t, part in zip(turns, parts, strict=True)
            ]
        return [
            replace(t, proximal_N=tuple(piece.tolist()), experts=own, entropy=entropy)
            for t, piece, own, entropy in zip(turns, pieces, experts, entropies, strict=True)
        ]

    def predict_values(
        self, turns: Sequence[TrainingTurn], result: UpdateResult
    ) -> tuple[list[tuple[float, ...]], list[float]]:
        """The critic's values of each turn of a micro-batch, and after it; an idle one has none."""
        prompt, written = self.policy.idle_turn()
        sequence = self.engine.sequence
        options = _experts(turns) | ({} if sequence is None else {"sequence": sequence})

        def forward() -> tuple[torch.Tensor, ...]:
            found = self.policy.predict_values(
                [t.prompt for t in turns] or [prompt],
                [t.tokens for t in turns] or [written],
                **options,
            )
            result.packed_tokens += found.num_tokens if turns else 0
            return found.values_M, found.after_D

        with torch.no_grad():
            values_M, after_D = self.engine.run(forward)
        pieces = (
            values_M.split([len(t.tokens) if self.policy.values_tokens else 1 for t in turns])
            if turns
            else ()
        )
        return [tuple(piece.tolist()) for piece in pieces], after_D.tolist()[: len(turns)]

    def _observe(
        self,
        turns: Sequence[TrainingTurn],
        columns: Columns,
        out: Evaluated,
        result: UpdateResult,
        fresh: bool,
    ) -> None:
        """Entropy and, while the weights are still the rollout's, the sampler-trainer gap of each source, over the tokens that the
        policy wrote; sums in float64."""
        gap_N, entropy_N = (
            (out.logp_N.detach() - columns.behaviour_N).abs().double(),
            out.entropy_N.detach().double(),
        )
        own_N = columns.mask_N & ~columns.offline_N
        names = sorted({t.source for t in turns})
        source_N = columns.per_turn([names.index(t.source) for t in turns])
        for number, name in enumerate(names):
            entry, here_N = result.sources[name], own_N & (source_N == number)
            entry.entropy += float(entropy_N[here_N].sum())
            entry.entropy_tokens += float(here_N.sum())
            now_N = here_N & ~columns.stale_N  # only there are sampler and trainer the same weights
            if fresh and now_N.any():
                gap_M = gap_N[now_N]
                entry.gap_sum += float(gap_M.sum())
                entry.gap_max = max(entry.gap_max, float(gap_M.max()))
                entry.gap_tokens += gap_M.numel()


def _experts(turns: Sequence[TrainingTurn]) -> dict[str, Any]:
    """The argument of the policy's `evaluate` that replays the turns' experts, where any has them."""
    experts = [t.experts for t in turns]
    return {"experts": experts} if any(experts) else {}


@dataclass(frozen=True)
class Columns:
    """What the tokens of a micro-batch bring along, all (N,); `turn_N` numbers their turns."""

    device: torch.device
    sizes: torch.Tensor
    turn_N: torch.Tensor
    mask_N: torch.Tensor
    in_loss_N: torch.Tensor
    offline_N: torch.Tensor
    stale_N: torch.Tensor
    scale_N: torch.Tensor
    advantage_N: torch.Tensor
    behaviour_N: torch.Tensor

    @classmethod
    def of(cls, turns: Sequence[TrainingTurn], device: torch.device) -> Columns:
        sizes = torch.tensor([len(t.tokens) for t in turns], device=device)

        def spread(values: Sequence[Any], dtype: torch.dtype) -> torch.Tensor:
            return torch.tensor(values, dtype=dtype, device=device).repeat_interleave(sizes)

        def column(values: Sequence[Any], dtype: torch.dtype) -> torch.Tensor:
            return torch.as_tensor(
                np.concatenate([np.asarray(v) for v in values]), dtype=dtype, device=device
            )

        mask_N = column([t.mask_N for t in turns], torch.bool)
        return cls(
            device,
            sizes,
            spread(range(len(turns)), torch.long),
            mask_N,
            mask_N & spread([t.in_loss for t in turns], torch.bool),
            spread([t.offline for t in turns], torch.bool),
            column(
                [
                    np.full(len(t.tokens), t.stale) if t.stale_N is None else t.stale_N
                    for t in turns
                ],
                torch.bool,
            ),
            spread([t.scale for t in turns], torch.float32),
            column([t.advantage_N for t in turns], torch.float32),
            column([t.logprobs for t in turns], torch.float32),
        )

    def per_turn(self, values: Sequence[int]) -> torch.Tensor:
        """A number of each turn, for its tokens."""
        return torch.tensor(values, device=self.device).repeat_interleave(self.sizes)

    def parts(self, size: int) -> torch.Tensor:
        """Numbers each `size` tokens that follow each other in a turn, (N,), over all turns."""
        begins = self.sizes.cumsum(0) - self.sizes
        place_N = torch.arange(len(self.turn_N), device=self.device) - begins[self.turn_N]
        return self.turn_N * int(self.sizes.max()) + place_N // size

    def floats(self, values: Sequence[Sequence[float]]) -> torch.Tensor:
        """Numbers of the tokens of each turn."""
        return torch.as_tensor(
            np.concatenate([np.asarray(v, np.float32) for v in values]), device=self.device
        )
