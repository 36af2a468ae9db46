"""What the tests of vLLM rollouts share: prompts of every kind, an engine on a tiny model, and the trainer's own numbers."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from mmrl.config import VLLMConfig, load_config
from mmrl.distributed.engines import TrainEngine, build_train_engine
from mmrl.distributed.world import World
from mmrl.policy.families import ModelFamily
from mmrl.policy.pack import PackItem, pack
from mmrl.policy.policy import Policy
from mmrl.rollout import Request, SamplingSettings
from mmrl.rollout.vllm_backend import VLLMBackend, VLLMSettings
from mmrl.rollout.vllm_engine import VLLMEngine
from mmrl.training.optim import build_optimizer
from mmrl.types import Sample, Turn
from tests.kits.clip_kit import TASK, clip, loaded, sample
from tests.kits.engine_kit import (
    ENVIRONMENT,
    REPO,
    album_data,
    config_file,
    picture,
    small_run,
    tiny_folder,
)
from tests.kits.prepared_kit import SERVING, Prepared

__all__ = [
    "KEY",
    "PATIENCE_S",
    "VLLM",
    "asked_of",
    "backend_of",
    "engine_on",
    "free_port",
    "ids",
    "moved",
    "run_tree",
    "same_logps",
    "sampled_logps",
    "samples_of",
    "settings_of",
    "start_server",
    "trainer_logps",
    "training_of",
]

KEY = "a key of this test"  # of rollout servers
PATIENCE_S = 300
VLLM = {"kv_cache_gib": 0.125, "max_model_len": 1024}


def samples_of(folder: Path, family: ModelFamily | None = None) -> list[Sample]:
    """A picture, text, three pictures, a clip, a clip of odd length with a picture, two clips: those of them that `family` reads,
    and pictures one by one where it takes no more."""
    photos = tuple(picture(size, 3) for size in ((640, 427), (56, 56), (37, 211)))
    every = [
        sample((), photos[:1], 0),
        sample((), (), 1),
        sample((), photos, 2),
        sample((clip(folder),), (), 3),
        sample((clip(folder, 5, (84, 56), 1),), photos[1:2], 4),
        sample((clip(folder, 4, (112, 84)), clip(folder)), (), 5),
    ]
    if family is None:
        return every
    most = family.most_pictures or len(photos)
    alone = [sample((), (photo,), 6) for photo in photos[1:] if most == 1]
    return alone + [
        s for s in every if len(s.images) <= most and not (s.videos and "video" in family.refused)
    ]


def backend_of(arch: str = "qwen2_5_vl", folder: str = "") -> VLLMBackend:
    """vLLM on the tiny model of `arch`, without weights yet."""
    return VLLMBackend(
        VLLMSettings(folder or tiny_folder(arch), max_model_len=1024, kv_cache_gib=0.125)
    )


def training_of(policy: Policy, world: World, folder: Path) -> TrainEngine:
    """A single-process training engine of `policy`, with a step size at which a step is seen in log-probs."""
    tree = small_run(folder, "unused.jsonl", optim={"lr": 0.01})
    config = load_config(config_file(folder / "training.yaml", tree))
    return build_train_engine(
        config, world, policy, build_optimizer(policy.trainable(), config.optim)
    )


@contextmanager
def engine_on(
    backend: VLLMBackend, policy: Policy, folder: Path, **settings: Any
) -> Iterator[tuple[VLLMEngine, TrainEngine]]:
    """An engine of `policy` on a backend that others use too, with the weights published, and the training engine."""
    world = World(torch.device("cpu"))
    training = training_of(policy, world, folder)
    engine = VLLMEngine(
        VLLMConfig(**VLLM, probe_prompts=3, **settings),
        policy,
        policy,
        world,
        backend,
        [loaded(*samples_of(folder, policy.family))],
    )
    engine.publish(training)
    yield engine, training


def asked_of(policy: Policy, folder: Path, count: int = 3, greedy: bool = False) -> list[Request]:
    """A request per sample."""
    return [
        Request(policy.encoder(s, TASK), count, (7, n), greedy)
        for n, s in enumerate(samples_of(folder, policy.family))
    ]


def trainer_logps(
    policy: Policy,
    asked: Sequence[Request],
    groups: Sequence[Sequence[Turn]],
    temperature: float = 1.0,
) -> torch.Tensor:
    """The trainer's log-probs of every token."""
    items = [
        PackItem(r.prompt, tuple(c.token_ids for c in group))
        for r, group in zip(asked, groups, strict=True)
    ]
    with torch.no_grad():
        return policy.logp(pack(items), temperature).logp_N


def sampled_logps(groups: Sequence[Sequence[Turn]]) -> torch.Tensor:
    """vLLM's log-probs of every token."""
    return torch.tensor([x for group in groups for c in group for x in c.logprobs])


def ids(groups: Sequence[Sequence[Turn]]) -> list[list[tuple[int, ...]]]:
    """Token ids of every completion."""
    return [[c.token_ids for c in group] for group in groups]


def same_logps(
    engine: VLLMEngine, policy: Policy, folder: Path, temperature: float = 1.0
) -> list[list[Turn]]:
    """Generates, and compares with the trainer."""
    asked = asked_of(policy, folder)
    groups = engine.generate(asked, settings_of(temperature=temperature))
    gap = (trainer_logps(policy, asked, groups, temperature) - sampled_logps(groups)).abs()
    assert len(gap) > 60 and gap.max() < 1e-5, gap.max()
    return groups


def moved(training: TrainEngine, policy: Policy) -> None:
    """An optimizer step that every trained weight takes part in."""
    training.begin()
    for _, p in policy.trainable():
        p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel()))
    training.step(1.0, 0, 10, lambda norm: f"{norm}")


def run_tree(folder: Path, **sections: Any) -> dict[str, Any]:
    """A run of two steps with vLLM rollouts on pictures and text, evaluated and saved after each."""
    rows = [[picture((112, 84), i)] * (i % 3) for i in range(5)]
    held = album_data(folder / "data", rows[:2], "held")
    sections = {"engine": {"rollout": "vllm", "vllm": VLLM}, "eval": {"samples": 1}, **sections}
    return small_run(
        folder / "runs",
        album_data(folder / "data", rows),
        held,
        **{"model": {"path": tiny_folder()}, **sections},
    )


def settings_of(max_new_tokens: int = 8, temperature: float = 1.0) -> SamplingSettings:
    """Sampling settings."""
    return SamplingSettings(temperature=temperature, max_new_tokens=max_new_tokens)


def free_port() -> int:
    """A port that nobody listens at."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def start_server(folder: Path, port: int, *options: str) -> subprocess.Popen[str]:
    """`mmrl rollout-server` for the tiny model; keeps hardly any media, so that it forgets some."""
    config = config_file(folder / "server.yaml", run_tree(folder))
    log = (folder / "server.log").open("a")
    return Prepared(
        [
            sys.executable,
            "-m",
            "mmrl.cli.main",
            "rollout-server",
            config,
            f"model.path={tiny_folder()}",
            "--port",
            str(port),
            "--media-gib",
            "0.0005",
            *options,
        ],
        modules=SERVING,
        cwd=REPO,
        env={**ENVIRONMENT, "MMRL_API_KEY": KEY},
        text=True,
        stdout=log,
        stderr=subprocess.STDOUT,
    )
