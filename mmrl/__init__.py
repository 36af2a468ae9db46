"""mmrl: reinforcement fine-tuning of vision-language models and vision-language-action policies.

    from mmrl import Sample, Score, Task, register          # a task of your own
    from mmrl import Trainer, evaluate, reward              # training from Python (mmrl/library.py)

Importing mmrl is light: torch and transformers are imported by the parts that need them.
"""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

if not (_tasks := Path(__file__).parent / "tasks").is_dir():
    raise ImportError(
        f"expected {_tasks} to be a folder or a symbolic link to one, found neither: this copy of the repository has lost its "
        "symbolic links, as zips and checkouts without them do; get it by `git clone -c core.symlinks=true`"
    )

from mmrl import _torchvision_cpu
from mmrl.operations.startup import quick_transformers

# On Intel CPUs MKL rounds a row of a matrix product differently in batches of different size, unless it is asked for strict
# reproducibility. A rollout's log-probs would then depend on which requests happened to be answered together, and a pipelined,
# resumed or served run would not equal the serial one bit for bit. Read by MKL at its first product; a value of yours stays.
# On AMD's processors MKL does not listen: mmrl/policy/batch_invariance.py.
os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")
# Large tensors in pages of 2 MiB, where Linux offers them (madvise): fresh pages of 4 KiB took half the time of elementwise work on
# logits. Read by torch at its first allocation on a CPU; changes no number.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
_torchvision_cpu.install()  # before anything imports torchvision; does nothing on a CUDA build of torch
quick_transformers()  # before anything imports transformers

if TYPE_CHECKING:
    from mmrl.config import RunConfig, load_config
    from mmrl.coords import CoordFrame
    from mmrl.environment import Environment, Mark, Observation, Outcome, TurnRewards
    from mmrl.errors import DataError
    from mmrl.evaluation.result import Evaluation
    from mmrl.library import Trainer, evaluate, reward
    from mmrl.operations.versions import VERSION as __version__
    from mmrl.registry import register
    from mmrl.task import Task, Template
    from mmrl.types import (
        ImageSize,
        RewardContext,
        Rollout,
        RolloutGroup,
        Sample,
        Score,
        StopReason,
        Turn,
    )

__all__ = [
    "CoordFrame",
    "DataError",
    "Environment",
    "Evaluation",
    "ImageSize",
    "Mark",
    "Observation",
    "Outcome",
    "RewardContext",
    "Rollout",
    "RolloutGroup",
    "RunConfig",
    "Sample",
    "Score",
    "StopReason",
    "Task",
    "Template",
    "Trainer",
    "Turn",
    "TurnRewards",
    "__version__",
    "evaluate",
    "load_config",
    "register",
    "reward",
]
# Nothing of ours is imported until it is asked for: a process that plays a simulator or checks an expression needs its own room,
# and of its 0.3 seconds of start the rest of these was the greater part.
_HOMES = {
    "mmrl.config": ("RunConfig", "load_config"),
    "mmrl.coords": ("CoordFrame",),
    "mmrl.environment": ("Environment", "Mark", "Observation", "Outcome", "TurnRewards"),
    "mmrl.errors": ("DataError",),
    "mmrl.evaluation.result": ("Evaluation",),
    "mmrl.library": ("Trainer", "evaluate", "reward"),
    "mmrl.registry": ("register",),
    "mmrl.task": ("Task", "Template"),
    "mmrl.types": (
        "ImageSize",
        "RewardContext",
        "Rollout",
        "RolloutGroup",
        "Sample",
        "Score",
        "StopReason",
        "Turn",
    ),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}
_MODULES = ("config", "coords", "environment", "errors", "registry", "task", "types")
"""Modules of these names: `import mmrl; mmrl.errors.DataError` works without an import of their own."""

_RENAMED = {"Completion": "Turn", "Trajectory": "Rollout", "Group": "RolloutGroup"}
"""Former names, for one release."""


def __getattr__(name: str) -> Any:
    if name in _RENAMED:
        import warnings

        warnings.warn(
            f"mmrl.{name} is called mmrl.{_RENAMED[name]} now; the old name goes with the next release",
            DeprecationWarning,
            stacklevel=2,
        )
        name = _RENAMED[name]
    import importlib

    if name in _MODULES:
        return importlib.import_module(f"mmrl.{name}")
    if name == "__version__":
        found: Any = importlib.import_module("mmrl.operations.versions").VERSION
    elif name in _HOME:
        found = getattr(importlib.import_module(_HOME[name]), name)
    else:
        raise AttributeError(f"module 'mmrl' has no attribute '{name}'")
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
