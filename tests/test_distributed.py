"""Two real processes (gloo on 127.0.0.1) make the run of one: same prompts, rewards, counts, gradients and weights."""
from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from mmrl.config import load_config
from mmrl.trainer import Trainer
from tests.engine_kit import (
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

pytestmark = pytest.mark.slow
SIZES = ((112, 84), (56, 56), (84, 112), (168, 56))
# Gradients are summed in another order: equal to rounding, and AdamW's step divides by their size, so that where a
# gradient is ~0 rounding may turn a whole +-lr. Metrics are compared to 2e-4, weights to 2 % of the distance travelled.
CLOSE = {"rel": 2e-4, "abs": 1e-6}


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def launch(launcher: str, *arguments: str, status: int = 0, file_limit: int | None = None,
           program: tuple[str, ...] = ("mmrl.cli.main", "train")) -> str:
    """`mmrl train`, or another program, in two processes; returns what they printed."""
    port = str(free_port())
    head = {"torchrun": ["-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_addr", "127.0.0.1",
                         "--master_port", port, "-m"],
            "accelerate": ["-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2", "--num_machines", "1",
                           "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_ip", "127.0.0.1",
                           "--main_process_port", port, "--num_cpu_threads_per_process", "1", "--module"]}[launcher]
    environment = {**ENVIRONMENT, "GLOO_SOCKET_IFNAME": "lo"}

    def limit() -> None:
        if file_limit is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (file_limit, file_limit))

    process = subprocess.Popen([sys.executable, *head, *program, *arguments], cwd=REPO, env=environment,
                               text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, preexec_fn=limit,
                               start_new_session=True)
    try:
        out, _ = process.communicate(timeout=300)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert (process.returncode == 0) == (status == 0), f"exit status {process.returncode}\n{out}"
    return out


def compare(one: Trainer, other: Path) -> None:
    """Assert that the run folder `other` tells what `one` told."""
    mine = one.folder.path
    rows, others = read_jsonl(mine / "metrics.jsonl"), read_jsonl(other / "metrics.jsonl")
    assert len(rows) == len(others) == one.config.train.steps
    for a, b in zip(rows, others, strict=True):
        assert a.keys() == b.keys()
        for key in a:
            if key.startswith(("time/", "speed/", "memory/", "train/tokens/packed")) or "/logprob_gap/" in key or (
                    key.endswith("/kl_step")):
                continue
            assert b[key] == (pytest.approx(a[key], **CLOSE) if isinstance(a[key], float) else a[key]), key
        assert b["train/logprob_gap/max"] is None or b["train/logprob_gap/max"] < 1e-5
        assert b["train/tokens/packed"] == a["train/tokens/packed"]
    key = ("step", "source", "id", "reason")
    failures, other_failures = (sorted(tuple(str(r[k]) for k in key) for r in read_jsonl(run / "failures.jsonl"))
                                for run in (mine, other))
    assert failures == other_failures
    last = f"checkpoints/step_{one.config.train.steps:06d}"
    final, other_final = dict(weights_of(mine / last)), dict(weights_of(other / last))
    initial = dict(weights_of(Path(one.config.model.path)))
    moved = torch.stack([(final[n] - initial[n]).norm() for n in final]).norm()
    apart = torch.stack([(final[n] - other_final[n]).norm() for n in final]).norm()
    assert moved > 0 and apart < 0.02 * moved, (float(apart), float(moved))
    state, other_state = (json.loads((run / last / "trainer" / "state.json").read_text()) for run in (mine, other))
    assert all(state[k] == other_state[k] for k in ("schedule", "credit", "updates"))


def make(tmp_path: Path, kind: str) -> dict[str, Any]:
    """3 steps. 'mixed' has text-only prompts, a flat source and broken pictures; 'text' has no picture at all."""
    rows = [[] if kind == "text" else [picture(SIZES[(i + k) % 4], i) for k in range(i % 3)] for i in range(12)]
    held = album_data(tmp_path / "data", rows[:5], "held")
    sources = [{"task": ALBUM, "path": album_data(tmp_path / "data", rows)}]
    if kind == "mixed":
        flat = album_data(tmp_path / "data", [[picture((56, 56), i)] for i in range(4)], "flat")
        broken = album_data(tmp_path / "data", [[str(tmp_path / f"missing-{i}.png")] for i in range(3)], "broken")
        sources += [{"task": ALBUM, "path": flat, "params": {"value": 0.0}, "weight": 0.5},
                    {"task": ALBUM, "path": broken, "weight": 0.3}]
    return small_run(tmp_path / "runs", sources[0]["path"], held, data={"train": sources},
                     train={"steps": 3, "prompts_per_step": 5}, optim={"lr": 0.001})


