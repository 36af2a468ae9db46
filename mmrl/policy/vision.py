"""Pictures and clips as the model's forward takes them: pixels when the vision tower learns, cached features when it is frozen.

A frozen tower gives the same features in rollout, old and reference log-probs and the update: they are computed once per
visual and handed to the model in their place, Qwen3-VL's deepstack features included. The language model sees the same
numbers either way.

Where a trained model is sharded over processes (mmrl.distributed.engines), running the tower is collective, and a process whose
texts come without pictures would wait for nobody: `joint_media_inputs` runs it exactly once whatever the texts hold.

Legend: n patches, D values of a patch, H hidden width.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from mmrl.video.references import Features

__all__ = ["FrozenTower", "encoded_rows", "feature_rows", "joint_media_inputs", "media_inputs"]


def _arithmetic(device: torch.device) -> str:
    """What decides how a tower's numbers are rounded beside its weights: torch, the device and its matrix products."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return f"{torch.__version__};{name};{torch.get_float32_matmul_precision()};{torch.backends.cudnn.allow_tf32}"


class FrozenTower:
    """The vision tower and projector of `model` (a transformers Qwen-VL base model), none of whose weights is trained.

    A call gives the same features whoever makes it: pixels go to the tower's own device, and it computes under `autocast` (None:
    without any) whatever the caller's autocast is. `fingerprint` hashes weights, storage types, autocast type, attention and the
    configuration, and is computed when first asked.
    """

    def __init__(self, model: Any, autocast: torch.dtype | None) -> None:
        self.model, self.autocast = model, autocast
        self._fingerprint: str | None = None

    @property
    def fingerprint(self) -> str:
        """32 hex digits; equal towers in equal precision have equal ones."""
        if self._fingerprint is None:
            digest = hashlib.blake2b(digest_size=16)
            visual = self.model.visual
            digest.update(
                f"{type(visual).__name__};{self.autocast};{visual.config.to_json_string()};"
                f"{visual.config._attn_implementation};{_arithmetic(self.device)}".encode()
            )
            for name, tensor in visual.state_dict().items():
                digest.update(f"{name}:{tensor.dtype}:{tuple(tensor.shape)};".encode())
                digest.update(
                    tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
                )
            self._fingerprint = digest.hexdigest()
        return self._fingerprint

    @property
    def device(self) -> torch.device:
        """Where its weights are, and its features come out."""
        return next(self.model.visual.parameters()).device

    @torch.no_grad()
    def __call__(
        self, kind: str, pixels_nD: torch.Tensor, grids_thw: Sequence[tuple[int, int, int]]
    ) -> list[Any]:
        """Features of each visual of one kind (image or video), its patches, on any device, one after the other in pixels_nD."""
        device, forward = (
            self.device,
            self.model.get_image_features if kind == "image" else self.model.get_video_features,
        )
        with torch.autocast(device.type, self.autocast, enabled=self.autocast is not None):
            return _encode(forward, pixels_nD.to(device, non_blocking=True), grids_thw)


def _encode(
    forward: Callable[..., Any], pixels_nD: torch.Tensor, grids_thw: Sequence[tuple[int, int, int]]
) -> list[Any]:
    """The features of each visual."""
    out = forward(pixels_nD, torch.tensor(grids_thw, device=pixels_nD.device), return_dict=True)
    deep = getattr(out, "deepstack_features", None) or ()
    return [
        Features(main, tuple(layer[i] for layer in deep))
        for i, main in enumerate(out.pooler_output)
    ]


def media_inputs(
    model: Any, cache: Any, visuals: Sequence[Any], device: torch.device, tower: FrozenTower | None
) -> dict[str, Any]:
    """Arguments of model.forward for `visuals` (in order of their tokens): features with a frozen `tower`, else pixels."""
    kinds = {kind: [v for v in visuals if v.kind == kind] for kind in ("image", "video")}
    if tower is not None and visuals:
        found = dict(zip(visuals, cache.features(visuals, tower, device), strict=True))
        return {
            "mm_encoder_outputs": {
                kind: _encoded([found[v] for v in group]) for kind, group in kinds.items() if group
            }
        }
    media: dict[str, Any] = {}
    for kind, group in kinds.items():
        if group:
            name = "pixel_values" if kind == "image" else "pixel_values_videos"
            media[name] = torch.cat([cache.pixels(v, device) for v in group])
            media[f"{kind}_grid_thw"] = torch.tensor([v.grid_thw for v in group], device=device)
    return media


