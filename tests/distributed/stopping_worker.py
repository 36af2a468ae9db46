"""Runs that one of two processes breaks, each in a way of its own; jobs of tests/kits/process_worker.py."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from mmrl.config import load_config
from mmrl.errors import MediaError, MMRLError, RolloutError
from mmrl.rollout.prompt_rollouter import PromptRollouter
from mmrl.training import learner, turn_loss
from mmrl.training.trainer import Trainer
from scripts._torture_trust_state import file_size_limit

__all__ = ["stop"]


@contextlib.contextmanager
def broken(kind: str) -> Iterator[None]:
    """What happens to the run of this process inside."""
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as stack:
        loss, groups, encode = (
            turn_loss.policy_loss,
            PromptRollouter.groups,
            learner.Learner._prepare,
        )

        def not_finite(*args: Any, **options: Any) -> Any:
            found = loss(*args, **options)
            return replace(found, loss=found.loss + float("nan" if kind == "loss" else "inf"))

        def other_groups(rollouter: PromptRollouter, step: int) -> Iterator[Any]:
            for group in groups(rollouter, step):
                if kind == "rollout" or (kind == "late" and step == 2):
                    raise RolloutError("the sampler is gone")
                yield (
                    group if kind == "late" else replace(group, fingerprint="of another picture")
                )

        def gone(trained: learner.Learner, *args: Any) -> Any:
            encode(trained, *args)
            raise MediaError("a.png: expected a picture, found none", kind="missing", path="a.png")

        if kind == "checkpoint":
            stack.enter_context(file_size_limit(250_000))
        elif kind in ("loss", "infinite"):
            patch.setattr(turn_loss, "policy_loss", not_finite)
        elif kind == "media":
            patch.setattr(learner.Learner, "_prepare", gone)
        else:
            patch.setattr(PromptRollouter, "groups", other_groups)
        yield


def stop(path: str, engine: str, kind: str, breaker: int) -> str:
    """With what error the run called ENGINE-KIND ended in this process; the process `breaker` breaks it."""
    trainer = Trainer(
        load_config(
            path,
            [
                *(f"name={engine}-{kind}", f"engine.train={engine}", "train.steps=2"),
                *(["train.save_every=0"] if kind == "late" else []),
            ],
        )
    )
    with broken(kind) if trainer.world.rank == breaker else contextlib.nullcontext():
        try:
            trainer.fit()
        except MMRLError as error:
            return f"{type(error).__name__}: {error}"
    return "well"
