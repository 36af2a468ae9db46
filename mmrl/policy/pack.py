"""Pack several groups into one flat micro-batch: every prompt once, its G completions behind it.

    [prompt 1][c11][c12]..[c1G][prompt 2][c21]..    one row, no padding; positions restart after each prompt

`pack` makes the batch, `micro_batches` splits groups under a token budget, and both keep sequences in the given order.
The usual padded batch of G * (prompt + completion) rows is `pack_padded`, kept for comparison and as a fallback.

Legend: M groups, B completions (sequences), N completion tokens, T packed tokens, P / C padded prompt / completion length.
"""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mmrl.errors import ConfigError
from mmrl.policy.attention_layout import PrefixLayout
from mmrl.policy.encode import Prompt

__all__ = ["Batch", "PackItem", "PrefixLayout", "idle_item", "micro_batches", "pack", "pack_padded", "packed_length",
           "within_budget"]


@dataclass(frozen=True)
class PackItem:
    """A prompt with the completions to place behind it (token ids, possibly empty lists are not allowed)."""

    prompt: Prompt
    completions: tuple[tuple[int, ...], ...]


def idle_item(token: int) -> PackItem:
    """The smallest prompt with a completion, for forwards that count for nothing (mmrl.engines.lockstep): one `token` and once more
    that token; it must be one that can be sampled."""
    ids_P = torch.tensor([token])
    return PackItem(Prompt(ids_P, torch.zeros_like(ids_P), torch.zeros(3, 1, dtype=torch.long), 1), ((token,),))


@dataclass
class Batch:
    """A micro-batch for `Policy.logp`.

    ids, kinds, positions_3 have shape (rows, T) / (3, rows, T); target_N are the completion tokens, themselves at flat positions
    place_N of the (rows * T) hidden states; the logits that predict them sit at source_N. sequence_N is each token's completion.
    layout is None for the padded batch, which carries a 2-D attention mask instead. `visuals` refer to the pictures and clips
    in order of their tokens; the policy asks the visual cache for their pixels or features.
    """

    ids: torch.Tensor
    kinds: torch.Tensor
    positions_3: torch.Tensor
    visuals: tuple[Any, ...]
    source_N: torch.Tensor
    target_N: torch.Tensor
    sequence_N: torch.Tensor
    num_sequences: int
    place_N: torch.Tensor
    layout: PrefixLayout | None = None
    attention_mask: torch.Tensor | None = None
    fingerprints: tuple[str, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens the language model processes, padding included."""
        return int(self.ids.numel())

    def to(self, device: torch.device) -> Batch:
        """A copy on `device`."""
        moved = {k: v.to(device, non_blocking=True) for k, v in vars(self).items() if isinstance(v, torch.Tensor)}
        layout = self.layout.to(device) if self.layout is not None else None
        return Batch(**{**vars(self), **moved, "layout": layout})


def packed_length(item: PackItem) -> int:
    """Tokens of one group in a packed row: P + sum of completion lengths."""
    return item.prompt.length + sum(len(c) for c in item.completions)


def micro_batches(items: Sequence[PackItem], token_budget: int) -> Iterator[list[int]]:
    """Indices of `items`, in order, so that each batch holds at most `token_budget` tokens (one group at least)."""
    return within_budget([packed_length(item) for item in items], token_budget)


def within_budget(lengths: Sequence[int], token_budget: int) -> Iterator[list[int]]:
    """Indices of `lengths`, in order, so that each batch sums to at most `token_budget` (one index at least)."""
    if token_budget < 1:
        raise ConfigError(f"expected train.token_budget >= 1, found {token_budget}")
    batch: list[int] = []
    used = 0
    for index, length in enumerate(lengths):
        if batch and used + length > token_budget:
            yield batch
            batch, used = [], 0
        batch.append(index)
        used += length
    if batch:
        yield batch


def _check(items: Sequence[PackItem]) -> None:
    for item in items:
        assert item.completions and all(item.completions), "a group must hold completions of at least one token"


def pack(items: Sequence[PackItem], *, causal: bool = True) -> Batch:
    """The shared-prefix batch of `items`; sequences are numbered group after group, completion after completion.

    Without `causal`, every token of a completion also attends to the later ones (parallel decoding of action chunks).
    """
    _check(items)
    ids, kinds, positions, source, target, sequence, place = [], [], [], [], [], [], []
    prompt_spans, completion_spans, owners = [], [], []
    cursor, number = 0, 0
    for m, item in enumerate(items):
        prompt = item.prompt
        ids.append(prompt.ids_P)
        kinds.append(prompt.kinds_P)
        positions.append(prompt.positions_3P)
        prompt_spans.append((cursor, prompt.length))
        last_prompt = cursor + prompt.length - 1
        cursor += prompt.length
        for completion in item.completions:
            tokens = torch.tensor(completion, dtype=torch.long)
            length = len(completion)
            ids.append(tokens)
            kinds.append(torch.zeros_like(tokens))
            positions.append((prompt.next_position + torch.arange(length)).expand(3, length))
            completion_spans.append((cursor, length))
            owners.append(m)
            where = torch.arange(cursor - 1, cursor + length - 1)
            where[0] = last_prompt
            source.append(where)
            place.append(torch.arange(cursor, cursor + length))
            target.append(tokens)
            sequence.append(torch.full((length,), number))
            cursor, number = cursor + length, number + 1
    prints = tuple(i.prompt.fingerprint for i in items)
    return Batch(torch.cat(ids)[None], torch.cat(kinds)[None], torch.cat(positions, 1)[:, None],
                 tuple(v for i in items for v in i.prompt.visuals), torch.cat(source), torch.cat(target), torch.cat(sequence),
                 number, torch.cat(place), _layout(prompt_spans, completion_spans, owners, causal), None, prints)


def _layout(prompt_spans: Sequence[tuple[int, int]], completion_spans: Sequence[tuple[int, int]],
            owners: Sequence[int], causal: bool) -> PrefixLayout:
    prompts, completions = torch.tensor(prompt_spans), torch.tensor(completion_spans)
    return PrefixLayout(prompts[:, 0], prompts[:, 1], completions[:, 0], completions[:, 1], torch.tensor(owners), causal)


def pack_padded(items: Sequence[PackItem]) -> Batch:
    """The usual batch: each completion in a row of its own behind a copy of the prompt and its pixels, right-padded."""
    _check(items)
    rows = [(item.prompt, c) for item in items for c in item.completions]
    width = max(p.length + len(c) for p, c in rows)
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    kinds, mask = torch.zeros_like(ids), torch.zeros_like(ids)
    positions_3 = torch.zeros(3, len(rows), width, dtype=torch.long)
    source, target, sequence, place = [], [], [], []
    for b, (prompt, completion) in enumerate(rows):
        P, C = prompt.length, len(completion)
        tokens = torch.tensor(completion, dtype=torch.long)
        ids[b, :P], ids[b, P:P + C] = prompt.ids_P, tokens
        kinds[b, :P] = prompt.kinds_P
        mask[b, :P + C] = 1
        positions_3[:, b, :P] = prompt.positions_3P
        positions_3[:, b, P:P + C] = prompt.next_position + torch.arange(C)
        source.append(b * width + torch.arange(P - 1, P + C - 1))
        place.append(b * width + torch.arange(P, P + C))
        target.append(tokens)
        sequence.append(torch.full((C,), b))
    prints = tuple(i.prompt.fingerprint for i in items)
    return Batch(ids, kinds, positions_3, tuple(v for p, _ in rows for v in p.visuals), torch.cat(source), torch.cat(target),
                 torch.cat(sequence), len(rows), torch.cat(place), None, mask, prints)
