"""What enters the update: truncated completions (overlong) and groups without signal (dynamic sampling).

A group whose rewards are all equal has advantages 0 and teaches nothing (DAPO, Yu et al. 2025, arXiv 2503.14476).
`DynamicSampler` replaces such a group by another prompt and puts its sample aside for a later step, a few times. Every
sample asked is trained on, waits, is counted as abandoned (tried `max_tries` times in vain), or goes back to the stream,
which brings it again in its next epoch (solved by all, or failed): none is lost. It holds no tensors and runs nothing:

    sampler.begin_step(step)
    while tickets := sampler.request(next_sample):             # next_sample() -> (source, sample id), None at the end
        for ticket in tickets:
            sampler.submit(ticket.key, rewards_of(ticket))  # None when the rollout failed
    report = sampler.end_step()
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from mmrl.algorithms.advantages import SIGNAL_TOLERANCE, has_signal
from mmrl.errors import CheckpointError, ConfigError, did_you_mean
from mmrl.types import Rollout, StopReason

__all__ = [
    "DynamicSampler",
    "Overlong",
    "OverlongSettings",
    "SamplerSettings",
    "StepReport",
    "Ticket",
    "Verdict",
    "overlong_penalty",
    "soft_overlong_penalty",
    "trajectory_in_loss",
]

Overlong = Literal["none", "mask", "soft"]
Key = tuple[int, int, int]  # (step, position in the step, attempt), the same as RolloutGroup.key


@dataclass(frozen=True, kw_only=True)
class OverlongSettings:
    """How completions cut by the length limit are treated."""

    mode: Overlong = "none"
    """'none': like any other. 'mask': out of the loss, their reward still counts in the group. 'soft': a penalty."""
    max_length: int | None = None
    """Tokens; the rollout's limit, needed by 'soft'."""
    cache: int | None = None
    """Tokens; the penalty grows over the last `cache` tokens before max_length, needed by 'soft'."""

    def __post_init__(self) -> None:
        if self.mode not in get_args(Overlong):
            raise ConfigError(
                f"expected overlong mode none, mask or soft, found {self.mode!r}."
                f"{did_you_mean(self.mode, get_args(Overlong))}"
            )
        if self.mode == "soft" and not 0 < (self.cache or 0) <= (self.max_length or 0):
            raise ConfigError(
                "overlong mode 'soft' expects 0 < cache <= max_length in tokens, found "
                f"cache {self.cache} and max_length {self.max_length}"
            )


def trajectory_in_loss(trajectory: Rollout, mode: Overlong, masked: Collection[str] = ()) -> bool:
    """Whether a trajectory's tokens belong to the loss.

    Never when its rollout failed or wrote nothing: those tokens are not the policy's choice. With mode 'mask' also
    not when any turn was cut by the length limit (overlong filtering, DAPO section 3.4): its reward judges half an
    answer. `masked` (algorithm.mask_rollouts): 'unparsed' leaves out those with a turn that their environment could not read (void
    turns; SimpleTIR, Xue et al. 2025, arXiv 2509.02479), 'truncated' those that were cut off. Either way
    its reward stays in the group's mean, so the others' advantages do not change.
    """
    if trajectory.error is not None or trajectory.num_tokens == 0:
        return False
    if "truncated" in masked and trajectory.truncated:
        return False
    if "unparsed" in masked and not all(turn.parsed for turn in trajectory.turns):
        return False
    stops = {turn.stop for turn in trajectory.turns}
    return StopReason.ERROR not in stops and not (mode == "mask" and StopReason.LENGTH in stops)


def soft_overlong_penalty(length: int, max_length: int, cache: int) -> float:
    """DAPO's soft overlong punishment (equation 13) in [-1, 0]; add it to the reward *before* the advantages.

    0 up to max_length - cache tokens, then linear down to -1 at max_length and beyond. Needs 0 < cache <= max_length.
    """
    if not 0 < cache <= max_length:
        raise ConfigError(
            f"expected 0 < cache <= max_length in tokens, found cache {cache}, max_length {max_length}"
        )
    return max(-1.0, min(0.0, (max_length - cache - length) / cache))


