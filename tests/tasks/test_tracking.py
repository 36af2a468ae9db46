"""Tracking and spatio-temporal grounding: true frames are the denominator, in every coordinate frame; extra frames never help."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmrl.coords import CoordFrame
from mmrl.errors import ConfigError, DataError
from mmrl.task import Template
from mmrl.tasks.readers.common import RowError
from mmrl.tasks.st_grounding import SpatioTemporalGrounding
from mmrl.tasks.tracking import Tracking
from mmrl.types import RewardContext, Sample, VideoSize

WH = (640, 480)
FACTS = {"width": WH[0], "height": WH[1], "duration": 16.0}
BOX = (100.0, 50.0, 300.0, 400.0)
AWAY = (400.0, 50.0, 600.0, 400.0)


def _ctx(frame: str = "abs_orig", **more: Any) -> RewardContext:
    return RewardContext(1, 1, CoordFrame(frame), videos=(VideoSize(WH, (644, 476), 16.0, **more),))


def _track(count: int = 16, **params: Any) -> Sample:
    return Sample(
        "1",
        "tracking",
        "s",
        "the red car",
        {"boxes": {str(k): list(BOX) for k in range(count)}},
        videos=("v.mp4",),
        params={**FACTS, **params},
    )


def _tube(**params: Any) -> Sample:
    return Sample(
        "1",
        "st_grounding",
        "s",
        "a dog",
        {"time": [4.0, 8.0], "boxes": {str(k): list(BOX) for k in range(4, 8)}},
        videos=("v.mp4",),
        params={**FACTS, **params},
    )


def _said(boxes: dict[Any, Any], **more: Any) -> str:
    return f"<answer>{json.dumps({**more, 'boxes': {str(k): list(b) for k, b in boxes.items()}})}</answer>"


share = st.floats(0, 1)
shares = st.tuples(share, share, share, share)


def _box(values: tuple[float, ...]) -> list[float]:
    x, y, w, h = values
    w, h = (0.15 + 0.8 * w) * WH[0], (0.15 + 0.8 * h) * WH[1]
    return [x * (WH[0] - w), y * (WH[1] - h), x * (WH[0] - w) + w, y * (WH[1] - h) + h]


@settings(max_examples=100, deadline=None)
@given(
    st.lists(shares, min_size=1, max_size=5),
    st.sampled_from(list(CoordFrame)),
    st.booleans(),
    st.sampled_from(["mean", "viou"]),
    st.sampled_from(["keyed", "list"]),
)
def test_gold_scores_one_and_wrong_zero(
    boxes: list[tuple[float, ...]], frame: CoordFrame, given_first: bool, mode: str, spelling: str
) -> None:
    truth = {str(k): _box(b) for k, b in enumerate(boxes)}
    ctx = _ctx(frame.value)
    track = Sample(
        "1",
        "tracking",
        "s",
        "it",
        {"boxes": truth},
        videos=("v",),
        params={**FACTS, "first_box": given_first},
    )
    tube = Sample(
        "1",
        "st_grounding",
        "s",
        "it",
        {"time": [0.0, float(len(boxes))], "boxes": truth},
        videos=("v",),
        params=FACTS,
    )
    for task, sample in (
        (Tracking(mode=mode, spelling=spelling), track),
        (SpatioTemporalGrounding(mode=mode), tube),
    ):
        gold, wrong = (
            task.score(sample, text, ctx)
            for text in (task.gold(sample, ctx), task.wrong(sample, ctx))
        )
        assert gold.parsed and gold.value > 0.96 and gold.metrics["correct"] == 1, gold
        assert wrong.parsed and wrong.parts == pytest.approx(
            {"accuracy": 0, "format": 1}, abs=1e-12
        )  # touching boxes: last bits
        assert wrong.metrics["iou"] == pytest.approx(0, abs=1e-12)
        json.dumps(dict(gold.detail))


def test_one_easy_frame_of_sixteen() -> None:
    for params in ({}, {"mode": "viou"}, {"preset": "easyvideo_r1"}, {"preset": "onethinker"}):
        score = Tracking(**params).score(_track(), f"<think>x</think>{_said({3: BOX})}", _ctx())
        assert score.parts["accuracy"] == pytest.approx(1 / 16) and score.metrics[
            "iou"
        ] == pytest.approx(1 / 16)
    tube = SpatioTemporalGrounding(preset="easyvideo_r1").score(
        _tube(), f"<think>x</think>{_said({5: BOX}, time=[4, 8])}", _ctx()
    )
    assert tube.parts["accuracy"] == pytest.approx(0.5 + 0.5 / 4) and tube.metrics["viou"] == 0.25


keys = st.integers(0, 20)


@settings(max_examples=80, deadline=None)
@given(
    st.dictionaries(
        keys, st.sampled_from([BOX, AWAY, (100.0, 50.0, 200.0, 400.0)]), min_size=1, max_size=12
    ),
    keys,
    st.booleans(),
)
def test_a_right_box_never_lowers_and_an_extra_one_never_raises(
    said: dict[int, Any], key: int, first: bool
) -> None:
    less = {k: b for k, b in said.items() if k != key} or {0: AWAY}
    for mode in ("mean", "viou"):
        task, track = Tracking(mode=mode), _track(12, first_box=first)
        tubes = SpatioTemporalGrounding(mode=mode)
        for one, sample, true, more in (
            (task, track, range(12), {}),
            (tubes, _tube(), range(4, 8), {"time": [3, 9]}),
        ):
            before = one.score(sample, _said(less, **more), _ctx()).value
            with_it = one.score(sample, _said({**less, key: BOX}, **more), _ctx()).value
            assert with_it >= before - 1e-12 if key in true else with_it <= before + 1e-12


def test_with_and_without_the_given_first_frame() -> None:
    copied = _said({0: BOX, **{k: AWAY for k in range(1, 8)}})
    given_first, free = _track(8, first_box=True), _track(8)
    score = Tracking().score(given_first, copied, _ctx())
    assert (
        score.parts["accuracy"] == 0
        and score.metrics["iou"] == 1 / 8
        and score.metrics["iou_after_first"] == 0
    )
    assert Tracking(count_first=True).score(given_first, copied, _ctx()).parts["accuracy"] == 1 / 8
    assert Tracking().score(free, copied, _ctx()).parts["accuracy"] == 1 / 8, (
        "nothing was given away"
    )
    half = Tracking().score(given_first, _said({k: BOX for k in range(4)}), _ctx())
    assert half.metrics["sr@0.5"] == 0.5 and half.metrics["sr@0.5_after_first"] == pytest.approx(
        3 / 7
    )
    assert half.metrics["auc"] == pytest.approx(0.5 * 100 / 101)
    single = _track(1, first_box=True)
    assert Tracking().score(single, _said({0: BOX}), _ctx()).value == 1, "the only frame counts"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "empty"),
        ("<answer>left</answer>", "not_a_track"),
        ('<answer>{"boxes": {"1": [1, 2, 3, 4], "1.0": [1, 2, 3, 4]}}</answer>', "duplicate_keys"),
        ('<answer>{"1": [1, 2, 3]}</answer>', "wrong_count"),
        ("<answer>[[1, 2, 3, 4]]</answer>", "not_keyed"),
        ("<answer>{}</answer>", "no_boxes"),
    ],
)
def test_tracking_failures(text: str, reason: str) -> None:
    task = Tracking()
    score = task.score(_track(), text, _ctx())
    assert (score.value, score.reason, score.parsed) == (0, reason, False) and set(
        score.metrics.values()
    ) == {0.0}
    assert score.detail["pred_tracks"] == {} and score.detail["gold_tracks"]["15"] == list(BOX)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ('{"boxes": {"5": [1, 2, 3, 4]}}', "no_time"),
        ('{"time": [4, 8]}', "no_boxes"),
        ('{"time": "x", "boxes": {"5": [1, 2, 3, 4]}}', "not_spans"),
        ('{"time": [[4, 5], [6, 8]], "boxes": {"5": [1, 2, 3, 4]}}', "several_spans"),
        ('{"time": [4, 8], "boxes": [[1, 2, 3, 4]]}', "not_keyed"),
    ],
)
def test_tube_failures(answer: str, reason: str) -> None:
    score = SpatioTemporalGrounding().score(_tube(), f"<answer>{answer}</answer>", _ctx())
    assert (score.value, score.reason) == (0, reason) and set(score.metrics.values()) == {0.0}


def test_lists_have_exactly_one_box_per_time() -> None:
    task, sample = Tracking(preset="videochat_r1", frame="abs_orig"), _track(8, first_box=True)
    for count, value in ((8, 2.0), (7, 0.0), (9, 0.0)):
        text = f"<think>x</think><answer>{json.dumps([list(BOX)] * count)}</answer>"
        assert task.score(sample, text, _ctx()).value == value
    assert task.score(sample, f"<think>x</think>{_said({0: BOX})}", _ctx()).reason == "not_listed"


def test_tube_modes() -> None:
    every = {k: BOX for k in range(4, 8)}
    longer = _said({**every, 9: BOX, 10: BOX}, time=[4, 8])
    assert SpatioTemporalGrounding().score(_tube(), longer, _ctx()).parts["accuracy"] == 1
    assert (
        SpatioTemporalGrounding(mode="viou").score(_tube(), longer, _ctx()).parts["accuracy"] == 1
    ), "outside its own time"
    longer = _said({**every, 9: BOX, 10: BOX}, time=[4, 11])
    assert SpatioTemporalGrounding(mode="viou").score(_tube(), longer, _ctx()).parts[
        "accuracy"
    ] == pytest.approx(4 / 7)
    wide = _said(every, time=[0, 16])
    assert SpatioTemporalGrounding().score(_tube(), wide, _ctx()).parts[
        "accuracy"
    ] == pytest.approx(0.5 * 0.25 + 0.5)
    weighted = SpatioTemporalGrounding(accuracy={"time_weight": 0}).score(_tube(), wide, _ctx())
    assert weighted.parts["accuracy"] == 1
    structured = SpatioTemporalGrounding(preset="onethinker").score(
        _tube(), f"<think>x</think>{_said({4: AWAY, 5: AWAY}, time=[4, 8])}", _ctx()
    )
    assert structured.parts == pytest.approx({"accuracy": 0.5, "format": 1, "structure": 0.375})


@pytest.mark.parametrize(
    ("time", "viou", "tiou"),
    [
        ([4, 8], 1, 1),
        ([12, 14], 0, 0),
        ([80, 90], 0, 0),
        ([0, 16], 4 / 16, 4 / 16),
        ([6, 8], 0.5, 0.5),
        ([6, 10], 2 / 6, 2 / 6),
        ([5, 5], 0, 0),
        ([4, 4.01], 1 / 4, 0.0025),
        ([8, 4], 0, 0),
        ([-3, 8], 4 / 11, 4 / 11),
        ([0, 900], 4 / 900, 4 / 900),
    ],
)
def test_right_boxes_at_another_time_are_no_tube(
    time: list[float], viou: float, tiou: float
) -> None:
    """VidSTG's vIoU: only what lies in both times counts, over the union of both."""
    said = _said({k: BOX for k in range(4, 8)}, time=time)
    task, strict = SpatioTemporalGrounding(), SpatioTemporalGrounding(mode="viou")
    score = task.score(_tube(), said, _ctx())
    assert score.metrics["viou"] == pytest.approx(viou) and score.metrics["tiou"] == pytest.approx(
        tiou
    )
    assert score.metrics["correct"] == (viou >= 0.5) and score.metrics["viou@0.5"] == (viou > 0.5)
    assert strict.score(_tube(), said, _ctx()).parts["accuracy"] == pytest.approx(viou)
    assert score.parts["accuracy"] == pytest.approx(0.5 * tiou + 0.5), (
        "mode mean keeps time and boxes apart"
    )
    assert score.detail["pred_spans"] == [time], "as it was said"


