"""Which experts compute each token of a mixture of experts: noted in one forward, chosen again in another (routing replay).

    noted = NotedExperts(ExpertShape.of(family, body))
    body(..., routing=noted)                                   # the routers choose; noted.experts_TLk()
    body(..., routing=ReplayedExperts(family, experts_LTk, fixed_T))    # the same experts, by the router's weights of now

A router computes a logit of each expert and takes the k largest. When weights move a little, or another kernel rounds otherwise,
some tokens get other experts, and log-probs jump: importance ratios then tell of the jump. Replay fixes the choice alone. What each
chosen expert weighs is computed from the logits of now, by the router's own formula (ModelFamily.gate_weights), so that routers
still have a gradient. Sources: Zheng et al., Group Sequence Policy Optimization, arXiv 2507.18071, section 5.3 (R2: the experts of
the training model when old log-probs are computed); Ma et al., arXiv 2510.11370 (R3: those of the rollout). In verl:
actor.router_replay.mode.

The choice is handed to each decoder layer as an argument of its forward, so that gradient checkpointing computes a layer again with
the same experts, in whatever thread and however much later.

Legend: T tokens of a forward (its rows one after the other), L layers with experts, k experts of a token in a layer, E experts, P
prompt tokens, N tokens that were written, D turns, t tokens of a slice.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from mmrl.errors import ConfigError, MismatchError
from mmrl.policy.families import family_of

if TYPE_CHECKING:
    from mmrl.policy.encode import Prompt
    from mmrl.policy.families.contract import ModelFamily
    from mmrl.policy.pack import Batch
    from mmrl.policy.sequence_parallel import SequenceGroup

__all__ = [
    "ExpertShape",
    "NotedExperts",
    "ReplayedExperts",
    "Rerouted",
    "TurnExperts",
    "experts_of_turns",
    "replayed",
    "take_routing",
]

_Output = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Of a router of transformers: logits (T, E), what the chosen experts weigh (T, k), and which they are (T, k)."""


@dataclass(frozen=True, eq=False)
class TurnExperts:
    """The experts of a turn's tokens, uint8 (int16 for more than 256 experts): L * k bytes or twice that per token. Turns of one
    prompt share `prompt_PLk`, one object. `written_NLk` is one shorter than the turn where nothing read its last token."""

    prompt_PLk: np.ndarray
    written_NLk: np.ndarray

    def prompt_alone(self) -> TurnExperts:
        """Of another turn behind the same prompt, whose own tokens the routers of now are to send where they like."""
        return TurnExperts(self.prompt_PLk, self.written_NLk[:0])


@dataclass(frozen=True)
class ExpertShape:
    """What is noted of a token: `layers` times `top_k` numbers of type `dtype`."""

    layers: int
    top_k: int
    dtype: torch.dtype

    @classmethod
    def of(cls, family: ModelFamily, body: Any) -> ExpertShape:
        """Raises ConfigError for a model without experts."""
        found = [
            attrgetter(family.router)(layer)
            for layer in family.parts.decoder_layers(body)
            if _has_router(layer, family)
        ]
        if not found:
            raise ConfigError(
                "expected a mixture of experts for algorithm.router_replay, found a model of family "
                f"{family.name} without a router; set algorithm.router_replay.mode: disabled"
            )
        dtype = torch.uint8 if found[0].num_experts <= 256 else torch.int16
        return cls(len(found), int(found[0].top_k), dtype)


@dataclass(frozen=True)
class Rerouted:
    """How the routers of now differ from what was replayed: `tokens` with fixed experts, those of them that would have had other
    ones in some layer (`changed`), `places` (tokens times layers), and those with other ones (`changed_places`)."""

    tokens: int = 0
    changed: int = 0
    places: int = 0
    changed_places: int = 0

    def __add__(self, other: Rerouted) -> Rerouted:
        return Rerouted(
            self.tokens + other.tokens,
            self.changed + other.changed,
            self.places + other.places,
            self.changed_places + other.changed_places,
        )

    @property
    def metrics(self) -> dict[str, float]:
        """Shares; none where nothing was replayed."""
        if not self.tokens:
            return {}
        return {
            "train/router/changed": self.changed / self.tokens,
            "train/router/changed_layers": self.changed_places / self.places,
        }


class NotedExperts:
    """What is said to each router of a forward: choose, and be noted, in the type of `shape`."""

    def __init__(self, shape: ExpertShape) -> None:
        self.shape = shape
        self._chosen: dict[int, torch.Tensor] = {}

    def __call__(self, number: int, router: Any, output: _Output) -> None:
        """Router `number` has answered."""
        self._chosen[number] = output[2].to(self.shape.dtype)  # int64 would be eight times as much

    def experts_TLk(self) -> torch.Tensor:
        """The experts of all tokens, on the device."""
        return torch.stack([self._chosen[number] for number in range(self.shape.layers)], 1)


class ReplayedExperts:
    """What is said to each router of a forward: take `experts_LTk` for the tokens in `fixed_T`, and others as you like."""

    def __init__(
        self, family: ModelFamily, experts_LTk: torch.Tensor, fixed_T: torch.Tensor
    ) -> None:
        self.family, self.experts_LTk, self.fixed_T = family, experts_LTk, fixed_T
        self._changed: dict[int, torch.Tensor] = {}

    def __call__(self, number: int, router: Any, output: _Output) -> _Output:
        """What router `number` is to have answered."""
        logits_TE, _, own_Tk = output
        told_Tk = self.experts_LTk[number].to(own_Tk.dtype)
        chosen_Tk = torch.where(self.fixed_T[:, None], told_Tk, own_Tk)
        # by number: a layer that is computed again for its backward counts once
        self._changed[number] = (own_Tk.sort(-1).values != chosen_Tk.sort(-1).values).any(-1)
        return logits_TE, self.family.gate_weights(router, logits_TE, chosen_Tk), chosen_Tk

    def rerouted(self, group: SequenceGroup | None = None) -> Rerouted:
        """What the forward has shown. Collective in `group`, the processes that have computed slices of the row."""
        changed_LT = torch.stack(list(self._changed.values()))
        counts = torch.stack([self.fixed_T.sum(), changed_LT.any(0).sum(), changed_LT.sum()])
        if group is not None:
            dist.all_reduce(counts, group=group.group)
        tokens, changed, places = counts.tolist()
        return Rerouted(tokens, changed, tokens * len(changed_LT), places)


