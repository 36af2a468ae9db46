"""Evaluation protocols: their published constants, and image paths checked for shape, area and rotation."""

from __future__ import annotations

import dataclasses
import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmrl.errors import ConfigError
from mmrl.robotics import protocol_sources
from mmrl.robotics.contract import ActionError
from mmrl.robotics.protocols import (
    PROTOCOLS,
    ImagePath,
    center_crop,
    jpeg,
    protocol_of,
    resize,
    resize_with_pad,
    rotate180,
)
from scripts.check_protocols import compare, recorded

SUITES = ("libero_spatial", "libero_object", "libero_goal", "libero_10", "libero_90")


def scene(height: int = 256, width: int = 256) -> np.ndarray:
    y, x = np.mgrid[:height, :width]
    return np.stack(
        [x * 255 // max(1, width - 1), y * 255 // max(1, height - 1), (x + y) % 97], axis=-1
    ).astype(np.uint8)


@pytest.mark.parametrize(
    "name, steps, wait, seed, draws",
    [
        ("openvla_oft", (220, 280, 300, 520, 400), 10, 7, "in-turn"),
        ("openpi", (220, 280, 300, 520, 400), 10, 7, "in-turn"),
        ("lerobot", (280, 280, 300, 520, 400), 10, 1000, "per-episode"),
        ("simplevla_rl", (512,) * 5, 10, 0, "constant"),
        ("rlinf", (512,) * 5, 15, 0, "constant"),
    ],
)
def test_published_constants(
    name: str, steps: tuple[int, ...], wait: int, seed: int, draws: str
) -> None:
    protocol = protocol_of(name)
    assert tuple(protocol.steps(suite) for suite in SUITES) == steps
    assert protocol.wait_steps == wait and protocol.seed == seed
    assert protocol.wait_gripper == (0 if name == "rlinf" else -1)
    assert protocol.env_draws == draws and protocol.trials == 50 and protocol.rotate
    assert protocol.image_size == (360 if name == "lerobot" else 256)


def test_every_constant_is_what_its_line_says() -> None:
    """The lines as scripts/check_protocols.py read them from checkouts of the five projects."""
    rows = compare(recorded())
    assert [r for r in rows if not r["equal"]] == []
    named = {(r["protocol"], r["field"].partition(".")[0]) for r in rows}
    unsaid = {"name", "source", "temperature", "training_states", "success", "image"}
    for name, protocol in PROTOCOLS.items():
        fields = {
            f.name for f in dataclasses.fields(protocol) if getattr(protocol, f.name) is not None
        }
        lacking = {f for f in fields - unsaid if (name, f) not in named}
        assert lacking <= {"gripper", "training_states", "seed", "replan"}, (name, lacking)


@pytest.mark.parametrize(
    "field, wrong", [("wait_steps", 11), ("image_size", 128), ("rotate", False)]
)
def test_a_constant_that_differs_from_its_line_is_found(
    monkeypatch: pytest.MonkeyPatch, field: str, wrong: object
) -> None:
    changed = dataclasses.replace(protocol_of("openpi"), **{field: wrong})
    monkeypatch.setattr(protocol_sources, "PROTOCOLS", {**PROTOCOLS, "openpi": changed})
    found = [(r["protocol"], r["field"]) for r in compare(recorded()) if not r["equal"]]
    assert found == [("openpi", field)]


def test_limits_exceed_the_longest_demonstrations() -> None:
    longest = dict(zip(SUITES, (193, 254, 270, 505, 373), strict=True))
    for protocol in PROTOCOLS.values():
        assert all(protocol.steps(suite) > longest[suite] for suite in SUITES)


def test_what_sets_the_protocols_apart() -> None:
    assert {p.name for p in PROTOCOLS.values() if p.training_states} == {"simplevla_rl", "rlinf"}
    assert {p.name for p in PROTOCOLS.values() if p.gripper == "openvla"} == {
        "openvla_oft",
        "simplevla_rl",
        "rlinf",
    }
    assert {p.name: p.temperature for p in PROTOCOLS.values() if p.temperature} == {"rlinf": 1.6}
    assert (
        protocol_of("openpi").replan == 5
        and protocol_of("openvla_oft").replan == protocol_of("openvla_oft").chunk == 8
    )


@pytest.mark.parametrize("name", list(PROTOCOLS))
def test_describe_is_json_and_says_every_field(name: str) -> None:
    protocol = protocol_of(name)
    told = json.loads(json.dumps(protocol.describe()))
    named = {field.name for field in dataclasses.fields(protocol)}
    assert {"image_size", "rotate"} == named - set(told)
    assert told["image"]["rendered"] == protocol.image_size and told["image"]["rotated_180"] is True
    assert told["max_steps"]["libero_10"] == protocol.steps("libero_10")
    with pytest.raises(dataclasses.FrozenInstanceError):
        protocol.trials = 5  # type: ignore[misc]
    with pytest.raises(TypeError):
        protocol.max_steps["libero_10"] = 9  # type: ignore[index]


def test_unknown_names() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'openvla_oft'"):
        protocol_of("openvla-oft")
    with pytest.raises(ConfigError, match="Did you mean 'libero_goal'"):
        protocol_of("openpi").steps("libero_goals")


@pytest.mark.parametrize(
    "name, side",
    [
        ("openvla_oft", 224),
        ("openpi", 224),
        ("lerobot", 360),
        ("simplevla_rl", 224),
        ("rlinf", 224),
    ],
)
def test_pictures_come_out_upright_and_of_the_size_it_says(name: str, side: int) -> None:
    protocol = protocol_of(name)
    upright = scene(protocol.image_size, protocol.image_size)
    upside_down = upright[::-1, ::-1]
    seen = protocol.picture(upside_down)
    assert (
        seen.shape == (side, side, 3)
        and seen.dtype == np.uint8
        and side == protocol.describe()["image"]["side"]
    )
    # red grows to the right
    assert int(seen[side // 2, -5, 0]) > 200 > 60 > int(seen[side // 2, 4, 0])
    # green grows downwards
    assert int(seen[-5, side // 2, 1]) > 200 > 60 > int(seen[4, side // 2, 1])
    np.testing.assert_array_equal(seen, protocol.picture(upright, rotated=True))


@given(st.integers(1, 40), st.integers(1, 40))
@settings(max_examples=30)
def test_rotation_moves_every_pixel_and_undoes_itself(height: int, width: int) -> None:
    picture = (
        np.random.default_rng(height * 41 + width)
        .integers(0, 256, (height, width, 3))
        .astype(np.uint8)
    )
    turned = rotate180(picture)
    assert (
        turned.flags.c_contiguous
        and (turned[0, 0] == picture[-1, -1]).all()
        and (turned[-1, 0] == picture[0, -1]).all()
    )
    np.testing.assert_array_equal(rotate180(turned), picture)
    np.testing.assert_array_equal(turned, np.rot90(picture, 2))


@given(st.floats(0.1, 1.0), st.integers(20, 120))
@settings(max_examples=30)
def test_the_crop_shows_its_share_of_the_area(area: float, side: int) -> None:
    """On a ramp the crop's first and last value say where it begins and ends."""
    x = np.linspace(0, 255, side)
    ramp = np.repeat(np.repeat(x[None, :, None], side, axis=0), 3, axis=2).astype(np.uint8)
    seen = center_crop(ramp, area)
    assert seen.shape == ramp.shape
    share = (float(seen[0, -1, 0]) - float(seen[0, 0, 0])) / 255
    assert share == pytest.approx(math.sqrt(area), abs=2.1 / 255)
    # from the middle
    assert float(seen[0, 0, 0]) + float(seen[0, -1, 0]) == pytest.approx(255, abs=3)


def loop_crop(picture: np.ndarray, area: float, side: int) -> np.ndarray:
    """tf.image.crop_and_resize as documented: bilinear, box corners on pixel centres."""
    height, width = picture.shape[:2]
    a, b = (1 - math.sqrt(area)) / 2, (1 + math.sqrt(area)) / 2
    out = np.zeros((side, side, 3))
    for i in range(side):
        for j in range(side):
            y = a * (height - 1) + i * (b - a) * (height - 1) / (side - 1)
            x = a * (width - 1) + j * (b - a) * (width - 1) / (side - 1)
            y0, x0 = min(int(y), height - 2), min(int(x), width - 2)
            v, u = y - y0, x - x0
            p = picture.astype(float)
            above, below = ((1 - u) * p[row, x0] + u * p[row, x0 + 1] for row in (y0, y0 + 1))
            out[i, j] = (1 - v) * above + v * below
    return out


def test_crop_agrees_with_plain_loops() -> None:
    picture = np.random.default_rng(0).integers(0, 256, (19, 23, 3)).astype(np.uint8)
    for area, side in ((0.9, 14), (0.5, 20), (1.0, 9)):
        assert (
            np.abs(center_crop(picture, area, side) - loop_crop(picture, area, side)).max()
            <= 0.5 + 1e-6
        )
    np.testing.assert_array_equal(center_crop(picture, 1.0), picture)
    for area in (0.0, 1.1, -1.0):
        with pytest.raises(ConfigError, match="area above 0"):
            center_crop(picture, area)


def test_padding_keeps_proportions_and_a_square_stays_whole() -> None:
    wide = np.full((50, 100, 3), 200, np.uint8)
    seen = resize_with_pad(wide, 64)
    assert (
        seen.shape == (64, 64, 3)
        and (seen[16:48] == 200).all()
        and (seen[:16] == 0).all()
        and (seen[48:] == 0).all()
    )
    tall = resize_with_pad(np.full((100, 50, 3), 9, np.uint8), 64)
    assert (tall[:, 16:48] == 9).all() and tall.sum() == 64 * 32 * 3 * 9
    square = scene(64, 64)
    np.testing.assert_array_equal(resize_with_pad(square, 64), square)


def test_jpeg_changes_little_but_something() -> None:
    picture = scene(64, 64)
    error = np.abs(jpeg(picture).astype(int) - picture).mean()
    assert 0 < error < 8
    assert jpeg(picture).shape == picture.shape


def test_resizing_keeps_flat_colour_and_mean() -> None:
    flat = np.full((256, 256, 3), 77, np.uint8)
    assert (resize(flat, 224) == 77).all()
    assert abs(resize(scene(), 224).mean() - scene().mean()) < 1
    assert ImagePath(method="lanczos", side=32)(scene()).shape == (32, 32, 3)


@pytest.mark.parametrize(
    "bad",
    [
        np.zeros((4, 4, 3)),
        np.zeros((4, 4), np.uint8),
        np.zeros((4, 4, 4), np.uint8),
        np.zeros((0, 4, 3), np.uint8),
    ],
)
def test_what_is_no_picture_is_refused(bad: np.ndarray) -> None:
    for transform in (
        rotate180,
        jpeg,
        lambda p: resize(p, 8),
        lambda p: resize_with_pad(p, 8),
        lambda p: center_crop(p, 0.9),
    ):
        with pytest.raises(ActionError, match="uint8 picture"):
            transform(bad)