def test_clipping_the_time_of_a_tube_is_a_setting_of_the_reward() -> None:
    said = _said({k: BOX for k in range(4, 8)}, time=[-3, 900])
    for mode, paid in (("viou", 4 / 16), ("mean", 0.5 * 4 / 16 + 0.5)):
        score = SpatioTemporalGrounding(mode=mode, accuracy={"clip": True}).score(
            _tube(), said, _ctx()
        )
        assert score.parts["accuracy"] == pytest.approx(paid) and score.metrics[
            "tiou"
        ] == pytest.approx(4 / 903)


def test_the_step_of_a_tube_is_the_unit_of_its_time() -> None:
    fine = Sample(
        "1",
        "st_grounding",
        "s",
        "a dog",
        {"time": [4.0, 6.0], "boxes": {str(k / 2): list(BOX) for k in range(8, 12)}},
        videos=("v.mp4",),
        params={**FACTS, "step": 0.5},
    )
    said = _said({k / 2: BOX for k in range(8, 12)}, time=[4, 7])
    assert SpatioTemporalGrounding().score(fine, said, _ctx()).metrics["viou"] == pytest.approx(
        4 / 6
    )


def test_prompts_say_times_boxes_and_the_first_box() -> None:
    def text(sample: Sample, frame: str, task: Any = None) -> str:
        return (task or Tracking()).messages(sample, Template("t", CoordFrame(frame)))[-1][
            "content"
        ][-1]["text"]

    told = text(_track(3, first_box=True), "rel1000")
    assert "16 seconds long" in told and "times in seconds" in told and ": 0, 1, 2." in told
    assert "At 0 seconds its box is [156, 104, 469, 833]." in told and "scaled to 0-1000" in told
    assert "[0.156, 0.104, 0.469, 0.833], as fractions" in text(
        _track(3, first_box=True), "abs_resized"
    )
    assert "[7, 8, 9, 10]" in text(_track(3, first_box=[7, 8, 9, 10]), "abs_orig")
    assert "its box is" not in text(_track(3), "abs_orig")
    assert "frame numbers" in text(_track(3, keys="frames"), "abs_orig")
    tube = text(_tube(), "rel1000", SpatioTemporalGrounding())
    assert (
        "every whole second" in tube
        and "16 seconds long" in tube
        and "4" not in tube.replace("[x1, y1, x2, y2]", "").replace("0-1000", "")
    )
    assert "multiple of 0.5 seconds" in text(_tube(step=0.5), "rel1", SpatioTemporalGrounding())


