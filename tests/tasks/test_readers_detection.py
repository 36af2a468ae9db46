"""COCO, LVIS and OVDEval: the same boxes from each; broken images are named and counted, never used in part."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from assets.make_detection_fixtures import (
    CATEGORIES,
    CROWD,
    OBJECTS,
    SIZES,
    corners,
    make_all,
    make_coco,
    make_lvis,
    make_ovdeval,
)
from mmrl.coords import CoordFrame, to_orig
from mmrl.errors import ConfigError, DataError
from mmrl.tasks.detection import Detection
from mmrl.tasks.metrics import detection_benchmark
from mmrl.tasks.readers.coco import read_coco
from mmrl.tasks.readers.common import Readout, RowError
from mmrl.tasks.readers.lvis import read_lvis
from mmrl.tasks.readers.orsta import read_orsta
from mmrl.tasks.readers.ovdeval import read_ovdeval
from mmrl.tasks.readers.pixmo import read_pixmo_count
from mmrl.types import ImageSize, RewardContext

FIXTURES = Path(__file__).resolve().parents[2] / "assets" / "fixtures"


def check(task: str, value: Any, frame: CoordFrame, sizes: Any, params: Any) -> Any:
    """What the tasks do with answers, as far as these readers are concerned: types, and boxes in original pixels."""
    if task == "detection":
        assert isinstance(params["categories"], list) and {entry["label"] for entry in value} <= {
            *params["categories"]
        }
        return [
            {
                "bbox": list(to_orig(entry["bbox"], frame, sizes[0], sizes[0])),
                "label": entry["label"],
            }
            for entry in value
        ]
    if task == "grounding":
        return list(to_orig(value, frame, sizes[0], sizes[0]))
    if task == "counting" and type(value) is not int:
        raise RowError("a whole number", repr(value), "correct it")
    return value


@pytest.fixture(scope="module")
def fixtures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return make_all(tmp_path_factory.mktemp("detection"))


def _read(kind: str, path: str | Path, folder: Path, **options: Any) -> Readout:
    options = {"check": check, **options}
    if kind == "coco":
        return read_coco(path, **options)
    if kind == "lvis":
        return read_lvis(path, **options)
    if kind == "ovdeval":
        return read_ovdeval(path, **options)
    if kind == "orsta":
        return read_orsta(path, media_dir=str(folder), **options)
    return read_pixmo_count(path, **{"image_root": str(Path(path) / "pictures"), **options})


EXPECTED = [[(label, corners(xywh)) for label, xywh in objects] for objects in OBJECTS]


def test_coco_lvis_and_ovdeval_give_the_same_boxes(
    fixtures: dict[str, str], tmp_path: Path
) -> None:
    for kind in ("coco", "lvis", "ovdeval"):
        readout = _read(kind, fixtures[kind], tmp_path)
        assert (
            not readout.rejected
            and not readout.skipped
            and len({s.id for s in readout}) == len(readout)
        )
        for sample, expected, size in zip(readout.samples[:3], EXPECTED, SIZES, strict=True):
            assert [entry["bbox"] for entry in sample.answer] == [box for _, box in expected]
            labels = [entry["label"] for entry in sample.answer]
            assert kind == "ovdeval" or labels == [label for label, _ in expected]
            assert (
                sample.params["width"],
                sample.params["height"],
            ) == size and sample.task == "detection"
            assert sample.params["areas"] == pytest.approx(
                [0.8 * (b[2] - b[0]) * (b[3] - b[1]) for _, b in expected]
            )
            assert sample.question == ", ".join(sample.params["categories"])
            assert len(sample.params["categories"]) == len(sample.params["category_ids"])


def test_the_fixtures_in_the_repository_are_those_of_the_generator(
    fixtures: dict[str, str], tmp_path: Path
) -> None:
    stored = {
        "coco": FIXTURES / "coco/annotations/instances_val2017.json",
        "lvis": FIXTURES / "lvis/lvis_v1_val.json",
        "ovdeval": FIXTURES / "ovdeval",
        "orsta": FIXTURES / "orsta/train",
        "pixmo_count": FIXTURES / "pixmo",
    }
    assert (
        sum(
            p.stat().st_size
            for name in ("coco", "lvis", "ovdeval", "orsta", "pixmo")
            for p in (FIXTURES / name).rglob("*")
            if p.is_file()
        )
        < 200_000
    )
    for kind, path in stored.items():
        ours, fresh = (_read(kind, where, tmp_path).samples for where in (path, fixtures[kind]))
        assert [(s.id, s.question, s.answer, s.params) for s in ours] == [
            (s.id, s.question, s.answer, s.params) for s in fresh
        ]
        assert len(ours) > 2


@pytest.mark.parametrize("kind", ["coco", "lvis", "ovdeval"])
def test_the_detection_task_takes_every_sample_and_its_gold_is_one(
    fixtures: dict[str, str], tmp_path: Path, kind: str
) -> None:
    task = Detection(reader={"format": kind})
    pairs = []
    for sample in task.load(fixtures[kind]):
        size = (sample.params["width"], sample.params["height"])
        ctx = RewardContext(1, 1, CoordFrame.ABS_ORIG, (ImageSize(size, size),))
        pairs.append((sample, task.score(sample, task.gold(sample, ctx), ctx)))
    assert len(pairs) >= 3 and min(score.parts["accuracy"] for _, score in pairs) > 0.99
    assert detection_benchmark(pairs, tmp_path)["F1@0.5"] == 1


# COCO


def test_coco_keeps_ids_crowds_and_empty_pictures_and_asks_for_all_80_categories(
    fixtures: dict[str, str],
) -> None:
    samples = read_coco(fixtures["coco"], check=check).samples
    assert [s.params["image_id"] for s in samples] == [300, 200, 100] and samples[2].answer == []
    for sample in samples:
        assert (
            dict(zip(sample.params["categories"], sample.params["category_ids"], strict=True))
            == CATEGORIES
        )
    assert len(CATEGORIES) == 80 and max(CATEGORIES.values()) == 90
    assert samples[1].params["crowd"] == [
        {"bbox": corners(CROWD[1]), "label": CROWD[0], "area": CROWD[1][2] * CROWD[1][3]}
    ]
    assert "crowd" not in samples[0].params
    assert samples[0].id == "instances_val2017-300" and samples[0].source == "instances_val2017"
    assert samples[0].images[0].endswith("val2017/000000000300.jpg")


def test_coco_asks_for_present_categories_or_for_each_with_seeded_negatives(
    fixtures: dict[str, str],
) -> None:
    present = read_coco(fixtures["coco"], check=check, ask="present", negatives=3).samples
    assert [s.params["categories"][:2] for s in present[:1]] == [["person", "dog"]]
    assert [len(s.params["categories"]) for s in present] == [5, 4, 3]
    # there only as a crowd: neither way
    assert all("person" not in s.params["categories"] for s in present[1:2])
    bare = read_coco(fixtures["coco"], check=check, ask="present", negatives=0).samples
    assert [len(s.params["categories"]) for s in bare] == [2, 1, 1] and bare[2].answer == []
    each = read_coco(fixtures["coco"], check=check, ask="each", negatives=2).samples
    assert [len(s.params["categories"]) for s in each] == [1] * 9 and len({s.id for s in each}) == 9
    assert sum(len(s.answer) for s in each) == 4 and [len(s.answer) for s in each[:2]] == [2, 1]
    assert all({entry["label"] for entry in s.answer} <= {s.question} for s in each)
    again = read_coco(fixtures["coco"], check=check, ask="each", negatives=2).samples
    other = read_coco(fixtures["coco"], check=check, ask="each", negatives=2, seed=1).samples
    assert [s.id for s in each] == [s.id for s in again] != [s.id for s in other]
    for options, words in (
        ({"ask": "al"}, "unknown ask 'al'.*Did you mean 'all'"),
        ({"negatives": -1}, "negatives as a whole"),
        ({"negatives": True}, "negatives as a whole"),
        ({"on_error": "skip"}, "'raise' or 'record'"),
    ):
        with pytest.raises(ConfigError, match=words):
            read_coco(fixtures["coco"], check=check, **options)


def _edited(
    make: Callable[[Path], str], folder: Path, edit: Callable[[dict[str, Any]], Any], name: str = ""
) -> Path:
    """The fixture with its json edited in place."""
    path = Path(make(folder))
    path = path / name if name else path
    content = json.loads(path.read_text())
    edit(content)
    path.write_text(json.dumps(content))
    return path


def _set(kind: str, index: int, **values: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda content: content[kind][index].update(values)


def _drop(kind: str, index: int, key: str) -> Callable[[dict[str, Any]], Any]:
    return lambda content: content[kind][index].pop(key)


def _put(kind: str, index: int, value: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda content: content[kind].__setitem__(index, value)


def _beyond_a_picture_of_unknown_size(content: dict[str, Any]) -> None:
    del content["images"][0]["width"]
    content["annotations"][1]["bbox"] = [300, 20, 40, 40]


@pytest.mark.parametrize(
    ("edit", "row", "message"),
    [
        (_put("images", 1, "x"), 2, "an image {'id': whole number"),
        (_set("images", 1, id="2"), 2, "an image {'id': whole number"),
        (_set("images", 1, id=True), 2, "an image {'id': whole number"),
        (_set("images", 1, id=300), 2, "unique image ids, found id 300 again, first in row 1"),
        (_drop("images", 0, "file_name"), 1, "text in 'file_name', found None"),
        (_set("images", 0, file_name="none.jpg"), 1, "readable picture file"),
        (_set("images", 0, width=321), 1, "320 x 240, found 321 x 240.*right picture"),
        (_beyond_a_picture_of_unknown_size, 1, r"annotations\[1\] \(id 8\): .*inside the picture"),
        (
            _set("annotations", 1, bbox=[10, 20, 5]),
            1,
            r"annotations\[1\] \(id 8\): .*bbox as \[x, y, width, height\]",
        ),
        (_set("annotations", 1, bbox=["10", 20, 5, 5]), 1, "bbox as"),
        (_set("annotations", 1, bbox=[float("nan"), 20, 5, 5]), 1, "bbox as"),
        (_drop("annotations", 1, "bbox"), 1, "bbox as"),
        (_set("annotations", 1, category_id=12), 1, "category_id of one of 'categories', found 12"),
        (_drop("annotations", 1, "category_id"), 1, "category_id of one of"),
        (_set("annotations", 1, id=7), 1, "whole-number id of its own, found 7"),
        (_set("annotations", 1, id=None), 1, "whole-number id of its own"),
        (_set("annotations", 1, iscrowd=2), 1, "iscrowd 0 or 1"),
        (_set("annotations", 1, area=-1), 1, "area >= 0"),
    ],
)
def test_a_broken_coco_image_is_rejected_whole(
    tmp_path: Path, edit: Callable[[dict[str, Any]], Any], row: int, message: str
) -> None:
    path = _edited(make_coco, tmp_path, edit)
    with pytest.raises(DataError, match=message) as caught:
        read_coco(path, check=check)
    assert f"{path}: row {row}: " in str(caught.value)
    readout = read_coco(path, check=check, on_error="record")
    assert str(readout.rejected[0]) == str(caught.value)
    assert len(readout) == 2
    # an image without a usable id leaves its two annotations behind
    assert len(readout.rejected) == (1 if row == 1 else 3)


@pytest.mark.parametrize(
    "edit",
    [
        _set("annotations", 2, image_id=999),
        _drop("annotations", 2, "image_id"),
        _put("annotations", 2, [1]),
        _set("annotations", 2, image_id="300"),
    ],
)
def test_annotations_without_an_image_are_reported_not_dropped(
    tmp_path: Path, edit: Callable[[dict[str, Any]], Any]
) -> None:
    path = _edited(make_coco, tmp_path, edit)
    with pytest.raises(DataError, match=r"row 3: expected annotations\[2\]"):
        read_coco(path, check=check)
    readout = read_coco(path, check=check, on_error="record")
    assert len(readout) == 3 and len(readout.rejected) == 1


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda c: c.pop("categories"), "'categories' as a list, found keys"),
        (lambda c: c.update(anotations=c.pop("annotations")), "Did you mean 'anotations'"),
        (lambda c: c.update(images={}), "'images' as a list, found dict"),
        (
            lambda c: c["categories"].append(dict(c["categories"][0])),
            r"categories\[80\]: expected categories with ids",
        ),
        (
            lambda c: c["categories"].append({"id": 200, "name": "Person"}),
            "names of their own, found id 200 'Person' again",
        ),
        (
            lambda c: c["categories"].append({"id": "1", "name": "x"}),
            r"categories\[80\]: expected {'id'",
        ),
        (
            lambda c: c["categories"].append({"id": 99, "name": " "}),
            r"categories\[80\]: expected {'id'",
        ),
    ],
)
def test_a_coco_file_that_is_none_is_refused_whole(
    tmp_path: Path, edit: Callable[[dict[str, Any]], Any], message: str
) -> None:
    path = _edited(make_coco, tmp_path, edit)
    for on_error in ("raise", "record"):
        with pytest.raises(DataError, match=message):
            read_coco(path, check=check, on_error=on_error)


def test_unreadable_files_are_named(tmp_path: Path) -> None:
    path = Path(make_coco(tmp_path))
    whole = path.read_bytes()
    for content, words in (
        (whole[:-200], "expected JSON"),
        (b"", "expected JSON"),
        (b"[1]", "found list; is it a results file"),
        (b"\xff\xfe", "utf-8"),
    ):
        path.write_bytes(content)
        for reader in (read_coco, read_lvis, read_ovdeval):
            with pytest.raises(DataError, match=words) as caught:
                reader(path, check=check, on_error="record")
            assert str(path) in str(caught.value)
    for reader in (read_coco, read_lvis, read_ovdeval, read_orsta, read_pixmo_count):
        with pytest.raises(DataError, match=r"none|readable parquet"):
            reader(tmp_path / "absent.parquet", check=check)
        folder = tmp_path / "empty"
        folder.mkdir(exist_ok=True)
        if reader not in (read_coco, read_lvis):
            with pytest.raises(DataError, match=r"expected .* found"):
                reader(folder, check=check)


@pytest.mark.parametrize("kind", ["coco", "lvis", "ovdeval", "pixmo_count"])
def test_formats_of_one_task_refuse_others_and_serve_mixed_runs(
    fixtures: dict[str, str], tmp_path: Path, kind: str
) -> None:
    own = "counting" if kind == "pixmo_count" else "detection"
    assert {s.task for s in _read(kind, fixtures[kind], tmp_path, task="mixed")} == {own}
    with pytest.raises(
        ConfigError, match=f"the {kind} format holds task {own}, found task grounding"
    ):
        _read(kind, fixtures[kind], tmp_path, task="grounding")


HOSTILE = [
    None,
    True,
    -1,
    0,
    10**30,
    1e400,
    float("nan"),
    "",
    "x",
    "\x00",
    "../..",
    [],
    {},
    [[]],
    {"id": 1},
    "9" * 5000,
    "http://[",
]


@pytest.mark.parametrize(
    ("reader", "make", "name"),
    [
        (read_coco, make_coco, ""),
        (read_lvis, make_lvis, ""),
        (read_ovdeval, make_ovdeval, "color.json"),
    ],
)
def test_no_value_anywhere_in_a_file_breaks_a_reader(
    tmp_path: Path, reader: Any, make: Any, name: str
) -> None:
    """Random values in random places: a DataError of the file, or every image either read or rejected, never a crash."""
    path = Path(make(tmp_path))
    path = path / name if name else path
    whole, rng = path.read_text(), random.Random(0)
    refused = 0
    for _ in range(150):
        content = json.loads(whole)
        entry = rng.choice(content[rng.choice(["images", "annotations", "categories"])])
        entry[rng.choice(sorted(entry))] = rng.choice(HOSTILE)
        path.write_text(json.dumps(content))
        try:
            readout = reader(path, check=check, on_error="record")
        except DataError as err:
            assert str(path) in str(err)
            refused += 1
            continue
        assert len(readout) + len(readout.rejected) + sum(readout.skipped.values()) >= 3
        assert all(r.reason and r.row >= 1 for r in readout.rejected)
    assert 0 < refused < 150


# LVIS


def test_lvis_asks_for_what_is_known_and_keeps_frequencies(fixtures: dict[str, str]) -> None:
    samples = read_lvis(fixtures["lvis"], check=check).samples
    assert samples[0].params["categories"] == ["person", "dog", "cat", "bow (weapon)"]
    assert samples[0].params["frequency"] == ["f", "c", "f", "r"] and samples[0].params[
        "neg_category_ids"
    ] == [4, 5]
    assert samples[0].params["not_exhaustive_category_ids"] == [1] and samples[2].params[
        "categories"
    ] == ["traffic light"]
    assert [Path(s.images[0]).parent.name for s in samples] == ["train2017", "val2017", "val2017"]
    each = read_lvis(fixtures["lvis"], check=check, ask="each", negatives=1).samples
    assert [s.params["category_ids"][0] for s in each[:2]] == [1, 2] and each[2].params[
        "category_ids"
    ][0] in (4, 5)
    assert all(
        s.params["frequency"] and s.id.endswith(f"-{s.params['category_ids'][0]}") for s in each
    )
    whole = read_lvis(fixtures["lvis"], check=check, ask="all").samples
    assert [len(s.params["categories"]) for s in whole] == [5, 5, 5]


def test_an_lvis_image_of_which_nothing_is_known_is_counted(tmp_path: Path) -> None:
    path = _edited(make_lvis, tmp_path, _set("images", 2, neg_category_ids=[]))
    readout = read_lvis(path, check=check)
    assert len(readout) == 2 and dict(readout.skipped) == {"no category whose truth is known": 1}
    assert len(read_lvis(path, check=check, ask="all")) == 3


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (
            _drop("images", 0, "neg_category_ids"),
            "'neg_category_ids' as a list of ids.*an LVIS file",
        ),
        (
            _set("images", 0, not_exhaustive_category_ids=["7"]),
            "'not_exhaustive_category_ids' as a list of ids",
        ),
        (_drop("images", 0, "coco_url"), "text in 'coco_url'"),
        (_set("images", 0, coco_url="http://x/../../../etc/passwd"), "picture"),
        (_set("annotations", 0, bbox=[1, 2, 3]), r"annotations\[0\] \(id 1\)"),
    ],
)
def test_broken_lvis_rows(
    tmp_path: Path, edit: Callable[[dict[str, Any]], Any], message: str
) -> None:
    path = _edited(make_lvis, tmp_path, edit)
    with pytest.raises(DataError, match=message) as caught:
        read_lvis(path, check=check)
    assert f"{path}: row 1: " in str(caught.value)
    readout = read_lvis(path, check=check, on_error="record")
    assert len(readout) == 2 and [str(r) for r in readout.rejected] == [str(caught.value)]


def test_a_coco_file_is_no_lvis_file(fixtures: dict[str, str]) -> None:
    with pytest.raises(DataError, match=r"categories with frequency r, c or f.*or read it as coco"):
        read_lvis(fixtures["coco"], check=check)


# OVDEval


def test_ovdeval_asks_for_its_texts_and_hard_negatives(
    fixtures: dict[str, str], tmp_path: Path
) -> None:
    samples = read_ovdeval(fixtures["ovdeval"], check=check).samples
    assert {s.source for s in samples} == {"ovdeval/color", "ovdeval/negation"} and len(
        samples
    ) == 6
    assert samples[0].params["categories"] == [
        "person in red (color)",
        "yellow dog",
        "person in blue",
        "black dog",
    ]
    assert (
        samples[0].params["neg_text"] == ["person in blue", "black dog"]
        and samples[0].params["image_id"] == 0
    )
    assert samples[2].answer == [] and samples[2].params["categories"] == [
        "person in blue",
        "black dog",
    ]
    one = read_ovdeval(Path(fixtures["ovdeval"]) / "color.json", check=check, ask="present").samples
    assert one[0].params["categories"] == ["person in red (color)", "yellow dog"] and len(one) == 3
    each = read_ovdeval(Path(fixtures["ovdeval"]) / "color.json", check=check, ask="each").samples
    assert [s.question for s in each[:4]] == samples[0].params["categories"] and len(
        {s.id for s in each}
    ) == len(each)
    path = _edited(make_ovdeval, tmp_path, _set("images", 2, neg_text=["unheard of"]), "color.json")
    assert read_ovdeval(path, check=check).samples[2].params["category_ids"] == [5]
    same = _edited(
        make_ovdeval,
        tmp_path,
        lambda c: c["categories"][4].update(name="Yellow  dog".replace("  ", " ")),
        "color.json",
    )
    assert read_ovdeval(same, check=check).samples[0].params["category_ids"].count(1) == 1


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (
            _set("images", 0, text="person in red (color)", neg_text=[3]),
            "'neg_text' as a list of texts",
        ),
        (_set("images", 0, text=[""]), "'text' as a list of texts"),
        (_set("images", 0, height=9), "found 320 x 9"),
        (_set("annotations", 0, bbox=[0, 0, 900]), r"annotations\[0\] \(id 0\): .*bbox as"),
    ],
)
def test_broken_ovdeval_rows(
    tmp_path: Path, edit: Callable[[dict[str, Any]], Any], message: str
) -> None:
    path = _edited(make_ovdeval, tmp_path, edit, "color.json")
    with pytest.raises(DataError, match=message) as caught:
        read_ovdeval(path, check=check)
    assert f"{path}: row 1: " in str(caught.value)
    readout = read_ovdeval(path.parent, check=check, on_error="record")
    assert len(readout) == 5 and [str(r) for r in readout.rejected] == [str(caught.value)]
