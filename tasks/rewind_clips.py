"""Long clips with one short event that evenly spaced frames never show: generated questions for the task `rewind`. No download.

    python -m mmrl.tasks.rewind_clips runs/rewind/train --count 500 --seed 1         # 16 to 24 s at 4 frames per second
    python -m mmrl.tasks.rewind_clips runs/rewind/val --count 100 --seed 2
    python -m mmrl.tasks.rewind_clips runs/fine --size 448 --fps 8 --asks color,shape

A grey square moves along the bottom of a graded ground, so that frames differ and tell the time. For half a second a coloured sign
is there, somewhere; its colour (or its shape) is asked for. The sign is on none of the frames that 1 to `UNSEEN` evenly spaced ones
are, and every frame is coded alone: what is shown first is the same for all answers, bit by bit, also after decoding, so that
nothing but looking again tells them apart.

Where to look is said by the question: "between 6 and 8 seconds", a step of the grid that the scripted player uses too. That is the
weak hint from which looking can be learned: without one the right moment is a guess out of some forty, and nearly all first looks
would teach nothing. The hint does not depend on the answer. Row i depends on (seed, i) and the settings alone.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mmrl.errors import ConfigError
from mmrl.tasks.examples import write_rows
from mmrl.tasks.scenes import COLORS, SHAPES, draw_objects, shape_mask
from mmrl.video.sampling import FrameSampling, select_frames

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = [
    "ASKS",
    "EVENT_S",
    "GRID_S",
    "SECONDS",
    "UNSEEN",
    "draw_rewind_clip",
    "make_rewind_clips",
]

ASKS = {"color": ("red", "green", "blue", "yellow"), "shape": SHAPES}
"""What is asked for -> the answers there are."""
SECONDS = (16, 18, 20, 22, 24)
"""Lengths of clips."""
EVENT_S = 0.5
"""Seconds that the sign is there."""
GRID_S = 2.0
"""Seconds of a step that a question names: wider than the sign's time. The task's scripted player looks at whole steps."""
UNSEEN = 8
"""The sign is on none of the frames of any evenly spaced look of so many frames or fewer."""
_GREY = (128, 128, 128)


def _shown_first(frames: int, fps: float) -> set[int]:
    """Numbers of all frames that an evenly spaced look of 1 to UNSEEN frames shows."""
    times = np.arange(frames) / fps
    looks = (
        FrameSampling(kind="uniform", num_frames=count, factor=1) for count in range(1, UNSEEN + 1)
    )
    return {number for look in looks for number in select_frames(times, look, fps=fps)}


def draw_rewind_clip(
    seed: int,
    index: int,
    size: int = 112,
    fps: float = 4,
    asks: Sequence[str] = ("color",),
    answer: str | None = None,
) -> tuple[npt.NDArray[np.uint8], dict[str, Any]]:
    """Frames (T, size, size, 3) uint8 of clip `index` of a set, and the row without its file. `answer`: the same clip with another
    answer; None: the one that is drawn. Raises ConfigError for impossible settings."""
    _check(size, fps, asks)
    rng = np.random.default_rng([abs(seed), int(seed < 0), index])
    seconds = int(rng.choice(SECONDS))
    count, length, step = (round(s * fps) for s in (seconds, EVENT_S, GRID_S))
    ask = str(asks[int(rng.integers(len(asks)))])
    ground, _ = draw_objects(rng, [], size, (0.2, 0.4), "graded", 0)
    blocked = _shown_first(count, fps)
    starts = [
        first
        for first in range(count)
        # within one step of the grid, and where no first look goes
        if first // step == (first + length - 1) // step
        and not blocked.intersection(range(first, first + length))
    ]
    first = int(starts[int(rng.integers(len(starts)))])
    side = int(rng.integers(size // 3, size // 2 + 1))
    left, top = (int(v) for v in rng.integers(0, (size - side, size - size // 8 - side)))
    sign = {name: str(rng.choice(answers)) for name, answers in ASKS.items()}
    sign[ask] = sign[ask] if answer is None else answer
    frames = np.stack([_ground(ground, number / (count - 1)) for number in range(count)])
    mask = shape_mask(sign["shape"], side)
    for frame in frames[first : first + length]:
        frame[top : top + side, left : left + side][mask] = COLORS[sign["color"]]
    low = first // step * GRID_S
    return frames, {
        "id": f"rewind-{seed}-{index:06d}",
        "question": f"Which {ask} has the sign that is shown between {low:g} and {low + GRID_S:g} seconds?",
        "answer": sign[ask],
        "options": list(ASKS[ask]),
        "span": [first / fps, (first + length) / fps],
    }


def _ground(ground: npt.NDArray[np.uint8], share: float) -> npt.NDArray[np.uint8]:
    """The picture without a sign at this share of the clip."""
    frame, size = ground.copy(), len(ground)
    side = size // 8
    left = round(share * (size - side))
    frame[size - side :, left : left + side] = _GREY
    return frame


def _check(size: int, fps: float, asks: Sequence[str]) -> None:
    whole = 0 < fps <= 60 and all(
        abs(s * fps - round(s * fps)) < 1e-9 for s in (EVENT_S, GRID_S, *SECONDS)
    )
    if not whole or EVENT_S * fps < 2 or not 48 <= size <= 2048 or size % 2:
        raise ConfigError(
            f"expected an even size in 48..2048 and 4 to 60 fps of which {EVENT_S:g} s are whole frames, found size={size}, "
            f"fps={fps:g}; for example size=112, fps=4"
        )
    if not asks or any(ask not in ASKS for ask in asks):
        raise ConfigError(f"expected asks of {', '.join(ASKS)}, found {list(asks)!r}")


def make_rewind_clips(
    out_dir: str | os.PathLike[str],
    count: int,
    seed: int,
    *,
    size: int = 112,
    fps: float = 4,
    asks: Sequence[str] = ("color",),
) -> str:
    """Write `count` rows to `out_dir`/data.jsonl (clips in `out_dir`/videos); returns that path. data.jsonl is written last.
    Raises ConfigError for impossible settings, MissingExtraError without PyAV."""
    from mmrl.video.encode import write_video

    if count < 1:
        raise ConfigError(f"expected a count of at least 1, found {count!r}")
    rows: list[dict[str, Any]] = []
    for index in range(count):
        frames, row = draw_rewind_clip(seed, index, size, fps, asks)
        name = f"videos/{seed}-{index:06d}.mp4"
        # each frame alone: no frame tells of the one before it
        write_video(Path(out_dir) / name, frames, fps, quality=25, keyframe_every=1)
        rows.append({"id": row["id"], "video": name, **row})
    return write_rows(out_dir, rows)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; prints the path of data.jsonl."""
    parser = argparse.ArgumentParser(
        prog="python -m mmrl.tasks.rewind_clips",
        description="Write clips with a short event that evenly spaced frames do not show.",
    )
    parser.add_argument("out", help="folder to write")
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--size", type=int, default=112, help="side in pixels")
    parser.add_argument("--fps", type=float, default=4)
    parser.add_argument("--asks", default="color", help=f"comma-separated, of {', '.join(ASKS)}")
    args = parser.parse_args(argv)
    asks = tuple(args.asks.split(","))
    try:
        print(
            make_rewind_clips(
                args.out, args.count, args.seed, size=args.size, fps=args.fps, asks=asks
            )
        )
    except ConfigError as err:
        parser.error(str(err))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