def test_frame_numbers_become_seconds_for_people() -> None:
    sample = _track(3, keys="frames")
    ctx = _ctx(timestamps_s=(0.0, 0.5, 1.0))
    assert list(Tracking().score(sample, _said({1: BOX, 7: BOX}), ctx).detail["pred_tracks"]) == [
        "0.5",
        "7",
    ]


def test_without_a_clip_the_resized_frame_is_an_error_not_a_guess() -> None:
    bare = RewardContext(1, 1, CoordFrame.ABS_RESIZED)
    score = Tracking().score(_track(), _said({1: BOX}), bare)
    assert (
        score.value == 0
        and (score.reason or "").startswith("reward_error")
        and "ctx.videos" in (score.reason or "")
    )
    with pytest.raises(DataError, match=r"ctx\.videos"):
        Tracking().gold(_track(), bare)


@pytest.mark.parametrize(
    ("value", "params", "text"),
    [
        ({"boxes": {}}, {}, "at least one time"),
        ({"boxes": {"x": [1, 2, 3, 4]}}, {}, "a time in seconds as key"),
        ({"boxes": {"1": [1, 2, 3, 4], "1.0": [1, 2, 3, 4]}}, {}, "different times"),
        ({"boxes": {"40": [1, 2, 3, 4]}}, {}, "set params.keys"),
        ({"boxes": {"1": [3, 2, 1, 4]}}, {}, "x1 < x2"),
        ([], {}, "and a video"),
        ({"boxes": {"1": [1, 2, 3, 4]}}, {"keys": "ms"}, "params.keys"),
        ({"boxes": {"1": [1, 2, 3, 4]}}, {"first_box": [1, 2]}, "4 coordinates"),
    ],
)
def test_tracking_rows_are_checked(value: Any, params: dict[str, Any], text: str) -> None:
    with pytest.raises(RowError, match=text):
        Tracking().check_answer(value, CoordFrame.ABS_ORIG, [WH], {**FACTS, **params})


