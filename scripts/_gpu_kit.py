"""What scripts/bench_gpu.py measures with: policies of public shapes with random weights, rendered pictures and clips, FLOPs.

Legend: P / C tokens of a prompt / completion, G completions per prompt, Q width of all query heads, L layers, V vocabulary.
"""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from mmrl.config import LoraSettings, RunConfig
from mmrl.diagnostics.shapes import SHAPES, meta_model, shape_config
from mmrl.policy.tiny import TinySpec, build_tiny

__all__ = [
    "Setting",
    "build_policy",
    "gpu_name",
    "make_clip",
    "make_pictures",
    "memory_tb_s",
    "peak_tflops",
    "run_of",
    "update_flops",
]

SMOKE = "smoke"  # a shape of its own: tiny, for a CPU

# Dense bf16 TFLOP/s of the makers' data sheets, by a part of the name CUDA gives. The first that fits counts.
PEAK_TFLOPS = {
    "H100 PCIe": 756.0,
    "H100": 989.0,
    "H200": 989.0,
    "GH200": 989.0,
    "H800": 989.0,
    "A100": 312.0,
    "A800": 312.0,
    "L40S": 362.0,
    "L40": 181.0,
    "L4": 121.0,
    "A10G": 70.0,
    "A10": 125.0,
    "A6000": 155.0,
    "RTX 6000 Ada": 364.0,
    "4090": 165.2,
    "3090": 71.0,
}
# TB/s of memory, of the same data sheets.
MEMORY_TB_S = {
    "H100 PCIe": 2.0,
    "H100 NVL": 3.9,
    "H100": 3.35,
    "H200": 4.8,
    "A100-SXM4-80GB": 2.039,
    "A100-SXM4-40GB": 1.555,
    "L40S": 0.864,
    "L40": 0.864,
    "L4": 0.3,
    "A10G": 0.6,
    "A10": 0.6,
    "A6000": 0.768,
    "RTX 6000 Ada": 0.96,
    "4090": 1.008,
    "3090": 0.936,
}


@dataclass(frozen=True)
class Setting:
    """One model under measurement: shape of mmrl.diagnostics.shapes (or smoke), full or lora, model.attn, and the load. dtype:
    model.dtype; None: bf16 on a GPU, fp32 on a CPU."""

    shape: str
    mode: str = "full"
    attn: str = "sdpa"
    device: str = "cuda"
    groups: int = 8
    group_size: int = 8
    new_tokens: int = 128
    pixels: int = 1003520
    token_budget: int = 16384
    repeats: int = 5
    warm_up: int = 2
    engine: str = "single"
    fused: bool = True
    dtype: Literal["bf16", "fp32"] | None = None

    @property
    def precision(self) -> Literal["bf16", "fp32"]:
        """What forwards compute in."""
        return self.dtype or ("bf16" if self.device == "cuda" else "fp32")

    @property
    def kind(self) -> Literal["cuda", "cpu"]:
        """Of the device."""
        return "cuda" if self.device == "cuda" else "cpu"

    @property
    def label(self) -> str:
        """For people."""
        layers = "" if self.fused else ", plain layers"
        return f"{self.shape} {self.mode} {self.precision} {self.attn}{layers}"


def run_of(setting: Setting) -> RunConfig:
    """The configuration that the estimate of memory is made for: one step of all groups."""
    lora = {"lora": LoraSettings().model_dump()} if setting.mode == "lora" else {}
    return RunConfig.model_validate(
        {
            "model": {
                "path": setting.shape,
                "freeze": ["vision", "projector"],
                "attn": setting.attn,
                "dtype": setting.precision,
                "device": setting.device,
                **({} if setting.fused else {"fused_layers": False}),
                **lora,
            },
            "data": {"max_pixels": setting.pixels},
            "rollout": {"group_size": setting.group_size, "max_new_tokens": setting.new_tokens},
            "train": {"token_budget": setting.token_budget, "prompts_per_step": setting.groups},
        }
    )


def _spec(kind: str) -> TinySpec:
    return TinySpec(arch=kind, min_patches=4, max_patches=4096)


def shape_and_processor(shape: str) -> tuple[Any, Any]:
    """The model's configuration and a tiny processor: tokens of the tiny tokenizer, in a vocabulary of the full size."""
    kind = SHAPES[shape][0] if shape != SMOKE else "qwen2_5_vl"
    tiny, processor = build_tiny(_spec(kind))
    if shape == SMOKE:
        return tiny.config, processor
    config, ids = shape_config(shape), processor.tokenizer.convert_tokens_to_ids
    for name, token in (
        ("image_token_id", "<|image_pad|>"),
        ("video_token_id", "<|video_pad|>"),
        ("vision_start_token_id", "<|vision_start|>"),
        ("vision_end_token_id", "<|vision_end|>"),
    ):
        setattr(config, name, ids(token))
    return config, processor


