"""Seconds to read 16 and 64 frames of a 10 s, 720p H.264 clip with each decoder, one thread. Needs ffmpeg to make the clip.

    python -m scripts.bench_decode          # assets/results/bench_decode.json

"read" is mmrl.video.decode.read_clip as a run calls it: index of the file, choice of frames, decoding, upright RGB. "decode" is the
decoder alone with the index at hand. For all but PyAV, "read" holds a second decoding without pictures: they do not report
damage, so PyAV looks for it. _cpu_s is processor time, which a busy machine blurs less. Every measurement runs in a process of
its own, the decoders alternate.
"""

from __future__ import annotations

import argparse
import subprocess
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from mmrl.video import probing
from mmrl.video.decode import read_clip
from mmrl.video.decoders import DECODERS as READERS
from mmrl.video.sampling import FrameSampling, select_frames
from scripts._bench import (
    alternation,
    finish_child,
    parse,
    print_table,
    run_child,
    spread,
    write_results,
)

COUNTS = (16, 64)


def make_clip(path: Path, seconds: int) -> None:
    """A 720p clip of 30 frames per second with a keyframe every 2 s: moving test pattern with noise."""
    subprocess.run(
        [
            "ffmpeg",
            "-v",
            "error",
            "-y",
            "-f",
            "lavfi",
            "-i",
            f"testsrc2=size=1280x720:rate=30:duration={seconds}",
            "-vf",
            "noise=alls=12:allf=t",
            "-c:v",
            "libx264",
            "-preset",
            "veryfast",
            "-crf",
            "26",
            "-g",
            "60",
            "-bf",
            "2",
            "-pix_fmt",
            "yuv420p",
            str(path),
        ],
        check=True,
    )


def _read(path: str, sampling: FrameSampling, decoder: str) -> int:
    return len(read_clip(path, sampling, decoder=decoder).rgb_THWC)


def _decode(decoder: str, index: probing.ClipIndex, wanted: tuple[int, ...]) -> int:
    return sum(1 for _ in READERS[decoder](index, wanted, 1))


def child(decoder: str, path: str) -> None:
    """Measure one decoder on one clip."""
    read_clip(path, FrameSampling("uniform", num_frames=2), decoder=decoder)  # imports, page cache
    row: dict[str, float] = {}

    def timed(name: str, work: Callable[[], int]) -> int:
        began, began_cpu = time.perf_counter(), time.process_time()
        found = work()
        row[f"{name}_s"], row[f"{name}_cpu_s"] = (
            time.perf_counter() - began,
            time.process_time() - began_cpu,
        )
        return found

    for count in COUNTS:
        sampling = FrameSampling("uniform", num_frames=count)
        probing.forget()
        read = timed(f"read_{count}", partial(_read, path, sampling, decoder))
        index = probing.scan(path)
        wanted = select_frames(index.info.timestamps_s, sampling)
        decoded = timed(f"decode_{count}", partial(_decode, decoder, index, wanted))
        assert read == decoded == count
    probing.forget()
    timed("index", lambda: probing.scan(path).info.frames)
    finish_child(row)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--seconds",
        type=int,
        default=10,
        help="length of the clip; other than 10, nothing is recorded",
    )
    parser.add_argument("--child", nargs=2, metavar=("DECODER", "CLIP"), help=argparse.SUPPRESS)
    options = parse(parser)
    if options.child:
        child(*options.child)
        return
    rows: dict[str, list[dict[str, float]]] = {name: [] for name in READERS}
    with tempfile.TemporaryDirectory() as folder:
        clip = Path(folder) / "clip.mp4"
        make_clip(clip, options.seconds)
        size = clip.stat().st_size
        for order in alternation(tuple(READERS), options.rounds):
            for name in order:
                rows[name].append(run_child("scripts.bench_decode", ["--child", name, str(clip)]))
    table = {
        name: {key: spread([row[key] for row in found]) for key in found[0]}
        for name, found in rows.items()
    }
    keys = list(next(iter(table.values())))
    print_table(
        ("decoder", *keys),
        [(name, *(f"{row[key]['median']:.3f}" for key in keys)) for name, row in table.items()],
    )
    if options.seconds == 10:
        print(
            write_results(
                "bench_decode",
                {"clip_bytes": size, "rounds": options.rounds, "decoders": table},
                "av",
                "torchcodec",
                "decord",
                "opencv-python-headless",
                "torch",
            )
        )


if __name__ == "__main__":
    main()
