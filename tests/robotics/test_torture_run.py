"""Embodied training runs under faults: they go on with books that balance, or stop with a reason; and killed runs resume."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
import uuid
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from mmrl.errors import CheckpointError, ConfigError, NonFiniteError
from mmrl.robotics.pool import PoolError, PoolSettings, VectorEnv
from mmrl.training.trainer import Trainer
from tests.kits.launch_kit import run_here
from tests.kits.pool_kit import FAULTY, STATES, actions_of, adds_up, faulty, gone, one, play
from tests.kits.robot_kit import BASE, config_of, make_model, make_vla, saved_vla

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("tiny_workers")]


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_vla(tmp_path_factory.mktemp("policy"))


def trainer_of(policy: Path, folder: Path, *overrides: str, **options: Any) -> Trainer:
    """A run named 'run' on the faulty simulator; `options` are the simulator's."""
    settings = json.dumps({"tolerance": 0.5, **options})
    return Trainer(
        config_of(
            policy,
            f"dir={folder}",
            "name=run",
            f"env.suite={FAULTY}",
            f"env.options={settings}",
            "env.retries=1",
            "env.respawns=100",
            "train.steps=1",
            *overrides,
        )
    )


def lines(folder: Path, name: str) -> list[dict[str, Any]]:
    return [
        json.loads(line)
        for line in (folder / "run" / name).read_text(encoding="utf-8").splitlines()
    ]


def balanced(folder: Path, places: int = 3, members: int = 3) -> list[dict[str, Any]]:
    """The rows of a run whose books balance: every group and every failed attempt is counted once."""
    rows, failures = lines(folder, "metrics.jsonl"), lines(folder, "failures.jsonl")
    for row in rows:
        n = {
            name.removeprefix("train/groups/"): value
            for name, value in row.items()
            if name.startswith("train/groups/")
        }
        assert n["asked"] == n["trained"] + n["no_signal"] + n["failed"] + n["stale"]
        assert places == n["trained"] + n["empty"] and row["train/episodes"] == members * n["asked"]
        mine = [f for f in failures if f["step"] == row["step"]]
        assert row["train/failed_attempts"] == len(mine) and all(
            f["reason"] and f["id"] for f in mine
        )
    assert sum(row["train/failed_attempts"] for row in rows) == len(failures)
    return rows


def status(folder: Path) -> str:
    return str(json.loads((folder / "run" / "run.json").read_text(encoding="utf-8"))["status"])


# simulators that fail


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("kill", "SIGKILL"),
        ("exit", "the driver gave up"),
        ("hang", "no answer to a chunk within 1 s"),
        ("raise", "the physics exploded"),
        ("bad_picture", "expected pictures uint8 (32, 32, 3)"),
        ("kill_reset", "SIGKILL"),
        ("raise_reset", "the physics exploded"),
        ("nan_reward", "expected finite rewards and proprioception, found [nan"),
        ("nan_state", "and [nan nan] after"),
        ("nan_state_reset", "and [nan nan] after a reset"),
        ("memory", "is above the limit of 0.45 GiB"),
    ],
)
def test_one_state_that_always_fails_costs_its_group_and_nothing_else(
    policy: Path, tmp_path: Path, fault: str, words: str
) -> None:
    tries = 1 if fault in ("hang", "memory") else 2  # these take long
    limits = [
        *{"hang": ["env.step_s=1"], "memory": ["env.memory_gib=0.3"]}.get(fault, []),
        f"env.retries={tries - 1}",
    ]
    trainer = trainer_of(policy, tmp_path, *limits, fault=fault, states=[2])
    trainer.fit()
    (row,) = balanced(tmp_path)
    own = [
        f
        for f in lines(tmp_path, "failures.jsonl")
        if words in f["reason"] and "lost with its worker" not in f["reason"]
    ]
    assert {f["id"] for f in own} == {"train-2"} and sorted(
        (f["member"], f["attempt"]) for f in own
    ) == [(member, attempt) for member in range(3) for attempt in range(tries)], (
        "each member as often as it may be tried"
    )
    assert row["train/groups/failed"] == 1 and row["train/groups/trained"] > 0, (
        "place 1's first state; another took its place"
    )
    assert row["train/parse_rate"] == pytest.approx(1 - 1 / row["train/groups/asked"])
    stats = trainer.rollouts.pool.stats()
    assert adds_up(trainer.rollouts.pool) and stats.running == 0 and status(tmp_path) == "finished"
    assert stats.respawns == (
        3 * tries if fault in ("kill", "exit", "hang", "kill_reset", "memory") else 0
    )


