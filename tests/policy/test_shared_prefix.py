"""The shared-prefix batch is the usual batch: the same log-probs and gradients, whatever is packed with whatever.

Two oracles: mmrl's own padded batch, and plain transformers (`model(**processor_output).logits`), which knows nothing
of packing, of our positions or of our attention function.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mmrl.config import LoraSettings
from mmrl.policy.pack import Batch, PackItem, micro_batches, pack, pack_padded
from mmrl.policy.policy import Policy
from tests.kits.engine_kit import (
    ARCHITECTURES,
    PHOTO_SIZES,
    Album,
    fresh_policy,
    picture,
    plain_logits,
    policy,
    sample_with,
    tiny_folder,
)
from tests.kits.fast_kit import first_fast
from tests.policy.rounding_kit import assert_same

LIMIT = 1e-5  # of log-probs of the kit's model without an adapter: five times what was measured, see tests/policy/rounding_kit.py
TASK = Album()
QUESTIONS = (
    "Where is the red circle?",
    "yes",
    "Think first, then answer. How many are in the image?",
)

# picture counts are drawn as such: 0, 1, 2 and 3 are equally likely
pictures = st.integers(0, 3).flatmap(
    lambda n: st.lists(st.sampled_from(PHOTO_SIZES), min_size=n, max_size=n)
)
completions = st.lists(
    st.lists(st.integers(0, 255), min_size=1, max_size=9), min_size=1, max_size=4
)
groups = st.lists(
    st.tuples(pictures, st.sampled_from(QUESTIONS), completions), min_size=1, max_size=4
)
few = settings(
    max_examples=10, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True
)


def items_of(p: Policy, drawn: Sequence[tuple[Any, str, Any]]) -> list[PackItem]:
    """Encode the drawn groups; the number of a group varies its pictures."""
    made = []
    for number, (sizes, question, texts) in enumerate(drawn):
        sample = sample_with([picture(size, number) for size in sizes], question, number)
        made.append(PackItem(p.encoder(sample, TASK), tuple(tuple(t) for t in texts)))
    return made


def run(
    p: Policy, batches: Sequence[Batch], temperature: float = 1.0
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Log-probs of all batches in order, and the gradients of a loss that weighs every token differently."""
    p.model.zero_grad(set_to_none=True)
    logprobs, offset = [], 0
    for batch in batches:
        logp_N = p.logp(batch, temperature).logp_N
        weight_N = torch.sin(torch.arange(offset, offset + len(logp_N)) * 1.7 + 0.3)
        (logp_N * weight_N).sum().backward()
        logprobs.append(logp_N.detach())
        offset += len(logp_N)
    return torch.cat(logprobs), {
        n: q.grad.clone() for n, q in p.model.named_parameters() if q.grad is not None
    }


def relative_error(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """Norm of the difference of all gradients over the norm of all gradients."""
    assert a.keys() == b.keys() and a
    difference = torch.stack([(a[n].double() - b[n].double()).norm() for n in a]).norm()
    return float(difference / torch.stack([b[n].double().norm() for n in b]).norm())


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHITECTURES)
@given(drawn=groups, budget=st.integers(1, 400), temperature=st.sampled_from([1.0, 0.7, 1.6]))
@few
def test_packed_equals_padded_in_any_split(
    arch: str, drawn: Any, budget: int, temperature: float
) -> None:
    p = policy(arch)
    items = items_of(p, drawn)
    split = [pack([items[i] for i in part]) for part in micro_batches(items, budget)]
    logp, gradients = run(p, split, temperature)
    usual_logp, usual_gradients = run(p, [pack_padded(items)], temperature)
    assert (logp - usual_logp).abs().max() < LIMIT
    assert relative_error(gradients, usual_gradients) < LIMIT


