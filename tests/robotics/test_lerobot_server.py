"""Our policies behind lerobot's protocol: chunks are those in process, and what strangers may ask."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from mmrl.errors import ConfigError
from mmrl.robotics import lerobot_server
from mmrl.robotics.lerobot_client import LerobotPolicy
from mmrl.robotics.lerobot_messages import (
    STATE,
    Stub,
    TimedObservation,
    empty,
    features,
    message_class,
    read_actions,
    write_observation,
)
from mmrl.robotics.lerobot_server import RobotServer, RobotService
from mmrl.robotics.policy_service import PolicyLimits
from scripts.check_openpi import KINDS, tiny_policy
from tests.robotics.lerobot_serving_kit import (
    NAMES,
    RECORDED,
    begin,
    config,
    connected,
    get,
    observation,
    recorded,
    refused,
    seen,
    send,
    serving,
)
from tests.robotics.openpi_kit import Stub as Policy
from tests.robotics.openpi_kit import keys, libero, same
from tests.robotics.policy_server_kit import ended_by_a_second_signal

REPO = Path(__file__).resolve().parents[2]


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """GetActions that has nothing to answer says so soon."""
    monkeypatch.setattr(lerobot_server, "WAIT_S", 0.1)


@contextlib.contextmanager
def asking(policy: Any, **options: Any) -> Iterator[Stub]:
    """A client that has begun."""
    with serving(policy, **options) as (where, _), connected(where) as stub:
        begin(stub)
        yield stub


def _states(policy: Policy) -> list[list[float]]:
    return [found.proprio.tolist() for found, *_ in policy.seen]


def _state(number: int) -> list[float]:
    raw = seen(number)
    return np.array([raw[name] for name in NAMES], np.float32).tolist()


def test_lerobots_own_messages_are_answered() -> None:
    """Instructions and observation as lerobot's client wrote them (scripts/check_lerobot.py)."""
    policy, wanted = Policy(), RECORDED["wanted"]
    options: dict[str, Any] = {"cameras": {"base": "front"}, "seed": 5, "fps": 10.0}
    with serving(policy, **options) as (where, _), connected(where) as stub:
        begin(stub, recorded("config"))
        found = []
        for _ in range(2):
            send(stub, recorded("observation"))
            found.append(read_actions(get(stub)))
    assert [(key, greedy, heat) for _, key, greedy, heat in policy.seen] == [
        ((5, 0), True, 1.0),
        ((5, 1), True, 1.0),
    ]
    one = policy.seen[0][0]
    assert one.instruction == "pick up the black bowl – 拿起"
    assert same(one.images["base"], np.array(wanted["front"], np.uint8))
    assert same(one.images["wrist"], np.array(wanted["image2"], np.uint8))
    assert all(picture.flags.writeable for picture in one.images.values())
    assert same(one.proprio, np.array(wanted["motors"], np.float32))
    total = sum(int(picture.sum()) for picture in one.images.values()) % 1000
    for number, actions in enumerate(found):
        assert [a.timestep for a in actions] == [3, 4, 5]  # it asked for three of four steps
        assert [a.timestamp for a in actions] == [1.5, 1.5 + 1 / 10, 1.5 + 2 / 10]
        row = np.full(7, total / 1000 + (5 + number) / 7).astype(np.float32)
        assert all(same(a.action, row) for a in actions)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_chunks_are_those_of_the_policy_in_process(kind: str, tmp_path: Path) -> None:
    """To the float32 of the protocol, bit for bit."""
    policy, shown = tiny_policy(kind, tmp_path / "made"), libero(3)
    with (
        serving(policy, seed=7) as (where, _),
        LerobotPolicy(f"lerobot://{where}?type=any&path=any") as client,
    ):
        assert (client.facts.chunk, client.facts.action_dim) == (4, 7)
        found = client.act(shown, keys(3), greedy=True)
    for n, (one, output) in enumerate(zip(shown, found, strict=True), start=1):
        # number 0 were the black pictures
        wanted = policy.actions(policy.act([one], [(7, n)], greedy=True)[0])
        assert same(client.actions(output), wanted.astype(np.float32).astype(np.float64))


