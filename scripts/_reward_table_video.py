"""Rows of the reward table about videos: temporal grounding, grounded questions, tracks, spatio-temporal grounding."""
from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

from rewards.temporal import span_iou, union_iou
from scripts import _peer_rules_video as peer
from scripts._reward_table_kit import Case, Run, Table, call, score
from tasks.metrics.nextgqa import evaluate, iou_iop

__all__ = ["video_cases"]

_EASY, _CHAT, _ONE = "video_reward.py", "grpo_tasks.py", "onethinker_reward.py"
_ABOUT = {"duration": 30.0, "width": 1000, "height": 1000}
_A, _A60, _A80, _B = (100, 100, 200, 200), (100, 100, 160, 200), (100, 100, 180, 200), (300, 300, 400, 400)
_TRUE = (10.0, 20.0)
_when = functools.partial(score, "temporal_grounding", about=_ABOUT)
_track = functools.partial(score, "tracking", about=_ABOUT)
_where = functools.partial(score, "st_grounding", about=_ABOUT)


def _time(span: Sequence[float]) -> str:
    return json.dumps({"time": list(span)})


def _ends(span: Sequence[float]) -> str:
    return json.dumps({"start_time": str(span[0]), "end_time": str(span[1])})


def _boxes(boxes: Mapping[str, Any], **more: Any) -> str:
    return json.dumps({**more, "boxes": {key: list(box) for key, box in boxes.items()}})


def temporal() -> Table:
    """When does it happen?"""
    t = Table("temporal grounding")
    for what, span in (("exact", _TRUE), ("half inside", (15.0, 25.0)), ("twice as long", (5.0, 25.0)), ("apart", (21.0, 25.0))):
        found = peer.hull_iou(span, _TRUE)
        assert found is not None
        t.equal(_when(_time(span), [_TRUE], "total", preset="easyvideo_r1"), "EasyVideoR1", _EASY,
                f"{what}: 0.9 tIoU + 0.1", 0.9 * found + 0.1)
        t.equal(_when(_ends(span), [_TRUE], "total", preset="temporal_r1"), "Temporal-R1",
                "tvg.py", f"{what}, as shares of 30 s: 0.5 tIoU + 0.5 format", peer.temporal_r1(span, _TRUE, 30.0))
        t.equal(_when(f"{span[0]} to {span[1]}", [_TRUE], "total", preset="videochat_r1"),
                "VideoChat-R1", _CHAT, f"{what}: tIoU + format", found + 1.0)
        t.equal(_when(_time(span), [_TRUE], "total", preset="onethinker"), "OneThinker", _ONE,
                f"{what}: 0.9 tIoU + 0.1 + 0.5 for a valid object", 0.9 * found + 0.6)
    many, true = [(1.0, 4.0), (3.0, 6.0), (9.0, 10.0)], [(2.0, 5.0), (8.0, 12.0)]
    t.equal(_when(json.dumps(many), true), "VideoChat-R1", f"{_CHAT} glue",
            "overlapping spans, merged unions", peer.glue_iou(many, true))
    t.equal(_when(json.dumps([true[0], true[0]]), true), "VideoChat-R1", f"{_CHAT} glue",
            "one of two spans, given twice", peer.glue_iou([true[0]], true))
    t.defect("19", call(union_iou, [(3.0, 3.0)], [(7.0, 7.0)]), "VideoChat-R1", f"{_CHAT} glue", "two spans without length",
             peer.glue_iou([(3, 3)], [(7, 7)]), 0.0)
    t.defect("19", call(span_iou, (7.0, 7.0), (7.0, 7.0)), "Temporal-R1", "tvg.py", "a span without length (0 / 0, caught)",
             peer.hull_iou((7, 7), (7, 7)), 0.0)
    t.design(_when(_time((20, 10)), [_TRUE], preset="easyvideo_r1"), "EasyVideoR1", _EASY,
             "the right times in the wrong order", peer.hull_iou((20, 10), _TRUE) or 0.0, 1.0, "pairs are sorted")
    t.defect("D", _when("It runs from 1 to 2 or rather 10 to 20", [_TRUE], preset="videochat_r1"),
             "VideoChat-R1", _CHAT, "the last 'x to y' of a sentence counts", 1.0, 0.0)
    t.design(_when('{"start_time": 10, "end_time": 20}', [_TRUE], "format", preset="temporal_r1"),
             "Temporal-R1", "tvg.py", "numbers that are not written as strings", 0.0, 1.0, "both spellings are the times asked for")
    t.design(_when('["00:10.00", "00:20.00"]', [_TRUE], preset="easyvideo_r1"), "EasyVideoR1",
             _EASY, "clock readings, as Qwen3-VL writes them", 0.0, 1.0, "mm:ss.ff is a time in seconds")
    t.design(_when(_time((10, 90)), [(10.0, 30.0)], preset="easyvideo_r1"), "EasyVideoR1", _EASY,
             "an end beyond the video of 30 s", peer.hull_iou((10, 90), (10, 30)) or 0.0, 1.0, "times are clipped to the duration")
    return t


