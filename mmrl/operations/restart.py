"""Restarts: whether a launch continues the run in its folder, and whether all processes see the same checkpoint.

torchrun (--max-restarts) starts all processes again when one dies or when a node joins or leaves. A restarted process must continue
from the last checkpoint without being told; `resumes` decides, on the main process, for all.
"""
from __future__ import annotations

import json
import os
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from mmrl.errors import ConfigError

if TYPE_CHECKING:
    from mmrl.world import World

__all__ = ["Resume", "agree_on_checkpoint", "resumes"]

Resume = bool | Literal["auto"]
_CLOCK_S = 2.0  # by which a process's time of creation and the wall clock may differ


def resumes(asked: Resume, run: Path, world: World) -> bool:
    """Whether the run in `run` is to be continued; collective, the main process's answer.

    auto: where the folder holds a run. Also where the launcher restarted the processes (TORCHELASTIC_RESTART_COUNT) and the run in
    the folder was begun by this very launch: what an earlier launch left there still needs --resume or --overwrite.
    """
    held = (run / "run.json").exists() or (run / "metrics.jsonl").exists()
    found = asked is True or (held and (asked == "auto" or _begun_by_this_launch(run)))
    return world.gather([found])[0]


def _begun_by_this_launch(run: Path) -> bool:
    """Whether the elastic launcher above this process was there before the run in `run` was started, and restarted us since."""
    if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) == 0:
        return False
    import psutil

    try:
        started = json.loads((run / "run.json").read_text(encoding="utf-8"))["started"]
        return datetime.fromisoformat(started).timestamp() > psutil.Process(os.getppid()).create_time() - _CLOCK_S
    except (OSError, ValueError, KeyError, psutil.Error):
        return False  # nothing says so: --auto-resume or --resume decide


def agree_on_checkpoint(step: int, folder: Path, world: World) -> None:
    """Raise ConfigError, on all processes, when they do not find the same last checkpoint: the folder is not shared."""
    found = world.gather([step])
    if len(set(found)) > 1:
        raise ConfigError(f"expected all {world.size} processes to find the same last checkpoint in {folder}, found those of steps "
                          f"{', '.join(map(str, found))} (process 0 first; 0: none); that folder must be shared by all nodes: set "
                          "dir= to a shared file system")
