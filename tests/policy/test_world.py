"""Devices and time limits of a run's processes: the GPU asked for is the one used, and waiting for rank 0 is allowed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mmrl.distributed import world
from mmrl.distributed.world import World
from mmrl.errors import ConfigError
from tests.kits.engine_kit import ENVIRONMENT, REPO
from tests.kits.prepared_kit import run_prepared

MEETING = {"RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
_PRINT_TIMEOUT = """
import torch
from mmrl.distributed.world import World
world = World(torch.device("cpu"))
group = torch.distributed.distributed_c10d._get_default_group()
print(world.size, group._get_backend(torch.device("cpu")).options._timeout.total_seconds())
world.close()
"""


def test_two_gpus_are_told_apart_by_their_index(monkeypatch: pytest.MonkeyPatch) -> None:
    happened: list[Any] = []
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", happened.append)
    alone = SimpleNamespace(num_processes=1, device=torch.device("cuda"))
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr(
        world, "Accelerator", lambda **options: happened.append("accelerator") or alone
    )
    World(torch.device("cuda:1"))
    assert happened == [torch.device("cuda:1"), "accelerator"], (
        "accelerate takes the GPU that is current when it starts"
    )
    happened.clear()
    for free in ("cuda", "cpu"):
        World(torch.device(free))
    World(None)
    launched = {**MEETING, "WORLD_SIZE": "1"}  # accelerate gives each process its own GPU
    for name, value in launched.items():
        monkeypatch.setenv(name, value)
    World(torch.device("cuda:1"))
    assert happened == ["accelerator"] * 4
    for name in launched:
        monkeypatch.delenv(name)
    with pytest.raises(ConfigError, match=r"model\.device .* of the 2 GPUs.*'cuda:2'"):
        World(torch.device("cuda:2"))


@pytest.mark.slow
@pytest.mark.parametrize("device", ["None", "torch.device('cpu')"])
def test_launched_processes_are_one_run(device: str, tmp_path: Path) -> None:
    """Also where no device is named and there is no GPU: accelerate itself makes each a run of its own then."""
    file = tmp_path / "join.py"
    # each process tells in a file of its own: two that print at once may write into one line
    file.write_text(
        f"import os, pathlib, torch; from mmrl.distributed.world import World; w = World({device}); "
        "ranks = w.gather([w.rank]); "
        "pathlib.Path(__file__).with_name('told' + os.environ['RANK']).write_text(str(ranks)); w.close()"
    )
    environment = {**ENVIRONMENT, "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc_per_node=2",
            str(file),
        ],
        cwd=REPO,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    told = [path.read_text() for path in sorted(tmp_path.glob("told*"))]
    assert told == ["[0, 1]"] * 2, done.stderr


def test_processes_that_do_not_join_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = SimpleNamespace(num_processes=1, device=torch.device("cpu"))
    monkeypatch.setattr(world, "Accelerator", lambda **options: alone)
    for name, value in {**MEETING, "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(
        ConfigError,
        match=r"expected a run of 2 processes, .* found that they do not join: 1 on cpu",
    ):
        World(None)


@pytest.mark.gpu
def test_the_last_gpu_is_used_when_asked_for() -> None:
    last = torch.cuda.device_count() - 1
    code = (
        "import torch; from mmrl.distributed.world import World; "
        f"print(torch.empty(1, device=World(torch.device('cuda:{last}')).device).device)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=REPO,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout.strip() == f"cuda:{last}", done.stderr


@pytest.mark.slow
def test_processes_wait_two_hours_for_each_other() -> None:
    environment = {**ENVIRONMENT, **MEETING, "WORLD_SIZE": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = run_prepared([sys.executable, "-c", _PRINT_TIMEOUT], env=environment)
    assert done.stdout.split() == ["1", "7200.0"], done.stderr
