"""Two real processes (gloo on 127.0.0.1) make the run of one: same prompts, rewards, counts, gradients and weights."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from mmrl.config import load_config
from mmrl.training.trainer import Trainer
from mmrl.video.store import TensorStore
from tests.distributed.cache_worker import cached_run, look
from tests.kits.engine_kit import (
    ALBUM,
    ENVIRONMENT,
    REPO,
    album_data,
    config_file,
    merge,
    picture,
    read_jsonl,
    small_run,
    weights_of,
)
from tests.kits.prepared_kit import launch_prepared
from tests.training.test_offline_run import TEXT, run_file
from tests.video.store_kit import at_rest

pytestmark = pytest.mark.slow
SIZES = ((112, 84), (56, 56), (84, 112), (168, 56))
# Gradients are summed in another order: equal to rounding, and AdamW's step divides by their size, so that where a
# gradient is ~0 rounding may turn a whole +-lr. Metrics are compared to 2e-4, weights to 2 % of the distance travelled.
CLOSE = {"rel": 2e-4, "abs": 1e-6}


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def launch(
    launcher: str,
    *arguments: str,
    status: int = 0,
    program: tuple[str, ...] = ("mmrl.cli.main", "train"),
    timeout: float = 300,
) -> str:
    """`mmrl train`, or another program, in two processes; returns what they printed."""
    port = str(free_port())
    head = {
        "torchrun": [
            "-m",
            "torch.distributed.run",
            "--nproc_per_node",
            "2",
            "--master_addr",
            "127.0.0.1",
            "--master_port",
            port,
            "-m",
        ],
        "accelerate": [
            "-m",
            "accelerate.commands.launch",
            "--cpu",
            "--num_processes",
            "2",
            "--num_machines",
            "1",
            "--mixed_precision",
            "no",
            "--dynamo_backend",
            "no",
            "--main_process_ip",
            "127.0.0.1",
            "--main_process_port",
            port,
            "--num_cpu_threads_per_process",
            "1",
            "--module",
        ],
    }[launcher]
    environment = {**ENVIRONMENT, "GLOO_SOCKET_IFNAME": "lo"}

    process = subprocess.Popen(
        [sys.executable, *head, *program, *arguments],
        cwd=REPO,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        out, _ = process.communicate(timeout=timeout)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert (process.returncode == 0) == (status == 0), f"exit status {process.returncode}\n{out}"
    return out


def work(
    folder: Path, jobs: list[list[Any]], *command: str, status: int = 0, torchrun: bool = False
) -> tuple[list[list[Any]], str]:
    """`jobs` in two processes of tests/kits/process_worker.py, which with `torchrun` it starts; what they returned, by process, and
    what was printed."""
    file = folder / "jobs.json"
    file.write_text(json.dumps(jobs), encoding="utf-8")
    program = "tests.kits.process_worker"
    if torchrun:
        said = launch(
            "torchrun", str(file), *command, status=status, program=(program,), timeout=1200
        )
    else:
        ended, said = launch_prepared(program, str(file), *command, timeout=1200)
        assert (ended == 0) == (status == 0), f"exit status {ended}\n{said}"
    returned = [file.with_name(f"jobs.json.{rank}") for rank in range(2)]
    assert all(path.exists() for path in returned), said
    ranks = [json.loads(path.read_text(encoding="utf-8")) for path in returned]
    assert [len(of_rank) for of_rank in ranks] == [len(jobs)] * 2, said
    return ranks, said


def compare(one: Trainer, other: Path) -> None:
    """Assert that the run folder `other` tells what `one` told."""
    mine = one.folder.path
    rows, others = read_jsonl(mine / "metrics.jsonl"), read_jsonl(other / "metrics.jsonl")
    assert len(rows) == len(others) == one.config.train.steps
    for a, b in zip(rows, others, strict=True):
        # of a generator process
        assert b.pop("train/generator/restarts", 0.0) == 0.0 and b.pop("time/sync", 0.0) >= 0
        assert a.keys() == b.keys()
        for key in a:
            if (
                key.startswith(("time/", "speed/", "memory/", "train/tokens/packed"))
                or "/logprob_gap/" in key
                or (key.endswith("/kl_step"))
            ):
                continue
            assert b[key] == (
                pytest.approx(a[key], **CLOSE) if isinstance(a[key], float) else a[key]
            ), key
        assert b["train/logprob_gap/max"] is None or b["train/logprob_gap/max"] < 1e-5
        assert b["train/tokens/packed"] == a["train/tokens/packed"]
    key = ("step", "source", "id", "reason")
    failures, other_failures = (
        sorted(tuple(str(r[k]) for k in key) for r in read_jsonl(run / "failures.jsonl"))
        for run in (mine, other)
    )
    assert failures == other_failures
    last = f"checkpoints/step_{one.config.train.steps:06d}"
    final, other_final = dict(weights_of(mine / last)), dict(weights_of(other / last))
    initial = dict(weights_of(Path(one.config.model.path)))
    moved = torch.stack([(final[n] - initial[n]).norm() for n in final]).norm()
    apart = torch.stack([(final[n] - other_final[n]).norm() for n in final]).norm()
    assert moved > 0 and apart < 0.02 * moved, (float(apart), float(moved))
    state, other_state = (
        json.loads((run / last / "trainer" / "state.json").read_text()) for run in (mine, other)
    )
    assert all(state[k] == other_state[k] for k in ("schedule", "credit", "updates"))


def make(tmp_path: Path, kind: str) -> dict[str, Any]:
    """3 steps. 'mixed' has text-only prompts, a flat source and broken pictures; 'text' has no picture at all."""
    rows = [
        [] if kind == "text" else [picture(SIZES[(i + k) % 4], i) for k in range(i % 3)]
        for i in range(12)
    ]
    held = album_data(tmp_path / "data", rows[:5], "held")
    sources = [{"task": ALBUM, "path": album_data(tmp_path / "data", rows)}]
    if kind == "mixed":
        flat = album_data(tmp_path / "data", [[picture((56, 56), i)] for i in range(4)], "flat")
        broken = album_data(
            tmp_path / "data", [[str(tmp_path / f"missing-{i}.png")] for i in range(3)], "broken"
        )
        sources += [
            {"task": ALBUM, "path": flat, "params": {"value": 0.0}, "weight": 0.5},
            {"task": ALBUM, "path": broken, "weight": 0.3},
        ]
    return small_run(
        tmp_path / "runs",
        sources[0]["path"],
        held,
        data={"train": sources, "on_error": "record"},
        train={"steps": 3, "prompts_per_step": 5},
        optim={"lr": 0.001},
        eval={"every": 3},
    )


# run -> its data and settings
EQUAL: dict[str, tuple[str, dict[str, Any]]] = {
    "dynamic sampling": ("mixed", {}),
    "one prompt for two processes, kl": (
        "mixed",
        {"train": {"prompts_per_step": 1}, "algorithm": {"kl": {"coef": 0.05}}},
    ),
    "entropy bonus": (
        "text",
        {
            "algorithm": {
                "entropy": {"target": 99.0, "delta": 0.1},
                "loss_aggregation": "sequence_mean",
            }
        },
    ),
    "ema and selection": (
        "mixed",
        {
            "algorithm": {"advantage_scale": "ema", "difficulty": "softmax"},
            "data": {"selection": {"kind": "variance", "threshold": 0.01, "rest": 1}},
        },
    ),
    "gdpo": ("text", {"algorithm": {"reward_aggregation": "gdpo"}}),
}
# engine, how one process breaks its run, which one; under ddp each waits for the other between two steps, under fsdp2 in every
# forward and backward as well
BROKEN = [
    ("ddp", "checkpoint", 0),
    ("ddp", "loss", 1),
    ("ddp", "fingerprint", 1),
    ("ddp", "late", 0),
    ("fsdp2", "late", 1),
    ("fsdp2", "loss", 1),
    ("fsdp2", "infinite", 1),
    ("fsdp2", "fingerprint", 1),
    ("fsdp2", "media", 1),
    ("fsdp2", "rollout", 1),
]


@dataclass
class Found:
    """Configurations by name, whose runs in two processes stand beside them; what jobs returned, by process; what was printed."""

    configs: dict[str, str]
    ranks: list[dict[str, Any]]
    said: str

    def one(self, name: str) -> Trainer:
        """The run of one process."""
        trainer = Trainer(load_config(self.configs[name]))
        trainer.fit()
        return trainer

    def two(self, name: str, run: str = "two") -> Path:
        """The folder of a run of two processes."""
        return Path(self.configs[name]).parent / "runs" / run


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """All runs in one launch, which ends with a command that is refused."""
    folder = tmp_path_factory.mktemp("two")
    configs = {
        name: config_file(
            folder / str(n) / "c.yaml",
            merge(make(folder / str(n), kind), json.loads(json.dumps(section))),
        )
        for n, (name, (kind, section)) in enumerate(EQUAL.items())
    }
    configs["broken"] = config_file(
        folder / "broken" / "c.yaml",
        merge(make(folder / "broken", "mixed"), {"eval": {"every": 0}, "data": {"eval": []}}),
    )
    configs["cache"] = cached_run(folder / "cache")
    configs["offline"] = run_file(
        folder / "offline",
        {"per_group": 1},
        [{"offline": [{"text": t} for t in (TEXT, "abc")]}] * 4,
        dense=True,
        train={"steps": 2, "prompts_per_step": 4},
    )
    train = "tests.kits.process_worker:train"
    jobs: dict[str, list[Any]] = {
        name: [train, configs[name], ["name=two", "train.keep_last=9"]]
        for name in (*EQUAL, "offline")
    }
    jobs["resumed"] = [
        train,
        configs["dynamic sampling"],
        ["name=resumed", "train.keep_last=9"],
        "two",
    ]
    jobs["damaged"] = [
        "tests.kits.process_worker:train_damaged",
        configs["dynamic sampling"],
        ["name=damaged", "train.keep_last=9"],
        "two",
        3,
    ]
    apart = "engine.generator.kind=process"
    jobs["apart"] = [
        train,
        configs["dynamic sampling"],
        ["name=apart", "train.keep_last=9", apart],
    ]
    jobs["ahead"] = [
        train,
        configs["dynamic sampling"],
        ["name=ahead", apart, "engine.train=fsdp2", "schedule.kind=async", "schedule.wave=1"],
    ]
    jobs["cache"] = [
        "tests.distributed.cache_worker:train_and_look",
        configs["cache"],
        ["name=two"],
    ]
    jobs["ray"] = ["tests.distributed.ray_ranks:tell"]
    jobs |= {
        f"{engine}-{kind}": [
            "tests.distributed.stopping_worker:stop",
            configs["broken"],
            engine,
            kind,
            breaker,
        ]
        for engine, kind, breaker in BROKEN
    }
    ranks, said = work(
        folder,
        list(jobs.values()),
        "train",
        configs["broken"],
        "schedule.kind=pipelined",
        status=1,
        torchrun=True,
    )
    return Found(configs, [dict(zip(jobs, returned, strict=True)) for returned in ranks], said)


@pytest.mark.parametrize("name", [*EQUAL, "offline"])
def test_two_processes_equal_one(name: str, found: Found) -> None:
    one = found.one(name)
    compare(one, found.two(name))
    if name == "offline":
        return
    counts = read_jsonl(one.folder.path / "metrics.jsonl")
    if name == "dynamic sampling":
        assert sum(c["train/groups/no_signal"] for c in counts) and sum(
            c["train/groups/failed"] for c in counts
        ), counts
        compare(one, found.two(name, "resumed"))
        assert json.loads((found.two(name, "resumed") / "run.json").read_text())["resumed_at"] == 2
        compare(one, found.two(name, "apart"))
        compare(one, found.two(name, "damaged"))
        info = json.loads((found.two(name, "damaged") / "run.json").read_text())
        assert info["resumed_at"] == 2 and list(info["damaged_checkpoints"]) == ["3"]
    mine, other = (
        [r["text"] for r in read_jsonl(run / "eval/step_000000/predictions.jsonl")]
        for run in (one.folder.path, found.two(name))
    )
    assert mine == other and mine, "evaluation covers every sample once, in order"


def test_a_generator_overlaps_the_steps_of_two_sharded_processes(found: Found) -> None:
    """Weights are gathered once, the step's groups are dealt, and what was rolled out meanwhile is one version old at most."""
    rows = read_jsonl(found.two("dynamic sampling", "ahead") / "metrics.jsonl")
    assert len(rows) == 3 and all(r["train/groups/kept"] > 1 for r in rows)
    ages = [r["train/staleness"] for r in rows]
    assert ages[0] == 0 and max(ages) == 1
    assert max(r["train/offpolicy/share"] for r in rows) > 0
    assert rows[-1]["eval/selection"] is not None


