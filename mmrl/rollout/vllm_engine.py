"""Rollouts by vLLM: the trainer's prompts in, completions with the log-probs of the distribution sampled from out.

What holds for the built-in engine holds here: the same tensors, the same rotary positions, media tokens impossible, temperature in
the log-probs, noise that belongs to a request's key and the completion's number. vLLM has a copy of the weights: `publish` sends
those that changed, then both sides compare digests of all weights and score a few fixed completions: a single other bit, or a gap
beyond rounding, ends the run.

Three things differ. Log-probs are vLLM's own (its kernels round differently, see engine.vllm.correction). Greedy completions carry
those at temperature 1. rollout.top_p and top_k are refused: vLLM reports the log-probs of the truncated distribution, which the
trainer does not compute.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch

from mmrl.config import VLLMConfig
from mmrl.config.rollout_engine import VLLM_TEMPERATURES
from mmrl.data.sources import LoadedSource
from mmrl.distributed.world import World
from mmrl.errors import ConfigError, MMRLError, RolloutError, WeightSyncError
from mmrl.policy.encode import Prompt
from mmrl.policy.policy import Policy
from mmrl.rollout.digest import differing
from mmrl.rollout.engine import Request, RolloutEngine, SamplingSettings
from mmrl.rollout.probe import PROBE_TOKENS, Gap, choose_prompts, compare, trainer_scores
from mmrl.rollout.vllm_inputs import (
    MissingMedia,
    WirePrompt,
    WireSampling,
    sample_seed,
    wire_prompt,
)
from mmrl.rollout.weights import SyncPlan, WeightSource
from mmrl.types import StopReason, Turn

__all__ = ["Answering", "VLLMEngine", "check_sampling"]

_FP32, _BF16 = 1e-3, 0.05  # tolerances of the probe's mean gap
# in fp32 rounding is so even that a gap so many times the first one means a stale weight
_LEAST, _TIMES = 1e-5, 30.0


class Answering(Protocol):
    """A vLLM engine in this process (VLLMBackend), behind a server (VLLMClient), or several as Ray actors (RemoteVLLM)."""

    shared: bool
    """All training processes use the same one: the main process sends the weights."""

    loaded: str
    """Name of the weights sent last, where others may replace them: the main process's is set on all."""

    @property
    def dropped(self) -> bool:
        """Whether it has no weights (asleep, or one of several servers started again): the next sync sends all of them."""

    @property
    def counts(self) -> Mapping[str, float]:
        """What is logged of several servers, below train/rollout_servers."""

    def wanted(self, hash: str) -> bool:
        """Whether the tensor of this media hash must come with a prompt."""

    def generate(
        self, asked: Sequence[tuple[WirePrompt, WireSampling]]
    ) -> list[list[tuple[list[int], list[float]]]]:
        """See VLLMBackend.generate."""

    def score(self, asked: Sequence[tuple[WirePrompt, Sequence[int]]]) -> list[list[float]]:
        """See VLLMBackend.score; where there are several engines the scores of each, one engine after the other."""

    def load(self, weights: Any) -> list[dict[str, int]]:
        """See VLLMBackend.load."""

    def sleep(self) -> None:
        """See VLLMBackend.sleep."""

    def close(self) -> None:
        """See VLLMBackend.close."""


def check_sampling(settings: SamplingSettings) -> None:
    """Raises ConfigError for sampling that vLLM cannot give the trainer's log-probs of."""
    if settings.top_p < 1 or settings.top_k > 0:
        raise ConfigError(
            f"expected rollout.top_p 1 and top_k 0 with engine.rollout vllm, found {settings.top_p:g} and "
            f"{settings.top_k}: vLLM would report log-probs of the truncated distribution; remove them, or use "
            "engine.rollout: own"
        )
    if settings.routed_experts:
        raise ConfigError(
            "expected algorithm.router_replay.mode disabled or R2 with engine.rollout vllm, found R3, for which vLLM would have to "
            "return routed experts; set mode: R2, or use engine.rollout: own"
        )
    low, high = VLLM_TEMPERATURES
    if not low <= settings.temperature <= high:
        raise ConfigError(
            f"expected rollout.temperature within [{low:g}, {high:g}] with engine.rollout vllm, found "
            f"{settings.temperature:g}"
        )


