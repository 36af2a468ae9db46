"""The same frames from every decoder: against frames decoded by the ffmpeg program, and by the number each frame carries.

python -m assets.make_video_fixtures        # writes the clips and references anew
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest

from assets.make_video_fixtures import FOLDER, HEIGHT, WIDTH, draw, encode, frame_number
from mmrl.errors import ConfigError, MediaError, MissingExtraError
from mmrl.video import decode, probing
from mmrl.video.decode import choose_decoder, probe, read_clip
from mmrl.video.decoders import DECODERS, decode_frames, refusal
from mmrl.video.probing import scan, upright
from mmrl.video.sampling import FrameSampling
from tests.video.decoder_kit import needs

CLIPS = tuple(json.loads((FOLDER / "manifest.json").read_text())["clips"])
TURNED = {
    "turned_90.mp4": (HEIGHT, WIDTH, 90),
    "turned_270.mp4": (HEIGHT, WIDTH, 270),
    "turned_180.mp4": (WIDTH, HEIGHT, 180),
}
REFUSED = {  # decoders that would give other frames or colours say so
    "torchcodec": {"late_start.ts", "mirrored.mp4", "old.avi", "picture.gif"},
    "decord": {
        "late_start.ts",
        "mirrored.mp4",
        "old.avi",
        "picture.gif",
        "edit_list.mp4",
        "ten_bit.mkv",
        "odd_size.webm",
    },
    "opencv": {"old.avi", "ten_bit.mkv"},
    "pyav": set(),
}
# tolerance: 8-bit levels at most and on average. Observed with the pinned versions: 0
LEVELS, MEAN = 2, 0.5


@pytest.fixture(params=list(DECODERS))
def decoder(request: pytest.FixtureRequest) -> str:
    return needs(request.param)


def reference(name: str) -> dict[str, np.ndarray]:
    with np.load(FOLDER / f"{name}.npz") as data:
        return dict(data)


@pytest.mark.parametrize("name", CLIPS)
def test_times_and_sizes_are_those_of_the_ffmpeg_program(name: str) -> None:
    info, expected = probe(FOLDER / name), reference(name)
    assert info.frames == len(expected["times"]) == len(info.timestamps_s)
    assert info.timestamps_s[0] == 0 and np.abs(info.timestamps_s - expected["times"]).max() < 1e-5
    assert info.keyframes == tuple(expected["keyframes"])
    assert info.duration_s > info.timestamps_s[-1]
    assert info.frames / info.duration_s == pytest.approx(info.fps, rel=0.05)
    if name != "wide_pixels.mp4":  # ffmpeg keeps the stored width of oblong pixels
        assert (info.height, info.width) == expected["frames"].shape[1:3]


@pytest.mark.parametrize("name", CLIPS)
def test_frames_are_those_of_the_ffmpeg_program(name: str, decoder: str) -> None:
    expected = reference(name)
    moments = tuple(float(expected["times"][i]) for i in expected["indices"])
    sampling = FrameSampling(kind="timestamps", timestamps=moments)
    if name in REFUSED[decoder]:
        with pytest.raises(MediaError, match="pyav") as caught:
            read_clip(FOLDER / name, sampling, decoder=decoder)
        assert caught.value.kind == "unsupported"
        return
    clip = read_clip(FOLDER / name, sampling, decoder=decoder)
    assert clip.indices == tuple(expected["indices"]) and clip.decoder == decoder
    assert clip.timestamps_s == pytest.approx(moments, abs=1e-5)
    got = clip.rgb_THWC[:, :, ::4] if name == "wide_pixels.mp4" else clip.rgb_THWC
    # 3 stored columns become 4: every fourth stays where a third one was, but for smoothing
    if name == "wide_pixels.mp4":
        assert clip.rgb_THWC.shape[1:3] == (HEIGHT, WIDTH * 4 // 3)
        difference = np.abs(got[:, :, 1:-1].astype(int) - expected["frames"][:, :, ::3][:, :, 1:-1])
        assert difference.mean() < 12
        return
    difference = np.abs(got.astype(int) - expected["frames"])
    assert difference.max() <= LEVELS and difference.mean() <= MEAN


@pytest.mark.parametrize("name", [n for n in CLIPS if n not in ("mirrored.mp4", *TURNED)])
def test_any_subset_gives_exactly_the_frames_asked_for(name: str, decoder: str) -> None:
    """Each frame carries its number; seeks land in every kind of group of pictures."""
    index, rng = scan(str(FOLDER / name)), random.Random(name + decoder)
    first = 33 if name == "edit_list.mp4" else 0  # the edit list hides 33 frames
    if refusal(index, decoder) or name in REFUSED[decoder]:
        return
    for _ in range(4):
        wanted = sorted(
            rng.sample(range(index.info.frames), min(index.info.frames, rng.randint(1, 4)))
        )
        assert [frame_number(f) - first for f in decode_frames(index, wanted, decoder)] == wanted


def test_every_frame_of_a_clip_in_order(decoder: str) -> None:
    clip = read_clip(FOLDER / "counter.mp4", FrameSampling(kind="all"), decoder=decoder)
    assert [frame_number(f) for f in clip.rgb_THWC] == list(range(100)) == list(clip.indices)


@pytest.mark.parametrize("name", TURNED)
def test_turned_clips_come_upright(name: str, decoder: str) -> None:
    width, height, rotation = TURNED[name]
    clip = read_clip(
        FOLDER / name, FrameSampling(kind="timestamps", timestamps=(0.4,)), decoder=decoder
    )
    assert (clip.info.width, clip.info.height, clip.info.rotation) == (width, height, rotation)
    stored = read_clip(
        FOLDER / "bt709.mp4", FrameSampling(kind="timestamps", timestamps=(0.4,))
    ).rgb_THWC[0]
    assert np.array_equal(clip.rgb_THWC[0], np.rot90(stored, rotation // 90))


def test_a_mirrored_clip_is_mirrored_back() -> None:
    sampling = FrameSampling(kind="timestamps", timestamps=(1.0,))
    stored = read_clip(FOLDER / "counter.mp4", sampling).rgb_THWC
    for decoder in ("pyav", "opencv"):
        assert np.array_equal(
            read_clip(FOLDER / "mirrored.mp4", sampling, decoder=decoder).rgb_THWC,
            stored[:, :, ::-1],
        )


def test_the_eight_display_matrices_form_a_group() -> None:
    """Applying a matrix and then its inverse gives the frame back; all eight give different frames."""
    frame = np.arange(2 * 3 * 3).reshape(2, 3, 3)
    eight = [(a, 0, 0, d) for a in (1, -1) for d in (1, -1)] + [
        (0, b, c, 0) for b in (1, -1) for c in (1, -1)
    ]
    seen = {upright(frame, m).tobytes() + bytes(upright(frame, m).shape) for m in eight}
    assert len(seen) == 8
    for a, b, c, d in eight:
        # transposed = inverted
        assert np.array_equal(upright(upright(frame, (a, b, c, d)), (a, c, b, d)), frame)


def test_oblong_pixels_are_made_square() -> None:
    info = probe(FOLDER / "wide_pixels.mp4")
    assert (info.width, info.height) == (WIDTH * 4 // 3, HEIGHT)
    clip = read_clip(FOLDER / "wide_pixels.mp4", FrameSampling(kind="all"))
    assert clip.rgb_THWC.shape == (30, HEIGHT, WIDTH * 4 // 3, 3)
    assert [frame_number(f) for f in clip.rgb_THWC] == list(range(30))


def test_a_variable_rate_goes_by_presentation_time() -> None:
    info = probe(FOLDER / "variable.mp4")
    assert info.variable_rate and info.timestamps_s[10] == 2.02
    clip = read_clip(
        FOLDER / "variable.mp4",
        FrameSampling(kind="timestamps", timestamps=(0.53, 1.0, 2.0199, 2.02, 3.2)),
    )
    assert [frame_number(f) for f in clip.rgb_THWC] == [9, 9, 9, 10, 19]
    spread = read_clip(FOLDER / "variable.mp4", FrameSampling(kind="uniform", num_frames=4))
    assert spread.indices == (0, 9, 12, 19)  # 0, 1.06, 2.12 and 3.18 s, and not 0, 6, 13, 19


def test_facts_of_a_clip_with_sound_and_of_late_starts() -> None:
    assert (
        probe(FOLDER / "with_sound.mp4").has_audio and not probe(FOLDER / "counter.mp4").has_audio
    )
    assert probe(FOLDER / "ntsc.mp4").fps == pytest.approx(30000 / 1001, abs=1e-9)
    for name in ("late_start.ts", "late_start.mkv"):
        assert probe(FOLDER / name).duration_s == pytest.approx(2.0, abs=0.01)


def test_one_frame_is_one_frame() -> None:
    for kind in ("fps", "all", "keyframes"):
        assert read_clip(FOLDER / "one_frame.mp4", FrameSampling(kind=kind)).indices == (0,)
    assert read_clip(
        FOLDER / "one_frame.mp4", FrameSampling(kind="uniform", num_frames=8)
    ).rgb_THWC.shape == (1, HEIGHT, WIDTH, 3)


def test_resizing_while_reading_equals_resizing_after() -> None:
    from mmrl.video.budget import resize_frames

    plain = read_clip(FOLDER / "counter.mp4", FrameSampling(fps=2))
    asked: list[tuple[int, int, int]] = []

    def size(count: int, height: int, width: int) -> tuple[int, int]:
        asked.append((count, height, width))
        return 28, 56

    small = read_clip(FOLDER / "counter.mp4", FrameSampling(fps=2), size=size)
    assert asked == [(8, HEIGHT, WIDTH)]
    assert np.array_equal(small.rgb_THWC, resize_frames(plain.rgb_THWC, 28, 56))


@pytest.mark.render("ffmpeg")
def test_the_end_of_a_long_clip_is_found_by_seeking(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At most a group of pictures and what the decoder holds back is decoded, not the 600 frames before."""
    import mmrl.video.decoders

    path, frames = tmp_path / "long.mp4", [draw(n % 256) for n in range(600)]
    encode(
        path,
        frames,
        "25",
        "-c:v",
        "libx264",
        "-preset",
        "ultrafast",
        "-g",
        "25",
        "-pix_fmt",
        "yuv420p",
    )
    decoded = 0
    whole = mmrl.video.decoders._Walker._next

    def count(walker: mmrl.video.decoders._Walker) -> object:
        nonlocal decoded
        decoded += 1
        return whole(walker)

    monkeypatch.setattr(mmrl.video.decoders._Walker, "_next", count)
    clip = read_clip(path, FrameSampling(kind="timestamps", timestamps=(2.0, 12.0, 23.9)))
    assert [frame_number(f) for f in clip.rgb_THWC] == [n % 256 for n in (50, 300, 597)]
    assert decoded <= 3 * 25


