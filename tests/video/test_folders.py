"""A folder of numbered pictures is a clip like any other."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from assets.make_video_fixtures import draw, frame_number
from mmrl.errors import MediaError
from mmrl.video.decode import probe, read_clip
from mmrl.video.sampling import FrameSampling


def folder_of(path: Path, names: list[str]) -> Path:
    path.mkdir(exist_ok=True)
    for number, name in enumerate(names):
        Image.fromarray(draw(number)).save(path / name)
    return path


def test_pictures_go_by_number_and_rate(tmp_path: Path) -> None:
    # img_10 comes after img_9
    folder = folder_of(tmp_path / "a", [f"img_{n}.png" for n in range(8, 28)])
    (folder / "groundtruth.txt").write_text("1,2,3,4\n")
    (folder / ".hidden.png").write_bytes(b"")
    info = probe(folder, folder_fps=10)
    assert (info.frames, info.fps, info.duration_s, info.width, info.height, info.codec) == (
        20,
        10,
        2.0,
        96,
        64,
        "pictures",
    )
    clip = read_clip(
        folder, FrameSampling("timestamps", timestamps=(0.0, 0.35, 1.9), folder_fps=10)
    )
    assert [frame_number(f) for f in clip.rgb_THWC] == [0, 3, 19] and clip.decoder == "pictures"
    assert np.array_equal(clip.rgb_THWC[1], draw(3))
    # 2 frames per second unless told
    assert read_clip(folder, FrameSampling(fps=1)).info.duration_s == 10.0


def test_steps_may_be_wide_but_must_be_equal(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "a", [f"{n:05d}.jpg" for n in range(0, 50, 5)])
    assert probe(folder).frames == 10
    (folder / "00020.jpg").unlink()
    with pytest.raises(MediaError, match="25 after 15") as caught:
        probe(folder)
    assert caught.value.kind == "truncated"


@pytest.mark.parametrize(
    ("names", "kind", "says"),
    [
        ([], "empty", "found none"),
        (["a.png"], "unsupported", "number in the name"),
        (["1.png", "001.jpg"], "unsupported", "two frames"),
    ],
)
def test_folders_that_are_no_clip(tmp_path: Path, names: list[str], kind: str, says: str) -> None:
    with pytest.raises(MediaError, match=says) as caught:
        read_clip(folder_of(tmp_path / "a", names), FrameSampling())
    assert caught.value.kind == kind


def test_broken_and_differing_pictures(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "a", ["1.png", "2.png", "3.png"])
    (folder / "2.png").write_bytes((folder / "2.png").read_bytes()[:200])
    with pytest.raises(MediaError) as caught:
        read_clip(folder, FrameSampling("all"))
    assert caught.value.kind == "truncated"
    Image.fromarray(draw(1, 80, 64)).save(folder / "2.png")
    with pytest.raises(MediaError, match="one size"):
        read_clip(folder, FrameSampling("all"))


def test_one_picture_is_a_clip_of_one_frame(tmp_path: Path) -> None:
    assert read_clip(folder_of(tmp_path / "a", ["7.png"]), FrameSampling()).indices == (0,)
