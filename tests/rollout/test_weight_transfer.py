"""Weights in shared memory and by broadcast: what arrives, what is refused, and which way is taken."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from mmrl.config import load_config
from mmrl.errors import ConfigError, RolloutError
from mmrl.rollout import weight_receiver, weight_sender, weight_transfer
from mmrl.rollout.vllm_wire import MalformedError
from mmrl.rollout.weight_receiver import Transfers
from mmrl.rollout.weight_sender import WeightSender, pieces
from mmrl.rollout.weight_transfer import Channel, NoTransfer, Segment, host_id, layout_of
from tests.kits.engine_kit import ENVIRONMENT, REPO

_CPU = torch.device("cpu")
_READER = """
import json, sys, torch
from mmrl.rollout.weight_transfer import Segment
name, size, nonce, layout, checksum = json.loads(sys.stdin.read())
taken = Segment.open(name, size, nonce).take(layout, checksum, torch.device("cpu"))
assert taken["embed"] is taken["head"]
torch.save({n: t.clone() for n, t in taken.items()}, sys.argv[1])
"""


def group_of() -> list[tuple[str, torch.Tensor]]:
    """Types, odd sizes, a view that is not contiguous, an empty one, one tensor of two names, and experts, views of one."""
    draw = torch.Generator().manual_seed(0)
    experts = torch.randn(2, 4, 3, generator=draw)
    embedding = torch.randn(7, 5, generator=draw)
    return [
        ("embed", embedding),
        ("half", torch.randn(3, 11, generator=draw).bfloat16().T),
        ("none", torch.zeros(0, 4)),
        ("one", torch.randn((), generator=draw).half()),
        ("head", embedding),
        ("gate", experts[1, :2]),
        ("up", experts[1, 2:]),
        ("both", experts[0]),
    ]


def same(taken: dict[str, torch.Tensor]) -> None:
    for name, tensor in group_of():
        assert taken[name].dtype == tensor.dtype and torch.equal(taken[name], tensor), name


@pytest.mark.slow
def test_another_process_takes_what_was_written_and_nothing_is_left(tmp_path: Path) -> None:
    import json

    group = group_of()
    layout, size = layout_of(group)
    segment = Segment.make(size)
    assert os.stat(f"/dev/shm/{segment.name}").st_mode & 0o777 == 0o600
    checksum = segment.fill(layout, group)
    asked = json.dumps([segment.name, segment.size, segment.nonce, layout, checksum])
    subprocess.run(
        [sys.executable, "-c", _READER, str(tmp_path / "taken.pt")],
        input=asked,
        text=True,
        check=True,
        cwd=REPO,
        env=ENVIRONMENT,
    )
    same(torch.load(tmp_path / "taken.pt"))
    segment.unlink()
    assert not os.path.exists(f"/dev/shm/{segment.name}")
    segment.close()


def test_shared_memory_of_others_is_refused(tmp_path: Path) -> None:
    group = group_of()
    layout, size = layout_of(group)
    segment = Segment.make(size)
    checksum = segment.fill(layout, group)
    good = {"kind": "shared_memory", "name": segment.name, "size": size, "nonce": segment.nonce}
    transfers = Transfers(1 << 30)
    for wrong in (
        {"name": "../../etc/passwd"},
        {"name": "sem.other"},
        {"name": 3},
        {"size": 0},
        {"size": "1"},
        {"nonce": None},
    ):
        with pytest.raises(MalformedError):
            transfers.open({**good, **wrong})
    link = Path("/dev/shm/mmrl-" + "0" * 32)
    link.symlink_to(tmp_path / "secret")
    (tmp_path / "secret").write_bytes(segment.nonce.encode() * 100)
    try:
        for wrong, words in (
            ({"name": link.name}, "cannot open"),
            ({"name": "mmrl-" + "f" * 32}, "cannot open"),
            ({"nonce": "0" * 64}, "another host's"),
            ({"size": 1 << 40}, "another size"),
        ):
            assert words in transfers.open({**good, **wrong}).get("refused", "")
    finally:
        link.unlink()
    assert transfers.open(good) == {}
    document = {"layout": layout, "checksum": checksum, "segment": segment.name, "last": False}
    same(dict(transfers.piece(document, {})))
    with pytest.raises(RolloutError, match="checksums differ"):
        transfers.piece({**document, "checksum": checksum + 1}, {})
    for place in (
        {"offset": size},
        {"offset": 0},
        {"offset": 65},
        {"shape": [1 << 40]},
        {"shape": [-1, -35]},
        {"dtype": "float64"},
        {"name": None},
    ):
        with pytest.raises(MalformedError, match="the layout of weights"):
            transfers.piece({**document, "layout": [{**layout[0], **place}, *layout[1:]]}, {})
    with pytest.raises(MalformedError, match="a way that is open"):
        transfers.piece({**document, "segment": "mmrl-" + "f" * 32}, {})
    segment.unlink()
    segment.close()


class _Server:
    """A server's receiving side behind a client's calls, without HTTP between."""

    url = "here"

    def __init__(self, health: dict[str, Any]) -> None:
        self.transfer: Any = None
        self.said, self.transfers = health, Transfers(1 << 30)
        self.taken: dict[str, torch.Tensor] = {}

    def post(self, path: str, body: bytes) -> Any:
        from mmrl.rollout.vllm_wire import load

        document, tensors = load(body)
        if path == "/transfer":
            return self.transfers.open(document)
        self.taken |= self.transfers.piece(document, tensors)
        return {"held": []}

    def health(self) -> dict[str, Any]:
        return self.said

    def own_address(self) -> str:
        return "127.0.0.1"


def sent(kind: Any, health: dict[str, Any]) -> tuple[_Server, WeightSender]:
    server = _Server(health)
    sender = WeightSender(server, kind, 60.0)
    for piece in pieces(group_of(), "sync", ""):
        sender.send(piece)
    same(server.taken)
    return server, sender


@pytest.mark.slow
def test_the_way_is_the_best_that_both_sides_have(monkeypatch: pytest.MonkeyPatch) -> None:
    here = {"host": host_id(), "gpu": ""}
    for kind, health, taken in (
        ("auto", here, "shared_memory"),
        ("auto", {"host": "elsewhere"}, "http"),
        ("auto", {}, "http"),
        ("gloo", {"host": "elsewhere"}, "gloo"),
    ):
        server, sender = sent(kind, health)
        assert server.transfer.kind == taken
        sender.close()
        server.transfers.close()
    for kind, words in (
        ("shared_memory", "the server is on another host"),
        ("nccl", "this side has no GPU"),
    ):
        with pytest.raises(ConfigError, match=f"cannot be sent weights that way .*{words}"):
            sent(kind, {"host": "elsewhere"})
    with FakeTensorMode():
        group = [("w", torch.empty(3, device="cuda:0"))]
    monkeypatch.setattr(weight_sender, "_gpu_id", lambda device: f"GPU of {device}")
    there = {"host": host_id(), "gpu": "GPU of another"}
    assert weight_sender._fitting(there, group, "http://a") == ["nccl", "shared_memory", "http"]
    far = {"host": "far", "gpu": "GPU of another"}
    assert weight_sender._fitting(far, group, "http://a") == ["nccl", "http"]
    assert weight_sender._fitting(far, group, "https://a") == ["http"], "NCCL does not encrypt"
    one = {"host": host_id(), "gpu": "GPU of cuda:0"}
    assert weight_sender._fitting(one, group, "http://a") == ["shared_memory", "http"], (
        "NCCL wants two GPUs"
    )


def test_a_full_or_private_memory_falls_back_to_requests(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    names: list[str] = []
    token = weight_transfer.secrets.token_hex
    monkeypatch.setattr(
        weight_transfer.secrets, "token_hex", lambda n: (names.append(token(n)), names[-1])[1]
    )

    def full(handle: int, offset: int, length: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        sent("auto", {"host": host_id()})
    assert "bodies of requests from here on" in caplog.text and "No space left" in caplog.text
    monkeypatch.setattr(
        Transfers, "open", lambda self, document: {"refused": "a /dev/shm of its own"}
    )
    sent("auto", {"host": host_id()})
    assert "a /dev/shm of its own" in caplog.text
    with pytest.raises(ConfigError, match=r"shared_memory: .* that way \(a /dev/shm of its own\)"):
        sent("shared_memory", {"host": host_id()})
    assert len(names) > 3 and not any(os.path.exists(f"/dev/shm/mmrl-{name}") for name in names)


def test_a_refused_piece_ends_a_broadcast_that_would_wait() -> None:
    server = _Server({"host": "elsewhere"})
    sender = WeightSender(server, "gloo", 60.0)
    (piece,) = pieces(group_of(), "sync", "")
    post = server.post

    def refuse(path: str, body: bytes) -> Any:
        if path == "/weights":
            raise RolloutError("another run's")
        return post(path, body)

    server.post = refuse  # type: ignore[method-assign]
    with pytest.raises(RolloutError, match="another run's"):
        sender.send(piece)
    assert server.transfer is None


def channels(name: str) -> tuple[Channel, Transfers]:
    """A run's end of a gloo group, and the receiving side of a server of small memory in it."""
    dist: Any = torch.distributed
    served = dist.TCPStore("127.0.0.1", 0, 2, True, wait_for_workers=False)
    transfers = Transfers(limit=100)
    document = {"kind": "gloo", "name": name, "address": "127.0.0.1", "secret": "a secret"}
    joining = threading.Thread(target=transfers.open, args=({**document, "port": served.port},))
    joining.start()
    channel = Channel("gloo", dist.PrefixStore("a secret", served), 0, 60.0, _CPU)
    joining.join(60)
    return channel, transfers


