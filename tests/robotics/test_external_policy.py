"""Policies in another process: a real one solves a task, broken ones are named and ended; OpenVLA's server and its rules."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from mmrl.cli.main import app
from mmrl.errors import ConfigError
from mmrl.evaluation.suite_book import load_suites
from mmrl.robotics.actions import ActionCodec, ActionStatistics
from mmrl.robotics.config import load_embodied
from mmrl.robotics.contract import ActionError, EnvSpec, Observation, initial_states, make_simulator
from mmrl.robotics.evaluate import evaluate_policy
from mmrl.robotics.external import ExternalPolicy, PolicyError
from mmrl.robotics.pool import VectorEnv
from mmrl.robotics.protocols import protocol_of
from mmrl.robotics.rollout import Driver
from mmrl.robotics.suites import ProtocolPolicy, Setting, configure

HERE = Path(__file__).resolve().parent
SERVER = HERE.parents[1] / "robotics" / "openvla_server.py"
REACH = [sys.executable, str(HERE / "external_reach.py")]


@pytest.fixture(scope="module")
def server() -> ModuleType:
    """robotics/openvla_server.py as another interpreter has it: by its path."""
    spec = importlib.util.spec_from_file_location("openvla_server_by_path", SERVER)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def reach() -> Iterator[ExternalPolicy]:
    with ExternalPolicy(REACH, start_s=60) as policy:
        yield policy


def pictures(count: int, cameras: tuple[str, ...] = ("base",)) -> list[Observation]:
    found = []
    for state in initial_states("eval", count):
        simulator = make_simulator(EnvSpec("tiny", "reach", 40, 64, cameras))
        simulator.reset(state)
        found.append(simulator.observe())
    return found


def keys(count: int) -> list[tuple[int, ...]]:
    return [(0, i) for i in range(count)]


def gone(pid: int) -> bool:
    """Whether a process has ended (a zombie nobody has waited for has)."""
    for _ in range(100):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return True
        if state == "Z":
            return True
        time.sleep(0.02)
    return False


# a policy that acts


@pytest.mark.slow
def test_a_process_that_sees_pictures_only_solves_reach() -> None:
    config = load_embodied(
        None,
        [
            "env.suite=tiny",
            "env.tasks=[reach]",
            "env.horizon=40",
            "env.image_size=64",
            "eval_states=20",
            "eval.samples=0",
            "threads=1",
        ],
    )
    with ExternalPolicy(REACH, start_s=60) as policy, VectorEnv(8, 1) as pool:
        driver: Any = Driver(pool, policy, stages=2)  # type: ignore[arg-type]
        found = evaluate_policy(config, driver, 0)
        pid = policy.pid
    assert found.results["greedy"]["success_once"]["mean"] > 0.8
    assert (
        found.results["greedy"]["success_once"]["n"] == 20 and not found.results["failed_attempts"]
    )
    assert (found.results["protocol"]["chunk"], found.results["protocol"]["decode"]) == (
        2,
        "external",
    )
    assert driver.counters["control_steps"] > 20 and gone(pid)


def test_what_it_says_of_itself_stands_beside_the_result(reach: ExternalPolicy) -> None:
    said = json.loads(json.dumps(reach.describe()))
    assert said["name"] == "reach by colour" and said["versions"] == {"numpy": np.__version__}
    assert (
        said["command"].endswith("external_reach.py")
        and said["chunk"] == 2
        and said["image"] is None
    )
    assert not reach.own_pictures and reach.value_head is None and reach.codec.dim == 2


def test_batches_of_any_size_and_pictures_of_different_sizes_are_answered_one_by_one(
    reach: ExternalPolicy,
) -> None:
    seen = pictures(5)
    together = reach.act(seen, keys(5), greedy=True)
    alone = [reach.act([o], keys(1), greedy=True)[0] for o in seen]
    for a, b in zip(together, alone, strict=True):
        np.testing.assert_array_equal(reach.actions(a), reach.actions(b))
    assert reach.actions(together[0]).shape == (2, 2) and reach.act([], []) == []
    large = [
        replace(o, images={"base": np.repeat(np.repeat(o.images["base"], 8, 0), 8, 1)})
        for o in seen
    ]  # 0.8 MB each: more
    mixed = reach.act([seen[0], *large], keys(6), greedy=True)  # than a pipe holds
    for small, big in zip(together, mixed[1:], strict=True):
        np.testing.assert_allclose(small.actions_KA, big.actions_KA, atol=1e-5)
    assert together[0].tokens == () and together[0].logprobs == ()


def test_a_protocol_cuts_its_chunks(reach: ExternalPolicy) -> None:
    rules = replace(protocol_of("openvla_oft"), replan=1)
    config = load_embodied(None, ["env.tasks=[reach]"])
    pool: Any = type("Pool", (), {"facts": {}})()
    setting = Setting(config, rules, "greedy", {"reach": initial_states("eval", 1)})
    seen = pictures(1)
    prepared = ProtocolPolicy(reach, pool, setting)
    choice: Any = reach.act(seen, keys(1), greedy=True)[0]
    np.testing.assert_array_equal(prepared.actions(choice), choice.actions_KA[:1])
    plain = ProtocolPolicy(reach, pool, Setting(config, None, "greedy"))
    np.testing.assert_array_equal(plain.actions(choice), choice.actions_KA)


def test_pictures_go_through_the_protocol_unless_the_process_prepares_them() -> None:
    sent: list[np.ndarray] = []

    class Recorder(ExternalPolicy):
        def _send(self, header: Any, arrays: Any = None) -> None:
            sent.append(arrays["0/base"])
            super()._send(header, arrays)

    pool: Any = type("Pool", (), {"facts": {}})()
    rules = protocol_of("openvla_oft")
    setting = Setting(
        load_embodied(None, ["env.tasks=[reach]"]),
        rules,
        "greedy",
        {"reach": initial_states("eval", 1)},
    )
    seen = pictures(1)
    with Recorder(REACH, start_s=60) as policy:
        ProtocolPolicy(policy, pool, setting).act(seen, keys(1), greedy=True)
        policy.facts = replace(policy.facts, image={"side": 224})
        ProtocolPolicy(policy, pool, setting).act(seen, keys(1), greedy=True)
    np.testing.assert_array_equal(sent[0], rules.picture(seen[0].images["base"], rotated=True))
    np.testing.assert_array_equal(sent[1], seen[0].images["base"])


def test_a_suite_takes_cameras_and_chunk_from_the_process(reach: ExternalPolicy) -> None:
    book = load_suites()
    setting = configure(
        load_embodied(None, ["model.path=x"]), book.suites["tiny_reach"], external=reach
    )
    assert (setting.config.env.cameras, setting.config.env.tasks, setting.mode) == (
        ["base"],
        ["reach"],
        "greedy",
    )


def test_it_cannot_be_trained(reach: ExternalPolicy) -> None:
    for name in ("trainable", "evaluate", "core", "save", "values"):
        with pytest.raises(
            ConfigError,
            match=rf"expected a policy of mmrl for .{name}: an external policy is only evaluated",
        ):
            getattr(reach, name)
    assert not hasattr(reach, "anything_else")


# processes that do wrong


@pytest.mark.parametrize(
    ("fault", "error", "said"),
    [
        (
            "die",
            PolicyError,
            r"expected actions on its stdout; it ended with status 3; its stderr ends:\nCUDA out of memory",
        ),
        pytest.param(
            "hang",
            PolicyError,
            r"expected actions within 1.5 s, found none; it was ended",
            marks=pytest.mark.slow,
        ),
        (
            "shape",
            PolicyError,
            r"expected actions float32 \(1, 2, 2\) .* found float32 \(1, 1, 2\)",
        ),
        (
            "double",
            PolicyError,
            r"expected an array of uint8 or float32 with sizes >= 0, found float64",
        ),
        (
            "nan",
            ActionError,
            r"expected finite actions, found nan for observation 0, step 1, dimension 0",
        ),
        ("number", PolicyError, r"expected actions number 2, found actions number 77"),
        (
            "garbage",
            PolicyError,
            r"found b'step 2: all is w' on its stdout, where only messages may stand: it must print to stderr",
        ),
        (
            "cut",
            PolicyError,
            r"expected actions on its stdout, found b'MXP1\\x10' and its end; it ended with status 0",
        ),
        ("huge", PolicyError, r"expected a message of at most \d+ bytes, found one of \d+"),
        ("refuse", PolicyError, r"it could not act: ValueError: no such statistics"),
    ],
)
def test_a_broken_process_is_named_and_ended(fault: str, error: type[Exception], said: str) -> None:
    with ExternalPolicy([*REACH, "--fault", fault], start_s=60) as policy:
        seen = pictures(1)
        policy.act(seen, keys(1), greedy=True)
        policy.act_s = 1.5 if fault == "hang" else 60.0
        with pytest.raises(error, match=said):
            policy.act(seen, keys(1), greedy=True)
        assert gone(policy.pid)
        with pytest.raises(PolicyError, match="external policy"):  # and stays so
            policy.act(seen, keys(1), greedy=True)


@pytest.mark.parametrize(
    ("fault", "error", "said"),
    [
        pytest.param(
            "hello_hang",
            PolicyError,
            "expected hello within 1 s, found none; it was ended",
            marks=pytest.mark.slow,
        ),
        ("hello_garbage", PolicyError, "found b'Loading checkpoi' on its stdout"),
        ("hello_error", ConfigError, "expected timm 0.9.16, found none: pip install timm==0.9.16"),
        (
            "hello_chunk",
            PolicyError,
            "expected policy.chunk as a whole number of at least 1, found 0",
        ),
        (
            "hello_protocol",
            PolicyError,
            "expected hello with protocol 1, found hello with protocol 2",
        ),
    ],
)
def test_a_process_that_does_not_start_well(fault: str, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        ExternalPolicy([*REACH, "--fault", fault], start_s=1 if fault == "hello_hang" else 60)


def test_a_header_too_deep_to_read_is_named() -> None:
    """RecursionError went through to who asked, and the process ran on."""
    code = "import struct, sys; sys.stdout.buffer.write(struct.pack('<4sIQ', b'MXP1', 200000, 0) + b'[' * 200000)"
    with pytest.raises(
        PolicyError, match=r"recursion.* on its stdout, where only messages may stand"
    ):
        ExternalPolicy([sys.executable, "-c", code], start_s=60)


def test_commands_that_start_nothing() -> None:
    with pytest.raises(
        ConfigError,
        match="expected a program that can be started, found 'envs/none/python': No such file",
    ):
        ExternalPolicy("envs/none/python server.py")
    with pytest.raises(ConfigError, match="expected a command, found an empty one"):
        ExternalPolicy("  ")
    with pytest.raises(
        PolicyError,
        match="expected hello on its stdout; it ended with status 0; nothing on its stderr",
    ):
        ExternalPolicy([sys.executable, "-c", ""], start_s=60)


def test_observations_that_lack_what_it_needs_and_sampling_that_it_does_not_offer() -> None:
    for fault, said in (
        ("wrist", "needs pictures of cameras base, wrist, found base; add them to env.cameras"),
        ("proprio", r"needs 8 proprioception values, found \(2,\)"),
    ):
        with (
            ExternalPolicy([*REACH, "--fault", fault], start_s=60) as policy,
            pytest.raises(ConfigError, match=said),
        ):
            policy.act(pictures(1), keys(1), greedy=True)
    with ExternalPolicy([*REACH, "--fault", "greedy"], start_s=60) as policy:
        with pytest.raises(
            ConfigError,
            match=r"only acts greedily, found sampling at temperature 1\.6: drop --samples",
        ):
            policy.act(pictures(1), keys(1), temperature=1.6)
        assert len(policy.act(pictures(1), keys(1), greedy=True)) == 1  # it still runs


def test_nothing_that_it_started_outlives_it() -> None:
    with ExternalPolicy([*REACH, "--fault", "child"], start_s=60) as policy:
        child = int(policy._tail())
        assert not gone_now(child)
    assert gone(child) and gone(policy.pid)
    policy.close()  # again


def gone_now(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


# the command


@pytest.mark.slow
def test_eval_with_a_policy_command(tmp_path: Path) -> None:
    command = " ".join(REACH)
    done = CliRunner().invoke(
        app,
        [
            "eval",
            "env.slots=4",
            "env.workers=1",
            "--policy-command",
            command,
            "--suite",
            "tiny_reach",
            "--limit",
            "6",
            "--out",
            str(tmp_path),
        ],
        catch_exceptions=False,
    )
    assert done.exit_code == 0 and "tiny_reach: success rate" in done.stdout, done.output
    results = json.loads((tmp_path / "tiny_reach" / "results.json").read_text(encoding="utf-8"))
    assert (
        results["protocol"]["policy"]["command"] == command
        and results["protocol"]["model"] == "reach by colour"
    )
    assert (
        results["greedy"]["success_once"]["n"] == 6
        and results["greedy"]["success_once"]["mean"] > 0.8
    )
    assert (
        json.loads((tmp_path / "suites.json").read_text(encoding="utf-8"))["checkpoint"]
        == "reach by colour"
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["runs/x", "--suite", "tiny_reach"],
            "expected either a checkpoint or --policy-command, found both",
        ),
        (["--task", "grounding", "--data", "x.jsonl"], "expected --suite with --policy-command"),
        (
            ["--suite", "tiny_reech"],
            "unknown suite 'tiny_reech'. Did you mean 'tiny_reach'?",
        ),
    ],
)
def test_eval_says_what_does_not_go_with_a_policy_command(arguments: list[str], said: str) -> None:
    done = CliRunner().invoke(app, ["eval", "--policy-command", " ".join(REACH), *arguments])
    assert isinstance(done.exception, ConfigError) and said in str(done.exception)


# OpenVLA's server


@pytest.mark.parametrize("oft", [False, True])
def test_the_server_refuses_other_versions_before_it_reads_weights(oft: bool) -> None:
    from importlib.metadata import version

    found = version("transformers")
    assert found != "4.40.1", "this interpreter has OpenVLA's version: run the test under mmrl's"
    with pytest.raises(ConfigError) as error:
        ExternalPolicy(
            [sys.executable, str(SERVER), "--checkpoint", "no/such", *(["--oft"] if oft else [])],
            start_s=120,
        )
    text = str(error.value)
    assert (
        f"expected transformers 4.40.1, found {found}: " in text
        and "expected tokenizers 0.19.1, found " in text
    )
    assert ("moojink/transformers-openvla-oft" in text) == oft and (
        "the package prismatic" in text
    ) == oft


def test_the_server_by_hand_prints_and_ends(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(SERVER), "--checkpoint", "x"],
        capture_output=True,
        cwd=tmp_path,
        timeout=120,
        stdin=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": ""},
        check=False,
    )
    assert done.returncode == 2 and b"expected transformers 4.40.1" in done.stderr


def test_pins(server: ModuleType) -> None:
    right = {"transformers": "4.40.1", "tokenizers": "0.19.1", "timm": "0.9.16"}
    assert server.pin_problems(False, right) == []
    assert server.pin_problems(False, {**right, "timm": "1.0.3"}) == [
        "expected timm 0.9.10 or 0.9.11 or 0.9.12 or 0.9.16, found 1.0.3: pip install timm==0.9.16"
    ]
    assert (
        "tokenizers 0.19.1, found none"
        in server.pin_problems(False, {"transformers": "4.40.1", "timm": "0.9.10"})[0]
    )


def test_attention_tells_the_fork_from_the_original(server: ModuleType) -> None:
    import torch
    from transformers import BertConfig, BertModel, LlamaConfig, LlamaModel

    torch.manual_seed(0)
    sizes = {
        "vocab_size": 32,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    assert not server.attends_ahead(LlamaModel(LlamaConfig(**sizes)))
    assert server.attends_ahead(BertModel(BertConfig(**sizes)))
    # the transformers of this interpreter are causal, as the original
    assert server.attention_problem(False) is None
    assert "expected transformers 4.40.1 of the fork" in server.attention_problem(True)


@pytest.mark.parametrize("size", [(256, 256), (224, 224), (128, 200)])
def test_pictures_are_those_of_the_protocol(server: ModuleType, size: tuple[int, int]) -> None:
    rng = np.random.default_rng(3)
    smooth = np.cumsum(np.cumsum(rng.normal(size=(*size, 3)), axis=0), axis=1)
    picture = (255 * (smooth - smooth.min()) / np.ptp(smooth)).astype(np.uint8)
    np.testing.assert_array_equal(
        server.picture(picture), protocol_of("openvla_oft").picture(picture, rotated=True)
    )


def test_the_gripper_is_that_of_the_codec(server: ModuleType) -> None:
    statistics = ActionStatistics.of(
        np.random.default_rng(0).uniform(-1, 1, (50, 7)), mask=(True,) * 6 + (False,)
    )
    codec = ActionCodec.openvla(statistics, chunk=8)
    indices = np.random.default_rng(1).integers(0, 256, (8, 7))
    mine = server.simulator_gripper(codec.decode(indices, executed=False))
    np.testing.assert_array_equal(mine, codec.decode(indices))
    assert server.simulator_gripper([[0.2] * 6 + [1.0], [0.2] * 6 + [0.0]])[:, 6].tolist() == [
        -1.0,
        1.0,
    ]  # 1 opens, which is -1


def test_prompt_and_proprioception(server: ModuleType) -> None:
    assert (
        server.prompt_of("Pick up the BOWL")
        == "In: What action should the robot take to pick up the bowl?\nOut:"
    )
    statistics = {"q01": [0.0, -1.0, 2.0], "q99": [1.0, 1.0, 4.0]}
    np.testing.assert_allclose(
        server.normalise_proprio([0.5, -1.0, 9.0], statistics), [0.0, -1.0, 1.0], atol=1e-7
    )
    assert (
        server.normalise_proprio([0.5, 0.5, 9.0], {**statistics, "mask": [True, True, False]})[2]
        == 1.0
    )  # clipped all the same
    with pytest.raises(ValueError, match="expected 3 proprioception values"):
        server.normalise_proprio([0.5, 1.0], statistics)


def test_which_statistics(server: ModuleType) -> None:
    four = [
        "libero_spatial_no_noops",
        "libero_object_no_noops",
        "libero_goal_no_noops",
        "libero_10_no_noops",
    ]
    key = server.statistics_key
    assert key(four, "libero_goal", "x") == "libero_goal_no_noops"
    assert (
        key(four, None, "openvla/openvla-7b-finetuned-libero-spatial") == "libero_spatial_no_noops"
    )
    assert key(["bridge_orig"], None, "openvla/openvla-7b") == "bridge_orig"
    assert key(["libero_10"], "libero_10", "x") == "libero_10"
    for asked, name in (
        ("libero_gaol", "x"),
        (None, "moojink/openvla-7b-oft-finetuned-libero-spatial-object-goal-10"),
    ):
        with pytest.raises(
            ValueError,
            match="expected --unnorm-key as one of libero_10_no_noops, libero_goal_no_noops",
        ):
            key(four, asked, name)


def test_messages_come_back_and_damaged_ones_are_refused(server: ModuleType) -> None:
    arrays = {
        "0/base": np.arange(24, dtype=np.uint8).reshape(2, 4, 3),
        "0/proprio": np.float32([0.5, -2.0]),
        "none": np.zeros((0, 3), np.float32),
    }
    message = server.pack({"kind": "act", "instructions": ["grüße"]}, arrays)
    header, back = server.read_message(io.BytesIO(message))
    assert header["instructions"] == ["grüße"] and list(back) == list(arrays)
    for name, array in arrays.items():
        np.testing.assert_array_equal(back[name], array)
    assert server.read_message(io.BytesIO(b"")) is None
    with pytest.raises(EOFError):
        server.read_message(io.BytesIO(message[:-1]))
    for damaged in (b"XXXX" + message[4:], message[:16] + b"[" + message[17:]):
        with pytest.raises(ValueError):
            server.read_message(io.BytesIO(damaged))
    with pytest.raises(ValueError, match="expected array a as uint8 or float32, found int64"):
        server.pack({"kind": "x"}, {"a": np.zeros(2, np.int64)})
    for entry, body in (
        ({"name": "a", "dtype": "uint8", "shape": [5]}, b"1234"),
        ({"name": "a", "dtype": "uint8", "shape": [3]}, b"1234"),
        ({"name": "a", "dtype": "object", "shape": [1]}, b"12345678"),
        ({"name": "a"}, b""),
        ({"name": "a", "dtype": "uint8", "shape": [-1]}, b"1234"),
    ):
        with pytest.raises(ValueError, match="expected"):
            server.unpack(json.dumps({"kind": "x", "arrays": [entry]}).encode(), body)


def test_serve_answers_and_survives_a_policy_that_raises(server: ModuleType) -> None:
    class Echo:
        def hello(self) -> dict[str, Any]:
            return {"name": "echo"}

        def act(self, seen: list[dict[str, Any]]) -> np.ndarray:
            assert sorted(seen[1]["images"]) == ["base", "wrist"], "one picture is missing"
            return np.stack([np.full((1, 2), o["proprio"].sum(), np.float32) for o in seen])

    def observation(i: int, cameras: tuple[str, ...]) -> dict[str, Any]:
        return {
            **{f"{i}/{c}": np.zeros((2, 2, 3), np.uint8) for c in cameras},
            f"{i}/proprio": np.float32([i, 1]),
        }

    ask = {"kind": "act", "number": 5, "instructions": ["a", "b"]}
    whole = observation(0, ("base", "wrist")) | observation(1, ("base", "wrist"))
    stdin = io.BytesIO(
        server.pack(ask, observation(0, ("base",)) | observation(1, ("base",)))
        + server.pack(ask, whole)
        + server.pack({"kind": "close"})
        + b"never read"
    )
    stdout = io.BytesIO()
    server.serve(Echo(), stdin, stdout)
    stdout.seek(0)
    hello, error, (header, arrays) = (server.read_message(stdout) for _ in range(3))
    assert (hello[0]["kind"], hello[0]["protocol"], hello[0]["name"]) == ("hello", 1, "echo")
    assert error[0]["kind"] == "error" and "one picture is missing" in error[0]["message"]
    assert (
        header["kind"] == "actions"
        and header["number"] == 5
        and arrays["actions"].tolist() == [[[1.0, 1.0]], [[2.0, 2.0]]]
    )
    assert server.read_message(stdout) is None
