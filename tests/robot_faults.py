"""Simulators that misbehave, for tests; imported by the workers by name."""
from __future__ import annotations

import os

import numpy as np

from robotics.contract import InitialState, StepResult
from robotics.tiny import TinySimulator


class SometimesCrashing(TinySimulator):
    """Takes its process down in the first control step of every seventh episode it plays."""

    played = 0

    def reset(self, state: InitialState) -> None:
        SometimesCrashing.played += 1
        self.taken = 0
        super().reset(state)

    def step(self, action_A: np.ndarray) -> StepResult:
        self.taken += 1
        if SometimesCrashing.played % 7 == 3 and self.taken == 1:
            os._exit(3)
        return super().step(action_A)
