"""What the engine's tests share: tiny models of the three architectures, pictures of many shapes, run configurations.

The tiny models' weights are enlarged: a freshly initialised model predicts almost the same distribution whatever it
reads, so a test against it would not notice a wrong mask. These react to every pixel and position.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from PIL import Image

from mmrl.config import ModelConfig
from mmrl.policy.loading import load_policy
from mmrl.policy.policy import Policy
from mmrl.policy.tiny import ARCHITECTURES, TinySpec, build_tiny
from mmrl.types import Sample
from mmrl.video.media import open_image
from tests.kits.album_task import Album

__all__ = [
    "ALBUM",
    "ARCHITECTURES",
    "ENVIRONMENT",
    "PHOTO_SIZES",
    "REPO",
    "Album",
    "album_data",
    "cli",
    "config_file",
    "fresh_policy",
    "merge",
    "small_run",
    "picture",
    "plain_logits",
    "policy",
    "read_jsonl",
    "sample_with",
    "start_cli",
    "tiny_folder",
    "weights_of",
]

REPO = Path(__file__).resolve().parents[2]
ENVIRONMENT = {
    **os.environ,
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONPATH": str(REPO),
    "MMRL_TRACEBACK": "",
}
ALBUM = f"{REPO / 'tests' / 'kits' / 'album_task.py'}:Album"
# squares, landscape 3:2 and 4:3 as cameras make them, portrait, wide screen, a strip; some larger than the pixel budget
PHOTO_SIZES = ((56, 56), (112, 84), (640, 427), (480, 640), (320, 180), (37, 211), (300, 28))
_WORK = Path(tempfile.mkdtemp(prefix="mmrl-tests-"))
atexit.register(shutil.rmtree, _WORK, True)


@functools.lru_cache
def tiny_folder(
    arch: str = "qwen2_5_vl", seed: int = 0, gain: float = 4.0, window_vision: bool = True
) -> str:
    """A saved tiny model (hidden 64, 2 layers) whose weight matrices were multiplied by `gain`."""
    import torch

    spec = TinySpec(
        arch=arch,
        hidden=64,
        heads=2,
        kv=1,
        vision_hidden=32,
        vision_heads=2,
        window_vision=window_vision,
        seed=seed,
    )
    model, processor = build_tiny(spec)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(gain)
    folder = _WORK / f"{arch}-{seed}-{gain:g}-{int(window_vision)}"
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return str(folder)


def fresh_policy(
    arch: str = "qwen2_5_vl",
    *,
    needs_reference: bool = False,
    trainable: bool = True,
    **options: Any,
) -> Policy:
    """A newly loaded policy on the CPU; `options` are fields of ModelConfig."""
    options.setdefault("path", tiny_folder(arch))
    return load_policy(
        ModelConfig(device="cpu", **options), needs_reference=needs_reference, trainable=trainable
    )


@functools.lru_cache
def policy(arch: str = "qwen2_5_vl") -> Policy:
    """A policy shared by tests that leave it as it is."""
    return fresh_policy(arch)


@functools.cache
def picture(size: tuple[int, int], seed: int = 0) -> str:
    """Path of a picture of smooth noise (every patch differs) of (width, height) `size`."""
    coarse = np.random.default_rng([*size, seed]).integers(0, 256, (6, 6, 3), dtype=np.uint8)
    path = _WORK / f"picture-{size[0]}x{size[1]}-{seed}.png"
    Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC).save(path)
    return str(path)


def sample_with(
    pictures: Sequence[str], question: str = "Where is the red circle?", number: int = 0
) -> Sample:
    """A sample of the album task with these pictures."""
    return Sample(f"s{number}", "album", "albums", question, None, tuple(pictures))


def plain_logits(
    p: Policy, model: Any, task: Any, sample: Sample, texts: Sequence[Sequence[int]]
) -> Iterator[tuple[Any, Any]]:
    """By transformers alone, one completion at a time, positions and masks of its own making: the completion's tokens (n,) and the
    logits (n, vocabulary) they are drawn from, float32."""
    import torch

    text = p.processor.apply_chat_template(
        task.messages(sample, p.template), add_generation_prompt=True, tokenize=False
    )
    opened = [open_image(path) for path in sample.images]
    for tokens in texts:
        inputs = dict(p.processor(text=[text], images=opened or None, return_tensors="pt"))
        extra, length = torch.tensor([list(tokens)]), inputs["input_ids"].shape[1]
        inputs["input_ids"] = torch.cat([inputs["input_ids"], extra], 1)
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        if "mm_token_type_ids" in inputs:
            inputs["mm_token_type_ids"] = torch.cat(
                [inputs["mm_token_type_ids"], torch.zeros_like(extra)], 1
            )
        yield extra[0], model(**inputs).logits[0, length - 1 : -1].float()


def album_data(folder: Path, rows: Sequence[Sequence[str]], name: str = "album") -> str:
    """A jsonl file for the album task, one row per list of picture paths."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.jsonl"
    questions = (
        "Where is the red circle?",
        "yes or no",
        "Describe the image, then the largest shape.",
        "How many?",
    )
    path.write_text(
        "".join(
            json.dumps({"id": f"{name}-{i}", "images": list(images), "question": questions[i % 4]})
            + "\n"
            for i, images in enumerate(rows)
        ),
        encoding="utf-8",
    )
    return str(path)


