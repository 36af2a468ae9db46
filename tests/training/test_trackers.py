"""What TensorBoard, Trackio and Weights & Biases hold of a run: curves, settings, answers with pictures, one id after a resume."""

from __future__ import annotations

import json
import sqlite3
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from mmrl.cli.demo import make_data
from mmrl.config import load_config
from mmrl.errors import ConfigError
from mmrl.report.samples import cells_of, drawn, shown_samples
from mmrl.training.trackers import Trackers
from mmrl.training.trainer import Trainer
from tests.kits.engine_kit import REPO, config_file, read_jsonl, small_run

pytestmark = pytest.mark.slow


def make(folder: Path, steps: int, **sections: Any) -> Any:
    make_data(folder / "data", train=6, held_out=5)
    tree = small_run(
        folder / "runs",
        "",
        model={"path": str(REPO / "assets" / "tiny_vlm"), "system": ""},
        data={
            name: [
                {
                    "task": "grounding",
                    "path": str(folder / "data" / name / "data.jsonl"),
                    "params": {"prompt": "{question}", "mode": "iou"},
                }
            ]
            for name in ("train", "eval")
        },
        rollout={"max_new_tokens": 24},
        train={
            "steps": steps,
            "tensorboard": True,
            "trackio": True,
            "wandb": True,
            "tracking": {"project": "boxes", "group": "seeds", "tags": ["tiny"], "samples": 3},
            **sections,
        },
    )
    return load_config(config_file(folder / "run.yaml", tree))


def records(folder: Path) -> Iterator[Any]:
    """What each offline run of Weights & Biases holds, in order of their start: its own messages, in LevelDB's log format (blocks
    of 32 KiB; a record is checksum, length, type, data, and may go on in the next block)."""
    from wandb.proto.wandb_internal_pb2 import Record

    for file in sorted(folder.glob("wandb/offline-run-*/run-*.wandb")):
        data, place, parts = file.read_bytes(), 7, b""
        assert data.startswith(b":W&B")
        while place + 7 <= len(data):
            if (left := 32768 - place % 32768) < 7:
                place += left
                continue
            _, length, kind = struct.unpack_from("<IHB", data, place)
            parts += data[place + 7 : place + 7 + length]
            place += 7 + length
            if kind in (1, 4):  # whole, or the last part
                yield Record.FromString(parts)
                parts = b""


def history(folder: Path) -> list[dict[str, Any]]:
    return [
        {
            (item.key or "/".join(item.nested_key)): json.loads(item.value_json)
            for item in r.history.item
        }
        for r in records(folder)
        if r.WhichOneof("record_type") == "history"
    ]


@pytest.fixture(autouse=True, scope="module")
def trackio_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where Trackio, which reads it when it is imported, keeps its runs."""
    folder = tmp_path_factory.mktemp("trackio")
    with pytest.MonkeyPatch.context() as patch:
        for name in [n for n in sys.modules if n.partition(".")[0] == "trackio"]:
            patch.delitem(sys.modules, name)
        patch.setenv("TRACKIO_DIR", str(folder))
        yield folder


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A run of two steps that was resumed for a third."""
    folder = tmp_path_factory.mktemp("tracked")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_MODE", "offline")
        patch.setenv("WANDB_SILENT", "true")
        Trainer(make(folder, 2)).fit()
        Trainer(make(folder, 3), resume=True).fit()
        yield folder / "runs" / "run"


def test_weights_and_biases_holds_settings_and_names_of_the_run(run: Path) -> None:
    first, *_ = [r.run for r in records(run) if r.WhichOneof("record_type") == "run"]
    assert (first.project, first.run_group, list(first.tags)) == ("boxes", "seeds", ["tiny"])
    assert first.display_name == "run"
    settings = {item.key: json.loads(item.value_json) for item in first.config.update}
    assert settings["rollout"]["group_size"] == 3
    assert settings["model"]["path"].endswith("tiny_vlm")


def test_a_resumed_run_goes_on_in_the_same_run_of_weights_and_biases(run: Path) -> None:
    ids = {r.run.run_id for r in records(run) if r.WhichOneof("record_type") == "run"}
    assert ids == {json.loads((run / "trackers.json").read_text(encoding="utf-8"))["wandb"]}
    assert len(list(run.glob("wandb/offline-run-*"))) == 2


