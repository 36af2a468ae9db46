"""A process that turns the bytes of requests into prompts: JSON, pictures, clips, sounds and text of strangers are read here only.

It may be killed at any moment. What it makes are the prompts of training: the same chat template, pixel limits, frame sampling,
token ids and rotary positions; pixels go along as bytes (mmrl.video.references.Frame).

    ReadBody(body, folder)  -> Reading: the request, its media as files, and its prompt unless that is much work
    Encode(reading, paths)  -> Reading with its prompt
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pickle
import resource
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from mmrl.config import DataConfig
from mmrl.errors import MMRLError
from mmrl.policy.encode import Encoder, Prompt
from mmrl.serve.errors import RequestError
from mmrl.serve.limits import Limits
from mmrl.serve.media import MediaRules, check_picture, file_of, is_remote
from mmrl.serve.protocol import Asked, Defaults, read_body
from mmrl.task import Template
from mmrl.types import Sample
from mmrl.video.references import Frame

__all__ = ["Encode", "ReadBody", "Reading", "Recipe", "SMALL_BODY", "build", "run"]

SMALL_BODY = 256 << 10  # bytes of a request, and of the files it names, that may be small
_SMALL_TEXT = 1 << 16
_SMALL_PIXELS = 4 << 20
_CACHE_GIB = 0.25  # of pixels that are asked about again


@dataclass(frozen=True)
class Recipe:
    """What an encoder is built from, and the rules for what it reads. Picklable, without weights."""

    processor: Any
    model_config: Any
    template: Template
    data: DataConfig
    max_prompt_tokens: int
    defaults: Defaults
    rules: MediaRules
    limits: Limits


@dataclass(frozen=True)
class ReadBody:
    """Read a request; its media become files in `folder`. With `small`, the prompt is made only where that is little work."""

    folder: str
    small: bool


@dataclass(frozen=True)
class Reading:
    """A request that was read. `paths`: a file of each of its media, None for those to be fetched; their addresses stay in `asked`,
    others are dropped. `prompt` None: still to be made by Encode."""

    asked: Asked
    paths: tuple[str | None, ...]
    prompt: Prompt | None = None


@dataclass(frozen=True)
class Encode:
    """Make the prompt of a request whose media are all files now."""

    reading: Reading


def build(recipe: Recipe) -> Encoder:
    """The encoder of training, without the model's weights."""
    import torch
    from transformers import AutoModelForImageTextToText

    from mmrl.policy.families import family_of
    from mmrl.policy.loading import build_encoder

    with torch.device("meta"):  # rotary positions need the model's settings, no weights
        model = AutoModelForImageTextToText.from_config(
            recipe.model_config, attn_implementation="eager"
        )
    data = recipe.data.model_copy(
        update={
            "prompt_cache_gib": _CACHE_GIB,
            "cache": recipe.data.cache.model_copy(update={"dir": None}),
        }
    )
    return build_encoder(
        recipe.processor,
        family_of(model.config).body(model),
        recipe.template,
        data,
        recipe.max_prompt_tokens,
    )


def run(connection: Connection, progress: Any, recipe: Recipe, niceness: int) -> None:
    """What the process does: see the module. Ends when None comes."""
    try:
        import torch

        torch.set_num_threads(1)
        os.nice(niceness)
        encoder = build(recipe)
        probing = _bound(recipe.limits)
    except BaseException as error:
        connection.send_bytes(pickle.dumps(f"{type(error).__name__}: {error}"))
        raise
    connection.send_bytes(pickle.dumps(None))
    while (job := pickle.loads(connection.recv_bytes())) is not None:
        body = connection.recv_bytes() if isinstance(job, ReadBody) else b""
        connection.send_bytes(pickle.dumps(_answer(encoder, recipe, job, body)))
        del body
        probing.forget()
        _trim()


def _bound(limits: Limits) -> Any:
    """Let the kernel refuse memory beyond the limit, and clips be measured by it; returns mmrl.video.probing."""
    from mmrl.video import bounds, probing  # here: a worker's, which its parent does without

    bounds.set_bounds(bounds.ClipBounds(limits.pixels, limits.clip_frames))
    # no such table or limit on this system: the time limit stays
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
        held = int(next(line for line in lines if line.startswith("VmData")).split()[1]) << 10
        resource.setrlimit(resource.RLIMIT_DATA, (held + limits.worker_bytes,) * 2)
    return probing


