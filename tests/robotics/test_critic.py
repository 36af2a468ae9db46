"""PPO at chunk and at action level: the critic's judgement and its loss against loops over episodes, and runs that learn by it.

Run: pytest tests/robotics/test_critic.py
"""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from pathlib import Path
from typing import cast

import pytest
import torch
from safetensors.torch import load_file

from mmrl.algorithms import ReturnSettings
from mmrl.distributed.engines import build_train_engine
from mmrl.distributed.world import World
from mmrl.errors import CheckpointError, ConfigError, NonFiniteError
from mmrl.robotics.config import EmbodiedConfig
from mmrl.robotics.contract import EnvSpec, initial_states
from mmrl.robotics.learning import critic_advantages, robot_learner, scored
from mmrl.robotics.load import load_vla
from mmrl.robotics.rollout import Driver, GroupRequest
from mmrl.robotics.source import EpisodeSource
from mmrl.robotics.vla import VLAPolicy
from mmrl.training.optim import build_optimizer
from mmrl.training.pipeline import ClosedGroup
from mmrl.training.trainer import Trainer
from mmrl.types import Rollout, RolloutGroup, StopReason, Turn
from tests.kits.robot_kit import config_of, make_model, make_vla, observations

PPO = (
    "algorithm.advantage=gae",
    "vla.value_head=true",
    "rl.reward=shaped",
    "algorithm.critic.gamma=0.9",
    "algorithm.critic.gae_lambda=0.7",
)
# of tests.kits.robot_kit.BASE: two actions of two control steps, two dimensions
CHUNK, REPEAT, DIM = 2, 2, 2
# control steps of the episodes: whole decisions, and chunks cut off inside and between actions
LENGTHS = (4, 7, 9, 2)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


def critic(model: Path, level: str) -> tuple[EmbodiedConfig, VLAPolicy]:
    """A policy whose critic says something."""
    vla = make_vla(model, *PPO, f"algorithm.critic.level={level}")
    torch.nn.init.normal_(vla.value_head[2].weight, generator=torch.Generator().manual_seed(1))  # type: ignore[index]
    return config_of(model, *PPO, f"algorithm.critic.level={level}", "train.token_budget=100"), vla


def played(vla: VLAPolicy) -> list[RolloutGroup]:
    """One group: episodes of LENGTHS control steps, the second cut off by its horizon, and one that crashed."""
    seen, g = observations(6), torch.Generator().manual_seed(2)
    spec, state = EnvSpec("tiny", "reach", 12), initial_states("train", 1)[0]
    episodes = []
    for member, length in enumerate(LENGTHS):
        turns = []
        for start in range(0, length, CHUNK * REPEAT):
            choice = vla.act([seen[(member + start) % 6]], [(member, start)])[0]
            valid = tuple(start + c < length for c in range(CHUNK * REPEAT))
            rewards = tuple(
                float(r) if v else 99.0
                for r, v in zip(torch.rand(CHUNK * REPEAT, generator=g), valid, strict=True)
            )
            turns.append(
                Turn(
                    choice.tokens,
                    "",
                    choice.logprobs,
                    StopReason.EOS,
                    0,
                    choice.prompt,
                    choice.values_V,
                    rewards,
                    valid,
                )
            )
        cut = member == 1
        turns[-1] = dataclasses.replace(turns[-1], terminated=not cut, truncated=cut)
        episodes.append(
            Rollout(
                tuple(turns),
                info={"success_once": 1.0, "success_at_end": 1.0},
                final=vla.prompt(seen[5]) if cut else None,
            )
        )
    episodes.append(dataclasses.replace(episodes[0], error="worker died"))
    rollouts = tuple(scored(e, ReturnSettings(kind="shaped")) for e in episodes)
    return [
        RolloutGroup(
            GroupRequest((1, 0, 0), spec, state, len(episodes)).sample, rollouts, key=(1, 0, 0)
        )
    ]


def judged_by_loops(
    vla: VLAPolicy, level: str, episode: Rollout
) -> tuple[list[float], list[float], list[float]]:
    """Advantages, targets and old values of what was executed, before normalisation: from the rewards and values alone."""
    rewards: list[float] = []
    values: list[float] = []
    width = REPEAT if level == "action" else REPEAT * CHUNK
    for decision in episode.turns:
        for number, first in enumerate(range(0, CHUNK * REPEAT, width)):
            ran = [decision.rewards[c] for c in range(first, first + width) if decision.valid[c]]
            if ran:
                rewards.append(sum(ran))
                values.append(decision.values[number])
    after = vla.values([episode.final])[0] if episode.final is not None else 0.0
    deltas = [
        r + 0.9 * v - u for r, u, v in zip(rewards, values, [*values[1:], after], strict=True)
    ]
    advantages = [
        math.fsum((0.9 * 0.7) ** (k - n) * deltas[k] for k in range(n, len(deltas)))
        for n in range(len(deltas))
    ]
    return advantages, [a + v for a, v in zip(advantages, values, strict=True)], values


