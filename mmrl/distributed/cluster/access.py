"""What keeps others out of a Ray cluster that a run starts for itself: a token that is drawn for it alone, and a folder of its own.

Left to itself Ray 2.60 gives all clusters of a user one token, in ~/.ray/auth_token with the mode of any file, none where
RAY_AUTH_MODE says disabled, and puts its sockets into folders that everybody on the machine may write to.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = ["forget_token", "own_token", "private_folder"]

_LOCK = "lock"  # held by the process whose folder it is
_LONGEST = 28  # characters: what lies below adds 79, and the path of a socket may have 107 bytes
_AUTH = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")


def private_folder() -> tuple[Path, int]:
    """A new folder for a cluster's token, and for Ray's folder, which Ray opens to everybody (mode 0777): no other user may
    enter this one. In RAY_TMPDIR, as Ray's own, else among temporary files.

    It is this process's while the descriptor returned with it is open (os.close); those whose process was killed are removed."""
    parent = os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()
    place = Path(parent if len(parent) <= _LONGEST else "/tmp")
    for left in place.glob("ray-????????"):
        _remove_abandoned(left)
    folder = Path(tempfile.mkdtemp(prefix="ray-", dir=place))
    unlocked = folder / "lock.new"
    lock = os.open(unlocked, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    # locks hold where process ids say nothing: in containers that share the folder. On a disk without them nobody takes the folder
    # for abandoned.
    with contextlib.suppress(OSError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        unlocked.rename(folder / _LOCK)  # it never has this name unlocked
    return folder, lock


def _remove_abandoned(folder: Path) -> None:
    """Remove a folder of `private_folder`, of this user, whose process has ended."""
    with contextlib.suppress(OSError):  # of somebody else, of Ray itself, in use, or gone meanwhile
        if folder.is_symlink() or folder.stat().st_uid != os.getuid():
            return
        lock = os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(lock)


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
