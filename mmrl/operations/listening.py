"""Where a server of ours listens, and who may reach it without a key: this machine only."""

from __future__ import annotations

import ipaddress
import socket

from mmrl.errors import ConfigError

__all__ = ["bind", "check_key", "is_loopback"]


def is_loopback(host: str) -> bool:
    """Whether `host` (an address, or localhost) means this machine itself: only it reaches a server that listens there."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"  # other names may come to mean other addresses


def check_key(host: str, key: str | None, danger: str, also: str = "") -> None:
    """Raises ConfigError for an address that others reach without a key; `danger` says what they could do, `also` another fix."""
    if not key and not is_loopback(host):
        raise ConfigError(
            f"expected a key for a server that listens at {host}, found none: whoever reaches it could {danger}; set "
            f"MMRL_API_KEY (or --api-key) here and for the clients, or --host 127.0.0.1{also}"
        )


def bind(host: str, port: int) -> socket.socket:
    """A bound socket that does not listen yet: clients are refused until the model is there. Raises ConfigError."""
    sock = None
    try:
        family, kind, number, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[
            0
        ]
        sock = socket.socket(family, kind, number)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except OSError as error:
        if sock is not None:
            sock.close()
        raise ConfigError(
            f"expected a free address for --host {host} --port {port}, found none ({error}); choose another port, 0 "
            "for any"
        ) from error
    return sock