@pytest.mark.parametrize("level", ["turn", "action"])
def test_the_critics_judgement_is_that_of_plain_loops(model: Path, level: str) -> None:
    config, vla = critic(model, level)
    groups = played(vla)
    found = critic_advantages(config, vla, World(vla.device)).targets(groups)[(1, 0, 0)]
    expected = {
        m: judged_by_loops(vla, level, e)
        for m, e in enumerate(groups[0].rollouts)
        if e.error is None
    }
    steps = {"turn": 7, "action": 12}[level]  # decisions, or actions that at least began
    everything = [a for advantages, _, _ in expected.values() for a in advantages]
    assert len(everything) == steps and [t is not None for t in found] == [True] * len(LENGTHS) + [
        False
    ], "one crashed"
    mean, std = statistics.mean(everything), statistics.stdev(everything)
    for member, (advantages, targets, values) in expected.items():
        mine = found[member]
        assert mine is not None
        for table, wanted in (
            (mine.advantages, [(a - mean) / (std + 1e-5) for a in advantages]),
            (mine.returns, targets),
            (mine.values, values),
        ):
            flat = [x for decision in table for x in decision]
            assert {len(d) for d in table} == {1 if level == "turn" else CHUNK}
            assert flat[: len(wanted)] == pytest.approx(wanted, abs=1e-4)
            assert len(flat) - len(wanted) < CHUNK  # what was never executed stands last
            assert table is mine.values or flat[len(wanted) :] == [0.0] * (len(flat) - len(wanted))


