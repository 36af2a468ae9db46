"""Simulators that misbehave, for tests; imported by the workers by name."""

from __future__ import annotations

import contextlib
import os
import stat
import struct
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from mmrl.robotics.contract import EnvSpec, InitialState, StepResult
from mmrl.robotics.tiny import TinySimulator


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


class Babbling(TinySimulator):
    """Writes rubbish into its worker's pipe in its second control step, as a library that overwrites descriptors may."""

    def step(self, action_A: np.ndarray) -> StepResult:
        if self.steps == 1:
            # any number: a worker inherits its pipe under the number that it has in the process that made it
            for number in map(int, os.listdir("/proc/self/fd")):
                with contextlib.suppress(OSError):
                    if stat.S_ISSOCK(os.fstat(number).st_mode):
                        os.write(number, struct.pack("!i", 4) + b"abcd")
        return super().step(action_A)


class Warned(TinySimulator):
    """Writes five million bytes of warnings in its first control step, and in the third its last words."""

    def step(self, action_A: np.ndarray) -> StepResult:
        if self.steps == 0:
            os.write(2, b"careful\n" * 625_000)
        if self.steps == 2:
            os.write(2, b"these are my last words\n")
            os._exit(3)
        return super().step(action_A)


class Starting(TinySimulator):
    """Starts a program that runs on, writes its process id into the file that its options name, and hangs in its first step."""

    def __init__(self, spec: EnvSpec) -> None:
        super().__init__(replace(spec, options={}))
        self.spec, self.file = spec, Path(spec.options["file"])

    def step(self, action_A: np.ndarray) -> StepResult:
        other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        self.file.write_text(f"{other.pid}\n", encoding="ascii")
        time.sleep(600)
        return super().step(action_A)
