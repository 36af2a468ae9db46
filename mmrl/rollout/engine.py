"""The built-in rollout engine: prefill each prompt once, give its KV cache to G rows, decode all rows together.

Batching is continuous (mmrl/rollout/slots.py): when a quarter of the slots is free, completions that wait take them; when none wait
the free ones are given back. Behaviour log-probs are fp32 and belong to the distribution really sampled from (temperature applied,
media tokens impossible, before top-p / top-k).

Legend: R rows, P prompt length, K cache length, H hidden width.
"""

from __future__ import annotations

import abc
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from mmrl.policy.encode import Prompt
from mmrl.policy.policy import Policy
from mmrl.policy.routing import TurnExperts
from mmrl.rollout.cache import PreallocatedCache
from mmrl.rollout.merged import MergedAdapter
from mmrl.rollout.sampling import row_noise
from mmrl.rollout.slots import Prefilled, SlotRow, Slots, prefill
from mmrl.rollout.weights import WeightSource
from mmrl.types import StopReason, Turn

__all__ = ["PrefillOnceEngine", "Request", "RolloutEngine", "SamplingSettings"]

_RETIRE_SHARE = 0.75  # when fewer slots than this have a row, rows that wait are let in, or the free ones are given back
_LIKE = 0.7  # rows whose length is at least this share of the longest's share slots with it


