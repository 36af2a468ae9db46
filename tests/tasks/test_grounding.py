"""Grounding: gold scores 1, wrong 0, in every frame and picture shape; no text can game or break the reward."""

from __future__ import annotations

import itertools
import json
import math
import pickle
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmrl.coords import CoordFrame, from_orig, to_orig
from mmrl.errors import ConfigError, DataError
from mmrl.registry import task_from_spec
from mmrl.rewards.dynamic_iou import MODES
from mmrl.rewards.iou import box_iou
from mmrl.task import Template
from mmrl.tasks.boxes import rounded_box
from mmrl.tasks.grounding import Grounding, format_box
from mmrl.tasks.scenes import make_scenes
from mmrl.types import ImageSize, RewardContext, Sample, StopReason

SIZES = [
    (640, 480),
    (4000, 3000),
    (1080, 2400),
    (3000, 1000),
    (112, 112),
    (333, 77),
    (20_000, 1000),
]


def _smart_resize(
    size: tuple[int, int], factor: int = 28, low: int = 56 * 56, high: int = 1280 * 28 * 28
) -> tuple[int, int]:
    """(width, height) as Qwen2.5-VL's processor makes them: multiples of `factor`, between `low` and `high` pixels."""
    sides = [round(side / factor) * factor for side in size]
    beta = math.sqrt(size[0] * size[1] / (high if sides[0] * sides[1] > high else low))
    if sides[0] * sides[1] > high:
        sides = [max(factor, math.floor(side / beta / factor) * factor) for side in size]
    elif sides[0] * sides[1] < low:
        sides = [math.ceil(side / beta / factor) * factor for side in size]
    return sides[0], sides[1]


RESIZED = {size: _smart_resize(size) for size in SIZES}


def _context(
    size: tuple[int, int] = (640, 480), frame: str = "abs_orig", **options: Any
) -> RewardContext:
    return RewardContext(
        options.pop("step", 1), 1, CoordFrame(frame), (ImageSize(size, RESIZED[size]),), **options
    )


def _sample(box: tuple[float, ...] = (100, 50, 300, 400), **options: Any) -> Sample:
    return Sample(
        "1", "grounding", options.pop("source", "s"), "red circle", list(box), ("a.png",), **options
    )


def _box_in(size: tuple[int, int], shares: tuple[float, float, float, float]) -> tuple[float, ...]:
    """A box of at least 15 % of each side, anywhere in the picture."""
    x, y, w, h = shares
    w, h = (0.15 + 0.8 * w) * size[0], (0.15 + 0.8 * h) * size[1]
    return (x * (size[0] - w), y * (size[1] - h), x * (size[0] - w) + w, y * (size[1] - h) + h)


share = st.floats(0, 1)


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from(SIZES), st.sampled_from(list(CoordFrame)), st.tuples(share, share, share, share)
)
def test_the_frames_round_trip_exactly(
    size: tuple[int, int], frame: CoordFrame, shares: tuple[float, ...]
) -> None:
    box = _box_in(size, shares)
    there = from_orig(box, frame, RESIZED[size], size)
    assert to_orig(there, frame, RESIZED[size], size) == pytest.approx(box, abs=1e-9 * max(size))


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(SIZES),
    st.sampled_from(list(CoordFrame)),
    st.tuples(share, share, share, share),
    st.sampled_from(["answer", "think", "bare"]),
    st.sampled_from(sorted(MODES)),
    share,
)
def test_gold_scores_one_to_rounding_and_wrong_scores_zero(
    size: tuple[int, int],
    frame: CoordFrame,
    shares: tuple[float, ...],
    answer_format: str,
    mode: str,
    progress: float,
) -> None:
    task, sample = Grounding(answer_format=answer_format, mode=mode), _sample(_box_in(size, shares))
    ctx = replace(_context(size, frame.value), step=progress)
    gold = task.score(sample, task.gold(sample, ctx), ctx)
    assert gold.parsed and gold.parts["format"] == 1
    assert gold.metrics["iou"] >= 0.75 and gold.parts["accuracy"] >= gold.metrics["iou"] - 1e-9
    if min(RESIZED[size]) > 500 or frame in (CoordFrame.REL1000, CoordFrame.REL1):
        assert gold.metrics["iou"] > 0.97
    wrong = task.score(sample, task.wrong(sample, ctx), ctx)
    assert wrong.parsed and wrong.parts == {"accuracy": 0, "format": 1}


