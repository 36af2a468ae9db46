"""Folders that many processes may want at once: written beside their place, then renamed into it.

python -c "from mmrl.robotics.cached_folders import cache_root; print(cache_root())"
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from mmrl.errors import CacheError

__all__ = ["cache_root", "publish_folder"]


def cache_root() -> Path:
    """$MMRL_CACHE, else ~/.cache/mmrl."""
    return Path(os.environ.get("MMRL_CACHE") or Path.home() / ".cache" / "mmrl").expanduser()


def publish_folder(target: Path, write: Callable[[Path], None]) -> Path:
    """Fill a folder beside `target` and rename it to `target`; whoever comes second keeps the first one's. Raises CacheError
    when the disk is full or not writable."""
    if target.is_dir():
        return target
    scratch: Path | None = None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
        scratch.chmod(0o755)
        write(scratch)
        try:
            scratch.rename(target)
        except OSError:
            if not target.is_dir():
                raise
    except OSError as error:
        raise CacheError(
            f"expected to write {target}, found {error}; point MMRL_CACHE at a folder that can be written"
        ) from error
    finally:
        if scratch is not None and scratch.is_dir():
            shutil.rmtree(scratch, ignore_errors=True)
    return target
