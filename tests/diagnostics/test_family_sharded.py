"""Every family under FSDP2 in two processes (gloo), beside transformers in one; one launch for all of them."""

from __future__ import annotations

import pytest
import torch

from mmrl.diagnostics._family_sharded import compare_sharded
from mmrl.diagnostics._family_subject import Subject
from mmrl.diagnostics.families import check_family, model_of
from mmrl.policy.families import all_variants
from tests.kits.prepared_kit import launch_prepared

NAMES = all_variants()


@pytest.fixture(scope="module")
def subjects(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Subject]:
    """What two processes found for each family's model, beside it."""
    out, found = tmp_path_factory.mktemp("two"), {}
    for name in NAMES:
        family, path = model_of(name, tmp_path_factory.mktemp("model"))
        found[name] = Subject(family, path, out)
    program = "mmrl.diagnostics._family_sharded"
    paths = [s.path for s in found.values()]
    status, said = launch_prepared(program, str(out), *paths, timeout=1200)
    assert status == 0, said
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_two_processes_compute_what_transformers_does_in_one(
    name: str, subjects: dict[str, Subject]
) -> None:
    s = subjects[name]
    found = torch.load(s.folder / f"{NAMES.index(name)}.pt")
    assert "gradients" in compare_sharded(s, found)
    # a gradient of one process alone is not taken for the sum
    for of_case in found.values():
        first = next(n for n, g in of_case["gradients"].items() if g.any())
        of_case["gradients"][first] = of_case["gradients"][first] * 2
    with pytest.raises(AssertionError, match="apart"):
        compare_sharded(s, found)


@pytest.mark.slow
def test_the_check_starts_both_processes() -> None:
    (cell,) = check_family("smolvlm", ["sharded"])
    assert cell.verdict == "ok", cell.found
    assert "all trained: gradients" in cell.found and "towers frozen: gradients" in cell.found
