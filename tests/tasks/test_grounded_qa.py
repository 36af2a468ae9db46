"""Grounded QA: letter and time are both judged, both stay in the denominator, tiny spans do not pay."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mmrl.coords import CoordFrame
from mmrl.errors import ConfigError
from mmrl.task import Template
from mmrl.tasks.grounded_qa import GroundedQA
from mmrl.tasks.readers.common import RowError
from mmrl.types import RewardContext, Sample

CTX = RewardContext(1, 1, CoordFrame.REL1000)
OPTIONS = ["dog", "red cat", "cow"]


def _sample(*spans: tuple[float, float], **params: Any) -> Sample:
    return Sample(
        "1",
        "grounded_qa",
        "s",
        "Which animal jumps?",
        {"choice": "B", "spans": [list(s) for s in spans or [(10, 20)]]},
        videos=("v.mp4",),
        params={"duration": 30.0, "options": OPTIONS, **params},
    )


def _score(answer: Any, *spans: tuple[float, float], **params: Any) -> Any:
    text = answer if isinstance(answer, str) else json.dumps(answer)
    return GroundedQA(**params).score(_sample(*spans), f"<answer>{text}</answer>", CTX)


@pytest.mark.parametrize("form", ["answer", "think", "bare"])
@pytest.mark.parametrize(
    "params", [{}, {"mode": "gated"}, {"spans": "many"}, {"time_frame": "rel1"}]
)
@pytest.mark.parametrize("spans", [[(10, 20)], [(2, 5), (8, 12)], [(0, 30)]])
def test_gold_and_wrong(
    form: str, params: dict[str, Any], spans: list[tuple[float, float]]
) -> None:
    task, sample = GroundedQA(answer_format=form, **params), _sample(*spans)
    gold, wrong = (
        task.score(sample, text, CTX) for text in (task.gold(sample, CTX), task.wrong(sample, CTX))
    )
    assert gold.value == pytest.approx(1, abs=1e-4) and gold.metrics["acc_gqa"] == 1
    assert (
        wrong.parsed
        and wrong.parts == {"accuracy": 0, "format": 1}
        and wrong.metrics["correct"] == 0 == wrong.metrics["iou"]
    )


def test_letter_and_time_are_judged_apart() -> None:
    assert _score({"answer": "B", "time": [21, 25]}).parts["accuracy"] == 0.5
    assert _score({"answer": "C", "time": [10, 20]}).parts["accuracy"] == 0.5
    assert _score({"answer": "C", "time": [10, 20]}, mode="gated").parts["accuracy"] == 0
    assert _score({"answer": "B", "time": [10, 15]}, mode="gated").parts["accuracy"] == 0.5
    assert _score({"answer": "B", "time": [10, 15]}, accuracy={"share": 0.2}).parts[
        "accuracy"
    ] == pytest.approx(0.6)


def test_a_tiny_span_or_the_whole_video_is_no_grounding() -> None:
    tiny = _score({"answer": "B", "time": [15, 15.01]})
    assert tiny.metrics["iop"] == pytest.approx(1) and tiny.parts["accuracy"] < 0.51
    point = _score({"answer": "B", "time": [15, 15]})
    assert point.metrics["iop"] == 0 == point.metrics["acc_gqa"] and point.metrics["correct"] == 1
    assert _score({"answer": "B", "time": [0, 30]}).metrics["acc_gqa"] == 0


@pytest.mark.parametrize(
    ("time", "iou", "iop"),
    [
        ([20, 10], 0, 0),
        ([10, 90], 10 / 80, 10 / 80),
        ([-10, 20], 10 / 30, 10 / 30),
        ([0, 1e6], 1e-5, 1e-5),
        ([35, 40], 0, 0),
    ],
)
def test_times_are_judged_as_they_were_said(time: list[float], iou: float, iop: float) -> None:
    score = _score({"answer": "B", "time": time})
    assert score.metrics["iou"] == pytest.approx(iou) and score.metrics["iop"] == pytest.approx(iop)
    assert score.parts["accuracy"] == pytest.approx(0.5 + 0.5 * iou) and score.detail[
        "pred_spans"
    ] == [time]
    union = _score({"answer": "B", "time": [time]}, spans="many")
    assert union.parts["accuracy"] == pytest.approx(0.5 + 0.5 * iou)
    clipped = _score({"answer": "B", "time": [10, 90]}, (10, 30), accuracy={"clip": True})
    assert clipped.parts["accuracy"] == 1 and clipped.metrics["iou"] == 0.25


def test_the_best_true_span_counts() -> None:
    score = _score({"answer": "B", "time": [8, 12]}, (2, 5), (8, 12))
    assert score.value == 1 and score.metrics["iou"] == 1
    both = _score({"answer": "B", "time": [[8, 12]]}, (2, 5), (8, 12), spans="many")
    assert both.parts["accuracy"] == pytest.approx(0.5 + 0.5 * 4 / 7) and both.metrics["iou"] == 1


@pytest.mark.parametrize(
    "answer",
    [
        '{"answer": "B", "time": [10, 20]}',
        '{"answer": "(B) red cat", "time": ["0:10", "0:20"]}',
        "{'choice': 'Red cat', 'span': [10, 20]}",
        '{"option": "b", "start": 10, "end": 20}',
    ],
)
def test_spellings(answer: str) -> None:
    assert _score(answer).value == 1


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ("B", "not_an_object"),
        ("[1, 2]", "not_an_object"),
        ('{"time": [1, 2]}', "no_choice"),
        ('{"answer": 1, "time": [1, 2]}', "no_choice"),
        ('{"answer": "B", "choice": "C", "time": [1, 2]}', "ambiguous_keys"),
        ('{"answer": "B", "answer": "C"}', "ambiguous_keys"),
        ('{"answer": "B"}', "no_time_key"),
        ('{"answer": "B", "time": [1, 2], "span": [3, 4]}', "ambiguous_keys"),
        ('{"answer": "maybe", "time": [1, 2]}', "not_a_choice"),
        ('{"answer": "A or B", "time": [1, 2]}', "several_letters"),
        ('{"answer": "E", "time": [1, 2]}', "letter_out_of_range"),
        ('{"answer": "B", "time": [[1, 2], [3, 4]]}', "several_spans"),
        ("x" * 5000, "answer_too_long"),
    ],
)
def test_failures_are_zeros_with_names(answer: str, reason: str) -> None:
    score = _score(answer)
    assert (score.value, score.parsed, score.reason) == (0, False, reason)
    assert set(score.metrics.values()) == {0.0} and score.detail["gold_text"] == "B. red cat"


def test_the_prompt() -> None:
    text = GroundedQA(spans="many").messages(_sample(), Template("t", CoordFrame.REL1000))[-1][
        "content"
    ][-1]["text"]
    assert text.startswith(
        "Which animal jumps?\nA. dog\nB. red cat\nC. cow\nThe video is 30 seconds long."
    )
    assert '{"answer": "the letter", "time": [[start, end], ...]}' in text and "in seconds" in text
    odd = Sample(
        "1",
        "grounded_qa",
        "s",
        "What does {options} say?",
        {"choice": "A", "spans": [[1, 2]]},
        videos=("v",),
        params={"duration": 3.0, "options": ["{question}", "b"]},
    )
    text = GroundedQA().messages(odd, Template("t", CoordFrame.REL1))[-1]["content"][-1]["text"]
    assert "What does {options} say?\nA. {question}\nB. b\n" in text


def test_preset_and_parameters() -> None:
    task = GroundedQA(preset="videochat_r1")
    score = task.score(_sample(), "<think>x</think><answer>B</answer><glue>[(10, 15)]</glue>", CTX)
    assert score.value == pytest.approx(1 + 0.5 + 1) and task.value_range == (0, 3)
    halves = [
        task.score(_sample(), f"<think>x</think><answer>{letter}</answer>{glue}", CTX).value
        for letter, glue in (
            ("B", ""),
            ("?", "<glue>[(10, 15)]</glue>"),
            ("B", "<glue>[(15, 10)]</glue>"),
            ("?", ""),
        )
    ]
    assert halves == [1, pytest.approx(1.5), 1, 0], "each half is judged apart, and so is the form"
    gold, wrong = (
        task.score(_sample(), text, CTX)
        for text in (task.gold(_sample(), CTX), task.wrong(_sample(), CTX))
    )
    assert gold.value == 3 and wrong.parts["accuracy"] == 0 and wrong.parts["format"] == 1
    for params, text in (
        ({"mode": "men"}, "Did you mean 'mean'"),
        ({"accuracy": {"share": 2}}, "share"),
        ({"accuracy": {"clip": 1}}, "clip true"),
        ({"spans": "three"}, "grounded_qa.spans"),
    ):
        with pytest.raises(ConfigError, match=text):
            GroundedQA(**params)


def test_rows_are_checked() -> None:
    def check(value: Any, options: Any = OPTIONS) -> Any:
        return GroundedQA().check_answer(
            value, CoordFrame.ABS_ORIG, [], {"duration": 30.0, "options": options}
        )

    assert check({"choice": "red cat", "spans": [[-0.1, 5]]}) == {
        "choice": "B",
        "spans": [[-0.1, 5]],
    }, "as NExT-GQA has it"
    for value, options, text in (
        ("B", OPTIONS, '"choice": "B"'),
        ({"choice": "B", "spans": []}, OPTIONS, "at least one span"),
        ({"choice": "B", "spans": [[5, 2]]}, OPTIONS, "start before end"),
        ({"choice": "E", "spans": [[1, 2]]}, OPTIONS, "letter_out_of_range"),
        ({"choice": "B", "spans": [[1, 2]]}, [], "params.options"),
    ):
        with pytest.raises(RowError, match=text):
            check(value, options)


def test_summary_over_all_questions_and_example_data(tmp_path: Path) -> None:
    task = GroundedQA()
    rows = [
        _score({"answer": "B", "time": [10, 20]}),
        _score({"answer": "B", "time": [10, 30]}),
        _score({"answer": "C", "time": [12, 14]}),
        _score("nothing"),
    ]
    summary = task.summarize(rows)
    assert summary == pytest.approx(
        {
            "Acc": 0.5,
            "mIoP": 2.5 / 4,
            "IoP@0.3": 0.75,
            "IoP@0.5": 0.75,
            "mIoU": 1.7 / 4,
            "IoU@0.3": 0.5,
            "IoU@0.5": 0.5,
            "Acc@GQA": 0.5,
            "parse_failure_rate": 0.25,
            "truncated_rate": 0,
        }
    )
    samples = list(task.load(task.example_data(str(tmp_path))))
    assert len(samples) == 8 and all(
        task.score(s, task.gold(s, CTX), CTX).value == 1 for s in samples
    )
