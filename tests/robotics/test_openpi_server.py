"""Our policies behind openpi's websocket protocol: chunks are those in process, and what strangers may ask."""

from __future__ import annotations

import contextlib
import re
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect

from mmrl.errors import ConfigError
from mmrl.operations.listening import bind
from mmrl.robotics.openpi_client import OpenPIPolicy
from mmrl.robotics.openpi_messages import pack, unpack
from mmrl.robotics.openpi_server import PolicyServer, PolicyService
from mmrl.robotics.policy_service import PolicyLimits
from mmrl.robotics.remote import PolicyError
from scripts.check_openpi import KINDS, tiny_policy
from tests.robotics.openpi_kit import (
    NESTED,
    Stub,
    array,
    asked,
    keys,
    libero,
    same,
    serving,
)
from tests.robotics.policy_server_kit import ended_by_a_second_signal

REPO = Path(__file__).resolve().parents[2]
PLAIN: dict[str, Any] = {"compression": None, "max_size": None, "open_timeout": 20}


def _connected(address: str, key: str | None = None, **options: Any) -> Any:
    headers = {"Authorization": f"Api-Key {key}"} if key else None
    return connect(address, additional_headers=headers, **PLAIN, **options)


def until(holds: Callable[[], bool], seconds: float = 30.0) -> None:
    """Wait."""
    ends = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < ends, "it did not become true"
        time.sleep(0.01)


def test_answers_to_openpis_client_have_the_seeds_noise() -> None:
    stub = Stub()
    with serving(stub, seed=5) as (address, _):
        for _ in range(2):  # on each connection anew
            with _connected(address) as connection:
                said = unpack(connection.recv())["mmrl"]
                assert said["policy"] == {
                    "chunk": 4,
                    "action_dim": 7,
                    "bins": 256,
                    "cameras": ["base", "wrist"],
                    "proprio_dim": 8,
                }
                for observation in libero(2):
                    connection.send(pack(asked(observation)))
                    found = unpack(connection.recv())
                    assert found["actions"].shape == (4, 7)
                    assert found["actions"].dtype == np.float64
                    assert found["server_timing"]["infer_ms"] >= 0
    assert [(key, greedy, heat) for _, key, greedy, heat in stub.seen] == [
        ((5, 0), True, 1.0),
        ((5, 1), True, 1.0),
    ] * 2
    for (found, *_), sent in zip(stub.seen, libero(2) * 2, strict=True):
        assert found.instruction == sent.instruction and same(found.proprio, sent.proprio)
        assert all(same(found.images[c], sent.images[c]) for c in ("base", "wrist"))