def test_rows_become_pixels_in_order() -> None:
    checked = Tracking().check_answer(
        {"boxes": {"10": [0, 0, 500, 1000], "2.50": [500, 0, 1000, 500]}},
        CoordFrame.REL1000,
        [WH],
        FACTS,
    )
    assert checked == {"boxes": {"2.5": [320, 0, 640, 240], "10": [0, 0, 320, 480]}} and list(
        checked["boxes"]
    ) == ["2.5", "10"]
    assert Tracking().check_answer(
        {"boxes": {"40": [1, 2, 3, 4]}}, CoordFrame.ABS_ORIG, [WH], {**FACTS, "keys": "frames"}
    )
    tube = SpatioTemporalGrounding()
    assert tube.check_answer(
        {"time": [4, 8], "boxes": {"4": [1, 2, 3, 4]}}, CoordFrame.ABS_ORIG, [WH], FACTS
    )["time"] == [4, 8]
    for value, text in (
        ({"time": [8, 4], "boxes": {"4": [1, 2, 3, 4]}}, "start before end"),
        ({"time": [4, 8]}, '"boxes"'),
        ({"time": [4, 8], "boxes": {"12": [1, 2, 3, 4]}}, "boxes inside the time"),
        ({"time": [[1, 2], [4, 8]], "boxes": {"4": [1, 2, 3, 4]}}, "one span"),
    ):
        with pytest.raises(RowError, match=text):
            tube.check_answer(value, CoordFrame.ABS_ORIG, [WH], FACTS)