@pytest.mark.parametrize("frame", list(CoordFrame))
@pytest.mark.parametrize(
    "box", [(0, 0, 640, 480), (0, 0, 1, 1), (639, 479, 640, 480), (0.2, 0.2, 0.4, 0.4)]
)
def test_extreme_truths_still_have_a_gold_and_a_wrong(
    frame: CoordFrame, box: tuple[float, ...]
) -> None:
    for mode in MODES:
        task, sample, ctx = Grounding(mode=mode), _sample(box), _context(frame=frame.value)
        assert task.score(sample, task.wrong(sample, ctx), ctx).parts["accuracy"] == 0
        score = task.score(sample, task.gold(sample, ctx), ctx)
        assert score.parsed and score.metrics["iou"] > 0


def test_a_box_valid_in_two_frames_is_read_in_the_declared_one() -> None:
    sample = _sample((64, 48, 320, 240))
    text = "<answer>[100, 100, 500, 500]</answer>"  # right in thousandths, wrong in pixels
    assert Grounding().score(sample, text, _context(frame="rel1000")).value == pytest.approx(1)
    pixels = Grounding().score(sample, text, _context(frame="abs_orig"))
    assert pixels.parsed and pixels.metrics["iou"] < 0.35
    assert pixels.detail["pred_boxes"] == [[100, 100, 500, 500]]


def test_format_box_rounds_per_frame_and_never_to_nothing() -> None:
    assert format_box((0.5, 1.49, 10.5, 9.51), CoordFrame.ABS_RESIZED) == "[1, 1, 11, 10]"
    assert format_box((0.1234, 0.5, 0.5, 1), CoordFrame.REL1) == "[0.123, 0.500, 0.500, 1.000]"
    assert format_box((3.1, 3.1, 3.2, 3.3), CoordFrame.REL1000) == "[3, 3, 4, 4]"
    assert format_box((3.6, 18.6, 9.4, 18.9), CoordFrame.ABS_RESIZED) == "[4, 18, 9, 19]"


@settings(deadline=None)
@given(
    st.sampled_from(list(CoordFrame)),
    st.lists(st.floats(0, 0.99), min_size=2, max_size=2),
    st.lists(st.floats(1e-4, 0.5), min_size=2, max_size=2),
)
def test_the_rounded_box_lies_on_the_box_however_thin_that_is(
    frame: CoordFrame, corner: list[float], side: list[float]
) -> None:
    size = ImageSize((108, 33), (112, 28))
    shares = [*corner, *(min(1.0, a + b) for a, b in zip(corner, side, strict=True))]
    box = [share * length for share, length in zip(shares, (108, 33, 108, 33), strict=True)]
    assert box_iou(rounded_box(box, frame, size), box) > 0


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "empty"),
        ("[100, 50, 300, 400]", "no_answer"),
        ("<answer>red</answer>", "not_a_box"),
        ("<answer>[1, 2, 3]</answer>", "wrong_count"),
        ("<answer>[[1,2,3,4],[100,50,300,400]]</answer>", "several_boxes"),
        ("<answer>[1, 2, 3, 1e400]</answer>", "not_finite"),
        ("<answer>[100, 50, 300, 400]", "unclosed_answer"),
        ("<answer>__import__('os').system('x')</answer>", "not_a_box"),
        ("😀" * 100_000, "no_answer"),
    ],
)
def test_parse_failures_are_zeros_that_stay(text: str, reason: str) -> None:
    task = Grounding()
    score = task.score(_sample(), text, _context())
    assert (score.value, score.parsed, score.reason) == (0, False, reason)
    right = task.score(_sample(), task.gold(_sample(), _context()), _context())
    assert set(score.metrics) == set(right.metrics) and set(score.parts) == set(right.parts) == set(
        task.part_names
    )
    assert (
        task.summarize([score, right])["Acc@0.5"]
        == 0.5
        == task.summarize([score, right])["parse_failure_rate"]
    )


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("<answer>[1, 2", "truncated"),
        ("so", "truncated"),
        ("<think>so", "truncated"),
        ("", "truncated"),
        ("<answer>[100, 50, 300, 400]</answer> and", None),
        ("<answer>red</answer>", "not_a_box"),
    ],
)
def test_a_text_cut_by_the_length_limit_is_named_truncated(text: str, reason: str | None) -> None:
    task = Grounding()
    score = task.score(_sample(), text, _context(stop=StopReason.LENGTH))
    assert score.reason == reason
    assert task.summarize([score])["truncated_rate"] == float(reason == "truncated")


@pytest.mark.parametrize(
    "box",
    ["[300, 400, 100, 50]", "[5, 5, 5, 5]", "[-50, -50, -10, -10]", "[9000, 9000, 9999, 9999]"],
)
def test_degenerate_and_outside_boxes_score_by_geometry(box: str) -> None:
    score = Grounding().score(_sample(), f"<answer>{box}</answer>", _context())
    assert score.parsed and score.metrics["iou"] == score.parts["accuracy"] == 0
    assert score.metrics["outside_image"] == 1
    assert score.value == pytest.approx(0.1)


