"""AdamW with and without torch's fused kernel, and what a step leaves in memory."""

from __future__ import annotations

import copy

import pytest
import torch

from mmrl.config import OptimConfig
from mmrl.training.optim import build_optimizer, load_adamw, take_step

CONFIG = OptimConfig(lr=0.01, weight_decay=0.1)


def steps_of(fused: bool | None, count: int = 3) -> tuple[torch.nn.Module, torch.optim.AdamW]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.Linear(5, 3))
    named = list(model.named_parameters())
    optimizer = build_optimizer(named, CONFIG.model_copy(update={"fused": fused}))
    for update in range(count):
        model(torch.ones(2, 7) * (update + 1)).square().sum().backward()
        take_step(optimizer, named, CONFIG, 2.0, update, 10, str)
        assert all(p.grad is None for p in model.parameters()), "rollouts need their memory"
    return model, optimizer


def test_the_fused_kernel_takes_the_same_steps() -> None:
    (plain, _), (fused, optimizer) = steps_of(None), steps_of(True)
    assert all(group["fused"] for group in optimizer.param_groups)
    for a, b in zip(plain.parameters(), fused.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("fused", [True, None])
def test_a_state_of_the_other_kernel_is_continued_with_ones_own(fused: bool | None) -> None:
    model, theirs = steps_of(None if fused else True)
    named = [(n, torch.nn.Parameter(p.detach().clone())) for n, p in model.named_parameters()]
    ours = build_optimizer(named, CONFIG.model_copy(update={"fused": fused}))
    load_adamw(ours, copy.deepcopy(theirs.state_dict()))
    assert {group["fused"] for group in ours.param_groups} == {fused}
    for optimizer, parameters in (
        (theirs, list(model.parameters())),
        (ours, [p for _, p in named]),
    ):
        for parameter in parameters:
            parameter.grad = parameter.detach().sin()
        optimizer.step()
    for a, (_, b) in zip(model.parameters(), named, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("fused", [True, None])
def test_a_state_from_another_device_lies_where_the_kernel_reads_it(fused: bool | None) -> None:
    """The fused kernel reads `step` on the parameters' device; a CPU run's state has it in host memory."""
    _model, theirs = steps_of(None)
    shape = next(iter(theirs.state))
    other = torch.nn.Parameter(torch.empty_like(shape, device="meta"))
    alone = torch.optim.AdamW([torch.nn.Parameter(shape.detach().clone())])
    alone.param_groups[0]["params"][0].grad = torch.ones_like(shape)
    alone.step()
    ours = torch.optim.AdamW([other], fused=fused)
    load_adamw(ours, copy.deepcopy(alone.state_dict()))
    assert ours.state[other]["exp_avg"].device.type == "meta"
    assert ours.state[other]["step"].device.type == ("meta" if fused else "cpu")
