"""Small video clips of every awkward kind, with reference frames decoded by ffmpeg. Needs ffmpeg; nothing is downloaded.

    python -m assets.make_video_fixtures            # assets/fixtures/video: clips, NAME.npz, manifest.json

Every frame carries its own number as eight black or white cells along its lower edge, so a wrong frame is recognised without
any reference (`frame_number`). NAME.npz holds some frames (uint8 RGB, upright), `times`, the presentation times of all frames
in seconds from the first, and `keyframes`, their numbers: all from the ffmpeg program, which shares no code with mmrl. Written
once and kept: another release of the encoders gives other bytes.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["CELLS", "FOLDER", "HEIGHT", "WIDTH", "draw", "encode", "frame_number", "make_all"]

FOLDER = Path(__file__).resolve().parent / "fixtures" / "video"
WIDTH, HEIGHT, CELLS = 96, 64, 8
_X264 = ("-c:v", "libx264", "-preset", "veryfast", "-threads", "1")
_CLIPS: dict[str, tuple[int, str, tuple[str, ...]]] = {
    # name: (frames, frames per second, ffmpeg arguments)
    "counter.mp4": (
        100,
        "25",
        (
            *_X264,
            "-g",
            "12",
            "-bf",
            "3",
            "-crf",
            "20",
            "-pix_fmt",
            "yuv420p",
            "-movflags",
            "+faststart",
        ),
    ),
    "ntsc.mp4": (70, "30000/1001", (*_X264, "-g", "30", "-bf", "2", "-pix_fmt", "yuv420p")),
    "open_gop.mp4": (
        60,
        "25",
        (
            *_X264,
            "-g",
            "15",
            "-bf",
            "3",
            "-x264-params",
            "open-gop=1:b-pyramid=normal",
            "-pix_fmt",
            "yuv420p",
        ),
    ),
    "one_frame.mp4": (1, "25", (*_X264, "-pix_fmt", "yuv420p")),
    "two_frames.mp4": (2, "25", (*_X264, "-pix_fmt", "yuv420p")),
    "three_frames.mp4": (3, "25", (*_X264, "-pix_fmt", "yuv420p")),
    "bt709.mp4": (
        30,
        "25",
        (
            *_X264,
            "-vf",
            "scale=out_color_matrix=bt709",
            "-pix_fmt",
            "yuv420p",
            "-colorspace",
            "bt709",
            "-color_primaries",
            "bt709",
            "-color_trc",
            "bt709",
        ),
    ),
    "full_range.mp4": (30, "25", (*_X264, "-vf", "scale=out_range=pc", "-pix_fmt", "yuvj420p")),
    "wide_pixels.mp4": (30, "25", (*_X264, "-vf", "setsar=4/3", "-pix_fmt", "yuv420p")),
    "ten_bit.mkv": (
        30,
        "25",
        (
            "-c:v",
            "libx265",
            "-x265-params",
            "log-level=error:pools=1:frame-threads=1",
            "-pix_fmt",
            "yuv420p10le",
        ),
    ),
    "hevc.mp4": (
        60,
        "25",
        (
            "-c:v",
            "libx265",
            "-x265-params",
            "log-level=error:pools=1:frame-threads=1:keyint=20:min-keyint=20:open-gop=1",
            "-pix_fmt",
            "yuv420p",
            "-tag:v",
            "hvc1",
        ),
    ),
    "vp9.webm": (
        40,
        "30",
        (
            "-c:v",
            "libvpx-vp9",
            "-b:v",
            "300k",
            "-g",
            "15",
            "-auto-alt-ref",
            "1",
            "-lag-in-frames",
            "16",
            "-threads",
            "1",
            "-pix_fmt",
            "yuv420p",
        ),
    ),
    "vp8_hidden.webm": (
        60,
        "30",
        (
            "-c:v",
            "libvpx",
            "-b:v",
            "300k",
            "-g",
            "20",
            "-auto-alt-ref",
            "1",
            "-lag-in-frames",
            "16",
            "-threads",
            "1",
            "-pix_fmt",
            "yuv420p",
        ),
    ),
    "late_start.ts": (
        50,
        "25",
        (*_X264, "-g", "12", "-bf", "2", "-pix_fmt", "yuv420p", "-f", "mpegts"),
    ),
    "late_start.mkv": (
        50,
        "25",
        (*_X264, "-g", "12", "-bf", "2", "-pix_fmt", "yuv420p", "-output_ts_offset", "5"),
    ),
    "old.avi": (40, "25", ("-c:v", "mpeg4", "-q:v", "3", "-g", "12", "-bf", "2")),
    "picture.gif": (20, "10", ("-vf", "split[a][b];[a]palettegen[p];[b][p]paletteuse=dither=none")),
}
_ODD = {
    "odd_size.webm": ("-c:v", "libvpx-vp9", "-b:v", "300k", "-threads", "1", "-pix_fmt", "yuv420p"),
    "odd_size.mp4": (*_X264, "-pix_fmt", "yuv444p"),
}
_TURNS = {"turned_90.mp4": "90", "turned_180.mp4": "180", "turned_270.mp4": "270"}


def draw(number: int, width: int = WIDTH, height: int = HEIGHT) -> np.ndarray:
    """Frame `number` as uint8 [height, width, 3]: a coloured ramp, a moving square, and the number as eight cells."""
    y_H, x_W = np.mgrid[0:height, 0:width]
    rgb = np.stack(
        [x_W * 255 // width, y_H * 255 // height, np.full_like(x_W, (number * 5) % 256)], -1
    ).astype(np.uint8)
    left = (number * 3) % (width - 16)
    rgb[height // 4 : height // 4 + 16, left : left + 16] = (250, 40, 30)
    cell, top = width // CELLS, height - height // 4
    for bit in range(CELLS):
        rgb[top:, bit * cell : (bit + 1) * cell] = 255 if number >> bit & 1 else 0
    return rgb


def frame_number(rgb: np.ndarray) -> int:
    """The number an upright frame carries, from the middles of its cells."""
    height, width = rgb.shape[:2]
    cell, row = width / CELLS, height - height // 8
    bits = [
        rgb[row - 2 : row + 2, int((bit + 0.5) * cell) - 1 : int((bit + 0.5) * cell) + 2].mean()
        > 128
        for bit in range(CELLS)
    ]
    return sum(1 << bit for bit, on in enumerate(bits) if on)


def _run(*arguments: str, stdin: bytes | None = None) -> bytes:
    return subprocess.run(
        ["ffmpeg", "-v", "error", "-y", "-bitexact", *arguments],
        input=stdin,
        check=True,
        stdout=subprocess.PIPE,
    ).stdout


def encode(path: Path, frames: list[np.ndarray], rate: str, *arguments: str) -> None:
    """Write frames (uint8 RGB of one size) as a video by the ffmpeg program."""
    height, width = frames[0].shape[:2]
    _run(
        "-f",
        "rawvideo",
        "-pix_fmt",
        "rgb24",
        "-s",
        f"{width}x{height}",
        "-r",
        rate,
        "-i",
        "-",
        *arguments,
        "-flags:v",
        "+bitexact",
        "-fflags",
        "+bitexact",
        str(path),
        stdin=b"".join(f.tobytes() for f in frames),
    )


def _variable(path: Path) -> None:
    """A screen recording: changes come in bursts, one frame stays for 1.5 s. Times in thousandths by PyAV."""
    import av

    moments = [
        0,
        40,
        80,
        120,
        160,
        400,
        440,
        480,
        500,
        520,
        2020,
        2060,
        2100,
        2600,
        2640,
        2680,
        3000,
        3100,
        3140,
        3180,
    ]
    with av.open(str(path), "w") as container:
        stream = container.add_stream(
            "libx264", rate=25, options={"preset": "veryfast", "bf": "2", "g": "8", "threads": "1"}
        )
        stream.width, stream.height, stream.pix_fmt = WIDTH, HEIGHT, "yuv420p"
        stream.time_base = stream.codec_context.time_base = Fraction(1, 1000)
        for number, moment in enumerate(moments):
            frame = av.VideoFrame.from_ndarray(draw(number), format="rgb24")
            frame.pts, frame.time_base = moment, stream.codec_context.time_base
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))


def _mirrored(path: Path, source: Path) -> None:
    """The same packets with a display matrix that mirrors left and right."""
    import av

    with av.open(str(source)) as reader, av.open(str(path), "w") as writer:
        stream = writer.add_stream_from_template(reader.streams.video[0])
        stream.set_display_matrix([-65536, 0, 0, 0, 65536, 0, WIDTH << 16, 0, 1 << 30])
        for packet in reader.demux(video=0):
            if packet.dts is not None:
                packet.stream = stream
                writer.mux(packet)


def _sounds(folder: Path) -> None:
    tone = ("-f", "lavfi", "-i", "sine=frequency=440:duration=1")
    _run(*tone, "-c:a", "aac", "-b:a", "32k", str(folder / "only_sound.m4a"))
    _run(
        "-i",
        str(folder / "counter.mp4"),
        *tone,
        "-map",
        "0:v",
        "-map",
        "1:a",
        "-c:v",
        "copy",
        "-c:a",
        "aac",
        "-b:a",
        "32k",
        str(folder / "with_sound.mp4"),
    )
    cover = draw(1).tobytes()
    _run(
        *tone,
        "-f",
        "rawvideo",
        "-pix_fmt",
        "rgb24",
        "-s",
        f"{WIDTH}x{HEIGHT}",
        "-i",
        "-",
        "-map",
        "0:a",
        "-map",
        "1:v",
        "-c:a",
        "libmp3lame",
        "-b:a",
        "32k",
        "-c:v",
        "png",
        "-frames:v",
        "1",
        "-disposition:v",
        "attached_pic",
        str(folder / "sound_with_cover.mp3"),
        stdin=cover,
    )


def _reference(path: Path) -> dict[str, Any]:
    """All presentation times and some frames, by the ffmpeg program: turned upright by it, edit lists applied."""
    found = subprocess.run(
        [
            "ffmpeg",
            "-v",
            "info",
            "-i",
            str(path),
            "-vsync",
            "passthrough",
            "-copyts",
            "-vf",
            "showinfo",
            "-f",
            "rawvideo",
            "-pix_fmt",
            "rgb24",
            "-",
        ],
        check=True,
        capture_output=True,
    )
    log = found.stderr.decode()
    times = np.array([float(t) for t in re.findall(r"pts_time:\s*(-?[0-9.]+)", log)])
    width, height = (int(v) for v in re.findall(r" s:(\d+)x(\d+) ", log)[0])
    frames = np.frombuffer(found.stdout, np.uint8).reshape(-1, height, width, 3)
    assert len(frames) == len(times), (path, len(frames), len(times))
    chosen = np.unique(np.linspace(0, len(frames) - 1, 5).round().astype(int))
    keys = np.flatnonzero([int(k) for k in re.findall(r" iskey:(\d)", log)])
    return {
        "times": times - times[0],
        "keyframes": keys,
        "indices": chosen,
        "frames": frames[chosen],
    }


def make_all(folder: Path = FOLDER) -> list[str]:
    """Write every clip and its references; returns the names of the clips that have pictures."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, (count, rate, arguments) in _CLIPS.items():
        encode(folder / name, [draw(n) for n in range(count)], rate, *arguments)
    for name, arguments in _ODD.items():
        encode(folder / name, [draw(n, WIDTH + 1, HEIGHT - 1) for n in range(20)], "25", *arguments)
    source = folder / "counter.mp4"
    for name, angle in _TURNS.items():
        _run(
            "-i",
            str(folder / "bt709.mp4"),
            "-c",
            "copy",
            "-metadata:s:v",
            f"rotate={angle}",
            str(folder / name),
        )
    _mirrored(folder / "mirrored.mp4", source)
    _variable(folder / "variable.mp4")
    _run("-ss", "1.3", "-i", str(source), "-t", "1.5", "-c", "copy", str(folder / "edit_list.mp4"))
    _sounds(folder)
    names = sorted(
        [*_CLIPS, *_ODD, *_TURNS, "mirrored.mp4", "variable.mp4", "edit_list.mp4", "with_sound.mp4"]
    )
    for name in names:
        np.savez_compressed(folder / f"{name}.npz", **_reference(folder / name))
    version = subprocess.run(
        ["ffmpeg", "-version"], check=True, capture_output=True, text=True
    ).stdout.split("\n")[0]
    (folder / "manifest.json").write_text(
        json.dumps({"ffmpeg": version, "clips": names}, indent=1) + "\n", encoding="utf-8"
    )
    return names


if __name__ == "__main__":
    print("\n".join(make_all(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER)))
