"""The processes of a run, through accelerate: one process on a laptop, several under `accelerate launch` or torchrun."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs, gather_object

from mmrl import errors
from mmrl.distributed.launch import processes_launched
from mmrl.errors import ConfigError, MMRLError

__all__ = ["World"]

_LOG = logging.getLogger(__name__)

# Others wait for rank 0 while it writes a checkpoint; NCCL's own 10 minutes are too few for a large model on a slow disk.
_TIMEOUT = timedelta(hours=2)


@dataclass(frozen=True)
class _Stop:
    """Among the items of a process: it ends, with this error (`kind`: the name of a class of mmrl.errors)."""

    rank: int
    kind: str
    message: str

    @classmethod
    def of(cls, rank: int, error: BaseException) -> _Stop:
        plain = (
            c.__name__
            for c in type(error).__mro__
            if c.__module__ == MMRLError.__module__ and c is not errors.MediaError
        )
        if kind := next(plain, ""):
            return cls(rank, kind, str(error))
        return cls(
            rank, "MMRLError", f"{type(error).__name__}: {error} (its output has the traceback)"
        )


def _choose_gpu(device: torch.device, launched: bool) -> None:
    """Make the GPU with the index in `device` the current one; launched processes get that of their local rank.

    Raises ConfigError when there is no such GPU.
    """
    if device.type != "cuda" or device.index is None or launched:
        return
    count = torch.cuda.device_count()
    if device.index >= count:
        raise ConfigError(
            f"expected model.device to name one of the {count} GPUs here (cuda:0 ...), found '{device}'"
        )
    torch.cuda.set_device(device)


class World:
    """Rank, size and the few collective operations mmrl needs; with one process they do nothing.

    `options` are further arguments of accelerate's Accelerator, the plugin of a training engine (mmrl.distributed.engines). Raises
    ConfigError where launched processes would each be a run of its own or could not meet (mmrl.distributed.launch), or `device`
    names a GPU that is not there.
    """

    _stopping = False

    def __init__(self, device: torch.device | None = None, **options: Any) -> None:
        launched, asked = processes_launched()
        if device is not None:
            _choose_gpu(device, launched)
        group = InitProcessGroupKwargs(timeout=_TIMEOUT)
        if "backend" in options:  # accelerate finds none by itself where DeepSpeed runs on a CPU
            group.backend = options.pop("backend")
        # Launched processes without an accelerator: accelerate joins them only where it is told that they compute on the CPU.
        on_cpu = (
            device.type == "cpu"
            if device is not None
            else launched and not torch.accelerator.is_available()
        )
        self.accelerator = Accelerator(**{"cpu": on_cpu, "kwargs_handlers": [group], **options})
        if (launched or asked > 1) and self.size != asked:
            raise ConfigError(
                f"expected a run of {asked} processes, as their launcher says, found that they do not join: {self.size} on "
                f"{self.device.type}; start them with torchrun and leave model.device unset, or start one process"
            )

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

    @property
    def stopping(self) -> bool:
        """Whether this process or another one ends with an error, and all know it."""
        return self._stopping

    def gather(self, items: list[Any]) -> list[Any]:
        """Picklable items of all processes, in order of rank, on every process.

        Raises the error, an MMRLError, with which another process stopped (see `stop`).
        """
        if self.size == 1:
            return items
        found = list(gather_object(items))
        stop = next((item for item in found if isinstance(item, _Stop)), None)
        if stop is not None and not self._stopping:
            self._stopping = True
            raise getattr(errors, stop.kind)(
                f"process {stop.rank} of {self.size} stopped: {stop.message}"
            )
        return [item for item in found if not isinstance(item, _Stop)]

    def deal(self, shares: list[Any] | None) -> Any:
        """What the main process has for this one: `shares` holds one picklable item for each, in order of rank; None elsewhere.

        Raises as `gather` does.
        """
        if self.size == 1:
            assert shares is not None
            return shares[0]
        # where an error of the main process is heard of
        self.barrier()
        mine: list[Any] = [None]
        torch.distributed.scatter_object_list(mine, shares, src=0)
        return mine[0]

    def stop(self, error: BaseException) -> None:
        """Tell the other processes that this one ends with `error`: the `gather`, `sum` or `barrier` they come to next raises it.

        Waits until they have come there. Does nothing when they know: after `stop`, and where a collective raised their error here.
        The caller must not have left out any other collective that they are about to run (as inside a sharded engine).
        """
        if self.size == 1 or self._stopping:
            return
        self._stopping = True
        _LOG.error(
            "process %d of %d stops, the others follow when they have come as far: %s",
            self.rank,
            self.size,
            error,
        )
        try:
            gather_object([_Stop.of(self.rank, error)])
        except RuntimeError as lost:  # they are gone
            _LOG.warning("the other processes could not be told: %s", lost)

    @contextmanager
    def raise_on_all_ranks(self) -> Iterator[None]:
        """An error inside is told to the other processes before it is raised; what `stop` asks of its caller holds here too."""
        try:
            yield
        except Exception as error:
            self.stop(error)
            raise

    def sum(self, values: list[float]) -> list[float]:
        """Elementwise sum over processes, in float64."""
        if self.size == 1:
            return values
        return [sum(column) for column in zip(*self.gather([values]), strict=True)]

    def barrier(self) -> None:
        """Wait for every process. Raises as `gather` does."""
        self.gather([])

    def close(self) -> None:
        """Leave the process group."""
        self.accelerator.end_training()  # destroys the process group in recent releases of accelerate
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