def test_the_newest_observation_is_answered_once(short: None) -> None:
    policy = Policy()
    with asking(policy) as stub:
        assert get(stub) == b""
        for step in (0, 1, 2):
            send(stub, observation(step, must_go=False))
        assert [a.timestep for a in read_actions(get(stub))] == [2, 3, 4]
        assert get(stub) == b""
        send(stub, observation(2, must_go=False))  # was answered
        assert get(stub) == b""
        send(stub, observation(2))
        assert read_actions(get(stub))[0].timestep == 2
        stub.Ready(empty(), timeout=30)  # begins anew
        stub.SendPolicyInstructions(message_class("PolicySetup")(data=config()), timeout=30)
        send(stub, observation(2, must_go=False))
        assert read_actions(get(stub))[0].timestep == 2
    assert _states(policy) == [_state(2)] * 3
    assert [key for _, key, *_ in policy.seen] == [(0, 0), (0, 1), (0, 0)]


def test_a_step_whose_answer_failed_is_answered_later(short: None) -> None:
    policy = Policy()
    policy.fault = lambda: np.full((4, 7), np.nan)
    with asking(policy) as stub:
        send(stub, observation(4))
        assert refused(get, stub) == (
            "INTERNAL",
            "expected finite actions of the policy, found others; they are not sent",
        )
        policy.fault = lambda: None
        send(stub, observation(4, must_go=False))
        assert read_actions(get(stub))[0].timestep == 4


def test_an_observation_may_come_while_it_is_waited_for() -> None:
    with asking(Policy()) as stub, contextlib.ExitStack() as stack:
        thread = threading.Timer(0.3, lambda: send(stub, observation(1)))
        stack.callback(thread.join, 30)
        thread.start()
        assert read_actions(get(stub))[0].timestep == 1


def test_each_client_has_its_own_answers(short: None) -> None:
    policy = Policy()
    with serving(policy) as (where, _), contextlib.ExitStack() as stack:
        stubs = [stack.enter_context(connected(where)) for _ in range(4)]
        for stub in stubs:
            begin(stub)
        for n, stub in enumerate(stubs):
            send(stub, observation(10 * n))
        for n, stub in reversed(list(enumerate(stubs))):
            assert read_actions(get(stub))[0].timestep == 10 * n
            assert get(stub) == b""
    assert {key for _, key, *_ in policy.seen} == {(0, 0)}


def test_sampling_and_the_default_prompt() -> None:
    policy = Policy()
    with asking(policy, temperature=0.5, prompt="fold") as stub:
        for changes in ({"task": None}, {"task": ""}):  # lerobot's client sends an empty one
            send(stub, observation(**changes))
            assert get(stub)
    assert [(o.instruction, greedy, heat) for o, _, greedy, heat in policy.seen] == [
        ("fold", False, 0.5)
    ] * 2


CAMERAS: dict[str, tuple[dict[str, str], tuple[str, ...], dict[str, str], tuple[str, str]]] = {
    "own names": ({}, ("wrist", "base"), {}, ("base", "wrist")),
    "LIBERO's": ({}, ("image", "image2", "image3"), {}, ("image", "image2")),
    "own before LIBERO's": ({}, ("base", "image", "image2"), {}, ("base", "image2")),
    "as told": ({"base": "up", "wrist": "on"}, ("on", "up"), {}, ("up", "on")),
    "renamed": ({}, ("up", "wrist"), {"up": "base"}, ("up", "wrist")),
}


