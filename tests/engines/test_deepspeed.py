"""DeepSpeed ZeRO-2 and ZeRO-3 in real processes (gloo on 127.0.0.1) make the run of one process, offloaded or not, also resumed."""
from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from mmrl.config import load_config
from mmrl.engines import build_train_engine
from mmrl.optim import build_optimizer
from mmrl.trainer import Trainer
from mmrl.world import World
from tests.engine_kit import ENVIRONMENT, REPO, config_file, tiny_folder
from tests.engines.deepspeed_worker import ALONE, BF16, KINDS, exercise, items_of, policy_of
from tests.engines.test_fsdp import mixed_run, text_only_shares
from tests.test_distributed import compare, free_port, launch

pytestmark = pytest.mark.slow
# the other kinds: runs of one process that they continue, and the engine alone
FULL = ("zero2", "zero3_offload_all")
LORA = ("zero2", "zero3_sharded")


def work(*arguments: str) -> None:
    """Two processes of the worker; they must end by themselves."""
    head = ["-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_addr", "127.0.0.1", "--master_port", str(free_port())]
    process = subprocess.Popen([sys.executable, *head, "-m", "tests.engines.deepspeed_worker", *arguments], cwd=REPO, text=True,
                               env={**ENVIRONMENT, "GLOO_SOCKET_IFNAME": "lo"}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                               start_new_session=True)
    try:
        out, _ = process.communicate(timeout=1200)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0 and out.count("left cleanly") == 2, out


def kept(run: Path, name: str, steps: int = 2) -> Path:
    """A copy of a run as it was after so many steps."""
    copy = run.parent / name
    shutil.copytree(run, copy, symlinks=True)
    for folder in (copy / "checkpoints").glob("step_*"):
        if int(folder.name[5:]) > steps:
            shutil.rmtree(folder)
    return copy


def apart(a: dict[Any, torch.Tensor], b: dict[Any, torch.Tensor]) -> float:
    """Distance between two sets of tensors of the same shapes. AdamW divides by a gradient's size: see test_distributed."""
    assert a.keys() == b.keys() and all(a[key].shape == b[key].shape for key in a)
    return float(torch.stack([(a[key] - b[key]).norm() for key in a]).norm())


@dataclass
class Found:
    """Runs of one process, whose folders stand beside those of two; what `exercise` found in one process, in two of each kind."""

    full: Trainer
    lora: Trainer
    one: dict[str, dict[str, Any]]  # by precision
    two: dict[str, list[dict[str, Any]]]


def run_of(folder: Path, jobs: list[tuple[str, list[str]]], *kinds: str, **sections: Any) -> Trainer:
    """A run of one process; `jobs` gets those of two."""
    config = config_file(folder / "c.yaml", mixed_run(folder, **sections))
    trainer = Trainer(load_config(config))
    trainer.fit()
    jobs += [(config, [f"name={kind}", *KINDS[kind]]) for kind in kinds]
    return trainer


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    folder = tmp_path_factory.mktemp("deepspeed")
    jobs: list[tuple[str, list[str]]] = []
    full = run_of(folder / "full", jobs, *FULL)
    kept(full.folder.path, "one_zero2")
    kept(full.folder.path, "one_zero3", 1)
    jobs += [(jobs[0][0], ["name=one_zero2", *KINDS["zero2_offload"]]), (jobs[0][0], ["name=one_zero3", *KINDS["zero3_sharded"]])]
    lora = run_of(folder / "lora", jobs, *LORA, algorithm={"epochs": 2, "minibatches": 2},
                  data={"cache": {"dir": str(folder / "cache")}},
                  model={"path": tiny_folder("qwen3_vl"), "lora": {"r": 4, "alpha": 8}, "freeze": ["vision"],
                         "gradient_checkpointing": True})
    path = config_file(folder / "alone.yaml", mixed_run(folder, optim={"max_grad_norm": 0.5}))
    one = {}
    for kind in ("fp32", "bf16"):
        config = load_config(path, BF16 if kind == "bf16" else [])
        policy = policy_of(config)
        engine = build_train_engine(config, World(torch.device("cpu")), policy, build_optimizer(policy.trainable(), config.optim))
        one[kind] = exercise(engine, policy, items_of(policy))
    work(json.dumps(jobs), path, str(folder))
    return Found(full, lora, one, {kind: [torch.load(folder / f"{kind}-{rank}.pt") for rank in range(2)] for kind in ALONE})


