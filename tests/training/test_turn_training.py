"""Learning turn by turn: what turns answer for, which are trained on, in the estimator, the loss and whole runs.

Run: pytest tests/training/test_turn_training.py
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import numpy as np
import pytest
import torch

import mmrl
import mmrl.training.learner as learner_module
from mmrl.config import RunConfig, load_config
from mmrl.distributed.engines import build_train_engine
from mmrl.distributed.world import World
from mmrl.environment import TurnRewards
from mmrl.errors import ConfigError
from mmrl.policy.policy import Policy
from mmrl.registry import task_from_spec
from mmrl.rollout import PrefillOnceEngine, SamplingSettings
from mmrl.rollout.episodes import begin, play
from mmrl.training.group_advantages import GroupAdvantages
from mmrl.training.learner import Learner
from mmrl.training.metrics import update_metrics
from mmrl.training.optim import build_policy_optimizer
from mmrl.training.sequences import TrainingSample, TrainingTurn
from mmrl.training.trainer import Trainer
from mmrl.training.turn_selection import select_turns
from mmrl.types import Rollout, RolloutGroup, Sample, Score, StopReason, Turn
from tests.distributed.test_distributed import CLOSE, compare, work
from tests.kits.engine_kit import (
    album_data,
    config_file,
    fresh_policy,
    read_jsonl,
    small_run,
)

KEY = (1, 0, 0)
TURN = "algorithm.turns.advantage=turn"


def settings(*overrides: str) -> RunConfig:
    return load_config(None, list(overrides))


def rollout(*paid: float, beyond: float = 0.0, **facts: Any) -> Rollout:
    """Turns that an environment paid so much, and a score of their sum and `beyond`."""
    turns = tuple(
        Turn((1, 2), "x", (0.0, 0.0), StopReason.EOS, rewards=(r,), valid=(True,)) for r in paid
    )
    value = sum(paid) + beyond
    return Rollout(turns, Score.combine({"reward": value}, {"reward": 1.0}, parsed=True), **facts)


def group(*rollouts: Rollout) -> RolloutGroup:
    return RolloutGroup(Sample("s", "album", "a", "?", None), rollouts, key=KEY)


def targets(config: RunConfig, *rollouts: Rollout) -> list[Any]:
    """The advantages of each rollout's turns; None where it is not trained on."""
    found = GroupAdvantages(config, World(torch.device("cpu"))).targets([group(*rollouts)])[KEY]
    return [None if t is None else [a for (a,) in t.advantages] for t in found]


# advantages


def test_a_turn_answers_for_what_came_with_it_and_after_it() -> None:
    """Three rollouts; the last also has an outcome that no turn was paid for."""
    played = rollout(0.5, 0.0), rollout(0.0, 0.5), rollout(0.0, 0.0, beyond=1.0)
    found = targets(settings(TURN, "algorithm.turns.gamma=0.5"), *played)
    for index, returns in enumerate(([0.5, 0.25, 0.5], [0.0, 0.5, 1.0])):
        mean, std = statistics.mean(returns), statistics.stdev(returns)
        assert [row[index] for row in found] == pytest.approx(
            [(r - mean) / (std + 1e-6) for r in returns], rel=1e-5
        )
    # by whole rollouts the first two are alike, and so are all of their turns
    whole = targets(settings(), *played)
    assert whole[0] == whole[1] and all(len(set(row)) == 1 for row in whole)


def test_the_configuration_says_what_is_compared() -> None:
    played = rollout(0.0, 1.0), rollout(0.5, 0.25), rollout(0.75)
    pooled = targets(
        settings(TURN, "algorithm.turns.normalise=all_turns", "algorithm.advantage_scale=none"),
        *played,
    )
    mean = statistics.mean([1.0, 1.0, 0.75, 0.25, 0.75])
    assert pooled == [
        pytest.approx([1 - mean, 1 - mean]),
        pytest.approx([0.75 - mean, 0.25 - mean]),
        pytest.approx([0.75 - mean]),
    ]
    others = targets(
        settings(TURN, "algorithm.advantage=rloo", "algorithm.advantage_scale=none"), *played
    )
    assert others[0] == pytest.approx([1 - 0.75, 1 - 0.25])
    harder = settings(TURN, "algorithm.difficulty=univg_exp")
    plain, weighted = targets(settings(TURN), *played), targets(harder, *played)
    assert weighted[0] == pytest.approx([np.exp(1 - 0.8333333) * a for a in plain[0]])