@functools.lru_cache
def plain_model(arch: str, attention: str = "eager") -> Any:
    """The same weights as transformers itself loads them."""
    from transformers import AutoModelForImageTextToText

    return AutoModelForImageTextToText.from_pretrained(
        tiny_folder(arch), attn_implementation=attention, dtype=torch.float32
    ).eval()


def plain_logps(
    p: Policy,
    model: Any,
    sizes: Sequence[tuple[int, int]],
    question: str,
    number: int,
    texts: Sequence[Sequence[int]],
    temperature: float,
) -> torch.Tensor:
    """Log-probs by transformers alone, one row at a time, positions and masks of its own making."""
    sample = sample_with([picture(size, number) for size in sizes], question, number)
    rows = []
    for tokens, logits in plain_logits(p, model, TASK, sample, texts):
        logits = (logits / temperature).index_fill(-1, p.banned, float("-inf"))
        rows.append(logits.log_softmax(-1).gather(-1, tokens[:, None])[:, 0])
    return torch.cat(rows)


@pytest.mark.parametrize("arch", first_fast(ARCHITECTURES))
@given(drawn=groups, temperature=st.sampled_from([1.0, 0.7]))
@few
def test_packed_equals_plain_transformers(arch: str, drawn: Any, temperature: float) -> None:
    p = policy(arch)
    packed = p.logp(pack(items_of(p, drawn)), temperature).logp_N.detach()
    with torch.no_grad():
        plain = torch.cat(
            [
                plain_logps(p, plain_model(arch), *group[:2], number, group[2], temperature)
                for number, group in enumerate(drawn)
            ]
        )
    assert (packed - plain).abs().max() < LIMIT


FIXED = [
    ([(640, 427), (56, 56)], QUESTIONS[0], [[5, 9, 33], [7], [100, 2, 2, 2, 8]]),
    ([], QUESTIONS[1], [[44], [45, 46]]),
    ([(37, 211)], QUESTIONS[2], [[200, 3], [11, 12, 13, 14, 15, 16]]),
]


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_gradients_equal_plain_transformers(arch: str) -> None:
    p, model = policy(arch), plain_model(arch)
    logp, gradients = run(p, [pack(items_of(p, FIXED))])
    model.zero_grad(set_to_none=True)
    plain = torch.cat(
        [plain_logps(p, model, *group[:2], n, group[2], 1.0) for n, group in enumerate(FIXED)]
    )
    (plain * torch.sin(torch.arange(len(plain)) * 1.7 + 0.3)).sum().backward()
    assert (logp - plain.detach()).abs().max() < LIMIT
    assert (
        relative_error(
            gradients, {n: q.grad for n, q in model.named_parameters() if q.grad is not None}
        )
        < LIMIT
    )


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_models_of_these_tests_notice_what_they_should(arch: str) -> None:
    """Guards the other tests: another picture, another position or a neighbour in sight would change the numbers."""
    p = policy(arch)
    items = items_of(p, FIXED)
    base = p.logp(pack(items)).logp_N.detach()
    other = items_of(p, [([(640, 427), (112, 84)], *FIXED[0][1:]), *FIXED[1:]])
    changed = (p.logp(pack(other)).logp_N.detach() - base).abs()
    assert changed[:9].min() > 100 * LIMIT and changed[9:].max() < LIMIT, (
        "another picture matters to its group only"
    )
    shifted = pack(items)
    shifted.positions_3 = shifted.positions_3.clone()
    shifted.positions_3[0, 0, 10:] += 3
    assert (p.logp(shifted).logp_N.detach() - base).abs().max() > 100 * LIMIT
    seen = pack(items)
    assert seen.layout is not None
    seen.layout.owner_B = seen.layout.owner_B.roll(1)
    assert (p.logp(seen).logp_N.detach() - base).abs().max() > 100 * LIMIT


