"""Generated clips: coloured shapes that move, come, go and collide at known times. Real video files, seeded, no download.

    python -m mmrl.tasks.clips runs/clips --task order --count 8 --seed 0        # clips, data.jsonl and sheet.png to look at

    order      two options: which shape moves first, or comes after another   (task choice)
    direction  left or right, up or down                                      (task choice)
    appear     when is the shape there                                        (task temporal_grounding)
    repeat     the same with two or three spans                               (task temporal_grounding)
    track      a box per step of the time grid                                (task tracking)
    collide    how often it hits a wall; or, with kinds touch, when two meet  (task numeric; temporal_grounding)
    st         when is the moving shape there, and where                      (task st_grounding)
    gqa        the colour, out of three, and when it is to be seen            (task grounded_qa)
    ocr        digits one after the other                                     (task ocr)

Rows 2k and 2k + 1 of order, direction and ocr are twins: one is the other played backwards, with the opposite answer. Which of
them is which is a coin, and every frame is coded alone, so that twins decode to the same pictures: no frame and no unordered
set of frames tells the answer, only their order does. `params.twin` names the other one. In the default kinds of order and
direction (and in orbit) not even a frame whose place in the clip is known helps. The easier kinds turn, grow and *_inside need
the order as well, but there the first frame, known to be the first, tells much: a policy may learn to look at that one alone.
"""

from __future__ import annotations

import argparse
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mmrl.errors import ConfigError
from mmrl.tasks.clip_parts import (
    DEFAULT_KINDS,
    KINDS,
    TWINS,
    ClipSettings,
    draw_actors,
    draw_sheet,
    seconds_text,
)
from mmrl.tasks.clip_questions import TASKS
from mmrl.tasks.examples import write_rows
from mmrl.tasks.scenes import draw_objects

if TYPE_CHECKING:
    from mmrl.tasks.clip_parts import Frames

__all__ = ["DEFAULT_KINDS", "KINDS", "TASKS", "TWINS", "ClipSettings", "draw_clip", "make_clips"]


def draw_clip(
    settings: ClipSettings, seed: int, index: int, prefix: str = "clip-"
) -> tuple[Frames, dict[str, Any]]:
    """Frames (T, H, W, 3) uint8 and the row (without its file) of clip `index` of a set. The same arguments, the same clip."""
    s, twins = settings, settings.task in TWINS
    key = [
        abs(seed),
        int(seed < 0),
        zlib.crc32(f"{s.task}/{prefix}".encode()),
        index // 2 if twins else index,
    ]
    rng = np.random.default_rng(key)
    backwards = twins and bool((index ^ int(rng.integers(2))) & 1)
    kinds = s.kinds or DEFAULT_KINDS[s.task]
    kind = kinds[int(rng.integers(len(kinds)))]
    take = TASKS[s.task](rng, s, kind)
    frames = take.frames
    if frames is None:
        canvas, _ = draw_objects(rng, [], s.size, (0.2, 0.4), s.background, s.noise)
        frames = draw_actors(canvas, take.actors, s.frames)
    actors, row = take.actors, dict(take.row)
    if backwards:
        frames, actors, row["answer"] = (
            frames[::-1],
            tuple(a.reversed() for a in actors),
            take.twin_answer,
        )
    objects = []
    for actor in actors:
        boxes = {seconds_text(k / s.fps): actor.box(k, s.size) for k in range(s.frames)}
        objects.append(
            {
                "color": actor.color,
                "shape": actor.shape,
                "boxes": {t: b for t, b in boxes.items() if b is not None},
            }
        )
    row["params"] = {
        "width": s.size,
        "height": s.size,
        "duration": s.seconds,
        "fps": s.fps,
        "kind": kind,
        **row["params"],
        "objects": objects,
    }
    if twins:
        row["params"]["twin"] = f"{prefix}{index ^ 1:06d}"
    return frames, {"id": f"{prefix}{index:06d}", "source": f"clips-{s.task}", **row}


