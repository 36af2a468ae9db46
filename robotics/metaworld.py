"""MetaWorld's 50 tasks (Sawyer arm, mujoco) as simulators.

    MUJOCO_GL=osmesa python -c "
    from mmrl.robotics.contract import EnvSpec, initial_states, make_simulator
    sim = make_simulator(EnvSpec('metaworld', 'reach-v3', horizon=500)); sim.reset(initial_states('train', 1)[0])
    print(sim.observe().images['base'].shape, sim.versions())"

Actions: three displacements of the gripper (1 asks for 1 cm) and the gripper's effort (-1 opens, 1 closes), all in [-1, 1].
Proprioception is what MetaWorld shows of the arm itself: position of the gripper (m, 3) and how far it is open (0 to 1);
places of objects and the goal stay with the scripted experts. The reward is MetaWorld's own success, 1 or 0. An episode ends
with it, as in lerobot's evaluation, or at the horizon, which is at most MetaWorld's 500.

Cameras: base is MetaWorld's `corner2` moved to (0.75, 0.075, 0.7) m and turned by 180 degrees, since MetaWorld mounts it upside
down: what the field trains on (lerobot's and RLinf's evaluation, Masked World Models; MetaWorld 3.1 calls the place `corner4`).
wrist is `gripperPOV`; corner, corner3, topview and behindGripper are drawn as MetaWorld draws them. Pictures are drawn at the
size asked for; lerobot draws 480 pixels and leaves scaling to the policy.

Initial states: MetaWorld's environments ignore reset(seed=...). Here the places of object and goal are drawn by MetaWorld from
its own range with the state's seed, then set as its benchmarks do (set_task), and the episode begins with the reset after that.
A reset without set_task draws twice, and in 30 of the 50 tasks its first picture shows things where the first draw put them.
What is left of that is MetaWorld's own: the first picture of window-close-v3 has the window 0.2 m from where the first step
finds it.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import pickle
import warnings
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import Field, field_validator

from mmrl.errors import ConfigError, MissingExtraError, did_you_mean
from mmrl.robotics.contract import (
    ActionSpace,
    EnvSpec,
    InitialState,
    Observation,
    Simulator,
    StepResult,
    check_actions,
)
from mmrl.robotics.metaworld_tasks import GROUPS, INSTRUCTIONS
from mmrl.robotics.options import Place, SimulatorOptions
from mmrl.robotics.robosuite import choose_gl, gl_renderer, load_triton_first

__all__ = ["CAMERAS", "MetaWorldOptions", "MetaWorldSimulator", "ScriptedPolicy"]

CAMERAS = {
    "base": "corner2",
    "wrist": "gripperPOV",
    "corner": "corner",
    "corner3": "corner3",
    "topview": "topview",
    "behindGripper": "behindGripper",
}
"""Our name -> MetaWorld's."""

_ACTIONS = ActionSpace(
    (-1.0,) * 4, (1.0,) * 4, ("dx", "dy", "dz", "gripper"), gripper=3, gripper_open=-1.0
)
_HORIZON = 500  # steps after which MetaWorld refuses to go on
_PROPRIO = 4  # of the 39 numbers of MetaWorld's observation: gripper's position and opening
_INSTALL = "pip install 'metaworld>=3' 'mujoco>=3.3,<3.4'"


class MetaWorldOptions(SimulatorOptions):
    """`EnvSpec.options` of this suite.

    gl: auto, osmesa, egl, or none (no pictures). reward: sparse (MetaWorld's success, 1 or 0) or dense (MetaWorld's reward).
    stop_at_success: end the episode with its first success; otherwise it always runs to the horizon. base_position: where the
    camera 'base' stands (m), null for MetaWorld's own place of corner2. instructions: task -> other words for what to do.
    """

    gl: str = "auto"
    reward: Literal["sparse", "dense"] = "sparse"
    stop_at_success: bool = True
    base_position: Place | None = (0.75, 0.075, 0.7)
    instructions: Mapping[str, Annotated[str, Field(pattern=r"\S")]] = Field(default_factory=dict)

    @field_validator("instructions")
    @classmethod
    def _of_its_tasks(cls, words: Mapping[str, str]) -> Mapping[str, str]:
        for task in words:
            if task not in INSTRUCTIONS:
                raise ValueError(
                    f"expected instructions of MetaWorld's tasks, found one of {task!r}.{did_you_mean(task, INSTRUCTIONS)}"
                )
        return words


