"""The process that plays an environment of `verifiers`, in that library's own Python: started by mmrl.tasks.verifiers_process.

It imports nothing of mmrl, and runs where only `verifiers` and the environment are installed. Each rollout is verifiers' own
(`Environment.run_rollout`, which scores it, too), with an OpenAI client whose requests go through a connection to mmrl in place of
a network: what the environment asks its model is what the policy is shown, and what the policy writes is the completion.

Settings come as a line of JSON on stdin; a line on stdout says {"ready": facts} or {"refused": why}. The end of stdin ends the
process. After that each connection to the inherited socket is one conversation of JSON lines, a question and an answer in turn:

    {"do": "ping"}                                                    {}
    {"do": "rows", "split": "train", "first": 0, "count": 500}        {"rows": [...], "total": 900}
    {"do": "begin", "split": "train", "row": 3, "seed": 7, "limit": 8}
        {"ask": {"messages": [...], "tools": [...]}}                  the policy's turn: messages that are new
    {"do": "say", "message": {...}, "cut": false, "tokens": 12}
        {"ask": {"messages": [...]}}, {"over": {"reward": 1.0, ...}} or {"failed": why}

The end of a connection ends its rollout, with the environment's own cleanup.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import gc
import importlib
import importlib.metadata
import importlib.util
import json
import logging
import os
import random
import socket
import sys
import threading
import time
from typing import Any

_MOST_BYTES = 64 << 20  # of a line
_END_S = 10.0
_MOST_WORDS = 2_000
_KEPT = ("PATH", "HOME", "USER", "LOGNAME", "SHELL", "TMPDIR", "TZ", "LANG", "VIRTUAL_ENV")
_KEPT_FAMILIES = ("LC_", "XDG_", "SSL_CERT_", "OMP_")
_KEPT_HF = (
    "HF_HOME",
    "HF_HUB_CACHE",
    "HF_DATASETS_CACHE",
    "HF_HUB_OFFLINE",
    "HF_DATASETS_OFFLINE",
    "HF_ENDPOINT",
)
_KEPT_NET = ("http_proxy", "https_proxy", "no_proxy", "all_proxy")
_rollout: contextvars.ContextVar[Any] = contextvars.ContextVar("rollout", default=None)


def _told(error: Any) -> dict[str, str] | None:
    """What ended a rollout, as verifiers records it: `kinds` of the error and its causes, and its words."""
    if error is None:
        return None
    if isinstance(error, dict):
        kinds = error.get("error_chain_str") or error.get("error")
        return {"kinds": str(kinds), "said": _words(error.get("error_chain_repr") or error)}
    return {
        "kinds": _chain(error) if isinstance(error, BaseException) else str(error),
        "said": _words(repr(error)),
    }


class Refused(Exception):
    """What mmrl is to tell the user, in whole sentences."""


def _words(said: Any) -> str:
    return " ".join(str(said).split())[:_MOST_WORDS]


def _chain(error: BaseException) -> str:
    """What went wrong, with its causes: verifiers wraps an environment's own error twice."""
    found: list[str] = []
    cause: BaseException | None = error
    while cause is not None and len(found) < 6:
        found.append(f"{type(cause).__name__}: {cause}")
        cause = cause.__cause__ or cause.__context__
    return _words(" <- ".join(found))


def leave_secrets(named: list[str]) -> None:
    """Forget the environment variables that nobody named: keys of other services are no business of an environment."""
    kept = {*_KEPT, *_KEPT_HF, *named}
    for name in list(os.environ):
        if (
            name not in kept
            and name.lower() not in _KEPT_NET
            and not name.startswith(_KEPT_FAMILIES)
        ):
            del os.environ[name]


class RewardErrors(logging.Handler):
    """Counts reward functions that raised, for their own rollout: verifiers logs them and goes on with 0."""

    def emit(self, record: logging.LogRecord) -> None:
        rollout = _rollout.get()
        said = record.getMessage()
        if rollout is not None and said.startswith(("Error calling reward", "Error calling group")):
            rollout.reward_errors.append(_words(said))


def _plain(value: Any) -> Any:
    """Without what is None: a message is the same whether a field is left out or null."""
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items() if v is not None}
    return [_plain(v) for v in value] if isinstance(value, list) else value


