"""Past successes in groups without one: weighed against the weights that wrote them, shown what they were shown, and resumed.

Run: pytest tests/rollout/test_replaying.py
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from pydantic import ValidationError

import mmrl
from mmrl.algorithms.replay import ReplayPool, Success
from mmrl.config import ReplayConfig, load_config
from mmrl.errors import CheckpointError, ConfigError
from mmrl.training.trainer import Trainer
from mmrl.types import Sample, StopReason, Turn
from scripts.torture_resume import differences
from tests.distributed.test_distributed import compare, work
from tests.kits.album_task import Album
from tests.kits.engine_kit import config_file, read_jsonl, small_run

RARE = f"{Path(__file__).resolve()}:Rare"
TOGETHER = f"{Path(__file__).resolve()}:Together"


def chat(words: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": words}]}]


class Rare(mmrl.Environment):
    """Two turns with a picture each; 1 where both begin with characters of a few. `seeded`: its beginning is its group's own."""

    max_turns: ClassVar[int] = 2
    headline: ClassVar[str] = "correct"

    def __init__(self, seeded: bool = False, of: int = 3) -> None:
        self.seeded, self.of, self.right = seeded, of, 0
        self.turns = 0

    def picture(self, number: int) -> np.ndarray:
        return np.random.default_rng(number).integers(0, 256, (56, 56, 3), dtype=np.uint8)

    def reset(self, sample: Sample, seed: int) -> mmrl.Observation:
        return mmrl.Observation(chat("go"), [self.picture(seed if self.seeded else 1)])

    def step(self, turn: mmrl.Turn) -> mmrl.Outcome:
        self.turns += 1
        self.right += sum(map(ord, turn.text)) % self.of == 0
        won = float(self.right == 2)
        if self.turns == 2:
            return mmrl.Outcome(reward=won, terminated=True, info={"correct": won})
        # what is shown depends on what was written
        seen = self.picture(10 + len(turn.text))
        return mmrl.Outcome(mmrl.Observation(chat("on"), [seen]), info={"correct": 0.0})


class Together(Album):
    """A reward that looks at the whole group."""

    name: ClassVar[str] = "together"
    in_group: ClassVar[bool] = True


def settings(folder: Path, name: str, lr: float, task: str = RARE, **params: Any) -> Any:
    rows = folder / "rare.jsonl"
    rows.parent.mkdir(parents=True, exist_ok=True)
    rows.write_text("".join(json.dumps({"id": f"r{i}"}) + "\n" for i in range(2)))
    tree = small_run(
        folder / "runs",
        str(rows),
        name=name,
        optim={"lr": lr, "weight_decay": 0.0},
        rollout={"group_size": 4, "max_new_tokens": 4},
        algorithm={"dynamic_sampling": False, "replay": {"per_group": 1}},
        eval={"every": 0},
        train={"steps": 6, "prompts_per_step": 2, "save_every": 1, "keep_last": 9},
    )
    tree["data"]["train"] = [{"task": task, "path": str(rows), "params": params}]
    return load_config(config_file(folder / f"{name}.yaml", tree))


def trained(config: Any, **options: Any) -> tuple[Path, list[dict[str, Any]]]:
    trainer = Trainer(config, **options)
    trainer.fit()
    return trainer.folder.path, read_jsonl(trainer.folder.path / "metrics.jsonl")


# the pool


def success(step: int, number: int = 0, name: str = "a") -> Success:
    turn = Turn((1, 2), "xy", (-0.1, -1 / 3), StopReason.EOS, step)
    return Success("s", name, step, (step, 0, 0, number), (turn, turn), ("f", "g"))


def test_the_pool_forgets_by_age_and_size_and_comes_back_bit_for_bit() -> None:
    pool = ReplayPool(ReplayConfig(per_group=2, max_age=3, size=4))
    pool.end_step([success(1, n) for n in (2, 0, 1)] + [success(1, 3, "b")], [])
    drawn = {tuple(s.place for s in pool.choose("s", "a", (2, k, 0), 7)) for k in range(20)}
    assert all(len(d) == 2 for d in drawn) and len(drawn) == 3  # each pair of three, none of b
    again = ReplayPool(pool.settings)
    again.load_state_dict(json.loads(json.dumps(pool.state_dict())))
    assert again.state_dict() == pool.state_dict()
    assert again.choose("s", "a", (2, 0, 0), 7) == pool.choose("s", "a", (2, 0, 0), 7)
    pool.end_step([success(2)], [(1, 0, 0, 1)])
    assert [s.place for s in pool.choose("s", "b", (3, 0, 0), 7)] == [(1, 0, 0, 3)]
    assert len(pool) == 4
    pool.end_step([success(3)], [])
    assert len(pool) == 4 and (1, 0, 0, 0) not in {
        Success.from_row(r).place for r in pool.state_dict()
    }
    pool.begin_step(5)
    assert {Success.from_row(r).step for r in pool.state_dict()} == {2, 3}
    with pytest.raises(CheckpointError, match="experience pool"):
        pool.load_state_dict([{"source": "s"}])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("algorithm.advantage=gae", "critic judges"),
        ("algorithm.offline.per_group=1", "demonstrations fill"),
        ("algorithm.contrast.kind=shuffle", "no changed view"),
        ("schedule.kind=async", "between steps"),
        ("algorithm.replay.per_group=4", "leaves no rollouts"),
    ],
)
def test_what_it_cannot_act_with_is_refused(change: str, words: str, tmp_path: Path) -> None:
    settings(tmp_path, "run", 0.1)
    with pytest.raises((ConfigError, ValidationError), match=words):
        load_config(str(tmp_path / "run.yaml"), [change])