def overlong_penalty(length: int, settings: OverlongSettings) -> float:
    """What to add to the reward of a completion of `length` tokens: 0 unless the mode is 'soft'."""
    if settings.mode != "soft":
        return 0.0
    # checked when the settings were made
    assert settings.max_length is not None and settings.cache is not None
    return soft_overlong_penalty(length, settings.max_length, settings.cache)


@dataclass(frozen=True, kw_only=True)
class SamplerSettings:
    """Dynamic sampling. `max_attempts=1` switches replacement off: groups without signal only shrink the step."""

    quota: int
    """Groups with signal wanted per step."""
    max_attempts: int = 3
    """Prompts tried per place in the step, the first included; then the step goes on with what it has."""
    carry_share: float = 0.25
    """Largest share of a step's first prompts taken from the carry-over queue; the rest comes from the stream, so
    that hopeless prompts never starve it. 0 retries a sample only when the stream brings it again."""
    max_tries: int = 3
    """Attempts at a sample without signal until it waits no longer and is counted as abandoned; when the stream brings
    it again it starts anew."""
    tol: float = SIGNAL_TOLERANCE
    """Rewards spread by more than this are a signal."""

    def __post_init__(self) -> None:
        for name in ("quota", "max_attempts", "max_tries"):
            if getattr(self, name) < 1:
                raise ConfigError(f"expected {name} at least 1, found {getattr(self, name)}")
        if not 0 <= self.carry_share <= 1:
            raise ConfigError(f"expected carry_share in [0, 1], found {self.carry_share}")
        if not self.tol >= 0:
            raise ConfigError(f"expected tol at least 0, found {self.tol}")


class Verdict(str, enum.Enum):
    """What became of an offered group."""

    KEPT = "kept"  # has signal: train on it
    NO_SIGNAL = "no_signal"  # rewards equal (or too alike): replaced; its sample waits for another try, unless all are 1
    # no rewards (a broken picture stays broken): replaced, its sample does not wait
    FAILED = "failed"


@dataclass(frozen=True)
class Ticket:
    """A group to roll out. `tries` counts the attempts in vain for which this sample has been waiting."""

    key: Key
    source: str
    sample_id: str
    tries: int = 0


@dataclass(frozen=True)
class StepReport:
    """Counts of one step: asked == kept + no_signal + failed, in total and in every source.

    all_zero, all_one and weak are parts of no_signal, by the values offered (too hard: none above 0; too easy: all at the
    upper end of what can be earned; spread, but outside the filter's bounds or below a selection threshold); carried counts
    the asked ones that came from the carry-over queue; abandoned the samples (not groups) given up after `max_tries`
    attempts without signal; unfilled the places left empty because attempts or prompts ran out; queue its length afterwards.
    """

    step: int
    counts: Mapping[str, int]
    by_source: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    unfilled: int = 0
    queue: int = 0


_COUNTS = (
    "asked",
    "kept",
    "no_signal",
    "failed",
    "all_zero",
    "all_one",
    "weak",
    "carried",
    "abandoned",
)
_LATER_COUNTS = ("abandoned", "weak")  # absent from states written before they existed


def _total(by_source: Mapping[str, Mapping[str, int]]) -> dict[str, int]:
    return {name: sum(counts[name] for counts in by_source.values()) for name in _COUNTS}


