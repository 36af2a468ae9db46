"""What openpi's own pi0 and pi0.5 compute with known weights, for tests/robotics/test_pi0.py.

    pip install --no-deps --target DIR transformers==4.53.2 tokenizers==0.21.4 huggingface_hub==0.36.0
    cp -r OPENPI/src/openpi/models_pytorch/transformers_replace/* DIR/transformers/      # as openpi's README says
    python -m scripts.record_pi0 OPENPI DIR --lerobot LEROBOT     # writes assets/fixtures/pi0/openpi.safetensors

OPENPI is a checkout, LEROBOT as in scripts/record_smolvla.py (its names of the same weights). Weights and inputs follow from their
names. openpi's code is run as it is but for the sizes, which it fixes in the constructor: they are exchanged there.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import torch

from scripts._bench import ROOT
from scripts.record_smolvla import numbers

FIXTURE = ROOT / "assets" / "fixtures" / "pi0" / "openpi.safetensors"
STEPS, CHUNK, WIDTH, BATCH, VOCAB = 4, 6, 7, 3, 128
VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 28,
    "patch_size": 14,
    "projection_dim": 64,
    "vision_use_head": False,
}
TEXT = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "vocab_size": VOCAB,
    "pad_token_id": 0,
}
EXPERT_WIDTH, EXPERT_MLP = 32, 48


@torch.no_grad()
def fill(tensors: dict[str, torch.Tensor]) -> None:
    """Give tensors numbers that follow from openpi's names for them."""
    for name, tensor in tensors.items():
        tensor.copy_(numbers(name, *tensor.shape, scale=0.1))


def inputs() -> dict[str, torch.Tensor]:
    """Two cameras' pictures; words of which the second row has four of seven; states, noise, actions, times."""
    words = torch.ones(BATCH, 7, dtype=torch.bool)
    words[1, 4:] = False
    return {
        "pixels": numbers("pixels", BATCH, 2, 3, 28, 28).tanh(),
        "ids": (numbers("ids", BATCH, 7).abs() * 40).long().clamp(1, VOCAB - 2),
        "words": words,
        "state": numbers("state", BATCH, WIDTH),
        "noise": numbers("noise", BATCH, CHUNK, WIDTH),
        "actions": numbers("actions", BATCH, CHUNK, WIDTH),
        "time": numbers("time", BATCH).sigmoid(),
    }


def _tiny(module: Any) -> None:
    """Exchange the sizes that the module's constructor fixes."""
    big, expert = module.PaliGemmaForConditionalGeneration, module.GemmaForCausalLM

    def small(config: Any) -> Any:
        for part, values in ((config.vision_config, VISION), (config.text_config, TEXT)):
            for name, value in values.items():
                setattr(part, name, value)
        return big(config)

    def small_expert(config: Any) -> Any:
        config.vocab_size, config.pad_token_id = VOCAB, 0
        return expert(config)

    module.PaliGemmaForConditionalGeneration, module.GemmaForCausalLM = small, small_expert


def _sizes(variant: str) -> Any:
    """What openpi's and lerobot's get_config of a variant gives, small."""
    width, mlp = (64, 96) if variant == "gemma_2b" else (EXPERT_WIDTH, EXPERT_MLP)
    return types.SimpleNamespace(
        width=width, depth=3, mlp_dim=mlp, num_heads=8, num_kv_heads=1, head_dim=16
    )


def openpi_model(checkout: Path, pi05: bool) -> Any:
    """openpi's PI0Pytorch. Its packages' other modules need JAX, and are left out."""
    root = checkout / "src" / "openpi"
    for name, where in (("openpi", root), ("openpi.models_pytorch", root / "models_pytorch")):
        package = types.ModuleType(name)
        package.__path__ = [str(where)]
        sys.modules.setdefault(name, package)
    for name in ("openpi.models", "openpi.models.gemma", "openpi.shared"):
        sys.modules.setdefault(name, types.ModuleType(name))
    sys.modules["openpi.models"].gemma = sys.modules["openpi.models.gemma"]  # type: ignore[attr-defined]
    sys.modules["openpi.models.gemma"].get_config = _sizes  # type: ignore[attr-defined]
    sys.modules["openpi.shared"].image_tools = None  # type: ignore[attr-defined]
    import openpi.models_pytorch.gemma_pytorch as joined  # type: ignore[import-not-found]
    import openpi.models_pytorch.pi0_pytorch as original  # type: ignore[import-not-found]

    if not hasattr(joined, "is_tiny"):
        _tiny(joined)
        joined.is_tiny = True
    config = types.SimpleNamespace(
        pi05=pi05,
        paligemma_variant="gemma_2b",
        action_expert_variant="gemma_300m",
        dtype="float32",
        action_dim=WIDTH,
        action_horizon=CHUNK,
        pytorch_compile_mode=None,
    )
    model = original.PI0Pytorch(config).eval()
    fill(dict(model.named_parameters()))
    return model


