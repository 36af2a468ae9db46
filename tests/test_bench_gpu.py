"""scripts/bench_gpu.py where there is no GPU: its whole path on a tiny model, what it says, and how it records what fails."""
from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from mmrl.shapes import meta_model, shape_config
from scripts import bench_gpu
from scripts._gpu_kit import Setting, peak_tflops, run_of, update_flops
from scripts._gpu_work import guarded
from tests.engine_kit import REPO


@pytest.mark.slow
def test_smoke_runs_every_part_and_writes_to_its_own_file_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = REPO / "assets" / "results" / "bench_gpu.json"
    before = recorded.read_bytes() if recorded.exists() else None
    monkeypatch.setattr(sys, "argv", ["bench_gpu", "--smoke", "--out", str(tmp_path / "smoke.json")])
    assert bench_gpu.main() == 0
    found = json.loads((tmp_path / "smoke.json").read_text())
    assert found["smoke"] is True and {r["part"] for r in found["rows"]} == {"update", "rollout", "cache"}
    for row in (r for r in found["rows"] if r["part"] == "update"):
        shared, padded = row["updates"]
        assert (shared["forward"], padded["forward"]) == ("shared", "padded")
        assert 0 < shared["tokens"] < padded["tokens"] and shared["seconds"]["median"] > 0 and shared["mfu"] is None
    cached = next(r for r in found["rows"] if r["part"] == "cache")["seconds"]
    assert set(cached) == {"none", "pixels", "features"}
    assert (recorded.read_bytes() if recorded.exists() else None) == before


def test_without_a_gpu_it_says_what_it_needs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["bench_gpu"])
    assert bench_gpu.main() == 2
    said = capsys.readouterr().err
    assert "needs an NVIDIA GPU that torch can use" in said and "--smoke --out FILE" in said
    monkeypatch.setattr(sys, "argv", ["bench_gpu", "--smoke"])
    with pytest.raises(SystemExit):
        bench_gpu.main()
    assert "--smoke needs --out" in capsys.readouterr().err


def test_running_out_of_memory_is_a_row() -> None:
    row: dict[str, object] = {"forward": "padded"}
    with guarded(Setting("smoke", device="cpu"), row):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore")
    assert row == {"forward": "padded", "out_of_memory": "CUDA out of memory. Tried to allocate 2.00 GiB."}


def test_a_measurement_that_crashes_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(module: str, arguments: object, *, timeout: float) -> dict[str, object]:
        raise RuntimeError("ended with status -9:\nkilled")

    monkeypatch.setattr(bench_gpu.bench, "run_child", crash)
    small = Setting("Qwen2.5-VL-3B-Instruct", mode="lora")
    rows = bench_gpu.measure([("rollout", small), ("update", Setting("Qwen2.5-VL-72B-Instruct"))], 79.0, None, 1.0)
    assert rows[0]["failed"].endswith("killed") and rows[0]["shape"] == small.shape
    assert rows[1]["does_not_fit"]["estimate_gib"] > 500, "not even tried"


def test_flops_count_each_prompt_once_where_it_is_shared() -> None:
    config = shape_config("Qwen2.5-VL-3B-Instruct")
    layers = sum(p.numel() for p in meta_model(config).model.language_model.layers.parameters())
    one = {"completion": 1, "groups": 1, "prompt": 1}
    single = update_flops(config, group_size=1, mode="full", shared=True, **one)
    head, pairs = 151936 * 2048, 1 + 2
    assert single == 6 * (2 * layers + head) + 12 * 16 * 128 * 36 * pairs
    assert single == update_flops(config, group_size=1, mode="full", shared=False, **one)
    shared, padded = (update_flops(config, prompt=1280, completion=128, group_size=8, groups=2, mode="lora", shared=s)
                      for s in (True, False))
    assert 3.5 < padded / shared < 8 * (1280 + 128) / (1280 + 8 * 128), "at most the ratio of tokens; the output layer is the same"


def test_gpus_and_settings() -> None:
    assert peak_tflops("NVIDIA H100 80GB HBM3") == 989 and peak_tflops("NVIDIA H100 PCIe") == 756
    assert peak_tflops("NVIDIA A100-SXM4-80GB") == 312 and peak_tflops("NVIDIA A10") == 125 and peak_tflops("Quadro K620") is None
    run = run_of(Setting("Qwen2.5-VL-3B-Instruct", mode="lora", attn="flex"))
    assert run.model.lora is not None and run.model.attn == "flex" and run.model.dtype == "bf16"
    work = bench_gpu.plan(["a", "b"], ["sdpa", "flex"], ["update", "rollout"], Setting(""))
    assert [(p, s.shape, s.mode, s.attn) for p, s in work[:5]] == [
        ("update", "a", "lora", "sdpa"), ("update", "a", "lora", "flex"), ("update", "a", "full", "sdpa"),
        ("update", "a", "full", "flex"), ("rollout", "a", "lora", "sdpa")]
