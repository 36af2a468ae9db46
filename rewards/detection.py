"""Rewards for a set of labelled boxes: our own and the corrected rules of V-Triune, VLM-R1 and Perception-R1.

The default, `f1`, is a soft F1: 2 * sum of w(IoU) over optimally matched pairs of equal label / (N_p + N_g). It has no
cliff and cannot be gamed: the order of boxes does not matter; a copy, a box with a wrong label or a flood never raises
it; adding a box equal to a truth that has none, or moving a box towards its truth, never lowers it, unless the box becomes
a copy of another. Copies are predictions of one label that are equal, or much more alike than the truths of the label are
(mmrl.rewards.matching.near_copies): together they earn at most what the best of them would earn alone.

In every mode both lists empty is the best value and only one empty the worst, copies of a box match nothing new, and a
box with a wrong label is a false positive. What the papers' own code does otherwise is said at each mode.

    python -c "from mmrl.rewards.detection import make_detection_reward as m; a = ('cat', (0, 0, 9, 9)); \
      print(m('f1')([a], [a, a]))"
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from mmrl.errors import ConfigError, did_you_mean
from mmrl.rewards.average_precision import COCO_THRESHOLDS, check_rule, class_ap
from mmrl.rewards.dynamic_iou import (
    AVERAGE_THRESHOLDS,
    DYNAMIC_SCHEDULE,
    make_iou_reward,
    threshold_at,
)
from mmrl.rewards.iou import pairwise_iou
from mmrl.rewards.matching import (
    TWIN_IOU,
    forbid_copies,
    greedy_pairs,
    hungarian_pairs,
    matched_sum,
    merge_copies,
    most_pairs,
    near_copies,
)
from mmrl.rewards.modes import by_mode, check_shares
from mmrl.rewards.objects import normalise_label
from mmrl.rewards.published_matching import is_published, published_iou

if TYPE_CHECKING:
    import numpy.typing as npt

    Floats = npt.NDArray[np.float64]

__all__ = [
    "Comparison",
    "DetectionReward",
    "MODES",
    "compare",
    "detection_metrics",
    "make_detection_reward",
]

# N predicted objects, M true ones

Labelled = Sequence[tuple[str, Sequence[float]]]
_SIZE_PENALTIES = ("published", "hardened")
_TERMS = ("iou_max_label_first", "iou_max_iou_first", "map", "map50", "map75")


@dataclass(frozen=True)
class Comparison:
    """Predicted against true objects: label codes, boxes and IoUs, computed once for rewards and metrics."""

    codes_N: npt.NDArray[np.int64]
    codes_M: npt.NDArray[np.int64]
    boxes_N: Floats
    boxes_M: Floats
    any_NM: Floats  # IoU whatever the labels, copies merged
    right_NM: Floats  # IoU where the labels are equal, else 0; copies merged
    plain_NM: Floats  # IoU, copies included
    bare_NM: Floats  # right_NM where only equal boxes count as copies: what metrics go by
    copies: tuple[tuple[list[int], int], ...] = ()  # of mmrl.rewards.matching.near_copies

    @property
    def num_predicted(self) -> int:
        """N_p."""
        return len(self.codes_N)

    @property
    def same_NM(self) -> npt.NDArray[np.bool_]:
        """Where the labels are equal."""
        return np.equal(self.codes_N[:, None], self.codes_M[None, :])

    @property
    def num_true(self) -> int:
        """N_g."""
        return len(self.codes_M)

    @cached_property
    def matched_iou(self) -> float:
        """Largest sum of IoUs over one-to-one pairs of equal label."""
        return matched_sum(self.right_NM, hungarian_pairs(self.right_NM))


def compare(predicted: Labelled, true: Labelled) -> Comparison:
    """Compare [(label, box), ...] of both sides, boxes in one frame; labels by `normalise_label`."""
    codes: dict[str, int] = {}
    labels = [normalise_label(label) for label, _ in (*predicted, *true)]
    values = np.array([codes.setdefault(label, len(codes)) for label in labels], dtype=np.int64)
    codes_N, codes_M = values[: len(predicted)], values[len(predicted) :]
    boxes_N = np.array([box for _, box in predicted], dtype=np.float64).reshape(-1, 4)
    boxes_M = np.array([box for _, box in true], dtype=np.float64).reshape(-1, 4)
    # one call for the pairs of both lists: with a few boxes most of the time goes into numpy's calls
    boxes = np.concatenate([boxes_N, boxes_M])
    iou, count = pairwise_iou(boxes, boxes), len(boxes_N)
    iou_NN, plain_NM, iou_MM = iou[:count, :count], iou[:count, count:], iou[count:, count:]
    keys = [(label, *box) for label, (_, box) in zip(labels, predicted, strict=False)]
    any_NM = plain_NM
    if len(set(keys)) < len(keys):
        twins_M = ((iou_MM >= TWIN_IOU) & (codes_M[:, None] == codes_M[None, :])).sum(1) - 1
        any_NM = forbid_copies(plain_NM, keys, twins_M)
    bare_NM = np.where(codes_N[:, None] == codes_M[None, :], any_NM, 0.0)
    if min(plain_NM.shape) < 2:  # nothing to share out among copies
        return Comparison(codes_N, codes_M, boxes_N, boxes_M, any_NM, bare_NM, plain_NM, bare_NM)
    copies = near_copies(iou_NN, iou_MM, plain_NM > 0, codes_N, codes_M)
    return Comparison(
        codes_N,
        codes_M,
        boxes_N,
        boxes_M,
        merge_copies(any_NM, copies),
        merge_copies(bare_NM, copies),
        plain_NM,
        bare_NM,
        tuple(copies),
    )


@dataclass(frozen=True)
class _Case:
    """A comparison with what schedules and ceilings need."""

    pair: Comparison
    progress: float
    ceilings_M: Floats
    size: tuple[float, float] | None

    def kept(self, threshold: float, iou_NM: Floats | None = None) -> Floats:
        """IoUs of equal labels (or `iou_NM`) that reach `threshold`, else 0; no truth asks for more than it can get."""
        iou = self.pair.right_NM if iou_NM is None else iou_NM
        # 0.156 and 156 * 0.001 differ in the last bit
        limit_M = np.minimum(threshold, self.ceilings_M - 1e-9)
        return np.where(iou >= limit_M[None, :], iou, 0.0)


@dataclass(frozen=True)
class DetectionReward:
    """reward(predicted, true, progress) in [low, high]; both are sequences of (label, box) in one frame.

    `ceilings` (one per truth, default 1) are the best IoUs the answer's grid can spell: thresholds never ask for more.
    `size` is the picture's (width, height), used by perception_r1. `thresholds` tells whether ceilings matter.
    """

    mode: str
    of_case: Callable[[_Case], float]
    high: float = 1.0
    thresholds: bool = False
    low: float = 0.0

    def __call__(
        self,
        predicted: Labelled,
        true: Labelled,
        progress: float = 1.0,
        *,
        ceilings: Sequence[float] | None = None,
        size: tuple[float, float] | None = None,
    ) -> float:
        return self.of(compare(predicted, true), progress, ceilings=ceilings, size=size)

    def of(
        self,
        pair: Comparison,
        progress: float = 1.0,
        *,
        ceilings: Sequence[float] | None = None,
        size: tuple[float, float] | None = None,
    ) -> float:
        """The reward of a comparison that was made before."""
        if not pair.num_predicted or not pair.num_true:
            return self.high if pair.num_predicted == pair.num_true else self.low
        ceilings_M = (
            np.ones(pair.num_true) if ceilings is None else np.asarray(ceilings, dtype=np.float64)
        )
        value = self.of_case(_Case(pair, progress, ceilings_M, size))
        return min(self.high, max(self.low, value))


def _check_number(name: str, value: Any, low: float, high: float) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        raise ConfigError(f"expected {name} to be a number in [{low:g}, {high:g}], found {value!r}")
    return float(value)


def _levels(threshold: Any, schedule: Any) -> Callable[[float], tuple[float, ...]]:
    """progress -> IoU thresholds: one number, 'dynamic' (the schedule) or 'average' (eleven of them)."""
    if threshold == "average":
        return lambda progress: AVERAGE_THRESHOLDS
    if threshold == "dynamic":
        make_iou_reward("dynamic", schedule=schedule)  # raises ConfigError for a wrong schedule
        pairs = tuple((float(until), float(level)) for until, level in schedule)
        return lambda progress: (threshold_at(progress, pairs),)
    if isinstance(threshold, str):
        known = ("dynamic", "average")
        raise ConfigError(
            f"expected threshold as a number in [0, 1], 'dynamic' or 'average', found {threshold!r}."
            f"{did_you_mean(threshold, known)}"
        )
    fixed = (_check_number("threshold", threshold, 0, 1),)
    return lambda progress: fixed


def _f1(
    threshold: Any = 0.0, power: float = 1.0, schedule: Any = DYNAMIC_SCHEDULE
) -> DetectionReward:
    """2 * sum w / (N_p + N_g) with w = IoU ** power where IoU >= threshold, over the best one-to-one pairs of equal label.

    A further box pays when its w exceeds half of the reward so far. threshold may be a number, 'dynamic' or 'average'.
    """
    exponent, levels_at = _check_number("power", power, 0.1, 10), _levels(threshold, schedule)

    def of_case(case: _Case) -> float:
        total, levels = 0.0, levels_at(case.progress)
        for level in levels:
            weights = case.kept(level) ** exponent
            total += matched_sum(weights, hungarian_pairs(weights))
        return 2.0 * total / len(levels) / (case.pair.num_predicted + case.pair.num_true)

    return DetectionReward("f1", of_case, thresholds=threshold != 0.0)


def _triune_iou(
    case: _Case, level: float, completeness: float, iou_first: bool, published: bool
) -> float:
    """(1 - c) * mean_iou + c * completeness for the pairs that make it largest (or published), without the size penalty."""
    pair = case.pair
    if published:
        how = "overwritten" if iou_first else "by_truth"
        return published_iou(
            pair.plain_NM, pair.same_NM, level, 1 - completeness, completeness, how
        )
    kept = case.kept(level)
    if iou_first:  # the box that overlaps a truth most takes it, whatever its label
        others = np.where(~pair.same_NM, case.kept(level, pair.plain_NM), 0.0)
        kept = np.where(kept >= others.max(0)[None, :], kept, 0.0)
    per_pair = (1 / pair.num_true + 1 / pair.num_predicted) / 2
    gains = np.where(
        kept > 0, (1 - completeness) * kept / pair.num_true + completeness * per_pair, 0.0
    )
    return matched_sum(gains, hungarian_pairs(gains))


def _as_read_by_v_triune(case: _Case) -> _Case:
    """Without the boxes that V-Triune's reader drops before it counts (det_helper.extract_bbox): inverted ones, and equal ones
    of a label given again unless twin truths allow them; also without boxes that have no area, which it keeps."""
    pair = case.pair
    kept_N = np.asarray((pair.boxes_N[:, 2:] > pair.boxes_N[:, :2]).all(1), dtype=np.bool_)
    keys = list(map(tuple, np.column_stack([pair.codes_N, pair.boxes_N]).tolist()))
    if len(set(keys)) < len(keys):
        seen: set[tuple[float, ...]] = set()
        for i, key in enumerate(keys):
            kept_N[i] &= key not in seen or pair.bare_NM[i].any()
            seen.add(key)
    if kept_N.all():
        return case
    arrays = {
        name: getattr(pair, name)[kept_N] for name in vars(pair) if name.endswith(("_N", "_NM"))
    }
    return replace(case, pair=replace(pair, copies=(), **arrays))


def _size_penalty(case: _Case, level: float, base: float, hardened: bool) -> float:
    predicted, true = case.pair.num_predicted, case.pair.num_true
    if not hardened:
        return base ** abs(predicted - true)
    return base ** max(0, predicted - true, true - most_pairs(case.kept(min(0.5, level)) > 0))


def _label_ap(case: _Case, levels: Sequence[float], rule: str = "order_free") -> float:
    """Mean AP over the true labels."""
    pair = case.pair
    true_codes = set(pair.codes_M.tolist())
    strangers = sum(code not in true_codes for code in pair.codes_N.tolist()) / len(true_codes)
    iou_NM = pair.plain_NM if rule == "coco" else pair.right_NM
    total = 0.0
    for code in sorted(true_codes):
        rows, columns = np.nonzero(pair.codes_N == code)[0], np.nonzero(pair.codes_M == code)[0]
        if len(rows):
            total += class_ap(iou_NM[rows[:, None], columns], levels, rule, strangers)
    return total / len(true_codes)


def _v_triune(
    threshold: Any = "dynamic",
    schedule: Any = DYNAMIC_SCHEDULE,
    iou_completeness: float = 0.3,
    penalty: float = 0.6,
    weights: Any = None,
    size_penalty: str = "published",
    matching: str = "corrected",
) -> DetectionReward:
    """V-Triune's detection verifier: penalty ** |N_p - N_g| * sum_k w_k s_k / sum_k w_k (reward_server/verify.py).

    s of the two IoU terms = (1 - c) * mean_iou + c * completeness at threshold e ('dynamic', 'average' or a number).
    Corrected: optimal instead of its greedy matchings (matching 'published' has these); copies and wrong labels are false
    alarms; AP is order-free.
    As published, junk can fill up the number of boxes and so lift the penalty; inverted boxes, equal copies (dropped first, as
    there) and boxes without area (kept there) cannot. With size_penalty 'hardened' nothing can: |N_p - N_g| becomes
    max(N_p - N_g, N_g - boxes with IoU >= 0.5 to a truth of their label).
    iou_max_label_first matches within a label; iou_max_iou_first gives a truth to the box that overlaps it most.
    """
    c, base = (
        _check_number("iou_completeness", iou_completeness, 0, 1),
        _check_number("penalty", penalty, 0, 1),
    )
    if size_penalty not in _SIZE_PENALTIES:
        raise ConfigError(
            f"expected size_penalty as one of {', '.join(_SIZE_PENALTIES)}, found {size_penalty!r}."
            f"{did_you_mean(str(size_penalty), _SIZE_PENALTIES)}"
        )
    shares = check_shares({"iou_max_label_first": 1.0} if weights is None else weights, _TERMS)
    total_weight, hardened, published = (
        math.fsum(shares.values()),
        size_penalty == "hardened",
        is_published(matching),
    )
    levels_at, ap_levels = (
        _levels(threshold, schedule),
        {"map": COCO_THRESHOLDS, "map50": (0.5,), "map75": (0.75,)},
    )

    def of_case(case: _Case) -> float:
        total, levels = 0.0, levels_at(case.progress)
        if not hardened and not (case := _as_read_by_v_triune(case)).pair.num_predicted:
            return 0.0
        precision = math.fsum(
            w * _label_ap(case, ap_levels[k]) for k, w in shares.items() if k in ap_levels and w
        )
        for level in levels:
            terms = [
                w * _triune_iou(case, level, c, k == "iou_max_iou_first", published)
                for k, w in shares.items()
                if k not in ap_levels and w
            ]
            total += _size_penalty(case, level, base, hardened) * (precision + math.fsum(terms))
        return total / len(levels) / total_weight

    return DetectionReward("v_triune", of_case, thresholds=True)


def _vlm_r1_map(rule: str = "order_free") -> DetectionReward:
    """VLM-R1's `map`, `od_ap`: AP of the picture over IoU 0.5 .. 0.95.

    Corrected: order-free, and unknown labels are false positives; rule 'coco' gives the published number.
    """
    check_rule(rule)
    return DetectionReward("vlm_r1_map", lambda case: _label_ap(case, COCO_THRESHOLDS, rule))


def _vlm_r1_map50(rule: str = "order_free") -> DetectionReward:
    """VLM-R1's `od_ap50`: as vlm_r1_map at IoU 0.5."""
    check_rule(rule)
    return DetectionReward("vlm_r1_map50", lambda case: _label_ap(case, (0.5,), rule))


