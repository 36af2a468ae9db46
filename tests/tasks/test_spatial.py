"""Spatial questions: three kinds of answers, mirrored views as real files, consistency over pairs."""

from __future__ import annotations

import dataclasses
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from mmrl.coords import CoordFrame
from mmrl.errors import ConfigError, DataError
from mmrl.rewards.views import swap_sides
from mmrl.task import Template
from mmrl.tasks.spatial import RELATIONS, Spatial, mirror_sample, parse_relation
from mmrl.types import RewardContext, Sample

CTX = RewardContext(1, 1, CoordFrame.ABS_ORIG)


def _sample(
    answer: Any, question: str = "Where is the cat?", key: str = "1", **params: Any
) -> Sample:
    return Sample(key, "spatial", "s", question, answer, params=params)


SAMPLES = [
    _sample("left"),
    _sample("above"),
    _sample("between"),
    _sample(True),
    _sample(False),
    _sample("B", options=["cat", "dog", "cow"]),
    _sample("A", options=["left", "right"]),
    _sample("C", num_options=4),
]


@pytest.mark.parametrize("sample", SAMPLES, ids=[str(s.answer) for s in SAMPLES])
def test_gold_scores_one_and_wrong_zero(sample: Sample) -> None:
    task = Spatial()
    assert task.score(sample, task.gold(sample, CTX), CTX).value == 1
    wrong = task.score(sample, task.wrong(sample, CTX), CTX)
    assert wrong.parsed and wrong.parts["accuracy"] == 0


def _asked(sample: Sample) -> str:
    return str(
        Spatial().messages(sample, Template("t", CoordFrame.ABS_ORIG))[-1]["content"][-1]["text"]
    )


def test_each_kind_is_asked_for_in_its_own_words() -> None:
    assert "<answer>yes or no</answer>" in _asked(_sample(True))
    assert "the letter of the right option" in _asked(
        _sample("B", options=["cat", "dog"])
    ) and "\nA. cat\nB. dog\n" in _asked(_sample("B", options=["cat", "dog"]))
    assert "such as left, right, above or below" in _asked(_sample("left"))
    assert "<answer>one of: left, right</answer>" in _asked(
        _sample("left", relations=["left", "right"])
    )


def test_relations_have_spellings() -> None:
    for name, spellings in RELATIONS.items():
        for spelling in spellings:
            assert parse_relation(f"**{spelling.capitalize()}**.") == name
    assert parse_relation("Between", ["between"]) == "between"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("left or right", "several_relations"),
        ("left, above", "several_relations"),
        ("it is on the left", "not_a_relation"),
        ("leftmost", "not_a_relation"),
        ("not left", "not_a_relation"),
        ("", "not_a_relation"),
        ("l" * 5000, "answer_too_long"),
        ("ｌｅｆｔ", "not_a_relation"),
        ("[" * 3000, "not_a_relation"),
        ("copyright", "not_a_relation"),
    ],
)
def test_anything_but_one_relation_fails(text: str, reason: str) -> None:
    score = Spatial().score(_sample("left"), f"<answer>{text}</answer>", CTX)
    assert (score.value, score.parsed, score.reason, score.metrics) == (
        0,
        False,
        reason,
        {"correct": 0},
    )


OVER = ["over", "on top of", "above"]


def test_listed_relations_are_told_apart_as_they_are_written(tmp_path: Path) -> None:
    task = Spatial()
    path = _write(
        tmp_path, [{"id": w, "answer": w.upper(), "params": {"relations": OVER}} for w in OVER]
    )
    for sample in task.load(path):
        assert sample.answer == sample.id
        right = [w for w in OVER if task.score(sample, f"<answer>{w}</answer>", CTX).value == 1]
        assert right == [sample.answer]
        assert task.score(sample, task.gold(sample, CTX), CTX).value == 1
        wrong = task.score(sample, task.wrong(sample, CTX), CTX)
        assert wrong.parsed and wrong.parts["accuracy"] == 0
        assert (
            task.score(sample, "<answer>higher than</answer>", CTX).reason == "ambiguous_relation"
        )
        assert task.score(sample, "<answer>below</answer>", CTX).parsed, (
            "a wrong relation, though not listed"
        )