@pytest.mark.check_takes(3)
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"freeze": ["vision"]}, id="frozen vision"),
        pytest.param({"freeze": ["vision", "projector"]}, id="language only"),
        pytest.param({"gradient_checkpointing": True}, id="checkpointing"),
        pytest.param({"lora": LoraSettings(r=4)}, id="lora"),
        pytest.param(
            {"lora": LoraSettings(r=4, vision=True), "gradient_checkpointing": True},
            id="lora with vision, checkpointing",
        ),
        pytest.param({"attn": "eager"}, id="eager vision tower"),
    ],
)
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_training_mode(arch: str, options: dict[str, Any]) -> None:
    p = fresh_policy(arch, **options)
    if p.has_adapter:  # a fresh adapter is zero: give it something to say
        torch.manual_seed(1)
        with torch.no_grad():
            for name, parameter in p.trainable():
                parameter.copy_(0.2 * torch.randn_like(parameter)) if "lora_B" in name else None
    logp, gradients = run(p, [pack(items_of(p, FIXED))])
    assert_same(
        lambda: run(p, [pack_padded(items_of(p, FIXED))]), (logp, gradients), p.model.parameters()
    )
    assert set(gradients) == {n for n, _ in p.trainable()}
    if not p.has_adapter:
        plain = run(policy(arch), [pack(items_of(p, FIXED))])
        assert (logp - plain[0]).abs().max() < LIMIT
        assert (
            relative_error(gradients, {n: g for n, g in plain[1].items() if n in gradients}) < LIMIT
        )


@pytest.mark.parametrize("chunk", [1, 900, 2000])
def test_chunked_logits_equal_unchunked(chunk: int) -> None:
    p, whole = fresh_policy(), policy()
    p._logits_chunk = chunk  # a few positions at a time
    batch = pack(items_of(p, FIXED))
    logp, gradients = run(p, [batch], 1.3)
    expected, expected_gradients = run(whole, [batch], 1.3)
    assert (logp - expected).abs().max() < LIMIT
    assert relative_error(gradients, expected_gradients) < LIMIT
    assert torch.allclose(p.logp(batch).entropy_N, whole.logp(batch).entropy_N, atol=LIMIT)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_media_tokens_are_impossible(arch: str) -> None:
    p = policy(arch)
    ids = {
        p.processor.tokenizer.convert_tokens_to_ids(t)
        for t in (
            "<|image_pad|>",
            "<|video_pad|>",
            "<|vision_start|>",
            "<|vision_end|>",
            "<|vision_pad|>",
        )
    }
    assert set(p.banned.tolist()) == ids
    item = items_of(p, FIXED[:1])[0]
    media = pack([PackItem(item.prompt, tuple((5,) for _ in ids))])
    media.target_N = torch.tensor(sorted(ids))
    with torch.no_grad():
        assert torch.isneginf(p.logp(media).logp_N).all()
        every = PackItem(
            item.prompt, tuple((i,) for i in range(p.base.lm_head.weight.shape[0]) if i not in ids)
        )
        result = p.logp(pack([every]), 0.7)
    p_V = result.logp_N.double().exp()
    assert p_V.sum() == pytest.approx(1, abs=1e-5), "what is left is a whole distribution"
    entropy = float(-(p_V * result.logp_N.double()).sum())
    assert torch.allclose(result.entropy_N.double(), torch.tensor(entropy).double(), atol=1e-4)


def test_cost_is_one_prompt_per_group() -> None:
    p = policy()
    items = items_of(p, FIXED)
    expected = sum(i.prompt.length + sum(map(len, i.completions)) for i in items)
    assert pack(items).num_tokens == expected
    assert len(pack(items).visuals) == sum(len(i.prompt.visuals) for i in items)
    assert len(pack_padded(items).visuals) == sum(
        len(i.prompt.visuals) * len(i.completions) for i in items
    )
    parts = list(micro_batches(items, 60))
    assert [i for part in parts for i in part] == [0, 1, 2], "in order, none lost"
    assert all(
        len(part) == 1 or sum(pack([items[i]]).num_tokens for i in part) <= 60 for part in parts
    )
