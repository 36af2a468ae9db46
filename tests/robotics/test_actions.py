"""ActionCodec: round trips, OpenVLA's layout against an independent implementation, grippers, masks, statistics."""

from __future__ import annotations

import json
import math
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmrl.errors import ConfigError, DataError
from mmrl.robotics.actions import (
    ActionCodec,
    ActionStatistics,
    openvla_indices,
    openvla_logit_slice,
    openvla_token_ids,
)
from mmrl.robotics.contract import ActionError, ActionSpace

SPACE = ActionSpace((-1.0, -0.5, -1.0), (1.0, 0.25, 1.0), ("x", "y", "gripper"), gripper=2)
STATS = ActionStatistics(
    (-0.7, -0.2, 0.0),
    (0.9, 0.3, 1.0),
    (-1.0, -0.4, 0.0),
    (1.0, 0.4, 1.0),
    (0.0,) * 3,
    (0.5,) * 3,
    (True, True, False),
    transitions=9,
    trajectories=2,
)


def bounded() -> st.SearchStrategy[tuple[float, float]]:
    low = st.floats(-50, 50, allow_nan=False)
    return st.tuples(low, st.floats(1e-3, 60)).map(lambda pair: (pair[0], pair[0] + pair[1]))


@given(
    bounds=st.lists(bounded(), min_size=1, max_size=4),
    bins=st.integers(2, 300),
    repeat=st.integers(1, 3),
)
def test_every_index_comes_back(bounds: list[tuple[float, float]], bins: int, repeat: int) -> None:
    codec = ActionCodec(
        tuple(b[0] for b in bounds), tuple(b[1] for b in bounds), bins=bins, repeat=repeat
    )
    indices = np.tile(np.arange(bins)[:, None], (1, len(bounds)))
    actions = codec.decode(indices)
    assert actions.shape == (bins * repeat, len(bounds))
    np.testing.assert_array_equal(codec.encode(actions), np.repeat(indices, repeat, axis=0))


@given(
    bounds=bounded(),
    bins=st.integers(3, 300),
    part=st.floats(0, 1),
    layout=st.sampled_from(["even", "openvla"]),
)
def test_rounding_is_at_most_half_a_bin_inside_and_clips_outside(
    bounds: tuple[float, float], bins: int, part: float, layout
) -> None:
    low, high = bounds
    codec = ActionCodec((low,), (high,), bins=bins, layout=layout)
    action = low + part * (high - low)
    back = codec.decode(codec.encode([[action]]))[0, 0]
    half = codec.half_bins()[0]
    assert abs(back - action) <= half * (1 + 1e-6) + 1e-12 * abs(low)
    assert half == pytest.approx((high - low) / 2 / (bins if layout == "even" else bins - 1))
    far = codec.decode(codec.encode([[low - 7.0], [high + 7.0]]))[:, 0]
    assert low <= far[0] <= low + 2 * half and high - 2 * half <= far[1] <= high


def independent_openvla(
    action: float, low: float, high: float, rescaled: bool
) -> tuple[int, float]:
    """Token id and decoded action by plain loops: 256 edges from -1 to 1, id 32000 - (number of edges not above the value)."""
    value = min(1.0, max(-1.0, 2 * (action - low) / (high - low) - 1 if rescaled else action))
    edges = [-1 + 2 * i / 255 for i in range(255)] + [1.0]
    number = sum(1 for edge in edges if edge <= value)
    cell = min(max(number - 1, 0), 254)
    centre = (edges[cell] + edges[cell + 1]) / 2
    return 32000 - number, 0.5 * (centre + 1) * (high - low) + low if rescaled else centre


