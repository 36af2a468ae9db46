"""Build a tiny pi0 or pi0.5 with random weights, offline, in a second: the real architecture at toy width, for tests and CPU runs.

python -m mmrl.robotics.tiny_pi0 runs/pi0
mmrl sft configs/robot_flow.yaml model.path=runs/pi0
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from mmrl.config.shipped import shipped
from mmrl.robotics.pi0 import Pi0, Pi0Shape

__all__ = ["build_tiny_pi0", "tiny_paligemma_config"]


def tiny_paligemma_config(
    *, layers: int = 3, hidden: int = 128, side: int = 64, patch: int = 16, vocab: int = 1024
) -> Any:
    """A PaliGemma of that width for pictures of `side` x `side` pixels; eight heads, as openpi's code has them."""
    from transformers import PaliGemmaConfig

    vision = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "image_size": side,
        "patch_size": patch,
        "vision_use_head": False,
    }
    text = {
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "vocab_size": vocab,
        "pad_token_id": 0,
    }
    return PaliGemmaConfig(
        vision_config=vision, text_config=text, projection_dim=hidden, image_token_index=vocab - 1
    )


def build_tiny_pi0(
    folder: str | Path, *, chunk: int = 5, action_dim: int = 4, pi05: bool = False, seed: int = 0
) -> Path:
    """Write config.json, model.safetensors and vlm/ as mmrl.robotics.flow_load reads them; the tokenizer is that of
    assets/tiny_vlm. Returns the folder."""
    from safetensors.torch import save_file
    from transformers import AutoTokenizer

    folder = Path(folder)
    (folder / "vlm").mkdir(parents=True, exist_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(shipped("assets/tiny_vlm"))
    config = tiny_paligemma_config(vocab=64 * (len(tokenizer) // 64 + 1))
    known = {
        "type": "pi05" if pi05 else "pi0",
        "paligemma_variant": "own",
        "action_expert_variant": "own",
        "expert_width": 96,
        "expert_mlp_width": 192,
        "chunk_size": chunk,
        "max_state_dim": 8,
        "max_action_dim": action_dim,
    }
    (folder / "config.json").write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Pi0(Pi0Shape.read(folder), config)
    weights = {n: t.contiguous().clone() for n, t in model.to_files().items()}
    save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})
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
    parser.add_argument("--pi05", action="store_true", help="pi0.5 in the place of pi0")
    options = parser.parse_args()
    chunk, width = options.chunk, options.action_dim
    print(build_tiny_pi0(options.out, chunk=chunk, action_dim=width, pi05=options.pi05))


if __name__ == "__main__":
    main()
