"""Orsta-47k and PixMo-Count: every row to its task with its ratios; pictures verified, nothing fetched; broken rows named."""

from __future__ import annotations

import copy
import hashlib
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from assets.make_detection_fixtures import OBJECTS, ORSTA_ROWS, corners, make_orsta, make_pixmo
from mmrl.coords import CoordFrame, to_orig
from mmrl.errors import ConfigError, DataError
from mmrl.tasks.detection import Detection
from mmrl.tasks.readers.common import Readout, RowError
from mmrl.tasks.readers.orsta import read_orsta
from mmrl.tasks.readers.pixmo import read_pixmo_count

EXPECTED = [[(label, corners(xywh)) for label, xywh in objects] for objects in OBJECTS]


def check(task: str, value: Any, frame: CoordFrame, sizes: Any, params: Any) -> Any:
    """What the tasks do with answers, as far as these readers are concerned: types, and boxes in original pixels."""
    if task == "detection":
        assert isinstance(params["categories"], list) and (
            {entry["label"].lower() for entry in value}
            <= {name.lower() for name in params["categories"]}
        )
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
    folder = tmp_path_factory.mktemp("rows")
    return {"orsta": make_orsta(folder), "pixmo_count": make_pixmo(folder)}


@pytest.fixture(autouse=True)
def _no_address_is_opened(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No reader may reach for the network."""
    import socket

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a reader opened a connection")

    monkeypatch.setattr(socket, "create_connection", refuse)
    yield


def _pixmo_count(path: str | Path, **options: Any) -> Readout:
    return read_pixmo_count(
        path, **{"image_root": str(Path(path) / "pictures"), "check": check, **options}
    )


# Orsta


def test_orsta_rows_go_to_their_tasks_with_their_ratios(
    fixtures: dict[str, str], tmp_path: Path
) -> None:
    readout = read_orsta(fixtures["orsta"], check=check, media_dir=str(tmp_path / "media"))
    by_source = {s.source: s for s in readout}
    tasks = {
        "v3det": "detection",
        "d_cube": "grounding",
        "clevr": "counting",
        "estvqa": "ocr",
        "mm_math": "math",
        "chartqa": "chart",
        "puzzlevqa": "choice",
        "virl": "math",
    }
    assert {source: s.task for source, s in by_source.items()} == tasks and len(ORSTA_ROWS) == len(
        tasks
    )
    boxes = by_source["v3det"]
    # thousandths became pixels
    for entry, (label, box) in zip(boxes.answer, EXPECTED[0], strict=True):
        assert entry["label"] == label and entry["bbox"] == pytest.approx(box, abs=0.2)
    assert (
        boxes.params["categories"] == ["person", "dog", "cat"]
        and boxes.question == "person, dog, cat"
    )
    assert boxes.params["reward"] == {"weights": {"accuracy": 1.0, "format": 0.1}}
    assert boxes.params["det_reward_ratio"] == {"iou_max_label_first": 1.0, "iou_completeness": 0.3}
    assert by_source["d_cube"].answer == pytest.approx(EXPECTED[1][0][1], abs=0.2)
    assert by_source["mm_math"].answer == "\\frac{3}{2}" and by_source["clevr"].answer == 2
    assert (
        by_source["puzzlevqa"].answer == "B"
        and by_source["mm_math"].params["reward"]["weights"]["format"] == 0
    )
    assert by_source["estvqa"].question == "What does the sign say?"
    assert len(list((tmp_path / "media").iterdir())) == 3  # equal pictures are stored once


def test_orsta_asked_for_one_task_refuses_or_counts_the_others(
    fixtures: dict[str, str], tmp_path: Path
) -> None:
    def read(**options: Any) -> Readout:
        return read_orsta(fixtures["orsta"], check=check, media_dir=str(tmp_path), **options)

    with pytest.raises(
        DataError, match=r"rows of task counting, found a row of type 'chart'.*only_mine"
    ):
        read(task="counting")
    mine = read(task="counting", only_mine=True)
    assert (
        [s.source for s in mine] == ["clevr"]
        and sum(mine.skipped.values()) == 7
        and not mine.rejected
    )
    assert mine.skipped["task detection"] == 1
    moved = read(types={"virl": "numeric", "chart": "open_text"})
    assert {s.source: s.task for s in moved}["virl"] == "numeric" and {
        s.source: s.task for s in moved
    }["chartqa"] == "open_text"
    with pytest.raises(ConfigError, match="unknown task 'nummeric'"):
        read(types={"virl": "nummeric"}, task="math")


def test_v_triune_ratios_become_its_reward_on_request_and_the_tasks_accept_every_row(
    fixtures: dict[str, str], tmp_path: Path
) -> None:
    task = Detection(
        reader={
            "format": "orsta",
            "only_mine": True,
            "det_ratios": True,
            "media_dir": str(tmp_path),
        }
    )
    samples = list(task.load(fixtures["orsta"]))
    assert [s.params["reward"]["accuracy"] for s in samples] == [
        {"mode": "v_triune", "iou_completeness": 0.3, "weights": {"iou_max_label_first": 1.0}}
    ]
    assert task.rubric.weights(samples[0]) == pytest.approx(
        {"accuracy": 1 / 1.1, "format": 0.1 / 1.1}
    )
    # checked by the tasks themselves
    assert len(read_orsta(fixtures["orsta"], media_dir=str(tmp_path))) == len(ORSTA_ROWS)
    for value in ("yes", 1):
        with pytest.raises(ConfigError, match="det_ratios true or false"):
            read_orsta(fixtures["orsta"], det_ratios=value)


def _orsta(folder: Path, name: str, edit: Callable[[dict[str, Any]], Any]) -> Path:
    """A parquet of two good rows around one edited row."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    file = Path(make_orsta(folder)) / f"train_{name}_1.parquet"
    good = pq.read_table(file).to_pylist()[0]
    row = json.loads(json.dumps({**good, "images": []}))
    row["images"] = [dict(entry) for entry in good["images"]]
    edit(row)
    schema = (
        None
        if any(isinstance(row[key], str) for key in ("prompt", "reward_model"))
        else pq.read_schema(file)
    )
    rows = [good, row, good] if schema is not None else [row]
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), file)
    return file