def test_a_replaced_file_is_read_anew(tmp_path: Path) -> None:
    path = tmp_path / "a.mp4"
    path.write_bytes((FOLDER / "counter.mp4").read_bytes())
    assert probe(path).frames == 100
    path.write_bytes((FOLDER / "three_frames.mp4").read_bytes())
    assert probe(path).frames == 3


def padded(data: bytes, size: int) -> bytes:
    """An MP4 made longer by a box that is skipped."""
    return data + (size - len(data)).to_bytes(4, "big") + b"free" + bytes(size - len(data) - 8)


def overwrite(path: Path, data: bytes) -> None:
    """In place: same inode, and the time of the content put back."""
    with path.open("r+b") as handle:
        handle.write(data)
    os.utime(path, ns=(10**18, 10**18))


@pytest.mark.parametrize("settled", [True, False])
def test_a_file_overwritten_in_place_is_read_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settled: bool
) -> None:
    """Same size, inode and time of content: the time of change tells, and a file just changed is not remembered at all."""
    if settled:
        monkeypatch.setattr(time, "time_ns", lambda: 1 << 62)  # every file counts as old
    contents = [(FOLDER / name).read_bytes() for name in ("counter.mp4", "three_frames.mp4")]
    size = max(map(len, contents)) + 64
    path = tmp_path / "a.mp4"
    path.write_bytes(padded(contents[0], size))
    os.utime(path, ns=(10**18, 10**18))
    assert probe(path).frames == 100
    if settled:
        time.sleep(0.02)  # file systems count time in steps of some milliseconds
    before = path.stat()
    overwrite(path, padded(contents[1], size))
    after = path.stat()
    assert (before.st_size, before.st_ino, before.st_mtime_ns) == (
        after.st_size,
        after.st_ino,
        after.st_mtime_ns,
    )
    assert probe(path).frames == 3


