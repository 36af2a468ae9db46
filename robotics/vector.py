"""Many environments of one spec in one process: stepped, reset and looked at together. A row of the batch is a slot of the pool.

    from mmrl.robotics.contract import EnvSpec, initial_states
    vector = make_vector(EnvSpec("tiny", "push", 24), rows=4)
    vector.reset(dict(enumerate(initial_states("train", 4))))
    found = vector.step_chunk({row: np.zeros((8, 2)) for row in range(4)})    # {row: ChunkResult, or the exception that row raised}

`Simulator` is one environment; a `VectorSimulator` steps hundreds in one call, as ManiSkill does on a GPU
(mmrl.robotics.maniskill_vector). Every other suite has it as well, as a `SerialVector`: its rows are played one after the other,
and each gives the same episode, bit for bit, as the simulator alone. Arrays are numpy's, or torch tensors on the device
where the simulator computes.

Rows are apart: one that fails is named with its exception and takes no other with it, and a row moves only when it is stepped.

Legend: R rows of a call, C control steps of a chunk, A action dimensions, S proprioception values, H x W picture.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mmrl.errors import ConfigError, need_package
from mmrl.robotics.contract import (
    ActionError,
    ActionSpace,
    ChunkResult,
    EnvSpec,
    InitialState,
    Observation,
    Simulator,
    check_actions,
    check_finite,
    check_picture,
    make_simulator,
    simulator_class,
)

__all__ = [
    "Observations",
    "SerialVector",
    "Steps",
    "VectorSimulator",
    "check_playing",
    "make_playing",
    "make_vector",
]


@dataclass(frozen=True)
class Observations:
    """What `rows` see: pictures uint8 (R, H, W, 3) by camera, `proprio` float32 (R, S), R instructions. `failed`: rows asked for
    that are not in it, with what they raised."""

    rows: tuple[int, ...]
    images: Mapping[str, Any]
    proprio: Any
    instructions: tuple[str, ...]
    failed: Mapping[int, Exception] = field(default_factory=dict)

    def apart(self) -> dict[int, Observation]:
        """The observation of each row, on the host."""
        images = {camera: on_host(batch) for camera, batch in self.images.items()}
        proprio = on_host(self.proprio)
        return {
            row: Observation({c: batch[i] for c, batch in images.items()}, proprio[i], words)
            for i, (row, words) in enumerate(zip(self.rows, self.instructions, strict=True))
        }


@dataclass(frozen=True)
class Steps:
    """One control step of `rows`, arrays (R,); see StepResult. `failed`: rows that were to step and raised."""

    rows: tuple[int, ...]
    rewards_R: Any
    terminated_R: Any
    truncated_R: Any
    success_R: Any
    failed: Mapping[int, Exception] = field(default_factory=dict)


class VectorSimulator(abc.ABC):
    """`rows` environments of `spec`. `__init__` must be cheap and open nothing, as a Simulator's.

    A state starts the same episode in whichever row. Exceptions of the whole (a device that is gone) are raised, those of a row
    are returned.
    """

    several_tasks = True
    """Whether a worker may have such vectors of several tasks, each with a row for each of its slots."""

    def __init__(self, spec: EnvSpec, rows: int) -> None:
        if rows < 1:
            raise ConfigError(f"{spec.suite}/{spec.task}: expected at least one row, found {rows}")
        self.spec, self.rows = spec, rows

    @property
    @abc.abstractmethod
    def action_space(self) -> ActionSpace:
        """Of one control step of one row; may need the first reset."""

    @property
    @abc.abstractmethod
    def proprio_dim(self) -> int:
        """S."""

    @abc.abstractmethod
    def reset(self, states: Mapping[int, InitialState]) -> dict[int, Exception]:
        """Start the episodes of these rows, the others go on; the rows that failed, with why."""

    @abc.abstractmethod
    def step(self, actions: Mapping[int, np.ndarray]) -> Steps:
        """One control step (A,) of these rows without rendering; truncated at spec.horizon. The others stay as they are."""

    @abc.abstractmethod
    def observe(self, rows: Sequence[int]) -> Observations:
        """Render all cameras of the spec for these rows and read their proprioception."""

    def drop(self, row: int) -> None:  # noqa: B027
        """Nobody plays on in this row; what was built for it alone may go."""

    def close(self) -> None:  # noqa: B027
        """Free GL and the simulator; may be called more than once."""

    def versions(self) -> dict[str, str]:
        """See Simulator."""
        return {}

    def step_chunk(
        self, actions: Mapping[int, Any], frames: Sequence[int] = ()
    ) -> dict[int, ChunkResult | Exception]:
        """Execute a chunk (C, A) in each of these rows open loop, as mmrl.robotics.contract.run_chunk does in one: a row stops with
        its episode, and is looked at then; rows of `frames` in every step. Chunks may differ in length. The result of a row is its
        exception where its actions cannot be executed (ActionError), it raises, or its reward or proprioception is not finite."""
        results: dict[int, ChunkResult | Exception] = {}
        traces: dict[int, _Trace] = {}
        for row, chunk in actions.items():
            try:
                traces[row] = _Trace(check_actions(chunk, self.action_space))
            except ActionError as error:
                results[row] = error
        running = sorted(traces)
        while running:
            steps = self.step({row: traces[row].next_action for row in running})
            results |= steps.failed
            for row, *values in zip(
                steps.rows,
                *map(
                    on_host,
                    (steps.rewards_R, steps.terminated_R, steps.truncated_R, steps.success_R),
                ),
                strict=True,
            ):
                traces[row].take(*values)
            looked = [row for row in steps.rows if traces[row].over or row in frames]
            if looked:
                seen = self.observe(looked)
                results |= seen.failed
                for row, observation in seen.apart().items():
                    traces[row].see(observation, self.spec.cameras[0] if row in frames else None)
            for row in steps.rows:
                if row not in results and traces[row].over:
                    results[row] = traces[row].result(self.spec)
            running = [row for row in steps.rows if row not in results]
        for row, found in results.items():
            if isinstance(found, Exception) and not isinstance(found, ActionError):
                self._lose(row, found)
        return results

    def _lose(self, row: int, why: Exception) -> None:
        """Drop a row that raised `why`, whose traceback tells what closing it raises as well."""
        try:
            self.drop(row)
        except Exception as closing:
            closing.__context__, why.__context__ = why.__context__, closing


class _Trace:
    """A chunk under way in one row."""

    def __init__(self, actions_CA: np.ndarray) -> None:
        self.actions, count = actions_CA, len(actions_CA)
        self.step = 0
        self.rewards_C = np.zeros(count, np.float32)
        self.terminated_C, self.truncated_C, self.success_C, self.valid_C = (
            np.zeros(count, bool) for _ in range(4)
        )
        self.frames: list[np.ndarray] = []
        self.observation: Observation | None = None

    @property
    def next_action(self) -> np.ndarray:
        return self.actions[self.step]

    @property
    def over(self) -> bool:
        last = self.step - 1
        return self.step == len(self.actions) or bool(
            self.terminated_C[last] or self.truncated_C[last]
        )

    def take(self, reward: float, terminated: bool, truncated: bool, success: bool) -> None:
        c, self.step = self.step, self.step + 1
        self.rewards_C[c], self.terminated_C[c], self.truncated_C[c] = reward, terminated, truncated
        self.success_C[c], self.valid_C[c] = success, True

    def see(self, observation: Observation, film: str | None) -> None:
        self.observation = observation
        if film is not None:
            self.frames.append(observation.images[film])

    def result(self, spec: EnvSpec) -> ChunkResult | Exception:
        assert self.observation is not None
        rewards, when = self.rewards_C[: self.step], f"after {self.step} steps of a chunk"
        try:
            check_finite(spec, when, rewards=rewards, proprio=self.observation.proprio)
        except ValueError as error:
            return error
        return ChunkResult(
            self.observation,
            self.rewards_C,
            self.terminated_C,
            self.truncated_C,
            self.success_C,
            self.valid_C,
            tuple(self.frames),
        )


class SerialVector(VectorSimulator):
    """Any suite's simulators as rows, one after the other on the CPU: what a native vector of that suite must equal."""

    def __init__(self, spec: EnvSpec, rows: int) -> None:
        super().__init__(spec, rows)
        self._simulators: list[Simulator | None] = [None] * rows

    def _any(self) -> Simulator:
        found = next(filter(None, self._simulators), None)
        if found is None:
            self._simulators[0] = found = make_simulator(self.spec)
        return found

    def _of(self, row: int) -> Simulator:
        simulator = self._simulators[row]
        assert simulator is not None, (
            f"expected row {row} with an episode, found none: reset it first"
        )
        return simulator

    @property
    def action_space(self) -> ActionSpace:
        """See VectorSimulator."""
        return self._any().action_space

    @property
    def proprio_dim(self) -> int:
        """See VectorSimulator."""
        return self._any().proprio_dim

    def reset(self, states: Mapping[int, InitialState]) -> dict[int, Exception]:
        """See VectorSimulator."""
        failed: dict[int, Exception] = {}
        for row, state in states.items():
            try:
                simulator = self._simulators[row]
                if simulator is None:
                    simulator = self._simulators[row] = make_simulator(self.spec)
                simulator.reset(state)
            except Exception as error:
                failed[row] = error
                self._lose(row, error)
        return failed

    def step(self, actions: Mapping[int, np.ndarray]) -> Steps:
        """See VectorSimulator."""
        found, failed = {}, {}
        for row, action in actions.items():
            try:
                found[row] = self._of(row).step(action)
            except Exception as error:
                failed[row] = error
        results = found.values()
        return Steps(
            tuple(found),
            np.array([r.reward for r in results], np.float64),
            np.array([r.terminated for r in results], bool),
            np.array([r.truncated for r in results], bool),
            np.array([r.success for r in results], bool),
            failed,
        )

    def observe(self, rows: Sequence[int]) -> Observations:
        """See VectorSimulator."""
        found: dict[int, Observation] = {}
        failed: dict[int, Exception] = {}
        for row in rows:
            try:
                observation = self._of(row).observe()
                for (
                    picture
                ) in observation.images.values():  # one of another size would spoil the batch
                    check_picture(self.spec, picture)
                found[row] = observation
            except Exception as error:
                failed[row] = error
        seen = list(found.values())
        return Observations(
            tuple(found),
            {camera: np.stack([o.images[camera] for o in seen]) for camera in seen[0].images}
            if seen
            else {},
            np.stack([o.proprio for o in seen]) if seen else np.zeros((0, 0), np.float32),
            tuple(o.instruction for o in seen),
            failed,
        )

    def drop(self, row: int) -> None:
        """See VectorSimulator."""
        simulator, self._simulators[row] = self._simulators[row], None
        if simulator is not None:
            simulator.close()

    def close(self) -> None:
        """See VectorSimulator."""
        for row in range(self.rows):
            self.drop(row)

    def versions(self) -> dict[str, str]:
        """See Simulator."""
        return self._any().versions()


