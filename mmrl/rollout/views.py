"""Changed views of a prompt: shuffled frames, mirrored or masked media, the question alone.

The tokens stay (but for the question alone), and so do their positions and any times written beside frames; only what the
towers are shown changes; masked sounds are silent. Cached pixels are indexed, nothing is decoded again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from mmrl.policy.encode import Encoder, Prompt
from mmrl.task import Task
from mmrl.types import Sample

__all__ = ["VIEWS", "changed_prompt", "shuffled_order"]

VIEWS = ("shuffle", "mirror", "mask", "question_only")


def shuffled_order(count: int, rng: np.random.Generator, unit: int = 1) -> tuple[int, ...] | None:
    """A permutation of `count` frames that is not the identity, None where there is none.

    Frames stay together in runs of `unit` (2: a tower's pairs, whose features are then reused); frames behind the last whole
    run stay last.
    """
    runs = count // unit
    if runs < 2:
        return None
    order = list(range(runs))
    while order == sorted(order):
        order = [int(i) for i in rng.permutation(runs)]
    return (*(run * unit + i for run in order for i in range(unit)), *range(runs * unit, count))


def changed_prompt(
    encoder: Encoder,
    sample: Sample,
    task: Task,
    prompt: Prompt,
    kind: str,
    seed: Sequence[int] = (),
    unit: int = 1,
) -> Prompt | None:
    """`prompt` in another view, or None where the view changes nothing: no clip of two runs of frames to shuffle, no media.

    `seed` draws the permutation of `shuffle`; `unit` 2 shuffles pairs of frames, whose features are then reused.
    """
    assert kind in VIEWS, kind
    if not prompt.visuals:
        return None
    if kind == "question_only":
        return encoder.without_media(sample, task)
    if kind != "shuffle":
        # a mirror leaves sounds as they are
        shown = {v for v in prompt.visuals if kind == "mask" or v.kind != "audio"}
        if not shown:
            return None
        changed = [encoder.visuals.changed(v, kind) if v in shown else v for v in prompt.visuals]
        return replace(prompt, visuals=tuple(changed))
    rng = np.random.default_rng(tuple(seed))
    changed = []
    for visual in prompt.visuals:
        order = shuffled_order(visual.frames, rng, unit) if visual.kind == "video" else None
        changed.append(
            visual if order is None else encoder.visuals.changed(visual, "shuffle", order)
        )
    return replace(prompt, visuals=tuple(changed)) if changed != list(prompt.visuals) else None