def _od_length(rule: str = "order_free") -> DetectionReward:
    """VLM-R1's `odLength`: mAP * min(1, N_g / N_p), which punishes extra boxes."""
    check_rule(rule)

    def of_case(case: _Case) -> float:
        return _label_ap(case, COCO_THRESHOLDS, rule) * min(
            1.0, case.pair.num_true / case.pair.num_predicted
        )

    return DetectionReward("od_length", of_case)


def _weighted_sum(
    threshold: float = 0.5, iou: float = 0.7, completeness: float = 0.3, matching: str = "corrected"
) -> DetectionReward:
    """VLM-R1's `weighted_sum`: 0.7 * sum of IoU / N_g + 0.3 * (1 - (miss + fa) / 2), greedy pairs with IoU >= 0.5.

    Its label term has weight 0 and is left out. Corrected: only pairs of equal label count; not with matching 'published'.
    """
    published = is_published(matching)
    level = _check_number("threshold", threshold, 0, 1)
    a, b = _check_number("iou", iou, 0, 1e6), _check_number("completeness", completeness, 0, 1e6)
    if a + b <= 0:
        raise ConfigError("expected a positive weight for iou or completeness, found 0 for both")

    def of_case(case: _Case) -> float:
        if published:
            return published_iou(
                case.pair.plain_NM, case.pair.same_NM, level, a / (a + b), b / (a + b)
            )
        kept = case.kept(level)
        pairs = greedy_pairs(kept)
        miss, false_alarm = (
            1 - len(pairs) / case.pair.num_true,
            1 - len(pairs) / case.pair.num_predicted,
        )
        mean_iou = matched_sum(kept, pairs) / case.pair.num_true
        return (a * mean_iou + b * (1 - (miss + false_alarm) / 2)) / (a + b)

    return DetectionReward("weighted_sum", of_case, thresholds=True)


