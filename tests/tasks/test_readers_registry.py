"""Formats: found by names and keys, read without surprises whatever is in a row, options validated, fixtures as committed."""

from __future__ import annotations

import copy
import inspect
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from assets.make_task_fixtures import MAKERS, make_all
from mmrl.errors import ConfigError, DataError, MMRLError
from mmrl.registry import BUILT_IN
from mmrl.tasks.readers import READERS, Readout, detect_format, read_any, reader_of

COMMITTED = Path(__file__).parents[2] / "assets" / "fixtures"
FORMATS = {
    "video_r1": "video_r1",
    "easy_video_r1": "video_r1",
    "easyr1_types": "easyr1",
    "vlm_r1_types": "vlm_r1",
    "llama_factory": "llama_factory",
    "pageocr": "pageocr",
    "ocrbench": "ocrbench",
    "mathvista": "mathvista",
    "mmmu": "mmmu",
    "screenspot": "screenspot",
    "screenspot_v2": "screenspot",
    "screenspot_hf": "screenspot_hf",
    "screenspot_pro": "screenspot_pro",
    "android_control": "android_control",
    "gui_odyssey": "gui_odyssey",
    "gui_r1": "gui_r1",
    "ui_r1": "ui_r1",
}


def raw(task: str, value: Any, frame: Any, sizes: Any, params: Any) -> Any:
    """A check that takes every answer as the reader hands it over."""
    return value


@pytest.fixture(scope="module")
def fixtures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return make_all(tmp_path_factory.mktemp("fixtures"))


def test_every_fixture_is_recognised_and_every_row_has_a_task(fixtures: dict[str, str]) -> None:
    assert set(FORMATS) == set(MAKERS) == set(fixtures)
    for name, path in fixtures.items():
        assert detect_format(path) == FORMATS[name], name
        options: dict[str, Any] = {"images_only": True} if name == "video_r1" else {}
        options |= (
            {"dataset": "hand_made", "task": "open_text"}
            if name == "llama_factory"
            else {"task": "mixed"}
        )
        readout = read_any(path, check=raw, **options)
        assert len(readout) >= 2 and not readout.rejected, name
        assert len(readout.rows) == len(readout) == len({s.id for s in readout}), name
        assert {s.task for s in readout} <= set(BUILT_IN) - {"mixed"}, name
        for sample in readout:
            assert all(Path(image).is_file() for image in sample.images)
            json.dumps([sample.answer, dict(sample.params)])


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("video_r1", "Video-R1-260k.json"),
        ("llama_factory", "sharegpt.json"),
        ("pageocr", "en_page_ocr.json"),
        ("ocrbench", "OCRBench.json"),
        ("mmmu", "."),
        ("screenspot", "screenspot_web.json"),
        ("screenspot_hf", "."),
        ("screenspot_pro", "annotations"),
        ("android_control", "android_control-00000-of-00001"),
        ("gui_odyssey", "annotations"),
        ("gui_odyssey", "annotations/0042.json"),
        ("llama_factory", "dataset_info.json"),
    ],
)
def test_files_and_folders_inside_a_release_are_recognised(
    fixtures: dict[str, str], name: str, file: str
) -> None:
    folder = next(
        p for p in (Path(fixtures[name]), *Path(fixtures[name]).parents) if p.name == name
    )
    if (name, file) == ("screenspot_pro", "annotations") or (name, file) == (
        "gui_odyssey",
        "annotations",
    ):
        assert (
            read_any(folder / file, FORMATS[name], check=raw).samples
            == read_any(folder, check=raw).samples
        )
    else:
        assert detect_format(folder / file) == FORMATS[name]


