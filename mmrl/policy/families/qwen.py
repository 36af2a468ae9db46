"""Qwen2-VL, Qwen2.5-VL and Qwen3-VL; Qwen3.5, most of whose layers carry a state; the last two also as mixtures of experts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from mmrl.coords import CoordFrame
from mmrl.policy.families.contract import EXPERTS_UNTRIED
from mmrl.policy.families.experts import SoftmaxRouters
from mmrl.policy.families.grid import GridFamily
from mmrl.policy.families.shapes import Layer, Mixer, Tower

if TYPE_CHECKING:
    from mmrl.policy.tiny import TinySpec

__all__ = ["Qwen2VL", "Qwen3VL", "Qwen3VLMoe", "Qwen25VL", "Qwen35", "Qwen35Moe"]


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


def _ids(dense: Any) -> dict[str, Any]:
    """What a tiny configuration has beside its two parts."""
    names = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    return {name: getattr(dense, name) for name in (*names, "tie_word_embeddings")}


_QUERY_NORMS = Layer(query_norms=True)
_DELTA = Layer(query_norms=True, output_gate=True)


class Qwen2VL(_Qwen):
    """Qwen2-VL."""

    # quick GELU: x, its sigmoid and their product
    tower = Tower(attention=6, products=1, mlp=3)

    def tower_of(self, config: Any) -> Tower:
        """See ModelFamily."""
        vision = config.vision_config
        return replace(
            self.tower,
            hidden=vision.embed_dim,
            inner=int(vision.embed_dim * vision.mlp_ratio),
            depth=vision.depth,
            tokens=float(vision.spatial_merge_size**2),
        )

    name = "qwen2_vl"
    model_types = ("qwen2_vl",)
    processors = ("Qwen2VLProcessor",)
    frame = CoordFrame.REL1000
    source = "Qwen's cookbooks; QwenLM/Qwen3-VL threads 676 and 1486"
    system = "You are a helpful assistant."
    vllm = "Qwen2VLForConditionalGeneration"


class Qwen25VL(_Qwen):
    """Qwen2.5-VL."""

    tower = Tower(rms=True, attention=6, products=1, mlp=4, gated=True)

    name = "qwen2_5_vl"
    model_types = ("qwen2_5_vl",)
    processors = ("Qwen2_5_VLProcessor",)
    frame = CoordFrame.ABS_RESIZED
    source = "Qwen2.5-VL's cookbook on grounding; QwenLM/Qwen3-VL threads 676 and 1486"
    system = "You are a helpful assistant."
    vllm = "Qwen2_5_VLForConditionalGeneration"


class Qwen3VL(_Qwen):
    """Qwen3-VL, dense."""

    layer = _QUERY_NORMS
    tower = Tower(attention=6, products=1)

    name = "qwen3_vl"
    model_types = ("qwen3_vl",)
    processors = ("Qwen3VLProcessor",)
    frame = CoordFrame.REL1000
    source = "Qwen3-VL's cookbook on grounding"
    vllm = "Qwen3VLForConditionalGeneration"


class Qwen3VLMoe(SoftmaxRouters, _Qwen):
    """Qwen3-VL as a mixture of experts. A LoRA adapter reaches its attention; experts and routers stay as they are."""

    layer = _QUERY_NORMS
    tower = Tower(attention=6, products=1)

    name = "qwen3_vl_moe"
    model_types = ("qwen3_vl_moe",)
    processors = ("Qwen3VLProcessor",)
    frame = CoordFrame.REL1000
    source = "Qwen3-VL's cookbook on grounding"
    vllm = "Qwen3VLMoeForConditionalGeneration"
    vllm_text: ClassVar[Mapping[str, Any]] = {"norm_topk_prob": True}
    vllm_untried = EXPERTS_UNTRIED
    released_transposed = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")

    def tiny(self, spec: TinySpec) -> tuple[Any, Any]:
        """See ModelFamily. No weight of the experts is square, as in released ones: of a square one nobody could see its order."""
        import transformers as hf

        dense, processor = super().tiny(replace(spec, arch="qwen3_vl"))
        text, vision = dense.text_config.to_dict(), dense.vision_config.to_dict()
        for settings in (text, vision):
            settings.pop("model_type")
        text |= {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 3 * spec.hidden // 4,
            "decoder_sparse_step": 1,
        }
        return hf.Qwen3VLMoeConfig(text_config=text, vision_config=vision, **_ids(dense)), processor


class Qwen35(_Qwen):
    """Qwen3.5, dense: gated delta nets between layers of attention, exact under the shared prefix (mmrl.policy.delta_net). A LoRA
    adapter of the default `model.lora.target_modules` reaches attention and MLPs; in_proj_qkv, in_proj_z and out_proj are the delta
    nets'."""

    layer = _DELTA
    tower = Tower(attention=6, products=1)
    name = "qwen3_5"
    model_types = ("qwen3_5",)
    processors = ("Qwen3VLProcessor",)
    frame = CoordFrame.REL1000
    source = "QwenLM/Qwen3.8-Flash-Next thread 4, whose answer says that it is still so"
    refused: ClassVar[Mapping[str, str]] = {
        "vllm": "vLLM on a CPU computes gated delta nets in bf16 alone: its log-probs cannot be compared closely with the "
        "trainer's; use engine.rollout: own",
    }

    def mixer(self, text: Any, number: int) -> Mixer:
        """See ModelFamily."""
        return "delta" if text.layer_types[number] == "linear_attention" else "attention"

    def tiny(self, spec: TinySpec) -> tuple[Any, Any]:
        """See ModelFamily."""

        dense, processor = super().tiny(replace(spec, arch="qwen3_vl"))
        text, vision = dense.text_config.to_dict(), dense.vision_config.to_dict()
        for settings in (text, vision):
            settings.pop("model_type")
        vision.pop("deepstack_visual_indexes")
        # half of each head's width is rotated
        half = spec.hidden // spec.heads // 4
        text |= {
            "layer_types": [
                "full_attention" if (spec.layers - i) % 2 else "linear_attention"
                for i in range(spec.layers)
            ],
            "linear_num_key_heads": spec.kv,
            "linear_num_value_heads": spec.heads,
            "linear_key_head_dim": spec.hidden // spec.heads,
            "linear_value_head_dim": spec.hidden // spec.heads,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "partial_rotary_factor": 0.5,
                "mrope_section": [half - 2 * (half * 3 // 8), half * 3 // 8, half * 3 // 8],
                "mrope_interleaved": True,
            },
        }
        return self._config(text, vision, spec)(**_ids(dense)), processor

    def _config(
        self, text: dict[str, Any], vision: dict[str, Any], spec: TinySpec
    ) -> Callable[..., Any]:
        """The configuration's class with its two parts."""
        from transformers import Qwen3_5Config

        return partial(Qwen3_5Config, text_config=text, vision_config=vision)


class Qwen35Moe(SoftmaxRouters, Qwen35):
    """Qwen3.5 as a mixture of experts. A LoRA adapter of the default `model.lora.target_modules` reaches attention and the expert
    that every token goes through; the others and routers stay as they are."""

    name = "qwen3_5_moe"
    model_types = ("qwen3_5_moe",)

    def _config(
        self, text: dict[str, Any], vision: dict[str, Any], spec: TinySpec
    ) -> Callable[..., Any]:
        from transformers import Qwen3_5MoeConfig

        text.pop("intermediate_size")
        text |= {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": spec.hidden,
            "shared_expert_intermediate_size": spec.hidden,
        }
        return partial(Qwen3_5MoeConfig, text_config=text, vision_config=vision)
