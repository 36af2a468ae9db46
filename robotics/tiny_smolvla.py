"""Build a tiny SmolVLA with random weights, offline, in a second: the real architecture at toy width, for tests and CPU runs.

python -m mmrl.robotics.tiny_smolvla runs/smolvla
mmrl sft configs/robot_flow.yaml model.path=runs/smolvla
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

import torch

from mmrl.config.shipped import shipped
from mmrl.robotics.smolvla import SmolVLA, SmolVLAShape

__all__ = ["build_tiny_smolvla", "tiny_vlm_config"]


def tiny_vlm_config(
    *, layers: int = 4, hidden: int = 128, patch: int = 8, vocab: int = 1024
) -> Any:
    """A SmolVLM of that width: pictures of 64 x 64 pixels, a quarter as many tokens as patches."""
    from transformers import SmolVLMConfig

    return SmolVLMConfig(
        vision_config={
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "image_size": 64,
            "patch_size": patch,
        },
        text_config={
            "model_type": "llama",
            "hidden_size": hidden,
            "intermediate_size": 2 * hidden,
            "num_hidden_layers": layers,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": hidden // 4,
            "vocab_size": vocab,
            "pad_token_id": 0,
        },
        scale_factor=2,
        pad_token_id=0,
        image_token_id=vocab - 1,
    )


def build_tiny_smolvla(
    folder: str | Path, *, chunk: int = 5, action_dim: int = 4, seed: int = 0
) -> Path:
    """Write config.json, model.safetensors and vlm/ as mmrl.robotics.flow_load reads them; the tokenizer is that of
    assets/tiny_vlm. Returns the folder."""
    from safetensors.torch import save_file
    from transformers import AutoTokenizer

    folder = Path(folder)
    (folder / "vlm").mkdir(parents=True, exist_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(shipped("assets/tiny_vlm"))
    config = tiny_vlm_config(vocab=64 * (len(tokenizer) // 64 + 1))
    shape = SmolVLAShape(
        chunk_size=chunk,
        max_state_dim=8,
        max_action_dim=action_dim,
        resize_imgs_with_padding=(64, 64),
        num_vlm_layers=config.text_config.num_hidden_layers,
        vlm_model_name="vlm",
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = SmolVLA(shape, config)
    weights = {f"model.{n}": t.contiguous().clone() for n, t in model.state_dict().items()}
    save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})
    known = {"type": "smolvla", "attention_mode": "cross_attn", **dataclasses.asdict(shape)}
    (folder / "config.json").write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
    config.save_pretrained(folder / "vlm")
    tokenizer.save_pretrained(folder / "vlm")
    return folder


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--chunk", type=int, default=5, help="action steps of a decision")
    parser.add_argument("--action-dim", type=int, default=4, help="most numbers of an action")
    options = parser.parse_args()
    print(build_tiny_smolvla(options.out, chunk=options.chunk, action_dim=options.action_dim))


if __name__ == "__main__":
    main()
