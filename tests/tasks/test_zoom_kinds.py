"""Kinds of pictures of the task zoom: what the whole of a crowd does not tell and its region does, words that Tesseract reads, and
the first kind as it was."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from mmrl.coords import CoordFrame
from mmrl.errors import ConfigError
from mmrl.rollout.episodes import begin, play_scripted
from mmrl.task import Template
from mmrl.tasks.picture_text import read_text
from mmrl.tasks.visual_tools import fitted
from mmrl.tasks.zoom import Zoom
from mmrl.tasks.zoom_pictures import SIGNS, STRIPES, WORDS, draw_crowd, main, make_zoom_pictures
from mmrl.types import ImageSize, Sample, StopReason, Turn
from tests.kits.engine_kit import policy

TEMPLATE = Template("", CoordFrame.ABS_RESIZED)
SHOWN = ImageSize((112, 112), (112, 112))


def samples(folder: Path, count: int, **options: Any) -> list[Sample]:
    return list(Zoom().load(make_zoom_pictures(folder, count, 3, **options)))


def pixels_of(sample: Sample) -> np.ndarray:
    with Image.open(sample.images[0]) as picture:
        return np.array(picture)


def counted(pixels: np.ndarray, name: str, scale: int) -> float:
    """Signs of that name, by the pixels of its first colour: half of 8 x 8 units each."""
    return float((pixels == STRIPES[name]).all(axis=2).sum()) / (32 * scale**2)


def crowds(answer: int, rng: np.random.Generator) -> list[list[str]]:
    """Crowds whose first one has so many cyan signs."""
    first = ["cyan"] * answer + ["orange"] * (20 - answer)
    return [list(rng.permutation(first)), *rng.choice(list(STRIPES), (15, 20)).tolist()]


@pytest.mark.parametrize("view", [112, 224])
def test_the_whole_crowd_is_the_same_for_every_answer_and_its_region_is_not(view: int) -> None:
    wholes, seen = set(), []
    for answer in range(10):
        pixels, boxes = draw_crowd(
            np.random.default_rng(5), ["red", "blue"], crowds(answer, np.random.default_rng(answer))
        )
        mean = torch.nn.functional.avg_pool2d(
            torch.tensor(pixels).permute(2, 0, 1).float()[None], 896 // view
        )
        wholes.add((fitted(pixels, view).tobytes(), mean.numpy().tobytes()))
        x1, y1, x2, y2 = boxes[0]
        seen.append(counted(pixels[y1:y2, x1:x2], "cyan", 2))
    assert len(wholes) == 1 and seen == list(range(10))


def test_a_look_at_the_crowd_gives_the_answer_of_each_row(tmp_path: Path) -> None:
    """Counted by its pixels in the picture that the tool shows for the scripted player's look, as small as the whole was shown."""
    rows, elsewhere = samples(tmp_path, 6, kind="crowd"), []
    for sample in rows:
        environment = Zoom(view=112).environment(TEMPLATE)
        (whole,) = environment.reset(sample, 0).images
        environment.shown([SHOWN])
        name = sample.question.split()[2]
        assert sample.question.startswith("number of ") and whole.shape == (112, 112, 3)
        assert counted(whole, name, 1) == 0
        said = environment.scripted(np.random.default_rng(0))
        assert said is not None
        outcome = environment.step(Turn((1,), said, (0.0,), StopReason.EOS))
        assert outcome.observation is not None and outcome.info["found"] == 1.0
        (closer,) = outcome.observation.images
        assert counted(closer, name, 1) == float(sample.answer)
        # the frame around it is the one that was named
        pixels, (x1, y1, x2, y2) = pixels_of(sample), sample.params["region"]
        named = SIGNS[sample.question.split()[-2]]
        assert (pixels[y1, x1:x2] == named).all() and (pixels[y1:y2, x2 - 1] == named).all()
        elsewhere.append(counted(pixels, name, 2))
        last = environment.step(
            Turn((1,), f"<answer>{sample.answer}</answer>", (0.0,), StopReason.EOS)
        )
        assert last.reward == 1.0
    assert min(elsewhere) > 40, "signs of that name are everywhere"


