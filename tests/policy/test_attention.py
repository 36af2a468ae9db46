"""Every setting of model.attn computes the same thing: log-probs, gradients, samples, packed and padded, for any mix of groups.

FlashAttention needs a GPU: here its variable-length kernel is replaced by a loop over sequences with the same meaning, so that
everything mmrl adds to it (indices, cumulative lengths, gradients) is checked. Tests marked gpu run the kernels themselves.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmrl.config import LoraSettings, ModelConfig
from mmrl.errors import ConfigError, MissingExtraError
from mmrl.policy import attention_flash, attention_flex
from mmrl.policy.attention import ATTENTIONS, check_attention, set_attention
from mmrl.policy.attention_flex import dense_mask, padded_block_mask, span_block_mask
from mmrl.policy.attention_layout import PrefixLayout
from mmrl.policy.loading import load_policy
from mmrl.policy.pack import Batch, PackItem, pack, pack_padded
from mmrl.policy.policy import Policy
from mmrl.rollout import PrefillOnceEngine, Request, SamplingSettings
from tests.kits.engine_kit import (
    ARCHITECTURES,
    Album,
    fresh_policy,
    picture,
    sample_with,
    tiny_folder,
)
from tests.kits.fast_kit import first_fast
from tests.policy.rounding_kit import assert_same

LIMIT = 1e-5  # of log-probs of the kit's model without an adapter: five times what was measured, see tests/policy/rounding_kit.py
OTHERS = ("eager", "flash_attention_2", "flex")
TASK = Album()
LONG = "Describe the image, then the largest shape. " * 6


def looped_varlen(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    starts_query: torch.Tensor,
    starts_key: torch.Tensor,
    longest_query: int,
    longest_key: int,
    *,
    causal: bool,
    scaling: float | None,
) -> torch.Tensor:
    """The variable-length kernel as its documentation describes it, one sequence after the other."""
    assert (
        starts_query.dtype == starts_key.dtype == torch.int32
        and starts_query.shape == starts_key.shape
    )
    lengths = starts_query.diff(), starts_key.diff()
    assert [int(n.max()) for n in lengths] == [longest_query, longest_key]
    assert [int(s[-1]) for s in (starts_query, starts_key)] == [
        len(query),
        len(key),
    ] and query.dtype == key.dtype == value.dtype
    groups, found = query.shape[1] // key.shape[1], []
    for i in range(len(lengths[0])):
        q = query[starts_query[i] : starts_query[i + 1]].transpose(0, 1)
        k, v = (
            x[starts_key[i] : starts_key[i + 1]].transpose(0, 1).repeat_interleave(groups, 0)
            for x in (key, value)
        )
        scores = q @ k.transpose(1, 2) * (q.shape[-1] ** -0.5 if scaling is None else scaling)
        if causal:
            last = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril(
                k.shape[1] - q.shape[1]
            )
            scores = scores.masked_fill(~last, float("-inf"))
        found.append((scores.float().softmax(-1).to(v.dtype) @ v).transpose(0, 1))
    return torch.cat(found)


@pytest.fixture(autouse=True)
def _loop_for_kernel(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    if not request.node.get_closest_marker("gpu"):
        monkeypatch.setattr(attention_flash, "varlen_attention", looped_varlen)


def policy_with(attn: str, arch: str = "qwen2_5_vl", **options: Any) -> Policy:
    """A policy that uses `attn`; loading refuses flash attention on a CPU, so it is set afterwards."""
    p = fresh_policy(arch, **options)
    set_attention(p.base, attn)
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in p.trainable():
            # a fresh adapter is zero
            parameter.copy_(0.2 * torch.randn_like(parameter)) if "lora_B" in name else None
    return p


def items_of(p: Policy) -> list[PackItem]:
    """Pictures, none, one and two of them; prompts and completions of unequal length, several blocks of 128 in all."""
    groups: Sequence[tuple[list[tuple[int, int]], str, list[list[int]]]] = [
        ([(320, 213), (56, 56)], "Where is the red circle?", [[5, 9, 33], [7], list(range(3, 90))]),
        ([], "yes", [[44], [45, 46]]),
        ([(37, 211)], LONG, [[200, 3], list(range(100, 230)), [11, 12, 13]]),
    ]
    return [
        PackItem(
            p.encoder(sample_with([picture(s, n) for s in sizes], question, n), TASK),
            tuple(tuple(t) for t in texts),
        )
        for n, (sizes, question, texts) in enumerate(groups)
    ]


def run(p: Policy, batch: Batch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Log-probs and the gradients of a loss that weighs every token differently."""
    p.model.zero_grad(set_to_none=True)
    logp_N = p.logp(batch).logp_N
    (
        logp_N * torch.sin(torch.arange(len(logp_N), device=logp_N.device) * 1.7 + 0.3)
    ).sum().backward()
    return logp_N.detach().cpu(), {
        n: q.grad.cpu() for n, q in p.model.named_parameters() if q.grad is not None
    }


