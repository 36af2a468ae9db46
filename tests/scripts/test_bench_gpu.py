"""scripts/bench_gpu.py where there is no GPU: its whole path on a tiny model, what it says, and how it records what fails."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import pytest
import torch

from mmrl.diagnostics.shapes import meta_model, shape_config
from scripts import _bench, _gpu_work, bench_gpu, plan_scale
from scripts._gpu_kit import Setting, memory_tb_s, peak_tflops, run_of, update_flops
from scripts._gpu_plan import plan_shares
from scripts._gpu_work import guarded
from tests.kits.engine_kit import REPO
from tests.kits.prepared_kit import prepared_subprocess


@pytest.mark.slow
def test_smoke_runs_every_part_and_writes_to_its_own_file_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded = REPO / "assets" / "results" / "bench_gpu.json"
    before = recorded.read_bytes() if recorded.exists() else None
    for module in (_bench, _gpu_work):
        monkeypatch.setattr(module, "subprocess", prepared_subprocess())
    monkeypatch.setattr(
        sys, "argv", ["bench_gpu", "--smoke", "--out", str(tmp_path / "smoke.json")]
    )
    assert bench_gpu.main() == 0
    found = json.loads((tmp_path / "smoke.json").read_text())
    assert found["smoke"] is True and {r["part"] for r in found["rows"]} == {
        "update",
        "rollout",
        "vllm",
        "cache",
        "train",
    }
    assert not [r for r in found["rows"] if {"missing", "failed", "out_of_memory"} & set(r)]
    sampled = [r for r in found["rows"] if r["part"] == "rollout"]
    kinds = [(mode, dtype) for dtype in ("fp32", "bf16") for mode in ("lora", "full")]
    assert [(r["mode"], r["dtype"]) for r in sampled] == kinds
    for row in sampled:
        longest = row["kernels"]["longest"]
        whole, first = row["seconds"]["median"], row["first_seconds"]["median"]
        # of two single measurements of milliseconds: its sign is the machine's other load
        assert whole > 0 and first > 0
        assert row["step_ms"] == pytest.approx(1e3 * (whole - first) / (4 - 1), abs=0.5)
        assert longest[0]["ms"] >= longest[-1]["ms"] > 0
        # the names say which operators: products of matrices are among what takes longest
        assert any("mm" in kernel["name"] for kernel in longest)
    of_vllm = next(r for r in found["rows"] if r["part"] == "vllm")
    for name in ("seconds", "first_seconds", "sync_seconds", "wake_seconds"):
        assert of_vllm[name]["median"] > 0
    updates = [r for r in found["rows"] if r["part"] == "update"]
    ways = [("flex", True), ("sdpa", True), ("flex", False)]
    assert [(r["mode"], r["dtype"], r["attn"], r["fused"]) for r in updates] == [
        (*kind, *way) for kind in kinds for way in ways
    ]
    runs = [r for r in found["rows"] if r["part"] == "train"]
    assert [(r["mode"], r["dtype"]) for r in runs] == kinds
    for run in runs:
        assert len(run["grad_norm"]) == 1 and run["peak_gib"] > 0 and run["parts_s"]["rollout"] > 0
        assert run["logprob_gap"]["max"] < (0.1 if run["dtype"] == "bf16" else 1e-5)
    norms = {(run["mode"], run["dtype"]): run["grad_norm"][0] for run in runs}
    held = {(r["mode"], r["dtype"]): r["weights_gib"] for r in updates}
    for mode in ("lora", "full"):
        assert norms[mode, "bf16"] == pytest.approx(norms[mode, "fp32"], rel=0.01)
    assert held["lora", "bf16"] < 0.6 * held["lora", "fp32"], "the frozen base in 16 bits"
    for row in (r for r in updates if r["fused"]):
        shared, padded = row["updates"]
        assert (shared["forward"], padded["forward"]) == ("shared", "padded")
        assert (
            0 < shared["tokens"] < padded["tokens"]
            and shared["seconds"]["median"] > 0
            and shared["mfu"] is None
        )
    cached = next(r for r in found["rows"] if r["part"] == "cache")["seconds"]
    assert set(cached) == {"none", "pixels", "features"}
    assert (recorded.read_bytes() if recorded.exists() else None) == before


def test_without_a_gpu_it_says_what_it_needs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["bench_gpu"])
    assert bench_gpu.main() == 2
    said = capsys.readouterr().err
    assert "needs an NVIDIA GPU that torch can use" in said and "--smoke --out FILE" in said
    monkeypatch.setattr(sys, "argv", ["bench_gpu", "--smoke"])
    with pytest.raises(SystemExit):
        bench_gpu.main()
    assert "--smoke needs --out" in capsys.readouterr().err


@pytest.mark.slow
def test_running_out_of_memory_is_a_row() -> None:
    row: dict[str, object] = {"forward": "padded"}
    with guarded(Setting("smoke", device="cpu"), row):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore")
    assert row == {
        "forward": "padded",
        "out_of_memory": "CUDA out of memory. Tried to allocate 2.00 GiB.",
    }


@pytest.mark.slow
def test_a_measurement_that_crashes_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(module: str, arguments: object, *, timeout: float) -> dict[str, object]:
        raise RuntimeError("ended with status -9:\nkilled")

    monkeypatch.setattr(bench_gpu.bench, "run_child", crash)
    small = Setting("Qwen2.5-VL-3B-Instruct", mode="lora")
    rows = bench_gpu.measure(
        [("rollout", small), ("update", Setting("Qwen2.5-VL-72B-Instruct"))], 79.0, None, 1.0
    )
    assert rows[0]["failed"].endswith("killed") and rows[0]["shape"] == small.shape
    assert rows[1]["does_not_fit"]["estimate_gib"] > 500, "not even tried"


@pytest.mark.slow
def test_flops_count_each_prompt_once_where_it_is_shared() -> None:
    config = shape_config("Qwen2.5-VL-3B-Instruct")
    layers = sum(p.numel() for p in meta_model(config).model.language_model.layers.parameters())
    one = {"completion": 1, "groups": 1, "prompt": 1}
    single = update_flops(config, group_size=1, mode="full", shared=True, **one)
    head, pairs = 151936 * 2048, 1 + 2
    assert single == 6 * (2 * layers + head) + 12 * 16 * 128 * 36 * pairs
    assert single == update_flops(config, group_size=1, mode="full", shared=False, **one)
    shared, padded = (
        update_flops(
            config, prompt=1280, completion=128, group_size=8, groups=2, mode="lora", shared=s
        )
        for s in (True, False)
    )
    assert 3.5 < padded / shared < 8 * (1280 + 128) / (1280 + 8 * 128), (
        "at most the ratio of tokens; the output layer is the same"
    )


def test_the_plan_gives_the_measured_seconds_again() -> None:
    """Rows with the seconds that scripts/plan_scale.py plans from known shares lead back to those shares."""
    r = dataclasses.replace(plan_scale.recipes()[0], prompt=1400, new=256)  # 128 tokens in the mean
    setting = Setting("", groups=8, group_size=8, new_tokens=128)
    c = {
        "peak": 989e12,
        "hbm": 3.35e12,
        "update_share": 0.3,
        "prefill_share": 0.2,
        "decode_share": 0.5,
        "attempts": 1.0,
    }
    full = plan_scale._update_s(r, c, 8)["update"]
    lora = dataclasses.replace(r, config=run_of(Setting(r.shape.name, mode="lora")))
    first = plan_scale._rollout_s(r, c, 8)["prefill"]
    step = plan_scale.decode_bytes(r.shape, 64, 1400 + 64) / (3.35e12 * 0.5)

    def updates(mode: str, attn: str, seconds: float) -> dict[str, object]:
        found = [
            {"forward": "padded", "seconds": {"median": 99.0}},
            {"forward": "shared", "seconds": {"median": seconds}},
        ]
        return {
            "part": "update",
            "shape": r.shape.name,
            "mode": mode,
            "attn": attn,
            "prompt_tokens": 1400,
            "updates": found,
        }

    def generated(part: str) -> dict[str, object]:
        return {
            "part": part,
            "shape": r.shape.name,
            "mode": "lora",
            "attn": "sdpa",
            "prompt_tokens": 1400,
            "seconds": {"median": first + 127 * step},
            "first_seconds": {"median": first},
        }

    by_lora = updates(
        "lora", "sdpa", plan_scale._update_s(lora, {**c, "update_share": 0.25}, 8)["update"]
    )
    rows = [
        by_lora,
        updates("full", "sdpa", full / 2),
        updates("full", "flex", full),
        generated("rollout"),
        generated("vllm"),
        {
            "part": "update",
            "shape": "Qwen2.5-VL-72B-Instruct",
            "mode": "full",
            "attn": "sdpa",
            "does_not_fit": {},
        },
    ]
    found = plan_shares(rows, setting, 989.0, 3.35)
    assert set(found) == {r.shape.name} and found[r.shape.name].pop("update_of") == "full flex"
    assert found[r.shape.name] == {
        "update_share": pytest.approx(0.3, rel=0.01),
        "prefill_share": pytest.approx(0.2, rel=0.01),
        "decode_share": pytest.approx(0.5, rel=0.01),
    }
    assert plan_shares([by_lora], setting, 989.0, None)[r.shape.name][
        "update_share"
    ] == pytest.approx(0.25, rel=0.01)
    assert plan_shares(rows, setting, None, None) == {}


@pytest.mark.slow
def test_what_is_measured_reaches_the_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """main writes the section that plan_scale reads."""

    def measured(module: str, arguments: list[str], *, timeout: float = 0) -> dict[str, object]:
        if arguments[1] == "gpu":
            return {"name": "NVIDIA H100 80GB HBM3", "memory_gib": 79.0}
        return {
            "prompt_tokens": 1400,
            "updates": [
                {
                    "forward": "shared",
                    "seconds": {"median": 1.5},
                    "tflops": 300.0,
                    "completion_tokens_per_s": 1.0,
                }
            ],
        }

    out = tmp_path / "assets" / "results" / "bench_gpu.json"
    out.parent.mkdir(parents=True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    # main sets it: here it must not stay
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    monkeypatch.setattr(bench_gpu.bench, "run_child", measured)
    monkeypatch.setattr(
        sys,
        "argv",
        [
            "bench_gpu",
            "--shapes",
            "Qwen2.5-VL-3B-Instruct",
            "--attn",
            "sdpa",
            "--parts",
            "update",
            "--out",
            str(out),
        ],
    )
    assert bench_gpu.main() == 0
    monkeypatch.setattr(plan_scale, "REPO", tmp_path)
    shares = plan_scale.measured_gpu()["Qwen2.5-VL-3B-Instruct"]
    assert set(shares) == {"update_share"} and 0.2 < shares["update_share"] < 1
    assert plan_scale._constants("Qwen2.5-VL-3B-Instruct")["update_share"] == shares["update_share"]


def test_gpus_and_settings() -> None:
    assert peak_tflops("NVIDIA H100 80GB HBM3") == 989 and peak_tflops("NVIDIA H100 PCIe") == 756
    assert (
        peak_tflops("NVIDIA A100-SXM4-80GB") == 312
        and peak_tflops("NVIDIA A10") == 125
        and peak_tflops("Quadro K620") is None
    )
    assert (
        memory_tb_s("NVIDIA H100 80GB HBM3") == 3.35
        and memory_tb_s("NVIDIA L4") == 0.3
        and memory_tb_s("GH200 480GB") is None
    )
    run = run_of(Setting("Qwen2.5-VL-3B-Instruct", mode="lora", attn="flex"))
    assert run.model.lora is not None and run.model.attn == "flex" and run.model.dtype == "bf16"
    work = bench_gpu.plan(["a", "b"], ["sdpa", "flex"], ["update", "rollout"], Setting(""))
    assert [(p, s.shape, s.mode, s.attn, s.fused) for p, s in work[:8]] == [
        ("update", "a", "lora", "sdpa", True),
        ("update", "a", "lora", "flex", True),
        ("update", "a", "lora", "sdpa", False),
        ("rollout", "a", "lora", "sdpa", True),
        ("update", "a", "full", "sdpa", True),
        ("update", "a", "full", "flex", True),
        ("update", "a", "full", "sdpa", False),
        ("rollout", "a", "full", "sdpa", True),
    ]
