"""Tree sampling: some rollouts of a group are played from the start, the others branch from a turn of those (`rollout.tree`).

    rollouts = play(policy, engine, groups, sampling, waves=partial(waves, policy, config.rollout.tree))

Tree-GRPO (Ji et al. 2025, arXiv 2509.21240, section 3.2): `roots` rollouts begin a tree each; in each of `rounds` rounds every tree
grows by equally many branches, from turns drawn among those of its rollouts. What comes before the branch is not written again, so
that a group of G rollouts costs fewer tokens; rewards of rollouts that part at a turn say what that turn was worth.

A branch has an environment of its own, reset like all of the group and shown the same turns. It must show what it showed then: one
that answers otherwise fails the rollout. Noise belongs to the place in the group, as without a tree.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from mmrl.config.model import TreeConfig
from mmrl.errors import DataError
from mmrl.policy.policy import Policy
from mmrl.rollout.episodes import Episode, Spent, act
from mmrl.types import RolloutGroup

__all__ = ["shared_turns", "waves"]

_BRANCH = 5  # tells the numbers that choose branches from those of samples


def waves(
    policy: Policy,
    tree: TreeConfig,
    groups: Sequence[Sequence[Episode]],
    spent: Spent | None = None,
) -> Iterator[list[list[Episode]]]:
    """The rollouts of each group in the order of their playing: the roots, then round by round branches of what has ended. `spent`
    counts the time of environments that are shown a branch's turns."""
    spent = spent or Spent()
    sizes = [len(group) for group in groups]
    for group in groups:
        for number, episode in enumerate(group):
            episode.tree = number % tree.roots
    yield [list(group[: tree.roots]) for group in groups]
    for number in range(tree.rounds):
        wave = []
        for group, size in zip(groups, sizes, strict=True):
            each = (size - tree.roots) // tree.rounds
            begin = tree.roots + number * each
            wave.append(list(group[begin : begin + each]))
            _graft(policy, wave[-1], group[:begin], spent)
        yield wave


def _graft(
    policy: Policy, branches: Sequence[Episode], earlier: Sequence[Episode], spent: Spent
) -> None:
    """Bring each branch to the turn that it begins with: one of a rollout of its tree, drawn with equal chances; also the first."""
    plan: list[tuple[Episode, Episode, int]] = []
    for episode in branches:
        known = [e for e in earlier if e.tree == episode.tree and e.failure is None and e.turns]
        if not known or episode.failure is not None:
            continue  # from the start
        rng = np.random.default_rng([_BRANCH, *(abs(k) for k in episode.key), episode.place])
        source = known[int(rng.integers(len(known)))]
        plan.append((episode, source, int(rng.integers(len(source.turns)))))
    for number in itertools.count():
        acting = [(e, s) for e, s, turns in plan if number < turns and e.failure is None]
        if not acting:
            return
        act(policy, [(e, s.turns[number]) for e, s in acting], spent)
        for episode, source in acting:
            if episode.failure is None:
                _check(episode, source, number)


def _check(episode: Episode, source: Episode, number: int) -> None:
    """What the environment has shown is what it showed the source; from here on they share it."""
    then, now = source.turns[number + 1].prompt, episode.prompt
    same = episode.open and now is not None and now.fingerprint == then.fingerprint
    if not same or episode.turns[number].reward != source.turns[number].reward:
        episode.failure = DataError(
            f"rollout.tree plays turns again and expects what they led to before, found something else after turn {number + 1} in "
            f"{type(episode.environment).__name__}; an environment that depends on more than sample, seed and turns needs "
            "rollout.tree.roots: 0"
        )
        return
    # the same objects: kept in memory once
    episode.turns[number], episode.prompt, episode.shared = source.turns[number], then, number + 1


def shared_turns(
    groups: Sequence[RolloutGroup], gather: Callable[[list[Any]], list[Any]]
) -> dict[str, float]:
    """Of the turns of all processes' rollouts in trees, the share that was not written anew. Collective."""
    rollouts = [r for g in groups for r in (*g.rollouts, *g.replaced) if r.tree is not None]
    mine = (sum(r.shared_turns for r in rollouts), sum(len(r.turns) for r in rollouts))
    told = gather([mine])
    turns = math.fsum(t for _, t in told)
    return {"train/tree/shared_turns": math.fsum(s for s, _ in told) / turns} if turns else {}