@given(st.lists(st.floats(-1.3, 1.3), min_size=3, max_size=3))
def test_openvla_layout_agrees_with_plain_loops(action: list[float]) -> None:
    codec = ActionCodec.openvla(STATS)
    indices = codec.encode([action], executed=False)
    decoded = codec.decode(indices, executed=False)[0]
    for d in range(3):
        token, value = independent_openvla(action[d], STATS.q01[d], STATS.q99[d], STATS.mask[d])
        if abs(decoded[d] - value) > 1e-9:  # the action lies on an edge to rounding
            half = codec.half_bins()[d]
            assert (
                abs(decoded[d] - value) < 2.01 * half and abs(decoded[d] - action[d]) <= half + 1e-9
            )
            continue
        assert openvla_token_ids(indices)[0, d] == token or token == 31744


def test_openvla_ids_span_the_last_256_words_before_the_padding() -> None:
    codec = ActionCodec.openvla(STATS, chunk=8)
    ids = openvla_token_ids(codec.encode([[9.0, 9.0, 1.0], [-9.0, -9.0, -1.0]], executed=False))
    assert ids.tolist() == [[31744] * 3, [31999] * 3]
    np.testing.assert_array_equal(
        openvla_indices(openvla_token_ids(np.arange(256))), np.arange(256)
    )
    columns = np.arange(32064)[openvla_logit_slice()]
    assert columns[0] == 31744 and columns[-1] == 31999 and len(columns) == 256
    np.testing.assert_array_equal(openvla_indices(columns), 255 - np.arange(256))
    for wrong in (31743, 32000, -1):
        with pytest.raises(ActionError, match="31744 to 31999"):
            openvla_indices([wrong])


def test_openvla_has_255_centres_so_the_last_index_is_decoded_like_the_one_before() -> None:
    codec = ActionCodec((-1.0,), (1.0,), layout="openvla")
    every = codec.decode(np.arange(256)[:, None])[:, 0]
    assert len(set(every.tolist())) == 255 and every[254] == every[255]
    np.testing.assert_array_equal(codec.encode(every[:255, None])[:, 0], np.arange(255))


@pytest.mark.parametrize(
    "convention, opening, closing",
    [("binary_sign", 1.0, -1.0), ("openvla", -1.0, 1.0), ("maniskill", 1.0, -1.0)],
)
def test_gripper_conventions(convention, opening: float, closing: float) -> None:
    codec = ActionCodec.from_space(SPACE, bins=21, gripper_convention=convention)
    both = np.array([[0.0, 0.0, opening], [0.0, 0.0, closing]])
    np.testing.assert_array_equal(codec.decode(codec.encode(both))[:, 2], both[:, 2])
    every = np.tile(np.arange(21)[:, None], (1, 3))
    executed = codec.decode(every)
    assert set(executed[:, 2].tolist()) == {-1.0, 1.0}
    # the decision survives
    np.testing.assert_array_equal(codec.decode(codec.encode(executed)), executed)
    policy = codec.decode(every, executed=False)[:, 2]
    threshold = 0.0 if convention == "binary_sign" else 0.5
    np.testing.assert_array_equal(executed[:, 2] == opening, policy > threshold)
    np.testing.assert_array_equal(
        codec.encode(codec.decode(every, executed=False), executed=False), every
    )


def test_openvla_gripper_is_normalised_then_inverted() -> None:
    codec = ActionCodec.openvla(STATS)
    for g in (0.0, 0.2, 0.49, 0.51, 0.8, 1.0):
        index = codec.encode([[0.0, 0.0, g]], executed=False)
        assert codec.decode(index)[0, 2] == -math.copysign(1.0, 2 * g - 1)


def test_raw_gripper_is_a_dimension_like_another() -> None:
    codec = ActionCodec.from_space(SPACE, bins=21)
    assert codec.gripper == 2
    np.testing.assert_allclose(
        codec.decode(codec.encode([[0.0, 0.0, 0.3]]))[0, 2], 0.3, atol=1 / 21
    )


