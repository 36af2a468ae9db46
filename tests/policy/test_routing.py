"""Routing replay: fixed experts are what transformers computes when its routers' top-k is forced, and routers still learn.

The oracle is unmodified transformers, one row at a time, in which `torch.topk` over experts answers what the test says: everything
else of the router (its formula of weights) is transformers' own.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode

from mmrl.errors import ConfigError, MismatchError
from mmrl.policy.encode import Prompt
from mmrl.policy.policy import Evaluated, Policy
from mmrl.policy.routing import ExpertShape, TurnExperts
from mmrl.rollout.engine import PrefillOnceEngine, Request, SamplingSettings
from tests.kits.engine_kit import (
    Album,
    fresh_policy,
    picture,
    plain_logits,
    policy,
    sample_with,
    tiny_folder,
)

LIMIT = 2e-5
FAMILIES = (
    "qwen3_vl_moe",
    "glm4v_moe",
    *(
        pytest.param(name, marks=pytest.mark.slow)
        for name in ("qwen3_5_moe", "kimi_k25", "internvl:qwen3_moe")
    ),
)
TASK = Album()
ANSWERS = ((7, 8, 9, 40, 41), (10, 11), tuple(range(20, 31)), (5,))
# the second with a longer prompt and another picture
SAMPLES = (
    sample_with([picture((112, 84), 1)], number=1),
    sample_with([picture((56, 56), 2), picture((37, 211), 3)], "How many of them?", 2),
)


class _Topk(TorchFunctionMode):
    """`torch.topk` over the experts of all tokens, router after router: notes what is chosen, or answers `forced` (T, L, k)."""

    def __init__(self, forced: np.ndarray | None = None) -> None:
        super().__init__()
        self.forced, self.chosen = forced, list[torch.Tensor]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        # of 4 experts; GLM asks for its best groups, too, in three dimensions or among one
        if func is torch.topk and args[0].ndim == 2 and args[0].shape[-1] == 4:
            index = found[1]
            if self.forced is not None:
                told = self.forced[:, len(self.chosen)].astype(np.int64)
                index = torch.from_numpy(told)
            self.chosen.append(index)
            return torch.return_types.topk((args[0].gather(-1, index), index))
        return found


def plain_model(p: Policy, arch: str) -> Any:
    """transformers' own classes with the weights of `p`."""
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(tiny_folder(arch)).eval()
    model.load_state_dict(p.model.state_dict())
    return model


def turns(p: Policy) -> tuple[list[Prompt], list[tuple[int, ...]]]:
    """All answers to all samples."""
    prompts = [p.encoder(s, TASK) for s in SAMPLES]
    return [q for q in prompts for _ in ANSWERS], list(ANSWERS) * len(prompts)


def rows(p: Policy, model: Any) -> Iterator[Callable[[_Topk], torch.Tensor]]:
    """Of each of `turns` a function that gives its log-probs by transformers alone."""
    for sample in SAMPLES:
        for answer in ANSWERS:

            def logp_N(mode: _Topk, sample: Any = sample, answer: Any = answer) -> torch.Tensor:
                with mode:
                    ((tokens_N, logits_NV),) = plain_logits(p, model, TASK, sample, [answer])
                logp_NV = logits_NV.index_fill(-1, p.banned, float("-inf")).log_softmax(-1)
                return logp_NV.gather(-1, tokens_N[:, None])[:, 0]

            yield logp_N


