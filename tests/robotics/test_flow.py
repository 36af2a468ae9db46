"""Denoising chains have the densities that are claimed: against torch's distributions, histograms, and a change of variables."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mmrl.robotics import flow
from mmrl.robotics.config import FlowConfig

STEPS = 4


def _mixture_velocity(x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
    """The exact v(x, t) of data that are +1 or -1 with Gaussian width 0.2: E[noise - action | x]."""
    t = time[:, None, None]
    centres = torch.tensor([-1.0, 1.0], dtype=x.dtype)
    variance = t**2 + ((1 - t) * 0.2) ** 2
    gap = x[..., None] - (1 - t)[..., None] * centres
    weight = (-0.5 * gap**2 / variance[..., None]).softmax(-1)
    noise = t[..., None] / variance[..., None] * gap
    data = centres + (1 - t)[..., None] * 0.04 / variance[..., None] * gap
    return (weight * (noise - data)).sum(-1)


def _chains(settings: FlowConfig, count: int, seed: int = 0) -> torch.Tensor:
    steps = settings.denoising_steps
    noise = torch.randn(count, steps + 1, 1, 1, generator=torch.Generator().manual_seed(seed))
    everywhere = torch.ones(count, steps, dtype=torch.bool)

    def velocity(x: torch.Tensor, time: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        spread = torch.full_like(x, 0.1) + 0.02 * x.abs() if settings.noise == "learned" else None
        return _mixture_velocity(x, time), spread

    return flow.draw(velocity, noise, everywhere, settings, torch.tensor([True]))


def _log_prob(
    settings: FlowConfig, s: int, before: torch.Tensor, after: torch.Tensor
) -> torch.Tensor:
    """Of one step, by the module under test."""
    steps = settings.denoising_steps
    time = torch.full((len(before),), 1 - s / steps, dtype=before.dtype)
    v = _mixture_velocity(before, time)
    spread = 0.1 + 0.02 * before.abs() if settings.noise == "learned" else None
    level = settings.noise_level if settings.noise == "sde" else 0.0
    return flow.log_density(
        flow.transition(before, v, time, steps, level=level, spread=spread), after
    )


@pytest.mark.parametrize("noise", ["sde", "learned"])
def test_the_density_of_actions_is_the_integral_over_chains(noise: str) -> None:
    """p(action) from the claimed transition densities, integrated over the chain on a grid, against a histogram of drawn chains."""
    settings = FlowConfig(noise=noise, noisy_steps="all", denoising_steps=STEPS)
    grid = torch.linspace(-5, 5, 801, dtype=torch.double)
    width = float(grid[1] - grid[0])
    density = torch.exp(-0.5 * grid**2) / np.sqrt(2 * np.pi)
    for s in range(STEPS):
        before = grid[:, None].expand(-1, len(grid)).reshape(-1, 1, 1)
        after = grid[None, :].expand(len(grid), -1).reshape(-1, 1, 1)
        kernel = _log_prob(settings, s, before, after).exp().view(len(grid), len(grid))
        # each transition is a density
        inner = grid.abs() < 2
        torch.testing.assert_close(
            (kernel.sum(1) * width)[inner],
            torch.ones(int(inner.sum()), dtype=torch.double),
            atol=1e-3,
            rtol=0,
        )
        density = density @ kernel * width
    drawn = _chains(settings, 200_000)[:, -1, 0, 0].double()
    edges = torch.linspace(-2.5, 2.5, 41, dtype=torch.double)
    found = torch.histogram(drawn, edges).hist / len(drawn)
    total = torch.cumulative_trapezoid(density, grid)
    at = torch.from_numpy(np.interp(edges.numpy(), grid[1:].numpy(), total.numpy()))
    # five standard errors of a share, at most
    assert float((found - at.diff()).abs().max()) < 5 * np.sqrt(0.1 / len(drawn))


def test_sde_becomes_the_ode_with_many_steps() -> None:
    """Flow-SDE has the ODE's marginals in the limit: quantiles of the actions against the data's own."""
    settings = FlowConfig(noisy_steps="all", denoising_steps=200)
    drawn = _chains(settings, 20_000)[:, -1, 0, 0].sort().values
    rng = np.random.default_rng(1)
    data = np.sort(rng.choice([-1.0, 1.0], 20_000) + 0.2 * rng.standard_normal(20_000))
    assert float(np.abs(drawn.numpy() - data).mean()) < 0.05


def test_one_noisy_step_then_the_ode_changes_variables() -> None:
    """From the noisy point on the ODE is a map: the action's density is the step's, divided by the map's slope. Against drawn
    chains that begin with one noise."""
    settings, count = FlowConfig(denoising_steps=STEPS), 200_000
    noise = torch.randn(count, STEPS + 1, 1, 1, generator=torch.Generator().manual_seed(3))
    noise[:, 0] = 0.1
    noisy = torch.zeros(count, STEPS, dtype=torch.bool)
    noisy[:, 1] = True
    chain = flow.draw(
        lambda x, time: (_mixture_velocity(x, time), None),
        noise,
        noisy,
        settings,
        torch.tensor([True]),
    )
    start = chain[:1, 1].double()
    point = torch.linspace(-4, 4, 4001, dtype=torch.double).requires_grad_()
    action = point[:, None, None]
    for s in (2, 3):
        at = torch.full((len(point),), 1 - s / STEPS, dtype=torch.double)
        action = action - _mixture_velocity(action, at) / STEPS
    (slope,) = torch.autograd.grad(action.sum(), point)
    assert float(slope.min()) > 0  # one to one
    density = _log_prob(settings, 1, start.expand(len(point), 1, 1), point[:, None, None])
    density = (density.flatten().exp() / slope).detach()
    places = action.flatten().detach()
    total = torch.cumulative_trapezoid(density, places)
    drawn = chain[:, -1].flatten().double().sort().values
    claimed = np.interp(drawn.numpy(), places[1:].numpy(), total.numpy())
    # Kolmogorov-Smirnov: 1.95 / sqrt(n) is exceeded once in a thousand
    assert float(np.abs(claimed - (np.arange(count) + 0.5) / count).max()) < 1.95 / np.sqrt(count)


def test_padding_and_quiet_steps_get_no_noise() -> None:
    settings = FlowConfig(denoising_steps=STEPS)
    noise = torch.randn(3, STEPS + 1, 2, 4)
    noisy = torch.zeros(3, STEPS, dtype=torch.bool)
    noisy[torch.arange(3), torch.tensor([0, 1, 3])] = True

    def velocity(x: torch.Tensor, time: torch.Tensor) -> tuple[torch.Tensor, None]:
        return 0.3 * x, None

    chain = flow.draw(velocity, noise, noisy, settings, torch.tensor([True, True, False, False]))
    ode = torch.stack([noise[:, 0] * (1 - 0.3 / STEPS) ** s for s in range(STEPS + 1)], 1)
    torch.testing.assert_close(chain[..., 2:], ode[..., 2:])
    moved = (chain[:, 1:] - chain[:, :-1] * (1 - 0.3 / STEPS))[..., :2].abs().amax((2, 3)) > 1e-4
    assert torch.equal(moved, noisy)