@dataclass(frozen=True)
class SamplingSettings:
    """How to sample; `batch_tokens` bounds rows x (prompt + new tokens) held in the KV cache at once. `routed_experts`: turns say
    which experts of a mixture computed them (mmrl's own engine)."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_new_tokens: int = 64
    batch_tokens: int = 65536
    routed_experts: bool = False


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


class PrefillOnceEngine(RolloutEngine):
    """Generates with the live policy weights, in this process. `graphs`: whether a step is a CUDA graph; None: on a GPU. `merge`:
    with the adapter merged into a copy of the layers that it is on (mmrl.rollout.merged)."""

    def __init__(self, policy: Policy, *, graphs: bool | None = None, merge: bool = False) -> None:
        self._live, self._graphs = policy, graphs
        self._merged = MergedAdapter(policy) if merge else None
        self.renew: Callable[[], bool] | None = None
        """Partial rollouts: asked between tokens; takes newer weights if there are any, and says whether there were."""

    @property
    def policy(self) -> Policy:
        """What samples."""
        return self._live if self._merged is None else self._merged.now()

    def generate(self, requests: Sequence[Request], settings: SamplingSettings) -> list[list[Turn]]:
        """See RolloutEngine.generate."""
        rows = [
            SlotRow(i, g, r.prompt, None if noise is None else noise[g])
            for i, r in enumerate(requests)
            for noise in [None if r.greedy else row_noise(r.key, r.count, settings.max_new_tokens)]
            for g in range(r.count)
        ]
        turns: dict[tuple[int, int], Turn] = {}
        with torch.no_grad(), self.policy.autocast():
            for pool in _pools(rows, settings):
                for row, ids, logprobs, experts in self._decode(pool, settings):
                    turn = self._completion(ids, logprobs, experts)
                    turns[row.request, row.number] = _with_versions(turn, row)
        return [[turns[i, g] for g in range(r.count)] for i, r in enumerate(requests)]

    def _decode(
        self, rows: Sequence[SlotRow], settings: SamplingSettings
    ) -> Iterator[tuple[SlotRow, list[int], list[float], TurnExperts | None]]:
        """Write the rows of a pool in as many slots as the budget has, a row that waits in the slot of one that ended."""
        width = max(r.prompt.length for r in rows) + settings.max_new_tokens
        size = max(1, min(len(rows), settings.batch_tokens // width))
        slots = Slots(
            self.policy,
            size,
            width,
            settings,
            greedy=any(r.uniform_S is None for r in rows),
            sampled=any(r.uniform_S is not None for r in rows),
            graphs=self._graphs,
        )
        waiting = _Waiting(self.policy, rows, experts=settings.routed_experts)
        while waiting or slots.occupied:
            free = slots.free
            # several at once: a prompt is prefilled alone in the time of a few
            if waiting and len(free) >= min(len(waiting), (1 - _RETIRE_SHARE) * size):
                waiting.admit(slots, free)
            else:
                # a recorded step is recorded again for fewer rows
                share = 0.5 if slots.static else _RETIRE_SHARE
                if not waiting and slots.occupied < share * len(slots.rows):
                    slots.compact()
                for _ in range(self._unseen):
                    slots.step()
            yield from slots.finished()
            version = self._live.version
            if self.renew is not None and slots.occupied and self.renew():
                waiting.forget()
                slots.renew(self.policy, version)

    @property
    def _unseen(self) -> int:
        """Steps between looks at what has ended: looking makes the host wait for a GPU, and a row that ended waits for the look."""
        return 4 if self.policy.device.type == "cuda" else 1

    def _completion(
        self, ids: list[int], logprobs: list[float], experts: TurnExperts | None
    ) -> Turn:
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
            experts=experts,
        )

    def prefill(
        self, prompts: Sequence[Prompt], counts: Sequence[int], new_tokens: int
    ) -> tuple[torch.Tensor, PreallocatedCache, torch.Tensor, torch.Tensor]:
        """For rows that must end at one place (mmrl/serve/decode.py): run each prompt once, padded on the left, and repeat it. Last
        hidden states (R, H), the KV cache with room for `new_tokens`, which of its positions a row sees (R, K), the next rotary
        position of each row (R,)."""
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
        out = policy.family.forward(
            policy.body,
            input_ids=ids.to(policy.device),
            attention_mask=mask.long().to(policy.device),
            use_cache=True,
            past_key_values=cache,
            **policy.family.text_inputs(positions_3.to(policy.device), kinds.to(policy.device)),
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


class _Waiting:
    """Rows that have no slot yet, prompt by prompt. A prompt whose rows do not all find room is kept as it was prefilled."""

    def __init__(self, policy: Policy, rows: Sequence[SlotRow], *, experts: bool) -> None:
        self.policy, self._experts = policy, experts
        self._rows = deque(rows)
        self._begun: Prefilled | None = None  # of the first row's prompt

    def __len__(self) -> int:
        return len(self._rows)

    def forget(self) -> None:
        """The weights have changed: what they computed of prompts is of no use."""
        self._begun = None

    def admit(self, slots: Slots, free: Sequence[int]) -> None:
        """Rows take the free slots, in order; each prompt is run once, those of one call together."""
        rows = [self._rows.popleft() for _ in range(min(len(free), len(self._rows)))]
        places = list(free[: len(rows)])
        if self._begun is not None:
            same = [r for r in rows if r.prompt is self._begun.prompts[0]]
            slots.admit(places[: len(same)], same, self._begun, [0] * len(same))
            rows, places = rows[len(same) :], places[len(same) :]
        prompts = list({id(r.prompt): r.prompt for r in rows}.values())
        if rows:
            number = {id(p): i for i, p in enumerate(prompts)}
            found = prefill(self.policy, prompts, experts=self._experts)
            slots.admit(places, rows, found, [number[id(r.prompt)] for r in rows])
            self._begun = None
            if self._rows and self._rows[0].prompt is prompts[-1]:
                self._begun = found.only(len(prompts) - 1)
        elif self._begun is not None and not (
            self._rows and self._rows[0].prompt is self._begun.prompts[0]
        ):
            self._begun = None


def _with_versions(turn: Turn, row: SlotRow) -> Turn:
    """The turn with the version of each token, where several wrote it; its own is the oldest."""
    if not row.written:
        return turn
    versions: list[int] = []
    for count, version in row.written:
        versions += [version] * (count - len(versions))
    versions += [turn.policy_version] * (len(turn.token_ids) - len(versions))
    return replace(turn, policy_version=min(versions), versions=tuple(versions))


def _pools(rows: Sequence[SlotRow], settings: SamplingSettings) -> Iterator[list[SlotRow]]:
    """Rows that share slots, which are as long as the longest of them needs: all where that is within the budget, else rows of like
    length, the longest first. Rows of one prompt stay together."""
    order: dict[int, list[SlotRow]] = {}
    for row in rows:
        order.setdefault(id(row.prompt), []).append(row)
    left = sorted(order.values(), key=lambda group: -group[0].prompt.length)
    while left:
        longest = left[0][0].prompt.length + settings.max_new_tokens
        everything = longest * sum(map(len, left)) <= settings.batch_tokens
        least = 0 if everything else _LIKE * longest - settings.max_new_tokens
        pool = [group for group in left if group[0].prompt.length >= least]
        left = left[len(pool) :]
        yield [row for group in pool for row in group]
