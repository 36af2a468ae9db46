"""LIBERO as a simulator: suites spatial, object, goal, 10 and 90, every recorded initial state, pictures as the protocols see them.

    MUJOCO_GL=osmesa python -c "
    from mmrl.robotics.contract import EnvSpec, make_simulator
    from mmrl.robotics.libero import libero_states
    sim = make_simulator(EnvSpec('libero', 'libero_object/2', horizon=280, image_size=128, cameras=('base', 'wrist')))
    sim.reset(libero_states('libero_object/2', 'eval')[0]); print(sim.observe().instruction, sim.versions())"

A task is `suite/number` or `suite/name`, numbered as in LIBERO's task map (task order 0). An episode starts like in the published
protocols: hard reset, env seed 0, set the recorded state, then 10 settle steps with an open gripper. Pictures are rotated by 180
degrees (which leaves them mirrored, as all published policies expect). Success terminates.

Options: assets ('auto', 'official', 'stand-in' or a folder), gl ('auto', 'osmesa', 'egl', 'none': no pictures), wait_steps (10),
settle_gripper (-1: open), env_seed (0), env_draws ('constant'; see Draws). Without official meshes stand-ins are used, LIBERO's
collision geometry in plain colours: versions()['assets'] then says 'stand-in', and what is measured is no LIBERO score. A folder's
files are compared to LIBERO's hashes: 'official' or 'modified (n of m files)'; a missing one is an error before anything is built.
"""

from __future__ import annotations

import ast
import functools
import importlib.metadata
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import Field, field_validator

from mmrl.errors import ConfigError, DataError, MissingExtraError, did_you_mean
from mmrl.robotics.contract import EnvSpec, InitialState, Split
from mmrl.robotics.libero_assets import (
    INSTALL,
    Assets,
    find_assets,
    init_states,
    libero_folder,
    write_config,
)
from mmrl.robotics.libero_manifest import judge, needs_of
from mmrl.robotics.robosuite import ArmOptions, ArmSimulator, _seeded

__all__ = [
    "EVAL_ROWS",
    "SUITES",
    "TRAIN_ROWS",
    "Draws",
    "LiberoOptions",
    "LiberoSimulator",
    "describe_rows",
    "libero_states",
    "libero_tasks",
    "resolve_task",
]

SUITES = ("libero_spatial", "libero_object", "libero_goal", "libero_10", "libero_90")

TRAIN_ROWS = range(40)
"""Rows of an init file that training starts from."""

EVAL_ROWS = range(40, 50)
"""Rows held out for evaluation. Published protocols evaluate on all 50: `libero_states(..., rows='all')`."""

Draws = Literal["constant", "per-episode", "in-turn"]
"""Where fixtures stand, which no recorded state says: LIBERO draws it at every reset. constant: the first draw of env_seed;
per-episode: the first draw of env_seed + n in episode n of a task; in-turn: its draw n + 1, as one seed per task gives."""

# robosuite's random placement may fail; the seed makes the sequence the same every time
_ATTEMPTS = 100


@functools.cache
def _task_map() -> dict[str, list[str]]:
    """Suite -> task names in LIBERO's order, read from the package's table without importing it."""
    path = libero_folder() / "benchmark" / "libero_suite_task_map.py"
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "libero_task_map":
            return dict(ast.literal_eval(node.value))
    raise DataError(f"expected libero_task_map in {path}, found none; reinstall LIBERO: {INSTALL}")


def _suite(name: str) -> str:
    full = name if name.startswith("libero_") else f"libero_{name}"
    if full not in SUITES:
        raise ConfigError(
            f"libero: expected suite {', '.join(SUITES)}, found {name!r}.{did_you_mean(full, SUITES)}"
        )
    return full


def libero_tasks(suite: str) -> list[str]:
    """Task names of a suite ('libero_object' or 'object'), in LIBERO's order."""
    return list(_task_map()[_suite(suite)])


def resolve_task(task: str) -> tuple[str, str]:
    """(suite, name) of 'libero_object/3', 'object/3' or 'libero_object/pick_up_the_...'. Raises ConfigError."""
    head, slash, rest = task.partition("/")
    if not slash:
        raise ConfigError(
            f"libero: expected a task suite/number or suite/name, such as libero_object/3, found {task!r}"
        )
    suite = _suite(head)
    names = libero_tasks(suite)
    if rest.isascii() and rest.isdigit():
        if int(rest) >= len(names):
            raise ConfigError(
                f"libero: expected a task number 0 to {len(names) - 1} of {suite}, found {rest}"
            )
        return suite, names[int(rest)]
    if rest not in names:
        raise ConfigError(
            f"libero: expected a task of {suite} (0 to {len(names) - 1}, or its name), found {rest!r}."
            f"{did_you_mean(rest, names)}"
        )
    return suite, rest