def test_masked_dimensions_are_not_rescaled() -> None:
    codec = ActionCodec.from_statistics(STATS, bins=11)
    low, high = codec.bounds()
    assert low.tolist() == [-0.7, -0.2, -1.0] and high.tolist() == [0.9, 0.3, 1.0]
    assert codec.decode([[10, 10, 10]])[0, 2] == pytest.approx(1 - 1 / 11)


def test_a_dimension_without_spread_decodes_to_its_value() -> None:
    codec = ActionCodec((0.4, -1.0), (0.4, 1.0), bins=33)
    indices = codec.encode([[0.4, 0.0], [7.0, 0.0]])
    assert indices.tolist() == [[16, 16], [16, 16]]
    assert codec.decode([[0, 16], [32, 16]]).tolist() == [[0.4, 0.0], [0.4, 0.0]]


def test_an_odd_number_of_bins_keeps_zero() -> None:
    codec = ActionCodec((-1.0,), (1.0,), bins=33)
    assert codec.decode(codec.encode([[0.0]]))[0, 0] == 0.0


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_actions_that_are_not_finite_are_refused(bad: float) -> None:
    codec = ActionCodec.from_space(SPACE)
    with pytest.raises(ActionError, match="finite"):
        codec.encode([[0.0, bad, 0.0]])
    with pytest.raises(ActionError, match="finite"):
        codec.targets([[0.0, bad, 0.0]], 0)


def test_wrong_shapes_and_indices_are_refused() -> None:
    codec = ActionCodec.from_space(SPACE, bins=9)
    with pytest.raises(ActionError, match="3 dimensions"):
        codec.encode([[0.0, 0.0]])
    with pytest.raises(ActionError, match=r"\(K, 3\)"):
        codec.decode([0, 0, 0])
    with pytest.raises(ActionError, match="whole-number"):
        codec.decode([[0.0, 1.0, 2.0]])
    for wrong in (-1, 9):
        with pytest.raises(ActionError, match="0 to 8"):
            codec.decode([[0, 0, wrong]])


def test_batches_keep_their_leading_dimensions() -> None:
    codec = ActionCodec.from_space(SPACE, bins=9, chunk=4, repeat=2)
    indices = np.random.default_rng(0).integers(0, 9, (5, 4, 3))
    actions = codec.decode(indices)
    assert actions.shape == (5, codec.steps, 3) and codec.tokens == 12
    np.testing.assert_array_equal(codec.encode(actions[:, ::2]), indices)


def test_targets_average_repeated_steps_and_mark_what_lies_after_the_end() -> None:
    codec = ActionCodec((-1.0, -1.0), (1.0, 1.0), bins=201, chunk=3, repeat=2, gripper=1)
    actions = np.array([[0.1, 1.0], [0.3, -1.0], [0.5, 1.0], [0.7, 1.0], [0.9, -1.0]])
    indices, valid = codec.targets(actions, 1)
    decoded = codec.decode(indices)[::2]
    np.testing.assert_allclose(decoded[:, 0], [0.4, 0.8, 0.9], atol=0.005)
    np.testing.assert_allclose(decoded[:, 1], [1.0, -1.0, -1.0], atol=0.006)
    assert valid.tolist() == [True, True, False]
    with pytest.raises(ActionError, match="start below T"):
        codec.targets(actions, 5)


@given(
    bins=st.integers(3, 400),
    chunk=st.integers(1, 9),
    bounds=st.lists(bounded(), min_size=1, max_size=3),
)
@settings(max_examples=40)
def test_json_and_pickle_give_the_same_codec(
    bins: int, chunk: int, bounds: list[tuple[float, float]]
) -> None:
    codec = ActionCodec(
        tuple(b[0] for b in bounds),
        tuple(b[1] for b in bounds),
        bins=bins,
        chunk=chunk,
        gripper=0,
        gripper_convention="maniskill",
        layout="openvla",
    )
    assert ActionCodec.from_json(codec.to_json()) == codec == pickle.loads(pickle.dumps(codec))
    assert hash(ActionCodec.from_dict(json.loads(codec.to_json()))) == hash(codec)


