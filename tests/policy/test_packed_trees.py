"""Rollouts that branch from turns of others, packed as one tree, are what transformers computes turn by turn, alone.

The oracle is that of tests/policy/test_turns.py: each turn in a forward of its own over the whole text before it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmrl.policy import attention_flash
from mmrl.policy.attention import set_attention
from mmrl.policy.attention_flex import dense_mask
from mmrl.policy.encode import Prompt
from mmrl.policy.pack import PackItem, pack, pack_padded, pack_turns, packed_length
from mmrl.policy.policy import Policy
from tests.kits.engine_kit import ARCHITECTURES, policy
from tests.kits.fast_kit import first_fast
from tests.policy.rounding_kit import assert_same
from tests.policy.test_attention import looped_varlen, policy_with
from tests.policy.test_shared_prefix import LIMIT, plain_model, relative_error
from tests.policy.test_turns import END, Groups, flat, graded, plain_logps, run, turns_of

LOOK: list[Any] = [5, 9, 33, END]
CLOSER = ([(112, 84)], "closer")
MORE = ([(56, 56), (37, 211)], "and more")
# rollouts as in test_turns; BRANCHES says which of them go on from what
GROUPS: Groups = [
    (
        [(320, 180)],
        "Where is the red circle?",
        [
            [LOOK, (*CLOSER, [7, 8, END]), (*MORE, [100, 2, 61])],
            [LOOK, (*CLOSER, [70, END]), ([(300, 28)], "", [3, END])],
            [LOOK, (*CLOSER, [7, 8, END]), (*MORE, [4]), ([], "go on", [9, 10])],
            [[77, END]],
            [LOOK, (*CLOSER, [70, END]), ([(300, 28)], "", [6, 6, 6, END])],
            [LOOK, (*CLOSER, [7, 8, END]), (*MORE, [4])],
            [LOOK, (*CLOSER, [7, 8, END]), ([], "words alone", [1, 2])],
        ],
    ),
    (
        [],
        "yes",
        [[[44, END], ([(112, 84)], "look", [50])], [[44, END], ([(112, 84)], "look", [51])]],
    ),
]
# group -> rollout -> (rollout that it branches from, turn that it begins with)
BRANCHES = ({1: (0, 1), 2: (0, 2), 4: (1, 2), 5: (2, 2), 6: (4, 1)}, {1: (0, 1)})


def tree(p: Policy) -> tuple[list[Prompt], list[tuple[int, ...]]]:
    """Prompts and tokens of all turns; a branch has the very prompts of what it branches from, as rollout.tree leaves them."""
    prompts, tokens = [], []
    for group, branches in zip(turns_of(p, GROUPS), BRANCHES, strict=True):
        for number, turns in enumerate(group):
            source, shared = branches.get(number, (number, -1))
            for place in range(shared + 1):
                turns[place] = (group[source][place][0], turns[place][1])
            prompts += [t[0] for t in turns]
            tokens += [t[1] for t in turns]
    return prompts, tokens


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_packed_tree_equals_plain_transformers_turn_by_turn(arch: str) -> None:
    p, model = policy(arch), plain_model(arch)
    items = pack_turns(*tree(p))
    assert [item.shared for item in items] == [
        [None, (0, 1), (0, 2), None, (1, 2), (0, 2), (0, 1)],
        [None, (0, 1)],
    ]
    logp, gradients = run(p, items)
    model.zero_grad(set_to_none=True)
    plain, plain_gradients = graded(plain_logps(p, model, GROUPS), model)
    assert (logp - plain).abs().max() < LIMIT
    assert relative_error(gradients, plain_gradients) < LIMIT
    usual, usual_gradients = run(p, items, pack_padded)
    assert (logp - usual).abs().max() < LIMIT and relative_error(gradients, usual_gradients) < LIMIT


@pytest.mark.parametrize("arch", first_fast(ARCHITECTURES))
def test_shared_turns_and_their_pictures_are_computed_once(arch: str) -> None:
    p = policy(arch)
    prompts, tokens = tree(p)
    items = pack_turns(prompts, tokens)
    batch, without = pack(items), pack(pack_turns(*flat(p, GROUPS)))
    assert batch.num_tokens == sum(map(packed_length, items)) < 0.6 * without.num_tokens
    assert len(batch.visuals) == 1 + 1 + 2 + 1 + 1 < len(without.visuals)
    assert torch.equal(batch.target_N, without.target_N)
    ids = batch.ids[0]
    assert torch.equal(ids[batch.place_N], batch.target_N), "targets are where it is said"
    for (place, begin, end), prompt, written in zip(
        batch.turn_places, prompts, tokens, strict=True
    ):
        whole = torch.tensor([*prompt.ids_P.tolist(), *written])
        assert end == len(whole) and torch.equal(ids[place : place + end - begin], whole[begin:])


@pytest.mark.parametrize("arch", first_fast(ARCHITECTURES))
def test_turns_are_shared_where_their_prompts_are_one_and_what_was_written_is_the_same(
    arch: str,
) -> None:
    p = policy(arch)
    (item,) = pack_turns(*(x[:6] for x in flat(p, GROUPS)))
    assert item.shared == [None, None], "equal turns with prompts of their own stand alone"
    prompts, tokens = tree(p)
    other = PackItem(
        prompts[0],
        (tokens[0], (1, *tokens[0][1:])),
        (((prompts[1], tokens[1]),), ((prompts[1], tokens[1]),)),
    )
    assert other.shared == [None, None]


@pytest.mark.parametrize("attn", ["eager", "flash_attention_2", "flex"])
@pytest.mark.parametrize("arch", first_fast(ARCHITECTURES))
def test_every_attention_shows_a_branch_the_same(
    arch: str, attn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_flash, "varlen_attention", looped_varlen)
    p = policy_with("sdpa", arch)
    items = pack_turns(*tree(p))
    set_attention(p.base, attn)
    found = run(p, items)
    set_attention(p.base, "sdpa")
    assert_same(lambda: run(p, items), found, p.model.parameters())


# ---- who sees whom


def text(earlier: Sequence[int], observed: Sequence[int]) -> Prompt:
    """A prompt of text alone: `observed` after `earlier`."""
    ids = torch.tensor([*earlier, *observed])
    return Prompt(ids, torch.zeros_like(ids), torch.arange(len(ids)).expand(3, -1), len(ids))


@st.composite
def trees(draw: Any) -> list[PackItem]:
    """Groups of rollouts, each of which begins anew or at a turn of an earlier one; no two tokens are the same."""
    counter = itertools.count()

    def some() -> tuple[int, ...]:
        return tuple(itertools.islice(counter, draw(st.integers(1, 40))))

    items = []
    for _ in range(draw(st.integers(1, 2))):
        root = text((), some())
        rollouts = [[(root, some())]]
        for number in range(draw(st.integers(1, 6))):
            source = rollouts[draw(st.integers(0, number))]
            begin = draw(st.integers(0, len(source) - 1))
            turns = [*source[:begin], (source[begin][0], some())]
            for _ in range(draw(st.integers(0, 2))):
                prompt, written = turns[-1]
                turns.append((text((*prompt.ids_P.tolist(), *written), some()), some()))
            rollouts.append(turns)
        later = tuple(tuple(turns[1:]) for turns in rollouts)
        items.append(PackItem(root, tuple(turns[0][1] for turns in rollouts), later))
    return items


def seen_in(items: Sequence[PackItem], ids: torch.Tensor, window: int) -> torch.Tensor:
    """(T, T): who sees whom, from the text of each turn; a token's place is where its id is."""
    places = {int(i): place for place, i in enumerate(ids)}
    assert len(places) == len(ids), "each token is computed once"
    seen = torch.zeros(len(ids), len(ids), dtype=torch.bool)
    for prompt, written in (turn for item in items for branch in item.branches for turn in branch):
        path = [places[i] for i in (*prompt.ids_P.tolist(), *written)]
        for at, place in enumerate(path):
            seen[place, path[max(0, at + 1 - window) : at + 1]] = True
    return seen


