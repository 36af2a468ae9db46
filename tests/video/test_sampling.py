"""Which frames are chosen: against qwen-vl-utils' own functions, and properties that hold for every clip and request."""

from __future__ import annotations

import mmrl  # noqa: F401  (first: it lets torchvision, which qwen_vl_utils imports, load beside a CPU torch)

# isort: split
import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from qwen_vl_utils.vision_process import calculate_video_frame_range, smart_nframes

from mmrl.errors import ConfigError, MediaError
from mmrl.video.sampling import (
    KINDS,
    FrameSampling,
    constant_fps,
    is_variable,
    sample_rate,
    select_frames,
)

RATES = st.sampled_from(
    [
        1.0,
        5.0,
        10.0,
        15.0,
        24000 / 1001,
        24.0,
        25.0,
        30000 / 1001,
        30.0,
        50.0,
        60000 / 1001,
        60.0,
        120.0,
    ]
)


def steady(count: int, fps: float) -> np.ndarray:
    return np.arange(count) / fps


def theirs(count: int, fps: float, request: dict[str, Any]) -> list[int]:
    """The indices of qwen-vl-utils' decord and torchcodec readers, put together from its own functions."""
    first, last, total = calculate_video_frame_range(request, count, fps)
    number = smart_nframes(request, total_frames=total, video_fps=fps)
    return list(torch.linspace(first, last, number).round().long().tolist())


@settings(max_examples=80)
@given(
    count=st.integers(2, 3000),
    fps=RATES,
    wanted=st.floats(0.1, 30),
    bounds=st.tuples(st.integers(1, 64), st.integers(2, 768)),
    part=st.one_of(st.none(), st.tuples(st.floats(0, 1), st.floats(0, 1))),
)
def test_fps_gives_the_indices_of_qwen_vl_utils(
    count: int, fps: float, wanted: float, bounds: tuple[int, int], part: tuple[float, float] | None
) -> None:
    least, most = min(bounds), max(max(bounds), 2)
    request: dict[str, Any] = {"fps": wanted, "min_frames": least, "max_frames": most}
    fields: dict[str, Any] = dict(request)
    if part is not None and min(part) < max(part):
        request |= {"video_start": min(part) * count / fps, "video_end": max(part) * count / fps}
        fields |= {"start": request["video_start"], "end": request["video_end"]}
    try:
        expected = theirs(count, fps, request)
    except ValueError:
        return  # it refuses parts of fewer than two frames; what we do there is tested below
    assert list(select_frames(steady(count, fps), FrameSampling(**fields), fps=fps)) == expected


@settings(max_examples=100)
@given(count=st.integers(2, 2000), fps=RATES, number=st.integers(1, 128))
def test_uniform_gives_the_indices_of_qwen_vl_utils(count: int, fps: float, number: int) -> None:
    try:
        expected = theirs(count, fps, {"nframes": number})
    except ValueError:
        return
    assert (
        list(select_frames(steady(count, fps), FrameSampling("uniform", num_frames=number)))
        == expected
    )


@settings(max_examples=80)
@given(
    count=st.integers(2, 3000),
    fps=RATES,
    wanted=st.floats(0.1, 30),
    number=st.one_of(st.none(), st.integers(1, 64)),
    part=st.one_of(st.none(), st.tuples(st.floats(0, 1), st.floats(0, 1))),
)
def test_the_sampled_rate_is_that_of_qwen_vl_utils(
    count: int, fps: float, wanted: float, number: int | None, part: tuple[float, float] | None
) -> None:
    request: dict[str, Any] = {"fps": wanted} if number is None else {"nframes": number}
    fields: dict[str, Any] = {"fps": wanted} if number is None else {"num_frames": number}
    if part is not None and min(part) < max(part):
        request |= {"video_start": min(part) * count / fps, "video_end": max(part) * count / fps}
        fields |= {"start": request["video_start"], "end": request["video_end"]}
    try:
        _, _, total = calculate_video_frame_range(request, count, fps)
        frames = smart_nframes(
            {"max_frames": 768, **request} if number is None else request,
            total_frames=total,
            video_fps=fps,
        )
    except ValueError:
        return
    times, sampling = steady(count, fps), FrameSampling.from_mapping(fields)
    rate = sample_rate(times, sampling, select_frames(times, sampling, fps=fps), fps, count / fps)
    assert rate == frames / max(total, 1e-6) * fps  # as its readers have it


