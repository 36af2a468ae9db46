"""What families say that do less than Qwen-VL: one row of rotary positions, features in the place of pixels, one bound of a
picture's area."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mmrl.errors import ConfigError
from mmrl.policy.families.contract import ModelFamily

if TYPE_CHECKING:
    import torch

    from mmrl.video.references import Visual

__all__ = ["GivenFeatures", "LargestAlone", "PlainPositions"]


class PlainPositions(ModelFamily):
    """Tokens are counted one after the other, those of pictures as those of text."""

    def positions(
        self,
        processor: Any,
        base: Any,
        ids_1P: torch.Tensor,
        kinds_1P: torch.Tensor,
        visuals: Sequence[Visual],
    ) -> torch.Tensor:
        """See ModelFamily."""
        import torch

        return torch.arange(ids_1P.shape[1]).repeat(3, 1)

    def text_inputs(
        self, positions_3RT: torch.Tensor, kinds_RT: torch.Tensor | None
    ) -> dict[str, Any]:
        """See ModelFamily."""
        return {"position_ids": positions_3RT[0]}


class GivenFeatures(ModelFamily):
    """The model's own forward cannot be given pixels."""

    def pixel_inputs(
        self, kind: str, pixels: Sequence[torch.Tensor], visuals: Sequence[Visual]
    ) -> dict[str, Any] | None:
        """See ModelFamily."""
        return None


class LargestAlone(ModelFamily):
    """The processor has an upper bound of a picture's area and no lower one; `no_least` says why."""

    no_least: str

    def largest(self, low: int | None, high: int | None) -> int:
        """The upper bound. Raises ConfigError where a lower one was given."""
        if low is not None or high is None:
            raise ConfigError(
                f"expected no data.min_pixels for family {self.name}, found {low}: {self.no_least}; remove it"
            )
        return high

    def image_options(
        self, processor: Any, low: int | None, high: int | None
    ) -> tuple[dict[str, Any], tuple[int, int]]:
        """See ModelFamily."""
        most = self.largest(low, high)
        return {"max_pixels": most}, (0, most)
