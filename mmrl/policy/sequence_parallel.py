"""Sequence parallelism (DeepSpeed-Ulysses): several processes compute one packed row, each a slice of its tokens.

    torchrun --nproc_per_node 8 -m mmrl.cli.main train run.yaml engine.train=fsdp2 engine.sequence_parallel=4

Outside of attention a token needs no other one: each process runs embeddings, norms and MLPs of its slice. Around attention an
all-to-all turns slices of all heads into whole rows of some heads, so the layouts of attention (mmrl/policy/attention_layout.py),
rotary positions and masks are those of one process; a second all-to-all turns them back. Where there are fewer key heads than
processes each key head goes to several. Pictures and clips are encoded once, by the process that holds them, and the processes get
the features that their slices show. Log-probs are computed by an even share of the written tokens each, and then known to all.

Processes of a group are given the same turns (`SequenceGroup.share`), so they compute the same loss; gradients of weights are those
of a process's slice and share, and add up over all processes of the run as those of several micro-batches do.

Source of the scheme: Jacobs et al., DeepSpeed Ulysses, arXiv:2309.14509. In verl: ulysses_sequence_parallel_size.

Legend: S processes of a group, T packed tokens, t tokens of a slice, H query heads, K rows that change their process, N written
tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from mmrl.errors import ConfigError

if TYPE_CHECKING:
    from mmrl.policy.pack import Batch

__all__ = [
    "Rows",
    "SequenceGroup",
    "check_heads",
    "over_heads",
    "slice_media",
]

X = TypeVar("X")


@dataclass(frozen=True)
class SequenceGroup:
    """The processes that compute a row together: `rank` of `size`, `group` for torch.distributed.

    `owners` says which of them has read a visual (by its identity); `share` fills it.
    """

    group: Any
    rank: int
    size: int
    owners: dict[Any, int] = field(default_factory=dict)

    @classmethod
    def of(cls, world_size: int, rank: int, size: int) -> SequenceGroup:
        """Neighbouring processes, `size` at a time: 0 .. size - 1 and so on. Collective over all processes of the run."""
        assert world_size % size == 0, "engine.sequence_parallel was checked"
        groups = [
            dist.new_group(range(first, first + size)) for first in range(0, world_size, size)
        ]
        return cls(groups[rank // size], rank % size, size)

    def share(self, items: Sequence[X], visuals: Callable[[X], Iterable[Any]]) -> list[X]:
        """The picklable items of all processes of the group, in order of rank, the same list on each; own ones stay the objects
        they are. `visuals` of an item belong to the process it comes from. Collective in the group."""
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, list(items), group=self.group)
        found[self.rank] = list(items)
        self.owners.clear()
        for rank, theirs in enumerate(found):
            for item in theirs:
                for visual in visuals(item):
                    self.owners.setdefault(visual.identity, rank)
        return [item for theirs in found for item in theirs]

    def owner(self, visual: Any) -> int:
        """Which process encodes `visual`."""
        return self.owners.get(visual.identity, 0)

    def width(self, tokens: int) -> int:
        """Tokens of a slice of a row of `tokens`; the last slices may be padded."""
        return -(-tokens // self.size)

    def slice_of(self, x: torch.Tensor, fill: int = 0) -> torch.Tensor:
        """This process's slice of (..., T), padded on the right with `fill`."""
        width = self.width(x.shape[-1])
        padded = torch.nn.functional.pad(x, (0, width * self.size - x.shape[-1]), value=fill)
        return padded[..., self.rank * width : (self.rank + 1) * width]


def check_heads(heads: int, kv_heads: int, size: int) -> None:
    """Raises ConfigError where attention with so many query and key heads cannot be split over `size` processes."""
    fits = [
        n
        for n in range(1, heads + 1)
        if heads % n == 0 and (kv_heads % n == 0 or n % kv_heads == 0)
    ]
    if size not in fits:
        raise ConfigError(
            f"engine.sequence_parallel: expected a number that splits this model's {heads} query heads evenly and its "
            f"{kv_heads} key heads evenly or into whole copies ({', '.join(map(str, fits))}), found {size}"
        )