def _model(**values: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda row: row["reward_model"].update(values)


BOX = "[{'bbox_2d': [64, 126, 314, 793], 'label': \"the dog's bowl\"}]"


@pytest.mark.parametrize(
    ("name", "edit", "message"),
    [
        (
            "math_mm_math",
            lambda r: r.update(ability="poetry"),
            r"problem types detection.*counting.*found 'poetry'",
        ),
        ("math_mm_math", lambda r: r.update(ability="maths"), "Did you mean 'math'"),
        ("math_mm_math", lambda r: r.update(ability=None), "text in 'ability'"),
        (
            "math_mm_math",
            _model(verifier="mathverifier"),
            r"verifier mathverify or detection.*Did you mean 'mathverify'",
        ),
        ("math_mm_math", _model(verifier=None), "verifier mathverify or detection"),
        (
            "math_mm_math",
            _model(verifier="detection"),
            r"verifier mathverify for 'math' \(task math\), found 'detection'",
        ),
        ("detection_v3det", _model(verifier="mathverify"), "verifier detection for 'detection'"),
        ("math_mm_math", _model(accuracy_ratio=None), "accuracy_ratio as a number >= 0"),
        ("math_mm_math", _model(accuracy_ratio=float("nan")), "accuracy_ratio as a number"),
        ("math_mm_math", _model(format_ratio=-1.0), "format_ratio as a number"),
        ("math_mm_math", _model(accuracy_ratio=0.0), "above 0, found 0 and 0"),
        (
            "math_mm_math",
            _model(answer=None, ground_truth=" "),
            "text in reward_model.answer or ground_truth",
        ),
        ("math_mm_math", _model(answer="<answer>1</answer><answer>2</answer>"), "several answers"),
        ("math_mm_math", lambda r: r.update(reward_model=None), "'reward_model' as a struct"),
        ("math_mm_math", lambda r: r.update(prompt=[]), "one user turn"),
        (
            "math_mm_math",
            lambda r: r["prompt"].append({"role": "assistant", "content": "x"}),
            "one user turn, and at most a system",
        ),
        (
            "math_mm_math",
            lambda r: r["prompt"][0].update(content="no picture"),
            "0 placeholders and 1 pictures",
        ),
        ("math_mm_math", lambda r: r["prompt"][0].update(content=None), "text in 'content'"),
        ("math_mm_math", lambda r: r["images"][0].update(bytes=b"junk"), "picture"),
        ("math_mm_math", lambda r: r["images"][0].update(bytes=None), "path to a picture"),
        ("detection_v3det", _model(answer="[{'bbox_2d': [1, 2"), "as truth"),
        ("detection_v3det", _model(answer="__import__('os').system('true')"), "as truth"),
        ("detection_v3det", _model(answer="[" * 5000), "as truth"),
        ("detection_v3det", _model(answer="[{'label': 'dog'}]"), "'bbox_2d' and 'label'"),
        (
            "detection_v3det",
            _model(answer="[{'bbox_2d': [1, 2, 3, 4], 'label': 3}]"),
            "text in 'label'",
        ),
        ("counting_clevr", _model(answer="two or so"), "a whole number, found 'two or so'"),
        ("counting_clevr", _model(answer="2.5"), "a whole number"),
    ],
)
def test_broken_orsta_rows(
    tmp_path: Path, name: str, edit: Callable[[dict[str, Any]], Any], message: str
) -> None:
    file = _orsta(tmp_path, name, edit)
    with pytest.raises(DataError, match=message) as caught:
        read_orsta(file, check=check)
    assert f"{file}: row 2: " in str(caught.value)
    readout = read_orsta(file, check=check, on_error="record")
    assert [s.id for s in readout] == [f"{file.stem}-1", f"{file.stem}-3"]
    assert [str(r) for r in readout.rejected] == [str(caught.value)]


def test_orsta_truths_are_read_as_they_are_spelt(tmp_path: Path) -> None:
    def truth(name: str, edit: Callable[[dict[str, Any]], Any], **options: Any) -> Any:
        return read_orsta(_orsta(tmp_path, name, edit), check=check, **options).samples[1]

    quoted = truth("detection_v3det", _model(answer=None, ground_truth=f"<answer> {BOX} </answer>"))
    # not among the prompt's categories
    assert quoted.answer[0]["label"] == "the dog's bowl" == quoted.question
    pixels = truth(
        "detection_v3det",
        _model(
            verifier_parm={"det_verifier_normalized": False, "det_reward_ratio": None},
            answer="[{'bbox_2d': [1, 2, 30, 40], 'label': 'dog'}]",
        ),
    )
    assert (
        pixels.answer == [{"bbox": [1, 2, 30, 40], "label": "dog"}]
        and pixels.params["det_reward_ratio"] == {}
    )
    relative = truth(
        "detection_v3det",
        _model(verifier_parm=None, answer="[{'bbox_2d': [0, 0, 0.5, 1], 'label': 'dog'}]"),
        frame="rel1",
        on_error="record",
    )
    assert relative.answer == [{"bbox": [0, 0, 160, 240], "label": "dog"}]
    two = truth(
        "grounding_d_cube", _model(answer=str([{"bbox_2d": [1, 2, 3, 4], "label": "sign"}] * 2))
    )
    assert two.task == "detection" and len(two.answer) == 2
    assert truth("counting_clevr", _model(answer="\\boxed{7}")).answer == 7
    assert truth("science_virl", _model(answer="(C)")).task == "choice"
    assert truth("ocr_estvqa", _model(answer="B")).task == "ocr"
    three = [{"bbox_2d": [1, 2, 3, 4], "label": name} for name in ("Cat", "cow", "cat")]
    mixed = truth("detection_v3det", _model(answer=str(three)))
    # "cow" is not in the prompt's list, "cat" is "Cat" again
    assert mixed.params["categories"] == ["Cat", "cow"]
    system = truth(
        "math_mm_math",
        lambda r: r["prompt"].insert(0, {"role": "system", "content": "You are kind."}),
    )
    assert system.question == "How long is AB?"


def test_hostile_rows_are_rejected_never_raised(tmp_path: Path) -> None:
    """Rows as any writer of parquet could store them: every value of every type in every place."""
    import pyarrow.parquet as pq

    from mmrl.tasks.readers import orsta

    file = Path(make_orsta(tmp_path)) / "train_detection_v3det_1.parquet"
    good = pq.read_table(file).to_pylist()[0]
    hostile = [
        None,
        True,
        -1,
        10**30,
        float("nan"),
        "",
        "x",
        b"x",
        [],
        {},
        [[]],
        [None],
        {"id": 1},
        "9" * 5000,
        "[" * 999,
    ]
    rng, rows = random.Random(0), []
    for _ in range(400):
        row = copy.deepcopy(good)
        places = [
            row,
            row["reward_model"],
            row["reward_model"]["verifier_parm"],
            row["reward_model"]["verifier_parm"]["det_reward_ratio"],
            row["prompt"][0],
            row["images"][0],
            row["extra_info"],
        ]
        place = rng.choice(places)
        place[rng.choice(sorted(place))] = rng.choice(hostile)
        rows.append(row)
    monkey = pytest.MonkeyPatch()
    with monkey.context() as patched:
        patched.setattr(orsta, "parquet_rows", lambda *args: enumerate(rows, 1))
        readout = read_orsta(file, check=check, on_error="record")
    assert len(readout) + len(readout.rejected) == 400 and 50 < len(readout.rejected) < 350


def test_files_that_are_no_orsta_parquet_are_refused(
    tmp_path: Path, fixtures: dict[str, str]
) -> None:
    file = Path(make_orsta(tmp_path)) / "train_math_mm_math_1.parquet"
    file.write_bytes(file.read_bytes()[:-40])
    with pytest.raises(DataError, match=r"readable parquet.*copy it again"):
        read_orsta(file, check=check, on_error="record")
    with pytest.raises(DataError, match=r"expected a column 'images'.*is it an Orsta file"):
        read_orsta(Path(fixtures["pixmo_count"]) / "train-00000-of-00001.parquet", check=check)
    with pytest.raises(ConfigError, match="unknown coordinate frame 'rel100'"):
        read_orsta(fixtures["orsta"], check=check, frame="rel100")


# PixMo-Count


def test_pixmo_counts_with_points_from_verified_pictures(
    fixtures: dict[str, str], tmp_path: Path
) -> None:
    samples = _pixmo_count(fixtures["pixmo_count"], split="train").samples
    assert [(s.question, s.answer, s.source) for s in samples] == [
        ("person", 2, "pixmo_count/train"),
        ("traffic light", 1, "pixmo_count/train"),
        ("dog", 0, "pixmo_count/train"),
    ]
    middle = [[60.5, 110.25], [265.0, 115.0]]
    assert samples[0].params["points"] == middle and "points" not in samples[2].params
    blind = _pixmo_count(fixtures["pixmo_count"], split="validation").samples
    assert (
        all("points" not in s.params for s in blind) and blind[0].source == "pixmo_count/validation"
    )
    assert len(_pixmo_count(fixtures["pixmo_count"])) == 6
    file = Path(fixtures["pixmo_count"]) / "train-00000-of-00001.parquet"
    with pytest.raises(DataError, match="file of split 'test'"):
        read_pixmo_count(file, split="test", check=check)
    with pytest.raises(ConfigError, match="split 'train', 'validation' or 'test'"):
        read_pixmo_count(file, split="../x", check=check)


def test_the_folder_as_downloaded_keeps_its_files_in_data(tmp_path: Path) -> None:
    root = Path(make_pixmo(tmp_path))
    (root / "data").mkdir()
    for file in root.glob("*.parquet"):
        file.rename(root / "data" / file.name)
    assert len(_pixmo_count(root)) == 6


def _pixmo(folder: Path, edit: Callable[[dict[str, Any]], Any]) -> Path:
    """A parquet of the good first row, the edited one, and the good last."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    root = Path(make_pixmo(folder))
    rows = pq.read_table(root / "train-00000-of-00001.parquet").to_pylist()
    row = json.loads(json.dumps(rows[0]))
    edit(row)
    plain = (
        [row]
        if any(type(row[k]) is not type(rows[0][k]) for k in row if row[k] is not None)
        else [rows[0], row, rows[2]]
    )
    pq.write_table(pa.Table.from_pylist(plain), root / "train-00000-of-00001.parquet")
    return root / "train-00000-of-00001.parquet"


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (
            lambda r: r.update(image_sha256="0" * 64),
            r"picture named 0{64} in .*download it from https://example.com/0.jpg",
        ),
        (lambda r: r.update(image_sha256="../../etc/passwd"), "64 hexadecimal digits"),
        (lambda r: r.update(image_sha256=None), "64 hexadecimal digits"),
        (lambda r: r.update(count=-1), "count as a whole number >= 0, found -1"),
        (lambda r: r.update(count=None), "count as a whole number"),
        (lambda r: r.update(count=3), "as many points as 'count', found 2 points, count 3"),
        (lambda r: r.update(label=" "), "text in 'label'"),
        (lambda r: r["points"].update(x=[1.0]), "as many x as y"),
        (
            lambda r: r["points"].update(x=[1.0, 5000.0]),
            "points in pixels of the picture, 320 x 240",
        ),
        (lambda r: r["points"].update(y=[1.0, float("nan")]), "points in pixels"),
    ],
)
def test_broken_pixmo_rows(
    tmp_path: Path, edit: Callable[[dict[str, Any]], Any], message: str
) -> None:
    file = _pixmo(tmp_path, edit)
    options: dict[str, Any] = {"check": check, "image_root": str(file.parent / "pictures")}
    with pytest.raises(DataError, match=message) as caught:
        read_pixmo_count(file, **options)
    assert f"{file}: row 2: " in str(caught.value)
    readout = read_pixmo_count(file, on_error="record", **options)
    assert [s.id for s in readout] == [f"{file.stem}-1", f"{file.stem}-3"]
    assert [str(r) for r in readout.rejected] == [str(caught.value)]


def test_a_picture_that_changed_at_its_address_is_refused(tmp_path: Path) -> None:
    root = Path(make_pixmo(tmp_path))
    pictures = sorted((root / "pictures").iterdir())
    pictures[0].write_bytes(pictures[1].read_bytes())
    readout = _pixmo_count(root, on_error="record")
    assert len(readout) == 4 and len(readout.rejected) == 2
    assert f"SHA-256 {pictures[0].stem}, found {pictures[1].stem}" in readout.rejected[0].reason
    # other size: points outside
    assert len(_pixmo_count(root, verify=False, on_error="record")) in (4, 6)
    for picture in pictures:
        picture.unlink()
    nothing = _pixmo_count(root, on_error="record")
    assert len(nothing) == 0 and len(nothing.rejected) == 6
    assert all("pictures are not fetched" in r.reason for r in nothing.rejected)


def test_copies_with_embedded_pictures_and_listed_points_are_read(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    picture = next((Path(make_pixmo(tmp_path)) / "pictures").iterdir()).read_bytes()
    row = {
        "image_sha256": "reencoded",
        "count": 1,
        "label": "lamp",
        "points": [{"x": 5.0, "y": 6.0}],
        "image": {"bytes": picture, "path": "a.jpg"},
    }
    pq.write_table(
        pa.Table.from_pylist([row, {**row, "points": [7.0]}][:1]), tmp_path / "test-0.parquet"
    )
    sample = read_pixmo_count(
        tmp_path / "test-0.parquet", check=check, media_dir=str(tmp_path / "m")
    ).samples[0]
    assert sample.params["points"] == [[5, 6]] and Path(sample.images[0]).parent == tmp_path / "m"
    assert (
        hashlib.sha256(Path(sample.images[0]).read_bytes()).digest()
        == hashlib.sha256(picture).digest()
    )
