"""Pixel budgets of images and video frames in qwen-vl-utils' conventions, and the resizing that goes with them.

python -c "from mmrl.video.budget import *; print(frame_pixels(16, factor=28), smart_resize(720, 1280, factor=28,
min_pixels=128 * 784, max_pixels=768 * 784))"
"""

from __future__ import annotations

import math

import numpy as np

from mmrl.errors import ConfigError, MediaError
from mmrl.video.media import MAX_ASPECT_RATIO

__all__ = ["VIDEO_MAX_TOKENS", "VIDEO_MIN_TOKENS", "frame_pixels", "resize_frames", "smart_resize"]

VIDEO_MIN_TOKENS = 128
"""Visual tokens per frame at least (qwen-vl-utils VIDEO_MIN_TOKEN_NUM); a token covers factor x factor pixels."""

VIDEO_MAX_TOKENS = 768
"""Visual tokens per frame at most (qwen-vl-utils VIDEO_MAX_TOKEN_NUM)."""

TOTAL_TOKENS = 128_000 * 0.9
"""Visual tokens of a whole clip at most, before two frames are merged to one (qwen-vl-utils MODEL_SEQ_LEN * 0.9)."""

_FRAMES_PER_TOKEN = 2  # the vision towers merge two frames in time
_CHUNK_BYTES = 64 << 20


def smart_resize(
    height: int, width: int, *, factor: int, min_pixels: int | float, max_pixels: int | float
) -> tuple[int, int]:
    """(height, width) as multiples of `factor` with an area within min_pixels .. max_pixels, the shape kept as well as it goes.

    As `smart_resize` of qwen-vl-utils and transformers. Raises ConfigError for an impossible budget, MediaError (unsupported)
    for sides that differ more than 200 times.
    """
    if factor < 1 or min_pixels > max_pixels or max_pixels < factor * factor:
        raise ConfigError(
            f"expected min_pixels <= max_pixels and max_pixels of at least one patch ({factor} x {factor}), found "
            f"{min_pixels} and {max_pixels}"
        )
    if min(height, width) < 1 or max(height, width) / min(height, width) > MAX_ASPECT_RATIO:
        raise MediaError(
            f"expected sides that differ by at most {MAX_ASPECT_RATIO:.0f} times, found {width} x {height}; crop it",
            kind="unsupported",
        )
    rows = max(factor, round(height / factor) * factor)
    columns = max(factor, round(width / factor) * factor)
    if rows * columns > max_pixels:
        shrink = math.sqrt(height * width / max_pixels)
        rows = max(factor, math.floor(height / shrink / factor) * factor)
        columns = max(factor, math.floor(width / shrink / factor) * factor)
    elif rows * columns < min_pixels:
        grow = math.sqrt(min_pixels / (height * width))
        rows = math.ceil(height * grow / factor) * factor
        columns = math.ceil(width * grow / factor) * factor
    return rows, columns


def frame_pixels(
    num_frames: int,
    *,
    min_pixels: int | float | None = None,
    max_pixels: int | float | None = None,
    total_pixels: int | float | None = None,
    factor: int = 28,
) -> tuple[int | float, int | float]:
    """(min, max) pixels of each of `num_frames` frames: the clip's total is shared among them, as qwen-vl-utils' `fetch_video`.

    None stands for its constants: 128 and 768 tokens per frame, 115200 tokens in all (a token covers factor x factor pixels
    of two frames). A given max_pixels only lowers the limit. The minimum wins over the total: a clip of very many frames may
    exceed it by that. Raises ConfigError.
    """
    least = VIDEO_MIN_TOKENS * factor**2 if min_pixels is None else min_pixels
    total = TOTAL_TOKENS * factor**2 if total_pixels is None else total_pixels
    if (
        num_frames < 1
        or least <= 0
        or total <= 0
        or (max_pixels is not None and max_pixels < least)
    ):
        raise ConfigError(
            f"expected at least one frame and 0 < min_pixels <= max_pixels, total_pixels > 0, found {num_frames} "
            f"frames, {least}, {max_pixels}, {total}"
        )
    limit = max(
        min(VIDEO_MAX_TOKENS * factor**2, total / num_frames * _FRAMES_PER_TOKEN), int(least * 1.05)
    )
    return least, limit if max_pixels is None else min(max_pixels, limit)


def resize_frames(
    rgb_THWC: np.ndarray, height: int, width: int, *, precision: str = "uint8"
) -> np.ndarray:
    """Frames [T, H, W, 3] uint8 resized to [T, height, width, 3]: bicubic with antialiasing, to the bit as torchvision's.

    precision "uint8" is what transformers' processors do (torchvision v2: rounded between the two directions), "float32" what
    qwen-vl-utils does (torchvision v1: four times the memory and slower); they differ at hard edges, by up to about 20 levels.
    Works in pieces of 64 MiB, so memory stays at the result plus one piece. Frames that already fit are returned as they are.
    Raises ConfigError.
    """
    if precision not in ("uint8", "float32"):
        raise ConfigError(f"expected precision uint8 or float32, found {precision!r}")
    if rgb_THWC.ndim != 4 or rgb_THWC.shape[-1] != 3 or rgb_THWC.dtype != np.uint8:
        raise ConfigError(
            f"expected uint8 frames of shape [T, H, W, 3], found {rgb_THWC.dtype} {rgb_THWC.shape}"
        )
    if height < 1 or width < 1:
        raise ConfigError(f"expected a size of at least 1 x 1, found {width} x {height}")
    if rgb_THWC.shape[1:3] == (height, width):
        return rgb_THWC
    import torch
    from torch.nn.functional import interpolate

    out = np.empty((len(rgb_THWC), height, width, 3), dtype=np.uint8)
    step = max(1, _CHUNK_BYTES // max(rgb_THWC[0:1].nbytes, height * width * 3, 1))
    for begin in range(0, len(rgb_THWC), step):
        piece_TCHW = torch.from_numpy(np.ascontiguousarray(rgb_THWC[begin : begin + step])).permute(
            0, 3, 1, 2
        )
        piece_TCHW = piece_TCHW if precision == "uint8" else piece_TCHW.float()
        resized_TCHW = interpolate(
            piece_TCHW, size=(height, width), mode="bicubic", antialias=True, align_corners=False
        )
        if precision == "float32":
            resized_TCHW = resized_TCHW.clamp_(0, 255).round_()
        out[begin : begin + step] = resized_TCHW.permute(0, 2, 3, 1).numpy()
    return out