def test_numbers_do_not_decide_the_format(tmp_path: Path) -> None:
    row = {"img_filename": "a.png", "instruction": "x", "data_type": "icon", "data_source": "y"}
    for box in ([0.1, 0.2, 0.3, 0.4], [10, 20, 300, 400], [500, 400, 10, 10]):
        for keys, expected in (({}, "screenspot"), ({"img_size": [900, 900]}, "screenspot_pro")):
            (tmp_path / "rows.json").write_text(json.dumps([{**row, **keys, "bbox": box}]))
            assert detect_format(tmp_path / "rows.json") == expected
        (tmp_path / "rows.json").write_text(
            json.dumps([{k: v for k, v in row.items() if k != "data_type"} | {"bbox": box}])
        )
        assert detect_format(tmp_path / "rows.json") == "ui_r1"


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ({"images": [{"id": 1}], "annotations": [], "categories": []}, "coco"),
        (
            {"images": [{"id": 1, "neg_category_ids": []}], "annotations": [], "categories": []},
            "lvis",
        ),
        (
            {
                "images": [{"id": 1, "text": ["a"], "neg_text": []}],
                "annotations": [],
                "categories": [],
            },
            "ovdeval",
        ),
        ([{"data_source": "x", "prompt": [], "ability": "math", "reward_model": {}}], "orsta"),
        ([{"image_url": "x", "count": 3, "label": "cat"}], "pixmo_count"),
    ],
)
def test_detection_formats_are_recognised_by_their_keys(
    tmp_path: Path, content: Any, expected: str
) -> None:
    (tmp_path / "data.json").write_bytes(b"\xef\xbb\xbf" + json.dumps(content).encode())
    assert detect_format(tmp_path / "data.json") == expected


def test_every_registered_reader_can_be_imported_and_takes_the_common_options() -> None:
    for name in READERS:
        known = inspect.signature(reader_of(name)).parameters
        assert {"path", "task", "on_error"} <= set(known), name
        assert known["on_error"].default == "raise", f"{name} is not strict by default"
    with pytest.raises(ConfigError, match=r"Did you mean 'screenspot_pro'"):
        reader_of("screenspot-pro")


def test_options_are_validated_for_every_format(fixtures: dict[str, str]) -> None:
    for name, path in fixtures.items():
        with pytest.raises(ConfigError, match=r"unknown option 'on_eror'.*Did you mean 'on_error'"):
            read_any(path, on_eror="record")
        with pytest.raises(ConfigError, match=r"'raise' or 'record'|expected reader.dataset"):
            read_any(
                path,
                on_error="skip",
                check=raw,
                task="open_text" if name == "llama_factory" else "mixed",
            )
    with pytest.raises(
        ConfigError, match=r"reader\.types sends 'OCR' to unknown task 'oc'.*Did you mean 'ocr'"
    ):
        read_any(fixtures["video_r1"], task="ocr", types={"OCR": "oc"})
    with pytest.raises(ConfigError, match=r"only_mine true or false"):
        read_any(fixtures["video_r1"], only_mine="yes")
    with pytest.raises(ConfigError, match=r"types as a mapping"):
        read_any(fixtures["video_r1"], types=["ocr"])


FIXED = {
    "pageocr": "ocr",
    "ocrbench": "ocr",
    "screenspot": "gui_grounding",
    "screenspot_pro": "gui_grounding",
    "android_control": "gui_action",
    "gui_odyssey": "gui_action",
    "gui_r1": "gui_action",
}


@pytest.mark.parametrize("name", FIXED)
def test_a_format_of_one_task_refuses_another_and_can_be_sent_there(
    fixtures: dict[str, str], name: str
) -> None:
    # a click can never be read as yes or no; a text or an action of that name may be
    fix = (
        r"use task gui_grounding or mixed, whose answers are \[x, y\]"
        if FIXED[name] == "gui_grounding"
        else "types="
    )
    with pytest.raises(ConfigError, match=f"holds task {FIXED[name]}, found task boolean.*{fix}"):
        read_any(fixtures[name], task="boolean", check=raw)
    sent = read_any(fixtures[name], task="boolean", types={FIXED[name]: "boolean"}, check=raw)
    assert {s.task for s in sent} == {"boolean"}
    # a task of someone's own knows what it asked for
    own = read_any(fixtures[name], task="my_plugin", check=raw)
    assert {s.task for s in own} == {"my_plugin"} and len(own) == len(sent)


@pytest.mark.parametrize("task", ["counting", "ocr", "gui_grounding"])
def test_labelled_boxes_are_sent_to_no_task_that_cannot_take_them(task: str) -> None:
    """Each picture was refused as a wrong row before: expected a whole number, found [{'bbox': ...}]."""
    path = next((COMMITTED / "coco" / "annotations").glob("*.json"))
    with pytest.raises(
        ConfigError,
        match=rf"reader\.types sends task detection, which the coco format holds, to task {task}: use",
    ):
        read_any(path, task=task, types={"detection": task}, check=raw)
    for other in ("grounding", "my_plugin"):
        assert {
            s.task for s in read_any(path, task=other, types={"detection": other}, check=raw)
        } == {other}