class DynamicSampler:
    """The state machine of dynamic sampling; `state_dict` is plain JSON and may be taken between any two calls.

    Each step has `quota` places. A place asks one group at a time, so no surplus group with signal is ever rolled out.
    When its group has no signal or failed, the place asks the stream for another prompt, up to `max_attempts`.
    Samples without signal wait in the carry-over queue, each at most once, first in first out, and return from the next
    step on, until they have had `max_tries` attempts. A sample that every completion solved and one that failed do not
    wait: there is nothing to learn from them now, and the stream's next epoch brings them again. Asking only once
    everything asked was offered (as above) makes the course of a run independent of the order in which groups close;
    asking earlier keeps the devices busier and is allowed.
    """

    def __init__(self, settings: SamplerSettings) -> None:
        self.settings = settings
        self._step: int | None = None  # None between steps
        self._free: list[tuple[int, int]] = []  # (position, attempt) waiting for a prompt
        self._in_flight: dict[Key, Ticket] = {}
        self._set_aside: dict[Key, Ticket] = {}  # this step's samples for the queue
        # (source, sample id) -> tries, in order of arrival
        self._queue: dict[tuple[str, str], int] = {}
        self._credit = 0.0  # retries the carry share has earned
        self._counts: dict[str, dict[str, int]] = {}  # this step, by source
        self._totals: dict[str, dict[str, int]] = {}  # closed steps, by source

    @property
    def carry_over(self) -> tuple[tuple[str, str], ...]:
        """(source, sample id) of every waiting sample, the next to be retried first."""
        return tuple(self._queue)

    @property
    def totals(self) -> dict[str, dict[str, int]]:
        """Counts of all closed steps by source."""
        return {source: dict(counts) for source, counts in self._totals.items()}

    def begin_step(self, step: int) -> None:
        """Open `quota` places; the previous step must be closed."""
        assert self._step is None, f"step {self._step} is still open"
        self._step = step
        self._free = [(position, 0) for position in range(self.settings.quota)]
        # Only the fraction is saved up (a share of 0.25 of one place is one retry in four steps), never whole retries:
        # a queue that fills late must not take over a step.
        self._credit = self._credit % 1.0 + self.settings.quota * self.settings.carry_share

    def request(self, next_sample: Callable[[], tuple[str, str] | None]) -> list[Ticket]:
        """Tickets for every place that needs a prompt, in order of position; empty when none does.

        `next_sample` draws (source, sample id) from the stream and is called once per fresh prompt; None means that
        the stream has ended: waiting samples are then used, and when they end too the places stay empty.
        """
        assert self._step is not None, "begin_step first"
        places, self._free = sorted(self._free), []
        tickets = []
        for position, attempt in places:
            retry = self._credit >= 1 and bool(self._queue)
            drawn = None if retry else next_sample()
            if drawn is None and not self._queue:
                continue  # nothing left to ask: counted as unfilled at the end of the step
            carried = drawn is None
            source, sample_id = next(iter(self._queue)) if drawn is None else drawn
            self._credit -= 1.0 if retry else 0.0
            # A waiting sample that the stream brings by itself stops waiting: this is its retry.
            tries = self._queue.pop((source, sample_id), 0)
            ticket = Ticket((self._step, position, attempt), source, sample_id, tries)
            self._in_flight[ticket.key] = ticket
            self._count(source, "asked", *(("carried",) if carried else ()))
            tickets.append(ticket)
        return tickets

    def submit(
        self,
        key: Sequence[int],
        rewards_G: Sequence[float] | None,
        *,
        top: float = 1.0,
        keep: bool | None = None,
    ) -> Verdict:
        """Close the group of one ticket with its rewards, or with None when its rollout failed.

        `rewards_G` may be a part of the rewards by which groups are judged (accuracy); `top` is the largest it can be. `keep`
        replaces the test for signal by the caller's own (algorithm.filter; variance-based selection).
        """
        # first: it raises on NaN
        spread = rewards_G is not None and has_signal(rewards_G, self.settings.tol)
        step, position, attempt = key
        ticket = self._in_flight.pop((step, position, attempt), None)
        assert ticket is not None, f"group {tuple(key)} was not requested, or was submitted twice"
        if rewards_G and (spread if keep is None else keep):
            self._count(ticket.source, "kept")
            return Verdict.KEPT
        verdict = Verdict.FAILED if not rewards_G else Verdict.NO_SIGNAL
        names = [verdict.value]
        if rewards_G and spread:
            names.append("weak")
        elif rewards_G and max(rewards_G) <= self.settings.tol:
            names.append("all_zero")
        elif rewards_G and min(rewards_G) >= top - max(self.settings.tol, 1e-9):
            names.append("all_one")
        self._count(ticket.source, *names)
        if verdict is Verdict.NO_SIGNAL and "all_one" not in names:
            self._set_aside[ticket.key] = ticket
        if attempt + 1 < self.settings.max_attempts:
            self._free.append((position, attempt + 1))
        return verdict

    def retain(self, allowed: Callable[[str, str], bool]) -> int:
        """Take samples that are no longer `allowed(source, sample id)` (another curriculum stage) out of the queue.

        They go back to the stream, which brings them when they are allowed again. Returns how many there were.
        """
        before = len(self._queue)
        self._queue = {name: tries for name, tries in self._queue.items() if allowed(*name)}
        return before - len(self._queue)

    def end_step(self) -> StepReport:
        """Close the step: its samples without signal join the queue or are abandoned, in order of key, not of arrival."""
        assert self._step is not None, "begin_step first"
        assert not self._in_flight, (
            f"groups still in flight: {sorted(self._in_flight)}; submit None for abandoned ones"
        )
        tries: dict[tuple[str, str], int] = {}
        for _, ticket in sorted(self._set_aside.items()):
            # a short stream may bring a sample twice in one step: both count
            name = (ticket.source, ticket.sample_id)
            tries[name] = tries.get(name, 0) + ticket.tries + 1
        for name, attempts in tries.items():
            if attempts < self.settings.max_tries:
                self._queue[name] = attempts
            else:
                self._count(name[0], "abandoned")
        for source, counts in self._counts.items():
            old = self._totals.setdefault(source, dict.fromkeys(_COUNTS, 0))
            self._totals[source] = {name: old[name] + counts[name] for name in _COUNTS}
        counts = _total(self._counts)
        report = StepReport(
            self._step, counts, self._counts, self.settings.quota - counts["kept"], len(self._queue)
        )
        self._step, self._free, self._set_aside, self._counts = None, [], {}, {}
        return report

    def _count(self, source: str, *names: str) -> None:
        counts = self._counts.setdefault(source, dict.fromkeys(_COUNTS, 0))
        for name, extra in Counter(names).items():
            counts[name] += extra

    def state_dict(self) -> dict[str, Any]:
        """Everything but the settings, as JSON values; save the stream's position beside it."""
        return {
            "format": 1,
            "step": self._step,
            "free": [list(place) for place in self._free],
            "in_flight": _rows(self._in_flight.values()),
            "set_aside": _rows(self._set_aside.values()),
            "queue": [
                [source, sample_id, tries] for (source, sample_id), tries in self._queue.items()
            ],
            "credit": self._credit,
            "counts": {source: dict(counts) for source, counts in self._counts.items()},
            "totals": self.totals,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue exactly where `state_dict` was taken. Raises CheckpointError for a state of another shape."""
        try:
            if state["format"] != 1:
                raise ValueError(f"format {state['format']!r}")
            loaded = {
                "_step": None if state["step"] is None else int(state["step"]),
                "_free": [(int(position), int(attempt)) for position, attempt in state["free"]],
                "_in_flight": _tickets(state["in_flight"]),
                "_set_aside": _tickets(state["set_aside"]),
                "_queue": {
                    (str(source), str(name)): int(tries) for source, name, tries in state["queue"]
                },
                "_credit": float(state["credit"]),
                "_counts": _load_counts(state["counts"]),
                "_totals": _load_counts(state["totals"]),
            }
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(
                f"expected the sampler state of format 1, found something else ({error!r}); the "
                "checkpoint was written by another version or is damaged: resume from an earlier one"
            ) from error
        # only after all of it was read: a broken state changes nothing
        self.__dict__.update(loaded)


def _rows(tickets: Iterable[Ticket]) -> list[list[Any]]:
    return [[*ticket.key, ticket.source, ticket.sample_id, ticket.tries] for ticket in tickets]


def _tickets(rows: Iterable[Sequence[Any]]) -> dict[Key, Ticket]:
    tickets = [
        Ticket((int(step), int(position), int(attempt)), str(source), str(name), int(tries))
        for step, position, attempt, source, name, tries in rows
    ]
    return {ticket.key: ticket for ticket in tickets}


def _load_counts(by_source: Mapping[str, Mapping[str, int]]) -> dict[str, dict[str, int]]:
    return {
        str(source): {
            name: int(counts.get(name, 0) if name in _LATER_COUNTS else counts[name])
            for name in _COUNTS
        }
        for source, counts in by_source.items()
    }