class _Absent(types.ModuleType):
    """A module all of whose names are None: what is imported from it is not used here."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


def lerobot_names(folder: Path, pi05: bool) -> dict[str, list[int]]:
    """Names and shapes of lerobot's policy."""
    sys.path.append(str(folder))
    kind = "pi05" if pi05 else "pi0"
    # packages whose __init__ imports what needs other packages
    for name in ("lerobot.policies", f"lerobot.policies.{kind}"):
        package = types.ModuleType(name)
        package.__path__ = [str(folder / Path(*name.split(".")))]
        sys.modules.setdefault(name, package)
    absent = ("datasets", "datasets.utils", "datasets.utils.logging", "lerobot.datasets")
    more = ("lerobot.datasets.utils", "lerobot.configs.train", "lerobot.processor")
    for name in (*absent, *more):
        sys.modules.setdefault(name, _Absent(name))
    import importlib

    module = importlib.import_module(f"lerobot.policies.{kind}.modeling_{kind}")
    settings = importlib.import_module(f"lerobot.policies.{kind}.configuration_{kind}")
    from lerobot.configs.types import FeatureType, PolicyFeature  # type: ignore[import-not-found]

    _tiny(module)
    module.get_gemma_config = _sizes  # type: ignore[attr-defined]
    config = getattr(settings, f"{kind.upper()}Config")(
        input_features={
            "observation.images.base": PolicyFeature(FeatureType.VISUAL, (3, 28, 28)),
            "observation.state": PolicyFeature(FeatureType.STATE, (WIDTH,)),
        },
        output_features={"action": PolicyFeature(FeatureType.ACTION, (WIDTH,))},
        chunk_size=CHUNK,
        n_action_steps=CHUNK,
        max_state_dim=WIDTH,
        max_action_dim=WIDTH,
        image_resolution=(28, 28),
        device="cpu",
    )
    policy = getattr(module, f"{kind.upper()}Policy")(config)
    return {n: list(t.shape) for n, t in policy.state_dict().items()}


@torch.no_grad()
def outputs(model: Any) -> dict[str, torch.Tensor]:
    """A sampled chunk, and the loss of given actions at given times, number by number."""
    x = inputs()
    images = list(x["pixels"].unbind(1))
    masks = [torch.ones(BATCH, dtype=torch.bool) for _ in images]
    # what openpi makes of an observation is replaced by what it is here
    model._preprocess_observation = lambda *_, **__: (
        images,
        masks,
        x["ids"],
        x["words"],
        x["state"],
    )
    seen = types.SimpleNamespace(state=x["state"])
    return {
        "chunk": model.sample_actions("cpu", seen, noise=x["noise"], num_steps=STEPS),
        "losses": model.forward(seen, x["actions"], x["noise"], x["time"]),
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("openpi", type=Path, help="a checkout of Physical-Intelligence/openpi")
    parser.add_argument("transformers", type=Path, help="where transformers 4.53.2 was installed")
    parser.add_argument("--lerobot", type=Path, required=True, help="where lerobot was installed")
    options = parser.parse_args()
    sys.path.insert(0, str(options.transformers))
    import transformers

    if transformers.__version__ != "4.53.2":
        raise SystemExit(
            f"expected transformers 4.53.2 in {options.transformers}, found {transformers.__version__}"
        )
    from safetensors.torch import save_file

    found: dict[str, torch.Tensor] = {}
    names: dict[str, dict[str, Any]] = {}
    for pi05 in (False, True):
        kind = "pi05" if pi05 else "pi0"
        model = openpi_model(options.openpi, pi05)
        own = {n: list(t.shape) for n, t in model.state_dict().items()}
        found |= {f"{kind}.{n}": t.contiguous() for n, t in outputs(model).items()}
        names[kind] = {"openpi": own, "lerobot": lerobot_names(options.lerobot, pi05)}
    commit = subprocess.run(
        ["git", "-C", str(options.openpi), "rev-parse", "HEAD"], capture_output=True, text=True
    )
    FIXTURE.parent.mkdir(parents=True, exist_ok=True)
    about = {"openpi": commit.stdout.strip(), "names": json.dumps(names)}
    save_file(found, str(FIXTURE), metadata=about)
    print(f"{FIXTURE}: {', '.join(f'{k} {tuple(t.shape)}' for k, t in found.items())}")


if __name__ == "__main__":
    main()