def test_another_spelling_stands_for_the_only_listed_relation_it_can_mean(tmp_path: Path) -> None:
    listed = {"relations": ["To the left of", "to the right of"]}
    [sample] = Spatial().load(_write(tmp_path, [{"id": "a", "answer": "left", "params": listed}]))
    assert sample.answer == "to the left of"
    assert Spatial().score(sample, "<answer>left</answer>", CTX).value == 1
    assert Spatial().score(sample, "<answer>right of</answer>", CTX).parts["accuracy"] == 0
    wrong = Spatial().score(sample, Spatial().wrong(sample, CTX), CTX)
    assert wrong.parsed and wrong.parts["accuracy"] == 0
    mirrored = mirror_sample(sample)
    assert (
        mirrored.answer == "to the right of"
        and Spatial().score(mirrored, "<answer>right</answer>", CTX).value == 1
    )


@pytest.mark.parametrize(
    ("answer", "relations", "words"),
    [
        ("between", ["left", "right"], "one of params.relations: left, right"),
        ("higher than", OVER, "ambiguous_relation"),
        ("left", "left, right", "a list of at least two"),
        ("left", ["left"], "a list of at least two"),
        ("left", ["left", 3], "a list of at least two"),
    ],
)
def test_truths_outside_the_list_are_refused(
    tmp_path: Path, answer: str, relations: Any, words: str
) -> None:
    with pytest.raises(DataError, match=words):
        Spatial().load(
            _write(tmp_path, [{"id": "a", "answer": answer, "params": {"relations": relations}}])
        )


def test_kinds_keep_their_own_rules() -> None:
    assert (
        Spatial().score(_sample(True), "<answer>yes or no</answer>", CTX).reason == "both_answers"
    )
    assert (
        Spatial().score(_sample("A", options=["x", "y"]), "<answer>A or B</answer>", CTX).reason
        == "several_letters"
    )


def _write(folder: Path, rows: list[dict[str, Any]]) -> str:
    (folder / "images").mkdir(exist_ok=True)
    pixels = np.arange(24 * 16 * 3, dtype=np.uint8).reshape(16, 24, 3)
    for row in rows:
        if "image" in row:
            Image.fromarray(pixels).save(folder / row["image"])
    (folder / "data.jsonl").write_text(
        "".join(json.dumps({"question": "Where is the cat?", **row}) + "\n" for row in rows)
    )
    return str(folder / "data.jsonl")


def test_mirrored_views_are_real_files_with_the_truth_of_the_mirror(tmp_path: Path) -> None:
    path = _write(
        tmp_path,
        [
            {"id": "a", "image": "images/a.png", "answer": "left"},
            {"id": "b", "image": "images/b.png", "answer": "above"},
            {
                "id": "c",
                "image": "images/c.png",
                "question": "Is it left of the dog?",
                "answer": True,
            },
            {
                "id": "d",
                "image": "images/d.png",
                "question": "Which side?",
                "answer": "A",
                "params": {"options": ["left", "right"]},
            },
            {
                "id": "e",
                "image": "images/e.png",
                "question": "What is on the left?",
                "answer": "B",
                "params": {"options": ["x", "y"]},
            },
            {
                "id": "f",
                "image": "images/f.png",
                "answer": "A",
                "params": {"options": ["left edge", "middle"]},
            },
            {"id": "g", "image": "images/g.png", "answer": "left", "params": {"mirror": False}},
            {"id": "h", "answer": "left"},
        ],
    )
    samples = {s.id: s for s in Spatial(mirror=True).load(path)}
    assert list(samples) == [
        "a",
        "a-mirrored",
        "b",
        "b-mirrored",
        "c",
        "c-mirrored",
        "d",
        "d-mirrored",
        "e",
        "e-mirrored",
        "f",
        "f-mirrored",
        "g",
        "h",
    ]
    views = {key[0]: s for key, s in samples.items() if key.endswith("mirrored")}
    assert (views["a"].answer, views["b"].answer, views["c"].answer) == ("right", "above", True)
    assert views["c"].question == "Is it right of the dog?"
    assert (views["d"].answer, views["d"].params["options"]) == ("B", ["left", "right"]), (
        "the letter moves"
    )
    assert (views["e"].answer, views["e"].question) == ("B", "What is on the right?")
    assert (views["f"].answer, views["f"].params["options"]) == ("A", ["right edge", "middle"])
    for view in views.values():
        original = samples[view.params["mirror_of"]]
        assert view.images[0].startswith(str(tmp_path / "images" / "mirrored"))
        assert np.array_equal(
            np.asarray(Image.open(view.images[0])),
            np.asarray(Image.open(original.images[0]))[:, ::-1],
        )
        task = Spatial()
        assert task.score(view, task.gold(view, CTX), CTX).value == 1


