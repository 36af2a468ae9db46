"""qwen-vl-utils reads the fixture clips for real: same frames, same size, same pixel values, same sampled rate.

Its resizing is torchvision's older one in float32; the processors of transformers, and mmrl by default, resize in uint8.
"""

from __future__ import annotations

import mmrl  # noqa: F401  (first: it lets torchvision, which qwen_vl_utils imports, load beside a CPU torch)

# isort: split
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from qwen_vl_utils import process_vision_info, vision_process

from assets.make_video_fixtures import FOLDER
from mmrl.video.budget import frame_pixels, resize_frames, smart_resize
from mmrl.video.decode import probe, read_clip
from mmrl.video.sampling import FrameSampling, sample_rate, select_frames
from tests.video.decoder_kit import needs

CLIPS = ("counter.mp4", "ntsc.mp4", "vp9.webm", "bt709.mp4", "turned_90.mp4", "two_frames.mp4")


@pytest.fixture(params=["decord", "torchcodec"])
def reader(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """qwen-vl-utils made to use one of its readers, and kept from falling back to another."""
    needs(request.param)
    monkeypatch.setattr(vision_process, "FORCE_QWENVL_VIDEO_READER", request.param)
    monkeypatch.delitem(vision_process.VIDEO_READER_BACKENDS, "torchvision")
    vision_process.get_video_reader_backend.cache_clear()
    yield request.param
    vision_process.get_video_reader_backend.cache_clear()


def ours(
    name: str, fields: dict[str, Any], budget: dict[str, Any], factor: int
) -> tuple[np.ndarray, tuple[int, ...], float]:
    sampling = FrameSampling.from_mapping(fields)

    clip = read_clip(FOLDER / name, sampling)
    low, high = frame_pixels(len(clip.indices), factor=factor, **budget)
    height, width = smart_resize(
        clip.info.height, clip.info.width, factor=factor, min_pixels=low, max_pixels=high
    )
    return (
        resize_frames(clip.rgb_THWC, height, width, precision="float32"),
        clip.indices,
        clip.info.fps,
    )


@pytest.mark.parametrize("name", CLIPS)
@pytest.mark.parametrize(
    ("fields", "element"),
    [
        ({"fps": 2.0}, {"fps": 2.0}),
        ({"fps": 8.0, "max_frames": 10}, {"fps": 8.0, "max_frames": 10}),
        ({"num_frames": 2}, {"nframes": 2}),
        (
            {"fps": 5.0, "start": 0.0, "end": 0.7},
            {"fps": 5.0, "video_start": 0.0, "video_end": 0.7},
        ),
    ],
)
def test_frames_and_pixels_are_those_of_fetch_video(
    name: str, fields: dict[str, Any], element: dict[str, Any], reader: str
) -> None:
    budget = {"min_pixels": 4 * 28 * 28, "total_pixels": 64 * 28 * 28}
    ask = {"video": str(FOLDER / name), **element, **budget}
    (frames_TCHW, metadata), sampled = vision_process.fetch_video(
        ask, return_video_sample_fps=True, return_video_metadata=True
    )
    rgb_THWC, indices, fps = ours(name, fields, budget, 28)
    assert list(indices) == list(metadata["frames_indices"])
    # torchcodec measures rounded milliseconds
    assert fps == pytest.approx(metadata["fps"], rel=1e-3)
    info = probe(FOLDER / name)
    rate = sample_rate(
        info.timestamps_s, FrameSampling.from_mapping(fields), indices, info.fps, info.duration_s
    )
    assert rate == pytest.approx(float(sampled), rel=1e-3)
    assert frames_TCHW.shape == (len(indices), 3, *rgb_THWC.shape[1:3])
    difference = np.abs(frames_TCHW.permute(0, 2, 3, 1).numpy() - rgb_THWC)
    assert difference.max() <= 2 and difference.mean() <= 0.25  # observed 0


@pytest.mark.parametrize(("start", "end"), [(1.0, 3.0), (1.01, 1.49), (0.5, 4.0)])
def test_the_sampled_rate_of_a_part(start: float, end: float, reader: str) -> None:
    """Frames shown of the frames of the part, 51 of 2 seconds at 25 a second: 1.9608 and not 2."""
    ask = {
        "video": str(FOLDER / "counter.mp4"),
        "fps": 2.0,
        "video_start": start,
        "video_end": end,
        "min_pixels": 4 * 28 * 28,
    }
    _, sampled = vision_process.fetch_video(ask, return_video_sample_fps=True)
    info, sampling = probe(FOLDER / "counter.mp4"), FrameSampling(fps=2.0, start=start, end=end)
    indices = select_frames(info.timestamps_s, sampling, fps=info.fps, duration_s=info.duration_s)
    rate = sample_rate(info.timestamps_s, sampling, indices, info.fps, info.duration_s)
    assert rate == pytest.approx(float(sampled), rel=1e-6)
    assert start != 1.0 or rate == pytest.approx(4 / 51 * 25)


@pytest.mark.parametrize(
    ("patch", "budget"),
    [(14, {}), (16, {}), (14, {"max_pixels": 150 * 784}), (16, {"total_pixels": 500 * 1024})],
)
def test_sizes_are_those_of_process_vision_info(
    patch: int, budget: dict[str, Any], reader: str
) -> None:
    """Qwen2.5-VL (patch 14) and Qwen3-VL (16), with their default budgets and others."""
    messages = [
        {
            "role": "user",
            "content": [{"type": "video", "video": str(FOLDER / "counter.mp4"), **budget}],
        }
    ]
    _, videos, kwargs = process_vision_info(
        messages, return_video_kwargs=True, image_patch_size=patch
    )
    rgb_THWC, indices, fps = ours("counter.mp4", {}, budget, 2 * patch)
    assert videos is not None and tuple(videos[0].shape) == (len(indices), 3, *rgb_THWC.shape[1:3])
    assert kwargs["fps"] == [pytest.approx(len(indices) / 100 * fps)]
    assert np.abs(videos[0].permute(0, 2, 3, 1).numpy() - rgb_THWC).max() <= 2


def test_a_clip_of_one_frame_is_an_error_there_and_one_frame_here(reader: str) -> None:
    with pytest.raises((ValueError, KeyError)):
        vision_process.fetch_video({"video": str(FOLDER / "one_frame.mp4")})
    assert len(read_clip(FOLDER / "one_frame.mp4", FrameSampling()).indices) == 1
