"""Two processes that compute packed rows together make the run of one, with every training engine.

All runs of two processes are made in one launch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mmrl.config import load_config
from mmrl.distributed.engines import train_engine_name
from mmrl.errors import ConfigError
from mmrl.policy.sequence_parallel import check_heads
from mmrl.robotics.config import load_embodied
from mmrl.training.trainer import Trainer
from tests.distributed.engines.mixed_kit import mixed_run
from tests.distributed.test_distributed import compare, work
from tests.kits.engine_kit import config_file, tiny_folder

SPLIT = "tests.distributed.engines.sequence_worker:split"
ROUTING = "tests.distributed.engines.sequence_worker:split_routing"
TRAIN = "tests.kits.process_worker:train"
TOGETHER = "engine.sequence_parallel=2"
FROZEN = {"freeze": ["vision"], "gradient_checkpointing": True}
ROWS: dict[str, tuple[str, dict[str, Any]]] = {
    "all trained": ("qwen2_vl", {}),
    "frozen tower": ("qwen2_5_vl", {**FROZEN, "attn": "eager"}),
    "deepstack": ("qwen3_vl", {"lora": {"r": 4, "alpha": 8}}),
    "deepstack trained": ("qwen3_vl", {"gradient_checkpointing": True}),
}
RUNS = {
    "ddp": ("plain", []),
    "fsdp2": ("plain", ["engine.train=fsdp2"]),
    "ppo": ("ppo", []),
    # last: accelerate keeps in mind that it was launched for DeepSpeed
    "zero2": ("plain", ["engine.train=deepspeed_zero2"]),
    "ppo_zero3": ("ppo", ["engine.train=deepspeed_zero3"]),
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Trainer], list[list[Any]]]:
    folder = tmp_path_factory.mktemp("sequence")
    short = {"train": {"steps": 2}, "eval": {"every": 0}}
    ppo = {"epochs": 2, "minibatches": 2, "advantage": "gae", "kl": {"coef": 0}}
    trees = {
        "plain": mixed_run(folder / "plain", **short),
        "ppo": mixed_run(
            folder / "ppo",
            **short,
            algorithm=ppo,
            model={"path": tiny_folder("qwen3_vl"), **FROZEN},
        ),
    }
    files = {name: config_file(folder / f"{name}.yaml", tree) for name, tree in trees.items()}
    one = {name: Trainer(load_config(file)) for name, file in files.items()}
    for trainer in one.values():
        trainer.fit()
    jobs: list[list[Any]] = [[SPLIT, tiny_folder(a), options] for a, options in ROWS.values()]
    jobs.append([ROUTING, tiny_folder("qwen3_vl_moe")])
    jobs += [
        [TRAIN, files[kind], [f"name={name}", TOGETHER, *overrides]]
        for name, (kind, overrides) in RUNS.items()
    ]
    returned, _ = work(folder, jobs)
    return one, returned


@pytest.mark.slow
def test_experts_are_noted_and_replayed_in_slices_as_in_one(found: Any) -> None:
    for told in (of_rank[len(ROWS)] for of_rank in found[1]):
        assert told["uneven"] and told["same"] == [True] * 5 and told["logp"] <= 1e-5
        one, two = told["rerouted"]
        assert one == two and 0 < one["changed"] < one["tokens"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ROWS)
def test_a_row_split_over_two_processes_is_that_of_one(name: str, found: Any) -> None:
    for rank in range(2):
        row = found[1][rank][list(ROWS).index(name)]
        assert row["logp"] < 1e-5 and row["entropy"] < 1e-5 and row["gradient"] < 1e-5, row
        assert max(row["encoded"]) <= 1, "features come from the process that holds the picture"


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_a_run_of_processes_that_compute_rows_together_is_that_of_one(
    name: str, found: Any
) -> None:
    one = found[0][RUNS[name][0]]
    compare(one, one.folder.path.with_name(name))


@pytest.mark.parametrize(("heads", "kv", "size"), [(16, 2, 4), (28, 4, 4), (28, 4, 2), (32, 8, 8)])
def test_heads_that_can_be_split(heads: int, kv: int, size: int) -> None:
    check_heads(heads, kv, size)


@pytest.mark.parametrize(("heads", "kv", "size"), [(28, 4, 8), (24, 4, 6), (16, 2, 3)])
def test_heads_that_cannot_are_refused(heads: int, kv: int, size: int) -> None:
    with pytest.raises(ConfigError, match=rf"this model's {heads} query heads .*, found {size}"):
        check_heads(heads, kv, size)


@pytest.mark.parametrize(
    ("overrides", "processes", "message"),
    [
        ([], 3, "a number of processes that engine.sequence_parallel 2 divides, found 3"),
        (["train.forward=padded"], 2, "train.forward shared with engine.sequence_parallel 2"),
        (["schedule.kind=pipelined"], 2, "expected schedule.kind serial"),
    ],
)
def test_what_it_does_not_go_with_is_refused(
    overrides: list[str], processes: int, message: str
) -> None:
    config = load_config(None, [TOGETHER, *overrides])
    with pytest.raises(ConfigError, match=message):
        train_engine_name(config, processes)


def test_robots_have_nothing_to_split(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="each decision is a short row of its own"):
        load_embodied(None, [TOGETHER])