def test_members_lost_with_their_worker_cost_no_retry_of_their_own(
    policy: Path, tmp_path: Path
) -> None:
    """One worker hosts all: each kill of state 2's episodes takes others along, none of which is given up for it."""
    trainer_of(
        policy, tmp_path, "env.workers=1", "env.retries=0", fault="kill", states=[2], at=2
    ).fit()
    (row,) = balanced(tmp_path)
    lost = [f for f in lines(tmp_path, "failures.jsonl") if "lost with its worker" in f["reason"]]
    assert {f["id"] for f in lost} - {"train-2"} and {f["attempt"] for f in lost} == {0}
    assert row["train/groups/failed"] == 1 and row["train/parse_rate"] == pytest.approx(
        1 - 1 / row["train/groups/asked"]
    )


def test_leaking_workers_are_replaced_without_losing_an_episode(
    policy: Path, tmp_path: Path
) -> None:
    trainer = trainer_of(policy, tmp_path, "env.memory_gib=0.2", fault="leak", leak_mib=60)
    trainer.fit()
    (row,) = balanced(tmp_path)
    stats = trainer.rollouts.pool.stats()
    assert (
        stats.restarts >= 2
        and stats.errors == stats.respawns == 0
        and row["train/failed_attempts"] == 0
    )


def test_a_step_of_which_nothing_works_raises_an_alarm_and_the_run_goes_on(
    policy: Path, tmp_path: Path
) -> None:
    trainer_of(
        policy, tmp_path, "train.steps=3", fault="raise_reset", states=[6, 7, 8, 9, 10, 11]
    ).fit()
    first, second, third = balanced(tmp_path)
    assert (
        second["train/groups/failed"] == second["train/groups/asked"] == 6
        and second["train/groups/empty"] == 3
    )
    assert (
        second["train/entropy"] is None
        and first["train/groups/failed"] == third["train/groups/failed"] == 0
    )
    assert first["train/groups/trained"] > 0 < third["train/groups/trained"]
    alarm = lines(tmp_path, "alarms.jsonl")[0]
    assert (alarm["step"], alarm["name"]) == (
        2,
        "prompts_failed",
    ) and "failures.jsonl says why" in alarm["message"]


def test_one_dead_task_beside_a_good_one_is_seen_and_ends_the_run_with_its_name(
    policy: Path, tmp_path: Path
) -> None:
    """Places take turns: odd states are of the task push, none of which can be reset; reach finishes episodes all the time."""
    trainer = trainer_of(
        policy,
        tmp_path,
        "env.tasks=[reach, push]",
        "train.steps=20",
        "train.prompts_per_step=2",
        "env.retries=0",
        "algorithm.max_rounds=1",
        "rollout.group_size=2",
        "eval_states=1",
        "alarms.zero_reward_steps=2",
        "train.save_every=0",
        fault="raise_reset",
        states=list(range(1, 99, 2)),
    )
    with pytest.raises(
        PoolError,
        match=r"(?s)the last 8 initial states all failed \(1 attempts each\) with no episode of \S*/push "
        r"finished between them.*env\.tasks.*the physics exploded",
    ):
        trainer.fit()
    rows, alarms = lines(tmp_path, "metrics.jsonl"), lines(tmp_path, "alarms.jsonl")
    assert len(rows) == 7 and status(tmp_path) == "failed"
    for row in rows:
        assert row["train/push/failed"] == 1 and row["train/push/success_once"] is None
        assert (
            row["train/reach/failed"] == 0
            and row["train/reach/success_once"] == 2 * row["train/success_once"]
        )
    assert [(a["step"], a["name"]) for a in alarms if a["name"] == "task_failed"] == [
        (2, "task_failed")
    ]
    assert "'push'" in next(a["message"] for a in alarms if a["name"] == "task_failed")