def test_the_sampled_rate_of_other_kinds_is_the_mean_spacing() -> None:
    times = steady(100, 25)
    assert sample_rate(times, FrameSampling("all"), range(100)) == pytest.approx(25)
    assert sample_rate(times, FrameSampling("keyframes"), (0, 12, 50)) == pytest.approx(1)
    moments = FrameSampling("timestamps", timestamps=(1.0, 1.5, 3.0))
    assert sample_rate(times, moments, select_frames(times, moments)) == pytest.approx(1)
    # one frame, twice, of 2 seconds
    late = FrameSampling("timestamps", timestamps=(1.0, 1.0), start=1.0, end=3.0)
    assert sample_rate(times, late, select_frames(times, late)) == pytest.approx(1)
    assert sample_rate([0.0], FrameSampling("all"), (0,), 10.0, 0.1) == pytest.approx(10)
    slow = np.concatenate([np.arange(10.0), 10 + steady(300, 30)])
    sampling = FrameSampling(fps=2, start=10.0)
    chosen = select_frames(slow, sampling)
    assert sample_rate(slow, sampling, chosen) == pytest.approx(
        (len(chosen) - 1) / (slow[chosen[-1]] - slow[chosen[0]])
    )
    with pytest.raises(MediaError, match="found none"):
        sample_rate([], FrameSampling(), ())


def gaps() -> st.SearchStrategy[list[float]]:
    return st.lists(st.floats(0.001, 3.0), min_size=0, max_size=60)


@st.composite
def requests(draw: st.DrawFn) -> FrameSampling:
    kind = draw(st.sampled_from(["fps", "uniform", "keyframes", "all"]))
    start = draw(st.one_of(st.none(), st.floats(0, 20)))
    length = draw(st.one_of(st.none(), st.floats(0.01, 20)))
    factor = draw(st.integers(1, 4))
    return FrameSampling(
        kind,
        fps=draw(st.floats(0.05, 60)),
        min_frames=draw(st.integers(1, 8)),
        max_frames=draw(st.integers(8, 100)),
        start=start,
        end=None if length is None else (start or 0.0) + length,
        factor=factor,
        num_frames=draw(st.integers(1, 40)) if kind in ("uniform", "keyframes") else None,
    )


@settings(max_examples=80)
@given(gaps=gaps(), sampling=requests(), every=st.integers(1, 9))
def test_indices_ascend_lie_in_the_part_and_obey_the_counts(
    gaps: list[float], sampling: FrameSampling, every: int
) -> None:
    times = np.concatenate([[0.0], np.cumsum(gaps)])
    keys = range(0, len(times), every)
    try:
        chosen = select_frames(times, sampling, keys)
    except MediaError as err:
        assert err.kind in {
            "all": ("too_short", "too_large"),
            "keyframes": ("too_short", "unsupported"),
        }.get(sampling.kind, ("too_short",))
        return
    assert chosen and all(
        0 <= a <= b < len(times) for a, b in itertools.pairwise((*chosen, chosen[-1]))
    )
    start, end = sampling.start or 0.0, math.inf if sampling.end is None else sampling.end
    # a steady rate goes by index, as qwen-vl-utils
    slack = 1.0 / constant_fps(times) if not is_variable(times) else 1e-5
    if len(chosen) > 1:
        assert times[chosen[0]] >= start - slack and times[chosen[-1]] <= end + slack
    inside = sum(start - 1e-6 <= t <= end + 1e-6 for t in times)
    if sampling.kind == "all":
        assert list(chosen) == list(range(chosen[0], chosen[-1] + 1))
    else:
        assert len(chosen) <= max(sampling.max_frames, sampling.num_frames or 0) + sampling.factor
        assert len(chosen) % sampling.factor == 0 or len(chosen) < sampling.factor
    if sampling.kind == "keyframes":
        assert set(chosen) <= set(keys) and len(set(chosen)) == len(chosen)
    if not is_variable(times):
        assert len(set(chosen)) == len(chosen)
    if inside >= 2 * sampling.factor + 2 and sampling.kind in ("fps", "uniform"):
        assert len(chosen) % sampling.factor == 0


