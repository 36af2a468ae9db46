"""Generated scenes: boxes equal the drawn pixels, phrases have one right answer, same seed gives the same bytes."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from mmrl.errors import ConfigError
from mmrl.tasks.readers import read_any
from mmrl.tasks.scenes import COLORS, DIFFICULTIES, RELATIONS, SHAPES, main, make_scenes


def _rows(path: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    root = tmp_path_factory.mktemp("scenes")
    return {d: make_scenes(root / str(d), 60, seed=3, difficulty=d) for d in DIFFICULTIES}


def _matching(row: dict[str, Any]) -> list[list[int]]:
    """Boxes a reader of the phrase could mean, from the objects alone and with the laxest reading: centres."""
    objects = row["params"]["objects"]
    words = row["question"].removeprefix("the ").split()
    named = [o for o in objects if [o["color"], o["shape"]] == words[:2]]
    if len(words) == 2:
        return [o["box"] for o in named]
    relation = next(r for r in RELATIONS if f" {r} the " in row["question"])
    anchors = [o for o in objects if [o["color"], o["shape"]] == words[-2:]]
    assert len(anchors) == 1 and len(named) >= 2, (
        "the relation must be needed and its anchor unique"
    )

    def centre(o: dict[str, Any], axis: int) -> float:
        return (o["box"][axis] + o["box"][axis + 2]) / 2

    axis, sign = (
        (0 if relation in ("left of", "right of") else 1),
        (1 if relation in ("left of", "above") else -1),
    )
    return [o["box"] for o in named if sign * centre(o, axis) < sign * centre(anchors[0], axis)]


@pytest.mark.parametrize("difficulty", DIFFICULTIES)
def test_phrases_have_exactly_one_right_answer(sets: dict[int, str], difficulty: int) -> None:
    rows = _rows(sets[difficulty])
    assert all(_matching(row) == [row["answer"]] for row in rows)
    counts = {len(row["params"]["objects"]) for row in rows}
    assert counts == {0: {1}, 1: {2}, 2: {3, 4}}.get(difficulty, counts) and max(counts) <= 5
    if difficulty == 3:
        assert {r for r in RELATIONS for row in rows if r in row["question"]} == set(RELATIONS)


@pytest.mark.parametrize("difficulty", DIFFICULTIES)
def test_boxes_are_tight_around_the_pixels_really_drawn(
    sets: dict[int, str], difficulty: int
) -> None:
    for row in _rows(sets[difficulty])[:30]:
        pixels = np.asarray(Image.open(Path(sets[difficulty]).parent / row["image"]))
        covered = np.zeros(pixels.shape[:2], bool)
        for thing in row["params"]["objects"]:
            x1, y1, x2, y2 = thing["box"]
            same = (pixels == COLORS[thing["color"]]).all(-1)
            ys, xs = np.nonzero(same[y1:y2, x1:x2])
            assert [xs.min() + x1, ys.min() + y1, xs.max() + x1 + 1, ys.max() + y1 + 1] == thing[
                "box"
            ]
            fill = len(xs) / ((x2 - x1) * (y2 - y1))
            low, high = {"circle": (0.70, 0.86), "square": (1, 1), "triangle": (0.45, 0.70)}[
                thing["shape"]
            ]
            assert low <= fill <= high
            covered[y1:y2, x1:x2] |= same[y1:y2, x1:x2]
        # objects are saturated, background and clutter grey
        drawn = (pixels.max(-1).astype(int) - pixels.min(-1)) > 60
        assert (drawn == covered).all(), "something coloured lies outside the boxes"


def test_object_sides_and_variety(sets: dict[int, str]) -> None:
    rows = _rows(sets[0])
    sides = [(r["answer"][2] - r["answer"][0]) / 112 for r in rows]
    assert min(sides) >= 0.19 and max(sides) <= 0.61 and max(sides) - min(sides) > 0.25
    assert {r["question"].split()[0] for r in rows} == set(COLORS)
    assert {r["question"].split()[1] for r in rows} == set(SHAPES)
    firsts = [r["params"]["objects"][0]["box"] == r["answer"] for r in _rows(sets[2])]
    assert 0.05 < np.mean(firsts) < 0.7, (
        "the position in the list of objects must not give the answer away"
    )


def _hashes(path: str) -> dict[str, str]:
    return {
        p.name: hashlib.sha256(p.read_bytes()).hexdigest()
        for p in Path(path).parent.rglob("*")
        if p.is_file()
    }


def test_same_seed_same_bytes_and_other_sets_share_no_picture(tmp_path: Path) -> None:
    mix = {0: 0.5, 3: 0.5}
    first = _hashes(make_scenes(tmp_path / "a", 20, seed=1, difficulty=mix))
    assert first == _hashes(make_scenes(tmp_path / "b", 20, seed=1, difficulty=mix))
    longer = _hashes(make_scenes(tmp_path / "longer", 25, seed=1, difficulty=mix))
    assert all(longer[name] == digest for name, digest in first.items() if name.endswith(".png"))
    for seed, prefix in ((2, None), (1, "eval-"), (2, "eval-"), (-1, None)):
        other = _hashes(
            make_scenes(
                tmp_path / f"{seed}{prefix}", 20, seed=seed, difficulty=mix, id_prefix=prefix
            )
        )
        assert not set(first.values()) & set(other.values())


def test_mixed_difficulties_and_reading_back(tmp_path: Path) -> None:
    path = make_scenes(tmp_path, 80, seed=0, size=64, difficulty={0: 1, 2: 3})
    levels = [row["params"]["difficulty"] for row in _rows(path)]
    assert set(levels) == {0, 2} and 0.5 < levels.count(2) / 80 < 0.95
    samples = read_any(path).samples
    assert len(samples) == 80 and samples[0].source in ("scenes-0", "scenes-2")
    assert samples[0].params["width"] == 64 and Path(samples[0].images[0]).is_file()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"count": 0}, "count >= 1"),
        ({"size": 8}, "size in 32"),
        ({"difficulty": 4}, "difficulty in"),
        ({"difficulty": {}}, "difficulty in"),
        ({"difficulty": {0: 0.0}}, "difficulty in"),
        ({"id_prefix": "../x"}, "id_prefix"),
    ],
)
def test_impossible_parameters_are_named(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make_scenes(tmp_path, **{"count": 1, "seed": 0, **options})


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path), "--count", "3", "--mix", "0:0.5,1:0.5", "--id-prefix", "x-"]) == 0
    assert len(_rows(capsys.readouterr().out.strip())) == 3
    with pytest.raises(SystemExit):
        main([str(tmp_path), "--mix", "0=1"])
    assert "DIFFICULTY:WEIGHT" in capsys.readouterr().err
