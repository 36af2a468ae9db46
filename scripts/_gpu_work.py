"""The measurements of scripts/bench_gpu.py, each in a process of its own: a row of numbers, or of what went wrong.

Times are medians of `repeats` after `warm_up` runs, between two torch.cuda.synchronize(). Memory is torch's own count
(torch.cuda.max_memory_allocated), reset before each phase.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import yaml

from mmrl import Sample
from mmrl.config import RunConfig
from mmrl.diagnostics.memory import estimate
from mmrl.errors import MissingExtraError, WeightSyncError
from mmrl.policy.pack import PackItem, micro_batches, pack, pack_padded, within_budget
from mmrl.rollout import PrefillOnceEngine, Request, SamplingSettings
from mmrl.rollout.build import vllm_dtype
from mmrl.rollout.digest import differing
from mmrl.rollout.vllm_inputs import WireSampling, wire_prompt
from mmrl.rollout.weights import SyncPlan
from mmrl.tasks.choice import Choice
from mmrl.training.optim import build_optimizer
from scripts import _bench as bench
from scripts._gpu_kit import (
    SMOKE,
    Setting,
    build_policy,
    make_clip,
    make_pictures,
    run_of,
    update_flops,
)

__all__ = ["WORK"]

_GIB = 2**30


def _on_gpu(setting: Setting) -> bool:
    return setting.device == "cuda"


def _wait(setting: Setting) -> None:
    if _on_gpu(setting):
        torch.cuda.synchronize()


def timed(setting: Setting, function: Callable[[], Any]) -> dict[str, float]:
    """Seconds of `function`."""
    seconds = []
    for number in range(setting.warm_up + setting.repeats):
        _wait(setting)
        began = time.perf_counter()
        function()
        _wait(setting)
        if number >= setting.warm_up:
            seconds.append(time.perf_counter() - began)
    return bench.spread(seconds, 4)


@contextlib.contextmanager
def guarded(setting: Setting, row: dict[str, Any]) -> Iterator[None]:
    """What is measured inside fills `row`; running out of memory is a result too. `peak_gib` is the largest allocation."""
    if _on_gpu(setting):
        torch.cuda.reset_peak_memory_stats()
    try:
        yield
    except torch.OutOfMemoryError as error:
        row["out_of_memory"] = str(error).splitlines()[0][:200]
    if _on_gpu(setting):
        row["peak_gib"] = round(torch.cuda.max_memory_allocated() / _GIB, 3)
    gc.collect()
    if _on_gpu(setting):
        torch.cuda.empty_cache()


def _prompts(policy: Any, setting: Setting, folder: Path) -> list[Any]:
    task, asked = Choice(), "Which letter is the right one?"
    params = {"options": ["left", "right"]}
    return [
        policy.encoder(Sample(str(n), "choice", "bench", asked, "A", (path,), params=params), task)
        for n, path in enumerate(make_pictures(folder, setting.groups, setting.pixels))
    ]


def _items(policy: Any, setting: Setting, prompts: list[Any]) -> list[PackItem]:
    draw = torch.Generator().manual_seed(0)
    tokens = [t for t in range(256) if t not in policy.banned.tolist()]

    def completion() -> tuple[int, ...]:
        return tuple(
            tokens[i]
            for i in torch.randint(len(tokens), (setting.new_tokens,), generator=draw).tolist()
        )

    return [PackItem(p, tuple(completion() for _ in range(setting.group_size))) for p in prompts]


def _shared(setting: Setting, items: list[PackItem]) -> list[Any]:
    return [pack([items[i] for i in part]) for part in micro_batches(items, setting.token_budget)]


def _padded(setting: Setting, items: list[PackItem]) -> list[Any]:
    """The usual batch under the same number of tokens, each row with its own copy of the prompt."""
    rows = [PackItem(item.prompt, (c,)) for item in items for c in item.completions]
    widths = [row.prompt.length + setting.new_tokens for row in rows]
    return [
        pack_padded([rows[i] for i in part]) for part in within_budget(widths, setting.token_budget)
    ]


def _forward_backward(policy: Any, batches: list[Any]) -> None:
    for batch in batches:
        policy.logp(batch).logp_N.sum().backward()


def _update_row(
    policy: Any, setting: Setting, items: list[PackItem], batches: list[Any], forward: str
) -> dict[str, Any]:
    row: dict[str, Any] = {"forward": forward, "micro_batches": len(batches)}
    with guarded(setting, row):

        def once() -> None:
            policy.model.zero_grad(set_to_none=True)
            _forward_backward(policy, batches)

        row["seconds"] = timed(setting, once)
        median = row["seconds"]["median"]
        flops = update_flops(
            policy.base.config,
            prompt=items[0].prompt.length,
            completion=setting.new_tokens,
            group_size=setting.group_size,
            groups=len(items),
            mode=setting.mode,
            shared=forward == "shared",
        )
        row |= {
            "tokens": sum(b.num_tokens for b in batches),
            "tflops": round(flops / median / 1e12, 3),
            "completion_tokens_per_s": round(
                len(items) * setting.group_size * setting.new_tokens / median, 1
            ),
        }
    return row


def _steps(policy: Any, setting: Setting, batches: list[Any]) -> dict[str, Any]:
    """Two whole optimizer steps: peak memory with gradients and moments in place."""
    row: dict[str, Any] = {}
    with guarded(setting, row):
        optimizer = build_optimizer(policy.trainable(), run_of(setting).optim)
        for _ in range(2):
            _forward_backward(policy, batches)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    return row


def update(setting: Setting) -> dict[str, Any]:
    """Forward and backward with and without shared prefix, and the peak memory of whole steps against the estimate."""
    with tempfile.TemporaryDirectory() as folder:
        policy = build_policy(setting)
        items = _items(policy, setting, _prompts(policy, setting, Path(folder)))
        row: dict[str, Any] = {
            "prompt_tokens": items[0].prompt.length,
            "weights_gib": round(
                sum(p.numel() * p.element_size() for p in policy.model.parameters()) / _GIB, 3
            ),
            "updates": [],
        }
        ways = [("shared", _shared(setting, items)), ("padded", _padded(setting, items))]
        for forward, batches in ways if setting.fused else ways[:1]:
            row["updates"].append(_update_row(policy, setting, items, batches, forward))
        if setting.shape != SMOKE:
            found = estimate(run_of(setting), kind="cuda", prompt_tokens=items[0].prompt.length)
            phases = {n: sum(p.values()) for n, p in found.phases.items() if n != "rollout"}
            # torch does not count the GPU context
            held = sum(found.parts.values()) - found.parts["libraries"]
            row["estimate_gib"] = round((held + max(phases.values())) / _GIB, 3)
        policy.model.zero_grad(set_to_none=True)
        row["step"] = _steps(policy, setting, _shared(setting, items))
        return row


_PROFILED_TOKENS = 8
_KERNELS = 20


def _kernels(setting: Setting, function: Callable[[], Any]) -> list[dict[str, Any]]:
    """What the device did in one call of `function`, what took longest first: kernels on a GPU (those of CUDA graphs too),
    operators on a CPU."""
    from torch.profiler import ProfilerActivity, profile

    kind = ProfilerActivity.CUDA if _on_gpu(setting) else ProfilerActivity.CPU
    with profile(activities=[kind]) as seen:
        function()
        _wait(setting)
    time_of = "self_device_time_total" if _on_gpu(setting) else "self_cpu_time_total"
    events = sorted(seen.key_averages(), key=lambda e: -getattr(e, time_of))
    return [
        {"name": e.key[:120], "calls": e.count, "ms": round(getattr(e, time_of) / 1e3, 3)}
        for e in events[:_KERNELS]
    ]


def rollout(setting: Setting) -> dict[str, Any]:
    """Tokens per second of mmrl's own engine, the seconds to the first token of all rows, those of a step behind it, and what the
    device does in them."""
    with tempfile.TemporaryDirectory() as folder:
        policy = build_policy(setting)
        requests = [
            Request(p, setting.group_size, (n,))
            for n, p in enumerate(_prompts(policy, setting, Path(folder)))
        ]
        engine, sampling, row = (
            PrefillOnceEngine(policy),
            SamplingSettings(max_new_tokens=setting.new_tokens),
            dict[str, Any](),
        )
        with guarded(setting, row):
            row["seconds"] = timed(setting, lambda: engine.generate(requests, sampling))
            row["tokens_per_s"] = round(
                setting.groups * setting.group_size * setting.new_tokens / row["seconds"]["median"],
                1,
            )
            one = SamplingSettings(max_new_tokens=1)
            row["first_seconds"] = timed(setting, lambda: engine.generate(requests, one))
            behind = row["seconds"]["median"] - row["first_seconds"]["median"]
            row["step_ms"] = round(1e3 * behind / (setting.new_tokens - 1), 3)
            few = SamplingSettings(max_new_tokens=_PROFILED_TOKENS)
            row["kernels"] = {
                "new_tokens": _PROFILED_TOKENS,
                "longest": _kernels(setting, lambda: engine.generate(requests, few)),
            }
        return {"engine": "own", "prompt_tokens": requests[0].prompt.length, **row}


class _Weights:
    """A policy's own weights, as a training engine in one process gives them."""

    sharded = False

    def __init__(self, policy: Any) -> None:
        self._policy = policy

    def parameters(self, *, trainable: bool) -> Iterator[tuple[str, torch.Tensor]]:
        """See TrainEngine.parameters."""
        yield from self._policy.model.named_parameters()

    def run(self, forward: Any) -> Any:
        """See TrainEngine.run."""
        return forward()


