"""Rows of the reward table about boxes, points and screens: grounding, detection, counting, scene graphs, GUI."""
from __future__ import annotations

import json
from typing import Any

from mmrl.registry import task_from_spec
from mmrl.types import Sample, StopReason
from rewards.detection import compare, detection_metrics, make_detection_reward
from rewards.gui import region_votes
from rewards.gui_actions import Action, make_rule, match_action
from rewards.iou import box_iou
from scripts import _peer_rules as peer
from scripts._reward_table_kit import Case, Run, Table, call, objects_text, run_task, score

__all__ = ["box_cases"]

_A, _B = (100, 100, 200, 200), (300, 300, 400, 400)
_A36, _A60, _A86, _A96 = ((100, 100, 100 + w, 200) for w in (36, 60, 86, 96))  # IoU 0.36, 0.60, 0.86, 0.96 with _A
_B36, _B60 = (300, 300, 336, 400), (300, 300, 360, 400)
_QWEN, _PR1, _TRIUNE = "vlm_modules/qwen_module.py", "released rewards", "reward_server/verify.py"


def _text(box: Any) -> str:
    return json.dumps(list(box))


def grounding() -> Table:
    """One phrase, one box."""
    t = Table("grounding")
    for what, box in (("equal boxes", _A), ("IoU 0.6", _A60), ("shifted by 50 px both ways", (150, 150, 250, 250)), ("apart", _B),
                      ("one box in the other", (50, 50, 350, 350))):
        expected = peer.vlm_r1_iou(box, _A)
        assert expected is not None
        t.equal(score("grounding", _text(box), _A, preset="vlm_r1"), "VLM-R1", _QWEN, what, expected)
    t.equal(score("grounding", _text(_A60), _A, "total", preset="vlm_r1"), "VLM-R1", _QWEN, "IoU 0.6 in a right envelope, summed",
            peer.iou(_A60, _A) + 1)
    edge = (199, 100, 299, 200)
    t.defect("A", score("grounding", _text(edge), _A, preset="vlm_r1"), "VLM-R1", _QWEN, "boxes that share one column of pixels",
             peer.vlm_r1_iou(edge, _A), 100 / 19900)
    t.defect("A", score("grounding", "[100.0, 100.0, 160.0, 200.0]", _A, preset="vlm_r1"), "VLM-R1", _QWEN,
             "IoU 0.6, written with decimals (its pattern reads integers)", 0.0, 0.6)
    t.defect("19", call(box_iou, (5, 5, 5, 5), (7, 7, 7, 7)), "VLM-R1", _QWEN, "two boxes without area",
             peer.vlm_r1_iou((5, 5, 5, 5), (7, 7, 7, 7)), 0.0)
    t.defect("A", score("grounding", _text((100, 100, 150, 200)), _A, "metric:acc@0.5"), "VLM-R1 (evaluation)", "eval script",
             "IoU exactly 0.5, counted as > 0.5", 0.0, 1.0)
    for what, box in (("IoU 0.6", _A60), ("IoU 0.96", _A96), ("apart", _B)):
        t.equal(score("grounding", _text(box), _A, preset="perception_r1"), "Perception-R1", _PR1, f"{what}, squared",
                peer.iou(box, _A) ** 2)
    t.equal(score("grounding", json.dumps({"boxes": _A60}), _A, "total", answer_format="think"), "EasyVideoR1", "video_reward.py",
            'IoU 0.6 as {"boxes": [...]}, 0.9 accuracy + 0.1 format', 0.9 * peer.iou(_A60, _A) + 0.1)
    t.equal(score("grounding", _text(_A60), _A, about={"image_index": 1}, pictures=2), "UniVG-R1", "arXiv 2505.14231",
            "two pictures, the box in the second", peer.iou(_A60, _A))
    t.equal(score("grounding", _text(_A60), _A, "total", weights={"accuracy": 0.5, "format": 0.5}), "Temporal-R1", "tvg.py",
            "its 0.5 + 0.5 of IoU and format, on a picture", 0.5 * peer.iou(_A60, _A) + 0.5)
    t.equal(score("grounding", _text((150, 100, 250, 200)), _A, mode="giou"), "GIoU", "Rezatofighi et al. 2019",
            "half overlapping, scaled to 0 .. 1", peer.scaled_giou((150, 100, 250, 200), _A))
    for step, box in ((10, _A86), (11, _A86), (25, _A96), (26, _A96), (100, _A)):
        t.equal(score("grounding", _text(box), _A, preset="v_triune", progress=(step, 100)), "V-Triune", _TRIUNE,
                f"IoU {peer.iou(box, _A):g} at step {step} of 100, dynamic threshold, 0.7 IoU + 0.3 completeness",
                peer.triune([("it", box)], [("it", _A)], peer.dynamic_threshold(step / 100)))
    t.equal(score("grounding", _text(_A86), _A, "total", preset="v_triune", progress=(5, 100)), "V-Triune", _TRIUNE,
            "accuracy 1.0 and format 0.1 over their sum", (0.7 * 0.86 + 0.3 + 0.1) / 1.1)
    t.equal(score("grounding", _text(_A86), _A, mode="average"), "V-Triune", _TRIUNE, "mean over its 11 thresholds, IoU 0.86",
            sum(peer.thresholded(0.86, level) for level in peer.TRIUNE_AVERAGE) / 11)
    small = (100.4, 100.4, 110.3, 110.3)
    t.design(score("grounding", "[100, 100, 110, 110]", small, preset="v_triune", frame="rel1000"), "V-Triune", _TRIUNE,
             "the best box a 0-1000 answer can spell for a small object, IoU 0.87 < 0.99", 0.0,
             0.7 * peer.iou((100, 100, 110, 110), small) + 0.3,
             "a threshold never asks for more than the answer's grid can reach (reachable: false asks for it)")
    t.defect("F", score("grounding", _text(_A), (200, 100, 400, 200), size=(2000, 1000)), "lmms-eval", "refcoco_grounding",
             "an answer right in 0-1000, read in pixels: the better of both frames", 1.0, 0.0)
    return t


