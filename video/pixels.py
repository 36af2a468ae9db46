"""Processed pixels as bytes: what a Qwen-VL processor made of a picture or clip, stored in an eighth or a quarter of its size.

A processor resizes 8-bit pixels, normalises them to float32 and cuts them into patches. Normalising is a table of 256 values
per channel, so the bytes before it say the same; pictures also hold every value twice (the tower takes frames in pairs).
`ByteCodec` learns the table from the processor itself, checks every tensor it packs for bit equality, and keeps float32
where a processor does something else.

Legend: n patches, D = C * F * P * P values of a patch (channels, frames of a pair, sides), T frames.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

__all__ = [
    "ByteCodec",
    "CanvasLayout",
    "PatchLayout",
    "RowLayout",
    "SliceLayout",
    "TileLayout",
    "Views",
    "views_of",
    "permute_frames",
    "run_part",
    "run_video_processor",
]


@dataclass(frozen=True)
class PatchLayout:
    """How patches are cut: side in pixels, frames per patch, patches per side of a merged block, channels."""

    patch: int
    temporal: int
    merge: int
    channels: int = 3

    @property
    def together(self) -> int:
        """How many frames of a clip the tower sees at once."""
        return self.temporal

    def split(self, patches_nD: torch.Tensor, grid_thw: Sequence[int]) -> torch.Tensor:
        """Patches as (t, h / merge, w / merge, merge, merge, C, F, P, P); F is 1 for stills packed without their copies."""
        t, h, w = grid_thw
        m, p = self.merge, self.patch
        frames = patches_nD.shape[1] // (self.channels * p * p)
        return patches_nD.view(t, h // m, w // m, m, m, self.channels, frames, p, p)

    def tokens(self, grid_thw: Sequence[int]) -> int:
        """How many tokens the language model sees of a grid."""
        t, h, w = grid_thw
        return t * h * w // self.merge**2

    def mirrored(
        self, patches_nD: torch.Tensor, grid_thw: Sequence[int], width: int = 0
    ) -> torch.Tensor:
        """The patches of the picture or clip mirrored left to right; `width` of it in pixels, where a padding follows."""
        return self.split(patches_nD, grid_thw).flip([2, 4, 8]).reshape(patches_nD.shape)

    def cut(self, frames_TCHW: torch.Tensor) -> torch.Tensor:
        """Patches (n, D) of frames whose count and sides fit."""
        T, c, height, width = frames_TCHW.shape
        m, p, f = self.merge, self.patch, self.temporal
        x = frames_TCHW.view(T // f, f, c, height // (m * p), m, p, width // (m * p), m, p)
        return x.permute(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(-1, c * f * p * p)


@dataclass(frozen=True)
class RowLayout(PatchLayout):
    """Patches row by row instead of block by block. `chunk` frames of a clip, at its end those that are left, become as many tokens
    as one frame (Kimi's): grid (frames, height, width)."""

    chunk: int = 1

    @property
    def together(self) -> int:
        """See PatchLayout."""
        return self.chunk

    @property
    def _plain(self) -> PatchLayout:
        """Blocks of one patch come row by row."""
        return PatchLayout(self.patch, self.temporal, 1, self.channels)

    def split(self, patches_nD: torch.Tensor, grid_thw: Sequence[int]) -> torch.Tensor:
        """See PatchLayout; blocks are of one patch."""
        return self._plain.split(patches_nD, grid_thw)

    def cut(self, frames_TCHW: torch.Tensor) -> torch.Tensor:
        """See PatchLayout."""
        return self._plain.cut(frames_TCHW)

    def mirrored(
        self, patches_nD: torch.Tensor, grid_thw: Sequence[int], width: int = 0
    ) -> torch.Tensor:
        """See PatchLayout. The padding stays where it is."""
        import torch

        (t, h, w), p = grid_thw, self.patch
        x = patches_nD.view(t, h, w, -1, p, p).permute(0, 3, 1, 4, 2, 5).reshape(t, -1, h, p, w * p)
        x = torch.cat([x[..., :width].flip(4), x[..., width:]], 4).unflatten(4, (w, p))
        return x.permute(0, 2, 4, 1, 3, 5).reshape(patches_nD.shape)

    def tokens(self, grid_thw: Sequence[int]) -> int:
        """See PatchLayout."""
        t, h, w = grid_thw
        return math.ceil(t / self.chunk) * h * w // self.merge**2


@dataclass(frozen=True)
class TileLayout(PatchLayout):
    """Square tiles of one size, one after the other, row by row, with a thumbnail behind them where there are several: grid (tiles,
    rows, columns). `per_tile` tokens of the language model each."""

    per_tile: int = 1

    def tokens(self, grid_thw: Sequence[int]) -> int:
        """See PatchLayout."""
        return grid_thw[0] * self.per_tile

    def mirrored(
        self, patches_nD: torch.Tensor, grid_thw: Sequence[int], width: int = 0
    ) -> torch.Tensor:
        """See PatchLayout."""
        import torch

        n, rows, columns = grid_thw
        tiles = patches_nD.view(n, self.channels, self.patch, self.patch).flip(3)
        shown = tiles[: rows * columns].unflatten(0, (rows, columns)).flip(1).flatten(0, 1)
        return torch.cat([shown, tiles[rows * columns :]]).reshape(patches_nD.shape)


@dataclass(frozen=True)
class CanvasLayout(TileLayout):
    """A whole view, then the tiles of the canvas in whose middle the picture lies, row by row: grid (tiles, height, width of the
    picture). `processor` (LLaVA-OneVision's) knows the canvases, and how many tokens are left when their padding is cut off."""

    processor: Any = field(default=None, compare=False, repr=False)

    def canvas(self, grid_thw: Sequence[int]) -> tuple[int, int]:
        """Tiles of the canvas: rows, columns."""
        from transformers.image_processing_utils import select_best_resolution

        canvases = self.processor.image_processor.image_grid_pinpoints
        height, width = select_best_resolution(list(grid_thw[1:]), canvases)
        return height // self.patch, width // self.patch

    def tokens(self, grid_thw: Sequence[int]) -> int:
        """See PatchLayout."""
        import torch

        tile = torch.empty(1, 1, self.patch, self.patch, device="meta")
        shown = {"batch_num_images": [1], "image_sizes": [list(grid_thw[1:])]}
        text = self.processor.replace_image_token({**shown, "pixel_values": tile}, 0)
        return int(text.count(self.processor.image_token))

    def mirrored(
        self, patches_nD: torch.Tensor, grid_thw: Sequence[int], width: int = 0
    ) -> torch.Tensor:
        """See PatchLayout. A padding that is a pixel wider on one side changes sides."""
        import torch

        tiles = patches_nD.view(-1, self.channels, self.patch, self.patch).flip(3)
        shown = tiles[1:].unflatten(0, self.canvas(grid_thw)).flip(1).flatten(0, 1)
        return torch.cat([tiles[:1], shown]).reshape(patches_nD.shape)


@dataclass(frozen=True)
class Views:
    """Of a picture in MiniCPM-V's slices, (height, width) in patches each: the whole view, and rows x columns slices of one size;
    rows and columns are 0 where there are none."""

    whole: tuple[int, int]
    slices: tuple[int, int]
    each: tuple[int, int]

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """Of all views, in their order."""
        rows, columns = self.slices
        return [self.whole, *([self.each] * (rows * columns))]

    @property
    def shown(self) -> tuple[int, int]:
        """(height, width) in patches of what is shown largest."""
        (rows, columns), (height, width) = self.slices, self.each
        return (rows * height, columns * width) if rows else self.whole


def views_of(part: Any, grid_thw: Sequence[int]) -> Views:
    """How MiniCPM-V's image processor `part` cuts a picture of grid (views, height, width of the picture in pixels).

    How many slices it may make decides their number alone: of the ways to lay out a number it takes the one nearest to the
    picture's shape.
    """
    import inspect

    (count, height, width), side = grid_thw, part.scale_resolution
    mode = (
        {"downsample_mode": part.downsample_mode}  # since transformers 5.24
        if "downsample_mode" in inspect.signature(part.find_best_resize).parameters
        else {}
    )
    patch, sliced = part.patch_size, count > 1
    whole = part.find_best_resize((height, width), side, patch, allow_upscale=not sliced, **mode)
    whole = (whole[0] // patch, whole[1] // patch)
    if not sliced:
        return Views(whole, (0, 0), (0, 0))
    slices = count - 1
    shape = math.log(width / height)

    def far(rows: int) -> tuple[float, int]:
        return abs(shape - math.log(slices // rows / rows)), -rows

    rows = min((r for r in range(1, slices + 1) if slices % r == 0), key=far)
    laid = (rows, slices // rows)
    all_height, all_width = part.get_refine_size(
        (height, width), list(laid), side, patch, allow_upscale=True, **mode
    )
    return Views(whole, laid, (all_height // rows // patch, all_width // laid[1] // patch))


@dataclass(frozen=True)
class SliceLayout(RowLayout):
    """A whole view, then slices row by row, each with its patches row by row: grid (views, height, width of the picture in pixels).
    `processor` (MiniCPM-V's) knows the sizes of views, and how many patches a token has."""

    processor: Any = field(default=None, compare=False, repr=False)

    def views(self, grid_thw: Sequence[int]) -> Views:
        """How the picture is cut."""
        return views_of(self.processor.image_processor, grid_thw)

    def tokens(self, grid_thw: Sequence[int]) -> int:
        """See PatchLayout."""
        per_token = self.processor.image_token_divisor
        return sum(h * w // per_token for h, w in self.views(grid_thw).sizes)

    def mirrored(
        self, patches_nD: torch.Tensor, grid_thw: Sequence[int], width: int = 0
    ) -> torch.Tensor:
        """See PatchLayout. Slices change places within their row."""
        import torch

        views, p = self.views(grid_thw), self.patch
        shape = (self.channels, -1, p, p)  # frames of a still
        first = views.whole[0] * views.whole[1]
        whole = patches_nD[:first].view(*views.whole, *shape).flip([1, 5]).reshape(first, -1)
        slices = patches_nD[first:].view(*views.slices, *views.each, *shape).flip([1, 3, 7])
        return torch.cat([whole, slices.reshape(len(patches_nD) - first, -1)])


def permute_frames(
    patches_nD: torch.Tensor, layout: PatchLayout, grid_thw: Sequence[int], order: Sequence[int]
) -> torch.Tensor:
    """The patches of a clip whose frame i is the old frame order[i]; a pair left open is filled with its last frame."""
    x = layout.split(patches_nD, grid_thw)
    # (t, F, ...); equal frames were packed once
    x = x.expand(*x.shape[:6], layout.temporal, *x.shape[7:]).movedim(6, 1)
    frames = x.flatten(0, 1)
    index = [*order, *([order[-1]] * (len(frames) - len(order)))]
    return frames[index].view(x.shape).movedim(1, 6).reshape(len(patches_nD), -1)


class ByteCodec:
    """Packs the float32 patches of one processor part (pictures or clips) into bytes and back, bit for bit. `normalise` makes them
    of frames (T, C, H, W) that need no resizing."""

    def __init__(
        self, part: Any, layout: PatchLayout, normalise: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        import torch

        self.layout = layout
        block = layout.patch * layout.merge
        side = math.ceil(16 / block) * block
        ramp_HW = (torch.arange(side * side) % 256).to(torch.uint8).view(side, side)
        ramp_TCHW = ramp_HW.expand(self.layout.temporal, 3, side, side).contiguous()
        bytes_nD, values_nD = self.layout.cut(ramp_TCHW), normalise(ramp_TCHW)
        self.table_C256 = self._learn(bytes_nD, values_nD)
        self._mean, self._std = self._affine(part)

    def _learn(self, bytes_nD: torch.Tensor, values_nD: torch.Tensor) -> torch.Tensor | None:
        """The value of each byte per channel, or None when values do not depend on the byte and channel alone."""
        import torch

        if values_nD.shape != bytes_nD.shape or values_nD.dtype != torch.float32:
            return None
        shape = (len(bytes_nD), self.layout.channels, -1)
        table = torch.empty(self.layout.channels, 256)
        for c in range(self.layout.channels):
            table[c, bytes_nD.view(shape)[:, c].flatten().long()] = values_nD.view(shape)[
                :, c
            ].flatten()
        self.table_C256 = table
        return table if torch.equal(self._lookup(bytes_nD), values_nD) else None

    def _affine(self, part: Any) -> tuple[Any, Any]:
        """(mean, std) with which (byte - mean) / std in float32 equals the table everywhere, else (None, None)."""
        import torch

        if (
            self.table_C256 is None
            or not getattr(part, "do_normalize", False)
            or not getattr(part, "rescale_factor", 0)
        ):
            return None, None
        mean = torch.tensor(part.image_mean) * (1.0 / part.rescale_factor)
        std = torch.tensor(part.image_std) * (1.0 / part.rescale_factor)
        same = torch.equal(
            (torch.arange(256.0)[None] - mean[:, None]) / std[:, None], self.table_C256
        )
        return (mean, std) if same else (None, None)

    def _lookup(self, bytes_nD: torch.Tensor) -> torch.Tensor:
        import torch

        assert self.table_C256 is not None
        per_channel = bytes_nD.view(len(bytes_nD), self.layout.channels, -1).long()
        table = self.table_C256.to(bytes_nD.device)
        return torch.stack(
            [table[c][per_channel[:, c]] for c in range(self.layout.channels)], 1
        ).view(bytes_nD.shape)

    def pack(self, values_nD: torch.Tensor) -> torch.Tensor:
        """uint8 (n, D), or (n, D / F) when all frames of each patch are equal; `values_nD` itself when bytes cannot say it."""
        import torch

        if self.table_C256 is None:
            return values_nD
        low, high = self.table_C256[:, 0, None], self.table_C256[:, 255, None]
        per_channel = values_nD.view(len(values_nD), self.layout.channels, -1)
        bytes_nD = (
            ((per_channel - low) / (high - low) * 255)
            .round()
            .clamp(0, 255)
            .to(torch.uint8)
            .view(values_nD.shape)
        )
        if not torch.equal(self._normalise(bytes_nD), values_nD):
            return values_nD
        frames = bytes_nD.view(len(bytes_nD), self.layout.channels, self.layout.temporal, -1)
        if bool((frames == frames[:, :, :1]).all()):
            return frames[:, :, 0].reshape(len(bytes_nD), -1).contiguous()
        return bytes_nD

    def _normalise(self, bytes_nD: torch.Tensor) -> torch.Tensor:
        import torch

        if self._mean is None:
            return self._lookup(bytes_nD)
        per_channel = bytes_nD.view(len(bytes_nD), self.layout.channels, -1).to(torch.float32)
        mean, std = self._mean.to(bytes_nD.device)[:, None], self._std.to(bytes_nD.device)[:, None]
        return per_channel.sub_(mean).div_(std).view(bytes_nD.shape)

    def unpack(self, packed: torch.Tensor) -> torch.Tensor:
        """float32 (n, D) as the processor made it; on a GPU the bytes travel and are normalised there."""
        import torch

        if packed.dtype != torch.uint8:
            return packed
        values = self._normalise(packed)
        width = self.layout.channels * self.layout.temporal * self.layout.patch**2
        if values.shape[1] == width:
            return values
        per_channel = values.view(len(values), self.layout.channels, 1, -1)
        return per_channel.expand(-1, -1, self.layout.temporal, -1).reshape(len(values), width)

    def grey(self, packed: torch.Tensor) -> torch.Tensor:
        """The same shape holding the bytes (or values) nearest to the processor's mean colour: a masked picture or clip."""
        import torch

        if packed.dtype != torch.uint8:
            return torch.zeros_like(packed)
        assert self.table_C256 is not None
        per_channel = torch.empty_like(packed).view(len(packed), self.layout.channels, -1)
        for c, nearest in enumerate(self.table_C256.abs().argmin(1).tolist()):
            per_channel[:, c] = nearest
        return per_channel.view(packed.shape)


def run_video_processor(part: Any, frames_TCHW: torch.Tensor, *, do_resize: bool = False) -> Any:
    """The processor's output for frames already sampled and resized, as a mapping of tensors."""
    # a budget of resizing: not used
    own = {"cap_pixels_per_frame": False} if hasattr(part, "cap_pixels_per_frame") else {}
    return part(
        videos=[frames_TCHW],
        do_resize=do_resize,
        do_sample_frames=False,
        return_tensors="pt",
        **own,
    )


def run_part(part: Any, frames_TCHW: torch.Tensor, *, video: bool) -> torch.Tensor:
    """What an image or video processor that cuts patches makes of frames that need no resizing."""
    if video:
        made = run_video_processor(part, frames_TCHW)
        # to SmolVLM's processor a clip is a row of pictures
        values = made["pixel_values_videos" if "pixel_values_videos" in made else "pixel_values"]
    else:
        values = part(images=[frames_TCHW[0]], do_resize=False, return_tensors="pt")["pixel_values"]
    assert hasattr(values, "dtype")
    return values