def _vllm_backend(setting: Setting, policy: Any, folder: Path, length: int) -> Any:
    """vLLM for the policy's shape, as a run colocates it."""
    from mmrl.rollout.vllm_backend import VLLMBackend, VLLMSettings

    # vLLM reads no weights (load_format dummy): configuration and processor are enough
    policy.base.config.architectures = [type(policy.base).__name__]
    policy.base.config.save_pretrained(folder)
    policy.processor.save_pretrained(folder)
    return VLLMBackend(
        VLLMSettings(str(folder), vllm_dtype(policy), length, memory=0.5, kv_cache_gib=0.125)
    )


def vllm(setting: Setting) -> dict[str, Any]:
    """Tokens per second of vLLM with the same prompts and the policy's weights, and the seconds of giving them: awake, and behind a
    sleep, when it has none."""
    # vLLM's sleep mode has a memory pool of its own, which torch refuses with expandable segments
    os.environ.pop("PYTORCH_CUDA_ALLOC_CONF", None)
    with tempfile.TemporaryDirectory() as folder:
        policy = build_policy(setting)
        asked = _prompts(policy, setting, Path(folder) / "pictures")
        prompts = [wire_prompt(policy, p) for p in asked]
        sampling = WireSampling(
            setting.group_size, 0, 1.0, setting.new_tokens, (), tuple(policy.banned.tolist())
        )
        row: dict[str, Any] = {"engine": "vllm"}
        with guarded(setting, row):
            try:
                length = prompts[0].positions_3P.shape[-1] + setting.new_tokens + 16
                backend = _vllm_backend(setting, policy, Path(folder) / "model", length)
            except MissingExtraError as error:
                return {"engine": "vllm", "missing": str(error)}
            plan, source = SyncPlan(policy), _Weights(policy)

            def sync() -> None:
                (held,) = backend.load(plan.weights(source, everything=True))
                if wrong := differing(plan.held, held):
                    raise WeightSyncError(f"vLLM holds other weights than the policy: {wrong[:4]}")

            sync()
            row["sync_seconds"] = timed(setting, sync)
            backend.sleep()
            row["wake_seconds"] = timed(replace(setting, repeats=1, warm_up=0), sync)
            row["seconds"] = timed(
                setting, lambda: backend.generate([(p, sampling) for p in prompts])
            )
            row["tokens_per_s"] = round(
                setting.groups * setting.group_size * setting.new_tokens / row["seconds"]["median"],
                1,
            )
            one = replace(sampling, max_tokens=1)
            row["first_seconds"] = timed(
                setting, lambda: backend.generate([(p, one) for p in prompts])
            )
            row["prompt_tokens"] = asked[0].length
            backend.close()
        return row


