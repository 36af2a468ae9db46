"""`mmrl cache build`: what it fills, counts and lists, that it may be started again, and its exit status."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner, Result

from mmrl.cli.main import app
from mmrl.config import load_config
from mmrl.policy.loading import load_policy
from mmrl.types import Sample
from mmrl.video.store import TensorStore
from tests.kits.clip_kit import broken_clip, make_clip
from tests.kits.engine_kit import picture, read_jsonl, tiny_folder
from tests.video.sound_kit import tone, write_sound


def question(number: int, **media: Any) -> dict[str, Any]:
    size = {"width": 84, "height": 56, "duration": 2.0} if "video" in media else {}
    return {
        "id": f"q{number}",
        "question": "Which?",
        "answer": "A",
        **media,
        "params": {"options": ["left", "right"], **size},
    }


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    """Training on three clips (one of them shown twice) and a picture, of which one cannot be read; held out: a clip more."""
    train = [
        question(0, video=make_clip(tmp_path, "a")),
        question(1, video=make_clip(tmp_path, "b")),
        question(2, video=make_clip(tmp_path, "a")),
        question(3, image=picture((56, 56))),
        question(4, video=broken_clip(tmp_path)),
        question(5, video=broken_clip(tmp_path)),
    ]
    for name, rows in (("train", train), ("eval", [question(9, video=make_clip(tmp_path, "c"))])):
        (tmp_path / f"{name}.jsonl").write_text(
            "".join(json.dumps(r) + "\n" for r in rows), encoding="utf-8"
        )
    tree = {
        "model": {"path": tiny_folder(), "device": "cpu", "freeze": ["vision", "projector"]},
        "data": {
            "train": [{"task": "choice", "path": str(tmp_path / "train.jsonl")}],
            "eval": [{"task": "choice", "path": str(tmp_path / "eval.jsonl")}],
            "cache": {"dir": str(tmp_path / "cache")},
            "video": {"kind": "uniform", "num_frames": 4, "min_pixels": 784, "max_pixels": 4704},
        },
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(tree), encoding="utf-8")
    return tmp_path / "run.yaml"


def build(run_file: Path, *words: object) -> Result:
    return CliRunner().invoke(app, ["cache", "build", str(run_file), *map(str, words)])


def kinds(folder: Path) -> dict[str, int]:
    return {kind: n for kind, (n, _) in TensorStore(folder).stats().kinds.items()}


def numbers(done: Result, row: str) -> list[int]:
    """Built, present and failed of a line of the table."""
    (line,) = [text for text in done.output.splitlines() if f" {row} " in text]
    return [int(cell.replace(",", "")) for cell in line.split("│")[2:-1] if cell.strip()]


def test_everything_is_built_once_counted_afterwards_and_read_by_a_run(run_file: Path) -> None:
    folder = run_file.parent / "cache"
    done = build(run_file)
    assert done.exit_code == 0, done.output
    assert numbers(done, "pixels") == [4, 0, 1] and numbers(done, "features") == [4, 0]
    assert kinds(folder) == {"features": 4, "image": 1, "video": 3}
    rows = read_jsonl(folder / "failures.jsonl")
    assert [(r["id"], r["path"]) for r in rows] == [
        (f"q{n}", str(run_file.parent / "broken.mp4")) for n in (4, 5)
    ]
    assert all(
        r["kind"] in ("truncated", "corrupt") and "broken.mp4" in r["reason"] and r["source"]
        for r in rows
    )
    assert f"2 samples without media: {rows[0]['kind']}" in done.output
    again = build(run_file, "--strict")
    assert (
        again.exit_code == 1
        and numbers(again, "pixels") == [0, 4, 1]
        and numbers(again, "features") == [0, 4]
    )
    assert len(read_jsonl(folder / "failures.jsonl")) == 2, "the list is that of the last build"
    config = load_config(run_file)
    policy = load_policy(config.model, config.data)
    sample = Sample(
        "x",
        "choice",
        "s",
        "?",
        None,
        (picture((56, 56)),),
        tuple(make_clip(run_file.parent, n) for n in "abc"),
    )
    policy.media(policy.encoder.references(sample))
    assert (policy.encoder.visuals.stats.built, policy.encoder.visuals.stats.encoded) == (0, 0), (
        "training finds everything"
    )


def test_without_a_frozen_tower_features_are_made_only_on_demand(run_file: Path) -> None:
    folder = run_file.parent / "cache"
    done = build(run_file, "model.freeze=[]", "data.train.0.limit=4")
    assert (
        done.exit_code == 0
        and "features" not in done.output
        and kinds(folder) == {"image": 1, "video": 3}
    )
    assert not (folder / "failures.jsonl").exists()
    done = build(run_file, "model.freeze=[]", "data.train.0.limit=4", "--features", "--strict")
    assert (
        done.exit_code == 0
        and numbers(done, "pixels") == [0, 4, 0]
        and kinds(folder)["features"] == 4
    )


@pytest.mark.parametrize(
    ("model", "made"),
    [
        (("model.freeze=[audio]",), {"features": 1}),
        (("model.freeze=[vision,projector]",), {"features": 1}),
        (("model.freeze=[audio,vision,projector]",), {"features": 2}),
        pytest.param(("model.lora.r=4",), {"features": 2}, marks=pytest.mark.slow),
        (("model.freeze=[vision]",), {}),
        (("model.freeze=[]", "--features"), {"features": 2}),
    ],
)
def test_each_tower_that_is_not_trained_reads_what_is_its_own(
    model: tuple[str, ...], made: dict[str, int], tmp_path: Path
) -> None:
    """Features of sounds by the audio tower's state, those of pictures by the vision tower's; training finds them."""
    row = question(0, image=picture((56, 56)), audio=write_sound(tmp_path / "a.wav", tone(0.5)))
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
    tree = {
        "model": {"path": tiny_folder("qwen2_5_omni"), "device": "cpu"},
        "data": {
            "train": [{"task": "choice", "path": str(tmp_path / "rows.jsonl")}],
            "cache": {"dir": str(tmp_path / "cache")},
        },
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(tree), encoding="utf-8")
    done = build(tmp_path / "run.yaml", *model, "--strict")
    assert done.exit_code == 0, done.output
    assert kinds(tmp_path / "cache") == {"audio": 1, "image": 1, **made}
    if "--features" not in model:
        config = load_config(tmp_path / "run.yaml", list(model))
        policy = load_policy(config.model, config.data)
        sample = Sample("x", "choice", "s", "?", None, (row["image"],), audios=(row["audio"],))
        policy.media(policy.encoder.references(sample))
        assert policy.encoder.visuals.stats.encoded == 0


def test_other_frames_are_other_entries_and_a_wrong_row_is_listed(run_file: Path) -> None:
    rows = [question(n, video=make_clip(run_file.parent, name)) for n, name in enumerate("ab")]
    # a row that another run could show: with data.video.max_frames of at least 1000
    rows[0]["params"]["video"] = {"factor": 1000}
    (run_file.parent / "train.jsonl").write_text(
        "".join(json.dumps(r) + "\n" for r in rows), encoding="utf-8"
    )
    done = build(run_file, "model.freeze=[]", "data.eval=[]")
    assert done.exit_code == 0 and numbers(done, "pixels") == [1, 0, 1]
    (row,) = read_jsonl(run_file.parent / "cache" / "failures.jsonl")
    assert (row["id"], row["kind"]) == ("q0", "wrong_row")
    assert "video.max_frames of at least factor 1000" in row["reason"]
    done = build(run_file, "model.freeze=[]", "data.eval=[]", "data.video.num_frames=2")
    assert numbers(done, "pixels") == [1, 0, 1]


def test_a_bound_that_is_too_small_is_said(run_file: Path) -> None:
    done = build(run_file, "model.freeze=[]", "data.cache.limit_gib=1e-6", "--strict")
    assert done.exit_code == 1 and "samples without media: uncached" in done.output
    assert "raise data.cache.limit_gib" in done.output


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            ["data.cache.dir=null"],
            "expected data.cache.dir, the folder to fill, found null; add data.cache.dir=FOLDER",
        ),
        (
            ["data.train=[]", "data.eval=[]"],
            "expected data.train or data.eval with at least one source",
        ),
        (["--workers", "2", "data.cache.dir=null"], "data.workers (2)"),
    ],
)
def test_what_is_missing_is_said(run_file: Path, words: list[str], says: str) -> None:
    done = build(run_file, *words)
    assert done.exit_code == 1 and says in str(done.exception)


@pytest.mark.slow
def test_workers_fill_the_same_cache(run_file: Path) -> None:
    assert build(run_file).exit_code == 0
    other = run_file.parent / "other"
    done = build(run_file, "--workers", 1, f"data.cache.dir={other}")
    assert numbers(done, "pixels") == [4, 0, 1] and numbers(done, "features") == [4, 0], done.output

    def files(folder: Path) -> dict[str, bytes]:
        return {f.name: f.read_bytes() for f in folder.rglob("*.safetensors")}

    assert files(other) == files(run_file.parent / "cache")
    assert {r["id"]: r["reason"] for r in read_jsonl(other / "failures.jsonl")} == {
        r["id"]: r["reason"] for r in read_jsonl(run_file.parent / "cache" / "failures.jsonl")
    }
