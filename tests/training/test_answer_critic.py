"""PPO on answers: advantages against verl's own function and against sums, the gradient against plain loops, and a run that learns
by its critic where a shuffled reward teaches nothing.

Run: pytest tests/training/test_answer_critic.py
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mmrl.algorithms.group_rewards import group_outcome
from mmrl.config import RunConfig, load_config
from mmrl.distributed.engines import build_train_engine
from mmrl.distributed.world import World
from mmrl.errors import NonFiniteError
from mmrl.policy.policy import Policy
from mmrl.tasks.scenes import make_scenes
from mmrl.training.answer_critic import AnswerAdvantages, add_critic, build_advantages
from mmrl.training.learner import Learner
from mmrl.training.optim import build_policy_optimizer
from mmrl.training.trainer import Trainer
from mmrl.types import Rollout, RolloutGroup, Sample, Score, StopReason, Turn
from tests.kits.engine_kit import (
    ALBUM,
    REPO,
    Album,
    album_data,
    config_file,
    fresh_policy,
    picture,
    read_jsonl,
    sample_with,
    small_run,
)

PEER = json.loads((Path(__file__).parent / "peer_gae.json").read_text(encoding="utf-8"))
KEY = (1, 0, 0)


def config_of(*overrides: str) -> RunConfig:
    return load_config(None, ["algorithm.advantage=gae", *overrides])


def answer(
    values: Sequence[float], reward: float, *, cut: bool = False, final: float = 9.0, turns: int = 1
) -> Rollout:
    """A rollout of so many turns whose tokens have these values."""
    parts = [tuple(p.tolist()) for p in np.array_split(np.asarray(values), turns)]
    stops = [StopReason.EOS] * (turns - 1) + [StopReason.LENGTH if cut else StopReason.EOS]
    return Rollout(
        tuple(
            Turn((1,) * len(p), "", (0.0,) * len(p), stop, values=p)
            for p, stop in zip(parts, stops, strict=True)
        ),
        Score.combine({"accuracy": reward}, {"accuracy": 1.0}, parsed=True),
        final_value=final,
    )


def group_of(*rollouts: Rollout) -> RolloutGroup:
    return RolloutGroup(Sample("s", "album", "a", "?", None), rollouts, key=KEY)


def targets(config: RunConfig, *rollouts: Rollout) -> list[Any]:
    return list(
        AnswerAdvantages(config, World(torch.device("cpu"))).targets([group_of(*rollouts)])[KEY]
    )


def flat(table: Sequence[Sequence[float]]) -> list[float]:
    return [x for turn in table for x in turn]


@pytest.mark.parametrize(
    "case", PEER["cases"], ids=lambda c: f"gamma {c['gamma']} lambda {c['gae_lambda']}"
)
def test_advantages_are_verls(case: dict[str, Any]) -> None:
    config = config_of(
        f"algorithm.critic={{gamma: {case['gamma']}, gae_lambda: {case['gae_lambda']}}}"
    )
    found = targets(config, *map(answer, PEER["values"], PEER["rewards"]))
    for mine, advantages, returns, values in zip(
        found, case["advantages"], case["returns"], PEER["values"], strict=True
    ):
        # theirs: / sqrt(variance + 1e-8), ours / (std + 1e-5)
        assert flat(mine.advantages) == pytest.approx(advantages, abs=5e-5)
        assert (
            flat(mine.returns) == pytest.approx(returns, abs=1e-8) and flat(mine.values) == values
        )


def by_sums(
    values: Sequence[float], reward: float, after: float, gamma: float, lam: float
) -> list[float]:
    """From the definition: the sum of (gamma lambda)^l delta_(t+l), in float64."""
    v = np.append(np.asarray(values, np.float64), after)
    deltas = gamma * v[1:] - v[:-1]
    deltas[-1] += reward
    return [
        math.fsum((gamma * lam) ** k * float(d) for k, d in enumerate(deltas[t:]))
        for t in range(len(values))
    ]


@pytest.mark.parametrize(
    ("bootstrap", "level"),
    list(itertools.product(["never", "standard", "always"], ["token", "turn"])),
)
def test_what_follows_the_last_step_is_what_bootstrap_says(bootstrap: str, level: str) -> None:
    """A whole answer, one that was cut, and one of three turns: its values follow each other over the turns."""
    rng = np.random.default_rng(3)
    sizes = (6, 4, 7) if level == "token" else (1, 1, 3)
    given = [
        (rng.normal(size=n), reward, cut, turns)
        for n, reward, cut, turns in zip(
            sizes, (0.5, 0.0, 1.0), (False, True, False), (1, 1, 3), strict=True
        )
    ]
    config = config_of(
        f"algorithm.critic={{level: {level}, gamma: 0.9, gae_lambda: 0.8, bootstrap: {bootstrap}}}"
    )
    found = targets(config, *(answer(v, r, cut=cut, final=2.5, turns=n) for v, r, cut, n in given))
    follows = {"never": (0.0, 0.0), "standard": (0.0, 2.5), "always": (2.5, 2.5)}[bootstrap]
    expected = [by_sums(v, r, follows[cut], 0.9, 0.8) for v, r, cut, _ in given]
    everything = [a for advantages in expected for a in advantages]
    mean, std = statistics.mean(everything), statistics.stdev(everything)
    for mine, advantages, (values, _, _, turns) in zip(found, expected, given, strict=True):
        assert len(mine.advantages) == turns
        assert flat(mine.advantages) == pytest.approx(
            [(a - mean) / (std + 1e-5) for a in advantages], abs=1e-9
        )
        assert flat(mine.returns) == pytest.approx(
            [a + v for a, v in zip(advantages, values, strict=True)], abs=1e-9
        )


def test_what_an_environment_pays_for_a_turn_is_earned_in_it() -> None:
    """The score, here with a penalty, is their sum and what comes at the end; an environment's own end is none by the limit."""
    config = config_of("algorithm.critic={gamma: 0.9, gae_lambda: 1.0, bootstrap: standard}")
    values = [0.3, 0.1, 0.4, 0.2, 0.6]
    # 3 and 2 tokens, the last turn cut by the length limit
    whole = answer(values, 1.1, cut=True, final=5.0, turns=2)
    paid = [
        dataclasses.replace(t, rewards=(r,), valid=(True,), terminated=r == 1.0)
        for t, r in zip(whole.turns, (0.25, 1.0), strict=True)
    ]
    found, _ = targets(config, dataclasses.replace(whole, turns=tuple(paid)), answer([0.0], 0.0))
    assert flat(found.returns) == pytest.approx(
        [0.25 * 0.9 ** (2 - t) + 0.85 * 0.9 ** (4 - t) for t in range(3)] + [0.85 * 0.9, 0.85]
    )


