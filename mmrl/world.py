"""The processes of a run, through accelerate: one process on a laptop, several under `accelerate launch` or torchrun."""
from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs, gather_object

from mmrl.errors import ConfigError

__all__ = ["World"]

# Others wait for rank 0 while it writes a checkpoint; NCCL's own 10 minutes are too few for a large model on a slow disk.
_TIMEOUT = timedelta(hours=2)


def _choose_gpu(device: torch.device) -> None:
    """Make the GPU with the index in `device` the current one; launched processes get that of their local rank.

    Raises ConfigError when there is no such GPU.
    """
    if device.type != "cuda" or device.index is None or int(os.environ.get("LOCAL_RANK", -1)) != -1:
        return
    count = torch.cuda.device_count()
    if device.index >= count:
        raise ConfigError(f"expected model.device to name one of the {count} GPUs here (cuda:0 ...), found '{device}'")
    torch.cuda.set_device(device)


class World:
    """Rank, size and the few collective operations mmrl needs; with one process they do nothing."""

    def __init__(self, device: torch.device | None = None) -> None:
        if device is not None:
            _choose_gpu(device)
        self.accelerator = Accelerator(cpu=device is not None and device.type == "cpu",
                                       kwargs_handlers=[InitProcessGroupKwargs(timeout=_TIMEOUT)])

    @property
    def size(self) -> int:
        """Number of processes."""
        return self.accelerator.num_processes

    @property
    def rank(self) -> int:
        """Number of this process, from 0."""
        return self.accelerator.process_index

    @property
    def is_main(self) -> bool:
        """True on the process that writes files."""
        return self.accelerator.is_main_process

    @property
    def device(self) -> torch.device:
        """Device of this process."""
        return self.accelerator.device

    def gather(self, items: list[Any]) -> list[Any]:
        """Picklable items of all processes, in order of rank, on every process."""
        return list(gather_object(items)) if self.size > 1 else items

    def sum(self, values: list[float]) -> list[float]:
        """Elementwise sum over processes, in float64."""
        if self.size == 1:
            return values
        return [sum(column) for column in zip(*self.gather([values]), strict=True)]

    def barrier(self) -> None:
        """Wait for every process."""
        self.accelerator.wait_for_everyone()

    def close(self) -> None:
        """Leave the process group."""
        self.accelerator.end_training()  # destroys the process group in recent releases of accelerate
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