def test_a_bad_row_of_a_readers_file_names_file_row_and_fix(fixtures: dict[str, str]) -> None:
    path = Path(fixtures["ui_r1"])
    rows = json.loads(path.read_text())
    bad = path.with_name("bad.json")
    bad.write_text(json.dumps([rows[0], {**rows[1], "bbox": [1, 2, 3]}]))
    with pytest.raises(
        DataError,
        match=r"bad\.json: row 2: expected 'bbox' as 4 numbers, found \[1, 2, 3\]; correct it",
    ):
        read_any(bad, "ui_r1")


# whatever stands in a row, reading ends: a sample, a rejected row or a skipped one, and nothing else

JUNK: tuple[Any, ...] = (
    None,
    0,
    -1,
    1.5,
    10**12,
    float("nan"),
    float("inf"),
    True,
    "",
    " ",
    "x",
    "a\0b",
    "\ud800",
    "[",
    "<image>",
    "<answer>",
    [],
    {},
    [None],
    [[]],
    {"a": 1},
    "../../etc/passwd",
    "https://example.org/a.png",
    "9" * 5000,
)


def mutations(value: Any, depth: int = 4) -> Iterator[Any]:
    """Copies of a JSON value with one part of it replaced by each kind of junk, or removed."""
    yield from (copy.deepcopy(junk) for junk in JUNK)
    if depth and isinstance(value, dict):
        for key in value:
            yield {k: v for k, v in value.items() if k != key}
            yield from ({**value, key: new} for new in mutations(value[key], depth - 1))
    if depth and isinstance(value, list):
        for index in range(min(len(value), 4)):
            yield value[:index] + value[index + 1 :]
            yield from (
                [*value[:index], new, *value[index + 1 :]]
                for new in mutations(value[index], depth - 1)
            )


