"""`answers: official` through whole tasks: a completion's text, read by the benchmark's extractor, to its number."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from mmrl.coords import CoordFrame
from mmrl.errors import ConfigError
from mmrl.registry import task_from_spec
from mmrl.rewards.parsing import strip_end_tokens
from mmrl.types import ImageSize, RewardContext, Sample, StopReason
from scripts._extractor_cases import OPTIONS

FIXTURES = Path(__file__).resolve().parents[2] / "assets" / "fixtures" / "extractors"
LETTERS = "ABCD"
SIZE = (ImageSize((1280, 720), (1280, 720)),)
CTX = RewardContext(1, 1, CoordFrame.ABS_ORIG, SIZE)


def cases(extractor: str, task: str) -> list[dict[str, Any]]:
    """Without those whose white space at the ends, or end-of-turn token, is no part of a reply here."""
    rows = json.loads((FIXTURES / f"{extractor}.{task}.json").read_text(encoding="utf-8"))["cases"]
    return [row for row in rows if strip_end_tokens(row["text"]) == row["text"]]


def sample(task: str, answer: Any, params: Mapping[str, Any] | None = None) -> Sample:
    return Sample(
        "1",
        task,
        "x",
        "q",
        answer,
        ("a.png",),
        params={"width": 1280, "height": 720, **(params or {})},
    )


@pytest.mark.parametrize("answer_format", ["answer", "bare"])
@pytest.mark.parametrize(
    "name", sorted(f.name.split(".")[0] for f in FIXTURES.glob("*.choice.json"))
)
def test_a_choice_is_right_for_the_truths_the_program_calls_right(
    name: str, answer_format: str
) -> None:
    task = task_from_spec(
        "choice", {"answers": "official", "extractor": name, "answer_format": answer_format}
    )
    asked = {letter: sample("choice", letter, {"options": list(OPTIONS)}) for letter in LETTERS}
    for row in cases(name, "choice"):
        right = [
            letter
            for letter in LETTERS
            if task.score(asked[letter], row["text"], CTX).metrics["correct"]
        ]
        certain = row["official"] != "chance" and len(row["official"]) == 1 and row["text"] != ""
        if answer_format == "answer" and "<answer>" in row["text"]:
            certain = False  # an envelope that was not closed holds no reply
        assert right == (row["official"] if certain else []), row


def test_shuffled_options_are_read_as_they_were_shown() -> None:
    task = task_from_spec(
        "choice", {"answers": "official", "extractor": "mmmu", "shuffle_options": True}
    )
    seen = set()
    for number in range(8):
        asked = Sample(
            str(number), "choice", "x", "q", "B", ("a.png",), params={"options": list(OPTIONS)}
        )
        text = task.gold(asked, CTX).removeprefix("<answer>").removesuffix("</answer>")
        assert task.score(asked, f"I would say ({text}).", CTX).metrics["correct"]
        assert not task.score(asked, f"I would say ({task.wrong(asked, CTX)[8]}).", CTX).metrics[
            "correct"
        ]
        seen.add(text)
    assert len(seen) > 1


@pytest.mark.parametrize("name", ["mmmu", "videommmu"])
def test_open_answers_are_right_by_the_programs_own_rule(name: str) -> None:
    """Not by the task's own: "12 kg" is right for 12, and F1 of the words alone makes nothing right."""
    task = task_from_spec(
        "open_text", {"answers": "official", "extractor": name, "answer_format": "bare"}
    )
    rows = [row for row in cases(name, "open_text") if row["text"]]
    for row in rows:
        found = task.score(sample("open_text", row["truth"]), row["text"], CTX)
        assert found.metrics["correct"] == float(row["official"]) or found.reason == "not_text", (
            row,
            found,
        )
    refused = [
        row["text"]
        for row in rows
        if task.score(sample("open_text", row["truth"]), row["text"], CTX).reason == "not_text"
    ]
    assert refused == [], "a list of numbers is no text"
    strict = task_from_spec("open_text", {"answers": "strict", "answer_format": "bare"})
    assert not strict.score(sample("open_text", "12"), "The mass is 12 kg", CTX).metrics["correct"]
    swapped = sample("open_text", "red cat on a mat here")
    assert strict.score(swapped, "on a mat red cat here", CTX).metrics["correct"]
    assert not task.score(swapped, "on a mat red cat here", CTX).metrics["correct"]