def _perception_closeness(case: _Case, allowed_NM: npt.NDArray[np.bool_]) -> Floats:
    """1 - cost / 100 for the allowed pairs (their costs are below 30), else 0.

    cost = 5 * L1 of (cx, cy, w, h) in shares of the picture + 2 * (1 - GIoU); without a size, of the truth's own extent.
    """
    (rows, columns), boxes_M = np.nonzero(allowed_NM), case.pair.boxes_M
    a, b = case.pair.boxes_N[rows], boxes_M[columns]
    low = boxes_M[:, :2].min(0)
    scale = np.asarray(case.size or np.maximum(boxes_M[:, 2:].max(0) - low, 1e-9), dtype=np.float64)
    centres, sides = (
        np.abs(a[:, :2] + a[:, 2:] - b[:, :2] - b[:, 2:]) / 2,
        np.abs(a[:, 2:] - a[:, :2] - b[:, 2:] + b[:, :2]),
    )
    distance = ((centres + sides) / scale).sum(1)
    hull = (np.maximum(a[:, 2:], b[:, 2:]) - np.minimum(a[:, :2], b[:, :2])).prod(1)
    iou = case.pair.bare_NM[rows, columns]
    union = ((a[:, 2:] - a[:, :2]).prod(1) + (b[:, 2:] - b[:, :2]).prod(1)) / (1 + iou)
    closeness_NM = np.zeros(allowed_NM.shape)
    closeness_NM[rows, columns] = np.maximum(
        1e-6, 1 - (5 * distance + 2 * (1 - iou + (hull - union) / hull)) / 100
    )
    return merge_copies(closeness_NM, case.pair.copies)


