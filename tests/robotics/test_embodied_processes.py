"""Two real processes (gloo on 127.0.0.1) make the embodied run of one: same episodes, counts, gradients, evaluation and weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from mmrl.distributed.engines import train_engine_name
from mmrl.errors import ConfigError
from mmrl.robotics.episodes import own_gpu
from mmrl.training.trainer import Trainer
from tests.kits.engine_kit import read_jsonl
from tests.kits.pool_kit import FAULTY
from tests.kits.prepared_kit import launch_prepared
from tests.kits.robot_kit import config_of, saved_vla
from tests.robotics.several_runs import copy_up_to

pytestmark = pytest.mark.slow

PLACES = 5  # three of process 0, two of process 1
SHAPED = ("rl.reward=shaped", "env.options={tolerance: 0.5, reward: shaped}")
PPO = ("algorithm.advantage=gae", "vla.value_head=true")
LORA = ("model.lora={r: 4, alpha: 8}", "model.freeze=[vision]")
JUDGED = ("eval.every=1", "eval_states=3", "eval.gallery=3")
RUNS: dict[str, tuple[str, ...]] = {
    "serial": ("schedule.kind=serial", *JUDGED),
    "keyed": ("schedule.kind=pipelined", "schedule.order=key", *JUDGED),
    "passes": (
        "schedule.kind=pipelined",
        "algorithm.epochs=2",
        "algorithm.minibatches=2",
        "algorithm.kl.coef=0.1",
    ),
    "ppo": (
        "schedule.kind=serial",
        *PPO,
        "algorithm.critic.lr=0.01",
        "algorithm.critic.warmup=1",
        "algorithm.epochs=2",
        "train.steps=3",
    ),
    "step": (
        "schedule.kind=serial",
        "algorithm.advantage=rloo",
        "algorithm.advantage_scale=batch",
        "algorithm.difficulty=softmax",
    ),
    "idle": ("schedule.kind=pipelined", "train.prompts_per_step=1", *SHAPED, *LORA),
    "idle_ppo": (
        "schedule.kind=pipelined",
        "train.prompts_per_step=1",
        "train.steps=1",
        *PPO,
        *SHAPED,
    ),
}
"""Runs whose result does not depend on the number of processes."""
FSDP2, ZERO2 = (
    ("schedule.kind=serial", "engine.train=fsdp2"),
    ("schedule.kind=serial", "engine.train=deepspeed_zero2"),
)
ZERO3 = (
    "schedule.kind=serial",
    "engine.train=deepspeed_zero3",
    "engine.deepspeed.persist_below=0",
    "engine.deepspeed.max_live=0",
)
SHARDED: dict[str, tuple[str, tuple[str, ...], tuple[str, int] | None]] = {
    "idle_fsdp2": ("idle", FSDP2, None),
    "ppo_fsdp2": ("ppo", FSDP2, None),
    "apart_fsdp2": ("serial", (*FSDP2, "engine.generator.kind=process"), None),
    "apart_zero2": ("serial", (*ZERO2, "engine.generator.kind=process"), None),
    "ppo_zero2": ("ppo", ZERO2, ("ppo_fsdp2", 1)),  # when the critic alone has been trained
    "passes_zero3": ("passes", ZERO3, None),
}
"""Of those, in two processes with sharded weights: the run, overrides, whose checkpoint is continued (if one) after which step.
None of FSDP2 comes after DeepSpeed, which accelerate remembers."""


def faulty(**options: Any) -> tuple[str, ...]:
    """The serial run on simulators with a fault in certain initial states. Of step 1 and place 1, which process 1 plays, they are
    numbers 2 and 3 (algorithm.max_rounds is 2)."""
    return (
        "schedule.kind=serial",
        f"env.suite={FAULTY}",
        f"env.options={json.dumps({'tolerance': 0.5, **options})}",
    )


def settings(folder: Path, name: str, overrides: tuple[str, ...]) -> list[str]:
    return [
        f"dir={folder}",
        f"name={name}",
        "env.workers=1",
        f"train.prompts_per_step={PLACES}",
        "train.keep_last=9",
        "train.log_rollouts=99",
        "eval_states=1",
        *overrides,
    ]


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_vla(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def one(policy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the runs in one process. `keyed` would equal `serial` bit for bit (tests/robotics/test_embodied_run.py)."""
    folder = tmp_path_factory.mktemp("one")
    for name, overrides in RUNS.items():
        if name != "keyed":
            Trainer(config_of(policy, *settings(folder, name, overrides))).fit()
    (folder / "keyed").symlink_to(folder / "serial")
    return folder


