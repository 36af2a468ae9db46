"""Functions of tests, called one after the other in every process of one launch.

    torchrun --nproc_per_node 2 -m tests.kits.process_worker JOBS.json [train c.yaml ..]

Starting processes takes longer than a small run, so they are used again. A job is ["module:function", *arguments]; what the jobs
returned in a process is written to JOBS.json.RANK, as a list. With further arguments the processes end as that `mmrl` command does.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState, GradientState

from mmrl.cli.main import main
from mmrl.config import load_config
from mmrl.operations.leaving import run_and_leave
from mmrl.training.trainer import Trainer
from scripts._torture_trust_state import flip_bit

__all__ = ["copied", "cut", "forget_plugin", "train", "train_damaged"]


def forget_plugin() -> None:
    """Let the next World name another plugin; the processes stay connected."""
    AcceleratorState._reset_state()
    GradientState._reset_state()
    gc.collect()
    # modules and what stays are looked through once, not after every job
    gc.freeze()


def cut(run: Path, name: str, steps: int = 2) -> Path:
    """A copy of a run as it was after so many steps."""
    copy = run.with_name(name)
    shutil.copytree(run, copy, symlinks=True)
    for folder in (copy / "checkpoints").glob("step_*"):
        if int(folder.name[5:]) > steps:
            shutil.rmtree(folder)
    return copy


def copied(run: str, name: str, steps: int = 2) -> None:
    """`cut` in the first process; the others wait."""
    if os.environ["RANK"] == "0":
        cut(Path(run), name, steps)
    torch.distributed.barrier()


def train(path: str, overrides: list[str], continues: str | None = None, steps: int = 2) -> None:
    """A whole run; with `continues`, the name of a run, a copy of that one goes on after so many steps."""
    config = load_config(path, overrides)
    if continues is not None:
        copied(str(Path(config.dir) / continues), config.name, steps)
    Trainer(config, resume=continues is not None).fit()


def train_damaged(path: str, overrides: list[str], continues: str, steps: int) -> None:
    """A copy of a run goes on after a bit of its last checkpoint's weights, of step `steps`, was flipped."""
    config = load_config(path, overrides)
    copied(str(Path(config.dir) / continues), config.name, steps)
    file = (
        Path(config.dir) / config.name / "checkpoints" / f"step_{steps:06d}" / "model.safetensors"
    )
    if os.environ["RANK"] == "0":
        flip_bit(file, 8 * file.stat().st_size - 5)
    torch.distributed.barrier()
    Trainer(config, resume=True).fit()


def work(jobs: Path) -> None:
    """Every job; what they returned is written after each."""
    returned: list[Any] = []
    for name, *arguments in json.loads(jobs.read_text(encoding="utf-8")):
        module, _, function = name.partition(":")
        returned.append(getattr(importlib.import_module(module), function)(*arguments))
        forget_plugin()
        jobs.with_name(f"{jobs.name}.{os.environ['RANK']}").write_text(
            json.dumps(returned), encoding="utf-8"
        )


def whole() -> None:
    work(Path(sys.argv[1]))
    if len(sys.argv) > 2:
        sys.argv[1:] = sys.argv[2:]
        main()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    run_and_leave(whole)
