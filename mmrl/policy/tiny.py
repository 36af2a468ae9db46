"""Build a tiny random model of a family (mmrl.policy.families) with tokenizer and processor, offline, in under a second.

The real architecture, processor classes and chat markup at toy width, for the demo, tests and CPU benchmarks:
`python -m mmrl.policy.tiny OUT --arch qwen2_5_vl`. head_dim stays >= 32 so that vLLM loads the result too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmrl.errors import ConfigError
from mmrl.policy.families import family_and_text

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin

__all__ = [
    "ARCHITECTURES",
    "TinySpec",
    "build_tiny",
    "grid_options",
    "make_tokenizer",
    "mrope_settings",
    "patch_size",
    "qwen_config",
    "qwen_processor",
    "text_settings",
    "windowed_vision",
]

ARCHITECTURES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")

_SPECIAL = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
]
# ordinary added tokens: skip_special_tokens keeps them
_TAGS = ["<think>", "</think>", "<answer>", "</answer>"]

_CHAT_TEMPLATE = """\
{%- for message in messages -%}
<|im_start|>{{ message['role'] }}
{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for item in message['content'] -%}
{% if item['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>
{%- elif item['type'] == 'video' %}<|vision_start|><|video_pad|><|vision_end|>
{%- elif item['type'] == 'text' %}{{ item['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>
{% endfor -%}
{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

# Frequent words of the generated scenes become single tokens; digits stay single tokens as in every Qwen tokenizer.
_CORPUS = """user assistant system
red circle green square blue triangle yellow circle purple square orange triangle black white gray cyan magenta pink
the red circle left of the blue square the green triangle right of the yellow circle
the purple square above the orange circle the blue triangle below the red square
Where is the box of the image? Locate the shape. largest smallest small large big left most right most
<answer>[0, 1, 2, 3]</answer> {"bbox_2d": [4, 5, 6, 7], "label": "red circle"} yes no
Think first, then answer. How many are in the image? Describe the video. first last before after moves frame seconds
"""


@dataclass(frozen=True)
class TinySpec:
    """Sizes of a tiny model. `hidden / heads` is the head width (32 at least); `kv` are key-value heads.

    `arch` names a family, or NAME:TEXT with another of its text models (`internvl:qwen3`).
    `window_vision` keeps Qwen2.5-VL's windowed attention; full attention learns to look sooner at these sizes.
    Pictures are resized to between `min_patches` and `max_patches` merged patches (28 x 28 px, Qwen3-VL 32 x 32), or of twice
    `patch_size` where it is given.
    """

    arch: str = "qwen2_5_vl"
    hidden: int = 128
    layers: int = 2
    heads: int = 4
    kv: int = 2
    vision_hidden: int = 64
    vision_layers: int = 2
    vision_heads: int = 4
    window_vision: bool = False
    vocab_size: int = 448
    min_patches: int = 4
    max_patches: int = 16
    patch_size: int = 0
    seed: int = 0

    @property
    def text(self) -> str:
        """model_type of the text model; "" where `arch` is a family alone."""
        return self.arch.partition(":")[2]


def make_tokenizer(
    vocab_size: int = 448,
    special: Sequence[str] = _SPECIAL,
    named: Mapping[str, str] | None = None,
    eos_token: str = "<|im_end|>",
    bos_token: str | None = None,
) -> PreTrainedTokenizerBase:
    """A byte-level BPE tokenizer with `special` tokens (Qwen's), trained on a page of text (deterministic). `named`: attribute of
    the tokenizer -> which of them it is. A `bos_token` is put before every text."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import Qwen2Tokenizer

    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(special) - len(_TAGS),
        min_frequency=1,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    raw.train_from_iterator([_CORPUS] * 4, trainer)
    model = json.loads(raw.to_str())["model"]
    tokenizer = Qwen2Tokenizer(
        vocab=model["vocab"],
        merges=[tuple(m) for m in model["merges"]],
        eos_token=eos_token,
        pad_token="<|endoftext|>",
        unk_token=None,
        additional_special_tokens=list(special),
        model_max_length=8192,
        **({"extra_special_tokens": dict(named)} if named else {}),
        **({"bos_token": bos_token, "add_bos_token": True} if bos_token else {}),
    )
    tokenizer.add_tokens([AddedToken(tag, normalized=False) for tag in _TAGS])
    tokenizer.padding_side = "left"
    return tokenizer


def patch_size(spec: TinySpec) -> int:
    """Side of a patch in pixels."""
    return spec.patch_size or (16 if spec.arch == "qwen3_vl" else 14)


def grid_options(spec: TinySpec) -> dict[str, Any]:
    """Of a tiny Qwen-VL's picture and clip processors alike."""
    patch = patch_size(spec)
    area = (2 * patch) ** 2
    return {
        "patch_size": patch,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "size": {"shortest_edge": spec.min_patches * area, "longest_edge": spec.max_patches * area},
    }


def qwen_processor(spec: TinySpec, tokenizer: PreTrainedTokenizerBase) -> ProcessorMixin:
    """The processor of a tiny Qwen-VL."""
    import transformers as hf

    options = grid_options(spec)
    if spec.arch == "qwen3_vl":
        options.update(image_mean=[0.5] * 3, image_std=[0.5] * 3)
    image = hf.Qwen2VLImageProcessor(**options)
    video_class = hf.Qwen3VLVideoProcessor if spec.arch == "qwen3_vl" else hf.Qwen2VLVideoProcessor
    processor_class = {
        "qwen2_vl": hf.Qwen2VLProcessor,
        "qwen2_5_vl": hf.Qwen2_5_VLProcessor,
        "qwen3_vl": hf.Qwen3VLProcessor,
    }[spec.arch]
    return processor_class(
        image_processor=image,
        tokenizer=tokenizer,
        video_processor=video_class(**options),
        chat_template=_CHAT_TEMPLATE,
    )


def text_settings(spec: TinySpec, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Of a tiny language model's configuration: what is the same for every family."""
    return {
        "vocab_size": -(-len(tokenizer) // 64) * 64,
        "hidden_size": spec.hidden,
        "intermediate_size": 2 * spec.hidden,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
        "bos_token_id": tokenizer.convert_tokens_to_ids("<|endoftext|>"),
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }


def mrope_settings(spec: TinySpec, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """`text_settings` with the three sections of Qwen-VL's rotary positions."""
    half = spec.hidden // spec.heads // 2
    temporal = half // 4
    text = text_settings(spec, tokenizer)
    # the three sections of the rotary positions sum to half the head width
    text["rope_parameters"] = {
        "rope_type": "default",
        "rope_theta": 1e4,
        "mrope_section": [
            temporal,
            (half - temporal) // 2,
            half - temporal - (half - temporal) // 2,
        ],
    }
    return text


def windowed_vision(spec: TinySpec) -> dict[str, Any]:
    """Of a tiny Qwen2.5-VL's vision tower's configuration what an Omni's has, too."""
    depth = spec.vision_layers
    return {
        "depth": depth,
        "hidden_size": spec.vision_hidden,
        "intermediate_size": 2 * spec.vision_hidden,
        "num_heads": spec.vision_heads,
        "out_hidden_size": spec.hidden,
        "patch_size": patch_size(spec),
        "fullatt_block_indexes": [depth - 1] if spec.window_vision else list(range(depth)),
        "window_size": 112,
    }


def qwen_config(spec: TinySpec, tokenizer: PreTrainedTokenizerBase) -> Any:
    """The configuration of a tiny Qwen-VL."""
    import transformers as hf

    ids = tokenizer.convert_tokens_to_ids
    text = mrope_settings(spec, tokenizer)
    top = {
        "image_token_id": ids("<|image_pad|>"),
        "video_token_id": ids("<|video_pad|>"),
        "tie_word_embeddings": True,
        "vision_start_token_id": ids("<|vision_start|>"),
        "vision_end_token_id": ids("<|vision_end|>"),
    }
    depth, width, heads = spec.vision_layers, spec.vision_hidden, spec.vision_heads
    if spec.arch == "qwen2_vl":
        vision: dict[str, Any] = {
            "depth": depth,
            "embed_dim": width,
            "hidden_size": spec.hidden,
            "mlp_ratio": 2,
            "num_heads": heads,
            "patch_size": patch_size(spec),
        }
        return hf.Qwen2VLConfig(text_config=text, vision_config=vision, **top)
    if spec.arch == "qwen2_5_vl":
        vision = windowed_vision(spec) | {"tokens_per_second": 2}
        return hf.Qwen2_5_VLConfig(text_config=text, vision_config=vision, **top)
    vision = {
        "depth": depth,
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_heads": heads,
        "out_hidden_size": spec.hidden,
    }
    text["head_dim"] = spec.hidden // spec.heads
    text["rope_parameters"]["mrope_interleaved"] = True
    vision.update(
        patch_size=patch_size(spec), num_position_embeddings=256, deepstack_visual_indexes=[0]
    )
    return hf.Qwen3VLConfig(text_config=text, vision_config=vision, **top)


def build_tiny(
    spec: TinySpec, out: str | Path | None = None
) -> tuple[PreTrainedModel, ProcessorMixin]:
    """Model (random weights from `spec.seed`) and processor; saved in Hugging Face format when `out` is given."""
    import torch
    import transformers as hf

    if spec.hidden % spec.heads or spec.heads % spec.kv:
        raise ConfigError(
            f"expected hidden divisible by heads and heads by kv, found {spec.hidden}, {spec.heads}, {spec.kv}"
        )
    family, _ = family_and_text(spec.arch, "the architecture")
    config, processor = family.tiny(spec)
    tokenizer = processor.tokenizer
    with torch.random.fork_rng():
        torch.manual_seed(spec.seed)
        model = hf.AutoModelForImageTextToText.from_config(config)
    model.generation_config = hf.GenerationConfig(
        eos_token_id=[tokenizer.eos_token_id, tokenizer.pad_token_id],
        pad_token_id=tokenizer.pad_token_id,
    )
    if out is not None:
        model.save_pretrained(out)
        processor.save_pretrained(out)
    return model, processor


def _main() -> None:
    import argparse

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out")
    for name, default in vars(TinySpec()).items():
        if isinstance(default, bool):
            parser.add_argument(f"--{name.replace('_', '-')}", action="store_true")
        else:
            parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)
    options = vars(parser.parse_args())
    model, _ = build_tiny(
        TinySpec(**{k: v for k, v in options.items() if k != "out"}), options["out"]
    )
    print(f"{options['out']}: {model.num_parameters():,} parameters")


if __name__ == "__main__":
    _main()
