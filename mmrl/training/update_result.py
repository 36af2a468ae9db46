"""What the training of one step did, as metrics are made of it."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field, replace

from mmrl.algorithms import LossStats, ValueStats
from mmrl.distributed.world import World
from mmrl.policy.routing import Rerouted
from mmrl.training.turn_selection import Selection

__all__ = ["SourceStats", "UpdateResult"]


@dataclass
class SourceStats:
    """Sums of one data source: loss statistics, |sampler - trainer| log-prob gap, entropy in nats."""

    stats: LossStats = field(default_factory=LossStats)
    gap_sum: float = 0.0
    gap_max: float = 0.0
    gap_tokens: float = 0.0
    entropy: float = 0.0
    entropy_tokens: float = 0.0

    def add(self, other: SourceStats) -> None:
        """Add the sums of `other`."""
        self.stats += other.stats
        self.gap_sum, self.gap_max = self.gap_sum + other.gap_sum, max(self.gap_max, other.gap_max)
        self.gap_tokens += other.gap_tokens
        self.entropy, self.entropy_tokens = (
            self.entropy + other.entropy,
            self.entropy_tokens + other.entropy_tokens,
        )


@dataclass
class UpdateResult:
    """What a step's training did: sums over all processes, by data source, and the seconds it took in this one."""

    sources: dict[str, SourceStats] = field(default_factory=lambda: defaultdict(SourceStats))
    value_stats: ValueStats = field(default_factory=ValueStats)
    turns: int = 0
    denominator: float = 0.0
    grad_norms: list[float] = field(default_factory=list)
    lr: float = 0.0
    packed_tokens: float = 0.0
    logprobs_s: float = 0.0
    update_s: float = 0.0
    wait_s: float = 0.0  # for the slowest process: a sum over processes
    advantage_metrics: dict[str, float] = field(default_factory=dict)
    rerouted: Rerouted = field(default_factory=Rerouted)
    selected: Selection = field(default_factory=Selection)

    @property
    def total(self) -> SourceStats:
        """The sums over all sources."""
        total = SourceStats()
        for _, stats in sorted(self.sources.items()):
            total.add(stats)
        return total

    @property
    def critic(self) -> dict[str, float]:
        """Metrics of the value loss; none without a critic."""
        found = self.value_stats
        return (
            {}
            if found.count == 0
            else {
                "train/critic/loss": found.loss / max(self.denominator, 1.0),
                "train/critic/clipped": found.clipped / found.count,
            }
        )

    def merge(self, part: UpdateResult) -> None:
        """Add what is counted by each process for itself."""
        for name, stats in sorted(part.sources.items()):
            self.sources[name].add(stats)
        self.value_stats += part.value_stats
        self.turns, self.wait_s = self.turns + part.turns, self.wait_s + part.wait_s
        self.packed_tokens += part.packed_tokens
        self.rerouted += part.rerouted
        self.selected += part.selected

    def over(self, world: World) -> UpdateResult:
        """With the sums of all processes, added in the same order in each. Collective."""
        if world.size == 1:
            return self
        whole = replace(
            self,
            sources=defaultdict(SourceStats),
            value_stats=ValueStats(),
            turns=0,
            packed_tokens=0.0,
            wait_s=0.0,
            rerouted=Rerouted(),
            selected=Selection(),
        )
        for part in world.gather([replace(self, sources=dict(self.sources))]):
            whole.merge(part)
        return whole
