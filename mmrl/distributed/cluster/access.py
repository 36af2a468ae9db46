"""What keeps others out of a Ray cluster that a run starts for itself: a token that is drawn for it alone, and a folder of its own.

Left to itself Ray 2.60 gives all clusters of a user one token, in ~/.ray/auth_token with the mode of any file, none where
RAY_AUTH_MODE says disabled, and puts its sockets into folders that everybody on the machine may write to.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = ["forget_token", "own_token", "private_folder"]

_LONGEST = 28  # characters: what lies below adds 79, and the path of a socket may have 107 bytes
_AUTH = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")


def private_folder() -> Path:
    """A new folder for a cluster's token, and for Ray's folder, which Ray opens to everybody (mode 0777): no other user may
    enter this one. In RAY_TMPDIR, as Ray's own, else among temporary files."""
    parent = os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()
    return Path(tempfile.mkdtemp(prefix="ray-", dir=parent if len(parent) <= _LONGEST else "/tmp"))


@contextlib.contextmanager
def own_token(folder: Path) -> Iterator[None]:
    """While it is open a cluster started here asks for a new random token, whatever the environment says of another one; the
    cluster's processes inherit where it is: a file of mode 0600 in `folder`. This process keeps it until `forget_token`."""
    path = folder / "token"
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(secrets.token_hex(32))
    before = {name: os.environ.pop(name, None) for name in _AUTH}
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(path)}
    try:
        forget_token()
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def forget_token() -> None:
    """Let Ray read the environment's mode and token anew: it keeps the first ones for as long as the process lives, and
    would show an ended cluster's token to the next one, or demand a token of one that has none. While no connection is open."""
    from ray import _raylet  # there is no public way

    raylet: Any = _raylet  # its stubs lack both
    # in this order: a thread that still ends a connection would look for a token, find none and abort the process
    raylet.Config.initialize("")
    raylet.AuthenticationTokenLoader.instance().reset_cache()
