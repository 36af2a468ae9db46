"""Scene graphs: objects with boxes, relations between them, and rewards that make invented nodes and edges cost.

A graph is nodes (label, box) and edges (subject index, predicate, object index). Nodes are matched first (optimally, by
label and IoU); an edge is right when both of its nodes are matched to the nodes of a true edge with that predicate.

    f1            soft F1 of nodes (2 * sum of IoU / (N_p + N_g)) and F1 of edges; the default
    r1_sgg_hard   share of true nodes and of true triplets found: equal words, IoU >= 0.5 (R1-SGG's hard recall)
    r1_sgg_soft   the same with partial credit: words in common and IoU (R1-SGG's soft variant; it compares embeddings)

Nodes of one label that are nearly equal are matched as one node, as boxes are in mmrl.rewards.detection.
R1-SGG's shares are over the truth only, so that a flood of nodes or edges is free. Here they are over the larger side.

    python -c "from mmrl.rewards.scene_graph import Graph, graph_metrics as m; print(m(Graph(()), Graph((('cat', (0, 0, 9, 9)),))))"
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from mmrl.errors import ConfigError
from mmrl.rewards.detection import compare
from mmrl.rewards.matching import forbid_copies, hungarian_pairs, matched_sum
from mmrl.rewards.modes import by_mode
from mmrl.rewards.objects import normalise_label

if TYPE_CHECKING:
    import numpy.typing as npt

    Floats = npt.NDArray[np.float64]

__all__ = [
    "Edge",
    "Graph",
    "MODES",
    "SceneGraphReward",
    "graph_metrics",
    "make_scene_graph_reward",
    "word_overlap",
]

# N predicted nodes, M true ones; E predicted edges, F true ones

Edge = tuple[int, str, int]


@dataclass(frozen=True)
class Graph:
    """Nodes (label, (x1, y1, x2, y2)) and edges (subject index, predicate, object index).

    An edge of a prediction may name a node that does not exist (index -1): it costs like any wrong edge.
    """

    nodes: tuple[tuple[str, Sequence[float]], ...]
    edges: tuple[Edge, ...] = ()


def word_overlap(a: str, b: str) -> float:
    """F1 of the words two labels share, in [0, 1]: 'red circle' and 'circle' 2/3, 'cat' and 'car' 0."""
    words_a, words_b = Counter(normalise_label(a).split()), Counter(normalise_label(b).split())
    total = words_a.total() + words_b.total()
    return 2 * (words_a & words_b).total() / total if total else 0.0


def _overlaps(a: Sequence[str], b: Sequence[str]) -> Floats:
    """word_overlap of every pair, each distinct pair of labels compared once."""
    known: dict[tuple[str, str], float] = {}
    for x in set(a):
        known.update({(x, y): word_overlap(x, y) for y in set(b)})
    return np.array([[known[x, y] for y in b] for x in a], dtype=np.float64).reshape(len(a), len(b))


def _edge_gains(
    predicted: Graph,
    true: Graph,
    pairs: Mapping[int, tuple[int, float]],
    likeness: Callable[[str, str], float],
    copies: Sequence[tuple[list[int], int]] = (),
) -> Floats:
    """(E, F): what each predicted edge earns as each true edge; copies of an edge earn nothing.

    `copies` are the sets of nearly equal nodes that were matched as one (mmrl.rewards.matching.near_copies).
    """
    wanted: dict[tuple[int, int], list[int]] = {}
    for f, (subject, _, target) in enumerate(true.edges):
        wanted.setdefault((subject, target), []).append(f)
    first: dict[tuple[str, tuple[float, ...]], int] = {}
    same = [
        first.setdefault((normalise_label(label), tuple(box)), i)
        for i, (label, box) in enumerate(predicted.nodes)
    ]
    for members, _ in copies:
        for i in members:
            same[i] = i if i in pairs else next((k for k in members if k in pairs), same[i])
    # an edge may hang on any copy of a node: which of them was matched is chance
    ends = {
        i: i if i in pairs else same[i] for i in range(len(same)) if i in pairs or same[i] in pairs
    }
    edges = [(ends.get(s, s), normalise_label(p), ends.get(t, t)) for s, p, t in predicted.edges]
    gains = np.zeros((len(edges), len(true.edges)))
    for e, (subject, predicate, target) in enumerate(edges):
        if subject in pairs and target in pairs:
            (s, a), (t, b) = pairs[subject], pairs[target]
            for f in wanted.get((s, t), ()):
                gains[e, f] = a * b * likeness(predicate, true.edges[f][1])
    return forbid_copies(gains, edges)


def _share(total: float, predicted: int, true: int, f1: bool) -> float:
    """total over the mean (F1) or the larger size of both sides; both empty 1."""
    if not predicted and not true:
        return 1.0
    return 2 * total / (predicted + true) if f1 else total / max(predicted, true)


def _equal(a: str, b: str) -> float:
    return float(normalise_label(a) == normalise_label(b))


def _hard_pairs(kept_NM: Floats) -> dict[int, tuple[int, float]]:
    return {i: (j, 1.0) for i, j in hungarian_pairs(kept_NM, count_first=True)}


def _total(gains: Floats) -> float:
    return matched_sum(gains, hungarian_pairs(gains))


def _f1_parts(predicted: Graph, true: Graph, threshold: float) -> tuple[float, float]:
    pair = compare(predicted.nodes, true.nodes)
    nodes = _share(pair.matched_iou, len(predicted.nodes), len(true.nodes), f1=True)
    matches = _hard_pairs(np.where(pair.right_NM >= threshold, pair.right_NM, 0.0))
    found = _total(_edge_gains(predicted, true, matches, _equal, pair.copies))
    return nodes, _share(found, len(predicted.edges), len(true.edges), f1=True)


def _hard_parts(predicted: Graph, true: Graph, threshold: float) -> tuple[float, float]:
    pair = compare(predicted.nodes, true.nodes)
    matches = _hard_pairs(np.where(pair.right_NM >= threshold, pair.right_NM, 0.0))
    found = _total(_edge_gains(predicted, true, matches, _equal, pair.copies))
    return (
        _share(len(matches), len(predicted.nodes), len(true.nodes), f1=False),
        _share(found, len(predicted.edges), len(true.edges), f1=False),
    )


def _soft_parts(predicted: Graph, true: Graph, words: float) -> tuple[float, float]:
    pair = compare(predicted.nodes, true.nodes)
    alike_NM = _overlaps(
        [label for label, _ in predicted.nodes], [label for label, _ in true.nodes]
    )
    # a right word far away, or a wrong word in place, earns nothing
    both = (alike_NM > 0) & (pair.any_NM > 0)
    gains_NM = np.where(both, words * alike_NM + (1 - words) * pair.any_NM, 0.0)
    pairs = hungarian_pairs(gains_NM)
    matches = {i: (j, float(gains_NM[i, j])) for i, j in pairs}
    found = _total(_edge_gains(predicted, true, matches, word_overlap, pair.copies))
    return (
        _share(matched_sum(gains_NM, pairs), len(predicted.nodes), len(true.nodes), f1=False),
        _share(found, len(predicted.edges), len(true.edges), f1=False),
    )


@dataclass(frozen=True)
class SceneGraphReward:
    """reward(predicted graph, true graph) in [0, 1]; both without nodes: 1, only one: 0.

    Where neither side has edges only the nodes count, so that leaving edges out earns nothing by itself.
    """

    mode: str
    parts: Callable[[Graph, Graph], tuple[float, float]]
    node_weight: float
    edge_weight: float

    def __call__(self, predicted: Graph, true: Graph) -> float:
        if not predicted.nodes or not true.nodes:
            return float(not predicted.nodes and not true.nodes and not predicted.edges)
        nodes, edges = self.parts(predicted, true)
        if not predicted.edges and not true.edges:
            return min(1.0, nodes)
        total = self.node_weight + self.edge_weight
        return min(1.0, (self.node_weight * nodes + self.edge_weight * edges) / total)


def _number(name: str, value: Any, low: float, high: float) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        raise ConfigError(f"expected {name} to be a number in [{low:g}, {high:g}], found {value!r}")
    return float(value)


def _make(
    mode: str, parts: Callable[[Graph, Graph], tuple[float, float]], node: Any, edge: Any
) -> SceneGraphReward:
    weights = _number("node_weight", node, 1e-6, 1e6), _number("edge_weight", edge, 0, 1e6)
    return SceneGraphReward(mode, parts, *weights)


def _f1(
    threshold: float = 0.5, node_weight: float = 1.0, edge_weight: float = 1.0
) -> SceneGraphReward:
    """Soft F1 of nodes and F1 of edges whose nodes have IoU >= threshold."""
    level = _number("threshold", threshold, 0, 1)
    return _make("f1", lambda p, t: _f1_parts(p, t, level), node_weight, edge_weight)


def _r1_sgg_hard(
    threshold: float = 0.5, node_weight: float = 1.0, edge_weight: float = 1.0
) -> SceneGraphReward:
    """Nodes and triplets found, over the larger side."""
    level = _number("threshold", threshold, 0, 1)
    return _make("r1_sgg_hard", lambda p, t: _hard_parts(p, t, level), node_weight, edge_weight)


def _r1_sgg_soft(
    words: float = 0.5, node_weight: float = 1.0, edge_weight: float = 1.0
) -> SceneGraphReward:
    """words * overlap of label words + (1 - words) * IoU per node; edges: the product of both and of the predicates'."""
    share = _number("words", words, 0, 1)
    return _make("r1_sgg_soft", lambda p, t: _soft_parts(p, t, share), node_weight, edge_weight)


