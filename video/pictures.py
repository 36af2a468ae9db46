"""How a family's image processor reads a picture: patches of one grid, or tiles of one size. Neither keeps anything.

    reader = GridReader(processor.image_processor)
    patches_nD, grid_thw, resized_wh = reader.read(picture, {})

Whatever a processor makes becomes rows of equal width, one after the other, with a grid that counts them: that is what the visual
cache packs, stores and hands to the tower (mmrl.video.visuals). The layout says how many tokens the language model sees of a grid.

Legend: n patches or tiles, D values of one, C channels.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Protocol

from mmrl.video.pixels import (
    CanvasLayout,
    PatchLayout,
    RowLayout,
    SliceLayout,
    TileLayout,
    run_part,
)

if TYPE_CHECKING:
    import torch

__all__ = [
    "CanvasReader",
    "GridReader",
    "PaddedReader",
    "PictureReader",
    "RowReader",
    "SliceReader",
    "SplitReader",
    "SquareReader",
    "TileReader",
    "fitted",
]

Read = tuple["torch.Tensor", tuple[int, int, int], tuple[int, int]]
"""float32 rows (n, D), their grid, and the size (width, height) in pixels that they show."""


class PictureReader(Protocol):
    """What the visual cache asks of a family's image processor. Picklable: media workers have one of their own."""

    @property
    def layout(self) -> PatchLayout:
        """How its rows are cut."""

    def read(self, picture: Any, options: Mapping[str, Any]) -> Read:
        """One picture, as PIL's or as uint8 (C, H, W), by the processor's call with `options`."""

    def normalise(self, frames_TCHW: torch.Tensor) -> torch.Tensor:
        """The rows of a picture of the layout's own size that is not resized."""

    def tokens(self, height: int, width: int, options: Mapping[str, Any]) -> int:
        """How many tokens a picture of this size becomes."""


def _size_of(picture: Any) -> tuple[int, int]:
    """Height and width: a picture of PIL's tells (width, height), a tensor (C, H, W)."""
    shape = getattr(picture, "shape", None)
    height, width = shape[-2:] if shape is not None else reversed(picture.size)
    return int(height), int(width)


class GridReader:
    """An image processor that cuts a resized picture into patches, as Qwen-VL's does."""

    def __init__(self, part: Any) -> None:
        self.part = part
        self.layout = PatchLayout(part.patch_size, part.temporal_patch_size, part.merge_size)

    def read(self, picture: Any, options: Mapping[str, Any]) -> Read:
        """See PictureReader."""
        out = self.part(images=[picture], return_tensors="pt", **options)
        t, h, w = (int(x) for x in out["image_grid_thw"][0])
        return out["pixel_values"], (t, h, w), (w * self.layout.patch, h * self.layout.patch)

    def normalise(self, frames_TCHW: torch.Tensor) -> torch.Tensor:
        """See PictureReader."""
        return run_part(self.part, frames_TCHW, video=False)

    def tokens(self, height: int, width: int, options: Mapping[str, Any]) -> int:
        """See PictureReader."""
        patches = self.part.get_number_of_image_patches(height, width, dict(options))
        return patches // self.layout.merge**2


def fitted(
    part: Any, height: int, width: int, most: int | None
) -> tuple[int, tuple[int, int], tuple[int, int]]:
    """How many patches Kimi's image or video processor is allowed, the (height, width) to which it then resizes a picture, and that
    with its padding: an area of at most `most` pixels (None: its own limit, which counts no padding)."""
    from transformers.models.kimi_k25.image_processing_kimi_k25 import navit_resize

    def sizes(patches: int) -> tuple[tuple[int, int], tuple[int, int]]:
        longest = part.size["max_height"]
        return navit_resize(height, width, part.patch_size, part.merge_size, patches, longest)

    low, high = 1, part.max_patches
    if most is None:
        return high, *sizes(high)
    while low < high:  # the largest that fits: more patches never show less
        middle = (low + high + 1) // 2
        rows, columns = sizes(middle)[1]
        low, high = (middle, high) if rows * columns <= most else (low, middle - 1)
    return low, *sizes(low)


