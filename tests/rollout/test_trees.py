"""Tree sampling: what branches share, what they are not asked for again, what they are worth, and what breaks a tree."""

from __future__ import annotations

import itertools
import math
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from pydantic import ValidationError

import mmrl
from mmrl.algorithms import group_advantages, tree_advantages
from mmrl.config import RunConfig, load_config
from mmrl.config.model import TreeConfig
from mmrl.errors import ConfigError
from mmrl.policy.pack import PackItem, pack, pack_turns
from mmrl.robotics.config import EmbodiedConfig
from mmrl.rollout import PrefillOnceEngine, SamplingSettings
from mmrl.rollout.episodes import begin, check_environments, play
from mmrl.rollout.trees import shared_turns, waves
from mmrl.training.group_advantages import GroupAdvantages
from mmrl.training.runlog import rollout_rows
from mmrl.training.trainer import Trainer
from mmrl.types import Rollout, RolloutGroup, Score
from tests.kits.engine_kit import Album, policy, read_jsonl
from tests.rollout.test_episodes import Counting, Play, play_run, rows_of, sample

SAMPLING = SamplingSettings(max_new_tokens=5)
KEY = (3, 1)


class Asked:
    """The engine, and how many answers it was asked for."""

    def __init__(self) -> None:
        self.engine, self.answers = PrefillOnceEngine(policy()), 0

    def generate(self, requests: Any, settings: Any) -> Any:
        self.answers += sum(r.count for r in requests)
        return self.engine.generate(requests, settings)


def grown(
    tree: TreeConfig | None, count: int, task: Any = None, turns: int = 4, key: Any = KEY
) -> tuple[tuple[Rollout, ...], int]:
    p, engine = policy(), Asked()
    episodes = begin(p, sample(turns=turns), task or Play(), count, key)
    kept = None if tree is None else partial(waves, p, tree)
    (rollouts,) = play(p, engine, [episodes], SAMPLING, kept)  # type: ignore[arg-type]
    return rollouts, engine.answers


def written(rollout: Rollout) -> list[tuple[int, ...]]:
    return [t.token_ids for t in rollout.turns]


@pytest.fixture(autouse=True)
def _fresh() -> None:
    Counting.made.clear()


def test_branches_begin_with_turns_of_a_rollout_of_their_tree() -> None:
    tree = TreeConfig(roots=2, rounds=2)
    rollouts, answers = grown(tree, 10)
    assert [r.tree for r in rollouts] == [0, 1] * 5 and [r.shared_turns for r in rollouts[:2]] == [
        0,
        0,
    ]
    assert len({r.shared_turns for r in rollouts[2:]}) > 2, "branches begin at different turns"
    for number, branch in enumerate(rollouts[2:], 2):
        known = rollouts[: 2 if number < 6 else 6]
        count = branch.shared_turns
        sources = [
            s
            for s in known
            if s.tree == branch.tree
            and all(a is b for a, b in zip(s.turns[:count], branch.turns[:count], strict=True))
        ]
        assert sources, "the same objects: what was written is kept in memory once"
        assert branch.turns[count].prompt is sources[0].turns[count].prompt
        assert len(branch.turns) == 4 and branch.error is None and branch.terminated
        assert branch.score is not None
        assert branch.score.value == pytest.approx(sum(t.reward for t in branch.turns))
    shared = sum(r.shared_turns for r in rollouts)
    assert answers == 10 * 4 - shared < 40
    assert [env.closed for env in Counting.made] == [1] * 10
    assert len({tuple(written(r)) for r in rollouts}) == 10, "each goes on with noise of its own"


def test_the_roots_are_the_rollouts_that_there_would_be_without_a_tree() -> None:
    plain, answers = grown(None, 3)
    assert answers == 12 and {r.tree for r in plain} == {None}
    rollouts, _ = grown(TreeConfig(roots=3), 6)
    assert [written(r) for r in rollouts[:3]] == [written(r) for r in plain]
    again, _ = grown(TreeConfig(roots=3), 6)
    assert [written(r) for r in again] == [written(r) for r in rollouts]


