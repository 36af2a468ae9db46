"""The critic: what a policy's hidden states are worth. One class for answers to prompts and for robots.

    head = ValueHead(width=2048, hidden=256, outputs=1, seed=0)
    values_NV = head(hidden_NH)

It reads the language model's last hidden states, so that a critic costs two small layers and no second model. It is trained beside
the model and saved beside it, in a file of its own: the checkpoint's other files are those of a model without a critic.

Legend: N hidden states, H hidden width, V values of each.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from mmrl.errors import CheckpointError

__all__ = ["VALUE_HEAD_FILE", "ValueHead"]

VALUE_HEAD_FILE = "value_head.safetensors"


class ValueHead(nn.Sequential):
    """Two layers with a GELU between them, in fp32. The last starts at zero, so that every value does."""

    def __init__(self, width: int, hidden: int, outputs: int, seed: int) -> None:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            last = nn.Linear(hidden, outputs)
            super().__init__(nn.Linear(width, hidden), nn.GELU(), last)
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)

    def forward(self, hidden_NH: torch.Tensor) -> torch.Tensor:
        """Values (N, V), fp32 whatever autocast is on."""
        with torch.autocast(hidden_NH.device.type, enabled=False):
            return super().forward(hidden_NH.float())

    def save(self, folder: Path) -> None:
        """Write VALUE_HEAD_FILE into `folder`."""
        from safetensors.torch import save_file

        save_file(
            {name: tensor.contiguous() for name, tensor in self.state_dict().items()},
            str(folder / VALUE_HEAD_FILE),
        )

    def load(self, folder: Path) -> bool:
        """Read the head saved in `folder`; False where there is none. Raises CheckpointError for one of another shape."""
        file = folder / VALUE_HEAD_FILE
        if not file.exists():
            return False
        from safetensors.torch import load_file

        try:
            self.load_state_dict(load_file(str(file)))
        except RuntimeError as error:
            raise CheckpointError(
                f"{file}: expected the value head of this model, found another: {error}"
            ) from error
        return True