@pytest.mark.parametrize("kind", ["serial", "pipelined", "async"])
def test_simulators_that_never_work_end_the_run_and_its_failures_are_kept(
    policy: Path, tmp_path: Path, kind: str
) -> None:
    trainer = trainer_of(
        policy, tmp_path, f"schedule.kind={kind}", "train.steps=1000", fault="raise_reset"
    )
    with pytest.raises(
        PoolError,
        match=r"(?s)the last 8 initial states all failed \(2 attempts each\).*the physics exploded",
    ):
        trainer.fit()
    failures = lines(tmp_path, "failures.jsonl")
    assert {f["id"] for f in failures} >= {"train-0", "train-2"} and all(
        "physics exploded" in f["reason"] for f in failures
    )
    assert status(tmp_path) == "failed" and gone(trainer.rollouts.pool.pids())


def test_attempts_that_fail_during_an_evaluation_of_an_async_run_are_kept(
    policy: Path, tmp_path: Path
) -> None:
    trainer_of(
        policy,
        tmp_path,
        "schedule.kind=async",
        "schedule.staleness=2",
        "train.steps=4",
        "eval.every=1",
        fault="raise",
        states=[2, 6, 10, 14, 18],
    ).fit()
    failures = lines(tmp_path, "failures.jsonl")
    assert sum(row["train/failed_attempts"] for row in lines(tmp_path, "metrics.jsonl")) == len(
        failures
    )
    twice = [(member, attempt) for member in range(3) for attempt in range(2)]
    for name in ("train-2", "train-6", "train-10", "train-14", "train-18"):
        assert sorted((f["member"], f["attempt"]) for f in failures if f["id"] == name) == twice
    evaluations = [
        json.loads(f.read_text(encoding="utf-8"))
        for f in (tmp_path / "run" / "eval").glob("*/results.json")
    ]
    assert len(evaluations) == 5 and not any(e["failed_attempts"] for e in evaluations)


@pytest.mark.parametrize("workers", [1, 6])
def test_a_state_that_kills_every_member_costs_the_budget_no_more_than_one_of_them(
    policy: Path, tmp_path: Path, workers: int
) -> None:
    """Also where all of them die at once, each in a worker of its own."""
    trainer = trainer_of(
        policy,
        tmp_path,
        "env.retries=1",
        "env.respawns=2",
        f"env.workers={workers}",
        "env.slots=6",
        "rollout.group_size=6",
        fault="kill_reset",
        states=[2],
    )
    trainer.fit()
    assert trainer.rollouts.pool.stats().respawns == 6 * 2 and status(tmp_path) == "finished"


def test_an_episode_beyond_its_horizon_ends_the_run_and_names_the_simulator(
    policy: Path, tmp_path: Path
) -> None:
    trainer = trainer_of(policy, tmp_path, fault="endless", states=[2])
    with pytest.raises(
        ConfigError, match=r"FaultySimulator/reach: .*env.horizon = 12 .*after 12: "
    ):
        trainer.fit()


@pytest.mark.parametrize("says", [True, False])
def test_an_episode_that_goes_on_after_its_success_does_so_by_its_simulators_word(
    policy: Path, tmp_path: Path, says: bool
) -> None:
    trainer = trainer_of(policy, tmp_path, fault="goes_on", stop_at_success=says)
    if says:
        with pytest.raises(ConfigError, match=r"FaultySimulator/reach: .* that goes on: "):
            trainer.fit()
    else:
        trainer.fit()
        assert status(tmp_path) == "finished"


