"""A critic's values are what plain transformers' hidden states are worth, whatever is packed with whatever, and it is saved where
nobody takes it for the model's."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

from mmrl.config import LoraSettings
from mmrl.errors import CheckpointError
from mmrl.policy.loading import add_value_head
from mmrl.policy.policy import CRITIC_FOLDER, Policy
from mmrl.policy.value_head import VALUE_HEAD_FILE
from mmrl.video.media import open_image
from tests.kits.engine_kit import (
    ARCHITECTURES,
    Album,
    fresh_policy,
    picture,
    sample_with,
    tiny_folder,
)
from tests.kits.fast_kit import first_fast

TASK = Album()
GROUPS: list[tuple[list[tuple[int, int]], list[list[int]]]] = [
    ([(640, 427), (56, 56)], [[5, 9, 33], [7], [100, 2, 2, 2, 8]]),
    ([], [[11, 12]]),
    ([(112, 84)], [[3, 1, 4], [1, 5, 9, 2]]),
]
TURNS = 6


def judging(arch: str, tokens: bool = True, **options: Any) -> Policy:
    """A policy whose critic says something."""
    p = fresh_policy(arch, **options)
    add_value_head(p, hidden=16, tokens=tokens, seed=1)
    assert p.value_head is not None
    torch.nn.init.normal_(p.value_head[2].weight, generator=torch.Generator().manual_seed(2))
    return p


def turns_of(p: Policy) -> tuple[list[Any], list[tuple[int, ...]]]:
    prompts, tokens = [], []
    for number, (sizes, texts) in enumerate(GROUPS):
        prompt = p.encoder(
            sample_with([picture(size, number) for size in sizes], number=number), TASK
        )
        prompts += [prompt] * len(texts)
        tokens += [tuple(t) for t in texts]
    return prompts, tokens


@functools.lru_cache
def plain_model(arch: str) -> Any:
    from transformers import AutoModelForImageTextToText

    return AutoModelForImageTextToText.from_pretrained(
        tiny_folder(arch), attn_implementation="eager", dtype=torch.float32
    ).eval()


@torch.no_grad()
def plain_values(p: Policy, arch: str) -> list[torch.Tensor]:
    """Of each turn: values before each of its tokens and after the last, by transformers alone, one row at a time."""
    found = []
    for number, (sizes, texts) in enumerate(GROUPS):
        sample = sample_with([picture(size, number) for size in sizes], number=number)
        text = p.processor.apply_chat_template(
            TASK.messages(sample, p.template), add_generation_prompt=True, tokenize=False
        )
        for tokens in texts:
            pictures = [open_image(path) for path in sample.images]
            inputs = dict(p.processor(text=[text], images=pictures or None, return_tensors="pt"))
            extra, length = torch.tensor([tokens]), inputs["input_ids"].shape[1]
            inputs["input_ids"] = torch.cat([inputs["input_ids"], extra], 1)
            inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
            if "mm_token_type_ids" in inputs:
                inputs["mm_token_type_ids"] = torch.cat(
                    [inputs["mm_token_type_ids"], torch.zeros_like(extra)], 1
                )
            hidden = plain_model(arch).model(**inputs).last_hidden_state[0, length - 1 :]
            first, _, last = p.value_head  # type: ignore[misc]
            found.append(
                torch.nn.functional.gelu(hidden @ first.weight.T + first.bias) @ last.weight[0]
                + last.bias
            )
    return found


@pytest.mark.parametrize("arch", first_fast(ARCHITECTURES))
@pytest.mark.parametrize("shared", [True, False])
def test_values_are_those_of_plain_transformers(arch: str, shared: bool) -> None:
    p = judging(arch)
    p.shared_prefix = shared
    prompts, tokens = turns_of(p)
    plain = plain_values(p, arch)
    said = p.predict_values(prompts, tokens)
    assert torch.allclose(said.values_M, torch.cat([v[:-1] for v in plain]), atol=1e-5)
    assert torch.allclose(said.after_D, torch.stack([v[-1] for v in plain]), atol=1e-5)
    assert said.after_D.std() > 0.1, "values that say nothing would be equal anyway"
    assert torch.equal(p.evaluate(prompts, tokens).values_M.detach(), said.values_M), (
        "one forward, with or without log-probs"
    )
    p.values_tokens = False
    by_turn = p.predict_values(prompts, tokens)
    assert (
        torch.allclose(by_turn.values_M, torch.stack([v[0] for v in plain]), atol=1e-5)
        and len(by_turn.values_M) == TURNS
    )
    assert torch.equal(by_turn.after_D, said.after_D)
    assert torch.equal(by_turn.values_M[0], by_turn.values_M[2]), "siblings have one prompt"


def gradients(p: Policy, **options: bool) -> dict[str, torch.Tensor]:
    values_M = p.evaluate(*turns_of(p), **options).values_M
    (values_M * torch.sin(torch.arange(len(values_M)) + 0.5)).sum().backward()
    found = {n: q.grad.clone() for n, q in p.trainable() if q.grad is not None}
    for _, q in p.trainable():
        q.grad = None
    return found


def test_gradients_of_values_are_those_of_the_usual_batch_and_can_end_at_the_head() -> None:
    p = judging(ARCHITECTURES[0])
    packed = gradients(p)
    p.shared_prefix = False
    usual = gradients(p)
    assert packed.keys() == usual.keys() and any(
        not name.startswith("value_head.") for name in packed
    )
    apart = torch.stack([(packed[n].double() - usual[n].double()).norm() for n in packed]).norm()
    assert apart < 1e-5 * torch.stack([usual[n].double().norm() for n in usual]).norm()
    ended = gradients(p, detach_values=True)
    assert (
        set(ended) == {n for n, _ in p.trainable() if n.startswith("value_head.")}
        and len(ended) == 4
    )
    assert all(torch.equal(ended[n], usual[n]) for n in ended)


@pytest.mark.parametrize("lora", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_saved_critic_goes_on_and_transformers_does_not_see_it(
    lora: bool, tmp_path: Path
) -> None:
    from transformers import AutoModelForImageTextToText

    p = judging(ARCHITECTURES[0], **({"lora": LoraSettings(r=2)} if lora else {}))
    p.save(tmp_path)
    assert [f.name for f in tmp_path.glob("*.safetensors")] == ["model.safetensors"], (
        "vLLM reads all that lie there"
    )
    model, told = AutoModelForImageTextToText.from_pretrained(tmp_path, output_loading_info=True)
    assert not told["unexpected_keys"] and not told["missing_keys"] and model is not None
    again = fresh_policy(ARCHITECTURES[0])
    add_value_head(again, hidden=16, tokens=True, seed=5, folders=[tmp_path / "nothing", tmp_path])
    kept, found = (dict(q.value_head.named_parameters()) for q in (p, again))  # type: ignore[union-attr]
    assert kept.keys() == found.keys() and all(torch.equal(kept[n], found[n]) for n in kept)
    with pytest.raises(
        CheckpointError,
        match=rf"{VALUE_HEAD_FILE}: expected the value head of this model, found another",
    ):
        add_value_head(again, hidden=8, tokens=True, seed=5, folders=[tmp_path])
    broken = dict(kept)
    broken["2.bias"] = torch.tensor([float("nan")])
    p.value_head.load_state_dict(broken)  # type: ignore[union-attr]
    p.value_head.save(tmp_path / CRITIC_FOLDER)  # type: ignore[union-attr]
    with pytest.raises(CheckpointError, match=r"expected finite weights in .*critic, found NaN"):
        add_value_head(again, hidden=16, tokens=True, seed=5, folders=[tmp_path])


def test_the_reference_has_no_critic_and_a_full_replica_has_its_own() -> None:
    p = judging(ARCHITECTURES[0], needs_reference=True)
    prompts, tokens = turns_of(p)
    with torch.no_grad(), p.reference() as reference:
        assert (reference.evaluate(prompts, tokens).values_M == 0).all() and not reference.heads
    copy = p.full_replica()
    assert (
        torch.equal(
            copy.predict_values(prompts, tokens).values_M,
            p.predict_values(prompts, tokens).values_M,
        )
        and copy.values_tokens
    )
    torch.nn.init.zeros_(copy.value_head[2].weight)  # type: ignore[index]
    assert p.predict_values(prompts, tokens).values_M.std() > 0.1


def test_a_head_begins_at_zero_and_the_same_for_a_seed() -> None:
    p, q = fresh_policy(), fresh_policy()
    before = torch.get_rng_state()
    for policy, seed in ((p, 3), (q, 3)):
        add_value_head(policy, hidden=16, tokens=True, seed=seed)
    assert torch.equal(torch.get_rng_state(), before), (
        "the run's random numbers are left as they are"
    )
    assert all(
        torch.equal(a, b)
        for (_, a), (_, b) in zip(*(r.value_head.named_parameters() for r in (p, q)), strict=True)
    )
    assert (p.predict_values(*turns_of(p)).values_M == 0).all()