def test_accelerate_launches_the_command(tmp_path: Path) -> None:
    config = config_file(
        tmp_path / "c.yaml",
        merge(
            make(tmp_path, "text"),
            {"algorithm": {"loss_aggregation": "sequence_mean", "epochs": 2, "minibatches": 2}},
        ),
    )
    one = Trainer(load_config(config))
    one.fit()
    launch("accelerate", config, "name=two")
    compare(one, tmp_path / "runs" / "two")


def test_two_processes_share_a_store(found: Found) -> None:
    """The same tensors, built once, and the run of one process."""
    folder = Path(found.configs["cache"]).parent
    one = Trainer(load_config(found.configs["cache"], [f"data.cache.dir={folder / 'own'}"]))
    one.fit()
    alone, (first, second) = look(one), [rank["cache"] for rank in found.ranks]
    assert (first["rank"], second["rank"], first["size"], second["size"]) == (0, 1, 2, 2)
    assert first["tensors"] == second["tensors"] == alone["tensors"] and len(alone["tensors"]) == 5
    compare(one, found.two("cache"))

    store = TensorStore(folder / "shared")
    kinds = {kind: n for kind, (n, _) in store.stats().kinds.items()}
    assert kinds == {"video": 3, "image": 2, "features": 5}
    assert first["built"] + second["built"] == alone["built"] == 5, (
        "pixels: of all processes one builds, the others wait"
    )
    # two that need the features of one clip at the same moment may both compute them; one entry is kept
    assert 5 <= first["encoded"] + second["encoded"] <= 10 and alone["encoded"] == 5
    assert max(first["encoded"], second["encoded"]) <= 5, "no process computes them twice"
    assert not store.verify().damaged and at_rest(store)