def test_full_training_equals_one_process(found: Found) -> None:
    """With a KL term; some steps give one process nothing but text."""
    assert text_only_shares(found.full.folder.path), "the data do not test what they should"
    for kind in FULL:
        compare(found.full, found.full.folder.path.parent / kind)


def test_a_run_of_one_process_is_continued(found: Found) -> None:
    for name in ("one_zero2", "one_zero3"):
        compare(found.full, found.full.folder.path.parent / name)


@pytest.mark.parametrize("kind", ["zero2", "zero3_offload_all"])
def test_one_process_continues_a_run(kind: str, found: Found) -> None:
    runs = found.full.folder.path.parent
    kept(runs / kind, f"{kind}_one")
    Trainer(load_config(str(runs.parent / "c.yaml"), [f"name={kind}_one", "engine.train=single"]), resume=True).fit()
    compare(found.full, runs / f"{kind}_one")


def test_zero3_continues_a_run_of_zero2_from_the_command_line(found: Found) -> None:
    runs = found.full.folder.path.parent
    kept(runs / "zero2", "zero2_zero3")
    out = launch("torchrun", str(runs.parent / "c.yaml"), "name=zero2_zero3", "engine.train=deepspeed_zero3", "--resume")
    compare(found.full, runs / "zero2_zero3")
    assert "resumed after step 2" in out and "untested optimizer" not in out and "mismatch" not in out, out


def test_lora_with_a_frozen_tower_and_cached_features(found: Found) -> None:
    """Adapters in two passes of two minibatches; the reference is the model without them."""
    for kind in LORA:
        run = found.lora.folder.path.parent / kind
        compare(found.lora, run)
        assert (run / "checkpoints" / "step_000003" / "adapter").is_dir()


@pytest.mark.parametrize("kind", ALONE)
def test_the_engine_alone(kind: str, found: Found) -> None:
    """Processes whose logits come in different numbers of chunks; a pass without gradients before every micro-batch."""
    rounded = kind.endswith("bf16")  # where a difference of 1e-8 in a weight may move its bf16 copy by 1/256
    one, ranks = found.one["bf16" if rounded else "fp32"], found.two[kind]
    assert ranks[0]["steps"][0][0] == pytest.approx(one["steps"][0][0], rel=1e-5)
    assert one["steps"][0][0] > 0.5, "clipping is not tested"
    for rank in ranks:
        assert rank["steps"] == [(pytest.approx(norm, rel=5e-3 if rounded else 1e-5), lr) for norm, lr in one["steps"]]
        assert rank["trained"] == one["trained"] and rank["weights"].keys() == one["weights"].keys()
        assert apart(rank["weights"], one["weights"]) < (0.05 if rounded else 1e-3) * apart(one["before"], one["weights"])
        assert rank["nothing"] == (0.0, one["nothing"][1]), "nothing in the loss: no step"
        assert rank["error"][0] == "the norm" and not 0 <= rank["error"][1][0] < float("inf")
        assert all(torch.equal(rank["after"][name], tensor) for name, tensor in rank["weights"].items())
    main, other = ranks
    assert main["fresh"] == 0 and other["fresh"] is other["state"] is None
    mine, theirs = one["state"], main["state"]
    assert theirs["param_groups"] == mine["param_groups"]
    assert theirs["state"].keys() == mine["state"].keys()
    for number, entry in mine["state"].items():
        assert entry.keys() == theirs["state"][number].keys() and theirs["state"][number]["step"] == entry["step"] == 3
    for key in ("exp_avg", "exp_avg_sq"):
        a, b = ({number: entry[key] for number, entry in x["state"].items()} for x in (mine, theirs))
        assert apart(a, b) < (0.03 if rounded else 1e-3) * torch.stack([value.norm() for value in a.values()]).norm()
