"""Starting and ending the viewer's server."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from mmrl.errors import MissingExtraError, install_command
from mmrl.operations.listening import is_loopback
from mmrl.viewer.app import application
from mmrl.viewer.folders import Roots
from mmrl.viewer.guard import Guard
from mmrl.viewer.media import MediaPolicy
from mmrl.viewer.workspace import Workspace

try:
    import uvicorn
except ImportError as error:
    raise MissingExtraError(
        f"mmrl view needs starlette and uvicorn ({error}): {install_command('view')}"
    ) from error

__all__ = ["make_app", "serve"]

_MOST_HEAD = 64 << 10  # bytes of a request's head
_MOST_CLIENTS = 64
_NICE = 10  # a run on the same machine goes first


def make_app(
    runs: Sequence[Path], host: str, key: str | None, media_roots: Sequence[Path]
) -> Guard:
    """The whole application. Raises DataError for a path that is no folder."""
    local = is_loopback(host)
    # beyond this machine only pictures of the run folders are shown, and those below folders that were named
    roots = tuple(r.resolve() for r in media_roots) if media_roots or not local else None
    app = application(Workspace(Roots(runs), MediaPolicy(roots)))
    return Guard(app, frozenset() if local else None, key)


class _Server(uvicorn.Server):
    """Uvicorn that says when it listens."""

    def __init__(self, config: uvicorn.Config, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._ready()


def serve(app: Guard, sock: socket.socket, ready: Callable[[], None]) -> None:
    """Answer until a signal ends the server; `ready` is called when it listens."""
    with suppress(OSError):
        os.nice(_NICE)
    config = uvicorn.Config(
        app,
        log_level="error",
        access_log=False,
        lifespan="off",
        server_header=False,
        timeout_graceful_shutdown=2,
        limit_concurrency=_MOST_CLIENTS,
        h11_max_incomplete_event_size=_MOST_HEAD,
        http="h11",
        ws="none",
        proxy_headers=False,
    )
    _Server(config, ready).run(sockets=[sock])