def test_flipped_pictures_are_kept_and_follow_their_original(tmp_path: Path) -> None:
    path = _write(tmp_path, [{"id": "a", "image": "images/a.png", "answer": "left"}])
    task = Spatial(mirror=True, mirror_folder=str(tmp_path / "elsewhere"))
    first = list(task.load(path))[1].images[0]
    assert Path(first).parent == tmp_path / "elsewhere"
    written = os.stat(first).st_mtime_ns
    assert list(task.load(path))[1].images[0] == first and os.stat(first).st_mtime_ns == written, (
        "not written twice"
    )
    Image.new("RGB", (24, 16), "red").save(tmp_path / "images" / "a.png")
    os.utime(tmp_path / "images" / "a.png", (written / 1e9 + 5, written / 1e9 + 5))
    list(task.load(path))
    assert Image.open(first).getpixel((0, 0)) == (255, 0, 0), "a changed picture is flipped again"
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="mirror_folder"):
        list(Spatial(mirror=True, mirror_folder=str(tmp_path / "file")).load(path))


def test_files_may_hold_their_own_views_and_lost_partners_are_errors(tmp_path: Path) -> None:
    rows = [
        {"id": "a", "image": "images/a.png", "answer": "left"},
        {"id": "b", "image": "images/b.png", "answer": "right", "params": {"mirror_of": "a"}},
    ]
    assert [s.id for s in Spatial(mirror=True).load(_write(tmp_path, rows))] == ["a", "b"], (
        "nothing is mirrored twice"
    )
    rows[1]["params"] = {"mirror_of": "z"}
    with pytest.raises(DataError, match="mirror_of to be the id of another row, found 'z'"):
        Spatial().load(_write(tmp_path, rows))


def test_a_mirrored_sample_keeps_what_is_no_picture() -> None:
    sample = dataclasses.replace(SAMPLES[0], videos=("a.mp4",), audios=("a.wav", "b.wav"))
    mirrored = mirror_sample(sample)
    assert (mirrored.audios, mirrored.videos) == (sample.audios, sample.videos)
    assert mirrored.id == f"{sample.id}-mirrored" and mirrored.params["mirror_of"] == sample.id


def test_mirroring_twice_gives_the_same_sample_back() -> None:
    for sample in SAMPLES:
        twice = mirror_sample(mirror_sample(sample))
        assert (twice.question, twice.answer, twice.params.get("options")) == (
            sample.question,
            sample.answer,
            sample.params.get("options"),
        )


def _answers(task: Spatial, samples: list[Sample], texts: list[str]) -> Any:
    return [
        task.score(s, f"<answer>{t}</answer>", CTX) for s, t in zip(samples, texts, strict=True)
    ]


