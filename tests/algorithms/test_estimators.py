"""Baselines, GDPO, whitening, EMA scale and difficulty weights against independent naive computations."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmrl.algorithms import (
    EmaScale,
    EmaSettings,
    centred,
    difficulty_weights,
    gdpo_advantages,
    group_advantages,
    group_std,
    whiten,
)
from mmrl.errors import CheckpointError, ConfigError, NonFiniteError, RewardError

unit = st.integers(0, 16).map(lambda n: n / 16)
group = st.lists(unit, min_size=2, max_size=9)


@given(group)
def test_grpo_and_rloo_are_the_same_direction(rewards: list[float]) -> None:
    g, r = centred(rewards), centred(rewards, "rloo")
    n = len(rewards)
    assert g == pytest.approx([x - np.mean(rewards) for x in rewards])
    naive = [x - np.mean(rewards[:i] + rewards[i + 1 :]) for i, x in enumerate(rewards)]
    assert r == pytest.approx(naive) and r == pytest.approx([x * n / (n - 1) for x in g])


@given(group, st.data())
def test_opo_weighs_its_baseline_by_length(rewards: list[float], data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(1, 50), min_size=len(rewards), max_size=len(rewards)))
    flat = np.repeat(rewards, lengths).mean()  # the mean over tokens
    assert centred(rewards, "opo", lengths) == pytest.approx([r - flat for r in rewards], abs=1e-12)
    assert centred(rewards, "opo", [7] * len(rewards)) == pytest.approx(centred(rewards))


@given(group)
def test_pass_k_rewards_only_the_best(rewards: list[float]) -> None:
    found = centred(rewards, "pass_k")
    ordered = sorted(rewards, reverse=True)
    assert sum(found) == pytest.approx(ordered[0] - ordered[1]) and min(found) >= 0
    assert all(a == 0 or r == ordered[0] for a, r in zip(found, rewards, strict=True))


@pytest.mark.parametrize("kind", ["grpo", "rloo", "opo", "pass_k"])
def test_equal_rewards_and_lonely_ones_give_exactly_zero(kind: Any) -> None:
    assert centred([0.1] * 7, kind, [3] * 7) == [0.0] * 7 and centred([0.4], kind, [3]) == [0.0]
    with pytest.raises(NonFiniteError):
        centred([0.0, math.nan], kind, [1, 1])


def test_unknown_estimators_and_missing_lengths_are_named() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'rloo'"):
        centred([0.0, 1.0], "rlo")  # type: ignore[arg-type]
    for lengths in (None, [3], [1, 2, 3], [0, 0]):
        with pytest.raises(ConfigError, match="one length in tokens per reward"):
            centred([0.0, 1.0], "opo", lengths)
    assert centred([0.0, 1.0], "opo", [1, 0]) == [0.0, 1.0], (
        "an empty completion has no weight in the baseline"
    )


parts_group = st.lists(
    st.fixed_dictionaries({"acc": unit, "fmt": unit, "note": unit}), min_size=2, max_size=8
)


@given(parts_group, unit, unit)
def test_gdpo_normalises_each_part_before_the_sum(
    parts: list[dict[str, float]], w: float, v: float
) -> None:
    naive = np.zeros(len(parts))
    for name, weight in (("acc", w), ("fmt", v)):
        column = np.array([p[name] for p in parts])
        naive += weight * (column - column.mean()) / (column.std(ddof=1) + 1e-6)
    assert gdpo_advantages(parts, {"acc": w, "fmt": v, "note": 0.0}) == pytest.approx(
        naive.tolist(), abs=1e-5
    )


def test_gdpo_keeps_a_small_part_from_being_swamped() -> None:
    parts = [{"acc": 1.0, "fmt": 0.0}, {"acc": 0.0, "fmt": 0.01}]
    assert gdpo_advantages(parts, {"acc": 0.5, "fmt": 0.5}) == pytest.approx([0, 0], abs=1e-4), (
        "equal say"
    )
    plain = group_advantages([0.5, 0.005]).tolist()
    assert plain[0] > 0.7 > -0.7 > plain[1]


def test_gdpo_without_a_part_is_an_error_that_names_it() -> None:
    with pytest.raises(
        RewardError, match=r"part 'fmt' on every completion .* completion 1 \(it has \['acc'\]\)"
    ):
        gdpo_advantages([{"acc": 1.0, "fmt": 1.0}, {"acc": 0.0}], {"acc": 0.9, "fmt": 0.1})
    with pytest.raises(RewardError, match=r"completion 0 \(it has \['acc'\]\)"):
        gdpo_advantages([{"acc": 1.0}, {"fmt": 0.0}, {}], {"fmt": 0.1})
    assert gdpo_advantages([{"acc": 1.0}, {"acc": 0.0}], {"acc": 1.0, "fmt": 0.0}), (
        "an unweighted part is not read"
    )


@given(st.lists(group, min_size=1, max_size=6), st.randoms())
def test_whitening_is_over_all_completions_and_ignores_the_order_of_groups(
    groups: list[list[float]], random: Any
) -> None:
    flat = np.array([x for g in groups for x in g])
    std = flat.std(ddof=1)
    found = whiten(groups)
    if max(flat) > min(flat):
        assert [x for g in found for x in g] == pytest.approx(
            ((flat - flat.mean()) / (std + 1e-6)).tolist()
        )
    else:
        assert not any(x for g in found for x in g)
    order = list(range(len(groups)))
    random.shuffle(order)
    shuffled = whiten([groups[i] for i in order])
    assert [shuffled[order.index(i)] for i in range(len(groups))] == found, "to the last bit"


@given(group)
def test_group_std_is_unbiased(rewards: list[float]) -> None:
    assert group_std(rewards) == pytest.approx(np.std(rewards, ddof=1))


# EMA-GRPO


def naive_ema(
    steps: list[list[tuple[str, list[float]]]], decay: float, least: float, limit: float
) -> list[list[list[float]]]:
    """OneThinker's rule written down once more, with numpy and without state objects."""
    ema: dict[str, float] = {}
    out = []
    for step in steps:
        stds: dict[str, list[float]] = {}
        for task, rewards in step:
            if max(rewards) > min(rewards):
                stds.setdefault(task, []).append(float(np.std(rewards, ddof=1)))
        for task, values in stds.items():
            ema[task] = (
                decay * ema[task] + (1 - decay) * float(np.mean(values))
                if task in ema
                else float(np.mean(values))
            )
        rows = []
        for task, rewards in step:
            offsets = np.array(rewards) - np.mean(rewards)
            advantages = offsets / max(ema.get(task, 0.0), least)
            if np.abs(advantages).max() > limit:
                advantages = offsets / (np.std(rewards, ddof=1) + 1e-6)
            rows.append(advantages.tolist())
        out.append(rows)
    return out


