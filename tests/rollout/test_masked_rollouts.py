"""Rollouts of several turns that are left out of the loss for what happened in them (algorithm.mask_rollouts).

Run: pytest tests/rollout/test_masked_rollouts.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

import pytest

import mmrl
from mmrl.algorithms import trajectory_in_loss
from mmrl.config import load_config
from mmrl.errors import ConfigError
from mmrl.training.trainer import Trainer
from mmrl.types import Rollout, Sample, StopReason, Turn
from tests.kits.engine_kit import album_data, config_file, read_jsonl, small_run


def turn(**facts: Any) -> Turn:
    return Turn((1,), "x", (-1.0,), StopReason.EOS, **facts)


def test_which_rollouts_are_left_out() -> None:
    void = Rollout((turn(parsed=False), turn(terminated=True)))
    cut = Rollout((turn(), turn(truncated=True)))
    good = Rollout((turn(), turn(terminated=True)))
    for masked, kept in (
        ((), (True, True, True)),
        (("unparsed",), (False, True, True)),
        (("truncated",), (True, False, True)),
        (("unparsed", "truncated"), (False, False, True)),
    ):
        assert tuple(trajectory_in_loss(r, "none", masked) for r in (void, cut, good)) == kept


class Halting(mmrl.Environment):
    """Three turns for the words of an even number of characters; others are not understood, and it is cut off after two."""

    max_turns: ClassVar[int] = 2

    def reset(self, sample: Sample, seed: int) -> mmrl.Observation:
        self.first = True
        return mmrl.Observation([{"role": "user", "content": "go"}])

    def step(self, turn: mmrl.Turn) -> mmrl.Outcome:
        read, self.first = not self.first or len(turn.text) % 2 == 0, False
        shown = mmrl.Observation([{"role": "user", "content": "on"}])
        return mmrl.Outcome(shown, reward=len(set(turn.text)) / 100, parsed=read)


def settings(folder: Path, task: str, path: str, masked: list[str], name: str) -> Any:
    tree = small_run(
        folder / "runs",
        path,
        name=name,
        algorithm={"dynamic_sampling": False, "mask_rollouts": masked},
        eval={"every": 0},
        train={"steps": 1},
        rollout={"group_size": 6},
    )
    tree["data"]["train"] = [{"task": task, "path": path}]
    return load_config(config_file(folder / f"{name}.yaml", tree))


@pytest.mark.slow
def test_the_loss_is_of_the_others(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps({"id": f"r{i}"}) + "\n" for i in range(3))
    )
    task, rows = f"{Path(__file__).resolve()}:Halting", str(tmp_path / "rows.jsonl")
    found = {}
    for name, masked in (("all", []), ("void", ["unparsed"]), ("none", ["truncated"])):
        trainer = Trainer(settings(tmp_path, task, rows, masked, name))
        trainer.fit()
        [found[name]] = read_jsonl(trainer.folder.path / "metrics.jsonl")
        groups = trainer.rollouts.rollouter.tally.groups
    # every rollout was cut off: nothing is left, and no optimizer step moves anything
    assert found["all"]["train/grad_norm"] > 0 and not found["none"]["train/grad_norm"]
    rollouts = [r for g in groups for r in g.rollouts]
    void = [r for r in rollouts if len(r.turns[0].text) % 2]
    assert 0 < len(void) < len(rollouts)
    assert [r.turns[0].parsed for r in rollouts] == [
        len(r.turns[0].text) % 2 == 0 for r in rollouts
    ]
    assert 0 < found["void"]["train/grad_norm"] != found["all"]["train/grad_norm"]
    # advantages are those of whole groups either way
    assert found["void"]["train/reward/mean"] == found["all"]["train/reward/mean"]


def test_it_is_refused_where_no_rollout_has_several_turns(tmp_path: Path) -> None:
    config = settings(tmp_path, "x", album_data(tmp_path / "d", [[]]), ["unparsed"], "album")
    config.data.train[0].task = small_run(tmp_path, "x")["data"]["train"][0]["task"]
    with pytest.raises(ConfigError, match=r"algorithm\.overlong: mask"):
        Trainer(config)