def grounded() -> Table:
    """A choice and when it is seen."""
    t = Table("grounded video questions")
    about, truth = {**_ABOUT, "options": ["dog", "cat", "cow"]}, {"choice": "B", "spans": [(2.0, 5.0), (8.0, 12.0)]}
    said = [(1.0, 4.0), (9.0, 10.0)]
    for letter in "BC":
        t.equal(score("grounded_qa", json.dumps({"answer": letter, "time": said}), truth, "total", preset="videochat_r1",
                      about=about), "VideoChat-R1", f"{_CHAT} gqa", f"option {letter}: choice + glue IoU + format",
                float(letter == "B") + peer.glue_iou(said, truth["spans"]) + 1.0)
    for what, span in (("overlapping", (4.0, 9.0)), ("inside", (9.0, 10.0)), ("apart", (20.0, 25.0))):
        found = peer.next_gqa(span, truth["spans"])
        assert found is not None
        text = json.dumps({"answer": "B", "time": span})
        for name, value in zip(("iou", "iop"), found, strict=True):
            t.equal(score("grounded_qa", text, truth, f"metric:{name}", about=about), "NExT-GQA", "eval_ground.py",
                    f"{what}, the best of two true spans", value)
    point = peer.next_gqa((3, 3), truth["spans"])
    assert point is not None
    t.equal(Run("tasks.metrics.nextgqa.iou_iop point_hits [iop]", iou_iop((2, 5), (3, 3), point_hits=True)[1]), "NExT-GQA",
            "eval_ground.py", "a span without length inside the truth, its own rule", point[1])
    t.design(score("grounded_qa", '{"answer": "B", "time": [3, 3]}', truth, "metric:iop", about=about), "NExT-GQA",
             "eval_ground.py", "a span without length inside the truth", point[1], 0.0, "naming a moment is no grounding")
    facts = {"v": {"location": {"0": truth["spans"], "1": truth["spans"]}}}
    t.defect("6", Run("tasks.metrics.nextgqa.evaluate [IoU@0.5]", evaluate({"v_0": (8.0, 12.0)}, facts)["IoU@0.5"]), "NExT-GQA",
             "eval_ground.py", "one right answer, one missing, in percent", 100.0, 50.0)
    t.defect("6", Run("tasks.metrics.nextgqa.evaluate [mIoP]", evaluate({"v_1": (8.0, 9.0)}, facts)["mIoP"]), "NExT-GQA",
             "eval_ground.py", "one span inside, one missing, in percent", 100.0, 50.0)
    return t


