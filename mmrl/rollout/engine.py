"""The built-in rollout engine: prefill each prompt once, expand its KV cache to G rows, decode all rows together.

Finished rows are retired as soon as a quarter of the batch is done; behaviour log-probs are fp32 and belong to the
distribution really sampled from (temperature applied, media tokens impossible, before top-p / top-k).

Legend: R rows, P padded prompt length, K cache length, S steps decoded, V vocabulary.
"""

from __future__ import annotations

import abc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from mmrl.policy.encode import Prompt
from mmrl.policy.policy import Policy
from mmrl.rollout.cache import PreallocatedCache
from mmrl.rollout.sampling import choose, keep_top, row_noise
from mmrl.rollout.weights import WeightSource
from mmrl.types import StopReason, Turn

__all__ = ["PrefillOnceEngine", "Request", "RolloutEngine", "SamplingSettings"]

_RETIRE_SHARE = 0.75  # compact the batch when fewer rows than this are still alive


@dataclass(frozen=True)
class SamplingSettings:
    """How to sample; `batch_tokens` bounds rows x (prompt + new tokens) held in the KV cache at once."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_new_tokens: int = 64
    batch_tokens: int = 65536


@dataclass(frozen=True)
class Request:
    """`count` completions of one prompt. `key` seeds their noise; greedy requests need none."""

    prompt: Prompt
    count: int
    key: tuple[int, ...] = ()
    greedy: bool = False


class RolloutEngine(abc.ABC):
    """Contract of every engine: completions in the order of the requests, behaviour log-probs in fp32."""

    @abc.abstractmethod
    def generate(self, requests: Sequence[Request], settings: SamplingSettings) -> list[list[Turn]]:
        """`request.count` completions for each request. Must not depend on how requests are batched."""

    def publish(self, source: WeightSource) -> dict[str, float]:
        """Take over the weights of the training engine `source`; metrics of that. Collective, called after every update and before
        the first request. Engines that sample with the live weights have nothing to do.

        Raises WeightSyncError when they do not compute with them afterwards, RolloutError when they fail.
        """
        return {}

    def sleep(self) -> None:  # noqa: B027  most engines have nothing to give back
        """Training begins: give back memory that only sampling needs, until the next request."""

    def close(self) -> None:  # noqa: B027  nor to end
        """End processes and connections of the engine's own. May be called more than once."""


@dataclass
class _Row:
    request: int
    uniform_S: torch.Tensor | None