def _members(rubric: Any) -> tuple[list[Any], bool]:
    """The rubrics within a rubric, and whether a rollout is judged by all of them (a RubricGroup) or by one (an EnvGroup's)."""
    if isinstance(inner := getattr(rubric, "rubrics", None), list):
        return inner, True
    if isinstance(inner := getattr(rubric, "env_map", None), dict):
        return [env.rubric for env in inner.values()], False
    return [], True


def _range(rubric: Any) -> tuple[float, float]:
    """The least and the greatest weighted sum, of functions between 0 and 1."""
    members, together = _members(rubric)
    own = [float(w) for w in rubric.weights]
    low, high = sum(w for w in own if w < 0), sum(w for w in own if w > 0)
    ranges = [_range(member) for member in members]
    if not ranges:
        return low, high
    if together:
        return low + sum(a for a, _ in ranges), high + sum(b for _, b in ranges)
    return min(low, *(a for a, _ in ranges)), max(high, *(b for _, b in ranges))


def _group_functions(rubric: Any) -> list[str]:
    """Names of the reward functions that look at all rollouts of a group."""
    found = [getattr(f, "__name__", repr(f)) for f in rubric.funcs if rubric._is_group_func(f)]
    return found + [name for one in _members(rubric)[0] for name in _group_functions(one)]


class World:
    """The environment and its rows."""

    def __init__(self, name: str, arguments: dict[str, Any]) -> None:
        try:
            verifiers: Any = importlib.import_module("verifiers")
        except ImportError as error:
            raise Refused(
                f"expected the package verifiers in {sys.prefix}, found none ({_words(error)}); install it there: "
                f"{sys.executable} -m pip install 'verifiers>=0.1.11,<0.4'"
            ) from error
        self.version = importlib.metadata.version("verifiers")
        load = getattr(verifiers, "load_environment", None)
        if load is None:
            raise Refused(
                f"expected a release of verifiers with load_environment (0.1.11 to 0.3.1), found {self.version}: from 0.4 on it "
                "plays agents in sandboxes alone, by its module verifiers.v1, which is another contract; install the former: "
                f"{sys.executable} -m pip install 'verifiers<0.4'"
            )
        if importlib.util.find_spec("verifiers.clients") is None:
            raise Refused(
                f"expected verifiers 0.1.11 or newer, below 0.4, found {self.version}; install it: {sys.executable} -m pip "
                "install 'verifiers>=0.1.11,<0.4'"
            )
        try:
            self.env: Any = load(name, **arguments)
        except SystemExit as error:
            raise Refused(f"the environment {name!r} ended the process: {error}") from error
        except Exception as error:
            raise Refused(
                f"expected load_environment({name!r}, **{sorted(arguments)}) to give an environment, found {_chain(error)}; "
                "install the environment's package beside verifiers, name a folder that holds its module in verifiers.folders, "
                "mend verifiers.args, or name the environment variables that it reads in verifiers.variables"
            ) from error
        if not isinstance(self.env, verifiers.Environment):
            raise Refused(
                f"expected load_environment({name!r}) to give an environment (verifiers.Environment), found "
                f"{type(self.env).__name__}; its package is of another contract"
            )
        self.rows: dict[str, Any] = {}
        # here, not in the first rollouts: they take seconds to import
        self.httpx, self.openai = map(importlib.import_module, ("httpx", "openai"))
        importlib.import_module("openai.resources.chat")
        self.clients = importlib.import_module("verifiers.clients")

    def facts(self) -> dict[str, Any]:
        """What mmrl checks before a run."""
        lowest, highest = _range(self.env.rubric)
        return {
            "version": self.version,
            "kind": type(self.env).__name__,
            "lowest": lowest,
            "highest": highest,
            "group": _group_functions(self.env.rubric),
            "chat": getattr(self.env, "message_type", "chat") == "chat",
            "threshold": float(getattr(self.env, "pass_threshold", 0.5)),
        }

    def dataset(self, split: str) -> Any:
        """The rows of 'train' or 'eval'."""
        if split not in self.rows:
            env = self.env
            try:
                self.rows[split] = env.get_dataset() if split == "train" else env.get_eval_dataset()
            except ValueError as error:
                raise Refused(
                    f"expected rows for the split {split!r}, found none ({_words(error)}); use the environment's other split"
                ) from error
            except Exception as error:
                raise Refused(
                    f"expected the environment's rows of {split!r}, found {_chain(error)}"
                ) from error
        return self.rows[split]

    def listed(self, split: str, first: int, count: int) -> dict[str, Any]:
        """Rows as mmrl lists them: the words that are asked, the answer, and the task."""
        rows = self.dataset(split)
        last = min(first + count, len(rows))
        return {
            "total": len(rows),
            "rows": [self._listed(rows[place]) for place in range(first, last)],
        }

    def _listed(self, row: dict[str, Any]) -> dict[str, Any]:
        prompt = row.get("prompt")
        asked = prompt if isinstance(prompt, str) else ""
        for message in prompt if isinstance(prompt, list) else []:
            if isinstance(message, dict) and message.get("role") == "user":
                content = message.get("content")
                parts = content if isinstance(content, list) else [{"text": content}]
                asked = "\n".join(str(p["text"]) for p in parts if p.get("text"))
        answer, task = row.get("answer"), row.get("task")
        return {
            "question": asked,
            "answer": answer if isinstance(answer, (str, int, float, bool)) else None,
            "task": task if isinstance(task, str) else "",
        }

    def client(self, rollout: Rollout) -> Any:
        """What verifiers takes for an OpenAI endpoint: its requests are the policy's turns."""
        httpx, openai = self.httpx, self.openai

        # httpx's transport of a function in place of a network
        async def line(request: Any) -> Any:
            status, said = await rollout.answer(json.loads(request.content))
            return httpx.Response(status, json=said)

        http = httpx.AsyncClient(transport=httpx.MockTransport(line), timeout=None)
        bare = openai.AsyncOpenAI(
            base_url="http://policy.invalid/v1",
            api_key="none",
            http_client=http,
            max_retries=0,
            timeout=None,
        )
        return self.clients.OpenAIChatCompletionsClient(bare)