def test_what_is_lost_in_any_process_is_told_by_all_and_a_node_counts_its_processes(
    found: Found,
) -> None:
    expected = {
        "metrics": {"train/ray/restarts/rewards": 2.0, "train/ray/restarts/rollouts": 1.0},
        "local": {},
        "here": 2,
    }
    assert [rank["ray"] for rank in found.ranks] == [expected] * 2


@pytest.mark.parametrize(("engine", "kind", "breaker"), BROKEN)
def test_what_breaks_in_one_process_ends_the_other(
    engine: str, kind: str, breaker: int, found: Found
) -> None:
    error, text = {
        "loss": ("NonFiniteError", "the loss is nan"),
        "infinite": ("NonFiniteError", "the loss is inf"),
        "fingerprint": ("MismatchError", "rollout saw tensors of another picture"),
        "media": ("M", "a.png: expected a picture, found none"),
        "rollout": ("RolloutError", "the sampler is gone"),
        "late": ("RolloutError", "the sampler is gone"),
        "checkpoint": ("CheckpointError", "cannot write the checkpoint of step 2"),
    }[kind]
    together = engine == "fsdp2" and error == "NonFiniteError"  # both find it in the gradient norm
    for rank in (0, 1):
        end = found.ranks[rank][f"{engine}-{kind}"]
        assert end.startswith(error) and text in end, end
        assert (f"process {breaker} of 2 stopped: " in end) == (rank != breaker and not together), (
            end
        )
        assert ("the gradient norm is nan" in end) == together and ("GiB free" in end) == (
            kind == "checkpoint"
        ), end
    run = found.two("broken", f"{engine}-{kind}")
    alarms = [(a["step"], a["name"]) for a in read_jsonl(run / "alarms.jsonl")]
    assert alarms == {
        "NonFiniteError": [(1, "non_finite")],
        "CheckpointError": [(1, "checkpoint_failed")],
    }.get(error, [])
    assert json.loads((run / "run.json").read_text())["status"] == "failed"
    assert len(read_jsonl(run / "metrics.jsonl")) == {"checkpoint": 2, "late": 1}.get(kind, 0)
    saved = [path.name for path in run.glob("checkpoints/step_*")]
    assert saved == (["step_000001"] if (engine, kind) == ("ddp", "late") else []), (
        "step 1 was done, and processes with whole weights can save it"
    )


def test_a_refused_command_says_why_and_ends_in_both(found: Found) -> None:
    assert "expected schedule.kind serial in a run of 2 processes, found pipelined" in found.said
    assert "exitcode  : 2" in found.said, "torchrun was told"
