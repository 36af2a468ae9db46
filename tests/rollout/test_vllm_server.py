"""A rollout server as a process of its own: a run that samples there, what is sent to it, and what is said when it goes away."""

from __future__ import annotations

import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from mmrl.config import VLLMConfig, load_config
from mmrl.distributed.world import World
from mmrl.errors import ConfigError, RolloutError
from mmrl.rollout import Request, weight_sender
from mmrl.rollout.vllm_client import VLLMClient
from mmrl.rollout.vllm_engine import VLLMEngine
from mmrl.rollout.vllm_wire import dump
from mmrl.rollout.weight_transfer import Segment
from mmrl.training.trainer import Trainer
from tests.kits.clip_kit import loaded, policy_of
from tests.kits.engine_kit import config_file, read_jsonl, tiny_folder
from tests.kits.launch_kit import run_here
from tests.rollout.vllm_kit import (
    KEY,
    PATIENCE_S,
    VLLM,
    asked_of,
    free_port,
    run_tree,
    sampled_logps,
    samples_of,
    settings_of,
    start_server,
    trainer_logps,
    training_of,
)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[str, subprocess.Popen[str], Path]]:
    """The address of a server, its process and its folder."""
    folder, port = tmp_path_factory.mktemp("server"), free_port()
    process = start_server(folder, port)
    try:
        yield f"http://127.0.0.1:{port}", process, folder
    finally:
        process.kill()
        process.wait(60)


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MMRL_API_KEY", KEY)


def client_of(url: str, **options: Any) -> VLLMClient:
    settings = VLLMConfig(
        mode="server", url=url, start_s=PATIENCE_S, timeout_s=PATIENCE_S, **options
    )
    return VLLMClient(settings, tiny_folder(), "float32")


