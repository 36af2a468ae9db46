"""The checks of `mmrl families check` on weights: which of them learn, and what a saved model holds, read by transformers and
merged by peft. Part of mmrl.diagnostics.families."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from mmrl.config import LoraSettings
from mmrl.diagnostics._family_subject import Subject, naive, near, sounds
from mmrl.policy.encode import Prompt
from mmrl.policy.loading import add_value_head
from mmrl.policy.policy import Policy

__all__ = ["check_freeze", "check_lora", "check_save", "check_value"]

_RATE = 1e-3


def _reloaded(folder: Path | str) -> Any:
    from transformers import AutoModelForImageTextToText

    return AutoModelForImageTextToText.from_pretrained(
        folder, dtype=torch.float32, trust_remote_code=False, use_safetensors=True
    ).eval()


def _same(found: Mapping[str, Any], wanted: Mapping[str, Any], what: str) -> None:
    """Raises AssertionError where the two hold other tensors, or one of them other bits."""
    names = sorted(found.keys() ^ wanted.keys())
    assert not names, f"{what}: other names: {names[:3]}"
    other = [n for n in wanted if not torch.equal(found[n], wanted[n])]
    assert not other, f"{what}: other numbers: {other[:3]}"


def _kept(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in state.items()}


def _everything(s: Subject, policy: Policy) -> Prompt:
    """A question with a picture, and with a sound where the family hears."""
    if "audio" not in s.family.parts.names:
        return s.prompt(policy, 1)
    items = [{"type": "audio"}, *s.messages(1)[0]["content"]]
    media = [*s.frames(policy, [0]), sounds(s, policy)[0][0]]
    return policy.encoder.prompt_of([{"role": "user", "content": items}], media, "check")


def check_freeze(s: Subject) -> str:
    """Each part alone is frozen: nothing of it learns, the others do. After a step transformers reads the frozen weights as they
    were, bit for bit, and the others as they are now."""
    counts, parts, where = [], s.family.parts.names, s.family.parts.part_of
    for part in parts:
        policy = s.policy(freeze=[part])
        before = _kept(policy.base.state_dict())
        policy.evaluate([_everything(s, policy)], [s.answers(policy)[1]]).logp_N.sum().backward()
        learns = {where(n) for n, p in policy.named_parameters() if p.grad is not None}
        assert learns == set(parts) - {part}, f"{part} frozen: gradients in {sorted(learns)}"
        s.descend(policy, _RATE)
        policy.save(s.folder / f"without_{part}")
        after = _reloaded(s.folder / f"without_{part}").state_dict()
        _same(after, policy.base.state_dict(), f"{part} frozen, read by transformers")
        changed = {n for n in before if not torch.equal(after[n], before[n])}
        moved = {where(n) for n in changed}
        assert moved == learns, f"{part} frozen: a step has changed weights of {sorted(moved)}"
        left = {
            n
            for n, p in policy.base.named_parameters()
            if p.grad is not None and p.grad.abs().max() > _RATE and n not in changed
        }
        assert not left, f"{part} frozen: a step has left {sorted(left)[:3]}"
        counts.append(sum(p.numel() for n, p in policy.named_parameters() if where(n) == part))
    sizes = ", ".join(f"{p} {n:,}" for p, n in zip(parts, counts, strict=True))
    return f"{sizes} weights, each bit-equal after a step of the others"


def check_lora(s: Subject) -> str:
    """An adapter on the language model learns, on a mixture's experts, too, and mmrl's engine samples with it. Merged and saved,
    transformers generates the same from weights that are those of peft's own merge; peft reads the adapter by itself."""
    assert bool(s.family.experts) == bool(s.family.router), (
        "routers without experts, or the other way"
    )
    found = [_adapter(s, LoraSettings(r=4))]
    if s.mixes_experts:
        found.append(_adapter(s, LoraSettings(r=4, experts=True)))
    return "; ".join(found)


def _adapter(s: Subject, settings: LoraSettings) -> str:
    from peft import PeftModel

    from mmrl.rollout.engine import PrefillOnceEngine, Request, SamplingSettings

    folder = s.folder / ("experts" if settings.experts else "lora")
    policy = s.policy(lora=settings)
    before = _kept(dict(policy.trainable()))
    s.step(policy)
    s.step(policy)  # B begins at zero: A moves in the second step
    parts = {s.family.parts.part_of(n) for n in before}
    assert parts == {"language"}, f"expected adapters in the language model, found {parts}"
    still = [n for n, p in policy.trainable() if torch.equal(p, before[n])]
    assert not still, f"two steps have not changed {still[:3]}"
    adapted = _adapted(policy.base)
    experts = {n for n in adapted if ".experts." in n}
    named = s.plain.base.named_parameters()
    wanted = {n for n, p in named if ".experts." in n and p.ndim == 3}
    assert experts == (wanted if settings.experts else set()), f"adapted experts: {experts}"
    request = Request(s.prompt(policy, 1), 1, greedy=True)
    ((turn,),) = PrefillOnceEngine(policy).generate([request], SamplingSettings(max_new_tokens=8))
    texts = [turn.token_ids, s.answers(policy)[1]]
    with torch.no_grad():
        ours = policy.evaluate([request.prompt] * 2, texts).logp_N
    near(torch.tensor(turn.logprobs), ours[: len(turn.token_ids)], "rollout's log-probs")
    policy.save(folder)
    whole = _reloaded(folder)
    saved, live = whole.state_dict(), dict(policy.model.named_parameters())
    # the second party of the adapted weights, and the model before of the others
    _same(saved, copy.deepcopy(policy.model).merge_and_unload().state_dict(), "peft's own merge")
    base = s.plain.base.state_dict()
    changed = {n for n in base if not torch.equal(saved[n], base[n])}
    assert changed == adapted, f"merged into others than adapted: {sorted(changed ^ adapted)[:3]}"
    read = PeftModel.from_pretrained(
        _reloaded(s.path), str(folder / "adapter"), trust_remote_code=False
    )
    _same(dict(read.named_parameters()), live, "the adapter, read by peft")
    policy.model = whole
    names = sorted({n.removesuffix(".weight").rsplit(".", 1)[-1] for n in experts or adapted})
    apart = near(ours, _by_transformers(s, policy, texts), "merged")
    return f"{', '.join(names)}: {len(adapted)} merged as by peft, {apart:.1g} apart"


