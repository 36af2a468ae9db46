"""What a launcher says in the environment, checked before the processes of a run try to meet.

Else each of them would be a run of its own, or they would wait for somebody who does not come.
"""

from __future__ import annotations

import os

from mmrl.errors import ConfigError

__all__ = ["VARIABLES", "processes_launched"]

_MPI = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")
_STEP = "SLURM_STEP_NUM_TASKS"  # srun's; SLURM_NTASKS is a batch script's, too
_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
VARIABLES = (*_NEEDED, "LOCAL_RANK", "LOCAL_WORLD_SIZE", _STEP, *_MPI)
"""What makes a process one of several."""
_TORCHRUN = "start it with torchrun (scripts/launch_torchrun.sh), which sets RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT"


def processes_launched() -> tuple[bool, int]:
    """Whether a launcher of torch's kind started this process, and how many processes the run is to have (mpirun's, too).

    Raises ConfigError where the variables of one are missing or contradict each other.
    """
    if _number("LOCAL_RANK", -1, least=-1) == -1:
        if (size := _number("WORLD_SIZE", 1, least=1)) > 1:
            raise ConfigError(
                f"expected LOCAL_RANK beside WORLD_SIZE {size}, found none: each of the {size} processes would train a run of "
                f"its own; {_TORCHRUN}, or set LOCAL_RANK to the number of the process on its machine, 0 where it is the only one"
            )
        if (tasks := _number(_STEP, 1)) > 1:
            raise ConfigError(
                f"expected one torchrun in each task of srun, found {tasks} tasks ({_STEP}) that would train a run of their own "
                "each; start the run with scripts/slurm_train.sbatch, one process with srun --ntasks=1, or, where separate runs "
                f"are meant and in a shell of srun --pty, unset {_STEP}"
            )
        return False, max(_number(name, 1) for name in _MPI)
    rank, size = _number("RANK", 0), _number("WORLD_SIZE", 1, least=1)
    if missing := [name for name in _NEEDED if not os.environ.get(name)]:
        raise ConfigError(
            f"expected RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT beside LOCAL_RANK, found no {', '.join(missing)}; "
            f"{_TORCHRUN}"
        )
    if rank >= size:
        raise ConfigError(
            f"expected RANK below WORLD_SIZE {size}, found {rank}: processes are numbered from 0; {_TORCHRUN}"
        )
    _number("MASTER_PORT", 0)
    _number("LOCAL_WORLD_SIZE", 1, least=1)
    return True, size


def _number(name: str, without: int, least: int = 0) -> int:
    """The number in the environment variable `name`. Raises ConfigError for anything else."""
    text = os.environ.get(name, "")
    try:
        number = int(text) if text else without
    except ValueError:
        number = least - 1
    if number < least:
        raise ConfigError(
            f"expected a number from {least} on in the environment variable {name}, found {text!r}; {_TORCHRUN}, or unset it"
        )
    return number
