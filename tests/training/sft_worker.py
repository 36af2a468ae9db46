"""Supervised runs, embodied or not, one after the other in the same processes; the last one through the command line's function.

    torchrun --nproc_per_node 2 -m tests.training.sft_worker PLAN.json

A plan is a list of {"config": path, "overrides": [...], "out": folder}: the trained model is written to OUT, and what each process
found (a row of metrics for every step in the main one, the last row in each, or the error) to OUT.RANK.json. With "ends" the run
dies in that step, and goes on from its last checkpoint.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from mmrl.cli.run import run_config, sft_command
from mmrl.errors import DataError, MMRLError
from mmrl.operations.leaving import run_and_leave
from mmrl.training.sft import run_sft, supervised_source, supervised_world
from mmrl.training.supervised_checkpoints import SupervisedCheckpoints

__all__ = ["fine_tune"]


def fine_tune(config: str, overrides: list[str], out: str, ends: int = 0) -> dict[str, Any]:
    """One run; what this process found of it."""
    if ends:
        assert "dies" in _run(config, overrides, out, ends)["error"]
        return _run(config, overrides, out, resume=True)
    return _run(config, overrides, out)


def _run(
    config: str, overrides: list[str], out: str, ends: int = 0, *, resume: bool = False
) -> dict[str, Any]:
    settings = run_config(Path(config), overrides)
    rows: list[dict[str, Any]] = []

    def note(step: int, metrics: Mapping[str, Any]) -> None:
        rows.append(
            {"step": step, **{k: v for k, v in metrics.items() if k not in ("seconds", "failures")}}
        )
        if step == ends:
            raise DataError("dies")

    torch.manual_seed(settings.seed)
    try:
        world = supervised_world(settings)
        source = supervised_source(settings, world)
        checkpoints = None
        if ends or resume:
            checkpoints = SupervisedCheckpoints(Path(out), settings, world, resume=resume)
        weights = None if checkpoints is None else checkpoints.weights
        policy = source.load_policy(lambda line: None, weights)
        last = run_sft(policy, settings, note, world, source, checkpoints)
        if world.is_main:
            source.save(policy, Path(out))
    except MMRLError as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return {"rows": rows, "last": {k: v for k, v in last.items() if k != "seconds"}}


def whole() -> None:
    *plan, command = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    for job in plan:
        found = fine_tune(**job)
        Path(f"{job['out']}.{os.environ['RANK']}.json").write_text(
            json.dumps(found), encoding="utf-8"
        )
    sft_command(Path(command["config"]), command["overrides"], Path(command["out"]), quiet=False)
    assert not torch.distributed.is_initialized(), "the command leaves the process group"


if __name__ == "__main__":
    run_and_leave(whole)