def build_policy(setting: Setting) -> Any:
    """A policy of the shape with random weights, made on its device; it trains what a recipe trains (not the vision tower)."""
    import torch
    from transformers import AutoModelForImageTextToText, GenerationConfig

    from mmrl.policy.attention import check_attention, set_attention
    from mmrl.policy.loading import (
        assemble_policy,
        device_and_precision,
        freeze_parts,
        template_for,
    )

    run = run_of(setting)
    device, dtype, autocast = device_and_precision(run.model, torch.device(setting.device))
    check_attention(setting.attn, device, autocast)
    config, processor = shape_and_processor(setting.shape)
    torch.manual_seed(0)
    with device:
        model = AutoModelForImageTextToText.from_config(config, dtype=dtype)
    model.generation_config = GenerationConfig(eos_token_id=processor.tokenizer.eos_token_id)
    set_attention(model, setting.attn)
    freeze_parts(model, run.model.freeze)
    policy = assemble_policy(
        model,
        processor,
        template_for(config.model_type, run.model),
        run.model,
        run.data,
        device=device,
        autocast=autocast,
    )
    # no completion ends early: every system writes the same number of tokens
    policy.eos_ids = (-1,)
    return policy


def make_pictures(folder: Path, count: int, pixels: int) -> list[str]:
    """Pictures of smooth noise, 5 wide and 4 high, of about so many pixels."""
    from PIL import Image

    folder.mkdir(parents=True, exist_ok=True)
    side, paths = int((pixels / 20) ** 0.5), []
    for number in range(count):
        coarse = np.random.default_rng(number).integers(0, 256, (32, 40, 3), dtype=np.uint8)
        path = folder / f"{number}.png"
        Image.fromarray(coarse).resize((5 * side, 4 * side), Image.Resampling.BICUBIC).save(
            path, compress_level=1
        )
        paths.append(str(path))
    return paths


def make_clip(path: Path, seed: int, size: tuple[int, int], seconds: int, fps: int) -> str:
    """An H.264 clip of moving noise blocks."""
    from mmrl.video.encode import write_video

    width, height = size
    coarse = (
        np.random.default_rng(seed)
        .integers(0, 256, (height // 8, width // 8, 3), dtype=np.uint8)
        .repeat(8, 0)
        .repeat(8, 1)
    )
    write_video(
        path, np.stack([np.roll(coarse, (4 * t, 6 * t), (0, 1)) for t in range(seconds * fps)]), fps
    )
    return str(path)


def update_flops(
    config: Any,
    *,
    prompt: int,
    completion: int,
    group_size: int,
    groups: int,
    mode: str,
    shared: bool,
) -> float:
    """FLOPs that forward and backward of the language model and the output layer need, recomputation not counted (Chowdhery et al.
    2022, PaLM, appendix B): 2 per weight and token forward; twice that backward, half of it where weights are frozen (LoRA); and 4
    Q per pair of tokens that see each other and layer forward, twice that backward. Prompts count once where they are shared.
    """
    text = config.text_config
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    layers = meta_model(config).model.language_model.layers
    weights = sum(p.numel() for p in layers.parameters())
    sequences, copies = groups * group_size, groups if shared else groups * group_size
    tokens = copies * prompt + sequences * completion
    pairs = copies * prompt * (prompt + 1) / 2 + sequences * completion * (
        prompt + (completion + 1) / 2
    )
    head = text.vocab_size * text.hidden_size * sequences * completion
    passes = 3 if mode == "full" else 2
    return (
        2 * passes * (weights * tokens + head)
        + 3 * 4 * text.num_attention_heads * width * text.num_hidden_layers * pairs
    )


def gpu_name() -> dict[str, Any]:
    """Name, memory, driver, CUDA and compute capability of the first GPU."""
    import torch

    properties = torch.cuda.get_device_properties(0)
    asked = subprocess.run(
        ["nvidia-smi", "--query-gpu=driver_version,power.limit", "--format=csv,noheader", "--id=0"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    return {
        "name": properties.name,
        "memory_gib": round(properties.total_memory / 2**30, 2),
        "count": torch.cuda.device_count(),
        "driver, power limit": asked.stdout.strip() if asked.returncode == 0 else None,
        "cuda": torch.version.cuda,
        "capability": f"{properties.major}.{properties.minor}",
    }


def peak_tflops(name: str) -> float | None:
    """Dense bf16 TFLOP/s of a GPU by its name; None where it is not listed."""
    return next((value for part, value in PEAK_TFLOPS.items() if part in name), None)


def memory_tb_s(name: str) -> float | None:
    """TB/s of a GPU's memory by its name; None where it is not listed."""
    return (
        None
        if "GH200" in name
        else next((value for part, value in MEMORY_TB_S.items() if part in name), None)
    )
