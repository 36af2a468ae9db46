"""Gemma 3: one square per picture, whose tokens see each other, plain rotary positions, layers that see a window beside others that
see everything."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from mmrl.errors import ConfigError
from mmrl.policy.families.contract import Parts
from mmrl.policy.families.native import native_answers, no_source
from mmrl.policy.families.shapes import Layer
from mmrl.policy.families.tiles import TileFamily

if TYPE_CHECKING:
    import torch

    from mmrl.policy.tiny import TinySpec
    from mmrl.video.pictures import PictureReader
    from mmrl.video.references import Visual

__all__ = ["Gemma3"]

_CHAT = """<bos>{%- for message in messages -%}
{{ '<start_of_turn>' + ('model' if message['role'] == 'assistant' else message['role']) + '\n' }}
{%- if message['content'] is string %}{{ message['content'] }}{% else %}{% for item in message['content'] -%}
{% if item['type'] == 'image' %}<start_of_image>{% elif item['type'] == 'text' %}{{ item['text'] }}{% endif %}
{%- endfor %}{% endif %}<end_of_turn>
{% endfor -%}
{% if add_generation_prompt %}<start_of_turn>model
{% endif %}"""
_NAMES = {
    "boi_token": "<start_of_image>",
    "eoi_token": "<end_of_image>",
    "image_token": "<image_soft_token>",
}


class Gemma3(TileFamily):
    """Gemma 3 with pictures (4B, 12B, 27B), without pan and scan."""

    name = "gemma3"
    layer = Layer(norms=4, query_norms=True, masked=True)
    model_types = ("gemma3",)
    processors = ("Gemma3Processor",)
    # nothing that Google publishes says which boxes its checkpoints were trained to write
    frame = None
    source = "no source says so"
    answers = native_answers(
        grounding=no_source(
            "https://huggingface.co/google/gemma-3-4b-it/discussions/38, where Google answers that no documentation says so"
        ),
        pointing=no_source("documentation pages of Google, issue threads"),
        gui=no_source("documentation pages of Google, evaluations of ScreenSpot-Pro and lmms-eval"),
    )
    parts = Parts(
        vision=("vision_tower", "multi_modal_projector"),
        projector=("multi_modal_projector",),
        tower_blocks="vision_tower.encoder.layers",
    )
    tower_kernels: ClassVar[Mapping[str, str]] = {"sdpa": "sdpa", "eager": "eager"}
    pictures_see_themselves = True
    refused: ClassVar[Mapping[str, str]] = {
        "video": "Gemma 3 has no clips; use pictures, or a Qwen-VL for clips",
        "vllm": "vLLM on a CPU computes without the attention among a picture's tokens and does not say so: its log-probs are "
        "another model's; use engine.rollout: own",
    }

    def reader(self, processor: Any) -> PictureReader:
        """See ModelFamily."""
        from mmrl.video.pictures import SquareReader

        # what Gemma3Processor's own call passes unless it is told otherwise
        whole = {"do_pan_and_scan": False}
        return SquareReader(processor.image_processor, processor.image_seq_length, whole)

    def image_options(
        self, processor: Any, low: int | None, high: int | None
    ) -> tuple[dict[str, Any], tuple[int, int]]:
        """See ModelFamily."""
        size = processor.image_processor.size
        raise ConfigError(
            f"expected no data.min_pixels and data.max_pixels for Gemma 3, found {low} and {high}: it resizes every picture to "
            f"{size['width']} x {size['height']}; remove both"
        )

    def placeholders(self, processor: Any) -> dict[str, str]:
        """See ModelFamily."""
        return {processor.boi_token: "image"}

    def kinds(self, processor: Any, ids_1P: torch.Tensor) -> torch.Tensor:
        """See ModelFamily."""
        return (ids_1P == processor.tokenizer.image_token_id).long()

    def expand(self, processor: Any, visual: Visual) -> str:
        """See ModelFamily."""
        return processor.full_image_sequence

    def banned(self, processor: Any) -> tuple[int, ...]:
        """See ModelFamily."""
        tokenizer = processor.tokenizer
        return tuple(sorted(tokenizer.convert_tokens_to_ids(getattr(tokenizer, n)) for n in _NAMES))

    def text_inputs(
        self, positions_3RT: torch.Tensor, kinds_RT: torch.Tensor | None
    ) -> dict[str, Any]:
        """See ModelFamily."""
        kinds = {} if kinds_RT is None else {"token_type_ids": kinds_RT}
        return {"position_ids": positions_3RT[0], **kinds}

    def step_mask(self, base: Any, seen_R11K: torch.Tensor, ago_RK: torch.Tensor) -> Any:
        """See ModelFamily."""
        near_R11K = (ago_RK < base.config.text_config.sliding_window)[:, None, None]
        return {"full_attention": seen_R11K, "sliding_attention": seen_R11K & near_R11K}

    def patches(self, config: Any) -> tuple[int, int]:
        """See ModelFamily."""
        vision = config.vision_config
        side = round(config.mm_tokens_per_image**0.5)
        return vision.patch_size, vision.image_size // vision.patch_size // side

    def tiny(self, spec: TinySpec) -> tuple[Any, Any]:
        """See ModelFamily."""
        import transformers as hf

        from mmrl.policy import tiny

        special = ["<|endoftext|>", "<start_of_turn>", "<end_of_turn>", *_NAMES.values(), "<bos>"]
        tokenizer = tiny.make_tokenizer(
            spec.vocab_size, special, _NAMES, eos_token="<end_of_turn>", bos_token="<bos>"
        )
        patch = tiny.patch_size(spec)
        tokens = 4 if spec.max_patches <= 16 else 16
        # twice as many patches on each side as tokens
        side = 2 * round(tokens**0.5) * patch
        processor = hf.Gemma3Processor(
            image_processor=hf.Gemma3ImageProcessor(size={"height": side, "width": side}),
            tokenizer=tokenizer,
            image_seq_length=tokens,
            chat_template=_CHAT,
        )
        ids = tokenizer.convert_tokens_to_ids
        config = hf.Gemma3Config(
            text_config={
                **tiny.text_settings(spec, tokenizer),
                "head_dim": spec.hidden // spec.heads,
                "query_pre_attn_scalar": spec.hidden // spec.heads,
                # shorter than the checks' prompts
                "sliding_window": 24,
                "layer_types": [
                    "full_attention" if i % 2 else "sliding_attention" for i in range(spec.layers)
                ],
            },
            vision_config={
                "hidden_size": spec.vision_hidden,
                "num_hidden_layers": spec.vision_layers,
                "num_attention_heads": spec.vision_heads,
                "intermediate_size": 2 * spec.vision_hidden,
                "image_size": side,
                "patch_size": patch,
                "vision_use_head": False,
            },
            mm_tokens_per_image=tokens,
            boi_token_index=ids(_NAMES["boi_token"]),
            eoi_token_index=ids(_NAMES["eoi_token"]),
            image_token_index=ids(_NAMES["image_token"]),
        )
        return config, processor
