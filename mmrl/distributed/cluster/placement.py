"""Which nodes of a Ray cluster workers may run on, and whether they fit: pure arithmetic, without Ray.

check("disaggregated", [Demand("simulators", 4, 1.0, 0.0)], nodes)      # ConfigError: expected, found, fix

placement       simulators      rewards         rollouts
collocated      here            here            here            (the trainer's node)
disaggregated   elsewhere       elsewhere       elsewhere       (any other node)
hybrid          anywhere        here            anywhere

"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from mmrl.errors import ConfigError, MMRLError

__all__ = [
    "ClusterError",
    "Demand",
    "Kind",
    "Node",
    "Place",
    "Placement",
    "check",
    "eligible",
    "place_of",
]

Placement = Literal["collocated", "disaggregated", "hybrid"]
Kind = Literal["simulators", "rewards", "rollouts"]
Place = Literal["here", "elsewhere", "anywhere"]

_WORDS = {
    "simulators": "simulator workers",
    "rewards": "reward workers",
    "rollouts": "rollout actors",
}
_COUNT_KEY = {
    "simulators": "env.workers",
    "rewards": "reward.workers",
    "rollouts": "engine.ray.rollout_actors",
}
_SIZE_KEY = {
    "simulators": "engine.ray.cpus_per_worker and gpus_per_worker",
    "rewards": "engine.ray.cpus_per_worker",
    "rollouts": "engine.ray.cpus_per_rollout_actor and gpus_per_rollout_actor",
}
_WHERE = {
    "here": "on the trainer's node",
    "elsewhere": "on other nodes than the trainer's",
    "anywhere": "on any node",
}
_ROUNDING = 1e-6  # Ray counts resources in ten-thousandths


class ClusterError(MMRLError, RuntimeError):
    """Ray cannot hold the workers (any more): nodes were lost, or an actor died too often."""


@dataclass(frozen=True)
class Node:
    """One node that is alive: Ray's id, its address, its resources, and whether the trainer runs on it."""

    id: str
    address: str
    cpus: float
    gpus: float
    here: bool

    def __str__(self) -> str:
        gpus = f", {self.gpus:g} GPUs" if self.gpus else ""
        return f"{self.address} ({'the trainer here, ' if self.here else ''}{self.cpus:g} CPUs{gpus}; node {self.id[:8]})"


@dataclass(frozen=True)
class Demand:
    """`count` actors of one kind, each with so many CPUs and GPUs."""

    kind: Kind
    count: int
    cpus: float
    gpus: float = 0.0

    @property
    def words(self) -> str:
        """For people."""
        return _WORDS[self.kind]

    def size(self) -> str:
        """For people: what one of them takes."""
        return f"{self.cpus:g} CPUs" + (f" and {self.gpus:g} GPUs" if self.gpus else "")


def place_of(placement: Placement, kind: Kind) -> Place:
    """Where workers of a kind belong."""
    if placement == "hybrid":
        return "here" if kind == "rewards" else "anywhere"
    return "here" if placement == "collocated" else "elsewhere"


def eligible(place: Place, nodes: Sequence[Node]) -> list[Node]:
    """Those of `nodes` at that place."""
    return [n for n in nodes if place == "anywhere" or n.here == (place == "here")]


def check(
    placement: Placement, demands: Sequence[Demand], nodes: Sequence[Node], processes: int = 1
) -> None:
    """Raise ConfigError unless all workers fit on the nodes together: expected, found, fix. `processes` ask for `demands` each.

    Counts what nodes have, not what is free just now. The most bound workers are placed first, so that those that may run
    anywhere leave them their room.
    """
    each = {demand.kind: demand.count for demand in demands}
    demands = [replace(demand, count=demand.count * processes) for demand in demands]
    left = {node.id: [node.cpus, node.gpus] for node in nodes}
    order = ("here", "elsewhere", "anywhere")
    for demand in sorted(
        demands, key=lambda d: (order.index(place_of(placement, d.kind)), -d.gpus)
    ):
        place = place_of(placement, demand.kind)
        allowed = eligible(place, nodes)
        if not allowed:
            raise ConfigError(
                f"engine.ray.placement {placement}: expected at least one node other than the trainer's for {demand.count} "
                f"{demand.words}, found {_listed(nodes)}; start one on another machine with `ray start --address=HOST:PORT`, or "
                "set engine.ray.placement: collocated"
            )
        fitted = 0
        # the trainer's node last: it has most other claims
        for node in sorted(allowed, key=lambda n: n.here):
            room = left[node.id]
            while (
                fitted < demand.count
                and demand.cpus <= room[0] + _ROUNDING
                and demand.gpus <= room[1] + _ROUNDING
            ):
                room[0], room[1], fitted = room[0] - demand.cpus, room[1] - demand.gpus, fitted + 1
        if fitted < demand.count:
            beside = [f"{d.count} {d.words} of {d.size()}" for d in demands if d is not demand]
            among = (
                f"{each[demand.kind]} for each of {processes} processes, " if processes > 1 else ""
            )
            raise ConfigError(
                f"engine.ray: expected room for {demand.count} {demand.words} of {demand.size()} each {_WHERE[place]} "
                f"({among}placement {placement}{', beside ' + ' and '.join(beside) if beside else ''}), found room for {fitted}: "
                f"{_listed(nodes)}; lower {_COUNT_KEY[demand.kind]}, or {_SIZE_KEY[demand.kind]}, or add nodes"
            )


def _listed(nodes: Sequence[Node]) -> str:
    if not nodes:
        return "no node"
    return f"{len(nodes)} node{'s' if len(nodes) > 1 else ''}: " + ", ".join(map(str, nodes))
