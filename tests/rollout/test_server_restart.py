"""Rollout servers that are killed or started again between and within syncs: real processes and HTTP, around a backend that keeps
sums of what it was given in place of vLLM's minute of start-up (tests/rollout/test_vllm_servers.py has vLLM itself)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from mmrl.config import VLLMConfig
from mmrl.errors import ConfigError, RolloutError
from mmrl.rollout.vllm_client import ServerGone, VLLMClient
from mmrl.rollout.vllm_servers import VLLMServers
from mmrl.rollout.weight_transfer import Channel
from tests.kits.engine_kit import ENVIRONMENT, REPO
from tests.rollout.vllm_kit import free_port

pytestmark = pytest.mark.slow

_SERVER = """
import socket, sys
from types import SimpleNamespace
from mmrl.rollout.vllm_server import RolloutServer, serve

class Sums:
    settings = SimpleNamespace(model="model", dtype="float32", max_model_len=8)
    held = {}

    def load(self, weights):
        self.held.update((name, int(tensor.sum())) for name, tensor in weights)
        return [dict(self.held)]

    def close(self):
        pass

serve(RolloutServer(Sums()), socket.create_server(("127.0.0.1", int(sys.argv[1]))), lambda: None)
"""


class Servers:
    """Two servers, which a test may kill and start again."""

    def __init__(self) -> None:
        self.ports = [free_port(), free_port()]
        self.processes = [self.started(n) for n in range(2)]

    def started(self, number: int) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", _SERVER, str(self.ports[number])]
        return subprocess.Popen(command, cwd=REPO, env=ENVIRONMENT)

    def kill(self, number: int) -> None:
        self.processes[number].send_signal(signal.SIGKILL)
        self.processes[number].wait(60)

    def settings(self, *numbers: int, **options: Any) -> VLLMConfig:
        urls = [f"http://127.0.0.1:{self.ports[n]}" for n in numbers]
        return VLLMConfig(mode="server", url=urls, start_s=60, timeout_s=60, **options)

    def again(self, number: int) -> VLLMClient:
        """Kill and start one; a client of another run, once it answers."""
        self.kill(number)
        self.processes[number] = self.started(number)
        return VLLMClient(self.settings(number), "model", "float32")


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Servers]:
    monkeypatch.delenv("MMRL_API_KEY", raising=False)
    made = Servers()
    yield made
    for number in range(2):
        made.kill(number)


def group(**values: float) -> list[tuple[str, torch.Tensor]]:
    return [(name, torch.tensor([float(value)])) for name, value in values.items()]


def test_one_started_again_between_two_syncs_is_left_out_until_the_next(servers: Servers) -> None:
    both = VLLMServers(servers.settings(0, 1), "model", "float32")
    assert both.load(group(a=1, b=2)) == [{"a": 1, "b": 2}] * 2
    servers.again(1)
    assert both.load(group(b=3)) == [{"a": 1, "b": 3}], "the other one goes on"
    assert both.counts["up"] == 1 and both.dropped and not both.dropped
    assert both.load(group(a=1, b=4)) == [{"a": 1, "b": 4}] * 2 and both.counts["up"] == 2
    servers.again(0)
    servers.again(1)
    with pytest.raises(RolloutError, match=r"gone \(.*has no weights: it was started again"):
        both.load(group(b=5))
    both.close()


def test_one_that_takes_shorter_prompts_is_refused_when_the_run_starts(servers: Servers) -> None:
    VLLMServers(servers.settings(0, 1), "model", "float32", longest=8).close()
    with pytest.raises(
        ConfigError, match=rf":{servers.ports[0]} .* of 9 tokens, found .*max_model_len 8; start it"
    ):
        VLLMServers(servers.settings(0, 1), "model", "float32", longest=9)


def test_one_killed_in_a_broadcast_is_gone_in_a_sentence(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = VLLMClient(servers.settings(0, transfer="gloo"), "model", "float32")
    assert client.load(group(a=1)) == [{"a": 1}] and client.transfer.kind == "gloo"
    send = Channel.send

    def killing(self: Channel, layout: Any, pieces: Any) -> None:
        os.kill(servers.processes[0].pid, signal.SIGKILL)
        servers.processes[0].wait(60)
        send(self, layout, pieces)

    monkeypatch.setattr(Channel, "send", killing)
    with pytest.raises(ServerGone, match=f"127.0.0.1:{servers.ports[0]} .*then resume the run"):
        client.load([("a", torch.ones(1 << 22))])
    assert client.transfer is None, "the group is left"
