"""Answers that go on over a weight sync (schedule.partial_rollouts), beside transformers' own forward with either version."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mmrl.config import RunConfig
from mmrl.registry import resolve_task
from mmrl.rollout import PrefillOnceEngine, Request, SamplingSettings
from mmrl.types import Turn
from tests.kits.engine_kit import ALBUM, fresh_policy, picture, sample_with

NEW, SYNC = 12, 5


def answers(p: Any, asked: list[Request], renew: Any = None) -> list[Turn]:
    engine = PrefillOnceEngine(p)
    engine.renew = renew
    found = engine.generate(asked, SamplingSettings(max_new_tokens=NEW))
    return [turn for turns in found for turn in turns]


def theirs(p: Any, prompt: Any, turn: Turn) -> torch.Tensor:
    """transformers' own log-probs of the answer, without mmrl's layout, cache or output layer."""
    ids = torch.cat([prompt.ids_P, torch.tensor(turn.token_ids)])[None]
    with torch.no_grad():
        logits = p.base(input_ids=ids).logits[0, prompt.length - 1 : -1].float()
    logp = p.adjust(logits, 1.0).log_softmax(-1)
    return logp.gather(-1, torch.tensor(turn.token_ids)[:, None])[:, 0]


def test_each_token_is_of_the_version_that_it_names() -> None:
    p = fresh_policy()
    p.eos_ids, p.version = (-1,), 1
    text = p.encoder(sample_with([]), resolve_task(ALBUM)())
    seen = p.encoder(sample_with([picture((56, 84))]), resolve_task(ALBUM)())
    asked = [Request(text, 2, (0,)), Request(seen, 2, (1,)), Request(text, 1, greedy=True)]
    plain = answers(p, asked)
    assert answers(p, asked, lambda: False) == plain, "no sync: nothing is another"

    looks = 0

    def renew() -> bool:
        nonlocal looks
        looks += 1
        if looks != SYNC - 1:
            return False
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for _, parameter in p.trainable():
                parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))
        p.publish()
        return True

    old = [theirs(p, text, turn) for turn in plain if turn in (plain[0], plain[1], plain[4])]
    mixed = answers(p, asked, renew)
    for before, turn in zip(plain, mixed, strict=True):
        assert turn.versions.count(1) == turn.versions.index(2) and turn.policy_version == 1
        count = turn.versions.count(1)
        assert 0 < count < NEW
        assert turn.token_ids[:count] == before.token_ids[:count]
        assert turn.logprobs[:count] == before.logprobs[:count], "written before: left alone"
        assert turn.logprobs[count:] != before.logprobs[count:]
    for number, was in zip((0, 1, 4), old, strict=True):
        turn, now = mixed[number], theirs(p, text, mixed[number])
        count = turn.versions.count(1)
        logprobs = torch.tensor(turn.logprobs)
        torch.testing.assert_close(logprobs[:count], was[:count], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(logprobs[count:], now[count:], rtol=1e-4, atol=1e-4)
        assert float((logprobs[:count] - now[:count]).abs().max()) > 1e-2
    # with pictures: the tokens to come are those of new weights from a context of prompt and old tokens
    for turn in mixed[2:4]:
        found = p.evaluate([seen], [turn.token_ids]).logp_N.detach()
        count = turn.versions.count(1)
        torch.testing.assert_close(
            torch.tensor(turn.logprobs)[count:], found[count:], rtol=1e-4, atol=1e-4
        )


@pytest.mark.parametrize(
    ("tree", "said"),
    [
        ({}, "schedule.kind serial and engine.generator.kind inline"),
        (
            {
                "schedule": {"kind": "async"},
                "engine": {"generator": {"kind": "process"}, "rollout": "vllm"},
            },
            "takes weights between answers",
        ),
    ],
)
def test_where_it_cannot_act_it_is_refused(tree: dict[str, Any], said: str) -> None:
    tree = {**tree, "schedule": {**tree.get("schedule", {}), "partial_rollouts": True}}
    with pytest.raises(ValueError, match=said):
        RunConfig.model_validate(tree)