@pytest.mark.slow
def test_answers_of_crowds_are_even_and_no_number_of_signs_gives_them_away(tmp_path: Path) -> None:
    rows = samples(tmp_path, 200, kind="crowd", size=448)
    counts = [sum(row.answer == str(n) for row in rows) for n in range(10)]
    assert sum((c - 20) ** 2 / 20 for c in counts) < 27.9, "chi-square, 9 degrees, p = 0.001"
    grey = set()
    for sample in rows[:20]:
        x1, y1, x2, y2 = (v // 4 for v in sample.params["region"])
        whole = fitted(pixels_of(sample), 112)[y1:y2, x1:x2]
        grey.add(int((whole == 148).all(axis=2).sum()))
    assert grey == {20 * 4}, "20 signs of 2 x 2 pixels, whatever the answer"


@pytest.mark.parametrize("kind", ["signs", "crowd", "text"])
def test_the_scripted_player_solves_every_kind(kind: str, tmp_path: Path) -> None:
    rows, model = samples(tmp_path, 4, kind=kind), policy()
    task = Zoom(view=112)
    episodes = [begin(model, row, task, 1, (0, i))[0] for i, row in enumerate(rows)]
    for rollout in play_scripted(model, episodes, [(0, i) for i in range(len(rows))]):
        assert rollout.error is None and len(rollout.turns) == 2
        assert rollout.score is not None and rollout.score.value == 1.0
    blind = Zoom(view=112, tools=[])
    episodes = [begin(model, row, blind, 1, (0, i))[0] for i, row in enumerate(rows)]
    guessed = play_scripted(model, episodes, [(0, i) for i in range(len(rows))])
    assert any(r.score is not None and r.score.value == 0.0 for r in guessed)


@pytest.mark.render("tesseract")
@pytest.mark.slow
def test_words_in_small_print_are_read_by_the_tool_and_not_in_the_whole(tmp_path: Path) -> None:
    rows, model = samples(tmp_path, 4, kind="text"), policy()
    task = Zoom(view=112, tools=["read"])
    for row in rows:
        environment = task.environment(TEMPLATE)
        (whole,) = environment.reset(row, 0).images
        environment.shown([SHOWN])
        said = environment.scripted(np.random.default_rng(0))
        assert said is not None and '"name": "read"' in said
        outcome = environment.step(Turn((1,), said, (0.0,), StopReason.EOS))
        assert outcome.observation is not None and outcome.info["found"] == 1.0
        assert outcome.observation.messages[0]["content"] == [
            {"type": "text", "text": f"Text in the region:\n{row.answer}"}
        ]
        assert not set(read_text(whole, 60).split()) & set(WORDS)
    # in rollouts, side by side: told in words behind the call, and no second picture
    episodes = [begin(model, row, task, 1, (0, i))[0] for i, row in enumerate(rows)]
    for row, rollout in zip(
        rows, play_scripted(model, episodes, [(0, i) for i in range(len(rows))]), strict=True
    ):
        assert rollout.error is None and rollout.score is not None and rollout.score.value == 1.0
        first, second = rollout.turns
        assert len(first.prompt.visuals) == len(second.prompt.visuals) == 1
        answered = second.prompt.ids_P[first.prompt.length + len(first.token_ids) :]
        assert row.answer in model.processor.tokenizer.decode(answered)


def test_kinds_draw_other_pictures_and_the_first_kind_is_as_it_was(tmp_path: Path) -> None:
    """By a hash of rows and pixels that was taken before there were kinds."""
    path = Path(make_zoom_pictures(tmp_path / "signs", 3, 3))
    found = hashlib.sha256(path.read_bytes())
    for file in sorted((path.parent / "images").iterdir()):
        with Image.open(file) as picture:
            found.update(np.array(picture).tobytes())
    assert found.hexdigest() == "f3969ab564faf25509848b75902460d7e3f6bde5758f4f6eda9da5be99e4999d"
    assert main([str(tmp_path / "crowd"), "--kind", "crowd", "--count", "2", "--signs", "4"]) == 0
    rows = [
        json.loads(line) for line in (tmp_path / "crowd" / "data.jsonl").read_text().splitlines()
    ]
    with Image.open(tmp_path / "crowd" / rows[1]["image"]) as picture:
        assert len(rows) == 2 and picture.size == (896, 896)
        colours = {colour for _, colour in picture.getcolors(1 << 20)}
    assert set(SIGNS.values()) <= colours, "four frames"


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"kind": "crowds"}, "a kind of signs, crowd, text, found 'crowds'. Did you mean 'crowd'"),
        ({"kind": "crowd", "marks": "digits"}, "marks for the kind signs alone"),
        ({"kind": "crowd", "cells": 2}, "4 cells of the kind crowd"),
        ({"kind": "text", "size": 448}, "at least 896 for print that can be read, found 448"),
        ({"kind": "crowd", "size": 500}, "found count=1, size=500"),
    ],
)
def test_what_no_kind_has_is_refused(options: dict[str, Any], why: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=why):
        make_zoom_pictures(tmp_path, 1, 1, **options)
    assert not list(tmp_path.iterdir())


def test_sets_of_several_kinds_and_seeds_go_together(tmp_path: Path) -> None:
    """Of one seed in all kinds, and of a seed and its negative: no two rows have one id, and no two sets one picture."""
    sets = [("signs", 1), ("crowd", 1), ("text", 1), ("signs", -1)]
    ids, pictures = set(), set()
    for number, (kind, seed) in enumerate(sets):
        path = Path(make_zoom_pictures(tmp_path / str(number), 2, seed, kind=kind))
        for line in path.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            ids.add(row["id"])
            pictures.add((path.parent / row["image"]).read_bytes())
    assert len(ids) == len(pictures) == 2 * len(sets)
