"""Keys of before there was one algorithm section: read with a warning that names the new key, and equal in what they mean."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

from mmrl.config import with_new_names
from mmrl.errors import ConfigError
from mmrl.robotics.config import EmbodiedConfig, load_embodied
from mmrl.training.identity import check_identity, run_identity

PPO = ["rl.kind=ppo", "vla.value_head=true"]
OLD_DEFAULTS = {
    "kind": "grpo",
    "length_norm": "trajectory",
    "filter_low": 0.0,
    "filter_high": 1.0,
    "level": "chunk",
    "gamma": 0.99,
    "gae_lambda": 0.95,
    "value_coef": 0.5,
    "value_clip": 0.2,
    "huber_delta": 10.0,
    "value_lr": None,
    "critic_warmup": 0,
    "entropy_coef": 0.0,
    "bootstrap": "standard",
}
"""The rl section as the last version wrote it into every run's config.yaml, less what it still has."""


def old(*overrides: str) -> EmbodiedConfig:
    with pytest.warns(FutureWarning, match="old ones go with the next release"):
        return load_embodied(None, list(overrides))


def new(*overrides: str) -> EmbodiedConfig:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return load_embodied(None, list(overrides))


def recorded(**changed: Any) -> dict[str, Any]:
    """A configuration as the last version wrote it: every key is named, also those of algorithm that episodes did not read."""
    tree = new().model_dump(mode="json")
    del tree["algorithm"]["critic"]
    tree["algorithm"]["loss_aggregation"] = "token_mean"
    tree["rl"] |= OLD_DEFAULTS | changed
    if changed.get("kind") == "ppo":
        tree["vla"]["value_head"] = True
    return tree


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (["rl.length_norm=token"], ["algorithm.loss_aggregation=token_mean"]),
        (["rl.length_norm=trajectory"], []),
        (["rl.kind=grpo"], []),
        (["rl.entropy_coef=0.01"], ["algorithm.entropy.coef=0.01"]),
        (
            ["rl.filter_low=0.1", "rl.filter_high=0.9"],
            ["algorithm.filter={key: success, low: 0.1, high: 0.9}"],
        ),
        (["rl.filter_low=0", "rl.filter_high=1"], []),
        (["rl.filter_low=0.1"], ["algorithm.filter={key: success, low: 0.1}"]),
        (PPO, ["algorithm.advantage=gae", "vla.value_head=true"]),
        (
            [
                *PPO,
                "rl.level=chunk",
                "rl.gamma=0.9",
                "rl.gae_lambda=0.7",
                "rl.value_coef=1.0",
                "rl.value_clip=null",
                "rl.huber_delta=1.0",
                "rl.value_lr=1e-3",
                "rl.critic_warmup=3",
                "rl.bootstrap=never",
            ],
            [
                "algorithm.advantage=gae",
                "vla.value_head=true",
                "algorithm.critic={level: turn, gamma: 0.9, gae_lambda: 0.7, "
                "value_coef: 1.0, value_clip: null, huber_delta: 1.0, lr: 1e-3, warmup: 3, bootstrap: never}",
            ],
        ),
        (
            [*PPO, "rl.level=action"],
            ["algorithm.advantage=gae", "vla.value_head=true", "algorithm.critic.level=action"],
        ),
    ],
)
def test_an_old_key_means_what_the_new_one_does(before: list[str], after: list[str]) -> None:
    assert old(*before).model_dump() == new(*after).model_dump()


def test_the_warning_names_each_new_key_with_its_value() -> None:
    with pytest.warns(FutureWarning) as told:
        load_embodied(
            None, ["rl.kind=ppo", "vla.value_head=true", "rl.value_lr=0.01", "rl.level=chunk"]
        )
    (message,) = (str(w.message) for w in told)
    for words in (
        "rl.kind ppo is algorithm.advantage gae",
        "rl.value_lr 0.01 is algorithm.critic.lr 0.01",
        "rl.level chunk is algorithm.critic.level turn",
    ):
        assert words in message


