"""Prompts, completions and weights as bytes between a run and its rollout server: safetensors whose metadata hold the JSON part.

    body = dump({"asked": [...]}, {"0": tensor})
    document, tensors = load(body)

Safetensors hold no code, unlike pickles: a server may be asked by whoever reaches it. Media are named by a digest of their tensor's
own bytes, which the server computes again: nobody can put another picture under a name that a run will ask for.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields, replace
from typing import Any

import torch

from mmrl.errors import RolloutError
from mmrl.rollout.vllm_inputs import WireMedia, WirePrompt, WireSampling

__all__ = [
    "MalformedError",
    "chunks",
    "content_of",
    "dump",
    "dump_prompts",
    "load",
    "load_prompts",
    "load_sampling",
]


class MalformedError(RolloutError):
    """Bytes that are no question of a run."""


def dump(document: Any, tensors: dict[str, torch.Tensor]) -> bytes:
    """A JSON document and tensors as bytes."""
    from safetensors.torch import save

    seen: set[int] = set()
    whole = {}
    for name, tensor in tensors.items():
        plain = tensor.detach().cpu().contiguous()
        # safetensors refuse shared memory (tied embeddings)
        whole[name] = plain.clone() if plain.data_ptr() in seen else plain
        seen.add(plain.data_ptr())
    return save(whole, metadata={"document": json.dumps(document)})


def load(body: bytes) -> tuple[Any, dict[str, torch.Tensor]]:
    """The inverse of `dump`. Raises RolloutError for anything else."""
    from safetensors import SafetensorError
    from safetensors.torch import load as load_tensors

    try:
        size = int.from_bytes(body[:8], "little")
        document = json.loads(json.loads(body[8 : 8 + size])["__metadata__"]["document"])
        if not isinstance(document, dict):
            raise TypeError(f"its document is a {type(document).__name__}")
        return document, load_tensors(body)
    except (
        SafetensorError,
        ValueError,
        KeyError,
        TypeError,
        RecursionError,
        OverflowError,
    ) as error:
        raise MalformedError(
            f"expected safetensors with a document in their metadata, found something else ({error})"
        ) from error


def content_of(tensor: torch.Tensor) -> str:
    """32 hex digits of a tensor's type, shape and bytes (BLAKE2b)."""
    plain = tensor.detach().cpu().contiguous()
    digest = hashlib.blake2b(f"{plain.dtype}:{tuple(plain.shape)};".encode(), digest_size=16)
    digest.update(memoryview(plain.view(-1).view(torch.uint8).numpy()))  # type: ignore[arg-type]
    return digest.hexdigest()


def dump_prompts(
    prompts: Iterable[WirePrompt],
    tensors: dict[str, torch.Tensor],
    known: dict[str, str] | None = None,
) -> list[dict[str, Any]]:
    """The prompts as JSON values, their tensors put into `tensors`; the tensor of a media hash goes once. `known` keeps the content
    of each hash, for prompts that leave its tensor out."""
    found, known = [], {} if known is None else known
    for n, prompt in enumerate(prompts):
        tensors[f"positions/{n}"] = prompt.positions_3P
        for media in prompt.media:
            # once per hash: features that were computed again may differ in rounding
            if media.tensor is not None and f"media/{known.get(media.hash)}" not in tensors:
                known[media.hash] = content_of(media.tensor)
                tensors[f"media/{known[media.hash]}"] = media.tensor
        found.append(
            {
                "ids": prompt.ids,
                "kinds": prompt.kinds,
                "fingerprint": prompt.fingerprint,
                "media": [
                    {f.name: getattr(m, f.name) for f in fields(m) if f.name != "tensor"}
                    | {"content": known.get(m.hash, "")}
                    for m in prompt.media
                ],
            }
        )
    return found


def load_prompts(
    found: Sequence[dict[str, Any]],
    tensors: dict[str, torch.Tensor],
    lookup: Callable[[str], torch.Tensor | None],
) -> tuple[list[WirePrompt], list[str]]:
    """The prompts, and the hashes of media whose tensors neither came nor are known (by content).

    Hashes and fingerprints are of what came: those that a client states must not reach the caches of another run's prompts.
    Raises MalformedError, also for a tensor that is not what its name says.
    """
    for name, tensor in tensors.items():
        if name.startswith("media/") and content_of(tensor) != name.removeprefix("media/"):
            raise MalformedError(
                f"expected the tensor {name[:60]!r} to have that content, found another"
            )
    try:
        return _loaded(found, tensors, lookup)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise MalformedError(
            f"expected prompts with ids, kinds, positions and media, found something else ({error!r})"
        ) from error


def _loaded(
    found: Sequence[dict[str, Any]],
    tensors: dict[str, torch.Tensor],
    lookup: Callable[[str], torch.Tensor | None],
) -> tuple[list[WirePrompt], list[str]]:
    missing: list[str] = []
    prompts = []
    for n, one in enumerate(found):
        media = []
        for entry in one["media"]:
            content, stated = (
                str(entry["content"]),
                {name: value for name, value in entry.items() if name != "content"},
            )
            item = WireMedia(**{**stated, "grid_thw": tuple(map(int, entry["grid_thw"]))})
            tensor = tensors.get(f"media/{content}")
            tensor = lookup(content) if tensor is None else tensor
            if tensor is None:
                missing.append(item.hash)
            media.append(
                replace(
                    item, tensor=tensor, hash=_name(content, item.kind, item.form, item.grid_thw)
                )
            )
        ids, kinds, positions = (
            tuple(map(int, one["ids"])),
            tuple(map(int, one["kinds"])),
            tensors[f"positions/{n}"],
        )
        print_ = _name(ids, kinds, content_of(positions), [m.hash for m in media])
        prompts.append(WirePrompt(ids, kinds, positions, print_, tuple(media)))
    return prompts, list(dict.fromkeys(missing))


def _name(*parts: Any) -> str:
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()


def load_sampling(found: dict[str, Any]) -> WireSampling:
    """Sampling settings of JSON values (`dataclasses.asdict`). Raises MalformedError."""
    try:
        return WireSampling(
            **{
                **found,
                "stop_ids": tuple(found["stop_ids"]),
                "banned_ids": tuple(found["banned_ids"]),
            }
        )
    except (KeyError, TypeError) as error:
        raise MalformedError(
            f"expected sampling settings, found something else ({error!r})"
        ) from error


def chunks(
    weights: Iterable[tuple[str, torch.Tensor]], limit: int
) -> Iterator[tuple[list[tuple[str, torch.Tensor]], bool]]:
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
