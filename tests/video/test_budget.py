"""Pixel budgets against qwen-vl-utils, resizing against torchvision."""

from __future__ import annotations

import mmrl  # (first: it lets torchvision, which qwen_vl_utils imports, load beside a CPU torch)

# isort: split
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from qwen_vl_utils import vision_process

import mmrl.video.budget
from mmrl.errors import ConfigError, MediaError
from mmrl.video.budget import frame_pixels, resize_frames, smart_resize


def noise(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


@settings(max_examples=80)
@given(
    height=st.integers(1, 3000),
    width=st.integers(1, 3000),
    factor=st.sampled_from([14, 28, 32]),
    least=st.integers(1, 500),
    most=st.integers(1, 20000),
)
def test_smart_resize_is_theirs_where_theirs_is_possible(
    height: int, width: int, factor: int, least: int, most: int
) -> None:
    low, high = min(least, most) * factor**2, max(least, most) * factor**2
    if max(height, width) > 200 * min(height, width):
        with pytest.raises(MediaError, match="200 times"):
            smart_resize(height, width, factor=factor, min_pixels=low, max_pixels=high)
        return
    expected = vision_process.smart_resize(height, width, factor, low, high)
    got = smart_resize(height, width, factor=factor, min_pixels=low, max_pixels=high)
    if 0 in expected:  # theirs can shrink a side of a long picture to nothing
        assert min(got) == factor
    else:
        assert got == expected
    assert got[0] % factor == got[1] % factor == 0


def test_the_budget_of_a_frame_is_that_of_fetch_video(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their rule stands inside fetch_video: it reads a clip of `count` tiny frames and tells what it allows each of them."""
    rng, seen = random.Random(0), []

    def spy(
        height: int, width: int, factor: int, min_pixels: float, max_pixels: float
    ) -> tuple[int, int]:
        seen.append((min_pixels, max_pixels))
        return height, width

    monkeypatch.setattr(vision_process, "smart_resize", spy)
    monkeypatch.setattr(vision_process, "get_video_reader_backend", lambda: "none")
    for _ in range(200):
        count, patch = rng.choice((1, 2, 7, 64, 300, 768)), rng.choice((14, 16))
        square = (2 * patch) ** 2
        fields = {
            name: rng.randint(low, high) * square
            for name, low, high in (
                ("min_pixels", 1, 128),
                ("max_pixels", 128, 2000),
                ("total_pixels", 1, 200_000),
            )
            if rng.random() < 0.5
        }
        frames = torch.zeros(count, 3, 2, 2, dtype=torch.uint8)
        monkeypatch.setitem(
            vision_process.VIDEO_READER_BACKENDS, "none", lambda ele, f=frames: (f, {}, 2.0)
        )
        vision_process.fetch_video({"video": "a.mp4", **fields}, image_patch_size=patch)
        assert frame_pixels(count, factor=2 * patch, **fields) == seen[-1], (count, patch, fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"num_frames": 0},
        {"num_frames": 2, "min_pixels": 9, "max_pixels": 8},
        {"num_frames": 2, "total_pixels": 0},
    ],
)
def test_impossible_budgets_are_refused(fields: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="min_pixels"):
        frame_pixels(**fields)
    with pytest.raises(ConfigError, match="one patch"):
        smart_resize(100, 100, factor=28, min_pixels=1, max_pixels=28 * 28 - 1)


@settings(max_examples=60, deadline=None)
@given(
    count=st.integers(1, 4),
    old=st.tuples(st.integers(1, 90), st.integers(1, 90)),
    new=st.tuples(st.integers(1, 90), st.integers(1, 90)),
    seed=st.integers(0, 99),
)
def test_resizing_is_torchvisions_to_the_bit(
    count: int, old: tuple[int, int], new: tuple[int, int], seed: int
) -> None:
    from torchvision.transforms import InterpolationMode, functional, v2

    frames = noise(count, *old, 3, seed=seed)
    frames_TCHW = torch.from_numpy(frames).permute(0, 3, 1, 2)
    for module, precision in ((v2.functional, "uint8"), (functional, "float32")):
        expected = module.resize(
            frames_TCHW, list(new), interpolation=InterpolationMode.BICUBIC, antialias=True
        )
        assert np.array_equal(
            resize_frames(frames, *new, precision=precision), expected.permute(0, 2, 3, 1).numpy()
        )


def test_pieces_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    frames = noise(11, 40, 30, 3)
    whole = resize_frames(frames, 28, 56)
    for limit in (1, 40 * 30 * 3 * 2, 40 * 30 * 3 * 5):
        monkeypatch.setattr(mmrl.video.budget, "_CHUNK_BYTES", limit)
        assert np.array_equal(resize_frames(frames, 28, 56), whole)


def test_frames_that_fit_are_not_touched() -> None:
    frames = noise(2, 28, 56, 3)
    assert resize_frames(frames, 28, 56) is frames
    assert resize_frames(np.empty((0, 5, 5, 3), np.uint8), 28, 28).shape == (0, 28, 28, 3)


@pytest.mark.parametrize(
    "frames",
    [np.zeros((2, 5, 5, 3)), np.zeros((5, 5, 3), np.uint8), np.zeros((1, 3, 5, 5), np.uint8)],
)
def test_other_arrays_are_refused(frames: np.ndarray) -> None:
    with pytest.raises(ConfigError, match=r"\[T, H, W, 3\]"):
        resize_frames(frames, 4, 4)
    with pytest.raises(ConfigError, match="uint8 or float32"):
        resize_frames(noise(1, 5, 5, 3), 4, 4, precision="float16")
    with pytest.raises(ConfigError, match="at least 1 x 1"):
        resize_frames(noise(1, 5, 5, 3), 0, 4)
