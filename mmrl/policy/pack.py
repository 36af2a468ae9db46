"""Pack several groups into one flat micro-batch: every prompt once, its G completions behind it.

    [prompt 1][c11][c12]..[c1G][prompt 2][c21]..    one row, no padding; positions restart after each prompt

Where each turn's prompt grows out of the one before (prompt, what was written, an observation), its completion goes on behind
itself: the history is computed once, and pictures of observations lie in the middle of it.

    [prompt 1][c11 observation c11' observation c11''][c12 observation c12']..

Who attends to whom stays the same: a completion is one causal span that sees its prompt and itself. Only written tokens are
targets; observations are context.

A rollout that branches from a turn of another (rollout.tree) is laid out from what it wrote itself on. The turns before, and what
was shown after them, are the other's, and it sees them there; they are targets for both, each time with a weight of its own.

    [prompt 1][c11 observation c11' observation c11''][c12' observation c12'']..      the second goes on behind c11 observation

`pack` makes the batch, `micro_batches` splits groups under a token budget, and both keep sequences in the given order.
The usual padded batch of G * (prompt + completion) rows is `pack_padded`, kept for comparison and as a fallback: there each turn
has a row of its own.

Legend: M groups, B completions, D turns (each turn of a completion is a sequence), N completion tokens, T packed tokens, P / C
padded prompt / completion length.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from mmrl.errors import ConfigError
from mmrl.policy.attention_layout import PrefixLayout
from mmrl.policy.encode import Prompt
from mmrl.policy.sequence_parallel import SequenceGroup

__all__ = [
    "Batch",
    "Later",
    "PackItem",
    "PrefixLayout",
    "extends",
    "idle_item",
    "micro_batches",
    "pack",
    "pack_padded",
    "pack_turns",
    "packed_length",
    "within_budget",
]

Later = tuple[Prompt, tuple[int, ...]]
"""A turn behind another of its rollout: its whole prompt, which extends the former turn, and the tokens written after it."""


@dataclass(frozen=True)
class PackItem:
    """A prompt with the completions to place behind it (token ids; empty ones are not allowed), and for each completion the turns
    that follow it; `later` is empty where there are none."""

    prompt: Prompt
    completions: tuple[tuple[int, ...], ...]
    later: tuple[tuple[Later, ...], ...] = ()

    @property
    def branches(self) -> list[list[Later]]:
        """The turns of each completion, the first included."""
        later = self.later or ((),) * len(self.completions)
        return [
            [(self.prompt, c), *after] for c, after in zip(self.completions, later, strict=True)
        ]

    @property
    def shared(self) -> list[tuple[int, int] | None]:
        """For each completion the earlier one that it branches from, and at which of its turns: their prompts of it are one object,
        and so are what was written before; None where it begins behind the prompt."""
        found: list[tuple[int, int] | None] = []
        places: dict[int, tuple[int, int]] = {}  # of each turn's prompt
        branches = self.branches
        for number, branch in enumerate(branches):
            place = None
            for turn in reversed(range(1, len(branch))):
                place = places.get(id(branch[turn][0]))
                if place is not None and place[1] == turn:
                    other = branches[place[0]]
                    if [w for _, w in branch[:turn]] == [w for _, w in other[:turn]]:
                        break
                place = None
            found.append(place)
            for turn in range(1, len(branch)):
                places.setdefault(id(branch[turn][0]), (number, turn))
        return found


def extends(prompt: Prompt, earlier: Prompt, written: Sequence[int]) -> bool:
    """Whether `prompt` is `earlier`, the tokens `written` after it, and something more: ids, rotary positions and visuals alike.

    A history that somebody tokenised anew need not consist of the tokens that were written ("12" is two tokens or one); then the
    answer is no, and the turn is encoded as what it says.
    """
    start, end = earlier.length, earlier.length + len(written)
    seen = len(earlier.visuals)
    if prompt.length < end or int(prompt.kinds_P[start:end].any()):
        return False
    positions_3 = (earlier.next_position + torch.arange(len(written))).expand(3, -1)
    return (
        torch.equal(prompt.ids_P[:start], earlier.ids_P)
        and prompt.ids_P[start:end].tolist() == list(written)
        and torch.equal(prompt.kinds_P[:start], earlier.kinds_P)
        and torch.equal(prompt.positions_3P[:, :start], earlier.positions_3P)
        and torch.equal(prompt.positions_3P[:, start:end], positions_3)
        and [v.identity for v in prompt.visuals[:seen]] == [v.identity for v in earlier.visuals]
    )


def pack_turns(prompts: Sequence[Prompt], tokens: Sequence[tuple[int, ...]]) -> list[PackItem]:
    """Turns as items, in their order: `tokens` written after `prompts`.

    A turn goes behind the one before it where its prompt extends that, and beside it where both have one prompt (the same object).
    """
    found: list[tuple[Prompt, list[list[Later]]]] = []
    for number, turn in enumerate(zip(prompts, tokens, strict=True)):
        if number and turn[0] is found[-1][0]:
            found[-1][1].append([turn])
        elif number and extends(turn[0], prompts[number - 1], tokens[number - 1]):
            found[-1][1][-1].append(turn)
        else:
            found.append((turn[0], [[turn]]))
    return [
        PackItem(root, tuple(b[0][1] for b in branches), tuple(tuple(b[1:]) for b in branches))
        for root, branches in found
    ]


def idle_item(token: int) -> PackItem:
    """The smallest prompt with a completion, for forwards that count for nothing (mmrl.distributed.engines.lockstep): one `token`
    and once more that token; it must be one that can be sampled."""
    ids_P = torch.tensor([token])
    return PackItem(
        Prompt(ids_P, torch.zeros_like(ids_P), torch.zeros(3, 1, dtype=torch.long), 1), ((token,),)
    )


@dataclass
class Batch:
    """A micro-batch for `Policy.logp`.

    ids, kinds, positions_3 have shape (rows, T) / (3, rows, T); target_N are the completion tokens, themselves at flat positions
    place_N of the (rows * T) hidden states; the logits that predict them sit at source_N. sequence_N is each token's completion.
    layout is None for the padded batch, which carries a 2-D attention mask instead. `visuals` refer to the pictures and clips
    in order of their tokens; the policy asks the visual cache for their pixels or features.

    `turn_places` says of each turn (place, begin, end) where its tokens lie, those of its prompt and those written behind them:
    numbers `begin` to `end` of them from flat position `place` on; what precedes them belongs to a turn before. A turn that goes on
    behind another of its rollout begins with the last token of that one, which it is the first to read. Turns that rollouts share
    have one place.
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
    turn_places: tuple[tuple[int, int, int], ...] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens the language model processes, padding included."""
        return int(self.ids.numel())

    @property
    def sequence(self) -> SequenceGroup | None:
        """The processes that compute the row together, each a slice of it; None: this one alone."""
        return None if self.layout is None else self.layout.sequence

    def in_slices(self, group: SequenceGroup) -> Batch:
        """The same row for processes that compute it together (mmrl.policy.sequence_parallel). Raises ConfigError."""
        if self.layout is None:
            raise ConfigError(
                "engine.sequence_parallel: expected a packed row (train.forward shared), found the padded batch; set "
                "train.forward: shared, or engine.sequence_parallel: 1"
            )
        return replace(self, layout=replace(self.layout, sequence=group))

    @property
    def starts_D(self) -> torch.Tensor:
        """Index among the N tokens of each turn's first one, (D,)."""
        return torch.searchsorted(
            self.sequence_N, torch.arange(self.num_sequences, device=self.sequence_N.device)
        )

    @property
    def ends_D(self) -> torch.Tensor:
        """Index among the N tokens of each turn's last one, (D,)."""
        numbers_D = torch.arange(self.num_sequences, device=self.sequence_N.device)
        return torch.searchsorted(self.sequence_N, numbers_D, right=True) - 1

    def to(self, device: torch.device) -> Batch:
        """A copy on `device`."""
        moved = {
            k: v.to(device, non_blocking=True)
            for k, v in vars(self).items()
            if isinstance(v, torch.Tensor)
        }
        layout = self.layout.to(device) if self.layout is not None else None
        return Batch(**{**vars(self), **moved, "layout": layout})