# runs


@pytest.mark.slow
def test_without_a_step_between_them_their_weight_is_one(tmp_path: Path) -> None:
    """The log-probs of then are the model's of now on what is shown now, if the weights are the same: turns, pictures and all."""
    run, rows = trained(settings(tmp_path, "still", 1e-12))
    filled = [r for r in rows if r["train/replay/rollouts"]]
    assert filled and not any(r["train/replay/lost"] for r in rows)
    assert rows[0]["train/replay/rollouts"] == 0  # nothing is known yet
    for row in filled:
        assert row["train/replay/weight"] == pytest.approx(1.0, abs=1e-5)
        assert 0 < row["train/replay/share"] < 0.5 and row["train/grad_norm"] > 0
    logged = [x for f in sorted((run / "rollouts").glob("*.jsonl")) for x in read_jsonl(f)]
    told = [x for x in logged if x.get("replayed")]
    assert len(told) == sum(r["train/replay/rollouts"] for r in rows)
    assert all(x["score"]["value"] == 1.0 for x in told)
    # the policy's own success counts none of them, and the failures whose places they took
    mine = sum(x["score"]["value"] for x in logged if not x.get("replayed"))
    assert mine / (6 * 2 * 4) == pytest.approx(np.mean([r["train/reward/mean"] for r in rows]))


@pytest.mark.slow
def test_a_killed_run_goes_on_with_its_pool(tmp_path: Path) -> None:
    calm, rows = trained(settings(tmp_path, "calm", 0.005))
    assert sum(r["train/replay/rollouts"] for r in rows[3:]) > 0
    weights = [r["train/replay/weight"] for r in rows if r["train/replay/rollouts"]]
    assert max(abs(w - 1) for w in weights) > 1e-3 and max(weights) <= 2
    run = calm.with_name("cut")
    shutil.copytree(calm, run, symlinks=True)
    for step in (4, 5, 6):
        shutil.rmtree(run / "checkpoints" / f"step_{step:06d}")
    trained(settings(tmp_path, "cut", 0.005), resume=True)
    verdicts = differences(calm, run)
    assert all(verdicts.values()), verdicts


@pytest.mark.slow
def test_two_sharded_processes_of_which_one_has_a_past_success_equal_one(tmp_path: Path) -> None:
    """One prompt per step: the other process has no rollout at all, and takes part in the forwards that past successes need."""
    few = {"algorithm.epochs": 2, "train.steps": 4, "train.prompts_per_step": 1}
    overrides = [f"{key}={value}" for key, value in few.items()]
    settings(tmp_path, "run", 0.001)
    path = str(tmp_path / "run.yaml")
    one = Trainer(load_config(path, overrides))
    one.fit()
    rows = read_jsonl(one.folder.path / "metrics.jsonl")
    assert sum(r["train/replay/rollouts"] for r in rows) > 0
    sharded = [*overrides, "name=two", "engine.train=fsdp2"]
    work(tmp_path, [["tests.kits.process_worker:train", path, sharded]])
    compare(one, one.folder.path.with_name("two"))


@pytest.mark.slow
def test_a_beginning_that_is_another_each_time_is_not_mistaken_for_the_same(tmp_path: Path) -> None:
    _, rows = trained(settings(tmp_path, "seeded", 1e-12, seeded=True))
    assert sum(r["train/replay/lost"] for r in rows) > 0
    assert not any(r["train/replay/rollouts"] for r in rows)


def test_rewards_of_a_whole_group_are_refused(tmp_path: Path) -> None:
    config = settings(tmp_path, "run", 0.1, TOGETHER)
    from mmrl.data.sources import load_sources
    from mmrl.rollout.replaying import Replaying
    from tests.kits.engine_kit import album_data, policy

    config.data.train[0].path = album_data(tmp_path / "album", [[]])
    with pytest.raises(ConfigError, match="whole group"):
        Replaying(config, policy(), load_sources(config.data.train))