def test_a_group_does_not_depend_on_what_grows_beside_it() -> None:
    p, tree = policy(), TreeConfig(roots=1, rounds=3)
    alone, _ = grown(tree, 4)
    groups = [begin(p, sample(turns=n), Play(), 4, key) for n, key in ((2, (9,)), (4, KEY))]
    _, beside = play(p, PrefillOnceEngine(p), groups, SAMPLING, partial(waves, p, tree))
    assert [written(r) for r in beside] == [written(r) for r in alone]


def test_log_probs_are_those_of_training() -> None:
    rollouts, _ = grown(TreeConfig(roots=1, rounds=2), 5)
    turns = [t for r in rollouts for t in r.turns]
    p = policy()
    items = pack_turns([t.prompt for t in turns], [t.token_ids for t in turns])
    assert len(items) == 1 and isinstance(items[0], PackItem), "one packed tree of one question"
    begins = [place[1] if place else 0 for place in items[0].shared]
    assert begins == [r.shared_turns for r in rollouts] and any(begins)
    with torch.no_grad():
        found = p.logp(pack(items)).logp_N
    assert (found - torch.tensor([x for t in turns for x in t.logprobs])).abs().max() < 1e-5


class Moody(Counting):
    """Answers otherwise each time that it is made."""

    number: ClassVar[Any] = itertools.count()

    def reset(self, sample: mmrl.Sample, seed: int) -> mmrl.Observation:
        self.mood = next(self.number)
        return super().reset(sample, seed)

    def step(self, turn: mmrl.Turn) -> mmrl.Outcome:
        found = super().step(turn)
        if found.observation is None:
            return found
        words = [dict(m) for m in found.observation.messages]
        words[0]["content"] = [*words[0]["content"], {"type": "text", "text": f"mood {self.mood}"}]
        return mmrl.Outcome(mmrl.Observation(words, found.observation.images), reward=found.reward)


class MoodyPlay(Play):
    def environment(self, template: mmrl.Template) -> mmrl.Environment:
        return Moody()


def test_an_environment_that_answers_otherwise_fails_its_branches_alone() -> None:
    rollouts, _ = grown(TreeConfig(roots=2), 8, MoodyPlay())
    failed = [r for r in rollouts if r.error]
    assert failed and all(r.error is None for r in rollouts[:2])
    for r in rollouts[2:]:
        assert (r.error is None) == (r.shared_turns == 0 and len(r.turns) == 4)
    assert "found something else after turn 1 in Moody" in str(failed[0].error)
    assert "needs rollout.tree.roots: 0" in str(failed[0].error)
    assert [env.closed for env in Counting.made] == [1] * 8


class Dying(Counting):
    def step(self, turn: mmrl.Turn) -> mmrl.Outcome:
        raise RuntimeError("no display")


class DyingPlay(Play):
    def environment(self, template: mmrl.Template) -> mmrl.Environment:
        return Dying()


def test_where_nothing_was_played_branches_begin_at_the_start() -> None:
    rollouts, answers = grown(TreeConfig(roots=1), 3, DyingPlay())
    assert answers == 3 and all(r.shared_turns == 0 and r.error for r in rollouts)


def test_advantages_within_trees_add_to_those_within_the_group() -> None:
    rewards, trees = [1.0, 0.0, 0.0, 0.5, 1.0, 1.0], [0, 0, 0, 1, 1, 1]
    whole = group_advantages(rewards).tolist()
    root2 = math.sqrt(1 / 3)  # the unbiased standard deviation of (1, 0, 0)
    expected = [(1 - 1 / 3) / root2, -1 / 3 / root2, -1 / 3 / root2]
    root3 = math.sqrt(1 / 12)
    expected += [(0.5 - 5 / 6) / root3, (1 - 5 / 6) / root3, (1 - 5 / 6) / root3]
    found = tree_advantages(rewards, trees)
    assert found == pytest.approx([a + b for a, b in zip(whole, expected, strict=True)], abs=1e-4)
    # one that failed is left out before, with its tree's number
    scores = [Score.combine({"reward": r}, {"reward": 1.0}, parsed=True) for r in rewards]
    scores.append(Score.failure("reward_error: lost", ["reward"]))
    rollouts = tuple(Rollout((), s, tree=t) for s, t in zip(scores, [*trees, 1], strict=True))
    group = RolloutGroup(sample(), rollouts)
    config = run("rollout.group_size=6", "rollout.tree.roots=2")
    (assigned,) = GroupAdvantages(config, None).assign([group]).values()  # type: ignore[arg-type]
    assert assigned == pytest.approx([*found, 0.0])
    # a single tree is the group, which counts once
    assert tree_advantages([1.0, 0.0], [0, 0]) == group_advantages([1.0, 0.0]).tolist()
    # equal rewards within a tree say nothing of it
    assert tree_advantages([1.0, 1.0, 0.0, 0.0], [0, 0, 1, 1], "none") == [0.5, 0.5, -0.5, -0.5]


