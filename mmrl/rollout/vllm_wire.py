"""Prompts, completions and weights as bytes between a run and its rollout server: safetensors whose metadata hold the JSON part.

    body = dump({"asked": [...]}, {"0": tensor})
    document, tensors = load(body)

Safetensors hold no code, unlike pickles: a server may be asked by whoever reaches it.
"""
from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields, replace
from typing import Any

import torch

from mmrl.errors import RolloutError
from mmrl.rollout.vllm_inputs import WireMedia, WirePrompt, WireSampling

__all__ = ["chunks", "dump", "dump_prompts", "load", "load_prompts", "load_sampling"]


def dump(document: Any, tensors: dict[str, torch.Tensor]) -> bytes:
    """A JSON document and tensors as bytes."""
    from safetensors.torch import save

    seen: set[int] = set()
    whole = {}
    for name, tensor in tensors.items():
        plain = tensor.detach().cpu().contiguous()
        whole[name] = plain.clone() if plain.data_ptr() in seen else plain  # safetensors refuse shared memory (tied embeddings)
        seen.add(plain.data_ptr())
    return save(whole, metadata={"document": json.dumps(document)})


def load(body: bytes) -> tuple[Any, dict[str, torch.Tensor]]:
    """The inverse of `dump`. Raises RolloutError for anything else."""
    from safetensors import SafetensorError
    from safetensors.torch import load as load_tensors

    try:
        size = int.from_bytes(body[:8], "little")
        document = json.loads(json.loads(body[8:8 + size])["__metadata__"]["document"])
        return document, load_tensors(body)
    except (SafetensorError, ValueError, KeyError, TypeError) as error:
        raise RolloutError(f"expected safetensors with a document in their metadata, found something else ({error})") from error


def dump_prompts(prompts: Iterable[WirePrompt], tensors: dict[str, torch.Tensor]) -> list[dict[str, Any]]:
    """The prompts as JSON values, their tensors put into `tensors`; the tensor of a media hash goes once."""
    found = []
    for n, prompt in enumerate(prompts):
        tensors[f"positions/{n}"] = prompt.positions_3P
        for media in prompt.media:
            if media.tensor is not None:
                tensors[f"media/{media.hash}"] = media.tensor
        found.append({"ids": prompt.ids, "kinds": prompt.kinds, "fingerprint": prompt.fingerprint,
                      "media": [{f.name: getattr(m, f.name) for f in fields(m) if f.name != "tensor"} for m in prompt.media]})
    return found


def load_prompts(found: Sequence[dict[str, Any]], tensors: dict[str, torch.Tensor],
                 recall: Callable[[str], torch.Tensor | None]) -> tuple[list[WirePrompt], list[str]]:
    """The prompts, and the hashes of media whose tensors neither came nor are recalled."""
    missing: list[str] = []
    prompts = []
    for n, one in enumerate(found):
        media = []
        for entry in one["media"]:
            item = WireMedia(**{**entry, "grid_thw": tuple(entry["grid_thw"])})
            tensor = tensors.get(f"media/{item.hash}")
            tensor = recall(item.hash) if tensor is None else tensor
            if tensor is None:
                missing.append(item.hash)
            media.append(replace(item, tensor=tensor))
        prompts.append(WirePrompt(tuple(one["ids"]), tuple(one["kinds"]), tensors[f"positions/{n}"], one["fingerprint"],
                                  tuple(media)))
    return prompts, list(dict.fromkeys(missing))


def load_sampling(found: dict[str, Any]) -> WireSampling:
    """Sampling settings of JSON values (`dataclasses.asdict`)."""
    return WireSampling(**{**found, "stop_ids": tuple(found["stop_ids"]), "banned_ids": tuple(found["banned_ids"])})


def chunks(weights: Iterable[tuple[str, torch.Tensor]], limit: int) -> Iterator[tuple[list[tuple[str, torch.Tensor]], bool]]:
    """Weights in groups of about `limit` bytes, and whether a group is the last; there is at least one."""
    group: list[tuple[str, torch.Tensor]] = []
    used = 0
    for name, tensor in weights:
        size = tensor.numel() * tensor.element_size()
        if group and used + size > limit:
            yield group, False
            group, used = [], 0
        group.append((name, tensor))
        used += size
    yield group, True