def test_our_client_chooses_key_and_mode() -> None:
    stub = Stub()
    with serving(stub) as (address, _), OpenPIPolicy(address) as policy:
        assert policy.facts.chunk == 4 and policy.facts.bins == 256
        assert "mmrl" in policy.facts.versions and not stub.seen  # nothing was tried
        policy.act(libero(1), [(2**40, 3)], greedy=True)
        policy.act(libero(2), [(1,), (2,)], temperature=0.5)
    assert [s[1:] for s in stub.seen] == [
        ((2**40, 3), True, 1.0),
        ((1,), False, 0.5),
        ((2,), False, 0.5),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_chunks_are_those_of_the_policy_in_process_bit_for_bit(kind: str, tmp_path: Path) -> None:
    policy = tiny_policy(kind, tmp_path / "made")
    seen = libero(3)
    # one by one: what stands beside an observation may move its last bit
    alone = {
        greedy: [
            policy.actions(policy.act([o], [k], greedy=greedy)[0])
            for o, k in zip(seen, keys(3), strict=True)
        ]
        for greedy in (True, False)
    }
    with serving(policy, seed=7) as (address, _):
        with OpenPIPolicy(address) as client:
            for greedy, wanted in alone.items():
                found = client.act(seen, keys(3), greedy=greedy)
                for one, chunk in zip(found, wanted, strict=True):
                    assert same(client.actions(one), chunk) and chunk.shape == (4, 7)
            assert not same(alone[False][0], alone[False][1])
        with _connected(address) as connection:  # as openpi's client: keys (7, 0), (7, 1), ...
            connection.recv()
            for observation, chunk in zip(seen, alone[True], strict=True):
                connection.send(pack(asked(observation)))
                assert same(unpack(connection.recv())["actions"], chunk)


def test_observations_of_droid_and_aloha() -> None:
    rng = np.random.default_rng(0)
    picture = rng.integers(0, 256, (224, 200, 3), np.uint8)
    stub = Stub()
    droid = {
        "observation/exterior_image_1_left": picture,
        "observation/wrist_image_left": picture[::-1],
        "observation/joint_position": np.arange(7.0),
        "observation/gripper_position": np.float64(9.0),
        "prompt": "wipe",
    }
    aloha = {
        "state": np.arange(8, dtype=np.float32),
        "images": {
            "cam_high": picture.transpose(2, 0, 1),
            "cam_left_wrist": picture.transpose(2, 0, 1) / 255,
        },
    }
    with serving(stub, prompt="fold") as (address, _), _connected(address) as connection:
        connection.recv()
        for message_ in (droid, aloha):
            connection.send(pack(message_))
            assert unpack(connection.recv())["actions"].shape == (4, 7)
    [one, two] = [s[0] for s in stub.seen]
    assert same(one.images["base"], picture) and same(one.images["wrist"], picture[::-1].copy())
    np.testing.assert_array_equal(one.proprio, [*range(7), 9])
    np.testing.assert_array_equal(two.proprio, range(8))
    assert (one.instruction, two.instruction) == ("wipe", "fold")
    assert same(two.images["base"], picture)
    assert np.abs(two.images["wrist"].astype(int) - picture).max() <= 1  # openpi cuts, too


def wrong(**changes: Any) -> dict[str, Any]:
    found = asked(libero()[0])
    names = {"image": "observation/image", "state": "observation/state"}
    found |= {names.get(k, k): v for k, v in changes.items()}
    return {k: v for k, v in found.items() if v is not None}


ASKED: dict[str, tuple[dict[str, Any], str]] = {
    "no picture": (wrong(image=None), r"expected observation/image in the observation, found \["),
    "flat": (wrong(image=np.zeros((9, 9), np.uint8)), r"as a picture .* found uint8 \(9, 9\)"),
    "batch": (wrong(image=np.zeros((1, 9, 9, 3), np.uint8)), "as a picture"),
    "text": (wrong(image="cat"), r"as a picture \(H, W, 3\) or \(3, H, W\), found str"),
    "small": (wrong(image=np.zeros((4, 90, 3), np.uint8)), "sides from 8 to 4096"),
    "large": (wrong(image=np.zeros((8, 5000, 3), np.uint8)), "sides from 8 to 4096"),
    "signed": (wrong(image=np.zeros((9, 9, 3), np.int16)), "as uint8, found int16"),
    "bright": (wrong(image=np.full((9, 9, 3), 255.0)), "numbers from 0 to 1, found others"),
    "nan": (wrong(image=np.full((9, 9, 3), np.nan)), "numbers from 0 to 1, found others"),
    "state of 7": (wrong(state=np.zeros(7)), "expected 8 numbers in observation/state, found 7"),
    "state of NaN": (wrong(state=np.full(8, np.nan)), "as finite numbers"),
    "state too large": (wrong(state=np.full(8, 1e300)), "as finite numbers"),
    "state of text": (wrong(state="0"), "as a row of numbers, found '0'"),
    "state of lists": (wrong(state=[[1], [2, 3]]), "as a row of numbers"),
    "no state": (wrong(state=None), "expected observation/state in the observation"),
    "no prompt": (wrong(prompt=None), "expected prompt as a text of 1 to 2,000 characters"),
    "long prompt": (wrong(prompt="a" * 2001), "found 2,001 characters"),
    "number for a prompt": (wrong(prompt=3), "found int"),
    "key of text": (
        wrong(mmrl={"key": "x", "greedy": True, "temperature": 1.0}),
        "mmrl with a key",
    ),
    "long key": (wrong(mmrl={"key": [1] * 17, "greedy": True, "temperature": 1.0}), "mmrl with"),
    "cold": (wrong(mmrl={"key": [1], "greedy": False, "temperature": 0.0}), "mmrl with a key"),
    "hot": (wrong(mmrl={"key": [1], "greedy": False, "temperature": float("inf")}), "mmrl with"),
    "true": (wrong(mmrl={"key": [1], "greedy": False, "temperature": True}), "mmrl with a key"),
    "no mmrl": (wrong(mmrl=1), "expected mmrl with a key"),
}


def test_wrong_observations_are_answered_in_words_and_others_go_on() -> None:
    with serving(Stub()) as (address, _), _connected(address) as standing:
        standing.recv()
        for name, (found, said) in ASKED.items():
            with _connected(address) as connection:
                connection.recv()
                connection.send(pack(found))
                words = connection.recv()
                assert isinstance(words, str), name
                assert re.search(said, words), (name, words)
                with pytest.raises(ConnectionClosed) as closed:
                    connection.recv()
                assert closed.value.rcvd is not None and closed.value.rcvd.code == 1007
        standing.send(pack(wrong()))
        assert isinstance(standing.recv(), bytes)


@pytest.mark.parametrize(
    ("sent", "said", "code"),
    [
        ("hello", "expected an observation as a binary message, found a text", 1007),
        (b"\x80\x04\x95", "expected a MessagePack message", 1007),
        (NESTED, "within one another", 1007),
        (array(dtype="|O"), "found dtype", 1007),
        (bytes(60_000), None, 1009),
    ],
    ids=["text", "pickle", "nested", "objects", "huge"],
)
def test_attacks_end_their_own_connection_only(sent: Any, said: str | None, code: int) -> None:
    limits = PolicyLimits(message_bytes=50_000)
    small = wrong(image=np.zeros((64, 64, 3), np.uint8))
    small["observation/wrist_image"] = small["observation/image"]
    with serving(Stub(), limits=limits) as (address, _), _connected(address) as standing:
        standing.recv()
        with _connected(address) as connection:
            connection.recv()
            connection.send(sent)
            if said is not None:
                assert said in connection.recv()
            with pytest.raises(ConnectionClosed) as closed:
                connection.recv()
            assert closed.value.rcvd is not None and closed.value.rcvd.code == code
        standing.send(pack(small))
        assert isinstance(standing.recv(), bytes)


def test_a_policy_that_fails_says_nothing_of_the_machine() -> None:
    stub = Stub()

    def failing() -> Any:
        raise RuntimeError("/home/me/secret.py")

    for fault, said in (
        (failing, r"^the policy failed \(RuntimeError\); the server's log says more$"),
        (lambda: np.full((4, 7), np.nan), "^expected finite actions of the policy"),
    ):
        stub.fault = fault
        with serving(stub) as (address, _), OpenPIPolicy(address) as policy:
            with pytest.raises(PolicyError, match=said.strip("^$")) as error:
                policy.act(libero(), keys(1), greedy=True)
            assert "secret" not in str(error.value)


def test_pings_are_answered_while_the_policy_thinks() -> None:
    stub, go_on = Stub(), threading.Event()
    stub.fault = lambda: go_on.wait(20) and None
    with serving(stub) as (address, _), _connected(address) as connection:
        connection.recv()
        connection.send(pack(wrong()))
        assert connection.ping().wait(10)
        go_on.set()
        assert isinstance(connection.recv(), bytes)


def test_keys() -> None:
    with serving(Stub(), key="secret") as (address, _):
        for key in (None, "", "Secret", "secre"):
            given = {"additional_headers": {"Authorization": f"Api-Key {key}"}} if key else {}
            with pytest.raises(InvalidStatus) as error, connect(address, **PLAIN, **given):
                pass
            assert error.value.response.status_code == 401, key
        with pytest.raises(ConfigError, match="expected its key, found none sent"):
            OpenPIPolicy(address)
        with pytest.raises(
            ConfigError, match=r"found the one that was sent refused \(status 401\)"
        ):
            OpenPIPolicy(address, key="wrong")
        with OpenPIPolicy(address, key="secret") as policy:
            assert policy.facts.chunk == 4
        with _connected(address, "secret") as connection:
            assert unpack(connection.recv())
        with urllib.request.urlopen(address.replace("ws", "http") + "/healthz", timeout=20) as page:
            assert page.read() == b"OK\n"


def test_pages_of_browsers_are_refused() -> None:
    with serving(Stub()) as (address, _):
        with (
            pytest.raises(InvalidStatus) as error,
            connect(address, **PLAIN, origin="http://evil.example"),  # type: ignore[arg-type]
        ):
            pass
        assert error.value.response.status_code == 403


def test_clients_are_counted_and_their_places_given_back() -> None:
    with serving(Stub(), limits=PolicyLimits(clients=2)) as (address, _):
        port = int(address.rpartition(":")[2])
        for _ in range(5):  # no websocket at all: they hold no place
            with socket.create_connection(("127.0.0.1", port)) as raw:
                raw.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
                assert b" 4" in raw.recv(100)
        with _connected(address) as one, _connected(address) as two:
            one.recv(), two.recv()
            with pytest.raises(
                ConfigError, match=r"expected a free connection, found none \(status 503\)"
            ):
                OpenPIPolicy(address)
        for _ in range(50):
            try:
                with OpenPIPolicy(address):
                    break
            except ConfigError:
                time.sleep(0.1)
        else:
            pytest.fail("no place was given back")


@pytest.mark.slow
def test_connections_that_say_nothing_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mmrl.robotics.openpi_server._WAITING", 2)
    limits = PolicyLimits(clients=1, open_s=1.0)
    with serving(Stub(), limits=limits) as (address, _):
        port = int(address.rpartition(":")[2])
        silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(6)]
        ended = 0
        for sock in silent:
            sock.settimeout(10)
            try:
                ended += sock.recv(1000) == b""
            except ConnectionResetError:
                ended += 1
            sock.close()
        assert ended == 6  # three at once, the others after open_s
        with OpenPIPolicy(address) as policy:
            assert policy.facts.chunk == 4