class Rollout:
    """One rollout: verifiers' own, whose model is at the other end of the connection."""

    def __init__(self, world: World, limit: int, send: Any) -> None:
        self.world, self.limit, self.send = world, limit, send
        self.answers: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.told: list[Any] = []  # the chat so far
        self.tools: Any = None
        self.turns = 0
        self.cut = False
        self.fault = ""
        self.reward_errors: list[str] = []
        self.asking = asyncio.Lock()

    def _refuse(self, why: str) -> tuple[int, dict[str, Any]]:
        self.fault = self.fault or why
        return 422, {"error": {"message": why, "type": "invalid_request_error"}}

    async def answer(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """The answer to a request for a completion: status and JSON of OpenAI's chat completions."""
        if self.asking.locked():
            return self._refuse(
                "expected one question to the policy at a time, found several at once: an environment that asks its model beside "
                "the chat is not played"
            )
        async with self.asking:
            return await self._answer(body)

    async def _answer(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        messages, tools = body.get("messages"), _plain(body.get("tools") or [])
        if not isinstance(messages, list) or body.get("stream") or body.get("n", 1) != 1:
            return self._refuse(
                "expected requests for one chat completion that is not streamed, found another one (of a prompt without "
                "messages, or with stream or n)"
            )
        messages = _plain(messages)
        if messages[: len(self.told)] != self.told or (
            self.turns and len(messages) == len(self.told)
        ):
            return self._refuse(
                "expected a chat that only grows, found that the environment asks its model with another one than before: it "
                "rewrites what was said, or asks its model beside the chat; a policy's tokens cannot be taken back, so that "
                "such an environment is not played"
            )
        if self.turns and tools != self.tools:
            return self._refuse(
                "expected the same tools in each turn, found that the environment changes them"
            )
        if self.turns >= self.limit:
            # verifiers' own way to end a chat that grew too long: it is scored as it is
            self.cut = True
            return 400, {"error": {"message": "prompt_too_long: the limit on turns is reached"}}
        new, self.told, self.tools = messages[len(self.told) :], messages, tools
        await self.send({"ask": {"messages": new, **({} if self.turns else {"tools": tools})}})
        said = await self.answers.get()
        self.turns += 1
        message = _plain(said["message"])
        self.told = [*messages, {k: v for k, v in message.items() if v not in ("", [])}]
        tokens = int(said.get("tokens", 0))
        reason = (
            "length" if said.get("cut") else "tool_calls" if "tool_calls" in message else "stop"
        )
        return 200, {
            "id": f"turn-{self.turns}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": "policy",
            "choices": [
                {
                    "index": 0,
                    "message": {"content": None, **message},
                    "finish_reason": reason,
                    "logprobs": None,
                }
            ],
            "usage": {"prompt_tokens": 0, "completion_tokens": tokens, "total_tokens": tokens},
        }

    async def play(self, split: str, place: int, seed: int) -> None:
        """Run it, and send what came of it."""
        _rollout.set(self)
        try:
            row = self.world.dataset(split)[place]
            random.seed(seed)
            if "numpy" in sys.modules:
                sys.modules["numpy"].random.seed(seed % (1 << 32))
            output = await self.world.env.run_rollout(row, self.world.client(self), "policy", {})
        except (Exception, SystemExit) as error:  # the environment's own
            await self.send({"failed": self.fault or _chain(error)})
            return
        if self.fault:
            await self.send({"failed": self.fault})
            return
        await self.send(
            {
                "over": {
                    "reward": output.get("reward"),
                    "metrics": output.get("metrics") or {},
                    "error": _told(output.get("error")),
                    "truncated": bool(output.get("is_truncated")) or self.cut,
                    "stopped": str(output.get("stop_condition") or ""),
                    "reward_errors": self.reward_errors,
                }
            }
        )


class Server:
    """The connections to mmrl."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.open: set[asyncio.Task[None]] = set()

    async def converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, to its end."""

        async def send(message: dict[str, Any]) -> None:
            writer.write(json.dumps(message, default=str).encode() + b"\n")
            await writer.drain()

        rollout: Rollout | None = None
        playing: asyncio.Task[None] | None = None
        try:
            while line := await reader.readline():
                asked = json.loads(line)
                if asked["do"] == "say":
                    if rollout is not None:
                        rollout.answers.put_nowait(asked)
                elif asked["do"] == "begin":
                    rollout = Rollout(self.world, asked["limit"], send)
                    playing = asyncio.create_task(
                        rollout.play(asked["split"], asked["row"], asked["seed"])
                    )
                    self.open.add(playing)
                    playing.add_done_callback(self.open.discard)
                elif asked["do"] == "rows":
                    try:
                        await send(
                            self.world.listed(asked["split"], asked["first"], asked["count"])
                        )
                    except Refused as why:
                        await send({"failed": str(why)})
                else:
                    await send({})
        except (ConnectionError, ValueError):
            pass  # the other end is gone, or sent what is too long: the rollout ends below
        finally:
            if playing is not None and not playing.done():
                playing.cancel()
                await asyncio.wait([playing], timeout=_END_S)
            writer.close()

    async def run(self, listening: socket.socket) -> None:
        """Serve until stdin ends."""
        ended = asyncio.Event()
        loop = asyncio.get_running_loop()

        def watch() -> None:
            while sys.stdin.buffer.read(1 << 16):
                pass
            loop.call_soon_threadsafe(ended.set)
            time.sleep(2 * _END_S)
            os._exit(1)  # something hangs

        threading.Thread(target=watch, daemon=True).start()
        server = await asyncio.start_unix_server(self.converse, sock=listening, limit=_MOST_BYTES)
        await ended.wait()
        server.close()
        for task in list(self.open):
            task.cancel()
        if self.open:
            await asyncio.wait(list(self.open), timeout=_END_S)


def main() -> None:
    """Read the settings, load the environment, and serve."""
    told = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what the environment prints is no answer of ours
    settings = json.loads(sys.stdin.buffer.readline())
    leave_secrets(settings["variables"])
    sys.path[:0] = settings["folders"]
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    # of importing verifiers a quarter is looking for garbage among what stays
    gc.disable()
    try:
        world = World(settings["env"], settings["args"])
        facts = world.facts()
    except Refused as why:
        print(json.dumps({"refused": str(why)}), file=told, flush=True)
        return
    gc.freeze()
    gc.enable()
    counting = RewardErrors()
    counting.setLevel(logging.ERROR)
    logging.getLogger().addHandler(counting)
    named = logging.getLogger(
        "verifiers"
    )  # releases that set up logging keep its words to themselves
    if not named.propagate:
        named.addHandler(counting)
    print(json.dumps({"ready": facts}), file=told, flush=True)
    told.close()
    listening = socket.socket(fileno=settings["socket"])
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(Server(world).run(listening))


if __name__ == "__main__":
    main()
