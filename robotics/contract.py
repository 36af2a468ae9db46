"""What the parts of the simulator bridge agree on: states, actions, observations, results, and what a simulator must do.

    python -c "from mmrl.robotics.contract import initial_states; print(initial_states('eval', 3))"

A `Simulator` is one environment inside a worker process: it steps, renders only when asked, and starts from any initial
state the same way every time. `run_chunk` plays an action chunk on it; mmrl.robotics.pool drives many of them. Importable
without torch and without any simulator.

Legend: A action dimensions, C control steps of a chunk, S proprioception values, H x W picture.
"""

from __future__ import annotations

import abc
import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from mmrl.errors import ConfigError, MMRLError, did_you_mean
from mmrl.registry import current_target

if TYPE_CHECKING:
    from mmrl.robotics.vector import VectorSimulator

__all__ = [
    "SIMULATORS",
    "ActionError",
    "ActionSpace",
    "ChunkResult",
    "EnvSpec",
    "InitialState",
    "Observation",
    "Simulator",
    "Split",
    "StepResult",
    "check_actions",
    "check_finite",
    "check_picture",
    "initial_states",
    "make_simulator",
    "run_chunk",
    "simulator_class",
]

Split = Literal["train", "eval"]

_NOTHING = np.zeros(0, np.float32)
_EVAL_SEEDS = 1 << 30  # seeds from here on are held out: training never draws one

SIMULATORS: dict[str, str] = {
    "tiny": "mmrl.robotics.tiny:TinySimulator",
    "maniskill": "mmrl.robotics.maniskill:ManiSkillSimulator",
    "libero": "mmrl.robotics.libero:LiberoSimulator",
    "robosuite": "mmrl.robotics.robosuite:RobosuiteSimulator",
    "metaworld": "mmrl.robotics.metaworld:MetaWorldSimulator",
}
"""Suite name -> module:class, imported in the worker that needs it."""


class ActionError(MMRLError, ValueError):
    """An action that must not reach a simulator: wrong shape, NaN or infinite."""


@dataclass(frozen=True)
class EnvSpec:
    """Which environment, picklable; built inside a worker by `make_simulator`.

    `task` is the suite's own name for it (PushCube-v1; libero_object/3; Lift; push). `horizon`: control steps until the
    episode is truncated. Pictures are `image_size` pixels square, one per name in `cameras` (each suite documents its
    names; 'base' and 'wrist' exist in all that have such cameras). `options` belong to the suite.
    """

    suite: str
    task: str
    horizon: int
    image_size: int = 64
    cameras: tuple[str, ...] = ("base",)
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "options", dict(self.options))
        if self.horizon < 1 or self.image_size < 8 or not self.cameras:
            raise ConfigError(
                f"environment {self.suite}/{self.task}: expected horizon >= 1, image_size >= 8 and at least one "
                f"camera, found {self.horizon}, {self.image_size} and {list(self.cameras)}"
            )

    @property
    def key(self) -> str:
        """Equal for equal environments."""
        return repr(
            (
                self.suite,
                self.task,
                self.horizon,
                self.image_size,
                self.cameras,
                sorted(self.options.items()),
            )
        )


@dataclass(frozen=True)
class InitialState:
    """Where an episode starts. `index` counts within its split; `seed` is for suites whose states come from seeds; suites
    with recorded states (LIBERO) read row `row`."""

    split: Split
    index: int
    seed: int
    row: int | None = None

    @property
    def name(self) -> str:
        """'train-12', 'eval-3'."""
        return f"{self.split}-{self.index}"


def initial_states(split: Split, count: int, first: int = 0) -> list[InitialState]:
    """`count` states of a split from number `first` on. Seeds of the two splits never meet."""
    if split not in ("train", "eval"):
        raise ConfigError(
            f"expected split train or eval, found {split!r}.{did_you_mean(split, ('train', 'eval'))}"
        )
    base = _EVAL_SEEDS if split == "eval" else 0
    if first < 0 or first + count > _EVAL_SEEDS:
        raise ConfigError(
            f"expected states between 0 and {_EVAL_SEEDS} of split {split}, found {first} to {first + count}"
        )
    return [InitialState(split, i, base + i) for i in range(first, first + count)]


@dataclass(frozen=True)
class ActionSpace:
    """Bounds of one control step: `low`, `high` (A,); `gripper` is the dimension of the gripper or None.

    `gripper_open` is the value that opens it (the other bound closes it).
    """

    low: tuple[float, ...]
    high: tuple[float, ...]
    names: tuple[str, ...]
    gripper: int | None = None
    gripper_open: float = 1.0

    @property
    def dim(self) -> int:
        """A."""
        return len(self.low)


