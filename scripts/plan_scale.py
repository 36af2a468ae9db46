"""What 8, 64 and 512 GPUs would do, per recipe: arithmetic on shapes and public figures, written to docs/scaling.md.

    python -m scripts.plan_scale                # writes docs/scaling.md
    python -m scripts.plan_scale --check        # status 1 when the committed page differs

Nothing here is measured, but for what `MEASURED` files hold: simulators on this project's CPU machine, and GPU figures once
scripts/bench_gpu.py has written some ("plan" in its file: model name -> update_share, prefill_share, decode_share).
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mmrl.config import RunConfig, load_config
from mmrl.diagnostics.memory import estimate
from mmrl.diagnostics.shapes import SHAPES
from mmrl.distributed.engines import train_engine_name
from mmrl.robotics.config import load_embodied
from scripts._plan_page import page

__all__ = ["ASSUMED", "GPUS", "Plan", "Recipe", "accepted", "plan", "recipes", "render"]

REPO = Path(__file__).resolve().parent.parent
GPUS = (8, 64, 512)
_GIB = 2**30

ASSUMED: dict[str, tuple[float, str, str]] = {
    "peak": (
        989e12,
        "H100 SXM, bf16 without sparsity, FLOP/s",
        "NVIDIA, H100 data sheet (1,979 with sparsity)",
    ),
    "hbm": (3.35e12, "HBM3 of an H100 SXM, bytes/s", "NVIDIA, H100 data sheet"),
    "hbm_gib": (
        80.0,
        "memory of a GPU, GiB",
        "NVIDIA, H100 data sheet (80 GB; what a process may use is less)",
    ),
    "nvlink": (
        450e9,
        "NVLink per GPU and direction, bytes/s",
        "NVIDIA, H100 data sheet (900 GB/s both ways)",
    ),
    "nic": (
        50e9,
        "InfiniBand per GPU and direction, bytes/s",
        "NVIDIA, DGX H100 data sheet (8 ConnectX-7 of 400 Gbit/s)",
    ),
    "node": (8, "GPUs of a node", "NVIDIA, DGX H100 data sheet"),
    "cores": (14, "CPU cores per GPU", "NVIDIA, DGX H100 data sheet (2 x 56)"),
    "update_share": (
        0.35,
        "share of peak in update and log-probs, recomputation counted as work",
        "assumption; Llama 3 405B reports 0.38-0.43 (arXiv 2407.21783, table 4), with far larger batches",
    ),
    "prefill_share": (0.40, "share of peak in prefill and vision tower", "assumption"),
    "decode_share": (0.60, "share of HBM bandwidth in decoding", "assumption"),
    "network": (0.70, "share of link bandwidth in collectives", "assumption"),
    "mean_length": (
        0.50,
        "mean completion / rollout.max_new_tokens",
        "assumption; a run's train/tokens/* say it",
    ),
    "attempts": (
        1.0,
        "prompts rolled out per prompt trained on",
        "assumption; dynamic sampling and filters raise it",
    ),
}


@dataclass(frozen=True)
class Shape:
    """What of a model's shape the arithmetic uses; numbers of parameters, kv_bytes per token in bf16."""

    name: str
    language: float  # matrices that every token meets, without the output layer
    head: float
    stored: float  # output layer and embeddings, once where they are tied
    vision: float
    layers: int
    attention: int  # heads x head size
    kv_bytes: int


def shape_of(name: str) -> Shape:
    """From mmrl.diagnostics.shapes; head size 128 in all of these models."""
    _, h, i, layers, heads, kv, vocabulary, tied, tower = SHAPES[name]
    e = tower["hidden_size"] if "hidden_size" in tower else tower["embed_dim"]
    m = tower.get("intermediate_size", 4 * 1280)
    language = layers * (h * heads * 128 * 2 + 2 * h * kv * 128 + 3 * h * i)
    # blocks, merger
    vision = tower["depth"] * (4 * e * e + 3 * e * m) + (4 * e) * (4 * e) + 4 * e * h
    return Shape(
        name,
        float(language),
        float(h * vocabulary),
        float(h * vocabulary * (1 if tied else 2)),
        float(vision),
        layers,
        heads * 128,
        2 * 2 * layers * kv * 128,
    )


