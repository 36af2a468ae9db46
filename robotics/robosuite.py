"""robosuite's own single-arm tasks as simulators, and what LIBERO (built on robosuite) shares with them.

    MUJOCO_GL=osmesa python -c "
    from mmrl.robotics.contract import EnvSpec, initial_states, make_simulator
    sim = make_simulator(EnvSpec('robosuite', 'Lift', horizon=100)); sim.reset(initial_states('train', 1)[0])
    print(sim.observe().images['base'].shape, sim.versions())"

robosuite 1.4, Panda, OSC_POSE at 20 Hz: actions are 6 pose deltas and the gripper (-1 open, +1 close), all in [-1, 1];
proprioception is eef position 3, axis-angle 3, finger joints 2. No picture is drawn in `step`: at the instant at which robosuite
itself samples its sensors the physics state is copied, and `observe` draws from that copy. So pictures equal those of an
environment that renders every step, bit for bit (tests/robotics/test_libero.py).

Cameras: base (agentview), wrist (robot0_eye_in_hand), front, side, top. Options: gl ('auto', 'osmesa', 'egl', or 'none': physics
without pictures).
"""

from __future__ import annotations

import abc
import ctypes
import importlib
import importlib.metadata
import importlib.util
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np

from mmrl.errors import ConfigError, DataError, MissingExtraError, did_you_mean
from mmrl.robotics.contract import (
    ActionSpace,
    EnvSpec,
    InitialState,
    Observation,
    Simulator,
    StepResult,
    check_actions,
)
from mmrl.robotics.kept_scene import KeptScene
from mmrl.robotics.options import SimulatorOptions

__all__ = [
    "ArmSimulator",
    "RobosuiteSimulator",
    "axis_angle",
    "choose_gl",
    "load_triton_first",
    "mujoco_warning",
]

ARM_ACTIONS = ActionSpace(
    (-1.0,) * 7,
    (1.0,) * 7,
    ("dx", "dy", "dz", "droll", "dpitch", "dyaw", "gripper"),
    gripper=6,
    gripper_open=-1.0,
)
"""OSC_POSE: 1 asks for 5 cm, or 0.5 rad."""

CAMERAS = {
    "base": "agentview",
    "wrist": "robot0_eye_in_hand",
    "front": "frontview",
    "side": "sideview",
    "top": "birdview",
}

_PROPRIO = ("robot0_eef_pos", "robot0_eef_quat", "robot0_gripper_qpos")
_DRAWN = (
    "xpos",
    "xquat",
    "xmat",
    "xipos",
    "ximat",
    "geom_xpos",
    "geom_xmat",
    "site_xpos",
    "site_xmat",
    "cam_xpos",
    "cam_xmat",
    "light_xpos",
    "light_xdir",
    "subtree_com",
)
"""What of the physics state a picture of rigid bodies depends on."""

_GL_LIBRARIES = {
    "osmesa": ("libOSMesa.so.8", "libOSMesa.so.6", "libOSMesa.so"),
    "egl": ("libEGL.so.1", "libEGL.so"),
}
_GL_PACKAGES = {
    "osmesa": "apt-get install libosmesa6",
    "egl": "apt-get install libegl1 (and the GPU's driver)",
}


def _loads(backend: str) -> bool:
    for library in _GL_LIBRARIES[backend]:
        try:
            ctypes.CDLL(library)
        except OSError:
            continue
        return True
    return False


def load_triton_first() -> None:
    """Import triton, if it is installed, where mujoco's import would make a later one end the process.

    PyOpenGL, which mujoco imports by $MUJOCO_GL, loads OSMesa or EGL with RTLD_GLOBAL, and Mesa's renderer brings libLLVM with
    it. A libtriton loaded afterwards binds the symbols of its own LLVM to Mesa's and ends the process with SIGSEGV. torch._dynamo,
    and with it many models of transformers, imports triton, so a simulator made before its policy would end its process. In
    the other order both work. Costs 0.2 s and 11 MiB of a process's own memory.
    """
    flags = sys.getdlopenflags()
    if (
        "OpenGL" in sys.modules
    ):  # somebody imported mujoco: let libtriton look at its own symbols first
        sys.setdlopenflags(flags | getattr(os, "RTLD_DEEPBIND", 0))
    try:
        if importlib.util.find_spec("triton") is not None:
            importlib.import_module("triton")
    # one that is broken, or a stand-in: whoever needs triton is told at its own import
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        logging.getLogger(__name__).debug("triton cannot be imported: %s", error)
    finally:
        sys.setdlopenflags(flags)