def tracks() -> Table:
    """One object over time."""
    t = Table("tracking")
    true = {str(second): _A for second in range(16)}
    some: list[tuple[str, dict[str, Any]]] = [
        ("all of 16 boxes", dict(true)), ("IoU 0.6 in all", dict.fromkeys(true, _A60)),
        ("half exact, half missing", dict(list(true.items())[:8])),
        ("half exact, half apart", {**true, **dict.fromkeys(list(true)[8:], _B)})]
    for what, said in some:
        value = peer.true_keys(said, true)
        t.equal(_track(_boxes(said), {"boxes": true}, preset="onethinker"), "OneThinker", _ONE,
                f"{what}: mean over the true frames", value)
        t.equal(_track(_boxes(said), {"boxes": true}, "total", preset="onethinker"), "OneThinker", _ONE,
                f"{what}: 0.9 accuracy + 0.1 + structure", 0.9 * value + 0.1 + peer.onethinker_structure(True, said, true))
    t.equal(_track(_boxes(some[1][1]), {"boxes": true}, "total", preset="easyvideo_r1"), "EasyVideoR1", _EASY,
            "IoU 0.6 in all: 0.9 + 0.1", 0.9 * peer.common_keys(some[1][1], true) + 0.1)
    one = {"0": _A}
    t.defect("1", _track(_boxes(one), {"boxes": true}, preset="easyvideo_r1"), "EasyVideoR1", _EASY,
             "one of 16 boxes", peer.common_keys(one, true), 1 / 16)
    eight = {str(frame): _A80 if frame else _A for frame in range(8)}
    asked, listed = {str(frame): _A for frame in range(8)}, [list(box) for box in eight.values()]
    given = {**_ABOUT, "first_box": True, "keys": "frames"}
    value = peer.videochat_track(list(eight.values()), list(asked.values()))
    t.equal(_track(json.dumps(listed), {"boxes": asked}, preset="videochat_r1", about=given), "VideoChat-R1", _CHAT,
            "8 boxes of IoU 0.8, the given first one exact", value)
    t.equal(_track(json.dumps(listed), {"boxes": asked}, "total", preset="videochat_r1", about=given), "VideoChat-R1", _CHAT,
            "the same, plus format", value + 1.0)
    t.equal(_track(json.dumps(listed[:7]), {"boxes": asked}, preset="videochat_r1", about=given), "VideoChat-R1", _CHAT,
            "7 boxes instead of 8", peer.videochat_track(listed[:7], list(asked.values())))
    copied = {str(frame): _B if frame else _A for frame in range(8)}
    t.design(_track(_boxes(copied), {"boxes": asked}, about=given), "VideoChat-R1", _CHAT,
             "the given first box copied, all others apart", peer.videochat_track(list(copied.values()), list(asked.values())), 0.0,
             "a box that stands in the prompt earns nothing (count_first: true pays it)")
    extra = {**asked, "9": _B, "10": _B}
    t.equal(_track(_boxes(extra), {"boxes": asked}, mode="viou"), "VidSTG", "vIoU",
            "8 exact boxes and two beyond the track", peer.viou(extra, asked))
    return t


def tubes() -> Table:
    """When and where."""
    t = Table("spatio-temporal grounding")
    true = {str(second): _A for second in range(10, 20)}
    truth = {"time": _TRUE, "boxes": true}
    for what, span, box in (("exact", _TRUE, _A), ("IoU 0.6, time half inside", (15.0, 25.0), _A60),
                            ("time apart", (22.0, 25.0), _A80)):
        said, text = dict.fromkeys(true, box), _boxes(dict.fromkeys(true, box), time=list(span))
        value = peer.tube(span, _TRUE, peer.common_keys(said, true))
        t.equal(_where(text, truth, "total", preset="easyvideo_r1"), "EasyVideoR1", _EASY,
                f"{what}, every true second: 0.9 (0.5 tIoU + 0.5 mIoU) + 0.1", 0.9 * value + 0.1)
        t.equal(_where(text, truth, "total", preset="onethinker"), "OneThinker", _ONE,
                f"{what}, every true second, with structure", 0.9 * value + 0.1 + peer.onethinker_structure(True, said, true))
    easy = {"12": _A}
    worth = peer.tube(_TRUE, _TRUE, peer.common_keys(easy, true))
    for preset, name, source in (("easyvideo_r1", "EasyVideoR1", _EASY), ("onethinker", "OneThinker", _ONE)):
        t.defect("1", _where(_boxes(easy, time=list(_TRUE)), truth, preset=preset), name, source,
                 "the right time, one easy second of ten", worth, 0.5 + 0.5 * peer.true_keys(easy, true))
    longer = {**true, "21": _B, "22": _B}
    for what, said, span in (("ten exact boxes, three seconds too long", longer, (10, 23)), ("one exact box of ten", easy, _TRUE),
                             ("right boxes, time apart", true, (22, 25)), ("right boxes, half the time", true, (10, 15)),
                             ("right boxes, the whole video", true, (0, 30)), ("right boxes, time half inside", true, (15, 25))):
        value, text = peer.tube_viou(said, span, true, _TRUE), _boxes(said, time=list(span))
        t.equal(_where(text, truth, mode="viou"), "VidSTG, HC-STVG", "vIoU", what, value)
        t.equal(_where(text, truth, "metric:viou"), "VidSTG, HC-STVG", "vIoU", what, value)
    return t


def video_cases() -> list[Case]:
    """All rows of this file."""
    return [case for table in (temporal(), grounded(), tracks(), tubes()) for case in table.cases]
