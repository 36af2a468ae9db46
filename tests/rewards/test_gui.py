"""Points: strict parsing, closed forms of the rewards, and label-free votes equal to counting pixel by pixel."""

from __future__ import annotations

import itertools
import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmrl.errors import ConfigError
from mmrl.rewards.gui import (
    MODES,
    bhattacharyya,
    centre,
    in_box,
    make_point_reward,
    parse_point,
    region_votes,
)
from mmrl.rewards.parsing import MAX_ANSWER_CHARS, json_once
from tests.kits.clock_kit import takes_less

SIZE = (1920, 1080)
BOX = (100.0, 50.0, 300.0, 150.0)
numbers = st.floats(-5000, 5000)


@pytest.mark.parametrize(
    "text",
    [
        "[12, 30.5]",
        "(12, 30.5)",
        " [12,30.5] ",
        '{"point_2d": [12, 30.5]}',
        '{"coordinate": [12, 30.5], "action": "click"}',
        "{'point': (12, 30.5)}",
        '[{"point_2d": [12, 30.5], "label": "it\'s (here)"}]',
        "[[12, 30.5]]",
        "```json\n[12, 30.5]\n```",
        "<|box_start|>(12, 30.5)<|box_end|>",
        "[2, 20.5, 22, 40.5]",
        '{"bbox_2d": [2, 20.5, 22, 40.5]}',
        "<|box_start|>(2, 20.5),(22, 40.5)<|box_end|>",
    ],
)
def test_one_point_in_every_spelling(text: str) -> None:
    found = parse_point(text)
    assert found.point == (12, 30.5) and found.reason is None
    assert (found.box == (2, 20.5, 22, 40.5)) if "22" in text else found.box is None


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[[1, 2], [3, 4]]", "several_points"),
        ('[{"point_2d": [1, 2]}, {"point_2d": [3, 4]}]', "several_points"),
        ("(1, 2), (3, 4)", "not_a_point"),
        ("[1, 2] or [3, 4]", "not_a_point"),
        ("[1, 2] [3, 4]", "not_a_point"),
        ('{"point_2d": [1, 2], "coordinate": [3, 4]}', "ambiguous_keys"),
        ('{"point": [1, 2], "bbox": [1, 2, 3, 4]}', "ambiguous_keys"),
        ('{"point": [1, 2], "point": [3, 4]}', "ambiguous_keys"),
        ("[1]", "wrong_count"),
        ("[1, 2, 3]", "wrong_count"),
        ("[1, 2, 3, 4, 5]", "wrong_count"),
        ("[]", "no_point"),
        ("{}", "no_point_key"),
        ("[NaN, 1]", "not_finite"),
        ("[Infinity, 1]", "not_finite"),
        ("[1e999, 1]", "out_of_range"),
        ("[99999999999, 1]", "out_of_range"),
        ("[true, 1]", "not_a_point"),
        ('["1", "2"]', "not_a_point"),
        ("", "not_a_point"),
        ("12, 30", "not_a_point"),
        ("<|box_start|>(1, 2)", "not_a_point"),
        ("<|box_end|>(1, 2)<|box_start|>", "not_a_point"),
        ("[" * 3000, "not_a_point"),
        ("__import__('os').abort()", "not_a_point"),
        ("[1, 2]" + " " * MAX_ANSWER_CHARS, "answer_too_long"),
    ],
)
def test_anything_else_fails_with_a_reason(text: str, reason: str) -> None:
    found = parse_point(text)
    assert (found.point, found.box, found.reason) == (None, None, reason)


@settings(max_examples=150, deadline=None)
@given(st.text(max_size=200) | st.text(alphabet="[](){}'\"\\,.0123456789:ax<|>_ ", max_size=200))
def test_any_text_parses_or_fails(text: str) -> None:
    found = parse_point(text)
    assert (found.point is None) == (found.reason is not None)
    assert found.point is None or all(map(math.isfinite, found.point))


@given(numbers, numbers)
def test_what_is_written_is_read(x: float, y: float) -> None:
    assert parse_point(json.dumps([x, y])).point == (x, y) == parse_point(repr((x, y))).point


@pytest.mark.parametrize(
    "text",
    [
        "'" * 3999,
        "\\'" * 1999,
        "'\\" * 1999,
        '{"a":' * 700,
        "(" * 3999,
        "[1," * 1300,
        "-" * 3999,
        "9" * 3999,
        "<|box_start|>" * 300,
        "True" * 999,
        "[" + "1, " * 1200 + "1]",
    ],
)
def test_hostile_texts_take_milliseconds(text: str) -> None:
    def read() -> None:
        json_once.cache_clear()  # or the second run asks its memory
        parse_point(text)

    takes_less(0.01, read)