def choose_gl(wanted: str = "auto") -> str:
    """Choose the render backend of this process and set $MUJOCO_GL, before mujoco is imported.

    'auto': what the process renders with already, else $MUJOCO_GL, else egl beside an NVIDIA driver, else osmesa, else egl.
    Raises ConfigError for another name or once the process renders with another one, MissingExtraError when the library is not
    there.
    """
    name, loaded = wanted, sys.modules.get("robosuite.utils.binding_utils")
    if name == "auto":  # what this process renders with already, if it does
        name = loaded._MUJOCO_GL if loaded is not None else os.environ.get("MUJOCO_GL", "").lower()
    if not name:
        order = ("egl", "osmesa") if os.path.exists("/dev/nvidiactl") else ("osmesa", "egl")
        name = next((backend for backend in order if _loads(backend)), order[0])
    if name not in _GL_LIBRARIES:
        raise ConfigError(
            f"render backend: expected auto, osmesa or egl (option gl or MUJOCO_GL), found {name!r}."
            f"{did_you_mean(name, _GL_LIBRARIES)}"
        )
    if loaded is not None and name != loaded._MUJOCO_GL:
        raise ConfigError(
            f"render backend: this process already renders with {loaded._MUJOCO_GL}, found a wish for {name}; use "
            "one backend per worker process"
        )
    if not _loads(name):
        raise MissingExtraError(
            f"render backend {name}: expected {' or '.join(_GL_LIBRARIES[name])}, found none. Install it "
            f"({_GL_PACKAGES[name]}) or choose the other: MUJOCO_GL={'egl' if name == 'osmesa' else 'osmesa'}"
        )
    os.environ["MUJOCO_GL"] = os.environ["PYOPENGL_PLATFORM"] = name
    load_triton_first()
    return name


def mujoco_warning(version: str) -> str | None:
    """What is wrong with a version of mujoco, or None. From 3.4 on, a bowl of one LIBERO-spatial task no longer settles
    (success 98 % -> 12 %, RLinf issue 1460)."""
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    if numbers < (3, 4):
        return None
    return f"mujoco {version}: LIBERO was measured below 3.4, objects settle differently: pip install 'mujoco>=3.3,<3.4'"


def axis_angle(quaternion: np.ndarray) -> np.ndarray:
    """Rotation vector (3,) of a unit quaternion (x, y, z, w), as LIBERO's policies read it: the sign of w is kept, so angles
    go from 0 to 2 pi."""
    w = float(np.clip(quaternion[3], -1.0, 1.0))
    sine = np.sqrt(1.0 - w * w)
    if sine < 1e-8:
        return np.zeros(3)
    return np.asarray(quaternion[:3]) * (2.0 * np.arccos(w) / sine)


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """robosuite draws from numpy's global generator: seed it, and give the process its own back afterwards."""
    before = np.random.get_state()
    np.random.seed(seed % (1 << 32))
    try:
        yield
    finally:
        np.random.set_state(before)


def import_robosuite(install: str) -> Any:
    """robosuite without its greeting. Raises MissingExtraError with `install`, DataError for its unwritable log file."""
    logging.getLogger("robosuite_logs").setLevel(logging.ERROR)
    load_triton_first()
    try:
        import robosuite
    except PermissionError as error:
        raise DataError(
            f"robosuite cannot open its log {error.filename}, which another user owns: remove that file"
        ) from error
    except ImportError as error:
        if importlib.util.find_spec("robosuite") is None:
            raise MissingExtraError(
                f"robosuite is not installed. Install it with: {install}"
            ) from error
        raise MissingExtraError(
            f"robosuite cannot be imported ({error}). Install what it needs: {install}"
        ) from error
    if not robosuite.__version__.startswith("1.4"):
        raise MissingExtraError(
            f"expected robosuite 1.4 (1.5 removed what LIBERO builds on), found {robosuite.__version__}. "
            f"Install it with: {install}"
        )
    return robosuite


class ArmOptions(SimulatorOptions):
    """Options of robosuite's tasks: `gl`, see the module."""

    gl: str = "auto"