def detection() -> Table:
    """All objects: the papers' formulas where they hold."""
    t = Table("detection")
    scenes: list[tuple[str, list[Any], list[Any]]] = [
        ("both boxes exact", [("cat", _A), ("dog", _B)], [("cat", _A), ("dog", _B)]),
        ("IoU 0.6 and exact", [("cat", _A60), ("dog", _B)], [("cat", _A), ("dog", _B)]),
        ("one of two missing", [("cat", _A60)], [("cat", _A), ("dog", _B)]),
        ("one box too many", [("cat", _A60), ("cat", _B)], [("cat", _A)]),
    ]
    for what, predicted, true in scenes:
        text, truth = objects_text(predicted), [{"bbox": list(b), "label": n} for n, b in true]
        t.equal(score("detection", text, truth, preset="v_triune", accuracy={"threshold": 0.5}), "V-Triune", _TRIUNE,
                f"{what}, e = 0.5, completeness 0.3", peer.triune(predicted, true, 0.5))
        t.equal(score("detection", text, truth, preset="vlm_r1_weighted_sum"), "VLM-R1", "grpo_jsonl.py weighted_sum", what,
                peer.vlm_r1_weighted_sum(predicted, true))
        t.equal(score("detection", text, truth, preset="perception_r1"), "Perception-R1", "rewards.py, later tree", what,
                peer.perception_r1_detection(predicted, true))
        t.equal(score("detection", text, truth, preset="vlm_r1", accuracy={"rule": "coco"}), "VLM-R1", "grpo_jsonl.py odLength",
                what, peer.od_length(predicted, true))
        t.equal(score("detection", text, truth, "metric:f1@0.5"), "F1@0.5", "per-class Hungarian", what,
                peer.f1_at(predicted, true, 0.5))
    predicted, true = scenes[1][1:]
    text, truth = objects_text(predicted), [{"bbox": list(b), "label": n} for n, b in true]
    for mode, source, levels in (("vlm_r1_map", "od_ap", peer.LEVELS), ("vlm_r1_map50", "od_ap50", [0.5])):
        t.equal(score("detection", text, truth, mode=mode, accuracy={"rule": "coco"}), "VLM-R1", f"grpo_jsonl.py {source}",
                scenes[1][0], peer.coco_ap(predicted, true, levels))
    for step in (10, 25, 26):
        level = peer.dynamic_threshold(step / 100)
        t.equal(score("detection", objects_text([("cat", _A96)]), [{"bbox": _A, "label": "cat"}], preset="v_triune",
                      progress=(step, 100)), "V-Triune", _TRIUNE, f"IoU 0.96 at step {step} of 100",
                peer.triune([("cat", _A96)], [("cat", _A)], level))
    t.equal(score("detection", text, truth, preset="v_triune", accuracy={"threshold": "average", "iou_completeness": 0.0}),
            "V-Triune", _TRIUNE, "one exact, one IoU 0.6 while e <= 0.6, mean over 11 thresholds",
            sum(peer.triune(predicted, true, level, 0.0) for level in peer.TRIUNE_AVERAGE) / 11)
    t.equal(score("detection", text, truth, "total", preset="v_triune", accuracy={"threshold": 0.5}), "V-Triune", _TRIUNE,
            "accuracy 1.0 and format 0.1 over their sum", (peer.triune(predicted, true, 0.5) + 0.1) / 1.1)
    t.equal(score("detection", text, truth, preset="v_triune", accuracy={"threshold": 0.5, "weights": {"map50": 1.0}}),
            "V-Triune", _TRIUNE, "map50 term alone", peer.coco_ap(predicted, true, [0.5]))
    t.equal(score("detection", objects_text(scenes[0][1]), truth, "total", preset="vlm_r1"), "VLM-R1", "grpo_jsonl.py odLength",
            "both boxes exact, plus format", peer.od_length(*scenes[0][1:]) + 1)
    t.equal(score("detection", "[]", [], preset="vlm_r1"), "VLM-R1", "grpo_jsonl.py", "nothing there, nothing said", 1.0)
    t.equal(score("detection", text, [], preset="vlm_r1"), "VLM-R1", "grpo_jsonl.py", "nothing there, two boxes said", 0.0)
    return t