def test_a_server_answers_with_the_trainers_logps(
    server: tuple[str, Any, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = client_of(server[0])
    policy = policy_of()
    world = World(torch.device("cpu"))
    training = training_of(policy, world, tmp_path)
    engine = VLLMEngine(
        VLLMConfig(**VLLM), policy, policy, world, client, [loaded(*samples_of(tmp_path))]
    )
    asked = asked_of(policy, tmp_path)
    with pytest.raises(RolloutError, match="has no weights"):
        engine.generate(asked, settings_of())
    assert engine.publish(training)["train/sync/gap_max"] < 1e-5
    bodies: list[int] = []
    once = client._once
    monkeypatch.setattr(
        client,
        "_once",
        lambda method, path, body: (bodies.append(len(body)), once(method, path, body))[1],
    )
    first = engine.generate(asked, settings_of())
    assert (trainer_logps(policy, asked, first) - sampled_logps(first)).abs().max() < 1e-5
    again = engine.generate(asked, settings_of())
    assert [[c.token_ids for c in g] for g in again] == [[c.token_ids for c in g] for g in first]
    assert bodies[-2] < bodies[-1] / 50, (
        "hashes alone, then all, for the small store had forgotten some"
    )
    small = [Request(r.prompt, 1, r.key) for r in asked[:1]]
    engine.generate(small, settings_of())
    del bodies[:]
    engine.generate(small, settings_of())
    assert len(bodies) == 1 and bodies[0] < asked[0].prompt.visuals[0].tokens * 4 * 1176, (
        "one question, without its picture"
    )


def published(url: str, folder: Path, **options: Any) -> tuple[VLLMEngine, Any]:
    """An engine with a client of its own, its weights on the server, and their training engine."""
    policy, world = policy_of(), World(torch.device("cpu"))
    training = training_of(policy, world, folder)
    client = client_of(url, **options)
    engine = VLLMEngine(
        VLLMConfig(**VLLM), policy, policy, world, client, [loaded(*samples_of(folder))]
    )
    engine.publish(training)
    return engine, training


@pytest.mark.parametrize(
    ("asked", "taken"),
    [
        ("auto", "shared_memory"),
        ("gloo", "gloo"),
        ("http", "http"),
    ],
)
def test_weights_arrive_by_every_way(
    server: tuple[str, Any, Path],
    asked: str,
    taken: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(weight_sender, "_CHUNK_BYTES", 100_000)  # many pieces, in one place
    segments: list[Any] = []
    make = Segment.make
    monkeypatch.setattr(
        Segment, "make", lambda size: (segments.append(make(size)), segments[-1])[1]
    )
    engine, training = published(server[0], tmp_path, transfer=asked)
    client: Any = engine.backend
    sent: list[int] = []
    once = client._once
    monkeypatch.setattr(
        client,
        "_once",
        lambda method, path, body: (
            sent.append(len(body)) if path == "/weights" else None,
            once(method, path, body),
        )[1],
    )
    engine._sent = False
    row = engine.publish(training)  # with the digests of all that vLLM holds, to the last bit
    assert row["train/sync/gap_max"] < 1e-5 and client.transfer.kind == taken
    size = sum(p.numel() * 4 for p in engine.policy.model.parameters())
    assert len(sent) > 5 and (sum(sent) > size if taken == "http" else sum(sent) < size / 10)
    # after a sync that broke off in the middle a way is opened anew
    with pytest.raises(RolloutError, match="vLLM did not take over the weights"):
        client.load([("model.language_model.norm.weight", torch.zeros(3, 3))])
    assert client.transfer is None
    client.loaded, engine._sent = "", False
    engine.publish(training)
    client.close()
    assert (taken == "shared_memory") == bool(segments)
    assert not any(os.path.exists(f"/dev/shm/{each.name}") for each in segments)


def test_weights_of_another_run_do_not_answer(
    server: tuple[str, Any, Path], tmp_path: Path
) -> None:
    first, training = published(server[0], tmp_path)
    asked = asked_of(first.policy, tmp_path)
    first.generate(asked, settings_of())
    second, _ = published(server[0], tmp_path)
    second.generate(asked, settings_of())
    for question in (
        lambda: first.generate(asked, settings_of()),
        lambda: first._their_scores(),
        lambda: first.publish(training),
    ):
        with pytest.raises(RolloutError, match="another run replaced the weights of the server"):
            question()
    second.generate(asked, settings_of())


def test_after_a_failed_sync_nothing_answers_until_a_whole_one_came(
    server: tuple[str, Any, Path], tmp_path: Path
) -> None:
    engine, training = published(server[0], tmp_path)
    asked = asked_of(engine.policy, tmp_path)
    weights = dict(engine.plan.weights(training, everything=True))
    fused = "model.language_model.layers.0.self_attn.q_proj.weight"

    def piece(names: list[str], **rest: Any) -> None:
        client_of(server[0]).post(
            "/weights",
            dump(
                {"sync": "x", "base": "", "names": names, **rest},
                {n: weights[n] for n in names if n in weights},
            ),
        )

    def refused() -> None:
        client_of(server[0]).load(
            [(fused, weights[fused]), (fused.replace("q_proj", "k_proj"), torch.zeros(3, 3))]
        )

    def torn() -> None:
        piece([fused], first=True, last=False)
        piece(["no such tensor"], first=False, last=True)

    for failing, message in (
        (refused, "vLLM did not take over the weights"),
        (torn, "KeyError: 'no such tensor'"),
    ):
        with pytest.raises(RolloutError, match=message):
            failing()
        with pytest.raises(RolloutError, match=r"has no weights: .* or a sync failed on it"):
            engine.generate(asked, settings_of())
        # it would send what changed only
        with pytest.raises(RolloutError, match="has no weights"):
            engine.publish(training)
        assert engine.publish(training)["train/sync/gap_max"] < 1e-5
        groups = engine.generate(asked, settings_of())
        assert (
            trainer_logps(engine.policy, asked, groups) - sampled_logps(groups)
        ).abs().max() < 1e-5
    piece([fused], first=True, last=False)  # its sender goes away
    engine.backend.loaded, engine._sent = "", False
    engine.publish(training)
    with pytest.raises(RolloutError, match="another run replaced"):
        piece([fused], first=False, last=True)
    engine.generate(asked, settings_of())


def test_a_run_samples_on_the_server_and_says_when_it_is_gone(
    server: tuple[str, Any, Path], tmp_path: Path
) -> None:
    url, process, folder = server
    vllm = {
        **VLLM,
        "mode": "server",
        "url": url,
        "start_s": PATIENCE_S,
        "timeout_s": PATIENCE_S,
    }
    tree = run_tree(
        tmp_path, engine={"rollout": "vllm", "vllm": vllm}, train={"steps": 4, "save_every": 0}
    )
    config = load_config(config_file(tmp_path / "run.yaml", tree))
    with pytest.raises(
        ConfigError,
        match=r"answers of 1025 tokens, found its engine.vllm.max_model_len 1024; start",
    ):
        Trainer(load_config(tmp_path / "run.yaml", ["engine.vllm.max_model_len=1025"]))

    def killing(kind: str, payload: Any) -> None:
        if kind == "step" and payload["step"] == 2:
            os.kill(process.pid, signal.SIGKILL)
            process.wait(60)

    with pytest.raises(RolloutError, match=r"is gone .*start it again, then resume the run"):
        Trainer(config, on_event=killing).fit()
    rows = read_jsonl(tmp_path / "runs" / "run" / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2]
    assert all(
        row["train/sync/gap_max"] < 1e-5 and row["train/logprob_gap/max"] < 1e-5 for row in rows
    )
    other = start_server(folder, int(url.rsplit(":", 1)[1]))
    try:
        Trainer(config, resume=True).fit()  # step 2 was saved when the server was missed
        rows = read_jsonl(tmp_path / "runs" / "run" / "metrics.jsonl")
        assert [row["step"] for row in rows] == [1, 2, 3, 4] and rows[-1][
            "train/sync/gap_max"
        ] < 1e-5
        request = urllib.request.Request(f"{url}/health", headers={"Authorization": "Bearer wrong"})
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(request, timeout=60)
        with pytest.raises(ConfigError, match="compute in bfloat16"):
            VLLMClient(VLLMConfig(mode="server", url=url), tiny_folder(), "bfloat16")
        with pytest.raises(ConfigError, match="hold the model /elsewhere"):
            VLLMClient(VLLMConfig(mode="server", url=url), "/elsewhere", "float32")
        other.send_signal(signal.SIGTERM)
        assert other.wait(120) == 0 and "stopped" in (folder / "server.log").read_text()
    finally:
        other.kill()
        other.wait(60)


def test_a_server_that_is_not_there(tmp_path: Path) -> None:
    began = time.monotonic()
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(
        RolloutError,
        match=r"no rollout server answers at .* after engine.vllm.start_s = 1 s.*mmrl rollout-server",
    ):
        VLLMClient(VLLMConfig(mode="server", url=url, start_s=1), "model", "float32")
    assert time.monotonic() - began >= 1
    with pytest.raises(ConfigError, match=r"expected engine\.vllm\.url like http"):
        VLLMClient(VLLMConfig(mode="server", url="ftp://there"), "model", "float32")
    tree = run_tree(
        tmp_path, engine={"rollout": "vllm", "vllm": {"mode": "server", "url": url, "start_s": 1}}
    )
    done = run_here("mmrl.cli.main", "train", config_file(tmp_path / "run.yaml", tree))
    assert done.returncode == 2 and "no rollout server answers" in done.stderr
