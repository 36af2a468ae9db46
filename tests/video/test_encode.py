"""Written videos: what two other decoders read is what was written, at the times asked for; same frames, same bytes."""

from __future__ import annotations

import os
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mmrl.errors import ConfigError
from mmrl.video.encode import CODECS, write_video

av = pytest.importorskip("av")


def _clip(count: int = 8, height: int = 48, width: int = 64, seed: int = 0) -> np.ndarray:
    """A smooth canvas with a red square that moves to the right."""
    rng = np.random.default_rng(seed)
    frames = np.empty((count, height, width, 3), np.uint8)
    frames[..., 0], frames[..., 1] = np.linspace(90, 190, width).astype(np.uint8)[None, None], 140
    frames[..., 2] = np.linspace(90, 190, height).astype(np.uint8)[None, :, None]
    frames += rng.integers(0, 5, (1, height, width, 3), dtype=np.uint8)
    for k in range(count):
        x = k * (width - 16) // max(1, count - 1)
        frames[k, 16:32, x : x + 16] = (225, 35, 35)
    return frames


def _read(path: str | Path) -> tuple[np.ndarray, list[float], list[bool], Any]:
    """(frames, seconds, key frame or not, (duration, codec, average rate)) by PyAV's own demuxer and decoder."""
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        found = [
            (f.to_ndarray(format="rgb24"), float(f.time), bool(f.key_frame))
            for f in container.decode(stream)
        ]
        length = (
            stream.duration * stream.time_base
            if stream.duration
            else Fraction(container.duration, av.time_base)
        )
        facts = float(length), stream.codec_context.name, stream.average_rate
    return np.stack([f[0] for f in found]), [f[1] for f in found], [f[2] for f in found], facts


def _error(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.abs(a.astype(int) - b).mean())


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("suffix", [".mp4", ".mov", ".mkv"])
def test_what_is_read_is_what_was_written(codec: str, suffix: str, tmp_path: Path) -> None:
    frames = _clip()
    path = write_video(tmp_path / f"a{suffix}", frames, 4, codec=codec, quality=10)
    found, seconds, keys, (duration, name, rate) = _read(path)
    assert found.shape == frames.shape and _error(found, frames) < 4
    assert seconds == pytest.approx(
        [k / 4 for k in range(8)], abs=1e-3
    ) and duration == pytest.approx(2.0, abs=1e-3)
    assert keys == [True] + [False] * 7
    assert {"h264": "h264", "hevc": "hevc", "mpeg4": "mpeg4"}[codec] in name and rate == 4


def test_opencv_sees_the_same_pictures(tmp_path: Path) -> None:
    cv2 = pytest.importorskip("cv2")
    frames = _clip(9, 56, 112)
    path = write_video(tmp_path / "a.mp4", frames, 10, quality=12)
    capture, found = cv2.VideoCapture(path), []
    while (answer := capture.read())[0]:
        found.append(answer[1][:, :, ::-1])
    assert capture.get(cv2.CAP_PROP_FPS) == 10
    capture.release()
    assert len(found) == 9 and _error(np.stack(found), frames) < 4
    # colours are not shifted by the conversion
    red = np.abs(np.stack(found).astype(int) - (225, 35, 35)).sum(-1) < 60
    assert (red.sum((1, 2)) > 0.6 * 256).all()


@pytest.mark.parametrize("fps", [Fraction(30000, 1001), 29.97, 23.976, 1, 0.5, 60, 12.5])
def test_frame_rates_that_are_no_whole_numbers(fps: float | Fraction, tmp_path: Path) -> None:
    _, seconds, _, (duration, _, _) = _read(write_video(tmp_path / "a.mp4", _clip(12), fps))
    assert seconds == pytest.approx([k / float(fps) for k in range(12)], abs=2e-4 * 12)
    assert duration == pytest.approx(12 / float(fps), rel=1e-3)


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    gaps=st.lists(st.floats(0.001, 3), min_size=0, max_size=12),
    last=st.floats(0.001, 3),
    suffix=st.sampled_from([".mp4", ".mov", ".mkv"]),
    codec=st.sampled_from(["h264", "mpeg4"]),
)
def test_frames_at_any_times(
    gaps: list[float], last: float, suffix: str, codec: str, tmp_path: Path
) -> None:
    times = np.concatenate([[0.0], np.cumsum(gaps)])
    path = write_video(
        tmp_path / f"v{suffix}",
        _clip(len(times), 16, 32),
        times=times.tolist(),
        duration=times[-1] + last,
        codec=codec,
    )
    found, seconds, _, (duration, _, _) = _read(path)
    assert len(found) == len(times)
    assert np.abs(np.array(seconds) - times).max() <= 0.0011  # Matroska counts milliseconds
    assert abs(duration - times[-1] - last) <= 0.0011


def test_the_last_frame_lasts_as_long_as_the_one_before(tmp_path: Path) -> None:
    assert _read(write_video(tmp_path / "a.mp4", _clip(3), times=[0, 1, 1.5]))[3][
        0
    ] == pytest.approx(2.0)
    assert _read(write_video(tmp_path / "b.mp4", _clip(1), times=[0]))[3][0] == pytest.approx(1.0)
    assert _read(write_video(tmp_path / "c.mp4", _clip(1), fps=5))[3][0] == pytest.approx(0.2)


