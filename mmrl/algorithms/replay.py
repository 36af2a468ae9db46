"""Experience pool: past successes of a prompt, for its groups that have none.

Where every rollout of a group fails, nothing is learned from it: its advantages are 0. A success that the policy itself had on this
prompt some steps ago can take the place of a failure and give the group a signal again (ARPO, Lu et al. 2025, arXiv 2505.16282,
one stored trajectory in a group that failed as a whole). It keeps the log-probs under the weights that wrote it, and its tokens are
weighed by what they are under those of now, w = min(pi_now / pi_then, cap), as stale tokens are in decoupled PPO
(mmrl.algorithms.offpolicy):

    J = w min(r A, clip(r) A),   r = pi / pi_now

A clip of pi / pi_then itself would let a success raise each of its tokens to 1 + clip_high times the old probability, once: a rare
success would stay rare.

What is kept of a rollout is what the policy wrote, not what it was shown: the environment is played again (mmrl.rollout.replaying),
and a rollout that does not come out as it was is forgotten. So a checkpoint holds a few numbers per rollout and no pictures.

    pool = ReplayPool(ReplayConfig(per_group=1))
    pool.begin_step(7)
    (success,) = pool.choose("webs", "sample-3", count=1, key=(7, 0, 0), seed=1)
    pool.end_step(found, lost)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mmrl.config import ReplayConfig
from mmrl.errors import CheckpointError
from mmrl.types import Rollout, StopReason, Turn

__all__ = ["ReplayPool", "Success"]

_SALT = 29  # tells the choice of a success from other random numbers of a group
Place = tuple[int, int, int, int]  # key of the group that it was in, and its number there


@dataclass(frozen=True)
class Success:
    """A rollout that succeeded: what was written, turn by turn, with the log-probs of then, and fingerprints of what was shown.

    `step` is the one in which it was made, `place` tells it from others.
    """

    source: str
    sample_id: str
    step: int
    place: Place
    turns: tuple[Turn, ...]
    shown: tuple[str, ...]

    @classmethod
    def of(cls, source: str, sample_id: str, place: Place, rollout: Rollout, root: str) -> Success:
        """`root`: the fingerprint of the group's prompt, which turns without a prompt of their own were shown."""
        shown = tuple(root if t.prompt is None else t.prompt.fingerprint for t in rollout.turns)
        turns = tuple(
            Turn(t.token_ids, t.text, t.logprobs, t.stop, t.policy_version) for t in rollout.turns
        )
        return cls(source, sample_id, place[0], place, turns, shown)

    def row(self) -> dict[str, Any]:
        """As JSON values; the log-probs come back bit for bit."""
        return {
            "source": self.source,
            "id": self.sample_id,
            "step": self.step,
            "place": list(self.place),
            "shown": list(self.shown),
            "turns": [
                {
                    "tokens": list(t.token_ids),
                    "text": t.text,
                    "logprobs": list(t.logprobs),
                    "stop": t.stop.value,
                    "version": t.policy_version,
                }
                for t in self.turns
            ],
        }

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> Success:
        """The inverse of `row`."""
        turns = tuple(
            Turn(
                tuple(int(x) for x in t["tokens"]),
                str(t["text"]),
                tuple(float(x) for x in t["logprobs"]),
                StopReason(t["stop"]),
                int(t["version"]),
            )
            for t in row["turns"]
        )
        step, position, attempt, number = (int(x) for x in row["place"])
        return cls(
            str(row["source"]),
            str(row["id"]),
            int(row["step"]),
            (step, position, attempt, number),
            turns,
            tuple(str(x) for x in row["shown"]),
        )


class ReplayPool:
    """See the module. It changes between steps alone, so that what a group gets does not depend on when it closes; on every process
    it is the same. `used`, `lost` and `filled` count rollouts and groups of the step, on this process."""

    def __init__(self, settings: ReplayConfig) -> None:
        self.settings = settings
        self._kept: dict[Place, Success] = {}  # in order of arrival
        self.used = self.filled = 0
        self.lost: list[Place] = []

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def active(self) -> bool:
        """Whether groups are to be filled."""
        return self.settings.per_group > 0

    def begin_step(self, step: int) -> None:
        """Forget what is too old for `step`; count anew."""
        oldest = step - self.settings.max_age
        self._kept = {place: s for place, s in self._kept.items() if s.step >= oldest}
        self.used, self.filled, self.lost = 0, 0, []

    def choose(
        self, source: str, sample_id: str, key: tuple[int, int, int], seed: int
    ) -> list[Success]:
        """At most per_group successes on the sample, drawn by the key of the group that they are for."""
        found = [s for s in self._kept.values() if (s.source, s.sample_id) == (source, sample_id)]
        order = np.random.default_rng((seed, _SALT, *key)).permutation(len(found))
        return [found[i] for i in sorted(order[: self.settings.per_group])]

    def end_step(self, found: Iterable[Success], lost: Iterable[Place]) -> None:
        """Take in the successes of a step, of all processes, and forget those that did not come out as they were; beyond `size` the
        oldest go."""
        for place in lost:
            self._kept.pop(place, None)
        for success in sorted(found, key=lambda s: s.place):
            self._kept[success.place] = success
        for place in list(self._kept)[: max(0, len(self._kept) - self.settings.size)]:
            del self._kept[place]

    def state_dict(self) -> list[dict[str, Any]]:
        """As JSON values."""
        return [s.row() for s in self._kept.values()]

    def load_state_dict(self, state: Sequence[Mapping[str, Any]]) -> None:
        """Continue from `state_dict`. Raises CheckpointError."""
        try:
            rows = [Success.from_row(row) for row in state]
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"expected the experience pool of a checkpoint, found something else ({error!r}); the checkpoint was "
                "written by another version or is damaged: resume from an earlier one"
            ) from error
        self._kept = {s.place: s for s in rows}


def as_replayed(rollout: Rollout, success: Success) -> Rollout:
    """A rollout played again, with the log-probs and versions of then."""
    turns = tuple(
        replace(now, logprobs=then.logprobs, policy_version=then.policy_version)
        for now, then in zip(rollout.turns, success.turns, strict=True)
    )
    return replace(rollout, turns=turns, replayed=True)
