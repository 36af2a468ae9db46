"""What a user is told who asks for DeepSpeed where it cannot work."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from mmrl.config import load_config
from mmrl.distributed.engines import accelerator_options, train_engine_name
from mmrl.distributed.engines.deepspeed import deepspeed_settings
from mmrl.errors import ConfigError, MissingExtraError
from tests.kits.engine_kit import album_data, config_file, small_run

LAUNCHER = {
    "RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_RANK": "0",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "1",
}


def config_of(tmp_path: Path, **engine: Any) -> Any:
    tree = small_run(
        tmp_path, album_data(tmp_path, [[]]), engine={"train": "deepspeed_zero3", **engine}
    )
    return load_config(config_file(tmp_path / "c.yaml", tree))


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name, value in LAUNCHER.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)
    return monkeypatch


def test_the_missing_package_is_named(tmp_path: Path, launched: pytest.MonkeyPatch) -> None:
    launched.setitem(sys.modules, "deepspeed", None)
    launched.setenv("DS_ACCELERATOR", "cpu")  # put back afterwards
    with pytest.raises(
        MissingExtraError,
        match=r"deepspeed_zero2 and deepspeed_zero3 need the deepspeed package: "
        r"pip install -e '.*\[deepspeed\]'",
    ):
        accelerator_options(config_of(tmp_path))


def test_without_a_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    with pytest.raises(
        ConfigError,
        match=r"engine.train deepspeed_zero3 to be started by a launcher, found none; start it with "
        "torchrun --nproc_per_node",
    ):
        accelerator_options(config_of(tmp_path))


def test_a_launcher_that_leaves_deepspeed_out(tmp_path: Path, launched: pytest.MonkeyPatch) -> None:
    launched.setenv("ACCELERATE_USE_CPU", "True")
    with pytest.raises(
        ConfigError,
        match=r"expected .* started by torchrun, found accelerate launch --cpu .*with torchrun",
    ):
        accelerator_options(config_of(tmp_path))


def test_the_cpu_of_a_machine_with_gpus(tmp_path: Path, launched: pytest.MonkeyPatch) -> None:
    launched.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(
        ConfigError,
        match=r"expected model.device cuda or null .* found cpu: .* CUDA_VISIBLE_DEVICES=",
    ):
        accelerator_options(config_of(tmp_path))


def test_what_does_not_go_together(tmp_path: Path) -> None:
    with pytest.raises(
        (ConfigError, ValidationError),
        match="offload all moves parameters, which deepspeed_zero2 keeps whole",
    ):
        config_of(tmp_path, train="deepspeed_zero2", deepspeed={"offload": "all"})
    pipelined = config_of(tmp_path)
    pipelined = pipelined.model_copy(
        update={"schedule": pipelined.schedule.model_copy(update={"kind": "pipelined"})}
    )
    with pytest.raises(
        ConfigError,
        match=r"expected schedule.kind serial with engine.train deepspeed_zero3, found pipelined",
    ):
        train_engine_name(pipelined, 1)


@pytest.mark.parametrize(
    ("offload", "keys"),
    [
        ("none", set()),
        ("optimizer", {"offload_optimizer"}),
        ("all", {"offload_optimizer", "offload_param"}),
    ],
)
def test_offload(offload: str, keys: set[str], tmp_path: Path) -> None:
    config = config_of(tmp_path, deepspeed={"offload": offload})
    zero = deepspeed_settings(config)["zero_optimization"]
    assert {key for key in zero if key.startswith("offload")} == keys and zero["stage"] == 3
    assert all(zero[key]["device"] == "cpu" for key in keys)
