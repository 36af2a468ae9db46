"""How often do the scripted experts solve their tasks? They play evaluation initial states in real simulators, in worker processes.

    python -m scripts.check_experts libero                               # four suites, 40 tasks, 10 episodes each
    python -m scripts.check_experts maniskill --tasks PickCube-v1 --episodes 50
    python -m scripts.check_experts libero --missing                     # go on after an interrupt: tasks without a row
    python -m scripts.check_experts libero --tasks libero_object/3 --clips runs/unsolved --no-record

Nothing is drawn but the clips of --clips, which show the unsolved episodes once more. Prints solved k/n and control steps per
task and writes assets/results/experts_SUITE.json, renewed after every task; tasks not played now keep their rows where episodes
and noise are the same: every row has the date, the machine and the simulator's versions of its own run. What was measured on
LIBERO's stand-ins (LIBERO's collision geometry in colours of ours) says `assets: stand-ins`: it tests the bridge and the expert,
no policy, and is no LIBERO score. Exit status 1 when an episode was not solved.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np

from mmrl.errors import ConfigError, MMRLError, did_you_mean
from mmrl.evaluation.stats import wilson
from mmrl.evaluation.suite_book import load_suites
from mmrl.robotics.contract import EnvSpec, InitialState, initial_states
from mmrl.robotics.evaluate import describe_states, write_video
from mmrl.robotics.pool import PoolSettings, Reply, VectorEnv
from mmrl.robotics.source import states_of
from mmrl.robotics.suites import EnvironmentSuite
from scripts import _bench
from scripts._expert_simulator import EXPERT

__all__ = ["SUITES", "expert_specs", "measure"]

SUITES: dict[str, tuple[str, ...]] = {
    "libero": ("libero_spatial", "libero_object", "libero_goal", "libero_10"),
    "maniskill": ("maniskill_tabletop",),
    "tiny": ("tiny_push", "tiny_reach", "tiny_pick"),
    "robosuite": ("robosuite_lift",),
    "metaworld": ("metaworld_mt50",),
}
"""Suites and groups of configs/robot_suites.yaml whose tasks have an expert, by simulator."""

_PACKAGES = {
    "libero": ("mujoco", "robosuite", "hf-libero"),
    "maniskill": ("mani_skill", "sapien"),
    "robosuite": ("mujoco", "robosuite"),
    "metaworld": ("mujoco", "metaworld", "gymnasium"),
}
_BLIND = {
    "maniskill": {"render_backend": "none"},
    "libero": {"gl": "none"},
    "metaworld": {"gl": "none"},
}
"""Options without which a simulator would prepare to draw."""
_BLACK_SIDE, _CLIP_SIDE = 8, 192  # pixels: of pictures that nobody draws, and of clips
_CHUNK = 10  # control steps of one command to a worker
_LIMITS = PoolSettings(handshake_s=180.0, reset_s=180.0, step_s=120.0)


def expert_specs(suite: str, tasks: Sequence[str] = (), *, noise: float = 0.0) -> list[EnvSpec]:
    """The environments of a simulator's experts (all, or `tasks`), with the horizons of configs/robot_suites.yaml.

    Raises ConfigError for a task that is none of them.
    """
    specs: list[EnvSpec] = []
    for one in load_suites().select(",".join(SUITES[suite])).values():
        assert isinstance(one, EnvironmentSuite), f"{one} is no suite of a simulator"
        options = {**one.options, "of": one.env, "noise": noise, "draw": False}
        if one.env in _BLIND:
            options |= _BLIND[one.env]
        specs += [
            EnvSpec(EXPERT, task, one.horizon, _BLACK_SIDE, ("base",), options)
            for task in one.tasks
        ]
    known = [spec.task for spec in specs]
    for task in tasks:
        if task not in known:
            raise ConfigError(
                f"expected tasks among {', '.join(known)}, found {task!r}.{did_you_mean(task, known)}"
            )
    return [spec for spec in specs if not tasks or spec.task in tasks]


@dataclass
class _Run:
    """An episode in a slot, or one that ended."""

    spec: EnvSpec
    state: InitialState
    steps: int = 0
    solved: bool = False
    error: str = ""
    frames: list[np.ndarray] = field(default_factory=list)


def _states(spec: EnvSpec, count: int) -> list[InitialState]:
    """The first `count` evaluation states; LIBERO has ten of each task."""
    known = states_of(replace(spec, suite=spec.options["of"]), "eval")
    return initial_states("eval", count) if known is None else known[:count]


def _take(pool: VectorEnv, reply: Reply, run: _Run) -> bool:
    """Use a reply and send the next command; whether the episode has ended. Raises ConfigError for what no episode can fix."""
    if reply.error is not None:
        if reply.cause == "setup":
            raise ConfigError(reply.error)
        run.error = reply.error
        return True
    if reply.chunk is not None:
        run.steps += int(reply.chunk.valid_C.sum())
        run.solved |= bool(reply.chunk.success_C.any())
        run.frames += reply.chunk.frames
        if reply.chunk.done or run.solved:
            return True
    pool.step(reply.slot, np.zeros((_CHUNK, 1)), frames=bool(run.spec.options["draw"]))
    return False


def _play(pool: VectorEnv, todo: Sequence[tuple[EnvSpec, InitialState]]) -> list[_Run]:
    """All episodes, in the order of `todo`."""
    runs = [_Run(spec, state) for spec, state in todo]
    waiting, running, free = deque(runs), dict[int, _Run](), list(range(pool.num_slots))
    while waiting or running:
        while waiting and free:
            slot = free.pop(0)
            running[slot] = waiting.popleft()
            pool.reset(slot, running[slot].spec, running[slot].state)
        for reply in pool.ready():
            if _take(pool, reply, running[reply.slot]):
                del running[reply.slot]
                free.append(reply.slot)
    return runs


def _row(
    spec: EnvSpec, runs: Sequence[_Run], versions: Mapping[str, str], seconds: float
) -> dict[str, Any]:
    """What is known of a task."""
    solved, inner = [run for run in runs if run.solved], replace(spec, suite=spec.options["of"])
    share = wilson(len(solved), len(runs))
    assets = (
        "stand-ins"
        if versions.get("assets") == "stand-in"
        else versions.get("assets", "the simulator's own")
    )
    return {
        "task": spec.task,
        "date": datetime.now(timezone.utc).date().isoformat(),
        "machine": _bench.machine(),
        "assets": assets,
        "horizon": spec.horizon,
        "episodes": len(runs),
        "solved": len(solved),
        "share": {"mean": share.mean, "low": share.low, "high": share.high},
        "steps": _bench.spread([run.steps for run in solved], 1) if solved else None,
        "unsolved": [
            {
                "state": run.state.name,
                "seed": run.state.seed,
                "row": run.state.row,
                "steps": run.steps,
                "error": run.error[-600:],
            }
            for run in runs
            if not run.solved
        ],
        "states": describe_states(inner, [run.state for run in runs]),
        "simulator": dict(versions),
        "seconds": round(seconds, 1),
    }


def measure(
    specs: Sequence[EnvSpec],
    episodes: int,
    workers: int,
    on_row: Callable[[dict[str, Any]], None],
    clips: Path | None = None,
) -> None:
    """Play `episodes` evaluation states of every environment, task after task; `on_row` gets each task's row. `clips`: where the
    unsolved ones are filmed, drawn in a second run. Raises MMRLError when a task cannot run here."""
    with VectorEnv(workers, workers, _LIMITS) as pool:
        for spec in specs:
            began = time.monotonic()
            runs = _play(pool, [(spec, state) for state in _states(spec, episodes)])
            facts = pool.facts.get(spec.key)
            on_row(
                _row(
                    spec,
                    runs,
                    facts.versions if facts is not None else {},
                    time.monotonic() - began,
                )
            )
            if clips is not None:
                _film(pool, [run for run in runs if not run.solved], clips)


def _film(pool: VectorEnv, runs: Sequence[_Run], folder: Path) -> None:
    """Play episodes again with pictures."""

    def drawn(spec: EnvSpec) -> EnvSpec:
        blind = _BLIND.get(spec.options["of"], {})
        options = {name: value for name, value in spec.options.items() if name not in blind}
        return replace(spec, image_size=_CLIP_SIDE, options={**options, "draw": True})

    for run in _play(pool, [(drawn(run.spec), run.state) for run in runs]):
        if run.frames:
            path = folder / f"{run.spec.task.replace('/', '_')}_{run.state.name}.mp4"
            print(
                f"unsolved: {write_video(path, run.frames)}"
                + (" (solved this time)" if run.solved else ""),
                flush=True,
            )


def _kept(suite: str, setting: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Rows of an earlier run with the same setting, by task."""
    return {row["task"]: row for row in _bench.recorded_rows(f"experts_{suite}", "tasks", setting)}