def test_consistency_tells_looking_from_habit(tmp_path: Path) -> None:
    task = Spatial(mirror=True)
    rows = [
        {"id": str(i), "image": f"images/{i}.png", "answer": side}
        for i, side in enumerate(["left", "right"] * 4)
    ]
    samples = list(task.load(_write(tmp_path, rows)))
    looking = task.summarize(_answers(task, samples, [s.answer for s in samples]))
    assert (looking["view_consistency"], looking["pair_accuracy"], looking["accuracy"]) == (1, 1, 1)
    habit = task.summarize(_answers(task, samples, ["left"] * len(samples)))
    assert (habit["view_consistency"], habit["pair_accuracy"], habit["accuracy"]) == (0, 0, 0.5)
    opposite = task.summarize(_answers(task, samples, [swap_sides(s.answer) for s in samples]))
    assert (opposite["view_consistency"], opposite["mirrored_accuracy"], opposite["accuracy"]) == (
        1,
        0,
        0,
    )
    failed = task.summarize(_answers(task, samples, ["well"] * len(samples)))
    assert (failed["view_consistency"], failed["parse_failure_rate"]) == (0, 1), (
        "two failures do not agree"
    )
    assert "view_consistency" not in task.summarize(
        _answers(task, samples[::2], [s.answer for s in samples[::2]])
    )
    assert task.summarize([]) == {}


def test_a_habit_of_letters_shows_where_the_letter_moves(tmp_path: Path) -> None:
    task = Spatial(mirror=True)
    samples = list(
        task.load(
            _write(
                tmp_path,
                [
                    {
                        "id": "a",
                        "image": "images/a.png",
                        "answer": "A",
                        "params": {"options": ["left", "right"]},
                    }
                ],
            )
        )
    )
    assert task.summarize(_answers(task, samples, ["A", "A"]))["view_consistency"] == 0
    assert task.summarize(_answers(task, samples, ["A", "B"]))["view_consistency"] == 1


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"answer": 5}, "a relation word, yes or no"),
        ({"answer": ""}, "a relation word"),
        ({"answer": "x" * 100}, "a relation word"),
        ({"answer": "C", "params": {"options": ["x", "y"]}}, "letter_out_of_range"),
        ({"answer": "left", "params": {"mirror": "yes"}}, "params.mirror as true or false"),
        ({"answer": "left", "params": {"mirror_of": 3}}, "params.mirror_of as an id"),
    ],
)
def test_unusable_rows_say_what_to_fix(tmp_path: Path, row: dict[str, Any], words: str) -> None:
    with pytest.raises(DataError, match="row 1: expected") as error:
        Spatial().load(_write(tmp_path, [row]))
    assert words in str(error.value)


def test_words_of_truth_are_canonical_and_parameters_checked(tmp_path: Path) -> None:
    path = _write(tmp_path, [{"answer": "To the left of"}, {"answer": "no"}, {"answer": "Between"}])
    assert [s.answer for s in Spatial().load(path)] == ["left", False, "between"]
    for params, words in (
        ({"mirror": "yes"}, "true or false"),
        ({"mirror_folder": 5}, "as a path"),
        ({"miror": True}, "Did you mean 'mirror'"),
    ):
        with pytest.raises(ConfigError, match=words):
            Spatial(**params)


def test_examples_load_with_views_and_threads_agree(tmp_path: Path) -> None:
    task = Spatial(mirror=True)
    samples = list(task.load(task.example_data(str(tmp_path))))
    assert len(samples) == 24 and {type(s.answer) for s in samples} == {str, bool}
    texts = [f"<answer>{word}</answer>" for word in ("left", "yes", "A", "right left", "no")] * 10
    line = [task.score(s, text, CTX) for s in samples[:6] for text in texts]
    with ThreadPoolExecutor(8) as threads:
        pairs = [(s, text) for s in samples[:6] for text in texts]
        assert list(threads.map(lambda pair: task.score(pair[0], pair[1], CTX), pairs)) == line


def test_garbage_behind_an_answer_never_raises_the_reward() -> None:
    for sample, right in ((SAMPLES[0], "left"), (SAMPLES[3], "yes"), (SAMPLES[5], "B")):
        for word in (right, "right", "no", "A", "x"):
            clean = Spatial().score(sample, f"<answer>{word}</answer>", CTX).value
            for tail in (f" {right}", f" or {right}", "!", "\n", f", {right}", " 🙂"):
                assert Spatial().score(sample, f"<answer>{word}{tail}</answer>", CTX).value <= max(
                    clean, 0.1 if clean else 0
                )
