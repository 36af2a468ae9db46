"""What OpenVLA-OFT's own code computes with known weights, for tests/robotics/test_oft.py.

    pip install --no-deps --target DIR timm==0.9.16 tokenizers==0.19.1 huggingface_hub==0.36.0
    python -m scripts.record_openvla_oft OPENVLA_OFT FORK DIR        # writes assets/fixtures/oft/original.safetensors

OPENVLA_OFT and FORK are checkouts of moojink/openvla-oft and of its fork of transformers (moojink/transformers-openvla-oft).
Weights and inputs follow from their names. The code is run as it is but for the vision towers' sizes, which timm has by name.
"""

from __future__ import annotations

import argparse
import json
import sys
import types
from pathlib import Path
from typing import Any

import torch

from scripts._bench import ROOT
from scripts.record_smolvla import numbers

FIXTURE = ROOT / "assets" / "fixtures" / "oft" / "original.safetensors"
CHUNK, DIM, PROPRIO, SIDE = 8, 7, 8, 28
TEXT = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 32064,
    "max_position_embeddings": 256,
}
TOWERS = (
    {"width": 16, "depth": 3, "heads": 2, "mlp_width": 64, "registers": 4},
    {"width": 24, "depth": 4, "heads": 2, "mlp_width": 48, "registers": 0},
)
EMPTY = 29871  # the token that ends a prompt of OpenVLA
STATISTICS = {
    "q01": [-0.5, -0.4, -0.3, -0.2, -0.1, -0.6, 0.0],
    "q99": [0.5, 0.6, 0.7, 0.3, 0.2, 0.4, 1.0],
    "mask": [True] * 6 + [False],
}


@torch.no_grad()
def fill(tensors: dict[str, torch.Tensor]) -> None:
    """Give tensors numbers that follow from their names; the output layer's, for words that are no actions, 0: so that the best of
    all words is an action."""
    for name, tensor in tensors.items():
        tensor.copy_(numbers(name, *tensor.shape, scale=0.2) + (1.0 if "norm" in name else 0.0))
        if name.endswith("lm_head.weight"):
            end = len(tensor) - 64
            tensor[: end - 256], tensor[end:] = 0, 0


def inputs() -> dict[str, torch.Tensor]:
    """Two cameras' pictures for both towers, a prompt, proprioception in [-1, 1]."""
    ids = (numbers("ids", 1, 9).abs() * 1000).long().clamp(3, 20000)
    ids[0, 0], ids[0, -1] = 1, EMPTY
    return {
        "pixels": numbers("pixels", 1, 2, 6, SIDE, SIDE),
        "ids": ids,
        "proprio": numbers("proprio", PROPRIO).tanh(),
    }


def original(checkout: Path) -> Any:
    """The modules of prismatic. Its packages' other modules need other packages, and are left out."""
    for name in ("", ".extern", ".extern.hf", ".training", ".vla", ".models"):
        package = types.ModuleType(f"prismatic{name}")
        package.__path__ = [str(checkout / Path("prismatic", *name.split(".")[1:]))]
        sys.modules[package.__name__] = package
    sys.argv = [*sys.argv, "libero"]  # which robot it is, is read from the command
    import importlib

    modeling = importlib.import_module("prismatic.extern.hf.modeling_prismatic")
    settings = importlib.import_module("prismatic.extern.hf.configuration_prismatic")
    projectors = importlib.import_module("prismatic.models.projectors")
    return modeling, settings, projectors


def build(checkout: Path) -> tuple[Any, Any]:
    """The original's model and proprioception projector, small."""
    modeling, settings, projectors = original(checkout)
    import timm

    wanted = iter(TOWERS)

    def small(model_id: str, **options: Any) -> Any:
        t: dict[str, Any] = next(wanted)
        dino = bool(t["registers"])
        return timm.models.vision_transformer.VisionTransformer(
            img_size=SIDE,
            patch_size=14,
            num_classes=0,
            embed_dim=t["width"],
            depth=t["depth"],
            num_heads=t["heads"],
            mlp_ratio=t["mlp_width"] / t["width"],
            init_values=1e-5 if dino else None,
            reg_tokens=t["registers"],
            no_embed_class=dino,
            class_token=dino,
            global_pool="token" if dino else "map",
        )

    modeling.timm = types.SimpleNamespace(__version__=timm.__version__, create_model=small)
    config = settings.OpenVLAConfig(
        norm_stats={"libero": {"action": STATISTICS}},
        n_action_bins=256,
        vision_backbone_id="dinosiglip-vit-so-224px",
        llm_backbone_id="llama2-7b-pure",
        text_config=TEXT,
        pad_token_id=32000,
        attn_implementation="sdpa",
    )
    config._attn_implementation = "sdpa"
    model = modeling.OpenVLAForActionPrediction(config).eval()
    projector = projectors.ProprioProjector(llm_dim=TEXT["hidden_size"], proprio_dim=PROPRIO)
    fill(dict(model.named_parameters()))
    fill({f"proprio_projector.{n}": p for n, p in projector.named_parameters()})
    return model, projector


@torch.no_grad()
def outputs(model: Any, projector: Any) -> dict[str, torch.Tensor]:
    """Hidden states, logits of the action tokens and actions, with two cameras and proprioception, and with one camera alone."""
    x = inputs()
    found: dict[str, torch.Tensor] = {}
    heads: list[torch.Tensor] = []
    model.language_model.lm_head.register_forward_hook(lambda *a: heads.append(a[-1]))
    for name, count, proprio in (("both", 2, True), ("one", 1, False)):
        model.vision_backbone.set_num_images_in_input(count)
        more = {"proprio": x["proprio"].numpy(), "proprio_projector": projector} if proprio else {}
        actions, hidden = model.predict_action(
            input_ids=x["ids"],
            unnorm_key="libero",
            pixel_values=x["pixels"][:, :count].flatten(1, 2),
            attention_mask=torch.ones_like(x["ids"]),
            **more,
        )
        first = heads[-1].shape[1] - 1 - CHUNK * DIM - 1
        logits = heads[-1][:, first : first + CHUNK * DIM, -256 - 64 : -64]
        found |= {
            f"{name}.actions": torch.from_numpy(actions).double(),
            f"{name}.hidden": hidden,
            f"{name}.logits": logits.float(),
        }
    return {n: t.contiguous() for n, t in found.items()}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("openvla_oft", type=Path, help="a checkout of moojink/openvla-oft")
    parser.add_argument("fork", type=Path, help="a checkout of moojink/transformers-openvla-oft")
    parser.add_argument("packages", type=Path, help="where timm and tokenizers were installed")
    options = parser.parse_args()
    sys.path[:0] = [str(options.fork / "src"), str(options.packages)]
    import transformers

    if transformers.__version__ != "4.40.1":
        raise SystemExit(
            f"expected transformers 4.40.1 in {options.fork}, found {transformers.__version__}"
        )
    from safetensors.torch import save_file

    model, projector = build(options.openvla_oft)
    names = {n: list(t.shape) for n, t in model.state_dict().items()}
    found = outputs(model, projector)
    FIXTURE.parent.mkdir(parents=True, exist_ok=True)
    save_file(found, str(FIXTURE), metadata={"names": json.dumps(names)})
    print(f"{FIXTURE}: {', '.join(f'{k} {tuple(t.shape)}' for k, t in found.items())}")


if __name__ == "__main__":
    main()
