"""A judge that does what the answer it is to grade says, in a process of its own: for tests and scripts/bench_judges.py.

    python -m scripts._judge_server --seconds 0.2            # prints its address; grades 'score 7' with 7

It speaks OpenAI's chat completions over HTTP/1.1 by the standard library's server, one thread for each connection. GET /stats tells
how many requests came, and how many of them were there at once.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

_SHOWN = re.compile(r"<<(ANSWER|FIRST|SECOND) ([0-9a-f]{16})>>\n(.*?)\n<</\1 \2>>", re.DOTALL)


class _Server(ThreadingHTTPServer):
    daemon_threads, request_queue_size = True, 256

    def __init__(self, seconds: float, fickle: bool) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.seconds, self.fickle, self.lock = seconds, fickle, threading.Lock()
        self.requests = self.now = self.most = 0
        self.seen: Counter[str] = Counter()
        self.keys: set[str] = set()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server
    # without it each answer waits 40 ms for the other side's acknowledgement
    disable_nagle_algorithm = True

    def handle(self) -> None:
        """A client that hangs up is no error."""
        with contextlib.suppress(ConnectionError):
            super().handle()

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet."""

    def do_GET(self) -> None:
        """Counts."""
        s = self.server
        self._send(200, {"requests": s.requests, "most": s.most, "keys": sorted(s.keys)})

    def do_POST(self) -> None:
        """A reply to the messages."""
        s = self.server
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        with s.lock:
            s.requests += 1
            s.now += 1
            s.most = max(s.most, s.now)
            s.keys.add(self.headers.get("authorization", ""))
        try:
            time.sleep(s.seconds)
            shown = body["messages"][-1]["content"]
            prompt = shown if isinstance(shown, str) else shown[-1]["text"]
            texts = {name: text for name, _, text in _SHOWN.findall(prompt)}
            self._judge(texts, body)
        finally:
            with s.lock:
                s.now -= 1

    def _judge(self, texts: dict[str, str], body: dict[str, Any]) -> None:
        if "FIRST" in texts:
            self._prefer(texts["FIRST"], texts["SECOND"])
            return
        said = texts["ANSWER"]
        with self.server.lock:
            self.server.seen[said] += 1
            times = self.server.seen[said]
        kind, _, rest = said.partition(" ")
        if self.server.fickle:
            self._say(json.dumps({"score": random.randint(0, 10)}))
            return
        if kind == "hang":
            time.sleep(3600)
        elif kind == "drop":
            self.close_connection = True
        elif kind == "half":
            self._raw(b'{"choices": [', 1000)
            self.close_connection = True
        elif kind == "limited":  # so many times
            if times <= int(rest):
                self._send(429, {"error": "too many"}, {"retry-after": "0.1"})
            else:
                self._say('{"score": 6}')
        elif kind == "closed":  # for an hour
            self._send(429, {"error": "too many"}, {"retry-after": "3600"})
        elif kind == "broken":
            if times <= int(rest):
                self._send(503, {"error": "busy"})
            else:
                self._say('{"score": 5}')
        elif kind == "status":
            self._send(int(rest), {"error": "no"}, {"location": "http://127.0.0.1:1/"})
        elif kind == "body":
            data = {
                "list": b"[1]",
                "text": b"gone",
                "nan": b'{"choices": NaN}',
                "deep": b"[" * 200_000,
                "none": b"{}",
                "huge": b'{"x": "' + b"x" * (5 << 20) + b'"}',
            }[rest]
            self._raw(data, len(data))
        elif kind == "reply":
            self._say(rest)
        elif kind == "ever":  # another one each time
            self._say(json.dumps({"score": times}))
        elif kind == "score":
            self._say(
                f'Let me see: he says {said!r}. {{"score": 9}}\n```json\n{{"score": {rest}}}\n```'
            )
        else:  # quotes it, and gives nothing
            self._say(f'The answer says: {said}\n{{"score": 0}}')

    def _prefer(self, first: str, second: str) -> None:
        if "partial" in (first, second):  # to whatever comes first
            better = "first"
        elif "junk" in (first, second):
            better = "both"
        else:
            better = (
                "tie"
                if len(first) == len(second)
                else "first"
                if len(first) > len(second)
                else "second"
            )
        self._say(json.dumps({"better": better}))

    def _say(self, text: str) -> None:
        self._send(
            200,
            {
                "choices": [{"index": 0, "message": {"role": "assistant", "content": text}}],
                "usage": {"prompt_tokens": 100, "completion_tokens": 10},
            },
        )

    def _send(self, status: int, document: Any, headers: dict[str, str] | None = None) -> None:
        data = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def _raw(self, data: bytes, length: int) -> None:
        self.send_response(200)
        self.send_header("content-length", str(length))
        self.end_headers()
        self.wfile.write(data)


@contextmanager
def judge_server(seconds: float = 0.0, *, fickle: bool = False) -> Iterator[str]:
    """The address of a judge in another process, up to and with /v1; a fickle one gives another score each time."""
    command = [sys.executable, "-m", "scripts._judge_server", "--seconds", str(seconds)]
    command += ["--fickle"] if fickle else []
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
    finally:
        process.kill()
        process.wait()


def main() -> None:
    """Serve until killed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=0.0, help="that each request takes")
    parser.add_argument("--fickle", action="store_true", help="any score, another one each time")
    args = parser.parse_args()
    server = _Server(args.seconds, args.fickle)
    print(f"http://127.0.0.1:{server.server_port}/v1", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