@dataclass(frozen=True)
class Observation:
    """What a policy sees: pictures uint8 (H, W, 3) by camera, `proprio` float32 (S,), the instruction in words."""

    images: Mapping[str, np.ndarray]
    proprio: np.ndarray
    instruction: str


@dataclass(frozen=True)
class StepResult:
    """One control step. `terminated`: the task ended it (success or failure); `truncated`: the horizon did. `success` is
    the state after this step, which some tasks can lose again."""

    reward: float
    terminated: bool
    truncated: bool
    success: bool


@dataclass(frozen=True)
class ChunkResult:
    """C control steps, all arrays (C,): steps after the end of the episode are never executed, their `valid` is False and
    everything else there is 0 / False. `observation` is that after the last valid step. `frames`: base-camera pictures
    after every valid step, when asked for."""

    observation: Observation
    rewards_C: np.ndarray
    terminated_C: np.ndarray
    truncated_C: np.ndarray
    success_C: np.ndarray
    valid_C: np.ndarray
    frames: tuple[np.ndarray, ...] = ()

    @property
    def done(self) -> bool:
        """Whether the episode ended inside the chunk."""
        return bool(self.terminated_C.any() or self.truncated_C.any())


class Simulator(abc.ABC):
    """One environment. `__init__(spec)` must be cheap and open nothing: GL and the simulator are created by the first `reset`.

    reset(state) twice gives the same observation and, with the same actions, the same episode, bit for bit, whatever ran
    between; every member of a group starts through it. `step` never renders; `observe` renders now.
    Raises ConfigError (task that does not exist, camera it has not), MissingExtraError with the fix (package, GL,
    assets), ActionError.
    """

    packages: ClassVar[Mapping[str, str]] = {}
    """What the first reset imports, each with what installs it: a run looks for them before it loads a model."""

    def __init__(self, spec: EnvSpec) -> None:
        self.spec = spec

    @property
    @abc.abstractmethod
    def action_space(self) -> ActionSpace:
        """Of one control step; may need the first reset."""

    @property
    @abc.abstractmethod
    def proprio_dim(self) -> int:
        """S."""

    @abc.abstractmethod
    def reset(self, state: InitialState) -> None:
        """Start an episode."""

    @abc.abstractmethod
    def step(self, action_A: np.ndarray) -> StepResult:
        """One control step without rendering; truncated at spec.horizon."""

    @abc.abstractmethod
    def observe(self) -> Observation:
        """Render all cameras of the spec and read the proprioception."""

    def close(self) -> None:  # noqa: B027
        """Free GL and the simulator; may be called more than once."""

    def expert(self, rng: np.random.Generator, noise: float = 0.0) -> Any:
        """A scripted expert for the episode just reset: call it with no argument for (action to execute, clean label), both
        (A,). `noise`: standard deviation added to the executed action. Raises ConfigError where there is none."""
        raise ConfigError(
            f"expected a task with a scripted expert, found {self.spec.suite}/{self.spec.task}; record "
            "demonstrations elsewhere and read them as a LeRobot data set"
        )

    @classmethod
    def stops_at_success(cls, options: Mapping[str, Any]) -> bool:
        """Whether a success ends an episode of a simulator with these options. Asked of the class: one whose episodes go on returns
        False."""
        return bool(options.get("stop_at_success", True))

    @classmethod
    def recorded_states(cls, task: str, split: Split) -> list[InitialState] | None:
        """The initial states that are recorded for a task; None where they come from seeds without end. Opens nothing."""
        return None

    @classmethod
    def describe_states(cls, states: Sequence[InitialState]) -> str:
        """Which initial states, in the words of a result."""
        if not states:
            return "none"
        first = states[0]
        return f"held out: {len(states)} of split {first.split}, from seed {first.seed}"

    @classmethod
    def batches(cls, options: Mapping[str, Any]) -> bool:
        """Whether a worker plays its environments with these options as the rows of one `vector`, rather than each by itself."""
        return False

    @classmethod
    def vector(cls, spec: EnvSpec, rows: int) -> VectorSimulator | None:
        """`rows` environments of `spec` as one, from a suite that can step them in one call; None: they are played one after the
        other (mmrl.robotics.vector.make_vector)."""
        return None

    def versions(self) -> dict[str, str]:
        """What a result must name: packages, render backend ('render'), assets ('assets': 'stand-in' where they are)."""
        return {}


