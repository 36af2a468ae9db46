"""TensorBoard and Weights & Biases on request; metrics.jsonl is always written and remains the source of every number."""
from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mmrl.config import RunConfig
from mmrl.errors import MissingExtraError

__all__ = ["Trackers"]


class Trackers:
    """The optional loggers of a run."""

    def __init__(self, config: RunConfig, folder: Path, *, enabled: bool = True) -> None:
        self._writer: Any = None
        self._wandb: Any = None
        if enabled and config.train.tensorboard:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError as error:
                raise MissingExtraError("train.tensorboard needs TensorBoard: pip install 'mmrl[tensorboard]'") from error
            self._writer = SummaryWriter(str(folder / "tensorboard"))
        if enabled and config.train.wandb:
            try:
                import wandb
            except ImportError as error:
                raise MissingExtraError("train.wandb needs Weights & Biases: pip install 'mmrl[wandb]'") from error
            self._wandb = wandb.init(name=config.name, dir=str(folder), config=config.model_dump(mode="json"))

    def log(self, step: int, row: Mapping[str, Any]) -> None:
        """Send every number of a step's row."""
        numbers = {k: v for k, v in row.items() if k != "step" and isinstance(v, (int, float))}
        if self._writer is not None:
            for name, value in numbers.items():
                self._writer.add_scalar(name, value, step)
        if self._wandb is not None:
            self._wandb.log(numbers, step=step)

    def close(self) -> None:
        """Flush and end."""
        if self._writer is not None:
            self._writer.close()
        if self._wandb is not None:
            self._wandb.finish()
