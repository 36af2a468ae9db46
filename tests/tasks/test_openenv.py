"""The task `openenv` against OpenEnv's own servers and client: what is shown, done and paid, and what a bad server costs."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mmrl
from mmrl.errors import ConfigError, DataError, MissingExtraError
from mmrl.registry import task_from_spec
from mmrl.rollout import PrefillOnceEngine, SamplingSettings
from mmrl.rollout.episodes import begin, play, play_written
from mmrl.tasks.openenv_actions import ActionForm, NoAction, tools_described
from mmrl.tasks.openenv_client import Refused, ServerError, Session
from mmrl.tasks.openenv_views import seen
from mmrl.tasks.openenv_worlds import OpenEnvEnvironment
from mmrl.types import Sample, StopReason, Turn
from tests.kits.engine_kit import REPO, cli_here, config_file, policy, read_jsonl, small_run

SERVED = Path(sys.prefix) / "openenv" / "bin" / "python"
PROGRAM = str(REPO / "tests" / "tasks" / "openenv_server.py")
WALK = {"properties": {"by": {"type": "integer", "minimum": -2, "maximum": 2}}, "required": ["by"]}
needs_server = pytest.mark.skipif(
    not SERVED.is_file(), reason="OpenEnv's server is not set up; run: make dev"
)


@contextlib.contextmanager
def serving(*, former: bool = False, port: int = 0) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """A real server in a process of its own; `former`: of openenv-core 0.3.0 instead of openenv 0.10.0."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    if former:
        environment["PYTHONPATH"] = str(SERVED.parents[1] / "former")
    server = subprocess.Popen(
        [str(SERVED), PROGRAM, "serve", str(port)],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    try:
        assert server.stdout is not None
        bound = server.stdout.readline().strip()
        assert bound, f"the server ended with {server.wait()}"
        yield f"http://127.0.0.1:{bound}", server
    finally:
        server.kill()
        server.wait()
        if server.stdout is not None:
            server.stdout.close()


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with serving() as (url, _):
        yield url


@pytest.fixture(scope="module")
def former() -> Iterator[str]:
    with serving(former=True) as (url, _):
        yield url


def row(seed: int | None = 3, question: str = "", **params: Any) -> Sample:
    own = params if seed is None else {"seed": seed, **params}
    return Sample("1", "openenv", "worlds", question, None, params=own)


def said(text: str) -> Turn:
    return Turn((1,), text, (0.0,), StopReason.EOS)


def words(observation: mmrl.Observation | None) -> str:
    assert observation is not None
    return str(observation.messages[-1]["content"][-1]["text"])


@contextlib.contextmanager
def world(url: str, **options: Any) -> Iterator[OpenEnvEnvironment]:
    one = OpenEnvEnvironment(url, **options)
    try:
        yield one
    finally:
        one.close()


# against OpenEnv's own client


@pytest.mark.slow
@needs_server
@pytest.mark.parametrize("release", ["server", "former"])
def test_an_episode_is_the_one_that_openenvs_client_plays(
    release: str, request: pytest.FixtureRequest
) -> None:
    url = f"{request.getfixturevalue(release)}/walk"
    rng = np.random.default_rng(0)
    asked = [
        {"seed": seed, "actions": [{"by": int(by)} for by in rng.integers(-2, 3, 6)]}
        for seed in range(6)
    ]
    for episode in asked:  # an environment that is over is not asked any more
        with Session(url) as session:
            session.reset({"seed": episode["seed"]})
            for number, action in enumerate(episode["actions"], 1):
                answer = session.step(action)
                assert not isinstance(answer, Refused)
                if answer.done:
                    del episode["actions"][number:]
                    break
    played = subprocess.run(
        [str(SERVED), PROGRAM, "play", url],
        input="".join(json.dumps(a) + "\n" for a in asked),
        text=True,
        capture_output=True,
        check=True,
        timeout=120,
    )
    theirs = [json.loads(line) for line in played.stdout.splitlines()]
    assert len(theirs) == len(asked) and any(t["steps"][-1]["done"] for t in theirs)
    for episode, told in zip(asked, theirs, strict=True):
        with world(url, rewards=(-5, 5)) as one:
            first = one.reset(row(episode["seed"]), 0)
            assert told["first"]["text"] in words(first)
            shown = seen({"screen": told["first"]["screen"]})[1]
            np.testing.assert_array_equal(first.images[0], shown[0])
            total = 0.0
            for action, step in zip(episode["actions"], told["steps"], strict=True):
                outcome = one.step(said(str(action["by"])))
                total += step["reward"]
                assert outcome.info["return"] == pytest.approx(total)
                assert outcome.terminated == step["done"]
                if not step["done"]:
                    assert words(outcome.observation) == step["observation"]["text"]


@pytest.mark.slow
@needs_server
@pytest.mark.parametrize("release", ["server", "former"])
def test_tools_of_mcp_are_called_and_paid(release: str, request: pytest.FixtureRequest) -> None:
    with world(f"{request.getfixturevalue(release)}/tools") as one:
        first = one.reset(row(3), 0)
        assert words(first) == "Make the sum 4, then submit it."
        add, submit = (t["function"] for t in first.tools)
        assert (
            add["name"] == "add" and add["parameters"]["properties"]["number"]["type"] == "integer"
        )
        assert submit["description"] == "Hand the sum in."
        none = one.step(said("I would add four"))
        assert (
            not none.parsed
            and words(none.observation) == "Error: expected a tool call. Call one tool."
        )
        call = '<tool_call>{"name": "add", "arguments": {"number": %s}}</tool_call>'
        wrong = one.step(said(call % '"x"'))
        assert words(wrong.observation).startswith("Error: 1 validation error")
        added = one.step(said(call % 4))
        assert added.observation is not None and added.observation.messages[0]["role"] == "tool"
        assert words(added.observation) == "The sum is 4." and added.reward == 0
        over = one.step(said('<tool_call>{"name": "submit", "arguments": {}}</tool_call>'))
        assert over.terminated and over.reward == 1 and over.info["success"] == 1
        assert over.info["bad_actions"] == 1 and over.info["actions"] == 4


@pytest.mark.slow
@needs_server
def test_what_is_no_action_is_told_and_changes_nothing(server: str) -> None:
    with world(f"{server}/walk") as one:
        first = one.reset(row(3, "Go.", reset={"start": 1}), 0)
        assert words(first) == (
            "Go.\nYou are at 1, the goal is at 2.\nReply with the action's by (integer, at least -2, at most 2): steps to the right"
        )
        for text, why in (
            ("two", "Error: expected integer."),
            ("9", "Error: by: Input should be less than or equal to 2."),
            ("true", "Error: expected integer."),
        ):
            outcome = one.step(said(text))
            assert not outcome.parsed and outcome.reward == 0
            assert words(outcome.observation).startswith(why)
        assert "at 0," in words(one.step(said("<think>1?</think> <answer>-1</answer>")).observation)
    with world(f"{server}/walk", actions={"left": -1, "right": {"by": 1}}) as named:
        assert words(named.reset(row(3), 0)).endswith("Reply with one of: left, right.")
        assert "at 1," in words(named.step(said("Right.")).observation)


@pytest.mark.slow
@needs_server
def test_a_bad_server_costs_the_rollout_alone(server: str) -> None:
    p = policy()
    task = task_from_spec("openenv", {"url": f"{server}/faulty", "answer_s": 1.0, "max_turns": 2})
    deeds = ["hang", "raise", "go", "end"]
    episodes = begin(p, row(), task, len(deeds), (1, 2))
    began = time.monotonic()
    rollouts = play_written(p, episodes, [[said(deed), said("end")] for deed in deeds])
    assert time.monotonic() - began < 10
    errors = [r.error or "" for r in rollouts]
    assert "expected an answer to the step within 1 s, found none" in errors[0]
    assert "EXECUTION_ERROR: the world is broken" in errors[1]
    assert not errors[2] and not errors[3] and len(rollouts[2].turns) == 2
    assert rollouts[3].score is not None and rollouts[3].score.value == 1
    with world(f"{server}/faulty", errors="tell") as one:
        one.reset(row(), 0)
        told = one.step(said("raise"))
        assert not told.parsed and words(told.observation).startswith("Error: the world is broken.")
        assert one.step(said("end")).terminated


@pytest.mark.slow
@needs_server
def test_a_server_that_dies_is_found_again_by_the_next_episode() -> None:
    with serving() as (url, process), world(f"{url}/faulty") as one:
        one.reset(row(), 0)
        with pytest.raises(ServerError, match="expected an answer to the step, found the end"):
            one.step(said("die"))
        assert process.wait(10) == 7
        with pytest.raises(ServerError, match="expected an open connection, found a closed one"):
            one.step(said("go"))
        again = threading.Thread(target=one.reset, args=(row(), 0))
        again.start()  # while nobody listens
        time.sleep(0.3)
        with serving(port=int(url.rpartition(":")[2])) as (_, process):
            again.join(30)
            assert one.step(said("end")).terminated
            # in the middle of rollouts it costs each that was open, and nothing else
            task = task_from_spec("openenv", {"url": f"{url}/faulty", "max_turns": 4})
            episodes = begin(policy(), row(), task, 3, (1, 2))
            turns = [["end"], ["go", "die"], ["go", "go", "go"]]
            played = play_written(policy(), episodes, [[said(t) for t in ts] for ts in turns])
            assert process.wait(10) == 7
            assert [bool(r.error) for r in played] == [False, True, True]
            assert "found the end of the connection" in str(played[1].error)
            assert played[0].score is not None and played[0].score.value == 1
    with (
        world(url, connect_s=0.2) as late,
        pytest.raises(ServerError, match=r"within 0\.2 s, found none.*start it, or mend"),
    ):
        late.reset(row(), 0)


@pytest.mark.slow
@needs_server
def test_taken_sessions_are_waited_for_and_told(server: str) -> None:
    with world(f"{server}/one") as first, world(f"{server}/one", connect_s=0.5) as second:
        first.reset(row(), 0)
        with pytest.raises(ServerError, match="max_concurrent_envs of at least"):
            second.reset(row(), 0)
        threading.Timer(0.1, first.close).start()
        with world(f"{server}/one") as third:
            assert "You are at 0" in words(third.reset(row(), 0))


@pytest.mark.slow
@needs_server
def test_a_run_learns_from_it_and_an_evaluation_plays_it(server: str, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"id": str(n), "seed": n}) + "\n" for n in range(4)))
    source = {
        "task": "openenv",
        "path": str(rows),
        "params": {"url": f"{server}/walk", "actions": [0, 1, 2], "max_turns": 2},
    }
    tree = small_run(
        tmp_path / "runs",
        "",
        data={"train": [source], "eval": [source]},
        train={"steps": 1, "prompts_per_step": 2, "token_budget": 2000},
    )
    cli_here("train", config_file(tmp_path / "c.yaml", tree))
    rollouts = read_jsonl(tmp_path / "runs" / "run" / "rollouts" / "step_000001.jsonl")
    assert len(rollouts) == 6 and not any(r.get("error") for r in rollouts)
    (result,) = (tmp_path / "runs").rglob("eval/step_000001/results.json")
    assert "success" in result.read_text()


