"""Policies behind openpi's websocket protocol, in our simulators: what is asked, what servers do wrong; commands of both sides."""

from __future__ import annotations

import json
import re
import socket
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner
from websockets.server import ServerProtocol

from mmrl.cli.embodied import told_policy
from mmrl.cli.main import app
from mmrl.errors import ConfigError
from mmrl.robotics import openpi_client
from mmrl.robotics.contract import ActionError
from mmrl.robotics.openpi_client import OpenPIPolicy
from mmrl.robotics.openpi_messages import pack
from mmrl.robotics.protocols import resize_with_pad
from mmrl.robotics.remote import PolicyError
from tests.robotics.openpi_kit import (
    CHUNK,
    NESTED,
    array,
    as_openpi,
    asked,
    foreign,
    good,
    keys,
    libero,
    same,
)
from tests.robotics.policy_server_kit import far_and_near, policy_server

REPO = Path(__file__).resolve().parents[2]


def test_a_foreign_server_gets_what_openpis_libero_client_sends() -> None:
    received: list[dict[Any, Any]] = []

    def answer(found: dict[Any, Any], number: int) -> bytes:
        received.append(found)
        return good(found, number)

    metadata = pack({"reset_pose": [0.0, 1.0], "arr": np.zeros(3)})
    seen = libero(2)
    with foreign(as_openpi(answer, metadata)) as address, OpenPIPolicy(address) as policy:
        outputs = policy.act(seen, keys(2), greedy=True)
        said = json.loads(json.dumps(policy.describe()))
        assert policy.act([], []) == [] and not policy.own_pictures
    for output in outputs:
        np.testing.assert_array_equal(policy.actions(output), CHUNK)
    assert len(received) == 3  # black pictures first, for the length of a chunk
    assert not received[0]["observation/image"].any()
    for found, observation in zip(received[1:], seen, strict=True):
        sent = asked(observation)
        assert list(found) == list(sent)
        state = sent.pop("observation/state").astype(np.float32)
        assert same(found.pop("observation/state"), state) and same(found, sent)
    assert said["server"] == address and said["name"] == address.removeprefix("ws://")
    assert (said["chunk"], said["action_dim"], said["cameras"]) == (10, 7, ["base", "wrist"])
    assert said["proprio_dim"] == 8 and said["details"]["noise"] == "the server's own"
    assert said["details"]["metadata"]["reset_pose"] == "[0.0, 1.0]"


def later(fault: Callable[[], bytes | str]) -> Callable[[Any], None]:
    """Answers as it should first, then not."""
    return as_openpi(lambda found, number: good(found, number) if number == 0 else fault())


def _nan() -> bytes:
    chunk = CHUNK.copy()
    chunk[4, 2] = np.nan
    return pack({"actions": chunk})


def _hang() -> bytes:
    time.sleep(0.6)
    return pack({"actions": CHUNK})


def _end() -> bytes:
    raise ConnectionError("gone")


