"""Chromium in a process of its own: pages that are opened, acted on and looked at, each within a time of its own.

The process runs `serve(connection, progress, settings)` (mmrl.workers.spawned). A message is (number, operation, arguments), its
answer (number, None, Shown) or (number, what went wrong, None). Operations on different pages go on side by side, two at a time: a
page that hangs costs its own episode alone and is closed behind the others' backs. A browser that has died is started anew, and the
pages that it had are gone.

Pages are the user's, what is done on them is a stranger's. They get files of their own folder and nothing else: no name and no
address is resolved, other requests are aborted, dialogs dismissed, further windows closed, downloads refused.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import threading
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from mmrl.tasks.browser.sites import Site

__all__ = [
    "ALONE",
    "NO_WEBRTC",
    "ORIGIN",
    "BrowserSettings",
    "Command",
    "Shown",
    "file_for",
    "serve",
]

ORIGIN = "http://127.0.0.1"
"""Where pages are, for the browser; nothing listens there."""
NO_WEBRTC = "--force-webrtc-ip-handling-policy=disable_non_proxied_udp"
_NO_NETWORK = ("--host-resolver-rules=MAP * ~NOTFOUND", NO_WEBRTC)
# what moves by itself, and what shows where the mouse is, would make equal states look different
_STILL = (
    "*, *::before, *::after { animation: none !important; transition: none !important; caret-color: transparent !important; }"
    " #click-canvas { display: none !important; }"
)
_TYPES = {
    ".html": "text/html",
    ".js": "text/javascript",
    ".css": "text/css",
    ".png": "image/png",
    ".jpg": "image/jpeg",
    ".gif": "image/gif",
    ".svg": "image/svg+xml",
    ".woff": "font/woff",
    ".json": "application/json",
}
# A page has a clipboard of its own: a browser has one for all its pages. WebRTC would send datagrams past every rule. The key
# Tab goes on from where the episode before had its focus or clicked, unless it is taken to the top.
ALONE = """(() => {
  let held = "";
  const chosen = () => {
    const field = document.activeElement;
    const from = field?.selectionStart, to = field?.selectionEnd;
    return typeof from === "number" ? field.value.slice(from, to) : String(getSelection());
  };
  const take = (event) => { held = chosen(); event.preventDefault(); event.stopPropagation(); };
  addEventListener("copy", take, true);
  addEventListener("cut", (event) => { take(event); document.execCommand("delete"); }, true);
  addEventListener("paste", (event) => { event.preventDefault(); document.execCommand("insertText", false, held); }, true);
  const tabFromTop = () => {
    const top = document.createElement("span");
    top.tabIndex = -1;
    document.body.prepend(top);
    top.focus({preventScroll: true});
    top.remove();
  };
  addEventListener("mmrl-begin", () => { held = ""; tabFromTop(); getSelection().removeAllRanges(); scrollTo(0, 0); });
  for (const name of ["RTCPeerConnection", "webkitRTCPeerConnection", "RTCDataChannel"]) delete window[name];
})()"""
_MOST_IDLE = (
    8  # pages that wait for the next episode of their kind, where no more were open at a time
)
_PARKED = (1, 1)  # of pixels beyond the shown part
_CLOSE_S = 5.0
_PARK_S = 2.0
_START_S = 120.0
_WAIT_S = 0.2  # that the action `wait` waits
# two frames, in which styles and layout are made, and the pictures that the page has put into itself
SETTLE = """async () => {
  const drawn = () => new Promise((r) => requestAnimationFrame(() => requestAnimationFrame(() => r(null))));
  await drawn();
  const late = [...document.images].filter((image) => !image.complete && image.loading !== "lazy");
  if (late.length) {
    await Promise.all(late.map((image) => image.decode().catch(() => null)));
    await drawn();
  }
}"""
# A style that first applies in an episode, such as a dialog's icon, would load its picture then, and the first look would show it
# or not. Kept, so that Chromium does not forget them.
_STYLED = """async () => {
  const found = new Set();
  for (const sheet of document.styleSheets) {
    try {
      for (const rule of sheet.cssRules)
        for (const [, url] of rule.cssText.matchAll(/url\\("([^"]+)"\\)/g))
          if (!/[.](woff2?|ttf|otf|eot)$/.test(url)) found.add(new URL(url, sheet.href ?? document.baseURI).href);
    } catch { /* a sheet that is not there has no rules */ }
  }
  const images = [...found].map((url) => Object.assign(new Image(), {src: url}));
  await Promise.all(images.map((image) => image.decode().catch(() => null)));
  window[Symbol()] = images;
}"""
# each a single question: a question to a page takes as long as most of what is asked
_BEGUN = """async (seed) => {
  dispatchEvent(new Event("mmrl-begin"));
  const goal = await (%s)(seed);
  await (%s)();
  return {...(%s)(), goal};
}"""
_SETTLED = "async () => { await (%s)(); return (%s)(); }"
_SELECT = """([x, y, label]) => {
  const box = document.elementFromPoint(x, y)?.closest("select");
  const option = box && [...box.options].find((o) => o.label.trim() === label || o.value === label);
  if (!option) return false;
  box.value = option.value;
  for (const kind of ["input", "change"]) box.dispatchEvent(new Event(kind, {bubbles: true}));
  return true;
}"""


_ELEMENTS = """([width, height]) => [...document.querySelectorAll("body *")].flatMap((e) => {
  const own = [...e.childNodes].filter((n) => n.nodeType === 3).map((n) => n.data).join(" ").replace(/\\s+/g, " ").trim();
  const field = e.matches("input, select, textarea, button, a, option, [onclick], [role]");
  if (!own && !field && !e.matches("div:empty, span:empty, svg *, canvas")) return [];
  const r = e.getBoundingClientRect();
  const box = [Math.max(0, r.left), Math.max(0, r.top), Math.min(width, r.right), Math.min(height, r.bottom)];
  if (box[2] - box[0] < 1 || box[3] - box[1] < 1 || !e.checkVisibility()) return [];
  const hit = document.elementFromPoint((box[0] + box[2]) / 2, (box[1] + box[3]) / 2);
  if (hit === null || !(hit === e || e.contains(hit))) return [];
  return [{ tag: e.tagName.toLowerCase(), role: e.getAttribute("role") ?? e.type ?? "", name: e.getAttribute("aria-label") ?? "",
    text: own, value: String(e.value ?? ""), checked: e.checked === true, box }];
})"""
_MOST_ELEMENTS = 400


@dataclass(frozen=True)
class BrowserSettings:
    """`program`: path of Chromium; `limit_s`: seconds for one operation on a page; `parallel`: operations at a time."""

    program: str
    flags: tuple[str, ...] = ()
    limit_s: float = 20.0
    parallel: int = 2


@dataclass(frozen=True)
class Command:
    """One deed on a page: click, double_click, right_click and hover at `point`; drag from there to `end`; type `text` (at `point`,
    where there is one); select the option `text` at `point`; press the keys `text` (Control+a); scroll towards `text`; wait.
    Places are in pixels of the page."""

    kind: str
    point: tuple[float, float] = (-1.0, -1.0)
    end: tuple[float, float] = (-1.0, -1.0)
    text: str = ""

    @property
    def placed(self) -> bool:
        """Whether it has a place of its own."""
        return self.point != (-1.0, -1.0)


@dataclass(frozen=True)
class Shown:
    """A page as it is now: its picture as PNG, whether its episode is over, the reward then, how much of the goal is reached, and
    whether the action could be done at all (a click outside of the page, an option that is not there cannot)."""

    png: bytes
    goal: str = ""
    done: bool = False
    reward: float = 0.0
    progress: float = 0.0
    acted: bool = True


@dataclass
class _Page:
    site: Site
    context: Any
    page: Any
    protocol: Any = None  # of Chromium's developer tools, for this page
    goal: str = ""
    crashed: bool = False


class _Browser:
    """The browser and its open pages, of one event loop."""

    def __init__(self, settings: BrowserSettings, playwright: Any) -> None:
        self.settings, self.playwright = settings, playwright
        self.pages: dict[int, _Page] = {}
        self.idle: list[_Page] = []  # the one that was given back first stands first
        self.most = _MOST_IDLE  # pages at a time, of both kinds, unless more have to be open
        self.turn = asyncio.Semaphore(settings.parallel)
        self._starting = asyncio.Lock()
        self.browser: Any = None
        self._closing: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Start the browser, where none runs. One that ended and cannot be started again takes the process along: another one, with
        a driver of its own, will take its place."""
        async with self._starting:
            if self.browser is not None and self.browser.is_connected():
                return
            again = self.browser is not None
            self.pages.clear()
            self.idle.clear()
            try:
                self.browser = await asyncio.wait_for(self._launch(), _START_S)
            except Exception:
                if again:
                    os._exit(1)
                raise

    async def _launch(self) -> Any:
        return await self.playwright.chromium.launch(
            executable_path=self.settings.program,
            args=[*self.settings.flags, *_NO_NETWORK],
            # what a signal to all processes means is decided by the run's own
            handle_sigint=False,
            handle_sigterm=False,
            handle_sighup=False,
        )

    async def open(self, number: int, site: Site, seed: str) -> Shown:
        """Begin an episode on page `number`."""
        await self.start()
        waiting = next((p for p in self.idle if p.site == site and not p.crashed), None)
        if waiting is None and len(self.pages) + len(self.idle) >= self.most:
            # another kind's, whose process and context cost more than its file
            waiting = next((p for p in self.idle if not p.crashed), None)
        if waiting is not None:
            self.idle.remove(waiting)
            if waiting.site != site:
                waiting = await self._turned(waiting, site)
        self.most = max(self.most, len(self.pages) + 1)
        self._drop_idle(self.most - 1)
        opened = self.pages[number] = waiting or await self._new(site)
        begun = _BEGUN % (site.begin, SETTLE, site.judge)
        judged = await opened.page.evaluate(begun, seed)
        opened.goal = str(judged["goal"])
        return await self._shown(opened, judged)

    async def _turned(self, opened: _Page, site: Site) -> _Page:
        """A page of another kind made one of this kind, as if it had been opened so."""
        opened.site, page = site, opened.page
        width, height = site.viewport
        try:
            await opened.context.clear_cookies()
            await page.set_viewport_size({"width": width, "height": height})
            await page.evaluate("() => { localStorage.clear(); sessionStorage.clear(); }")
            async with page.expect_navigation(wait_until="load"):
                # nothing to go back to
                await page.evaluate("(url) => location.replace(url)", f"{ORIGIN}/{site.file}")
            await page.add_style_tag(content=_STILL)
            await page.evaluate(_STYLED)
        except BaseException:
            self.drop(opened)
            raise
        return opened

    async def _new(self, site: Site) -> _Page:
        width, height = site.viewport
        context = await self.browser.new_context(
            viewport={"width": width, "height": height},
            device_scale_factor=1,
            accept_downloads=False,
        )
        opened = _Page(site, context, None)
        try:
            await context.route("**/*", lambda route: _give(route, opened.site.folder))
            await context.add_init_script(ALONE)
            opened.page = page = await context.new_page()
            opened.protocol = await context.new_cdp_session(page)
            page.on("dialog", lambda dialog: asyncio.ensure_future(_quietly(dialog.dismiss())))
            page.on("crash", lambda _: setattr(opened, "crashed", True))
            context.on("page", lambda other: asyncio.ensure_future(_quietly(other.close())))
            await page.goto(f"{ORIGIN}/{site.file}")
            await page.add_style_tag(content=_STILL)
            await page.evaluate(_STYLED)
        except (
            BaseException
        ):  # cancelled, too: a page that hangs while it loads belongs to nobody yet
            self.drop(opened)
            raise
        return opened

    def _page(self, number: int) -> _Page:
        if number not in self.pages:
            raise RuntimeError("the page is no longer open: its browser ended")
        return self.pages[number]

    async def act(self, number: int, command: Command) -> Shown:
        """Do one action, and look."""
        opened = self._page(number)
        acted = await _do(opened, command)
        judged = await opened.page.evaluate(_SETTLED % (SETTLE, opened.site.judge))
        return await self._shown(opened, judged, acted)

    async def elements(self, number: int) -> list[dict[str, Any]]:
        """What can be seen and pointed at: tag, role, name, text, value, checked, and box in pixels."""
        opened = self._page(number)
        found = await opened.page.evaluate(_ELEMENTS, list(opened.site.size))
        return list(found[:_MOST_ELEMENTS])

    async def _shown(self, opened: _Page, judged: Mapping[str, Any], acted: bool = True) -> Shown:
        width, height = opened.site.size
        clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
        # Playwright's own screenshot asks the page five times more, for fonts and carets; speed: PNG is packed less
        asked = {"format": "png", "clip": clip, "optimizeForSpeed": True}
        taken = await opened.protocol.send("Page.captureScreenshot", asked)
        return Shown(
            base64.b64decode(taken["data"]),
            opened.goal,
            bool(judged["done"]),
            float(judged["reward"]),
            float(judged["progress"]),
            acted,
        )

    async def close(self, number: int) -> None:
        """Keep the page for the next episode of its kind, where it is still that page."""
        opened = self.pages.pop(number, None)
        if opened is None:
            return
        usable = not opened.crashed and opened.page.url == f"{ORIGIN}/{opened.site.file}"
        try:
            if not usable or not self.browser.is_connected():
                raise RuntimeError("not to be used again")
            width, height = opened.site.viewport
            parked = opened.page.mouse.move(width - _PARKED[0], height - _PARKED[1])
            await asyncio.wait_for(parked, _PARK_S)
        except BaseException as error:
            self.drop(opened)
            if not isinstance(error, Exception):
                raise
        else:
            self.idle.append(opened)
            self._drop_idle(self.most)

    def _drop_idle(self, most: int) -> None:
        """Keep so many pages, open ones counted: idle ones never need more memory than the run has needed already."""
        while self.idle and len(self.pages) + len(self.idle) > most:
            self.drop(self.idle.pop(0))

    def lose(self, number: int) -> None:
        """The page hangs or has crashed: close it without waiting."""
        if (opened := self.pages.pop(number, None)) is not None:
            self.drop(opened)

    def drop(self, opened: _Page) -> None:
        """Close a page and all that belongs to it, in the background."""
        task = asyncio.ensure_future(_quietly(asyncio.wait_for(opened.context.close(), _CLOSE_S)))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)


