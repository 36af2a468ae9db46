"""Pictures are resized within data.min_pixels and data.max_pixels exactly as the family's own rule says, or refused."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

from mmrl.config import DataConfig, ModelConfig
from mmrl.errors import ConfigError, DataError
from mmrl.policy.loading import load_policy
from mmrl.policy.policy import Policy
from mmrl.types import ImageSize
from tests.kits.engine_kit import (
    ARCHITECTURES,
    PHOTO_SIZES,
    Album,
    picture,
    sample_with,
    tiny_folder,
)

TASK = Album()


def policy_with(arch: str, **budget: Any) -> Policy:
    return load_policy(ModelConfig(path=tiny_folder(arch), device="cpu"), DataConfig(**budget))


@pytest.mark.check_takes(4)
@pytest.mark.parametrize(
    "budget",
    [
        {},
        {"max_pixels": 9000},
        {"min_pixels": 9500},
        {"min_pixels": 12000, "max_pixels": 40000},
        {"min_pixels": 25000, "max_pixels": 25000},
    ],
    ids=str,
)
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_grids_are_those_of_the_rule(arch: str, budget: dict[str, int]) -> None:
    p = policy_with(arch, **budget)
    own, patch = p.processor.image_processor.size, p.processor.image_processor.patch_size
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)  # transformers announces what it will remove
        prompt = p.encoder(sample_with([picture(size) for size in PHOTO_SIZES]), TASK)
    expected = [
        smart_resize(
            height,
            width,
            2 * patch,
            budget.get("min_pixels", own["shortest_edge"]),
            budget.get("max_pixels", own["longest_edge"]),
        )
        for width, height in PHOTO_SIZES
    ]
    grids = [v.grid_thw for v in prompt.visuals]
    assert [(t, h * patch, w * patch) for t, h, w in grids] == [(1, h, w) for h, w in expected]
    assert [i.resized_wh for i in prompt.images] == [(w, h) for h, w in expected]
    areas = [h * w for h, w in expected]
    for key, extreme in (("min_pixels", min(areas)), ("max_pixels", max(areas))):
        other = [
            h * w
            for h, w in (
                smart_resize(b, a, 2 * patch, own["shortest_edge"], own["longest_edge"])
                for a, b in PHOTO_SIZES
            )
        ]
        if key in budget:
            assert extreme != (min(other) if key == "min_pixels" else max(other)), (
                f"{key} matters for these pictures"
            )


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_processor_that_ignores_the_budget_is_noticed(
    arch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for key, value, size in (("max_pixels", 9000, (640, 427)), ("min_pixels", 22000, (56, 56))):
        p = policy_with(arch, **{"min_pixels": 3136, "max_pixels": 100000, key: value})
        assert p.encoder(sample_with([picture(size)]), TASK).images
        p.encoder.visuals.image_options = {}  # what a renamed processor option comes to
        with pytest.raises(
            DataError, match=rf"sample s1: expected at .* data\.{key} = {value} pixels"
        ):
            p.encoder(sample_with([picture(size)], number=1), TASK)


def test_the_rules_own_rounding_is_never_refused() -> None:
    rng, sample = np.random.default_rng(0), sample_with([])
    encoder, tight = policy_with("qwen2_5_vl").encoder, 0
    for _ in range(3000):
        width, height = (int(x) for x in rng.integers(14, 1500, 2))
        low = int(rng.integers(784, 200_000))
        high = low + int(rng.integers(0, 2) * rng.integers(0, 100_000))
        if max(width, height) / min(width, height) > high / 28**2:
            continue  # narrower than one patch when shrunk: a strip, see below
        rows, columns = smart_resize(height, width, 28, low, high)
        encoder._min_pixels, encoder._max_pixels = low, high
        encoder._check_budget(sample, (ImageSize((width, height), (columns, rows)),))
        tight += not low <= rows * columns <= high
    assert tight > 300


def test_a_strip_that_whole_patches_cannot_fit_into_the_budget_is_refused() -> None:
    p = policy_with("qwen2_5_vl", max_pixels=4000)
    with pytest.raises(
        DataError,
        match=r"data\.max_pixels = 4000 .*found \d+ x 28 = \d+ for a picture of 2800 x 28",
    ):
        p.encoder(sample_with([picture((2800, 28))]), TASK)


@pytest.mark.parametrize("budget", [{"max_pixels": 3000}, {"min_pixels": 10**9}], ids=str)
def test_a_budget_without_room_is_a_config_error(budget: dict[str, int]) -> None:
    with pytest.raises(
        ConfigError, match=r"data\.min_pixels <= data\.max_pixels, found \d+ > \d+.*set both"
    ):
        policy_with("qwen2_5_vl", **budget)