FAULTS: dict[str, tuple[Callable[[], bytes | str], type[Exception], str]] = {
    "error": (
        lambda: "Traceback (most recent call last):\n\x1b[31mKeyError: 'observation/state'",
        PolicyError,
        r"expected actions, found its error:\nTraceback .*\n \[31mKeyError: 'observation/state'",
    ),
    "nan": (_nan, ActionError, "found nan for observation 0, step 4, dimension 2"),
    "hang": (_hang, PolicyError, r"expected actions within 0\.2 s, found none"),
    "end": (_end, PolicyError, "expected actions, found the end of the connection"),
    "none": (lambda: pack({"state": 1}), PolicyError, r"found NoneType among \['state'\]"),
    "list": (lambda: pack({"actions": [1.0]}), PolicyError, r"as numbers .* found list"),
    "row": (lambda: pack({"actions": np.zeros(7)}), PolicyError, r"found float64 \(7,\)"),
    "truth": (lambda: pack({"actions": np.ones((2, 7), bool)}), PolicyError, "found bool"),
    "empty": (lambda: pack({"actions": np.zeros((0, 7))}), PolicyError, r"found float64 \(0, 7\)"),
    "shorter": (
        lambda: pack({"actions": CHUNK[:5]}),
        PolicyError,
        r"expected actions \(10, 7\), as before, found \(5, 7\)",
    ),
    "objects": (lambda: array(dtype="|O"), PolicyError, r"actions: .* found dtype '\|O'"),
    "garbage": (lambda: b"\xc1\xc1", PolicyError, "expected a MessagePack message"),
    "nested": (lambda: NESTED, PolicyError, "within one another"),
    "huge": (lambda: bytes(200_000), PolicyError, "1009"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_server_that_does_wrong_is_named_and_left(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    does, error, said = FAULTS[fault]
    monkeypatch.setattr(openpi_client, "LARGEST", 100_000)
    with foreign(later(does)) as address, OpenPIPolicy(address) as policy:
        policy.act_s = 0.2 if fault == "hang" else 60.0
        with pytest.raises(error, match=said) as found:
            policy.act(libero(), keys(1), greedy=True)
        assert "policy server" in str(found.value) and "\x1b" not in str(found.value)
        with pytest.raises(PolicyError, match="policy server"):  # and stays so
            policy.act(libero(), keys(1), greedy=True)


def test_one_that_takes_other_observations_is_refused_before_anything_starts() -> None:
    with (
        foreign(as_openpi(lambda found, number: "KeyError: 'images'")) as address,
        pytest.raises(ConfigError, match="found its error:\nKeyError: 'images'"),
    ):
        OpenPIPolicy(address)


def _facts(**changes: Any) -> bytes:
    """What a server of mmrl says, of which something is changed."""
    facts = {"chunk": 10, "action_dim": 7, "cameras": ["base"], **changes}
    return pack({"mmrl": {"protocol": 1, "policy": facts}})


@pytest.mark.parametrize(
    ("metadata", "said"),
    [
        (pack({"mmrl": {"protocol": 2}}), r"expected protocol 1, found \{'protocol': 2\}"),
        (pack({"mmrl": {"protocol": 1}}), "expected an object policy in hello, found None"),
        (
            pack({"mmrl": {"protocol": 1, "policy": {"chunk": 0}}}),
            "expected policy.chunk as a whole number of at least 1, found 0",
        ),
        (b"\xc1", "its metadata: expected a MessagePack message"),
        (_facts(cameras="x" * 9000), r"cameras as a list of names, found 'x{199}; update"),
        (_facts(chunk="x" * 9000), r"at least 1, found 'x{199}; update"),
        (_facts(cameras=["base", "\x1b[2J"]), r"letters, digits and _, found \['base', '\\x1b"),
        (_facts(cameras=["base", "a\n"]), "at most 16 different cameras"),
        (_facts(cameras=["base", "base"]), "at most 16 different cameras"),
        (_facts(cameras=["é"]), "at most 16 different cameras"),
        (_facts(cameras=["c" * 41]), "at most 16 different cameras"),
        (_facts(cameras=[f"c{n}" for n in range(17)]), "at most 16 .*'c15', 'c16'"),
    ],
)
def test_metadata_that_cannot_be(metadata: bytes, said: str) -> None:
    with (
        foreign(as_openpi(good, metadata)) as address,
        pytest.raises(ConfigError, match=said) as found,
    ):
        OpenPIPolicy(address)
    assert str(found.value).isprintable() and len(str(found.value)) < 500


def test_what_a_server_calls_itself_is_shown_as_plain_text_and_names_nothing() -> None:
    facts = {"chunk": 10, "action_dim": 7, "cameras": ["base"], "image": {"jpeg": True}}
    said = {
        "protocol": 1,
        "name": "../../x\x1b[2J",
        "policy": facts,
        "versions": {"mm\nrl": "\x1b1" * 500},
    }
    with (
        foreign(as_openpi(good, pack({"mmrl": said}))) as address,
        OpenPIPolicy(address) as policy,
    ):
        assert policy.facts.name == address.removeprefix("ws://")
        assert policy.facts.details["name"] == "../../x [2J" and policy.facts.image is None
        assert list(policy.facts.versions) == ["mm rl"]
        assert len(policy.facts.versions["mm rl"]) == 80


def test_addresses_that_nothing_answers_at() -> None:
    for address in ("http://127.0.0.1:1", "127.0.0.1:8000", "ws://", "ws://h:99999", "ws://h/?q=1"):
        with pytest.raises(ConfigError, match="expected the address of a policy server as ws://"):
            OpenPIPolicy(address)
    with pytest.raises(ConfigError, match="without a name and a password"):
        OpenPIPolicy("ws://me:secret@127.0.0.1:1")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"ws://127.0.0.1:{free.getsockname()[1]}"
        with pytest.raises(
            ConfigError, match=r"can be reached within 0\.2 s, found none .*refused"
        ):
            OpenPIPolicy(address, connect_s=0.2)
        free.listen()  # and answers nothing
        with pytest.raises(
            ConfigError,
            match=r"a websocket server within 0\.4 s, found none .* Or it is busy: openpi's servers",
        ):
            OpenPIPolicy(address, connect_s=0.4)


@pytest.mark.slow
def test_answers_and_pauses_may_be_longer_than_connecting() -> None:
    """A busy machine needs longer to connect than a quiet one: tried with more, too."""

    def slow(message: dict[Any, Any], number: int) -> bytes:
        time.sleep(1.2 * connect_s)
        return good(message, number)

    for connect_s in (0.5, 2.0, 8.0):
        with foreign(as_openpi(slow)) as address:
            try:
                policy = OpenPIPolicy(address, connect_s=connect_s, act_s=60.0)
            except ConfigError as error:
                if connect_s < 8 and f"within {connect_s:g} s" in str(error):
                    continue
                raise
            with policy:
                assert policy._connection.socket.gettimeout() is None  # of sending, too
                time.sleep(1.2 * connect_s)
                policy.act(libero(), keys(1))
        return


@pytest.mark.slow
def test_metadata_that_never_come() -> None:
    """A busy machine needs its time to shake hands: tried with more, too."""
    done = threading.Event()

    def silent(connection: Any) -> None:
        done.wait(60)

    for connect_s in (0.7, 3.0, 12.0):
        with foreign(silent) as address:
            try:
                with pytest.raises(ConfigError) as found:
                    OpenPIPolicy(address, connect_s=connect_s)
            finally:
                done.set()
        if "a websocket server within" not in str(found.value):
            break
        done.clear()
    assert re.search(r"expected its metadata within [\d.]+ s, found none", str(found.value))


def _spoken(words: bytes, asked_with: list[bytes]) -> tuple[socket.socket, threading.Thread]:
    """A listening socket that answers one HTTP request with `words`."""
    listening = socket.create_server(("127.0.0.1", 0))
    listening.settimeout(20)

    def answer() -> None:
        try:
            connection, _ = listening.accept()
        except OSError:
            return
        with connection:
            asked_with.append(connection.recv(65536))
            connection.sendall(words)

    thread = threading.Thread(target=answer)
    thread.start()
    return listening, thread


def test_a_redirect_is_not_followed_and_the_key_goes_nowhere_else() -> None:
    other, first = [], []
    elsewhere, waiting = _spoken(b"", other)
    port = elsewhere.getsockname()[1]
    for scheme in ("ws", "http"):
        words = f"HTTP/1.1 302 Found\r\nLocation: {scheme}://127.0.0.1:{port}/\r\nContent-Length: 0\r\n\r\n"
        redirecting, thread = _spoken(words.encode(), first)
        address = f"ws://127.0.0.1:{redirecting.getsockname()[1]}"
        with pytest.raises(ConfigError, match=r"found a redirect \(status 302\)"):
            OpenPIPolicy(address, key="secret", connect_s=10)
        thread.join(20)
        redirecting.close()
    assert all(b"Authorization: Api-Key secret" in words for words in first) and len(first) == 2
    socket.create_connection(("127.0.0.1", port)).close()
    waiting.join(20)
    elsewhere.close()
    assert other == [b""]


def test_no_proxy_of_the_environment_hears_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "ws_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "")
    with foreign(as_openpi(good)) as address, OpenPIPolicy(address) as policy:
        assert policy.facts.chunk == 10


@pytest.mark.slow
def test_a_server_that_reads_nothing_does_not_hold_us_for_ever() -> None:
    """Sending has the same deadline as the answer."""
    listening = socket.create_server(("127.0.0.1", 0))
    done = threading.Event()

    def serve() -> None:
        connection, _ = listening.accept()
        protocol = ServerProtocol(max_size=None)
        with connection:
            while not protocol.events_received():
                protocol.receive_data(connection.recv(65536))
                events = protocol.events_received()
                if events:
                    protocol.send_response(protocol.accept(events[0]))  # type: ignore[arg-type]
                    break
            facts = {"chunk": 10, "action_dim": 7, "cameras": ["base", "wrist"]}
            protocol.send_binary(pack({"mmrl": {"protocol": 1, "policy": facts}}))
            for data in protocol.data_to_send():
                connection.sendall(data)
            done.wait(30)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        address = f"ws://127.0.0.1:{listening.getsockname()[1]}"
        with OpenPIPolicy(address, act_s=0.7) as policy:
            began = time.monotonic()
            with pytest.raises(PolicyError, match=r"expected actions within 0\.7 s, found none"):
                policy.act(libero(side=2000), keys(1))  # 24 MB: more than sockets hold
            assert time.monotonic() - began < 10
    finally:
        done.set()
        thread.join(30)
        listening.close()


def test_a_protocols_pictures_are_the_ones_that_are_sent() -> None:
    """--protocol openpi pads pictures to 224 as openpi's image_tools does (compared in scripts/check_openpi.py)."""
    from mmrl.robotics.protocols import protocol_of

    shown = libero(1, side=256)[0].images["base"]
    rules = protocol_of("openpi")
    assert same(rules.picture(shown, rotated=True), resize_with_pad(shown, 224))


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from mmrl.errors import MissingExtraError

    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"expected the package msgpack .*\[openpi\]"):
        OpenPIPolicy("ws://127.0.0.1:1")


# the commands


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["runs/x", "--suite", "tiny_reach"], "either a checkpoint or --policy-server, found both"),
        (["--task", "grounding"], "expected --suite with --policy-server"),
        (["--policy-command", "x", "--suite", "tiny_reach"], "--policy-server, found both"),
        (["--suite", "tiny_reech"], "Did you mean 'tiny_reach'?"),
    ],
)
def test_eval_says_what_does_not_go_with_a_policy_server(arguments: list[str], said: str) -> None:
    done = CliRunner().invoke(app, ["eval", "--policy-server", "ws://127.0.0.1:1", *arguments])
    assert isinstance(done.exception, ConfigError) and said in str(done.exception)