@pytest.mark.parametrize("name", CAMERAS)
def test_cameras_are_found_by_their_names(name: str) -> None:
    told, there, renamed, wanted = CAMERAS[name]
    policy, prefix = Policy(), "observation.images."
    said = config(
        lerobot_features=features(NAMES, {n: (9, 8, 3) for n in there}),
        rename_map={prefix + old: prefix + new for old, new in renamed.items()},
    )
    pictures = {n: np.full((9, 8, 3), i, np.uint8) for i, n in enumerate(there)}
    with serving(policy, cameras=told) as (where, _), connected(where) as stub:
        begin(stub, said)
        send(stub, observation(**{"image": None, "image2": None, **pictures}))
        assert get(stub)
    [(found, *_)] = policy.seen
    assert [found.images[c][0, 0, 0] for c in ("base", "wrist")] == [there.index(n) for n in wanted]


def test_a_policy_without_proprioception_asks_for_no_motors() -> None:
    policy = Policy(proprio=0)
    pictures = features([], {n: (9, 8, 3) for n in ("image", "image2")})
    del pictures[STATE]
    with serving(policy) as (where, _), connected(where) as stub:
        begin(stub, config(lerobot_features=pictures))
        send(stub, observation())
        assert get(stub)
    assert policy.seen[0][0].proprio.shape == (0,)


def _wanted(motors: list[str], cameras: tuple[str, ...] = ("image", "image2")) -> bytes:
    return config(lerobot_features=features(motors, dict.fromkeys(cameras, (9, 8, 3))))


STATELESS = {f"observation.images.{name}": {} for name in ("image", "image2")}
INSTRUCTIONS: dict[str, tuple[bytes, str]] = {
    "camera": (
        _wanted(NAMES, ("front", "image2")),
        "expected a camera base, .* --camera base=NAME",
    ),
    "no camera": (_wanted(NAMES, ()), "which the policy sees, found none; start"),
    "motors": (_wanted(NAMES[:6]), r"a robot of 8 motors, found 6 \(joint_0.pos, joint_1.pos"),
    "no state": (config(lerobot_features=STATELESS), "names of the robot's motors"),
    "numbers": (_wanted([1, 2]), "names of the robot's motors"),  # type: ignore[list-item]
    "pickle": (b"cos\nsystem\n(S'true'\ntR.", "found the byte|asks for 'os.system'"),
    "observation": (observation(), "expected a RemotePolicyConfig .* found TimedObservation"),
    "empty": (b"", "its end too soon"),
}


def test_instructions_that_do_not_fit_are_said_before_anything_moves() -> None:
    with serving(Policy()) as (where, _), connected(where) as stub:
        for name, (said, words) in INSTRUCTIONS.items():
            code, found = refused(begin, stub, said)
            assert code == "INVALID_ARGUMENT" and re.search(words, found), (name, found)
        assert refused(send, stub, observation()) == (
            "FAILED_PRECONDITION",
            "expected SendPolicyInstructions first, found another call; start the client anew",
        )
    with pytest.raises(ConfigError, match=r"cameras of the policy \(base, wrist\), found 'front'"):
        RobotService(Policy(), "stub", cameras={"front": "base"})


OBSERVATIONS: dict[str, tuple[dict[str, Any], str]] = {
    "no picture": ({"image": None}, "expected image in the observation, found image2, joint_0"),
    "no motor": ({"joint_3.pos": None}, "expected joint_3.pos in the observation"),
    "flat": ({"image": np.zeros((9, 9), np.uint8)}, r"image as a picture .* found uint8 \(9, 9\)"),
    "small": ({"image": np.zeros((4, 90, 3), np.uint8)}, "sides from 8 to 4096"),
    "text for a picture": ({"image": "cat"}, "image as a picture .* found str"),
    "NaN": ({"joint_3.pos": float("nan")}, "joint_3.pos as finite numbers"),
    "text for a motor": ({"joint_3.pos": "1"}, "joint_3.pos as a row of numbers"),
    "two numbers": ({"joint_3.pos": np.zeros(2)}, "expected 8 numbers in joint_0.pos"),
    "no task": ({"task": None}, "expected task as a text of 1 to 2,000 characters"),
    "long task": ({"task": "a" * 2001}, "found 2,001 characters"),
    "number for a task": ({"task": 3}, "found int"),
}