@pytest.fixture(scope="module")
def launched(
    policy: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, list[str]], tuple[int, str]]:
    """Folder of the runs in two processes, one after the other, what each process says of each run, and the exit status and output
    of the launch, which ends with a command whose simulators die."""
    folder = tmp_path_factory.mktemp("two")
    dead = {"fault": "kill", "at": 2}
    sharded = {name: (*RUNS[run], *engine) for name, (run, engine, _) in SHARDED.items()}
    continued = {
        name: (str(folder / source[0]), source[1])
        for name, (*_, source) in SHARDED.items()
        if source is not None
    }
    runs = {
        **RUNS,
        "async": ("schedule.kind=async", "schedule.staleness=1", "train.steps=3"),
        "killed": faulty(**dead, states=[2], once=str(folder / "once")),
        "dead": (*faulty(**dead, states=[2, 3]), "env.respawns=0"),
        "dead_streaming": (
            *faulty(**dead, states=[2, 3]),
            "env.respawns=0",
            "schedule.kind=pipelined",
        ),
        "dead_eval": (*faulty(**dead, states=[1]), "env.respawns=0", "eval_states=2"),
        "broken": ("schedule.kind=pipelined",),
        "again": ("name=serial",),
        "full_fsdp2": ("train.save_every=1", *FSDP2),
        "dead_fsdp2": (*faulty(**dead, states=[2, 3]), "env.respawns=0", *FSDP2),
        **sharded,
    }
    plan = folder / "plan.json"
    plan.write_text(
        json.dumps(
            [
                {
                    "model": str(policy),
                    "broken": 1 if name == "broken" else None,
                    "full": 0 if name == "full_fsdp2" else None,
                    "continues": continued.get(name),
                    "overrides": settings(folder, name, overrides),
                }
                for name, overrides in runs.items()
            ]
        )
    )
    # accelerate remembers DeepSpeed
    config = config_of(policy, *settings(folder, "command", (*runs["dead"], *ZERO3)))
    file = folder / "command.yaml"
    file.write_text(yaml.safe_dump(config.model_dump(mode="json", exclude_unset=True)))
    status, out = launch_prepared(
        "tests.robotics.several_runs", str(plan), "train", str(file), timeout=400
    )
    assert all((folder / f"plan.json.{rank}").exists() for rank in (0, 1)), out
    said = [json.loads((folder / f"plan.json.{rank}").read_text()) for rank in (0, 1)]
    return folder, {name: [said[0][i], said[1][i]] for i, name in enumerate(runs)}, (status, out)


@pytest.fixture(scope="module")
def two(
    launched: tuple[Path, dict[str, list[str]], tuple[int, str]],
) -> tuple[Path, dict[str, list[str]]]:
    """Folder of the runs in two processes, and what each process says of each run."""
    return launched[:2]


def weights(run: Path, step: int) -> dict[str, torch.Tensor]:
    files = sorted((run / "checkpoints" / f"step_{step:06d}").glob("*.safetensors"))
    return {
        f"{file.stem}/{name}": tensor
        for file in files
        for name, tensor in load_file(str(file)).items()
    }


def compare(run: Path, other: Path, policy: Path, *, faults: bool = False) -> list[dict[str, Any]]:
    """Assert that `other` tells what `run` tells, to the tolerances of tests/distributed/test_distributed.py; its rows. Not, with
    `faults`, of failed attempts and of evaluations, which another suite's name makes others."""
    rows, others = read_jsonl(run / "metrics.jsonl"), read_jsonl(other / "metrics.jsonl")
    assert [r["step"] for r in rows] == [r["step"] for r in others] and rows
    for a, b in zip(rows, others, strict=True):
        for key in (
            k
            for k in a
            if k.startswith("train/" if faults else ("train/", "eval/")) and "logprob_gap" not in k
        ):
            if key == "train/streamed" or (key == "train/failed_attempts" and faults):
                continue
            assert b[key] == (
                pytest.approx(a[key], rel=2e-4, abs=1e-6) if isinstance(a[key], float) else a[key]
            ), key
        assert b["train/logprob_gap/max"] < 1e-4
    step = rows[-1]["step"]
    for folder in ("rollouts", *(() if faults else ("eval",))):
        names = sorted(str(p.relative_to(run)) for p in (run / folder).rglob("*.jsonl"))
        assert names and names == sorted(
            str(p.relative_to(other)) for p in (other / folder).rglob("*.jsonl")
        )
        for name in names:
            assert [plain(row) for row in read_jsonl(run / name)] == [
                plain(row) for row in read_jsonl(other / name)
            ], name
    final, other_final = weights(run, step), weights(other, step)
    initial = {f"model/{k}": v for k, v in load_file(str(policy / "model.safetensors")).items()}
    moved = torch.stack([(final[n] - initial[n]).norm() for n in initial]).norm()
    apart = torch.stack([(final[n] - other_final[n]).norm() for n in final]).norm()
    assert final.keys() == other_final.keys() and moved > 0 and apart < 0.02 * moved, (
        float(apart),
        float(moved),
    )
    states = [
        json.loads((r / "checkpoints" / f"step_{step:06d}" / "trainer" / "state.json").read_text())
        for r in (run, other)
    ]
    same = ("updates", "version", "alarms", *(() if faults else ("best", "best_step")))
    assert [states[0][k] for k in same] == [states[1][k] for k in same]
    return others