def test_a_client_that_asks_nothing_is_let_go() -> None:
    with (
        serving(Stub(), limits=PolicyLimits(idle_s=0.3)) as (address, _),
        _connected(address) as connection,
    ):
        connection.recv()
        with pytest.raises(ConnectionClosed, match="no observation for a long time"):
            connection.recv(timeout=10)


def test_the_server_stops_with_the_answer_under_way() -> None:
    """Clients that wait are told so, their answers are not computed."""
    stub, begun, go_on, listens = Stub(), *(threading.Event() for _ in range(3))
    stub.fault = lambda: begun.set() or (go_on.wait(60) and None)
    sock = bind("127.0.0.1", 0)
    server = PolicyServer(PolicyService(stub, "stub"), sock, listens.set)
    address = f"ws://127.0.0.1:{sock.getsockname()[1]}"
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        assert listens.wait(30)
        with contextlib.ExitStack() as stack:
            clients = [stack.enter_context(_connected(address)) for _ in range(5)]
            for client in clients:
                client.recv()
            asking = clients[:-1]  # one asks nothing
            asking[0].send(pack(wrong()))
            assert begun.wait(30)
            for client in asking[1:]:
                client.send(pack(wrong()))
            until(lambda: server._worker._work_queue.qsize() == len(asking) - 1)
            server.stop()
            until(lambda: server._ended is not None and server._ended.is_set())
            go_on.set()
            assert unpack(asking[0].recv(timeout=30))["actions"].shape == (4, 7)
            for client in asking[1:]:
                assert client.recv(timeout=30) == (
                    "expected a server that goes on, found one that stops"
                )
            for client in clients:
                with pytest.raises(ConnectionClosed) as closed:
                    client.recv(timeout=30)
                assert closed.value.rcvd is not None and closed.value.rcvd.code == 1001
            thread.join(30)
    finally:
        go_on.set()
        server.stop()
        thread.join(30)
    assert not thread.is_alive() and len(stub.seen) == 1