@pytest.mark.slow
@needs_server
def test_the_check_of_environments_passes(server: str, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"id": str(n), "seed": n}) + "\n" for n in range(2)))
    cli_here(
        *("env", "check", "openenv", "--data", str(rows), "--out", str(tmp_path / "check")),
        *("--param", f"url={server}/walk", "--param", "rewards=[-5, 5]"),
    )


# junk that no server of OpenEnv sends


@contextlib.contextmanager
def answering(answer: str | bytes) -> Iterator[str]:
    from websockets.sync.server import serve

    def handle(connection: Any) -> None:
        with contextlib.suppress(Exception):
            for _ in connection:
                connection.send(answer)

    with serve(handle, "127.0.0.1", 0, max_size=None) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"ws://127.0.0.1:{server.socket.getsockname()[1]}"
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ("junk", "expected JSON, found 'junk'"),
        ("[" * 100_000, "expected JSON"),
        ("[1]", r"expected \{.*observation"),
        ('{"type": "state", "data": {}}', r"expected \{.*observation"),
        ('{"type": "observation", "data": {}}', "expected an observation with fields"),
        (
            '{"type": "observation", "data": {"observation": {}, "reward": "1", "done": false}}',
            "expected a reward as a number or null",
        ),
        (
            '{"type": "observation", "data": {"observation": {}, "reward": 1, "done": 0}}',
            "expected done as true or false",
        ),
        (
            '{"type": "observation", "data": {"observation": {}, "reward": 1%s, "done": true}}'
            % ("0" * 400),
            "expected a reward as a number",
        ),
        (
            '{"type": "observation", "data": {"observation": {}, "reward": 1e999, "done": true}}',
            "expected a finite reward, found inf",
        ),
        (
            '{"type": "error", "data": {"code": "X\\u001b[2J", "message": 3}}',
            r"its error X \[2J: 3",
        ),
        (b"\xff\xfe\x00", "expected JSON"),
    ],
)
def test_junk_is_an_error_of_its_rollout(answer: str | bytes, why: str) -> None:
    with answering(answer) as url, Session(url, connect_s=2) as session:
        with pytest.raises(ServerError, match=why) as found:
            session.reset({})
        assert url in str(found.value) and str(found.value).isprintable()


