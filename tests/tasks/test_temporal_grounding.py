"""Temporal grounding: gold scores 1, wrong 0, in every spelling; times are what was declared; nothing can be gamed."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmrl.coords import CoordFrame
from mmrl.errors import ConfigError, DataError
from mmrl.registry import task_from_spec
from mmrl.rewards.temporal import MODES
from mmrl.task import Template
from mmrl.tasks.readers.common import RowError
from mmrl.tasks.spans import SPELLINGS, TimeFormat, beside_spans, outside_clip, spell_seconds
from mmrl.tasks.temporal_grounding import TemporalGrounding
from mmrl.types import RewardContext, Sample, StopReason, VideoSize

DURATION = 30.0
CTX = RewardContext(1, 1, CoordFrame.REL1000, videos=(VideoSize((640, 480), (644, 476), DURATION),))
BARE = RewardContext(1, 1, CoordFrame.REL1000)
TEMPLATE = Template("qwen3_vl", CoordFrame.REL1000)
ANCHORS: dict[str, Any] = {
    "answer_format": "think",
    "weights": {"accuracy": 0.5, "format": 0.1, "anchors": 0.4},
}


def _sample(*spans: tuple[float, float], **params: Any) -> Sample:
    return Sample(
        "1",
        "temporal_grounding",
        "s",
        "a person opens the door",
        [list(s) for s in spans or [(10.0, 20.0)]],
        videos=("clips/7.mp4",),
        params={"duration": DURATION, "width": 640, "height": 480, **params},
    )


def _score(
    answer: str, *spans: tuple[float, float], ctx: RewardContext = CTX, **params: Any
) -> Any:
    task = TemporalGrounding(**params)
    text = (
        f"<think>x</think><answer>{answer}</answer>"
        if task.answer_format == "think"
        else f"<answer>{answer}</answer>"
    )
    return task.score(_sample(*spans), text, ctx)


tick = st.integers(0, 3000)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(tick, tick).filter(lambda p: abs(p[0] - p[1]) >= 30), min_size=1, max_size=3
    ),
    st.sampled_from(list(SPELLINGS)),
    st.sampled_from(["seconds", "rel1"]),
    st.sampled_from(list(MODES)),
    st.sampled_from(["answer", "think", "bare"]),
)
def test_gold_scores_one_and_wrong_zero(
    ticks: list[tuple[int, int]], spelling: str, frame: str, mode: str, form: str
) -> None:
    if spelling == "clock" and frame == "rel1":
        return
    spans = [(min(p) / 100, max(p) / 100) for p in ticks]
    task = TemporalGrounding(spelling=spelling, time_frame=frame, mode=mode, answer_format=form)
    sample = _sample(*spans)
    gold = task.score(sample, task.gold(sample, CTX), CTX)
    assert gold.parsed and gold.value > 0.995 and gold.metrics["r1@0.7"] == 1, (
        task.gold(sample, CTX),
        gold,
    )
    wrong = task.score(sample, task.wrong(sample, CTX), CTX)
    assert wrong.parsed and wrong.parts["accuracy"] == 0 and wrong.metrics["iou"] == 0
    one = TemporalGrounding(
        spelling=spelling, time_frame=frame, mode=mode, answer_format=form, spans="one"
    )
    assert one.score(_sample(spans[0]), one.gold(_sample(spans[0]), CTX), CTX).value > 0.995


def test_numbers_mean_what_was_declared() -> None:
    share = "[0.3333333, 0.6666667]"
    assert _score(share, time_frame="rel1").metrics["iou"] == pytest.approx(1, abs=1e-5)
    assert _score(share).metrics["iou"] == 0, (
        "0.33 is a third of a second where seconds were declared"
    )
    assert _score("[10, 20]", time_frame="rel1").metrics["iou"] == 0, (
        "never guessed: 10 is ten times the video"
    )
    assert _score("0:10 to 0:20").value == 1
    assert _score("0:10 to 0:20", time_frame="rel1").reason == "not_in_frame"


SAID = [
    ("[20, 10]", (10.0, 20.0), 0.0),
    ("[15, 15]", (10.0, 20.0), 0.0),
    ("[10, 90]", (10.0, 30.0), 0.25),
    ("[0, 1000000]", (0.0, 30.0), 3e-5),
    ("[-5, 10]", (0.0, 10.0), 10 / 15),
    ("[10, 30]", (10.0, 31.5), 20 / 21.5),
    ("[10, 31.5]", (10.0, 31.5), 1.0),
    ("[[20, 10], [10, 15]]", (10.0, 20.0), 0.5),
]


@pytest.mark.parametrize(("answer", "truth", "iou"), SAID)
def test_spans_are_judged_as_they_were_said(
    answer: str, truth: tuple[float, float], iou: float
) -> None:
    """Neither sorted nor clipped, in reward and metrics, where the clip is known from the context or from params.duration."""
    for ctx in (CTX, BARE):
        score = _score(answer, truth, ctx=ctx)
        assert score.parsed and score.parts == {"accuracy": pytest.approx(iou), "format": 1}
        assert score.metrics["iou"] == pytest.approx(iou) and score.detail["gold_spans"] == [
            list(truth)
        ]
        assert json.dumps(score.detail["pred_spans"]) == json.dumps(
            [
                [float(v) for v in pair]
                for pair in (
                    json.loads(answer) if answer.startswith("[[") else [json.loads(answer)]
                )
            ]
        )
        first = 0.0 if answer.startswith("[[") else iou
        assert [score.metrics[f"r1@{level}"] for level in (0.3, 0.5, 0.7)] == [
            first >= level for level in (0.3, 0.5, 0.7)
        ]


@pytest.mark.parametrize("mode", ["union", "matched"])
@pytest.mark.parametrize("preset", [None, *TemporalGrounding.presets])
def test_an_end_far_behind_the_video_never_pays(mode: str, preset: str | None) -> None:
    """By default and in every preset: the larger the end, the lower the reward, for every truth."""
    task = TemporalGrounding(preset=preset, mode=mode)
    for truth in ((0.0, 30.0), (10.0, 30.0), (28.0, 30.0), (2.0, 5.0)):
        earned = []
        for end in (truth[1], truth[1] + 10, 100.0, 1000.0, 1e6):
            text = task.times.write([(truth[0], end)], DURATION)
            score = task.score(
                _sample(truth),
                f"<think>x</think><answer>{text}</answer>"
                if preset
                else f"<answer>{text}</answer>",
                CTX,
            )
            earned.append(score.parts["accuracy"])
        assert (
            earned[0] == pytest.approx(1)
            and earned == sorted(earned, reverse=True)
            and len(set(earned)) == 5
        )
        assert earned[-1] < 1e-4


def test_clipping_is_a_setting_of_the_reward_alone() -> None:
    for answer, truth, iou in SAID:
        clipped = _score(answer, truth, accuracy={"clip": True})
        assert clipped.metrics["iou"] == pytest.approx(iou), "metrics see what was said"
    for answer, truth, paid in (
        ("[10, 90]", (10.0, 30.0), 1),
        ("[10, 30]", (10.0, 31.5), 1),
        ("[-5, 10]", (0.0, 10.0), 1),
        ("[20, 10]", (10.0, 20.0), 0),
        ("[90, 99]", (10.0, 20.0), 0),
    ):
        assert _score(answer, truth, accuracy={"clip": True}).parts["accuracy"] == paid, answer
    unknown = Sample("1", "temporal_grounding", "s", "q", [[10, 20]], videos=("a.mp4",))
    task = TemporalGrounding(accuracy={"clip": True})
    assert task.score(unknown, "<answer>[-10, 20]</answer>", BARE).parts["accuracy"] == 0.5, (
        "only 0 is known to be an end"
    )
    layered = TemporalGrounding(per_source={"s": {"accuracy": {"clip": True}}})
    assert (
        layered.score(_sample((10.0, 30.0)), "<answer>[10, 90]</answer>", CTX).parts["accuracy"]
        == 1
    )


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "empty"),
        ("[10, 20]", "no_answer"),
        ("<answer>[10, 20]", "unclosed_answer"),
        ("<answer>soon</answer>", "not_spans"),
        ("<answer>[10, 20]</answer><answer>[1, 2]</answer>", "several_answers"),
        ("<answer>[10, 20, 30]</answer>", "wrong_count"),
        ("<think>[10, 20]</think>", "empty"),
        ("<answer>the door opens 10 to 20</answer>", "not_spans"),
    ],
)
def test_parse_failures_are_zeros_that_stay(text: str, reason: str) -> None:
    task = TemporalGrounding()
    score = task.score(_sample(), text, CTX)
    assert (score.value, score.parsed, score.reason) == (0, False, reason)
    assert score.metrics == dict.fromkeys(task.metric_names, 0.0)
    assert score.detail["gold_spans"] == [[10, 20]] and score.detail["pred_spans"] == []
    cut = task.score(
        _sample(), "<answer>[10, 2", RewardContext(1, 1, CoordFrame.REL1, stop=StopReason.LENGTH)
    )
    assert cut.reason == "truncated"


def test_one_span_or_many() -> None:
    assert (
        _score("[[10, 15], [15, 20]]").value == 1
        and _score("[[10, 15], [15, 20]]", spans="one").reason == "several_spans"
    )
    split = _score("[[10, 15], [15, 20]]", mode="matched")
    assert (
        split.parts["accuracy"] == pytest.approx(0.25)
        and split.metrics["iou"] == 1
        and split.metrics["r1@0.5"] == 1
    )
    assert _score("[[1, 2], [10, 20]]").metrics["r1@0.3"] == 0, (
        "recall at one looks at the first span only"
    )
    assert _score("[0, 30]", (2.0, 5.0), (8.0, 12.0)).parts["accuracy"] == pytest.approx(7 / 30), (
        "the whole video is no answer"
    )


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(tick, tick), min_size=1, max_size=6),
    st.lists(st.tuples(tick, tick), min_size=0, max_size=6),
)
def test_flooding_with_spans_never_beats_the_truth(
    few: list[tuple[int, int]], more: list[tuple[int, int]]
) -> None:
    for mode in ("union", "matched"):
        exact = _score(
            json.dumps([[10, 20], [22, 25]]), (10.0, 20.0), (22.0, 25.0), mode=mode
        ).value
        text = json.dumps([[10, 20], [22, 25], *([a / 100, b / 100] for a, b in few + more)])
        assert (
            _score(text, (10.0, 20.0), (22.0, 25.0), mode=mode).value
            <= exact + 1e-9
            == pytest.approx(1)
        )


# anchors


def _thought(said: str, answer: str = "[10, 20]", **params: Any) -> Any:
    return TemporalGrounding(**{**ANCHORS, **params}).score(
        _sample(), f"<think>{said}</think><answer>{answer}</answer>", CTX
    )


def _tag(text: str) -> str:
    return f"<timestamp>{text}</timestamp>"


def test_anchors_pay_for_coming_nearer() -> None:
    near = _thought(f"first {_tag('5 to 25')}, then {_tag('10 to 20')}")
    assert (
        near.parts["anchors"] == pytest.approx((0.5 * 0.5 + 1) / 1.5) and near.parts["format"] == 1
    )
    assert _thought(f"{_tag('10 to 20')} {_tag('5 to 25')}").parts["anchors"] == pytest.approx(
        0.5
    ), "going astray"
    assert _thought(_tag("10 to 20") * 2).value == pytest.approx(1)
    assert _thought(_tag("10 to 20") * 2, "[1, 2]").parts["anchors"] == 0, (
        "right thoughts, wrong answer"
    )
    for thoughts in (
        "",
        _tag("10 to 20"),
        _tag("10 to 20") * 5,
        _tag("10 to 20") + _tag("soon"),
        "<timestamp>" + _tag("10 to 20") * 2,
    ):
        assert _thought(thoughts).parts["anchors"] == 0, thoughts
    assert _thought(_tag("00:10") + _tag("10 to 20"), anchors={"least": 1}).parts["anchors"] == 0
    assert (
        _thought(_tag("0.1 to 0.2") * 2, "[0.33333, 0.66667]", time_frame="rel1").parts["anchors"]
        == 0
    )


def test_anchors_are_asked_for_and_their_gold_scores_one() -> None:
    task, sample = TemporalGrounding(**ANCHORS, anchors={"least": 3}), _sample()
    text = task.messages(sample, TEMPLATE)[-1]["content"][-1]["text"]
    assert "at least 3, at most 4" in text and "<timestamp>" in text
    assert task.score(sample, task.gold(sample, CTX), CTX).value == pytest.approx(1)
    assert pickle.loads(pickle.dumps(task)).score(
        sample, task.gold(sample, CTX), CTX
    ).value == pytest.approx(1)
    layered = _sample(reward={"anchors": {"least": 1}})
    assert (
        task.score(
            layered, f"<think>{_tag('10 to 20')}</think><answer>[10, 20]</answer>", CTX
        ).parts["anchors"]
        == 1
    )


@pytest.mark.parametrize(
    ("params", "text"),
    [
        ({"anchors": {"least": 2}}, "has no weight"),
        ({**ANCHORS, "answer_format": "answer"}, "answer_format think"),
        ({**ANCHORS, "anchors": {"lest": 2}}, "unknown parameter 'lest'"),
        ({**ANCHORS, "anchors": 3}, "mapping"),
        ({**ANCHORS, "anchors": {"most": 0}}, "anchors.most"),
        ({"spelling": "jsn"}, "Did you mean 'json'"),
        ({"time_frame": "rel"}, "Did you mean 'rel1'"),
        ({"spans": 2}, "expected one of many, one"),
        ({"spelling": "clock", "time_frame": "rel1"}, "clock readings are seconds"),
        ({"mode": "glue"}, "unknown accuracy mode"),
        ({"preset": "easy_video_r1"}, "Did you mean 'easyvideo_r1'"),
        ({"accuracy": {"clip": "yes"}}, "accuracy.clip true or false"),
    ],
)
def test_wrong_parameters_are_named(params: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        TemporalGrounding(**params)


# prompts, presets, rows


def test_prompts_state_the_duration_and_the_form() -> None:
    for params, words in (
        ({}, ["30 seconds long", "in seconds", "[[start, end], ...]"]),
        ({"spelling": "clock", "spans": "one"}, ["as mm:ss.ff", '["mm:ss.ff", "mm:ss.ff"]']),
        (
            {"time_frame": "rel1", "spelling": "to"},
            ["fractions from 0 to 1 of the video's duration", "start to end"],
        ),
    ):
        message = TemporalGrounding(**params).messages(_sample(), TEMPLATE)[-1]["content"]
        assert [item["type"] for item in message] == ["video", "text"]
        assert all(word in message[-1]["text"] for word in words) and "{" not in message[-1][
            "text"
        ].replace('{"', "")
    odd = Sample(
        "1",
        "temporal_grounding",
        "s",
        "says {duration}",
        [[1, 2]],
        videos=("a",),
        params={"duration": 3.14159},
    )
    text = TemporalGrounding().messages(odd, TEMPLATE)[-1]["content"][-1]["text"]
    assert '"says {duration}"' in text and "3.14 seconds" in text
    with pytest.raises(DataError, match=r"params\.duration"):
        TemporalGrounding().messages(Sample("1", "t", "s", "q", [[1, 2]], videos=("a",)), TEMPLATE)


def test_presets() -> None:
    half = {
        "easyvideo_r1": ('{"time": [15, 20]}', 0.55),
        "temporal_r1": ('{"start_time": "15", "end_time": "20"}', 0.75),
        "videochat_r1": ("15 to 20", 1.5),
        "onethinker": ('{"time": [15, 20]}', 0.9 * 0.5 + 0.1 + 0.5),
    }
    assert set(half) == set(TemporalGrounding.presets)
    for preset, (answer, value) in half.items():
        assert _score(answer, preset=preset).value == pytest.approx(value), preset
        assert task_from_spec("temporal_grounding", {"preset": preset}).value_range[1] >= value
    assert _score("[15, 20]", preset="onethinker").parts["structure"] == 0
    loose = TemporalGrounding(preset="onethinker").score(
        _sample(), '<answer>{"time": [15, 20]}</answer>', CTX
    )
    assert loose.parts["structure"] == 0 and loose.parts["format"] == 0, (
        "nothing for the structure without the envelope"
    )


def test_rows_are_checked() -> None:
    task, params = TemporalGrounding(), {"duration": 30.0}

    def check(value: Any, task: TemporalGrounding = task) -> Any:
        return task.check_answer(value, CoordFrame.ABS_ORIG, [], params)

    assert check([[2, 5]]) == check([2, 5]) == [[2, 5]]
    assert check([[28, 31.7], [-0.1, 9]]) == [[28, 31.7], [-0.1, 9]], (
        "as Charades-STA and NExT-GQA have them"
    )
    for value, text in (
        ([], "at least one span"),
        ("2 to 5", "spans as"),
        ([[2]], "two numbers"),
        ([[2, "5"]], "two numbers"),
        ([[31, 40]], "inside the video of 30.0 s"),
        ([[4, 4]], "start before end"),
        ([[9, 4]], "start before end"),
        ([[-3, 0]], "inside the video"),
        ([[float("nan"), 1]], "two numbers"),
    ):
        with pytest.raises(RowError, match=text):
            check(value)
    with pytest.raises(RowError, match="set spans: many"):
        check([[1, 2], [3, 4]], TemporalGrounding(spans="one"))


def test_summaries_divide_by_all_rows() -> None:
    task = TemporalGrounding()
    rows = [
        task.score(_sample(), text, CTX)
        for text in ("<answer>[10, 20]</answer>", "<answer>[15, 25]</answer>", "")
    ]
    assert task.summarize(rows) == pytest.approx(
        {
            "R1@0.3": 2 / 3,
            "R1@0.5": 1 / 3,
            "R1@0.7": 1 / 3,
            "mIoU": (1 + 1 / 3) / 3,
            "parse_failure_rate": 1 / 3,
            "truncated_rate": 0,
        }
    )
    assert task.summarize([]) == {}


def test_example_data_loads(tmp_path: Path) -> None:
    task = TemporalGrounding()
    samples = list(task.load(task.example_data(str(tmp_path))))
    assert len(samples) == 12 and len({s.id for s in samples}) == 12
    for sample in samples:
        assert (
            len(list(Path(sample.videos[0]).glob("*.png"))) == 16 and sample.params["duration"] == 8
        )
        ctx = RewardContext(1, 1, CoordFrame.REL1000)
        assert task.score(sample, task.gold(sample, ctx), ctx).value == 1
        assert task.score(sample, task.wrong(sample, ctx), ctx).parts["accuracy"] == 0
        json.dumps(dict(task.score(sample, task.gold(sample, ctx), ctx).detail))


def test_helpers() -> None:
    assert beside_spans([(0, 30)], 30.0) == (0, 0) and beside_spans([(2, 4)], 30.0) == (10.5, 23.5)
    assert [spell_seconds(v) for v in (18.0, 2.5, 1 / 3, -0.0, 100)] == [
        "18",
        "2.5",
        "0.333",
        "0",
        "100",
    ]
    assert (
        TimeFormat("clock", "seconds", "one").write([(61.005, 3599.999)], None)
        == '["01:01.01", "60:00.00"]'
    )
    assert (
        TimeFormat("clock", "seconds", "one").write([(-0.1, 61)], None)
        == '["-00:00.10", "01:01.00"]'
    )
    assert (
        outside_clip([(1, 2), (-0.1, 3)], None)
        and outside_clip([(1, 30.1)], 30)
        and not outside_clip([(0, 30)], 30)
    )


@pytest.mark.parametrize("spelling", list(SPELLINGS))
def test_a_truth_outside_the_clip_is_answered_in_every_spelling(spelling: str) -> None:
    task = TemporalGrounding(spelling=spelling)
    for truth in ((-0.1, 25.0), (20.0, 31.5)):
        sample = _sample(truth)
        assert task.score(sample, task.gold(sample, CTX), CTX).value == 1, task.gold(sample, CTX)
        assert task.score(sample, task.wrong(sample, CTX), CTX).parts["accuracy"] == 0