async def _quietly(waited: Any) -> None:
    """Of a page that is being closed, or is gone already."""
    with contextlib.suppress(Exception):
        await waited


def file_for(url: str, folder: Path) -> tuple[bytes, str] | None:
    """What a page of `folder` gets for `url`, and its content type; None for what does not lie in the folder."""
    asked = urlsplit(url)
    path = (folder / unquote(asked.path).lstrip("/")).resolve()
    if f"{asked.scheme}://{asked.netloc}" != ORIGIN or not path.is_relative_to(folder):
        return None
    try:
        return path.read_bytes(), _TYPES.get(path.suffix, "application/octet-stream")
    except OSError:
        return None


async def _give(route: Any, folder: Path) -> None:
    """A file of the page's own folder, or nothing."""
    found = file_for(route.request.url, folder)
    if found is None:
        answered = route.abort()
    else:
        answered = route.fulfill(body=found[0], content_type=found[1])
    await _quietly(answered)


async def _do(opened: _Page, command: Command) -> bool:
    """Do it; whether it could be done."""
    page, (width, height) = opened.page, opened.site.size
    kind, (x, y), (x2, y2), text = command.kind, command.point, command.end, command.text
    for px, py in [command.point] * command.placed + [command.end] * (kind == "drag"):
        if not (0 <= px < width and 0 <= py < height):
            return False
    mouse, keyboard = page.mouse, page.keyboard
    if kind == "click":
        await mouse.click(x, y)
    elif kind == "double_click":
        await mouse.dblclick(x, y)
    elif kind == "right_click":
        await mouse.click(x, y, button="right")
    elif kind == "hover":
        await mouse.move(x, y)
    elif kind == "drag":
        await mouse.move(x, y)
        await mouse.down()
        await mouse.move(x2, y2, steps=8)
        await mouse.up()
    elif kind == "type":
        if command.placed:
            await mouse.click(x, y)
        await keyboard.type(text)
    elif kind == "select":
        return bool(await page.evaluate(_SELECT, [x, y, text]))
    elif kind == "press":
        return await _press(keyboard, text)
    elif kind == "scroll":
        across, down = {"up": (0, -1), "down": (0, 1), "left": (-1, 0), "right": (1, 0)}[text]
        await mouse.move(width / 2, height / 2)
        await mouse.wheel(across * width / 2, down * height / 2)
    else:
        assert kind == "wait", kind
        await asyncio.sleep(_WAIT_S)
    return True


