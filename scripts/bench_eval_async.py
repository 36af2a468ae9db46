"""What media workers are worth in an evaluation: wall time of two suites of clips, decoded by the way or while the model answers.

    python -m scripts.bench_eval_async            (some minutes, writes assets/results/bench_eval_async.json)
    python -m scripts.bench_eval_async --quick    (about a minute, writes nothing)

Three systems answer the same questions about generated 640x360 H.264 clips of 10 seconds, in processes that alternate:

    none      the engine's process decodes a clip when it is asked about it (data.workers 0), no cache on disk
    cache     the same with an empty cache on disk: what writing it costs
    workers   an empty cache, filled by worker processes that run ahead of the model, across both suites

Measured is `evaluate` over both suites, after the model is loaded and the workers are ready (their start is given beside it). Every
process has a cache of its own, so that every clip is decoded once in each. All answers must be equal. A small random Qwen2.5-VL
answers on one thread; what overlaps needs cores: see `cores` and `load_1min` beside the result.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from scripts import _bench as bench

T = TypeVar("T")
MODEL = {
    "hidden": 256,
    "layers": 4,
    "heads": 8,
    "kv": 4,
    "vision_hidden": 192,
    "vision_layers": 4,
    "vision_heads": 6,
    "window_vision": True,
    "max_patches": 256,
}
SYSTEMS = ("none", "cache", "workers")
SUITES = ("order", "direction")
SIDE, SECONDS, FPS, DRAWN = (640, 360), 10, 30, 6
FRAMES, PIXELS, NEW_TOKENS = 32, 224 * 224, 64


def make_suites(folder: Path, clips: int) -> None:
    """`clips` clips and questions per suite: drawn by mmrl.tasks.clips, shown in the middle of a wide frame with moving noise.

    DRAWN of them are drawn; the others are these with an empty box at the end, other files with the same work in them.
    """
    import numpy as np

    from mmrl.tasks.clip_parts import ClipSettings
    from mmrl.tasks.clips import draw_clip
    from mmrl.video.encode import write_video

    height, width = SIDE[1], SIDE[0]
    for suite in SUITES:
        rows: list[dict[str, Any]] = []
        rows_of: dict[int, dict[str, Any]] = {}
        for number in range(clips):
            path = folder / suite / "videos" / f"{number}.mp4"
            if number < DRAWN:
                frames, rows_of[number] = draw_clip(
                    ClipSettings(task=suite, size=height, fps=FPS, seconds=SECONDS), 0, number
                )
                noise = np.random.default_rng([number, len(suite)]).integers(
                    0, 256, (height // 20, width // 20, 3), dtype=np.uint8
                )
                noise = noise.repeat(20, 0).repeat(20, 1)
                wide = np.stack(
                    [np.roll(noise, (3 * t, 5 * t), (0, 1)) for t in range(len(frames))]
                )
                wide[:, :, (width - height) // 2 : (width + height) // 2] = frames
                write_video(path, wide, FPS)
            else:
                drawn = path.with_name(f"{number % DRAWN}.mp4").read_bytes()
                path.write_bytes(
                    drawn + (12).to_bytes(4, "big") + b"free" + number.to_bytes(4, "big")
                )
            row = {**rows_of[number % DRAWN], "id": f"{suite}-{number}"}
            rows.append(
                {
                    **row,
                    "video": f"videos/{number}.mp4",
                    "params": {**row["params"], "width": width},
                }
            )
        (folder / suite / "data.jsonl").write_text(
            "".join(json.dumps(r, default=str) + "\n" for r in rows), encoding="utf-8"
        )


class Stopwatch:
    """Seconds spent in the functions it times."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def timed(self, function: Callable[..., T]) -> Callable[..., T]:
        """`function`, whose calls count."""

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> T:
            began = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - began

        return call


