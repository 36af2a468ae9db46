"""What lerobot's own SmolVLA computes with known weights, for tests/robotics/test_smolvla.py.

    pip install --no-deps --target DIR lerobot==0.4.4 draccus==0.10.0 mergedeep pyyaml-include==1.4.1 typing-inspect \\
        mypy-extensions pyserial deepdiff orderly-set cachebox
    python -m scripts.record_smolvla DIR           # writes assets/fixtures/smolvla/lerobot.safetensors

Weights and inputs follow from their names, so that the file holds lerobot's parameter names and outputs alone. lerobot pins other
versions of torch and transformers than this project; SmolVLA's modules run under ours as they are.
"""

from __future__ import annotations

import argparse
import json
import sys
import types
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mmrl.robotics.tiny_smolvla import tiny_vlm_config
from scripts._bench import ROOT

FIXTURE = ROOT / "assets" / "fixtures" / "smolvla" / "lerobot.safetensors"
STEPS, CHUNK, STATE, ACTION, BATCH = 4, 6, 8, 7, 3
SETTINGS: dict[str, Any] = {
    "num_vlm_layers": 4,
    "resize_imgs_with_padding": [64, 64],
    "chunk_size": CHUNK,
    "max_state_dim": STATE,
    "max_action_dim": ACTION,
}


def numbers(name: str, *shape: int, scale: float = 1.0) -> torch.Tensor:
    """Standard normal numbers that follow from a name."""
    drawn = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape)
    return torch.from_numpy(drawn).float() * scale


def vlm_config() -> Any:
    """Six layers, of which the policy takes four."""
    return tiny_vlm_config(layers=6, hidden=64, patch=16, vocab=512)


@torch.no_grad()
def fill(model: torch.nn.Module, prefix: str = "") -> None:
    """Give every parameter numbers that follow from its name (those of norms near 1)."""
    for name, p in model.named_parameters():
        p.copy_(numbers(prefix + name, *p.shape, scale=0.1) + (1.0 if "norm" in name else 0.0))


def inputs() -> dict[str, torch.Tensor]:
    """Two cameras' pictures, 64 wide and 48 high; words of which the second row has four of seven; states of 5 numbers."""
    words = torch.ones(BATCH, 7, dtype=torch.bool)
    words[1, 4:] = False
    return {
        "pictures": (numbers("pictures", BATCH, 2, 3, 48, 64).sigmoid() * 255).round(),
        "ids": (numbers("ids", BATCH, 7).abs() * 100).long().clamp(1, 400),
        "words": words,
        "state": numbers("state", BATCH, 5),
        "noise": numbers("noise", BATCH, CHUNK, ACTION),
        "actions": numbers("actions", BATCH, CHUNK, ACTION),
        "time": numbers("time", BATCH).sigmoid(),
    }


def lerobot_policy(folder: Path) -> Any:
    """lerobot's policy with these weights. Its package's __init__ imports what needs other packages, and is left out."""
    sys.path.append(str(folder))
    package = types.ModuleType("lerobot.policies")
    package.__path__ = [str(folder / "lerobot" / "policies")]
    sys.modules["lerobot.policies"] = package
    import lerobot.policies.smolvla.smolvlm_with_expert as joined  # type: ignore[import-not-found]
    from lerobot.configs.types import FeatureType, PolicyFeature  # type: ignore[import-not-found]
    from lerobot.policies.smolvla.configuration_smolvla import (  # type: ignore[import-not-found]
        SmolVLAConfig,
    )
    from lerobot.policies.smolvla.modeling_smolvla import (  # type: ignore[import-not-found]
        SmolVLAPolicy,
    )

    tokens = types.SimpleNamespace(fake_image_token_id=1, global_image_token_id=2)
    processor = types.SimpleNamespace(tokenizer=tokens)
    # no hub: what the names stand for is given
    joined.AutoConfig = types.SimpleNamespace(from_pretrained=lambda _: vlm_config())
    joined.AutoProcessor = types.SimpleNamespace(from_pretrained=lambda _: processor)
    pictures = {
        f"observation.images.{n}": PolicyFeature(FeatureType.VISUAL, (3, 48, 64))
        for n in ("base", "wrist")
    }
    config = SmolVLAConfig(
        input_features={
            **pictures,
            "observation.state": PolicyFeature(FeatureType.STATE, (5,)),
        },
        output_features={"action": PolicyFeature(FeatureType.ACTION, (3,))},
        load_vlm_weights=False,
        n_action_steps=CHUNK,
        num_steps=STEPS,
        device="cpu",
        train_expert_only=False,
        freeze_vision_encoder=False,
        **SETTINGS,
    )
    policy = SmolVLAPolicy(config).eval()
    fill(policy)
    return policy


@torch.no_grad()
def outputs(policy: Any) -> dict[str, torch.Tensor]:
    """A sampled chunk, and the loss of given actions at given times, number by number."""
    x = inputs()
    batch = {
        "observation.images.base": x["pictures"][:, 0] / 255,
        "observation.images.wrist": x["pictures"][:, 1] / 255,
        "observation.state": x["state"],
    }
    images, masks = policy.prepare_images(batch)
    seen = (images, masks, x["ids"], x["words"], policy.prepare_state(batch))
    return {
        "chunk": policy.model.sample_actions(*seen, noise=x["noise"]),
        "losses": policy.model.forward(*seen, x["actions"], x["noise"], x["time"]),
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="where lerobot was installed with --target")
    options = parser.parse_args()
    from importlib.metadata import distributions

    from safetensors.torch import save_file

    policy = lerobot_policy(options.folder)
    version = next(
        d.version for d in distributions(path=[str(options.folder)]) if d.name == "lerobot"
    )
    names = {n: list(t.shape) for n, t in policy.state_dict().items()}
    FIXTURE.parent.mkdir(parents=True, exist_ok=True)
    save_file(
        {n: t.contiguous() for n, t in outputs(policy).items()},
        str(FIXTURE),
        metadata={"lerobot": version, "names": json.dumps(names)},
    )
    print(f"{FIXTURE}: lerobot {version}, {len(names)} parameters")


if __name__ == "__main__":
    main()
