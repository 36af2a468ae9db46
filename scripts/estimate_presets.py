"""What every preset needs with every recipe and model it is for, by estimate: writes assets/results/presets.json.

python -m scripts.estimate_presets            (seconds, no weights, no GPU)
python -m scripts.estimate_presets --check    (fails when the file is out of date)
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from typing import Any

from mmrl.config import RunConfig, load_config
from mmrl.config.presets import Preset, preset_names, read_preset
from mmrl.diagnostics.memory import estimate
from mmrl.diagnostics.memory_parameters import parameters_of
from scripts._bench import RESULTS, ROOT, parse, print_table, write_results

_GIB = 2**30
_LEAN = ("train.token_budget=8192", "rollout.batch_tokens=16384")
_SHARED = ("engine.train=fsdp2", "engine.rollout=vllm", "engine.vllm.memory=0.4")
_INT8 = "optim.states=int8"
_QLORA = "model.lora={r: 16, alpha: 32, quantize: nf4}"
# model, GPUs, GiB of each that a process may use, what is trained, overrides
_SIZES: tuple[tuple[str, int, float, str, tuple[str, ...]], ...] = (
    ("3B", 1, 22, "LoRA", (*_LEAN, "engine.rollout=own", "model.lora={r: 16, alpha: 32}")),
    ("3B", 1, 39, "LoRA", (*_LEAN, "engine.rollout=own", "model.lora={r: 16, alpha: 32}")),
    ("7B", 1, 22, "QLoRA", (*_LEAN, "engine.rollout=own", _QLORA)),
    ("32B", 1, 39, "QLoRA", (*_LEAN, "engine.rollout=own", _QLORA)),
    ("72B", 1, 78, "QLoRA", (*_LEAN, "engine.rollout=own", _QLORA)),
    ("3B", 1, 39, "language model", (*_LEAN, "engine.rollout=own")),
    ("3B", 1, 39, "language model, int8 moments", (*_LEAN, "engine.rollout=own", _INT8)),
    ("3B", 1, 78, "language model", ("engine.rollout=vllm", "engine.vllm.memory=0.4")),
    ("7B", 8, 39, "language model", (*_LEAN, *_SHARED, "engine.vllm.memory=0.5")),
    ("32B", 16, 78, "language model", (*_LEAN, *_SHARED)),
    ("72B", 32, 78, "language model", (*_LEAN, *_SHARED)),
    ("72B", 64, 78, "language model", (*_LEAN, *_SHARED)),
)
_COMMON = (
    "model.dtype=bf16",
    "model.freeze=[vision, projector]",
    "model.gradient_checkpointing=true",
    "algorithm.kl.coef=0",
)


def rows_of(name: str) -> list[dict[str, Any]]:
    """One row per model, recipe and rollout engine of a preset that does not choose the engine itself."""
    preset, rows = read_preset(name), []
    for model, recipe in itertools.product(preset.models, preset.recipes):
        file = ROOT / "configs" / f"{recipe}.yaml"
        config = load_config(file, [*preset.overrides, f"model.path={model}"])
        chosen = config.engine.rollout
        for rollout in ("own", "vllm") if chosen == "auto" else (chosen,):
            engine = config.engine.model_copy(update={"rollout": rollout})
            rows.append(_row(preset, recipe, config.model_copy(update={"engine": engine})))
    return rows


def _row(preset: Preset, recipe: str, config: RunConfig) -> dict[str, Any]:
    """What a recipe needs under a preset. It fits where the GPU holds it and, of it, vLLM's share its bf16 weights and a tenth more
    for keys and values."""
    available, vllm = preset.gpu_gib * _GIB, config.engine.rollout == "vllm"
    found = estimate(config, processes=preset.gpus, available=available)
    sampled = 2 * parameters_of(config.model.model_dump_json(), False, "cuda").numbers
    share = config.engine.vllm.memory * available
    return {
        "preset": preset.name,
        "gpus": preset.gpus,
        "gpu_gib": preset.gpu_gib,
        "model": config.model.path,
        "recipe": recipe,
        "rollout": config.engine.rollout,
        "vllm_gib": round(share / _GIB, 1) if vllm else 0.0,
        "needs_gib": round(found.total / _GIB, 1),
        "host_gib": round(found.host / _GIB, 1),
        "fits": found.warning(available) is None and (not vllm or sampled <= 0.9 * share),
        "parts_gib": {k: round(v / _GIB, 1) for k, v in {**found.parts, **found.peak}.items()},
    }


def sizes() -> list[dict[str, Any]]:
    """What Qwen2.5-VL of every size needs with the recipe grounding, phase by phase."""
    rows = []
    for size, gpus, gib, trained, overrides in _SIZES:
        model = f"model.path=Qwen/Qwen2.5-VL-{size}-Instruct"
        config = load_config(ROOT / "configs" / "grounding.yaml", [*_COMMON, *overrides, model])
        found = estimate(config, processes=gpus, available=gib * _GIB)
        numbers = parameters_of(config.model.model_dump_json(), False, "cuda").numbers
        rows.append(
            {
                "size": size,
                "gpus": gpus,
                "gpu_gib": gib,
                "trained": trained,
                "rollout": config.engine.rollout,
                "vllm_gib": round(config.engine.vllm.memory * gib, 1),
                "sampled_gib": round(2 * numbers / _GIB, 1),
                "needs_gib": round(found.total / _GIB, 1),
                "host_gib": round(found.host / _GIB, 1),
                "fits": found.warning(gib * _GIB) is None,
                "phases_gib": {n: round(found.during(n) / _GIB, 1) for n in found.phases},
            }
        )
    return rows


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--check", action="store_true", help="compare with the file instead of writing it"
    )
    check = parse(parser).check
    rows = [row for name in preset_names() for row in rows_of(name)]
    table = sizes()
    if check:
        old = json.loads((RESULTS / "presets.json").read_text(encoding="utf-8"))
        fresh = (old["presets"], old["sizes"]) == (rows, table)
        if not fresh:
            print(
                "assets/results/presets.json is out of date; run python -m scripts.estimate_presets",
                file=sys.stderr,
            )
        return int(not fresh)
    print_table(
        ["preset", "model", "recipe", "rollouts", "needs, GiB", "of", "fits"],
        [
            [r[k] for k in ("preset", "model", "recipe", "rollout", "needs_gib", "gpu_gib", "fits")]
            for r in rows
        ],
    )
    write_results("presets", {"presets": rows, "sizes": table}, "torch", "transformers")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
