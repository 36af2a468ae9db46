"""Collective forwards: one run of a trained vision tower per micro-batch, idle micro-batches, engines that do not go together."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from mmrl.algorithms.offpolicy import OffPolicy
from mmrl.config import load_config
from mmrl.distributed.engines import accelerator_options, train_engine_name
from mmrl.distributed.engines.lockstep import agree
from mmrl.distributed.world import World
from mmrl.errors import ConfigError
from mmrl.policy.pack import PackItem, idle_item, pack
from mmrl.policy.policy import Policy
from mmrl.training import optimizer_steps
from mmrl.training.trainer import Trainer
from tests.kits.clip_kit import TASK, clip, policy_of, sample
from tests.kits.engine_kit import (
    ARCHITECTURES,
    ENVIRONMENT,
    REPO,
    album_data,
    config_file,
    picture,
    small_run,
    weights_of,
)


class OneOfTwo(World):
    """A process whose neighbour says `other`."""

    size = 2  # type: ignore[assignment]

    def __init__(self, other: Any, heard: list[Any] | None = None) -> None:
        super().__init__(torch.device("cpu"))
        self.other, self.heard = other, [] if heard is None else heard

    def gather(self, items: list[Any]) -> list[Any]:
        self.heard += items
        return [*items, self.other]


def test_processes_agree_on_the_largest_number_and_the_sum_of_denominators() -> None:
    assert agree(OneOfTwo((5, 40.0)), 2, 10.0) == (5, 50.0)
    assert agree(OneOfTwo((0, 0.0)), 2, 10.0) == (2, 10.0)
    assert agree(World(torch.device("cpu")), 3, 7.0) == (3, 7.0)


def gradients(
    policy: Policy, items: list[PackItem]
) -> tuple[torch.Tensor, dict[str, torch.Tensor | None]]:
    """Log-probs and the gradient of their sum, by name."""
    policy.model.zero_grad(set_to_none=True)
    logp_N = policy.logp(pack(items)).logp_N
    logp_N.sum().backward()
    return logp_N.detach(), {name: p.grad for name, p in policy.trainable()}


def calls(policy: Policy) -> list[int]:
    """Grows by the number of patches each time the tower runs."""
    seen: list[int] = []
    policy.base.model.visual.register_forward_pre_hook(
        lambda module, args: seen.append(len(args[0]))
    )
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_trained_tower_runs_once_whatever_the_texts_hold(arch: str, tmp_path: Path) -> None:
    policy = policy_of(arch)
    seen = calls(policy)
    answers = ((5, 9, 7), (8, 6))
    mixed = [
        PackItem(policy.encoder(s, TASK), answers)
        for s in (
            sample((clip(tmp_path),), (picture((56, 56)),), 1),
            sample(number=2),
            sample((), (picture((84, 112)),), 3),
        )
    ]
    logp_N, gradient = gradients(policy, mixed)
    assert len(seen) == 2, "transformers runs it for pictures and for clips"
    policy.lockstep = True
    again_N, gradient_again = gradients(policy, mixed)
    assert len(seen) == 3 and seen[2] == seen[0] + seen[1]
    torch.testing.assert_close(again_N, logp_N, rtol=1e-5, atol=1e-5)
    for name, g in gradient.items():
        assert g is not None and gradient_again[name] is not None, name
        assert (gradient_again[name] - g).norm() <= 1e-4 * g.norm() + 1e-6, name


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_text_alone_runs_the_tower_for_nothing(arch: str) -> None:
    policy = policy_of(arch)
    text = [
        PackItem(policy.encoder(sample(number=2), TASK), ((5, 9, 7),)),
        idle_item(policy.eos_ids[0]),
    ]
    logp_N, gradient = gradients(policy, text)
    assert any(g is None for g in gradient.values()), "nobody asks for the tower"
    policy.lockstep = True
    seen = calls(policy)
    again_N, gradient_again = gradients(policy, text)
    assert len(seen) == 1 and torch.equal(again_N, logp_N)
    for name, g in gradient_again.items():
        assert g is not None, f"{name} would be missing where another process has it"
        assert torch.equal(g, torch.zeros_like(g) if gradient[name] is None else gradient[name]), (
            name
        )


@pytest.mark.slow
@pytest.mark.parametrize("kl", [0.0, 0.05])
def test_idle_micro_batches_change_nothing(
    kl: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if another process had three more micro-batches in every optimizer step."""
    data = album_data(tmp_path / "data", [[picture((56, 56), i)] * (i % 2) for i in range(6)])
    path = config_file(
        tmp_path / "c.yaml",
        small_run(tmp_path / "runs", data, algorithm={"kl": {"coef": kl}, "minibatches": 2}),
    )
    plain = Trainer(load_config(path))
    plain.fit()
    idle = Trainer(load_config(path, ["name=idle"]))
    idle.training.lockstep = idle.policy.lockstep = True
    ran: list[int] = []
    monkeypatch.setattr(
        optimizer_steps,
        "agree",
        lambda world, count, share: ran.append(count) or (count + 3, share),
    )
    idle.fit()
    assert len(ran) == 4, "two steps of two minibatches"
    ours, theirs = (dict(weights_of(t.checkpoints.path(2))) for t in (plain, idle))
    start = dict(weights_of(Path(plain.config.model.path)))
    moved, apart = (
        torch.stack([(ours[n] - other[n]).norm() for n in ours]).norm() for other in (start, theirs)
    )
    assert moved > 0 and apart < 1e-3 * moved, (float(apart), float(moved))


