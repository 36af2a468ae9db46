"""What goes into and comes out of mmrl.robotics.pool: its limits, replies, counters and errors.

python -c "from mmrl.robotics.pool import PoolSettings; print(PoolSettings(step_s=20, memory_gib=4))"
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from mmrl.errors import ConfigError, MMRLError
from mmrl.robotics.contract import ChunkResult, Observation

__all__ = [
    "EPISODES_PER_RESPAWN",
    "ErrorCause",
    "PoolError",
    "PoolSettings",
    "PoolStats",
    "Reply",
    "SlotState",
]

ErrorCause = Literal[
    "", "action", "setup", "rebuild", "exception", "crash", "timeout", "memory", "neighbour"
]
SlotState = Literal["idle", "resetting", "waiting", "stepping", "broken"]


class PoolError(MMRLError, RuntimeError):
    """The pool cannot go on (workers died too often, or never started), or a slot was used out of turn."""


EPISODES_PER_RESPAWN = 50
"""Episodes that finish, for which the budget of lost workers gets one back."""


@dataclass(frozen=True)
class PoolSettings:
    """Limits of a pool.

    handshake_s: for a worker to start, and extra time for a reset that makes a simulator. reset_s, step_s: for a reset and for
    a chunk. respawns: workers that may die, hang or fail to build a simulator again before the pool gives up, and one more for
    every EPISODES_PER_RESPAWN episodes that finish: a long run may lose more of them than a short one. group_respawns: of those
    lost by the episodes of one group so many count. restart_after_resets: a slot's simulator is made anew after so many (0:
    never). memory_gib: a worker above it takes no new episodes and is replaced when its running ones have ended; at 1.5 times it
    is ended at once (0: no limit). environment: variables for the workers (MUJOCO_GL ...).
    """

    handshake_s: float = 60.0
    reset_s: float = 60.0
    step_s: float = 60.0
    respawns: int = 8
    group_respawns: int = 3
    restart_after_resets: int = 0
    memory_gib: float = 0.0
    environment: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("handshake_s", "reset_s", "step_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"pool: expected {name} > 0 seconds, found {getattr(self, name)}")
        for name in ("respawns", "group_respawns", "restart_after_resets", "memory_gib"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"pool: expected {name} >= 0, found {getattr(self, name)}")


@dataclass(frozen=True)
class Reply:
    """What became of a slot's command. `error`: the episode is over, and why; `cause` in a word: action (not executable),
    setup (task, package, assets, GL: it never ran, and will fail again), rebuild (it ran before and cannot be built now: a GL
    context refused, a disk full; its worker is replaced), exception, crash, timeout, memory, neighbour (another slot took the
    worker down). Such a reply can also come for a slot that waits for actions. started, ended: time.monotonic() of the work."""

    slot: int
    kind: Literal["reset", "chunk"]
    worker: int
    started: float
    ended: float
    observation: Observation | None = None
    chunk: ChunkResult | None = None
    error: str | None = None
    cause: ErrorCause = ""

    @property
    def seconds(self) -> float:
        """Duration of the work, waiting for the worker not included."""
        return self.ended - self.started


@dataclass(frozen=True)
class PoolStats:
    """Counters since the start: episodes = finished + errors + abandoned + running. `respawns`: workers that died, hung,
    passed the hard memory limit or could not build a simulator again; `restarts`: those replaced between episodes for their
    memory. busy_s, peak_rss_gib by worker."""

    episodes: int
    finished: int
    errors: int
    abandoned: int
    running: int
    error_causes: Mapping[str, int]
    respawns: int
    restarts: int
    simulators: int
    resets: int
    chunks: int
    control_steps: int
    busy_s: tuple[float, ...]
    peak_rss_gib: tuple[float, ...]
    seconds: float
