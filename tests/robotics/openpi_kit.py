"""Servers of openpi's protocol for tests: ours around a policy, and others that answer as they are told."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from mmrl.operations.listening import bind
from mmrl.robotics.actions import ActionCodec
from mmrl.robotics.config import VLAConfig
from mmrl.robotics.contract import Observation
from mmrl.robotics.openpi_messages import pack, unpack
from mmrl.robotics.openpi_server import PolicyServer, PolicyService
from tests.robotics.policy_server_kit import in_thread

CHUNK = np.linspace(-1, 1, 70).reshape(10, 7)


class Stub:
    """Answers with numbers made of what it sees; `seen` holds its calls."""

    def __init__(self, cameras: Sequence[str] = ("base", "wrist"), proprio: int = 8) -> None:
        self.codec = ActionCodec((-1.0,) * 7, (1.0,) * 7, chunk=2, repeat=2)
        self.settings = VLAConfig(
            cameras=list(cameras),
            proprio=proprio > 0,
            proprio_dim=proprio,
            proprio_low=[-1.0] * proprio,
            proprio_high=[1.0] * proprio,
        )
        self.seen: list[tuple[Observation, tuple[int, ...], bool, float]] = []
        self.fault: Callable[[], Any] = lambda: None

    def act(
        self, observations: Sequence[Observation], keys: Sequence[tuple[int, ...]], **how: Any
    ) -> list[Any]:
        [observation], [key] = observations, keys
        self.seen.append((observation, key, how["greedy"], how["temperature"]))
        total = sum(int(p.sum()) for p in observation.images.values()) % 1000
        return [(total, key)]

    def actions(self, output: Any) -> np.ndarray:
        if (found := self.fault()) is not None:
            return np.asarray(found)
        total, key = output
        return np.full((4, 7), total / 1000 + sum(key) / 7)


@contextmanager
def serving(policy: Any, **options: Any) -> Iterator[tuple[str, PolicyService]]:
    """(address, service) of ours."""
    sock, listens = bind("127.0.0.1", 0), threading.Event()
    service = PolicyService(policy, "stub", **options)
    server = PolicyServer(service, sock, listens.set)
    port = sock.getsockname()[1]
    with in_thread(server.run, server.stop, listens):
        yield f"ws://127.0.0.1:{port}", service


@contextmanager
def foreign(handler: Callable[[Any], None], process_request: Any = None) -> Iterator[str]:
    """The address of a server whose connections `handler` gets."""
    from websockets.sync.server import serve

    options: dict[str, Any] = {"compression": None, "max_size": None, "close_timeout": 0.5}
    with serve(handler, "127.0.0.1", 0, process_request=process_request, **options) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"ws://127.0.0.1:{server.socket.getsockname()[1]}"
        finally:
            server.shutdown()
            thread.join(30)


def as_openpi(
    answer: Callable[[dict[Any, Any], int], bytes | str], metadata: bytes | None = None
) -> Callable[[Any], None]:
    """What openpi's server does: metadata, then an answer to each observation, given its number."""

    def handler(connection: Any) -> None:
        connection.send(pack({}) if metadata is None else metadata)
        for number, message in enumerate(connection):
            connection.send(answer(unpack(message), number))

    return handler


def good(message: dict[Any, Any], number: int) -> bytes:
    """As openpi's policy answers."""
    timing = {"infer_ms": 1.5}
    return pack(
        {"state": np.zeros(8), "actions": CHUNK, "policy_timing": timing, "server_timing": timing}
    )


def libero(count: int = 1, side: int = 224) -> list[Observation]:
    """Observations of the size that openpi's LIBERO client sends."""
    rng = np.random.default_rng(3)
    return [
        Observation(
            {c: rng.integers(0, 256, (side, side, 3), np.uint8) for c in ("base", "wrist")},
            rng.standard_normal(8).astype(np.float32),
            f"pick up object {n}",
        )
        for n in range(count)
    ]


def asked(observation: Observation) -> dict[str, Any]:
    """An observation as openpi's LIBERO client sends it."""
    return {
        "observation/image": observation.images["base"],
        "observation/wrist_image": observation.images["wrist"],
        "observation/state": observation.proprio.astype(np.float64),
        "prompt": observation.instruction,
    }


def keys(count: int) -> list[tuple[int, ...]]:
    """Of the noise of `count` observations."""
    return [(7, n) for n in range(count)]


def same(one: Any, other: Any) -> bool:
    """Equal in types, shapes and bits."""
    if isinstance(one, dict):
        return (
            isinstance(other, dict)
            and list(one) == list(other)
            and all(same(one[k], other[k]) for k in one)
        )
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, (np.ndarray, np.generic)):
        alike = type(one) is type(other) and one.dtype == other.dtype and one.shape == other.shape
        return bool(alike and one.tobytes() == other.tobytes())
    return type(one) is type(other) and bool(one == other)


def array(**changes: Any) -> bytes:
    """A message with one array, of which something is changed."""
    content = {"__ndarray__": True, "data": b"\0" * 8, "dtype": "<f8", "shape": [1], **changes}
    return pack({"a": {k.encode(): v for k, v in content.items() if v is not None}})


NESTED = b"\x81\xa1a" + b"\x91" * 500 + b"\xc0"
"""A map with 500 lists within one another."""
