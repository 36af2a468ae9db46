"""What a stranger may make the server hold, read and do; each is checked before the work it bounds. Options of `mmrl serve`."""

from __future__ import annotations

import os
from dataclasses import dataclass

__all__ = ["Limits", "default_workers"]


def default_workers() -> int:
    """Half of the processor's cores, from 2 to 8."""
    return max(2, min(8, (os.cpu_count() or 2) // 2))


@dataclass(frozen=True)
class Limits:
    """Sizes in bytes, pixels and characters, times in seconds."""

    # a request's bytes
    body_bytes: int = 256 << 20  # of one body, one fetched picture, clip or sound
    held_bytes: int = 1 << 30  # of all bodies, fetched media and pixels of waiting prompts at once
    # a request's content
    # of all its texts; the server sets 16 for each token of the longest prompt
    text_bytes: int = 16 * 16384
    stop_chars: int = 4096  # of all its stop strings
    media: int = 128  # pictures, clips and sounds
    pixels: int = 50_000_000  # of one picture, or one frame of a clip
    total_pixels: int = 2_000_000_000  # of its pictures, and of the frames taken from its clips
    clip_frames: int = 250_000  # that one clip may hold; few of them are decoded
    # connections
    connections: int = 512
    header_s: float = 10.0  # until the head of a request is there
    body_s: float = 60.0  # until its body is
    send_s: float = 60.0  # that a client may take no byte of its answer, and that a piece of it may wait for its client
    unread: int = 200_000  # pieces of an answer, and log-probs in them, that wait for its client: some 200 bytes each
    waiting: int = 1024  # requests that wait for their turn
    # the processes that read requests
    workers: int = 2  # one of them for small requests only
    prepare_s: float = 60.0  # for one request
    worker_bytes: int = 4 << 30  # of memory beyond what a process starts with
    # fetching
    fetch_s: float = 30.0  # for all remote media of a request
    fetches: int = 16  # at once