def cache(setting: Setting) -> dict[str, Any]:
    """Seconds until a clip's features are on the device: decoded each time, from cached pixels, from cached features."""
    smoke = setting.shape == SMOKE
    with tempfile.TemporaryDirectory() as folder:
        clip = make_clip(
            Path(folder) / "clip.mp4",
            0,
            (320, 192) if smoke else (1280, 720),
            2 if smoke else 10,
            8 if smoke else 30,
        )
        policy, task = build_policy(setting), Choice()
        visuals = policy.encoder.visuals
        sample = Sample(
            "0",
            "choice",
            "bench",
            "Which way?",
            "A",
            videos=(clip,),
            params={
                "options": ["left", "right"],
                "video": {"kind": "uniform", "num_frames": 8 if smoke else 16},
            },
        )
        prompt = policy.encoder(sample, task)

        def seen(*, forget_pixels: bool, forget_features: bool) -> None:
            for forgotten, memory in (
                (forget_pixels, visuals._pixels),
                (forget_features, visuals._features),
            ):
                if forgotten:
                    memory.clear()
            if forget_pixels:  # the encoder remembers prompts, whose making decodes the clip
                policy.encoder._cache.clear()
                policy.encoder._used_bytes = 0
            visuals.unpin()
            with torch.no_grad(), policy.autocast():
                policy.media(policy.encoder(sample, task).visuals)

        levels = {"none": (True, True), "pixels": (False, True), "features": (False, False)}
        return {
            "prompt_tokens": prompt.length,
            "seconds": {
                name: timed(
                    setting,
                    functools.partial(seen, forget_pixels=pixels, forget_features=features),
                )
                for name, (pixels, features) in levels.items()
            },
        }


