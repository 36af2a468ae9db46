"""Names and texts of a stranger's files reach a terminal as text: none of their control characters does."""

from __future__ import annotations

import io
import json
import re
import sys
import unicodedata
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from rich.table import Table
from rich.text import Text

import mmrl
from mmrl.cli.main import main
from mmrl.operations.console import Console
from mmrl.operations.terminal import Shown, show_controls, visible

EVIL = "a\x1b[2J\x1b]0;pwned\x07\x9b31mb\rc\u202egnp.exe\x08\x7f"
BAD = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


@given(st.text())
def test_no_control_character_is_left_and_all_else_is(text: str) -> None:
    """By Unicode's own category: Cc, and the bidirectional classes that turn text round."""
    found = visible(text.replace("\r\n", "\n"))
    assert visible(text) == found and len(found) == len(text.replace("\r\n", "\n"))
    for before, after in zip(text.replace("\r\n", "\n"), found, strict=True):
        acts = (unicodedata.category(before) == "Cc" and before not in "\t\n") or (
            unicodedata.bidirectional(before)
            in ("LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI")
        )
        assert (after != before) == acts and not BAD.search(after)


def test_what_libraries_write_passes_a_stream_and_what_files_hold_does_not() -> None:
    inner = io.StringIO()
    stream = Shown(inner)
    assert stream.write("\rloading 5%") == 11 and stream.write("\x1b[1;31mred\x1b[0m\x1b[m") > 0
    print(EVIL, "\x1b[30m black \x1b[8m hidden \x1b[38;5;0m", file=stream)  # type: ignore[call-overload]
    stream.writelines(["x\x1b[A\n", "y\n"])
    bar, line, *rest = re.split(r"(?<=\x1b\[m)|\n", inner.getvalue())
    assert bar == "\rloading 5%\x1b[1;31mred\x1b[0m\x1b[m"
    assert not BAD.search(line) and line.startswith("a␛[2J␛]0;pwned␇") and "␍c" in line
    assert rest == ["x␛[A", "y", ""] and stream.getvalue() == inner.getvalue(), (
        "the rest is the stream's own"
    )


def test_tables_titles_and_texts_show_them_and_rich_keeps_its_own() -> None:
    stream = Shown(io.StringIO())
    console = Console(file=stream, width=200, force_terminal=True, color_system="standard")  # type: ignore[arg-type]
    table = Table(EVIL, title=EVIL)
    table.add_row(EVIL)
    for what in (table, EVIL, Text(EVIL), f"[red]{EVIL}[/]"):
        console.print(what)
    found = stream.getvalue()
    own = re.sub(r"\x1b\[[0-9;]*m", "", found)
    assert "\x1b[31m" in found and not BAD.search(own) and own.count("␛[2J") == 6


def test_every_console_of_the_program_is_that_one() -> None:
    folder = Path(mmrl.__file__).parent
    ours = re.compile(r"^\s*(?:from|import) rich\.console", re.MULTILINE)
    assert {
        str(p.relative_to(folder)) for p in folder.rglob("*.py") if ours.search(p.read_text())
    } == {"operations/console.py"}


def test_streams_are_wrapped_once(monkeypatch: pytest.MonkeyPatch) -> None:
    inner = io.StringIO()
    monkeypatch.setattr(sys, "stdout", inner)
    monkeypatch.setattr(sys, "stderr", None)  # a service without one
    show_controls()
    first = sys.stdout
    show_controls()
    assert (
        sys.stdout is first
        and isinstance(first, Shown)
        and first.rich_proxied_file is inner
        and sys.stderr is None
    )


def test_a_checkpoints_names_reach_the_terminal_as_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "trainer").mkdir()
    (tmp_path / "config.json").write_text("{}")
    settings = {
        "data": {
            "eval": [{"task": "mixed", "path": "x", "params": {"tasks": {f"{EVIL}.py:T": {}}}}]
        }
    }
    (tmp_path / "trainer" / "config.yaml").write_text(yaml.safe_dump(settings))
    (tmp_path / "x.jsonl").write_text("{}\n")
    monkeypatch.setattr(
        sys,
        "argv",
        ["mmrl", "eval", str(tmp_path), "--task", "mixed", "--data", str(tmp_path / "x.jsonl")],
    )
    with pytest.raises(SystemExit) as caught:
        main()
    out, err = capsys.readouterr()
    assert caught.value.code == 2 and "expected a Python file" in err and "␛[2J" in err
    assert not BAD.search(out + err)


def test_a_logs_names_reach_the_terminal_as_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "step.jsonl"
    log.write_text(json.dumps({"task": EVIL, "text": "x", "sample": {}}) + "\n")
    monkeypatch.setattr(sys, "argv", ["mmrl", "score", str(log)])
    with pytest.raises(SystemExit):
        main()
    out, err = capsys.readouterr()
    assert (out + err).strip() and not BAD.search(out + err)
