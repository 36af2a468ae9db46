"""Pictures, clips and sounds as the model's forward takes them: pixels when the vision tower learns, cached features when it is
frozen; of sounds the same with the audio tower.

A frozen tower gives the same features in rollout, old and reference log-probs and the update: they are computed once per
visual and handed to the model in their place, Qwen3-VL's deepstack features included. The language model sees the same
numbers either way.

Where a trained model is sharded over processes (mmrl.distributed.engines), running the tower is collective, and a process whose
texts come without pictures would wait for nobody: `joint_media_inputs` runs it exactly once whatever the texts hold.

Legend: n patches, D values of a patch, H hidden width.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from mmrl.policy.families import family_of
from mmrl.policy.families.contract import Encoders, sense_of

__all__ = [
    "FrozenTower",
    "Towers",
    "encoded_rows",
    "feature_rows",
    "joint_media_inputs",
    "media_inputs",
]


def _arithmetic(device: torch.device) -> str:
    """What decides how a tower's numbers are rounded beside its weights: torch, the device and its matrix products."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return f"{torch.__version__};{name};{torch.get_float32_matmul_precision()};{torch.backends.cudnn.allow_tf32}"


class FrozenTower:
    """The vision tower and projector of `model` (a family's body, see ModelFamily), none of whose weights is trained; with `sense`
    "audio" its audio tower.

    A call gives the same features whoever makes it: pixels go to the tower's own device, and it computes under `autocast` (None:
    without any) whatever the caller's autocast is. `fingerprint` hashes weights, storage types, autocast type, attention and the
    configuration, and is computed when first asked.
    """

    def __init__(self, model: Any, autocast: torch.dtype | None, sense: str = "vision") -> None:
        self.model, self.autocast, self.sense = model, autocast, sense
        self.family = family_of(model.config)
        self._fingerprint: str | None = None

    @property
    def encoders(self) -> Encoders:
        """Its modules, parameters and blocks."""
        return next(e for e in self.family.parts.encoders(self.model) if e.sense == self.sense)

    @property
    def fingerprint(self) -> str:
        """32 hex digits; equal towers in equal precision have equal ones."""
        if self._fingerprint is None:
            digest = hashlib.blake2b(digest_size=16)
            modules = list(self.encoders.modules.values())
            # of a projector beside the tower the whole configuration tells more
            config = modules[0].config if len(modules) == 1 else self.model.config
            digest.update(
                f"{type(modules[0]).__name__};{self.autocast};{config.to_json_string()};"
                f"{modules[0].config._attn_implementation};{_arithmetic(self.device)}".encode()
            )
            for name, tensor in (pair for m in modules for pair in m.state_dict().items()):
                digest.update(f"{name}:{tensor.dtype}:{tuple(tensor.shape)};".encode())
                digest.update(
                    tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
                )
            self._fingerprint = digest.hexdigest()
        return self._fingerprint

    @property
    def device(self) -> torch.device:
        """Where its weights are, and its features come out."""
        device: torch.device = self.encoders.parameters[0].device
        return device

    @torch.no_grad()
    def __call__(
        self, kind: str, pixels_nD: torch.Tensor, grids_thw: Sequence[tuple[int, int, int]]
    ) -> list[Any]:
        """Features of each visual of one kind (image, video or audio), its patches or frames, on any device, one after the other in
        pixels_nD."""
        device = self.device
        with torch.autocast(device.type, self.autocast, enabled=self.autocast is not None):
            pixels_nD = pixels_nD.to(device, non_blocking=True)
            return self.family.features(self.model, kind, pixels_nD, grids_thw)


Towers = Mapping[str, FrozenTower | None]
"""Sense -> its tower where nothing in it is trained, else None (see Policy.towers)."""


def media_inputs(
    model: Any, cache: Any, visuals: Sequence[Any], device: torch.device, towers: Towers
) -> dict[str, Any]:
    """Arguments of the body's forward for `visuals` (in order of their tokens): features of a frozen tower, else pixels."""
    family = family_of(model.config)
    media: dict[str, Any] = {}
    for kind, group in family.grouped(visuals, [v.kind for v in visuals]).items():
        if not group:
            continue
        tower = towers[sense_of(kind)]
        if tower is not None:
            made = cache.features(group, tower, device)
        else:
            pixels = [cache.pixels(v, device) for v in group]
            if (taken := family.pixel_inputs(kind, pixels, group)) is not None:
                media |= taken
                continue
            made = family.features(model, kind, torch.cat(pixels), [v.grid_thw for v in group])
        media.setdefault("mm_encoder_outputs", {})[kind] = family.encoded(model, made)
    return media


