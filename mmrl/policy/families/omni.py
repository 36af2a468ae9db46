"""Qwen2.5-Omni's thinker: sees as Qwen2.5-VL does, hears, and writes text. What speaks for it (talker, token2wav) is left out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from mmrl.coords import CoordFrame
from mmrl.errors import MismatchError
from mmrl.policy.families.contract import Parts
from mmrl.policy.families.grid import GridFamily
from mmrl.policy.families.native import NativeAnswer, native_answers, no_source
from mmrl.policy.families.plain import GivenFeatures
from mmrl.policy.families.shapes import Tower

if TYPE_CHECKING:
    import torch

    from mmrl.policy.tiny import TinySpec
    from mmrl.video.audio import AudioReader
    from mmrl.video.references import Features, Visual

__all__ = ["Qwen25Omni"]

_NAMED = {
    "image_token": "<|IMAGE|>",
    "audio_token": "<|AUDIO|>",
    "video_token": "<|VIDEO|>",
    "vision_bos_token": "<|vision_bos|>",
    "vision_eos_token": "<|vision_eos|>",
    "audio_bos_token": "<|audio_bos|>",
    "audio_eos_token": "<|audio_eos|>",
}
_CHAT = """\
{%- for message in messages -%}
<|im_start|>{{ message['role'] }}
{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for item in message['content'] -%}
{% if item['type'] == 'image' %}<|vision_bos|><|IMAGE|><|vision_eos|>
{%- elif item['type'] == 'video' %}<|vision_bos|><|VIDEO|><|vision_eos|>
{%- elif item['type'] == 'audio' %}<|audio_bos|><|AUDIO|><|audio_eos|>
{%- elif item['type'] == 'text' %}{{ item['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>
{% endfor -%}
{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


class Qwen25Omni(GivenFeatures, GridFamily):
    """Qwen2.5-Omni: pictures, clips and sounds in, text out. Of a whole checkpoint (Qwen2_5OmniForConditionalGeneration) the
    thinker is loaded; what is saved is a Qwen2_5OmniThinkerForConditionalGeneration.

    The thinker of transformers' own forward computes all its logits, and takes no features of sounds: its text model is called
    here with the features put in their places. A clip's own sound is not heard (`use_audio_in_video`): its tokens and the clip's
    would have to alternate in time.
    """

    name = "qwen2_5_omni"
    tower = Tower(rms=True, attention=4, products=3, mlp=4, gated=True)
    model_types = ("qwen2_5_omni_thinker", "qwen2_5_omni")
    processors = ("Qwen2_5OmniProcessor",)
    frame = CoordFrame.ABS_RESIZED
    source = (
        "ms-swift's template (norm_bbox none, as Qwen2.5-VL's); Qwen has not answered QwenLM/Qwen2.5-Omni threads 236 and 392, "
        "which ask for it"
    )
    answers = native_answers(
        # ms-swift's template is a subclass of that of Qwen2.5-VL
        grounding=NativeAnswer(
            "<|object_ref_start|>a dog<|object_ref_end|><|box_start|>(432,991),(1111,2077)<|box_end|>",
            CoordFrame.ABS_RESIZED,
            "https://github.com/modelscope/ms-swift/blob/3602360a562313afbf2ef6065fdf61f271a2c5b9/docs/source_en/Instruction/"
            "Command-line-parameters.md",
            of="ms-swift's template",
        ),
        pointing=no_source(
            "threads of QwenLM/Qwen2.5-Omni (236 and 392 ask for boxes alone), ms-swift"
        ),
        gui=no_source("threads of QwenLM/Qwen2.5-Omni, documentation pages"),
    )
    system = "You are a helpful assistant."
    media_tokens = (*_NAMED.values(), "<|vision_pad|>")
    reserved = tuple(_NAMED.values())
    refused: ClassVar[Mapping[str, str]] = {
        "vllm": "vLLM's inputs for sounds are not made yet, and what is saved, a thinker alone, is no model of vLLM's: "
        "transformers reads it; use engine.rollout: own",
    }

    @property
    def parts(self) -> Parts:  # type: ignore[override]  # elsewhere one for all releases of transformers
        """See ModelFamily. Until transformers 5.20 towers and text model lie beside the output layer, since then in a model of
        their own below it."""
        from transformers.models.qwen2_5_omni import modeling_qwen2_5_omni

        nested = hasattr(modeling_qwen2_5_omni, "Qwen2_5OmniThinkerModel")
        language = "language_model" if nested else "model"
        return Parts(
            language=language,
            layers=f"{language}.layers",
            hearing=("audio_tower",),
            hearing_blocks="audio_tower.layers",
        )

    def part_config(self, config: Any) -> Any:
        """See ModelFamily: the thinker's."""
        return getattr(config, "thinker_config", config)

    def body(self, model: Any) -> Any:
        """See ModelFamily: what holds towers and text model."""
        return model.model if hasattr(model.model, "audio_tower") else model

    def forward(self, body: Any, **inputs: Any) -> Any:
        """See ModelFamily."""
        import torch

        ids_RT, media = inputs.pop("input_ids"), inputs.pop("mm_encoder_outputs", {})
        embedded_RTH = body.get_input_embeddings()(ids_RT)
        for kind, features in media.items():
            rows_nH = torch.cat(list(features)).to(embedded_RTH)
            shown_RT = ids_RT == getattr(body.config, f"{kind}_token_id")
            if (tokens := int(shown_RT.sum())) != len(rows_nH):
                raise MismatchError(
                    f"expected one feature per {kind} token, found {len(rows_nH)} for {tokens} tokens"
                )
            embedded_RTH = embedded_RTH.masked_scatter(shown_RT[..., None], rows_nH)
        return self.parts.decoder(body)(inputs_embeds=embedded_RTH, **inputs)

    def ears(self, processor: Any) -> AudioReader:
        """See ModelFamily."""
        from mmrl.video.audio import MelReader

        return MelReader(processor.feature_extractor)

    def placeholders(self, processor: Any) -> dict[str, str]:
        """See ModelFamily."""
        return {**super().placeholders(processor), processor.audio_token: "audio"}

    def expand(self, processor: Any, visual: Visual) -> str:
        """See ModelFamily."""
        return str(getattr(processor, f"{visual.kind}_token")) * visual.tokens

    def _slots(self, processor: Any) -> tuple[tuple[int, Sequence[int | None]], ...]:
        ids = processor.tokenizer.convert_tokens_to_ids
        tokens = (processor.image_token, processor.video_token, processor.audio_token)
        return tuple((number, [ids(token)]) for number, token in enumerate(tokens, 1))

    def positions(
        self,
        processor: Any,
        base: Any,
        ids_1P: torch.Tensor,
        kinds_1P: torch.Tensor,
        visuals: Sequence[Visual],
    ) -> torch.Tensor:
        """See ModelFamily. A sound's tokens follow each other as text does: one every 40 ms, as many as a clip's second counts."""
        import torch

        grids = {
            kind: torch.tensor([v.grid_thw for v in visuals if v.kind == kind] or [[0, 0, 0]])
            for kind in ("image", "video", "audio")
        }
        shown = {v.kind for v in visuals}
        frames = processor.video_processor.temporal_patch_size
        positions, _ = base.get_rope_index(
            input_ids=ids_1P,
            image_grid_thw=grids["image"] if "image" in shown else None,
            video_grid_thw=grids["video"] if "video" in shown else None,
            attention_mask=torch.ones_like(ids_1P),
            audio_seqlens=grids["audio"][:, 0],
            second_per_grids=torch.tensor(
                [frames / v.sample_fps for v in visuals if v.kind == "video"]
            ),
        )
        return positions[:, 0]

    def text_inputs(
        self, positions_3RT: torch.Tensor, kinds_RT: torch.Tensor | None
    ) -> dict[str, Any]:
        """See ModelFamily."""
        return {"position_ids": positions_3RT}

    def features(
        self, base: Any, kind: str, pixels_nD: torch.Tensor, grids: Sequence[tuple[int, int, int]]
    ) -> list[Features]:
        """See ModelFamily."""
        import torch

        from mmrl.video.audio import tokens_of
        from mmrl.video.references import Features

        if kind != "audio":
            return super().features(base, kind, pixels_nD, grids)
        frames = [n for n, _, _ in grids]
        heard = base.audio_tower(
            pixels_nD.T, feature_lens=torch.tensor(frames, device=pixels_nD.device)
        )
        rows = heard.last_hidden_state.split([tokens_of(n) for n in frames])
        return [Features(main) for main in rows]

    def encoded(self, base: Any, features: Sequence[Features]) -> Any:
        """See ModelFamily."""
        return tuple(f.main for f in features)

    def idle_sound(self, base: Any) -> tuple[tuple[int, int], tuple[int, int, int]]:
        """See ModelFamily."""
        return (4, base.audio_tower.conv1.in_channels), (4, 1, 1)

    def tiny(self, spec: TinySpec) -> tuple[Any, Any]:
        """See ModelFamily."""
        import transformers as hf

        from mmrl.policy import tiny

        special = [
            *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_pad|>"),
            *_NAMED.values(),
        ]
        tokenizer = tiny.make_tokenizer(spec.vocab_size, special, named=_NAMED)
        options = tiny.grid_options(spec)
        bins = 32
        processor = hf.Qwen2_5OmniProcessor(
            image_processor=hf.Qwen2VLImageProcessor(**options),
            video_processor=hf.Qwen2VLVideoProcessor(**options),
            feature_extractor=hf.WhisperFeatureExtractor(feature_size=bins, chunk_length=30),
            tokenizer=tokenizer,
            chat_template=_CHAT,
        )
        ids = tokenizer.convert_tokens_to_ids
        config = hf.Qwen2_5OmniThinkerConfig(
            text_config=tiny.mrope_settings(spec, tokenizer),
            vision_config=tiny.windowed_vision(spec),
            audio_config={
                "num_mel_bins": bins,
                "encoder_layers": spec.vision_layers,
                "encoder_attention_heads": spec.vision_heads,
                "encoder_ffn_dim": 2 * spec.vision_hidden,
                "d_model": spec.vision_hidden,
                # so that a sound of half a second has two windows
                "n_window": 20,
                "output_dim": spec.hidden,
            },
            image_token_index=ids(processor.image_token),
            video_token_index=ids(processor.video_token),
            audio_token_index=ids(processor.audio_token),
            audio_start_token_id=ids(processor.audio_bos_token),
            audio_end_token_id=ids(processor.audio_eos_token),
            vision_start_token_id=ids(processor.vision_bos_token),
            vision_end_token_id=ids(processor.vision_eos_token),
            user_token_id=tokenizer("user")["input_ids"][0],
            tie_word_embeddings=True,
        )
        return config, processor
