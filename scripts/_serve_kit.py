"""A real `mmrl serve` to attack, the client beside the attacker, and what the server's processes hold."""

from __future__ import annotations

import contextlib
import http.client
import json
import multiprocessing
import os
import re
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

__all__ = [
    "HEAD",
    "MODEL",
    "Attacking",
    "Beside",
    "Server",
    "ask",
    "beside",
    "ending",
    "post",
    "raw",
    "said",
    "serving",
]

ROOT = Path(__file__).resolve().parent.parent
MODEL = "assets/tiny_vlm"
_source = "127.0.0.1"  # whom the server sees
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"


@dataclass
class Server:
    """A running server."""

    process: subprocess.Popen[str]
    port: int

    @property
    def tree(self) -> list[psutil.Process]:
        """Its processes: itself, the fork server and those that read requests."""
        own = psutil.Process(self.process.pid)
        return [own, *own.children(recursive=True)]

    @property
    def readers(self) -> list[psutil.Process]:
        """The processes that read requests: children of the fork server."""
        return [
            reader
            for child in psutil.Process(self.process.pid).children()
            for reader in child.children()
        ]

    def held_mib(self) -> float:
        """Memory of all its processes but for mapped files. Pages that they still share since a fork count for each, which is the
        same all the time; telling them apart (smaps) would hold the server up while it is measured."""
        total = 0
        for process in self.tree:
            with contextlib.suppress(psutil.Error):
                memory = process.memory_info()
                total += memory.rss - memory.shared
        return total / 2**20


@contextlib.contextmanager
def serving(*options: str, model: str = MODEL) -> Iterator[Server]:
    """A server of the tiny model, or of another one under its name, at a free port; killed at the end."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONPATH": str(ROOT),
    }
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "mmrl.cli.main",
            "serve",
            model,
            "--served-model-name",
            MODEL,
            "--config",
            "configs/demo.yaml",
            "--port",
            "0",
            "--engine",
            "own",
            *options,
        ],
        cwd=ROOT,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if found := re.search(r"at http://\S+:(\d+)/v1", line):
                break
        else:
            raise RuntimeError(f"the server ended with status {process.wait(30)}")
        threading.Thread(target=process.stdout.read, daemon=True).start()
        yield Server(process, int(found[1]))
    finally:
        process.kill()
        process.wait(30)


def post(server: Server, body: bytes, timeout_s: float = 120.0) -> tuple[int, Any]:
    """Status and document of an answer; 0 where the connection ended without one."""
    connection = http.client.HTTPConnection(
        "127.0.0.1", server.port, timeout=timeout_s, source_address=(_source, 0)
    )
    try:
        connection.request(
            "POST", "/v1/chat/completions", body, {"Content-Type": "application/json"}
        )
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read() or b"{}")
    except (OSError, http.client.HTTPException):
        return 0, {}
    finally:
        connection.close()


def ask(content: Any, **options: Any) -> bytes:
    """The body of a question, greedy unless told otherwise."""
    return json.dumps(
        {
            "model": MODEL,
            "messages": [{"role": "user", "content": content}],
            "temperature": 0,
            **options,
        }
    ).encode()


def raw(port: int, data: bytes, timeout_s: float = 120.0) -> socket.socket:
    """A connection to a server of this machine over which `data` was sent; nothing for so many seconds is a TimeoutError."""
    connection = socket.create_connection(
        ("127.0.0.1", port), timeout=timeout_s, source_address=(_source, 0)
    )
    connection.sendall(data)
    return connection


def said(connection: socket.socket) -> bytes:
    """All that comes until the server closes; a reset ends it, too. TimeoutError where it keeps the connection and says nothing."""
    found = b""
    with contextlib.suppress(ConnectionResetError):
        while data := connection.recv(65536):
            found += data
    return found


def ending(connection: socket.socket) -> str:
    """How it ended: the status of the answer, 'closed' without one, 'open' when it did not end."""
    try:
        return said(connection)[9:12].decode() or "closed"
    except TimeoutError:
        return "open"


Attacking = Callable[[Server, Any], "Counter[Any]"]
"""What an attacker's thread does until an event is set; returns what it counted."""


@dataclass
class Beside:
    """What a second client saw: seconds of its one-token answers while all was quiet and while the attack went on, failures among
    them, and the most memory that the server held."""

    quiet_s: list[float] = field(default_factory=list)
    attacked_s: list[float] = field(default_factory=list)
    failed: int = 0
    peak_mib: float = 0.0
    before_mib: float = 0.0

    @property
    def times(self) -> float:
        """Median under attack over median while quiet."""
        return statistics.median(self.attacked_s) / statistics.median(self.quiet_s)

    def figures(self) -> dict[str, Any]:
        """For the table."""
        return {
            "quiet_median_s": round(statistics.median(self.quiet_s), 4),
            "attacked_median_s": round(statistics.median(self.attacked_s), 4),
            "attacked_worst_s": round(max(self.attacked_s), 3),
            "times": round(self.times, 2),
            "answers": len(self.attacked_s),
            "failed": self.failed,
            "before_mib": round(self.before_mib),
            "peak_mib": round(self.peak_mib),
        }


def _attack(server: Server, attacks: Sequence[Attacking], over: Any, found: Any) -> None:
    """The attacker's process: another address, and none of this machine's time that the server or the other client want."""
    global _source
    _source = "127.0.0.2"
    os.nice(19)
    with ThreadPoolExecutor(len(attacks)) as pool:
        counts = list(pool.map(lambda one: one(server, over), attacks))
    found.put(sum(counts, Counter()))


def beside(
    server: Server, attacks: Sequence[Attacking], quiet_s: float = 5.0, seconds: float = 20.0
) -> tuple[Beside, Counter[Any]]:
    """Ask for one token again and again, in quiet before and after, and while the `attacks` run in another process (each in a
    thread, told when to end). Also what the attackers counted."""
    context = multiprocessing.get_context("fork")
    seen, over, found = Beside(), context.Event(), context.Queue()
    question = ask("red circle", max_tokens=1)
    for _ in range(3):
        post(server, question)

    def measure(into: list[float], until: float) -> None:
        while time.monotonic() < until:
            begun = time.monotonic()
            status, _ = post(server, question)
            into.append(time.monotonic() - begun)
            seen.failed += status != 200
            time.sleep(0.05)

    measure(seen.quiet_s, time.monotonic() + quiet_s)
    seen.before_mib = seen.peak_mib = server.held_mib()
    attacker = context.Process(target=_attack, args=(server, attacks, over, found))
    attacker.start()
    watched = threading.Event()

    def watch() -> None:
        while not watched.wait(0.5):
            seen.peak_mib = max(seen.peak_mib, server.held_mib())

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    time.sleep(0.5)
    measure(seen.attacked_s, time.monotonic() + seconds)
    over.set()
    counts = found.get(timeout=180)
    attacker.join(30)
    watched.set()
    watcher.join(30)
    # again: the machine may have had other work before
    measure(seen.quiet_s, time.monotonic() + quiet_s)
    return seen, counts
