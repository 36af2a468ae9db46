"""What seeing once is worth: seconds per phase of a training step on clips, by what is kept of them.

    python -m scripts.bench_cache            (about ten minutes, writes assets/results/bench_cache.json)
    python -m scripts.bench_cache --quick    (about a minute, writes nothing)

Four systems train the same model on the same 720p H.264 clips, in processes that alternate:

    none        clips are decoded and processed in every step
    frames_pt   decoded, resized frames as pickled float32 tensors, one .pt per clip, run through the video processor again in
                each stage (rollout, update): our stand-in for the design of EasyVideoR1's cache
    level_1     mmrl's cache of processed pixels
    level_1_2   and of the frozen vision tower's features

Model: a small random Qwen2.5-VL, tower and projector frozen, KL against a reference copy (the log-prob phase). Nothing stays
in memory from step to step, as with a data set of which every clip comes once per epoch; files may be in the page cache.
Phases are exclusive: data (decoding, loading, processing), tower (the vision tower wherever it runs), rollout, log-probs, update.
"""

from __future__ import annotations

import argparse
import math
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from mmrl import RewardContext, Sample, Score
from mmrl.tasks.choice import Choice
from scripts import _bench as bench
from scripts.bench_vs_trl import share_of_letters

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
SYSTEMS = ("none", "frames_pt", "level_1", "level_1_2")
PHASES = ("data", "tower", "rollout", "log-probs", "update")
CLIPS, SIDE, SECONDS, FPS = 6, (1280, 720), 10, 30


class Letters(Choice):
    """Questions about clips with a reward that costs nothing."""

    def score(self, sample: Sample, text: str, ctx: RewardContext) -> Score:
        """See bench_vs_trl.share_of_letters."""
        return Score.combine({"letters": share_of_letters(text)}, {"letters": 1.0}, parsed=True)


class Phases:
    """Exclusive wall-clock seconds by the innermost phase."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._stack: list[str] = ["other"]
        self._since = time.perf_counter()

    def _switch(self) -> None:
        now = time.perf_counter()
        self.seconds[self._stack[-1]] += now - self._since
        self._since = now

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, counted as phase `name`; an empty name takes log-probs outside gradients and update inside."""

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            import torch

            self._switch()
            self._stack.append(name or ("update" if torch.is_grad_enabled() else "log-probs"))
            try:
                return function(*args, **kwargs)
            finally:
                self._switch()
                self._stack.pop()

        return wrapped

    def take(self) -> dict[str, float]:
        """Seconds since the last call."""
        self._switch()
        taken, self.seconds = dict(self.seconds), defaultdict(float)
        return taken


def make_data(folder: Path, clips: int) -> None:
    """`clips` clips of moving noise blocks and their questions; every frame differs."""
    import json

    from mmrl.video.encode import write_video

    rows = []
    for number in range(clips):
        rng = np.random.default_rng(number)
        coarse = rng.integers(0, 256, (18, 40, 3), dtype=np.uint8).repeat(40, 0).repeat(40, 1)
        frames = [
            np.roll(coarse, (4 * t, 6 * t), (0, 1))[: SIDE[1], : SIDE[0]]
            for t in range(SECONDS * FPS)
        ]
        write_video(folder / "videos" / f"{number}.mp4", np.stack(frames), FPS)
        rows.append(
            {
                "id": str(number),
                "video": f"videos/{number}.mp4",
                "question": "Which way?",
                "answer": "A",
                "params": {
                    "options": ["left", "right"],
                    "width": SIDE[0],
                    "height": SIDE[1],
                    "duration": float(SECONDS),
                },
            }
        )
    (folder / "data.jsonl").write_text(
        "".join(json.dumps(r) + "\n" for r in rows), encoding="utf-8"
    )