@settings(max_examples=100)
@given(gaps=gaps(), fractions=st.lists(st.floats(0, 1), min_size=1, max_size=20))
def test_a_moment_shows_the_frame_on_screen(gaps: list[float], fractions: list[float]) -> None:
    """By definition: it begins at or before the moment, and the next one begins after it."""
    times = np.concatenate([[0.0], np.cumsum(gaps)])
    moments = sorted(f * float(times[-1]) for f in fractions)
    chosen = select_frames(times, FrameSampling("timestamps", timestamps=tuple(moments)))
    assert len(chosen) == len(moments)
    for moment, index in zip(moments, chosen, strict=True):
        assert times[index] <= moment + 2e-6
        assert index == len(times) - 1 or times[index + 1] > moment


@settings(max_examples=100)
@given(gaps=st.lists(st.floats(0.05, 4.0), min_size=10, max_size=60), number=st.integers(2, 10))
def test_a_variable_rate_is_spread_over_time(gaps: list[float], number: int) -> None:
    times = np.concatenate([[0.0], np.cumsum(gaps)])
    if not is_variable(times):
        return
    chosen = select_frames(times, FrameSampling("uniform", num_frames=number * 2, factor=1))
    count = len(chosen)
    for moment, index in zip(np.linspace(0, times[-1], count), chosen, strict=True):
        assert times[index] <= moment + 2e-6 and (
            index == len(times) - 1 or times[index + 1] > moment - 2e-6
        )


def test_the_part_of_a_variable_rate_has_as_many_frames_as_its_seconds() -> None:
    """10 s at 1 frame per second, then 10 s at 30."""
    times = np.concatenate([np.arange(10.0), 10 + steady(300, 30)])
    counts = [
        len(select_frames(times, FrameSampling(fps=2, start=start, end=end)))
        for start, end in (
            (None, None),
            (None, 10.0),
            (10.0, 20.0),
            (10.0, None),
            (12.0, 15.0),
            (5.0, 15.0),
            (19.0, 500.0),
        )
    ]
    # never more than the part holds, at least min_frames 4
    assert counts == [40, 10, 20, 20, 6, 20, 4]


@settings(max_examples=80)
@given(
    gaps=st.lists(st.floats(0.01, 0.3), min_size=20, max_size=80),
    bounds=st.tuples(st.floats(0, 1), st.floats(0, 1)),
    fps=st.floats(0.5, 5),
)
def test_frames_of_a_variable_part_are_seconds_times_rate(
    gaps: list[float], bounds: tuple[float, float], fps: float
) -> None:
    times = np.concatenate([[0.0], np.cumsum(gaps)])
    start, end = (float(share * times[-1]) for share in sorted(bounds))
    if not is_variable(times) or end - start < 0.1:
        return
    chosen = select_frames(
        times, FrameSampling(fps=fps, start=start, end=end, min_frames=1, factor=1)
    )
    inside = int(((times >= start - 1e-6) & (times <= end + 1e-6)).sum())
    assert len(chosen) == max(1, min(inside, math.floor((end - start) * fps + 1e-5)))


def test_a_dropped_frame_hardly_matters() -> None:
    whole = steady(250, 25)
    dropped = np.delete(whole, 100)
    assert is_variable(dropped) and not is_variable(whole)
    for start, end in ((0.0, 10.0), (1.0, 3.0), (2.0, 8.0), (8.0, 10.0)):
        sampling = FrameSampling(fps=2, start=start, end=end)
        assert (
            abs(len(select_frames(dropped, sampling)) - len(select_frames(whole, sampling)))
            <= sampling.factor
        )