garbage = st.one_of(
    st.text(max_size=60),
    st.sampled_from(
        [
            "<answer>[100, 50, 300, 400]</answer>",
            "<answer>",
            "</answer>",
            "<think>",
            "</think>",
            "[100, 50, 300, 400]",
            "<think>a</think><answer>[100, 50, 300, 400]</answer>",
            " ",
            "<|im_end|>",
        ]
    ),
)


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(
        [
            "[100, 50, 300, 400]",
            "[110, 50, 300, 400]",
            "[0, 0, 9, 9]",
            "[1, 2, 3]",
            "[[1,2,3,4],[5,6,7,8]]",
        ]
    ),
    garbage,
    garbage,
    st.sampled_from(["answer", "think"]),
)
def test_garbage_and_second_answers_never_raise_the_reward(
    box: str, before: str, after: str, answer_format: str
) -> None:
    task, ctx = Grounding(answer_format=answer_format), _context()
    body = f"<answer>{box}</answer>"
    clean = ("<think>a</think>" if answer_format == "think" else "") + body
    plain = task.score(_sample(), clean, ctx).value
    assert task.score(_sample(), clean + after, ctx).value <= plain
    assert task.score(_sample(), before + clean, ctx).value <= plain
    # hedging: a wrong answer and then a right one earns no more than the wrong one alone
    if box == "[0, 0, 9, 9]":
        assert task.score(_sample(), clean + "<answer>[100, 50, 300, 400]</answer>", ctx).value == 0


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=300), st.sampled_from(list(CoordFrame)))
def test_any_text_gets_a_bounded_score(text: str, frame: CoordFrame) -> None:
    for body in (text, f"<answer>{text}</answer>"):
        score = Grounding().score(_sample(), body, _context(frame=frame.value))
        assert 0 <= score.value <= 1 and (score.parsed or score.reason)


@settings(deadline=None)
@given(st.floats(-300, 300), st.floats(-300, 300))
def test_moving_towards_the_truth_never_lowers_the_reward(dx: float, dy: float) -> None:
    for mode in MODES:
        values = []
        for k in range(6):
            far = 1 - k / 5
            box = [100 + dx * far, 50 + dy * far, 300 + dx * far, 400 + dy * far]
            values.append(
                Grounding(mode=mode)
                .score(_sample(), f"<answer>{[round(v, 6) for v in box]}</answer>", _context())
                .value
            )
        assert all(b >= a - 1e-6 for a, b in itertools.pairwise(values))
        assert values[-1] == pytest.approx(1)


def test_dynamic_iou_follows_the_progress() -> None:
    task = Grounding(mode="dynamic", iou={"schedule": [[0.5, 0.6], [1.0, 0.9]]})
    text = "<answer>[100, 50, 300, 330]</answer>"  # IoU 0.8
    contexts = [RewardContext(step, 10, CoordFrame.ABS_ORIG, _context().images) for step in (5, 6)]
    early, late = (task.score(_sample(), text, ctx) for ctx in contexts)
    assert early.parts["accuracy"] == pytest.approx(0.8) and late.parts["accuracy"] == 0
    assert early.metrics == late.metrics and late.metrics["acc@0.75"] == 1


