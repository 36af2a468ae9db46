"""Episodes played in a generator process: the numbers of an inline run, and what a kill of it loses."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mmrl.training.trainer import Trainer
from tests.kits.prepared_kit import prepared_generators
from tests.kits.robot_kit import config_of, saved_vla
from tests.robotics.test_embodied_run import rows, run, same, weights

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("tiny_workers")]
APART = "engine.generator.kind=process"


@pytest.fixture(scope="module", autouse=True)
def generators() -> Iterator[None]:
    with prepared_generators():
        yield


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_vla(tmp_path_factory.mktemp("policy"))


def test_episodes_of_a_generator_process_are_those_of_a_serial_run_bit_for_bit(
    policy: Path, tmp_path: Path
) -> None:
    run(policy, tmp_path, "serial", "schedule.kind=serial")
    run(policy, tmp_path, "apart", "schedule.kind=serial", APART)
    assert same(weights(tmp_path, "serial"), weights(tmp_path, "apart"))
    for a, b in zip(rows(tmp_path, "serial"), rows(tmp_path, "apart"), strict=True):
        assert {k: v for k, v in a.items() if k.startswith(("train/", "eval/"))} == {
            k: v
            for k, v in b.items()
            if k.startswith(("train/", "eval/")) and k != "train/generator/restarts"
        }


def test_a_generator_that_is_killed_among_episodes_leaves_each_place_trained_on_once(
    policy: Path, tmp_path: Path
) -> None:
    trainer = Trainer(
        config_of(
            policy, f"dir={tmp_path}", "name=killed", "schedule.kind=async", "train.steps=3", APART
        )
    )
    learner, keys = trainer.rollouts.learner, list[Any]()

    def made() -> Any:
        found = learner()
        add = found.add

        def counted(group: Any) -> None:
            keys.append(group.key)
            if len(keys) == 1:
                os.kill(trainer.rollouts.generator.worker.pid, signal.SIGKILL)  # type: ignore[attr-defined]
            assert (
                0
                <= group.key[0] - 1 - min(t.policy_version for r in group.rollouts for t in r.turns)
                <= 1
            )
            add(group)

        found.add = counted  # type: ignore[method-assign]
        return found

    trainer.rollouts.learner = made  # type: ignore[method-assign]
    trainer.fit()
    found = rows(tmp_path, "killed")
    assert found[-1]["train/generator/restarts"] == 1
    places = [key[:2] for key in keys]
    assert len(set(places)) == len(places) == sum(r["train/groups/trained"] for r in found)
    wanted, members = trainer.config.train.prompts_per_step, trainer.config.rollout.group_size
    for r in found:
        assert r["train/groups/trained"] + r["train/groups/empty"] == wanted
        # every state that was asked was played to its end once
        assert r["train/episodes"] == members * r["train/groups/asked"]
