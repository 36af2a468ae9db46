"""Qwen2-VL, Qwen2.5-VL and Qwen3-VL."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mmrl.coords import CoordFrame
from mmrl.policy.families.grid import GridFamily

if TYPE_CHECKING:
    from mmrl.policy.tiny import TinySpec

__all__ = ["Qwen2VL", "Qwen3VL", "Qwen25VL"]


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
    source = "Qwen2-VL's report (arXiv 2409.12191, section 2.2.2)"
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