def test_v_triune_judges_one_box_as_its_detection_does() -> None:
    sample, detection = (
        _sample((100, 100, 200, 200)),
        task_from_spec("detection", {"preset": "v_triune", "frame": None}),
    )
    objects = replace(
        sample,
        task="detection",
        answer=[{"bbox": [100, 100, 200, 200], "label": "it"}],
        params={**sample.params, "categories": ["it"]},
    )
    task = Grounding(preset="v_triune", frame=None)
    for width, progress, expected in (
        (96, 25, 0.7 * 0.96 + 0.3),
        (96, 26, 0),
        (86, 10, 0.7 * 0.86 + 0.3),
        (84, 10, 0),
        (100, 100, 1),
    ):
        ctx, text = (
            replace(_context(), step=progress, total_steps=100),
            f"<answer>[100, 100, {100 + width}, 200]</answer>",
        )
        value = task.score(sample, text, ctx).parts["accuracy"]
        assert value == pytest.approx(expected)
        assert value == pytest.approx(detection.score(objects, text, ctx).parts["accuracy"])
    average = Grounding(mode="average", accuracy={"completeness": 0.3})
    one = average.score(sample, "<answer>[100, 100, 186, 200]</answer>", _context())
    assert one.parts["accuracy"] == pytest.approx(8 / 11 * (0.7 * 0.86 + 0.3))
    for params, message in (
        ({"mode": "iou"}, "completeness with mode static, dynamic, average, found mode 'iou'"),
        (
            {"mode": "dynamic", "accuracy": {"completeness": 2}},
            r"completeness to be a number in \[0, 1\]",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            Grounding(**{"accuracy": {"completeness": 0.3}, **params})


def test_sources_and_samples_override_the_reward() -> None:
    task = Grounding(mode="dynamic", per_source={"hard": {"accuracy": {"mode": "iou", "power": 2}}})
    text = "<answer>[100, 50, 300, 225]</answer>"  # IoU 0.5
    assert task.score(_sample(), text, _context()).parts["accuracy"] == 0
    assert task.score(_sample(source="hard"), text, _context()).parts["accuracy"] == pytest.approx(
        0.25
    )
    own = _sample(params={"reward": {"accuracy": {"mode": "iou"}, "weights": {"format": 0}}})
    assert task.score(own, text, _context()).value == pytest.approx(0.5)


def test_missing_sizes_are_recorded_not_guessed() -> None:
    ctx = RewardContext(1, 1, CoordFrame.ABS_RESIZED)
    score = Grounding().score(_sample(), "<answer>[1, 2, 3, 4]</answer>", ctx)
    assert not score.parsed and (score.reason or "").startswith("reward_error: expected ctx.images")
    with pytest.raises(DataError, match="abs_resized"):
        Grounding().gold(_sample(), ctx)


def test_messages_hold_pictures_then_text_and_the_words_of_the_frame() -> None:
    sample = replace(_sample(), question="the {frame} of {question}", images=("a.png", "b.png"))
    system, user = Grounding().messages(
        sample, Template("t", CoordFrame.REL1000, system="Be brief.")
    )
    assert system["role"] == "system" and system["content"][0]["text"] == "Be brief."
    assert [c["type"] for c in user["content"]] == ["image", "image", "text"]
    assert (
        '"the {frame} of {question}"' in user["content"][-1]["text"]
        and "0-1000" in user["content"][-1]["text"]
    )
    short = Grounding(prompt="{question}").messages(
        _sample(), Template("t", CoordFrame.ABS_RESIZED)
    )
    assert [m["role"] for m in short] == ["user"] and short[0]["content"][-1][
        "text"
    ] == "red circle"
    assert "<think>" in Grounding(answer_format="think").prompt


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"promt": "x"}, "Did you mean 'prompt'"),
        ({"prompt": "where?"}, r"contains \{question\}"),
        ({"answer_format": "thinking"}, "Did you mean 'think'"),
        ({"mode": "dynamc"}, "Did you mean 'dynamic'"),
        ({"iou": {"treshold": 1}, "mode": "static"}, "Did you mean 'threshold'"),
        ({"weights": {"acc": 1}}, "unknown reward part"),
        ({"weights": 3}, "as a mapping"),
    ],
)
def test_wrong_parameters_are_named(params: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Grounding(**params)


def test_wrong_settings_of_a_row_are_found_when_loading(tmp_path: Path) -> None:
    path = Path(make_scenes(tmp_path, 1, seed=0))
    row = json.loads(path.read_text())
    row["params"]["reward"] = {"accuracy": {"mode": "dynamc"}}
    path.write_text(json.dumps(row))
    with pytest.raises(DataError, match=r"scene-0-000000.*Did you mean 'dynamic'"):
        Grounding().load(str(path))


def test_the_registered_task_loads_scores_and_sums_up(tmp_path: Path) -> None:
    path = make_scenes(tmp_path, 12, seed=0, difficulty=3)
    task = task_from_spec("grounding", {"mode": "dynamic", "reader": {"on_error": "record"}})
    samples = list(task.load(path))
    ctx = RewardContext(1, 1, CoordFrame.ABS_RESIZED, (ImageSize((112, 112), (112, 112)),))
    rows = [task.score(s, task.gold(s, ctx), ctx) for s in samples]
    assert [r.value for r in rows] == [1.0] * 12 and task.headline in rows[0].metrics
    assert task.summarize(rows) == {
        "Acc@0.3": 1,
        "Acc@0.5": 1,
        "Acc@0.7": 1,
        "Acc@0.75": 1,
        "mIoU": 1,
        "parse_failure_rate": 0,
        "truncated_rate": 0,
    }
    assert task.summarize([]) == {}
    half = replace(rows[0], metrics={"iou": 0.5})
    assert task.summarize([half])["Acc@0.5"] == 1, "Acc@0.5 is IoU >= 0.5"


def test_scoring_works_in_threads_and_after_pickling() -> None:
    task, sample, ctx = Grounding(mode="dynamic"), _sample(), _context(frame="rel1000")
    texts = [f"<answer>[{i}, 100, 480, 840]</answer>" for i in range(400)]
    serial = [task.score(sample, text, ctx) for text in texts]
    copy = pickle.loads(pickle.dumps(task))
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda text: copy.score(sample, text, ctx), texts)) == serial
    assert box_iou(serial[156].detail["pred_boxes"][0], sample.answer) == serial[156].metrics["iou"]
