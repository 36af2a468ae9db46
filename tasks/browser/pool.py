"""Several browsers, one process each: pages are opened, acted on and given back; what hangs or dies costs its own episodes.

    with Browsers(processes=2) as browsers:
        page, shown = browsers.open(find_site("miniwob/click-test"), seed=7)
        shown = page.act(Command("click", (80, 120)))
        page.close()

Threads may use it side by side, each with its own page. A page that does not answer in its time is closed by its process
(mmrl.tasks.browser.chromium); a process that does not answer, or dies, is killed and replaced, and its pages raise PageLost.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any

from mmrl.errors import ConfigError, MMRLError
from mmrl.tasks.browser.chromium import BrowserSettings, Command, Shown, serve
from mmrl.tasks.browser.sites import Site
from mmrl.tasks.pages import FLAGS, find_chromium
from mmrl.workers.process import ChildError
from mmrl.workers.spawned import START_S, Worker

__all__ = ["EXACT", "Browsers", "Host", "Page", "PageLost"]

# Without them a page that is painted in parts has pixels that differ by 1 from one time to the next: 12 of 15 pictures of a dialog.
EXACT = ("--disable-partial-raster", "--disable-skia-runtime-opts")
_GRACE_S = 15.0  # beyond a page's own time: the process's, to answer that the page did not
_WAITERS = 64  # operations that may wait for their turn before one: they count for its patience


class PageLost(MMRLError):
    """The page hung or crashed, or its browser did: the episode cannot go on."""


class Host:
    """One browser's process and the questions that it has not answered. `settings` go to `target`; of them, `limit_s` and
    `parallel` are known here, as BrowserSettings has them."""

    def __init__(self, settings: Any, name: str, target: Callable[..., None] = serve) -> None:
        self.settings, self.pages, self.gone = settings, 0, False
        self._numbers = itertools.count()
        self._waiting: dict[int, Future[Any]] = {}
        self._lock = threading.Lock()
        self.worker = Worker(target, (settings,), name)
        try:
            self.worker.await_ready(START_S)
        except ChildError as error:
            self.worker.kill()
            raise ConfigError(
                f"expected Chromium to start, found: {error}; run `bash scripts/system_packages.sh`, or name another program"
            ) from error
        self._reader = threading.Thread(target=self._read, daemon=True, name=f"{name}-answers")
        self._reader.start()

    def _read(self) -> None:
        try:
            while True:
                number, wrong, shown = self.worker.receive()
                with self._lock:
                    future = self._waiting.pop(number, None)
                if future is None:
                    continue
                if wrong is None:
                    future.set_result(shown)
                else:
                    future.set_exception(PageLost(wrong))
        except ChildError as error:
            with self._lock:
                self.gone = True
                waiting, self._waiting = self._waiting, {}
            for future in waiting.values():
                future.set_exception(PageLost(f"the browser's process ended: {error}"))

    def ask(self, operation: str, page: int, *arguments: Any) -> Any:
        """The answer to one question. Raises PageLost."""
        future: Future[Any] = Future()
        with self._lock:
            if self.gone:
                raise PageLost("the browser's process ended")
            number = next(self._numbers)
            self._waiting[number] = future
            ahead = len(self._waiting)
            self.worker.give((number, operation, page, *arguments), float("inf"))
        patience_s = self.settings.limit_s * (1 + min(ahead, _WAITERS) / self.settings.parallel)
        try:
            return future.result(patience_s + _GRACE_S)
        except FutureTimeout:
            self.worker.stop()
            raise PageLost(
                f"the browser did not answer within {patience_s + _GRACE_S:g} s and was ended"
            ) from None

    def close(self) -> None:
        """End the process and the browser."""
        with self._lock:
            self.gone = True
        self.worker.close()


class Page:
    """A page with one episode on it: one question at a time."""

    def __init__(self, host: Host, number: int) -> None:
        self._host, self._number, self._open = host, number, True

    def act(self, command: Command) -> Shown:
        """Do it, and look. Raises PageLost."""
        shown: Shown = self._host.ask("act", self._number, command)
        return shown

    def elements(self) -> list[dict[str, Any]]:
        """What can be seen and pointed at, for scripted players: tag, role, name, text, value, checked, box [x1, y1, x2, y2] in
        pixels. Raises PageLost."""
        found: list[dict[str, Any]] = self._host.ask("elements", self._number)
        return found

    def close(self) -> None:
        """Give the page back. May be called more than once; what is lost needs no closing."""
        if self._open:
            self._open = False
            self._host.pages -= 1
            with contextlib.suppress(PageLost):
                self._host.ask("close", self._number)


class Browsers:
    """`processes` browsers, started when they are needed: one per core is as fast as it gets."""

    def __init__(
        self, processes: int = 1, program: str | None = None, limit_s: float = 20.0
    ) -> None:
        self.processes, self.program, self.limit_s = processes, program, limit_s
        self._hosts: list[Host] = []
        self._numbers, self._names = itertools.count(), itertools.count()
        self._lock = threading.Lock()

    def _new(self, name: str) -> Host:
        root = ["--no-sandbox"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []
        flags = (*FLAGS, *EXACT, *root)
        return Host(BrowserSettings(find_chromium(self.program), flags, self.limit_s), name)

    def _host(self) -> Host:
        """The browser with the fewest pages; those that ended are replaced."""
        with self._lock:
            self._hosts = [h for h in self._hosts if not h.gone]
            while len(self._hosts) < self.processes:
                self._hosts.append(self._new(f"mmrl-browser-{next(self._names)}"))
            found = min(self._hosts, key=lambda h: h.pages)
            found.pages += 1
            return found

    def open(self, site: Site, seed: int) -> tuple[Page, Shown]:
        """A page of the site, begun with the seed. Raises PageLost; ConfigError where no browser starts."""
        host, number = self._host(), next(self._numbers)
        try:
            return Page(host, number), host.ask("open", number, site, str(seed))
        except PageLost:
            host.pages -= 1
            raise

    def close(self) -> None:
        """End all browsers."""
        with self._lock:
            hosts, self._hosts = self._hosts, []
        for host in hosts:
            host.close()

    def __enter__(self) -> Browsers:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