@dataclass(frozen=True)
class Recipe:
    """A configuration and what it makes of a step. Lengths in tokens; `decisions` per episode, 1 for answers to a prompt."""

    title: str
    file: str
    config: RunConfig
    shape: Shape
    engine: str
    prompt: int
    new: int
    visual: int  # tokens of pictures in the prompt
    media_bytes: float  # per prompt or decision, uint8
    tower_passes: int  # per prompt and step
    decisions: int = 1
    chunk_s: float = 0.0  # of one simulator core per decision
    overrides: tuple[str, ...] = ()  # of the file
    notes: tuple[str, ...] = ()

    @property
    def embodied(self) -> bool:
        """Groups are episodes."""
        return self.decisions > 1

    @property
    def group(self) -> int:
        """Completions or episodes per prompt."""
        return self.config.rollout.group_size

    @property
    def mean_new(self) -> float:
        """Mean tokens of a completion."""
        return self.new if self.embodied else self.new * ASSUMED["mean_length"][0]


@dataclass
class Plan:
    """One recipe on so many GPUs: seconds, bytes and rates of one step, per GPU where not said otherwise."""

    gpus: int
    prompts: float
    seconds: dict[str, float] = field(default_factory=dict)
    traffic: dict[str, float] = field(default_factory=dict)
    memory: float = 0.0
    generated: float = 0.0
    trained: float = 0.0
    step_s: float = 0.0
    bound: str = ""
    own: tuple[int, float] | None = None  # decoding with the own engine: slots, seconds


def _attention(r: Recipe, prompt_copies: float) -> float:
    """Forward FLOPs of attention of one group: 4 x width x (query, key) pairs, causal; prompt_copies 1: shared prefix."""
    pairs = prompt_copies * r.prompt**2 / 2 + r.group * r.mean_new * (r.prompt + r.mean_new / 2)
    return 4.0 * r.shape.layers * r.shape.attention * pairs


def _forward(r: Recipe, *, tokens: float, answers: float, copies: float) -> float:
    """FLOPs of one forward of a group (all decisions): 2 per matrix number and token, the output layer on answers only."""
    s = r.shape
    return r.decisions * (2 * s.language * tokens + 2 * s.head * answers + _attention(r, copies))


def _constants(model: str) -> dict[str, float]:
    """ASSUMED, with what was measured on a GPU in its place."""
    values = {k: v[0] for k, v in ASSUMED.items()}
    return {**values, **measured_gpu().get(model, {})}


def _gpu_plan() -> dict[str, dict[str, Any]]:
    file = REPO / "assets/results/bench_gpu.json"
    return json.loads(file.read_text(encoding="utf-8")).get("plan", {}) if file.exists() else {}


def measured_gpu() -> dict[str, dict[str, float]]:
    """model -> measured figures of assets/results/bench_gpu.json; empty while there are none."""
    return {
        m: {
            k: float(v)
            for k, v in row.items()
            if k in ("update_share", "prefill_share", "decode_share")
        }
        for m, row in _gpu_plan().items()
    }


def measured_ways() -> dict[str, str]:
    """model -> what its update share was measured with, as 'lora flex'."""
    return {m: row["update_of"] for m, row in _gpu_plan().items() if "update_of" in row}


def decode_bytes(s: Shape, rows: float, length: float) -> float:
    """Bytes that one token of each of `rows` rows reads: bf16 weights once, every row's keys and values of `length` tokens."""
    return 2 * (s.language + s.head) + s.kv_bytes * rows * length


