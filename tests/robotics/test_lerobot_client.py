"""Policies behind lerobot's policy server, in our simulators: what is asked, what servers do wrong; commands of both sides."""

from __future__ import annotations

import importlib
import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from typer.testing import CliRunner

from mmrl.cli.embodied import told_policy
from mmrl.cli.main import app
from mmrl.errors import ConfigError, MissingExtraError
from mmrl.robotics import lerobot_client
from mmrl.robotics.contract import ActionError
from mmrl.robotics.lerobot_client import LerobotPolicy
from mmrl.robotics.lerobot_messages import (
    TimedAction,
    TimedObservation,
    empty,
    features,
    message_class,
    read_config,
    write_actions,
)
from mmrl.robotics.lerobot_pickles import write
from mmrl.robotics.remote import PolicyError
from tests.robotics.lerobot_serving_kit import Answer, foreign, good
from tests.robotics.openpi_kit import CHUNK, keys, libero, same
from tests.robotics.policy_server_kit import far_and_near, policy_server

REPO = Path(__file__).resolve().parents[2]
ANY = "type=act&path=any"


def test_a_server_gets_what_lerobots_client_sends() -> None:
    heard: list[Any] = []
    shown = libero(2)
    with foreign(heard=heard) as where:
        address = f"lerobot://{where}?type=smolvla&path=a/b&device=cuda&chunk=20"
        with LerobotPolicy(address) as policy:
            outputs = policy.act(shown, keys(2), greedy=True)
            said = json.loads(json.dumps(policy.describe()))
            assert policy.act([], []) == [] and not policy.own_pictures
    for output in outputs:
        assert same(policy.actions(output), CHUNK.astype(np.float32).astype(np.float64))
    setup, *seen = heard
    asked = read_config(setup)
    assert (asked.policy_type, asked.pretrained_name_or_path) == ("smolvla", "a/b")
    assert (asked.device, asked.actions_per_chunk, asked.rename_map) == ("cuda", 20, {})
    motors = [f"state_{n}" for n in range(8)]
    pictures = dict.fromkeys(("image", "image2"), (224, 224, 3))
    assert asked.lerobot_features == features(motors, pictures)
    assert len(seen) == 3 and all(one.must_go for one in seen)  # black pictures first
    assert [one.timestep for one in seen] == [0, 1, 2]
    assert not seen[0].observation["image"].any() and abs(seen[0].timestamp - time.time()) < 60
    for found, observation in zip(seen[1:], shown, strict=True):
        raw = found.observation
        assert set(raw) == {*motors, "image", "image2", "task"}
        assert same(raw["image"], observation.images["base"])
        assert same(raw["image2"], observation.images["wrist"])
        assert same(np.array([raw[m] for m in motors], np.float32), observation.proprio)
        assert raw["task"] == observation.instruction
    assert said["server"] == address and said["name"] == where
    assert (said["chunk"], said["action_dim"], said["cameras"]) == (10, 7, ["base", "wrist"])
    assert said["details"]["path"] == "a/b" and said["details"]["noise"] == "the server's own"


def test_cameras_and_state_may_be_told() -> None:
    heard: list[Any] = []
    with foreign(heard=heard) as where:
        told = f"lerobot://{where}?{ANY}&cameras=wrist:observation.front,base:side&state=3"
        with LerobotPolicy(told) as policy:
            assert policy.facts.cameras == ("wrist", "base") and policy.facts.proprio_dim == 3
    assert {"observation.front", "side", "state_2"} < set(heard[1].observation)


def later(fault: Answer) -> Answer:
    """Answers as it should first, then not."""
    return lambda said, number: good(said, number) if number == 0 else fault(said, number)


def _rows(rows: np.ndarray, shift: int = 0) -> Answer:
    return lambda said, number: write_actions(
        [TimedAction(0.0, said.timestep + n + shift, row) for n, row in enumerate(rows)]
    )


def _hang(said: TimedObservation, number: int) -> bytes:
    time.sleep(0.8)
    return good(said, number)


def _raise(said: TimedObservation, number: int) -> bytes:
    raise KeyError("\x1b[31mobservation.state\nhere")


