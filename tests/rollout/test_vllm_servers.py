"""Two rollout servers as processes of their own: shares in order, one killed in the middle and back, both gone."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mmrl.config import VLLMConfig, load_config
from mmrl.errors import ConfigError, RolloutError
from mmrl.training.trainer import Trainer
from tests.kits.engine_kit import config_file, read_jsonl
from tests.rollout.vllm_kit import KEY, PATIENCE_S, VLLM, free_port, run_tree, start_server

pytestmark = pytest.mark.slow


class Servers:
    """Two servers, which a test may kill and start again."""

    def __init__(self, folder: Path) -> None:
        self.ports = [free_port(), free_port()]
        self.folders = [folder / str(n) for n in range(2)]
        self.processes: list[subprocess.Popen[str] | None] = [None, None]
        for each in self.folders:
            each.mkdir()

    def start(self, number: int) -> None:
        self.processes[number] = start_server(self.folders[number], self.ports[number])

    def kill(self, number: int) -> None:
        process, self.processes[number] = self.processes[number], None
        if process is not None:
            os.kill(process.pid, signal.SIGKILL)
            process.wait(60)

    @property
    def urls(self) -> list[str]:
        return [f"http://127.0.0.1:{port}" for port in self.ports]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """One pair for the file: a start takes ten seconds of the processor."""
    made = Servers(tmp_path_factory.mktemp("servers"))
    yield made
    for number in range(2):
        made.kill(number)


@pytest.fixture
def servers(pair: Servers, monkeypatch: pytest.MonkeyPatch) -> Servers:
    """Both of them, started where they are not there: a server serves one run after the other."""
    monkeypatch.setenv("MMRL_API_KEY", KEY)
    for number, process in enumerate(pair.processes):
        if process is None:
            pair.start(number)
    return pair


def trained(folder: Path, name: str, urls: list[str], hear: Any = None) -> list[dict[str, Any]]:
    """Rows of a run of four steps on these servers."""
    vllm = {**VLLM, "mode": "server", "start_s": PATIENCE_S, "timeout_s": PATIENCE_S}
    tree = run_tree(
        folder,
        name=name,
        engine={"rollout": "auto", "vllm": {**vllm, "url": urls}},
        train={"steps": 4, "prompts_per_step": 4},
    )
    trainer = Trainer(load_config(config_file(folder / f"{name}.yaml", tree)))
    trainer.on_event = lambda kind, payload: hear and hear(trainer, kind, payload)
    try:
        trainer.fit()
    finally:
        rows = read_jsonl(trainer.folder.path / "metrics.jsonl")
    return rows


def test_a_run_goes_on_without_a_server_and_takes_it_back(servers: Servers, tmp_path: Path) -> None:
    answered: list[list[int]] = []

    def watch(trainer: Trainer) -> None:
        """Note how many prompts each server is asked."""
        for number, client in enumerate(trainer.rollouts.engine.backend._clients):
            ask = client.generate

            def noted(asked: Any, ask: Any = ask, number: int = number) -> Any:
                answered[-1][number] += len(asked)
                process = servers.processes[1]
                if process is not None and len(answered) == 3 and number == 1:
                    os.kill(process.pid, signal.SIGSTOP)  # the question lies there, and is lost
                    threading.Timer(2, servers.kill, [1]).start()
                return ask(asked)

            client.generate = noted

    def hear(trainer: Trainer, kind: str, payload: Any) -> None:
        if kind == "start":
            watch(trainer)
            answered.append([0, 0])
        if kind == "step":
            answered.append([0, 0])
            if payload["step"] == 3:
                servers.start(1)
                while not trainer.rollouts.engine.backend._clients[1].answers():
                    assert servers.processes[1] is not None and servers.processes[1].poll() is None

    rows = trained(tmp_path, "two", servers.urls, hear)
    alone = trained(tmp_path, "one", servers.urls[:1])
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    for row, other in zip(rows, alone, strict=True):
        for name in ("train/reward/mean", "train/loss", "train/grad_norm", "eval/greedy/reward"):
            assert row[name] == pytest.approx(other[name], abs=1e-5), (row["step"], name)
        assert row["train/sync/gap_max"] < 1e-5 and row["train/logprob_gap/max"] < 1e-5
    shares = [row["train/rollout_servers/up"] for row in rows]
    assert shares == [2, 2, 1, 2], (shares, answered)
    assert [row["train/rollout_servers/reasked"] > 0 for row in rows] == [False, False, True, False]
    assert all(min(answered[n]) > 0 for n in (0, 1, 3)), "each has its share, also once it is back"


def test_without_any_server_the_run_ends_and_says_so(servers: Servers, tmp_path: Path) -> None:
    def hear(trainer: Trainer, kind: str, payload: Any) -> None:
        if kind == "step" and payload["step"] == 1:
            servers.kill(0)
            servers.kill(1)

    with pytest.raises(RolloutError, match=r"all 2 rollout servers are gone .*resume the run"):
        trained(tmp_path, "none", servers.urls, hear)


def test_a_list_of_servers_is_checked() -> None:
    assert VLLMConfig(mode="server", url="http://a:1").urls == ["http://a:1"]
    for url, words in (([], "needs engine.vllm.url"), (["http://a:1"] * 2, "each server once")):
        with pytest.raises(ConfigError, match=words):
            load_config(None, ["engine.vllm.mode=server", f"engine.vllm.url={url}"])