class _AllToAll(torch.autograd.Function):
    """Rows of dimension 0: `sends` of them to each process, `gets` of them from each, in order of rank. Backward goes back."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, group: Any, sends: list[int], gets: list[int]
    ) -> torch.Tensor:
        ctx.group, ctx.sends, ctx.gets = group, sends, gets
        out = x.new_empty((sum(gets), *x.shape[1:]))
        dist.all_to_all_single(out, x.contiguous(), gets, sends, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (gradient,) = gradients
        back = gradient.new_empty((sum(ctx.sends), *gradient.shape[1:]))
        dist.all_to_all_single(back, gradient.contiguous(), ctx.sends, ctx.gets, group=ctx.group)
        return back, None, None, None


class _Known(torch.autograd.Function):
    """Shares of all processes one after the other, `sizes` rows each. All compute the same with it, so that the gradient of a
    process's own share is whole."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any, rank: int, sizes: list[int]) -> torch.Tensor:
        ctx.rank, ctx.sizes = rank, sizes
        widest = max(sizes)
        padded = x.new_zeros((widest, *x.shape[1:]))
        padded[: len(x)] = x
        out = x.new_empty((len(sizes) * widest, *x.shape[1:]))
        dist.all_gather_into_tensor(out, padded, group=group)
        return torch.cat([p[:n] for p, n in zip(out.split(widest), sizes, strict=True)])

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return gradients[0].split(ctx.sizes)[ctx.rank], None, None, None


def _even(x: torch.Tensor, group: SequenceGroup) -> torch.Tensor:
    """(S, ...) pieces, one for each process -> (S, ...), one from each."""
    ones = [1] * group.size
    return _AllToAll.apply(x, group.group, ones, ones)