def simulator_class(suite: str) -> type[Simulator]:
    """The class of a suite; those beyond SIMULATORS are given as module:Class. Raises ConfigError."""
    target = current_target(SIMULATORS.get(suite, suite))
    module, _, name = target.partition(":")
    if not name:
        raise ConfigError(
            f"expected suite {', '.join(SIMULATORS)} or module:Class, found {suite!r}."
            f"{did_you_mean(suite, SIMULATORS)}"
        )
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # something the module itself imports
        raise ConfigError(f"suite {suite}: expected a module {module}, found none") from error
    kind = getattr(found, name)
    if not (isinstance(kind, type) and issubclass(kind, Simulator)):
        raise ConfigError(
            f"suite {suite}: expected {target} to be a mmrl.robotics.contract.Simulator"
        )
    return kind


def make_simulator(spec: EnvSpec) -> Simulator:
    """Build the simulator of `spec`. Raises ConfigError."""
    return simulator_class(spec.suite)(spec)


def check_actions(actions_CA: Any, space: ActionSpace) -> np.ndarray:
    """`actions_CA` as float64 (C, A). Raises ActionError for another shape or a value that is not finite; values outside the
    bounds are the simulator's to clip, as in its own API."""
    actions = np.asarray(actions_CA, dtype=np.float64)
    if actions.ndim != 2 or actions.shape[0] < 1 or actions.shape[1] != space.dim:
        raise ActionError(
            f"expected actions of shape (C, {space.dim}) with C >= 1 ({', '.join(space.names)}), found "
            f"{tuple(actions.shape)}"
        )
    if not np.isfinite(actions).all():
        row, column = np.argwhere(~np.isfinite(actions))[0]
        raise ActionError(
            f"expected finite actions, found {actions[row, column]} in step {row}, dimension {column} "
            f"({space.names[column]})"
        )
    return actions


def check_picture(spec: EnvSpec, picture: np.ndarray) -> np.ndarray:
    """`picture` as it is. Raises ValueError where it is not uint8 (H, W, 3) of the size that `spec` asks for."""
    side = spec.image_size
    if picture.shape != (side, side, 3) or picture.dtype != np.uint8:
        raise ValueError(
            f"simulator {spec.suite}: expected pictures uint8 ({side}, {side}, 3), found {picture.dtype} {picture.shape}"
        )
    return picture


def check_finite(
    spec: EnvSpec, when: str, *, rewards: np.ndarray = _NOTHING, proprio: np.ndarray = _NOTHING
) -> None:
    """Raises ValueError for a reward or proprioception that is NaN or infinite: it fails the one episode, where a reward that is
    not a number would spoil its group and a state that is not one would be clipped to some bin. `when`: which were read."""
    if not (np.isfinite(rewards).all() and np.isfinite(proprio).all()):
        raise ValueError(
            f"simulator {spec.suite}/{spec.task}: expected finite rewards and proprioception, found {rewards} and {proprio} "
            f"{when}: its physics has broken down, or it reads what is not there"
        )


def run_chunk(simulator: Simulator, actions_CA: Any, *, frames: bool = False) -> ChunkResult:
    """Execute a chunk open loop; stops with the episode. Renders after the last executed step only, or each with `frames`.
    Raises ActionError, and ValueError for a reward or proprioception that is not finite."""
    actions = check_actions(actions_CA, simulator.action_space)
    count = len(actions)
    rewards = np.zeros(count, np.float32)
    terminated, truncated, success, valid = (np.zeros(count, bool) for _ in range(4))
    seen: list[np.ndarray] = []
    observation: Observation | None = None
    for c, action in enumerate(actions):
        result = simulator.step(action)
        rewards[c], terminated[c], truncated[c], success[c], valid[c] = (
            result.reward,
            result.terminated,
            result.truncated,
            result.success,
            True,
        )
        if frames:
            observation = simulator.observe()
            seen.append(observation.images[simulator.spec.cameras[0]])
        if result.terminated or result.truncated:
            break
    if not frames:
        observation = simulator.observe()
    assert observation is not None
    steps = int(valid.sum())
    when = f"after {steps} steps of a chunk"
    check_finite(simulator.spec, when, rewards=rewards[:steps], proprio=observation.proprio)
    return ChunkResult(observation, rewards, terminated, truncated, success, valid, tuple(seen))
