"""Flow matching as a policy: denoising chains with noise in them, and their log-probs.

    chain = draw(velocity, noise_DSKA, noisy_DS, settings, free_A)        # S + 1 points, from noise to actions
    step = transition(x, velocity(x, time)[0], time, S, level=0.5)        # the Gaussian of one step
    logp = log_density(step, following)

A flow-matching head predicts v(x, t) = noise - action at x = t * noise + (1 - t) * action; from t = 1 (noise) to t = 0 (actions) in
S equal steps d. Solved as an ODE the actions have no density that could be computed cheaply. With noise in the steps each is a
Gaussian, and the chain's log-prob is the sum of those. With x0 = x - v t the predicted actions, x1 = x + v (1 - t) the predicted
noise and t' = t - d the next time:

    ODE         mean x0 (1 - t') + x1 t'                       no noise
    Flow-SDE    mean x0 (1 - t') + x1 (t' - s^2 d / (2 t))     std s sqrt(d), s = level sqrt(t / (1 - t)), 1 - t' in the first step
    Flow-Noise  the ODE's mean                                 std of a learned head, in [noise_low, noise_high]

Flow-SDE has the marginals of the ODE as d -> 0 (Flow-GRPO, arXiv 2505.05470; pi_RL, arXiv 2510.25889; RLinf); Flow-Noise is
ReinFlow's (arXiv 2505.22094). vla.flow.noisy_steps one puts Flow-SDE's noise into one step, drawn at random for each decision, and
solves the others as an ODE: what is left to learn is that step's Gaussian (pi_RL).

Legend: D decisions, S denoising steps, K action steps, A numbers of one, as wide as the model has them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from mmrl.robotics.config import FlowConfig

__all__ = [
    "FlowDecision",
    "Transition",
    "draw",
    "gaussian_entropy",
    "log_density",
    "noisy_steps",
    "transition",
]


@dataclass(frozen=True, eq=False)
class FlowDecision:
    """A denoising chain, (S + 1, K, A) float32: the noise it began with, each step's result, at last the actions. `noisy`: the
    steps (from 0) whose results were drawn; the others follow from them."""

    chain: np.ndarray
    noisy: tuple[int, ...]


@dataclass(frozen=True)
class Transition:
    """Mean and standard deviation of a step's result."""

    mean: torch.Tensor
    std: torch.Tensor


def transition(
    x: torch.Tensor,
    velocity: torch.Tensor,
    time: torch.Tensor,
    steps: int,
    *,
    level: float = 0.0,
    spread: torch.Tensor | None = None,
) -> Transition:
    """The Gaussian of the step from `time` (n,) to time - 1 / steps, of points (n, K, A).

    `level` above 0: Flow-SDE; `spread` (n, K, A): Flow-Noise with these standard deviations; neither: the ODE, std 0."""
    t, d = time[:, None, None], 1.0 / steps
    after = t - d
    data, noise = x - velocity * t, x + velocity * (1 - t)
    if spread is not None:
        return Transition(data * (1 - after) + noise * after, spread)
    if level == 0.0:
        mean = data * (1 - after) + noise * after
        return Transition(mean, torch.zeros_like(mean))
    # at t = 1 the noise would be infinite: the first step takes 1 - t of its end
    left = torch.where(1 - t < d / 2, 1 - after, 1 - t)
    variance = level**2 * t / left
    mean = data * (1 - after) + noise * (after - variance * d / (2 * t))
    return Transition(mean, (variance * d).sqrt().expand_as(mean))


def log_density(found: Transition, value: torch.Tensor) -> torch.Tensor:
    """Of the numbers of `value` under the transition's Gaussian, nats."""
    z = (value - found.mean) / found.std
    return -0.5 * z.square() - found.std.log() - 0.5 * math.log(2 * math.pi)


def gaussian_entropy(found: Transition) -> torch.Tensor:
    """Of each number, nats."""
    return found.std.log() + 0.5 * (1 + math.log(2 * math.pi))


def noisy_steps(settings: FlowConfig, rng: np.random.Generator) -> tuple[int, ...]:
    """The steps of a decision that get noise."""
    if settings.noise == "sde" and settings.noisy_steps == "one":
        return (int(rng.integers(settings.denoising_steps)),)
    return tuple(range(settings.denoising_steps))


def draw(
    velocity: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor | None]],
    noise_DSKA: torch.Tensor,
    noisy_DS: torch.Tensor,
    settings: FlowConfig,
    free_A: torch.Tensor,
) -> torch.Tensor:
    """Chains (D, S + 1, K, A). `velocity(x, time)` gives v and, for Flow-Noise, the standard deviations; noise_DSKA (S + 1 of them:
    the first is the chain's beginning) is standard normal; `noisy_DS` bool says which steps get it, `free_A` which numbers of an
    action are the robot's: padding is never noisy."""
    steps = settings.denoising_steps
    x = noise_DSKA[:, 0]
    chain = [x]
    for s in range(steps):
        time = torch.full((len(x),), 1.0 - s / steps, device=x.device)
        v, spread = velocity(x, time)
        plain = transition(x, v, time, steps)
        noisy = transition(
            x,
            v,
            time,
            steps,
            level=settings.noise_level if settings.noise == "sde" else 0.0,
            spread=spread,
        )
        drawn = noisy.mean + noisy.std * noise_DSKA[:, s + 1]
        x = torch.where(noisy_DS[:, s, None, None] & free_A, drawn, plain.mean)
        chain.append(x)
    return torch.stack(chain, 1)