@pytest.mark.parametrize(
    ("group_size", "low", "rates"), [(8, 0.1, 8), (10, 0.1, 10), (8, 0.25, 8), (5, 0.2, 5)]
)
def test_bounds_that_were_included_still_admit_the_rates_they_admitted(
    group_size: int, low: float, rates: int
) -> None:
    """SimpleVLA-RL's groups of 8 never meet 0.1 or 0.9, so these stay as written; a bound that can be met moves by 1e-6."""
    high = 1 - low
    f = old(
        f"rl.filter_low={low}", f"rl.filter_high={high}", f"rollout.group_size={group_size}"
    ).algorithm.filter
    assert f.low is not None and f.high is not None
    for finished in range(2, rates + 1):
        for won in range(finished + 1):
            rate = won / finished
            assert (f.low < rate < f.high) == (low - 1e-9 <= rate <= high + 1e-9), (won, finished)
    assert (f.low == low) == (group_size == 8 and low == 0.1)


def test_old_and_new_key_may_not_contradict_each_other() -> None:
    with pytest.raises(
        ConfigError,
        match=r"rl\.kind grpo is called algorithm\.advantage grpo now, and algorithm\.advantage rloo",
    ):
        load_embodied(
            None, ["rl.kind=grpo", "algorithm.advantage=rloo", "algorithm.advantage_scale=none"]
        )
    with pytest.raises(
        ConfigError, match=r"algorithm\.critic\.gamma 0\.8 is given as well: keep one of them"
    ):
        load_embodied(None, [*PPO, "rl.gamma=0.9", "algorithm.critic.gamma=0.8"])
    with pytest.raises(ConfigError, match=r"algorithm\.filter judges both by one key"):
        load_embodied(None, ["rl.reward=shaped", "rl.filter_low=0.1"])
    with pytest.raises(
        ConfigError, match=r"algorithm\.advantage: Input should be 'grpo', .*found 'pop'"
    ):
        old("rl.kind=pop")


@pytest.mark.parametrize(
    ("changed", "settings"),
    [
        ({}, []),
        (
            {"length_norm": "token", "entropy_coef": 0.01, "filter_low": 0.1, "filter_high": 0.9},
            [
                "algorithm.loss_aggregation=token_mean",
                "algorithm.entropy.coef=0.01",
                "algorithm.filter={key: success, low: 0.1, high: 0.9}",
            ],
        ),
        (
            {"kind": "ppo", "gamma": 0.9, "level": "action"},
            [
                "algorithm.advantage=gae",
                "vla.value_head=true",
                "algorithm.critic={gamma: 0.9, level: action}",
            ],
        ),
    ],
)
def test_a_run_whose_record_has_old_keys_is_the_same_run(
    changed: dict[str, Any], settings: list[str]
) -> None:
    before = recorded(**changed)
    with pytest.warns(FutureWarning):
        now = EmbodiedConfig.model_validate(before)
    assert now.model_dump() == new(*settings).model_dump()
    check_identity(run_identity(before), run_identity(now.model_dump(mode="json")))
    silent = new().model_dump(mode="json")["algorithm"]["critic"]  # as the last records have it
    before["algorithm"]["critic"] = silent
    with pytest.warns(FutureWarning):
        assert EmbodiedConfig.model_validate(before) == now
    check_identity(run_identity(before), run_identity(now.model_dump(mode="json")))
    for other, words in (
        ("algorithm.clip_low=0.1", "algorithm.clip_low was 0.2, now 0.1"),
        ("algorithm.entropy.coef=0.5", "algorithm.entropy.coef was"),
    ):
        with pytest.raises(ConfigError, match=words):
            check_identity(
                run_identity(before), run_identity(new(*settings, other).model_dump(mode="json"))
            )


def test_a_mapping_without_old_keys_is_left_alone() -> None:
    for tree in ({}, {"rl": {"reward": "shaped"}, "algorithm": {"clip_low": 0.1}}, {"rl": None}):
        assert with_new_names(tree) == (tree, [])
