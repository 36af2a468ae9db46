"""The tiny simulator with faults, for tests and for scripts/torture_pool.py: suite 'tests.robotics.faulty:FaultySimulator'.

Options on top of the tiny ones: fault (of FAULTS or _WRONG), at (the control step that has it, 1 the first), states (indices of
the initial states that have it; default all), once (a path: the first episode that creates this file has it, no other),
builds (a path that counts how often a simulator of this spec was opened, by any process) and no_build (which of these, 1 the
first, fail as a driver without a GL context does), no_close (an episode that has a fault cannot be closed), chaos (probability
that an episode has a fault drawn from `faults` by its seed and by its row, which counts attempts).
"""

from __future__ import annotations

import math
import os
import signal
import sys
import time
from dataclasses import replace
from typing import Any

import numpy as np

from mmrl.errors import MissingExtraError
from mmrl.robotics.contract import EnvSpec, InitialState, Observation, StepResult
from mmrl.robotics.tiny import TinySimulator

FAULTS = (
    "kill",
    "exit",
    "hang",
    "raise",
    "memory",
    "kill_reset",
    "hang_reset",
    "raise_reset",
    "leak",
    "leak_object",
    "bad_picture",
    "noise",
    "raise_close",
)
_WRONG = ("nan_reward", "nan_state", "nan_state_reset", "endless", "goes_on")  # in no chaos
_OWN = {
    "fault": "",
    "at": 1,
    "states": None,
    "once": "",
    "chaos": 0.0,
    "faults": FAULTS,
    "leak_mib": 24,
    "builds": "",
    "no_build": (),
    "no_close": False,
}
_leaked: list[bytearray] = []


def chaos_fault(options: dict[str, Any], state: InitialState) -> str:
    """The fault of an episode under `chaos`, '' for none."""
    rng = np.random.default_rng([state.seed, state.row or 0, 77])
    return str(rng.choice(options["faults"])) if rng.random() < options["chaos"] else ""


def _filled(mebibytes: int) -> bytearray:
    return bytearray(os.urandom(1 << 20) * mebibytes)  # touched, so it is resident


class FaultySimulator(TinySimulator):
    def __init__(self, spec: EnvSpec) -> None:
        self.own = {**_OWN, **{k: v for k, v in spec.options.items() if k in _OWN}}
        assert self.own["fault"] in ("", *FAULTS, *_WRONG)
        super().__init__(
            replace(spec, options={k: v for k, v in spec.options.items() if k not in _OWN})
        )
        self.spec = spec
        self.fault = ""
        self.opened = False
        self.kept: list[bytearray] = []

    def _chosen(self, state: InitialState) -> str:
        if self.own["chaos"]:
            return chaos_fault(self.own, state)
        if self.own["states"] is not None and state.index not in self.own["states"]:
            return ""
        if self.own["once"]:
            try:
                os.close(os.open(self.own["once"], os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                return ""
        return str(self.own["fault"])

    def _open(self) -> None:
        """What real simulators do in their first reset."""
        if self.own["builds"]:
            with open(self.own["builds"], "ab") as file:
                file.write(b".")
                file.flush()
                number = file.tell()
            if number in self.own["no_build"]:
                raise MissingExtraError(
                    f"expected a GL context, found none for simulator {number}; run `mmrl doctor`"
                )
        self.opened = True

    def reset(self, state: InitialState) -> None:
        if not self.opened:
            self._open()
        self.fault = self._chosen(state)
        if self.fault in ("kill_reset", "hang_reset", "raise_reset"):
            self._do(self.fault.removesuffix("_reset"))
        if self.fault == "leak":
            _leaked.append(_filled(self.own["leak_mib"]))
        if self.fault == "leak_object":
            self.kept.append(_filled(self.own["leak_mib"]))
        super().reset(state)

    def step(self, action_A: np.ndarray) -> StepResult:
        if self.steps + 1 == self.own["at"]:
            self._do(self.fault)
        result = super().step(action_A)
        if self.fault == "nan_reward" and self.steps >= self.own["at"]:
            return replace(result, reward=math.nan)
        if self.fault == "endless":
            return replace(result, terminated=False, truncated=False, success=False)
        if self.fault == "goes_on":
            return replace(
                result,
                terminated=False,
                truncated=self.steps >= self.spec.horizon,
                success=True,
            )
        return result

    def observe(self) -> Observation:
        seen = super().observe()
        if self.fault == "bad_picture" and self.steps:
            return replace(
                seen, images={name: picture[:-1] for name, picture in seen.images.items()}
            )
        if self.fault == "nan_state_reset" or (self.fault == "nan_state" and self.steps):
            return replace(seen, proprio=np.full_like(seen.proprio, np.nan))
        return seen

    def close(self) -> None:
        if self.own["fault"] == "raise_close" or (self.own["no_close"] and self.fault):
            raise RuntimeError("cannot close")

    def _do(self, fault: str) -> None:
        if fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault == "exit":
            print("the driver gave up", file=sys.stderr, flush=True)
            os._exit(3)
        elif fault == "hang":
            while True:
                time.sleep(0.05)
        elif fault == "raise":
            raise ValueError("the physics exploded")
        elif fault == "memory":
            _leaked.append(_filled(640))
            time.sleep(5)
        elif fault == "noise":
            print("noise on stdout")
            os.write(1, b"noise from C\n")