async def _press(keyboard: Any, keys: str) -> bool:
    """Press keys such as Control+a; False for one that there is not."""
    try:
        await keyboard.press(keys)
    except Exception as error:
        if "Unknown key" in str(error):
            return False
        raise
    return True


async def _answer(browser: _Browser, connection: Connection, message: tuple[Any, ...]) -> None:
    """Do what a message asks for, in its time, and answer it."""
    number, operation, page, *arguments = message
    limit_s = browser.settings.limit_s
    try:
        if operation == "close":
            await asyncio.wait_for(browser.close(page), limit_s)
            result = None
        else:
            async with browser.turn:
                work: Callable[..., Awaitable[Any]] = getattr(browser, operation)
                result = await asyncio.wait_for(work(page, *arguments), limit_s)
        connection.send((number, None, result))
    except Exception as error:  # of the page, the browser or its driver: the episode's failure
        why = (
            f"the page did not answer within {limit_s:g} s"
            if isinstance(error, (TimeoutError, asyncio.TimeoutError))
            else " ".join(str(error).split())[:300] or type(error).__name__
        )
        browser.lose(page)
        connection.send((number, why, None))


async def _serve(connection: Connection, settings: BrowserSettings) -> None:
    from playwright.async_api import async_playwright

    loop = asyncio.get_running_loop()
    messages: asyncio.Queue[tuple[Any, ...] | None] = asyncio.Queue()

    def read() -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                message = connection.recv()
                loop.call_soon_threadsafe(messages.put_nowait, message)
                if message is None:
                    return
        os._exit(0)  # who asked is gone

    async with async_playwright() as playwright:
        browser = _Browser(settings, playwright)
        try:
            await browser.start()
        except Exception as error:
            connection.send(f"cannot start Chromium: {' '.join(str(error).split())[:400]}")
            return
        connection.send(None)
        threading.Thread(target=read, daemon=True, name="requests").start()
        running: set[asyncio.Task[None]] = set()
        while (message := await messages.get()) is not None:
            task = asyncio.ensure_future(_answer(browser, connection, message))
            running.add(task)
            task.add_done_callback(running.discard)
        await _quietly(browser.browser.close())


def serve(connection: Connection, progress: Any, settings: BrowserSettings) -> None:
    """The process of one browser (mmrl.workers.spawned.Worker)."""
    asyncio.run(_serve(connection, settings))