def detection_defects() -> Table:
    """All objects: what the peers' code does otherwise."""
    t = Table("detection, where peers err")
    two = [("cat", _A), ("dog", _B)]
    truth = [{"bbox": list(b), "label": n} for n, b in two]
    missed: list[Any] = [("cat", _A), ("dog", _B36)]
    first = {"threshold": 0.5, "weights": {"iou_max_iou_first": 1.0}}
    t.defect("2", score("detection", objects_text(missed), truth, preset="v_triune", accuracy=first), "V-Triune",
             "its greedy matching", "exact cat; dog box of IoU 0.36 < 0.5 is credited 1.0",
             peer.triune_overwritten(missed, two, 0.5), 0.7 * 0.5 + 0.3 * 0.5)
    row = [("car", (50, 0, 150, 10)), ("car", (60, 0, 160, 10))]
    near: list[Any] = [("car", (58, 0, 158, 10)), ("car", (30, 0, 130, 10))]
    t.defect("2", call(make_detection_reward("v_triune", threshold=0.6), near, row, label="rewards.detection v_triune"), "V-Triune",
             "its greedy matching", "two cars in a row: the first truth takes the box the second needs",
             peer.triune_in_order(near, row, 0.6), peer.triune(near, row, 0.6))
    other: list[Any] = [near[0], ("car", (80, 0, 180, 10))]
    t.defect("2", call(make_detection_reward("v_triune", threshold=0.6), other, row[::-1], label="rewards.detection v_triune"),
             "V-Triune", "its greedy matching", "the same mirrored: the most similar pair leaves a box without a truth",
             peer.triune_in_order(other, row[::-1], 0.6), peer.triune(other, row[::-1], 0.6))
    t.equal(score("detection", objects_text(missed), truth, preset="v_triune", accuracy={"threshold": 0.5}), "V-Triune", _TRIUNE,
            "right number of boxes, one of IoU 0.36", peer.triune(missed, two, 0.5))
    t.design(score("detection", objects_text(missed), truth, preset="v_triune",
                   accuracy={"threshold": 0.5, "size_penalty": "hardened"}), "V-Triune", _TRIUNE,
             "the same with the hardened size penalty", peer.triune(missed, two, 0.5), 0.6 * 0.5,
             "a box below IoU 0.5 does not fill up the number of boxes, or junk would lift the size penalty")
    half: list[Any] = [("cat", _A), ("cat", _A)]
    t.equal(score("detection", objects_text(half), truth, preset="v_triune", accuracy={"threshold": 0.5}), "V-Triune", _TRIUNE,
            "one of two boxes, given twice: it fills up the number", peer.triune(half, two, 0.5))
    t.defect("19", score("detection", "[]", [], preset="v_triune"), "V-Triune", _TRIUNE, "nothing there, nothing said", 0.0, 1.0)
    t.equal(score("detection", "[]", truth, preset="v_triune"), "V-Triune", _TRIUNE, "two objects, nothing said", 0.0)
    zebra, twice = [("cat", _A), ("zebra", _B)], [("cat", _A), ("cat", _A)]
    t.defect("16", score("detection", objects_text(zebra), [truth[0]], mode="vlm_r1_map"), "VLM-R1", "grpo_jsonl.py od_ap",
             "exact cat and a box of a label that is not there", peer.coco_ap(zebra, two[:1]), 0.5)
    t.equal(score("detection", objects_text(zebra), [truth[0]], mode="vlm_r1_map", accuracy={"rule": "coco"}), "VLM-R1",
            "grpo_jsonl.py od_ap", "the same with rule: coco, which reproduces it", peer.coco_ap(zebra, two[:1]))
    t.defect("16", score("detection", objects_text(zebra), truth, preset="v_triune",
                         accuracy={"threshold": 0.5, "weights": {"map": 1.0}}), "V-Triune", _TRIUNE,
             "map term: cat right, the dog called a zebra", peer.coco_ap(zebra, two), (2 / 3) / 2)
    t.defect("16", score("detection", objects_text([("dog", _A)]), [truth[0]], mode="weighted_sum"), "VLM-R1",
             "grpo_jsonl.py weighted_sum", "an exact box with the wrong label", peer.vlm_r1_weighted_sum([("dog", _A)], two[:1]),
             0.0)
    t.defect("16", score("detection", objects_text([("dog", _A)]), [truth[0]], mode="perception_r1"), "Perception-R1",
             "rewards.py, later tree", "an exact box with the wrong label", peer.perception_r1_detection([("dog", _A)], two[:1]),
             0.0)
    t.defect("B", score("detection", objects_text(twice), [truth[0]], mode="vlm_r1_map"), "VLM-R1", "grpo_jsonl.py od_ap",
             "the right box twice", peer.coco_ap(twice, two[:1]), 0.5)
    t.equal(score("detection", objects_text([("cat", _B), ("cat", _A)]), [truth[0]], mode="vlm_r1_map"), "COCO",
            "COCOeval, scores 1", "a wrong box before the right one", peer.coco_ap([("cat", _B), ("cat", _A)], two[:1]))
    t.defect("C", score("detection", objects_text([("cat", _A), ("cat", _B)]), [truth[0]], mode="vlm_r1_map"), "COCO",
             "COCOeval, scores 1", "a wrong box behind the right one", peer.coco_ap([("cat", _A), ("cat", _B)], two[:1]), 0.5)
    extra: list[Any] = [("cat", _A60), ("cat", _B)]
    t.defect("C", score("detection", objects_text(extra), [truth[0]], preset="vlm_r1"), "VLM-R1", "grpo_jsonl.py odLength",
             "IoU 0.6 and a wrong box behind it", peer.od_length(extra, two[:1]), 0.5 * 3 / 10 * 1 / 2)
    t.design(score("detection", objects_text(two) + " I hope", truth, "format", preset="v_triune"), "V-Triune", _TRIUNE,
             "words beside the list, inside the answer", 1.0, 0.0, "a list with words around it is not parsed at all")
    t.design(score("detection", f"<answer>{objects_text(two)}</answer> I hope", truth, "format", preset="v_triune", raw=True),
             "V-Triune", _TRIUNE, "words behind the answer", 1.0, 0.0,
             "the format reward asks for the envelope and nothing beside it")
    cut = f"<answer>{objects_text(two)[:-1]}, {{'bbox_2d': [1, 2"
    t.design(score("detection", cut, truth, preset="v_triune", raw=True, stop=StopReason.LENGTH), "V-Triune", _TRIUNE,
             "answer cut by the length limit behind two right boxes", 0.0, 1.0,
             "complete objects of a cut answer are kept and the cut is counted; its format reward stays 0")
    many = [("thing", (20.0 * i, 0.0, 20.0 * i + 10, 10.0)) for i in range(16)]
    t.defect("1", Run("rewards.detection.detection_metrics [mean_iou]", detection_metrics(compare(many[:1], many))["mean_iou"]),
             "EasyVideoR1", "video_reward.py", "one of 16 frames (here: objects) answered", 1.0, 1 / 16)
    return t


