"""What prompts hold instead of pixels: references to pictures, clips and sounds, and what a vision tower made of them.

python -c "from mmrl.video.references import VideoSettings; print(VideoSettings().bounds(28))"
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from mmrl.types import AudioSize, ImageSize, VideoSize
from mmrl.video.media import Orientation
from mmrl.video.sampling import FrameSampling

if TYPE_CHECKING:
    import torch

__all__ = ["Change", "Features", "Frame", "Tower", "VideoSettings", "Visual"]


@dataclass(frozen=True)
class VideoSettings:
    """How clips are sampled and how large their frames may be; the defaults are those of qwen-vl-utils.

    min_pixels and max_pixels bound one frame, total_pixels the clip (None: 128, 768 and 115 200 merged blocks).
    """

    sampling: FrameSampling = field(default_factory=FrameSampling)
    min_pixels: int | None = None
    max_pixels: int | None = None
    total_pixels: int | None = None
    decoder: str = "auto"

    def bounds(self, factor: int) -> tuple[int, int, int]:
        """The three bounds in pixels for blocks of `factor` x `factor`."""
        given = (self.min_pixels, self.max_pixels, self.total_pixels)
        low, high, total = (
            blocks * factor**2 if v is None else v
            for v, blocks in zip(given, (128, 768, 115_200), strict=True)
        )
        return low, high, total


@dataclass(frozen=True)
class Change:
    """A view of the same input: '' as it is, 'shuffle' (frames in `order`), 'mirror' (left to right), 'mask' (mean colour)."""

    name: str = ""
    order: tuple[int, ...] = ()


@dataclass(frozen=True)
class Visual:
    """A picture, clip or sound as prompts hold it; picklable, without tensors.

    grid_thw counts patches (of a sound: frames, 1, 1), `tokens` those the language model sees; `content` is the hash of the
    file, `digest` that of the unchanged pixels.
    """

    kind: str  # image, video or audio
    path: str
    key: str
    content: str
    digest: str
    grid_thw: tuple[int, int, int]
    tokens: int
    orig_wh: tuple[int, int]
    resized_wh: tuple[int, int]
    frames: int = 1
    timestamps_s: tuple[float, ...] = ()
    duration_s: float = 0.0
    sample_fps: float = 0.0
    sampling: FrameSampling | None = None
    change: Change = Change()
    orientation: Orientation = "displayed"  # of a picture, see mmrl.video.media

    @property
    def size(self) -> ImageSize | VideoSize | AudioSize:
        """What rewards may know of it."""
        if self.kind == "audio":
            return AudioSize(self.duration_s)
        if self.kind == "image":
            return ImageSize(self.orig_wh, self.resized_wh)
        return VideoSize(self.orig_wh, self.resized_wh, self.duration_s, self.timestamps_s)

    @property
    def identity(self) -> tuple[Any, ...]:
        """What fingerprints hash: the pixels and the view of them."""
        return (self.kind, self.digest, self.grid_thw, self.change.name, self.change.order)


@dataclass(frozen=True)
class Frame(Visual):
    """A picture that exists in memory only, such as a simulator's: it carries its packed pixels and lives as long as whoever
    holds it. Two frames are equal when their pixels are."""

    packed: torch.Tensor | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True)
class Features:
    """What a vision tower made of one visual: main (tokens, H), and Qwen3-VL's deepstack features of the same shape."""

    main: torch.Tensor
    deep: tuple[torch.Tensor, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(t.numel() * t.element_size() for t in (self.main, *self.deep))


class Tower(Protocol):
    """A frozen vision tower: its fingerprint (weights, dtype, precision) and its forward pass."""

    fingerprint: str

    def __call__(
        self, kind: str, pixels_nD: torch.Tensor, grids_thw: Sequence[tuple[int, int, int]]
    ) -> list[Features]:
        """Features of each visual, given their patches one after the other."""
