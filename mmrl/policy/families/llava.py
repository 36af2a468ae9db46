"""LLaVA-OneVision: a whole view, then tiles of one of many canvases, whose padding is cut off again; a newline behind each row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from mmrl.errors import ConfigError
from mmrl.policy.families.contract import ForVLLM, Parts
from mmrl.policy.families.native import native_answers, no_source
from mmrl.policy.families.tiles import TileFamily

if TYPE_CHECKING:
    import torch

    from mmrl.policy.tiny import TinySpec
    from mmrl.video.pictures import PictureReader
    from mmrl.video.references import Features, Visual

__all__ = ["LlavaOneVision"]

_CHAT = """\
{%- for message in messages -%}
<|im_start|>{{ message['role'] }}
{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for item in message['content'] -%}
{% if item['type'] == 'image' %}<image>
{% elif item['type'] == 'text' %}{{ item['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>
{% endfor -%}
{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
_RATIO = "anyres_max_9"  # of released checkpoints: more tiles than nine are scaled down to as many
_ONE = (
    "LLaVA-OneVision cuts a picture into tiles only where its prompt has no other, so that a picture is another one beside a "
    "second; mmrl encodes each picture once: one picture per prompt"
)


class LlavaOneVision(TileFamily):
    """LLaVA-OneVision in transformers' format ("-hf"), one picture per prompt.

    A grid is (tiles, height, width of the picture in pixels): how many tokens the canvas keeps depends on the picture's shape.
    """

    name = "llava_onevision"
    model_types = ("llava_onevision",)
    processors = ("LlavaOnevisionProcessor",)
    frame = None
    source = "no source says so"
    answers = native_answers(
        grounding=no_source(
            "LLaVA-VL/LLaVA-NeXT, which counts 50,586 samples of RefCOCO, not saying how boxes are spelled there; lmms-eval, which "
            "asks for 0..1; haotian-liu/LLaVA threads 606 and 822, which disagree on the padding of LLaVA-1.5's"
        ),
        pointing=no_source("LLaVA-VL/LLaVA-NeXT, issue threads"),
        gui=no_source("LLaVA-VL/LLaVA-NeXT, evaluations of ScreenSpot-Pro and lmms-eval"),
    )
    parts = Parts(
        vision=("vision_tower", "multi_modal_projector"),
        projector=("multi_modal_projector",),
        tower_blocks="vision_tower.encoder.layers",
        loose=("image_newline",),
    )
    most_pictures = 1
    refused: ClassVar[Mapping[str, str]] = {
        "pictures": _ONE,
        "turns": f"a turn after the first would bring a second picture: {_ONE}",
        "video": "LLaVA-OneVision's clips are not laid out yet; use pictures, or a Qwen-VL for clips",
    }
    vllm = "LlavaOnevisionForConditionalGeneration"
    vllm_lacks = ("vision_tower.post_layernorm.",)  # the features are those before it
    vllm_names: ClassVar[Mapping[str, str]] = {
        "model.vision_tower.": "model.vision_tower.vision_model."
    }
    vllm_wants: ClassVar[Mapping[str, Any]] = {"vision_aspect_ratio": _RATIO}

    def reader(self, processor: Any) -> PictureReader:
        """See ModelFamily."""
        from mmrl.video.pictures import CanvasReader

        return CanvasReader(processor)

    def image_options(
        self, processor: Any, low: int | None, high: int | None
    ) -> tuple[dict[str, Any], tuple[int, int]]:
        """See ModelFamily."""
        raise ConfigError(
            f"expected no data.min_pixels and data.max_pixels for LLaVA-OneVision, found {low} and {high}: its checkpoint says "
            "which canvases there are (image_grid_pinpoints); remove both"
        )

    def expand(self, processor: Any, visual: Visual) -> str:
        """See ModelFamily."""
        return processor.image_token * visual.tokens

    def banned(self, processor: Any) -> tuple[int, ...]:
        """See ModelFamily."""
        return tuple(sorted({processor.image_token_id, processor.video_token_id}))

    def features(
        self, base: Any, kind: str, pixels_nD: torch.Tensor, grids: Sequence[tuple[int, int, int]]
    ) -> list[Features]:
        """See ModelFamily."""
        import torch

        from mmrl.video.references import Features

        side = base.config.vision_config.image_size
        sizes = torch.tensor([g[1:] for g in grids])
        found = base.get_image_features(
            pixel_values=pixels_nD.view(len(pixels_nD), -1, side, side),
            image_sizes=sizes,
            return_dict=True,
        )
        return [Features(mine) for mine in found.pooler_output]

    def encoded(self, base: Any, features: Sequence[Features]) -> Any:
        """See ModelFamily."""
        from transformers.modeling_outputs import BaseModelOutputWithPooling

        return BaseModelOutputWithPooling(pooler_output=tuple(f.main for f in features))

    def _tiles_for_vllm(
        self, config: Any, tiles_nCHW: torch.Tensor, grid: tuple[int, int, int]
    ) -> dict[str, ForVLLM]:
        import torch

        return {
            "pixel_values": ForVLLM(tiles_nCHW, "each"),
            "image_sizes": ForVLLM(torch.tensor(grid[1:]), "host"),
        }

    def patches(self, config: Any) -> tuple[int, int]:
        """See ModelFamily."""
        return config.vision_config.patch_size, 1

    def idle(self, base: Any) -> tuple[tuple[int, int], tuple[int, int, int]]:
        """See ModelFamily. A whole view, and a canvas of one tile."""
        (_, width), _ = super().idle(base)
        side = base.config.vision_config.image_size
        return (2, width), (2, side, side)

    def tiny(self, spec: TinySpec) -> tuple[Any, Any]:
        """See ModelFamily."""
        import transformers as hf

        from mmrl.policy import tiny

        special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<image>", "<video>"]
        tokenizer = tiny.make_tokenizer(spec.vocab_size, special)
        patch = tiny.patch_size(spec)
        side = 2 * patch
        longest = max(4, int(spec.max_patches**0.5))  # more tiles than _RATIO keeps
        canvases = [
            [h * side, w * side] for h in range(1, longest + 1) for w in range(1, longest + 1)
        ]
        size = {"height": side, "width": side}
        shape = {"vision_feature_select_strategy": "full", "vision_aspect_ratio": _RATIO}
        processor = hf.LlavaOnevisionProcessor(
            image_processor=hf.LlavaOnevisionImageProcessor(
                size=size, image_grid_pinpoints=canvases
            ),
            tokenizer=tokenizer,
            video_processor=hf.LlavaOnevisionVideoProcessor(size=size),
            num_image_tokens=4,
            chat_template=_CHAT,
            **shape,
        )
        config = hf.LlavaOnevisionConfig(
            text_config={
                "model_type": "qwen2",
                **tiny.text_settings(spec, tokenizer),
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
            },
            vision_config={
                "model_type": "siglip_vision_model",
                "hidden_size": spec.vision_hidden,
                "num_hidden_layers": spec.vision_layers,
                "num_attention_heads": spec.vision_heads,
                "intermediate_size": 2 * spec.vision_hidden,
                "image_size": side,
                "patch_size": patch,
                "vision_use_head": False,
            },
            image_token_index=processor.image_token_id,
            video_token_index=processor.video_token_id,
            vision_feature_layer=-1,
            image_grid_pinpoints=canvases,
            tie_word_embeddings=True,
            **shape,
        )
        return config, processor