@pytest.mark.slow
def test_a_server_that_says_nothing_and_one_that_redirects_are_left() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        began = time.monotonic()
        with Session(url, connect_s=0.6) as session:
            with pytest.raises(ServerError, match="expected a WebSocket within"):
                session.reset({})
            with pytest.raises(
                ServerError, match=r"expected JSON of GET /schema within 0\.6 s, found none"
            ):
                session.schema()
        assert time.monotonic() - began < 4

        def redirect() -> None:
            while True:
                try:
                    connection, _ = silent.accept()
                except OSError:
                    return
                with connection, contextlib.suppress(OSError):
                    connection.recv(4096)
                    connection.sendall(
                        b"HTTP/1.1 307 Moved\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n"
                    )

        threading.Thread(target=redirect, daemon=True).start()
        with Session(url, connect_s=2) as session:
            with pytest.raises(ServerError, match="found status 307"):
                session.reset({})
            with pytest.raises(ServerError, match="found status 307"):
                session.schema()


def test_a_proxy_before_a_server_that_starts_is_asked_again() -> None:
    from websockets.sync.server import serve

    begun = '{"type": "observation", "data": {"observation": {}, "reward": null, "done": false}}'
    asked = list[str]()

    def not_yet(connection: Any, request: Any) -> Any:
        asked.append(request.path)
        return connection.respond(503, "starting") if len(asked) < 3 else None

    def handle(connection: Any) -> None:
        for _ in connection:
            connection.send(begun)

    with serve(handle, "127.0.0.1", 0, process_request=not_yet) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.socket.getsockname()[1]}"
        with Session(url, connect_s=5) as session:
            assert session.reset({}).reward is None
        assert asked == ["/ws"] * 3
        server.shutdown()