def run(*settings: str) -> RunConfig:
    return load_config(None, ["data.train=[{task: grounding, path: x}]", *settings])


@pytest.mark.parametrize("within", [True, False])
def test_a_run_takes_them(within: bool) -> None:
    config = run(
        "rollout.group_size=6", "rollout.tree.roots=2", f"rollout.tree.within={within}".lower()
    )
    rollouts, _ = grown(config.rollout.tree, 6)
    group = RolloutGroup(sample(turns=4), rollouts)
    rewards = list(group.rewards_G)
    (found,) = GroupAdvantages(config, None).assign([group]).values()  # type: ignore[arg-type]
    assert len(set(rewards)) > 1
    expected = (
        tree_advantages(rewards, [0, 1] * 3) if within else group_advantages(rewards).tolist()
    )
    assert found == pytest.approx(expected)
    rows = rollout_rows([group], "abs_resized", 1, 5, {})
    assert [row["tree"] for row in rows] == [0, 1] * 3
    assert [row["shared_turns"] for row in rows] == [r.shared_turns for r in rollouts]
    share = shared_turns([group], lambda found: found)["train/tree/shared_turns"]
    assert share == sum(r.shared_turns for r in rollouts) / 24


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        (["rollout.tree.roots=3"], "found 8 with 3 roots and 1 rounds; for example 6 or 9"),
        (["rollout.tree.roots=8"], "at least one branch, found 8 with 8 roots"),
        (["rollout.tree.roots=2", "rollout.tree.rounds=2"], "found 8 with 2 roots and 2 rounds"),
        (
            ["rollout.tree.roots=2", "algorithm.advantage_scale=batch"],
            "set them, or rollout.tree.within: false",
        ),
        (
            ["rollout.tree.roots=2", "algorithm.replay.per_group=1"],
            "expected algorithm.replay.per_group 0 with rollout.tree",
        ),
    ],
)
def test_settings_that_make_no_tree_are_refused(settings: list[str], why: str) -> None:
    with pytest.raises(ConfigError) as refused:
        run(*settings)
    assert why in str(refused.value)


def test_tasks_of_one_turn_grow_no_trees() -> None:
    config = run("rollout.tree.roots=2")
    with pytest.raises(ConfigError, match=r"whose branches begin at turns, found none"):
        check_environments(config, [(Album(), {"album"})])
    check_environments(config, [(Play(), {"play"})])


def test_simulators_grow_no_trees() -> None:
    with pytest.raises(ValidationError, match=r"rollout\.tree means nothing .* not played again"):
        EmbodiedConfig.model_validate({"rollout": {"tree": {"roots": 2}}})


@pytest.mark.slow
def test_a_run_on_trees_learns_and_resumes_as_if_undisturbed(tmp_path: Path) -> None:
    settings = ("rollout.group_size=4", "rollout.tree.roots=2", "data.eval=[]", "eval.samples=0")
    whole = Trainer(play_run(tmp_path, "whole", *settings)).fit()
    assert whole["train/grad_norm"] > 0 and 0 < whole["train/tree/shared_turns"] < 0.5
    logged = read_jsonl(tmp_path / "whole" / "rollouts" / "step_000002.jsonl")
    assert {row["tree"] for row in logged} == {0, 1} and all("shared_turns" in r for r in logged)
    Trainer(play_run(tmp_path, "parts", *settings, "train.steps=1")).fit()
    Trainer(play_run(tmp_path, "parts", *settings), resume=True).fit()
    assert rows_of(tmp_path, "whole") == rows_of(tmp_path, "parts")