def over_heads(
    attend: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, Any]],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    tokens: int,
    group: SequenceGroup,
) -> tuple[torch.Tensor, Any]:
    """query (1, H, t, D), key and value (1, Hkv, t, D) of a slice -> (1, t, H, D), by `attend` on whole rows of `tokens` and some
    heads: (1, H / S, T, D) and as many key heads as belong to them -> (1, T, H / S, D)."""
    kind, S = query.device.type, group.size
    # attention would round them so, and rotary positions leave queries and keys in fp32
    if torch.is_autocast_enabled(kind):
        query, key, value = (x.to(torch.get_autocast_dtype(kind)) for x in (query, key, value))
    copies = max(1, S // key.shape[1])
    pieces = [query, *(x.repeat_interleave(copies, 1) for x in (key, value))]
    sizes = [x.shape[1] // S for x in pieces]
    width, depth = query.shape[2:]
    sent = torch.cat([x[0].reshape(S, -1, width, depth) for x in pieces], 1)
    # (S, heads, t, D), of slice after slice -> (1, heads, T, D)
    rows = _even(sent, group).transpose(0, 1).flatten(1, 2)[None, :, :tokens]
    out, weights = attend(*rows.split(sizes, 1))
    padded = torch.nn.functional.pad(out[0], (0, 0, 0, 0, 0, width * S - tokens))
    back = _even(padded.view(S, width, -1, depth), group)
    return back.transpose(0, 1).flatten(1, 2)[None], weights


class Rows:
    """What is read of a row's hidden states: with a `group` by an even share of the reading each, else all by this process.

    rows = Rows(batch.layout.sequence, batch.num_tokens)
    share_nH = rows.at(hidden, batch.source_N)
    logp_N = rows.known(logp_of(share_nH, rows.share(batch.target_N)), len(batch.source_N))
    """

    def __init__(self, group: SequenceGroup | None, tokens: int) -> None:
        self.group, self.tokens = group, tokens

    def _sizes(self, count: int) -> list[int]:
        assert self.group is not None
        size = self.group.size
        return [count * (r + 1) // size - count * r // size for r in range(size)]

    def share(self, x_K: torch.Tensor) -> torch.Tensor:
        """This process's share of (K, ...), which every process has."""
        if self.group is None:
            return x_K
        return x_K.split(self._sizes(len(x_K)))[self.group.rank]

    def at(self, hidden: torch.Tensor, places_K: torch.Tensor) -> torch.Tensor:
        """Hidden states at `places_K` of the row, (K, H) or this process's share of them; `hidden` is the row or its slice."""
        if self.group is None:
            return hidden.index_select(0, places_K)
        width, sizes = self.group.width(self.tokens), self._sizes(len(places_K))
        reader_K = torch.arange(self.group.size).repeat_interleave(torch.tensor(sizes))
        places = places_K.cpu()
        return moved(hidden, places // width, places % width, reader_K, self.group)

    def known(self, x: torch.Tensor, count: int) -> torch.Tensor:
        """(K,) of shares, where all processes compute the same with it."""
        if self.group is None:
            return x
        return _Known.apply(x, self.group.group, self.group.rank, self._sizes(count))


def moved(
    x: torch.Tensor,
    holder_K: torch.Tensor,
    place_K: torch.Tensor,
    reader_K: torch.Tensor,
    group: SequenceGroup,
) -> torch.Tensor:
    """The K rows that this process is to have, in order, of rows that lie at `place_K` of process `holder_K`'s x and go to process
    `reader_K`; the three are the same on all processes, on the CPU."""
    mine = holder_K == group.rank
    sends = [mine & (reader_K == r) for r in range(group.size)]
    wanted = reader_K == group.rank
    gets = [int((wanted & (holder_K == r)).sum()) for r in range(group.size)]
    leaving = torch.cat([place_K[s] for s in sends])
    got = _AllToAll.apply(
        x.index_select(0, leaving.to(x.device)), group.group, [int(s.sum()) for s in sends], gets
    )
    # they arrive process after process
    order = holder_K[wanted].argsort(stable=True).argsort(stable=True)
    return got.index_select(0, order.to(x.device))


def slice_media(
    batch: Batch,
    encode: Callable[[list[Any]], torch.Tensor],
    pack: Callable[[torch.Tensor], Any],
    group: SequenceGroup,
) -> tuple[dict[str, Any], torch.Tensor | None]:
    """Features of the visual tokens of this process's slice, as arguments of model.forward; and 0 with their gradient: the others
    wait for the backward of a process, also where it shows none of them.

    `encode` gives the rows (n, W) of some visuals, one after the other; `pack` the form in which the model takes the rows of one
    kind.
    """
    rows = encode([v for v in batch.visuals if group.owner(v) == group.rank])
    if not batch.visuals:
        return {}, rows.sum() * 0.0
    counts = torch.tensor([v.tokens for v in batch.visuals])
    holder = torch.tensor([group.owner(v) for v in batch.visuals])
    place = torch.zeros_like(counts)
    for rank in range(group.size):  # each holder's rows lie one visual after the other
        here = holder == rank
        place[here] = counts[here].cumsum(0) - counts[here]
    kinds_T = batch.kinds[0].cpu()
    shown = kinds_T.nonzero()[:, 0]
    assert len(shown) == int(counts.sum()), "a row shows every token of its visuals"
    within = torch.arange(len(shown)) - (counts.cumsum(0) - counts).repeat_interleave(counts)
    got = moved(
        rows,
        holder.repeat_interleave(counts),
        place.repeat_interleave(counts) + within,
        shown // group.width(len(kinds_T)),
        group,
    )
    kinds = group.slice_of(kinds_T)
    kinds = kinds[kinds != 0].to(got.device)
    found = {
        name: pack(got[kinds == number])
        for number, name in ((1, "image"), (2, "video"), (3, "audio"))
        if (kinds == number).any()
    }
    return ({"mm_encoder_outputs": found} if found else {}), got.sum() * 0.0
