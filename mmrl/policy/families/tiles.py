"""Families that cut a picture into square tiles of one size and place tokens at plain rotary positions: InternVL."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from mmrl.coords import CoordFrame
from mmrl.policy.families.contract import ForVLLM, Parts
from mmrl.policy.families.experts import SoftmaxRouters
from mmrl.policy.families.native import NativeAnswer, native_answers
from mmrl.policy.families.plain import GivenFeatures, PlainPositions
from mmrl.policy.families.shapes import Layer, Tower

if TYPE_CHECKING:
    import torch

    from mmrl.policy.tiny import TinySpec
    from mmrl.video.clips import ClipReader
    from mmrl.video.pictures import PictureReader
    from mmrl.video.references import Features, Visual

__all__ = ["InternVL", "TileFamily"]

_CHAT = """\
{%- for message in messages -%}
<|im_start|>{{ message['role'] }}
{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for item in message['content'] -%}
{% if item['type'] == 'image' %}<IMG_CONTEXT>
{% elif item['type'] == 'video' %}<video>
{% elif item['type'] == 'text' %}{{ item['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>
{% endfor -%}
{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def _size(config: Any) -> tuple[int, int]:
    """Height and width of a tile in pixels."""
    return _pair(config.vision_config.image_size)


def _pair(size: Any) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else tuple(size)


class TileFamily(PlainPositions, GivenFeatures):
    """A grid (tiles, rows, columns) per picture, the thumbnail counted among the tiles; every tile becomes as many tokens. The
    model is given features, never pixels: its own call would hand the language model's layout to the tower."""

    parts = Parts(
        vision=("vision_tower", "multi_modal_projector"),
        projector=("multi_modal_projector",),
        tower_blocks="vision_tower.encoder.layer",
    )
    class_tokens: ClassVar[int] = 0
    """Of a tile, beside its patches, in the tower."""
    tower_kernels: ClassVar[Mapping[str, str]] = {
        "sdpa": "sdpa",
        "eager": "eager",
        "flash_attention_2": "flash_attention_2",
        "flex": "sdpa",  # tiles are equally long: there is nothing to mask
    }

    def placeholders(self, processor: Any) -> dict[str, str]:
        """See ModelFamily."""
        return {processor.image_token: "image"}

    def kinds(self, processor: Any, ids_1P: torch.Tensor) -> torch.Tensor:
        """See ModelFamily."""
        return (ids_1P == processor.image_token_id).long()

    def features(
        self, base: Any, kind: str, pixels_nD: torch.Tensor, grids: Sequence[tuple[int, int, int]]
    ) -> list[Features]:
        """See ModelFamily."""
        from mmrl.video.references import Features

        height, width = _size(base.config)
        tiles = pixels_nD.view(len(pixels_nD), -1, height, width)
        found = base.get_image_features(pixel_values=tiles, return_dict=True).pooler_output
        return [Features(mine.flatten(0, 1)) for mine in found.split([g[0] for g in grids])]

    def encoded(self, base: Any, features: Sequence[Features]) -> Any:
        """See ModelFamily."""
        import torch
        from transformers.modeling_outputs import BaseModelOutputWithPooling

        return BaseModelOutputWithPooling(pooler_output=torch.cat([f.main for f in features]))

    def vllm_input(
        self, config: Any, kind: str, pixels_nD: torch.Tensor, grid: tuple[int, int, int]
    ) -> tuple[str, dict[str, ForVLLM]]:
        """See ModelFamily. Frames of a clip are tiles of a picture to vLLM, too."""
        height, width = _size(config)
        tiles = pixels_nD.view(len(pixels_nD), -1, height, width)
        return "image", self._tiles_for_vllm(config, tiles, grid)

    def _tiles_for_vllm(
        self, config: Any, tiles_nCHW: torch.Tensor, grid: tuple[int, int, int]
    ) -> dict[str, ForVLLM]:
        """Arguments of vLLM's model for the tiles of one picture or clip."""
        raise NotImplementedError(self.refused["vllm"])

    def patches(self, config: Any) -> tuple[int, int]:
        """See ModelFamily."""
        return config.vision_config.patch_size[0], round(1 / config.downsample_ratio)

    def tower_of(self, config: Any) -> Tower:
        """See ModelFamily. A tile is a row of pixels."""
        found = super().tower_of(config)
        sides = zip(_size(config), _pair(config.vision_config.patch_size), strict=True)
        patches = math.prod(side // patch for side, patch in sides)
        rows = patches + self.class_tokens
        return replace(found, rows=float(rows), tokens=found.tokens * rows / patches)

    def idle(self, base: Any) -> tuple[tuple[int, int], tuple[int, int, int]]:
        """See ModelFamily."""
        height, width = _size(base.config)
        return (1, base.config.vision_config.num_channels * height * width), (1, 1, 1)


class InternVL(SoftmaxRouters, TileFamily):
    """InternVL 3 (text model Qwen2) and 3.5 (Qwen3, or its mixture of experts) in transformers' format ("-HF")."""

    name = "internvl"
    tower = Tower(scaled=2)
    class_tokens = 1
    model_types = ("internvl",)
    processors = ("InternVLProcessor",)
    frame = CoordFrame.REL1000
    clips_are_pictures = True
    source = "InternVL's documentation on grounding: `<box>[[x1, y1, x2, y2]]</box>` within 0..1000"
    answers = native_answers(
        grounding=NativeAnswer(
            "<ref>the cat</ref><box>[[100, 200, 300, 400]]</box>",
            CoordFrame.REL1000,
            "https://internvl.readthedocs.io/en/latest/get_started/chat_data_format.html",
        ),
        pointing=NativeAnswer(
            "<point>[[200, 300]]</point>",
            CoordFrame.REL1000,
            "https://huggingface.co/datasets/ganlinyang/Vlaser",
            of="Vlaser, a fine-tune of InternVL3",
        ),
        # not the frame of boxes
        gui=NativeAnswer(
            "pyautogui.click(x=0.2346, y=0.381)",
            CoordFrame.REL1,
            "https://github.com/OpenGVLab/InternVL/issues/998",
        ),
    )
    vllm = "InternVLForConditionalGeneration"
    texts = ("qwen2", "qwen3", "qwen3_moe")

    def layers(self, text: Any) -> tuple[Layer, ...]:
        """See ModelFamily. Qwen3's queries and keys have norms of their own."""
        norms = text.model_type.startswith("qwen3")
        return tuple(replace(layer, query_norms=norms) for layer in super().layers(text))

    def mixes_experts(self, settings: Mapping[str, Any]) -> bool:
        """See ModelFamily."""
        return (settings.get("text_config") or {}).get("model_type") == "qwen3_moe"

    def reader(self, processor: Any) -> PictureReader:
        """See ModelFamily."""
        from mmrl.video.pictures import TileReader

        return TileReader(processor.image_processor, processor.image_seq_length)

    def clips(self, processor: Any) -> ClipReader:
        """See ModelFamily."""
        from mmrl.video.clips import SquareClips

        return SquareClips(processor.video_processor, processor.image_seq_length)

    def placeholders(self, processor: Any) -> dict[str, str]:
        """See ModelFamily."""
        return {processor.image_token: "image", processor.video_token: "video"}

    def image_options(
        self, processor: Any, low: int | None, high: int | None
    ) -> tuple[dict[str, Any], tuple[int, int]]:
        """See ModelFamily."""
        part = processor.image_processor
        area = part.size["height"] * part.size["width"]
        least = part.min_patches if low is None else max(1, -(-low // area))
        most = part.max_patches if high is None else max(1, high // area)
        bounds = (least * area if low is None else low, most * area if high is None else high)
        return {"min_patches": min(least, most), "max_patches": most}, bounds

    def expand(self, processor: Any, visual: Visual) -> str:
        """See ModelFamily."""
        if visual.kind == "video":
            import torch

            frames = {"pixel_values_videos": [torch.empty(visual.grid_thw[0], 0)]}
            return processor.replace_video_token(frames, 0)
        return processor.replace_image_token({"num_patches": [visual.grid_thw[0]]}, 0)

    def banned(self, processor: Any) -> tuple[int, ...]:
        """See ModelFamily."""
        clip = processor.tokenizer.convert_tokens_to_ids(processor.video_token)
        return tuple(sorted({*processor.image_token_ids, clip}))

    def _tiles_for_vllm(
        self, config: Any, tiles_nCHW: torch.Tensor, grid: tuple[int, int, int]
    ) -> dict[str, ForVLLM]:
        import torch

        return {
            "pixel_values": ForVLLM(tiles_nCHW, "rows"),
            "image_num_patches": ForVLLM(torch.tensor(len(tiles_nCHW)), "host"),
            "image_token_id": ForVLLM(torch.tensor(config.image_token_id), "host"),
        }

    def tiny(self, spec: TinySpec) -> tuple[Any, Any]:
        """See ModelFamily."""
        import transformers as hf

        from mmrl.policy import tiny

        names = {
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "context_image_token": "<IMG_CONTEXT>",
            "video_token": "<video>",
        }
        special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *names.values()]
        tokenizer = tiny.make_tokenizer(spec.vocab_size, special, names)
        patch = tiny.patch_size(spec)
        side = 4 * patch
        processor = hf.InternVLProcessor(
            image_processor=hf.GotOcr2ImageProcessor(
                size={"height": side, "width": side}, max_patches=max(1, spec.max_patches // 4)
            ),
            tokenizer=tokenizer,
            video_processor=hf.InternVLVideoProcessor(size={"height": side, "width": side}),
            image_seq_length=4,
            chat_template=_CHAT,
        )
        text = {
            "model_type": spec.text or self.texts[0],
            **tiny.text_settings(spec, tokenizer),
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        }
        if spec.text:  # Qwen3's heads are as wide as it says
            text["head_dim"] = spec.hidden // spec.heads
        if spec.text == "qwen3_moe":
            text |= {"num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True}
            text["moe_intermediate_size"] = spec.hidden // 2
        config = hf.InternVLConfig(
            text_config=text,
            vision_config={
                "hidden_size": spec.vision_hidden,
                "num_hidden_layers": spec.vision_layers,
                "num_attention_heads": spec.vision_heads,
                "intermediate_size": 2 * spec.vision_hidden,
                "image_size": (side, side),
                "patch_size": (patch, patch),
            },
            image_token_id=tokenizer.convert_tokens_to_ids("<IMG_CONTEXT>"),
            image_seq_length=4,
            tie_word_embeddings=True,
        )
        return config, processor
