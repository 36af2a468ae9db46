"""BrowserGym's environments in processes of their own: several to a process, all in one Chromium, each step within a time.

The process runs `serve(connection, progress, settings)` (mmrl.workers.spawned), messages are those of mmrl.tasks.browser.chromium.
BrowserGym drives Playwright's blocking interface, so that a process does one thing at a time: a page that hangs costs the process
and every episode in it, and the process is replaced (mmrl.tasks.browser.pool).

BrowserGym starts a browser for each environment and one for its chat, of Playwright's own download. It is handed a driver here
whose `launch` lends the system's Chromium, one for all, with contexts that see no network: MiniWoB++'s pages are given to them as
files, origins on this machine that the user named are reached, all else is refused.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import itertools
import logging
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from mmrl.coords import CoordFrame, to_orig
from mmrl.errors import ConfigError, MissingExtraError, did_you_mean
from mmrl.tasks.browser.chromium import ALONE, NO_WEBRTC, ORIGIN, SETTLE, file_for
from mmrl.tasks.browser.pool import EXACT, Browsers, Host, PageLost
from mmrl.tasks.browser.sites import miniwob_folder
from mmrl.tasks.pages import find_chromium
from mmrl.types import ImageSize

__all__ = ["INSTALL", "Actions", "Begin", "GymPage", "Gyms", "Seen", "check_env_id", "origin_of"]

INSTALL = "pip install 'mmrl-rft[browsergym]' && pip install --no-deps browsergym-core==0.14.3 browsergym-miniwob==0.14.3"
"""BrowserGym's own requirements name Playwright 1.44 alone and lxml below 6, which would downgrade those of this project, and mcp,
which only a server of it imports; it works with newer ones (the tests run it so)."""
_FILES = ("upload_file", "mouse_upload_file")  # they read whatever file of this machine is named
_MOST_WAIT_MS = 10_000
_PLACES = (("x", "y"), ("from_x", "from_y"), ("to_x", "to_y"))
_MOST_ERROR = 300  # characters of what went wrong, shown to the policy


def check_env_id(env_id: str) -> None:
    """Raises ConfigError for a name that BrowserGym does not know, MissingExtraError where it is not installed."""
    family = re.fullmatch(r"browsergym/([a-z_0-9]+)(\..+)?", env_id)
    if family is None:
        raise ConfigError(
            f"expected browsergym.env_id such as browsergym/miniwob.click-test or browsergym/openended, found {env_id!r}"
        )
    try:
        import browsergym.core  # noqa: F401  registers browsergym/openended
        import gymnasium
    except ImportError as error:
        raise MissingExtraError(
            f"the task browsergym needs BrowserGym ({error}); install it with: {INSTALL}"
        ) from error
    if env_id not in gymnasium.registry and family[2]:
        # each benchmark of BrowserGym is a package of that name that registers its environments
        try:
            importlib.import_module(f"browsergym.{family[1]}")
        except ImportError as error:
            raise MissingExtraError(
                f"expected the package browsergym-{family[1]}, which registers {env_id}, found none that can be imported "
                f"({error}); install it with: pip install --no-deps browsergym-{family[1]}"
            ) from error
    if env_id not in gymnasium.registry:
        known = [name for name in gymnasium.registry if name.startswith("browsergym/")]
        raise ConfigError(
            f"expected browsergym.env_id as the name of a registered environment, found {env_id!r}.{did_you_mean(env_id, known)}"
        )


def origin_of(url: str) -> str:
    """'http://127.0.0.1:8000' of an address on this machine. Raises ConfigError for any other."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        parts, port = urlsplit(""), None
    if parts.scheme != "http" or parts.hostname not in ("127.0.0.1", "localhost") or parts.username:
        raise ConfigError(
            f"expected an address on this machine such as http://127.0.0.1:8000/, found {url!r}: pages see no other network; serve "
            "a folder with `python -m http.server --bind 127.0.0.1 8000`"
        )
    return f"http://{parts.hostname}" + (f":{port}" if port else "")


