"""Layers that carry a state: packed rows, prefilled prompts and joined caches have the numbers of transformers' own rows."""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mmrl.diagnostics.families import check_family
from mmrl.errors import ConfigError
from mmrl.policy import attention
from mmrl.policy.encode import Prompt
from mmrl.policy.pack import PackItem, pack, pack_padded
from mmrl.policy.policy import Policy
from mmrl.rollout.cache import joined
from mmrl.rollout.engine import PrefillOnceEngine, Request, SamplingSettings
from tests.kits.engine_kit import fresh_policy, tiny_folder

pytestmark = pytest.mark.slow

LIMIT = 1e-5
# shorter than the convolution, as long as it, longer than a chunk of the delta rule (64 tokens)
LENGTHS = (1, 2, 4, 70)
ANSWERS = ((7, 8, 9), (10,), tuple(range(20, 90)))


def prompt(length: int, first: int = 0) -> Prompt:
    """Text alone, without a chat."""
    ids = (torch.arange(length) * 7 + first) % 200
    return Prompt(ids, torch.zeros_like(ids), torch.arange(length).expand(3, -1), length)


@functools.cache
def shared() -> Policy:
    """A policy that tests leave as it is."""
    return fresh_policy("qwen3_5")


@functools.cache
def plain() -> Any:
    """transformers' own model, in which nothing is replaced."""
    from transformers import AutoModelForImageTextToText

    return AutoModelForImageTextToText.from_pretrained(tiny_folder("qwen3_5")).eval()


def alone(model: Any, p: Policy, begin: Sequence[int], answer: Sequence[int]) -> torch.Tensor:
    """Log-probs of an answer by one forward of one row."""
    logits = model(input_ids=torch.tensor([[*begin, *answer]])).logits[0, len(begin) - 1 : -1]
    logits = logits.float().index_fill(-1, p.banned, float("-inf"))
    return logits.log_softmax(-1).gather(-1, torch.tensor(answer)[:, None])[:, 0]


def items() -> list[PackItem]:
    """Groups behind prompts of all lengths."""
    return [PackItem(prompt(n, first), ANSWERS[: 1 + n % 3]) for first, n in enumerate(LENGTHS)]


def test_groups_of_all_lengths_are_separate_rows() -> None:
    """Packed beside each other and padded, with the gradient of every weight."""
    p, model = fresh_policy("qwen3_5"), plain()
    wanted_N = torch.cat(
        [alone(model, p, i.prompt.ids_P.tolist(), a) for i in items() for a in i.completions]
    )
    weight_N = torch.sin(torch.arange(len(wanted_N)) * 1.7 + 0.3)
    model.zero_grad()
    (wanted_N * weight_N).sum().backward()
    theirs = {n: q.grad.clone() for n, q in model.named_parameters() if q.grad is not None}
    model.zero_grad()
    norm = torch.stack([g.norm() for g in theirs.values()]).norm()
    assert any("linear_attn.A_log" in n for n in theirs)
    for batch in (pack(items()), pack_padded(items())):
        p.model.zero_grad()
        logp_N = p.logp(batch).logp_N
        torch.testing.assert_close(logp_N, wanted_N, atol=LIMIT, rtol=0)
        (logp_N * weight_N).sum().backward()
        mine = {n: q.grad for n, q in p.model.named_parameters() if q.grad is not None}
        apart = torch.stack([(mine[n] - g).norm() for n, g in theirs.items()]).norm()
        assert mine.keys() == theirs.keys() and apart <= LIMIT * norm


def test_a_state_that_runs_on_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers' own layers let it run from one completion into the next: the checks must see that."""
    monkeypatch.setattr(attention, "carry_states", lambda model: None)
    (cell,) = check_family("qwen3_5", ["logp"])
    assert cell.verdict == "failed" and "apart" in cell.found


@pytest.mark.parametrize("graphs", [False, True])
def test_rollouts_write_what_generate_writes(graphs: bool) -> None:
    """Few slots, so that prompts wait and are kept; rows that end early, whose slots others take; steps as for a CUDA graph."""
    p, new = shared(), 6
    asked = [Request(prompt(n, first), 3, greedy=True) for first, n in enumerate(LENGTHS)]
    settings = SamplingSettings(max_new_tokens=new, batch_tokens=4 * (max(LENGTHS) + new))
    engine = PrefillOnceEngine(p, graphs=graphs)
    for request, turns in zip(asked, engine.generate(asked, settings), strict=True):
        ids = request.prompt.ids_P
        whole = plain().generate(
            input_ids=ids[None],
            attention_mask=torch.ones_like(ids)[None],
            do_sample=False,
            max_new_tokens=new,
            suppress_tokens=p.banned.tolist(),
        )
        for turn in turns:
            assert list(turn.token_ids) == whole[0, len(ids) :].tolist()
            with torch.no_grad():
                known = alone(plain(), p, ids.tolist(), turn.token_ids)
            torch.testing.assert_close(torch.tensor(turn.logprobs), known, atol=LIMIT, rtol=0)


def test_joined_caches_go_on_from_their_states() -> None:
    """Rows of two prefills, padded on the left and joined as the server does, read the next token as rows that stood alone."""
    p = shared()
    engine = PrefillOnceEngine(p)
    prompts = [prompt(n, first) for first, n in enumerate(LENGTHS)]
    with torch.no_grad():
        (_, long, mask_long, _), (_, short, mask_short, _) = (
            engine.prefill(part, [1] * len(part), 1) for part in (prompts[2:], prompts[:2])
        )
        # the prompts of 70, 1 and 2 tokens
        cache = joined([(long, torch.tensor([1]), 0), (short, torch.tensor([0, 1]), 0)], 71)
        seen = torch.zeros(3, 71, dtype=torch.bool)
        seen[0], seen[1:, -3:] = mask_long[1], mask_short
        token, chosen = 11, [prompts[3], prompts[0], prompts[1]]
        places = torch.tensor([[q.length] for q in chosen]).expand(3, 3, 1)
        out = p.base.model(
            input_ids=torch.full((3, 1), token),
            use_cache=True,
            past_key_values=cache,
            attention_mask=seen[:, None, None],
            **p.family.text_inputs(places, None),
        )
        for row, q in enumerate(chosen):
            known = plain().model(input_ids=torch.tensor([[*q.ids_P.tolist(), token]]))
            torch.testing.assert_close(
                out.last_hidden_state[row, 0], known.last_hidden_state[0, -1], atol=LIMIT, rtol=0
            )


def test_a_copied_policy_carries_states() -> None:
    """Replicas and references are deep copies of the model."""
    p = fresh_policy("qwen3_5")
    p.model = copy.deepcopy(p.model)
    with torch.no_grad():
        found = p.logp(pack(items())).logp_N
        torch.testing.assert_close(found, shared().logp(pack(items())).logp_N)


def test_what_a_state_cannot_do_is_refused() -> None:
    """A row in slices, and completions whose tokens see the later ones."""
    p = shared()
    sliced = pack(items())
    assert sliced.layout is not None
    layer = p.base.model.language_model.layers[0].linear_attn
    hidden = torch.zeros(1, sliced.num_tokens, p.base.config.text_config.hidden_size)
    sliced.layout.sequence = SimpleNamespace()  # type: ignore[assignment]
    with pytest.raises(ConfigError, match=r"engine\.sequence_parallel; set it to 1"):
        layer(hidden, prefix_layout=sliced.layout)
    with pytest.raises(ConfigError, match="parallel decoding"):
        p.logp(pack(items(), causal=False))
