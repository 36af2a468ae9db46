"""verifiers itself, for comparison: its own Environment.generate with an OpenAI client at a local endpoint that replays answers. It
runs in the environment of verifiers, without mmrl:

.venv/verifiers/bin/python tests/tasks/verifiers_peer.py < asked.json

asked.json is a list of {"kind", "options", "row", "answers": [assistant messages]}; what is printed, for each, is
{"requests": bodies in order, "output": verifiers' RolloutOutput}.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent / "verifiers_worlds"))

import kinds
from openai import AsyncOpenAI
from verifiers.clients import OpenAIChatCompletionsClient

TOO_LONG = {"error": {"message": "This model's maximum context length is 1 tokens."}}


def endpoint(answers: list[Any], requests: list[Any]) -> ThreadingHTTPServer:
    """A server that gives each answer once, and says then that the prompt is too long."""
    left = list(answers)

    class Replay(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            status, said = 400, TOO_LONG
            if left:
                message = left.pop(0)
                requests.append(body)
                reason = "tool_calls" if message.get("tool_calls") else "stop"
                choice = {"index": 0, "message": message, "finish_reason": reason}
                said = {
                    "id": "x",
                    "object": "chat.completion",
                    "created": 0,
                    "model": "scripted",
                    "choices": [choice],
                }
                status = 200
            data = json.dumps(said).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            """Nothing: stderr is for failures."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Replay)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


async def played(asked: dict[str, Any]) -> dict[str, Any]:
    """One rollout by verifiers' own generate."""
    env = kinds.load_environment(asked["kind"], **asked["options"])
    requests: list[Any] = []
    server = endpoint(asked["answers"], requests)
    url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    client = OpenAIChatCompletionsClient(AsyncOpenAI(base_url=url, api_key="none", max_retries=0))
    rows = [env.get_dataset()[asked["row"]]]
    results = await env.generate(rows, client=client, model="scripted", independent_scoring=True)
    await client.close()
    server.shutdown()
    return {"requests": requests, "output": results["outputs"][0]}


async def main() -> None:
    told = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for asked in json.load(sys.stdin):
        print(json.dumps(await played(asked), default=str), file=told, flush=True)


if __name__ == "__main__":
    asyncio.run(main())