def make_clips(
    folder: str | os.PathLike[str],
    task: str,
    count: int,
    seed: int,
    size: int = 112,
    fps: float = 4,
    seconds: float = 2.0,
    prefix: str = "clip-",
    codec: str = "h264",
    *,
    quality: int = 25,
    keyframe_every: int = 1,
    **settings: Any,
) -> str:
    """Write `count` clips to `folder`/videos/*.mp4 and return the path of `folder`/data.jsonl, which is written last.

    task        one of TASKS
    fps         frames per second; seconds: length of a clip
    prefix      starts every id; sets that differ in it or in `seed` share no clip by construction of their seeds
    kinds       kinds of clips to draw from, see KINDS (default: DEFAULT_KINDS)
    grid        seconds; every span begins and ends on a multiple of it, and boxes are asked for at them (default 2 frames)
    distractors number of other shapes (default: drawn per clip from a small range that fits the task)
    first_box   give the first box of a track in params.first_box (default false)
    background, noise   of the canvas, as in mmrl.tasks.scenes
    quality, keyframe_every   as in mmrl.video.encode.write_video (default 25 and 1); 1 keeps twins equal after decoding
    Clip i depends on (seed, prefix, task, i) and the settings only, so a longer set begins with the shorter one. Raises
    ConfigError for impossible parameters.
    """
    from mmrl.video.encode import write_video

    if count < 1 or not prefix or any(c in prefix for c in "/\\\0"):
        raise ConfigError(
            f"expected count >= 1 and a prefix usable in file names, found {count!r} and {prefix!r}"
        )
    if "kinds" in settings:
        settings["kinds"] = tuple(settings["kinds"])
    spec = ClipSettings(task, size, fps, seconds, **settings)
    rows = []
    for index in range(count):
        frames, row = draw_clip(spec, seed, index, prefix)
        name = f"videos/{row['id']}.mp4"
        write_video(
            Path(folder) / name,
            frames,
            fps,
            codec=codec,
            quality=quality,
            keyframe_every=keyframe_every,
        )
        rows.append({"id": row["id"], "task": row["task"], "video": name, **row})
    return write_rows(folder, rows)


def _true_spans(row: Mapping[str, Any]) -> list[list[float]]:
    answer = row["answer"]
    if isinstance(answer, dict):
        return answer.get("spans") or ([answer["time"]] if "time" in answer else [])
    return answer if isinstance(answer, list) else []


def _true_boxes(row: Mapping[str, Any]) -> Mapping[str, Any]:
    answer = row["answer"]
    return answer.get("boxes", {}) if isinstance(answer, dict) else {}


def main(argv: list[str] | None = None) -> int:
    """Command line: writes a set, and sheet.png with its first 16 clips; prints the path of data.jsonl."""
    parser = argparse.ArgumentParser(
        prog="python -m mmrl.tasks.clips", description="Write generated clips."
    )
    parser.add_argument("out", help="folder to write")
    parser.add_argument("--task", default="order", help=", ".join(KINDS))
    parser.add_argument("--count", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--size", type=int, default=112, help="side of the pictures in pixels")
    parser.add_argument("--fps", type=float, default=4)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument(
        "--grid", type=float, default=None, help="seconds between possible events, default 2 frames"
    )
    parser.add_argument("--kinds", default="", help="comma-separated, default: see KINDS")
    parser.add_argument("--distractors", type=int, default=None)
    parser.add_argument("--first-box", action="store_true", help="track: give the first box")
    parser.add_argument("--codec", default="h264")
    parser.add_argument("--prefix", default="clip-", help="start of every id")
    args = parser.parse_args(argv)
    own = {
        "kinds": tuple(k for k in args.kinds.split(",") if k),
        "grid": args.grid,
        "distractors": args.distractors,
        "first_box": args.first_box,
    }
    try:
        path = make_clips(
            args.out,
            args.task,
            args.count,
            args.seed,
            args.size,
            args.fps,
            args.seconds,
            args.prefix,
            args.codec,
            **own,
        )
        spec = ClipSettings(args.task, args.size, args.fps, args.seconds, **own)
    except ConfigError as err:
        parser.error(str(err))
    shown = [draw_clip(spec, args.seed, i, args.prefix) for i in range(min(16, args.count))]
    draw_sheet(str(Path(args.out) / "sheet.png"), shown, _true_spans, _true_boxes)
    print(path)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
