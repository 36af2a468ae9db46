"""How a family's video processor reads the frames of a clip: patches of one grid, or one square per frame. Neither keeps anything.

    reader = GridClips(processor.video_processor)
    patches_nD, grid_thw = reader.read(frames_TCHW)            # frames of the size that frame_size told

Legend: T frames, n patches or tiles, D values of one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from mmrl.errors import ConfigError
from mmrl.video.budget import frame_pixels, smart_resize
from mmrl.video.pixels import PatchLayout, TileLayout, run_part, run_video_processor

if TYPE_CHECKING:
    import torch

    from mmrl.video.references import VideoSettings

__all__ = ["ClipReader", "GridClips", "SquareClips"]


class ClipReader(Protocol):
    """What the visual cache asks of a family's video processor. Picklable: media workers have one of their own."""

    @property
    def layout(self) -> PatchLayout:
        """How its rows are cut."""

    def check(self, settings: VideoSettings) -> None:
        """Raises ConfigError for bounds on frames that no frame can meet."""

    def frame_size(
        self, settings: VideoSettings, count: int, height: int, width: int
    ) -> tuple[int, int]:
        """(height, width) to which `count` frames of a clip are resized. Raises MediaError."""

    def read(self, frames_TCHW: torch.Tensor) -> tuple[torch.Tensor, tuple[int, int, int]]:
        """float32 rows (n, D) of frames of that size, and their grid."""

    def normalise(self, frames_TCHW: torch.Tensor) -> torch.Tensor:
        """The rows alone, of as many frames as a row shows."""


class GridClips:
    """A video processor that cuts frames into patches, as Qwen-VL's and GLM's do; frames share a budget of pixels."""

    def __init__(self, part: Any) -> None:
        self.part = part
        self.layout = PatchLayout(part.patch_size, part.temporal_patch_size, part.merge_size)

    def check(self, settings: VideoSettings) -> None:
        """See ClipReader."""
        low, high, total = settings.bounds(self.layout.patch * self.layout.merge)
        if low > high:
            names = [
                f"data.video.{name} ({'default of this model' if given is None else 'configured'})"
                for name, given in (
                    ("min_pixels", settings.min_pixels),
                    ("max_pixels", settings.max_pixels),
                )
            ]
            raise ConfigError(
                f"expected data.video.min_pixels <= data.video.max_pixels, found {low} > {high}: {names[0]} against "
                f"{names[1]}; set both"
            )
        if total < low:
            raise ConfigError(
                f"expected data.video.total_pixels of at least data.video.min_pixels, found {total} < {low}; set "
                "both"
            )

    def frame_size(
        self, settings: VideoSettings, count: int, height: int, width: int
    ) -> tuple[int, int]:
        """See ClipReader."""
        factor = self.layout.patch * self.layout.merge
        least, most, total = settings.bounds(factor)
        low, high = frame_pixels(
            count, min_pixels=least, max_pixels=most, total_pixels=total, factor=factor
        )
        return smart_resize(height, width, factor=factor, min_pixels=low, max_pixels=high)

    def read(self, frames_TCHW: torch.Tensor) -> tuple[torch.Tensor, tuple[int, int, int]]:
        """See ClipReader."""
        out = run_video_processor(self.part, frames_TCHW)
        t, h, w = (int(x) for x in out["video_grid_thw"][0])
        return out["pixel_values_videos"], (t, h, w)

    def normalise(self, frames_TCHW: torch.Tensor) -> torch.Tensor:
        """See ClipReader."""
        return run_part(self.part, frames_TCHW, video=True)


class SquareClips:
    """A video processor that resizes every frame to one square, as InternVL's and SmolVLM's do: grid (frames, 1, 1). `side`: of the
    square, where the processor's size does not tell it."""

    def __init__(self, part: Any, tokens_per_tile: int, side: int | None = None) -> None:
        self.part = part
        self.layout = TileLayout(side or part.size["height"], 1, 1, per_tile=tokens_per_tile)

    def check(self, settings: VideoSettings) -> None:
        """See ClipReader."""
        given = {
            name: value
            for name in ("min_pixels", "max_pixels", "total_pixels")
            if (value := getattr(settings, name)) is not None
        }
        if given:
            side, found = self.layout.patch, ", ".join(f"{k} {v}" for k, v in given.items())
            raise ConfigError(
                f"expected no bounds in data.video for a model that resizes every frame to {side} x {side}, found {found}; "
                "remove them, and bound data.video.max_frames"
            )

    def frame_size(
        self, settings: VideoSettings, count: int, height: int, width: int
    ) -> tuple[int, int]:
        """See ClipReader."""
        return self.layout.patch, self.layout.patch

    def read(self, frames_TCHW: torch.Tensor) -> tuple[torch.Tensor, tuple[int, int, int]]:
        """See ClipReader."""
        rows = self.normalise(frames_TCHW)
        return rows, (len(rows), 1, 1)

    def normalise(self, frames_TCHW: torch.Tensor) -> torch.Tensor:
        """See ClipReader."""
        return run_part(self.part, frames_TCHW, video=True).reshape(len(frames_TCHW), -1)