def plain(row: dict[str, Any]) -> dict[str, Any]:
    """A row without what rounding changes: rewards are sums of floats."""
    return {k: v for k, v in row.items() if k not in ("return", "score")}


@pytest.mark.parametrize("name", list(RUNS))
def test_two_processes_equal_one(
    name: str, one: Path, two: tuple[Path, dict[str, list[str]]], policy: Path
) -> None:
    folder, said = two
    assert said[name] == ["ok", "ok"]
    rows = compare(one / name, folder / name, policy)
    groups = {
        k: sum(r[f"train/groups/{k}"] for r in rows) for k in ("trained", "no_signal", "empty")
    }
    assert all(row["time/wait"] >= 0 for row in rows)
    if name == "serial":
        assert all(groups.values()), groups  # every way a place may end
    played = {r["key"][1] for f in (folder / name / "rollouts").iterdir() for r in read_jsonl(f)}
    assert played == set(range(1 if name.startswith("idle") else PLACES))


def test_evaluation_covers_every_state_once_and_its_clips_exist(
    one: Path, two: tuple[Path, dict[str, list[str]]]
) -> None:
    for step in (0, 1, 2):
        mine, theirs = (run / "serial" / "eval" / f"step_{step:06d}" for run in (one, two[0]))
        rows = read_jsonl(theirs / "predictions.jsonl")
        assert [(r["id"], r["mode"]) for r in rows] == [
            (r["id"], r["mode"]) for r in read_jsonl(mine / "predictions.jsonl")
        ]
        results = [json.loads((f / "results.json").read_text()) for f in (mine, theirs)]
        assert (
            results[0]["greedy"] == results[1]["greedy"]
            and results[0]["protocol"] == results[1]["protocol"]
        )
        clips = [r["video"] for r in rows if "video" in r]
        assert len(clips) == (0 if step == 1 else 3) and all(
            (theirs / "videos" / c).stat().st_size for c in clips
        )


def test_async_in_two_processes_trains_on_whole_steps(
    two: tuple[Path, dict[str, list[str]]],
) -> None:
    folder, said = two
    rows = read_jsonl(folder / "async" / "metrics.jsonl")
    assert said["async"] == ["ok", "ok"] and [r["step"] for r in rows] == [1, 2, 3]
    for row in rows:
        assert (
            row["train/groups/trained"] + row["train/groups/empty"] == PLACES
            and row["train/staleness"] <= 1
        )


def test_a_worker_killed_in_one_process_changes_nothing_but_the_count(
    one: Path, two: tuple[Path, dict[str, list[str]]], policy: Path
) -> None:
    folder, said = two
    assert said["killed"] == ["ok", "ok"] and (folder / "once").exists()
    rows = compare(one / "serial", folder / "killed", policy, faults=True)
    failures = read_jsonl(folder / "killed" / "failures.jsonl")
    assert (
        rows[0]["train/failed_attempts"] == len(failures) > 0
        and rows[1]["train/failed_attempts"] == 0
    )


@pytest.mark.parametrize("name", SHARDED)
def test_two_processes_with_sharded_weights_equal_one(
    name: str, one: Path, two: tuple[Path, dict[str, list[str]]], policy: Path
) -> None:
    """A critic that warms up and learns at a rate of its own, a KL term against frozen weights, LoRA, a process without groups,
    simulators in a generator process."""
    folder, said = two
    assert said[name] == ["ok", "ok"]
    compare(one / SHARDED[name][0], folder / name, policy)


def test_one_process_continues_a_run_of_sharded_weights(
    policy: Path, one: Path, two: tuple[Path, dict[str, list[str]]], tmp_path: Path
) -> None:
    """With the value head's own learning rate and count of steps."""
    copy_up_to(two[0] / "ppo_zero2", 2, tmp_path / "ppo")
    Trainer(config_of(policy, *settings(tmp_path, "ppo", RUNS["ppo"])), resume=True).fit()
    compare(one / "ppo", tmp_path / "ppo", policy)


