"""Whatever a run hands to its model and its rollout engines is where it has to be, on a device that is not the CPU."""

from __future__ import annotations

import sys

import pytest

from tests.kits.engine_kit import ARCHITECTURES
from tests.kits.prepared_kit import SERVING, run_prepared
from tests.policy.device_worker import CASES, HANDOVERS

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def told() -> tuple[list[str], str]:
    """What a process of its own says of each case, and its errors: a device once registered with torch stays known to everything in
    a process."""
    command = [
        sys.executable,
        "-m",
        "tests.policy.device_worker",
        "qwen2_vl",
        "qwen3_vl",
        "qwen2_5_vl+vllm",
    ]
    done = run_prepared(command, modules=SERVING, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    return [
        line for line in done.stdout.splitlines() if line.startswith(("ok ", "failed "))
    ], done.stderr[-3000:]


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_run_on_another_device_samples_scores_and_learns(
    arch: str, told: tuple[list[str], str]
) -> None:
    """Of qwen2_5_vl with frozen towers also with vLLM."""
    lines, errors = told
    answered = arch == "qwen2_5_vl"
    assert [line for line in lines if f" {arch}-" in line] == [
        f"ok {arch}-{dtype}-{parts} {what}"
        for family, dtype, parts in CASES
        if family == arch
        for what in HANDOVERS
        if what != "vllm" or (answered and parts == "frozen")
    ], (lines, errors)


def test_the_device_refuses_tensors_of_the_cpu() -> None:
    code = (
        "import torch\nfrom tests.policy.fake_device import toy_device\n"
        "with toy_device() as device:\n"
        "    layer = torch.nn.Linear(3, 4).to(device)\n"
        "    with torch.autocast(device.type, torch.bfloat16):\n"
        "        assert layer(torch.ones(2, 3, device=device)).dtype == torch.bfloat16\n"
        "    try:\n        layer(torch.ones(2, 3))\n"
        "    except RuntimeError as error:\n        print(error)\n"
    )
    done = run_prepared([sys.executable, "-c", code], modules=SERVING)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "found at least two devices, toy:0 and cpu" in done.stdout
