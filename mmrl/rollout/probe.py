"""Does a rollout engine compute with the trainer's weights? A few prompts with fixed completions, scored by both after every sync.

Both score the bare distribution (temperature 1, no token excluded), so that what differs is weights, precision or kernels.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mmrl.data.sources import LoadedSource
from mmrl.errors import ConfigError, DataError, MediaError
from mmrl.policy.encode import Prompt
from mmrl.policy.pack import PackItem, pack
from mmrl.policy.policy import Policy
from mmrl.rollout.weights import WeightSource

__all__ = ["PROBE_TOKENS", "Gap", "choose_prompts", "compare", "trainer_scores"]

PROBE_TOKENS = 16  # of the completion of each prompt
_LOOKED_AT = 24  # samples of a source that are tried
_READ = 4  # of them with pictures, with clips, with both, with neither: reading decodes
_LONG = 2048  # tokens; vLLM computes the logits of all of them, so that longer prompts are taken only for media that no other shows


@dataclass(frozen=True)
class Gap:
    """|rollout engine - trainer| log-prob per token, in nats."""

    mean: float
    max: float


def choose_prompts(policy: Policy, sources: Sequence[LoadedSource], count: int) -> list[Prompt]:
    """At most `count` of the first prompts of the training data, one of them with a clip and one with a picture if there are any;
    of the first with the same kinds of media the shortest.

    Raises ConfigError when no prompt can be read.
    """
    waiting: list[Prompt] = []
    read: Counter[tuple[bool, bool, bool]] = Counter()
    for sample, task in (
        (s, source.task) for source in sources for s in source.samples[:_LOOKED_AT]
    ):
        shape = (bool(sample.images), bool(sample.videos), bool(sample.audios))
        if read[shape] >= max(_READ, count):
            continue
        try:
            waiting.append(policy.encoder(sample, task))
        except (MediaError, DataError):  # counted and reported where it is trained on
            continue
        read[shape] += 1
    waiting.sort(key=lambda p: (p.length > _LONG, -len(_kinds(p)), p.length))
    found: list[Prompt] = []
    while waiting and len(found) < count:
        shown = {kind for p in found for kind in _kinds(p)}
        fresh = next((i for i, p in enumerate(waiting) if _kinds(p) - shown), None)
        if fresh is None and found and waiting[0].length > _LONG:
            break
        found.append(waiting.pop(fresh or 0))
    if not found:
        raise ConfigError(
            "none of the first training prompts can be read: engine.rollout vllm compares log-probs on some of them "
            "after every sync; check data.train"
        )
    return found


def _kinds(prompt: Prompt) -> set[str]:
    return {v.kind for v in prompt.visuals}


def trainer_scores(
    policy: Policy, source: WeightSource, items: Sequence[tuple[Prompt, tuple[int, ...]]]
) -> list[list[float]]:
    """The trainer's log-probs of each completion. Collective: every process asks for as many items."""
    found = []
    for prompt, completion in items:
        batch = pack([PackItem(prompt, (completion,))]).to(policy.device)

        def forward(batch: Any = batch) -> tuple[torch.Tensor, ...]:
            with torch.no_grad(), policy.autocast():
                logits_NV = policy.logits(
                    policy.hidden(batch).index_select(0, batch.source_N)
                ).float()
                return (logits_NV.log_softmax(-1).gather(-1, batch.target_N[:, None])[:, 0],)

        found.append(source.run(forward)[0].tolist())
    return found


def compare(ours: Sequence[Sequence[float]], theirs: Sequence[Sequence[float]]) -> Gap:
    """The gap between two lists of scores; not finite where one of them is not."""
    gaps = [
        abs(a - b) for x, y in zip(ours, theirs, strict=True) for a, b in zip(x, y, strict=True)
    ]
    total = sum(gaps)
    return Gap(total / len(gaps), max(gaps) if total == total else total)
