"""Rows that write together, each in a slot of its own: they join when a slot is free and leave when they are done.

    slots = Slots(policy, size=64, width=512, settings, greedy=False, sampled=True)
    slots.admit([0, 1], rows, prefill(policy, [prompt]), [0, 0])     # two completions of one prompt, with their first tokens
    while slots.occupied:
        slots.step()                                                 # one more token of every row that goes on
        for row, ids, logprobs, experts in slots.finished(): ...

A row begins at place 0 of its slot, whatever stands beside it, so that its numbers do not depend on longer prompts; what it has not
written is masked. Tokens, log-probs and ends stay on the device: the host looks when `finished` is called. All shapes stay the same
from step to step on a GPU, where a step is recorded once as a CUDA graph: its kernels are started at once, not one by one.

Legend: R rows (slots), K places of a slot, H hidden width, V vocabulary, S new tokens at most, n prompts, P prompt tokens, L layers
with experts, k experts of a token.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from transformers import Cache
from transformers.cache_utils import DynamicLayer

from mmrl.policy.batch_invariance import decoding
from mmrl.policy.delta_net import KeepsStates, StateLayer
from mmrl.policy.encode import Prompt
from mmrl.policy.policy import Policy
from mmrl.policy.routing import NotedExperts, TurnExperts
from mmrl.rollout.cache import PreallocatedCache
from mmrl.rollout.sampling import choose, keep_top

__all__ = ["Prefilled", "SlotCache", "SlotRow", "Slots", "prefill"]


@dataclass(frozen=True)
class SlotRow:
    """One completion: which request it belongs to and its number there, and its noise (S,); None: greedy. `written`: (tokens so
    far, version of the weights that wrote those since the last entry), where newer ones have taken over since."""

    request: int
    number: int
    prompt: Prompt
    uniform_S: torch.Tensor | None
    written: list[tuple[int, int]] = field(default_factory=list)


@dataclass(frozen=True)
class Prefilled:
    """Prompts run once: their keys and values, the hidden state (n, H) behind each, and where they were asked for the experts that
    computed each, (P, L, k)."""

    prompts: Sequence[Prompt]
    cache: PreallocatedCache
    hidden_nH: torch.Tensor
    experts: Sequence[np.ndarray] = ()

    def only(self, number: int) -> Prefilled:
        """One of the prompts, in memory of its own."""
        at = torch.tensor([number], device=self.hidden_nH.device)
        length = self.prompts[number].length
        cache = PreallocatedCache(length)
        for i, layer in enumerate(self.cache.layers):
            if isinstance(layer, StateLayer):
                cache.layers.append(StateLayer.of([(layer, at)]))
                continue
            keys, values = (
                x[:, :, :length].index_select(0, at) for x in (layer.keys, layer.values)
            )
            cache.update(keys, values, i)
        return Prefilled(
            [self.prompts[number]],
            cache,
            self.hidden_nH.index_select(0, at),
            self.experts[number : number + 1],
        )


def _continued(prompt: Prompt, tokens: Sequence[int]) -> Prompt:
    """The prompt with the tokens that were written behind it."""
    ids = torch.tensor(tokens, dtype=prompt.ids_P.dtype)
    after = torch.arange(len(tokens), dtype=prompt.positions_3P.dtype) + prompt.next_position
    return replace(
        prompt,
        ids_P=torch.cat([prompt.ids_P, ids]),
        kinds_P=torch.cat([prompt.kinds_P, torch.zeros(len(tokens), dtype=prompt.kinds_P.dtype)]),
        positions_3P=torch.cat([prompt.positions_3P, after.expand(3, -1)], 1),
        next_position=prompt.next_position + len(tokens),
    )


def prefill(policy: Policy, prompts: Sequence[Prompt], *, experts: bool = False) -> Prefilled:
    """Run each prompt once, padded on the right: a causal mask hides the padding from every token, and no other is needed; layers
    that carry a state are told the lengths. `experts`: note those of a mixture that compute them."""
    width = max(p.length for p in prompts)
    ids = torch.zeros(len(prompts), width, dtype=torch.long)
    kinds, positions_3 = torch.zeros_like(ids), torch.zeros(3, len(prompts), width).long()
    for i, p in enumerate(prompts):
        ids[i, : p.length], kinds[i, : p.length] = p.ids_P, p.kinds_P
        positions_3[:, i, : p.length] = p.positions_3P
    lengths = torch.tensor([p.length for p in prompts], device=policy.device)
    cache = PreallocatedCache(width, lengths)
    policy.model.eval()
    noted = NotedExperts(policy.expert_shape) if experts else None
    out = policy.family.forward(
        policy.body,
        input_ids=ids.to(policy.device),
        use_cache=True,
        past_key_values=cache,
        **policy.family.text_inputs(positions_3.to(policy.device), kinds.to(policy.device)),
        **policy.media([v for p in prompts for v in p.visuals]),
        **({} if noted is None else {"routing": noted}),
    )
    row = torch.arange(len(prompts), device=policy.device)
    hidden_nH = out.last_hidden_state[row, lengths - 1]
    if noted is None:
        return Prefilled(prompts, cache, hidden_nH)
    found = noted.experts_TLk().unflatten(0, ids.shape).cpu().numpy()
    own = [x[: p.length].copy() for x, p in zip(found, prompts, strict=True)]
    return Prefilled(prompts, cache, hidden_nH, own)


class _SlotLayer(DynamicLayer):
    """One layer's keys and values of all slots; a step writes one place of each row, which differs from row to row."""

    def __init__(self, cache: SlotCache) -> None:
        super().__init__()
        self.cache = cache
        self.key_buffer: torch.Tensor | None = None
        self.value_buffer: torch.Tensor | None = None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(R, heads, 1, D) keys and values of the next token; returns views of the places that any row has filled."""
        assert self.key_buffer is not None and self.value_buffer is not None
        c = self.cache
        self.key_buffer[c.row_R, :, c.place_R] = key_states[:, :, 0]
        self.value_buffer[c.row_R, :, c.place_R] = value_states[:, :, 0]
        return self.key_buffer[:, :, : c.visible], self.value_buffer[:, :, : c.visible]


class SlotCache(KeepsStates, Cache):
    """Keys and values of `size` slots with `width` places each. `place_R` is where each row writes next, `visible` how many places
    attention is shown."""

    def __init__(self, size: int, width: int, device: torch.device) -> None:
        super().__init__(layer_class_to_replicate=lambda *args, **kwargs: _SlotLayer(self))
        self.size, self.width, self.visible = size, width, width
        self.row_R = torch.arange(size, device=device)
        self.place_R = torch.zeros(size, dtype=torch.long, device=device)

    def fill(self, at: torch.Tensor, prompts: PreallocatedCache, which: torch.Tensor) -> None:
        """The slots `at` begin with the prompts `which` of a prefill."""
        for number, source in enumerate(prompts.layers):
            if isinstance(source, StateLayer):
                self.state_layer(number).fill(at, source, which, self.size)
                continue
            if number == len(self.layers):
                self.layers.append(_SlotLayer(self))
            layer = self.layers[number]
            assert isinstance(layer, _SlotLayer)
            for name, buffer in (("keys", "key_buffer"), ("values", "value_buffer")):
                found = getattr(source, name)
                if getattr(layer, buffer) is None:
                    # zeros: what no row has written is masked, but must be finite
                    shape = (self.size, found.shape[1], self.width, found.shape[3])
                    setattr(layer, buffer, found.new_zeros(shape))
                getattr(layer, buffer)[at, :, : found.shape[2]] = found.index_select(0, which)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Places that attention is shown before the next token."""
        return self.visible - 1

    def select(self, keep: torch.Tensor) -> None:
        """Keep the slots named by `keep`, in that order."""
        self.size = len(keep)
        self.row_R, self.place_R = self.row_R[: self.size], self.place_R[keep]
        for layer in self.layers:
            if isinstance(layer, StateLayer):
                layer.rearrange(keep)
                continue
            assert isinstance(layer, _SlotLayer)
            for name in ("key_buffer", "value_buffer"):
                setattr(layer, name, getattr(layer, name).index_select(0, keep))