@pytest.mark.parametrize(("launcher", "kind", "section"), [
    ("torchrun", "mixed", {}),
    ("accelerate", "text", {"algorithm": {"aggregate": "sequence_mean", "epochs": 2, "minibatches": 2}}),
    ("torchrun", "mixed", {"train": {"prompts_per_step": 1, "steps": 3}, "algorithm": {"kl": {"coef": 0.05}}}),
    ("torchrun", "mixed", {"algorithm": {"advantage_scale": "ema", "difficulty": "dgrpo"},
                           "data": {"selection": {"kind": "variance", "threshold": 0.01, "rest": 1}}}),
    ("torchrun", "text", {"algorithm": {"aggregation": "gdpo"}}),
], ids=["torchrun, dynamic sampling", "accelerate, text only, minibatches", "one prompt for two processes, kl",
        "ema and selection", "gdpo"])
def test_two_processes_equal_one(launcher: str, kind: str, section: dict[str, Any], tmp_path: Path) -> None:
    tree = merge(make(tmp_path, kind), section)
    config = config_file(tmp_path / "c.yaml", tree)
    one = Trainer(load_config(config))
    one.fit()
    launch(launcher, config, "name=two")
    compare(one, tmp_path / "runs" / "two")
    counts = [
        {k: v for k, v in r.items() if k.startswith("train/groups/")}
        for r in read_jsonl(one.folder.path / "metrics.jsonl")
    ]
    if kind == "mixed" and not section:
        assert sum(c["train/groups/no_signal"] for c in counts) and sum(c["train/groups/failed"] for c in counts), (
            counts
        )
    mine, other = ([r["text"] for r in read_jsonl(tmp_path / "runs" / run / "eval/step_000000/predictions.jsonl")]
                   for run in ("run", "two"))
    assert mine == other, "evaluation covers every sample once, in order"


def test_a_failed_checkpoint_of_the_main_process_does_not_hang_the_others(tmp_path: Path) -> None:
    config = config_file(tmp_path / "c.yaml", make(tmp_path, "text"))
    out = launch("torchrun", config, "train.steps=2", status=1, file_limit=250_000)
    assert "cannot write the checkpoint of step 2" in out and "GiB free" in out
    run = tmp_path / "runs" / "run"
    assert [a["name"] for a in read_jsonl(run / "alarms.jsonl")] == ["checkpoint_failed"]
    assert [r["step"] for r in read_jsonl(run / "metrics.jsonl")] == [1, 2]


def test_resume_in_two_processes(tmp_path: Path) -> None:
    config = config_file(tmp_path / "c.yaml", make(tmp_path, "mixed"))
    one = Trainer(load_config(config))
    one.fit()
    launch("torchrun", config, "name=two", "train.keep_last=9")
    run = tmp_path / "runs" / "two"
    shutil.rmtree(run / "checkpoints" / "step_000003")
    launch("torchrun", config, "name=two", "train.keep_last=9", "--resume")
    compare(one, run)


def test_what_breaks_in_one_process_ends_the_other(tmp_path: Path) -> None:
    """Under ddp each waits for the other between two steps, under fsdp2 in every forward and backward as well."""
    jobs = [("ddp", "loss"), ("ddp", "fingerprint"), ("fsdp2", "loss"), ("fsdp2", "infinite"), ("fsdp2", "fingerprint"),
            ("fsdp2", "media"), ("fsdp2", "rollout")]
    config = config_file(tmp_path / "c.yaml", merge(make(tmp_path, "mixed"), {"eval": {"every": 0}, "data": {"eval": []}}))
    out = launch("torchrun", config, json.dumps(jobs), program=("tests.stopping_worker",))
    said = [json.loads(line.removeprefix("ended ")) for line in out.splitlines() if line.startswith("ended ")]
    found = {(engine, kind, rank): text for engine, kind, rank, text in said}
    assert len(found) == 2 * len(jobs), out
    expected = {"loss": ("NonFiniteError", "the loss is nan"), "infinite": ("NonFiniteError", "the loss is inf"),
                "fingerprint": ("MismatchError", "rollout saw tensors of another picture"),
                "media": ("M", "a.png: expected a picture, found none"), "rollout": ("RolloutError", "the sampler is gone")}
    for engine, kind in jobs:
        error, text = expected[kind]
        together = engine == "fsdp2" and error == "NonFiniteError"  # both find it in the gradient norm
        for rank in (0, 1):
            end = found[engine, kind, rank]
            assert end.startswith(error) and text in end, (engine, kind, rank, end)
            assert ("process 1 of 2 stopped: " in end) == (rank == 0 and not together), (engine, kind, rank, end)
            assert ("the gradient norm is nan" in end) == together
        run = tmp_path / "runs" / f"{engine}-{kind}"
        alarms = [(a["step"], a["name"]) for a in read_jsonl(run / "alarms.jsonl")]
        assert alarms == ([(1, "non_finite")] if error == "NonFiniteError" else []), (engine, kind)
        assert json.loads((run / "run.json").read_text())["status"] == "failed"
