"""What clients of policy servers share, whichever protocol they speak: an address, a connection that fails once and for good, and
what is believed of a server's words and actions.

mmrl.robotics.openpi_client and mmrl.robotics.lerobot_client are such clients.

Legend: K action steps of a chunk, A action dimensions.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any, NoReturn
from urllib.parse import SplitResult, urlsplit

import numpy as np

from mmrl.errors import ConfigError
from mmrl.robotics.remote import PolicyError, RemotePolicy

__all__ = ["LARGEST", "ServerPolicy", "plain", "plain_lines", "split_address"]

LARGEST = 64 << 20
"""Bytes of an answer."""
_SHOWN = 1500  # characters of an error of the server


def plain(said: Any, most: int) -> str:
    """What a server said, as a line of at most `most` characters that a terminal shows as it is."""
    return "".join(c if c.isprintable() else " " for c in str(said)[:most])


def plain_lines(said: str) -> str:
    """The end of an error that a server told in several lines."""
    return "\n".join(plain(line, _SHOWN) for line in said[-_SHOWN:].strip().splitlines())


def split_address(
    address: str, ports: Mapping[str, int], form: str, *, query: bool = False
) -> tuple[SplitResult, str, int]:
    """(parts, host, port) of an address. ports: that of each scheme where none is given; form: how one is written; query: whether
    it may end in settings. Raises ConfigError."""
    try:
        parts = urlsplit(address)
        port = parts.port if parts.port is not None else ports.get(parts.scheme, 0)
        good = parts.scheme in ports and bool(parts.hostname) and port > 0
    except ValueError:
        good = False
    if not good or not address.isascii() or (parts.query and not query) or parts.fragment:
        raise ConfigError(f"expected the address of a policy server as {form}, found {address!r}")
    if parts.username or parts.password:
        raise ConfigError(
            "expected the address of a policy server without a name and a password, which results would show; give a key "
            "with --policy-key or MMRL_API_KEY"
        )
    return parts, str(parts.hostname), port


class ServerPolicy(RemotePolicy):
    """A policy behind a connection. Whatever goes wrong ends it: its next use fails with the same words. act_s: seconds for an
    answer."""

    noun = "policy server"

    def __init__(self, address: str, act_s: float) -> None:
        self.address = address
        self.act_s = act_s
        self._broken = ""
        self._stack = contextlib.ExitStack()

    @property
    def _who(self) -> str:
        return f"{self.noun} {self.address}"

    def _where(self) -> dict[str, Any]:
        return {"server": self.address}

    def _unbroken(self) -> None:
        """Raises PolicyError after an error, or when it was closed."""
        if self._broken:
            raise PolicyError(self._broken)

    def _chunk(self, actions: np.ndarray, *, first: bool = False) -> np.ndarray:
        """The (K, A) of an answer, float64, of the facts' sizes unless it is the first. Raises PolicyError."""
        if actions.ndim != 2 or not actions.size or actions.dtype.kind not in "fiu":
            self._fail(
                f"expected actions as numbers (steps, dimensions), found {actions.dtype} {actions.shape}"
            )
        if not first and actions.shape != (wanted := (self.facts.chunk, self.facts.action_dim)):
            self._fail(f"expected actions {wanted}, as before, found {actions.shape}")
        return np.asarray(actions, np.float64)

    def _fail(self, what: str, cause: Exception | None = None) -> NoReturn:
        """End the connection; its next use fails with the same words."""
        self._broken = f"{self._who}: {what}"
        self.close()
        raise PolicyError(self._broken) from cause

    def close(self) -> None:
        """Close the connection; may be called more than once."""
        self._broken = (
            self._broken or f"{self._who}: expected an open connection, found a closed one"
        )
        with contextlib.suppress(OSError):
            self._stack.close()