def test_the_frame_on_screen_at_the_start_may_begin_before_it() -> None:
    """The rule for times relative to the part: such a frame counts as shown from its beginning."""
    slow = np.arange(10.0)
    for sampling, indices in (
        (FrameSampling(start=1.3, end=1.6), (1,)),
        (FrameSampling("timestamps", start=1.3, timestamps=(1.3, 2.5)), (1, 2)),
        (FrameSampling("all", start=1.3, end=1.6), (1,)),
    ):
        assert select_frames(slow, sampling) == indices and slow[1] < 1.3
    uneven = np.array([0.0, 1.0, 4.0, 4.5, 9.0])
    assert select_frames(uneven, FrameSampling(start=2.0, end=3.0)) == (1,)
    assert select_frames(uneven, FrameSampling("all", start=2.0)) == (2, 3, 4), (
        "frames that begin inside come first"
    )


def test_uniform_is_bounded_by_its_own_number() -> None:
    assert (
        len(select_frames(steady(300, 30), FrameSampling("uniform", num_frames=16, max_frames=8)))
        == 16
    )


def test_short_clips_and_parts() -> None:
    for kind in ("fps", "keyframes", "all"):
        assert select_frames([0.0], FrameSampling(kind), (0,)) == (0,)
    assert select_frames(steady(3, 25), FrameSampling()) == (0, 2)
    assert select_frames(steady(3, 25), FrameSampling("all")) == (0, 1, 2)
    assert select_frames(steady(3, 25), FrameSampling("uniform", num_frames=8, factor=1)) == (
        0,
        1,
        2,
    )
    # no frame begins in it: the one on screen
    between = FrameSampling("fps", start=0.041, end=0.079)
    assert select_frames(steady(10, 25), between) == (1,)


@pytest.mark.parametrize(
    ("sampling", "kind"),
    [
        (FrameSampling(start=4.0), "too_short"),
        (FrameSampling("timestamps", timestamps=(1.0, 4.1)), "too_short"),
        (FrameSampling("all", max_frames=99), "too_large"),
        (FrameSampling("keyframes", start=1.0), "unsupported"),
    ],
)
def test_what_a_clip_cannot_give_is_an_error(sampling: FrameSampling, kind: str) -> None:
    with pytest.raises(MediaError) as caught:
        select_frames(steady(100, 25), sampling, (0, 12))
    assert caught.value.kind == kind
    with pytest.raises(MediaError, match="found none"):
        select_frames([], sampling)