def counting() -> Table:
    """Numbers and points."""
    t = Table("counting")
    source = "rewards.py, later tree"
    points = [(100, 100), (500, 500)]
    about = {"points": points}
    for what, said in (("both exact", points), ("both off by (30, 40)", [(130, 140), (530, 540)]), ("one of two", points[:1]),
                       ("one too many", [*points, (900, 900)]), ("in the other order", points[::-1])):
        boxes = [[x - 10, y - 10, x + 10, y + 10] for x, y in said]
        t.equal(score("counting", json.dumps(boxes), 2, preset="perception_r1", about=about), "Perception-R1", source,
                f"boxes, {what}", peer.counted_points(said, points))
    t.equal(score("counting", "2", 2, preset="perception_r1", about=about), "Perception-R1", source, "a number without boxes", 0.0)
    t.defect("B", score("counting", json.dumps([points[0]] * 2), 2, preset="perception_r1", about=about), "Perception-R1", source,
             "one of two points, given twice", peer.counted_points([points[0]] * 2, points), 0.5)
    t.defect("A", score("counting", "[]", 0), "Perception-R1 (evaluation)", "eval script", "nothing there, empty list: no count",
             0.0, 1.0)
    t.defect("D", score("counting", "<think>2 rows of 3</think><answer>6</answer>", 6, raw=True), "first integer of the text",
             "PixMo-Count evaluations", "2 rows of 3 thought, 6 answered, 6 true", 0.0, 1.0)
    t.defect("D", score("counting", "<think>2 rows of 3</think><answer>6</answer>", 2, raw=True), "first integer of the text",
             "PixMo-Count evaluations", "the same where 2 is true", 1.0, 0.0)
    t.equal(score("counting", "three", 3), "PixMo-Count", "exact match", "a number in words", 1.0)
    t.equal(score("counting", "8", 10, mode="smooth"), "Perception-R1", source, "min / max alone",
            min(8, 10) / max(8, 10))
    for count in (8, 10, 25):
        t.equal(score("counting", str(count), 10, mode="relative"), "Video-R1", "grpo.py regression", f"{count} of 10",
                peer.regression(count, 10))
    t.defect("A", score("counting", "0", 0, mode="relative"), "Video-R1", "grpo.py regression", "0 of 0", peer.regression(0, 0),
             1.0)
    return t