def frames_as_pt(cache_class: type, folder: Path) -> type:
    """The stand-in: frames sampled and resized once, kept as pickled float32, processed again whenever they are loaded."""
    import hashlib

    import torch

    from mmrl.video.budget import frame_pixels, resize_frames, smart_resize
    from mmrl.video.decode import read_clip

    class FramesAsPt(cache_class):
        def _build_video(self, path: str, sampling: Any) -> Any:
            file = (
                folder / f"{hashlib.md5(f'{path}_{sampling.key()}'.encode()).hexdigest()[:16]}.pt"
            )
            layout = self.codec("video").layout
            factor = layout.patch * layout.merge
            if not file.exists():
                clip = read_clip(path, sampling)
                low, high, total = self.settings.bounds(factor)
                low, high = frame_pixels(
                    len(clip.indices),
                    min_pixels=low,
                    max_pixels=high,
                    total_pixels=total,
                    factor=factor,
                )
                h, w = smart_resize(
                    *clip.rgb_THWC.shape[1:3], factor=factor, min_pixels=low, max_pixels=high
                )
                frames = (
                    torch.from_numpy(resize_frames(clip.rgb_THWC, h, w))
                    .permute(0, 3, 1, 2)
                    .float()
                    .contiguous()
                )
                file.parent.mkdir(parents=True, exist_ok=True)
                torch.save(
                    {
                        "frames": frames,
                        "orig_wh": [clip.info.width, clip.info.height],
                        "timestamps_s": [float(t) for t in clip.timestamps_s],
                        "duration_s": clip.info.duration_s,
                    },
                    file,
                )
            held = torch.load(file, weights_only=False)
            from mmrl.video.pixels import run_video_processor

            out = run_video_processor(self.processor.video_processor, held["frames"])
            T, _, h, w = held["frames"].shape
            return {"pixels": out["pixel_values_videos"]}, {
                "kind": "video",
                "grid_thw": [int(x) for x in out["video_grid_thw"][0]],
                "orig_wh": held["orig_wh"],
                "resized_wh": [w, h],
                "frames": T,
                "timestamps_s": held["timestamps_s"],
                "duration_s": held["duration_s"],
                "sample_fps": T / held["duration_s"],
                "digest": path,
            }

    return FramesAsPt


def config_of(system: str, folder: Path, frames: int, pixels: int, steps: int) -> Any:
    """The run's configuration."""
    from mmrl.config import RunConfig

    cache = (
        {"dir": str(folder / "cache"), "features": system == "level_1_2"}
        if system.startswith("level")
        else {"features": False}
    )
    return RunConfig.model_validate(
        {
            "name": "run",
            "dir": tempfile.mkdtemp(dir=folder),
            "threads": 1,
            "model": {
                "path": str(folder / "model"),
                "freeze": ["vision", "projector"],
                "device": "cpu",
            },
            "data": {
                "train": [{"task": "letters", "path": str(folder / "data.jsonl")}],
                "cache": cache,
                "video": {
                    "kind": "uniform",
                    "num_frames": frames,
                    "min_pixels": 28 * 28,
                    "max_pixels": pixels,
                },
            },
            "rollout": {"group_size": 8, "max_new_tokens": 24},
            "algorithm": {"dynamic_sampling": False, "kl": {"coef": 0.01}},
            "optim": {"lr": 1e-5},
            "reward": {"workers": 0},
            "train": {
                "steps": steps,
                "prompts_per_step": 2,
                "save_every": 0,
                "token_budget": 1 << 20,
            },
        }
    )