def libero_states(
    task: str, split: Split, *, rows: str | Sequence[int] = "held-out", count: int | None = None
) -> list[InitialState]:
    """Initial states of a task: rows 0-39 of its init file for training, 40-49 for evaluation.

    `rows`: 'held-out' (that division), 'all' (all rows, as the published protocols evaluate: name it with `describe_rows`), or row
    numbers. `count` takes the first so many, or repeats the rows in order when it is larger.
    Raises ConfigError for a row the file does not have, an unknown split, or training on 'all'.
    """
    suite, name = resolve_task(task)
    have = len(init_states(suite, name))
    if split not in ("train", "eval"):
        raise ConfigError(
            f"expected split train or eval, found {split!r}.{did_you_mean(split, ('train', 'eval'))}"
        )
    if rows == "all" and split == "train":
        raise ConfigError(
            "libero: expected rows 'held-out' for training, found 'all': no state would be left for evaluation; give "
            "the row numbers if that is meant"
        )
    if rows == "held-out":
        chosen = [row for row in (TRAIN_ROWS if split == "train" else EVAL_ROWS) if row < have]
    elif rows == "all":
        chosen = list(range(have))
    elif isinstance(rows, str):
        raise ConfigError(
            f"libero: expected rows 'held-out', 'all' or numbers, found {rows!r}."
            f"{did_you_mean(rows, ('held-out', 'all'))}"
        )
    else:
        chosen = [int(row) for row in rows]
    if not chosen or min(chosen) < 0 or max(chosen) >= have:
        raise ConfigError(
            f"libero: expected rows 0 to {have - 1} of {task}, found {chosen or 'none'}"
        )
    total = len(chosen) if count is None else count
    return [InitialState(split, i, 0, chosen[i % len(chosen)]) for i in range(total)]


def describe_rows(states: Sequence[InitialState]) -> str:
    """What a report must say of the rows it evaluated: 'rows 40-49, held out', or how many of them are training rows."""
    rows = sorted({_row(state) for state in states})
    text = (
        f"row {rows[0]}" if len(rows) == 1 else f"{len(rows)} rows between {rows[0]} and {rows[-1]}"
    )
    if len(rows) > 1 and rows == list(range(rows[0], rows[-1] + 1)):
        text = f"rows {rows[0]}-{rows[-1]}"
    seen = sum(row in TRAIN_ROWS for row in rows)
    return f"{text}, {'held out' if not seen else f'{seen} of {len(rows)} are training rows'}"


def _row(state: InitialState) -> int:
    """The state's row; states of `initial_states` have none and take their split's rows in turn."""
    if state.row is not None:
        return state.row
    rows = TRAIN_ROWS if state.split == "train" else EVAL_ROWS
    return rows[state.index % len(rows)]


class LiberoOptions(ArmOptions):
    """Options of LIBERO's tasks; see the module."""

    assets: str = "auto"
    wait_steps: Annotated[int, Field(ge=0)] = 10
    settle_gripper: float = -1.0
    env_seed: int = 0
    env_draws: Draws = "constant"

    @field_validator("settle_gripper")
    @classmethod
    def _open_held_closed(cls, value: float) -> float:
        if value not in (-1, 0, 1):
            raise ValueError(
                f"expected options.settle_gripper as -1 (open), 0 or 1 (closed), found {value!r}"
            )
        return value


