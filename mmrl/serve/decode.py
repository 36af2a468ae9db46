"""Rows of many requests decoded together: they join after any step and leave when they are done.

The steps are those of mmrl.rollout's engine (its prefill, its cache, its sampling); only temperature, top-p, length and stop
strings belong to the row here. A row that joins is aligned at its end: what it does not see is masked.

Legend: R rows, K positions of the cache, H hidden width, V vocabulary, S steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from mmrl.policy.encode import Prompt
from mmrl.rollout import PrefillOnceEngine
from mmrl.rollout.cache import PreallocatedCache, joined
from mmrl.rollout.sampling import choose, keep_top, noise_stream
from mmrl.serve.protocol import Sampling
from mmrl.serve.text import TextStream, decode

__all__ = ["Batch", "Piece", "Row", "TokenLogp"]

_RETIRE_SHARE = 0.75  # compact the batch when fewer rows than this are still alive


@dataclass(frozen=True)
class TokenLogp:
    """One token with its log-prob, and the most likely ones of its place, (text, log-prob) each."""

    token: str
    logp: float
    top: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True)
class Piece:
    """What one step added to a choice: text that is certain, its tokens where asked for, and at its end the reason."""

    choice: int
    text: str
    logprobs: tuple[TokenLogp, ...] = ()
    reason: str | None = None  # stop, length
    tokens: int = 0  # written so far


@dataclass(eq=False)
class Row:
    """One choice, waiting or being written; `give` takes its pieces. While it waits it is small, however long it may become."""

    choice: int
    sampling: Sampling
    limit: int
    noise_key: tuple[int, ...]
    give: Callable[[Piece], None]
    wanted: Callable[[], bool]
    text: TextStream
    logprobs: list[TokenLogp] = field(default_factory=list)
    tokens: int = 0
    done: bool = False

    def __post_init__(self) -> None:
        # a stream of its own: the same whatever n, the length and the neighbours are
        self.draw: Callable[[], float] = noise_stream((*self.noise_key, self.choice))


class Batch:
    """The rows now being decoded. All calls from one thread."""

    def __init__(self, engine: PrefillOnceEngine) -> None:
        self.engine, self.policy = engine, engine.policy
        self.rows: list[Row] = []
        self._cache: PreallocatedCache | None = None
        self._hidden_RH = self._mask_RK = self._position_R = torch.empty(0)

    @property
    def alive(self) -> list[Row]:
        """Rows that still write."""
        return [row for row in self.rows if not row.done]

    def slots(self, lengths: Sequence[int], limits: Sequence[int]) -> int:
        """Cache slots (rows x positions) that would be held with more rows of these prompt lengths and limits."""
        alive = self.alive
        left = max([*limits, *(row.limit - row.tokens for row in alive)])
        width = max(
            [*lengths, self._mask_RK.shape[1] - self._first(self._living()) if alive else 0]
        )
        return (len(alive) + len(lengths)) * (width + left)

    def _living(self) -> torch.Tensor:
        return torch.tensor(
            [i for i, row in enumerate(self.rows) if not row.done],
            dtype=torch.long,
            device=self.policy.device,
        )

    def _first(self, index: torch.Tensor) -> int:
        """The first position that any of these rows sees."""
        return int(self._mask_RK.index_select(0, index).any(0).int().argmax())

    def join(self, prompts: Sequence[Prompt], rows: Sequence[Sequence[Row]]) -> None:
        """Prefill each prompt once and add its rows."""
        new = [row for group in rows for row in group]
        with torch.no_grad(), self.policy.autocast():
            hidden_RH, cache, mask_RK, position_R = self.engine.prefill(
                prompts, [len(g) for g in rows], 1
            )
            mask_RK = mask_RK[:, : cache.get_seq_length()]
            everyone = torch.arange(len(new), device=self.policy.device)
            self._arrange([(cache, hidden_RH, mask_RK, position_R, everyone)], new)

    def _arrange(
        self,
        added: Sequence[
            tuple[PreallocatedCache, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
        ],
        rows: Sequence[Row],
    ) -> None:
        """Drop rows that are done and positions that nobody sees, and append `added` (cache, hidden, mask, position, rows)."""
        parts = list(added)
        if self.alive:
            assert self._cache is not None
            parts.insert(
                0, (self._cache, self._hidden_RH, self._mask_RK, self._position_R, self._living())
            )
        self.rows = [*self.alive, *rows]
        if not parts:
            self._cache, self._hidden_RH, self._mask_RK = None, torch.empty(0), torch.empty(0)
            return
        firsts = [
            int(mask.index_select(0, index).any(0).int().argmax()) for _, _, mask, _, index in parts
        ]
        width = max(
            mask.shape[1] - first for (_, _, mask, _, _), first in zip(parts, firsts, strict=True)
        )
        left = max(row.limit - row.tokens for row in self.rows)
        self._cache = joined(
            [
                (cache, index, first)
                for (cache, _, _, _, index), first in zip(parts, firsts, strict=True)
            ],
            width + left,
        )
        masks = [
            mask.index_select(0, index)[:, first:]
            for (_, _, mask, _, index), first in zip(parts, firsts, strict=True)
        ]
        self._mask_RK = torch.cat(
            [torch.nn.functional.pad(m, (width - m.shape[1], 0), value=False) for m in masks]
        )
        self._hidden_RH = torch.cat(
            [hidden.index_select(0, index) for _, hidden, _, _, index in parts]
        )
        self._position_R = torch.cat(
            [position.index_select(0, index) for _, _, _, position, index in parts]
        )

    def drop_unwanted(self) -> None:
        """Forget rows whose client is gone."""
        gone = [row for row in self.alive if not row.wanted()]
        for row in gone:
            row.done = True
        if gone:
            self._compact()

    def clear(self) -> None:
        """Forget all rows."""
        for row in self.rows:
            row.done = True
        self._arrange([], [])

    def _compact(self) -> None:
        alive = len(self.alive)
        if alive < _RETIRE_SHARE * len(self.rows):
            self._arrange([], [])

    def step(self) -> None:
        """One token for every row, then the forward pass for the next."""
        with torch.no_grad(), self.policy.autocast():
            logits_RV = self.policy.adjust(self.policy.logits(self._hidden_RH), 1.0)
            token_R = self._choose(logits_RV)
            self._hand_out(logits_RV, token_R.tolist())
            if not self.alive:
                self._arrange([], [])
                return
            self._forward(token_R)
            self._compact()

    def _temperatures(self) -> torch.Tensor:
        return torch.tensor(
            [row.sampling.temperature or 1.0 for row in self.rows], device=self.policy.device
        )[:, None]

    def _choose(self, logits_RV: torch.Tensor) -> torch.Tensor:
        token_R = choose(logits_RV, None)
        scaled_RV = logits_RV / self._temperatures()
        kinds: dict[tuple[int, float], list[int]] = {}
        for i, row in enumerate(self.rows):
            if row.sampling.temperature > 0 and not row.done:
                kinds.setdefault((row.sampling.top_k, row.sampling.top_p), []).append(i)
        for (top_k, top_p), places in kinds.items():
            index = torch.tensor(places, device=token_R.device)
            uniform = torch.tensor(
                [self.rows[i].draw() for i in places], dtype=torch.float64, device=token_R.device
            )
            token_R[index] = choose(keep_top(scaled_RV[index], top_k, top_p), uniform)
        return token_R

    def _hand_out(self, logits_RV: torch.Tensor, tokens: Sequence[int]) -> None:
        logprobs = (
            self._token_logprobs(logits_RV, tokens)
            if any(row.sampling.logprobs for row in self.rows)
            else {}
        )
        for i, (row, token) in enumerate(zip(self.rows, tokens, strict=True)):
            if row.done:
                continue
            row.tokens += 1
            ended = token in self.policy.eos_ids
            text = "" if ended else row.text.add(token)
            if i in logprobs and not ended:
                row.logprobs.append(logprobs[i])
            row.done = ended or row.text.stopped or row.tokens == row.limit
            if row.done:
                text += row.text.finish()
            if text or row.done:
                reason = ("stop" if ended or row.text.stopped else "length") if row.done else None
                row.give(Piece(row.choice, text, tuple(row.logprobs), reason, row.tokens))
                row.logprobs.clear()

    def _token_logprobs(
        self, logits_RV: torch.Tensor, tokens: Sequence[int]
    ) -> dict[int, TokenLogp]:
        """Of the rows that asked: log-probs at the row's temperature (greedy: 1), before top-p and top-k."""
        logp_RV = (logits_RV / self._temperatures()).log_softmax(-1)
        tokenizer, found = self.policy.processor.tokenizer, {}
        for i, row in enumerate(self.rows):
            if row.sampling.logprobs and not row.done:
                best = (
                    logp_RV[i].topk(min(row.sampling.top_logprobs, logp_RV.shape[1]))
                    if row.sampling.top_logprobs
                    else None
                )
                top = (
                    ()
                    if best is None
                    else tuple(
                        (decode(tokenizer, [t]), lp)
                        for t, lp in zip(best.indices.tolist(), best.values.tolist(), strict=True)
                    )
                )
                found[i] = TokenLogp(
                    decode(tokenizer, [tokens[i]]), float(logp_RV[i, tokens[i]]), top
                )
        return found

    def _forward(self, token_R: torch.Tensor) -> None:
        self._mask_RK = torch.nn.functional.pad(self._mask_RK, (0, 1), value=True)
        body, family = self.policy.body, self.policy.family
        rows, width = self._mask_RK.shape
        ago_RK = torch.arange(width - 1, -1, -1, device=self._mask_RK.device).expand(rows, -1)
        out = family.forward(
            body,
            input_ids=token_R[:, None],
            use_cache=True,
            past_key_values=self._cache,
            attention_mask=family.step_mask(body, self._mask_RK[:, None, None, :], ago_RK),
            **family.text_inputs(self._position_R[None, :, None].expand(3, -1, 1), None),
        )
        self._hidden_RH, self._position_R = out.last_hidden_state[:, -1], self._position_R + 1
