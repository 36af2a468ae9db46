"""Tokens whose log-probs at rollout are not those of the weights being trained: what is done about them, and what of it is counted.

Two kinds. Stale tokens were written with older weights (schedule.kind async, schedule.correction; or past successes of the
experience pool, algorithm.replay). Sampled ones were written by
another engine with the weights of now, whose kernels round differently (engine.rollout vllm; engine.vllm.correction). Either way
the old policy of the ratio becomes the trainer's own before the update, and the token counts w = trainer / sampler, bounded:
decoupled PPO, `mmrl.algorithms.behave_weights`. For tokens of the second kind that is truncated importance sampling.

Legend: N completion tokens.
"""

from __future__ import annotations

from collections import defaultdict

import torch

from mmrl.algorithms import CorrectionSettings, behave_weights
from mmrl.config import RunConfig
from mmrl.distributed.world import World

__all__ = ["OffPolicy"]

_KINDS = ("stale", "sampled")
_COUNTS = (
    "tokens",
    "stale",
    *(f"{kind}/{what}" for kind in _KINDS for what in ("tokens", "weight", "masked")),
)


class OffPolicy:
    """The corrections of a run and the counts of a step."""

    def __init__(self, config: RunConfig) -> None:
        s, v, pool = config.schedule, config.engine.vllm, config.algorithm.replay
        self.asynchronous, self.replays = s.kind == "async", pool.per_group > 0
        self.names = {
            "stale": "train/replay" if self.replays else "train/offpolicy",
            "sampled": "train/sampler",
        }
        other = config.engine.rollout == "vllm"
        self.settings = {
            # not both: runs with a pool are not asynchronous
            "stale": CorrectionSettings(mode="truncate", threshold=pool.cap)
            if self.replays
            else CorrectionSettings(
                mode=s.correction if self.asynchronous else "none",
                threshold=s.threshold,
                level=s.correction_level,
            ),
            "sampled": CorrectionSettings(
                mode=v.correction if other else "none", threshold=v.threshold
            ),
        }
        self._counts: dict[str, float] = defaultdict(float)

    @property
    def corrects_sampler(self) -> bool:
        """Whether every token of the policy's is corrected."""
        return self.settings["sampled"].mode != "none"

    def begin(self) -> None:
        """A step begins: nothing counted yet."""
        self._counts = defaultdict(float)

    def corrects(self, any_stale: bool) -> bool:
        """Whether tokens are corrected where there are stale ones, or none."""
        return self.corrects_sampler or (any_stale and self.settings["stale"].mode != "none")

    def correct(
        self,
        proximal_N: torch.Tensor,
        behaviour_N: torch.Tensor,
        stale_N: torch.Tensor,
        own_N: torch.Tensor,
        mask_N: torch.Tensor,
        *,
        turn_N: torch.Tensor | None = None,
        count: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Old log-probs and weights of tokens, of which `own_N` are the policy's and `mask_N` in the loss: where nothing is
        corrected those of the rollout, and 1. `turn_N` numbers their turns."""
        old_N, weight_N = behaviour_N, torch.ones_like(proximal_N, dtype=torch.float32)
        sampled_N = own_N if self.settings["stale"].mode == "none" else own_N & ~stale_N
        for kind, here_N in (("stale", stale_N), ("sampled", sampled_N)):
            if self.settings[kind].mode == "none":
                continue
            found_N, masked_N = behave_weights(
                self.settings[kind], proximal_N, behaviour_N, turn_N=turn_N, counted_N=mask_N
            )
            old_N, weight_N = (
                torch.where(here_N, proximal_N, old_N),
                torch.where(here_N, found_N, weight_N),
            )
            if count:
                counted_N = mask_N & here_N
                self._counts[f"{kind}/tokens"] += float(counted_N.sum())
                self._counts[f"{kind}/weight"] += float(weight_N[counted_N].sum())
                self._counts[f"{kind}/masked"] += float((masked_N & counted_N).sum())
        return old_N, weight_N

    def observe(self, stale_N: torch.Tensor, mask_N: torch.Tensor) -> None:
        """Count the tokens of a micro-batch."""
        self._counts["tokens"] += float(mask_N.sum())
        self._counts["stale"] += float((mask_N & stale_N).sum())

    def metrics(self, world: World | None = None) -> dict[str, float]:
        """Of async runs, and of those with a pool, the share of tokens that older weights wrote; of each kind that was corrected
        the mean weight and the share masked. Over all processes of `world`: collective."""
        found = {name: self._counts[name] for name in _COUNTS}
        if world is not None and (self.asynchronous or self.replays or self.corrects_sampler):
            found = dict(zip(_COUNTS, world.sum(list(found.values())), strict=True))
        shares = (
            {f"{self.names['stale']}/share": found["stale"] / max(found["tokens"], 1.0)}
            if self.asynchronous or self.replays
            else {}
        )
        for kind, name in self.names.items():
            if tokens := found[f"{kind}/tokens"]:
                shares |= {
                    f"{name}/weight": found[f"{kind}/weight"] / tokens,
                    f"{name}/masked": found[f"{kind}/masked"] / tokens,
                }
        return shares
