"""Under torchrun: train one run after the other in the same processes, as the plan (a JSON file) says.

    torchrun --nproc_per_node 2 -m tests.robotics.several_runs PLAN.json

A plan is a list of {"overrides": [...], "model": path} with, where it matters, "broken": rank, in whose process the policy's
weights are NaN; "full": rank, where whoever hears of a step fails; "continues": [run folder, step], a copy of which goes on after
that step.
Each process writes what became of its runs to PLAN.json.RANK: for each "ok", or its error. Arguments after the plan are those of an
`mmrl` command that the processes end with.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import torch

from mmrl.cli.main import main as command
from mmrl.errors import DataError, MMRLError
from mmrl.operations.leaving import run_and_leave
from mmrl.training.trainer import Trainer
from tests.distributed.engines.deepspeed_worker import forget_plugin
from tests.kits.prepared_kit import TINY, prepared_simulators
from tests.kits.robot_kit import config_of


def copy_up_to(run: Path, step: int, copy: Path) -> None:
    """What `run` was after so many steps."""
    shutil.copytree(run, copy, symlinks=True)
    for folder in (copy / "checkpoints").glob("step_*"):
        if int(folder.name[5:]) > step:
            shutil.rmtree(folder)


def disk_full(kind: str, payload: Any) -> None:
    """A listener that cannot write down a step."""
    if kind == "step":
        raise DataError("the disk is full")


def main(plan: Path) -> None:
    rank, said = int(os.environ["RANK"]), []
    for run in json.loads(plan.read_text(encoding="utf-8")):
        trainer: Trainer | None = None
        try:
            config = config_of(run["model"], *run["overrides"])
            if continues := run.get("continues"):
                if rank == 0:
                    copy_up_to(Path(continues[0]), continues[1], Path(config.dir) / config.name)
                torch.distributed.barrier()
            trainer = Trainer(
                config,
                resume=bool(continues),
                on_event=disk_full if run.get("full") == rank else None,
            )
            if run.get("broken") == rank:
                with torch.no_grad():
                    for _, parameter in trainer.policy.trainable():
                        parameter.fill_(float("nan"))
            trainer.fit()
            said.append("ok")
        except MMRLError as error:
            said.append(f"{type(error).__name__}: {error}")
        trainer = None
        forget_plugin()
    plan.with_name(f"{plan.name}.{rank}").write_text(json.dumps(said), encoding="utf-8")
    if len(sys.argv) > 2:
        sys.argv[1:] = sys.argv[2:]
        command()
    torch.distributed.destroy_process_group()


def whole() -> None:
    with prepared_simulators(*TINY):
        main(Path(sys.argv[1]))


if __name__ == "__main__":
    run_and_leave(whole)