def test_a_timeout_is_that_of_policies_elsewhere() -> None:
    done = CliRunner().invoke(app, ["eval", "runs/x", "--suite", "mmmu", "--policy-timeout", "5"])
    assert isinstance(done.exception, ConfigError)
    assert "expected --policy-server or --policy-command with" in str(done.exception)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        where = f"ws://127.0.0.1:{silent.getsockname()[1]}"
        asked_for = ["--policy-server", where, "--suite", "tiny_reach", "--policy-timeout", "0.5"]
        done = CliRunner().invoke(app, ["eval", *asked_for])
    assert isinstance(done.exception, ConfigError) and "within 0.5 s" in str(done.exception)
    _, made = told_policy("x", None, None, 5.0)
    assert isinstance(made, partial) and made.keywords == {"act_s": 5.0}
    for timeout, limits in ((None, {}), (5.0, {"connect_s": 5.0, "act_s": 5.0})):
        _, made = told_policy(None, "ws://h", "k", timeout)
        assert isinstance(made, partial) and made.keywords == {"key": "k", **limits}


def test_a_foreign_server_without_a_protocol_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mmrl.cli.embodied.play_command", lambda *given, **named: None)
    for handler, options, noted in (
        (as_openpi(good), [], True),
        (as_openpi(good), ["--protocol", "openpi"], False),
        (as_openpi(good, _facts()), [], False),
    ):
        with foreign(handler) as address:
            asked_for = ["eval", "--policy-server", address, "--suite", "libero_spatial", *options]
            done = CliRunner().invoke(app, asked_for, catch_exceptions=False)
        assert done.exit_code == 0 and "policy: 127.0.0.1" in done.output
        said = "all 10 steps of a chunk are played. openpi's LIBERO policies are evaluated with"
        assert (said in done.output) is noted, done.output


