"""The faulty simulator on Ray: option kill_host (a path): the first training episode to make this file kills its actor."""

from __future__ import annotations

import os
import signal
from dataclasses import replace

import numpy as np

from mmrl.robotics.contract import EnvSpec, InitialState, StepResult
from tests.robotics.faulty import FaultySimulator


class HostKiller(FaultySimulator):
    def __init__(self, spec: EnvSpec) -> None:
        self.kill_host = str(spec.options.get("kill_host", ""))
        super().__init__(
            replace(spec, options={k: v for k, v in spec.options.items() if k != "kill_host"})
        )
        self.spec = spec
        self.split = ""

    def reset(self, state: InitialState) -> None:
        self.split = state.split
        super().reset(state)

    def step(self, action_A: np.ndarray) -> StepResult:
        if self.kill_host and self.split == "train" and self.steps == 3:
            try:
                os.close(os.open(self.kill_host, os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                return super().step(action_A)
            os.kill(os.getppid(), signal.SIGKILL)
        return super().step(action_A)