def _decode_s(r: Recipe, c: dict[str, float], rows: float) -> float:
    """Seconds until the longest of `rows` answers is written."""
    return (
        r.new
        * decode_bytes(r.shape, rows, r.prompt + r.mean_new / 2)
        / (c["hbm"] * c["decode_share"])
    )


def own_decode(r: Recipe, prompts: float) -> tuple[int, float]:
    """(slots, seconds) of the own engine, which is not the one that is planned: a bf16 copy of FSDP2's shards, as many rows
    at once as rollout.batch_tokens has room for. A completion that waits takes the slot of one that ended: all slots write
    until none waits, and the last one may be the longest."""
    all_rows = prompts * ASSUMED["attempts"][0] * r.group
    rows = min(all_rows, max(r.group, r.config.rollout.batch_tokens // (r.prompt + r.new)))
    longest = _decode_s(r, _constants(r.shape.name), rows)
    return int(rows), longest * (1 + (all_rows - rows) * r.mean_new / (rows * r.new))


def vllm_rows(r: Recipe) -> float:
    """Rows whose keys and values have room beside bf16 weights in vLLM's share of a GPU."""
    s, share = r.shape, r.config.engine.vllm.memory
    room = ASSUMED["hbm_gib"][0] * _GIB * share - 2 * (s.language + s.stored + s.vision)
    return room / (s.kv_bytes * (r.prompt + r.new))


def _rollout_s(r: Recipe, c: dict[str, float], prompts: float) -> dict[str, float]:
    """Seconds of a GPU that rolls out so many prompts: tower, prefill, decode; episodes: one forward per decision, simulators."""
    b = prompts * c["attempts"]
    compute = c["peak"] * c["prefill_share"]
    # four patches make a token; attention inside windows left out
    tower = r.tower_passes * 2 * r.shape.vision * 4 * r.visual
    if r.embodied:
        n = b * r.group * r.decisions
        infer = (
            _forward(
                r, tokens=(r.prompt + r.new) * r.group, answers=r.new * r.group, copies=r.group
            )
            * b
            / compute
        )
        workers = min(float(r.config.env.workers), c["cores"])  # type: ignore[attr-defined]
        return {"tower": n * tower / compute, "infer": infer, "simulate": n * r.chunk_s / workers}
    prefill = (
        b
        * (2 * r.shape.language * r.prompt + 2.0 * r.shape.layers * r.shape.attention * r.prompt**2)
        / compute
    )
    return {
        "tower": b * tower / compute,
        "prefill": prefill,
        "decode": _decode_s(r, c, b * r.group),
    }


def _update_s(r: Recipe, c: dict[str, float], prompts: float) -> dict[str, float]:
    """Seconds of log-probs of the reference and of the update: forward, recomputed forward, backward."""
    shared = not r.embodied
    tokens = r.prompt + r.group * r.mean_new if shared else r.group * (r.prompt + r.new)
    one = prompts * _forward(
        r, tokens=tokens, answers=r.group * r.mean_new, copies=1 if shared else r.group
    )
    backward = 1 if r.config.model.lora else 2  # adapters: gradients of activations, not of weights
    speed = c["peak"] * c["update_share"]
    reference = 1 if r.config.algorithm.kl.coef > 0 else 0
    return {"reference": reference * one / speed, "update": (2 + backward) * one / speed}


def trained_parameters(r: Recipe) -> float:
    """Numbers that the optimizer moves."""
    if r.config.model.lora is None:
        return r.shape.language + r.shape.stored
    rank = r.config.model.lora.r
    _, h, i, layers, heads, kv, _, _, _ = SHAPES[r.shape.name]
    return float(layers * rank * (2 * (h + heads * 128) + 2 * (h + kv * 128) + 3 * (h + i)))


def micro_batches(r: Recipe, prompts: float) -> int:
    """Of a step on one GPU."""
    tokens = (
        prompts
        * r.decisions
        * (r.group * (r.prompt + r.new) if r.embodied else r.prompt + r.group * r.mean_new)
    )
    return max(1, math.ceil(tokens / r.config.train.token_budget))


def _traffic(r: Recipe, gpus: int, prompts: float) -> dict[str, float]:
    """Bytes that a GPU sends per step, by what they are; ring algorithms."""
    share, trained = (gpus - 1) / gpus, trained_parameters(r)
    media = prompts * r.media_bytes * (r.decisions * r.group if r.embodied else 1)
    one = share * 4 * trained  # what a reduce-scatter or a gather of everything trained sends
    if r.engine == "ddp":
        return {"gradients": 2 * one, "gathers": 0.0, "media": media}
    m = micro_batches(r, prompts)
    # all-reduces its buckets (use_multi_rank_bucket_allreduce) and keeps its share of them
    if r.engine == "deepspeed_zero2":
        return {"gradients": m * 2 * one, "gathers": one, "media": media}
    # forward and backward, and the reference's forward
    passes = 2 + (1 if r.config.algorithm.kl.coef > 0 else 0)
    # FSDP2 gathers in bf16; the gather for what samples is of the fp32 shards
    each = 0.5 if r.engine == "fsdp2" else 1.0
    return {"gradients": m * one, "gathers": (m * passes * each + 1) * one, "media": media}


def link_s(c: dict[str, float], gpus: int, size: float) -> float:
    """Seconds for a GPU to send `size` bytes of a collective: all links of a node work at once, the slower kind bounds."""
    across = c["node"] * c["nic"] if gpus > c["node"] else math.inf
    return size / (min(c["nvlink"], across) * c["network"])


def accepted(r: Recipe, gpus: int, prompts: float) -> RunConfig:
    """The configuration of a row, checked as the run itself checks it. Raises ConfigError for one that mmrl refuses, ValueError for
    one that runs another engine or schedule than the row counts with."""
    load = load_embodied if r.embodied else load_config
    config = load(REPO / r.file, [*r.overrides, f"train.prompts_per_step={max(1, round(prompts))}"])
    engine, schedule = train_engine_name(config, gpus), "pipelined" if r.embodied else "serial"
    if (engine, config.schedule.kind) != (r.engine, schedule):
        raise ValueError(
            f"{r.title}: planned with engine.train {r.engine} and schedule.kind {schedule}, runs with {engine} and "
            f"{config.schedule.kind}"
        )
    return config


def plan(r: Recipe, gpus: int, prompts_per_gpu: float) -> Plan:
    """One step of `gpus` GPUs with so many prompts each. Raises ConfigError where mmrl would refuse the run."""
    accepted(r, gpus, prompts_per_gpu * gpus)
    c = _constants(r.shape.name)
    found = Plan(gpus, prompts_per_gpu * gpus)
    found.traffic = _traffic(r, gpus, prompts_per_gpu)
    network = link_s(c, gpus, found.traffic["gradients"] + found.traffic["gathers"])
    rollout, update = _rollout_s(r, c, prompts_per_gpu), _update_s(r, c, prompts_per_gpu)
    found.seconds = {**rollout, **update, "network": network}
    if r.embodied:  # pipelined: simulators beside the GPU, which infers and trains in turn
        gpu = sum(v for k, v in found.seconds.items() if k != "simulate")
        found.step_s = max(gpu, rollout["simulate"])
    else:
        found.step_s = sum(found.seconds.values())
    groups = {
        "rollout": sum(v for k, v in rollout.items() if k != "simulate"),
        "simulators": rollout.get("simulate", 0.0),
        "update": sum(update.values()),
        "network": network,
    }
    found.bound = max(groups, key=lambda k: groups[k])
    completions = found.prompts * r.group * r.decisions
    found.generated = completions * r.mean_new / found.step_s
    found.trained = completions * (r.prompt + r.mean_new) / found.step_s
    found.memory = _memory(r.file, gpus)
    found.own = None if r.embodied else own_decode(r, prompts_per_gpu)
    return found


@functools.cache
def _memory(file: str, processes: int) -> float:
    """GiB per GPU of the recipe with this file."""
    config = next(r.config for r in recipes() if r.file == file)
    return (
        estimate(
            config, processes=processes, kind="cuda", available=ASSUMED["hbm_gib"][0] * _GIB
        ).total
        / _GIB
    )


@functools.cache
def recipes() -> list[Recipe]:
    """The three that are planned, from their files in configs/."""
    three, seven = "Qwen2.5-VL-3B-Instruct", "Qwen2.5-VL-7B-Instruct"
    sharded = ("engine.train=fsdp2", "engine.rollout=vllm")
    larger = (f"model.path=Qwen/{seven}",)
    grounding = load_config(REPO / "configs/grounding.yaml", list(sharded))
    video = load_config(REPO / "configs/video_qa.yaml", [*larger, *sharded])
    libero = load_embodied(REPO / "configs/libero.yaml", list(larger))
    frames, pixels = video.data.video.num_frames or 16, video.data.video.max_pixels or 0
    clip = int(frames * pixels / 784 / 2)
    cameras, side = len(libero.env.cameras), libero.env.image_size
    chunk = json.loads((REPO / "assets/results/bench_render.json").read_text(encoding="utf-8"))[
        "simulators"
    ]["libero"]
    picture = int((grounding.data.max_pixels or 0) / 784)
    seen = cameras * (side // 28) ** 2
    return [
        Recipe(
            "Grounding, 3B",
            "configs/grounding.yaml",
            grounding,
            shape_of(three),
            "fsdp2",
            picture + 128,
            grounding.rollout.max_new_tokens,
            picture,
            picture * 784 * 3,
            2,
            overrides=sharded,
        ),
        Recipe(
            "Video question answering, 7B",
            "configs/video_qa.yaml",
            video,
            shape_of(seven),
            "fsdp2",
            clip + 128,
            video.rollout.max_new_tokens,
            clip,
            frames * pixels * 3,
            0,
            overrides=(*larger, *sharded),
            notes=(
                "the tower runs once per clip and run: its features are cached (data.cache.features)",
                "T-GRPO's shuffled groups would add up to 50 % to rollout (algorithm.contrast.group_size 4 of 8); left out",
            ),
        ),
        Recipe(
            "Embodied policy in LIBERO, 7B, LoRA",
            "configs/libero.yaml",
            libero,
            shape_of(seven),
            "ddp",
            seen + 128,
            7 * libero.action.chunk,
            seen,
            cameras * side * side * 3.0,
            2,
            libero.env.horizon // libero.action.chunk,
            chunk["ms_per_chunk"]["last step"]["median"] / 1000,
            overrides=larger,
        ),
    ]


def render() -> str:
    """The page."""
    rows = {}
    for r in recipes():
        per_gpu = r.config.train.prompts_per_step / GPUS[0]
        rows[r.title] = (
            r,
            [plan(r, g, per_gpu) for g in GPUS],
            [plan(r, g, max(1.0, r.config.train.prompts_per_step / g)) for g in GPUS],
        )
    return page(ASSUMED, rows, measured_gpu(), trained_parameters, micro_batches, measured_ways())


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="compare with the committed page")
    args, file = parser.parse_args(), REPO / "docs/scaling.md"
    text = render()
    if args.check:
        same = file.exists() and file.read_text(encoding="utf-8") == text
        print(
            "docs/scaling.md is up to date"
            if same
            else "docs/scaling.md differs: python -m scripts.plan_scale"
        )
        return 0 if same else 1
    file.parent.mkdir(exist_ok=True)
    file.write_text(text, encoding="utf-8")
    print(f"{file}: {len(text.splitlines())} lines")
    return 0


if __name__ == "__main__":
    sys.exit(main())
