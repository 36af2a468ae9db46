"""What a run speaks to is looked for before its weights are read: the port of its metrics, its Ray cluster, its rollout servers."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from mmrl.config import OperationsConfig, load_config
from mmrl.errors import ConfigError, MissingExtraError, RolloutError
from mmrl.operations.prometheus import check_metrics_port, metrics_endpoint
from mmrl.training.preflight import check_servers
from mmrl.training.trainer import Trainer
from tests.kits.engine_kit import (
    ENVIRONMENT,
    REPO,
    album_data,
    config_file,
    picture,
    small_run,
)
from tests.kits.launch_kit import run_here
from tests.kits.ray_kit import nodes


@contextmanager
def listening() -> Iterator[int]:
    """A port that somebody else listens at, and says nothing."""
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        yield server.getsockname()[1]


def closed() -> int:
    """A port that nobody listens at."""
    with listening() as port:
        return port


@contextmanager
def answering(body: bytes, status: int = 200) -> Iterator[str]:
    """The address of an HTTP server that answers every GET with `body`."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Nothing to the terminal."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def tree_of(folder: Path, **sections: Any) -> dict[str, Any]:
    data = album_data(folder / "data", [[picture((56, 56), i)] for i in range(2)])
    tree = small_run(folder / "runs", data, data, **sections)
    return {**tree, "train": {**tree["train"], "steps": 1, "prompts_per_step": 2}}


def config_of(folder: Path, **sections: Any) -> Any:
    return load_config(config_file(folder / "run.yaml", tree_of(folder, **sections)))


@pytest.fixture
def unread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights must not be read."""
    monkeypatch.setattr(
        "transformers.AutoModelForImageTextToText.from_pretrained",
        lambda *a, **k: pytest.fail("read weights"),
    )


# metrics


def test_a_port_of_metrics_that_is_taken_is_said_before_weights_are_read(
    tmp_path: Path, unread: None
) -> None:
    with listening() as port:
        with pytest.raises(
            ConfigError,
            match=rf"expected to serve metrics at 127\.0\.0\.1:{port}, found .*in use.*0 takes a free one",
        ):
            Trainer(config_of(tmp_path, operations={"metrics_port": port}))
        assert not (tmp_path / "runs" / "run").exists()
    with pytest.raises(ConfigError, match=r"198\.51\.100\.1:9100, found that this cannot be done"):
        check_metrics_port(OperationsConfig(metrics_port=9100, metrics_host="198.51.100.1"))
    for free in (None, 0):
        check_metrics_port(OperationsConfig(metrics_port=free))


def test_a_port_that_an_ended_run_has_left_is_free(tmp_path: Path) -> None:
    """Its last connections are still closing; the endpoint takes the port, and so must the check."""
    settings = OperationsConfig(metrics_port=closed())
    for _ in range(2):
        check_metrics_port(settings)
        with metrics_endpoint(settings, "r", 0, lambda kind, payload: None):
            address = ("127.0.0.1", settings.metrics_port or 0)
            with socket.create_connection(address, timeout=10) as client:
                client.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
                while client.recv(65536):
                    """The server ends first, and keeps the connection for a while."""
            with pytest.raises(ConfigError, match="in use"):
                check_metrics_port(settings)


# Ray


def test_a_ray_cluster_that_does_not_answer_is_said_before_weights_are_read(
    tmp_path: Path, unread: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = f"127.0.0.1:{closed()}"
    began = time.monotonic()
    ray = {"workers": "ray", "ray": {"address": address}}
    with pytest.raises(
        ConfigError,
        match=rf"expected a Ray cluster at engine\.ray\.address {address}, found none: .*`ray start --head`",
    ):
        Trainer(config_of(tmp_path, engine=ray, reward={"workers": 1}))
    assert time.monotonic() - began < 60
    assert not (tmp_path / "runs" / "run").exists()
    # auto is what RAY_ADDRESS names
    monkeypatch.setenv("RAY_ADDRESS", address)
    auto = {"workers": "ray", "ray": {"address": "auto"}}
    with pytest.raises(ConfigError, match=r"engine\.ray\.address auto, which means .*found none"):
        Trainer(config_of(tmp_path, engine=auto, reward={"workers": 1}))


@pytest.mark.slow
def test_a_ray_cluster_that_answers_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with nodes(2) as yours:
        host, _, port = yours.address.rpartition(":")
        for address, named in ((f"{host}:{port}", ""), ("auto", yours.address)):
            if named:
                monkeypatch.setenv("RAY_ADDRESS", named)
            engine = {"workers": "ray", "ray": {"address": address}}
            folder = tmp_path / ("auto" if named else "named")
            Trainer(config_of(folder, engine=engine, reward={"workers": 1})).fit()
            info = json.loads((folder / "runs" / "run" / "run.json").read_text())
            assert info["status"] == "finished"


# rollout servers


def served(url: str, **options: Any) -> dict[str, Any]:
    return {"rollout": "vllm", "vllm": {"mode": "server", "url": url, **options}}


def test_a_rollout_server_that_is_not_there_is_said_before_weights_are_read(
    tmp_path: Path, unread: None, caplog: pytest.LogCaptureFixture
) -> None:
    url = f"http://127.0.0.1:{closed()}"
    with pytest.raises(
        RolloutError,
        match=r"no rollout server answers at .* after engine\.vllm\.start_s = 1 s .*mmrl rollout-server",
    ):
        Trainer(config_of(tmp_path, engine=served(url, start_s=1)))
    assert f"no rollout server answers at {url} yet" in caplog.text, "who waits is told at once"
    assert not (tmp_path / "runs" / "run" / "metrics.jsonl").exists()


@pytest.mark.parametrize(
    ("body", "status"),
    [(b"", 200), (b'{"status": "ok"}', 200), (b"[]", 200), (b"not here", 404)],
)
def test_another_program_at_the_address_is_no_rollout_server(
    body: bytes, status: int, tmp_path: Path, unread: None
) -> None:
    """vLLM's own server says nothing at /health: `found["dtype"]` was a KeyError, after the weights."""
    with (
        answering(body, status) as url,
        pytest.raises(
            ConfigError,
            match=rf"expected a rollout server at {url}, found another program: .*status {status}.*`mmrl rollout-server`",
        ),
    ):
        Trainer(config_of(tmp_path, engine=served(url)))