@pytest.mark.parametrize("name", ["dead", "dead_streaming", "dead_eval", "dead_fsdp2"])
def test_simulators_that_died_in_one_process_end_both(
    name: str, two: tuple[Path, dict[str, list[str]]]
) -> None:
    folder, said = two
    first, second = said[name]
    assert (
        second.startswith("PoolError: ")
        and first == f"MMRLError: process 1 of 2 stopped: {second.removeprefix('PoolError: ')}"
    )
    assert json.loads((folder / name / "run.json").read_text())["status"] == "failed"
    failures = read_jsonl(folder / name / "failures.jsonl")
    assert bool(failures) == (name != "dead_eval") and all(f["step"] == 1 for f in failures)
    assert not read_jsonl(folder / name / "metrics.jsonl")


def test_weights_that_are_broken_in_one_process_raise_the_alarm_of_the_run(
    two: tuple[Path, dict[str, list[str]]],
) -> None:
    folder, said = two
    first, second = said["broken"]
    assert second.startswith("NonFiniteError: ") and first.startswith(
        "NonFiniteError: process 1 of 2 stopped: expected finite"
    )
    assert [(a["step"], a["name"]) for a in read_jsonl(folder / "broken" / "alarms.jsonl")] == [
        (1, "non_finite")
    ]


def test_an_error_between_two_steps_ends_both_before_sharded_weights_are_gathered(
    two: tuple[Path, dict[str, list[str]]],
) -> None:
    assert two[1]["full_fsdp2"] == [
        "DataError: the disk is full",
        "DataError: process 0 of 2 stopped: the disk is full",
    ]


def test_what_only_the_main_process_checks_ends_both(
    two: tuple[Path, dict[str, list[str]]],
) -> None:
    first, second = two[1]["again"]
    assert first.startswith("ConfigError: ") and "already holds a run" in first
    assert second == f"ConfigError: process 0 of 2 stopped: {first.removeprefix('ConfigError: ')}"


def test_a_run_of_two_processes_is_resumed_by_one(
    policy: Path, one: Path, two: tuple[Path, dict[str, list[str]]], tmp_path: Path
) -> None:
    copy_up_to(two[0] / "serial", 1, tmp_path / "serial")
    Trainer(config_of(policy, *settings(tmp_path, "serial", RUNS["serial"])), resume=True).fit()
    compare(one / "serial", tmp_path / "serial", policy)


def test_the_command_line_ends_both_processes_with_the_message(
    launched: tuple[Path, dict[str, list[str]], tuple[int, str]],
) -> None:
    folder, _, (status, out) = launched
    assert status != 0, out
    # of one or both: the launcher ends the slower
    told = [line for line in out.splitlines() if line.startswith("error: ")]
    assert told and all("expected at most 0 workers to die or hang" in line for line in told), out
    assert json.loads((folder / "command" / "run.json").read_text())["status"] == "failed"
    assert [r["step"] for r in read_jsonl(folder / "command" / "failures.jsonl")]


@pytest.mark.parametrize(
    ("local", "visible", "device", "expected"),
    [
        ("8", None, "cuda:3", {"CUDA_VISIBLE_DEVICES": "3"}),
        ("4", "4, 5, 6, 7", "cuda:2", {"CUDA_VISIBLE_DEVICES": "6"}),
        ("1", "4,5", "cuda:1", {}),
        ("8", None, "cpu", {}),
    ],
)
def test_simulators_render_on_the_gpu_of_their_process(
    local: str,
    visible: str | None,
    device: str,
    expected: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert own_gpu(torch.device(device)) == expected


@pytest.mark.parametrize(
    ("overrides", "processes", "says"),
    [
        (
            ["engine.train=fsdp2", "schedule.kind=pipelined"],
            1,
            "schedule.kind serial with engine.train fsdp2, found pipelined",
        ),
        (["engine.train=single"], 2, "found single; set engine.train: auto"),
        (["engine.rollout=vllm"], 1, "engine.rollout means nothing to an embodied run"),
    ],
)
def test_engines_that_embodied_runs_do_not_have_are_refused(
    policy: Path, overrides: list[str], processes: int, says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        train_engine_name(config_of(policy, *overrides), processes)
    assert train_engine_name(config_of(policy, "schedule.kind=pipelined"), 2) == "ddp", (
        "overlapping in several processes"
    )