def test_vsi_benchs_first_word() -> None:
    task = task_from_spec("numeric", {"answers": "official", "extractor": "vsibench"})
    for row in cases("vsibench", "numeric"):
        for truth, value in row["official"].items():
            found = task.score(
                sample("numeric", truth, {"reward": {"accuracy": {"mode": "mra"}}}),
                row["text"],
                CTX,
            )
            assert found.metrics["mra"] == pytest.approx(value, abs=1e-6), row


def test_pixmo_counts_last_word() -> None:
    task = task_from_spec("counting", {"answers": "official", "extractor": "pixmo_count"})
    for row in cases("pixmo_count", "counting"):
        for truth in (0, 2, 3, 4, 12, 20, 100):
            assert task.score(sample("counting", truth), row["text"], CTX).metrics.get(
                "correct", 0.0
            ) == float(truth in row["official"]), row


def test_mathvistas_numbers() -> None:
    task = task_from_spec("numeric", {"answers": "official", "extractor": "mathvista"})
    for row in cases("mathvista", "numeric"):
        found = task.score(sample("numeric", row["truth"], row["params"]), row["text"], CTX)
        assert found.metrics["correct"] == float(row["official"]), row


def test_refcocos_first_box() -> None:
    task = task_from_spec(
        "grounding", {"answers": "official", "extractor": "refcoco", "answer_format": "bare"}
    )
    for row in cases("refcoco", "grounding"):
        x1, y1, x2, y2 = row["official"]
        truth = [10, 20, 50, 60]
        wide, high = max(0, min(x2, 50) - max(x1, 10)), max(0, min(y2, 60) - max(y1, 20))
        area = max(0, x2 - x1) * max(0, y2 - y1)
        iou = wide * high / (area + 1600 - wide * high)
        assert task.score(sample("grounding", truth), row["text"], CTX).metrics[
            "iou"
        ] == pytest.approx(iou, abs=1e-9), row


@pytest.mark.parametrize("name", ["screenspot", "screenspot_points"])
def test_clicks_are_in_the_cells_where_the_program_has_them(name: str) -> None:
    task = task_from_spec("gui_grounding", {"answers": "official", "extractor": name})
    frame = RewardContext(1, 1, CoordFrame.REL1, SIZE)
    for row in cases(name, "gui_grounding"):
        for cell in range(16):
            left, top = cell % 4 / 4, cell // 4 / 4
            x, y = row["official"] or (-1, -1)
            inside = left <= x <= left + 0.25 and top <= y <= top + 0.25
            asked = sample(
                "gui_grounding", [left * 1280, top * 720, (left + 0.25) * 1280, (top + 0.25) * 720]
            )
            assert task.score(asked, row["text"], frame).metrics["inside"] == float(inside), (
                row,
                cell,
            )


def test_replies_in_an_envelope_and_cut_ones() -> None:
    """What stands inside <answer> is the reply; one that the length limit cut is read, as the programs read it; no thoughts."""
    task = task_from_spec("choice", {"answers": "official", "extractor": "mmmu"})
    asked = sample("choice", "B", {"options": list(OPTIONS)})
    cut = RewardContext(1, 1, CoordFrame.ABS_ORIG, SIZE, stop=StopReason.LENGTH)
    assert task.score(asked, "Not (A). <answer>It is (B), surely</answer>", CTX).metrics["correct"]
    assert task.score(asked, "<think>(A) or (C)?</think> It is (B)", CTX).metrics["correct"]
    assert task.score(asked, "It is (B), because of the", cut).metrics["correct"]
    assert task.score(asked, "<think>It is (B), because of the", cut).reason == "truncated"
    assert not task.score(asked, "<answer>(B)</answer><answer>(C)</answer>", CTX).parsed
    native = task_from_spec("choice", {"answers": "native", "extractor": "mmmu"})
    assert not native.score(asked, "It is (B), because of the", cut).parsed, (
        "other levels: cut short is no answer"
    )


def test_an_extractor_is_named_and_fits_the_task() -> None:
    with pytest.raises(
        ConfigError,
        match=r"expected choice.extractor with answers: official, .* found none; name one of mmmu",
    ):
        task_from_spec("choice", {"answers": "official"})
    with pytest.raises(ConfigError, match="answers of task counting, pixmo_count, found 'mmmu'"):
        task_from_spec("counting", {"answers": "official", "extractor": "mmmu"})
    mixed: Any = task_from_spec(
        "mixed", {"shared": {"answers": "official", "extractor": "vsibench"}}
    )
    assert mixed.member("numeric").extractor == "vsibench"
    with pytest.raises(
        ConfigError,
        match=r"mixed.tasks.boolean: expected an extractor for answers of task boolean, tempcompass",
    ):
        mixed.member("boolean")
