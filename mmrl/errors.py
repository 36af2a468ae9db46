"""Errors a user can cause: each says what was expected, what was found and how to fix it.

All derive from MMRLError and from the standard class a caller would catch anyway (ValueError, OSError ...).
Invariants of our own code are `assert`s, never these.
"""

from __future__ import annotations

import difflib
import importlib.util
from collections.abc import Iterable
from pathlib import Path

__all__ = [
    "CacheError",
    "CheckpointError",
    "ConfigError",
    "DataError",
    "MediaError",
    "MMRLError",
    "MismatchError",
    "MissingExtraError",
    "NonFiniteError",
    "RegistryError",
    "RewardError",
    "RolloutError",
    "StorageError",
    "WeightSyncError",
    "did_you_mean",
    "install_command",
    "need_package",
]


class MMRLError(Exception):
    """Base of every error a user can cause. The CLI prints it without a traceback and exits with status 2."""


class ConfigError(MMRLError, ValueError):
    """A configuration file, override or argument is wrong."""


class DataError(MMRLError, ValueError):
    """A data file or one of its rows cannot be used."""


class MediaError(MMRLError, ValueError):
    """A picture, clip or sound cannot be read; `kind` classifies it: missing, empty, truncated, corrupt, unsupported,
    no_video, no_audio, too_short, too_long, too_large."""

    def __init__(self, message: str, *, kind: str, path: str = "") -> None:
        super().__init__(message)
        self.kind, self.path = kind, path

    def __reduce__(self) -> tuple:
        return _rebuild_media_error, (str(self), self.kind, self.path)


def _rebuild_media_error(message: str, kind: str, path: str) -> MediaError:
    return MediaError(message, kind=kind, path=path)


class RegistryError(MMRLError, LookupError):
    """A task or reward name cannot be resolved."""


class RewardError(MMRLError, RuntimeError):
    """Rewards failed (raised, hung, or left their range) more often than the run allows."""


class MismatchError(MMRLError, ValueError):
    """What training sees differs from what rollout saw (media tensors or positions)."""


class CheckpointError(MMRLError, OSError):
    """A checkpoint cannot be written or read."""


class CacheError(MMRLError, OSError):
    """The tensor cache cannot be used as asked: disk full, not writable, no cache there, or a build that needs itself."""


class StorageError(MMRLError, OSError):
    """A file of a run cannot be written: the disk is full, or the folder is read-only."""


class NonFiniteError(MMRLError, ArithmeticError):
    """A loss, gradient or log-probability is NaN or infinite."""

    alarm = "non_finite"


class RolloutError(MMRLError, RuntimeError):
    """A rollout engine failed: vLLM raised, or its server is gone."""


class WeightSyncError(RolloutError):
    """A rollout engine does not compute with the trainer's weights after a sync."""

    alarm = "weight_sync"


class MissingExtraError(MMRLError, ImportError):
    """An optional library is missing; the message names the extra to install."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """' Did you mean X?' for the closest of `known`, or '' when nothing is close."""
    close = difflib.get_close_matches(str(word), [str(k) for k in known], n=1, cutoff=0.6)
    return f" Did you mean '{close[0]}'?" if close else ""


def need_package(package: str, purpose: str, extra: str = "", *, mend: str = "") -> None:
    """Raises MissingExtraError where `package` is not installed: what needs it, and what adds it, mmrl's `extra` or a `mend` of
    another kind. Imports nothing."""
    assert extra or mend, "whoever lacks a package is told how to add it"
    if importlib.util.find_spec(package) is None:
        raise MissingExtraError(
            f"expected the package {package} for {purpose}, found none: {mend or install_command(extra)}"
        )


def install_command(*extras: str) -> str:
    """The command that adds optional libraries: of the clone that this code runs from, else of the installed distribution's
    own name, mmrl-rft; on PyPI the name `mmrl` belongs to another project."""
    root = Path(__file__).resolve().parents[1]
    wanted = f"[{','.join(extras)}]"
    if (root / "pyproject.toml").is_file():
        return f"pip install -e '{root}{wanted}'"
    return f"pip install -e '.{wanted}' in a clone of mmrl's repository"