def test_a_server_that_begins_no_tls_is_left() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        session = Session(f"https://127.0.0.1:{silent.getsockname()[1]}", connect_s=0.2)
        found = list[Exception]()

        def ask() -> None:
            for asked in (session.schema, lambda: session.reset({})):
                with pytest.raises(ServerError, match=r"within 0\.2 s, found none") as error:
                    asked()
                found.append(error.value)

        asking = threading.Thread(target=ask, daemon=True)
        asking.start()
        asking.join(10)
        assert len(found) == 2, "it waits for the handshake without end"


def test_a_server_that_tells_no_schema_is_waited_for_once_by_all() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        began = time.monotonic()
        with ThreadPoolExecutor(6) as threads:
            asked = [threads.submit(Session(url, connect_s=0.5).schema) for _ in range(6)]
            errors = [str(a.exception()) for a in asked]
        assert time.monotonic() - began < 1.5
    assert len(set(errors)) == 1 and "within 0.5 s, found none" in errors[0]


def test_a_number_that_json_has_not_is_told_and_not_sent() -> None:
    begun = '{"type": "observation", "data": {"observation": {}, "reward": null, "done": false}}'
    one = OpenEnvEnvironment("http://127.0.0.1:1")
    with answering(begun) as url, Session(url, connect_s=2) as one.session:
        one.session.reset({})
        one.form = ActionForm.of({"properties": {"by": {"type": "number"}}, "required": ["by"]})
        refused = one.step(Turn((1,), "1e999", (0.0,), StopReason.EOS))
        assert not refused.parsed and refused.info["bad_actions"] == 1
        assert one.step(Turn((1,), "1e3", (0.0,), StopReason.EOS)).parsed, "the episode goes on"


def test_ten_tenths_are_a_success() -> None:
    one = OpenEnvEnvironment("http://127.0.0.1:1")
    paid = '{"type": "observation", "data": {"observation": {}, "reward": 0.1, "done": %s}}'
    one.form = ActionForm.of(WALK)
    with answering(paid % "false") as url, Session(url, connect_s=2) as one.session:
        one.session.reset({})
        for _ in range(9):
            assert not one.step(Turn((1,), "1", (0.0,), StopReason.EOS)).ended
    with answering(paid % "true") as url, Session(url, connect_s=2) as one.session:
        one.session.reset({})
        last = one.step(Turn((1,), "1", (0.0,), StopReason.EOS))
    assert last.info["return"] == pytest.approx(1.0) and last.info["return"] < 1.0
    assert last.terminated and last.info["success"] == 1.0


