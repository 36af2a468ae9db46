"""The adaptive coefficient of the entropy bonus: its rule, its bounds, its state."""

from __future__ import annotations

import json

import pytest

from mmrl.algorithms import EntropyBonus, EntropySettings
from mmrl.config import load_config
from mmrl.errors import CheckpointError, ConfigError


def test_a_fixed_coefficient_stays() -> None:
    bonus = EntropyBonus(EntropySettings(coef=0.01))
    bonus.observe(0.0, 5.0)
    assert (
        bonus.coefficient == 0.01
        and not bonus.adaptive
        and bonus.metrics() == {"train/entropy_coef": 0.01}
    )
    assert EntropyBonus().coefficient == 0.0 and EntropyBonus().metrics() == {}


def test_it_rises_below_the_target_falls_above_and_acts_below_only() -> None:
    bonus = EntropyBonus(EntropySettings(target=0.5, delta=0.25, high=0.6))
    seen = []
    for entropy in (0.4, 0.5, 0.1, 0.6, 0.7, 9.0, 0.2):
        bonus.observe(entropy * 10, 10.0)
        seen.append((bonus.state_dict()["coef"], bonus.coefficient))
    assert seen == [
        (0.25, 0.25),
        (0.5, 0.5),
        (0.6, 0.6),
        (0.35, 0.0),
        (pytest.approx(0.1), 0.0),
        (0.0, 0.0),
        (0.25, 0.25),
    ]
    before = bonus.state_dict()
    bonus.observe(0.0, 0.0)
    assert bonus.state_dict() == before, "a step without tokens says nothing"


def test_it_goes_on_from_a_checkpoint() -> None:
    first, whole = (EntropyBonus(EntropySettings(target=0.5)) for _ in range(2))
    assert first.coefficient == 0.0, "nothing is known before the first step"
    for step in range(6):
        whole.observe(0.1 * step, 1.0)
        first.observe(0.1 * step, 1.0)
        again = EntropyBonus(EntropySettings(target=0.5))
        again.load_state_dict(json.loads(json.dumps(first.state_dict())))
        first = again
    assert first.state_dict() == whole.state_dict()
    for state in ({}, {"coef": "x", "last": None}, {"coef": 0.1}):
        with pytest.raises(CheckpointError, match="entropy bonus"):
            first.load_state_dict(state)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["algorithm.entropy.coef=-1"], "greater than or equal to 0"),
        (["algorithm.entropy.target=0"], "greater than 0"),
        (
            ["algorithm.entropy.target=0.3", "algorithm.entropy.coef=2"],
            "coef_min <= coef <= coef_max, found 0.0, 2.0 and 1.0",
        ),
        (["algorithm.entropy.coeff=1"], "Did you mean"),
    ],
)
def test_settings_that_mean_nothing_are_refused(overrides: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_config(None, overrides)
