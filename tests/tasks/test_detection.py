"""Detection: gold 1 and wrong 0 in every frame and preset, closed and open vocabulary, cut answers, bad rows."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mmrl.coords import CoordFrame
from mmrl.errors import ConfigError, DataError
from mmrl.registry import task_from_spec
from mmrl.rewards.detection import MODES
from mmrl.rewards.objects import MAX_OBJECTS
from mmrl.task import Template
from mmrl.tasks.detection import Detection
from mmrl.tasks.scenes import make_scenes
from mmrl.types import ImageSize, RewardContext, Sample, StopReason

CAT, DOG = (
    {"bbox": [100.0, 50.0, 300.0, 400.0], "label": "Cat"},
    {"bbox": [320.0, 60.0, 600.0, 300.0], "label": "small dog"},
)
SIZE = ImageSize((640, 480), (644, 476))


def _context(frame: str = "abs_orig", **options: Any) -> RewardContext:
    return RewardContext(options.pop("step", 1), 1, CoordFrame(frame), (SIZE,), **options)


def _sample(answer: list[dict[str, Any]] | None = None, **params: Any) -> Sample:
    return Sample(
        "1",
        "detection",
        "s",
        "cats and dogs",
        [CAT, DOG] if answer is None else answer,
        ("a.png",),
        params={"width": 640, "height": 480, **params},
    )


SAMPLES = {
    "open": _sample(),
    "closed": _sample(categories=["cat", "small dog", "bird"]),
    "one": _sample([CAT], categories=["CAT"]),
    "nothing": _sample([], categories=["cat"]),
    "nothing of three": _sample([], categories=["a", "b", "c"]),
    "empty": _sample([]),
}


@pytest.mark.parametrize("name", SAMPLES)
@pytest.mark.parametrize(
    "params",
    [{"preset": p} for p in [None, *Detection.presets]] + [{"mode": m} for m in MODES],
    ids=str,
)
def test_gold_is_best_and_wrong_is_zero_in_every_frame(name: str, params: dict[str, Any]) -> None:
    task, sample = Detection(**params), SAMPLES[name]
    for frame in CoordFrame:
        for step in (0, 1):
            ctx = _context(frame, step=step)
            gold = task.score(sample, task.gold(sample, ctx), ctx)
            assert gold.parsed and gold.value >= 0.97 * task.value_range[1], (frame, gold)
            assert gold.metrics["correct"] == gold.metrics["count_ok"] == 1
            wrong = task.score(sample, task.wrong(sample, ctx), ctx)
            assert (
                wrong.parsed
                and wrong.parts["accuracy"] == 0
                and not any(v for k, v in wrong.metrics.items() if k != "count_ok")
            ), (frame, wrong)


def test_gold_answers_are_spelled_as_asked() -> None:
    task, ctx = Detection(), _context()
    assert (
        task.gold_answer(SAMPLES["one"], ctx) == "[[100, 50, 300, 400]]"
        and task.gold_answer(SAMPLES["nothing"], ctx) == "[]"
    )
    assert json.loads(task.gold_answer(SAMPLES["open"], ctx)) == [
        {"bbox_2d": [100, 50, 300, 400], "label": "Cat"},
        {"bbox_2d": [320, 60, 600, 300], "label": "small dog"},
    ]
    two = _sample([CAT, {**CAT, "bbox": [1, 2, 3, 4]}], categories=["cat"])
    assert task.gold_answer(two, ctx) == "[[100, 50, 300, 400], [1, 2, 3, 4]]"


def test_the_prompt_shows_the_shape_that_is_asked_for() -> None:
    def text(task: Detection, sample: Sample) -> str:
        return str(
            task.messages(sample, Template("t", CoordFrame.REL1000))[-1]["content"][-1]["text"]
        )

    one = text(Detection(), SAMPLES["one"])
    assert "[[x1, y1, x2, y2], ...], or [] if" in one and "0-1000" in one
    for name in ("open", "closed"):
        assert '[{"bbox_2d": [x1, y1, x2, y2], "label": "..."}, ...]' in text(
            Detection(), SAMPLES[name]
        )
    assert Detection.shape == '[{"bbox_2d": [x1, y1, x2, y2], "label": "..."}, ...]', (
        "what `tasks list` shows"
    )
    own = Detection(prompt="Locate {categories} {frame} for {question}")
    assert text(own, SAMPLES["closed"]).startswith("Locate cat, small dog, bird scaled")
    assert text(own, replace(SAMPLES["one"], question="{shape} {frame}")).endswith(
        "for {shape} {frame}"
    )


@pytest.mark.parametrize(
    ("name", "answer", "reason"),
    [
        ("one", "[100, 50, 300, 400]", None),
        ("one", '[{"bbox_2d": [100, 50, 300, 400]}]', None),
        ("one", '[{"bbox_2d": [100, 50, 300, 400], "label": " cat "}]', None),
        ("open", "[[100, 50, 300, 400]]", "no_label"),
        ("closed", "[[100, 50, 300, 400]]", "no_label"),
        ("one", "a cat", "not_a_box"),
        ("one", "[[1, 2, 3]]", "wrong_count"),
        ("one", str([[1, 2, 3, 4]] * (MAX_OBJECTS + 1)), "too_many_objects"),
    ],
)
def test_what_is_an_answer(name: str, answer: str, reason: str | None) -> None:
    score = Detection().score(SAMPLES[name], f"<answer>{answer}</answer>", _context())
    assert (
        score.reason == reason
        and score.parsed == (reason is None)
        and score.value == (reason is None)
    )
    assert set(score.metrics) == set(Detection.metric_names) and score.detail["gold_boxes"]


def test_wrong_labels_copies_and_floods_cost() -> None:
    task, ctx, sample = Detection(), _context(), SAMPLES["one"]
    gold = "[100, 50, 300, 400]"
    right = task.score(sample, f"<answer>[{gold}]</answer>", ctx)
    dog = task.score(
        sample, '<answer>[{"bbox_2d": [100, 50, 300, 400], "label": "dog"}]</answer>', ctx
    )
    assert dog.parts["accuracy"] == 0 and dog.parsed and dog.detail["pred_labels"] == ["dog"]
    copies = [
        task.score(sample, f"<answer>[{', '.join([gold] * n)}]</answer>", ctx).value
        for n in (2, 3, 50, MAX_OBJECTS)
    ]
    assert right.value == 1 > copies[0] > copies[1] > copies[2] > copies[3]
    assert (
        task.score(sample, f"<answer>[{gold}]</answer><answer>[{gold}]</answer>", ctx).reason
        == "several_answers"
    )


@pytest.mark.parametrize("answer_format", ["answer", "think", "bare"])
def test_an_answer_cut_by_the_length_limit_keeps_its_complete_objects(answer_format: str) -> None:
    task, sample = Detection(answer_format=answer_format), SAMPLES["closed"]
    opening = {"answer": "<answer>", "think": "<think>[[1, 2, 3, 4]</think><answer>", "bare": ""}[
        answer_format
    ]
    text = opening + '[{"bbox_2d": [100, 50, 300, 400], "label": "cat"}, {"bbox_2d": [320, 60, 60'
    score = task.score(sample, text, _context(stop=StopReason.LENGTH))
    assert (
        score.parsed
        and score.reason == "truncated"
        and score.detail["pred_boxes"] == [[100, 50, 300, 400]]
    )
    assert score.parts["accuracy"] == pytest.approx(2 / 3) and score.metrics["recall@0.5"] == 0.5
    assert score.parts["format"] == (answer_format == "bare")
    assert task.summarize([score]) == {"parse_failure_rate": 0, "truncated_rate": 1}
    ended = task.score(sample, text, _context())
    assert not ended.parsed and ended.reason in ("unclosed_answer", "not_a_box"), (
        "a complete text is never repaired"
    )
    strict = Detection(answer_format=answer_format, keep_truncated=False).score(
        sample, text, _context(stop=StopReason.LENGTH)
    )
    assert (strict.parsed, strict.reason, strict.value) == (False, "truncated", 0)
    nothing = task.score(sample, opening + '[{"bbox_2d": [100, 5', _context(stop=StopReason.LENGTH))
    assert (nothing.parsed, nothing.reason) == (False, "truncated")
    whole = task.score(sample, task.gold(sample, _context()), _context(stop=StopReason.LENGTH))
    assert whole.value == 1 and whole.reason is None, (
        "an answer that was complete is not called cut"
    )


def test_a_box_upon_nothing_earns_nothing_where_a_truth_is_thinner_than_the_grid() -> None:
    size = ImageSize((108, 33), (112, 28))
    boxes = [
        [31.8, 21.92, 95.59, 22.24],
        [11.4, 7.74, 52.4, 13.02],
        [67.51, 19.01, 85.41, 30.79],
        [0, 0, 16.5, 17.01],
    ]
    sample = Sample(
        "1",
        "detection",
        "s",
        "cats",
        [{"bbox": box, "label": "cat"} for box in boxes],
        ("a.png",),
        params={"categories": ["cat"], "width": 108, "height": 33},
    )
    ctx = RewardContext(1, 1, CoordFrame.ABS_RESIZED, (size,))
    task = Detection(preset="perception_r1")
    beside = task.score(sample, "[[100, 0, 112, 28]]", ctx)
    assert beside.parsed and beside.value == 0, (
        "the thin truth rounded to whole pixels missed itself: this once earned 1.175"
    )
    gold = task.score(sample, task.gold(sample, ctx), ctx)
    assert gold.parts["accuracy"] > 2, "the truth as the grid can spell it finds all four"


def test_the_dynamic_threshold_follows_progress_and_the_grid() -> None:
    sample = _sample([{"bbox": [10.4, 10.4, 18.6, 18.6], "label": "cat"}], categories=["cat"])
    text = "<answer>[[10, 10, 19, 19]]</answer>"  # the best integers: IoU 0.83
    for reachable, least in ((True, 0.8), (False, 0.0)):
        task = Detection(preset="v_triune", reachable=reachable, frame=None)
        scores = [task.score(sample, text, _context(step=s)) for s in (0, 1)]
        assert all((s.parts["accuracy"] > least) == reachable for s in scores)
    early, late = (
        Detection(mode="v_triune").score(
            SAMPLES["one"],
            "<answer>[[100, 50, 300, 375]]</answer>",
            RewardContext(s, 100, CoordFrame.ABS_ORIG, (SIZE,)),
        )
        for s in (5, 90)
    )
    assert (
        early.parts["accuracy"] == pytest.approx(0.7 * 325 / 350 + 0.3)
        and late.parts["accuracy"] == 0
    )
    assert early.metrics == late.metrics


def _row(tmp_path: Path, **changes: Any) -> str:
    make_scenes(tmp_path, 1, seed=0)
    row = json.loads((tmp_path / "data.jsonl").read_text())
    row |= {
        "answer": [{"bbox": [1, 2, 30, 40], "label": "cat"}],
        "params": {"categories": ["cat", "dog"]},
        **changes,
    }
    (tmp_path / "own.jsonl").write_text(json.dumps(row))
    return str(tmp_path / "own.jsonl")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"answer": {"bbox": [1, 2, 3, 4]}}, "a list of objects"),
        ({"answer": [[1, 2, 30, 40]]}, "a list of objects"),
        ({"answer": [{"label": "cat"}]}, "one key 'bbox' per object"),
        ({"answer": [{"bbox": [1, 2, 30, 40]}]}, "text in 'label'"),
        ({"answer": [{"bbox": [30, 2, 1, 40], "label": "cat"}]}, "x1 < x2"),
        ({"answer": [{"bbox": [1, 2, 300, 40], "label": "cat"}]}, "a box inside the picture"),
        (
            {"answer": [{"bbox": [1, 2, 30, 40], "label": "dgo"}]},
            r"labels among params.categories \(cat, dog\).*Did you mean 'dog'",
        ),
        (
            {"answer": [{"bbox": [1, 2, 30, 40], "label": "_"}], "params": {}},
            "a label with letters",
        ),
        ({"params": {"categories": ["traffic_light", "traffic light"]}}, "different names"),
        ({"params": {"categories": "cat"}}, "categories as a list of names"),
        ({"params": {"categories": []}}, "a list of names"),
        ({"params": {"categories": ["cat", "Cat "]}}, "different names"),
        ({"params": {"image_index": 1}}, "image_index"),
        (
            {"answer": [{"bbox": [1, 2, 30, 40], "label": "cat"}] * (MAX_OBJECTS + 1)},
            f"at most {MAX_OBJECTS} objects",
        ),
        ({"params": {"reward": {"accuracy": {"mode": "v_triun"}}}}, "Did you mean 'v_triune'"),
    ],
)
def test_bad_rows_are_named_or_recorded(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    path = _row(tmp_path, **changes)
    with pytest.raises(DataError, match=message):
        Detection().load(path)
    task = Detection(reader={"on_error": "record"})
    assert list(task.load(path)) == [] and len(task.rejected) == 1


def test_rows_in_other_frames_and_spellings_become_pixels(tmp_path: Path) -> None:
    path = _row(
        tmp_path, answer=[{"bbox_2d": [0, 0, 500, 1000], "label": " cat "}], frame="rel1000"
    )
    assert next(iter(Detection().load(path))).answer == [{"bbox": [0, 0, 56, 112], "label": "cat"}]
    path = _row(tmp_path, answer=[[1, 2, 30, 40]], params={"categories": ["cat"]})
    assert next(iter(Detection().load(path))).answer == [{"bbox": [1, 2, 30, 40], "label": "cat"}]


def test_examples_cover_closed_open_and_empty_questions_and_survive_pickling(
    tmp_path: Path,
) -> None:
    task = task_from_spec("detection", {})
    samples = list(task.load(task.example_data(str(tmp_path)) or ""))
    assert {len(s.params.get("categories", [])) for s in samples} == {0, 1, 3} and any(
        not s.answer for s in samples
    )
    ctx, copy = (
        RewardContext(1, 1, CoordFrame.ABS_ORIG, (ImageSize((112, 112), (112, 112)),)),
        pickle.loads(pickle.dumps(task)),
    )
    rows = [task.score(s, task.gold(s, ctx), ctx) for s in samples]
    assert [r.value for r in rows] == pytest.approx([1.0] * len(samples))
    assert rows == [copy.score(s, task.gold(s, ctx), ctx) for s in samples]


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"mode": "f2"}, "unknown detection mode"),
        ({"accuracy": {"treshold": 0.5}}, "Did you mean 'threshold'"),
        ({"preset": "vtriune"}, "Did you mean 'v_triune'"),
        ({"keep_truncatd": True}, "Did you mean 'keep_truncated'"),
    ],
)
def test_wrong_parameters_are_named(params: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Detection(**params)


def test_underscores_in_labels_are_spaces_for_reward_and_benchmark_alike(tmp_path: Path) -> None:
    sample = _sample([{**CAT, "label": "traffic_light"}], categories=["traffic_light", "dog"])
    for name in ("traffic light", "Traffic_Light"):
        text = f'<answer>[{{"bbox_2d": [100, 50, 300, 400], "label": "{name}"}}]</answer>'
        score = Detection().score(sample, text, _context())
        assert score.value == score.metrics["correct"] == 1
        assert Detection().benchmark([(sample, score)], tmp_path)["AP"] == pytest.approx(1)


def test_the_benchmark_is_cocos_and_failures_stay_in_it(tmp_path: Path) -> None:
    task, ctx, sample = Detection(), _context(), SAMPLES["closed"]
    right = task.score(sample, task.gold(sample, ctx), ctx)
    failed = task.score(replace(sample, id="2"), "no idea", ctx)
    assert task.benchmark([(sample, right)], tmp_path)["AP"] == pytest.approx(1)
    numbers = task.benchmark([(sample, right), (replace(sample, id="2"), failed)], tmp_path)
    assert numbers["AR100"] == pytest.approx(0.5) and any(tmp_path.iterdir())