@pytest.mark.slow
def test_a_port_that_says_nothing_is_not_waited_for_longer_than_a_server(
    tmp_path: Path, unread: None
) -> None:
    """engine.vllm.timeout_s, half an hour, was the time for the first word."""
    began = time.monotonic()
    with (
        listening() as port,
        pytest.raises(RolloutError, match=r"no rollout server answers at .*timed out"),
    ):
        Trainer(config_of(tmp_path, engine=served(f"http://127.0.0.1:{port}", start_s=1)))
    assert time.monotonic() - began < 60


_SERVER = """
import socket, sys
from types import SimpleNamespace
from mmrl.rollout.vllm_server import RolloutServer, serve

class Idle:
    settings = SimpleNamespace(model=sys.argv[2], dtype="float32", max_model_len=8)

    def close(self):
        pass

serve(RolloutServer(Idle(), api_key="right"), socket.create_server(("127.0.0.1", int(sys.argv[1]))), lambda: None)
"""


@pytest.mark.slow
def test_a_server_that_starts_beside_the_run_is_waited_for_and_asked_for_model_and_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = closed()
    url = f"http://127.0.0.1:{port}"
    config = config_of(tmp_path, engine=served(url, start_s=120))
    monkeypatch.setenv("MMRL_API_KEY", "right")
    process = subprocess.Popen(
        [sys.executable, "-c", _SERVER, str(port), config.model.path], cwd=REPO, env=ENVIRONMENT
    )
    try:
        check_servers(config)  # it is not listening yet
        for key, found in (("wrong", "found another one"), ("", "found none")):
            monkeypatch.setenv("MMRL_API_KEY", key)
            with pytest.raises(ConfigError, match=rf"expected the key of .*MMRL_API_KEY, {found}"):
                check_servers(config)
        monkeypatch.setenv("MMRL_API_KEY", "right")
        other = config.model_copy(
            update={"model": config.model.model_copy(update={"path": "/elsewhere"})}
        )
        with pytest.raises(ConfigError, match="hold the model /elsewhere"):
            check_servers(other)
    finally:
        process.kill()
        process.wait(60)


# commands


@pytest.mark.slow
def test_a_trial_looks_for_servers_and_only_warns_of_the_port_that_it_does_not_take(
    tmp_path: Path,
) -> None:
    url = f"http://127.0.0.1:{closed()}"
    with listening() as port:
        file = config_file(
            tmp_path / "run.yaml", tree_of(tmp_path, operations={"metrics_port": port})
        )
        out = f"--out={tmp_path / 'trial'}"
        tried = run_here("mmrl.cli.main", "try", str(file), out, "--prompts=2", "--samples=2")
        assert tried.returncode in (0, 1), tried.stderr  # 1: the model of the test learns nothing
        assert f"expected to serve metrics at 127.0.0.1:{port}" in tried.stderr
    overrides = [
        "engine.rollout=vllm",
        "engine.vllm.mode=server",
        f"engine.vllm.url={url}",
        "engine.vllm.start_s=1",
    ]
    refused = run_here("mmrl.cli.main", "try", str(file), out, *overrides)
    assert refused.returncode == 2 and "no rollout server answers" in refused.stderr


def test_what_fine_tuning_needs_is_looked_for_before_data_and_weights_are_read(
    tmp_path: Path, unread: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    import importlib.util

    from mmrl.training.sft import supervised_source, supervised_world

    real = importlib.util.find_spec
    tree = tree_of(tmp_path, optim={"states": "int8"})
    config = load_config(config_file(tmp_path / "run.yaml", tree))
    data = tmp_path / "data"
    for path in data.rglob("*.jsonl"):
        path.unlink()  # what is missing is said first
    world = supervised_world(config)
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *rest: None if name == "torchao" else real(name, *rest),
    )
    with pytest.raises(
        MissingExtraError, match=r"package torchao for optim\.states int8, found none"
    ):
        supervised_source(config, world)
    monkeypatch.undo()
    with pytest.raises(Exception, match="expected data at"):
        supervised_source(config, world)
    empty = tmp_path / "model"
    empty.mkdir()
    tree["model"] = {**tree["model"], "path": str(empty)}
    with pytest.raises(ConfigError, match=r"expected model\.path to be a folder with config\.json"):
        supervised_source(load_config(config_file(tmp_path / "run.yaml", tree)), world)
