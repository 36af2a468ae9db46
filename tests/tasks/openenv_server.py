"""Environments written with OpenEnv's own classes, and its own server and client. It runs in OpenEnv's environment, without mmrl:

.venv/openenv/bin/python tests/tasks/openenv_server.py serve              # prints the port; environments at /walk, /tools ...
.venv/openenv/bin/python tests/tasks/openenv_server.py play URL           # JSON lines in: {"seed": 3, "actions": [...]}
"""

from __future__ import annotations

import base64
import io
import json
import os
import random
import socket
import sys
import time
from typing import Any, Literal

import openenv.core.env_server as oe
from PIL import Image


class Move(oe.Action):
    by: int = oe.types.Field(ge=-2, le=2, description="steps to the right")


class Place(oe.Observation):
    text: str = ""
    screen: str | None = None


class Walk(oe.Environment):
    """Reach the goal of the seed, of 1 to 5; each step pays what it brings nearer, in tenths."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(
        self, seed: int | None = None, episode_id: str | None = None, **options: Any
    ) -> Place:
        self.goal = random.Random(seed).randint(1, 5)
        self.place, self.steps = int(options.get("start", 0)), 0
        return self._seen()

    def step(self, action: Move, timeout_s: float | None = None, **options: Any) -> Place:
        before = abs(self.goal - self.place)
        self.place += action.by
        self.steps += 1
        now = abs(self.goal - self.place)
        return self._seen((before - now) / 10, done=now == 0)

    def _seen(self, reward: float | None = None, done: bool = False) -> Place:
        file = io.BytesIO()
        picture = Image.new("RGB", (56, 56))
        picture.paste((255, 255, 255), (8 * (self.place % 7), 0, 8 * (self.place % 7) + 8, 56))
        picture.save(file, "PNG")
        text = f"You are at {self.place}, the goal is at {self.goal}."
        shown = base64.b64encode(file.getvalue()).decode()
        return Place(text=text, screen=shown, reward=reward, done=done)

    @property
    def state(self) -> oe.State:
        return oe.State(step_count=self.steps)


class Deed(oe.Action):
    do: Literal["go", "hang", "raise", "die", "end"] = "go"


class Faulty(Walk):
    """Does what it is told, however bad."""

    def step(self, action: Deed, timeout_s: float | None = None, **options: Any) -> Place:
        if action.do == "hang":
            time.sleep(600)
        if action.do == "raise":
            raise ValueError("the world is broken")
        if action.do == "die":
            os._exit(7)
        return self._seen(1.0, action.do == "end")


def counter() -> oe.Environment:
    """An environment of MCP tools: add up to the goal, then submit."""
    from fastmcp import FastMCP
    from openenv.core.env_server.mcp_environment import MCPEnvironment

    class Counter(MCPEnvironment):
        SUPPORTS_CONCURRENT_SESSIONS = True

        def __init__(self) -> None:
            server = FastMCP("counter")
            self.sum, self.steps, self.goal, self.over = 0, 0, 0, False

            @server.tool()
            def add(number: int) -> str:
                """Add a number to the sum."""
                self.sum += number
                return f"The sum is {self.sum}."

            @server.tool()
            def submit() -> str:
                """Hand the sum in."""
                self.over = True
                return "Handed in."

            super().__init__(server)

        def reset(self, seed: int | None = None, **options: Any) -> Place:
            self.sum, self.over, self.goal = 0, False, random.Random(seed).randint(3, 9)
            return Place(text=f"Make the sum {self.goal}, then submit it.")

        def step(self, action: oe.Action, **options: Any) -> oe.Observation:
            self.steps += 1
            return self._paid(super().step(action, **options))

        async def step_async(self, action: oe.Action, **options: Any) -> oe.Observation:
            self.steps += 1
            return self._paid(await super().step_async(action, **options))

        def _paid(self, seen: oe.Observation) -> oe.Observation:
            seen.done = self.over
            seen.reward = float(self.over and self.sum == self.goal)
            return seen

        def _step_impl(self, action: oe.Action, **options: Any) -> oe.Observation:
            raise ValueError("tools only")

        @property
        def state(self) -> oe.State:
            return oe.State(step_count=self.steps)

    return Counter()


KINDS: dict[str, Any] = {
    "walk": (Walk, Move, Place, 64),
    "one": (Walk, Move, Place, 1),
    "faulty": (Faulty, Deed, Place, 8),
    "tools": (counter, oe.CallToolAction, oe.CallToolObservation, 8),
}


def serve(port: str = "0") -> None:
    """Serve all kinds, each at its name, until the process is ended; the port is printed once it is bound."""
    import fastapi
    import uvicorn

    app = fastapi.FastAPI()
    for name, (env, action, observation, most) in KINDS.items():
        one = oe.create_fastapi_app(env, action, observation, max_concurrent_envs=most)
        app.mount(f"/{name}", one)
    listening = socket.create_server(("127.0.0.1", int(port)))
    print(listening.getsockname()[1], flush=True)
    uvicorn.Server(uvicorn.Config(app, log_level="error")).run(sockets=[listening])


def play(url: str) -> None:
    """Play the episodes of the standard input with OpenEnv's own client; one JSON line each."""
    from openenv.core import GenericEnvClient

    for line in sys.stdin:
        asked = json.loads(line)
        with GenericEnvClient(base_url=url).sync() as client:
            first = client.reset(seed=asked["seed"])
            steps = [client.step(action) for action in asked["actions"]]
            state = client.state()
        told = [{"observation": s.observation, "reward": s.reward, "done": s.done} for s in steps]
        print(json.dumps({"first": first.observation, "steps": told, "state": state}), flush=True)


if __name__ == "__main__":
    {"serve": serve, "play": play}[sys.argv[1]](*sys.argv[2:])