def child(system: str, folder: Path, frames: int, pixels: int, steps: int) -> None:
    """Trains and reports phases."""
    import psutil
    import torch

    from mmrl.policy.policy import Policy
    from mmrl.registry import register
    from mmrl.rollout.prompt_rollouter import PromptRollouter
    from mmrl.training.prompts import PromptRollouts
    from mmrl.training.trainer import Trainer

    register("letters")(Letters)
    rows: list[dict[str, float]] = []
    resident: list[float] = []
    phases = Phases()

    def forget() -> None:
        """What the next stage or step may not find in memory."""
        for memory in (visuals._pixels, visuals._features):
            memory.clear()
        visuals.unpin()

    def on_event(kind: str, payload: Any) -> None:
        if kind == "step":
            resident.append(psutil.Process().memory_info().rss / 2**20)
            rows.append(phases.take())
            forget()
            trainer.policy.encoder._cache.clear()
            trainer.policy.encoder._used_bytes = 0

    trainer = Trainer(config_of(system, folder, frames, pixels, steps), on_event=on_event)
    rollouts = trainer.rollouts
    assert isinstance(rollouts, PromptRollouts)
    policy, visuals = trainer.policy, trainer.policy.encoder.visuals
    policy.banned = torch.tensor(sorted({*policy.banned.tolist(), *policy.eos_ids}))
    if system == "frames_pt":
        visuals.__class__ = frames_as_pt(type(visuals), folder / "frames_pt")
    seen = type(visuals)
    seen._packed = phases.timed("data", seen._packed)
    seen.pixels = phases.timed("data", seen.pixels)
    seen.video = phases.timed("data", seen.video)
    for model in (policy.model, policy.reference_model):
        model.model.visual.forward = phases.timed("tower", model.model.visual.forward)
    engine: Any = rollouts.engine
    engine.generate = phases.timed("rollout", engine.generate)
    Policy.logp = phases.timed("", Policy.logp)  # type: ignore[method-assign]
    from mmrl.training.learner import Learner

    finish = phases.timed("update", Learner.finish)

    def run_update(learner: Learner) -> Any:
        if system == "frames_pt":
            forget()  # another worker group: it processes the frames again
        return finish(learner)

    Learner.finish = run_update  # type: ignore[assignment, method-assign]
    trainer.fit()
    assert isinstance(rollouts.rollouter, PromptRollouter)
    measured = rows[1:]  # the first step warms up
    bench.finish_child(
        {
            "phases_s": {
                p: statistics.median(r.get(p, 0.0) for r in measured) for p in (*PHASES, "other")
            },
            "step_s": statistics.median(sum(r.values()) for r in measured),
            "peak_mib": bench.peak_mib(),
            "resident_mib": statistics.median(resident),
            "visual_tokens": rollouts.rollouter.tally.prompt_tokens / 2,
        }
    )


def size_of(folder: Path, suffix: str) -> int:
    """Bytes of the files below `folder` that end in `suffix`."""
    return sum(f.stat().st_size for f in folder.rglob(f"*{suffix}") if f.is_file())


def measure(folder: Path, frames: int, pixels: int, rounds: int, steps: int) -> dict[str, Any]:
    """Fill the caches, then alternate."""
    common = ["--folder", str(folder), "--frames", str(frames), "--pixels", str(pixels)]
    disk = {"none": 0}
    for system in SYSTEMS[1:]:  # level_1 before level_1_2: what is added then are the features
        before = size_of(folder / "cache", "")
        bench.run_child(
            "scripts.bench_cache",
            ["--child", system, "--steps", str(math.ceil(CLIPS / 2) + 1), *common],
        )
        held = (
            size_of(folder / "frames_pt", ".pt")
            if system == "frames_pt"
            else size_of(folder / "cache", "") - before
        )
        disk[system] = held + (disk["level_1"] if system == "level_1_2" else 0)
    found: dict[str, list[dict[str, Any]]] = {s: [] for s in SYSTEMS}
    for order in bench.alternation(SYSTEMS, rounds):
        for system in order:
            found[system].append(
                bench.run_child(
                    "scripts.bench_cache", ["--child", system, "--steps", str(steps), *common]
                )
            )
            row = found[system][-1]
            print(
                f"  {system:10} {row['step_s']:.3f} s/step, data {row['phases_s']['data']:.4f}, tower "
                f"{row['phases_s']['tower']:.4f}",
                flush=True,
            )

    def ratio(of: str, over: str, value: Callable[[dict[str, Any]], float]) -> dict[str, float]:
        return bench.spread(
            [value(a) / value(b) for a, b in zip(found[of], found[over], strict=True)], 2
        )

    def step(row: dict[str, Any]) -> float:
        return float(row["step_s"])

    def data(row: dict[str, Any]) -> float:
        return float(row["phases_s"]["data"])

    return {
        "frames": frames,
        "max_pixels": pixels,
        "prompt_tokens": round(found["none"][0]["visual_tokens"]),
        "bytes_on_disk": disk,
        "ratios": {
            "data: none / level_1": ratio("none", "level_1", data),
            "data: frames_pt / level_1": ratio("frames_pt", "level_1", data),
            "bytes: frames_pt / level_1": round(disk["frames_pt"] / disk["level_1"], 2),
            "step: none / level_1": ratio("none", "level_1", step),
            "step: none / level_1_2": ratio("none", "level_1_2", step),
            "step: frames_pt / level_1_2": ratio("frames_pt", "level_1_2", step),
        },
        "tower_share": {
            s: round(statistics.median(r["phases_s"]["tower"] / r["step_s"] for r in found[s]), 4)
            for s in SYSTEMS
        },
        "phases_s": {
            s: {
                p: round(statistics.median(r["phases_s"][p] for r in found[s]), 4)
                for p in (*PHASES, "other")
            }
            for s in SYSTEMS
        },
        "step_s": {s: bench.spread([r["step_s"] for r in found[s]]) for s in SYSTEMS},
        **{
            key: {s: round(statistics.median(r[key] for r in found[s])) for s in SYSTEMS}
            for key in ("resident_mib", "peak_mib")
        },
    }


