"""Under torchrun: train one run after the other in the same processes, as the plan (a JSON file) says.

    torchrun --nproc_per_node 2 -m tests.robotics.several_runs PLAN.json

A plan is a list of {"overrides": [...], "model": path, "broken": rank or null}: in a process `broken` the policy's weights are NaN.
Each process writes what became of its runs to PLAN.json.RANK: for each "ok", or its error.
"""
from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch

from mmrl.errors import MMRLError
from robotics.trainer import EmbodiedTrainer
from tests.robot_kit import config_of


def main(plan: Path) -> None:
    rank, said = int(os.environ["RANK"]), []
    for run in json.loads(plan.read_text(encoding="utf-8")):
        try:
            trainer = EmbodiedTrainer(config_of(run["model"], *run["overrides"]))
            if run.get("broken") == rank:
                with torch.no_grad():
                    for _, parameter in trainer.policy.trainable():
                        parameter.fill_(float("nan"))
            trainer.fit()
            said.append("ok")
        except MMRLError as error:
            said.append(f"{type(error).__name__}: {error}")
    plan.with_name(f"{plan.name}.{rank}").write_text(json.dumps(said), encoding="utf-8")
    trainer.world.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
