"""One pass over positions and velocities in each of robosuite's physics steps, which computes them three times.

    ForwardOnce(env.sim)     # its forward(), step() and reset() from now on; what they compute stays the same, bit for bit

robosuite 1.4 calls `sim.forward` before each physics step (MujocoEnv.step), its controller calls it again (Controller.update), and
MuJoCo's step begins with forward dynamics of its own: the same collisions, mass matrix and constraints each time. Forward dynamics
is a function of MuJoCo's integration state (mjSTATE_INTEGRATION) and the model: asked for again with both unchanged, there is
nothing to do. A step whose positions and velocities were passed already begins at the actuators, since controls are new by then
(mj_forwardSkip, mjSTAGE_VEL), and goes on as mj_step does: https://mujoco.readthedocs.io/en/3.3.7/programming/simulation.html.
Of the model robosuite and LIBERO write places of bodies, so these are compared too; what else they write is not physics (colours
and sizes of sites). Code that writes masses or gravity of the model, or what MuJoCo has computed, between `forward` and `step` has
to call mj_forward itself. Where MuJoCo would warn of the same thing in each of the three passes, it warns once.
"""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["ForwardOnce"]


class ForwardOnce:
    """Stands in for forward, step and reset of one robosuite MjSim. Another integrator than Euler's keeps MuJoCo's own step."""

    def __init__(self, sim: Any) -> None:
        import mujoco

        self._mujoco = mujoco
        self._model, self._data = sim.model._model, sim.data._data
        kinds = mujoco.mjtState
        self._inputs = int(kinds.mjSTATE_INTEGRATION)
        # of these alone positions and velocities are functions
        self._moves = int(
            kinds.mjSTATE_TIME  # of sensors that are clocks
            | kinds.mjSTATE_QPOS
            | kinds.mjSTATE_QVEL
            | kinds.mjSTATE_MOCAP_POS
            | kinds.mjSTATE_MOCAP_QUAT
            | kinds.mjSTATE_EQ_ACTIVE
        )
        self._sizes = {k: mujoco.mj_stateSize(self._model, k) for k in (self._inputs, self._moves)}
        self._places = self._model.body_pos, self._model.body_quat
        self._computed = self._passed = b""
        self._reset = sim.reset
        sim.forward, sim.reset = self.forward, self.reset
        option = self._model.opt
        if (
            option.integrator == mujoco.mjtIntegrator.mjINT_EULER
            and not option.enableflags & mujoco.mjtEnableBit.mjENBL_FWDINV
        ):
            sim.step = self.step

    def _now(self, kind: int) -> bytes:
        """A part of the state, and where bodies stand."""
        state = np.empty(self._sizes[kind])
        self._mujoco.mj_getState(self._model, self._data, state, kind)
        positions, rotations = self._places
        return state.tobytes() + positions.tobytes() + rotations.tobytes()

    def forward(self) -> None:
        """mj_forward."""
        inputs = self._now(self._inputs)
        if inputs == self._computed:
            return
        self._mujoco.mj_forward(self._model, self._data)
        self._computed, self._passed = inputs, self._now(self._moves)

    def reset(self) -> None:
        """mj_resetData, which leaves nothing of what was computed."""
        self._computed = self._passed = b""
        self._reset()

    def step(self, with_udd: bool = True) -> None:
        """mj_step. `with_udd`: as in MjSim, where it does nothing."""
        del with_udd
        mujoco, model, data = self._mujoco, self._model, self._data
        passed = self._now(self._moves) == self._passed
        mujoco.mj_checkPos(model, data)  # resets what has become no number
        mujoco.mj_checkVel(model, data)
        if passed and self._now(self._moves) == self._passed:
            mujoco.mj_forwardSkip(model, data, mujoco.mjtStage.mjSTAGE_VEL, 0)
        else:
            mujoco.mj_forward(model, data)
        mujoco.mj_checkAcc(model, data)
        mujoco.mj_Euler(model, data)
        self._computed = self._passed = b""
