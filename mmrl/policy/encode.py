"""Turn a Sample into the exact tensors every later pass reads: ids, media, rotary positions and their fingerprint.

A prompt is encoded once. Rollout, old / reference log-probs and the update all receive the same `Prompt`; its
fingerprint travels with the Group: taken from the encoded prompt handed to rollout, and again from the encoded prompt
handed to packing. It covers these prompts, not what packing or the model then make of them.

Legend: P prompt tokens.
"""
from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from mmrl.errors import ConfigError, DataError
from mmrl.media import open_image
from mmrl.task import Task, Template
from mmrl.types import ImageSize, Sample

__all__ = ["Encoder", "Prompt", "fingerprint"]

_ROPE_INPUTS = ("image_grid_thw", "video_grid_thw", "second_per_grid_ts")


@dataclass(frozen=True)
class Prompt:
    """One encoded prompt.

    ids_P, kinds_P (0 text, 1 image, 2 video) are int64; positions_3P are the rotary positions (temporal, height,
    width); `next_position` continues them after the prompt; `media` holds the processor's other tensors on the CPU.
    """

    ids_P: torch.Tensor
    kinds_P: torch.Tensor
    positions_3P: torch.Tensor
    next_position: int
    media: Mapping[str, torch.Tensor]
    images: tuple[ImageSize, ...]

    @property
    def length(self) -> int:
        """Number of prompt tokens P, media tokens included."""
        return int(self.ids_P.numel())

    @property
    def nbytes(self) -> int:
        """Bytes held by all tensors."""
        return sum(t.numel() * t.element_size() for t in (self.ids_P, self.kinds_P, self.positions_3P, *self.media.values()))


def fingerprint(ids_P: torch.Tensor, positions_3P: torch.Tensor, media: Mapping[str, torch.Tensor]) -> str:
    """BLAKE2b hash (32 hex digits) of token ids, rotary positions and every media tensor, names and shapes included."""
    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in [("ids", ids_P), ("positions", positions_3P), *sorted(media.items())]:
        data = tensor.detach().to("cpu").contiguous()
        digest.update(f"{name}:{data.dtype}:{tuple(data.shape)};".encode())
        digest.update(data.view(torch.uint8).numpy().tobytes() if data.numel() else b"")
    return digest.hexdigest()


