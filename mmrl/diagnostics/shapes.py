"""Shapes of public Qwen-VL models, for estimates and benchmarks where neither weights nor a network are at hand.

Numbers are those of config.json of Qwen/NAME on the Hugging Face hub (read from public copies; the parameter counts that follow
from them equal those the hub displays, see tests/diagnostics/test_memory.py).
"""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

from mmrl.errors import ConfigError, did_you_mean

__all__ = ["SHAPES", "config_of", "meta_model", "shape_config"]

_Q2 = {"depth": 32, "embed_dim": 1280, "mlp_ratio": 4, "num_heads": 16, "patch_size": 14}
_Q25 = {
    "depth": 32,
    "hidden_size": 1280,
    "intermediate_size": 3420,
    "num_heads": 16,
    "patch_size": 14,
    "window_size": 112,
    "fullatt_block_indexes": [7, 15, 23, 31],
    "tokens_per_second": 2,
}
_Q3_SMALL = {
    "depth": 24,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_heads": 16,
    "patch_size": 16,
    "num_position_embeddings": 2304,
    "deepstack_visual_indexes": [5, 11, 17],
}
_Q3_LARGE = {
    **_Q3_SMALL,
    "depth": 27,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "deepstack_visual_indexes": [8, 16, 24],
}

# name: (model type, hidden, intermediate, layers, heads, key-value heads, vocabulary, tied embeddings, vision tower)
SHAPES: dict[str, tuple[str, int, int, int, int, int, int, bool, dict[str, Any]]] = {
    "Qwen2-VL-2B-Instruct": ("qwen2_vl", 1536, 8960, 28, 12, 2, 151936, True, _Q2),
    "Qwen2-VL-7B-Instruct": ("qwen2_vl", 3584, 18944, 28, 28, 4, 152064, False, _Q2),
    "Qwen2.5-VL-3B-Instruct": ("qwen2_5_vl", 2048, 11008, 36, 16, 2, 151936, True, _Q25),
    "Qwen2.5-VL-7B-Instruct": ("qwen2_5_vl", 3584, 18944, 28, 28, 4, 152064, False, _Q25),
    "Qwen2.5-VL-32B-Instruct": (
        "qwen2_5_vl",
        5120,
        27648,
        64,
        40,
        8,
        152064,
        False,
        {**_Q25, "intermediate_size": 3456},
    ),
    "Qwen2.5-VL-72B-Instruct": (
        "qwen2_5_vl",
        8192,
        29568,
        80,
        64,
        8,
        152064,
        False,
        {**_Q25, "intermediate_size": 3456},
    ),
    "Qwen3-VL-2B-Instruct": ("qwen3_vl", 2048, 6144, 28, 16, 8, 151936, True, _Q3_SMALL),
    "Qwen3-VL-4B-Instruct": ("qwen3_vl", 2560, 9728, 36, 32, 8, 151936, True, _Q3_SMALL),
    "Qwen3-VL-8B-Instruct": ("qwen3_vl", 4096, 12288, 36, 32, 8, 151936, False, _Q3_LARGE),
    "Qwen3-VL-32B-Instruct": ("qwen3_vl", 5120, 25600, 64, 64, 8, 151936, False, _Q3_LARGE),
}
_TOKENS = {
    "vision_start_token_id": 151652,
    "vision_end_token_id": 151653,
    "image_token_id": 151655,
    "video_token_id": 151656,
}


def shape_config(name: str) -> Any:
    """The transformers configuration of a public model. Raises ConfigError for a name that is not in SHAPES."""
    import transformers as hf

    if name not in SHAPES:
        raise ConfigError(
            f"expected a model of {', '.join(SHAPES)}, found '{name}'.{did_you_mean(name, SHAPES)}"
        )
    kind, hidden, intermediate, layers, heads, kv, vocabulary, tied, vision = SHAPES[name]
    text: dict[str, Any] = {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "vocab_size": vocabulary,
        "tie_word_embeddings": tied,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 128000,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e6,
            "mrope_section": [16, 24, 24],
        },
    }
    if kind == "qwen3_vl":
        text |= {
            "head_dim": 128,
            "max_position_embeddings": 262144,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 5e6,
                "mrope_section": [24, 20, 20],
                "mrope_interleaved": True,
            },
        }
    out = {"hidden_size": hidden} if kind == "qwen2_vl" else {"out_hidden_size": hidden}
    classes = {
        "qwen2_vl": hf.Qwen2VLConfig,
        "qwen2_5_vl": hf.Qwen2_5_VLConfig,
        "qwen3_vl": hf.Qwen3VLConfig,
    }
    return classes[kind](
        text_config=text, vision_config={**vision, **out}, tie_word_embeddings=tied, **_TOKENS
    )


def _numbers_of_own(folder: Path) -> int | None:
    """Parameters of a folder whose config.json is of another library (lerobot's SmolVLA, openpi's pi0), from its weights' header;
    None where it is transformers', or has no weights."""
    from safetensors import SafetensorError, safe_open
    from transformers import CONFIG_MAPPING

    try:
        known = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        if not isinstance(known, dict) or known.get("model_type") in CONFIG_MAPPING:
            return None
        count = 0
        for path in sorted(folder.glob("model*.safetensors")):
            with safe_open(str(path), "pt") as file:
                count += sum(math.prod(file.get_slice(n).get_shape()) for n in file.keys())  # noqa: SIM118
        return count or None
    except (OSError, ValueError, SafetensorError):
        return None  # what is wrong with it is for AutoConfig to say


def config_of(path: str) -> Any:
    """The transformers configuration of a folder or hub name, without weights; of a model of SHAPES without the hub, too.

    Raises ConfigError where there is none.
    """
    from transformers import AutoConfig

    from mmrl.policy.families import part_config

    name = path.rstrip("/").rsplit("/", 1)[-1]
    if name in SHAPES and not Path(path).exists():
        return shape_config(name)
    if (numbers := _numbers_of_own(Path(path))) is not None:
        raise ConfigError(
            f"{path} is no model of transformers (by the model_type of its config.json), so its activations are not estimated: "
            f"{numbers / 1e6:.1f} M parameters, {4 * numbers / 2**30:.2f} GiB in fp32, with gradients and AdamW's moments "
            f"{16 * numbers / 2**30:.2f} GiB where all are trained"
        )
    try:
        return part_config(AutoConfig.from_pretrained(path, trust_remote_code=False))
    except (OSError, ValueError) as error:
        raise ConfigError(
            "expected model.path to be a folder with a config.json, a hub name that can be reached or lies in the "
            f"cache, or one of {', '.join(SHAPES)}; found '{path}': {str(error).splitlines()[0]}"
        ) from error


def meta_model(config: Any, dtype: Any = None) -> Any:
    """The model of a configuration on torch's meta device: every parameter with shape and type, no memory."""
    import torch
    from transformers import AutoModelForImageTextToText

    config = copy.deepcopy(config)
    # a loaded model's configuration names mmrl's own, which from_config would look up
    config._attn_implementation = "sdpa"
    with torch.device("meta"):
        return AutoModelForImageTextToText.from_config(config, dtype=dtype or torch.float32)
