"""From rows that scripts/bench_gpu.py measured to the shares that scripts/plan_scale.py plans with.

A share is what the plan's own formulas need, over what was measured: planning with it gives the measured seconds again. Where a
model was measured in several ways, full fine-tuning counts before LoRA, and the recipes' attention before the fastest.
"""

from __future__ import annotations

from typing import Any

from mmrl.diagnostics.shapes import SHAPES, shape_config
from scripts._gpu_kit import Setting, update_flops
from scripts.plan_scale import decode_bytes, shape_of

__all__ = ["plan_shares"]


def _forward(shape: str, prompt: int, setting: Setting) -> float:
    """FLOPs of one forward of the step, prompts counted once."""
    return (
        update_flops(
            shape_config(shape),
            prompt=prompt,
            completion=setting.new_tokens,
            group_size=setting.group_size,
            groups=setting.groups,
            mode="full",
            shared=True,
        )
        / 3
    )


def _update(row: dict[str, Any], setting: Setting, peak: float) -> float | None:
    """Share of peak with recomputation counted as work: forward, forward again, backward (half of it with LoRA)."""
    shared = next(
        (u for u in row.get("updates", ()) if u["forward"] == "shared" and "seconds" in u), None
    )
    if shared is None:
        return None
    passes = 4 if row["mode"] == "full" else 3
    return (
        passes
        * _forward(row["shape"], row["prompt_tokens"], setting)
        / (shared["seconds"]["median"] * peak)
    )


def _prefill(row: dict[str, Any], setting: Setting, peak: float) -> float | None:
    """Share of peak until the own engine has written one token per row; the tower's features are there by then."""
    if "first_seconds" not in row:
        return None
    s, tokens = shape_of(row["shape"]), row["prompt_tokens"]
    flops = setting.groups * (2 * s.language * tokens + 2.0 * s.layers * s.attention * tokens**2)
    return flops / (row["first_seconds"]["median"] * peak)


def _decode(row: dict[str, Any], setting: Setting, bandwidth: float) -> float | None:
    """Share of bandwidth in vLLM's tokens after the first."""
    if "first_seconds" not in row or "seconds" not in row:
        return None
    seconds = row["seconds"]["median"] - row["first_seconds"]["median"]
    one = decode_bytes(
        shape_of(row["shape"]),
        setting.groups * setting.group_size,
        row["prompt_tokens"] + setting.new_tokens / 2,
    )
    return (setting.new_tokens - 1) * one / (seconds * bandwidth) if seconds > 0 else None


def plan_shares(
    rows: list[dict[str, Any]], setting: Setting, peak: float | None, bandwidth: float | None
) -> dict[str, dict[str, Any]]:
    """model -> update_share, prefill_share, decode_share, those that were measured, and `update_of`: which rows gave the first.

    peak: dense bf16 TFLOP/s of the GPU; bandwidth: of its memory, TB/s. Without them there are no shares of them. `rows` that
    failed, or are of a model that is not in mmrl.diagnostics.shapes, give nothing.
    """
    found: dict[str, dict[str, Any]] = {}
    # what model.attn auto takes on a GPU
    usual = ("flash_attention_2", "flex")

    def keep(row: dict[str, Any], name: str, share: float | None) -> None:
        if share is not None:
            found.setdefault(row["shape"], {}).setdefault(name, round(share, 4))

    known = [row for row in rows if row["shape"] in SHAPES and row.get("fused", True)]
    if peak:
        updates = [
            (share, row)
            for row in known
            if row["part"] == "update" and (share := _update(row, setting, peak * 1e12))
        ]
        for share, row in sorted(
            updates,
            key=lambda u: (u[1]["mode"] == "full", u[1]["attn"] in usual, u[0]),
            reverse=True,
        ):
            keep(row, "update_share", share)
            found[row["shape"]].setdefault("update_of", f"{row['mode']} {row['attn']}")
    for row in known:
        if row["part"] == "rollout" and peak:
            keep(row, "prefill_share", _prefill(row, setting, peak * 1e12))
        if row["part"] == "vllm" and bandwidth:
            keep(row, "decode_share", _decode(row, setting, bandwidth * 1e12))
    return found
