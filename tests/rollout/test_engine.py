"""The rollout engine: what it samples is what the trainer will differentiate, and batching changes nothing."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mmrl.policy.pack import PackItem, pack
from mmrl.policy.policy import Policy
from mmrl.rollout import PrefillOnceEngine, Request, SamplingSettings
from mmrl.types import Sample, StopReason, Turn
from mmrl.video.media import open_image
from tests.kits.engine_kit import (
    ARCHITECTURES,
    Album,
    fresh_policy,
    picture,
    policy,
    sample_with,
    tiny_folder,
)
from tests.kits.fast_kit import first_fast

TASK = Album()
SHAPES: tuple[tuple[tuple[int, int], ...], ...] = (
    ((640, 427),),
    (),
    ((56, 56), (37, 211)),
    ((112, 84),),
    ((300, 28), (480, 640), (56, 56)),
)


def samples() -> list[Sample]:
    """Five prompts of very different lengths."""
    questions = (
        "Where is the red circle?",
        "yes",
        "How many?",
        "Describe the image, then the largest shape.",
        "?",
    )
    return [
        sample_with([picture(s, 3) for s in sizes], question, n)
        for n, (sizes, question) in enumerate(zip(SHAPES, questions, strict=True))
    ]


def requests(p: Policy, count: int = 3, greedy: bool = False) -> list[Request]:
    return [Request(p.encoder(s, TASK), count, (7, n), greedy) for n, s in enumerate(samples())]


def generate(p: Policy, asked: Sequence[Request], **options: Any) -> list[list[Turn]]:
    options = {"max_new_tokens": 12, **options}
    return PrefillOnceEngine(p).generate(asked, SamplingSettings(**options))


def ids(results: Sequence[Sequence[Turn]]) -> list[list[tuple[int, ...]]]:
    return [[c.token_ids for c in group] for group in results]


@functools.lru_cache
def _plain_greedy(arch: str) -> list[tuple[int, ...]]:
    """transformers.generate on one prompt at a time, media tokens as bad words."""
    from transformers import AutoModelForImageTextToText

    p = policy(arch)
    model = AutoModelForImageTextToText.from_pretrained(
        tiny_folder(arch), dtype=torch.float32
    ).eval()
    found = []
    for sample in samples():
        text = p.processor.apply_chat_template(
            TASK.messages(sample, p.template), add_generation_prompt=True, tokenize=False
        )
        inputs = p.processor(
            text=[text], images=[open_image(i) for i in sample.images] or None, return_tensors="pt"
        )
        out = model.generate(
            **inputs,
            do_sample=False,
            max_new_tokens=24,
            bad_words_ids=[[i] for i in p.banned.tolist()],
        )
        found.append(tuple(out[0, inputs["input_ids"].shape[1] :].tolist()))
    return found


@pytest.mark.parametrize("arch", first_fast(ARCHITECTURES))
def test_greedy_equals_transformers_generate(arch: str) -> None:
    results = generate(
        policy(arch), requests(policy(arch), count=1, greedy=True), max_new_tokens=24
    )
    assert [group[0].token_ids for group in results] == _plain_greedy(arch)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_results_do_not_depend_on_batching(arch: str) -> None:
    p = policy(arch)
    asked = requests(p, count=4)
    together = generate(p, asked)
    assert len({c.token_ids for group in together for c in group}) > 15, (
        "the completions must differ for this test"
    )
    for batch_tokens in (1, 90, 200, 700):
        assert ids(generate(p, asked, batch_tokens=batch_tokens)) == ids(together)
    for n, request in enumerate(asked):
        assert ids(generate(p, [request])) == [ids(together)[n]], "alone"
    assert ids(generate(p, asked[::-1])) == ids(together)[::-1], "in another order"
    mixed = generate(p, [asked[0], Request(asked[1].prompt, 2, greedy=True), asked[2]])
    assert ids([mixed[0], mixed[2]]) == [ids(together)[0], ids(together)[2]], "beside greedy ones"
    assert mixed[1][0].token_ids == mixed[1][1].token_ids
    larger = generate(p, [Request(r.prompt, 2, r.key) for r in asked])
    assert ids(larger) == [group[:2] for group in ids(together)], (
        "completion g has its own noise, whatever the group size"
    )


def test_another_key_gives_other_completions() -> None:
    p = policy()
    prompt = p.encoder(samples()[0], TASK)
    first, second = generate(p, [Request(prompt, 4, (1, 2)), Request(prompt, 4, (1, 3))])
    assert {c.token_ids for c in first}.isdisjoint({c.token_ids for c in second})


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.7},
        {"temperature": 1.0},
        {"temperature": 1.3},
        {"top_p": 0.8},
        {"top_k": 5, "temperature": 1.3},
        {"top_k": 20, "top_p": 0.9},
    ],
    ids=lambda o: ",".join(f"{k}={v}" for k, v in o.items()),
)
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_behaviour_logps_equal_the_trainers(arch: str, options: dict[str, Any]) -> None:
    p = policy(arch)
    asked = requests(p)
    results = generate(p, asked, **options)
    batch = pack(
        [
            PackItem(r.prompt, tuple(c.token_ids for c in group))
            for r, group in zip(asked, results, strict=True)
        ]
    )
    with torch.no_grad():
        trained = p.logp(batch, options.get("temperature", 1.0)).logp_N
    sampled = torch.tensor([x for group in results for c in group for x in c.logprobs])
    assert (trained - sampled).abs().max() < 1e-5


@pytest.mark.parametrize("greedy", [True, False])
def test_media_tokens_are_never_sampled_even_when_they_win(greedy: bool) -> None:
    p = fresh_policy()
    banned = p.banned
    original = p.base.lm_head.forward

    def pushed(hidden: torch.Tensor) -> torch.Tensor:
        return original(hidden).index_add(
            -1, banned, torch.full((*hidden.shape[:-1], len(banned)), 50.0)
        )

    p.base.lm_head.forward = pushed
    hidden = torch.randn(1, 64)
    assert set(pushed(hidden).topk(len(banned)).indices[0].tolist()) == set(banned.tolist()), (
        "they would win"
    )
    results = generate(p, requests(p, count=4, greedy=greedy))
    written = {t for group in results for c in group for t in c.token_ids}
    assert written and written.isdisjoint(banned.tolist())
    assert all(x > float("-inf") for group in results for c in group for x in c.logprobs)


def test_stops_at_end_of_turn_and_retires_rows() -> None:
    p = fresh_policy()
    end, pad = p.eos_ids
    bias = torch.zeros(p.base.lm_head.weight.shape[0])
    bias[end], bias[pad] = 4.0, 3.0  # often, so that rows end at many different steps
    original = p.base.lm_head.forward
    seen_rows = []

    def eager_to_stop(hidden: torch.Tensor) -> torch.Tensor:
        seen_rows.append(hidden.shape[0])
        return original(hidden) + bias

    p.base.lm_head.forward = eager_to_stop
    asked = requests(p, count=8)
    results = generate(p, asked, max_new_tokens=30)
    flat = [c for group in results for c in group]
    assert len(flat) == 40 and len({len(c.token_ids) for c in flat}) > 4
    assert (
        seen_rows[0] == 40 and min(seen_rows) < 20 and seen_rows == sorted(seen_rows, reverse=True)
    )
    tokenizer = p.processor.tokenizer
    for c in flat:
        assert len(c.token_ids) == len(c.logprobs) >= 1
        assert not set(c.token_ids[:-1]) & {end, pad}, "nothing after the end"
        if c.stop is StopReason.EOS:
            assert c.token_ids[-1] in (end, pad)
            assert c.text == tokenizer.decode(c.token_ids[:-1], skip_special_tokens=False)
        else:
            assert (
                c.stop is StopReason.LENGTH
                and len(c.token_ids) == 30
                and c.token_ids[-1] not in (end, pad)
            )
    assert {c.stop for c in flat} == {StopReason.EOS} or {c.stop for c in flat} == {
        StopReason.EOS,
        StopReason.LENGTH,
    }
    alone = [generate(p, [r], max_new_tokens=30)[0] for r in asked]
    assert ids(alone) == ids(results), "retiring rows moves no row's noise, position or cache"
    one = generate(p, asked, max_new_tokens=1)
    assert all(len(c.token_ids) == 1 for group in one for c in group)


def test_version_and_empty_request_list() -> None:
    p = fresh_policy()
    assert generate(p, []) == []
    p.publish()
    assert p.publish() == 2
    assert {c.policy_version for group in generate(p, requests(p)) for c in group} == {2}


@given(
    lengths=st.lists(st.integers(0, 4), min_size=1, max_size=7),
    counts=st.lists(st.integers(1, 9), min_size=7, max_size=7),
    budget=st.integers(1, 900),
)
@settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
def test_pools_hold_every_row_once_and_rows_of_a_prompt_together(
    lengths: list[int], counts: list[int], budget: int
) -> None:
    from mmrl.rollout.engine import _pools
    from mmrl.rollout.slots import SlotRow

    p = policy()
    prompts = [p.encoder(s, TASK) for s in samples()]
    rows = [
        SlotRow(n, g, prompts[i], None) for n, i in enumerate(lengths) for g in range(counts[n])
    ]
    options = SamplingSettings(max_new_tokens=12, batch_tokens=budget)
    pools = list(_pools(rows, options))
    assert sorted((r.request, r.number) for pool in pools for r in pool) == [
        (r.request, r.number) for r in rows
    ]
    widest = max(r.prompt.length for r in rows) + 12
    assert len(pools) == 1 or widest * len(rows) > budget
    for pool in pools:
        widths = [r.prompt.length + 12 for r in pool]
        assert min(widths) >= 0.7 * max(widths) or pool is pools[-1]
        of = [id(r.prompt) for r in pool]
        assert [x for n, x in enumerate(of) if n == 0 or of[n - 1] != x] == list(dict.fromkeys(of))


def watched(
    p: Policy, engine: PrefillOnceEngine, asked: Sequence[Request], **options: Any
) -> tuple[list[list[Turn]], list[tuple[int, ...]], int]:
    """Results, the mask's shape at each step of the language model, and how many prompts were prefilled."""
    steps: list[tuple[int, ...]] = []
    prefilled = 0

    def look(module: Any, args: Any, kwargs: Any) -> None:
        nonlocal prefilled
        rows, length = kwargs["inputs_embeds"].shape[:2]
        if length == 1:
            steps.append(tuple(kwargs["attention_mask"].shape))
        else:
            prefilled += rows

    hook = p.base.model.language_model.register_forward_pre_hook(look, with_kwargs=True)
    try:
        return engine.generate(asked, SamplingSettings(**options)), steps, prefilled
    finally:
        hook.remove()


