"""Families whose tower takes one row per patch and a grid (t, h, w) per picture or clip: Qwen-VL and those built like it."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar

from mmrl.policy.families.contract import ForVLLM, ModelFamily

if TYPE_CHECKING:
    import torch

    from mmrl.video.pictures import PictureReader
    from mmrl.video.references import Features, Visual

__all__ = ["GridFamily"]


class GridFamily(ModelFamily):
    """M-RoPE over the grid of merged patches; the tower attends within a temporal patch. `frames_in_area`: how many frames of a
    picture the processor counts in its budget."""

    frames_in_area: ClassVar[int] = 1
    tower_kernels: ClassVar[Mapping[str, str]] = {
        "sdpa": "mmrl_flash_or_sdpa",
        "eager": "eager",
        "flash_attention_2": "mmrl_flash_varlen",
        "flex": "mmrl_flash_or_flex",
    }
    media_tokens: ClassVar[tuple[str, ...]]
    """Texts of the tokens that are banned."""

    def reader(self, processor: Any) -> PictureReader:
        """See ModelFamily."""
        from mmrl.video.pictures import GridReader

        return GridReader(processor.image_processor)

    def image_options(
        self, processor: Any, low: int | None, high: int | None
    ) -> tuple[dict[str, Any], tuple[int, int]]:
        """See ModelFamily."""
        own, times = processor.image_processor.size, self.frames_in_area
        bounds = (
            own["shortest_edge"] // times if low is None else low,
            own["longest_edge"] // times if high is None else high,
        )
        edges = zip(("shortest_edge", "longest_edge"), bounds, strict=True)
        return {"size": {name: area * times for name, area in edges}}, bounds

    def placeholders(self, processor: Any) -> dict[str, str]:
        """See ModelFamily."""
        return {processor.image_token: "image", processor.video_token: "video"}

    def expand(self, processor: Any, visual: Visual) -> str:
        """See ModelFamily."""
        import torch

        grid = {f"{visual.kind}_grid_thw": torch.tensor([visual.grid_thw])}
        if visual.kind == "image":
            return processor.replace_image_token(grid, 0)
        # Qwen3-VL writes index / fps as text: with the seconds themselves and one frame per second that is exact
        seconds = list(visual.timestamps_s)
        times = SimpleNamespace(fps=1.0, frames_indices=seconds, timestamps=seconds)
        return processor.replace_video_token({**grid, "video_metadata": [times]}, 0)

    def kinds(self, processor: Any, ids_1P: torch.Tensor) -> torch.Tensor:
        """See ModelFamily."""
        import torch

        kinds_1P = torch.zeros_like(ids_1P)
        for number, ids in self._slots(processor):
            kinds_1P[torch.isin(ids_1P, torch.tensor([i for i in ids if i is not None]))] = number
        return kinds_1P

    def _slots(self, processor: Any) -> tuple[tuple[int, Sequence[int | None]], ...]:
        return ((1, processor.image_token_ids), (2, processor.video_token_ids))

    def banned(self, processor: Any) -> tuple[int, ...]:
        """See ModelFamily."""
        vocabulary = processor.tokenizer.get_vocab()
        return tuple(sorted(vocabulary[t] for t in self.media_tokens if t in vocabulary))

    def positions(
        self,
        processor: Any,
        base: Any,
        ids_1P: torch.Tensor,
        kinds_1P: torch.Tensor,
        visuals: Sequence[Visual],
    ) -> torch.Tensor:
        """See ModelFamily."""
        import torch

        rope: dict[str, torch.Tensor] = {}
        for kind in ("image", "video"):
            if grids := [v.grid_thw for v in visuals if v.kind == kind]:
                rope[f"{kind}_grid_thw"] = torch.tensor(grids)
        takes_seconds = "second_per_grid_ts" in inspect.signature(base.get_rope_index).parameters
        if takes_seconds and "video_grid_thw" in rope:
            frames = processor.video_processor.temporal_patch_size
            rope["second_per_grid_ts"] = torch.tensor(
                [frames / v.sample_fps for v in visuals if v.kind == "video"]
            )
        positions, _ = base.get_rope_index(
            input_ids=ids_1P,
            mm_token_type_ids=kinds_1P,
            attention_mask=torch.ones_like(ids_1P),
            **rope,
        )
        return positions[-3:, 0]

    def text_inputs(
        self, positions_3RT: torch.Tensor, kinds_RT: torch.Tensor | None
    ) -> dict[str, Any]:
        """See ModelFamily."""
        kinds = {} if kinds_RT is None else {"mm_token_type_ids": kinds_RT}
        return {"position_ids": positions_3RT, **kinds}

    def pixel_inputs(
        self, kind: str, pixels: Sequence[torch.Tensor], visuals: Sequence[Visual]
    ) -> dict[str, Any] | None:
        """See ModelFamily."""
        import torch

        name = "pixel_values" if kind == "image" else "pixel_values_videos"
        joined = torch.cat(list(pixels))
        grids = torch.tensor([v.grid_thw for v in visuals], device=joined.device)
        return {name: joined, f"{kind}_grid_thw": grids}

    def features(
        self, base: Any, kind: str, pixels_nD: torch.Tensor, grids: Sequence[tuple[int, int, int]]
    ) -> list[Features]:
        """See ModelFamily."""
        import torch

        from mmrl.video.references import Features

        forward = base.get_image_features if kind == "image" else base.get_video_features
        out = forward(pixels_nD, torch.tensor(grids, device=pixels_nD.device), return_dict=True)
        deep = getattr(out, "deepstack_features", None) or ()
        return [
            Features(main, tuple(layer[i] for layer in deep))
            for i, main in enumerate(out.pooler_output)
        ]

    def encoded(self, base: Any, features: Sequence[Features]) -> Any:
        """See ModelFamily."""
        from transformers.modeling_outputs import BaseModelOutputWithPooling
        from transformers.models.qwen3_vl.modeling_qwen3_vl import (
            BaseModelOutputWithDeepstackFeatures,
        )

        main = tuple(f.main for f in features)
        if not features[0].deep:
            return BaseModelOutputWithPooling(pooler_output=main)
        deep = [tuple(f.deep[layer] for f in features) for layer in range(len(features[0].deep))]
        return BaseModelOutputWithDeepstackFeatures(pooler_output=main, deepstack_features=deep)

    def vllm_input(
        self, config: Any, kind: str, pixels_nD: torch.Tensor, grid: tuple[int, int, int]
    ) -> tuple[str, dict[str, ForVLLM]]:
        """See ModelFamily."""
        name = "pixel_values" if kind == "image" else "pixel_values_videos"
        return kind, self._for_vllm(kind, name, pixels_nD, grid)

    def vllm_features(
        self, kind: str, features_mH: torch.Tensor, grid: tuple[int, int, int]
    ) -> tuple[str, dict[str, ForVLLM]]:
        """See ModelFamily."""
        return kind, self._for_vllm(kind, f"{kind}_embeds", features_mH, grid)

    @staticmethod
    def _for_vllm(
        kind: str, name: str, rows: torch.Tensor, grid: tuple[int, int, int]
    ) -> dict[str, ForVLLM]:
        import torch

        return {
            name: ForVLLM(rows, "rows"),
            f"{kind}_grid_thw": ForVLLM(torch.tensor(grid), "host"),
        }

    def patches(self, config: Any) -> tuple[int, int]:
        """See ModelFamily."""
        return config.vision_config.patch_size, config.vision_config.spatial_merge_size

    def idle(self, base: Any) -> tuple[tuple[int, int], tuple[int, int, int]]:
        """See ModelFamily."""
        side, patch = base.visual.spatial_merge_size, base.visual.patch_embed
        width = patch.in_channels * patch.temporal_patch_size * patch.patch_size**2
        return (side * side, width), (1, side, side)