class ArmSimulator(Simulator):
    """What robosuite's tasks and LIBERO's share. A subclass builds the environment, starts an episode and names the task."""

    cameras: ClassVar[Mapping[str, str]] = CAMERAS
    option_class: ClassVar[type[ArmOptions]] = ArmOptions
    install = (
        "pip install --no-deps robosuite==1.4.0 && pip install 'mujoco>=3.3,<3.4' numba scipy termcolor "
        "opencv-python-headless"
    )
    packages: ClassVar[Mapping[str, str]] = {"robosuite": install}

    @classmethod
    def stops_at_success(cls, options: Mapping[str, Any]) -> bool:
        """Always: robosuite's and LIBERO's environments end with it."""
        return True

    def __init__(self, spec: EnvSpec) -> None:
        super().__init__(spec)
        self.options = self.option_class.read(spec)
        for camera in spec.cameras:
            if camera not in self.cameras:
                raise ConfigError(
                    f"{spec.suite}: expected cameras {', '.join(self.cameras)}, found {camera!r}."
                    f"{did_you_mean(camera, self.cameras)}"
                )
        self._env: Any = None
        self._frame: Any = None
        self._kept: KeptScene | None = None
        self._backend = self._renderer = ""
        self._steps, self._over = 0, True

    @property
    def _blind(self) -> bool:
        """Option gl 'none': physics alone, for experts and planners that read the state."""
        return self.options.gl == "none"

    @property
    def action_space(self) -> ActionSpace:
        """Pose deltas and gripper (A = 7)."""
        return ARM_ACTIONS

    @property
    def proprio_dim(self) -> int:
        """Eef position 3, axis-angle 3, finger joints 2."""
        return 8

    @property
    def env(self) -> Any:
        """robosuite's environment of the episode (for scripted experts: the privileged state). Needs a reset first."""
        assert self._env is not None, "reset first"
        return self._env

    @property
    @abc.abstractmethod
    def instruction(self) -> str:
        """The task in words."""

    @abc.abstractmethod
    def _build(self, robosuite: Any, settings: dict[str, Any]) -> Any:
        """Create robosuite's environment with `settings`."""

    @abc.abstractmethod
    def _start(self, state: InitialState) -> None:
        """Bring `self.env` to the start of the episode."""

    @abc.abstractmethod
    def _succeeded(self) -> bool:
        """Whether the goal holds now."""

    def _check(self, state: InitialState) -> None:
        """Refuse a state this task does not have, before anything is built."""

    def reset(self, state: InitialState) -> None:
        """Start an episode: all is built anew ('hard reset'), since a soft reset is not deterministic; what would be the same again
        is kept (mmrl.robotics.kept_scene)."""
        self._check(state)
        if self._env is None:
            self._backend = choose_gl("auto" if self._blind else self.options.gl)
            robosuite = import_robosuite(self.install)
            with _seeded(0):
                self._env = self._build(robosuite, self._settings(robosuite))
            self._kept = KeptScene(self._env)
            self._watch()
        else:
            self._make_current()
        self._over = True
        self._start(state)
        if not self._blind:
            self._env.sim._render_context_offscreen.data = SimpleNamespace(_data=self._frame)
            self._renderer = self._renderer or gl_renderer()
        self._steps, self._over = 0, False

    def _settings(self, robosuite: Any) -> dict[str, Any]:
        """What all tasks share. Cameras are not robosuite's sensors here: see `_watch`."""
        return dict(
            use_camera_obs=False,
            has_renderer=False,
            has_offscreen_renderer=not self._blind,
            control_freq=20,
            ignore_done=True,
            hard_reset=True,
        )

    def _watch(self) -> None:
        """Turn off all sensors but the proprioception, and add one that copies the physics state when sensors are sampled."""
        import mujoco
        from robosuite.utils.observables import Observable, sensor

        env = self.env
        for name, observable in env._observables.items():
            if name not in _PROPRIO:
                observable.set_enabled(False)

        @sensor(modality="frame")
        def frame(_: Any) -> np.ndarray:
            model = env.sim.model._model
            if self._frame is None or self._frame.model is not model:
                self._frame = mujoco.MjData(model)
            for name in _DRAWN:
                getattr(self._frame, name)[:] = getattr(env.sim.data._data, name)
            return np.zeros(1)

        env.add_observable(Observable(name="frame", sensor=frame, sampling_rate=env.control_freq))

    def _make_current(self) -> None:
        """Select this environment's GL context: a process may hold several."""
        sim = getattr(self._env, "sim", None)
        context = getattr(sim, "_render_context_offscreen", None)
        if context is not None:
            context.gl_ctx.make_current()

    def step(self, action_A: np.ndarray) -> StepResult:
        """25 physics steps of 2 ms. Terminated by success."""
        assert not self._over, "the episode is over: reset first"
        action = check_actions(np.asarray(action_A, dtype=np.float64)[None], self.action_space)[0]
        _, reward, _, _ = self.env.step(action)
        self._steps += 1
        success = self._succeeded()
        truncated = not success and self._steps >= self.spec.horizon
        self._over = success or truncated
        return StepResult(float(reward), success, truncated, success)

    def observe(self) -> Observation:
        """Draw the state that robosuite's sensors saw last."""
        if self._blind:
            raise ConfigError(
                f"{self.spec.suite}: expected a render backend (option gl: auto, osmesa or egl) to draw with, found "
                "gl 'none', which has physics alone"
            )
        sim = self.env.sim
        self._make_current()
        size = self.spec.image_size
        images = {}
        for camera in self.spec.cameras:
            picture = sim.render(camera_name=self.cameras[camera], width=size, height=size)
            images[camera] = np.ascontiguousarray(self._turn(picture))
        position, quaternion, fingers = (self.env._observables[name].obs for name in _PROPRIO)
        proprio = np.concatenate([position, axis_angle(quaternion), fingers]).astype(np.float32)
        return Observation(images, proprio, self.instruction)

    def _turn(self, picture: np.ndarray) -> np.ndarray:
        """OpenGL's first row is the bottom one: put it upright."""
        return picture[::-1]

    def close(self) -> None:
        """Free GL and the simulator."""
        if self._env is not None:
            self._make_current()
            self._env.close()
        if self._kept is not None:
            self._kept.close()
        self._env = self._frame = self._kept = None
        self._over = True

    def versions(self) -> dict[str, str]:
        """mujoco, robosuite, render backend and, after a reset, the renderer's own name; 'warning' where the pin is not kept."""
        found = {
            name: importlib.metadata.version(name)
            for name in ("mujoco", "robosuite")
            if _installed(name)
        }
        found["render"] = "none" if self._blind else self._backend or self.options.gl
        if self._renderer:
            found["renderer"] = self._renderer
        warning = mujoco_warning(found.get("mujoco", ""))
        if warning:
            found["warning"] = warning
        return found


