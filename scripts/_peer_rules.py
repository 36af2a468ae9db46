"""The rules of other projects, written down again in a few lines each from what they document: the table's other side.

Nothing here uses mmrl and nothing is copied: each function is the formula a paper or a repository states, as plainly as it
can be said and with no regard for speed (matchings try every permutation). Where a project's own code departs from its
formula, the function says so and does as that code does. `scripts.reward_table` compares mmrl's rewards with these.
"""
from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Callable, Sequence

Box = Sequence[float]
Item = tuple[str, Box]  # label, box
LEVELS = [0.5 + 0.05 * k for k in range(10)]
TRIUNE_AVERAGE = [*LEVELS, 0.99]

# boxes


def iou(a: Box, b: Box) -> float:
    """Intersection over union of two boxes with area."""
    wide, high = min(a[2], b[2]) - max(a[0], b[0]), min(a[3], b[3]) - max(a[1], b[1])
    inside = wide * high if wide > 0 < high else 0.0
    return inside / ((a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - inside)


def vlm_r1_iou(a: Box, b: Box) -> float | None:
    """VLM-R1: corners moved in by one pixel, one added to both sides; an overlap one pixel wide is none. None: 0 / 0."""
    left, top, right, bottom = max(a[0], b[0]), max(a[1], b[1]), min(a[2], b[2]) - 1, min(a[3], b[3]) - 1
    inside = (right - left + 1) * (bottom - top + 1) if left < right and top < bottom else 0.0
    union = (a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - inside
    return inside / union if union else None


def scaled_giou(a: Box, b: Box) -> float:
    """(GIoU + 1) / 2 with GIoU = IoU - (hull - union) / hull."""
    wide, high = min(a[2], b[2]) - max(a[0], b[0]), min(a[3], b[3]) - max(a[1], b[1])
    union = (a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - (wide * high if wide > 0 < high else 0.0)
    hull = (max(a[2], b[2]) - min(a[0], b[0])) * (max(a[3], b[3]) - min(a[1], b[1]))
    return (iou(a, b) - (hull - union) / hull + 1) / 2


def dynamic_threshold(share: float) -> float:
    """V-Triune: 0.85 for the first tenth of the run, 0.95 up to a quarter, then 0.99."""
    return 0.85 if share <= 0.10 else 0.95 if share <= 0.25 else 0.99


def thresholded(value: float, level: float) -> float:
    """The IoU where it reaches the threshold."""
    return value if value >= level else 0.0


def most_similar_pairs(value: Callable[[int, int], float], count: int, true: int) -> list[tuple[int, int]]:
    """Pairs (i, j) of the one-to-one assignment with the largest sum, by trying all of them; pairs of value 0 are left out."""
    small, swapped = (count, True) if count <= true else (true, False)
    best: list[tuple[int, int]] = []
    for order in itertools.permutations(range(max(count, true)), small):
        pairs = [(k, other) if swapped else (other, k) for k, other in enumerate(order)]
        pairs = [pair for pair in pairs if value(*pair) > 0]
        if sum(value(*p) for p in pairs) > sum(value(*p) for p in best):
            best = pairs
    return best


def _triune(pairs: Sequence[float], predicted: int, true: int, share: float) -> float:
    """0.6 ** |dN| * ((1 - c) * mean IoU + c * completeness) of the IoUs of the pairs."""
    miss, false_alarm = (true - len(pairs)) / true, (predicted - len(pairs)) / predicted
    return 0.6 ** abs(predicted - true) * ((1 - share) * sum(pairs) / true + share * (1 - (miss + false_alarm) / 2))


def triune(predicted: Sequence[Item], true: Sequence[Item], level: float, share: float = 0.3) -> float:
    """V-Triune, iou_max_label_first, with the best pairs of equal label and IoU >= level."""

    def value(i: int, j: int) -> float:
        return thresholded(iou(predicted[i][1], true[j][1]), level) if predicted[i][0] == true[j][0] else 0.0

    pairs = most_similar_pairs(value, len(predicted), len(true))
    return _triune([value(*p) for p in pairs], len(predicted), len(true), share)


def triune_in_order(predicted: Sequence[Item], true: Sequence[Item], level: float, share: float = 0.3) -> float:
    """The same as V-Triune's code matches: truth after truth takes its best free box, whatever a later one needs."""
    free, found = list(range(len(predicted))), []
    for label, box in true:
        mine = [(iou(predicted[i][1], box), i) for i in free if predicted[i][0] == label]
        if mine and max(mine)[0] >= level:
            found.append(max(mine)[0])
            free.remove(max(mine)[1])
    return _triune(found, len(predicted), len(true), share)


def triune_overwritten(predicted: Sequence[Item], true: Sequence[Item], level: float, share: float = 0.3) -> float:
    """V-Triune, iou_max_iou_first, as its code runs: the largest IoU left is credited to the last box and last truth left."""
    rows, columns, found = list(range(len(predicted))), list(range(len(true))), []
    while rows and columns:
        largest = max(iou(predicted[i][1], true[j][1]) for i in rows for j in columns)
        if largest < level:
            break
        i, j = rows.pop(), columns.pop()
        found.append(largest if predicted[i][0] == true[j][0] else 0.0)
    return _triune(found, len(predicted), len(true), share)


def coco_ap(predicted: Sequence[Item], true: Sequence[Item], levels: Sequence[float] = tuple(LEVELS)) -> float:
    """COCO's AP of one picture with all scores 1: boxes in the order written, labels without truth ignored, 101 recalls."""
    if not predicted or not true:
        return float(len(predicted) == len(true))
    totals = []
    for label in sorted({name for name, _ in true}):
        boxes, truths = [b for n, b in predicted if n == label], [b for n, b in true if n == label]
        for level in levels:
            free, hits = list(truths), []
            for box in boxes:
                best = max(free, key=lambda t: iou(box, t), default=None)
                hits.append(best is not None and iou(box, best) >= level)
                if hits[-1]:
                    free.remove(best)  # type: ignore[arg-type]
            curve = [(sum(hits[:k]) / len(truths), sum(hits[:k]) / k) for k in range(1, len(hits) + 1)]
            totals.append(sum(max((p for r, p in curve if r >= point / 100), default=0.0) for point in range(101)) / 101)
    return sum(totals) / len(totals)


def od_length(predicted: Sequence[Item], true: Sequence[Item]) -> float:
    """VLM-R1: AP * min(1, N_g / N_p)."""
    return coco_ap(predicted, true) * min(1.0, len(true) / len(predicted))


def vlm_r1_weighted_sum(predicted: Sequence[Item], true: Sequence[Item]) -> float:
    """VLM-R1: greedy pairs with IoU >= 0.5 whatever their labels; 0.7 * IoU of right labels / N_g + 0.3 * completeness."""
    cells = sorted(((iou(p[1], t[1]), i, j) for i, p in enumerate(predicted) for j, t in enumerate(true)), reverse=True)
    pairs: list[tuple[float, int, int]] = []
    for value, i, j in cells:
        if value >= 0.5 and all(i != a and j != b for _, a, b in pairs):
            pairs.append((value, i, j))
    right = sum(value for value, i, j in pairs if predicted[i][0] == true[j][0])
    miss, false_alarm = 1 - len(pairs) / len(true), 1 - len(pairs) / len(predicted)
    return 0.7 * right / len(true) + 0.3 * (1 - (miss + false_alarm) / 2)


def perception_r1_detection(predicted: Sequence[Item], true: Sequence[Item], side: float = 1000.0) -> float:
    """Perception-R1: pairs of least 5 L1(cx, cy, w, h) + class + 2 (1 - GIoU), kept with IoU > 0.5; the sum clamped to [0, 3]."""

    def middle(b: Box) -> list[float]:
        return [(b[0] + b[2]) / 2, (b[1] + b[3]) / 2, b[2] - b[0], b[3] - b[1]]

    def gain(i: int, j: int) -> float:
        (p, a), (t, b) = predicted[i], true[j]
        far = sum(abs(x - y) for x, y in zip(middle(a), middle(b), strict=True)) / side
        return 100 - 5 * far - (p != t) - 2 * (2 - 2 * scaled_giou(a, b))

    pairs = [p for p in most_similar_pairs(gain, len(predicted), len(true)) if iou(predicted[p[0]][1], true[p[1]][1]) > 0.5]
    count = len(pairs)
    lost = (len(predicted) - count) / len(predicted) + (len(true) - count) / len(true)
    named = sum(predicted[i][0] == true[j][0] for i, j in pairs) / max(1, count)
    close = sum(iou(predicted[i][1], true[j][1]) for i, j in pairs) / max(1, count)
    return min(3.0, max(0.0, 0.25 + 0.75 * 2 * count / (len(predicted) + len(true)) + named + close - 0.5 * lost))


def f1_at(predicted: Sequence[Item], true: Sequence[Item], level: float) -> float:
    """F1 with the largest number of pairs of equal label and IoU >= level."""
    pairs = most_similar_pairs(lambda i, j: float(predicted[i][0] == true[j][0] and iou(predicted[i][1], true[j][1]) >= level),
                               len(predicted), len(true))
    return 2 * len(pairs) / (len(predicted) + len(true))


def counted_points(predicted: Sequence[Sequence[float]], true: Sequence[Sequence[float]]) -> float:
    """Perception-R1's counting: min / max * (1 - mean distance of matched centres / (1000 * sqrt 2))."""
    pairs = most_similar_pairs(lambda i, j: 10_000 - math.dist(predicted[i], true[j]), len(predicted), len(true))
    far = sum(math.dist(predicted[i], true[j]) for i, j in pairs) / len(pairs)
    return min(len(predicted), len(true)) / max(len(predicted), len(true)) * (1 - far / (1000 * math.sqrt(2)))


# graphs


def r1_sgg_recall(nodes: tuple[int, int], edges: tuple[int, int]) -> float:
    """R1-SGG's hard recall from (found, true) nodes and triplets: the mean of the two shares."""
    return (nodes[0] / nodes[1] + edges[0] / edges[1]) / 2


# screens


def gui_g2_point(p: Box, g: Box) -> float:
    """exp(-1/2 [(dx / sx)^2 + (dy / sy)^2]) of the centres, sigma half the truth's size, rounded to 3 decimals."""
    dx, dy = (p[0] + p[2] - g[0] - g[2]) / 2, (p[1] + p[3] - g[1] - g[3]) / 2
    return round(math.exp(-0.5 * ((dx / (0.5 * (g[2] - g[0]))) ** 2 + (dy / (0.5 * (g[3] - g[1]))) ** 2)), 3)


def gui_g2_coverage(p: Box, g: Box) -> float:
    """exp(-Bhattacharyya distance) of the Gaussians of both boxes, sigma half their size, rounded to 3 decimals."""
    d = ((p[0] + p[2] - g[0] - g[2]) / 2, (p[1] + p[3] - g[1] - g[3]) / 2)
    first = [((b - a) / 2) ** 2 + 1e-8 for a, b in ((p[0], p[2]), (p[1], p[3]))]
    second = [((b - a) / 2) ** 2 + 1e-8 for a, b in ((g[0], g[2]), (g[1], g[3]))]
    mean = [(a + b) / 2 for a, b in zip(first, second, strict=True)]
    dets = [math.prod(v) for v in (mean, first, second)]
    far = sum(x * x / s for x, s in zip(d, mean, strict=True)) / 8 + 0.5 * math.log(dets[0] / math.sqrt(dets[1] * dets[2]))
    return round(math.exp(-far), 3)


def inside(point: Sequence[float], box: Box, strict: bool = False) -> float:
    """1 for a point in the box, its edges in (UI-R1, ScreenSpot) or out (GUI-R1)."""
    (x, y), (a, b, c, d) = point, box
    return float(a < x < c and b < y < d if strict else a <= x <= c and b <= y <= d)


def region_votes(boxes: Sequence[Box], width: int, height: int) -> list[float]:
    """GUI-RCPO on a grid of pixels: sum of the votes in a box / (largest vote * area of the box)."""
    grid = [[sum(x1 <= x < x2 and y1 <= y < y2 for x1, y1, x2, y2 in boxes) for x in range(width)] for y in range(height)]
    most = max(map(max, grid))
    return [sum(sum(row[int(x1):int(x2)]) for row in grid[int(y1):int(y2)]) / (most * (x2 - x1) * (y2 - y1))
            for x1, y1, x2, y2 in boxes]


def gui_r1_text(found: str, true: str) -> float:
    """GUI-R1: F1 of the two sets of words >= 0.5; of single words, either may contain the other."""
    a, b = set(found.lower().split()), set(true.lower().split())
    if len(a) == len(b) == 1:
        return float(found.lower() in true.lower() or true.lower() in found.lower())
    return float(2 * len(a & b) / (len(a) + len(b)) >= 0.5)


def ui_r1(right_type: bool, point: Sequence[float] | None = None, box: Box | None = None) -> float:
    """UI-R1's sum: type + place (only with the right type; free where there is none) + a right format."""
    return right_type + (right_type and (point is None or box is None or inside(point, box))) + 1.0


def os_atlas_text(found: str, true: str) -> float:
    """OS-Atlas as its code runs: equal first words (the F1 of two single words exceeds 0.5 only then)."""
    return float(found.split()[0] == true.split()[0])


def odyssey_place(point: Sequence[float], box: Box, size: Sequence[float]) -> float:
    """GUI-Odyssey: in the box, or within 0.14 of its middle in shares of the picture."""
    middle = ((box[0] + box[2]) / 2, (box[1] + box[3]) / 2)
    far = math.dist([v / s for v, s in zip(point, size, strict=True)], [v / s for v, s in zip(middle, size, strict=True)])
    return float(inside(point, box) or far <= 0.14)


def odyssey_text(found: str, true: str) -> float:
    """GUI-Odyssey: one text contains the other, or 1 - normalised edit distance >= 0.5."""
    return float(found in true or true in found or 1 - page_ocr(found, true) >= 0.5)


# texts


def edits(a: Sequence[object], b: Sequence[object]) -> int:
    """Levenshtein distance of two sequences."""
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        last, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            last, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, last + (x != y))
    return row[-1]


def common(a: Sequence[object], b: Sequence[object]) -> int:
    """Length of the longest common subsequence."""
    row = [0] * (len(b) + 1)
    for x in a:
        last = 0
        for j, y in enumerate(b, 1):
            last, row[j] = row[j], last + 1 if x == y else max(row[j], row[j - 1])
    return row[-1]


def one_minus_wer(prediction: str, truth: str) -> float:
    """clip(1 - word error rate, 0, 1)."""
    return min(1.0, max(0.0, 1 - edits(prediction.split(), truth.split()) / max(1, len(truth.split()))))


def rouge_mean(prediction: str, truth: str) -> float:
    """Mean F1 of ROUGE-1, ROUGE-2 and ROUGE-L over runs of a-z and 0-9, without stemming."""
    said, meant = (re.findall("[a-z0-9]+", text.lower()) for text in (prediction, truth))

    def f1(hits: int, p: int, t: int) -> float:
        return 2 * hits / (p + t) if hits else 0.0

    pairs = [Counter(itertools.pairwise(t)) for t in (said, meant)]
    return (f1((Counter(said) & Counter(meant)).total(), len(said), len(meant))
            + f1((pairs[0] & pairs[1]).total(), len(said) - 1, len(meant) - 1)
            + f1(common(said, meant), len(said), len(meant))) / 3


def levenshtein_ratio(a: str, b: str) -> float:
    """2 * longest common subsequence / sum of the lengths."""
    return 2 * common(a, b) / (len(a) + len(b))


def page_ocr(prediction: str, truth: str) -> float:
    """PageOCR's edit distance / length of the longer text; lower is better."""
    return edits(prediction, truth) / max(len(prediction), len(truth))


def anls(prediction: str, truth: str) -> float:
    """1 - normalised edit distance where that is at least 0.5."""
    return thresholded(1 - page_ocr(prediction, truth), 0.5)


def vlm_r1_yes_no(prediction: str, truth: str) -> float:
    """VLM-R1: the first 'yes' or 'no' anywhere in either text, also inside words."""
    said, meant = (re.search("yes|no", text.lower()) for text in (prediction, truth))
    return float((said and said[0]) == (meant and meant[0]))


def vlm_r1_letter(prediction: str, truth: str) -> float:
    """VLM-R1's mcq for one candidate: a capital by itself before punctuation or the end of the text."""
    found = re.findall(r"(?<![A-Z])[A-Z](?=[.,?!:;]|$)", prediction.upper())
    return float(found[:1] == [truth])


def chartqa(prediction: str, truth: str) -> float:
    """ChartQA's relaxed accuracy: 5 % on what float() reads ('%' divides by 100), else equal but for case."""

    def number(text: str) -> float | None:
        try:
            return float(text.rstrip("%")) / (100 if text.endswith("%") else 1)
        except ValueError:
            return None

    p, g = number(prediction), number(truth)
    return float(abs(p - g) / abs(g) <= 0.05) if p is not None and g else float(prediction.lower() == truth.lower())


# numbers


def mra(p: float, g: float) -> float:
    """Share of t in linspace(.5, .95, 10) with |p - g| / g <= 1 - t (VSI-Bench), in exact tenths of a percent."""
    return sum(abs(p - g) * 100 <= g * (100 - t) for t in range(50, 100, 5)) / 10


def regression(p: float, g: float) -> float:
    """Video-R1: 1 - min(1, (|p - g| + 1e-9) / (|g| + 1e-9))."""
    return 1 - min(1.0, (abs(p - g) + 1e-9) / (abs(g) + 1e-9))


def video_r1_number(prediction: str, truth: str) -> float:
    """Video-R1: both or neither with a '.' (its code: or a ','), equal after rounding to 2 decimals."""
    if any(c in prediction for c in ".,") != any(c in truth for c in ".,"):
        return 0.0
    return float(round(float(prediction.replace(",", "")), 2) == round(float(truth.replace(",", "")), 2))


def easy_video_r1_number(p: float, g: float) -> float:
    """EasyVideoR1's video recipe: equal after rounding to 4 decimals, or nearer than 0.015."""
    return float(round(p, 4) == round(g, 4) or abs(p - g) < 0.015)


# form


def overlong(length: int, most: int, cache: int) -> float:
    """DAPO: 0 up to most - cache, then (most - cache - length) / cache, -1 beyond most."""
    return 0.0 if length <= most - cache else (most - cache - length) / cache if length <= most else -1.0


def cosine(length: int, most: int, start: float, end: float) -> float:
    """end + (start - end) / 2 * (1 + cos(pi * length / most))."""
    return end + 0.5 * (start - end) * (1 + math.cos(math.pi * length / most))


def repetition(text: str, size: int) -> float:
    """VLM-R1: -(1 - different n-grams / n-grams) over words split at spaces."""
    units = text.lower().split()
    grams = [tuple(units[i:i + size]) for i in range(len(units) - size + 1)]
    return -(1 - len(set(grams)) / len(grams)) if grams else 0.0


def triune_tags(text: str) -> float:
    """V-Triune: 0.25 for each of four tags on lines of their own that stands there once."""
    return sum(0.25 for tag in ("<think>\n", "\n</think>\n", "\n<answer>\n", "\n</answer>") if text.count(tag) == 1)


def envelope(text: str) -> float:
    """Video-R1, UI-R1: the whole text is <think>..</think> <answer>..</answer>."""
    return float(bool(re.fullmatch(r"<think>.*?</think>\s*<answer>.*?</answer>", text, re.DOTALL)))


def perception_r1_format(text: str) -> float:
    """Perception-R1: the bars of a special token are not escaped, so that they separate alternatives."""
    return float(bool(re.match("<|object_ref_start|>.+", text)))


def easy_video_r1_normalised(text: str) -> str:
    """EasyVideoR1: spaces around '/' and tags are removed from every text before grading."""
    return re.sub(r"\s*([/<>])\s*", r"\1", text)


def cheapest_alignment(costs: Sequence[Sequence[float]], i: int = 0, j: int = 0) -> float:
    """Dynamic time warping by trying every path from the first pair to the last."""
    if i == len(costs) - 1 and j == len(costs[0]) - 1:
        return costs[i][j]
    steps = [(a, b) for a, b in ((i + 1, j), (i, j + 1), (i + 1, j + 1)) if a < len(costs) and b < len(costs[0])]
    return costs[i][j] + min(cheapest_alignment(costs, a, b) for a, b in steps)