def test_a_spent_budget_of_respawns_ends_the_run(policy: Path, tmp_path: Path) -> None:
    trainer = trainer_of(
        policy,
        tmp_path,
        "env.respawns=2",
        "env.workers=1",
        "eval_states=1",
        fault="kill_reset",
        states=[2, 4],
    )
    with pytest.raises(
        PoolError, match=r"(?s)expected at most 2 workers to die or hang, found one more.*SIGKILL"
    ):
        trainer.fit()
    assert (
        any("SIGKILL" in f["reason"] for f in lines(tmp_path, "failures.jsonl"))
        and status(tmp_path) == "failed"
    )


# simulators that cannot be opened


def test_a_simulator_that_cannot_be_built_again_costs_a_respawn_not_its_neighbour(
    tmp_path: Path,
) -> None:
    spec = faulty("", builds=str(tmp_path / "builds"), no_build=[2])
    other = faulty("", builds=str(tmp_path / "others"))
    with VectorEnv(2, 1, PoolSettings(restart_after_resets=1, respawns=1)) as pool:
        assert play(pool, {0: (spec, STATES[0])})[0][1] is None
        first = pool.pids()
        pool.reset(1, other, STATES[1])
        assert one(pool).error is None
        pool.reset(0, spec, STATES[1])
        reply = one(pool)
        assert (
            reply.cause == "rebuild"
            and "run `mmrl doctor`" in str(reply.error)
            and pool.pids() != first
        )
        pool.step(1, actions_of(STATES[1], 1))
        assert one(pool).error is None, "the other episode of that worker goes on in it"
        assert play(pool, {0: (spec, STATES[1])})[0][1] is None
        stats = pool.stats()
        assert (stats.respawns, stats.restarts, dict(stats.error_causes)) == (
            1,
            0,
            {"rebuild": 1},
        ) and adds_up(pool)


def test_rebuilds_that_fail_for_ever_spend_the_budget(tmp_path: Path) -> None:
    spec = faulty("", builds=str(tmp_path / "builds"), no_build=list(range(2, 50)))
    with VectorEnv(1, 1, PoolSettings(restart_after_resets=1, respawns=2)) as pool:
        assert play(pool, {0: (spec, STATES[0])})[0][1] is None
        for _ in range(3):
            pool.reset(0, spec, STATES[1])
            assert one(pool).cause == "rebuild"
        with pytest.raises(
            PoolError,
            match=r"found one more.*could not be built again: expected a GL context, found none",
        ):
            pool.ready()
        assert adds_up(pool)


def test_the_first_build_ends_the_run_at_once_a_later_one_is_tried_again(
    policy: Path, tmp_path: Path
) -> None:
    # one worker: with two, the second simulator may be there before the first has failed, which then is a rebuild
    trainer = trainer_of(
        policy, tmp_path / "first", "env.workers=1", builds=str(tmp_path / "a"), no_build=[1]
    )
    with pytest.raises(
        ConfigError, match="expected a GL context, found none for simulator 1; run `mmrl doctor`"
    ):
        trainer.fit()
    assert trainer.rollouts.pool.stats().respawns == 0 and gone(trainer.rollouts.pool.pids())
    later = trainer_of(
        policy,
        tmp_path / "later",
        "env.restart_after_resets=1",
        "env.retries=5",
        builds=str(tmp_path / "b"),
        no_build=[7, 9, 12],
    )
    later.fit()
    (row,) = balanced(tmp_path / "later")
    assert row["train/groups/failed"] == 0 and later.rollouts.pool.stats().error_causes == {
        "rebuild": 3
    }
    assert 1 <= later.rollouts.pool.stats().respawns <= 3


# policies that are wrong


def broken_copy(policy: Path, folder: Path, name: str, change: Any) -> Path:
    """A copy of the policy with one file changed."""
    folder.mkdir()
    for file in policy.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    change(folder / name)
    return folder


def nan_head(file: Path) -> None:
    weights = load_file(str(file))
    weights[
        "model.norm.weight"
        if "model.norm.weight" in weights
        else next(
            k
            for k in weights
            if k.endswith("norm.weight") and "visual" not in k and "layers" not in k
        )
    ][:] = float("nan")
    save_file(weights, str(file), {"format": "pt"})


