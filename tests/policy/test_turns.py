"""Rollouts of several turns with pictures in their observations, packed behind one prompt, are what transformers computes by turns.

The oracle is `model(**inputs).logits` of unmodified transformers on the whole sequence of each turn alone: token ids put together
here, from the processor's own outputs and the chat markup written out; rotary positions and masks of its own making.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from mmrl.errors import ConfigError, DataError
from mmrl.policy import attention_flash
from mmrl.policy.attention import set_attention
from mmrl.policy.encode import Prompt
from mmrl.policy.pack import (
    PackItem,
    extends,
    micro_batches,
    pack,
    pack_padded,
    pack_turns,
    packed_length,
)
from mmrl.policy.policy import Policy
from mmrl.training.sequences import TrainingSample, TrainingTurn, bundles, plan_of
from mmrl.video.media import open_image
from tests.kits.engine_kit import ARCHITECTURES, Album, fresh_policy, picture, policy, sample_with
from tests.kits.fast_kit import first_fast
from tests.policy.rounding_kit import assert_same
from tests.policy.test_attention import looped_varlen, policy_with
from tests.policy.test_shared_prefix import LIMIT, plain_model, relative_error

TASK = Album()
END = "<|im_end|>"
# of each group: pictures and words of its question, then rollouts: what is written, then (pictures, words shown, what is written)
Groups = Sequence[tuple[list[tuple[int, int]], str, list[list[Any]]]]
GROUPS: Groups = [
    (
        [(320, 180)],
        "Where is the red circle?",
        [
            [
                [5, 9, 33, END],
                ([(112, 84)], "closer", [7, 8, END]),
                ([(56, 56), (37, 211)], "and more", [100, 2, 61]),
            ],
            # cut by the length limit: the end of its message is shown, not written
            [[40, 41], ([(300, 28)], "", [3, END])],
            [[77, END]],
            [[12, 13, END], ([], "words alone", [1, 2, 3, 4])],
        ],
    ),
    (
        [],
        "yes",
        [
            [[44, END], ([(112, 84)], "look", [50, 51])],
            [[45, 46, END], ([(112, 84)], "look", [50])],
        ],
    ),
]


def end_id(p: Policy) -> int:
    return int(p.processor.tokenizer.convert_tokens_to_ids(END))


def ids(p: Policy, tokens: Sequence[Any]) -> tuple[int, ...]:
    return tuple(end_id(p) if t == END else t for t in tokens)


def shown(pictures: Sequence[Any], words: str) -> list[dict[str, Any]]:
    return [
        {
            "role": "user",
            "content": [*({"type": "image"} for _ in pictures), {"type": "text", "text": words}],
        }
    ]


def visuals(p: Policy, sizes: Sequence[tuple[int, int]]) -> list[Any]:
    return [p.encoder.visuals.image(picture(size, 5)) for size in sizes]


def turns_of(
    p: Policy, groups: Groups = GROUPS
) -> list[list[list[tuple[Prompt, tuple[int, ...]]]]]:
    """Of each group the rollouts, of each the turns: prompt and tokens written after it."""
    found = []
    for number, (sizes, question, rollouts) in enumerate(groups):
        root = p.encoder(sample_with([picture(s, number) for s in sizes], question, number), TASK)
        group = []
        for first, *rest in rollouts:
            turns = [(root, ids(p, first))]
            for pictures, words, written in rest:
                prompt = p.encoder.extended(
                    *turns[-1], shown(pictures, words), visuals(p, pictures)
                )
                turns.append((prompt, ids(p, written)))
            group.append(turns)
        found.append(group)
    return found


def flat(p: Policy, groups: Groups = GROUPS) -> tuple[list[Prompt], list[tuple[int, ...]]]:
    turns = [t for group in turns_of(p, groups) for rollout in group for t in rollout]
    return [t[0] for t in turns], [t[1] for t in turns]


def plain_logps(p: Policy, model: Any, groups: Groups = GROUPS) -> torch.Tensor:
    """Log-probs of every turn's tokens, each turn in a forward of its own over all that precedes it."""
    found = []
    for number, (sizes, question, rollouts) in enumerate(groups):
        head = [picture(s, number) for s in sizes]
        sample = sample_with(head, question, number)
        text = p.processor.apply_chat_template(
            TASK.messages(sample, p.template), add_generation_prompt=True, tokenize=False
        )
        for first, *rest in rollouts:
            history = [
                dict(
                    p.processor(
                        text=[text],
                        images=[open_image(x) for x in head] or None,
                        return_tensors="pt",
                    )
                )
            ]
            found.append(_turn(p, model, history, ids(p, first)))
            before = first
            for pictures, words, written in rest:
                markup = "<|vision_start|><|image_pad|><|vision_end|>" * len(pictures)
                answer = f"{'' if before[-1] == END else END}\n<|im_start|>user\n{markup}{words}{END}\n<|im_start|>assistant\n"
                opened = [open_image(picture(s, 5)) for s in pictures] or None
                history.append(dict(p.processor(text=[answer], images=opened, return_tensors="pt")))
                found.append(_turn(p, model, history, ids(p, written)))
                before = written
    return torch.cat(found)