def _perception_r1(penalty: float = 0.5) -> DetectionReward:
    """Perception-R1's Hungarian reward, in [0, 3]: 0.25 * format + 0.75 * F1 + cls_acc + mean_IoU - penalty * (fp + fn).

    Cost 5 * L1 + 2 * (1 - GIoU), pairs with IoU > 0.5. format is 1, since a malformed list is not parsed at all. A penalty of
    0.5 is the default of PR1's code (pr1_detection_reward); its training script sets it to 0.
    Corrected: IoU and label are conditions of a pair rather than costs, so junk cannot push pairs about, and F1, fp and
    fn know labels; cls_acc = pairs / boxes that sit on a truth of any label; a list without a pair earns no format either.
    """
    share = _check_number("penalty", penalty, 0, 0.5)

    def of_case(case: _Case) -> float:
        # a pair overlaps, whatever the grid
        pair, limit_M = case.pair, np.clip(case.ceilings_M - 1e-9, 0.0, 0.5)[None, :]
        pairs = hungarian_pairs(
            _perception_closeness(case, pair.bare_NM > limit_M), count_first=True
        )
        found, on_truth = len(pairs), most_pairs(pair.any_NM > limit_M)
        if not found:
            return 0.0  # there 0.25, for any list of known labels
        f1 = 2 * found / (pair.num_predicted + pair.num_true)
        missed = (1 - found / pair.num_predicted) + (1 - found / pair.num_true)
        mean_iou = matched_sum(pair.right_NM, pairs) / found
        return 0.25 + 0.75 * f1 + found / on_truth + mean_iou - share * missed

    return DetectionReward("perception_r1", of_case, high=3.0, thresholds=True)