def test_commands_say_which_checkpoints_they_serve(tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    acting = str(REPO / "assets" / "tiny_vla")
    for arguments, said in (
        (["serve", acting], f"mmrl policy-server {acting} serves it"),
        (["policy-server", str(tmp_path / "text")], "mmrl serve"),
        (["policy-server", acting, "--host", "0.0.0.0"], "whoever reaches it could use the policy"),
    ):
        done = CliRunner().invoke(app, arguments, env={"MMRL_API_KEY": ""})
        assert isinstance(done.exception, ConfigError) and said in str(done.exception)


@pytest.mark.slow
def test_an_evaluation_over_the_protocol_is_that_of_the_checkpoint(tmp_path: Path) -> None:
    """mmrl policy-server and mmrl eval --policy-server against mmrl eval CHECKPOINT: the same episodes."""
    checkpoint, key = str(REPO / "assets" / "tiny_vla"), "of the test"
    with policy_server(checkpoint, "ws", key=key) as address:
        far = ["--policy-server", address, "--policy-key", key]
        results = far_and_near(tmp_path, far, checkpoint, ["--limit", "4", "--samples", "1"], 8)
    assert results["far"]["sampled"] == results["near"]["sampled"]
    policy = results["far"]["protocol"]["policy"]
    assert policy["server"] == address and policy["details"]["name"] == checkpoint
