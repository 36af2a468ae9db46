"""FLOPs that scripts/bench_efficiency.py counts: of every product that mmrl or TRL multiplies by on a CPU, by arithmetic."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from scripts._efficiency import counted_anew, flop_counter

M, K, N = 3, 5, 7
A, B, C = torch.ones(M, K), torch.ones(K, N), torch.zeros(M, N)
PRODUCTS: dict[str, Callable[[], object]] = {
    "mm": lambda: A @ B,
    "mm, out": lambda: torch.mm(A, B, out=C),
    "addmm": lambda: torch.addmm(C, A, B),
    "addmm in place": lambda: C.clone().addmm_(A, B),
    "bmm": lambda: torch.bmm(A[None], B[None]),
    "linear": lambda: torch.nn.functional.linear(A, B.t(), torch.zeros(N)),
    "oneDNN": lambda: torch.ops.mkldnn._linear_pointwise(
        A, B.t().contiguous(), None, "none", [], ""
    ),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_product_counts_a_multiplication_and_an_addition_per_number(name: str) -> None:
    with flop_counter() as counter:
        PRODUCTS[name]()
    assert counter.get_total_flops() == 2 * M * K * N


@pytest.mark.parametrize("causal", [False, True])
def test_attention_counts_both_products_and_five_when_it_is_differentiated(causal: bool) -> None:
    q, k, v = (torch.randn(1, 2, 8, 16, requires_grad=True) for _ in range(3))
    with flop_counter() as counter:
        torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal).sum().backward()
    product = 2 * 2 * 8 * 8 * 16
    assert counter.get_total_flops() == (2 + 5) * product


def test_a_row_counted_anew_keeps_its_seconds() -> None:
    phase = {
        "seconds": 10.0,
        "tflop": 0.1,
        "efficiency": 0.1,
        "matrix_share": 0.5,
        "operations": {"aten::mm": 0.5, "aten::addmm_": 0.25, "aten::mul": 0.25},
    }
    row = {"peak_gflops": 100.0, "step_s": 11.0, "phases": {"update": phase}, "peak_mib": 5}
    found = counted_anew(row, {"update": 0.5})
    assert found == {
        **row,
        "phases": {
            "update": {**phase, "tflop": 0.5, "efficiency": 0.5, "matrix_share": 0.75},
        },
    }