def packed_length(item: PackItem) -> int:
    """Tokens of one group in a packed row: P + sum of completion lengths, with what lies between and after their turns; what
    completions share counts once."""
    ends = [branch[-1][0].length + len(branch[-1][1]) for branch in item.branches]
    begins = [
        branch[place[1] if place else 0][0].length
        for branch, place in zip(item.branches, item.shared, strict=True)
    ]
    return item.prompt.length + sum(ends) - sum(begins)


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
        assert item.completions and all(
            tokens for branch in item.branches for _, tokens in branch
        ), "a group must hold completions of at least one token"


_Span = tuple[int, int]


@dataclass(frozen=True)
class _Written:
    """Where a turn lies in the row."""

    source: torch.Tensor
    target: torch.Tensor
    place: torch.Tensor
    turn_place: tuple[int, int, int]
    last_shown: int  # place of the last token of its prompt


class _Row:
    """The packed row while it is laid out, and which of its tokens are targets."""

    def __init__(self) -> None:
        self.ids: list[torch.Tensor] = []
        self.kinds: list[torch.Tensor] = []
        self.positions: list[torch.Tensor] = []
        self.visuals: list[Any] = []
        self.turns: list[_Written] = []
        self.cursor = 0

    def show(self, prompt: Prompt, begin: int = 0, visuals: int = 0) -> None:
        """What the policy is shown: `prompt` from a token and a visual on."""
        self.ids.append(prompt.ids_P[begin:])
        self.kinds.append(prompt.kinds_P[begin:])
        self.positions.append(prompt.positions_3P[:, begin:])
        self.visuals += prompt.visuals[visuals:]
        self.cursor += prompt.length - begin

    def write(self, prompt: Prompt, written: Sequence[int], last: int, begin: int) -> _Written:
        """A turn's tokens, the first of which is predicted at place `last`; its prompt is read from token `begin` on."""
        tokens, length = torch.tensor(written, dtype=torch.long), len(written)
        place = self.cursor - (prompt.length - begin)
        self.ids.append(tokens)
        self.kinds.append(torch.zeros_like(tokens))
        self.positions.append((prompt.next_position + torch.arange(length)).expand(3, length))
        where = torch.arange(self.cursor - 1, self.cursor + length - 1)
        where[0] = last
        turn = _Written(
            where,
            tokens,
            torch.arange(self.cursor, self.cursor + length),
            (place, begin, prompt.length + length),
            last,
        )
        self.cursor += length
        self.turns.append(turn)
        return turn

    def branch(
        self, turns: Sequence[Later], known: Sequence[_Written], last: int, begin: int
    ) -> list[_Written]:
        """A completion's turns, of which `known` are in the row already; the first of the others is predicted at place `last`, its
        prompt read from token `begin` on."""
        self.turns += known
        found = [*known, self.write(*turns[len(known)], last, begin)]
        for (earlier, written), (prompt, tokens) in itertools.pairwise(turns[len(known) :]):
            behind = earlier.length + len(written)
            self.show(prompt, behind, len(earlier.visuals))
            found.append(self.write(prompt, tokens, self.cursor - 1, behind - 1))
        return found


