"""Runs that one of two processes breaks, one after the other, each in a way of its own.

    torchrun --nproc_per_node 2 -m tests.stopping_worker c.yaml '[["ddp", "loss"], ["fsdp2", "loss"]]'

Starting processes takes longer than such a run, so they are used again. Each process prints with what error each of its runs ended;
the run of ENGINE and KIND is called ENGINE-KIND.
"""
from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from mmrl import update
from mmrl.config import load_config
from mmrl.errors import MediaError, MMRLError, RolloutError
from mmrl.schedule import SerialSchedule
from mmrl.trainer import Trainer


@contextmanager
def broken(kind: str) -> Iterator[None]:
    """What happens to the run of this process inside."""
    with pytest.MonkeyPatch.context() as patch:
        loss, groups, encode = update.policy_loss, SerialSchedule.groups, update.Updater._prepare

        def not_finite(*args: Any, **options: Any) -> Any:
            found = loss(*args, **options)
            return replace(found, loss=found.loss + float("nan" if kind == "loss" else "inf"))

        def other_groups(schedule: SerialSchedule, step: int) -> Iterator[Any]:
            for group in groups(schedule, step):
                if kind == "rollout":
                    raise RolloutError("the sampler is gone")
                yield replace(group, fingerprint="of another picture")

        def gone(updater: update.Updater, *args: Any) -> Any:
            encode(updater, *args)
            raise MediaError("a.png: expected a picture, found none", kind="missing", path="a.png")

        if kind in ("loss", "infinite"):
            patch.setattr(update, "policy_loss", not_finite)
        elif kind == "media":
            patch.setattr(update.Updater, "_prepare", gone)
        else:
            patch.setattr(SerialSchedule, "groups", other_groups)
        yield


@contextmanager
def as_it_is() -> Iterator[None]:
    yield


if __name__ == "__main__":
    for engine, kind in json.loads(sys.argv[2]):
        trainer = Trainer(load_config(sys.argv[1], [f"name={engine}-{kind}", f"engine.train={engine}"]))
        ended: str = "well"
        try:
            with broken(kind) if trainer.world.rank == 1 else as_it_is():
                trainer.fit()
        except MMRLError as error:
            ended = f"{type(error).__name__}: {error}"
        print(f"ended {json.dumps([engine, kind, trainer.world.rank, ended])}", flush=True)
        del trainer
    torch.distributed.destroy_process_group()
