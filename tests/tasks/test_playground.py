"""Generated questions: right by construction, the same everywhere, and each read by its own task."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mmrl.errors import ConfigError
from mmrl.registry import task_from_spec
from mmrl.tasks.playground import KINDS, main, make_playground
from mmrl.tasks.scenes import COLORS


def _rows(path: str) -> list[dict]:
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]


def _has_color(path: Path, color: str) -> bool:
    pixels = np.asarray(Image.open(path).convert("RGB")).reshape(-1, 3)
    return bool((pixels == COLORS[color]).all(1).sum() >= 30)


@pytest.mark.parametrize("task", KINDS)
def test_every_task_reads_its_own_rows(task: str, tmp_path: Path) -> None:
    path = make_playground(tmp_path, task, 12, 5)
    samples = list(task_from_spec(task).load(path))
    assert len(samples) == 12 and {s.task for s in samples} == {task}
    assert all(Path(s.images[0]).is_file() for s in samples)


def test_the_mixed_task_reads_all_of_them_in_one_file(tmp_path: Path) -> None:
    lines = [
        Path(make_playground(tmp_path / t, t, 3, 1)).read_text(encoding="utf-8") for t in KINDS
    ]
    rows = [json.loads(line) for text in lines for line in text.splitlines()]
    for row in rows:
        row["image"] = f"{row['task']}/{row['image']}"
    (tmp_path / "all.jsonl").write_text(
        "".join(json.dumps(r) + "\n" for r in rows), encoding="utf-8"
    )
    samples = list(task_from_spec("mixed").load(str(tmp_path / "all.jsonl")))
    assert {s.task for s in samples} == set(KINDS) and len(samples) == 3 * len(KINDS)


def test_same_seed_same_bytes_and_longer_sets_begin_with_shorter_ones(tmp_path: Path) -> None:
    for task in KINDS:
        a, b, c = (
            make_playground(tmp_path / n / task, task, k, s)
            for n, k, s in (("a", 4, 3), ("b", 6, 3), ("c", 4, 4))
        )
        assert _rows(a) == _rows(b)[:4]
        assert _rows(a) != _rows(c)
        for row in _rows(a):
            assert (tmp_path / "a" / task / row["image"]).read_bytes() == (
                tmp_path / "b" / task / row["image"]
            ).read_bytes()


def test_answers_are_true_of_the_pixels(tmp_path: Path) -> None:
    for row in _rows(make_playground(tmp_path / "b", "boolean", 40, 0)):
        color = row["question"].removeprefix("is there a ").split()[0]
        there = _has_color(tmp_path / "b" / row["image"], color)
        assert there or not row["answer"], "a colour that is nowhere cannot be an object's"
    for row in _rows(make_playground(tmp_path / "c", "choice", 40, 0)):
        right = row["params"]["options"]["ABC".index(row["answer"])]
        assert _has_color(tmp_path / "c" / row["image"], right)
        assert len(set(row["params"]["options"])) == 3
    for row in _rows(make_playground(tmp_path / "d", "detection", 20, 0)):
        pixels = np.asarray(Image.open(tmp_path / "d" / row["image"]).convert("RGB"))
        color = COLORS[row["question"].split()[0]]
        for found in row["answer"]:
            x1, y1, x2, y2 = found["bbox"]
            assert (pixels[y1:y2, x1:x2] == color).all(2).mean() > 0.4
    counts = [row["answer"] for row in _rows(make_playground(tmp_path / "n", "counting", 80, 0))]
    assert set(counts) == {0, 1, 2, 3, 4}


def test_wrong_requests_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"found 'countin'\. Did you mean 'counting'"):
        make_playground(tmp_path, "countin", 1, 0)
    with pytest.raises(ConfigError, match="size in 56"):
        make_playground(tmp_path, "counting", 1, 0, size=20)
    with pytest.raises(SystemExit):
        main([str(tmp_path), "--tasks", "nothing"])
    assert main([str(tmp_path / "out"), "--count", "2", "--tasks", "ocr,choice"]) == 0
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["choice", "ocr"]
