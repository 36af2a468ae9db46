"""vLLM engines as Ray actors: engine.rollout vllm with engine.ray.rollout_actors.

    backend = RemoteVLLM(VLLMSettings(model="Qwen/Qwen2.5-VL-3B-Instruct"), actors=4)     # for VLLMEngine, as VLLMBackend
    backend.start(cluster)
    backend.load(weights); backend.generate([(prompt, sampling)])

Every tensor of the weights is put into Ray's object store once per sync, and read there by every actor; those that a sync leaves
out stay from an earlier one. An actor that was lost is started anew with the weights of now, compares their digests with those that
the trainer compared with its own (see mmrl.rollout.digest), and is asked again. Media go by reference, each once (least recently
used first out). Prompts are dealt in shares that depend on them and the number of actors alone; noise belongs to the request, so
that who answers changes log-probs by rounding only.

In a run of several training processes each has actors of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from mmrl.distributed.cluster.group import ActorGroup
from mmrl.distributed.cluster.objects import (
    Array,
    MediaStore,
    absolute,
    actor_threads,
    shares,
    tensors_of,
)
from mmrl.distributed.cluster.session import Cluster
from mmrl.errors import WeightSyncError
from mmrl.rollout.digest import differing
from mmrl.rollout.vllm_backend import VLLMBackend, VLLMSettings, Written
from mmrl.rollout.vllm_inputs import WirePrompt, WireSampling

__all__ = ["RemoteVLLM", "VLLMHost"]

# tensors that an actor fetches together; other nodes than the trainer's hold them meanwhile
_AT_ONCE = 16


@dataclass(frozen=True)
class _Table:
    """A sync: the names it sent on top of the one before it (`base`), and references to all weights as they are after it."""

    base: int
    sent: tuple[str, ...]
    refs: Mapping[str, Any]


@dataclass(frozen=True)
class _Weights:
    """Which weights to answer with: number of their sync, where its _Table lies (in a list, so that Ray does not fetch it for an
    actor that has them), and the digests of whoever has them; None while they are sent."""

    sync: int
    ref: list[Any]
    digests: dict[str, int] | None = None


class VLLMHost:
    """The Ray actor: one vLLM engine. Each call names the weights to answer with; `media`: references by hash."""

    def __init__(self, settings: VLLMSettings, threads: int) -> None:
        torch.set_num_threads(threads)
        self.backend = VLLMBackend(settings)
        self._sync = 0  # whose weights the engine has; none, or half of some: 0
        self._digests: dict[str, int] = {}

    def load(self, weights: _Weights) -> dict[str, int]:
        """See VLLMBackend.load, whose digests these are; reads nothing if it has them. Raises WeightSyncError for others than
        expected."""
        if weights.sync != self._sync:
            import ray

            table = ray.get(weights.ref[0])
            names = table.sent if table.base == self._sync else table.refs
            self._sync = 0
            self._digests = next(
                iter(self.backend.load(_fetched({name: table.refs[name] for name in names}))), {}
            )
            if wrong := differing(weights.digests or self._digests, self._digests):
                raise WeightSyncError(
                    f"a rollout actor started in place of a lost one does not hold its weights: expected the same digests, found "
                    f"others in {len(wrong)} blocks ({', '.join(wrong[:6])}). Does its node hold another version of vLLM?"
                )
            self._sync = weights.sync
        return self._digests

    def generate(
        self,
        asked: Sequence[tuple[WirePrompt, WireSampling]],
        weights: _Weights,
        media: Mapping[str, Any],
    ) -> list[list[Written]]:
        """See VLLMBackend.generate."""
        self.load(weights)
        return self.backend.generate(_filled(asked, media))

    def score(
        self,
        asked: Sequence[tuple[WirePrompt, Sequence[int]]],
        weights: _Weights,
        media: Mapping[str, Any],
    ) -> list[list[float]]:
        """See VLLMBackend.score."""
        self.load(weights)
        return self.backend.score(_filled(asked, media))


def _fetched(refs: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    names = list(refs)
    for first in range(0, len(names), _AT_ONCE):
        yield from tensors_of(
            {name: refs[name] for name in names[first : first + _AT_ONCE]}
        ).items()


def _filled(
    asked: Sequence[tuple[WirePrompt, Any]], media: Mapping[str, Any]
) -> list[tuple[WirePrompt, Any]]:
    """Prompts with the tensors of their media."""
    tensors = tensors_of(media)
    return [
        (
            replace(prompt, media=tuple(replace(m, tensor=tensors[m.hash]) for m in prompt.media)),
            rest,
        )
        for prompt, rest in asked
    ]


class RemoteVLLM:
    """See the module. Raises what VLLMBackend does, and ClusterError. Not for several threads at once."""

    shared = False
    loaded = ""  # as VLLMBackend's: nobody else can replace the weights
    counts: ClassVar[dict[str, float]] = {}
    dropped = False  # the actors do not sleep

    def __init__(self, settings: VLLMSettings, actors: int) -> None:
        # their GPUs do not train meanwhile
        self.settings = replace(settings, model=absolute(settings.model), sleep=False)
        self.actors = actors
        self.group: ActorGroup | None = None
        self._held: dict[str, Any] = {}  # references to the weights of now, by name
        self._syncs = 0
        self._weights: _Weights | None = None  # None: none, or half of some

    def start(self, cluster: Cluster) -> None:
        """Start the actors; returns at once, the first answer waits for them."""
        self._ray, self._media = cluster.ray, MediaStore(cluster.ray)
        threads = actor_threads(cluster.config.cpus_per_rollout_actor)
        self.group = ActorGroup(cluster, "rollouts", self.actors, VLLMHost, self.settings, threads)

    def wanted(self, hash: str) -> bool:
        """Whether the object store lacks the tensor of this media hash."""
        return hash not in self._media

    # questions

    def generate(self, asked: Sequence[tuple[WirePrompt, WireSampling]]) -> list[list[Written]]:
        """See VLLMBackend.generate."""
        parts = shares(
            [len(prompt.ids) + s.count * s.max_tokens for prompt, s in asked], self.actors
        )
        return self._asked("generate", [self._portable([asked[i] for i in part]) for part in parts])

    def score(self, asked: Sequence[tuple[WirePrompt, Sequence[int]]]) -> list[list[float]]:
        """See VLLMBackend.score: the answers of every actor, one actor after the other."""
        return self._asked("score", [self._portable(asked)] * self.actors)

    def _asked(self, method: str, questions: Sequence[tuple[Any, ...]]) -> list[Any]:
        found = self._call(method, questions)
        self._media.trim()
        return [answer for answers in found for answer in answers]

    def _call(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        assert self.group is not None, "start comes first"
        return self.group.call(method, arguments)

    def _portable(self, asked: Sequence[tuple[WirePrompt, Any]]) -> tuple[Any, ...]:
        """Arguments of a question: prompts without tensors, the weights, references to media."""
        assert self._weights is not None, "weights come first"
        media: dict[str, Any] = {}
        for item in (m for prompt, _ in asked for m in prompt.media):
            media[item.hash] = self._media.put(item.hash, item.tensor)
        bare = [
            (replace(prompt, media=tuple(replace(m, tensor=None) for m in prompt.media)), rest)
            for prompt, rest in asked
        ]
        return bare, self._weights, media

    # weights

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> list[dict[str, int]]:
        """See VLLMBackend.load; a dict of digests per actor. All weights the first time and after a failure; later those that
        differ."""
        base, self._syncs, self._weights = self._syncs, self._syncs + 1, None
        sent: list[str] = []
        last: tuple[Any, Any] = None, None
        for name, tensor in weights:
            self._held.pop(name, None)  # lets the old one go before the new one comes
            if tensor is not last[0]:  # tied embeddings come twice
                last = tensor, self._ray.put(Array.of(tensor))
            self._held[name] = last[1]
            sent.append(name)
        now = _Weights(self._syncs, [self._ray.put(_Table(base, tuple(sent), self._held))])
        digests: list[dict[str, int]] = self._call("load", [(now,)] * self.actors)
        self._weights = replace(now, digests=digests[0])
        return digests

    def sleep(self) -> None:
        """The actors' GPUs are their own."""

    def close(self) -> None:
        """End the actors and let their objects go."""
        if self.group is not None:
            self.group.close()
            self._held, self._weights = {}, None
            self._media.clear()