_NAN = CHUNK.copy()
_NAN[4, 2] = np.nan
FAULTS: dict[str, tuple[Answer, type[Exception], str]] = {
    "error": (
        _raise,
        PolicyError,
        r"expected actions, found its error:\nUNKNOWN: Exception calling application: .*observation.state",
    ),
    "none": (lambda *_: b"", PolicyError, "found none: its policy failed, as its log then says"),
    "nan": (_rows(_NAN), ActionError, "found nan for observation 0, step 4, dimension 2"),
    "hang": (_hang, PolicyError, r"expected actions within 0\.\d+ s, found none"),
    "others": (_rows(CHUNK, 5), PolicyError, r"from step 1 on, found others \(from 6\): another"),
    "shorter": (_rows(CHUNK[:5]), PolicyError, r"\(10, 7\), as before, found \(5, 7\)"),
    "narrower": (_rows(CHUNK[:, :6]), PolicyError, r"as before, found \(10, 6\)"),
    "garbage": (lambda *_: b"\xc1\xc1", PolicyError, "actions: expected a pickle of lerobot's"),
    "code": (
        lambda *_: b"cos\nsystem\n(S'true'\ntR.",
        PolicyError,
        "actions: expected classes of lerobot's protocol, found a pickle that asks for 'os.system'",
    ),
    "a map": (lambda *_: write({}), PolicyError, "a list of 1 to 10,000 actions, found dict"),
    "huge": (lambda *_: bytes(200_000), PolicyError, "RESOURCE_EXHAUSTED"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_server_that_does_wrong_is_named_and_left(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    does, error, said = FAULTS[fault]
    monkeypatch.setattr(lerobot_client, "LARGEST", 100_000)
    with foreign(later(does)) as where, LerobotPolicy(f"lerobot://{where}?{ANY}") as policy:
        policy.act_s = 0.3 if fault == "hang" else 60.0
        with pytest.raises(error, match=said) as found:
            policy.act(libero(), keys(1), greedy=True)
        assert "policy server" in str(found.value) and "\x1b" not in str(found.value)
        with pytest.raises(PolicyError, match="policy server"):  # and stays so
            policy.act(libero(), keys(1), greedy=True)


def test_what_a_server_refuses_is_said_before_anything_starts() -> None:
    def unknown(request: Any, context: Any) -> Any:
        raise ValueError("Policy type act not supported")

    def missing(request: Any, context: Any) -> Any:
        context.abort(grpc.StatusCode.UNIMPLEMENTED, "")

    for calls, said in (
        (
            {"SendPolicyInstructions": unknown},
            "expected the policy act any to be loaded, found its error:\n.*Policy type act not supp",
        ),
        ({"GetActions": lambda *_: empty()}, "expected actions, found none: its policy failed"),
        ({"Ready": missing}, "a server of lerobot's protocol, found a server of another protocol"),
    ):
        with foreign(**calls) as where, pytest.raises(ConfigError, match=said):
            LerobotPolicy(f"lerobot://{where}?{ANY}")


def test_a_server_that_ends_is_named() -> None:
    with foreign() as where:
        policy = LerobotPolicy(f"lerobot://{where}?{ANY}")
    with policy, pytest.raises(PolicyError, match="expected actions, found a broken connection"):
        policy.act(libero(), keys(1), greedy=True)


ADDRESSES = {
    "127.0.0.1:1": r"address of a policy server as lerobot://HOST:PORT\?type=TYPE&path=NAME",
    f"lerobot://?{ANY}": "address of a policy server",
    f"lerobot://h:99999?{ANY}": "address of a policy server",
    f"lerobot://h/a?{ANY}": "found the path '/a' after the port",
    f"lerobot://me:secret@h?{ANY}": "without a name and a password",
    "lerobot://h": "expected type and path in .* found none: lerobot's server loads",
    "lerobot://h?type=act": "expected path in",
    "lerobot://h?type": "expected settings as NAME=VALUE",
    f"lerobot://h?{ANY}&devise=cpu": "found 'devise'. Did you mean 'device'",
    f"lerobot://h?{ANY}&chunk=0": "expected chunk .* as a whole number from 1 to 10000, found '0'",
    f"lerobot://h?{ANY}&state=x": "expected state .* found 'x'",
    f"lerobot://h?{ANY}&cameras=base": "expected cameras .* as OURS:THEIRS,OURS:THEIRS",
    f"lerobot://h?{ANY}&cameras=base:a,wrist:a": "expected each camera once",
}


@pytest.mark.parametrize("address", ADDRESSES)
def test_addresses_that_cannot_be(address: str) -> None:
    with pytest.raises(ConfigError, match=ADDRESSES[address]):
        LerobotPolicy(address)


def test_addresses_that_nothing_answers_at() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"lerobot://127.0.0.1:{free.getsockname()[1]}?{ANY}"
        said = r"expected a server of lerobot's protocol within 0\.4 s, found none"
        with pytest.raises(ConfigError, match=said):
            LerobotPolicy(address, connect_s=0.4)
        free.listen()  # and answers nothing
        with pytest.raises(ConfigError, match=said):
            LerobotPolicy(address, connect_s=0.4)
    with pytest.raises(ConfigError, match="found none"):  # a host's name, no socket's file
        LerobotPolicy(f"lerobot://unix:1?{ANY}", connect_s=0.4)


def test_a_server_may_start_later() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    found: list[LerobotPolicy] = []
    told = f"lerobot://127.0.0.1:{port}?{ANY}"
    thread = threading.Thread(target=lambda: found.append(LerobotPolicy(told, connect_s=60)))
    thread.start()
    time.sleep(0.5)
    with foreign(port=port):
        thread.join(60)
        assert found[0].facts.chunk == 10
        found[0].close()


def test_no_proxy_of_the_environment_hears_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "grpc_proxy", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("no_proxy", "no_grpc_proxy"):
        monkeypatch.setenv(name, "")
    with foreign() as where, LerobotPolicy(f"lerobot://{where}?{ANY}") as policy:
        assert policy.facts.chunk == 10


@pytest.mark.slow
def test_a_server_that_reads_nothing_does_not_hold_us_for_ever() -> None:
    """Sending has the same deadline as the answer."""
    done, heard = threading.Event(), []

    def stuck(request: Iterator[Any], context: Any) -> Any:
        heard.append(next(request) if not heard else done.wait(30))
        return empty()

    answer = message_class("Actions")(data=good(TimedObservation(0.0, 0, {}), 0))
    with (
        foreign(SendObservations=stuck, GetActions=lambda *_: answer) as where,
        LerobotPolicy(f"lerobot://{where}?{ANY}") as policy,
    ):
        policy.act_s = 0.7
        began = time.monotonic()
        try:
            with pytest.raises(PolicyError, match=r"expected actions within 0\.7 s"):
                policy.act(libero(side=2000), keys(1))  # 24 MB: more than windows hold
        finally:
            done.set()
        assert time.monotonic() - began < 10


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"expected the package grpc .*\[lerobot\]"):
        LerobotPolicy(f"lerobot://127.0.0.1:1?{ANY}")


# the commands


def test_the_address_says_which_protocol() -> None:
    _, made = told_policy(None, f"lerobot://h?{ANY}", "key", 5.0)
    assert isinstance(made, partial) and made.func is LerobotPolicy
    assert made.keywords == {"connect_s": 5.0, "act_s": 5.0}  # no key: these servers take none


def test_a_server_without_a_protocol_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    importlib.import_module("mmrl.cli.evaluation")  # which would keep what stands there now
    monkeypatch.setattr("mmrl.cli.embodied.play_command", lambda *given, **named: None)
    for options, noted in (([], True), (["--protocol", "lerobot"], False)):
        with foreign() as where:
            asked = [
                "eval",
                "--policy-server",
                f"lerobot://{where}?{ANY}",
                "--suite",
                "libero_spatial",
            ]
            done = CliRunner().invoke(app, [*asked, *options], catch_exceptions=False)
        assert done.exit_code == 0 and "policy: 127.0.0.1" in done.output
        assert ("all 10 steps of a chunk are played" in done.output) is noted, done.output


ACTING = str(REPO / "assets" / "tiny_vla")
SERVED = {
    ("--protocol", "lerobt"): "found 'lerobt'. Did you mean 'lerobot'",
    ("--camera", "base=front"): "expected --camera with --protocol lerobot",
    (
        "--protocol",
        "lerobot",
        "--host",
        "0.0.0.0",
    ): "lead its port there through SSH, or let everyone",
    ("--protocol", "lerobot", "--api-key", "x"): "expected no key with --protocol lerobot",
    ("--protocol", "lerobot", "--camera", "base"): "expected --camera OURS=THEIRS, found 'base'",
    ("--protocol", "lerobot", "--port", "0", "--camera", "front=base"): "cameras of the policy",
}


@pytest.mark.parametrize("arguments", SERVED, ids=" ".join)
def test_the_command_says_what_does_not_go_together(arguments: tuple[str, ...]) -> None:
    command = ["policy-server", ACTING, *arguments]
    done = CliRunner().invoke(app, command, env={"MMRL_API_KEY": ""})
    assert isinstance(done.exception, ConfigError) and SERVED[arguments] in str(done.exception)


def test_a_key_of_the_environment_is_not_passed_over_in_silence() -> None:
    command = ["policy-server", ACTING, "--protocol", "lerobot"]
    done = CliRunner().invoke(app, command, env={"MMRL_API_KEY": "secret"})
    assert "unset MMRL_API_KEY" in str(done.exception) and "secret" not in str(done.exception)


@pytest.mark.slow
def test_an_evaluation_over_the_protocol_is_that_of_the_checkpoint(tmp_path: Path) -> None:
    """mmrl policy-server and mmrl eval --policy-server against mmrl eval CHECKPOINT: the same episodes, of actions in float32."""
    settings = json.loads((Path(ACTING) / "vla.json").read_text(encoding="utf-8"))
    cameras = ",".join(f"{c}:{c}" for c in settings["vla"]["cameras"])
    size = settings["vla"].get("proprio_dim", 0) or 1
    with policy_server(ACTING, "lerobot", "--protocol", "lerobot") as said:
        address = f"{said}?{ANY}&cameras={cameras}&state={size}"
        results = far_and_near(tmp_path, ["--policy-server", address], ACTING, ["--limit", "4"], 4)
    policy = results["far"]["protocol"]["policy"]
    assert policy["server"] == address
    assert re.fullmatch(r"127\.0\.0\.1:\d+", policy["name"])
