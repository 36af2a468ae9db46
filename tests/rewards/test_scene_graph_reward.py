"""Scene graph rewards: invented nodes and edges cost, leaving things out costs, order and copies change nothing."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from mmrl.errors import ConfigError
from mmrl.rewards.scene_graph import (
    MODES,
    Graph,
    graph_metrics,
    make_scene_graph_reward,
    word_overlap,
)

A, B, C = (
    ("red cat", (0.0, 0.0, 10.0, 10.0)),
    ("dog", (20.0, 0.0, 30.0, 10.0)),
    ("bird", (0.0, 20.0, 10.0, 30.0)),
)
TRUE = Graph((A, B, C), ((0, "left of", 1), (2, "below", 0)))
FAR = (500.0, 500.0, 510.0, 510.0)
mode = st.sampled_from(sorted(MODES))
node = st.tuples(
    st.sampled_from(["red cat", "cat", "dog"]),
    st.tuples(*[st.integers(0, 20)] * 2, *[st.integers(4, 15)] * 2).map(
        lambda v: (float(v[0]), float(v[1]), float(v[0] + v[2]), float(v[1] + v[3]))
    ),
)


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    nodes = draw(st.lists(node, max_size=5, unique=True))
    index = st.integers(-1, len(nodes) - 1)
    edges = draw(
        st.lists(
            st.tuples(index, st.sampled_from(["on", "left of", "near"]), index),
            max_size=5,
            unique=True,
        )
    )
    return Graph(tuple(nodes), tuple(edges) if nodes else ())


def _true(graph: Graph) -> Graph:
    """A graph that can be a truth: every edge joins two nodes."""
    return Graph(graph.nodes, tuple(e for e in graph.edges if min(e[0], e[2]) >= 0))


@settings(max_examples=100, deadline=None)
@given(mode, graphs(), graphs())
def test_in_range_and_the_truth_is_one(name: str, predicted: Graph, true: Graph) -> None:
    reward, true = make_scene_graph_reward(name), _true(true)
    assert 0 <= reward(predicted, true) <= 1
    assert reward(true, true) == pytest.approx(1)
    empty = Graph(())
    assert reward(empty, empty) == 1
    if true.nodes:
        assert reward(empty, true) == reward(true, empty) == 0
    assert all(0 <= v <= 1 for v in graph_metrics(predicted, true).values())
    assert graph_metrics(true, true)["correct"] == 1


@settings(max_examples=100, deadline=None)
@given(mode, graphs(), graphs(), st.data())
def test_invented_and_repeated_parts_never_pay(
    name: str, predicted: Graph, true: Graph, data: st.DataObject
) -> None:
    reward, true = make_scene_graph_reward(name), _true(true)
    assume(predicted.nodes)
    value, last = reward(predicted, true), len(predicted.nodes)
    invented = [
        Graph((*predicted.nodes, ("cat", FAR)), predicted.edges),
        Graph(
            (*predicted.nodes, ("unheard", true.nodes[0][1] if true.nodes else FAR)),
            predicted.edges,
        ),
        Graph((*predicted.nodes, ("cat", FAR)), (*predicted.edges, (last, "on", 0))),
        Graph(predicted.nodes, (*predicted.edges, (0, "unheard", 0))),
        Graph(predicted.nodes, (*predicted.edges, (-1, "on", 0))),
    ]
    copy = data.draw(st.sampled_from(predicted.nodes))
    # no twins to answer
    if not any(a[0] == b[0] for i, a in enumerate(true.nodes) for b in true.nodes[:i]):
        invented.append(Graph((*predicted.nodes, copy), predicted.edges))
    if predicted.edges:
        again = data.draw(st.sampled_from(predicted.edges))
        invented.append(Graph(predicted.nodes, (*predicted.edges, *[again] * 30)))
    for worse in invented:
        assert reward(worse, true) <= value + 1e-9, worse


@settings(max_examples=60, deadline=None)
@given(mode, st.permutations(range(3)), st.permutations(range(2)))
def test_order_does_not_matter(name: str, nodes: list[int], edges: list[int]) -> None:
    predicted = Graph((A, ("dog", (20.0, 0.0, 30.0, 8.0)), ("bird", FAR)), TRUE.edges)
    place = {old: new for new, old in enumerate(nodes)}
    mixed = Graph(
        tuple(predicted.nodes[i] for i in nodes),
        tuple((place[s], p, place[t]) for s, p, t in (predicted.edges[k] for k in edges)),
    )
    assert make_scene_graph_reward(name)(mixed, TRUE) == pytest.approx(
        make_scene_graph_reward(name)(predicted, TRUE)
    )


def test_by_hand() -> None:
    f1, hard, soft = (make_scene_graph_reward(m) for m in ("f1", "r1_sgg_hard", "r1_sgg_soft"))
    no_edges = Graph(TRUE.nodes)
    assert f1(no_edges, TRUE) == hard(no_edges, TRUE) == soft(no_edges, TRUE) == 0.5
    assert f1(TRUE, no_edges) == 0.5, "invented edges where there are none"
    assert f1(no_edges, no_edges) == 1
    two = Graph((A, B), ((0, "left of", 1), (1, "on", 0)))
    assert f1(two, TRUE) == pytest.approx((0.8 + 2 / 4) / 2) and hard(two, TRUE) == pytest.approx(
        (2 / 3 + 1 / 2) / 2
    )
    # IoU 0.4: the edge to it does not count
    near = Graph((A, ("dog", (20.0, 0.0, 30.0, 4.0)), C), TRUE.edges)
    assert f1(near, TRUE) == pytest.approx((2 * 2.4 / 6 + 0.5) / 2) and hard(
        near, TRUE
    ) == pytest.approx((2 / 3 + 1 / 2) / 2)
    word = Graph((("cat", A[1]), B, C), TRUE.edges)
    assert hard(word, TRUE) == pytest.approx((2 / 3) / 2) and word_overlap(
        "Red  cat", "cat"
    ) == pytest.approx(2 / 3)
    cat = 0.5 * 2 / 3 + 0.5
    assert soft(word, TRUE) == pytest.approx(((cat + 2) / 3 + (cat + cat) / 2) / 2)
    assert word_overlap("cat", "car") == word_overlap("", "") == 0
    weighted = make_scene_graph_reward("f1", edge_weight=3)
    assert weighted(no_edges, TRUE) == 0.25
    flipped = Graph(TRUE.nodes, ((1, "left of", 0), (2, "below", 0)))
    assert f1(flipped, TRUE) == 0.75, "direction matters"


def test_an_edge_may_hang_on_any_copy_of_a_node() -> None:
    predicted = Graph((A, A, B, C), ((1, "left of", 2), (3, "below", 0)))
    swapped = Graph((A, A, B, C), ((0, "left of", 2), (3, "below", 1)))
    reward = make_scene_graph_reward()
    assert (
        reward(predicted, TRUE)
        == pytest.approx(reward(swapped, TRUE))
        == pytest.approx((6 / 7 + 1) / 2)
    )


def test_nearly_equal_nodes_are_one_node_on_which_any_edge_may_hang() -> None:
    near = ("red cat", (0.0, 0.0, 10.0, 9.9))
    true = Graph((A, ("red cat", (3.0, 0.0, 13.0, 10.0)), C), ((0, "left of", 1), (2, "below", 0)))
    for name in MODES:
        reward = make_scene_graph_reward(name)
        one, two = (
            reward(Graph((A, C), ((1, "below", 0),)), true),
            reward(Graph((A, near, C), ((2, "below", 1),)), true),
        )
        assert two <= one and (name != "f1" or two < one), (
            "the second cat is not found by repeating the first"
        )
        for nodes in ((A, near, C), (near, A, C)):
            for end in (0, 1):
                assert reward(Graph(nodes, ((2, "below", end),)), true) == pytest.approx(two)
        repeated = Graph((A, near, C), ((2, "below", 0), (2, "below", 1)))
        assert reward(repeated, true) <= two and (name != "f1" or reward(repeated, true) < two), (
            "the edge again, on the copy"
        )
        assert reward(Graph(true.nodes, true.edges), true) == 1


def test_metrics_by_hand() -> None:
    predicted = Graph((A, B, ("bird", FAR)), (*TRUE.edges, (0, "on", 1)))
    assert graph_metrics(predicted, TRUE) == pytest.approx(
        {
            "node_f1": 2 / 3,
            "edge_f1": 2 / 5,
            "edge_recall": 0.5,
            "graph_f1": (2 / 3 + 2 / 5) / 2,
            "correct": 0,
        }
    )
    assert (
        set(graph_metrics(Graph(()), TRUE).values())
        == set(graph_metrics(Graph(()), Graph(TRUE.nodes)).values())
        == {0}
    )
    assert set(graph_metrics(Graph(()), Graph(())).values()) == {1}
    assert graph_metrics(Graph((A,), ((0, "on", 0),)), Graph((A,)))["edge_recall"] == 0


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("r1_sgg_had", {}, "Did you mean 'r1_sgg_hard'"),
        ("f1", {"treshold": 1}, "Did you mean 'threshold'"),
        ("f1", {"threshold": 2}, "in \\[0, 1\\]"),
        ("r1_sgg_soft", {"threshold": 0.5}, "expected words"),
        ("f1", {"node_weight": 0}, "node_weight"),
    ],
)
def test_wrong_parameters_are_named(name: str, params: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_scene_graph_reward(name, **params)
