"""`mmrl view`: the viewer's server on this machine."""

from __future__ import annotations

import webbrowser
from pathlib import Path
from urllib.parse import quote

import typer

from mmrl.errors import DataError
from mmrl.operations.listening import bind, check_key

__all__ = ["view_command"]


def view_command(
    runs: list[Path],
    host: str,
    port: int,
    key: str | None,
    no_key: bool,
    media_roots: list[Path],
    browse: bool,
) -> None:
    """Serve the viewer until it is interrupted. Raises ConfigError, DataError, MissingExtraError."""
    from mmrl.viewer.server import make_app, serve

    if not no_key:
        check_key(
            host,
            key,
            "read every run below these folders",
            ", or --no-key where all who reach it may",
        )
    for root in media_roots:
        if not root.is_dir():
            raise DataError(f"expected a folder for --media-root, found none at {root}")
    app = make_app(runs, host, None if no_key else key, media_roots)
    sock = bind(host, port)
    shown = f"[{host}]" if ":" in host else host
    address = f"http://{shown}:{sock.getsockname()[1]}/"
    if key and not no_key:
        address += f"?key={quote(key, safe='')}"

    def ready() -> None:
        typer.echo(f"viewer: {address}  (Ctrl-C ends it)")
        if browse:
            webbrowser.open(address)

    serve(app, sock, ready)
