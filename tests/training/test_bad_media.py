"""Broken and odd pictures beside good ones: with data.on_error 'record' the run goes on, every bad one is listed, nothing is
replaced or lost; with 'raise', the default, the first one ends it."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from mmrl.cli.main import app
from mmrl.config import load_config, merge
from mmrl.errors import DataError
from mmrl.training.sft import run_sft
from mmrl.training.trainer import Trainer
from tests.kits.engine_kit import (
    ARCHITECTURES,
    Album,
    album_data,
    config_file,
    picture,
    policy,
    read_jsonl,
    sample_with,
    small_run,
)


def noise(size: tuple[int, int]) -> Image.Image:
    return Image.open(picture(size))


def bad_pictures(folder: Path) -> dict[str, str]:
    """Pictures that cannot be used -> the word their reason must contain."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = {
        name: folder / f"{name}.png"
        for name in ("missing", "truncated", "empty", "text", "panorama", "folder")
    }
    noise((112, 84)).save(paths["truncated"])
    paths["truncated"].write_bytes(paths["truncated"].read_bytes()[:-900])
    paths["empty"].write_bytes(b"")
    paths["text"].write_text("<html>404 not found</html>")
    Image.new("RGB", (20_100, 100)).save(paths["panorama"])
    paths["folder"].mkdir()
    words = {
        "missing": "found none at",
        "truncated": "broken or missing pixels",
        "empty": "empty file",
        "text": "unknown content",
        "panorama": "at most 200 times",
        "folder": "found a folder",
    }
    return {str(paths[name]): word for name, word in words.items()}


def odd_pictures(folder: Path) -> list[str]:
    """Pictures that are unusual and must work."""
    folder.mkdir(parents=True, exist_ok=True)
    made = {
        "pixel.png": Image.new("RGB", (1, 1), (200, 10, 10)),
        "row.png": noise((90, 3)),
        "column.png": noise((3, 90)),
        "cmyk.jpg": noise((112, 84)).convert("CMYK"),
        "grey.png": noise((84, 84)).convert("L"),
        "deep.png": Image.fromarray(
            np.random.default_rng(0).integers(0, 65536, (84, 112), dtype=np.uint16)
        ),
        "alpha.png": noise((84, 112)).convert("RGBA"),
        "palette.gif": noise((60, 60)).convert("P"),
    }
    for name, made_picture in made.items():
        made_picture.save(folder / name)
    frames = [noise((56, 56)), noise((56, 56)).rotate(90)]
    frames[0].save(folder / "animated.gif", save_all=True, append_images=frames[1:], duration=50)
    noise((1990, 10)).save(folder / "wide.png")
    # 200 : 1, just allowed
    Image.new("RGB", (20_000, 100), (9, 120, 60)).save(folder / "panorama.png")
    return [str(p) for p in sorted(folder.iterdir())]


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_odd_pictures_are_seen_in_their_own_shape(arch: str, tmp_path: Path) -> None:
    p = policy(arch)
    for path in odd_pictures(tmp_path / "odd"):
        prompt = p.encoder(sample_with([path]), Album())
        with Image.open(path) as opened:
            size = opened.size
        (seen,) = prompt.images
        assert seen.orig_wh == size, path
        assert torch.isfinite(p.media(prompt.visuals)["pixel_values"]).all()
        if size[0] != size[1]:
            assert (seen.resized_wh[0] > seen.resized_wh[1]) == (size[0] > size[1]), (
                f"{path}: sides swapped"
            )


