"""Servers of lerobot's protocol for tests: ours around a policy, and others that answer as they are told; the recorded exchange."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import grpc
import numpy as np

from mmrl.robotics.lerobot_messages import (
    METHODS,
    SERVICE,
    RemotePolicyConfig,
    Stub,
    TimedAction,
    TimedObservation,
    chunks,
    empty,
    features,
    joined,
    message_class,
    read_observation,
    write_actions,
    write_config,
    write_observation,
)
from mmrl.robotics.lerobot_server import RobotServer, RobotService
from mmrl.robotics.policy_service import PolicyLimits
from scripts.check_lerobot import FIXTURE, MOTORS
from tests.robotics.openpi_kit import CHUNK
from tests.robotics.policy_server_kit import in_thread

RECORDED: dict[str, Any] = json.loads(FIXTURE.read_text(encoding="utf-8"))
"""What lerobot's own code wrote (scripts/check_lerobot.py)."""
NAMES = [f"joint_{n}.pos" for n in range(MOTORS)]


def recorded(name: str) -> bytes:
    """Bytes of lerobot's."""
    return base64.b64decode(RECORDED[name])


@contextmanager
def serving(policy: Any, **options: Any) -> Iterator[tuple[str, RobotServer]]:
    """(host:port, server) of ours."""
    limits = options.pop("limits", PolicyLimits())
    server = RobotServer("127.0.0.1", 0, limits.clients, limits.idle_s)
    service, listens = RobotService(policy, "stub", limits=limits, **options), threading.Event()
    with in_thread(partial(server.run, service, listens.set), server.stop, listens):
        yield f"127.0.0.1:{server.port}", server


@contextmanager
def connected(where: str, **options: Any) -> Iterator[Stub]:
    """The calls of a server, over a connection of their own."""
    own = ("grpc.use_local_subchannel_pool", 1)
    with grpc.insecure_channel(where, options=[own], **options) as channel:
        yield Stub(channel)


def config(**changes: Any) -> bytes:
    """Instructions of a robot with eight motors and LIBERO's cameras."""
    said: dict[str, Any] = {
        "policy_type": "act",
        "pretrained_name_or_path": "any",
        "lerobot_features": features(NAMES, {n: (9, 8, 3) for n in ("image", "image2")}),
        "actions_per_chunk": 3,
    }
    return write_config(RemotePolicyConfig(**{**said, **changes}))


def seen(number: int = 0, **changes: Any) -> dict[str, Any]:
    """What that robot sees, of which something is changed; None: left out."""
    rng = np.random.default_rng(number)
    raw: dict[str, Any] = {name: float(x) for name, x in zip(NAMES, rng.random(8), strict=True)}
    raw |= {name: rng.integers(0, 256, (9, 8, 3), np.uint8) for name in ("image", "image2")}
    found = {**raw, "task": f"pick up object {number}", **changes}
    return {name: value for name, value in found.items() if value is not None}


def observation(step: int = 0, *, must_go: bool = True, **changes: Any) -> bytes:
    """The pickle of an observation."""
    return write_observation(TimedObservation(0.5 * step, step, seen(step, **changes), must_go))


def begin(stub: Stub, said: bytes | None = None) -> None:
    """As a client of lerobot's begins."""
    stub.Ready(empty(), timeout=30)
    setup = message_class("PolicySetup")(data=config() if said is None else said)
    stub.SendPolicyInstructions(setup, timeout=30)


def send(stub: Stub, data: bytes) -> None:
    """An observation, in chunks."""
    stub.SendObservations(chunks(data), timeout=30)


def get(stub: Stub) -> bytes:
    """The bytes of actions, none where the server has none."""
    data: bytes = stub.GetActions(empty(), timeout=60).data
    return data


Answer = Callable[[TimedObservation, int], bytes]


def good(said: TimedObservation, number: int) -> bytes:
    """As lerobot's server answers."""
    rows = CHUNK.astype(np.float32)
    return write_actions([TimedAction(n / 30, said.timestep + n, a) for n, a in enumerate(rows)])


@contextmanager
def foreign(
    answer: Answer = good, heard: list[Any] | None = None, port: int = 0, **calls: Any
) -> Iterator[str]:
    """host:port of a server as lerobot's is: it keeps what it hears, and answers each observation, given its number. calls: others
    than lerobot's own, by name."""
    kept: list[Any] = [] if heard is None else heard
    waiting: list[TimedObservation] = []

    def setup(request: Any, context: Any) -> Any:
        kept.append(request.data)
        return empty()

    def observe(request: Any, context: Any) -> Any:
        waiting.append(read_observation(joined(request, 64 << 20)))
        kept.append(waiting[-1])
        return empty()

    def actions(request: Any, context: Any) -> Any:
        number = sum(isinstance(one, TimedObservation) for one in kept) - 1
        return message_class("Actions")(data=answer(waiting.pop(), number))

    own = {
        "Ready": lambda request, context: empty(),
        "SendPolicyInstructions": setup,
        "SendObservations": observe,
        "GetActions": actions,
    }
    made = {}
    for name, (asked, answered) in METHODS.items():
        stream = name == "SendObservations"
        kind = (
            grpc.stream_unary_rpc_method_handler if stream else grpc.unary_unary_rpc_method_handler
        )
        made[name] = kind(
            calls.get(name, own[name]),
            request_deserializer=message_class(asked).FromString,
            response_serializer=message_class(answered).SerializeToString,
        )
    server = grpc.server(ThreadPoolExecutor(4))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, made),))
    port = server.add_insecure_port(f"127.0.0.1:{port}")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(None).wait(30)


def refused(call: Callable[..., Any], *arguments: Any) -> tuple[str, str]:
    """(name of the status, words) that a call is answered by."""
    try:
        call(*arguments)
    except grpc.RpcError as error:
        return error.code().name, error.details() or ""
    raise AssertionError("expected an error, found none")