def _turn(
    p: Policy, model: Any, history: list[dict[str, Any]], written: tuple[int, ...]
) -> torch.Tensor:
    """Log-probs of `written` after `history`, to which it is added."""
    extra = torch.tensor([list(written)])
    history.append({"input_ids": extra, "mm_token_type_ids": torch.zeros_like(extra)})
    names = {name for part in history for name in part} - {"attention_mask"}
    inputs = {
        n: torch.cat(
            [x[n] for x in history if n in x], 1 if n in ("input_ids", "mm_token_type_ids") else 0
        )
        for n in names
    }
    logits = (
        model(**inputs, attention_mask=torch.ones_like(inputs["input_ids"]))
        .logits[0, -len(written) - 1 : -1]
        .float()
    )
    return (
        logits.index_fill(-1, p.banned, float("-inf"))
        .log_softmax(-1)
        .gather(-1, extra[0][:, None])[:, 0]
    )


def run(
    p: Policy, items: Sequence[PackItem], packer: Any = pack
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Log-probs and the gradients of a loss that weighs every token differently."""
    p.model.zero_grad(set_to_none=True)
    return graded(p.logp(packer(items)).logp_N, p.model)


def graded(logp_N: torch.Tensor, model: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    (logp_N * torch.sin(torch.arange(len(logp_N)) * 1.7 + 0.3)).sum().backward()
    return logp_N.detach(), {
        n: q.grad.clone() for n, q in model.named_parameters() if q.grad is not None
    }


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_packed_turns_equal_plain_transformers_turn_by_turn(arch: str) -> None:
    p, model = policy(arch), plain_model(arch)
    items = pack_turns(*flat(p))
    assert [len(i.completions) for i in items] == [4, 2] and [
        list(map(len, i.later)) for i in items
    ] == [[2, 1, 0, 1], [1, 1]]
    logp, gradients = run(p, items)
    model.zero_grad(set_to_none=True)
    plain, plain_gradients = graded(plain_logps(p, model), model)
    assert (logp - plain).abs().max() < LIMIT
    assert relative_error(gradients, plain_gradients) < LIMIT


@pytest.mark.parametrize("arch", first_fast(ARCHITECTURES))
def test_the_models_of_these_tests_notice_what_they_should(arch: str) -> None:
    """Guards the test above: another picture of an observation, its position or a sibling in sight would change the numbers."""
    p = policy(arch)
    prompts, tokens = flat(p)
    base = p.logp(pack(pack_turns(prompts, tokens))).logp_N.detach()
    other = pack(pack_turns(prompts, tokens))
    changed = list(other.visuals)
    assert changed[1].size.orig_wh == (112, 84), "of the first rollout's second turn"
    changed[1] = p.encoder.visuals.image(picture((112, 84), 6))
    other.visuals = tuple(changed)
    apart = (p.logp(other).logp_N.detach() - base).abs()
    first, rollout = len(tokens[0]), sum(map(len, tokens[:3]))
    assert apart[:first].max() < LIMIT and apart[rollout:].max() < LIMIT
    assert all(
        turn.max() > 100 * LIMIT for turn in apart[first:rollout].split(list(map(len, tokens[1:3])))
    )
    shifted = pack(pack_turns(prompts, tokens))
    shifted.positions_3 = shifted.positions_3.clone()
    shifted.positions_3[1:, 0, int(shifted.source_N[first]) - 8 :] += 2
    assert (p.logp(shifted).logp_N.detach() - base).abs().max() > 100 * LIMIT


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_packed_turns_equal_a_row_per_turn_and_a_policy_packs_them_by_itself(arch: str) -> None:
    p = policy(arch)
    prompts, tokens = flat(p)
    items = pack_turns(prompts, tokens)
    logp, gradients = run(p, items)
    usual, usual_gradients = run(p, items, pack_padded)
    assert (logp - usual).abs().max() < LIMIT and relative_error(gradients, usual_gradients) < LIMIT
    with torch.no_grad():
        found = p.evaluate(prompts, tokens)
    assert (
        torch.equal(found.logp_N, logp)
        and found.num_tokens == sum(map(packed_length, items)) == pack(items).num_tokens
    )
    assert (
        found.num_tokens < sum(q.length + len(t) for q, t in zip(prompts, tokens, strict=True)) // 2
    ), "what packing is for"
    parts = [run(p, [items[i]])[0] for part in micro_batches(items, 50) for i in part]
    assert (torch.cat(parts) - logp).abs().max() < LIMIT


@pytest.mark.parametrize(
    "options",
    [{"freeze": ["vision"]}, {"freeze": ["vision", "projector"], "gradient_checkpointing": True}],
    ids=["frozen tower", "language only, checkpointing"],
)
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.slow
def test_cached_features_of_observations(arch: str, options: dict[str, Any]) -> None:
    plain, p = policy(arch), fresh_policy(arch, **options)
    expected, gradients = run(plain, pack_turns(*flat(plain)))
    found, own = run(p, pack_turns(*flat(p)))
    assert (found - expected).abs().max() < LIMIT
    assert relative_error(own, {n: g for n, g in gradients.items() if n in own}) < LIMIT


@pytest.mark.parametrize("attn", ["eager", "flash_attention_2", "flex"])
@pytest.mark.parametrize("arch", first_fast(ARCHITECTURES))
def test_every_attention_equals_sdpa(arch: str, attn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_flash, "varlen_attention", looped_varlen)
    p = policy_with("sdpa", arch)
    items = pack_turns(*flat(p))
    set_attention(p.base, attn)
    found = run(p, items)
    set_attention(p.base, "sdpa")
    assert_same(lambda: run(p, items), found, p.model.parameters())


# ---- prompts that grow


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_grown_prompt_is_the_chat_as_template_and_processor_write_it(arch: str) -> None:
    p = policy(arch)
    first, second = picture((320, 180)), picture((112, 84))
    sample = sample_with([first], "Where is the red circle?")
    root, tokenizer = p.encoder(sample, TASK), p.processor.tokenizer
    answer = "look closer"
    written = (*tokenizer(answer)["input_ids"], end_id(p))
    messages = shown([second], "here it is")
    grown = p.encoder.extended(root, written, messages, [p.encoder.visuals.image(second)])
    chat = [*TASK.messages(sample, p.template), {"role": "assistant", "content": answer}, *messages]
    text = p.processor.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    inputs = p.processor(
        text=[text], images=[open_image(first), open_image(second)], return_tensors="pt"
    )
    positions, _ = p.base.model.get_rope_index(
        **{k: v for k, v in inputs.items() if k != "pixel_values"}
    )
    assert torch.equal(grown.ids_P, inputs["input_ids"][0]) and torch.equal(
        grown.kinds_P, inputs["mm_token_type_ids"][0].long()
    )
    assert (
        torch.equal(grown.positions_3P, positions[-3:, 0])
        and grown.next_position == int(positions.max()) + 1
    )
    assert extends(grown, root, written)


def test_the_history_is_what_was_written_not_what_a_tokenizer_makes_of_its_text() -> None:
    p = policy()
    tokenizer = p.processor.tokenizer
    whole = tokenizer("circle")["input_ids"]
    spelled = [i for letter in "circle" for i in tokenizer(letter)["input_ids"]]
    assert tokenizer.decode(whole) == tokenizer.decode(spelled) == "circle" and whole != spelled
    root = p.encoder(sample_with([picture((112, 84))]), TASK)
    one, other = (
        p.encoder.extended(root, (*t, end_id(p)), shown([], "go on")) for t in (spelled, whole)
    )
    assert one.ids_P[root.length : root.length + len(spelled)].tolist() == spelled
    assert extends(one, root, (*spelled, end_id(p))) and not extends(
        other, root, (*spelled, end_id(p))
    )
    items = pack_turns([root, other], [(*spelled, end_id(p)), (3,)])
    assert [i.prompt for i in items] == [root, other], (
        "a history that was tokenised anew is trained on as what it says"
    )


def test_what_does_not_extend_a_turn_stands_alone() -> None:
    p = policy()
    root = p.encoder(sample_with([picture((112, 84))]), TASK)
    grown = p.encoder.extended(root, (5, end_id(p)), shown([0], "more"), visuals(p, [(56, 56)]))
    assert (
        extends(grown, root, (5, end_id(p)))
        and not extends(root, grown, (5,))
        and not extends(root, root, (5,))
    )
    seen = p.encoder.visuals.image(picture((112, 84), 3))
    moved = grown.positions_3P.clone()
    moved[0, root.length] += 1
    pad = grown.kinds_P.clone()
    pad[root.length] = 1
    for change in (
        {"visuals": (seen, grown.visuals[1])},
        {"positions_3P": moved},
        {"kinds_P": pad},
    ):
        assert not extends(replace(grown, **change), root, (5, end_id(p)))


def test_an_observation_must_fit() -> None:
    p = fresh_policy()
    root = p.encoder(sample_with([picture((112, 84))]), TASK)
    with pytest.raises(
        DataError, match="expected one image item per picture, found 1 items for 0 pictures"
    ):
        p.encoder.extended(root, (5,), shown([0], "more"), ())
    p.encoder.max_prompt_tokens = root.length + 5
    with pytest.raises(
        DataError, match=rf"sample maze: expected at most {root.length + 5} prompt tokens, found"
    ):
        p.encoder.extended(root, (5,), shown([], "more"), (), "maze")
    p.processor.chat_template = "{% for m in messages %}{% if m['role'] == 'user' %}{{ m['content'] }}{% endif %}{% endfor %}"
    with pytest.raises(
        ConfigError,
        match="shows the assistant's answers in the middle of a chat, found one that drops them",
    ):
        p.encoder.extended(root, (5,), [{"role": "user", "content": "more"}])


def test_parallel_decoding_refuses_turns_that_grow() -> None:
    p = policy()
    root = p.encoder(sample_with([]), TASK)
    grown = p.encoder.extended(root, (5,), shown([], "more"))
    with pytest.raises(
        ConfigError,
        match="whose tokens see the later ones too, found prompts that grow turn by turn",
    ):
        pack([PackItem(root, ((5,),), (((grown, (6,)),),))], causal=False)


# ---- micro-batches


def _packed(samples: Sequence[TrainingSample]) -> int:
    turns = [t for s in samples for t in s.turns]
    return sum(map(packed_length, pack_turns([t.prompt for t in turns], [t.tokens for t in turns])))


def test_a_group_whose_prompts_grow_is_one_bundle() -> None:
    p = policy()
    groups = turns_of(p)

    def training(turn: tuple[Prompt, tuple[int, ...]]) -> TrainingTurn:
        count = len(turn[1])
        return TrainingTurn(
            *turn, (0.0,) * count, np.ones(count, bool), np.ones(count, np.float32), 1.0, "s", "1"
        )

    samples = [
        TrainingSample(((0, g, 0), r), tuple(map(training, rollout)), 1.0)
        for g, group in enumerate(groups)
        for r, rollout in enumerate(group)
    ]
    assert [len(b) for b in bundles(samples)] == [8, 4]
    items = [
        pack_turns([t[0] for r in group for t in r], [t[1] for r in group for t in r])
        for group in groups
    ]
    sizes = [sum(map(packed_length, i)) for i in items]
    assert [[len(part) for part in plan_of(samples, sum(sizes) - less)] for less in (0, 1)] == [
        [12],
        [8, 4],
    ]
    for budget, counts in ((1, [3, 2, 1, 2, 2, 2]), (sizes[0] - 1, [6, 2, 4])):
        plan = plan_of(samples, budget)  # between rollouts, which stay whole and in order
        assert [len(part) for part in plan] == counts
        assert [t for part in plan for t in part] == [t for s in samples for t in s.turns]
    answers = [replace(s, turns=s.turns[:1]) for s in samples]
    whole = _packed(answers[: len(groups[0])])
    sizes_of = [len(part) for part in plan_of(answers, whole - 1)]
    assert sizes_of[0] == len(groups[0]) - 1 and sum(sizes_of) == len(answers)
    assert [len(part) for part in plan_of(answers, 1)] == [1] * len(answers), (
        "answers are parted behind a copy of their prompt"
    )
    alone = [
        TrainingSample(s.place, tuple(replace(t, prompt=replace(t.prompt)) for t in s.turns), 1.0)
        for s in samples[:1]
    ]
    assert len(bundles(alone)) == 1, "objects of their own, but the same history"