def _installed(distribution: str) -> bool:
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def gl_renderer() -> str:
    """GL_RENDERER of the current context, e.g. llvmpipe."""
    gl = importlib.import_module("OpenGL.GL")
    name = gl.glGetString(gl.GL_RENDERER)
    return name.decode(errors="replace") if name else "unknown"


_TASKS: dict[str, str] = {
    "Lift": "lift the red cube",
    "Stack": "stack the red cube on the green cube",
    "PickPlaceCan": "put the can into its bin",
    "NutAssemblySquare": "put the square nut on the square peg",
    "Door": "open the door",
}


class RobosuiteSimulator(ArmSimulator):
    """Lift, Stack, PickPlaceCan, NutAssemblySquare, Door; everything they draw is in robosuite's wheel. Initial states come
    from seeds; reward is robosuite's sparse one."""

    def __init__(self, spec: EnvSpec) -> None:
        super().__init__(spec)
        if spec.task not in _TASKS:
            raise ConfigError(
                f"robosuite: expected task {', '.join(_TASKS)}, found {spec.task!r}."
                f"{did_you_mean(spec.task, _TASKS)}"
            )

    @property
    def instruction(self) -> str:
        """The task in words (robosuite has none of its own)."""
        return _TASKS[self.spec.task]

    def _build(self, robosuite: Any, settings: dict[str, Any]) -> Any:
        controller = robosuite.load_controller_config(default_controller="OSC_POSE")
        return robosuite.make(
            self.spec.task,
            robots="Panda",
            controller_configs=controller,
            reward_shaping=False,
            **settings,
        )

    def _start(self, state: InitialState) -> None:
        with _seeded(state.seed):
            self.env.reset()

    def _succeeded(self) -> bool:
        return bool(self.env._check_success())

    def expert(
        self, rng: np.random.Generator, noise: float = 0.0
    ) -> Callable[[], tuple[np.ndarray, np.ndarray]]:
        """For Lift only."""
        if self.spec.task != "Lift":
            return super().expert(rng, noise)
        from mmrl.robotics.arm_expert import LiftExpert

        return LiftExpert(self, rng, noise)
