"""Process rewards: what an environment pays for turns when their rollout is over (mmrl.Environment.process_rewards).

    add_process_rewards(episodes)       # waits for all of them at once; each turn's reward grows by its own

How far back a reward counts is the algorithm's affair, as with rewards that come turn by turn.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from mmrl.environment import Environment, TurnRewards
from mmrl.errors import RewardError
from mmrl.types import Turn
from mmrl.workers.event_loop import run_here

if TYPE_CHECKING:
    from mmrl.rollout.episodes import Episode

__all__ = ["add_process_rewards", "asked"]


def add_process_rewards(episodes: Sequence[Episode]) -> None:
    """Ask the environments of episodes that have ended, and add what they say to the rewards of the turns and to `info`."""
    ended = [e for e in episodes if e.failure is None and e.turns and _pays(e.environment)]
    if ended:
        run_here(_every(ended))


def _pays(environment: Environment) -> bool:
    return type(environment).process_rewards is not Environment.process_rewards


async def asked(environment: Environment, turns: Sequence[Turn]) -> TurnRewards | None:
    """What the environment pays. Raises TypeError where its method is no `async def`, and what the method raises."""
    waiting = environment.process_rewards(turns)
    if not inspect.isawaitable(waiting):
        raise TypeError(
            "expected `async def process_rewards`, found one without `async`, which the other rollouts would wait for"
        )
    return await waiting


async def _every(episodes: Sequence[Episode]) -> None:
    await asyncio.gather(*(_add(e) for e in episodes))


async def _add(episode: Episode) -> None:
    began = time.monotonic()
    try:
        limit_s = episode.environment.process_limit_s
        try:
            found = await asyncio.wait_for(
                asked(episode.environment, tuple(episode.turns)), limit_s
            )
        except asyncio.TimeoutError as error:
            if time.monotonic() - began < limit_s:  # something's own deadline
                raise
            raise RewardError(
                f"expected process rewards within {limit_s:g} s (Environment.process_limit_s), found none"
            ) from error
        if found is None:
            return
        if not isinstance(found, TurnRewards):
            raise TypeError(f"expected mmrl.environment.TurnRewards, found {type(found).__name__}")
        if len(found.rewards) != len(episode.turns):
            raise ValueError(
                f"expected a process reward for each of {len(episode.turns)} turns, found {len(found.rewards)}"
            )
        if found.failure is not None:
            episode.failure, episode.accounts = RewardError(found.failure), dict(found.info)
            return
        episode.turns = [
            replace(turn, rewards=(turn.reward + more,))
            for turn, more in zip(episode.turns, found.rewards, strict=True)
        ]
        episode.info |= found.info
    except (Exception, SystemExit) as error:  # an environment is user code
        episode.failure = error
    except asyncio.CancelledError:  # of something that it waited for: nobody cancels this
        episode.failure = RewardError(
            "process_rewards ended with CancelledError: it cancelled itself"
        )
