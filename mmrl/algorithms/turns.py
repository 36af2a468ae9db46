"""Credit of single turns: group-relative advantages of what follows each turn, and which turns are worth training on.

    returns = discounted_returns([0.2, 0.0, 1.0], gamma=0.9)                     # of one rollout: [1.01, 0.9, 1.0]
    turn_advantages([[0.2, 1.0], [0.0, 0.0, 1.0]], gamma=0.9)                    # of a group: one for each turn
    highest_entropy([[0.9, 0.1], [0.5]], share=0.6)                              # which turns are kept: [[True, False], [True]]

`group_advantages` gives all turns of a rollout the advantage of its whole reward. Here a turn answers for what came with it and
after it alone. No critic is needed; the price is that turns of different rollouts are compared which were shown different things
(GiGPO, Feng et al. 2025, arXiv 2505.10978, compares turns in equal states alone).

Legend: G rollouts of a group, T turns of a rollout (ragged: each has its own number).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Literal, get_args

from mmrl.algorithms.advantages import (
    SIGNAL_TOLERANCE,
    AdvantageScale,
    centred,
    group_advantages,
)
from mmrl.errors import ConfigError, NonFiniteError, did_you_mean

__all__ = [
    "TurnGroup",
    "discounted_returns",
    "highest_entropy",
    "rewards_of_turns",
    "turn_advantages",
]

TurnGroup = Literal["turn_index", "all_turns"]


def rewards_of_turns(paid_T: Sequence[float], reward: float) -> list[float]:
    """What each turn of a rollout earned, (T,): what its environment paid for it, and in the last turn what `reward`, the whole
    rollout's, has beyond their sum (a score of the outcome, a penalty). A difference that is rounding alone counts as none; a
    single turn earned exactly `reward`. [] without turns."""
    if len(paid_T) == 1:
        return [reward]
    found = [float(p) for p in paid_T]
    beyond = reward - math.fsum(found)
    if found and abs(beyond) > SIGNAL_TOLERANCE:
        found[-1] += beyond
    return found


def discounted_returns(rewards_T: Sequence[float], gamma: float) -> list[float]:
    """sum over k >= t of gamma^(k - t) r_k for each turn t, (T,): gamma 0 its own reward, 1 all that follows, undiscounted."""
    found: list[float] = []
    for reward in reversed(rewards_T):
        found.append(reward + gamma * found[-1] if found else reward)
    return found[::-1]


def turn_advantages(
    rewards_GT: Sequence[Sequence[float]],
    gamma: float = 1.0,
    normalise: TurnGroup = "turn_index",
    scale: AdvantageScale = "std",
    baseline: Literal["grpo", "rloo"] = "grpo",
) -> list[list[float]]:
    """One advantage of each turn, from the rewards of the turns of a group's rollouts; of the shape of `rewards_GT`.

    Each turn's discounted return is compared with those of the group's turns at the same index ('turn_index'; rollouts that have
    ended are no part of it), or with those of all turns of the group ('all_turns'), as `group_advantages` compares rewards: minus
    their mean, or with baseline 'rloo' the mean of the others, and over their unbiased std (scale 'std') or not ('none'). Where all
    are equal, and for a turn that is alone at its index, the advantage is exactly 0: there is nothing to compare it with. With one
    turn per rollout both are `group_advantages` bit for bit.

    Rewards first become returns, which are then normalised. GRPO's process supervision (Shao et al. 2024, arXiv 2402.03300, section
    4.1.3) normalises rewards and then sums them, and MT-GRPO (Zeng et al. 2025, arXiv 2505.11821) adds a turn's and the outcome's
    advantages, each normalised by itself.
    Raises ConfigError for an unknown name and for 'rloo' with a scale, NonFiniteError for a NaN or infinite reward.
    """
    if normalise not in get_args(TurnGroup):
        raise ConfigError(
            f"expected normalise {' or '.join(get_args(TurnGroup))}, found {normalise!r}."
            f"{did_you_mean(normalise, get_args(TurnGroup))}"
        )
    if baseline == "rloo" and scale != "none":
        raise ConfigError(f"expected advantage scale 'none' with baseline 'rloo', found {scale!r}")
    returns_GT = [discounted_returns(rewards, gamma) for rewards in rewards_GT]
    places = [(g, t) for g, returns in enumerate(returns_GT) for t in range(len(returns))]
    compared: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for g, t in places:
        compared[t if normalise == "turn_index" else 0].append((g, t))
    found = [[0.0] * len(returns) for returns in returns_GT]
    for together in compared.values():
        values = [returns_GT[g][t] for g, t in together]
        advantages = (
            centred(values, "rloo")
            if baseline == "rloo"
            else group_advantages(values, scale).tolist()
        )
        for (g, t), advantage in zip(together, advantages, strict=True):
            found[g][t] = advantage
    return found


def highest_entropy(
    entropies_GT: Sequence[Sequence[float | None]], share: float
) -> tuple[list[list[bool]], float | None]:
    """Which turns of a group are trained on, of the shape of `entropies_GT`, and the lowest entropy among them (nats).

    entropies_GT: mean entropy of a turn's tokens; None: it is not in the loss whatever happens, and counts nowhere. Kept are the
    ceil(share * n) of the n others with the highest entropy, at least one; of equal ones the earlier rollout's and, within it, the
    earlier turn. A group whose rollouts all have one turn is kept whole, threshold None: there are no steps to choose among. So is
    one with nothing to choose.

    DART (Li et al. 2025, arXiv 2509.23866) trains on high-entropy steps, where a decision is made, the top 80 % of them.
    Raises ConfigError for a share outside (0, 1], NonFiniteError for an entropy that is not finite.
    """
    if not 0 < share <= 1:
        raise ConfigError(f"expected a share of turns in (0, 1], found {share}; 0.8 is DART's")
    known = [
        (entropy, g, t)
        for g, row in enumerate(entropies_GT)
        for t, entropy in enumerate(row)
        if entropy is not None
    ]
    if bad := [place for place in known if not math.isfinite(place[0])]:
        raise NonFiniteError(
            f"expected finite entropies, found {bad[0][0]} at turn {bad[0][2]} of rollout {bad[0][1]}; lower optim.lr or "
            "resume from the last checkpoint"
        )
    if not known or all(len(row) < 2 for row in entropies_GT):
        return [[entropy is not None for entropy in row] for row in entropies_GT], None
    # 0.55 * 100 is a little more than 55
    number = max(1, math.ceil(share * len(known) - 1e-9))
    chosen = sorted(known, key=lambda place: (-place[0], place[1], place[2]))[:number]
    places = {(g, t) for _, g, t in chosen}
    kept = [[(g, t) in places for t in range(len(row))] for g, row in enumerate(entropies_GT)]
    return kept, chosen[-1][0]
