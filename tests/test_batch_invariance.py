"""Matrix products on the CPU give a row the same bits whatever stands beside it, which every bit-for-bit promise rests on.

Run in a process of its own: MKL decides at its first product, which another test may have made.
"""
from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.engine_kit import REPO

PROGRAM = """
import mmrl
import torch
torch.set_num_threads(1)
torch.manual_seed(0)
different = []
for inner in (16, 64, 128, 300):
    for outer in (32, 128, 512):
        weight, bias = torch.randn(outer, inner), torch.randn(outer)
        for tokens in (1, 8, 23, 40, 77):  # of one request
            rows = torch.randn(4 * tokens, inner)
            together = torch.nn.functional.linear(rows, weight, bias)
            for requests in (1, 2, 3):
                part = torch.nn.functional.linear(rows[:requests * tokens].clone(), weight, bias)
                if not torch.equal(part, together[:requests * tokens]):
                    different.append((inner, outer, tokens, requests))
print(len(different), different[:5])
"""


@pytest.mark.parametrize("capability", ["", "avx2"])
def test_a_row_of_a_product_does_not_depend_on_the_rows_beside_it(capability: str) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "MKL_CBWR"} | {"PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1"}
    if capability:
        environment["ATEN_CPU_CAPABILITY"] = capability
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=300)
    assert done.stdout.startswith("0 []"), done.stdout + done.stderr


def test_a_setting_of_the_users_own_stays() -> None:
    program = "import os, mmrl; print(os.environ['MKL_CBWR'])"
    environment = {**os.environ, "PYTHONPATH": str(REPO), "MKL_CBWR": "COMPATIBLE"}
    assert subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True,
                          timeout=120).stdout.strip() == "COMPATIBLE"
