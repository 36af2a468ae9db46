"""Embodied training: schedules agree bit for bit, a resumed run equals the whole one, failures are counted."""
from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from mmrl.errors import ConfigError
from robotics.trainer import EmbodiedTrainer
from tests.robot_kit import config_of, make_model, make_vla

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("policy")
    make_vla(make_model(folder / "model")).save(folder / "vla")
    return folder / "vla"


def run(policy: Path, folder: Path, name: str, *overrides: str, **options: Any) -> dict[str, Any]:
    return EmbodiedTrainer(config_of(policy, f"dir={folder}", f"name={name}", *overrides), **options).fit()


def weights(folder: Path, name: str, step: int = 2) -> dict[str, torch.Tensor]:
    return load_file(str(folder / name / "checkpoints" / f"step_{step:06d}" / "model.safetensors"))


def rows(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def test_pipelined_equals_serial_bit_for_bit_and_something_was_learned(policy: Path, tmp_path: Path) -> None:
    stages = ("schedule.stages=2", "schedule.timeline=1")
    run(policy, tmp_path, "serial", "schedule.kind=serial", *stages)
    run(policy, tmp_path, "keyed", "schedule.kind=pipelined", "schedule.order=key", *stages)
    assert same(weights(tmp_path, "serial"), weights(tmp_path, "keyed"))
    assert not same(weights(tmp_path, "serial"), load_file(str(policy / "model.safetensors")))
    for a, b in zip(rows(tmp_path, "serial"), rows(tmp_path, "keyed"), strict=True):
        assert all(a[k] == b[k] for k in a if k.startswith("train/") and not k.startswith("train/groups/stale"))
        assert a["train/logprob_gap/max"] < 1e-4 and a["train/groups/trained"] > 0
    trace = json.loads((tmp_path / "keyed" / "timeline" / "trace.json").read_text())
    assert {e.get("name") for e in trace["traceEvents"]} >= {"render", "infer", "train"}


def test_arrival_order_differs_by_rounding_only(policy: Path, tmp_path: Path) -> None:
    run(policy, tmp_path, "keyed", "schedule.kind=pipelined", "schedule.order=key", "train.steps=1")
    run(policy, tmp_path, "arrival", "schedule.kind=pipelined", "train.steps=1")
    a, b = (rows(tmp_path, n)[0] for n in ("keyed", "arrival"))
    assert a["train/grad_norm"] == pytest.approx(b["train/grad_norm"], rel=1e-4)
    assert a["train/success_once"] == b["train/success_once"]


def test_a_resumed_run_equals_the_whole_one(policy: Path, tmp_path: Path) -> None:
    run(policy, tmp_path, "whole", "train.steps=3")
    broken = EmbodiedTrainer(config_of(policy, f"dir={tmp_path}", "name=cut", "train.steps=3"))
    broken.on_event = stop_after(2)
    with pytest.raises(KeyboardInterrupt):
        broken.fit()
    run(policy, tmp_path, "cut", "train.steps=3", resume=True)
    assert same(weights(tmp_path, "whole", 3), weights(tmp_path, "cut", 3))
    assert [r["train/success_once"] for r in rows(tmp_path, "whole")] == [r["train/success_once"] for r in rows(tmp_path, "cut")]


def stop_after(step: int) -> Any:
    def on_event(kind: str, payload: Any) -> None:
        if kind == "checkpoint" and payload["step"] == step:
            raise KeyboardInterrupt
    return on_event


@pytest.mark.parametrize("extra", [(), ("algorithm.epochs=2", "schedule.correction=mask")])
def test_async_keeps_its_staleness_bound_and_weighs_older_decisions(policy: Path, tmp_path: Path, extra: tuple[str, ...]) -> None:
    run(policy, tmp_path, "async", "schedule.kind=async", "schedule.staleness=1", "train.steps=4", "train.save_every=0", *extra)
    found = rows(tmp_path, "async")
    assert len(found) == 4 and all(r["train/staleness"] <= 1 for r in found)
    assert sum(r["train/groups/trained"] for r in found) > 0
    late = [r for r in found if r.get("train/offpolicy/share", 0) > 0]
    assert late and all(0 < r["train/offpolicy/share"] <= 1 and 0 <= r["train/offpolicy/weight"] <= 2 for r in late)
    assert all(r["train/logprob_gap/max"] < 1e-4 for r in found), "measured where sampler and trainer are the same weights"


@pytest.mark.parametrize("extra", [("algorithm.epochs=2", "algorithm.minibatches=2"),
                                   ("algorithm.kl.coef=0.1", "rl.entropy_coef=0.01"),
                                   ("rl.length_norm=token", "rl.reward=shaped", "env.options={tolerance: 0.5, reward: shaped}")])
def test_variants_of_grpo_train(policy: Path, tmp_path: Path, extra: tuple[str, ...]) -> None:
    row = run(policy, tmp_path, "run", *extra)
    assert row["train/grad_norm"] > 0 and row["train/kl_ref"] >= 0


def test_ppo_trains_policy_and_critic(policy: Path, tmp_path: Path) -> None:
    row = run(policy, tmp_path, "ppo", "rl.kind=ppo", "vla.value_head=true", "algorithm.epochs=2", "train.steps=3",
              "rl.critic_warmup=2")
    saved = tmp_path / "ppo" / "checkpoints" / "step_000003"
    assert (saved / "value_head.safetensors").exists() and row["train/grad_norm"] > 0
    head = load_file(str(saved / "value_head.safetensors"))
    assert any(v.abs().sum() > 0 for k, v in head.items() if k.startswith("2."))
    first = load_file(str(tmp_path / "ppo" / "checkpoints" / "step_000001" / "model.safetensors")) if (
        tmp_path / "ppo" / "checkpoints" / "step_000001").exists() else None
    before = load_file(str(policy / "model.safetensors"))
    assert first is None or same(first, before)
    assert same(weights(tmp_path, "ppo", 2), before) and not same(weights(tmp_path, "ppo", 3), before)  # two steps: critic only


def test_a_crashing_simulator_costs_attempts_not_the_run(policy: Path, tmp_path: Path) -> None:
    row = run(policy, tmp_path, "faulty", "env.suite=tests.robot_faults:SometimesCrashing", "train.steps=1", "env.retries=5",
              "env.respawns=100")
    failures = [json.loads(line) for line in (tmp_path / "faulty" / "failures.jsonl").read_text().splitlines()]
    assert row["train/failed_attempts"] == len(failures) > 0
    assert all("os._exit" in f["reason"] or "exit" in f["reason"].lower() for f in failures)
    assert row["train/episodes"] == 3 * row["train/groups/asked"]


def test_a_task_that_does_not_exist_stops_with_its_name(policy: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"reech.*[Dd]id you mean.*reach"):
        run(policy, tmp_path, "wrong", "env.tasks=[reech]")


def test_async_runs_evaluate_between_steps_without_losing_episodes(policy: Path, tmp_path: Path) -> None:
    run(policy, tmp_path, "async", "schedule.kind=async", "schedule.staleness=2", "train.steps=4", "eval.every=1",
        "train.save_every=0")
    assert [r["train/episodes"] >= 9 for r in rows(tmp_path, "async")] == [True] * 4


def test_kl_weighs_every_trajectory_alike(policy: Path) -> None:
    """A KL term alone: its gradient is the mean over trajectories of the mean over their tokens, whatever their length."""
    from mmrl.algorithms import ObjectiveSettings, policy_loss

    settings = ObjectiveSettings(kl_coef=0.1)
    logp_N = torch.linspace(-2, -1, 6, dtype=torch.double, requires_grad=True)
    ref_N, sequence_N = torch.full((6,), -1.5, dtype=torch.double), torch.tensor([0, 0, 0, 0, 1, 1])
    scale_N = torch.tensor([0.25] * 4 + [0.5] * 2, dtype=torch.double)
    zero = torch.zeros(6, dtype=torch.double)
    policy_loss(settings, logp_N, logp_N.detach(), zero, sequence_N, torch.ones(6, dtype=torch.bool), ref_logp_N=ref_N,
                scale_N=scale_N).loss.backward()
    kl = torch.expm1(ref_N - logp_N) - (ref_N - logp_N)
    expected, = torch.autograd.grad(0.1 * (kl[:4].mean() + kl[4:].mean()), logp_N)
    assert torch.allclose(logp_N.grad, expected)


def test_every_task_has_its_turn(policy: Path) -> None:
    from robotics.source import EpisodeSource

    source = EpisodeSource(config_of(policy, "env.tasks=[reach, push, reach, push]", "env.options={}"), driver=None)  # type: ignore[arg-type]
    source.specs = [*source.specs]
    seen = {id(source._request(step, place, 0).spec) for step in (1, 2, 3, 4) for place in range(3)}
    assert seen == {id(spec) for spec in source.specs}