def test_an_index_is_kept_for_a_file_at_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.mp4"
    path.write_bytes((FOLDER / "three_frames.mp4").read_bytes())
    assert scan(path) is not scan(path), "changed a moment ago"
    monkeypatch.setattr(time, "time_ns", lambda: 1 << 62)
    kept = scan(path)
    assert scan(path) is kept
    monkeypatch.setattr(probing, "_MOST_KEPT", 2)
    others = [tmp_path / name for name in ("b.mp4", "c.mp4")]
    for other in others:
        other.write_bytes(path.read_bytes())
    first = scan(others[0])
    assert scan(path) is kept, "asked for again: the newest"
    scan(others[1])
    assert scan(path) is kept and scan(others[0]) is not first, (
        "the one not asked for the longest goes"
    )
    probing.forget()
    assert scan(path) is not kept


class _Counted(np.ndarray):
    """A frame that counts how often its size is asked for."""

    asked = 0

    @property
    def nbytes(self) -> int:
        _Counted.asked += 1
        return self.size * self.itemsize


def test_stacking_frames_takes_linear_time_and_bounded_pieces(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(decode, "_CHUNK_BYTES", 700 * 12)
    monkeypatch.setattr(_Counted, "asked", 0)
    frames = [np.full((2, 2, 3), n % 251, np.uint8).view(_Counted) for n in range(1500)]
    pieces = list(decode._chunks(iter(frames)))
    assert [len(piece) for piece in pieces] == [700, 700, 100]
    assert np.array_equal(np.concatenate(pieces)[:, 0, 0, 0], np.arange(1500) % 251)
    assert _Counted.asked <= 2 * len(frames)


def test_auto_and_unknown_decoders() -> None:
    assert choose_decoder() == "pyav" and list(DECODERS) == [
        "pyav",
        "torchcodec",
        "decord",
        "opencv",
    ]
    with pytest.raises(ConfigError, match="Did you mean 'decord'"):
        read_clip(FOLDER / "counter.mp4", FrameSampling(), decoder="decrod")


def test_a_decoder_that_cannot_be_imported_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "decord", None)
    with pytest.raises(MissingExtraError, match=r"\[video\]"):
        read_clip(FOLDER / "counter.mp4", FrameSampling(), decoder="decord")


def test_too_many_bytes_are_refused_before_decoding() -> None:
    with pytest.raises(MediaError, match="take fewer") as caught:
        read_clip(FOLDER / "counter.mp4", FrameSampling(kind="all"), max_bytes=100_000)
    assert caught.value.kind == "too_large"


@pytest.mark.render("ffmpeg")
def test_a_fresh_clip_agrees_with_ffmpeg_now(tmp_path: Path) -> None:
    """Not against stored frames: the ffmpeg program of this machine decodes a clip made a moment ago."""
    path = tmp_path / "fresh.mp4"
    encode(path, [draw(n) for n in range(20)], "10", "-c:v", "libx264", "-pix_fmt", "yuv420p")
    raw = subprocess.run(
        ["ffmpeg", "-v", "error", "-i", str(path), "-f", "rawvideo", "-pix_fmt", "rgb24", "-"],
        check=True,
        capture_output=True,
    ).stdout
    expected = np.frombuffer(raw, np.uint8).reshape(20, HEIGHT, WIDTH, 3)
    got = read_clip(path, FrameSampling(kind="all")).rgb_THWC
    assert np.abs(got.astype(int) - expected).max() <= LEVELS