def _trim() -> None:
    """Give the memory of a large request back to the system (glibc)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def _answer(
    encoder: Encoder, recipe: Recipe, job: ReadBody | Encode, body: bytes
) -> Reading | RequestError:
    """The reading, or why there is none."""
    try:
        if isinstance(job, ReadBody):
            return _read(encoder, recipe, job, body)
        return _encode(encoder, recipe.limits, job.reading)
    except RequestError as error:
        return error
    except MemoryError:
        return RequestError(
            "expected media and text that can be read within the server's memory for one request, found more; send "
            "smaller ones, or start the server with a larger --worker-memory-gib",
            "messages",
            code="too_large",
        )
    except Exception as error:
        # whatever a stranger's bytes make a library do: it is this request's end only
        traceback.print_exc()
        return RequestError(
            f"the request could not be read ({type(error).__name__}); the server's log says more",
            "messages",
            code="unreadable",
        )


def _read(encoder: Encoder, recipe: Recipe, job: ReadBody, body: bytes) -> Reading:
    asked = read_body(body, recipe.defaults, recipe.limits)
    for media in filter(is_remote, asked.media):
        recipe.rules.check_remote(media)
    paths = tuple(
        None if is_remote(m) else file_of(m, Path(job.folder), recipe.rules) for m in asked.media
    )
    # what is in files now need not travel
    reading = Reading(
        replace(asked, media=[m if is_remote(m) else replace(m, url="") for m in asked.media]),
        paths,
    )
    if None in paths or (job.small and not _is_small(reading, recipe.limits)):
        return reading
    return _encode(encoder, recipe.limits, reading)


def _is_small(reading: Reading, limits: Limits) -> bool:
    """From lengths and the headers of pictures."""
    if any(m.kind != "image" for m in reading.asked.media):
        return False
    files = [p for p in reading.paths if p is not None]
    if sum(map(os.path.getsize, files)) > SMALL_BODY:
        return False
    if (
        sum(
            len(item["text"])
            for m in reading.asked.messages
            for item in m["content"]
            if item["type"] == "text"
        )
        > _SMALL_TEXT
    ):
        return False
    return (
        sum(
            check_picture(p, m, limits.pixels)
            for p, m in zip(files, reading.asked.media, strict=True)
        )
        <= _SMALL_PIXELS
    )


def _encode(encoder: Encoder, limits: Limits, reading: Reading) -> Reading:
    """The prompt, after its cost was held against the limits. Raises RequestError."""
    media, paths = reading.asked.media, [str(p) for p in reading.paths]
    try:
        _check_cost(encoder, limits, reading.asked, paths)
        frames = {"video": dict(reading.asked.frames)} if reading.asked.frames else {}
        images, videos, audios = (
            tuple(p for p, m in zip(paths, media, strict=True) if m.kind == kind)
            for kind in ("image", "video", "audio")
        )
        visuals = encoder.references(
            Sample("of this request", "", "", "", None, images, videos, frames, audios=audios)
        )
        prompt = encoder.prompt_of(reading.asked.messages, visuals, "of this request")
    except MMRLError as error:
        if isinstance(error, RequestError):
            raise
        words = str(error)
        for path in paths:
            words = words.replace(path, "the media sent")
        raise RequestError(words, "messages", code=getattr(error, "kind", None)) from error
    return replace(reading, prompt=replace(prompt, visuals=_carried(encoder, prompt.visuals)))


def _check_cost(encoder: Encoder, limits: Limits, asked: Asked, paths: Sequence[str]) -> None:
    """Pixels and tokens of the media by their headers, before one of them is decoded."""
    pixels = tokens = 0
    for media, path in zip(asked.media, paths, strict=True):
        if media.kind == "image":
            check_picture(path, media, limits.pixels)
        more, cost = encoder.visuals.cost(
            media.kind, path, dict(asked.frames) if media.kind == "video" and asked.frames else None
        )
        pixels, tokens = pixels + more, tokens + cost
        if pixels > limits.total_pixels:
            raise RequestError(
                f"expected pictures and chosen frames of at most {limits.total_pixels:,} pixels together, found "
                f"{pixels:,} up to {media.where}; send fewer or smaller ones, or start the server with a larger "
                "--max-total-megapixels",
                media.where,
                code="too_large",
            )
        if tokens > encoder.max_prompt_tokens:
            raise RequestError(
                f"expected at most {encoder.max_prompt_tokens} prompt tokens, found {tokens} of media up to "
                f"{media.where}; send fewer or smaller ones, or fewer frames",
                media.where,
                code="context_length_exceeded",
            )


def _carried(encoder: Encoder, visuals: Sequence[Any]) -> tuple[Any, ...]:
    """The same references with their pixels: the process that reads them has no files."""
    return tuple(
        Frame(
            **{f.name: getattr(v, f.name) for f in fields(v) if f.name not in ("path", "packed")},
            path="",
            packed=encoder.visuals.packed(v),
        )
        for v in visuals
    )
