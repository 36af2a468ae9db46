"""The task `verifiers` against the library verifiers itself: what is asked, said and paid, and what a bad environment costs."""

from __future__ import annotations

import base64
import io
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import mmrl
from mmrl.errors import ConfigError, DataError, MissingExtraError, RegistryError
from mmrl.registry import no_new_code, task_from_spec
from mmrl.rollout.episodes import begin, play_written
from mmrl.tasks.tool_calls import BadCall, read_calls
from mmrl.tasks.verifiers_chat import said, shown
from mmrl.tasks.verifiers_process import Settings, WorldError
from mmrl.tasks.verifiers_worlds import Verifiers, VerifiersEnvironment, _worlds
from mmrl.types import Sample, StopReason, Turn
from tests.kits.engine_kit import REPO, cli_here, config_file, policy, read_jsonl, small_run

HERE = REPO / "tests" / "tasks"
PYTHON = Path(sys.prefix) / "verifiers" / "bin" / "python"
needs_verifiers = pytest.mark.skipif(
    not PYTHON.is_file(), reason="verifiers is not set up; run: make dev"
)


def params(kind: str, options: Mapping[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    return {
        "env": "kinds",
        "args": {"kind": kind, **(options or {})},
        "folders": [str(HERE / "verifiers_worlds")],
        **more,
    }


def row(number: int = 0, split: str = "train") -> Sample:
    return Sample("1", "verifiers", "kinds", "", None, params={"row": number, "split": split})


def turn(text: str, stop: StopReason = StopReason.EOS) -> Turn:
    return Turn((1,), text, (0.0,), stop)


@pytest.fixture(scope="module", autouse=True)
def _worlds_end() -> Iterator[None]:
    """Processes start once for all tests, since importing verifiers takes seconds, and end with the last."""
    yield
    for settings in _ASKED:
        _worlds(settings).close()


_ASKED: set[Settings] = set()


def worlds(kind: str, options: Mapping[str, Any] | None = None, **more: Any) -> Verifiers:
    """The task."""
    task = task_from_spec("verifiers", params(kind, options, **more))
    assert isinstance(task, Verifiers)
    _ASKED.add(task.settings)
    return task


def made(task: Verifiers) -> VerifiersEnvironment:
    one = task.environment(policy().template)
    assert isinstance(one, VerifiersEnvironment)
    return one


def written(text: str | None, *calls: tuple[str, Mapping[str, Any]]) -> tuple[str, dict[str, Any]]:
    """What a policy writes, and the message that a server of OpenAI's API makes of it."""
    parts = [text or ""]
    parts += [
        f"<tool_call>\n{json.dumps({'name': n, 'arguments': a})}\n</tool_call>" for n, a in calls
    ]
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if calls:
        message["tool_calls"] = [
            {
                "id": f"id{number}",
                "type": "function",
                "function": {"name": name, "arguments": json.dumps(arguments)},
            }
            for number, (name, arguments) in enumerate(calls)
        ]
    return "\n".join(filter(None, parts)), message


# kind, options, row, limit on turns, answers
PLAYED: dict[str, tuple[str, dict[str, Any], int, int, list[tuple[str, dict[str, Any]]]]] = {
    "single right": ("single", {}, 1, 16, [written("<answer>4</answer>")]),
    "single wrong": ("single", {}, 0, 16, [written("I think that it is <answer>5</answer>")]),
    "multi found": ("multi", {}, 3, 16, [written("x"), written("9"), written("8")]),
    "multi lost": ("multi", {}, 2, 16, [written("1"), written("2"), written("3")]),
    "multi cut": ("multi", {"most": 9}, 2, 2, [written("1"), written("3")]),
    "tools": (
        "tools",
        {},
        2,
        16,
        [
            written(None, ("divide", {"a": 6, "b": 0})),
            written(
                "Again.",
                ("divide", {"a": 12, "b": 2}),
                ("note", {"text": "sechs – 6"}),
                ("absent", {}),
            ),
            written(None, ("divide", {"a": 1, "c": 2})),
            written("It is 6.0"),
        ],
    ),
    "stateful": (
        "stateful",
        {},
        1,
        16,
        [
            written(None, ("pay", {"amount": 4})),
            written(None, ("pay", {"amount": 3}), ("pay", {"amount": 1})),
            written("Done."),
        ],
    ),
    "pictures": ("pictures", {}, 0, 16, [written("red"), written("green")]),
    "several": ("several", {}, 0, 16, [written("<answer>2</answer>")]),
}


def flat(messages: Sequence[Mapping[str, Any]], pictures: Sequence[np.ndarray] = ()) -> list[Any]:
    """Messages of OpenAI's form or of transformers', comparable: role, texts, pictures as pixels, calls."""
    left, found = list(pictures), []
    for message in messages:
        content = message.get("content")
        parts: list[Any] = []
        for part in content if isinstance(content, list) else [{"type": "text", "text": content}]:
            if part["type"] == "text":
                parts += [part["text"]] if part["text"] else []
            elif part["type"] == "image":
                parts.append(left.pop(0).tobytes())
            else:
                url = part["image_url"]["url"]
                file = io.BytesIO(base64.b64decode(url.partition(",")[2]))
                parts.append(np.array(Image.open(file)).tobytes())
        calls = []
        for call in message.get("tool_calls") or []:
            arguments = call["function"]["arguments"]
            loaded = json.loads(arguments) if isinstance(arguments, str) else arguments
            calls.append((call["function"]["name"], loaded))
        found.append((message["role"], parts, calls))
    assert not left
    return found


@pytest.fixture(scope="module")
def theirs() -> dict[str, Any]:
    """What verifiers' own generate does with each of PLAYED."""
    asked = [
        {"kind": k, "options": o, "row": r, "answers": [message for _, message in answers[:limit]]}
        for k, o, r, limit, answers in PLAYED.values()
    ]
    program = str(HERE / "verifiers_peer.py")
    told = subprocess.run(
        [str(PYTHON), program],
        input=json.dumps(asked),
        text=True,
        capture_output=True,
        timeout=300,
    )
    assert told.returncode == 0, told.stderr
    return dict(zip(PLAYED, map(json.loads, told.stdout.splitlines()), strict=True))


@pytest.mark.slow
@needs_verifiers
@pytest.mark.parametrize("kind", ["single", "multi", "tools", "stateful", "pictures", "several"])
def test_a_rollout_is_the_one_that_verifiers_itself_plays(
    kind: str, theirs: dict[str, Any]
) -> None:
    played = {name: case for name, case in PLAYED.items() if case[0] == kind}
    for name, (_, options, number, limit, answers) in played.items():
        peer = theirs[name]
        task = worlds(kind, options, max_turns=limit, rewards=(-2, 2))
        one = made(task)
        shown_now = one.reset(row(number), 0)
        requests = peer["requests"]
        assert list(shown_now.tools) == (requests[0].get("tools") or [])
        chat = flat(shown_now.messages, shown_now.images)
        for place, (text, message) in enumerate(answers):
            assert chat == flat(requests[place]["messages"]), name
            outcome = one.step(turn(text))
            chat += flat([message])
            if outcome.observation is not None:
                chat += flat(outcome.observation.messages, outcome.observation.images)
        assert len(requests) == len(answers) and outcome.ended
        output = peer["output"]
        assert outcome.reward == pytest.approx(output["reward"]) == outcome.info["return"]
        assert output["metrics"].items() <= outcome.info.items()
        assert outcome.info["num_turns"] == len(answers) == outcome.info["turns"]
        assert outcome.truncated == output["is_truncated"] == (name == "multi cut")
        one.close()


@pytest.mark.slow
@needs_verifiers
def test_its_own_rows_are_samples_and_rewards_must_fit() -> None:
    narrow = worlds("single")
    with pytest.raises(ConfigError, match=r"0 to 1\.25, .*set params\.rewards: \[0, 1\.25\]"):
        list(narrow.load("train"))
    task = task_from_spec("verifiers", params("single", rewards=[0, 1.25]))
    assert task.value_range == (0, 1.25)
    train, held = list(task.load("train")), list(task.load("eval"))
    assert [s.id for s in train] == [f"train-{n}" for n in range(4)] and len(held) == 2
    assert train[1].question == "1 + 3?" and train[1].answer == "4"
    assert train[1].source == "kinds" and held[1].params == {"split": "eval", "row": 1}
    p = policy()
    rollouts = play_written(
        p,
        begin(p, held[1], task, 3, (1, 2)),
        [[turn(t)] for t in ("<answer>4</answer>", "four", "")],
    )
    assert [r.score.value for r in rollouts if r.score] == [1.25, 0.25, 0]
    assert not any(r.error for r in rollouts)  # an answer without a word is the policy's own
    assert [r.score.parsed for r in rollouts if r.score] == [True, True, False]
    with pytest.raises(DataError, match="row as a number from 0 and split as train or eval"):
        made(narrow).reset(Sample("1", "verifiers", "kinds", "", None), 0)


@pytest.mark.slow
@needs_verifiers
def test_a_bad_environment_costs_the_rollout_alone(tmp_path: Path) -> None:
    task = worlds("faulty", {"folder": str(tmp_path)}, answer_s=25.0, max_turns=3)
    p = policy()
    deeds = ["hang", "raise", "infra", "ask", "rewrite", "web", "go", "bad reward", "nan"]
    began = time.monotonic()
    rollouts = play_written(
        p, begin(p, row(), task, len(deeds), (1, 2)), [[turn(d), turn("end")] for d in deeds]
    )
    assert time.monotonic() - began < 150, "one waits, the others beside it"
    errors = dict(zip(deeds, (r.error or "" for r in rollouts), strict=True))
    assert "expected an answer within 25 s, found none; this rollout was given up" in errors["hang"]
    assert "KeyError: 'the world is broken'" in errors["raise"]
    assert "InfraError('no sandbox is left')" in errors["infra"]
    assert "expected a chat that only grows" in errors["ask"]
    assert "expected a chat that only grows" in errors["rewrite"]
    assert "none is fetched from an address" in errors["web"]
    assert "expected a finite reward, found nan" in errors["nan"]
    assert not errors["go"] and len(rollouts[6].turns) == 2
    judged = rollouts[7].score
    assert not errors["bad reward"] and judged is not None and judged.value == 0
    assert judged.metrics["reward_errors"] == 1
    # each has cleaned up, that which was given up among them, soon after its end
    while time.monotonic() - began < 60 and (tmp_path / "cleaned").stat().st_size < len(deeds):
        time.sleep(0.1)
    assert (tmp_path / "cleaned").read_text() == "x" * len(deeds)
    # a process that dies or hangs is replaced, and takes what was in it along
    for deed, why in (("die", "exited with status 7"), ("block", "was ended, with the other")):
        two = play_written(
            p,
            begin(p, row(), task, 2, (1, 2)),
            [[turn("go"), turn(deed)], [turn("go"), turn("go"), turn("end")]],
        )
        assert why in str(two[0].error) and two[1].error
    (again,) = play_written(p, begin(p, row(), task, 1, (1, 2)), [[turn("end")]])
    assert again.score is not None and again.score.value == 1


@pytest.mark.slow
@needs_verifiers
def test_rewards_of_a_group_are_refused() -> None:
    task = worlds("group")
    with pytest.raises(ConfigError, match="found best of 'kinds'"):
        list(task.load("train"))


@pytest.mark.slow
@needs_verifiers
def test_a_judge_is_asked_with_the_users_own_key(monkeypatch: pytest.MonkeyPatch) -> None:
    keys: list[Any] = []

    class Judge(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            keys.append(self.headers["Authorization"])
            verdict = "yes" if b"it is 2" in body else "no"
            choice = {
                "index": 0,
                "message": {"role": "assistant", "content": verdict},
                "finish_reason": "stop",
            }
            answer = {"id": "1", "object": "chat.completion", "created": 0, "model": "judge"}
            data = json.dumps({**answer, "choices": [choice]}).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            """Nothing."""

    server = HTTPServer(("127.0.0.1", 0), Judge)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("JUDGE_KEY", "secret-of-the-user")
    url = {"url": f"http://127.0.0.1:{server.server_address[1]}/v1"}
    try:
        task = worlds("judged", url)
        with pytest.raises(ConfigError, match="KeyError: 'JUDGE_K"):
            list(task.load("train"))  # a variable that was not named is not there
        task = worlds("judged", url, variables=["JUDGE_KEY"])
        p, rows = policy(), list(task.load("train"))
        rollouts = play_written(
            p, begin(p, rows[0], task, 2, (1, 2)), [[turn("it is 2")], [turn("it is 3")]]
        )
        assert [r.score.value for r in rollouts if r.score] == [1, 0]
        assert keys == ["Bearer secret-of-the-user"] * 2
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.slow
@needs_verifiers
def test_a_run_learns_from_it_and_an_evaluation_plays_it(tmp_path: Path) -> None:
    source = {"task": "verifiers", "params": params("multi", rewards=[-1, 1])}
    tree = small_run(
        tmp_path / "runs",
        "",
        data={"train": [{**source, "path": "train"}], "eval": [{**source, "path": "eval"}]},
        train={"steps": 1, "prompts_per_step": 2, "token_budget": 2000},
    )
    mmrl.Trainer(config=config_file(tmp_path / "c.yaml", tree), quiet=True).fit()
    rollouts = read_jsonl(tmp_path / "runs" / "run" / "rollouts" / "step_000001.jsonl")
    assert len(rollouts) == 6 and not any(r.get("error") for r in rollouts)
    assert {len(r["turns"]) for r in rollouts} <= {1, 2, 3}
    (result,) = (tmp_path / "runs").rglob("eval/step_000001/results.json")
    assert "wasted" in result.read_text()


@pytest.mark.slow
@needs_verifiers
def test_the_check_of_environments_passes(tmp_path: Path) -> None:
    given = params("tools")
    cli_here(
        *("env", "check", "verifiers", "--out", str(tmp_path / "check"), "--episodes", "2"),
        *("--param", "env=kinds", "--param", f"folders=[{given['folders'][0]}]"),
        *("--param", "args={kind: tools}"),
    )


# without verifiers


def test_parameters_that_make_no_environment_say_what_to_mend() -> None:
    for given, why in (
        ({}, "expected verifiers.env, the name of an environment"),
        ({"env": "x", "folders": "a"}, "expected verifiers.folders as a list of names"),
        ({"env": "x", "folders": ["/absent/folder"]}, "expected verifiers.folders as folders"),
        ({"env": "x", "max_turns": 0}, "expected verifiers.max_turns as a whole number"),
        ({"env": "x", "rewards": [1, 0]}, "expected verifiers.rewards as"),
        ({"env": "x", "errors": "ignore"}, "expected verifiers.errors as one of fail, score"),
        ({"env": "x", "args": {"a": {1}}}, "expected verifiers.args as names and plain values"),
        ({"env": "x", "pyhton": "y"}, "Did you mean"),
    ):
        with pytest.raises(ConfigError, match=why):
            task_from_spec("verifiers", {"python": sys.executable, **given})


def test_settings_that_were_found_start_no_program() -> None:
    for given in ({"python": sys.executable}, {"folders": ["."]}):
        with no_new_code("a found file"), pytest.raises(RegistryError, match="code to run"):
            task_from_spec("verifiers", {"env": "x", **given})


def test_a_python_without_verifiers_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    task = task_from_spec("verifiers", {"env": "x", "python": sys.executable})
    assert isinstance(task, Verifiers)
    with pytest.raises(ConfigError, match=r"expected the package verifiers in .*install it there"):
        list(task.load("train"))
    absent = task_from_spec("verifiers", {"env": "x", "python": str(tmp_path / "no")})
    with pytest.raises(ConfigError, match=r"expected verifiers\.python as a program"):
        list(absent.load("train"))
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    with pytest.raises(MissingExtraError, match="make it with: python3 -m venv"):
        task_from_spec("verifiers", {"env": "x"})


def test_turns_are_read_as_servers_read_them() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    good = '<tool_call>{"name": "f", "arguments": {"a": "é"}}</tool_call>'
    message, readable = said(f"<think>{good}</think>\nFirst.\n{good}{good}", 2, tools)
    assert readable and message["content"] == f"<think>{good}</think>\nFirst."
    assert [c["id"] for c in message["tool_calls"]] == ["call_2_1", "call_2_2"]
    assert message["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"a": "é"}'}
    broken = "<tool_call>{'name': 1}</tool_call>"
    assert said(broken, 1, tools) == ({"role": "assistant", "content": broken}, False)
    assert said(good, 1) == ({"role": "assistant", "content": good}, True)
    apart, _ = said("<think>why</think>\n\nthus", 1, tools, reasoning=True)
    assert apart == {"role": "assistant", "reasoning_content": "why", "content": "thus"}
    with pytest.raises(BadCall):
        read_calls(good + broken)


def test_chats_are_shown_with_their_calls_and_nothing_is_fetched() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages, pictures = shown(
        [
            {"role": "developer", "content": "Be good."},
            {"role": "assistant", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "1", "content": "ok"},
        ]
    )
    assert not pictures and [m["role"] for m in messages] == ["system", "assistant", "tool"]
    assert messages[1]["tool_calls"][0]["function"]["arguments"] == {"a": 1}
    for part, why in (
        ({"type": "input_audio", "input_audio": {}}, "found 'input_audio'"),
        ({"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}, "none is fetched"),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}, "a picture"),
        ("text", "expected contents"),
    ):
        with pytest.raises(WorldError, match=why):
            shown([{"role": "user", "content": [part]}])
    with pytest.raises(WorldError, match="found 'root'"):
        shown([{"role": "root", "content": ""}])
    assert issubclass(VerifiersEnvironment, mmrl.Environment)
