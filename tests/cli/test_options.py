"""What holds for the options of all commands."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from mmrl.cli import main


def test_an_option_with_an_equals_sign_takes_a_path_from_the_home_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["mmrl", "new", "task", "blue-cars", "--folder=~/mine"])
    with pytest.raises(SystemExit) as ended:
        main._main()
    assert ended.value.code == 0
    assert list((tmp_path / "mine").iterdir()) == [tmp_path / "mine" / "blue-cars"]
