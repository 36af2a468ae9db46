"""MiniCPM-V 4.6: a whole view and slices of a larger one, each picture with its number; the language model is Qwen3.5's, most of
whose layers carry a state."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from mmrl.coords import CoordFrame
from mmrl.errors import ConfigError, MismatchError
from mmrl.policy.families.contract import ModelFamily, Parts, release_of_transformers
from mmrl.policy.families.grid import GridFamily
from mmrl.policy.families.native import NativeAnswer, native_answers, no_source
from mmrl.policy.families.plain import LargestAlone
from mmrl.policy.families.qwen import Qwen35
from mmrl.policy.families.shapes import Tower
from mmrl.policy.families.tiles import TileFamily

if TYPE_CHECKING:
    import torch

    from mmrl.policy.tiny import TinySpec
    from mmrl.video.pictures import PictureReader
    from mmrl.video.pixels import Views
    from mmrl.video.references import Features, Visual

__all__ = ["MiniCPMV46"]

_NAMED = {
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
    "image_start_token": "<image>",
    "image_end_token": "</image>",
    "slice_start_token": "<slice>",
    "slice_end_token": "</slice>",
    "image_id_start_token": "<image_id>",
    "image_id_end_token": "</image_id>",
}
_CHAT = """\
{%- for message in messages -%}
<|im_start|>{{ message['role'] }}
{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for item in message['content'] -%}
{% if item['type'] == 'image' %}<|image_pad|>
{% elif item['type'] == 'text' %}{{ item['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>
{% endfor -%}
{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
_CHECKS = (
    *("prompt", "logp", "gradient", "turns", "rollout"),
    *("features", "freeze", "lora", "save", "value", "memory", "sharded"),
)
_ONE_SIZE = "transformers 5.18, whose tower raises for views of several sizes, such as slices; install 5.19 or later"


@functools.cache
def _cutter(side: int, patch: int, mode: str) -> Any:
    """An image processor for views of side x side pixels, asked for sizes alone."""
    from transformers import MiniCPMV4_6ImageProcessor

    return MiniCPMV4_6ImageProcessor(scale_resolution=side, patch_size=patch, downsample_mode=mode)


def _views(config: Any, grid: tuple[int, int, int]) -> Views:
    """How a picture is cut, by the model's configuration."""
    from mmrl.video.pixels import views_of

    patch = config.vision_config.patch_size
    return views_of(_cutter(config.image_size, patch, config.downsample_mode), grid)


class MiniCPMV46(LargestAlone, TileFamily):
    """MiniCPM-V 4.6. A grid is (views, height, width of the picture in pixels): a view's size depends on the picture's shape.

    A LoRA adapter reaches what it reaches of Qwen3.5.
    """

    name = "minicpmv4_6"
    layer = Qwen35.layer
    mixer = Qwen35.mixer
    model_types = ("minicpmv4_6",)
    processors = ("MiniCPMV4_6Processor",)
    frame = CoordFrame.REL1000
    source = (
        "OpenBMB/MiniCPM-V threads 772 and 982 and OpenSQZ/MiniCPM-V-CookBook thread 39, of 2.6 and 4.5: "
        "`<box>x1 y1 x2 y2</box>` within 0..1000"
    )
    answers = native_answers(
        grounding=NativeAnswer(
            "<ref>book</ref><box>100 200 300 400</box>",
            CoordFrame.REL1000,
            "https://github.com/OpenSQZ/MiniCPM-V-CookBook/issues/39",
            of="MiniCPM-V 4.5",
        ),
        pointing=NativeAnswer(
            "<point>200 300</point>",
            CoordFrame.REL1000,
            "https://github.com/OpenBMB/MiniCPM-V/issues/185",
            of="MiniCPM-V of 2024; that points have the scale of boxes is not said",
        ),
        gui=no_source(
            "OpenBMB/MiniCPM-V and its cookbook; AgentCPM-GUI, a fine-tune of an older MiniCPM-V, writes "
            '{"POINT":[x,y]} within 0..1000 (OpenBMB/AgentCPM-GUI)'
        ),
    )
    parts = Parts(
        vision=("vision_tower", "merger"),
        # vision_tower.vit_merger merges between two blocks
        projector=(".merger.",),
        tower_blocks="vision_tower.encoder.layers",
    )
    tower_kernels = GridFamily.tower_kernels
    no_least = "small pictures are enlarged to a view"

    @property
    def refused(self) -> Mapping[str, str]:  # type: ignore[override]  # elsewhere one for all releases of transformers
        """See ModelFamily."""
        reasons = {
            "video": "MiniCPM-V's clips are not laid out yet; use pictures, or a Qwen-VL for clips",
            "vllm": "vLLM's inputs for slices are not made yet, and on a CPU it computes gated delta nets in bf16 alone; use "
            "engine.rollout: own",
        }
        return (
            reasons
            if release_of_transformers() >= (5, 19)
            else dict.fromkeys(_CHECKS, _ONE_SIZE) | reasons
        )

    def check_packages(self) -> None:
        """See ModelFamily. Raises ConfigError for a transformers whose tower does not take its slices."""
        super().check_packages()
        if release_of_transformers() < (5, 19):
            raise ConfigError(
                f"expected transformers 5.19 or later for family {self.name}, found {_ONE_SIZE}"
            )

    def reader(self, processor: Any) -> PictureReader:
        """See ModelFamily."""
        from mmrl.video.pictures import SliceReader

        return SliceReader(processor)

    def expand(self, processor: Any, visual: Visual) -> str:
        """See ModelFamily."""
        import torch

        views = self.reader(processor).layout.views(visual.grid_thw)  # type: ignore[attr-defined]  # a SliceLayout
        shown = {
            "grids": [list(views.slices)],
            "num_patches_per_image": [len(views.sizes)],
            "target_sizes": torch.tensor(views.sizes),
        }
        return processor.replace_image_token(
            shown, 0, image_token_divisor=processor.image_token_divisor
        )

    def numbered(self, processor: Any, kind: str, number: int, text: str) -> str:
        """See ModelFamily."""
        if not processor.image_processor.use_image_id:
            return text
        return f"{processor.image_id_start_token}{number}{processor.image_id_end_token}{text}"

    def banned(self, processor: Any) -> tuple[int, ...]:
        """See ModelFamily."""
        vocabulary = processor.tokenizer.get_vocab()
        named = (getattr(processor, name) for name in _NAMED)
        return tuple(sorted(vocabulary[token] for token in named))

    def text_inputs(
        self, positions_3RT: torch.Tensor, kinds_RT: torch.Tensor | None
    ) -> dict[str, Any]:
        """See ModelFamily."""
        return {"position_ids": positions_3RT}

    def features(
        self, base: Any, kind: str, pixels_nD: torch.Tensor, grids: Sequence[tuple[int, int, int]]
    ) -> list[Features]:
        """See ModelFamily. Raises MismatchError where the processor's views are larger or smaller than the model's."""
        import torch

        from mmrl.video.references import Features

        side, patch = base.config.image_size, base.config.vision_config.patch_size
        sizes = [_views(base.config, grid).sizes for grid in grids]
        flat = [size for views in sizes for size in views]
        if (patches := sum(h * w for h, w in flat)) != len(pixels_nD):
            raise MismatchError(
                f"expected {patches} patches of pictures in views of image_size {side} of the model's configuration, found "
                f"{len(pixels_nD)}: its processor's scale_resolution must be equal"
            )
        rows = pixels_nD.view(len(pixels_nD), -1, patch, patch).permute(1, 2, 0, 3).flatten(2)
        targets = torch.tensor(flat, dtype=torch.int32, device=pixels_nD.device)
        found = iter(base.get_image_features(rows[None], targets, return_dict=True).pooler_output)
        return [Features(torch.cat([next(found) for _ in views])) for views in sizes]

    def encoded(self, base: Any, features: Sequence[Features]) -> Any:
        """See ModelFamily."""
        from transformers.modeling_outputs import BaseModelOutputWithPooling

        return BaseModelOutputWithPooling(pooler_output=tuple(f.main for f in features))

    def patches(self, config: Any) -> tuple[int, int]:
        """See ModelFamily."""
        return config.vision_config.patch_size, 2 if config.downsample_mode == "4x" else 4

    def tower_of(self, config: Any) -> Tower:
        """See ModelFamily. Patches are rows of pixels; behind `insert_layer_id` four of them are one, by attention and an MLP."""
        found = ModelFamily.tower_of(self, config)
        first = config.vision_config.insert_layer_id + 2
        depth = first + (found.depth - first + 1) / 4
        return replace(found, depth=depth)

    def idle(self, base: Any) -> tuple[tuple[int, int], tuple[int, int, int]]:
        """See ModelFamily. One view: smaller pictures are enlarged to it."""
        side, patch = base.config.image_size, base.config.vision_config.patch_size
        grid = (1, side, side)
        rows, columns = _views(base.config, grid).whole
        return (rows * columns, 3 * patch * patch), grid

    def tiny(self, spec: TinySpec) -> tuple[Any, Any]:
        """See ModelFamily."""
        import transformers as hf

        from mmrl.policy import tiny

        text = Qwen35().tiny(replace(spec, arch="qwen3_5"))[0].text_config.to_dict()
        special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *_NAMED.values()]
        tokenizer = tiny.make_tokenizer(spec.vocab_size, special, _NAMED)
        patch = tiny.patch_size(spec)
        # views of four tokens
        options = {"patch_size": patch, "scale_resolution": 8 * patch}
        processor = hf.MiniCPMV4_6Processor(
            image_processor=hf.MiniCPMV4_6ImageProcessor(
                max_slice_nums=max(1, spec.max_patches // 4), **options
            ),
            video_processor=hf.MiniCPMV4_6VideoProcessor(**options),
            tokenizer=tokenizer,
            chat_template=_CHAT,
        )
        config = hf.MiniCPMV4_6Config(
            text_config=text | tiny.text_settings(spec, tokenizer),
            vision_config={
                "hidden_size": spec.vision_hidden,
                "num_hidden_layers": spec.vision_layers,
                "num_attention_heads": spec.vision_heads,
                "intermediate_size": 2 * spec.vision_hidden,
                "image_size": 8 * patch,
                "patch_size": patch,
            },
            insert_layer_id=0,
            image_size=8 * patch,
            image_token_id=processor.image_token_id,
            video_token_id=processor.video_token_id,
            tie_word_embeddings=True,
        )
        return config, processor
