"""Build a tiny OpenVLA-OFT with random weights, offline, in a second: the real architecture at toy width, for tests and CPU runs.

python -m mmrl.robotics.tiny_oft runs/oft --proprio 2
mmrl sft configs/robot_flow.yaml model.path=runs/oft
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

import torch

from mmrl.config.shipped import shipped
from mmrl.robotics.oft import OFTShape, OpenVLAOFT, TowerShape

__all__ = ["build_tiny_oft"]


def build_tiny_oft(folder: str | Path, *, proprio: int = 0, bins: int = 256, seed: int = 0) -> Path:
    """Write config.json, model.safetensors and the tokenizer of assets/tiny_vlm, as mmrl.robotics.oft_load reads them. `proprio`:
    numbers of proprioception; `bins`: action tokens, 256 in released checkpoints, of which a tiny policy's choice among neighbours
    is mostly noise. Returns the folder."""
    from safetensors.torch import save_file
    from transformers import AutoTokenizer

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(shipped("assets/tiny_vlm"))
    towers = (
        TowerShape(64, 3, 4, 128, 4, side=64, patch=8),
        TowerShape(64, 3, 4, 128, 0, side=64, patch=8),
    )
    text = {
        "model_type": "llama",
        "hidden_size": 96,
        "intermediate_size": 192,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "vocab_size": 64 * (len(tokenizer) // 64 + 1) + 256 + 64,
    }
    known = {
        "model_type": "openvla",
        "vision_backbone_id": "own",
        "towers": [dataclasses.asdict(t) for t in towers],
        "text_config": text,
        "pad_token_id": 0,
        "n_action_bins": bins,
        "pad_to_multiple_of": 64,
    }
    (folder / "config.json").write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = OpenVLAOFT(OFTShape.read(folder, proprio_dim=proprio))
    weights = {n: t.contiguous().clone() for n, t in model.state_dict().items()}
    for name, tensor in weights.items():
        if name.endswith(
            "scale_factor"
        ):  # 1e-5, where training begins: the towers would do nothing
            tensor.fill_(1.0)
    save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})
    tokenizer.save_pretrained(folder)
    return folder


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--proprio", type=int, default=0, help="numbers of proprioception")
    parser.add_argument("--bins", type=int, default=256, help="action tokens")
    options = parser.parse_args()
    print(build_tiny_oft(options.out, proprio=options.proprio, bins=options.bins))


if __name__ == "__main__":
    main()
