"""Several Ray actors of one kind that each do a share of the work; a lost one is replaced and asked again.

group = ActorGroup(cluster, "rewards", 2, RewardHost, specs, part_names, 10.0)
group.call("score", [(jobs[:8],), (jobs[8:],)])        # what each returned, in order
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mmrl.distributed.cluster.placement import Kind
from mmrl.distributed.cluster.session import Cluster, ending, stop_if_broken
from mmrl.errors import MMRLError

__all__ = ["ActorGroup"]

_CHECK_S = 2.0  # how often a call that does not come back looks whether there still is a node for its actor
_END_S = 10.0


class ActorGroup:
    """`count` actors of `cls(*arguments)` in the places reserved for `kind`. One whose process or node is lost is counted in
    `cluster.restarts`, and another takes its place."""

    def __init__(
        self, cluster: Cluster, kind: Kind, count: int, cls: type, *arguments: Any
    ) -> None:
        self.cluster, self.kind, self._ray, self._class, self._arguments = (
            cluster,
            kind,
            cluster.ray,
            cls,
            arguments,
        )
        self.actors = [self._start(place) for place in range(count)]

    def _start(self, place: int) -> Any:
        return self.cluster.start(self.kind, place, self._class, *self._arguments)

    def call(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Call `method` of the first actors, each with its arguments; what they return, in order.

        Raises what the method raised, ClusterError when an actor cannot start, actors are lost more often than
        engine.ray.restarts, or no node is left.
        """

        def ask(place: int) -> Any:
            return getattr(self.actors[place], method).remote(*arguments[place])

        waiting = {ask(place): place for place in range(len(arguments))}
        found: dict[int, Any] = {}
        while waiting:
            ready = self._ray.wait(list(waiting), num_returns=1, timeout=_CHECK_S)[0]
            if not ready:
                # one that waits for a node that is gone would wait for ever
                self.cluster.check(self.kind)
            for ref in ready:
                place = waiting.pop(ref)
                try:
                    found[place] = self._ray.get(ref)
                except self._ray.exceptions.RayTaskError as error:
                    # raised by the method: it would be again
                    raise (error.cause if isinstance(error.cause, MMRLError) else error) from None
                except self._ray.exceptions.RayError as error:
                    stop_if_broken(error, self.cluster.demands[self.kind].words)
                    self._replace(place, ending(error))
                    waiting[ask(place)] = place
                    error.__traceback__ = None  # a cycle, which would keep our arguments in the object store for a while
        return [found[place] for place in range(len(arguments))]

    def _replace(self, place: int, how: str) -> None:
        self.cluster.count_restart(self.kind, how)
        self.cluster.end(self.actors[place])
        self.actors[place] = self._start(place)

    def close(self, leave: str = "") -> None:
        """End the actors; `leave` names a method that lets them end what they started."""
        if leave and self.cluster.open and self.actors:
            calls = [getattr(actor, leave).remote() for actor in self.actors]
            self._ray.wait(calls, num_returns=len(calls), timeout=_END_S)
        for actor in self.actors:
            self.cluster.end(actor)
        self.actors = []