def test_what_failed_is_compared_with_nothing() -> None:
    played = rollout(0.5, 0.0), rollout(0.0, 0.25)
    broken = dataclasses.replace(rollout(9.0, 9.0), score=Score.failure("reward_error: broken"))
    crashed = dataclasses.replace(broken, error="reward_error: the browser died")
    found = targets(settings(TURN), played[0], broken, crashed, played[1])
    assert [found[0], found[3]] == targets(settings(TURN), *played)
    assert found[1] == [0.0, 0.0] and found[2] is None


def test_with_one_turn_each_they_are_those_of_rollouts_bit_for_bit() -> None:
    played = [rollout(float(r), beyond=0.1 * n) for n, r in enumerate((0.3, 0.1, 0.7, 0.1))]
    for more in ([], ["algorithm.advantage_scale=none"], ["algorithm.difficulty=univg_exp"]):
        for normalise in ("turn_index", "all_turns"):
            config = settings(TURN, f"algorithm.turns.normalise={normalise}", *more)
            assert targets(config, *played) == targets(settings(*more), *played)


def test_the_control_experiment_leaves_turns_nothing_of_their_own() -> None:
    """reward.shuffle: with another rollout's reward what a rollout's own turns were paid would tell the truth again."""
    played = [rollout(0.1 * n, 0.05 * n * n) for n in range(4)]
    config = settings(TURN, "reward.shuffle=true")
    found = targets(config, *played)
    assert found == targets(settings("reward.shuffle=true"), *played)
    assert found != targets(settings(TURN), *played)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            [TURN, "algorithm.advantage=pass_k"],
            "turns.advantage turn does not go with algorithm.advantage pass_k: it pays the best",
        ),
        (
            [TURN, "algorithm.advantage=opo", "algorithm.advantage_scale=none"],
            "does not go with algorithm.advantage opo: its baseline weighs rollouts",
        ),
        (
            [TURN, "algorithm.reward_aggregation=gdpo"],
            "does not go with algorithm.reward_aggregation gdpo: reward parts are of whole rollouts",
        ),
        ([TURN, "algorithm.advantage_scale=batch"], "advantage_scale batch: it is the spread of"),
        ([TURN, "algorithm.advantage_scale=ema"], "advantage_scale ema: it is the spread of"),
        (
            [TURN, "algorithm.advantage=gae"],
            "algorithm.turns does not go with algorithm.advantage gae: a critic judges each turn",
        ),
        (
            ["algorithm.turns.keep_entropy=0.8", "algorithm.advantage=gae"],
            "algorithm.turns does not go with algorithm.advantage gae",
        ),
        (
            [TURN, "rollout.tree.roots=2", "rollout.group_size=4"],
            "rollout.tree: a turn that several",
        ),
        (
            [TURN, "algorithm.offline.per_group=1"],
            "offline.per_group: a demonstration is one answer",
        ),
        ([TURN, "algorithm.contrast.kind=shuffle"], "contrast: its bonus is paid to an answer"),
        (
            ["algorithm.turns.keep_entropy=0.8", "algorithm.replay.per_group=1"],
            "keep_entropy 0.8 does not go with algorithm.replay.per_group: the policy of now",
        ),
        (
            ["algorithm.turns.gamma=0.9"],
            "turns.gamma: only advantages of single turns have returns",
        ),
        (["algorithm.turns.keep_entropy=0"], "greater than 0"),
        ([TURN, "algorithm.turns.gamma=1.5"], "less than or equal to 1"),
        (["algorithm.turns.advantage=turns"], "'rollout' or 'turn'"),
    ],
)
def test_what_cannot_be_combined_is_refused_with_the_reason(
    overrides: list[str], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        settings(*overrides)
    kept = settings(TURN, "algorithm.turns.gamma=0.9", "algorithm.replay.per_group=1")
    assert kept.algorithm.turns.changed() == ["advantage", "gamma"]


# the choice by entropy


def sample_of(
    number: int, entropies: Sequence[float | None], in_loss: bool = True, place: int = 0
) -> TrainingSample:
    """A rollout whose turn t has t + 1 tokens."""
    prompt: Any = None
    turns = tuple(
        TrainingTurn(
            prompt,
            (1,) * (t + 1),
            (0.0,) * (t + 1),
            np.ones(t + 1, bool),
            np.ones(t + 1, np.float32),
            1.0,
            "a",
            "s",
            in_loss,
            entropy=entropy,
        )
        for t, entropy in enumerate(entropies)
    )
    tokens = float(sum(len(t.tokens) for t in turns)) if in_loss else 0.0
    return TrainingSample(((1, place, 0), number), turns, tokens)


def test_denominators_are_of_the_turns_that_are_left() -> None:
    samples = [
        sample_of(0, [0.9, 0.1, 0.8]),
        sample_of(1, [0.2]),
        sample_of(2, [9.0, 9.0], in_loss=False),
        sample_of(0, [0.1, 0.2], place=1),
    ]
    for aggregation, weights, denominators in (
        ("token_mean", (1.0, 1.0), (4.0, 0.0, 0.0, 2.0)),
        ("sequence_mean", (1 / 4, 1 / 2), (1.0, 0.0, 0.0, 1.0)),
        ("dr_grpo", (1.0, 1.0), (50.0, 0.0, 0.0, 50.0)),
    ):
        algorithm = settings(
            "algorithm.turns.keep_entropy=0.5", f"algorithm.loss_aggregation={aggregation}"
        ).algorithm
        found, told = select_turns(samples, algorithm, 50)
        # half of four turns, and half of two: what is masked anyway is not counted
        assert [[t.in_loss for t in s.turns] for s in found] == [
            [True, False, True],
            [False],
            [False, False],
            [False, True],
        ]
        assert tuple(s.denominator for s in found) == denominators
        assert [found[i].turns[0].scale for i in (0, 3)] == pytest.approx(weights)
        assert found[2] is samples[2]
        assert (told.turns, told.kept, told.groups) == (6, 3, 2)
        assert told.metrics == {
            "train/turns/kept": 0.5,
            "train/turns/entropy_threshold": pytest.approx((0.8 + 0.2) / 2),
        }


def test_groups_of_answers_are_kept_whole() -> None:
    samples = [sample_of(n, [0.1 * n]) for n in range(4)]
    algorithm = settings("algorithm.turns.keep_entropy=0.5").algorithm
    found, told = select_turns(samples, algorithm, 50)
    assert all(new is old for new, old in zip(found, samples, strict=True))
    assert told.metrics == {"train/turns/kept": 1.0}


# the loss


class Echo(mmrl.Environment):
    """Two turns, or one where the first has an even number of characters. Each is paid for its distinct characters, and once more
    when all is over."""

    max_turns: ClassVar[int] = 2

    def reset(self, sample: Sample, seed: int) -> mmrl.Observation:
        self.first = True
        return mmrl.Observation([{"role": "user", "content": f"say {sample.id}"}])

    def step(self, turn: mmrl.Turn) -> mmrl.Outcome:
        ends, self.first = not self.first or len(turn.text) % 4 == 0, False
        reward = len(set(turn.text)) / 100
        if ends:
            return mmrl.Outcome(reward=reward, terminated=True)
        return mmrl.Outcome(
            mmrl.Observation([{"role": "user", "content": "and now"}]), reward=reward
        )

    async def process_rewards(self, turns: Sequence[Turn]) -> TurnRewards:
        return TurnRewards([len(t.token_ids) / 100 for t in turns])


def groups_of(p: Policy, count: int = 2, size: int = 4) -> list[RolloutGroup]:
    task = task_from_spec(f"{Path(__file__).resolve()}:Echo", {})
    samples = [Sample(f"s{n}", task.name, "a", "?", None) for n in range(count)]
    episodes = [begin(p, s, task, size, (1, n, 0)) for n, s in enumerate(samples)]
    played = play(p, PrefillOnceEngine(p), episodes, SamplingSettings(max_new_tokens=5))
    return [
        RolloutGroup(s, rollouts, key=(1, n, 0))
        for n, (s, rollouts) in enumerate(zip(samples, played, strict=True))
    ]


def learner_of(config: RunConfig, p: Policy) -> Learner:
    world = World(torch.device("cpu"))
    return Learner(
        config,
        p,
        build_train_engine(config, world, p, build_policy_optimizer(p, config.optim)),
        world,
        GroupAdvantages(config, world),
        longest=10,
    )


def entropies_alone(p: Policy, rollouts: Sequence[Rollout]) -> list[list[float]]:
    """Mean entropy of each turn, from its logits in a forward of its own, without any packing."""
    found = []
    for r in rollouts:
        found.append([])
        for turn in r.turns:
            ids = torch.cat([turn.prompt.ids_P, torch.tensor(turn.token_ids)])[None]
            with torch.no_grad():
                logits = p.model(input_ids=ids).logits[0, turn.prompt.length - 1 : -1].double()
            logp = logits.log_softmax(-1)
            found[-1].append(float(-(logp.exp() * logp).sum(-1).mean()))
    return found


def chosen(entropies: Sequence[Sequence[float]], share: float) -> list[list[bool]]:
    """The largest, one after the other."""
    left = {(g, t): e for g, row in enumerate(entropies) for t, e in enumerate(row)}
    number = int(np.ceil(round(share * len(left), 6)))
    kept = set()
    for _ in range(number):
        best = max(left, key=lambda place: left[place])
        kept.add(best)
        del left[best]
    return [[(g, t) in kept for t in range(len(row))] for g, row in enumerate(entropies)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loss_aggregation", "budget", "level"),
    [("token_mean", 16384, "token"), ("sequence_mean", 60, "sequence"), ("dr_grpo", 60, "token")],
)
def test_the_gradient_is_that_of_plain_loops_over_the_kept_turns(
    loss_aggregation: str, budget: int, level: str
) -> None:
    config = settings(
        TURN,
        "algorithm.turns.gamma=0.5",
        "algorithm.turns.keep_entropy=0.5",
        f"algorithm.loss_aggregation={loss_aggregation}",
        f"algorithm.importance_sampling_level={level}",
        f"train.token_budget={budget}",
        "train.prompts_per_step=2",
    )
    p = fresh_policy()
    groups = groups_of(p)
    assert {len(r.turns) for g in groups for r in g.rollouts} == {1, 2}
    learner = learner_of(config, p)
    assigned = learner.advantages.targets(groups)
    expected, total = torch.zeros(()), 0.0
    other_choice = False
    for g in groups:
        entropies = entropies_alone(p, g.rollouts)
        kept = chosen(entropies, 0.5)
        surprise = [[-statistics.mean(t.logprobs) for t in r.turns] for r in g.rollouts]
        other_choice = other_choice or chosen(surprise, 0.5) != kept
        for r, keeps, told in zip(g.rollouts, kept, assigned[g.key], strict=True):
            assert told is not None
            tokens = sum(len(t.token_ids) for t, k in zip(r.turns, keeps, strict=True) if k)
            total += {
                "token_mean": tokens,
                "sequence_mean": tokens > 0,
                "dr_grpo": 10 * (tokens > 0),
            }[loss_aggregation]
            for turn, keep, (advantage,) in zip(r.turns, keeps, told.advantages, strict=True):
                if keep:
                    logp_N = p.evaluate([turn.prompt], [turn.token_ids]).logp_N
                    weight = 1 / tokens if loss_aggregation == "sequence_mean" else 1.0
                    expected = expected - weight * advantage * logp_N.sum()
    assert other_choice, "log-probs of what was drawn are no entropies: they choose other turns"
    parameters = [q for _, q in p.trainable()]
    wanted = torch.autograd.grad(expected / total, parameters, allow_unused=True)
    taken: list[torch.Tensor | None] = []
    learner.engine.optimizer.register_step_pre_hook(  # type: ignore[attr-defined]
        lambda *_: taken.extend(None if q.grad is None else q.grad.clone() for q in parameters)
    )
    result = learner.run(groups, 1)
    norm = float(torch.cat([x.flatten() for x in wanted if x is not None]).norm())
    assert norm > 0 and result.grad_norms == [pytest.approx(norm, rel=1e-4)]
    scale = min(1.0, config.optim.max_grad_norm / norm)
    for mine, theirs in zip(taken, wanted, strict=True):
        if theirs is not None and mine is not None:
            assert (mine - scale * theirs).abs().max() < 1e-4 * norm
    assert result.denominator == total


@pytest.mark.slow
def test_one_turn_each_trains_as_ever_bit_for_bit() -> None:
    """Both settings, where no rollout has a second turn: the same weights as without them."""
    weights = []
    for overrides in (
        [],
        [TURN, "algorithm.turns.gamma=0.5"],
        [TURN, "algorithm.turns.normalise=all_turns", "algorithm.turns.keep_entropy=0.3"],
    ):
        p = fresh_policy()
        groups = [
            dataclasses.replace(
                g,
                rollouts=tuple(
                    dataclasses.replace(
                        r,
                        turns=r.turns[:1],
                        score=Score.combine({"r": 0.1 * n}, {"r": 1.0}, parsed=True),
                    )
                    for n, r in enumerate(g.rollouts)
                ),
            )
            for g in groups_of(p)
        ]
        learner_of(settings("train.prompts_per_step=2", *overrides), p).run(groups, 1)
        weights.append([q.detach().clone() for _, q in p.trainable()])
    before = [q for _, q in fresh_policy().trainable()]
    assert not all(torch.equal(a, b) for a, b in zip(weights[0], before, strict=True))
    for other in weights[1:]:
        assert all(torch.equal(a, b) for a, b in zip(weights[0], other, strict=True))


# runs


def run_settings(folder: Path, name: str, steps: int = 2, **algorithm: Any) -> RunConfig:
    rows = folder / "rows.jsonl"
    rows.write_text("".join(json.dumps({"id": f"r{i}"}) + "\n" for i in range(3)))
    tree = small_run(
        folder / "runs",
        str(rows),
        name=name,
        algorithm={"dynamic_sampling": False, **algorithm},
        eval={"every": 0},
        train={"steps": steps, "token_budget": 400},
        rollout={"group_size": 4},
        optim={"lr": 1e-4},  # not so far that ratios are clipped
    )
    tree["data"]["train"] = [{"task": f"{Path(__file__).resolve()}:Echo", "path": str(rows)}]
    return load_config(config_file(folder / f"{name}-{steps}.yaml", tree))


@pytest.mark.slow
def test_a_run_trains_on_the_turns_of_high_entropy_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two optimizer steps per step, two steps: the gradient of each token's log-prob is exactly 0 in turns that were left out, and
    in no other. A run that is cut and resumed is the same one."""
    turns = {"advantage": "turn", "gamma": 0.9, "keep_entropy": 0.5}
    evaluate, seen = Policy.evaluate, []

    def noting(self: Policy, prompts: Any, tokens: Any, *more: Any, **options: Any) -> Any:
        out = evaluate(self, prompts, tokens, *more, **options)
        if torch.is_grad_enabled():
            out.logp_N.retain_grad()
        seen.append((list(tokens), out))
        return out

    monkeypatch.setattr(Policy, "evaluate", noting)
    trainer = Trainer(run_settings(tmp_path, "whole", turns=turns, minibatches=3))
    played: list[RolloutGroup] = []
    prepare = Learner._train_on_all

    def keeping(self: Learner, groups: Any, result: Any) -> None:
        played.extend(groups)
        prepare(self, groups, result)

    monkeypatch.setattr(Learner, "_train_on_all", keeping)
    trainer.fit()
    monkeypatch.undo()
    rows = read_jsonl(trainer.folder.path / "metrics.jsonl")
    assert len(rows) == 2 and len(played) == 6
    measured = [(tokens, out) for tokens, out in seen if not out.logp_N.requires_grad]
    trained = [(tokens, out) for tokens, out in seen if out.logp_N.requires_grad]
    # of every turn of both steps: its mean entropy, and the gradient of its log-probs
    entropy: dict[tuple[int, ...], list[float]] = {}
    for tokens, out in measured:
        for written, piece in zip(tokens, out.entropy_N.split(list(map(len, tokens))), strict=True):
            entropy.setdefault(written, []).append(float(piece.double().mean()))
    gradients = {
        written: piece
        for tokens, out in trained
        for written, piece in zip(
            tokens, out.logp_N.grad.split(list(map(len, tokens))), strict=True
        )
    }
    told = [t.token_ids for g in played for r in g.rollouts for t in r.turns]
    assert len(set(told)) == len(told) == len(gradients), "no two turns are alike here"
    left_out = 0
    thresholds: list[float] = []
    for g in played:
        table = [[entropy[t.token_ids][0] for t in r.turns] for r in g.rollouts]
        kept = chosen(table, 0.5)
        flat = list(itertools.chain(*kept))
        assert sum(flat) == -(-len(flat) // 2)
        inside = [e for e, k in zip(itertools.chain(*table), flat, strict=True) if k]
        thresholds.append(min(inside))
        (assigned,) = GroupAdvantages(trainer.config, trainer.world).targets([g]).values()
        for r, keeps, learns in zip(g.rollouts, kept, assigned, strict=True):
            for t, keep, (advantage,) in zip(r.turns, keeps, learns.advantages, strict=True):
                moved = gradients[t.token_ids] != 0
                left_out += not keep and advantage != 0
                # alone at its index a turn learns nothing, kept or not
                assert bool(moved.all()) if keep and advantage else not bool(moved.any())
    assert left_out >= 6
    for number, row in enumerate(rows):
        here = played[3 * number : 3 * number + 3]
        sizes = [sum(len(r.turns) for r in g.rollouts) for g in here]
        assert row["train/turns/kept"] == pytest.approx(sum(-(-n // 2) for n in sizes) / sum(sizes))
        assert row["train/turns/entropy_threshold"] == pytest.approx(
            statistics.mean(thresholds[3 * number : 3 * number + 3])
        )
    cut = Trainer(run_settings(tmp_path, "cut", steps=1, turns=turns, minibatches=3))
    cut.fit()
    on = Trainer(run_settings(tmp_path, "cut", turns=turns, minibatches=3), resume=True)
    on.fit()
    again = read_jsonl(on.folder.path / "metrics.jsonl")
    for key in (
        "train/loss",
        "train/grad_norm",
        "train/turns/kept",
        "train/turns/entropy_threshold",
    ):
        assert [row[key] for row in again] == [row[key] for row in rows]


def test_it_is_refused_where_no_rollout_has_several_turns(tmp_path: Path) -> None:
    config = run_settings(tmp_path, "album", turns={"keep_entropy": 0.8})
    path = album_data(tmp_path / "d", [[]])
    config.data.train[0].task = small_run(tmp_path, "x")["data"]["train"][0]["task"]
    config.data.train[0].path = path
    with pytest.raises(ConfigError, match=r"for algorithm\.turns \(keep_entropy\), .* found none"):
        Trainer(config)


# several processes


class Uneven(Echo):
    """Rollouts of one to three turns. 'r0' is cut off, all of it masked; 'r1' has nothing to show: its place stays empty; those of
    'r2' have one turn."""

    max_turns: ClassVar[int] = 3

    def reset(self, sample: Sample, seed: int) -> mmrl.Observation:
        if sample.id == "r1":
            raise RuntimeError("nothing here")
        self.name, self.number = sample.id, 0
        return super().reset(sample, seed)

    def step(self, turn: mmrl.Turn) -> mmrl.Outcome:
        self.number += 1
        ends = self.number == 3 or self.name == "r2" or len(turn.text) % 3 == 0
        reward = len(set(turn.text)) / 100
        if ends and self.name != "r0":
            return mmrl.Outcome(reward=reward, terminated=True)
        shown = mmrl.Observation([{"role": "user", "content": f"and now {self.number}"}])
        return mmrl.Outcome(shown, reward=reward)


PASSES: dict[str, dict[str, Any]] = {
    "one step": {"turns": {"advantage": "turn", "gamma": 0.9, "keep_entropy": 0.5}},
    "steps": {
        "turns": {"advantage": "turn", "normalise": "all_turns", "keep_entropy": 0.3},
        "minibatches": 5,  # of one group at most: a process has it, or nothing
        "loss_aggregation": "sequence_mean",
    },
}
ENGINES = ("ddp", "fsdp2")
AHEAD = ["engine.generator.kind=process", "schedule.kind=async", "schedule.wave=1"]


def uneven_run(folder: Path, algorithm: dict[str, Any]) -> str:
    """Two steps of five groups of eight, in micro-batches of a few rollouts. Those that process 1 of two has in the second are 'r0'
    and 'r1': it has no turn to keep."""
    rows = folder / "rows.jsonl"
    rows.parent.mkdir(parents=True)
    rows.write_text("".join(json.dumps({"id": f"r{i}"}) + "\n" for i in range(5)))
    tree = small_run(
        folder / "runs",
        str(rows),
        seed=9,
        algorithm={"dynamic_sampling": False, "mask_rollouts": ["truncated"], **algorithm},
        eval={"every": 0, "best_metric": None},
        train={"prompts_per_step": 5, "token_budget": 200, "log_rollouts": 9, "keep_last": 9},
        # at 1 turns hardly differ in entropy
        rollout={"group_size": 8, "temperature": 0.5},
        optim={"lr": 0.001},
    )
    tree["data"]["train"] = [{"task": f"{Path(__file__).resolve()}:Uneven", "path": str(rows)}]
    return config_file(folder / "c.yaml", tree)


def train_and_keep(path: str, overrides: list[str]) -> None:
    """A run, a job of tests/kits/process_worker.py. What each process trains on is written beside the run: by step its groups, and
    the entropies of their turns, by rollout."""
    config = load_config(path, overrides)
    kept: list[tuple[list[RolloutGroup], dict[Any, list[float | None]]]] = []
    train_on_all, select = Learner._train_on_all, learner_module.select_turns

    def training(self: Learner, groups: Any, result: Any) -> None:
        kept.append((list(groups), {}))
        train_on_all(self, groups, result)

    def selecting(samples: Any, *more: Any) -> Any:
        kept[-1][1].update({s.place: [t.entropy for t in s.turns] for s in samples})
        return select(samples, *more)

    with (
        mock.patch.object(Learner, "_train_on_all", training),
        mock.patch.object(learner_module, "select_turns", selecting),
    ):
        trainer = Trainer(config)
        trainer.fit()
    torch.save(kept, trainer.folder.path.with_name(f"{config.name}-{os.environ['RANK']}.pt"))


@pytest.fixture(scope="module")
def uneven(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of the runs of two processes, which are made in one launch; their configuration lies beside them."""
    folder = tmp_path_factory.mktemp("uneven")
    configs = {name: uneven_run(folder / name, section) for name, section in PASSES.items()}
    jobs: list[list[Any]] = [
        ["tests.kits.process_worker:train", config, [f"name={engine}", f"engine.train={engine}"]]
        for config in configs.values()
        for engine in ENGINES
    ]
    ahead = ["name=ahead", "engine.train=fsdp2", *AHEAD]
    jobs.append([f"{__name__}:train_and_keep", configs["one step"], ahead])
    work(folder, jobs)
    return {name: Path(config).with_name("runs") for name, config in configs.items()}


@pytest.mark.slow
@pytest.mark.parametrize("name", PASSES)
def test_two_processes_choose_the_turns_of_one(name: str, uneven: dict[str, Path]) -> None:
    one = Trainer(load_config(str(uneven[name].with_name("c.yaml"))))
    one.fit()
    told = read_jsonl(one.folder.path / "rollouts" / "step_000002.jsonl")
    places = {row["key"][1]: row["sample"]["id"] for row in told}
    assert [places.get(n) for n in (0, 2, 4)] == ["r2", "r3", "r4"] and places[1] == "r0", places
    for row in read_jsonl(one.folder.path / "metrics.jsonl"):
        assert 0 < row["train/turns/kept"] < 1 and row["train/grad_norm"] > 0
    for engine in ENGINES:
        compare(one, uneven[name] / engine)


@pytest.mark.slow
def test_turns_of_older_weights_are_chosen_by_the_weights_that_are_trained(
    uneven: dict[str, Path],
) -> None:
    """Two sharded processes with a generator; one process makes the same of the groups that they trained on."""
    config = load_config(str(uneven["one step"].with_name("c.yaml")), AHEAD)
    run = uneven["one step"] / "ahead"
    ranks = [torch.load(f"{run}-{rank}.pt", weights_only=False) for rank in (0, 1)]
    paths = [config.model.path, *(str(run / f"checkpoints/step_{n:06d}") for n in (1, 2))]
    policies = [fresh_policy(path=path) for path in paths]
    alone = fresh_policy(path=config.model.path)
    learner, ages = learner_of(config, alone), set()
    for step, row in enumerate(read_jsonl(run / "metrics.jsonl"), 1):
        shares = [kept[step - 1] for kept in ranks]
        groups = sorted((g for share, _ in shares for g in share), key=lambda g: g.key)
        assert len({g.key for g in groups}) == 4 and all(share for share, _ in shares)
        assert all(len(g.rollouts) == 8 for g in groups), "groups are dealt whole"
        entropies = shares[0][1] | shares[1][1]
        for g in groups:
            turns = [t for r in g.rollouts for t in r.turns]
            used = [e for n in range(8) for e in entropies[g.key, n]]
            sizes = [len(t.token_ids) for t in turns]
            with torch.no_grad():
                said = [
                    p.evaluate([t.prompt for t in turns], [t.token_ids for t in turns], 0.5)
                    for p in policies
                ]
            logp = [out.logp_N.split(sizes) for out in said]
            entropy = [out.entropy_N.split(sizes) for out in said]
            for n, t in enumerate(turns):
                wrote, age = torch.tensor(t.logprobs), step - t.policy_version
                ages.add(age)
                assert (logp[t.policy_version - 1][n] - wrote).abs().max() < 1e-4
                assert age == 0 or (logp[step - 1][n] - wrote).abs().max() > 1e-2
                assert used[n] == pytest.approx(float(entropy[step - 1][n].mean()), abs=1e-4)
        alone.version = step
        found = update_metrics(learner.run(groups, step))
        for key in found.keys() - {"train/tokens/packed"}:
            gap = "logprob_gap" in key and row[key] is not None
            assert gap or row[key] == (
                found[key] if found[key] is None else pytest.approx(found[key], **CLOSE)
            ), key
    assert ages == {0, 1}
    first, last = (dict(policies[n].model.named_parameters()) for n in (0, 2))
    mine = dict(alone.model.named_parameters())
    moved, apart = (
        torch.stack([(last[n] - other[n]).norm() for n in last]).norm() for other in (first, mine)
    )
    assert moved > 0 and apart < 1e-3 * moved, (float(apart), float(moved))
