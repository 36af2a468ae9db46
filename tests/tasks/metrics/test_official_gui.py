"""GUI benchmarks against what the official programs gave for the same answers (assets.make_official_goldens tells how)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from assets.make_official_goldens import load
from mmrl.rewards.gui_actions import RULES, Action, match_action, same_text
from mmrl.tasks.metrics.gui import Spot, Step, android_control, screenspot, screenspot_pro

Row = Mapping[str, Any]


def action(row: Row | None, box: list[float] | None = None) -> Action | None:
    if row is None:
        return None
    point = (float(row["point"][0]), float(row["point"][1])) if "point" in row else None
    return Action(
        row["action"],
        point,
        (box[0], box[1], box[2], box[3]) if box else None,
        None,
        row.get("text", row.get("app")),
        row.get("direction"),
    )


def steps_of(rows: list[Row], size: tuple[int, int]) -> list[Step]:
    steps = []
    for row in rows:
        true = action(row["true"], row.get("sam2_bbox"))
        assert true is not None
        steps.append(Step(action(row["found"]), true, size, row.get("episode")))
    return steps


def test_screenspot_is_seeclicks() -> None:
    """Six cells (mobile, desktop, web x text, icon), answers without a point, boxes of which the middle counts, edges."""
    given, golden = load("screenspot")
    width, height = given["image_size"]
    spots = []
    for platform, rows in given["files"].items():
        for row in rows:
            x, y, w, h = row["bbox"]
            point = row["point"] and (row["point"][0] * width, row["point"][1] * height)
            spots.append(Spot(platform, row["data_type"], point, (x, y, x + w, y + h)))
    numbers = screenspot(spots)
    cells = [
        numbers[f"{platform}_{kind}"]
        for platform in ("mobile", "desktop", "web")
        for kind in ("text", "icon")
    ]
    assert (
        cells == pytest.approx([cell for row in golden["text_icon"] for cell in row], abs=1e-12)
        and len(set(cells)) > 3
    )
    assert numbers["mean_of_6_cells"] == pytest.approx(sum(cells) / 6)
    hits = sum(
        share * count for share, count in zip(golden["action_acc"], golden["total"], strict=True)
    )
    assert numbers["micro"] == pytest.approx(hits / len(spots))
    assert (
        numbers["wrong_format"] == pytest.approx(sum(golden["wrong_format"]) / len(spots))
        and numbers["wrong_format"] > 0
    )


def test_screenspot_pro_is_the_official_report() -> None:
    given, golden = load("screenspot_pro")
    spots = [
        Spot(
            row["platform"],
            row["ui_type"],
            row["point"]
            and (row["point"][0] * row["img_size"][0], row["point"][1] * row["img_size"][1]),
            tuple(row["bbox"]),
            row["group"],
        )
        for row in given["rows"]
    ]
    assert screenspot_pro(spots) == {
        "overall": golden["overall"],
        **golden["leaderboard_simple_style"],
    }
    words = [
        "correct" if spot.hit else "wrong_format" if spot.point is None else "wrong"
        for spot in spots
    ]
    assert words == golden["correctness"] and set(words) == {"correct", "wrong", "wrong_format"}


def test_os_atlas_is_its_program() -> None:
    given, golden = load("os_atlas")
    steps = steps_of(given["steps"], (1000, 1000))
    hits, counts = golden["hits"], golden["counts"]
    numbers = android_control(steps, "os_atlas")
    assert numbers == {
        "type_accuracy": pytest.approx(hits["type_match"] / counts["full"]),
        "grounding": pytest.approx(hits["CLICK_all_match"] / hits["CLICK_type_match"]),
        "step_success": pytest.approx(hits["full"] / counts["full"]),
    }
    printed = golden["printed"]
    assert [f"{numbers[name]:f}" for name in ("step_success", "type_accuracy", "grounding")] == [
        printed["Acc"],
        printed["type_match acc"],
        printed["grounding acc"],
    ]
    for name, said in (
        ("IDD", "iid"),
        ("app_unseen", "app_unseen"),
        ("task_unseen", "task_unseen"),
        ("category_unseen",) * 2,
    ):
        part = [
            step for step, row in zip(steps, given["steps"], strict=True) if row["split"] == name
        ]
        assert f"{android_control(part, 'os_atlas')['step_success']:f}" == printed[said]


def test_os_atlas_compares_the_first_words_with_their_brackets() -> None:
    """Its texts are written [new york], so that the only word of one text, [new], is not the first of several, [new."""
    given, golden = load("os_atlas")
    assert [same_text(found, true, "first_word") for true, found in given["texts"]] == golden[
        "text_right"
    ]


def test_gui_r1_is_its_program() -> None:
    given, golden = load("gui_r1")
    numbers = android_control(steps_of(given["steps"], tuple(given["size"])), "gui_r1")
    printed = golden["steps"]["printed"]
    assert numbers == pytest.approx(
        {
            "type_accuracy": printed["Type"],
            "grounding": printed["GR"],
            "step_success": printed["Step"],
        },
        abs=1e-12,
    )


def test_gui_r1_compares_words_as_its_program() -> None:
    given, golden = load("gui_r1")
    assert [same_text(found, true, "f1") for true, found in given["texts"]] == golden["text_right"]


def test_gui_r1s_program_forgets_kinds_of_action_that_were_never_right() -> None:
    """Its sums run over the kinds with a hit: three steps, one right, are 100 % there. Here every step counts."""
    given, golden = load("gui_r1")
    numbers = android_control(steps_of(given["hitless"], tuple(given["size"])), "gui_r1")
    assert golden["hitless"]["printed"] == {"Type": 1.0, "Step": 1.0, "GR": 1.0}
    assert numbers == {"type_accuracy": pytest.approx(2 / 3), "grounding": 1.0, "step_success": 0.5}


UI_R1 = ("open_app", "click", "scroll", "type", "navigate_back")
"""The program's order of types, in which the last one found in a line counts."""


def ui_r1_steps(rows: list[Row]) -> list[Step]:
    """The answer's points scaled to 1080 x 2400 and cut to whole pixels, as the program does."""
    scaled = []
    for row in rows:
        found = row["found"]
        if found and "point" in found:
            found = {
                **found,
                "point": [
                    int(1080 / 644 * found["point"][0]),
                    int(2400 / 1484 * found["point"][1]),
                ],
            }
        scaled.append({**row, "found": found})
    return steps_of(scaled, (1080, 2400))


def test_ui_r1_is_its_program_where_a_line_names_one_type() -> None:
    """Its greedy pattern for "content" also swallows "response", so that the type asked for is read as the answer's where that
    comes later in its list. Those lines are left out here."""
    given, golden = load("ui_r1")
    rows = [
        row
        for row in given["steps"]
        if not row["found"]
        or UI_R1.index(row["found"]["action"]) <= UI_R1.index(row["true"]["action"])
    ]
    clear = golden["clear"]
    assert len(rows) == clear["lines"] < len(given["steps"])
    assert android_control(ui_r1_steps(rows), "ui_r1") == {
        "type_accuracy": pytest.approx(
            sum(clear["correct"].values()) / sum(clear["total"].values())
        ),
        "click_accuracy": pytest.approx(clear["printed_click_correct"] / clear["total"]["click"]),
    }


def test_ui_r1s_program_takes_some_wrong_types_for_right() -> None:
    """The same answers whole: more types are right there; the clicks that are right are the same ones."""
    given, golden = load("ui_r1")
    everything, rows = golden["all"], given["steps"]
    numbers = android_control(ui_r1_steps(rows), "ui_r1")
    clicks = sum(row["true"]["action"] == "click" for row in rows)
    types = [
        (UI_R1.index(row["true"]["action"]), UI_R1.index(row["found"]["action"]))
        for row in rows
        if row["found"]
    ]
    swallowed = sum(found > true for true, found in types)
    assert (
        len(rows) * numbers["type_accuracy"]
        == pytest.approx(sum(everything["correct"].values()) - swallowed)
        and swallowed > 3
    )
    assert numbers["click_accuracy"] == pytest.approx(everything["printed_click_correct"] / clicks)
    assert everything["total"]["click"] > clicks


def test_odyssey_is_its_program() -> None:
    given, golden = load("odyssey")
    steps = steps_of(given["steps"], (1000, 1000))
    assert [
        match_action(step.found, step.true, RULES["odyssey"], step.size).step for step in steps
    ] == golden["correct"]
    numbers = android_control(steps, "odyssey")
    right, episodes = golden["episodes"]
    assert numbers == {
        "ams": pytest.approx(sum(golden["correct"]) / len(steps)),
        "success_rate": pytest.approx(right / episodes),
    }
    assert {name: round(100 * value, 2) for name, value in numbers.items()} == {
        "ams": golden["info"]["AMS"],
        "success_rate": golden["info"]["SR"],
    }


def test_odyssey_takes_an_empty_text_for_right_and_we_do_not() -> None:
    assert load("odyssey")[1]["empty_text_is_right"] is True
    assert not same_text("", "hello", "containment") and same_text("hell", "hello", "containment")
