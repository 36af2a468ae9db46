"""How far two fp32 computations of the same thing may lie apart: derived from the arithmetic, not from one machine.

    assert_same(lambda: run(policy, packed), run(policy, padded), policy.model.parameters())

No fixed number is right: the distance grows with how strongly the model at hand amplifies (the kit's enlarged weights, an adapter
far from zero), and with the order of summation, which is another one in every kernel and instruction set. A backward stable
algorithm errs as if its weights had been rounded once more, so that is what is measured: every weight is moved to a neighbouring
fp32 number, at random, and what is computed with them compared. Over 21 seeds, three architectures, sdpa against eager, flash and
flex attention, under AVX-512 and AVX2 (ATEN_CPU_CAPABILITY, ONEDNN_MAX_CPU_ISA, MKL_ENABLE_INSTRUCTIONS), distances of log-probs
were at most 1.02 times that, of gradients 1.14 times, while the largest differences themselves varied from 1e-6 to 2.5e-5. A wrong
mask, position or scale costs hundreds of times more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch

__all__ = ["SLACK", "assert_same"]

SLACK = 4.0  # times what was measured above
Found = tuple[torch.Tensor, Mapping[str, torch.Tensor]]


def _apart(a: Found, b: Found) -> tuple[float, float]:
    """Euclidean distances of the log-probs and of all gradients."""
    assert a[0].shape == b[0].shape and a[1].keys() == b[1].keys() and a[1]
    squares = [(a[1][name].double() - b[1][name].double()).square().sum() for name in a[1]]
    return float((a[0].double() - b[0].double()).norm()), float(torch.stack(squares).sum().sqrt())


def assert_same(
    run: Callable[[], Found], found: Found, weights: Iterable[torch.nn.Parameter]
) -> None:
    """That `found`, log-probs and gradients, is what `run` computes with these `weights`, to fp32 rounding."""
    weights, draw = list(weights), torch.Generator().manual_seed(7)
    assert all(p.dtype == torch.float32 for p in weights)
    expected = run()
    kept = [p.detach().clone() for p in weights]
    try:
        with torch.no_grad():
            for p in weights:
                p.copy_(
                    torch.nextafter(
                        p,
                        torch.where(
                            torch.rand(p.shape, generator=draw) < 0.5, torch.inf, -torch.inf
                        ),
                    )
                )
        moved = _apart(run(), expected)
    finally:
        with torch.no_grad():
            for p, old in zip(weights, kept, strict=True):
                p.copy_(old)
    for what, distance, one in zip(
        ("log-probs", "gradients"), _apart(found, expected), moved, strict=True
    ):
        assert one > 0, f"the weights do not show in the {what}"
        assert distance <= SLACK * one, (
            f"{what} lie {distance:.3g} apart, {distance / one:.3g} roundings of the weights"
        )