class MetaWorldSimulator(Simulator):
    """One task of MetaWorld; see the module for actions, cameras and proprioception, MetaWorldOptions for the options."""

    packages: ClassVar[Mapping[str, str]] = {"metaworld": _INSTALL}

    def __init__(self, spec: EnvSpec) -> None:
        super().__init__(spec)
        if spec.task in GROUPS:
            raise ConfigError(
                f"metaworld: expected one task, found the group {spec.task}; name it in env.tasks, or name its tasks: "
                f"{', '.join(GROUPS[spec.task])}"
            )
        if spec.task not in INSTRUCTIONS:
            raise ConfigError(
                f"metaworld: expected a task such as {', '.join(GROUPS['MT10'][:3])}, or in env.tasks a group "
                f"({', '.join(GROUPS)}), found {spec.task!r}.{did_you_mean(spec.task, [*INSTRUCTIONS, *GROUPS])}"
            )
        if spec.horizon > _HORIZON:
            raise ConfigError(
                f"metaworld/{spec.task}: expected a horizon of at most {_HORIZON} control steps, where MetaWorld ends every "
                f"episode, found {spec.horizon}: set env.horizon={_HORIZON}"
            )
        for camera in spec.cameras:
            if camera not in CAMERAS:
                raise ConfigError(
                    f"metaworld/{spec.task}: expected cameras {', '.join(CAMERAS)}, found {camera!r}."
                    f"{did_you_mean(camera, CAMERAS)}"
                )
        self.options = MetaWorldOptions.read(spec)
        self._env: Any = None
        self._task: Any = None
        self._ids: dict[str, int] = {}
        self._state = np.zeros(39)
        self._backend = self._renderer = ""
        self._steps, self._over = 0, True

    @property
    def action_space(self) -> ActionSpace:
        """A = 4."""
        return _ACTIONS

    @property
    def proprio_dim(self) -> int:
        """S = 4."""
        return _PROPRIO

    @property
    def env(self) -> Any:
        """MetaWorld's environment of the episode. Needs a reset first."""
        assert self._env is not None, "reset first"
        return self._env

    @property
    def task(self) -> Any:
        """The episode's initial state as MetaWorld's own Task (env.set_task). Needs a reset first."""
        assert self._task is not None, "reset first"
        return self._task

    @property
    def state(self) -> np.ndarray:
        """MetaWorld's observation (39,) with objects and goal, for experts. Needs a reset first."""
        return self._state

    @property
    def instruction(self) -> str:
        """The task in words."""
        return self.options.instructions.get(self.spec.task, INSTRUCTIONS[self.spec.task])

    def reset(self, state: InitialState) -> None:
        """Draw the places of `state.seed`, set them as MetaWorld's task, and start."""
        if self._env is None:
            self._build()
        from metaworld.types import Task

        env = self.env
        # drawn by a reset, not from the range itself: some tasks refuse places and draw again
        env._set_task_called = env.seeded_rand_vec = True
        env._freeze_rand_vec = False
        env.seed(int(state.seed))
        env.reset()
        places = {"rand_vec": env._last_rand_vec.copy(), "env_cls": type(env)}
        self._task = Task(self.spec.task, pickle.dumps({**places, "partially_observable": False}))
        env.set_task(self._task)
        self._state = env.reset()[0]
        self._steps, self._over = 0, False

    def step(self, action_A: np.ndarray) -> StepResult:
        """One control step: 5 physics steps."""
        assert not self._over, "the episode is over: reset first"
        action = check_actions(np.asarray(action_A)[None], self.action_space)[0].astype(np.float32)
        self._state, reward, _, _, info = self.env.step(action)
        self._steps += 1
        success = bool(info["success"])
        terminated = success and self.options.stop_at_success
        truncated = not terminated and self._steps >= self.spec.horizon
        self._over = terminated or truncated
        value = float(success) if self.options.reward == "sparse" else float(reward)
        return StepResult(value, terminated, truncated, success)

    def observe(self) -> Observation:
        """Draw all cameras now."""
        if self.options.gl == "none":
            raise ConfigError(
                "metaworld: expected a render backend (option gl: auto, osmesa or egl) to draw with, found gl 'none', "
                "which has physics alone"
            )
        self._make_current()
        renderer, images = self.env.mujoco_renderer, {}
        for camera in self.spec.cameras:
            renderer.camera_id = self._ids[camera]
            picture = renderer.render("rgb_array")
            if camera == "base":
                picture = picture[::-1, ::-1]
            images[camera] = np.ascontiguousarray(picture)
        self._renderer = self._renderer or gl_renderer()
        return Observation(images, self._state[:_PROPRIO].astype(np.float32), self.instruction)

    def expert(self, rng: np.random.Generator, noise: float = 0.0) -> ScriptedPolicy:
        """MetaWorld's own scripted policy of the task."""
        return ScriptedPolicy(self, rng, noise)

    def close(self) -> None:
        """Free GL and the simulator."""
        if self._env is not None:
            self._make_current()
            self._env.close()
        self._env = self._task = None
        self._over = True

    def versions(self) -> dict[str, str]:
        """metaworld, mujoco, gymnasium, render backend and, after a picture, the renderer's own name."""
        found = {}
        for name in ("metaworld", "mujoco", "gymnasium"):
            try:
                found[name] = importlib.metadata.version(name)
            except importlib.metadata.PackageNotFoundError:
                found[name] = "not installed"
        blind = self.options.gl == "none"
        found["render"] = "none" if blind else self._backend or self.options.gl
        if self._renderer:
            found["renderer"] = self._renderer
        return found

    def _build(self) -> None:
        self._backend = choose_gl("auto" if self.options.gl == "none" else self.options.gl)
        environments = _import_metaworld()
        size = self.spec.image_size
        # no render mode: pictures are asked of the renderer itself, by camera
        env = environments[self.spec.task](width=size, height=size)
        self._ids = {name: env.model.camera(CAMERAS[name]).id for name in self.spec.cameras}
        if self.options.base_position is not None:
            env.model.camera(CAMERAS["base"]).pos = self.options.base_position
        self._env = env

    def _make_current(self) -> None:
        """Select this environment's GL context: a process may hold several."""
        viewer = self.env.mujoco_renderer.viewer
        if viewer is not None:
            viewer.make_context_current()