def _say(row: Mapping[str, Any]) -> None:
    steps = row["steps"]
    taken = (
        f", {steps['median']:g} control steps ({steps['min']:g} to {steps['max']:g})"
        if steps
        else ""
    )
    print(
        f"{row['task']}: solved {row['solved']}/{row['episodes']}{taken}, {row['seconds']:.0f} s, assets: {row['assets']}",
        flush=True,
    )
    for one in row["unsolved"]:
        print(
            f"  unsolved: {one['state']} "
            + (
                f"(error: {one['error'].strip().splitlines()[-1]})"
                if one["error"]
                else f"within {one['steps']} steps"
            ),
            flush=True,
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; 0 when every episode was solved."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("suite", choices=tuple(SUITES))
    parser.add_argument("--tasks", default="", help="comma-separated; default: all with an expert")
    parser.add_argument(
        "--episodes", type=int, default=10, help="of each task, from its first evaluation states"
    )
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument(
        "--noise", type=float, default=0.0, help="standard deviation added to the expert's actions"
    )
    parser.add_argument(
        "--missing", action="store_true", help="only tasks without a row in the results"
    )
    parser.add_argument("--clips", type=Path, help="folder for clips of unsolved episodes")
    parser.add_argument("--no-record", action="store_true", help="write no results")
    o = _bench.parse(parser, arguments)
    if o.episodes < 1 or o.workers < 1:
        parser.error(
            f"expected --episodes and --workers of at least 1, found {o.episodes} and {o.workers}"
        )
    setting = {"suite": o.suite, "episodes": o.episodes, "noise": o.noise}
    everything = [spec.task for spec in expert_specs(o.suite)]
    rows = _kept(o.suite, setting)
    played: list[dict[str, Any]] = []

    def on_row(row: dict[str, Any]) -> None:
        _say(row)
        played.append(row)
        rows[row["task"]] = row
        if not o.no_record:
            tasks = [rows[task] for task in everything if task in rows]
            value = {
                **setting,
                "assets": ", ".join(dict.fromkeys(row["assets"] for row in tasks)),
                "tasks": tasks,
                "missing": [task for task in everything if task not in rows],
            }
            _bench.write_results(f"experts_{o.suite}", value, *_PACKAGES.get(o.suite, ()))

    try:
        specs = expert_specs(
            o.suite, [t.strip() for t in o.tasks.split(",") if t.strip()], noise=o.noise
        )
        measure(
            [spec for spec in specs if not (o.missing and spec.task in rows)],
            o.episodes,
            o.workers,
            on_row,
            o.clips,
        )
    except KeyboardInterrupt:
        print(
            f"interrupted after {len(played)} tasks, which are recorded; go on with --missing",
            file=sys.stderr,
        )
        return 130
    except MMRLError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    solved, count = (sum(row[name] for row in played) for name in ("solved", "episodes"))
    print(f"{o.suite}: solved {solved}/{count} in {len(played)} tasks")
    return int(solved < count)


if __name__ == "__main__":
    raise SystemExit(main())