def moved(p: Policy, scale: float = 0.3) -> Policy:
    """The policy with other weights, routers above all."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, q in p.named_parameters():
            if q.ndim > 1 and "visual" not in name:
                noise = torch.randn(q.shape, generator=generator) * q.std()
                q.add_(noise, alpha=scale if ".gate." in name else 0.05 * scale)
    return p


def noted(p: Policy) -> Evaluated:
    with torch.no_grad():
        return p.evaluate(*turns(p), note_experts=True)


def whole(experts: TurnExperts) -> np.ndarray:
    return np.concatenate([experts.prompt_PLk, experts.written_NLk])


@pytest.mark.parametrize("arch", FAMILIES)
@pytest.mark.parametrize("shared", [True, False])
def test_replayed_experts_are_those_that_transformers_is_forced_to(arch: str, shared: bool) -> None:
    """With other weights than those that chose: log-probs of packed rows with a prompt per group, and of padded ones."""
    p = fresh_policy(arch)
    p.shared_prefix = shared
    experts = noted(p).experts
    moved(p)
    with torch.no_grad():
        mine = p.evaluate(*turns(p), experts=experts)
        free = p.evaluate(*turns(p))
        model = plain_model(p, arch)
        theirs = [row(_Topk(whole(e))) for row, e in zip(rows(p, model), experts, strict=True)]
        own = [row(_Topk()) for row in rows(p, model)]
    torch.testing.assert_close(mine.logp_N, torch.cat(theirs), atol=LIMIT, rtol=0)
    torch.testing.assert_close(free.logp_N, torch.cat(own), atol=LIMIT, rtol=0)
    assert (mine.logp_N - free.logp_N).abs().max() > 100 * LIMIT
    assert 0 < mine.rerouted.changed < mine.rerouted.tokens
    assert free.rerouted.tokens == 0


@pytest.mark.parametrize("arch", FAMILIES)
def test_noted_experts_are_those_of_transformers_routers(arch: str) -> None:
    """In a packed training forward, and in rollouts of few slots, whose prompts are padded, kept and taken up again."""
    p = policy(arch)
    model = plain_model(p, arch)
    prompts = [p.encoder(s, TASK) for s in SAMPLES]
    asked = [Request(q, 3, (n,)) for n, q in enumerate(prompts)]
    settings = SamplingSettings(max_new_tokens=6, batch_tokens=2 * 120, routed_experts=True)
    for graphs in (False, True):
        written = PrefillOnceEngine(p, graphs=graphs).generate(asked, settings)
        for sample, found in zip(SAMPLES, written, strict=True):
            assert all(t.experts.prompt_PLk is found[0].experts.prompt_PLk for t in found[:2])
            for turn in found:
                mode = _Topk()
                with mode, torch.no_grad():
                    list(plain_logits(p, model, TASK, sample, [turn.token_ids]))
                theirs = torch.stack(mode.chosen, 1).sort(-1).values
                mine = torch.from_numpy(whole(turn.experts).astype(np.int64)).sort(-1).values
                assert turn.experts.written_NLk.dtype == np.uint8
                # nothing reads the last token of an answer
                assert torch.equal(mine, theirs[:-1])
    for row, experts in zip(rows(p, model), noted(p).experts, strict=True):
        mode = _Topk()
        with torch.no_grad():
            row(mode)
        theirs = torch.stack(mode.chosen, 1).sort(-1).values
        assert torch.equal(
            torch.from_numpy(whole(experts).astype(np.int64)).sort(-1).values, theirs
        )


@pytest.mark.parametrize("arch", FAMILIES)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_replay_with_the_same_weights_changes_no_bit(arch: str, checkpointing: bool) -> None:
    """Of log-probs and of each gradient, also where layers are computed again in the backward pass."""
    p = fresh_policy(arch, gradient_checkpointing=checkpointing)
    found = noted(p)
    results = []
    for experts in (None, found.experts):
        p.model.zero_grad()
        out = p.evaluate(*turns(p), experts=experts)
        (out.logp_N * torch.sin(torch.arange(len(out.logp_N)) + 1.0)).sum().backward()
        gradients = {n: q.grad.clone() for n, q in p.named_parameters() if q.grad is not None}
        results.append((out.logp_N.detach(), gradients))
    (plain_N, plain), (replayed_N, replayed) = results
    assert torch.equal(plain_N, replayed_N) and torch.equal(plain_N, found.logp_N)
    assert plain.keys() == replayed.keys() and any(".gate.weight" in n for n in plain)
    assert all(torch.equal(g, replayed[n]) for n, g in plain.items())
    assert out.rerouted.tokens > 0 and out.rerouted.changed == 0


def test_recomputed_layers_take_the_same_experts() -> None:
    """With other weights than those that chose: a recomputation that let routers choose would have other gradients."""
    gradients = []
    for checkpointing in (False, True):
        p = fresh_policy("qwen3_vl_moe", gradient_checkpointing=checkpointing)
        experts = noted(p).experts
        out = moved(p).evaluate(*turns(p), experts=experts)
        out.logp_N.sum().backward()
        assert out.rerouted.changed > 0
        gradients.append({n: q.grad for n, q in p.named_parameters() if q.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradient, gradients[1][name], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("arch", FAMILIES)
def test_an_optimizer_step_changes_experts_without_replay_alone(arch: str) -> None:
    """And routers have a gradient: that of finite differences, in the direction of the gradient."""
    p = fresh_policy(arch)
    before = noted(p).experts
    optimizer = torch.optim.AdamW([q for _, q in p.trainable()], lr=0.02)
    gates = [q for n, q in p.named_parameters() if n.endswith("mlp.gate.weight")]

    def loss() -> torch.Tensor:
        return p.evaluate(*turns(p), experts=before).logp_N.sum()

    loss().backward()
    assert gates and all(q.grad is not None and q.grad.abs().max() > 0 for q in gates)
    size = float(torch.stack([q.grad.norm() for q in gates]).norm())
    with torch.no_grad():
        both = []
        for side in (1e-3, -2e-3):
            for q in gates:
                q.add_(q.grad / size, alpha=side)
            both.append(loss().double())
        for q in gates:
            q.add_(q.grad / size, alpha=1e-3)
    assert float(both[0] - both[1]) / 2e-3 == pytest.approx(size, rel=0.05)
    optimizer.step()
    after = noted(p)
    assert any((whole(a) != whole(b)).any() for a, b in zip(before, after.experts, strict=True))
    with torch.no_grad(), notes_of(p) as seen:
        replay = p.evaluate(*turns(p), experts=before)
    assert replay.rerouted.changed > 0
    assert seen == [e.tolist() for e in laid_out(before)]


@contextmanager
def notes_of(p: Policy) -> Iterator[list[Any]]:
    """What the experts of each layer are called with: (T, k) per layer."""
    seen: list[Any] = []
    hooks = [
        m.register_forward_pre_hook(lambda module, args: seen.append(args[1].tolist()))
        for n, m in p.model.named_modules()
        if n.endswith("mlp.experts")
    ]
    yield seen
    for hook in hooks:
        hook.remove()


def laid_out(experts: Sequence[TurnExperts]) -> np.ndarray:
    """(L, T, k) of the packed row of `turns`: each prompt once, its answers behind it."""
    parts = []
    for number, e in enumerate(experts):
        if number % len(ANSWERS) == 0:
            parts.append(e.prompt_PLk)
        parts.append(e.written_NLk)
    return np.concatenate(parts).transpose(1, 0, 2).astype(np.int64)


def test_turns_that_go_on_are_replayed_from_rollouts_and_from_training() -> None:
    """A second turn behind the first: its prompt was read as a whole, the first turn's last token included."""
    p = fresh_policy("qwen3_vl_moe")
    first = p.encoder(SAMPLES[0], TASK)
    engine = PrefillOnceEngine(p)
    settings = SamplingSettings(max_new_tokens=4, routed_experts=True)
    (begun,) = engine.generate([Request(first, 2, (0,))], settings)
    words = [{"role": "user", "content": [{"type": "text", "text": "and then?"}]}]
    more = [p.encoder.extended(first, t.token_ids, words, []) for t in begun]
    written = [t for (t,) in engine.generate([Request(q, 1, (1,)) for q in more], settings)]
    prompts, tokens, sampled = [], [], []
    for pair in zip(
        zip([first] * 2, begun, strict=True), zip(more, written, strict=True), strict=True
    ):
        for prompt, turn in pair:
            prompts.append(prompt)
            tokens.append(turn.token_ids)
            sampled.append(turn.experts)
    with torch.no_grad():
        trained = p.evaluate(prompts, tokens, note_experts=True)
        again = p.evaluate(prompts, tokens, experts=sampled)
        moved(p)
        replays = [p.evaluate(prompts, tokens, experts=e) for e in (sampled, trained.experts)]
        # the same in rows of their own: no turn reads what another has computed
        p.shared_prefix = False
        replays += [p.evaluate(prompts, tokens, experts=e) for e in (sampled, trained.experts)]
    # of the last token of each rollout alone the rollout knows no experts
    assert again.rerouted.tokens == again.num_tokens - 2 and again.rerouted.changed == 0
    assert replays[1].rerouted.tokens == replays[1].num_tokens
    assert replays[0].rerouted.changed > 0
    for other in replays[1:]:
        torch.testing.assert_close(other.logp_N, replays[0].logp_N, atol=LIMIT, rtol=0)