Routing = NotedExperts | ReplayedExperts


class _TakesRouting:
    """In front of transformers' class of a decoder layer: its forward takes `routing`."""

    def forward(self: Any, *args: Any, routing: Routing | None = None, **kwargs: Any) -> Any:
        """As the layer's own."""
        if routing is None or not self.router_path:
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        hook = attrgetter(self.router_path)(self).register_forward_hook(
            lambda router, inputs, output: routing(self.router_number, router, output)
        )
        try:
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        finally:
            hook.remove()


@functools.cache
def _taking(kind: type) -> type:
    return type(kind.__name__, (_TakesRouting, kind), {"__module__": kind.__module__})


def _has_router(layer: Any, family: ModelFamily) -> bool:
    """Of a mixture's layers some are dense."""
    if not family.router:
        return False
    try:
        attrgetter(family.router)(layer)
    except AttributeError:
        return False
    return True


def take_routing(model: Any) -> None:
    """Let the decoder layers of a transformers model of a family with experts take `routing` (idempotent)."""
    family = family_of(model.config)
    if not family.router:
        return
    number = 0
    for layer in family.parts.decoder_layers(family.body(model)):
        routed = _has_router(layer, family)
        layer.router_path, layer.router_number = family.router if routed else "", number
        number += routed
        kind: Any = type(layer)
        if not issubclass(kind, _TakesRouting):
            layer.__class__ = _taking(kind)


def replayed(
    family: ModelFamily,
    batch: Batch,
    prompts: Sequence[Prompt],
    experts_D: Sequence[TurnExperts | None],
    shape: ExpertShape,
    device: torch.device,
) -> ReplayedExperts:
    """The experts of turns, laid out as `batch` lays out their tokens; None: the routers choose. Where turns share a prompt, and it
    was computed more than once, those of the first one hold. Raises MismatchError for experts of another model, or of other tokens.
    """
    row_TLk, fixed_T = _laid_out(batch, prompts, experts_D, shape)
    row_LkT, fixed = torch.from_numpy(row_TLk).permute(1, 2, 0), torch.from_numpy(fixed_T)
    if batch.sequence is not None:
        row_LkT, fixed = (batch.sequence.slice_of(x) for x in (row_LkT, fixed))
    row_LTk = row_LkT.transpose(1, 2).contiguous()
    return ReplayedExperts(family, row_LTk.to(device), fixed.to(device))


def _laid_out(
    batch: Batch,
    prompts: Sequence[Prompt],
    experts_D: Sequence[TurnExperts | None],
    shape: ExpertShape,
) -> tuple[np.ndarray, np.ndarray]:
    """(T, L, k) experts, and which of the tokens have any (T,)."""
    row_TLk = np.zeros(
        (batch.num_tokens, shape.layers, shape.top_k), str(shape.dtype).removeprefix("torch.")
    )
    fixed_T = np.zeros(batch.num_tokens, bool)
    for (place, begin, end), shown, experts in zip(
        batch.turn_places, prompts, experts_D, strict=True
    ):
        if experts is None:
            continue
        prompt, written = experts.prompt_PLk, experts.written_NLk
        if (
            not prompt.shape[1:] == written.shape[1:] == row_TLk.shape[1:]
            or len(prompt) != shown.length
            or len(written) > end - shown.length
        ):
            raise MismatchError(
                f"expected experts of a prompt of {shown.length} tokens and {end - shown.length} behind it, {shape.top_k} of each "
                f"in {shape.layers} layers, found {prompt.shape} and {written.shape}; they are of another model or another prompt"
            )
        own = np.concatenate([prompt[begin:], written])
        row_TLk[place : place + len(own)] = own
        fixed_T[place : place + len(own)] = True
    return row_TLk, fixed_T


def experts_of_turns(
    noted: NotedExperts, batch: Batch, prompts: Sequence[Prompt]
) -> list[TurnExperts]:
    """What a forward of `batch` has noted, turn by turn. Collective where processes have computed slices of the row."""
    row = noted.experts_TLk()
    if batch.sequence is not None:
        group = batch.sequence
        whole = row.new_empty((group.size * len(row), *row.shape[1:]))
        dist.all_gather_into_tensor(whole, row.contiguous(), group=group.group)
        row = whole[: batch.num_tokens]
    row_TLk = row.cpu().numpy()
    heads: dict[int, np.ndarray] = {}  # one object for all turns of a prompt
    found: list[TurnExperts] = []
    for (place, begin, end), prompt in zip(batch.turn_places, prompts, strict=True):
        own = row_TLk[place : place + end - begin].copy()
        shown = prompt.length - begin
        if shown and id(prompt) not in heads:
            # what is in front of a turn that goes on behind another is the turn before
            before = [found[-1].prompt_PLk, found[-1].written_NLk] if begin else [own[:0]]
            heads[id(prompt)] = np.concatenate([np.concatenate(before)[:begin], own[:shown]])
        found.append(TurnExperts(heads[id(prompt)], own[shown:]))
    return found
