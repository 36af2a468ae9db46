"""What tests of policy servers do whichever protocol they speak."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from mmrl.cli.main import app
from tests.kits.engine_kit import ENVIRONMENT, REPO
from tests.kits.prepared_kit import Prepared


@contextmanager
def in_thread(
    run: Callable[[], None], stop: Callable[[], None], listens: threading.Event
) -> Iterator[None]:
    """A server that runs while the block does, from when it listens."""
    thread = threading.Thread(target=run)
    thread.start()
    try:
        assert listens.wait(30)
        yield
    finally:
        stop()
        thread.join(30)
        assert not thread.is_alive()


@contextmanager
def policy_server(checkpoint: str, scheme: str, *options: str, key: str = "") -> Iterator[str]:
    """The address of `mmrl policy-server`, as it says it, which is asked to end with the block."""
    server = Prepared(
        [
            *(sys.executable, "-m", "mmrl.cli.main", "policy-server", checkpoint),
            *("--port", "0", *options),
        ],
        cwd=REPO,
        env={**ENVIRONMENT, "MMRL_API_KEY": key},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert server.stdout is not None
        lines = iter(server.stdout.readline, "")
        line = next(one for one in lines if one.startswith(f"policy server at {scheme}://"))
        yield line.split()[3]
        server.send_signal(signal.SIGTERM)
        assert server.wait(30) == 0 and "stopped" in list(lines)[-1]
    finally:
        server.kill()
        server.wait(30)


def far_and_near(
    folder: Path, far: Sequence[str], near: str, limits: Sequence[str], count: int
) -> Mapping[str, Any]:
    """`mmrl eval` of a server (`far`: its options) and of the checkpoint `near` play the same episodes, `count` of them; returns
    the results of both."""
    wide = ["env.options={tolerance: 0.6}"]  # an easy task
    common = [*wide, "env.slots=1", "env.workers=1", "threads=1", "--suite", "tiny_reach"]
    rows, results = {}, {}
    for name, who in (("far", [*far]), ("near", [near])):
        asked = ["eval", *who, *common, *limits, "--out", str(folder / name)]
        done = CliRunner().invoke(app, asked, catch_exceptions=False)
        assert done.exit_code == 0, done.output
        written = folder / name / "tiny_reach"
        text = (written / "predictions.jsonl").read_text(encoding="utf-8")
        rows[name] = [json.loads(one) for one in text.splitlines()]
        results[name] = json.loads((written / "results.json").read_text(encoding="utf-8"))
    measured = ("id", "mode", "seed", "stop", "score")
    for one, other in zip(rows["far"], rows["near"], strict=True):
        assert {k: one[k] for k in measured} == {k: other[k] for k in measured}
    assert len(rows["far"]) == count and results["far"]["greedy"] == results["near"]["greedy"]
    assert results["far"]["greedy"]["success_once"]["mean"] > 0
    return results


def ended_by_a_second_signal(server: subprocess.Popen[str]) -> None:
    """A server whose policy computes for ever goes on after one SIGTERM, and ends at once after another."""
    assert server.stdout is not None and server.stdout.readline() == "computes\n"
    server.send_signal(signal.SIGTERM)
    with pytest.raises(subprocess.TimeoutExpired):
        server.wait(1.5)
    server.send_signal(signal.SIGTERM)
    assert server.wait(30) == -signal.SIGTERM
