"""A viewer as users start it: `mmrl view` in a process of its own, asked over HTTP."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest

from tests.report.conftest import Plan, make_run

ROOT = Path(__file__).resolve().parents[2]


@dataclass
class Answer:
    """What a request was answered."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        """The body; numbers that strict JSON does not have are refused."""

        def refuse(name: str) -> None:
            raise AssertionError(f"{name} is no JSON")

        return json.loads(self.body, parse_constant=refuse)


@dataclass
class Viewer:
    """A running viewer."""

    process: subprocess.Popen[str]
    port: int
    said: str

    @property
    def url(self) -> str:
        """The address of the page."""
        return f"http://127.0.0.1:{self.port}"

    def raw(self, target: str, method: str = "GET", **headers: str) -> Answer:
        """The answer to exactly this request target."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=240)
        sent = {
            "host": f"127.0.0.1:{self.port}",
            **{k.replace("_", "-"): v for k, v in headers.items()},
        }
        connection.putrequest(method, target, skip_host=True, skip_accept_encoding=True)
        for name, value in sent.items():
            connection.putheader(name, value)
        connection.endheaders()
        found = connection.getresponse()
        answer = Answer(found.status, {k.lower(): v for k, v in found.getheaders()}, found.read())
        connection.close()
        return answer

    def get(self, path: str, **query: Any) -> Answer:
        """The answer to a request with this query; lists become repeated parameters."""
        return self.raw(
            f"{path}?{urlencode(query, doseq=True, errors='surrogatepass')}" if query else path
        )


@contextmanager
def viewers() -> Iterator[Callable[..., Viewer]]:
    """start(folder, *options) starts a viewer; all are ended with the block."""
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: str | Path) -> Viewer:
        process = subprocess.Popen(
            [sys.executable, "-m", "mmrl.cli.main", "view", *map(str, arguments), "--port", "0"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200"},
        )
        started.append(process)
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.search(r"viewer: http://\S+?:(\d+)/", line)
        assert found, line + process.stdout.read()
        return Viewer(process, int(found.group(1)), line)

    yield start
    for process in started:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        assert process.stdout is not None
        process.stdout.close()


@pytest.fixture
def view() -> Iterator[Callable[..., Viewer]]:
    """view(folder, *options) starts a viewer; it is ended with the test."""
    with viewers() as start:
        yield start


def made_runs(folder: Path) -> Path:
    """A folder with two runs that share their prompts, one still running, and one below a folder."""
    make_run(folder / "first", Plan(name="first"))
    make_run(folder / "sweep" / "second", Plan(name="second", seed=0, final_skill=0.6))
    make_run(folder / "live", Plan(name="live", done=20))
    add_rollouts(folder / "first")
    (folder / "sweep" / "second" / "config.yaml").write_text(
        "name: second\nmodel:\n  path: Qwen/Qwen2.5-VL-3B-Instruct\noptim:\n  lr: 1.0e-05\neval:\n  best_metric: sampled/iou\n"
    )
    return folder


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Such a folder, which the test may change."""
    return made_runs(tmp_path / "runs")


@pytest.fixture(scope="module")
def standing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Viewer, Path]]:
    """One viewer of such a folder for all tests of a file that ask it and change nothing."""
    folder = made_runs(tmp_path_factory.mktemp("standing") / "runs")
    with viewers() as start:
        yield start(folder), folder


def add_rollouts(run: Path) -> None:
    """rollouts/ of two steps from the run's own predictions, and one of several turns."""
    rows = [json.loads(line) for line in (run / "eval/step_000000/predictions.jsonl").open()]
    (run / "rollouts").mkdir()
    for step in (1, 2):
        with (run / f"rollouts/step_{step:06d}.jsonl").open("w", encoding="utf-8") as file:
            for number, row in enumerate(r for r in rows if r["mode"] == "sampled"):
                sample = {k: row[k] for k in ("id", "source", "task", "question", "images")}
                sample |= {
                    "answer": row["score"]["detail"]["gold_boxes"][0],
                    "videos": [],
                    "params": {},
                }
                made = {
                    "step": step,
                    "key": [step, number // 2, 0],
                    "sample": sample,
                    "text": row["text"],
                    "stop": row["stop"],
                    "num_tokens": 20,
                    "score": row["score"],
                }
                if number == 0:
                    made |= {"turns": ["<zoom>[1, 2, 30, 40]</zoom>", row["text"]]}
                file.write(json.dumps(made) + "\n")


def rows_of(runs: Path, name: str = "first") -> list[dict]:
    """All predictions of a run with their steps, in the order of the files."""
    out = []
    for folder in sorted((runs / name / "eval").glob("step_*")):
        for line in (folder / "predictions.jsonl").open(encoding="utf-8"):
            out.append({"step": int(folder.name[5:]), **json.loads(line)})
    return out
