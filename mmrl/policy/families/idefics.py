"""Idefics3 and SmolVLM2: square tiles named by row and column, a whole view behind them, plain rotary positions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar

from mmrl.coords import CoordFrame
from mmrl.errors import ConfigError
from mmrl.policy.families.contract import ForVLLM, Parts
from mmrl.policy.families.native import NativeAnswer, native_answers, no_source
from mmrl.policy.families.plain import LargestAlone
from mmrl.policy.families.tiles import TileFamily

if TYPE_CHECKING:
    import torch

    from mmrl.policy.tiny import TinySpec
    from mmrl.video.clips import ClipReader
    from mmrl.video.pictures import PictureReader
    from mmrl.video.references import Features, Visual

__all__ = ["Idefics3", "SmolVLM"]

# {0} begins a text
_CHAT = """{0}{%- for message in messages -%}
{{ message['role'] | capitalize }}
{%- if message['content'] is string %}{{ ': ' + message['content'] }}{% else -%}
{{ ':' if message['content'][0]['type'] == 'image' else ': ' }}{% for item in message['content'] -%}
{% if item['type'] == 'image' %}<image>{% elif item['type'] == 'text' %}{{ item['text'] }}{% endif %}
{%- endfor %}{% endif %}<end_of_utterance>
{% endfor -%}
{% if add_generation_prompt %}Assistant:{% endif %}"""
_MARKUP = ("<fake_token_around_image>", "<image>", "<global-img>")
# what the processors know names for
_PLACES = tuple(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7))


class Idefics3(LargestAlone, TileFamily):
    """Idefics3."""

    name = "idefics3"
    model_types: ClassVar[tuple[str, ...]] = ("idefics3",)
    processors: ClassVar[tuple[str, ...]] = ("Idefics3Processor",)
    frame: ClassVar[CoordFrame | None] = None
    source = "no source says so"
    answers = native_answers(
        grounding=no_source("documentation pages and issue threads on Idefics3"),
        pointing=no_source("documentation pages and issue threads on Idefics3"),
        gui=no_source("documentation pages, evaluations of ScreenSpot-Pro and lmms-eval"),
    )
    parts = Parts(
        vision=("vision_model", "connector"),
        projector=("connector",),
        tower_blocks="vision_model.encoder.layers",
        language="text_model",
        layers="text_model.layers",
    )
    refused: ClassVar[Mapping[str, str]] = {
        "video": "Idefics3 has no clips; use pictures, or a Qwen-VL for clips",
    }
    vllm: ClassVar[str] = "Idefics3ForConditionalGeneration"
    begin: ClassVar[str] = "<|begin_of_text|>"
    no_least = "the longest side of every picture becomes as long as data.max_pixels lets it"

    def reader(self, processor: Any) -> PictureReader:
        """See ModelFamily."""
        from mmrl.video.pictures import SplitReader

        return SplitReader(processor.image_processor, processor.image_seq_len)

    def image_options(
        self, processor: Any, low: int | None, high: int | None
    ) -> tuple[dict[str, Any], tuple[int, int]]:
        """See ModelFamily."""
        most = self.largest(low, high)
        tile = processor.image_processor.max_image_size["longest_edge"]
        return {"size": {"longest_edge": max(1, int(most**0.5) // tile) * tile}}, (0, most)

    def expand(self, processor: Any, visual: Visual) -> str:
        """See ModelFamily."""
        tiles, rows, columns = visual.grid_thw
        places = {"rows": [[rows if tiles > 1 else 0]], "cols": [[columns if tiles > 1 else 0]]}
        return processor.replace_image_token(places, 0)

    def banned(self, processor: Any) -> tuple[int, ...]:
        """See ModelFamily."""
        vocabulary = processor.tokenizer.get_vocab()
        return tuple(sorted(vocabulary[t] for t in (*_MARKUP, *_PLACES) if t in vocabulary))

    def features(
        self, base: Any, kind: str, pixels_nD: Any, grids: Sequence[tuple[int, int, int]]
    ) -> list[Features]:
        """See ModelFamily."""
        import torch

        from mmrl.video.references import Features

        side = base.config.vision_config.image_size
        tiles = pixels_nD.view(1, len(pixels_nD), -1, side, side)
        found = base.get_image_features(pixel_values=tiles, return_dict=True).pooler_output
        # (tiles, tokens, H), and since transformers 5.21 a list of (tokens, H), one for each row of the batch
        rows = found if torch.is_tensor(found) else torch.cat(list(found))
        tokens = rows.reshape(len(pixels_nD), -1, rows.shape[-1])
        return [Features(mine.flatten(0, 1)) for mine in tokens.split([g[0] for g in grids])]

    def encoded(self, base: Any, features: Sequence[Features]) -> Any:
        """See ModelFamily. Raises ConfigError for a part of a tile, which engine.sequence_parallel would make."""
        import torch
        from transformers.modeling_outputs import BaseModelOutputWithPooling

        rows = torch.cat([f.main for f in features])
        if len(rows) % base.image_seq_len:
            raise ConfigError(
                f"expected whole tiles of {base.image_seq_len} tokens, found {len(rows)} tokens: engine.sequence_parallel cuts "
                f"them, and {self.name} does not take parts; set it to 1"
            )
        tiles = rows.view(-1, base.image_seq_len, rows.shape[-1])
        return BaseModelOutputWithPooling(pooler_output=tiles)

    def _tiles_for_vllm(
        self, config: Any, tiles_nCHW: torch.Tensor, grid: tuple[int, int, int]
    ) -> dict[str, ForVLLM]:
        import torch

        count, _, height, width = tiles_nCHW.shape
        seen = torch.ones(count, height, width, dtype=torch.bool)  # no tile is padded
        return {
            "pixel_values": ForVLLM(tiles_nCHW, "rows"),
            "pixel_attention_mask": ForVLLM(seen, "rows"),
            "num_patches": ForVLLM(torch.tensor(count), "host"),
        }

    def patches(self, config: Any) -> tuple[int, int]:
        """See ModelFamily."""
        return config.vision_config.patch_size, config.scale_factor

    def tiny(self, spec: TinySpec) -> tuple[Any, Any]:
        """See ModelFamily."""
        from mmrl.policy import tiny

        special = ["<|endoftext|>", self.begin, "<end_of_utterance>", *_MARKUP, *_PLACES]
        tokenizer = tiny.make_tokenizer(
            spec.vocab_size, special, eos_token="<end_of_utterance>", bos_token=self.begin
        )
        patch = tiny.patch_size(spec)
        tile = {"longest_edge": 4 * patch}
        # tiles of four tokens, as many on the longer side as max_patches lets a square have
        most = {"longest_edge": max(1, int(spec.max_patches**0.5) // 2) * 4 * patch}
        processor_class, config_class, picture_class = self._classes()
        processor = processor_class(
            image_processor=picture_class(size=most, max_image_size=tile),
            tokenizer=tokenizer,
            image_seq_len=4,
            chat_template=self._chat(),
            **self._clips(most, tile),
        )
        config = config_class(
            text_config={
                "model_type": "llama",
                **tiny.text_settings(spec, tokenizer),
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
            },
            vision_config={
                "hidden_size": spec.vision_hidden,
                "num_hidden_layers": spec.vision_layers,
                "num_attention_heads": spec.vision_heads,
                "intermediate_size": 2 * spec.vision_hidden,
                "image_size": 4 * patch,
                "patch_size": patch,
            },
            image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
            pad_token_id=tokenizer.pad_token_id,
            scale_factor=2,
            tie_word_embeddings=True,
        )
        return config, processor

    def _classes(self) -> tuple[Any, Any, Any]:
        import transformers as hf

        return hf.Idefics3Processor, hf.Idefics3Config, hf.Idefics3ImageProcessor

    def _chat(self) -> str:
        return _CHAT.replace("{0}", self.begin, 1)

    def _clips(self, most: dict[str, int], tile: dict[str, int]) -> dict[str, Any]:
        """What a processor of clips adds to a tiny processor."""
        return {}


class SmolVLM(Idefics3):
    """SmolVLM2, and SmolVLM in its format: a clip's frames are tiles, each behind the time at which it was shown."""

    name = "smolvlm"
    model_types: ClassVar[tuple[str, ...]] = ("smolvlm",)
    processors: ClassVar[tuple[str, ...]] = ("SmolVLMProcessor",)
    answers = native_answers(
        grounding=no_source(
            "documentation pages, issue threads on SmolVLM; huggingface/smol2operator, which says that SmolVLM2 has no grounding "
            "capabilities for GUI tasks"
        ),
        pointing=no_source("documentation pages and issue threads on SmolVLM"),
        gui=NativeAnswer(
            "click(x=0.8875, y=0.2281)",
            CoordFrame.REL1,
            "https://github.com/huggingface/smol2operator/blob/b38695ccf2988b2947b2e0ce5ca1eb0d4a5758ec/README.md",
            of="Smol2Operator, a fine-tune of SmolVLM2",
        ),
    )
    clips_are_pictures = True
    packages: ClassVar[Mapping[str, str]] = {"num2words": "smolvlm"}
    refused: ClassVar[Mapping[str, str]] = {}
    vllm = "SmolVLMForConditionalGeneration"
    begin = "<|im_start|>"

    def chat_options(self) -> dict[str, Any]:
        """See ModelFamily. Without options of its own the processor warns in every call of those that it adds."""
        return {"processor_kwargs": {"do_sample_frames": False}}

    def clips(self, processor: Any) -> ClipReader:
        """See ModelFamily."""
        from mmrl.video.clips import SquareClips

        part = processor.video_processor
        return SquareClips(part, processor.image_seq_len, part.max_image_size["longest_edge"])

    def placeholders(self, processor: Any) -> dict[str, str]:
        """See ModelFamily."""
        return {processor.image_token: "image", processor.video_token: "video"}

    def expand(self, processor: Any, visual: Visual) -> str:
        """See ModelFamily."""
        if visual.kind == "image":
            return super().expand(processor, visual)
        import torch

        times = SimpleNamespace(
            fps=1.0, timestamps=list(visual.timestamps_s), duration=visual.duration_s
        )
        frames = torch.empty(1, visual.grid_thw[0], 0)
        return processor.replace_video_token({"pixel_values": frames, "video_metadata": [times]}, 0)

    def _classes(self) -> tuple[Any, Any, Any]:
        import transformers as hf

        self.check_packages()
        return hf.SmolVLMProcessor, hf.SmolVLMConfig, hf.SmolVLMImageProcessor

    def _chat(self) -> str:
        from transformers.models.smolvlm.processing_smolvlm import DEFAULT_CHAT_TEMPLATE

        return DEFAULT_CHAT_TEMPLATE

    def _clips(self, most: dict[str, int], tile: dict[str, int]) -> dict[str, Any]:
        import transformers as hf

        sampling = {"fps": 1, "max_frames": 64, "video_size": tile}
        return {
            "video_processor": hf.SmolVLMVideoProcessor(
                size=tile, max_image_size=tile, video_sampling=sampling
            )
        }
