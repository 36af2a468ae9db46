"""Tracks: keys are times compared as numbers, repeated keys fail, the true keys are the denominator, right boxes never cost."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmrl.rewards.iou import box_iou
from mmrl.rewards.tracks import (
    MAX_BOXES,
    mean,
    parse_track,
    success,
    success_area,
    track_ious,
    track_viou,
    tube_viou,
)
from tests.kits.clock_kit import takes_less

BOX = [10, 20, 60, 90]
side = st.integers(0, 50)
boxes = st.builds(
    lambda x, y, w, h: (float(x), float(y), float(x + w + 1), float(y + h + 1)),
    side,
    side,
    side,
    side,
)
tracks = st.dictionaries(st.integers(0, 12).map(float), boxes, min_size=1, max_size=8)


@pytest.mark.parametrize(
    "text",
    [
        '{"boxes": {"0": [10, 20, 60, 90], "1.5": [10, 20, 60, 90]}}',
        '{"0": [10,20,60,90], "1.50": [10,20,60,90]}',
        "{'boxes': {'00:00': [10, 20, 60, 90], '00:01.5': [10, 20, 60, 90]}}",
        '```json\n{"boxes": {"0": [10, 20, 60, 90], "1.5 s": [10, 20, 60, 90]}}\n```',
    ],
)
def test_spellings(text: str) -> None:
    assert parse_track(text).boxes == {0.0: (10, 20, 60, 90), 1.5: (10, 20, 60, 90)}, parse_track(
        text
    )


def test_lists_and_time() -> None:
    assert parse_track("[[1, 2, 3, 4], [5, 6, 7, 8]]").listed == ((1, 2, 3, 4), (5, 6, 7, 8))
    tube = parse_track('{"time": [1, 2], "boxes": {"1": [1, 2, 3, 4]}}')
    assert (
        tube.time is not None
        and tube.time.spans == ((1.0, 2.0),)
        and tube.boxes == {1.0: (1, 2, 3, 4)}
    )
    broken = parse_track('{"time": "soon", "boxes": {"1": [1, 2, 3, 4]}}')
    assert broken.reason is None and broken.time is not None and broken.time.reason == "not_spans"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "not_a_track"),
        ("red", "not_a_track"),
        ("{}", "no_boxes"),
        ('{"boxes": {}}', "no_boxes"),
        ('{"time": [1, 2]}', "no_boxes"),
        ('{"boxes": 3}', "not_a_track"),
        ('{"boxes": {"1": [1, 2, 3, 4], "1": [1, 2, 3, 4]}}', "duplicate_keys"),
        ('{"boxes": {"1": [1, 2, 3, 4], "1.0": [1, 2, 3, 4]}}', "duplicate_keys"),
        ('{"x": [1, 2, 3, 4]}', "not_a_time"),
        ('{"-1": [1, 2, 3, 4]}', "not_a_time"),
        ('{"1": [1, 2, 3]}', "wrong_count"),
        ('{"1": "x"}', "not_a_box"),
        ('{"1": [1, 2, 3, NaN]}', "not_finite"),
        ('{"1": [1, 2, 3, 1e999]}', "out_of_range"),
        ("[1, 2, 3, 4]", "not_a_box"),
        (json.dumps({str(k): [0, 0, 1, 1] for k in range(MAX_BOXES + 1)}), "too_many_boxes"),
        ("[" + " " * 50_000, "answer_too_long"),
    ],
)
def test_failures_have_names(text: str, reason: str) -> None:
    assert parse_track(text).reason == reason
    assert not parse_track(text).boxes and not parse_track(text).listed


@settings(max_examples=100, deadline=None)
@given(
    st.one_of(
        st.text(max_size=60),
        st.recursive(
            st.floats() | st.integers() | st.text(max_size=4) | st.none(),
            lambda inner: (
                st.lists(inner, max_size=5)
                | st.dictionaries(
                    st.sampled_from(["boxes", "time", "0", "1", "x"]), inner, max_size=4
                )
            ),
            max_leaves=12,
        ).map(json.dumps),
    )
)
def test_any_text_is_a_track_or_a_reason(text: str) -> None:
    parsed = parse_track(text)
    assert bool(parsed.boxes or parsed.listed) != bool(parsed.reason)


@settings(max_examples=100, deadline=None)
@given(tracks, tracks)
def test_numbers_are_those_of_counting(
    p: dict[float, tuple[float, ...]], g: dict[float, tuple[float, ...]]
) -> None:
    expected = sum(box_iou(p[k], g[k]) for k in set(p) & set(g))
    assert mean(track_ious(p, g)) == pytest.approx(expected / len(g))
    outside = [k for k in p if not min(g) <= k <= max(g)]
    assert track_viou(p, g) == pytest.approx(expected / (len(g) + len(outside)))
    assert track_viou(p, g) <= mean(track_ious(p, g)) + 1e-12
    assert success_area(track_ious(p, g)) == pytest.approx(
        mean([success(track_ious(p, g), k / 100) for k in range(101)])
    )


@settings(max_examples=100, deadline=None)
@given(tracks, tracks, st.integers(0, 12).map(float), boxes)
def test_a_right_box_never_lowers_and_a_box_nobody_asked_for_never_raises(
    p: dict[float, tuple[float, ...]],
    g: dict[float, tuple[float, ...]],
    key: float,
    box: tuple[float, ...],
) -> None:
    for rule in (lambda t: mean(track_ious(t, g)), lambda t: track_viou(t, g)):
        if key in g:
            assert rule({**p, key: g[key]}) >= rule(p) - 1e-12
        else:
            assert rule({**p, key: box}) <= rule({k: b for k, b in p.items() if k != key}) + 1e-12


Boxes = dict[float, tuple[float, ...]]
times = st.tuples(st.integers(0, 12), st.integers(0, 12)).map(
    lambda pair: (min(pair), max(pair) + 1)
)


def _official(p: Boxes, p_time: tuple[int, int], g: Boxes, g_time: tuple[int, int]) -> float:
    """VidSTG: one frame a second, the sum over the frames in both times, over the frames in either."""
    mine, true = set(range(*p_time)), set(range(*g_time))
    return sum(box_iou(p[float(k)], g[float(k)]) for k in mine & true if float(k) in p) / len(
        mine | true
    )


@settings(max_examples=100, deadline=None)
@given(
    tracks,
    times,
    times,
    st.lists(boxes, min_size=14, max_size=14),
    st.sampled_from([0.25, 1.0, 2.5]),
)
def test_tube_viou_is_that_of_vidstg(
    p: Boxes,
    p_time: tuple[int, int],
    g_time: tuple[int, int],
    some: list[tuple[float, ...]],
    step: float,
) -> None:
    g = {float(k): some[k] for k in range(*g_time)}
    expected = _official(p, p_time, g, g_time)
    assert tube_viou(p, p_time, g, g_time) == pytest.approx(expected)

    def scaled(values: Boxes) -> Boxes:
        return {key * step: box for key, box in values.items()}

    theirs, mine = (tuple(step * t for t in time) for time in (g_time, p_time))
    assert tube_viou(scaled(p), mine, scaled(g), theirs, step) == pytest.approx(expected), (
        "in any unit of time"
    )
    assert tube_viou(p, p_time[::-1], g, g_time) == 0, "a time that ends before it starts"


@settings(max_examples=100, deadline=None)
@given(
    tracks,
    st.tuples(st.floats(0, 20), st.floats(0, 20)),
    times,
    boxes,
    st.floats(0, 1),
    st.booleans(),
    st.booleans(),
)
def test_a_tube_gains_by_the_right_time_only(
    p: Boxes,
    said: tuple[float, float],
    g_time: tuple[int, int],
    box: tuple[float, ...],
    share: float,
    first: bool,
    closed: bool,
) -> None:
    """Moving an end toward the true one never lowers; a box outside the predicted time changes nothing; a right box never
    lowers; and no time is worth more than the true one."""
    g, said = {float(k): box for k in range(g_time[0], g_time[1] + closed)}, (min(said), max(said))
    value = tube_viou(p, said, g, g_time)
    assert 0 <= value <= 1 + 1e-12
    ends = list(said)
    ends[not first] += share * (g_time[not first] - ends[not first])
    if ends[0] < ends[1] and min(said[1], g_time[1]) > max(said[0], g_time[0]):
        assert tube_viou(p, ends, g, g_time) >= value - 1e-9
    assert tube_viou(p, g_time, g, g_time) >= value - 1e-9
    outside = {key: b for key, b in p.items() if said[0] - 0.1 < key < said[1] + 0.1}
    assert tube_viou(outside, said, g, g_time) == pytest.approx(value)
    assert tube_viou({**p, float(g_time[0]): box}, said, g, g_time) >= value - 1e-12
    assert tube_viou(g, g_time, g, g_time) == pytest.approx(1)


def test_tubes_by_hand() -> None:
    square = (0.0, 0.0, 10.0, 10.0)
    truth = {float(k): square for k in range(2, 6)}
    for said, value in (
        ((2, 6), 1.0),
        ((80, 90), 0.0),
        ((0, 100), 4 / 100),
        ((4, 6), 0.5),
        ((5, 7), 1 / 5),
        ((2, 2.001), 1 / 4),
        ((4, 4), 0.0),
        ((6, 2), 0.0),
        ((2, 6.5), 4 / 4.5),
    ):
        assert tube_viou(truth, said, truth, (2, 6)) == pytest.approx(value), said
    assert tube_viou(
        {**truth, 6.0: square}, (2, 6), {**truth, 6.0: square}, (2, 6)
    ) == pytest.approx(1), "a key at the end"
    rounded = {float(k): square for k in range(2, 8)}
    assert tube_viou(rounded, (2.3, 6.7), rounded, (2.3, 6.7)) == pytest.approx(1), (
        "keys rounded outward"
    )
    assert tube_viou(rounded, (80, 90), rounded, (2.3, 6.7)) == 0
    assert tube_viou({}, (2, 6), truth, (2, 6)) == 0 == tube_viou(truth, (2, 6), {}, (2, 6))


def test_one_easy_frame_of_sixteen_scores_a_sixteenth() -> None:
    truth = {float(k): (0.0, 0.0, 10.0, 10.0) for k in range(16)}
    one = {3.0: (0.0, 0.0, 10.0, 10.0)}
    assert mean(track_ious(one, truth)) == pytest.approx(1 / 16) == track_viou(one, truth)
    assert track_viou({**truth, 40.0: (0, 0, 1, 1)}, truth) == pytest.approx(16 / 17)
    assert track_viou({**truth, 3.5: (0, 0, 1, 1)}, truth) == 1, (
        "between the true keys nothing is known"
    )
    assert track_viou({}, {}) == 0 == mean([])


def test_success_is_strictly_above() -> None:
    assert success([0.5, 0.51], 0.5) == 0.5


@pytest.mark.parametrize(
    "text", ["[" * 39_000, '{"boxes":' * 4000, '{"' + "0" * 39_000, "[[1,2,3,4]," * 3600]
)
def test_hostile_texts_take_no_time(text: str) -> None:
    takes_less(0.2, lambda: parse_track(text))