def child(system: str, folder: Path, workers: int) -> None:
    """Evaluates both suites once and reports seconds and a hash of all answers."""
    from mmrl.config import DataSource, RunConfig
    from mmrl.data.sources import load_sources
    from mmrl.evaluation.evaluate import evaluate
    from mmrl.evaluation.settings import EvalSettings
    from mmrl.policy.loading import load_policy
    from mmrl.rollout import PrefillOnceEngine, SamplingSettings
    from mmrl.workers.prefetch import prefetching
    from mmrl.workers.scorer import Scorer

    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        config = RunConfig.model_validate(
            {
                "model": {"path": str(folder / "model"), "device": "cpu"},
                "data": {
                    "workers": workers if system == "workers" else 0,
                    "cache": {"dir": None if system == "none" else scratch},
                    "video": {
                        "kind": "uniform",
                        "num_frames": FRAMES,
                        "min_pixels": 28 * 28,
                        "max_pixels": PIXELS,
                    },
                },
            }
        )
        policy = load_policy(config.model, config.data, trainable=False)
        visuals, decoding = policy.encoder.visuals, Stopwatch()
        visuals._build_video = decoding.timed(visuals._build_video)
        suites = [
            load_sources([DataSource(task="choice", path=str(folder / s / "data.jsonl"))])
            for s in SUITES
        ]
        began = time.perf_counter()
        with prefetching(config.data, [policy.encoder.visuals]) as [policy.encoder.ahead]:
            ahead = policy.encoder.ahead
            if ahead is not None:
                while not all(w.ready for w in ahead.pool._workers):
                    time.sleep(0.05)
                ready_s, began = time.perf_counter() - began, time.perf_counter()
                ahead.expect(
                    sample for sources in suites for source in sources for sample in source.samples
                )
            else:
                ready_s = 0.0
            rows = []
            for sources in suites:
                with Scorer([], [s.task for s in sources], workers=0) as scorer:
                    settings = EvalSettings(SamplingSettings(max_new_tokens=NEW_TOKENS), samples=4)
                    rows += evaluate(
                        policy, PrefillOnceEngine(policy), scorer, sources, settings
                    ).predictions
            seconds = time.perf_counter() - began
        answers = hashlib.sha256(
            json.dumps(
                [[r["id"], r["mode"], r["text"], r["score"]["value"]] for r in rows]
            ).encode()
        )
        bench.finish_child(
            {
                "seconds": seconds,
                "ready_s": ready_s,
                "answers": answers.hexdigest(),
                "rows": len(rows),
                "decoded_here": visuals.stats.built,
                "media_s": decoding.seconds,
            }
        )


def measure(folder: Path, rounds: int, workers: int) -> dict[str, Any]:
    """Alternate, and compare the answers."""
    found: dict[str, list[dict[str, Any]]] = {s: [] for s in SYSTEMS}
    for order in bench.alternation(SYSTEMS, rounds):
        for system in order:
            row = bench.run_child(
                "scripts.bench_eval_async",
                ["--child", system, "--folder", str(folder), "--workers", str(workers)],
            )
            found[system].append(row)
            print(
                f"  {system:8} {row['seconds']:.2f} s, {row['decoded_here']} clips decoded by the engine's process in "
                f"{row['media_s']:.2f} s",
                flush=True,
            )
    if len({row["answers"] for rows in found.values() for row in rows}) != 1:
        raise RuntimeError("expected the same answers from every system, found others")
    return {
        "workers": workers,
        "answers": found["none"][0]["rows"],
        "seconds": {s: bench.spread([r["seconds"] for r in found[s]]) for s in SYSTEMS},
        "decoding_s": bench.spread([r["media_s"] for r in found["none"]]),
        "workers_ready_s": bench.spread([r["ready_s"] for r in found["workers"]]),
        "none / workers": bench.spread(
            [
                a["seconds"] / b["seconds"]
                for a, b in zip(found["none"], found["workers"], strict=True)
            ],
            2,
        ),
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="one round with few clips; writes nothing"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument(
        "--clips", type=int, default=96, help="per suite; 64 samples are answered at a time"
    )
    parser.add_argument("--child", choices=("prepare", *SYSTEMS), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = bench.parse(parser)
    if options.child == "prepare":
        from mmrl.policy.tiny import TinySpec, build_tiny

        build_tiny(TinySpec(**MODEL), options.folder / "model")  # type: ignore[arg-type]
        make_suites(options.folder, options.clips)
        bench.finish_child({})
        return
    if options.child:
        child(options.child, options.folder, options.workers)
        return
    clips = min(options.clips, 16) if options.quick else options.clips
    with tempfile.TemporaryDirectory(prefix="mmrl-bench-eval-") as scratch:
        bench.run_child(
            "scripts.bench_eval_async",
            ["--child", "prepare", "--folder", scratch, "--clips", str(clips)],
        )
        result = measure(Path(scratch), 1 if options.quick else options.rounds, options.workers)
    bench.print_table(
        ("", "seconds", "range"),
        [
            (s, f"{v['median']:.2f}", f"{v['min']:.2f}-{v['max']:.2f}")
            for s, v in result["seconds"].items()
        ],
    )
    ratio = result["none / workers"]
    print(f"none / workers: {ratio['median']:g}x ({ratio['min']:g}-{ratio['max']:g})")
    if not options.quick:
        print(
            bench.write_results(
                "bench_eval_async",
                {
                    "clips": {
                        "per_suite": clips,
                        "suites": SUITES,
                        "size": SIDE,
                        "seconds": SECONDS,
                        "fps": FPS,
                    },
                    "shown": {"frames": FRAMES, "max_pixels": PIXELS},
                    "model": MODEL,
                    **result,
                },
                "torch",
                "transformers",
                "av",
            )
        )


if __name__ == "__main__":
    main()
