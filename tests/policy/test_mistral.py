"""Mistral 3's pictures: within their budget, mirrored, and of one token; and a text model that vLLM computes otherwise."""

from __future__ import annotations

import pytest
import torch

from mmrl.config.rollout_engine import vllm_lacks
from mmrl.coords import CoordFrame
from mmrl.errors import ConfigError
from mmrl.policy.families.mistral import Mistral3
from mmrl.video.pictures import RowReader
from tests.kits.engine_kit import fresh_policy, tiny_folder

FAMILY = Mistral3()


def picture(height: int, width: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(height * width)
    return torch.randint(0, 256, (3, height, width), dtype=torch.uint8, generator=generator)


@pytest.fixture(scope="module")
def reader() -> RowReader:
    return RowReader(fresh_policy("mistral3", frame=CoordFrame.REL1).processor)


@pytest.mark.parametrize(
    "shape", [(27, 27), (30, 57), (180, 320), (211, 37), (640, 427)], ids=lambda s: f"{s[0]}x{s[1]}"
)
def test_pictures_keep_within_their_budget(shape: tuple[int, int], reader: RowReader) -> None:
    """data.max_pixels bounds what is shown, which is the processor's own picture of the longest side that fits."""
    high = 56 * 84
    options, bounds = FAMILY.image_options(reader, None, high)
    assert bounds == (0, high)
    rows, (_, h, w), (width, height) = reader.read(picture(*shape), options)
    assert (14 * h, 14 * w) == (height, width) and width * height <= high
    assert h % 2 == w % 2 == 0 and reader.tokens(*shape, options) == h * w // 4
    fits = []
    smallest = -(-max(shape) // min(shape))  # with a shorter one the processor raises
    for longest in range(smallest, reader.part.size["longest_edge"] + 1):
        size = {"longest_edge": longest}
        out = reader.part(images=[picture(*shape)], size=size, patch_size=28, return_tensors="pt")
        if out["pixel_values"][0, 0].numel() <= high:
            fits.append(out["pixel_values"])
    assert torch.equal(rows, reader.layout.cut(fits[-1]))


def test_a_budget_below_a_block_shows_the_smallest_there_is(reader: RowReader) -> None:
    options, _ = FAMILY.image_options(reader, None, 100)
    _, grid, _ = reader.read(picture(20, 300), options)
    assert grid == (1, 2, 2) and reader.tokens(20, 300, options) == 1


def test_a_lower_bound_is_refused(reader: RowReader) -> None:
    with pytest.raises(ConfigError, match=r"expected no data\.min_pixels for family mistral3"):
        FAMILY.image_options(reader, 1000, None)


def test_a_mirrored_picture_is_the_processors_own_of_its_mirror_image(reader: RowReader) -> None:
    whole = picture(56, 84)  # of whole blocks: it is not resized
    rows, grid, shown = reader.read(whole, {})
    found = reader.layout.mirrored(rows, grid, shown[0])
    assert torch.equal(found, reader.read(whole.flip(-1), {})[0])
    assert torch.equal(reader.normalise(whole[None]), rows)


def test_a_picture_of_one_token_is_what_it_is_beside_others() -> None:
    """transformers drops a dimension of a lone token; such a picture is computed twice."""
    policy = fresh_policy("mistral3", frame=CoordFrame.REL1)
    base, reader = policy.base.model, policy.encoder.visuals.reader
    small, large = (reader.read(picture(*shape), {})[:2] for shape in ((28, 28), (56, 84)))
    assert small[1] == (1, 2, 2)
    with torch.no_grad():
        (alone,) = FAMILY.features(base, "image", small[0], [small[1]])
        beside, _ = FAMILY.features(
            base, "image", torch.cat([small[0], large[0]]), [small[1], large[1]]
        )
    assert alone.main.shape == beside.main.shape == (1, base.config.text_config.hidden_size)
    torch.testing.assert_close(alone.main, beside.main, atol=1e-5, rtol=0)


def test_vllm_is_not_given_queries_that_it_would_scale_otherwise() -> None:
    assert vllm_lacks(FAMILY, tiny_folder("mistral3")) == ""
    said = vllm_lacks(FAMILY, tiny_folder("mistral3:ministral3"))
    assert "text_config.model_type mistral for granted" in said and "has ministral3" in said