def test_wrong_observations_are_answered_in_words_and_others_go_on(short: None) -> None:
    with asking(Policy()) as stub:
        for name, (changes, words) in OBSERVATIONS.items():
            code, found = refused(send, stub, observation(**changes))
            assert code == "INVALID_ARGUMENT" and re.search(words, found), (name, found)
            assert len(found) < 1500
            assert get(stub) == b"", name
        for data, words in ((b"", "last chunk"), (b"cos\nsystem\n.", "os.system|found the byte")):
            assert re.search(words, refused(send, stub, data)[1])
        send(stub, observation())
        assert get(stub)


def test_calls_in_another_order_and_of_others() -> None:
    with serving(Policy()) as (where, _), connected(where) as stub, connected(where) as other:
        said = "expected Ready first on this connection, found another call; start the client anew"
        setup = message_class("PolicySetup")(data=config())
        for call in (
            lambda: get(stub),
            lambda: send(stub, observation()),
            lambda: stub.SendPolicyInstructions(setup, timeout=30),
        ):
            assert refused(call) == ("FAILED_PRECONDITION", said)
        begin(stub)
        send(stub, observation())
        began = time.monotonic()
        assert refused(get, other) == ("FAILED_PRECONDITION", said)  # nobody takes its place
        assert time.monotonic() - began > 0.15  # lerobot's client asks again without a pause
        assert get(stub)


def test_sizes_are_bounded() -> None:
    limits = PolicyLimits(message_bytes=3 << 20)
    with asking(Policy(), limits=limits) as stub:
        large = observation(image=np.zeros((1200, 1200, 3), np.uint8))
        code, words = refused(send, stub, large)
        assert code == "INVALID_ARGUMENT" and "at most 3,145,728 bytes, found more" in words
        one = message_class("Observation")(transfer_state=3, data=bytes(5 << 20))
        assert refused(stub.SendObservations, iter([one]))[0] == "RESOURCE_EXHAUSTED"
        send(stub, observation())
        assert get(stub)


def test_compressed_messages_are_not_unpacked() -> None:
    """A megabyte of zeros is a kilobyte in gzip."""
    with serving(Policy()) as (where, _):
        with connected(where, compression=grpc.Compression.Gzip) as stub:
            code, words = refused(begin, stub, bytes(1 << 20))
        assert code == "UNIMPLEMENTED" and "ompress" in words
        with connected(where) as stub:
            begin(stub)


def test_a_policy_that_fails_says_nothing_of_the_machine() -> None:
    policy = Policy()

    def failing() -> Any:
        raise RuntimeError("/home/me/secret.py")

    policy.fault = failing
    with asking(policy) as stub:
        send(stub, observation())
        assert refused(get, stub) == (
            "INTERNAL",
            "the policy failed (RuntimeError); the server's log says more",
        )


def test_clients_are_counted_and_quiet_ones_give_their_place(
    short: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        serving(Policy(), limits=PolicyLimits(clients=2)) as (where, _),
        contextlib.ExitStack() as stack,
    ):
        one, two, three = (stack.enter_context(connected(where)) for _ in range(3))
        begin(one), begin(two), begin(one)
        code, words = refused(begin, three)
        assert code == "RESOURCE_EXHAUSTED" and "at most 2 clients at once" in words
        monkeypatch.setattr(lerobot_server, "_QUIET_S", 0.5)
        time.sleep(0.7)
        assert get(two) == b""  # it still asks
        begin(three)
        assert get(two) == get(three) == b""
        assert refused(get, one)[0] == "FAILED_PRECONDITION"