@pytest.mark.parametrize(
    ("point", "inside", "strictly"),
    [
        ((100, 50), 1, 0),
        ((300, 150), 1, 0),
        ((100, 100), 1, 0),
        ((200, 150), 1, 0),
        ((200, 100), 1, 1),
        ((100.5, 50.5), 1, 1),
        ((99.9, 100), 0, 0),
        ((300.1, 100), 0, 0),
        ((200, 49.9), 0, 0),
        ((200, 150.1), 0, 0),
        ((-200, -100), 0, 0),
    ],
)
def test_edges_count_except_for_gui_r1(
    point: tuple[float, float], inside: float, strictly: float
) -> None:
    for mode, expected in (("inside", inside), ("ui_r1", inside), ("gui_r1", strictly)):
        assert make_point_reward(mode)(point, None, BOX, SIZE) == expected
    assert (make_point_reward("distance")(point, None, BOX, SIZE) == 1) == bool(inside)


@given(
    st.tuples(numbers, numbers), st.tuples(numbers, numbers, st.floats(1, 900), st.floats(1, 900))
)
def test_gaussian_is_its_closed_form(
    point: tuple[float, float], shape: tuple[float, float, float, float]
) -> None:
    """GUI-G2 with alpha 0.5, written out: variances 0.25 w^2, the distance from determinants and an inverse."""
    x, y, w, h = shape
    predicted = (x, y, x + w, y + h)
    s1, s2 = (
        np.diag([0.25 * w * w + 1e-8, 0.25 * h * h + 1e-8]),
        np.diag([0.25 * 200**2 + 1e-8, 0.25 * 100**2 + 1e-8]),
    )
    mean, d = (s1 + s2) / 2, np.subtract(centre(predicted), (200, 100))
    expected = d @ np.linalg.inv(mean) @ d / 8 + 0.5 * np.log(
        np.linalg.det(mean) / np.sqrt(np.linalg.det(s1) * np.linalg.det(s2))
    )
    assert bhattacharyya(predicted, BOX) == pytest.approx(expected, rel=1e-6, abs=1e-6)
    near = math.exp(-0.5 * (((point[0] - 200) / 100) ** 2 + ((point[1] - 100) / 50) ** 2))
    assert make_point_reward("gaussian", coverage=0)(point, None, BOX, SIZE) == pytest.approx(near)
    both = make_point_reward("gaussian")(point, predicted, BOX, SIZE)
    assert both == pytest.approx(0.5 * near + 0.5 * math.exp(-expected), rel=1e-5, abs=1e-9)


def test_gaussian_by_hand() -> None:
    reward = make_point_reward("gaussian")
    assert reward((200, 100), BOX, BOX, SIZE) == 1
    assert reward((200, 100), None, BOX, SIZE) == 0.5, "coverage needs a predicted box"
    assert reward((200, 100), (300, 50, 100, 150), BOX, SIZE) == 0.5, "and one with an area"
    assert reward((300, 100), None, BOX, SIZE) == pytest.approx(0.5 * math.exp(-0.5)), (
        "one sigma is half the width"
    )
    rounded = make_point_reward("gaussian", coverage=0, decimals=3)
    assert (
        rounded((300, 100), None, BOX, SIZE) == 0.607 and rounded((900, 900), None, BOX, SIZE) == 0
    )


def test_distance_falls_in_a_straight_line_to_its_reach() -> None:
    reward = make_point_reward("distance", reach=0.1)
    # 48 px are 0.025 of the width
    values = [reward((300 + step * 48, 100), None, BOX, SIZE) for step in range(6)]
    assert values == pytest.approx([1, 0.75, 0.5, 0.25, 0, 0])


@settings(deadline=None)
@given(st.floats(-2000, 2000), st.floats(-2000, 2000), st.sampled_from(sorted(MODES)))
def test_moving_towards_the_middle_never_lowers_the_reward(dx: float, dy: float, mode: str) -> None:
    reward = make_point_reward(mode)
    values = []
    for k in range(6):
        point = (200 + dx * (5 - k) / 5, 100 + dy * (5 - k) / 5)
        box = (point[0] - 100, point[1] - 50, point[0] + 100, point[1] + 50)
        values.append(reward(point, box, BOX, SIZE))
    assert all(0 <= a <= b + 1e-12 <= 1 + 1e-9 for a, b in itertools.pairwise(values)) and values[
        -1
    ] == pytest.approx(1)