def run(
    tmp_path: Path, rows: list[list[str]], held: list[list[str]] | None = None, **sections: Any
) -> tuple[Path, Trainer]:
    held_file = album_data(tmp_path / "data", held, "held") if held else None
    sections = merge({"data": {"on_error": "record"}}, sections)
    tree = small_run(tmp_path / "runs", album_data(tmp_path / "data", rows), held_file, **sections)
    trainer = Trainer(load_config(config_file(tmp_path / "c.yaml", tree)))
    trainer.fit()
    return trainer.folder.path, trainer


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [True, False])
def test_training_goes_on_beside_bad_pictures(dynamic: bool, tmp_path: Path) -> None:
    bad, odd = bad_pictures(tmp_path / "bad"), odd_pictures(tmp_path / "odd")
    rows = [[path] for path in (*odd, *bad)] + [[picture((112, 84)), next(iter(bad))]]
    folder, trainer = run(
        tmp_path,
        rows,
        algorithm={"dynamic_sampling": dynamic},
        train={"steps": 6, "prompts_per_step": 4},
    )
    metrics, failures = read_jsonl(folder / "metrics.jsonl"), read_jsonl(folder / "failures.jsonl")
    assert len(metrics) == 6
    per_step = Counter(f["step"] for f in failures)
    for row in metrics:
        n = {
            k.removeprefix("train/groups/"): v
            for k, v in row.items()
            if k.startswith("train/groups/")
        }
        assert n["asked"] == n["kept"] + n["no_signal"] + n["failed"]
        assert n["failed"] == per_step[row["step"]], "every failed prompt is listed"
    drawn = {f["id"]: f["reason"] for f in failures}
    assert len(drawn) == len(bad) + 1, "all bad rows were met in this run"
    for number, (path, word) in enumerate(bad.items()):
        reason = drawn[f"album-{len(odd) + number}"]
        assert reason.startswith("MediaError: ") and word in reason and path in reason
    trained = {
        r["sample"]["id"] for file in (folder / "rollouts").iterdir() for r in read_jsonl(file)
    }
    assert trained and trained.isdisjoint(drawn), "nothing stands in for a broken picture"
    assert sum(r["train/groups/kept"] for r in metrics) > 0 and trainer.learner.updates == 6
    assert trainer.rollouts.rollouter.stream.draws + sum(
        r["train/groups/carried"] for r in metrics
    ) == sum(r["train/groups/asked"] for r in metrics)


def broken_run(folder: Path, held: bool) -> tuple[str, Path]:
    """A run whose second picture, of the training or held-out data, lost its end; its configuration and that picture."""
    folder.mkdir(parents=True)
    bad = folder / "truncated.png"
    noise((112, 84)).save(bad)
    bad.write_bytes(bad.read_bytes()[:-900])
    good, mixed = [[picture((56, 56), i)] for i in range(2)], [[picture((56, 56))], [str(bad)]]
    train, heldout = (good, mixed) if held else (mixed, good)
    tree = small_run(
        folder / "runs",
        album_data(folder / "data", train),
        album_data(folder / "data", heldout, "held"),
    )
    return config_file(folder / "c.yaml", tree), bad


@pytest.mark.check_takes(1)
@pytest.mark.parametrize("held", [False, True])
def test_a_broken_picture_ends_a_run_that_raises_and_it_resumes_once_the_picture_is_fixed(
    held: bool, tmp_path: Path
) -> None:
    config, bad = broken_run(tmp_path / "a", held)
    ended = CliRunner().invoke(app, ["train", config])
    assert ended.exit_code == 1, ended.output
    said = str(ended.exception)  # printed by the program's main()
    assert (
        isinstance(ended.exception, DataError)
        and f"sample '{'held' if held else 'album'}-1'" in said
    )
    assert all(
        words in said for words in ("broken or missing pixels", "data.on_error=record", "resume")
    )
    state = json.loads((tmp_path / "a/runs/run/run.json").read_text())
    assert state["status"] == "failed" and "truncated.png" in str(state["error"])
    noise((112, 84)).save(bad)
    again = CliRunner().invoke(app, ["train", config, "--resume"])
    assert again.exit_code == 0, again.output