@pytest.mark.check_takes(1)
@pytest.mark.parametrize("level", ["turn", "action"])
@pytest.mark.parametrize("norm", ["sequence_mean", "token_mean"])
def test_the_gradient_is_that_of_plain_loops(model: Path, level: str, norm: str) -> None:
    """Every executed token is pushed by the advantage of its decision, or of its action step, and each value towards its target,
    once for every token it judges. On-policy: ratio 1."""
    config, vla = critic(model, level)
    own = {
        "loss_aggregation": norm,
        "critic": config.algorithm.critic.model_copy(update={"value_clip": None}),
    }
    config = config.model_copy(update={"algorithm": config.algorithm.model_copy(update=own)})
    groups = played(vla)
    judged_G = critic_advantages(config, vla, World(vla.device)).targets(groups)[(1, 0, 0)]
    expected, total, squares = torch.zeros(()), 0.0, 0.0
    for member, episode in enumerate(groups[0].rollouts[:-1]):
        length = sum(-(-sum(d.valid) // REPEAT) for d in episode.turns) * DIM
        weight = 1 / length if norm == "sequence_mean" else 1.0
        total += 1 if norm == "sequence_mean" else length
        _, targets, _ = judged_by_loops(vla, level, episode)
        rows = iter(targets)
        for decision, judged in zip(episode.turns, judged_G[member].advantages, strict=True):  # type: ignore[union-attr]
            out = vla.evaluate([decision.prompt], [decision.token_ids])
            began = [decision.valid[k * REPEAT] for k in range(CHUNK)]
            for n in range(CHUNK * DIM):
                if began[n // DIM]:
                    expected = (
                        expected
                        - weight * judged[n // DIM if level == "action" else 0] * out.logp_N[n]
                    )
            for v in range(len(out.values_M)):
                tokens = DIM * (sum(began) if level == "turn" else began[v])
                if tokens:
                    error = 0.5 * (next(rows) - out.values_M[v]) ** 2
                    squares += weight * tokens * error.item()
                    expected = (
                        expected + config.algorithm.critic.value_coef * weight * tokens * error
                    )
    parameters = [p for _, p in vla.trainable()]
    wanted = torch.autograd.grad(expected / total, parameters, allow_unused=True)
    optimizer = build_optimizer(vla.trainable(), config.optim)
    updater = robot_learner(
        config,
        vla,
        build_train_engine(config, World(vla.device), vla, optimizer),
        World(vla.device),
    )
    taken: list[torch.Tensor | None] = []
    optimizer.register_step_pre_hook(
        lambda *_: taken.extend(None if p.grad is None else p.grad.clone() for p in parameters)
    )
    updater.begin(1)
    for group in groups:
        updater.add(group)
    result = updater.finish()
    norm_found = torch.cat([g.flatten() for g in wanted if g is not None]).norm()
    assert result.grad_norms == [pytest.approx(norm_found.item(), rel=1e-3)]
    scale = min(1.0, config.optim.max_grad_norm / norm_found.item())
    for mine, other in zip(taken, wanted, strict=True):
        if other is not None and other.abs().sum() > 0:
            assert mine is not None
            assert (mine - other * scale).abs().max() < 2e-3 * (other * scale).abs().max()
    assert result.value_stats.count == {"turn": 7, "action": 12}[level]
    assert result.value_stats.loss == pytest.approx(squares, rel=1e-3)


def test_a_critic_that_warms_up_leaves_no_trace_in_the_policys_optimizer(model: Path) -> None:
    """No weight decay, no moments, no count of steps: the policy's first step is that of a fresh AdamW. And a policy term that is
    not finite is left out, not multiplied by 0."""
    _, vla = critic(model, "turn")
    config = config_of(
        model,
        *PPO,
        "algorithm.critic.warmup=2",
        "algorithm.epochs=2",
        "algorithm.kl.coef=0.1",
        "algorithm.entropy.coef=0.01",
        "optim.weight_decay=0.1",
        "optim.eps=1e-12",
        "algorithm.critic.value_clip=null",
    )
    groups = played(vla)
    broken = [
        dataclasses.replace(
            g,
            rollouts=tuple(
                dataclasses.replace(
                    e,
                    turns=tuple(
                        dataclasses.replace(d, logprobs=(float("nan"),) * len(d.logprobs))
                        for d in e.turns
                    ),
                )
                for e in g.rollouts
            ),
        )
        for g in groups
    ]
    optimizer = build_optimizer(vla.trainable(), config.optim)
    updater = robot_learner(
        config,
        vla,
        build_train_engine(config, World(vla.device), vla, optimizer),
        World(vla.device),
    )
    before = {name: p.detach().clone() for name, p in vla.trainable()}
    for step in (1, 2):
        updater.begin(step)
        updater.add(broken[0])
        result = updater.finish()
        assert (
            len(result.grad_norms) == 2
            and math.isfinite(result.grad_norms[0])
            and result.grad_norms[0] > 0
        )
    counted = {id(p) for p in optimizer.state}
    for name, p in vla.trainable():
        assert (
            (id(p) in counted)
            == (not torch.equal(p, before[name]))
            == name.startswith("value_head.")
        ), name
    updater.config = updater.loss.config = config.model_copy(
        update={
            "algorithm": config.algorithm.model_copy(
                update={"epochs": 1, "kl": config.algorithm.kl.model_copy(update={"coef": 0.0})}
            )
        }
    )
    updater.loss.settings = dataclasses.replace(updater.loss.settings, kl_coef=0.0)
    updater.begin(3)
    updater.add(groups[0])
    updater.finish()
    lr, moved = config.optim.lr, 0
    for name, p in vla.trainable():
        if not name.startswith("value_head."):
            largest = ((p - before[name] * (1 - lr * 0.1 * (p.ndim > 1))).abs().max() / lr).item()
            assert largest <= 1.01, (
                f"{name}: the first step of AdamW moves no weight by more than its learning rate"
            )
            moved += largest > 0.5
    assert moved > 10
    updater.engine.lockstep = True  # others would wait inside of a backward: the error comes with the step, which all take
    updater.begin(4)
    updater.add(broken[0])
    with pytest.raises(
        NonFiniteError,
        match=r"the loss is nan in step 4; .*the gradient norm is nan in optimizer step 6",
    ):
        updater.finish()


def test_what_means_nothing_to_the_kind_of_run_is_refused(model: Path) -> None:
    for key, value in (
        ("gamma", 0.9),
        ("gae_lambda", 0.9),
        ("value_coef", 1.0),
        ("value_clip", "null"),
        ("huber_delta", 1.0),
        ("lr", 1e-3),
        ("warmup", 3),
        ("bootstrap", "never"),
        ("level", "action"),
    ):
        with pytest.raises(
            ConfigError,
            match=rf"algorithm\.critic\.{key}: only advantage gae has a critic, found grpo",
        ):
            config_of(model, f"algorithm.critic.{key}={value}")
        config_of(model, *PPO, f"algorithm.critic.{key}={value}")
    for setting, words in (
        ("filter.low=0.1", "with advantage gae groups teach whatever"),
        ("filter.high=0.9", "set both to null"),
        ("dynamic_sampling=true", "a critic judges each turn"),
        ("difficulty=softmax", "advantages come from no group"),
        (
            "advantage_scale=none",
            r"gae is defined with algorithm\.advantage_scale batch, found none",
        ),
        ("reward_aggregation=gdpo", "gdpo normalises by itself"),
        ("critic.level=token", "bins of one decision"),
        ("critic.hidden=64", r"set vla\.value_hidden"),
    ):
        with pytest.raises(ConfigError, match=words):
            config_of(model, *PPO, f"algorithm.{setting}")
        if "critic" not in setting:
            config_of(model, f"algorithm.{setting}")
    with pytest.raises(
        ConfigError, match=r"reward\.shuffle .* have no counterpart in another episode"
    ):
        config_of(model, *PPO, "reward.shuffle=true")
    assert config_of(model, *PPO, "rollout.group_size=1").rollout.group_size == 1, (
        "a critic needs nobody to compare with"
    )
    # the file that a run writes names every key, most with their defaults
    for settings in ((), PPO):
        whole = config_of(model, *settings).model_dump(mode="json")
        assert type(config_of(model)).model_validate(whole).model_dump(mode="json") == whole


class _Asked:
    """Stands where the simulators are: keeps the requests."""

    def __init__(self) -> None:
        self.requests: list[GroupRequest] = []

    def begin_dealing(self) -> None: ...

    def submit(self, request: GroupRequest) -> None:
        self.requests.append(request)


def test_a_place_rolled_out_again_keeps_the_rounds_it_has_left(model: Path) -> None:
    asked = _Asked()
    source = EpisodeSource(
        config_of(model, "train.prompts_per_step=1", "algorithm.max_rounds=3"), cast(Driver, asked)
    )
    decision = played(make_vla(model))[0].rollouts[0].turns[0]

    def judge(*successes: bool) -> ClosedGroup[RolloutGroup] | None:
        request = asked.requests[-1]
        turn = dataclasses.replace(decision, terminated=True)
        return source._judge(
            RolloutGroup(
                request.sample,
                tuple(
                    Rollout((turn,), info={"success_once": won, "success_at_end": won})
                    for won in successes
                ),
                key=request.key,
            )
        )

    source.start(2)
    own = [source._request(2, 0, attempt).state for attempt in range(3)]
    assert len(set(own)) == 3
    assert judge(False, False) is None  # no signal: the place's second state
    first = judge(True, False)
    assert first is not None and first.group is not None
    source.again(first)  # too old: the second state once more
    assert judge(True, True) is None, "one state is left"
    last = judge(False, False)
    assert last is not None and last.group is None
    assert [r.state for r in asked.requests] == [own[0], own[1], own[1], own[2]]
    assert len({r.key for r in asked.requests}) == 4
    record = source.records[2]
    assert (record.kept, record.no_signal, record.empty) == (0, 3, 1)


@pytest.mark.slow
def test_ppo_at_action_level_trains_a_value_for_every_action_step(
    model: Path, tmp_path: Path
) -> None:
    make_vla(model).save(tmp_path / "vla")
    config = config_of(
        tmp_path / "vla",
        *PPO,
        "algorithm.critic.level=action",
        f"dir={tmp_path}",
        "name=run",
        "algorithm.epochs=2",
        "train.steps=3",
        "env.options={tolerance: 0.5, reward: shaped}",
    )
    row = Trainer(config).fit()
    saved = tmp_path / "run" / "checkpoints" / "step_000003"
    head = load_file(str(saved / "value_head.safetensors"))
    assert head["2.weight"].shape[0] == CHUNK and (head["2.weight"].abs().sum(1) > 0).all()
    assert not torch.allclose(head["2.weight"][0], head["2.weight"][1], atol=1e-4), (
        "each step has its own value"
    )
    assert json.loads((saved / "vla.json").read_text())["vla"]["value_steps"] == CHUNK
    assert row["train/grad_norm"] > 0 and math.isfinite(row["train/critic/explained_variance"])
    again = load_vla(config_of(saved, "action.chunk=2"), trainable=False)
    assert (
        again.settings.value_steps == CHUNK
        and len(again.act(observations(1), [(1,)])[0].values_V) == CHUNK
    )


def test_a_critic_of_the_other_level_is_named(model: Path, tmp_path: Path) -> None:
    make_vla(model, *PPO, "algorithm.critic.level=action").save(tmp_path / "saved")
    with pytest.raises(
        ConfigError,
        match=r"has a critic with 2 values for each decision \(vla\.json\), "
        r"algorithm\.critic\.level turn needs 1: set it to action, or start from",
    ):
        load_vla(config_of(tmp_path / "saved", *PPO))
    with pytest.raises(ConfigError, match=r"algorithm\.critic\.level: only advantage gae"):
        config_of(model, "algorithm.critic.level=action")
    described = json.loads((tmp_path / "saved" / "vla.json").read_text())
    described["vla"]["value_steps"] = 1
    (tmp_path / "saved" / "vla.json").write_text(json.dumps(described))
    with pytest.raises(
        CheckpointError,
        match=r"value_head\.safetensors: expected the value head of this model, found another",
    ):
        load_vla(config_of(tmp_path / "saved", *PPO))
