"""R1-SGG's rewards of scene graphs, as its code adds them up (gpt4vision/R1-SGG, open_r1/grpo.py).

    soft   (2 * node_acc + 2 * node_box + 5 * edge) / 9, its default reward functions; times 9 they are its sum
           node_acc  sum of label similarities of matched nodes / N
           node_box  sum of (2 * IoU + 5 * exp(-L1)) / 7 of matched nodes / N
           edge      sum over the true relations of the similarities of subject, object and predicate / relations
           nodes are matched by the least sum of (1 - similarity) + 2 * (1 - GIoU) + 5 * L1
    hard   the share of true relations found: equal labels and predicate, both boxes with IoU >= 0.5 (its edge_hard_reward);
           where the truth has no relations, which earns nothing there, the share of nodes found

L1 is the sum of the four absolute differences in shares of the picture. The similarity of labels is there the cosine of
spaCy's word vectors; here it is `word_overlap`, which needs no model and agrees with it on equal labels.

There the shares are over the truth alone, so that a flood of nodes or relations is free: `over='truth'` gives that number. By
default they are over the larger side, and a relation given twice counts twice there and once as found.

    python -c "from mmrl.rewards.r1_sgg import make_r1_sgg as m; print(m())"
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mmrl.errors import ConfigError, did_you_mean
from mmrl.rewards.iou import pairwise_giou, pairwise_iou
from mmrl.rewards.matching import most_pairs
from mmrl.rewards.objects import normalise_label
from mmrl.rewards.scene_graph import Graph, word_overlap

if TYPE_CHECKING:
    import numpy.typing as npt

    Floats = npt.NDArray[np.float64]

__all__ = ["EDGES", "GraphReward", "make_r1_sgg"]

EDGES = ("soft", "hard")
_OVER = ("larger", "truth")
_NODE, _BOX, _EDGE = 2.0, 2.0, 5.0
_HARD_IOU = 0.5

GraphReward = Callable[[Graph, Graph, Sequence[float]], float]
"""reward(predicted graph, true graph, (width, height) of the picture) in [0, 1]; boxes in pixels."""


def _boxes(graph: Graph, scale: Floats) -> Floats:
    return np.array([box for _, box in graph.nodes], dtype=np.float64).reshape(-1, 4) / scale


def _likeness(predicted: Graph, true: Graph) -> Floats:
    """(N, M) word_overlap of the labels."""
    return np.array(
        [[word_overlap(a, b) for b, _ in true.nodes] for a, _ in predicted.nodes], dtype=np.float64
    )


def _nodes(
    predicted: Graph, true: Graph, size: Sequence[float]
) -> tuple[dict[int, int], Floats, Floats]:
    """True node -> predicted node, the labels' likeness and the boxes' closeness, both (N, M)."""
    from scipy.optimize import linear_sum_assignment

    scale = np.array([*size, *size], dtype=np.float64)
    a, b = _boxes(predicted, scale), _boxes(true, scale)
    like_NM, distance_NM = _likeness(predicted, true), np.abs(a[:, None] - b[None, :]).sum(-1)
    giou_NM = 2 * np.asarray(pairwise_giou(a, b)) - 1  # pairwise_giou is scaled to [0, 1]
    cost_NM = (1 - like_NM) + 2 * (1 - giou_NM) + 5 * np.minimum(distance_NM, 1e6)
    rows, columns = linear_sum_assignment(cost_NM)
    closeness_NM = (2 * np.asarray(pairwise_iou(a, b)) + 5 * np.exp(-distance_NM)) / 7
    return {int(j): int(i) for i, j in zip(rows, columns, strict=True)}, like_NM, closeness_NM


def _said(predicted: Graph) -> Mapping[tuple[int, int], str]:
    """The predicate of each pair of predicted nodes; of several the last, as there."""
    return {(s, o): p for s, p, o in predicted.edges if s >= 0 and o >= 0}


def _soft(predicted: Graph, true: Graph, size: Sequence[float], over: str) -> float:
    place, like_NM, closeness_NM = _nodes(predicted, true, size)
    nodes = len(true.nodes) if over == "truth" else max(len(true.nodes), len(predicted.nodes))
    labels = math.fsum(float(like_NM[i, j]) for j, i in place.items()) / nodes
    boxes = math.fsum(float(closeness_NM[i, j]) for j, i in place.items()) / nodes
    if not true.edges and not predicted.edges:
        return (_NODE * labels + _BOX * boxes) / (_NODE + _BOX)
    said, found = _said(predicted), 0.0
    for subject, predicate, target in true.edges:
        pair = place.get(subject, -1), place.get(target, -1)
        if pair in said:
            found += float(like_NM[pair[0], subject] * like_NM[pair[1], target]) * word_overlap(
                said[pair], predicate
            )
    edges = found / _relations(predicted, true, over)
    return (_NODE * labels + _BOX * boxes + _EDGE * edges) / (_NODE + _BOX + _EDGE)


def _relations(predicted: Graph, true: Graph, over: str) -> int:
    return max(
        1, len(true.edges) if over == "truth" else max(len(true.edges), len(predicted.edges))
    )


def _hard(predicted: Graph, true: Graph, size: Sequence[float], over: str) -> float:
    one = np.ones(4)
    fits_NM = np.asarray(pairwise_iou(_boxes(predicted, one), _boxes(true, one))) >= _HARD_IOU
    names_N, names_M = (
        [normalise_label(label) for label, _ in graph.nodes] for graph in (predicted, true)
    )
    alike_NM = np.array([[a == b for b in names_M] for a in names_N]) & fits_NM
    if not true.edges:  # there every answer earns 0
        return 0.0 if predicted.edges else most_pairs(alike_NM) / max(len(names_N), len(names_M))
    said = {(s, normalise_label(p), o) for s, p, o in predicted.edges if s >= 0 and o >= 0}
    found = sum(
        any(
            predicate == normalise_label(wanted) and alike_NM[s, subject] and alike_NM[o, target]
            for s, predicate, o in said
        )
        for subject, wanted, target in true.edges
    )
    return found / _relations(predicted, true, over)


def make_r1_sgg(edges: str = "soft", over: str = "larger") -> GraphReward:
    """R1-SGG's reward, see the module; both graphs without nodes 1, only one 0. Raises ConfigError."""
    for name, value, known in (("edges", edges, EDGES), ("over", over, _OVER)):
        if value not in known:
            raise ConfigError(
                f"expected {name} as one of {', '.join(known)}, found {value!r}.{did_you_mean(str(value), known)}"
            )
    rule: Callable[[Graph, Graph, Sequence[float], str], Any] = _soft if edges == "soft" else _hard

    def reward(predicted: Graph, true: Graph, size: Sequence[float]) -> float:
        if not predicted.nodes or not true.nodes:
            return float(not predicted.nodes and not true.nodes and not predicted.edges)
        return min(1.0, max(0.0, float(rule(predicted, true, size, over))))

    return reward
