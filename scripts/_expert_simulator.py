"""A simulator that plays itself: its scripted expert acts in the worker process that holds it.

    EnvSpec(EXPERT, "PickCube-v1", 80, 8, options={"of": "maniskill", "render_backend": "none"})

For scripts/check_experts.py. Imported in worker processes, so it stays light.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from mmrl.robotics.contract import (
    ActionSpace,
    EnvSpec,
    InitialState,
    Observation,
    Simulator,
    StepResult,
    make_simulator,
)

__all__ = ["EXPERT", "ExpertSimulator"]

EXPERT = "scripts._expert_simulator:ExpertSimulator"


class ExpertSimulator(Simulator):
    """The simulator options['of'], given the other options, in which the expert acts, options['noise'] added to what it does. The
    one number it gets as an action only lets a control step happen. Without options['draw'] pictures are black and
    proprioception is empty."""

    def __init__(self, spec: EnvSpec) -> None:
        super().__init__(spec)
        options = dict(spec.options)
        self._noise, self._draw = float(options.pop("noise", 0.0)), bool(options.pop("draw", False))
        self._inner = make_simulator(replace(spec, suite=str(options.pop("of")), options=options))
        self._expert: Any = None

    @property
    def action_space(self) -> ActionSpace:
        """One number, which is not used."""
        return ActionSpace((-1.0,), (1.0,), ("go",))

    @property
    def proprio_dim(self) -> int:
        """Of the simulator itself; 0 when nothing is drawn."""
        return self._inner.proprio_dim if self._draw else 0

    def reset(self, state: InitialState) -> None:
        """Start the episode, and an expert whose noise depends on the state."""
        self._inner.reset(state)
        self._expert = self._inner.expert(np.random.default_rng(state.index), self._noise)

    def step(self, action_A: np.ndarray) -> StepResult:
        """One control step of the expert."""
        execute, _ = self._expert()
        return self._inner.step(execute)

    def observe(self) -> Observation:
        """Black pictures, or the simulator's."""
        if self._draw:
            return self._inner.observe()
        black = np.zeros((self.spec.image_size, self.spec.image_size, 3), np.uint8)
        return Observation(dict.fromkeys(self.spec.cameras, black), np.zeros(0, np.float32), "")

    def close(self) -> None:
        """Close the simulator."""
        self._inner.close()

    def versions(self) -> dict[str, str]:
        """Of the simulator."""
        return self._inner.versions()