def test_both_trackers_hold_every_number_of_the_metrics_file(run: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    told = [row for row in history(run) if not any(k.startswith("samples") for k in row)]
    metrics = read_jsonl(run / "metrics.jsonl")
    assert [row["step"] for row in metrics] == [1, 2, 3]
    for row in metrics:
        [wandb_row] = [r for r in told if r["step"] == row["step"]]
        for name, value in row.items():
            if name == "step" or not isinstance(value, (int, float)):
                continue
            assert wandb_row[name] == pytest.approx(float(value), nan_ok=True), name
            [point] = [e for e in events.Scalars(name) if e.step == row["step"]]
            assert point.value == pytest.approx(float(value), rel=1e-6), name
    [start] = [r for r in told if r["step"] == 0]
    assert "eval/selection" in start, "the evaluation before training"


def test_trackio_goes_on_in_no_other_run_of_the_name(
    tmp_path: Path, trackio_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make(tmp_path, 1, tensorboard=False, wandb=False)
    ids = []
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        trackers = Trackers(config, tmp_path / name)
        trackers.log(1, {"x": 0.0})
        trackers.close()
        ids.append(json.loads((tmp_path / name / "trackers.json").read_text())["trackio"])
    for name in ("second", "first"):
        trackers = Trackers(config, tmp_path / name, resumed=True)
        trackers.log(2, {"x": 1.0})
        trackers.close()
        ids.append(json.loads((tmp_path / name / "trackers.json").read_text())["trackio"])
    assert ids[2] == ids[1] and ids[3] not in ids[:3]
    monkeypatch.setenv("TRACKIO_DIR", "/proc/nowhere")
    with pytest.raises(ConfigError, match="TRACKIO_DIR"):
        Trackers(config, tmp_path / "first")


def test_trackio_holds_every_number_and_picture_of_one_run(run: Path, trackio_folder: Path) -> None:
    """Read from its database, without it."""
    with sqlite3.connect(trackio_folder / "boxes.db") as database:
        logged = [
            (step, json.loads(values), run_id)
            for step, values, run_id in database.execute(
                "select step, metrics, run_id from metrics"
            )
        ]
        [settings] = [json.loads(c) for (c,) in database.execute("select config from configs")][-1:]
    metrics = read_jsonl(run / "metrics.jsonl")
    for row in metrics:
        told: dict[str, Any] = {}
        for step, values, run_id in logged:
            told |= values if step == row["step"] and run_id == logged[0][2] else {}
        for name, value in row.items():
            if name != "step" and isinstance(value, (int, float)):
                assert float(told[name]) == pytest.approx(float(value), nan_ok=True), name
        assert len(told["samples"]["_value"]) == 3
    assert settings["rollout"]["group_size"] == 3 and settings["tags"] == ["tiny"]
    assert list(trackio_folder.rglob("*.png"))


def test_both_trackers_show_held_out_answers_with_their_pictures(run: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    kept = [r.artifact for r in records(run) if r.WhichOneof("record_type") == "artifact"]
    kept = [a for a in kept if a.type == "run_table"]
    assert len(kept) == 4, "before training and after each of three steps"
    files = {item.path: Path(item.local_path) for item in kept[-1].manifest.contents}
    last = json.loads(files["samples.table.json"].read_text(encoding="utf-8"))
    rows = read_jsonl(run / "eval" / "step_000003" / "predictions.jsonl")
    wanted = [r for r in rows if r["mode"] == "greedy"][:3]
    column = {name: place for place, name in enumerate(last["columns"])}
    assert [r[column["id"]] for r in last["data"]] == [r["id"] for r in wanted]
    assert [r[column["answer"]] for r in last["data"]] == [r["text"] for r in wanted]
    assert [r[column["reward"]] for r in last["data"]] == [r["score"]["value"] for r in wanted]
    for row, prediction in zip(last["data"], wanted, strict=True):
        shown = Image.open(files[row[column["picture"]]["path"]])
        original = Image.open(prediction["images"][0])
        assert shown.size == original.size
        x1, y1, x2, _ = map(round, prediction["score"]["detail"]["gold_boxes"][0])
        assert shown.getpixel(((x1 + x2) // 2, y1)) == (22, 163, 74), "the gold box's upper edge"

    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    assert events.Tags()["images"] == ["samples/00", "samples/01", "samples/02"]
    [words] = [
        e.tensor_proto.string_val[0].decode()
        for e in events.Tensors("samples/text_summary")
        if e.step == 3
    ]
    assert all(r["id"] in words for r in wanted)


def test_no_row_stops_a_tracker(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {},
        {"images": ["gone.png"], "score": None, "mode": "greedy", "id": "a"},
        {"images": 3, "videos": ["gone.mp4"], "id": "b", "text": "\ud800|`x`\n" * 9999},
        {"video": "../../etc/passwd", "id": "c"},
        {"video": "gone.mp4", "id": "d", "score": {"detail": {"gold_boxes": [[0, 0, 1]]}}},
    ]
    assert len(shown_samples(rows, 9)) == len(rows)
    for row in rows:
        assert len("".join(map(str, cells_of(row))).encode("utf-8")) < 20_000
        assert drawn(row, tmp_path, tmp_path) is None
    config = make(tmp_path, 1, wandb=False)
    trackers = Trackers(config, tmp_path)
    trackers.evaluated(0, rows)
    trackers.log(0, {"step": 0, "reward": float("nan"), "words": "x"})
    trackers.close()


def test_prompts_of_all_sources_are_shown_in_turn() -> None:
    rows = [
        {"source": source, "id": str(number), "mode": mode, "score": {}}
        for source, count in (("a", 5), ("b", 1), ("c", 3))
        for number in range(count)
        for mode in ("sampled", "greedy")
    ]
    shown = shown_samples(rows, 6)
    assert [f"{r['source']}{r['id']}" for r in shown] == ["a0", "b0", "c0", "a1", "c1", "a2"]
    assert {r["mode"] for r in shown} == {"greedy"}


def test_points_and_boxes_are_drawn_where_they_are(tmp_path: Path) -> None:
    Image.new("RGB", (1024, 512)).save(tmp_path / "page.png")
    detail = {"pred_points": [[512, 256]], "gold_boxes": [[100, 100, 300, 200]]}
    picture = drawn({"images": ["page.png"], "score": {"detail": detail}}, tmp_path)
    assert picture is not None and picture.size == (512, 256)
    pixels = np.asarray(picture)
    green = np.argwhere((pixels == (22, 163, 74)).all(-1))
    assert (green.min(0) == (50, 50)).all() and (green.max(0) == (100, 150)).all()
    orange = np.argwhere((pixels == (234, 88, 12)).all(-1))
    assert np.allclose(orange.mean(0), (128, 256), atol=1)


@pytest.mark.parametrize("call", ["log", "evaluated", "close"])
def test_a_library_that_fails_costs_its_own_log(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The user's own code ended the run of Weights & Biases: each call raises an error of theirs, which is no OSError."""
    import wandb

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    trackers = Trackers(make(tmp_path, 1), tmp_path)
    assert [t.name for t in trackers.open] == ["TensorBoard", "Trackio", "Weights & Biases"]
    wandb.finish()
    rows = [{"source": "a", "id": "1", "mode": "greedy", "score": {"value": 0.5}}]
    {
        "log": lambda: trackers.log(1, {"reward": 0.5}),
        "evaluated": lambda: trackers.evaluated(1, rows),
        "close": lambda: trackers.close(failed=True),
    }[call]()
    if call != "close":
        assert "Weights & Biases failed with" in capsys.readouterr().err
        assert [t.name for t in trackers.open] == ["TensorBoard", "Trackio"]
        trackers.close()


def test_the_environment_names_the_project_where_the_settings_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    config = make(
        tmp_path, 1, tensorboard=False, trackio=False, tracking={"project": None, "tags": []}
    )
    trackers = Trackers(config, tmp_path)
    trackers.close()

    def projects() -> list[str]:
        kinds = ((r, r.WhichOneof("record_type")) for r in records(tmp_path))
        return [r.run.project for r, kind in kinds if kind == "run"]

    # its own service writes the file, on a busy machine after finish() has returned
    late = time.monotonic() + 60
    while not projects() and time.monotonic() < late:
        time.sleep(0.1)
    assert projects()[0] == "mine"