class Actions:
    """BrowserGym's HighLevelActionSet of `subsets`, one action at a time, without those that read files of this machine.

    Raises ConfigError for unknown subsets.
    """

    def __init__(self, subsets: Sequence[str], origins: Sequence[str] = ()) -> None:
        from browsergym.core.action.highlevel import ACTION_SUBSETS, HighLevelActionSet

        for name in subsets:
            if name not in ACTION_SUBSETS:
                raise ConfigError(
                    f"expected browsergym.action_subsets of {', '.join(ACTION_SUBSETS)}, found {name!r}."
                    f"{did_you_mean(str(name), list(ACTION_SUBSETS))}"
                )
        self.origins = tuple(origins)
        self.set = HighLevelActionSet(list(subsets), multiaction=False, demo_mode="off")
        for name in _FILES:
            self.set.action_set.pop(name, None)

    def words(self) -> str:
        """The actions as BrowserGym describes them in a prompt."""
        return str(self.set.describe()).strip()

    def tools(self) -> list[dict[str, Any]]:
        """The actions as transformers' `apply_chat_template(tools=...)` takes them."""
        kept = ("name", "description", "parameters")
        found: list[dict[str, Any]] = [
            {"type": "function", "function": {key: tool[key] for key in kept}}
            for tool in self.set.to_tool_description()
        ]
        # BrowserGym says text of every argument, of its lists too
        for tool in found:
            for name, schema in tool["function"]["parameters"].get("properties", {}).items():
                if isinstance(schema.get("default"), list):
                    schema["type"] = "array"
                elif name == "options":
                    schema["type"] = ["array", "string"]
        return found

    def read(self, text: str) -> tuple[str, dict[str, Any]] | None:
        """Name and arguments of the one action of a text; None where BrowserGym itself has to say what is wrong."""
        from browsergym.core.action import functions
        from browsergym.core.action.parsers import NamedArgument, highlevel_action_parser

        calls = list(itertools.chain(*highlevel_action_parser.search_string(text).as_list()))
        if len(calls) != 1 or calls[0][0] not in self.set.action_set:
            return None
        name, given = calls[0]
        named = {a.name: a.value for a in given if isinstance(a, NamedArgument)}
        placed = [a for a in given if not isinstance(a, NamedArgument)]
        try:
            bound = inspect.signature(getattr(functions, name)).bind(*placed, **named)
        except TypeError:
            return None
        return name, dict(bound.arguments)

    def code(self, name: str, arguments: Mapping[str, Any]) -> str:
        """What BrowserGym runs for it: its own functions, called with literals. Raises ValueError for what may not be done."""
        if name == "goto":
            try:
                known = origin_of(str(arguments.get("url"))) in self.origins
            except ConfigError:
                known = False
            if not known:
                raise ValueError("that address cannot be reached from here")
        wait = arguments.get("wait_ms", 0)
        if not isinstance(wait, (int, float)) or not 0 <= wait <= _MOST_WAIT_MS:
            raise ValueError(f"expected wait_ms from 0 to {_MOST_WAIT_MS}")
        spelt = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
        return str(self.set.to_python_code(f"{name}({spelt})"))


def _on_picture(
    arguments: dict[str, Any], frame: CoordFrame, size: ImageSize | None
) -> list[tuple[float, float]]:
    """Places of an action, which are put into pixels of the picture within `arguments`. Raises ValueError for no places."""
    found = []
    for names in _PLACES:
        if not all(name in arguments for name in names):
            continue
        place = [arguments[name] for name in names]
        if not all(type(v) in (int, float) and math.isfinite(v) for v in place):
            raise ValueError(f"expected {names[0]} and {names[1]} as numbers")
        if size is not None:
            place = [
                round(float(v), 3) for v in to_orig(place, frame, size.resized_wh, size.orig_wh)
            ]
        arguments.update(zip(names, place, strict=True))
        found.append((float(place[0]), float(place[1])))
    return found


@dataclass(frozen=True)
class Begin:
    """What an episode begins with: the environment, its parameters, the actions, and whether its tree is to be shown."""

    env_id: str
    seed: int
    subsets: tuple[str, ...]
    env_kwargs: Mapping[str, Any] = field(default_factory=dict)
    task_kwargs: Mapping[str, Any] = field(default_factory=dict)
    tree: bool = False


@dataclass(frozen=True)
class Seen:
    """BrowserGym's observation and what the step paid: `pixels` uint8 (H, W, 3) as its screenshot, `tree` the accessibility tree as
    text where it is asked for, `error` its last_action_error, `marks` kind and
    place (mmrl.Mark) of the action in pixels of the picture before."""

    pixels: np.ndarray
    goal: str
    tree: str = ""
    error: str = ""
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False
    marks: tuple[tuple[Any, tuple[float, ...]], ...] = ()


@dataclass(frozen=True)
class GymSettings:
    """`program`: path of Chromium; `limit_s`: seconds for one step; `origins`: what of this machine pages may reach."""

    program: str
    origins: tuple[str, ...] = ()
    limit_s: float = 30.0
    parallel: int = 1


