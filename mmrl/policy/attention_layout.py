"""Where prompts and completions lie in a packed row, in the form each attention kernel asks for; built when first asked.

A layout belongs to one micro-batch: whatever is built is shared by all layers, forward and recomputed.

Legend: M prompts, B completions, T packed tokens, P / C padded prompt / completion length, A the padded length of a completion with
what it branches from, K keys of all completions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

    from mmrl.policy.sequence_parallel import SequenceGroup

_CPU = torch.device("cpu")

__all__ = ["PaddedBlocks", "PrefixLayout", "VarlenIndex"]


@dataclass(frozen=True)
class PaddedBlocks:
    """Prompts and completions as padded blocks.

    prompt_MP and completion_BC index the packed row (right padding points at token 0 and is never looked at). So does path_BA: what
    each completion branches from, and then itself; it is completion_BC where none branches. own_BC are the places of a completion's
    tokens in it. mask_BCK (B, 1, C, P + A) is True where a completion token may look, mask_MPP (M, 1, P, P) where a prompt's may
    (None: at what precedes it); slot_T finds each packed token in the concatenation of the flattened prompts and completions.
    """

    prompt_MP: torch.Tensor
    completion_BC: torch.Tensor
    owner_B: torch.Tensor
    mask_BCK: torch.Tensor
    slot_T: torch.Tensor
    path_BA: torch.Tensor
    own_BC: torch.Tensor
    mask_MPP: torch.Tensor | None = None
    _added: dict[tuple[int, torch.dtype], torch.Tensor] = field(default_factory=dict, init=False)

    @property
    def branches(self) -> bool:
        """Whether a completion goes on from the middle of another."""
        return self.path_BA is not self.completion_BC

    def added_mask(self, groups: int, dtype: torch.dtype) -> torch.Tensor:
        """(B, 1, groups * C, P + A), 0 where a token may look and -inf elsewhere: what sdpa makes of mask_BCK and keeps for
        backward, here once for all layers instead of once for each."""
        if (groups, dtype) not in self._added:
            mask = self.mask_BCK.repeat(1, 1, groups, 1)
            self._added[groups, dtype] = torch.zeros(
                mask.shape, dtype=dtype, device=mask.device
            ).masked_fill_(~mask, float("-inf"))
        return self._added[groups, dtype]


@dataclass(frozen=True)
class VarlenIndex:
    """The row as two calls of a variable-length kernel: prompts among themselves, completions against [own prompt, what it
    branches from, completion].

    prompt, query and key index the packed row; starts_* are cumulative lengths from 0 (int32, one more than sequences); slot_T
    finds each packed token in [prompt tokens, completion tokens].
    """

    prompt: torch.Tensor
    query: torch.Tensor
    key: torch.Tensor
    starts_prompt: torch.Tensor
    starts_query: torch.Tensor
    starts_key: torch.Tensor
    longest_prompt: int
    longest_query: int
    longest_key: int
    slot_T: torch.Tensor


@dataclass
class PrefixLayout:
    """Start and length of every prompt (M) and completion (B) in a packed row, and the prompt of each completion; on the CPU.

    Prompts are causal. A completion's tokens see its whole prompt and, of the completion, what precedes them; without `causal` all
    of it. `before_B`: the spans (start, length) of other completions that each completion goes on from, in their order, which it
    sees too; empty where none branches from another. `pictures_T` gives tokens of one picture one number, -1 to all others: tokens
    of a picture see all of it (Gemma 3). What the properties build is on `device`. `sequence`: the processes that compute the row
    together, each a slice of it (mmrl.policy.sequence_parallel).
    """

    prompt_start_M: torch.Tensor
    prompt_length_M: torch.Tensor
    completion_start_B: torch.Tensor
    completion_length_B: torch.Tensor
    owner_B: torch.Tensor
    causal: bool = True
    before_B: tuple[tuple[tuple[int, int], ...], ...] = ()
    device: torch.device = _CPU
    sequence: SequenceGroup | None = None
    pictures_T: torch.Tensor | None = None
    _restricted: dict[int | None, PaddedBlocks] = field(default_factory=dict, init=False)

    def to(self, device: torch.device) -> PrefixLayout:
        """The same layout for tensors on `device`."""
        return replace(self, device=device)

    @property
    def num_tokens(self) -> int:
        """T."""
        return int(self.prompt_length_M.sum() + self.completion_length_B.sum())

    @property
    def before_length_B(self) -> torch.Tensor:
        """Tokens between the prompt and each completion, (B,)."""
        if not self.before_B:
            return torch.zeros_like(self.completion_length_B)
        return torch.tensor([sum(length for _, length in spans) for spans in self.before_B])

    def _moved(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.device, non_blocking=True)

    def _paths(self, *, prompts: bool) -> list[list[tuple[int, int]]]:
        """The spans that lead to the end of each completion, with those of its prompt or without."""
        own = zip(self.completion_start_B.tolist(), self.completion_length_B.tolist(), strict=True)
        owners = self.owner_B.tolist() if prompts else []
        shown = [(int(self.prompt_start_M[m]), int(self.prompt_length_M[m])) for m in owners]
        before = self.before_B or ((),) * len(self.owner_B)
        return [
            [*shown[b : b + 1], *earlier, span]
            for b, (earlier, span) in enumerate(zip(before, own, strict=True))
        ]

    @cached_property
    def blocks(self) -> PaddedBlocks:
        """For sdpa and eager."""
        prompt_MP, prompt_valid = _padded_index(self.prompt_start_M, self.prompt_length_M)
        completion_BC, completion_valid = _padded_index(
            self.completion_start_B, self.completion_length_B
        )
        path_BA, path_valid = completion_BC, completion_valid
        if self.before_B:
            path_BA, path_valid = _padded_paths(self._paths(prompts=False))
        B, P, C, A = len(self.owner_B), prompt_MP.shape[1], completion_BC.shape[1], path_BA.shape[1]
        own_BC = self.before_length_B[:, None] + torch.arange(C)
        own = (torch.arange(A) <= own_BC[:, :, None])[:, None]
        if not self.causal:  # padding stays where nobody but padding sees it
            own = path_valid[:, None, None].expand(-1, 1, C, A) | own
        mask_BCK = torch.cat(
            [prompt_valid[self.owner_B][:, None, None].expand(B, 1, C, P), own], -1
        )
        rows = torch.cat([prompt_MP.flatten(), completion_BC.flatten()])
        slots = torch.cat([prompt_valid.flatten(), completion_valid.flatten()]).nonzero()[:, 0]
        completions = self._moved(completion_BC)
        return PaddedBlocks(
            self._moved(prompt_MP),
            completions,
            self._moved(self.owner_B),
            self._moved(mask_BCK),
            self._moved(_inverse(rows[slots], slots)),
            self._moved(path_BA) if self.before_B else completions,
            self._moved(own_BC.clamp(max=A - 1)),
        )

    def visible(self, window: int | None = None) -> PaddedBlocks:
        """`blocks` for a layer in which a token sees at most `window` tokens back, itself counted, and pictures see themselves."""
        length_B = self.before_length_B + self.completion_length_B
        longest = int((self.prompt_length_M[self.owner_B] + length_B).max())
        if window is not None and window >= longest:
            window = None
        if window is None and self.pictures_T is None:
            return self.blocks
        if window not in self._restricted:
            self._restricted[window] = self._shown(window)
        return self._restricted[window]

    def _shown(self, window: int | None) -> PaddedBlocks:
        blocks, device = self.blocks, self.blocks.owner_B.device
        (M, P), (B, C) = blocks.prompt_MP.shape, blocks.completion_BC.shape
        length_M, length_B = (
            self._moved(x) for x in (self.prompt_length_M, self.completion_length_B)
        )
        place_P, place_C = torch.arange(P, device=device), torch.arange(C, device=device)
        place_A = torch.arange(blocks.path_BA.shape[1], device=device)
        valid_MP, valid_BC = place_P < length_M[:, None], place_C < length_B[:, None]
        valid_BA = place_A < (self._moved(self.before_length_B) + length_B)[:, None]
        prompt_MPP = (place_P[:, None] >= place_P).expand(M, P, P)
        own_BCA = blocks.mask_BCK[:, 0, :, P:]
        if self.pictures_T is not None:
            number_T = self._moved(self.pictures_T)
            number_MP = torch.where(valid_MP, number_T[blocks.prompt_MP], -1)
            number_BC = torch.where(valid_BC, number_T[blocks.completion_BC], -1)
            number_BA = torch.where(valid_BA, number_T[blocks.path_BA], -1)
            prompt_MPP = prompt_MPP | _same(number_MP, number_MP)
            own_BCA = own_BCA | _same(number_BC, number_BA)
        mask_BCK = torch.cat([blocks.mask_BCK[:, 0, :, :P], own_BCA], -1)
        if window is not None:
            start_B1 = length_M[blocks.owner_B][:, None]
            keys_BK = torch.cat([place_P.expand(B, P), start_B1 + place_A], 1)
            far_BCK = keys_BK[:, None] <= (start_B1 + blocks.own_BC)[:, :, None] - window
            mask_BCK = mask_BCK & ~far_BCK
            prompt_MPP = prompt_MPP & (place_P > place_P[:, None] - window)
        return replace(blocks, mask_BCK=mask_BCK[:, None], mask_MPP=prompt_MPP[:, None])

    @cached_property
    def varlen(self) -> VarlenIndex:
        """For flash_attention_2."""
        paths = self._paths(prompts=True)
        starts, lengths = (
            torch.tensor(x) for x in zip(*(s for p in paths for s in p), strict=True)
        )
        prompt = _ranges(self.prompt_start_M, self.prompt_length_M)
        query = _ranges(self.completion_start_B, self.completion_length_B)
        key = _ranges(starts, lengths)
        order = torch.cat([prompt, query])
        a, b = self.prompt_length_M, self.completion_length_B
        c = torch.tensor([sum(length for _, length in path) for path in paths])
        return VarlenIndex(
            self._moved(prompt),
            self._moved(query),
            self._moved(key),
            self._moved(_starts(a)),
            self._moved(_starts(b)),
            self._moved(_starts(c)),
            int(a.max()),
            int(b.max()),
            int(c.max()),
            self._moved(_inverse(order, torch.arange(len(order)))),
        )

    @cached_property
    def spans_ET(self) -> torch.Tensor:
        """(E, T) int32: token t sees the keys [0][t] .. [1][t] - 1 and [2][t] .. [3][t] - 1 of the row, and so on by pairs; E is 4
        where no completion branches from another."""
        deepest = max(map(len, self.before_B), default=0)
        spans_ET = torch.zeros(4 + 2 * deepest, self.num_tokens, dtype=torch.int32)
        prompt = _ranges(self.prompt_start_M, self.prompt_length_M)
        spans_ET[0, prompt] = self.prompt_start_M.repeat_interleave(self.prompt_length_M).int()
        spans_ET[1, prompt] = prompt.int() + 1
        own = _ranges(self.completion_start_B, self.completion_length_B)
        start_B = self.prompt_start_M[self.owner_B]
        end_B = self.completion_start_B + self.completion_length_B
        columns = [
            start_B,
            start_B + self.prompt_length_M[self.owner_B],
            self.completion_start_B,
            end_B,
        ]
        for place in range(deepest):
            spans = [spans[place] if place < len(spans) else (0, 0) for spans in self.before_B]
            columns += [
                torch.tensor([s for s, _ in spans]),
                torch.tensor([s + n for s, n in spans]),
            ]
        spans_ET[:, own] = torch.stack(
            [x.repeat_interleave(self.completion_length_B) for x in columns]
        ).int()
        if self.causal:
            spans_ET[3, own] = own.int() + 1
        return self._moved(spans_ET)

    @cached_property
    def block_mask(self) -> BlockMask:
        """For flex."""
        from mmrl.policy.attention_flex import span_block_mask

        return span_block_mask(self.spans_ET[:, None], self.num_tokens)


def _same(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """(rows, C) and (rows, A) numbers of pictures -> (rows, C, A), True between tokens of one picture."""
    return (query[:, :, None] == key[:, None]) & (query >= 0)[:, :, None]


def _padded_index(start: torch.Tensor, length: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(rows, width) flat positions of each span, right-padded with 0, and the matching validity mask."""
    offset = torch.arange(int(length.max()))[None]
    valid = offset < length[:, None]
    return torch.where(valid, start[:, None] + offset, 0), valid


def _padded_paths(paths: Sequence[Sequence[tuple[int, int]]]) -> tuple[torch.Tensor, torch.Tensor]:
    """`_padded_index` of rows that consist of several spans each."""
    rows = [torch.cat([torch.arange(s, s + n) for s, n in path]) for path in paths]
    length = torch.tensor([len(row) for row in rows])
    index = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    return index, torch.arange(index.shape[1]) < length[:, None]


def _ranges(start: torch.Tensor, length: torch.Tensor) -> torch.Tensor:
    """start[0], start[0] + 1 .. start[0] + length[0] - 1, start[1] .."""
    before = length.cumsum(0) - length
    return torch.repeat_interleave(start - before, length) + torch.arange(int(length.sum()))


def _starts(length: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(length.cumsum(0), (1, 0)).int()


def _inverse(places: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    found = torch.empty_like(values)
    found[places] = values
    return found