class Slots:
    """State of `size` rows on the device. `greedy`, `sampled`: whether some take the most likely token, whether some draw."""

    def __init__(
        self,
        policy: Policy,
        size: int,
        width: int,
        settings: Any,
        *,
        greedy: bool,
        sampled: bool,
        graphs: bool | None = None,
    ) -> None:
        device, S = policy.device, settings.max_new_tokens
        self.policy, self.settings, self.kinds = policy, settings, (greedy, sampled)
        self.cache = SlotCache(size, width, device)
        self.rows: list[SlotRow | None] = [None] * size
        self._filled = [0] * size  # places of each row at most: some end before the host looks
        self.static = device.type == "cuda" if graphs is None else graphs
        self._graph: Any = None
        self._warm = False
        self.token_R = torch.zeros(size, dtype=torch.long, device=device)
        self.position_R, self.step_R = (
            torch.zeros_like(self.token_R),
            torch.zeros_like(self.token_R),
        )
        self.alive_R = torch.zeros(size, dtype=torch.bool, device=device)
        self.sampled_R = torch.zeros_like(self.alive_R)
        self.uniform_RS = torch.zeros(size, S, dtype=torch.double, device=device)
        # one column more, where rows that ended go on writing
        self.tokens_RS = torch.zeros(size, S + 1, dtype=torch.long, device=device)
        self.logp_RS = torch.zeros(size, S + 1, device=device)
        self._eos = torch.tensor(policy.eos_ids, device=device)
        self.experts_RSLk: torch.Tensor | None = None  # by the number of the token that was read
        self._prompt_experts: list[np.ndarray | None] = [None] * size
        if settings.routed_experts:
            shape = self._expert_shape = policy.expert_shape
            self.experts_RSLk = torch.zeros(
                size, S + 1, shape.layers, shape.top_k, dtype=shape.dtype, device=device
            )

    @property
    def free(self) -> list[int]:
        """Slots without a row."""
        return [place for place, row in enumerate(self.rows) if row is None]

    @property
    def occupied(self) -> int:
        """Slots with one."""
        return len(self.rows) - len(self.free)

    def admit(
        self,
        places: Sequence[int],
        rows: Sequence[SlotRow],
        prompts: Prefilled,
        which: Sequence[int],
    ) -> None:
        """Rows begin in free slots behind the prompts `which` of a prefill, and write their first token."""
        device = self.policy.device
        at, chosen = (torch.tensor(x, device=device) for x in (places, which))
        self.cache.fill(at, prompts.cache, chosen)
        lengths = [prompts.prompts[i].length for i in which]
        self.cache.place_R[at] = torch.tensor(lengths, device=device)
        self.position_R[at] = torch.tensor(
            [prompts.prompts[i].next_position for i in which], device=device
        )
        for place, row, length in zip(places, rows, lengths, strict=True):
            self.rows[place], self._filled[place] = row, length
        if self.experts_RSLk is not None:
            for place, i in zip(places, which, strict=True):
                self._prompt_experts[place] = prompts.experts[i]
        silent = torch.zeros(self.uniform_RS.shape[1], dtype=torch.double)
        self.uniform_RS[at] = torch.stack(
            [silent if r.uniform_S is None else r.uniform_S for r in rows]
        ).to(device)
        self.sampled_R[at] = torch.tensor([r.uniform_S is not None for r in rows], device=device)
        token, logp = self._drawn(
            prompts.hidden_nH.index_select(0, chosen), self.sampled_R[at], self.uniform_RS[at, 0]
        )
        self.token_R[at], self.tokens_RS[at, 0], self.logp_RS[at, 0] = token, token, logp
        self.step_R[at] = 1
        self.alive_R[at] = ~self._ends(token, self.step_R[at])

    def renew(self, policy: Policy, version: int) -> None:
        """The weights have changed; those of `version` wrote what there is. Keys and values of prompts and tokens are computed
        anew, row by row, so that each token to come is drawn from the new weights' own distribution given those before it."""
        for place, row in enumerate(self.rows):
            if row is None:
                continue
            count = int(self.step_R[place])
            row.written.append((count, version))
            # the last token has not been read yet
            known = _continued(row.prompt, self.tokens_RS[place, : count - 1].tolist())
            found = prefill(policy, [known])
            at = torch.tensor([place], device=policy.device)
            self.cache.fill(at, found.cache, torch.zeros_like(at))

    def step(self) -> None:
        """One more token of every row that goes on."""
        for place in range(len(self.rows)):
            self._filled[place] += 1
        if not self.static:
            longest = max(
                n for n, row in zip(self._filled, self.rows, strict=True) if row is not None
            )
            # a row that ended between looks goes no further
            self.cache.visible = min(longest, self.cache.width)
            self._step()
        elif self.policy.device.type == "cuda":
            self._replay()
        else:
            self._step()

    def _replay(self) -> None:
        """The step as a CUDA graph: the first is run as it is, the second recorded."""
        if not self._warm:
            self._warm = True
            self._step()
            return
        if self._graph is None:
            graph = torch.cuda.CUDAGraph()
            try:
                with torch.cuda.graph(graph):
                    self._step()
                self._graph = graph
            except RuntimeError as error:  # an operation of this model that cannot be recorded
                warnings.warn(
                    f"rollouts go on without CUDA graphs, and slower: {error}", stacklevel=2
                )
                self.static = False
                torch.cuda.synchronize()
                self._step()
                return
        self._graph.replay()

    def _step(self) -> None:
        with decoding():
            self._next_token()

    def _next_token(self) -> None:
        cache = self.cache
        places_K = torch.arange(cache.visible, device=self.policy.device)
        body, family = self.policy.body, self.policy.family
        ago_RK = cache.place_R[:, None] - places_K
        noted = None if self.experts_RSLk is None else NotedExperts(self._expert_shape)
        out = family.forward(
            body,
            input_ids=self.token_R[:, None],
            use_cache=True,
            past_key_values=cache,
            attention_mask=family.step_mask(body, (ago_RK >= 0)[:, None, None], ago_RK),
            **family.text_inputs(self.position_R[None, :, None].expand(3, -1, 1), None),
            **({} if noted is None else {"routing": noted}),
        )
        cache.place_R += self.alive_R
        self.position_R += self.alive_R
        S = self.uniform_RS.shape[1]
        uniform_R = self.uniform_RS.gather(1, self.step_R.clamp(max=S - 1)[:, None])[:, 0]
        token_R, logp_R = self._drawn(out.last_hidden_state[:, -1], self.sampled_R, uniform_R)
        if noted is not None and self.experts_RSLk is not None:
            read_R = torch.where(self.alive_R, self.step_R - 1, S)
            self.experts_RSLk[cache.row_R, read_R] = noted.experts_TLk()
        column_R1 = torch.where(self.alive_R, self.step_R, S)[:, None]
        self.tokens_RS.scatter_(1, column_R1, token_R[:, None])
        self.logp_RS.scatter_(1, column_R1, logp_R[:, None])
        self.token_R.copy_(token_R)
        self.step_R += self.alive_R
        self.alive_R &= ~self._ends(token_R, self.step_R)

    def _ends(self, token_R: torch.Tensor, step_R: torch.Tensor) -> torch.Tensor:
        """Rows whose token is an end of turn or the last that is allowed."""
        ended_R = (token_R[:, None] == self._eos).any(-1)
        return ended_R | (step_R >= self.settings.max_new_tokens)

    def _drawn(
        self, hidden_RH: torch.Tensor, sampled_R: torch.Tensor, uniform_R: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The next token of each row and its fp32 log-prob under the distribution sampled from, before top-p / top-k."""
        settings, (greedy, sampled) = self.settings, self.kinds
        logits_RV = self.policy.adjust(self.policy.logits(hidden_RH), settings.temperature)
        token_R = choose(logits_RV, None) if greedy else None
        if sampled:
            drawn_R = choose(keep_top(logits_RV, settings.top_k, settings.top_p), uniform_R)
            token_R = drawn_R if token_R is None else torch.where(sampled_R, drawn_R, token_R)
        assert token_R is not None, "no row is greedy and none is sampled"
        logp_R = logits_RV.gather(-1, token_R[:, None])[:, 0] - logits_RV.logsumexp(-1)
        return token_R, logp_R

    def finished(
        self,
    ) -> Iterator[tuple[SlotRow, list[int], list[float], TurnExperts | None]]:
        """Rows that ended since the last call, with their tokens, log-probs and, where they were asked for, experts; their slots
        are free. Nothing has read the last token of a row."""
        alive = self.alive_R.tolist()
        done = [p for p, row in enumerate(self.rows) if row is not None and not alive[p]]
        if not done:
            return
        at = torch.tensor(done, device=self.policy.device)
        counts = self.step_R[at].tolist()
        tokens, logps = self.tokens_RS[at].tolist(), self.logp_RS[at].tolist()
        read = (
            [None] * len(done) if self.experts_RSLk is None else self.experts_RSLk[at].cpu().numpy()
        )
        for place, count, ids, logp, own in zip(done, counts, tokens, logps, read, strict=True):
            row, self.rows[place] = self.rows[place], None
            assert row is not None
            experts, shown = None, self._prompt_experts[place]
            if own is not None and shown is not None:
                experts = TurnExperts(shown, own[: count - 1].copy())
            yield row, ids[:count], logp[:count], experts

    def compact(self) -> None:
        """Give back the free slots."""
        kept = [place for place, row in enumerate(self.rows) if row is not None]
        keep = torch.tensor(kept, device=self.policy.device)
        self.cache.select(keep)
        for name in (
            "token_R",
            "position_R",
            "step_R",
            "alive_R",
            "sampled_R",
            "uniform_RS",
            "tokens_RS",
            "logp_RS",
            *(() if self.experts_RSLk is None else ("experts_RSLk",)),
        ):
            setattr(self, name, getattr(self, name).index_select(0, keep))
        self.rows, self._filled = [self.rows[p] for p in kept], [self._filled[p] for p in kept]
        self._prompt_experts = [self._prompt_experts[p] for p in kept]
        # recorded for other tensors
        self._graph, self._warm = None, False
