"""Off-policy rules of an asynchronous schedule: which rollouts may start, which are trained next, how old data is weighed.

Rollouts are numbered in the order they start. Rollout i is trained in step i // batch, whenever it finishes: no rollout is
preferred for being short, and none is thrown away for being long. A start is allowed only when that step cannot come more
than `bound` versions after it, so staleness is limited by admission, not by discarding (which keeps short episodes and
loses long ones). Never blocks for good: all rollouts of step v may start as soon as version v exists.

    while start_capacity(started, version, batch, bound) > 0: start(started); started += 1
    if (numbers := next_batch(trained, finished, batch)) is not None: train(numbers); trained += batch; version += 1

Try: python -c "from mmrl.algorithms import start_capacity; print(start_capacity(0, version=0, batch=8, bound=1))"
"""
from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from mmrl.algorithms.objective import truncated_importance
from mmrl.errors import ConfigError, did_you_mean

__all__ = ["Correction", "CorrectionSettings", "admit", "behave_weights", "next_batch", "start_capacity"]

Correction = Literal["none", "truncate", "mask"]


def start_capacity(started: int, version: int, batch: int, bound: int) -> int:
    """How many more rollouts may start now, at least 0: (bound + version + 1) * batch - started.

    `started` counts all that ever started (a replacement of a failed rollout keeps its number and counts once); version
    counts optimizer steps. bound 0 is synchronous. AReaL's capacity rule and RLinf's throttle, with rollouts counted when
    they start instead of when they finish (AReaL: accepted + running).
    """
    if batch < 1 or bound < 0:
        raise ConfigError(f"expected batch at least 1 and a staleness bound at least 0, found {batch} and {bound}")
    return max(0, (bound + version + 1) * batch - started)


def next_batch(trained: int, finished: Collection[int], batch: int) -> range | None:
    """Numbers of the next `batch` rollouts in order of start once every one of them has finished, else None.

    First started, first trained: whether a rollout is trained, and when, does not depend on how long it took, so the
    lengths of a step's episodes are distributed as under its policies. Taking whatever finished first is not.
    """
    numbers = range(trained, trained + batch)
    return numbers if all(number in finished for number in numbers) else None


def admit(versions: Sequence[int] | int, current: int, bound: int) -> bool:
    """Whether data of these policy versions may be trained at version `current`: min(versions) >= current - bound (RLinf).

    With `start_capacity` and `next_batch` this always holds; check it, do not filter by it. Raises ConfigError for
    versions from the future, which only a wrong bookkeeping produces.
    """
    seen = [versions] if isinstance(versions, int) else list(versions)
    if not seen or max(seen) > current:
        raise ConfigError(f"expected policy versions up to the current one, {current}, found {seen[:8]}")
    return min(seen) >= current - bound


@dataclass(frozen=True, kw_only=True)
class CorrectionSettings:
    """How samples of an older policy are weighed by w = pi_proximal / pi_behaviour."""

    mode: Correction = "truncate"
    """'none': 1. 'truncate': min(w, threshold), see `truncated_importance`. 'mask': w, and 0 where it exceeds the threshold."""
    threshold: float = 2.0
    """RLinf's behave_weight_threshold."""

    def __post_init__(self) -> None:
        if self.mode not in get_args(Correction):
            raise ConfigError(f"expected off-policy correction none, truncate or mask, found {self.mode!r}."
                              f"{did_you_mean(self.mode, get_args(Correction))}")
        if not self.threshold > 0:
            raise ConfigError(f"expected a weight threshold above 0, found {self.threshold}; the usual value is 2")


def behave_weights(settings: CorrectionSettings, proximal_logp_N: Tensor, behaviour_logp_N: Tensor) -> tuple[Tensor, Tensor]:
    """Detached weights (N,) and which of them were masked (N,), for `policy_loss(weight_N=...)`.

    With old_logp_N = proximal log-probs this is decoupled PPO, L = -E[w * min(r A, clip(r) A)] (Hilton et al. 2022, arXiv
    2110.00641; AReaL; RLinf's asynchronous PPO masks w > threshold). Masked samples stay in the denominator, so that
    masking does not raise the weight of the others.
    """
    masked_N = torch.zeros_like(proximal_logp_N, dtype=torch.bool)
    if settings.mode == "none":
        return torch.ones_like(proximal_logp_N, dtype=torch.float32), masked_N
    weight_N = truncated_importance(proximal_logp_N, behaviour_logp_N, settings.threshold)
    if settings.mode == "mask":
        exact_N = (proximal_logp_N - behaviour_logp_N).detach().double()
        masked_N = exact_N > torch.tensor(settings.threshold, dtype=torch.float64).log()
        weight_N = weight_N.masked_fill(masked_N, 0.0)
    return weight_N, masked_N