class ScriptedPolicy:
    """metaworld.policies: call it for (action to execute, clean label), both (4,) in [-1, 1].

    `noise`: standard deviation of what is added to the executed action but for the gripper's; both are clipped to the bounds, as
    MetaWorld's own evaluation does.
    """

    def __init__(
        self, simulator: MetaWorldSimulator, rng: np.random.Generator, noise: float = 0.0
    ) -> None:
        from metaworld.policies import ENV_POLICY_MAP

        self._policy = ENV_POLICY_MAP[simulator.spec.task]()
        self._simulator, self._rng, self._noise = simulator, rng, float(noise)

    def __call__(self) -> tuple[np.ndarray, np.ndarray]:
        with warnings.catch_warnings():
            # at nearly every call: 'Constant(s) may be too high'
            warnings.simplefilter("ignore")
            wanted = self._policy.get_action(self._simulator.state)
        label = np.clip(np.asarray(wanted, np.float64), -1.0, 1.0)
        executed = label.copy()
        if self._noise:
            executed[:3] += self._rng.normal(0.0, self._noise, 3)
        return np.clip(executed, -1.0, 1.0), label


def _import_metaworld() -> Mapping[str, Any]:
    """MetaWorld's environments by task. Raises MissingExtraError."""
    load_triton_first()
    try:
        from metaworld.env_dict import ALL_V3_ENVIRONMENTS
    except ImportError as error:
        if importlib.util.find_spec("metaworld") is None:
            raise MissingExtraError(
                f"MetaWorld is not installed. Install it with: {_INSTALL} (the extra metaworld)"
            ) from error
        raise MissingExtraError(
            f"MetaWorld cannot be imported, or is older than 3 ({error}). Install what it needs: {_INSTALL}"
        ) from error
    return ALL_V3_ENVIRONMENTS
