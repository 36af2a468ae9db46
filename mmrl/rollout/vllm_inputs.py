"""What vLLM is asked: prompts with the very tensors the trainer reads, so that nothing is decoded or processed twice.

A `Prompt` holds token ids that are already expanded and references to its media. Here it becomes a `WirePrompt`, plain numbers and
one `WireMedia` per picture or clip, which a server can be sent and from which vLLM's engine input is built without its processor:
pixels where the vision tower learns, the cached features of a frozen one, under the hash of our own visual cache.

Rotary positions go along: vLLM's own differ from those of transformers behind a clip that lasts longer than its frames are wide.

Legend: P prompt tokens, n patches, D values of a patch, m media tokens, H hidden width (times 1 + deepstack layers, Qwen3-VL).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from mmrl.errors import RolloutError
from mmrl.policy.encode import Prompt
from mmrl.policy.families import ModelFamily
from mmrl.policy.policy import Policy

__all__ = [
    "MissingMedia",
    "WireMedia",
    "WirePrompt",
    "WireSampling",
    "engine_input",
    "media_hash",
    "sample_seed",
    "wire_prompt",
]


@dataclass(frozen=True)
class WireMedia:
    """One picture or clip of a prompt: where its tokens are, and its tensor (n, D) pixels or (m, H) features.

    `offset` and `length` span its tokens with the text between them (Qwen3-VL writes the seconds of a clip's frames there);
    `tensor` is None where the other side is known to have the one with this `hash`.
    """

    kind: str  # image or video
    hash: str
    form: str  # pixels or features
    grid_thw: tuple[int, int, int]
    offset: int
    length: int
    tensor: torch.Tensor | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True)
class WirePrompt:
    """A prompt as plain numbers: ids (P), which are media (1 image, 2 video), rotary positions, the trainer's hash of it."""

    ids: tuple[int, ...]
    kinds: tuple[int, ...]
    positions_3P: torch.Tensor = field(compare=False, repr=False)
    fingerprint: str
    media: tuple[WireMedia, ...] = ()


@dataclass(frozen=True)
class WireSampling:
    """How `count` completions of one prompt are drawn; completion i has the seed `seed` + i. Temperature 0 is greedy."""

    count: int
    seed: int | None
    temperature: float
    max_tokens: int
    stop_ids: tuple[int, ...]
    banned_ids: tuple[int, ...]


class MissingMedia(RolloutError):
    """A rollout server lacks the tensors of these media hashes: they are to be sent again."""

    def __init__(self, hashes: Sequence[str]) -> None:
        super().__init__(f"the rollout server lacks the tensors of {len(hashes)} pictures or clips")
        self.hashes = tuple(hashes)


def sample_seed(key: Sequence[int]) -> int:
    """A 62-bit seed of a request's key; the completions of a request add their number to it."""
    return (
        int.from_bytes(
            hashlib.blake2b(repr(tuple(map(int, key))).encode(), digest_size=8).digest(), "big"
        )
        >> 2
    )


def media_hash(identity: Any, tower: str | None) -> str:
    """32 hex digits of a visual's identity, as fingerprints cover it, and, for features, of the tower they come from."""
    return hashlib.blake2b(repr((identity, tower)).encode(), digest_size=16).hexdigest()


def wire_prompt(
    policy: Policy, prompt: Prompt, wanted: Callable[[str], bool] = lambda hash: True
) -> WirePrompt:
    """`prompt` with the tensors of its media, except those whose hash is not `wanted`. Raises MediaError."""
    places = prompt.kinds_P.nonzero()[:, 0].tolist()
    cache, tower = policy.encoder.visuals, policy.tower()
    media = []
    for visual in prompt.visuals:
        mine, places = places[: visual.tokens], places[visual.tokens :]
        digest = media_hash(visual.identity, None if tower is None else tower.fingerprint)
        offset = mine[0]
        # frames apart: vLLM looks for the opening token of each
        if visual.kind == "video" and mine[-1] - mine[0] >= len(mine):
            offset -= 1
        tensor = None
        if wanted(digest):
            if tower is None:
                tensor = cache.pixels(visual)
            else:
                (features,) = cache.features([visual], tower)
                tensor = torch.cat([features.main, *features.deep], -1).cpu()
        media.append(
            WireMedia(
                visual.kind,
                digest,
                "pixels" if tower is None else "features",
                visual.grid_thw,
                offset,
                mine[-1] + 1 - offset,
                tensor,
            )
        )
    assert not places, "media tokens beyond those of the prompt's visuals"
    return WirePrompt(
        tuple(prompt.ids_P.tolist()),
        tuple(prompt.kinds_P.tolist()),
        prompt.positions_3P,
        prompt.fingerprint,
        tuple(media),
    )


def _item(media: WireMedia, family: ModelFamily, config: Any) -> tuple[str, Any]:
    """What vLLM takes a picture or clip for, and the arguments of its model for it."""
    from vllm.multimodal.inputs import (
        MultiModalBatchedField,
        MultiModalFieldElem,
        MultiModalFlatField,
        MultiModalKwargsItem,
    )

    assert media.tensor is not None
    joins: dict[str, Any] = {
        "rows": MultiModalFlatField(slices=[], dim=0),
        "each": MultiModalBatchedField(),
        "host": MultiModalBatchedField(keep_on_cpu=True),
    }
    if media.form == "features":
        modality, given = family.vllm_features(media.kind, media.tensor, media.grid_thw)
    else:
        modality, given = family.vllm_input(config, media.kind, media.tensor, media.grid_thw)
    fields = {name: MultiModalFieldElem(g.tensor, joins[g.join]) for name, g in given.items()}
    return modality, MultiModalKwargsItem(fields)


def engine_input(
    prompt: WirePrompt, family: ModelFamily, config: Any, extra: Sequence[int] = ()
) -> Any:
    """vLLM's input for `prompt`, with the tokens `extra` behind it; `config` is that of vLLM's model.

    Its prefix cache is told to share nothing between prompts of different fingerprints: equal tokens and pictures may stand at
    other rotary positions.
    """
    from vllm.inputs import mm_input, tokens_input
    from vllm.multimodal.inputs import MultiModalKwargsItems, PlaceholderRange

    ids = [*prompt.ids, *extra]
    if not prompt.media:
        return tokens_input(ids, cache_salt=prompt.fingerprint)
    items: dict[str, list[Any]] = {}
    hashes: dict[str, list[str]] = {}
    places: dict[str, list[Any]] = {}
    for media in prompt.media:
        kinds = torch.tensor(prompt.kinds[media.offset : media.offset + media.length]) > 0
        modality, item = _item(media, family, config)
        items.setdefault(modality, []).append(item)
        hashes.setdefault(modality, []).append(media.hash)
        places.setdefault(modality, []).append(
            PlaceholderRange(
                offset=media.offset,
                length=media.length,
                is_embed=None if bool(kinds.all()) else kinds,
            )
        )
    return mm_input(
        ids, MultiModalKwargsItems(items), hashes, places, cache_salt=prompt.fingerprint
    )