def _rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a fixture as JSON; embedded pictures become files beside it."""
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in path.read_text().splitlines()]
    if path.suffix != ".parquet":
        rows = json.loads(path.read_text())
        return list(rows.values()) if isinstance(rows, dict) else rows
    (path.parent / "embedded.png").write_bytes(b"")

    def plain(value: Any) -> Any:
        if isinstance(value, dict) and isinstance(value.get("bytes"), bytes):
            (path.parent / "embedded.png").write_bytes(value["bytes"])
            return "embedded.png"
        return [plain(v) for v in value] if isinstance(value, list) else value

    return [
        {key: plain(value) for key, value in row.items()} for row in pq.read_table(path).to_pylist()
    ]


@pytest.mark.parametrize(
    "name", [n for n in FORMATS if n not in ("android_control", "gui_odyssey", "llama_factory")]
)
def test_no_row_breaks_a_reader(fixtures: dict[str, str], name: str, tmp_path: Path) -> None:
    path = Path(fixtures[name])
    if path.is_dir():
        path = next(
            p for pattern in ("*.json", "annotations/*.json") for p in sorted(path.glob(pattern))
        )
    good = _rows(path)[:4]
    bad = [row for start in good for row in mutations(start) if row is not None]
    file = path.with_name("mutated_page_ocr.json" if name == "pageocr" else "mutated.json")
    file.write_text(json.dumps(bad))
    options: dict[str, Any] = {"task": "mixed"}
    readout = read_any(file, FORMATS[name], on_error="record", image_root=None, **options)
    assert len(readout.rows) == len(readout.samples)
    assert len(readout) + len(readout.rejected) + sum(readout.skipped.values()) == len(bad)
    assert len(readout.rejected) > 100
    for rejected in readout.rejected:
        assert str(file) == rejected.file and (
            "expected " in rejected.reason or "picture" in rejected.reason
        ), rejected
    file.unlink()


@pytest.mark.parametrize("name", ["own", "vlm_r1_json", "vlm_r1_jsonl"])
def test_no_row_breaks_the_grounding_readers(name: str, tmp_path: Path) -> None:
    from assets.make_grounding_fixtures import make_all as make_grounding

    path = Path(make_grounding(tmp_path)[name])
    bad = [row for start in _rows(path) for row in mutations(start) if isinstance(row, dict)]
    file = path.with_name("mutated.jsonl")
    file.write_text("".join(json.dumps(row) + "\n" for row in bad))
    readout = read_any(file, "own" if name == "own" else "vlm_r1", on_error="record")
    assert len(readout) + len(readout.rejected) == len(bad) and len(readout.rejected) > 100


def test_no_message_breaks_the_llama_factory_reader(fixtures: dict[str, str]) -> None:
    folder = Path(fixtures["llama_factory"])
    rows = [row for start in _rows(folder / "sharegpt.json") for row in mutations(start)]
    plain = folder.parent / "llama_without_info"
    plain.mkdir()
    (plain / "mutated.json").write_text(json.dumps(rows))
    readout = read_any(
        plain / "mutated.json", "llama_factory", task="open_text", on_error="record", check=raw
    )
    assert len(readout) + len(readout.rejected) == len(rows) and len(readout.rejected) > 100
    info = json.loads((folder / "dataset_info.json").read_text())
    for entry in mutations(info["hand_made"]):
        (folder / "other").mkdir(exist_ok=True)
        (folder / "other/dataset_info.json").write_text(json.dumps({"hand_made": entry}))
        try:
            assert isinstance(
                read_any(folder / "other", "llama_factory", on_error="record", check=raw), Readout
            )
        except MMRLError as err:
            assert "expected" in str(err) or "found" in str(err)


def test_no_episode_breaks_the_odyssey_reader(fixtures: dict[str, str], tmp_path: Path) -> None:
    episode = json.loads((Path(fixtures["gui_odyssey"]) / "annotations/0042.json").read_text())
    shots = str(Path(fixtures["gui_odyssey"]) / "screenshots")
    episode["steps"] = episode["steps"][:3]
    for number, changed in enumerate(mutations(episode)):
        file = tmp_path / f"{number}.json"
        file.write_text(json.dumps(changed))
        readout = read_any(file, "gui_odyssey", on_error="record", image_root=shots)
        assert isinstance(readout, Readout)


def test_broken_files_of_every_format_are_data_errors(
    fixtures: dict[str, str], tmp_path: Path
) -> None:
    for name, path in fixtures.items():
        where = Path(path)
        if where.is_dir():
            continue
        data = where.read_bytes()
        foreign = data[: len(data) // 2] if where.suffix == ".parquet" else b"\xff\xfe" + data[2:]
        for broken in (data[: len(data) // 2], foreign, b"", b"{}", b"[]"):
            file = tmp_path / where.name
            file.write_bytes(broken)
            try:
                readout = read_any(file, FORMATS[name], on_error="record", task="mixed", check=raw)
                assert readout.rejected or broken in (b"", b"[]", b"{}"), name
            except DataError as err:
                assert str(file) in str(err) and "expected" in str(err), name
    for name in READERS:
        with pytest.raises(MMRLError, match=r"expected"):
            raise AssertionError(f"{name}: {read_any(tmp_path / 'none.json', name)}")


def test_ids_may_repeat_in_no_two_files_of_a_folder(tmp_path: Path) -> None:
    rows = [{"id": 7, "problem": "What is 2+2?", "answer": "4", "images": []}]
    for name in ("a.parquet", "b.parquet"):
        pq.write_table(
            pa.Table.from_pylist(
                rows,
                schema=pa.schema(
                    [
                        ("id", pa.int64()),
                        ("problem", pa.string()),
                        ("answer", pa.string()),
                        ("images", pa.list_(pa.string())),
                    ]
                ),
            ),
            tmp_path / name,
        )
    with pytest.raises(
        DataError,
        match=r"b\.parquet: row 1: expected unique ids, found id '7' again, first in .*a\.parquet",
    ):
        read_any(tmp_path, task="math", check=raw)
    readout = read_any(tmp_path, task="math", check=raw, on_error="record")
    assert [s.id for s in readout] == ["7"] and readout.rows == [1] and len(readout.rejected) == 1


def test_the_committed_fixtures_are_what_the_generator_writes(tmp_path: Path) -> None:
    """Regenerate with: python -m assets.make_task_fixtures assets/fixtures"""

    def listing(root: Path) -> list[Path]:
        return sorted(
            p.relative_to(root) for p in root.rglob("*") if p.is_file() and ".media" not in str(p)
        )

    make_all(tmp_path)
    for name in MAKERS:
        assert listing(COMMITTED / name) == listing(tmp_path / name)
        for relative in listing(tmp_path / name):
            kept, fresh = COMMITTED / name / relative, tmp_path / name / relative
            if relative.suffix in (".json", ".jsonl"):
                assert kept.read_bytes() == fresh.read_bytes(), relative
            if relative.suffix == ".parquet":
                assert pq.read_schema(kept).equals(pq.read_schema(fresh)), relative
    assert (
        sum(
            p.stat().st_size
            for name in MAKERS
            for p in (COMMITTED / name).rglob("*")
            if p.is_file()
        )
        < 300_000
    )
