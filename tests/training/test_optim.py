"""AdamW with and without torch's fused kernel, and what a step leaves in memory."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from mmrl.config import OptimConfig, RunConfig
from mmrl.training.optim import adamw_state, build_optimizer, load_adamw, take_step

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


WIDE = 128


def eight_bits(seed: int = 0) -> tuple[list[tuple[str, torch.nn.Parameter]], torch.optim.Optimizer]:
    generator = torch.Generator().manual_seed(seed)
    named = [
        ("matrix", torch.nn.Parameter(torch.randn(WIDE, WIDE, generator=generator))),
        ("vector", torch.nn.Parameter(torch.randn(WIDE, generator=generator))),
    ]
    return named, build_optimizer(named, CONFIG.model_copy(update={"states": "int8"}))


def steps(
    named: list[tuple[str, torch.nn.Parameter]], optimizer: torch.optim.Optimizer, updates: range
) -> None:
    for update in updates:
        generator = torch.Generator().manual_seed(update)
        for _, parameter in named:
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.grad = parameter.detach() + 0.3 * noise
        take_step(optimizer, named, CONFIG, 1.0, update, 100, str)


def test_moments_of_8_bits_take_nearly_the_steps_of_fp32() -> None:
    named, optimizer = eight_bits()
    plain = [(name, torch.nn.Parameter(p.detach().clone())) for name, p in named]
    start = named[0][1].detach().clone()
    steps(named, optimizer, range(30))
    steps(plain, build_optimizer(plain, CONFIG), range(30))
    apart, moved = (named[0][1] - plain[0][1]).norm(), (plain[0][1] - start).norm()
    assert 0 < apart < 0.05 * moved
    torch.testing.assert_close(named[1][1], plain[1][1], rtol=1e-4, atol=1e-5)
    moments = optimizer.state[named[0][1]]
    assert moments["exp_avg"].codes.nbytes == WIDE * WIDE, "one byte per number"


@pytest.mark.parametrize(("size", "most"), [(1e-3, 1.01), (1e-6, 1.05)])
def test_steps_of_tiny_gradients_are_a_little_longer(size: float, most: float) -> None:
    """torchao takes no scale below 1e-12, which squares of such gradients reach."""
    named, optimizer = eight_bits()
    plain = [(name, torch.nn.Parameter(p.detach().clone())) for name, p in named]
    start = named[0][1].detach().clone()
    for these, theirs in ((named, optimizer), (plain, build_optimizer(plain, CONFIG))):
        for update in range(20):
            generator = torch.Generator().manual_seed(update)
            for _, parameter in these:
                parameter.grad = size * torch.randn(parameter.shape, generator=generator)
            take_step(theirs, these, CONFIG, 1.0, update, 100, str)
    moved, expected = ((n[0][1] - start).norm() for n in (named, plain))
    assert 0.99 * expected < moved < most * expected


def test_moments_of_8_bits_go_on_bit_for_bit_from_a_file_and_under_other_optimizers(
    tmp_path: Path,
) -> None:
    straight, optimizer = eight_bits()
    steps(straight, optimizer, range(3))
    torch.save(adamw_state(optimizer), tmp_path / "optimizer.pt")
    kept = [p.detach().clone() for _, p in straight]
    steps(straight, optimizer, range(3, 6))
    state = torch.load(tmp_path / "optimizer.pt", weights_only=True)
    again, other = eight_bits(1)
    for (_, parameter), old in zip(again, kept, strict=True):
        parameter.data = old.clone()
    # by way of moments in fp32
    plain = build_optimizer(again, CONFIG)
    load_adamw(plain, state)
    assert all(type(v) is torch.Tensor for e in plain.state.values() for v in e.values())
    load_adamw(other, adamw_state(plain))
    steps(again, other, range(3, 6))
    assert all(torch.equal(a[1], b[1]) for a, b in zip(straight, again, strict=True))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"optim": {"states": "int8", "fused": True}}, "optim.fused true"),
        (
            {"optim": {"states": "int8"}, "engine": {"train": "deepspeed_zero2"}},
            "found deepspeed_zero2",
        ),
    ],
)
def test_what_moments_of_8_bits_do_not_go_with(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        RunConfig.model_validate(settings)
