"""The page of families: as the records are, and options that would be passed over in silence."""

from __future__ import annotations

import json
import re

import pytest

from scripts import family_table


@pytest.mark.parametrize("more", [["--only", "gemma3"], ["--page"]])
def test_a_release_is_recorded_of_all_families_alone(
    more: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["family_table", "--release", *more])
    monkeypatch.setattr(family_table, "measure", lambda names: pytest.fail("it measured"))
    with pytest.raises(SystemExit, match="2"):
        family_table.main()
    assert "expected --release by itself" in capsys.readouterr().err


def test_the_page_says_what_the_records_say() -> None:
    cells = json.loads(family_table.RESULTS.read_text(encoding="utf-8"))["cells"]
    text = family_table.PAGE.read_text(encoding="utf-8")
    assert text == family_table.page(cells), "write it by python -m scripts.family_table --page"


def test_answers_stand_in_their_cells_whatever_signs_they_have() -> None:
    """A | would end a cell, a backquote begin code, a bracket a link."""
    rows = [line for line in family_table.answers().splitlines() if line.startswith("| ")]
    assert {row.count("|") for row in rows} == {6}
    shown = "\n".join(rows)
    assert (
        "&lt;&#124;box_start&#124;&gt;(221,423),(569,886)" in shown
        and "&#96;&#96;&#96;json" in shown
    )
    assert not re.search(r"<code>[^<]*[`\[]", shown)