def test_weights_that_are_not_finite_end_the_run_and_name_the_place(
    policy: Path, tmp_path: Path
) -> None:
    wrong = broken_copy(policy, tmp_path / "nan", "model.safetensors", nan_head)
    with pytest.raises(
        CheckpointError,
        match=r"expected finite weights in .*nan, found NaN or infinity in 1 tensor \(",
    ):
        trainer_of(wrong, tmp_path)
    trainer = trainer_of(policy, tmp_path)
    with torch.no_grad():  # after they were read: what training, or a fault of the machine, may do
        trainer.policy.core.model.lm_head.weight.fill_(float("nan"))
    with pytest.raises(
        NonFiniteError,
        match=r"found \(nan, nan.*in decision 1 of .*/reach, state eval-0, member 0 \(weights of ",
    ):
        trainer.fit()
    assert status(tmp_path) == "failed" and gone(trainer.rollouts.pool.pids())


def test_weights_that_explode_in_training_leave_an_alarm(policy: Path, tmp_path: Path) -> None:
    trainer = trainer_of(
        policy, tmp_path, "optim.lr=1e30", "train.steps=5", "optim.max_grad_norm=1e9"
    )
    with pytest.raises(NonFiniteError):
        trainer.fit()
    assert [a["name"] for a in lines(tmp_path, "alarms.jsonl")].count("non_finite") == 1 and status(
        tmp_path
    ) == "failed"


def test_actions_of_another_task_end_the_run_at_once(policy: Path, tmp_path: Path) -> None:
    trainer = trainer_of(policy, tmp_path, "env.tasks=[pick]", "env.options={}")
    with pytest.raises(
        ConfigError,
        match=r"pick: the policy's actions cannot be executed: expected actions of shape \(C, 3\)",
    ):
        trainer.fit()
    assert (
        trainer.rollouts.pool.stats().error_causes == {"action": 1}
        or trainer.rollouts.pool.stats().errors >= 1
    )


@pytest.mark.parametrize(
    ("bounds", "words"),
    [
        ([float("nan"), -1.0], "expected finite bounds"),
        ([-1.0, -1.0, -1.0], "same length"),
        ([2.0, 2.0], "low <= high"),
    ],
)
def test_action_settings_that_make_no_sense_are_refused_before_anything_starts(
    policy: Path, tmp_path: Path, bounds: list[float], words: str
) -> None:
    def change(file: Path) -> None:
        data = json.loads(file.read_text(encoding="utf-8"))
        data["action"]["low"] = bounds
        file.write_text(json.dumps(data), encoding="utf-8")

    with pytest.raises(
        CheckpointError, match=rf"vla\.json: expected the action settings .*{words}"
    ):
        trainer_of(broken_copy(policy, tmp_path / "bad", "vla.json", change), tmp_path)


# the command line: what is missing