class PrefillOnceEngine(RolloutEngine):
    """Generates with the live policy weights, in this process."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy

    def generate(self, requests: Sequence[Request], settings: SamplingSettings) -> list[list[Turn]]:
        """See RolloutEngine.generate."""
        results: list[list[Turn]] = [[] for _ in requests]
        noise = [
            None if r.greedy else row_noise(r.key, r.count, settings.max_new_tokens)
            for r in requests
        ]
        for chunk in _chunks(requests, settings):
            rows = [
                _Row(i, None if (drawn := noise[i]) is None else drawn[g])
                for i, first, last in chunk
                for g in range(first, last)
            ]
            prompts, counts = _share_prefill(
                [(requests[i].prompt, last - first) for i, first, last in chunk]
            )
            with torch.no_grad(), self.policy.autocast():
                tokens, logprobs = self._decode(prompts, counts, rows, settings)
            for row, ids, lps in zip(rows, tokens, logprobs, strict=True):
                results[row.request].append(self._completion(ids, lps))
        return results

    def _completion(self, ids: list[int], logprobs: list[float]) -> Turn:
        ended = ids[-1] in self.policy.eos_ids
        text = self.policy.processor.tokenizer.decode(
            ids[:-1] if ended else ids,
            skip_special_tokens=False,
            clean_up_tokenization_spaces=False,
        )
        return Turn(
            tuple(ids),
            text,
            tuple(logprobs),
            StopReason.EOS if ended else StopReason.LENGTH,
            self.policy.version,
        )

    def prefill(
        self, prompts: Sequence[Prompt], counts: Sequence[int], new_tokens: int
    ) -> tuple[torch.Tensor, PreallocatedCache, torch.Tensor, torch.Tensor]:
        """Run each prompt once and repeat it: last hidden states (R, H), the KV cache with room for `new_tokens`, which of its
        positions a row sees (R, K), the next rotary position of each row (R,)."""
        policy = self.policy
        width = max(p.length for p in prompts)
        ids = torch.zeros(len(prompts), width, dtype=torch.long)
        kinds, mask = torch.zeros_like(ids), torch.zeros_like(ids, dtype=torch.bool)
        positions_3 = torch.zeros(3, len(prompts), width, dtype=torch.long)
        for i, p in enumerate(prompts):  # left-padded: every row's next token is at the same place
            ids[i, width - p.length :], kinds[i, width - p.length :] = p.ids_P, p.kinds_P
            mask[i, width - p.length :] = True
            positions_3[:, i, width - p.length :] = p.positions_3P
        media = policy.media([v for p in prompts for v in p.visuals])
        cache = PreallocatedCache(width + new_tokens)
        policy.model.eval()
        out = policy.base.model(
            input_ids=ids.to(policy.device),
            attention_mask=mask.long().to(policy.device),
            use_cache=True,
            position_ids=positions_3.to(policy.device),
            mm_token_type_ids=kinds.to(policy.device),
            past_key_values=cache,
            **media,
        )
        repeats = torch.tensor(counts, device=policy.device)
        cache.repeat_rows(repeats)
        hidden_RH = out.last_hidden_state[:, -1].repeat_interleave(repeats, 0)
        mask_RK = torch.nn.functional.pad(
            mask.to(policy.device), (0, new_tokens), value=True
        ).repeat_interleave(repeats, 0)
        position_R = torch.tensor(
            [p.next_position for p in prompts], device=policy.device
        ).repeat_interleave(repeats)
        return hidden_RH, cache, mask_RK, position_R

    def _decode(
        self,
        prompts: Sequence[Prompt],
        counts: Sequence[int],
        rows: Sequence[_Row],
        settings: SamplingSettings,
    ) -> tuple[list[list[int]], list[list[float]]]:
        policy, device = self.policy, self.policy.device
        hidden_RH, cache, mask_RK, position_R = self.prefill(
            prompts, counts, settings.max_new_tokens
        )
        width = mask_RK.shape[1] - settings.max_new_tokens
        sampled = torch.tensor([r.uniform_S is not None for r in rows], device=device)
        no_noise_S = torch.zeros(settings.max_new_tokens, dtype=torch.double)
        uniform_RS = torch.stack(
            [no_noise_S if r.uniform_S is None else r.uniform_S for r in rows]
        ).to(device)
        eos = torch.tensor(policy.eos_ids, device=device)
        row_R = torch.arange(len(rows), device=device)
        alive_R = torch.ones(len(rows), dtype=torch.bool, device=device)
        steps: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        for step in range(settings.max_new_tokens):
            logits_RV = policy.adjust(policy.logits(hidden_RH), settings.temperature)
            token_R = choose(logits_RV, None)
            if sampled.any():
                drawn_R = choose(
                    keep_top(logits_RV, settings.top_k, settings.top_p), uniform_RS[row_R, step]
                )
                token_R = torch.where(sampled[row_R], drawn_R, token_R)
            logp_R = logits_RV.gather(-1, token_R[:, None])[:, 0] - logits_RV.logsumexp(-1)
            steps.append((row_R[alive_R], token_R[alive_R], logp_R[alive_R]))
            alive_R &= ~torch.isin(token_R, eos)
            if step + 1 == settings.max_new_tokens or not alive_R.any():
                break
            if alive_R.sum() < _RETIRE_SHARE * len(alive_R):
                keep = alive_R.nonzero()[:, 0]
                cache.select_rows(keep)
                mask_RK, position_R, row_R, token_R, alive_R = (
                    x[keep] for x in (mask_RK, position_R, row_R, token_R, alive_R)
                )
            out = policy.base.model(
                input_ids=token_R[:, None],
                use_cache=True,
                past_key_values=cache,
                attention_mask=mask_RK[:, None, None, : width + step + 1],
                position_ids=(position_R + step)[None, :, None].expand(3, -1, 1),
            )
            hidden_RH = out.last_hidden_state[:, -1]
        return _gather_rows(steps, len(rows))


def _share_prefill(parts: Sequence[tuple[Prompt, int]]) -> tuple[list[Prompt], list[int]]:
    """Neighbouring requests of the same prompt (greedy beside sampled) are prefilled once."""
    prompts: list[Prompt] = []
    counts: list[int] = []
    for prompt, count in parts:
        if prompts and prompts[-1] is prompt:
            counts[-1] += count
        else:
            prompts.append(prompt)
            counts.append(count)
    return prompts, counts


def _gather_rows(
    steps: Sequence[tuple[torch.Tensor, ...]], num_rows: int
) -> tuple[list[list[int]], list[list[float]]]:
    tokens: list[list[int]] = [[] for _ in range(num_rows)]
    logprobs: list[list[float]] = [[] for _ in range(num_rows)]
    for row_R, token_R, logp_R in steps:
        for row, token, logp in zip(row_R.tolist(), token_R.tolist(), logp_R.tolist(), strict=True):
            tokens[row].append(token)
            logprobs[row].append(logp)
    return tokens, logprobs


def _chunks(
    requests: Sequence[Request], settings: SamplingSettings
) -> Iterator[list[tuple[int, int, int]]]:
    """(request, first row, last row + 1) lists within the cache budget, in the order of the requests."""
    chunk: list[tuple[int, int, int]] = []
    rows = width = 0
    for index, request in enumerate(requests):
        length = request.prompt.length + settings.max_new_tokens
        first = 0
        while first < request.count:
            room = settings.batch_tokens // max(width, length) - rows
            if room < 1 and chunk:
                yield chunk
                chunk, rows, width = [], 0, 0
                continue
            last = min(request.count, first + max(1, room))
            chunk.append((index, first, last))
            rows, width, first = rows + last - first, max(width, length), last
    if chunk:
        yield chunk