@pytest.mark.parametrize(
    "change, text",
    [
        ({"bins": 1}, "bins"),
        ({"bins": True}, "bins"),
        ({"chunk": 0}, "chunk"),
        ({"repeat": 0}, "repeat"),
        ({"low": [1, 1, 1]}, "low <= high"),
        ({"high": [float("nan")] * 3}, "finite"),
        ({"mask": [True]}, "same length"),
        ({"gripper": 3}, "0 to 2"),
        ({"gripper": None, "gripper_convention": "openvla"}, "needs gripper"),
        ({"gripper_convention": "openvl"}, "Did you mean 'openvla'"),
        ({"layout": "evn"}, "Did you mean 'even'"),
        ({"chunks": 2}, "Did you mean 'chunk'"),
    ],
)
def test_wrong_settings_say_what_was_expected(change: dict, text: str) -> None:
    data = {**ActionCodec.from_space(SPACE).to_dict(), **change}
    with pytest.raises(ConfigError, match=text):
        ActionCodec.from_dict(data)


def test_json_that_is_no_codec() -> None:
    for text in ("{", "[1]", "{}"):
        with pytest.raises(ConfigError, match="expected a codec"):
            ActionCodec.from_json(text)


def test_statistics_match_numpy_and_survive_the_file(tmp_path) -> None:
    actions = np.random.default_rng(3).normal(size=(500, 4)) * [1, 2, 3, 0]
    stats = ActionStatistics.of(actions, mask=[True, True, True, False], trajectories=7)
    ordered = np.sort(actions, axis=0)
    position = 0.01 * 499
    low = ordered[4] + (position - 4) * (ordered[5] - ordered[4])
    np.testing.assert_allclose(stats.q01, low, rtol=1e-12)
    np.testing.assert_allclose(
        stats.std, np.sqrt(((actions - actions.mean(0)) ** 2).mean(0)), atol=1e-12
    )
    path = tmp_path / "dataset_statistics.json"
    stats.write(path, "a_no_noops")
    assert ActionStatistics.read(path) == stats == ActionStatistics.read(path, "a")
    STATS.write(path, "b")
    assert ActionStatistics.read(path, "b") == STATS and ActionStatistics.read(path, "a") == stats
    assert json.loads(path.read_text())["b"]["action"]["mask"] == [True, True, False]
    with pytest.raises(DataError, match="a_no_noops, b"):
        ActionStatistics.read(path)
    with pytest.raises(DataError, match="Did you mean 'a_no_noops'"):
        ActionStatistics.read(path, "a_no_nops")


def test_statistics_of_nothing_or_of_nan_are_refused(tmp_path) -> None:
    with pytest.raises(DataError, match="N >= 1"):
        ActionStatistics.of(np.zeros((0, 3)))
    with pytest.raises(DataError, match="row 1"):
        ActionStatistics.of([[0.0], [float("nan")]])
    with pytest.raises(DataError, match="no file"):
        ActionStatistics.read(tmp_path / "none.json")
    path = tmp_path / "bad.json"
    for text, message in (
        ("{", "expected JSON"),
        ("[]", "object by data set"),
        ('{"a": {}}', "'action'"),
        ('{"a": {"action": {"q01": [0.0]}}}', "q99"),
        ('{"a": {"action": {"q01": [0.0], "q99": [1.0, 2.0]}}}', "found another number in q99"),
    ):
        path.write_text(text)
        with pytest.raises(DataError, match=message):
            ActionStatistics.read(path)


def test_statistics_with_zero_spread_make_a_working_codec() -> None:
    stats = ActionStatistics.of(np.tile([0.0, 3.0], (10, 1)))
    codec = ActionCodec.from_statistics(stats, bins=256)
    assert codec.decode(codec.encode([[5.0, -5.0]])).tolist() == [[0.0, 3.0]]