def test_what_is_not_learned_from_counts_in_no_mean() -> None:
    good = [answer([0.1, 0.4, 0.2], 1.0), answer([0.3], 0.0)]
    failed = dataclasses.replace(
        answer([5.0, 5.0], 1.0), score=Score.failure("reward_error: broken")
    )
    cut, crashed = (
        answer([7.0], 1.0, cut=True),
        dataclasses.replace(answer([8.0], 1.0), error="worker died"),
    )
    alone = targets(config_of(), *good)
    for overlong, out in (("mask", [failed, cut]), ("none", [failed])):
        found = targets(config_of(f"algorithm.overlong={overlong}"), *good, *out, crashed)
        assert found[:2] == alone and found[-1] is None
        for mine, rollout in zip(found[2:-1], out, strict=True):
            assert set(flat(mine.advantages)) == {0.0} and flat(mine.returns) == flat(
                [t.values for t in rollout.turns]
            )
    judged = AnswerAdvantages(config_of(), World(torch.device("cpu")))
    judged.targets([group_of(*good)])
    assert judged.metrics()["train/critic/value"] == pytest.approx(0.25)
    with pytest.raises(NonFiniteError, match="expected finite rewards and values"):
        targets(config_of(), answer([0.1, float("nan")], 1.0))
    # a process without groups
    assert judged.targets([]) == {} and judged.metrics()["train/critic/return"] == 0.0