def test_an_observation_that_never_ends_is_given_up() -> None:
    done = threading.Event()

    def slowly() -> Iterator[Any]:
        yield message_class("Observation")(transfer_state=1, data=b"a")
        done.wait(60)

    with asking(Policy(), limits=PolicyLimits(send_s=0.5)) as stub:
        try:
            assert refused(stub.SendObservations, slowly())[0] == "CANCELLED"
        finally:
            done.set()
        send(stub, observation())
        assert get(stub)


def test_the_server_stops_with_the_answer_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients that wait are told so, their answers are not computed."""
    policy, begun, go_on = Policy(), threading.Event(), threading.Event()
    asked, take = threading.Semaphore(0), lerobot_server._Client.take
    monkeypatch.setattr(lerobot_server, "WAIT_S", 60.0)
    monkeypatch.setattr(
        lerobot_server._Client, "take", lambda self, goes_on: asked.release() or take(self, goes_on)
    )
    policy.fault = lambda: begun.set() or (go_on.wait(60) and None)
    found: dict[int, Any] = {}
    with contextlib.ExitStack() as stack:
        stack.callback(go_on.set)
        where, server = stack.enter_context(serving(policy))
        stubs = [stack.enter_context(connected(where)) for _ in range(3)]

        def ask(n: int) -> None:
            try:
                found[n] = get(stubs[n])
            except grpc.RpcError as error:
                found[n] = (error.code().name, error.details())

        threads = [threading.Thread(target=ask, args=(n,)) for n in range(3)]
        for n, stub in enumerate(stubs):
            begin(stub)
            if n < 2:  # the third asks without an observation
                send(stub, observation(n))
        threads[0].start()
        assert begun.wait(30)
        for thread in threads[1:]:
            thread.start()
        # a call that comes after the stop is refused by grpc, in words of its own
        assert all(asked.acquire(timeout=30) for _ in threads)
        ends = time.monotonic() + 30
        while server._worker._work_queue.qsize() != 1 and time.monotonic() < ends:
            time.sleep(0.01)
        server.stop()
        threads[1].join(30), threads[2].join(30)
        stops = ("UNAVAILABLE", "expected a server that goes on, found one that stops")
        assert found[1] == stops and found[2] == stops
        go_on.set()
        threads[0].join(30)
        assert read_actions(found[0])[0].timestep == 0
    assert len(policy.seen) == 1


_STUCK = """
import time
from mmrl.robotics.lerobot_server import RobotServer, RobotService
from tests.robotics.openpi_kit import Stub

stub, server = Stub(), RobotServer("127.0.0.1", 0, 4, 60.0)
stub.fault = lambda: print("computes", flush=True) or time.sleep(300)
server.run(RobotService(stub, "stub"), lambda: print(server.port, flush=True))
"""


@pytest.mark.slow
def test_a_second_signal_ends_the_server_at_once() -> None:
    server = subprocess.Popen(
        [sys.executable, "-c", _STUCK], cwd=REPO, stdout=subprocess.PIPE, text=True
    )
    try:
        assert server.stdout is not None
        with connected(f"127.0.0.1:{int(server.stdout.readline())}") as stub:
            begin(stub)
            send(stub, observation())
            asked = threading.Thread(target=refused, args=(get, stub))
            asked.start()
            ended_by_a_second_signal(server)
            asked.join(60)
    finally:
        server.kill()
        server.communicate()


def test_a_port_that_is_taken_is_named() -> None:
    with serving(Policy()) as (where, _):
        port = int(where.rpartition(":")[2])
        with pytest.raises(
            ConfigError, match=rf"a free address for --host 127.0.0.1 --port {port}"
        ):
            RobotServer("127.0.0.1", port, 4, 60.0)


def test_a_task_of_half_characters_is_no_message() -> None:
    said = write_observation(TimedObservation(0.0, 0, seen(task="ab"), True))
    with asking(Policy()) as stub:
        code, words = refused(send, stub, said.replace(b"ab", b"\xed\xa0"))
        assert code == "INVALID_ARGUMENT" and "found other bytes" in words