class LiberoSimulator(ArmSimulator):
    """One LIBERO task. Initial states are rows of its init file (see `libero_states`); the seed of a state is not used, since
    another environment seed would change the picture (`env_seed`)."""

    option_class: ClassVar[type[LiberoOptions]] = LiberoOptions
    options: LiberoOptions
    cameras: ClassVar[Mapping[str, str]] = {
        "base": "agentview",
        "wrist": "robot0_eye_in_hand",
        "front": "frontview",
    }
    install = INSTALL
    packages: ClassVar[Mapping[str, str]] = {"libero": INSTALL, "robosuite": INSTALL}

    @classmethod
    def recorded_states(cls, task: str, split: Split) -> list[InitialState] | None:
        """Rows of the task's init file."""
        return libero_states(task, split)

    @classmethod
    def describe_states(cls, states: Sequence[InitialState]) -> str:
        """Which rows of init files."""
        return describe_rows(states)

    def __init__(self, spec: EnvSpec) -> None:
        super().__init__(spec)
        self.suite, self.task_name = resolve_task(spec.task)
        self._assets: Assets | None = None
        self._states: np.ndarray | None = None
        self._wrapper: Any = None
        self._built: list[Any] = []
        self._begins: dict[int, list[tuple[Any, list[Any]]]] = {}

    @property
    def bddl_file(self) -> Path:
        """The task's definition."""
        return libero_folder() / "bddl_files" / self.suite / f"{self.task_name}.bddl"

    @property
    def instruction(self) -> str:
        """The task in words, from its name as LIBERO's benchmark does; a scene prefix is left out."""
        words = self.task_name
        if words[0].isupper():
            words = words[words.index("_", words.index("SCENE")) + 1 :]
        return words.replace("_", " ")

    @property
    def goal(self) -> list[list[str]]:
        """Goal predicates, e.g. [['in', 'milk_1', 'basket_1_contain_region']]. Needs a reset."""
        return [list(predicate) for predicate in self.env.parsed_problem["goal_state"]]

    def _resolve_assets(self) -> Assets:
        if self._assets is None:
            assets = find_assets(self.options.assets)
            if assets.kind != "stand-in":
                text = self.bddl_file.read_text(encoding="utf-8")
                verdict = judge(assets.folder, needs_of(text))
                verdict.require_all(assets.folder, self.spec.task)
                assets = Assets(assets.folder, verdict.kind)
            self._assets = assets
        return self._assets

    def _check(self, state: InitialState) -> None:
        if self._states is None:
            self._states = init_states(self.suite, self.task_name)
        row = _row(state)
        if not 0 <= row < len(self._states):
            raise ConfigError(
                f"libero: expected a row 0 to {len(self._states) - 1} of {self.spec.task}, found {row}"
            )
        self._resolve_assets()

    def _point_at_assets(self) -> None:
        """LIBERO asks for its assets folder whenever it builds a model, and would download it."""
        from libero import libero

        libero._assets_path_cache = str(self._resolve_assets().folder)

    def _build(self, robosuite: Any, settings: dict[str, Any]) -> Any:
        write_config()
        try:
            self._point_at_assets()
            from libero.libero.envs.env_wrapper import ControlEnv
        except ImportError as error:
            raise MissingExtraError(
                f"LIBERO cannot be imported ({error}). Install what it needs: {INSTALL}"
            ) from error
        # not OffScreenRenderEnv: that one asks for a GL context whatever it is told
        self._wrapper = ControlEnv(bddl_file_name=str(self.bddl_file), **settings)
        return self._wrapper.env

    def _start(self, state: InitialState) -> None:
        self._point_at_assets()
        assert self._states is not None
        recorded = self._states[_row(state)]
        self._draw(state.index)
        expected = 1 + self.env.sim.model.nq + self.env.sim.model.nv
        if len(recorded) != expected:
            raise DataError(
                f"{self.spec.task}: expected initial states of {expected} numbers for these assets, found "
                f"{len(recorded)}"
            )
        self._wrapper.set_init_state(recorded)
        settle = np.array([0.0] * 6 + [self.options.settle_gripper])
        for _ in range(self.options.wait_steps):
            self.env.step(settle)

    def _draw(self, episode: int) -> None:
        """Reset with the draw that belongs to an episode (counted within its split). What a draw began with is kept, so that the
        next one costs one reset."""
        draws, seed = self.options.env_draws, self.options.env_seed
        if draws == "per-episode":
            seed += episode
        number, samplers = (
            (episode if draws == "in-turn" else 0),
            self.env.object_property_initializers,
        )
        # LIBERO adds its samplers of joints again at every reset, so that later resets draw more: each draw gets the list it would
        # have in an environment that was reset so often
        if not self._built:
            self._built = list(samplers)
        known = self._begins.setdefault(seed, [])
        with _seeded(seed):
            if not known:
                known.append((np.random.get_state(), list(self._built)))
            for turn in range(min(number, len(known) - 1), number + 1):
                before, had = known[turn]
                np.random.set_state(before)
                samplers[:] = had
                self._place()
                if turn + 1 == len(known):
                    known.append((np.random.get_state(), list(samplers)))

    def _place(self) -> None:
        """LIBERO's own reset retries a failed placement for ever, and any other error with it."""
        from robosuite.utils.errors import RandomizationError

        for _ in range(_ATTEMPTS):
            try:
                self.env.reset()
            except RandomizationError:
                continue
            return
        raise DataError(
            f"{self.spec.task}: expected robosuite to place the objects, found no place in {_ATTEMPTS} attempts"
        )

    def _succeeded(self) -> bool:
        return bool(self.env._check_success())

    def _turn(self, picture: np.ndarray) -> np.ndarray:
        """Rotate by 180 degrees, as OpenVLA, OFT, openpi, SimpleVLA-RL and RLinf do."""
        return picture[::-1, ::-1]

    def close(self) -> None:
        """Free GL and the simulator."""
        super().close()
        self._wrapper = None

    def expert(
        self, rng: np.random.Generator, noise: float = 0.0
    ) -> Callable[[], tuple[np.ndarray, np.ndarray]]:
        """Makes the goal's predicates true: picks and places, pulls, pushes, twists (mmrl.robotics.libero_experts)."""
        from mmrl.robotics.libero_experts import GoalExpert

        return GoalExpert(self, rng, noise)

    def versions(self) -> dict[str, str]:
        """mujoco, robosuite, libero, render backend, kind of assets, and how an episode starts."""
        found = super().versions()
        for name in ("hf-libero", "rlinf-libero", "libero"):
            try:
                found["libero"] = f"{name} {importlib.metadata.version(name)}"
                break
            except importlib.metadata.PackageNotFoundError:
                continue
        found["assets"] = self._resolve_assets().kind
        found["episodes start with"] = (
            f"env seed {self.options.env_seed} ({self.options.env_draws}), {self.options.wait_steps} settle steps"
        )
        return found
