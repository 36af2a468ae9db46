"""Restarts: whether a launch continues the run in its folder, and from which checkpoint, the same for all processes.

torchrun (--max-restarts) starts all processes again when one dies or when a node joins or leaves. A restarted process must continue
from the last checkpoint without being told; `resumes` decides, on the main process, for all.

A checkpoint is read and compared with its manifest before anything of it is loaded, by all processes together, a share of the
files each: at the speed of the disk, once per start. One that is not as it was saved is left out, and the run goes on from the
one before.
"""

from __future__ import annotations

import json
import math
import os
import shlex
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from mmrl.errors import CheckpointError, ConfigError
from mmrl.policy.manifest import has_manifest, problems

if TYPE_CHECKING:
    from mmrl.config import RunConfig
    from mmrl.distributed.world import World
    from mmrl.training.checkpoint import Checkpoints

__all__ = [
    "Resume",
    "Start",
    "agree_on_checkpoint",
    "find_start",
    "resume_command_of",
    "resumes",
    "sound_best",
]

Resume = bool | Literal["auto"]
_CLOCK_S = 2.0  # by which a process's time of creation and the wall clock may differ


def resume_command_of(config: RunConfig) -> str:
    """What continues a run of this configuration, for messages: '`mmrl resume runs/grounding`, or your command with --resume'."""
    run = Path(config.dir) / config.name
    code = (
        " --trust-code"
        if any(".py:" in s.task for s in (*config.data.train, *config.data.eval))
        else ""
    )
    return f"`mmrl resume {shlex.quote(str(run))}{code}`, or your command with --resume"


def resumes(asked: Resume, run: Path, world: World) -> bool:
    """Whether the run in `run` is to be continued; collective, the main process's answer.

    auto: where the folder holds a run. Also where the launcher restarted the processes (TORCHELASTIC_RESTART_COUNT) and the run in
    the folder was begun by this very launch: what an earlier launch left there still needs --resume or --overwrite. Raises
    ConfigError for a run that is to be continued (True) and is not there.
    """
    held = (run / "run.json").exists() or (run / "metrics.jsonl").exists()
    found = held and (asked in (True, "auto") or _begun_by_this_launch(run))
    held, found = world.gather([(held, found)])[0]
    if asked is True and not held:
        raise ConfigError(
            f"expected a run to continue in {run}, found none; correct dir and name, or start it where it is not there yet with "
            "--auto-resume (resume='auto' in Python)"
        )
    return found


def _begun_by_this_launch(run: Path) -> bool:
    """Whether the elastic launcher above this process was there before the run in `run` was started, and restarted us since."""
    if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) == 0:
        return False
    import psutil

    try:
        started = json.loads((run / "run.json").read_text(encoding="utf-8"))["started"]
        return (
            datetime.fromisoformat(started).timestamp()
            > psutil.Process(os.getppid()).create_time() - _CLOCK_S
        )
    except (OSError, ValueError, KeyError, psutil.Error):
        return False  # nothing says so: --auto-resume or --resume decide


def agree_on_checkpoint(step: int, folder: Path, world: World) -> None:
    """Raise ConfigError, on all processes, when they do not find the same last checkpoint: the folder is not shared."""
    found = world.gather([step])
    if len(set(found)) > 1:
        raise ConfigError(
            f"expected all {world.size} processes to find the same last checkpoint in {folder}, found those of steps "
            f"{', '.join(map(str, found))} (process 0 first; 0: none); that folder must be shared by all nodes: set "
            "dir= to a shared file system"
        )


@dataclass
class Start:
    """Where a run goes on: after `step` (0: at its beginning). `newest` is the last step in the folder, `damaged` says what is
    wrong with the checkpoints that were left out, by step."""

    step: int = 0
    newest: int = 0
    damaged: dict[int, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def put_aside(self, checkpoints: Checkpoints) -> dict[int, str]:
        """Take their names from the damaged checkpoints; what is to be said of each, by step. Main process, the folder locked."""
        said = {}
        for step, why in self.damaged.items():
            kept = (
                f"the run goes on from step {self.step}, the last whole one before it"
                if step > self.step
                else f"it was the best one, and the run goes on from step {self.step}"
            )
            said[step] = (
                f"the checkpoint of step {step} is not as it was saved ({why}): {kept}; it was put aside as "
                f"{checkpoints.set_aside(step)}"
            )
        return said


def find_start(checkpoints: Checkpoints, resume: bool, world: World) -> Start:
    """The newest checkpoint that is as it was saved; collective, and the same on all processes.

    Raises ConfigError where processes see different folders, CheckpointError where there are checkpoints and all are damaged: a
    run that began again from nothing would replace what may still be fixed.
    """
    steps = checkpoints.steps() if resume else []
    start = Start(newest=steps[-1] if steps else 0)
    agree_on_checkpoint(start.newest, checkpoints.folder, world)
    for step in reversed(world.gather([steps])[0]):
        faults = world.gather(
            problems(checkpoints.path(step), step=step, share=(world.rank, world.size))
        )
        if not faults:
            start.step = step
            if not has_manifest(checkpoints.path(step)):
                start.notes.append(
                    f"the checkpoint of step {step} was saved by an older version of mmrl, without a manifest: "
                    "damage to its files, or to pictures and clips since, cannot be noticed"
                )
            return start
        start.damaged[step] = faults[0] + (
            f", and {len(faults) - 1} more" if len(faults) > 1 else ""
        )
    if start.damaged:
        listed = "; ".join(f"step {step}: {why}" for step, why in start.damaged.items())
        raise CheckpointError(
            f"expected a checkpoint in {checkpoints.folder} as it was saved, found every one damaged: {listed}. "
            "Copy one back from where you keep copies, or begin again with --overwrite"
        )
    return start


def sound_best(
    checkpoints: Checkpoints, start: Start, best: float | None, best_step: int, world: World
) -> tuple[float | None, int]:
    """(metric, step) of the best checkpoint that is there and whole: what the state says, or the next best by metrics.jsonl when
    that one is damaged (noted in `start`) or gone. Collective."""
    found: tuple[float | None, int] = (best, best_step)
    if world.is_main and best_step not in (0, start.step):
        left = [
            step for step in checkpoints.steps() if step <= start.step and step not in start.damaged
        ]
        if best_step in left and (faults := problems(checkpoints.path(best_step), step=best_step)):
            start.damaged[best_step] = faults[0]
            left.remove(best_step)
        if best_step not in left:
            scores = _selections(checkpoints.folder.parent / "metrics.jsonl")
            found = max(
                ((scores[step], step) for step in left if step in scores), default=(None, 0)
            )
    return world.gather([found])[0]


def _selections(metrics: Path) -> dict[int, float]:
    """Step -> the metric by which checkpoints are compared, of every step that measured it."""
    rows: list[dict[str, Any]] = []
    for line in metrics.read_text(encoding="utf-8").splitlines() if metrics.is_file() else ():
        try:
            rows.append(json.loads(line))
        except ValueError:
            continue  # the last line, cut short by a kill
    return {
        int(row["step"]): float(score)
        for row in rows
        if isinstance(row, dict)
        and isinstance(score := row.get("eval/selection"), (int, float))
        and math.isfinite(score)
    }
