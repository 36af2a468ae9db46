"""scripts/play_users.py plays what it says, and says where a user stumbles: three of its steps, which are commands of seconds."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from scripts.play_users import STEPS, Desk, Step, Stumble, expect, play, refuses, works

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("what", ["ask for the version", "type the names of TRL and verl"])
def test_users_do_not_stumble(what: str, tmp_path: Path) -> None:
    [step] = [s for s in STEPS if s.what == what]
    row = play(step, tmp_path)
    assert row["ok"], row["now"]


def test_a_stumble_is_seen(tmp_path: Path) -> None:
    def stumbling(desk: Desk) -> str:
        works(desk.run(sys.executable, "-c", "print('half way'); raise SystemExit(3)"))
        return "fine"

    row = play(Step("A", "fall", "fell", stumbling), tmp_path)
    assert not row["ok"] and "status 3" in row["now"] and "half way" in row["now"]


def test_a_traceback_is_no_error_in_words(tmp_path: Path) -> None:
    desk = Desk(tmp_path, {})
    for code in (
        "raise SystemExit(0)",
        "raise ValueError",
        "import sys; print('Traceback'); sys.exit(2)",
    ):
        with pytest.raises(Stumble):
            refuses(desk.run(sys.executable, "-c", code))
    assert desk.run(sys.executable, "-c", "import time; time.sleep(60)", limit=1).status == -1
    expect(True, "nothing")
