"""Qwen2-VL, Qwen2.5-VL and Qwen3-VL; Qwen3.5, most of whose layers carry a state; the last two also as mixtures of experts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from mmrl.coords import CoordFrame
from mmrl.policy.families.experts import SoftmaxRouters
from mmrl.policy.families.grid import GridFamily
from mmrl.policy.families.native import NativeAnswer, native_answers, no_source
from mmrl.policy.families.shapes import Layer, Mixer, Tower

if TYPE_CHECKING:
    from mmrl.policy.tiny import TinySpec

__all__ = ["Qwen2VL", "Qwen3VL", "Qwen3VLMoe", "Qwen25VL", "Qwen35", "Qwen35Moe"]


_COOKBOOKS = (
    "https://github.com/QwenLM/Qwen3-VL/blob/96588727e44c78b25ba03ea03b8e12f7e64fd0da/cookbooks"
)
# before the repository became Qwen3-VL's
_COOKBOOKS_25 = (
    "https://github.com/QwenLM/Qwen3-VL/blob/465b320d4bc365782513d500940ec76e8e06bfb9/cookbooks"
)
_SWIFT = "https://github.com/modelscope/ms-swift/blob/3602360a562313afbf2ef6065fdf61f271a2c5b9/docs/source_en"
_QWEN3 = native_answers(
    grounding=NativeAnswer(
        '```json\n[\n\t{"bbox_2d": [100, 200, 300, 400], "label": "cat"}\n]\n```',
        CoordFrame.REL1000,
        f"{_COOKBOOKS}/2d_grounding.ipynb",
    ),
    pointing=NativeAnswer(
        '```json\n[\n\t{"point_2d": [925, 618], "label": "point_1"}\n]\n```',
        CoordFrame.REL1000,
        f"{_COOKBOOKS}/spatial_understanding.ipynb",
    ),
    gui=NativeAnswer(
        '<tool_call>\n{"name": "mobile_use", "arguments": {"action": "click", "coordinate": [447, 81]}}\n</tool_call>',
        CoordFrame.REL1000,
        f"{_COOKBOOKS}/mobile_agent.ipynb",
    ),
)


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
    answers = native_answers(
        grounding=NativeAnswer(
            "<|object_ref_start|>a dog<|object_ref_end|><|box_start|>(221,423),(569,886)<|box_end|>",
            CoordFrame.REL1000,
            f"{_SWIFT}/Customization/Custom-dataset.md",
        ),
        pointing=no_source(
            "the README of QwenLM/Qwen2-VL, threads of QwenLM/Qwen3-VL; fine-tunes and ms-swift write <|box_start|>(x,y)<|box_end|>"
        ),
        # the box of what is to be clicked
        gui=NativeAnswer(
            "<|object_ref_start|>the selection<|object_ref_end|><|box_start|>(501,10),(595,30)<|box_end|>",
            CoordFrame.REL1000,
            "https://github.com/likaixin2000/ScreenSpot-Pro-GUI-Grounding/blob/bd8bbbb470fbc4fda2a4fa9ec90bd2572507794e/models/"
            "qwen2vl.py",
        ),
    )
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
    answers = native_answers(
        grounding=NativeAnswer(
            '{\n"bbox_2d": [135, 114, 1016, 672]\n}',
            CoordFrame.ABS_RESIZED,
            "https://github.com/QwenLM/Qwen3-VL/blob/dda092435b49d083cbadd8984ac0abdcfbfca09d/qwen-vl-finetune/README.md",
        ),
        pointing=NativeAnswer(
            '<points x1="394" y1="105" alt="rolling pin">rolling pin</points>',
            CoordFrame.ABS_RESIZED,
            f"{_COOKBOOKS_25}/spatial_understanding.ipynb",
        ),
        gui=NativeAnswer(
            '<tool_call>\n{"name": "mobile_use", "arguments": {"action": "click", "coordinate": [935, 406]}}\n</tool_call>',
            CoordFrame.ABS_RESIZED,
            f"{_COOKBOOKS_25}/mobile_agent.ipynb",
        ),
    )
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
    answers = _QWEN3
    vllm = "Qwen3VLForConditionalGeneration"


class Qwen3VLMoe(SoftmaxRouters, _Qwen):
    """Qwen3-VL as a mixture of experts. A LoRA adapter reaches its attention, and the experts with `model.lora.experts`; routers
    stay as they are."""

    layer = _QUERY_NORMS
    tower = Tower(attention=6, products=1)

    name = "qwen3_vl_moe"
    model_types = ("qwen3_vl_moe",)
    processors = ("Qwen3VLProcessor",)
    frame = CoordFrame.REL1000
    source = "Qwen3-VL's cookbook on grounding"
    answers = _QWEN3
    vllm = "Qwen3VLMoeForConditionalGeneration"
    vllm_text: ClassVar[Mapping[str, Any]] = {"norm_topk_prob": True}
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
    answers = native_answers(
        grounding=NativeAnswer(
            '[\n\t{"bbox_2d": [100, 200, 300, 400], "label": "sheep"}\n]',
            CoordFrame.REL1000,
            f"{_SWIFT}/BestPractices/Qwen3_8-Best-Practice.md",
        ),
        pointing=no_source(
            "threads of QwenLM, documentation pages; that Qwen3-VL's spelling has changed is not said either"
        ),
        gui=NativeAnswer(
            "<tool_call>\n<function=computer_use>\n<parameter=action>\nleft_click\n</parameter>\n<parameter=coordinate>\n"
            "[500, 300]\n</parameter>\n</function>\n</tool_call>",
            CoordFrame.REL1000,
            # a copy of OSWorld's agent
            "https://github.com/mrwwk/DeskCraft/blob/4db5e466a7281054a4b503b32b1235cd95ff3207/mm_agents/qwen35vl_agent.py",
        ),
    )
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
    that every token goes through, with `model.lora.experts` the others, too; routers stay as they are."""

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