@torch.no_grad()
def _by_transformers(s: Subject, policy: Policy, texts: Sequence[Sequence[int]]) -> torch.Tensor:
    """Log-probs of each of `texts` behind a picture, one after the other; the first must be what transformers generates."""
    prompt, banned = s.prompt(policy, 1), policy.banned.tolist()
    whole = policy.base.generate(
        **s.processed(policy, 1),
        do_sample=False,
        max_new_tokens=len(texts[0]),
        suppress_tokens=banned,
    )
    found = whole[0, prompt.length :].tolist()
    assert found == list(texts[0]), f"generated {found}, not {list(texts[0])}"
    ids, media = prompt.ids_P.tolist(), s.processed(policy, 1)
    rows = [naive(policy, media, [*ids, *text], prompt.kinds_P, len(text)) for text in texts]
    return torch.cat(rows)


def _adapted(base: Any) -> set[str]:
    """Names, in the model without adapters, of the weights that have one."""
    return {
        f"{name.replace('.base_layer', '')}.{getattr(module, 'parameter_name', 'weight')}"
        for name, module in base.named_modules()
        if hasattr(module, "lora_A")
    }


def check_save(s: Subject) -> str:
    """After a step, saved and read by transformers: every tensor bit for bit, and the processor's ids."""
    from transformers import AutoProcessor

    policy = s.policy()
    s.step(policy)
    policy.save(s.folder / "saved")
    ours = policy.base.state_dict()
    _same(_reloaded(s.folder / "saved").state_dict(), ours, "read by transformers")
    wanted = s.processed(policy, 1)["input_ids"]
    policy.processor = AutoProcessor.from_pretrained(s.folder / "saved", trust_remote_code=False)
    assert torch.equal(s.processed(policy, 1)["input_ids"], wanted), "another processor"
    return f"{len(ours)} tensors bit-equal"


def check_value(s: Subject) -> str:
    """A critic's value head reads what transformers' own forward gives to the output layer, in packed rows too; its gradient
    reaches every layer of the language model, and towers where they are not frozen."""
    frozen = [p for p in s.family.parts.names if p != "language"]
    policy = _judging(s, freeze=frozen)
    prompt, answers = s.prompt(policy, 1), s.answers(policy)
    head, media = policy.value_head, s.processed(policy, 1)
    assert head is not None
    seen: list[torch.Tensor] = []
    hook = policy.base.lm_head.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    with torch.no_grad():
        for answer in answers:
            naive(policy, media, [*prompt.ids_P.tolist(), *answer], prompt.kinds_P, len(answer))
    hook.remove()
    rows = [h[0, -len(a) - 1 : -1] for h, a in zip(seen, answers, strict=True)]
    hidden_NH, width = torch.cat(rows).float(), s.family.hidden_width(policy.base.config)
    assert hidden_NH.shape[1] == width, f"{hidden_NH.shape[1]} wide, not {width}"
    first, last = (layer for layer in head if isinstance(layer, torch.nn.Linear))
    between = torch.nn.functional.gelu(hidden_NH @ first.weight.T + first.bias)
    wanted = (between @ last.weight.T + last.bias)[:, 0]
    found = policy.evaluate([prompt] * len(answers), answers).values_M
    assert len(found) == sum(map(len, answers)), f"{len(found)} values"
    assert wanted.std() > 0.01, f"values that say nothing would be equal anyway: {wanted}"
    apart = near(found, wanted, "values")
    found.sum().backward()
    _learns(s, policy, {"language"})
    free = _judging(s)
    free.evaluate([_everything(s, free)], [answers[1]]).values_M.sum().backward()
    _learns(s, free, set(s.family.parts.names))
    return f"width {width}; {apart:.1g} apart; gradients in all {len(s.family.parts.decoder_layers(policy.body))} layers"


def _judging(s: Subject, **options: Any) -> Policy:
    """A policy whose critic values tokens, and says something of them."""
    policy = s.policy(**options)
    add_value_head(policy, hidden=16, tokens=True, seed=1)
    assert policy.value_head is not None
    (*_, weight, _) = policy.value_head.parameters()
    torch.nn.init.normal_(weight, generator=torch.Generator().manual_seed(2))
    return policy


def _learns(s: Subject, policy: Policy, parts: set[str]) -> None:
    """The value's gradient is in the head, in these parts and in each layer of the language model."""
    with_gradient = {n for n, p in policy.named_parameters() if p.grad is not None and p.grad.any()}
    heads = {n for n in with_gradient if n.startswith("value_head.")}
    assert len(heads) == 4, f"the head's own gradients: {sorted(heads)}"
    found = {s.family.parts.part_of(n) for n in with_gradient - heads}
    assert found == parts, f"the value's gradient is in {sorted(found)}, not in {sorted(parts)}"
    for number, layer in enumerate(s.family.parts.decoder_layers(policy.body)):
        assert any(p.grad is not None and p.grad.any() for p in layer.parameters()), (
            f"the value's gradient does not reach layer {number}"
        )
