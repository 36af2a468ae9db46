"""What can be wrong with a file has a name, and a broken file never gives other frames than asked for."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from assets.make_video_fixtures import FOLDER, draw, encode
from mmrl.errors import MediaError
from mmrl.video.containers import is_cut
from mmrl.video.decode import probe, read_clip
from mmrl.video.decoders import DECODERS
from mmrl.video.sampling import FrameSampling
from tests.video.decoder_kit import needs

ALL = FrameSampling(kind="all")


def kind_of(path: Path | str, decoder: str = "auto") -> str:
    with pytest.raises(MediaError) as caught:
        read_clip(path, ALL, decoder=decoder)
    assert str(path) in str(caught.value) and caught.value.path == str(path)
    return caught.value.kind


def changed(tmp_path: Path, name: str, data: bytes) -> Path:
    path = tmp_path / name
    path.write_bytes(data)
    return path


def test_missing_empty_and_other_files(tmp_path: Path) -> None:
    assert kind_of(tmp_path / "none.mp4") == "missing"
    assert kind_of("https://example.org/a.mp4") == "missing"
    assert kind_of(changed(tmp_path, "empty.mp4", b"")) == "empty"
    assert kind_of(changed(tmp_path, "text.mp4", b"this is no video\n" * 50)) == "unsupported"
    assert kind_of(changed(tmp_path, "one_byte.mp4", b"\0")) == "unsupported"
    assert (
        kind_of(changed(tmp_path, "noise.mp4", random.Random(0).randbytes(5000))) == "unsupported"
    )


def test_playlists_are_refused_and_name_no_other_file(tmp_path: Path) -> None:
    """A playlist in a .mp4 could make a decoder read other files, or the network."""
    clip = FOLDER / "late_start.ts"
    playlist = f"#EXTM3U\n#EXT-X-TARGETDURATION:2\n#EXTINF:2,\n{clip}\n#EXT-X-ENDLIST\n"
    assert kind_of(changed(tmp_path, "list.m3u8", playlist.encode())) == "unsupported"
    assert (
        kind_of(changed(tmp_path, "list.mp4", f"ffconcat version 1.0\nfile '{clip}'\n".encode()))
        == "unsupported"
    )


def test_odd_names_are_just_names(tmp_path: Path) -> None:
    for name in ("concat:a|b.mp4", "-i.mp4", "a%03d.mp4", "a b'\"é.mp4", "http:x.mp4"):
        path = changed(tmp_path, name, (FOLDER / "three_frames.mp4").read_bytes())
        assert read_clip(path, ALL).rgb_THWC.shape[0] == 3


@pytest.mark.parametrize("name", ["only_sound.m4a", "sound_with_cover.mp3"])
def test_sound_is_no_video(name: str) -> None:
    assert kind_of(FOLDER / name) == "no_video"


@pytest.mark.parametrize(
    "name",
    [
        "counter.mp4",
        "open_gop.mp4",
        "variable.mp4",
        "vp9.webm",
        "late_start.mkv",
        "vp8_hidden.webm",
        "old.avi",
        "picture.gif",
    ],
)
def test_a_cut_file_is_truncated_wherever_it_is_cut(tmp_path: Path, name: str) -> None:
    """counter.mp4 has its index in front, open_gop.mp4 at the end."""
    data = (FOLDER / name).read_bytes()
    for share in (0.02, 0.3, 0.6, 0.95):
        assert kind_of(changed(tmp_path, name, data[: int(len(data) * share)])) == "truncated", (
            share
        )


@pytest.mark.parametrize(
    "name", ["counter.mp4", "vp9.webm", "late_start.mkv", "old.avi", "picture.gif"]
)
def test_a_whole_file_is_not_cut(name: str) -> None:
    with (FOLDER / name).open("rb") as handle:
        assert not is_cut(str(FOLDER / name), handle.read(16))


@pytest.mark.parametrize("decoder", DECODERS)
def test_damage_in_the_middle_is_found_by_every_decoder(tmp_path: Path, decoder: str) -> None:
    """decord and OpenCV alone would conceal it or repeat a neighbour."""
    needs(decoder)
    data = bytearray((FOLDER / "counter.mp4").read_bytes())
    rng = random.Random(4)
    for _ in range(40):
        position = rng.randrange(len(data) // 2, len(data) * 3 // 4)
        data[position] ^= 1 << rng.randrange(8)
    path = changed(tmp_path, "bits.mp4", bytes(data))
    assert kind_of(path, decoder) == "corrupt"
    intact = read_clip(
        path, FrameSampling(kind="timestamps", timestamps=(0.0, 0.5)), decoder=decoder
    )
    whole = read_clip(
        FOLDER / "counter.mp4", FrameSampling(kind="timestamps", timestamps=(0.0, 0.5))
    )
    assert np.array_equal(intact.rgb_THWC, whole.rgb_THWC), (
        "frames before the damage can still be read"
    )


@pytest.mark.parametrize(
    "name",
    [
        "counter.mp4",
        "open_gop.mp4",
        "hevc.mp4",
        "late_start.ts",
        "late_start.mkv",
        "old.avi",
        "variable.mp4",
    ],
)
def test_any_damage_ends_in_frames_or_a_named_error(tmp_path: Path, name: str) -> None:
    """Bits flipped anywhere, header included: a MediaError, or as many frames as the file says; nothing else, no crash."""
    data, rng, kinds = (FOLDER / name).read_bytes(), random.Random(name), set()
    for number in range(12):
        broken = bytearray(data)
        for _ in range(rng.choice((1, 20))):
            broken[rng.randrange(len(broken))] ^= 1 << rng.randrange(8)
        try:
            clip = read_clip(changed(tmp_path, f"{number}{name}", bytes(broken)), ALL)
            assert len(clip.rgb_THWC) == len(clip.indices) == clip.info.frames
        except MediaError as err:
            kinds.add(err.kind)
    assert (
        kinds <= {"corrupt", "truncated", "unsupported", "no_video", "empty", "too_large"} and kinds
    )


@pytest.mark.render("ffmpeg")
def test_a_clip_whose_size_changes_is_refused(tmp_path: Path) -> None:
    parts = []
    for number, (width, height) in enumerate(((96, 64), (64, 48))):
        path = tmp_path / f"{number}.ts"
        encode(
            path,
            [draw(n, width, height) for n in range(10)],
            "25",
            "-c:v",
            "libx264",
            "-pix_fmt",
            "yuv420p",
            "-f",
            "mpegts",
        )
        parts.append(path.read_bytes())
    assert kind_of(changed(tmp_path, "both.ts", b"".join(parts))) in ("unsupported", "corrupt")


def test_probing_raises_what_reading_raises(tmp_path: Path) -> None:
    path = changed(tmp_path, "cut.mp4", (FOLDER / "counter.mp4").read_bytes()[:6000])
    with pytest.raises(MediaError, match="ends too early") as caught:
        probe(path)
    assert caught.value.kind == "truncated"
