"""Suites of clips: their frames go over the run's, are printed with the number and kept, and media workers change nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mmrl.config import RunConfig
from mmrl.evaluation.suite_book import load_suites
from mmrl.evaluation.suites import DataSuite, configure, video_words
from tests.evaluation.test_suites import SHIPPED, run, suite, written
from tests.kits.engine_kit import read_jsonl, tiny_folder

BOOK = load_suites(SHIPPED)


def test_a_suites_frames_go_over_the_runs_and_the_command_line_over_both() -> None:
    base = RunConfig.model_validate(
        {"data": {"video": {"fps": 1.0, "max_frames": 99, "max_pixels": 5000, "decoder": "pyav"}}}
    )

    def video(*overrides: str, **wanted: Any) -> dict[str, Any]:
        chosen = configure(
            base, DataSuite.model_validate(suite(settings={"video": wanted})), overrides
        ).data.video.model_dump()
        return {k: v for k, v in chosen.items() if v != base.data.video.model_dump()[k]}

    assert video() == {} and base.data.video.fps == 1.0
    assert video(fps=4, max_frames=8, total_pixels=900) == {
        "fps": 4.0,
        "max_frames": 8,
        "total_pixels": 900,
    }
    assert video(num_frames=16, max_pixels=784) == {
        "kind": "uniform",
        "num_frames": 16,
        "max_pixels": 784,
    }
    assert video("data.video.fps=1", num_frames=16, max_pixels=784) == {"max_pixels": 784}, (
        "how many frames was said"
    )
    assert video("data.video.max_pixels=5000", num_frames=16, max_pixels=784) == {
        "kind": "uniform",
        "num_frames": 16,
    }
    base.data.video.kind, base.data.video.num_frames = "uniform", 7
    assert video(fps=2) == {"kind": "fps", "fps": 2.0, "num_frames": None}
    with pytest.raises(ValueError, match="fps and num_frames contradict each other"):
        video(fps=2, num_frames=3)


def test_frames_are_told_in_words() -> None:
    assert (
        video_words(RunConfig().data.video.model_dump()) == "2 fps, 4 to 768 frames, decoder auto"
    )
    chosen = configure(RunConfig(), BOOK.suites["videomme_video_r1_16"]).data.video.model_dump()
    assert video_words(chosen) == "16 frames, at most 200704 pixels each, decoder auto"
    easy = configure(RunConfig(), BOOK.suites["videomme_easyvideor1"]).data.video.model_dump()
    assert video_words(easy) == "2 fps, 4 to 256 frames, at most 262144 pixels each, decoder auto"


def clips_root(root: Path) -> Path:
    """Two data files of clip questions."""
    from mmrl.tasks.clips import make_clips

    for name in ("order", "direction"):
        make_clips(root / name, name, 4, 0)
    return root


def clip_suites(path: Path) -> str:
    video = {
        "order": {"num_frames": 4, "max_pixels": 3136},
        "direction": {"fps": 2, "max_frames": 4},
    }
    return written(
        path,
        {
            name: suite(
                task="choice",
                path=f"{name}/data.jsonl",
                metric="correct",
                settings={"max_new_tokens": 4, "video": video[name]},
            )
            for name in video
        },
    )


@pytest.mark.slow
def test_frames_are_printed_with_the_number_and_kept_and_workers_change_nothing(
    tmp_path: Path,
) -> None:
    root, file, out = (
        clips_root(tmp_path / "data"),
        clip_suites(tmp_path / "s.yaml"),
        tmp_path / "out",
    )
    common = [
        tiny_folder(),
        "--suite",
        "order,direction",
        "--suites",
        file,
        "--data-root",
        root,
        "--samples",
        2,
        "model.device=cpu",
        "reward.workers=0",
        "data.video.min_pixels=784",
        "eval.views=[shuffle,question_only]",
    ]
    done = run(*common, "--out", out / "alone")
    assert done.exit_code == 0, done.output
    workers = run(
        *common, "--out", out / "workers", "data.workers=1", f"data.cache.dir={tmp_path / 'cache'}"
    )
    assert workers.exit_code == 0, workers.output
    words = {
        "order": "4 frames, at least 784 pixels each, at most 3136 pixels each, decoder auto",
        "direction": "2 fps, 4 to 4 frames, at least 784 pixels each, decoder auto",
    }
    table = {
        row["suite"]: row
        for row in json.loads((out / "alone" / "suites.json").read_text())["suites"]
    }
    for name, text in words.items():
        assert (
            f"({text})" in " ".join(done.output.split())
            and f"video: {text}" in (out / "alone" / "suites.md").read_text()
        )
        results = [
            json.loads((out / way / name / "results.json").read_text())
            for way in ("alone", "workers")
        ]
        assert results[0] == results[1] and results[0]["protocol"]["video"] == table[name]["video"]
        assert results[0]["views"]["shuffle"]["n"] == 4
        for kind in ("predictions.jsonl", "views.jsonl"):
            assert (out / "alone" / name / kind).read_bytes() == (
                out / "workers" / name / kind
            ).read_bytes()
    assert {
        s["resized_wh"][0] * s["resized_wh"][1] <= 3136
        for r in read_jsonl(out / "alone" / "order" / "predictions.jsonl")
        for s in r["video_sizes"]
    } == {True}
    assert "how much is the input used?" in done.output and "question_only" in done.output
