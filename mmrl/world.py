"""The processes of a run, through accelerate: one process on a laptop, several under `accelerate launch` or torchrun."""
from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

__all__ = ["World"]


class World:
    """Rank, size and the few collective operations mmrl needs; with one process they do nothing."""

    def __init__(self, device: torch.device | None = None) -> None:
        self.accelerator = Accelerator(cpu=device is not None and device.type == "cpu")

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
