"""Mistral Small 3 and Ministral 3: pictures of any shape, resized to whole blocks; a token at the end of each of their rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from mmrl.policy.families.contract import ForVLLM, Parts
from mmrl.policy.families.native import native_answers, no_source
from mmrl.policy.families.plain import GivenFeatures, LargestAlone, PlainPositions
from mmrl.policy.families.shapes import Tower

if TYPE_CHECKING:
    import torch

    from mmrl.policy.tiny import TinySpec
    from mmrl.video.pictures import PictureReader
    from mmrl.video.references import Features, Visual

__all__ = ["Mistral3"]

_MARKUP = ("[IMG]", "[IMG_BREAK]", "[IMG_END]")
_ROLES = ("[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]")
_CHAT = """<s>{%- for message in messages -%}
{%- set marks = {'user': ['[INST]', '[/INST]'], 'system': ['[SYSTEM_PROMPT]', '[/SYSTEM_PROMPT]'], 'assistant': ['', '</s>']} -%}
{{ marks[message['role']][0] }}
{%- if message['content'] is string %}{{ message['content'] }}{% else %}{% for item in message['content'] -%}
{% if item['type'] == 'image' %}[IMG]{% elif item['type'] == 'text' %}{{ item['text'] }}{% endif %}{% endfor %}{% endif -%}
{{ marks[message['role']][1] }}{%- endfor -%}"""
_LOOKED = "documentation pages of Mistral, issue threads on Pixtral and Mistral Small 3"


class Mistral3(PlainPositions, GivenFeatures, LargestAlone):
    """Mistral Small 3.1 and 3.2 (text model Mistral), Ministral 3. The grid is (1, rows, columns) in the tower's patches."""

    name = "mistral3"
    model_types = ("mistral3",)
    processors = ("PixtralProcessor",)
    frame = None
    source = "no source says so"
    answers = native_answers(
        grounding=no_source(_LOOKED), pointing=no_source(_LOOKED), gui=no_source(_LOOKED)
    )
    parts = Parts(
        vision=("vision_tower", "multi_modal_projector"),
        projector=("multi_modal_projector",),
        tower_blocks="vision_tower.transformer.layers",
    )
    tower = Tower(rms=True, mlp=4, gated=True, masked=True)
    no_least = "its processor enlarges no picture, but to whole blocks"
    refused: ClassVar[Mapping[str, str]] = {
        "video": "Mistral 3 has no clips; use pictures, or a Qwen-VL for clips"
    }
    tower_kernels: ClassVar[Mapping[str, str]] = {
        "sdpa": "sdpa",
        "eager": "eager",
        "flash_attention_2": "flash_attention_2",
        "flex": "sdpa",
    }
    texts = ("mistral", "ministral3")
    vllm = "Mistral3ForConditionalGeneration"
    # Ministral 3's queries grow with their position: vLLM reads that from Mistral's own files, not from those of transformers
    vllm_wants: ClassVar[Mapping[str, Any]] = {"text_config.model_type": "mistral"}

    def reader(self, processor: Any) -> PictureReader:
        """See ModelFamily."""
        from mmrl.video.pictures import RowReader

        return RowReader(processor)

    def placeholders(self, processor: Any) -> dict[str, str]:
        """See ModelFamily."""
        return {processor.image_token: "image"}

    def expand(self, processor: Any, visual: Visual) -> str:
        """See ModelFamily."""
        _, rows, columns = visual.grid_thw
        size = (rows * processor.patch_size, columns * processor.patch_size)
        return processor.replace_image_token({"image_sizes": [size]}, 0)

    def kinds(self, processor: Any, ids_1P: torch.Tensor) -> torch.Tensor:
        """See ModelFamily. The ends of rows are text."""
        return (ids_1P == processor.image_token_id).long()

    def banned(self, processor: Any) -> tuple[int, ...]:
        """See ModelFamily."""
        return tuple(sorted(processor.image_token_ids))

    def features(
        self, base: Any, kind: str, pixels_nD: torch.Tensor, grids: Sequence[tuple[int, int, int]]
    ) -> list[Features]:
        """See ModelFamily. One picture after the other: together they have a mask of all patches by all."""
        import torch

        from mmrl.video.references import Features

        side, merge = self.patches(base.config)
        made = []
        for picture in self._pictures(pixels_nD, grids, side):
            lone = picture.shape[1:].numel() == (side * merge) ** 2
            # transformers squeezes the only token of a call away
            shown = torch.stack([picture] * (1 + lone))
            sizes = torch.tensor([picture.shape[1:]] * len(shown))
            found = base.get_image_features(pixel_values=shown, image_sizes=sizes, return_dict=True)
            made.append(Features(found.pooler_output[0]))
        return made

    def _pictures(
        self, pixels_nD: torch.Tensor, grids: Sequence[tuple[int, int, int]], side: int
    ) -> list[torch.Tensor]:
        """Pictures (C, H, W) of their patches, row by row."""
        found = []
        for rows, (_, h, w) in zip(
            pixels_nD.split([g[1] * g[2] for g in grids]), grids, strict=True
        ):
            patches = rows.view(h, w, -1, side, side).permute(2, 0, 3, 1, 4)
            found.append(patches.reshape(-1, h * side, w * side))
        return found

    def encoded(self, base: Any, features: Sequence[Features]) -> Any:
        """See ModelFamily."""
        from transformers.modeling_outputs import BaseModelOutputWithPooling

        return BaseModelOutputWithPooling(pooler_output=tuple(f.main for f in features))

    def vllm_input(
        self, config: Any, kind: str, pixels_nD: torch.Tensor, grid: tuple[int, int, int]
    ) -> tuple[str, dict[str, ForVLLM]]:
        """See ModelFamily."""
        (picture,) = self._pictures(pixels_nD, [grid], self.patches(config)[0])
        return "image", {"pixel_values": ForVLLM(picture, "each")}

    def patches(self, config: Any) -> tuple[int, int]:
        """See ModelFamily."""
        return config.vision_config.patch_size, config.spatial_merge_size

    def idle(self, base: Any) -> tuple[tuple[int, int], tuple[int, int, int]]:
        """See ModelFamily."""
        side, merge = self.patches(base.config)
        return (merge * merge, base.config.vision_config.num_channels * side**2), (1, merge, merge)

    def tiny(self, spec: TinySpec) -> tuple[Any, Any]:
        """See ModelFamily."""
        import transformers as hf

        from mmrl.policy import tiny

        special = ["<|endoftext|>", "<s>", "</s>", *_ROLES, *_MARKUP]
        tokenizer = tiny.make_tokenizer(spec.vocab_size, special, eos_token="</s>")
        patch = tiny.patch_size(spec)
        longest = int(spec.max_patches**0.5) * 2 * patch
        processor = hf.PixtralProcessor(
            image_processor=hf.PixtralImageProcessor(
                size={"longest_edge": longest}, patch_size={"height": patch, "width": patch}
            ),
            tokenizer=tokenizer,
            patch_size=patch,
            spatial_merge_size=2,
            chat_template=_CHAT,
        )
        rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 1e4}
        if spec.text == "ministral3":  # whose queries grow with their position
            rope = {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 2.0,
                "original_max_position_embeddings": 64,
                "llama_4_scaling_beta": 0.1,
            }
        config = hf.Mistral3Config(
            text_config={
                "model_type": spec.text or self.texts[0],
                **tiny.text_settings(spec, tokenizer),
                "head_dim": spec.hidden // spec.heads,
                "sliding_window": None,
                "rope_parameters": rope,
            },
            vision_config={
                "hidden_size": spec.vision_hidden,
                "head_dim": spec.vision_hidden // spec.vision_heads,
                "num_hidden_layers": spec.vision_layers,
                "num_attention_heads": spec.vision_heads,
                "intermediate_size": 2 * spec.vision_hidden,
                "image_size": longest,
                "patch_size": patch,
            },
            image_token_index=processor.image_token_id,
            tie_word_embeddings=True,
        )
        return config, processor