def _checkpoint(setting: Setting, folder: Path) -> str:
    """A checkpoint of the shape with random weights in bf16."""
    policy = build_policy(setting)
    policy.model.to(torch.bfloat16).save_pretrained(folder)
    policy.processor.save_pretrained(folder)
    return str(folder)


def _questions(setting: Setting, folder: Path) -> str:
    """A data file of the letters task with as many prompts as a step has."""
    rows = [
        {
            "id": str(n),
            "image": path,
            "question": "Where is it?",
            "answer": [0, 0, 50, 50],
            "frame": "abs_orig",
        }
        for n, path in enumerate(make_pictures(folder, setting.groups, setting.pixels))
    ]
    file = folder / "questions.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(file)


def train(setting: Setting) -> dict[str, Any]:
    """`mmrl train` in a process of its own: seconds of a step and of its parts, the gap between sampler and trainer, peak memory
    beside the estimate. The first step, which compiles kernels, is told apart."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path = _checkpoint(replace(setting, mode="full", attn="sdpa"), folder / "model")
        gc.collect()
        if _on_gpu(setting):
            torch.cuda.empty_cache()
        task = f"{bench.ROOT / 'scripts' / '_letters_task.py'}:Letters"
        tree = run_of(setting).model_dump(mode="json", exclude_unset=True)
        tree = {
            **tree,
            "name": "run",
            "dir": str(folder / "runs"),
            "model": {**tree["model"], "path": path},
            "data": {
                **tree["data"],
                "train": [{"task": task, "path": _questions(setting, folder)}],
            },
            "algorithm": {"kl": {"coef": 0.0}, "dynamic_sampling": False},
            "engine": {"rollout": "own", "train": setting.engine},
            "reward": {"workers": 2},
            "train": {**tree["train"], "steps": setting.warm_up + setting.repeats, "save_every": 0},
        }
        config = folder / "run.yaml"
        config.write_text(yaml.safe_dump(tree), encoding="utf-8")
        began = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-m", "mmrl.cli.main", "train", str(config)],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            return {"failed": (done.stderr or done.stdout)[-2000:]}
        steps = [
            row
            for line in (folder / "runs/run/metrics.jsonl").read_text().splitlines()
            if "time/total" in (row := json.loads(line))
        ]
        rest = steps[setting.warm_up :]
        found = estimate(RunConfig.model_validate(tree), kind=setting.kind)
        return {
            "engine": setting.engine,
            "whole_s": round(time.perf_counter() - began, 1),
            "first_step_s": round(steps[0]["time/total"], 2),
            "seconds": bench.spread([row["time/total"] for row in rest], 3),
            "parts_s": {
                name.removeprefix("time/"): round(statistics.median(row[name] for row in rest), 3)
                for name in rest[0]
                if name.startswith("time/") and name != "time/total" and rest[0][name] is not None
            },
            "tokens_per_s": round(statistics.median(r["speed/tokens_per_s"] for r in rest), 1),
            "logprob_gap": {
                name: max(row[f"train/logprob_gap/{name}"] for row in rest)
                for name in ("mean", "max")
            },
            "grad_norm": [round(row["train/grad_norm"], 4) for row in steps],
            "peak_gib": round(max(row["memory/peak_gib"] for row in steps), 3),
            # torch does not count the GPU context
            "estimate_gib": round((found.total - found.parts["libraries"]) / _GIB, 3),
        }


WORK: dict[str, Callable[[Setting], dict[str, Any]]] = {
    "update": update,
    "rollout": rollout,
    "vllm": vllm,
    "cache": cache,
    "train": train,
}