MODES: Mapping[str, Callable[..., SceneGraphReward]] = {
    "f1": _f1,
    "r1_sgg_hard": _r1_sgg_hard,
    "r1_sgg_soft": _r1_sgg_soft,
}


def make_scene_graph_reward(mode: str = "f1", **params: Any) -> SceneGraphReward:
    """The scene-graph reward called `mode`: callable(predicted, true) -> [0, 1].

    Parameters: f1 and r1_sgg_hard(threshold, node_weight, edge_weight), r1_sgg_soft(words, node_weight, edge_weight).
    Raises ConfigError for an unknown mode or parameter and for values out of range.
    """
    return by_mode("scene graph", MODES, mode, params)


def graph_metrics(predicted: Graph, true: Graph, threshold: float = 0.5) -> dict[str, float]:
    """node_f1, edge_f1, edge_recall at IoU >= threshold, graph_f1 (mean of both F1), correct (both are 1).

    Where neither side has edges, the edges are as good as the nodes, so that an empty answer earns nothing here either.
    """
    pair = compare(predicted.nodes, true.nodes)
    matches = _hard_pairs(np.where(pair.bare_NM >= threshold, pair.bare_NM, 0.0))
    found = _total(_edge_gains(predicted, true, matches, _equal))
    node_f1 = _share(len(matches), len(predicted.nodes), len(true.nodes), f1=True)
    if predicted.edges or true.edges:
        edge_f1 = _share(found, len(predicted.edges), len(true.edges), f1=True)
        recall = found / len(true.edges) if true.edges else 0.0
    else:
        edge_f1 = recall = node_f1
    return {
        "node_f1": node_f1,
        "edge_f1": edge_f1,
        "edge_recall": recall,
        "graph_f1": (node_f1 + edge_f1) / 2,
        "correct": float(node_f1 == 1 == edge_f1),
    }