def merge(base: dict[str, Any], extra: Mapping[str, Any]) -> dict[str, Any]:
    """`extra` laid over `base`, section by section, in place."""
    for key, value in extra.items():
        base[key] = (
            merge(base[key], value)
            if isinstance(value, Mapping) and isinstance(base.get(key), dict)
            else value
        )
    return base


def small_run(
    folder: Path, train_file: str, held_out: str | None = None, **sections: Any
) -> dict[str, Any]:
    """A complete small run as a dictionary: 2 steps, 3 prompts, groups of 3, rewards in-process; override sections."""
    tree = {
        "name": "run",
        "dir": str(folder),
        "seed": 3,
        "model": {"path": tiny_folder("qwen2_5_vl", window_vision=False), "device": "cpu"},
        "data": {
            "train": [{"task": ALBUM, "path": train_file}],
            "eval": [{"task": ALBUM, "path": held_out}] if held_out else [],
        },
        "rollout": {"group_size": 3, "max_new_tokens": 6},
        "optim": {"lr": 0.002},
        "reward": {"workers": 0},
        "alarms": {"logprob_gap": 0.001},
        "eval": {"samples": 2, "every": 1, "best_metric": "sampled/reward"},
        "train": {"steps": 2, "prompts_per_step": 3, "save_every": 1, "token_budget": 120},
    }
    return merge(tree, sections)


def config_file(path: Path, tree: Mapping[str, Any]) -> str:
    """Write `tree` as YAML."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(dict(tree)), encoding="utf-8")
    return str(path)


def start_cli(*arguments: str, **options: Any) -> subprocess.Popen[str]:
    """Start `python -m mmrl.cli.main ARGUMENTS` as a process of its own, which finds torch and transformers imported."""
    from tests.kits.prepared_kit import Prepared

    return Prepared(
        [sys.executable, "-m", "mmrl.cli.main", *arguments],
        cwd=REPO,
        env=ENVIRONMENT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        **options,
    )


def cli(*arguments: str, status: int = 0, timeout: float = 300) -> tuple[str, str]:
    """Run the command line to its end; asserts the exit status and returns (stdout, stderr)."""
    process = start_cli(*arguments)
    try:
        out, err = process.communicate(timeout=timeout)
    finally:
        process.kill()
    assert process.returncode == status, (
        f"exit status {process.returncode}, expected {status}\n{out}\n{err}"
    )
    return out, err


def cli_here(*arguments: str, status: int = 0) -> str:
    """The same in this process, where torch and transformers are imported already: that costs a process five seconds. Returns what
    it printed."""
    from typer.testing import CliRunner

    from mmrl.cli.main import app

    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == status, f"{done.output}\n{done.exception!r}"
    return done.output


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Rows of a jsonl file; none when it does not exist."""
    return (
        [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        if path.exists()
        else []
    )


def weights_of(folder: Path) -> Iterator[tuple[str, Any]]:
    """(name, tensor) of a saved model, by name."""
    from safetensors.torch import load_file

    for file in sorted(folder.glob("*.safetensors")):
        yield from sorted(load_file(file).items())
