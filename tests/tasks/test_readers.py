"""Readers: every format gives the same boxes; broken rows are named with file, row and fix; pickles run no code."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from assets.make_grounding_fixtures import BOXES, PHRASES, SIZES, make_all, make_own, make_refer
from mmrl.errors import ConfigError, DataError
from mmrl.tasks.readers import detect_format, read_any
from mmrl.tasks.readers.refer import load_plain_pickle


@pytest.fixture(scope="module")
def fixtures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return make_all(tmp_path_factory.mktemp("fixtures"))


@pytest.mark.parametrize(
    ("kind", "format"),
    [
        ("refer", "refer"),
        ("vlm_r1_json", "vlm_r1"),
        ("vlm_r1_jsonl", "vlm_r1"),
        ("easyr1", "easyr1"),
        ("own", "own"),
    ],
)
def test_every_format_gives_the_same_boxes(
    fixtures: dict[str, str], kind: str, format: str
) -> None:
    assert detect_format(fixtures[kind]) == format
    options = {"image_root": str(Path(fixtures["refer"]) / "images")} if kind == "refer" else {}
    readout = read_any(fixtures[kind], **options)
    assert not readout.rejected and len({s.id for s in readout}) == len(readout)
    by_question = {s.question: s for s in readout}
    for box, phrases, size in zip(BOXES, PHRASES, SIZES, strict=True):
        sample = by_question[phrases[0]]
        assert sample.answer == pytest.approx(list(box)) and sample.task == "grounding"
        assert (
            (sample.params["width"], sample.params["height"])
            == size
            == Image.open(sample.images[0]).size
        )


def test_refer_gives_one_sample_per_sentence_and_keeps_splits_apart(
    fixtures: dict[str, str],
) -> None:
    root = str(Path(fixtures["refer"]) / "images")
    val = read_any(fixtures["refer"], split="val", image_root=root).samples
    assert [(s.id, s.question, s.source) for s in val] == [
        ("refcoco-11-2", PHRASES[0][0], "refcoco/val"),
        ("refcoco-11-3", PHRASES[0][1], "refcoco/val"),
    ]
    assert not val[0].images[0].endswith("_16.jpg")
    assert len(read_any(fixtures["refer"], image_root=root)) == 4
    with pytest.raises(ConfigError, match="Did you mean 'testA'"):
        read_any(fixtures["refer"], split="testa", image_root=root)
    with pytest.raises(ConfigError, match="Did you mean 'unc'"):
        read_any(fixtures["refer"], split_by="umc", image_root=root)


def test_a_release_with_two_split_files_asks_which(tmp_path: Path) -> None:
    root = Path(make_refer(tmp_path))
    (root / "refs(google).p").write_bytes((root / "refs(unc).p").read_bytes())
    with pytest.raises(ConfigError, match=r"split_by.*google, unc"):
        read_any(root)
    assert len(read_any(root, split_by="google", image_root=str(root / "images"))) == 4


class _Evil:
    def __init__(self, marker: str) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.mkdir, (self.marker,)


@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_a_malicious_pickle_is_refused_and_runs_nothing(tmp_path: Path, protocol: int) -> None:
    root, marker = Path(make_refer(tmp_path)), tmp_path / "owned"
    (root / "refs(unc).p").write_bytes(pickle.dumps([_Evil(str(marker))], protocol))
    with pytest.raises(DataError, match=r"refs\(unc\)\.p.*(posix|nt)\.mkdir"):
        read_any(root)
    assert not marker.exists()
    for payload in (
        b"cbuiltins\neval\n(S'1'\ntR.",
        b"c__builtin__\ngetattr\n.",
        b"\x80\x02Pstr\n.",
        b"",
        b"\x80\x04\x95",
        b"garbage",
    ):
        (root / "refs(unc).p").write_bytes(payload)
        with pytest.raises(DataError, match="download the official file again"):
            load_plain_pickle(root / "refs(unc).p")
    (root / "plain.p").write_bytes(pickle.dumps([{"a": {1, 2}, "b": (1.5, None)}], 2))
    assert load_plain_pickle(root / "plain.p") == [{"a": {1, 2}, "b": (1.5, None)}]


PICTURE = "images/COCO_train2014_000000000001.jpg"
GOOD = {"id": "good", "image": PICTURE, "question": "lamp", "answer": [10, 20, 110, 220]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ('{"id": "b", "image": ', "expected one JSON object per line"),
        ("[1, 2]", "expected a JSON object, found list"),
        ({"id": "good"}, "id 'good' again, first in row 1"),
        ({"answer": [10, 20, 700, 220]}, r"inside the picture.*640 x 480.*declare frame rel1000"),
        ({"answer": [10, 20, 2000, 2200]}, "inside the picture.*correct it"),
        ({"answer": [-3, 20, 110, 220]}, "inside the picture"),
        ({"answer": [110, 20, 10, 220]}, r"x1 < x2.*\[x, y, width, height\]"),
        ({"answer": [10, 20, 10, 220]}, "x1 < x2"),
        ({"answer": [10, 20, 110]}, "4 coordinates.*found 3"),
        ({"answer": [10, 20, 110, 220, 5]}, "4 coordinates.*found 5"),
        ({"answer": ["10", 20, 110, 220]}, "four numbers"),
        ({"answer": [True, 20, 110, 220]}, "four numbers"),
        ({"answer": None}, "four numbers"),
        ({"answer": [10, 20, 110, 1e400]}, "finite"),
        (
            {"answer": [10, 20, 110, 220], "frame": "rel1"},
            "inside the picture.*abs_orig if these are pixels",
        ),
        ({"answer": [10, 20, 1100, 220], "frame": "rel1000"}, "abs_orig if these are pixels"),
        ({"answer": [0.1, 0.2, 0.3, 0.4]}, "declare frame rel1"),
        ({"frame": "rel_1000"}, "Did you mean 'rel1000'"),
        ({"frame": "abs_resized"}, "store pixels of the original picture"),
        ({"image": "images/none.jpg"}, "expected a readable picture file"),
        ({"image": ""}, "path to a picture"),
        ({"image": None}, "path to a picture"),
        ({"images": ["a.png"]}, "either 'image' or 'images', found both"),
        ({"question": "  "}, "text in 'question'"),
        ({"anwser": [1, 2, 3, 4]}, "Did you mean 'answer'"),
        ({"params": [1]}, "'params' as an object"),
        ({"params": {"width": 641}}, "640 x 480.*right picture"),
        ({"params": {"image_index": 1}}, "image_index in 0..0"),
    ],
)
def test_a_broken_row_is_named_or_recorded_and_the_others_stay(
    tmp_path: Path, change: Any, message: str
) -> None:
    path = Path(make_own(tmp_path))
    line = change if isinstance(change, str) else json.dumps({**GOOD, "id": "bad", **change})
    path.write_text("\n".join([json.dumps(GOOD), "", line, json.dumps({**GOOD, "id": "last"})]))
    with pytest.raises(DataError, match=message) as caught:
        read_any(path)
    assert f"{path}: row 3: expected " in str(caught.value) and "; " in str(caught.value)
    readout = read_any(path, on_error="record")
    assert [s.id for s in readout] == ["good", "last"]
    assert len(readout.rejected) == 1 and str(readout.rejected[0]) == str(caught.value)


def test_one_pixel_outside_is_rounding_and_kept_as_it_is(tmp_path: Path) -> None:
    path = Path(make_own(tmp_path))
    path.write_text(json.dumps({**GOOD, "answer": [-1, 0, 641, 480.5]}))
    assert read_any(path).samples[0].answer == [-1, 0, 641, 480.5]


def test_several_pictures_and_the_one_that_holds_the_box(tmp_path: Path) -> None:
    path = Path(make_own(tmp_path))
    names = [f"images/COCO_train2014_{i:012d}.jpg" for i in (1, 2)]
    row = {
        "id": "m",
        "images": names,
        "question": "lamp",
        "answer": [0.5, 0.5, 1, 1],
        "frame": "rel1",
        "params": {"image_index": 1},
    }
    path.write_text(json.dumps(row))
    sample = read_any(path).samples[0]
    assert sample.answer == [150, 250, 300, 500] and len(sample.images) == 2


def test_a_row_with_bad_bytes_spoils_only_itself(tmp_path: Path) -> None:
    path = Path(make_own(tmp_path))
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(GOOD).encode() + b'\n{"id": "\xff"}\n')
    readout = read_any(path, on_error="record")
    assert [s.id for s in readout] == ["good"] and [r.row for r in readout.rejected] == [2]


def test_vlm_r1_frames_and_texts(tmp_path: Path, fixtures: dict[str, str]) -> None:
    rec = Path(fixtures["vlm_r1_json"])
    rows = json.loads(rec.read_text())
    only = [{k: v for k, v in row.items() if k != "solution"} for row in rows]
    (tmp_path / "only.json").write_text(json.dumps(only))
    readout = read_any(tmp_path / "only.json", image_root=str(rec.parent))
    assert all(
        s.answer == pytest.approx(list(b), abs=0.5) for s, b in zip(readout, BOXES, strict=True)
    )
    train = [json.loads(line) for line in Path(fixtures["vlm_r1_jsonl"]).read_text().splitlines()]
    asked, two_boxes = (
        train[0]["conversations"][0],
        {"from": "gpt", "value": "[1,2,3,4] or [5,6,7,8]"},
    )
    broken = [
        {**train[0], "id": 7, "conversations": [asked]},
        {**train[0], "id": 8, "image": [train[0]["image"][0]] * 3},
        {**train[0], "id": 9, "conversations": [asked, two_boxes]},
        {**train[0], "id": 10, "conversations": train[0]["conversations"][::-1]},
    ]
    (tmp_path / "bad.jsonl").write_text("\n".join(map(json.dumps, [*train, *broken])))
    readout = read_any(tmp_path / "bad.jsonl", image_root=str(rec.parent), on_error="record")
    assert len(readout) == 2 and [r.row for r in readout.rejected] == [3, 4, 5, 6]
    expected = ("two turns", "3 <image>", "exactly one box", "from 'human'")
    for rejected, words in zip(readout.rejected, expected, strict=True):
        assert words in rejected.reason


def test_easyr1_counts_placeholders_and_stores_pictures_once(
    tmp_path: Path, fixtures: dict[str, str]
) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    data = (
        Path(fixtures["own"])
        .parent.joinpath("images", "COCO_train2014_000000000001.jpg")
        .read_bytes()
    )
    box, picture = "[1, 2, 30, 40]", {"bytes": data, "path": None}
    rows = [
        {"problem": "<image>a", "answer": f"<answer>{box}</answer>", "images": [picture]},
        {"problem": "b", "answer": box, "images": [picture]},
        {"problem": "<image><image>c", "answer": box, "images": [picture]},
        {"problem": "<image>d", "answer": "somewhere", "images": [picture]},
        {"problem": "<image>e", "answer": box, "images": [{"bytes": b"junk", "path": None}]},
        {"problem": "<image>f", "answer": f"[{box}]", "images": [{"bytes": data, "path": "x.jpg"}]},
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "t.parquet")
    readout = read_any(tmp_path / "t.parquet", on_error="record")
    assert [s.question for s in readout] == ["a", "f"] and readout.samples[
        0
    ].images == readout.samples[1].images
    assert [r.row for r in readout.rejected] == [2, 3, 4, 5]
    assert (
        "0 placeholders and 1 pictures" in readout.rejected[0].reason
        and "found 0 in" in readout.rejected[2].reason
    )
    with pytest.raises(DataError, match=r"expected a column 'question'.*problem_key"):
        read_any(tmp_path / "t.parquet", problem_key="question")
    (tmp_path / "cut.parquet").write_bytes((tmp_path / "t.parquet").read_bytes()[:-30])
    with pytest.raises(DataError, match="readable parquet"):
        read_any(tmp_path / "cut.parquet")


def test_dispatch_errors_teach(tmp_path: Path, fixtures: dict[str, str]) -> None:
    (tmp_path / "a.csv").write_text("x")
    (tmp_path / "a.json").write_text("{")
    (tmp_path / "b.json").write_text("{}")
    for name, words in (
        ("none.jsonl", "found nothing"),
        ("a.csv", "rename it"),
        ("a.json", "expected JSON"),
        ("b.json", "a list of rows"),
        (".", "refs"),
    ):
        with pytest.raises(DataError, match=words):
            read_any(tmp_path / name)
    with pytest.raises(ConfigError, match="Did you mean 'easyr1'"):
        read_any(fixtures["own"], format="easy_r1")
    with pytest.raises(ConfigError, match="Did you mean 'image_root'"):
        read_any(fixtures["own"], image_rot="x")
    with pytest.raises(ConfigError, match="'raise' or 'record'"):
        read_any(fixtures["own"], on_error="skip")
    assert len(read_any(Path(fixtures["own"]).parent)) == 2


@pytest.mark.parametrize("kind", ["own", "vlm_r1_json", "vlm_r1_jsonl", "refer"])
def test_a_missing_picture_names_the_key_that_says_where_pictures_are(
    kind: str, fixtures: dict[str, str], tmp_path: Path
) -> None:
    with pytest.raises(
        DataError, match=r"data\.train\[\]\.params\.reader\.image_root=FOLDER \(data\.eval\[\]"
    ):
        read_any(fixtures[kind], image_root=str(tmp_path))
    readout = read_any(fixtures[kind], image_root=str(tmp_path), on_error="record")
    assert readout.rejected and all("reader.image_root" in r.reason for r in readout.rejected)


def test_other_broken_pictures_do_not_suggest_another_folder(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"")
    rows = [
        {"image": "a.png", "question": "x", "answer": [0, 0, 1, 1]},
        {"image": "https://example.org/a.png", "question": "x", "answer": [0, 0, 1, 1]},
    ]
    (tmp_path / "data.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8"
    )
    reasons = [r.reason for r in read_any(tmp_path / "data.jsonl", on_error="record").rejected]
    assert len(reasons) == 2 and not any("image_root" in reason for reason in reasons), reasons
    assert "addresses are not fetched" in reasons[1]