def test_a_warm_start_and_an_evaluation_end_at_a_broken_picture_too(tmp_path: Path) -> None:
    config, _ = broken_run(tmp_path / "a", held=False)
    settings = load_config(config)
    with pytest.raises(DataError, match=r"sample 'album-1'.*data\.on_error=record"):
        run_sft(policy(), settings)
    data = settings.data.train[0]
    data_rows = read_jsonl(Path(data.path))
    for on_error, status in (("raise", 1), ("record", 0)):
        done = CliRunner().invoke(
            app,
            [
                "eval",
                settings.model.path,
                "--task",
                data.task,
                "--data",
                data.path,
                "--config",
                config,
                "--out",
                str(tmp_path / on_error),
                f"data.on_error={on_error}",
                "--samples",
                "1",
            ],
        )
        assert done.exit_code == status, done.output
        told = f"1 of {len(data_rows)} held-out samples could not be read and count as 0; first:"
        assert (told in done.output) == (on_error == "record"), done.output


@pytest.mark.slow
def test_bad_held_out_pictures_stay_in_the_denominator(tmp_path: Path) -> None:
    bad = bad_pictures(tmp_path / "bad")
    good = [[picture((56, 56), i)] for i in range(4)]
    folder, _ = run(tmp_path, good, [*good[:2], *([path] for path in bad)], train={"steps": 1})
    predictions = read_jsonl(folder / "eval/step_000001/predictions.jsonl")
    sampled = [p["score"]["value"] for p in predictions if p["mode"] == "sampled"]
    assert len(sampled) == 2 * (2 + len(bad)) and sampled[4:] == [0.0] * (2 * len(bad))
    assert read_jsonl(folder / "metrics.jsonl")[0]["eval/sampled/reward"] == pytest.approx(
        np.mean(sampled)
    )
    reasons = [p["score"]["reason"] for p in predictions if p["stop"] == "error"]
    assert len(reasons) == 3 * len(bad) and all(r.startswith("input_error: ") for r in reasons)
    assert all(word in " ".join(reasons) for word in bad.values())


def test_only_bad_pictures_give_reported_empty_steps(tmp_path: Path) -> None:
    bad = bad_pictures(tmp_path / "bad")
    folder, trainer = run(tmp_path, [[path] for path in bad], [[path] for path in bad])
    initial = Trainer(trainer.config.model_copy(update={"name": "untrained"})).policy
    for (name, a), (_, b) in zip(
        trainer.policy.model.named_parameters(), initial.model.named_parameters(), strict=True
    ):
        assert torch.equal(a, b), name
    for row in read_jsonl(folder / "metrics.jsonl"):
        assert (
            row["train/groups/kept"] == 0
            and row["train/groups/failed"] == row["train/groups/asked"] > 0
        )
        assert (
            row["train/groups/unfilled"] == 3
            and row["train/loss"] is None
            and "train/reward/mean" not in row
        )
        assert row["eval/greedy/reward"] == 0.0
    failures = read_jsonl(folder / "failures.jsonl")
    assert {f["id"] for f in failures} == {f"album-{i}" for i in range(len(bad))}
    (alarm,) = read_jsonl(folder / "alarms.jsonl")
    assert (alarm["step"], alarm["name"], alarm["severity"]) == (1, "prompts_failed", "error")
    assert "failures.jsonl" in alarm["message"]


def test_real_task_with_a_broken_picture_among_generated_scenes(tmp_path: Path) -> None:
    from mmrl.tasks.scenes import make_scenes

    data = Path(make_scenes(tmp_path / "scenes", 6, seed=0))
    broken = data.parent / "images" / "scene-0-000002.png"
    broken.write_bytes(broken.read_bytes()[:500])
    tree = small_run(
        tmp_path / "runs",
        str(data),
        data={"train": [{"task": "grounding", "path": str(data)}], "on_error": "record"},
    )
    Trainer(load_config(config_file(tmp_path / "c.yaml", tree))).fit()
    failures = read_jsonl(tmp_path / "runs/run/failures.jsonl")
    assert failures and {f["id"] for f in failures} == {"scene-0-000002"}