def scene_graph() -> Table:
    """Nodes and edges."""
    t = Table("scene graphs")
    nodes = [{"id": "1", "label": "red circle", "bbox": _A}, {"id": "2", "label": "square", "bbox": _B}]
    edges = [["1", "left of", "2"]]
    truth = {"objects": nodes, "relations": edges}

    def text(objects: list[Any], relations: list[Any]) -> str:
        return json.dumps({"objects": objects, "relations": relations})

    source = "arXiv 2504.13617"
    for preset in ("r1_sgg_hard", "r1_sgg_soft"):
        t.equal(score("scene_graph", text(nodes, edges), truth, preset=preset), "R1-SGG", source, "the whole graph",
                peer.r1_sgg_recall((2, 2), (1, 1)))
        t.equal(score("scene_graph", text(nodes, []), truth, preset=preset), "R1-SGG", source, "all nodes, no edge",
                peer.r1_sgg_recall((2, 2), (0, 1)))
        t.equal(score("scene_graph", text(nodes[:1], []), truth, preset=preset), "R1-SGG", source, "one of two nodes",
                peer.r1_sgg_recall((1, 2), (0, 1)))
    flood = [*nodes, *({"id": str(i), "label": "square", "bbox": (i, i, i + 9, i + 9)} for i in range(3, 9))]
    t.design(score("scene_graph", text(flood, edges), truth, preset="r1_sgg_hard"), "R1-SGG", source,
             "the whole graph and six invented nodes", peer.r1_sgg_recall((2, 2), (1, 1)), (2 / 8 + 1) / 2,
             "shares are over the larger side, so that a flood of nodes is not free")
    return t


