"""Settings of a run as others may read them: without places, addresses, accounts and keys of the machine it ran on.

    kept, left_out = published_settings(yaml.safe_load(file.read_text()))

What names a file or a folder keeps its last part; keys and addresses are left out, and named. It errs on the side of leaving out:
a run's settings are no place for secrets, and what is published cannot be taken back.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from mmrl.config.trust import is_place

__all__ = ["published_settings"]

_MACHINES_OWN = ("operations", "engine", "dir", "threads")
# Keys whose text is a file or a folder, however it is written (with spaces, relative, of another system).
_PLACE_KEY = re.compile(
    r"(^|_)(root|dir|folder|file|files|path|cache|durations|checkpoint|weights)s?$", re.IGNORECASE
)
_SECRET_KEY = re.compile(
    r"api_?key|secret|passw(or)?d|credential|bearer|(access|auth|hf|api)_?token|(^|_)(host|server|url|uri|endpoint|command|proxy)s?$",
    re.IGNORECASE,
)
_SECRET = re.compile(
    r"://|\b(sk|hf|ghp|gsk|xox[bp])[-_][A-Za-z0-9_-]{8,}|\b\d{1,3}(\.\d{1,3}){3}\b|\b[\w.-]+@[\w.-]+|"
    r"\b[A-Za-z][\w-]*(\.[\w-]+)*:\d{2,5}\b"
)
"""Addresses, keys of known services, IP numbers, accounts, host:port."""
_PLACE_IN_TEXT = re.compile(r"(?<![\w<.])(?:~|[A-Za-z]:)?(?:[/\\][\w.@-]+){2,}")


def published_settings(
    settings: Mapping[str, Any], *, base: str | None = None
) -> tuple[dict[str, Any], list[str]]:
    """(what may be published, dotted names of what was left out). `base`: the base model's name on the Hub, where it has one; of
    another model.path the last part is kept."""
    left_out: list[str] = []

    def clean(value: Any, at: str) -> Any:
        if isinstance(value, Mapping):
            kept = {}
            for key, below in value.items():
                place = f"{at}.{key}".lstrip(".")
                if isinstance(below, str) and (
                    _SECRET_KEY.search(str(key)) or _SECRET.search(below)
                ):
                    left_out.append(place)
                elif isinstance(below, str) and _PLACE_KEY.search(str(key)):
                    kept[key] = below if below == base else _last(below)
                else:
                    kept[key] = clean(below, place)
            return kept
        if isinstance(value, (list, tuple)):
            return [
                clean(item, f"{at}.{number}")
                for number, item in enumerate(value)
                if not (isinstance(item, str) and _SECRET.search(item))
            ]
        if isinstance(value, str):
            return (
                _last(value)
                if is_place(value)
                else _PLACE_IN_TEXT.sub(lambda m: _last(m.group()), value)
            )
        return value

    whole = {key: value for key, value in settings.items() if key not in _MACHINES_OWN}
    return clean(whole, ""), left_out


def _last(text: str) -> str:
    return re.split(r"[/\\]", text.rstrip("/\\"))[-1]
