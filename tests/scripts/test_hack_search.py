"""The search finds what pays without looking where a rule pays for it, and nothing better than half right at the defaults."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mmrl.registry import BUILT_IN, resolve_task
from mmrl.rewards.format import wrap_answer
from scripts._bench import RESULTS
from scripts._hack_data import asked, half_right
from scripts._reward_cases import RewardCase
from scripts.hack_search import Search, all_rewards, chosen, standing, table, verdict

ALL = {case.name: case for case in all_rewards()}


def searched(name: str, most: int = 3000) -> dict[str, Any]:
    return Search(ALL[name], most, seconds=60).run()


@pytest.fixture(scope="module")
def recorded() -> dict[str, Any]:
    return json.loads((RESULTS / "hack_search.json").read_text(encoding="utf-8"))["rewards"]  # type: ignore[no-any-return]


def test_every_default_preset_and_mode_was_searched_and_defaults_hold(
    recorded: dict[str, Any],
) -> None:
    assert recorded.keys() == ALL.keys(), "python -m scripts.hack_search --only NAME"
    tasks = set(BUILT_IN) - {"mixed"}
    assert (
        tasks <= ALL.keys()
        and {f"{t}:{p}" for t in tasks for p in resolve_task(t).presets} <= ALL.keys()
    )
    verdicts = {name: verdict(row) for name, row in recorded.items()}
    assert {
        name
        for name, found in verdicts.items()
        if found != "holds" and standing(name, recorded[name]) == "default"
    } == set()
    assert (
        verdicts["counting:perception_r1"]
        == verdicts["gui_grounding:gui_rcpo"]
        == "pays for guessing"
    )
    assert (
        verdicts["detection:v_triune"] == "pays for padding"
        and verdicts["counting:points"] == "holds"
    )


def test_rewards_are_chosen_by_the_beginning_of_their_names_or_by_whole_names() -> None:
    assert [case.name for case in chosen(["st_grounding", "ocr"], exact=True)] == [
        "st_grounding",
        "ocr",
    ]
    assert {case.name for case in chosen(["st_grounding"])} == {
        name for name in ALL if name.startswith("st_grounding")
    }
    assert [case.name for case in chosen(["st_grounding", "boolean"], defaults=True)] == [
        "st_grounding",
        "boolean",
    ]
    assert chosen([""]) == list(ALL.values()) and not chosen(["groundin"], exact=True)


def test_the_page_is_written_from_the_record(recorded: dict[str, Any]) -> None:
    assert (RESULTS / "hack_search.md").read_text(encoding="utf-8") == table(recorded)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("counting:smooth", "pays for guessing"),
        ("boolean", "holds"),
        ("gui_grounding:gui_rcpo", "pays for guessing"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("counting:perception_r1", "pays for guessing"),
                ("counting:points", "holds"),
                ("detection:v_triune", "pays for padding"),
                ("grounding", "holds"),
                ("temporal_grounding", "holds"),
                ("detection", "holds"),
            )
        ),
    ],
)
def test_a_short_search_comes_to_the_same(name: str, expected: str) -> None:
    row = searched(name)
    assert verdict(row) == expected, row
    assert row["right"] > row["honest"] and row["evaluations"] >= 2000
    if expected == "holds":
        assert row["blind"] < row["honest"] < row["right"]


@pytest.mark.slow
def test_a_planted_hole_is_found(tmp_path: Any) -> None:
    path = tmp_path / "holes.py"
    path.write_text('''
from dataclasses import replace
from mmrl.tasks.grounding import Grounding

class Wide(Grounding):
    """IoU, and full marks for any box that is wider than nine tenths of the picture."""
    name = "grounding"

    def score(self, sample, text, ctx):
        score = super().score(sample, text, ctx)
        boxes = score.detail.get("pred_boxes") or []
        wide = any(b[2] - b[0] > 0.9 * 640 and b[3] - b[1] < 24 for b in boxes)
        return replace(score, value=1.0, parts={**score.parts, "accuracy": 1.0}) if wide else score
''')
    row = Search(RewardCase("hole", f"{path}:Wide"), 60_000, seconds=60).run()
    assert row["blind"] == pytest.approx(1.0) and verdict(row) == "pays for guessing", row["answer"]


@pytest.mark.parametrize(
    "name",
    [
        "grounding",
        "detection",
        "counting:points",
        "ocr",
        "grounding:vlm_r1",
        "grounding:easyvideo_r1",
        "detection:vlm_r1_weighted_sum",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in (
                "temporal_grounding",
                "tracking",
                "st_grounding",
                "tracking:videochat_r1",
            )
        ),
    ],
)
def test_half_right_answers_earn_about_half(name: str) -> None:
    task: Any = ALL[name].make()
    values = []
    for number, one in enumerate(asked(task, 24)):
        found = half_right(task, one, number)
        assert found is not None
        text = wrap_answer(found[1], task.answer_format)
        score = task.score(one.sample, text, one.ctx)
        assert score.parsed, (text, score.reason)
        values.append(score.parts["accuracy"])
    assert 0.4 < sum(values) / len(values) < 0.75