# actions


@pytest.mark.parametrize(
    ("schema", "options", "text", "action"),
    [
        (WALK, {}, "2", {"by": 2}),
        (WALK, {}, "<think>1</think><answer> -1 </answer>", {"by": -1}),
        (WALK, {"actions": ["left", "Right"]}, "right.", {"by": 1}),
        (WALK, {"actions": ["go", "stop!", "go."]}, "Stop!", {"by": 1}),
        (WALK, {"actions": ["go", "stop!", "go."]}, "go.", {"by": 2}),
        ({"properties": {"way": {"type": "string"}}}, {"actions": ["N", "S"]}, "s", {"way": "S"}),
        ({"properties": {"by": {"type": ["integer", "null"]}}}, {}, "3", {"by": 3}),
        ({"properties": {"by": {"type": ["integer", "string"]}}}, {}, "3", {"by": "3"}),
        (WALK, {"actions": [".", "go!"]}, ".", {"by": 0}),
        (WALK, {"actions": [".", "go!"]}, "GO!", {"by": 1}),
        (WALK, {"actions": [7, 8]}, "8.", {"by": 1}),
        ({"properties": {"message": {"type": "string"}}}, {}, " 17 ", {"message": "17"}),
        (
            {"properties": {"code": {"type": "string"}, "metadata": {"type": "object"}}},
            {},
            "print({})",
            {"code": "print({})"},
        ),
        (
            {"properties": {"a": {"type": "number"}, "b": {"type": "string"}}},
            {},
            '```json\n{"a": 1.5, "b": "x"}\n```',
            {"a": 1.5, "b": "x"},
        ),
        (
            {"properties": {"a": {"type": "number"}, "b": {"type": "string"}}, "required": ["b"]},
            {"only": "b"},
            "x",
            {"b": "x"},
        ),
        (
            {"properties": {"kind": {"const": "say"}, "words": {"type": "string"}}},
            {},
            "hello",
            {"kind": "say", "words": "hello"},
        ),
        (
            {
                "$defs": {"Way": {"enum": ["N", "S"]}},
                "properties": {"way": {"$ref": "#/$defs/Way"}},
            },
            {},
            "S",
            {"way": "S"},
        ),
        (
            {"properties": {"on": {"anyOf": [{"type": "boolean"}, {"type": "null"}]}}},
            {},
            "true",
            {"on": True},
        ),
    ],
)
def test_a_turn_becomes_an_action_of_the_schema(
    schema: Any, options: Any, text: str, action: Any
) -> None:
    assert ActionForm.of(schema, **options).action(text) == action


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        (WALK, "two"),
        (WALK, "true"),
        (WALK, ""),
        (WALK, "[1]"),
        ({"properties": {"way": {"enum": ["N", "S"]}}}, "W"),
        ({"properties": {"a": {}, "b": {}}}, "[]"),
        ({"properties": {"a": {}, "b": {}}}, '{"a": 1, "a": 2}'),
        ({"properties": {"a": {}, "b": {}}}, "{" * 100_000),
        (WALK, "1" * 200_000),
    ],
)
def test_what_names_no_action_is_told(schema: Any, text: str) -> None:
    with pytest.raises(NoAction):
        ActionForm.of(schema).action(text)


def test_turns_drawn_at_random_are_actions() -> None:
    rng = np.random.default_rng(0)
    two = {"properties": {"a": {"type": "boolean"}, "b": {"enum": ["x", "y"]}}}
    tools = [{"name": "add", "inputSchema": {"properties": {"number": {"type": "integer"}}}}]
    for form in (
        ActionForm.of(WALK),
        ActionForm.of(WALK, actions=["a", "b"]),
        ActionForm.of(two),
        ActionForm.of({}, tools=tools),
    ):
        assert len({json.dumps(form.action(form.random(rng))) for _ in range(40)}) > 1
    assert tools_described([{"name": "x"}])[0]["function"]["parameters"]["type"] == "object"