@pytest.mark.parametrize(
    ("task", "params", "text"),
    [
        (Tracking, {"mode": "men"}, "Did you mean 'mean'"),
        (Tracking, {"count_first": 1}, "true or false"),
        (Tracking, {"spelling": "lst"}, "'list'"),
        (SpatioTemporalGrounding, {"accuracy": {"clip": 0}}, "clip true or false"),
        (SpatioTemporalGrounding, {"accuracy": {"time_weight": 2}}, "time_weight"),
        (SpatioTemporalGrounding, {"mode": "x"}, "accuracy mode"),
    ],
)
def test_wrong_parameters_are_named(task: Any, params: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        task(**params)


@pytest.mark.parametrize("task", [Tracking(), SpatioTemporalGrounding()])
def test_example_data_and_summary(task: Any, tmp_path: Path) -> None:
    samples = list(task.load(task.example_data(str(tmp_path))))
    ctx = RewardContext(1, 1, CoordFrame.REL1000)
    scores = [task.score(sample, task.gold(sample, ctx), ctx) for sample in samples]
    assert len(samples) >= 8 and min(score.value for score in scores) > 0.98
    assert all(task.score(s, task.wrong(s, ctx), ctx).parts["accuracy"] == 0 for s in samples)
    summary = task.summarize([*scores, task.score(samples[0], "", ctx)])
    share_failed = 1 / (len(samples) + 1)
    assert summary["parse_failure_rate"] == pytest.approx(share_failed)
    assert summary["mIoU" if "mIoU" in summary else "m_vIoU"] == pytest.approx(
        1 - share_failed, abs=0.02
    )