@pytest.mark.parametrize(
    ("settings", "variables", "words"),
    [
        pytest.param(
            ["env.suite=maniskill", "env.tasks=[PushCube-v1]", "env.options={dims: 4}"],
            {"VK_ICD_FILENAMES": "/nowhere/icd.json", "VK_DRIVER_FILES": "/nowhere/icd.json"},
            ["pictures from ManiSkill", "need Vulkan", "Fix:"],
            marks=pytest.mark.render("libvulkan.so.1"),
        ),
        pytest.param(
            ["env.suite=maniskill", "env.tasks=[PushCub-v1]"],
            {},
            ["PushCub-v1", "Did you mean 'PushCube-v1'?"],
        ),
        pytest.param(
            ["env.suite=libero", "env.tasks=[libero_object/2]"],
            {"MUJOCO_GL": "bogus"},
            ["expected auto, osmesa or egl", "found 'bogus'"],
        ),
        pytest.param(
            ["env.suite=libero", "env.tasks=[libero_object/2]"],
            {"MMRL_LIBERO_ASSETS": "/nowhere"},
            ["MMRL_LIBERO_ASSETS: expected a folder with LIBERO's assets", "found /nowhere"],
        ),
        pytest.param(
            ["env.suite=libero", "env.tasks=[libero_goal/2]", "env.options={assets: official}"],
            {},
            ["official meshes are not on this machine", "MMRL_LIBERO_ASSETS=FOLDER"],
        ),
        pytest.param(
            ["env.suite=libero", "env.tasks=[libero_object/10]"],
            {},
            ["expected a task number 0 to 9", "found 10"],
        ),
    ],
)
def test_what_is_missing_ends_the_command_with_words_and_leaves_no_process(
    policy: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    settings: list[str],
    variables: dict[str, str],
    words: list[str],
) -> None:
    """Workers inherit the mark."""
    file, mark = tmp_path / "run.yaml", uuid.uuid4().hex
    file.write_text("env: {suite: tiny}\n", encoding="utf-8")
    common = [s for s in BASE if not s.startswith(("env.suite", "env.tasks", "env.options"))]
    arguments = [
        *common,
        f"model.path={policy}",
        f"dir={tmp_path}",
        "env.options={}",
        "env.workers=1",  # the second says the same, seconds of imports later
        *settings,
    ]
    for name, value in {"MMRL_TEST_MARK": mark, **variables}.items():
        monkeypatch.setenv(name, value)
    done = run_here("mmrl.cli.main", "train", str(file), *arguments)
    assert done.returncode == 2, done.stderr
    assert all(word in done.stderr for word in words) and "Traceback" not in done.stderr, (
        done.stderr
    )
    assert gone(marked(mark))


def marked(mark: str) -> list[int]:
    """Processes that inherited the mark."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("MMRL_TEST_MARK") == mark:
                found.append(process.pid)
        except (psutil.Error, OSError):
            continue
    return found


# kills from outside


def kill_while_training(trainer: Trainer, count: int) -> threading.Thread:
    """Kill `count` workers with SIGKILL while the first step is rolled out."""
    rollouts: Any = trainer.rollouts

    def watch() -> None:
        for _ in range(count):
            while (
                not (hasattr(rollouts, "groups") and rollouts.groups.records)
                or not rollouts.pool.stats().running
            ):
                time.sleep(0.005)
            os.kill(rollouts.pool.pids()[0], signal.SIGKILL)
            time.sleep(1.0)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    return thread


@pytest.mark.render("libvulkan.so.1")
def test_real_simulators_killed_in_a_training_step_cost_attempts_only(tmp_path: Path) -> None:
    settings = [
        "env.suite=maniskill",
        "env.tasks=[PushCube-v1]",
        "env.horizon=16",
        "env.options={dims: 4, reward: normalized_dense}",
        "rl.reward=shaped",
        "action.chunk=4",
        "env.slots=4",
        "env.workers=1",
        "train.steps=1",
        "eval_states=1",
    ]
    make_vla(make_model(tmp_path / "model"), *settings).save(tmp_path / "vla")
    trainer = Trainer(
        config_of(
            tmp_path / "vla", f"dir={tmp_path}", "name=run", *settings, "schedule.kind=pipelined"
        )
    )
    thread = kill_while_training(trainer, 1)
    trainer.fit()
    thread.join()
    (row,) = balanced(tmp_path)
    failures = lines(tmp_path, "failures.jsonl")
    assert (
        failures
        and all("SIGKILL" in f["reason"] for f in failures)
        and trainer.rollouts.pool.stats().respawns == 1
    )
    assert (
        row["train/groups/trained"] == 3
        and row["train/groups/failed"] == 0
        and status(tmp_path) == "finished"
    )


def test_a_killed_run_resumes_bit_for_bit(tmp_path: Path) -> None:
    """The whole one: python -m scripts.torture_robot --minutes 6."""
    from scripts.torture_robot import torture

    record = torture(
        tmp_path, suite="tiny", minutes=0.2, seed=1, steps=3, schedules=("pipelined, order key",)
    )
    assert record["passed"] and record["num_kills"] > 0, yaml.safe_dump(record)