def relative_error(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    assert a.keys() == b.keys() and a
    difference = torch.stack([(a[n].double() - b[n].double()).norm() for n in a]).norm()
    return float(difference / torch.stack([b[n].double().norm() for n in b]).norm())


# ---- the same numbers


@pytest.mark.check_takes(1)
@pytest.mark.parametrize("attn", OTHERS)
@pytest.mark.parametrize("arch", [*first_fast(ARCHITECTURES), "kimi_k25"])
def test_every_attention_equals_sdpa(arch: str, attn: str) -> None:
    """Kimi's keys are wider than its values."""
    p = policy_with("sdpa", arch)
    batches = [pack(items_of(p)), pack(items_of(p), causal=False), pack_padded(items_of(p))]
    assert (run(p, batches[0])[0] - run(p, batches[1])[0]).abs().max() > 100 * LIMIT, (
        "what a later token says is noticed"
    )
    set_attention(p.base, attn)
    assert p.base.model.language_model.config._attn_implementation == ATTENTIONS[attn][0]
    tower = p.family.parts.blocks(p.base.model)[0]
    assert tower.attn.config._attn_implementation == ATTENTIONS[attn][1]
    found = [run(p, batch) for batch in batches]
    set_attention(p.base, "sdpa")
    for batch, there in zip(batches, found, strict=True):
        assert_same(lambda batch=batch: run(p, batch), there, p.model.parameters())


@pytest.mark.parametrize("attn", OTHERS)
def test_slices_are_seen_alike_under_every_attention(attn: str) -> None:
    """MiniCPM-V's tower attends within views and, in the middle, within windows of four patches; its state layers take no parallel
    decoding, which the test above has."""
    p = policy_with("sdpa", "minicpmv4_6")
    batch = pack(items_of(p))
    set_attention(p.base, attn)
    tower = p.family.parts.blocks(p.base.model)[0]
    assert tower.self_attn.config._attn_implementation == ATTENTIONS[attn][1]
    found = run(p, batch)
    set_attention(p.base, "sdpa")
    assert_same(lambda: run(p, batch), found, p.model.parameters())


@pytest.mark.parametrize(
    "options",
    [
        {"gradient_checkpointing": True},
        {"lora": LoraSettings(r=4, vision=True), "gradient_checkpointing": True},
        {"freeze": ["vision", "projector"]},
    ],
    ids=["checkpointing", "lora, checkpointing", "frozen vision"],
)
@pytest.mark.parametrize("attn", OTHERS)
@pytest.mark.slow
def test_training_modes_under_every_attention(attn: str, options: dict[str, Any]) -> None:
    plain, other = policy_with("sdpa", **options), policy_with(attn, **options)
    batch = pack(items_of(plain))
    assert_same(lambda: run(plain, batch), run(other, batch), plain.model.parameters())


# Relative error of all gradients under bf16 autocast against fp32, the kit's enlarged weights; measured on a CPU: 0.0087 to 0.0095.
BF16_LIMIT = 0.03


@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])
@pytest.mark.parametrize("attn", ATTENTIONS)
@pytest.mark.slow
def test_bf16_gradients_agree_with_fp32(attn: str, checkpointing: bool) -> None:
    exact = policy_with("sdpa", freeze=["vision", "projector"])
    rounded = policy_with(
        attn, freeze=["vision", "projector"], dtype="bf16", gradient_checkpointing=checkpointing
    )
    for packer in (pack, pack_padded):
        (logp, gradients), (found_logp, found_gradients) = (
            run(p, packer(items_of(p))) for p in (exact, rounded)
        )
        assert found_logp.dtype == torch.float32 and (found_logp - logp).abs().mean() < 0.01
        assert 1e-4 < relative_error(found_gradients, gradients) < BF16_LIMIT, (
            "rounded, and not more than rounded"
        )