def pack(items: Sequence[PackItem], *, causal: bool = True) -> Batch:
    """The shared-prefix batch of `items`; sequences are numbered group after group, completion after completion, turn after turn.

    Without `causal`, every token of a completion also attends to the later ones (parallel decoding of action chunks); completions
    with later turns are causal. Raises ConfigError.
    """
    _check(items)
    row, spans = _Row(), _Spans()
    for m, item in enumerate(items):
        if item.later and any(item.later) and not causal:
            raise ConfigError(
                "expected turns that stand alone for parallel decoding, whose tokens see the later ones too, found "
                "prompts that grow turn by turn; decode autoregressively"
            )
        spans.prompts.append((row.cursor, item.prompt.length))
        row.show(item.prompt)
        last_prompt, first = row.cursor - 1, len(spans.completions)
        laid_out: list[list[_Written]] = []
        for number, (turns, shared) in enumerate(zip(item.branches, item.shared, strict=True)):
            known: Sequence[_Written] = ()
            last, begin, start = last_prompt, item.prompt.length if number else 0, row.cursor
            if shared is not None:
                known = laid_out[shared[0]][: shared[1]]
                last, begin = laid_out[shared[0]][shared[1]].last_shown, turns[shared[1]][0].length
            laid_out.append(row.branch(turns, known, last, begin))
            spans.add(m, (start, row.cursor - start), shared and first + shared[0], last + 1)
    return Batch(
        torch.cat(row.ids)[None],
        torch.cat(row.kinds)[None],
        torch.cat(row.positions, 1)[:, None],
        tuple(row.visuals),
        torch.cat([turn.source for turn in row.turns]),
        torch.cat([turn.target for turn in row.turns]),
        torch.cat([torch.full_like(turn.target, n) for n, turn in enumerate(row.turns)]),
        len(row.turns),
        torch.cat([turn.place for turn in row.turns]),
        spans.layout(causal),
        None,
        tuple(i.prompt.fingerprint for i in items),
        tuple(turn.turn_place for turn in row.turns),
    )


