"""Episodes: a policy acts in many simulators at once, and groups of episodes close while others still run.

    with VectorEnv(16, workers=2) as pool:
        for group in Driver(pool, vla, seed=0).play(requests):
            ...

The slots of the pool are split into stages. While the simulators of one stage execute their action chunks in worker
processes, the policy decides for another; a group is handed out the moment its last member ends. An episode whose worker
crashed or hung is played again from the same state, each failure is recorded, and one that keeps failing stays in its group
with its error.

Legend: C control steps of a chunk, G members of a group.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from mmrl.diagnostics.timeline import Timeline
from mmrl.errors import ConfigError, NonFiniteError
from mmrl.robotics.acting import ActingPolicy, ActionOutput
from mmrl.robotics.contract import (
    ChunkResult,
    EnvSpec,
    InitialState,
    Observation,
    simulator_class,
)
from mmrl.robotics.pool import VectorEnv
from mmrl.robotics.pool_types import PoolError, Reply
from mmrl.rollout.stages import Stages
from mmrl.types import Rollout, RolloutGroup, Sample, StopReason, Turn

__all__ = ["COUNTERS", "Closing", "Driver", "Ended", "Failure", "GroupRequest"]

Key = tuple[int, int, int]

COUNTERS = (
    "episodes",
    "failed_episodes",
    "failed_attempts",
    "decisions",
    "control_steps",
    "infer_s",
    "infer_batches",
)
"""What a driver counts."""
_HOPELESS = 8
"""Different initial states that may fail for good, one after the other, with no episode finished between: then nothing works.
Counted over all environments and for each by itself: one that never works must not hide behind others that do."""


@dataclass(frozen=True)
class GroupRequest:
    """`members` episodes from one initial state. `key` orders groups and seeds their noise."""

    key: Key
    spec: EnvSpec
    state: InitialState
    members: int
    greedy: bool = False
    frames: bool = False

    @property
    def sample(self) -> Sample:
        """The initial state as a sample; its params hold the environment and the state."""
        return Sample(
            self.state.name,
            self.spec.task,
            self.spec.suite,
            "",
            None,
            params={"env": self.spec, "state": self.state},
        )

    @classmethod
    def again(cls, group: RolloutGroup, key: Key) -> GroupRequest:
        """The request for another group of the same state."""
        return cls(
            key, group.sample.params["env"], group.sample.params["state"], len(group.rollouts)
        )


@dataclass(frozen=True)
class Ended:
    """A member of a group whose episode ended."""

    request: GroupRequest
    member: int
    rollout: Rollout


@dataclass(frozen=True)
class Failure:
    """One failed attempt at an episode."""

    key: Key
    member: int
    task: str
    state: str
    attempt: int
    reason: str


@dataclass
class _Running:
    """An episode in a slot."""

    request: GroupRequest
    member: int
    attempt: int = 0
    turns: list[Turn] = field(default_factory=list)
    frames: list[np.ndarray] = field(default_factory=list)
    observation: Observation | None = None  # waiting for a decision
    output: ActionOutput | None = None
    success_once: bool = False
    steps: int = 0  # control steps executed
    version: int = 0  # of the weights that decided last


def _check_length(run: _Running) -> None:
    """Raises ConfigError for an episode that goes on beyond its horizon: it might never end, and nothing would say why."""
    spec = run.request.spec
    if run.steps >= spec.horizon:
        raise ConfigError(
            f"simulator {spec.suite}/{spec.task}: expected an episode of at most env.horizon = {spec.horizon} control steps, "
            f"found one that goes on after {run.steps}: its `step` must return truncated=True from spec.horizon on"
        )


class Driver:
    """Plays requests on a pool. `counters` adds up over its life; `failures` lists every failed attempt.

    Episodes are dealt to the stages in turn as they are submitted, and a stage decides only when all its simulators have
    answered, in the order of their keys. So what stands beside what in a batch, and with it the last bit of every log-prob,
    does not depend on timing, as long as requests are submitted in an order that does not (attempts that replace groups
    without signal are submitted as those close) and no attempt fails.

    Raises ConfigError for a simulator that was never there or actions it cannot execute, PoolError when nothing works any
    more, NonFiniteError for a policy that is not finite.
    """

    def __init__(
        self,
        pool: VectorEnv,
        vla: ActingPolicy,
        *,
        seed: int = 0,
        stages: int = 1,
        temperature: float = 1.0,
        retries: int = 2,
        timeline: Timeline | None = None,
        bootstrap: str = "standard",
    ) -> None:
        self.pool, self.vla, self.seed, self.temperature, self.retries = (
            pool,
            vla,
            seed,
            temperature,
            retries,
        )
        self.timeline, self.bootstrap = timeline, bootstrap
        self.stages = Stages(pool.num_slots, max(1, min(stages, pool.num_slots)))
        self.failures: list[Failure] = []
        self.counters: dict[str, float] = dict.fromkeys(COUNTERS, 0.0)
        self._queues: list[deque[tuple[GroupRequest, int]]] = [deque() for _ in self.stages.blocks]
        self._dealt = 0
        self._held: list[Ended] = []
        self._running: dict[int, _Running] = {}
        # by environment: states that failed for good since it finished an episode
        self._hopeless: dict[str, set[str]] = {}
        # environment and state: since any finished one
        self._hopeless_in_a_row: set[tuple[str, str]] = set()
        self._stops: dict[str, bool] = {}  # by environment: what its class says

    def begin_dealing(self) -> None:
        """Deal to the first stage again, where nothing runs: a resumed run then batches as the whole one."""
        if self.idle:
            self._dealt = 0

    def submit(self, request: GroupRequest) -> None:
        """Queue all members of a group."""
        for member in range(request.members):
            self._queues[self._dealt % len(self._queues)].append((request, member))
            self._dealt += 1
        with self.pool.together():
            self._fill()

    @property
    def at_work(self) -> int:
        """Simulators that execute something, and episodes that `poll` has in hand already."""
        return self.stages.at_work + len(self._held)

    @property
    def idle(self) -> bool:
        """Whether nothing is queued or running."""
        return not self._running and not any(self._queues)

    def poll(self, timeout_s: float) -> list[Ended]:
        """Take what the simulators answered; the episodes that ended by it (and those that ended while `play` had others in
        hand)."""
        held, self._held = self._held, []
        return held + self._poll(0.0 if held else timeout_s)

    def _poll(self, timeout_s: float) -> list[Ended]:
        replies = self.pool.ready(timeout_s)
        with self.pool.together():
            ended = self._taken(replies)
            self._fill()
        return ended

    def _taken(self, replies: Iterable[Reply]) -> list[Ended]:
        ended = []
        for reply in replies:
            if self.timeline is not None:
                stage = "reset" if reply.kind == "reset" else "render"
                self.timeline.add(
                    stage, f"worker {reply.worker}", reply.started, reply.ended, slot=reply.slot
                )
            run = self._running.get(reply.slot)
            if run is None:  # of an episode given up
                continue
            if (episode := self._handle(reply, run)) is not None:
                del self._running[reply.slot]
                self.stages.release(reply.slot)
                ended.append(Ended(run.request, run.member, episode))
        return ended

    def due(self) -> list[int]:
        """Slots of a stage that waits for the policy."""
        return list(self.stages.due(lambda slot: self._running[slot].request.key))

    def infer(self, slots: Sequence[int]) -> None:
        """Let the policy decide for these slots and send them on their way."""
        began = time.monotonic()
        version = self.vla.version
        with self.pool.together():
            self._decide(slots, version)
        self.counters["infer_s"] += time.monotonic() - began
        self.counters["infer_batches"] += 1
        self.counters["decisions"] += len(slots)

    def _decide(self, slots: Sequence[int], version: int) -> None:
        for greedy in (False, True):
            part = [
                (slot, self._running[slot])
                for slot in slots
                if self._running[slot].request.greedy == greedy
            ]
            # which slot was free first is chance
            part.sort(key=lambda item: (item[1].request.key, item[1].member))
            keys = [
                (self.seed, 29, *run.request.key, run.member, len(run.turns)) for _, run in part
            ]
            seen = [run.observation for _, run in part if run.observation is not None]
            outputs = self.vla.act(seen, keys, greedy=greedy, temperature=self.temperature)
            for (slot, run), output in zip(part, outputs, strict=True):
                self._check(run, output)
                run.output, run.observation, run.version = output, None, version
                self.stages.sent(slot)
                self.pool.step(slot, self.vla.actions(output), frames=run.request.frames)

    def _check(self, run: _Running, output: ActionOutput) -> None:
        """Raises NonFiniteError for an output made from logits or a value that are NaN or infinite."""
        if all(map(math.isfinite, (*output.logprobs, *output.values_V))):
            return
        spec, state = run.request.spec, run.request.state
        raise NonFiniteError(
            f"expected finite log-probs and values of the policy, found {output.logprobs[:4]} ... and "
            f"{output.values_V} in decision {len(run.turns) + 1} of {spec.suite}/{spec.task}, state "
            f"{state.name}, member {run.member} (weights of version {self.vla.version}): the weights are broken; "
            "lower optim.lr, or go back to an earlier checkpoint"
        )

    def play(self, requests: Iterable[GroupRequest]) -> Iterator[RolloutGroup]:
        """Closed groups of `requests` in the order they close, until all are. Episodes of others that run meanwhile (of later
        steps, with schedule async) go on, and wait for the next `poll`."""
        closing, wanted = Closing(), set()
        for request in requests:
            wanted.add(request.key)
            self.submit(request)
        while wanted:
            if due := self.due():
                self.infer(due)
            for ended in self._poll(0.0 if due else 1.0):
                if ended.request.key not in wanted:
                    self._held.append(ended)
                elif (group := closing.add(ended)) is not None:
                    wanted.remove(group.key)
                    yield group

    def give_up(self) -> None:
        """Forget everything queued and running; slots are free again when their simulators have answered."""
        for queue in self._queues:
            queue.clear()
        for slot in list(self._running):
            del self._running[slot]
            self.stages.release(slot)
        self.pool.settle()

    # episodes

    def _fill(self) -> None:
        for stage, queue in enumerate(self._queues):
            for slot in self.stages.free(stage):
                if not queue:
                    break
                request, member = queue.popleft()
                self._begin(slot, _Running(request, member))

    def _begin(self, slot: int, run: _Running) -> None:
        self._running[slot] = run
        self.stages.sent(slot)
        self.pool.reset(slot, run.request.spec, run.request.state, run.request.key)

    def _handle(self, reply: Reply, run: _Running) -> Rollout | None:
        """Take a reply; the episode if it ended."""
        if reply.error is not None:
            return self._failed(reply, run)
        if reply.kind == "reset":
            assert reply.observation is not None
            if run.request.frames:
                run.frames.append(reply.observation.images[run.request.spec.cameras[0]])
            self._waits(reply.slot, run, reply.observation)
            return None
        assert reply.chunk is not None
        return self._advanced(reply.slot, run, reply.chunk)

    def _waits(self, slot: int, run: _Running, observation: Observation) -> None:
        run.observation = observation
        self.stages.answered(slot)

    def _advanced(self, slot: int, run: _Running, chunk: ChunkResult) -> Rollout | None:
        output = run.output
        assert output is not None
        terminated, truncated = bool(chunk.terminated_C.any()), bool(chunk.truncated_C.any())
        run.turns.append(
            Turn(
                output.tokens,
                "",
                output.logprobs,
                StopReason.EOS,
                run.version,
                output.prompt,
                output.values_V,
                tuple(float(r) for r in chunk.rewards_C),
                tuple(bool(v) for v in chunk.valid_C),
                terminated,
                truncated,
                output.decision,
            )
        )
        run.frames += chunk.frames
        self.counters["control_steps"] += int(chunk.valid_C.sum())
        run.success_once |= bool(chunk.success_C.any())
        self._check_stop(run, chunk)
        run.steps += int(chunk.valid_C.sum())
        if not chunk.done:
            _check_length(run)
            self._waits(slot, run, chunk.observation)
            return None
        self.counters["episodes"] += 1
        self._hopeless.pop(run.request.spec.key, None)
        self._hopeless_in_a_row.clear()
        followed = self.bootstrap == "always" or (
            self.bootstrap == "standard" and truncated and not terminated
        )
        final = (
            self.vla.prompt(chunk.observation)
            if followed and self.vla.value_head is not None
            else None
        )
        info = {
            "success_once": float(run.success_once),
            "success_at_end": float(chunk.success_C[chunk.valid_C][-1]),
        }
        return Rollout(tuple(run.turns), info=info, final=final, frames=tuple(run.frames))

    def _check_stop(self, run: _Running, chunk: ChunkResult) -> None:
        """Raises ConfigError for an episode that goes on after a success, of a simulator that says it does not: what results say of
        success at the end, and what brevity pays, would be wrong."""
        spec = run.request.spec
        success = chunk.success_C[chunk.valid_C]
        if not (success[:-1].any() or (success[-1] and not chunk.done)):
            return
        if spec.key not in self._stops:
            self._stops[spec.key] = simulator_class(spec.suite).stops_at_success(spec.options)
        if self._stops[spec.key]:
            raise ConfigError(
                f"simulator {spec.suite}/{spec.task}: expected an episode to end with its success, found one that goes on: return "
                "terminated=True with success=True, or say that it goes on with a class method "
                "`stops_at_success(cls, options)` that returns False"
            )

    def _failed(self, reply: Reply, run: _Running) -> Rollout | None:
        request, error = run.request, reply.error or ""
        self.failures.append(
            Failure(
                request.key, run.member, request.spec.task, request.state.name, run.attempt, error
            )
        )
        self.counters["failed_attempts"] += 1
        where = f"{request.spec.suite}/{request.spec.task}"
        # a task, package or asset that is not there will not be there next time
        if reply.cause == "setup":
            raise ConfigError(f"{where}: {error}")
        if reply.cause == "action":  # the same policy would choose the same again
            raise ConfigError(
                f"{where}: the policy's actions cannot be executed: {error}. Its action settings (vla.json, or "
                "action.statistics when it was made) are of another robot, task or controller"
            )
        # costs no retry of its own; the respawns it cost are bounded
        innocent = reply.cause == "neighbour"
        if run.attempt < self.retries or innocent:
            self.stages.release(reply.slot)
            self._begin(reply.slot, _Running(request, run.member, run.attempt + (not innocent)))
            return None
        self.counters["episodes"] += 1
        self.counters["failed_episodes"] += 1
        self._count_hopeless(run, error)
        return Rollout(tuple(run.turns), error=error)

    def _count_hopeless(self, run: _Running, error: str) -> None:
        """Note a state that failed for good. Raises PoolError when nothing works, or nothing of this environment."""
        spec, state = run.request.spec, run.request.state.name
        own = self._hopeless.setdefault(spec.key, set())
        own.add(state)
        self._hopeless_in_a_row.add((spec.key, state))
        if max(len(own), len(self._hopeless_in_a_row)) < _HOPELESS:
            return
        where = f"{spec.suite}/{spec.task}"
        whose = f" of {where}" if len(own) >= _HOPELESS else ""
        raise PoolError(
            f"expected simulators that finish episodes, found that the last {_HOPELESS} initial states all failed "
            f"({run.attempt + 1} attempts each) with no episode{whose} finished between them; fix it, or take it "
            f"out of env.tasks. The last, {where} {state}: {error}"
        )


class Closing:
    """Collects episodes until their groups are whole."""

    def __init__(self) -> None:
        self._open: dict[Key, dict[int, Rollout]] = {}

    def add(self, ended: Ended) -> RolloutGroup | None:
        """The group, if this was its last member: its rollouts are in order of the members."""
        request, member = ended.request, ended.member
        members = self._open.setdefault(request.key, {})
        assert member not in members, f"member {member} of group {request.key} ended twice"
        members[member] = ended.rollout
        if len(members) < request.members:
            return None
        del self._open[request.key]
        return RolloutGroup(
            request.sample, tuple(members[m] for m in sorted(members)), key=request.key
        )
