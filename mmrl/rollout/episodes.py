"""Rollouts of several turns in environments (mmrl.environment), with any rollout engine.

    episodes = begin(policy, sample, task, 8, key)       # resets eight environments; [] where the task has none
    (rollouts,) = play(policy, engine, [episodes], sampling)

All rollouts take their turns together: one request to the engine for a whole group at the first turn, whose prompt is prefilled
once, and one for each rollout later. The history is prefilled anew at each turn: no KV cache is kept between turns. Noise belongs
to the rollout and its turn, so that the same tokens come out whatever else is played beside it.
"""

from __future__ import annotations

import itertools
import os
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from mmrl.config import RunConfig
from mmrl.coords import CoordFrame
from mmrl.environment import Environment, Observation, Outcome
from mmrl.errors import ConfigError, DataError, MediaError
from mmrl.files import check_text
from mmrl.policy.encode import Prompt
from mmrl.policy.policy import Policy
from mmrl.rollout.engine import Request, RolloutEngine, SamplingSettings
from mmrl.rollout.film import Film
from mmrl.rollout.process_rewards import add_process_rewards
from mmrl.task import Task, Template
from mmrl.types import Rollout, Sample, Score, StopReason, Turn
from mmrl.video.media import image_overrides
from mmrl.workers.scoring import checked, failed

__all__ = [
    "Beginning",
    "Episode",
    "Spent",
    "act",
    "begin",
    "begin_groups",
    "check_environments",
    "place_of",
    "play",
    "play_scripted",
    "play_written",
    "side_by_side",
    "turns_of",
]

T = TypeVar("T")
Waves = Callable[[Sequence[Sequence["Episode"]]], Iterable[Sequence[Sequence["Episode"]]]]
_PART = "reward"
_MOST_THREADS = 32


@dataclass
class Spent:
    """Seconds that rollouts took beside the policy's turns, by the clock on the wall: `environments` reset, stepped and closed
    (those side by side count once), and process `rewards`."""

    environments: float = 0.0
    rewards: float = 0.0

    @property
    def total(self) -> float:
        """Both."""
        return self.environments + self.rewards

    @contextmanager
    def counted(self, name: str) -> Iterator[None]:
        """Count what the block takes."""
        began = time.perf_counter()
        try:
            yield
        finally:
            setattr(self, name, getattr(self, name) + time.perf_counter() - began)


