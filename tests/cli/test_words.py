"""The words of a command before it reads them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from mmrl.cli import main


def test_a_path_after_an_equals_sign_begins_at_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shells expand --out ~/x, not --out=~/x; overrides are the configuration's own (dir=~/runs)."""
    words = ["mmrl", "eval", "--out=~/x", "--task=a~/b", "prompt=~/x", "~y", "--limit", "3"]
    seen: list[list[str]] = []
    monkeypatch.setattr(sys, "argv", list(words))
    monkeypatch.setattr(main, "app", lambda: seen.append(list(sys.argv)))
    main._main()
    assert seen == [[*words[:2], f"--out={Path.home() / 'x'}", *words[3:]]]