class _Spans:
    """Start and length of prompts and completions, and what each completion goes on from."""

    def __init__(self) -> None:
        self.prompts: list[_Span] = []
        self.completions: list[_Span] = []
        self.owners: list[int] = []
        self.before: list[tuple[_Span, ...]] = []

    def add(self, owner: int, own: _Span, source: int | None, cut: int) -> None:
        """A completion of prompt `owner`, which goes on from completion `source` at place `cut` of the row, or from the prompt."""
        before: tuple[_Span, ...] = ()
        if source is not None:  # spans lie in the row in their order
            path = (*self.before[source], self.completions[source])
            before = tuple((start, min(n, cut - start)) for start, n in path if start < cut)
        self.completions.append(own)
        self.owners.append(owner)
        self.before.append(before)

    def layout(self, causal: bool) -> PrefixLayout:
        """Of the row."""
        prompts, completions = torch.tensor(self.prompts), torch.tensor(self.completions)
        return PrefixLayout(
            prompts[:, 0],
            prompts[:, 1],
            completions[:, 0],
            completions[:, 1],
            torch.tensor(self.owners),
            causal,
            tuple(self.before) if any(self.before) else (),
        )


def pack_padded(items: Sequence[PackItem]) -> Batch:
    """The usual batch: each completion (each turn) in a row of its own behind a copy of the prompt and its pixels, right-padded."""
    _check(items)
    rows = [turn for item in items for branch in item.branches for turn in branch]
    width = max(p.length + len(c) for p, c in rows)
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    kinds, mask = torch.zeros_like(ids), torch.zeros_like(ids)
    positions_3 = torch.zeros(3, len(rows), width, dtype=torch.long)
    source, target, sequence, place = [], [], [], []
    for b, (prompt, completion) in enumerate(rows):
        P, C = prompt.length, len(completion)
        tokens = torch.tensor(completion, dtype=torch.long)
        ids[b, :P], ids[b, P : P + C] = prompt.ids_P, tokens
        kinds[b, :P] = prompt.kinds_P
        mask[b, : P + C] = 1
        positions_3[:, b, :P] = prompt.positions_3P
        positions_3[:, b, P : P + C] = prompt.next_position + torch.arange(C)
        source.append(b * width + torch.arange(P - 1, P + C - 1))
        place.append(b * width + torch.arange(P, P + C))
        target.append(tokens)
        sequence.append(torch.full((C,), b))
    prints = tuple(i.prompt.fingerprint for i in items)
    return Batch(
        ids,
        kinds,
        positions_3,
        tuple(v for p, _ in rows for v in p.visuals),
        torch.cat(source),
        torch.cat(target),
        torch.cat(sequence),
        len(rows),
        torch.cat(place),
        None,
        mask,
        prints,
        tuple((b * width, 0, p.length + len(c)) for b, (p, c) in enumerate(rows)),
    )
