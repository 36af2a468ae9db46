"""Kimi K2.5 and K2.6: pictures of any shape, padded to whole blocks; clips in chunks of frames that share their tokens; a language
model that keeps a latent of each token in place of its keys and values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from mmrl.coords import CoordFrame
from mmrl.policy.families.contract import Parts, release_of_transformers
from mmrl.policy.families.experts import SigmoidRouters
from mmrl.policy.families.grid import GridFamily
from mmrl.policy.families.native import NativeAnswer, native_answers, no_source
from mmrl.policy.families.plain import GivenFeatures, LargestAlone, PlainPositions
from mmrl.policy.families.shapes import Layer, Tower

if TYPE_CHECKING:
    import torch

    from mmrl.policy.tiny import TinySpec
    from mmrl.video.clips import ClipReader
    from mmrl.video.pictures import PictureReader
    from mmrl.video.references import Features, Visual

__all__ = ["KimiK25"]

_MARKUP = ("<|media_begin|>", "<|media_content|>", "<|media_pad|>", "<|media_end|>")
_CLIP = "<|kimi_k25_video_placeholder|>"
_ROLES = ("<|im_system|>", "<|im_user|>", "<|im_assistant|>", "<|im_middle|>", "<|im_end|>")
_CHAT = """\
{%- for message in messages -%}
<|im_{{ message['role'] }}|>{{ message['role'] }}<|im_middle|>
{%- if message['content'] is string %}{{ message['content'] }}{% else %}{% for item in message['content'] -%}
{% if item['type'] == 'image' %}<|media_begin|>image<|media_content|><|media_pad|><|media_end|>
{%- elif item['type'] == 'video' %}<|kimi_k25_video_placeholder|>
{%- elif item['type'] == 'text' %}{{ item['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>
{%- endfor -%}
{% if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>{% endif %}"""
_NO_CLIPS = (
    "transformers before 5.24 raises for clips: its tower takes no chunks of unequal lengths, and its forward counts a chunk's "
    "tokens once per frame; use pictures, or transformers 5.24"
)


def _chunks(grid: tuple[int, int, int], frames: int) -> list[tuple[int, int, int]]:
    """The grids of a clip's chunks of `frames` frames; a picture is its own."""
    t, h, w = grid
    return [(min(frames, t - first), h, w) for first in range(0, t, frames)]


class KimiK25(SigmoidRouters, PlainPositions, GivenFeatures, LargestAlone, GridFamily):
    """Kimi K2.5 and K2.6 (Kimi-VL has remote code alone).

    A clip's grid is (frames, height, width) in patches. Each chunk of four frames, the last of what is left, is a row of tokens of
    its own behind its time: the tower attends within a chunk, and the mean of its frames is what the projector sees; how many
    frames each chunk has cannot be told to the model's own forward, which is given features. A LoRA adapter
    of the default `model.lora.target_modules` reaches o_proj, dense MLPs and the expert that every token goes through, with
    `model.lora.experts` the others, too; q_a_proj, q_b_proj, kv_a_proj_with_mqa and kv_b_proj are the rest of attention.
    """

    name = "kimi_k25"
    layer = Layer(mixer="latent")
    tower = Tower(products=1)
    model_types = ("kimi_k25",)
    processors = ("Kimi_K25Processor",)
    frame = CoordFrame.REL1
    source = (
        "OSWorld's agent for Kimi K2.5 (xlang-ai/OSWorld pull request 428) takes clicks within 0..1 for parts of the screen, "
        "larger ones for pixels; of boxes readers of MoonshotAI/Kimi-VL threads 52 and 56 say 0..1 of Kimi-VL, without an answer"
    )
    answers = native_answers(
        grounding=NativeAnswer(
            '{"bbox_2d": [0.280, 0.500, 0.520, 0.700]}',
            CoordFrame.REL1,
            "https://github.com/MoonshotAI/Kimi-VL/issues/56",
            of="Kimi-VL, as a reader saw it; Moonshot has not answered",
        ),
        pointing=no_source(
            "the README of MoonshotAI/Kimi-K2.5, threads of MoonshotAI/Kimi-VL, documentation pages"
        ),
        gui=NativeAnswer(
            "## Action:\nClick on the settings icon.\n## Code:\n```python\npyautogui.click(x=0.879, y=0.294)\n```",
            CoordFrame.REL1,
            "https://github.com/xlang-ai/OSWorld/pull/428",
        ),
    )
    parts = Parts(
        vision=("vision_tower", "mm_projector"),
        projector=("mm_projector",),
        tower_blocks="vision_tower.layers",
    )
    media_tokens = (*_MARKUP, _CLIP)
    no_least = "its processor enlarges no picture"

    @property
    def refused(self) -> Mapping[str, str]:  # type: ignore[override]  # elsewhere one for all releases of transformers
        """See ModelFamily."""
        reasons = {
            "vllm": "vLLM's names of the experts' weights are not mapped yet; use engine.rollout: own",
        }
        if release_of_transformers() < (5, 24):
            reasons["video"] = _NO_CLIPS
        return reasons

    def reader(self, processor: Any) -> PictureReader:
        """See ModelFamily."""
        from mmrl.video.pictures import PaddedReader

        return PaddedReader(processor.image_processor)

    def clips(self, processor: Any) -> ClipReader:
        """See ModelFamily."""
        from mmrl.video.clips import ChunkClips

        return ChunkClips(processor.video_processor)

    def expand(self, processor: Any, visual: Visual) -> str:
        """See ModelFamily."""
        if visual.kind == "image":
            return super().expand(processor, visual)
        import torch

        chunks = _chunks(visual.grid_thw, processor.video_processor.temporal_patch_size)
        times = SimpleNamespace(fps=1.0, timestamps=list(visual.timestamps_s))
        clip = {
            "video_grid_thw": torch.tensor(chunks),
            "num_chunks_per_video": [len(chunks)],
            "video_metadata": [times],
        }
        return processor.replace_video_token(clip, 0)

    def features(
        self, base: Any, kind: str, pixels_nD: torch.Tensor, grids: Sequence[tuple[int, int, int]]
    ) -> list[Features]:
        """See ModelFamily. By tower and projector: transformers' own call of both knows no chunks before 5.24."""
        import torch

        from mmrl.video.references import Features

        side, merge = self.patches(base.config)
        rows = [_chunks(grid, base.config.vision_config.pos_emb_time) for grid in grids]
        seen = base.vision_tower(
            pixels_nD.view(len(pixels_nD), -1, side, side),
            torch.tensor([chunk for chunks in rows for chunk in chunks], device=pixels_nD.device),
        )
        main = base.mm_projector(seen.pooler_output).squeeze(1)
        tokens = [len(chunks) * chunks[0][1] * chunks[0][2] // merge**2 for chunks in rows]
        return [Features(mine) for mine in main.split(tokens)]

    def patches(self, config: Any) -> tuple[int, int]:
        """See ModelFamily."""
        return config.vision_config.patch_size, config.vision_config.merge_kernel_size[0]

    def idle(self, base: Any) -> tuple[tuple[int, int], tuple[int, int, int]]:
        """See ModelFamily."""
        side, merge = self.patches(base.config)
        return (merge * merge, 3 * side * side), (1, merge, merge)

    def tiny(self, spec: TinySpec) -> tuple[Any, Any]:
        """See ModelFamily."""
        import transformers as hf

        from mmrl.policy import tiny

        special = ["<|endoftext|>", *_ROLES, *self.media_tokens]
        tokenizer = tiny.make_tokenizer(spec.vocab_size, special)
        patch = tiny.patch_size(spec)
        options: dict[str, Any] = {"patch_size": patch, "max_patches": 4 * spec.max_patches}
        processor = hf.Kimi_K25Processor(
            image_processor=hf.Kimi_K25ImageProcessor(**options),
            tokenizer=tokenizer,
            video_processor=hf.Kimi_K25VideoProcessor(**options),
            chat_template=_CHAT,
        )
        width = spec.hidden // spec.heads
        config = hf.Kimi_K25Config(
            text_config={
                "model_type": "deepseek_v3",
                **tiny.text_settings(spec, tokenizer),
                "num_key_value_heads": spec.heads,
                "q_lora_rank": spec.hidden // 2,
                "kv_lora_rank": spec.hidden // 2,
                # as in released models keys are wider than values
                "qk_nope_head_dim": width,
                "qk_rope_head_dim": width // 2,
                "v_head_dim": width,
                "n_routed_experts": 4,
                "num_experts_per_tok": 2,
                "n_group": 1,
                "topk_group": 1,
                "moe_intermediate_size": spec.hidden,
                "first_k_dense_replace": 1,
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
            },
            vision_config={
                "hidden_size": spec.vision_hidden,
                "num_hidden_layers": spec.vision_layers,
                "num_attention_heads": spec.vision_heads,
                "intermediate_size": 2 * spec.vision_hidden,
                "patch_size": patch,
                "pos_emb_height": 16,
                "pos_emb_width": 16,
            },
            projection_hidden_size=spec.vision_hidden,
            image_token_id=processor.image_token_id,
            video_token_id=processor.video_token_id,
            vision_start_token_id=tokenizer.convert_tokens_to_ids("<|media_begin|>"),
            vision_end_token_id=tokenizer.convert_tokens_to_ids("<|media_end|>"),
            tie_word_embeddings=True,
        )
        return config, processor