def _largest(values: Iterable[float]) -> float:
    """NaN is larger than all."""
    return max(values, key=lambda x: (x != x, x))


class VLLMEngine(RolloutEngine):
    """See the module. `policy` is what trains, `actor` its full replica where the policy is sharded (else the same)."""

    def __init__(
        self,
        settings: VLLMConfig,
        policy: Policy,
        actor: Policy,
        world: World,
        backend: Answering,
        sources: Sequence[LoadedSource],
        seed: int = 0,
    ) -> None:
        self.settings, self.policy, self.actor, self.world, self.backend = (
            settings,
            policy,
            actor,
            world,
            backend,
        )
        self.plan = SyncPlan(policy, digests=settings.compare_weights)
        self.tolerance = settings.tolerance or (_FP32 if policy.autocast_dtype is None else _BF16)
        self.last_gap: Gap | None = None
        self._sources, self._seed = sources, seed
        self._probes: list[tuple[Prompt, tuple[int, ...]]] = []
        self._sent = False  # whether all weights have been sent once
        self._closed = False

    # sampling

    def generate(self, requests: Sequence[Request], settings: SamplingSettings) -> list[list[Turn]]:
        """See RolloutEngine.generate. Raises RolloutError, ConfigError, MediaError and MismatchError."""
        check_sampling(settings)
        found = self._asked(
            lambda: self.backend.generate(
                [(self._wire(r.prompt), self._sampling(r, settings)) for r in requests]
            )
        )
        return [[self._completion(ids, logprobs) for ids, logprobs in group] for group in found]

    @staticmethod
    def _asked(ask: Callable[[], Any]) -> Any:
        """What `ask` finds; asked once more where a server has forgotten media."""
        try:
            return ask()
        except MissingMedia:
            return ask()

    def _wire(self, prompt: Prompt) -> WirePrompt:
        return wire_prompt(self.actor, prompt, self.backend.wanted)

    def _sampling(self, request: Request, settings: SamplingSettings) -> WireSampling:
        return WireSampling(
            request.count,
            None if request.greedy else sample_seed(request.key),
            0.0 if request.greedy else settings.temperature,
            settings.max_new_tokens,
            tuple(self.actor.eos_ids),
            tuple(self.actor.banned.tolist()),
        )

    def _completion(self, ids: list[int], logprobs: list[float]) -> Turn:
        ended = ids[-1] in self.actor.eos_ids
        text = self.actor.processor.tokenizer.decode(
            ids[:-1] if ended else ids,
            skip_special_tokens=False,
            clean_up_tokenization_spaces=False,
        )
        return Turn(
            tuple(ids),
            text,
            tuple(logprobs),
            StopReason.EOS if ended else StopReason.LENGTH,
            self.actor.version,
        )

    # weights

    def publish(self, source: WeightSource) -> dict[str, float]:
        """See RolloutEngine.publish: send what changed, then compare the digests and the probes of all processes."""
        began = time.perf_counter()
        first, self._sent = not self._sent, False  # after a failure everything goes again
        everything = first or self.backend.dropped
        held = self._together(lambda: self._send(self.plan.weights(source, everything=everything)))
        if self.settings.compare_weights:
            self._compare(held)
        self._sent = True
        if self.backend.shared:
            self.backend.loaded = self.world.gather([self.backend.loaded])[0]
        gap = self.last_gap = self._probe(source)
        if not gap.mean <= self.tolerance:
            raise WeightSyncError(
                f"vLLM does not compute with the trainer's weights after a sync: log-probs of the probe differ by {gap.mean:.3g} "
                f"per token on average, {gap.max:.3g} at most (limit engine.vllm.tolerance = {self.tolerance:g}). A tensor did not "
                "arrive, or precision and kernels differ by more than rounding: compare engine.rollout: own; raise the tolerance "
                "if train/sync/gap has been near it from the first step"
            )
        if first and self.settings.tolerance is None and self.policy.autocast_dtype is None:
            self.tolerance = min(self.tolerance, max(_LEAST, _TIMES * gap.mean))
        return {
            "train/sync/gap": gap.mean,
            "train/sync/gap_max": gap.max,
            "time/sync": time.perf_counter() - began,
            **self._counted(),
        }

    def _counted(self) -> dict[str, float]:
        """Of the servers: those that every process reaches, and the prompts asked again by any."""
        found = self.world.gather([dict(self.backend.counts)])
        return {
            f"train/rollout_servers/{name}": (min if name == "up" else sum)(c[name] for c in found)
            for name in found[0]
        }

    def _send(self, weights: Iterator[tuple[str, torch.Tensor]]) -> list[dict[str, int]]:
        """Load them, or see them pass where the main process does. Goes to their end in any case: gathering them is collective."""
        try:
            return (
                self.backend.load(weights) if not self.backend.shared or self.world.is_main else []
            )
        finally:
            for _ in weights:
                pass

    def _compare(self, held: Sequence[dict[str, int]]) -> None:
        """Raises WeightSyncError, on all processes, where an engine of one of them does not hold the trainer's weights."""
        expected = self.plan.held
        if not self.world.gather(list(held)):
            raise ConfigError(
                "engine.vllm.compare_weights: expected the rollout server to compare weights as this run does, found "
                "one started without it; start it with the run's configuration"
            )
        wrong = sorted(
            set(self.world.gather([name for one in held for name in differing(expected, one)]))
        )
        if wrong:
            shown = ", ".join(wrong[:6]) + (", ..." if len(wrong) > 6 else "")
            raise WeightSyncError(
                f"vLLM does not hold the trainer's weights after a sync: expected the same bits ({self.plan.dtype}) everywhere, "
                f"found others in {len(wrong)} of {len(expected)} blocks ({shown}), which were not sent or not taken over. Resume "
                "the run: its first sync sends all weights. If that one stops too, this vLLM keeps weights in another form: set "
                "engine.vllm.compare_weights: false (the probe still compares log-probs), or engine.rollout: own"
            )

    def _together(self, work: Callable[[], Any]) -> Any:
        """What `work`, which may fail on one process alone, finds; all know how it ended before any goes on to a collective.

        Raises its error here, and RolloutError on the processes where it went well.
        """
        found: Any = None
        failed: Exception | None = None
        try:
            found = work()
        except Exception as error:
            failed = error
        texts = self.world.gather(
            [None if failed is None else f"{type(failed).__name__}: {failed}"]
        )
        if isinstance(failed, MMRLError):
            raise failed
        rank = next((n for n, text in enumerate(texts) if text is not None), None)
        if rank is not None:
            raise RolloutError(
                f"vLLM failed next to process {rank} of {self.world.size}: {texts[rank]}"
            ) from failed
        return found

    def _probe(self, source: WeightSource) -> Gap:
        theirs = self._together(self._their_scores)
        ours = trainer_scores(self.policy, source, self._probes)
        P = len(ours)
        gaps = self.world.gather(
            [compare(ours, theirs[first : first + P]) for first in range(0, len(theirs), P)]
        )
        return Gap(_largest(g.mean for g in gaps), _largest(g.max for g in gaps))

    def _their_scores(self) -> list[list[float]]:
        if not self._probes:
            prompts = choose_prompts(self.actor, self._sources, self.settings.probe_prompts)
            drawn = [
                WireSampling(
                    1,
                    sample_seed((self._seed, 29, n)),
                    1.0,
                    PROBE_TOKENS,
                    (),
                    tuple(self.actor.banned.tolist()),
                )
                for n in range(len(prompts))
            ]
            written = self._asked(
                lambda: self.backend.generate(
                    [(self._wire(p), s) for p, s in zip(prompts, drawn, strict=True)]
                )
            )
            self._probes = [
                (p, tuple(group[0][0])) for p, group in zip(prompts, written, strict=True)
            ]
        return self._asked(
            lambda: self.backend.score(
                [(self._wire(p), completion) for p, completion in self._probes]
            )
        )

    def sleep(self) -> None:
        """See RolloutEngine.sleep: vLLM's sleep mode, on a GPU that training shares."""
        if not self.backend.shared:
            self.backend.sleep()

    def close(self) -> None:
        """See RolloutEngine.close."""
        if not self._closed:
            self._closed = True
            self.backend.close()
