"""Embodied training: schedules agree bit for bit, a resumed run equals the whole one, failures are counted."""

from __future__ import annotations

import gc
import json
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from mmrl.errors import ConfigError
from mmrl.robotics.config import EmbodiedConfig
from mmrl.robotics.episodes import EpisodeRollouts
from mmrl.robotics.rollout import Driver, RolloutGroup
from mmrl.robotics.source import EpisodeSource
from mmrl.training.learner import Learner
from mmrl.training.pipeline import ClosedGroup
from mmrl.training.trainer import Trainer
from mmrl.training.update_result import UpdateResult
from scripts._torture_trust_state import flip_bit
from tests.kits.robot_kit import config_of, saved_vla

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("tiny_workers")]


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_vla(tmp_path_factory.mktemp("policy"))


def run(policy: Path, folder: Path, name: str, *overrides: str, **options: Any) -> dict[str, Any]:
    return Trainer(config_of(policy, f"dir={folder}", f"name={name}", *overrides), **options).fit()


def weights(folder: Path, name: str, step: int = 2) -> dict[str, torch.Tensor]:
    return load_file(str(folder / name / "checkpoints" / f"step_{step:06d}" / "model.safetensors"))


def rows(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def test_pipelined_equals_serial_bit_for_bit_and_something_was_learned(
    policy: Path, tmp_path: Path
) -> None:
    stages = ("schedule.stages=2", "schedule.timeline=1")
    run(policy, tmp_path, "serial", "schedule.kind=serial", *stages)
    run(policy, tmp_path, "keyed", "schedule.kind=pipelined", "schedule.order=key", *stages)
    assert same(weights(tmp_path, "serial"), weights(tmp_path, "keyed"))
    # the simulators of a worker as the rows of one batch
    batched = (*stages, "env.options.batched=true")
    run(policy, tmp_path, "batched", "schedule.kind=pipelined", "schedule.order=key", *batched)
    assert same(weights(tmp_path, "serial"), weights(tmp_path, "batched"))
    assert not same(weights(tmp_path, "serial"), load_file(str(policy / "model.safetensors")))
    for a, b in zip(rows(tmp_path, "serial"), rows(tmp_path, "keyed"), strict=True):
        assert all(
            a[k] == b[k]
            for k in a
            if k.startswith("train/") and not k.startswith(("train/groups/stale", "train/streamed"))
        )
        assert a["train/logprob_gap/max"] < 1e-4 and a["train/groups/trained"] > 0
    trace = json.loads((tmp_path / "keyed" / "timeline" / "trace.json").read_text())
    assert {e.get("name") for e in trace["traceEvents"]} >= {"render", "infer", "train"}


def test_arrival_order_differs_by_rounding_only(policy: Path, tmp_path: Path) -> None:
    run(policy, tmp_path, "keyed", "schedule.kind=pipelined", "schedule.order=key", "train.steps=1")
    run(policy, tmp_path, "arrival", "schedule.kind=pipelined", "train.steps=1")
    a, b = (rows(tmp_path, n)[0] for n in ("keyed", "arrival"))
    assert a["train/grad_norm"] == pytest.approx(b["train/grad_norm"], rel=1e-4)
    assert a["train/success_once"] == b["train/success_once"]


@pytest.mark.parametrize(
    "schedule", [("schedule.kind=serial",), ("schedule.kind=pipelined", "schedule.order=key")]
)
def test_a_resumed_run_equals_the_whole_one(
    policy: Path, tmp_path: Path, schedule: tuple[str, ...]
) -> None:
    run(policy, tmp_path, "whole", "train.steps=3", *schedule)
    broken = Trainer(config_of(policy, f"dir={tmp_path}", "name=cut", "train.steps=3", *schedule))
    broken.on_event = stop_after(2)
    with pytest.raises(KeyboardInterrupt):
        broken.fit()
    if "serial" in schedule[0]:  # a damaged checkpoint is left out, and a step more is played again
        flip_bit(tmp_path / "cut" / "checkpoints" / "step_000002" / "vla.json", 77)
    run(policy, tmp_path, "cut", "train.steps=3", *schedule, resume=True)
    info = json.loads((tmp_path / "cut" / "run.json").read_text())
    assert (info["resumed_at"], "vla.json" in str(info.get("damaged_checkpoints"))) == (
        (1, True) if "serial" in schedule[0] else (2, False)
    )
    assert same(weights(tmp_path, "whole", 3), weights(tmp_path, "cut", 3))
    assert [r["train/success_once"] for r in rows(tmp_path, "whole")] == [
        r["train/success_once"] for r in rows(tmp_path, "cut")
    ]


def stop_after(step: int) -> Any:
    def on_event(kind: str, payload: Any) -> None:
        if kind == "checkpoint" and payload["step"] == step:
            raise KeyboardInterrupt

    return on_event


class Overtaken(EpisodeSource):
    """Holds back the end of every step's first place until a decision of the next step was made: what is rolled out ahead is
    then older than what it is trained by, however the processes are scheduled."""

    def __init__(self, config: EmbodiedConfig, driver: Driver, **options: int) -> None:
        super().__init__(config, driver, **options)
        self.decided: set[int] = set()
        self.held: list[ClosedGroup[RolloutGroup]] = []

    def infer(self, batch: Any, version: int) -> Sequence[ClosedGroup[RolloutGroup]]:
        self.decided |= {self.driver._running[slot].request.key[0] for slot in batch}
        return super().infer(batch, version)

    def poll(self, timeout_s: float) -> Sequence[ClosedGroup[RolloutGroup]]:
        found = [*self.held, *super().poll(timeout_s)]
        self.held = [
            c
            for c in found
            if c.place == 0 and c.step < self.config.train.steps and c.step + 1 not in self.decided
        ]
        return [c for c in found if c not in self.held]

    @property
    def running(self) -> int:
        return super().running + len(self.held)


@pytest.mark.parametrize("extra", [(), ("algorithm.epochs=2", "schedule.correction=mask")])
def test_async_keeps_its_staleness_bound_and_weighs_older_decisions(
    policy: Path, tmp_path: Path, extra: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mmrl.robotics.episodes.EpisodeSource", Overtaken)
    run(
        policy,
        tmp_path,
        "async",
        "schedule.kind=async",
        "schedule.staleness=1",
        "train.steps=4",
        "train.save_every=0",
        "algorithm.dynamic_sampling=false",
        *extra,
    )
    found = rows(tmp_path, "async")
    assert len(found) == 4 and all(r["train/staleness"] <= 1 for r in found)
    assert sum(r["train/groups/trained"] for r in found) > 0
    late = [r for r in found if r.get("train/offpolicy/share", 0) > 0]
    assert [r["step"] for r in late] == [2, 3, 4], (
        "each step but the first trains on decisions made during the one before"
    )
    assert all(
        0 < r["train/offpolicy/share"] <= 1 and 0 <= r["train/offpolicy/weight"] <= 2 for r in late
    )
    assert all(r["train/logprob_gap/max"] < 1e-4 for r in found), (
        "measured where sampler and trainer are the same weights"
    )


@pytest.mark.parametrize("kind", ["serial", "pipelined", "async"])
def test_every_decision_bears_the_weights_that_made_it_also_in_evaluations(
    policy: Path, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    finished: list[int] = []
    seen: list[tuple[bool, int, int]] = []  # played by an evaluation, version said, version true
    evaluating: list[int] = []
    finish, infer, evaluate = Learner.finish, Driver.infer, EpisodeRollouts.evaluate

    def counting(self: Learner) -> UpdateResult:
        result = finish(self)
        finished.append(self.step)
        return result

    def watching(self: Driver, slots: Sequence[int]) -> None:
        seen.append((bool(evaluating), self.vla.version, len(finished)))
        infer(self, slots)

    def evaluation(self: EpisodeRollouts, step: int, **options: Any) -> Any:
        evaluating.append(step)
        found = evaluate(self, step, **options)
        evaluating.clear()
        return found

    monkeypatch.setattr(Learner, "finish", counting)
    monkeypatch.setattr(Driver, "infer", watching)
    monkeypatch.setattr(EpisodeRollouts, "evaluate", evaluation)
    run(
        policy,
        tmp_path,
        "run",
        f"schedule.kind={kind}",
        "schedule.staleness=1",
        "train.steps=3",
        "eval.every=1",
        "train.keep_last=3",
    )
    assert all(said == true for _, said, true in seen)
    assert {said for evaluated, said, _ in seen if evaluated} == {0, 1, 2, 3}
    assert {said for evaluated, said, _ in seen if not evaluated} >= {0, 1}
    states = [
        tmp_path / "run" / "checkpoints" / f"step_{step:06d}" / "trainer" / "state.json"
        for step in (1, 2, 3)
    ]
    assert [json.loads(f.read_text())["version"] for f in states] == [1, 2, 3]


@pytest.mark.parametrize(
    "extra",
    [
        ("algorithm.epochs=2", "algorithm.minibatches=2"),
        ("algorithm.kl.coef=0.1", "algorithm.entropy.coef=0.01"),
        (
            "algorithm.loss_aggregation=token_mean",
            "rl.reward=shaped",
            "env.options={tolerance: 0.5, reward: shaped}",
        ),
    ],
)
def test_variants_of_grpo_train(policy: Path, tmp_path: Path, extra: tuple[str, ...]) -> None:
    row = run(policy, tmp_path, "run", *extra)
    assert row["train/grad_norm"] > 0 and row["train/kl"] >= 0


def test_ppo_trains_policy_and_critic(policy: Path, tmp_path: Path) -> None:
    row = run(
        policy,
        tmp_path,
        "ppo",
        "algorithm.advantage=gae",
        "vla.value_head=true",
        "algorithm.epochs=2",
        "train.steps=3",
        "algorithm.critic.warmup=2",
        "train.keep_last=3",
    )
    saved = tmp_path / "ppo" / "checkpoints" / "step_000003"
    assert (saved / "value_head.safetensors").exists() and row["train/grad_norm"] > 0
    head = load_file(str(saved / "value_head.safetensors"))
    assert any(v.abs().sum() > 0 for k, v in head.items() if k.startswith("2."))
    before = load_file(str(policy / "model.safetensors"))
    assert same(weights(tmp_path, "ppo", 1), before)
    assert same(weights(tmp_path, "ppo", 2), before) and not same(
        weights(tmp_path, "ppo", 3), before
    )  # two steps: critic only


def test_a_run_resumed_while_its_critic_warms_up_equals_the_whole_one(
    policy: Path, tmp_path: Path
) -> None:
    settings = (
        "schedule.kind=serial",
        "algorithm.advantage=gae",
        "vla.value_head=true",
        "algorithm.critic.warmup=2",
        "optim.weight_decay=0.1",
        "train.steps=3",
    )
    run(policy, tmp_path, "whole", *settings)
    broken = Trainer(config_of(policy, f"dir={tmp_path}", "name=cut", *settings))
    broken.on_event = stop_after(1)
    with pytest.raises(KeyboardInterrupt):
        broken.fit()
    run(policy, tmp_path, "cut", *settings, resume=True)
    assert same(weights(tmp_path, "whole", 3), weights(tmp_path, "cut", 3))
    heads = [
        load_file(str(tmp_path / n / "checkpoints" / "step_000003" / "value_head.safetensors"))
        for n in ("whole", "cut")
    ]
    assert same(heads[0], heads[1])
    before = load_file(str(policy / "model.safetensors"))
    assert same(weights(tmp_path, "whole", 2), before) and not same(
        weights(tmp_path, "whole", 3), before
    )


def test_a_crashing_simulator_costs_attempts_not_the_run(policy: Path, tmp_path: Path) -> None:
    row = run(
        policy,
        tmp_path,
        "faulty",
        "env.suite=tests.robotics.robot_faults:SometimesCrashing",
        "train.steps=1",
        "env.retries=5",
        "env.respawns=100",
    )
    failures = [
        json.loads(line)
        for line in (tmp_path / "faulty" / "failures.jsonl").read_text().splitlines()
    ]
    assert row["train/failed_attempts"] == len(failures) > 0
    assert all("os._exit" in f["reason"] or "exit" in f["reason"].lower() for f in failures)
    assert row["train/episodes"] == 3 * row["train/groups/asked"]


def test_a_task_that_does_not_exist_stops_with_its_name(policy: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"reech.*[Dd]id you mean.*reach"):
        run(policy, tmp_path, "wrong", "env.tasks=[reech]")


def test_async_runs_evaluate_between_steps_without_losing_episodes(
    policy: Path, tmp_path: Path
) -> None:
    run(
        policy,
        tmp_path,
        "async",
        "schedule.kind=async",
        "schedule.staleness=2",
        "train.steps=4",
        "eval.every=1",
        "train.save_every=0",
    )
    assert [r["train/episodes"] >= 9 for r in rows(tmp_path, "async")] == [True] * 4


@pytest.mark.parametrize(
    ("schedule", "extra", "left"),
    [
        ("pipelined", (), False),
        ("pipelined", ("schedule.order=key",), False),
        ("serial", (), False),
        ("pipelined", ("algorithm.epochs=2",), True),
    ],
)
def test_prompts_are_let_go_once_their_group_was_trained_on_or_rejected(
    policy: Path,
    tmp_path: Path,
    schedule: str,
    extra: tuple[str, ...],
    left: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At the end of a step only groups that still have to be trained on (several passes) may be alive, and none afterwards."""
    prompts: list[weakref.ref[Any]] = []
    judged: dict[bool, int] = {True: 0, False: 0}
    alive: list[int] = []
    judge, finish = EpisodeSource._judge, Learner.finish

    def watching(self: EpisodeSource, group: RolloutGroup) -> Any:
        end = judge(self, group)
        judged[end is not None and end.group is not None] += 1
        prompts.extend(weakref.ref(d.prompt) for e in group.rollouts for d in e.turns)
        return end

    def counting(self: Learner) -> UpdateResult:
        gc.collect()
        alive.append(sum(p() is not None for p in prompts))
        result = finish(self)
        gc.collect()
        alive.append(sum(p() is not None for p in prompts))
        return result

    monkeypatch.setattr(EpisodeSource, "_judge", watching)
    monkeypatch.setattr(Learner, "finish", counting)
    run(
        policy,
        tmp_path,
        "run",
        f"schedule.kind={schedule}",
        "train.log_rollouts=99",
        "train.save_every=0",
        *extra,
    )
    assert judged[True] and judged[False] and len(prompts) > 20
    assert [n > 0 for n in alive] == [left, False] * 2
    files = sorted((tmp_path / "run" / "rollouts").glob("*.jsonl"))
    logged = [json.loads(line) for f in files for line in f.read_text().splitlines()]
    assert len(logged) == sum(judged.values()) * 3 and sum(len(r["tokens"]) for r in logged) == len(
        prompts
    )
    assert [r["key"] for r in logged] == sorted(r["key"] for r in logged)
    streams = schedule == "pipelined" and not left
    assert [r["train/streamed"] for r in rows(tmp_path, "run")] == [float(streams)] * 2


@pytest.mark.parametrize("stops", [True, False])
def test_success_at_the_end_is_a_number_of_its_own_only_where_episodes_go_on(
    policy: Path, tmp_path: Path, stops: bool
) -> None:
    """A wide goal that a random arm crosses and leaves again."""
    options = f"env.options={{tolerance: 0.5, stop_at_success: {str(stops).lower()}}}"
    row = run(
        policy,
        tmp_path,
        "run",
        options,
        "train.steps=1",
        "algorithm.dynamic_sampling=false",
        "train.log_rollouts=99",
        "rollout.group_size=8",
    )
    episodes = [
        json.loads(line)
        for line in (tmp_path / "run" / "rollouts" / "step_000001.jsonl").read_text().splitlines()
    ]
    lost = [e for e in episodes if e["success_once"] and not e["success_at_end"]]
    assert row["train/success_once"] > 0 and all(
        e["success_once"] or not e["success_at_end"] for e in episodes
    )
    assert (row["train/success_at_end"] < row["train/success_once"]) == (not stops) == bool(lost)
    assert (min((e["steps"] for e in episodes if e["success_at_end"]), default=12) < 12) == stops


def test_a_run_says_at_its_start_whether_groups_are_streamed(policy: Path, tmp_path: Path) -> None:
    said = {}
    for name, *extra in (
        ("grpo",),
        ("passes", "algorithm.epochs=4", "algorithm.minibatches=2"),
        ("ppo", "algorithm.advantage=gae", "vla.value_head=true"),
        ("serial", "schedule.kind=serial"),
    ):
        events: dict[str, Any] = {}
        run(
            policy,
            tmp_path,
            name,
            "schedule.kind=pipelined",
            "train.steps=1",
            *extra,
            on_event=events.__setitem__,
        )
        said[name] = events["start"]["notes"]
    assert said == {
        "grpo": ["groups are streamed: trained on as they close"],
        "passes": [
            "groups are collected, not streamed: algorithm.epochs 4, algorithm.minibatches 2"
        ],
        "ppo": [
            "groups are collected, not streamed: algorithm.advantage gae (normalised over the step)"
        ],
        "serial": ["groups are collected, not streamed: schedule.kind serial"],
    }


def test_kl_weighs_every_trajectory_alike(policy: Path) -> None:
    """A KL term alone: its gradient is the mean over trajectories of the mean over their tokens, whatever their length."""
    from mmrl.algorithms import ObjectiveSettings, policy_loss

    settings = ObjectiveSettings(kl_coef=0.1)
    logp_N = torch.linspace(-2, -1, 6, dtype=torch.double, requires_grad=True)
    ref_N, sequence_N = torch.full((6,), -1.5, dtype=torch.double), torch.tensor([0, 0, 0, 0, 1, 1])
    scale_N = torch.tensor([0.25] * 4 + [0.5] * 2, dtype=torch.double)
    zero = torch.zeros(6, dtype=torch.double)
    policy_loss(
        settings,
        logp_N,
        logp_N.detach(),
        zero,
        sequence_N,
        torch.ones(6, dtype=torch.bool),
        ref_logp_N=ref_N,
        scale_N=scale_N,
    ).loss.backward()
    kl = torch.expm1(ref_N - logp_N) - (ref_N - logp_N)
    (expected,) = torch.autograd.grad(0.1 * (kl[:4].mean() + kl[4:].mean()), logp_N)
    assert torch.allclose(logp_N.grad, expected)


def test_every_task_has_its_turn(policy: Path) -> None:
    from mmrl.robotics.source import EpisodeSource

    source = EpisodeSource(
        config_of(policy, "env.tasks=[reach, push, reach, push]", "env.options={}"), driver=None
    )  # type: ignore[arg-type]
    seen = {id(source._request(step, place, 0).spec) for step in (1, 2, 3, 4) for place in range(3)}
    assert seen == {id(spec) for spec in source.specs}
