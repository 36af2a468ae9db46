"""Matrix products on the CPU give a row the same bits whatever stands beside it, which every bit-for-bit promise rests on.

Run in a process of its own: MKL decides at its first product, which another test may have made.
"""

from __future__ import annotations

import copy
import os
import subprocess
import sys

import pytest
import torch

from mmrl.policy import batch_invariance
from mmrl.policy.batch_invariance import (
    BatchInvariantDecodeLinear,
    BatchInvariantLinear,
    DecodeLinear,
    decoding,
)
from tests.kits.engine_kit import REPO, fresh_policy

PROGRAM = """
import mmrl
import torch
from mmrl.policy.batch_invariance import make_batch_invariant
torch.set_num_threads(1)
torch.manual_seed(0)
different = []
for inner in (16, 64, 128, 300):
    for outer in (32, 128, 512):
        layer = torch.nn.Sequential(torch.nn.Linear(inner, outer))
        make_batch_invariant(layer, torch.device("cpu"))
        for tokens in (1, 2, 8, 23, 40, 77):  # of one request
            rows = torch.randn(4 * tokens, inner)
            together = layer(rows)
            for requests in (1, 2, 3):
                part = layer(rows[:requests * tokens].clone())
                if not torch.equal(part, together[:requests * tokens]):
                    different.append((inner, outer, tokens, requests))
print(len(different), different[:5])
"""


@pytest.mark.slow
@pytest.mark.parametrize("capability", ["", "avx2"])
def test_a_row_of_a_product_does_not_depend_on_the_rows_beside_it(capability: str) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "MKL_CBWR"} | {
        "PYTHONPATH": str(REPO),
        "OMP_NUM_THREADS": "1",
    }
    if capability:
        environment["ATEN_CPU_CAPABILITY"] = capability
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.stdout.startswith("0 []"), done.stdout + done.stderr


@pytest.mark.parametrize(
    "shape", [(1, 6), (2, 6), (3, 6), (1, 3, 6), (4, 6), (2, 5, 6), (0, 6), (6,)]
)
def test_a_batch_invariant_layer_is_a_linear_layer(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    layer, given = torch.nn.Linear(6, 5), torch.randn(shape, requires_grad=True)
    invariant = copy.deepcopy(layer)
    invariant.__class__ = BatchInvariantLinear
    found, expected = invariant(given), layer(given)
    assert found.shape == expected.shape
    torch.testing.assert_close(found, expected)
    grads = [
        torch.autograd.grad(out.square().sum(), (given, *module.parameters()))
        for out, module in ((found, invariant), (expected, layer))
    ]
    torch.testing.assert_close(*grads)


def test_a_policy_on_a_cpu_that_needs_it_is_batch_invariant(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for needed in (True, False):
        monkeypatch.setattr(
            batch_invariance, "needs_batch_invariance", lambda needed=needed: needed
        )
        kinds = {type(m) for m in fresh_policy().model.modules() if isinstance(m, torch.nn.Linear)}
        assert kinds == {BatchInvariantLinear if needed else torch.nn.Linear}
    monkeypatch.setattr(batch_invariance, "needs_batch_invariance", lambda: True)
    layer = torch.nn.Linear(2, 2)
    batch_invariance.make_batch_invariant(layer, torch.device("cuda"))
    assert type(layer) is torch.nn.Linear


def test_a_setting_of_the_users_own_stays() -> None:
    program = "import os, mmrl; print(os.environ['MKL_CBWR'])"
    environment = {**os.environ, "PYTHONPATH": str(REPO), "MKL_CBWR": "COMPATIBLE"}
    assert (
        subprocess.run(
            [sys.executable, "-c", program],
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
        ).stdout.strip()
        == "COMPATIBLE"
    )


@pytest.mark.parametrize("needed", [False, True], ids=["invariant", "padded"])
@pytest.mark.parametrize("bias", [False, True])
def test_large_layers_of_a_few_rows_are_multiplied_by_onednn_where_a_row_keeps_its_numbers(
    bias: bool, needed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_invariance, "needs_batch_invariance", lambda: needed)
    kinds = (
        (BatchInvariantDecodeLinear, BatchInvariantLinear)
        if needed
        else (DecodeLinear, torch.nn.Linear)
    )
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(1024, 2048, bias=bias), torch.nn.Linear(2048, 16, bias=bias)
    )
    plain, rows = copy.deepcopy(model), torch.randn(40, 1, 1024)
    batch_invariance.make_batch_invariant(model, torch.device("cpu"))
    if not batch_invariance._onednn_is_invariant():
        assert [type(layer) for layer in model] == [kinds[1]] * 2
        return
    assert [type(layer) for layer in model] == list(kinds)
    with torch.no_grad():
        assert torch.equal(model(rows), plain(rows)), "a prompt, or an update"
        padded = torch.cat([rows[:2], torch.zeros(2, 1, 1024)])
        assert torch.equal(model(rows[:2]), plain(padded)[:2] if needed else plain(rows[:2]))
        with decoding():
            together = model[0](rows)
            exact = torch.nn.functional.linear(
                rows.double(),
                plain[0].weight.double(),
                None if not bias else plain[0].bias.double(),
            )
            assert (together - exact).abs().max() < 1e-5 * exact.abs().max()
            for n in (1, 2, 3, 5, 8, 17, 32):
                assert torch.equal(model[0](rows[:n].clone()), together[:n])
            half = torch.nn.Linear(1024, 2048).bfloat16()
            half.__class__ = kinds[0]
            assert half(rows.bfloat16()).dtype == torch.bfloat16