@pytest.mark.parametrize(
    ("one", "low", "high"),
    [
        ({"type": "number", "minimum": 0.2, "maximum": 0.8}, 0.2, 0.8),
        ({"type": "integer", "minimum": 3, "maximum": 2**64 - 1}, 3, 12),
        ({"type": "integer", "maximum": -4}, -4, -4),
        ({"type": ["integer", "null"], "minimum": "none"}, 0, 9),
    ],
)
def test_numbers_drawn_at_random_are_within_the_schemas_bounds(
    one: Any, low: float, high: float
) -> None:
    form, rng = ActionForm.of({"properties": {"v": one}}), np.random.default_rng(0)
    drawn = [form.action(form.random(rng))["v"] for _ in range(20)]
    assert all(low <= v <= high for v in drawn), drawn
    assert all(type(v) is (float if one["type"] == "number" else int) for v in drawn)


def test_no_tool_is_left_out_and_a_cut_description_says_so() -> None:
    with pytest.raises(ConfigError, match="at most 64 tools of an OpenEnv environment, found 65"):
        ActionForm.of({}, tools=[{"name": f"t{n}"} for n in range(65)])
    known = ActionForm.of({}, tools=[{"name": f"t{n}"} for n in range(64)]).tools
    assert len(tools_described(known)) == 64
    (told,) = tools_described([{"name": "x", "description": "a" * 2_001}])
    assert told["function"]["description"] == "a" * 2_000 + " [cut]"
    form = ActionForm.of({"properties": {"n": {"enum": list(range(130))}}})
    assert "98, 99 and 30 more" in form.words


def test_parameters_that_do_not_fit_the_schema_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"expected openenv\.field as a field.*\(by\), found 'bi'"
    ):
        ActionForm.of(WALK, only="bi")
    with pytest.raises(ConfigError, match=r"expected openenv\.actions as name: \{field: value"):
        ActionForm.of({"properties": {"a": {}, "b": {}}}, actions=["left"])


# observations


def test_observations_are_text_and_pictures() -> None:
    import base64
    import io

    from PIL import Image

    file = io.BytesIO()
    picture = np.random.default_rng(0).integers(0, 256, (20, 30, 3), np.uint8)
    Image.fromarray(picture).save(file, "PNG")
    coded = base64.b64encode(file.getvalue()).decode()
    assert seen({"text": "hi", "metadata": {}, "none": None}) == ("hi", [])
    assert seen({"a": "x", "n": [1, 2]})[0] == "a: x\nn: [1, 2]"
    assert seen({"a": "x", "n": 3}, fields=["n"])[0] == "3"
    for field in (coded, f"data:image/png;base64,{coded}", [coded], {"image": coded}):
        text, (found,) = seen({"text": "hi", "shot": field})
        assert text == "hi"
        np.testing.assert_array_equal(found, picture)
    (found,) = seen({"shot": picture.tolist()}, pictures=["shot"])[1]
    np.testing.assert_array_equal(found, picture)
    flat = {"shot": picture.ravel().tolist(), "shot_shape": [20, 30, 3], "text": "hi"}
    text, (found,) = seen(flat, pictures=["shot"])
    assert text == "hi" and np.array_equal(found, picture)
    (grey,) = seen({"shot": [[0, 255]]}, pictures=["shot"])[1]
    assert grey.shape == (1, 2, 3)
    contents = [{"type": "text", "text": "one"}, {"type": "image", "data": coded}]
    text, (found,) = seen({"tool_name": "look", "result": {"content": contents}, "error": None})
    assert text == "one" and np.array_equal(found, picture)
    assert "left out" in seen({"text": "x" * 1000}, most_chars=100)[0]
    assert seen({"text": "iVBORw0KGgo is how PNG begins " * 9})[1] == []


@pytest.mark.parametrize(
    ("observation", "options", "why"),
    [
        ({"a": 1}, {"fields": ["b"]}, "expected the field 'b' of an observation, found a"),
        ({"a": "data:image/png;base64,QUJD"}, {}, "expected a picture in the observation"),
        ({"a": "data:image/png;base64,*"}, {}, "expected base64 of a picture"),
        ({"a": [[300]]}, {"pictures": ["a"]}, r"expected numbers 0\.\.255"),
        ({"a": [[-1]]}, {"pictures": ["a"]}, r"expected numbers 0\.\.255"),
        ({"a": [1, 2]}, {"pictures": ["a"]}, r"expected numbers 0\.\.255"),
        ({"a": [1, 2], "a_shape": [3, 3]}, {"pictures": ["a"]}, r"expected numbers 0\.\.255"),
        ({"a": [[1], [2, 3]]}, {"pictures": ["a"]}, r"expected numbers 0\.\.255"),
        ({"a": "x"}, {"pictures": ["a"]}, "found a text"),
        (
            {"a": [[1]], "b": [[1]]},
            {"pictures": ["a", "b"], "most_pictures": 1},
            "at most 1 pictures",
        ),
    ],
)
def test_observations_that_cannot_be_shown_are_errors(
    observation: Any, options: Any, why: str
) -> None:
    with pytest.raises(ServerError, match=why):
        seen(observation, **options)