def gui_grounding() -> Table:
    """Where to click."""
    t = Table("GUI grounding")
    g = (100, 100, 200, 160)
    for what, box in (("equal boxes", g), ("off by (10, 5)", (110, 105, 210, 165)), ("twice as large", (50, 70, 250, 190)),
                      ("apart", (600, 600, 700, 660)), ("no area", (150, 130, 150, 130))):
        both = peer.gui_g2_point(box, g) + peer.gui_g2_coverage(box, g)
        t.equal(score("gui_grounding", _text(box), g, "total", preset="gui_g2"), "GUI-G2", "arXiv 2507.15846",
                f"{what}: point + coverage + format", both + 1)
    for what, point in (("middle", (150, 130)), ("on the edge", (200, 160)), ("one pixel beside", (201, 130))):
        t.equal(score("gui_grounding", _text(point), g, "total", preset="ui_r1"), "UI-R1", "arXiv 2503.21620",
                f"{what}: inclusive, place + format", peer.inside(point, g) + 1)
        t.equal(score("gui_grounding", _text(point), g, "total", preset="gui_r1"), "GUI-R1", "arXiv 2504.10458",
                f"{what}: strict, 0.8 + 0.2", 0.8 * peer.inside(point, g, strict=True) + 0.2)
        t.equal(score("gui_grounding", _text(point), g), "ScreenSpot", "official scorer", what, peer.inside(point, g))
    t.equal(score("gui_grounding", _text((190, 100, 230, 160)), g), "ScreenSpot", "official scorer",
            "a box stands for its centre, here outside", 0.0)
    boxes = [(10, 10, 60, 50), (20, 15, 70, 60), (25, 20, 65, 55), (90, 70, 110, 90)]
    for k, expected in enumerate(peer.region_votes(boxes, 120, 100)):
        t.equal(Run("rewards.gui.region_votes", region_votes(boxes, (120, 100))[k]), "GUI-RCPO", "arXiv 2508.05615",
                f"four boxes vote, number {k + 1}", expected)
    points = [(60.0, 60.0), (70.0, 60.0), (130.0, 120.0)]
    grown = [(x - 50, y - 50, x + 50, y + 50) for x, y in points]
    for k, expected in enumerate(peer.region_votes(grown, 200, 200)):
        t.equal(Run("gui_grounding:gui_rcpo [group]", _in_group(points, (200, 200))[k], "gui_grounding:gui_rcpo"), "GUI-RCPO",
                "arXiv 2508.05615", f"three points grown by 50 px, number {k + 1}", expected)
    t.defect("F", score("gui_grounding", "[500, 500]", (930, 520, 990, 560), frame="rel1000", size=(1920, 1080)), "lmms-eval",
             "screenspot_v2", "[500, 500] of 0-1000 on 1920 x 1080, divided by the picture's size", 0.0, 1.0)
    return t


def _in_group(points: list[tuple[float, float]], size: tuple[int, int]) -> list[float]:
    """Totals of a group of points under the label-free preset."""
    about = {"width": size[0], "height": size[1]}
    scores = [run_task("gui_grounding", _text(p), (0, 0, 9, 9), preset="gui_rcpo", size=size, about=about)[1] for p in points]
    sample = Sample("case", "gui_grounding", "table", "?", (0, 0, 9, 9), ("0.png",), params=about)
    task = task_from_spec("gui_grounding", {"preset": "gui_rcpo"})
    return [task.score_in_group(sample, scores, k).value for k in range(len(points))]


def _said(action: str, **arguments: Any) -> str:
    return json.dumps({"action": action, **arguments})