step_of_groups = st.lists(st.tuples(st.sampled_from(["a", "b"]), group), min_size=1, max_size=5)


@given(
    st.lists(step_of_groups, min_size=1, max_size=6),
    st.sampled_from([0.0, 0.5, 0.99]),
    st.sampled_from([5.0, 0.9]),
)
def test_the_scale_within_groups_is_its_definition(
    steps: list[list[tuple[str, list[float]]]], decay: float, limit: float
) -> None:
    ema = EmaScale(EmaSettings(decay=decay, limit=limit, within=True))
    found = []
    for number, step in enumerate(steps):
        ema.update(step)
        found.append([ema.advantages(task, rewards) for task, rewards in step])
        if number == 2:  # killed and resumed
            state = json.loads(json.dumps(ema.state_dict()))
            ema = EmaScale(EmaSettings(decay=decay, limit=limit, within=True))
            ema.load_state_dict(state)
    for mine, naive in zip(found, naive_ema(steps, decay, 1e-3, limit), strict=True):
        for a, b in zip(mine, naive, strict=True):
            assert a == pytest.approx(b, abs=2e-4)


PEER = json.loads((Path(__file__).parent / "peer_ema.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize(("decay", "limit"), [(0.99, 5.0), (0.5, 5.0), (0.5, 1.2)])
def test_ema_is_what_onethinkers_own_code_computes(decay: float, limit: float) -> None:
    """Its functions ran elsewhere on these steps: advantages, mean and std per task, groups that hit the guard. They count in
    float32, where E[r^2] - E[r]^2 of a task that spreads by 0.01 about 0.5 has a relative error of 2e-7 * 0.25 / 1e-4."""
    ema, fallbacks = EmaScale(EmaSettings(decay=decay, limit=limit)), 0
    for step, theirs in zip(
        PEER["steps"], PEER["found"][f"decay={decay} limit={limit}"], strict=True
    ):
        groups = [(g["task"], g["rewards"]) for g in step]
        ema.update(groups)
        for (task, rewards), expected in zip(groups, theirs["advantages"], strict=True):
            assert ema.advantages(task, rewards) == pytest.approx(expected, rel=5e-4, abs=1e-5)
        assert {t: ema.std(t) for t in theirs["std"]} == pytest.approx(theirs["std"], rel=5e-4)
        assert {t: ema.metrics()[f"{t}/mean"] for t in theirs["mean"]} == pytest.approx(
            theirs["mean"], rel=1e-5
        )
        fallbacks += ema.fallbacks
        state = json.loads(json.dumps(ema.state_dict()))  # killed and resumed
        ema = EmaScale(EmaSettings(decay=decay, limit=limit))
        ema.load_state_dict(state)
    assert (fallbacks > 0) == ((decay, limit) != (0.5, 5.0)), "the guard is among the numbers"


def test_only_ema_counts_the_spread_between_prompts() -> None:
    """Long-run scales at decay 0.99: OneThinker's tracker told the first of each pair, the second is the mean std in groups."""
    rng = np.random.default_rng(5)
    kinds = {
        "p = 0.5": (lambda: (rng.random((32, 8)) < 0.5).astype(float), 0.5),
        "p ~ Beta(0.5, 0.5)": (
            lambda: (rng.random((32, 8)) < rng.beta(0.5, 0.5, (32, 1))).astype(float),
            0.45,
        ),
        "IoU-like": (lambda: rng.random((32, 1)) + 0.05 * rng.standard_normal((32, 8)), 0.048),
    }
    for kind, (draw, inside) in kinds.items():
        pooled, within = EmaScale(), EmaScale(EmaSettings(within=True))
        for _ in range(300):
            groups = [("t", row) for row in draw().tolist()]
            pooled.update(groups)
            within.update(groups)
        assert pooled.std("t") == pytest.approx(PEER["long_run"][kind], abs=0.01), kind
        assert within.std("t") == pytest.approx(inside, abs=0.025), kind


def test_ema_within_keeps_tasks_apart_and_falls_back() -> None:
    ema = EmaScale(EmaSettings(within=True))
    ema.update([("binary", [0.0, 1.0]), ("iou", [0.50, 0.52])])
    assert ema.advantages("binary", [0.0, 1.0]) == pytest.approx([-0.5 / 0.5**0.5, 0.5 / 0.5**0.5])
    assert (
        ema.advantages("iou", [0.50, 0.52]) == pytest.approx([-(0.5**0.5), 0.5**0.5])
        and ema.fallbacks == 0
    )
    found = ema.advantages("iou", [0.0, 1.0])  # 50 times the usual spread
    assert found == pytest.approx([-(0.5**0.5), 0.5**0.5], rel=1e-5) and ema.fallbacks == 1, (
        "divided by its own std"
    )
    before = ema.state_dict()
    ema.update([("iou", [0.3, 0.3])])
    assert ema.state_dict() == before, (
        "a group without signal says nothing of the spread inside groups"
    )
    assert ema.advantages("unseen", [0.5, 0.5]) == [0.0, 0.0]


def test_ema_refuses_other_states_and_settings() -> None:
    with pytest.raises(CheckpointError, match="earlier checkpoint"):
        EmaScale().load_state_dict({"mean": {"a": 0.5}, "square": {"a": "x"}})
    for state in (
        {"mean": {}},
        {"mean": {}, "square": {}, "std": {}},
        {"mean": {"a": 1}, "square": {"b": 1}},
        {},
    ):
        with pytest.raises(CheckpointError, match="earlier checkpoint"):
            EmaScale().load_state_dict(state)
    inside = {"mean": {"a": 0.5}, "std": {"a": 0.1}}
    with pytest.raises(
        CheckpointError,
        match=r"of advantage_scale ema, found that of ema_within .*advantage_scale=ema_within",
    ):
        EmaScale().load_state_dict(inside)
    EmaScale(EmaSettings(within=True)).load_state_dict(inside)
    EmaScale().load_state_dict({"mean": {}, "std": {}})  # of a run that never used it
    with pytest.raises(CheckpointError, match="'b'"):
        EmaScale().load_state_dict({"mean": {"a": 1}, "square": {"a": 1, "b": 1}})
    for wrong in (
        {"decay": 1.0},
        {"decay": 1.5},
        {"decay": -0.5},
        {"min_std": 0.0},
        {"limit": 0.0},
    ):
        with pytest.raises(ConfigError, match="expected ema"):
            EmaSettings(**wrong)


def test_ema_settings_are_onethinkers_and_cannot_be_changed() -> None:
    assert (EmaSettings().decay, EmaSettings().limit, EmaSettings().min_std) == (0.99, 5.0, 1e-3)
    with pytest.raises(TypeError):
        EmaSettings(0.9)  # type: ignore[misc]
    with pytest.raises(FrozenInstanceError):
        EmaSettings().decay = 0.5  # type: ignore[misc]


@pytest.mark.parametrize("within", [False, True])
def test_ema_of_what_was_never_seen_or_never_differs(within: bool) -> None:
    ema = EmaScale(EmaSettings(within=within))
    assert ema.std("never seen") == ema.settings.min_std and ema.fallbacks == 0
    ema.update([("same", [0.2, 0.2, 0.2])])  # rounding leaves E[r^2] - E[r]^2 below 0
    assert ema.std("same") == ema.settings.min_std
    ema.update([("t", [0.0, 1.0, 0.5]), ("t", [0.2, 0.4])])
    assert ema.metrics()["t/mean"] == pytest.approx((0.5 + 0.3) / 2 if within else 2.1 / 5)


def test_ema_at_its_limit_keeps_the_running_scale() -> None:
    ema = EmaScale(EmaSettings(within=True, limit=0.5, decay=0.0))
    ema.load_state_dict({"mean": {"t": 0.5}, "std": {"t": 1.0}})
    assert ema.advantages("t", [0.0, 1.0]) == [-0.5, 0.5] and ema.fallbacks == 0


# difficulty


@given(st.lists(unit, min_size=1, max_size=8))
def test_difficulty_weights_are_their_formulas(levels: list[float]) -> None:
    m = np.array(levels)
    assert difficulty_weights(levels, "univg_exp") == pytest.approx(np.exp(1 - m).tolist())
    assert difficulty_weights(levels, "univg_power", power=2.5) == pytest.approx(
        ((1.05 - m) ** 2.5).tolist()
    )
    assert difficulty_weights(levels, "univg_log") == pytest.approx(
        np.maximum(0, -np.log(0.02 + m)).tolist(), abs=1e-12
    )
    soft = np.exp(-m / 2) / np.exp(-m / 2).sum() * len(m)
    assert difficulty_weights(levels, "softmax") == pytest.approx(soft.tolist()) and np.mean(
        soft
    ) == pytest.approx(1)
    assert difficulty_weights(levels, "none") == [1.0] * len(levels)


@pytest.mark.parametrize("kind", ["univg_exp", "univg_power", "univg_log", "softmax"])
def test_harder_prompts_never_weigh_less_and_no_weight_turns_the_gradient_round(kind: Any) -> None:
    weights = difficulty_weights([i / 50 for i in range(51)], kind)
    assert all(a >= b >= 0 for a, b in itertools.pairwise(weights)) and weights[0] > weights[-1]
    assert difficulty_weights([-3.0, 7.0], kind) == difficulty_weights([0.0, 1.0], kind), (
        "m is clipped to [0, 1]"
    )


def test_an_unknown_difficulty_is_named() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'univg_exp'"):
        difficulty_weights([0.5], "univg_ex")  # type: ignore[arg-type]
