"""Who may reach a server of ours without a key: this machine only."""

from __future__ import annotations

import ipaddress

from mmrl.errors import ConfigError

__all__ = ["check_key", "is_loopback"]


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a server that listens at `host` (an address, or localhost)."""
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
