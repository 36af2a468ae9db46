"""The vision tower under sdpa: one call for all sequences of one length, with the bits of one for each; what `auto` takes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

from mmrl.config import ModelConfig
from mmrl.policy import attention, attention_flex, attention_windows, loading
from mmrl.policy.attention import choose_attention, say_attention
from mmrl.policy.attention_flex import span_block_mask
from mmrl.policy.families import family_of
from mmrl.policy.storage import Stored
from mmrl.policy.tiny import TinySpec, build_tiny
from tests.kits.engine_kit import ARCHITECTURES, tiny_folder

GRIDS = [(1, 12, 20), (3, 8, 8), (1, 4, 6)]  # two pictures, a clip: windows of several lengths


def tower_run(
    model: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """The features, the gradient of the patches' projection and the number of sdpa calls."""
    visual, calls = model.model.visual, []
    visual.config._attn_implementation = name
    original = torch.nn.functional.scaled_dot_product_attention
    for place in (torch.nn.functional, attention_windows):
        monkeypatch.setattr(
            place,
            "scaled_dot_product_attention",
            lambda *a, **k: (calls.append(1), original(*a, **k))[1],
        )
    grids = torch.tensor(GRIDS)
    patch = visual.patch_embed
    width = patch.in_channels * patch.temporal_patch_size * patch.patch_size**2
    pixels = torch.randn(
        int(grids.prod(1).sum()), width, generator=torch.Generator().manual_seed(1)
    )
    model.zero_grad()
    out = visual(pixels, grid_thw=grids).pooler_output
    out.square().sum().backward()
    gradient = patch.proj.weight.grad.clone()
    monkeypatch.undo()
    return out.detach(), gradient, len(calls)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_windows_of_one_length_are_one_call_with_the_same_bits(
    arch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mmrl.policy.attention import register_attention

    register_attention()
    model, _ = build_tiny(TinySpec(arch, window_vision=True))
    plain, plain_gradient, many = tower_run(model, "sdpa", monkeypatch)
    found, gradient, few = tower_run(model, "mmrl_flash_or_sdpa", monkeypatch)
    assert torch.equal(found, plain)
    torch.testing.assert_close(gradient, plain_gradient, rtol=1e-5, atol=1e-6)
    # five sequences of three lengths in each of two blocks; with windows there are more of both
    assert few < many and few <= 2 * 3 + (6 if arch == "qwen2_5_vl" else 0), (few, many)


CUDA, CPU, BF16 = torch.device("cuda"), torch.device("cpu"), torch.bfloat16


@pytest.mark.parametrize(
    ("device", "autocast", "installed", "expected"),
    [
        (CPU, None, ("flash_attn", "triton"), "sdpa"),
        (CPU, BF16, ("flash_attn", "triton"), "sdpa"),
        (CUDA, None, ("flash_attn", "triton"), "sdpa"),
        (CUDA, BF16, ("flash_attn", "triton"), "flash_attention_2"),
        (CUDA, BF16, ("triton",), "flex"),
        (CUDA, BF16, (), "sdpa"),
    ],
)
def test_auto_takes_a_kernel_that_skips_blocks_where_there_is_one(
    device: torch.device,
    autocast: torch.dtype | None,
    installed: tuple[str, ...],
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: name if name in installed else None
    )
    assert choose_attention("auto", device, autocast) == expected
    assert choose_attention("eager", device, autocast) == "eager"


DENSE = [
    (BF16, "qwen2_5_vl", ("triton",), ""),
    (BF16, "qwen2_5_vl", ("flash_attn",), ""),
    (BF16, "qwen2_5_vl", (), "pip install triton"),
    (BF16, "gemma3", ("flash_attn", "triton"), "family gemma3 what it sees"),
    (BF16, "aya_vision", ("triton",), "family aya_vision what it sees"),
    (None, "qwen2_5_vl", ("triton",), "set model.dtype: bf16"),
]


@pytest.mark.parametrize(("autocast", "name", "installed", "said"), DENSE)
def test_dense_attention_on_a_gpu_is_said_once_with_its_reason(
    autocast: torch.dtype | None,
    name: str,
    installed: tuple[str, ...],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The GPU is but a name: what is chosen and said needs none."""
    attention._warn_once.cache_clear()
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: name if name in installed else None
    )
    family = family_of(SimpleNamespace(model_type=name))
    for attn, device in (("sdpa", CUDA), ("auto", CPU), ("auto", CUDA), ("auto", CUDA)):
        say_attention(attn, device, autocast, family)
    told = [r for r in caplog.records if r.name == attention.__name__]
    assert [r.levelname for r in told] == ["WARNING"] * bool(said)
    assert all("model.attn auto: sdpa" in r.getMessage() for r in told)
    assert all(said in r.getMessage() for r in told)
    monkeypatch.setenv("RANK", "1")
    attention._warn_once.cache_clear()
    say_attention("auto", CUDA, autocast, family)
    assert len(caplog.records) == len(told), "one process speaks"


@pytest.mark.parametrize("stored", ["masters", "products"])
def test_a_run_hears_it_before_weights_are_read_and_from_its_trainer_alone(
    stored: Stored, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    attention._warn_once.cache_clear()
    monkeypatch.setattr(loading, "device_and_precision", lambda *_: (CUDA, torch.float32, None))

    class Read(Exception):
        pass

    def read(*_: Any) -> Any:
        raise Read

    monkeypatch.setattr(loading, "_load_model", read)
    for _ in range(2):
        with pytest.raises(Read):
            loading.load_policy(ModelConfig(path=tiny_folder()), stored=stored)
    said = [r for r in caplog.records if "model.attn auto: sdpa" in r.getMessage()]
    assert len(said) == (stored == "masters")


def flex_call(length: int, dtype: torch.dtype, heads: int) -> None:
    spans = torch.zeros(4, 1, length, dtype=torch.int32)
    spans[1] = torch.arange(1, length + 1)
    query = torch.randn(1, heads, length, 32, dtype=dtype)
    with torch.no_grad():
        attention_flex._fused(query, query, query, block_mask=span_block_mask(spans, length))


def test_more_uses_than_torch_compiles_are_an_error_and_never_dense_scores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch computes with the kernel as it is written, on all scores, from its ninth variant on, and says so in a warning."""
    compiled = torch.compile(flex_attention, fullgraph=True, backend="eager", dynamic=False)
    monkeypatch.setattr(attention_flex, "_compiled", lambda: compiled)
    torch._dynamo.reset()
    for heads in range(1, 12):  # more than torch's own limit of 8
        flex_call(128, torch.float32, heads)
    torch._dynamo.reset()
    monkeypatch.setattr(attention_flex, "_VARIANTS", 2)
    with pytest.raises(Exception, match="recompile"):
        for heads in range(1, 5):
            flex_call(128, torch.float32, heads)
    torch._dynamo.reset()
