"""Sampling from logits with noise that belongs to the row, not to the batch.

Each row brings its own uniform numbers, drawn from a seed made of (run seed, step, sample ...), so the same completion
comes out whatever else is in the batch, on how many processes, and after a resume.

Legend: R rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

__all__ = ["choose", "keep_top", "noise_stream", "row_noise"]


def row_noise(key: Sequence[int], rows: int, length: int) -> torch.Tensor:
    """(rows, length) float64 uniforms in [0, 1) from a Philox-free PCG64 stream seeded by the integers of `key`."""
    return torch.from_numpy(
        np.random.default_rng([abs(int(k)) for k in key]).random((rows, length))
    )


def noise_stream(key: Sequence[int]) -> Callable[[], float]:
    """The numbers of row_noise(key, 1, n)[0], one per call: for rows whose length is known only when they end."""
    return np.random.default_rng([abs(int(k)) for k in key]).random


def keep_top(logits_RV: torch.Tensor, top_k: int, top_p: float) -> torch.Tensor:
    """-inf outside the top_k largest logits and outside the smallest set whose probability reaches top_p.

    0 and 1 switch them off; at least one token always stays. Nucleus sampling: Holtzman et al. 2019.
    """
    if top_k and top_k < logits_RV.shape[-1]:
        smallest_R1 = logits_RV.topk(top_k, -1).values[:, -1:]
        logits_RV = logits_RV.masked_fill(logits_RV < smallest_R1, float("-inf"))
    if top_p < 1:
        sorted_RV, order_RV = logits_RV.sort(-1, descending=True)
        p_RV = sorted_RV.softmax(-1)
        outside_RV = p_RV.cumsum(-1) - p_RV >= top_p
        logits_RV = logits_RV.masked_fill(
            outside_RV.scatter(-1, order_RV, outside_RV), float("-inf")
        )
    return logits_RV


def choose(logits_RV: torch.Tensor, uniform_R: torch.Tensor | None) -> torch.Tensor:
    """Token ids (R,): inverse-CDF sampling with one uniform per row, or the most likely token when `uniform_R` is None.

    The cumulative sum is taken in float64: in float32 a vocabulary of 150 000 loses rare tokens. A token of
    probability 0 is never returned.
    """
    if uniform_R is None:
        return logits_RV.argmax(-1)
    cdf_RV = logits_RV.double().softmax(-1).cumsum(-1)
    target_R1 = (uniform_R[:, None] * cdf_RV[:, -1:]).minimum(cdf_RV[:, -1:] * (1 - 1e-15))
    return torch.searchsorted(cdf_RV, target_R1, right=True)[:, 0].clamp_(
        max=logits_RV.shape[-1] - 1
    )