@pytest.mark.parametrize(
    ("mode", "params", "message"),
    [
        ("gausian", {}, "Did you mean 'gaussian'"),
        ("inside", {"alpha": 1}, "expected none"),
        ("gaussian", {"alfa": 1}, "Did you mean 'alpha'"),
        ("gaussian", {"alpha": 0}, "alpha to be a number"),
        ("gaussian", {"coverage": 2}, r"coverage to be a number in \[0, 1\]"),
        ("gaussian", {"decimals": 1.5}, "decimals as a whole number"),
        ("distance", {"reach": "far"}, "reach to be a number"),
        ("distance", {"reach": float("nan")}, "reach"),
    ],
)
def test_wrong_settings_are_named(mode: str, params: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_point_reward(mode, **params)


# votes without truth


def votes_pixel_by_pixel(
    places: list[tuple[float, ...] | None], size: tuple[int, int], expand: float
) -> list[float]:
    """GUI-RCPO as it is written: a grid of the whole picture."""
    grid = np.zeros((size[1], size[0]))
    regions = []
    for place in places:
        if place is None:
            regions.append(None)
            continue
        box = (
            place
            if len(place) == 4
            else (place[0] - expand, place[1] - expand, place[0] + expand, place[1] + expand)
        )
        x1, x2 = (int(np.clip(math.floor(v + 0.5), 0, size[0])) for v in box[0::2])
        y1, y2 = (int(np.clip(math.floor(v + 0.5), 0, size[1])) for v in box[1::2])
        regions.append((x1, y1, x2, y2) if x2 > x1 and y2 > y1 else None)
        if regions[-1]:
            grid[y1:y2, x1:x2] += 1
    return [
        0.0
        if r is None
        else grid[r[1] : r[3], r[0] : r[2]].sum() / (grid.max() * (r[2] - r[0]) * (r[3] - r[1]))
        for r in regions
    ]


spots = st.one_of(
    st.none(),
    st.tuples(st.floats(-20, 80), st.floats(-20, 60)),
    st.tuples(st.floats(-20, 80), st.floats(-20, 60), st.floats(-20, 80), st.floats(-20, 60)),
)


@settings(deadline=None, max_examples=150)
@given(st.lists(spots, max_size=8), st.integers(1, 30))
def test_region_votes_equal_counting_every_pixel(
    places: list[tuple[float, ...] | None], expand: int
) -> None:
    assert region_votes(places, (60, 40), expand) == pytest.approx(
        votes_pixel_by_pixel(places, (60, 40), expand)
    )


def test_votes_by_hand() -> None:
    assert region_votes(
        [(0, 0, 10, 10), (0, 0, 10, 10), (5, 0, 15, 10), (50, 50, 60, 60), None]
    ) == [
        pytest.approx((50 * 2 + 50 * 3) / 300),
        pytest.approx((50 * 2 + 50 * 3) / 300),
        pytest.approx((50 * 3 + 50 * 1) / 300),
        pytest.approx(1 / 3),
        0,
    ]
    assert region_votes([(500, 500)] * 4, (1000, 1000)) == [1, 1, 1, 1]
    assert region_votes([], (10, 10)) == [] and region_votes([None, (900, 900)], (10, 10)) == [0, 0]
    crowd = region_votes([(100, 100), (110, 100), (105, 95), (800, 700)], SIZE)
    assert min(crowd[:3]) > 0.8 > 0.4 > crowd[3], "agreement is paid, the loner is not"


def test_votes_on_a_large_screen_take_milliseconds() -> None:
    rng = np.random.default_rng(0)
    places = [tuple(map(float, rng.uniform(0, 2000, 2))) for _ in range(64)]
    # an 8-megapixel grid would take 64 passes over it
    takes_less(0.5, lambda: region_votes(places, (3840, 2160)))


def test_frames_meet_in_original_pixels() -> None:
    """[500, 500] of 1000 on a 1920 x 1080 screen is its middle."""
    from mmrl.coords import to_orig

    point = parse_point("[500, 500]").point
    assert point is not None
    assert to_orig(point, "rel1000", (1288, 728), SIZE) == (960, 540)  # type: ignore[arg-type]
    assert in_box(to_orig(point, "rel1000", (1, 1), SIZE), (960, 540, 970, 550))  # type: ignore[arg-type]