def test_a_server_announces_only_what_it_has_room_for() -> None:
    channel, transfers = channels("run")
    layout, _ = layout_of(group_of())
    with pytest.raises(MalformedError, match="within 100 bytes"):
        transfers.piece({"layout": layout, "channel": "run", "piece": "p", "last": True}, {})
    assert not channel.announced("p"), "the run would wait in a broadcast that nobody takes"
    channel.announce("p")
    assert channel.announced("p")


def listening(port: int) -> set[str]:
    """Addresses that somebody listens at with this port, from the kernel's table."""
    rows = [
        line.split()
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]
    ]
    return {row[1].split(":")[0] for row in rows if row[3] == "0A" and int(row[1][-4:], 16) == port}


def test_the_store_of_a_group_listens_at_one_address(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []
    heard: list[set[str]] = []
    monkeypatch.setattr(weight_receiver, "_JOIN_S", 1.0)
    join = Transfers._join

    def note(self: Transfers, document: Any) -> None:
        asked.append(document)
        heard.append(listening(document["port"]))
        join(self, document)

    monkeypatch.setattr(Transfers, "_join", note)
    server, sender = sent("gloo", {"host": "elsewhere"})
    assert heard == [{"0100007F"}], "127.0.0.1, not every interface"
    store = torch.distributed.TCPStore(
        "127.0.0.1", asked[0]["port"], 2, False, wait_for_workers=False
    )
    assert not store.check(["joining"]) and store.check([f"{asked[0]['secret']}/joining"])
    monkeypatch.setattr(Transfers, "_join", join)
    for missing in ("secret", "port"):
        with pytest.raises(MalformedError, match="port and secret of a run"):
            server.transfers.open({k: v for k, v in asked[0].items() if k != missing})
    sender.close()
    server.transfers.close()
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    refused = server.transfers.open({**asked[0], "port": port})["refused"]
    assert f"cannot join 127.0.0.1:{port}" in refused


def test_the_address_towards_a_server_is_of_its_kind() -> None:
    assert weight_sender.address_towards("127.0.0.1", 80) == "127.0.0.1"
    if socket.has_ipv6 and Path("/proc/net/if_inet6").exists():
        assert weight_sender.address_towards("::1", 80) == "::1"
        assert weight_sender._store_at("::1", 5.0).port > 0


def test_weights_leave_from_the_gpu_that_they_are_on() -> None:
    with FakeTensorMode():
        group = [("a", torch.empty(3)), ("b", torch.empty(3, device="cuda:2"))]
    assert weight_sender._gpu_of(group) == torch.device("cuda", 2)


@pytest.mark.slow
def test_a_peer_that_goes_away_ends_a_broadcast() -> None:
    """What a kill does to a group: the connection closes, and the other side raises instead of waiting."""
    dist: Any = torch.distributed
    store = dist.TCPStore("127.0.0.1", 0, 2, True, wait_for_workers=False)
    other = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import os, sys, torch; from mmrl.rollout.weight_transfer import Channel\n"
            "store = torch.distributed.TCPStore('127.0.0.1', int(sys.argv[1]), 2, False, wait_for_workers=False)\n"
            "channel = Channel('gloo', store, 1, 60.0, torch.device('cpu')); os._exit(0)",
            str(store.port),
        ],
        cwd=REPO,
        env=ENVIRONMENT,
    )
    channel = Channel("gloo", store, 0, 60.0, _CPU)
    assert other.wait(60) == 0
    group = [("w", torch.zeros(1 << 20))]
    failed: list[BaseException] = []

    def send() -> None:
        try:
            for _ in range(20):
                channel.send(layout_of(group)[0], group)
        except RuntimeError as error:
            failed.append(error)

    thread = threading.Thread(target=send)
    thread.start()
    thread.join(50)
    assert failed and not thread.is_alive()


def test_a_way_without_a_server_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"engine\.vllm\.transfer nccl is of weights that go to"):
        load_config(None, ["engine.vllm.transfer=nccl"])
    with pytest.raises(NoTransfer, match="bytes of shared memory"):
        Segment.make(1 << 60)
