"""The launch scripts, run as a user would run them: every public data format, each architecture, wrong arguments."""
from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from assets.make_grounding_fixtures import make_all
from mmrl.config import load_config
from tests.engine_kit import ENVIRONMENT, REPO, read_jsonl, tiny_folder

SMALL = ["train.steps=2", "train.prompts_per_step=2", "rollout.group_size=3", "rollout.max_new_tokens=6",
         "train.save_every=1", "eval.limit=1", "threads=1", "data.max_pixels=20000"]


def launch(*arguments: str, cwd: Path = REPO) -> subprocess.CompletedProcess[str]:
    script = str(REPO / "scripts" / "train_grounding.sh")
    return subprocess.run(["bash", script, *arguments], cwd=cwd, capture_output=True, text=True,
                          env={**ENVIRONMENT, "MMRL_PYTHON": sys.executable}, timeout=300)


@pytest.mark.slow
@pytest.mark.parametrize(("form", "arch"), [("refer", "qwen2_5_vl"), ("vlm_r1_json", "qwen2_vl"),
                                            ("vlm_r1_jsonl", "qwen3_vl"), ("easyr1", "qwen2_5_vl"), ("own", "qwen2_vl")])
def test_launch_script_trains_on_public_formats(form: str, arch: str, tmp_path: Path) -> None:
    made = make_all(tmp_path / "data")
    data = next(path for name, path in made.items() if name == form)
    held_out = ["--eval", data, "--split", "val", "--eval-split", "testA"] if form == "refer" else []
    done = launch("--model", tiny_folder(arch), "--data", data, "--name", "smoke", f"dir={tmp_path}", *SMALL, *held_out)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = read_jsonl(tmp_path / "smoke" / "metrics.jsonl")
    assert [r["step"] for r in rows] == [1, 2]
    assert all(r["train/groups/asked"] == sum(r[f"train/groups/{k}"] for k in ("kept", "no_signal", "failed")) for r in rows)
    assert all(r["train/groups/failed"] == 0 for r in rows), "every picture of the fixture must be found and read"
    assert json.loads((tmp_path / "smoke" / "run.json").read_text())["status"] == "finished"
    assert (tmp_path / "smoke" / "checkpoints" / "step_000002" / "model.safetensors").exists()
    if held_out:
        sources = {r["source"] for r in read_jsonl(tmp_path / "smoke" / "eval" / "step_000002" / "predictions.jsonl")}
        assert sources == {"refcoco/testA"}, "held-out data comes from the split asked for"


@pytest.mark.slow
def test_launch_script_started_elsewhere_finds_model_data_and_pictures(tmp_path: Path) -> None:
    """Relative paths are those of the folder one starts from; VLM-R1's pictures usually lie beside no annotation file."""
    data = Path(make_all(tmp_path / "made")["vlm_r1_json"])
    away = tmp_path / "a folder's name"
    (away / "pictures").mkdir(parents=True)
    shutil.move(data.parent / "coco", away / "pictures" / "coco")
    shutil.copy(data, away / "rec.json")
    os.symlink(tiny_folder("qwen2_5_vl"), away / "model")
    common = ["--model", "model", "--data", "rec.json", "--name", "smoke", f"dir={tmp_path}", *SMALL, "train.steps=1"]
    lost = launch(*common, cwd=away)
    assert lost.returncode == 2 and "data.train[].params.reader.image_root" in lost.stderr, lost.stderr[-2000:]
    done = launch(*common, "--eval", "./rec.json", "--images", "pictures", "--overwrite", cwd=away)
    assert done.returncode == 0, done.stderr[-2000:]
    config = load_config(tmp_path / "smoke" / "config.yaml")
    assert config.model.path == str(away / "model")
    for source in (*config.data.train, *config.data.eval):
        assert source.path == str(away / "rec.json") and source.params["reader"] == {"image_root": str(away / "pictures")}
    assert [s.params["mode"] for s in (*config.data.train, *config.data.eval)] == ["dynamic", "iou"], "the recipe's stay"
    assert read_jsonl(tmp_path / "smoke" / "metrics.jsonl")[0]["train/groups/failed"] == 0


@pytest.mark.slow
def test_launch_script_chooses_among_the_splits_of_a_release(tmp_path: Path) -> None:
    release = Path(make_all(tmp_path / "made")["refer"])
    shutil.copy(release / "refs(unc).p", release / "refs(google).p")
    common = ["--model", tiny_folder("qwen2_5_vl"), "--data", "refcoco", "--split", "val", "--name", "smoke",
              f"dir={tmp_path}", *SMALL, "train.steps=1"]
    unclear = launch(*common, cwd=release.parent)
    assert unclear.returncode == 2 and "google" in unclear.stderr and "unc" in unclear.stderr, unclear.stderr[-2000:]
    done = launch(*common, "--split-by", "google", "--overwrite", cwd=release.parent)
    assert done.returncode == 0, done.stderr[-2000:]
    [source] = load_config(tmp_path / "smoke" / "config.yaml").data.train
    assert source.path == str(release) and source.params["reader"] == {"split": "val", "split_by": "google"}


def test_launch_script_names_what_is_missing(tmp_path: Path) -> None:
    done = launch("--model", "somewhere")
    assert done.returncode == 2 and "--data" in done.stderr
    done = launch("--modle", "x")
    assert done.returncode == 2 and "--modle" in done.stderr
    done = launch("--model")
    assert done.returncode == 2 and "value after --model" in done.stderr
    done = launch("--images", str(tmp_path / "none"))
    assert done.returncode == 2 and "folder of pictures" in done.stderr
    done = launch("--help", cwd=tmp_path)
    assert done.returncode == 0 and "--images DIR" in done.stdout and "dir=/elsewhere" in done.stdout
