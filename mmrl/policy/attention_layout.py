"""Where prompts and completions lie in a packed row, in the form each attention kernel asks for; built when first asked.

A layout belongs to one micro-batch: whatever is built is shared by all layers, forward and recomputed.

Legend: M prompts, B completions, T packed tokens, P / C padded prompt / completion length, K keys of all completions.
"""

from __future__ import annotations

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

    prompt_MP and completion_BC index the packed row (right padding points at token 0 and is never looked at); mask_BCK (B, 1, C,
    P + C) is True where a completion token may look, mask_MPP (M, 1, P, P) where a prompt's may (None: at what precedes it);
    slot_T finds each packed token in the concatenation of the flattened blocks.
    """

    prompt_MP: torch.Tensor
    completion_BC: torch.Tensor
    owner_B: torch.Tensor
    mask_BCK: torch.Tensor
    slot_T: torch.Tensor
    mask_MPP: torch.Tensor | None = None
    _added: dict[tuple[int, torch.dtype], torch.Tensor] = field(default_factory=dict, init=False)

    def added_mask(self, groups: int, dtype: torch.dtype) -> torch.Tensor:
        """(B, 1, groups * C, P + C), 0 where a token may look and -inf elsewhere: what sdpa makes of mask_BCK and keeps for
        backward, here once for all layers instead of once for each."""
        if (groups, dtype) not in self._added:
            mask = self.mask_BCK.repeat(1, 1, groups, 1)
            self._added[groups, dtype] = torch.zeros(
                mask.shape, dtype=dtype, device=mask.device
            ).masked_fill_(~mask, float("-inf"))
        return self._added[groups, dtype]


@dataclass(frozen=True)
class VarlenIndex:
    """The row as two calls of a variable-length kernel: prompts among themselves, completions against [own prompt, completion].

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
    of it. `pictures_T` gives tokens of one picture one number, -1 to all others: tokens of a picture see all of it (Gemma 3). What
    the properties build is on `device`. `sequence`: the processes that compute the row together, each a slice of it
    (mmrl.policy.sequence_parallel).
    """

    prompt_start_M: torch.Tensor
    prompt_length_M: torch.Tensor
    completion_start_B: torch.Tensor
    completion_length_B: torch.Tensor
    owner_B: torch.Tensor
    causal: bool = True
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

    def _moved(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.device, non_blocking=True)

    @cached_property
    def blocks(self) -> PaddedBlocks:
        """For sdpa and eager."""
        prompt_MP, prompt_valid = _padded_index(self.prompt_start_M, self.prompt_length_M)
        completion_BC, completion_valid = _padded_index(
            self.completion_start_B, self.completion_length_B
        )
        B, (P, C) = len(self.owner_B), (prompt_MP.shape[1], completion_BC.shape[1])
        own = torch.ones(C, C, dtype=torch.bool).tril().expand(B, 1, C, C)
        if not self.causal:  # padding stays where nobody but padding sees it
            own = completion_valid[:, None, None].expand(-1, 1, C, C) | own
        mask_BCK = torch.cat(
            [prompt_valid[self.owner_B][:, None, None].expand(-1, 1, C, P), own], -1
        )
        rows = torch.cat([prompt_MP.flatten(), completion_BC.flatten()])
        slots = torch.cat([prompt_valid.flatten(), completion_valid.flatten()]).nonzero()[:, 0]
        found = (prompt_MP, completion_BC, self.owner_B, mask_BCK, _inverse(rows[slots], slots))
        return PaddedBlocks(*(self._moved(x) for x in found))

    def visible(self, window: int | None = None) -> PaddedBlocks:
        """`blocks` for a layer in which a token sees at most `window` tokens back, itself counted, and pictures see themselves."""
        longest = int((self.prompt_length_M[self.owner_B] + self.completion_length_B).max())
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
        valid_MP, valid_BC = place_P < length_M[:, None], place_C < length_B[:, None]
        prompt_MPP = (place_P[:, None] >= place_P).expand(M, P, P)
        own_BCC = blocks.mask_BCK[:, 0, :, P:]
        if self.pictures_T is not None:
            number_T = self._moved(self.pictures_T)
            prompt_MPP = prompt_MPP | _same(number_T[blocks.prompt_MP], valid_MP)
            own_BCC = own_BCC | _same(number_T[blocks.completion_BC], valid_BC)
        mask_BCK = torch.cat([blocks.mask_BCK[:, 0, :, :P], own_BCC], -1)
        if window is not None:
            start_B1 = length_M[blocks.owner_B][:, None]
            keys_BK = torch.cat([place_P.expand(B, P), start_B1 + place_C], 1)
            far_BCK = keys_BK[:, None] <= (start_B1 + place_C)[:, :, None] - window
            mask_BCK = mask_BCK & ~far_BCK
            prompt_MPP = prompt_MPP & (place_P > place_P[:, None] - window)
        return replace(blocks, mask_BCK=mask_BCK[:, None], mask_MPP=prompt_MPP[:, None])

    @cached_property
    def varlen(self) -> VarlenIndex:
        """For flash_attention_2."""
        start = torch.stack([self.prompt_start_M[self.owner_B], self.completion_start_B], 1)
        length = torch.stack([self.prompt_length_M[self.owner_B], self.completion_length_B], 1)
        prompt = _ranges(self.prompt_start_M, self.prompt_length_M)
        query = _ranges(self.completion_start_B, self.completion_length_B)
        key = _ranges(start.flatten(), length.flatten())
        order = torch.cat([prompt, query])
        a, b, c = self.prompt_length_M, self.completion_length_B, length.sum(1)
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
    def spans_4T(self) -> torch.Tensor:
        """(4, T) int32: token t sees the keys [0][t] .. [1][t] - 1 and [2][t] .. [3][t] - 1 of the row."""
        spans_4T = torch.zeros(4, self.num_tokens, dtype=torch.int32)
        prompt = _ranges(self.prompt_start_M, self.prompt_length_M)
        spans_4T[0, prompt] = self.prompt_start_M.repeat_interleave(self.prompt_length_M).int()
        spans_4T[1, prompt] = prompt.int() + 1
        own = _ranges(self.completion_start_B, self.completion_length_B)
        start_B = self.prompt_start_M[self.owner_B]
        end_B = self.completion_start_B + self.completion_length_B
        columns = [
            start_B,
            start_B + self.prompt_length_M[self.owner_B],
            self.completion_start_B,
            end_B,
        ]
        spans_4T[:, own] = torch.stack(
            [x.repeat_interleave(self.completion_length_B) for x in columns]
        ).int()
        if self.causal:
            spans_4T[3, own] = own.int() + 1
        return self._moved(spans_4T)

    @cached_property
    def block_mask(self) -> BlockMask:
        """For flex."""
        from mmrl.policy.attention_flex import span_block_mask

        return span_block_mask(self.spans_4T[:, None], self.num_tokens)


def _same(number: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """(rows, width) numbers of pictures -> (rows, width, width), True between tokens of one picture."""
    number = torch.where(valid, number, -1)
    return (number[:, :, None] == number[:, None]) & (number >= 0)[:, :, None]


def _padded_index(start: torch.Tensor, length: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(rows, width) flat positions of each span, right-padded with 0, and the matching validity mask."""
    offset = torch.arange(int(length.max()))[None]
    valid = offset < length[:, None]
    return torch.where(valid, start[:, None] + offset, 0), valid


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