class Encoder:
    """Sample -> Prompt through the model's own processor, with a byte-bounded least-recently-used memory.

    Raises MediaError for pictures that cannot be read and DataError for prompts that do not fit `max_prompt_tokens`:
    a prompt is never truncated, least of all through a media block.
    """

    def __init__(self, processor: Any, rope_index: Any, template: Template, *, max_prompt_tokens: int = 16384,
                 max_pixels: int | None = None, min_pixels: int | None = None, cache_bytes: int = 1 << 30) -> None:
        self.processor, self.template = processor, template
        self.max_prompt_tokens, self._rope_index = max_prompt_tokens, rope_index
        self._min_pixels, self._max_pixels = min_pixels, max_pixels
        self._image_options = self._picture_budget()
        self._cache: OrderedDict[tuple, tuple[Prompt, Task]] = OrderedDict()
        self._cache_bytes, self._used_bytes = cache_bytes, 0
        self.hits = self.misses = 0

    def __call__(self, sample: Sample, task: Task) -> Prompt:
        """Encode (or recall) the prompt of `sample`."""
        # Ids are unique within one data set only, and two tasks may ask the same sample differently; the entry keeps its
        # task alive, so that no other object can get the same id().
        key = (id(task), sample.source, sample.id, sample.question, sample.images, sample.videos)
        if key in self._cache:
            self.hits += 1
            self._cache.move_to_end(key)
            return self._cache[key][0]
        self.misses += 1
        prompt = self._encode(sample, task)
        if prompt.nbytes <= self._cache_bytes:
            self._cache[key] = (prompt, task)
            self._used_bytes += prompt.nbytes
            while self._used_bytes > self._cache_bytes:
                self._used_bytes -= self._cache.popitem(last=False)[1][0].nbytes
        return prompt

    def text(self, sample: Sample, task: Task) -> str:
        """The prompt as text, media still as one placeholder each."""
        return self.processor.apply_chat_template(task.messages(sample, self.template), add_generation_prompt=True,
                                                  tokenize=False)

    def _encode(self, sample: Sample, task: Task) -> Prompt:
        messages = task.messages(sample, self.template)
        placeholders = sum(1 for m in messages if not isinstance(m["content"], str)
                           for item in m["content"] if item["type"] == "image")
        if placeholders != len(sample.images):
            raise DataError(f"sample {sample.id}: expected one image item per picture, found {placeholders} items for "
                            f"{len(sample.images)} pictures; mend {type(task).__name__}.messages or the row's images")
        text = self.processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        for token, expected in ((self.processor.image_token, len(sample.images)), (self.processor.video_token, 0)):
            if text.count(token) != expected:
                raise DataError(f"sample {sample.id}: expected {expected} times {token} in the prompt, found "
                                f"{text.count(token)}; the question must not contain it: remove it from the row")
        pictures = [open_image(path) for path in sample.images]
        batch = self.processor(text=[text], images=pictures or None, return_tensors="pt",
                               images_kwargs=self._image_options if pictures else {})
        fields = {k: v for k, v in batch.items() if isinstance(v, torch.Tensor)}
        ids_1P = fields.pop("input_ids")
        mask_1P = fields.pop("attention_mask")
        kinds_1P = fields.pop("mm_token_type_ids", torch.zeros_like(ids_1P))
        if ids_1P.shape[1] > self.max_prompt_tokens:
            raise DataError(f"sample {sample.id}: expected at most {self.max_prompt_tokens} prompt tokens, found "
                            f"{ids_1P.shape[1]} ({int((kinds_1P > 0).sum())} of them media); lower data.max_pixels or "
                            "raise model.max_prompt_tokens")
        rope = {k: v for k, v in fields.items() if k in _ROPE_INPUTS}
        positions, _ = self._rope_index(input_ids=ids_1P, mm_token_type_ids=kinds_1P, attention_mask=mask_1P, **rope)
        positions_3P = positions[-3:, 0]
        sizes = self._sizes(pictures, fields)
        self._check_budget(sample, sizes)
        return Prompt(ids_1P[0], kinds_1P[0], positions_3P, int(positions_3P.max()) + 1, fields, sizes)

    def _picture_budget(self) -> dict[str, dict[str, int]]:
        """Options of a processor call: both bounds of the resized pictures' areas, or nothing for the processor's own."""
        if self._min_pixels is None and self._max_pixels is None:
            return {}
        own = self.processor.image_processor.size
        low = own["shortest_edge"] if self._min_pixels is None else self._min_pixels
        high = own["longest_edge"] if self._max_pixels is None else self._max_pixels
        if low > high:
            names = [f"{key} ({'the model' if value is None else 'configured'})"
                     for key, value in (("data.min_pixels", self._min_pixels), ("data.max_pixels", self._max_pixels))]
            raise ConfigError(f"expected data.min_pixels <= data.max_pixels, found {low} > {high}: {names[0]} against "
                              f"{names[1]}; set both")
        return {"size": {"shortest_edge": low, "longest_edge": high}}

    def _check_budget(self, sample: Sample, sizes: tuple[ImageSize, ...]) -> None:
        """A processor that ignores its budget, or a strip that whole patches cannot fit into it, must not pass unseen.

        Sides are whole patches, so a picture shrunk to the upper bound may end up to one patch per side below the lower
        one, and a picture enlarged to the lower bound that much above the upper one; both pass, as in a budget of one size.
        """
        cell = self.processor.image_processor.patch_size * self.processor.image_processor.merge_size
        for image in sizes:
            (width, height), (orig_width, orig_height) = image.resized_wh, image.orig_wh
            found = f"found {width} x {height} = {width * height} for a picture of {orig_width} x {orig_height}"
            if (high := self._max_pixels) is not None:
                shrunk = (orig_width - cell / 2) * (orig_height - cell / 2) > high  # even after rounding its sides down
                slack = 0 if shrunk else cell
                if (width - slack) * (height - slack) > high:
                    raise DataError(f"sample {sample.id}: expected at most data.max_pixels = {high} pixels after resizing "
                                    f"to whole patches, {found}; raise data.max_pixels or remove the row")
            if (low := self._min_pixels) is not None and (width + cell) * (height + cell) < low:
                raise DataError(f"sample {sample.id}: expected at least data.min_pixels = {low} pixels after resizing to "
                                f"whole patches, {found}; lower data.min_pixels or remove the row")

    def _sizes(self, pictures: list[Any], fields: Mapping[str, torch.Tensor]) -> tuple[ImageSize, ...]:
        if not pictures:
            return ()
        patch = self.processor.image_processor.patch_size
        return tuple(ImageSize(picture.size, (int(w) * patch, int(h) * patch))
                     for picture, (_, h, w) in zip(pictures, fields["image_grid_thw"].tolist(), strict=True))