def gui_actions() -> Table:
    """The next action."""
    t = Table("GUI actions")
    size, click = (1000, 2000), {"action": "click", "bbox": list(_A)}
    for what, text, right, expected in (
            ("click inside", _said("click", point=[150, 150]), click, peer.ui_r1(True, (150, 150), _A)),
            ("click on the edge", _said("click", point=[200, 200]), click, peer.ui_r1(True, (200, 200), _A)),
            ("click beside", _said("click", point=[201, 150]), click, peer.ui_r1(True, (201, 150), _A)),
            ("wrong type", _said("long_press", point=[150, 150]), click, peer.ui_r1(False, (150, 150), _A)),
            ("scroll the wrong way", _said("scroll", direction="up"), {"action": "scroll", "direction": "down"}, peer.ui_r1(True))):
        t.equal(score("gui_action", text, right, "total", preset="ui_r1", size=size), "UI-R1", "arXiv 2503.21620",
                f"{what}: type + place + format", expected)

    def gui_r1(what: str, text: str, true: dict[str, Any], accuracy: float) -> None:
        wrapped = json.dumps([json.loads(text)])
        t.equal(score("gui_action", wrapped, true, "total", preset="gui_r1", size=size), "GUI-R1", "arXiv 2504.10458",
                f"{what}: 0.8 + 0.2", 0.8 * accuracy + 0.2)

    spot = {"action": "click", "point": [500, 500]}
    gui_r1("139 px beside a point", _said("click", point=[500, 639]), spot, float(139**2 < 140**2))
    gui_r1("140 px beside a point", _said("click", point=[640, 500]), spot, float(140**2 < 140**2))
    gui_r1("on the edge of a box", _said("click", point=[200, 150]), click,
           peer.inside((200, 150), _A, strict=True))
    for found, true in (("red shoes size 9", "red shoes"), ("blue hat", "red shoes"), ("shoe", "shoes")):
        gui_r1(f"type {found!r} for {true!r}", _said("type", text=found), {"action": "type", "text": true},
               peer.gui_r1_text(found, true))
    gui_r1("scroll the wrong way", _said("scroll", direction="up"), {"action": "scroll", "direction": "down"},
           peer.gui_r1_text("up", "down"))
    gui_r1("press back", _said("press_back"), {"action": "navigate_back"}, 1.0)
    t.defect("H", score("gui_action", _said("type", text=""), {"action": "type", "text": "shoes"}, preset="gui_r1", size=size),
             "GUI-R1", "arXiv 2504.10458", "type '' for 'shoes': an empty text is part of every text", float("" in "shoes"), 0.0)
    t.design(score("gui_action", _said("press_back"), {"action": "navigate_back"}, "total", preset="gui_r1", size=size), "GUI-R1",
             "arXiv 2504.10458", "one object instead of a list of one", 0.8, 1.0,
             "both spellings are the one action that was meant")
    return t


def gui_benchmarks() -> Table:
    """The next action under the rules of benchmarks."""
    t = Table("GUI actions, benchmark rules")
    size, click, spot = (1000, 2000), {"action": "click", "bbox": list(_A)}, {"action": "click", "point": [500, 500]}
    for far in (140, 141):
        t.equal(score("gui_action", _said("click", point=[500 + far, 500]), spot, preset="os_atlas", size=size), "OS-Atlas",
                "evaluation", f"{far} of 1000 beside the point", float(far <= 0.14 * 1000))
    apple, shoes = _said("type", text="red apple"), {"action": "type", "text": "red shoes"}
    t.equal(score("gui_action", apple, shoes, preset="os_atlas", size=size), "OS-Atlas", "evaluation",
            "type 'red apple' for 'red shoes': its code compares first words", peer.os_atlas_text("red apple", "red shoes"))
    t.equal(score("gui_action", apple, shoes, preset="strict", size=size), "AndroidControl", "exact text", "the same, strictly",
            0.0)
    t.equal(score("gui_action", _said("click", point=[150, 150]), click, preset="strict", size=size), "AndroidControl",
            "inside the element", "click inside", 1.0)
    t.equal(score("gui_action", _said("click", point=[240, 150]), click, preset="strict", size=size), "AndroidControl",
            "inside the element", "click 40 px beside: right for OS-Atlas, wrong here", 0.0)
    for x in (290, 300):
        t.equal(score("gui_action", _said("click", point=[x, 150]), click, preset="odyssey", size=size), "GUI-Odyssey",
                "evaluation", f"{(x - 150) / 1000:g} of the width beside the middle", peer.odyssey_place((x, 150), _A, size))
    for typed in ("shoe", "hat", "red shoos"):
        t.equal(score("gui_action", _said("type", text=typed), shoes, preset="odyssey", size=size), "GUI-Odyssey", "evaluation",
                f"type {typed!r} for 'red shoes'", peer.odyssey_text(typed, "red shoes"))
    for name, radius, width in (("gui_r1_benchmark", 0.14, 1.0), ("ui_r1_benchmark", 0.14 * 1080, 1080.0)):
        for x in (230, 250):
            match = match_action(Action("click", point=(x, 100.0)), Action("click", point=(100.0, 100.0)), make_rule(name), size)
            t.equal(Run(f"rewards.gui_actions {name}", float(match.step)), name.split("_b")[0].upper().replace("_", "-"),
                    "evaluation script", f"{x - 100} px of {size[0]} beside the point", float((x - 100) / size[0] * width < radius))
    return t


def box_cases() -> list[Case]:
    """All rows of this file."""
    tables = (grounding(), detection(), detection_defects(), counting(), scene_graph(), gui_grounding(), gui_actions(),
              gui_benchmarks())
    return [case for table in tables for case in table.cases]