@dataclass
class Episode:
    """A rollout under way: `prompt` is all that precedes its next turn; `film` keeps what is shown, where it is asked for. `place`:
    its number in the group, from 1; `tree` and `shared`: see mmrl.rollout.trees. `accounts`: metrics of a rollout that its process
    rewards let fail."""

    sample: Sample
    task: Task
    environment: Environment
    key: tuple[int, ...]
    greedy: bool = False
    prompt: Prompt | None = None
    turns: list[Turn] = field(default_factory=list)
    info: dict[str, float] = field(default_factory=dict)
    accounts: dict[str, float] = field(default_factory=dict)
    failure: Exception | SystemExit | None = None
    parsed: bool = True
    closed: bool = False
    film: Film | None = None
    place: int = 1
    tree: int | None = None
    shared: int = 0

    @property
    def open(self) -> bool:
        """Whether a turn follows."""
        return self.failure is None and not (
            self.turns and (self.turns[-1].terminated or self.turns[-1].truncated)
        )

    def reset(self, seed: int) -> Observation | MediaError | DataError | None:
        """What the environment shows at first. MediaError and DataError are the sample's and handed on; other errors fail the
        rollout (None)."""
        try:
            return self.environment.reset(self.sample, seed)
        except (MediaError, DataError) as error:
            return error
        except (Exception, SystemExit) as error:  # an environment is user code
            self.failure = error
        return None

    def show(self, policy: Policy, first: Any) -> None:
        """Begin the chat. Raises MediaError and DataError of pictures and prompts that cannot be used; other errors fail the
        rollout."""
        try:
            visuals = _visuals(policy, first, self.sample)
            messages = [dict(m) for m in first.messages]
            self.prompt = policy.encoder.prompt_of(messages, visuals, self.sample.id, first.tools)
            if self.film is not None:
                self.film.show(first)
            self.environment.shown([v.size for v in visuals])
        except (MediaError, DataError):
            raise
        except (Exception, SystemExit) as error:
            self.failure = error

    def script(self, policy: Policy, player: np.random.Generator) -> Turn | None:
        """The next turn of the environment's scripted player; None where it fails, or has none, which fails the rollout."""
        try:
            text = self.environment.scripted(player)
            if text is None:
                raise DataError(
                    f"expected an environment with a scripted player, found none in {type(self.environment).__name__}; "
                    "give it the method `scripted`"
                )
            check_text(text, f"sample {self.sample.id}: a scripted turn")
        except (Exception, SystemExit) as error:  # an environment is user code
            self.failure = error
            return None
        ids = policy.processor.tokenizer(text, add_special_tokens=False)["input_ids"]
        written = (*ids, policy.eos_ids[0])
        return Turn(written, text, (0.0,) * len(written), StopReason.EOS)

    def step(self, turn: Turn) -> Outcome | None:
        """What the environment answers; None where it fails."""
        try:
            return self.environment.step(turn)
        except (Exception, SystemExit) as error:
            self.failure = error
        return None

    def take(self, policy: Policy, turn: Turn, outcome: Any) -> None:
        """The policy's turn, and what the environment answered to it: what is no Outcome fails the rollout."""
        assert self.prompt is not None
        self.turns.append(replace(turn, prompt=self.prompt, rewards=(0.0,), valid=(True,)))
        if self.failure is not None:
            return
        try:
            over = not outcome.ended and len(self.turns) >= self.environment.max_turns
            self.turns[-1] = replace(
                self.turns[-1],
                rewards=(float(outcome.reward),),
                terminated=outcome.terminated,
                truncated=outcome.truncated or over,
                parsed=outcome.parsed,
            )
            self.info = {str(name): float(value) for name, value in outcome.info.items()}
            self.parsed = outcome.parsed
            if self.film is not None:
                self.film.act(outcome)
            if self.open and outcome.observation is not None:
                visuals = _visuals(policy, outcome.observation, self.sample)
                messages = [dict(m) for m in outcome.observation.messages]
                self.prompt = policy.encoder.extended(
                    self.prompt, turn.token_ids, messages, visuals, self.sample.id
                )
                if self.film is not None:
                    self.film.show(outcome.observation)
                if visuals:
                    self.environment.shown([v.size for v in visuals])
        except (Exception, SystemExit) as error:
            self.failure = error

    def close(self) -> None:
        """Close the environment, the first time that this is called; an error of its is the rollout's failure."""
        if self.closed:
            return
        self.closed = True
        try:
            self.environment.close()
        except (Exception, SystemExit) as error:
            self.failure = self.failure or error

    def rollout(self) -> Rollout:
        """What came of it: its score is the sum of the rewards, with the last turn's info as metrics."""
        turns = tuple(self.turns) or (Turn((), "", (), StopReason.ERROR),)
        task, error = self.task.member(self.sample.task), self.failure
        told: dict[str, Any] = {
            "info": self.info,
            "film": self.film,
            "tree": self.tree,
            "shared_turns": self.shared,
        }
        if error is None:
            try:
                score = checked(
                    Score.combine(
                        {_PART: sum(t.reward for t in turns)},
                        {_PART: 1.0},
                        parsed=self.parsed,
                        reason=None if self.parsed else "parse_error: its last turn",
                        metrics=self.info,
                    ),
                    task.value_range,
                )
                return Rollout(turns, score, **told)
            except ValueError as wrong:  # a reward outside the task's range, info without an end
                error = wrong
        score = failed(f"reward_error: environment{place_of(error)}", error, (_PART,))
        score = replace(score, metrics=self.accounts)
        return Rollout(turns, score, error=score.reason, **told)


def place_of(error: BaseException) -> str:
    """Where an environment's own code raised, ' (FILE:LINE)'; '' for what is not of a file of its."""
    ours = str(Path(__file__).resolve().parents[1])
    frames = [
        f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(ours)
    ]
    return f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""


@dataclass(frozen=True)
class Beginning:
    """A group that is to begin; see `begin`."""

    sample: Sample
    task: Task
    count: int
    key: tuple[int, ...]
    greedy: bool = False
    filmed: int = 0


