"""How a family's video processor reads the frames of a clip: patches of one grid, one square per frame, or patches of chunks of
frames. None keeps anything.

    reader = GridClips(processor.video_processor)
    patches_nD, grid_thw = reader.read(frames_TCHW)            # frames of the size that frame_size told

Legend: T frames, n patches or tiles, D values of one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from mmrl.errors import ConfigError
from mmrl.video.budget import frame_pixels, smart_resize
from mmrl.video.pictures import fitted
from mmrl.video.pixels import PatchLayout, RowLayout, TileLayout, run_part, run_video_processor

if TYPE_CHECKING:
    import torch

    from mmrl.video.references import VideoSettings

__all__ = ["ChunkClips", "ClipReader", "GridClips", "SquareClips"]


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

    def tokens(self, count: int, height: int, width: int) -> int:
        """How many tokens `count` frames of that size become."""

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

    def tokens(self, count: int, height: int, width: int) -> int:
        """See ClipReader."""
        patches, temporal = self.layout.patch, self.layout.temporal
        return self.layout.tokens((-(-count // temporal), height // patches, width // patches))

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

    def tokens(self, count: int, height: int, width: int) -> int:
        """See ClipReader."""
        return self.layout.tokens((count, 1, 1))

    def read(self, frames_TCHW: torch.Tensor) -> tuple[torch.Tensor, tuple[int, int, int]]:
        """See ClipReader."""
        rows = self.normalise(frames_TCHW)
        return rows, (len(rows), 1, 1)

    def normalise(self, frames_TCHW: torch.Tensor) -> torch.Tensor:
        """See ClipReader."""
        return run_part(self.part, frames_TCHW, video=True).reshape(len(frames_TCHW), -1)


class ChunkClips:
    """A video processor that shrinks frames into a number of patches, enlarges none, pads them on the right and below to whole
    blocks, and gives each chunk of frames a row of tokens, as Kimi's does: grid (frames, height, width) in patches, row by row.
    `data.video.max_pixels` lowers its own limit on a frame, and total_pixels is shared among chunks; both are of picture and
    padding."""

    def __init__(self, part: Any) -> None:
        self.part = part
        self.layout = RowLayout(part.patch_size, 1, part.merge_size, chunk=part.temporal_patch_size)

    def check(self, settings: VideoSettings) -> None:
        """See ClipReader."""
        if settings.min_pixels is not None:
            raise ConfigError(
                f"expected no data.video.min_pixels for a model whose processor enlarges no frame, found {settings.min_pixels}; "
                "remove it"
            )

    def frame_size(
        self, settings: VideoSettings, count: int, height: int, width: int
    ) -> tuple[int, int]:
        """See ClipReader."""
        shares = (settings.max_pixels, settings.total_pixels)
        chunks = -(-count // self.layout.chunk)
        given = [int(s // n) for s, n in zip(shares, (1, chunks), strict=True) if s is not None]
        _, shown, _ = fitted(self.part, height, width, min(given, default=None))
        return shown

    def tokens(self, count: int, height: int, width: int) -> int:
        """See ClipReader."""
        block = self.layout.patch * self.layout.merge
        return -(-count // self.layout.chunk) * -(-height // block) * -(-width // block)

    def read(self, frames_TCHW: torch.Tensor) -> tuple[torch.Tensor, tuple[int, int, int]]:
        """See ClipReader."""
        # of their size already: what it does where it resizes is to pad them
        out = run_video_processor(self.part, frames_TCHW, do_resize=True)
        chunks = out["video_grid_thw"]
        _, h, w = (int(x) for x in chunks[0])
        return out["pixel_values_videos"].flatten(1), (int(chunks[:, 0].sum()), h, w)

    def normalise(self, frames_TCHW: torch.Tensor) -> torch.Tensor:
        """See ClipReader."""
        return run_part(self.part, frames_TCHW, video=True).flatten(1)
