"""Scene graphs: gold 1 and wrong 0 everywhere, strict parsing, what is invented costs, bad rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmrl.coords import CoordFrame
from mmrl.errors import DataError
from mmrl.registry import task_from_spec
from mmrl.rewards.objects import MAX_OBJECTS
from mmrl.rewards.scene_graph import MODES
from mmrl.tasks.base import AnswerError
from mmrl.tasks.scene_graph import MAX_RELATIONS, SceneGraph, parse_graph
from mmrl.tasks.scenes import make_scenes
from mmrl.types import ImageSize, RewardContext, Sample
from tests.kits.clock_kit import takes_less

SIZE = ImageSize((640, 480), (644, 476))
CAT, DOG = (
    {"id": "a", "label": "Cat", "bbox": [100, 50, 300, 400]},
    {"id": "2", "label": "dog", "bbox": [320, 60, 600, 300]},
)
GRAPH = {"objects": [CAT, DOG], "relations": [["a", "left of", "2"], ["2", "near", "a"]]}


def _context(frame: str = "abs_orig") -> RewardContext:
    return RewardContext(1, 1, CoordFrame(frame), (SIZE,))


def _sample(answer: dict[str, Any]) -> Sample:
    return Sample("1", "scene_graph", "s", "Describe.", answer, ("a.png",))


@pytest.mark.parametrize(
    "params", [{"mode": m} for m in MODES] + [{"preset": p} for p in SceneGraph.presets], ids=str
)
@pytest.mark.parametrize(
    "answer", [GRAPH, {"objects": [CAT], "relations": []}, {"objects": [], "relations": []}]
)
def test_gold_is_best_and_wrong_is_zero_in_every_frame(
    params: dict[str, Any], answer: dict[str, Any]
) -> None:
    task, sample = SceneGraph(**params), _sample(answer)
    for frame in CoordFrame:
        ctx = _context(frame)
        gold, wrong = (
            task.score(sample, text, ctx)
            for text in (task.gold(sample, ctx), task.wrong(sample, ctx))
        )
        assert gold.value >= 0.99 * task.value_range[1] and gold.metrics["correct"] == 1
        assert wrong.parsed and wrong.parts["accuracy"] == 0 and wrong.metrics["node_f1"] == 0


def test_ids_only_tie_and_relations_have_two_spellings() -> None:
    text = (
        '<answer>{"objects": [{"id": 7, "label": "dog", "bbox": [320, 60, 600, 300]}, {"id": 3, "label": "CAT", "bbox_2d": '
        '[100, 50, 300, 400]}], "relations": [{"subject": 7, "predicate": "Near", "object": "3"}, [3, "left of", 7]]}</answer>'
    )
    score = SceneGraph().score(_sample(GRAPH), text, _context())
    assert score.value == 1 and score.detail["pred_text"] == "dog near cat; cat left of dog"
    assert score.detail["gold_labels"] == ["cat", "dog"] and score.detail["pred_boxes"][0] == [
        320,
        60,
        600,
        300,
    ]


def _answer(objects: list[dict[str, Any]], relations: list[list[Any]]) -> str:
    return "<answer>" + json.dumps({"objects": objects, "relations": relations}) + "</answer>"


def test_what_is_invented_or_left_out_costs() -> None:
    task, ctx, sample, right = SceneGraph(), _context(), _sample(GRAPH), GRAPH["relations"]
    bird = {"id": "9", "label": "bird", "bbox": [1, 1, 20, 20]}
    values = [
        task.score(sample, _answer(*parts), ctx).value
        for parts in (  # type: ignore[arg-type]
            ([CAT, DOG], right),
            ([CAT, DOG, bird], right),
            ([CAT, DOG], [*right, ["a", "eats", "2"]]),
            ([CAT, DOG], right[:1]),
            ([CAT], []),
            ([CAT, DOG], [*right, ["a", "near", "nobody"]]),
            ([CAT, DOG, {**DOG, "id": "3"}], right),
        )
    ]
    assert values[0] == 1 and all(v < 1 for v in values[1:])
    assert min(values[1:]) == values[4]


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ("[]", "not_a_graph"),
        ("a cat", "not_a_graph"),
        ("{}", "no_objects"),
        ('{"objects": {}}', "no_objects"),
        ('{"objects": [], "relations": {}}', "no_relations"),
        ('{"objects": [3]}', "no_box_key"),
        ('{"objects": [{"label": "a", "bbox": [1,2,3,4]}]}', "no_id"),
        ('{"objects": [{"id": true, "label": "a", "bbox": [1,2,3,4]}]}', "no_id"),
        (
            '{"objects": [{"id": 1, "label": "a", "bbox": [1,2,3,4]}, {"id": "1", "label": "b", "bbox": [1,2,3,4]}]}',
            "repeated_id",
        ),
        ('{"objects": [{"id": 1, "bbox": [1,2,3,4]}]}', "no_label"),
        ('{"objects": [{"id": 1, "label": "a", "bbox": [1,2,3]}]}', "wrong_count"),
        (
            '{"objects": [{"id": 1, "label": "a", "bbox": [1,2,3,4], "bbox_2d": [1,2,3,4]}]}',
            "ambiguous_keys",
        ),
        ('{"objects": [], "relations": [[1, 2]]}', "not_a_relation"),
        ('{"objects": [], "relations": [[1, 2, 3]]}', "no_label"),
        ('{"objects": [], "relations": [[null, "on", 3]]}', "no_id"),
        (
            json.dumps({"objects": [{**CAT, "id": i} for i in range(MAX_OBJECTS + 1)]}),
            "too_many_objects",
        ),
        (
            json.dumps({"objects": [], "relations": [["1", "on", "2"]] * (MAX_RELATIONS + 1)}),
            "too_many_relations",
        ),
        (" " * 50_000 + "{}", "answer_too_long"),
        ("{" * 5000, "not_a_graph"),
    ],
)
def test_everything_else_fails_with_its_reason(answer: str, reason: str) -> None:
    with pytest.raises(AnswerError) as caught:
        parse_graph(answer)
    assert caught.value.reason == reason


@settings(max_examples=100, deadline=None)
@given(
    st.one_of(
        st.text(max_size=100),
        st.recursive(
            st.floats() | st.integers() | st.text(max_size=5) | st.none() | st.just([1, 2, 3, 4]),
            lambda x: (
                st.lists(x, max_size=4)
                | st.dictionaries(
                    st.sampled_from(["objects", "relations", "id", "label", "bbox_2d", "subject"]),
                    x,
                    max_size=5,
                )
            ),
        ).map(json.dumps),
    )
)
def test_any_text_is_scored_without_an_exception(text: str) -> None:
    score = SceneGraph().score(_sample(GRAPH), f"<answer>{text}</answer>", _context())
    assert (
        0 <= score.value <= 1
        and (score.parsed or score.reason)
        and not (score.reason or "").startswith("reward_")
    )


def test_the_largest_graph_is_scored_quickly() -> None:
    nodes = [{"id": i, "label": "n", "bbox_2d": [i, i, i + 20, i + 20]} for i in range(MAX_OBJECTS)]
    edges = [[i % MAX_OBJECTS, "on", (i * 7) % MAX_OBJECTS] for i in range(MAX_RELATIONS)]
    text = _answer(nodes, edges)
    assert len(text) < 40_000
    task, sample = SceneGraph(), _sample(GRAPH)
    # measured: about 4 ms
    assert takes_less(0.05, lambda: task.score(sample, text, _context())).parsed


def _row(tmp_path: Path, answer: Any) -> str:
    make_scenes(tmp_path, 1, seed=0)
    row = {**json.loads((tmp_path / "data.jsonl").read_text()), "answer": answer}
    (tmp_path / "own.jsonl").write_text(json.dumps(row))
    return str(tmp_path / "own.jsonl")


SMALL = {"id": 1, "label": "cat", "bbox": [1, 2, 30, 40]}


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ([], "a graph"),
        ({"objects": [SMALL], "relatons": []}, "a graph"),
        ({"objects": [{"label": "cat", "bbox": [1, 2, 3, 4]}]}, "an 'id'"),
        ({"objects": [SMALL, SMALL]}, "different ids"),
        ({"objects": [SMALL], "relations": [[1, "on"]]}, "relations as"),
        ({"objects": [SMALL], "relations": [[1, "on", 2]]}, "objects that exist, found id 2"),
        ({"objects": [SMALL], "relations": [[1, " ", 1]]}, "a predicate as text"),
        ({"objects": [SMALL], "relations": [[1, "on", 1], ["1", "On", 1]]}, "different relations"),
        ({"objects": [{**SMALL, "bbox": [1, 2, 3000, 4]}]}, "inside the picture"),
    ],
)
def test_bad_rows_are_named(tmp_path: Path, answer: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        SceneGraph().load(_row(tmp_path, answer))


def test_examples_have_relations(tmp_path: Path) -> None:
    task = task_from_spec("scene_graph", {})
    samples = list(task.load(task.example_data(str(tmp_path)) or ""))
    assert len(samples) == 16 and sum(bool(s.answer["relations"]) for s in samples) > 8
    loaded = next(iter(SceneGraph().load(_row(tmp_path, {"objects": [SMALL]}))))
    assert loaded.answer == {
        "objects": [{"id": "1", "bbox": [1, 2, 30, 40], "label": "cat"}],
        "relations": [],
    }
