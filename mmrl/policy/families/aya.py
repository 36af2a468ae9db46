"""Aya Vision: tiles with numbers, the whole view last, plain rotary positions, layers that see a window beside others that see
everything."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from mmrl.policy.families.contract import Parts
from mmrl.policy.families.gemma import Gemma3
from mmrl.policy.families.native import native_answers, no_source
from mmrl.policy.families.shapes import Layer
from mmrl.policy.families.tiles import InternVL, TileFamily

if TYPE_CHECKING:
    from mmrl.policy.tiny import TinySpec
    from mmrl.video.pictures import PictureReader
    from mmrl.video.references import Visual

__all__ = ["AyaVision"]

_CHAT = """<BOS_TOKEN>{%- for message in messages -%}
<|START_OF_TURN_TOKEN|>{{ '<|CHATBOT_TOKEN|>' if message['role'] == 'assistant' else '<|' + message['role'] | upper + '_TOKEN|>' }}
{%- if message['content'] is string %}{{ message['content'] }}{% else %}{% for item in message['content'] -%}
{% if item['type'] == 'image' %}<image>{% elif item['type'] == 'text' %}{{ item['text'] }}{% endif %}
{%- endfor %}{% endif %}<|END_OF_TURN_TOKEN|>
{%- endfor -%}
{% if add_generation_prompt %}<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>{% endif %}"""
_ROLES = (
    *("<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>"),
    *("<|SYSTEM_TOKEN|>", "<|USER_TOKEN|>", "<|CHATBOT_TOKEN|>"),
)
_MARKUP = (
    *("<image>", "<|START_OF_IMG|>", "<|END_OF_IMG|>", "<|IMG_PATCH|>", "<|IMG_LINE_BREAK|>"),
    *("TILE_GLOBAL", *(f"TILE_{number}" for number in range(1, 13))),
)


class AyaVision(TileFamily):
    """Aya Vision (8B, 32B)."""

    name = "aya_vision"
    layer = Layer(norms=1, centred=True, parallel=True)
    model_types = ("aya_vision",)
    processors = ("AyaVisionProcessor",)
    frame = None
    source = "no source says so"
    answers = native_answers(
        grounding=no_source(
            "Cohere's post on Aya Vision, the beginning of its report, documentation pages"
        ),
        pointing=no_source(
            "Cohere's post on Aya Vision, the beginning of its report, documentation pages"
        ),
        gui=no_source("documentation pages, evaluations of ScreenSpot-Pro and lmms-eval"),
    )
    parts = Parts(
        vision=("vision_tower", "multi_modal_projector"),
        projector=("multi_modal_projector",),
        tower_blocks="vision_tower.encoder.layers",
    )
    tower_kernels: ClassVar[Mapping[str, str]] = {"sdpa": "sdpa", "eager": "eager"}
    refused: ClassVar[Mapping[str, str]] = {
        "video": "Aya Vision has no clips; use pictures, or a Qwen-VL for clips",
        "vllm": "vLLM has no such model any more; use engine.rollout: own",
    }
    image_options = InternVL.image_options
    step_mask = Gemma3.step_mask

    def reader(self, processor: Any) -> PictureReader:
        """See ModelFamily."""
        from mmrl.video.pictures import TileReader

        tokens = (processor.img_size // processor.patch_size) ** 2
        return TileReader(processor.image_processor, tokens)

    def expand(self, processor: Any, visual: Visual) -> str:
        """See ModelFamily."""
        return processor.replace_image_token({"num_patches": [visual.grid_thw[0]]}, 0)

    def banned(self, processor: Any) -> tuple[int, ...]:
        """See ModelFamily."""
        vocabulary = processor.tokenizer.get_vocab()
        return tuple(sorted(vocabulary[t] for t in _MARKUP if t in vocabulary))

    def patches(self, config: Any) -> tuple[int, int]:
        """See ModelFamily."""
        return config.vision_config.patch_size, config.downsample_factor

    def layers(self, text: Any) -> tuple[Layer, ...]:
        """See ModelFamily. The mask of a window is one of numbers."""
        return tuple(
            replace(layer, masked=kind == "sliding_attention")
            for layer, kind in zip(super().layers(text), text.layer_types, strict=True)
        )

    def tiny(self, spec: TinySpec) -> tuple[Any, Any]:
        """See ModelFamily."""
        import transformers as hf

        from mmrl.policy import tiny

        special = ["<|endoftext|>", "<BOS_TOKEN>", *_ROLES, *_MARKUP]
        tokenizer = tiny.make_tokenizer(
            spec.vocab_size, special, eos_token="<|END_OF_TURN_TOKEN|>", bos_token="<BOS_TOKEN>"
        )
        patch = tiny.patch_size(spec)
        side = 4 * patch
        processor = hf.AyaVisionProcessor(
            image_processor=hf.GotOcr2ImageProcessor(
                size={"height": side, "width": side}, max_patches=max(1, spec.max_patches // 4)
            ),
            tokenizer=tokenizer,
            patch_size=patch,
            img_size=side,
            downsample_factor=2,
            chat_template=_CHAT,
        )
        config = hf.AyaVisionConfig(
            text_config={
                "model_type": "cohere2",
                **tiny.text_settings(spec, tokenizer),
                # shorter than the checks' prompts
                "sliding_window": 24,
                "layer_types": [
                    "full_attention" if i % 2 else "sliding_attention" for i in range(spec.layers)
                ],
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
            downsample_factor=2,
            image_token_index=processor.image_token_id,
        )
        return config, processor