@pytest.mark.parametrize("codec", CODECS)
def test_same_frames_same_bytes_and_nothing_about_when_or_by_what(
    codec: str, tmp_path: Path
) -> None:
    a = Path(write_video(tmp_path / "a.mp4", _clip(), 4, codec=codec)).read_bytes()
    os.makedirs(tmp_path / "other", exist_ok=True)
    b = Path(write_video(tmp_path / "other" / "name.mp4", _clip(), 4, codec=codec)).read_bytes()
    assert a == b and b"Lavf" not in a and b"Lavc" not in a
    header = a.index(b"mvhd") + 8
    assert a[header : header + 8] == bytes(8), "creation and modification time are not set"
    assert Path(write_video(tmp_path / "c.mp4", _clip(seed=1), 4, codec=codec)).read_bytes() != a


def test_frames_coded_alone_do_not_show_their_place(tmp_path: Path) -> None:
    frames = _clip(10)
    both = {"forth": frames, "back": frames[::-1]}
    forth, back = (
        _read(write_video(tmp_path / f"{name}.mp4", f, 4, keyframe_every=1))
        for name, f in both.items()
    )
    assert all(forth[2]) and (forth[0] == back[0][::-1]).all()
    shuffled = np.random.default_rng(0).permutation(10)
    assert (
        _read(write_video(tmp_path / "s.mp4", frames[shuffled], 4, keyframe_every=1))[0]
        == forth[0][shuffled]
    ).all()
    usual, turned = (
        _read(write_video(tmp_path / f"{name}.mp4", f, 4))[0] for name, f in both.items()
    )
    assert (usual != turned[::-1]).any(), (
        "predicted frames do differ: the property is one of keyframe_every=1"
    )


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("suffix", [".mp4", ".mov", ".mkv"])
def test_b_frames_reorder_packets_and_change_no_time(
    codec: str, suffix: str, tmp_path: Path
) -> None:
    frames = _clip(20)
    path = write_video(tmp_path / f"a{suffix}", frames, 8, codec=codec, b_frames=2, quality=10)
    with av.open(path) as container:
        shown = [packet.pts for packet in container.demux(video=0) if packet.pts is not None]
    found, seconds, _, (duration, _, _) = _read(path)
    assert shown != sorted(shown) and len(found) == 20
    assert seconds == pytest.approx(
        [k / 8 for k in range(20)], abs=1e-3
    ) and duration == pytest.approx(2.5, abs=1e-3)
    assert _error(found, frames) < 4


def test_key_frames_stand_where_asked(tmp_path: Path) -> None:
    keys = _read(write_video(tmp_path / "a.mp4", _clip(13), 4, keyframe_every=4))[2]
    assert [k for k, key in enumerate(keys) if key] == [0, 4, 8, 12]


def test_quality_trades_bytes_for_error(tmp_path: Path) -> None:
    paths = [write_video(tmp_path / f"{q}.mp4", _clip(), 4, quality=q) for q in (10, 25, 40)]
    sizes, errors = (
        [os.path.getsize(p) for p in paths],
        [_error(_read(p)[0], _clip()) for p in paths],
    )
    assert sizes == sorted(sizes, reverse=True) and errors == sorted(errors)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"codec": "h265"}, r"expected a codec of h264, hevc, mpeg4, found 'h265'"),
        ({"path": "a.avi"}, r"ends in \.mp4, \.mov, \.mkv, found 'a\.avi'"),
        ({"fps": None}, r"found neither; give exactly one"),
        ({"times": [0.0] * 8}, r"found both; give exactly one"),
        ({"fps": None, "times": [0.0] * 8}, r"expected times that rise"),
        (
            {"fps": None, "times": [0, 1, 2]},
            r"expected 8 times in seconds, one per frame, the first 0, found 3",
        ),
        ({"fps": None, "times": list(range(1, 9))}, r"the first 0, found 8"),
        ({"fps": None, "times": [0, 1, 2, 3, 4, 5, 6, float("nan")]}, r"expected 8 times"),
        (
            {"fps": None, "times": list(range(8)), "duration": 7},
            r"expected a duration after the last frame at 7 s, found 7",
        ),
        ({"duration": 2.0}, r"expected no duration together with fps"),
        ({"fps": 0}, r"expected fps above 0 and at most 1000, found 0"),
        ({"fps": float("nan")}, r"expected fps above 0"),
        ({"fps": True}, r"expected fps above 0"),
        ({"fps": 1e-9}, r"expected fps of at least 1/1001"),
        ({"quality": 60}, r"expected quality as a whole number in 0\.\.51, found 60"),
        (
            {"keyframe_every": 0},
            r"expected keyframe_every as a whole number in 1\.\.10000, found 0",
        ),
        (
            {"fps": None, "times": list(range(8)), "b_frames": 2},
            r"expected no b_frames together with times",
        ),
        (
            {"frames": np.zeros((8, 48, 63, 3), np.uint8)},
            r"expected an even height and width .* found 48 x 63",
        ),
        ({"frames": np.zeros((8, 48, 64), np.uint8)}, r"shape \(T, H, W, 3\)"),
        ({"frames": np.zeros((0, 48, 64, 3), np.uint8)}, r"with T >= 1"),
        ({"frames": np.zeros((8, 48, 64, 3), np.float32)}, r"found float32"),
    ],
)
def test_wrong_requests_are_named_and_leave_nothing(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    asked: dict[str, Any] = {"path": "a.mp4", "frames": _clip(), "fps": 4, **change}
    path, frames = tmp_path / asked.pop("path"), asked.pop("frames")
    with pytest.raises(ConfigError, match=message):
        write_video(path, frames, **asked)
    assert not list(tmp_path.iterdir())


def test_a_write_that_fails_leaves_the_old_file_and_no_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = Path(write_video(tmp_path / "a.mp4", _clip(), 4))
    before = path.read_bytes()

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space"):
        write_video(path, _clip(seed=3), 4)
    assert [p.name for p in tmp_path.iterdir()] == ["a.mp4"] and path.read_bytes() == before
