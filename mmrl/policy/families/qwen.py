"""Qwen2-VL, Qwen2.5-VL and Qwen3-VL, dense and as a mixture of experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from mmrl.coords import CoordFrame
from mmrl.policy.families.grid import GridFamily

if TYPE_CHECKING:
    from mmrl.policy.tiny import TinySpec

__all__ = ["Qwen2VL", "Qwen3VL", "Qwen3VLMoe", "Qwen25VL"]


class _Qwen(GridFamily):
    media_tokens = (
        "<|image_pad|>",
        "<|video_pad|>",
        "<|vision_start|>",
        "<|vision_end|>",
        "<|vision_pad|>",
    )

    def tiny(self, spec: TinySpec) -> tuple[Any, Any]:
        """See ModelFamily."""
        from mmrl.policy import tiny

        tokenizer = tiny.make_tokenizer(spec.vocab_size)
        return tiny.qwen_config(spec, tokenizer), tiny.qwen_processor(spec, tokenizer)


class Qwen2VL(_Qwen):
    """Qwen2-VL."""

    name = "qwen2_vl"
    model_types = ("qwen2_vl",)
    processors = ("Qwen2VLProcessor",)
    frame = CoordFrame.REL1000
    source = "Qwen's cookbooks; QwenLM/Qwen3-VL threads 676 and 1486"
    system = "You are a helpful assistant."
    vllm = "Qwen2VLForConditionalGeneration"


class Qwen25VL(_Qwen):
    """Qwen2.5-VL."""

    name = "qwen2_5_vl"
    model_types = ("qwen2_5_vl",)
    processors = ("Qwen2_5_VLProcessor",)
    frame = CoordFrame.ABS_RESIZED
    source = "Qwen2.5-VL's cookbook on grounding; QwenLM/Qwen3-VL threads 676 and 1486"
    system = "You are a helpful assistant."
    vllm = "Qwen2_5_VLForConditionalGeneration"


class Qwen3VL(_Qwen):
    """Qwen3-VL, dense."""

    name = "qwen3_vl"
    model_types = ("qwen3_vl",)
    processors = ("Qwen3VLProcessor",)
    frame = CoordFrame.REL1000
    source = "Qwen3-VL's cookbook on grounding"
    vllm = "Qwen3VLForConditionalGeneration"


class Qwen3VLMoe(_Qwen):
    """Qwen3-VL as a mixture of experts. A LoRA adapter reaches its attention; experts and routers stay as they are."""

    name = "qwen3_vl_moe"
    model_types = ("qwen3_vl_moe",)
    processors = ("Qwen3VLProcessor",)
    frame = CoordFrame.REL1000
    source = "Qwen3-VL's cookbook on grounding"
    refused: ClassVar[Mapping[str, str]] = {
        "vllm": "vLLM's names of the experts' weights are not mapped yet; use engine.rollout: own",
    }

    def tiny(self, spec: TinySpec) -> tuple[Any, Any]:
        """See ModelFamily."""
        import transformers as hf

        dense, processor = super().tiny(replace(spec, arch="qwen3_vl"))
        text, vision = dense.text_config.to_dict(), dense.vision_config.to_dict()
        for settings in (text, vision):
            settings.pop("model_type")
        text |= {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": spec.hidden,
            "decoder_sparse_step": 1,
        }
        top = {
            name: getattr(dense, name)
            for name in (
                "image_token_id",
                "video_token_id",
                "vision_start_token_id",
                "vision_end_token_id",
                "tie_word_embeddings",
            )
        }
        return hf.Qwen3VLMoeConfig(text_config=text, vision_config=vision, **top), processor