@pytest.mark.parametrize("attn", OTHERS)
def test_rollouts_are_the_same_under_every_attention(attn: str) -> None:
    p = policy_with("sdpa")
    requests = [
        Request(item.prompt, 3, (4, n), greedy=n == 1) for n, item in enumerate(items_of(p))
    ]
    sampling = SamplingSettings(max_new_tokens=8)
    expected = PrefillOnceEngine(p).generate(requests, sampling)
    set_attention(p.base, attn)
    found = PrefillOnceEngine(p).generate(requests, sampling)
    for ours, theirs in zip(chain(*found), chain(*expected), strict=True):
        assert ours.token_ids == theirs.token_ids
        assert torch.allclose(
            torch.tensor(ours.logprobs), torch.tensor(theirs.logprobs), atol=LIMIT
        )


# ---- block masks


spans = st.lists(
    st.tuples(st.integers(1, 300), st.lists(st.integers(1, 200), min_size=1, max_size=4)),
    min_size=1,
    max_size=3,
)


def layout_of(
    groups: Sequence[tuple[int, Sequence[int]]], causal: bool
) -> tuple[PrefixLayout, torch.Tensor]:
    """A layout, and who sees whom as plain loops over tokens of equal label say."""
    starts: list[tuple[int, int]] = []
    completions, owners, labels, cursor = [], [], [], 0
    for m, (prompt, lengths) in enumerate(groups):
        starts.append((cursor, prompt))
        labels += [(m, -1)] * prompt
        cursor += prompt
        for length in lengths:
            completions.append((cursor, length))
            owners.append(m)
            labels += [(m, len(owners))] * length
            cursor += length
    group, piece = torch.tensor(labels).T
    place = torch.arange(cursor)
    same = group[:, None] == group
    seen = same & ((piece == -1) | (piece[:, None] == piece)) & (place[:, None] >= place)
    if not causal:
        seen |= same & (piece[:, None] == piece) & (piece != -1)
    prompts, tails = torch.tensor(starts), torch.tensor(completions)
    return PrefixLayout(
        prompts[:, 0], prompts[:, 1], tails[:, 0], tails[:, 1], torch.tensor(owners), causal
    ), seen


@given(groups=spans, causal=st.booleans())
@settings(max_examples=25, derandomize=True)
def test_block_mask_of_a_packed_row_shows_exactly_what_may_be_seen(
    groups: Any, causal: bool
) -> None:
    layout, seen = layout_of(groups, causal)
    mask = layout.block_mask
    assert torch.equal(dense_mask(mask)[0, 0], seen), "blocks and function together"
    size = attention_flex._BLOCK
    padded = torch.nn.functional.pad(seen, (0, -len(seen) % size, 0, -len(seen) % size))
    padded = padded.unflatten(0, (-1, size)).unflatten(2, (-1, size))
    some, every = padded.any((1, 3)).sum(1), padded.all((1, 3)).sum(1)
    assert torch.equal(mask.kv_num_blocks[0, 0].long(), some - every), (
        "no block is computed in vain"
    )
    assert mask.full_kv_num_blocks is not None and torch.equal(
        mask.full_kv_num_blocks[0, 0].long(), every
    ), "or asked in vain"


def test_block_mask_has_all_three_kinds_of_blocks() -> None:
    mask = layout_of([(400, [200, 200, 200])], True)[0].block_mask
    assert mask.full_kv_num_blocks is not None
    absent = 8 * 8 - int(mask.kv_num_blocks.sum()) - int(mask.full_kv_num_blocks.sum())
    assert min(absent, int(mask.kv_num_blocks.sum()), int(mask.full_kv_num_blocks.sum())) > 0


