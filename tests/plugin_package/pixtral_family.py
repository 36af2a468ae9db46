"""A family of models in somebody else's package: Pixtral 12B, which transformers holds in its class Llava.

pip install ./plugin_package && mmrl families check pixtral
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar

from mmrl.policy.families.mistral import Mistral3
from mmrl.policy.tiny import TinySpec

__all__ = ["Pixtral"]


class Pixtral(Mistral3):
    """Pictures as Mistral 3's, each patch a token."""

    name = "pixtral"
    model_types = ("llava",)
    texts = ("mistral",)
    vllm = ""
    vllm_wants: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    refused: ClassVar[Mapping[str, str]] = {
        "video": "Pixtral has no clips; use pictures, or a Qwen-VL for clips",
        "vllm": "vLLM was not tried with it; use engine.rollout: own",
    }

    def patches(self, config: Any) -> tuple[int, int]:
        """See ModelFamily."""
        return config.vision_config.patch_size, 1

    def tiny(self, spec: TinySpec) -> tuple[Any, Any]:
        """See ModelFamily."""
        import transformers as hf

        theirs, processor = super().tiny(spec)
        vision = theirs.vision_config
        edge = vision.patch_size * int(spec.max_patches**0.5)
        processor.image_processor.size = {"longest_edge": edge}
        processor.spatial_merge_size = 1
        config = hf.LlavaConfig(
            text_config=theirs.text_config,
            vision_config=vision,
            image_token_index=theirs.image_token_index,
            vision_feature_layer=-1,
            vision_feature_select_strategy="full",
            tie_word_embeddings=True,
        )
        return config, processor
