"""LIBERO whose proprioception is the whole physics state, so that tests can compare it across processes, bit for bit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from mmrl.robotics.contract import Observation
from mmrl.robotics.libero import LiberoSimulator


class WholeState(LiberoSimulator):
    """Proprioception: time, positions, velocities, accelerations of the solver's warm start, controls and actuator forces, every
    float64 as four numbers of 16 bits, which a float32 holds exactly (its bits as they are may be no number)."""

    def observe(self) -> Observation:
        data = self.env.sim.data._data
        parts = (
            [data.time],
            data.qpos,
            data.qvel,
            data.qacc_warmstart,
            data.ctrl,
            data.actuator_force,
        )
        bits = np.concatenate(parts).astype(np.float64).view(np.uint16)
        return replace(super().observe(), proprio=bits.astype(np.float32))
