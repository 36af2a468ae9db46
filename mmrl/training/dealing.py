"""Which process trains on which group, so that all have about as many tokens (train.balance_batch; verl: trainer.balance_batch).

    homes = dealt(costs, homes, parts=8)                        # costs in tokens, homes: who rolled each out
    groups = exchanged(world, groups, cost_of)                  # collective

Prompts are drawn and rolled out place by place, whatever their length; a process with a long clip makes the others wait in every
optimizer step. Groups go longest first to whoever has least (LPT, Graham 1969: at most 4/3 of the best), and stay where they are
while that costs nothing: who gets one reads its pictures and clips again. The result depends on the groups alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from mmrl.distributed.world import World
from mmrl.types import RolloutGroup

__all__ = ["dealt", "exchanged", "imbalance"]

_SLACK = 1.03
"""A load of this many times the mean is as good as the mean where fewer groups have to move."""
_WORTH = 0.95
"""Groups move where the largest load falls below this share of what it was."""


def imbalance(costs: Sequence[int], owners: Sequence[int], parts: int) -> float:
    """Largest load over the mean load: 1 where all have as much, so that nobody waits."""
    loads = _loads(costs, owners, parts)
    return max(loads) * parts / max(1, sum(loads))


def dealt(costs: Sequence[int], homes: Sequence[int], parts: int) -> list[int]:
    """The part, from 0, of each group of `costs` tokens that is now at `homes`."""
    best = _longest_first(costs, homes, parts, 0.0)
    least = max(_loads(costs, best, parts))
    capacity = max(float(least), _SLACK * sum(costs) / parts)
    found = _longest_first(costs, homes, parts, capacity)
    if max(_loads(costs, found, parts)) > _SLACK * capacity:
        found = best
    before = max(_loads(costs, homes, parts))
    return found if max(_loads(costs, found, parts)) < _WORTH * before else list(homes)


def _longest_first(
    costs: Sequence[int], homes: Sequence[int], parts: int, capacity: float
) -> list[int]:
    """Each, longest first, to its home while that stays within `capacity`; the others then to the part with the least."""
    loads, found = [0] * parts, [0] * len(costs)
    left = []
    for number in sorted(range(len(costs)), key=lambda n: (-costs[n], n)):
        if loads[homes[number]] + costs[number] > capacity:
            left.append(number)
        else:
            found[number] = homes[number]
            loads[homes[number]] += costs[number]
    for number in left:
        found[number] = loads.index(min(loads))
        loads[found[number]] += costs[number]
    return found


def _loads(costs: Sequence[int], owners: Sequence[int], parts: int) -> list[int]:
    loads = [0] * parts
    for cost, owner in zip(costs, owners, strict=True):
        loads[owner] += cost
    return loads


def exchanged(
    world: World,
    groups: Sequence[RolloutGroup],
    cost_of: Callable[[RolloutGroup], int],
    step_of: Callable[[RolloutGroup], int] = lambda group: 0,
    together: int = 1,
) -> list[RolloutGroup]:
    """The groups that this process trains on, in order of their keys, with equal loads in each optimizer step (`step_of` names that
    of a group). `together` neighbouring processes compute rows together and have one load. Collective.

    Groups with prompts of their own (conversations, robots) stay: their media lie where they acted.
    """
    with world.raise_on_all_ranks():
        mine = [(step_of(g), g.key, cost_of(g), world.rank) for g in groups if _travels(g)]
    target = {}
    for _, same in itertools.groupby(sorted(world.gather(mine)), key=lambda one: one[0]):
        known = list(same)
        homes = [rank // together for *_, rank in known]
        parts = dealt([cost for _, _, cost, _ in known], homes, world.size // together)
        for number, ((_, key, _, rank), part) in enumerate(zip(known, parts, strict=True)):
            stays = part == rank // together
            target[key] = rank if stays else part * together + number % together
    leaving = [g for g in groups if target.get(g.key, world.rank) != world.rank]
    arrived = [g for g in world.gather(leaving) if target[g.key] == world.rank]
    staying = [g for g in groups if target.get(g.key, world.rank) == world.rank]
    return sorted([*staying, *arrived], key=lambda g: (g.key[2], g.key[1]))


def _travels(group: RolloutGroup) -> bool:
    return all(t.prompt is None for r in group.rollouts for t in r.turns)