MODES: Mapping[str, Callable[..., DetectionReward]] = {
    "f1": _f1,
    "v_triune": _v_triune,
    "vlm_r1_map": _vlm_r1_map,
    "vlm_r1_map50": _vlm_r1_map50,
    "od_length": _od_length,
    "weighted_sum": _weighted_sum,
    "perception_r1": _perception_r1,
}


def make_detection_reward(mode: str = "f1", **params: Any) -> DetectionReward:
    """The detection reward called `mode`: callable(predicted, true, progress) -> [0, 1] (perception_r1: [0, 3]).

    Parameters by mode: f1(threshold, power, schedule), v_triune(threshold, schedule, iou_completeness, penalty, weights,
    size_penalty, matching), vlm_r1_map(rule), vlm_r1_map50(rule), od_length(rule), weighted_sum(threshold, iou, completeness,
    matching), perception_r1(penalty).
    Raises ConfigError for an unknown mode or parameter and for values out of range.
    """
    return by_mode("detection", MODES, mode, params)


def detection_metrics(pair: Comparison, threshold: float = 0.5) -> dict[str, float]:
    """f1, precision, recall at an IoU threshold, mean_iou (over the truths, best pairs of equal label), count_ok, correct.

    The number of pairs is the largest possible one, and only equal boxes count as copies. Nothing predicted where nothing
    is: 1 everywhere; else a side without objects has 0. `correct` is f1 == 1.
    """
    predicted, true = pair.num_predicted, pair.num_true
    if not predicted or not true:
        precision = recall = f1 = mean_iou = float(predicted == true)
    else:
        found = most_pairs(pair.bare_NM >= threshold)
        precision, recall, f1 = found / predicted, found / true, 2 * found / (predicted + true)
        mean_iou = matched_sum(pair.bare_NM, hungarian_pairs(pair.bare_NM)) / true
    return {
        f"f1@{threshold:g}": f1,
        f"precision@{threshold:g}": precision,
        f"recall@{threshold:g}": recall,
        "mean_iou": mean_iou,
        "count_ok": float(predicted == true),
        "correct": float(f1 == 1.0),
    }