# parameters


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"url": ""}, "expected openenv.url, the address of a running server"),
        ({"url": "ftp://x"}, "expected openenv.url as the address"),
        ({"url": "http://"}, "expected openenv.url as the address"),
        ({"url": "http://x?a=1"}, "expected openenv.url as the address"),
        ({"url": "http://a:secret@x"}, "without a name and a password"),
        ({"key_env": "MMRL_NO_SUCH_KEY"}, "in the environment variable MMRL_NO_SUCH_KEY"),
        ({"answer_s": 0}, "expected openenv.answer_s as a number from 0.1"),
        ({"max_turns": 0}, "expected openenv.max_turns as a whole number of at least 1"),
        ({"reward": "mean"}, "expected openenv.reward as one of sum, last, found 'mean'"),
        ({"errors": "hide"}, "expected openenv.errors as one of fail, tell"),
        ({"tools": "yes"}, "expected openenv.tools as one of auto"),
        ({"actions": ["a", "A"]}, "as different names"),
        ({"tools": True, "actions": ["a", "b"]}, "tools: true without openenv.actions"),
        ({"tools": True, "field": "a"}, "tools: true without openenv.field"),
        ({"prompt": "go"}, "contains {observation}"),
        ({"rewards": (1, 1)}, "expected openenv.rewards as (lowest, highest)"),
        ({"rewards": 5}, "expected openenv.rewards as (lowest, highest)"),
        ({"rewards": "01"}, "expected openenv.rewards as (lowest, highest)"),
        ({"success_at": "1"}, "expected openenv.success_at as the sum"),
        ({"fields": "text"}, "expected openenv.fields as a list of names"),
        ({"pictures": "screen"}, "expected openenv.pictures as a list of names"),
        ({"reset": [1]}, "expected openenv.reset as a mapping"),
        ({"prompt": 3}, "contains {observation}"),
        ({"actions": 5}, "expected openenv.actions as a list of names"),
        ({"actions": ["left", True]}, "YAML reads yes, no, on and off as truth values"),
        ({"actions": {False: 0, True: 1}}, "YAML reads yes, no, on and off as truth values"),
    ],
)
def test_parameters_that_make_no_environment_are_refused(options: Any, why: str) -> None:
    with pytest.raises(ConfigError) as refused:
        OpenEnvEnvironment(**{"url": "http://127.0.0.1:1", **options})
    assert why in str(refused.value) and "secret" not in str(refused.value)


def test_rows_that_make_no_episode_are_refused() -> None:
    for params in ({"seed": -1}, {"seed": "3"}, {"seed": 1, "reset": [1]}):
        one = OpenEnvEnvironment("http://127.0.0.1:1")
        with pytest.raises(DataError, match="expected seed as a whole number from 0 and reset"):
            one.reset(Sample("1", "openenv", "worlds", "", None, params=params), 0)


def test_the_address_is_the_users_alone() -> None:
    from mmrl.config.trust import params_found

    found = params_found({"url": "http://x", "reset": {"level": 1}, "key_env": "KEY"})
    assert "url" not in found.kept and found.left_out == ("params.url",)


def test_without_websockets_it_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"websockets for the task openenv.*\[openenv\]"):
        OpenEnvEnvironment("http://127.0.0.1:1")


@pytest.mark.slow
@needs_server
def test_a_policy_plays_it(server: str) -> None:
    p = policy()
    task = task_from_spec("openenv", {"url": f"{server}/walk", "max_turns": 2})
    assert task.name == "openenv" and task.headline == "success"
    episodes = begin(p, row(), task, 3, (1, 2))
    (rollouts,) = play(p, PrefillOnceEngine(p), [episodes], SamplingSettings(max_new_tokens=4))
    for rollout in rollouts:
        assert rollout.error is None and len(rollout.turns) == 2 and rollout.truncated
        assert rollout.info["actions"] == 2.0
