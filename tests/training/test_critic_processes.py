"""PPO on prompts in two real processes (gloo on 127.0.0.1): values, advantages and the value head are those of one process, whether
the weights are whole or sharded, and where a process has no prompt of a step at all."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from mmrl.config import load_config
from mmrl.training.trainer import Trainer
from tests.distributed.engines.deepspeed_worker import KINDS
from tests.distributed.test_distributed import compare, make, work
from tests.kits.engine_kit import config_file, merge
from tests.kits.process_worker import cut

pytestmark = pytest.mark.slow
PPO = {
    "advantage": "gae",
    "epochs": 2,
    "minibatches": 2,
    "kl": {"coef": 0.05},
    "critic": {"warmup": 1, "lr": 0.01, "bootstrap": "standard"},
}
RUNS: dict[str, dict[str, Any]] = {
    "mixed": {"algorithm": PPO},
    "one prompt": {
        "algorithm": {"advantage": "gae", "critic": {"level": "turn"}},
        "train": {"prompts_per_step": 1},
        "rollout": {"group_size": 2},
    },
}
ENGINES = {"ddp": ["engine.train=ddp"], "fsdp2": ["engine.train=fsdp2"], "zero2": KINDS["zero2"]}


@dataclass
class Found:
    """Runs of one process; beside them stand those of two, named by their engine."""

    one: dict[str, Trainer]

    def two(self, run: str, engine: str) -> Path:
        return self.one[run].folder.path.with_name(engine)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    folder = tmp_path_factory.mktemp("critics")
    usual: dict[str, Any] = {
        "eval": {"every": 0, "best_metric": None},
        "data": {"eval": []},
        "train": {"keep_last": 9},
    }
    configs = {
        name: config_file(
            folder / name / "c.yaml", merge(merge(make(folder / name, "mixed"), usual), sections)
        )
        for name, sections in RUNS.items()
    }
    one = {}
    for name, config in configs.items():
        one[name] = Trainer(load_config(config))
        one[name].fit()
    jobs = [
        ["tests.kits.process_worker:train", configs[run], [f"name={engine}", *options]]
        for engine, options in ENGINES.items()
        for run in RUNS
    ]
    work(folder, jobs)
    return Found(one)


def heads(run: Path, step: int = 3) -> dict[str, torch.Tensor]:
    return load_file(
        str(run / "checkpoints" / f"step_{step:06d}" / "critic" / "value_head.safetensors")
    )


def assert_same_head(one: Path, other: Path) -> None:
    mine, theirs = heads(one), heads(other)
    moved = torch.stack([(mine[n] - heads(one, 1)[n]).norm() for n in mine]).norm()
    apart = torch.stack([(mine[n] - theirs[n]).norm() for n in mine]).norm()
    assert moved > 0 and apart < 0.02 * moved, (float(apart), float(moved))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("run", RUNS)
def test_two_processes_equal_one(run: str, engine: str, found: Found) -> None:
    compare(found.one[run], found.two(run, engine))
    assert_same_head(found.one[run].folder.path, found.two(run, engine))


def test_one_process_continues_a_run_of_sharded_weights(found: Found) -> None:
    """With the value head's own learning rate and its count of steps, one more than the model's."""
    half = cut(found.two("mixed", "fsdp2"), "continued", 1)
    Trainer(load_config(str(half.parents[1] / "c.yaml"), [f"name={half.name}"]), resume=True).fit()
    compare(found.one["mixed"], half)
    assert_same_head(found.one["mixed"].folder.path, half)
