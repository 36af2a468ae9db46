"""TensorBoard and Weights & Biases on request; metrics.jsonl is always written and remains the source of every number."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mmrl.config import RunConfig
from mmrl.errors import ConfigError, MissingExtraError, install_command
from mmrl.files import optional, printable

__all__ = ["Trackers", "import_trackers"]

_MODULES = {"tensorboard": "torch.utils.tensorboard", "wandb": "wandb"}
"""Key below `train` (and the extra of the same name) -> the module that it needs."""


def import_trackers(config: RunConfig) -> dict[str, Any]:
    """The modules of the loggers that the configuration asks for. Raises MissingExtraError with the import's own error: the
    package may be there and one of its own dependencies missing or of another version."""
    found = {}
    for key, module in _MODULES.items():
        if not getattr(config.train, key):
            continue
        try:
            found[key] = importlib.import_module(module)
        except Exception as error:
            # a dependency of the wrong version raises what it likes (protobuf: TypeError)
            raise MissingExtraError(
                f"train.{key} needs {module}, whose import fails with {type(error).__name__}: {error}; "
                f"{install_command(key)}, or set train.{key}: false"
            ) from error
    return found


class Trackers:
    """The optional loggers of a run."""

    def __init__(self, config: RunConfig, folder: Path, *, enabled: bool = True) -> None:
        self._writer: Any = None
        self._wandb: Any = None
        modules = import_trackers(config) if enabled else {}
        if "tensorboard" in modules:
            with optional("the log for TensorBoard"):
                self._writer = modules["tensorboard"].SummaryWriter(str(folder / "tensorboard"))
        if "wandb" in modules:
            try:
                self._wandb = modules["wandb"].init(
                    name=config.name, dir=str(folder), config=config.model_dump(mode="json")
                )
            except modules["wandb"].Error as error:
                # no API key, no network, no right to the project
                raise ConfigError(
                    f"train.wandb: Weights & Biases did not start the run: {error}; run `wandb login`, set "
                    "WANDB_MODE=offline, or train.wandb: false"
                ) from error

    def log(self, step: int, row: Mapping[str, Any]) -> None:
        """Send every number of a step's row."""
        numbers = {
            printable(k): v for k, v in row.items() if k != "step" and isinstance(v, (int, float))
        }
        if self._writer is not None:
            with optional("the log for TensorBoard"):
                for name, value in numbers.items():
                    self._writer.add_scalar(name, value, step)
        if self._wandb is not None:
            with optional("the log for Weights & Biases"):
                self._wandb.log(numbers, step=step)

    def close(self) -> None:
        """Flush and end."""
        if self._writer is not None:
            with optional("the log for TensorBoard"):
                self._writer.close()
        if self._wandb is not None:
            with optional("the log for Weights & Biases"):
                self._wandb.finish()