def test_tokens_that_nobody_noted_are_free() -> None:
    """A demonstration behind the rollouts' prompt: its own tokens go where the routers of now send them."""
    p = fresh_policy("qwen3_vl_moe")
    prompts, tokens = turns(p)
    experts = noted(p).experts
    moved(p)
    some = [e.prompt_alone() if n % 4 == 3 else e for n, e in enumerate(experts)]
    with torch.no_grad():
        mine = p.evaluate(prompts, tokens, experts=some)
        model = plain_model(p, "qwen3_vl_moe")
        for number in (3, 7):
            mode = _Topk()
            row = list(rows(p, model))[number]
            shown = len(experts[number].prompt_PLk)
            # what it is answered for the prompt's tokens is told, for the others its own
            free = mine.logp_N[sum(len(t) for t in tokens[:number]) :][: len(tokens[number])]
            row(mode)
            forced = whole(experts[number])
            theirs = row(_Partly(forced, shown))
            torch.testing.assert_close(free, theirs, atol=LIMIT, rtol=0)


class _Partly(_Topk):
    """Forced for the first `shown` tokens alone."""

    def __init__(self, forced: np.ndarray, shown: int) -> None:
        super().__init__(forced)
        self.shown = shown

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.topk and args[0].ndim == 2 and args[0].shape[-1] == 4:
            own = func(*args, **(kwargs or {}))[1].numpy()
            assert self.forced is not None
            self.forced = self.forced.copy()
            self.forced[self.shown :, len(self.chosen)] = own[self.shown :]
        return super().__torch_function__(func, types, args, kwargs)


def test_experts_of_another_prompt_or_model_are_refused() -> None:
    p = policy("qwen3_vl_moe")
    prompts, tokens = turns(p)
    experts = list(noted(p).experts)
    with pytest.raises(MismatchError, match="expected experts of a prompt of"):
        p.evaluate(prompts, tokens, experts=experts[::-1])
    deeper = [TurnExperts(e.prompt_PLk[:, :1], e.written_NLk[:, :1]) for e in experts]
    with pytest.raises(MismatchError, match="in 2 layers"):
        p.evaluate(prompts, tokens, experts=deeper)
    dense = policy("qwen2_5_vl")
    with pytest.raises(ConfigError, match="family qwen2_5_vl without a router"):
        dense.evaluate(*turns(dense), note_experts=True)


def test_many_experts_have_wider_numbers() -> None:
    p = policy("qwen3_vl_moe")
    body = copy.deepcopy(p.body)
    for layer in p.family.parts.decoder_layers(body):
        layer.mlp.gate.num_experts = 257
    assert ExpertShape.of(p.family, body).dtype == torch.int16
    assert p.expert_shape == ExpertShape(2, 2, torch.uint8)