class _Lent:
    """The part of a browser that BrowserGym uses: contexts, which end with it."""

    def __init__(self, browser: Any, settings: GymSettings, folder: Path | None) -> None:
        self.browser, self.settings, self.folder = browser, settings, folder
        self.contexts: list[Any] = []

    def new_context(self, **options: Any) -> Any:
        context = self.browser.new_context(
            service_workers="block",  # their requests are not asked about
            accept_downloads=False,
            **options,
        )
        self.contexts.append(context)
        # What is allowed is let through without a question: between two steps nobody is there to answer.
        allowed = "|".join(re.escape(o) for o in self.settings.origins) or "(?!)"
        context.route(re.compile(rf"^(?!(?:{allowed})/)"), self._give)
        context.route_web_socket(re.compile(""), lambda socket: socket.close())
        context.add_init_script(ALONE)
        return context

    def _give(self, route: Any) -> None:
        found = None if self.folder is None else file_for(route.request.url, self.folder)
        # of a page that is gone meanwhile
        with contextlib.suppress(Exception):
            if found is None:
                route.abort()
            else:
                route.fulfill(body=found[0], content_type=found[1])

    def close(self) -> None:
        for context in self.contexts:
            context.close()


class _Driver:
    """Playwright for BrowserGym: its `chromium.launch` lends the one Chromium of its settings that runs here."""

    def __init__(self, playwright: Any, settings: GymSettings) -> None:
        self.playwright, self.settings = playwright, settings
        self.selectors, self.chromium = playwright.selectors, self
        self.running: dict[str, Any] = {}
        try:
            self.folder: Path | None = miniwob_folder()
        except MissingExtraError:
            self.folder = None

    def launch(self, *, args: Sequence[str] = (), **options: Any) -> _Lent:
        key = repr((sorted(args), sorted(options.items(), key=str)))
        running = self.running.get(key)
        if running is None or not running.is_connected():
            hosts = [urlsplit(origin).netloc for origin in self.settings.origins]
            ports = [host if ":" in host else f"{host}:80" for host in hosts]
            through = [f"MAP {p} {p.replace('localhost', '127.0.0.1')}" for p in ports]
            rules = ", ".join([*through, "MAP * ~NOTFOUND"])
            options = {"executable_path": self.settings.program, **options}
            running = self.running[key] = self.playwright.chromium.launch(
                args=[*args, *EXACT, f"--host-resolver-rules={rules}", NO_WEBRTC],
                # what a signal to all processes means is decided by the run's own
                handle_sigint=False,
                handle_sigterm=False,
                handle_sighup=False,
                **options,
            )
        return _Lent(running, self.settings, self.folder)


class _Episode:
    """One environment of BrowserGym."""

    def __init__(self, begin: Begin, settings: GymSettings) -> None:
        import gymnasium

        self.begin, self.actions = begin, Actions(begin.subsets, settings.origins)
        self.frame = CoordFrame.ABS_ORIG
        self.size: ImageSize | None = None
        self.marks: tuple[tuple[Any, tuple[float, ...]], ...] = ()
        self.elements: Mapping[str, Any] = {}
        self._sized: tuple[Any, Any] | None = None  # the page and the session that keeps its size
        self.env = gymnasium.make(
            begin.env_id,
            disable_env_checker=True,  # it would look through each accessibility tree
            task_kwargs=dict(begin.task_kwargs),
            action_mapping=self._code,
            **begin.env_kwargs,
        )

    def _code(self, text: str) -> str:
        """BrowserGym's `action_mapping`: what it raises becomes the last_action_error."""
        found = self.actions.read(text)
        if found is None:
            return str(self.actions.set.to_python_code(text))
        name, arguments = found
        points = _on_picture(arguments, self.frame, self.size)
        code = self.actions.code(name, arguments)
        named = [arguments[key] for key in ("bid", "from_bid", "to_bid") if key in arguments]
        boxes = [self.elements.get(str(bid), {}).get("bbox") for bid in named]
        marks: list[tuple[str, tuple[float, ...]]] = [
            ("box", (x, y, x + w, y + h)) for x, y, w, h in filter(None, boxes)
        ]
        if len(points) == 2:
            marks.append(("drag", points[0] + points[1]))
        else:
            marks.extend(("point", point) for point in points)
        self.marks = tuple(marks)
        return code

    def reset(self) -> Seen:
        observed, _ = self.env.reset(seed=self.begin.seed)
        return self._seen(observed)

    def step(self, text: str, frame: CoordFrame, size: ImageSize | None) -> Seen:
        self.frame, self.size, self.marks = frame, size, ()
        observed, reward, terminated, truncated, _ = self.env.step(text)
        return self._seen(observed, float(reward), bool(terminated), bool(truncated))

    def _seen(
        self,
        observed: Mapping[str, Any],
        reward: float = 0.0,
        terminated: bool = False,
        truncated: bool = False,
    ) -> Seen:
        from browsergym.utils.obs import flatten_axtree_to_str

        goals = observed["goal_object"]
        if any(part["type"] != "text" for part in goals):
            raise ValueError(
                "expected a goal of text, found one with pictures, which are not shown yet"
            )
        self.elements = observed["extra_element_properties"]
        self._settle()
        tree = ""
        if self.begin.tree:
            tree = flatten_axtree_to_str(
                observed["axtree_object"],
                self.elements,
                with_clickable=True,
                filter_visible_only=True,
            )
        return Seen(
            np.ascontiguousarray(observed["screenshot"]),
            "\n".join(part["text"] for part in goals),
            tree.strip("\n"),
            " ".join(str(observed["last_action_error"]).split())[:_MOST_ERROR],
            reward,
            terminated,
            truncated,
            self.marks,
        )

    def _settle(self) -> None:
        """Give the page its size back. BrowserGym sets it anew for a screenshot, by a session that it ends then, and with it goes
        Playwright's own: a Chromium that keeps room for bars (its new headless mode) lays the page out smaller, and clicks miss."""
        page = self.env.unwrapped.page
        size = page.viewport_size
        if self._sized is None or self._sized[0] is not page:
            self._sized = (page, page.context.new_cdp_session(page))
        session = self._sized[1]
        session.send("Emulation.clearDeviceMetricsOverride")
        metrics = {**size, "deviceScaleFactor": 1.0, "mobile": False}
        session.send("Emulation.setDeviceMetricsOverride", metrics)
        page.evaluate(SETTLE)

    def close(self) -> None:
        self.env.close()