_STUCK = """
import time
from mmrl.operations.listening import bind
from mmrl.robotics.openpi_server import PolicyServer, PolicyService
from tests.robotics.openpi_kit import Stub

stub, sock = Stub(), bind("127.0.0.1", 0)
stub.fault = lambda: print("computes", flush=True) or time.sleep(300)
PolicyServer(PolicyService(stub, "stub"), sock, lambda: print(sock.getsockname()[1], flush=True)).run()
"""


@pytest.mark.slow
def test_a_second_signal_ends_the_server_at_once() -> None:
    server = subprocess.Popen(
        [sys.executable, "-c", _STUCK], cwd=REPO, stdout=subprocess.PIPE, text=True
    )
    try:
        assert server.stdout is not None
        with _connected(f"ws://127.0.0.1:{int(server.stdout.readline())}") as connection:
            connection.send(pack(wrong()))
            ended_by_a_second_signal(server)
    finally:
        server.kill()
        server.communicate()


def test_a_whole_number_is_a_temperature() -> None:
    stub = Stub()
    with serving(stub) as (address, _), _connected(address) as connection:
        connection.recv()
        connection.send(pack(wrong(mmrl={"key": [1], "greedy": False, "temperature": 1})))
        assert unpack(connection.recv())["actions"].shape == (4, 7)
    [(_, key, greedy, temperature)] = stub.seen
    assert (key, greedy) == ((1,), False) and same(temperature, 1.0)


def test_several_clients_at_once() -> None:
    stub = Stub()
    with serving(stub) as (address, _):
        found: dict[int, list[np.ndarray]] = {}

        def ask(number: int) -> None:
            with OpenPIPolicy(address) as policy:
                chunks = [policy.act(libero(), [(number, n)], greedy=True)[0] for n in range(5)]
                found[number] = [policy.actions(c) for c in chunks]

        threads = [threading.Thread(target=ask, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert set(found) == set(range(4))  # what a thread raises fails no test
    base = found[0][0]
    for number, chunks in found.items():
        for n, chunk in enumerate(chunks):
            np.testing.assert_allclose(chunk, base + (number + n) / 7)
