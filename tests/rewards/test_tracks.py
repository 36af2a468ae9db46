"""Tracks: keys are times compared as numbers, repeated keys fail, the true keys are the denominator, right boxes never cost."""
from __future__ import annotations

import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rewards.iou import box_iou
from rewards.tracks import MAX_BOXES, mean, parse_track, success, success_area, track_ious, track_viou

BOX = [10, 20, 60, 90]
side = st.integers(0, 50)
boxes = st.builds(lambda x, y, w, h: (float(x), float(y), float(x + w + 1), float(y + h + 1)), side, side, side, side)
tracks = st.dictionaries(st.integers(0, 12).map(float), boxes, min_size=1, max_size=8)


@pytest.mark.parametrize("text", ['{"boxes": {"0": [10, 20, 60, 90], "1.5": [10, 20, 60, 90]}}',
                                  '{"0": [10,20,60,90], "1.50": [10,20,60,90]}',
                                  "{'boxes': {'00:00': [10, 20, 60, 90], '00:01.5': [10, 20, 60, 90]}}",
                                  '```json\n{"boxes": {"0": [10, 20, 60, 90], "1.5 s": [10, 20, 60, 90]}}\n```'])
def test_spellings(text: str) -> None:
    assert parse_track(text).boxes == {0.0: (10, 20, 60, 90), 1.5: (10, 20, 60, 90)}, parse_track(text)


def test_lists_and_time() -> None:
    assert parse_track("[[1, 2, 3, 4], [5, 6, 7, 8]]").listed == ((1, 2, 3, 4), (5, 6, 7, 8))
    tube = parse_track('{"time": [1, 2], "boxes": {"1": [1, 2, 3, 4]}}')
    assert tube.time is not None and tube.time.spans == ((1.0, 2.0),) and tube.boxes == {1.0: (1, 2, 3, 4)}
    broken = parse_track('{"time": "soon", "boxes": {"1": [1, 2, 3, 4]}}')
    assert broken.reason is None and broken.time is not None and broken.time.reason == "not_spans"


@pytest.mark.parametrize(("text", "reason"), [
    ("", "not_a_track"), ("red", "not_a_track"), ("{}", "no_boxes"), ('{"boxes": {}}', "no_boxes"),
    ('{"time": [1, 2]}', "no_boxes"),
    ('{"boxes": 3}', "not_a_track"), ('{"boxes": {"1": [1, 2, 3, 4], "1": [1, 2, 3, 4]}}', "duplicate_keys"),
    ('{"boxes": {"1": [1, 2, 3, 4], "1.0": [1, 2, 3, 4]}}', "duplicate_keys"), ('{"x": [1, 2, 3, 4]}', "not_a_time"),
    ('{"-1": [1, 2, 3, 4]}', "not_a_time"), ('{"1": [1, 2, 3]}', "wrong_count"), ('{"1": "x"}', "not_a_box"),
    ('{"1": [1, 2, 3, NaN]}', "not_finite"), ('{"1": [1, 2, 3, 1e999]}', "out_of_range"), ("[1, 2, 3, 4]", "not_a_box"),
    (json.dumps({str(k): [0, 0, 1, 1] for k in range(MAX_BOXES + 1)}), "too_many_boxes"), ("[" + " " * 50_000, "answer_too_long")])
def test_failures_have_names(text: str, reason: str) -> None:
    assert parse_track(text).reason == reason
    assert not parse_track(text).boxes and not parse_track(text).listed


@settings(max_examples=200, deadline=None)
@given(st.one_of(st.text(max_size=60), st.recursive(
    st.floats() | st.integers() | st.text(max_size=4) | st.none(), lambda inner: st.lists(inner, max_size=5) | st.dictionaries(
        st.sampled_from(["boxes", "time", "0", "1", "x"]), inner, max_size=4), max_leaves=12).map(json.dumps)))
def test_any_text_is_a_track_or_a_reason(text: str) -> None:
    parsed = parse_track(text)
    assert bool(parsed.boxes or parsed.listed) != bool(parsed.reason)


@settings(max_examples=200, deadline=None)
@given(tracks, tracks)
def test_numbers_are_those_of_counting(p: dict[float, tuple[float, ...]], g: dict[float, tuple[float, ...]]) -> None:
    expected = sum(box_iou(p[k], g[k]) for k in set(p) & set(g))
    assert mean(track_ious(p, g)) == pytest.approx(expected / len(g))
    outside = [k for k in p if not min(g) <= k <= max(g)]
    assert track_viou(p, g) == pytest.approx(expected / (len(g) + len(outside)))
    assert track_viou(p, g) <= mean(track_ious(p, g)) + 1e-12
    assert success_area(track_ious(p, g)) == pytest.approx(mean([success(track_ious(p, g), k / 100) for k in range(101)]))


@settings(max_examples=200, deadline=None)
@given(tracks, tracks, st.integers(0, 12).map(float), boxes)
def test_a_right_box_never_lowers_and_a_box_nobody_asked_for_never_raises(
        p: dict[float, tuple[float, ...]], g: dict[float, tuple[float, ...]], key: float, box: tuple[float, ...]) -> None:
    for rule in (lambda t: mean(track_ious(t, g)), lambda t: track_viou(t, g)):
        if key in g:
            assert rule({**p, key: g[key]}) >= rule(p) - 1e-12
        else:
            assert rule({**p, key: box}) <= rule({k: b for k, b in p.items() if k != key}) + 1e-12


def test_one_easy_frame_of_sixteen_scores_a_sixteenth() -> None:
    truth = {float(k): (0.0, 0.0, 10.0, 10.0) for k in range(16)}
    one = {3.0: (0.0, 0.0, 10.0, 10.0)}
    assert mean(track_ious(one, truth)) == pytest.approx(1 / 16) == track_viou(one, truth)
    assert track_viou({**truth, 40.0: (0, 0, 1, 1)}, truth) == pytest.approx(16 / 17)
    assert track_viou({**truth, 3.5: (0, 0, 1, 1)}, truth) == 1, "between the true keys nothing is known"
    assert track_viou({}, {}) == 0 == mean([])


def test_success_is_strictly_above() -> None:
    assert success([0.5, 0.51], 0.5) == 0.5


@pytest.mark.parametrize("text", ["[" * 39_000, '{"boxes":' * 4000, '{"' + "0" * 39_000, "[[1,2,3,4]," * 3600])
def test_hostile_texts_take_no_time(text: str) -> None:
    began = time.thread_time()
    parse_track(text)
    assert time.thread_time() - began < 0.2