def report(results: list[dict[str, Any]]) -> None:
    """Print what was found."""
    for r in results:
        print(
            f"\n{r['frames']} frames, {r['prompt_tokens']} prompt tokens; seconds per step, medians:"
        )
        bench.print_table(
            ("", "step", *PHASES, "disk MB", "resident MiB"),
            [
                (
                    s,
                    f"{r['step_s'][s]['median']:.2f}",
                    *(f"{r['phases_s'][s][p]:.3f}" for p in PHASES),
                    f"{r['bytes_on_disk'][s] / 1e6:.1f}",
                    r["resident_mib"][s],
                )
                for s in SYSTEMS
            ],
        )
        for name, value in r["ratios"].items():
            told = (
                f"{value['median']:g}x ({value['min']:g}-{value['max']:g})"
                if isinstance(value, dict)
                else f"{value:g}x"
            )
            print(f"  {name}: {told}")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="one round of three steps at 32 frames; writes nothing"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--steps", type=int, default=6, help="steps per process, the first is the warm-up"
    )
    parser.add_argument("--child", choices=("model", *SYSTEMS), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--frames", type=int, default=32, help=argparse.SUPPRESS)
    parser.add_argument("--pixels", type=int, default=224 * 224, help=argparse.SUPPRESS)
    options = bench.parse(parser)
    if options.child == "model":
        from mmrl.policy.tiny import TinySpec, build_tiny

        model, _ = build_tiny(TinySpec(**MODEL), options.folder / "model")  # type: ignore[arg-type]
        bench.finish_child({"parameters": model.num_parameters()})
        return
    if options.child:
        child(options.child, options.folder, options.frames, options.pixels, options.steps)
        return
    with tempfile.TemporaryDirectory(prefix="mmrl-bench-cache-") as scratch:
        folder = Path(scratch)
        bench.run_child("scripts.bench_cache", ["--child", "model", "--folder", scratch])
        make_data(folder, CLIPS)
        rounds, steps = (1, 3) if options.quick else (options.rounds, options.steps)
        results = []
        for frames in (32,) if options.quick else (32, 64):
            print(f"{frames} frames", flush=True)
            results.append(measure(folder, frames, options.pixels, rounds, steps))
        report(results)
        if not options.quick:
            path = bench.write_results(
                "bench_cache",
                {
                    "clips": {"count": CLIPS, "size": SIDE, "seconds": SECONDS, "fps": FPS},
                    "model": MODEL,
                    "results": results,
                },
                "torch",
                "transformers",
                "av",
            )
            print(path)


if __name__ == "__main__":
    main()