def _each_once(
    model: Any, cache: Any, visuals: Sequence[Any], device: torch.device, towers: Towers
) -> tuple[list[Any], list[Any]]:
    """Features of `visuals`, in their order, out of exactly one run of each tower that is trained; and those of towers that had
    nothing to see or hear, of the smallest input there is, all zeros."""
    family = family_of(model.config)
    found: dict[int, Any] = {}
    idle: list[Any] = []
    for sense, tower in towers.items():
        mine = {i: v for i, v in enumerate(visuals) if sense_of(v.kind) == sense}
        if tower is not None:
            made = cache.features(list(mine.values()), tower, device)
        elif mine:
            pixels_nD = torch.cat([cache.pixels(v, device) for v in mine.values()])
            # the vision tower itself does not tell pictures and clips apart
            kind = "audio" if sense == "audio" else "image"
            made = family.features(model, kind, pixels_nD, [v.grid_thw for v in mine.values()])
        else:
            made, nothing = [], _idle_features(model, device, sense)
            idle += nothing
        found |= dict(zip(mine, made, strict=True))
    return [found[i] for i in range(len(visuals))], idle


def joint_media_inputs(
    model: Any, cache: Any, visuals: Sequence[Any], device: torch.device, towers: Towers
) -> tuple[dict[str, Any], torch.Tensor | None]:
    """Arguments of the body's forward for `visuals` out of exactly one run of each trained tower, whatever they are.

    transformers would run the vision tower once for all pictures and once more for all clips. A tower without visuals sees the
    smallest grid it can, all zeros, and the second value is 0 with a gradient of zeros for each of its weights, to be added to
    what the model computes; else it is None.
    """
    family = family_of(model.config)
    found, idle = _each_once(model, cache, visuals, device, towers)
    kinds = family.grouped(found, [v.kind for v in visuals])
    outputs = {
        kind: family.encoded(model, features) for kind, features in kinds.items() if features
    }
    nothing = [part.float().sum() for f in idle for part in (f.main, *f.deep)]
    return (
        {"mm_encoder_outputs": outputs} if outputs else {},
        torch.stack(nothing).sum() * 0.0 if nothing else None,
    )


def feature_rows(
    model: Any, cache: Any, visuals: Sequence[Any], device: torch.device, towers: Towers
) -> torch.Tensor:
    """Features of `visuals` one after the other, (tokens, H and the deepstack features' H), in the embeddings' type.

    A trained tower (None in `towers`) runs exactly once, also without visuals, and its weights have a gradient, then of zeros.
    """
    found, idle = _each_once(model, cache, visuals, device, towers)
    dtype = model.get_input_embeddings().weight.dtype
    width = model.config.text_config.hidden_size
    width *= 1 + len(getattr(model.config.vision_config, "deepstack_visual_indexes", None) or ())
    rows, none = (
        [torch.cat([f.main, *f.deep], -1).to(dtype) for f in made] for made in (found, idle)
    )
    empty = torch.zeros(0, width, dtype=dtype, device=device)
    return torch.cat([empty, *rows, *(r[:0] for r in none)])


def encoded_rows(model: Any, rows: torch.Tensor) -> Any:
    """Rows of `feature_rows`, of one kind, in the form that the body's forward takes instead of pixels."""
    from mmrl.video.references import Features

    main, *deep = rows.split(model.config.text_config.hidden_size, -1)
    return family_of(model.config).encoded(model, [Features(main, tuple(deep))])


def _idle_features(model: Any, device: torch.device, sense: str) -> list[Any]:
    """Of the smallest grid or sound there is, all ones: Idefics3 takes tiles of zeros for padding, and leaves them out."""
    family = family_of(model.config)
    hears = sense == "audio"
    shape, grid = family.idle_sound(model) if hears else family.idle(model)
    kind = "audio" if hears else "image"
    return family.features(model, kind, torch.ones(shape, device=device), [grid])
