"""A rollout server whose engine is spread over two processes: the trainer's log-probs, one process lost."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from mmrl.config import VLLMConfig, load_config
from mmrl.distributed.world import World
from mmrl.errors import ConfigError, RolloutError
from mmrl.rollout.vllm_client import VLLMClient
from mmrl.rollout.vllm_engine import VLLMEngine
from tests.kits.clip_kit import loaded, policy_of
from tests.kits.engine_kit import tiny_folder
from tests.rollout.vllm_kit import (
    KEY,
    PATIENCE_S,
    VLLM,
    asked_of,
    free_port,
    sampled_logps,
    samples_of,
    settings_of,
    start_server,
    trainer_logps,
    training_of,
)


@pytest.mark.slow
def test_an_engine_over_two_processes_answers_with_the_trainers_logps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MMRL_API_KEY", KEY)
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    options: dict[str, Any] = {"mode": "server", "url": url, "tensor_parallel": 2}
    options |= {"compare_weights": False, "start_s": PATIENCE_S, "timeout_s": PATIENCE_S}
    told = [
        f"engine.vllm.{key}={value}".replace("False", "false") for key, value in options.items()
    ]
    process = start_server(tmp_path, port, *told)
    try:
        settings = VLLMConfig(**VLLM, **options)
        client = VLLMClient(settings, tiny_folder(), "float32")
        children = psutil.Process(process.pid).children()
        parts = [child for child in children if "rollout-server" in child.cmdline()]
        assert len(parts) == 1
        policy, world = policy_of(), World(torch.device("cpu"))
        training = training_of(policy, world, tmp_path)
        sources = [loaded(*samples_of(tmp_path))]
        engine = VLLMEngine(settings, policy, policy, world, client, sources)
        asked = asked_of(policy, tmp_path)
        for _ in range(2):  # all weights, then those that change
            assert engine.publish(training)["train/sync/gap_max"] < 1e-5
            groups = engine.generate(asked, settings_of())
            gap = (trainer_logps(policy, asked, groups) - sampled_logps(groups)).abs()
            assert len(gap) > 60 and gap.max() < 1e-5
        os.kill(parts[0].pid, signal.SIGKILL)
        assert process.wait(60) == 1, "half an engine does not stay"
        with pytest.raises(RolloutError, match="is gone"):
            engine.generate(asked, settings_of())
        assert "process 1 of 2 of the engine ended" in (tmp_path / "server.log").read_text()
    finally:
        for each in (
            [*psutil.Process(process.pid).children(), process] if process.poll() is None else []
        ):
            each.kill()


def test_what_an_engine_over_several_gpus_cannot_be_is_refused() -> None:
    wide = "engine.vllm.tensor_parallel=2"
    with pytest.raises(ConfigError, match=r"tensor_parallel 2 needs engine\.vllm\.mode: server"):
        load_config(None, [wide])
    served = [wide, "engine.vllm.mode=server", "engine.vllm.url=http://there:1"]
    with pytest.raises(ConfigError, match=r"needs engine\.vllm\.compare_weights: false"):
        load_config(None, served)
    assert load_config(None, [*served, "engine.vllm.compare_weights=false"])
