"""Options of the table of families that would be passed over in silence."""

from __future__ import annotations

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