@pytest.mark.parametrize(
    ("overrides", "processes", "expected"),
    [
        ([], 1, "single"),
        ([], 2, "ddp"),
        (["engine.train=single"], 1, "single"),
        (["engine.train=fsdp2"], 1, "fsdp2"),
        (["engine.train=ddp"], 1, "ddp"),
        (["schedule.kind=pipelined"], 1, "single"),
    ],
)
def test_the_engine_of_a_run(overrides: list[str], processes: int, expected: str) -> None:
    assert train_engine_name(load_config(None, overrides), processes) == expected


@pytest.mark.parametrize(
    ("overrides", "processes", "said"),
    [
        (["engine.train=single"], 2, r"run of 2 processes, found single; set engine\.train: auto"),
        (
            ["schedule.kind=pipelined"],
            2,
            r"schedule\.kind serial in a run of 2 processes, found pipelined",
        ),
        (
            ["schedule.kind=async", "engine.train=fsdp2"],
            1,
            r"schedule\.kind serial with engine\.train fsdp2, found async",
        ),
    ],
)
def test_what_does_not_go_together_is_said(overrides: list[str], processes: int, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        train_engine_name(load_config(None, overrides), processes)


def test_a_launcher_told_of_another_engine_is_contradicted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    assert accelerator_options(load_config(None, ["engine.train=fsdp2"])) == {}
    with pytest.raises(
        ConfigError, match=r"engine\.train fsdp2 under accelerate launch --use_fsdp, found auto"
    ):
        accelerator_options(load_config())


def test_a_launcher_told_of_deepspeed_is_contradicted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    with pytest.raises(
        ConfigError,
        match=r"deepspeed_zero3 under accelerate launch --use_deepspeed, found ddp; set one of them",
    ):
        accelerator_options(load_config(None, ["engine.train=ddp"]))


@pytest.mark.parametrize(
    ("name", "neutral", "value", "instead"),
    [
        ("ACCELERATE_MIXED_PRECISION", "no", "bf16", "model.dtype"),
        ("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "1", "4", "train.token_budget"),
        ("ACCELERATE_DYNAMO_BACKEND", "NO", "INDUCTOR", "model.fused_layers"),
    ],
)
def test_a_launcher_told_of_what_would_change_nothing_is_contradicted(
    name: str, neutral: str, value: str, instead: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, neutral)
    assert accelerator_options(load_config()) == {}
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=rf"found {value} \({name}\), .*{instead}"):
        accelerator_options(load_config())


@pytest.mark.slow
def test_accelerate_launch_says_nothing_by_itself() -> None:
    """Its defaults, in variables, are none of those that are refused."""
    code = (
        "import os; from mmrl.config import load_config; "
        "from mmrl.distributed.engines import accelerator_options; "
        "assert os.environ['ACCELERATE_MIXED_PRECISION'] == 'no', os.environ; "
        "print('options', accelerator_options(load_config()))"
    )
    command = [sys.executable, "-m", "accelerate.commands.launch", "--cpu"]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "says.py").write_text(code)
        done = subprocess.run(
            [*command, "--main_process_port", "0", str(Path(folder) / "says.py")],
            cwd=REPO,
            # no configuration of the user's
            env={**ENVIRONMENT, "HF_HOME": folder, "CUDA_VISIBLE_DEVICES": ""},
            text=True,
            capture_output=True,
            timeout=300,
        )
    assert done.returncode == 0 and done.stdout == "options {}\n", done.stderr[-3000:]


def test_corrections_are_counted_over_all_processes() -> None:
    """A process without a corrected token has the same row as the others."""
    ours, theirs, all_N = (
        torch.tensor([-1.0, -1.0]),
        torch.tensor([-1.5, -1.0]),
        torch.ones(2, dtype=torch.bool),
    )
    busy, idle = (OffPolicy(load_config(None, ["engine.rollout=vllm"])) for _ in range(2))
    busy.correct(ours, theirs, ~all_N, all_N, all_N, count=True)
    counts: list[list[float]] = []
    for one in (busy, idle):
        one.metrics(OneOfTwo(counts[0] if counts else [0.0] * 8, counts))
    rows = [busy.metrics(OneOfTwo(counts[1])), idle.metrics(OneOfTwo(counts[0]))]
    assert (
        rows[0] == rows[1] == busy.metrics()
        and rows[0]["train/sampler/weight"] > 1
        and idle.metrics() == {}
    )


def test_stale_tokens_without_a_correction_of_their_own_have_the_samplers() -> None:
    ours, theirs, all_N = (
        torch.tensor([-1.0, -1.0]),
        torch.tensor([-1.5, -1.5]),
        torch.ones(2, dtype=torch.bool),
    )
    stale_N = torch.tensor([True, False])
    found = OffPolicy(
        load_config(
            None, ["engine.rollout=vllm", "schedule.kind=async", "schedule.correction=none"]
        )
    )
    old_N, weight_N = found.correct(ours, theirs, stale_N, all_N, all_N, count=True)
    assert torch.equal(old_N, ours) and torch.allclose(weight_N, torch.tensor(0.5).exp().expand(2))