def joint_media_inputs(
    model: Any, cache: Any, visuals: Sequence[Any], device: torch.device
) -> tuple[dict[str, Any], torch.Tensor | None]:
    """Arguments of model.forward for `visuals` out of exactly one run of a trained vision tower, whatever they are.

    transformers would run it once for all pictures and once more for all clips; the tower itself does not tell them apart.
    Without visuals it sees the smallest grid it can, all zeros, and the second value is 0 with a gradient of zeros for each of
    its weights, to be added to what the model computes; else it is None.
    """
    if not visuals:
        idle = _idle_features(model, device)
        return {}, torch.stack(
            [part.float().sum() for f in idle for part in (f.main, *f.deep)]
        ).sum() * 0.0
    pixels_nD = torch.cat([cache.pixels(v, device) for v in visuals])
    found = list(
        zip(
            visuals,
            _encode(model.get_image_features, pixels_nD, [v.grid_thw for v in visuals]),
            strict=True,
        )
    )
    kinds = {kind: [f for v, f in found if v.kind == kind] for kind in ("image", "video")}
    return {
        "mm_encoder_outputs": {
            kind: _encoded(features) for kind, features in kinds.items() if features
        }
    }, None


def feature_rows(
    model: Any, cache: Any, visuals: Sequence[Any], device: torch.device, tower: FrozenTower | None
) -> torch.Tensor:
    """Features of `visuals` one after the other, (tokens, H and the deepstack features' H), in the embeddings' type.

    A trained tower (`tower` None) runs exactly once, also without visuals, and its weights have a gradient, then of zeros.
    """
    if tower is not None:
        found = cache.features(visuals, tower, device)
    elif visuals:
        pixels_nD = torch.cat([cache.pixels(v, device) for v in visuals])
        found = _encode(model.get_image_features, pixels_nD, [v.grid_thw for v in visuals])
    else:
        found = _idle_features(model, device)
    dtype = model.get_input_embeddings().weight.dtype
    width = model.config.text_config.hidden_size
    width *= 1 + len(getattr(model.visual.config, "deepstack_visual_indexes", None) or ())
    rows = [torch.cat([f.main, *f.deep], -1).to(dtype) for f in found]
    empty = torch.zeros(0, width, dtype=dtype, device=device)
    return torch.cat([empty, *rows]) if visuals else torch.cat([empty, *(r[:0] for r in rows)])


def encoded_rows(model: Any, rows: torch.Tensor) -> Any:
    """Rows of `feature_rows`, of one kind, in the form transformers' forward takes instead of pixels."""
    main, *deep = rows.split(model.config.text_config.hidden_size, -1)
    return _encoded([Features(main, tuple(deep))])


def _idle_features(model: Any, device: torch.device) -> list[Any]:
    """Of the smallest grid there is, all zeros."""
    side, patch = model.visual.spatial_merge_size, model.visual.patch_embed
    width = patch.in_channels * patch.temporal_patch_size * patch.patch_size**2
    pixels = torch.zeros(side * side, width, device=device)
    return _encode(model.get_image_features, pixels, [(1, side, side)])


def _encoded(features: Sequence[Any]) -> Any:
    """The visuals of one kind in the form transformers' forward takes instead of pixels."""
    from transformers.modeling_outputs import BaseModelOutputWithPooling
    from transformers.models.qwen3_vl.modeling_qwen3_vl import BaseModelOutputWithDeepstackFeatures

    main = tuple(f.main for f in features)
    if not features[0].deep:
        return BaseModelOutputWithPooling(pooler_output=main)
    deep = [tuple(f.deep[layer] for f in features) for layer in range(len(features[0].deep))]
    return BaseModelOutputWithDeepstackFeatures(pooler_output=main, deepstack_features=deep)