@given(valid=st.lists(st.integers(1, 150), min_size=1, max_size=3), left=st.booleans())
@settings(max_examples=15, derandomize=True)
def test_block_mask_of_a_padded_batch(valid: list[int], left: bool) -> None:
    width = max(valid)
    place = torch.arange(width)
    mask_RK = torch.stack([(place >= width - n) if left else (place < n) for n in valid])
    found = dense_mask(padded_block_mask(len(valid), width, width, attention_mask=mask_RK))
    expected = mask_RK[:, None, None] & (place[:, None] >= place)
    assert torch.equal(found, expected)


def compiled_kernel() -> None:
    """torch's own kernel (without gradients, which it lacks on a CPU) on a row with absent, partial and full blocks, whose second
    completion goes on from the middle of the first."""
    layout = layout_of([(300, [140, 90]), (20, [130])], True)[0]
    layout.before_B = ((), ((300, 60),), ())
    torch.manual_seed(0)
    query, key, value = (
        torch.randn(1, 4, layout.num_tokens, 32),
        *torch.randn(2, 1, 2, layout.num_tokens, 32),
    )
    ours = attention_flex.flex(query, key, value, layout.block_mask, None)
    with torch.no_grad():
        kernel = attention_flex._compiled()(
            query, key, value, block_mask=layout.block_mask, enable_gqa=True
        )
    assert torch.allclose(kernel.transpose(1, 2), ours, atol=1e-5)


@pytest.mark.slow
def test_the_compiled_kernel_reads_our_blocks_as_we_do(tmp_path: Path) -> None:
    """In a process of its own: torch compiles a second length seen in one process with a dynamic shape, which fails on a CPU. With
    a cache of its own: torch's does not tell instruction sets apart, and a kernel compiled for another one computes nonsense."""
    code = "from tests.policy.test_attention import compiled_kernel; compiled_kernel()"
    told = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert told.returncode == 0, told.stderr[-3000:]


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Lengths of the block masks built."""
    lengths: list[int] = []

    def counted(spans_ERT: torch.Tensor, num_keys: int) -> Any:
        lengths.append(num_keys)
        return span_block_mask(spans_ERT, num_keys)

    monkeypatch.setattr(attention_flex, "span_block_mask", counted)
    yield lengths


def test_one_block_mask_serves_all_layers_and_their_recomputation(built: list[int]) -> None:
    p = policy_with("flex", gradient_checkpointing=True)
    batch = pack(items_of(p)[1:2])  # without pictures
    run(p, batch)
    assert p.base.config.text_config.num_hidden_layers > 1 and built == [batch.num_tokens]


# ---- what cannot run says so


def test_flash_attention_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ConfigError, match=r"needs an NVIDIA GPU, found model.device 'cpu'; use sdpa or flex"
    ):
        load_policy(
            ModelConfig(path=tiny_folder("qwen2_5_vl"), device="cpu", attn="flash_attention_2")
        )
    gpu = torch.device("cuda")
    with pytest.raises(ConfigError, match=r"computes in bf16, found model.dtype fp32"):
        check_attention("flash_attention_2", gpu, None)
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    with pytest.raises(MissingExtraError, match=r"pip install -e '.*\[flash-attn\]'"):
        check_attention("flash_attention_2", gpu, torch.bfloat16)
    for attn in ("sdpa", "eager", "flex"):
        check_attention(attn, torch.device("cpu"), None)


# ---- the kernels themselves


@pytest.mark.gpu
@pytest.mark.parametrize("attn", ["flex", "flash_attention_2"])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_kernels_on_a_gpu_equal_sdpa(arch: str, attn: str) -> None:
    if attn == "flash_attention_2":
        pytest.importorskip("flash_attn", reason="needs a GPU with flash-attn")
    config = {
        "path": tiny_folder(arch),
        "device": "cuda",
        "dtype": "bf16",
        "freeze": ["vision", "projector"],
    }
    plain, other = load_policy(ModelConfig(**config)), load_policy(ModelConfig(**config, attn=attn))
    for packer in (pack, pack_padded):
        (logp, gradients), (found_logp, found_gradients) = (
            run(p, packer(items_of(p))) for p in (plain, other)
        )
        assert (found_logp - logp).abs().mean() < 0.01
        assert relative_error(found_gradients, gradients) < BF16_LIMIT