def begin(
    policy: Policy,
    sample: Sample,
    task: Task,
    count: int,
    key: tuple[int, ...],
    *,
    greedy: bool = False,
    begun: ExitStack | None = None,
    filmed: int = 0,
    spent: Spent | None = None,
) -> list[Episode]:
    """`count` rollouts of `sample`, reset with one seed made of `key`; [] where the task ends after one turn. Equal first
    observations share one prompt. The first `filmed` keep what they are shown. `spent` counts the time of resets.
    Raises MediaError and DataError for pictures and prompts that cannot be used.

    The end of `begun` closes those that were not played by then, whatever happened; when this raises, nothing is left open."""
    group = Beginning(sample, task, count, key, greedy, filmed)
    (found,) = begin_groups(policy, [group], begun=begun, spent=spent)
    if isinstance(found, Exception):
        raise found
    return found


def begin_groups(
    policy: Policy,
    asked: Sequence[Beginning],
    *,
    begun: ExitStack | None = None,
    spent: Spent | None = None,
    encoding: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> list[list[Episode] | MediaError | DataError]:
    """The rollouts of several groups, whose environments are reset side by side, as many as there are threads before their prompts
    are made: what they show is large. Of a group whose pictures or prompt cannot be used, the error, and nothing of it is left
    open. `encoding` holds the policy while prompts are made and while environments that compute are reset. Otherwise as `begin`."""
    spent = spent or Spent()
    found: list[list[Episode] | MediaError | DataError] = []
    with ExitStack() as stack:
        for part in _parts(asked):
            found += _begin_part(policy, part, stack, spent, encoding)
        kept = stack.pop_all()
        if begun is not None:
            begun.push(kept)
    return found


def _parts(asked: Sequence[Beginning]) -> Iterator[list[Beginning]]:
    """The groups in parts of as many rollouts as there are threads, or of one group."""
    part: list[Beginning] = []
    for one in asked:
        if part and sum(b.count for b in part) + one.count > _MOST_THREADS:
            yield part
            part = []
        part.append(one)
    if part:
        yield part


def _begin_part(
    policy: Policy,
    asked: Sequence[Beginning],
    stack: ExitStack,
    spent: Spent,
    encoding: Callable[[], AbstractContextManager[Any]],
) -> list[list[Episode] | MediaError | DataError]:
    """The groups of a part, which the end of `stack` closes: all are reset, then all are encoded."""
    found: list[list[Episode] | MediaError | DataError] = []
    for one in asked:
        try:
            found.append(_made(policy, one, stack))
        except (MediaError, DataError) as error:
            found.append(error)
    flat = [e for group in found if isinstance(group, list) for e in group]
    if not flat:
        return found
    computes = any(not e.environment.concurrent for e in flat)
    with encoding() if computes else nullcontext(), spent.counted("environments"):
        shown = side_by_side(flat, [partial(e.reset, _seed_of(e.key)) for e in flat])
    for number, group in enumerate(found):
        if not isinstance(group, list):
            continue
        first, shown = shown[: len(group)], shown[len(group) :]
        try:
            with encoding():
                _shown(policy, group, first)
        except (MediaError, DataError) as error:
            for episode in group:
                episode.close()
            found[number] = error
    return found


def _seed_of(key: Sequence[int]) -> int:
    return int(np.random.default_rng([abs(k) for k in key]).integers(1 << 31))


def _made(policy: Policy, asked: Beginning, stack: ExitStack) -> list[Episode]:
    """The episodes of a group, which the end of `stack` closes; [] where the task ends after one turn. Raises what the task does,
    with nothing left open."""
    found: list[Episode] = []
    with ExitStack() as own:
        for number in range(asked.count):
            environment = asked.task.member(asked.sample.task).environment(policy.template)
            if environment is None:
                return []
            film = Film(asked.sample) if number < asked.filmed else None
            place = number + 1
            episode = Episode(
                asked.sample,
                asked.task,
                environment,
                asked.key,
                asked.greedy,
                film=film,
                place=place,
            )
            own.callback(episode.close)
            found.append(episode)
        stack.push(own.pop_all())
    return found


def _shown(policy: Policy, episodes: Sequence[Episode], shown: Sequence[Any]) -> None:
    """What each was shown first becomes its prompt. Raises MediaError, DataError."""
    known: dict[str, Prompt] = {}
    for episode, first in zip(episodes, shown, strict=True):
        if isinstance(first, (MediaError, DataError)):
            raise first
        if episode.failure is None:
            episode.show(policy, first)
        if episode.prompt is not None:
            episode.prompt = known.setdefault(episode.prompt.fingerprint, episode.prompt)


def play(
    policy: Policy,
    engine: RolloutEngine,
    groups: Sequence[Sequence[Episode]],
    settings: SamplingSettings,
    waves: Waves | None = None,
    spent: Spent | None = None,
) -> list[tuple[Rollout, ...]]:
    """Play to their ends and close the environments; the rollouts of each group. `waves`: which of them begin together, after those
    before have ended (mmrl.rollout.trees); None: all at once. `spent` counts the time that is not the policy's."""
    spent = spent or Spent()
    with ExitStack() as stack:
        for episode in (e for group in groups for e in group):
            stack.callback(episode.close)
        for place, wave in enumerate(waves(groups) if waves is not None else [groups]):
            # scripts/torture_turns.py reads this number of a run's stack
            for number in itertools.count(1):
                first = place == 0 and number == 1
                asked = [parts for group in wave for parts in _asked(group, first=first)]
                if not asked:
                    break
                written = engine.generate([request for request, _ in asked], settings)
                acting = [
                    (episode, turn)
                    for (_, episodes), turns in zip(asked, written, strict=True)
                    for episode, turn in zip(episodes, turns, strict=True)
                ]
                act(policy, acting, spent)
        _end([e for group in groups for e in group], stack, spent)
    return [tuple(e.rollout() for e in group) for group in groups]


def play_scripted(
    policy: Policy, episodes: Sequence[Episode], keys: Sequence[Sequence[int]]
) -> list[Rollout]:
    """Play episodes by their environments' own scripted players (Environment.scripted), each with random numbers of its key, and
    close them. An environment without such a player fails its rollout."""
    players = [np.random.default_rng([abs(int(k)) for k in key]) for key in keys]
    return _played_by(policy, episodes, lambda e, number: e.script(policy, players[number]))


def play_written(
    policy: Policy,
    episodes: Sequence[Episode],
    written: Sequence[Sequence[Turn]],
    spent: Spent | None = None,
) -> list[Rollout]:
    """Play episodes by turns that were written before, of each its own, and close them. One that ends before its turns do has
    fewer. `spent` counts the time of it."""

    def turn(episode: Episode, number: int) -> Turn | None:
        done = len(episode.turns)
        return written[number][done] if done < len(written[number]) else None

    return _played_by(policy, episodes, turn, spent)


def _played_by(
    policy: Policy,
    episodes: Sequence[Episode],
    turn_of: Callable[[Episode, int], Turn | None],
    spent: Spent | None = None,
) -> list[Rollout]:
    """Episodes played until they are over or there is no turn (of an episode, and its number), and closed."""
    spent = spent or Spent()
    with ExitStack() as stack:
        for episode in episodes:
            stack.callback(episode.close)
        while acting := [
            (e, t)
            for number, e in enumerate(episodes)
            if e.open and (t := turn_of(e, number)) is not None
        ]:
            act(policy, acting, spent)
        _end(episodes, stack, spent)
    return [e.rollout() for e in episodes]


def act(policy: Policy, acting: Sequence[tuple[Episode, Turn]], spent: Spent) -> None:
    """The turns are taken side by side; each episode goes on with what came of its own."""
    with spent.counted("environments"):
        outcomes = side_by_side([e for e, _ in acting], [partial(e.step, t) for e, t in acting])
    for (episode, turn), outcome in zip(acting, outcomes, strict=True):
        episode.take(policy, turn, outcome)


def _end(episodes: Sequence[Episode], stack: ExitStack, spent: Spent) -> None:
    """Process rewards of rollouts that are over, whose environments `stack` then closes."""
    with spent.counted("rewards"):
        add_process_rewards(episodes)
    with spent.counted("environments"):
        stack.close()


def side_by_side(episodes: Sequence[Episode], calls: Sequence[Callable[[], T]]) -> list[T]:
    """What the calls give, those of environments that wait for other processes (Environment.concurrent) made by threads and the
    others here, meanwhile, one after the other."""
    waiting = [bool(e.environment.concurrent) for e in episodes]
    if len(calls) < 2 or not any(waiting):
        return [call() for call in calls]
    threads = ThreadPoolExecutor(min(sum(waiting), _MOST_THREADS), "environment")
    try:
        begun = [
            threads.submit(call) if waits else call
            for call, waits in zip(calls, waiting, strict=True)
        ]
        own = {n: call() for n, call in enumerate(begun) if not isinstance(call, Future)}
        return [c.result() if isinstance(c, Future) else own[n] for n, c in enumerate(begun)]
    finally:  # after an interrupt only what runs is waited for
        threads.shutdown(cancel_futures=True)


def _asked(group: Sequence[Episode], *, first: bool) -> Iterator[tuple[Request, list[Episode]]]:
    """The requests of a group's open rollouts, with the rollouts that each is for; `first`: nothing was asked for the group before
    these rollouts."""
    at = [(e, e.prompt) for e in group if e.open and e.prompt is not None]
    # as one question's answers
    if first and len({(id(prompt), e.greedy) for e, prompt in at}) == 1:
        yield Request(at[0][1], len(at), at[0][0].key, at[0][0].greedy), [e for e, _ in at]
    else:
        for e, prompt in at:
            key = () if e.greedy else (*e.key, len(e.turns) + 1, e.place)
            yield Request(prompt, 1, key, e.greedy), [e]


def _visuals(policy: Policy, observation: Observation, sample: Sample) -> list[Any]:
    """References to the pictures, kept for training; files are read as the sample's own (data.image.orientation)."""
    cache, own = policy.encoder.visuals, image_overrides(sample)
    found = [
        cache.image(os.fspath(x), own)
        if isinstance(x, (str, os.PathLike))
        else cache.frame(np.asarray(x))
        for x in observation.images
    ]
    policy.pin(found)
    return found


def turns_of(task: Task, kind: str, template: Template) -> int | None:
    """The most turns of a rollout of the task's samples of this kind; None where it has no environment."""
    environment = task.member(kind).environment(template)
    if environment is None:
        return None
    with suppress(Exception, SystemExit):  # what it cannot close it fails at in a rollout, too
        environment.close()
    return environment.max_turns


def check_environments(config: RunConfig, tasks: Sequence[tuple[Task, set[str]]]) -> None:
    """Raises ConfigError for settings that a task with an environment (given with the tasks of its samples) cannot be run with."""
    template = Template("", CoordFrame.ABS_ORIG)
    played = [
        (task, kind)
        for task, kinds in tasks
        for kind in sorted(kinds)
        if turns_of(task, kind, template) is not None
    ]
    for task, kind in played:
        if task.member(kind).in_group:
            raise ConfigError(
                f"expected rewards of an environment or of a whole group (in_group), found both of task '{task.name}', whose "
                "environment's rewards are the reward: `score_in_group` would never be asked; leave one of them out"
            )
    a = config.algorithm
    if a.mask_rollouts and not played:
        raise ConfigError(
            "expected a task with an environment for algorithm.mask_rollouts, whose rollouts take several turns, found none; for "
            "answers cut by rollout.max_new_tokens there is algorithm.overlong: mask; set algorithm.mask_rollouts: []"
        )
    if (changed := a.turns.changed()) and not played:
        raise ConfigError(
            f"expected a task with an environment for algorithm.turns ({', '.join(changed)}), whose rollouts take several turns, "
            "found none: an answer of one turn is its whole rollout; remove algorithm.turns"
        )
    if config.rollout.tree.roots and not played:
        raise ConfigError(
            "expected a task with an environment for rollout.tree, whose branches begin at turns, found none; set "
            "rollout.tree.roots: 0"
        )
    why = {
        "algorithm.contrast": (a.contrast.kind != "none", "a changed view of the prompt alone"),
        "algorithm.offline.per_group": (a.offline.per_group > 0, "demonstrations of one answer"),
        "algorithm.overlong: soft": (a.overlong == "soft", "a penalty on the length of one answer"),
        "eval.views": (bool(config.eval.views), "a changed view of the prompt alone"),
    }
    for key, (used, what) in why.items():
        if played and used:
            raise ConfigError(
                f"expected no {key} with task '{played[0][0].name}', whose rollouts take several turns in an environment: it "
                f"is about {what}; switch it off"
            )
