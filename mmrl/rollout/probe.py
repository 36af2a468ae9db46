"""Does a rollout engine compute with the trainer's weights? A few prompts with fixed completions, scored by both after every sync.

Both score the bare distribution (temperature 1, no token excluded), so that what differs is weights, precision or kernels.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mmrl.data import LoadedSource
from mmrl.errors import ConfigError, DataError, MediaError
from mmrl.policy.encode import Prompt
from mmrl.policy.pack import PackItem, pack
from mmrl.policy.policy import Policy
from mmrl.rollout.weights import WeightSource

__all__ = ["PROBE_TOKENS", "Gap", "choose_prompts", "compare", "trainer_scores"]

PROBE_TOKENS = 16  # of the completion of each prompt
_LOOKED_AT = 24  # samples of a source that are tried


@dataclass(frozen=True)
class Gap:
    """|rollout engine - trainer| log-prob per token, in nats."""

    mean: float
    max: float


def choose_prompts(policy: Policy, sources: Sequence[LoadedSource], count: int) -> list[Prompt]:
    """At most `count` of the first prompts of the training data, one of them with a clip and one with a picture if there are any.

    Raises ConfigError when no prompt can be read.
    """
    found: list[Prompt] = []
    waiting = [(s, source.task) for source in sources for s in source.samples[:_LOOKED_AT]]
    waiting.sort(key=lambda one: -bool(one[0].videos) - bool(one[0].images))  # stable: the most kinds of media first
    while waiting and len(found) < count:
        shown = {v.kind for p in found for v in p.visuals}
        fresh = (i for i, (s, _) in enumerate(waiting)
                 if (s.videos and "video" not in shown) or (s.images and "image" not in shown))
        sample, task = waiting.pop(next(fresh, 0))
        try:
            found.append(policy.encoder(sample, task))
        except (MediaError, DataError):  # counted and reported where it is trained on
            continue
    if not found:
        raise ConfigError("none of the first training prompts can be read: engine.rollout vllm compares log-probs on some of them "
                          "after every sync; check data.train")
    return found


def trainer_scores(policy: Policy, source: WeightSource, items: Sequence[tuple[Prompt, tuple[int, ...]]]) -> list[list[float]]:
    """The trainer's log-probs of each completion. Collective: every process asks for as many items."""
    found = []
    for prompt, completion in items:
        batch = pack([PackItem(prompt, (completion,))]).to(policy.device)

        def forward(batch: Any = batch) -> tuple[torch.Tensor, ...]:
            with torch.no_grad(), policy.autocast():
                logits_NV = policy.logits(policy.hidden(batch).index_select(0, batch.source_N)).float()
                return (logits_NV.log_softmax(-1).gather(-1, batch.target_N[:, None])[:, 0],)

        found.append(source.run(forward)[0].tolist())
    return found


def compare(ours: Sequence[Sequence[float]], theirs: Sequence[Sequence[float]]) -> Gap:
    """The gap between two lists of scores; not finite where one of them is not."""
    gaps = [abs(a - b) for x, y in zip(ours, theirs, strict=True) for a, b in zip(x, y, strict=True)]
    total = sum(gaps)
    return Gap(total / len(gaps), max(gaps) if total == total else total)