def test_the_control_experiment_permutes_the_step_not_a_group() -> None:
    """Within a group of G an answer would keep its own reward once in G times, and with a baseline of no group learn from it."""
    groups = [
        dataclasses.replace(
            group_of(*(answer([0.0], 10.0 * n + i) for i in range(4))), key=(1, n, 0)
        )
        for n in range(6)
    ]

    def rewards(*overrides: str) -> list[float]:
        found = AnswerAdvantages(config_of(*overrides), World(torch.device("cpu"))).targets(groups)
        return [flat(t.returns)[0] for g in groups for t in found[g.key] if t is not None]

    plain, shuffled = rewards(), rewards("reward.shuffle=true")
    assert (
        plain == [10.0 * n + i for n in range(6) for i in range(4)] != shuffled
        and sorted(shuffled) == plain
    )
    homes = [int(r // 10) == i // 4 for i, r in enumerate(shuffled)]
    assert sum(homes) < 12, "as many from other groups as there are other groups"
    assert rewards("reward.shuffle=true") == shuffled != rewards("reward.shuffle=true", "seed=1")


def test_every_group_teaches_also_one_answer_alone() -> None:
    task = Album()
    for config, kept in ((config_of("rollout.group_size=1"), True), (load_config(None), False)):
        found = group_outcome(group_of(answer([0.0], 1.0)), config, task)
        assert found.signal == kept and (found.rewards == [1.0]) == kept
    broken = dataclasses.replace(answer([0.0], 1.0), score=Score.failure("reward_error: broken"))
    assert group_outcome(group_of(broken), config_of(), task).rewards is None


# the learner


def policy_of(config: RunConfig) -> Policy:
    policy = add_critic(fresh_policy(), config)
    torch.nn.init.normal_(policy.value_head[2].weight, generator=torch.Generator().manual_seed(2))  # type: ignore[index]
    return policy


def groups_of(policy: Policy) -> tuple[list[RolloutGroup], dict[str, Any]]:
    """Two prompts with pictures and four or two answers of different lengths, on-policy; and the prompts."""
    groups, prompts = [], {}
    drawn = np.random.default_rng(5)
    for number, lengths in enumerate(((3, 5, 1, 4), (2, 6))):
        sample = dataclasses.replace(
            sample_with([picture((56, 56), number)], number=number), id=f"s{number}"
        )
        prompt = prompts[sample.id] = policy.encoder(sample, Album())
        rollouts = []
        for length in lengths:
            tokens = tuple(int(t) for t in drawn.integers(0, 200, length))
            with torch.no_grad():
                logprobs = tuple(policy.evaluate([prompt], [tokens]).logp_N.tolist())
            value = float(drawn.uniform())
            rollouts.append(
                Rollout(
                    (Turn(tokens, "", logprobs, StopReason.EOS),),
                    Score.combine({"accuracy": value}, {"accuracy": 1.0}, parsed=True),
                )
            )
        groups.append(RolloutGroup(sample, tuple(rollouts), prompt.fingerprint, (1, number, 0)))
    return groups, prompts


def learner_of(config: RunConfig, policy: Policy, prompts: dict[str, Any]) -> Learner:
    world = World(torch.device("cpu"))
    optimizer = build_policy_optimizer(policy, config.optim, config.algorithm.critic.lr)
    advantages, critic = build_advantages(config, world, lambda sample: "reward")
    return Learner(
        config,
        policy,
        build_train_engine(config, world, policy, optimizer),
        world,
        advantages,
        prompt_of=lambda g: prompts[g.sample.id],
        critic=critic,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("level", "loss_aggregation", "budget"),
    [("token", "token_mean", 16384), ("turn", "sequence_mean", 60)],
)
def test_the_gradient_is_that_of_plain_loops(
    level: str, loss_aggregation: str, budget: int
) -> None:
    """Each token is pushed by its own advantage (level turn: its answer's), each value towards its target. On-policy: ratio 1."""
    config = config_of(
        f"algorithm.critic={{level: {level}, gamma: 0.9, gae_lambda: 0.8, value_clip: null, value_coef: 0.7}}",
        f"algorithm.loss_aggregation={loss_aggregation}",
        f"train.token_budget={budget}",
        "train.prompts_per_step=2",
    )
    policy = policy_of(config)
    groups, prompts = groups_of(policy)
    rows: list[tuple[float, torch.Tensor, torch.Tensor, list[float]]] = []
    for group in groups:
        for rollout in group.rollouts:
            out = policy.evaluate([prompts[group.sample.id]], [rollout.turns[0].token_ids])
            assert rollout.score is not None
            weight = 1 / len(out.logp_N) if loss_aggregation == "sequence_mean" else 1.0
            rows.append(
                (
                    weight,
                    out.logp_N,
                    out.values_M,
                    by_sums(out.values_M.tolist(), rollout.score.value, 0.0, 0.9, 0.8),
                )
            )
    everything = [a for *_, advantages in rows for a in advantages]
    mean, std = statistics.mean(everything), statistics.stdev(everything)
    total = (
        float(len(rows))
        if loss_aggregation == "sequence_mean"
        else float(sum(len(logp) for _, logp, *_ in rows))
    )
    expected, squares = torch.zeros(()), 0.0
    for weight, logp_N, values_M, advantages in rows:
        for n in range(len(logp_N)):
            judged = advantages[n if level == "token" else 0]
            value = values_M[n if level == "token" else 0]
            error = 0.5 * (value.detach() + judged - value) ** 2
            squares += weight * error.item()
            expected = (
                expected
                - weight * (judged - mean) / (std + 1e-5) * logp_N[n]
                + 0.7 * weight * error
            )
    parameters = [p for _, p in policy.trainable()]
    wanted = torch.autograd.grad(expected / total, parameters, allow_unused=True)
    learner = learner_of(config, policy, prompts)
    taken: list[torch.Tensor | None] = []
    learner.engine.optimizer.register_step_pre_hook(  # type: ignore[attr-defined]
        lambda *_: taken.extend(None if p.grad is None else p.grad.clone() for p in parameters)
    )
    result = learner.run(groups, 1)
    norm = float(torch.cat([g.flatten() for g in wanted if g is not None]).norm())
    assert result.grad_norms == [pytest.approx(norm, rel=1e-3)]
    scale = min(1.0, config.optim.max_grad_norm / norm)
    apart = torch.stack(
        [
            (mine - scale * other).norm()
            for mine, other in zip(taken, wanted, strict=True)
            if mine is not None and other is not None
        ]
    ).norm()
    assert apart < 1e-4 * scale * norm
    assert result.value_stats.count == {"token": 21, "turn": 6}[level]
    assert (
        result.value_stats.loss == pytest.approx(squares, rel=1e-3)
        and result.critic["train/critic/loss"] > 0
    )


@pytest.mark.slow
def test_old_values_are_those_before_the_first_of_several_passes() -> None:
    """So a value that has moved far is clipped in later passes, and targets stay."""
    config = config_of(
        "algorithm.epochs=3",
        "algorithm.critic={value_clip: 1.0e-4, lr: 0.1}",
        "train.prompts_per_step=2",
    )
    policy = policy_of(config)
    groups, prompts = groups_of(policy)
    learner = learner_of(config, policy, prompts)
    seen: list[list[tuple[tuple[float, ...], tuple[float, ...]]]] = []
    inner = learner.critic.loss  # type: ignore[union-attr]

    def watched(turns: Any, values_M: torch.Tensor) -> Any:
        seen.append([(t.values_V, t.returns_V) for t in turns])
        return inner(turns, values_M)

    learner.critic.loss = watched  # type: ignore[union-attr,method-assign]
    prompt_list = [prompts[g.sample.id] for g in groups for _ in g.rollouts]
    before = policy.predict_values(
        prompt_list, [r.turns[0].token_ids for g in groups for r in g.rollouts]
    ).values_M.tolist()
    result = learner.run(groups, 1)
    assert len(seen) == 3 and seen[0] == seen[1] == seen[2]
    assert [v for values, _ in seen[0] for v in values] == pytest.approx(before, abs=1e-6)
    assert result.critic["train/critic/clipped"] > 0.3, (
        "nothing had moved in the first pass, most in the others"
    )


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["detach: true", "warmup: 2"])
def test_the_head_alone_learns_from_its_loss(setting: str) -> None:
    """detach: what the value loss says never reaches the model. warmup: nothing else is said."""
    config = config_of(
        f"algorithm.critic={{{setting}}}", "train.prompts_per_step=2", "optim.weight_decay=0"
    )
    moved: dict[bool, dict[str, torch.Tensor]] = {}
    for scaled in (False, True):
        own = config.model_copy(
            update={
                "algorithm": config.algorithm.model_copy(
                    update={
                        "critic": config.algorithm.critic.model_copy(
                            update={"value_coef": 50.0 if scaled else 0.5}
                        )
                    }
                )
            }
        )
        own = own.model_copy(update={"optim": own.optim.model_copy(update={"max_grad_norm": 1e9})})
        policy = policy_of(own)
        before = copy.deepcopy(dict(policy.named_parameters()))
        groups, prompts = groups_of(policy)
        learner_of(own, policy, prompts).run(groups, 1)
        moved[scaled] = {n: p.detach() - before[n].detach() for n, p in policy.named_parameters()}
    of_model = [n for n in moved[False] if not n.startswith("value_head.")]
    assert all(torch.equal(moved[False][n], moved[True][n]) for n in of_model), (
        "the weight of the value loss changes nothing there"
    )
    assert any(moved[False][n].any() for n in of_model) == (setting == "detach: true")
    assert all(
        m[n].abs().max() > 5e-4
        for m in moved.values()
        for n in ("value_head.0.weight", "value_head.2.weight")
    )


# runs


def run(folder: Path, name: str, rows: Path, *overrides: str) -> list[dict[str, Any]]:
    config = load_config(
        REPO / "configs" / "demo.yaml",
        [
            f"model.path={REPO / 'assets' / 'tiny_vlm'}",
            f"data.train.0.path={rows}",
            "data.eval=[]",
            f"dir={folder}",
            f"name={name}",
            "algorithm.advantage=gae",
            "algorithm.advantage_scale=batch",
            "algorithm.filter.key=accuracy",  # the recipe has another
            "train.prompts_per_step=16",
            "rollout.group_size=4",
            "reward.workers=0",
            "train.log_rollouts=0",
            *overrides,
        ],
    )
    Trainer(config).fit()
    return read_jsonl(folder / name / "metrics.jsonl")


@pytest.mark.slow
def test_ppo_learns_and_a_shuffled_reward_teaches_nothing(tmp_path: Path) -> None:
    make_scenes(tmp_path / "scenes", 64, seed=3, background="graded")
    found = {}
    for name, overrides in (("ppo", ()), ("shuffled", ("reward.shuffle=true",))):
        rows = run(
            tmp_path,
            name,
            tmp_path / "scenes" / "data.jsonl",
            "train.steps=20",
            "train.save_every=0",
            *overrides,
        )
        found[name] = [
            statistics.mean(r["train/reward/mean"] for r in part) for part in (rows[:5], rows[-5:])
        ]
        assert all(math.isfinite(r["train/critic/explained_variance"]) for r in rows)
    assert found["ppo"][1] > found["ppo"][0] + 0.08, found
    assert found["shuffled"][1] < found["shuffled"][0] + 0.03, found


@pytest.mark.slow
@pytest.mark.parametrize("level", ["token", "turn"])
def test_a_critic_learns_which_prompts_pay(level: str, tmp_path: Path) -> None:
    """One source always pays 1, the other 0: nothing for the policy to learn, all for the critic, also where answers are alone."""
    rows = {
        value: album_data(tmp_path, [[picture(size, i)] for i in range(8)], f"pays{value}")
        for value, size in ((0, (56, 56)), (1, (168, 56)))
    }
    tree = small_run(
        tmp_path / "runs",
        rows[0],
        data={
            "train": [
                {"task": ALBUM, "path": path, "params": {"value": float(value)}}
                for value, path in rows.items()
            ]
        },
        rollout={"group_size": 1},
        train={"steps": 20, "prompts_per_step": 8, "save_every": 0, "token_budget": 2000},
        algorithm={
            "advantage": "gae",
            "critic": {
                "level": level,
                "detach": True,
                "lr": 0.01,
                "gae_lambda": 1.0,
                "value_clip": None,
            },
        },
        optim={"lr": 1e-6},
        eval={"best_metric": None},
    )
    trainer = Trainer(load_config(config_file(tmp_path / "c.yaml", tree)))
    trainer.fit()
    explained = [
        r["train/critic/explained_variance"]
        for r in read_jsonl(trainer.folder.path / "metrics.jsonl")
    ]
    assert explained[0] == 0 and statistics.mean(explained[-5:]) > 0.3, explained