@given(items=trees(), window=st.one_of(st.none(), st.integers(1, 60)))
@settings(max_examples=40, derandomize=True)
def test_each_form_of_the_layout_shows_exactly_what_comes_before(
    items: list[PackItem], window: int | None
) -> None:
    batch = pack(items)
    layout, T = batch.layout, batch.num_tokens
    assert layout is not None and T == layout.num_tokens == sum(map(packed_length, items))
    expected = seen_in(items, batch.ids[0], T)
    assert torch.equal(dense_mask(layout.block_mask)[0, 0], expected)
    index = layout.varlen
    found = torch.zeros_like(expected)
    for kind, key in (("prompt", index.prompt), ("query", index.key)):
        starts = index.starts_prompt if kind == "prompt" else index.starts_query
        ends = index.starts_prompt if kind == "prompt" else index.starts_key
        queries = index.prompt if kind == "prompt" else index.query
        for b in range(len(starts) - 1):
            asking, known = queries[starts[b] : starts[b + 1]], key[ends[b] : ends[b + 1]]
            for n, place in enumerate(asking):  # causal to the end of the keys
                found[place, known[: len(known) - len(asking) + n + 1]] = True
    assert torch.equal(found, expected)
    blocks = layout.visible(window)
    found = torch.zeros_like(expected)
    P = blocks.prompt_MP.shape[1]
    mask_MPP = blocks.mask_MPP
    for m, row in enumerate(blocks.prompt_MP):
        for n in range(int(layout.prompt_length_M[m])):
            sees = row[: n + 1] if mask_MPP is None else row[mask_MPP[m, 0, n]]
            found[row[n], sees] = True
    for b, row in enumerate(blocks.completion_BC):
        keys = torch.cat([blocks.prompt_MP[blocks.owner_B[b]], blocks.path_BA[b]])
        for n in range(int(layout.completion_length_B[b])):
            found[row[n], keys[blocks.mask_BCK[b, 0, n]]] = True
            assert blocks.path_BA[b, blocks.own_BC[b, n]] == row[n] and P + int(
                blocks.own_BC[b, n]
            ) < len(keys)
    assert torch.equal(found, seen_in(items, batch.ids[0], window or T))
