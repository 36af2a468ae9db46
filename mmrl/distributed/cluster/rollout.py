"""Rollout engines as Ray actors: copies of the policy that generate, each for a share of the prompts.

    engine = RemoteRollout(policy, cluster, config, actors=4)
    engine.generate(requests, settings)           # as PrefillOnceEngine(policy).generate

Weights go by content: when those that are trained have changed since they were last sent, they are put into Ray's object store
once and every actor reads them from there before it generates. Prompts carry references to their pictures and clips; the packed
pixels of each are put once and kept for later rollouts (least recently used first out). An actor that was lost is started anew,
gets the weights of now, and is asked for its share again.

Shares are consecutive prompts and depend on the requests and the number of actors alone, never on who is quick or lost: a run with
losses equals the undisturbed one, and a run with one actor the local one, bit for bit on a CPU (noise belongs to the request).
With several actors batches are others than locally, so log-probs agree to rounding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
import xxhash

from mmrl.config import DataConfig, ModelConfig, RunConfig
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
from mmrl.distributed.engines.build import stored_to_sample
from mmrl.policy.encode import Prompt
from mmrl.policy.loading import load_policy
from mmrl.policy.policy import Policy
from mmrl.rollout.engine import PrefillOnceEngine, Request, RolloutEngine, SamplingSettings
from mmrl.types import Turn

__all__ = ["RemoteRollout", "RolloutHost"]


@dataclass(frozen=True)
class _Weights:
    """Which weights to generate with: hash of their content, the policy's version, and where they lie (in a list, so that Ray does
    not fetch them for an actor that has them)."""

    digest: str
    version: int
    ref: list[Any]


class RolloutHost:
    """The Ray actor: a policy and its engine. `config`: the run's, as JSON values."""

    def __init__(self, config: Mapping[str, Any], threads: int) -> None:
        torch.set_num_threads(threads)
        self.policy = load_policy(
            ModelConfig(**config["model"]), DataConfig(**config["data"]), stored=config["stored"]
        )
        self.engine = PrefillOnceEngine(self.policy, graphs=config["cuda_graphs"])
        self._trained = dict(_sampled(self.policy))
        self._digest = ""

    def generate(
        self,
        requests: Sequence[Request],
        settings: SamplingSettings,
        weights: _Weights,
        media: Mapping[str, Any],
    ) -> list[list[Turn]]:
        """See RolloutEngine.generate. `media`: references to packed pixels by key of their visual."""
        import ray

        if weights.digest != self._digest:
            self._load(ray.get(weights.ref[0]))
            self._digest = weights.digest
        self.policy.version = weights.version
        packed = tensors_of(media)
        filled: dict[int, Prompt] = {}
        for request in requests:
            if id(request.prompt) not in filled:
                visuals = tuple(replace(v, packed=packed[v.key]) for v in request.prompt.visuals)
                filled[id(request.prompt)] = replace(request.prompt, visuals=visuals)
        return self.engine.generate(
            [replace(r, prompt=filled[id(r.prompt)]) for r in requests], settings
        )

    def _load(self, arrays: Mapping[str, Array]) -> None:
        if set(arrays) != set(self._trained):
            raise RuntimeError(
                f"expected weights of {sorted(self._trained)[:3]} ..., found {sorted(arrays)[:3]} ..."
            )
        with torch.no_grad():
            for name, array in arrays.items():
                self._trained[name].copy_(array.tensor())


class RemoteRollout(RolloutEngine):
    """Generates with `actors` actors of `cluster` that follow the weights of `policy`. Raises ClusterError."""

    def __init__(self, policy: Policy, cluster: Cluster, config: RunConfig, *, actors: int) -> None:
        self.policy, self.cluster, self._ray = policy, cluster, cluster.ray
        settings = config.model_dump(mode="json", include={"model", "data"})
        settings["model"]["device"] = (
            "cuda" if cluster.config.gpus_per_rollout_actor else policy.device.type
        )
        settings["cuda_graphs"] = config.engine.cuda_graphs
        settings["stored"] = stored_to_sample(config)
        settings["data"]["cache"]["dir"] = None  # pixels come with the requests
        settings["data"]["workers"] = 0
        settings["model"]["path"] = absolute(settings["model"]["path"])
        threads = actor_threads(cluster.config.cpus_per_rollout_actor)
        self.group = ActorGroup(cluster, "rollouts", actors, RolloutHost, settings, threads)
        self._weights: _Weights | None = None
        self._media = MediaStore(cluster.ray)
        self.sent = 0  # how often weights were put

    def generate(self, requests: Sequence[Request], settings: SamplingSettings) -> list[list[Turn]]:
        """See RolloutEngine.generate."""
        weights = self._publish()
        asked: list[tuple[Any, ...]] = []
        costs = [r.prompt.length + r.count * settings.max_new_tokens for r in requests]
        for part in shares(costs, len(self.group.actors)):
            portable, media = self._portable([requests[i] for i in part])
            asked.append((portable, settings, weights, media))
        found = self.group.call("generate", asked)
        self._media.trim()
        return [completions for part in found for completions in part]

    # weights

    def _publish(self) -> _Weights:
        """The weights of now, put into the object store if they are new."""
        arrays = {name: Array.of(parameter) for name, parameter in _sampled(self.policy)}
        digest = xxhash.xxh3_128()
        for name, array in arrays.items():
            digest.update(f"{name}:{array.dtype}:{array.shape};".encode())
            digest.update(array.data.data)
        if self._weights is None or self._weights.digest != digest.hexdigest():
            self._weights = None  # lets the old ones go before the new ones come
            self._weights = _Weights(
                digest.hexdigest(), self.policy.version, [self._ray.put(arrays)]
            )
            self.sent += 1
        return replace(self._weights, version=self.policy.version)

    # media

    def _portable(self, requests: Sequence[Request]) -> tuple[list[Request], dict[str, Any]]:
        """The requests with visuals that carry their pixels elsewhere, and the references to these by key."""
        from mmrl.video.references import Frame

        media: dict[str, Any] = {}
        prompts: dict[int, Prompt] = {}
        for request in requests:
            # neighbours of one prompt stay so: they are prefilled once
            if id(request.prompt) in prompts:
                continue
            visuals = []
            for visual in request.prompt.visuals:
                key = f"{visual.kind}-{visual.digest}"
                media[key] = self._media.put(
                    key, None if key in self._media else self.policy.encoder.visuals.packed(visual)
                )
                held = {
                    f.name: getattr(visual, f.name)
                    for f in fields(visual)
                    if f.name not in ("key", "packed")
                }
                visuals.append(Frame(**held, key=key))
            prompts[id(request.prompt)] = replace(request.prompt, visuals=tuple(visuals))
        return [replace(r, prompt=prompts[id(r.prompt)]) for r in requests], media

    def close(self) -> None:
        """End the actors and let their objects go."""
        self.group.close()
        self._weights = None
        self._media.clear()


def _sampled(policy: Policy) -> list[tuple[str, Any]]:
    """The trained parameters that answers depend on: a critic's stay where it is trained."""
    return [
        (name, parameter)
        for name, parameter in policy.model.named_parameters()
        if parameter.requires_grad
    ]