class _Host:
    """The episodes of this process."""

    def __init__(self, settings: GymSettings) -> None:
        self.settings = settings
        self.episodes: dict[int, _Episode] = {}

    def open(self, number: int, begin: Begin) -> Seen:
        check_env_id(begin.env_id)  # registers it, too
        self.episodes[number] = _Episode(begin, self.settings)
        return self.episodes[number].reset()

    def act(self, number: int, *said: Any) -> Seen:
        if number not in self.episodes:
            raise ValueError("the environment is gone")
        return self.episodes[number].step(*said)

    def close(self, number: int) -> None:
        """End an episode, whatever is left of it."""
        episode = self.episodes.pop(number, None)
        if episode is not None:
            with contextlib.suppress(Exception):
                episode.close()


def serve(connection: Connection, progress: Any, settings: GymSettings) -> None:
    """The process of several environments (mmrl.workers.spawned.Worker)."""
    import browsergym.core
    from playwright.sync_api import sync_playwright

    logging.getLogger("browsergym").setLevel(logging.ERROR)  # it warns of each setting it is given
    os.environ["MINIWOB_URL"] = f"{ORIGIN}/miniwob/"
    with sync_playwright() as playwright:
        driver = _Driver(playwright, settings)
        browsergym.core._set_global_playwright(driver)
        host = _Host(settings)
        try:
            driver.playwright.chromium.launch(executable_path=settings.program).close()
        except Exception as error:
            connection.send(f"cannot start Chromium: {' '.join(str(error).split())[:400]}")
            return
        connection.send(None)
        while (message := connection.recv()) is not None:
            number, operation, page, *arguments = message
            result, why = None, None
            try:
                result = getattr(host, operation)(page, *arguments)
            except (
                Exception
            ) as error:  # of the page, the browser or its driver: the episode's failure
                why = " ".join(str(error).split())[:_MOST_ERROR] or type(error).__name__
                host.close(page)
            connection.send((number, why, result))
        for number in list(host.episodes):
            host.close(number)


class GymPage:
    """An environment with one episode: one question at a time."""

    def __init__(self, host: Host, number: int) -> None:
        self._host, self._number, self._open = host, number, True

    def act(self, text: str, frame: CoordFrame, size: ImageSize | None) -> Seen:
        """Do what the text says, its places in `frame` of a picture of `size`. Raises PageLost."""
        seen: Seen = self._host.ask("act", self._number, text, frame, size)
        return seen

    def close(self) -> None:
        """End the episode. May be called more than once; what is lost needs no closing."""
        if self._open:
            self._open = False
            self._host.pages -= 1
            with contextlib.suppress(PageLost):
                self._host.ask("close", self._number)


class Gyms(Browsers):
    """`processes` processes with environments of BrowserGym, started when they are needed."""

    def __init__(
        self,
        processes: int = 1,
        program: str | None = None,
        limit_s: float = 30.0,
        origins: Sequence[str] = (),
    ) -> None:
        super().__init__(processes, program, limit_s)
        self.origins = tuple(origins)

    def _new(self, name: str) -> Host:
        settings = GymSettings(find_chromium(self.program), self.origins, self.limit_s)
        return Host(settings, name.replace("browser", "browsergym"), serve)

    def begin(self, episode: Begin) -> tuple[GymPage, Seen]:
        """An environment, begun. Raises PageLost; ConfigError where no browser starts."""
        host, number = self._host(), next(self._numbers)
        try:
            return GymPage(host, number), host.ask("open", number, episode)
        except PageLost:
            host.pages -= 1
            raise