def test_rows_that_wait_take_the_slots_of_rows_that_ended() -> None:
    p = fresh_policy()
    bias = torch.zeros(p.base.lm_head.weight.shape[0])
    bias[p.eos_ids[0]] = 3.0  # often, so that rows end at many different steps
    original = p.base.lm_head.forward
    p.base.lm_head.forward = lambda hidden: original(hidden) + bias
    texts = [sample_with([picture((112, 84), n)], "How many?", n) for n in range(6)]
    asked = [Request(p.encoder(s, TASK), 8, (7, n)) for n, s in enumerate(texts)]
    options = {"max_new_tokens": 40, "batch_tokens": 12 * (asked[0].prompt.length + 40)}
    together = generate(p, asked, max_new_tokens=40)
    found, steps, prefilled = watched(p, PrefillOnceEngine(p), asked, **options)
    assert ids(found) == ids(together)
    pairs = [
        (ours, theirs)
        for mine, other in zip(found, together, strict=True)
        for ours, theirs in zip(mine, other, strict=True)
    ]
    for ours, theirs in pairs:
        assert torch.allclose(torch.tensor(ours.logprobs), torch.tensor(theirs.logprobs), atol=1e-5)
    assert prefilled == 6, "a prompt whose rows come one after the other is run once"
    lengths = [len(theirs.token_ids) for _, theirs in pairs]
    waves = sum(max(lengths[i : i + 12]) - 1 for i in range(0, len(lengths), 12))
    assert max(shape[0] for shape in steps) == 12 and len(steps) < 0.8 * waves, (len(steps), waves)


@pytest.mark.parametrize("arch", first_fast(ARCHITECTURES))
def test_the_step_that_a_gpu_records_gives_the_same_tokens(arch: str) -> None:
    """Its shapes never change: attention is shown whole slots, and rows that ended go on where nobody looks."""
    p = policy(arch)
    asked = [*requests(p), *requests(p, count=1, greedy=True)]
    expected = generate(p, asked)
    found, steps, _ = watched(p, PrefillOnceEngine(p, graphs=True), asked, max_new_tokens=12)
    assert ids(found) == ids(expected)
    widest = max(r.prompt.length for r in asked) + 12
    assert {shape[-1] for shape in steps} == {widest} and len({s[0] for s in steps}) < 4