class PaddedReader:
    """An image processor that shrinks a picture into a number of patches, enlarges none, and pads it on the right and below to
    whole blocks, as Kimi's does: patches row by row. The option `max_pixels` lowers its own limit, of picture and padding."""

    def __init__(self, part: Any) -> None:
        self.part = part
        self.layout = RowLayout(part.patch_size, 1, part.merge_size)

    def read(self, picture: Any, options: Mapping[str, Any]) -> Read:
        """See PictureReader. The padding does not count as shown."""
        height, width = _size_of(picture)
        most = options.get("max_pixels")
        patches, (rows, columns), _ = fitted(self.part, height, width, most)
        out = self.part(images=[picture], return_tensors="pt", max_patches=patches)
        t, h, w = (int(x) for x in out["image_grid_thw"][0])
        return out["pixel_values"].flatten(1), (t, h, w), (columns, rows)

    def normalise(self, frames_TCHW: torch.Tensor) -> torch.Tensor:
        """See PictureReader."""
        return run_part(self.part, frames_TCHW, video=False).flatten(1)

    def tokens(self, height: int, width: int, options: Mapping[str, Any]) -> int:
        """See PictureReader."""
        _, _, (rows, columns) = fitted(self.part, height, width, options.get("max_pixels"))
        block = self.layout.patch * self.layout.merge
        return (rows // block) * (columns // block)


class RowReader:
    """An image processor that shrinks a picture to a longest side and stretches it to whole blocks, as Pixtral's does: patches row
    by row. The option `max_pixels` lowers the longest side, of each picture as its shape allows."""

    def __init__(self, processor: Any) -> None:
        self.part = processor.image_processor
        self.layout = RowLayout(processor.patch_size, 1, processor.spatial_merge_size)

    def _fit(self, height: int, width: int, most: int | None) -> tuple[int, tuple[int, int]]:
        """The longest side that the processor is allowed, and the (height, width) that it then makes."""
        from transformers.models.pixtral.image_processing_pixtral import (
            get_resize_output_image_size,
        )

        block = self.layout.patch * self.layout.merge

        def size(longest: int) -> tuple[int, int]:
            shape = SimpleNamespace(shape=(height, width, 3))
            return get_resize_output_image_size(shape, longest, block, "channels_last")

        low, high = 1, self.part.size["longest_edge"]
        while 0 in size(
            low
        ):  # of a long picture: the processor rounds its shorter side down, to nothing
            low += 1
        while most is not None and low < high:  # the largest that fits; the smallest if none does
            middle = (low + high + 1) // 2
            low, high = (middle, high) if math.prod(size(middle)) <= most else (low, middle - 1)
        return max(low, high), size(max(low, high))

    def read(self, picture: Any, options: Mapping[str, Any]) -> Read:
        """See PictureReader."""
        height, width = _size_of(picture)
        longest, _ = self._fit(height, width, options.get("max_pixels"))
        return self._read(picture, size={"longest_edge": longest})

    def _read(self, picture: Any, **options: Any) -> Read:
        block = self.layout.patch * self.layout.merge
        out = self.part(images=[picture], return_tensors="pt", patch_size=block, **options)
        height, width = map(int, out["image_sizes"][0])
        grid = (1, height // self.layout.patch, width // self.layout.patch)
        return self.rows_of(out), grid, (width, height)

    def rows_of(self, out: Mapping[str, Any]) -> torch.Tensor:
        """Rows of the pictures of a processor's call, which pads them to the largest."""
        import torch

        both = zip(out["pixel_values"], out["image_sizes"], strict=True)
        return torch.cat([self.layout.cut(p[None, :, : int(h), : int(w)]) for p, (h, w) in both])

    def normalise(self, frames_TCHW: torch.Tensor) -> torch.Tensor:
        """See PictureReader."""
        return self._read(frames_TCHW[0], do_resize=False)[0]

    def tokens(self, height: int, width: int, options: Mapping[str, Any]) -> int:
        """See PictureReader."""
        block = self.layout.patch * self.layout.merge
        _, (rows, columns) = self._fit(height, width, options.get("max_pixels"))
        return (rows // block) * (columns // block)


class SliceReader:
    """An image processor that shows a picture as one view and, where it is larger, as slices of a larger view, as MiniCPM-V's does.
    The option `max_pixels` says how large all views together may be, and so how many slices there are."""

    def __init__(self, processor: Any) -> None:
        self.part = processor.image_processor
        self.layout = SliceLayout(self.part.patch_size, 1, 4, processor=processor)

    def _fit(
        self, height: int, width: int, options: Mapping[str, Any]
    ) -> tuple[int, tuple[int, int, int]]:
        """How many slices the processor is allowed, and the grid that this gives."""
        most, area = options.get("max_pixels"), self.layout.patch**2
        limit = self.part.max_slice_nums if self.part.slice_mode else 1
        while True:
            laid = self.part.get_sliced_grid((height, width), limit, self.part.scale_resolution)
            grid = (1 + (0 if laid is None else laid[0] * laid[1]), height, width)
            shown = sum(h * w for h, w in self.layout.views(grid).sizes) * area
            if most is None or shown <= most or limit == 1:
                return limit, grid
            limit -= 1

    def read(self, picture: Any, options: Mapping[str, Any]) -> Read:
        """See PictureReader."""
        height, width = _size_of(picture)
        limit, grid = self._fit(height, width, options)
        out = self.part(images=[picture], return_tensors="pt", max_slice_nums=limit)
        rows, columns = self.layout.views(grid).shown
        shown = (columns * self.layout.patch, rows * self.layout.patch)
        return self.rows_of(out), grid, shown

    def rows_of(self, out: Mapping[str, Any]) -> torch.Tensor:
        """Rows of the pictures of a processor's call, which lays them one behind the other along the last dimension."""
        patch = self.layout.patch
        return out["pixel_values"][0].unflatten(-1, (-1, patch)).permute(2, 0, 1, 3).flatten(1)

    def normalise(self, frames_TCHW: torch.Tensor) -> torch.Tensor:
        """See PictureReader. A single view of its own size."""
        own = {"slice_mode": False, "scale_resolution": frames_TCHW.shape[-1]}
        return self.rows_of(self.part(images=[frames_TCHW[0]], return_tensors="pt", **own))

    def tokens(self, height: int, width: int, options: Mapping[str, Any]) -> int:
        """See PictureReader."""
        return self.layout.tokens(self._fit(height, width, options)[1])


class TileReader:
    """An image processor that cuts a picture into square tiles, with a thumbnail where there are several, as InternVL's does. The
    grid is (tiles, rows, columns), the thumbnail counted. `tokens_per_tile`: of the language model."""

    def __init__(self, part: Any, tokens_per_tile: int) -> None:
        self.part = part
        self.layout = TileLayout(part.size["height"], 1, 1, per_tile=tokens_per_tile)

    def read(self, picture: Any, options: Mapping[str, Any]) -> Read:
        """See PictureReader."""
        from transformers.models.got_ocr2.image_processing_got_ocr2 import get_optimal_tiled_canvas

        out = self.part(
            images=[picture], return_tensors="pt", **{"crop_to_patches": True, **options}
        )
        tiles, side = out["pixel_values"], self.layout.patch
        height, width = _size_of(picture)
        columns, rows = get_optimal_tiled_canvas(
            (height, width),
            (side, side),
            options.get("min_patches", self.part.min_patches),
            options.get("max_patches", self.part.max_patches),
        )
        grid = (len(tiles), rows, columns)
        return tiles.reshape(len(tiles), -1), grid, (columns * side, rows * side)

    def normalise(self, frames_TCHW: torch.Tensor) -> torch.Tensor:
        """See PictureReader."""
        out = self.part(
            images=[frames_TCHW[0]], do_resize=False, crop_to_patches=False, return_tensors="pt"
        )
        return out["pixel_values"].reshape(1, -1)

    def tokens(self, height: int, width: int, options: Mapping[str, Any]) -> int:
        """See PictureReader."""
        tiles = self.part.get_number_of_image_patches(
            height, width, {"crop_to_patches": True, **options}
        )
        return tiles * self.layout.per_tile


class SquareReader:
    """An image processor that resizes every picture to one square, as Gemma 3's does: a single tile of `tokens_per_tile` tokens.
    `always`: options of each call."""

    def __init__(
        self, part: Any, tokens_per_tile: int, always: Mapping[str, Any] | None = None
    ) -> None:
        self.part, self.always = part, dict(always or {})
        self.layout = TileLayout(part.size["height"], 1, 1, per_tile=tokens_per_tile)

    def read(self, picture: Any, options: Mapping[str, Any]) -> Read:
        """See PictureReader."""
        out = self.part(images=[picture], return_tensors="pt", **self.always, **options)
        side = self.layout.patch
        return out["pixel_values"].reshape(1, -1), (1, 1, 1), (side, side)

    def normalise(self, frames_TCHW: torch.Tensor) -> torch.Tensor:
        """See PictureReader."""
        out = self.part(
            images=[frames_TCHW[0]], do_resize=False, return_tensors="pt", **self.always
        )
        return out["pixel_values"].reshape(1, -1)

    def tokens(self, height: int, width: int, options: Mapping[str, Any]) -> int:
        """See PictureReader."""
        return self.layout.per_tile


class SplitReader:
    """An image processor that resizes the longer side of a picture to some tiles and splits it, a whole view behind them, as those
    of Idefics3 and SmolVLM do. The grid is (tiles, rows, columns), the whole view counted; (1, 1, 1) is a picture that is not
    split."""

    def __init__(self, part: Any, tokens_per_tile: int) -> None:
        self.part = part
        self.layout = TileLayout(
            part.max_image_size["longest_edge"], 1, 1, per_tile=tokens_per_tile
        )

    def read(self, picture: Any, options: Mapping[str, Any]) -> Read:
        """See PictureReader."""
        out = self.part(
            images=[[picture]], return_row_col_info=True, return_tensors="pt", **options
        )
        tiles, side = out["pixel_values"][0], self.layout.patch
        rows, columns = (max(1, int(out[name][0][0])) for name in ("rows", "cols"))
        grid = (len(tiles), rows, columns)
        return tiles.reshape(len(tiles), -1), grid, (columns * side, rows * side)

    def normalise(self, frames_TCHW: torch.Tensor) -> torch.Tensor:
        """See PictureReader."""
        out = self.part(
            images=[[frames_TCHW[0]]],
            do_resize=False,
            do_image_splitting=False,
            return_tensors="pt",
        )
        return out["pixel_values"].reshape(1, -1)

    def tokens(self, height: int, width: int, options: Mapping[str, Any]) -> int:
        """See PictureReader."""
        tiles, _, _ = self.part.get_number_of_image_patches(height, width, dict(options))
        return max(1, tiles) * self.layout.per_tile


class CanvasReader:
    """An image processor that puts a picture in the middle of the canvas that suits it best and cuts that into tiles, a whole view
    before them, as LLaVA-OneVision's does. The grid is (tiles, height, width), of the picture in pixels."""

    def __init__(self, processor: Any) -> None:
        self.part = processor.image_processor
        self.layout = CanvasLayout(self.part.size["height"], 1, 1, processor=processor)

    def read(self, picture: Any, options: Mapping[str, Any]) -> Read:
        """See PictureReader."""
        out = self.part(images=[picture], return_tensors="pt", **options)
        tiles, (height, width) = out["pixel_values"][0], map(int, out["image_sizes"][0])
        grid, side = (len(tiles), height, width), self.layout.patch
        rows, columns = self.layout.canvas(grid)
        scale = min(rows * side / height, columns * side / width)
        shown = (round(width * scale), round(height * scale))
        return tiles.reshape(len(tiles), -1), grid, shown

    def normalise(self, frames_TCHW: torch.Tensor) -> torch.Tensor:
        """See PictureReader."""
        # of two pictures neither is cut into tiles
        both = [frames_TCHW[0], frames_TCHW[0]]
        out = self.part(images=[both], do_resize=False, return_tensors="pt")
        return out["pixel_values"][0].reshape(1, -1)

    def tokens(self, height: int, width: int, options: Mapping[str, Any]) -> int:
        """See PictureReader."""
        return self.layout.tokens((1, height, width))
