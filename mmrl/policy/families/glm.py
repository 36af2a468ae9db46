"""GLM-4.1V and GLM-4.5V: grids and M-RoPE as in Qwen2.5-VL, other markup, a picture's budget that counts its two equal frames."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

from mmrl.coords import CoordFrame
from mmrl.policy.families.experts import SigmoidRouters
from mmrl.policy.families.grid import GridFamily
from mmrl.policy.families.native import NativeAnswer, native_answers
from mmrl.policy.families.shapes import Layer, Tower

if TYPE_CHECKING:
    import torch

    from mmrl.policy.tiny import TinySpec
    from mmrl.video.references import Features, Visual

__all__ = ["Glm4V", "Glm4VMoe"]

_MARKUP = ("<|begin_of_image|>", "<|image|>", "<|end_of_image|>")
_CHAT = """[gMASK]<sop>{%- for message in messages -%}
<|{{ message['role'] }}|>
{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for item in message['content'] -%}
{% if item['type'] == 'image' %}<|begin_of_image|><|image|><|end_of_image|>
{%- elif item['type'] == 'video' %}<|begin_of_video|><|video|><|end_of_video|>
{%- elif item['type'] == 'text' %}{{ item['text'] }}{% endif %}{% endfor %}{% endif %}
{%- endfor -%}
{%- if add_generation_prompt %}<|assistant|>
{% endif %}"""


_AGENTS = "https://github.com/zai-org/GLM-V/blob/8fc9756fd2313c6b7717bb681bed58f0694abc22/examples/gui-agent"
_BOX = NativeAnswer(
    "<|begin_of_box|>[[100,200,300,400]]<|end_of_box|>",
    CoordFrame.REL1000,
    "https://github.com/zai-org/GLM-V/blob/main/README.md",
)
_POINT = NativeAnswer(
    "[[200, 300]]",
    CoordFrame.REL1000,
    "https://github.com/zai-org/GLM-skills/blob/2ecd31c37e75671a4767342ba3a68a84c8f1b848/skills/glmv-grounding/SKILL.md",
    of="GLM-V as its maintainers' tools of 2026 read it",
)


class Glm4V(GridFamily):
    """GLM-4.1V, dense."""

    name = "glm4v"
    layer = Layer(norms=4, joint=True)
    joint_layers: ClassVar[Mapping[str, tuple[str, ...]]] = MappingProxyType(
        {"gate_up_proj": ("gate_proj", "up_proj")}
    )
    tower = Tower(rms=True, attention=6, products=1, mlp=4, gated=True)
    model_types = ("glm4v",)
    processors = ("Glm4vProcessor",)
    frame = CoordFrame.REL1000
    source = "zai-org/GLM-V: boxes [x1, y1, x2, y2] normalised to 0..1000 (issue 25 says 0..999)"
    answers = native_answers(
        grounding=_BOX,
        pointing=_POINT,
        gui=NativeAnswer(
            "left_click(start_box='[376,465]')",
            CoordFrame.REL1000,
            f"{_AGENTS}/glm-41v/agent.md",
        ),
    )
    frames_in_area = 2
    clips_are_pictures = True
    media_tokens = (*_MARKUP, "<|video|>", "<|begin_of_video|>", "<|end_of_video|>")
    vllm = "Glm4vForConditionalGeneration"
    # released checkpoints say so; transformers has no such setting of the text model, always has biases, and writes none
    vllm_text: ClassVar[Mapping[str, Any]] = {"attention_bias": True}

    def kinds(self, processor: Any, ids_1P: torch.Tensor) -> torch.Tensor:
        """See ModelFamily. A clip's frames have the pictures' token, between tokens that say where it begins and ends."""
        import torch

        return torch.tensor(processor.create_mm_token_type_ids(ids_1P.numpy()))

    def pixel_inputs(
        self, kind: str, pixels: Sequence[torch.Tensor], visuals: Sequence[Visual]
    ) -> dict[str, Any] | None:
        """See ModelFamily. The model's own call takes no clip beside a picture: of clips it is given features."""
        if any(v.kind == "video" for v in visuals):
            return None
        return super().pixel_inputs(kind, pixels, visuals)

    def features(
        self, base: Any, kind: str, pixels_nD: torch.Tensor, grids: Sequence[tuple[int, int, int]]
    ) -> list[Features]:
        """See ModelFamily. The tower is shown each pair of a clip's frames as a picture."""
        import torch

        from mmrl.video.references import Features

        frames = [(1, h, w) for t, h, w in grids for _ in range(t)]
        found = iter(super().features(base, "image", pixels_nD, frames))
        return [Features(torch.cat([next(found).main for _ in range(t)])) for t, _, _ in grids]

    def _config_class(self) -> Any:
        from transformers import Glm4vConfig

        return Glm4vConfig

    def _experts(self, spec: TinySpec) -> dict[str, Any]:
        """What a mixture of experts adds to a tiny text configuration."""
        return {}

    def tiny(self, spec: TinySpec) -> tuple[Any, Any]:
        """See ModelFamily."""
        import transformers as hf

        from mmrl.policy import tiny

        special = [
            *("<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>"),
            *self.media_tokens,
        ]
        tokenizer = tiny.make_tokenizer(spec.vocab_size, special, eos_token="<|user|>")
        area = 2 * (2 * tiny.patch_size(spec)) ** 2
        options: dict[str, Any] = {
            "patch_size": tiny.patch_size(spec),
            "temporal_patch_size": 2,
            "merge_size": 2,
            "size": {
                "shortest_edge": spec.min_patches * area,
                "longest_edge": spec.max_patches * area,
            },
        }
        processor = hf.Glm4vProcessor(
            image_processor=hf.Glm4vImageProcessor(**options),
            tokenizer=tokenizer,
            video_processor=hf.Glm4vVideoProcessor(**options),
            chat_template=_CHAT,
        )
        ids = tokenizer.convert_tokens_to_ids
        text = tiny.text_settings(spec, tokenizer)
        # half of each head's width is rotated
        half = spec.hidden // spec.heads // 4
        text["rope_parameters"] = {
            "rope_type": "default",
            "rope_theta": 1e4,
            "partial_rotary_factor": 0.5,
            "mrope_section": [half - 2 * (half * 3 // 8), half * 3 // 8, half * 3 // 8],
        }
        config = self._config_class()(
            text_config=text | self._experts(spec),
            vision_config={
                "depth": spec.vision_layers,
                "hidden_size": spec.vision_hidden,
                "num_heads": spec.vision_heads,
                "patch_size": tiny.patch_size(spec),
                "out_hidden_size": spec.hidden,
                "intermediate_size": 2 * spec.vision_hidden,
            },
            image_token_id=ids("<|image|>"),
            video_token_id=ids("<|video|>"),
            image_start_token_id=ids("<|begin_of_image|>"),
            image_end_token_id=ids("<|end_of_image|>"),
            video_start_token_id=ids("<|begin_of_video|>"),
            video_end_token_id=ids("<|end_of_video|>"),
            tie_word_embeddings=True,
        )
        return config, processor


class Glm4VMoe(SigmoidRouters, Glm4V):
    """GLM-4.5V, a mixture of experts. A LoRA adapter reaches attention, and the experts with `model.lora.experts`; dense layers,
    the expert that every token goes through and routers stay as they are."""

    name = "glm4v_moe"
    never_adapted = ("gate", "gate_proj", "up_proj", "down_proj")
    layer = Layer()
    model_types = ("glm4v_moe",)
    answers = native_answers(
        grounding=_BOX,
        pointing=_POINT,
        gui=NativeAnswer(
            "left_click(start_box='[586, 446]', element_info='OK button')",
            CoordFrame.REL1000,
            f"{_AGENTS}/glm-45v/agent.md",
        ),
    )
    vllm = "Glm4vMoeForConditionalGeneration"
    vllm_text: ClassVar[Mapping[str, Any]] = {"use_qk_norm": False}

    def _config_class(self) -> Any:
        from transformers import Glm4vMoeConfig

        return Glm4vMoeConfig

    def _experts(self, spec: TinySpec) -> dict[str, Any]:
        return {
            "head_dim": spec.hidden // spec.heads,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": spec.hidden,
            "first_k_dense_replace": 1,
        }
