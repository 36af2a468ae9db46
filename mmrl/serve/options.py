"""What `mmrl serve` is told. Part of mmrl.serve."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from mmrl.serve.limits import Limits

__all__ = ["ServeOptions"]


@dataclass(frozen=True)
class ServeOptions:
    """The command's options; see `mmrl serve --help`."""

    host: str = "127.0.0.1"
    port: int = 8000
    engine: str = "auto"
    max_tokens: int | None = None
    name: str | None = None
    media_root: Path | None = None
    allow_remote_media: bool = False
    media_hosts: tuple[str, ...] = ()
    api_key: str | None = None
    no_key: bool = False
    grace_s: float = 30.0
    limits: Limits = field(default_factory=Limits)
    text_bytes: int | None = None  # None: what the longest prompt can have