def test_rates_from_rounded_times() -> None:
    """Matroska stores milliseconds: 30 frames per second become gaps of 33 and 34."""
    for fps in (24000 / 1001, 25.0, 30000 / 1001, 30.0, 60.0):
        rounded = np.round(steady(600, fps), 3)
        assert not is_variable(rounded) and constant_fps(rounded) == pytest.approx(fps, rel=1e-4)
    assert constant_fps(steady(300, 30000 / 1001)) == 30000 / 1001 and constant_fps([0.0]) == 1.0
    assert is_variable([0.0, 0.04, 0.08, 0.16, 0.2])


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"kind": "unifrom"}, "Did you mean 'uniform'"),
        ({"fps": 0}, "above 0"),
        ({"fps": "2"}, "video.fps"),
        ({"fps": math.nan}, "fps"),
        ({"kind": "uniform"}, "num_frames: 16"),
        ({"num_frames": 8}, "kind: uniform"),
        ({"kind": "uniform", "num_frames": 0}, "at least 1"),
        ({"start": -1.0}, "at least 0"),
        ({"kind": "uniform", "num_frames": True}, "whole number"),
        ({"start": 3.0, "end": 2.0}, "swap"),
        ({"min_frames": 9, "max_frames": 8}, "max_frames"),
        ({"factor": 0}, "factor"),
        ({"max_frames": 1, "min_frames": 1}, "factor 2"),
        ({"kind": "timestamps"}, "needs it"),
        ({"timestamps": (1.0,)}, "belongs to"),
        ({"kind": "timestamps", "timestamps": "1"}, "list"),
        ({"kind": "timestamps", "timestamps": (2.0, 1.0)}, "ascending"),
        ({"kind": "timestamps", "timestamps": (-1.0,)}, "at least 0"),
        ({"kind": "timestamps", "timestamps": (1.0,), "start": 2.0}, "of the file"),
        ({"folder_fps": math.inf}, "folder_fps"),
    ],
)
def test_bad_fields_say_what_is_expected(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        FrameSampling(**fields)


def test_a_row_overrides_the_base() -> None:
    base = FrameSampling("uniform", num_frames=16, max_frames=64)
    read = FrameSampling.from_mapping
    assert read({}, base) == base and read({}) == FrameSampling()
    assert read({"start": 1, "end": 4}, base) == FrameSampling(
        "uniform", num_frames=16, max_frames=64, start=1.0, end=4.0
    )
    assert read({"fps": 4}, base) == FrameSampling("fps", fps=4.0, max_frames=64)
    assert read({"timestamps": [0.5, 1]}, base) == FrameSampling(
        "timestamps", timestamps=(0.5, 1.0), max_frames=64
    )
    assert read({"num_frames": 8}) == FrameSampling("uniform", num_frames=8)
    assert read({"num_frames": 8}, FrameSampling("keyframes")) == FrameSampling(
        "keyframes", num_frames=8
    )
    assert read({"start": None}, FrameSampling(start=2.0)) == FrameSampling()
    assert read({"kind": "all"}, base) == FrameSampling("all", max_frames=64)
    # a bound of the row, and the run's other one: a clip may be shown by fewer frames than the run's fewest
    assert read({"max_frames": 2}) == FrameSampling(min_frames=2, max_frames=2)
    assert read({"max_frames": 8}) == FrameSampling(max_frames=8)
    assert read({"min_frames": 100}, base) == FrameSampling(
        "uniform", num_frames=16, min_frames=100, max_frames=100
    )


@pytest.mark.parametrize(
    ("mapping", "says"),
    [
        ({"nframes": 8}, "Did you mean 'num_frames'"),
        ({"fps": 2, "num_frames": 8}, "contradict"),
        ([1], "mapping"),
        ({1: 2}, "unknown key"),
        ({"min_frames": 9, "max_frames": 8}, "at most max_frames"),
        ({"max_frames": 2.5}, "video.max_frames as a whole number"),
        ({"kind": "fps", "num_frames": 8}, "belongs to kind uniform"),
    ],
)
def test_bad_overrides_say_what_is_expected(mapping: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        FrameSampling.from_mapping(mapping)


@settings(max_examples=100)
@given(one=requests(), two=requests())
def test_equal_keys_mean_equal_choices(one: FrameSampling, two: FrameSampling) -> None:
    times = steady(77, 10)
    if one.key() == two.key():

        def outcome(sampling: FrameSampling) -> object:
            try:
                return select_frames(times, sampling, range(0, 77, 8))
            except MediaError as err:
                return err.kind

        assert outcome(one) == outcome(two)
    else:
        assert one != two


def test_keys_are_stable_and_ignore_what_does_not_matter() -> None:
    assert (
        FrameSampling().key() == "fps:factor=2,folder_fps=2.0,fps=2.0,max_frames=768,min_frames=4"
    )
    assert (
        FrameSampling("uniform", num_frames=8, fps=3.0).key()
        == FrameSampling("uniform", num_frames=8).key()
    )
    assert FrameSampling(fps=2).key() == FrameSampling(fps=2.0).key()
    assert FrameSampling(start=1).key() != FrameSampling().key()
    needed: dict[str, dict[str, Any]] = {
        "uniform": {"num_frames": 4},
        "timestamps": {"timestamps": (1.0,)},
    }
    keys = [FrameSampling(kind, **needed.get(kind, {})).key() for kind in KINDS]
    assert len(set(keys)) == len(KINDS)
