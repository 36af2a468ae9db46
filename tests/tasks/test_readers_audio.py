"""Rows name audio files: mmrl's own, and columns of other files'. What is wrong with a name is an error of the row."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mmrl.errors import DataError
from mmrl.tasks.readers import read_any
from mmrl.tasks.readers.audios import without_audio_marks
from mmrl.types import Sample


def rows_in(folder: Path, *rows: dict[str, Any]) -> Path:
    for name in ("a.wav", "b.mp3"):
        (folder / name).touch()
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def read(file: Path, **options: Any) -> list[Sample]:
    check = {} if "columns" in options else {"check": lambda task, value, *more: value}
    return list(read_any(str(file), task="open_text", **check, **options).samples)


def test_own_rows(tmp_path: Path) -> None:
    """One or several, below the file's folder or that of sounds."""
    asked = {"question": "?", "answer": "a"}
    file = rows_in(
        tmp_path,
        {"audio": "a.wav", **asked},
        {"audios": ["b.mp3", str(tmp_path / "a.wav")], **asked},
        asked,
    )
    here = [str(tmp_path / name) for name in ("a.wav", "b.mp3")]
    assert [s.audios for s in read(file)] == [(here[0],), (here[1], here[0]), ()]
    (tmp_path / "sounds").mkdir()
    (tmp_path / "sounds" / "a.wav").touch()
    (found,) = read(
        rows_in(tmp_path, {"audio": "a.wav", **asked}), audio_root=str(tmp_path / "sounds")
    )
    assert found.audios == (str(tmp_path / "sounds" / "a.wav"),)


@pytest.mark.parametrize(
    ("media", "told"),
    [
        (
            {"audio": "c.wav"},
            r"expected an audio file, found none at .*c\.wav; check the path.*audio_root",
        ),
        ({"audio": "https://example.org/a.wav"}, "download it first"),
        ({"audio": 3}, "expected a path to an audio file, found 3"),
        ({"audio": "a.wav", "audios": ["a.wav"]}, "either 'audio' or 'audios'"),
        ({"audios": "a.wav"}, "'audios' as a list of paths"),
    ],
)
def test_wrong_names(media: dict[str, Any], told: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=told) as caught:
        read(rows_in(tmp_path, {**media, "question": "?", "answer": "a"}))
    assert "image_root" not in str(caught.value)


def test_columns_of_other_files(tmp_path: Path) -> None:
    """A path, a list, or datasets' {"path"}; <audio> in the question vanishes."""
    columns = {"audio": "sound", "question": "ask", "answer": "said"}

    def found(**row: Any) -> Sample:
        (sample,) = read(rows_in(tmp_path, {"said": "a", **row}), columns=columns)
        return sample

    here = str(tmp_path / "a.wav")
    assert found(sound="a.wav", ask="<audio>\nWhich?").audios == (here,)
    assert found(sound=[{"path": "a.wav"}], ask="Which?").audios == (here,)
    both = found(sound=["a.wav", "b.mp3"], ask="Is <audio> below <audio>?")
    assert len(both.audios) == 2 and both.question == "Is (sound 1) below (sound 2)?"
    for asked, told in (
        ("<audio>\n<audio> Which is\nlouder?", "Which is\nlouder?"),
        ("<audio> Is it as loud as <audio>?\nAnswer.", "Is it as loud as (sound 2)?\nAnswer."),
        (
            "First:\n<audio>\nSecond:\n<audio>\nWhich?",
            "First:\n(sound 1)\nSecond:\n(sound 2)\nWhich?",
        ),
        ("Which?\n<audio><audio>", "Which?\n(sound 1) (sound 2)"),
    ):
        assert found(sound=["a.wav", "b.mp3"], ask=asked).question == told
    assert found(sound="a.wav", ask="Who says <audio> here?").question == "Who says here?"
    assert found(sound="a.wav", ask="Who speaks?\n<audio>").question == "Who speaks?"
    told = without_audio_marks("<image>\n<audio><audio> Which?", 2, "ask")
    assert told == "<image>Which?"
    assert found(sound=None, ask="Which?").audios == ()
    with pytest.raises(
        DataError, match=r"2 <audio> placeholders, one per sound.*found 1 placeholders"
    ):
        found(sound=["a.wav", "b.mp3"], ask="<audio> Which?")
    with pytest.raises(DataError, match="store the sound in a file"):
        found(sound={"bytes": "x", "path": None}, ask="Which?")
