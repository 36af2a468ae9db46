"""What a hard reset of robosuite builds anew although it is the same again: the compiled model, and what OpenGL holds of it.

    kept = KeptScene(env)      # of a robosuite environment that has been made
    env.reset()                # compiles, opens a context, uploads meshes and textures: the first time
    env.reset()                # the same state bit for bit, from a copy of the model and in the same context
    kept.close()               # with the environment's GL context current, after env.close()

robosuite writes its scene as XML at every hard reset; in LIBERO and most of robosuite's tasks it is the same text each time, for
objects and fixtures are placed afterwards. Then compiling it again gives the same model, so a copy of the one that nobody has
touched yet takes its place (a copy, since robosuite and LIBERO write into the model: places of fixtures, colours of sites). Another
text, such as that of robosuite's Lift with its cube of random size, is compiled as before. Made for robosuite 1.4, which
mmrl.robotics.robosuite asks for.
"""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

from mmrl.robotics.forward_once import ForwardOnce

__all__ = ["KeptScene"]

_MODELS: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
"""Compiled models by their XML, as they were compiled: one for all environments of a process that show the same scene."""


class KeptScene:
    """Stands in for `_initialize_sim` and `_destroy_sim` of one environment."""

    def __init__(self, env: Any) -> None:
        self._env = env
        self._xml: str | None = None
        self._model: Any = None
        self._context: Any = None
        env._initialize_sim, env._destroy_sim = self._initialize, self._destroy

    def _initialize(self, xml_string: str | None = None) -> None:
        from robosuite.utils.binding_utils import MjSim

        env = self._env
        xml = xml_string or env.model.get_xml()
        if env._xml_processor is not None:
            xml = env._xml_processor(xml)
        if xml != self._xml:
            self._context = None  # shows another model, or one whose text is not known
            self._xml, self._model = xml, _compiled(xml)
        env.sim = MjSim(copy.deepcopy(self._model))
        ForwardOnce(env.sim)
        if self._context is not None:
            self._show(env.sim)
        env.sim.forward()
        env.initialize_time(env.control_freq)

    def _show(self, sim: Any) -> None:
        """Give `sim` the context that there is, in the state in which robosuite makes one."""
        import mujoco

        context = self._context
        context.sim, context.model, context.data = sim, sim.model, sim.data
        context.scn = mujoco.MjvScene(sim.model._model, maxgeom=context.scn.maxgeom)
        context.cam, context.vopt, context.pert = (
            mujoco.MjvCamera(),
            mujoco.MjvOption(),
            mujoco.MjvPerturb(),
        )
        context.cam.type, context.cam.fixedcamid = mujoco.mjtCamera.mjCAMERA_FIXED, 0
        context.pert.active, context.pert.select, context.pert.skinselect = 0, -1, -1
        sim.add_render_context(context)

    def _destroy(self) -> None:
        sim, self._env.sim = self._env.sim, None
        if sim is None:
            return
        self._context = sim._render_context_offscreen
        # MjSim.free without its collection of the whole process's garbage, a third of a reset: it was for contexts, which are kept
        del sim._render_context_offscreen, sim.data, sim.model
        for name in ("forward", "reset", "step"):  # of ForwardOnce, which holds both
            sim.__dict__.pop(name, None)

    def close(self) -> None:
        """Free the context (which must be current) and the model. The environment is closed already."""
        self._context = self._model = self._xml = None
        gc.collect()  # as robosuite when it destroys a simulation: what remains of the environment is a circle


def compile_xml(xml: str) -> Any:
    """A mujoco.MjModel, as robosuite compiles it."""
    import mujoco

    return mujoco.MjModel.from_xml_string(xml)


def _compiled(xml: str) -> Any:
    model = _MODELS.get(xml)
    if model is None:
        model = _MODELS[xml] = compile_xml(xml)
    return model
