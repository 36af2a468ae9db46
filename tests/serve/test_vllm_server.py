"""`mmrl serve --engine vllm`: vLLM's own server with the prompts and limits of a checkpoint gives our engine's answers."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import openai
import pytest

from mmrl.registry import task_from_spec
from mmrl.tasks.scenes import make_scenes
from tests.kits.engine_kit import ENVIRONMENT, REPO, read_jsonl
from tests.kits.launch_kit import run_here
from tests.serve.serve_kit import CHECKPOINT, asking

pytestmark = pytest.mark.slow
START_S = 600.0


@contextmanager
def vllm_server(log: Path, *options: str) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """Its address and its process, once it answers; it is ended as a user would end it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with log.open("wb") as output:
        command = [
            sys.executable,
            "-m",
            "mmrl.cli.main",
            "serve",
            CHECKPOINT,
            "engine.vllm.kv_cache_gib=1",
            "--engine",
            "vllm",
            "--port",
            str(port),
            *options,
        ]
        quick = {
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "TORCH_COMPILE_DISABLE": "1",
        }
        (log.parent / "tmp").mkdir()
        process = subprocess.Popen(
            command,
            cwd=REPO,
            env={**ENVIRONMENT, **quick, "TMPDIR": str(log.parent / "tmp")},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + START_S
    try:
        while True:
            assert process.poll() is None and time.monotonic() < deadline, log.read_text(
                encoding="utf-8", errors="replace"
            )[-4000:]
            try:
                with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
                    assert answer.status == 200
                    break
            except (urllib.error.URLError, OSError):
                time.sleep(0.5)
        yield url, process
        process.send_signal(signal.SIGTERM)
        process.wait(120)
        assert not list((log.parent / "tmp").glob("mmrl-*")), "nothing of ours stays behind"
    finally:
        process.kill()
        process.wait(30)


KEY = "of-this-test"
SETTINGS = ("--config", str(REPO / "configs" / "demo.yaml"))


@pytest.fixture(scope="module")
def served(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """One server for all tests: it starts for half a minute. The last test ends it."""
    log = tmp_path_factory.mktemp("served") / "log.txt"
    with vllm_server(log, *SETTINGS, "--api-key", KEY) as found:
        yield found


def client_of(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0, timeout=120)


def test_greedy_answers_on_pictures_are_those_of_mmrl_eval(
    served: tuple[str, subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    data = make_scenes(str(tmp_path / "data"), 6, 7, 112, {0: 1.0}, "serve-", background="graded")
    of = ("--task", "grounding", "--data", data, "--out", str(tmp_path / "out"))
    asked = run_here("mmrl.cli.main", "eval", CHECKPOINT, *SETTINGS, *of)
    assert asked.returncode == 0, asked.stderr
    expected = read_jsonl(tmp_path / "out" / "predictions.jsonl")
    samples = list(task_from_spec("grounding", {"prompt": "{question}"}).load(data))
    with client_of(served[0]) as client:
        [model] = client.models.list().data
        for sample, row in zip(samples, expected, strict=True):
            content = asking(sample.question, *sample.images)
            answer = client.chat.completions.create(
                model=model.id,
                messages=[{"role": "user", "content": content}],
                temperature=0,
                max_tokens=24,
            )
            assert answer.choices[0].message.content == row["text"], sample.id
        assert len({row["text"] for row in expected}) > 1, "answers depend on the pictures"
        # nothing is fetched from elsewhere unless it is allowed
        with pytest.raises(openai.APIStatusError):
            remote = [
                {"type": "image_url", "image_url": {"url": "http://127.0.0.1:9/a.png"}},
                {"type": "text", "text": "where?"},
            ]
            client.chat.completions.create(
                model=model.id, messages=[{"role": "user", "content": remote}], max_tokens=4
            )


def test_its_key_is_asked_for_at_v1_alone(served: tuple[str, subprocess.Popen[bytes]]) -> None:
    """Why it may listen on this machine only. Should it be asked for everywhere, SECURITY.md and `mmrl serve` may say less."""
    url, _ = served
    body = json.dumps(
        {
            "messages": [{"role": "user", "content": "red circle"}],
            "max_tokens": 8,
            "temperature": 0,
        }
    ).encode()

    def posted(path: str, **headers: str) -> tuple[int, str]:
        request = urllib.request.Request(
            url + path, body, {"Content-Type": "application/json", **headers}
        )
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                return answer.status, json.load(answer)["choices"][0]["message"]["content"]
        except urllib.error.HTTPError as error:
            return error.code, ""

    assert posted("/v1/chat/completions")[0] == 401
    asked = posted("/v1/chat/completions", Authorization=f"Bearer {KEY}")
    assert asked[0] == 200 and posted("/invocations") == asked


def test_running_requests_may_end(served: tuple[str, subprocess.Popen[bytes]]) -> None:
    """--grace: vLLM's own default cuts them off."""
    url, process = served
    with client_of(url) as client:
        [model] = client.models.list().data
        answer = client.chat.completions.create(
            model=model.id,
            messages=[{"role": "user", "content": "red circle"}],
            max_tokens=1500,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        ends = [next(answer).choices[0].finish_reason]
        process.send_signal(signal.SIGTERM)
        ends += [chunk.choices[0].finish_reason for chunk in answer]
    assert ends[-1] == "length" and set(ends[:-1]) == {None}
    assert process.wait(120) == 0
