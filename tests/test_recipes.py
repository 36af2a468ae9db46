"""The launch scripts, run as a user would run them: every public data format, each architecture, wrong arguments."""
from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from assets.make_grounding_fixtures import make_all
from tests.engine_kit import ENVIRONMENT, REPO, read_jsonl, tiny_folder

SMALL = ["train.steps=2", "train.prompts_per_step=2", "rollout.group_size=3", "rollout.max_new_tokens=6",
         "train.save_every=1", "eval.limit=1", "threads=1", "data.max_pixels=20000"]


def launch(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["bash", "scripts/train_grounding.sh", *arguments], cwd=REPO, capture_output=True, text=True,
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


def test_launch_script_names_what_is_missing() -> None:
    done = launch("--model", "somewhere")
    assert done.returncode == 2 and "--data" in done.stderr
    done = launch("--modle", "x")
    assert done.returncode == 2 and "--modle" in done.stderr
