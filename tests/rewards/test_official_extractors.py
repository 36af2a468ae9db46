"""The benchmarks' own extractors against what the benchmarks' programs made of the same replies (scripts.record_extractors)."""

from __future__ import annotations

import json
import string
from pathlib import Path
from typing import Any

import pytest

from mmrl.errors import ConfigError
from mmrl.rewards.numeric import mra
from mmrl.rewards.official import DEVIATIONS, EXTRACTORS, Asked, check_extractor, extract
from scripts._extractor_cases import OPTIONS
from scripts._extractor_runs import COUNTED, REPOSITORIES, RUNS
from tests.kits.clock_kit import takes_less

FIXTURES = Path(__file__).resolve().parents[2] / "assets" / "fixtures" / "extractors"
FILES = sorted(FIXTURES.glob("*.json"))
LETTERS = "ABCD"


def recorded(extractor: str, task: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(
        (FIXTURES / f"{extractor}.{task}.json").read_text(encoding="utf-8")
    )
    return found


def by_task(task: str) -> list[str]:
    return [
        name
        for name, kinds in EXTRACTORS.items()
        if task in kinds and (FIXTURES / f"{name}.{task}.json").is_file()
    ]


def test_every_extractor_has_its_program_and_forty_replies() -> None:
    assert {(run.extractor, run.task) for run in RUNS} == {
        tuple(file.stem.split(".")) for file in FILES
    }
    without = {(name, task) for name, kinds in EXTRACTORS.items() for task in kinds} - {
        (r.extractor, r.task) for r in RUNS
    }
    assert without == {("mathvista", "open_text"), ("ocrbench", "ocr"), ("pageocr", "ocr")}, (
        "as it stands: nothing to be compared"
    )
    for run in RUNS:
        found = recorded(run.extractor, run.task)
        assert (found["repository"], found["commit"]) == REPOSITORIES[run.folder] and len(
            found["cases"]
        ) >= 40
        assert [
            {k: v for k, v in case.items() if k != "official"} for case in found["cases"]
        ] == json.loads(json.dumps(run.cases)), (
            "the replies changed: python -m scripts.record_extractors --code FOLDER"
        )


@pytest.mark.parametrize("name", by_task("choice"))
def test_letters(name: str) -> None:
    """Right for the same truths; what is chance there, or right for every truth, is wrong here."""
    kinds = set()
    for case in recorded(name, "choice")["cases"]:
        text, official = case["text"], case["official"]
        found = extract(name, text, Asked("choice", "B", OPTIONS, 4))
        assert found.right is None and (found.text == "" or found.text in string.ascii_uppercase)
        kind = (
            "chance"
            if official == "chance"
            else "empty"
            if text == ""
            else "any"
            if len(official) > 1
            else ""
        )
        assert [letter for letter in LETTERS if letter == found.text] == (
            [] if kind else official
        ), text
        kinds.add(kind or ("right" if official else "wrong"))
    chance = {"chance"} if name in ("mmmu", "longvideobench") else set()
    assert kinds - {"any", "empty", "wrong"} == {"right"} | chance
    assert ("any" in kinds) == (name == "mvbench") and set(kinds) - {"right", "wrong"} <= set(
        DEVIATIONS
    )


def test_yes_and_no() -> None:
    for case in recorded("tempcompass", "boolean")["cases"]:
        said = extract("tempcompass", case["text"], Asked("boolean", True)).text
        assert [word for word in ("yes", "no") if word == said] == case["official"], case["text"]


def test_counts() -> None:
    """Also numbers that the program reads by Python's rules: "1_2", other alphabets' digits."""
    seen = set()
    for case in recorded("pixmo_count", "counting")["cases"]:
        said = extract("pixmo_count", case["text"], Asked("counting", 4)).text
        assert [count for count in COUNTED if str(count) == said] == case["official"], case["text"]
        seen |= set(case["official"])
    assert len(seen) > 6


@pytest.mark.parametrize("name", by_task("open_text"))
def test_open_answers(name: str) -> None:
    seen = set()
    for case in recorded(name, "open_text")["cases"]:
        found = extract(name, case["text"], Asked("open_text", case["truth"]))
        assert found.right is case["official"], case
        seen.add(found.right)
    assert seen == {True, False}


def test_vsi_bench_numbers() -> None:
    """The mean relative accuracy of the number that is read."""
    seen = set()
    for case in recorded("vsibench", "numeric")["cases"]:
        said = extract("vsibench", case["text"], Asked("numeric", 3)).text
        ours = {
            truth: round(mra(float(said), float(truth)), 6) if said else 0.0
            for truth in case["official"]
        }
        assert ours == case["official"], case["text"]
        seen |= set(ours.values())
    assert {0.0, 1.0} < seen


def test_mathvista_numbers() -> None:
    seen = set()
    for case in recorded("mathvista", "numeric")["cases"]:
        found = extract(
            "mathvista", case["text"], Asked("numeric", case["truth"], params=case["params"])
        )
        assert bool(found.right) is case["official"], case
        seen.add(bool(found.right))
    assert seen == {True, False}


def test_boxes_of_refcoco() -> None:
    """Zeros, which the program gives for none, are nothing here."""
    read = 0
    for case in recorded("refcoco", "grounding")["cases"]:
        said = extract("refcoco", case["text"], Asked("grounding", None)).text
        assert (json.loads(said) if said else [0, 0, 0, 0]) == case["official"], case
        read += bool(said)
    assert read > 10


@pytest.mark.parametrize("name", ["screenspot", "screenspot_points"])
@pytest.mark.parametrize("extent", [(1.0, 1.0), (1000.0, 1000.0), (1280.0, 720.0)])
def test_clicks(name: str, extent: tuple[float, float]) -> None:
    """Shares of the picture are the program's in every frame; other numbers are left as they are."""
    read = 0
    for case in recorded(name, "gui_grounding")["cases"]:
        found = extract(name, case["text"], Asked("gui_grounding", None, extent=extent)).text
        assert bool(found) == (case["official"] is not None), case
        if not found:
            continue
        ours, official, read = json.loads(found), case["official"], read + 1
        shares = "box>(" in case["text"] if name == "screenspot" else max(official) <= 1
        assert ours == pytest.approx(
            [v * (side if shares else 1) for v, side in zip(official, extent, strict=True)]
        ), case
    assert read > 20


@pytest.mark.parametrize(
    ("name", "task"), [(name, task) for name, kinds in EXTRACTORS.items() for task in kinds]
)
def test_long_replies_cost_little_and_raise_nothing(name: str, task: str) -> None:
    asked = Asked(
        task,
        "12",
        OPTIONS if task == "choice" else (),
        4,
        {"answer_type": "float", "precision": 1},
        (1.0, 1.0),
    )

    def read() -> None:
        for piece in (
            "1",
            "1.",
            "1,",
            "(A",
            "A ",
            "[1, 2, ",
            "so ",
            "=",
            "x=1",
            "<bbox",
            "\u0661",
            "-1e5",
            " ",
            "\n",
            '"',
            "[ ",
            'The answer is "',
        ):
            extract(name, piece * (100_000 // len(piece)), asked)

    takes_less(5, read)


def test_a_wrong_name_is_answered_with_the_nearest() -> None:
    assert check_extractor("mmmu", "choice") == "mmmu"
    with pytest.raises(
        ConfigError,
        match=r"unknown extractor 'mmu' of task choice; expected one of mmmu, .*Did you mean 'mmmu'",
    ):
        check_extractor("mmu", "choice")
    with pytest.raises(
        ConfigError,
        match=r"of task numeric, mathvista, vsibench, found 'mmmu', which reads choice, open_text",
    ):
        check_extractor("mmmu", "numeric")
    with pytest.raises(ConfigError, match="of task jigsaw, of which there is none, found 'mmmu'"):
        check_extractor("mmmu", "jigsaw")
