"""A real `mmrl serve` in a process of its own, and messages as OpenAI's clients send them."""

from __future__ import annotations

import base64
import contextlib
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from openai import OpenAI

from tests.kits.engine_kit import ENVIRONMENT, REPO
from tests.kits.prepared_kit import Prepared

__all__ = ["CHECKPOINT", "Server", "asking", "data_url", "serving"]

CHECKPOINT = str(REPO / "assets" / "tiny_vlm")
_START_S = 240.0  # a server that has not come up after so long has failed


@dataclass
class Server:
    """A running server; `lines` is what it printed."""

    process: subprocess.Popen[str]
    url: str
    model: str
    client: OpenAI
    lines: list[str] = field(default_factory=list)

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def chat(self, content: Any, **options: Any) -> Any:
        """A chat completion of one user message; greedy unless told otherwise."""
        options = {
            "temperature": 0,
            "max_tokens": 16,
            "messages": [{"role": "user", "content": content}],
            **options,
        }
        return self.client.chat.completions.create(model=self.model, **options)

    def text(self, content: Any, **options: Any) -> str:
        """The text of its first choice."""
        return self.chat(content, **options).choices[0].message.content


@contextlib.contextmanager
def serving(
    *options: str,
    checkpoint: str = CHECKPOINT,
    key: str = "none",
    environment: Mapping[str, str] | None = None,
) -> Iterator[Server]:
    """A server at a free port, its client without retries; killed at the end when it still runs."""
    process = Prepared(
        [sys.executable, "-m", "mmrl.cli.main", "serve", checkpoint, "--port", "0", *options],
        cwd=REPO,
        env={**ENVIRONMENT, "PYTHONFAULTHANDLER": "1", **(environment or {})},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert process.stdout is not None
    # it then says where it hangs
    watchdog = threading.Timer(_START_S, process.send_signal, (signal.SIGABRT,))
    watchdog.start()
    lines: list[str] = []
    try:
        while not (found := re.search(r"serving (\S+) at (http\S+)", lines[-1] if lines else "")):
            line = process.stdout.readline()
            assert line, f"the server ended with status {process.wait(30)}: {''.join(lines)}"
            lines.append(line)
        watchdog.cancel()
        threading.Thread(target=lambda: lines.extend(process.stdout or ()), daemon=True).start()
        with OpenAI(base_url=found[2], api_key=key, max_retries=0, timeout=120) as client:
            yield Server(process, found[2].removesuffix("/v1"), found[1], client, lines)
    finally:
        watchdog.cancel()
        process.kill()
        process.wait(30)


def data_url(path: str | Path, kind: str = "image/png") -> str:
    """The file as a data: address."""
    return f"data:{kind};base64,{base64.b64encode(Path(path).read_bytes()).decode()}"


def asking(
    text: str, *pictures: str | Path, clips: tuple[str | Path, ...] = ()
) -> list[dict[str, Any]]:
    """Content parts: pictures, clips, then the question."""
    return [
        *({"type": "image_url", "image_url": {"url": data_url(p)}} for p in pictures),
        *({"type": "video_url", "video_url": {"url": data_url(c, "video/mp4")}} for c in clips),
        {"type": "text", "text": text},
    ]
