"""The entropy bonus: what keeps a policy from collapsing onto a few answers, with a fixed or an adaptive coefficient.

The loss of each token is lowered by coefficient * H, H the entropy (nats) of the whole distribution it was drawn from, with
gradient; tokens are weighed as `loss_aggregation` weighs the policy term (verl's entropy_coeff; with token_mean also TRL's
entropy_coef). Demonstrations get none.

The adaptive coefficient is Skywork-OR1's (arXiv 2505.22312, section 4.3) as TRL keeps it (use_adaptive_entropy): after each
optimizer step it rises by `delta` where the mean entropy of the step's tokens was at most `target` and falls by `delta` where it
was above, between `low` and `high`; it acts in a step only if the entropy of the step before was at most the target.

    bonus = EntropyBonus(EntropySettings(target=0.3))
    ... loss of a step with bonus.coefficient ...; bonus.observe(entropy_sum, tokens)     # sums over all processes
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mmrl.errors import CheckpointError, ConfigError

__all__ = ["EntropyBonus", "EntropySettings"]


@dataclass(frozen=True, kw_only=True)
class EntropySettings:
    """TRL's constants, except that nothing is on by default."""

    coef: float = 0.0
    """The coefficient; with a target the first one."""
    target: float | None = None
    """Nats per token; None: the coefficient stays as it is."""
    delta: float = 0.005
    low: float = 0.0
    high: float = 1.0

    def __post_init__(self) -> None:
        if not self.coef >= 0 or not self.delta > 0 or not (self.target is None or self.target > 0):
            raise ConfigError(
                f"expected entropy.coef at least 0, delta above 0 and target above 0 or none, found {self.coef}, "
                f"{self.delta} and {self.target}"
            )
        if self.target is not None and not 0 <= self.low <= self.coef <= self.high:
            raise ConfigError(
                f"expected 0 <= entropy.coef_min <= coef <= coef_max, found {self.low}, {self.coef} and {self.high}"
            )


class EntropyBonus:
    """The coefficient of the next optimizer step; a state machine of two numbers, the same on every process."""

    def __init__(self, settings: EntropySettings | None = None) -> None:
        self.settings = settings or EntropySettings()
        self._coef = self.settings.coef
        # mean entropy of the last step: before the first one nothing is known, and nothing acts
        self._last = math.inf

    @property
    def adaptive(self) -> bool:
        """Whether the coefficient follows a target."""
        return self.settings.target is not None

    @property
    def coefficient(self) -> float:
        """What the loss of this optimizer step is to use; 0: no gradient of the entropy is needed."""
        target = self.settings.target
        return self._coef if target is None or self._last <= target else 0.0

    def observe(self, entropy_sum: float, tokens: float) -> None:
        """An optimizer step was taken, on tokens of this total entropy (nats), all processes together. Without tokens: nothing."""
        s = self.settings
        if s.target is None or tokens <= 0:
            return
        self._last = entropy_sum / tokens
        up = self._last <= s.target
        self._coef = min(self._coef + s.delta, s.high) if up else max(self._coef - s.delta, s.low)

    def metrics(self) -> dict[str, float]:
        """For the step's row: the coefficient that the next optimizer step would have; none where there never is one."""
        return (
            {"train/entropy_coef": self.coefficient}
            if self.adaptive or self.settings.coef > 0
            else {}
        )

    def state_dict(self) -> dict[str, Any]:
        """JSON values; null before the first step."""
        return {"coef": self._coef, "last": None if math.isinf(self._last) else self._last}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict`. Raises CheckpointError for a state of another shape."""
        try:
            coef, last = (
                float(state["coef"]),
                math.inf if state["last"] is None else float(state["last"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"expected the state of the entropy bonus (coef, last), found something else ({error!r}); resume "
                "from an earlier checkpoint"
            ) from error
        self._coef, self._last = coef, last