def make_vector(spec: EnvSpec, rows: int) -> VectorSimulator:
    """`rows` environments of `spec`: the suite's own vector, or its simulators one after the other. Raises ConfigError."""
    own = simulator_class(spec.suite).vector(spec, rows)
    return SerialVector(spec, rows) if own is None else own


def make_playing(spec: EnvSpec, rows: int = 1) -> Simulator | VectorSimulator:
    """What a run with `spec` plays: a vector with `rows` where the suite batches, else a simulator. Opens nothing. Raises
    ConfigError."""
    if simulator_class(spec.suite).batches(spec.options):
        return make_vector(spec, rows)
    return make_simulator(spec)


def check_playing(specs: Sequence[EnvSpec], rows: int, *, here: bool = True) -> None:
    """Make what a run with `specs` plays, which opens nothing: a task, an option, a batch or, where simulators play on this machine
    (`here`), a package that cannot be is named before a model is loaded. Raises ConfigError, MissingExtraError."""
    for spec in specs:
        for package, install in simulator_class(spec.suite).packages.items() if here else ():
            need_package(package, f"suite {spec.suite}", mend=install)
        made = make_playing(spec, rows)
        if len(specs) > 1 and isinstance(made, VectorSimulator) and not made.several_tasks:
            raise ConfigError(
                f"{spec.suite}: expected one task where the environments of a worker are one batch, found "
                f"{', '.join(s.task for s in specs)}: choose one (env.tasks), or play them on the CPU"
            )


def on_host(values: Any) -> np.ndarray:
    """A numpy array of values that may lie on a device."""
    return np.asarray(values.cpu() if hasattr(values, "cpu") else values)
